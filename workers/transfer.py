"""Pulling slices of exposed tensors from other workers into host memory.

Owns the receiving side: which worker each slice is asked of, what happens when one fails, and how much arrived. How bytes travel
is `pulls`. Must not know models, versions, plans or jax. Called by services through `ServiceContext.transfer`:
`stats = await transfer.pull_slices("policy/7", copies, write)`.

A source on the same machine writes straight into this process's shared memory, where the destinations lie in it. Others send over TCP.

All sources are read at once, each in a thread of its own: receiving in threads moved 1.5 to 2 times the bytes per second of an
asyncio receiver, and CRC32C and copies of large arrays leave the network loop alone.

A relayed slice is asked of a peer that is still receiving it. If that peer fails, is gone, or gives nothing for
`RELAY_STALL_S`, what is missing is asked of its holder instead: a peer's trouble costs the holder bytes, and nobody time without bound.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from waypath.proto import channel as channels
from waypath.proto.errors import TransferError, WaypathError
from waypath.workers.peers import Peers
from waypath.workers.pulls import NotSharedError, Part, Place, Pull, Road, Stop, failed, have_written, receive, take_own
from waypath.workers.segments import SegmentPool
from waypath.workers.store import ObjectStore

__all__ = ["PullStats", "Transfer", "Write"]

MAX_SOURCES_AT_ONCE = 16
DEFAULT_TIMEOUT_S = 300.0
RELAY_STALL_S = 10.0

HostArray = np.ndarray[Any, Any]
Write = Callable[[str, tuple[int, ...], tuple[int, ...]], HostArray]
Landed = Callable[[str, tuple[int, ...], tuple[int, ...]], None]

log = logging.getLogger("waypath.worker")


@dataclass(frozen=True)
class PullStats:
    """Payload bytes that arrived (not what was asked for), in all and by source, and wall seconds from the first request to
    the last.
    """

    bytes: int
    seconds: float
    by_source: Mapping[str, int] = field(default_factory=dict)


class Transfer:
    """Receives tensor slices. One per worker; pulls may overlap."""

    def __init__(
        self, worker: str, token: str, peers: Peers, store: ObjectStore, host: str = "", pool: SegmentPool | None = None
    ) -> None:
        self._worker = worker
        self._host = host
        self._pool = pool
        self._not_shared: dict[str, str] = {}  # data address → why it cannot write to this process's memory
        self._metadata = channels.metadata(token)
        self._peers = peers
        self._store = store
        self._channels: dict[str, grpc.Channel] = {}
        self._threads = concurrent.futures.ThreadPoolExecutor(MAX_SOURCES_AT_ONCE, "pull-slices")

    async def pull_slices(
        self,
        name: str,
        copies: Iterable[Mapping[str, Any]],
        write: Write,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        of_object: bool = False,
        landed: Landed = lambda *_: None,
    ) -> PullStats:
        """Fetch boxes of the tensors that other workers expose as `name`; `of_object`: of the object `name`, whose arrays are the
        tensors "0", "1", …, as soon as it is there.

        `copies`: {"tensor", "source" (a worker), "lower", "upper"} each, half-open boxes in the tensor's own axes; and "holder"
        where the source is a peer that receives the box itself. `write(tensor, lower, upper)` is called once per copy, before
        anything is sent, on the calling task; it returns the destination: an array of the box's shape and the exposed dtype, any
        strides. The destinations hold the data when this returns, and part of it when it raises. `landed` is told, on any
        thread, of each box that is complete.

        A copy whose source is this worker is read from its own store and counted likewise. TransferError
        names the first tensor, box and source that failed; the other streams are then cancelled and have
        ended.
        """
        by_source: dict[tuple[str, bool], list[Part]] = {}
        for copy in copies:
            lower, upper = tuple(map(int, copy["lower"])), tuple(map(int, copy["upper"]))
            source = str(copy["source"])
            holder = str(copy.get("holder") or source)
            part = Part(copy["tensor"], lower, upper, write(copy["tensor"], lower, upper), holder)
            expected = tuple(b - a for a, b in zip(lower, upper, strict=True))
            if not isinstance(part.target, np.ndarray) or part.target.shape != expected:
                raise TransferError(f"{name}: {part} goes to {type(part.target).__name__} {list(part.target.shape)}")
            by_source.setdefault((source, holder != source), []).append(part)
        pull = Pull(name, self._worker, self._metadata, time.monotonic() + timeout_s, landed, of_object)
        started = time.perf_counter()
        tasks = [
            asyncio.ensure_future(self._take(pull, source, relayed, parts))
            for (source, relayed), parts in by_source.items()
        ]
        try:
            received: Counter[str] = sum(await asyncio.gather(*tasks), Counter())
        finally:
            pull.stop.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(
                *tasks, return_exceptions=True
            )  # nobody may write to the destinations after this returns
        return PullStats(received.total(), time.perf_counter() - started, dict(received))

    def close(self) -> None:
        """Take no more pulls; those that run are cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    async def _take(self, pull: Pull, source: str, relayed: bool, parts: Sequence[Part]) -> Counter[str]:
        """Parts from one source, and what it cannot give from the holders; returns bytes by who gave them."""
        try:
            return Counter({source: await self._once(pull, source, relayed, parts)})
        except WaypathError as error:
            if not relayed:
                raise
            missing = [part for part in parts if not part.done]
            log.warning(
                "%s: %d slices from %s come from their holders instead: %s", pull.name, len(missing), source, error
            )
        received = Counter({source: sum(part.target.nbytes for part in parts if part.done)})
        by_holder: dict[str, list[Part]] = {}
        for part in missing:
            by_holder.setdefault(part.holder, []).append(part)
        for holder, those in by_holder.items():
            received[holder] += await self._once(pull, holder, False, those)
        return received

    async def _once(self, pull: Pull, source: str, relayed: bool, parts: Sequence[Part]) -> int:
        """Parts from one source, through shared memory if it can; returns the bytes.

        The thread that writes them has ended when this returns or raises.
        """
        try:
            return await self._try(pull, source, relayed, parts)
        except NotSharedError as error:
            self._not_shared[self._peers.address(source)] = str(error)
            log.warning("%s is on this machine but sends over TCP: %s", source, error)
            return await self._try(pull, source, relayed, parts)

    async def _try(self, pull: Pull, source: str, relayed: bool, parts: Sequence[Part]) -> int:
        stop = Stop(pull.stop)
        if source == self._worker and not pull.of_object:
            future = self._threads.submit(take_own, pull, parts, self._store.exposures)
        else:
            road = self._road(pull, source, parts[0])
            places = self._places(source, parts, pull.of_object)
            if places:
                future = self._threads.submit(have_written, pull, source, road, parts, relayed, stop, places)
            else:
                future = self._threads.submit(receive, pull, source, road, parts, relayed, stop)
        waited = asyncio.wrap_future(future)
        try:
            while not (await asyncio.wait([waited], timeout=RELAY_STALL_S / 4 if relayed else None))[0]:
                if time.monotonic() - stop.heard > RELAY_STALL_S:
                    stop.set(f"nothing came for {RELAY_STALL_S:g} s")
            return await waited
        finally:
            if not future.done():
                stop.set()
                await asyncio.shield(asyncio.wait([asyncio.wrap_future(future)]))

    def _places(self, source: str, parts: Sequence[Part], of_object: bool) -> list[Place]:
        """Where in one segment of this process the parts go, if `source` may write to it; else nothing."""
        if self._pool is None or of_object or not self._host or self._peers.host(source) != self._host:
            return []
        if self._peers.address(source) in self._not_shared:
            return []
        places = [self._pool.locate(part.target) for part in parts]
        found = [place for place in places if place is not None and place[0] is (places[0] or (None,))[0]]
        return found if len(found) == len(parts) else []

    def path(self, source: str) -> str:
        """How bytes come from a worker, and why."""
        if source == self._worker:
            return "own memory"
        if self._pool is None:
            return "stream: shared memory is off"
        if not self._host or self._peers.host(source) != self._host:
            return "stream: on another machine"
        why = self._not_shared.get(self._peers.address(source))
        return "shared" if why is None else f"stream: {why}"

    def _road(self, pull: Pull, source: str, part: Part) -> Road:
        """Channels stay open from one pull to the next; those to workers that are gone are closed."""
        try:
            address = self._peers.address(source)
        except WaypathError as error:
            raise failed(pull.name, part, source, error) from error
        if address not in self._channels:
            for gone in self._channels.keys() - self._peers.addresses:
                self._channels.pop(gone).close()
            self._channels[address] = channels.channel(address)
        return address, self._channels[address]
