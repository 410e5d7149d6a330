"""The frames between a reward pool and its children: JSON objects behind a 4-byte little-endian length.

Owns the byte format and its bounds. Must not know what the messages mean or how the pipes are made. Used by
both ends of a pipe, so it does no I/O.
"""

from __future__ import annotations

import json
import struct
from typing import Any

from waypath.proto.errors import ProtocolError

__all__ = ["MAX_FRAME_BYTES", "FrameParser", "pack"]

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")


def pack(message: dict[str, Any]) -> bytes:
    """The frame of a message. ProtocolError over MAX_FRAME_BYTES; ValueError for a NaN or an infinity."""
    body = json.dumps(message, allow_nan=False, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"reward frame of {len(body)} bytes; at most {MAX_FRAME_BYTES} are allowed")
    return _LENGTH.pack(len(body)) + body


class FrameParser:
    """Bytes in, whole messages out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that `data` completes. ProtocolError for a frame too long or not a JSON object."""
        self._buffer += data
        messages: list[dict[str, Any]] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"reward frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            try:
                message = json.loads(body)
            except ValueError as error:
                raise ProtocolError(f"reward frame is not JSON: {error}") from error
            if not isinstance(message, dict):
                raise ProtocolError(f"reward frame is a JSON {type(message).__name__}; expected an object")
            messages.append(message)
        return messages
