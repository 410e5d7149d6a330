"""Functions by digest, fetched from the controller once and read, or by name (registered.py); compiled once a mesh.

Owns the bytes and the executables of this process. Must not know programs. Called when a sequence is bound; `fetch` runs on
the network loop, the rest on the JAX thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import jax
from jax import export
from jax.sharding import Mesh

from waypath.proto import worker_pb2 as pb
from waypath.proto.codecs import dtype_of, dump_json, load_json
from waypath.proto.errors import FunctionError, GraphError, ProtocolError
from waypath.proto.names import REGISTERED
from waypath.workers import jax_compat
from waypath.workers.functions.arrays import sharding_of
from waypath.workers.functions.registered import find_function
from waypath.workers.options import Options, options_of

__all__ = ["Library"]

_CUSTOM_CALLS = re.compile(r"custom_call @([\w.$]+)")

Fetch = Callable[[str], AsyncIterator[bytes]]


class Library:
    """What this worker knows of uploaded functions. `source(digest)` streams a function's bytes from the controller."""

    def __init__(self, source: Fetch) -> None:
        self._source = source
        self._fetches: dict[str, asyncio.Task[bytes]] = {}
        self._exported: dict[str, Any] = {}
        self._compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}

    async def fetch(self, digests: Sequence[str]) -> None:
        """Makes sure that the bytes are here. ProtocolError where they are not what the digest says."""
        for digest in digests:
            task = self._fetches.get(digest)
            if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
                task = self._fetches[digest] = asyncio.get_running_loop().create_task(self._read(digest))
            await asyncio.shield(task)

    async def _read(self, digest: str) -> bytes:
        parts = [chunk async for chunk in self._source(digest)]
        data = b"".join(parts)
        found = hashlib.sha256(data).hexdigest()
        if found != digest:
            raise ProtocolError(f"function {digest}: the {len(data):,} bytes that came have SHA-256 {found}")
        return data

    def executable(self, step: pb.Node, mesh: Mesh) -> Callable[..., Any]:
        """A callable on flat leaves for a function step. GraphError where the function does not fit the step or the mesh."""
        donated = set(step.donates)
        leaves = [(leaf, k in donated) for k, aval in enumerate(step.takes) for leaf in aval.leaves]
        results = [leaf for aval in step.gives for leaf in aval.leaves]
        kinds = tuple(aval.SerializeToString(deterministic=True) for aval in (*step.takes, *step.gives))
        key = (step.method, _options_text(step), mesh, kinds, len(step.takes), tuple(gone for _, gone in leaves))
        made = self._compiled.get(key)
        if made is None:
            if step.method.startswith(REGISTERED):
                call = _registered(step, [leaf for leaf, _ in leaves], results)
            else:
                call = self._exported_call(step, mesh, [leaf for leaf, _ in leaves], results)
            made = self._compiled[key] = jax.jit(
                call,
                in_shardings=tuple(sharding_of(leaf, mesh) for leaf, _ in leaves),
                out_shardings=tuple(sharding_of(leaf, mesh) for leaf in results),
                donate_argnums=tuple(k for k, (_, gone) in enumerate(leaves) if gone),
            )
        return made

    def _exported_call(
        self, step: pb.Node, mesh: Mesh, takes: Sequence[pb.Leaf], gives: Sequence[pb.Leaf]
    ) -> Callable[..., tuple[Any, ...]]:
        exported = self._load(step.method)
        _check(exported, step, mesh, takes, gives)
        return lambda *given: tuple(jax.tree.leaves(exported.call(*given)))

    def _load(self, digest: str) -> Any:
        exported = self._exported.get(digest)
        if exported is None:
            try:
                exported = export.deserialize(bytearray(self._fetches[digest].result()))
            except Exception as error:  # a damaged artifact fails inside flatbuffers or jax, in many ways
                raise GraphError(f"function {digest} cannot be read: {type(error).__name__}: {error}") from error
            refused = sorted(set(_CUSTOM_CALLS.findall(exported.mlir_module())) - jax_compat.stable_custom_calls())
            if refused:
                raise GraphError(f"function {digest} makes custom calls that are not allowed: {', '.join(refused)}")
            self._exported[digest] = exported
        return exported


def _options_text(step: pb.Node) -> str:
    """The options that a registered function is compiled with; those of an exported one are in its text."""
    return dump_json(load_json(step.options_json).get("options", {})) if step.method.startswith(REGISTERED) else ""


def _registered(step: pb.Node, takes: Sequence[pb.Leaf], gives: Sequence[pb.Leaf]) -> Callable[..., tuple[Any, ...]]:
    """A function that this worker knows by name, on flat leaves, with its options bound.

    GraphError where it gives something else than the program says, FunctionError where it raises while it is traced: before any
    process has begun.
    """
    name = step.method.removeprefix(REGISTERED)
    function = find_function(name)
    options = options_of(function)
    given = load_json(step.options_json).get("options", {})
    bound = (options or Options({})).bind(given, f"function {name}")
    counts = [len(aval.leaves) for aval in step.takes]
    expected = [(tuple(leaf.shape), leaf.dtype) for leaf in gives]

    def call(*leaves: Any) -> tuple[Any, ...]:
        left, arguments = list(leaves), []
        for count in counts:
            arguments.append(left[0] if count == 1 else tuple(left[:count]))
            left = left[count:]
        return tuple(jax.tree.leaves(function(*arguments, **bound)))

    structs = [jax.ShapeDtypeStruct(tuple(leaf.shape), dtype_of(leaf.dtype)) for leaf in takes]
    try:
        traced = jax.eval_shape(call, *structs)
    except Exception as error:
        raise FunctionError(
            f"function {name!r}: {type(error).__name__}: {error}",
            remote_traceback="".join(traceback.format_exception(error)),
        ) from None
    found = [(tuple(leaf.shape), leaf.dtype.name) for leaf in traced]
    if found != expected:
        raise GraphError(f"function {name} gives {found}, the program says {expected}")
    return call


def _check(exported: Any, step: pb.Node, mesh: Mesh, takes: Sequence[pb.Leaf], gives: Sequence[pb.Leaf]) -> None:
    """A mismatch must not get as far as XLA, which may end the process."""
    platform = mesh.devices.flat[0].platform
    if exported.nr_devices != mesh.devices.size:
        raise GraphError(
            f"the function was exported for {exported.nr_devices} devices, the slice has {mesh.devices.size}"
        )
    if platform not in exported.platforms:
        raise GraphError(f"the function was exported for {', '.join(exported.platforms)}, the slice is {platform}")
    for what, avals, leaves in (("takes", exported.in_avals, takes), ("gives", exported.out_avals, gives)):
        found = [(tuple(aval.shape), aval.dtype.name) for aval in avals]
        expected = [(tuple(leaf.shape), leaf.dtype) for leaf in leaves]
        if found != expected:
            raise GraphError(f"the function {what} {found}, the program says {expected}")
