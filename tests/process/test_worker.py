"""Real worker processes against a controller's socket, and a real JAX world with its coordination sidecar."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

from tests.fake_controller import FakeController, execute, install, node
from waypath.proto import channel as channels
from waypath.proto import worker_pb2 as pb
from waypath.proto.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server

DEADLINE_S = 90


class Controller(WorkerServicer):  # type: ignore[misc,unused-ignore]
    """Accepts workers, a `FakeController` for each, and tells them of each other."""

    def __init__(self) -> None:
        self.links: dict[str, FakeController] = {}
        self.functions: dict[str, bytes] = {}
        self.joined = asyncio.Condition()

    async def Attach(
        self, request_iterator: AsyncIterator[pb.WorkerMessage], context: Any
    ) -> AsyncIterator[pb.ControllerMessage]:
        link = FakeController()
        registering = asyncio.create_task(self._register(link))
        try:
            async for message in link.attach(request_iterator):
                yield message
        finally:
            registering.cancel()

    async def FetchFunction(self, request: pb.FetchFunctionRequest, context: Any) -> AsyncIterator[pb.FunctionChunk]:
        yield pb.FunctionChunk(data=self.functions[request.digest])

    async def _register(self, link: FakeController) -> None:
        await link.until(lambda: link.all("register"))
        self.links[registered(link).worker] = link
        everyone = [registered(other) for other in self.links.values()]
        for other in self.links.values():
            other.send(
                peers=pb.Peers(peers=[pb.Peer(worker=r.worker, data_addresses=r.data_addresses) for r in everyone])
            )
        async with self.joined:
            self.joined.notify_all()

    async def worker(self, name: str) -> FakeController:
        async with self.joined:
            await self.joined.wait_for(lambda: name in self.links)
        return self.links[name]


def registered(link: FakeController) -> pb.Register:
    found: pb.Register = link.all("register")[-1]
    return found


def start(link: FakeController, *nodes: pb.Node, **locations: list[str]) -> None:
    install(link, *nodes)
    link.send(execute=execute(*(n.node_id for n in nodes), attempt=0, gang=0, **locations))


async def result(link: FakeController, node_id: str) -> dict[str, Any]:
    event = await link.outcome(node_id)
    assert event.state == pb.NodeEvent.FINISHED, event.error
    found: dict[str, Any] = json.loads(event.result_json)
    return found


class Cluster:
    """A controller's socket in this process, and worker processes with a log each."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.token_file = directory / "token"
        self.token = channels.new_token(self.token_file)
        self.controller = Controller()
        self.server = channels.aio_server(self.token)
        self.address = ""
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *extra: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "waypath.workers.main", "--controller", self.address, "--name", name]
        command += ["--token-file", str(self.token_file), "--role", "probe", "--grace-s", "1", *extra]
        with self.log(name).open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self.processes.append(process)
        return process

    def log(self, name: str) -> Path:
        return self.directory / f"{name}.log"


@asynccontextmanager
async def cluster(directory: Path) -> AsyncIterator[Cluster]:
    made = Cluster(directory)
    add_WorkerServicer_to_server(made.controller, made.server)
    made.address = f"127.0.0.1:{channels.bind(made.server, '127.0.0.1:0')}"
    await made.server.start()
    try:
        yield made
    finally:
        for process in made.processes:
            process.kill()
            process.wait()
        await made.server.stop(0)


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, DEADLINE_S))


async def exit_code(process: subprocess.Popen[bytes]) -> int:
    return await asyncio.to_thread(process.wait, DEADLINE_S)


def listening(pid: int) -> list[str]:
    """host:port of the sockets on which a process accepts connections."""
    sockets = [c.laddr for c in psutil.Process(pid).net_connections() if c.status == psutil.CONN_LISTEN]
    return [f"{address.ip.removeprefix('::ffff:')}:{address.port}" for address in sockets]


def test_two_workers_exchange_objects_and_slices_and_leave(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path) as up:
            processes = [up.start(name) for name in ("a", "b")]
            a, b = [await up.controller.worker(name) for name in ("a", "b")]
            assert registered(a).pid == processes[0].pid and [service.name for service in registered(a).services] == [
                "probe"
            ]
            assert not {"jax", "jaxlib"} & {
                Path(m.path).parent.name for m in psutil.Process(registered(a).pid).memory_maps()
            }

            start(b, node("sum", "total", "x"), x=["a"])  # before anybody makes x
            start(a, node("x", "echo", n=5))
            assert await result(b, "sum") == {"total": 10}

            start(a, node("shown", "expose", name="w/1", rows=512, columns=700))
            await result(a, "shown")
            boxes = [([0, 0], [300, 700]), ([300, 0], [512, 699])]
            copies = [{"tensor": "w", "source": "a", "lower": lower, "upper": upper} for lower, upper in boxes]
            start(b, node("pulled", "pull", name="w/1", copies=copies))
            pulled = await result(b, "pulled")
            assert pulled["bytes"] == 4 * (300 * 700 + 212 * 699) and pulled["total"] > 0
            start(a, node("hidden", "unexpose", name="w/1"))
            await result(a, "hidden")

            a.send(shutdown=pb.Shutdown(reason="done", grace_s=1))
            assert await exit_code(processes[0]) == 0
            processes[1].send_signal(signal.SIGTERM)
            assert await exit_code(processes[1]) == 0
            assert "got SIGTERM" in up.log("b").read_text()

    run(main())


