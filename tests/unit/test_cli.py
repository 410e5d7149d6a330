"""The command line without processes: arguments, exit codes, checks before a start, following a run."""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self, cast

import pytest
from rich.console import Console

from waypath.controller.client.client import Client, Run, RunResult, StepRecord
from waypath.controller.journal import Journal
from waypath.proto import config as configs
from waypath.proto.errors import ConfigError, NotFoundError, UnavailableError, WaypathError
from waypath.tools import cli, launch
from waypath.tools.follow import Interrupts, follow, recorded_config, stop_limit_s
from waypath.tools.progress import View

Update = StepRecord | str | RunResult | WaypathError


def tiny(tmp_path: Path, **overrides: Any) -> configs.RunConfig:
    base = {
        "model": {"random": {"alphabet": "0123456789>"}},
        "task": {"name": "sort", "prompts_per_step": 2},
        "algorithm": {"group_size": 2},
        "inference": {"slots": 4, "prompt_buckets": [8]},
        "storage": {"run_dir": str(tmp_path / "runs")},
    }
    return configs.load(base, overrides)


def write(tmp_path: Path, config: configs.RunConfig) -> str:
    path = tmp_path / "job.toml"
    path.write_text(config.to_toml())
    return str(path)


# -- exit codes and messages


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["run"], "give a CONFIG"),
        (["run", "nowhere.toml"], "cannot read nowhere.toml"),
        (["run", "JOB", "--set", "steps"], "expected KEY=VALUE"),
        (["run", "JOB", "--set", "stepz=3"], "did you mean 'steps'"),
        (["run", "JOB", "--set", "model.path=nowhere"], "exactly one of model.path"),
        (["run", "JOB", "--set", "task.name=sums"], "task.name = 'sums'"),
        (["run", "JOB", "--resume", "r1", "--set", "steps=3"], "exclude each other"),
        (["run", "--resume", "r1"], "no run 'r1' in runs"),
        (["run", "JOB", "--controller", "127.0.0.1:1"], "--controller needs --token-file"),
        (["up", "JOB", "--listen", "7777"], "expected HOST:PORT"),
        (["status"], "no local cluster is up in runs"),
        (["watch", "r1"], "no local cluster is up in runs"),
        (["cancel", "r1"], "no local cluster is up in runs"),
        (["run", "JOB", "--resume", "r1", "--controller", "127.0.0.1:1"], "leave CONFIG and --set out"),
        (["run", "--resume", "r1", "--set", "steps=3", "--controller", "127.0.0.1:1"], "leave CONFIG and --set out"),
        (["export", "r1", "--out", "out"], "no run 'r1' in runs; it has: none"),
        (["bench", "speed"], "no benchmark 'speed'"),
    ],
)
def test_bad_requests_exit_with_2_and_say_why(
    argv: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = write(tmp_path, tiny(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert cli.main([job if word == "JOB" else word for word in argv]) == cli.USAGE
    assert message in capsys.readouterr().err


def test_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["fly"])
    assert caught.value.code == cli.USAGE
    assert "invalid choice: 'fly'" in capsys.readouterr().err


def test_launcher_checks_the_port_before_it_starts_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write(tmp_path, tiny(tmp_path))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert cli.main(["up", job, "--listen", address]) == cli.USAGE
    assert f"cannot listen on {address}: Address already in use" in capsys.readouterr().err
    assert list((tmp_path / "runs").iterdir()) == []


def recorded_run(run_dir: Path, name: str, config: configs.RunConfig | None = None) -> Path:
    directory = run_dir / name
    Journal(directory / "journal" / "run.journal").close()
    if config is not None:
        (directory / "config.toml").write_text(config.to_toml())
    return directory


def test_run_of_another_folder_keeps_its_recorded_configuration(tmp_path: Path) -> None:
    config = tiny(tmp_path, steps=7)
    recorded_run(tmp_path / "runs", "r1", config)
    by_config = cli.parser().parse_args(["run", write(tmp_path, config), "--resume", "r1"])
    by_folder = cli.parser().parse_args(["run", "--resume", "r1", "--run-dir", str(tmp_path / "runs")])
    assert cli._config(by_config) == cli._config(by_folder) == config


def test_a_config_that_a_resumed_run_would_ignore_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded_run(tmp_path / "runs", "r1", tiny(tmp_path, steps=7, stop_at_reward=0.5))
    job = write(tmp_path, tiny(tmp_path, steps=9, **{"task.prompts_per_step": 3}))
    assert cli.main(["run", job, "--resume", "r1"]) == cli.USAGE
    error = capsys.readouterr().err
    assert "differs from it: steps: 7 → 9; stop_at_reward: 0.5 → None; task.prompts_per_step: 2 → 3" in error
    assert f"waypath run --resume r1 --run-dir {tmp_path / 'runs'}" in error


# -- what is on disk


def test_runs_are_listed_from_the_folder_when_nothing_is_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, done in (("r1", True), ("r2", False)):
        directory = recorded_run(tmp_path, name)
        with contextlib.closing(Journal(directory / "journal" / "run.journal")) as journal:
            journal.append({"type": "admitted"})
        (directory / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"st')
        if done:
            (directory / "result.json").write_text(json.dumps({"status": "failed", "steps": 2, "cause": "disk full"}))
    assert cli.main(["runs", "--run-dir", str(tmp_path)]) == cli.DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["r1", "failed", "2", "disk", "full"]
    assert lines[2].split()[:3] == ["r2", "interrupted", "2"] and "waypath run --resume r2" in lines[2]


def test_export_copies_what_a_finished_run_exported(tmp_path: Path) -> None:
    export = recorded_run(tmp_path, "r1") / "export"
    export.mkdir()
    (export / "config.json").write_text("{}")
    result = {"status": "done", "steps": 2, "export_dir": str(export)}
    (tmp_path / "r1" / "result.json").write_text(json.dumps(result))
    argv = ["export", "r1", "--run-dir", str(tmp_path), "--out", str(tmp_path / "out")]
    assert cli.main(argv) == cli.DONE
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    assert cli.main(argv) == cli.USAGE  # it isn't empty now


def test_an_export_that_is_not_there_or_cannot_be_copied_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = recorded_run(tmp_path, "r1")
    argv = ["export", "r1", "--run-dir", str(tmp_path), "--out"]
    assert cli.main([*argv, str(tmp_path / "out")]) == cli.USAGE
    assert "has no exported model" in capsys.readouterr().err
    (directory / "export").mkdir()
    result = {"status": "done", "steps": 2, "export_dir": str(directory / "export")}
    (directory / "result.json").write_text(json.dumps(result))
    (tmp_path / "file").touch()
    assert cli.main([*argv, str(tmp_path / "file" / "out")]) == cli.FAILED
    assert "file/out could not be written: Not a directory" in capsys.readouterr().err


def test_a_cluster_that_ends_stops_its_own_runs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopping(FakeClient):
        """Has run r1; r9 of its folder is another cluster's."""

        run_r1 = FakeRun()

        def runs(self) -> list[dict[str, Any]]:
            return [{"run_id": name, "status": "running", "directory": ""} for name in ("r1", "r9")]

        def status(self) -> dict[str, Any]:
            status = "cancelled" if self.run_r1.cancelled.is_set() else "running"
            return {"runs": [{"run_id": "r1", "status": status, "steps": 3}]}

        def run(self, run_id: str) -> FakeRun:
            assert run_id == "r1"
            return self.run_r1

    view = Recorder()
    cli._stop_runs(cast(Client, Stopping()), view)
    assert Stopping.run_r1.cancelled.is_set()
    assert not any("r9" in line or "did not stop" in line for line in view.seen)
    Stopping.run_r1 = FakeRun()
    monkeypatch.setattr(cli, "FALLBACK_STOP_S", 0.01)
    monkeypatch.setattr(FakeRun, "cancel", lambda self, checkpoint: None)
    cli._stop_runs(cast(Client, Stopping()), view)
    assert view.seen[-1] == "run r1 did not stop within 0 s"


# -- the client


class Sent(Client):
    """Keeps the requests that it would send."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1:1", "t")
        self.requests: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def call(self, method: Any, request: Any, doing: str, timeout: float = 0.0) -> Any:
        self.requests.append(request)
        return request


def test_start_run_applies_overrides_to_any_configuration(tmp_path: Path) -> None:
    config = tiny(tmp_path, steps=7)
    for source in (config, config.to_json(), write(tmp_path, config)):
        with Sent() as client:
            client.start_run(source, overrides={"steps": 30, "optimizer.learning_rate": 1e-3})
            sent = configs.parse(json.loads(client.requests[0].config_json))
        assert (sent.steps, sent.optimizer.learning_rate, sent.task) == (30, 1e-3, config.task)


def test_start_run_refuses_what_it_would_ignore(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    with Sent() as client:
        with pytest.raises(ConfigError, match="needs a config"):
            client.start_run()
        with pytest.raises(ConfigError, match="needs a config"):
            client.start_run(overrides={"steps": 3})
        with pytest.raises(ConfigError, match="keeps its configuration"):
            client.start_run(config, resume="r1")
        with pytest.raises(ConfigError, match="keeps its configuration"):
            client.start_run(overrides={"steps": 3}, resume="r1")
        assert client.requests == []
        client.start_run(resume="r1")
    assert [(sent.resume_run, sent.config_json) for sent in client.requests] == [("r1", "")]


def test_cluster_file_of_a_dead_launcher_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / launch.CLUSTER_FILE
    path.write_text(json.dumps({"pid": os.getpid(), "address": "127.0.0.1:1", "token_file": "t"}))
    found = launch.read_cluster_file(path)
    assert found is not None and found["address"] == "127.0.0.1:1"
    path.write_text(json.dumps({"pid": 2**22 + 1}))
    assert launch.read_cluster_file(path) is None
    path.write_text("{")
    assert launch.read_cluster_file(path) is None


@pytest.mark.parametrize(("text", "port"), [("7777\n", 7777), ("127.0.0.1:7777", 7777), ("", None), ("x", None)])
def test_port_file(text: str, port: int | None, tmp_path: Path) -> None:
    (tmp_path / "port").write_text(text)
    assert launch.read_port(tmp_path / "port") == port
    assert launch.read_port(tmp_path / "none") is None


# -- following a run


class FakeRun:
    """Stands in for the client's Run: yields what it is given, holding back what comes after `None` until a cancel."""

    id = "r1"

    def __init__(self, *updates: Update | None) -> None:
        self._updates = updates
        self.cancelled = threading.Event()

    def updates(self, from_step: int = 0) -> Iterator[StepRecord | str | RunResult]:
        for update in self._updates:
            if update is None:
                assert self.cancelled.wait(30.0)
            elif isinstance(update, WaypathError):
                raise update
            else:
                yield update

    def cancel(self, checkpoint: bool = True) -> None:
        assert checkpoint
        self.cancelled.set()


class Recorder(View):
    """Keeps what it is shown."""

    def __init__(self) -> None:
        super().__init__(Console())
        self.seen: list[str] = []

    def phase(self, text: str) -> None:
        self.seen.append(text)

    def step(self, metrics: Any) -> None:
        self.seen.append(f"step {metrics['step']}")

    def event(self, line: str) -> None:
        self.seen.append(line)


def ended(status: str = "done", cause: str | None = None) -> RunResult:
    return RunResult("r1", status, 2, 2, None, None, None, None, 1.0, cause)


class FakeClient:
    """Knows the folder of run r1; answers the first `failures` questions for the status with an error."""

    def __init__(self, directory: Path | str = "", failures: int = 0) -> None:
        self._directory, self._failures = str(directory), failures

    def runs(self) -> list[dict[str, Any]]:
        return [{"run_id": "r1", "directory": self._directory}]

    def status(self) -> dict[str, Any]:
        self._failures -= 1
        if self._failures >= 0:
            raise UnavailableError("busy")
        return {"workers": []}


def followed(
    run: FakeRun, view: View, interrupts: Interrupts, client: FakeClient | None = None, **options: Any
) -> RunResult | None:
    return follow(cast(Client, client or FakeClient()), cast(Run, run), view, interrupts, **options)


def test_follow_shows_steps_and_returns_the_result() -> None:
    view = Recorder()
    run = FakeRun("opening", StepRecord({"step": 0}), StepRecord({"step": 1}), ended())
    assert followed(run, view, Interrupts()) == ended()
    assert view.seen == ["opening", "step 0", "step 1"]


def test_first_interrupt_stops_the_run_with_a_checkpoint() -> None:
    view, interrupts = Recorder(), Interrupts()
    interrupts.count = 1
    run = FakeRun(StepRecord({"step": 0}), None, ended("cancelled"))
    result = followed(run, view, interrupts)
    assert result is not None and result.status == "cancelled" and run.cancelled.is_set()
    assert any("with a checkpoint" in line for line in view.seen)


@pytest.mark.parametrize(
    ("staleness", "ending"), [(0, "with a checkpoint"), (1, "its last checkpoint stays the newest")]
)
def test_a_stop_may_take_as_long_as_the_runs_own_deadlines(staleness: int, ending: str, tmp_path: Path) -> None:
    config = tiny(tmp_path, **{"deadlines.train_s": 5000.0, "algorithm.max_staleness": staleness})
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert recorded_config(cast(Client, FakeClient(tmp_path)), "r1") == config
    limits = config.deadlines
    assert stop_limit_s(config) > (1 + staleness) * (limits.generate_s + limits.score_s + 5000.0) + limits.checkpoint_s
    view, interrupts = Recorder(), Interrupts()
    interrupts.count = 1
    run = FakeRun(StepRecord({"step": 0}), None, ended("cancelled"))
    followed(run, view, interrupts, FakeClient(tmp_path))
    assert any(ending in line for line in view.seen)


def test_a_run_that_does_not_stop_is_given_up_after_its_deadlines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("waypath.tools.follow.stop_limit_s", lambda config: 0.05)
    (tmp_path / "config.toml").write_text(tiny(tmp_path).to_toml())
    interrupts = Interrupts()
    interrupts.count = 1
    run = FakeRun(StepRecord({"step": 0}))
    run.updates = lambda from_step=0: iter(lambda: time.sleep(0.01) or "still at it", None)  # type: ignore[method-assign]
    result = followed(run, Recorder(), interrupts, FakeClient(tmp_path))
    assert result is not None and result.cause == "no stop within 0 s"


def test_the_panel_goes_on_after_a_status_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waypath.tools.follow.STATUS_EVERY_S", 0.01)
    shown = threading.Event()

    class Panel(Recorder):
        wants_status = True

        def status(self, status: Mapping[str, Any]) -> None:
            shown.set()

    run = FakeRun(None, ended())
    threading.Thread(target=lambda: (shown.wait(30.0), run.cancelled.set()), daemon=True).start()
    assert followed(run, Panel(), Interrupts(), FakeClient(failures=3)) == ended()
    assert shown.is_set()


def test_interrupt_detaches_from_a_run_of_someone_else() -> None:
    interrupts = Interrupts()
    interrupts.count = 1
    run = FakeRun(StepRecord({"step": 0}), None)
    assert followed(run, Recorder(), interrupts, stop_on_interrupt=False) is None
    assert not run.cancelled.is_set()
    run.cancelled.set()


def test_cluster_failure_ends_the_run_with_its_cause() -> None:
    run = FakeRun(StepRecord({"step": 0}), UnavailableError("socket closed"))
    result = followed(run, Recorder(), Interrupts(), failure=lambda: "controller (pid 7) was killed by SIGKILL")
    assert result is not None and result.status == "failed"
    assert result.cause == "the cluster ended: controller (pid 7) was killed by SIGKILL"


def test_trainer_death_is_named_beside_the_controllers_cause() -> None:
    view = Recorder()
    run = FakeRun(StepRecord({"step": 0}), ended("failed", "worker trainer-1 is gone"))
    result = followed(run, view, Interrupts(), deaths=lambda: ["trainer-1 (pid 9) was killed by SIGKILL"])
    assert result is not None and result.cause is not None
    assert result.cause.startswith("worker trainer-1 is gone") and "pid 9" in result.cause


def test_broken_connection_is_raised_where_nothing_explains_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waypath.tools.follow.BROKEN_DEADLINE_S", 0.05)
    run = FakeRun(StepRecord({"step": 0}), UnavailableError("socket closed"))
    with pytest.raises(UnavailableError, match="socket closed"):
        followed(run, Recorder(), Interrupts())


def test_second_interrupt_kills() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts.count == 1 and interrupts()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)  # a third is ignored while everything is being killed
        assert interrupts.count == 3
    assert signal.getsignal(signal.SIGINT) is before


def test_registered_reads_the_controllers_status() -> None:
    assert launch.registered({"workers": [{"name": "trainer-0"}, {"name": "reward-0"}]}) == {"trainer-0", "reward-0"}


def test_no_cluster_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="waypath up CONFIG"):
        launch.find_cluster(tmp_path)
