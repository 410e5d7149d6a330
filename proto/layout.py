"""Layouts: where the boxes of each canonical tensor lie, and the copies that lead from one layout to another.

Pure data, shared by the planner in the controller and the transfers in the workers. A tensor is named by its canonical
Hugging Face name; a box is half-open, `lower[i] <= index < upper[i]`, in the tensor's own axes.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from waypath.proto.errors import ProtocolError

Box = tuple[tuple[int, ...], tuple[int, ...]]


def device_boxes(
    shape: Sequence[int], spec: Sequence[Sequence[str]], axes: Sequence[str], sizes: Sequence[int]
) -> tuple[Box, ...]:
    """Returns the box that each device of a mesh holds, devices in row-major order over `axes` × `sizes`.

    `spec` names per dimension the mesh axes that split it, outermost first, as in jax's PartitionSpec; every dimension is
    divisible by its parts. Devices along axes that the spec does not name hold the same box.

    >>> device_boxes((4,), (("x",),), ("x", "y"), (2, 2))
    (((0,), (2,)), ((0,), (2,)), ((2,), (4,)), ((2,), (4,)))
    """
    size_of = dict(zip(axes, sizes, strict=True))
    parts = [math.prod(size_of[axis] for axis in names) for names in spec]
    widths = [size // count for size, count in zip(shape, parts, strict=True)]
    found: list[Box] = []
    for coordinates in itertools.product(*map(range, sizes)):
        at = dict(zip(axes, coordinates, strict=True))
        lower: list[int] = []
        for names, width in zip(spec, widths, strict=True):
            index = 0
            for axis in names:
                index = index * size_of[axis] + at[axis]
            lower.append(index * width)
        found.append((tuple(lower), tuple(a + w for a, w in zip(lower, widths, strict=True))))
    return tuple(found)


@dataclass(frozen=True)
class Shard:
    """One box of a tensor on one device of one worker."""

    worker: str
    device: int
    lower: tuple[int, ...]
    upper: tuple[int, ...]


@dataclass(frozen=True)
class TensorLayout:
    """A canonical tensor: global `shape`, `dtype` name and the shards that hold it (replicas repeat boxes).

    Tensors that lie alike should share one `shards` tuple: a model has thousands of tensors and a handful of those.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Layout:
    """All tensors of one model on one slice, by name.

    `hosts` says on which machine a worker runs; a worker that it does not name has a machine of its own.
    """

    tensors: Mapping[str, TensorLayout]
    hosts: Mapping[str, str] = field(default_factory=dict)

    def on(self, hosts: Mapping[str, str]) -> Layout:
        """Returns this layout with its workers on the machines that `hosts` names."""
        mine = {shard.worker for tensor in self.tensors.values() for shard in tensor.shards}
        return replace(self, hosts={worker: host for worker, host in hosts.items() if worker in mine})

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over names, shapes, dtypes, shards and hosts; the order of tensors does not matter."""
        kinds = Interned()
        lines = [
            f"{name}\0{tensor.dtype}\0{tensor.shape}\0{kinds.number(tensor.shards)}"
            for name, tensor in sorted(self.tensors.items())
        ]
        lines += [str([(s.worker, s.device, s.lower, s.upper) for s in shards]) for shards in kinds.values]
        lines += [str(sorted(self.hosts.items()))]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON form.

        `{"shards": [[[worker, device, lower, upper], …], …], "tensors": {name: [shape, dtype, index into "shards"]}, "hosts"}`
        """
        kinds = Interned()
        tensors = {
            name: [list(tensor.shape), tensor.dtype, kinds.number(tensor.shards)]
            for name, tensor in self.tensors.items()
        }
        shards = [[[s.worker, s.device, list(s.lower), list(s.upper)] for s in kind] for kind in kinds.values]
        return {"shards": shards, "tensors": tensors, "hosts": dict(self.hosts)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Layout:
        """Reads the JSON form; raises ProtocolError on a malformed one."""
        try:
            kinds = [
                tuple(Shard(str(w), int(d), tuple(map(int, low)), tuple(map(int, high))) for w, d, low, high in kind)
                for kind in value["shards"]
            ]
            tensors = {
                str(name): TensorLayout(str(name), tuple(map(int, shape)), str(dtype), kinds[index])
                for name, (shape, dtype, index) in value["tensors"].items()
            }
            return cls(tensors, {str(worker): str(host) for worker, host in value.get("hosts", {}).items()})
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"malformed layout: {type(error).__name__}: {error}") from None

    def merged(self, *others: Layout) -> Layout:
        """Returns the layout of one slice from the parts that its processes report; raises ProtocolError if they disagree."""
        parts = (self, *others)
        for other in others:
            if other.tensors.keys() != self.tensors.keys():
                odd = sorted(other.tensors.keys() ^ self.tensors.keys())
                raise ProtocolError(f"processes disagree on tensor names: {odd}")
        kinds = [Interned() for _ in parts]
        together: dict[tuple[int, ...], tuple[Shard, ...]] = {}
        tensors = {}
        for name, mine in self.tensors.items():
            theirs = [part.tensors[name] for part in parts]
            for their in theirs:
                if (mine.shape, mine.dtype) != (their.shape, their.dtype):
                    raise ProtocolError(
                        f"{name}: {mine.dtype}{list(mine.shape)} on one process, {their.dtype}{list(their.shape)} on another"
                    )
            key = tuple(kind.number(tensor.shards) for kind, tensor in zip(kinds, theirs, strict=True))
            if key not in together:
                together[key] = tuple(itertools.chain.from_iterable(tensor.shards for tensor in theirs))
            tensors[name] = TensorLayout(name, mine.shape, mine.dtype, together[key])
        return Layout(tensors, {worker: host for part in parts for worker, host in part.hosts.items()})


class Interned:
    """Numbers equal values 0, 1, …; a value that was seen before is known by its identity, without being hashed again."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._by_value: dict[Hashable, int] = {}
        self._by_identity: dict[int, tuple[int, Any]] = {}  # holds the object, so that its identity stays its own

    def number(self, value: Hashable) -> int:
        """Returns the number of `value`, the next one where it is new."""
        known = self._by_identity.get(id(value))
        if known is not None:
            return known[0]
        found = self._by_value.setdefault(value, len(self.values))
        if found == len(self.values):
            self.values.append(value)
        self._by_identity[id(value)] = found, value
        return found


@dataclass(frozen=True)
class SliceCopy:
    """Move the box [lower, upper) of `tensor` from `source` (a worker) to `destination` (a worker).

    `holder` has the box from the start; where it is not the source, the source gets the box first, and relays it.
    """

    tensor: str
    source: str
    destination: str
    lower: tuple[int, ...]
    upper: tuple[int, ...]
    holder: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the form that a stage node's `copies` option holds (the destination is the node's own worker)."""
        found: dict[str, Any] = {
            "tensor": self.tensor,
            "source": self.source,
            "lower": list(self.lower),
            "upper": list(self.upper),
        }
        if self.holder not in ("", self.source):
            found["holder"] = self.holder
        return found
