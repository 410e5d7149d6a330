"""Running a sequence: its steps one after the other on the JAX thread, with nothing between them but the calls.

A sequence is bound once per program and mesh into a flat list of operations on numbered slots, so that an execution costs a
Python call a step. A value is dropped as soon as its last reader ran. The calls only enqueue: whether the values can
be had is asked later (`ready`), so that the next sequence is on its way meanwhile.

On a slice of several processes a sequence runs in all of them or in none, or those that run it wait for the others in a
collective for ever. So an input that cannot be had here, which a peer may have, is replaced by zeros, and the node fails
afterwards; and a call that raises here alone ends this process (`DivergedError`), and its world with it.

Must not know the wire or the store. Called by `service`, on the JAX thread.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from waypath.proto import worker_pb2 as pb
from waypath.proto.codecs import load_json
from waypath.proto.errors import FunctionError, NotFoundError, RemoteError, WaypathError
from waypath.proto.names import REGISTERED
from waypath.workers.functions.arrays import DeviceObject, zeros
from waypath.workers.functions.library import Library
from waypath.workers.service import DivergedError

__all__ = ["BoundSequence", "NanCheck", "digests_of", "ready"]

Value = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class _Step:
    """One function call. `arguments` are slots, `result` a slot; `split` gives the leaves of each of several outputs."""

    node_id: str
    name: str
    call: Callable[..., Any]
    arguments: tuple[int, ...]
    result: int
    split: tuple[int, ...]
    donated: tuple[int, ...]
    free: tuple[int, ...]
    debug_nans: bool


@dataclass(frozen=True, eq=False)
class _Select:
    """Takes one of a call's outputs."""

    source: int
    index: int
    result: int
    free: tuple[int, ...]


def digests_of(node: pb.Node) -> tuple[str, ...]:
    """The uploaded functions that a sequence calls, each once."""
    called = (step.method for step in node.steps if step.kind == "function")
    return tuple(dict.fromkeys(digest for digest in called if not digest.startswith(REGISTERED)))


class BoundSequence:
    """A sequence on a mesh."""

    def __init__(self, node: pb.Node, mesh: Mesh, library: Library, where: str = "") -> None:
        """Reads and checks every function; raises GraphError naming the step."""
        slots = {name: k for k, name in enumerate((*node.inputs, *(step.node_id for step in node.steps)))}
        last = {source: step.node_id for step in node.steps for source in step.inputs}
        exports = set(node.exports)
        self._inputs = len(node.inputs)
        self._exports = tuple((name, slots[name]) for name in node.exports)
        self._slots = len(slots)
        # In-process collectives of several local devices run on a pool of threads as large as the machine: two programs in
        # flight can starve each other for ever (XLA:CPU). One at a time, then.
        local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
        self._one_by_one = len(local) > 1 and local[0].platform == "cpu"
        self._gang = len(local) < mesh.devices.size
        self._mesh = mesh
        self._takes = {name: step.takes[k] for step in node.steps for k, name in enumerate(step.inputs) if step.takes}
        self._names = tuple(node.inputs)
        self._steps: list[_Step | _Select] = []
        for step in node.steps:
            gone = [s for s in dict.fromkeys(step.inputs) if last[s] == step.node_id and s not in exports]
            free = tuple(slots[source] for source in gone)
            if step.kind == "select":
                index = int(load_json(step.options_json)["index"])
                self._steps.append(_Select(slots[step.inputs[0]], index, slots[step.node_id], free))
                continue
            options = load_json(step.options_json)
            try:
                call = library.executable(step, mesh)
            except WaypathError as error:
                error.where = error.where or f"{where}/{step.node_id}"
                raise
            self._steps.append(
                _Step(
                    step.node_id,
                    str(options.get("name", step.method[:12])),
                    call,
                    tuple(slots[source] for source in step.inputs),
                    slots[step.node_id],
                    tuple(len(aval.leaves) for aval in step.gives) if len(step.gives) > 1 else (),
                    tuple(slots[step.inputs[k]] for k in step.donates),
                    free,
                    bool(options.get("debug_nans")),
                )
            )

    def run(self, inputs: Sequence[Any], where: str) -> tuple[dict[str, DeviceObject], list[NanCheck]]:
        """Calls the steps on the inputs; returns the exports, which may still be computed, and what `ready` has to look at.

        `where` is "execution on worker", for errors. An input may be an exception: zeros take its place. RemoteError names
        the step, the function and the traceback.
        """
        values: list[Value | None] = [None] * self._slots
        for position, value in enumerate(inputs):
            values[position] = self._leaves(value, self._names[position])
        checks: list[NanCheck] = []
        kept: FunctionError | None = None
        for step in self._steps:
            if isinstance(step, _Select):
                values[step.result] = values[step.source][step.index]  # type: ignore[index]
            else:
                self._call(step, values, where, checks)
                for slot in step.donated:
                    kept = kept or _check_donated(values[slot] or (), step, where)
            for slot in step.free:
                values[slot] = None
        if kept is not None:  # told when all steps have run: peers may wait for this process in one of them
            raise kept
        return {name: DeviceObject.of(values[slot] or ()) for name, slot in self._exports}, checks

    def _leaves(self, value: Any, name: str) -> Value:
        """The arrays of an input. Raises what it is where it is an error, unless peers may wait for this process."""
        if isinstance(value, DeviceObject):
            return value.leaves
        if isinstance(value, Exception) and self._gang:
            return tuple(zeros(leaf, self._mesh) for leaf in self._takes[name].leaves)
        if isinstance(value, Exception):
            raise value
        raise NotFoundError(f"input {name} holds no arrays on devices, but {type(value).__name__}")

    def _call(self, step: _Step, values: list[Value | None], where: str, checks: list[NanCheck]) -> None:
        try:
            if len(step.arguments) == 1:
                found = step.call(*values[step.arguments[0]])  # type: ignore[misc]
            else:
                found = step.call(*[leaf for slot in step.arguments for leaf in values[slot]])  # type: ignore[union-attr]
            if self._one_by_one:
                jax.block_until_ready(found)
        except Exception as error:
            # A failed collective may only tell that a peer is gone, which is then the cause to tell.
            cls = RemoteError if isinstance(error, jax.errors.JaxRuntimeError) else FunctionError
            failed = cls(
                f"function {step.name!r}: {type(error).__name__}: {error}",
                where=_place(where, step.node_id),
                remote_traceback="".join(traceback.format_exception(error)),
            )
            raise (DivergedError(failed) if self._gang else failed) from None
        if step.debug_nans:
            checks += _nan_checks(found, step, _place(where, step.node_id))
        if step.split:
            parts, start = [], 0
            for count in step.split:
                parts.append(tuple(found[start : start + count]))
                start += count
            values[step.result] = tuple(parts)
        else:
            values[step.result] = tuple(found)


