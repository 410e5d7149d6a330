"""The worker's end of the control road: messages in, node events and heartbeats out.

Owns: the control stream and its rules (handshake, epoch, sequence, acknowledgements, re-dialling), and the
decision to leave. Must not know gRPC (a `Transport` carries the messages), services or jax. Called by `main`,
on the network loop; `run` returns the process's exit code.

Delivery. The first message of a stream is Register, the first answer Welcome; its epoch and sequence start
the count. Afterwards each message has the sequence after the last one's: one that was seen is answered again
and not handled again, one that leaves a gap is refused (Nack) and not handled, one of an older epoch is
refused. When a stream ends the controller counts this worker as lost and forgets what it held, so the worker
drops its executions and objects and registers anew, as another incarnation; without a controller for
`grace_s` it leaves. A member of a world of several processes leaves at once, because the world restarts as a
whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from waypath.proto import version
from waypath.proto import worker_pb2 as pb
from waypath.proto.errors import (
    NameTakenError,
    ProtocolError,
    UnavailableError,
    UserError,
    WaypathError,
)
from waypath.workers.executions import Executions
from waypath.workers.peers import Peers

__all__ = ["EXIT_OK", "EXIT_ORPHANED", "EXIT_REFUSED", "EXIT_STUCK", "Runtime", "Transport"]

EXIT_OK = 0
EXIT_REFUSED = 2  # the controller will never take this worker; trying again does not help
EXIT_ORPHANED = 69  # no controller, or none that takes this name yet: trying again may help
EXIT_STUCK = 70  # the JAX thread hangs, or the world is broken

HEARTBEAT_S = 1.0
ACK_DELAY_S = 0.02
NAME_TAKEN_S = 10.0  # a predecessor that was killed may still be counted as alive for so long
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
FLUSH_S = 1.0

log = logging.getLogger("waypath.worker")


class Transport(Protocol):
    """Carries one control stream. The whole seam between this file and gRPC; tests put a fake here."""

    def attach(self, outgoing: AsyncIterator[pb.WorkerMessage]) -> AsyncIterator[pb.ControllerMessage]:
        """Send `outgoing` to the controller and yield its messages; raises WaypathError when the stream
        breaks.
        """
        ...


class Runtime:
    """One worker's command loop.

    `register` makes the Register message (without incarnation), `status` fills a heartbeat with
    what the runtime does not know (memory, bytes). `executions` and the runtime know each other: pass `emit`
    and `leave`.
    """

    def __init__(
        self,
        register: pb.Register,
        transport: Transport,
        peers: Peers,
        status: Callable[[pb.Heartbeat], None],
        *,
        grace_s: float = 5.0,
    ) -> None:
        self._register = register
        self._transport = transport
        self._peers = peers
        self._status = status
        self._grace_s = grace_s
        self._executions: Executions | None = None
        self._outbox: asyncio.Queue[pb.WorkerMessage | None] = asyncio.Queue()
        self._leaving: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._leave_grace_s = 1.0
        self._cluster_id = ""
        self._epoch = 0
        self._last = 0  # highest sequence handled
        self._ack_timer: asyncio.TimerHandle | None = None
        self._attached_at: float | None = None

    def serve(self, executions: Executions) -> None:
        """Name what handles the commands; before `run`."""
        self._executions = executions

    def emit(self, event: pb.NodeEvent) -> None:
        """Send a node's outcome."""
        self._outbox.put_nowait(pb.WorkerMessage(node=event))

    def leave(self, code: int, reason: str) -> None:
        """End `run` with this exit code after what is queued has been sent. The first call counts."""
        if not self._leaving.done():
            log.log(logging.INFO if code == EXIT_OK else logging.ERROR, "leaving: %s", reason)
            self._leaving.set_result(code)

    async def run(self) -> int:
        """Serve until the controller or `leave` says stop; returns the exit code."""
        heartbeats = asyncio.create_task(self._heartbeats(), name="heartbeats")
        dialling_since = time.monotonic()
        pause = FIRST_PAUSE_S
        try:
            while True:
                self._attached_at = None
                try:
                    await self._attach()
                    error: WaypathError = UnavailableError("the controller ended the stream")
                except WaypathError as failed:
                    error = failed
                if self._leaving.done():
                    return self._leaving.result()
                if isinstance(error, UserError) and not isinstance(error, NameTakenError):
                    self.leave(EXIT_REFUSED, f"the controller refused this worker: {error}")
                    return EXIT_REFUSED
                if self._attached_at is not None:
                    log.warning("lost the controller: %s", error)
                    self._handler.drop_all("the controller's stream ended")
                    dialling_since, pause = time.monotonic(), FIRST_PAUSE_S
                patience = NAME_TAKEN_S if isinstance(error, NameTakenError) else self._grace_s
                in_world = self._attached_at is not None and self._register.process_count > 1
                if in_world or time.monotonic() - dialling_since >= patience:
                    self.leave(EXIT_ORPHANED, _why_alone(error, in_world, time.monotonic() - dialling_since))
                    return EXIT_ORPHANED
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        return await asyncio.shield(self._leaving)
                pause = min(2 * pause, LONGEST_PAUSE_S)
        finally:
            heartbeats.cancel()

    async def stop(self) -> None:
        """Give the services time to close, as long as the controller's Shutdown allowed."""
        await self._handler.close(self._leave_grace_s)

    @property
    def _handler(self) -> Executions:
        if self._executions is None:
            raise RuntimeError("Runtime.serve was not called")
        return self._executions

    async def _attach(self) -> None:
        """One stream, from Register to its end or to `leave`."""
        self._outbox = asyncio.Queue()
        self._epoch = self._last = 0
        self._register.incarnation = secrets.token_hex(8)
        reader = asyncio.create_task(self._read(self._transport.attach(self._outgoing(self._outbox))), name="control")
        try:
            ends: list[asyncio.Future[Any]] = [reader, self._leaving]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not reader.done():
                self._outbox.put_nowait(None)
                await asyncio.wait([reader], timeout=FLUSH_S)
            if reader.done():
                reader.result()
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _outgoing(self, outbox: asyncio.Queue[pb.WorkerMessage | None]) -> AsyncIterator[pb.WorkerMessage]:
        yield pb.WorkerMessage(register=self._register)
        while (message := await outbox.get()) is not None:
            message.acknowledged = self._last
            yield message

    async def _read(self, messages: AsyncIterator[pb.ControllerMessage]) -> None:
        async for message in messages:
            self._receive(message)

    def _receive(self, message: pb.ControllerMessage) -> None:
        kind = message.WhichOneof("kind")
        if self._attached_at is None:
            if kind != "welcome":
                raise ProtocolError(f"the controller's first message is {kind}, expected welcome")
            self._welcome(message)
            return
        if message.epoch < self._epoch:
            self._refuse(message, f"epoch {message.epoch} is older than {self._epoch}")
            return
        if message.epoch > self._epoch:
            raise ProtocolError(f"epoch {message.epoch} began in a stream of epoch {self._epoch}")
        if message.sequence > self._last + 1:
            self._refuse(message, "a message is missing")
            return
        if message.sequence <= self._last:
            self._outbox.put_nowait(pb.WorkerMessage(ack=pb.Ack(sequence=message.sequence)))
            if kind == "execute":
                self._handler.answer(message.execute)
            return
        self._last = message.sequence
        self._handle(kind, message)
        if self._ack_timer is None:
            self._ack_timer = asyncio.get_running_loop().call_later(ACK_DELAY_S, self._ack)

    def _ack(self) -> None:
        """One Ack for all that was handled within ACK_DELAY_S: a message costs more than most commands."""
        self._ack_timer = None
        self._outbox.put_nowait(pb.WorkerMessage(ack=pb.Ack(sequence=self._last)))

    def _handle(self, kind: str | None, message: pb.ControllerMessage) -> None:
        for release in message.releases:
            self._handler.release(release)
        if kind == "execute":
            self._handler.execute(message.execute)
        elif kind == "install":
            self._handler.install(message.install)
        elif kind == "ask":
            self._handler.tell(message.ask)
        elif kind == "relocate":
            self._handler.relocate(message.relocate)
        elif kind == "cancel":
            self._handler.cancel(message.cancel)
        elif kind == "peers":
            self._peers.update(message.peers.peers, message.peers.gone)
        elif kind == "shutdown":
            self._leave_grace_s = message.shutdown.grace_s or self._leave_grace_s
            self.leave(EXIT_OK, f"told to shut down: {message.shutdown.reason}")
        elif kind == "abort_world":
            self.leave(EXIT_STUCK, f"the world is broken: {message.abort_world.reason}")
        elif kind is not None or not message.releases:
            raise ProtocolError(f"a message of kind {kind!r} at sequence {message.sequence}")

    def _welcome(self, message: pb.ControllerMessage) -> None:
        version.check(message.welcome.versions, self._register.versions, "the controller")
        self._cluster_id = message.welcome.cluster_id
        self._epoch, self._last = message.epoch, message.sequence
        self._attached_at = time.monotonic()
        self._peers.clear()
        log.info("%s joined cluster %s", self._register.worker, self._cluster_id)

    def _refuse(self, message: pb.ControllerMessage, reason: str) -> None:
        nack = pb.Nack(expected=self._last + 1, found=message.sequence, reason=reason)
        self._outbox.put_nowait(pb.WorkerMessage(nack=nack))

    async def _heartbeats(self) -> None:
        while True:
            if self._attached_at is not None:
                beat = pb.Heartbeat(
                    activity=self._handler.activity,
                    waits=self._handler.waits()[:20],
                    nodes=len(self._handler),
                )
                self._status(beat)
                self._outbox.put_nowait(pb.WorkerMessage(heartbeat=beat))
            await asyncio.sleep(HEARTBEAT_S)


def _why_alone(error: WaypathError, in_world: bool, waited_s: float) -> str:
    """Why a worker gives up on the controller, after how long."""
    if in_world:
        return f"lost the controller, and a world restarts as a whole: {error}"
    if isinstance(error, NameTakenError):
        return f"the controller still counts another worker of this name as alive, after {waited_s:.1f} s: {error}"
    return f"no controller for {waited_s:.1f} s: {error}"
