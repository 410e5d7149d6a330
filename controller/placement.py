"""Which worker gets which node, and what keeps an execution from being admitted.

Placement is balanced, and a function of the order of nodes and of what members have already, never of chance. Must not
know: messages, recovery. Called by the scheduler.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence

from waypath.controller.credits import Credits
from waypath.controller.execution import Execution, Task, TaskTrigger
from waypath.controller.graph import Place, Pool, Program
from waypath.controller.resources import Resources

MAX_NAMED = 8


def spread(count: int, loads: Sequence[int]) -> list[int]:
    """Returns for each of `count` nodes the index of its member.

    Members are filled to an even level, given what they already have (`loads`), the earlier member first on a tie. Nodes
    keep their order: each member gets one contiguous block.

    >>> spread(5, [0, 0])
    [0, 0, 0, 1, 1]
    >>> spread(3, [2, 0])
    [0, 1, 1]
    """
    heap = [(load, index) for index, load in enumerate(loads)]
    heapq.heapify(heap)
    quota = [0] * len(loads)
    for _ in range(count):
        load, index = heap[0]
        quota[index] += 1
        heapq.heapreplace(heap, (load + 1, index))
    return [index for index, share in enumerate(quota) for _ in range(share)]


def candidates(resources: Resources, place: Place) -> tuple[str, ...]:
    """The slices that a node on `place` could go to now; none where the slice is not up or the pool has no ready member."""
    if isinstance(place, Pool):
        return resources.ready_members(place.name)
    return () if resources.missing(place.name) else (place.name,)


def reach(program: Program, resources: Resources) -> set[str]:
    """The workers that an execution of the program could go to now."""
    names = [name for place in program.places for name in candidates(resources, place)]
    return {worker for name in names for worker in resources.slices[name]}


def blockers(
    execution: Execution, running: Iterable[Execution], resources: Resources, credits: Credits
) -> tuple[list[str], list[Place]]:
    """What keeps a queued execution back: full workers, and absent places that enough running executions wait for."""
    full: list[str] = []
    absent: list[Place] = []
    others = list(running)
    for place in execution.program.places:
        slices = candidates(resources, place)
        if not slices:
            waiting = sum(any(task.node.place == place for task in o.waiting.values()) for o in others)
            if waiting >= credits.max_in_flight:
                absent.append(place)
            continue
        busy = [[w for w in resources.slices[name] if credits.is_full(w)] for name in slices]
        if all(busy):
            full += [worker for workers in busy for worker in workers]
    return list(dict.fromkeys(full)), absent


def place(
    execution: Execution,
    resources: Resources,
    credits: Credits,
    cause: str,
    must_wait: Callable[[Task, Collection[str]], bool],
) -> list[Task]:
    """Gives waiting nodes their workers, where there are any; returns these tasks in program order.

    A node that consumes an object stays where `must_wait` says so, given the nodes that stay anyway. So does one on device arrays
    whose inputs come from nodes that stay: on its workers it would stand before those in the lane, and wait for ever.
    Nodes of one pool and method are spread together. Members without credit are used only where all are full: an
    execution that was admitted is not held back again.
    """
    groups: dict[tuple[Place, str, str], list[Task]] = {}
    back: set[str] = set()
    where: dict[Place, tuple[str, ...]] = {}
    for task in execution.in_order(execution.waiting):
        node = task.node
        if node.place not in where:
            where[node.place] = candidates(resources, node.place)
        on_device = node.kind == "sequence" or (node.kind in ("transfer", "method") and node.takes)
        if (
            not where[node.place]
            or (back and on_device and any(source.node_id in back for source in task.inputs()))
            or (node.donates and must_wait(task, back))
        ):
            back.add(node.node_id)
        else:
            groups.setdefault((node.place, node.service, node.method), []).append(task)
    placed: dict[str, Task] = {}
    for (spot, _, _), tasks in groups.items():
        names = where[spot]
        members = [0] * len(tasks)
        if len(names) > 1:
            names = tuple(s for s in names if not any(map(credits.is_full, resources.slices[s]))) or names
            members = spread(len(tasks), [max(map(credits.nodes, resources.slices[name])) for name in names])
        for task, index in zip(tasks, members, strict=True):
            task.workers = resources.slices[names[index]]
            task.advance(TaskTrigger.PLACED, cause, ", ".join(task.workers[:MAX_NAMED]))
            placed[task.node_id] = task
            for worker in task.workers:
                credits.take(worker, execution.execution_id)
    return execution.in_order(placed)
