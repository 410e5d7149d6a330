"""The messages of a dispatch: what is sent to whom once nodes have their workers.

Must not know: why nodes were placed where they are. Called by the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence

from waypath.controller import commands as c
from waypath.controller.execution import Execution, Task


def execute(worker: str, execution: Execution, tasks: Sequence[Task], gang_sequence: int, cause: str) -> c.Execute:
    """Returns the one message that tells `worker` to run `tasks` (program order), with the places of their inputs."""
    sources = [source for task in tasks for source in task.inputs() if source.workers]
    return c.Execute(
        worker,
        execution.execution_id,
        execution.program.program_id,
        execution.args,
        tuple((task.node_id, task.attempt) for task in tasks),
        {source.node_id: source.workers for source in sources},
        gang_sequence,
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
            c.Relocate(worker, execution.execution_id, task.node_id, task.workers, cause=cause) for worker in readers
        ]
    return found
