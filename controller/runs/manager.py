"""The runs of a controller: start, resume, list, cancel, export. One run at a time uses the cluster.

Owns run ids, run folders and journals. A run that was asked for is journaled before it starts. Must not know how a step is
computed, nor gRPC.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

from waypath.controller.journal import Journal, read_journal
from waypath.controller.runs.files import RunFiles
from waypath.controller.runs.grpo import GrpoRun, Resumed
from waypath.controller.runs.run import RunRecord
from waypath.controller.runtime import Runtime
from waypath.proto import config as configs
from waypath.proto.config import RunConfig
from waypath.proto.errors import ConfigError, NotFoundError, UnavailableError, UserError, WaypathError

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

log = logging.getLogger("waypath.controller")


class RunManager:
    """All runs under `run_dir`, and the task of the one that runs."""

    def __init__(self, runtime: Runtime, run_dir: Path) -> None:
        self._runtime = runtime
        self._run_dir = run_dir
        self._records: dict[str, RunRecord] = {}
        self._active: tuple[RunRecord, asyncio.Task[None]] | None = None
        self._last: GrpoRun | None = None
        self._last_id = ""

    def start(self, config_json: str, resume: str, run_id: str) -> RunRecord:
        """Starts or resumes a run. Raises ConfigError on a bad configuration, UserError while another run is active."""
        if self._active is not None and not self._active[1].done():
            raise UserError(
                f"run {self._active[0].run_id} is using the cluster",
                remedy=f"wait for it, or: waypath cancel {self._active[0].run_id}",
            )
        resumed = None
        if resume:
            config, resumed = self._resumable(resume)
            run_id = resume
        else:
            config = configs.parse(json.loads(config_json))
            run_id = run_id or time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)
            if not RUN_ID.fullmatch(run_id):
                raise ConfigError(f"run id {run_id!r}: letters, digits, '.', '_' and '-' only")
            if (self._run_dir / run_id / "journal").exists():
                raise ConfigError(
                    f"run {run_id} exists", remedy=f"choose another id, or: waypath run --resume {run_id}"
                )
        self._check_cluster(config)
        record = RunRecord(run_id, self._run_dir / run_id, config, steps=resumed.step if resumed else 0)
        self._records[run_id] = record
        task = asyncio.create_task(self._run(config, record, resumed), name=f"run {run_id}")
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

    def _resumable(self, run_id: str) -> tuple[RunConfig, Resumed | None]:
        directory = self._directory(run_id)
        config = configs.load(directory / "config.toml")
        checkpoint: dict[str, Any] | None = None
        eval_before = None
        for entry in read_journal(directory / "journal" / "run.journal"):
            if entry["type"] == "checkpoint":
                checkpoint = entry
            elif entry["type"] == "evaluated":
                eval_before = entry["accuracy"]
            elif entry["type"] == "ended" and entry["status"] == "done":
                raise UserError(f"run {run_id} is done; nothing is left to resume")
        if checkpoint is None:
            return config, None
        return config, Resumed(checkpoint["path"], int(checkpoint["step"]), eval_before, tuple(checkpoint["rewards"]))

    async def _run(self, config: RunConfig, record: RunRecord, resumed: Resumed | None) -> None:
        started_s, run, files, journal = time.monotonic(), None, None, None
        status, cause = "failed", None
        try:
            files = RunFiles(record.directory, config, resumed.step if resumed else 0)
            journal = Journal(record.directory / "journal" / "run.journal")
            journal.append(
                {
                    "type": "admitted",
                    "run_id": record.run_id,
                    "epoch": self._runtime.epoch,
                    "seed": config.seed,
                    "from_step": resumed.step if resumed else 0,
                }
            )
            await self._runtime.wait_for_workers(config.deadlines.open_s)
            run = GrpoRun(self._runtime, config, record, files, journal, resumed)
            status = await run.run()
        except asyncio.CancelledError:
            status, cause = "cancelled", "cancelled before its first step was done"
        except WaypathError as error:
            cause = str(error)
            log.error("run %s failed: %s\n%s", record.run_id, error, error.remote_traceback)
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            log.exception("run %s failed", record.run_id)
        result = {
            "run_id": record.run_id,
            "status": status,
            "steps": run.version if run else (resumed.step if resumed else 0),
            "policy_version": run.version if run else 0,
            "params_digest": run.params_digest if run else None,
            "eval_before": run.eval_before if run else None,
            "eval_after": run.eval_after if run else None,
            "export_dir": run.export_dir if run else None,
            "seconds": round(time.monotonic() - started_s, 3),
            "cause": cause,
        }
        self._last, self._last_id = (run, record.run_id) if status == "done" else (None, "")
        if files is not None:
            files.result(result)
            files.close()
        if journal is not None:
            journal.append({"type": "ended", "status": status, "cause": cause})
            journal.close()
        await record.finish(result)

    def _directory(self, run_id: str) -> Path:
        directory = self._run_dir / run_id
        if not RUN_ID.fullmatch(run_id) or not (directory / "journal").is_dir():
            known = ", ".join(sorted(path.parent.name for path in self._run_dir.glob("*/journal"))) or "none"
            raise NotFoundError(f"no run {run_id!r} in {self._run_dir}; it has: {known}")
        return directory

    def record(self, run_id: str) -> RunRecord:
        """Returns a run by id, also one of an earlier controller. Raises NotFoundError."""
        if run_id not in self._records:
            directory = self._directory(run_id)
            path = directory / "result.json"
            if path.exists():
                result = json.loads(path.read_text(encoding="utf-8"))
            else:
                result = {
                    "run_id": run_id,
                    "status": "interrupted",
                    "steps": 0,
                    "policy_version": 0,
                    "seconds": 0.0,
                    "cause": f"its controller is gone; go on with: waypath run --resume {run_id}",
                }
            self._records[run_id] = RunRecord(run_id, directory, None, int(result["steps"]), result=result)
        return self._records[run_id]

    def records(self) -> list[RunRecord]:
        """Returns all runs of the folder, in name order."""
        names = {path.parent.name for path in self._run_dir.glob("*/journal")} | set(self._records)
        return [self.record(name) for name in sorted(names)]

    async def cancel(self, run_id: str, checkpoint: bool) -> None:
        """Asks a run to stop after its current step; one that has no step yet stops at once."""
        record = self.record(run_id)
        if record.result is not None or self._active is None or self._active[0] is not record:
            return
        record.stop_requested, record.stop_checkpoint = True, checkpoint
        if not record.stepping:
            self._active[1].cancel()

    async def export(self, run_id: str, out: str) -> tuple[str, str]:
        """Writes the run's parameters to the empty or new folder `out`; returns its path and the parameters' digest."""
        record, target = self.record(run_id), Path(out)
        if not target.is_absolute():
            raise UserError(f"export needs an absolute path, found {out!r}")
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UserError(f"{out} exists and is not an empty folder")
        if record.result is None:
            raise UserError(f"run {run_id} is still running", remedy="wait for its end, or cancel it first")
        if self._last is not None and self._last_id == run_id and (self._active is None or self._active[1].done()):
            await self._last.export(str(target))
            return str(self._last.export_dir), str(self._last.params_digest)
        source = record.result.get("export_dir")
        if not source or not Path(str(source)).is_dir():
            raise UnavailableError(
                f"run {run_id} has no export and its trainer is gone",
                remedy=f"end it with: waypath run --resume {run_id}",
            )
        await asyncio.to_thread(shutil.copytree, str(source), target, dirs_exist_ok=True)
        return str(target), str(record.result.get("params_digest"))

    async def close(self) -> None:
        """Cancels the run that is active and waits for its result to be written."""
        if self._active is not None and not self._active[1].done():
            self._active[1].cancel()
            await asyncio.wait([self._active[1]], timeout=10.0)
