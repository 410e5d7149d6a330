"""Programs: a DAG of nodes, built from handles, checked before anything is dispatched, named by its content.

A program is built by calling services on a `ProgramBuilder`. Every call returns a `Handle`, and passing a handle is the
only way to draw an edge, so a built program cannot have a cycle or an unknown reference; a hand-built `Program` is held
to the same rules by its constructor. A program that exists is valid in itself; whether its slices and pools exist is
asked of a cluster with `Program.check_placements`.

A *method* runs on a worker's service, a *function* is an exported JAX function named by its digest, a *select* takes one
of several outputs, a *transfer* holds an object on another slice. Functions and selects are dispatched in *sequences*
(sequences.py), which nobody writes by hand. A program may have parameters, which an execution binds to objects that exist
already, and outputs, whose objects outlive the execution.

    b = ProgramBuilder("step")
    groups = [b.call("rollout", "generate", on=Pool("inference"), options={"offset": g}) for g in range(8)]
    scores = [b.call("reward", "score", group, on=Pool("reward")) for group in groups]
    b.call("trainer", "train", *groups, *scores, on=Slice("trainer"))
    step = b.build()

Must not know: workers, sockets, time, executions. Called by the run builders, the scheduler and the client service.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

from waypath.proto.errors import GraphError

Kind = Literal["method", "transfer", "function", "select", "sequence"]
KINDS: tuple[str, ...] = get_args(Kind)
OnWorkerLost = Literal["fail", "retry", "drop"]
ON_WORKER_LOST: tuple[str, ...] = get_args(OnWorkerLost)
MAX_NODES = 100_000
STEP_KINDS = frozenset({"function", "select"})
"""Kinds that run inside a sequence."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of an object: global `shape`, `dtype` name, and per dimension the mesh axes that it is split over.

    `spec` has one entry a dimension: the names of the axes, outermost first; () where the dimension is not split.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        where = ", ".join("+".join(axes) or "-" for axes in self.spec)
        return f"{self.dtype}{list(self.shape)} over ({where})"

    def to_json(self) -> list[Any]:
        """Returns `[shape, dtype, spec]`."""
        return [list(self.shape), self.dtype, [list(axes) for axes in self.spec]]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> Leaf:
        """Reads `[shape, dtype, spec]`; raises ValueError or TypeError on anything else."""
        shape, dtype, spec = value
        leaf = cls(tuple(int(n) for n in shape), str(dtype), tuple(tuple(str(a) for a in axes) for axes in spec))
        if len(leaf.spec) != len(leaf.shape) or any(n < 0 for n in leaf.shape):
            raise ValueError(f"a leaf of shape {list(leaf.shape)} with a spec of {len(leaf.spec)} dimensions")
        return leaf


Aval = tuple[Leaf, ...]
"""What is known of an object without its values: its arrays, in the order of its flattened tree."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A place: the named slice, all of its workers, in order."""

    name: str

    def __str__(self) -> str:
        return f"slice {self.name}"


@dataclass(frozen=True, slots=True)
class Pool:
    """A place: one ready member of the named pool, chosen by the scheduler when the node is executed."""

    name: str

    def __str__(self) -> str:
        return f"pool {self.name}"


Place = Slice | Pool


