"""A bench for the scheduler: fake workers on the other side of it, and every invariant checked after every event."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from waypath.controller import commands as c
from waypath.controller.execution import Execution, Task, TaskState
from waypath.controller.graph import Node, Pool, Program, ProgramBuilder, Slice
from waypath.controller.objects import ObjectState
from waypath.controller.resources import Resources
from waypath.controller.scheduler import Scheduler
from waypath.proto.errors import RewardError

SLICES = {
    "trainer": ["trainer-0", "trainer-1"],
    "inference-0": ["inference-0"],
    "inference-1": ["inference-1"],
    "reward-0": ["reward-0"],
}
POOLS = {"inference": ["inference-0", "inference-1"], "reward": ["reward-0"]}
WORLDS = {"trainer": ["trainer-0", "trainer-1"]}


@dataclass
class FakeWorker:
    """Does what a worker does with the scheduler's commands, and refuses what a worker would refuse."""

    name: str
    incarnation: str
    programs: dict[str, dict[str, Node]] = field(default_factory=dict)
    pending: dict[tuple[str, str], tuple[int, Node]] = field(default_factory=dict)
    locations: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    bound: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    consumed: set[tuple[str, str]] = field(default_factory=set)
    objects: set[tuple[str, str]] = field(default_factory=set)
    gang: list[tuple[int, str]] = field(default_factory=list)
    executes: list[str] = field(default_factory=list)
    attempts: dict[tuple[str, str], int] = field(default_factory=dict)

    def receive(self, command: c.WorkerCommand) -> None:
        if isinstance(command, c.InstallProgram):
            assert command.program_id not in self.programs, "installed twice"
            self.programs[command.program_id] = {node.node_id: node for node in command.nodes}
        elif isinstance(command, c.Execute):
            self.executes.append(command.execution_id)
            if command.gang_sequence:
                assert not self.gang or self.gang[-1][0] < command.gang_sequence, "gang order"
                self.gang.append((command.gang_sequence, command.execution_id))
            for node_id, attempt in command.nodes:
                key = (command.execution_id, node_id)
                assert self.attempts.get(key, -1) < attempt, "an attempt was sent twice"
                self.attempts[key] = attempt
                self.pending[key] = (attempt, self.programs[command.program_id][node_id])
            for node_id, workers in command.locations.items():
                self.locations[command.execution_id, node_id] = workers
            for name, oid in command.objects.items():
                execution_id, _, object_name = oid.rpartition("/")
                self.bound[command.execution_id, name] = (execution_id, object_name)
        elif isinstance(command, c.Relocate):
            readers = [node for (e, _), (_, node) in self.pending.items() if e == command.execution_id]
            assert any(command.node_id in node.inputs for node in readers), "relocation that nobody reads"
            self.locations[command.execution_id, command.node_id] = command.workers
        elif isinstance(command, c.CancelExecution):
            self.forget(command.execution_id)
        elif isinstance(command, c.ReleaseObjects):
            if not command.node_ids:
                self.forget(command.execution_id, command.kept)
            for node_id in command.node_ids:
                self.objects.remove((command.execution_id, node_id))

    def forget(self, execution_id: str, kept: Sequence[str] = ()) -> None:
        tables: tuple[dict[tuple[str, str], Any], ...] = (self.pending, self.locations, self.bound)
        for table in tables:
            for key in [key for key in table if key[0] == execution_id]:
                del table[key]
        self.objects = {key for key in self.objects if key[0] != execution_id or key[1] in kept}

    def object_of(self, execution_id: str, name: str) -> tuple[str, str]:
        """What an input is: another execution's object where the name is a parameter."""
        return self.bound.get((execution_id, name), (execution_id, name))


