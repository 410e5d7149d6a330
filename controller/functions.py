"""The functions that clients uploaded: bytes by digest, handed on to workers that ask.

They are texts of programs (StableHLO), not tensors; a large constant in one is a mistake that the limit makes plain. Must not
know jax or what the bytes mean. Called by the client and the worker service.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator

from waypath.proto.errors import GraphError, NotFoundError

MAX_FUNCTION_BYTES = 64 << 20
MAX_STORED_BYTES = 1 << 30
CHUNK_BYTES = 1 << 20


class FunctionStore:
    """Holds at most `MAX_STORED_BYTES`; the functions that were asked for longest ago go first."""

    def __init__(self) -> None:
        self._functions: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._functions

    def check_size(self, digest: str, nbytes: int) -> None:
        """Raises GraphError over `MAX_FUNCTION_BYTES`, before all of it has come."""
        if nbytes > MAX_FUNCTION_BYTES:
            raise GraphError(
                f"function {digest[:12]}: more than {MAX_FUNCTION_BYTES:,} bytes",
                remedy="Pass large arrays as arguments: a constant that the function closes over is part of its text",
            )

    def add(self, digest: str, data: bytes) -> None:
        """Keeps a function. Raises GraphError where the bytes are not what the digest says, or too many."""
        self.check_size(digest, len(data))
        found = hashlib.sha256(data).hexdigest()
        if found != digest:
            raise GraphError(f"the {len(data):,} bytes uploaded have SHA-256 {found}, expected {digest}")
        if digest not in self._functions:
            self._functions[digest] = data
            self._bytes += len(data)
        while self._bytes > MAX_STORED_BYTES:
            self._bytes -= len(self._functions.popitem(last=False)[1])

    def chunks(self, digest: str) -> Iterator[bytes]:
        """Yields a function's bytes; NotFoundError where there is none of that digest."""
        data = self._functions.get(digest)
        if data is None:
            raise NotFoundError(f"no function with SHA-256 {digest} was uploaded, or not lately")
        self._functions.move_to_end(digest)
        for start in range(0, len(data), CHUNK_BYTES):
            yield data[start : start + CHUNK_BYTES]
