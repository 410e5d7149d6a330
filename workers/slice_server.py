"""Sending slices of exposed tensors: on a TCP connection, straight into the shared memory of a peer on this machine, or to a client.

Owns how an exposure is read for a peer, and the count of payload bytes sent. Must not know services, programs or jax. Called by
the data server, which answers for authentication and errors. All ways send boxes in the order of the request, wait for those that
are still arriving here, and touch the exposure's memory only inside `Exposure.using`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np

from waypath.proto import data_pb2 as pb
from waypath.proto.errors import ProtocolError, TransferError
from waypath.proto.wire import chunks, encode
from waypath.workers.exposed import ExposedTensor, Exposure
from waypath.workers.segments import Mappings, window
from waypath.workers.streams import Sender
from waypath.workers.tickets import Connections

__all__ = ["SliceServer"]

BATCH_BYTES = 32 << 20
"""A peer is told of slices that were written at least this often, and may relay them from then on."""

HostArray = np.ndarray[Any, Any]


class SliceServer:
    """Reads exposures for peers."""

    def __init__(self) -> None:
        self.mappings = Mappings()
        self.connections = Connections()
        self.egress_bytes = 0

    async def frames(self, exposure: Exposure, wanted: Sequence[pb.Slice]) -> AsyncGenerator[bytes]:
        """SliceChunk messages, each with its CRC32C."""
        for index, slice_ in enumerate(wanted):
            pieces = chunks(await _arrived(exposure, slice_))
            while True:
                with exposure.using():  # encoding copies: what a slow reader has not taken yet needs no memory of ours
                    piece = next(pieces, None)
                    frame = b"" if piece is None else encode(index, *piece)
                if piece is None:
                    break
                yield frame
                self.egress_bytes += len(piece[1])

    async def stream(self, exposure: Exposure, wanted: Sequence[pb.Slice]) -> AsyncGenerator[pb.Streamed]:
        """Says with which ticket to connect, then sends to who does. Nothing is read any more when this has ended."""
        async with self.connections.offer() as offer:
            yield pb.Streamed(ticket=offer.ticket, port=offer.port)
            connection = await offer.connected()
            sender = Sender(connection)
            async for batch in _ready(exposure, wanted):
                await _sent(connection, sender, exposure, batch)
                self.egress_bytes += sum(view.nbytes for view in batch)

    async def write(self, exposure: Exposure, request: pb.WriteRequest) -> AsyncGenerator[pb.Written]:
        """Copies slices into a peer's segment; says how many are there. NotFoundError where the segment cannot be reached."""
        wanted, segment = request.wanted.slices, request.segment
        if len(wanted) != len(request.targets):
            raise ProtocolError(f"{len(wanted)} slices, {len(request.targets)} targets")
        mapped = self.mappings.open(request.wanted.puller, segment.pid, segment.fd, bytes(segment.nonce), segment.bytes)
        yield pb.Written(slices=0)
        done = 0
        async for views in _ready(exposure, wanted):
            targets = request.targets[done : done + len(views)]
            batch = [
                (window(mapped, view.dtype, view.shape, target.offset, target.strides), view)
                for target, view in zip(targets, views, strict=True)
            ]
            await asyncio.to_thread(_copy, exposure, batch)
            done += len(views)
            self.egress_bytes += sum(view.nbytes for view in views)
            yield pb.Written(slices=done)


async def _ready(exposure: Exposure, wanted: Sequence[pb.Slice]) -> AsyncGenerator[list[HostArray]]:
    """The views of slices, in their order, in batches: no batch waits for a slice that has not arrived, or grows far beyond `BATCH_BYTES`."""
    batch: list[HostArray] = []
    for slice_ in wanted:
        view, arriving = _view(exposure, slice_), _arrival(exposure, slice_)
        here = arriving is None or (arriving.done() and arriving.exception() is None)
        if batch and (not here or sum(v.nbytes for v in batch) >= BATCH_BYTES):
            yield batch
            batch = []
        if arriving is not None:
            await asyncio.wrap_future(arriving)
        batch.append(view)
    if batch:
        yield batch


async def _sent(connection: socket.socket, sender: Sender, exposure: Exposure, views: Sequence[HostArray]) -> None:
    """Sends boxes in a thread, which has ended when this returns, or is cancelled."""

    def work() -> None:
        for view in views:
            sender.send(view, exposure.using)

    sending = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(sending)
    except OSError as error:
        raise TransferError(f"{exposure.name}: the puller's connection broke: {error}") from None
    finally:
        if not sending.done():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            await asyncio.wait([sending])


def _copy(exposure: Exposure, batch: Sequence[tuple[HostArray, HostArray]]) -> None:
    with exposure.using():
        for target, view in batch:
            np.copyto(target, view)


def _view(exposure: Exposure, wanted: pb.Slice) -> HostArray:
    exposed = exposure.tensors.get(wanted.tensor)
    if exposed is None:
        raise TransferError(f"{exposure.name} has no tensor {wanted.tensor}")
    if wanted.dtype and wanted.dtype != exposed.dtype:
        raise TransferError(
            f"{exposure.name}: {wanted.tensor} is {exposed.dtype}, a target of {wanted.dtype} was given"
        )
    view = exposed.find(wanted.lower, wanted.upper)
    if view is None:
        raise TransferError(f"{exposure.name}: {_not_held(wanted, exposed)}")
    return view


def _arrival(exposure: Exposure, wanted: pb.Slice) -> Any:
    """A future of the slice's arrival; None where everything is there."""
    if exposure.arrivals is None:
        return None
    return exposure.arrivals.arrival(wanted.tensor, wanted.lower, wanted.upper)


async def _arrived(exposure: Exposure, wanted: pb.Slice) -> HostArray:
    """The view of a slice, as soon as it has arrived; TransferError where the exposure does not have it."""
    view = _view(exposure, wanted)
    arriving = _arrival(exposure, wanted)
    if arriving is not None:
        await asyncio.wrap_future(arriving)
    return view


def _not_held(wanted: pb.Slice, exposed: ExposedTensor) -> str:
    held = [f"{list(lower)} + {list(view.shape)}" for lower, view in exposed.boxes]
    return (
        f"{wanted.tensor}{list(exposed.shape)} from {list(wanted.lower)} to {list(wanted.upper)} does not lie in "
        f"one box held here; boxes (start + shape): {', '.join(held[:8]) or 'none'}"
    )
