"""A cluster on this machine: one controller and its workers, supervised, from one run configuration.

Owns which processes there are, their arguments, the cluster's folder (token, ports, logs) and `cluster.json`,
by which other commands find it. Must not know what a run does; keeping processes alive is the supervisor's.
Called by the CLI (`waypath up`, `waypath run`), the benchmarks and the process tests. As a script: `python
tools/launch.py CONFIG` is `waypath run CONFIG`.

What a death means: an inference or reward worker is restarted; the trainer's world (all members and its
coordination sidecar) goes down as a whole and is restarted with a fresh sidecar if `restart_trainers`, else
it stays down and the controller ends the run; the controller takes the cluster with it.
"""

import contextlib
import json
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from waypath.controller.client.client import Client, connect
from waypath.proto.channel import new_token
from waypath.proto.config import AnyConfig, load_cluster
from waypath.proto.errors import ConfigError, DeadlineError, NotFoundError, WaypathError, WorkerLostError
from waypath.tools.supervisor import Child, Policy, ProcessSpec, RestartBudget, Supervisor, Unit, log_tail

CLUSTER_FILE = "cluster.json"
CONTROLLER_START_S = 30.0
SIDECAR_START_S = 30.0
READY_S = 180.0
CONTROLLER_FLAGS = {"trainer": "--trainers", "inference": "--inference", "reward": "--rewards"}

# glibc: back large buffers by huge pages and keep them, for a step on CPU frees and faults in a model's size several
# times (2 to 3 s of system time a step of SmolLM2). One arena, because a thread's own arena maps and unmaps each large buffer.
LARGE_BUFFERS = {
    "GLIBC_TUNABLES": ":".join(
        f"glibc.malloc.{name}" for name in ("hugetlb=1", "arena_max=1", "mmap_max=0", "trim_threshold=100000000000")
    )
}

Spawn = Callable[[ProcessSpec], Child]


class InterruptedStart(Exception):
    """Ctrl-C came while the cluster was starting: not an error, the user changed their mind."""


@dataclass(frozen=True)
class Row:
    """One line of the summary of what is up."""

    name: str
    pid: int
    role: str
    world: str
    port: str
    log: Path


