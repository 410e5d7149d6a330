"""One execution of a program: the state of each of its nodes, and the tables of what may happen to them.

Two small machines. A *task* is a node of one execution; an *execution* is the whole. `advance` looks the trigger up in
the table; a missing entry is an illegal transition, and the error tells the execution's story.

Must not know: workers' liveness, placement, messages. Used by the scheduler and its status alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

from waypath.controller.commands import Results
from waypath.controller.graph import Node, Program
from waypath.proto.errors import IllegalTransitionError
from waypath.proto.names import object_id

HISTORY = 256


class TaskState(Enum):
    """Where a node of an execution is."""

    __hash__ = object.__hash__  # that of Enum is a Python function, and tables are looked up all the time

    WAITING = "waiting"
    SENT = "sent"
    FINISHED = "finished"
    FAILED = "failed"
    POISONED = "poisoned"
    CANCELLED = "cancelled"
    DROPPED = "dropped"


class TaskTrigger(Enum):
    """What moves a task."""

    __hash__ = object.__hash__  # that of Enum is a Python function, and tables are looked up all the time

    PLACED = "placed"
    FINISHED = "finished"
    FAILED = "failed"
    LOST = "lost"
    POISONED = "poisoned"
    CANCELLED = "cancelled"
    DROPPED = "dropped"


TASK_TRANSITIONS: dict[TaskState, dict[TaskTrigger, TaskState]] = {
    TaskState.WAITING: {
        TaskTrigger.PLACED: TaskState.SENT,
        TaskTrigger.POISONED: TaskState.POISONED,
        TaskTrigger.CANCELLED: TaskState.CANCELLED,
        TaskTrigger.DROPPED: TaskState.DROPPED,
    },
    TaskState.SENT: {
        TaskTrigger.FINISHED: TaskState.FINISHED,
        TaskTrigger.FAILED: TaskState.FAILED,
        TaskTrigger.LOST: TaskState.WAITING,
        TaskTrigger.POISONED: TaskState.POISONED,
        TaskTrigger.CANCELLED: TaskState.CANCELLED,
        TaskTrigger.DROPPED: TaskState.DROPPED,
    },
    TaskState.FINISHED: {TaskTrigger.LOST: TaskState.WAITING, TaskTrigger.FAILED: TaskState.FAILED},
    TaskState.FAILED: {},
    TaskState.POISONED: {},
    TaskState.CANCELLED: {},
    TaskState.DROPPED: {},
}


class ExecutionState(Enum):
    """Where an execution is."""

    __hash__ = object.__hash__  # that of Enum is a Python function, and tables are looked up all the time

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class ExecutionTrigger(Enum):
    """What moves an execution."""

    __hash__ = object.__hash__  # that of Enum is a Python function, and tables are looked up all the time

    ADMITTED = "admitted"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


EXECUTION_TRANSITIONS: dict[ExecutionState, dict[ExecutionTrigger, ExecutionState]] = {
    ExecutionState.QUEUED: {
        ExecutionTrigger.ADMITTED: ExecutionState.RUNNING,
        ExecutionTrigger.FAILED: ExecutionState.FAILED,
        ExecutionTrigger.CANCELLED: ExecutionState.CANCELLED,
    },
    ExecutionState.RUNNING: {
        ExecutionTrigger.DONE: ExecutionState.DONE,
        ExecutionTrigger.FAILED: ExecutionState.FAILED,
        ExecutionTrigger.CANCELLED: ExecutionState.CANCELLED,
    },
    ExecutionState.DONE: {},
    ExecutionState.FAILED: {},
    ExecutionState.CANCELLED: {},
}

_NAMES = {state: state.value for state in TaskState}
UNFINISHED = frozenset({TaskState.WAITING, TaskState.SENT})


@dataclass(eq=False)
class Task:
    """One node of one execution; `position` is that in program order. `workers` (process order) and `results` belong to the current attempt.

    `reported` holds the results that the run loop was told, those of the first attempt that finished.
    """

    node: Node
    execution: Execution = field(repr=False)
    position: int = 0
    state: TaskState = TaskState.WAITING
    attempt: int = 0
    workers: tuple[str, ...] = ()
    results: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    reported: Results | None = None

    @property
    def node_id(self) -> str:
        return self.node.node_id

    @property
    def object_id(self) -> str:
        """The id of the task's object; of a sequence, which has several or none, use `object_ids`."""
        return object_id(self.execution.execution_id, self.node.node_id)

    @cached_property
    def object_ids(self) -> dict[str, str]:
        """Name → id of the objects that the task leaves behind."""
        return {name: object_id(self.execution.execution_id, name) for name in self.node.objects}

    @property
    def full_id(self) -> str:
        """Names the task among the readers of another execution's object."""
        return f"{self.execution.execution_id}/{self.node.node_id}"

    @property
    def unfinished(self) -> bool:
        return self.state in UNFINISHED

    def inputs(self) -> Iterator[Task]:
        """The tasks of this execution whose objects this one reads, each once."""
        return (self.execution.tasks[source] for source in self.execution.program.sources[self.node_id])

    def reads(self) -> Iterator[tuple[str, str]]:
        """(id, name of this reader) of every object that the task reads, each once."""
        execution = self.execution
        for name in dict.fromkeys(self.node.inputs):
            bound = execution.bindings.get(name)
            if bound is not None:
                yield bound, self.full_id
            else:
                yield object_id(execution.execution_id, name), self.node_id

    def consumers(self) -> Iterator[Task]:
        """The tasks of this execution that read this one's objects, each once."""
        return (self.execution.tasks[c] for c in self.execution.program.readers[self.node_id])

    def advance(self, trigger: TaskTrigger, cause: str, detail: str = "") -> None:
        """Moves the task; raises IllegalTransitionError where the table has no entry."""
        target = TASK_TRANSITIONS[self.state].get(trigger)
        if target is None:
            raise self.execution.illegal(
                f"node {self.node_id} is {self.state.value}, cannot be {trigger.value} ({cause})"
            )
        note = f"{cause}: {self.node_id}#{self.attempt} {_NAMES[self.state]} → {_NAMES[target]}"
        self.execution.history.append(f"{note} ({detail})" if detail else note)
        execution = self.execution
        if target is TaskState.WAITING:
            execution.waiting[self.node_id] = self
        elif self.state is TaskState.WAITING:
            del execution.waiting[self.node_id]
        execution.unfinished += (target in UNFINISHED) - (self.state in UNFINISHED)
        self.state = target


