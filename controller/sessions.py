"""Client sessions: programs from elsewhere, each with its own slices, objects and share of the workers.

A session is one stream. What it asks for is handled in order; executions answer with events, several in a message. Whatever a
session owns (executions, objects, slices) is released when its stream ends, or when nothing was heard of it for its lease.

Must not know what programs compute. Called by the client service; talks to the scheduler through the runtime.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from waypath.controller import commands as c
from waypath.controller.allocation import Grant
from waypath.controller.graph import Program
from waypath.controller.runtime import Runtime
from waypath.controller.sequences import fuse
from waypath.proto import client_pb2 as pb
from waypath.proto.codecs import dump_json, load_json
from waypath.proto.errors import (
    DeadlineError,
    GraphError,
    NotFoundError,
    ProtocolError,
    WaypathError,
    to_message,
)

DEFAULT_LEASE_S = 10.0
MAX_LEASE_S = 3600.0
MAX_PROGRAMS = 4096

log = logging.getLogger("waypath.controller")


class Session:
    """One client's session. `messages` in, replies out of `replies`."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.session_id = f"s{secrets.token_hex(4)}"
        self.lease_s = DEFAULT_LEASE_S
        self._programs: dict[str, Program] = {}
        self._out: asyncio.Queue[pb.SessionReply | None] = asyncio.Queue()
        self._events: list[pb.ExecutionEvent] = []
        self._heard_s = time.monotonic()
        self._slices = 0
        self._end = "the client's stream ended"

    async def replies(self, messages: AsyncIterator[pb.SessionRequest]) -> AsyncGenerator[pb.SessionReply, None]:
        """Serves the stream from its first message, `open`, to its end; raises WaypathError where it cannot be opened."""
        first = await anext(aiter(messages), None)
        if first is None or first.WhichOneof("kind") != "open":
            raise ProtocolError("the first message of a session must be open")
        self._open(first)
        reader = asyncio.create_task(self._read(messages), name=f"session {self.session_id}")
        lease = asyncio.create_task(self._watch(), name=f"lease {self.session_id}")
        try:
            while (reply := await self._out.get()) is not None:
                yield reply
        finally:
            for task in (reader, lease):
                task.cancel()
            log.info("%s is over: %s", self.session_id, self._end)
            self._runtime.release(self.session_id, self._end)

    def _open(self, message: pb.SessionRequest) -> None:
        lease_s = message.open.lease_s or DEFAULT_LEASE_S
        if not 0.0 < lease_s <= MAX_LEASE_S:
            raise ProtocolError(f"lease_s: expected more than 0 and at most {MAX_LEASE_S:g}, found {lease_s}")
        self.lease_s = lease_s
        self._runtime.handle(c.OwnerJoined(self.session_id, message.open.weight or 1.0))
        log.info("%s of %s, weight %g", self.session_id, message.open.name or "a client", message.open.weight or 1.0)
        opened = pb.SessionOpened(session=self.session_id, lease_s=self.lease_s)
        self._out.put_nowait(pb.SessionReply(request=message.request, opened=opened))

    async def _read(self, messages: AsyncIterator[pb.SessionRequest]) -> None:
        try:
            async for message in messages:
                self._heard_s = time.monotonic()
                self._handle(message)
        finally:
            self._out.put_nowait(None)

    async def _watch(self) -> None:
        """Ends the session when its client is silent for longer than its lease."""
        while (left := self._heard_s + self.lease_s - time.monotonic()) > 0:
            await asyncio.sleep(left)
        self._end = str(DeadlineError(f"its client was silent for {self.lease_s:g} s"))
        self._out.put_nowait(None)

    def _handle(self, message: pb.SessionRequest) -> None:
        kind = message.WhichOneof("kind")
        if kind == "submit":
            self._submit(message.submit)
            return
        reply = pb.SessionReply(request=message.request, done=pb.Done())
        try:
            if kind == "install":
                reply = pb.SessionReply(request=message.request, installed=self._install(message.install))
            elif kind == "slice":
                reply = pb.SessionReply(request=message.request, slice=self._slice(message.slice))
            elif kind == "release_slice":
                self._runtime.handle(c.SliceReleased(message.release_slice.name, self.session_id))
            elif kind == "cancel":
                self._check_id(message.cancel.execution_id)
                reason = message.cancel.reason or "its client cancelled it"
                self._runtime.handle(c.ExecutionCancelled(message.cancel.execution_id, reason))
            elif kind == "delete":
                self._runtime.handle(c.ObjectsDeleted(self.session_id, tuple(message.delete.object_ids)))
            elif kind != "alive":
                raise ProtocolError(f"a message of kind {kind!r}")
        except WaypathError as error:
            reply = pb.SessionReply(request=message.request, error=to_message(error))
        if message.request:
            self._out.put_nowait(reply)

    def _install(self, message: pb.InstallProgram) -> pb.Installed:
        program = fuse(Program.from_json(load_json(message.program_json)))
        if program.program_id not in self._programs:
            if len(self._programs) >= MAX_PROGRAMS:
                raise GraphError(
                    f"{MAX_PROGRAMS:,} programs are installed already",
                    remedy="Call one with other refs, or open another session",
                )
            self._runtime.scheduler.check(program, self.session_id)
            self._programs[program.program_id] = program
        return pb.Installed(program_id=program.program_id)

    def _slice(self, message: pb.RequestSlice) -> pb.SliceGrant:
        self._slices += 1
        name = message.name or f"{self.session_id}-slice-{self._slices}"
        self._runtime.handle(
            c.SliceRequested(
                name=name,
                owner=self.session_id,
                axes=tuple(message.axes),
                sizes=tuple(message.sizes),
                platform=message.kind,
                world=message.world,
                strategy=message.strategy or "pack",
                exclusive=message.exclusive,
                like=message.workers_of,
            )
        )
        return self._grant(self._runtime.scheduler.resources.grants[name])

    def _grant(self, grant: Grant) -> pb.SliceGrant:
        links = self._runtime.connections
        return pb.SliceGrant(
            name=grant.name,
            axes=grant.axes,
            sizes=grant.sizes,
            devices=[pb.SliceDevice(worker=worker, local_id=local_id) for worker, local_id in grant.devices],
            workers=[
                pb.SliceWorker(name=worker, data_addresses=links[worker].register.data_addresses, process_index=index)
                for worker, index in zip(grant.workers, grant.indices, strict=True)
            ],
            platform=grant.platform,
        )

    def _check_id(self, execution_id: str) -> None:
        if not execution_id.startswith(f"{self.session_id}-") or "/" in execution_id:
            raise NotFoundError(f"execution {execution_id!r} is not one of session {self.session_id}")

    def _submit(self, message: pb.Submit) -> None:
        """Starts an execution; one that is refused has failed, as a value."""
        execution_id = message.execution_id
        try:
            self._check_id(execution_id)
            program = self._programs.get(message.program_id)
            if program is None:
                raise GraphError(f"no program {message.program_id!r} is installed", where=f"execution {execution_id}")
            args, bindings = load_json(message.args_json), dict(message.bindings)
            self._runtime.start(execution_id, program, args, self.session_id, bindings, self)
        except WaypathError as error:
            self._event(pb.ExecutionEvent(execution_id=execution_id, outcome="failed", error=to_message(error)))

    # What the runtime tells

    def node_completed(self, node_id: str, results: Mapping[str, Mapping[str, Any]]) -> None:
        """A session hears of whole executions."""

    def completed(self, command: c.ExecutionCompleted) -> None:
        """An execution is over."""
        event = pb.ExecutionEvent(execution_id=command.execution_id, outcome=command.outcome)
        if command.error is not None:
            event.error.CopyFrom(to_message(command.error))
        found = {node: kept for node, by in command.results.items() if (kept := {w: r for w, r in by.items() if r})}
        if found:
            event.results_json = dump_json(found)
        self._event(event)

    def _event(self, event: pb.ExecutionEvent) -> None:
        """Events of one turn of the loop share a message."""
        if not self._events:
            asyncio.get_running_loop().call_soon(self._flush)
        self._events.append(event)

    def _flush(self) -> None:
        events, self._events = self._events, []
        self._out.put_nowait(pb.SessionReply(events=pb.ExecutionEvents(events=events)))