class LocalCluster:
    """A controller and its workers on this machine; a context manager that leaves nothing behind.

    `config` is checked already (`preflight.check`). `listen` is the controller's address; port 0: a free one.
    `on_event` gets a line about each death and restart; `interrupted` is asked while waiting for processes.
    `via` is given the controller's address once and returns the one that workers dial (a relay in front of it).
    """

    def __init__(
        self,
        config: AnyConfig,
        *,
        restart_trainers: bool = False,
        listen: str = "127.0.0.1:0",
        on_event: Callable[[str], None] = lambda line: None,
        interrupted: Callable[[], bool] = lambda: False,
        via: Callable[[str], str] = lambda address: address,
    ) -> None:
        self.config = config
        self.cluster_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        self.run_dir = Path(config.storage.run_dir).absolute()
        self.directory = self.run_dir / f"cluster-{self.cluster_id}"
        self.token_file = self.directory / "token"
        self.token = ""
        self.address = ""
        self._logs = self.directory / "logs"
        self._logs_moved = False
        self._listen = listen
        self._restart_trainers = restart_trainers
        self._interrupted = interrupted
        self._via = via
        self._dialled = ""
        self._ports: dict[str, int] = {}
        budget = RestartBudget(limit=config.cluster.max_restarts)
        self.supervisor = Supervisor(
            self.cluster_id, budget=budget, on_event=on_event, stopped_s=config.cluster.heartbeat_timeout_s
        )

    def __enter__(self) -> "LocalCluster":
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        try:
            if kind is None or not issubclass(kind, KeyboardInterrupt):
                self.stop()
        finally:
            self.kill()  # also when a second Ctrl-C breaks the stop

    def start(self) -> None:
        """Start every process; returns when the controller listens and the workers are on their way.

        Raises ConfigError where the port is in use, WorkerLostError with a log's end where a process dies.
        """
        check_port(self._listen)
        self._logs.mkdir(parents=True)
        (self.directory / "ports").mkdir()
        self.token = new_token(self.token_file)
        self.supervisor.add(Unit("controller", Policy.FATAL, self._launch_controller))
        policy = Policy.RESTART if self._restart_trainers else Policy.END
        if self.config.cluster.trainer_processes:
            launch = partial(self._launch_world, "trainer", "trainer", self.config.cluster.trainer_processes, 1)
            self.supervisor.add(Unit("trainer", policy, launch))
        compute = self.config.compute
        for number in range(compute.worlds):
            world = f"compute-{number}"
            launch = partial(self._launch_world, world, "compute", compute.processes, compute.devices)
            self.supervisor.add(Unit(world, Policy.RESTART, launch))
        for role in ("inference", "reward"):
            for index in range(self._counts()[role]):
                name = f"{role}-{index}"
                launch = partial(self._launch_alone, name, role)
                self.supervisor.add(Unit(name, Policy.RESTART, launch))
        self._announce()

    def wait_ready(self, client: Client, deadline_s: float = READY_S) -> None:
        """Wait until every worker has registered. Raises WorkerLostError; DeadlineError names the missing."""
        wanted = set(self.worker_names())
        deadline = time.monotonic() + deadline_s
        while missing := wanted - self._registered(client):
            self._check(None)
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"workers not registered after {deadline_s:.0f} s: {', '.join(sorted(missing))}",
                    remedy=f"Their logs are in {self._logs}",
                )
            self.supervisor.pause(0.1)

    def _registered(self, client: Client) -> set[str]:
        try:
            return registered(client.status())
        except WaypathError:
            self.supervisor.pause(1.0)  # for the supervisor to see why the controller doesn't answer
            self._check(None)
            raise

    def worker_names(self) -> list[str]:
        """Names of the workers that this configuration asks for."""
        compute = self.config.compute
        of_runs = [f"{role}-{index}" for role, count in self._counts().items() for index in range(count)]
        return of_runs + [f"compute-{w}-{index}" for w in range(compute.worlds) for index in range(compute.processes)]

    def _counts(self) -> dict[str, int]:
        counts = self.config.cluster
        return {
            "trainer": counts.trainer_processes,
            "inference": counts.inference_processes,
            "reward": counts.reward_processes,
        }

    def failure(self) -> str | None:
        """Why the cluster cannot go on, once it cannot."""
        return self.supervisor.failure

    def trainer_deaths(self) -> list[str]:
        """One line for each trainer world member that died and was not restarted."""
        ended = [] if self._restart_trainers else [d for d in self.supervisor.deaths if d.unit == "trainer"]
        return [death.describe() for death in ended]

    def rows(self) -> list[Row]:
        """What is up, for the summary. `port` is the one that this launcher knows of."""
        return [
            Row(spec.name, child.pid, spec.role, spec.world, str(self._ports.get(spec.name, "")), spec.log)
            for child in self.supervisor.children()
            for spec in [child.spec]
        ]

    def adopt_logs(self, run_directory: Path) -> None:
        """Move the logs into a run's folder: the cluster exists for that run alone."""
        target = run_directory / "logs"
        target.mkdir(parents=True, exist_ok=True)

        def move(log: Path) -> Path:
            place = target / log.name
            if log.exists():
                number = 0
                while place.exists():  # an earlier part of a resumed run
                    number += 1
                    place = target / f"{log.stem}.{number}.log"
                log.rename(place)
            return place

        self.supervisor.relocate(move)
        self._logs, self._logs_moved = target, True

    def stop(self, grace_s: float = 10.0) -> None:
        """End every process, kindly first; remove token, ports and `cluster.json`. Idempotent."""
        self.supervisor.stop(grace_s)
        self._clean()

    def kill(self) -> None:
        """End every process at once. Idempotent."""
        self.supervisor.kill()
        self._clean()

    def _launch_controller(self, spawn: Spawn) -> None:
        argv = ["--listen", self._listen, "--token-file", str(self.token_file), "--run-dir", str(self.run_dir)]
        argv += ["--heartbeat-timeout-s", str(self.config.cluster.heartbeat_timeout_s)]
        for role, count in self._counts().items():
            argv += [CONTROLLER_FLAGS[role], str(count)]
        port = self._start_with_port(spawn, "controller", "waypath.controller.main", argv, CONTROLLER_START_S)
        self.address = f"{self._listen.rpartition(':')[0]}:{port}"
        self._dialled = self._via(self.address)

    def _launch_world(self, world: str, role: str, count: int, devices: int, spawn: Spawn) -> None:
        """Starts a world of `count` processes and, where there are several, what coordinates them."""
        coordinator = None
        if count > 1:
            name = "coordinator" if role == "trainer" else f"coordinator-{world}"
            argv = ["--processes", str(count)]
            port = self._start_with_port(spawn, name, "waypath.tools.coordinator", argv, SIDECAR_START_S, world=world)
            coordinator = f"127.0.0.1:{port}"
        for index in range(count):
            spawn(self._worker(f"{world}-{index}", role, world, index, count, coordinator, devices))

    def _launch_alone(self, name: str, role: str, spawn: Spawn) -> None:
        spawn(self._worker(name, role, name, 0, 1, None))

    def _start_with_port(
        self, spawn: Spawn, name: str, module: str, argv: list[str], deadline_s: float, world: str = ""
    ) -> int:
        port_file = self.directory / "ports" / name
        port_file.unlink(missing_ok=True)
        command = (sys.executable, "-m", module, *argv, "--port-file", str(port_file))
        child = spawn(ProcessSpec(name, name, world, command, self._log(name)))
        deadline = time.monotonic() + deadline_s
        while (port := read_port(port_file)) is None:
            self._check(child)
            if time.monotonic() > deadline:
                raise DeadlineError(f"{name} did not listen within {deadline_s:.0f} s{log_tail(child.spec.log)}")
            self.supervisor.pause(0.02)
        self._ports[name] = port
        return port

    def _worker(
        self, name: str, role: str, world: str, index: int, count: int, coordinator: str | None, devices: int = 1
    ) -> ProcessSpec:
        threads = str(self.config.cluster.threads)
        argv = [sys.executable, "-m", "waypath.workers.main", "--controller", self._dialled]
        argv += ["--token-file", str(self.token_file), "--name", name, "--role", role, "--world", world]
        argv += ["--process-index", str(index), "--process-count", str(count), "--threads", threads]
        argv += ["--transfer-path", self.config.cluster.transfer_path, "--shm-dir", self.config.cluster.shm_dir]
        argv += ["--cache-dir", str(Path(self.config.cluster.compilation_cache).absolute())]
        if devices > 1:
            argv += ["--local-devices", str(devices)]
        if coordinator is not None:
            argv += ["--coordinator", coordinator]
        compute = self.config.compute if role == "compute" else None
        for prefix in self.config.reward.allow_import if compute is None else compute.allow_import:
            argv += ["--allow-import", prefix]
        for module in () if compute is None else compute.services:
            argv += ["--services", module]
        env = {
            "NPROC": threads,
            "OMP_NUM_THREADS": threads,
            "JAX_NUM_CPU_DEVICES": str(devices),
            "PYTHONUNBUFFERED": "1",
        }
        if role != "reward":
            env |= LARGE_BUFFERS
        return ProcessSpec(name, role, world, tuple(argv), self._log(name), env)

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def _check(self, child: Child | None) -> None:
        if self._interrupted() or self.supervisor.stopping:
            raise InterruptedStart
        if self.supervisor.failure is not None:
            raise WorkerLostError(self.supervisor.failure)
        if child is not None and child.process.poll() is not None:
            raise WorkerLostError(f"{child.spec.name} ended while it started{log_tail(child.spec.log)}")
        if deaths := self.trainer_deaths():
            log = next(d.log for d in self.supervisor.deaths if d.unit == "trainer")
            raise WorkerLostError(f"{deaths[0]}{log_tail(log)}")

    def _announce(self) -> None:
        path = self.run_dir / CLUSTER_FILE
        if read_cluster_file(path) is not None:
            return  # another cluster of this folder is up; this one is found by its address
        value = {"address": self.address, "token_file": str(self.token_file), "pid": os.getpid()}
        value |= {"cluster_id": self.cluster_id, "logs": str(self._logs)}
        part = path.with_suffix(".part")
        part.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        os.replace(part, path)

    def _clean(self) -> None:
        path = self.run_dir / CLUSTER_FILE
        with contextlib.suppress(OSError, ValueError):
            if json.loads(path.read_text(encoding="utf-8")).get("cluster_id") == self.cluster_id:
                path.unlink()
        self.token_file.unlink(missing_ok=True)
        shutil.rmtree(self.directory / "ports", ignore_errors=True)
        if self._logs_moved:
            shutil.rmtree(self.directory, ignore_errors=True)


