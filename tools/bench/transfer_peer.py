"""One process of `bench transfer`: a source or a destination, told what to do by JSON lines.

Real parts: data server, transfer, segments, digests. Not part of it: controller, models, engines. Reads commands from stdin, answers each
with a line on stdout: {"seconds", …}.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from waypath.proto import worker_pb2 as pb
from waypath.proto.layout import Layout
from waypath.workers.data_server import DataServer
from waypath.workers.digest import digest_arrays
from waypath.workers.exposed import ExposedTensor
from waypath.workers.peers import Peers
from waypath.workers.segments import Buffer, Heap, Memory, SegmentPool
from waypath.workers.store import ObjectStore
from waypath.workers.transfer import Transfer

TOKEN = "bench"
HostArray = np.ndarray[Any, Any]


def values(shape: tuple[int, ...], lower: tuple[int, ...], upper: tuple[int, ...]) -> HostArray:
    """The box of a float32 tensor whose elements are their row-major index modulo 2²³ (exact in float32)."""
    grid = np.ix_(*(np.arange(a, b, dtype=np.int64) for a, b in zip(lower, upper, strict=True)))
    index = np.ravel_multi_index(grid, shape)
    return (index % (1 << 23)).astype(np.float32)


class Boxes:
    """The shards of one worker in one buffer."""

    def __init__(self, layout: Layout, worker: str, memory: Memory) -> None:
        self.lower: dict[str, tuple[int, ...]] = {}
        self.shape = {name: tensor.shape for name, tensor in layout.tensors.items()}
        mine = [(name, s) for name, t in layout.tensors.items() for s in t.shards if s.worker == worker]
        sizes = [4 * int(np.prod(np.subtract(s.upper, s.lower))) for _, s in mine]
        starts = np.cumsum([0, *(-(-size // 64) * 64 for size in sizes)])
        self.buffer: Buffer = memory.allocate(int(starts[-1]))
        self.arrays: dict[str, HostArray] = {}
        for (name, shard), start, size in zip(mine, starts, sizes, strict=False):
            shape = np.subtract(shard.upper, shard.lower)
            self.arrays[name] = self.buffer.array[start : start + size].view(np.float32).reshape(shape)
            self.lower[name] = shard.lower
        self.buffer.array[:] = 0  # touched

    def view(self, name: str, lower: tuple[int, ...], upper: tuple[int, ...]) -> HostArray:
        """A box in the tensor's own axes."""
        at = self.lower[name]
        return self.arrays[name][tuple(slice(a - s, b - s) for a, b, s in zip(lower, upper, at, strict=True))]

    def digests(self) -> list[list[int]]:
        """Per tensor, on the device, which aliases the memory."""
        names = sorted(self.arrays)
        held = [jax.device_put(self.arrays[name], may_alias=True) for name in names]
        found = digest_arrays(held, [self.lower[n] for n in names], [self.shape[n] for n in names])
        return [part.tolist() for part in found]


