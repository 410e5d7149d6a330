"""What has to happen again when a worker is lost: a decision, without effects.

A lost worker takes with it the nodes that it was running and the objects that it held. An object that nobody needs any
more is no loss. One that is needed is computed again, and if what *that* read was freed already, so is that (lineage).

    generate → score → train        generate finished, freed on nobody's account but train's
    the reward worker dies before train has pulled the score: score runs again, and reads generate's object where it is
    the inference worker dies: generate runs again; score does not, its object is held elsewhere

Must not know: messages, placement. Called by the scheduler, which carries the decision out.
"""

from __future__ import annotations

from dataclasses import dataclass

from waypath.controller.execution import Execution, Task, TaskState
from waypath.controller.objects import ObjectDirectory, ObjectState


@dataclass(frozen=True)
class Recovery:
    """`again`: tasks to run once more. `dropped`: tasks to go on without. `fatal`: a task that may not run again."""

    again: tuple[Task, ...]
    dropped: tuple[Task, ...]
    fatal: Task | None


def decide(execution: Execution, lost: str, objects: ObjectDirectory) -> Recovery:
    """Returns what the loss of worker `lost` means for a running execution."""
    hit = [task for task in execution.tasks.values() if _is_hit(task, lost, objects)]
    dropped = tuple(task for task in hit if task.node.on_worker_lost == "drop")
    again: dict[str, Task] = {}
    left = [task for task in hit if task.node.on_worker_lost != "drop"]
    while left:
        task = left.pop()
        if task.node_id in again:
            continue
        again[task.node_id] = task
        left.extend(source for source in task.inputs() if _is_gone(source, objects))
    in_order = tuple(task for node_id, task in execution.tasks.items() if node_id in again)
    fatal = next((task for task in in_order if not _may_run_again(task)), None)
    return Recovery(in_order, dropped, fatal)


def _is_hit(task: Task, lost: str, objects: ObjectDirectory) -> bool:
    if lost not in task.workers:
        return False
    if task.state is TaskState.SENT:
        return True
    held = (objects[oid].state is ObjectState.HELD for oid in task.object_ids.values())
    return task.state is TaskState.FINISHED and any(held)


def _is_gone(task: Task, objects: ObjectDirectory) -> bool:
    gone = (objects[oid].state is not ObjectState.HELD for oid in task.object_ids.values())
    return task.state is TaskState.FINISHED and any(gone)


def _may_run_again(task: Task) -> bool:
    """An output may have been read elsewhere already: it is not computed twice."""
    return task.node.on_worker_lost != "fail" and task.execution.program.kept.isdisjoint(task.node.objects)
