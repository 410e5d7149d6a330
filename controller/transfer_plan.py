"""A transfer plan: which box of which tensor goes from which worker to which device, and in what round.

Owns the table that the planner fills and what can be read off it: bytes by link, rounds, the copies of one worker, a
printed form. Must not know how the copies were chosen. Pure numpy. Called by `reshard` (which makes plans) and publication.

Tensors that share shape, dtype and both shardings form one `Section`: boxes are kept once for all of them, and a row says
"tensors first … last of this section, box `cell`, from `source` to `destination`". So a plan's size grows with the number of
distinct geometries; single copies exist only when somebody iterates over them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from waypath.controller.explain import facts, table
from waypath.proto.layout import SliceCopy

Ints = np.ndarray[Any, np.dtype[np.int64]]
Rows = np.ndarray[Any, Any]

ROW = np.dtype(
    [
        ("cell", np.int32),
        ("first", np.int32),  # tensors [first, last) of the section
        ("last", np.int32),
        ("holder", np.int32),  # worker that has the box from the start
        ("source", np.int32),  # worker that sends it here
        ("end", np.int32),  # index into Plan.ends
        ("round", np.int8),
    ]
)


@dataclass(frozen=True)
class PlannedCopy(SliceCopy):
    """A slice copy with the destination `device` (its id on the destination worker), its payload, and its round.

    A copy of round r > 0 is sent by a worker that received the box in an earlier round.
    """

    device: int = 0
    nbytes: int = 0
    round: int = 0


@dataclass(frozen=True)
class Section:
    """Tensors of one geometry: `lower`, `upper` int64 [cells, rank], `nbytes` int64 [cells], `rows` of dtype ROW.

    `local` rows are held by their own device already and cost nothing.
    """

    tensors: tuple[str, ...]
    lower: Ints
    upper: Ints
    nbytes: Ints
    rows: Rows
    local: Rows

    @cached_property
    def row_bytes(self) -> Ints:
        """Payload of each row, all its tensors together: int64 [rows]."""
        found: Ints = self.nbytes[self.rows["cell"]] * (self.rows["last"] - self.rows["first"])
        return found


@dataclass(frozen=True)
class Plan:
    """The copies that bring one layout what another holds.

    `ends` are the destinations: (index into `workers`, device id). `hosts[i]` is the machine of `workers[i]`.
    `lower_bound_bytes` comes from the layouts alone, never from the copies: it is what `planned_bytes` is held against.
    """

    workers: tuple[str, ...]
    hosts: tuple[str, ...]
    ends: tuple[tuple[int, int], ...]
    sections: tuple[Section, ...]
    lower_bound_bytes: int

    @cached_property
    def planned_bytes(self) -> int:
        """Payload of all copies, counted at the receivers."""
        return sum(int(section.row_bytes.sum()) for section in self.sections)

    @cached_property
    def rounds(self) -> int:
        """How many hops the longest way from a holder to a destination has; 0 where nothing moves."""
        return max((int(s.rows["round"].max()) + 1 for s in self.sections if len(s.rows)), default=0)

    @cached_property
    def count(self) -> int:
        """Number of copies."""
        return sum(int((s.rows["last"] - s.rows["first"]).sum()) for s in self.sections)

    @property
    def copies(self) -> tuple[PlannedCopy, ...]:
        """Every copy, by destination, tensor and box."""
        return tuple(sorted(self._expand(), key=_order))

    @property
    def local(self) -> tuple[PlannedCopy, ...]:
        """What its own device holds already."""
        found = (c for s in self.sections for c in self._expand_rows(s, s.local))
        return tuple(sorted(found, key=_order))

    def for_worker(self, worker: str) -> tuple[PlannedCopy, ...]:
        """The copies whose destination is `worker`, earlier rounds first."""
        if worker not in self.workers:
            return ()
        mine = self._end_workers == self.workers.index(worker)
        found = (c for s in self.sections for c in self._expand_rows(s, s.rows[mine[s.rows["end"]]]))
        return tuple(sorted(found, key=lambda copy: (copy.round, *_order(copy))))

    @cached_property
    def links(self) -> dict[tuple[str, str], int]:
        """Bytes by (source, destination) worker; what stays on one worker is left out."""
        n = len(self.workers)
        total = np.zeros(n * n, np.int64)
        for section in self.sections:
            to = self._end_workers[section.rows["end"]]
            np.add.at(total, section.rows["source"].astype(np.int64) * n + to, section.row_bytes)
        pairs = ((int(i) // n, int(i) % n, int(total[i])) for i in np.flatnonzero(total))
        return {(self.workers[a], self.workers[b]): size for a, b, size in pairs if a != b}

    def egress_bytes(self) -> dict[str, int]:
        """Bytes to send to other workers, by source worker."""
        sent: dict[str, int] = {}
        for (source, _), size in self.links.items():
            sent[source] = sent.get(source, 0) + size
        return sent

    @cached_property
    def network_bytes(self) -> int:
        """Bytes between workers on different machines."""
        host = dict(zip(self.workers, self.hosts, strict=True))
        return sum(size for (a, b), size in self.links.items() if host[a] != host[b])

    def predicted_s(self, bytes_per_s: float | Callable[[str, str], float]) -> float:
        """Seconds if every worker sends and receives at this rate, each way and all at once, and latency is nothing.

        `bytes_per_s` may be a function of (source, destination) worker. Rounds overlap box by box, so the busiest worker alone counts.
        """
        rate = bytes_per_s if callable(bytes_per_s) else lambda *_: bytes_per_s
        sent: dict[str, float] = {}
        received: dict[str, float] = {}
        for (source, destination), size in self.links.items():
            took = size / rate(source, destination)
            sent[source] = sent.get(source, 0.0) + took
            received[destination] = received.get(destination, 0.0) + took
        return max([*sent.values(), *received.values()], default=0.0)

    def busiest_sender(self) -> tuple[str, int]:
        """The worker that sends most to others, and its bytes; ("", 0) where nothing is sent."""
        return max(self.egress_bytes().items(), key=lambda item: item[1], default=("", 0))

    def explain(
        self,
        bytes_per_s: float | None = None,
        staging_bytes: int | None = None,
        links: int = 20,
        path: Callable[[str, str], str] | None = None,
        more: Sequence[tuple[str, str]] = (),
    ) -> str:
        """Returns the plan as a table: bytes by link (the `links` largest), bound, ratio, rounds, predicted seconds.

        `path` says by which way a (source, destination) link goes; `more` are further facts, as (name, text).
        """
        by_size = sorted(self.links.items(), key=lambda link: (-link[1], link[0]))
        rows = [(a, b, f"{size:,}", *([path(a, b)] if path else [])) for (a, b), size in by_size[:links]]
        if len(by_size) > links:
            rest = sum(size for _, size in by_size[links:])
            rows.append((f"and {len(by_size) - links:,} more", "", f"{rest:,}", *([""] if path else [])))
        lines = table(("from", "to", "bytes", *(["path"] if path else [])), rows, frozenset({2}))
        told = self.facts()
        if staging_bytes is not None:
            told.append(("peak staging", f"{staging_bytes:,} bytes a worker"))
        if bytes_per_s is not None:
            predicted = f"{self.predicted_s(bytes_per_s):.3g} s at {bytes_per_s / 1e9:.3g} GB/s a worker"
            told.append(("predicted", predicted))
        return "\n".join([*lines, "", *facts([*told, *more])])

    def facts(self) -> list[tuple[str, str]]:
        """What the whole plan comes to, as (name, text)."""
        bound, (busiest, sent) = self.lower_bound_bytes, self.busiest_sender()
        ratio = f"{self.planned_bytes / bound:.3f}" if bound else "nothing to move"
        return [
            ("planned", f"{self.planned_bytes:,} bytes in {self.count:,} copies, {self.rounds} rounds"),
            ("lower bound", f"{bound:,} bytes; planned ÷ bound {ratio}"),
            ("between machines", f"{self.network_bytes:,} bytes"),
            ("busiest sender", f"{sent:,} bytes{f' ({busiest})' if busiest else ''}"),
        ]

    @cached_property
    def _end_workers(self) -> Ints:
        return np.array([worker for worker, _ in self.ends], np.int64)

    def _expand(self) -> Iterator[PlannedCopy]:
        for section in self.sections:
            yield from self._expand_rows(section, section.rows)

    def _expand_rows(self, section: Section, rows: Rows) -> Iterator[PlannedCopy]:
        lower, upper = _tuples(section.lower), _tuples(section.upper)
        for cell, first, last, holder, source, end, hop in rows.tolist():
            worker, device = self.ends[end]
            for tensor in section.tensors[first:last]:
                yield PlannedCopy(
                    tensor,
                    self.workers[source],
                    self.workers[worker],
                    lower[cell],
                    upper[cell],
                    self.workers[holder],
                    device,
                    int(section.nbytes[cell]),
                    hop,
                )


def _tuples(boxes: Ints) -> Sequence[tuple[int, ...]]:
    return [tuple(row) for row in boxes.tolist()]


def _order(copy: PlannedCopy) -> tuple[Any, ...]:
    return copy.destination, copy.tensor, copy.device, copy.lower, copy.upper
