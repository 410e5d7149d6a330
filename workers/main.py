"""The worker process: `python -m waypath.workers.main --controller HOST:PORT --token-file F --name N --role R
…`.

Owns: command line, threads, signals, exit code. Must not know programs or messages. Started by the launcher
or by hand; one process per worker.

Two threads. The main thread owns JAX: it loads it, joins the world, imports the role's services and then runs
the queue of `lanes.JaxThread`. The network thread runs the asyncio loop: control stream, data server, data
clients. So a long computation never delays a heartbeat, and a hang inside XLA can still be reported and
ended. A reward worker loads no jax; its main thread only waits.

Exit codes: 0 told to leave; 1 a fault of this program; 2 refused, or it cannot start with these arguments
(starting it again does not help); 69 no controller; 70 the JAX thread hangs or the world is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from waypath.proto import channel as channels
from waypath.proto import version
from waypath.proto import worker_pb2 as pb
from waypath.proto.errors import ConfigError, TransferError, WaypathError
from waypath.workers import runtime as rt
from waypath.workers import world
from waypath.workers.control import GrpcTransport
from waypath.workers.data_server import DataServer
from waypath.workers.executions import Executions
from waypath.workers.exposed import ExposedTensor
from waypath.workers.functions.registered import find_function
from waypath.workers.functions.registered import names as function_names
from waypath.workers.imports import import_module
from waypath.workers.inputs import Inputs
from waypath.workers.lanes import JaxThread, Lanes, NoJaxThread
from waypath.workers.mailbox import Mailbox
from waypath.workers.peers import Peers
from waypath.workers.puller import ObjectPuller
from waypath.workers.runtime import Runtime
from waypath.workers.segments import SegmentPool
from waypath.workers.service import ServiceContext, describe, describe_method, find_service, known_services
from waypath.workers.store import ObjectStore
from waypath.workers.transfer import Transfer

ROLE_SERVICES = {
    "trainer": ("trainer",),
    "inference": ("rollout",),
    "reward": ("reward",),
    "probe": ("probe",),
    "compute": ("function",),
}
WITHOUT_JAX = frozenset({"reward", "probe"})
EXIT_FAULT = 1
LEAVE_S = 10.0  # how long the JAX thread may go on with what it does when the process is told to leave

log = logging.getLogger("waypath.worker")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="waypath worker", description=__doc__.splitlines()[0])
    p.add_argument("--controller", required=True, metavar="HOST:PORT")
    p.add_argument("--token-file", required=True, type=Path, metavar="FILE")
    p.add_argument("--name", required=True, help="unique in the cluster")
    p.add_argument("--role", required=True, choices=sorted(ROLE_SERVICES))
    p.add_argument("--world", default="", help="name of the JAX world")
    p.add_argument("--process-index", type=int, default=0)
    p.add_argument("--process-count", type=int, default=1)
    p.add_argument("--coordinator", default="", metavar="HOST:PORT", help="coordination service of the world")
    p.add_argument("--threads", type=int, default=1, help="XLA and BLAS threads; results depend on it")
    p.add_argument("--local-devices", type=int, default=1, help="CPU devices of this process")
    p.add_argument("--platform", default="", help="JAX platform, e.g. cpu; by default jax chooses")
    p.add_argument("--allow-import", action="extend", nargs="+", default=[], metavar="PREFIX")
    p.add_argument("--services", action="extend", nargs="+", default=[], metavar="MODULE", help="modules of services")
    p.add_argument("--cache-dir", default="", help="JAX's persistent compilation cache")
    p.add_argument("--data-listen", default="127.0.0.1:0", metavar="HOST:PORT")
    p.add_argument(
        "--transfer-path", choices=["auto", "shared", "stream"], default="auto", help="how peers here send weights"
    )
    p.add_argument("--shm-dir", type=Path, default=Path("/dev/shm"), metavar="FOLDER", help="shared memory for weights")
    p.add_argument("--grace-s", type=float, default=5.0, help="seconds without a controller before it leaves")
    p.add_argument("--log-level", default="INFO")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run one worker; returns the exit code. Ends threads that hang with `os._exit`."""
    options = parser().parse_args(argv)
    logging.basicConfig(
        level=logging.WARNING,  # of the libraries, some of which log every file they write
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname).1s {options.name} %(message)s",
    )
    logging.getLogger("waypath").setLevel(options.log_level.upper())
    faulthandler.enable()  # jaxlib aborts the process when its world breaks: say where it was
    try:
        token = channels.read_token(options.token_file)
        info = _start_jax(options)
        services = _load_services(options)
    except (WaypathError, RuntimeError, ImportError) as error:
        log.error("cannot start: %s", error, exc_info=not isinstance(error, WaypathError))
        # A world whose members did not meet may do so next time; all the rest stays wrong.
        return rt.EXIT_STUCK if isinstance(error, RuntimeError) else rt.EXIT_REFUSED
    jax_thread = NoJaxThread() if options.role == "reward" else JaxThread()
    network = _Network(options, token, info, services, jax_thread, _SignalSocket())
    network.start()
    jax_thread.run()
    network.main_is_free.set()
    network.join()
    if info is not None and network.code == rt.EXIT_OK:
        world.stop()
    return network.code


def _load_services(options: argparse.Namespace) -> list[pb.Service]:
    """Imports the role's services and what the user adds; returns what is there, for the controller."""
    for name in ROLE_SERVICES[options.role]:
        find_service(name)
    for module in options.services:
        import_module(module, options.allow_import, f"--services {module}")
    found = describe(sorted({*ROLE_SERVICES[options.role], *known_services()}))
    if options.role == "compute":
        methods = [describe_method(name, find_function(name)) for name in function_names()]
        found.append(pb.Service(name="", methods=methods))
    return found


