"""The reshard planner: from the layout that holds a model and the layout that needs it, the least set of slice copies.

A tensor is cut along the edges of all its source and destination boxes. Each cell of that grid becomes one copy to every
device that needs it and does not hold it. So every destination element is written exactly once, and the bytes planned are
the lower bound: the sum over destination devices of |needed \\ held|.

    source       worker a: rows 0–4, worker b: rows 4–8 of w[8, 2]           destination  worker x: rows 2–8
    cells        2–4, 4–8                                                     copies       a → x rows 2–4, b → x rows 4–8

Where several devices need a cell, one of them (the root) gets it from a holder and passes it on: first to one device of every
other machine, these to the other devices of their machine. Roots take turns, so each of R replicas relays one R-th of the
model, the holder sends it once however many replicas there are, and a machine receives a byte once. A holder on the same
machine as a destination is preferred to any other; what a device's own worker holds comes from there.

Where several workers hold a cell, the equal cells of all tensors of one geometry are poured over them (`balance.pour`), those
with fewer holders first, large before small: no sender is more than one piece above the optimum where holder sets are nested
or disjoint, and meshes make only such.

Tensors of one shape, dtype and pair of shardings are planned once, not one by one: a model's layers share them, so time and
size do not grow with parameters × devices². A plan is a function of the layouts alone, cached under their fingerprints.

Must not know: transport, devices' memory, versions. Pure numpy. Called by publication.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from waypath.controller.balance import pour
from waypath.controller.relay import Tree, direct_trees, relay_trees
from waypath.controller.transfer_plan import ROW, Ints, Plan, PlannedCopy, Rows, Section
from waypath.proto.errors import TransferError
from waypath.proto.layout import Box, Interned, Layout, Shard, TensorLayout

__all__ = ["Plan", "PlannedCopy", "itemsize", "lower_bound_bytes", "plan", "volume"]

CACHED_PLANS = 64
MAX_CELLS = 1 << 22
EXTENDED_ITEMSIZE = {
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3b11fnuz": 1,
    "float8_e4m3": 1,
}
"""Bytes of the dtypes that numpy does not know by itself."""

Bools = np.ndarray[Any, np.dtype[np.bool_]]
Casts = frozenset[tuple[str, str]]

_plans: OrderedDict[tuple[str, str, bool, Casts], Plan] = OrderedDict()


def plan(
    source: Layout, destination: Layout, *, relay: bool = True, casts: Collection[tuple[str, str]] = frozenset()
) -> Plan:
    """Returns the copies that bring `destination` what `source` holds.

    Without `relay` every copy comes from a holder. `casts` are (held dtype, wanted dtype) pairs that the source converts;
    bytes count in the wanted dtype. Raises TransferError, naming the tensor, where a name is on one side only, shape or dtype
    differ, a box does not lie in its tensor, the source lacks part of what is needed, or a worker has two hosts.
    """
    key = (source.fingerprint, destination.fingerprint, relay, frozenset(casts))
    cached = _plans.get(key)
    if cached is None:
        cached = _plans[key] = _Planner(source, destination, relay, key[3]).make()
        while len(_plans) > CACHED_PLANS:
            _plans.popitem(last=False)
    else:
        _plans.move_to_end(key)
    return cached


def lower_bound_bytes(source: Layout, destination: Layout) -> int:
    """Returns the sum over destination devices of |needed \\ held| in bytes (wanted dtype), from the layouts alone."""
    kinds = Interned()
    known: dict[tuple[int, int], int] = {}
    total = 0
    for name, tensor in destination.tensors.items():
        held = source.tensors[name].shards if name in source.tensors else ()
        key = kinds.number(held), kinds.number(tensor.shards)
        if key not in known:
            known[key] = _missing(held, tensor.shards)
        total += known[key] * itemsize(tensor.dtype)
    return total


def itemsize(dtype: str) -> int:
    """Returns the bytes of one element; raises TransferError on an unknown dtype name."""
    if dtype in EXTENDED_ITEMSIZE:
        return EXTENDED_ITEMSIZE[dtype]
    try:
        return int(np.dtype(dtype).itemsize)
    except TypeError:
        raise TransferError(f"unknown dtype {dtype!r}") from None


def volume(box: Box) -> int:
    """Returns the number of elements of a box; 1 for a scalar's."""
    return prod(max(0, stop - start) for start, stop in zip(*box, strict=True))