class Peer:
    """Does what it is told."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.store = ObjectStore()
        self.server = DataServer(self.store, TOKEN)
        self.peers = Peers()
        self.pools: dict[str, Memory] = {"shared": SegmentPool(Path("/dev/shm"), required=True), "stream": Heap()}
        self.transfers = {
            path: Transfer(name, TOKEN, self.peers, self.store, "here", memory if path == "shared" else None)  # type: ignore[arg-type]
            for path, memory in self.pools.items()
        }
        self.sets: dict[str, list[Boxes]] = {}
        self.raw: socket.socket | None = None
        self.spare = np.zeros(0, np.uint8)

    def peers_are(self, table: dict[str, str]) -> None:
        """Where the others are."""
        self.peers.update([pb.Peer(worker=w, data_addresses=[a], host_id="here") for w, a in table.items()])

    def hold(self, layout: dict[str, Any]) -> None:
        """As a source: the parameters."""
        boxes = Boxes(Layout.from_json(layout), self.name, Heap())
        for name, array in boxes.arrays.items():
            low = boxes.lower[name]
            array[...] = values(boxes.shape[name], low, tuple(a + n for a, n in zip(low, array.shape, strict=True)))
        self.sets["source"] = [boxes]

    def want(self, layout: dict[str, Any]) -> None:
        """As a destination: two sets for each path."""
        parsed = Layout.from_json(layout)
        for path, memory in self.pools.items():
            for old in self.sets.get(path, ()):
                memory.free(old.buffer)
            self.sets[path] = [Boxes(parsed, self.name, memory) for _ in range(2)]
        self.spare = np.zeros_like(self.sets["stream"][0].buffer.array)

    def expose(self, version: int, verify: bool) -> dict[str, Any]:
        """As a source: digests, and let peers read."""
        (boxes,) = self.sets["source"]
        digests = boxes.digests() if verify else []
        tensors = {
            name: ExposedTensor(boxes.shape[name], "float32", [(boxes.lower[name], array)])
            for name, array in boxes.arrays.items()
        }
        self.store.exposures.expose(f"policy/{version}", tensors)
        return {"digests": digests}

    def unexpose(self, version: int) -> None:
        """As a source: the version is over."""
        self.store.exposures.unexpose(f"policy/{version}")

    async def pull(self, version: int, path: str, copies: list[dict[str, Any]], verify: bool) -> dict[str, Any]:
        """As a destination: the version into the set whose turn it is."""
        boxes = self.sets[path][version % 2]
        stats = await self.transfers[path].pull_slices(f"policy/{version}", copies, boxes.view)
        return {"bytes": stats.bytes, "digests": boxes.digests() if verify else []}

    def check(self, version: int, path: str) -> dict[str, Any]:
        """Whether every element is right."""
        boxes = self.sets[path][version % 2]
        for name, array in boxes.arrays.items():
            low = boxes.lower[name]
            high = tuple(a + n for a, n in zip(low, array.shape, strict=True))
            if not np.array_equal(array, values(boxes.shape[name], low, high)):
                return {"right": False}
        for one in self.sets[path]:
            one.buffer.array[:] = 0
        return {"right": True}

    def memcpy(self) -> None:
        """The floor: as many bytes as this destination wants, between touched buffers."""
        np.copyto(self.spare, self.sets["stream"][0].buffer.array)

    def listen(self) -> dict[str, Any]:
        """One end of a raw TCP stream."""
        server = socket.create_server(("127.0.0.1", 0))
        self.raw = server
        return {"port": server.getsockname()[1]}

    def connect(self, port: int) -> None:
        """The other end."""
        self.raw = socket.create_connection(("127.0.0.1", port))

    def accept(self) -> None:
        """After `listen`."""
        assert self.raw is not None
        self.raw, server = self.raw.accept()[0], self.raw
        server.close()

    def send(self, nbytes: int) -> None:
        """Bytes over the raw stream."""
        assert self.raw is not None
        self.raw.sendall(self.sets["source"][0].buffer.array.data[:nbytes])

    def receive(self, nbytes: int) -> None:
        """Into touched memory."""
        assert self.raw is not None
        view, done = self.spare.data, 0
        while done < nbytes:
            done += self.raw.recv_into(view[done:nbytes])


async def main() -> None:
    """Serves commands until stdin ends."""
    peer = Peer(sys.argv[1])
    print(json.dumps({"address": await peer.server.start()}), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        do = getattr(peer, command.pop("do"))
        began = time.perf_counter()
        if asyncio.iscoroutinefunction(do):
            answer = await do(**command)
        else:
            answer = await loop.run_in_executor(None, functools.partial(do, **command))
        print(json.dumps({"seconds": time.perf_counter() - began, **(answer or {})}), flush=True)
    await peer.server.stop()


if __name__ == "__main__":
    asyncio.run(main())
    os._exit(0)
