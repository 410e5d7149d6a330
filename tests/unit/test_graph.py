"""Programs: handles are the only edges; what is not a program is refused and told why."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waypath.controller.graph import Node, Param, Pool, Program, ProgramBuilder, Slice
from waypath.proto.errors import GraphError


def node(node_id: str, *inputs: str, **changes: Any) -> Node:
    return replace(Node(node_id, "method", "s", "m", Slice("trainer"), tuple(inputs)), **changes)


def two_nodes(option: int = 1) -> Program:
    b = ProgramBuilder("p")
    first = b.call("rollout", "generate", on=Pool("inference"), options={"offset": option})
    b.call("trainer", "train", first, on=Slice("trainer"), deadline_s=3.0)
    return b.build()


def test_a_builder_names_nodes_draws_edges_and_picks_what_happens_on_loss() -> None:
    program = two_nodes()
    generate, train = program.nodes
    assert (generate.node_id, train.node_id) == ("generate_0", "train_0")
    assert train.inputs == ("generate_0",)
    assert (generate.on_worker_lost, train.on_worker_lost) == ("retry", "fail")
    assert program.consumers == {"generate_0": ("train_0",), "train_0": ()}
    assert (program.slices, program.pools) == (("trainer",), ("inference",))


def test_identity_is_content() -> None:
    assert two_nodes().program_id == two_nodes().program_id
    assert two_nodes(1).digest != two_nodes(2).digest
    again = Program.from_json(json.loads(json.dumps(two_nodes().to_json())))
    assert again == two_nodes() and again.program_id == two_nodes().program_id


def test_options_cannot_be_changed_behind_the_programs_back() -> None:
    options = {"list": [1]}
    b = ProgramBuilder("p")
    b.call("s", "m", on=Slice("a"), options=options)
    program, options["list"] = b.build(), [2]
    program.nodes[0].options["list"].append(3)
    assert program.nodes[0].options == {"list": [1]}


def test_kinds() -> None:
    b = ProgramBuilder("p")
    made = b.call("trainer", "expose", on=Slice("trainer"))
    b.transfer(made, on=Slice("inference-0"))
    assert [n.kind for n in b.build().nodes] == ["method", "transfer"]


def test_a_fragment_is_what_a_worker_may_run() -> None:
    program = two_nodes()
    assert [n.node_id for n in program.fragment([Slice("inference-0"), Pool("inference")])] == ["generate_0"]
    assert [n.node_id for n in program.fragment([Slice("trainer")])] == ["train_0"]
    assert program.fragment([Pool("trainer")]) == ()


BAD_NODES: list[tuple[tuple[Node, ...], str]] = [
    ((), "expected 1 to 100000 nodes, found 0"),
    ((node("a"), node("a")), "node a: duplicate node id"),
    ((node("a", "b"),), "node a: input 0: expected the id of a node, found 'b'"),
    ((node("a", "b"), node("b", "c"), node("c", "a")), "cycle: "),
    ((node("a", "a"),), "cycle: a → a"),
    (
        (node("a", kind="magic"),),
        "expected one of ['method', 'transfer', 'function', 'select', 'sequence'], found 'magic'",
    ),
    ((node("x/y"),), "without '/'"),
    ((node("a", deadline_s=-1.0),), "deadline_s: expected a number ≥ 0, found -1.0"),
    ((node("a", service=""),), "expected a service and a method"),
    ((node("a", kind="transfer"),), "a transfer has 1 input, found 0"),
    ((node("a", on_worker_lost="pray"),), "expected one of ['fail', 'retry', 'drop'], found 'pray'"),
    ((node("a", on_worker_lost="drop"), node("b", "a")), "node b: input 0: a may be dropped"),
]


@pytest.mark.parametrize(("nodes", "message"), BAD_NODES, ids=[message[:24] for _, message in BAD_NODES])
def test_hand_built_programs_are_held_to_the_rules(nodes: tuple[Node, ...], message: str) -> None:
    with pytest.raises(GraphError) as caught:
        Program("p", nodes)
    assert message in str(caught.value)


def test_a_cycle_is_named_along_its_edges() -> None:
    with pytest.raises(GraphError, match=r"cycle: (a → b → a|b → a → b)"):
        Program("p", (node("x"), node("a", "b"), node("b", "a", "x"), node("tail", "b")))


def test_builder_errors() -> None:
    b, other = ProgramBuilder("p"), ProgramBuilder("q")
    foreign = other.call("s", "m", on=Slice("a"), node_id="far")
    with pytest.raises(GraphError, match="expected a handle of this builder, found 'far' of builder 'q'"):
        b.call("s", "m", foreign, on=Slice("a"))
    with pytest.raises(GraphError, match="expected a Handle, found str"):
        b.call("s", "m", "far", on=Slice("a"))  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="options are not JSON"):
        b.call("s", "m", on=Slice("a"), options={"x": object()})
    b.call("s", "m", on=Slice("a"), node_id="n")
    with pytest.raises(GraphError, match="node id 'n' is taken"):
        b.call("s", "m", on=Slice("a"), node_id="n")
    with pytest.raises(GraphError, match="program empty: expected 1 to"):
        ProgramBuilder("empty").build()


def test_places_are_checked_against_a_cluster() -> None:
    program = two_nodes()
    program.check_placements({"trainer"}, {"inference"})
    with pytest.raises(GraphError, match="node generate_0: placed on pool 'inference', which does not exist"):
        program.check_placements({"trainer", "inference"}, {"reward"})
    with pytest.raises(GraphError, match=r"node train_0: placed on slice 'trainer'.* this cluster has none"):
        program.check_placements([], ["inference"])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda value: value.pop("name"),
        lambda value: value["nodes"][0].pop("kind"),
        lambda value: value["nodes"][0].update(options=[1]),
        lambda value: value["nodes"][0].update(deadline_s="soon"),
        lambda value: value.update(nodes=None),
    ],
)
def test_malformed_json_is_a_graph_error(spoil: Callable[[dict[str, Any]], None]) -> None:
    value = two_nodes().to_json()
    spoil(value)
    with pytest.raises(GraphError):
        Program.from_json(value)


@given(st.permutations(range(9)), st.integers(0, 2**9 - 1))
def test_any_order_of_a_dag_becomes_a_topological_one(order: list[int], bits: int) -> None:
    edges = {k: [j for j in range(k) if bits >> ((k * 3 + j) % 9) & 1] for k in range(9)}
    program = Program("p", tuple(node(str(k), *map(str, edges[k])) for k in order))
    position = {n.node_id: i for i, n in enumerate(program.nodes)}
    assert all(position[source] < position[n.node_id] for n in program.nodes for source in n.inputs)
    assert Program("p", program.nodes).nodes == program.nodes


def test_parameters_and_outputs_are_names_of_one_space() -> None:
    s = Slice("s")
    node = Node("n", "method", "s", "m", s, inputs=("x",))
    program = Program("p", (node,), (Param("x", s),), ("n",))
    assert program.consumers["x"] == ("n",) and program.place_of("x") == s and program.aval_of("n") == ()
    assert Program.from_json(program.to_json()) == program and program.sources["n"] == ()
    assert program.digest != Program("p", (node,), (Param("x", s),)).digest
    for params, outputs, message in (
        ((), (), "node n: input 0: expected the id of a node, found 'x', which is not in the program"),
        ((Param("x", s), Param("x", s)), (), "parameter x: the name is taken"),
        ((Param("x", s), Param("n", s)), (), "parameter n: the name is taken"),
        ((Param("x", s), Param("a/b", s)), (), "expected a non-empty text without '/'"),
        ((Param("x", s),), ("x",), "output 'x': expected a node that always has an object"),
        ((Param("x", s),), ("n", "n"), "an output twice"),
    ):
        with pytest.raises(GraphError, match=message):
            Program("p", (node,), params, outputs)
    with pytest.raises(GraphError, match="parameter x: lies on slice s, which does not exist"):
        Program("p", (Node("n", "method", "s", "m", Pool("q"), inputs=("x",)),), (Param("x", s),)).check_placements(
            (), ("q",)
        )


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (Node("n", "loop", "", "m", Slice("s")), "kind: expected one of"),
        (Node("n", "function", "", "d", Pool("q"), gives=((),)), "a function runs on a slice, found pool q"),
        (
            Node("n", "function", "", "d", Slice("s")),
            "a function says what it takes of each of its 0 inputs and what it gives",
        ),
        (Node("n", "select", "", "select", Slice("s")), "a select has 1 input, found 0"),
        (Node("n", "transfer", "", "transfer", Slice("s")), "a transfer has 1 input, found 0"),
        (Node("n", "method", "s", "m", Slice("s"), donates=(0,)), r"donates \[0\] of 0 inputs"),
        (Node("n", "sequence", "", "sequence", Slice("s")), "a sequence with 0 steps"),
        (Node("n", "method", "", "m", Slice("s")), "expected a service and a method, found ''.'m'"),
    ],
)
def test_a_node_has_what_its_kind_asks_for(node: Node, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        Program("p", (node,))


def test_a_builder_refuses_names_that_are_taken_and_strangers() -> None:
    b = ProgramBuilder("p")
    x = b.param("x", on=Slice("s"))
    with pytest.raises(GraphError, match="the name 'x' is taken"):
        b.param("x", on=Slice("s"))
    with pytest.raises(GraphError, match="a parameter has that name"):
        b.call("s", "m", x, on=Slice("s"), node_id="x")
    with pytest.raises(GraphError, match="'y' is of builder 'other'"):
        b.output(ProgramBuilder("other").param("y", on=Slice("s")))


def test_malformed_params_are_no_program() -> None:
    node = Node("n", "method", "s", "m", Slice("s")).to_json()
    for params in ([["x"]], [["x", "s", [[[1], "f", []]]]], [3]):
        with pytest.raises(GraphError, match="malformed params or outputs"):
            Program.from_json({"name": "p", "nodes": [node], "params": params})
