"""What the cluster consists of: workers, worlds, slices and pools, and which of them are there now.

Slices (ordered workers of one world) and pools (slices that may be members) are named beforehand, from the cluster's
configuration; workers come and go. A slice is *up* when all of its workers are. A pool member is *ready* when it is up
and was declared ready (a rollout engine opened and holding a policy); losing one of its workers takes that back.

Must not know: programs, executions, sockets. Called by the scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from waypath.controller.allocation import Grant, Host, allocate
from waypath.controller.catalogue import Catalogue
from waypath.controller.commands import Device, SliceRequested, WorkerJoined
from waypath.controller.graph import Place, Pool, Slice
from waypath.proto.errors import ConfigError, NameTakenError, NotFoundError


@dataclass(frozen=True)
class LiveWorker:
    """A worker that is there. `world` is the set of processes that live and die with it."""

    name: str
    incarnation: str
    world: str
    process_index: int
    process_count: int
    devices: tuple[Device, ...] = ()
    platform: str = ""
    catalogue: Catalogue = field(default_factory=dict)


class Resources:
    """The cluster as the scheduler sees it.

    `slices`: name → its workers, in process order. `pools`: name → the slices that may be members, in order of
    preference. Raises ConfigError on an empty slice, a worker twice in one slice, or a pool of unknown slices. `grants`: the
    virtual slices among `slices`, which come and go with those who asked for them. `device_bytes` is how much of a device's memory
    objects may take; 0: as much as the device says it has.
    """

    def __init__(
        self, slices: Mapping[str, Sequence[str]], pools: Mapping[str, Sequence[str]], *, device_bytes: int = 0
    ) -> None:
        self.slices = {name: tuple(workers) for name, workers in slices.items()}
        self.pools = {name: tuple(members) for name, members in pools.items()}
        self.grants: dict[str, Grant] = {}
        self.live: dict[str, LiveWorker] = {}
        self._worlds: dict[str, dict[str, LiveWorker]] = {}
        self._ready: dict[str, set[str]] = {pool: set() for pool in pools}
        self._places: dict[str, frozenset[Place]] = {}
        self._device_bytes = device_bytes
        self._serial = 0
        for name, workers in self.slices.items():
            if not workers or len(set(workers)) < len(workers):
                raise ConfigError(f"slice {name!r}: expected one or more different workers, found {list(workers)}")
            for worker in workers:
                places: list[Place] = [Slice(name)]
                places += [Pool(pool) for pool, members in self.pools.items() if name in members]
                self._places[worker] = self._places.get(worker, frozenset()).union(places)
        for pool, members in self.pools.items():
            unknown = [member for member in members if member not in self.slices]
            if unknown:
                raise ConfigError(f"pool {pool!r}: no such slices: {unknown}; known: {sorted(self.slices)}")

    def join(self, event: WorkerJoined) -> bool:
        """Takes the worker in. Returns False where the same incarnation was here already (its stream came back).

        Raises NameTakenError where another live process has the name, ConfigError where no slice names the worker or
        its world does not fit: another size than its members said, an index out of range or taken, or a slice that
        would span two worlds. Nothing is changed then.
        """
        known = self.live.get(event.worker)
        if known is not None:
            if known.incarnation == event.incarnation:
                return False
            raise NameTakenError(
                f"worker {event.worker!r} is alive as incarnation {known.incarnation}, found {event.incarnation}",
                remedy="Give each worker its own name, or wait until the old one is declared lost.",
            )
        if event.worker not in self._places and not event.devices:
            raise ConfigError(
                f"worker {event.worker!r} belongs to no slice of this cluster and has no devices; expected one of "
                f"{sorted(self._places)}"
            )
        self._check_world(event)
        live = LiveWorker(
            event.worker,
            event.incarnation,
            event.world or event.worker,
            event.process_index,
            event.process_count,
            event.devices,
            event.platform,
            event.catalogue,
        )
        self.live[event.worker] = live
        self._worlds.setdefault(live.world, {})[event.worker] = live
        return True

    def lose(self, worker: str) -> None:
        """Forgets a live worker; pools lose the members that it was part of."""
        live = self.live.pop(worker)
        del self._worlds[live.world][worker]
        for pool, ready in self._ready.items():
            self._ready[pool] = {member for member in ready if worker not in self.slices[member]}

    def request(self, event: SliceRequested) -> Grant:
        """Gives a virtual slice. Raises ConfigError where the name is taken or it cannot be placed; nothing is changed then."""
        if not event.name or event.name in self.slices:
            raise ConfigError(f"slice {event.name!r}: the name is taken or empty")
        hosts = [self._host(worker) for worker in self.live.values() if worker.devices]
        grant = allocate(event, hosts, self.grants)
        self._serial += 1
        grant = self.grants[event.name] = replace(grant, serial=self._serial)
        self.slices[event.name] = grant.workers
        for worker in grant.workers:
            self._places[worker] = self._places.get(worker, frozenset()) | {Slice(event.name)}
        return grant

    def check_owner(self, name: str, owner: str) -> None:
        """Raises NotFoundError where the owner has no virtual slice of that name."""
        if name not in self.grants or self.grants[name].owner != owner:
            raise NotFoundError(f"{owner} has no slice {name!r}")

    def release(self, name: str) -> None:
        """Takes a virtual slice back."""
        grant = self.grants.pop(name)
        del self.slices[name]
        for worker in grant.workers:
            left = self._places[worker] - {Slice(name)}
            if left:
                self._places[worker] = left
            else:
                del self._places[worker]

    def is_current(self, worker: str, incarnation: str) -> bool:
        """Says whether that very process is live."""
        live = self.live.get(worker)
        return live is not None and live.incarnation == incarnation

    def member_ready(self, pool: str, member: str) -> None:
        """Declares a pool member ready; raises ConfigError where it cannot be a member or has missing workers."""
        self._check_member(pool, member)
        missing = self.missing(member)
        if missing:
            raise ConfigError(f"pool {pool!r}: member {member!r} is not up, missing workers: {', '.join(missing)}")
        self._ready[pool].add(member)

    def member_removed(self, pool: str, member: str) -> None:
        """Takes a member out of the pool until it is declared ready again."""
        self._check_member(pool, member)
        self._ready[pool].discard(member)

    def ready_members(self, pool: str) -> tuple[str, ...]:
        """The pool's ready slices, in the order of the pool's definition."""
        ready = self._ready[pool]
        return tuple(member for member in self.pools[pool] if member in ready)

    def missing(self, slice_name: str) -> tuple[str, ...]:
        """The workers of a slice that are not live; empty when the slice is up."""
        return tuple(worker for worker in self.slices[slice_name] if worker not in self.live)

    def places_of(self, worker: str) -> frozenset[Place]:
        """Slices and pools that may give this worker a node."""
        return self._places.get(worker, frozenset())

    def world_of(self, worker: str) -> str:
        """The world of a live worker."""
        return self.live[worker].world

    def world_size(self, worker: str) -> int:
        """The number of processes in a live worker's world."""
        return self.live[worker].process_count

    def world_peers(self, worker: str) -> tuple[str, ...]:
        """The other live workers of a live worker's world."""
        return tuple(name for name in self._worlds[self.live[worker].world] if name != worker)

    def _host(self, worker: LiveWorker) -> Host:
        return Host(
            worker.name,
            worker.world,
            worker.process_index,
            worker.process_count,
            worker.platform,
            tuple(device.local_id for device in worker.devices),
            self._device_bytes or min(device.memory_bytes for device in worker.devices),
        )

    def _check_member(self, pool: str, member: str) -> None:
        if pool not in self.pools:
            raise NotFoundError(f"no pool {pool!r}; this cluster has {sorted(self.pools)}")
        if member not in self.pools[pool]:
            raise ConfigError(f"pool {pool!r}: slice {member!r} cannot be a member; expected {list(self.pools[pool])}")

    def _check_world(self, event: WorkerJoined) -> None:
        where = f"worker {event.worker}"
        world = event.world or event.worker
        if not 0 <= event.process_index < event.process_count:
            raise ConfigError(
                f"world {world!r}: process index {event.process_index} of {event.process_count} processes",
                where=where,
            )
        for peer in self._worlds.get(world, {}).values():
            if peer.process_count != event.process_count:
                raise ConfigError(
                    f"world {world!r}: expected {peer.process_count} processes as {peer.name} says, "
                    f"found {event.process_count}",
                    where=where,
                )
            if peer.process_index == event.process_index:
                raise ConfigError(
                    f"world {world!r}: process index {event.process_index} is taken by {peer.name}",
                    where=where,
                )
        for place in self._places.get(event.worker, ()):
            if not isinstance(place, Slice):
                continue
            name, workers = place.name, self.slices[place.name]
            grant = self.grants.get(name)
            if grant is not None:
                self._check_return(event, grant, where)
            if len(workers) > event.process_count:
                raise ConfigError(
                    f"slice {name!r} has {len(workers)} workers, world {world!r} only {event.process_count} processes",
                    where=where,
                )
            for peer_name in workers:
                live = self.live.get(peer_name)
                if live is not None and live.world != world:
                    raise ConfigError(
                        f"slice {name!r} must lie in one world: {peer_name} is in {live.world!r}, "
                        f"{event.worker} in {world!r}",
                        where=where,
                    )

    def _check_return(self, event: WorkerJoined, grant: Grant, where: str) -> None:
        """Raises ConfigError where a worker comes back to a virtual slice as another than it was."""
        found = (event.world or event.worker, event.process_index)
        expected = (grant.world, grant.indices[grant.workers.index(event.worker)])
        lacking = {local for name, local in grant.devices if name == event.worker} - {d.local_id for d in event.devices}
        if found != expected or lacking:
            raise ConfigError(
                f"slice {grant.name!r} of {grant.owner} expects it as process {expected[1]} of world {expected[0]!r}, found "
                f"process {found[1]} of {found[0]!r}, without the devices {sorted(lacking)}",
                where=where,
            )
