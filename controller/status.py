"""What the scheduler says about itself: which execution waits for what, in words.

Must not change anything. Called by `Scheduler.describe`, for `waypath status` and for the cause of a missed deadline.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from waypath.controller.execution import Execution, ExecutionState, Task, TaskState
from waypath.controller.graph import Pool

if TYPE_CHECKING:
    from waypath.controller.scheduler import Scheduler

MAX_WAITS = 32
MAX_NAMES = 4


def describe(scheduler: Scheduler) -> dict[str, Any]:
    """Returns JSON: `workers`, `pools` and `executions` (queued and running, in order) with `waits` as sentences."""
    resources = scheduler.resources
    return {
        "workers": {
            name: {
                "incarnation": live.incarnation,
                "world": live.world,
                "executions": scheduler.credits.executions(name),
                "nodes": scheduler.credits.nodes(name),
                "object_bytes": scheduler.objects.held_on(name),
                "acknowledged": scheduler.acknowledged[name],
            }
            for name, live in resources.live.items()
        },
        "slices": {
            name: {"workers": list(w), "missing": list(resources.missing(name))} for name, w in resources.slices.items()
        },
        "pools": {
            name: {"members": list(members), "ready": list(resources.ready_members(name))}
            for name, members in resources.pools.items()
        },
        "memory": [
            {"slices": list(names), "reserved_bytes": used, "device_bytes": capacity}
            for names, used, capacity in scheduler.memory.cells()
        ],
        "executions": [
            _describe_execution(scheduler, execution)
            for execution in [*scheduler.running.values(), *scheduler.queue.values()]
        ],
        "dropped_events": len(scheduler.dropped),
    }


def _describe_execution(scheduler: Scheduler, execution: Execution) -> dict[str, Any]:
    sentences = list(_waits(scheduler, execution))
    if len(sentences) > MAX_WAITS:
        sentences = [*sentences[:MAX_WAITS], f"… and {len(sentences) - MAX_WAITS} more"]
    return {
        "execution_id": execution.execution_id,
        "program": execution.program.program_id,
        "owner": execution.owner,
        "state": execution.state.value,
        "finished": len(execution.tasks) - execution.unfinished,
        "nodes": len(execution.tasks),
        "waits": sentences,
    }


def _waits(scheduler: Scheduler, execution: Execution) -> Iterator[str]:
    """Yields one sentence per unfinished node, or one for an execution that is not admitted."""
    if execution.state is ExecutionState.QUEUED:
        full, absent = scheduler.admission.blockers(execution)
        reasons = [f"room on {worker} ({scheduler.credits.max_in_flight} executions in flight)" for worker in full]
        reasons += [f"{place}, as {scheduler.credits.max_in_flight} executions do already" for place in absent]
        reasons += [lacking] if (lacking := scheduler.admission.lacking(execution)) else []
        yield f"{execution.execution_id} waits for {_listed(reasons) if reasons else 'its turn'}"
        return
    for task in execution.tasks.values():
        if task.state is TaskState.WAITING:
            yield f"{task.node_id} waits for {_place(scheduler, task)}"
        elif task.state is TaskState.SENT:
            yield _sent(task)


def _place(scheduler: Scheduler, task: Task) -> str:
    place = task.node.place
    if isinstance(place, Pool):
        return f"a ready member of pool {place.name}"
    missing = scheduler.resources.missing(place.name)
    if not missing:
        return "others that read what it consumes"
    return f"{_listed(list(missing))} of slice {place.name}"


def _sent(task: Task) -> str:
    """Which inputs a sent node waits for; with all there, where it runs."""
    left = [worker for worker in task.workers if worker not in task.results]
    inputs = [
        f"{source.node_id} on {_listed(list(source.workers))}" if source.workers else source.node_id
        for source in task.inputs()
        if source.unfinished
    ]
    if inputs:
        return f"{task.node_id} on {_listed(left)} waits for {_listed(inputs)}"
    return f"{task.node_id} runs on {_listed(left)}"


def _listed(names: list[str]) -> str:
    if len(names) <= MAX_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[:MAX_NAMES])} and {len(names) - MAX_NAMES} more"
