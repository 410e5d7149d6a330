"""The messages of a dispatch: what is sent to whom once nodes have their workers.

Must not know: why nodes were placed where they are. Called by the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence

from waypath.controller import commands as c
from waypath.controller.execution import Execution, Task
from waypath.controller.objects import ObjectDirectory


def execute(
    worker: str, execution: Execution, tasks: Sequence[Task], gang_sequence: int, objects: ObjectDirectory, cause: str
) -> c.Execute:
    """Returns the one message that tells `worker` to run `tasks` (program order), with the places of their inputs."""
    locations: dict[str, tuple[str, ...]] = {}
    bound: dict[str, str] = {}
    for name in dict.fromkeys(name for task in tasks for name in task.node.inputs):
        oid = execution.bindings.get(name)
        if oid is not None:
            locations[name], bound[name] = objects[oid].workers, oid
            continue
        workers = execution.tasks[execution.program.producers[name].node_id].workers
        if workers:
            locations[name] = workers
    return c.Execute(
        worker,
        execution.execution_id,
        execution.program.program_id,
        execution.args,
        tuple((task.node_id, task.attempt) for task in tasks),
        locations,
        gang_sequence,
        bound,
        cause=cause,
    )


def relocations(execution: Execution, placed: Sequence[Task], cause: str) -> list[c.Relocate]:
    """Returns the messages to readers that were sent earlier: where the objects of `placed` will be."""
    now = {task.node_id for task in placed}
    found: list[c.Relocate] = []
    for task in placed:
        readers = {
            worker: None
            for reader in task.consumers()
            if reader.node_id not in now
            for worker in reader.workers
            if worker not in reader.results
        }
        found += [
            c.Relocate(worker, execution.execution_id, name, task.workers, cause=cause)
            for worker in readers
            for name in task.node.objects
        ]
    return found
