"""`waypath bench dispatch`: what a controller in the middle costs, in the manner of the Pathways paper (section 5.1).

On real JAX workers, in worlds of 1, 2 and 4 processes: an all-reduce of a scalar followed by an add, dispatched OpByOp (a
program each, waited for), Chained (one program of 128 nodes) and Fused (one node that holds the steps), against the same loops in
multi-controller JAX (local_loop.py), gRPC streams that do nothing (echo.py) and Ray (ray_actors.py). On simulated workers: how long a node must
compute for full throughput, pipelines, and several clients. Every comparison is interleaved in one run.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console

from waypath.controller.client.client import Client
from waypath.controller.client.stream import Pending
from waypath.proto import channel
from waypath.proto.errors import LocalError
from waypath.tools.bench import bare, echo, local_loop, ray_actors, report
from waypath.tools.bench.report import Row, p99, row
from waypath.tools.launch import local_client

NODES = local_loop.NODES
WORLDS = (1, 2, 4)
FUSED_S = 0.2
MAX_FUSED_STEPS = 200_000_000
LOCAL = "multi-controller JAX, same run"


def main(json_file: Path | None, plot: Path | None = None, quick: bool = False) -> int:
    """Runs everything, prints the table and writes what is asked for; returns the exit code."""
    console = Console()
    facts = report.machine()
    rows: list[Row] = []
    for size in (1, 2) if quick else WORLDS:
        console.print(f"a world of {size}: OpByOp, Chained, Fused", highlight=False)
        rows += real(size, quick)
    console.print("simulated workers: computation time, pipelines, clients, shares", highlight=False)
    rows += sleep_devices((8,) if quick else (8, 16, 32, 64))
    rows += pipelines((2, 4) if quick else (2, 4, 8, 16))
    rows += clients((1, 4) if quick else (1, 2, 4, 8, 16), 1.0 if quick else 3.0)
    for weights in ((1, 1, 1, 1), (1, 2, 4, 8)):
        rows += shares(weights, 3.0 if quick else 10.0)
    report.show(console, rows)
    report.write(json_file, "dispatch", rows, facts)
    report.plot(plot, rows, "dispatch")
    return 0


# Real workers


def real(size: int, quick: bool) -> list[Row]:
    """The three ways of dispatch in a world of `size` processes."""
    case = f"{size} worker{'s' if size > 1 else ''}"
    pairs = 4 if quick else 20
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="waypath-bench-"))
        client = stack.enter_context(
            local_client({"compute": {"worlds": 1, "processes": size}, "storage": {"run_dir": folder}})
        )
        ours = _Ours(client, size, 64 if quick else _fused_steps(client, size))
        peers = stack.enter_context(_local(size, ours.fused_steps))
        for name, count in (("chained", NODES), ("local", NODES), ("fused", 1)):
            run: Callable[[], float] = getattr(ours, name)
            for _ in range(2):
                run(), peers(name)
            mine, theirs = abba(run, lambda name=name: peers(name), pairs)  # type: ignore[misc]
            unit = "s" if name == "fused" else "µs a node"
            scale = 1.0 if name == "fused" else 1e6 / count
            title = {"chained": "Chained", "local": "Chained, no communication", "fused": "Fused"}[name]
            value, base = statistics.median(mine) * scale, statistics.median(theirs) * scale
            rows.append(row(case, f"{title}, median", value, unit, LOCAL, base))
            rows.append(row(case, f"{title}, p99", p99(mine) * scale, unit, LOCAL, p99(theirs) * scale))
            if name == "fused":
                for quarter, label in ((0, "first quartile"), (2, "third quartile")):
                    a, b = (statistics.quantiles(values, n=4)[quarter] for values in (mine, theirs))
                    rows.append(row(case, f"{title}, {label} of {pairs} pairs", a, unit, LOCAL, b))
            else:
                rows.append(row(case, f"{title}, the controller's share", value - base, unit))
        alone = statistics.median(ours.op_by_op() for _ in range(20 if quick else 100))
        floors = stack.enter_context(_floors(size))
        direct, road = (statistics.median(floor() for _ in range(20 if quick else 200)) for floor in floors)
        rows.append(
            row(case, "OpByOp, round trip", alone * 1e6, "µs", "gRPC stream, client → relay → workers", road * 1e6)
        )
        rows.append(row(case, "OpByOp, round trip", alone * 1e6, "µs", "gRPC stream, client → worker", direct * 1e6))
        chained = statistics.median(ours.local() for _ in range(5)) / NODES
        together = (case, "throughput, Chained without communication", 1 / chained, "nodes/s")
        rows.append(row(*together, "OpByOp", 1 / alone))
        if ray_actors.installed():
            ray = stack.enter_context(_ray(size))
            call_s = statistics.median(ray("alone") for _ in range(20 if quick else 200))
            link_s = statistics.median(ray("link") for _ in range(3 if quick else 10))
            rows.append(row(case, "OpByOp, round trip", alone * 1e6, "µs", "Ray, a call of all actors", call_s * 1e6))
            rows.append(row(*together, "Ray, calls one by one", 1 / call_s))
            rows.append(row(*together, "Ray, calls chained by refs", 1 / link_s))
    return rows


def _fused_steps(client: Client, size: int) -> int:
    """How many steps take `FUSED_S`, and a margin: from what 1,000 take more than 1, and then from what more take."""
    steps = 1000
    for _ in range(3):
        few, many = _Ours(client, size, 1), _Ours(client, size, steps)
        few.fused(), many.fused()
        short, long = (min(side.fused() for _ in range(5)) for side in (few, many))
        steps = min(MAX_FUSED_STEPS, max(64, round(1.3 * FUSED_S / max(long - short, 1e-5) * steps)))
    return steps


class _Ours:
    """The loops as programs."""

    def __init__(self, client: Client, size: int, fused_steps: int) -> None:
        import numpy as np
        from jax.sharding import PartitionSpec as P

        self.fused_steps = fused_steps
        slice_ = client.slice(mesh={"x": size})
        split = P("x")
        step = client.function(local_loop.all_reduce_add, slice_, split, split, name="all_reduce_add")
        self._add = client.function(local_loop.add, slice_, split, split, name="add")
        self._fused = client.function(local_loop.fused(fused_steps), slice_, split, split, name="fused")
        self._x = client.put(np.ones(size, np.float32), slice_, split).wait()
        self._chain = client.program(_repeated(step), name="chained")
        self._local = client.program(_repeated(self._add), name="local")

    def chained(self) -> float:
        """Seconds of one program of `NODES` nodes, from the call to its end."""
        return _timed(lambda: self._chain(self._x).wait())

    def local(self) -> float:
        """The same without communication."""
        return _timed(lambda: self._local(self._x).wait())

    def fused(self) -> float:
        """Seconds of one node that holds all steps."""
        return _timed(lambda: self._fused(self._x).wait())

    def op_by_op(self) -> float:
        """Seconds of one call that is waited for."""
        return _timed(lambda: self._add(self._x).wait())


def _repeated(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def chain(x: Any) -> Any:
        for _ in range(NODES):
            x = function(x)
        return x

    return chain


def _timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def abba(one: Callable[[], float], other: Callable[[], float], pairs: int) -> tuple[list[float], list[float]]:
    """`pairs` measurements of each, in the order A B B A, so that a drift of the machine meets both alike."""
    a: list[float] = []
    b: list[float] = []
    for number in range(pairs):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            (a, b)[side].append((one, other)[side]())
    return a, b


@contextlib.contextmanager
def _local(size: int, fused_steps: int) -> Iterator[Callable[[str], float]]:
    """The baseline's processes; yields a function that runs one loop in all of them and returns the longest seconds."""
    children: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory(prefix="waypath-bench-") as folder:
        try:
            coordinator = ""
            if size > 1:
                port_file = Path(folder) / "port"
                command = [sys.executable, "-m", "waypath.tools.coordinator", "--processes", str(size)]
                sidecar = subprocess.Popen(
                    [*command, "--port-file", str(port_file)], stdout=subprocess.DEVNULL, text=True
                )
                children.append(sidecar)
                coordinator = f"127.0.0.1:{bare.wait_for_port(port_file, sidecar)}"
            members = []
            for index in range(size):
                command = [sys.executable, "-m", "waypath.tools.bench.local_loop", "--coordinator", coordinator]
                command += ["--index", str(index), "--count", str(size), "--fused-steps", str(fused_steps)]
                members.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            children += members

            yield lambda name: _longest(members, name)
        finally:
            for child in reversed(children):
                child.kill()
                child.wait()


