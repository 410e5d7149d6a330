"""Device memory: slices that share devices share their memory, and what is reserved comes back."""

from __future__ import annotations

from waypath.controller.allocation import Grant
from waypath.controller.graph import Aval, Leaf, ProgramBuilder, Slice
from waypath.controller.memory import Memory, footprint
from waypath.controller.sequences import fuse
from waypath.controller.specs import device_bytes, item_bytes, nbytes


def grant(name: str, *devices: int, memory: int = 100) -> Grant:
    placed = tuple(("w", k) for k in devices)
    return Grant(name, "me", ("x",), (len(devices),), placed, ("w",), (0,), "w", "cpu", memory_bytes=memory)


GRANTS = {g.name: g for g in (grant("all", 0, 1, 2, 3), grant("left", 0, 1), grant("right", 2, 3, memory=60))}


def test_slices_share_the_memory_of_the_devices_that_they_share() -> None:
    memory = Memory()
    memory.lay_out(GRANTS)
    memory.reserve("a", {"all": 50})
    assert memory.cells() == [(("all", "left"), 50, 100), (("all", "right"), 50, 60)]
    assert memory.short({"left": 50}) == "" and memory.short({"left": 30, "all": 10}) == ""
    assert memory.short({"left": 51}) == "51 bytes on each device of all, left, where 50 of 100 are left"
    assert "11 bytes on each device of all, right" in memory.short({"all": 11})
    memory.reserve("a", {"left": 5})
    assert memory.share("a") == {"all": 50, "left": 5}
    assert memory.free("a") == {"all": 50, "left": 5} and memory.free("a") == {}
    assert [used for _, used, _ in memory.cells()] == [0, 0]


def test_shares_stay_when_other_slices_come_and_go() -> None:
    memory = Memory()
    memory.lay_out(GRANTS)
    memory.reserve("a", {"left": 7})
    memory.reserve("b", {"right": 9})
    memory.lay_out({"left": GRANTS["left"]})
    assert memory.cells() == [(("left",), 7, 100)] and memory.free("b") == {}


def test_devices_that_do_not_say_what_they_have_are_not_counted() -> None:
    memory = Memory()
    memory.lay_out({"s": grant("s", 0, memory=0)})
    memory.reserve("a", {"s": 1 << 40})
    assert memory.cells() == [] and memory.short({"s": 1 << 40}) == ""


def test_the_footprint_is_what_is_left_behind_and_the_largest_step_besides() -> None:
    s = Slice("left")
    x: Aval = (Leaf((8, 4), "float32", (("x",), ())),)
    big: Aval = (Leaf((100,), "bfloat16", ((),)),)
    b = ProgramBuilder("p")
    (inside,) = b.function("f" * 64, on=s, takes=[], gives=[big])
    (more,) = b.function("f" * 64, inside, on=s, takes=[big], gives=[big])
    (y,) = b.function("f" * 64, more, on=s, takes=[big], gives=[x])
    b.output(y)
    assert (device_bytes(x, GRANTS["left"]), nbytes(x), device_bytes(big, GRANTS["left"])) == (64, 128, 200)
    assert footprint(fuse(b.build()), GRANTS) == {"left": 64 + 200}
    assert footprint(fuse(b.build()), {}) == {}


def test_bytes_of_an_element() -> None:
    found = {
        name: item_bytes(name) for name in ("bool", "int8", "bfloat16", "float8_e4m3fn", "float64", "complex64", "int4")
    }
    assert found == {"bool": 1, "int8": 1, "bfloat16": 2, "float8_e4m3fn": 1, "float64": 8, "complex64": 8, "int4": 1}
