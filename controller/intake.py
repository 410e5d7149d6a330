"""Whether a worker's report about a node still means something: current, too late, or impossible.

Must not change anything. Called by the scheduler.
"""

from __future__ import annotations

from waypath.controller.commands import NodeFailed, NodeFinished
from waypath.controller.execution import Execution, Task, TaskState
from waypath.controller.resources import Resources


def judge(
    event: NodeFinished | NodeFailed, execution: Execution | None, resources: Resources, cause: str
) -> Task | str:
    """Returns the task that the event is about, or the reason why it comes too late.

    Raises IllegalTransitionError, with the execution's story, on a report of something that was never asked for.
    """
    if execution is None or execution.over:
        return "the execution is over or unknown"
    if not resources.is_current(event.worker, event.incarnation):
        return "that process is not live"
    task = execution.tasks.get(event.node_id)
    if task is None:
        raise execution.illegal(f"{_what(event, cause)}: no such node")
    if event.attempt < task.attempt:
        return f"attempt {task.attempt} is the current one"
    if event.attempt > task.attempt or task.state is TaskState.WAITING:
        raise execution.illegal(f"{_what(event, cause)}: attempt {event.attempt} was never sent")
    if task.state is TaskState.DROPPED:
        return "the node was dropped"
    if event.worker not in task.workers:
        raise execution.illegal(f"{_what(event, cause)}: it was sent to {list(task.workers)}")
    if event.worker in task.results:
        return "a duplicate"
    return task


def _what(event: NodeFinished | NodeFailed, cause: str) -> str:
    return f"{type(event).__name__} of {event.node_id}#{event.attempt} from {event.worker} ({cause})"
