"""Device memory: what executions and the objects they leave behind have reserved, so that no more is promised than there is.

The devices of a slice all hold equally much of an object, and slices overlap in whole groups of devices. So the account is kept
by *cell*, the devices that are in the same slices: its cost does not grow with the number of devices. An execution reserves,
when it is admitted, what its objects will take; what it consumes is set off, and handed over to it when that happens. At its end
each object that outlives it keeps its share until it is freed.

The numbers come from the shapes alone (specs.py): temporaries inside a function are not in them. Where a device does not say
how much it has, nothing is reserved.

Must not know: queues, workers' messages. Kept by the scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping

from waypath.controller.allocation import DeviceId, Grant
from waypath.controller.graph import Program, Slice
from waypath.controller.specs import device_bytes

Shares = Mapping[str, int]
"""Slice → bytes on each of its devices."""


class Memory:
    """Who has reserved what. Keys are ids of objects or executions."""

    def __init__(self) -> None:
        self._cells: dict[str, tuple[int, ...]] = {}
        self._slices_of: list[frozenset[str]] = []
        self._capacity: list[int] = []
        self._used: list[int] = []
        self._shares: dict[str, dict[str, int]] = {}

    def lay_out(self, grants: Mapping[str, Grant]) -> None:
        """The slices have changed; shares on those that are gone are dropped. Walks all their devices."""
        slices_of: dict[DeviceId, list[str]] = {}
        for grant in grants.values():
            for device in grant.devices if grant.memory_bytes else ():
                slices_of.setdefault(device, []).append(grant.name)
        self._slices_of = list(dict.fromkeys(map(frozenset, slices_of.values())))
        self._capacity = [min(grants[name].memory_bytes for name in cell) for cell in self._slices_of]
        self._cells = {
            name: tuple(k for k, cell in enumerate(self._slices_of) if name in cell)
            for name in {name for cell in self._slices_of for name in cell}
        }
        self._used = [0] * len(self._slices_of)
        before, self._shares = self._shares, {}
        for key, shares in before.items():
            self.reserve(key, {name: share for name, share in shares.items() if name in grants})

    def short(self, needs: Shares) -> str:
        """Says what is lacking for `needs`; "" where they fit."""
        wanted: dict[int, int] = {}
        for name, share in needs.items():
            for cell in self._cells.get(name, ()):
                wanted[cell] = wanted.get(cell, 0) + share
        for cell, share in wanted.items():
            left = self._capacity[cell] - self._used[cell]
            if share > left:
                names = ", ".join(sorted(self._slices_of[cell]))
                return f"{share:,} bytes on each device of {names}, where {left:,} of {self._capacity[cell]:,} are left"
        return ""

    def reserve(self, key: str, needs: Shares) -> None:
        """Adds to what a key has, whether it fits or not: see `short`."""
        shares = {name: share for name, share in needs.items() if share}
        if not shares:
            return
        own = self._shares.setdefault(key, {})
        for name, share in shares.items():
            own[name] = own.get(name, 0) + share
            for cell in self._cells.get(name, ()):
                self._used[cell] += share

    def free(self, key: str) -> dict[str, int]:
        """Gives back all that a key has; returns it."""
        shares = self._shares.pop(key, {})
        for name, share in shares.items():
            for cell in self._cells.get(name, ()):
                self._used[cell] -= share
        return shares

    def share(self, key: str) -> Shares:
        """What a key has."""
        return self._shares.get(key, {})

    def cells(self) -> list[tuple[tuple[str, ...], int, int]]:
        """(slices, used, capacity) of each cell, in bytes a device."""
        return [
            (tuple(sorted(names)), used, capacity)
            for names, used, capacity in zip(self._slices_of, self._used, self._capacity, strict=True)
        ]


def footprint(program: Program, grants: Mapping[str, Grant]) -> dict[str, int]:
    """Returns slice → bytes on each device: all objects that nodes leave behind there, and the largest step's outputs besides."""
    left: dict[str, int] = {}
    work: dict[str, int] = {}
    for node in program.nodes:
        grant = grants.get(node.place.name) if isinstance(node.place, Slice) else None
        if grant is None or not grant.memory_bytes:
            continue
        name = grant.name
        for item in node.objects:
            left[name] = left.get(name, 0) + device_bytes(program.aval_of(item), grant)
        for step in node.steps:
            if step.node_id not in node.exports:
                inside = sum(device_bytes(aval, grant) for aval in step.gives)
                work[name] = max(work.get(name, 0), inside)
    return {name: left.get(name, 0) + work.get(name, 0) for name in {*left, *work}}