@contextlib.contextmanager
def local_client(
    config: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> Iterator[Client]:
    """A client of a cluster that is started on this machine for it, from a file such as examples/compute.toml.

    The cluster ends with the context. Raises what starting raises.
    """
    with LocalCluster(load_cluster(config, overrides)) as cluster, connect(cluster.address, cluster.token) as client:
        cluster.wait_ready(client)
        yield client


def client_of(where: Sequence[str], config: str | Path) -> AbstractContextManager[Client]:
    """A client of the controller that `where` names, as (HOST:PORT, TOKENFILE), or of a cluster of its own where it is empty."""
    if not where:
        return local_client(config)
    if len(where) != 2:
        raise ConfigError(f"expected HOST:PORT TOKENFILE, or nothing, found {' '.join(where)}")
    return connect(where[0], token_file=where[1])


def check_port(address: str) -> None:
    """Raises ConfigError where `address` (host:port) is malformed or taken."""
    host, colon, text = address.rpartition(":")
    if not (colon and host and text.isdigit() and int(text) < 65536):
        raise ConfigError(f"address {address!r}: expected HOST:PORT, such as 127.0.0.1:7777")
    if int(text) == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), int(text)))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {address}: {error.strerror or error}",
                remedy="Choose another port with --listen, or 127.0.0.1:0 for a free one",
            ) from None


