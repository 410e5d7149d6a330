"""Fetching objects from the workers that hold them.

Owns the receiving side of `Data.Pull`: one stream per batch of objects and peer, redialled until the objects
are here or nobody wants them any more. Must not know programs or services. Called by `executions`, which asks
for each object once and says how long to wait. Network loop only.

Theory of operation. `fetch` returns a future at once. Objects asked for in the same turn of the loop and from
the same worker travel on one stream, in whatever order they become ready there. A stream that breaks (the
peer died, or is not up yet) is dialled again after a pause or as soon as the peer table changes; the
controller decides whether the object will come from elsewhere, and the caller then cancels this future and
asks there. An object that the peer says it will never have, or that arrives damaged, fails its own future only; what would
fail again in the same way (a message beyond the limits, an error of this code) fails all futures of its stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import google_crc32c
import grpc

from waypath.proto import channel as channels
from waypath.proto import codecs
from waypath.proto import data_pb2 as pb
from waypath.proto.codecs import Bundle
from waypath.proto.errors import ProtocolError, UnavailableError, WaypathError, from_rpc_error
from waypath.proto.names import object_id
from waypath.workers.peers import Peers

__all__ = ["PULL", "Fetch", "ObjectPuller", "received_objects"]

PULL = "/waypath.v1.Data/Pull"
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0

log = logging.getLogger("waypath.worker")


@dataclass(eq=False)
class Fetch:
    """One object on its way. `future` gives the bundle; `trouble` is the last failed try."""

    execution_id: str
    node_id: str
    source: str
    future: asyncio.Future[Bundle]
    since: float = field(default_factory=time.monotonic)
    trouble: WaypathError | None = None

    @property
    def object_id(self) -> str:
        """The store's name of the object."""
        return object_id(self.execution_id, self.node_id)

    def describe(self) -> str:
        """Who was asked, since when, and what went wrong last."""
        text = f"{self.node_id} on {self.source}, asked for {time.monotonic() - self.since:.1f} s ago"
        return text if self.trouble is None else f"{text}, last: {self.trouble}"


class ObjectPuller:
    """Fetches objects from peers."""

    def __init__(self, worker: str, token: str, peers: Peers) -> None:
        self._worker = worker
        self._metadata = channels.metadata(token)
        self._peers = peers
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._new: dict[str, list[Fetch]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def fetch(self, execution_id: str, node_id: str, source: str) -> Fetch:
        """Start to fetch an object from worker `source`. Cancel its future to give up."""
        loop = asyncio.get_running_loop()
        fetch = Fetch(execution_id, node_id, source, loop.create_future())
        if source not in self._new:
            loop.call_soon(self._flush, source)
        self._new.setdefault(source, []).append(fetch)
        return fetch

    async def close(self) -> None:
        """End all streams."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in self._channels.values():
            await channel.close(None)
        self._channels.clear()

    def _flush(self, source: str) -> None:
        fetches = self._new.pop(source)
        task = asyncio.get_running_loop().create_task(self._pull(source, fetches))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        left = len(fetches)

        def one_done(_: asyncio.Future[Bundle]) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                task.cancel()  # nobody waits for anything on this stream any more

        for fetch in fetches:
            fetch.future.add_done_callback(one_done)

    async def _pull(self, source: str, fetches: list[Fetch]) -> None:
        pause = FIRST_PAUSE_S
        while wanted := [fetch for fetch in fetches if not fetch.future.done()]:
            try:
                await self._stream(source, wanted)
                error: WaypathError = UnavailableError(f"{source} ended the stream early")
            except WaypathError as failed:
                error = failed
            except Exception as raised:  # nobody awaits this task: whoever waits for the objects has to hear of it
                error = ProtocolError(f"pull from {source}: {type(raised).__name__}: {raised}")
                log.exception("pull from %s", source)
            refused = [fetch for fetch in wanted if fetch.object_id == error.where] or (
                wanted if isinstance(error, ProtocolError) else []
            )
            for fetch in refused:
                if not fetch.future.done():
                    fetch.future.set_exception(error)
            if refused:
                pause = FIRST_PAUSE_S
                continue
            for fetch in wanted:
                fetch.trouble = error
            log.debug("pull from %s: %s", source, error)
            await self._peers.changed(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _stream(self, source: str, wanted: list[Fetch]) -> None:
        address = self._peers.address(source)
        request = pb.PullRequest(puller=self._worker)
        by_name: dict[str, Fetch] = {}
        for fetch in wanted:
            request.objects.add(execution_id=fetch.execution_id, node_id=fetch.node_id)
            by_name[fetch.object_id] = fetch
        call = self._channel(address).unary_stream(PULL, pb.PullRequest.SerializeToString, pb.PullChunk.FromString)
        messages = call(request, metadata=self._metadata)
        try:
            async with contextlib.aclosing(received_objects(messages)) as objects:
                async for name, bundle in objects:
                    fetch_of = by_name.get(name)
                    if fetch_of is None:
                        raise ProtocolError(f"{source} sent object {name}, which was not asked for")
                    if not fetch_of.future.done():
                        fetch_of.future.set_result(bundle)
        except grpc.RpcError as error:
            if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise ProtocolError(f"pull from {source} at {address}: {error.details()}") from error
            raise from_rpc_error(error, f"pull from {source} at {address}") from error
        finally:
            messages.cancel()

    def _channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = channels.aio_channel(address)
        return channel


async def received_objects(messages: Any) -> AsyncGenerator[tuple[str, Bundle], None]:
    """Rebuild objects from a stream of chunks: a header, then its payload in one piece."""
    header: pb.ObjectHeader | None = None
    parts: list[bytes] = []
    missing, name = 0, ""
    async for message in messages:
        if message.WhichOneof("kind") == "header":
            if missing:
                raise ProtocolError(f"an object's header came {missing} bytes before the end", where=name)
            header, parts, missing = message.header, [], message.header.payload_bytes
            name = object_id(header.object.execution_id, header.object.node_id)
            if not 0 <= missing <= codecs.MAX_BUNDLE_BYTES:
                raise ProtocolError(f"{missing} bytes; at most {codecs.MAX_BUNDLE_BYTES} may travel", where=name)
        else:
            data = message.payload.data
            if header is None or not 0 < len(data) <= missing:
                raise ProtocolError(f"{len(data)} payload bytes where {missing} are missing", where=name)
            if google_crc32c.value(data) != message.payload.crc32c:
                raise ProtocolError("a chunk does not match its CRC32C", where=name)
            parts.append(data)
            missing -= len(data)
        if header is not None and not missing:
            try:
                bundle = codecs.decode(header.bundle, parts)
            except ProtocolError as error:
                raise ProtocolError(error.message, where=name) from error
            yield name, bundle
            header, parts = None, []
