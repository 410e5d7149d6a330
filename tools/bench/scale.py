"""`waypath bench scale`: what a controller costs with many workers and many devices, against simulated workers.

Real controller process, real protocol, no computation. The controller's CPU is that of its process, over the messages that it sent.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from waypath.tools.bench import bare, report
from waypath.tools.bench.report import Row, row

WORKERS = (16, 64, 256, 1024)
DEVICES = (8, 512, 8192)
EXECUTIONS = 300
ROUNDS = 5


def main(json_file: Path | None, plot: Path | None = None, quick: bool = False) -> int:
    """Runs everything, prints the table and writes what is asked for; returns the exit code."""
    console = Console()
    facts = report.machine()
    rows: list[Row] = []
    for count in (16, 64) if quick else WORKERS:
        console.print(f"{count} workers", highlight=False)
        rows += workers(count, 20 if quick else 60)
    console.print("devices", highlight=False)
    rows += devices(DEVICES, 60 if quick else EXECUTIONS)
    report.show(console, rows)
    report.write(json_file, "scale", rows, facts)
    report.plot(plot, rows, "scale")
    return 0


def workers(count: int, executions: int) -> list[Row]:
    """Registration, a program on all of them, and what a command costs."""
    case = f"{count} workers"
    with bare.Bare() as cluster:
        empty_bytes = cluster.controller.memory_info().rss
        joined_s = cluster.workers(count, world_size=count)
        full_bytes = cluster.controller.memory_info().rss
        with cluster.client() as client:
            slice_ = client.slice(mesh={"x": count})
            program = bare.chain("all", [slice_])
            began = time.perf_counter()
            bare.install(client, program)
            bare.submit(client, program).wait(120.0)
            installed_s = time.perf_counter() - began
            before = cluster.cpu_s()
            for _ in range(executions):
                bare.submit(client, program).wait(120.0)
            commands = executions * count * 2  # an Execute and a Release for each worker
            cpu_us = (cluster.cpu_s() - before) / commands * 1e6
    return [
        row(case, "until all are registered", joined_s, "s"),
        row(case, "first execution of a program on all, with its installation", installed_s, "s"),
        row(case, "controller CPU a command", cpu_us, "µs"),
        row(case, "controller memory a worker", (full_bytes - empty_bytes) / count / 1000, "kB"),
    ]


def devices(counts: Sequence[int], executions: int) -> list[Row]:
    """The same program on 8 workers that have ever more devices: interleaved, medians."""
    rows: list[Row] = []
    found: dict[int, list[float]] = {count: [] for count in counts}
    with bare.Bare() as cluster:
        for number, count in enumerate(counts):
            cluster.workers(8, devices=count // 8, world_size=8, first=8 * number)
        with cluster.client() as client:
            programs = {}
            for number, count in enumerate(counts):
                slice_ = client.slice(mesh={"x": count}, world=f"world-{number}")
                programs[count] = bare.chain(f"devices-{count}", [slice_])
                bare.install(client, programs[count])
                bare.submit(client, programs[count]).wait(120.0)
            for _ in range(ROUNDS):
                for count in counts:
                    before = cluster.cpu_s()
                    for _ in range(executions):
                        bare.submit(client, programs[count]).wait(120.0)
                    found[count].append((cluster.cpu_s() - before) / (executions * 16) * 1e6)
    base = statistics.median(found[counts[0]])
    for count in counts:
        value = statistics.median(found[count])
        rows.append(row(f"{count} devices", "controller CPU a command", value, "µs", f"{counts[0]} devices", base))
    return rows
