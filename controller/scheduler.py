"""The scheduler: a state machine without I/O. Event in, commands out.

What it guarantees, after every event:

- A program is installed once per (worker, incarnation), before its first `Execute` there.
- An execution that finds all its places up is dispatched as one `Execute` per worker. All nodes are sent ahead; they wait
  for their inputs at the worker. A node whose slice is not up, or whose pool has no ready member, stays here and goes out
  when that changes.
- Messages leave in admission order, so executions that share workers reach each of them in the same order; every dispatch
  has a number in its world (`gang_sequence`).
- When a worker is lost, its unfinished nodes, and the finished ones whose object is still needed, run again elsewhere with
  a higher attempt (their inputs too, where those were freed already). One that must not run again fails the execution.
- Errors are values: the first failure is the execution's outcome, what depends on it is poisoned, the rest is stopped. A
  node that may be dropped is no such failure: its error becomes its result and the others go on.
- At most `max_in_flight` executions are admitted to a worker (and as many may wait for an absent place); others wait, each
  owner's in order, owners against each other by weight (fairness.py). An execution that was admitted is never held back again,
  so recovery cannot deadlock on credits; only a node that consumes an object waits for those that read it before.
- Device memory that outputs will take is reserved at admission and kept until they are freed (memory.py); what does not fit
  now waits, and status says for what; what can never fit is refused.
- An output outlives its execution until its owner deletes it or is released; if it cannot be had, whoever is bound to it fails
  with the root cause.

Late events (of a lost process, an old attempt, an execution that is over) are dropped and recorded in `dropped`.
Impossible ones raise IllegalTransitionError with the execution's history; the state is then as before.

Must not know: sockets, time, protobuf, jax. Called by the server, from one thread, one event at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any, cast

from waypath.controller import bindings
from waypath.controller import commands as c
from waypath.controller.admission import MAX_QUEUED, Admission
from waypath.controller.credits import Credits
from waypath.controller.dispatch import Dispatcher
from waypath.controller.execution import Execution, ExecutionTrigger, Task, TaskState, TaskTrigger
from waypath.controller.graph import Program, Slice
from waypath.controller.intake import judge
from waypath.controller.lifetimes import Lifetimes
from waypath.controller.memory import Memory
from waypath.controller.objects import ObjectDirectory
from waypath.controller.placement import place
from waypath.controller.recovery import decide
from waypath.controller.resources import Resources
from waypath.controller.status import describe
from waypath.proto.errors import CancelledError, IllegalTransitionError, LocalError, WaypathError, WorkerLostError

__all__ = ["KEPT_OVER", "MAX_QUEUED", "Scheduler"]

KEPT_OVER = 256
KEPT_DROPPED = 1024


class Scheduler:
    """Owns the executions. `handle` is the only way to change it; `describe` (status.py) reads it."""

    def __init__(self, resources: Resources, *, max_in_flight: int = 8) -> None:
        if max_in_flight < 1:
            raise LocalError(f"max_in_flight: expected at least 1, found {max_in_flight}")
        self.resources = resources
        self.credits = Credits(max_in_flight)
        self.objects = ObjectDirectory()
        self.memory = Memory()
        self.running: dict[str, Execution] = {}
        self.unplaced: dict[str, Execution] = {}
        self.admission = Admission(resources, self.credits, self.objects, self.memory, self.running)
        self.queue = self.admission.queue
        self.over: dict[str, Execution] = {}
        self.acknowledged: dict[str, int] = {}
        self.dropped: deque[tuple[c.Event, str]] = deque(maxlen=KEPT_DROPPED)
        self._dispatcher = Dispatcher(resources, self.objects)
        self._lifetimes = Lifetimes(
            self.objects, self.memory, resources.grants, self.running, self._release, self._more_room
        )
        self._events = 0
        self._room = False
        self._out: list[c.Command] = []
        self._cause = ""

    def handle(self, event: c.Event) -> list[c.Command]:
        """Applies one event. Returns the commands in the order in which they are to be sent.

        Raises IllegalTransitionError on an event that cannot be; GraphError, NotFoundError, ConfigError, LocalError or
        NameTakenError where a request is refused: executions, objects, workers and credits are then as they were.
        """
        handler = _HANDLERS.get(type(event))
        if handler is None:
            raise IllegalTransitionError(f"no event {type(event).__name__}; known: {[t.__name__ for t in _HANDLERS]}")
        self._events += 1
        self._cause = event.event_id or f"event {self._events}"
        self._out = []
        handler(self, event)
        while self._lifetimes.doomed or self._room:
            while self._lifetimes.doomed:  # first: what cannot have its objects is not sent
                self._fail_bound(*self._lifetimes.doomed.popleft())
            self._pump()
        return self._out

    # Workers and pools

    def _worker_joined(self, event: c.WorkerJoined) -> None:
        if self.resources.join(event):
            self._dispatcher.joined(event.worker)
            self.credits.open(event.worker)
            self.acknowledged[event.worker] = 0
            self._cluster_changed()

    def _worker_lost(self, event: c.WorkerLost) -> None:
        live = self.resources.live.get(event.worker)
        if live is None or (event.incarnation and event.incarnation != live.incarnation):
            return self._drop(event, "that process is not live")
        for peer in self.resources.world_peers(event.worker):
            self._out.append(c.AbortWorld(peer, f"worker {event.worker} is lost: {event.cause}", cause=self._cause))
        self.resources.lose(event.worker)
        self.credits.close(event.worker)
        self._dispatcher.lost(event.worker)
        del self.acknowledged[event.worker]
        self._cluster_changed()
        for execution in list(self.running.values()):
            self._recover(execution, event)
        for ref in self.objects.outputs_on(event.worker):
            execution_id, _, name = ref.object_id.rpartition("/")
            if execution_id not in self.running:
                cause = f"worker {event.worker} was lost ({event.cause}) with object {name}"
                self._lifetimes.poison(ref.object_id, WorkerLostError(cause, where=f"execution {execution_id}"))

    def _slice_requested(self, event: c.SliceRequested) -> None:
        self.resources.request(event)
        self.memory.lay_out(self.resources.grants)
        self._cluster_changed()

    def _slice_released(self, event: c.SliceReleased) -> None:
        """Executions that use it are cancelled, objects on it are lost: nothing may run on devices that are given back."""
        self.resources.check_owner(event.name, event.owner)
        spot = Slice(event.name)
        for execution in [*self.running.values(), *self.queue.values()]:
            program = execution.program
            if spot in program.places or any(param.place == spot for param in program.params):
                self._cancel(execution, f"slice {event.name} was released")
        for oid in self.objects.on(spot):
            self._lifetimes.drop(oid, f"was lost with slice {event.name}")
        self._forget_slices([event.name])

    def _forget_slices(self, names: Collection[str]) -> None:
        for name in names:
            self.resources.release(name)
        if names:
            self.memory.lay_out(self.resources.grants)
            self._cluster_changed()

    def _owner_joined(self, event: c.OwnerJoined) -> None:
        self.admission.turns.weigh(event.owner, event.weight)

    def _pool_member_ready(self, event: c.PoolMemberReady) -> None:
        self.resources.member_ready(event.pool, event.slice)
        self._cluster_changed()

    def _pool_member_removed(self, event: c.PoolMemberRemoved) -> None:
        self.resources.member_removed(event.pool, event.slice)
        self._cluster_changed()

    def _cluster_changed(self) -> None:
        self.admission.cluster_changed()
        self._room = True

    def _acked(self, event: c.Acked) -> None:
        if event.worker not in self.acknowledged:
            return self._drop(event, "that worker is not live")
        self.acknowledged[event.worker] = max(event.sequence, self.acknowledged[event.worker])

    def _counted(self, event: c.WorkerCounted) -> None:
        """Fewer nodes than are thought to be under way: some outcomes are unknown. They are asked about, nothing is done twice."""
        if event.worker not in self.resources.live:
            return self._drop(event, "that worker is not live")
        if event.nodes >= self.credits.nodes(event.worker):
            return
        for execution in self.running.values():
            if self.credits.is_busy(event.worker, execution.execution_id):
                overdue = tuple(
                    (task.node_id, task.attempt)
                    for task in execution.tasks.values()
                    if task.state is TaskState.SENT
                    and event.worker in task.workers
                    and event.worker not in task.results
                )
                self._out.append(c.AskOutcomes(event.worker, execution.execution_id, overdue, cause=self._cause))

    # Executions

    def _submitted(self, event: c.ExecutionSubmitted) -> None:
        known = self._find(event.execution_id)
        if known is not None:
            raise known.illegal(f"submitted again ({self._cause})")
        program = event.program
        self.check(program, event.owner)
        self.admission.check_room(event.owner)
        bindings.check(program, event.bindings, event.owner, self.objects)
        self.admission.check_memory(program, event.bindings)
        execution = Execution(event.execution_id, program, event.args, event.owner, event.bindings)
        self._lifetimes.submitted(execution)
        self.admission.add(execution)
        self._room = True

    def check(self, program: Program, owner: str) -> None:
        """Raises GraphError where an owner's program does not fit the cluster as it is: places, whose slices they are, meshes."""
        self.admission.check(program, owner)

    def _objects_deleted(self, event: c.ObjectsDeleted) -> None:
        """Unknown ones are gone already."""
        for oid in event.object_ids:
            if oid in self.objects and self.objects[oid].owner == event.owner:
                self._lifetimes.drop(oid, "was deleted")

    def _cancelled(self, event: c.ExecutionCancelled) -> None:
        execution = self._find(event.execution_id)
        if execution is None or execution.over:
            return self._drop(event, "it is over or unknown")
        self._cancel(execution, event.reason)

    def _owner_released(self, event: c.OwnerReleased) -> None:
        for execution in [*self.running.values(), *self.queue.values()]:
            if execution.owner == event.owner:
                self._cancel(execution, event.reason)
        for oid in self.objects.kept_by(event.owner):
            self._lifetimes.drop(oid, f"is gone with its owner: {event.reason}")
        self._forget_slices([grant.name for grant in self.resources.grants.values() if grant.owner == event.owner])
        self.admission.turns.forget(event.owner)

    def _node_finished(self, event: c.NodeFinished) -> None:
        task = self._current(event)
        if task is None:
            return
        execution = task.execution
        for name, oid in task.object_ids.items():
            self.objects.add_part(oid, event.worker, event.export_bytes.get(name, event.object_bytes))
        task.results[event.worker] = event.result
        self._done_on(event.worker, execution)
        if len(task.results) < len(task.workers):
            return
        task.advance(TaskTrigger.FINISHED, self._cause, ", ".join(task.workers))
        for oid in task.object_ids.values():
            self.objects.complete(oid)
        if task.reported is None:
            task.reported = {worker: task.results[worker] for worker in task.workers}
            self._out.append(c.NodeCompleted(execution.execution_id, task.node_id, task.reported, cause=self._cause))
        if execution.unfinished or execution.bindings:
            self._finished(task)
        if execution.unfinished == 0:
            self._end(execution, ExecutionTrigger.DONE)

    def _node_failed(self, event: c.NodeFailed) -> None:
        task = self._current(event)
        if task is None:
            return
        self._done_on(event.worker, task.execution)
        detail = f"on {event.worker}: {event.error}"
        if task.node.on_worker_lost != "drop":
            return self._fail(task, event.error, detail)
        task.results[event.worker] = {"error": str(event.error), "kind": type(event.error).__name__}
        self._take_back(task)
        self._drop_task(task, detail, {event.worker: task.results[event.worker]})
        if task.execution.unfinished == 0:
            self._end(task.execution, ExecutionTrigger.DONE)

    # What follows from them

    def _current(self, event: c.NodeFinished | c.NodeFailed) -> Task | None:
        """Returns the task that the event is about; None (and a record) where the event comes too late."""
        execution = self._find(event.execution_id)
        found = judge(event, execution, self.resources, self._cause)
        if isinstance(found, Task):
            return found
        self._drop(event, found)
        is_over = execution is None or execution.over
        if is_over and isinstance(event, c.NodeFinished):
            self._release(event.worker, event.execution_id, kept=self.objects.outputs_of(event.execution_id))
        return None

    def _drop(self, event: c.Event, why: str) -> None:
        """Records an event that comes too late to mean anything."""
        self.dropped.append((event, why))

    def _find(self, execution_id: str) -> Execution | None:
        return self.running.get(execution_id) or self.queue.get(execution_id) or self.over.get(execution_id)

    def _done_on(self, worker: str, execution: Execution) -> None:
        was_full = self.credits.is_full(worker)
        if self.credits.give_back(worker, execution.execution_id) and was_full:
            self._room = True

    def _finished(self, task: Task) -> None:
        self._lifetimes.finished(task)
        if self.unplaced:
            self._room = True

    def _release(self, worker: str, execution_id: str, names: tuple[str, ...] = (), kept: tuple[str, ...] = ()) -> None:
        if worker in self.resources.live:
            self._out.append(c.ReleaseObjects(worker, execution_id, names, kept, cause=self._cause))

    def _more_room(self) -> None:
        self._room = True

    def _fail_bound(self, execution_id: str, error: WaypathError) -> None:
        """Ends an execution that reads an object which cannot be had."""
        execution = self.running.get(execution_id) or self.queue.get(execution_id)
        if execution is not None:
            self._stop(execution, f"an object that it reads cannot be had: {error}")
            self._end(execution, ExecutionTrigger.FAILED, error)

    def _recover(self, execution: Execution, event: c.WorkerLost) -> None:
        """Carries out what recovery.py decides about the loss."""
        decision = decide(execution, event.worker, self.objects)
        task = decision.fatal
        if task is not None:
            doing = "running" if task.state is TaskState.SENT else "holding the result of"
            error = WorkerLostError(
                f"worker {event.worker} was lost ({event.cause}) while {doing} node {task.node_id}, "
                "which may not run again",
                where=f"execution {execution.execution_id}",
            )
            return self._fail(task, error, f"{event.worker} lost: {event.cause}")
        for task in decision.again:
            self._take_back(task)
            for oid in task.object_ids.values():
                self.objects.lose(oid)
            task.advance(TaskTrigger.LOST, self._cause, f"{event.worker}: {event.cause}")
            task.attempt += 1
            task.workers = ()
            task.results = {}
            self.unplaced[execution.execution_id] = execution
            for oid, reader in task.reads():
                self.objects.need(oid, reader)
        for task in decision.dropped:
            self._take_back(task)
            self._drop_task(task, f"{event.worker} lost: {event.cause}")
        if execution.unfinished == 0:
            self._end(execution, ExecutionTrigger.DONE)
        self._room = True

    def _take_back(self, task: Task) -> None:
        """Workers that have not finished the task need not do so any more."""
        if task.state is TaskState.SENT:
            for worker in task.workers:
                if worker not in task.results:
                    self.credits.give_back(worker, task.execution.execution_id)

    def _drop_task(self, task: Task, detail: str, results: c.Results | None = None) -> None:
        """The execution goes on without the task; `results` says of one that failed, by worker, what went wrong."""
        task.advance(TaskTrigger.DROPPED, self._cause, detail)
        task.workers = ()
        task.reported = results or None
        self._finished(task)
        self._out.append(c.NodeCompleted(task.execution.execution_id, task.node_id, results or {}, cause=self._cause))

    def _fail(self, task: Task, error: WaypathError, detail: str) -> None:
        execution = task.execution
        task.advance(TaskTrigger.FAILED, self._cause, detail)
        for node_id in execution.poisoned_by(task.node_id):
            if execution.tasks[node_id].unfinished:
                execution.tasks[node_id].advance(TaskTrigger.POISONED, self._cause, f"by {task.node_id}")
        self._stop(execution, f"node {task.node_id} failed {detail}")
        self._end(execution, ExecutionTrigger.FAILED, error)

    def _cancel(self, execution: Execution, reason: str) -> None:
        self._stop(execution, reason)
        where = f"execution {execution.execution_id}"
        self._end(execution, ExecutionTrigger.CANCELLED, CancelledError(f"cancelled: {reason}", where=where))

    def _stop(self, execution: Execution, reason: str) -> None:
        """Cancels what is unfinished, on every worker that still has something to do."""
        for task in execution.tasks.values():
            if task.unfinished:
                task.advance(TaskTrigger.CANCELLED, self._cause, reason)
        for worker in execution.involved:
            if self.credits.is_busy(worker, execution.execution_id):
                self._out.append(c.CancelExecution(worker, execution.execution_id, reason, cause=self._cause))

    def _end(self, execution: Execution, trigger: ExecutionTrigger, error: WaypathError | None = None) -> None:
        execution.advance(trigger, self._cause)
        results = execution.results()
        self.running.pop(execution.execution_id, None)
        self.unplaced.pop(execution.execution_id, None)
        self.admission.remove(execution)
        self._lifetimes.ended(execution, error, execution.involved)
        for worker in execution.involved:
            if worker in self.resources.live:
                self.credits.settle(worker, execution.execution_id)
        execution.tasks.clear()
        execution.waiting.clear()
        self._room = self._room or bool(self.unplaced or self.queue)
        self.over[execution.execution_id] = execution
        while len(self.over) > KEPT_OVER:
            del self.over[next(iter(self.over))]
        outcome = cast(c.Outcome, execution.state.value)
        self._out.append(c.ExecutionCompleted(execution.execution_id, outcome, results, error, cause=self._cause))

    # Admission and dispatch

    def _pump(self) -> None:
        """Sends out whatever can go now: first what was admitted, then the queue, both in order."""
        while self._room:
            self._room = False
            for execution in list(self.unplaced.values()):
                if not execution.over:
                    self._dispatch(execution)
            while (admitted := self.admission.next()) is not None:
                self.running[admitted.execution_id] = admitted
                admitted.advance(ExecutionTrigger.ADMITTED, self._cause)
                self._lifetimes.admitted(admitted)
                self._dispatch(admitted)

    def _dispatch(self, execution: Execution) -> None:
        """Places what can be placed and sends it: one `Execute` per worker, then relocations to earlier readers."""
        for task in list(execution.waiting.values()):
            spot = task.node.place
            if task.node.on_worker_lost == "drop" and isinstance(spot, Slice) and self.resources.missing(spot.name):
                self._drop_task(task, f"slice {spot.name} is not up")
        if execution.unfinished == 0:
            return self._end(execution, ExecutionTrigger.DONE)
        placed = place(execution, self.resources, self.credits, self._cause, self._must_wait)
        if placed:
            plan = self.admission.plan(execution.program)
            self._out += self._dispatcher.send(execution, plan, placed, self._cause)
        if execution.waiting:
            self.unplaced[execution.execution_id] = execution
        else:
            self.unplaced.pop(execution.execution_id, None)

    def _must_wait(self, task: Task, back: Collection[str]) -> bool:
        return bindings.must_wait(task, back, self.objects, self._find)

    def describe(self) -> dict[str, Any]:
        """Returns what is where and what waits for what, as JSON; see status.py."""
        return describe(self)


_HANDLERS: dict[type[c.Event], Callable[[Scheduler, Any], None]] = {
    c.WorkerJoined: Scheduler._worker_joined,
    c.WorkerLost: Scheduler._worker_lost,
    c.PoolMemberReady: Scheduler._pool_member_ready,
    c.PoolMemberRemoved: Scheduler._pool_member_removed,
    c.SliceRequested: Scheduler._slice_requested,
    c.SliceReleased: Scheduler._slice_released,
    c.OwnerJoined: Scheduler._owner_joined,
    c.ObjectsDeleted: Scheduler._objects_deleted,
    c.ExecutionSubmitted: Scheduler._submitted,
    c.NodeFinished: Scheduler._node_finished,
    c.NodeFailed: Scheduler._node_failed,
    c.ExecutionCancelled: Scheduler._cancelled,
    c.OwnerReleased: Scheduler._owner_released,
    c.Acked: Scheduler._acked,
    c.WorkerCounted: Scheduler._counted,
}
