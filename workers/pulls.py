"""How slices travel from one source: a TCP connection, shared memory that the source writes to, or this worker's own exposures.

Owns the receiving end of `Data.StreamSlices` and `Data.WriteSlices`. Must not know why a slice is asked of this source. Called by the transfer, in threads.
The gRPC call is the control of either: its deadline, its errors and its cancellation are those of the bytes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from waypath.proto import data_pb2 as pb
from waypath.proto.errors import NotFoundError, TransferError, WaypathError, from_rpc_error
from waypath.proto.wire import chunks, fill
from waypath.workers.exposed import ExposureTable
from waypath.workers.segments import Segment
from waypath.workers.streams import Receiver, set_timeout

STREAM_SLICES = "/waypath.v1.Data/StreamSlices"
WRITE_SLICES = "/waypath.v1.Data/WriteSlices"

CONNECT_S = 5.0
_BROKEN = (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)

HostArray = np.ndarray[Any, Any]
Place = tuple[Segment, int]
"""Where a part goes in shared memory: offset in the segment's file."""
Road = tuple[str, grpc.Channel]
"""A source's data address, and an open channel to it."""


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

    def hear(self) -> None:
        """Bytes came."""
        self.heard = time.monotonic()

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


def receive(pull: Pull, source: str, road: Road, parts: Sequence[Part], relayed: bool, stop: Stop) -> int:
    """Fetches parts from `source` over a TCP connection; returns the payload bytes. TransferError names the part that failed."""
    (address, channel), done = road, 0
    try:
        call = channel.unary_stream(STREAM_SLICES, pb.SlicesRequest.SerializeToString, pb.Streamed.FromString)
        timeout_s = max(0.1, pull.deadline - time.monotonic())
        messages = call(_request(pull, parts, relayed), timeout=timeout_s, metadata=pull.metadata)
        with stop.cancels(messages.cancel):
            with _connected(pull, address, next(iter(messages), pb.Streamed()), messages, stop) as connection:
                receiver = Receiver(connection, stop.hear)
                for part in parts:
                    receiver.fill(part.target)
                    pull.complete(part)
                    done += 1
            for _ in messages:  # where the connection broke, the call says why
                pass
        if done < len(parts):
            raise TransferError("the connection ended before this slice was there")
    except grpc.RpcError as error:
        cause: WaypathError = from_rpc_error(error, f"pull from {source} at {address}")
        if stop.reason:
            cause = TransferError(stop.reason)
        raise failed(pull.name, parts[min(done, len(parts) - 1)], source, cause) from error
    except WaypathError as error:
        raise failed(pull.name, parts[done], source, error) from error
    return sum(part.target.nbytes for part in parts)


@contextlib.contextmanager
def _connected(pull: Pull, address: str, offer: pb.Streamed, call: Any, stop: Stop) -> Iterator[socket.socket]:
    """The connection that a source offers. The block ends early where that breaks, or its call, or `stop` is set.

    TransferError where there is none to be had.
    """
    host = address.rpartition(":")[0].strip("[]")
    try:
        opened = socket.create_connection((host, offer.port), CONNECT_S)
    except OSError as error:
        raise TransferError(f"no connection to {host}:{offer.port}: {error}") from error
    with opened as connection, contextlib.suppress(OSError, EOFError):
        connection.settimeout(None)
        set_timeout(connection, socket.SO_RCVTIMEO, max(0.1, pull.deadline - time.monotonic()))

        def end() -> None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

        def call_ended() -> None:  # a source that ended it has closed its side behind the last bytes
            if call.code() in _BROKEN:
                end()

        if not call.add_callback(call_ended):
            call_ended()
        with stop.cancels(end):
            connection.sendall(offer.ticket)
            yield connection


def have_written(
    pull: Pull, source: str, road: Road, parts: Sequence[Part], relayed: bool, stop: Stop, places: Sequence[Place]
) -> int:
    """Lets `source` write parts to their places in one segment of this process; returns the payload bytes.

    NotSharedError where it cannot reach the segment, TransferError naming the part at which it ended. The segment is tainted unless
    the source has said that all is done.
    """
    segment, (address, channel) = places[0][0], road
    opened, done = False, 0
    target = pb.Segment(pid=segment.pid, fd=segment.fd, nonce=segment.nonce, bytes=segment.size)
    request = pb.WriteRequest(wanted=_request(pull, parts, relayed), segment=target)
    for part, (_, offset) in zip(parts, places, strict=True):
        request.targets.add(offset=offset, strides=part.target.strides)
    segment.writer_begins()
    try:
        call = channel.unary_stream(WRITE_SLICES, pb.WriteRequest.SerializeToString, pb.Written.FromString)
        messages = call(request, timeout=max(0.1, pull.deadline - time.monotonic()), metadata=pull.metadata)
        with stop.cancels(messages.cancel):
            for message in messages:
                opened = True
                stop.hear()
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
        request.slices.add(tensor=part.tensor, lower=part.lower, upper=part.upper, dtype=part.target.dtype.name)
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
