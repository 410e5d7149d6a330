"""What needs jax in a client: trees of arrays, shardings, and functions as StableHLO.

Loaded at the first use of arrays or functions, and only in clients; nothing else in `controller/` imports jax. A function is
exported over a flat list of arrays, for as many devices as its slice has: the client needs none of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import export
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from waypath.controller.nodes import Aval, Leaf
from waypath.proto.codecs import DTYPES
from waypath.proto.errors import GraphError

Spec = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Exported:
    """A function for one mesh and one kind of arguments. `outputs`: (aval, tree) of each; `is_tuple`: it returns a tuple."""

    digest: str
    data: bytes
    outputs: tuple[tuple[Aval, Any], ...]
    is_tuple: bool


def flatten(value: Any, where: str) -> tuple[list[Any], Any]:
    """The numpy arrays of a tree, in jax's default dtypes, and its structure.

    GraphError where one may not travel, or has values that its default dtype (int32 for int64 without jax_enable_x64, …) lacks.
    """
    leaves, tree = jax.tree.flatten(value)
    found = []
    for leaf in leaves:
        try:
            array = np.asarray(leaf)
        except TypeError as error:  # typed random keys: jax says what to do
            raise GraphError(str(error), where=where) from None
        dtype = jax.dtypes.canonicalize_dtype(array.dtype) if array.dtype != object else array.dtype
        if dtype.name not in DTYPES:
            raise GraphError(f"an array of dtype {dtype.name} cannot travel; allowed: {sorted(DTYPES)}", where=where)
        found.append(array if array.dtype == dtype else _narrowed(array, dtype, where))
    return found, tree


def _narrowed(array: Any, dtype: Any, where: str) -> Any:
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    whole = np.issubdtype(array.dtype, np.integer)
    lost = cast != array if whole else np.isinf(cast) & ~np.isinf(array)
    if lost.any():
        raise GraphError(
            f"{array.dtype.name} becomes {dtype.name} here, which cannot hold {array[lost].flat[0]}",
            where=where,
            remedy="Scale it, or set jax_enable_x64 in the client and on the workers",
        )
    return cast


def unflatten(tree: Any, leaves: Sequence[Any]) -> Any:
    """The tree of these leaves."""
    return jax.tree.unflatten(tree, list(leaves))


def specs(spec: Any, tree: Any, shapes: Sequence[tuple[int, ...]], where: str) -> list[Spec]:
    """One spec a leaf, from one for all of them (None: not split) or a tree of them."""
    count = len(shapes)
    if spec is None or _is_spec(spec):
        wanted = [spec] * count
    else:
        try:
            found = jax.tree.broadcast(spec, unflatten(tree, [0] * count), is_leaf=lambda s: s is None or _is_spec(s))
            wanted = jax.tree.leaves(found, is_leaf=lambda s: s is None or _is_spec(s))
        except ValueError as error:
            raise GraphError(f"the specs do not fit the arrays: {error}", where=where) from None
    return [_normal(one, shape, where) for one, shape in zip(wanted, shapes, strict=True)]


def _is_spec(spec: Any) -> bool:
    return isinstance(spec, PartitionSpec)


def _normal(spec: Any, shape: tuple[int, ...], where: str) -> Spec:
    parts = [() if p is None else (p,) if isinstance(p, str) else tuple(p) for p in (() if spec is None else spec)]
    if len(parts) > len(shape):
        raise GraphError(f"spec {spec} has {len(parts)} dimensions, the array {list(shape)}", where=where)
    return (*parts, *((),) * (len(shape) - len(parts)))


def promised_one(gives: Any, spec: Any, where: str) -> tuple[Aval, Any]:
    """The aval and the structure of a tree of arrays that a call is to give: anything with shape and dtype is one."""
    leaves, tree = jax.tree.flatten(gives)
    for leaf in leaves:
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise GraphError(
                f"gives: expected arrays or jax.ShapeDtypeStruct, found {type(leaf).__name__}", where=where
            )
    shapes = [tuple(leaf.shape) for leaf in leaves]
    names = [jax.dtypes.canonicalize_dtype(leaf.dtype).name for leaf in leaves]
    wanted = specs(spec, tree, shapes, where)
    return tuple(Leaf(*parts) for parts in zip(shapes, names, wanted, strict=True)), tree


def promised(gives: Any, out_specs: Any, where: str) -> tuple[tuple[Aval, Any], ...]:
    """As `promised_one`, of each output where `gives` is a tuple."""
    if not isinstance(gives, tuple):
        return (promised_one(gives, out_specs, where),)
    return tuple(
        promised_one(one, _of_output(out_specs, k, True, len(gives), where), where) for k, one in enumerate(gives)
    )


def abstract_mesh(axes: Sequence[str], sizes: Sequence[int]) -> AbstractMesh:
    """The mesh of a slice, without devices: for shard_map and the like inside functions."""
    return AbstractMesh(tuple(sizes), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def export_function(
    fun: Callable[..., Any],
    arguments: Sequence[tuple[Aval, Any]],
    out_specs: Any,
    axes: Sequence[str],
    sizes: Sequence[int],
    platform: str,
    where: str,
    check: Callable[[Sequence[tuple[Aval, Any]]], None] = lambda outputs: None,
) -> Exported:
    """Traces `fun` on arguments (aval, tree) and exports it for a mesh; errors of the function itself pass as they are.

    `check` is given the outputs before they are exported, and raises where their specs do not fit.
    """
    mesh = abstract_mesh(axes, sizes)
    trees: list[Any] = []
    is_tuple = [False]

    def flat(*leaves: Any) -> tuple[Any, ...]:
        left, args = list(leaves), []
        for aval, tree in arguments:
            args.append(unflatten(tree, left[: len(aval)]))
            left = left[len(aval) :]
        returned = fun(*args)
        is_tuple[0] = isinstance(returned, tuple)
        outputs = returned if isinstance(returned, tuple) else (returned,)
        trees[:] = [jax.tree.structure(output) for output in outputs]
        return tuple(jax.tree.leaves(outputs))

    given = [leaf for aval, _ in arguments for leaf in aval]
    structs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in given]
    results = list(jax.eval_shape(flat, *structs))
    if not results or any(tree.num_leaves == 0 for tree in trees):
        raise GraphError("the function returns no array, or an output without one", where=where)
    outputs: list[tuple[Aval, Any]] = []
    start = 0
    for position, tree in enumerate(trees):
        mine = results[start : start + tree.num_leaves]
        start += tree.num_leaves
        shapes = [tuple(result.shape) for result in mine]
        wanted = specs(_of_output(out_specs, position, is_tuple[0], len(trees), where), tree, shapes, where)
        outputs.append((tuple(Leaf(s, r.dtype.name, w) for s, r, w in zip(shapes, mine, wanted, strict=True)), tree))
    check(outputs)
    jitted = jax.jit(
        flat,
        in_shardings=tuple(_sharding(leaf, mesh) for leaf in given),
        out_shardings=tuple(_sharding(leaf, mesh) for aval, _ in outputs for leaf in aval),
    )
    data = bytes(export.export(jitted, platforms=[platform])(*structs).serialize())
    return Exported(hashlib.sha256(data).hexdigest(), data, tuple(outputs), is_tuple[0])


def _of_output(out_specs: Any, position: int, is_tuple: bool, count: int, where: str) -> Any:
    """The spec of one output: of a tuple of outputs the specs are a tuple too, or one for all."""
    if not is_tuple or out_specs is None or _is_spec(out_specs):
        return out_specs
    if not isinstance(out_specs, tuple) or len(out_specs) != count:
        raise GraphError(f"out_specs: expected a tuple of {count}, one an output, found {out_specs!r}", where=where)
    return out_specs[position]


def _sharding(leaf: Leaf, mesh: AbstractMesh) -> NamedSharding:
    parts = [None if not p else p[0] if len(p) == 1 else p for p in leaf.spec]
    return NamedSharding(mesh, PartitionSpec(*parts))
