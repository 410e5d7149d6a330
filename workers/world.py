"""What this process is to the cluster: its host, its devices, its place in a JAX world.

Owns starting jax in a worker and the device list of the Register message. Must not know the control stream or
services. Called by `main`, on the main thread, before anything else touches jax. `start` is the first import
of jax.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Sequence
from pathlib import Path

from waypath.proto import common_pb2
from waypath.workers import jax_compat
from waypath.workers.jax_compat import World

__all__ = ["JaxInfo", "World", "boot_id", "host_id", "start", "stop"]

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class JaxInfo:
    """jax's version, its platform, and this process's devices."""

    def __init__(self, version: str, platform: str, devices: Sequence[common_pb2.Device]) -> None:
        self.version = version
        self.platform = platform
        self.devices = tuple(devices)


def start(
    threads: int, *, platform: str = "", local_devices: int = 1, cache_dir: str = "", world: World | None = None
) -> JaxInfo:
    """Load jax, join the world (None, or one of one process: none) and touch the devices.

    Raises RuntimeError where the world's other members do not come, or its size is not what was said.
    """
    jax_compat.set_environment(threads, platform=platform, local_devices=local_devices, cache_dir=cache_dir)
    if world is not None and world.process_count > 1:
        jax_compat.join_world(world)
    import jax

    local = jax.local_devices()
    if world is not None and jax.process_count() != world.process_count:
        raise RuntimeError(f"the world has {jax.process_count()} processes, expected {world.process_count}")
    devices = []
    for index, device in enumerate(local):
        memory = device.memory_stats() or {}
        devices.append(
            common_pb2.Device(
                id=device.id,
                kind=device.device_kind,
                coords=getattr(device, "coords", None) or (),
                slice_index=getattr(device, "slice_index", None) or 0,
                local_id=index,
                memory_bytes=memory.get("bytes_limit", 0),
            )
        )
    return JaxInfo(jax.__version__, local[0].platform, devices)


def stop() -> None:
    """Leave the world, if this process is in one."""
    jax_compat.leave_world()


def host_id() -> str:
    """Names this machine: equal for two processes exactly if they run on one host."""
    return f"{socket.gethostname()}-{uuid.getnode():012x}"


def boot_id() -> str:
    """Names the kernel's run; with `host_id` it tells whether two processes can share memory. "" if
    unknown.
    """
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""
