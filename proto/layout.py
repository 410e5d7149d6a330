"""Layouts: where the boxes of each canonical tensor lie, and the copies that lead from one layout to another.

Pure data, shared by the planner in the controller and the transfers in the workers. A tensor is named by its canonical
Hugging Face name; a box is half-open, `lower[i] <= index < upper[i]`, in the tensor's own axes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    """A canonical tensor: global `shape`, `dtype` name and the shards that hold it (replicas repeat boxes)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Layout:
    """All tensors of one model on one slice, by name."""

    tensors: Mapping[str, TensorLayout]

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON form: `{"tensors": {name: {"shape", "dtype", "shards": [[worker, device, lower, upper]]}}}`."""
        return {
            "tensors": {
                name: {
                    "shape": list(tensor.shape),
                    "dtype": tensor.dtype,
                    "shards": [[s.worker, s.device, list(s.lower), list(s.upper)] for s in tensor.shards],
                }
                for name, tensor in self.tensors.items()
            }
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Layout:
        """Reads the JSON form; raises ProtocolError on a malformed one."""
        try:
            return cls(
                {
                    str(name): TensorLayout(
                        name=str(name),
                        shape=tuple(int(n) for n in tensor["shape"]),
                        dtype=str(tensor["dtype"]),
                        shards=tuple(
                            Shard(str(w), int(d), tuple(map(int, lower)), tuple(map(int, upper)))
                            for w, d, lower, upper in tensor["shards"]
                        ),
                    )
                    for name, tensor in value["tensors"].items()
                }
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"malformed layout: {type(error).__name__}: {error}") from None

    def merged(self, *others: Layout) -> Layout:
        """Returns the layout of one slice from the parts that its processes report; raises ProtocolError if they disagree."""
        tensors = dict(self.tensors)
        for other in others:
            if other.tensors.keys() != tensors.keys():
                raise ProtocolError(
                    f"processes disagree on tensor names: {sorted(other.tensors.keys() ^ tensors.keys())}"
                )
            for name, part in other.tensors.items():
                mine = tensors[name]
                if (mine.shape, mine.dtype) != (part.shape, part.dtype):
                    raise ProtocolError(
                        f"{name}: {mine.dtype}{list(mine.shape)} on one process, {part.dtype}{list(part.shape)} on another"
                    )
                tensors[name] = TensorLayout(name, mine.shape, mine.dtype, mine.shards + part.shards)
        return Layout(tensors)


@dataclass(frozen=True)
class SliceCopy:
    """Move the box [lower, upper) of `tensor` from `source` (a worker) to `destination` (a worker)."""

    tensor: str
    source: str
    destination: str
    lower: tuple[int, ...]
    upper: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the form that a stage node's `copies` option holds (the destination is the node's own worker)."""
        return {
            "tensor": self.tensor,
            "source": self.source,
            "lower": list(self.lower),
            "upper": list(self.upper),
        }
