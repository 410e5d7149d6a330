"""Programs of Python clients on real clusters: values, donation, transfers, order, deaths, and what is refused."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import waypath
from examples import data_parallel, grpo_by_hand, pipeline
from tests.cluster import ROOT, Cluster, compute, eventually, running
from waypath.controller.client.refs import Ref, Slice
from waypath.proto.errors import (
    ConfigError,
    FunctionError,
    GraphError,
    NotFoundError,
    UnavailableError,
    WaypathError,
    WorkerLostError,
)

WAIT_S = 60.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(compute(tmp_path_factory.mktemp("programs"))) as found:
        yield found


@pytest.fixture
def client(cluster: Cluster) -> Iterator[waypath.Client]:
    with waypath.connect(cluster.address, cluster.token, lease_s=5.0) as found:
        yield found


@pytest.fixture
def pair(client: waypath.Client) -> Slice:
    """One world of two processes."""
    return client.slice(mesh={"x": 2})


def add_sum(x: Any) -> Any:
    """An all-reduce and an add."""
    return x + jnp.sum(x)


def stores(cluster: Cluster) -> dict[str, int]:
    """Bytes of objects by worker, as the scheduler knows them."""
    return {n: w["object_bytes"] for n, w in cluster.client.status()["executions"]["workers"].items()}


@pytest.mark.parametrize(
    ("value", "spec"),
    [
        pytest.param(np.arange(24, dtype=np.float32).reshape(4, 6), P("x"), id="rows"),
        pytest.param(np.arange(24, dtype=np.int32).reshape(3, 8), P(None, "x"), id="columns"),
        pytest.param(np.arange(5, dtype=np.float32), None, id="whole"),
        pytest.param(np.float32(7.5), None, id="scalar"),
        pytest.param(np.empty((0, 3), np.float32), P("x"), id="empty"),
        pytest.param(np.arange(8).astype(jnp.bfloat16), P("x"), id="bfloat16"),
        pytest.param({"a": np.ones(4, bool), "b": [np.zeros((2, 2), np.uint8)]}, None, id="tree"),
    ],
)
def test_what_is_put_comes_back(client: waypath.Client, pair: Slice, value: Any, spec: Any) -> None:
    back = client.put(value, pair, spec).result(WAIT_S)
    assert jax.tree.structure(back) == jax.tree.structure(value)
    for one, other in zip(jax.tree.leaves(back), jax.tree.leaves(value), strict=True):
        assert one.dtype == other.dtype and np.array_equal(one, other)


def test_a_function_runs_on_the_mesh_of_two_processes(client: waypath.Client, pair: Slice) -> None:
    both = client.function(lambda a, b: (a @ b, {"trace": jnp.trace(a @ b)}), pair, (P("x"), None), (P("x"), None))
    a, b = np.arange(12, dtype=np.float32).reshape(4, 3), np.arange(12, dtype=np.float32).reshape(3, 4)
    product, rest = both(a, b)
    assert np.array_equal(product.result(WAIT_S), a @ b)
    assert rest.result(WAIT_S)["trace"] == np.trace(a @ b)


def test_refs_may_be_used_before_their_values_exist(client: waypath.Client, pair: Slice) -> None:
    step = client.function(add_sum, pair, P("x"), P("x"))
    x = client.put(np.ones(2, np.float32), pair, P("x"))
    for _ in range(20):  # nothing is waited for in between: 1 → 3 → 9 → …
        x = step(x)
    assert np.array_equal(x.result(WAIT_S), np.full(2, 3.0**20, np.float32))


def test_a_program_of_128_nodes_is_installed_once_and_gives_what_numpy_gives(
    client: waypath.Client, pair: Slice
) -> None:
    step = client.function(lambda x: x + jnp.sum(x) * 0.001, pair, P("x"), P("x"))

    @client.program
    def chain(x: Any) -> Any:
        for _ in range(128):
            x = step(x)
        return x

    for start in (1.0, 2.0):
        expected = np.full(4, start, np.float32)
        for _ in range(128):
            expected = expected + np.float32(expected.sum() * np.float32(0.001))
        found = chain(client.put(np.full(4, start, np.float32), pair, P("x"))).result(WAIT_S)
        assert np.allclose(found, expected, rtol=1e-5)
    text = chain.explain(client.put(np.full(4, 1.0, np.float32), pair, P("x")))
    assert "128 nodes" in text and "8 B a device" in text and "compute-" in text


def test_a_donated_object_is_gone_and_says_to_whom(client: waypath.Client, pair: Slice) -> None:
    double = client.function(lambda x: x * 2, pair, P("x"), P("x"), donate=(0,))
    first = client.put(np.arange(4, dtype=np.float32), pair, P("x"))
    second = double(first)
    assert np.array_equal(second.result(WAIT_S), [0, 2, 4, 6])
    for use in (lambda: first.result(), lambda: double(first)):
        with pytest.raises(GraphError, match="donated to function"):
            use()


def test_a_donated_object_is_read_by_a_transfer_first(client: waypath.Client, pair: Slice) -> None:
    """The transfer reads at its own pace: the donor waits for it."""
    other = client.slice(mesh={"x": 2}, strategy="spread")
    double = client.function(lambda x: x * 2, pair, P("x"), P("x"), donate=(0,))
    value = np.arange(200_000, dtype=np.float32)
    for _ in range(5):
        first = client.put(value, pair, P("x"))
        moved = client.transfer(first, other, P("x"))
        second = double(first)
        assert np.array_equal(moved.result(WAIT_S), value)
        assert np.array_equal(second.result(WAIT_S), value * 2)


def test_transfers_between_worlds_move_what_is_needed_and_nothing_twice(client: waypath.Client, pair: Slice) -> None:
    other = client.slice(mesh={"y": 2}, strategy="spread")
    assert set(other.workers).isdisjoint(pair.workers)
    value = np.arange(64, dtype=np.float32).reshape(8, 8)
    rows = client.put(value, pair, P("x"))
    columns = client.transfer(rows, other, P(None, "y"))
    assert np.array_equal(columns.result(WAIT_S), value)
    (by_worker,) = columns.reports().values()
    assert {report["transfer_bytes"] for report in by_worker.values()} == {value.nbytes // 2}
    again = client.transfer(columns, other, P("y"))  # a reshard on the same devices: half of each half stays
    assert np.array_equal(again.result(WAIT_S), value)
    (by_worker,) = again.reports().values()
    assert {report["transfer_bytes"] for report in by_worker.values()} == {value.nbytes // 4}


def test_two_clients_with_collectives_on_the_same_devices_in_opposite_orders(
    cluster: Cluster, rounds: int = 100
) -> None:
    _opposite_orders(cluster, rounds)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_clients_in_opposite_orders_a_thousand_times(cluster: Cluster) -> None:
    _opposite_orders(cluster, 1000)


def _opposite_orders(cluster: Cluster, rounds: int) -> None:
    """Each has two slices over the same two processes and calls an all-reduce on one, then on the other."""
    failures: list[BaseException] = []

    def work(backwards: bool) -> None:
        try:
            with waypath.connect(cluster.address, cluster.token) as mine:
                slices = [mine.slice(mesh={"x": 2}, world="compute-0") for _ in range(2)]
                steps = [mine.function(add_sum, s, P("x"), P("x")) for s in slices]
                values = [mine.put(np.ones(2, np.float32), s, P("x")) for s in slices]
                order = (1, 0) if backwards else (0, 1)
                made: list[Ref] = []
                for _ in range(rounds):
                    made = [steps[k](values[k]) for k in order]
                for ref in made:
                    assert np.array_equal(ref.result(WAIT_S), [3.0, 3.0])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(backwards,)) for backwards in (False, True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300.0)
        assert not thread.is_alive(), cluster.tails()
    assert not failures, failures


def test_refs_can_be_awaited(client: waypath.Client, pair: Slice) -> None:
    step = client.function(add_sum, pair, P("x"), P("x"))

    async def main() -> list[Any]:
        async with client:
            return await asyncio.gather(*(step(np.full(2, k, np.float32)) for k in range(8)))

    np.testing.assert_array_equal(asyncio.run(main()), [[3 * k, 3 * k] for k in range(8)])
    with pytest.raises(UnavailableError, match="closed"):
        client.put(np.ones(2), pair)


def test_a_wait_that_is_given_up_ends_at_once_and_a_closed_client_says_so(cluster: Cluster) -> None:
    client = waypath.connect(cluster.address, cluster.token)
    pair = client.slice(mesh={"x": 2})

    def spin(x: Any) -> Any:
        return jax.lax.fori_loop(0, 60_000, lambda _, y: jnp.sin(y @ y), x)

    slow = client.function(spin, pair, P("x"), P("x"))
    ref = slow(np.ones((128, 128), np.float32))
    began = time.monotonic()

    async def main() -> None:
        async with asyncio.timeout(0.2):
            await ref

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    assert time.monotonic() - began < 2.0 or ref._pending.wait(0.0) is None, "the loop waited for the thread"
    client.close()
    for use in (client.status, client.runs, lambda: client.slice(devices=1), client.run("r").result):
        with pytest.raises(UnavailableError, match="this client is closed"):
            use()


def test_outputs_keep_the_form_that_the_program_returns(client: waypath.Client, pair: Slice) -> None:
    step = client.function(add_sum, pair, P("x"), P("x"))
    both = client.program(lambda x: Pair(step(x), {"again": [step(x)]}))(
        client.put(np.ones(2, np.float32), pair, P("x"))
    )
    assert isinstance(both, Pair)
    assert np.array_equal(both.first.result(WAIT_S), both.second["again"][0].result(WAIT_S))


class Pair(NamedTuple):
    first: Any
    second: Any


def test_functions_that_workers_know_by_name(client: waypath.Client, pair: Slice) -> None:
    like = jax.ShapeDtypeStruct((4,), "float32")
    scale = client.registered("scale", pair, gives=like, in_specs=P("x"), out_specs=P("x"))
    x = client.put(np.arange(4, dtype=np.float32), pair, P("x"))

    @client.program
    def both(x: Any) -> Any:
        return scale(scale(x, by=3.0)), scale(x)

    np.testing.assert_array_equal(scale(x, by=-1.0).result(WAIT_S), [0, -1, -2, -3])
    np.testing.assert_array_equal([ref.result(WAIT_S) for ref in both(x)], [[0, 6, 12, 18], [0, 2, 4, 6]])
    with pytest.raises(GraphError, match="no option 'times'; it takes: by"):
        scale(x, times=2)
    with pytest.raises(GraphError, match="option by: expected float, found 'two'"):
        scale(x, by="two")
    with pytest.raises(GraphError, match="has no function 'scales'; it has: scale"):
        client.registered("scales", pair, gives=like)(x)
    with pytest.raises(GraphError, match=r"function scale gives .*4,.* the program says .*5,"):
        client.registered("scale", pair, gives=jax.ShapeDtypeStruct((5,), "float32"))(x).wait(WAIT_S)


def test_services_keep_their_state_on_the_workers(client: waypath.Client, pair: Slice) -> None:
    average = client.service("average", pair)
    add = average.method("add", gives=jax.ShapeDtypeStruct((4,), "float32"), out_specs=P("x"))
    reset = average.method("reset")
    first, second = (client.put(np.full(4, k, np.float32), pair, P("x")) for k in (1.0, 4.0))
    reset().wait(WAIT_S)

    @client.program
    def twice(a: Any, b: Any) -> Any:
        return add(a), add(b, weight=2.0)

    one, two = twice(first, second)
    np.testing.assert_array_equal(one.result(WAIT_S), [1, 1, 1, 1])
    np.testing.assert_array_equal(two.result(WAIT_S), [3, 3, 3, 3])
    assert two.reports()["add_1"] == {worker: {"weight": 3.0} for worker in pair.workers}
    with pytest.raises(GraphError, match=r"lies on several processes as .*, the program says P"):
        average.method("add", gives=jax.ShapeDtypeStruct((4,), "float32"))(first).wait(WAIT_S)
    assert reset().result(WAIT_S) is None
    with pytest.raises(GraphError, match="has no service 'medium'; it has: average, function"):
        client.service("medium", pair).method("add")(first)
    with pytest.raises(GraphError, match=r"has no method average. 'ad'"):
        average.method("ad")(first)
    with pytest.raises(GraphError, match="option weight: expected float, found True"):
        add(first, weight=True)
    with pytest.raises(GraphError, match=r"gives float32.*, the program says nothing"):
        average.method("add")(first).wait(WAIT_S)


CLIENT = """
    import sys
    import numpy as np
    import waypath
    from jax.sharding import PartitionSpec as P

    client = waypath.connect(sys.argv[1], sys.argv[2], lease_s=2.0)
    pair = client.slice(mesh={"x": 2}, world="compute-0")
    step = client.function(lambda x: x + x.sum() * 0, pair, P("x"), P("x"))
    kept = [client.put(np.ones(100_000, np.float32), pair, P("x")).wait() for _ in range(3)]
    print("holds", flush=True)
    while True:
        kept[0] = step(kept[0])
