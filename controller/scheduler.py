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
- An output outlives its execution until its owner deletes it or is released; if it cannot be had, whoever is bound to it fails
  with the root cause.

Late events (of a lost process, an old attempt, an execution that is over) are dropped and recorded in `dropped`.
Impossible ones raise IllegalTransitionError with the execution's history; the state is then as before.

Must not know: sockets, time, protobuf, jax. Called by the server, from one thread, one event at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, cast

from waypath.controller import bindings
from waypath.controller import commands as c
from waypath.controller.credits import Credits
from waypath.controller.dispatch import execute, relocations
from waypath.controller.execution import Execution, ExecutionTrigger, Task, TaskState, TaskTrigger
from waypath.controller.fairness import FairQueue
from waypath.controller.graph import Place, Program, Slice
from waypath.controller.intake import judge
from waypath.controller.objects import ObjectDirectory, ObjectState
from waypath.controller.placement import blockers, place, reach
from waypath.controller.recovery import decide
from waypath.controller.resources import Resources
from waypath.controller.specs import check_specs
from waypath.controller.status import describe
from waypath.proto.errors import (
    CancelledError,
    GraphError,
    IllegalTransitionError,
    LocalError,
    WaypathError,
    WorkerLostError,
)
from waypath.proto.names import object_id

MAX_QUEUED = 256
LOOK_AHEAD = 16
KEPT_OVER = 256
KEPT_DROPPED = 1024
KEPT_CHECKED = 4096


