"""Every use of JAX that is private, or that has to happen before jax is imported.

Owns: environment variables and config flags of a JAX process, joining a world whose coordination service
lives elsewhere, hosting that service. Must not know Waypath's protocol. Called by `world` (workers) and by
`tools/coordinator` (the sidecar, which needs jaxlib alone). This module imports neither jax nor jaxlib at its
top.

Checked against jax and jaxlib 0.10.2. What is private: `jax._src.distributed.global_state` (the public
`jax.distributed.initialize` starts the service inside process 0),
`jaxlib._jax.get_distributed_runtime_service` and `…_client`, `make_gloo_tcp_collectives` and
`jax._src.xla_bridge.register_backend_factory` (gloo listens on the address that the host's name resolves to,
unless it is told another), `jax._src.export._export._CUSTOM_CALL_TARGETS_GUARANTEED_STABLE`, `jax._src.compiler._cache_write` (jax writes the compilation cache from process 0 alone, while
on CPU every process looks under a key of its own: the fingerprint of its topology).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

__all__ = [
    "World",
    "host_coordination_service",
    "join_world",
    "leave_world",
    "set_environment",
    "stable_custom_calls",
]

HEARTBEAT_TIMEOUT_S = 10  # a dead member is noticed after 7 to 15 s; the control stream breaks sooner
JOIN_TIMEOUT_S = 120
SHUTDOWN_TIMEOUT_S = 5
LOOPBACK = "127.0.0.1"


def set_environment(threads: int, *, platform: str = "", local_devices: int = 1, cache_dir: str = "") -> None:
    """Set thread counts, CPU devices and the compilation cache of this process, by environment variables.

    `platform` "" lets jax choose. NPROC is what XLA:CPU and Eigen size their pools by; weight gradients
    depend on it, so it is always set. RuntimeError where jax is loaded already: it would be too late.
    """
    if "jax" in sys.modules:
        raise RuntimeError("jax was imported before its environment was set")
    for name in ("NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(threads)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ["JAX_NUM_CPU_DEVICES"] = str(local_devices)
    if platform:
        os.environ["JAX_PLATFORMS"] = platform
    if cache_dir:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = cache_dir
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def stable_custom_calls() -> frozenset[str]:
    """The custom call targets that jax promises to keep: the ones that an exported function may make."""
    from jax._src.export import _export

    return frozenset(_export._CUSTOM_CALL_TARGETS_GUARANTEED_STABLE)


@dataclass(frozen=True)
class World:
    """This process's place in a world of several processes."""

    coordinator: str  # host:port
    process_index: int
    process_count: int


def join_world(world: World) -> None:
    """Connect to the world's coordination service and wait for all members; before any use of a device.

    RuntimeError if they are not all there within JOIN_TIMEOUT_S. From then on jaxlib ends this process
    (abort, uncatchable) when another member stops sending heartbeats, or when the service is gone.
    """
    from jax._src import distributed, xla_bridge
    from jaxlib import _jax

    state = distributed.global_state
    if state.client is not None:
        raise RuntimeError("this process has joined a world already")
    client = _jax.get_distributed_runtime_client(
        world.coordinator,
        world.process_index,
        init_timeout=JOIN_TIMEOUT_S,
        shutdown_timeout=SHUTDOWN_TIMEOUT_S,
        heartbeat_timeout=HEARTBEAT_TIMEOUT_S,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    client.connect()
    state.client = client
    state.process_id = world.process_index
    state.num_processes = world.process_count
    state.coordinator_address = world.coordinator
    _write_cache_from_every_process()
    if world.coordinator.rpartition(":")[0] in (LOOPBACK, "localhost"):
        xla_bridge.register_backend_factory(
            "cpu", partial(_cpu_client_on_loopback, client), priority=0, fail_quietly=False
        )


def leave_world() -> None:
    """Tell the coordination service that this process leaves; waits for the others, SHUTDOWN_TIMEOUT_S at
    most.
    """
    from jax._src import distributed

    state = distributed.global_state
    if state.client is not None:
        try:
            state.client.shutdown()
        except RuntimeError as error:  # a member that is gone already
            print(f"leaving the world: {error}", file=sys.stderr)
        state.client = None


def host_coordination_service(address: str, processes: int) -> Any:
    """Start the coordination service of a world on `address` (host:port); keep what this returns alive.

    Imports jaxlib only. Its server sets SO_REUSEPORT, so a port in use by another one goes unnoticed: the
    caller reserves the port. `.shutdown()` of the returned object ends it.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    from jaxlib import _jax

    return _jax.get_distributed_runtime_service(
        address,
        processes,
        heartbeat_timeout=HEARTBEAT_TIMEOUT_S,
        cluster_register_timeout=JOIN_TIMEOUT_S,
        shutdown_timeout=SHUTDOWN_TIMEOUT_S,
        recoverable=False,
    )


def _write_cache_from_every_process() -> None:
    """Without it, every process but the first compiles everything anew at each start."""
    from jax._src import compilation_cache, compiler

    write_from_first = compiler._cache_write

    def write(
        cache_key: str,
        compile_time_secs: float,
        module_name: str,
        backend: Any,
        executable: Any,
        host_callbacks: Sequence[Any],
    ) -> None:
        if backend.platform != "cpu" or backend.process_index() == 0:
            write_from_first(cache_key, compile_time_secs, module_name, backend, executable, host_callbacks)
        elif not host_callbacks:
            compilation_cache.put_executable_and_time(
                cache_key, module_name, executable, backend, int(compile_time_secs)
            )

    compiler._cache_write = write


def _cpu_client_on_loopback(client: Any) -> Any:
    from jax._src import xla_bridge
    from jaxlib import _jax

    collectives = _jax.make_gloo_tcp_collectives(distributed_client=client, hostname=LOOPBACK)
    return xla_bridge.make_cpu_client(collectives)
