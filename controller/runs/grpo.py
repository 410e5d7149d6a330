"""The GRPO run: open, warm start, publish, then step after step until it is done, and the end.

Reads top to bottom. Every computation is an execution of one of `programs`; this loop only decides what comes next. It
holds no tensor and no trajectory. Must not know sockets; time is asked of the event loop through `Runtime`.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from waypath.controller.journal import Journal
from waypath.controller.pacing import Pacing
from waypath.controller.runs import metrics, programs
from waypath.controller.runs.executor import Executor
from waypath.controller.runs.files import RunFiles
from waypath.controller.runs.members import Members
from waypath.controller.runs.publication import Begun, Publisher
from waypath.controller.runs.run import RunRecord
from waypath.controller.runs.trace import PhaseSpan
from waypath.controller.runtime import Execution, Runtime
from waypath.proto.config import RunConfig
from waypath.proto.errors import LocalError, WaypathError, WorkerLostError

STOP_WINDOW = 3
OPENING = "opening trainer and engines"


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
        self._executor = Executor(
            runtime, self._owner, config.cluster.rejoin_timeout_s, lambda: self._members.troubles()
        )
        self._publisher = Publisher(runtime, self._executor, config, journal)
        self._members = Members(runtime, self._executor, self._publisher, config, self._fail)
        self._failure: asyncio.Future[WaypathError] = asyncio.get_running_loop().create_future()
        self._pacing = Pacing(config.algorithm.max_staleness, config.trainer.checkpoint_every)
        self._step_program = programs.step(config)
        self._saving: asyncio.Task[None] | None = None
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
        with self._runtime.watch_workers(self._members.joined, self._lost):
            work = asyncio.create_task(self._work(), name=self._owner)
            try:
                ends: set[asyncio.Future[Any]] = {work, self._failure}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    raise self._failure.result()
                return work.result()
            finally:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                if self._saving is not None:
                    self._saving.cancel()
                    await asyncio.gather(self._saving, return_exceptions=True)
                await self._members.close()
                self._runtime.release(self._owner, "the run is over")

    async def _work(self) -> str:
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
        await self._export_own()
        return "done"

    def _fail(self, error: WaypathError) -> None:
        """Ends the run with `error`, whatever it is doing."""
        if not self._failure.done():
            self._failure.set_result(error)

    def _lost(self, worker: str, role: str, cause: str) -> None:
        if role == "trainer":
            self._fail(
                WorkerLostError(
                    f"worker {worker} was lost ({cause}), and the policy in training with it",
                    remedy="resume the run: it goes on from its newest checkpoint",
                )
            )
        else:
            self._members.lost(worker, role, cause)

    async def _open(self) -> None:
        await self._record.notify(phase=OPENING)
        config = self._config
        restore = {"path": self._resumed.path, "step": self._resumed.step} if self._resumed else None
        opening = self._executor.run(
            programs.open_trainer(config, self._record.run_id, restore), what="opening the trainer"
        )
        opened, _ = await asyncio.gather(opening, self._members.open())
        self._publisher.set_source(opened["open"])
        await self._compare_fingerprint(next(iter(sorted(opened["open"].items())))[1]["fingerprint"])
        self.version = self._resumed.step if self._resumed else 0
        if self._resumed is None and config.warm_start.steps:
            await self._record.notify(phase=f"warm start, {config.warm_start.steps} supervised steps")
            await self._executor.run(programs.warm_start(config), what="the warm start")
            await self._save()

    async def _compare_fingerprint(self, found: Mapping[str, Any]) -> None:
        """Journals what the run's bits depend on beside its config; a resumed run under another fingerprint is told so."""
        before = [entry["fingerprint"] for entry in self._journal.entries if entry["type"] == "opened"]
        self._journal.append({"type": "opened", "fingerprint": dict(found)})
        changed = fingerprint_changes(before[-1], found) if before and self._resumed else ""
        if changed:
            warning = f"warning: resumed under another fingerprint ({changed}): results may differ in their last bits"
            self._runtime.log(warning)
            await self._record.notify(phase=f"{OPENING}, {warning}")

    async def _publish(self, version: int, begun: Begun | None = None) -> metrics.Publication:
        return await self._publisher.finish(begun or self._publisher.begin(version))

    async def _evaluate(self) -> float | None:
        wanted = self._config.evaluation.prompts
        prompts = min(wanted, await self._publisher.eval_rows()) if wanted else 0
        if not prompts:
            return None
        await self._record.notify(phase=f"evaluating {prompts} held-out prompts")
        args = {"step": self.version, "first_group_id": 0, "version": self.version}
        results = await self._executor.run(programs.evaluate(self._config, prompts), args, what="the evaluation")
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
        execution = self._executor.submit(self._step_program, args)
        publication = None
        if self._config.algorithm.max_staleness:  # the next step may be in the trainer's queue before this one is done
            publication = self._publisher.begin(step + 1, ahead=True)
        return _InFlight(step, execution, publication, time.monotonic())

    async def _complete(self, item: _InFlight) -> None:
        await self._record.notify(phase=f"step {item.step}")
        results = await self._executor.result(item.execution, f"step {item.step}")
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
        what = f"the checkpoint of version {self.version}"
        record = {"type": "checkpoint", "step": self.version, "rewards": self._rewards[-STOP_WINDOW:]}
        execution = self._executor.submit(programs.save(self._config), {"step": self.version})
        await self._executor.node(execution, "save", what)
        self._saving = asyncio.create_task(self._finish_save(execution, record, what))

    async def _finish_save(self, execution: Execution, record: Mapping[str, Any], what: str) -> None:
        """Journals `record`, made when the state was copied: steps that end before the write does are not in it."""
        results = await self._executor.result(execution, what)
        saved = next(iter(sorted(results["save_wait"].items())))[1]
        self._journal.append({**record, "path": saved["checkpoint"]})

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

    async def _export_own(self) -> None:
        """Exports into the run's folder, over what an end that was interrupted left there: it can be made again."""
        target = self._record.directory / "export"
        if target.exists():
            try:
                await asyncio.to_thread(shutil.rmtree, target)
            except OSError as error:
                raise LocalError(f"the unfinished export {target} cannot be replaced: {error}") from error
        await self._record.notify(phase="exporting")
        self.export_dir, self.params_digest = await self.export(str(target) if self._config.storage.export else "")

    async def export(self, out_dir: str) -> tuple[str | None, str]:
        """Writes the trainer's parameters to `out_dir` ("": digest only); returns where they are, and their digest."""
        results = await self._executor.run(programs.export(self._config), {"out_dir": out_dir}, what="the export")
        exported = next(iter(sorted(results["export"].items())))[1]
        export_dir = exported.get("export_dir")
        return str(export_dir) if export_dir else None, str(exported["params_digest"])


def fingerprint_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What differs between two fingerprints, as "threads: 1 → 2"; "" where nothing does."""
    keys = sorted((before.keys() | now.keys()) - {"id"})
    return "; ".join(f"{key}: {before.get(key)} → {now.get(key)}" for key in keys if before.get(key) != now.get(key))
