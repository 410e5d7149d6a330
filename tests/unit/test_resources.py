"""Workers, worlds, slices, pools: who is there, and who is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from waypath.controller.commands import WorkerJoined
from waypath.controller.graph import Pool, Slice
from waypath.controller.resources import Resources
from waypath.proto.errors import ConfigError, NameTakenError, NotFoundError

SLICES = {"trainer": ["t0", "t1"], "i0": ["i0"], "i1": ["i1"]}
POOLS = {"inference": ["i1", "i0"]}


def with_workers(*events: WorkerJoined) -> Resources:
    resources = Resources(SLICES, POOLS)
    for event in events:
        assert resources.join(event)
    return resources


def test_a_slice_is_up_when_all_its_workers_are() -> None:
    resources = with_workers(WorkerJoined("t0", "a", "train", 0, 2))
    assert resources.missing("trainer") == ("t1",)
    resources.join(WorkerJoined("t1", "b", "train", 1, 2))
    assert resources.missing("trainer") == ()
    assert resources.world_peers("t0") == ("t1",) and resources.world_size("t0") == 2
    resources.lose("t0")
    assert resources.missing("trainer") == ("t0",) and not resources.is_current("t0", "a")


def test_the_same_process_may_come_back_another_may_not() -> None:
    resources = with_workers(WorkerJoined("i0", "a"))
    assert resources.join(WorkerJoined("i0", "a")) is False
    with pytest.raises(NameTakenError, match="'i0' is alive as incarnation a, found b"):
        resources.join(WorkerJoined("i0", "b"))
    resources.lose("i0")
    assert resources.join(WorkerJoined("i0", "b"))


def test_pool_members_are_ready_until_removed_or_lost() -> None:
    resources = with_workers(WorkerJoined("i0", "a"), WorkerJoined("i1", "a"))
    assert resources.ready_members("inference") == ()
    resources.member_ready("inference", "i0")
    resources.member_ready("inference", "i1")
    assert resources.ready_members("inference") == ("i1", "i0"), "in the pool's order"
    resources.member_removed("inference", "i1")
    resources.lose("i0")
    resources.join(WorkerJoined("i0", "b"))
    assert resources.ready_members("inference") == (), "a new process has to be declared ready again"


def test_pools_refuse_what_cannot_be_a_member() -> None:
    resources = with_workers()
    with pytest.raises(NotFoundError, match="no pool 'x'"):
        resources.member_ready("x", "i0")
    with pytest.raises(ConfigError, match=r"slice 'trainer' cannot be a member; expected \['i1', 'i0'\]"):
        resources.member_ready("inference", "trainer")
    with pytest.raises(ConfigError, match="member 'i0' is not up, missing workers: i0"):
        resources.member_ready("inference", "i0")


REFUSED = [
    (WorkerJoined("t1", "b", "train", 1, 3), "expected 2 processes as t0 says, found 3"),
    (WorkerJoined("t1", "b", "train", 0, 2), "process index 0 is taken by t0"),
    (WorkerJoined("t1", "b", "train", 2, 2), "process index 2 of 2 processes"),
    (WorkerJoined("t1", "b", "other", 1, 2), "slice 'trainer' must lie in one world: t0 is in 'train', t1 in 'other'"),
    (WorkerJoined("t1", "b", "other", 0, 1), "slice 'trainer' has 2 workers, world 'other' only 1 processes"),
    (WorkerJoined("stranger", "b"), "worker 'stranger' belongs to no slice of this cluster"),
]


@pytest.mark.parametrize(("event", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_a_world_that_does_not_fit_is_refused(event: WorkerJoined, message: str) -> None:
    resources = with_workers(WorkerJoined("t0", "a", "train", 0, 2))
    with pytest.raises(ConfigError) as caught:
        resources.join(event)
    assert message in str(caught.value) and event.worker in str(caught.value)
    assert list(resources.live) == ["t0"]


def test_places_of_a_worker() -> None:
    resources = with_workers()
    assert resources.places_of("i0") == {Slice("i0"), Pool("inference")}
    assert resources.places_of("t1") == {Slice("trainer")} and resources.places_of("nobody") == frozenset()


@pytest.mark.parametrize(
    ("slices", "pools", "message"),
    [
        ({"a": []}, {}, "slice 'a': expected one or more different workers"),
        ({"a": ["w", "w"]}, {}, "slice 'a': expected one or more different workers"),
        ({"a": ["w"]}, {"p": ["b"]}, r"pool 'p': no such slices: \['b'\]"),
    ],
)
def test_impossible_clusters(
    slices: Mapping[str, Sequence[str]], pools: Mapping[str, Sequence[str]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Resources(slices, pools)
