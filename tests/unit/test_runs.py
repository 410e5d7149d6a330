"""Metrics, spans and run files: small arithmetic worked out by hand."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped,unused-ignore]

from waypath.controller.runs import metrics
from waypath.controller.runs.disk import LineReader, last_line, read_lines, write_whole
from waypath.controller.runs.files import RunFiles
from waypath.controller.runs.run import RunRecord
from waypath.controller.runs.trace import PhaseSpan, Trace, union_s
from waypath.proto import config
from waypath.proto.errors import LocalError

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
    publication = metrics.Publication(8, 100, 100, 60, 0.25, "COMMITTED", 2, ("inference-0",))
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


@pytest.mark.parametrize("cut", [0, 1, 4, 5, 30])
def test_the_trace_of_a_resumed_run_goes_on_also_behind_a_torn_event(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for part in range(3):
        trace = Trace(path)
        trace.add([PhaseSpan("trainer-0", "train", 1_000, 3_000), PhaseSpan(f"new-{part}", "x", 0, 1)], step=part)
        if part == 2 or not cut:
            trace.close()
        else:  # killed: the array is open, and perhaps its last event torn
            trace._file.close()
            os.truncate(path, path.stat().st_size - cut + 1)
    events = json.loads(path.read_text())["traceEvents"]
    trained = [event for event in events if event["name"] == "train"]
    assert [event["args"]["step"] for event in trained] == [0, 1, 2]
    names = [(event["args"]["name"], event["pid"]) for event in events if event["ph"] == "M"]
    assert len(set(names)) == len(names) == len({pid for _, pid in names}) == 4
    assert {event["pid"] for event in trained} == {dict(names)["trainer-0"]}


def test_a_trace_that_is_no_trace_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for text in ("", "{", '{"displayTimeUnit":"ms","traceEvents":[\n'):
        path.write_text(text)
        trace = Trace(path)
        trace.add([PhaseSpan("a", "x", 0, 1)], step=0)
        trace.close()
        assert len(json.loads(path.read_text())["traceEvents"]) == 2


def events(folder: Path) -> Iterator[Event]:
    """The events of TensorBoard's files: length u64 | CRC u32 | event | CRC u32."""
    for path in sorted(folder.iterdir()):
        data, offset = path.read_bytes(), 0
        while offset < len(data):
            (length,) = struct.unpack_from("<Q", data, offset)
            yield Event.FromString(data[offset + 12 : offset + 12 + length])
            offset += length + 16


def test_tensorboard_hides_the_steps_that_a_resumed_run_does_again(tmp_path: Path) -> None:
    files = RunFiles(tmp_path, CONFIG)
    files.metrics({"step": 0, "reward_mean": 0.25, "optimizer_step": None})
    files.metrics({"step": 1, "reward_mean": 0.5})
    files.close()
    assert not [event for event in events(tmp_path / "tensorboard") if event.HasField("session_log")]
    RunFiles(tmp_path, CONFIG, start_step=1).close()
    found = list(events(tmp_path / "tensorboard"))
    assert found[0].file_version == "brain.Event:2"
    scalars = [(e.step, v.tag, v.simple_value) for e in found for v in e.summary.value]
    assert scalars == [(0, "reward_mean", 0.25), (1, "reward_mean", 0.5)]
    assert [e.step for e in found if e.session_log.status == SessionLog.START] == [1]


def full_disk(*args: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = RunFiles(tmp_path, CONFIG)
    files.result({"status": "failed"})
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", full_disk)
        for _ in range(20):  # tensorboardX's own writer waits for ever after the tenth
            with pytest.raises(LocalError, match=r"tensorboard/events\.out\.tfevents.* No space left on device"):
                files.metrics({"step": 0, "reward_mean": 0.5})
        with pytest.raises(LocalError, match=r"result\.json could not be written: No space left on device"):
            files.result({"status": "done"})
    assert json.loads((tmp_path / "result.json").read_text()) == {"status": "failed"}
    assert not list(tmp_path.glob("*.part"))
    files.close()
    with pytest.raises(LocalError, match=r"config\.toml could not be written"):
        (tmp_path / "config.toml").unlink()
        (tmp_path / "config.toml").mkdir()
        RunFiles(tmp_path, CONFIG)


def test_write_whole_leaves_nothing_half_written(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "one")
    write_whole(tmp_path / "a", "two")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "two")]


def test_a_growing_file_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    reader = LineReader(path)
    assert reader.read() == []
    path.write_text('{"step": 0}\n{"step": 1}\n{"st')
    assert (reader.read(1), reader.read(), reader.read()) == ([{"step": 0}], [{"step": 1}], [])
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert (reader.read(), reader.read()) == ([{"step": 2}], [])
    path.write_text('{"step": 7}\n')
    assert reader.read() == [{"step": 7}]
    assert last_line(path) == {"step": 7}
    path.write_text('{"step": 7}\nnull\n{"st')
    assert last_line(path) == {"step": 7}
    with pytest.raises(LocalError, match=r"lines\.jsonl: the line at byte 12 is not an object"):
        list(read_lines(path))
    with pytest.raises(LocalError, match="could not be read: Is a directory"):
        list(read_lines(tmp_path))


@pytest.mark.parametrize("ahead", [0, 5])
def test_a_follower_parses_each_line_once(ahead: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ahead`: steps that the record counts and the file lost; the follower waits all the same."""
    parsed: list[bytes] = []
    reads: list[int] = []
    parse, read = LineReader._parse, LineReader.read

    def counted(self: LineReader, line: bytes) -> dict[str, Any]:
        parsed.append(line)
        return parse(self, line)

    def watched(self: LineReader, limit: int = 1000) -> list[dict[str, Any]]:
        reads.append(limit)
        return read(self, limit)

    monkeypatch.setattr(LineReader, "_parse", counted)
    monkeypatch.setattr(LineReader, "read", watched)

    async def scenario() -> list[tuple[str, Any]]:
        record = RunRecord("r", tmp_path, CONFIG, phase="opening")
        told: list[tuple[str, Any]] = []

        async def follow() -> None:
            async for update in record.watch(1):
                told.append(update)

        follower = asyncio.create_task(follow())
        for step in range(20):
            with (tmp_path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step}) + "\n")
            await record.notify(phase=f"step {step}", steps=step + 1 + ahead)
            while ("phase", f"step {step}") not in told:
                await asyncio.sleep(0)
        await record.finish({"status": "done", "steps": 20})
        await asyncio.wait_for(follower, 10.0)
        return told

    told = asyncio.run(asyncio.wait_for(scenario(), 30.0))
    assert [value["step"] for kind, value in told if kind == "metrics"] == list(range(1, 20))
    assert told[-1] == ("result", {"status": "done", "steps": 20})
    assert len(parsed) == 20
    assert len(reads) < 100
