"""Functions become sequences: which, in which order, what goes in and out."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from waypath.controller.graph import Aval, Handle, Leaf, Pool, Program, ProgramBuilder, Slice
from waypath.controller.sequences import fuse
from waypath.proto.errors import GraphError

A, B = Slice("a"), Slice("b")
X: Aval = (Leaf((8,), "float32", ((),)),)
Y: Aval = (Leaf((4,), "float32", ((),)),)


def call(
    b: ProgramBuilder, *inputs: Handle, on: Slice = A, gives: tuple[Aval, ...] = (X,), **options: Any
) -> tuple[Handle, ...]:
    return b.function("f" * 64, *inputs, on=on, takes=[X] * len(inputs), gives=gives, **options)


def test_a_chain_on_one_slice_is_one_node() -> None:
    b = ProgramBuilder("chain")
    x = b.param("x", on=A, aval=X)
    for _ in range(5):
        (x,) = call(b, x)
    b.output(x)
    program = b.build()
    fused = fuse(program)
    (node,) = fused.nodes
    assert (node.node_id, node.kind, node.inputs) == ("seq_0", "sequence", ("x",))
    assert node.exports == ("function_4",) and node.objects == ("function_4",) and len(node.steps) == 5
    assert fused.program_id == program.program_id and fused.size == 5
    assert fused.aval_of("function_4") == X and fused.place_of("function_4") == A and fused.place_of("x") == A


def test_a_sequence_is_closed_when_somebody_outside_reads_it() -> None:
    b = ProgramBuilder("back and forth")
    (x,) = call(b)
    (other,) = call(b, x)
    there = b.transfer(x, on=B, takes=X, gives=X)
    (y,) = call(b, there, on=B)
    back = b.transfer(y, on=A, takes=X, gives=X)
    call(b, back, other)
    nodes = {node.node_id: node for node in fuse(b.build()).nodes}
    assert list(nodes) == ["seq_0", "transfer_0", "seq_1", "transfer_1", "seq_2"]
    assert nodes["seq_0"].exports == ("function_0", "function_1")
    assert nodes["seq_2"].inputs == ("transfer_1", "function_1") and nodes["seq_2"].exports == ()


def test_what_reads_an_object_stands_before_the_sequence_that_consumes_it() -> None:
    b = ProgramBuilder("read, then consume")
    x = b.param("x", on=A, aval=X)
    call(b)
    b.call("s", "m", x, on=Pool("p"), node_id="reader")
    call(b, x, donates=[0])
    nodes = fuse(b.build()).nodes
    assert [node.node_id for node in nodes] == ["reader", "seq_0"]
    assert nodes[1].donates == (0,)


def test_several_outputs_are_selected_inside() -> None:
    b = ProgramBuilder("two outputs")
    first, second = call(b, gives=(X, Y))
    b.output(second)
    (node,) = fuse(b.build()).nodes
    assert [step.kind for step in node.steps] == ["function", "select", "select"]
    assert node.exports == (second.node_id,) and fuse(b.build()).aval_of(second.node_id) == Y
    assert first.node_id == "function_0.0"


def test_methods_alone_stay_as_they_are_and_names_do_not_clash() -> None:
    b = ProgramBuilder("methods")
    b.call("s", "m", on=Pool("p"))
    program = b.build()
    assert fuse(program) is program
    b.call("s", "m", on=Pool("p"), node_id="seq_0")
    call(b)
    assert [node.node_id for node in fuse(b.build()).nodes] == ["m_0", "seq_0", "seq_0_"]


def test_a_deadline_and_what_becomes_of_it_are_those_of_its_steps() -> None:
    b = ProgramBuilder("p")
    call(b, deadline_s=3.0)
    call(b, deadline_s=1.0)
    (node,) = fuse(b.build()).nodes
    assert node.deadline_s == 3.0 and node.on_worker_lost == "fail"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("slice", r"input 0: function_0 lies on slice a, the function runs on slice b\. Put a transfer between them"),
        ("aval", r"function_1: input 0, function_0: expected float32\[4\] over \(-\), found float32\[8\] over \(-\)"),
        ("twice", r"function_2: input 0: function_0 is donated to function_1, nothing may read it after that"),
        ("kept", "donates input 0, function_0, which is an output"),
        ("several", "function_0 has 2 outputs: read it through a select"),
    ],
)
def test_what_cannot_be_names_node_expected_and_found(wrong: str, message: str) -> None:
    b = ProgramBuilder("p")
    (x, *_) = call(b, gives=(X, Y) if wrong == "several" else (X,))
    if wrong == "slice":
        call(b, x, on=B)
    elif wrong == "aval":
        b.function("g" * 64, x, on=A, takes=[Y], gives=[X])
    elif wrong == "several":
        call(b, Handle(b, "function_0"))
    else:
        call(b, x, donates=[0])
        if wrong == "twice":
            call(b, x)
        else:
            b.output(x)
    with pytest.raises(GraphError, match=message):
        b.build()


def test_programs_at_random_keep_their_steps_in_order_and_have_no_cycle() -> None:
    for seed in range(200):
        program = _random(random.Random(seed))
        fused = fuse(program)
        order = [step.node_id for node in fused.nodes for step in node.steps or (node,)]
        assert sorted(order) == sorted(program.by_id)
        place = {node.node_id: k for k, node in enumerate(fused.nodes)}
        for node in fused.nodes:
            assert all(place[source] < place[node.node_id] for source in fused.sources[node.node_id])
        for spot in (A, B):
            mine = [step.node_id for n in fused.nodes for step in n.steps if n.place == spot]
            assert mine == [n.node_id for n in program.nodes if n.place == spot and n.kind in ("function", "select")]
        assert Program.from_json(program.to_json()) == program


def test_100_000_nodes_are_read_and_fused_in_linear_time() -> None:
    def seconds(count: int) -> float:
        b = ProgramBuilder("long")
        x = b.param("x", on=A, aval=X)
        for _ in range(count):
            (x,) = call(b, x)
        value = b.build().to_json()
        started = time.process_time()
        assert len(fuse(Program.from_json(value)).nodes) == 1
        return time.process_time() - started

    small, large = seconds(10_000), seconds(100_000)
    assert large < 25 * small


def _random(rng: random.Random) -> Program:
    b = ProgramBuilder("random")
    made: dict[Slice, list[Handle]] = {A: [b.param("x", on=A, aval=X)], B: [b.param("y", on=B, aval=X)]}
    for _ in range(rng.randint(1, 30)):
        spot = rng.choice([A, B])
        what = rng.random()
        if what < 0.6:
            made[spot] += call(
                b, *rng.sample(made[spot], min(2, len(made[spot]))), on=spot, gives=(X,) * rng.choice([1, 2])
            )
        elif what < 0.9:
            made[spot].append(b.transfer(rng.choice(made[rng.choice([A, B])]), on=spot, takes=X, gives=X))
        else:
            b.call("s", "m", rng.choice(made[A]), rng.choice(made[B]), on=Pool("p"))
    return b.build()
