"""Pulling slices of exposed tensors from other workers into host memory.

Owns the receiving side of `Data.PullSlices`. Must not know models, versions, plans or jax. Called by services
through `ServiceContext.transfer`: `stats = await transfer.pull_slices("policy/7", copies, write)`.

One blocking gRPC stream per source runs in a thread of its own, all at once: receiving in threads moved 1.5
to 2 times the bytes per second of an asyncio receiver, and CRC32C and copies of large arrays leave the
network loop alone. A chunk is verified and written to its place once; memory in flight is a few chunks a
source.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from waypath.proto import channel as channels
from waypath.proto import data_pb2 as pb
from waypath.proto.errors import TransferError, WaypathError, from_rpc_error
from waypath.proto.wire import chunks, decode, fill
from waypath.workers.peers import Peers
from waypath.workers.store import ObjectStore

__all__ = ["PULL_SLICES", "PullStats", "Transfer", "Write"]

PULL_SLICES = "/waypath.v1.Data/PullSlices"
MAX_SOURCES_AT_ONCE = 16
DEFAULT_TIMEOUT_S = 300.0

HostArray = np.ndarray[Any, Any]
Write = Callable[[str, tuple[int, ...], tuple[int, ...]], HostArray]


@dataclass(frozen=True)
class PullStats:
    """Payload bytes that arrived (not what was asked for) and wall seconds from the first request to the
    last.
    """

    bytes: int
    seconds: float


@dataclass(frozen=True)
class _Part:
    """One slice to fetch: its box, and where it goes."""

    tensor: str
    lower: tuple[int, ...]
    upper: tuple[int, ...]
    target: HostArray

    def __str__(self) -> str:
        box = ", ".join(f"{a}:{b}" for a, b in zip(self.lower, self.upper, strict=True))
        return f"{self.tensor}[{box}]"


class Transfer:
    """Receives tensor slices. One per worker; pulls may overlap."""

    def __init__(self, worker: str, token: str, peers: Peers, store: ObjectStore) -> None:
        self._worker = worker
        self._metadata = channels.metadata(token)
        self._peers = peers
        self._store = store
        self._threads = concurrent.futures.ThreadPoolExecutor(MAX_SOURCES_AT_ONCE, "pull-slices")

    async def pull_slices(
        self,
        name: str,
        copies: Iterable[Mapping[str, Any]],
        write: Write,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        of_object: bool = False,
    ) -> PullStats:
        """Fetch boxes of the tensors that other workers expose as `name`; `of_object`: of the object `name`, whose arrays are the
        tensors "0", "1", …, as soon as it is there.

        `copies`: {"tensor", "source" (a worker), "lower", "upper"} each, half-open boxes in the tensor's own
        axes. `write(tensor, lower, upper)` is called once per copy, before anything is sent, on the calling
        task; it returns the destination: an array of the box's shape and the exposed dtype, any strides. The
        destinations hold the data when this returns, and part of it when it raises.

        A copy whose source is this worker is read from its own store and counted likewise. TransferError
        names the first tensor, box and source that failed; the other streams are then cancelled and have
        ended.
        """
        by_source: dict[str, list[_Part]] = {}
        for copy in copies:
            lower, upper = tuple(map(int, copy["lower"])), tuple(map(int, copy["upper"]))
            part = _Part(copy["tensor"], lower, upper, write(copy["tensor"], lower, upper))
            expected = tuple(b - a for a, b in zip(lower, upper, strict=True))
            if not isinstance(part.target, np.ndarray) or part.target.shape != expected:
                raise TransferError(f"{name}: {part} goes to {type(part.target).__name__} {list(part.target.shape)}")
            by_source.setdefault(str(copy["source"]), []).append(part)
        addresses = {source: self._address(name, source, parts[0], of_object) for source, parts in by_source.items()}
        started = time.perf_counter()
        stop = _Stop()
        deadline = time.monotonic() + timeout_s
        pulls = [
            self._threads.submit(self._copy, name, parts)
            if source == self._worker and not of_object
            else self._threads.submit(self._receive, name, source, addresses[source], parts, deadline, stop, of_object)
            for source, parts in by_source.items()
        ]
        try:
            received = await asyncio.gather(*map(asyncio.wrap_future, pulls))
        finally:
            stop.set()
            if not all(pull.done() for pull in pulls):  # nobody may write to the destinations after this returns
                await asyncio.to_thread(concurrent.futures.wait, pulls)
        return PullStats(sum(received), time.perf_counter() - started)

    def close(self) -> None:
        """Take no more pulls; streams that run are left to their deadline."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _address(self, name: str, source: str, part: _Part, of_object: bool) -> str:
        if source == self._worker and not of_object:
            return ""
        try:
            return self._peers.address(source)
        except WaypathError as error:
            raise _failed(name, part, source, error) from error

    def _copy(self, name: str, parts: Sequence[_Part]) -> int:
        received = 0
        with self._store.reading(name, self._worker) as tensors:
            for part in parts:
                exposed = tensors.get(part.tensor)
                view = None if exposed is None else exposed.find(part.lower, part.upper)
                if view is None:
                    raise TransferError(f"{name}: {part} is not held by this worker, {self._worker}")
                for offset, data in chunks(view):
                    fill(part.target, offset, data)
                received += view.nbytes
        return received

    def _receive(
        self,
        name: str,
        source: str,
        address: str,
        parts: Sequence[_Part],
        deadline: float,
        stop: _Stop,
        of_object: bool,
    ) -> int:
        request = pb.SlicesRequest(name=name, puller=self._worker, object=of_object)
        for part in parts:
            request.slices.add(tensor=part.tensor, lower=part.lower, upper=part.upper)
        cursor = _Cursor(parts)
        try:
            with channels.channel(address) as channel:
                stream = channel.unary_stream(PULL_SLICES, pb.SlicesRequest.SerializeToString, None)
                messages = stream(request, timeout=max(0.1, deadline - time.monotonic()), metadata=self._metadata)
                with stop.cancels(messages):
                    for message in messages:
                        cursor.take(*decode(message))
            cursor.finish()
        except grpc.RpcError as error:
            cause = from_rpc_error(error, f"pull from {source} at {address}")
            raise _failed(name, cursor.part, source, cause) from error
        except WaypathError as error:
            raise _failed(name, cursor.part, source, error) from error
        return cursor.received


