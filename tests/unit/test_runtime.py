"""The command loop against a controller in the same process: the real runtime, executions, inputs and lanes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.fake_controller import FakeController, execute, install, node
from waypath.proto import version
from waypath.proto import worker_pb2 as pb
from waypath.proto.codecs import Bundle
from waypath.proto.errors import NameTakenError, UnavailableError, VersionMismatchError, WaypathError
from waypath.workers import runtime as rt
from waypath.workers.data_server import DataServer
from waypath.workers.executions import Executions
from waypath.workers.inputs import Inputs
from waypath.workers.lanes import JaxThread, Lanes
from waypath.workers.peers import Peers
from waypath.workers.puller import ObjectPuller
from waypath.workers.runtime import Runtime
from waypath.workers.service import ServiceContext, find_service
from waypath.workers.store import ObjectStore
from waypath.workers.transfer import Transfer

TOKEN = "a-token"


class Peer:
    """Another worker: a store behind a data server."""

    def __init__(self, name: str) -> None:
        self.name, self.store = name, ObjectStore()
        self.server = DataServer(self.store, TOKEN)
        self.entry = pb.Peer()

    async def start(self) -> None:
        self.entry = pb.Peer(worker=self.name, data_addresses=[await self.server.start()])


class Worker:
    """A worker without a process: what `main` wires, with the fake transport."""

    def __init__(self, controller: FakeController, grace_s: float = 5.0, process_count: int = 1) -> None:
        loop = asyncio.get_running_loop()
        self.store, self.peers, self.jax = ObjectStore(), Peers(), JaxThread()
        self.puller = ObjectPuller("w", TOKEN, self.peers)
        transfer = Transfer("w", TOKEN, self.peers, self.store)
        context = ServiceContext("w", "probe", 0, process_count, (), loop, self.jax.submit, self.store, transfer)
        register = pb.Register(worker="w", process_count=process_count, versions=version.versions())
        self.runtime = Runtime(register, controller, self.peers, lambda beat: None, grace_s=grace_s)
        self.executions = Executions(
            context,
            Lanes(self.jax),
            lambda execution_id: Inputs(execution_id, "w", self.store, self.puller),
            self.runtime.emit,
            lambda reason: self.runtime.leave(rt.EXIT_STUCK, reason),
        )
        self.runtime.serve(self.executions)
        self._thread = threading.Thread(target=self.jax.run, name="the-jax-thread", daemon=True)
        self._thread.start()


@asynccontextmanager
async def attached(*peers: str, **options: Any) -> AsyncIterator[tuple[FakeController, Worker, dict[str, Peer]]]:
    controller = FakeController()
    worker = Worker(controller, **options)
    others = {name: Peer(name) for name in peers}
    for other in others.values():
        await other.start()
    run_task = asyncio.create_task(worker.runtime.run())
    await controller.until(lambda: controller.all("register"))
    controller.send(peers=pb.Peers(peers=[other.entry for other in others.values()]))
    try:
        yield controller, worker, others
    finally:
        worker.runtime.leave(rt.EXIT_OK, "the test is over")
        await run_task
        worker.jax.stop()
        await worker.puller.close()
        for other in others.values():
            await other.server.stop()


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 30))


def test_a_program_runs_from_register_to_release() -> None:
    async def main() -> None:
        async with attached() as (controller, worker, _):
            register = controller.all("register")[0]
            assert len(register.incarnation) == 16
            install(controller, node("a", "echo", n=4), node("b", "total", "a", "a"), node("c", "on_jax_thread", "b"))
            last = controller.send(execute=execute("a", "b", "c", a=["w"], b=["w"]))
            events = {n: await controller.outcome(n) for n in "abc"}
            assert {e.state for e in events.values()} == {pb.NodeEvent.FINISHED}
            assert json.loads(events["a"].result_json)["options"] == {"n": 4, "step": 7}
            assert events["a"].object_bytes == 32
            assert json.loads(events["b"].result_json) == {"total": 12}
            assert json.loads(events["c"].result_json) == {"thread": "the-jax-thread"}
            assert [span.name for span in events["c"].spans] == ["train"]
            await controller.until(lambda: any(ack.sequence == last for ack in controller.all("ack")))
            assert worker.store.names() == ["e/a", "e/b", "e/c"]
            controller.send(releases=[pb.Release(execution_id="e", node_ids=["a"])])
            last = controller.send(releases=[pb.Release(execution_id="e")])
            await controller.until(lambda: any(ack.sequence == last for ack in controller.all("ack")))
            assert worker.store.nbytes == 0 and len(worker.executions) == 0

    run(main())


def test_inputs_come_from_peers_once_in_process_order_and_follow_a_relocation() -> None:
    async def main() -> None:
        async with attached("p0", "p1", "p2") as (controller, worker, peers):
            install(controller, node("s", "total", "x", "y"), node("t", "total", "x"))
            controller.send(execute=execute("s", "t", x=["p0", "p1"]))
            peers["p0"].store.put("e/x", bundle(1))
            peers["p1"].store.put("e/x", bundle(2))
            assert json.loads((await controller.outcome("t")).result_json) == {"total": 3}
            assert worker.executions.waits() == ["s waits for y, which has no place yet"]
            controller.send(relocate=pb.Relocate(execution_id="e", location=pb.Location(node_id="y", workers=["gone"])))
            await controller.until(lambda: "worker gone is not up" in " ".join(beat_waits(controller)))
            controller.send(relocate=pb.Relocate(execution_id="e", location=pb.Location(node_id="y", workers=["p2"])))
            peers["p2"].store.put("e/y", bundle(4))
            assert json.loads((await controller.outcome("s")).result_json) == {"total": 7}
            assert peers["p0"].server.egress_bytes == 8  # one fetch for two readers

    run(main())


def bundle(value: int) -> Bundle:
    import numpy as np

    return Bundle({}, {"x": np.array([value])})


def beat_waits(controller: FakeController) -> list[str]:
    return [wait for beat in controller.all("heartbeat") for wait in beat.waits]


def test_failures_keep_their_class_and_poison_readers_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waypath.workers.inputs.REFUSED_GRACE_S", 0.05)

    async def main() -> None:
        async with attached() as (controller, _, _):
            install(
                controller,
                node("user", "fail"),
                node("plain", "fail", plain=True),
                node("after", "total", "user"),
                node("unknown", "no_such_method"),
            )
            controller.send(execute=execute("user", "plain", "after", "unknown", "absent", user=["w"]))
            kinds = {}
            for name in ("user", "plain", "after", "unknown", "absent"):
                event = await controller.outcome(name)
                assert event.state == pb.NodeEvent.FAILED and event.error.where.startswith("e/")
                kinds[name] = (event.error.kind, event.error.message.partition(";")[0])
            assert kinds == {
                "user": ("RewardError", "a user's failure"),
                "plain": ("RemoteError", "ValueError: a plain failure"),
                "after": ("RewardError", "a user's failure"),
                "unknown": ("NotFoundError", "ProbeService has no method 'no_such_method'"),
                "absent": ("ProtocolError", "program p with this node is not installed here"),
            }
            event = await controller.outcome("plain")
            assert "in fail" in event.error.traceback

    run(main())


def test_a_producer_that_fails_and_runs_again_elsewhere_does_not_fail_its_reader() -> None:
    async def main() -> None:
        async with attached("p0") as (controller, _, peers):
            install(controller, node("x", "fail"), node("s", "total", "x"))
            controller.send(execute=execute("x", "s", x=["w"]))
            assert (await controller.outcome("x")).state == pb.NodeEvent.FAILED
            peers["p0"].store.put("e/x", bundle(5))
            controller.send(relocate=pb.Relocate(execution_id="e", location=pb.Location(node_id="x", workers=["p0"])))
            assert json.loads((await controller.outcome("s")).result_json) == {"total": 5}

    run(main())


def test_a_higher_attempt_replaces_a_lower_one() -> None:
    async def main() -> None:
        async with attached() as (controller, worker, _):
            install(controller, node("a", "echo", "x"), node("s", "total", "a"))
            controller.send(execute=execute("a", "s", a=["w"]))
            controller.send(execute=execute("a", attempt=1, x=["w"]))
            worker.store.put("e/x", Bundle())
            assert (await controller.outcome("a", 1)).state == pb.NodeEvent.FINISHED
            assert (await controller.outcome("s")).state == pb.NodeEvent.FINISHED
            assert [e.attempt for e in controller.all("node") if e.node_id == "a"] == [1]

    run(main())


def test_cancel_stops_what_waits_and_what_runs_and_frees_objects() -> None:
    async def main() -> None:
        async with attached() as (controller, worker, _):
            install(controller, node("a", "echo"), node("w", "wait"), node("s", "total", "x"))
            controller.send(execute=execute("a", "w", "s"))
            await controller.outcome("a")
            await controller.until(lambda: any("waiting for ever" in b.activity for b in controller.all("heartbeat")))
            controller.send(cancel=pb.Cancel(execution_id="e", reason="enough"))
            assert (await controller.outcome("w")).state == pb.NodeEvent.CANCELLED
            assert (await controller.outcome("s")).state == pb.NodeEvent.CANCELLED
            assert len(worker.store) == 0

    run(main())


def test_deadlines_name_what_was_waited_for() -> None:
    async def main() -> None:
        async with attached() as (controller, _, _):
            install(
                controller,
                node("s", "total", "x", deadline_s=0.05),
                node("w", "wait", deadline_s=0.05),
                node("ok", "echo", deadline_s=0.0),
            )
            controller.send(execute=execute("s", "w", "ok", x=["nobody"]))
            waiting = (await controller.outcome("s")).error
            assert waiting.kind == "DeadlineError"
            assert "it waited for x on nobody, asked for 0." in waiting.message
            running = (await controller.outcome("w")).error
            assert "it was running: probe.wait (e/w): waiting for ever" in running.message
            assert (await controller.outcome("ok")).state == pb.NodeEvent.FINISHED

    run(main())


def test_a_hang_on_the_jax_lane_is_reported_and_ends_the_worker() -> None:
    async def main() -> None:
        controller = FakeController()
        worker = Worker(controller)
        running = asyncio.create_task(worker.runtime.run())
        await controller.until(lambda: controller.all("register"))
        install(controller, node("h", "hang", deadline_s=0.1), node("i", "on_jax_thread", deadline_s=20))
        controller.send(execute=execute("h", "i"))
        event = await controller.outcome("h")
        assert event.error.kind == "DeadlineError" and "hanging" in event.error.message
        assert await running == rt.EXIT_STUCK
        worker.executions.drop_all("the test is over")
        await worker.puller.close()

    run(main())


def test_services_are_told_when_the_controller_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(find_service("probe"), "controller_lost", lambda self: told.append(self), raising=False)

    async def main() -> None:
        async with attached() as (controller, worker, _):
            install(controller, node("a", "echo", n=1))
            controller.send(execute=execute("a"))
            await controller.outcome("a")
            assert told == []
            worker.executions.drop_all("the controller's stream ended")
            assert len(told) == 1

    run(main())


def test_what_came_of_a_node_is_told_again_and_what_nobody_knows_has_failed() -> None:
    async def main() -> None:
        async with attached() as (controller, _, _):
            install(controller, node("a", "echo", n=1), node("b", "total", "x"))
            controller.send(execute=execute("a", "b", x=["p0"]))
            first = await controller.outcome("a")
            asked = [pb.Assignment(node_id=name, attempt=0) for name in ("a", "b", "c")]
            last = controller.send(ask=pb.Ask(execution_id="e", nodes=asked))
            await controller.until(lambda: any(ack.sequence == last for ack in controller.all("ack")))
            events = controller.all("node")
            assert [(e.node_id, e.state) for e in events] == [
                ("a", pb.NodeEvent.FINISHED),
                ("a", pb.NodeEvent.FINISHED),
                ("c", pb.NodeEvent.FAILED),  # b is under way: it waits for x
            ]
            assert events[1] == first and "does not know what came of it" in events[2].error.message

    run(main())


def test_duplicates_are_answered_gaps_and_old_epochs_are_refused() -> None:
    async def main() -> None:
        async with attached() as (controller, _, _):
            install(controller, node("a", "echo"))
            sequence = controller.send(execute=execute("a"))
            await controller.outcome("a")
            controller.send(sequence=sequence, execute=execute("a"))
            await controller.until(lambda: len(controller.all("node")) == 2)
            assert controller.all("node")[0] == controller.all("node")[1]
            controller.send(sequence=sequence + 5, execute=execute("a", attempt=1))
            controller.send(epoch=2, sequence=sequence + 1, execute=execute("a", attempt=1))
            await controller.until(lambda: len(controller.all("nack")) == 2)
            gap, old = controller.all("nack")
            assert (gap.expected, gap.found, gap.reason) == (sequence + 1, sequence + 5, "a message is missing")
            assert old.reason == "epoch 2 is older than 3"
            assert len(controller.all("node")) == 2
            controller.send(execute=execute("a", attempt=1))  # the sequence itself is unharmed
            await controller.outcome("a", 1)

    run(main())


def test_a_gang_sequence_that_goes_back_fails_the_nodes() -> None:
    async def main() -> None:
        async with attached() as (controller, _, _):
            install(controller, node("a", "echo"), node("b", "echo"))
            controller.send(execute=execute("a", gang=5))
            controller.send(execute=execute("b", gang=5))
            assert (await controller.outcome("a")).state == pb.NodeEvent.FINISHED
            error = (await controller.outcome("b")).error
            assert error.kind == "ProtocolError" and "gang sequence 5 came after 5" in error.message

    run(main())


def test_the_jax_lane_keeps_program_order_whatever_is_ready_first() -> None:
    async def main() -> None:
        async with attached() as (controller, worker, _):
            install(controller, node("a", "on_jax_thread", "x"), node("b", "on_jax_thread"))
            controller.send(execute=execute("a", "b", x=["w"]))
            await controller.until(
                lambda: "b waits for the nodes ahead of it on the jax lane" in beat_waits(controller)
            )
            assert controller.all("node") == []
            worker.store.put("e/x", Bundle())
            await controller.outcome("b")
            assert [event.node_id for event in controller.all("node")] == ["a", "b"]

    run(main())


def test_a_lost_stream_is_dialled_again_with_nothing_kept() -> None:
    async def main() -> None:
        async with attached() as (controller, worker, _):
            install(controller, node("a", "echo"), node("w", "wait"))
            controller.send(execute=execute("a", "w"))
            await controller.outcome("a")
            controller.refuse = [UnavailableError("not yet"), NameTakenError("w is taken")]
            controller.break_stream(UnavailableError("reset"))
            await controller.until(lambda: len(controller.all("register")) == 2)
            first, second = controller.all("register")
            assert first.incarnation != second.incarnation
            assert len(worker.executions) == 0 and len(worker.store) == 0
            install(controller, node("b", "echo"))
            controller.send(execute=execute("b"))
            assert (await controller.outcome("b")).state == pb.NodeEvent.FINISHED

    run(main())


@pytest.mark.parametrize(
    ("refusals", "options", "code"),
    [
        ([VersionMismatchError("another jax")], {}, rt.EXIT_REFUSED),
        ([UnavailableError("nobody there")] * 50, {"grace_s": 0.1}, rt.EXIT_ORPHANED),
        ([NameTakenError("'w' is alive as incarnation a")] * 50, {"grace_s": 0.0}, rt.EXIT_ORPHANED),
    ],
)
def test_exit_codes_without_a_controller(
    refusals: list[WaypathError],
    options: dict[str, Any],
    code: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rt, "NAME_TAKEN_S", 0.1)
    taken = isinstance(refusals[0], NameTakenError)

    async def main() -> None:
        controller = FakeController()
        controller.refuse = list(refusals)
        worker = Worker(controller, **options)
        assert await worker.runtime.run() == code
        worker.jax.stop()
        assert str(refusals[0]) in caplog.text
        assert ("counts another worker of this name as alive, after 0." in caplog.text) == taken
        assert ("no controller for 0." in caplog.text) == (code == rt.EXIT_ORPHANED and not taken)

    run(main())


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ({"shutdown": pb.Shutdown(reason="done", grace_s=0.5)}, rt.EXIT_OK),
        ({"abort_world": pb.AbortWorld(reason="trainer-1 is lost")}, rt.EXIT_STUCK),
    ],
)
def test_the_controller_ends_the_worker(kind: dict[str, Any], code: int) -> None:
    async def main() -> None:
        controller = FakeController()
        worker = Worker(controller, process_count=2)
        running = asyncio.create_task(worker.runtime.run())
        await controller.until(lambda: controller.all("register"))
        controller.send(**kind)
        assert await running == code
        await worker.runtime.stop()
        worker.jax.stop()

    run(main())


def test_a_member_of_a_world_leaves_when_its_stream_breaks() -> None:
    async def main() -> None:
        controller = FakeController()
        worker = Worker(controller, process_count=2)
        running = asyncio.create_task(worker.runtime.run())
        await controller.until(lambda: controller.all("heartbeat"))
        controller.break_stream(UnavailableError("reset"))
        assert await running == rt.EXIT_ORPHANED and controller.streams == 1
        worker.jax.stop()

    run(main())
