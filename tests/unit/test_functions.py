"""Functions on devices in one process: sequences, donation, damaged artifacts; and which boxes go where, against jax and numpy."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from waypath.controller.client import tracing
from waypath.controller.nodes import Leaf
from waypath.proto import worker_pb2 as pb
from waypath.proto.errors import FunctionError, GraphError, ProtocolError
from waypath.proto.layout import device_boxes
from waypath.proto.names import REGISTERED
from waypath.workers.functions.arrays import DeviceObject, Meshes, build, exposed
from waypath.workers.functions.library import Library
from waypath.workers.functions.registered import function
from waypath.workers.functions.sequence import BoundSequence, ready
from waypath.workers.functions.sources import copies

AVAL = (Leaf((4,), "float32", ((),)),)
MESH = pb.MeshSlice(name="s", axes=["x"], sizes=[1], devices=[pb.MeshDevice(worker="w")])
_MESSAGE = pb.Aval(leaves=[pb.Leaf(shape=[4], dtype="float32", spec=[pb.Axes()])])
AXES = ("a", "b", "c")


def exported(fun: Any, count: int = 1) -> bytes:
    """A function of `count` arrays of four numbers, as a client exports it."""
    return tracing.export_function(fun, [(AVAL, jax.tree.structure(0))] * count, None, ("x",), (1,), "cpu", "f").data


def library(*functions: bytes, damage: bool = False) -> tuple[Library, list[str]]:
    """A library whose controller has these functions, and their digests."""
    by_digest = {hashlib.sha256(data).hexdigest(): data for data in functions}

    async def source(digest: str) -> AsyncIterator[bytes]:
        data = by_digest[digest]
        yield data[:100]
        yield data[100:] + (b"!" if damage else b"")

    made = Library(source)
    asyncio.run(made.fetch(list(by_digest)))
    return made, list(by_digest)


def step(node_id: str, digest: str, *inputs: str, outputs: int = 1, **options: Any) -> pb.Node:
    """A function step."""
    donates = options.pop("donates", [])
    text = '{"debug_nans": true}' if options.pop("debug_nans", False) else "{}"
    return pb.Node(
        node_id=node_id,
        kind="function",
        method=digest,
        inputs=inputs,
        takes=[_MESSAGE] * len(inputs),
        gives=[_MESSAGE] * outputs,
        donates=donates,
        options_json=text,
    )


def sequence(made: Library, *steps: pb.Node, inputs: tuple[str, ...], exports: tuple[str, ...]) -> BoundSequence:
    """The steps on this process's first device."""
    node = pb.Node(node_id="seq_0", kind="sequence", inputs=inputs, steps=steps, exports=exports, slice="s")
    return BoundSequence(node, Meshes().mesh(MESH), made, "e")


def held(*values: Any) -> DeviceObject:
    """An object of whole arrays on the first device."""
    mesh = Meshes().mesh(MESH)
    return DeviceObject.of([build(_MESSAGE.leaves[0], mesh, {0: np.array(v, np.float32)}) for v in values])


def test_a_sequence_gives_what_numpy_gives_and_keeps_only_its_exports() -> None:
    made, (double, add) = library(exported(lambda x: x * 2), exported(lambda x, y: x + y, 2))
    steps = [step("a", double, "x"), step("b", double, "a"), step("c", add, "b", "x")]
    bound = sequence(made, *steps, inputs=("x",), exports=("b", "c"))
    found, checks = bound.run([held([1, 2, 3, 4])], "e on w")
    ready(found, checks, "e/seq_0 on w")
    assert sorted(found) == ["b", "c"] and found["c"].nbytes == 16
    assert np.array_equal(found["b"].leaves[0], [4, 8, 12, 16])
    assert np.array_equal(found["c"].leaves[0], [5, 10, 15, 20])


@function("tests.scaled")
def scaled(x: Any, y: Any = None, *, by: float = 2.0) -> Any:
    """What a worker knows by name."""
    return x * by


