"""The run manager without a cluster: whose run it is, how it ends whatever cannot be written, and what is listed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from waypath.controller.client_service import ClientService
from waypath.controller.journal import Journal, read_journal
from waypath.controller.main import cluster
from waypath.controller.runs import manager as managers
from waypath.controller.runs import recorded
from waypath.controller.runs.files import RunFiles
from waypath.controller.runs.grpo import Resumed
from waypath.controller.runs.manager import RunManager
from waypath.controller.runs.run import RunRecord
from waypath.controller.runtime import Runtime
from waypath.proto import client_pb2 as pb
from waypath.proto import config as configs
from waypath.proto.errors import ConfigError, JournalError, LocalError, NotFoundError, UnavailableError, UserError

CONFIG = configs.load(
    {
        "model": {"random": {"alphabet": "01>\n"}},
        "task": {"name": "sort"},
        "cluster": {"trainer_processes": 1},
        "trainer": {"mesh": {"fsdp": 1}},
    }
)
START = json.dumps(CONFIG.to_json())
Work = Callable[["FakeRun"], Coroutine[Any, Any, str]]


async def done(run: FakeRun) -> str:
    return "done"


async def blocked(run: FakeRun) -> str:
    await asyncio.Event().wait()
    return "done"


class FakeRun:
    """Stands in for GrpoRun: does two steps with a checkpoint between, then `work`."""

    work: Work = staticmethod(done)
    exported: ClassVar[list[str]] = []

    def __init__(
        self,
        runtime: Runtime,
        config: configs.RunConfig,
        record: RunRecord,
        files: RunFiles,
        journal: Journal,
        resumed: Resumed | None,
    ) -> None:
        self.record, self.files, self.journal = record, files, journal
        self.version = resumed.step if resumed else 0
        self.eval_before, self.eval_after, self.params_digest, self.export_dir = 0.25, None, None, None

    async def run(self) -> str:
        while self.version < 2:
            self.files.metrics({"step": self.version, "reward_mean": 0.5})
            self.files.sample({"step": self.version, "prompt": "p"})
            self.version += 1
            entry = {"type": "checkpoint", "step": self.version, "path": "p", "rewards": [0.5]}
            self.journal.append(entry)
            await self.record.notify(phase=f"step {self.version}", steps=self.version)
        return await type(self).work(self)

    async def export(self, out_dir: str) -> tuple[str, str]:
        self.exported.append(out_dir)
        return out_dir, "digest"


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ready(self: Runtime, timeout_s: float) -> None:
        return

    monkeypatch.setattr(managers, "GrpoRun", FakeRun)
    monkeypatch.setattr(Runtime, "wait_for_workers", ready)
    monkeypatch.setattr(FakeRun, "work", staticmethod(done))
    monkeypatch.setattr(FakeRun, "exported", [])


@contextlib.asynccontextmanager
async def managing(run_dir: Path) -> AsyncIterator[RunManager]:
    manager = RunManager(Runtime(cluster(1, 1, 1), "c", 1), run_dir)
    try:
        async with asyncio.timeout(30.0):
            yield manager
    finally:
        await manager.close()


async def ended(record: RunRecord) -> dict[str, Any]:
    result: dict[str, Any] = {}
    async for kind, value in record.watch(0):
        if kind == "result":
            result = value
    return result


async def stepped(record: RunRecord, steps: int = 2) -> None:
    while record.steps < steps:
        await asyncio.sleep(0)


def full_disk(*args: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def contents(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Every file of a folder: inode and bytes."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_ino, path.read_bytes()) for path in files}


# -- how a run ends


@pytest.mark.parametrize("fails", [True, False])
def test_a_run_ends_when_nothing_can_be_written_any_more_and_can_be_resumed(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with managing(tmp_path) as manager:
            with monkeypatch.context() as full:

                async def work(run: FakeRun) -> str:
                    full.setattr(os, "fsync", full_disk)
                    if fails:
                        raise LocalError("the checkpoint could not be written: No space left on device")
                    return "done"

                full.setattr(FakeRun, "work", staticmethod(work))
                record = manager.start(START, "", "r1")
                result = await ended(record)
            assert (result["status"], result["steps"]) == ("failed", 2)
            assert ("the checkpoint could not be written" in result["cause"]) == fails
            assert "run.journal: [Errno 28] No space left" in result["cause"]
            assert "result.json could not be written: No space left on device" in result["cause"]
            (entry,) = await manager.listing()
            assert (entry["status"], entry["cause"]) == ("failed", result["cause"])
            assert await ended(manager.start("", "r1", "")) | {"seconds": 0} == {
                "run_id": "r1",
                "status": "done",
                "steps": 2,
                "policy_version": 2,
                "params_digest": None,
                "eval_before": 0.25,
                "eval_after": None,
                "export_dir": None,
                "seconds": 0,
                "cause": None,
            }
            with pytest.raises(UserError, match="r1 is done"):
                manager.start("", "r1", "")
        assert not recorded.in_use(tmp_path / "r1")

    asyncio.run(scenario())


def test_a_run_whose_files_cannot_be_made_fails_with_the_cause(tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "r1" / "samples.jsonl").mkdir(parents=True)
        async with managing(tmp_path) as manager:
            result = await ended(manager.start(START, "", "r1"))
        assert result["status"] == "failed" and "samples.jsonl could not be written" in result["cause"]
        assert recorded.result(tmp_path / "r1")["cause"] == result["cause"]  # the journal has it

    asyncio.run(scenario())


def test_a_result_that_was_lost_is_read_from_the_journal(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with managing(tmp_path) as manager:
            result = await ended(manager.start(START, "", "r1"))
            assert read_journal(recorded.journal_path(tmp_path / "r1"))[-1]["result"] == result
            (tmp_path / "r1" / "result.json").write_text("")
            assert await ended(manager.record("r1")) == result

    asyncio.run(scenario())


def test_a_controller_that_stops_interrupts_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(FakeRun, "work", staticmethod(blocked))
        async with managing(tmp_path) as manager:
            record = manager.start(START, "", "r1")
            await stepped(record)
            record.stepping = True
            await manager.cancel("r1", checkpoint=True)  # asked to stop after its step, which is not over yet
            await manager.close("its controller was stopped (SIGTERM)")
            with pytest.raises(UnavailableError, match="SIGTERM"):
                manager.start(START, "", "r2")
        written = json.loads((tmp_path / "r1" / "result.json").read_text())
        assert record.result == written
        assert (written["status"], written["steps"]) == ("interrupted", 2)
        assert (
            written["cause"]
            == "its controller was stopped (SIGTERM) after 2 steps; go on with: waypath run --resume r1"
        )
        monkeypatch.setattr(FakeRun, "work", staticmethod(done))
        async with managing(tmp_path) as manager:
            assert (await ended(manager.start("", "r1", "")))["status"] == "done"

    asyncio.run(scenario())


def test_a_cancel_before_the_first_step_is_a_cancel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with managing(tmp_path) as manager:
            monkeypatch.setattr(FakeRun, "run", blocked)
            record = manager.start(START, "", "r1")
            while record.run_id not in {kept.run_id for kept in manager.kept()} or manager._last is None:
                await asyncio.sleep(0)
            await manager.cancel("r1", checkpoint=True)
            result = await ended(record)
        assert (result["status"], result["cause"]) == ("cancelled", "cancelled before its first step was done")

    asyncio.run(scenario())


def test_a_resumed_run_that_fails_early_keeps_the_steps_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async def fail(self: Runtime, timeout_s: float) -> None:
            raise LocalError("no workers")

        monkeypatch.setattr(FakeRun, "work", staticmethod(blocked))
        async with managing(tmp_path) as manager:
            await stepped(manager.start(START, "", "r1"))
        monkeypatch.setattr(Runtime, "wait_for_workers", fail)
        async with managing(tmp_path) as manager:
            result = await ended(manager.start("", "r1", ""))
        assert (result["status"], result["steps"], result["policy_version"]) == ("failed", 2, 2)

    asyncio.run(scenario())


# -- whose run it is


def test_a_run_that_is_live_elsewhere_is_refused_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(FakeRun, "work", staticmethod(blocked))
        async with managing(tmp_path) as theirs, managing(tmp_path) as ours:
            await stepped(theirs.start(START, "", "r1"))
            before = contents(tmp_path)
            with pytest.raises(UserError, match="r1 is running under another controller"):
                ours.start("", "r1", "")
            with monkeypatch.context() as late:  # it began after the question
                late.setattr(recorded, "in_use", lambda directory: False)
                with pytest.raises(JournalError, match="in use by another process"):
                    ours.start("", "r1", "")
            assert contents(tmp_path) == before
            assert [(r["status"], r["steps"]) for r in await ours.listing()] == [("running", 2)]
            for refused in (ours.cancel("r1", True), ours.export("r1", str(tmp_path / "out"))):
                with pytest.raises(UserError, match="another controller"):
                    await refused
            with pytest.raises(UserError, match="another controller"):
                ours.attach("r1")
            assert ours.kept() == []
            await theirs.close("its controller was stopped (SIGTERM)")
            (listed,) = await ours.listing()
            assert listed["status"] == "interrupted" and "SIGTERM" in listed["cause"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", "", ""), "either a configuration or a run to resume"),
        ((START, "r1", ""), "either a configuration or a run to resume"),
        (("{", "", ""), "not JSON"),
        (("[]", "", ""), "must be a JSON object"),
        (("{}", "", ""), "model"),
        ((START, "", "../x"), "run id '../x'"),
    ],
)
def test_a_start_that_makes_no_sense_is_the_users_error(
    arguments: tuple[str, str, str], message: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with managing(tmp_path) as manager:
            with pytest.raises(ConfigError, match=message):
                manager.start(*arguments)
        assert not list(tmp_path.iterdir())

    asyncio.run(scenario())


# -- what is listed


class Context:
    """The gRPC context of a call that may be refused."""

    def set_trailing_metadata(self, metadata: Any) -> None:
        return

    async def abort(self, code: Any, details: str) -> None:
        raise AssertionError(f"{code}: {details}")


def test_an_odd_folder_is_one_odd_run_at_most(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with managing(tmp_path) as manager:
            await ended(manager.start(START, "", "good"))
            for name, text in (("empty", ""), ("cut", '{"status": "do'), ("list", "[]"), ("odd", '{"status": 3}')):
                await ended(manager.start(START, "", name))
                (tmp_path / name / "result.json").write_text(text)
                journal = recorded.journal_path(tmp_path / name)
                os.truncate(journal, journal.stat().st_size - 3)  # without its last record
            for name in ("good copy", ".hidden"):
                (tmp_path / name / "journal").mkdir(parents=True)
            (tmp_path / "no-journal").mkdir()
            (tmp_path / "bare" / "journal").mkdir(parents=True)
            (tmp_path / "damaged" / "journal").mkdir(parents=True)
            recorded.journal_path(tmp_path / "damaged").write_text("no journal at all")
            service = ClientService(manager._runtime, manager)
            reply = await service.ListRuns(pb.ListRunsRequest(), Context())
            await service.Status(pb.StatusRequest(), Context())
            found = {run.run_id: (run.status, run.steps) for run in reply.runs}
            causes = {run.run_id: run.cause for run in reply.runs}
            assert found == {
                "bare": ("failed", 0),
                "cut": ("interrupted", 2),
                "damaged": ("failed", 0),
                "empty": ("interrupted", 2),
                "good": ("done", 2),
                "list": ("interrupted", 2),
                "odd": ("interrupted", 2),
            }
            assert "result.json is damaged" in causes["cut"] and "waypath run --resume cut" in causes["cut"]
            assert "not a journal" in causes["damaged"] and "No such file" in causes["bare"]
            assert [manager.record(name).status for name in found] == [status for status, _ in found.values()]
            for name in ("good copy", ".hidden", "no-journal"):
                with pytest.raises(NotFoundError, match="it has: bare, cut, damaged, empty, good, list, odd"):
                    manager.record(name)

    asyncio.run(scenario())


# -- export


def test_an_export_on_disk_is_copied_and_the_trainer_is_asked_only_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async def work(run: FakeRun) -> str:
            folder = run.record.directory / "export"
            folder.mkdir()
            (folder / "config.json").write_text("{}")
            cast(Any, run).export_dir, cast(Any, run).params_digest = str(folder), "abc"
            return "done"

        async with managing(tmp_path / "runs") as manager:
            with monkeypatch.context() as exporting:
                exporting.setattr(FakeRun, "work", staticmethod(work))
                await ended(manager.start(START, "", "r1"))
            out = tmp_path / "out"
            assert await manager.export("r1", str(out)) == (str(out), "abc")
            assert (out / "config.json").read_text() == "{}" and FakeRun.exported == []
            assert manager.record("r1").phase == "done"
            with pytest.raises(UserError, match="not an empty folder"):
                await manager.export("r1", str(out))
            (tmp_path / "file").touch()
            with pytest.raises(LocalError, match="file/out could not be written"):
                await manager.export("r1", str(tmp_path / "file" / "out"))
            assert not list(tmp_path.glob(".*partial"))

            await ended(manager.start(START, "", "r2"))
            assert await manager.export("r2", str(tmp_path / "two")) == (str(tmp_path / "two"), "digest")
            for hook in manager._runtime._hooks:
                hook[1]("trainer-0", "trainer", "killed")
            with pytest.raises(UnavailableError, match="its trainer is gone"):
                await manager.export("r2", str(tmp_path / "three"))
            assert FakeRun.exported == [str(tmp_path / "two")]

    asyncio.run(scenario())
