"""What happened and what to do: events (past tense) go into the scheduler, commands (imperative) come out.

All are frozen dataclasses. An event may bring an `event_id`; one without gets a number from the scheduler. Every command
carries in `cause` the id of the event that led to it, so that a log of both tells why each message was sent.

Must not know: sockets, protobuf messages, time. Made and read by the server (which gives worker commands their sequence
numbers and sends them), the scheduler and the run loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from waypath.controller.allocation import Grant
from waypath.controller.catalogue import Catalogue
from waypath.controller.graph import Node, Program
from waypath.proto.errors import WaypathError

Outcome = Literal["done", "failed", "cancelled"]
Results = Mapping[str, Mapping[str, Any]]
"""Control-road results of one node: worker name → JSON object."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events."""

    event_id: str = ""


@dataclass(frozen=True, slots=True)
class Device:
    """A device of a worker, by its index there. `memory_bytes`: 0 where that is not known."""

    local_id: int
    kind: str = ""
    memory_bytes: int = 0


@dataclass(frozen=True)
class WorkerJoined(Event):
    """A worker registered. The same `incarnation` again means that its stream came back: nothing was lost."""

    worker: str
    incarnation: str
    world: str = ""
    process_index: int = 0
    process_count: int = 1
    devices: tuple[Device, ...] = ()
    platform: str = ""
    catalogue: Catalogue = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerLost(Event):
    """A worker is gone with all it held. `incarnation`, where given, lets a late report about a predecessor be ignored."""

    worker: str
    cause: str
    incarnation: str = ""


@dataclass(frozen=True)
class PoolMemberReady(Event):
    """The slice may be given nodes of the pool from now on."""

    pool: str
    slice: str


@dataclass(frozen=True)
class PoolMemberRemoved(Event):
    """The slice gets no new nodes of the pool; what it already has goes on."""

    pool: str
    slice: str


@dataclass(frozen=True)
class SliceRequested(Event):
    """`owner` wants a slice of devices for the mesh `axes` × `sizes`.

    `platform` and `world` ("": any) say which workers may serve; `like`: on the devices of that slice. `strategy`: `pack` fills
    the most used devices that are not exclusive, `spread` the least used.
    """

    name: str
    owner: str
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    platform: str = ""
    world: str = ""
    strategy: str = "pack"
    exclusive: bool = False
    like: str = ""


@dataclass(frozen=True)
class SliceReleased(Event):
    """The owner does not need the slice any more; objects that lie on it are lost."""

    name: str
    owner: str


@dataclass(frozen=True)
class OwnerJoined(Event):
    """A client session or run with a share of `weight` in what it competes for; an owner that never joined has 1."""

    owner: str
    weight: float = 1.0


@dataclass(frozen=True)
class ObjectsDeleted(Event):
    """The owner does not need these objects any more; unfinished executions that are bound to them still read them."""

    owner: str
    object_ids: tuple[str, ...]


@dataclass(frozen=True)
class ExecutionSubmitted(Event):
    """Run `program` with `args` (JSON object). `owner` labels the objects: a run or a client session.

    `bindings`: parameter → id of an object of the same owner, which may still be computed.
    """

    execution_id: str
    program: Program
    args: Mapping[str, Any] = field(default_factory=dict)
    owner: str = ""
    bindings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeFinished(Event):
    """One worker finished its part of a node. `object_bytes` is what it now holds for the consumers; of a sequence,
    `export_bytes` says it object by object.
    """

    worker: str
    incarnation: str
    execution_id: str
    node_id: str
    attempt: int
    result: Mapping[str, Any] = field(default_factory=dict)
    object_bytes: int = 0
    export_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeFailed(Event):
    """One worker's part of a node raised `error`."""

    worker: str
    incarnation: str
    execution_id: str
    node_id: str
    attempt: int
    error: WaypathError


@dataclass(frozen=True)
class ExecutionCancelled(Event):
    """Someone asked to stop the execution."""

    execution_id: str
    reason: str


@dataclass(frozen=True)
class OwnerReleased(Event):
    """The owner's lease ended: its executions are cancelled and its objects freed on every worker."""

    owner: str
    reason: str


@dataclass(frozen=True)
class Acked(Event):
    """The worker handled every command up to `sequence`."""

    worker: str
    sequence: int


@dataclass(frozen=True)
class WorkerCounted(Event):
    """The worker has handled all that it was sent and has `nodes` under way: what came of the others, it will not tell unasked."""

    worker: str
    nodes: int


@dataclass(frozen=True, kw_only=True)
class Command:
    """Base of all commands; `cause` is the id of the event that led to it."""

    cause: str = ""


@dataclass(frozen=True)
class WorkerCommand(Command):
    """Base of the commands that are sent to a worker."""

    worker: str


@dataclass(frozen=True)
class InstallProgram(WorkerCommand):
    """Tell the worker the nodes of the program that it may have to run.

    `slices`: the meshes that they run on or read from. `sources`: node → per input the slice that the object lies on, or "".
    """

    program_id: str
    name: str
    nodes: tuple[Node, ...]
    slices: tuple[Grant, ...] = ()
    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Execute(WorkerCommand):
    """Run these nodes (id, attempt), in this order, each as soon as its inputs are there.

    `locations`: for each input of these nodes, the workers that hold its object or will, in process order. An input
    without an entry is not placed yet; a `Relocate` follows. `gang_sequence` grows from message to message on a worker of
    a world of several processes, and is the same on all of them for one dispatch; 0 in a world of one process. A higher
    attempt of a node replaces a lower one. `objects`: the objects that those of these inputs are that are parameters.
    """

    execution_id: str
    program_id: str
    args: Mapping[str, Any]
    nodes: tuple[tuple[str, int], ...]
    locations: Mapping[str, tuple[str, ...]]
    gang_sequence: int = 0
    objects: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class AskOutcomes(WorkerCommand):
    """Say again what came of these nodes (id, attempt): what was said is lost. One that the worker knows nothing of has failed."""

    execution_id: str
    nodes: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Relocate(WorkerCommand):
    """The object of `node_id` is, or will be, on `workers` (process order). Replaces what was said before."""

    execution_id: str
    node_id: str
    workers: tuple[str, ...]


@dataclass(frozen=True)
class ReleaseObjects(WorkerCommand):
    """Free these objects (by their names); with none, all of the execution, which is over, but those `kept`."""

    execution_id: str
    node_ids: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


@dataclass(frozen=True)
class CancelExecution(WorkerCommand):
    """Stop this execution's nodes and free its objects."""

    execution_id: str
    reason: str


@dataclass(frozen=True)
class AbortWorld(WorkerCommand):
    """A peer of the worker's world is gone: leave at once, a collective may never return."""

    reason: str


@dataclass(frozen=True)
class NodeCompleted(Command):
    """To the run loop: the node finished on all its workers, or was dropped: without results where a worker was lost,
    with {worker: {"error": text, "kind": class}} where it failed.

    Said once per node, also when it is recomputed later.
    """

    execution_id: str
    node_id: str
    results: Results


@dataclass(frozen=True)
class ExecutionCompleted(Command):
    """To the run loop: the execution is over. `results`: node id → worker → JSON object, for the nodes that finished."""

    execution_id: str
    outcome: Outcome
    results: Mapping[str, Results]
    error: WaypathError | None = None