def test_a_registered_function_is_compiled_for_what_its_call_takes_and_gives() -> None:
    made, _ = library()

    def call(gives: pb.Aval, value: Any, dtype: str) -> Any:
        takes = pb.Aval(leaves=[pb.Leaf(shape=[4], dtype=dtype, spec=[pb.Axes()])])
        node = pb.Node(
            node_id="a", kind="function", method=f"{REGISTERED}tests.scaled", inputs=["x"], takes=[takes], gives=[gives]
        )
        given = DeviceObject.of([build(takes.leaves[0], Meshes().mesh(MESH), {0: np.array(value, dtype)})])
        return sequence(made, node, inputs=("x",), exports=("a",)).run([given], "e on w")[0]["a"].leaves[0]

    def aval(shape: list[int], dtype: str) -> pb.Aval:
        return pb.Aval(leaves=[pb.Leaf(shape=shape, dtype=dtype, spec=[pb.Axes()])])

    assert np.array_equal(call(_MESSAGE, [1, 2, 3, 4], "float32"), [2, 4, 6, 8])
    for wrong in (aval([4], "int32"), aval([2], "float32"), aval([4], "int8")):
        with pytest.raises(GraphError, match=r"tests.scaled gives .* the program says"):
            call(wrong, [1, 2, 3, 4], "float32")
    with pytest.raises(GraphError, match=r"gives .*float32.* the program says .*int32"):
        call(aval([4], "int32"), [1, 2, 3, 4], "int32")
    assert np.array_equal(call(_MESSAGE, [1, 2, 3, 4], "int32"), [2, 4, 6, 8])


def test_outputs_are_selected() -> None:
    made, (both,) = library(exported(lambda x: (x + 1, x - 1)))
    select = pb.Node(node_id="y", kind="select", inputs=["f"], options_json='{"index":1}')
    found, _ = sequence(made, step("f", both, "x", outputs=2), select, inputs=("x",), exports=("y",)).run(
        [held([1, 2, 3, 4])], "e on w"
    )
    assert np.array_equal(found["y"].leaves[0], [0, 1, 2, 3])


def test_donated_memory_is_really_free_or_the_holder_is_named() -> None:
    made, (double, total) = library(exported(lambda x: x * 2), exported(lambda x: jnp.broadcast_to(x.sum(), (4,))))
    value = held([1, 2, 3, 4])
    bound = sequence(made, step("a", double, "x", donates=[0]), inputs=("x",), exports=("a",))
    bound.run([value], "e on w")
    assert value.leaves[0].is_deleted()
    kept = held([1, 2, 3, 4])
    view = np.asarray(kept.leaves[0])  # what a service that looks at an array would leave behind
    with pytest.raises(FunctionError, match=r"e/a on w.*was not deleted.*view"):
        bound.run([kept], "e on w")
    assert np.array_equal(view, [1, 2, 3, 4])
    assert total


def test_reading_an_object_for_a_peer_does_not_cancel_its_donation() -> None:
    made, (double,) = library(exported(lambda x: x * 2))
    value = held([1, 2, 3, 4])
    tensors = exposed(value)
    view = tensors["0"].find((1,), (3,))
    assert view is not None and np.array_equal(view, [2, 3])
    bound = sequence(made, step("a", double, "x", donates=[0]), inputs=("x",), exports=("a",))
    bound.run([value], "e on w")
    assert value.leaves[0].is_deleted()


def test_a_nan_is_told_with_step_and_output() -> None:
    made, (log,) = library(exported(jnp.log))
    bound = sequence(made, step("a", log, "x", debug_nans=True), inputs=("x",), exports=("a",))
    found, checks = bound.run([held([1, 2, 3, -1])], "e on w")
    with pytest.raises(FunctionError, match=r"e/a on w: .*FloatingPointError: NaN in output 0, float32\[4\]"):
        ready(found, checks, "e/seq_0 on w")
    found, checks = bound.run([held([1, 2, 3, 4])], "e on w")
    ready(found, checks, "e/seq_0 on w")


def test_an_input_that_failed_fails_the_sequence_of_one_process() -> None:
    made, (double,) = library(exported(lambda x: x * 2))
    bound = sequence(made, step("a", double, "x"), inputs=("x",), exports=("a",))
    with pytest.raises(FunctionError, match="the first cause"):
        bound.run([FunctionError("the first cause")], "e on w")


def test_bytes_that_are_not_what_the_digest_says_are_refused() -> None:
    with pytest.raises(ProtocolError, match=r"bytes that came have SHA-256"):
        library(exported(lambda x: x), damage=True)


def _for_two_devices() -> bytes:
    mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("x"))
    fun = jax.jit(lambda x: (x,), in_shardings=split, out_shardings=(split,))
    return bytes(export.export(fun, platforms=["cpu"])(jax.ShapeDtypeStruct((4,), np.float32)).serialize())


def _for_tpu() -> bytes:
    return bytes(
        export.export(jax.jit(lambda x: (x,)), platforms=["tpu"])(jax.ShapeDtypeStruct((4,), np.float32)).serialize()
    )


