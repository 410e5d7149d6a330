"""The control stream over gRPC.

Owns dialling the controller. Must not know what the messages mean. Made by `main`, used by the runtime
through its `Transport` seam.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from waypath.proto import channel as channels
from waypath.proto import worker_pb2 as pb
from waypath.proto.errors import from_rpc_error
from waypath.proto.worker_pb2_grpc import WorkerStub

__all__ = ["GrpcTransport"]

FETCH_TIMEOUT_S = 120.0


class GrpcTransport:
    """Dials `address` (host:port) anew for each stream."""

    def __init__(self, address: str, token: str) -> None:
        self._address = address
        self._metadata = channels.metadata(token)

    async def attach(self, outgoing: AsyncIterator[pb.WorkerMessage]) -> AsyncIterator[pb.ControllerMessage]:
        """Send `outgoing`, yield what the controller sends; raises WaypathError when the stream breaks."""
        async with channels.aio_channel(self._address) as channel:
            call = WorkerStub(channel).Attach(outgoing, metadata=self._metadata)
            try:
                async for message in call:
                    yield message
            except grpc.RpcError as error:
                raise from_rpc_error(error, f"talk to the controller at {self._address}") from error

    async def fetch_function(self, digest: str) -> AsyncIterator[bytes]:
        """Yield the bytes of an uploaded function; raises the controller's error where it has none of that digest."""
        async with channels.aio_channel(self._address) as channel:
            request = pb.FetchFunctionRequest(digest=digest)
            call = WorkerStub(channel).FetchFunction(request, metadata=self._metadata, timeout=FETCH_TIMEOUT_S)
            try:
                async for chunk in call:
                    yield chunk.data
            except grpc.RpcError as error:
                raise from_rpc_error(error, f"fetch function {digest} at {self._address}") from error