def _longest(members: Sequence[subprocess.Popen[str]], name: str) -> float:
    """Has all of these processes run the loop `name`; returns the longest seconds."""
    for member in members:
        assert member.stdin is not None
        member.stdin.write(f"{name}\n")
        member.stdin.flush()
    seconds = []
    for member in members:
        assert member.stdout is not None
        line = "-"
        while line and not line.startswith("seconds "):  # gloo prints to standard output too
            line = member.stdout.readline()
        if not line:
            raise LocalError(f"a process of the baseline ended with {member.wait()}")
        seconds.append(float(line.split()[1]))
    return max(seconds)


@contextlib.contextmanager
def _ray(size: int) -> Iterator[Callable[[str], float]]:
    """Ray's actors in a process of their own; yields a function that runs one of its loops and returns the seconds."""
    command = [sys.executable, "-m", "waypath.tools.bench.ray_actors", str(size)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        for name in ("alone", "link") * 2:
            _longest([child], name)
        yield lambda name: _longest([child], name)
    finally:
        assert child.stdin is not None
        child.stdin.close()  # it ends what it has started
        try:
            child.wait(60.0)
        except subprocess.TimeoutExpired:
            child.kill()


@contextlib.contextmanager
def _floors(size: int) -> Iterator[tuple[Callable[[], float], Callable[[], float]]]:
    """Round trips of streams that do nothing: to one worker, and over a relay to `size` workers."""
    children: list[subprocess.Popen[Any]] = []
    with tempfile.TemporaryDirectory(prefix="waypath-bench-") as folder, contextlib.ExitStack() as stack:
        try:

            def start(name: str, forward: Sequence[str] = ()) -> str:
                port_file = Path(folder) / name
                command = [sys.executable, "-m", "waypath.tools.bench.echo", "--port-file", str(port_file)]
                children.append(subprocess.Popen([*command, "--forward", ",".join(forward)]))
                return f"127.0.0.1:{bare.wait_for_port(port_file, children[-1])}"

            workers = [start(f"worker-{k}") for k in range(size)]
            relay = start("relay", workers)
            yield stack.enter_context(_round_trip(workers[0])), stack.enter_context(_round_trip(relay))
        finally:
            for child in children:
                child.kill()
                child.wait()


@contextlib.contextmanager
def _round_trip(address: str) -> Iterator[Callable[[], float]]:
    asked = threading.Semaphore(0)
    over = threading.Event()

    def requests() -> Iterator[bytes]:
        while asked.acquire() and not over.is_set():
            yield b"x" * 64

    with channel.channel(address) as dialled:
        stream: Any = dialled.stream_stream(echo.METHOD)(requests())  # type: ignore[call-arg]

        def once() -> float:
            began = time.perf_counter()
            asked.release()
            next(stream)
            return time.perf_counter() - began

        for _ in range(10):
            once()
        try:
            yield once
        finally:
            over.set()
            asked.release()
            with contextlib.suppress(grpc.RpcError):
                stream.cancel()


# Simulated workers


def sleep_devices(sizes: Sequence[int]) -> list[Row]:
    """The shortest computation of a node at which 95 % of the device's time is used, for worlds of these sizes.

    A node a program, as many programs ahead as a session may have; the device sleeps for the time.
    """
    rows: list[Row] = []
    for size in sizes:
        with bare.Bare() as cluster:
            cluster.workers(size, world_size=size)
            with cluster.client() as client:
                slice_ = client.slice(mesh={"x": size})
                found = None
                for sleep_ms in (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128):
                    program = bare.chain("sleep", [slice_], sleep_s=sleep_ms / 1e3)
                    bare.install(client, program)
                    count = max(20, min(400, round(500 / sleep_ms)))
                    seconds = _flow(client, program, count)
                    if count * sleep_ms / 1e3 / seconds >= 0.95:
                        found = sleep_ms
                        break
                if found is None:
                    raise LocalError(f"{size} workers: 128 ms are not enough for 95 %")
                rows.append(row(f"{size} simulated workers", "computation for 95 % of local throughput", found, "ms"))
    return rows


def _flow(client: Client, program: Any, count: int) -> float:
    """Seconds of `count` executions that are all sent ahead."""
    bare.submit(client, program).wait(60.0)
    began = time.perf_counter()
    pending = [bare.submit(client, program) for _ in range(count)]
    for one in pending:
        one.wait(60.0)
    return time.perf_counter() - began


def pipelines(depths: Sequence[int], stage_s: float = 0.002, batches: int = 30) -> list[Row]:
    """A pipeline of stages on different workers: all sent ahead, against each stage sent when the one before is done."""
    rows: list[Row] = []
    with bare.Bare() as cluster:
        cluster.workers(max(depths))
        with cluster.client() as client:
            slices = [client.slice(devices=1, exclusive=True) for _ in range(max(depths))]
            for depth in depths:
                whole = bare.chain("pipeline", slices[:depth], sleep_s=stage_s)
                stages = [
                    bare.chain(f"stage-{k}", [slice_], sleep_s=stage_s) for k, slice_ in enumerate(slices[:depth])
                ]
                for program in (whole, *stages):
                    bare.install(client, program)

                def parallel(whole: Any = whole) -> float:
                    return _timed(lambda: bare.submit(client, whole).wait(60.0))

                def sequential(stages: Any = stages) -> float:
                    def work() -> None:
                        for stage in stages:
                            bare.submit(client, stage).wait(60.0)

                    return _timed(work)

                mine, theirs = abba(parallel, sequential, batches)
                value, base = statistics.median(mine) * 1e3, statistics.median(theirs) * 1e3
                metric = f"one pass, {stage_s * 1e3:g} ms a stage"
                rows.append(row(f"pipeline of {depth}", metric, value, "ms", "a stage at a time", base))
    return rows


def clients(counts: Sequence[int], seconds: float) -> list[Row]:
    """Executions a second of one-node programs, by all clients together."""
    rows: list[Row] = []
    with bare.Bare() as cluster:
        cluster.workers(4)
        for count in counts:
            done = _compete(cluster, [1.0] * count, seconds, sleep_s=0.0)
            rows.append(
                row(f"{count} client{'s' if count > 1 else ''}", "throughput", sum(done) / seconds, "executions/s")
            )
    return rows


def shares(weights: Sequence[float], seconds: float) -> list[Row]:
    """What clients of these weights get of one worker, their queues never empty."""
    with bare.Bare() as cluster:
        cluster.workers(1)
        done = _compete(cluster, weights, seconds, sleep_s=0.004)
    asked = [weight / sum(weights) for weight in weights]
    got = [count / sum(done) for count in done]
    case = "shares " + ":".join(f"{weight:g}" for weight in weights)
    rows = [
        row(case, f"client {k}", value, "of the worker", "asked", base)
        for k, (value, base) in enumerate(zip(got, asked, strict=True))
    ]
    rows.append(row(case, "largest deviation", largest_deviation(got, asked) * 100, "%"))
    return rows


def largest_deviation(got: Sequence[float], asked: Sequence[float]) -> float:
    """The largest |got − asked| / asked."""
    return max(abs(a - b) / b for a, b in zip(got, asked, strict=True))


def _compete(cluster: bare.Bare, weights: Sequence[float], seconds: float, sleep_s: float) -> list[int]:
    """Executions that each client finished in `seconds`, all at once, with 40 under way each."""
    ready, go, over = threading.Barrier(len(weights) + 1), threading.Event(), threading.Event()
    counts = [0] * len(weights)
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            with cluster.client(weight=weights[index]) as client:
                slice_ = client.slice(devices=1, strategy="spread")
                program = bare.chain("work", [slice_], sleep_s=sleep_s)
                bare.install(client, program)
                window: list[Pending] = [bare.submit(client, program) for _ in range(40)]
                ready.wait(30.0)
                go.wait(30.0)
                for number in itertools.count():
                    window[number % 40].wait(60.0)
                    if over.is_set():
                        return
                    counts[index] += 1
                    window[number % 40] = bare.submit(client, program)
        except BaseException as error:
            failures.append(error)
            ready.abort()

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(len(weights))]
    for thread in threads:
        thread.start()
    with contextlib.suppress(threading.BrokenBarrierError):
        ready.wait(30.0)
    go.set()
    over.wait(0.5)  # the queues fill
    before = list(counts)
    over.wait(seconds)
    after = list(counts)
    over.set()
    for thread in threads:
        thread.join(60.0)
    if failures:
        raise LocalError(f"a client failed: {failures[0]}") from failures[0]
    return [b - a for a, b in zip(before, after, strict=True)]
