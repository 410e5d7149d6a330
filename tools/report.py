"""What a person sees when a run is over: how it went, where its time went, what the model says now, where
everything is.

Owns the closing report and the time budget by phase. Reads the run's folder (trace, samples); must not know
how the run was followed. Called by the CLI.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from waypath.controller.client.client import RunResult
from waypath.controller.runs.trace import PhaseSpan, union_s
from waypath.tools.progress import clock

# Within steps, a moment that several phases cover counts for the first of these: compiling inside a rollout is compiling.
PHASES = ("compile", "checkpoint", "eval", "publish", "train", "reward", "rollout")
REST = "steps: waiting and control"
STEPS = "step"
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


@dataclass(frozen=True)
class Window:
    """A stretch of a run in one phase, nanoseconds of wall clock."""

    phase: str
    start_ns: int
    end_ns: int


class PhaseClock:
    """When a run was in which phase, as its follower heard of it. All steps are one phase."""

    def __init__(self) -> None:
        self._entered: list[tuple[str, int]] = []

    def enter(self, text: str, now_ns: int) -> None:
        """The run says what it does now: "evaluating 21 held-out prompts", "warm start, 300 supervised steps", "step 3"."""
        phase = re.split(r",|\s\d", text)[0]
        if not self._entered or self._entered[-1][0] != phase:
            self._entered.append((phase, now_ns))

    def windows(self, end_ns: int) -> list[Window]:
        """The phases in order, the last one up to `end_ns`."""
        ends = [start for _, start in self._entered[1:]] + [end_ns]
        return [Window(phase, start, end) for (phase, start), end in zip(self._entered, ends, strict=True)]


def time_budget(windows: Sequence[Window], spans: Sequence[PhaseSpan]) -> list[tuple[str, float]]:
    """Seconds by phase, in order of appearance; they sum to the length of `windows`.

    The steps are split by the workers' spans in them, a moment counting once, for the first of `PHASES`.

    >>> ns = 10**9
    >>> spans = [PhaseSpan("a", "train", 0, 4 * ns), PhaseSpan("b", "compile", 1 * ns, 2 * ns)]
    >>> time_budget([Window("opening", -3 * ns, 0), Window("step", 0, 5 * ns)], spans)
    [('opening', 3.0), ('steps: compile', 1.0), ('steps: train', 3.0), ('steps: waiting and control', 1.0)]
    """
    budget: dict[str, float] = {}
    for window in windows:
        seconds = (window.end_ns - window.start_ns) / 1e9
        if window.phase != STEPS:
            budget[window.phase] = budget.get(window.phase, 0.0) + seconds
            continue
        for name, part in _split(window, spans, seconds):
            budget[name] = budget.get(name, 0.0) + part
    return list(budget.items())


def _split(window: Window, spans: Sequence[PhaseSpan], seconds: float) -> Iterator[tuple[str, float]]:
    covered: list[PhaseSpan] = []
    before = 0.0
    for name in [*PHASES, *sorted({span.name for span in spans} - set(PHASES))]:
        for span in spans:
            start, end = max(span.start_ns, window.start_ns), min(span.end_ns, window.end_ns)
            if span.name == name and end > start:
                covered.append(PhaseSpan(span.worker, name, start, end))
        reached = union_s(covered)
        if reached > before:
            yield f"steps: {name}", reached - before
        before = reached
    yield REST, max(0.0, seconds - before)


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
    windows: Sequence[Window] = (),
    starting_s: float = 0.0,
) -> None:
    """Print the closing report of the run in `directory`; `starting_s` is what came before the `windows` of the run."""
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
    budget = time_budget(windows, read_spans(directory / "trace.json"))
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