class _Cursor:
    """Where one stream stands: chunks come in the order of the request, without gaps."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts = parts
        self._index = 0
        self._offset = 0
        self.received = 0

    @property
    def part(self) -> _Part:
        """The slice that is being filled."""
        return self._parts[min(self._index, len(self._parts) - 1)]

    def take(self, index: int, offset: int, data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        """Write one chunk. TransferError if it is not the next one."""
        self._skip_full()
        if (index, offset) != (self._index, self._offset):
            raise TransferError(
                f"expected slice {self._index} at byte {self._offset}, found slice {index} at byte {offset}"
            )
        fill(self.part.target, offset, data)
        self._offset += len(data)
        self.received += len(data)

    def finish(self) -> None:
        """The stream has ended. TransferError if something is missing."""
        self._skip_full()
        if self._index < len(self._parts):
            missing = self.part.target.nbytes - self._offset
            raise TransferError(f"the stream ended {missing} bytes before the end of this slice")

    def _skip_full(self) -> None:
        while self._index < len(self._parts) and self._offset == self.part.target.nbytes:
            self._index, self._offset = self._index + 1, 0


class _Stop:
    """Cancels the streams of one pull, now and later ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stopped = False
        self._calls: list[Any] = []

    @contextlib.contextmanager
    def cancels(self, call: Any) -> Iterator[None]:
        """While the block runs, `set` cancels `call`; at once where it was set before."""
        with self._lock:
            self._calls.append(call)
            stopped = self._stopped
        if stopped:
            call.cancel()
        try:
            yield
        finally:
            with self._lock:
                self._calls.remove(call)

    def set(self) -> None:
        with self._lock:
            self._stopped = True
            calls = list(self._calls)
        for call in calls:
            call.cancel()


def _failed(name: str, part: _Part, source: str, cause: WaypathError) -> TransferError:
    return TransferError(
        f"{name}: {part} from {source}: {type(cause).__name__}: {cause}",
        remote_traceback=cause.remote_traceback,
    )