def read_port(path: Path) -> int | None:
    """The port that a process wrote ("PORT" or "HOST:PORT", one line), or None while it has not."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return None
    last = text.strip().rpartition(":")[2]
    return int(last) if last.isdigit() else None


def read_cluster_file(path: Path) -> dict[str, Any] | None:
    """The contents of a `cluster.json` whose launcher is alive, else None."""
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return value if psutil.pid_exists(int(value["pid"])) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def find_cluster(run_dir: Path) -> Client:
    """Connect to the local cluster whose runs are in `run_dir`. Raises NotFoundError where none is up."""
    found = read_cluster_file(run_dir / CLUSTER_FILE)
    if found is None:
        raise NotFoundError(
            f"no local cluster is up in {run_dir}",
            remedy="Start one with `waypath up CONFIG`, or name one with --controller and --token-file",
        )
    return connect(str(found["address"]), token_file=Path(str(found["token_file"])))


def registered(status: dict[str, Any]) -> set[str]:
    """Names of the workers that the controller's status lists as present."""
    return {str(worker["name"]) for worker in status["workers"]}


def main(argv: list[str]) -> int:
    """`python tools/launch.py CONFIG …`: the same as `waypath run CONFIG …`."""
    from waypath.tools.cli import main as waypath_main

    return waypath_main(["run", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
