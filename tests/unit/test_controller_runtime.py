"""The controller's side of a worker's stream: a full queue, a partial list of commands, and what futures give."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from waypath.controller import commands as c
from waypath.controller import connection, runtime
from waypath.controller.connection import Connection
from waypath.controller.graph import Program, ProgramBuilder, Slice
from waypath.controller.main import cluster
from waypath.controller.runtime import Execution, Runtime
from waypath.proto import worker_pb2 as pb
from waypath.proto.errors import LocalError, NotFoundError, RemoteError, TransferError


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 20))


def attach(one: Runtime, worker: str) -> Connection:
    link = Connection(pb.Register(worker=worker, incarnation=f"{worker}/1", role=worker.partition("-")[0]), one.epoch)
    one.connections[worker] = link
    one.handle(c.WorkerJoined(worker, f"{worker}/1"))
    return link


def program(*workers: str) -> Program:
    builder = ProgramBuilder("p")
    for worker in workers:
        builder.call("s", "m", on=Slice(worker), node_id=worker, on_worker_lost="drop")
    return builder.build()


def kinds(link: Connection) -> list[str | None]:
    return [message.WhichOneof("kind") for message in link._outgoing]


def test_a_worker_that_does_not_read_is_lost_and_the_others_get_their_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(connection, "MAX_QUEUED_MESSAGES", 8)
        one = Runtime(cluster(0, 2, 0), "c", 1)
        stuck, reader = attach(one, "inference-0"), attach(one, "inference-1")
        lost: list[tuple[str, str]] = []
        with one.watch_workers(lambda *_: None, lambda worker, role, cause: lost.append((worker, cause))):
            for _ in range(8):
                stuck.send(pb.ControllerMessage())
            execution = one.submit(program("inference-0", "inference-1"), {}, owner="o")
        assert lost == [("inference-0", "it does not read: 8 messages wait for it")]
        one._tell_peers()  # what the loop's timer would do next
        assert kinds(reader) == ["install", "execute", "peers"]
        assert list(one.connections) == ["inference-1"]
        assert await execution.node("inference-0") == {}
        assert [message async for message in stuck.outgoing()] == [], "its stream ends"

    run(main())


def test_an_idle_worker_that_owes_an_answer_is_asked() -> None:
    async def main() -> None:
        one = Runtime(cluster(0, 1, 0), "c", 1)
        link = attach(one, "inference-0")
        one.submit(program("inference-0"), {}, owner="o")
        sent = link._outgoing[-1].sequence

        async def beats() -> AsyncIterator[pb.WorkerMessage]:
            for acknowledged, nodes in ((sent - 1, 0), (sent, 1), (sent, 0)):
                yield pb.WorkerMessage(acknowledged=acknowledged, heartbeat=pb.Heartbeat(nodes=nodes))
                asked.append(kinds(link).count("ask"))

        asked: list[int] = []
        await one._read(link, beats())
        assert asked == [0, 0, 1], "not before it has handled everything and has nothing to do"
        (node,) = link._outgoing[-1].ask.nodes
        assert (node.node_id, node.attempt) == ("inference-0", 0)

    run(main())


def test_a_release_goes_with_the_next_message_or_soon_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        link = Connection(pb.Register(worker="w"), 1)

        def release(name: str) -> None:
            link.send(pb.ControllerMessage(releases=[pb.Release(execution_id=name)]))

        release("a")
        release("b")
        assert not link._outgoing
        link.send(pb.ControllerMessage(cancel=pb.Cancel(execution_id="c")))
        release("d")
        stream = link.outgoing()
        one, two = await anext(stream), await anext(stream)
        assert [r.execution_id for r in one.releases] == ["a", "b"] and one.WhichOneof("kind") == "cancel"
        assert [r.execution_id for r in two.releases] == ["d"] and two.WhichOneof("kind") is None
        assert (one.sequence, two.sequence) == (1, 2)
        monkeypatch.setattr(connection, "MAX_HELD", 2)
        release("e")
        release("f")
        assert len(link._outgoing) == 1, "nothing is held without bound"

    run(main())


def test_a_stream_ends_behind_what_is_queued_however_much_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(connection, "MAX_QUEUED_MESSAGES", 2)
        link = Connection(pb.Register(worker="w"), 1)
        for _ in range(2):
            link.send(pb.ControllerMessage())
        link.close()
        link.send(pb.ControllerMessage())
        assert [message.sequence async for message in link.outgoing()] == [1, 2]

    run(main())


def test_an_error_about_one_silent_worker_does_not_end_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(runtime, "LIVENESS_PERIOD_S", 0.001)
        one = Runtime(cluster(0, 2, 0), "c", 1, heartbeat_timeout_s=-1.0)
        for worker in ("inference-0", "inference-1"):
            attach(one, worker)

        def broken(worker: str, role: str, cause: str) -> None:
            raise ValueError(f"about {worker}")

        with one.watch_workers(lambda *_: None, broken):
            watch = asyncio.create_task(one.watch_liveness())
            while one.connections:
                await asyncio.sleep(0)
        assert not watch.done()
        watch.cancel()

    run(main())


def test_futures_of_nodes_give_the_nodes_own_results_also_after_the_end() -> None:
    async def main() -> None:
        execution = Execution("e", program("a", "b", "dropped"))
        early = asyncio.create_task(execution.node("b"))
        await asyncio.sleep(0)
        execution.node_completed("a", {"w": {"x": 1}})
        execution.completed(c.ExecutionCompleted("e", "done", {"a": {"w": {"x": 1}}, "b": {"w": {"y": 2}}}))
        assert await early == await execution.node("b") == {"w": {"y": 2}}
        assert await execution.node("a") == {"w": {"x": 1}}
        assert await execution.node("dropped") == {}
        with pytest.raises(NotFoundError, match="no node 'typo'; it has: a, b, dropped"):
            await execution.node("typo")
        failed = Execution("f", program("a"))
        failed.completed(c.ExecutionCompleted("f", "failed", {}, LocalError("the cause")))
        with pytest.raises(LocalError, match="the cause"):
            await failed.node("a")

    run(main())


def test_an_execution_that_was_given_up_reaches_no_worker_that_comes_later() -> None:
    async def main() -> None:
        one = Runtime(cluster(2, 0, 0), "c", 1)
        builder = ProgramBuilder("p")
        builder.call("s", "m", on=Slice("trainer"))
        execution = one.submit(builder.build(), {}, owner="o")
        one.cancel(execution, "given up")
        one.cancel(execution, "twice is no error")
        with pytest.raises(RemoteError, match="cancelled: given up"):
            await execution.result()
        assert not one.scheduler.running and not one.scheduler.queue

    run(main())


def test_what_may_come_from_a_peers_death_waits_until_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(runtime, "WORLD_ERROR_DELAY_S", 0.01)
        one = Runtime(cluster(0, 1, 0), "c", 1)
        link = attach(one, "inference-0")
        execution = one.submit(program("inference-0"), {}, owner="o")
        event = pb.NodeEvent(execution_id=execution.execution_id, node_id="inference-0", state=pb.NodeEvent.FAILED)
        event.error.kind, event.error.message = TransferError.__name__, "connection reset"
        one._node_event(link, event)
        assert one.scheduler.running
        assert (await execution.node("inference-0"))["inference-0"]["error"] == "connection reset"

    run(main())


def test_a_worker_that_leaves_because_of_a_failure_is_known_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(runtime, "WORLD_ERROR_DELAY_S", 60.0)
        one = Runtime(cluster(0, 1, 0), "c", 1)
        link = attach(one, "inference-0")
        execution = one.submit(program("inference-0"), {}, owner="o")
        event = pb.NodeEvent(execution_id=execution.execution_id, node_id="inference-0", state=pb.NodeEvent.FAILED)
        event.error.kind, event.error.message = TransferError.__name__, "out of memory"
        one._node_event(link, event)
        one._lose(link, "its stream ended")
        assert (await execution.node("inference-0"))["inference-0"]["error"] == "out of memory"

    run(main())


def test_readiness_and_fencing_are_of_a_process_not_of_a_name() -> None:
    async def main() -> None:
        one = Runtime(cluster(0, 1, 0), "c", 1)
        link = attach(one, "inference-0")
        one.pool_ready("inference", "inference-0", "inference-0/0")
        one.fence("inference-0", "inference-0/0", "it did not verify")
        assert one.ready_members("inference") == () and not link.told_to_leave
        one.pool_ready("inference", "inference-0", "inference-0/1")
        assert one.ready_members("inference") == ("inference-0",)
        one.fence("inference-0", "inference-0/1", "it did not verify")
        assert kinds(link) == ["shutdown"] and not one.stays("inference-0", "inference-0/1")

    run(main())
