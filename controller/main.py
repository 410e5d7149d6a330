"""The controller process: binds its address, serves workers and clients, ends cleanly on SIGTERM.

Started by the launcher or a deployment. Nothing that it loads imports jax.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
from pathlib import Path

from waypath.controller.client_service import ClientService
from waypath.controller.journal import Journal, read_journal
from waypath.controller.resources import Resources
from waypath.controller.runs.manager import RunManager
from waypath.controller.runtime import DEFAULT_HEARTBEAT_TIMEOUT_S, Runtime
from waypath.proto import channel
from waypath.proto.client_pb2_grpc import add_ClientServicer_to_server
from waypath.proto.errors import ConfigError, WaypathError
from waypath.proto.worker_pb2_grpc import add_WorkerServicer_to_server

STOP_GRACE_S = 2.0


def cluster(trainers: int, inference: int, rewards: int) -> Resources:
    """Returns the slices of a cluster: `trainer` spans all trainer processes, every other worker is a slice of its own."""
    pools = {
        "inference": [f"inference-{i}" for i in range(inference)],
        "reward": [f"reward-{i}" for i in range(rewards)],
    }
    slices = {name: [name] for members in pools.values() for name in members}
    if trainers:
        slices["trainer"] = [f"trainer-{i}" for i in range(trainers)]
    return Resources(slices, pools)


def next_epoch(path: Path) -> int:
    """Returns an epoch above all that this run folder has seen, and journals it before anyone hears of it."""
    seen = [int(entry["epoch"]) for entry in read_journal(path)] if path.exists() else []
    epoch = max(seen, default=0) + 1
    journal = Journal(path)
    journal.append({"type": "epoch", "epoch": epoch})
    journal.close()
    return epoch


async def serve(args: argparse.Namespace) -> None:
    """Serves until SIGTERM or SIGINT."""
    token = channel.read_token(args.token_file)
    args.run_dir.mkdir(parents=True, exist_ok=True)
    server = channel.aio_server(token)
    port = channel.bind(server, args.listen)
    epoch = next_epoch(args.run_dir / "controller.journal")
    resources = cluster(args.trainers, args.inference, args.rewards)
    runtime = Runtime(resources, f"cluster-{secrets.token_hex(4)}", epoch, args.heartbeat_timeout_s)
    manager = RunManager(runtime, args.run_dir.absolute())
    add_WorkerServicer_to_server(runtime, server)
    add_ClientServicer_to_server(ClientService(runtime, manager), server)
    await server.start()
    if args.port_file is not None:
        part = args.port_file.with_suffix(".part")
        part.write_text(f"{port}\n")
        os.replace(part, args.port_file)
    logging.getLogger("waypath.controller").info("listening on port %d, epoch %d", port, epoch)
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[str] = loop.create_future()

    def told(name: str) -> None:
        if not stop.done():
            stop.set_result(name)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told, number.name)
    liveness = asyncio.create_task(runtime.watch_liveness())
    name = await stop
    liveness.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await liveness
    await manager.close(f"its controller was stopped ({name})")
    await runtime.close("the controller is stopping")
    await server.stop(STOP_GRACE_S)


def main() -> int:
    """Runs the controller; returns 2 where it cannot start."""
    parser = argparse.ArgumentParser(prog="waypath-controller", description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1:0", help="host:port; port 0 takes a free one")
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, default=Path("runs"))
    parser.add_argument("--port-file", type=Path, help="where to write the port once it listens")
    parser.add_argument("--trainers", type=int, default=2, help="processes of the trainer world")
    parser.add_argument("--inference", type=int, default=2, help="inference workers")
    parser.add_argument("--rewards", type=int, default=1, help="reward workers")
    parser.add_argument(
        "--heartbeat-timeout-s",
        type=float,
        default=DEFAULT_HEARTBEAT_TIMEOUT_S,
        metavar="S",
        help="a worker that is silent for so long is lost",
    )
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        asyncio.run(serve(args))
    except (ConfigError, WaypathError) as error:
        print(f"waypath-controller: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
