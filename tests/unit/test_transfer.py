"""Pulling slices from a real data server on a loopback socket, in one process."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from waypath.proto import data_pb2, wire
from waypath.proto import worker_pb2 as pb
from waypath.proto.errors import ConfigError, TransferError, UserError
from waypath.workers import pulls
from waypath.workers.data_server import DataServer
from waypath.workers.exposed import Arrivals, ExposedTensor
from waypath.workers.peers import Peers
from waypath.workers.segments import Buffer, Segment, SegmentPool
from waypath.workers.store import ObjectStore
from waypath.workers.transfer import Transfer

TOKEN = "a-token"
WHOLE = np.arange(40 * 30, dtype=np.float32).reshape(40, 30)


@asynccontextmanager
async def cluster(
    *workers: str, token: str = TOKEN, pool: SegmentPool | None = None
) -> AsyncIterator[tuple[Transfer, dict[str, ObjectStore], Peers]]:
    """A transfer of worker "me", the stores of `workers` behind data servers, and me's peer table."""
    stores = {worker: ObjectStore() for worker in workers}
    servers = {worker: DataServer(store, TOKEN) for worker, store in stores.items()}
    peers = Peers()
    peers.update(
        [pb.Peer(worker=w, data_addresses=[await server.start()], host_id="here") for w, server in servers.items()]
    )
    mine = ObjectStore()
    transfer = Transfer("me", token, peers, mine, "here", pool)
    try:
        yield transfer, stores | {"me": mine}, peers
    finally:
        transfer.close()
        for server in servers.values():
            await server.stop()


def copy(tensor: str, source: str, lower: list[int], upper: list[int]) -> dict[str, Any]:
    return {"tensor": tensor, "source": source, "lower": lower, "upper": upper}


def into(target: np.ndarray[Any, Any]) -> Callable[[str, tuple[int, ...], tuple[int, ...]], np.ndarray[Any, Any]]:
    def write(_: str, lower: tuple[int, ...], upper: tuple[int, ...]) -> np.ndarray[Any, Any]:
        cut: Any = map(slice, lower, upper)
        return target[(..., *cut)]

    return write


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 30))


def test_boxes_from_several_sources_land_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "CHUNK_BYTES", 1 << 20)

    async def main() -> None:
        async with cluster("a", "b") as (transfer, stores, _):
            stores["a"].exposures.expose("p/1", {"w": ExposedTensor((40, 30), "float32", [((0, 0), WHOLE[:20])])})
            boxes = [((20, 0), WHOLE[20:, :15]), ((20, 15), WHOLE[20:, 15:])]
            stores["b"].exposures.expose("p/1", {"w": ExposedTensor((40, 30), "float32", boxes)})
            stores["me"].exposures.expose("p/1", {"w": ExposedTensor((40, 30), "float32", [((0, 0), WHOLE)])})
            target = np.zeros_like(WHOLE)
            copies = [
                copy("w", "a", [0, 0], [20, 10]),
                copy("w", "a", [0, 10], [19, 30]),
                copy("w", "b", [20, 3], [40, 15]),
                copy("w", "b", [20, 15], [40, 30]),
                copy("w", "me", [20, 0], [40, 3]),
                copy("w", "me", [19, 10], [20, 30]),
                copy("w", "a", [3, 3], [3, 9]),  # empty
            ]
            stats = await transfer.pull_slices("p/1", copies, into(target))
            np.testing.assert_array_equal(target, WHOLE)
            assert stats.bytes == WHOLE.nbytes and stats.seconds > 0
            for store in stores.values():
                store.exposures.unexpose("p/1", timeout_s=10)

    run(main())


def test_scalars_and_bfloat16_travel() -> None:
    async def main() -> None:
        async with cluster("a") as (transfer, stores, _):
            half = np.arange(7).astype(ml_dtypes.bfloat16)
            tensors = {
                "s": ExposedTensor((), "float64", [((), np.array(2.5))]),
                "h": ExposedTensor((7,), "bfloat16", [((0,), half)]),
            }
            stores["a"].exposures.expose("p", tensors)
            targets: dict[str, np.ndarray[Any, Any]] = {"s": np.zeros(()), "h": np.zeros(7, ml_dtypes.bfloat16)}
            copies = [copy("s", "a", [], []), copy("h", "a", [0], [7])]
            stats = await transfer.pull_slices("p", copies, lambda tensor, *_: targets[tensor])
            assert targets["s"] == 2.5 and (targets["h"] == half).all() and stats.bytes == 22

    run(main())