"""


def test_kill_9_of_a_client_in_mid_program_frees_its_objects_and_nobody_else_notices(
    cluster: Cluster, client: waypath.Client
) -> None:
    pair = client.slice(mesh={"x": 2}, world="compute-0")
    step = client.function(add_sum, pair, P("x"), P("x"))
    mine = client.put(np.ones(2, np.float32), pair, P("x")).wait(WAIT_S)
    eventually(lambda: set(stores(cluster).values()) == {0, 4}, "nothing but this test's object is held")
    command = [sys.executable, "-c", textwrap.dedent(CLIENT), cluster.address, cluster.token]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline().strip() == "holds"
        assert stores(cluster)["compute-0-0"] > 500_000
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
    eventually(lambda: set(stores(cluster).values()) == {0, 4}, "the dead client's objects are gone", 10.0)
    workers = {w["name"]: w for w in cluster.client.status()["workers"]}
    eventually(
        lambda: all(w["store_bytes"] <= 4 for w in cluster.client.status()["workers"]),
        "gone from the workers too",
        10.0,
    )
    assert np.array_equal(step(mine).result(WAIT_S), [3.0, 3.0])
    assert workers.keys() == {"compute-0-0", "compute-0-1", "compute-1-0", "compute-1-1"}


def test_the_pipeline_of_the_examples(client: waypath.Client) -> None:
    assert pipeline.run(client) < 1e-5


def test_data_parallel_of_the_examples_finds_the_weights(client: waypath.Client) -> None:
    assert data_parallel.run(client) < 1e-3


def test_grpo_by_hand_learns(client: waypath.Client) -> None:
    rewards = grpo_by_hand.run(client)
    assert np.mean(rewards[:3]) < 0.3 and np.mean(rewards[-3:]) > 0.9
    source = (ROOT / "examples" / "grpo_by_hand.py").read_text()
    assert len(source.splitlines()) < 100


def test_a_nan_names_node_function_worker_and_poisons_what_depends_on_it(client: waypath.Client, pair: Slice) -> None:
    log = client.function(lambda x: jnp.log(x), pair, P("x"), P("x"), name="logarithm", debug_nans=True)
    step = client.function(add_sum, pair, P("x"), P("x"))
    bad = log(np.array([1.0, -1.0], np.float32))
    after = step(step(bad))
    for ref in (bad, after):
        with pytest.raises(FunctionError, match=r"logarithm_0 on compute-\d-\d: function 'logarithm': .*NaN"):
            ref.result(WAIT_S)
    assert np.array_equal(step(np.ones(2, np.float32)).result(WAIT_S), [3.0, 3.0])


def test_what_a_function_raises_while_it_is_traced_is_raised_here(client: waypath.Client, pair: Slice) -> None:
    def broken(x: Any) -> Any:
        raise ValueError("a user's bug")

    with pytest.raises(ValueError, match="a user's bug"):
        client.function(broken, pair)(np.ones(2, np.float32))


def test_a_slice_lets_go_of_its_devices(client: waypath.Client) -> None:
    one = client.slice(mesh={"x": 2}, world="compute-1", exclusive=True)
    with pytest.raises(ConfigError, match=rf"0 of 2 are free.*{one.name} of .* holds 2"):
        client.slice(mesh={"x": 2}, world="compute-1")
    held = client.put(np.ones(2, np.float32), one).wait(WAIT_S)
    one.release()
    with pytest.raises(GraphError, match="lost with slice"):
        held.result()
    with client.slice(mesh={"x": 2}, world="compute-1") as again:
        assert again.workers == one.workers


def _refused(client: waypath.Client, pair: Slice, held: Ref, other: Ref) -> dict[str, Any]:
    """What → (call, error class, words of its message)."""
    step = client.function(add_sum, pair, P("x"), P("x"))
    gone = client.put(np.ones(2, np.float32), pair, P("x"))
    gone.delete()
    whole = client.put(np.ones(2, np.float32), pair)
    big = np.random.default_rng(0).random(70 << 18, np.float32)

    @client.program
    def leaks(x: Any) -> Any:
        return held

    @client.program
    def branches(x: Any) -> Any:
        return step(x) if x else x

    def stale(x: Any) -> Any:
        leaked: list[Any] = []
        client.program(lambda y: [leaked.append(y), step(y)][1])(x)
        return leaked[0]

    no_ref: Any = np.ones(2)
    size: Any = "2"
    return {
        "deleted": (lambda: step(gone), GraphError, "was deleted"),
        "foreign": (lambda: step(other), GraphError, "belongs to another session"),
        "spec": (lambda: step(whole), GraphError, "expected .* found"),
        "axis": (lambda: client.put(np.ones(2, np.float32), pair, P("y")), GraphError, "no mesh axis 'y'"),
        "uneven": (
            lambda: client.put(np.ones(3, np.float32), pair, P("x")),
            GraphError,
            "not divisible by the 2 parts",
        ),
        "rank": (lambda: client.put(np.float32(1), pair, P("x")), GraphError, "has 1 dimensions"),
        "dtype": (lambda: client.put(np.array(["text"]), pair), GraphError, "cannot travel"),
        "devices": (lambda: client.slice(devices=3), ConfigError, "3 devices in one world.*cannot be had"),
        "mesh": (lambda: client.slice(devices=3, mesh={"x": 2}), ConfigError, "has 2 devices, devices = 3"),
        "constant": (
            lambda: client.function(lambda x: x + big.sum() + jnp.asarray(big)[:2], pair, P("x"), P("x"))(held),
            GraphError,
            "more than 67,108,864 bytes.*Pass large arrays as arguments",
        ),
        "outside": (lambda: leaks(held), GraphError, "expected objects of this program"),
        "no ref": (lambda: leaks(no_ref), GraphError, "expected a ref, found ndarray"),
        "useless donation": (
            lambda: client.function(lambda x: x[:0], pair, P("x"), P("x"), donate=0)(held),
            GraphError,
            "argument 0 cannot be donated: no output is left that has the 4 bytes a device",
        ),
        "narrowing": (
            lambda: client.put(np.array([1, 2**40]), pair),
            GraphError,
            "int32 here, which cannot hold 1099511",
        ),
        "overflow": (
            lambda: client.put(np.array([0.1, 1e300]), pair),
            GraphError,
            r"float32 here, which cannot hold 1e\+300",
        ),
        "random key": (lambda: client.put(jax.random.key(0), pair), GraphError, "key"),
        "mesh sizes": (lambda: client.slice(mesh={"x": size}), ConfigError, "axis names and whole numbers"),
        "output axis": (lambda: client.function(add_sum, pair, P("x"), P("q"))(held), GraphError, "no mesh axis 'q'"),
        "output size": (
            lambda: client.function(lambda x: jnp.ones(3), pair, P("x"), P("x"))(held),
            GraphError,
            "not divisible by the 2 parts",
        ),
        "branch": (lambda: branches(held), GraphError, "cannot branch on one"),
        "stale symbol": (lambda: step(stale(held)), GraphError, "whose tracing has ended"),
        "no transfer": (lambda: client.transfer(no_ref, pair), GraphError, "transfer: expected a ref, found ndarray"),
        "no slice": (lambda: client.function(add_sum, size), GraphError, "expected a slice, found str"),
    }


REFUSED = [
    "deleted",
    "foreign",
    "spec",
    "axis",
    "uneven",
    "rank",
    "dtype",
    "devices",
    "mesh",
    "constant",
    "outside",
    "no ref",
    "useless donation",
    "narrowing",
    "overflow",
    "random key",
    "mesh sizes",
    "output axis",
    "output size",
    "branch",
    "stale symbol",
    "no transfer",
    "no slice",
]


@pytest.mark.parametrize("what", REFUSED)
def test_bad_calls_are_typed_errors_and_nothing_is_lost(
    cluster: Cluster, client: waypath.Client, pair: Slice, what: str
) -> None:
    held = client.put(np.ones(2, np.float32), pair, P("x"))
    with waypath.connect(cluster.address, cluster.token) as stranger:
        other = stranger.put(np.ones(2, np.float32), stranger.slice(mesh={"x": 2}), P("x"))
        call, error, words = _refused(client, pair, held, other)[what]
        with pytest.raises(error, match=words):
            call()
    step = client.function(add_sum, pair, P("x"), P("x"))
    assert np.array_equal(step(held).result(WAIT_S), [3.0, 3.0])


def test_a_program_of_100_000_nodes_is_refused_with_the_limit(client: waypath.Client, pair: Slice) -> None:
    step = client.function(add_sum, pair, P("x"), P("x"))
    held = client.put(np.ones(2, np.float32), pair, P("x"))

    @client.program
    def endless(x: Any) -> Any:
        for _ in range(100_000):
            x = step(x)
        return x

    with pytest.raises(GraphError, match=r"100,000 nodes are .* at most 7,340,032 are one program"):
        endless(held)
    assert np.array_equal(step(held).result(WAIT_S), [3.0, 3.0])


def test_the_controller_refuses_what_a_client_should_not_have_sent(client: waypath.Client, pair: Slice) -> None:
    """Programs by hand, past the client's own checks."""
    from waypath.controller.graph import Leaf, ProgramBuilder
    from waypath.controller.graph import Slice as Place
    from waypath.proto import client_pb2 as pb

    stream = client._session.stream
    builder = ProgramBuilder("by-hand")
    aval = (Leaf((2,), "float32", (("z",),)),)
    builder.output(builder.call("function", "put", on=Place(pair.name), gives=aval))
    with pytest.raises(GraphError, match="no mesh axis 'z'"):
        client._session.install(builder.build())
    cases: list[tuple[pb.Submit, type[WaypathError], str]] = [
        (pb.Submit(execution_id="another-1", program_id="p"), NotFoundError, "is not one of session"),
        (pb.Submit(execution_id=stream.new_execution_id(), program_id="p"), GraphError, "no program 'p'"),
    ]
    for message, error, words in cases:
        with pytest.raises(error, match=words):
            stream.submit(message).wait(WAIT_S)
    cyclic = builder.build().to_json()
    cyclic["nodes"][0]["inputs"] = ["put_0"]
    import json

    with pytest.raises(GraphError, match="cycle"):
        stream.ask(pb.SessionRequest(install=pb.InstallProgram(program_json=json.dumps(cyclic))))
    cyclic["nodes"][0]["inputs"] = ["nobody"]
    with pytest.raises(GraphError, match="'nobody', which is not in the program"):
        stream.ask(pb.SessionRequest(install=pb.InstallProgram(program_json=json.dumps(cyclic))))


