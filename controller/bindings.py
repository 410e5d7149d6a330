"""What an execution's parameters are bound to: the rules, and who reads what.

A binding names an object of the same owner that exists, or will: its execution may still be queued. It is refused where the
object is gone or promised to somebody who consumes it, lies elsewhere, or is not what the parameter says. From the submission
on the object is needed by the nodes that read the parameter.

Must not know: workers, messages. Called by the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from waypath.controller.checks import described
from waypath.controller.execution import Execution, Task, TaskState
from waypath.controller.graph import Program
from waypath.controller.objects import ObjectDirectory
from waypath.proto.errors import GraphError, WaypathError


def check(program: Program, bindings: Mapping[str, str], owner: str, objects: ObjectDirectory) -> None:
    """Raises GraphError or NotFoundError, naming the parameter, where an execution may not be bound so."""
    if bindings.keys() != program.by_param.keys():
        raise GraphError(
            f"expected objects for the parameters {sorted(program.by_param)}, found {sorted(bindings)}",
            where=f"program {program.name}",
        )
    for name, param in program.by_param.items():
        where = f"program {program.name}, parameter {name}"
        try:
            ref = objects.bindable(bindings[name], owner)
        except WaypathError as error:
            error.where = where
            raise
        if ref.place != param.place:
            raise GraphError(f"expected an object on {param.place}, {ref.object_id} lies on {ref.place}", where=where)
        if param.aval and ref.aval and param.aval != ref.aval:
            raise GraphError(f"expected {described(param.aval)}, {ref.object_id} is {described(ref.aval)}", where=where)
    donated = [bindings[node.inputs[k]] for node in program.nodes for k in node.donates if node.inputs[k] in bindings]
    for oid in donated:
        if sum(bound == oid for bound in bindings.values()) > 1:
            raise GraphError(
                f"object {oid} is donated and bound to another parameter too", where=f"program {program.name}"
            )


def bind(execution: Execution, objects: ObjectDirectory) -> None:
    """Notes who reads the objects that the parameters are bound to, and who will consume them."""
    program = execution.program
    for name, oid in execution.bindings.items():
        for node_id in program.consumers[name]:
            objects.need(oid, f"{execution.execution_id}/{node_id}")
    for node in program.nodes:
        for position in node.donates:
            bound = execution.bindings.get(node.inputs[position])
            if bound is not None:
                objects[bound].donated_to = f"{execution.execution_id}/{node.node_id}"


def unbind(execution: Execution, objects: ObjectDirectory) -> tuple[list[tuple[str, str]], list[str]]:
    """The execution is over: it reads nothing any more. Returns what its nodes have consumed, with the node, and the others.

    A node that was sent may have consumed its input, whatever became of it; what one never got to is as it was.
    """
    consumed: dict[str, str] = {}
    for task in execution.tasks.values() if execution.bindings else ():
        for position in task.node.donates:
            bound = execution.bindings.get(task.node.inputs[position])
            if bound is None or bound not in objects or objects[bound].donated_to != task.full_id:
                continue
            if task.workers:
                consumed[bound] = task.full_id
            else:
                objects[bound].donated_to = ""
    for name, oid in execution.bindings.items():
        for node_id in execution.program.consumers[name]:
            if oid in objects:
                objects.consumed(oid, f"{execution.execution_id}/{node_id}")
    return list(consumed.items()), [oid for oid in execution.bindings.values() if oid not in consumed]


def must_wait(
    task: Task, back: Collection[str], objects: ObjectDirectory, find: Callable[[str], Execution | None]
) -> bool:
    """Has a node that consumes an object to wait for others that read it?

    Sequences of the same slice that are sent before run before it, by the order of the slice's lane. Whoever reads at a
    pace of its own, or is not sent yet, comes first. `back`: the nodes of the same execution that are not going out now.
    """
    ids = _ids(task)
    for position in task.node.donates:
        oid = ids[position]
        for key in objects[oid].needed_by:
            execution_id, _, node_id = key.rpartition("/")
            execution = find(execution_id or oid.rpartition("/")[0])
            other = None if execution is None else execution.tasks.get(node_id)
            if other is task or other is None or not other.unfinished:
                continue
            in_order = other.node.kind == "sequence" and other.node.place == task.node.place
            goes_now = execution is task.execution and node_id not in back
            if not in_order or not (other.state is TaskState.SENT or goes_now):
                return True
    return False


def _ids(task: Task) -> list[str]:
    execution = task.execution
    return [execution.bindings.get(name) or f"{execution.execution_id}/{name}" for name in task.node.inputs]
