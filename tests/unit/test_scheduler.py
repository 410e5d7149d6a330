"""The scheduler told one story at a time: events in, commands out. Every event is followed by all invariants (conftest)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from waypath.controller import commands as c
from waypath.controller.execution import EXECUTION_TRANSITIONS, TASK_TRANSITIONS, ExecutionState, TaskState
from waypath.controller.graph import Pool, Program, ProgramBuilder, Slice
from waypath.controller.placement import spread
from waypath.controller.scheduler import KEPT_OVER, MAX_QUEUED
from waypath.proto.errors import (
    CancelledError,
    GraphError,
    IllegalTransitionError,
    LocalError,
    NameTakenError,
    RewardError,
    WorkerLostError,
)

Makers = dict[str, Callable[[], Program]]


def of(kind: type[Any], commands: list[c.Command]) -> list[Any]:
    return [command for command in commands if isinstance(command, kind)]


REWARD = Slice("reward-0")


def single(place: Slice | Pool = REWARD, **options: Any) -> Program:
    b = ProgramBuilder("single")
    b.call("s", "m", on=place, node_id="n", options=options)
    return b.build()


def test_one_message_per_worker_all_nodes_ahead_with_the_places_of_inputs(bench: Any, programs: Makers) -> None:
    commands = bench.submit("e", programs["step"]())
    sent = {command.worker: command for command in of(c.Execute, commands)}
    assert list(sent) == ["inference-0", "inference-1", "reward-0", "trainer-0", "trainer-1"]
    assert sent["inference-0"].nodes == (("generate_0", 0), ("generate_1", 0))
    assert sent["inference-1"].nodes == (("generate_2", 0), ("generate_3", 0))
    assert sent["reward-0"].nodes == tuple((f"score_{i}", 0) for i in range(4))
    assert sent["reward-0"].locations["generate_2"] == ("inference-1",)
    assert sent["trainer-1"].nodes == (("train", 0),)
    assert sent["trainer-1"].locations["score_3"] == ("reward-0",)
    assert sent["trainer-0"].args == {"step": 1}
    assert {command.cause for command in commands} == {f"event {bench.scheduler._events}"}


def test_a_program_is_installed_once_per_incarnation(bench: Any, programs: Makers) -> None:
    assert len(of(c.InstallProgram, bench.submit("e1", programs["step"]()))) == 5
    assert of(c.InstallProgram, bench.submit("e2", programs["step"]())) == []
    bench.feed(c.WorkerLost("inference-0", "killed"))
    bench.up()
    installed = of(c.InstallProgram, bench.submit("e3", programs["step"]()))
    assert [command.worker for command in installed] == ["inference-0"]
    assert {node.method for node in installed[0].nodes} == {"generate"}


def test_results_are_per_worker_and_a_node_is_done_when_all_its_workers_are(bench: Any, programs: Makers) -> None:
    bench.submit("e", programs["step"]())
    while ("trainer-0", "e", "train") not in bench.runnable():
        bench.finish(*bench.runnable()[0])
    assert of(c.NodeCompleted, bench.finish("trainer-0", "e", "train")) == []
    commands = bench.finish("trainer-1", "e", "train")
    assert of(c.NodeCompleted, commands)[0].results == {
        "trainer-0": {"by": "trainer-0"},
        "trainer-1": {"by": "trainer-1"},
    }
    completed = of(c.ExecutionCompleted, commands)[0]
    assert completed.outcome == "done" and completed.error is None
    assert list(completed.results) == [node.node_id for node in programs["step"]().nodes]


def test_objects_are_freed_when_their_last_reader_is_done(bench: Any, programs: Makers) -> None:
    bench.submit("e", programs["chain"]())
    worker, _, node_id = bench.runnable()[0]
    assert node_id == "first"
    bench.finish(worker, "e", "first")
    commands = bench.finish("reward-0", "e", "link_0")
    assert of(c.ReleaseObjects, commands) == [c.ReleaseObjects(worker, "e", ("first",), cause=commands[0].cause)]
    bench.drain()
    assert not any(fake.objects for fake in bench.workers.values())


def test_a_pool_without_members_keeps_its_nodes_until_one_is_ready(new_bench: Any, programs: Makers) -> None:
    bench = new_bench().up(pools=False)
    sent = of(c.Execute, bench.submit("e", programs["step"](), "run"))
    assert [command.worker for command in sent] == ["trainer-0", "trainer-1"] and sent[0].locations == {}
    assert "generate_0 waits for a ready member of pool inference" in bench.waits()
    commands = bench.feed(c.PoolMemberReady("inference", "inference-1"))
    assert of(c.Execute, commands)[0].nodes == tuple((f"generate_{i}", 0) for i in range(4))
    assert {(r.worker, r.node_id) for r in of(c.Relocate, commands)} == {
        (f"trainer-{t}", f"generate_{g}") for t in range(2) for g in range(4)
    }


def test_a_lost_worker_has_its_nodes_run_again_and_readers_are_told(bench: Any, programs: Makers) -> None:
    bench.submit("e", programs["step"]())
    bench.finish("inference-0", "e", "generate_0")
    bench.finish("reward-0", "e", "score_0")
    commands = bench.feed(c.WorkerLost("inference-0", "killed"))
    (execute,) = of(c.Execute, commands)
    assert (execute.worker, execute.nodes) == ("inference-1", (("generate_0", 1), ("generate_1", 1)))
    told = {(r.worker, r.node_id, r.workers) for r in of(c.Relocate, commands)}
    assert ("trainer-0", "generate_0", ("inference-1",)) in told
    assert ("reward-0", "generate_1", ("inference-1",)) in told
    assert ("reward-0", "generate_0", ("inference-1",)) not in told, "score_0 is finished"
    bench.drain()
    assert bench.outcomes["e"].outcome == "done"


def test_a_node_that_may_be_dropped_fails_alone_and_says_why(bench: Any, programs: Makers) -> None:
    bench.submit("e", programs["publish"]())
    for trainer in ("trainer-0", "trainer-1"):
        bench.finish(trainer, "e", "expose")
    commands = bench.fail("inference-0", "e", "stage_inference-0")
    (told,) = of(c.NodeCompleted, commands)
    assert told.results == {"inference-0": {"error": "stage_inference-0 raised", "kind": "RewardError"}}
    assert of(c.CancelExecution, commands) == []
    bench.finish("inference-1", "e", "stage_inference-1")
    completed = bench.outcomes["e"]
    assert (completed.outcome, completed.error) == ("done", None)
    assert completed.results["stage_inference-0"] == told.results
    assert completed.results["stage_inference-1"] == {"inference-1": {"by": "inference-1"}}


def test_freed_inputs_are_computed_again_when_the_reader_is_lost(bench: Any, programs: Makers) -> None:
    bench.submit("e", programs["chain"]())
    first = bench.runnable()[0][0]
    bench.finish(first, "e", "first")
    bench.finish("reward-0", "e", "link_0")
    commands = bench.feed(c.WorkerLost("reward-0", "killed"))
    again = [node for command in of(c.Execute, commands) for node in command.nodes]
    assert again == [("first", 1)], "link_0 waits for the reward pool, what it reads is made again meanwhile"
    bench.up().drain()
    assert bench.outcomes["e"].outcome == "done"
    assert [n for n in bench.completed if n == ("e", "first")] == [("e", "first")]


def test_a_node_that_may_not_run_again_fails_the_execution(bench: Any, programs: Makers) -> None:
    bench.submit("e", programs["step"]())
    commands = bench.feed(c.WorkerLost("trainer-1", "signal 9"))
    (completed,) = of(c.ExecutionCompleted, commands)
    assert completed.outcome == "failed" and isinstance(completed.error, WorkerLostError)
    assert "worker trainer-1 was lost (signal 9) while running node train" in str(completed.error)
    assert {command.worker for command in of(c.CancelExecution, commands)} == {
        "inference-0",
        "inference-1",
        "reward-0",
        "trainer-0",
    }
    assert [command.worker for command in of(c.AbortWorld, commands)] == ["trainer-0"]


def test_a_node_that_may_be_dropped_is(bench: Any, programs: Makers) -> None:
    bench.submit("e", programs["publish"]())
    commands = bench.feed(c.WorkerLost("inference-1", "killed"))
    assert of(c.NodeCompleted, commands)[0].results == {}
    bench.submit("late", programs["publish"]())
    bench.drain()
    for execution_id in ("e", "late"):
        assert bench.outcomes[execution_id].outcome == "done"
        assert list(bench.outcomes[execution_id].results) == ["expose", "stage_inference-0"]


def test_an_execution_of_dropped_nodes_alone_is_done(new_bench: Any) -> None:
    b = ProgramBuilder("commit")
    b.call("rollout", "commit", on=Slice("inference-0"), on_worker_lost="drop")
    bench = new_bench()
    bench.submit("e", b.build())
    assert bench.outcomes["e"].outcome == "done" and bench.outcomes["e"].results == {}


def test_the_first_failure_is_the_outcome_and_the_rest_is_stopped(bench: Any, programs: Makers) -> None:
    bench.submit("e", programs["step"]())
    bench.submit("other", programs["step"]())
    bench.finish("inference-0", "e", "generate_0")
    commands = bench.fail("reward-0", "e", "score_0")
    (completed,) = of(c.ExecutionCompleted, commands)
    assert completed.outcome == "failed" and isinstance(completed.error, RewardError)
    assert list(completed.results) == ["generate_0"]
    assert {cmd.worker for cmd in of(c.ReleaseObjects, commands) if not cmd.node_ids} == set(bench.workers)
    story = "\n".join(bench.scheduler.over["e"].history)
    assert "score_0#0 sent → failed" in story and "train#0 sent → poisoned (by score_0)" in story
    bench.drain()
    assert bench.outcomes["other"].outcome == "done"


def test_a_worker_that_has_less_under_way_than_thought_is_asked_for_what_it_has_not_told(
    bench: Any, programs: Makers
) -> None:
    bench.submit("e", programs["step"]())
    bench.finish("inference-0", "e", "generate_0")
    assert bench.feed(c.WorkerCounted("inference-0", 1)) == []
    asked = bench.feed(c.WorkerCounted("inference-0", 0))
    assert asked == [c.AskOutcomes("inference-0", "e", (("generate_1", 0),), cause=asked[0].cause)]
    assert (
        bench.feed(c.WorkerCounted("stranger", 0)) == [] and bench.scheduler.dropped[-1][1] == "that worker is not live"
    )
    bench.drain()
    assert bench.feed(c.WorkerCounted("inference-0", 0)) == []


def test_late_and_stale_events_are_dropped_and_recorded(bench: Any, programs: Makers) -> None:
    bench.submit("e", programs["step"]())
    late = [
        (c.WorkerLost("inference-0", "killed", "another incarnation"), "that process is not live"),
        (c.WorkerLost("stranger", "killed"), "that process is not live"),
        (c.Acked("stranger", 1), "that worker is not live"),
        (c.NodeFinished("inference-1", "an older one", "e", "generate_2", 0), "that process is not live"),
        (c.NodeFailed("inference-1", "x", "gone", "n", 0, LocalError("no")), "the execution is over or unknown"),
        (c.ExecutionCancelled("gone", "asked to"), "it is over or unknown"),
    ]
    for event, reason in late:
        assert bench.scheduler.handle(event) == []
        assert bench.scheduler.dropped[-1] == (event, reason)
    bench.drain()
    assert bench.outcomes["e"].outcome == "done"


def test_an_object_that_comes_after_the_end_is_freed(bench: Any, programs: Makers) -> None:
    bench.submit("e", programs["step"]())
    bench.feed(c.ExecutionCancelled("e", "asked to"))
    fake = bench.workers["inference-0"]
    commands = bench.feed(c.NodeFinished("inference-0", fake.incarnation, "e", "generate_0", 0, {}, 8))
    assert commands == [c.ReleaseObjects("inference-0", "e", cause=commands[0].cause)]


def test_duplicates_and_old_attempts_change_nothing(bench: Any, programs: Makers) -> None:
    bench.submit("e", programs["step"]())
    fake = bench.workers["inference-1"]
    bench.finish("inference-1", "e", "generate_2")
    assert bench.feed(c.NodeFinished("inference-1", fake.incarnation, "e", "generate_2", 0)) == []
    bench.feed(c.WorkerLost("inference-0", "killed"))
    assert bench.feed(c.NodeFinished("inference-1", fake.incarnation, "e", "generate_0", 0)) == []
    assert [why for _, why in bench.scheduler.dropped] == ["a duplicate", "attempt 1 is the current one"]


def test_illegal_events_raise_with_the_story_and_change_nothing(bench: Any, programs: Makers) -> None:
    bench.submit("e", programs["step"]())
    fake = bench.workers["inference-0"].incarnation
    impossible = [
        (c.NodeFinished("inference-0", fake, "e", "generate_9", 0), "no such node"),
        (c.NodeFinished("inference-0", fake, "e", "generate_0", 3), "attempt 3 was never sent"),
        (c.NodeFinished("inference-0", fake, "e", "generate_3", 0), r"it was sent to \['inference-1'\]"),
        (c.ExecutionSubmitted("e", programs["step"]()), "submitted again"),
    ]
    before = bench.scheduler.describe()
    for event, message in impossible:
        with pytest.raises(IllegalTransitionError, match=message) as caught:
            bench.feed(event)
        assert "generate_0#0 waiting → sent (inference-0)" in str(caught.value)
    assert bench.scheduler.describe() == before
    with pytest.raises(IllegalTransitionError, match="no event Event"):
        bench.feed(c.Event())


def test_the_tables_know_every_state_and_lead_somewhere() -> None:
    assert set(TASK_TRANSITIONS) == set(TaskState) and set(EXECUTION_TRANSITIONS) == set(ExecutionState)
    for table in (TASK_TRANSITIONS, EXECUTION_TRANSITIONS):
        reached = {target for row in table.values() for target in row.values()}
        assert len(reached | {next(iter(table))}) == len(table)


def test_back_pressure_is_first_in_first_out_per_worker(new_bench: Any) -> None:
    bench = new_bench(max_in_flight=2).up()
    for number in range(5):
        bench.submit(f"e{number}", single(number=number))
    bench.submit("elsewhere", single(Slice("inference-0")))
    assert list(bench.scheduler.running) == ["e0", "e1", "elsewhere"]
    assert "e2 waits for room on reward-0 (2 executions in flight)" in bench.waits()
    bench.finish("reward-0", "e1", "n")
    assert list(bench.scheduler.queue) == ["e3", "e4"]
    bench.drain()
    assert bench.workers["reward-0"].executes == [f"e{number}" for number in range(5)]


def test_a_queued_execution_holds_back_later_ones_that_share_a_worker(new_bench: Any, programs: Makers) -> None:
    bench = new_bench(max_in_flight=1).up()
    bench.submit("blocker", single())
    bench.submit("step", programs["step"]())
    bench.submit("after", single(Slice("inference-0")))
    assert list(bench.scheduler.running) == ["blocker"]
    bench.drain()
    assert bench.workers["inference-0"].executes == ["step", "after"]


def test_waiting_for_an_absent_pool_is_bounded_and_blocks_nobody(new_bench: Any, programs: Makers) -> None:
    bench = new_bench(max_in_flight=2).up(pools=False)
    for number in range(4):
        bench.submit(f"e{number}", single(Pool("inference")))
    assert list(bench.scheduler.running) == ["e0", "e1"]
    assert "e2 waits for pool inference, as 2 executions do already" in bench.waits()
    bench.submit("open", single(Slice("inference-0")))
    assert "open" in bench.scheduler.running
    bench.up().drain()
    assert len(bench.outcomes) == 5


def test_what_waits_for_an_absent_place_lets_others_pass(new_bench: Any) -> None:
    bench = new_bench(max_in_flight=1).up(pools=False)
    bench.submit("first", single(Pool("inference")))
    b = ProgramBuilder("both")
    b.call("s", "m", b.call("s", "m", on=Pool("inference")), on=REWARD)
    bench.submit("both", b.build())
    bench.submit("passes", single())
    assert list(bench.scheduler.running) == ["first", "passes"]


def test_pool_members_without_credit_are_left_out(new_bench: Any) -> None:
    bench = new_bench(max_in_flight=1).up()
    bench.submit("blocker", single(Slice("inference-0")))
    b = ProgramBuilder("three")
    for _ in range(3):
        b.call("s", "m", on=Pool("inference"))
    bench.submit("three", b.build())
    assert {key[0] for key in bench.workers["inference-0"].pending} == {"blocker"}
    assert len(bench.workers["inference-1"].pending) == 3


def test_the_queue_is_bounded(new_bench: Any) -> None:
    bench = new_bench(max_in_flight=1).up()
    program = single()
    bench.scheduler.handle(c.ExecutionSubmitted("first", program))
    for number in range(MAX_QUEUED):
        bench.scheduler.handle(c.ExecutionSubmitted(f"e{number}", program))
    with pytest.raises(LocalError, match=f"{MAX_QUEUED} executions wait already"):
        bench.scheduler.handle(c.ExecutionSubmitted("one too many", program))
    with pytest.raises(LocalError, match="max_in_flight: expected at least 1"):
        new_bench(max_in_flight=0)


def test_what_is_over_is_forgotten_in_the_end(bench: Any) -> None:
    for number in range(KEPT_OVER + 5):
        bench.submit(f"e{number}", single())
        bench.finish("reward-0", f"e{number}", "n")
    assert len(bench.scheduler.over) == KEPT_OVER and "e0" not in bench.scheduler.over


def test_gang_order_is_one_per_world(bench: Any, programs: Makers) -> None:
    for number in range(3):
        bench.submit(f"e{number}", programs["durable step"]())
    bench.submit("p", programs["publish"]())
    logs = [bench.workers[f"trainer-{i}"].gang for i in range(2)]
    assert logs[0] == logs[1] == [(1, "e0"), (2, "e1"), (3, "e2"), (4, "p")]
    assert bench.workers["inference-0"].gang == []


def test_owners(bench: Any, programs: Makers) -> None:
    bench.submit("mine", programs["step"](), "me")
    bench.submit("yours", programs["step"](), "you")
    assert len(bench.scheduler.objects) == 18
    commands = bench.feed(c.OwnerReleased("me", "the lease ended"))
    (completed,) = of(c.ExecutionCompleted, commands)
    assert (completed.execution_id, completed.outcome) == ("mine", "cancelled")
    assert isinstance(completed.error, CancelledError) and "the lease ended" in str(completed.error)
    assert len(bench.scheduler.objects) == 9 and "yours" in bench.scheduler.running


def test_refusals_leave_everything_as_it_was(bench: Any, programs: Makers) -> None:
    before = bench.scheduler.describe()
    b = ProgramBuilder("p")
    b.call("s", "m", on=Slice("mars"), node_id="n")
    with pytest.raises(GraphError, match="node n: placed on slice 'mars', which does not exist"):
        bench.submit("e", b.build())
    with pytest.raises(NameTakenError, match="worker 'reward-0' is alive as incarnation"):
        bench.feed(c.WorkerJoined("reward-0", "another"))
    assert bench.scheduler.describe() == before


def test_status_says_what_waits_for_what(new_bench: Any, programs: Makers) -> None:
    bench = new_bench().up()
    bench.submit("e", programs["step"]())
    bench.finish("inference-0", "e", "generate_0")
    assert bench.waits()[:4] == [
        "generate_1 runs on inference-0",
        "generate_2 runs on inference-1",
        "generate_3 runs on inference-1",
        "score_0 runs on reward-0",
    ]
    assert "score_3 on reward-0 waits for generate_3 on inference-1" in bench.waits()
    bench.feed(c.Acked("reward-0", 7))
    bench.feed(c.Acked("reward-0", 3))
    described = bench.scheduler.describe()
    assert described["workers"]["reward-0"]["acknowledged"] == 7
    assert described["workers"]["inference-0"] == {
        "incarnation": bench.workers["inference-0"].incarnation,
        "world": "inference-0",
        "executions": 1,
        "nodes": 1,
        "object_bytes": 8,
        "acknowledged": 0,
    }
    absent = new_bench()
    absent.submit("e", single(Slice("trainer")))
    assert absent.waits() == ["n waits for trainer-0, trainer-1 of slice trainer"]


@pytest.mark.parametrize(
    ("count", "loads", "expected"),
    [
        (4, [0, 0], [0, 0, 1, 1]),
        (5, [0, 0, 0], [0, 0, 1, 1, 2]),
        (1, [0, 0], [0]),
        (3, [5, 0], [1, 1, 1]),
        (4, [2, 0, 1], [0, 1, 1, 2]),
        (0, [0], []),
    ],
)
def test_nodes_are_spread_evenly_in_contiguous_blocks(count: int, loads: list[int], expected: list[int]) -> None:
    assert spread(count, loads) == expected
