"""Real clusters for tests: started on free ports in a temporary folder, waited for with deadlines, killed by pid.

Owns the helpers `running` (a cluster of this process), `Command` (the `waypath` command as a process of its own, for
Ctrl-C and exit codes), `eventually`, and the check that nothing is left over. Import it by path-free name:
`from tests.cluster import running, small`.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from waypath.controller.client.client import Client, Run, RunResult, StepRecord, connect
from waypath.proto import config as configs
from waypath.proto.config import AnyConfig, ClusterConfig, RunConfig
from waypath.tools import preflight
from waypath.tools.launch import CLUSTER_FILE, LocalCluster
from waypath.tools.supervisor import MARKER, marked

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 180.0
SHM = Path("/dev/shm")

# The tiny job cut to seconds: no warm start, small batches. Shapes are shared by all tests, so the cache compiles once.
SMALL: dict[str, Any] = {
    "steps": 3,
    "warm_start.steps": 0,
    "task.prompts_per_step": 4,
    "algorithm.group_size": 4,
    "algorithm.minibatches": 1,
    "trainer.micro_batch_rows": 8,
    "trainer.checkpoint_every": 2,
    "inference.slots": 16,
    "evaluation.prompts": 8,
    "optimizer.learning_rate": 1e-3,
    "reward.function": "tests.rewards:overlap",
    "reward.allow_import": ["tests"],
    "cluster.compilation_cache": str(ROOT / ".cache" / "jax"),
}


def small(tmp_path: Path, **overrides: Any) -> RunConfig:
    """`examples/tiny.toml` cut to seconds, with its runs in `tmp_path`; `overrides` have `__` for the dot."""
    changes = {key.replace("__", "."): value for key, value in overrides.items()}
    places = {"storage.run_dir": str(tmp_path / "runs"), "storage.checkpoint_dir": str(tmp_path / "runs")}
    return configs.load(ROOT / "examples" / "tiny.toml", {**SMALL, **places, **changes})


def compute(tmp_path: Path, worlds: int = 2, processes: int = 2, devices: int = 1) -> ClusterConfig:
    """A cluster for programs alone, with its folder in `tmp_path`."""
    config = configs.load_cluster(
        {
            "compute": {
                "worlds": worlds,
                "processes": processes,
                "devices": devices,
                "services": ["examples.my_service"],
                "allow_import": ["examples"],
            },
            "storage": {"run_dir": str(tmp_path / "runs")},
            "cluster": {"compilation_cache": str(ROOT / ".cache" / "jax")},
        }
    )
    assert isinstance(config, ClusterConfig)
    return config


def eventually(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """The first true value of `condition`, asked for again and again; fails after `deadline_s`, naming `what`."""
    clock = threading.Event()
    deadline = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {deadline_s:.0f} s: {what}"
        clock.wait(0.05)
    return value


class Cluster:
    """A cluster that this process supervises."""

    def __init__(self, local: LocalCluster, client: Client, events: list[str]) -> None:
        self.local, self.client, self.events = local, client, events
        self.address, self.token = local.address, local.token
        self.run_dir = local.run_dir

    def pids(self) -> dict[str, int]:
        """Name → pid of every process that is up now."""
        return {row.name: row.pid for row in self.local.rows()}

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Send a real signal to one process, by its pid; returns the pid."""
        pid = self.pids()[name]
        os.kill(pid, number)
        return pid

    def wait_restarted(self, name: str, old_pid: int) -> None:
        """Wait until a process of that name with another pid is registered with the controller."""
        eventually(
            lambda: any(w["name"] == name and w["pid"] != old_pid for w in self.client.status()["workers"]),
            f"{name} is back",
        )

    def run(self, config: RunConfig | None = None, resume: str | None = None) -> Run:
        """Start a run (by default of the cluster's own configuration)."""
        if config is None:
            assert isinstance(self.local.config, RunConfig)
            config = self.local.config
        return self.client.start_run(None if resume else config, resume=resume)

    def wait_step(self, run: Run, step: int, deadline_s: float = DEADLINE_S) -> None:
        """Wait until step `step` (from 0) of a run is done; fails with its cause where the run ends before."""
        found: list[StepRecord | RunResult] = []

        def read() -> None:
            for update in run.updates():
                if isinstance(update, RunResult) or (isinstance(update, StepRecord) and update.step >= step):
                    found.append(update)
                    return

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(deadline_s)
        assert found, f"step {step} not within {deadline_s:.0f} s\n{self.tails()}"
        assert isinstance(found[0], StepRecord), f"the run ended first: {found[0]}"

    def result(self, run: Run, deadline_s: float = DEADLINE_S) -> RunResult:
        """The run's result; fails with the ends of all logs after `deadline_s`."""
        found: list[RunResult] = []
        reader = threading.Thread(target=lambda: found.append(run.result()), daemon=True)
        reader.start()
        reader.join(deadline_s)
        assert found, f"run {run.id} has no result after {deadline_s:.0f} s\n{self.tails()}"
        return found[0]

    def log(self, name: str) -> str:
        """What a process has written."""
        return next(row.log for row in self.local.rows() if row.name == name).read_text(errors="replace")

    def tails(self, lines: int = 15) -> str:
        """The ends of all logs, for a failing test's message."""
        parts = []
        for row in self.local.rows():
            text = row.log.read_text(errors="replace").splitlines()[-lines:]
            parts.append(f"--- {row.name} (pid {row.pid})\n" + "\n".join(text))
        return "\n".join(parts)


