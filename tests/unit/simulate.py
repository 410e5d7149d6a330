"""A seeded story about programs: clients, workers and the messages between them, with everything that goes wrong with these.

`Simulation(seed).run()` plays one; `python -m tests.unit.simulate SEED` plays it aloud. Messages to a worker and from it keep
their order (as on its stream) and are delayed at will; events come twice, or once more much later; a crash loses what is under
way in both directions and is noticed late. Workers do what real ones do: a sequence runs when it is first in the lane of
every worker of its slice, so a wrong order is a deadlock here too. `check` says after every event what must be true.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from waypath.controller import commands as c
from waypath.controller.allocation import Grant
from waypath.controller.execution import TaskState
from waypath.controller.graph import Aval, Handle, Leaf, Node, Pool, Program, ProgramBuilder, Slice
from waypath.controller.objects import ObjectState
from waypath.controller.resources import Resources
from waypath.controller.scheduler import Scheduler
from waypath.controller.sequences import fuse
from waypath.controller.specs import device_bytes
from waypath.proto.errors import (
    CancelledError,
    ConfigError,
    GraphError,
    LocalError,
    NotFoundError,
    RewardError,
    WorkerLostError,
)

WORLDS = {"a": ["a-0", "a-1"], "b": ["b-0"], "c": ["c-0", "c-1"], "x": ["x-0"]}
EVERYBODY = [name for names in WORLDS.values() for name in names]
AUX = "x-0"
"""The worker without devices, which offers a service."""
DEVICES = 2
REFUSALS = (GraphError, NotFoundError, ConfigError, LocalError)
CAUSES = (RewardError, WorkerLostError, CancelledError)
WHOLE: Aval = (Leaf((40,), "uint8", ((),)),)
HALF: Aval = (Leaf((40,), "uint8", (("x",),)),)
PAIR: Aval = (*WHOLE, *HALF)


@dataclass
class Worker:
    """A process: its stores, its lane, and the two directions of its stream."""

    name: str
    incarnation: str
    inbox: deque[c.WorkerCommand] = field(default_factory=deque)
    outbox: deque[c.NodeFinished | c.NodeFailed] = field(default_factory=deque)
    programs: dict[str, c.InstallProgram] = field(default_factory=dict)
    pending: dict[tuple[str, str], tuple[int, Node]] = field(default_factory=dict)
    places: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    bound: dict[tuple[str, str], str] = field(default_factory=dict)
    store: dict[str, tuple[str, int]] = field(default_factory=dict)
    meshes: dict[tuple[str, str], Grant] = field(default_factory=dict)
    gang: dict[int, str] = field(default_factory=dict)
    told: dict[tuple[str, str], c.NodeFinished | c.NodeFailed] = field(default_factory=dict)

    def tell(self, event: c.NodeFinished | c.NodeFailed) -> None:
        self.told[event.execution_id, event.node_id] = event
        self.outbox.append(event)

    def oid(self, execution_id: str, name: str) -> str:
        return self.bound.get((execution_id, name), f"{execution_id}/{name}")

    def lane(self) -> Iterator[tuple[str, str]]:
        return (key for key, (_, node) in self.pending.items() if node.kind == "sequence")

    def receive(self, command: c.WorkerCommand) -> None:
        if isinstance(command, c.InstallProgram):
            assert command.program_id not in self.programs, "installed twice"
            self.programs[command.program_id] = command
        elif isinstance(command, c.Execute):
            if command.gang_sequence:
                assert command.gang_sequence > max(self.gang, default=0), "gang order"
                self.gang[command.gang_sequence] = command.execution_id
            nodes = {node.node_id: node for node in self.programs[command.program_id].nodes}
            for name, workers in command.locations.items():
                self.places[command.execution_id, name] = workers
            for name, oid in command.objects.items():
                self.bound[command.execution_id, name] = oid
            for node_id, attempt in command.nodes:
                key = (command.execution_id, node_id)
                assert self.pending.get(key, (-1,))[0] < attempt
                self.pending.pop(key, None)
                self.pending[key] = (attempt, nodes[node_id])
                for grant in self.programs[command.program_id].slices:
                    self.meshes[command.execution_id, grant.name] = grant
        elif isinstance(command, c.AskOutcomes):
            for node_id, attempt in command.nodes:
                key = (command.execution_id, node_id)
                if key not in self.pending:
                    assert self.told[key].attempt == attempt, "asked about what it was never sent"
                    self.outbox.append(self.told[key])
        elif isinstance(command, c.Relocate):
            self.places[command.execution_id, command.node_id] = command.workers
        elif isinstance(command, c.CancelExecution):
            self._forget(command.execution_id, ())
        elif isinstance(command, c.ReleaseObjects) and command.node_ids:
            for name in command.node_ids:
                self.store.pop(f"{command.execution_id}/{name}", None)
        elif isinstance(command, c.ReleaseObjects):
            self._forget(command.execution_id, command.kept)

    def _forget(self, execution_id: str, kept: tuple[str, ...]) -> None:
        for key in [key for key in self.pending if key[0] == execution_id]:
            del self.pending[key]
        for oid in [oid for oid in self.store if oid.rpartition("/")[0] == execution_id]:
            if oid.rpartition("/")[2] not in kept:
                del self.store[oid]


@dataclass
class Submitted:
    """What a client knows of its execution."""

    owner: str
    program: Program
    bindings: dict[str, str]
    outcome: c.ExecutionCompleted | None = None


class Simulation:
    """One story. Raises AssertionError where something is not as it must be."""

    def __init__(self, seed: int, aloud: bool = False) -> None:
        self.rng = random.Random(seed)
        self.aloud = aloud
        self.capacity = self.rng.choice([0, 0, 160, 400])
        self.scheduler = Scheduler(
            Resources({"aux": [AUX]}, {"aux": ["aux"]}), max_in_flight=self.rng.choice([1, 2, 8])
        )
        self.workers: dict[str, Worker] = {}
        self.unnoticed: list[c.WorkerLost] = []
        self.past: list[c.Event] = []
        self.submitted: dict[str, Submitted] = {}
        self.owners: list[str] = []
        self.slices: dict[str, tuple[str, int]] = {}
        self.values: dict[str, tuple[str, str, Aval]] = {}
        self.deleted: set[str] = set()
        self.consumed: dict[str, str] = {}
        self.closed: list[tuple[str, Program]] = []
        self.installed: dict[tuple[str, str, str], c.InstallProgram] = {}
        self._numbers = 0

    def run(self, actions: int = 90) -> None:
        """Plays the story, then lets everything come to rest, then ends the clients: nothing may be left."""
        self.start()
        for _ in range(actions):
            self.act()
        self.finish()

    def finish(self) -> None:
        """Everything comes to rest, then all clients leave."""
        self.settle()
        self.check_rest()
        for owner in list(self.owners):
            self.feed(c.OwnerReleased(owner, "the story is over"))
        self.settle()
        self.check_end()

    def start(self) -> None:
        """Most workers are there, and two or three clients."""
        for name in EVERYBODY:
            self.join(name)
        self.feed(c.PoolMemberReady("aux", "aux"))
        for _ in range(self.rng.choice([2, 3])):
            self.open_client()

    # What may happen

    def act(self) -> None:
        actions = {
            self.deliver: 30,
            self.work: 25,
            self.report: 25,
            self.lose: 0.5,
            self.count: 3,
            self.submit: 14,
            self.delete: 3,
            self.repeat: 3,
            self.notice: 4,
            self.crash: 0.7,
            self.rejoin: 3,
            self.cancel: 1,
            self.open_client: 0.7,
            self.close_client: 0.7,
            self.request: 1,
            self.release: 0.8,
        }
        self.rng.choices(list(actions), list(actions.values()))[0]()

    def deliver(self) -> None:
        """One message reaches a worker."""
        busy = [worker for worker in self.workers.values() if worker.inbox]
        if busy:
            worker = self.rng.choice(busy)
            command = worker.inbox.popleft()
            self.say(f"{worker.name} gets {command}")
            if isinstance(command, c.AbortWorld):
                self.kill(worker, "its world was aborted")
            else:
                worker.receive(command)

    def report(self) -> None:
        """One event of a worker reaches the scheduler."""
        busy = [worker for worker in self.workers.values() if worker.outbox]
        if busy:
            event = self.rng.choice(busy).outbox.popleft()
            self.past.append(event)
            self.feed(event)

    def lose(self) -> None:
        """An event of a worker gets lost, and the worker does not know."""
        busy = [worker for worker in self.workers.values() if worker.outbox]
        if busy:
            worker = self.rng.choice(busy)
            event = worker.outbox[position := self.rng.randrange(len(worker.outbox))]
            del worker.outbox[position]
            self.say(f"lost: {event}")

    def count(self) -> None:
        """Workers say how much they have under way."""
        for worker in self.workers.values():
            if not worker.inbox and not worker.outbox:
                live = self.scheduler.resources.live.get(worker.name)
                if live is not None and live.incarnation == worker.incarnation:
                    self.feed(c.WorkerCounted(worker.name, len(worker.pending)))

    def repeat(self) -> None:
        """An event comes once more."""
        if self.past:
            self.feed(self.rng.choice(self.past))

    def work(self) -> None:
        """A worker, or all of a slice, run a node."""
        if found := self.runnable():
            self.perform(*self.rng.choice(found))

    def crash(self) -> None:
        if self.workers:
            self.kill(self.workers[self.rng.choice(sorted(self.workers))], "killed")

    def notice(self) -> None:
        """The controller hears of a crash."""
        if self.unnoticed:
            self.feed(self.unnoticed.pop(0))

    def rejoin(self) -> None:
        names = [name for names in WORLDS.values() for name in names] + [AUX]
        gone = [name for name in names if name not in self.workers and name not in self.scheduler.resources.live]
        if gone:
            self.join(self.rng.choice(gone))

    def open_client(self) -> None:
        if len(self.owners) >= 3:
            return
        owner = f"o{self.number()}"
        self.owners.append(owner)
        self.feed(c.OwnerJoined(owner, self.rng.choice([1.0, 2.0, 8.0])))
        for _ in range(self.rng.choice([1, 2, 3])):
            self.request(owner)

    def close_client(self) -> None:
        if len(self.owners) > 1:
            owner = self.rng.choice(self.owners)
            self.owners.remove(owner)
            self.feed(c.OwnerReleased(owner, "its client is gone"))
            self.slices = {name: item for name, item in self.slices.items() if item[0] != owner}

    def request(self, owner: str = "") -> None:
        """A client asks for a slice; sometimes under a name that was used before."""
        owner = owner or self.rng.choice(self.owners)
        size = self.rng.choice([1, 2, 4])
        name = f"{owner}-s{self.rng.choice([0, 1, self.number()])}"
        like = self.rng.choice(["", "", *(n for n, (o, s) in self.slices.items() if s == size and o == owner)])
        event = c.SliceRequested(
            name,
            owner,
            ("x",),
            (size,),
            strategy=self.rng.choice(["pack", "spread"]),
            exclusive=self.rng.random() < 0.1,
            like=like,
        )
        if self.feed(event):
            self.slices[name] = (owner, size)

    def release(self) -> None:
        if self.slices:
            name = self.rng.choice(sorted(self.slices))
            owner, _ = self.slices.pop(name)
            self.feed(c.SliceReleased(name, owner))

    def cancel(self) -> None:
        if self.submitted:
            self.feed(c.ExecutionCancelled(self.rng.choice(list(self.submitted)), "asked to"))

    def delete(self) -> None:
        if self.values:
            oid = self.rng.choice(list(self.values))
            self.feed(c.ObjectsDeleted(self.values[oid][0], (oid,)))
            self.deleted.add(oid)

    def submit(self) -> None:
        """A client runs a program on objects that it has had at some time: the younger the likelier."""
        owner = self.rng.choice(self.owners)
        mine = [name for name, (who, _) in self.slices.items() if who == owner]
        if not mine:
            return
        had = [oid for oid, (who, place, _) in self.values.items() if who == owner and place in mine][-6:]
        bound = self.rng.sample(had, min(len(had), self.rng.choice([0, 1, 1, 2])))
        if self.rng.random() < 0.05 and self.values:
            bound.append(self.rng.choice(list(self.values)))
        bindings = {f"p{k}": oid for k, oid in enumerate(bound)}
        again = [p for who, p in self.closed if who == owner and set(p.slices) <= set(mine)]
        program = self.rng.choice(again) if again and self.rng.random() < 0.3 else self.program(mine, bindings)
        if not program.params:
            bindings = {}
            self.closed.append((owner, program))
        execution_id = f"e{self.number()}"
        if self.feed(c.ExecutionSubmitted(execution_id, program, {}, owner, bindings)):
            for name in program.outputs:
                place = program.place_of(name)
                self.values[f"{execution_id}/{name}"] = (owner, place.name, program.aval_of(name))

    def program(self, slices: list[str], bindings: dict[str, str]) -> Program:
        """A few puts, functions (some of two outputs, some donating), transfers, and calls of a service on a pool."""
        b = ProgramBuilder("p")
        values: list[tuple[Handle, str, Aval]] = []
        for name, oid in bindings.items():
            _, place, aval = self.values[oid]
            values.append((b.param(name, on=Slice(place), aval=aval), place, aval))
        alive = list(values)
        made: list[tuple[Handle, str, Aval]] = []
        for k in range(self.rng.choice([1, 1, 2, 3, 5])):
            place = self.rng.choice(slices)
            inputs = [value for value in alive if value[1] == place]
            kind = self.rng.choices(["function", "put", "transfer", "method"], [6, 1, 2, 1])[0]
            if kind == "put" or (kind != "function" and not alive):
                aval = self.rng.choice([WHOLE, HALF, PAIR])
                made.append((b.call("function", "put", on=Slice(place), gives=aval, node_id=f"put{k}"), place, aval))
            elif kind == "transfer":
                source, _, aval = self.rng.choice(alive)
                given = self.rng.choice([aval, PAIR if len(aval) == 2 else HALF])
                made.append(
                    (b.transfer(source, on=Slice(place), takes=aval, gives=given, node_id=f"t{k}"), place, given)
                )
            elif kind == "method":
                taken = self.rng.sample(alive, min(len(alive), 2))
                b.call("s", "m", *(value[0] for value in taken), on=Pool("aux"), node_id=f"m{k}")
                continue
            else:
                taken = self.rng.sample(inputs, min(len(inputs), self.rng.choice([0, 1, 2])))
                donates = [i for i in range(len(taken)) if self.rng.random() < 0.3]
                gives = [self.rng.choice([WHOLE, HALF, PAIR]) for _ in range(self.rng.choice([1, 1, 2]))]
                handles = b.function(
                    f"f{k}",
                    *(value[0] for value in taken),
                    on=Slice(place),
                    takes=[value[2] for value in taken],
                    gives=gives,
                    donates=donates,
                    name=f"f{k}",
                )
                gone = [taken[i] for i in donates]
                alive = [value for value in alive if value not in gone]
                made += [(handle, place, aval) for handle, aval in zip(handles, gives, strict=True)]
            fresh = [value for value in made if value not in values]
            values += fresh
            alive += fresh
        for value in made:
            if value in alive and self.rng.random() < 0.5:
                b.output(value[0])
        if not b._nodes:
            b.call("s", "m", on=Pool("aux"))
        return fuse(b.build())

    # Workers

    def join(self, name: str) -> None:
        members = WORLDS[name[0]]
        worker = self.workers[name] = Worker(name, f"i{self.number()}")
        devices = tuple(c.Device(k, "cpu", self.capacity) for k in range(DEVICES)) if name != AUX else ()
        event = c.WorkerJoined(
            name, worker.incarnation, f"world-{name[0]}", members.index(name), len(members), devices, "cpu"
        )
        self.feed(event)

    def kill(self, worker: Worker, cause: str) -> None:
        """The process is gone with all messages on its way; the controller will hear of it."""
        self.say(f"{worker.name} dies: {cause}")
        del self.workers[worker.name]
        self.unnoticed.append(c.WorkerLost(worker.name, cause, worker.incarnation))

    def runnable(self) -> list[tuple[Worker, tuple[str, str]]]:
        """What can run now: of a sequence, at its first worker if it is first in the lane of all of them."""
        found: list[tuple[Worker, tuple[str, str]]] = []
        for worker in self.workers.values():
            head = next(worker.lane(), None)
            for key, (_, node) in worker.pending.items():
                if node.kind != "sequence":
                    if all(self.readable(worker, key[0], name) for name in node.inputs):
                        found.append((worker, key))
                elif key == head:
                    peers = self.peers(worker, key[0], node)
                    first = bool(peers) and peers[0] is worker and all(next(p.lane(), None) == key for p in peers)
                    if first and all(peer.oid(key[0], name) in peer.store for peer in peers for name in node.inputs):
                        found.append((worker, key))
        return found

    def peers(self, worker: Worker, execution_id: str, node: Node) -> list[Worker]:
        """The processes of a slice, as this worker knows it; none where one is gone."""
        names = worker.meshes[execution_id, node.place.name].workers
        return [self.workers[name] for name in names] if all(name in self.workers for name in names) else []

    def readable(self, worker: Worker, execution_id: str, name: str) -> bool:
        places = worker.places.get((execution_id, name))
        oid = worker.oid(execution_id, name)
        return places is not None and all(p in self.workers and oid in self.workers[p].store for p in places)

    def perform(self, worker: Worker, key: tuple[str, str]) -> None:
        """Runs a node to its end, on all workers of a sequence."""
        execution_id, node_id = key
        _, node = worker.pending[key]
        self.say(f"{worker.name} runs {execution_id}/{node_id}")
        fails = self.rng.random() < 0.03
        for peer in self.peers(worker, execution_id, node) if node.kind == "sequence" else [worker]:
            attempt, _ = peer.pending.pop(key)
            for position in node.donates:
                oid = peer.oid(execution_id, node.inputs[position])
                self.check_donation(oid, execution_id, node)
                del peer.store[oid]
                self.consumed[oid] = f"{execution_id}/{node_id}"
            if fails and self.rng.random() < 0.7:
                error = RewardError(f"{node_id} raised")
                peer.tell(c.NodeFailed(peer.name, peer.incarnation, execution_id, node_id, attempt, error))
                continue
            sizes: dict[str, int] = {}
            for name in node.objects:
                sizes[name] = self.keep(peer, execution_id, node, name)
            peer.tell(
                c.NodeFinished(
                    peer.name, peer.incarnation, execution_id, node_id, attempt, {}, sum(sizes.values()), sizes
                )
            )
            self.check_bytes(peer)

    def keep(self, worker: Worker, execution_id: str, node: Node, name: str) -> int:
        aval = self.submitted[execution_id].program.aval_of(name)
        size = 0
        if aval:
            size = device_bytes(aval, worker.meshes[execution_id, node.place.name])
        worker.store[f"{execution_id}/{name}"] = (node.place.name, size)
        return size or 1

    # The scheduler

    def feed(self, event: c.Event) -> bool:
        """Gives the scheduler an event and sends what it says; False where it refuses."""
        self.say(f"→ {event}")
        before = (len(self.scheduler.objects), len(self.scheduler.queue), len(self.scheduler.running))
        try:
            commands = self.scheduler.handle(event)
        except REFUSALS as error:
            assert isinstance(event, c.ExecutionSubmitted | c.SliceRequested), f"refused: {event}: {error}"
            self.say(f"  refused: {error}")
            if isinstance(event, c.ExecutionSubmitted):
                assert before == (
                    len(self.scheduler.objects),
                    len(self.scheduler.queue),
                    len(self.scheduler.running),
                ), "a refusal left something"
            self.check()
            return False
        if isinstance(event, c.ExecutionSubmitted):
            self.submitted[event.execution_id] = Submitted(event.owner, event.program, dict(event.bindings))
        for command in commands:
            self.say(f"    {command}")
            if isinstance(command, c.ExecutionCompleted):
                self.over(command)
            elif isinstance(command, c.WorkerCommand):
                assert command.worker in self.scheduler.resources.live, "sent to a worker that is known to be gone"
                live = self.scheduler.resources.live[command.worker]
                if isinstance(command, c.InstallProgram):
                    self.installed[command.worker, live.incarnation, command.program_id] = command
                elif isinstance(command, c.Execute):
                    for grant in self.installed[command.worker, live.incarnation, command.program_id].slices:
                        assert grant == self.scheduler.resources.grants[grant.name], (
                            "it knows another slice of that name"
                        )
                worker = self.workers.get(command.worker)
                if worker is not None and live.incarnation == worker.incarnation:
                    worker.inbox.append(command)
        self.check()
        return True

    def over(self, command: c.ExecutionCompleted) -> None:
        execution = self.submitted[command.execution_id]
        assert execution.outcome is None, "ended twice"
        execution.outcome = command
        assert (command.outcome == "done") == (command.error is None)
        assert command.error is None or isinstance(command.error, CAUSES), f"not a root cause: {command.error!r}"

    def settle(self) -> None:
        """Everything that can happen without a client happens, fairly, until nothing can."""
        while True:
            moved = False
            while self.unnoticed or any(w.inbox or w.outbox for w in self.workers.values()):
                moved = True
                self.notice()
                self.deliver()
                self.report()
            if found := self.runnable():
                moved = True
                self.perform(*found[0])
            if not moved:
                self.count()
                moved = any(worker.inbox for worker in self.workers.values())
            gone = [name for name in EVERYBODY if name not in self.workers]
            if gone and not moved:
                moved = True
                self.join(gone[0])
            if not self.scheduler.resources.ready_members("aux") and AUX in self.scheduler.resources.live:
                moved = True
                self.feed(c.PoolMemberReady("aux", "aux"))
            if not moved:
                return

    # What must be true

    def check(self) -> None:
        """After every event."""
        scheduler = self.scheduler
        counted: dict[tuple[str, str], int] = {}
        for execution in (*scheduler.running.values(), *scheduler.queue.values()):
            for task in execution.tasks.values():
                if task.unfinished:
                    for oid, reader in task.reads():
                        if "/" in reader or execution.execution_id in scheduler.running:
                            ref = scheduler.objects[oid]
                            assert reader in ref.needed_by, f"{oid} does not know that {reader} reads it"
                            assert ref.state is not ObjectState.RELEASED, f"{oid} is freed, {reader} reads it"
                            assert ref.state is not ObjectState.POISONED, f"{oid} is poisoned, {reader} waits for it"
                if task.state is TaskState.SENT:
                    for worker in task.workers:
                        if worker not in task.results:
                            counted[worker, execution.execution_id] = (
                                counted.get((worker, execution.execution_id), 0) + 1
                            )
        for name in scheduler.resources.live:
            counts = [count for (worker, _), count in counted.items() if worker == name]
            assert scheduler.credits.executions(name) == len(counts), f"credits of {name}"
            assert scheduler.credits.nodes(name) == sum(counts), f"credits of {name}"
        for names, used, capacity in scheduler.memory.cells():
            assert 0 <= used <= capacity, f"{used} of {capacity} bytes are reserved on {names}"
        known = {*scheduler.running, *scheduler.queue}
        assert known == {e for e, s in self.submitted.items() if s.outcome is None}, (
            "an execution is lost, or over twice"
        )
        for oid in scheduler.objects.ids():
            ref = scheduler.objects[oid]
            producer = oid.rpartition("/")[0]
            assert producer in known or ref.kept or ref.needed_by, f"{oid} leaks"
            assert all(key.rpartition("/")[0] in known for key in ref.needed_by if "/" in key), (
                f"{oid} waits for the dead"
            )
        for members in WORLDS.values():
            logs = [self.workers[name].gang for name in members if name in self.workers]
            for one in logs[1:]:
                assert all(logs[0][k] == one[k] for k in logs[0].keys() & one.keys()), "gang order differs"

    def check_donation(self, oid: str, execution_id: str, donor: Node) -> None:
        """Whoever else reads the object has run, everywhere, or never will."""
        for worker in self.workers.values():
            for (other, node_id), (_, node) in worker.pending.items():
                if (other, node_id) == (execution_id, donor.node_id) or self.submitted[other].outcome is not None:
                    continue
                read = {worker.oid(other, name) for name in node.inputs}
                in_lane = node.kind == "sequence" and node.place == donor.place
                assert in_lane or oid not in read, f"{oid} is consumed before {other}/{node_id} has read it"

    def check_bytes(self, worker: Worker) -> None:
        """What a worker holds fits its devices, as far as it is not on its way out."""
        if not self.capacity:
            return
        held: dict[str, int] = {}
        for oid, (place, size) in worker.store.items():
            if oid in self.scheduler.objects and self.scheduler.objects[oid].state is not ObjectState.RELEASED:
                held[place] = held.get(place, 0) + size
        for name, grant in self.scheduler.resources.grants.items():
            mine = {device for device in grant.devices if device[0] == worker.name}
            both = [g for g in self.scheduler.resources.grants.values() if mine and mine <= set(g.devices)]
            total = sum(held.get(g.name, 0) for g in both)
            assert total <= self.capacity, f"{total} bytes on the devices of {name} at {worker.name}"

    def check_rest(self) -> None:
        """Nothing is under way; what waits, waits for memory that its clients' objects hold."""
        scheduler = self.scheduler
        assert not scheduler.running, f"it hangs: {scheduler.describe()['executions']}"
        if scheduler.queue:
            assert any(scheduler.admission.lacking(e) for e in scheduler.queue.values()), "it hangs in the queue"
        for oid in scheduler.objects.ids():
            ref = scheduler.objects[oid]
            if ref.state is ObjectState.HELD:
                for name in ref.workers:
                    assert oid in self.workers[name].store, f"{oid} is not on {name}"
        for worker in self.workers.values():
            for oid in worker.store:
                assert oid in scheduler.objects, f"{oid} is left on {worker.name}"

    def check_end(self) -> None:
        """All clients are gone: everything has ended, nobody holds anything."""
        scheduler = self.scheduler
        assert all(execution.outcome is not None for execution in self.submitted.values())
        assert not scheduler.running and not scheduler.queue and not scheduler.unplaced
        assert len(scheduler.objects) == 0 and not scheduler.resources.grants
        assert not scheduler.memory._shares
        for worker in self.workers.values():
            assert not worker.store and not worker.pending, f"{worker.name} holds {worker.store} {worker.pending}"

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def say(self, text: str) -> None:
        if self.aloud:
            print(text)


def main() -> None:
    """`python -m tests.unit.simulate SEED [LAST]`: one story aloud, or many quietly."""
    first = int(sys.argv[1])
    last = int(sys.argv[2]) if len(sys.argv) > 2 else first
    broken = 0
    for seed in range(first, last + 1):
        story = Simulation(seed, aloud=first == last)
        try:
            story.run()
        except Exception as error:
            if first == last:
                raise
            broken += 1
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:200]}")
    print(f"{last - first + 1} stories, {broken} broken")


if __name__ == "__main__":
    main()
