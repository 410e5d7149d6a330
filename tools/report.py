"""What a person sees when a run is over: how it went, where its time went, what the model says now, where
everything is.

Owns the closing report and the time budget by phase. Reads the run's folder (trace, samples); must not know
how the run was followed. Called by the CLI.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from waypath.controller.client.client import RunResult
from waypath.controller.runs.trace import PhaseSpan, union_s
from waypath.tools.progress import clock

# A moment that several phases cover counts for the first of these: compiling inside a rollout is compiling.
PHASES = ("compile", "checkpoint", "eval", "publish", "train", "reward", "rollout")
REST = "waiting and control"
SHOWN_SAMPLES = 3
FILES = (
    ("metrics", "metrics.jsonl"),
    ("samples", "samples.jsonl"),
    ("trace (Perfetto)", "trace.json"),
    ("TensorBoard", "tensorboard"),
    ("checkpoints", "checkpoints"),
    ("logs", "logs"),
    ("result", "result.json"),
)


def read_spans(trace: Path) -> list[PhaseSpan]:
    """The complete events of a Chrome trace, one event a line; torn and other lines are passed over."""
    spans = []
    try:
        lines = trace.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            event = json.loads(line.rstrip(",") if line.startswith("{") else line.lstrip(",").rstrip(","))
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("ph") == "X":
            start = int(float(event["ts"]) * 1e3)
            end = start + int(float(event["dur"]) * 1e3)
            spans.append(PhaseSpan(str(event["pid"]), str(event["name"]), start, end))
    return spans


def time_budget(spans: Sequence[PhaseSpan], total_s: float) -> list[tuple[str, float]]:
    """Seconds of wall clock by phase, summing to `total_s`; a moment counts once, for the first of `PHASES`.

    >>> ns = 10**9
    >>> time_budget([PhaseSpan("a", "train", 0, 4 * ns), PhaseSpan("b", "compile", 1 * ns, 2 * ns)], 5.0)
    [('compile', 1.0), ('train', 3.0), ('waiting and control', 1.0)]
    """
    names = [*PHASES, *sorted({span.name for span in spans} - set(PHASES))]
    budget: list[tuple[str, float]] = []
    covered: list[PhaseSpan] = []
    before = 0.0
    for name in names:
        covered += [span for span in spans if span.name == name]
        reached = union_s(covered)
        if reached > before:
            budget.append((name, reached - before))
        before = reached
    if total_s > before:
        budget.append((REST, total_s - before))
    return budget


def summary_table(rows: Iterable[Any]) -> Table:
    """What is up: rows of name, pid, role, world, port, log (`launch.Row`)."""
    table = Table(box=None, padding=(0, 2), header_style="dim", title="what is up", title_justify="left")
    for heading in ("name", "pid", "role", "world", "port", "log"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(row.name, str(row.pid), row.role, row.world, row.port, str(shown(row.log)))
    return table


def shown(path: Path) -> Path:
    """A path relative to the working directory where it lies in it."""
    try:
        return path.absolute().relative_to(Path.cwd())
    except ValueError:
        return path


def report(
    console: Console,
    result: RunResult,
    directory: Path,
    samples: Sequence[Mapping[str, Any]],
    *,
    starting_s: float = 0.0,
) -> None:
    """Print the closing report of the run in `directory`; `starting_s` is what came before the run."""
    line = f"run {result.run_id} {result.status}: {result.steps} steps in {clock(result.seconds)}"
    console.print(line, style="bold green" if result.status == "done" else "bold red", highlight=False)
    if result.cause:
        console.print(Text(f"cause: {result.cause}"), soft_wrap=True)
    if result.eval_before is not None and result.eval_after is not None:
        console.print(
            f"greedy accuracy on held-out prompts: {result.eval_before:.3f} → {result.eval_after:.3f}",
            highlight=False,
        )
    if samples:
        console.print(sample_table(samples))
    budget = time_budget(read_spans(directory / "trace.json"), result.seconds)
    if budget:
        console.print(budget_table(budget, starting_s))
    places = [(what, directory / name) for what, name in FILES if (directory / name).exists()]
    if result.export_dir:
        places.append(("exported model", Path(result.export_dir)))
    table = Table.grid(padding=(0, 2))
    for what, path in places:
        table.add_row(Text(what, style="dim"), Text(str(shown(path)), overflow="fold"))
    console.print(table)


def sample_table(samples: Sequence[Mapping[str, Any]]) -> Table:
    """A few samples of the first and of the last step that has any."""
    steps = sorted({int(sample["step"]) for sample in samples})
    table = Table(box=None, padding=(0, 2), header_style="dim", title="samples", title_justify="left")
    for heading in ("step", "prompt", "completion", "reward"):
        table.add_column(heading, overflow="ellipsis", max_width=48)
    for step in steps[:1] + (steps[-1:] if len(steps) > 1 else []):
        for sample in [s for s in samples if int(s["step"]) == step][:SHOWN_SAMPLES]:
            texts = (Text(repr(str(sample[key]))) for key in ("prompt", "completion"))
            table.add_row(str(step + 1), *texts, f"{float(sample['reward']):.2f}")
    return table


def budget_table(budget: Sequence[tuple[str, float]], starting_s: float) -> Table:
    """The time budget with shares of the whole."""
    rows = ([("starting processes", starting_s)] if starting_s else []) + list(budget)
    total = sum(seconds for _, seconds in rows) or 1.0
    table = Table(box=None, padding=(0, 2), header_style="dim", title="time", title_justify="left")
    table.add_column("phase")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for name, seconds in rows:
        table.add_row(name, f"{seconds:.1f}", f"{seconds / total:.0%}")
    table.add_row("all", f"{total:.1f}", "")
    return table
