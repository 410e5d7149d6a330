"""Bytes of tensor boxes: cutting a box into chunks, writing a chunk into a box, and the chunk's frame.

Owns the frame codec of `waypath.v1.SliceChunk` on the fast path. Must not know gRPC, the store or who asks.
Called by the data server (`chunks`, `encode`) and the transfer (`decode`, `fill`).

A frame is a valid protobuf message, built and read by hand: Python protobuf copies the payload twice on
either side, which halves the speed of a transfer. `encode` writes the small fields with protobuf and appends
the payload field; `decode` accepts any order of the four fields and skips unknown ones. Byte ranges count in
row-major order of the box.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import google_crc32c
import numpy as np

from waypath.proto import data_pb2 as pb
from waypath.proto.codecs import CHUNK_BYTES
from waypath.proto.errors import ProtocolError

__all__ = ["chunks", "decode", "encode", "fill"]

HostArray = np.ndarray[Any, Any]
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

_SLICE, _OFFSET, _DATA, _CRC = 0x08, 0x10, 0x1A, 0x25  # field number << 3 | wire type
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


def chunks(view: HostArray, chunk_bytes: int = CHUNK_BYTES, start: int = 0) -> Iterator[tuple[int, Bytes]]:
    """Cut a box into (byte offset, read-only bytes [n]) of at most `chunk_bytes`, whole elements each, in
    order.

    A contiguous box is not copied: the chunks alias it. An empty box has no chunks. Offsets count from
    `start`.
    """
    if view.size == 0:
        return
    if view.flags.c_contiguous:
        flat: Bytes = view.reshape(-1).view(np.uint8)
        step = max(view.itemsize, chunk_bytes - chunk_bytes % view.itemsize)
        for offset in range(0, len(flat), step):
            piece = flat[offset : offset + step]
            piece.flags.writeable = False
            yield start + offset, piece
        return
    row_bytes = view[0].size * view.itemsize
    if row_bytes > chunk_bytes:
        for row in range(len(view)):
            yield from chunks(view[row], chunk_bytes, start + row * row_bytes)
        return
    rows = chunk_bytes // row_bytes
    for row in range(0, len(view), rows):
        copied: Bytes = np.ascontiguousarray(view[row : row + rows]).reshape(-1).view(np.uint8)
        copied.flags.writeable = False
        yield start + row * row_bytes, copied


def fill(box: HostArray, offset: int, data: Bytes) -> None:
    """Write `data` at byte `offset` of a box of any strides. ProtocolError where it does not fit the box."""
    size = box.itemsize
    if offset < 0 or offset % size or len(data) % size or offset + len(data) > box.size * size:
        raise ProtocolError(f"{len(data)} bytes at {offset} do not fit a box of {box.dtype.name}{list(box.shape)}")
    if box.flags.c_contiguous:
        box.reshape(-1).view(np.uint8)[offset : offset + len(data)] = data
    else:
        _fill_rows(box, offset // size, data.view(box.dtype))


def _fill_rows(box: HostArray, start: int, values: HostArray) -> None:
    if box.ndim == 1:
        box[start : start + len(values)] = values
        return
    row_size = box[0].size
    row, skip = divmod(start, row_size)
    if skip:
        head = min(row_size - skip, len(values))
        _fill_rows(box[row], skip, values[:head])
        values, row = values[head:], row + 1
    whole = len(values) // row_size
    if whole:
        box[row : row + whole] = values[: whole * row_size].reshape(whole, *box.shape[1:])
    if len(values) > whole * row_size:
        _fill_rows(box[row + whole], 0, values[whole * row_size :])


def encode(index: int, offset: int, data: Bytes) -> bytes:
    """The SliceChunk message of `data`, read-only bytes at `offset` of slice `index`, with its CRC32C."""
    head = pb.SliceChunk(slice=index, offset=offset, crc32c=google_crc32c.value(data))
    return b"".join((head.SerializeToString(), b"\x1a", _varint(len(data)), data.data))


def decode(message: bytes) -> tuple[int, int, Bytes]:
    """(slice index, byte offset, payload) of a SliceChunk; the payload aliases `message`.

    Raises ProtocolError for a message that does not parse or a payload whose CRC32C differs.
    """
    index = offset = crc = at = 0
    data: Bytes = np.empty(0, np.uint8)
    try:
        while at < len(message):
            tag, at = _read_varint(message, at)
            kind = tag & 7
            if kind == _VARINT:
                value, at = _read_varint(message, at)
                if tag == _SLICE:
                    index = value
                elif tag == _OFFSET:
                    offset = value
            elif kind == _LENGTH:
                size, at = _read_varint(message, at)
                if at + size > len(message):
                    raise IndexError
                if tag == _DATA:
                    data = np.frombuffer(message, np.uint8, size, at)
                at += size
            elif kind in (_FIXED32, _FIXED64):
                size = 4 if kind == _FIXED32 else 8
                if at + size > len(message):
                    raise IndexError
                if tag == _CRC:
                    crc = int.from_bytes(message[at : at + 4], "little")
                at += size
            else:
                raise ProtocolError(f"slice chunk: wire type {kind} at byte {at}")
    except IndexError:
        raise ProtocolError(f"slice chunk of {len(message)} bytes is cut short") from None
    found = google_crc32c.value(data)
    if found != crc:
        raise ProtocolError(f"slice chunk at {offset}: CRC32C {found:08x}, its header says {crc:08x}")
    return index, offset, data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ProtocolError(f"slice chunk: a varint of more than ten bytes at byte {at}")
