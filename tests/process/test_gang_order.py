"""What gang order is for: the same work in another order on the members of a world blocks for ever, or is refused.

Two slices over the same two processes, one device of each in both; a sequence of all-reduces on either. The controller of this test
sends what the real one never would.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fake_controller import FakeController
from tests.process.test_worker import Cluster, cluster, exit_code, piped, registered, said
from waypath.controller.allocation import Grant
from waypath.controller.client import tracing
from waypath.controller.client.transport import DataRoad
from waypath.controller.connection import mesh_message
from waypath.controller.graph import Leaf
from waypath.proto import channel as channels
from waypath.proto import worker_pb2 as pb
from waypath.workers.runtime import EXIT_STUCK

WORKERS = ("w0", "w1")
STEPS = 16
AVAL = (Leaf((2,), "float32", (("x",),)),)
_LEAF = pb.Leaf(shape=[2], dtype="float32", spec=[pb.Axes(names=["x"])])


def grant(device: int) -> Grant:
    """The slice of one device of each worker."""
    devices = tuple((worker, device) for worker in WORKERS)
    return Grant(f"slice-{device}", "me", ("x",), (2,), devices, WORKERS, (0, 1), "world", "cpu")


def nodes(device: int, digest: str, deadline_s: float) -> list[pb.Node]:
    """A put and a sequence of all-reduces that reads it, on a slice."""
    aval = pb.Aval(leaves=[_LEAF])
    name = f"slice-{device}"
    put = pb.Node(
        node_id=f"put-{device}",
        kind="method",
        service="function",
        method="put",
        gives=[aval],
        slice=name,
        deadline_s=30,
    )
    steps = []
    source = put.node_id
    for number in range(STEPS):
        steps.append(
            pb.Node(
                node_id=f"s{number}-{device}",
                kind="function",
                method=digest,
                inputs=[source],
                takes=[aval],
                gives=[aval],
            )
        )
        source = steps[-1].node_id
    sequence = pb.Node(
        node_id=f"seq-{device}",
        kind="sequence",
        method="sequence",
        inputs=[put.node_id],
        steps=steps,
        exports=[source],
        slice=name,
        deadline_s=deadline_s,
    )
    return [put, sequence]


async def started(made: Cluster, world: str, deadline_s: float) -> tuple[dict[str, FakeController], list[Any]]:
    """Two workers of a world with the program installed and its inputs pushed."""
    exported = tracing.export_function(
        lambda x: x + jnp.sum(x) * 0.5,
        [(AVAL, jax.tree.structure(0))],
        tracing.PartitionSpec("x"),
        ("x",),
        (2,),
        "cpu",
        "f",
    )

    made.controller.functions[exported.digest] = exported.data
    processes = []
    for index, name in enumerate(WORKERS):
        place = ["--world", "world", "--process-index", str(index), "--process-count", "2", "--coordinator", world]
        processes.append(made.start(name, *place, "--role", "compute", "--local-devices", "2", "--platform", "cpu"))
    links = {name: await made.controller.worker(name) for name in WORKERS}
    every = [node for device in (0, 1) for node in nodes(device, exported.digest, deadline_s)]
    for link in links.values():
        link.send(
            install=pb.Install(program_id="p", nodes=every, slices=[mesh_message(grant(device)) for device in (0, 1)])
        )
    return links, processes


def execution(order: tuple[int, ...], gang: int, execution_id: str) -> pb.Execute:
    """Puts in one order, sequences in another."""
    wanted = [*(f"put-{device}" for device in (0, 1)), *(f"seq-{device}" for device in order)]
    return pb.Execute(
        execution_id=execution_id,
        program_id="p",
        nodes=[pb.Assignment(node_id=node_id) for node_id in wanted],
        locations=[pb.Location(node_id=f"put-{device}", workers=WORKERS) for device in (0, 1)],
        gang_sequence=gang,
    )


async def push(made: Cluster, links: dict[str, FakeController], execution_id: str) -> None:
    """The inputs of both sequences."""
    addresses = {name: registered(link).data_addresses[0] for name, link in links.items()}
    road = DataRoad(channels.metadata(made.token))
    for device in (0, 1):
        value = [np.ones(2, np.float32)]
        await asyncio.to_thread(road.push, f"{execution_id}/put-{device}", value, AVAL, grant(device), addresses)
    road.close()


@contextmanager
def coordinator(directory: Path) -> Iterator[str]:
    """The coordination service of a world of two; yields its address."""
    port_file = directory / "port"
    process = piped(
        [sys.executable, "-m", "waypath.tools.coordinator", "--processes", "2", "--port-file", str(port_file)]
    )
    try:
        assert "2 processes on 127.0.0.1:" in said(process)
        yield f"127.0.0.1:{port_file.read_text().strip()}"
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_opposite_orders_block_for_ever_and_one_order_does_not(tmp_path: Path) -> None:
    async def main() -> None:
        with coordinator(tmp_path) as world:
            async with cluster(tmp_path) as made:
                links, processes = await started(made, world, deadline_s=20.0)
                for link in links.values():
                    link.send(execute=execution((0, 1), 0, "same"))
                await push(made, links, "same")
                for link in links.values():
                    for device in (0, 1):
                        event = await link.outcome(f"seq-{device}", execution_id="same")
                        assert event.state == pb.NodeEvent.FINISHED, event.error
                for turn, link in enumerate(links.values()):
                    link.send(execute=execution((0, 1) if turn == 0 else (1, 0), 0, "opposite"))
                await push(made, links, "opposite")
                codes = await asyncio.gather(*map(exit_code, processes))
                assert EXIT_STUCK in codes, [made.log(name).read_text()[-2000:] for name in WORKERS]
                failed = [e for link in links.values() for e in link.all("node") if e.state == pb.NodeEvent.FAILED]
                assert any("DeadlineError" in event.error.kind for event in failed), failed
                done = [e for link in links.values() for e in link.all("node") if e.execution_id == "opposite"]
                assert not any(e.node_id.startswith("seq") and e.state == pb.NodeEvent.FINISHED for e in done)

    asyncio.run(asyncio.wait_for(main(), 170))


@pytest.mark.timeout(180)
def test_a_member_refuses_a_gang_sequence_that_goes_back(tmp_path: Path) -> None:
    async def main() -> None:
        with coordinator(tmp_path) as world:
            async with cluster(tmp_path) as made:
                links, _ = await started(made, world, deadline_s=60.0)
                for link in links.values():
                    link.send(execute=execution((0, 1), 7, "first"))
                await push(made, links, "first")
                links["w0"].send(execute=execution((0, 1), 6, "late"))
                event = await links["w0"].outcome("seq-0", execution_id="late")
                assert event.state == pb.NodeEvent.FAILED
                assert "gang sequence 6 came after 7" in event.error.message

    asyncio.run(asyncio.wait_for(main(), 170))
