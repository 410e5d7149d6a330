"""Arrays between this client and the workers: pushed shard by shard, pulled box by box. The controller sees none of them.

Must not know jax, sessions or programs. Threads: one stream a worker, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import google_crc32c
import grpc
import numpy as np

from waypath.controller.allocation import Grant
from waypath.controller.nodes import Aval, Leaf
from waypath.proto import channel as channels
from waypath.proto import codecs
from waypath.proto import data_pb2 as pb
from waypath.proto.codecs import Bundle
from waypath.proto.errors import (
    GraphError,
    TransferError,
    UnavailableError,
    WaypathError,
    WorkerLostError,
    from_rpc_error,
)
from waypath.proto.layout import Box, device_boxes
from waypath.proto.wire import decode, fill

PUSH = "/waypath.v1.Data/Push"
PULL_SLICES = "/waypath.v1.Data/PullSlices"
MAX_RESULT_BYTES = 1 << 30
DEFAULT_TIMEOUT_S = 300.0


class DataRoad:
    """Channels to workers, by address."""

    def __init__(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self._metadata = metadata
        self._channels: dict[str, grpc.Channel] = {}

    def close(self) -> None:
        """Closes all channels."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    def push(self, object_id: str, arrays: Sequence[Any], aval: Aval, grant: Grant, addresses: dict[str, str]) -> None:
        """Hands every worker of a slice its parts of whole arrays; TransferError names the worker that refused."""
        per_worker: dict[str, dict[str, Any]] = {worker: {} for worker in grant.workers}
        for index, (array, leaf) in enumerate(zip(arrays, aval, strict=True)):
            for (worker, device), (lower, upper) in zip(grant.devices, boxes_of(leaf, grant), strict=True):
                cut = tuple(slice(a, b) for a, b in zip(lower, upper, strict=True))
                per_worker[worker][f"{index}/{device}"] = array[(..., *cut)]
        for worker, parts in per_worker.items():
            call = self._channel(addresses[worker]).stream_unary(
                PUSH, pb.PullChunk.SerializeToString, pb.PushReply.FromString
            )
            try:
                call(_chunks(object_id, Bundle({}, parts)), metadata=self._metadata, timeout=DEFAULT_TIMEOUT_S)
            except grpc.RpcError as error:
                raise _failed(error, f"push {object_id} to {worker}", worker, grant) from None

    def pull(self, object_id: str, aval: Aval, grant: Grant, addresses: dict[str, str], timeout_s: float) -> list[Any]:
        """Whole arrays from their parts; each box is pulled once. GraphError over `MAX_RESULT_BYTES`."""
        check_size(object_id, aval)
        arrays = [np.empty(leaf.shape, codecs.dtype_of(leaf.dtype)) for leaf in aval]
        wanted: dict[str, list[tuple[int, Box]]] = {}
        for index, leaf in enumerate(aval):
            seen: set[Box] = set()
            for (worker, _), box in zip(grant.devices, boxes_of(leaf, grant), strict=True):
                if box not in seen:
                    seen.add(box)
                    wanted.setdefault(worker, []).append((index, box))
        for worker, parts in wanted.items():
            request = pb.SlicesRequest(name=object_id, puller="client", object=True)
            targets = []
            for index, (lower, upper) in parts:
                request.slices.add(tensor=str(index), lower=lower, upper=upper)
                cut: Any = tuple(slice(a, b) for a, b in zip(lower, upper, strict=True))
                targets.append(arrays[index][(..., *cut)])
            call = self._channel(addresses[worker]).unary_stream(PULL_SLICES, pb.SlicesRequest.SerializeToString, None)
            left = [target.nbytes for target in targets]
            try:
                for message in call(request, metadata=self._metadata, timeout=timeout_s):
                    position, offset, data = decode(message)
                    fill(targets[position], offset, data)
                    left[position] -= len(data)
            except grpc.RpcError as error:
                raise _failed(error, f"pull {object_id} from {worker}", worker, grant) from None
            if any(left):
                raise TransferError(f"{object_id} from {worker}: {sum(left)} bytes are missing")
        return arrays

    def _channel(self, address: str) -> grpc.Channel:
        if address not in self._channels:
            self._channels[address] = channels.channel(address)
        return self._channels[address]


def check_size(object_id: str, aval: Aval) -> None:
    """Raises GraphError where an object is too large to be brought to a client."""
    nbytes = sum(math.prod(leaf.shape) * codecs.dtype_of(leaf.dtype).itemsize for leaf in aval)
    if nbytes > MAX_RESULT_BYTES:
        raise GraphError(
            f"object {object_id} has {nbytes:,} bytes; at most {MAX_RESULT_BYTES:,} are brought to a client at once",
            remedy="Reduce it on the workers first",
        )


def _failed(error: grpc.RpcError, doing: str, worker: str, grant: Grant) -> WaypathError:
    """What a broken stream to a worker means: one that is not there any more has taken its objects with it."""
    cause = from_rpc_error(error, doing)
    if not isinstance(cause, UnavailableError):
        return cause
    return WorkerLostError(
        f"{cause.message}: worker {worker} of slice {grant.name} was lost",
        remedy="What it held is gone; ask for a new slice",
    )


def boxes_of(leaf: Leaf, grant: Grant) -> tuple[Box, ...]:
    """The box of an array that each device of a slice holds."""
    return device_boxes(leaf.shape, leaf.spec, grant.axes, grant.sizes)


def _chunks(object_id: str, bundle: Bundle) -> Iterator[pb.PullChunk]:
    execution_id, _, name = object_id.rpartition("/")
    header = pb.ObjectHeader(
        object=pb.ObjectId(execution_id=execution_id, node_id=name),
        bundle=codecs.header(bundle),
        payload_bytes=bundle.nbytes,
    )
    yield pb.PullChunk(header=header)
    for data in codecs.payload(bundle):
        yield pb.PullChunk(payload=pb.Payload(data=data, crc32c=google_crc32c.value(data)))
