"""The inputs of one execution's nodes on this worker: found, fetched once, shared, dropped when read.

Owns: where each producer's parts lie, the one fetch of each, and who still needs it. Must not know lanes,
services or the controller's stream. Called by `executions`. Network loop only.

An input is one list of bundles: a part per worker of the producer, in process order. Its parts are taken from
the local store or fetched from peers. When the controller says that the producer is elsewhere, the fetch
starts again there. A part that is refused (its node failed, or it was released) waits a little for such a
message, because a failed producer may be about to run again, and is an error after that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from waypath.proto.codecs import Bundle
from waypath.proto.errors import NotFoundError, WaypathError
from waypath.proto.names import object_id
from waypath.workers.puller import Fetch, ObjectPuller
from waypath.workers.store import ObjectStore

__all__ = ["Inputs"]

REFUSED_GRACE_S = 2.0


@dataclass(eq=False)
class _Producer:
    """One input node as seen from here."""

    workers: tuple[str, ...] = ()
    object_id: str = ""  # of a parameter: the object that it is bound to
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    readers: set[str] = field(default_factory=set)
    fetches: list[Fetch] = field(default_factory=list)
    task: asyncio.Task[list[Bundle]] | None = None


class Inputs:
    """The inputs of the nodes of one execution on one worker."""

    def __init__(self, execution_id: str, worker: str, store: ObjectStore, puller: ObjectPuller) -> None:
        self._execution_id = execution_id
        self._worker = worker
        self._store = store
        self._puller = puller
        self._producers: dict[str, _Producer] = {}

    def locate(self, node_id: str, workers: tuple[str, ...], bound: str = "") -> None:
        """The parts of `node_id` are, or will be, on `workers` (process order). Replaces what was said
        before. `bound`: it is a parameter, and this is its object.
        """
        producer = self._producers.setdefault(node_id, _Producer())
        producer.object_id = bound or producer.object_id
        if producer.workers != workers:
            producer.workers = workers
            producer.moved.set()
            producer.moved = asyncio.Event()

    def want(self, reader: str, producers: tuple[str, ...]) -> None:
        """`reader` (one attempt at a node) will read these: start to fetch them now."""
        for node_id in dict.fromkeys(producers):
            producer = self._producers.setdefault(node_id, _Producer())
            producer.readers.add(reader)
            if producer.task is None or (producer.task.done() and _failed(producer.task)):
                producer.task = asyncio.get_running_loop().create_task(
                    self._resolve(node_id, producer), name=f"input {self._execution_id}/{node_id}"
                )
                producer.task.add_done_callback(_failed)  # a failure that nobody reads any more is not a warning

    def object_id(self, name: str) -> str:
        """The id of the object that an input is."""
        producer = self._producers.get(name)
        return (producer.object_id if producer is not None else "") or object_id(self._execution_id, name)

    def workers(self, name: str) -> tuple[str, ...]:
        """Who holds an input, in process order."""
        producer = self._producers.get(name)
        return () if producer is None else producer.workers

    def here(self, names: Iterable[str]) -> list[Any] | None:
        """This worker's own parts of these objects, if all are here; waits for none."""
        found = [self._store.find(self.object_id(name)) for name in names]
        return None if any(part is None for part in found) else found

    async def local(self, names: Iterable[str]) -> list[Any]:
        """This worker's own parts of these objects, as soon as they are here; raises the error of one that failed."""
        return [await self._store.wait(self.object_id(name)) for name in names]

    async def local_or_errors(self, names: Iterable[str], given_up: asyncio.Event) -> list[Any]:
        """As `local`; instead of a part that will never be here, the error that says why. Waits no longer than until `given_up`."""
        found: list[Any] = []
        over = asyncio.ensure_future(given_up.wait())
        try:
            for name in names:
                part = asyncio.ensure_future(self._store.wait(self.object_id(name)))
                await asyncio.wait([part, over], return_when=asyncio.FIRST_COMPLETED)
                try:
                    found.append(part.result() if part.done() else NotFoundError(f"{name} is not wanted any more"))
                except WaypathError as error:
                    found.append(error)
                finally:
                    part.cancel()
            return found
        finally:
            over.cancel()

    async def get(self, producers: Iterable[str]) -> list[list[Bundle]]:
        """Per producer, the bundles of its workers; raises the first error that cannot be waited out."""
        tasks = [task for node_id in producers if (task := self._producers[node_id].task) is not None]
        return list(await asyncio.gather(*(asyncio.shield(task) for task in tasks)))

    def missing(self, producers: Iterable[str]) -> list[str]:
        """What is not here yet of these, and where it was asked for."""
        lines = []
        for node_id in dict.fromkeys(producers):
            producer = self._producers.get(node_id)
            if producer is None or producer.task is None or producer.task.done():
                continue
            asked = [fetch.describe() for fetch in producer.fetches if not fetch.future.done()]
            here = [f"{node_id} here"] if self._worker in producer.workers else []
            lines.extend(asked or here or [f"{node_id}, which has no place yet"])
        return lines

    def done(self, reader: str) -> None:
        """`reader` has read or will never read: what nobody else needs is dropped."""
        for producer in self._producers.values():
            producer.readers.discard(reader)
            if not producer.readers and producer.task is not None:
                producer.task.cancel()
                producer.task = None
                producer.fetches = []

    def close(self) -> None:
        """Stop all fetches."""
        for producer in self._producers.values():
            if producer.task is not None:
                producer.task.cancel()

    async def _resolve(self, node_id: str, producer: _Producer) -> list[Bundle]:
        while True:
            moved = asyncio.ensure_future(producer.moved.wait())
            parts = asyncio.ensure_future(self._parts(node_id, producer)) if producer.workers else None
            try:
                await asyncio.wait([w for w in (moved, parts) if w is not None], return_when=asyncio.FIRST_COMPLETED)
                if parts is None or not parts.done():
                    continue
                if parts.exception() is not None:
                    await asyncio.wait([moved], timeout=REFUSED_GRACE_S)
                    if moved.done():
                        continue
                return parts.result()
            finally:
                moved.cancel()
                if parts is not None:
                    parts.cancel()

    async def _parts(self, node_id: str, producer: _Producer) -> list[Bundle]:
        producer.fetches = []
        waits: list[asyncio.Future[Bundle]] = []
        for worker in producer.workers:
            if worker == self._worker:
                waits.append(asyncio.ensure_future(self._store.wait(self.object_id(node_id))))
            else:
                execution_id, _, name = self.object_id(node_id).rpartition("/")
                fetch = self._puller.fetch(execution_id, name, worker)
                producer.fetches.append(fetch)
                waits.append(fetch.future)
        try:
            return list(await asyncio.gather(*waits))
        finally:
            for wait in waits:
                wait.cancel()


def _failed(task: asyncio.Task[list[Bundle]]) -> bool:
    return task.cancelled() or task.exception() is not None