@dataclass(frozen=True, slots=True)
class Node:
    """One sharded computation. `options_json` is compact JSON, so that a node is immutable and hashable.

    `deadline_s` counts from the moment the worker is told to run the node (0: no deadline of its own).

    `on_worker_lost` says what becomes of the node when a worker that ran it, or held its object while somebody needed it,
    is gone: `fail` the execution; `retry` the node elsewhere, or on the same slice when that is back; `drop` the node,
    which then has no result, and go on (only for a node that nothing reads). A node to `drop` that raises is dropped too,
    with the error's text for a result; any other that raises fails the execution.

    An input is the name of an object: of a node's, or of a parameter. `donates` holds the positions of the inputs that the
    node consumes: nothing may read them after it. `takes` and `gives` are what a function (or transfer, or method of the
    `function` service) expects of each input and returns, one `Aval` an output; () where nothing is said.

    A *function* has its digest as `method` and no service; its inputs lie on its own slice. A function of several outputs is read through
    *select* nodes, with the option `index`. A *sequence* runs its `steps` in order on its slice and leaves the objects that
    `exports` names, all of them steps'; its inputs are those of its steps that come from outside.
    """

    node_id: str
    kind: str
    service: str
    method: str
    place: Place
    inputs: tuple[str, ...] = ()
    options_json: str = "{}"
    deadline_s: float = 0.0
    on_worker_lost: str = "fail"
    donates: tuple[int, ...] = ()
    takes: tuple[Aval, ...] = ()
    gives: tuple[Aval, ...] = ()
    steps: tuple[Node, ...] = ()
    exports: tuple[str, ...] = ()

    @property
    def objects(self) -> tuple[str, ...]:
        """The names, in its program, of the objects that the node leaves behind."""
        return self.exports if self.kind == "sequence" else (self.node_id,)

    @property
    def options(self) -> dict[str, Any]:
        """A fresh copy of the options."""
        options: dict[str, Any] = json.loads(self.options_json)
        return options

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON form; `from_json` reads it back."""
        return {
            "node_id": self.node_id,
            "kind": self.kind,
            "service": self.service,
            "method": self.method,
            "slice" if isinstance(self.place, Slice) else "pool": self.place.name,
            "inputs": list(self.inputs),
            "options": self.options,
            "deadline_s": self.deadline_s,
            "on_worker_lost": self.on_worker_lost,
            **({"donates": list(self.donates)} if self.donates else {}),
            **({"takes": _avals_json(self.takes)} if self.takes else {}),
            **({"gives": _avals_json(self.gives)} if self.gives else {}),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Node:
        """Reads the JSON form; raises GraphError naming the node and the key that is wrong."""
        name = str(value.get("node_id", "?"))
        try:
            place: Place = Slice(str(value["slice"])) if "slice" in value else Pool(str(value["pool"]))
            return cls(
                node_id=str(value["node_id"]),
                kind=str(value["kind"]),
                service=str(value["service"]),
                method=str(value["method"]),
                place=place,
                inputs=tuple(str(i) for i in value.get("inputs", ())),
                options_json=_dump_options(name, value.get("options", {})),
                deadline_s=float(value.get("deadline_s", 0.0)),
                on_worker_lost=str(value.get("on_worker_lost", "fail")),
                donates=tuple(int(i) for i in value.get("donates", ())),
                takes=_avals(value.get("takes", ())),
                gives=_avals(value.get("gives", ())),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise GraphError(f"malformed node: {type(error).__name__}: {error}", where=f"node {name}") from None


@dataclass(frozen=True, slots=True)
class Param:
    """An input of a program: an object on the slice `place`, which every execution names. `aval` may be unknown: ()."""

    name: str
    place: Slice
    aval: Aval = ()


@dataclass(frozen=True)
class Program:
    """An immutable, valid DAG. Raises GraphError on construction where it is not one.

    `params` are bound to objects by each execution; the objects that `outputs` names outlive it, until they are deleted
    or their owner's lease ends. Parameters and objects share one name space.

    `nodes` may be given in any order; they are kept in a stable topological order (that of `nodes` where it already is
    one), which is the order of execution on every worker. `node_id`s are unique in a program.
    """

    name: str
    nodes: tuple[Node, ...]
    params: tuple[Param, ...] = ()
    outputs: tuple[str, ...] = ()
    by_id: Mapping[str, Node] = field(init=False, repr=False, compare=False)
    consumers: Mapping[str, tuple[str, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_id = _check_nodes(self.name, self.nodes)
        order = _topological(self.name, self.nodes)
        consumers: dict[str, list[str]] = {node_id: [] for node_id in by_id}
        for node in order:
            for source in dict.fromkeys(node.inputs):
                consumers[source].append(node.node_id)
        object.__setattr__(self, "nodes", order)
        object.__setattr__(self, "by_id", by_id)
        object.__setattr__(self, "consumers", {k: tuple(v) for k, v in consumers.items()})

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of the content; equal programs have equal digests, in whatever process they were built."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def program_id(self) -> str:
        """`name@digest` with the first 16 hex digits of the digest."""
        return f"{self.name}@{self.digest[:16]}"

    @property
    def slices(self) -> tuple[str, ...]:
        """Names of the slices that nodes are placed on, in order of first use."""
        return tuple(dict.fromkeys(n.place.name for n in self.nodes if isinstance(n.place, Slice)))

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of the pools that nodes are placed on, in order of first use."""
        return tuple(dict.fromkeys(n.place.name for n in self.nodes if isinstance(n.place, Pool)))

    def check_placements(self, slices: Collection[str], pools: Collection[str]) -> None:
        """Raises GraphError for the first node placed on a slice or pool that the cluster does not have."""
        for node in self.nodes:
            kind, known = ("slice", slices) if isinstance(node.place, Slice) else ("pool", pools)
            if node.place.name not in known:
                raise GraphError(
                    f"placed on {kind} {node.place.name!r}, which does not exist; this cluster has {_listed(known)}",
                    where=f"program {self.name}, node {node.node_id}",
                )

    def fragment(self, places: Iterable[Place]) -> tuple[Node, ...]:
        """Returns the nodes that a worker belonging to `places` may have to run, in program order."""
        mine = frozenset(places)
        return tuple(node for node in self.nodes if node.place in mine)

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON form; `from_json` reads it back to an equal program."""
        value: dict[str, Any] = {"name": self.name, "nodes": [node.to_json() for node in self.nodes]}
        if self.params:
            value["params"] = [[p.name, p.place.name, [leaf.to_json() for leaf in p.aval]] for p in self.params]
        if self.outputs:
            value["outputs"] = list(self.outputs)
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Program:
        """Reads and checks the JSON form; raises GraphError where it is not a program."""
        name, nodes = value.get("name"), value.get("nodes")
        if not isinstance(name, str) or not isinstance(nodes, list):
            raise GraphError("a program needs a text `name` and a list `nodes`")
        try:
            params = tuple(
                Param(str(p), Slice(str(place)), tuple(Leaf.from_json(leaf) for leaf in aval))
                for p, place, aval in value.get("params", ())
            )
            outputs = tuple(str(name) for name in value.get("outputs", ()))
        except (TypeError, ValueError) as error:
            raise GraphError(f"malformed params or outputs: {error}", where=f"program {name}") from None
        return cls(name, tuple(Node.from_json(node) for node in nodes), params, outputs)


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """The object that a node will produce. Means something only to the builder that returned it."""

    builder: ProgramBuilder = field(repr=False)
    node_id: str


class ProgramBuilder:
    """Collects nodes. Each method returns the handle of the node it adds; `build` returns the program."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._nodes: dict[str, Node] = {}
        self._counts: dict[str, int] = {}

    def call(
        self,
        service: str,
        method: str,
        *inputs: Handle,
        on: Place,
        options: Mapping[str, Any] | None = None,
        deadline_s: float = 0.0,
        on_worker_lost: OnWorkerLost | None = None,
        node_id: str | None = None,
    ) -> Handle:
        """Adds a service method that reads `inputs`.

        `node_id` defaults to `method_k`, k counting the method's nodes. `on_worker_lost` (see `Node`) defaults to `retry`
        on a pool and to `fail` on a slice. Raises GraphError on a handle of another builder, a taken id or options that are not JSON.
        """
        return self._add("method", service, method, inputs, on, options, deadline_s, on_worker_lost, node_id)

    def transfer(self, source: Handle, *, on: Place, deadline_s: float = 0.0, node_id: str | None = None) -> Handle:
        """Adds a node that holds `source`'s object on another slice, unchanged."""
        return self._add("transfer", "", "transfer", (source,), on, None, deadline_s, "retry", node_id)

    def build(self) -> Program:
        """Returns the program; raises GraphError where it is empty."""
        return Program(self.name, tuple(self._nodes.values()))

    def _add(
        self,
        kind: Kind,
        service: str,
        method: str,
        inputs: tuple[Handle, ...],
        on: Place,
        options: Mapping[str, Any] | None,
        deadline_s: float,
        on_worker_lost: OnWorkerLost | None,
        node_id: str | None,
    ) -> Handle:
        if node_id is None:
            number = self._counts.get(method, 0)
            self._counts[method] = number + 1
            node_id = f"{method}_{number}"
        where = f"program {self.name}, node {node_id}"
        if node_id in self._nodes:
            raise GraphError(f"node id {node_id!r} is taken by {self._nodes[node_id]}", where=where)
        for position, handle in enumerate(inputs):
            if not isinstance(handle, Handle):
                raise GraphError(f"input {position}: expected a Handle, found {type(handle).__name__}", where=where)
            if handle.builder is not self:
                raise GraphError(
                    f"input {position}: expected a handle of this builder, found {handle.node_id!r} of builder "
                    f"{handle.builder.name!r}",
                    where=where,
                )
        self._nodes[node_id] = Node(
            node_id=node_id,
            kind=kind,
            service=service,
            method=method,
            place=on,
            inputs=tuple(handle.node_id for handle in inputs),
            options_json=_dump_options(node_id, options or {}),
            deadline_s=deadline_s,
            on_worker_lost=on_worker_lost or ("retry" if isinstance(on, Pool) else "fail"),
        )
        return Handle(self, node_id)


