"""The GRPO run: open, warm start, publish, then step after step until it is done, and the end.

Reads top to bottom. Every computation is an execution of one of `programs`; this loop only decides what comes next. It
holds no tensor and no trajectory. Must not know sockets; time is asked of the event loop through `Runtime`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from waypath.controller.journal import Journal
from waypath.controller.pacing import Pacing
from waypath.controller.runs import metrics, programs
from waypath.controller.runs.files import RunFiles
from waypath.controller.runs.publication import Begun, Publisher
from waypath.controller.runs.run import RunRecord
from waypath.controller.runs.trace import PhaseSpan
from waypath.controller.runtime import Execution, Results, Runtime
from waypath.proto.config import RunConfig
from waypath.proto.errors import DeadlineError, WorkerLostError

STOP_WINDOW = 3


@dataclass(frozen=True)
class Resumed:
    """Where a resumed run goes on: its checkpoint, the first step to do, and what the first part measured."""

    path: str
    step: int
    eval_before: float | None
    rewards: tuple[float, ...] = ()


@dataclass(frozen=True)
class _InFlight:
    step: int
    execution: Execution
    publication: Begun | None
    dispatched_s: float


class GrpoRun:
    """One run on one cluster."""

    def __init__(
        self,
        runtime: Runtime,
        config: RunConfig,
        record: RunRecord,
        files: RunFiles,
        journal: Journal,
        resumed: Resumed | None,
    ) -> None:
        self._runtime = runtime
        self._config = config
        self._record = record
        self._files = files
        self._journal = journal
        self._resumed = resumed
        self._owner = f"run/{record.run_id}"
        self._publisher = Publisher(runtime, config, journal, self._owner)
        self._pacing = Pacing(config.algorithm.max_staleness, config.trainer.checkpoint_every)
        self._step_program = programs.step(config)
        self._saving: asyncio.Task[None] | None = None
        self._joining: set[asyncio.Task[None]] = set()
        self._in_flight: deque[_InFlight] = deque()
        self._rewards: list[float] = list(resumed.rewards) if resumed else []
        self._completed_s = 0.0
        self._saved_version = resumed.step if resumed else -1
        self.version = 0
        self.eval_before: float | None = resumed.eval_before if resumed else None
        self.eval_after: float | None = None
        self.params_digest: str | None = None
        self.export_dir: str | None = None

    async def run(self) -> str:
        """Runs to the end; returns "done" or "cancelled" (a stop was asked for). Raises the WaypathError that ended it."""
        with self._runtime.watch_workers(self._joined, self._lost):
            try:
                await self._open()
                await self._publish(self.version)
                if self.eval_before is None and not self._record.stop_requested:
                    self.eval_before = await self._evaluate()
                    self._journal.append({"type": "evaluated", "when": "before", "accuracy": self.eval_before})
                await self._steps()
                if self._record.stop_requested:
                    await self._stop()
                    return "cancelled"
                self.eval_after = await self._evaluate()
                self._trace(self._runtime.take_spans(self._owner), self.version)
                await self._save()
                await self._saved()
                await self.export(str(self._record.directory / "export") if self._config.storage.export else "")
                return "done"
            finally:
                for task in [*self._joining, *([self._saving] if self._saving else [])]:
                    task.cancel()
                self._runtime.release(self._owner, "the run is over")

    async def _open(self) -> None:
        await self._record.notify(phase="opening trainer and engines")
        config, runtime = self._config, self._runtime
        replicas, rewards = runtime.workers("inference"), runtime.workers("reward")
        restore = {"path": self._resumed.path, "step": self._resumed.step} if self._resumed else None
        trainer = runtime.submit(programs.open_trainer(config, self._record.run_id, restore), {}, owner=self._owner)
        opening = [self._open_replica(replica) for replica in replicas]
        opening += [self._open_reward(worker) for worker in rewards]
        await asyncio.gather(trainer.result(), *(self._unless_lost(each) for each in opening))
        self._publisher.set_source((await trainer.result())["open"])
        self.version = self._resumed.step if self._resumed else 0
        if self._resumed is None and config.warm_start.steps:
            await self._record.notify(phase=f"warm start, {config.warm_start.steps} supervised steps")
            await runtime.submit(programs.warm_start(config), {}, owner=self._owner).result()
            await self._save()

    async def _unless_lost(self, opening: Coroutine[Any, Any, None]) -> None:
        """A worker that dies while it is opened is opened again when its successor joins."""
        try:
            await opening
        except WorkerLostError as error:
            self._runtime.log(f"opening: {error}")

    async def _open_replica(self, replica: str) -> None:
        await self._publisher.open(replica)
        self._publisher.admit(replica)

    async def _open_reward(self, worker: str) -> None:
        program = programs.open_member(self._config, "reward", worker)
        await self._runtime.submit(program, {}, owner=self._owner).result()
        self._runtime.pool_ready("reward", worker)

    async def _publish(self, version: int, begun: Begun | None = None) -> metrics.Publication:
        publication = await self._publisher.finish(begun or self._publisher.begin(version))
        for replica in publication.replicas:
            self._runtime.pool_ready("inference", replica)
        return publication

    async def _evaluate(self) -> float | None:
        available = [int(info.get("eval_rows", 0)) for info in self._publisher.info.values()]
        prompts = min([self._config.evaluation.prompts, *available])
        if not prompts:
            return None
        await self._record.notify(phase=f"evaluating {prompts} held-out prompts")
        args = {"step": self.version, "first_group_id": 0, "version": self.version}
        execution = self._runtime.submit(programs.evaluate(self._config, prompts), args, owner=self._owner)
        results = await self._result(execution, "the evaluation")
        rewards = [
            float(result["reward_sum"])
            for node, parts in results.items()
            if node.startswith("score_")
            for result in parts.values()
        ]
        return sum(rewards) / len(rewards)

    async def _steps(self) -> None:
        config, next_step = self._config, self.version
        self._record.stepping = True
        self._trace(self._runtime.take_spans(self._owner), -1)
        while True:
            while (
                next_step < config.steps
                and not self._record.stop_requested
                and not self._reward_reached()
                and self._pacing.may_dispatch(next_step, self.version)
            ):
                self._in_flight.append(self._dispatch(next_step))
                next_step += 1
            if not self._in_flight:
                return
            await self._complete(self._in_flight.popleft())

    async def _result(self, execution: Execution, what: str) -> Results:
        """Waits for sampled work, which may also have to wait for a worker that was lost to come back.

        Raises DeadlineError that says what it waits for.
        """
        limits = self._config.deadlines
        limit_s = limits.generate_s + limits.score_s + limits.train_s + self._config.cluster.rejoin_timeout_s
        limit_s *= 1 + self._config.algorithm.max_staleness
        try:
            async with asyncio.timeout(limit_s):
                return await execution.result()
        except TimeoutError:
            waits = "; ".join(self._runtime.waits(execution)) or "nothing"
            raise DeadlineError(
                f"{what} is not done after {limit_s:g} s: {waits}", remedy="look into the logs of the workers named"
            ) from None

    def _reward_reached(self) -> bool:
        """Stops early once the mean reward of the last three steps passes `stop_at_reward`; the same in every rerun."""
        target, window = self._config.stop_at_reward, self._rewards[-STOP_WINDOW:]
        return target is not None and len(window) == STOP_WINDOW and sum(window) / STOP_WINDOW >= target

    def _dispatch(self, step: int) -> _InFlight:
        args = {
            "step": step,
            "first_group_id": step * self._config.task.prompts_per_step,
            "version": self._pacing.sampling_version(step),
            "samples": self._config.log.samples_per_step,
        }
        execution = self._runtime.submit(self._step_program, args, owner=self._owner)
        publication = None
        if self._config.algorithm.max_staleness:  # the next step may be in the trainer's queue before this one is done
            publication = self._publisher.begin(step + 1, ahead=True)
        return _InFlight(step, execution, publication, time.monotonic())

    async def _complete(self, item: _InFlight) -> None:
        await self._record.notify(phase=f"step {item.step}")
        results = await self._result(item.execution, f"step {item.step}")
        publication = await self._publish(item.step + 1, item.publication)
        self.version = item.step + 1
        now_s = time.monotonic()
        step_s = now_s - max(item.dispatched_s, self._completed_s)
        self._completed_s = now_s
        trained = next(iter(sorted(results["train"].items())))[1]
        spans = self._runtime.take_spans(self._owner)
        line = metrics.line(item.step, trained, spans, publication, step_s)
        self._rewards.append(float(line["reward_mean"]))
        self._journal.append({"type": "step", "step": item.step, "reward_mean": line["reward_mean"]})
        self._files.metrics(line)
        self._trace(spans, item.step)
        for sample in self._samples(results):
            self._files.sample({"step": item.step, **sample})
        await self._record.notify(steps=self.version)
        if self._saving is not None and self._saving.done():
            await self._saved()
        if self._pacing.checkpoint_due(self.version):
            await self._save()

    def _trace(self, spans: list[PhaseSpan], step: int) -> None:
        """Step −1: before the first step (opening, warm start, evaluation)."""
        if self._files.trace is not None:
            self._files.trace.add(spans, step)

    @staticmethod
    def _samples(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for node, parts in results.items():
            if node.startswith("score_"):
                for result in parts.values():
                    found.extend(result.get("samples", ()))
        return sorted(found, key=lambda sample: (sample["group_id"], sample["sample_index"]))

    async def _save(self) -> None:
        """Starts a checkpoint of the current version; the one before it is complete when this returns."""
        await self._saved()
        if self._saved_version == self.version:
            return
        self._saved_version = self.version
        execution = self._runtime.submit(programs.save(self._config), {"step": self.version}, owner=self._owner)
        await execution.node("save")
        self._saving = asyncio.create_task(self._finish_save(execution, self.version))

    async def _finish_save(self, execution: Execution, version: int) -> None:
        results = await execution.result()
        saved = next(iter(sorted(results["save_wait"].items())))[1]
        self._journal.append(
            {
                "type": "checkpoint",
                "step": version,
                "path": saved["checkpoint"],
                "rewards": self._rewards[-STOP_WINDOW:],
            }
        )

    async def _saved(self) -> None:
        if self._saving is not None:
            task, self._saving = self._saving, None
            await task

    async def _stop(self) -> None:
        """Ends a run on request, with a checkpoint from which it can go on exactly."""
        if self._record.stop_checkpoint and self._config.algorithm.max_staleness == 0:
            await self._record.notify(phase="saving a checkpoint")
            await self._save()
        await self._saved()

    async def export(self, out_dir: str) -> None:
        """Digests the trainer's parameters and writes them to `out_dir` ("": digest only)."""
        await self._record.notify(phase="exporting")
        execution = self._runtime.submit(programs.export(self._config), {"out_dir": out_dir}, owner=self._owner)
        results = await execution.result()
        exported = next(iter(sorted(results["export"].items())))[1]
        self.params_digest = str(exported["params_digest"])
        self.export_dir = str(exported["export_dir"]) if exported.get("export_dir") else None

    def _joined(self, worker: str, role: str) -> None:
        if role in ("inference", "reward"):
            task = asyncio.create_task(self._join(worker, role), name=f"join {worker}")
            self._joining.add(task)
            task.add_done_callback(self._join_done)

    def _join_done(self, task: asyncio.Task[None]) -> None:
        self._joining.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._runtime.log(f"{task.get_name()}: {task.exception()}")

    async def _join(self, worker: str, role: str) -> None:
        if role == "reward":
            await self._open_reward(worker)
            return
        await self._publisher.open(worker)
        if self._config.algorithm.max_staleness:
            self._publisher.admit(worker)  # the trainer never stands still: the next publication brings it in
            return
        await self._publisher.join(worker)
        self._runtime.pool_ready("inference", worker)

    def _lost(self, worker: str, role: str) -> None:
        if role == "inference":
            self._publisher.lost(worker)
