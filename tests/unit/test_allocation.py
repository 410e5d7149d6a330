"""Virtual slices: where they are placed, and what is said where they cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from waypath.controller import commands as c
from waypath.controller.allocation import Grant
from waypath.controller.resources import Resources
from waypath.proto.errors import ConfigError, NotFoundError


def cluster(**settings: Any) -> Resources:
    """World `w` of 2 processes with 4 devices each, world `v` of 1 with 2; a worker without devices."""
    resources = Resources({"reward": ["r"]}, {}, **settings)
    for name, world, index, count, devices in (("w0", "w", 0, 2, 4), ("w1", "w", 1, 2, 4), ("v0", "v", 0, 1, 2)):
        joined = tuple(c.Device(k, "cpu", 1000 + k) for k in range(devices))
        resources.join(c.WorkerJoined(name, "1", world, index, count, joined, "cpu"))
    resources.join(c.WorkerJoined("r", "1"))
    return resources


def ask(resources: Resources, name: str, *sizes: int, owner: str = "me", **options: Any) -> Grant:
    axes = ("x", "y", "z")[: len(sizes)]
    return resources.request(c.SliceRequested(name, owner, axes, sizes, **options))


def test_whole_processes_in_process_order_or_a_block_of_one() -> None:
    grant = ask(cluster(), "s", 2, 4)
    assert grant.workers == ("w0", "w1") and grant.indices == (0, 1) and grant.world == "w"
    assert grant.devices == tuple((worker, k) for worker in ("w0", "w1") for k in range(4))
    assert grant.memory_bytes == 1000
    part = ask(cluster(), "s", 2)
    assert part.devices == (("v0", 0), ("v0", 1)) and part.workers == ("v0",)


def test_packing_fills_what_is_used_and_spreading_what_is_not() -> None:
    resources = cluster()
    assert ask(resources, "a", 1).devices == (("v0", 0),)
    assert ask(resources, "b", 1).devices == (("v0", 0),)
    assert ask(resources, "c", 1, strategy="spread").devices == (("v0", 1),)
    assert ask(resources, "d", 4, strategy="spread").workers == ("w0",)
    assert ask(resources, "e", 4, strategy="spread").workers == ("w1",)


def test_an_exclusive_slice_has_its_devices_to_itself() -> None:
    resources = cluster()
    ask(resources, "a", 2, exclusive=True)
    assert ask(resources, "b", 2).workers == ("w0",)
    with pytest.raises(ConfigError, match=r"8 devices in one world.*; a of me holds 2, b of me holds 2"):
        ask(resources, "c", 8, exclusive=True)
    resources.release("a")
    assert ask(resources, "d", 2, exclusive=True).workers == ("v0",)


def test_affinity_to_a_world_a_platform_and_another_slice() -> None:
    resources = cluster()
    assert ask(resources, "a", 2, world="w").workers == ("w0",)
    assert ask(resources, "b", 1, 2, like="a").devices == resources.grants["a"].devices
    with pytest.raises(NotFoundError, match="no slice 'zz'; there are: a, b"):
        ask(resources, "c", 2, like="zz")
    with pytest.raises(ConfigError, match="4 devices, a has 2"):
        ask(resources, "c", 4, like="a")
    with pytest.raises(ConfigError, match=r"2 tpu devices in one world.*0 of 0 are free"):
        ask(resources, "c", 2, platform="tpu")


@pytest.mark.parametrize("sizes", [(3, 3), (6,), (16,), (5,)])
def test_what_cannot_be_placed_says_what_there_is(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="10 of 10 are free; devices by world: v: 2, w: 8; nobody holds the rest"):
        ask(cluster(), "s", *sizes)


def test_who_holds_the_rest_is_said() -> None:
    resources = cluster()
    ask(resources, "mine", 2, 4, exclusive=True)
    with pytest.raises(ConfigError, match=r"8 devices.*: 2 of 10 are free; .*; mine of me holds 8"):
        ask(resources, "more", 8, owner="you")


def test_requests_that_make_no_sense() -> None:
    resources = cluster()
    ask(resources, "s", 1)
    for event, message in (
        (c.SliceRequested("s", "me", ("x",), (1,)), "the name is taken or empty"),
        (c.SliceRequested("reward", "me", ("x",), (1,)), "the name is taken or empty"),
        (c.SliceRequested("t", "me", ("x", "x"), (1, 1)), "expected different axes with a size each"),
        (c.SliceRequested("t", "me", ("x",), (0,)), "expected sizes from 1"),
        (c.SliceRequested("t", "me", ("x",), (1 << 40,)), "expected sizes from 1"),
        (c.SliceRequested("t", "me", ("x",), (1,), strategy="best"), "strategy: expected one of"),
    ):
        with pytest.raises(ConfigError, match=message):
            resources.request(event)
    with pytest.raises(NotFoundError, match="you has no slice 's'"):
        resources.check_owner("s", "you")
    assert list(resources.grants) == ["s"]


def test_the_same_requests_give_the_same_slices_but_another_serial() -> None:
    one, two = cluster(), cluster()
    for resources in (one, two):
        for k, size in enumerate((2, 1, 4, 8)):
            ask(resources, f"s{k}", size, strategy="spread" if k % 2 else "pack")
    assert one.grants == two.grants
    before = one.grants["s0"]
    one.release("s0")
    assert ask(one, "s0", 2).serial > before.serial


def test_a_slice_is_down_while_a_worker_is_gone_and_takes_back_only_the_same() -> None:
    resources = cluster()
    ask(resources, "s", 2, 4)
    resources.lose("w1")
    assert resources.missing("s") == ("w1",)
    with pytest.raises(ConfigError, match="slice 's' of me expects it as process 1 of world 'w'"):
        resources.join(c.WorkerJoined("w1", "2", "w", 1, 2, (c.Device(0),), "cpu"))
    assert resources.join(c.WorkerJoined("w1", "2", "w", 1, 2, tuple(map(c.Device, range(4))), "cpu"))
    assert resources.missing("s") == ()


def test_a_limit_on_device_memory_takes_the_place_of_what_devices_say() -> None:
    assert ask(cluster(device_bytes=77), "s", 8).memory_bytes == 77
