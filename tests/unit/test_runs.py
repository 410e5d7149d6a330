"""Metrics, spans and run files: small arithmetic worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from waypath.controller.runs import metrics
from waypath.controller.runs.files import RunFiles, read_lines
from waypath.controller.runs.trace import PhaseSpan, union_s
from waypath.proto import config

CONFIG = config.load({"model": {"random": {"alphabet": "01>\n"}}, "task": {"name": "sort"}})
S = 1_000_000_000


def test_union_counts_overlaps_once() -> None:
    spans = [PhaseSpan("a", "x", 0, 2 * S), PhaseSpan("b", "x", 1 * S, 3 * S), PhaseSpan("a", "x", 5 * S, 6 * S)]
    assert union_s(spans) == pytest.approx(4.0)
    assert union_s(reversed(spans)) == pytest.approx(4.0)
    assert union_s([PhaseSpan("a", "x", 0, 5 * S), PhaseSpan("a", "x", 1 * S, 2 * S)]) == pytest.approx(5.0)
    assert union_s([]) == 0.0


def test_metrics_line_has_every_stable_key_and_the_right_spans() -> None:
    trained: dict[str, Any] = dict.fromkeys(metrics.TRAINER_KEYS, 0.5)
    trained |= {"tokens": 300, "optimizer_step": 7, "trained_rows": 4}
    trained["reward_metrics"] = {"step": 0.25}
    spans = [
        PhaseSpan("inference-0", "rollout", 0, 2 * S),
        PhaseSpan("inference-1", "rollout", 1 * S, 3 * S),
        PhaseSpan("reward-0", "reward", 2 * S, 4 * S),
        PhaseSpan("trainer-0", "train", 5 * S, 9 * S),
        PhaseSpan("trainer-0", "publish", 9 * S, 10 * S),
    ]
    publication = metrics.Publication(8, 100, 100, 60, 0.25, "COMMITTED", ("inference-0",))
    line = metrics.line(7, trained, spans, publication, step_s=11.0)
    stable = [
        "step",
        "policy_version",
        "reward_mean",
        "reward_std",
        "loss",
        "kl",
        "grad_norm",
        "entropy",
        "clip_fraction",
        "response_tokens_mean",
        "truncated_fraction",
        "zero_std_group_fraction",
        "staleness_max",
        "staleness_mean",
        "logprob_diff_mean",
        "logprob_diff_max",
        "rollout_tokens_per_s",
        "step_s",
        "rollout_s",
        "reward_s",
        "train_s",
        "publish_s",
        "publish_stall_s",
        "publish_bytes",
        "publish_bytes_lower_bound",
        "egress_bytes",
    ]
    assert list(line)[: len(stable)] == stable
    assert (line["rollout_s"], line["reward_s"], line["train_s"], line["publish_s"]) == (3.0, 2.0, 4.0, 1.0)
    assert line["rollout_tokens_per_s"] == pytest.approx(100.0)
    assert line["overhead_s"] == pytest.approx(11.0 - 9.0)  # spans cover 0–4 and 5–10
    assert (line["policy_version"], line["egress_bytes"]) == (8, 60)
    assert (line["step"], line["reward/step"]) == (7, 0.25)


def test_resumed_files_drop_what_came_after_the_checkpoint_and_a_torn_line(tmp_path: Path) -> None:
    files = RunFiles(tmp_path, CONFIG)
    for step in range(4):
        files.metrics({"step": step, "reward_mean": step / 4})
        files.sample({"step": step, "prompt": "p", "completion": "é", "reward": 1.0})
    files.result({"status": "failed"})
    files.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    resumed = RunFiles(tmp_path, CONFIG, start_step=2)
    assert not (tmp_path / "result.json").exists()
    resumed.metrics({"step": 2, "reward_mean": 0.9})
    resumed.close()
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    assert [line["step"] for line in read_lines(tmp_path / "samples.jsonl")] == [0, 1]


def test_trace_is_json_that_names_the_workers(tmp_path: Path) -> None:
    files = RunFiles(tmp_path, CONFIG)
    assert files.trace is not None
    files.trace.add([PhaseSpan("trainer-0", "train", 1_000, 3_000)], step=5)
    files.close()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"] for e in events] == [{"name": "trainer-0"}, {"step": 5}]
    assert (events[1]["ts"], events[1]["dur"]) == (1.0, 2.0)
    assert list((tmp_path / "tensorboard").iterdir())