@pytest.mark.parametrize(
    ("data", "words"),
    [
        pytest.param(b"garbage" * 50, "cannot be read", id="garbage"),
        pytest.param(_for_two_devices(), "exported for 2 devices, the slice has 1", id="devices"),
        pytest.param(_for_tpu(), "exported for tpu, the slice is cpu", id="platform"),
        pytest.param(exported(lambda x: x[:2]), r"gives .*\(2,\).* the program says", id="shape"),
        pytest.param(exported(lambda x, y: x + y, 2), "takes", id="arguments"),
    ],
)
def test_a_function_that_does_not_fit_is_refused_before_xla_sees_it(data: bytes, words: str) -> None:
    made, (digest,) = library(data)
    with pytest.raises(GraphError, match=words) as caught:
        sequence(made, step("a", digest, "x"), inputs=("x",), exports=("a",))
    assert caught.value.where == "e/a"


def test_custom_calls_are_taken_from_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    made, (digest,) = library(exported(lambda x: jnp.linalg.qr(x.reshape(2, 2))[0].reshape(4)))
    sequence(made, step("a", digest, "x"), inputs=("x",), exports=("a",))
    monkeypatch.setattr("waypath.workers.jax_compat.stable_custom_calls", lambda: frozenset[str]())
    made, (digest,) = library(exported(lambda x: jnp.linalg.qr(x.reshape(2, 2))[0].reshape(4)))
    with pytest.raises(GraphError, match="custom calls that are not allowed: lapack_"):
        sequence(made, step("a", digest, "x"), inputs=("x",), exports=("a",))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[tuple[str, ...], ...], tuple[int, ...]]:
    """A shape, a spec that divides it, and mesh sizes over `AXES`."""
    sizes = tuple(draw(st.integers(1, 3)) for _ in AXES)
    left = list(draw(st.permutations(AXES)))
    shape, spec = [], []
    for _ in range(draw(st.integers(0, 3))):
        axes = tuple(left.pop() for _ in range(draw(st.integers(0, min(2, len(left))))))
        spec.append(axes)
        shape.append(draw(st.integers(0, 3)) * math.prod(sizes[AXES.index(axis)] for axis in axes))
    return tuple(shape), tuple(spec), sizes


@given(layouts())
@settings(max_examples=200, deadline=None)
def test_device_boxes_are_jax_s(layout: Any) -> None:
    shape, spec, sizes = layout
    mesh = AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * 3)
    sharding = NamedSharding(mesh, PartitionSpec(*(axes or None for axes in spec)))
    boxes = device_boxes(shape, spec, AXES, sizes)
    assert {tuple(b - a for a, b in zip(*box, strict=True)) for box in boxes} == {sharding.shard_shape(shape)}
    covered = np.zeros(shape, int)
    for lower, upper in set(boxes):
        covered[tuple(slice(a, b) for a, b in zip(lower, upper, strict=True))] += 1
    assert (covered == 1).all()
    # jax's order: the index of a device along a dimension counts its axes, the outermost first
    for device, (lower, _) in zip(np.ndindex(sizes), boxes, strict=True):
        for dimension, axes in enumerate(spec):
            index = 0
            for axis in axes:
                index = index * sizes[AXES.index(axis)] + device[AXES.index(axis)]
            assert lower[dimension] == index * sharding.shard_shape(shape)[dimension]


@given(layouts(), st.integers(0, 5))
@settings(max_examples=200, deadline=None)
def test_every_element_that_a_reader_wants_is_copied_once_from_who_holds_it(layout: Any, seed: int) -> None:
    shape, spec, sizes = layout
    rng = np.random.default_rng(seed)
    count = math.prod(sizes)
    source = pb.MeshSlice(
        name="s", axes=AXES, sizes=sizes, devices=[pb.MeshDevice(worker=f"w{rng.integers(3)}") for _ in range(count)]
    )
    leaf = pb.Leaf(shape=shape, dtype="float32", spec=[pb.Axes(names=axes) for axes in spec])
    holds = {}
    for device, box in zip(source.devices, device_boxes(shape, spec, AXES, sizes), strict=True):
        holds.setdefault(box, set()).add(device.worker)
    lower = tuple(int(rng.integers(0, n + 1)) for n in shape)
    upper = tuple(int(rng.integers(a, n + 1)) for a, n in zip(lower, shape, strict=True))
    written = np.zeros(shape, int)
    for copy in copies("0", leaf, source, (lower, upper), "w0"):
        written[tuple(slice(a, b) for a, b in zip(copy["lower"], copy["upper"], strict=True))] += 1
        inside = [
            workers
            for (a, b), workers in holds.items()
            if all(x <= y for x, y in zip(a, copy["lower"], strict=True))
            and all(x >= y for x, y in zip(b, copy["upper"], strict=True))
        ]
        assert any(copy["source"] in workers for workers in inside)
        assert copy["source"] == "w0" or all("w0" not in workers for workers in inside)
    wanted = np.zeros(shape, int)
    wanted[tuple(slice(a, b) for a, b in zip(lower, upper, strict=True))] = 1
    assert np.array_equal(written, wanted)
