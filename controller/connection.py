"""One worker's control stream, seen from the controller: sequence numbers out, events in.

Translates between the scheduler's commands and events and the messages of worker.proto, and owns the outgoing queue of one
incarnation. Must not know what the messages mean to a run. Called by the runtime.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from waypath.controller import commands as c
from waypath.controller.allocation import Grant
from waypath.controller.catalogue import Catalogue, Option
from waypath.controller.graph import Aval, Node, Slice
from waypath.controller.runs.trace import PhaseSpan
from waypath.proto import worker_pb2 as pb
from waypath.proto.codecs import dump_json, load_json
from waypath.proto.errors import LocalError, from_message

MAX_QUEUED_MESSAGES = 4096
RELEASE_DELAY_S = 0.005
MAX_HELD = 1024


def node_message(node: Node, sources: Sequence[str] = ()) -> pb.Node:
    """Returns the wire form of a node. `sources`: per input the slice that the object lies on, or ""."""
    return pb.Node(
        node_id=node.node_id,
        kind=node.kind,
        service=node.service,
        method=node.method,
        inputs=node.inputs,
        options_json=node.options_json,
        deadline_s=node.deadline_s,
        donates=node.donates,
        takes=[_aval_message(aval) for aval in node.takes],
        gives=[_aval_message(aval) for aval in node.gives],
        steps=[node_message(step) for step in node.steps],
        exports=node.exports,
        slice=node.place.name if isinstance(node.place, Slice) else "",
        sources=sources,
    )


def _aval_message(aval: Aval) -> pb.Aval:
    return pb.Aval(
        leaves=[
            pb.Leaf(shape=leaf.shape, dtype=leaf.dtype, spec=[pb.Axes(names=axes) for axes in leaf.spec])
            for leaf in aval
        ]
    )


def mesh_message(grant: Grant) -> pb.MeshSlice:
    """Returns the wire form of a virtual slice."""
    index = dict(zip(grant.workers, grant.indices, strict=True))
    devices = [
        pb.MeshDevice(worker=worker, local_id=local_id, process_index=index[worker])
        for worker, local_id in grant.devices
    ]
    return pb.MeshSlice(name=grant.name, axes=grant.axes, sizes=grant.sizes, devices=devices)


def command_message(command: c.WorkerCommand) -> pb.ControllerMessage:
    """Returns the message of a command, without epoch and sequence."""
    message = pb.ControllerMessage()
    if isinstance(command, c.InstallProgram):
        message.install.program_id = command.program_id
        message.install.name = command.name
        message.install.nodes.extend(node_message(n, command.sources.get(n.node_id, ())) for n in command.nodes)
        message.install.slices.extend(map(mesh_message, command.slices))
    elif isinstance(command, c.Execute):
        execute = message.execute
        execute.execution_id = command.execution_id
        execute.program_id = command.program_id
        execute.args_json = dump_json(dict(command.args))
        execute.gang_sequence = command.gang_sequence
        for node_id, attempt in command.nodes:
            execute.nodes.add(node_id=node_id, attempt=attempt)
        for node_id, workers in command.locations.items():
            execute.locations.add(node_id=node_id, workers=workers, object_id=command.objects.get(node_id, ""))
    elif isinstance(command, c.AskOutcomes):
        message.ask.execution_id = command.execution_id
        for node_id, attempt in command.nodes:
            message.ask.nodes.add(node_id=node_id, attempt=attempt)
    elif isinstance(command, c.Relocate):
        message.relocate.execution_id = command.execution_id
        message.relocate.location.node_id = command.node_id
        message.relocate.location.workers.extend(command.workers)
    elif isinstance(command, c.ReleaseObjects):
        message.releases.add(execution_id=command.execution_id, node_ids=command.node_ids, kept=command.kept)
    elif isinstance(command, c.CancelExecution):
        message.cancel.execution_id = command.execution_id
        message.cancel.reason = command.reason
    elif isinstance(command, c.AbortWorld):
        message.abort_world.reason = command.reason
    else:
        raise LocalError(f"no message for {type(command).__name__}")
    return message


def node_event(worker: str, incarnation: str, event: pb.NodeEvent) -> c.NodeFinished | c.NodeFailed | None:
    """Returns the scheduler's event for a node event; None for a cancelled node, which changes nothing."""
    if event.state == pb.NodeEvent.FINISHED:
        return c.NodeFinished(
            worker=worker,
            incarnation=incarnation,
            execution_id=event.execution_id,
            node_id=event.node_id,
            attempt=event.attempt,
            result=load_json(event.result_json),
            object_bytes=event.object_bytes,
            export_bytes=dict(event.export_bytes),
        )
    if event.state == pb.NodeEvent.FAILED:
        return c.NodeFailed(
            worker=worker,
            incarnation=incarnation,
            execution_id=event.execution_id,
            node_id=event.node_id,
            attempt=event.attempt,
            error=from_message(event.error),
        )
    return None


