"""The `function` service: sequences of functions, arrays from clients, arrays from other slices.

Owns the bound sequences of this worker. Must not know gRPC. The command loop calls `sequence` and `transfer` for nodes of
those kinds, and `put` as a service's method. `prepare` runs on the network loop before a sequence's turn comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from waypath.proto import worker_pb2 as pb
from waypath.proto.codecs import dtype_of
from waypath.proto.errors import GraphError, ProtocolError
from waypath.proto.layout import Box
from waypath.proto.names import object_id
from waypath.workers.functions.arrays import DeviceObject, Meshes, build, local_boxes, placed
from waypath.workers.functions.library import Library
from waypath.workers.functions.sequence import BoundSequence, digests_of, ready
from waypath.workers.functions.sources import copies
from waypath.workers.service import Call, Lane, ServiceContext, method, service

__all__ = ["FunctionService"]

MAX_BOUND = 4096


@service("function")
class FunctionService:
    """One a worker."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._meshes = Meshes()
        self._library = Library(context.fetch_function)
        self._bound: dict[tuple[str, str], BoundSequence] = {}
        self._unready = 0

    def is_bound(self, call: Call) -> bool:
        """Did a sequence run before? Then there is nothing to prepare."""
        return (call.program_id, call.node_id) in self._bound

    async def prepare(self, call: Call) -> None:
        """Fetches the functions of a sequence."""
        if not self.is_bound(call):
            await self._library.fetch(digests_of(call.node))

    @method(lane="jax")
    def sequence(self, call: Call) -> dict[str, DeviceObject]:
        """Runs the steps of `call.node`; `call.ready` waits until their values are there."""
        where = f"{call.execution_id} on {self._context.worker}"
        key = (call.program_id, call.node_id)
        bound = self._bound.get(key)
        if bound is None:
            mesh = self._meshes.mesh(self._slice(call, call.node.slice))
            bound = BoundSequence(call.node, mesh, self._library, call.execution_id)
            if len(self._bound) >= MAX_BOUND:
                del self._bound[next(iter(self._bound))]
            self._bound[key] = bound
        exports, checks = bound.run(call.inputs, where)
        wait = partial(ready, exports, checks, f"{call.execution_id}/{call.node_id} on {self._context.worker}")
        if self._unready or self._context.jax_has_more():
            self._unready += 1
            call.ready = partial(self._later, wait)
        else:
            wait()  # nothing to get ahead with: two changes of thread less
        return exports

    def _later(self, wait: Callable[[], None]) -> None:
        """On the ready thread. What is computed from a value is told of after it: none is waited for ahead of this one."""
        try:
            wait()
        finally:
            self._unready -= 1

    @method(lane="async")
    async def put(self, call: Call) -> DeviceObject:
        """The arrays that a client pushes: bundle arrays "<leaf>/<local device>" of this worker's parts."""
        pushed = await self._context.mailbox.take(object_id(call.execution_id, call.node_id))
        parts: list[dict[int, Any]] = [{} for _ in call.node.gives[0].leaves]
        for name, array in pushed.arrays.items():
            leaf, _, device = name.partition("/")
            if not (leaf.isdigit() and device.isdigit() and int(leaf) < len(parts)):
                raise ProtocolError(f"array {name!r}: expected <leaf>/<local device> of {len(parts)} leaves")
            parts[int(leaf)][int(device)] = array
        return await self._build(call, parts)

    @method(lane="async")
    async def transfer(self, call: Call) -> DeviceObject:
        """The arrays of another slice's object, as this slice's specs want them: what is not here is pulled, each box once."""
        source, target = self._slice(call, call.node.sources[0]), self._slice(call, call.node.slice)
        parts: list[dict[int, Any]] = []
        wanted: list[dict[str, Any]] = []
        arrays: dict[tuple[str, Box], Any] = {}
        for index, (given, leaf) in enumerate(zip(call.node.takes[0].leaves, call.node.gives[0].leaves, strict=True)):
            mine: dict[int, Any] = {}
            for device, box in local_boxes(leaf, target, self._context.worker):
                key = (str(index), box)
                if key not in arrays:
                    shape = [b - a for a, b in zip(*box, strict=True)]
                    arrays[key] = np.empty(shape, dtype_of(leaf.dtype))
                    wanted += copies(str(index), given, source, box, self._context.worker)
                mine[device] = arrays[key]
            parts.append(mine)

        def write(tensor: str, lower: tuple[int, ...], upper: tuple[int, ...]) -> Any:
            return _window(arrays, tensor, lower, upper)

        pulled = await self._context.transfer.pull_slices(
            call.objects[0], wanted, write, timeout_s=call.remaining_s, of_object=True
        )
        away = [copy for copy in wanted if copy["source"] != self._context.worker]
        call.report(transfer_bytes=sum(copy["bytes"] for copy in away), transfer_s=pulled.seconds)
        return await self._build(call, parts)

    def giving_arrays(self, method: Callable[[Call], Any], lane: Lane) -> Callable[[Call], Any]:
        """Another service's method on the same lane, with the tree of arrays that it returns as the object that its node promises."""

        def on_jax(call: Call) -> DeviceObject:
            return self._promised(call, method(call))

        def on_host(call: Call) -> DeviceObject:
            returned = method(call)
            return self._context.submit_jax(lambda: self._promised(call, returned)).result()

        async def on_loop(call: Call) -> DeviceObject:
            returned = await method(call)
            return await asyncio.wrap_future(self._context.submit_jax(lambda: self._promised(call, returned)))

        by_lane: dict[Lane, Callable[[Call], Any]] = {"jax": on_jax, "host": on_host, "async": on_loop}
        return by_lane[lane]

    def _promised(self, call: Call, returned: Any) -> DeviceObject:
        """The arrays that a method returned, as its node says that they lie. GraphError where they are others. On the JAX thread."""
        mesh = self._meshes.mesh(self._slice(call, call.node.slice))
        leaves, found = call.node.gives[0].leaves, jax.tree.leaves(returned)
        wanted = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves]
        given = [f"{getattr(a, 'dtype', type(a).__name__)}{list(np.shape(a))}" for a in found]
        if wanted != given:
            raise GraphError(
                f"{call.node.service}.{call.node.method} gives {', '.join(given) or 'nothing'}, the program says "
                f"{', '.join(wanted) or 'nothing'}"
            )
        return DeviceObject.of([placed(leaf, mesh, array) for leaf, array in zip(leaves, found, strict=True)])

    async def _build(self, call: Call, parts: list[dict[int, Any]]) -> DeviceObject:
        slice_ = self._slice(call, call.node.slice)

        def work() -> DeviceObject:
            mesh = self._meshes.mesh(slice_)
            leaves = call.node.gives[0].leaves
            return DeviceObject.of([build(leaf, mesh, mine) for leaf, mine in zip(leaves, parts, strict=True)])

        return await asyncio.wrap_future(self._context.submit_jax(work))

    @staticmethod
    def _slice(call: Call, name: str) -> pb.MeshSlice:
        found = call.slices.get(name)
        if found is None:
            raise GraphError(f"slice {name!r} has no mesh; known: {', '.join(sorted(call.slices)) or 'none'}")
        return found


def _window(arrays: dict[tuple[str, Box], Any], tensor: str, lower: tuple[int, ...], upper: tuple[int, ...]) -> Any:
    """The part of a wanted box that a copy fills; the boxes that a slice wants of one array are disjoint."""
    for (name, (start, end)), array in arrays.items():
        inside = all(s <= a and b <= e for s, a, b, e in zip(start, lower, upper, end, strict=True))
        if name == tensor and inside:
            return array[(..., *(slice(a - s, b - s) for s, a, b in zip(start, lower, upper, strict=True)))]
    raise ProtocolError(f"nobody wants {tensor} from {lower} to {upper}")