def test_what_cannot_be_had_is_a_transfer_error_naming_tensor_box_and_source() -> None:
    async def main() -> None:
        async with cluster("a", "b") as (transfer, stores, peers):
            target = np.zeros((40, 30), np.float32)
            for store in stores.values():
                store.exposures.expose("p", {"w": ExposedTensor((40, 30), "float32", [((0, 0), WHOLE[:20])])})
            cases = [
                (
                    "q",
                    copy("w", "a", [0, 0], [1, 1]),
                    r"q: w\[0:\d+, 0:\d+\] from [ab]: .*q is not exposed here; exposed: p",
                ),
                ("p", copy("v", "a", [0, 0], [1, 1]), "p has no tensor v"),
                (
                    "p",
                    copy("w", "a", [19, 0], [21, 1]),
                    r"does not lie in one box held here; boxes .*\[0, 0\] \+ \[20, 30\]",
                ),
                ("p", copy("w", "me", [19, 0], [21, 1]), "is not held by this worker, me"),
                ("p", copy("w", "c", [0, 0], [1, 1]), "from c: UnavailableError: worker c is not up; known: a, b"),
            ]
            for name, wanted, text in cases:
                with pytest.raises(TransferError, match=text):
                    await transfer.pull_slices(name, [copy("w", "b", [0, 0], [20, 30]), wanted], into(target))
            with pytest.raises(TransferError, match="goes to float32"):
                await transfer.pull_slices("p", [copy("w", "a", [0, 0], [1, 1])], lambda *_: target[0, 0])
            with pytest.raises(TransferError, match="w is float32, a target of float64 was given"):
                wrong = np.zeros((1, 1), np.float64)  # twice the bytes
                await transfer.pull_slices("p", [copy("w", "a", [0, 0], [1, 1])], lambda *_: wrong)
            peers.update([pb.Peer(worker="a", data_addresses=["127.0.0.1:1"])])
            with pytest.raises(TransferError, match="from a: UnavailableError: could not pull from a"):
                await transfer.pull_slices("p", [copy("w", "a", [0, 0], [1, 1])], into(target))

    run(main())


def test_a_wrong_token_is_refused() -> None:
    async def main() -> None:
        async with cluster("a", token="another") as (transfer, stores, _):
            stores["a"].exposures.expose("p", {"w": ExposedTensor((40, 30), "float32", [((0, 0), WHOLE)])})
            with pytest.raises(TransferError, match="AuthenticationError") as caught:
                await transfer.pull_slices("p", [copy("w", "a", [0, 0], [1, 1])], into(np.zeros((40, 30), np.float32)))
            assert not isinstance(caught.value, UserError)

    run(main())


def test_a_pull_past_its_deadline_ends_and_its_readers_are_gone() -> None:
    async def main() -> None:
        async with cluster("a") as (transfer, stores, _):
            big = np.broadcast_to(np.zeros(1 << 20, np.uint8), (4096, 1 << 20))  # far more than the deadline allows
            stores["a"].exposures.expose("p", {"w": ExposedTensor(big.shape, "uint8", [((0, 0), big)])})
            target = np.zeros(big.shape, np.uint8)
            copies = [copy("w", "a", [0, 0], list(big.shape))]
            with pytest.raises(TransferError, match=r"w\[0:4096, 0:1048576\] from a: DeadlineError"):
                await transfer.pull_slices("p", copies, into(target), timeout_s=0.0)
            await asyncio.to_thread(stores["a"].exposures.unexpose, "p", 10)

    run(main())


def test_a_cancelled_pull_writes_nothing_afterwards() -> None:
    async def main() -> None:
        async with cluster("a") as (transfer, stores, _):
            big = np.ones((64, 1 << 20), np.uint8)
            stores["a"].exposures.expose("p", {"w": ExposedTensor(big.shape, "uint8", [((0, 0), big)])})
            target = np.zeros_like(big)
            pull = asyncio.create_task(
                transfer.pull_slices("p", [copy("w", "a", [0, 0], list(big.shape))], into(target))
            )
            while not target[0, 0]:
                await asyncio.sleep(0)
            pull.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pull
            before = int(target[:, 0].sum())
            await asyncio.to_thread(stores["a"].exposures.unexpose, "p", 10)
            assert int(target[:, 0].sum()) == before < 64

    run(main())


def relay(tensor: str, source: str, holder: str, lower: list[int], upper: list[int]) -> dict[str, Any]:
    return {**copy(tensor, source, lower, upper), "holder": holder}


