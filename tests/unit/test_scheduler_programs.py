"""Programs of clients, one story at a time: parameters, outputs, donation, poison, slices, memory, shares."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest

from waypath.controller import commands as c
from waypath.controller.graph import Aval, Leaf, Pool, Program, ProgramBuilder, Slice
from waypath.controller.resources import Resources
from waypath.controller.scheduler import Scheduler
from waypath.controller.sequences import fuse
from waypath.proto.errors import CancelledError, GraphError, NotFoundError, RewardError, WorkerLostError

S, T = Slice("s"), Slice("t")
X: Aval = (Leaf((8,), "uint8", ((),)),)


class Cluster:
    """World `w` of two processes, world `v` of one; slice `s` is all of `w`, `t` is `v`; both are of the owner `me`."""

    def __init__(self, devices: int = 2, memory: int = 0, **settings: Any) -> None:
        self.scheduler = Scheduler(Resources({"aux": ["aux-0"]}, {"aux": ["aux"]}), **settings)
        self.devices, self.memory = devices, memory
        for name, index, count in (("w-0", 0, 2), ("w-1", 1, 2), ("v-0", 0, 1)):
            self.join(name, index, count)
        self.feed(c.WorkerJoined("aux-0", "1"))
        self.feed(c.PoolMemberReady("aux", "aux"))
        self.feed(c.SliceRequested("s", "me", ("x",), (2 * devices,), world="w"))
        self.feed(c.SliceRequested("t", "me", ("x",), (devices,), world="v"))

    def join(self, name: str, index: int = 0, count: int = 1, incarnation: str = "1") -> None:
        devices = tuple(c.Device(k, "cpu", self.memory) for k in range(self.devices))
        self.feed(c.WorkerJoined(name, incarnation, name[0], index, count, devices, "cpu"))

    def feed(self, event: c.Event) -> list[c.Command]:
        return self.scheduler.handle(event)

    def submit(self, execution_id: str, program: Program, owner: str = "me", **bindings: str) -> list[c.Command]:
        return self.feed(c.ExecutionSubmitted(execution_id, program, {}, owner, bindings))

    def finish(self, execution_id: str, node_id: str, *workers: str, **exports: int) -> list[c.Command]:
        found: list[c.Command] = []
        for worker in workers or ("w-0", "w-1"):
            found += self.feed(c.NodeFinished(worker, "1", execution_id, node_id, 0, {}, 8, exports))
        return found

    def put(self, execution_id: str, on: Slice = S, owner: str = "me") -> str:
        """An object that is there."""
        self.submit(execution_id, put_program(on), owner)
        self.finish(execution_id, "put", *self.scheduler.resources.slices[on.name])
        return f"{execution_id}/put"

    def waits(self) -> list[str]:
        return [line for execution in self.scheduler.describe()["executions"] for line in execution["waits"]]


def put_program(on: Slice = S, aval: Aval = X) -> Program:
    b = ProgramBuilder("put")
    b.output(b.call("function", "put", on=on, gives=aval, node_id="put"))
    return b.build()


def step(*, donates: bool = False, output: bool = True, aval: Aval = X) -> Program:
    b = ProgramBuilder("step")
    x = b.param("x", on=S, aval=aval)
    (y,) = b.function("f" * 64, x, on=S, takes=[aval], gives=[aval], donates=[0] if donates else [], name="f")
    if output:
        b.output(y)
    return fuse(b.build())


def moved() -> Program:
    b = ProgramBuilder("moved")
    b.output(b.transfer(b.param("x", on=S, aval=X), on=T, takes=X, gives=X, node_id="t"))
    return b.build()


def of(kind: type[Any], commands: Sequence[c.Command]) -> list[Any]:
    return [command for command in commands if isinstance(command, kind)]


def ended(commands: Sequence[c.Command]) -> dict[str, Any]:
    return {command.execution_id: command.error for command in of(c.ExecutionCompleted, commands)}


def test_a_parameter_is_bound_to_an_object_that_is_still_computed() -> None:
    cluster = Cluster()
    cluster.submit("p", put_program())
    (first, second) = of(c.Execute, cluster.submit("e", step(), x="p/put"))
    assert (
        first.objects == {"x": "p/put"} and first.locations == {"x": ("w-0", "w-1")} and first.nodes == (("seq_0", 0),)
    )
    assert first.gang_sequence == second.gang_sequence == 2


def test_a_worker_is_told_meshes_and_where_inputs_lie_once() -> None:
    cluster = Cluster()
    oid = cluster.put("p")
    (install,) = of(c.InstallProgram, cluster.submit("e", moved(), x=oid))
    assert install.worker == "v-0" and [grant.name for grant in install.slices] == ["s", "t"]
    assert install.sources == {"t": ("s",)}
    assert of(c.InstallProgram, cluster.submit("e2", moved(), x=oid)) == []


def test_outputs_outlive_their_execution_until_they_are_deleted() -> None:
    cluster = Cluster()
    cluster.submit("p", put_program())
    released = of(c.ReleaseObjects, cluster.finish("p", "put"))
    assert [(r.worker, r.node_ids, r.kept) for r in released] == [("w-0", (), ("put",)), ("w-1", (), ("put",))]
    late = cluster.feed(c.NodeFinished("w-0", "1", "p", "put", 0))
    assert [(r.node_ids, r.kept) for r in of(c.ReleaseObjects, late)] == [((), ("put",))]
    freed = cluster.feed(c.ObjectsDeleted("me", ("p/put", "p/unknown")))
    assert [(r.worker, r.execution_id, r.node_ids) for r in freed if isinstance(r, c.ReleaseObjects)] == [
        ("w-0", "p", ("put",)),
        ("w-1", "p", ("put",)),
    ]
    with pytest.raises(GraphError, match="parameter x: object p/put was deleted"):
        cluster.submit("e", step(), x="p/put")
    assert not cluster.scheduler.queue and len(cluster.scheduler.objects) == 0


def test_what_is_deleted_while_it_is_read_is_freed_after_that() -> None:
    cluster = Cluster()
    oid = cluster.put("p")
    cluster.submit("e", step(output=False), x=oid)
    assert cluster.feed(c.ObjectsDeleted("me", (oid,))) == []
    commands = cluster.finish("e", "seq_0")
    assert ("p", ("put",)) in [(r.execution_id, r.node_ids) for r in of(c.ReleaseObjects, commands)]


def test_bindings_that_cannot_be() -> None:
    cluster = Cluster()
    oid = cluster.put("p")
    cluster.feed(c.SliceRequested("yours", "you", ("x",), (1,)))
    other = cluster.put("q", T)
    other_aval: Aval = (Leaf((4,), "uint8", ((),)),)
    for program, bindings, owner, message in (
        (step(), {}, "me", r"expected objects for the parameters \['x'\], found \[\]"),
        (step(), {"x": "nobody/put"}, "me", "parameter x: no object 'nobody/put' of me"),
        (step(), {"x": other}, "me", "parameter x: expected an object on slice s, q/put lies on slice t"),
        (step(aval=other_aval), {"x": oid}, "me", r"parameter x: expected uint8\[4\] over \(-\), p/put is uint8\[8\]"),
        (step(), {"x": oid}, "you", "slice 's' belongs to me"),
    ):
        with pytest.raises((GraphError, NotFoundError), match=message):
            cluster.submit("e", program, owner, **bindings)
    assert not cluster.scheduler.queue and not cluster.scheduler.running and len(cluster.scheduler.objects) == 2


def test_specs_are_held_against_the_mesh_of_the_slice() -> None:
    cluster = Cluster()
    for leaf, message in (
        (Leaf((8,), "uint8", (("y",),)), "no mesh axis 'y' on slice s, which has {'x': 4}"),
        (Leaf((6,), "uint8", (("x",),)), "dimension 0 of size 6 is not divisible by the 4 parts"),
        (Leaf((8, 8), "uint8", (("x",), ("x",))), "mesh axis 'x' is used twice"),
    ):
        with pytest.raises(GraphError, match=f"program put, node put: .*{message}"):
            cluster.submit("e", put_program(aval=(leaf,)))
    with pytest.raises(GraphError, match="a function outside a sequence"):
        b = ProgramBuilder("loose")
        b.function("f", on=S, takes=[], gives=[X])
        cluster.submit("e", b.build())


def test_a_donated_object_is_gone_and_the_error_says_to_whom() -> None:
    cluster = Cluster()
    oid = cluster.put("p")
    cluster.submit("e", step(donates=True), x=oid)
    with pytest.raises(GraphError, match="object p/put is donated to e/seq_0, nothing may read it after that"):
        cluster.submit("late", step(), x=oid)
    cluster.finish("e", "seq_0", f_0=8)
    with pytest.raises(GraphError, match="object p/put was donated to e/seq_0"):
        cluster.submit("late", step(), x=oid)
    assert cluster.scheduler.objects.ids() == ["e/f_0"]


def test_a_donor_waits_for_readers_at_a_pace_of_their_own() -> None:
    cluster = Cluster()
    oid = cluster.put("p")
    cluster.submit("reads", moved(), x=oid)
    cluster.submit("in lane", step(), x=oid)
    assert of(c.Execute, cluster.submit("e", step(donates=True), x=oid)) == []
    assert "seq_0 waits for others that read what it consumes" in cluster.waits()
    assert [e.execution_id for e in of(c.Execute, cluster.finish("reads", "t", "v-0", t=8))] == ["e", "e"]


def test_a_donor_waits_in_the_queue_for_readers_that_are_there_too() -> None:
    cluster = Cluster(max_in_flight=1)
    oid = cluster.put("p")
    cluster.feed(c.PoolMemberRemoved("aux", "aux"))
    b = ProgramBuilder("reads, and calls")
    b.call("s", "m", b.param("x", on=S, aval=X), on=Pool("aux"), node_id="n")
    cluster.submit("waits", b.build(), x=oid)
    cluster.submit("reads", b.build(), x=oid)
    cluster.submit("e", step(donates=True), x=oid)
    assert list(cluster.scheduler.queue) == ["reads", "e"]
    cluster.feed(c.PoolMemberReady("aux", "aux"))
    cluster.finish("waits", "n", "aux-0")
    assert list(cluster.scheduler.running) == ["reads", "e"]
    assert [e.worker for e in of(c.Execute, cluster.finish("reads", "n", "aux-0"))] == ["w-0", "w-1"]


def test_a_donor_that_never_ran_has_consumed_nothing() -> None:
    cluster = Cluster()
    oid = cluster.put("p")
    cluster.submit("reads", moved(), x=oid)
    cluster.submit("e", step(donates=True), x=oid)
    cluster.feed(c.ExecutionCancelled("e", "asked to"))
    assert of(c.Execute, cluster.submit("again", step(), x=oid))


def test_whoever_is_bound_to_what_failed_fails_with_the_root_cause() -> None:
    cluster = Cluster(max_in_flight=2)
    cluster.submit("p", put_program())
    cluster.submit("running", step(), x="p/put")
    cluster.submit("queued", step(), x="running/f_0")
    error = RewardError("it raised", where="p/put on w-0", remote_traceback="the text")
    assert ended(cluster.feed(c.NodeFailed("w-0", "1", "p", "put", 0, error))) == dict.fromkeys(
        ("p", "running", "queued"), error
    )
    assert ended(cluster.submit("late", step(), x="queued/f_0")) == {"late": error}
    cluster.feed(c.ObjectsDeleted("me", ("p/put", "running/f_0", "queued/f_0", "late/f_0")))
    assert len(cluster.scheduler.objects) == 0 and not cluster.scheduler.queue


def test_a_kept_object_that_is_lost_poisons_its_readers_alone() -> None:
    cluster = Cluster()
    oid, other = cluster.put("p", T), cluster.put("q")
    b = ProgramBuilder("back")
    b.transfer(b.param("x", on=T, aval=X), on=S, takes=X, gives=X, node_id="t")
    cluster.submit("reads", b.build(), x=oid)
    cluster.submit("goes on", step(), x=other)
    errors = ended(cluster.feed(c.WorkerLost("v-0", "killed")))
    assert list(errors) == ["reads"] and isinstance(errors["reads"], WorkerLostError)
    assert "worker v-0 was lost (killed) with object put" in str(errors["reads"])
    assert list(cluster.scheduler.running) == ["goes on"]


def test_an_owners_end_frees_its_objects_and_slices_everywhere() -> None:
    cluster = Cluster()
    oid = cluster.put("p")
    cluster.put("q", T)
    cluster.submit("e", step(), x=oid)
    commands = cluster.feed(c.OwnerReleased("me", "its lease ended"))
    assert isinstance(ended(commands)["e"], CancelledError)
    freed = {(r.worker, r.execution_id) for r in of(c.ReleaseObjects, commands)}
    assert {("w-0", "p"), ("w-1", "p"), ("v-0", "q")} <= freed
    assert len(cluster.scheduler.objects) == 0 and not cluster.scheduler.resources.grants
    assert not cluster.scheduler.memory._shares


def test_a_slice_that_is_released_takes_its_executions_and_objects_with_it() -> None:
    cluster = Cluster()
    oid = cluster.put("p")
    cluster.submit("reads", moved(), x=oid)
    with pytest.raises(NotFoundError):
        cluster.feed(c.SliceReleased("s", "you"))
    errors = ended(cluster.feed(c.SliceReleased("s", "me")))
    assert "slice s was released" in str(errors["reads"])
    with pytest.raises(GraphError, match="placed on slice 's', which does not exist"):
        cluster.put("again")


def test_a_slice_of_a_name_that_was_used_before_is_told_to_workers_anew() -> None:
    cluster = Cluster()
    cluster.put("p")
    cluster.feed(c.SliceReleased("s", "me"))
    cluster.feed(c.SliceRequested("s", "me", ("x",), (2,), world="w"))
    (install,) = of(c.InstallProgram, cluster.submit("q", put_program()))
    assert install.slices[0].sizes == (2,)


def test_memory_is_reserved_waited_for_and_given_back() -> None:
    cluster = Cluster(memory=20)
    first, second = cluster.put("p"), cluster.put("q")
    assert of(c.Execute, cluster.submit("e", step(), x=first)) == []
    assert "e waits for 8 bytes on each device of s, where 4 of 20 are left" in cluster.waits()
    assert of(c.Execute, cluster.submit("elsewhere", put_program(T)))
    assert cluster.scheduler.describe()["memory"][0] == {"slices": ["s"], "reserved_bytes": 16, "device_bytes": 20}
    assert [e.execution_id for e in of(c.Execute, cluster.feed(c.ObjectsDeleted("me", (second,))))] == ["e", "e"]
    wide: Aval = (Leaf((21,), "uint8", ((),)),)
    with pytest.raises(GraphError, match="needs 21 bytes on each device of slice s, which has 20"):
        cluster.submit("too large", put_program(aval=wide))
    split: Aval = (Leaf((20,), "uint8", (("x",),)),)
    cluster.submit("fits", put_program(aval=split))
    assert "fits waits for 5 bytes on each device of s, where 4 of 20 are left" in cluster.waits()


def test_what_is_consumed_makes_room_for_what_takes_its_place() -> None:
    cluster = Cluster(memory=10)
    oid = cluster.put("p0")
    for k in range(1, 4):
        assert of(c.Execute, cluster.submit(f"p{k}", step(donates=True), x=oid))
        cluster.finish(f"p{k}", "seq_0", f_0=8)
        oid = f"p{k}/f_0"
    assert [used for _, used, _ in cluster.scheduler.memory.cells()] == [8, 0]


def test_owners_share_workers_by_weight() -> None:
    cluster = Cluster(max_in_flight=1)
    cluster.feed(c.OwnerJoined("a", 1.0))
    cluster.feed(c.OwnerJoined("b", 3.0))
    b = ProgramBuilder("call")
    b.call("s", "m", on=Pool("aux"), node_id="n")
    program = b.build()
    for owner in ("a", "b"):
        for k in range(60):
            cluster.submit(f"{owner}{k}", program, owner)
    order: list[str] = []
    for _ in range(60):
        (execution_id,) = cluster.scheduler.running
        order.append(execution_id[0])
        cluster.finish(execution_id, "n", "aux-0")
    assert 13 <= order.count("a") <= 17


def test_an_execution_costs_the_same_however_many_devices_its_slice_has() -> None:
    def calls(devices: int) -> int:
        cluster = Cluster(devices, memory=1 << 30)
        oid = cluster.put("p")
        cluster.submit("warm", step_, x=oid)
        cluster.finish("warm", "seq_0", f_0=8)
        count = 0

        def tally(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(tally)
        try:
            cluster.submit("e", step_, x=oid)
            cluster.finish("e", "seq_0", f_0=8)
        finally:
            sys.setprofile(None)
        return count

    step_ = step()
    assert calls(2) == calls(512)


def test_a_deep_queue_costs_an_event_nothing() -> None:
    def calls(ahead: int) -> int:
        cluster = Cluster(max_in_flight=2)
        oid = cluster.put("p")
        program = step()
        for k in range(ahead):
            cluster.submit(f"e{k}", program, x=oid)
        count = 0

        def tally(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(tally)
        try:
            cluster.finish("e0", "seq_0", f_0=8)
        finally:
            sys.setprofile(None)
        return count

    assert calls(200) < 1.1 * calls(8)
