"""The planner, against an executor that copies real arrays: exact, minimal, balanced, and a function of the layouts."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waypath.controller import reshard
from waypath.controller.balance import pour
from waypath.controller.reshard import Plan, PlannedCopy, lower_bound_bytes, plan, volume
from waypath.proto.errors import TransferError
from waypath.proto.layout import Layout, Shard, TensorLayout
from waypath.tools.bench.model_layouts import llama_70b, moe_1t

Arrays = Mapping[str, np.ndarray[Any, Any]]
Spec = Sequence[tuple[int, ...]]


def sharded(
    name: str,
    shape: tuple[int, ...],
    spec: Spec,
    mesh: tuple[int, ...],
    prefix: str,
    per_worker: int,
    dtype: str = "int32",
) -> TensorLayout:
    """`spec[d]`: mesh axes that split dimension d, in order. Uneven sizes split into ⌈n/k⌉, so later shards may be empty."""
    shards = []
    for device, coordinates in enumerate(itertools.product(*map(range, mesh))):
        lower, upper = [], []
        for size, axes in zip(shape, spec, strict=True):
            parts = math.prod(mesh[a] for a in axes)
            index = 0
            for axis in axes:
                index = index * mesh[axis] + coordinates[axis]
            step = -(-size // parts)
            lower.append(min(index * step, size))
            upper.append(min((index + 1) * step, size))
        shards.append(Shard(f"{prefix}{device // per_worker}", device, tuple(lower), tuple(upper)))
    return TensorLayout(name, shape, dtype, tuple(shards))


def box(lower: tuple[int, ...], upper: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(map(slice, lower, upper))


def execute(made: Plan, source: Layout, destination: Layout, values: Arrays) -> None:
    """Copies as told, from what each sender has by then, and checks every destination element once and right."""
    has: dict[tuple[str, str], np.ndarray[Any, Any]] = {}
    for name, tensor in source.tensors.items():
        for shard in tensor.shards:
            mine = has.setdefault((shard.worker, name), np.zeros(tensor.shape, bool))
            mine[box(shard.lower, shard.upper)] = True
    held = {key: mine.copy() for key, mine in has.items()}
    written: dict[tuple[str, int, str], np.ndarray[Any, Any]] = {}
    got: dict[tuple[str, int, str], np.ndarray[Any, Any]] = {}
    for hop in range(-1, made.rounds):
        copies = [c for c in made.copies if c.round == hop] if hop >= 0 else made.local
        for copy in copies:
            region, shape = box(copy.lower, copy.upper), destination.tensors[copy.tensor].shape
            assert has[copy.source, copy.tensor][region].all(), f"{copy} of something that the source has not"
            assert held[copy.holder, copy.tensor][region].all(), f"{copy} of something that the holder does not hold"
            assert hop > 0 or copy.source == copy.holder
            key = (copy.destination, copy.device, copy.tensor)
            written.setdefault(key, np.zeros(shape, int))[region] += 1
            got.setdefault(key, np.zeros(shape, np.int32))[region] = values[copy.tensor][region]
        for copy in copies:
            mine = has.setdefault((copy.destination, copy.tensor), np.zeros(values[copy.tensor].shape, bool))
            mine[box(copy.lower, copy.upper)] = True
    needed: dict[tuple[str, int, str], np.ndarray[Any, Any]] = {}
    for name, tensor in destination.tensors.items():
        for shard in tensor.shards:
            if volume((shard.lower, shard.upper)):
                key = (shard.worker, shard.device, name)
                needed.setdefault(key, np.zeros(tensor.shape, int))[box(shard.lower, shard.upper)] = 1
    assert needed.keys() == written.keys()
    for key, count in needed.items():
        np.testing.assert_array_equal(written[key], count)
        np.testing.assert_array_equal(got[key], values[key[2]] * count)


@st.composite
def layouts(draw: st.DrawFn, same_world: bool = False) -> tuple[Layout, Layout, Arrays]:
    sides: list[dict[str, TensorLayout]] = [{}, {}]
    meshes = [tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))) for _ in sides]
    per_worker = [draw(st.integers(1, 3)) for _ in sides]
    if same_world:
        per_worker[1] = per_worker[0]
    values = {}
    for name in ("a", "b", "c")[: draw(st.integers(1, 3))]:
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        values[name] = np.arange(1, math.prod(shape) + 1, dtype=np.int32).reshape(shape)
        for i, side in enumerate(sides):
            owner = [draw(st.integers(-1, len(shape) - 1)) for _ in meshes[i]]
            spec = [tuple(a for a, d in enumerate(owner) if d == dim) for dim in range(len(shape))]
            prefix = "w" if same_world or i == 0 else "x"
            side[name] = sharded(name, shape, spec, meshes[i], prefix, per_worker[i])
    workers = {s.worker for side in sides for t in side.values() for s in t.shards}
    count = draw(st.integers(0, 3))
    hosts = {w: f"host{draw(st.integers(1, count))}" for w in sorted(workers)} if count else {}
    return Layout(sides[0], hosts), Layout(sides[1], hosts), values


@given(layouts(), st.booleans())
def test_random_meshes_between_worlds(case: tuple[Layout, Layout, Arrays], relay: bool) -> None:
    source, destination, values = case
    made = plan(source, destination, relay=relay)
    execute(made, source, destination, values)
    needed = sum(volume((s.lower, s.upper)) * 4 for t in destination.tensors.values() for s in t.shards)
    assert made.planned_bytes == made.lower_bound_bytes == lower_bound_bytes(source, destination) == needed
    assert not made.local
    if relay:
        _check_machines(made, source, destination)
    if not source.hosts:
        _check_balance(made, source)


def _check_machines(made: Plan, source: Layout, destination: Layout) -> None:
    """A machine that needs an element and holds none of it receives it once; one that holds it never does."""
    host = {**source.hosts, **destination.hosts}
    arrived: dict[tuple[str, str], np.ndarray[Any, Any]] = {}
    holders: dict[str, int] = {}
    for copy in made.copies:
        a, b = host.get(copy.source, copy.source), host.get(copy.destination, copy.destination)
        if a != b:
            seen = arrived.setdefault((b, copy.tensor), np.zeros(destination.tensors[copy.tensor].shape, int))
            seen[box(copy.lower, copy.upper)] += 1
        if copy.round == 0:
            holders[copy.tensor] = holders.get(copy.tensor, 0) + copy.nbytes
    for (name, tensor), seen in arrived.items():
        assert seen.max() == 1
        for shard in source.tensors[tensor].shards:
            if host.get(shard.worker, shard.worker) == name:
                assert not seen[box(shard.lower, shard.upper)].any()
    if not source.hosts:  # every worker is a machine: holders send each element once
        for tensor, size in holders.items():
            union = np.zeros(destination.tensors[tensor].shape, bool)
            for shard in destination.tensors[tensor].shards:
                union[box(shard.lower, shard.upper)] = True
            own = [c for c in made.copies if c.round == 0 and c.source == c.destination and c.tensor == tensor]
            assert size - sum(c.nbytes for c in own) <= union.sum() * 4


@given(layouts(same_world=True), st.booleans())
def test_random_meshes_in_one_world_copy_only_what_is_not_held(
    case: tuple[Layout, Layout, Arrays], relay: bool
) -> None:
    source, destination, values = case
    made = plan(source, destination, relay=relay)
    execute(made, source, destination, values)
    needed = 0
    for name, tensor in destination.tensors.items():
        for shard in tensor.shards:
            missing = np.zeros(tensor.shape, bool)
            missing[box(shard.lower, shard.upper)] = True
            for have in source.tensors[name].shards:
                if (have.worker, have.device) == (shard.worker, shard.device):
                    missing[box(have.lower, have.upper)] = False
            needed += int(missing.sum()) * 4
    assert made.planned_bytes == made.lower_bound_bytes == lower_bound_bytes(source, destination) == needed


def test_the_bound_is_not_the_plans_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = TensorLayout("w", (4,), "float32", (Shard("a", 0, (0,), (4,)),))
    wanted = TensorLayout("w", (4,), "float32", (Shard("x", 0, (0,), (4,)),))
    assign = reshard._Planner._assign
    monkeypatch.setattr(reshard._Planner, "_assign", lambda planner, group: assign(planner, group) * 2)  # all twice
    monkeypatch.setattr(reshard, "_plans", type(reshard._plans)())
    made = plan(Layout({"w": tensor}), Layout({"w": wanted}))
    assert (made.planned_bytes, made.lower_bound_bytes) == (32, 16)


def _check_balance(made: Plan, source: Layout) -> None:
    """No sender is more than one piece above the best possible: the fullest group of senders that pieces are tied to."""
    holders = {}
    for copy in made.copies:
        if copy.round:
            continue
        holders[copy] = frozenset(
            shard.worker
            for shard in source.tensors[copy.tensor].shards
            if all(
                a <= c and d <= b for a, b, c, d in zip(shard.lower, shard.upper, copy.lower, copy.upper, strict=True)
            )
        )
    optimum = 0.0
    for group in set(holders.values()):
        tied = sum(copy.nbytes for copy, those in holders.items() if those <= group)
        optimum = max(optimum, tied / len(group))
    nested = all(a <= b or b <= a or not a & b for a in holders.values() for b in holders.values())
    sent: dict[str, int] = {}
    for copy in holders:
        sent[copy.source] = sent.get(copy.source, 0) + copy.nbytes
    if sent and nested:
        assert max(sent.values()) <= optimum + max(copy.nbytes for copy in holders)


@given(st.integers(0, 2**32))
def test_overlapping_source_boxes(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 3)))
    shards = [Shard("w0", 0, (0,) * len(shape), shape)] if rng.random() < 0.5 else []
    for device in range(1, 8):
        lower = tuple(rng.randint(0, n - 1) for n in shape)
        upper = tuple(rng.randint(low, n) for low, n in zip(lower, shape, strict=True))
        shards.append(Shard(f"w{device % 3}", device, lower, upper))
    covered = np.zeros(shape, bool)
    for shard in shards:
        covered[box(shard.lower, shard.upper)] = True
    source = Layout({"t": TensorLayout("t", shape, "int32", tuple(shards))})
    destination = Layout({"t": sharded("t", shape, [(0,), *[()] * (len(shape) - 1)], (2,), "x", 1)})
    if not covered.all():
        with pytest.raises(TransferError, match=r"t: x\d needs .* elements"):
            plan(source, destination)
        return
    values = {"t": np.arange(math.prod(shape), dtype=np.int32).reshape(shape) + 1}
    execute(plan(source, destination), source, destination, values)


def one(shape: tuple[int, ...], spec: Spec, mesh: tuple[int, ...], prefix: str, dtype: str = "float32") -> Layout:
    return Layout({"w": sharded("w", shape, spec, mesh, prefix, 1, dtype)})


def test_the_example_in_the_docstring() -> None:
    source = one((8, 2), [(0,), ()], (2,), "s")
    destination = Layout({"w": TensorLayout("w", (8, 2), "float32", (Shard("x", 0, (2, 0), (8, 2)),))})
    copies = [(c.source, c.destination, c.lower, c.upper) for c in plan(source, destination).copies]
    assert copies == [("s0", "x", (2, 0), (4, 2)), ("s1", "x", (4, 0), (8, 2))]


def test_replicated_sources_share_the_work() -> None:
    names = [f"t{i}" for i in range(6)]
    source = Layout({n: sharded(n, (4,), [()], (3,), "s", 1) for n in names})
    destination = Layout({n: sharded(n, (4,), [()], (1,), "x", 1) for n in names})
    assert plan(source, destination).egress_bytes() == {"s0": 32, "s1": 32, "s2": 32}


def test_what_only_one_worker_holds_is_counted_before_what_several_hold() -> None:
    def held_by(name: str, *workers: str) -> TensorLayout:
        return TensorLayout(name, (4,), "float32", tuple(Shard(w, i, (0,), (4,)) for i, w in enumerate(workers)))

    source = Layout({"both": held_by("both", "a", "b"), "only": held_by("only", "a")})
    destination = Layout({"both": held_by("both", "x"), "only": held_by("only", "x")})
    assert plan(source, destination).egress_bytes() == {"a": 16, "b": 16}


def test_scalars_and_empty_tensors() -> None:
    made = plan(one((), [], (2,), "s"), one((), [], (1,), "x"))
    assert [(c.lower, c.upper, c.nbytes) for c in made.copies] == [((), (), 4)]
    assert plan(one((0, 3), [(), ()], (2,), "s"), one((0, 3), [(), ()], (1,), "x")).copies == ()


def test_sizes_of_dtypes() -> None:
    for dtype, size in [("bfloat16", 2), ("float8_e4m3fn", 1), ("float16", 2), ("uint8", 1), ("float64", 8)]:
        assert plan(one((3,), [()], (1,), "s", dtype), one((3,), [()], (1,), "x", dtype)).planned_bytes == 3 * size
    with pytest.raises(TransferError, match="unknown dtype 'float7'"):
        plan(one((3,), [()], (1,), "s", "float7"), one((3,), [()], (1,), "x", "float7"))


def test_mismatches_are_errors_by_name() -> None:
    source = one((4, 2), [(0,), ()], (2,), "s")
    cases = [
        (one((4, 3), [(), ()], (1,), "x"), r"w: expected shape \[4, 3\], the source has \[4, 2\]"),
        (one((4, 2), [(), ()], (1,), "x", "bfloat16"), "w: expected dtype bfloat16, the source has float32"),
        (Layout({}), "the destination has no tensor w"),
        (Layout({**source.tensors, "v": replace(source.tensors["w"], name="v")}), "the source has no tensor v"),
        (
            Layout({"w": replace(source.tensors["w"], shards=(Shard("x", 0, (0, 0), (5, 2)),))}),
            r"w: box \[0, 0\]–\[5, 2\] on x does not lie in shape \[4, 2\]",
        ),
    ]
    for destination, message in cases:
        with pytest.raises(TransferError, match=message):
            plan(source, destination)
    half = Layout({"w": replace(source.tensors["w"], shards=source.tensors["w"].shards[:1])})
    with pytest.raises(TransferError, match=r"w: x0 needs \[0, 0\]–\[4, 2\], the source holds 4 of its 8 elements"):
        plan(half, one((4, 2), [(), ()], (1,), "x"))


def test_a_plan_is_a_function_of_layouts_and_is_cached() -> None:
    source, destination = one((8,), [(0,)], (4,), "s"), one((8,), [()], (2,), "x")
    made = plan(source, destination)
    assert plan(Layout.from_json(source.to_json()), Layout.from_json(destination.to_json())) is made
    both = {"a": replace(source.tensors["w"], name="a"), **source.tensors}
    assert Layout(both).fingerprint == Layout(dict(reversed(both.items()))).fingerprint
    assert source.fingerprint != destination.fingerprint != Layout(destination.tensors, {"x0": "h"}).fingerprint
    assert [copy.to_json() for copy in made.for_worker("x1")] == [
        {"tensor": "w", "source": "s1", "lower": [2], "upper": [4]},
        {"tensor": "w", "source": "s3", "lower": [6], "upper": [8]},
        {"tensor": "w", "source": "x0", "lower": [0], "upper": [2], "holder": "s0"},
        {"tensor": "w", "source": "x0", "lower": [4], "upper": [6], "holder": "s2"},
    ]
    assert made.for_worker("nobody") == ()


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(0, 40), st.integers(1, 9))
def test_pouring_is_dealing_one_by_one_to_the_least_loaded(loads: list[int], pieces: int, size: int) -> None:
    dealt = list(loads)
    for _ in range(pieces):
        dealt[dealt.index(min(dealt))] += size
    counts = pour(loads, pieces, size)
    assert sum(counts) == pieces
    poured = [load + count * size for load, count in zip(loads, counts, strict=True)]
    assert sorted(poured) == sorted(dealt)


@pytest.mark.parametrize(("case", "total", "limit_s"), [(llama_70b, 141_107_412_992, 1.0), (moe_1t, None, 30.0)])
def test_large_models(case: Callable[[], tuple[Layout, Layout]], total: int | None, limit_s: float) -> None:
    source, destination = case()
    start = time.process_time()
    made = plan(source, destination)
    assert time.process_time() - start < limit_s
    assert plan(source, destination) is made
    assert made.planned_bytes == made.lower_bound_bytes
    sent = {worker: size for worker, size in made.egress_bytes().items() if worker.startswith("trainer")}
    size = sum(math.prod(t.shape) * 2 for t in source.tensors.values())
    if total is not None:  # the published size of the checkpoint
        assert size == total
    assert sum(sent.values()) == size  # one copy, however many replicas need it
    assert len(set(sent.values())) == 1
    assert made.network_bytes == sum(made.links.values())
    text = made.explain(bytes_per_s=25e9, staging_bytes=1 << 26, links=3)
    assert "planned ÷ bound 1.000" in text and f"{size // len(sent):,}" in text.replace("\u202f", ",")


def test_explain_prints_links_bound_and_rounds() -> None:
    made = plan(one((8,), [(0,)], (2,), "s"), one((8,), [()], (2,), "x"))
    assert made.explain(bytes_per_s=1e9, staging_bytes=64).splitlines() == [
        "from  to  bytes",
        "s0    x0     16",
        "s1    x1     16",
        "x0    x1     16",
        "x1    x0     16",
        "",
        "planned           64 bytes in 4 copies, 2 rounds",
        "lower bound       64 bytes; planned ÷ bound 1.000",
        "between machines  64 bytes",
        "busiest sender    16 bytes (s0)",
        "peak staging      64 bytes a worker",
        "predicted         3.2e-08 s at 1 GB/s a worker",
    ]
    paths = made.explain(links=2, path=lambda a, b: "near" if a[0] == b[0] else "far").splitlines()
    assert paths[:4] == [
        "from        to  bytes  path",
        "s0          x0     16  far",
        "s1          x1     16  far",
        "and 2 more         32",
    ]
    assert made.copies[0] == PlannedCopy("w", "s0", "x0", (0,), (4,), "s0", 0, 16, 0)


def test_seconds_are_those_of_the_busiest_worker_at_the_rates_of_its_links() -> None:
    made = plan(one((8,), [(0,)], (2,), "s"), one((8,), [()], (2,), "x"))  # each x: 16 B from its s, 16 B from its peer
    assert made.predicted_s(16.0) == 2.0
    assert made.predicted_s(lambda a, b: 16.0 if a.startswith("s") else 4.0) == 1.0 + 4.0
    assert made.busiest_sender() == ("s0", 16)
    assert plan(Layout({}), Layout({})).busiest_sender() == ("", 0)


def test_casts_are_declared_and_bytes_count_in_the_wanted_dtype() -> None:
    source, destination = one((8,), [(0,)], (2,), "s"), one((8,), [()], (1,), "x", "bfloat16")
    with pytest.raises(TransferError, match="w: expected dtype bfloat16, the source has float32"):
        plan(source, destination)
    made = plan(source, destination, casts={("float32", "bfloat16")})
    assert made.planned_bytes == made.lower_bound_bytes == 16


def test_a_worker_has_one_host() -> None:
    source, destination = one((8,), [()], (1,), "s"), one((8,), [()], (1,), "s")
    with pytest.raises(TransferError, match="worker s0 is on a in the source, on b in the destination"):
        plan(replace(source, hosts={"s0": "a"}), replace(destination, hosts={"s0": "b"}))


def test_a_model_is_planned_in_milliseconds() -> None:
    def model(mesh: tuple[int, ...], spec: Spec, prefix: str) -> Layout:
        names = [f"model.layers.{i}.weight" for i in range(270)]
        return Layout({n: sharded(n, (576, 1536), spec, mesh, prefix, 1) for n in names})

    source, destination = model((4,), [(0,), ()], "s"), model((2,), [(), (0,)], "x")
    made = plan(source, destination)
    assert len(made.copies) == 270 * 8
