"""Objects between workers: the long poll, errors of single objects, death and return of a peer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from waypath.proto import channel, codecs
from waypath.proto import worker_pb2 as pb
from waypath.proto.codecs import Bundle
from waypath.proto.errors import ConfigError, NotFoundError, ProtocolError, RewardError
from waypath.workers.data_server import DataServer
from waypath.workers.peers import Peers
from waypath.workers.puller import Fetch, ObjectPuller
from waypath.workers.store import ObjectStore

TOKEN = "a-token"
NEVER_TWICE = itertools.count()


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[ObjectStore, DataServer, ObjectPuller, Peers]]:
    """Worker a's store and server, and worker b's puller with its peer table."""
    store, peers = ObjectStore(), Peers()
    server = DataServer(store, TOKEN)
    peers.update([pb.Peer(worker="a", data_addresses=[await server.start()])])
    puller = ObjectPuller("b", TOKEN, peers)
    try:
        yield store, server, puller, peers
    finally:
        await puller.close()
        await server.stop()


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 30))


def bundle(n: int) -> Bundle:
    return Bundle({"n": n}, {"x": np.arange(n, dtype=np.int32), "e": np.zeros((0, 3), np.float32)})


def test_objects_come_as_they_become_ready() -> None:
    async def main() -> None:
        async with pair() as (store, server, puller, _):
            first, second, big, empty = (puller.fetch("e", node, "a") for node in ("n1", "n2", "big", "empty"))
            store.put("e/n2", bundle(5))
            found = await second.future
            assert found.meta == {"n": 5} and not first.future.done()
            np.testing.assert_array_equal(found.arrays["x"], np.arange(5))
            assert found.arrays["e"].shape == (0, 3)
            assert first.describe().startswith("n1 on a, asked for 0.")
            store.put("e/empty", Bundle())
            assert (await empty.future).arrays == {}
            store.put("e/big", bundle(1_000_000))
            np.testing.assert_array_equal((await big.future).arrays["x"], np.arange(1_000_000))
            store.put("e/n1", bundle(1))
            assert (await first.future).meta == {"n": 1}
            assert server.egress_bytes == 4 * (5 + 1_000_000 + 1)

    run(main())


def test_one_objects_error_does_not_touch_the_others() -> None:
    async def main() -> None:
        async with pair() as (store, _, puller, _):
            fetches: list[Fetch] = [puller.fetch("e", node, "a") for node in ("ok", "failed", "released", "late")]
            store.fail("e/failed", RewardError("not a number", where="score_3 on reward-0"))
            store.release("e/released")
            store.put("e/ok", bundle(2))
            assert (await fetches[0].future).meta == {"n": 2}
            with pytest.raises(RewardError, match="not a number"):
                await fetches[1].future
            with pytest.raises(NotFoundError, match="e/released was released"):
                await fetches[2].future
            store.put("e/late", bundle(3))
            assert (await fetches[3].future).meta == {"n": 3}

    run(main())


def test_an_object_that_cannot_travel_fails_and_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with pair() as (store, _, puller, _):
            large, good = puller.fetch("e", "large", "a"), puller.fetch("e", "good", "a")
            store.put("e/large", Bundle({"text": "x" * codecs.MAX_HEADER_BYTES}))
            with pytest.raises(ProtocolError, match=r"e/large: .* bytes of meta \['text'\]; at most"):
                await large.future
            store.put("e/good", bundle(2))
            assert (await good.future).meta == {"n": 2}

            monkeypatch.setattr(codecs, "MAX_HEADER_BYTES", 1 << 30)  # a peer with other limits
            store.put("e/larger", Bundle({"text": "x" * channel.MAX_MESSAGE_BYTES}))
            with pytest.raises(ProtocolError, match="larger than max"):
                await puller.fetch("e", "larger", "a").future

    run(main())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            ("waypath.workers.puller.google_crc32c.value", lambda data: next(NEVER_TWICE)),
            "e/n: a chunk does not match its CRC32C",
        ),
        (("waypath.proto.codecs.decode", lambda header, chunks: 1 / 0), "pull from a: ZeroDivisionError"),
    ],
)
def test_a_damaged_object_and_a_fault_of_the_puller_reach_who_waits(
    damage: tuple[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with pair() as (store, _, puller, _):
            store.put("e/n", bundle(2))
            monkeypatch.setattr(*damage)
            with pytest.raises(ProtocolError, match=message):
                await puller.fetch("e", "n", "a").future

    run(main())


def test_a_peer_that_is_not_up_yet_and_one_that_comes_back() -> None:
    async def main() -> None:
        async with pair() as (_, server, puller, peers):
            early = puller.fetch("e", "n", "c")
            waiting = puller.fetch("e", "n", "a")
            while early.trouble is None:
                await asyncio.sleep(0)
            assert "last: worker c is not up; known: a" in early.describe()
            await server.stop()
            while waiting.trouble is None:
                await asyncio.sleep(0)
            store = ObjectStore()
            second = DataServer(store, TOKEN)
            address = await second.start()
            store.put("e/n", bundle(4))
            peers.update([pb.Peer(worker=w, data_addresses=[address]) for w in ("a", "c")])
            assert (await waiting.future).meta == (await early.future).meta == {"n": 4}
            await second.stop()

    run(main())


def test_nobody_waits_at_the_server_for_what_nobody_wants() -> None:
    async def main() -> None:
        async with pair() as (store, _, puller, _):
            fetch = puller.fetch("e", "n", "a")
            while not store._waiters:
                await asyncio.sleep(0)
            fetch.future.cancel()
            while store._waiters:
                await asyncio.sleep(0)

    run(main())


def test_only_loopback_is_bound() -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="only loopback"):
            await DataServer(ObjectStore(), TOKEN).start("0.0.0.0:0")

    run(main())
