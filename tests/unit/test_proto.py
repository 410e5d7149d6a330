"""Codecs, errors, the token guard and the handshake."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waypath.proto import channel, client_pb2, codecs, errors, version
from waypath.proto import data_pb2 as pb
from waypath.proto.client_pb2_grpc import ClientServicer, ClientStub, add_ClientServicer_to_server
from waypath.proto.layout import Layout, Shard, TensorLayout

ARRAYS = st.tuples(
    st.sampled_from(sorted(codecs.DTYPES)), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 2**32 - 1)
)


@given(st.lists(ARRAYS, max_size=4), st.integers(1, 64))
def test_a_bundle_survives_the_wire(specs: list[tuple[str, list[int], int]], chunk_bytes: int) -> None:
    arrays = {}
    for number, (dtype, shape, seed) in enumerate(specs):
        raw = np.random.default_rng(seed).integers(0, 2, size=shape)
        arrays[f"a{number}"] = np.asarray(raw).astype(dtype)
    bundle = codecs.Bundle({"group_id": 3, "texts": ["α", "\n"]}, arrays)
    back = codecs.decode(codecs.header(bundle), codecs.payload(bundle, chunk_bytes))
    assert back.meta == bundle.meta
    assert list(back.arrays) == list(arrays)
    for name, array in arrays.items():
        assert back.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(back.arrays[name], array)


@pytest.mark.parametrize(
    ("header", "payload"),
    [
        (pb.BundleHeader(arrays=[pb.ArrayHeader(name="x", dtype="object", shape=[1], bytes=8)]), b"\0" * 8),
        (pb.BundleHeader(arrays=[pb.ArrayHeader(name="x", dtype="int32", shape=[2], bytes=8)]), b"\0" * 7),
        (pb.BundleHeader(arrays=[pb.ArrayHeader(name="x", dtype="int32", shape=[2], bytes=4)]), b"\0" * 4),
        (pb.BundleHeader(arrays=[pb.ArrayHeader(name="x", dtype="int32", shape=[-2, -1], bytes=8)]), b"\0" * 8),
        (pb.BundleHeader(arrays=[pb.ArrayHeader(name="x", dtype="int8", shape=[1 << 62, 4], bytes=0)]), b""),
        (pb.BundleHeader(), b"\0"),
        (pb.BundleHeader(meta_json="[1]"), b""),
        (pb.BundleHeader(meta_json="{"), b""),
    ],
)
def test_a_malformed_bundle_is_a_protocol_error(header: pb.BundleHeader, payload: bytes) -> None:
    with pytest.raises(errors.ProtocolError):
        codecs.decode(header, [payload])


def test_objects_do_not_travel_and_results_are_bounded() -> None:
    with pytest.raises(errors.ProtocolError, match="object"):
        codecs.header(codecs.Bundle({}, {"x": np.array([None])}))
    with pytest.raises(errors.ProtocolError, match=r"bytes of meta \['completions'\]; at most"):
        codecs.header(codecs.Bundle({"completions": "y" * codecs.MAX_HEADER_BYTES}))
    assert codecs.MAX_HEADER_BYTES < channel.MAX_MESSAGE_BYTES - (64 << 10)
    huge = np.broadcast_to(np.zeros(1, np.uint8), (codecs.MAX_BUNDLE_BYTES + 1,))
    with pytest.raises(errors.ProtocolError, match="bytes of arrays; at most"):
        codecs.header(codecs.Bundle({}, {"x": huge}))
    with pytest.raises(errors.ProtocolError, match="control road"):
        codecs.dump_result({"x": "y" * codecs.MAX_RESULT_BYTES}, "node")


CLASSES = [cls for _, cls in sorted(errors._tree(errors.WaypathError).items())]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_keeps_its_class_and_text_across_the_wire(cls: type[errors.WaypathError]) -> None:
    back = errors.from_message(errors.to_message(cls("what", remedy="do this", where="node x")))
    assert type(back) is cls
    assert str(back) == "node x: what. do this"


def test_a_foreign_exception_becomes_a_remote_error_with_its_traceback() -> None:
    try:
        raise ZeroDivisionError("by hand")
    except ZeroDivisionError as error:
        message = errors.to_message(error, "node y")
    back = errors.from_message(message)
    assert type(back) is errors.RemoteError
    assert "ZeroDivisionError: by hand" in str(back)
    assert "test_proto.py" in back.remote_traceback


def test_layouts_of_processes_merge_or_disagree_by_name() -> None:
    def part(worker: str, rows: tuple[int, int], shape: tuple[int, ...] = (4, 2)) -> Layout:
        shard = Shard(worker, 0, (rows[0], 0), (rows[1], 2))
        return Layout({"w": TensorLayout("w", shape, "float32", (shard,))})

    merged = part("a", (0, 2)).merged(part("b", (2, 4)))
    assert [shard.worker for shard in merged.tensors["w"].shards] == ["a", "b"]
    assert Layout.from_json(merged.to_json()) == merged
    with pytest.raises(errors.ProtocolError, match="w: "):
        part("a", (0, 2)).merged(part("b", (2, 4), shape=(5, 2)))
    with pytest.raises(errors.ProtocolError, match="malformed layout"):
        Layout.from_json({"tensors": {"w": {"shape": [1]}}})


def test_token_file_is_private_and_random(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = channel.new_token(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert channel.read_token(path) == token
    assert channel.new_token(tmp_path / "other") != token
    path.chmod(0o644)
    with pytest.raises(errors.ConfigError, match="open to others"):
        channel.read_token(path)
    with pytest.raises(errors.ConfigError, match="cannot read"):
        channel.read_token(tmp_path / "missing")


def test_version_mismatch_names_both_sides() -> None:
    ours = version.versions("0.10.2", "cpu")
    version.check(version.versions(), ours, "a client")
    with pytest.raises(errors.VersionMismatchError, match=r"worker x has jax '0.9.0', expected '0.10.2'"):
        version.check(version.versions("0.9.0", "cpu"), ours, "worker x")


class _Hello(ClientServicer):
    async def Hello(self, request: client_pb2.HelloRequest, context: object) -> client_pb2.HelloReply:
        return client_pb2.HelloReply(cluster_id="c")


def test_an_rpc_without_the_token_is_refused_before_its_handler() -> None:
    async def scenario() -> None:
        server = channel.aio_server("right")
        add_ClientServicer_to_server(_Hello(), server)
        port = channel.bind(server, "127.0.0.1:0")
        await server.start()
        async with channel.aio_channel(f"127.0.0.1:{port}") as link:
            stub = ClientStub(link)
            request = client_pb2.HelloRequest()
            reply = await stub.Hello(request, metadata=channel.metadata("right"), timeout=10)
            assert reply.cluster_id == "c"
            for metadata in (None, channel.metadata("wrong")):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.Hello(request, metadata=metadata, timeout=10)
                assert isinstance(errors.from_rpc_error(refused.value, "x"), errors.AuthenticationError)
            with pytest.raises(grpc.aio.AioRpcError) as refused_stream:
                async for _ in stub.WatchRun(client_pb2.WatchRunRequest(), timeout=10):
                    raise AssertionError("an update came")
            assert refused_stream.value.code() is grpc.StatusCode.UNAUTHENTICATED
        taken = channel.aio_server("right")
        with pytest.raises(errors.ConfigError, match="in use"):
            channel.bind(taken, f"127.0.0.1:{port}")
        with pytest.raises(errors.ConfigError, match="loopback"):
            channel.bind(taken, "0.0.0.0:0")
        await server.stop(0)

    asyncio.run(scenario())
