"""The client's end of a session: one stream, requests out, answers and events in.

Owns the reader thread, the lease's heartbeat and what is known of executions that are not over. Must not know arrays or programs.
"""

from __future__ import annotations

import itertools
import json
import queue
import threading
from collections.abc import Iterator
from typing import Any

import grpc

from waypath.proto import client_pb2 as pb
from waypath.proto.client_pb2_grpc import ClientStub
from waypath.proto.errors import (
    CancelledError,
    DeadlineError,
    UnavailableError,
    WaypathError,
    from_message,
    from_rpc_error,
)

REPLY_TIMEOUT_S = 60.0
MAX_UNFINISHED = 200
"""Executions that a session may have under way; the next submission waits. Below the controller's queue of one owner."""


class Pending:
    """What is known of one execution. `wait` blocks until it is over."""

    def __init__(self, execution_id: str) -> None:
        self.execution_id = execution_id
        self.error: WaypathError | None = None
        self.results: dict[str, dict[str, Any]] = {}
        self._over = threading.Event()

    def wait(self, timeout_s: float | None) -> None:
        """Returns when the execution is done; raises what ended it, or DeadlineError."""
        if not self._over.wait(timeout_s):
            raise DeadlineError(f"execution {self.execution_id} is not done after {timeout_s:g} s")
        if self.error is not None:
            raise self.error

    def end(self, error: WaypathError | None, results: dict[str, dict[str, Any]] | None = None) -> None:
        """It is over."""
        self.error, self.results = error, results or {}
        self._over.set()


class SessionStream:
    """An open session. Safe to use from every thread; what one thread sends arrives in its order."""

    def __init__(
        self,
        stub: ClientStub,
        metadata: tuple[tuple[str, str], ...],
        address: str,
        name: str,
        weight: float,
        lease_s: float,
    ) -> None:
        self._address = address
        self._numbers = itertools.count(1)
        self._out: queue.SimpleQueue[pb.SessionRequest | None] = queue.SimpleQueue()
        self._answers: dict[int, queue.SimpleQueue[pb.SessionReply | WaypathError]] = {}
        self._pending: dict[str, Pending] = {}
        self._room = threading.BoundedSemaphore(MAX_UNFINISHED)
        self._lock = threading.Lock()
        self._broken: WaypathError | None = None
        self._closed = threading.Event()
        self._call: Any = stub.Session(self._outgoing(), metadata=metadata)
        threading.Thread(target=self._read, name="waypath-session", daemon=True).start()
        reply = self.ask(pb.SessionRequest(open=pb.OpenSession(name=name, weight=weight, lease_s=lease_s)))
        self.session_id: str = reply.opened.session
        self._lease_s = float(reply.opened.lease_s)
        threading.Thread(target=self._beat, name="waypath-lease", daemon=True).start()

    def ask(self, message: pb.SessionRequest, timeout_s: float = REPLY_TIMEOUT_S) -> pb.SessionReply:
        """Sends a request and waits for its answer; raises the controller's error."""
        answer: queue.SimpleQueue[pb.SessionReply | WaypathError] = queue.SimpleQueue()
        message.request = next(self._numbers)
        with self._lock:
            self._check()
            self._answers[message.request] = answer
            self._out.put(message)
        try:
            reply = answer.get(timeout=timeout_s)
        except queue.Empty:
            kind = message.WhichOneof("kind")
            raise DeadlineError(f"the controller did not answer {kind} within {timeout_s:g} s") from None
        finally:
            self._answers.pop(message.request, None)
        if isinstance(reply, WaypathError):
            raise reply
        if reply.WhichOneof("kind") == "error":
            raise from_message(reply.error)
        return reply

    def tell(self, message: pb.SessionRequest) -> None:
        """Sends a message that has no answer; nothing happens on a session that is over."""
        with self._lock:
            if self._broken is None:
                self._out.put(message)

    def submit(self, message: pb.Submit) -> Pending:
        """Starts an execution; returns at once, unless `MAX_UNFINISHED` are under way."""
        while not self._room.acquire(timeout=1.0):
            with self._lock:
                self._check()
        pending = Pending(message.execution_id)
        with self._lock:
            try:
                self._check()
            except WaypathError:
                self._room.release()
                raise
            self._pending[message.execution_id] = pending
            self._out.put(pb.SessionRequest(submit=message))
        return pending

    def new_execution_id(self) -> str:
        """An id that no execution of the cluster has."""
        return f"{self.session_id}-{next(self._numbers)}"

    def close(self) -> None:
        """Ends the session: the controller releases all it owned."""
        self._closed.set()
        self._out.put(None)
        self._break(CancelledError("the session was closed"))

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _outgoing(self) -> Iterator[pb.SessionRequest]:
        while (message := self._out.get()) is not None:
            yield message

    def _beat(self) -> None:
        while not self._closed.wait(self._lease_s / 3):
            self.tell(pb.SessionRequest(alive=pb.KeepAlive()))

    def _read(self) -> None:
        error: WaypathError = UnavailableError(f"the controller at {self._address} ended the session")
        try:
            for reply in self._call:
                if reply.WhichOneof("kind") == "events":
                    for event in reply.events.events:
                        self._over(event)
                elif (answer := self._answers.get(reply.request)) is not None:
                    answer.put(reply)
        except grpc.RpcError as raised:
            error = from_rpc_error(raised, f"go on with the session at {self._address}")
        self._break(error)

    def _over(self, event: pb.ExecutionEvent) -> None:
        with self._lock:
            pending = self._pending.pop(event.execution_id, None)
        if pending is not None:
            self._room.release()
            error = from_message(event.error) if event.HasField("error") else None
            pending.end(error, json.loads(event.results_json) if event.results_json else None)

    def _break(self, error: WaypathError) -> None:
        """Nothing more will come: whoever waits gets the reason."""
        self._closed.set()
        with self._lock:
            if self._broken is not None:
                return
            self._broken = error
            left, self._pending = list(self._pending.values()), {}
            answers = list(self._answers.values())
        self._out.put(None)
        for pending in left:
            pending.end(error)
        for answer in answers:
            answer.put(error)
