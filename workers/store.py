"""The objects and exposed tensors that one worker holds.

Owns: bundles by object id with their byte count, and tombstones of what was released or failed. Must not know gRPC, programs
or jax. Called by the runtime (put, fail, release) and the data server (wait). `exposures` is the table of exposed tensors.

Safe to use from every thread. An object goes through `absent → ready → released` or `absent → failed →
released`; who waits for an absent object is woken by the first change. A tombstone remembers why an object is
gone, so that a late reader gets an error and not an endless wait; the oldest tombstones are forgotten when
there are too many.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

from waypath.proto.errors import LocalError, NotFoundError, WaypathError
from waypath.workers.exposed import ExposureTable

__all__ = ["Held", "ObjectStore"]

MAX_TOMBSTONES = 20_000


class Held(Protocol):
    """What can be held: a Bundle, or arrays on devices (`workers.functions.arrays.DeviceObject`)."""

    @property
    def nbytes(self) -> int:
        """Bytes held here."""
        ...


class ObjectStore:
    """Bundles by object id, and (`exposures`) exposed tensors by name."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._objects: dict[str, Held] = {}
        self._of: dict[str, set[str]] = {}  # execution → its objects that are here or waited for
        self._gone: OrderedDict[str, WaypathError] = OrderedDict()
        self._waiters: dict[str, list[concurrent.futures.Future[Any]]] = {}
        self.exposures = ExposureTable()
        self._bytes = 0

    @property
    def nbytes(self) -> int:
        """Payload bytes of the objects held now (exposed tensors are views and do not count)."""
        with self._changed:
            return self._bytes

    def __len__(self) -> int:
        with self._changed:
            return len(self._objects)

    def put(self, name: str, bundle: Held) -> None:
        """Keep `bundle` as object `name` and wake who waits for it.

        An object that was released or failed meanwhile stays gone. LocalError if one of that name is held.
        """
        with self._changed:
            if name in self._objects:
                raise LocalError(f"object {name} is already held")
            if name in self._gone:
                return
            self._objects[name] = bundle
            self._note(name)
            self._bytes += bundle.nbytes
            waiters = self._waiters.pop(name, [])
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(bundle)

    def get(self, name: str) -> Any:
        """The object. Raises the error of a failed one, NotFoundError for a released or unknown one."""
        with self._changed:
            if name in self._objects:
                return self._objects[name]
            raise self._gone.get(name) or NotFoundError(f"object {name} is not on this worker")

    def find(self, name: str) -> Any | None:
        """The object, or None where it is not here (yet, or any more)."""
        with self._changed:
            return self._objects.get(name)

    async def wait(self, name: str) -> Any:
        """The object, as soon as it is here. Raises the error of one that failed or was released."""
        waiter: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._changed:
            if name in self._objects:
                return self._objects[name]
            if name in self._gone:
                raise self._gone[name]
            self._waiters.setdefault(name, []).append(waiter)
            self._note(name)
        try:
            return await asyncio.wrap_future(waiter)
        finally:
            with self._changed:
                left = [w for w in self._waiters.get(name, []) if w is not waiter]
                if left:
                    self._waiters[name] = left
                else:
                    self._waiters.pop(name, None)
                    self._forget(name)

    def fail(self, name: str, error: WaypathError) -> None:
        """Say that object `name` will never be here: present and later readers get `error`."""
        with self._changed:
            if name not in self._objects:
                waiters = self._bury(name, error)
            else:
                raise LocalError(f"object {name} is held and cannot fail")
        _refuse(waiters, error)

    def release(self, name: str, why: str = "released") -> int:
        """Forget an object and return the bytes freed. Later readers get NotFoundError, and so do those
        waiting.
        """
        error = NotFoundError(f"object {name} was {why}")
        with self._changed:
            held = self._objects.pop(name, None)
            freed = 0 if held is None else held.nbytes
            self._bytes -= freed
            waiters = self._bury(name, error)
        _refuse(waiters, error)
        return freed

    def reopen(self, name: str) -> None:
        """Make room for another attempt at an object: one that is held, and a tombstone, are forgotten.

        Who waits for it goes on waiting.
        """
        with self._changed:
            self._gone.pop(name, None)
            held = self._objects.pop(name, None)
            self._bytes -= 0 if held is None else held.nbytes
            self._forget(name)

    def release_execution(self, execution_id: str, why: str = "released", kept: Sequence[str] = ()) -> int:
        """Release every object of an execution but the names in `kept` and refuse those waiting for one; returns the bytes
        freed.
        """
        with self._changed:
            names = set(self._of.get(execution_id, ())).difference(f"{execution_id}/{name}" for name in kept)
        return sum(self.release(name, why) for name in names)

    def names(self) -> list[str]:
        """Ids of the objects held now, sorted."""
        with self._changed:
            return sorted(self._objects)

    def _bury(self, name: str, error: WaypathError) -> list[concurrent.futures.Future[Any]]:
        self._gone[name] = error
        self._gone.move_to_end(name)
        while len(self._gone) > MAX_TOMBSTONES:
            self._gone.popitem(last=False)
        waiters = self._waiters.pop(name, [])
        self._forget(name)
        return waiters

    def _note(self, name: str) -> None:
        self._of.setdefault(name.rpartition("/")[0], set()).add(name)

    def _forget(self, name: str) -> None:
        """Drops a name that is neither held nor waited for from its execution's."""
        if name in self._objects or name in self._waiters:
            return
        execution_id = name.rpartition("/")[0]
        names = self._of.get(execution_id)
        if names is not None:
            names.discard(name)
            if not names:
                del self._of[execution_id]


def _refuse(waiters: list[concurrent.futures.Future[Any]], error: WaypathError) -> None:
    for waiter in waiters:
        if waiter.set_running_or_notify_cancel():
            waiter.set_exception(error)
