"""The data service of one worker: peers pull its objects and slices of its exposed tensors.

Owns the gRPC server of the data road; how slices are read is `slice_server`. Must not know programs, services or
jax. Called by `main`; reads the store. Every RPC needs the cluster token (`proto.channel`).

`Pull` is a long poll: an object that is not here yet is sent when it is, in whatever order objects become
ready. An object that failed or was released ends the stream with an error whose `where` is the object's id;
the puller asks again for the others. `StreamSlices`, `WriteSlices` and, for clients, `PullSlices` send boxes in the order
of the request and hold the exposure open meanwhile; of an object on devices they send copies. `Push` takes what a client hands in.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NoReturn

import google_crc32c
import grpc

from waypath.proto import channel as channels
from waypath.proto import codecs
from waypath.proto import data_pb2 as pb
from waypath.proto.errors import LocalError, ProtocolError, TransferError, WaypathError, trailer
from waypath.proto.names import object_id
from waypath.workers.exposed import ExposedTensor, Exposure
from waypath.workers.mailbox import Mailbox
from waypath.workers.puller import received_objects
from waypath.workers.slice_server import SliceServer
from waypath.workers.store import ObjectStore

__all__ = ["DataServer", "Expose"]

SERVICE = "waypath.v1.Data"
Expose = Callable[[Any], Awaitable[Mapping[str, ExposedTensor]]]
"""Copies the arrays of a held object to host memory."""
MAX_OBJECTS_PER_PULL = 10_000


class DataServer:
    """Serves `store`. Start it on the network loop; `address` is known after `start`."""

    def __init__(
        self, store: ObjectStore, token: str, mailbox: Mailbox | None = None, expose: Expose | None = None
    ) -> None:
        self._store = store
        self._mailbox = mailbox or Mailbox()
        self._expose = expose
        self._server = channels.aio_server(token)
        self.address = ""
        self.slices = SliceServer()
        self._sent_bytes = 0  # of objects
        handlers = {
            "Pull": grpc.unary_stream_rpc_method_handler(
                self._pull,
                request_deserializer=pb.PullRequest.FromString,
                response_serializer=pb.PullChunk.SerializeToString,
            ),
            # The frames are SliceChunk messages, encoded by `wire`.
            "PullSlices": grpc.unary_stream_rpc_method_handler(
                self._pull_slices, request_deserializer=pb.SlicesRequest.FromString
            ),
            "StreamSlices": grpc.unary_stream_rpc_method_handler(
                self._stream_slices,
                request_deserializer=pb.SlicesRequest.FromString,
                response_serializer=pb.Streamed.SerializeToString,
            ),
            "WriteSlices": grpc.unary_stream_rpc_method_handler(
                self._write_slices,
                request_deserializer=pb.WriteRequest.FromString,
                response_serializer=pb.Written.SerializeToString,
            ),
            "Push": grpc.stream_unary_rpc_method_handler(
                self._push,
                request_deserializer=pb.PullChunk.FromString,
                response_serializer=pb.PushReply.SerializeToString,
            ),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    @property
    def egress_bytes(self) -> int:
        """Payload bytes sent since the start."""
        return self._sent_bytes + self.slices.egress_bytes

    async def start(self, address: str = "127.0.0.1:0") -> str:
        """Listen on `address` (host:port, port 0 for a free one); returns host:port. ConfigError if it
        cannot.
        """
        port = channels.bind(self._server, address)
        await self._server.start()
        host = address.rpartition(":")[0]
        self.address = f"{host}:{port}"
        self.slices.connections.listen_on(host.strip("[]"))
        return self.address

    async def stop(self, grace_s: float = 0.0) -> None:
        """End the streams, after `grace_s` at the latest."""
        await self._server.stop(grace_s)
        await self.slices.connections.close()

    async def _pull(self, request: pb.PullRequest, context: Any) -> AsyncIterator[pb.PullChunk]:
        if len(request.objects) > MAX_OBJECTS_PER_PULL:
            await _abort(
                context,
                ProtocolError(f"{len(request.objects)} objects asked for at once", where=request.puller),
            )
        waits = {
            asyncio.ensure_future(self._store.wait(object_id(o.execution_id, o.node_id))): o for o in request.objects
        }
        pending = set(waits)
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                # What is ready is sent before what failed ends the stream.
                for wait in sorted(done, key=lambda w: w.exception() is not None):
                    name = waits[wait]
                    failure = wait.exception()
                    if failure is not None:
                        await _abort(context, _about(name, failure))
                    bundle = wait.result()
                    try:
                        header = codecs.header(bundle)
                    except Exception as error:  # what cannot travel is this object's error, not the stream's
                        await _abort(context, _about(name, error))
                    yield pb.PullChunk(header=pb.ObjectHeader(object=name, bundle=header, payload_bytes=bundle.nbytes))
                    for data in codecs.payload(bundle):
                        yield pb.PullChunk(payload=pb.Payload(data=data, crc32c=google_crc32c.value(data)))
                        self._sent_bytes += len(data)
        finally:
            for wait in waits:
                wait.cancel()

    async def _pull_slices(self, request: pb.SlicesRequest, context: Any) -> AsyncIterator[bytes]:
        try:
            async with self._exposure(request) as exposure:
                async with contextlib.aclosing(self.slices.frames(exposure, request.slices)) as frames:
                    async for frame in frames:
                        yield frame
        except WaypathError as error:
            await _abort(context, error)

    async def _stream_slices(self, request: pb.SlicesRequest, context: Any) -> AsyncIterator[pb.Streamed]:
        try:
            async with self._exposure(request) as exposure:
                async with contextlib.aclosing(self.slices.stream(exposure, request.slices)) as told:
                    async for message in told:
                        yield message
        except WaypathError as error:
            await _abort(context, error)

    async def _write_slices(self, request: pb.WriteRequest, context: Any) -> AsyncIterator[pb.Written]:
        try:
            async with self._exposure(request.wanted) as exposure:
                async with contextlib.aclosing(self.slices.write(exposure, request)) as written:
                    async for message in written:
                        yield message
        except WaypathError as error:
            await _abort(context, error)

    @contextlib.asynccontextmanager
    async def _exposure(self, request: pb.SlicesRequest) -> AsyncIterator[Exposure]:
        """What is exposed under the name, held open; of an object, as soon as it is here, the host's copy of its arrays."""
        if not request.object:
            if request.relayed:
                await self._store.exposures.appears(request.name)
            with self._store.exposures.reading(request.name, request.puller) as exposure:
                yield exposure
            return
        held = await self._store.wait(request.name)
        if self._expose is None:
            raise TransferError(f"{request.name}: this worker holds no arrays on devices")
        try:
            found = await self._expose(held)
        except WaypathError:
            raise
        except Exception as error:  # whatever a computation that failed raises when it is read
            raise TransferError(f"{request.name}: {type(error).__name__}: {error}") from error
        yield Exposure(request.name, found)

    async def _push(self, messages: AsyncIterator[pb.PullChunk], context: Any) -> pb.PushReply:
        try:
            async with contextlib.aclosing(received_objects(messages)) as objects:
                async for name, bundle in objects:
                    self._mailbox.deliver(name, bundle)
        except WaypathError as error:
            await _abort(context, error)
        return pb.PushReply()


def _about(name: pb.ObjectId, failure: BaseException) -> WaypathError:
    """The failure as it is told to a puller: same class, with the object's id as its place."""
    where = object_id(name.execution_id, name.node_id)
    if isinstance(failure, WaypathError):
        cls = type(failure)
        return cls(failure.message, remedy=failure.remedy, where=where, remote_traceback=failure.remote_traceback)
    return LocalError(f"{type(failure).__name__}: {failure}", where=where)


async def _abort(context: Any, error: WaypathError) -> NoReturn:
    with contextlib.suppress(UnicodeError):
        context.set_trailing_metadata(trailer(error))
    await context.abort(error.status, str(error)[:2000])
    raise AssertionError("abort returned")
