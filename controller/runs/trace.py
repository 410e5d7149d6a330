"""Phase spans of all workers on one clock: the Chrome trace file, and the arithmetic on spans that metrics need.

Spans carry the wall clock of the worker that measured them; on one machine that is one clock. The file opens in Perfetto
(Chrome trace event format, "X" events in microseconds, one row a worker).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


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


class Trace:
    """Appends spans to a Chrome trace; the array is closed at the end, and Perfetto also reads it unclosed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        self._rows: dict[str, int] = {}
        self._first = True

    def add(self, spans: Iterable[PhaseSpan], step: int) -> None:
        """Writes `spans` as complete events with the step as argument."""
        for span in spans:
            row = self._rows.get(span.worker)
            if row is None:
                row = self._rows[span.worker] = len(self._rows) + 1
                self._event({"ph": "M", "name": "process_name", "pid": row, "tid": 0, "args": {"name": span.worker}})
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
        if not self._file.closed:
            self._file.write("\n]}\n")
            self._file.close()
