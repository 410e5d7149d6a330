"""A controller with simulated workers, for benchmarks; and programs for them, made by hand because nothing is traced.

Used by dispatch.py and scale.py.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from waypath.controller.client.client import Client, connect
from waypath.controller.client.refs import Slice
from waypath.controller.client.stream import Pending
from waypath.controller.graph import Handle, Program, ProgramBuilder
from waypath.controller.graph import Slice as Place
from waypath.proto import client_pb2 as pb
from waypath.proto.channel import new_token
from waypath.proto.errors import LocalError

DIGEST = "0" * 64
START_S = 30.0
JOIN_S = 120.0


class Bare:
    """A controller process and nothing else; a context manager that ends all it started."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="waypath-bench-")
        self._children: list[subprocess.Popen[str]] = []
        self.token_file = Path(self._folder.name) / "token"
        self.token = new_token(self.token_file)

    def __enter__(self) -> Bare:
        port_file = Path(self._folder.name) / "port"
        arguments = [
            "--token-file",
            str(self.token_file),
            "--run-dir",
            self._folder.name,
            "--port-file",
            str(port_file),
        ]
        none = ["--trainers", "0", "--inference", "0", "--rewards", "0"]
        with (Path(self._folder.name) / "controller.log").open("w") as log:
            command = [sys.executable, "-m", "waypath.controller.main", *arguments, *none]
            controller = subprocess.Popen(command, stderr=log, text=True)
        self._children.append(controller)
        self.controller = psutil.Process(controller.pid)
        port = wait_for_port(port_file, controller)
        self.address = f"127.0.0.1:{port}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for child in reversed(self._children):
            child.kill()
            child.wait()
        self._folder.cleanup()

    def workers(self, count: int, *, devices: int = 1, world_size: int = 1, first: int = 0) -> float:
        """Starts simulated workers in a process; returns the seconds from its start to the last welcome."""
        arguments = ["--controller", self.address, "--token-file", str(self.token_file)]
        sizes = ["--workers", str(count), "--first", str(first), "--devices", str(devices)]
        command = [sys.executable, "-m", "waypath.tools.bench.simulated", *arguments, *sizes]
        began = time.perf_counter()
        child = subprocess.Popen([*command, "--world-size", str(world_size)], stdout=subprocess.PIPE, text=True)
        self._children.append(child)
        assert child.stdout is not None
        timer = threading.Timer(JOIN_S, child.kill)
        timer.start()
        line = child.stdout.readline()
        timer.cancel()
        if line.strip() != "joined":
            raise LocalError(f"{count} simulated workers did not join within {JOIN_S:g} s")
        return time.perf_counter() - began

    def client(self, **settings: Any) -> Client:
        """A client of the controller."""
        return connect(self.address, self.token, **settings)

    def cpu_s(self) -> float:
        """CPU seconds of the controller so far."""
        times = self.controller.cpu_times()
        return float(times.user + times.system)


def wait_for_port(port_file: Path, child: subprocess.Popen[Any]) -> int:
    """The port that a process writes; LocalError where it does not within `START_S`."""
    deadline = time.monotonic() + START_S
    while not port_file.exists():
        if child.poll() is not None or time.monotonic() > deadline:
            raise LocalError(f"{child.args!r} does not listen")
        threading.Event().wait(0.01)
    return int(port_file.read_text().strip().rpartition(":")[2])


def chain(name: str, stages: Sequence[Slice], steps: int = 1, sleep_s: float = 0.0) -> Program:
    """`steps` nodes on each of the stages, one after the other, with a transfer between stages."""
    builder = ProgramBuilder(name)
    value: Handle | None = None
    for slice_ in stages:
        on = Place(slice_.name)
        if value is not None:
            value = builder.transfer(value, on=on, takes=(), gives=())
        for _ in range(steps):
            inputs = () if value is None else (value,)
            options = {"sleep_s": sleep_s}
            (value,) = builder.function(DIGEST, *inputs, on=on, takes=[()] * len(inputs), gives=[()], options=options)
    return builder.build()


def submit(client: Client, program: Program) -> Pending:
    """Executes an installed program; returns at once."""
    stream = client._session.stream
    return stream.submit(pb.Submit(execution_id=stream.new_execution_id(), program_id=program.program_id))


def install(client: Client, program: Program) -> None:
    """Installs a program."""
    client._session.install(program)
