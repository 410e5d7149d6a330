"""How slices travel from one source: a gRPC stream of chunks, shared memory that the source writes to, or this worker's own exposures.

Owns the receiving end of `Data.PullSlices` and `Data.WriteSlices`. Must not know why a slice is asked of this source. Called by the transfer, in threads.
A chunk is verified and written to its place once; memory in flight is a few chunks a source.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from waypath.proto import channel as channels
from waypath.proto import data_pb2 as pb
from waypath.proto.errors import NotFoundError, TransferError, WaypathError, from_rpc_error
from waypath.proto.wire import chunks, decode, fill
from waypath.workers.exposed import ExposureTable
from waypath.workers.segments import Segment

PULL_SLICES = "/waypath.v1.Data/PullSlices"
WRITE_SLICES = "/waypath.v1.Data/WriteSlices"

HostArray = np.ndarray[Any, Any]
Place = tuple[Segment, int]
"""Where a part goes in shared memory: offset in the segment's file."""


@dataclass
class Part:
    """One slice to fetch: its box, where it goes, who had it first, and whether it is complete."""

    tensor: str
    lower: tuple[int, ...]
    upper: tuple[int, ...]
    target: HostArray
    holder: str
    done: bool = False

    def __str__(self) -> str:
        box = ", ".join(f"{a}:{b}" for a, b in zip(self.lower, self.upper, strict=True))
        return f"{self.tensor}[{box}]"


class Stop:
    """Cancels the calls of a pull, now and later ones; with `above`, also when that is set. `heard`: when the last bytes came."""

    def __init__(self, above: Stop | None = None) -> None:
        self.reason = ""
        self.heard = time.monotonic()
        self._lock = threading.Lock()
        self._stopped = False
        self._above = above
        self._cancels: list[Callable[[], Any]] = []

    @contextlib.contextmanager
    def cancels(self, cancel: Callable[[], Any]) -> Iterator[None]:
        """While the block runs, `set` calls `cancel`; at once where it was set before."""
        with contextlib.ExitStack() as stack:
            if self._above is not None:
                stack.enter_context(self._above.cancels(cancel))
            with self._lock:
                self._cancels.append(cancel)
                stopped = self._stopped
            if stopped:
                cancel()
            try:
                yield
            finally:
                with self._lock:
                    self._cancels.remove(cancel)

    def set(self, reason: str = "") -> None:
        """Cancels what runs, and what will."""
        with self._lock:
            self._stopped, self.reason = True, reason or self.reason
            cancels = list(self._cancels)
        for cancel in cancels:
            cancel()


@dataclass
class Pull:
    """What all sources of one `pull_slices` share. `deadline` in seconds of `time.monotonic()`."""

    name: str
    puller: str
    metadata: Any
    deadline: float
    landed: Callable[[str, tuple[int, ...], tuple[int, ...]], None]
    of_object: bool = False
    stop: Stop = field(default_factory=Stop)

    def complete(self, part: Part) -> None:
        """A part has all its bytes."""
        part.done = True
        self.landed(part.tensor, part.lower, part.upper)


class NotSharedError(TransferError):
    """The source cannot write to this process's memory; nothing was sent."""


def receive(pull: Pull, source: str, address: str, parts: Sequence[Part], relayed: bool, stop: Stop) -> int:
    """Fetches parts from `source` on a stream; returns the payload bytes. TransferError names the part that failed."""
    request = _request(pull, parts, relayed)
    cursor = _Cursor(parts, pull.complete)
    try:
        with channels.channel(address) as channel:
            stream = channel.unary_stream(PULL_SLICES, pb.SlicesRequest.SerializeToString, None)
            timeout_s = max(0.1, pull.deadline - time.monotonic())
            messages = stream(request, timeout=timeout_s, metadata=pull.metadata)
            with stop.cancels(messages.cancel):
                for message in messages:
                    stop.heard = time.monotonic()
                    cursor.take(*decode(message))
        cursor.finish()
    except grpc.RpcError as error:
        cause: WaypathError = from_rpc_error(error, f"pull from {source} at {address}")
        if stop.reason:
            cause = TransferError(stop.reason)
        raise failed(pull.name, cursor.part, source, cause) from error
    except WaypathError as error:
        raise failed(pull.name, cursor.part, source, error) from error
    return cursor.received


