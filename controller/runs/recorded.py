"""What a folder of runs says about them, whichever controller ran them: which there are, how each stands, its export.

Reads `runs/<run id>/` and copies from it. A run is a folder with a journal; any other is passed over, and a damaged one is a
run that says so. Called by the run manager, and by the CLI where no controller is up. Must not know how a run is carried out.
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from waypath.controller.journal import read_journal
from waypath.controller.runs.disk import last_line, writing
from waypath.proto.errors import JournalError, NotFoundError, UserError

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
NO_RESULT: Mapping[str, Any] = {
    "status": "interrupted",
    "steps": 0,
    "policy_version": 0,
    "params_digest": None,
    "eval_before": None,
    "eval_after": None,
    "export_dir": None,
    "seconds": 0.0,
    "cause": None,
}


def journal_path(directory: Path) -> Path:
    """The journal of the run in `directory`."""
    return directory / "journal" / "run.journal"


def directories(run_dir: Path) -> Iterator[Path]:
    """Yields the folders of all runs, in name order."""
    for path in sorted(run_dir.glob("*/journal")):
        if RUN_ID.fullmatch(path.parent.name) and path.is_dir():
            yield path.parent


def find(run_dir: Path, run_id: str) -> Path:
    """Returns a run's folder. Raises NotFoundError."""
    directory = run_dir / run_id
    if not RUN_ID.fullmatch(run_id) or not (directory / "journal").is_dir():
        known = ", ".join(path.name for path in directories(run_dir)) or "none"
        raise NotFoundError(f"no run {run_id!r} in {run_dir}; it has: {known}")
    return directory


def result(directory: Path) -> dict[str, Any]:
    """Returns how a run stands: the contents of its result.json, or what its other files say in its place.

    `status` is "running" where a controller has it now, and "interrupted" where the one that had it is gone. A run that
    cannot be read has "failed", with the cause.
    """
    value: dict[str, Any] = {"run_id": directory.name, **NO_RESULT}
    trouble = ""
    try:
        found = json.loads((directory / "result.json").read_text(encoding="utf-8"))
        if isinstance(found, dict) and isinstance(found.get("status"), str) and isinstance(found.get("steps"), int):
            return {**value, **found, "run_id": directory.name}
        trouble = "result.json is damaged: it has no status and steps"
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        trouble = f"result.json is damaged: {error}"
    done = _steps_done(directory)
    value |= {"steps": done, "policy_version": done}
    try:
        if in_use(directory):
            return value | {"status": "running", "cause": None}
        entries = read_journal(journal_path(directory))
    except (OSError, JournalError) as error:
        return value | {"status": "failed", "cause": "; ".join(filter(None, (trouble, str(error))))}
    if not entries:
        return value | {"status": "failed", "cause": "it never began: its journal is empty"}
    if entries[-1]["type"] == "ended" and isinstance(entries[-1].get("result"), dict):
        return {**value, **entries[-1]["result"]}
    return value | interruption(directory.name, trouble or "its controller is gone")


def interruption(run_id: str, why: str) -> dict[str, str]:
    """Status and cause of a run that did not end by itself and can go on."""
    return {"status": "interrupted", "cause": f"{why}; go on with: waypath run --resume {run_id}"}


def _steps_done(directory: Path) -> int:
    line = last_line(directory / "metrics.jsonl")
    return int(line["step"]) + 1 if line is not None and isinstance(line.get("step"), int) else 0


def in_use(directory: Path) -> bool:
    """True while a controller, of this process or another, has the run's journal open. Raises OSError."""
    with journal_path(directory).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def check_idle(directory: Path) -> None:
    """Raises UserError where a controller has the run in `directory` now, or its journal cannot be read."""
    try:
        is_in_use = in_use(directory)
    except OSError as error:
        raise UserError(f"run {directory.name} cannot be read: {error}") from error
    if is_in_use:
        raise UserError(
            f"run {directory.name} is running under another controller", remedy="turn to that one with --controller"
        )


def listing(run_dir: Path) -> list[dict[str, Any]]:
    """Returns run_id, status, steps, cause ("" without one) and directory of every run, in name order."""
    return [summary(directory, result(directory)) for directory in directories(run_dir)]


def summary(directory: Path, value: Mapping[str, Any]) -> dict[str, Any]:
    """Returns one run's entry in a listing."""
    entry = {key: value[key] for key in ("run_id", "status", "steps")}
    return entry | {"cause": str(value.get("cause") or ""), "directory": str(directory)}


def check_empty(out: Path) -> None:
    """Raises UserError where an export cannot go to `out`: it may be an empty folder, or not be there."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder", remedy="choose another one")


def export_of(value: Mapping[str, Any]) -> Path | None:
    """Returns the folder of the model that a run exported at its end, if it is there still."""
    source = value.get("export_dir")
    return Path(str(source)) if source and Path(str(source)).is_dir() else None


def copy_export(source: Path, out: Path) -> None:
    """Copies an exported model to `out`, which appears whole or not at all. Raises UserError, LocalError."""
    with writing(out, remedy="free space or choose another folder"):
        check_empty(out)
        partial = out.parent / f".{out.name}.partial"
        if partial.exists():
            shutil.rmtree(partial)
        try:
            shutil.copytree(source, partial)
            if out.exists():
                out.rmdir()
            partial.rename(out)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
