"""`waypath bench grpo`: a GRPO step over all processes against the same step in one process, on this machine.

The baseline (`grpo_baseline.py`) runs first, then a cluster of real processes: the same configuration, model, batch and
skipping. Reports medians over the steps after the first of each (which compiles), and the controller's share of a step.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from waypath.controller.client.client import connect
from waypath.proto import config as configs
from waypath.proto.errors import LocalError
from waypath.tools.bench import report
from waypath.tools.launch import LARGE_BUFFERS, LocalCluster

CONFIG = "examples/smollm2_arithmetic.toml"
STEPS = 10
BASELINE = "one process, two threads"
PHASES = ("step_s", "rollout_s", "train_s", "publish_s")


def baseline(config: str, steps: int) -> list[dict[str, Any]]:
    """Returns one object a step of the single-process job; raises LocalError with its output where it fails."""
    command = [sys.executable, "-m", "waypath.tools.bench.grpo_baseline", config, "--steps", str(steps)]
    env = {**os.environ, **LARGE_BUFFERS}  # as the cluster's workers have it
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise LocalError(f"the baseline failed:\n{done.stderr[-2000:]}")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [line for line in lines if "step_s" in line]


def cluster(config: str, steps: int) -> list[dict[str, Any]]:
    """Returns the metrics lines of a run on a cluster of its own; raises LocalError with the run's cause."""
    with tempfile.TemporaryDirectory(prefix="waypath-bench-") as folder:
        resolved = configs.load(
            config,
            {
                "steps": steps,
                "evaluation.prompts": 0,
                "trainer.checkpoint_every": 0,
                "storage.run_dir": folder,
                "storage.checkpoint_dir": folder,
                "storage.export": False,
            },
        )
        resolved = configs.RunConfig.model_validate({**resolved.to_json(), "stop_at_reward": None})
        with LocalCluster(resolved) as local, connect(local.address, local.token) as client:
            local.wait_ready(client)
            run = client.start_run(resolved)
            lines = [dict(step.metrics) for step in run.steps()]
            result = run.result()
    if result.status != "done":
        raise LocalError(f"the run {result.status}: {result.cause}")
    return lines


def rows(alone: Sequence[Mapping[str, Any]], together: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the benchmark's rows from the steps of both sides."""
    found = []
    for phase in PHASES:
        value = statistics.median(float(line[phase]) for line in together[1:])
        base = statistics.median(float(line[phase]) for line in alone[1:])
        found.append(report.row(phase.removesuffix("_s"), "median seconds", value, "s", BASELINE, base))
    trained = statistics.mean(float(line["trained_rows"]) for line in together[1:])
    alone_trained = statistics.mean(float(line["trained_rows"]) for line in alone[1:])
    found.append(report.row("trained rows", "mean rows a step", trained, "rows", BASELINE, alone_trained))
    step_s = statistics.median(float(line["step_s"]) for line in together[1:])
    overhead = statistics.median(float(line["overhead_s"]) for line in together[1:])
    found.append(report.row("controller", "step_s minus the workers' spans", overhead, "s", "step_s, median", step_s))
    return found


def main(json_file: Path | None, plot: Path | None = None, quick: bool = False, config: str = CONFIG) -> int:
    """Runs both sides, prints the table and writes JSON; returns the exit code."""
    console = Console()
    facts = report.machine()
    steps = 3 if quick else STEPS
    console.print(f"baseline: {steps} steps of {config} in one process", highlight=False)
    alone = baseline(config, steps)
    console.print(f"cluster: {steps} steps over its processes", highlight=False)
    together = cluster(config, steps)
    found = rows(alone, together)
    report.show(console, found)
    report.write(json_file, "grpo", found, facts, config=config, steps={"baseline": alone, "cluster": together})
    report.plot(plot, found, "a GRPO step")
    return 0
