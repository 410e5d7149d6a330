"""From whom a wanted box of an array is to be copied: a decision, without effects.

Every element is copied once. A worker that needs what it holds itself takes it from itself; replicas share the rest, each reader
beginning with another one. Must not know jax or the wire. Called by transfers between slices.
"""

from __future__ import annotations

import math
from typing import Any

from waypath.proto import worker_pb2 as pb
from waypath.proto.codecs import dtype_of
from waypath.proto.layout import Box, device_boxes

__all__ = ["copies"]


def copies(tensor: str, leaf: pb.Leaf, source: pb.MeshSlice, box: Box, reader: str) -> list[dict[str, Any]]:
    """The pieces of `box` ({"tensor", "source", "lower", "upper", "bytes"}) that worker `reader` asks for, and whom.

    `leaf` and `source`: how and where the array lies.
    """
    holders: dict[Box, list[str]] = {}
    boxes = device_boxes(leaf.shape, [axes.names for axes in leaf.spec], source.axes, source.sizes)
    for device, held in zip(source.devices, boxes, strict=True):
        names = holders.setdefault(held, [])
        if device.worker not in names:
            names.append(device.worker)
    found: list[dict[str, Any]] = []
    turn = sum(map(ord, reader))
    for held, names in holders.items():
        lower = tuple(max(a, b) for a, b in zip(box[0], held[0], strict=True))
        upper = tuple(min(a, b) for a, b in zip(box[1], held[1], strict=True))
        sizes = [b - a for a, b in zip(lower, upper, strict=True)]
        if any(size <= 0 for size in sizes):
            continue
        chosen = reader if reader in names else names[(turn + len(found)) % len(names)]
        found.append(
            {
                "tensor": tensor,
                "source": chosen,
                "lower": lower,
                "upper": upper,
                "bytes": math.prod(sizes) * dtype_of(leaf.dtype).itemsize,
            }
        )
    return found
