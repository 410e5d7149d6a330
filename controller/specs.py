"""Whether the shardings that a program speaks of fit the meshes of its slices, and how many bytes an object takes there.

Must not know: executions. Called by the scheduler once a program, and by the client's `explain`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from waypath.controller.allocation import Grant
from waypath.controller.graph import Aval, Leaf, Place, Program, Slice
from waypath.proto.errors import GraphError

ITEM_BYTES = {"bool": 1, "int4": 1, "uint4": 1}


def check_specs(program: Program, grants: Mapping[str, Grant]) -> None:
    """Raises GraphError for the first object whose spec names an axis that its slice lacks, or that it does not divide by."""
    for where, place, avals in _placed(program):
        grant = grants.get(place.name) if isinstance(place, Slice) else None
        for aval in avals:
            for leaf in aval:
                check_leaf(leaf, grant, f"program {program.name}, {where}")


def check_leaf(leaf: Leaf, grant: Grant | None, where: str) -> None:
    """Raises GraphError where a leaf cannot lie on a slice as its spec says."""
    if grant is None:
        raise GraphError(f"{leaf}: arrays lie on slices with a mesh, which this place is not", where=where)
    sizes = dict(zip(grant.axes, grant.sizes, strict=True))
    used: set[str] = set()
    for dimension, axes in enumerate(leaf.spec):
        for axis in axes:
            if axis not in sizes:
                raise GraphError(f"{leaf}: no mesh axis {axis!r} on slice {grant.name}, which has {sizes}", where=where)
            if axis in used:
                raise GraphError(f"{leaf}: mesh axis {axis!r} is used twice", where=where)
            used.add(axis)
        parts = math.prod(sizes[axis] for axis in axes)
        if leaf.shape[dimension] % parts:
            raise GraphError(
                f"{leaf}: dimension {dimension} of size {leaf.shape[dimension]} is not divisible by the {parts} parts of {axes}",
                where=where,
            )


def item_bytes(dtype: str) -> int:
    """Bytes of one element of a dtype, by its name: the first number in it counts bits."""
    bits = re.search(r"\d+", dtype)
    return ITEM_BYTES.get(dtype) or max(1, int(bits[0] if bits else 8) // 8)


def nbytes(aval: Aval) -> int:
    """Bytes of an object, each element counted once."""
    return sum(math.prod(leaf.shape) * item_bytes(leaf.dtype) for leaf in aval)


def device_bytes(aval: Aval, grant: Grant) -> int:
    """Bytes of an object on each device of its slice."""
    sizes = dict(zip(grant.axes, grant.sizes, strict=True))
    total = 0
    for leaf in aval:
        parts = math.prod(sizes[axis] for axes in leaf.spec for axis in axes)
        total += math.prod(leaf.shape) * item_bytes(leaf.dtype) // parts
    return total


def _placed(program: Program) -> Iterable[tuple[str, Place, tuple[Aval, ...]]]:
    for param in program.params:
        yield f"parameter {param.name}", param.place, (param.aval,)
    for node in program.nodes:
        for step in node.steps or (node,):
            yield f"node {step.node_id}", step.place, step.gives
            if step.kind == "function":
                yield f"node {step.node_id}", step.place, step.takes
