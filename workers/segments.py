"""Memory that a peer on this machine can write to: segments without a name in a file system, and the peer's view of them.

Owns where an engine's buffers lie (shared memory, or the heap), and the mappings of peers' segments. Must not know tensors, versions
or gRPC. Called by engines (allocate), the transfer (locate) and the data server (open).

Theory of operation. A segment is an unnamed file (O_TMPFILE) in `directory`, mapped by its owner; a peer opens it through
/proc/<pid>/fd/<fd> and maps it too. No name, so nothing is left behind by whatever end of the process, and the memory is freed
with its last mapping. Its first page holds a random nonce: a peer in another container, or one that reaches another process by
that number, finds something else there, and the transfer takes another path.

A peer that was told to write and has not said that it is done may still write, at any time later. Such a segment is `tainted`:
what it holds of one version is right (a late write writes the same bytes again), but it must not receive another one.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from waypath.proto.errors import ConfigError, NotFoundError, TransferError

__all__ = ["Buffer", "Heap", "Mappings", "Memory", "Segment", "SegmentPool"]

ALIGNMENT_BYTES = 64
HEADER_BYTES = 4096
NONCE_BYTES = 16
MAPPED_A_PEER = 4
"""Segments of one peer that stay mapped: the two sets of its weights, and a spare while one is replaced."""

HostArray = np.ndarray[Any, Any]
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

log = logging.getLogger("waypath.worker")


@dataclass(eq=False)
class Buffer:
    """Uninitialised bytes, aligned to 64."""

    array: Bytes
    _writers: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def tainted(self) -> bool:
        """Whether a peer may still write to them."""
        return self._writers > 0

    def writer_begins(self) -> None:
        """A peer is told to write."""
        with self._lock:
            self._writers += 1

    def writer_is_done(self) -> None:
        """A peer has said that it will not write any more, or never began."""
        with self._lock:
            self._writers -= 1


@dataclass(eq=False)
class Segment(Buffer):
    """A buffer in shared memory: what a peer needs to open it."""

    pid: int = 0
    fd: int = -1
    nonce: bytes = b""
    size: int = 0  # of the file, with its header


class Memory(Protocol):
    """Where buffers come from."""

    def allocate(self, nbytes: int) -> Buffer:
        """Returns a new buffer."""
        ...

    def free(self, buffer: Buffer) -> None:
        """The owner needs a buffer no more; arrays over it stay valid."""
        ...


class Heap:
    """Buffers of this process alone."""

    def allocate(self, nbytes: int) -> Buffer:
        """Returns a new buffer."""
        raw = np.empty(nbytes + ALIGNMENT_BYTES, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT_BYTES
        return Buffer(raw[start : start + nbytes])

    def free(self, buffer: Buffer) -> None:
        """Nothing to do."""


class SegmentPool:
    """Buffers in shared memory; with `required` False, on the heap where the folder has no room."""

    def __init__(self, directory: Path, required: bool = False) -> None:
        self._directory = directory
        self._required = required
        self._lock = threading.Lock()
        self._segments: list[Segment] = []

    def allocate(self, nbytes: int) -> Buffer:
        """Returns a new buffer, whose memory is reserved before anything is written.

        ConfigError where it cannot be had and segments are required; else a warning, and a buffer on the heap.
        """
        size = HEADER_BYTES + max(1, nbytes)
        try:
            segment = self._segment(size, nbytes)
        except OSError as error:
            message = f"cannot reserve {size:,} bytes of shared memory in {self._directory}: {_reason(error, self._directory)}"
            if self._required:
                remedy = (
                    'Give it more room, name another folder (cluster.shm_dir), or set cluster.transfer_path = "stream"'
                )
                raise ConfigError(message, remedy=remedy) from None
            log.warning("%s; peers will send over TCP", message)
            return Heap().allocate(nbytes)
        with self._lock:
            self._segments.append(segment)
        return segment

    def free(self, buffer: Buffer) -> None:
        """Forgets a segment; its memory goes when no array is over it any more."""
        with self._lock:
            if isinstance(buffer, Segment) and buffer in self._segments:
                self._segments.remove(buffer)
                os.close(buffer.fd)

    def locate(self, array: HostArray) -> tuple[Segment, int] | None:
        """The segment that holds an array, and the array's offset in its file; None where it lies elsewhere."""
        at = array.ctypes.data
        with self._lock:
            for segment in self._segments:
                first = segment.array.ctypes.data
                if first <= at < first + max(1, segment.array.nbytes):
                    return segment, HEADER_BYTES + at - first
        return None

    def _segment(self, size: int, nbytes: int) -> Segment:
        if not hasattr(os, "O_TMPFILE"):
            raise OSError(errno.ENOTSUP, "this system has no unnamed files")
        fd = os.open(self._directory, os.O_TMPFILE | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
            mapped = mmap.mmap(fd, size)
        except BaseException:
            os.close(fd)
            raise
        nonce = secrets.token_bytes(NONCE_BYTES)
        mapped[:NONCE_BYTES] = nonce
        array = np.frombuffer(mapped, np.uint8, nbytes, HEADER_BYTES)
        return Segment(array, pid=os.getpid(), fd=fd, nonce=nonce, size=size)


class Mappings:
    """Peers' segments, mapped into this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped: OrderedDict[tuple[str, bytes], Bytes] = OrderedDict()

    def open(self, peer: str, pid: int, fd: int, nonce: bytes, size: int) -> Bytes:
        """The whole file of a peer's segment, writable. NotFoundError where it cannot be reached from here."""
        with self._lock:
            found = self._mapped.get((peer, nonce))
            if found is None:
                found = self._mapped[peer, nonce] = self._map(pid, fd, nonce, size)
                mine = [key for key in self._mapped if key[0] == peer]
                for key in mine[:-MAPPED_A_PEER]:
                    del self._mapped[key]
            return found

    def forget(self, peer: str) -> None:
        """A peer is gone: the memory of its segments may be freed."""
        with self._lock:
            for key in [key for key in self._mapped if key[0] == peer]:
                del self._mapped[key]

    @staticmethod
    def _map(pid: int, fd: int, nonce: bytes, size: int) -> Bytes:
        path = f"/proc/{int(pid)}/fd/{int(fd)}"
        try:
            opened = os.open(path, os.O_RDWR)
            try:
                if os.fstat(opened).st_size != size or len(nonce) != NONCE_BYTES:
                    raise NotFoundError(f"{path} is not the segment that was meant")
                mapped = mmap.mmap(opened, size)
            finally:
                os.close(opened)
        except (OSError, ValueError) as error:
            raise NotFoundError(f"cannot open the shared segment {path}: {error}") from None
        if mapped[:NONCE_BYTES] != nonce:
            raise NotFoundError(f"{path} is not the segment that was meant")
        return np.frombuffer(mapped, np.uint8)


def window(mapped: Bytes, dtype: np.dtype[Any], shape: Sequence[int], offset: int, strides: Sequence[int]) -> HostArray:
    """An array in a mapped segment. TransferError where it would reach outside of it, or into the header."""
    if len(shape) != len(strides) or any(stride < 0 for stride in strides) or any(n < 0 for n in shape):
        raise TransferError(f"shape {list(shape)} with strides {list(strides)} is no array in a segment")
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + dtype.itemsize
    if 0 not in shape and not HEADER_BYTES <= offset < last <= len(mapped):
        raise TransferError(f"bytes {offset} to {last} do not lie in a segment of {len(mapped)} bytes")
    if 0 in shape:
        return np.empty(shape, dtype)
    return np.ndarray(tuple(shape), dtype, mapped.data, offset, tuple(strides))


def _reason(error: OSError, directory: Path) -> str:
    if error.errno != errno.ENOSPC:
        return str(error)
    room = os.statvfs(directory)
    return f"{room.f_bavail * room.f_frsize:,} bytes are free"