def have_written(
    pull: Pull, source: str, address: str, parts: Sequence[Part], relayed: bool, stop: Stop, places: Sequence[Place]
) -> int:
    """Lets `source` write parts to their places in one segment of this process; returns the payload bytes.

    NotSharedError where it cannot reach the segment, TransferError naming the part at which it ended. The segment is tainted unless
    the source has said that all is done.
    """
    segment = places[0][0]
    opened, done = False, 0
    target = pb.Segment(pid=segment.pid, fd=segment.fd, nonce=segment.nonce, bytes=segment.size)
    request = pb.WriteRequest(wanted=_request(pull, parts, relayed), segment=target)
    for part, (_, offset) in zip(parts, places, strict=True):
        request.targets.add(dtype=part.target.dtype.name, offset=offset, strides=part.target.strides)
    segment.writer_begins()
    try:
        with channels.channel(address) as channel:
            call = channel.unary_stream(WRITE_SLICES, pb.WriteRequest.SerializeToString, pb.Written.FromString)
            messages = call(request, timeout=max(0.1, pull.deadline - time.monotonic()), metadata=pull.metadata)
            with stop.cancels(messages.cancel):
                for message in messages:
                    stop.heard, opened = time.monotonic(), True
                    for part in parts[done : message.slices]:
                        pull.complete(part)
                    done = max(done, message.slices)
        if done < len(parts):
            raise TransferError("the source ended before this slice was written")
    except grpc.RpcError as error:
        cause: WaypathError = from_rpc_error(error, f"{source} at {address} writes")
        if stop.reason:
            cause = TransferError(stop.reason)
        elif not opened and isinstance(cause, NotFoundError):
            segment.writer_is_done()
            raise NotSharedError(str(cause)) from error
        raise failed(pull.name, parts[min(done, len(parts) - 1)], source, cause) from error
    except TransferError as error:
        raise failed(pull.name, parts[done], source, error) from error
    segment.writer_is_done()
    return sum(part.target.nbytes for part in parts)


def _request(pull: Pull, parts: Sequence[Part], relayed: bool) -> pb.SlicesRequest:
    request = pb.SlicesRequest(name=pull.name, puller=pull.puller, object=pull.of_object, relayed=relayed)
    for part in parts:
        request.slices.add(tensor=part.tensor, lower=part.lower, upper=part.upper)
    return request


def take_own(pull: Pull, parts: Sequence[Part], exposures: ExposureTable) -> int:
    """Copies parts that this worker exposes itself, as they arrive."""
    received = 0
    with exposures.reading(pull.name, pull.puller) as exposure:
        for part in parts:
            exposed = exposure.tensors.get(part.tensor)
            view = None if exposed is None else exposed.find(part.lower, part.upper)
            if view is None:
                raise TransferError(f"{pull.name}: {part} is not held by this worker, {pull.puller}")
            if exposure.arrivals is not None:
                arrival = exposure.arrivals.arrival(part.tensor, part.lower, part.upper)
                with pull.stop.cancels(arrival.cancel):
                    try:
                        arrival.result(max(0.0, pull.deadline - time.monotonic()))
                    except (TimeoutError, concurrent.futures.CancelledError):
                        raise TransferError(f"{pull.name}: {part} did not arrive in time") from None
            with exposure.using():
                for offset, data in chunks(view):
                    fill(part.target, offset, data)
            received += view.nbytes
            pull.complete(part)
    return received


def failed(name: str, part: Part, source: str, cause: WaypathError) -> TransferError:
    """The error of a part that did not come."""
    return TransferError(
        f"{name}: {part} from {source}: {type(cause).__name__}: {cause}",
        remote_traceback=cause.remote_traceback,
    )


class _Cursor:
    """Where one stream stands: chunks come in the order of the request, without gaps."""

    def __init__(self, parts: Sequence[Part], complete: Callable[[Part], None]) -> None:
        self._parts = parts
        self._complete = complete
        self._index = 0
        self._offset = 0
        self.received = 0
        self._skip_full()

    @property
    def part(self) -> Part:
        """The slice that is being filled."""
        return self._parts[min(self._index, len(self._parts) - 1)]

    def take(self, index: int, offset: int, data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        """Write one chunk. TransferError if it is not the next one."""
        if (index, offset) != (self._index, self._offset):
            raise TransferError(
                f"expected slice {self._index} at byte {self._offset}, found slice {index} at byte {offset}"
            )
        fill(self.part.target, offset, data)
        self._offset += len(data)
        self.received += len(data)
        self._skip_full()

    def finish(self) -> None:
        """The stream has ended. TransferError if something is missing."""
        if self._index < len(self._parts):
            missing = self.part.target.nbytes - self._offset
            raise TransferError(f"the stream ended {missing} bytes before the end of this slice")

    def _skip_full(self) -> None:
        while self._index < len(self._parts) and self._offset == self.part.target.nbytes:
            self._complete(self.part)
            self._index, self._offset = self._index + 1, 0
