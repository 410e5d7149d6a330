"""The GRPO run loop on the real controller runtime, with workers that answer in this process: deaths, refusals, deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest

from waypath.controller.journal import Journal, read_journal
from waypath.controller.main import cluster
from waypath.controller.runs import grpo, programs
from waypath.controller.runs.files import RunFiles
from waypath.controller.runs.grpo import GrpoRun, Resumed
from waypath.controller.runs.metrics import TRAINER_KEYS
from waypath.controller.runs.run import RunRecord
from waypath.controller.runtime import Runtime
from waypath.proto import config as configs
from waypath.proto import version
from waypath.proto import worker_pb2 as pb
from waypath.proto.config import RunConfig
from waypath.proto.errors import (
    DeadlineError,
    LocalError,
    TaskError,
    TransferError,
    WaypathError,
    WorkerLostError,
    to_message,
)
from waypath.proto.layout import Layout, Shard, TensorLayout

Answer = Callable[[str, dict[str, Any]], Awaitable[Mapping[str, Any] | None]]

RAW: dict[str, Any] = {
    "steps": 2,
    "model": {"random": {"alphabet": "01>\n"}},
    "task": {"name": "sort", "prompts_per_step": 2},
    "evaluation": {"prompts": 2},
    "trainer": {"checkpoint_every": 0},
    "log": {"tensorboard": False, "trace": False},
    "storage": {"export": False},
}
FINGERPRINT = {"id": "a", "threads": "1", "jaxlib": "0.7"}


def layout(*workers: str) -> dict[str, Any]:
    return Layout(
        {"w": TensorLayout("w", (2,), "float32", tuple(Shard(worker, 0, (0,), (2,)) for worker in workers))}
    ).to_json()


class Worker:
    """One incarnation: it answers each node when its inputs are done, and dies with `kill`."""

    def __init__(self, fake: Fake, name: str, number: int) -> None:
        self.name, self.fake, self.pid = name, fake, number
        self.outbox: asyncio.Queue[pb.WorkerMessage] = asyncio.Queue()
        self.nodes: dict[str, pb.Node] = {}
        self.running: set[asyncio.Task[None]] = set()
        self.stream = asyncio.create_task(self._live())

    async def _live(self) -> None:
        role, _, index = self.name.partition("-")
        self.outbox.put_nowait(
            pb.WorkerMessage(
                register=pb.Register(
                    worker=self.name,
                    incarnation=f"{self.name}/{self.pid}",
                    role=role,
                    world="trainer" if role == "trainer" else "",
                    process_index=int(index) if role == "trainer" else 0,
                    process_count=2 if role == "trainer" else 1,
                    versions=version.versions(),
                )
            )
        )
        context: Any = None
        stream: Any = self.fake.runtime.Attach(self._messages(), context)
        async with contextlib.aclosing(stream) as messages:
            async for message in messages:
                kind = message.WhichOneof("kind")
                if kind == "install":
                    self.nodes.update((f"{message.install.program_id}/{n.node_id}", n) for n in message.install.nodes)
                elif kind == "execute":
                    for assignment in message.execute.nodes:
                        self._start(message.execute, assignment)
                elif kind in ("shutdown", "abort_world"):
                    self.fake.told[self.name] = getattr(message, kind).reason
                    return

    async def _messages(self) -> AsyncIterator[pb.WorkerMessage]:
        while True:
            yield await self.outbox.get()

    def _start(self, execute: pb.Execute, assignment: pb.Assignment) -> None:
        node = self.nodes[f"{execute.program_id}/{assignment.node_id}"]
        task = asyncio.create_task(self._run(execute, assignment, node))
        self.running.add(task)
        task.add_done_callback(self.running.discard)

    async def _run(self, execute: pb.Execute, assignment: pb.Assignment, node: pb.Node) -> None:
        for source in node.inputs:
            await self.fake.done(execute.execution_id, source).wait()
        options = json.loads(node.options_json) | json.loads(execute.args_json)
        event = pb.NodeEvent(execution_id=execute.execution_id, node_id=assignment.node_id, attempt=assignment.attempt)
        try:
            result = await self.fake.answer(self.name, f"{node.service}.{node.method}", options)
        except WaypathError as error:
            event.state = pb.NodeEvent.FAILED
            event.error.CopyFrom(to_message(error))
        else:
            event.state = pb.NodeEvent.FINISHED
            event.result_json = json.dumps(result or {})
            self.fake.done(execute.execution_id, assignment.node_id).set()
        self.outbox.put_nowait(pb.WorkerMessage(node=event))

    async def kill(self) -> None:
        for task in [*self.running, self.stream]:
            task.cancel()
        await asyncio.gather(self.stream, return_exceptions=True)


class Fake:
    """A controller and its workers. `on[...]` replaces the answer to a method."""

    def __init__(self) -> None:
        self.runtime = Runtime(cluster(2, 2, 1), "c", 1)
        self.workers: dict[str, Worker] = {}
        self.on: dict[str, Answer] = {}
        self.calls: list[tuple[str, str]] = []
        self.told: dict[str, str] = {}
        self.runs: list[OneRun] = []
        self._done: dict[tuple[str, str], asyncio.Event] = {}
        self._started = 0

    def done(self, execution_id: str, node_id: str) -> asyncio.Event:
        return self._done.setdefault((execution_id, node_id), asyncio.Event())

    async def start(self, name: str) -> Worker:
        self._started += 1
        worker = self.workers[name] = Worker(self, name, self._started)
        while self.runtime.incarnation(name) != f"{name}/{self._started}":
            await asyncio.sleep(0)
        return worker

    async def kill(self, name: str) -> None:
        await self.workers[name].kill()

    async def replace(self, name: str) -> None:
        await self.kill(name)
        await self.start(name)

    async def until(self, worker: str, method: str, count: int = 1) -> None:
        while self.calls.count((worker, method)) < count:
            await asyncio.sleep(0)

    async def answer(self, worker: str, method: str, options: dict[str, Any]) -> Mapping[str, Any]:
        self.calls.append((worker, method))
        result: Mapping[str, Any] = {
            "trainer.open": {"layout": layout(worker), "fingerprint": FINGERPRINT},
            "rollout.open": {"layout": layout(worker), "eval_rows": 2},
            "rollout.stage": {"verified": True, "publish_bytes": 8},
            "reward.score": {"reward_sum": 1.0, "samples": []},
            "trainer.train": {**dict.fromkeys(TRAINER_KEYS, 0.5), "reward_mean": float(options.get("step", 0))},
            "trainer.save_wait": {"checkpoint": "a checkpoint"},
            "trainer.export": {"params_digest": "d", "export_dir": options.get("out_dir")},
        }.get(method, {})
        replaced = await self.on[method](worker, options) if method in self.on else None
        return result if replaced is None else replaced


class OneRun:
    """A run on a fake cluster, in a folder."""

    def __init__(self, fake: Fake, folder: Path, resumed: Resumed | None = None, **overrides: Any) -> None:
        self.config: RunConfig = configs.load(RAW, {key.replace("__", "."): v for key, v in overrides.items()})
        self.record = RunRecord("r", folder, self.config)
        self.files = RunFiles(folder, self.config)
        self.journal = Journal(folder / "journal" / "run.journal")
        self.run = GrpoRun(fake.runtime, self.config, self.record, self.files, self.journal, resumed)
        self.phases: list[str] = []
        notify = self.record.notify

        async def heard(*, phase: str | None = None, steps: int | None = None) -> None:
            self.phases += [phase] if phase else []
            await notify(phase=phase, steps=steps)

        self.record.notify = heard  # type: ignore[method-assign]
        self.task = asyncio.create_task(self.run.run())
        fake.runs.append(self)

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.files.close()
        self.journal.close()

    async def phase(self, start: str) -> None:
        while not any(phase.startswith(start) for phase in self.phases):
            await asyncio.sleep(0)

    def entries(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in read_journal(self.journal.path) if e["type"] == kind]


@contextlib.asynccontextmanager
async def up(*without: str) -> AsyncIterator[Fake]:
    fake = Fake()
    for name in ("trainer-0", "trainer-1", "inference-0", "inference-1", "reward-0"):
        if name not in without:
            await fake.start(name)
    try:
        yield fake
    finally:
        for one in fake.runs:
            await one.close()
        for worker in fake.workers.values():
            await worker.kill()


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 20))


async def never(worker: str, options: dict[str, Any]) -> None:
    await asyncio.Event().wait()


def test_a_run_from_open_to_its_end(tmp_path: Path) -> None:
    async def main() -> None:
        async with up() as fake:
            one = OneRun(fake, tmp_path)
            assert await one.task == "done"
            assert (one.run.version, one.run.eval_before, one.run.params_digest) == (2, 1.0, "d")
            assert [e["outcome"] for e in one.entries("publication")] == ["COMMITTED"] * 3
            assert [e["fingerprint"] for e in one.entries("opened")] == [FINGERPRINT]

    run(main())


def test_a_checkpoint_is_journaled_with_the_rewards_of_its_own_version(tmp_path: Path) -> None:
    async def main() -> None:
        async with up() as fake:
            written = asyncio.Event()

            async def slow_write(worker: str, options: dict[str, Any]) -> None:
                await written.wait()

            fake.on["trainer.save_wait"] = slow_write
            one = OneRun(fake, tmp_path, steps=4, trainer__checkpoint_every=3)
            await fake.until("trainer-1", "trainer.train", 4)
            await one.phase("evaluating")
            while one.run.version < 4:
                await asyncio.sleep(0)
            written.set()
            await one.task
            assert one.entries("checkpoint")[0]["rewards"] == [0.0, 1.0, 2.0]
            assert one.entries("checkpoint")[1]["rewards"] == [1.0, 2.0, 3.0]

    run(main())


@pytest.mark.parametrize("evaluation", [1, 2])
def test_the_loss_of_a_trainer_that_has_nothing_to_do_ends_the_run(tmp_path: Path, evaluation: int) -> None:
    async def main() -> None:
        async with up() as fake:
            if evaluation == 1:
                fake.on["reward.score"] = never
            one = OneRun(fake, tmp_path)
            if evaluation == 2:
                while one.run.version < 2:
                    await asyncio.sleep(0)
                fake.on["reward.score"] = never
            while sum(phase.startswith("evaluating") for phase in one.phases) < evaluation:
                await asyncio.sleep(0)
            await fake.kill("trainer-1")
            with pytest.raises(WorkerLostError, match=r"worker trainer-1 was lost .*and the policy.*resume the run"):
                await one.task
            assert not fake.runtime.scheduler.running and not fake.runtime.scheduler.queue

    run(main())


@pytest.mark.parametrize("method", ["stage", "commit"])
def test_an_error_in_one_replica_fences_it_and_the_others_go_on(tmp_path: Path, method: str) -> None:
    async def main() -> None:
        async with up() as fake:

            async def broken(worker: str, options: dict[str, Any]) -> None:
                if worker == "inference-1":
                    raise TransferError("the stream ended early")

            fake.on[f"rollout.{method}"] = broken
            one = OneRun(fake, tmp_path)
            assert await one.task == "done"
            assert f"could not {method} policy version 0: the stream ended early" in fake.told["inference-1"]
            assert "inference-0" not in fake.told
            assert ("inference-0", "rollout.generate") in fake.calls

    run(main())


def test_an_error_in_every_replica_ends_the_run(tmp_path: Path) -> None:
    async def main() -> None:
        async with up("inference-1") as fake:

            async def broken(worker: str, options: dict[str, Any]) -> None:
                raise TransferError("checksum")

            fake.on["rollout.stage"] = broken
            with pytest.raises(TransferError, match="no replica could stage policy version 0: inference-0: checksum"):
                await OneRun(fake, tmp_path).task

    run(main())


def test_a_publication_that_nobody_verifies_is_aborted_and_tried_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with up() as fake:
            refusals = {"inference-0": 1, "inference-1": 1}

            async def refuses_once(worker: str, options: dict[str, Any]) -> dict[str, Any] | None:
                if options["version"] == 1 and refusals[worker]:
                    refusals[worker] -= 1
                    return {"verified": False, "mismatch": "digests differ", "publish_bytes": 8}
                return None

            fake.on["rollout.stage"] = refuses_once
            one = OneRun(fake, tmp_path)
            assert await one.task == "done"
            entries = one.entries("publication")
            assert [(e["version"], e["outcome"], e["attempt"]) for e in entries] == [
                (0, "COMMITTED", 1),
                (1, "ABORTED", 1),
                (1, "COMMITTED", 2),
                (2, "COMMITTED", 1),
            ]
            assert entries[1]["cause"] == "inference-0: digests differ; inference-1: digests differ"
            assert entries[1]["replicas"] == [] and entries[2]["cause"] == ""
            assert {w for w, method in fake.calls if method == "rollout.abort"} == {"inference-0", "inference-1"}
            lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
            assert [(line["publish_outcome"], line["publish_attempts"]) for line in lines] == [
                ("COMMITTED", 2),
                ("COMMITTED", 1),
            ]
            assert fake.told == {}, "nobody is fenced for an attempt that all refused"

    run(main())


@pytest.mark.parametrize("attempts", [1, 3])
def test_the_run_ends_with_the_cause_after_the_last_attempt(tmp_path: Path, attempts: int) -> None:
    async def main() -> None:
        async with up() as fake:

            async def broken(worker: str, options: dict[str, Any]) -> dict[str, Any]:
                return {"verified": False, "mismatch": "digests differ", "publish_bytes": 8}

            fake.on["rollout.stage"] = broken
            one = OneRun(fake, tmp_path, publish__attempts=attempts)
            with pytest.raises(
                TransferError, match=rf"inference-0: digests differ; .*attempt {attempts} of {attempts}"
            ):
                await one.task
            assert [(e["outcome"], e["attempt"]) for e in one.entries("publication")] == [
                ("ABORTED", n + 1) for n in range(attempts)
            ]
            assert not any(method == "rollout.commit" for _, method in fake.calls)

    run(main())


def test_replicas_left_out_are_journaled_with_their_causes(tmp_path: Path) -> None:
    async def main() -> None:
        async with up() as fake:

            async def broken(worker: str, options: dict[str, Any]) -> None:
                if worker == "inference-1" and options["version"] == 1:
                    raise TransferError("the stream ended early")

            fake.on["rollout.commit"] = broken
            one = OneRun(fake, tmp_path)
            assert await one.task == "done"
            entries = [(e["outcome"], e["replicas"]) for e in one.entries("publication") if e["version"] == 1]
            assert entries == [("COMMITTED", ["inference-0", "inference-1"]), ("PARTIAL", ["inference-0"])]
            assert "inference-1: the stream ended early" in [e["cause"] for e in one.entries("publication")]

    run(main())


def test_a_publication_that_a_dead_trainer_ends_is_journaled_as_aborted(tmp_path: Path) -> None:
    async def main() -> None:
        async with up() as fake:
            fake.on["rollout.stage"] = never
            one = OneRun(fake, tmp_path)
            await fake.until("inference-0", "rollout.stage")
            await fake.kill("trainer-1")
            with pytest.raises(WorkerLostError, match="trainer-1 was lost"):
                await one.task
            (entry,) = one.entries("publication")
            assert (entry["version"], entry["outcome"], entry["replicas"]) == (0, "ABORTED", [])
            assert entry["cause"]

    run(main())


@pytest.mark.parametrize("moment", ["stage", "commit"])
def test_a_successor_is_neither_sent_the_commit_nor_declared_ready(tmp_path: Path, moment: str) -> None:
    async def main() -> None:
        async with up() as fake:
            go_on, opened = asyncio.Event(), set[str]()

            async def open_late(worker: str, options: dict[str, Any]) -> None:
                if worker in opened:
                    await asyncio.Event().wait()
                opened.add(worker)

            async def held(worker: str, options: dict[str, Any]) -> None:
                if worker == "inference-1":
                    await go_on.wait()

            fake.on |= {"rollout.open": open_late, f"rollout.{moment}": held}
            one = OneRun(fake, tmp_path)
            await fake.until("inference-0", f"rollout.{moment}")
            await fake.until("inference-1", f"rollout.{moment}")
            await asyncio.sleep(0.01)  # the answer of inference-0 arrives
            await fake.replace("inference-0")
            before = list(fake.calls)
            go_on.set()
            assert await one.task == "done"
            later = [method for worker, method in fake.calls[len(before) :] if worker == "inference-0"]
            assert set(later) <= {"rollout.open"}
            assert "inference-0" not in fake.told

    run(main())


def test_a_worker_that_cannot_be_opened_again_ends_the_run_with_the_cause(tmp_path: Path) -> None:
    async def main() -> None:
        async with up() as fake:
            fake.on["reward.score"] = never
            one = OneRun(fake, tmp_path)
            await fake.until("reward-0", "reward.score")

            async def gone(worker: str, options: dict[str, Any]) -> None:
                raise TaskError("module sums has no attribute Sums")

            fake.on["reward.open"] = gone
            await fake.replace("reward-0")
            with pytest.raises(TaskError, match="module sums has no attribute Sums"):
                await one.task

    run(main())


def test_a_replica_that_cannot_be_opened_again_is_missed_by_nobody_while_another_works(tmp_path: Path) -> None:
    async def main() -> None:
        async with up() as fake:
            one = OneRun(fake, tmp_path, steps=3)
            await one.phase("step 0")

            async def memory(worker: str, options: dict[str, Any]) -> None:
                raise LocalError("out of memory")

            fake.on["rollout.open"] = memory
            await fake.replace("inference-1")
            assert await one.task == "done"
            assert one.run._members.troubles() == ["inference-1 could not join: out of memory"]

    run(main())


def test_a_join_that_waits_does_not_act_on_a_successor(tmp_path: Path) -> None:
    async def main() -> None:
        async with up() as fake:
            train = asyncio.Event()

            async def held(worker: str, options: dict[str, Any]) -> None:
                await train.wait()

            async def not_exposed(worker: str, options: dict[str, Any]) -> None:
                raise TransferError("policy version 0 is not exposed (any more)")

            fake.on |= {"trainer.train": held, "trainer.exposed": not_exposed, "rollout.exposed": not_exposed}
            one = OneRun(fake, tmp_path)
            await fake.until("trainer-0", "trainer.train")
            for _ in range(2):  # twice in one step
                opened = fake.calls.count(("inference-1", "rollout.open"))
                await fake.replace("inference-1")
                await fake.until("inference-1", "rollout.open", opened + 1)
                await fake.until("trainer-0", "trainer.exposed", opened)
            del fake.on["trainer.exposed"], fake.on["rollout.exposed"]
            train.set()
            assert await one.task == "done"
            assert "inference-1" not in fake.told, "the healthy process was not fenced"
            joins = [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("join")]
            assert joins == []

    run(main())


def test_every_wait_of_a_run_ends_with_its_cause(tmp_path: Path) -> None:
    async def main() -> None:
        async with up() as fake:

            async def lost(worker: str, options: dict[str, Any]) -> None:
                asyncio.get_running_loop().call_soon(asyncio.ensure_future, fake.kill("reward-0"))
                await asyncio.Event().wait()

            fake.on["reward.score"] = lost
            one = OneRun(fake, tmp_path)
            one.run._executor.limit_s = lambda program: 0.05 if program.name == "evaluate" else 10.0  # type: ignore[method-assign]
            with pytest.raises(DeadlineError, match=r"the evaluation is not done .* a ready member of pool reward"):
                await one.task
            assert not fake.runtime.scheduler.running

    run(main())


def test_every_node_has_a_deadline_and_the_last_one_of_a_step_counts_what_overlaps() -> None:
    for staleness in (0, 1):
        config = configs.load(RAW, {"algorithm.max_staleness": staleness})
        limits, rejoin_s = config.deadlines, config.cluster.rejoin_timeout_s
        made = [
            programs.open_trainer(config, "r", None),
            programs.open_member(config, "reward", "reward-0"),
            programs.warm_start(config),
            programs.step(config),
            programs.evaluate(config, 2),
            programs.publish(config, {"inference-0": []}),
            programs.commit(config, ["inference-0"]),
            programs.save(config),
            programs.export(config),
        ]
        assert all(node.deadline_s > 0 for program in made for node in program.nodes)
        once_s = limits.generate_s + limits.score_s + limits.train_s
        assert programs.step(config).by_id["train"].deadline_s == once_s * (1 + staleness) + rejoin_s


def test_the_only_replica_with_overlapping_steps_is_lost(tmp_path: Path) -> None:
    async def main() -> None:
        async with up("inference-1") as fake:
            one = OneRun(fake, tmp_path, steps=4, algorithm__max_staleness=1)
            await one.phase("step 1")
            fake.on["rollout.generate"] = never
            await fake.kill("inference-0")
            with pytest.raises(WorkerLostError, match="max_staleness > 0 no other can"):
                await one.task

    run(main())


def test_a_resume_under_another_fingerprint_is_said(tmp_path: Path) -> None:
    async def main() -> None:
        async with up() as fake:
            first = OneRun(fake, tmp_path)
            await first.task
            first.journal.close()
            resumed = Resumed("a checkpoint", 1, 0.5)
            again = OneRun(fake, tmp_path, resumed)
            await again.task
            again.journal.close()
            assert not any("fingerprint" in phase for phase in again.phases)

            async def opened(worker: str, options: dict[str, Any]) -> dict[str, Any]:
                return {"layout": layout(worker), "fingerprint": {**FINGERPRINT, "id": "b", "threads": "2"}}

            fake.on["trainer.open"] = opened
            other = OneRun(fake, tmp_path, resumed)
            await other.task
            assert other.phases[1] == (
                f"{grpo.OPENING}, warning: resumed under another fingerprint (threads: 1 → 2): "
                "results may differ in their last bits"
            )

    run(main())


def test_an_export_that_an_interrupted_end_left_is_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        async with up() as fake:
            (tmp_path / "export").mkdir()
            (tmp_path / "export" / "model.safetensors").write_text("of the end that was interrupted")

            async def exported(worker: str, options: dict[str, Any]) -> None:
                assert not (tmp_path / "export").exists()

            fake.on["trainer.export"] = exported
            one = OneRun(fake, tmp_path, storage__export=True)
            assert await one.task == "done"
            assert one.run.export_dir == str(tmp_path / "export")

    run(main())


def test_egress_is_what_the_receivers_got_from_trainers_also_where_it_did_not_verify(tmp_path: Path) -> None:
    async def main() -> None:
        async with up() as fake:

            async def one_refuses(worker: str, options: dict[str, Any]) -> dict[str, Any]:
                got = {"publish_bytes": 8, "sources": {"trainer-0": 5, "inference-0": 3}}
                wrong = {"verified": False, "mismatch": "digests differ"}
                return got | (wrong if worker == "inference-1" and options["version"] else {"verified": True})

            fake.on["rollout.stage"] = one_refuses
            assert await OneRun(fake, tmp_path, steps=1).task == "done"
            line = json.loads((tmp_path / "metrics.jsonl").read_text())
            assert (line["publish_bytes"], line["egress_bytes"], line["publish_bytes_lower_bound"]) == (8, 10, 16)

    run(main())
