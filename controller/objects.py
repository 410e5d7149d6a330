"""The object directory: which worker holds which object, who still needs it, and whom it belongs to.

An object is `pending` until every worker of its node has its part, then `held`; it is `released` when the last consumer
has finished. A lost object that is still needed goes back to `pending` and is computed again. Consumers are counted by
name, so that a consumer that runs twice counts once.

Must not know: nodes' methods, placement, messages. Called by the scheduler, which turns releases into commands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from waypath.proto.errors import IllegalTransitionError, NotFoundError

HISTORY = 64


class ObjectState(Enum):
    """Where an object is in its life."""

    PENDING = "pending"
    HELD = "held"
    RELEASED = "released"


class ObjectEvent(Enum):
    """What happens to an object."""

    COMPUTED = "computed"
    LOST = "lost"
    RELEASED = "released"
    WANTED = "wanted again"


TRANSITIONS: dict[ObjectState, dict[ObjectEvent, ObjectState]] = {
    ObjectState.PENDING: {
        ObjectEvent.COMPUTED: ObjectState.HELD,
        ObjectEvent.LOST: ObjectState.PENDING,
        ObjectEvent.RELEASED: ObjectState.RELEASED,
    },
    ObjectState.HELD: {ObjectEvent.LOST: ObjectState.PENDING, ObjectEvent.RELEASED: ObjectState.RELEASED},
    ObjectState.RELEASED: {ObjectEvent.WANTED: ObjectState.PENDING},
}
"""A missing entry is the error."""


@dataclass
class ObjectRef:
    """What the controller knows of one object. `parts`: bytes held, by worker."""

    object_id: str
    owner: str
    needed_by: set[str]
    parts: dict[str, int] = field(default_factory=dict)
    state: ObjectState = ObjectState.PENDING
    history: deque[str] = field(default_factory=lambda: deque(maxlen=HISTORY))

    @property
    def nbytes(self) -> int:
        """Bytes held on all workers together."""
        return sum(self.parts.values())


class ObjectDirectory:
    """All objects of running executions."""

    def __init__(self) -> None:
        self._objects: dict[str, ObjectRef] = {}

    def __len__(self) -> int:
        return len(self._objects)

    def __getitem__(self, oid: str) -> ObjectRef:
        """Raises NotFoundError on an object that never was or is forgotten."""
        try:
            return self._objects[oid]
        except KeyError:
            raise NotFoundError(f"no object {oid!r}") from None

    def create(self, oid: str, owner: str, needed_by: Iterable[str]) -> ObjectRef:
        """Adds a pending object that the consumers `needed_by` will read."""
        if oid in self._objects:
            raise IllegalTransitionError(f"object {oid} exists already", where=_story(self._objects[oid]))
        ref = self._objects[oid] = ObjectRef(oid, owner, set(needed_by))
        return ref

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
        """Drops the entry: its execution is over."""
        self._objects.pop(oid, None)

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
