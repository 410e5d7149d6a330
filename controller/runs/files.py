"""The files of one run: config, metrics, samples, trace, TensorBoard events and the result.

Owns `runs/<run id>/`, and is made only by who holds the lock of the journal there. Everything in it is derived from the
journal and the workers' events; the run loop calls it, the client service reads it back. Must not know how a step is computed.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from waypath.controller.runs.board import Board
from waypath.controller.runs.disk import dump_line, read_lines, write_whole, writing
from waypath.controller.runs.trace import Trace
from waypath.proto.config import RunConfig


class RunFiles:
    """Writer of a run's folder. `start_step` > 0 (a resumed run) keeps only what earlier steps wrote.

    What cannot be written, here and in every method, is a LocalError that names the file.
    """

    def __init__(self, directory: Path, config: RunConfig, start_step: int = 0) -> None:
        self.directory = directory
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as opened:
            write_whole(directory / "config.toml", config.to_toml())
            self._metrics = opened.enter_context(self._continue(directory / "metrics.jsonl", start_step))
            self._samples = opened.enter_context(self._continue(directory / "samples.jsonl", start_step))
            self._board: Board | None = None
            if config.log.tensorboard:
                self._board = Board(directory / "tensorboard", start_step)
                opened.callback(self._board.close)
            self.trace: Trace | None = None
            if config.log.trace:
                self.trace = Trace(directory / "trace.json")
                opened.callback(self.trace.close)
            with writing(directory / "result.json"):
                (directory / "result.json").unlink(missing_ok=True)
            self._opened = opened.pop_all()

    @staticmethod
    def _continue(path: Path, start_step: int) -> IO[str]:
        kept = (line for line in read_lines(path) if line["step"] < start_step) if start_step else ()
        part = path.with_suffix(".part")
        with writing(path):
            with part.open("w", encoding="utf-8") as file:
                file.writelines(dump_line(line) + "\n" for line in kept)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
            return path.open("a", encoding="utf-8")

    def metrics(self, line: Mapping[str, Any]) -> None:
        """Appends one step's metrics and its TensorBoard scalars."""
        self._append(self._metrics, line)
        if self._board is not None:
            numbers = {key: value for key, value in line.items() if key != "step" and isinstance(value, (int, float))}
            self._board.scalars(numbers, int(line["step"]))

    def sample(self, line: Mapping[str, Any]) -> None:
        """Appends one sample: step, group_id, sample_index, prompt, completion, reward."""
        self._append(self._samples, line)

    @staticmethod
    def _append(file: IO[str], line: Mapping[str, Any]) -> None:
        with writing(Path(file.name)):
            file.write(dump_line(line) + "\n")
            file.flush()

    def result(self, value: Mapping[str, Any]) -> None:
        """Writes result.json in one piece."""
        write_whole(self.directory / "result.json", json.dumps(dict(value), indent=2) + "\n")

    def close(self) -> None:
        """Closes every file; the trace becomes complete JSON."""
        with writing(self.directory):
            self._opened.close()
