"""The coordination sidecar of one JAX world: hosts JAX's coordination service in a process of its own.

Owns a port and the service on it. Must not know jax (jaxlib alone), the cluster or the controller. Started by
the launcher for each world of several processes, so that no worker's death takes the service down; it ends
with SIGTERM. The service is plaintext and unauthenticated: it listens on loopback, or where `--listen` says
on a trusted network.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from waypath.workers import jax_compat


def reserve(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen. While it is open the system gives its port to nobody who asks for
    a free one; the service can listen on it, because both set SO_REUSEPORT. OSError if the port is taken."""
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if port:  # a port of the user's choice: it must be free, so bind without sharing first
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind((host, port))
    return held


def publish_port(path: Path, port: int) -> None:
    """Write the port as decimal text, all at once: a reader sees the whole number or no file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(f"{port}\n")
    draft.replace(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code."""
    parser = argparse.ArgumentParser(prog="waypath coordinator", description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, required=True, help="how many processes the world has")
    parser.add_argument("--listen", default="127.0.0.1:0", help="host:port; port 0 for a free one")
    parser.add_argument("--port-file", type=Path, required=True, help="where to write the port")
    options = parser.parse_args(argv)
    if options.processes < 1:
        parser.error(f"--processes: expected at least 1, found {options.processes}")
    host, _, port = options.listen.rpartition(":")
    stop = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)  # before jaxlib starts threads, which inherit it
    try:
        held = reserve(host, int(port))
    except (OSError, ValueError) as error:
        print(f"cannot listen on {options.listen}: {error}", file=sys.stderr)
        return 2
    with held:
        address = f"{host}:{held.getsockname()[1]}"
        service = jax_compat.host_coordination_service(address, options.processes)
        publish_port(options.port_file, held.getsockname()[1])
        print(f"coordination service for {options.processes} processes on {address}", flush=True)
        signal.sigwait(stop)
        service.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
