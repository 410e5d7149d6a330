"""The run loop: the one place where the scheduler meets time and sockets.

Feeds events to the scheduler, sends its commands to workers, and hands executions to runs as awaitables. Owns liveness: a
stream that ends, or a worker that is silent for too long, is a lost worker. Must not know what a run computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, Protocol

import grpc

from waypath.controller import commands as c
from waypath.controller.connection import Connection, catalogue, command_message, node_event, phase_spans
from waypath.controller.functions import FunctionStore
from waypath.controller.graph import Program
from waypath.controller.resources import Resources
from waypath.controller.runs.trace import PhaseSpan
from waypath.controller.scheduler import Scheduler
from waypath.proto import version
from waypath.proto import worker_pb2 as pb
from waypath.proto.errors import (
    DeadlineError,
    NameTakenError,
    NotFoundError,
    ProtocolError,
    RemoteError,
    TransferError,
    WaypathError,
    trailer,
)
from waypath.proto.worker_pb2_grpc import WorkerServicer

LIVENESS_PERIOD_S = 1.0
DEFAULT_HEARTBEAT_TIMEOUT_S = 45.0
WORLD_ERROR_DELAY_S = 1.0
MAX_SPANS = 20_000
PEERS_DELAY_S = 0.0005
MAX_PEERS_DELAY_S = 0.5
TOLD_AT_ONCE = 16

Results = Mapping[str, Mapping[str, Mapping[str, Any]]]
JoinedHook = Callable[[str, str], None]
LostHook = Callable[[str, str, str], None]

log = logging.getLogger("waypath.controller")


class Listener(Protocol):
    """Hears what becomes of an execution."""

    def node_completed(self, node_id: str, results: Mapping[str, Mapping[str, Any]]) -> None:
        """A node has finished everywhere."""
        ...

    def completed(self, command: c.ExecutionCompleted) -> None:
        """The execution is over."""
        ...


class Execution:
    """An execution that was submitted. Await `result()` for all of it, `node()` for one node."""

    def __init__(self, execution_id: str, program: Program) -> None:
        self.execution_id = execution_id
        self.program = program
        loop = asyncio.get_running_loop()
        self._result: asyncio.Future[Results] = loop.create_future()
        self._nodes: dict[str, asyncio.Future[Mapping[str, Mapping[str, Any]]]] = {
            node.node_id: loop.create_future() for node in program.nodes
        }

    async def result(self) -> Results:
        """Returns node id → worker → control-road result; raises the WaypathError that ended it."""
        return await asyncio.shield(self._result)

    async def node(self, node_id: str) -> Mapping[str, Mapping[str, Any]]:
        """Returns worker → result of one node as soon as it has finished everywhere; {} of one that was dropped.

        Raises the error of an execution that ended without it, and NotFoundError for a node that the program lacks.
        """
        if node_id not in self._nodes:
            raise NotFoundError(f"no node {node_id!r}; it has: {', '.join(self._nodes)}", where=self.execution_id)
        return await asyncio.shield(self._nodes[node_id])

    def node_completed(self, node_id: str, results: Mapping[str, Mapping[str, Any]]) -> None:
        """Told by the runtime."""
        self._nodes[node_id].set_result(results)

    def completed(self, command: c.ExecutionCompleted) -> None:
        """Told by the runtime."""
        waiting = {node_id: future for node_id, future in self._nodes.items() if not future.done()}
        if command.error is None:
            self._result.set_result(command.results)
            for node_id, future in waiting.items():
                future.set_result(command.results.get(node_id, {}))
            return
        for failed in (self._result, *waiting.values()):
            failed.set_exception(command.error)
            failed.exception()  # whoever awaits it sees it; nobody has to


class Runtime(WorkerServicer):
    """Workers' streams on one side, executions on the other, the scheduler between."""

    def __init__(
        self,
        resources: Resources,
        cluster_id: str,
        epoch: int,
        heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S,
    ) -> None:
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self.functions = FunctionStore()
        self.cluster_id = cluster_id
        self.epoch = epoch
        self.scheduler = Scheduler(resources)
        self.connections: dict[str, Connection] = {}
        self._executions: dict[str, Listener] = {}
        self._owners: dict[str, str] = {}
        self._spans: dict[str, deque[PhaseSpan]] = {}
        self._hooks: list[tuple[JoinedHook, LostHook]] = []
        self._number = 0
        self._changed = asyncio.Condition()
        self._arrived: dict[str, Connection] = {}
        self._untold: dict[str, Connection] = {}
        self._departed: dict[str, None] = {}
        self._telling: asyncio.TimerHandle | None = None
        self._closing = False

    # What runs use

    def submit(self, program: Program, args: Mapping[str, Any], *, owner: str) -> Execution:
        """Dispatches `program`; returns at once. Raises GraphError where it does not fit the cluster."""
        self._number += 1
        execution_id = f"{program.name}-{self._number}-{secrets.token_hex(3)}"
        execution = Execution(execution_id, program)
        self._owners[execution_id] = owner
        self.start(execution_id, program, args, owner, {}, execution)
        return execution

    def start(
        self,
        execution_id: str,
        program: Program,
        args: Mapping[str, Any],
        owner: str,
        bindings: Mapping[str, str],
        listener: Listener,
    ) -> None:
        """Dispatches an execution under an id that its owner chose; `listener` hears of its end. Raises as `submit`."""
        if execution_id in self._executions:
            raise NameTakenError(f"execution {execution_id} runs already")
        self._executions[execution_id] = listener
        try:
            self.handle(c.ExecutionSubmitted(execution_id, program, args, owner, bindings))
        except WaypathError:
            self._forget(execution_id)
            raise

    def cancel(self, execution: Execution, reason: str) -> None:
        """Stops an execution that nobody waits for any more; one that is over is left as it is."""
        self.handle(c.ExecutionCancelled(execution.execution_id, reason))

    def release(self, owner: str, reason: str) -> None:
        """Cancels what the owner still has and frees its objects."""
        self.handle(c.OwnerReleased(owner, reason))
        self._spans.pop(owner, None)

    def take_spans(self, owner: str) -> list[PhaseSpan]:
        """Returns the spans that came for the owner's executions since the last call."""
        return list(self._spans.pop(owner, ()))

    def pool_ready(self, pool: str, member: str, incarnation: str) -> None:
        """Lets the scheduler place nodes of `pool` on `member`, unless that very process is gone meanwhile."""
        if self.incarnation(member) == incarnation:
            self.handle(c.PoolMemberReady(pool, member))

    def ready_members(self, pool: str) -> tuple[str, ...]:
        """The members of a pool that may be given work now."""
        return self.scheduler.resources.ready_members(pool)

    def incarnation(self, worker: str) -> str:
        """Which process has that name now; "" where none has."""
        link = self.connections.get(worker)
        return str(link.register.incarnation) if link is not None else ""

    def host(self, worker: str) -> str:
        """On which machine a worker runs; its own name where it is not there."""
        link = self.connections.get(worker)
        return str(link.register.host_id or worker) if link is not None else worker

    def workers(self, role: str) -> list[str]:
        """Names of the live workers of a role, sorted."""
        return sorted(name for name, link in self.connections.items() if link.register.role == role)

    def stays(self, worker: str, incarnation: str) -> bool:
        """Is that very process there, and not on its way out?"""
        link = self.connections.get(worker)
        return link is not None and link.register.incarnation == incarnation and not link.told_to_leave

    @contextlib.contextmanager
    def watch_workers(self, joined: JoinedHook, lost: LostHook) -> Iterator[None]:
        """Calls `joined(worker, role)` and `lost(worker, role, cause)` while the context is open."""
        hook = (joined, lost)
        self._hooks.append(hook)
        try:
            yield
        finally:
            self._hooks.remove(hook)

    def waits(self, execution: Execution) -> list[str]:
        """Says what an execution waits for, one sentence a node."""
        found: list[str] = []
        for item in self.scheduler.describe()["executions"]:
            if item["execution_id"] == execution.execution_id:
                found.extend(item["waits"])
        return found

    def fence(self, worker: str, incarnation: str, reason: str) -> None:
        """Tells that very process to leave, if it is still there; its supervisor starts it anew."""
        link = self.connections.get(worker)
        if link is not None and link.register.incarnation == incarnation:
            self.log(f"fencing {worker}: {reason}")
            link.shut_down(reason)

    async def wait_for_workers(self, timeout_s: float) -> None:
        """Waits until every slice of the cluster is up; raises DeadlineError naming the workers that are missing."""
        resources = self.scheduler.resources

        def missing() -> list[str]:
            return [worker for name in resources.slices for worker in resources.missing(name)]

        try:
            async with self._changed, asyncio.timeout(timeout_s):
                await self._changed.wait_for(lambda: not missing())
        except TimeoutError:
            raise DeadlineError(
                f"workers {', '.join(missing())} did not register within {timeout_s:g} s",
                remedy="look into their logs",
            ) from None

    def log(self, text: str) -> None:
        """Writes a line to the controller's log."""
        log.info(text)

    # The workers' side

    async def Attach(
        self,
        request_iterator: AsyncIterator[pb.WorkerMessage],
        context: grpc.aio.ServicerContext[pb.WorkerMessage, pb.ControllerMessage],
    ) -> AsyncIterator[pb.ControllerMessage]:
        """Serves one worker's stream from Register to its end."""
        link = await self._admit(request_iterator, context)
        reader = asyncio.create_task(self._read(link, request_iterator), name=f"read {link.worker}")
        try:
            async for message in link.outgoing():
                yield message
        finally:
            reader.cancel()
            cause = "its control stream ended"
            if link.told_to_leave:
                cause = f"it was told to leave: {link.told_to_leave}"
            if reader.done() and not reader.cancelled() and (error := reader.exception()) is not None:
                cause = str(error)
            self._lose(link, cause)

    async def FetchFunction(self, request: pb.FetchFunctionRequest, context: Any) -> AsyncIterator[pb.FunctionChunk]:
        """Streams an uploaded function to a worker."""
        try:
            for data in self.functions.chunks(request.digest):
                yield pb.FunctionChunk(data=data)
        except WaypathError as error:
            context.set_trailing_metadata(trailer(error))
            await context.abort(error.status, str(error))

    async def _admit(self, messages: AsyncIterator[pb.WorkerMessage], context: Any) -> Connection:
        link: Connection | None = None
        try:
            first = await anext(aiter(messages), None)
            if first is None or first.WhichOneof("kind") != "register":
                raise ProtocolError("the first message of a worker must be Register")
            register = first.register
            ours = version.versions()
            version.check(register.versions, ours, f"worker {register.worker}")
            link = Connection(register, self.epoch)
            if register.worker not in self.connections:  # else the scheduler refuses the name
                self.connections[register.worker] = link
            link.send(pb.ControllerMessage(welcome=pb.Welcome(cluster_id=self.cluster_id, versions=ours)))
            self.handle(
                c.WorkerJoined(
                    worker=register.worker,
                    incarnation=register.incarnation,
                    world=register.world,
                    process_index=register.process_index,
                    process_count=max(1, register.process_count),
                    devices=tuple(c.Device(d.local_id, d.kind, d.memory_bytes) for d in register.devices),
                    platform=register.versions.platform,
                    catalogue=catalogue(register),
                )
            )
        except WaypathError as error:
            self.log(f"refused a worker: {error}")
            if link is not None and self.connections.get(link.worker) is link:
                del self.connections[link.worker]
            context.set_trailing_metadata(trailer(error))
            await context.abort(error.status, str(error))
            raise
        self._arrived[link.worker] = link
        self._tell_peers_soon()
        self.log(f"{link.worker} joined (pid {register.pid}, incarnation {register.incarnation})")
        for joined, _ in list(self._hooks):
            joined(link.worker, register.role)
        await self._notify()
        return link

    async def _read(self, link: Connection, messages: AsyncIterator[pb.WorkerMessage]) -> None:
        try:
            async for message in messages:
                link.heard_s = time.monotonic()
                kind = message.WhichOneof("kind")
                if kind == "node":
                    self._node_event(link, message.node)
                elif kind == "heartbeat":
                    link.heartbeat = message.heartbeat
                    if link.has_handled_all(message):
                        self.handle(c.WorkerCounted(link.worker, message.heartbeat.nodes))
                elif kind == "ack":
                    self.handle(c.Acked(link.worker, message.ack.sequence))
                elif kind == "nack":
                    raise ProtocolError(
                        f"worker {link.worker} refused message {message.nack.found} (expected {message.nack.expected}): "
                        f"{message.nack.reason}"
                    )
        finally:
            link.close()

    def _node_event(self, link: Connection, event: pb.NodeEvent) -> None:
        owner = self._owners.get(event.execution_id)
        if owner is not None:
            spans = self._spans.setdefault(owner, deque(maxlen=MAX_SPANS))
            spans.extend(phase_spans(link.worker, event))
        translated = node_event(link.worker, link.register.incarnation, event)
        if translated is None:
            return
        if isinstance(translated, c.NodeFailed) and self._may_be_a_symptom(link, translated):
            timer = asyncio.get_running_loop().call_later(WORLD_ERROR_DELAY_S, self.handle, translated)
            link.doubtful = [item for item in link.doubtful if item[0].when() > time.monotonic()]
            link.doubtful.append((timer, translated))
        else:
            self.handle(translated)

    @staticmethod
    def _may_be_a_symptom(link: Connection, event: c.NodeFailed) -> bool:
        """A collective or a pull whose peer died fails too, and may be heard of first: the peer's loss is the cause to tell."""
        collective = link.register.process_count > 1 and type(event.error) is RemoteError
        return collective or isinstance(event.error, TransferError)

    def _lose(self, link: Connection, cause: str) -> None:
        link.close()
        if self.connections.get(link.worker) is not link:
            return
        del self.connections[link.worker]
        self.log(f"{link.worker} lost: {cause}")
        for (
            timer,
            event,
        ) in link.doubtful:  # no peer was lost before this one: what it told is the cause, and why it left
            timer.cancel()
            self.handle(event)
        try:
            self.handle(c.WorkerLost(link.worker, cause, link.register.incarnation))
        finally:
            self._arrived.pop(link.worker, None)
            self._departed[link.worker] = None
            self._tell_peers_soon()
            for _, lost in list(self._hooks):
                lost(link.worker, link.register.role, cause)

    async def watch_liveness(self) -> None:
        """Runs for ever: a worker that is silent for `heartbeat_timeout_s` is lost."""
        while True:
            await asyncio.sleep(LIVENESS_PERIOD_S)
            now_s = time.monotonic()
            for link in list(self.connections.values()):
                silent_s = now_s - link.heard_s
                if silent_s > self._heartbeat_timeout_s:
                    self._lose_silent(link, silent_s)

    def _lose_silent(self, link: Connection, silent_s: float) -> None:
        try:
            self._lose(link, f"no heartbeat for {silent_s:.0f} s")
        except Exception:  # whatever goes wrong with one worker, the others are watched on
            log.exception("losing %s", link.worker)

    async def close(self, reason: str) -> None:
        """Tells every worker to leave and ends their streams."""
        for link in list(self.connections.values()):
            link.shut_down(reason)
            link.close()

    # The scheduler

    def handle(self, event: c.Event) -> None:
        """Applies an event and carries out all of its commands; a worker that cannot be told is lost after them."""
        for command in self.scheduler.handle(event):
            if isinstance(command, c.WorkerCommand):
                link = self.connections.get(command.worker)
                if link is not None:
                    link.send(command_message(command))
            elif isinstance(command, c.NodeCompleted):
                execution = self._executions.get(command.execution_id)
                if execution is not None:
                    execution.node_completed(command.node_id, command.results)
            elif isinstance(command, c.ExecutionCompleted):
                execution = self._executions.get(command.execution_id)
                if execution is not None:
                    execution.completed(command)
                self._forget(command.execution_id)
        self._lose_broken()

    def _lose_broken(self) -> None:
        for link in list(self.connections.values()):
            if link.broken:
                self._lose(link, link.broken)

    def _forget(self, execution_id: str) -> None:
        self._executions.pop(execution_id, None)
        self._owners.pop(execution_id, None)

    def _tell_peers_soon(self) -> None:
        """Changes of the table are told together: at once in a small cluster, later where many workers would hear of each."""
        if self._telling is None:
            delay_s = min(MAX_PEERS_DELAY_S, PEERS_DELAY_S * len(self.connections))
            self._telling = asyncio.get_running_loop().call_later(delay_s, self._tell_peers)

    def _tell_peers(self) -> None:
        """Who arrived hears of everybody, everybody else of who came and went."""
        self._telling = None
        arrived, self._arrived = self._arrived, {}
        departed, self._departed = self._departed, {}
        self._untold |= arrived
        news = pb.Peers(peers=[_peer(link) for link in arrived.values()], gone=departed)
        for link in list(self.connections.values()):
            if self._untold.get(link.worker) is not link:
                link.send(pb.ControllerMessage(peers=news))
        self._lose_broken()
        self._tell_all()

    def _tell_all(self) -> None:
        """Tells the whole table to some that arrived, and to more when the loop comes round: each copy is as long as the cluster."""
        everybody = pb.Peers(peers=[_peer(link) for link in self.connections.values()]) if self._untold else None
        for _ in range(min(TOLD_AT_ONCE, len(self._untold))):
            worker, link = self._untold.popitem()
            if self.connections.get(worker) is link:
                link.send(pb.ControllerMessage(peers=everybody))
        self._lose_broken()
        if self._untold:
            asyncio.get_running_loop().call_soon(self._tell_all)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _peer(link: Connection) -> pb.Peer:
    register = link.register
    return pb.Peer(
        worker=register.worker,
        incarnation=register.incarnation,
        data_addresses=register.data_addresses,
        host_id=register.host_id,
    )
