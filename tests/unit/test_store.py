"""The worker's store: objects, tombstones, waiters, exposed tensors and their readers."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from waypath.proto.codecs import Bundle
from waypath.proto.errors import DeadlineError, LocalError, NotFoundError, RewardError, TransferError
from waypath.workers.exposed import ExposedTensor
from waypath.workers.store import ObjectStore


def bundle(n: int = 4) -> Bundle:
    return Bundle({"n": n}, {"x": np.zeros(n, np.float32)})


def test_bytes_are_counted_and_freed() -> None:
    store = ObjectStore()
    store.put("e/a", bundle(4))
    store.put("e/b", bundle(6))
    assert (store.nbytes, len(store), store.names()) == (40, 2, ["e/a", "e/b"])
    assert store.release("e/a") == 16
    assert store.release("e/a") == 0
    assert store.nbytes == 24
    assert store.release_execution("e") == 24
    assert (store.nbytes, len(store)) == (0, 0)


def test_a_second_put_is_refused_and_a_put_after_release_is_dropped() -> None:
    store = ObjectStore()
    store.put("e/a", bundle())
    with pytest.raises(LocalError, match="e/a is already held"):
        store.put("e/a", bundle())
    store.release("e/a")
    store.put("e/a", bundle())
    with pytest.raises(NotFoundError, match="e/a was released"):
        store.get("e/a")


def test_another_attempt_reopens_a_tombstone_and_keeps_who_waits() -> None:
    async def main() -> None:
        store = ObjectStore()
        early = asyncio.create_task(store.wait("e/a"))
        await asyncio.sleep(0)
        store.reopen("e/a")
        store.put("e/a", bundle(3))
        assert (await early).meta == {"n": 3}
        store.reopen("e/a")
        assert store.nbytes == 0
        store.put("e/a", bundle(5))
        assert store.get("e/a").meta == {"n": 5}

    asyncio.run(main())


def test_waiters_get_the_object_the_error_or_the_release() -> None:
    async def main() -> None:
        store = ObjectStore()
        ready, failed, released, given_up = (
            asyncio.create_task(store.wait(name)) for name in ("e/ready", "e/failed", "e/released", "e/given_up")
        )
        await asyncio.sleep(0)
        given_up.cancel()
        thread = threading.Thread(target=store.put, args=("e/ready", bundle(2)))
        thread.start()
        store.fail("e/failed", RewardError("no number"))
        store.release("e/released")
        thread.join()
        assert (await ready).meta == {"n": 2}
        with pytest.raises(RewardError, match="no number"):
            await failed
        with pytest.raises(NotFoundError, match="was released"):
            await released
        with pytest.raises(RewardError, match="no number"):
            await store.wait("e/failed")
        await asyncio.gather(given_up, return_exceptions=True)
        store.put("e/given_up", bundle())

    asyncio.run(main())


def test_find_gives_the_box_that_contains_the_request() -> None:
    whole = np.arange(24).reshape(4, 6)
    tensor = ExposedTensor((4, 6), "int64", [((0, 0), whole[:2]), ((2, 3), whole[2:, 3:])])
    found = tensor.find((0, 1), (2, 4))
    assert found is not None
    np.testing.assert_array_equal(found, whole[0:2, 1:4])
    found = tensor.find((3, 4), (4, 6))
    assert found is not None
    np.testing.assert_array_equal(found, whole[3:4, 4:6])
    assert tensor.find((1, 0), (3, 6)) is None  # lies in two boxes
    assert tensor.find((2, 0), (3, 1)) is None  # not held
    assert tensor.find((0,), (1,)) is None


def test_expose_checks_boxes_against_the_shape_and_dtype() -> None:
    store = ObjectStore()
    with pytest.raises(LocalError, match=r"tensor w is float32\[4, 4\], a box at \[2, 0\] is float32\[3, 4\]"):
        store.exposures.expose("p", {"w": ExposedTensor((4, 4), "float32", [((2, 0), np.zeros((3, 4), np.float32))])})
    with pytest.raises(LocalError, match="float64"):
        store.exposures.expose("p", {"w": ExposedTensor((4,), "float32", [((0,), np.zeros(4))])})
    store.exposures.expose("p", {})
    with pytest.raises(LocalError, match="p is already exposed"):
        store.exposures.expose("p", {})


def test_unexpose_refuses_new_readers_and_waits_for_the_present_ones() -> None:
    store = ObjectStore()
    store.exposures.expose("p", {})
    reading, finish = threading.Event(), threading.Event()

    def read() -> None:
        with store.exposures.reading("p", "inference-0"):
            reading.set()
            finish.wait(10)

    reader = threading.Thread(target=read)
    reader.start()
    assert reading.wait(10)
    with pytest.raises(DeadlineError, match=r"still read after 0.01 s by inference-0 \(1\)"):
        store.exposures.unexpose("p", timeout_s=0.01)
    with (
        pytest.raises(TransferError, match="p is not exposed here; exposed: nothing"),
        store.exposures.reading("p", "late"),
    ):
        pass
    finish.set()
    store.exposures.unexpose("p", timeout_s=10)
    reader.join()
    store.exposures.unexpose("p")  # unknown by now: fine
    store.exposures.expose("p", {})


def test_a_scalar_is_found_as_a_view() -> None:
    value = np.array(3.0)
    found = ExposedTensor((), "float64", [((), value)]).find((), ())
    assert isinstance(found, np.ndarray) and np.shares_memory(found, value)