def test_a_hang_on_the_jax_thread_ends_the_process(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path) as up:
            process = up.start("a")
            a = await up.controller.worker("a")
            start(a, node("stuck", "hang", deadline_s=0.5))
            event = await a.outcome("stuck")
            assert event.error.kind == "DeadlineError" and "hanging" in event.error.message
            assert await exit_code(process) == 70
            log = up.log("a").read_text()
            assert "leaving:" in log and "in hang" in log  # the stack of the thread that hung

    run(main())


def test_a_worker_obeys_sigterm_and_abort_while_its_jax_thread_hangs(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path) as up:
            process = up.start("a")
            a = await up.controller.worker("a")
            start(a, node("stuck", "hang"))
            a.send(abort_world=pb.AbortWorld(reason="trainer-1 is lost"))
            assert await exit_code(process) == 70
            assert "trainer-1 is lost" in up.log("a").read_text()

    run(main())


def test_without_a_controller_or_with_a_wrong_token_it_leaves(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path) as up:
            wrong = tmp_path / "wrong"
            channels.new_token(wrong)
            refused = up.start("refused", "--token-file", str(wrong))
            assert await exit_code(refused) == 2
            assert "the cluster token is missing or wrong" in up.log("refused").read_text()
            orphan = up.start("orphan")
            await up.controller.worker("orphan")
            await up.server.stop(0)
            assert await exit_code(orphan) == 69
            assert "no controller for " in up.log("orphan").read_text()

    run(main())


MEMBER = """
import sys
from waypath.workers import world
info = world.start(1, platform="cpu", world=world.World(sys.argv[1], int(sys.argv[2]), 2))
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("x",))
mine = np.full((1, 1), 1.0 + jax.process_index(), np.float32)
whole = jax.make_array_from_process_local_data(NamedSharding(mesh, P("x")), mine)
total = jax.jit(lambda a: a.sum(), out_shardings=NamedSharding(mesh, P()))(whole)
print("sum", float(total), len(info.devices), flush=True)
sys.stdin.readline()
world.stop()
print("left", flush=True)
"""


class World:
    """Two members of a JAX world and its sidecar."""

    def __init__(self, directory: Path) -> None:
        port_file = directory / "port"
        command = [sys.executable, "-m", "waypath.tools.coordinator", "--processes", "2"]
        self.coordinator = piped([*command, "--port-file", str(port_file)])
        assert "2 processes on 127.0.0.1:" in said(self.coordinator)
        address = f"127.0.0.1:{port_file.read_text().strip()}"
        self.members = [piped([sys.executable, "-c", MEMBER, address, str(index)]) for index in range(2)]

    def close(self) -> None:
        for process in [*self.members, self.coordinator]:
            process.kill()
            process.communicate()


def piped(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> str:
    """The next line that is not gloo's."""
    assert process.stdout is not None
    line = "[Gloo]"
    while line.startswith("[Gloo]"):
        line = process.stdout.readline()
    return line


def test_a_world_meets_at_its_sidecar_listens_on_loopback_and_leaves(tmp_path: Path) -> None:
    world = World(tmp_path)
    try:
        assert [said(member) for member in world.members] == ["sum 3.0 1\n"] * 2
        everyone = [*world.members, world.coordinator]
        hosts = {address.rpartition(":")[0] for process in everyone for address in listening(process.pid)}
        assert hosts == {"127.0.0.1"}  # gloo too
        for member in world.members:
            assert member.stdin is not None
            member.stdin.write("\n")
            member.stdin.flush()
        for member in world.members:
            assert said(member) == "left\n" and member.wait(30) == 0
        world.coordinator.terminate()
        assert world.coordinator.wait(30) == 0
    finally:
        world.close()


@pytest.mark.slow
def test_a_member_that_dies_takes_the_idle_ones_with_it(tmp_path: Path) -> None:
    world = World(tmp_path)
    try:
        assert [said(member) for member in world.members] == ["sum 3.0 1\n"] * 2
        world.members[0].kill()
        assert world.members[1].wait(60) != 0
        assert world.coordinator.poll() is None
    finally:
        world.close()


def test_the_coordinator_refuses_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [sys.executable, "-m", "waypath.tools.coordinator", "--processes", "2", "--listen", listen]
        done = subprocess.run(
            [*command, "--port-file", str(tmp_path / "p")], capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 2 and "cannot listen" in done.stderr and not os.listdir(tmp_path)


def test_a_world_needs_its_coordinator(tmp_path: Path) -> None:
    token = tmp_path / "token"
    channels.new_token(token)
    command = [sys.executable, "-m", "waypath.workers.main", "--controller", "127.0.0.1:1", "--name", "t"]
    command += ["--token-file", str(token), "--role", "trainer", "--process-count", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "--coordinator" in done.stderr


def test_grpc_is_the_only_listener_of_a_worker(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path) as up:
            up.start("a")
            a = await up.controller.worker("a")
            addresses = listening(registered(a).pid)
            assert addresses == list(registered(a).data_addresses)
            async with channels.aio_channel(addresses[0]) as channel:
                stream = channel.unary_stream("/waypath.v1.Data/Pull", None, None)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    async for _ in stream(b""):
                        raise AssertionError("answered without a token")
                assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED

    run(main())
