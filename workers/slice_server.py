"""Sending slices of exposed tensors: on a stream, or straight into the shared memory of a peer on this machine.

Owns how an exposure is read for a peer, and the count of payload bytes sent. Must not know services, programs or jax. Called by
the data server, which answers for authentication and errors. Both ways send boxes in the order of the request, wait for those that
are still arriving here, and touch the exposure's memory only inside `Exposure.using`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np

from waypath.proto import codecs
from waypath.proto import data_pb2 as pb
from waypath.proto.errors import ProtocolError, TransferError
from waypath.proto.wire import chunks, encode
from waypath.workers.exposed import ExposedTensor, Exposure
from waypath.workers.segments import Mappings, window

__all__ = ["SliceServer"]

BATCH_BYTES = 32 << 20
"""A peer is told of slices that were written at least this often, and may relay them from then on."""

HostArray = np.ndarray[Any, Any]


class SliceServer:
    """Reads exposures for peers."""

    def __init__(self) -> None:
        self.mappings = Mappings()
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

    async def write(self, exposure: Exposure, request: pb.WriteRequest) -> AsyncGenerator[pb.Written]:
        """Copies slices into a peer's segment; says how many are there. NotFoundError where the segment cannot be reached."""
        wanted, segment = request.wanted.slices, request.segment
        if len(wanted) != len(request.targets):
            raise ProtocolError(f"{len(wanted)} slices, {len(request.targets)} targets")
        mapped = self.mappings.open(request.wanted.puller, segment.pid, segment.fd, bytes(segment.nonce), segment.bytes)
        yield pb.Written(slices=0)
        batch: list[tuple[HostArray, HostArray]] = []
        size = done = 0
        for slice_, target in zip(wanted, request.targets, strict=True):
            arriving = _arrival(exposure, slice_)
            if batch and arriving is not None and not arriving.done():  # tell of what is there before waiting
                await asyncio.to_thread(_copy, exposure, batch)
                yield self._written(done, size)
                batch, size = [], 0
            view = await _arrived(exposure, slice_)
            dtype = codecs.dtype_of(target.dtype)
            if view.dtype != dtype:
                raise TransferError(
                    f"{exposure.name}: {slice_.tensor} is {view.dtype.name}, a target of {dtype.name} was given"
                )
            batch.append((window(mapped, dtype, view.shape, target.offset, target.strides), view))
            size += view.nbytes
            done += 1
            if size >= BATCH_BYTES:
                await asyncio.to_thread(_copy, exposure, batch)
                yield self._written(done, size)
                batch, size = [], 0
        if batch:
            await asyncio.to_thread(_copy, exposure, batch)
            yield self._written(done, size)

    def _written(self, done: int, size: int) -> pb.Written:
        self.egress_bytes += size
        return pb.Written(slices=done)


def _copy(exposure: Exposure, batch: Sequence[tuple[HostArray, HostArray]]) -> None:
    with exposure.using():
        for target, view in batch:
            np.copyto(target, view)


def _view(exposure: Exposure, wanted: pb.Slice) -> HostArray:
    exposed = exposure.tensors.get(wanted.tensor)
    if exposed is None:
        raise TransferError(f"{exposure.name} has no tensor {wanted.tensor}")
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