class Bench:
    """A scheduler, its workers, and what the run loop heard. `feed` applies an event and checks everything."""

    def __init__(self, max_in_flight: int = 8, slices: Mapping[str, Sequence[str]] = SLICES) -> None:
        self.scheduler = Scheduler(Resources(slices, POOLS), max_in_flight=max_in_flight)
        self.workers: dict[str, FakeWorker] = {}
        self.completed: dict[tuple[str, str], c.Results] = {}
        self.outcomes: dict[str, c.ExecutionCompleted] = {}
        self.commands: list[c.Command] = []
        self._number = 0

    # Driving it

    def feed(self, event: c.Event) -> list[c.Command]:
        if isinstance(event, c.WorkerLost):
            self.workers.pop(event.worker, None)
        commands = self.scheduler.handle(event)
        sent: set[tuple[str, str]] = set()
        doomed: list[str] = []
        for command in commands:
            assert command.cause
            if isinstance(command, c.WorkerCommand):
                assert command.worker in self.workers, f"sent to a worker that is not there: {command}"
                self.workers[command.worker].receive(command)
            if isinstance(command, c.Execute):
                assert (command.worker, command.execution_id) not in sent, "two Execute messages in one dispatch"
                sent.add((command.worker, command.execution_id))
            elif isinstance(command, c.AbortWorld):
                doomed.append(command.worker)
            elif isinstance(command, c.NodeCompleted):
                assert (command.execution_id, command.node_id) not in self.completed
                self.completed[command.execution_id, command.node_id] = command.results
            elif isinstance(command, c.ExecutionCompleted):
                assert command.execution_id not in self.outcomes
                self.outcomes[command.execution_id] = command
        self.commands += commands
        check(self)
        for worker in doomed:
            if worker in self.workers:
                self.feed(c.WorkerLost(worker, "its world was aborted"))
        return commands

    def join(self, worker: str) -> None:
        self._number += 1
        world = next((name for name, members in WORLDS.items() if worker in members), "")
        index = WORLDS[world].index(worker) if world else 0
        size = len(WORLDS[world]) if world else 1
        self.workers[worker] = FakeWorker(worker, f"i{self._number}")
        self.feed(c.WorkerJoined(worker, f"i{self._number}", world, index, size))

    def ready(self, member: str) -> None:
        self.feed(c.PoolMemberReady(member.split("-")[0], member))

    def up(self, *, pools: bool = True) -> Bench:
        """Brings in whoever is missing; with `pools` declares all members ready."""
        for workers in self.scheduler.resources.slices.values():
            for worker in workers:
                if worker not in self.workers:
                    self.join(worker)
        for members in self.scheduler.resources.pools.values():
            for member in members if pools else ():
                self.ready(member)
        return self

    def submit(self, execution_id: str, program: Program, owner: str = "run", **bindings: str) -> list[c.Command]:
        return self.feed(c.ExecutionSubmitted(execution_id, program, {"step": 1}, owner, bindings))

    def runnable(self) -> list[tuple[str, str, str]]:
        """(worker, execution, node) of all nodes whose inputs are where the worker was told they are."""
        return [
            (worker.name, execution_id, node_id)
            for worker in self.workers.values()
            for (execution_id, node_id), (_, node) in worker.pending.items()
            if all(self._readable(worker, execution_id, source, node) for source in node.inputs)
        ]

    def _readable(self, worker: FakeWorker, execution_id: str, source: str, node: Node) -> bool:
        key = worker.object_of(execution_id, source)
        if node.kind == "sequence":
            return key in worker.objects
        places = worker.locations.get((execution_id, source))
        return places is not None and all(
            place in self.workers and key in self.workers[place].objects for place in places
        )

    def finish(self, worker: str, execution_id: str, node_id: str) -> list[c.Command]:
        fake = self.workers[worker]
        attempt, node = fake.pending.pop((execution_id, node_id))
        for source in node.inputs:
            assert fake.object_of(execution_id, source) not in fake.consumed, f"{node_id} reads what was donated"
        fake.consumed |= {fake.object_of(execution_id, node.inputs[position]) for position in node.donates}
        fake.objects |= {(execution_id, name) for name in node.objects}
        held = dict.fromkeys(node.objects, 8)
        return self.feed(
            c.NodeFinished(worker, fake.incarnation, execution_id, node_id, attempt, {"by": worker}, 8, held)
        )

    def fail(self, worker: str, execution_id: str, node_id: str) -> list[c.Command]:
        fake = self.workers[worker]
        attempt, _ = fake.pending.pop((execution_id, node_id))
        error = RewardError(f"{node_id} raised")
        return self.feed(c.NodeFailed(worker, fake.incarnation, execution_id, node_id, attempt, error))

    def drain(self) -> None:
        """Finishes everything that can be, in order; workers keep no object of what is over."""
        while runnable := self.runnable():
            self.finish(*runnable[0])
        for worker in self.workers.values():
            for execution_id, name in worker.objects:
                assert execution_id in self.scheduler.running or f"{execution_id}/{name}" in self.scheduler.objects

    def waits(self) -> list[str]:
        return [line for execution in self.scheduler.describe()["executions"] for line in execution["waits"]]


def check(bench: Bench) -> None:
    """ScheduleInvariant: what is true after every event, whatever happened."""
    scheduler = bench.scheduler
    counted: dict[tuple[str, str], int] = {}
    for execution in scheduler.running.values():
        assert execution.unfinished == sum(task.unfinished for task in execution.tasks.values()) > 0
        waiting = {node_id for node_id, task in execution.tasks.items() if task.state is TaskState.WAITING}
        assert waiting == set(execution.waiting)
        for task in execution.tasks.values():
            _check_task(bench, execution, task)
            if task.state is TaskState.SENT:
                for worker in task.workers:
                    if worker not in task.results:
                        key = (worker, execution.execution_id)
                        counted[key] = counted.get(key, 0) + 1
    for worker in scheduler.resources.live:
        executions = [count for (name, _), count in counted.items() if name == worker]
        assert scheduler.credits.executions(worker) == len(executions)
        assert scheduler.credits.nodes(worker) == sum(executions)
    _check_objects(bench)
    assert not scheduler.running.keys() & scheduler.queue.keys()
    assert set(scheduler.over) <= set(bench.outcomes)
    for name, members in WORLDS.items():
        logs = [dict(bench.workers[worker].gang) for worker in members if worker in bench.workers]
        for one in logs:
            for other in logs:
                assert all(one[k] == other[k] for k in one.keys() & other.keys()), f"gang order differs in {name}"
    scheduler.describe()


