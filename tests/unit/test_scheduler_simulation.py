"""The scheduler under random workers: joins, crashes, failures, cancels, stale events. `check` runs after every event."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from waypath.controller import commands as c
from waypath.controller.graph import Program


@pytest.mark.parametrize("seed", range(40))
def test_random_crashes_keep_every_invariant_and_everything_ends(
    seed: int, new_bench: Callable[..., Any], programs: dict[str, Callable[[], Program]]
) -> None:
    rng = random.Random(seed)
    bench = new_bench(max_in_flight=rng.choice([1, 2, 8]))
    if rng.random() < 0.8:
        bench.up()
    stale: list[c.NodeFinished] = []
    submitted = 0
    for _ in range(150):
        action = rng.choices(
            ["submit", "finish", "fail", "lose", "join", "ready", "remove", "cancel", "stale"],
            [8, 60, 1, 4, 12, 12, 1, 1, 4],
        )[0]
        runnable = bench.runnable()
        absent = [w for ws in bench.scheduler.resources.slices.values() for w in ws if w not in bench.workers]
        members = [m for ms in bench.scheduler.resources.pools.values() for m in ms if m in bench.workers]
        if action == "submit":
            submitted += 1
            bench.submit(f"e{submitted}", programs[rng.choice(sorted(programs))](), rng.choice(["run", "client"]))
        elif action in ("finish", "fail") and runnable:
            worker, execution_id, node_id = rng.choice(runnable)
            fake = bench.workers[worker]
            attempt = fake.pending[execution_id, node_id][0]
            stale.append(c.NodeFinished(worker, fake.incarnation, execution_id, node_id, attempt))
            getattr(bench, action)(worker, execution_id, node_id)
        elif action == "lose" and bench.workers:
            bench.feed(c.WorkerLost(rng.choice(sorted(bench.workers)), "killed"))
        elif action == "join" and absent:
            bench.join(rng.choice(absent))
        elif action == "ready" and members:
            bench.ready(rng.choice(members))
        elif action == "remove" and members:
            member = rng.choice(members)
            bench.feed(c.PoolMemberRemoved(member.split("-")[0], member))
        elif action == "cancel" and submitted:
            bench.feed(c.ExecutionCancelled(f"e{rng.randint(1, submitted)}", "asked to"))
        elif action == "stale" and stale:
            bench.feed(rng.choice(stale))
    bench.up().drain()
    assert set(bench.outcomes) == {f"e{i}" for i in range(1, submitted + 1)}
    assert not bench.scheduler.running and not bench.scheduler.queue and len(bench.scheduler.objects) == 0
    assert not any(worker.objects or worker.pending for worker in bench.workers.values())


def test_the_same_events_give_the_same_commands(
    new_bench: Callable[..., Any], programs: dict[str, Callable[[], Program]]
) -> None:
    def story() -> list[c.Command]:
        bench = new_bench().up()
        for number, name in enumerate(sorted(programs)):
            bench.submit(f"e{number}", programs[name]())
        bench.feed(c.WorkerLost("inference-1", "killed"))
        bench.up().drain()
        return list(bench.commands)

    assert story() == story()


def test_results_do_not_depend_on_crashes_of_retryable_nodes(
    new_bench: Callable[..., Any], programs: dict[str, Callable[[], Program]]
) -> None:
    for victim in ("inference-0", "inference-1", "reward-0"):
        for moment in range(12):
            bench = new_bench().up()
            bench.submit("e", programs["step"]())
            for _ in range(moment):
                if "e" not in bench.outcomes:
                    bench.finish(*bench.runnable()[0])
            bench.feed(c.WorkerLost(victim, "killed"))
            bench.up().drain()
            assert bench.outcomes["e"].outcome == "done"
            assert len(bench.outcomes["e"].results) == 9
