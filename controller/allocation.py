"""Virtual slices: which devices of which workers make up a mesh that somebody asked for.

A slice lies in one world. It takes the devices of whole processes, in process order, or some devices of one process; so every
process of a slice has equally many of its devices, in a block. Shared slices may overlap, an exclusive one has its devices to
itself. Among the places that fit, `pack` takes the one whose devices are used most already, `spread` the one used least;
the rest of the order is fixed, so that the same requests give the same slices.

Must not know: executions, objects, messages. Called by resources.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from waypath.proto.errors import ConfigError, NotFoundError

if TYPE_CHECKING:
    from waypath.controller.commands import SliceRequested

STRATEGIES = ("pack", "spread")
MAX_DEVICES = 1 << 20

DeviceId = tuple[str, int]
"""A worker and the index of one of its devices."""


@dataclass(frozen=True)
class Grant:
    """A virtual slice: `devices` in mesh order (row-major over `axes` × `sizes`), `workers` in process order, and the index of
    each of them in its world. `memory_bytes`: what every device has, 0 where that is not known. `serial` tells it from others that
    had the name before.
    """

    name: str
    owner: str
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    devices: tuple[DeviceId, ...]
    workers: tuple[str, ...]
    indices: tuple[int, ...]
    world: str
    platform: str
    exclusive: bool = False
    memory_bytes: int = 0
    serial: int = 0


@dataclass(frozen=True)
class Host:
    """A live worker with devices, as the allocation sees it."""

    worker: str
    world: str
    process_index: int
    process_count: int
    platform: str
    devices: tuple[int, ...]
    memory_bytes: int = 0


def allocate(request: SliceRequested, hosts: Iterable[Host], grants: Mapping[str, Grant]) -> Grant:
    """Returns the slice for a request. Raises ConfigError where it cannot be placed, saying what is free and who holds the
    rest; NotFoundError where `like` names no slice.
    """
    where = f"slice {request.name}"
    _check(request, where)
    wanted = math.prod(request.sizes)
    if request.like:
        return _like(request, grants, wanted, where)
    alive = sorted(hosts, key=lambda host: (host.world, host.process_index))
    usable = [h for h in alive if request.platform in ("", h.platform) and request.world in ("", h.world) and h.devices]
    used, closed = _use(grants.values())
    places = list(_places(usable, wanted))
    free = [p for p in places if not any(device in closed or (request.exclusive and device in used) for device in p)]
    if not free:
        raise ConfigError(_why_not(request, wanted, usable, used, closed, grants), where=where)
    sign = -1 if request.strategy == "pack" else 1
    best = min(enumerate(free), key=lambda item: (sign * sum(used.get(device, 0) for device in item[1]), item[0]))[1]
    by_name = {host.worker: host for host in usable}
    return _grant(request, best, [by_name[worker] for worker in dict.fromkeys(worker for worker, _ in best)])


def _check(request: SliceRequested, where: str) -> None:
    if len(request.axes) != len(request.sizes) or len(set(request.axes)) < len(request.axes) or not request.axes:
        raise ConfigError(
            f"expected different axes with a size each, found {request.axes} {request.sizes}", where=where
        )
    if any(size < 1 for size in request.sizes) or math.prod(request.sizes) > MAX_DEVICES:
        raise ConfigError(
            f"expected sizes from 1 to {MAX_DEVICES:,} devices in all, found {request.sizes}", where=where
        )
    if request.strategy not in STRATEGIES:
        raise ConfigError(f"strategy: expected one of {STRATEGIES}, found {request.strategy!r}", where=where)


def _like(request: SliceRequested, grants: Mapping[str, Grant], wanted: int, where: str) -> Grant:
    model = grants.get(request.like)
    if model is None:
        raise NotFoundError(f"no slice {request.like!r}; there are: {', '.join(sorted(grants)) or 'none'}", where=where)
    if wanted != len(model.devices):
        raise ConfigError(f"{wanted} devices, {request.like} has {len(model.devices)}", where=where)
    if request.exclusive or model.exclusive:
        raise ConfigError(f"an exclusive slice shares no devices with {request.like}", where=where)
    return replace(model, name=request.name, owner=request.owner, axes=request.axes, sizes=request.sizes)


def _use(grants: Iterable[Grant]) -> tuple[dict[DeviceId, int], set[DeviceId]]:
    """How many slices each device is in, and the devices that are in an exclusive one."""
    used: dict[DeviceId, int] = {}
    closed: set[DeviceId] = set()
    for grant in grants:
        for device in grant.devices:
            used[device] = used.get(device, 0) + 1
        if grant.exclusive:
            closed.update(grant.devices)
    return used, closed


def _places(hosts: Sequence[Host], wanted: int) -> Iterable[tuple[DeviceId, ...]]:
    """Blocks of `wanted` devices: within one process, else of whole neighbouring processes of one complete world."""
    for host in hosts:
        for start in range(0, len(host.devices) - wanted + 1, wanted):
            yield tuple((host.worker, device) for device in host.devices[start : start + wanted])
    worlds: dict[str, list[Host]] = {}
    for host in hosts:
        worlds.setdefault(host.world, []).append(host)
    for members in worlds.values():
        each = len(members[0].devices)
        count = wanted // each
        if wanted % each or count < 2 or any(len(host.devices) != each for host in members):
            continue
        for start in range(0, len(members) - count + 1, count):
            block = members[start : start + count]
            if block[-1].process_index - block[0].process_index == count - 1:
                yield tuple((host.worker, device) for host in block for device in host.devices)


def _grant(request: SliceRequested, devices: tuple[DeviceId, ...], hosts: Sequence[Host]) -> Grant:
    return Grant(
        request.name,
        request.owner,
        request.axes,
        request.sizes,
        devices,
        tuple(host.worker for host in hosts),
        tuple(host.process_index for host in hosts),
        hosts[0].world,
        hosts[0].platform,
        request.exclusive,
        min(host.memory_bytes for host in hosts),
    )


def _why_not(
    request: SliceRequested,
    wanted: int,
    hosts: Sequence[Host],
    used: Mapping[DeviceId, int],
    closed: Collection[DeviceId],
    grants: Mapping[str, Grant],
) -> str:
    every = [(host.worker, device) for host in hosts for device in host.devices]
    free = [device for device in every if device not in (used if request.exclusive else closed)]
    by_world: dict[str, int] = {}
    for host in hosts:
        by_world[host.world] = by_world.get(host.world, 0) + len(host.devices)
    worlds = ", ".join(f"{world}: {count}" for world, count in by_world.items()) or "none"
    holders = [g for g in grants.values() if g.exclusive or request.exclusive]
    held = ", ".join(f"{g.name} of {g.owner} holds {len(g.devices)}" for g in holders) or "nobody holds the rest"
    kind = f" {request.platform}" if request.platform else ""
    return (
        f"{wanted}{kind} devices in one world, whole processes or part of one, cannot be had: {len(free)} of {len(every)} are "
        f"free; devices by world: {worlds}; {held}"
    )
