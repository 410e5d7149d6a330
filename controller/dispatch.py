"""The messages of a dispatch: what is sent to whom once nodes have their workers.

Owns what a worker was told for good: the programs that it has installed, and the order of dispatches in its world. Must not
know: why nodes were placed where they are. Called by the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence

from waypath.controller import commands as c
from waypath.controller.admission import Plan
from waypath.controller.execution import Execution, Task
from waypath.controller.objects import ObjectDirectory
from waypath.controller.resources import Resources

Contents = tuple[tuple[tuple[str, int], ...], dict[str, tuple[str, ...]], dict[str, str]]
"""Nodes with their attempts, places of their inputs, and the objects that parameters among these are."""


class Dispatcher:
    """Makes the messages, in the order in which they are to be sent."""

    def __init__(self, resources: Resources, objects: ObjectDirectory) -> None:
        self._resources = resources
        self._objects = objects
        self._installed: dict[str, set[str]] = {}
        self._gang: dict[str, int] = {}

    def joined(self, worker: str) -> None:
        """A worker that was told nothing yet."""
        self._installed[worker] = set()

    def lost(self, worker: str) -> None:
        """It is gone with what it knew."""
        del self._installed[worker]

    def send(self, execution: Execution, plan: Plan, placed: Sequence[Task], cause: str) -> list[c.Command]:
        """Returns one `Execute` per worker, each behind its `InstallProgram` if it is the first, then the relocations."""
        out: list[c.Command] = []
        per_worker: dict[str, list[Task]] = {}
        for task in placed:
            for oid in task.object_ids.values():
                self._objects[oid].workers = task.workers
            for worker in task.workers:
                per_worker.setdefault(worker, []).append(task)
        gang: dict[str, int] = {}
        messages: dict[tuple[str, ...], Contents] = {}
        for worker, tasks in per_worker.items():
            if plan.install_id not in self._installed[worker]:
                self._installed[worker].add(plan.install_id)
                out.append(self._install(worker, execution, plan, cause))
            execution.involved[worker] = None
            world = self._resources.world_of(worker)
            if self._resources.world_size(worker) > 1 and world not in gang:
                gang[world] = self._gang[world] = self._gang.get(world, 0) + 1
            what = tuple(task.node_id for task in tasks)
            if what not in messages:
                messages[what] = contents(execution, tasks, self._objects)
            nodes, locations, bound = messages[what]
            number = gang.get(world, 0)
            out.append(
                c.Execute(
                    worker,
                    execution.execution_id,
                    plan.install_id,
                    execution.args,
                    nodes,
                    locations,
                    number,
                    bound,
                    cause=cause,
                )
            )
        return out + relocations(execution, placed, cause)

    def _install(self, worker: str, execution: Execution, plan: Plan, cause: str) -> c.InstallProgram:
        program = execution.program
        nodes = program.fragment(self._resources.places_of(worker))
        sources = {node.node_id: tuple(map(program.slice_of, node.inputs)) for node in nodes} if plan.grants else {}
        names = {name for found in sources.values() for name in found} | {node.place.name for node in nodes}
        grants = tuple(grant for grant in sorted(plan.grants, key=lambda g: g.name) if grant.name in names)
        return c.InstallProgram(
            worker, plan.install_id, program.name, nodes, grants, sources if grants else {}, cause=cause
        )


def contents(execution: Execution, tasks: Sequence[Task], objects: ObjectDirectory) -> Contents:
    """Returns what a message says that tells workers to run `tasks` (program order): see `Execute`."""
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
    return tuple((task.node_id, task.attempt) for task in tasks), locations, bound


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
