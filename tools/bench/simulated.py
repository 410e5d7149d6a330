"""Workers that speak the real protocol and compute nothing, many in one process: what a controller costs at scale.

Each has a control stream of its own, registers devices that do not exist, and answers a node after the time that its options
name (`sleep_s`, a step each; one node after the other, as on a device). No JAX, no data road. Started by the benchmarks:

    python -m waypath.tools.bench.simulated --controller A --token-file F --workers 64 --devices 8 --world-size 4
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc

from waypath.proto import channel, common_pb2, version
from waypath.proto import worker_pb2 as pb
from waypath.proto.codecs import load_json
from waypath.proto.worker_pb2_grpc import WorkerStub

HEARTBEAT_S = 5.0


class Simulated:
    """One worker."""

    def __init__(self, name: str, world: str, index: int, count: int, devices: int) -> None:
        self.register = pb.Register(
            worker=name,
            incarnation=secrets.token_hex(8),
            role="compute",
            world=world,
            process_index=index,
            process_count=count,
            host_id="simulated",
            devices=[common_pb2.Device(id=k, kind="sleep", local_id=k) for k in range(devices)],
            data_addresses=["127.0.0.1:1"],
            versions=version.versions("simulated", "cpu"),
        )
        self._outbox: asyncio.Queue[pb.WorkerMessage] = asyncio.Queue()
        self._programs: dict[str, dict[str, tuple[float, int, list[str]]]] = {}
        self._last = 0
        self._free_at = 0.0

    async def _outgoing(self) -> AsyncIterator[pb.WorkerMessage]:
        yield pb.WorkerMessage(register=self.register)
        while True:
            message = await self._outbox.get()
            message.acknowledged = self._last
            yield message

    async def run(self, address: str, token: str, joined: asyncio.Semaphore) -> None:
        """Serves until the controller says stop or is gone."""
        async with channel.aio_channel(address) as dialled:
            call = WorkerStub(dialled).Attach(self._outgoing(), metadata=channel.metadata(token))
            with contextlib.suppress(grpc.RpcError):
                async for message in call:
                    self._last = message.sequence
                    kind = message.WhichOneof("kind")
                    if kind == "welcome":
                        joined.release()
                    elif kind == "install":
                        self._install(message.install)
                    elif kind == "execute":
                        self._execute(message.execute)
                    elif kind == "shutdown":
                        return

    def _install(self, message: pb.Install) -> None:
        nodes = {}
        for node in message.nodes:
            steps = list(node.steps) or [node]
            sleep_s = sum(float(load_json(step.options_json).get("sleep_s", 0.0)) for step in steps)
            nodes[node.node_id] = (sleep_s, len(steps), list(node.exports))
        self._programs[message.program_id] = nodes

    def _execute(self, message: pb.Execute) -> None:
        loop = asyncio.get_running_loop()
        for assigned in message.nodes:
            sleep_s, _, exports = self._programs[message.program_id][assigned.node_id]
            event = pb.NodeEvent(
                execution_id=message.execution_id,
                node_id=assigned.node_id,
                attempt=assigned.attempt,
                state=pb.NodeEvent.FINISHED,
                export_bytes=dict.fromkeys(exports, 4),
            )
            if sleep_s:
                self._free_at = max(self._free_at, loop.time()) + sleep_s
                loop.call_at(self._free_at, self._outbox.put_nowait, pb.WorkerMessage(node=event))
            else:
                self._outbox.put_nowait(pb.WorkerMessage(node=event))

    async def beat(self) -> None:
        """Says that it lives."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._outbox.put_nowait(pb.WorkerMessage(heartbeat=pb.Heartbeat(activity="simulated")))


async def serve(options: argparse.Namespace) -> None:
    """Runs all of them; prints `joined` when all are welcome."""
    token = channel.read_token(options.token_file)
    joined = asyncio.Semaphore(0)
    tasks = []
    for number in range(options.first, options.first + options.workers):
        world, index = divmod(number, options.world_size)
        name = f"world-{world}" if options.world_size > 1 else f"sim-{number}"
        worker = Simulated(f"sim-{number}", name, index, options.world_size, options.devices)
        tasks += [
            asyncio.create_task(worker.run(options.controller, token, joined)),
            asyncio.create_task(worker.beat()),
        ]
    for _ in range(options.workers):
        await joined.acquire()
    print("joined", flush=True)
    await asyncio.gather(*tasks[::2])


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--controller", required=True)
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--world-size", type=int, default=1)
    asyncio.run(serve(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
