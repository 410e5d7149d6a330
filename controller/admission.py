"""Admission: what may be submitted at all, and which of the executions that wait goes next.

An execution goes when a worker of each of its places has credit, the objects it is bound to have workers, whoever reads what it
consumes has gone before it, and its device memory can be reserved. Owners take turns by weight; an execution that waits for
a worker holds back later ones that share it; one that waits for memory, later ones of its owner that need the same memory.

What can be said of a program as the cluster is now (its *plan*) is found once and kept until the cluster changes.

Must not know: messages, recovery. Called by the scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from waypath.controller.allocation import Grant
from waypath.controller.catalogue import Catalogue, check_named
from waypath.controller.credits import Credits
from waypath.controller.execution import Execution
from waypath.controller.fairness import FairQueue
from waypath.controller.graph import Place, Program
from waypath.controller.memory import Memory, footprint
from waypath.controller.nodes import STEP_KINDS
from waypath.controller.objects import ObjectDirectory
from waypath.controller.placement import blockers, candidates, reach
from waypath.controller.resources import Resources
from waypath.controller.specs import check_specs, device_bytes
from waypath.proto.errors import GraphError, LocalError

MAX_QUEUED = 4096
LOOK_AHEAD = 16
KEPT_CHECKED = 4096


@dataclass(frozen=True)
class Donor:
    """A node that consumes the parameters `params`. What it leaves takes `nbytes` on each device: the most that can be set off, for
    what other nodes leave may be there before it runs.
    """

    place: str
    params: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """`install_id` names the program on these very slices; `reach`: the workers that it could go to now. Of device memory,
    slice → bytes on each device: `needs` what it leaves behind. `donors`: its nodes that consume parameters.
    """

    install_id: str
    grants: tuple[Grant, ...]
    reach: frozenset[str]
    needs: Mapping[str, int]
    donors: tuple[Donor, ...]


class Admission:
    """The executions that wait. `running`: those that were admitted, for the bound on waiting for absent places."""

    def __init__(
        self,
        resources: Resources,
        credits: Credits,
        objects: ObjectDirectory,
        memory: Memory,
        running: Mapping[str, Execution],
    ) -> None:
        self.queue: dict[str, Execution] = {}
        self.turns = FairQueue()
        self._resources = resources
        self._credits = credits
        self._objects = objects
        self._memory = memory
        self._running = running
        self._plans: dict[str, Plan] = {}
        self._checked: dict[str, None] = {}

    def cluster_changed(self) -> None:
        """Workers, pools or slices are not what they were."""
        self._plans.clear()

    def plan(self, program: Program) -> Plan:
        """Raises GraphError where the program does not fit the cluster as it is: places, meshes, memory."""
        found = self._plans.get(program.program_id)
        if found is None:
            if len(self._plans) >= KEPT_CHECKED:
                del self._plans[next(iter(self._plans))]
            found = self._plans[program.program_id] = self._new_plan(program)
        return found

    def check(self, program: Program, owner: str) -> None:
        """Raises GraphError where an owner's program does not fit the cluster as it is, or uses another owner's slice."""
        for grant in self.plan(program).grants:
            if grant.owner != owner:
                raise GraphError(f"slice {grant.name!r} belongs to {grant.owner}", where=f"program {program.name}")

    def check_memory(self, program: Program, bindings: Mapping[str, str]) -> None:
        """Raises GraphError where an execution needs more than its slices' devices have, whoever else is there."""
        plan = self.plan(program)
        for grant in plan.grants:
            if not grant.memory_bytes:
                continue
            sizes = {
                name: device_bytes(param.aval, grant)
                for name, param in program.by_param.items()
                if param.place.name == grant.name
            }
            bound = {bindings[name]: size for name, size in sizes.items()}
            set_off = sum(
                min(donor.nbytes, sum(sizes[name] for name in donor.params))
                for donor in plan.donors
                if donor.place == grant.name
            )
            total = sum(bound.values()) + plan.needs.get(grant.name, 0) - set_off
            if total > grant.memory_bytes:
                raise GraphError(
                    f"needs {total:,} bytes on each device of slice {grant.name}, which has {grant.memory_bytes:,}",
                    where=f"program {program.name}",
                )

    def check_room(self, owner: str) -> None:
        """Raises LocalError where too much of an owner waits already."""
        waiting = self.turns.count(owner)
        if waiting >= MAX_QUEUED:
            raise LocalError(
                f"{waiting} executions wait already, all of {owner or 'one owner'}", remedy="Submit it again later"
            )

    def add(self, execution: Execution) -> None:
        """One more waits."""
        self.queue[execution.execution_id] = execution
        program = execution.program
        self.turns.add(execution.owner, execution.execution_id, program.size, program.program_id)

    def remove(self, execution: Execution) -> None:
        """It waits no longer; unknown ones are fine."""
        if self.queue.pop(execution.execution_id, None) is not None:
            self.turns.remove(execution.execution_id)

    def next(self) -> Execution | None:
        """Takes out the next execution that can go, with its memory reserved."""
        passed_over: set[str] = set()
        known: dict[str, tuple[bool, bool]] = {}
        for owner in self.turns.owners():
            short: set[str] = set()
            for execution_id in self.turns.heads(owner)[:LOOK_AHEAD]:
                execution = self.queue[execution_id]
                plan = self.plan(execution.program)
                if plan.reach and plan.reach <= passed_over:
                    continue
                if plan.install_id not in known:
                    full, absent = self.blockers(execution)
                    known[plan.install_id] = (bool(full), bool(absent))
                is_full, is_absent = known[plan.install_id]
                if is_absent or self._waits_for_objects(execution, plan):
                    continue
                if is_full or not passed_over.isdisjoint(plan.reach):
                    passed_over |= plan.reach
                    continue
                needs = self._needs(execution, plan)
                if not short.isdisjoint(needs) or self._memory.short(needs):
                    short.update(needs)
                    continue
                self._memory.reserve(execution_id, needs)
                self.turns.admit(execution_id)
                return self.queue.pop(execution_id)
        return None

    def blockers(self, execution: Execution) -> tuple[list[str], list[Place]]:
        """What keeps a queued execution back; see placement.py."""
        return blockers(execution, self._running.values(), self._resources, self._credits)

    def lacking(self, execution: Execution) -> str:
        """Which memory a queued execution waits for; "" where it does not."""
        return self._memory.short(self._needs(execution, self.plan(execution.program)))

    def _new_plan(self, program: Program) -> Plan:
        grants = self._resources.grants
        program.check_placements(self._resources.slices, self._resources.pools)
        names = dict.fromkeys((*program.slices, *(param.place.name for param in program.params)))
        mine = tuple(grants[name] for name in names if name in grants)
        stamp = max((grant.serial for grant in mine), default=0)
        install_id = f"{program.program_id}+{stamp}" if stamp else program.program_id
        if install_id not in self._checked:
            loose = next((node for node in program.nodes if node.kind in STEP_KINDS), None)
            if loose is not None:
                raise GraphError(
                    f"a {loose.kind} outside a sequence", where=f"program {program.name}, node {loose.node_id}"
                )
            check_specs(program, grants)
            self._check_named(program)
            self._checked[install_id] = None
            while len(self._checked) > KEPT_CHECKED:
                del self._checked[next(iter(self._checked))]
        donors: list[Donor] = []
        for node in program.nodes:
            params = tuple(name for k in node.donates if (name := node.inputs[k]) in program.by_param)
            if params:
                grant = grants.get(node.place.name)
                left = sum(device_bytes(program.aval_of(name), grant) for name in node.objects) if grant else 0
                donors.append(Donor(node.place.name, params, left))
        return Plan(
            install_id,
            mine,
            frozenset(reach(program, self._resources)),
            footprint(program, grants) if any(grant.memory_bytes for grant in mine) else {},
            tuple(donors),
        )

    def _check_named(self, program: Program) -> None:
        """Asks the workers that there are now; a place that is not up is asked by its workers, when it is."""
        asked: dict[Place, list[tuple[str, Catalogue]]] = {}
        for place in program.places:
            found = asked[place] = []
            for worker in (w for name in candidates(self._resources, place) for w in self._resources.slices[name]):
                catalogue = self._resources.live[worker].catalogue
                if catalogue and all(catalogue != other for _, other in found):
                    found.append((worker, catalogue))
        for node in program.nodes:
            for worker, catalogue in asked[node.place]:
                for step in node.steps or (node,):
                    check_named(step, catalogue, worker, f"program {program.name}, node {step.node_id}")

    def _needs(self, execution: Execution, plan: Plan) -> Mapping[str, int]:
        """What has to be reserved: what it consumes is set off against what it leaves."""
        if not plan.needs or not plan.donors:
            return plan.needs
        needs = dict(plan.needs)
        for donor in plan.donors:
            shares = (self._memory.share(execution.bindings[name]).get(donor.place, 0) for name in donor.params)
            needs[donor.place] = needs.get(donor.place, 0) - min(donor.nbytes, sum(shares))
        return needs

    def _waits_for_objects(self, execution: Execution, plan: Plan) -> bool:
        """Has an object that it is bound to no workers yet, or does one that waits too read what it consumes?

        The latter may need memory that this one would hold.
        """
        for name, oid in execution.bindings.items():
            if execution.program.consumers[name] and not self._objects[oid].workers:
                return True
        for donor in plan.donors:
            for name in donor.params:
                for key in self._objects[execution.bindings[name]].needed_by:
                    reader = key.rpartition("/")[0]
                    if reader != execution.execution_id and reader in self.queue:
                        return True
        return False
