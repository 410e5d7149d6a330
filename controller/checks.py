"""What makes a program valid: names, shapes of nodes, order, donations, and what is said of the objects along its edges.

Each check raises GraphError naming the node, what was expected and what was found. Must not know: clusters, executions.
Called by `Program` when it is made.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import TYPE_CHECKING

from waypath.controller.nodes import KINDS, MAX_NODES, ON_WORKER_LOST, STEP_KINDS, Aval, Node, Param, Pool, Slice
from waypath.proto.errors import GraphError

if TYPE_CHECKING:
    from waypath.controller.graph import Program


def check_nodes(name: str, nodes: tuple[Node, ...]) -> dict[str, Node]:
    """Returns the nodes by id; raises GraphError on an id, kind, deadline or input that cannot be."""
    if not name:
        raise GraphError("a program needs a name")
    if not 0 < len(nodes) <= MAX_NODES:
        raise GraphError(f"expected 1 to {MAX_NODES} nodes, found {len(nodes)}", where=f"program {name}")
    by_id: dict[str, Node] = {}
    for node in nodes:
        where = f"program {name}, node {node.node_id}"
        if not node.node_id or "/" in node.node_id:
            raise GraphError(f"node id {node.node_id!r}: expected a non-empty text without '/'", where=where)
        if node.node_id in by_id:
            raise GraphError(f"duplicate node id; first used by {by_id[node.node_id]}", where=where)
        if node.kind not in KINDS:
            raise GraphError(f"kind: expected one of {list(KINDS)}, found {node.kind!r}", where=where)
        if not isinstance(node.place, Slice | Pool):
            raise GraphError(f"place: expected a Slice or a Pool, found {node.place!r}", where=where)
        _check_shape(node, where)
        if not 0.0 <= node.deadline_s < float("inf"):
            raise GraphError(f"deadline_s: expected a number ≥ 0, found {node.deadline_s}", where=where)
        if node.on_worker_lost not in ON_WORKER_LOST:
            raise GraphError(
                f"on_worker_lost: expected one of {list(ON_WORKER_LOST)}, found {node.on_worker_lost!r}", where=where
            )
        by_id[node.node_id] = node
    return by_id


def _check_shape(node: Node, where: str) -> None:
    """Raises GraphError where a node has not what its kind asks for."""
    if not node.method or (node.kind == "method" and not node.service):
        raise GraphError(f"expected a service and a method, found {node.service!r}.{node.method!r}", where=where)
    if node.kind in ("transfer", "select") and len(node.inputs) != 1:
        raise GraphError(f"a {node.kind} has 1 input, found {len(node.inputs)}", where=where)
    if node.kind != "method" and node.kind != "transfer" and not isinstance(node.place, Slice):
        raise GraphError(f"a {node.kind} runs on a slice, found {node.place}", where=where)
    if node.kind == "function" and (len(node.takes) != len(node.inputs) or not node.gives):
        raise GraphError(
            f"a function says what it takes of each of its {len(node.inputs)} inputs and what it gives, found "
            f"{len(node.takes)} and {len(node.gives)}",
            where=where,
        )
    if node.kind == "method" and node.takes and len(node.takes) != len(node.inputs):
        raise GraphError(f"a method of {len(node.inputs)} inputs says what it takes of {len(node.takes)}", where=where)
    if any(not 0 <= position < len(node.inputs) for position in node.donates):
        raise GraphError(f"donates {list(node.donates)} of {len(node.inputs)} inputs", where=where)
    if (node.kind == "sequence") != bool(node.steps):
        raise GraphError(f"a {node.kind} with {len(node.steps)} steps", where=where)


def check_names(program: Program, by_id: Mapping[str, Node], producers: Mapping[str, Node]) -> dict[str, Param]:
    """Raises GraphError on a name that means two things or nothing; returns the parameters by name."""
    params: dict[str, Param] = {}
    for param in program.params:
        where = f"program {program.name}, parameter {param.name}"
        if not param.name or "/" in param.name:
            raise GraphError(f"name {param.name!r}: expected a non-empty text without '/'", where=where)
        if param.name in params or param.name in producers or param.name in by_id:
            raise GraphError("the name is taken", where=where)
        params[param.name] = param
    for node in program.nodes:
        for position, source in enumerate(node.inputs):
            producer = producers.get(source)
            if producer is None and source not in params:
                raise GraphError(
                    f"input {position}: expected the id of a node, found {source!r}, which is not in the program",
                    where=f"program {program.name}, node {node.node_id}",
                )
            if producer is not None and producer.on_worker_lost == "drop":
                raise GraphError(
                    f"input {position}: {source} may be dropped, expected a node that always has an object",
                    where=f"program {program.name}, node {node.node_id}",
                )
    if len(set(program.outputs)) < len(program.outputs):
        raise GraphError(f"an output twice: {list(program.outputs)}", where=f"program {program.name}")
    for name in program.outputs:
        if name not in producers or producers[name].on_worker_lost == "drop":
            raise GraphError(
                f"output {name!r}: expected a node that always has an object", where=f"program {program.name}"
            )
    return params


def check_donations(program: Program) -> None:
    """Raises GraphError where an object is read after a node that consumes it, or kept although it is consumed."""
    consumed: dict[str, str] = {}
    for node in program.nodes:
        where = f"program {program.name}, node {node.node_id}"
        for position, source in enumerate(node.inputs):
            if source in consumed:
                raise GraphError(
                    f"input {position}: {source} is donated to {consumed[source]}, nothing may read it after that",
                    where=where,
                )
        for position in node.donates:
            source = node.inputs[position]
            if source in consumed or source in program.kept or node.inputs.count(source) > 1:
                raise GraphError(
                    f"donates input {position}, {source}, which is an output, or read by it twice", where=where
                )
            consumed[source] = node.node_id


def check_edges(program: Program) -> None:
    """Raises GraphError where the input of what works on arrays in place lies elsewhere, or is not what it takes."""
    for node in program.nodes:
        in_place = node.kind in STEP_KINDS or (node.kind == "method" and node.gives)
        if not in_place and not (node.kind == "transfer" and node.takes):
            continue
        where = f"program {program.name}, node {node.node_id}"
        for position, source in enumerate(node.inputs):
            if in_place and program.place_of(source) != node.place:
                raise GraphError(
                    f"input {position}: {source} lies on {program.place_of(source)}, the {node.kind} runs on {node.place}",
                    where=where,
                    remedy="Put a transfer between them",
                )
            given = _given(program, source, node, where)
            if node.takes and given is not None and given != node.takes[position]:
                raise GraphError(
                    f"input {position}, {source}: expected {described(node.takes[position])}, found {described(given)}",
                    where=where,
                )


def described(aval: Aval) -> str:
    """An aval in words."""
    return ", ".join(map(str, aval)) or "no arrays"


def _given(program: Program, source: str, reader: Node, where: str) -> Aval | None:
    """What is known of the object that a node reads; None where nothing is."""
    param = program.by_param.get(source)
    if param is not None:
        return param.aval or None
    producer = program.producers[source]
    if producer.kind == "select":
        called = program.producers.get(producer.inputs[0])
        index = producer.options.get("index")
        if called is None or called.kind != "function" or type(index) is not int or not 0 <= index < len(called.gives):
            raise GraphError(
                f"{source} selects output {index!r} of {producer.inputs[0]}, which has none such", where=where
            )
        return called.gives[index]
    if producer.kind == "function" and len(producer.gives) > 1 and reader.kind != "select":
        raise GraphError(f"{source} has {len(producer.gives)} outputs: read it through a select", where=where)
    return producer.gives[0] if len(producer.gives) == 1 else None


def topological(name: str, nodes: tuple[Node, ...], producers: Mapping[str, Node]) -> tuple[Node, ...]:
    """Returns the topological order that is nearest to the given one; raises GraphError naming a cycle."""
    position = {node.node_id: i for i, node in enumerate(nodes)}
    missing = [0] * len(nodes)
    readers: list[list[int]] = [[] for _ in nodes]
    for i, node in enumerate(nodes):
        for source in {producers[name].node_id for name in node.inputs if name in producers}:
            readers[position[source]].append(i)
            missing[i] += 1
    ready = [i for i, count in enumerate(missing) if count == 0]
    order: list[Node] = []
    while ready:
        i = heapq.heappop(ready)
        order.append(nodes[i])
        for reader in readers[i]:
            missing[reader] -= 1
            if missing[reader] == 0:
                heapq.heappush(ready, reader)
    if len(order) < len(nodes):
        blocked = [node for i, node in enumerate(nodes) if missing[i] > 0]
        raise GraphError(f"cycle: {' → '.join(_cycle(blocked, producers))}", where=f"program {name}")
    return tuple(order)


def _cycle(blocked: list[Node], producers: Mapping[str, Node]) -> list[str]:
    """Returns the ids along one cycle among nodes of which each waits for another of them."""
    waits = {node.node_id: node for node in blocked}
    path = [blocked[0].node_id]
    while True:
        sources = [producers[name].node_id for name in waits[path[-1]].inputs if name in producers]
        following = next(source for source in sources if source in waits)
        if following in path:
            return [*path[path.index(following) :], following][::-1]
        path.append(following)