@dataclass(eq=False)
class Execution:
    """A program bound to arguments. `involved`: workers that got a message about it, in order of the first one."""

    execution_id: str
    program: Program
    args: Mapping[str, Any]
    owner: str
    bindings: Mapping[str, str] = field(default_factory=dict)
    state: ExecutionState = ExecutionState.QUEUED
    tasks: dict[str, Task] = field(init=False)
    waiting: dict[str, Task] = field(init=False)
    unfinished: int = field(init=False)
    involved: dict[str, None] = field(default_factory=dict)
    history: deque[str] = field(default_factory=lambda: deque(maxlen=HISTORY))

    def __post_init__(self) -> None:
        self.tasks = {node.node_id: Task(node, self, k) for k, node in enumerate(self.program.nodes)}
        self.waiting = dict(self.tasks)
        self.unfinished = len(self.tasks)

    @property
    def over(self) -> bool:
        return not EXECUTION_TRANSITIONS[self.state]

    def in_order(self, node_ids: Collection[str]) -> list[Task]:
        """These tasks in program order."""
        if len(node_ids) == len(self.tasks):
            return list(self.tasks.values())
        return sorted((self.tasks[node_id] for node_id in node_ids), key=lambda task: task.position)

    def advance(self, trigger: ExecutionTrigger, cause: str) -> None:
        """Moves the execution; raises IllegalTransitionError where the table has no entry."""
        target = EXECUTION_TRANSITIONS[self.state].get(trigger)
        if target is None:
            raise self.illegal(f"it is {self.state.value}, cannot be {trigger.value} ({cause})")
        self.history.append(f"{cause}: {self.state.value} → {target.value}")
        self.state = target

    def illegal(self, what: str) -> IllegalTransitionError:
        """Returns the error for something that may not happen, with the whole story so far."""
        story = "\n  ".join(self.history) or "nothing"
        return IllegalTransitionError(
            f"{what}. What happened before:\n  {story}", where=f"execution {self.execution_id}"
        )

    def results(self) -> dict[str, Results]:
        """Node id → worker → result, for the nodes that finished, in program order."""
        return {node_id: task.reported for node_id, task in self.tasks.items() if task.reported is not None}

    def poisoned_by(self, node_id: str) -> set[str]:
        """Ids of all nodes that depend on `node_id`, however far."""
        found: set[str] = set()
        left = [node_id]
        while left:
            for consumer in self.program.readers[left.pop()]:
                if consumer not in found:
                    found.add(consumer)
                    left.append(consumer)
        return found