class Scheduler:
    """Owns the executions. `handle` is the only way to change it; `describe` (status.py) reads it."""

    def __init__(self, resources: Resources, *, max_in_flight: int = 8) -> None:
        if max_in_flight < 1:
            raise LocalError(f"max_in_flight: expected at least 1, found {max_in_flight}")
        self.resources = resources
        self.credits = Credits(max_in_flight)
        self.objects = ObjectDirectory()
        self.running: dict[str, Execution] = {}
        self.queue: dict[str, Execution] = {}
        self.turns = FairQueue()
        self.over: dict[str, Execution] = {}
        self.acknowledged: dict[str, int] = {}
        self.dropped: deque[tuple[c.Event, str]] = deque(maxlen=KEPT_DROPPED)
        self._installed: dict[str, set[str]] = {}
        self._checked: dict[tuple[Any, ...], None] = {}
        self._gang: dict[str, int] = {}
        self._events = 0
        self._room = False
        self._held_back = 0
        self._doomed: deque[tuple[str, WaypathError]] = deque()
        self._out: list[c.Command] = []
        self._cause = ""

    def handle(self, event: c.Event) -> list[c.Command]:
        """Applies one event. Returns the commands in the order in which they are to be sent.

        Raises IllegalTransitionError on an event that cannot be; GraphError, ConfigError or NameTakenError where a
        submission or a registration is refused: executions, objects, workers and credits are then as they were.
        """
        handler = _HANDLERS.get(type(event))
        if handler is None:
            raise IllegalTransitionError(f"no event {type(event).__name__}; known: {[t.__name__ for t in _HANDLERS]}")
        self._events += 1
        self._cause = event.event_id or f"event {self._events}"
        self._out = []
        handler(self, event)
        while self._doomed or self._room:
            while self._doomed:
                self._fail_bound(*self._doomed.popleft())
            self._pump()
        return self._out

    # Workers and pools

    def _worker_joined(self, event: c.WorkerJoined) -> None:
        if self.resources.join(event):
            self._installed[event.worker] = set()
            self.credits.open(event.worker)
            self.acknowledged[event.worker] = 0
            self._room = True

    def _worker_lost(self, event: c.WorkerLost) -> None:
        live = self.resources.live.get(event.worker)
        if live is None or (event.incarnation and event.incarnation != live.incarnation):
            return self._drop(event, "that process is not live")
        for peer in self.resources.world_peers(event.worker):
            self._out.append(c.AbortWorld(peer, f"worker {event.worker} is lost: {event.cause}", cause=self._cause))
        self.resources.lose(event.worker)
        self.credits.close(event.worker)
        del self._installed[event.worker]
        del self.acknowledged[event.worker]
        for execution in list(self.running.values()):
            self._recover(execution, event)
        for ref in self.objects.outputs_on(event.worker):
            execution_id, _, name = ref.object_id.rpartition("/")
            if execution_id not in self.running:
                cause = f"worker {event.worker} was lost ({event.cause}) with object {name}"
                self._poison(ref.object_id, WorkerLostError(cause, where=f"execution {execution_id}"))

    def _slice_requested(self, event: c.SliceRequested) -> None:
        self.resources.request(event)

    def _slice_released(self, event: c.SliceReleased) -> None:
        """Executions that use it are cancelled, objects on it are lost: nothing may run on devices that are given back."""
        self.resources.release(event.name, event.owner)
        place_ = Slice(event.name)
        for execution in [*self.running.values(), *self.queue.values()]:
            if place_ in execution.program.places:
                self._cancel(execution, f"slice {event.name} was released")
        for oid in self.objects.on(place_):
            self.objects.let_go(oid, f"was lost with slice {event.name}")
            self._free(oid)

    def _owner_joined(self, event: c.OwnerJoined) -> None:
        self.turns.weigh(event.owner, event.weight)

    def _pool_member_ready(self, event: c.PoolMemberReady) -> None:
        self.resources.member_ready(event.pool, event.slice)
        self._room = True

    def _pool_member_removed(self, event: c.PoolMemberRemoved) -> None:
        self.resources.member_removed(event.pool, event.slice)

    def _acked(self, event: c.Acked) -> None:
        if event.worker not in self.acknowledged:
            return self._drop(event, "that worker is not live")
        self.acknowledged[event.worker] = max(event.sequence, self.acknowledged[event.worker])

    # Executions

    def _submitted(self, event: c.ExecutionSubmitted) -> None:
        known = self._find(event.execution_id)
        if known is not None:
            raise known.illegal(f"submitted again ({self._cause})")
        self.check(event.program, event.owner)
        if self.turns.count(event.owner) >= MAX_QUEUED:
            raise LocalError(
                f"{self.turns.count(event.owner)} executions wait already, all of {event.owner or 'one owner'}",
                where=event.execution_id,
                remedy="Submit it again later.",
            )
        bindings.check(event.program, event.bindings, event.owner, self.objects)
        execution = Execution(event.execution_id, event.program, event.args, event.owner, event.bindings)
        bindings.bind(execution, self.objects)
        for name in event.program.outputs:
            self._create(execution, name)
        self.queue[event.execution_id] = execution
        self.turns.add(event.owner, event.execution_id, event.program.size)
        self._room = True
        for oid in event.bindings.values():
            if (error := self.objects[oid].error) is not None:
                self._doomed.append((event.execution_id, error))

    def check(self, program: Program, owner: str) -> None:
        """Raises GraphError where an owner's program does not fit the cluster as it is: places, whose slices they are, meshes."""
        program.check_placements(self.resources.slices, self.resources.pools)
        grants = self.resources.grants
        mine = [grants[name] for name in program.slices if name in grants]
        for grant in mine:
            if grant.owner != owner:
                raise GraphError(f"slice {grant.name!r} belongs to {grant.owner}", where=f"program {program.name}")
        key = (program.program_id, tuple((grant.name, grant.axes, grant.sizes) for grant in mine))
        if key not in self._checked:
            check_specs(program, grants)
            self._checked[key] = None
            while len(self._checked) > KEPT_CHECKED:
                del self._checked[next(iter(self._checked))]

    def _create(self, execution: Execution, name: str) -> None:
        """The object that a node of the execution will leave behind."""
        program = execution.program
        self.objects.create(
            object_id(execution.execution_id, name),
            execution.owner,
            program.consumers[name],
            kept=name in program.kept,
            aval=program.aval_of(name),
            place=program.place_of(name),
        )

    def _objects_deleted(self, event: c.ObjectsDeleted) -> None:
        """Unknown ones are gone already."""
        for oid in event.object_ids:
            if oid in self.objects and self.objects[oid].owner == event.owner:
                self.objects.let_go(oid, "was deleted")
                self._free(oid)

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
            self.objects.let_go(oid, f"is gone with its owner: {event.reason}")
            self._free(oid)
        for grant in [grant for grant in self.resources.grants.values() if grant.owner == event.owner]:
            self.resources.release(grant.name, grant.owner)
        self.turns.forget(event.owner)

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
            self._release_inputs(task)
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
        if is_over and isinstance(event, c.NodeFinished) and event.worker in self.resources.live:
            self._out.append(c.ReleaseObjects(event.worker, event.execution_id, cause=self._cause))
        return None

    def _drop(self, event: c.Event, why: str) -> None:
        """Records an event that comes too late to mean anything."""
        self.dropped.append((event, why))

    def _find(self, execution_id: str) -> Execution | None:
        return self.running.get(execution_id) or self.queue.get(execution_id) or self.over.get(execution_id)

    def _done_on(self, worker: str, execution: Execution) -> None:
        if self.credits.give_back(worker, execution.execution_id):
            self._room = True

    def _release_inputs(self, task: Task) -> None:
        """The task is finished: frees the objects that it was the last to need, and its own if nobody reads it."""
        own = list(task.object_ids.values())
        read: list[str] = []
        for oid, reader in task.reads():
            self.objects.consumed(oid, reader)
            read.append(oid)
        for position in task.node.donates:
            bound = task.execution.bindings.get(task.node.inputs[position])
            if bound is not None:
                self.objects.let_go(bound, f"was donated to {task.full_id}")
        self._free(*read, *own)
        if self._held_back:
            self._room = True

    def _free(self, *oids: str) -> None:
        """Frees those of these objects that nobody keeps or reads, on every worker."""
        freed: dict[tuple[str, str], list[str]] = {}
        for oid in oids:
            ref = self.objects[oid]
            if ref.kept or ref.needed_by or ref.state is ObjectState.PENDING:
                continue
            execution_id, _, name = oid.rpartition("/")
            if ref.state in (ObjectState.HELD, ObjectState.POISONED):
                for worker, nbytes in self.objects.release(oid).items():
                    if nbytes or execution_id not in self.running:
                        freed.setdefault((worker, execution_id), []).append(name)
            if execution_id not in self.running:
                self.objects.forget(oid)
        for (worker, execution_id), names in freed.items():
            if worker in self.resources.live:
                self._out.append(c.ReleaseObjects(worker, execution_id, tuple(names), cause=self._cause))

    def _poison(self, oid: str, error: WaypathError) -> None:
        """The object cannot be had: whoever is bound to it will fail with `error`."""
        execution_id, _, name = oid.rpartition("/")
        for worker in self.objects.poison(oid, error):
            if worker in self.resources.live:
                self._out.append(c.ReleaseObjects(worker, execution_id, (name,), cause=self._cause))
        readers = {key.rpartition("/")[0]: None for key in sorted(self.objects[oid].needed_by) if "/" in key}
        self._doomed.extend((reader, error) for reader in readers)

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
        self._release_inputs(task)
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
        ends_well = trigger is ExecutionTrigger.DONE
        self.running.pop(execution.execution_id, None)
        if self.queue.pop(execution.execution_id, None) is not None:
            self.turns.remove(execution.owner, execution.execution_id)
        outlive = [
            name
            for name in execution.program.outputs
            if (ref := self.objects[object_id(execution.execution_id, name)]).kept
            or any("/" in k for k in ref.needed_by)
        ]
        kept = tuple(outlive) if ends_well else ()
        for worker in execution.involved:
            if worker in self.resources.live:
                command = c.ReleaseObjects(worker, execution.execution_id, kept=kept, cause=self._cause)
                self._out.append(command)
                self.credits.settle(worker, execution.execution_id)
        results = execution.results()
        for bound in bindings.unbind(execution, self.objects):
            if bound in self.objects:
                self._free(bound)
        for name in (*execution.program.producers,):
            oid = object_id(execution.execution_id, name)
            if name not in outlive:
                self.objects.forget(oid)
            elif not ends_well:
                ref = self.objects[oid]
                ref.parts.clear()
                ref.needed_by = {key for key in ref.needed_by if "/" in key}
                self._poison(
                    oid, error or CancelledError("it was cancelled", where=f"execution {execution.execution_id}")
                )
        execution.tasks.clear()
        self._room = True
        self.over[execution.execution_id] = execution
        while len(self.over) > KEPT_OVER:
            del self.over[next(iter(self.over))]
        self._out.append(
            c.ExecutionCompleted(
                execution.execution_id,
                cast(c.Outcome, execution.state.value),
                results,
                error,
                cause=self._cause,
            )
        )

    # Admission and dispatch

    def _pump(self) -> None:
        """Sends out whatever can go now: first what was admitted, then the queue, both in order."""
        while self._room:
            self._room = False
            self._held_back = 0
            for execution in list(self.running.values()):
                if execution.waiting:
                    self._dispatch(execution)
            self._admit_queued()

    def _admit_queued(self) -> None:
        """Admits, in order, what finds room; an execution that waits for a worker holds back later ones that share it."""
        passed_over: set[str] = set()
        known: dict[str, tuple[bool, bool, set[str]]] = {}
        progress = True
        while progress:
            progress = False
            for owner in self.turns.owners():
                if self._admit_of(owner, passed_over, known):
                    progress = True
                    known.clear()
                    break

    def _admit_of(self, owner: str, passed_over: set[str], known: dict[str, tuple[bool, bool, set[str]]]) -> bool:
        """Admits the first of an owner's executions that finds room; says whether there was one."""
        behind = 0
        for execution_id in self.turns.waiting(owner):
            execution = self.queue[execution_id]
            program_id = execution.program.program_id
            if program_id not in known:
                full, absent = self.blockers(execution)
                known[program_id] = (bool(full), bool(absent), reach(execution, self.resources))
            is_full, is_absent, workers = known[program_id]
            if is_absent or not all(self.objects[oid].workers for oid in execution.bindings.values()):
                continue
            if is_full or not passed_over.isdisjoint(workers):
                passed_over |= workers
                behind += 1
                if behind >= LOOK_AHEAD:
                    return False
                continue
            self.turns.admit(owner, execution_id)
            self._admit(execution)
            return True
        return False

    def _admit(self, execution: Execution) -> None:
        del self.queue[execution.execution_id]
        self.running[execution.execution_id] = execution
        execution.advance(ExecutionTrigger.ADMITTED, self._cause)
        for name in execution.program.producers:
            if name not in execution.program.kept:
                self._create(execution, name)
        self._dispatch(execution)

    def _dispatch(self, execution: Execution) -> None:
        """Places what can be placed and sends it: one `Execute` per worker, then relocations to earlier readers."""
        for task in list(execution.waiting.values()):
            place_ = task.node.place
            if task.node.on_worker_lost == "drop" and isinstance(place_, Slice) and self.resources.missing(place_.name):
                self._drop_task(task, f"slice {place_.name} is not up")
        if execution.unfinished == 0:
            return self._end(execution, ExecutionTrigger.DONE)
        placed = place(execution, self.resources, self.credits, self._cause, self._must_wait)
        self._held_back += sum(bool(task.node.donates) for task in execution.waiting.values())
        per_worker: dict[str, list[Task]] = {}
        for task in placed:
            for oid in task.object_ids.values():
                self.objects[oid].workers = task.workers
            for worker in task.workers:
                per_worker.setdefault(worker, []).append(task)
        gang: dict[str, int] = {}
        for worker, tasks in per_worker.items():
            self._install(worker, execution)
            execution.involved[worker] = None
            world = self.resources.world_of(worker)
            if self.resources.world_size(worker) > 1 and world not in gang:
                gang[world] = self._gang[world] = self._gang.get(world, 0) + 1
            self._out.append(execute(worker, execution, tasks, gang.get(world, 0), self.objects, self._cause))
        self._out += relocations(execution, placed, self._cause)

    def _must_wait(self, task: Task) -> bool:
        return bindings.must_wait(task, self.objects, self.running | self.queue)

    def _install(self, worker: str, execution: Execution) -> None:
        program = execution.program
        if program.program_id in self._installed[worker]:
            return
        self._installed[worker].add(program.program_id)
        nodes = program.fragment(self.resources.places_of(worker))
        sources = {node.node_id: tuple(map(program.slice_of, node.inputs)) for node in nodes}
        names = {name for found in sources.values() for name in found} | {node.place.name for node in nodes}
        grants = tuple(self.resources.grants[name] for name in sorted(names) if name in self.resources.grants)
        command = c.InstallProgram(
            worker, program.program_id, program.name, nodes, grants, sources if grants else {}, cause=self._cause
        )
        self._out.append(command)

    def blockers(self, execution: Execution) -> tuple[list[str], list[Place]]:
        """What keeps a queued execution back; see placement.py."""
        return blockers(execution, self.running.values(), self.resources, self.credits)

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
}
