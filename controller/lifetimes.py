"""When objects come to be, are read for the last time, outlive their execution, are freed, or turn out never to be had.

Sits between the directory (objects.py), which knows one object at a time, and the scheduler: what is not needed any more is
freed on every worker that holds a part, whoever is bound to what cannot be had is named in `doomed`, and device memory that
objects keep is given back with them.

Must not know: placement, admission. Called by the scheduler, which sends what it says through `release`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from waypath.controller import bindings
from waypath.controller.allocation import Grant
from waypath.controller.execution import Execution, Task
from waypath.controller.memory import Memory
from waypath.controller.objects import ObjectDirectory, ObjectState
from waypath.controller.specs import device_bytes
from waypath.proto.errors import WaypathError
from waypath.proto.names import object_id


class Release(Protocol):
    """Tells a worker, if it is live, to free objects of an execution: these, or all of it but those `kept`."""

    def __call__(
        self, worker: str, execution_id: str, names: tuple[str, ...] = (), kept: tuple[str, ...] = ()
    ) -> None: ...


class Lifetimes:
    """Changes the directory. `doomed` holds the executions that must fail, with the root cause; the scheduler empties it."""

    def __init__(
        self,
        objects: ObjectDirectory,
        memory: Memory,
        grants: Mapping[str, Grant],
        running: Mapping[str, Execution],
        release: Release,
        more_room: Callable[[], None],
    ) -> None:
        self.doomed: deque[tuple[str, WaypathError]] = deque()
        self._objects = objects
        self._memory = memory
        self._grants = grants
        self._running = running
        self._release = release
        self._more_room = more_room

    def submitted(self, execution: Execution) -> None:
        """Notes who reads what it is bound to, and makes its outputs, which others may be bound to from now on."""
        bindings.bind(execution, self._objects)
        self._create(execution, execution.program.outputs)
        for oid in execution.bindings.values():
            error = self._objects[oid].error
            if error is not None:
                self.doomed.append((execution.execution_id, error))

    def admitted(self, execution: Execution) -> None:
        """Makes its other objects."""
        program = execution.program
        self._create(execution, [name for name in program.producers if name not in program.kept])

    def finished(self, task: Task) -> None:
        """Frees the objects that the task was the last to need, and its own if nobody reads them."""
        read: list[str] = []
        for oid, reader in task.reads():
            self._objects.consumed(oid, reader)
            read.append(oid)
        for position in task.node.donates:
            bound = task.execution.bindings.get(task.node.inputs[position])
            if bound is not None:
                self._consume(bound, task.execution, task.full_id)
        self.free(*read, *task.object_ids.values())

    def ended(self, execution: Execution, error: WaypathError | None, involved: Iterable[str]) -> None:
        """The execution is over: with its objects, but the outputs that somebody keeps or reads.

        With `error` these cannot be had. Frees what else is left on the workers `involved`.
        """
        execution_id = execution.execution_id
        outlive = {
            name: oid for name in execution.program.outputs if self._outlives(oid := object_id(execution_id, name))
        }
        for worker in involved:
            self._release(worker, execution_id, kept=() if error else tuple(outlive))
        consumed, spared = bindings.unbind(execution, self._objects)
        for oid, full_id in consumed:
            self._consume(oid, execution, full_id)
        self.free(*spared)
        if self._memory.free(execution_id):
            self._more_room()
        for name in execution.program.producers:
            oid = object_id(execution_id, name)
            if name not in outlive:
                self._objects.forget(oid)
                continue
            self._objects.outlive(oid)
            if error is None:
                self._reserve(oid)
            else:
                self._objects[oid].parts.clear()
                self.poison(oid, error)

    def free(self, *oids: str) -> None:
        """Frees those of these objects that nobody keeps or reads, on every worker; unknown ones are free already."""
        freed: dict[tuple[str, str], list[str]] = {}
        for oid in oids:
            if oid not in self._objects:
                continue
            ref = self._objects[oid]
            if ref.kept or ref.needed_by or ref.state is ObjectState.PENDING:
                continue
            execution_id, _, name = oid.rpartition("/")
            is_over = execution_id not in self._running
            if ref.state is not ObjectState.RELEASED:
                for worker, nbytes in self._objects.release(oid).items():
                    if nbytes or is_over:
                        freed.setdefault((worker, execution_id), []).append(name)
            if is_over:
                if self._memory.free(oid):
                    self._more_room()
                self._objects.forget(oid)
        for (worker, execution_id), names in freed.items():
            self._release(worker, execution_id, tuple(names))

    def drop(self, oid: str, why: str) -> None:
        """Its owner keeps the object no longer."""
        self._objects.let_go(oid, why)
        self.free(oid)

    def poison(self, oid: str, error: WaypathError) -> None:
        """The object cannot be had: whoever is bound to it is doomed."""
        execution_id, _, name = oid.rpartition("/")
        for worker in self._objects.poison(oid, error):
            self._release(worker, execution_id, (name,))
        if self._memory.free(oid):
            self._more_room()
        readers = {key.rpartition("/")[0]: None for key in sorted(self._objects[oid].needed_by) if "/" in key}
        self.doomed.extend((reader, error) for reader in readers)

    def _create(self, execution: Execution, names: Iterable[str]) -> None:
        program = execution.program
        for name in names:
            self._objects.create(
                object_id(execution.execution_id, name),
                execution.owner,
                program.consumers[name],
                kept=name in program.kept,
                aval=program.aval_of(name),
                place=program.place_of(name),
            )

    def _outlives(self, oid: str) -> bool:
        ref = self._objects[oid]
        return ref.kept or any("/" in key for key in ref.needed_by)

    def _consume(self, oid: str, execution: Execution, by: str) -> None:
        """The object is gone into a node; what it had reserved is the execution's now."""
        self._objects.let_go(oid, f"was donated to {by}")
        if execution.execution_id in self._running:
            self._memory.reserve(execution.execution_id, self._memory.free(oid))
        self.free(oid)

    def _reserve(self, oid: str) -> None:
        ref = self._objects[oid]
        grant = self._grants.get(ref.place.name) if ref.place is not None else None
        if grant is not None and grant.memory_bytes:
            self._memory.reserve(oid, {grant.name: device_bytes(ref.aval, grant)})
