"""Functions by digest: fetched from the controller once, read, and compiled once a mesh.

Owns the bytes and the executables of this process. Must not know programs. Called when a sequence is bound; `fetch` runs on
the network loop, the rest on the JAX thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import jax
from jax import export
from jax.sharding import Mesh

from waypath.proto import worker_pb2 as pb
from waypath.proto.errors import GraphError, ProtocolError
from waypath.workers import jax_compat
from waypath.workers.functions.arrays import sharding_of

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
        specs = tuple(
            str([list(axes.names) for axes in leaf.spec]) for leaf in (*(leaf for leaf, _ in leaves), *results)
        )
        key = (step.method, mesh, specs, tuple(gone for _, gone in leaves))
        made = self._compiled.get(key)
        if made is None:
            exported = self._load(step.method)
            _check(exported, step, mesh, [leaf for leaf, _ in leaves], results)

            def call(*given: Any) -> tuple[Any, ...]:
                return tuple(jax.tree.leaves(exported.call(*given)))

            made = self._compiled[key] = jax.jit(
                call,
                in_shardings=tuple(sharding_of(leaf, mesh) for leaf, _ in leaves),
                out_shardings=tuple(sharding_of(leaf, mesh) for leaf in results),
                donate_argnums=tuple(k for k, (_, gone) in enumerate(leaves) if gone),
            )
        return made

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