def test_an_upload_with_a_wrong_digest_is_refused(client: waypath.Client) -> None:
    from waypath.proto import client_pb2 as pb

    chunks = iter([pb.UploadChunk(digest="0" * 64), pb.UploadChunk(data=b"something")])
    with pytest.raises(GraphError, match=r"have SHA-256 .*, expected 0000"):
        client.call(client.stub.Upload, chunks, "upload")


def test_a_worker_that_dies_fails_what_it_held_and_the_slice_serves_again(
    cluster: Cluster, client: waypath.Client
) -> None:
    pair = client.slice(mesh={"x": 2}, world="compute-1")
    step = client.function(add_sum, pair, P("x"), P("x"))
    held = client.put(np.ones(2, np.float32), pair, P("x")).wait(WAIT_S)
    pids = {name: cluster.pids()[name] for name in ("compute-1-0", "compute-1-1")}
    cluster.kill("compute-1-0")
    for name, pid in pids.items():
        cluster.wait_restarted(name, pid)
    with pytest.raises(WaypathError, match=r"worker compute-1-. was lost"):
        step(held).result(WAIT_S)
    for use in (held.result, lambda: client.put(np.ones(2, np.float32), pair)):
        with pytest.raises(WorkerLostError, match=rf"of slice {pair.name} was lost.*ask for a new slice"):
            use()
    fresh = client.slice(mesh={"x": 2}, world="compute-1")
    again = client.function(add_sum, fresh, P("x"), P("x"))
    assert np.array_equal(again(np.ones(2, np.float32)).result(WAIT_S), [3.0, 3.0])
