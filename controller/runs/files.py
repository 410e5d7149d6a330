"""The files of one run: config, metrics, samples, trace, TensorBoard events and the result.

Owns `runs/<run id>/`. Everything in it is derived from the journal and the workers' events; the run loop calls it, the
client service reads it back. Must not know how a step is computed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from tensorboardX import SummaryWriter  # type: ignore[import-untyped,unused-ignore]

from waypath.controller.runs.trace import Trace
from waypath.proto.config import RunConfig


def dump_line(value: Mapping[str, Any]) -> str:
    """Returns one JSON line without the newline, keys in the order given."""
    return json.dumps(dict(value), ensure_ascii=False)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSON-lines file; a torn last line (the writer was killed) is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


class RunFiles:
    """Writer of a run's folder. `start_step` > 0 (a resumed run) keeps only what earlier steps wrote."""

    def __init__(self, directory: Path, config: RunConfig, start_step: int = 0) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.toml").write_text(config.to_toml(), encoding="utf-8")
        self._metrics = self._continue(directory / "metrics.jsonl", start_step)
        self._samples = self._continue(directory / "samples.jsonl", start_step)
        (directory / "result.json").unlink(missing_ok=True)
        self._board = SummaryWriter(str(directory / "tensorboard")) if config.log.tensorboard else None
        self.trace = Trace(directory / "trace.json") if config.log.trace else None

    @staticmethod
    def _continue(path: Path, start_step: int) -> IO[str]:
        kept = [line for line in read_lines(path) if line["step"] < start_step] if start_step else []
        part = path.with_suffix(".part")
        part.write_text("".join(dump_line(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(part, path)
        return path.open("a", encoding="utf-8")

    def metrics(self, line: Mapping[str, Any]) -> None:
        """Appends one step's metrics and its TensorBoard scalars."""
        self._metrics.write(dump_line(line) + "\n")
        self._metrics.flush()
        if self._board is not None:
            for key, value in line.items():
                if key != "step" and isinstance(value, (int, float)):
                    self._board.add_scalar(key, value, int(line["step"]))
            self._board.flush()

    def sample(self, line: Mapping[str, Any]) -> None:
        """Appends one sample: step, group_id, sample_index, prompt, completion, reward."""
        self._samples.write(dump_line(line) + "\n")
        self._samples.flush()

    def result(self, value: Mapping[str, Any]) -> None:
        """Writes result.json in one piece."""
        part = self.directory / "result.json.part"
        part.write_text(json.dumps(dict(value), indent=2) + "\n", encoding="utf-8")
        os.replace(part, self.directory / "result.json")

    def close(self) -> None:
        """Closes every file; the trace becomes complete JSON."""
        self._metrics.close()
        self._samples.close()
        if self._board is not None:
            self._board.close()
        if self.trace is not None:
            self.trace.close()
