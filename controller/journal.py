"""The journal: an append-only file of JSON records, each on disk before its effect is visible.

    file   = MAGIC record*
    record = length u32 | CRC32C of the length u32 | CRC32C of the payload u32 | payload        (little endian)

The payload is a JSON object in UTF-8. The length has a checksum of its own, because a damaged length would otherwise make
everything behind it look like a record that was never finished.

A crash can leave the last record unfinished: short, zero-filled, or with bytes missing at its end. Such a *torn tail* was
never acknowledged; readers leave it out and `Journal` cuts it off. Damage anywhere else is an error that names the offset.

`encode` and `scan` are the format, without I/O. `Journal` and `read_journal` are the file. Must not know what records mean.
Called by the run manager and the controller's entry point.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c

from waypath.proto.codecs import dump_json, load_json
from waypath.proto.errors import JournalError, ProtocolError

MAGIC = b"WPJRNL1\n"
HEADER = struct.Struct("<III")
LENGTH = struct.Struct("<I")
MAX_RECORD_BYTES = 16 << 20


@dataclass(frozen=True)
class Scan:
    """What `scan` found: the entries, where the last whole one ends, and the bytes of a torn tail behind it."""

    entries: tuple[dict[str, Any], ...]
    end: int
    torn_bytes: int


def encode(entry: Mapping[str, Any]) -> bytes:
    """Returns the record of `entry`; raises JournalError where it is not JSON or over `MAX_RECORD_BYTES`."""
    try:
        payload = dump_json(dict(entry)).encode()
    except (TypeError, ValueError) as error:
        raise JournalError(f"entry {sorted(map(str, entry))} is not JSON: {error}") from None
    if len(payload) > MAX_RECORD_BYTES:
        raise JournalError(f"entry of {len(payload)} bytes, at most {MAX_RECORD_BYTES} fit a record")
    length = LENGTH.pack(len(payload))
    return HEADER.pack(len(payload), google_crc32c.value(length), google_crc32c.value(payload)) + payload


def scan(data: bytes, name: str = "journal") -> Scan:
    """Reads all of a journal's bytes. Raises JournalError naming the offset of damage that is not a torn tail."""
    if len(data) < len(MAGIC):
        if not MAGIC.startswith(data):
            raise JournalError(f"{name}: not a journal: expected it to begin with {MAGIC!r}, found {data!r}")
        return Scan((), 0, len(data))
    if not data.startswith(MAGIC):
        raise JournalError(f"{name}: not a journal: expected it to begin with {MAGIC!r}, found {data[:8]!r}")
    entries: list[dict[str, Any]] = []
    offset = len(MAGIC)
    while offset < len(data):
        payload = _payload(data, offset, name)
        if payload is None:
            break
        try:
            entries.append(load_json(payload.decode()))
        except (UnicodeDecodeError, ProtocolError) as error:
            raise JournalError(f"{name}: record at offset {offset}: {error}") from None
        offset += HEADER.size + len(payload)
    return Scan(tuple(entries), offset, len(data) - offset)


def _payload(data: bytes, offset: int, name: str) -> bytes | None:
    """Returns the payload of the record at `offset`, None where a torn tail begins there."""
    start = offset + HEADER.size
    if start > len(data):
        return None
    length, length_crc, payload_crc = HEADER.unpack_from(data, offset)
    if google_crc32c.value(LENGTH.pack(length)) != length_crc or length > MAX_RECORD_BYTES:
        if not any(data[offset:]):
            return None
        raise JournalError(
            f"{name}: damaged record header at offset {offset} of {len(data)}",
            remedy="Restore the file from a copy, or cut it at that offset and lose what follows.",
        )
    payload = data[start : start + length]
    if len(payload) < length:
        return None
    if google_crc32c.value(payload) != payload_crc:
        if start + length == len(data) or not any(data[start + length :]):
            return None
        raise JournalError(
            f"{name}: record at offset {offset} of {len(data)} does not match its checksum, and others follow",
            remedy="Restore the file from a copy, or cut it at that offset and lose what follows.",
        )
    return payload


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Returns the entries of a journal, oldest first, leaving out a torn tail. Raises JournalError."""
    try:
        return list(scan(path.read_bytes(), str(path)).entries)
    except OSError as error:
        raise JournalError(f"cannot read {path}: {error}") from None


class Journal:
    """A journal open for appending, by one process at a time. Makes the file and its folder; cuts off a torn tail.

    `entries` holds what was there when it was opened. Raises JournalError where it is damaged, in use or not writable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JournalError(f"cannot open {path}: {error}") from None
        try:
            self.entries = self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> tuple[dict[str, Any], ...]:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise JournalError(f"{self.path} is in use by another process") from None
        found = scan(self.path.read_bytes(), str(self.path))
        self._end = found.end
        try:
            if found.end == 0:
                self._write(MAGIC)
                _sync_folder(self.path.parent)
            elif found.torn_bytes:
                os.ftruncate(self._fd, found.end)
                os.fsync(self._fd)
        except OSError as error:
            raise JournalError(f"cannot write {self.path}: {error}") from None
        return found.entries

    def append(self, entry: Mapping[str, Any]) -> None:
        """Adds a record; it is on disk when this returns. On an error the file is as before. Raises JournalError."""
        if self._fd < 0:
            raise JournalError(f"{self.path} is closed")
        record = encode(entry)
        try:
            self._write(record)
        except OSError as error:
            os.ftruncate(self._fd, self._end)
            raise JournalError(f"cannot write {self.path}: {error}") from None

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        offset = self._end
        while left:
            written = os.pwrite(self._fd, left, offset)
            left, offset = left[written:], offset + written
        os.fsync(self._fd)
        self._end = offset

    def close(self) -> None:
        """Closes the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
