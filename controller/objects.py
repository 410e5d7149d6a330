"""The object directory: which worker holds which object, who still needs it, and whom it belongs to.

An object is `pending` until every worker of its node has its part, then `held`; it is `released` when the last consumer
has finished and nobody keeps it. A lost object that is still needed goes back to `pending` and is computed again. Consumers
are counted by name, so that a consumer that runs twice counts once: a node of the same execution by its id, one of another
by "execution/node".

An output of a program is *kept* by its owner, beyond its execution, until it is deleted. It may be bound to parameters of
executions that come later, also while it is pending. If it cannot be had any more it is `poisoned` and holds the reason; one that
a node consumed (`donate`), or that was deleted, leaves a tombstone, so that a later use is told what became of it.

Must not know: nodes' methods, placement, messages. Called by the scheduler, which turns releases into commands.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from waypath.controller.nodes import Aval, Place
from waypath.proto.errors import GraphError, IllegalTransitionError, NotFoundError, WaypathError

HISTORY = 64
MAX_TOMBSTONES = 10_000


class ObjectState(Enum):
    """Where an object is in its life."""

    __hash__ = object.__hash__  # that of Enum is a Python function, and tables are looked up all the time

    PENDING = "pending"
    HELD = "held"
    RELEASED = "released"
    POISONED = "poisoned"


class ObjectEvent(Enum):
    """What happens to an object."""

    __hash__ = object.__hash__  # that of Enum is a Python function, and tables are looked up all the time

    COMPUTED = "computed"
    LOST = "lost"
    RELEASED = "released"
    WANTED = "wanted again"
    POISONED = "poisoned"


TRANSITIONS: dict[ObjectState, dict[ObjectEvent, ObjectState]] = {
    ObjectState.PENDING: {
        ObjectEvent.COMPUTED: ObjectState.HELD,
        ObjectEvent.LOST: ObjectState.PENDING,
        ObjectEvent.RELEASED: ObjectState.RELEASED,
        ObjectEvent.POISONED: ObjectState.POISONED,
    },
    ObjectState.HELD: {
        ObjectEvent.LOST: ObjectState.PENDING,
        ObjectEvent.RELEASED: ObjectState.RELEASED,
        ObjectEvent.POISONED: ObjectState.POISONED,
    },
    ObjectState.RELEASED: {ObjectEvent.WANTED: ObjectState.PENDING},
    ObjectState.POISONED: {ObjectEvent.RELEASED: ObjectState.RELEASED},
}
"""A missing entry is the error."""


@dataclass
class ObjectRef:
    """What the controller knows of one object. `parts`: bytes held, by worker.

    `workers`: who holds it or will, in process order. `kept`: it outlives its execution. `donated_to`: the node that will consume
    or has consumed it. `error`: why it is poisoned.
    """

    object_id: str
    owner: str
    needed_by: set[str]
    kept: bool = False
    aval: Aval = ()
    place: Place | None = None
    workers: tuple[str, ...] = ()
    donated_to: str = ""
    error: WaypathError | None = None
    parts: dict[str, int] = field(default_factory=dict)
    state: ObjectState = ObjectState.PENDING
    history: deque[str] = field(default_factory=lambda: deque(maxlen=HISTORY))

    @property
    def nbytes(self) -> int:
        """Bytes held on all workers together."""
        return sum(self.parts.values())


class ObjectDirectory:
    """All objects of running executions, and those that are kept beyond them."""

    def __init__(self) -> None:
        self._objects: dict[str, ObjectRef] = {}
        self._outputs: dict[str, dict[str, None]] = {}
        self._tombstones: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._objects)

    def ids(self) -> list[str]:
        """All object ids."""
        return list(self._objects)

    def __contains__(self, oid: str) -> bool:
        return oid in self._objects

    def __getitem__(self, oid: str) -> ObjectRef:
        """Raises NotFoundError on an object that never was or is forgotten."""
        try:
            return self._objects[oid]
        except KeyError:
            raise NotFoundError(f"no object {oid!r}") from None

    def create(
        self,
        oid: str,
        owner: str,
        needed_by: Iterable[str],
        *,
        kept: bool = False,
        aval: Aval = (),
        place: Place | None = None,
    ) -> ObjectRef:
        """Adds a pending object that the consumers `needed_by` will read, and the owner if it is `kept`."""
        if oid in self._objects:
            raise IllegalTransitionError(f"object {oid} exists already", where=_story(self._objects[oid]))
        ref = self._objects[oid] = ObjectRef(oid, owner, set(needed_by), kept, aval, place)
        if kept:
            self._outputs.setdefault(owner, {})[oid] = None
        return ref

    def bindable(self, oid: str, owner: str) -> ObjectRef:
        """The object, for a parameter. Raises NotFoundError where it never was, is another owner's, or is gone or promised to
        a node that consumes it: the error says which.
        """
        ref = self._objects.get(oid)
        if ref is None and oid in self._tombstones:
            raise GraphError(f"object {oid} {self._tombstones[oid]}")
        if ref is None or ref.owner != owner:
            raise NotFoundError(f"no object {oid!r} of {owner}")
        if ref.donated_to:
            raise GraphError(f"object {oid} is donated to {ref.donated_to}, nothing may read it after that")
        if not ref.kept:
            raise GraphError(f"object {oid} was deleted")
        return ref

    def kept_by(self, owner: str) -> list[str]:
        """Ids of the objects that an owner keeps."""
        return [oid for oid in self._outputs.get(owner, ()) if self._objects[oid].kept]

    def outputs_on(self, worker: str) -> list[ObjectRef]:
        """The outputs of which a worker has or will have a part. Walks all outputs: for losses."""
        refs = (self._objects[oid] for oids in self._outputs.values() for oid in oids)
        return [ref for ref in refs if worker in ref.workers and ref.state is not ObjectState.POISONED]

    def outputs_of(self, execution_id: str) -> tuple[str, ...]:
        """Names of the outputs of an execution that are there still. Walks all outputs: for late events."""
        ids = (oid.rpartition("/") for oids in self._outputs.values() for oid in oids)
        return tuple(name for execution, _, name in ids if execution == execution_id)

    def on(self, place: Place) -> list[str]:
        """Ids of the outputs that lie on a place. Walks all outputs."""
        return [oid for oids in self._outputs.values() for oid in oids if self._objects[oid].place == place]

    def let_go(self, oid: str, why: str) -> None:
        """The owner keeps the object no longer; `why` completes "object X …" for who asks for it later."""
        ref = self[oid]
        if ref.kept:
            ref.kept = False
            self._tombstones[oid] = why
            while len(self._tombstones) > MAX_TOMBSTONES:
                self._tombstones.popitem(last=False)

    def poison(self, oid: str, error: WaypathError) -> dict[str, int]:
        """The object cannot be had (any more); who reads it gets `error`. Returns the bytes that each worker can free."""
        ref = self[oid]
        self._move(ref, ObjectEvent.POISONED)
        ref.error = error
        parts, ref.parts = ref.parts, {}
        return parts

    def add_part(self, oid: str, worker: str, nbytes: int) -> None:
        """Notes that `worker` holds its part; the object stays pending until `complete`."""
        ref = self[oid]
        if ref.state is not ObjectState.PENDING:
            raise IllegalTransitionError(f"object {oid} is {ref.state.value}, a part came from {worker}: {_story(ref)}")
        ref.parts[worker] = nbytes

    def complete(self, oid: str) -> None:
        """All parts are there."""
        self._move(self[oid], ObjectEvent.COMPUTED)

    def lose(self, oid: str) -> None:
        """The object has to be computed again; the parts that survive are of no use."""
        ref = self[oid]
        self._move(ref, ObjectEvent.LOST if ref.state is not ObjectState.RELEASED else ObjectEvent.WANTED)
        ref.parts.clear()

    def outlive(self, oid: str) -> None:
        """Its execution is over: from now on it is needed by others alone."""
        ref = self[oid]
        ref.needed_by = {key for key in ref.needed_by if "/" in key}

    def need(self, oid: str, consumer: str) -> None:
        """`consumer` will (again) read the object."""
        self[oid].needed_by.add(consumer)

    def consumed(self, oid: str, consumer: str) -> None:
        """`consumer` has finished and does not need the object any more."""
        self[oid].needed_by.discard(consumer)

    def release(self, oid: str) -> dict[str, int]:
        """Marks the object freed; returns the bytes that each worker can free."""
        ref = self[oid]
        self._move(ref, ObjectEvent.RELEASED)
        parts, ref.parts = ref.parts, {}
        return parts

    def forget(self, oid: str) -> None:
        """Drops the entry: its execution is over and nobody keeps it."""
        ref = self._objects.pop(oid, None)
        if ref is not None and oid in self._outputs.get(ref.owner, ()):
            del self._outputs[ref.owner][oid]
            if not self._outputs[ref.owner]:
                del self._outputs[ref.owner]

    def held_on(self, worker: str) -> int:
        """Bytes of objects that a worker holds. For status: walks all objects."""
        return sum(ref.parts.get(worker, 0) for ref in self._objects.values())

    def _move(self, ref: ObjectRef, event: ObjectEvent) -> None:
        target = TRANSITIONS[ref.state].get(event)
        if target is None:
            raise IllegalTransitionError(
                f"object {ref.object_id} is {ref.state.value}, cannot be {event.value}: {_story(ref)}"
            )
        ref.history.append(f"{ref.state.value} → {target.value} ({event.value})")
        ref.state = target


def _story(ref: ObjectRef) -> str:
    return "; ".join(ref.history) or "no history"