def _start_jax(options: argparse.Namespace) -> world.JaxInfo | None:
    if options.role in WITHOUT_JAX:
        return None
    place = None
    if options.process_count > 1:
        if not options.coordinator:
            raise ConfigError("a world of several processes needs --coordinator")
        place = world.World(options.coordinator, options.process_index, options.process_count)
    info = world.start(
        options.threads,
        platform=options.platform,
        local_devices=options.local_devices,
        cache_dir=options.cache_dir,
        world=place,
    )
    log.info("jax %s on %s, %d local devices", info.version, info.platform, len(info.devices))
    return info


class _SignalSocket:
    """SIGTERM and SIGINT as bytes on a socket, written by the C handler even while the main thread is inside
    XLA.
    """

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)


class _Network(threading.Thread):
    """The network thread. `code` is the process's exit code once it has ended."""

    def __init__(
        self,
        options: argparse.Namespace,
        token: str,
        info: world.JaxInfo | None,
        services: Sequence[pb.Service],
        jax_thread: JaxThread,
        signals: _SignalSocket,
    ) -> None:
        super().__init__(name="network", daemon=True)
        self._options = options
        self._token = token
        self._info = info
        self._services = services
        self._jax_thread = jax_thread
        self._signals = signals
        self.code = EXIT_FAULT
        self.main_is_free = threading.Event()

    def run(self) -> None:
        try:
            self.code = asyncio.run(self._serve())
        except WaypathError as error:
            log.error("cannot start: %s", error)
            self.code = rt.EXIT_REFUSED
        except BaseException:
            log.exception("the network thread failed")
        self._jax_thread.stop()
        wait_s = 0.0 if self.code == rt.EXIT_STUCK else LEAVE_S
        if not self.main_is_free.wait(wait_s):
            log.error("the main thread is busy for %.0f s already; ending the process", self._jax_thread.busy_s)
            faulthandler.dump_traceback(all_threads=True)
            exit_now(self.code or rt.EXIT_STUCK)

    async def _serve(self) -> int:
        options = self._options
        loop = asyncio.get_running_loop()
        store, mailbox = ObjectStore(), Mailbox()
        server = DataServer(store, self._token, mailbox, self._expose)
        peers = Peers(server.slices.mappings.forget)
        pool = None
        if options.transfer_path != "stream":
            pool = SegmentPool(options.shm_dir, required=options.transfer_path == "shared")
        address = await server.start(options.data_listen)
        puller = ObjectPuller(options.name, self._token, peers)
        transfer = Transfer(options.name, self._token, peers, store, world.host_id(), pool)
        transport = GrpcTransport(options.controller, self._token)
        context = ServiceContext(
            worker=options.name,
            role=options.role,
            process_index=options.process_index,
            process_count=options.process_count,
            allow_import=tuple(options.allow_import),
            loop=loop,
            submit_jax=self._jax_thread.submit,
            store=store,
            transfer=transfer,
            world=options.world,
            threads=options.threads,
            mailbox=mailbox,
            jax_has_more=lambda: self._jax_thread.has_more,
            fetch_function=transport.fetch_function,
            memory=pool,
        )
        process = psutil.Process()

        def status(beat: pb.Heartbeat) -> None:
            beat.rss_bytes = process.memory_info().rss
            beat.store_bytes = store.nbytes
            beat.egress_bytes = server.egress_bytes

        runtime = Runtime(self._register(address), transport, peers, status, grace_s=options.grace_s)
        lanes = Lanes(self._jax_thread)
        executions = Executions(
            context,
            lanes,
            lambda execution_id: Inputs(execution_id, options.name, store, puller),
            runtime.emit,
            lambda reason: runtime.leave(rt.EXIT_STUCK, reason),
        )
        runtime.serve(executions)

        def on_signal() -> None:
            numbers = self._signals.reader.recv(16)
            names = ", ".join(signal.Signals(number).name for number in numbers)
            runtime.leave(rt.EXIT_OK, f"got {names}")

        loop.add_reader(self._signals.reader, on_signal)
        code = await runtime.run()
        if code != rt.EXIT_STUCK:
            await runtime.stop()
        await puller.close()
        await server.stop()
        transfer.close()
        lanes.close()
        return code

    async def _expose(self, held: Any) -> Mapping[str, ExposedTensor]:
        """The arrays of a device object, copied to host memory behind what is queued on the JAX thread."""
        from waypath.workers.functions.arrays import DeviceObject, exposed

        if not isinstance(held, DeviceObject):
            raise TransferError(f"expected arrays on devices, found {type(held).__name__}")
        return await asyncio.wrap_future(self._jax_thread.submit(lambda: exposed(held)))

    def _register(self, data_address: str) -> pb.Register:
        options = self._options
        info = self._info
        return pb.Register(
            worker=options.name,
            role=options.role,
            world=options.world,
            process_index=options.process_index,
            process_count=options.process_count,
            host_id=world.host_id(),
            boot_id=world.boot_id(),
            pid=os.getpid(),
            devices=() if info is None else info.devices,
            data_addresses=[data_address],
            services=self._services,
            transfer_paths=["host"] if options.transfer_path == "stream" else ["host", "shared"],
            staging="host",
            versions=version.versions() if info is None else version.versions(info.version, info.platform),
        )


def exit_now(code: int) -> None:
    """Flush what was logged and end the process without running any more Python or C++ destructors."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    # Threads inside XLA, gRPC or a hung reward function must not keep a worker that has decided to leave.
    exit_now(main())
