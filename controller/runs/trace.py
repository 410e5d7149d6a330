"""Phase spans of all workers on one clock: the Chrome trace file, and the arithmetic on spans that metrics need.

Spans carry the wall clock of the worker that measured them; on one machine that is one clock. The file opens in Perfetto
(Chrome trace event format, "X" events in microseconds, one row a worker).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from waypath.controller.runs.disk import writing


@dataclass(frozen=True)
class PhaseSpan:
    """A phase on a worker, nanoseconds of wall clock."""

    worker: str
    name: str
    start_ns: int
    end_ns: int


def union_s(spans: Iterable[PhaseSpan]) -> float:
    """Returns the seconds covered by at least one of `spans`."""
    total, reached = 0, 0
    for start, end in sorted((span.start_ns, span.end_ns) for span in spans):
        start = max(start, reached)
        if end > start:
            total += end - start
            reached = end
    return total / 1e9


HEADER = '{"displayTimeUnit":"ms","traceEvents":[\n'


class Trace:
    """Appends spans to a Chrome trace; the array is closed at the end, and Perfetto also reads it unclosed.

    The file of a run that is resumed goes on behind its last whole event, with the same row for a worker. Events are one a
    line, each but the first behind the comma of the one before. What cannot be written is a LocalError that names the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[str, int] = {}
        self._first = True
        with writing(path):
            end = self._recorded() if path.exists() else 0
            self._file = path.open("r+" if end else "w", encoding="utf-8")
            if end:
                self._file.seek(end)
                self._file.truncate()
            else:
                self._file.write(HEADER)

    def _recorded(self) -> int:
        """Reads what an earlier part of the run wrote; returns where its last whole event ends, 0 without any."""
        end = offset = 0
        with self._path.open("rb") as file:
            if (header := file.readline()) != HEADER.encode():
                return 0
            offset = len(header)
            for line in file:
                text = line.rstrip(b",\n")
                try:
                    event = json.loads(text)
                    if event["ph"] == "M":
                        self._rows[str(event["args"]["name"])] = int(event["pid"])
                except (ValueError, KeyError, TypeError):
                    break  # the end of the array, or a torn event
                end, offset = offset + len(text), offset + len(line)
        self._first = end == 0
        return end

    def add(self, spans: Iterable[PhaseSpan], step: int) -> None:
        """Writes `spans` as complete events with the step as argument."""
        with writing(self._path):
            for span in spans:
                row = self._rows.get(span.worker)
                if row is None:
                    row = self._rows[span.worker] = max(self._rows.values(), default=0) + 1
                    name = {"name": span.worker}
                    self._event({"ph": "M", "name": "process_name", "pid": row, "tid": 0, "args": name})
                self._event(
                    {
                        "ph": "X",
                        "name": span.name,
                        "pid": row,
                        "tid": 0,
                        "ts": span.start_ns / 1e3,
                        "dur": (span.end_ns - span.start_ns) / 1e3,
                        "args": {"step": step},
                    }
                )
            self._file.flush()

    def _event(self, event: dict[str, object]) -> None:
        self._file.write(("" if self._first else ",\n") + json.dumps(event))
        self._first = False

    def close(self) -> None:
        """Ends the JSON document."""
        if self._file.closed:
            return
        with writing(self._path):
            try:
                self._file.write("\n]}\n")
            finally:
                self._file.close()