def test_a_relayed_slice_is_sent_when_it_has_landed() -> None:
    async def main() -> None:
        async with cluster("holder", "peer") as (transfer, stores, _):
            target, shadow, arrivals = np.zeros_like(WHOLE), np.zeros_like(WHOLE), Arrivals()
            copies = [relay("w", "peer", "holder", [row, 0], [row + 10, 30]) for row in (0, 10, 20, 30)]
            landed: list[tuple[int, ...]] = []
            pulled = asyncio.ensure_future(
                transfer.pull_slices("p", copies, into(target), landed=lambda _, lower, __: landed.append(lower))
            )
            while not stores["peer"].exposures._waiting:  # asked before it is exposed
                await asyncio.sleep(0)
            tensors = {"w": ExposedTensor((40, 30), "float32", [((0, 0), shadow)])}
            stores["peer"].exposures.expose("p", tensors, arrivals)
            for row in (30, 10, 0, 20):
                assert not pulled.done()
                shadow[row : row + 10] = WHOLE[row : row + 10]
                arrivals.land("w", (row, 0), (row + 10, 30))
            stats = await pulled
            np.testing.assert_array_equal(target, WHOLE)
            assert stats.by_source == {"peer": WHOLE.nbytes}
            assert sorted(landed) == [(0, 0), (10, 0), (20, 0), (30, 0)]

    run(main())


