"""What a person sees: sparkline, sizes, step lines, the live panel, the time budget and the closing report."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from waypath.controller.client.client import RunResult
from waypath.controller.runs.trace import PhaseSpan, Trace
from waypath.tools import progress, report

NS = 10**9
METRICS: dict[str, Any] = {
    "step": 2,
    "policy_version": 3,
    "reward_mean": 0.5,
    "rollout_tokens_per_s": 412.4,
    "staleness_max": 0,
    "logprob_diff_max": 1.5e-6,
    "publish_bytes": 540_300_000,
    "publish_s": 1.25,
    "rollout_s": 1.7,
    "train_s": 7.0,
    "step_s": 9.1,
}
STATUS: dict[str, Any] = {
    "publication_path": "host",
    "missing": ["inference-1"],
    "workers": [
        {"name": "trainer-0", "pid": 12, "rss_bytes": 3e8, "activity": "train", "waits": []},
        {"name": "reward-0", "pid": 13, "rss_bytes": 0, "activity": "", "waits": ["score_3 waits for generate_3"]},
    ],
}


def console(width: int = 100, *, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)


def written(target: Console) -> str:
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


def test_sparkline_scales_from_zero_and_keeps_the_newest() -> None:
    assert progress.sparkline([]) == ""
    assert progress.sparkline([0.0, 0.0]) == "▁▁"
    assert progress.sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert progress.sparkline([-1.0, 1.0]) == "▁█"
    assert progress.sparkline([0.0] * 50 + [1.0], width=3) == "▁▁█"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1500, "1.5 kB"), (540_300_000, "540.3 MB"), (2.5e9, "2.5 GB")]
)
def test_size(count: float, text: str) -> None:
    assert progress.size(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(8.74, "8.7 s"), (185, "3:05"), (3723, "1:02:03")])
def test_clock(seconds: float, text: str) -> None:
    assert progress.clock(seconds) == text


def test_plain_view_has_one_line_a_step() -> None:
    target = console(width=40)
    view = progress.make_view(target)
    assert type(view) is progress.View and not view.wants_status
    with view:
        view.begin("r1", 24)
        view.phase("evaluating 21 held-out prompts")
        view.phase("step 2")
        view.step(METRICS)
        view.event("inference-0 [not markup] restarts")
    assert written(target).splitlines() == [
        "run r1: up to 24 steps",
        "evaluating 21 held-out prompts",
        "step   3/24  reward 0.500  v3  412 tokens/s  stale 0  published 540.3 MB in 1.25 s"
        "  rollout 1.7 s  train 7.0 s  step 9.1 s",
        "inference-0 [not markup] restarts",
    ]


def test_live_view_shows_numbers_and_workers() -> None:
    target = console(terminal=True)
    view = progress.make_view(target)
    assert isinstance(view, progress.LiveView) and view.wants_status
    with view:
        view.begin("r1", 24)
        view.phase("step 2")
        view.step(METRICS)
        view.status(STATUS)
        view.tick()
    text = written(target)
    for part in ("r1", "3/24", "412 tokens/s", "540.3 MB in 1.25 s over host", "max 0", "1.5e-06"):
        assert part in text
    for part in ("trainer-0", "score_3 waits for generate_3", "inference-1", "not there"):
        assert part in text


def test_plain_is_forced_on_a_terminal() -> None:
    assert type(progress.make_view(console(terminal=True), plain=True)) is progress.View


def test_phase_clock_joins_steps_and_drops_numbers() -> None:
    clock = report.PhaseClock()
    for now, text in enumerate(
        [
            "waiting for workers",
            "warm start, 300 supervised steps",
            "evaluating 21 held-out prompts",
            "step 0",
            "step 1",
        ]
    ):
        clock.enter(text, now)
    clock.enter("evaluating 21 held-out prompts", 9)
    assert clock.windows(12) == [
        report.Window("waiting for workers", 0, 1),
        report.Window("warm start", 1, 2),
        report.Window("evaluating", 2, 3),
        report.Window("step", 3, 9),
        report.Window("evaluating", 9, 12),
    ]


def test_time_budget_counts_each_moment_once_and_sums_to_the_whole() -> None:
    spans = [
        PhaseSpan("a", "rollout", -9 * NS, -8 * NS),  # of an evaluation: outside the steps
        PhaseSpan("a", "rollout", -1 * NS, 4 * NS),
        PhaseSpan("b", "rollout", 2 * NS, 5 * NS),
        PhaseSpan("a", "compile", 1 * NS, 3 * NS),
        PhaseSpan("t", "train", 6 * NS, 9 * NS),
        PhaseSpan("t", "probe", 9 * NS, 10 * NS),
    ]
    windows = [
        report.Window("evaluating", -10 * NS, 0),
        report.Window("step", 0, 12 * NS),
        report.Window("evaluating", 12 * NS, 13 * NS),
    ]
    budget = report.time_budget(windows, spans)
    assert budget == [
        ("evaluating", 11.0),
        ("steps: compile", 2.0),
        ("steps: train", 3.0),
        ("steps: rollout", 3.0),
        ("steps: probe", 1.0),
        ("steps: waiting and control", 3.0),
    ]
    assert sum(seconds for _, seconds in budget) == 23.0


def test_spans_are_read_back_from_a_trace_even_if_torn(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = Trace(path)
    trace.add([PhaseSpan("a", "train", 1_000_000, 5_000_000), PhaseSpan("b", "publish", 0, 2_000_000)], step=0)
    torn = path.read_text() + ',\n{"ph": "X", "na'
    trace.close()
    json.loads(path.read_text())
    whole = report.read_spans(path)
    assert [(span.name, span.start_ns, span.end_ns) for span in whole] == [
        ("train", 1_000_000, 5_000_000),
        ("publish", 0, 2_000_000),
    ]
    path.write_text(torn)
    assert report.read_spans(path) == whole
    assert report.read_spans(tmp_path / "none.json") == []


def result(status: str = "done", cause: str | None = None) -> RunResult:
    return RunResult("r1", status, 18, 18, "abc", 0.44, 1.0, None, 228.0, cause)


def test_report_tells_how_where_and_what_it_cost(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json")
    trace.add([PhaseSpan("t", "train", 0, 126 * NS)], step=0)
    trace.close()
    (tmp_path / "metrics.jsonl").touch()
    samples = [
        {"step": step, "prompt": "2+5=7\n3+4=", "completion": text, "reward": reward}
        for step, text, reward in ((0, "12", 0.0), (9, "8", 0.0), (17, "7", 1.0))
    ]
    target = console(width=160)
    windows = [report.Window("opening", -102 * NS, 0), report.Window("step", 0, 126 * NS)]
    report.report(target, result(), tmp_path, samples, windows=windows, starting_s=12.0)
    text = written(target)
    assert "run r1 done: 18 steps in 3:48" in text
    assert "0.440 → 1.000" in text
    assert "'2+5=7\\n3+4='" in text and "'12'" in text and "'7'" in text and "'8'" not in text
    assert "starting processes" in text and "126.0" in text and "240.0" in text
    assert "metrics.jsonl" in text and "samples.jsonl" not in text


def test_report_of_a_failed_run_names_the_cause(tmp_path: Path) -> None:
    target = console(width=160)
    report.report(target, result("failed", "trainer-1 [gone] was killed by SIGKILL"), tmp_path, [])
    assert "cause: trainer-1 [gone] was killed by SIGKILL" in written(target)