def catalogue(register: pb.Register) -> Catalogue:
    """Returns what a worker says that it can be asked to do by name."""
    return {
        service.name: {
            method.name: None if method.any_options else {o.name: Option(o.kind, o.required) for o in method.options}
            for method in service.methods
        }
        for service in register.services
    }


def phase_spans(worker: str, event: pb.NodeEvent) -> list[PhaseSpan]:
    """Returns the spans that came with a node event."""
    return [PhaseSpan(worker, span.name, span.start_ns, span.end_ns) for span in event.spans]


@dataclass
class Connection:
    """The live stream of one worker incarnation. `broken` says why nothing can be sent any more: the worker is to be lost."""

    register: pb.Register
    epoch: int
    heartbeat: pb.Heartbeat = field(default_factory=pb.Heartbeat)
    told_to_leave: str = ""
    broken: str = ""
    heard_s: float = field(default_factory=time.monotonic)
    doubtful: list[tuple[asyncio.TimerHandle, c.Event]] = field(default_factory=list)
    """Failures that are held back, for they may be symptoms of another worker's loss."""
    _sequence: int = 0
    _closed: bool = False
    _outgoing: deque[pb.ControllerMessage] = field(default_factory=deque)
    _held: list[pb.Release] = field(default_factory=list)  # releases that no message has taken along yet
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def has_handled_all(self, message: pb.WorkerMessage) -> bool:
        """Does a message say that the worker has handled all that was sent?"""
        return message.acknowledged == self._sequence and not self._held

    @property
    def worker(self) -> str:
        """The worker's name."""
        return str(self.register.worker)

    def send(self, message: pb.ControllerMessage) -> None:
        """Numbers a message and queues it; what is sent to a closed stream is dropped.

        A message of releases alone goes with the next one, or after `RELEASE_DELAY_S`: nobody waits for it.

        Never raises, for the messages to other workers must go out all the same: a worker that does not read (nothing
        queues without bound) has its stream ended, and `broken` tells the runtime to lose it.
        """
        if self._closed:
            return
        if message.releases and message.WhichOneof("kind") is None:
            if not self._held:
                asyncio.get_running_loop().call_later(RELEASE_DELAY_S, self._send_held)
            self._held += message.releases
            if len(self._held) >= MAX_HELD:
                self._send_held()
            return
        if self._held:
            message.releases.extend(self._held)
            self._held.clear()
        self._queue(message)

    def _send_held(self) -> None:
        if self._held and not self._closed:
            self._queue(pb.ControllerMessage(releases=self._held))
            self._held.clear()

    def _queue(self, message: pb.ControllerMessage) -> None:
        if len(self._outgoing) >= MAX_QUEUED_MESSAGES:
            self.broken = f"it does not read: {MAX_QUEUED_MESSAGES} messages wait for it"
            self._outgoing.clear()
            self.close()
            return
        self._sequence += 1
        message.epoch = self.epoch
        message.sequence = self._sequence
        self._outgoing.append(message)
        self._changed.set()

    def shut_down(self, reason: str) -> None:
        """Tells the worker to leave."""
        self.told_to_leave = reason
        self.send(pb.ControllerMessage(shutdown=pb.Shutdown(reason=reason)))

    def close(self) -> None:
        """Ends the stream behind what is queued. Idempotent."""
        self._closed = True
        self._changed.set()

    async def outgoing(self) -> AsyncIterator[pb.ControllerMessage]:
        """Yields queued messages until the stream is closed."""
        while True:
            while self._outgoing:
                yield self._outgoing.popleft()
            if self._closed:
                return
            self._changed.clear()
            await self._changed.wait()