@pytest.mark.parametrize("trouble", ["gone", "fails", "silent"])
def test_what_a_peer_does_not_relay_comes_from_the_holder(trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waypath.workers.transfer.RELAY_STALL_S", 0.2)

    async def main() -> None:
        async with cluster("holder", "peer") as (transfer, stores, peers):
            tensors = {"w": ExposedTensor((40, 30), "float32", [((0, 0), WHOLE)])}
            stores["holder"].exposures.expose("p", tensors)
            target, arrivals = np.zeros_like(WHOLE), Arrivals()
            stores["peer"].exposures.expose("p", tensors, arrivals)
            arrivals.land("w", (0, 0), (10, 30))
            if trouble == "gone":
                peers.update([], ["peer"])
            elif trouble == "fails":
                arrivals.end(TransferError("the stage was cancelled"))
            copies = [relay("w", "peer", "holder", [row, 0], [row + 10, 30]) for row in (0, 10)]
            copies.append(copy("w", "holder", [20, 0], [40, 30]))
            stats = await transfer.pull_slices("p", copies, into(target), timeout_s=20)
            np.testing.assert_array_equal(target, WHOLE)
            got = WHOLE[:10].nbytes
            relayed = 0 if trouble == "gone" else got
            assert stats.by_source.get("peer", 0) == relayed and stats.bytes == 4 * got

    run(main())


def test_a_relay_to_another_device_of_this_worker_waits_for_the_first() -> None:
    async def main() -> None:
        async with cluster("holder") as (transfer, stores, _):
            stores["holder"].exposures.expose("p", {"w": ExposedTensor((40, 30), "float32", [((0, 0), WHOLE)])})
            first, second, arrivals = np.zeros_like(WHOLE), np.zeros_like(WHOLE), Arrivals()
            stores["me"].exposures.expose("p", {"w": ExposedTensor((40, 30), "float32", [((0, 0), first)])}, arrivals)
            targets = iter([second, first])
            copies = [relay("w", "me", "holder", [0, 0], [40, 30]), copy("w", "holder", [0, 0], [40, 30])]
            await transfer.pull_slices("p", copies, lambda *_: next(targets), landed=arrivals.land)
            np.testing.assert_array_equal(second, WHOLE)

    run(main())


def test_a_reader_that_does_not_go_on_is_cut_off() -> None:
    async def main() -> None:
        async with cluster("a") as (transfer, stores, _):
            big = np.zeros((1 << 26,), np.uint8)
            exposures = stores["a"].exposures
            exposures.expose("p", {"w": ExposedTensor(big.shape, "uint8", [((0,), big)])})
            stuck, go_on = threading.Event(), threading.Event()

            def landed(*_: Any) -> None:
                stuck.set()
                go_on.wait(10)

            copies = [copy("w", "a", [0], [1]), copy("w", "a", [1], list(big.shape))]
            pulled = asyncio.ensure_future(transfer.pull_slices("p", copies, into(np.zeros_like(big)), landed=landed))
            await asyncio.to_thread(stuck.wait, 10)
            assert exposures.readers("p") == ["me"]
            await asyncio.to_thread(exposures.unexpose, "p", 10, cut_after_s=0.1)
            big[:] = 1  # nobody reads it any more
            go_on.set()
            with pytest.raises(TransferError, match="p is exposed no more: this reader took too long"):
                await pulled

    run(main())


def shared(pool: SegmentPool, shape: tuple[int, ...] = (40, 30)) -> tuple[Segment, np.ndarray[Any, Any]]:
    """Zeros in shared memory, 64 bytes behind the segment's start."""
    buffer = pool.allocate(64 + 4 * math.prod(shape))
    assert isinstance(buffer, Segment)
    target = buffer.array[64:].view(np.float32).reshape(shape)
    target[...] = 0
    return buffer, target


def test_a_source_on_this_machine_writes_to_shared_memory() -> None:
    async def main() -> None:
        pool = SegmentPool(Path("/dev/shm"), required=True)
        async with cluster("a", "b", pool=pool) as (transfer, stores, _):
            segment, target = shared(pool)
            for store in stores.values():
                store.exposures.expose("p", {"w": ExposedTensor((40, 30), "float32", [((0, 0), WHOLE)])})
            landed: list[tuple[int, ...]] = []
            copies = [
                copy("w", "a", [0, 0], [20, 10]),
                copy("w", "a", [0, 10], [20, 30]),
                copy("w", "a", [3, 3], [3, 9]),
            ]
            copies += [copy("w", "b", [20, 0], [40, 30])]
            stats = await transfer.pull_slices("p", copies, into(target), landed=lambda _, low, __: landed.append(low))
            np.testing.assert_array_equal(target, WHOLE)
            assert stats.by_source == {"a": WHOLE.nbytes // 2, "b": WHOLE.nbytes // 2}
            assert sorted(landed) == [(0, 0), (0, 10), (3, 3), (20, 0)]
            assert (transfer.path("a"), segment.tainted) == ("shared", False)
            heap = np.zeros_like(WHOLE)  # what does not lie in a segment comes on a stream
            await transfer.pull_slices("p", copies, into(heap))
            np.testing.assert_array_equal(heap, WHOLE)
            pool.free(segment)
            assert pool.locate(target) is None

    run(main())


def test_a_segment_that_cannot_be_reached_is_sent_over_tcp(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        pool = SegmentPool(Path("/dev/shm"))
        async with cluster("a", pool=pool) as (transfer, stores, _):
            segment, target = shared(pool)
            stores["a"].exposures.expose("p", {"w": ExposedTensor((40, 30), "float32", [((0, 0), WHOLE)])})
            segment.nonce = bytes(16)  # as if that number were another process's
            for _ in range(2):
                stats = await transfer.pull_slices("p", [copy("w", "a", [0, 0], [40, 30])], into(target))
                np.testing.assert_array_equal(target, WHOLE)
                assert stats.bytes == WHOLE.nbytes and not segment.tainted
            assert "is not the segment that was meant" in transfer.path("a")
            assert [r.levelname for r in caplog.records if "sends over TCP" in r.message] == ["WARNING"]

    run(main())


def test_a_writer_that_did_not_say_it_is_done_taints_the_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waypath.workers.transfer.RELAY_STALL_S", 0.2)

    async def main() -> None:
        pool = SegmentPool(Path("/dev/shm"), required=True)
        async with cluster("peer", "holder", pool=pool) as (transfer, stores, _):
            segment, target = shared(pool)
            tensors = {"w": ExposedTensor((40, 30), "float32", [((0, 0), WHOLE)])}
            stores["peer"].exposures.expose("p", tensors, Arrivals())  # nothing ever arrives there
            stores["holder"].exposures.expose("p", tensors)
            copies = [relay("w", "peer", "holder", [0, 0], [40, 30])]
            stats = await transfer.pull_slices("p", copies, into(target), timeout_s=20)
            np.testing.assert_array_equal(target, WHOLE)
            assert stats.by_source == {"holder": WHOLE.nbytes} and segment.tainted

    run(main())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.targets[0].__setattr__("offset", 0), "do not lie in a segment"),
        (lambda r: r.targets[0].__setattr__("offset", 1 << 40), "do not lie in a segment"),
        (lambda r: r.targets[0].strides.__setitem__(0, 1 << 20), "do not lie in a segment"),
        (lambda r: r.targets[0].strides.__setitem__(1, -4), "is no array in a segment"),
        (lambda r: r.targets[0].strides.append(4), "is no array in a segment"),
        (lambda r: r.wanted.slices[0].__setattr__("dtype", "int32"), "is float32, a target of int32 was given"),
    ],
)
def test_a_target_outside_its_segment_is_refused(
    change: Callable[[Any], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        pool = SegmentPool(Path("/dev/shm"), required=True)
        async with cluster("a", pool=pool) as (transfer, stores, _):
            _, target = shared(pool)
            stores["a"].exposures.expose("p", {"w": ExposedTensor((40, 30), "float32", [((0, 0), WHOLE)])})
            serialize = data_pb2.WriteRequest.SerializeToString

            def wrong(request: Any) -> bytes:
                change(request)
                return bytes(serialize(request))

            monkeypatch.setattr(pulls.pb.WriteRequest, "SerializeToString", wrong)
            with pytest.raises(TransferError, match=words):
                await transfer.pull_slices("p", [copy("w", "a", [0, 0], [40, 30])], into(target))
            assert not target.any()

    run(main())


def test_a_full_folder_is_said_before_anything_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"cannot reserve 5,096 bytes of shared memory in .* bytes are free"):
        SegmentPool(Path("/dev/shm"), required=True).allocate(1000)
    buffer = SegmentPool(Path("/dev/shm")).allocate(1000)
    assert type(buffer) is Buffer and buffer.array.nbytes == 1000
    assert "peers will send over TCP" in caplog.text
