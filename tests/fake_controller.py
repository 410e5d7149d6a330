"""The controller's end of the control road, for tests of workers: sends what a test says, collects what workers say.

Owns the sequence numbers of what is sent, and waiting for what is received. Used on one event loop.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from waypath.proto import version
from waypath.proto import worker_pb2 as pb
from waypath.proto.errors import WaypathError


class FakeController:
    """The controller's end of one worker's stream: a `Transport` for a runtime in this process, or behind a socket."""

    def __init__(self) -> None:
        self.received: list[pb.WorkerMessage] = []
        self.streams = 0
        self.refuse: list[WaypathError] = []  # one per dial
        self.epoch = 3
        self._arrived = asyncio.Event()
        self._out: asyncio.Queue[pb.ControllerMessage | WaypathError | None] = asyncio.Queue()
        self._sequence = 0

    async def attach(self, outgoing: AsyncIterator[pb.WorkerMessage]) -> AsyncIterator[pb.ControllerMessage]:
        if self.refuse:
            raise self.refuse.pop(0)
        self.streams += 1
        self._out, self._sequence = asyncio.Queue(), 0
        self.send(welcome=pb.Welcome(cluster_id="c", versions=version.versions()))
        reader = asyncio.create_task(self._read(outgoing, self._out))
        try:
            while (message := await self._out.get()) is not None:
                if isinstance(message, WaypathError):
                    raise message
                yield message
        finally:
            reader.cancel()

    async def _read(self, outgoing: AsyncIterator[pb.WorkerMessage], out: asyncio.Queue[Any]) -> None:
        async for message in outgoing:
            copied = pb.WorkerMessage()
            copied.CopyFrom(message)
            self.received.append(copied)
            self._arrived.set()
        out.put_nowait(None)

    def send(self, *, epoch: int | None = None, sequence: int | None = None, **kind: Any) -> int:
        """Send one message, by default the next in sequence; returns its sequence."""
        if sequence is None:
            sequence = self._sequence = self._sequence + 1
        self._out.put_nowait(pb.ControllerMessage(epoch=epoch or self.epoch, sequence=sequence, **kind))
        return sequence

    def break_stream(self, error: WaypathError) -> None:
        self._out.put_nowait(error)

    async def until(self, found: Callable[[], Any]) -> Any:
        """Wait until `found` returns something true, asked after every message."""
        while not (value := found()):
            self._arrived.clear()
            await self._arrived.wait()
        return value

    def all(self, kind: str) -> list[Any]:
        return [getattr(m, kind) for m in self.received if m.WhichOneof("kind") == kind]

    async def outcome(self, node_id: str, attempt: int = 0, execution_id: str = "e") -> pb.NodeEvent:
        def found() -> pb.NodeEvent | None:
            events = self.all("node")
            key = (execution_id, node_id, attempt)
            return next((e for e in events if (e.execution_id, e.node_id, e.attempt) == key), None)

        event: pb.NodeEvent = await self.until(found)
        return event


def node(node_id: str, method: str, *inputs: str, deadline_s: float = 60.0, **options: Any) -> pb.Node:
    return pb.Node(
        node_id=node_id,
        kind="method",
        service="probe",
        method=method,
        inputs=inputs,
        options_json=json.dumps(options),
        deadline_s=deadline_s,
    )


def install(controller: FakeController, *nodes: pb.Node) -> None:
    controller.send(install=pb.Install(program_id="p", name="test", nodes=nodes))


def execute(*node_ids: str, attempt: int = 0, gang: int = 0, **locations: list[str]) -> pb.Execute:
    return pb.Execute(
        execution_id="e",
        program_id="p",
        args_json='{"step": 7}',
        nodes=[pb.Assignment(node_id=n, attempt=attempt) for n in node_ids],
        locations=[pb.Location(node_id=n, workers=w) for n, w in locations.items()],
        gang_sequence=gang,
    )