@contextlib.contextmanager
def running(
    config: AnyConfig, *, restart_trainers: bool = False, ready: bool = True, via: Callable[[str], str] = str
) -> Iterator[Cluster]:
    """A cluster for `config` on free ports; ends it and asserts that nothing of it is left."""
    preflight.check(config)
    events: list[str] = []
    segments = shared_memory()
    local = LocalCluster(config, restart_trainers=restart_trainers, on_event=events.append, via=via)
    try:
        with local, connect(local.address, local.token) as client:
            if ready:
                local.wait_ready(client, DEADLINE_S)
            yield Cluster(local, client, events)
    finally:
        assert_nothing_left(local.cluster_id, local.address, local.run_dir, segments)


def shared_memory() -> set[str]:
    """Names of the shared-memory segments of this machine."""
    return {path.name for path in SHM.iterdir()} if SHM.is_dir() else set()


def assert_nothing_left(cluster_id: str, address: str, run_dir: Path, segments: set[str]) -> None:
    """No process, port, shared-memory segment, token or cluster file of a cluster is left."""
    left = [f"{process.pid} {' '.join(process.cmdline())}" for process in marked(cluster_id)]
    assert not left, f"processes left: {left}"
    if address:
        host, _, port = address.rpartition(":")
        with socket.socket() as probe:
            assert probe.connect_ex((host, int(port))) != 0, f"{address} still listens"
    ours = {name for name in shared_memory() - segments if name.startswith("waypath")}
    assert not ours, f"shared memory left: {ours}"
    assert not list(run_dir.glob("cluster-*/token")), "a token is left"
    assert not (run_dir / CLUSTER_FILE).exists(), "cluster.json is left"


class Command:
    """The `waypath` command as a process of its own; its output is in `output()`. A context manager that kills it."""

    def __init__(self, arguments: Sequence[str], folder: Path, env: Mapping[str, str] | None = None) -> None:
        self.path = folder / "command.log"
        with self.path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "waypath.tools.cli", *arguments],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "COLUMNS": "160", **(env or {})},
            )

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *details: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def output(self) -> str:
        """Everything printed so far."""
        return self.path.read_text(errors="replace")

    def children(self) -> dict[str, int]:
        """Worker or module name → pid of the processes that this command started and that live."""
        found = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.Error):
                    words = child.cmdline()
                    if "--name" in words:
                        found[words[words.index("--name") + 1]] = child.pid
                    elif "-m" in words:
                        found[words[words.index("-m") + 1]] = child.pid
        return found

    def cluster_ids(self) -> set[str]:
        """Markers of the clusters that this command's children belong to."""
        markers = set()
        for pid in self.children().values():
            with contextlib.suppress(psutil.Error):
                markers.add(psutil.Process(pid).environ()[MARKER])
        return markers

    def signal(self, number: int = signal.SIGINT) -> None:
        """Send a signal to the command alone, as a terminal would to its foreground process."""
        self.process.send_signal(number)

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """The exit code; fails with the output after `deadline_s`."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the command still runs after {deadline_s:.0f} s:\n{self.output()}") from None

    def wait_output(self, text: str, deadline_s: float = DEADLINE_S) -> None:
        """Wait until the output contains `text`; fails at once where the command ends without."""

        def look() -> bool:
            if text in self.output():
                return True
            assert self.process.poll() is None, f"ended without {text!r}:\n{self.output()}"
            return False

        eventually(look, f"{text!r} in the output", deadline_s)


def read_result(run_dir: Path, run_id: str) -> dict[str, Any]:
    """A run's result.json."""
    value: dict[str, Any] = json.loads((run_dir / run_id / "result.json").read_text())
    return value


def read_metrics(run_dir: Path, run_id: str) -> list[dict[str, Any]]:
    """A run's metrics, one object a step."""
    return [json.loads(line) for line in (run_dir / run_id / "metrics.jsonl").read_text().splitlines()]


def comparable(metrics: Sequence[Mapping[str, Any]], *without: str) -> list[dict[str, Any]]:
    """Metrics without times and rates (`*_s`, `*_per_s`) and without keys that start with one of `without`."""
    return [
        {key: value for key, value in line.items() if not key.endswith("_s") and not key.startswith(without or ("\0",))}
        for line in metrics
    ]