def _place(where: str, step: str) -> str:
    execution, _, worker = where.partition(" on ")
    return f"{execution}/{step} on {worker}"


@dataclass(frozen=True, eq=False)
class NanCheck:
    """`found` is a bool on a device, true where one of this process's shards of an output holds a NaN."""

    found: Any
    what: str
    where: str


def _nan_checks(leaves: Sequence[Any], step: _Step, where: str) -> list[NanCheck]:
    """Enqueues the look at every output, behind its computation and before anybody consumes it."""
    return [
        NanCheck(
            _any_nan(shard.data),
            f"function {step.name!r}: FloatingPointError: NaN in output {k}, {leaf.dtype.name}{list(leaf.shape)}",
            where,
        )
        for k, leaf in enumerate(leaves)
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
        for shard in leaf.addressable_shards
    ]


@jax.jit
def _any_nan(array: Any) -> Any:
    return jnp.isnan(array).any()


def _check_donated(leaves: Sequence[Any], step: _Step, where: str) -> FunctionError | None:
    """A donation that a live view (numpy, dlpack) of the array has cancelled is an error: its memory is not free."""
    for leaf in leaves:
        if not leaf.is_deleted():
            return FunctionError(
                f"function {step.name!r}: the donated {leaf.dtype.name}{list(leaf.shape)} was not deleted: no output has its "
                "shape and dtype, or a view of it (numpy, dlpack) is alive in this process",
                where=_place(where, step.node_id),
            )
    return None


def ready(exports: Mapping[str, DeviceObject], checks: Sequence[NanCheck], where: str) -> None:
    """Blocks until the values are there. RemoteError where the computation failed, FunctionError where an output that is
    checked has a NaN.
    """
    try:
        jax.block_until_ready([held.leaves for held in exports.values()])
        for check in checks:
            if bool(check.found):
                raise FunctionError(check.what, where=check.where)
    except FunctionError:
        raise
    except Exception as error:
        raise RemoteError(
            f"{type(error).__name__}: {error}",
            where=where,
            remote_traceback="".join(traceback.format_exception(error)),
        ) from None
