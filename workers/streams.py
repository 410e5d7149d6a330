"""Boxes of tensors on a TCP connection, straight from and into arrays of any strides.

Owns the frames. Must not know gRPC, names of tensors or who asks. Called in threads by the slice server (`Sender`) and the pull (`Receiver`).

Both ends cut a box alike (`pieces`), so a frame is a header of eight bytes, little-endian CRC32C and length, and the bytes of the
next piece. A piece is 1 MiB at most: it is gathered, summed up and handed to the kernel while it is in the processor's cache, and so
on the other side, so that each byte is read from and written to memory once. Back-pressure is TCP's own. A receive ends when bytes come or
the connection does: whoever has the deadline shuts it down.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import google_crc32c
import numpy as np

from waypath.proto.errors import TransferError

__all__ = ["PIECE_BYTES", "Receiver", "Sender", "pieces", "set_timeout"]

PIECE_BYTES = 1 << 20
SEND_WAIT_S = 0.2
"""A send into a full connection gives the exposure's memory back after this time."""

HostArray = np.ndarray[Any, Any]
_HEADER = struct.Struct("<II")


def pieces(shape: Sequence[int], itemsize: int, limit: int = PIECE_BYTES) -> Iterator[tuple[Any, ...]]:
    """Indices of the sub-boxes that a box is sent as, in row-major order: whole rows of at most `limit` bytes, or parts of one.

    An empty box has none; a scalar has one, ().
    """
    if 0 in shape:
        return
    if not shape:
        yield ()
        return
    row = itemsize
    for size in shape[1:]:
        row *= size
    if row > limit:
        for k in range(shape[0]):
            for rest in pieces(shape[1:], itemsize, limit):
                yield (k, *rest)
        return
    rows = limit // row
    for start in range(0, shape[0], rows):
        yield (slice(start, min(start + rows, shape[0])),)


class Sender:
    """The sending end of one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._scratch = np.empty(PIECE_BYTES, np.uint8)
        set_timeout(connection, socket.SO_SNDTIMEO, SEND_WAIT_S)

    def send(self, view: HostArray, using: Callable[[], AbstractContextManager[None]]) -> None:
        """Sends a box. `using` is held while its memory is read, for `SEND_WAIT_S` at a time; it raises where that must end.

        OSError when the connection is gone.
        """
        for index in pieces(view.shape, view.itemsize):
            with using():
                data = _read_only(self._gathered(view[(*index, ...)]))
                header = _HEADER.pack(google_crc32c.value(data), len(data))
                sent = _send_some(self._connection, [header, data.data])
            while sent < len(header) + len(data):
                with using():
                    rest = [header[sent:], data.data] if sent < len(header) else [data.data[sent - len(header) :]]
                    sent += _send_some(self._connection, rest)

    def _gathered(self, part: HostArray) -> HostArray:
        if part.flags.c_contiguous:
            return _bytes(part)
        data = self._scratch[: part.nbytes]
        np.copyto(data.view(part.dtype).reshape(part.shape), part)
        return data


def _send_some(connection: socket.socket, buffers: Sequence[Any]) -> int:
    """Bytes that were sent before the connection's timeout."""
    try:
        return connection.sendmsg(buffers)
    except BlockingIOError:
        return 0


class Receiver:
    """The receiving end of one connection. `heard` is called when bytes came."""

    def __init__(self, connection: socket.socket, heard: Callable[[], None]) -> None:
        self._connection = connection
        self._heard = heard
        self._scratch = np.empty(PIECE_BYTES, np.uint8)
        self._header = bytearray(_HEADER.size)

    def fill(self, target: HostArray) -> None:
        """Receives a box. TransferError where it is damaged or of other size, EOFError or OSError where the connection ends."""
        for index in pieces(target.shape, target.itemsize):
            part = target[(*index, ...)]
            direct = part.flags.c_contiguous
            data = _bytes(part) if direct else self._scratch[: part.nbytes]
            self._receive(data)
            crc, size = _HEADER.unpack(self._header)
            found = google_crc32c.value(_read_only(data))
            if size != len(data):
                raise TransferError(f"a piece of {len(data)} bytes was expected, one of {size} came")
            if found != crc:
                raise TransferError(f"damaged on the way: CRC32C {found:08x}, its header says {crc:08x}")
            if not direct:
                np.copyto(part, data.view(part.dtype).reshape(part.shape))

    def _receive(self, data: HostArray) -> None:
        """The next header and as many bytes as `data` has."""
        done, whole = 0, len(self._header) + len(data)
        while done < whole:
            if done < len(self._header):
                into = [memoryview(self._header)[done:], data.data]
            else:
                into = [data.data[done - len(self._header) :]]
            got = self._connection.recvmsg_into(into, 0, socket.MSG_WAITALL)[0]
            if not got:
                raise EOFError("the connection has ended")
            done += got
            self._heard()


def set_timeout(connection: socket.socket, which: int, seconds: float) -> None:
    """Bounds one send or receive in the kernel, for a connection that blocks."""
    whole = int(seconds)
    connection.setsockopt(socket.SOL_SOCKET, which, struct.pack("@ll", whole, int((seconds - whole) * 1e6)))


def _bytes(array: HostArray) -> HostArray:
    return array.reshape(-1).view(np.uint8)


def _read_only(data: HostArray) -> HostArray:
    view = data[:]
    view.flags.writeable = False
    return view
