"""What a person sees while a run goes on: a live panel on a terminal, one line a step elsewhere.

Owns the drawing. Must not know where the numbers come from: it is handed metrics lines, phase texts, the
controller's status and event lines. Called by `follow.py`; the report at the end is in `report.py`.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 48
REDRAW_S = 0.25


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH) -> str:
    """The last `width` values as bars between the smallest of them (or 0, if that is less) and the largest.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    shown = list(values)[-width:]
    if not shown:
        return ""
    low, high = min(0.0, *shown), max(shown)
    span = high - low
    if span <= 0:
        return BARS[0] * len(shown)
    return "".join(BARS[min(len(BARS) - 1, int((value - low) / span * len(BARS)))] for value in shown)


def size(count: float) -> str:
    """A byte count for people: 540.3 MB, 12 kB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} B"


def clock(seconds: float) -> str:
    """A duration for people: 8.7 s, 3:05, 1:02:03."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def step_line(metrics: Mapping[str, Any], steps: int) -> str:
    """One step in one line, for logs and pipes."""
    return (
        f"step {int(metrics['step']) + 1:>3}/{steps}  reward {metrics['reward_mean']:.3f}"
        f"  v{metrics['policy_version']}  {metrics['rollout_tokens_per_s']:.0f} tokens/s"
        f"  stale {metrics['staleness_max']}"
        f"  published {size(metrics['publish_bytes'])} in {metrics['publish_s']:.2f} s"
        f"  rollout {metrics['rollout_s']:.1f} s  train {metrics['train_s']:.1f} s"
        f"  step {metrics['step_s']:.1f} s"
    )


class View:
    """Plain lines, for logs and pipes; also the interface of every view."""

    wants_status = False

    def __init__(self, console: Console) -> None:
        self.console = console
        self.steps = 0

    def __enter__(self) -> "View":
        return self

    def __exit__(self, *details: object) -> None:
        return None

    def begin(self, run_id: str, steps: int) -> None:
        """A run has been admitted."""
        self.steps = steps
        self.event(f"run {run_id}: up to {steps} steps")

    def phase(self, text: str) -> None:
        """What the run does now. The steps have lines of their own here."""
        if not text.startswith("step "):
            self.event(text)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """A step is done."""
        self.event(step_line(metrics, self.steps))

    def status(self, status: Mapping[str, Any]) -> None:
        """The controller's status, about once a second, if `wants_status`."""

    def event(self, line: str) -> None:
        """Something to tell once: a restart, a stop."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def tick(self) -> None:
        """Called several times a second while nothing arrives."""


class LiveView(View):
    """A panel that is redrawn in place; events scroll by above it."""

    wants_status = True

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._run_id, self._phase = "", "starting"
        self._rewards: list[float] = []
        self._last: Mapping[str, Any] | None = None
        self._status: Mapping[str, Any] = {}
        self._started = time.monotonic()
        self._drawn = 0.0

    def __enter__(self) -> "LiveView":
        self._live.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._draw()
        self._live.stop()

    def begin(self, run_id: str, steps: int) -> None:
        self._run_id, self.steps = run_id, steps
        self._draw()

    def phase(self, text: str) -> None:
        self._phase = text
        if "warning: " in text:
            self.event(text)
        self._draw()

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._rewards.append(float(metrics["reward_mean"]))
        self._last = metrics
        self._draw()

    def status(self, status: Mapping[str, Any]) -> None:
        self._status = status
        self._draw()

    def event(self, line: str) -> None:
        self._live.console.print(line, markup=False, highlight=False)

    def tick(self) -> None:
        if time.monotonic() - self._drawn >= REDRAW_S:
            self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        self._live.update(self.render(time.monotonic() - self._started), refresh=True)

    def render(self, elapsed_s: float) -> RenderableType:
        """The panel; a function of what was handed in and of the time."""
        parts: list[RenderableType] = [self._numbers()]
        workers = worker_table(self._status)
        if workers.row_count:
            parts.append(workers)
        title = f"[b]{self._run_id or 'waypath'}[/b]  {self._phase}  {clock(elapsed_s)}"
        return Panel(Group(*parts), title=title, title_align="left", border_style="dim")

    def _numbers(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim")
        grid.add_column()
        done = len(self._rewards) if self._last is None else int(self._last["step"]) + 1
        grid.add_row("step", f"{done}/{self.steps or '?'}")
        if self._last is None:
            return grid
        last = self._last
        grid.add_row("reward", Text(f"{sparkline(self._rewards)} {self._rewards[-1]:.3f}", style="green"))
        grid.add_row("rollout", f"{last['rollout_tokens_per_s']:.0f} tokens/s, {clock(last['rollout_s'])}")
        grid.add_row("train", f"{clock(last['train_s'])} of a step of {clock(last['step_s'])}")
        grid.add_row(
            "publication",
            f"version {last['policy_version']}, {size(last['publish_bytes'])} in {last['publish_s']:.2f} s"
            + publication_path(self._status),
        )
        grid.add_row("staleness", f"max {last['staleness_max']}   log-prob difference {last['logprob_diff_max']:.1e}")
        return grid


def worker_table(status: Mapping[str, Any]) -> Table:
    """Who is up and what each does now, from the controller's status."""
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for heading in ("worker", "pid", "memory", "now"):
        table.add_column(heading, overflow="ellipsis", no_wrap=True)
    for worker in status.get("workers", []):
        waits = "; ".join(str(wait) for wait in worker.get("waits", []))
        now = str(worker.get("activity") or waits or "idle")
        table.add_row(
            str(worker.get("name", "?")),
            str(worker.get("pid", "")),
            size(float(worker.get("rss_bytes", 0))),
            Text(now),
        )
    for name in status.get("missing", []):
        table.add_row(str(name), "", "", Text("not there", style="red"))
    return table


def publication_path(status: Mapping[str, Any]) -> str:
    """' over host', or nothing where the status doesn't say."""
    path = status.get("publication_path")
    return f" over {path}" if path else ""


def make_view(console: Console, *, plain: bool = False) -> View:
    """The live view on a real terminal, plain lines elsewhere."""
    if plain or not console.is_terminal or console.is_dumb_terminal:
        return View(console)
    return LiveView(console)
