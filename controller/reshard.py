"""The reshard planner: from the layout that holds a model and the layout that needs it, the least set of slice copies.

Every destination shard (a box of a tensor on one device) is cut along the distinct source boxes; each piece becomes one
copy from one of the workers that hold it. What a device holds already is not copied. So every destination element is
written exactly once, and the bytes planned are the lower bound: the sum over destination devices of |needed \\ held|.

    source       worker a: rows 0–4, worker b: rows 4–8 of w[8, 2]           destination  worker x: rows 2–8
    copies       a → x rows 2–4, b → x rows 4–8

Where several workers hold a piece, the destination itself gives it if it can, else the one with the least to send: pieces
with fewer holders first, large before small, so that no sender has more than one piece above the optimum where holder sets
are nested or disjoint (meshes make only such). The plan is a function of the two layouts alone and is cached under their
fingerprints. Cutting is done once per distinct geometry, not once per tensor: a model's layers share it.

Must not know: transport, devices' memory, versions. Pure numpy. Called by publication.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from waypath.proto.errors import TransferError
from waypath.proto.layout import Box, Layout, Shard, SliceCopy, TensorLayout

CACHED_PLANS = 64
EXTENDED_ITEMSIZE = {
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3b11fnuz": 1,
    "float8_e4m3": 1,
}
"""Bytes of the dtypes that numpy does not know by itself."""


@dataclass(frozen=True)
class PlannedCopy(SliceCopy):
    """A slice copy with the destination `device` (its id on the destination worker) and its payload in bytes."""

    device: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class Plan:
    """`copies` cross a wire (or a device border); `local` pieces are held by their own device already and cost nothing.

    `lower_bound_bytes` comes from the layouts alone, never from the copies: it is what `planned_bytes` is held against.
    """

    copies: tuple[PlannedCopy, ...]
    local: tuple[PlannedCopy, ...]
    lower_bound_bytes: int

    @property
    def planned_bytes(self) -> int:
        """Payload of all copies."""
        return sum(copy.nbytes for copy in self.copies)

    def for_worker(self, worker: str) -> tuple[PlannedCopy, ...]:
        """The copies whose destination is `worker`."""
        return tuple(copy for copy in self.copies if copy.destination == worker)

    def egress_bytes(self) -> dict[str, int]:
        """Bytes to send to other workers, by source worker."""
        sent: dict[str, int] = {}
        for copy in self.copies:
            if copy.source != copy.destination:
                sent[copy.source] = sent.get(copy.source, 0) + copy.nbytes
        return sent


_plans: OrderedDict[tuple[str, str], Plan] = OrderedDict()


def fingerprint(layout: Layout) -> str:
    """Returns SHA-256 (hex) over names, shapes, dtypes and shards; the order of tensors does not matter."""
    text = hashlib.sha256()
    for name in sorted(layout.tensors):
        tensor = layout.tensors[name]
        shards = [(shard.worker, shard.device, shard.lower, shard.upper) for shard in tensor.shards]
        text.update(repr((name, tensor.dtype, tensor.shape, shards)).encode())
    return text.hexdigest()


def plan(source: Layout, destination: Layout) -> Plan:
    """Returns the copies that bring `destination` what `source` holds.

    Raises TransferError, naming the tensor, where a name is on one side only, shape or dtype differ, a box does not lie in
    its tensor, or the source lacks part of what is needed.
    """
    key = (fingerprint(source), fingerprint(destination))
    cached = _plans.get(key)
    if cached is None:
        cached = _plans[key] = _make(source, destination)
        while len(_plans) > CACHED_PLANS:
            _plans.popitem(last=False)
    else:
        _plans.move_to_end(key)
    return cached


def lower_bound_bytes(source: Layout, destination: Layout) -> int:
    """Returns the sum over destination devices of |needed \\ held| in bytes, from the layouts alone."""
    total = 0
    for name, tensor in destination.tensors.items():
        held = _held(source.tensors[name].shards) if name in source.tensors else {}
        for shard in tensor.shards:
            needed = _subtract_all([(shard.lower, shard.upper)], held.get((shard.worker, shard.device), ()))
            total += sum(map(volume, needed)) * itemsize(tensor.dtype)
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
class _Piece:
    tensor: str
    shard: Shard
    holders: tuple[str, ...]
    lower: tuple[int, ...]
    upper: tuple[int, ...]
    nbytes: int


def _make(source: Layout, destination: Layout) -> Plan:
    _check_names(source, destination)
    cuts: dict[Any, list[tuple[int, int, Box, int]]] = {}
    pieces: list[_Piece] = []
    local: list[PlannedCopy] = []
    for name in sorted(destination.tensors):
        have, want = source.tensors[name], destination.tensors[name]
        _check_tensor(have, want)
        size = itemsize(want.dtype)
        holders: dict[Box, dict[str, None]] = {}
        for shard in have.shards:
            holders.setdefault((shard.lower, shard.upper), {})[shard.worker] = None
        boxes = [box for box in holders if volume(box)]
        held = _held(have.shards)
        needs: list[tuple[Shard, Box]] = []
        for shard in want.shards:
            box = (shard.lower, shard.upper)
            mine = held.get((shard.worker, shard.device), ())
            needs += [(shard, part) for part in _subtract_all([box], mine) if volume(part)]
            local += [_local(name, shard, part, size) for part in _overlap_once(box, mine)]
        geometry = (tuple(boxes), tuple(box for _, box in needs))
        if geometry not in cuts:
            cuts[geometry] = [(*cut, volume(cut[2])) for cut in _cut(*geometry)]
        covered = [0] * len(needs)
        for need, index, part, count in cuts[geometry]:
            covered[need] += count
            workers = tuple(holders[boxes[index]])
            pieces.append(_Piece(name, needs[need][0], workers, *part, count * size))
        for (shard, box), count in zip(needs, covered, strict=True):
            if count != volume(box):
                raise TransferError(
                    f"{name}: {shard.worker} needs {list(box[0])}–{list(box[1])}, the source holds {count} of its "
                    f"{volume(box)} elements"
                )
    copies = _assign(pieces)
    return Plan(copies, tuple(local), lower_bound_bytes(source, destination))


def _assign(pieces: list[_Piece]) -> tuple[PlannedCopy, ...]:
    """Chooses a sender for every piece; returns the copies by destination, tensor and box."""
    sent: dict[str, int] = {}
    copies: list[PlannedCopy] = []
    for piece in sorted(pieces, key=lambda p: (len(p.holders), -p.nbytes)):
        worker = piece.shard.worker
        if worker not in piece.holders:
            worker = min(piece.holders, key=lambda w: (sent.get(w, 0), w))
            sent[worker] = sent.get(worker, 0) + piece.nbytes
        copies.append(
            PlannedCopy(
                tensor=piece.tensor,
                source=worker,
                destination=piece.shard.worker,
                lower=piece.lower,
                upper=piece.upper,
                device=piece.shard.device,
                nbytes=piece.nbytes,
            )
        )
    return tuple(sorted(copies, key=lambda c: (c.destination, c.tensor, c.device, c.lower, c.upper)))


def _cut(sources: Sequence[Box], needs: Sequence[Box]) -> list[tuple[int, int, Box]]:
    """Returns (index of need, index of source box, piece): disjoint pieces that fill the needs as far as sources reach."""
    if not sources or not needs:
        return []
    if not sources[0][0]:
        return [(i, 0, need) for i, need in enumerate(needs)]
    src, dst = np.array(sources, dtype=np.int64), np.array(needs, dtype=np.int64)
    if not _disjoint(src):
        return _cut_overlapping(sources, needs)
    lower = np.maximum(dst[:, None, 0], src[None, :, 0])
    upper = np.minimum(dst[:, None, 1], src[None, :, 1])
    hits = np.argwhere((lower < upper).all(axis=-1))
    return [(int(i), int(j), (tuple(lower[i, j].tolist()), tuple(upper[i, j].tolist()))) for i, j in hits]


def _disjoint(boxes: np.ndarray[Any, np.dtype[np.int64]]) -> bool:
    """Says whether no two of the boxes `[n, 2, rank]` share an element."""
    lower = np.maximum(boxes[:, None, 0], boxes[None, :, 0])
    upper = np.minimum(boxes[:, None, 1], boxes[None, :, 1])
    return int((lower < upper).all(axis=-1).sum()) == len(boxes)


def _cut_overlapping(sources: Sequence[Box], needs: Sequence[Box]) -> list[tuple[int, int, Box]]:
    """As `_cut`, for source boxes that overlap: the larger ones first, each gives what is still missing."""
    order = sorted(range(len(sources)), key=lambda i: (-volume(sources[i]), i))
    found: list[tuple[int, int, Box]] = []
    for need, box in enumerate(needs):
        left = [box]
        for index in order:
            found += [(need, index, part) for part in _overlaps(left, sources[index])]
            left = _subtract_all(left, [sources[index]])
    return found


def _held(shards: Iterable[Shard]) -> dict[tuple[str, int], list[Box]]:
    held: dict[tuple[str, int], list[Box]] = {}
    for shard in shards:
        held.setdefault((shard.worker, shard.device), []).append((shard.lower, shard.upper))
    return held


def _local(tensor: str, shard: Shard, part: Box, size: int) -> PlannedCopy:
    return PlannedCopy(tensor, shard.worker, shard.worker, *part, device=shard.device, nbytes=volume(part) * size)


def _overlap_once(box: Box, others: Iterable[Box]) -> list[Box]:
    """Returns disjoint boxes that together are the part of `box` that `others` cover."""
    left, found = [box], []
    for other in others:
        found += _overlaps(left, other)
        left = _subtract_all(left, [other])
    return found


def _overlaps(boxes: Iterable[Box], other: Box) -> list[Box]:
    found = []
    for lower, upper in boxes:
        part = tuple(map(max, lower, other[0])), tuple(map(min, upper, other[1]))
        if volume(part):
            found.append(part)
    return found


def _subtract_all(boxes: list[Box], others: Iterable[Box]) -> list[Box]:
    """Returns disjoint boxes that together are `boxes` (disjoint) without `others`."""
    for other in others:
        boxes = [part for box in boxes for part in _subtract(box, other)]
    return boxes


def _subtract(box: Box, other: Box) -> list[Box]:
    """Returns `box` without `other` as at most 2·rank disjoint boxes: slabs below and above, axis by axis."""
    if not _overlaps([box], other):
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


def _check_names(source: Layout, destination: Layout) -> None:
    for one, other, side in ((destination, source, "source"), (source, destination, "destination")):
        missing = sorted(one.tensors.keys() - other.tensors.keys())
        if missing:
            more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
            raise TransferError(f"the {side} has no tensor {', '.join(missing[:4])}{more}")


def _check_tensor(have: TensorLayout, want: TensorLayout) -> None:
    if have.shape != want.shape:
        raise TransferError(f"{want.name}: expected shape {list(want.shape)}, the source has {list(have.shape)}")
    if have.dtype != want.dtype:
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
