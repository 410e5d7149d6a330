"""Sequences: the calls of functions that a slice can make one after the other without asking anybody.

A call of a function costs a worker some microseconds; a node costs the scheduler, the wire and the worker's loop some
hundred. So the functions of a program are dispatched in sequences: one node that waits once for what comes from outside,
runs its steps on the worker's JAX thread, and reports once.

The rule is linear in the program. The open sequence of a slice takes every function and select of that slice. It is
closed, for good, when a transfer or method reads one of its values: what comes later on that slice goes into another.
Nothing can depend on an open sequence and be an input of its next step, because whoever depends on it has closed it; so the
fused program has no cycle, whatever the order of transfers between slices. In its order a sequence stands where its last step stood:
behind whoever reads what a step consumes, before whoever reads what it leaves.

Must not know: workers, executions. Called where a client's program is installed.
"""

from __future__ import annotations

from waypath.controller.graph import Node, Place, Program
from waypath.controller.nodes import STEP_KINDS
from waypath.proto.errors import GraphError


def fuse(program: Program) -> Program:
    """Returns the program with its functions and selects in sequences `seq_<k>`; others stay as they are.

    Objects and the program id stay the same. A step that nobody outside reads leaves no object.
    """
    sequence_of: dict[str, int] = {}
    members: list[list[Node]] = []
    open_on: dict[Place, int] = {}
    for node in program.nodes:
        if node.kind not in STEP_KINDS:
            for source in node.inputs:
                if source in sequence_of and open_on.get(program.place_of(source)) == sequence_of[source]:
                    del open_on[program.place_of(source)]
            continue
        if node.kind == "select" and sequence_of.get(node.inputs[0]) != open_on.get(node.place, -1):
            raise GraphError(
                f"selects from {node.inputs[0]}, of which another output was read already: expected right behind it",
                where=f"program {program.name}, node {node.node_id}",
            )
        if node.place not in open_on:
            open_on[node.place] = len(members)
            members.append([])
        sequence_of[node.node_id] = open_on[node.place]
        members[open_on[node.place]].append(node)
    if not members:
        return program
    exported = set(program.outputs)
    for node in program.nodes:
        own = sequence_of.get(node.node_id)
        exported.update(source for source in node.inputs if own is None or sequence_of.get(source) != own)
    names = {*program.by_id, *program.by_param}
    sequences = [_sequence(_free(f"seq_{k}", names), steps, exported) for k, steps in enumerate(members)]
    nodes: list[Node] = []
    for node in program.nodes:
        number = sequence_of.get(node.node_id)
        if number is None:
            nodes.append(node)
        elif node is members[number][-1]:
            nodes.append(sequences[number])
    fused = Program(program.name, tuple(nodes), program.params, program.outputs)
    fused.__dict__["digest"] = program.digest  # it is the same program, and its own JSON does not tell steps
    return fused


def _sequence(node_id: str, steps: list[Node], exported: set[str]) -> Node:
    own = {step.node_id for step in steps}
    inputs = tuple(dict.fromkeys(source for step in steps for source in step.inputs if source not in own))
    donated = {step.inputs[position] for step in steps for position in step.donates}
    return Node(
        node_id=node_id,
        kind="sequence",
        service="",
        method="sequence",
        place=steps[0].place,
        inputs=inputs,
        deadline_s=max(step.deadline_s for step in steps),
        donates=tuple(position for position, source in enumerate(inputs) if source in donated),
        steps=tuple(steps),
        exports=tuple(step.node_id for step in steps if step.node_id in exported),
    )


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name