def _avals_json(avals: tuple[Aval, ...]) -> list[list[list[Any]]]:
    return [[leaf.to_json() for leaf in aval] for aval in avals]


def _avals(value: Iterable[Iterable[Sequence[Any]]]) -> tuple[Aval, ...]:
    return tuple(tuple(Leaf.from_json(leaf) for leaf in aval) for aval in value)


def _dump_options(node_id: str, options: object) -> str:
    """Returns `options` as compact, key-sorted JSON; raises GraphError where they are not a JSON object."""
    if not isinstance(options, Mapping):
        raise GraphError(f"options: expected an object, found {type(options).__name__}", where=f"node {node_id}")
    try:
        return json.dumps(dict(options), sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise GraphError(f"options are not JSON: {error}", where=f"node {node_id}") from None


def _check_nodes(name: str, nodes: tuple[Node, ...]) -> dict[str, Node]:
    """Returns the nodes by id; raises GraphError on an id, kind, deadline or input that cannot be."""
    if not name:
        raise GraphError("a program needs a name")
    if not 0 < len(nodes) <= MAX_NODES:
        raise GraphError(f"expected 1 to {MAX_NODES} nodes, found {len(nodes)}", where=f"program {name}")
    by_id: dict[str, Node] = {}
    for node in nodes:
        where = f"program {name}, node {node.node_id}"
        if not node.node_id or "/" in node.node_id:
            raise GraphError(f"node id {node.node_id!r}: expected a non-empty text without '/'", where=where)
        if node.node_id in by_id:
            raise GraphError(f"duplicate node id; first used by {by_id[node.node_id]}", where=where)
        if node.kind not in KINDS:
            raise GraphError(f"kind: expected one of {list(KINDS)}, found {node.kind!r}", where=where)
        if not isinstance(node.place, Slice | Pool):
            raise GraphError(f"place: expected a Slice or a Pool, found {node.place!r}", where=where)
        if not node.method or (node.kind != "transfer" and not node.service):
            raise GraphError(f"expected a service and a method, found {node.service!r}.{node.method!r}", where=where)
        if node.kind == "transfer" and len(node.inputs) != 1:
            raise GraphError(f"a transfer has 1 input, found {len(node.inputs)}", where=where)
        if not 0.0 <= node.deadline_s < float("inf"):
            raise GraphError(f"deadline_s: expected a number ≥ 0, found {node.deadline_s}", where=where)
        if node.on_worker_lost not in ON_WORKER_LOST:
            raise GraphError(
                f"on_worker_lost: expected one of {list(ON_WORKER_LOST)}, found {node.on_worker_lost!r}", where=where
            )
        by_id[node.node_id] = node
    for node in nodes:
        for position, source in enumerate(node.inputs):
            if source not in by_id:
                raise GraphError(
                    f"input {position}: expected the id of a node, found {source!r}, which is not in the program",
                    where=f"program {name}, node {node.node_id}",
                )
            if by_id[source].on_worker_lost == "drop":
                raise GraphError(
                    f"input {position}: {source} may be dropped, expected a node that always has an object",
                    where=f"program {name}, node {node.node_id}",
                )
    return by_id


def _topological(name: str, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Returns the topological order that is nearest to the given one; raises GraphError naming a cycle."""
    position = {node.node_id: i for i, node in enumerate(nodes)}
    missing = [len(set(node.inputs)) for node in nodes]
    readers: list[list[int]] = [[] for _ in nodes]
    for i, node in enumerate(nodes):
        for source in set(node.inputs):
            readers[position[source]].append(i)
    ready = [i for i, count in enumerate(missing) if count == 0]
    order: list[Node] = []
    while ready:
        i = heapq.heappop(ready)
        order.append(nodes[i])
        for reader in readers[i]:
            missing[reader] -= 1
            if missing[reader] == 0:
                heapq.heappush(ready, reader)
    if len(order) < len(nodes):
        blocked = [node for i, node in enumerate(nodes) if missing[i] > 0]
        raise GraphError(f"cycle: {' → '.join(_cycle(blocked))}", where=f"program {name}")
    return tuple(order)


def _cycle(blocked: list[Node]) -> list[str]:
    """Returns the ids along one cycle among nodes of which each waits for another of them."""
    waits = {node.node_id: node for node in blocked}
    path = [blocked[0].node_id]
    while True:
        following = next(source for source in waits[path[-1]].inputs if source in waits)
        if following in path:
            return [*path[path.index(following) :], following][::-1]
        path.append(following)


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"
