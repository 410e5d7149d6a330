"""Workers that speak the real protocol and compute nothing, many in one process: what a controller costs at scale.

Each has a control stream of its own, registers devices that do not exist, and answers a node once its inputs are there (on whichever of
them) and the time that its options name is over (`sleep_s`, a step each; one node after the other, as on a device). No JAX, no data
road. Started by the benchmarks:

    python -m waypath.tools.bench.simulated --controller A --token-file F --workers 64 --devices 8 --world-size 4
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import grpc

from waypath.proto import channel, common_pb2, version
from waypath.proto import worker_pb2 as pb
from waypath.proto.codecs import load_json
from waypath.proto.worker_pb2_grpc import WorkerStub

HEARTBEAT_S = 5.0


class Objects:
    """Which objects are there, on all workers of this process together: what takes the place of the data road."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[str, asyncio.Future[None]]] = {}

    def of(self, execution_id: str, name: str) -> asyncio.Future[None]:
        """Done when the object is there."""
        names = self._waiting.setdefault(execution_id, {})
        if name not in names:
            names[name] = asyncio.get_running_loop().create_future()
        return names[name]

    def made(self, execution_id: str, names: Iterable[str]) -> None:
        """These are there."""
        for name in names:
            found = self.of(execution_id, name)
            if not found.done():
                found.set_result(None)

    def forget(self, execution_id: str) -> None:
        """The execution is over."""
        self._waiting.pop(execution_id, None)


class Simulated:
    """One worker."""

    def __init__(self, name: str, world: str, index: int, count: int, devices: int, objects: Objects) -> None:
        self._objects = objects
        self._tasks: set[asyncio.Task[None]] = set()
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
        self._programs: dict[str, dict[str, tuple[float, list[str], list[str]]]] = {}
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
                    for release in message.releases:
                        if not release.node_ids:
                            self._objects.forget(release.execution_id)
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
            nodes[node.node_id] = (sleep_s, list(node.inputs), list(node.exports))
        self._programs[message.program_id] = nodes

    def _execute(self, message: pb.Execute) -> None:
        for assigned in message.nodes:
            _, inputs, _ = self._programs[message.program_id][assigned.node_id]
            waits = [self._objects.of(message.execution_id, name) for name in inputs]
            if all(wait.done() for wait in waits):
                self._run(message, assigned)
            else:
                task = asyncio.get_running_loop().create_task(self._run_behind(waits, message, assigned))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _run_behind(
        self, waits: list[asyncio.Future[None]], message: pb.Execute, assigned: pb.Assignment
    ) -> None:
        await asyncio.gather(*map(asyncio.shield, waits))
        self._run(message, assigned)

    def _run(self, message: pb.Execute, assigned: pb.Assignment) -> None:
        loop = asyncio.get_running_loop()
        sleep_s, _, exports = self._programs[message.program_id][assigned.node_id]
        event = pb.NodeEvent(
            execution_id=message.execution_id,
            node_id=assigned.node_id,
            attempt=assigned.attempt,
            state=pb.NodeEvent.FINISHED,
            export_bytes=dict.fromkeys(exports, 4),
        )

        def done() -> None:
            self._objects.made(message.execution_id, exports or [assigned.node_id])
            self._outbox.put_nowait(pb.WorkerMessage(node=event))

        if sleep_s:
            self._free_at = max(self._free_at, loop.time()) + sleep_s
            loop.call_at(self._free_at, done)
        else:
            done()

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
    objects = Objects()
    for number in range(options.first, options.first + options.workers):
        world, index = divmod(number, options.world_size)
        name = f"world-{world}" if options.world_size > 1 else f"sim-{number}"
        worker = Simulated(f"sim-{number}", name, index, options.world_size, options.devices, objects)
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
