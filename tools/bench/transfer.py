"""`waypath bench transfer`: plans of large models, and bytes from trainer to replicas on this machine beside memcpy and raw TCP.

Sources and destinations are processes of their own (`transfer_peer.py`). Every repeat takes the baseline and the paths in turn; the
order turns round from one repeat to the next. `host, shared memory` and `host, TCP` are the paths that are built.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from waypath.controller import reshard
from waypath.proto.errors import LocalError
from waypath.proto.layout import Layout, Shard, TensorLayout, device_boxes
from waypath.tools.bench import report
from waypath.tools.bench.model_layouts import llama_70b, moe_1t
from waypath.tools.bench.report import Row, row

SIZES_MB = (16, 200, 1000)
REPEATS = 15
CASES = ("FSDP(2) → TP(2)", "FSDP(4) → TP(2) × 2", "TP(2) → FSDP(2)")
PLANS: dict[str, Callable[[], tuple[Layout, Layout]]] = {
    "70B, FSDP(64) → TP(8) × 8": llama_70b,
    "1T mixture of experts, 256 → 128": moe_1t,
}


def main(json_file: Path | None, plot: Path | None = None, quick: bool = False) -> int:
    """Runs everything, prints the table and writes what is asked for; returns the exit code."""
    console = Console()
    facts = report.machine()
    rows = [line for name in PLANS for line in planned(name)]
    for size_mb in (4,) if quick else SIZES_MB:
        for case in CASES if size_mb == 200 or quick else CASES[:1]:
            console.print(f"{size_mb} MB, {case}", highlight=False)
            rows += moved(case, size_mb, 3 if quick else REPEATS)
    report.show(console, rows)
    report.write(json_file, "transfer", rows, facts)
    report.plot(plot, rows, "transfer")
    return 0


def planned(name: str) -> list[Row]:
    """One plan in a process of its own, for its memory."""
    code = f"from waypath.tools.bench.transfer import print_plan; print_plan({name!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise LocalError(f"planning failed:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout)
    return [
        row(name, "plan, cold", found["cold_s"], "s"),
        row(name, "plan, from the cache", found["cached_s"] * 1e3, "ms"),
        row(name, "peak memory of the process", found["peak_bytes"] / 1e9, "GB"),
        row(name, "planned bytes", found["bytes"] / 1e9, "GB", "lower bound", found["bound"] / 1e9),
        row(name, "sent by the trainer", found["egress"] / 1e9, "GB", "one copy", found["model"] / 1e9),
    ]


def print_plan(name: str) -> None:
    """Plans once cold and once more; prints JSON."""
    import resource

    source, destination = PLANS[name]()
    began = time.perf_counter()
    plan = reshard.plan(source, destination)
    cold = time.perf_counter()
    reshard.plan(source, destination)
    cached = time.perf_counter()
    egress = sum(size for worker, size in plan.egress_bytes().items() if worker.startswith("trainer"))
    model = sum(reshard.volume(((0,) * len(t.shape), t.shape)) * 2 for t in source.tensors.values())
    found = {
        "cold_s": cold - began,
        "cached_s": cached - cold,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "bytes": plan.planned_bytes,
        "bound": plan.lower_bound_bytes,
        "egress": egress,
        "model": model,
    }
    print(json.dumps(found))


def layouts(case: str, size_mb: int) -> tuple[Layout, Layout]:
    """16 float32 tensors of `size_mb` MB in all, halves split by tensor parallelism along rows and along columns."""
    side = round((size_mb * 1e6 / 4 / 16) ** 0.5 / 8) * 8
    shape = (side, side)

    def shards(prefix: str, mesh: Mapping[str, int], split: int) -> tuple[Shard, ...]:
        axis = "fsdp" if "fsdp" in mesh else "tensor"
        spec = tuple((axis,) if dimension == split else () for dimension in range(2))
        boxes = device_boxes(shape, spec, tuple(mesh), tuple(mesh.values()))
        return tuple(Shard(f"{prefix}-{k}", 0, *box) for k, box in enumerate(boxes))

    def layout(prefix: str, mesh: Mapping[str, int]) -> Layout:
        kinds = [shards(prefix, mesh, split) for split in ((0, 0) if "fsdp" in mesh else (0, 1))]
        return Layout(
            {f"w{k:02}": TensorLayout(f"w{k:02}", shape, "float32", kinds[k % 2]) for k in range(16)},
            {shard.worker: "here" for shard in kinds[0]},
        )

    if case == CASES[1]:
        return layout("source", {"fsdp": 4}), layout("destination", {"replica": 2, "tensor": 2})
    meshes: list[dict[str, int]] = [{"fsdp": 2}, {"tensor": 2}]
    ends = meshes if case == CASES[0] else meshes[::-1]
    return layout("source", ends[0]), layout("destination", ends[1])


class Process:
    """A peer process."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, "-m", "waypath.tools.bench.transfer_peer", name]
        flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "NPROC": "1", "XLA_FLAGS": flags}
        self.name = name
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.address = str(self.answer()["address"])

    def tell(self, do: str, **more: Any) -> None:
        """Sends a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The next answer; LocalError where the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise LocalError(f"{self.name} ended with code {self._process.wait(10)}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """Ends the process and closes both pipes."""
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def together(
    processes: Sequence[Process], do: str, each: Callable[[Process], Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """All at once; answers in order."""
    for process in processes:
        process.tell(do, **each(process))
    return [process.answer() for process in processes]


def moved(case: str, size_mb: int, repeats: int) -> list[Row]:
    """Both paths beside memcpy by as many processes and raw TCP streams; medians, with quartiles in the metric's name."""
    source, destination = layouts(case, size_mb)
    names = [sorted({s.worker for t in side.tensors.values() for s in t.shards}) for side in (source, destination)]
    plan = reshard.plan(source, destination)
    copies = {name: [copy.to_json() for copy in plan.for_worker(name) if copy.round == 0] for name in names[1]}
    relayed = any(copy.round for copy in plan.copies)
    if relayed:  # a peer of this benchmark does not pass on what arrives
        plan = reshard.plan(source, destination, relay=False)
        copies = {name: [copy.to_json() for copy in plan.for_worker(name)] for name in names[1]}
    sources = [Process(name) for name in names[0]]
    destinations = [Process(name) for name in names[1]]
    everybody = [*sources, *destinations]
    try:
        table = {process.name: process.address for process in everybody}
        together(everybody, "peers_are", lambda _: {"table": table})
        together(sources, "hold", lambda _: {"layout": source.to_json()})
        together(destinations, "want", lambda _: {"layout": destination.to_json()})
        wanted = plan.planned_bytes // len(destinations)
        streams = list(zip(sources, destinations, strict=False))
        ports = together([d for _, d in streams], "listen", lambda _: {})
        for (sender, receiver), port in zip(streams, ports, strict=True):
            sender.tell("connect", port=port["port"])
            receiver.tell("accept")
            sender.answer(), receiver.answer()
        version, replicas = 0, plan.planned_bytes // sum(math.prod(t.shape) * 4 for t in source.tensors.values())

        def memcpy() -> float:
            return _timed(lambda: together(destinations, "memcpy", lambda _: {}))

        def tcp() -> float:
            held = min(wanted, sum(math.prod(t.shape) * 4 for t in source.tensors.values()) // len(sources))

            def both() -> None:
                for sender, receiver in streams:
                    sender.tell("send", nbytes=held)
                    receiver.tell("receive", nbytes=held)
                for sender, receiver in streams:
                    sender.answer(), receiver.answer()

            return _timed(both) * wanted / held

        def publication(path: str, verify: bool) -> float:
            nonlocal version
            version += 1

            def whole() -> None:
                told = together(sources, "expose", lambda _: {"version": version, "verify": verify})
                got = together(
                    destinations,
                    "pull",
                    lambda p: {"version": version, "path": path, "copies": copies[p.name], "verify": verify},
                )
                if sum(answer["bytes"] for answer in got) != plan.lower_bound_bytes:
                    raise LocalError("the receivers did not count the planner's bytes")
                if verify and _sum(told, replicas) != _sum(got, 1):
                    raise LocalError("digests differ")

            seconds = _timed(whole)
            together(sources, "unexpose", lambda _: {"version": version})
            return seconds

        kinds: dict[str, Callable[[], float]] = {
            "memcpy": memcpy,
            "shared": lambda: publication("shared", verify=False),
            "shared, verified": lambda: publication("shared", verify=True),
            "tcp": tcp,
            "stream": lambda: publication("stream", verify=False),
        }
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        for repeat in range(-3, repeats):  # the first touch memory, compile the digest, and open segments
            for kind in list(kinds) if repeat % 2 else list(kinds)[::-1]:
                seconds = kinds[kind]()
                if repeat >= 0:
                    found[kind].append(seconds)
            for path in ("shared", "stream") if repeat == repeats - 1 else ():
                publication(path, verify=False)
                right = together(destinations, "check", partial(_check, version, path))
                if not all(answer["right"] for answer in right):
                    raise LocalError(f"{path}: wrong values arrived")
    finally:
        for process in everybody:
            process.close()
    where = f"{size_mb} MB, {case}"
    floor, wire = statistics.median(found["memcpy"]), statistics.median(found["tcp"])
    processes, count = len(destinations), len(streams)
    return [
        _row(where, "host, shared memory: copy", found["shared"], f"memcpy by {processes} processes", floor),
        _row(
            where,
            "host, shared memory: verified publication",
            found["shared, verified"],
            f"memcpy by {processes} processes",
            floor,
        ),
        _row(where, "host, TCP: copy", found["stream"], f"{count} raw TCP streams", wire),
    ]


def _row(case: str, metric: str, seconds: Sequence[float], baseline: str, base_s: float) -> Row:
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return row(
        case, f"{metric} (quartiles {low * 1e3:.3g}–{high * 1e3:.3g} ms)", middle * 1e3, "ms", baseline, base_s * 1e3
    )


def _check(version: int, path: str, _: Process) -> dict[str, Any]:
    return {"version": version, "path": path}


def _timed(what: Callable[[], Any]) -> float:
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


def _sum(answers: Sequence[Mapping[str, Any]], times: int) -> list[list[int]]:
    """Digests of all parts, added modulo 2³², `times` over."""
    parts = [answer["digests"] for answer in answers]
    return [[sum(lane) * times % 2**32 for lane in zip(*one, strict=True)] for one in zip(*parts, strict=True)]
