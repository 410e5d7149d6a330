"""The runs of a controller: start, resume, list, cancel, export. One run at a time uses the cluster.

Owns run ids and journals. A run that was asked for is journaled before it starts, and the lock of its journal comes before
everything else in its folder: it may be another controller's. However a run ends, and whatever cannot be written then, it ends.
Must not know how a step is computed, nor gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from waypath.controller.journal import Journal
from waypath.controller.runs import recorded
from waypath.controller.runs.files import RunFiles
from waypath.controller.runs.grpo import GrpoRun, Resumed
from waypath.controller.runs.run import RunRecord
from waypath.controller.runtime import Runtime
from waypath.proto import config as configs
from waypath.proto.config import RunConfig
from waypath.proto.errors import ConfigError, UnavailableError, UserError, WaypathError

CLOSE_S = 10.0

log = logging.getLogger("waypath.controller")


class RunManager:
    """All runs under `run_dir`, and the task of the one that runs."""

    def __init__(self, runtime: Runtime, run_dir: Path) -> None:
        self._runtime = runtime
        self._run_dir = run_dir
        self._kept: dict[str, RunRecord] = {}  # the one that runs, and those whose end is not in their folder
        self._active: tuple[RunRecord, asyncio.Task[None]] | None = None
        self._last: tuple[str, GrpoRun] | None = None  # whose parameters the trainer holds
        self._stopping = ""
        self._watching = contextlib.ExitStack()
        self._watching.enter_context(runtime.watch_workers(lambda worker, role: None, self._lost))

    def _lost(self, worker: str, role: str, cause: str) -> None:
        if role == "trainer":
            self._last = None

    def start(self, config_json: str, resume: str, run_id: str) -> RunRecord:
        """Starts or resumes a run. Raises ConfigError on a bad configuration, UserError while another run is active.

        A run that another controller has is refused (UserError, JournalError), and nothing of it is touched.
        """
        if self._stopping:
            raise UnavailableError(f"no run starts any more: {self._stopping}")
        if self._active is not None and not self._active[1].done():
            raise UserError(
                f"run {self._active[0].run_id} is using the cluster",
                remedy=f"wait for it, or: waypath cancel {self._active[0].run_id}",
            )
        if bool(config_json) == bool(resume):
            raise ConfigError("a start needs either a configuration or a run to resume")
        if resume:
            run_id, directory = resume, recorded.find(self._run_dir, resume)
            recorded.check_idle(directory)
            config = configs.load(directory / "config.toml")
        else:
            config = _parse(config_json)
            run_id = run_id or time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)
            directory = self._run_dir / run_id
            if not recorded.RUN_ID.fullmatch(run_id):
                raise ConfigError(f"run id {run_id!r}: letters, digits, '.', '_' and '-' only")
            if (directory / "journal").exists():
                raise ConfigError(
                    f"run {run_id} exists", remedy=f"choose another id, or: waypath run --resume {run_id}"
                )
        self._check_cluster(config)
        journal = Journal(recorded.journal_path(directory))
        try:
            resumed = _resumed(run_id, journal.entries) if resume else None
            done = resumed.step if resumed else 0
            admitted = {"type": "admitted", "run_id": run_id, "epoch": self._runtime.epoch}
            journal.append({**admitted, "seed": config.seed, "from_step": done})
        except BaseException:
            journal.close()
            raise
        record = self._kept[run_id] = RunRecord(run_id, directory, config, steps=done)
        task = asyncio.create_task(self._run(config, record, journal, resumed), name=f"run {run_id}")
        self._active = (record, task)
        return record

    def _check_cluster(self, config: RunConfig) -> None:
        resources = self._runtime.scheduler.resources
        have, want = len(resources.slices.get("trainer", ())), 1
        for size in config.trainer.mesh.values():
            want *= size
        if have != want:
            raise ConfigError(
                f"trainer.mesh {dict(config.trainer.mesh)} needs {want} trainer processes, this cluster has {have}",
                remedy="start the cluster from this configuration, or change trainer.mesh",
            )

    async def _run(self, config: RunConfig, record: RunRecord, journal: Journal, resumed: Resumed | None) -> None:
        started_s, run, files = time.monotonic(), None, None
        status, cause = "failed", None
        self._last = None
        try:
            files = RunFiles(record.directory, config, resumed.step if resumed else 0)
            await self._runtime.wait_for_workers(config.deadlines.open_s)
            run = GrpoRun(self._runtime, config, record, files, journal, resumed)
            self._last = (record.run_id, run)
            status = await run.run()
        except asyncio.CancelledError:
            status, cause = self._stopped(record, max(run.version if run else 0, record.steps))
        except WaypathError as error:
            cause = str(error)
            log.error("run %s failed: %s\n%s", record.run_id, error, error.remote_traceback)
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            log.exception("run %s failed", record.run_id)
        version = max(run.version if run else 0, resumed.step if resumed else 0)
        result = {
            "run_id": record.run_id,
            "status": status,
            "steps": version,
            "policy_version": version,
            "params_digest": run.params_digest if run else None,
            "eval_before": run.eval_before if run else (resumed.eval_before if resumed else None),
            "eval_after": run.eval_after if run else None,
            "export_dir": run.export_dir if run else None,
            "seconds": round(time.monotonic() - started_s, 3),
            "cause": cause,
        }
        if status != "done":
            self._last = None
        try:
            if _conclude(result, files, journal):
                del self._kept[record.run_id]
        finally:
            await record.finish(result)

    def _stopped(self, record: RunRecord, steps: int) -> tuple[str, str]:
        """Status and cause of a run whose task was cancelled: it was asked to stop before its steps, or its controller was."""
        when = f"after {steps} steps" if steps else "before its first step was done"
        if record.stop_requested and not self._stopping:
            return "cancelled", f"cancelled {when}"
        ending = recorded.interruption(record.run_id, f"{self._stopping or 'its task was cancelled'} {when}")
        return ending["status"], ending["cause"]

    def record(self, run_id: str) -> RunRecord:
        """Returns a run by id, also one of another controller. Raises NotFoundError."""
        if run_id in self._kept:
            return self._kept[run_id]
        directory = recorded.find(self._run_dir, run_id)
        result = recorded.result(directory)
        return RunRecord(run_id, directory, None, int(result["steps"]), str(result["status"]), result)

    def attach(self, run_id: str) -> RunRecord:
        """Returns a run that this controller has, or that is over. Raises NotFoundError, UserError."""
        record = self.record(run_id)
        if record.result is not None and record.status == "running":
            raise UserError(
                f"run {run_id} is running under another controller", remedy="turn to that one with --controller"
            )
        return record

    def kept(self) -> list[RunRecord]:
        """Returns the run that is active, and those whose end could not be written."""
        return list(self._kept.values())

    async def listing(self) -> list[dict[str, Any]]:
        """Returns run_id, status, steps, cause and directory of all runs of the folder, in name order."""
        kept = self.kept()
        listed = {str(entry["run_id"]): entry for entry in await asyncio.to_thread(recorded.listing, self._run_dir)}
        for record in kept:
            stands = record.result or {"run_id": record.run_id, "status": record.status, "steps": record.steps}
            listed[record.run_id] = recorded.summary(record.directory, stands)
        return [listed[run_id] for run_id in sorted(listed)]

    async def cancel(self, run_id: str, checkpoint: bool) -> None:
        """Asks a run to stop after its current step; one that has no step yet stops at once."""
        record = self.attach(run_id)
        if record.result is not None or self._active is None or self._active[0] is not record:
            return
        record.stop_requested, record.stop_checkpoint = True, checkpoint
        if not record.stepping:
            self._active[1].cancel()

    async def export(self, run_id: str, out: str) -> tuple[str, str]:
        """Writes the run's parameters to the empty or new folder `out`; returns its path and the parameters' digest.

        They are copied from the run's own export, or come from the trainer while it holds them.
        """
        record, target = self.attach(run_id), Path(out)
        if not target.is_absolute():
            raise UserError(f"export needs an absolute path, found {out!r}")
        recorded.check_empty(target)
        if record.result is None:
            raise UserError(f"run {run_id} is still running", remedy="wait for its end, or cancel it first")
        if (source := recorded.export_of(record.result)) is not None:
            await asyncio.to_thread(recorded.copy_export, source, target)
            return str(target), str(record.result.get("params_digest"))
        if self._last is not None and self._last[0] == run_id and (self._active is None or self._active[1].done()):
            export_dir, digest = await self._last[1].export(str(target))
            return str(export_dir), digest
        raise UnavailableError(
            f"run {run_id} has no export and its trainer is gone",
            remedy=f"end it with: waypath run --resume {run_id}",
        )

    async def close(self, reason: str = "its controller was stopped") -> None:
        """Stops the run that is active and waits for its result to be written."""
        self._stopping = reason
        self._watching.close()
        if self._active is not None and not self._active[1].done():
            self._active[1].cancel()
            _, pending = await asyncio.wait([self._active[1]], timeout=CLOSE_S)
            if pending:
                log.error("run %s did not end within %g s of its cancellation", self._active[0].run_id, CLOSE_S)


def _parse(config_json: str) -> RunConfig:
    try:
        raw = json.loads(config_json)
    except ValueError as error:
        raise ConfigError(f"the configuration is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"the configuration must be a JSON object, found {config_json[:80]}")
    return configs.parse(raw)


def _resumed(run_id: str, entries: Sequence[Mapping[str, Any]]) -> Resumed | None:
    """Where a run goes on by its journal; None where it has no checkpoint. Raises UserError where it is done."""
    checkpoint: Mapping[str, Any] | None = None
    eval_before = None
    for entry in entries:
        if entry["type"] == "checkpoint":
            checkpoint = entry
        elif entry["type"] == "evaluated":
            eval_before = entry["accuracy"]
        elif entry["type"] == "ended" and entry["status"] == "done":
            raise UserError(f"run {run_id} is done; nothing is left to resume")
    if checkpoint is None:
        return None
    return Resumed(checkpoint["path"], int(checkpoint["step"]), eval_before, tuple(checkpoint["rewards"]))


def _conclude(result: dict[str, Any], files: RunFiles | None, journal: Journal) -> bool:
    """Writes how a run ended; what cannot be written becomes part of `result`'s cause. True where it can be read again.

    A run is done once its journal says so: with a journal that cannot be written it has failed, and can be resumed to its end.
    """

    def attempt(work: Callable[[], None]) -> bool:
        try:
            work()
        except Exception as error:
            trouble = str(error) if isinstance(error, WaypathError) else f"{type(error).__name__}: {error}"
            log.error("the end of run %s: %s", result["run_id"], trouble, exc_info=error)
            if trouble not in (result["cause"] or ""):
                result["cause"] = "; ".join(filter(None, (result["cause"], trouble)))
            return False
        return True

    def end() -> None:
        journal.append({"type": "ended", "status": result["status"], "cause": result["cause"], "result": result})

    try:
        if files is not None:
            attempt(files.close)
        journaled = attempt(end)
        if not journaled and result["status"] == "done":
            result["status"] = "failed"
        written = files is not None and attempt(lambda: files.result(result))
    finally:
        journal.close()
    return journaled or written