@dataclass(frozen=True)
class _Cut:
    """A geometry's grid. `held` [workers that hold some, cells], `needed` and `local` [destination shards, cells]."""

    lower: Ints
    upper: Ints
    holders: tuple[int, ...]
    held: Bools
    ends: tuple[int, ...]
    needed: Bools
    local: Bools


@dataclass
class _Group:
    """Cells of one section that the same workers hold and the same ends need, all of one size."""

    section: int
    tensors: int
    cells: Ints
    nbytes: int
    holders: tuple[int, ...]
    ends: tuple[int, ...]


class _Planner:
    """Makes one plan."""

    def __init__(self, source: Layout, destination: Layout, relay: bool, casts: Casts) -> None:
        _check_names(source, destination)
        self._source, self._destination = source, destination
        self._relay, self._casts = relay, casts
        self._host_of = _hosts(source, destination)
        self._workers = Interned()
        self._ends = Interned()
        self._sent: dict[int, int] = {}  # by worker: what holders send to other workers
        self._rooted: dict[int, int] = {}  # by end: what it got as a root, to pass on
        self._trees: dict[tuple[Any, ...], list[Tree]] = {}

    def make(self) -> Plan:
        """Cuts every geometry, groups equal cells, and chooses who sends them."""
        cuts: list[tuple[tuple[str, ...], _Cut, Ints]] = []
        groups: list[_Group] = []
        for names in self._geometries():
            want = self._destination.tensors[names[0]]
            cut = self._cut(self._source.tensors[names[0]], want)
            nbytes = np.prod(cut.upper - cut.lower, axis=1, dtype=np.int64) * itemsize(want.dtype)
            groups += _grouped(len(cuts), len(names), cut, nbytes)
            cuts.append((names, cut, nbytes))
        rows: list[list[Rows]] = [[] for _ in cuts]
        for group in sorted(groups, key=lambda g: (len(g.holders), -g.nbytes, g.section)):
            rows[group.section] += self._assign(group)
        sections = [
            Section(names, cut.lower, cut.upper, nbytes, np.concatenate([_NONE, *found]), self._local(names, cut))
            for (names, cut, nbytes), found in zip(cuts, rows, strict=True)
        ]
        workers = tuple(self._workers.values)
        hosts = tuple(self._host_of.get(worker, worker) for worker in workers)
        bound = lower_bound_bytes(self._source, self._destination)
        return Plan(workers, hosts, tuple(self._ends.values), tuple(sections), bound)

    def _geometries(self) -> Iterable[tuple[str, ...]]:
        """Names of the tensors that share shape, dtype and both shardings, in name order."""
        kinds = Interned()
        alike: dict[tuple[Any, ...], list[str]] = {}
        for name in sorted(self._destination.tensors):
            have, want = self._source.tensors[name], self._destination.tensors[name]
            key = (want.shape, want.dtype, have.dtype, kinds.number(have.shards), kinds.number(want.shards))
            if key not in alike or have.shape != want.shape:
                _check_tensor(have, want, self._casts)
            alike.setdefault(key, []).append(name)
        return map(tuple, alike.values())

    def _cut(self, have: TensorLayout, want: TensorLayout) -> _Cut:
        rank = len(want.shape)
        boxes = [
            np.array([(s.lower, s.upper) for s in shards], np.int64).reshape(len(shards), 2, rank)
            for shards in (have.shards, want.shards)
        ]
        lower, upper, (holds, wants) = _grid(rank, boxes, have.name)
        holders: dict[int, list[int]] = {}
        mine: dict[tuple[int, int], list[int]] = {}
        for i, shard in enumerate(have.shards):
            worker = self._workers.number(shard.worker)
            holders.setdefault(worker, []).append(i)
            mine.setdefault((worker, shard.device), []).append(i)
        held = np.array([holds[of].any(axis=0) for of in holders.values()], bool).reshape(len(holders), len(lower))
        ends, local = [], np.zeros_like(wants)
        for i, shard in enumerate(want.shards):
            end = (self._workers.number(shard.worker), shard.device)
            ends.append(self._ends.number(end))
            if end in mine:
                local[i] = wants[i] & holds[mine[end]].any(axis=0)
        needed = wants & ~local
        lost = needed & ~held.any(axis=0)
        if lost.any():
            at = int(np.flatnonzero(lost.any(axis=1))[0])
            count = np.prod(upper - lower, axis=1, dtype=np.int64)
            shard, there = want.shards[at], needed[at] & ~lost[at]
            raise TransferError(
                f"{want.name}: {shard.worker} needs {list(shard.lower)}–{list(shard.upper)}, the source holds "
                f"{int(count[there].sum())} of its {int(count[needed[at]].sum())} elements"
            )
        return _Cut(lower, upper, tuple(holders), held, tuple(ends), needed, local)

    def _local(self, names: Sequence[str], cut: _Cut) -> Rows:
        shards, cells = np.nonzero(cut.local)
        rows = np.zeros(len(cells), ROW)
        ends = np.array(cut.ends, np.int64)[shards]
        rows["cell"], rows["last"], rows["end"] = cells, len(names), ends
        rows["holder"] = rows["source"] = np.array([worker for worker, _ in self._ends.values], np.int64)[ends]
        return rows

    def _assign(self, group: _Group) -> list[Rows]:
        """Divides the group's cells × tensors over trees (one for each end that can be the root) and over holders."""
        trees = self._trees_of(group)
        loads = [self._rooted.get(tree.ends[0], 0) for tree in trees]
        turns = pour(loads, group.tensors * len(group.cells), group.nbytes)
        found: list[Rows] = []
        start = 0
        for tree, count in zip(trees, turns, strict=True):
            if not count:
                continue
            root = tree.ends[0]
            self._rooted[root] = self._rooted.get(root, 0) + count * group.nbytes
            feeds = {at: self._feed(tree.ends[at], feeders, count, group.nbytes) for at, feeders in tree.fed.items()}
            marks = {0, count}.union(*({mark for mark, _ in feed} for feed in feeds.values()))
            for first, last in pairwise(sorted(marks)):
                holders = {at: _at(feed, first) for at, feed in feeds.items()}
                found.append(self._rows(group, tree, holders, start + first, start + last))
            start += count
        return found

    def _feed(self, end: int, feeders: Sequence[int], count: int, nbytes: int) -> list[tuple[int, int]]:
        """Divides `count` pieces for an end over the holders that may feed it: [(first piece, holder)]."""
        own = self._ends.values[end][0]
        shares = pour([self._sent.get(worker, 0) for worker in feeders], count, nbytes)
        found, first = [], 0
        for worker, share in zip(feeders, shares, strict=True):
            if share:
                found.append((first, worker))
                first += share
            if worker != own:
                self._sent[worker] = self._sent.get(worker, 0) + share * nbytes
        return found

    def _rows(self, group: _Group, tree: Tree, holders: dict[int, int], start: int, stop: int) -> Rows:
        """Rows for pieces [start, stop) of the group, counted cell by cell, tensors within: a row for each cell and edge."""
        n = group.tensors
        at = np.arange(start // n, -(-stop // n))
        rows = np.empty((len(at), len(tree.ends)), ROW)
        rows["cell"] = group.cells[at][:, None]
        rows["first"] = np.maximum(start - at * n, 0)[:, None]
        rows["last"] = np.minimum(stop - at * n, n)[:, None]
        holder_of = np.zeros(len(tree.ends), np.int64)
        for position, worker in holders.items():
            holder_of[position] = worker
        rows["holder"] = holder_of[tree.root]
        rows["source"] = np.where(tree.sender < 0, holder_of, tree.sender)
        rows["end"], rows["round"] = tree.ends, tree.round
        return rows.reshape(-1)

    def _trees_of(self, group: _Group) -> list[Tree]:
        key = (group.ends, group.holders)
        if key not in self._trees:
            host = {w: self._host_of.get(name, name) for w, name in enumerate(self._workers.values)}
            make = relay_trees if self._relay else direct_trees
            self._trees[key] = make(group.ends, group.holders, lambda end: self._ends.values[end][0], host)
        return self._trees[key]


_NONE = np.zeros(0, ROW)


def _at(feeds: list[tuple[int, int]], piece: int) -> int:
    return next(worker for first, worker in reversed(feeds) if first <= piece)


def _grid(rank: int, boxes: Sequence[Ints], name: str) -> tuple[Ints, Ints, list[Bools]]:
    """Cells [C, rank] between the edges of all non-empty boxes [n, 2, rank], and per list which of its boxes has which cell."""
    inside = [np.ones((len(of), 1), bool) for of in boxes]
    corners = np.zeros((1, 2, 0), np.int64)
    solid = np.concatenate(boxes)
    solid = solid[(solid[:, 0] < solid[:, 1]).all(axis=1)]
    for axis in range(rank):
        edges = np.unique(solid[:, :, axis])
        spans = np.stack([edges[:-1], edges[1:]], axis=1)
        if len(corners) * len(spans) > MAX_CELLS:
            raise TransferError(f"{name}: its boxes cut it into more than {MAX_CELLS:,} cells")
        corners = np.concatenate(
            [np.repeat(corners, len(spans), axis=0), np.tile(spans[:, :, None], (len(corners), 1, 1))], axis=2
        )
        for i, of in enumerate(boxes):
            along = (of[:, 0, axis, None] <= spans[:, 0]) & (spans[:, 1] <= of[:, 1, axis, None])
            inside[i] = (inside[i][:, :, None] & along[:, None, :]).reshape(len(of), -1)
    return corners[:, 0], corners[:, 1], inside


def _grouped(section: int, tensors: int, cut: _Cut, nbytes: Ints) -> list[_Group]:
    """Groups the needed cells by who holds them, who needs them, and their size."""
    (cells,) = np.nonzero(cut.needed.any(axis=0))
    if not len(cells):
        return []
    signs = np.concatenate([cut.held, cut.needed])[:, cells]
    keys = np.concatenate([np.packbits(signs, axis=0).T, nbytes[cells].reshape(-1, 1).view(np.uint8)], axis=1)
    _, first, group_of = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(group_of.reshape(-1), kind="stable")
    bounds = np.cumsum(np.bincount(group_of.reshape(-1)))[:-1]
    found = []
    for one, members in sorted(zip(first.tolist(), np.split(cells[order], bounds), strict=True), key=lambda g: g[0]):
        cell = cells[one]
        holders = tuple(cut.holders[i] for i in np.flatnonzero(cut.held[:, cell]))
        ends = tuple(cut.ends[i] for i in np.flatnonzero(cut.needed[:, cell]))
        found.append(_Group(section, tensors, members, int(nbytes[cell]), holders, ends))
    return found


def _missing(held: Iterable[Shard], needed: Iterable[Shard]) -> int:
    """Elements that devices need and do not hold themselves."""
    by_device: dict[tuple[str, int], list[Box]] = {}
    for shard in held:
        by_device.setdefault((shard.worker, shard.device), []).append((shard.lower, shard.upper))
    total = 0
    for shard in needed:
        left = [(shard.lower, shard.upper)]
        for other in by_device.get((shard.worker, shard.device), ()):
            left = [part for box in left for part in _subtract(box, other)]
        total += sum(map(volume, left))
    return total


def _subtract(box: Box, other: Box) -> list[Box]:
    """Returns `box` without `other` as at most 2·rank disjoint boxes: slabs below and above, axis by axis."""
    if not volume((tuple(map(max, box[0], other[0])), tuple(map(min, box[1], other[1])))):
        return [box]
    lower, upper = list(box[0]), list(box[1])
    parts: list[Box] = []
    for axis, (start, stop) in enumerate(zip(*other, strict=True)):
        if lower[axis] < start:
            parts.append((tuple(lower), (*upper[:axis], start, *upper[axis + 1 :])))
            lower[axis] = start
        if stop < upper[axis]:
            parts.append(((*lower[:axis], stop, *lower[axis + 1 :]), tuple(upper)))
            upper[axis] = stop
    return parts


def _hosts(source: Layout, destination: Layout) -> dict[str, str]:
    for worker in source.hosts.keys() & destination.hosts.keys():
        if source.hosts[worker] != destination.hosts[worker]:
            raise TransferError(
                f"worker {worker} is on {source.hosts[worker]} in the source, on {destination.hosts[worker]} in the destination"
            )
    return {**source.hosts, **destination.hosts}


def _check_names(source: Layout, destination: Layout) -> None:
    for one, other, side in ((destination, source, "source"), (source, destination, "destination")):
        missing = sorted(one.tensors.keys() - other.tensors.keys())
        if missing:
            more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
            raise TransferError(f"the {side} has no tensor {', '.join(missing[:4])}{more}")


def _check_tensor(have: TensorLayout, want: TensorLayout, casts: Casts) -> None:
    if have.shape != want.shape:
        raise TransferError(f"{want.name}: expected shape {list(want.shape)}, the source has {list(have.shape)}")
    if have.dtype != want.dtype and (have.dtype, want.dtype) not in casts:
        raise TransferError(f"{want.name}: expected dtype {want.dtype}, the source has {have.dtype}")
    for shard in (*have.shards, *want.shards):
        fits = len(shard.lower) == len(shard.upper) == len(want.shape) and all(
            0 <= start <= stop <= n for start, stop, n in zip(shard.lower, shard.upper, want.shape, strict=True)
        )
        if not fits:
            raise TransferError(
                f"{want.name}: box {list(shard.lower)}–{list(shard.upper)} on {shard.worker} does not lie in shape "
                f"{list(want.shape)}"
            )
