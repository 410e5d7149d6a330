"""Running the nodes that the controller assigns to this worker.

Owns: installed programs, the executions under way, their inputs, deadlines and outcomes. Must not know gRPC,
the controller's stream or jax. Called by the runtime, one message at a time; says what came out through
`emit`. Network loop only.

How a node travels: *waiting* for its inputs (shared by all consumers on this worker) and, on the jax lane,
for its turn (strictly the order in which nodes were assigned: the gang order) → *running* on its lane → one
NodeEvent. Its deadline counts from the assignment and covers all of that. A node that overruns on the jax
lane is taken for a hung collective: it is reported and `abort` ends the process, because a thread inside XLA
cannot be stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from waypath.proto import codecs, common_pb2
from waypath.proto import worker_pb2 as pb
from waypath.proto.codecs import Bundle
from waypath.proto.errors import DeadlineError, LocalError, ProtocolError, from_message, to_message
from waypath.proto.names import object_id
from waypath.workers.inputs import Inputs
from waypath.workers.lanes import Lanes
from waypath.workers.options import options_of
from waypath.workers.service import Call, DivergedError, Lane, ServiceContext, find_service, lane_of
from waypath.workers.store import Held

__all__ = ["Executions"]

ON_DEVICE = "function"  # the service that runs sequences and holds arrays
NO_DEADLINE_S = 7 * 24 * 3600.0

_STATES = {"finished": pb.NodeEvent.FINISHED, "failed": pb.NodeEvent.FAILED, "cancelled": pb.NodeEvent.CANCELLED}


@dataclass(frozen=True)
class _Program:
    """An installed fragment of a program."""

    nodes: dict[str, pb.Node]
    slices: dict[str, pb.MeshSlice]


@dataclass(eq=False)
class _Node:
    """One attempt at one node."""

    spec: pb.Node
    attempt: int
    lane: Lane
    method: Callable[[Call], Any]
    call: Call
    before: asyncio.Event | None  # the end of the jax-lane node ahead of this one
    prepare: Callable[[Call], Awaitable[None]] | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)
    stage: str = "inputs"  # inputs, turn, running
    cancelled: str = ""  # why
    task: asyncio.Task[None] | None = None

    given_up: asyncio.Event = field(default_factory=asyncio.Event)  # nobody wants its result any more
    gang: bool = False  # part of a computation of several processes: it runs whatever happens, or its peers hang

    @property
    def reader(self) -> str:
        return f"{self.spec.node_id}#{self.attempt}"

    @property
    def title(self) -> str:
        what = f"{self.spec.service}.{self.spec.method}" if self.spec.service else self.spec.kind
        return f"{what} ({self.call.execution_id}/{self.spec.node_id})"

    @property
    def on_device(self) -> bool:
        """Does it work on arrays where they lie? Then nothing is fetched for it ahead."""
        kind = self.spec.kind
        return kind == "sequence" or (kind == "transfer" and len(self.spec.takes) > 0) or _gives_arrays(self.spec)


@dataclass(eq=False)
class _Execution:
    execution_id: str
    inputs: Inputs
    nodes: dict[str, _Node] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    events: dict[str, pb.NodeEvent] = field(default_factory=dict)  # what to answer when asked again
    released: bool = False


class Executions:
    """The nodes under way on one worker.

    `emit` takes each NodeEvent; `abort(reason)` is called when only the end of the process helps;
    `new_inputs(execution_id)` makes the inputs of one execution.
    """

    def __init__(
        self,
        context: ServiceContext,
        lanes: Lanes,
        new_inputs: Callable[[str], Inputs],
        emit: Callable[[pb.NodeEvent], None],
        abort: Callable[[str], None],
    ) -> None:
        self._context = context
        self._lanes = lanes
        self._new_inputs = new_inputs
        self._emit = emit
        self._abort = abort
        self._programs: dict[str, _Program] = {}
        self._executions: dict[str, _Execution] = {}
        self._services: dict[str, Any] = {}
        self._last_jax: asyncio.Event | None = None
        self._gang_sequence = 0
        self._activity: dict[_Node, str] = {}

    # What the heartbeat shows

    @property
    def activity(self) -> str:
        """What runs now; "idle" if nothing does."""
        running = [text for node, text in self._activity.items() if node.stage == "running"]
        return "; ".join(running[:4]) + (f" and {len(running) - 4} more" if len(running) > 4 else "") or "idle"

    def waits(self) -> list[str]:
        """One line for each node that does not run yet: what it waits for, and where that should come
        from.
        """
        return [
            f"{node.spec.node_id} waits for {self._waits_for(execution, node)}"
            for execution in self._executions.values()
            for node in execution.nodes.values()
            if node.stage != "running"
        ]

    def __len__(self) -> int:
        return sum(len(execution.nodes) for execution in self._executions.values())

    # Messages

    def install(self, message: pb.Install) -> None:
        """Keep a program's nodes for later `execute`s; installing it again replaces it."""
        self._programs[message.program_id] = _Program(
            {node.node_id: node for node in message.nodes}, {slice_.name: slice_ for slice_ in message.slices}
        )

    def execute(self, message: pb.Execute) -> None:
        """Start the assigned nodes, in order. An attempt that is known is not started again.

        What is wrong with a node (no such program, service or method, a gang sequence that goes back) is a
        failed node, never an exception.
        """
        execution = self._executions.get(message.execution_id)
        if execution is None:
            execution = _Execution(message.execution_id, self._new_inputs(message.execution_id))
            self._executions[message.execution_id] = execution
        for location in message.locations:
            execution.inputs.locate(location.node_id, tuple(location.workers), location.object_id)
        trouble = self._gang_trouble(message.gang_sequence)
        for assigned in message.nodes:
            if execution.attempts.get(assigned.node_id, -1) >= assigned.attempt:
                continue
            self._drop_attempt(execution, assigned.node_id, f"attempt {assigned.attempt} replaces it")
            execution.attempts[assigned.node_id] = assigned.attempt
            execution.events.pop(assigned.node_id, None)
            for name in self._objects_of(message.program_id, assigned.node_id):
                self._context.store.reopen(object_id(execution.execution_id, name))
            try:
                if trouble is not None:
                    raise trouble
                node = self._instantiate(execution, message, assigned)
            except Exception as error:  # whatever a constructor raises is this node's failure
                self._finish(execution, assigned.node_id, assigned.attempt, "failed", error=error)
                continue
            execution.nodes[assigned.node_id] = node
            if not node.on_device:
                execution.inputs.want(node.reader, tuple(node.spec.inputs))
            if not self._begin(execution, node):
                self._run_as_task(execution, node)

    def answer(self, message: pb.Execute) -> None:
        """Tell again what came of the nodes of an `execute` that was seen before."""
        execution = self._executions.get(message.execution_id)
        for assigned in message.nodes:
            event = None if execution is None else execution.events.get(assigned.node_id)
            if event is not None:
                self._emit(event)

    def tell(self, message: pb.Ask) -> None:
        """Tell again what came of these nodes; one that is under way will tell by itself, one that nobody knows has failed."""
        execution = self._executions.get(message.execution_id)
        for asked in message.nodes:
            event = None if execution is None else execution.events.get(asked.node_id)
            if execution is not None and asked.node_id in execution.nodes:
                continue
            if event is None or event.attempt != asked.attempt or event.state == pb.NodeEvent.CANCELLED:
                where = f"{object_id(message.execution_id, asked.node_id)} on {self._context.worker}"
                error = to_message(LocalError("this worker does not know what came of it"), where)
                event = pb.NodeEvent(
                    execution_id=message.execution_id,
                    node_id=asked.node_id,
                    attempt=asked.attempt,
                    state=pb.NodeEvent.FAILED,
                    error=error,
                )
            self._emit(event)

    def relocate(self, message: pb.Relocate) -> None:
        """An input comes from elsewhere; what waits for it asks there. Unknown executions are over:
        ignored.
        """
        execution = self._executions.get(message.execution_id)
        if execution is not None:
            execution.inputs.locate(message.location.node_id, tuple(message.location.workers))

    def release(self, message: pb.Release) -> None:
        """Free the objects of some nodes, or everything of an execution that is over."""
        if message.node_ids:
            for node_id in message.node_ids:
                self._context.store.release(object_id(message.execution_id, node_id))
            return
        execution = self._executions.pop(message.execution_id, None)
        if execution is not None:
            execution.released = True
            self._cancel(execution, "released")
            execution.inputs.close()
        self._context.mailbox.drop(message.execution_id)
        self._context.store.release_execution(message.execution_id, kept=message.kept)

    def cancel(self, message: pb.Cancel) -> None:
        """Stop what can be stopped and free the execution's objects."""
        execution = self._executions.get(message.execution_id)
        if execution is not None:
            self._cancel(execution, message.reason or "cancelled")
        self._context.mailbox.drop(message.execution_id)
        self._context.store.release_execution(message.execution_id, "cancelled")

    def drop_all(self, reason: str) -> None:
        """Forget every execution and object, and the gang sequence: the controller knows nothing of them.

        A service that has a method `controller_lost` is told: what it prepared for that controller to decide on has no use.
        """
        for execution_id in list(self._executions):
            self.cancel(pb.Cancel(execution_id=execution_id, reason=reason))
            self.release(pb.Release(execution_id=execution_id))
        for name in self._context.store.names():  # what outlived its execution
            self._context.store.release(name)
        for service in self._services.values():
            if callable(told := getattr(service, "controller_lost", None)):
                told()
        self._programs.clear()
        self._gang_sequence = 0

    async def close(self, grace_s: float) -> None:
        """Cancel everything, then give each service's `close()` (if it has one) the rest of `grace_s`."""
        self.drop_all("the worker is leaving")
        closers = [c for s in self._services.values() if callable(c := getattr(s, "close", None))]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.1, grace_s)):
                await asyncio.gather(*(asyncio.to_thread(c) for c in closers), return_exceptions=True)

    # One node

    def _instantiate(self, execution: _Execution, message: pb.Execute, assigned: pb.Assignment) -> _Node:
        where = object_id(execution.execution_id, assigned.node_id)
        program = self._programs.get(message.program_id)
        spec = None if program is None else program.nodes.get(assigned.node_id)
        if program is None or spec is None:
            raise ProtocolError(f"program {message.program_id} with this node is not installed here", where=where)
        lane: Lane
        prepare = None
        if spec.kind == "sequence":
            service = self._service(ON_DEVICE)
            lane, method, prepare = "jax", service.sequence, service.prepare
        elif spec.kind == "transfer":
            lane, method = "async", self._service(ON_DEVICE).transfer if spec.takes else _pass_on
        else:
            method = getattr(self._service(spec.service), spec.method, None)
            lane = lane_of(type(self._services[spec.service]), spec.method)
        options, args = codecs.load_json(spec.options_json), codecs.load_json(message.args_json)
        typed = options_of(getattr(type(self._services[spec.service]), spec.method)) if spec.kind == "method" else None
        if typed is not None:
            given = options | {name: value for name, value in args.items() if name in typed.known}
            method = partial(method, **typed.bind(given, f"{where}: {spec.service}.{spec.method}"))
        options |= args
        if _gives_arrays(spec) and spec.service != ON_DEVICE:
            method = self._service(ON_DEVICE).giving_arrays(method, lane)
        call = Call(
            execution_id=execution.execution_id,
            node_id=assigned.node_id,
            options=options,
            inputs=[],
            context=self._context,
            deadline=time.monotonic() + (spec.deadline_s or NO_DEADLINE_S),
            program_id=message.program_id,
            node=spec,
            slices=program.slices,
            objects=tuple(map(execution.inputs.object_id, spec.inputs)),
        )
        before = self._last_jax if lane == "jax" else None
        node = _Node(spec, assigned.attempt, lane, method, call, before, prepare)
        mesh = program.slices.get(spec.slice)
        node.gang = spec.kind == "sequence" and mesh is not None and len({d.worker for d in mesh.devices}) > 1
        call.on_activity = lambda text: self._set_activity(node, text)
        if lane == "jax":
            self._last_jax = node.over
        self._activity[node] = node.title
        return node

    def _service(self, name: str) -> Any:
        """The worker's one instance of a service."""
        if name not in self._services:
            self._services[name] = find_service(name)(self._context)
        return self._services[name]

    def _objects_of(self, program_id: str, node_id: str) -> tuple[str, ...]:
        """Names of the objects that a node leaves behind."""
        program = self._programs.get(program_id)
        spec = None if program is None else program.nodes.get(node_id)
        return tuple(spec.exports) if spec is not None and spec.kind == "sequence" else (node_id,)

    async def _inputs(self, execution: _Execution, node: _Node) -> list[Any]:
        """A part per worker of each input; of a sequence, whose inputs lie where it runs, this worker's own parts."""
        if node.gang:  # what cannot be had is replaced, for the peers may have it
            return await execution.inputs.local_or_errors(node.spec.inputs, node.given_up)
        if node.spec.kind == "sequence" or _gives_arrays(node.spec):
            return await execution.inputs.local(node.spec.inputs)
        return [] if node.on_device else await execution.inputs.get(node.spec.inputs)

    def _run_as_task(self, execution: _Execution, node: _Node, begun: Future[Any] | None = None) -> None:
        node.task = asyncio.get_running_loop().create_task(self._run(execution, node, begun), name=node.title)

    def _begin(self, execution: _Execution, node: _Node) -> bool:
        """Hands a sequence that has nothing to wait for to the JAX thread at once; False where it has.

        It is `_run` without its waits, which cost as much as a short computation.
        """
        if node.spec.kind != "sequence" or (node.before is not None and not node.before.is_set()):
            return False
        inputs = execution.inputs.here(node.spec.inputs)
        if inputs is None or not self._service(ON_DEVICE).is_bound(node.call):
            return False
        node.call.inputs, node.stage = inputs, "running"
        loop = asyncio.get_running_loop()
        begun = self._lanes.start(node.method, node.call)
        late = loop.call_later(node.call.remaining_s, self._run_as_task, execution, node, begun)

        def returned() -> None:
            if node.task is not None:
                return
            late.cancel()
            if begun.exception() is not None or node.call.ready is not None:
                self._run_as_task(execution, node, begun)
            else:
                self._settle(execution, node, "finished", self._keep(execution, node, begun.result()))

        begun.add_done_callback(lambda _: loop.call_soon_threadsafe(returned))
        return True

    async def _run(self, execution: _Execution, node: _Node, begun: Future[Any] | None = None) -> None:
        """One attempt, from its inputs to its outcome; `begun`: it is with the JAX thread already."""
        outcome, error, kept, diverged = "finished", None, None, False
        try:
            async with asyncio.timeout(node.call.remaining_s):
                if begun is None:
                    node.call.inputs = await self._inputs(execution, node)
                    if node.prepare is not None:
                        await node.prepare(node.call)
                    if node.before is not None:
                        node.stage = "turn"
                        await node.before.wait()
                    node.stage = "running"
                missing = _first_error(node.call.inputs)
                if begun is None:
                    returned = await self._lanes.run(node.lane, node.method, node.call)
                else:
                    returned = await asyncio.wrap_future(begun)
                if missing is not None:
                    raise missing
                kept = self._keep(execution, node, returned)
                if node.call.ready is not None:
                    node.over.set()  # what is next may be enqueued behind it
                    await self._lanes.ready(node.call.ready)
        except asyncio.CancelledError:
            outcome = "cancelled"
            node.cancelled = node.cancelled or "cancelled"
        except TimeoutError as raised:
            outcome, error = "failed", self._overrun(execution, node, raised)
        except DivergedError as raised:
            outcome, error, diverged = "failed", raised.error, True
        except Exception as raised:  # an error is a value: whatever a method raises goes to the controller
            outcome, error = "failed", raised
        self._settle(execution, node, outcome, kept, error, diverged)

    def _settle(
        self,
        execution: _Execution,
        node: _Node,
        outcome: str,
        kept: dict[str, Held] | None = None,
        error: Exception | None = None,
        diverged: bool = False,
    ) -> None:
        """An attempt is over: what waits for its turn may go on, and the controller hears of it."""
        stuck = node.stage == "running" and isinstance(error, DeadlineError) and node.lane == "jax"
        node.call.inputs = []
        node.over.set()
        del self._activity[node]
        execution.inputs.done(node.reader)
        if execution.nodes.get(node.spec.node_id) is node:
            del execution.nodes[node.spec.node_id]
            if node.cancelled:
                outcome, kept, error = "cancelled", None, None
            self._finish(execution, node.spec.node_id, node.attempt, outcome, node.call, kept, error)
        if diverged or (stuck and time.monotonic() >= node.call.deadline):
            self._abort(str(error))

    def _keep(self, execution: _Execution, node: _Node, returned: Any) -> dict[str, Held]:
        """Puts into the store what a method returned, unless nobody wants it any more; returns it by object name."""
        objects: dict[str, Held]
        if node.spec.kind == "sequence":
            objects = returned
        else:
            value = Bundle() if returned is None else returned
            if isinstance(value, Bundle):
                codecs.header(value)  # what cannot travel is this node's failure, not its consumers'
            elif node.spec.service != ON_DEVICE and not node.on_device:
                raise LocalError(f"{node.title} returned {type(returned).__name__}, not a Bundle or None")
            objects = {node.spec.node_id: value}
        if execution.nodes.get(node.spec.node_id) is node and not node.cancelled and not execution.released:
            for name, value in objects.items():
                self._context.store.put(object_id(execution.execution_id, name), value)
        return objects

    def _finish(
        self,
        execution: _Execution,
        node_id: str,
        attempt: int,
        outcome: str,
        call: Call | None = None,
        kept: dict[str, Held] | None = None,
        error: BaseException | None = None,
    ) -> None:
        if execution.released:
            return
        where = f"{object_id(execution.execution_id, node_id)} on {self._context.worker}"
        event = pb.NodeEvent(execution_id=execution.execution_id, node_id=node_id, attempt=attempt)
        if call is not None:
            event.spans.extend(_spans(call))
        if outcome == "finished" and call is not None and kept is not None:
            try:
                event.result_json = codecs.dump_result(call.result, where)
                if call.node.kind == "sequence":
                    event.export_bytes.update({name: value.nbytes for name, value in kept.items()})
                else:
                    event.object_bytes = sum(value.nbytes for value in kept.values())
            except Exception as raised:  # a result that is not JSON or too long
                outcome, error = "failed", raised
        if error is not None:
            event.error.CopyFrom(to_message(error, where))
            names = (node_id,) if call is None or call.node.kind != "sequence" else tuple(call.node.exports)
            for name in (object_id(execution.execution_id, name) for name in names):
                self._context.store.reopen(name)  # what came out of it before it failed
                self._context.store.fail(name, from_message(event.error))  # a copy: a traceback would pin arrays
        event.state = _STATES[outcome]
        execution.events[node_id] = event
        self._emit(event)

    def _overrun(self, execution: _Execution, node: _Node, raised: TimeoutError) -> Exception:
        if node.call.remaining_s > 0:
            return raised  # the method's own TimeoutError
        allowed = f"not done {node.spec.deadline_s:g} s after its assignment"
        if node.stage == "running":
            return DeadlineError(f"{node.title} is {allowed}; it was running: {self._activity[node]}")
        return DeadlineError(f"{node.title} is {allowed}; it waited for {self._waits_for(execution, node)}")

    def _waits_for(self, execution: _Execution, node: _Node) -> str:
        if node.stage == "turn":
            return "the nodes ahead of it on the jax lane"
        return ", ".join(execution.inputs.missing(node.spec.inputs)) or "its inputs"

    def _cancel(self, execution: _Execution, reason: str) -> None:
        for node in execution.nodes.values():
            node.cancelled = reason
            node.given_up.set()
            # What runs on a thread cannot be stopped: it goes on under its deadline and its outcome is
            # dropped.
            if node.task is not None and not node.gang and (node.stage != "running" or node.lane == "async"):
                node.task.cancel()

    def _drop_attempt(self, execution: _Execution, node_id: str, reason: str) -> None:
        old = execution.nodes.pop(node_id, None)
        if old is not None:
            old.cancelled = reason
            if old.task is not None and (old.stage != "running" or old.lane == "async"):
                old.task.cancel()

    def _gang_trouble(self, sequence: int) -> ProtocolError | None:
        if sequence == 0:
            return None
        if sequence <= self._gang_sequence:
            return ProtocolError(
                f"gang sequence {sequence} came after {self._gang_sequence}: the members of this world would enter "
                "collectives in different orders"
            )
        self._gang_sequence = sequence
        return None

    def _set_activity(self, node: _Node, text: str) -> None:
        if node in self._activity:
            self._activity[node] = f"{node.title}: {text}"


def _gives_arrays(spec: pb.Node) -> bool:
    """Does a method work on arrays where they lie? Its node says what it gives."""
    return bool(spec.kind == "method" and len(spec.gives))


async def _pass_on(call: Call) -> Bundle:
    """A transfer node: keep a copy of this process's part of the one input here."""
    parts: list[Bundle] = call.inputs[0]
    index = call.context.process_index
    return parts[index if len(parts) == call.context.process_count else 0]


def _first_error(inputs: list[Any]) -> Exception | None:
    """The first input of a gang's node that could not be had."""
    return next((value for value in inputs if isinstance(value, Exception)), None)


def _spans(call: Call) -> Iterator[common_pb2.Span]:
    for span in call.spans:
        yield common_pb2.Span(name=span.name, start_ns=span.start_ns, end_ns=span.end_ns)