def _check_objects(bench: Bench) -> None:
    """Every object has a reason to be known, and every worker holds what is held."""
    scheduler = bench.scheduler
    expected = {
        oid for e in scheduler.running.values() for task in e.tasks.values() for oid in task.object_ids.values()
    }
    expected |= {f"{e.execution_id}/{name}" for e in scheduler.queue.values() for name in e.program.outputs}
    for oid in scheduler.objects.ids():
        ref = scheduler.objects[oid]
        if oid not in expected:
            assert ref.kept or ref.needed_by, f"{oid} is known for no reason"
            assert ref.state in (ObjectState.HELD, ObjectState.POISONED)
            expected.add(oid)
        if ref.state is ObjectState.HELD:
            key = tuple(oid.rpartition("/")[::2])
            assert all(key in bench.workers[worker].objects for worker in ref.workers), f"{oid} is gone"
        for key in ref.needed_by:
            reader = key.rpartition("/")[0]
            assert not reader or reader in scheduler.running or reader in scheduler.queue, f"{oid} waits for {key}"
    assert expected == set(scheduler.objects.ids())


def _check_task(bench: Bench, execution: Execution, task: Task) -> None:
    resources = bench.scheduler.resources
    refs = {name: bench.scheduler.objects[oid] for name, oid in task.object_ids.items()}
    key = (execution.execution_id, task.node_id)
    place = task.node.place
    if task.state is TaskState.WAITING:
        absent = not resources.ready_members(place.name) if isinstance(place, Pool) else resources.missing(place.name)
        assert absent or task.node.donates, f"{task.node_id} waits although {place} is there"
        assert all(ref.state is ObjectState.PENDING for ref in refs.values())
    elif task.state is TaskState.SENT:
        assert all(ref.state is ObjectState.PENDING for ref in refs.values())
        for worker in task.workers:
            fake = bench.workers[worker]
            if worker in task.results:
                continue
            assert fake.pending[key][0] == task.attempt
            for name in task.node.inputs:
                known = fake.locations.get((execution.execution_id, name), ())
                bound = execution.bindings.get(name)
                if bound is not None:
                    workers = bench.scheduler.objects[bound].workers
                else:
                    workers = execution.tasks[execution.program.producers[name].node_id].workers
                assert known == workers or not workers, f"{worker} looks for {name} on {known}, not {workers}"
    elif task.state is TaskState.FINISHED:
        for name, ref in refs.items():
            readers = map(execution.tasks.__getitem__, execution.program.consumers[name])
            needed = {reader.node_id for reader in readers if reader.unfinished}
            assert {reader for reader in ref.needed_by if "/" not in reader} == needed
            assert (ref.state is ObjectState.HELD) == bool(ref.needed_by or ref.kept)
            for worker in task.workers if ref.needed_by or ref.kept else ():
                assert (execution.execution_id, name) in bench.workers[worker].objects, f"{name} is needed and gone"


def step_program(groups: int = 4, **train: str) -> Program:
    """generate → score → train, as a GRPO step."""
    b = ProgramBuilder("step")
    made = [b.call("rollout", "generate", on=Pool("inference")) for _ in range(groups)]
    scores = [b.call("reward", "score", group, on=Pool("reward")) for group in made]
    b.call("trainer", "train", *made, *scores, on=Slice("trainer"), node_id="train", **train)  # type: ignore[arg-type]
    return b.build()


def publish_program() -> Program:
    """expose → stage on both replicas, which may be dropped."""
    b = ProgramBuilder("publish")
    source = b.call("trainer", "expose", on=Slice("trainer"), node_id="expose")
    for replica in POOLS["inference"]:
        b.call("rollout", "stage", source, on=Slice(replica), on_worker_lost="drop", node_id=f"stage_{replica}")
    return b.build()


def chain_program() -> Program:
    """inference → reward → inference → reward: each object has one reader and is freed early."""
    b = ProgramBuilder("chain")
    handle = b.call("rollout", "generate", on=Pool("inference"), node_id="first")
    for i, pool in enumerate(["reward", "inference", "reward"]):
        handle = b.call("s", "m", handle, on=Pool(pool), node_id=f"link_{i}")
    return b.build()


PROGRAMS: dict[str, Callable[[], Program]] = {
    "step": step_program,
    "durable step": lambda: step_program(3, on_worker_lost="retry"),
    "publish": publish_program,
    "chain": chain_program,
}


@pytest.fixture
def bench() -> Bench:
    """All workers up, all pool members ready."""
    return Bench().up()


@pytest.fixture
def new_bench() -> Callable[..., Bench]:
    """Makes benches with settings of their own, nobody up."""
    return Bench


@pytest.fixture
def programs() -> dict[str, Callable[[], Program]]:
    """Makers of the programs that tests share."""
    return PROGRAMS
