"""The scheduler's commands and events as messages: nothing that programs of clients need is lost on the way."""

from __future__ import annotations

from waypath.controller import commands as c
from waypath.controller.allocation import Grant
from waypath.controller.connection import command_message, node_event
from waypath.controller.graph import Aval, Leaf, ProgramBuilder, Slice
from waypath.controller.sequences import fuse
from waypath.proto import worker_pb2 as pb

S = Slice("s")
X: Aval = (Leaf((8, 2), "float32", (("x", "y"), ())),)
GRANT = Grant("s", "me", ("x", "y"), (2, 1), (("w-0", 0), ("w-1", 3)), ("w-0", "w-1"), (4, 5), "w", "cpu")


def test_an_installed_program_says_steps_avals_meshes_and_sources() -> None:
    b = ProgramBuilder("p")
    first, _ = b.function(
        "d" * 64, b.param("x", on=S, aval=X), on=S, takes=[X], gives=[X, X], donates=[0], deadline_s=2.0
    )
    b.output(first)
    program = fuse(b.build())
    command = c.InstallProgram("w-0", "id", "p", program.nodes, (GRANT,), {"seq_0": ("s",)}, cause="e")
    install = command_message(command).install
    (node,) = install.nodes
    assert (node.kind, node.slice, list(node.sources), list(node.donates), node.deadline_s) == (
        "sequence",
        "s",
        ["s"],
        [0],
        2.0,
    )
    assert [step.kind for step in node.steps] == ["function", "select", "select"]
    assert node.exports == ["function_0.0"] and node.steps[0].method == "d" * 64
    (leaf,) = node.steps[0].gives[1].leaves
    assert (list(leaf.shape), leaf.dtype, [list(axes.names) for axes in leaf.spec]) == (
        [8, 2],
        "float32",
        [["x", "y"], []],
    )
    (mesh,) = install.slices
    assert (mesh.name, list(mesh.axes), list(mesh.sizes)) == ("s", ["x", "y"], [2, 1])
    assert [(d.worker, d.local_id, d.process_index) for d in mesh.devices] == [("w-0", 0, 4), ("w-1", 3, 5)]


def test_an_execution_names_the_objects_of_its_parameters() -> None:
    command = c.Execute(
        "w", "e", "id", {"k": 1}, (("seq_0", 0),), {"x": ("w",), "t": ("v",)}, 7, {"x": "d/y"}, cause="e"
    )
    execute = command_message(command).execute
    assert [(at.node_id, at.object_id, list(at.workers)) for at in execute.locations] == [
        ("x", "d/y", ["w"]),
        ("t", "", ["v"]),
    ]
    assert execute.gang_sequence == 7


def test_a_release_says_what_is_kept() -> None:
    (release,) = command_message(c.ReleaseObjects("w", "e", kept=("y",), cause="e")).releases
    assert (release.execution_id, list(release.node_ids), list(release.kept)) == ("e", [], ["y"])


def test_a_finished_sequence_says_the_bytes_of_each_object() -> None:
    message = pb.NodeEvent(
        execution_id="e",
        node_id="seq_0",
        attempt=1,
        state=pb.NodeEvent.FINISHED,
        result_json="{}",
        export_bytes={"y": 4, "z": 8},
    )
    event = node_event("w", "i", message)
    assert isinstance(event, c.NodeFinished) and event.export_bytes == {"y": 4, "z": 8} and event.attempt == 1
