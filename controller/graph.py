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
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from waypath.controller.checks import check_donations, check_edges, check_names, check_nodes, topological
from waypath.controller.nodes import (
    MAX_NODES,
    Aval,
    Kind,
    Leaf,
    Node,
    OnWorkerLost,
    Param,
    Place,
    Pool,
    Slice,
    dump_options,
)
from waypath.proto.errors import GraphError

__all__ = [
    "MAX_NODES",
    "Aval",
    "Handle",
    "Leaf",
    "Node",
    "Param",
    "Place",
    "Pool",
    "Program",
    "ProgramBuilder",
    "Slice",
]


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
    producers: Mapping[str, Node] = field(init=False, repr=False, compare=False)
    consumers: Mapping[str, tuple[str, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_id = check_nodes(self.name, self.nodes)
        producers = {name: node for node in self.nodes for name in node.objects}
        params = check_names(self, by_id, producers)
        order = topological(self.name, self.nodes, producers)
        consumers: dict[str, list[str]] = {name: [] for name in (*params, *producers)}
        for node in order:
            for source in dict.fromkeys(node.inputs):
                consumers[source].append(node.node_id)
        object.__setattr__(self, "nodes", order)
        object.__setattr__(self, "by_id", by_id)
        object.__setattr__(self, "producers", producers)
        object.__setattr__(self, "consumers", {k: tuple(v) for k, v in consumers.items()})
        check_donations(self)
        check_edges(self)

    @cached_property
    def by_param(self) -> Mapping[str, Param]:
        """The parameters by name."""
        return {param.name: param for param in self.params}

    @cached_property
    def sources(self) -> Mapping[str, tuple[str, ...]]:
        """Node id → the nodes whose objects it reads, each once."""
        return {
            node.node_id: tuple(
                dict.fromkeys(self.producers[name].node_id for name in node.inputs if name in self.producers)
            )
            for node in self.nodes
        }

    @cached_property
    def readers(self) -> Mapping[str, tuple[str, ...]]:
        """Node id → the nodes that read its objects, each once."""
        return {
            node.node_id: tuple(dict.fromkeys(reader for name in node.objects for reader in self.consumers[name]))
            for node in self.nodes
        }

    @cached_property
    def size(self) -> int:
        """How much it does: its nodes, each step of a sequence for one."""
        return sum(len(node.steps) or 1 for node in self.nodes)

    @cached_property
    def kept(self) -> frozenset[str]:
        """The outputs as a set."""
        return frozenset(self.outputs)

    def place_of(self, name: str) -> Place:
        """Where the object `name` (a node's or a parameter) lies."""
        param = self.by_param.get(name)
        return param.place if param is not None else self.producers[name].place

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of the content; equal programs have equal digests, in whatever process they were built."""
        hashed = hashlib.sha256()
        avals: dict[Aval, str] = {}

        def add(*parts: Any) -> None:
            hashed.update(json.dumps(parts).encode() + b"\n")

        def text(aval: Aval) -> str:
            if aval not in avals:
                avals[aval] = json.dumps([leaf.to_json() for leaf in aval])
            return avals[aval]

        add(self.name, self.outputs)
        for param in self.params:
            add(param.name, param.place.name, text(param.aval))
        for node in self.nodes:
            add(
                (node.node_id, node.kind, node.service, node.method, str(node.place), node.inputs, node.options_json),
                (node.deadline_s, node.on_worker_lost, node.donates),
                [text(aval) for aval in node.takes],
                [text(aval) for aval in node.gives],
            )
        return hashed.hexdigest()

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

    def slice_of(self, name: str) -> str:
        """The slice that the object `name` lies on; "" where it is on a pool."""
        place = self.place_of(name)
        return place.name if isinstance(place, Slice) else ""

    def aval_of(self, name: str) -> Aval:
        """What is known of the object `name`: () where nothing is."""
        found = self._avals.get(name)
        return found or ()

    @cached_property
    def _avals(self) -> dict[str, Aval]:
        known = {param.name: param.aval for param in self.params}
        steps = {step.node_id: step for node in self.nodes for step in (node.steps or (node,))}
        for name, step in steps.items():
            if step.kind == "select":
                known[name] = steps[step.inputs[0]].gives[step.options["index"]]
            elif len(step.gives) == 1:
                known[name] = step.gives[0]
        return known

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """The slices, then the pools, that nodes are placed on."""
        return (*map(Slice, self.slices), *map(Pool, self.pools))

    def check_placements(self, slices: Collection[str], pools: Collection[str]) -> None:
        """Raises GraphError for the first node placed on a slice or pool that the cluster does not have."""
        for node in self.nodes:
            kind, known = ("slice", slices) if isinstance(node.place, Slice) else ("pool", pools)
            if node.place.name not in known:
                raise GraphError(
                    f"placed on {kind} {node.place.name!r}, which does not exist; this cluster has {_listed(known)}",
                    where=f"program {self.name}, node {node.node_id}",
                )
        for param in self.params:
            if param.place.name not in slices:
                raise GraphError(
                    f"lies on {param.place}, which does not exist; this cluster has {_listed(slices)}",
                    where=f"program {self.name}, parameter {param.name}",
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
        known: dict[str, Aval] = {}
        return cls(name, tuple(Node.from_json(node, known) for node in nodes), params, outputs)


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
        self._params: dict[str, Param] = {}
        self._outputs: list[str] = []

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
        takes: Sequence[Aval] = (),
        gives: Aval | None = None,
    ) -> Handle:
        """Adds a service method that reads `inputs`. With `gives` it works on arrays where they lie.

        `node_id` defaults to `method_k`, k counting the method's nodes. `on_worker_lost` (see `Node`) defaults to `retry`
        on a pool and to `fail` on a slice. Raises GraphError on a handle of another builder, a taken id or options that are not JSON.
        """
        typed = {} if gives is None else {"takes": tuple(takes), "gives": (gives,)}
        return self._add("method", service, method, inputs, on, options, deadline_s, on_worker_lost, node_id, **typed)

    def transfer(
        self,
        source: Handle,
        *,
        on: Place,
        deadline_s: float = 0.0,
        node_id: str | None = None,
        takes: Aval | None = None,
        gives: Aval | None = None,
    ) -> Handle:
        """Adds a node that holds `source`'s object on another slice: unchanged, or with the shardings of `gives`."""
        typed = {} if takes is None or gives is None else {"takes": (takes,), "gives": (gives,)}
        on_worker_lost: OnWorkerLost = "fail" if typed else "retry"
        return self._add("transfer", "", "transfer", (source,), on, None, deadline_s, on_worker_lost, node_id, **typed)

    def function(
        self,
        digest: str,
        *inputs: Handle,
        on: Slice,
        takes: Sequence[Aval],
        gives: Sequence[Aval],
        donates: Sequence[int] = (),
        options: Mapping[str, Any] | None = None,
        deadline_s: float = 0.0,
        name: str = "function",
    ) -> tuple[Handle, ...]:
        """Adds a call of the exported function `digest`; returns one handle an output. `name` is for node ids and errors."""
        node_id = self._numbered(name)
        typed: dict[str, Any] = {"takes": tuple(takes), "gives": tuple(gives), "donates": tuple(sorted(donates))}
        called = self._add(
            "function", "", digest, inputs, on, {"name": name, **(options or {})}, deadline_s, "fail", node_id, **typed
        )
        if len(typed["gives"]) == 1:
            return (called,)
        return tuple(
            self._add("select", "", "select", (called,), on, {"index": k}, 0.0, "fail", f"{node_id}.{k}")
            for k in range(len(typed["gives"]))
        )

    def param(self, name: str, *, on: Slice, aval: Aval = ()) -> Handle:
        """Adds a parameter: an object on a slice that each execution names."""
        if name in self._params or name in self._nodes:
            raise GraphError(f"the name {name!r} is taken", where=f"program {self.name}")
        self._params[name] = Param(name, on, aval)
        return Handle(self, name)

    def output(self, handle: Handle) -> None:
        """Keeps the object of `handle` beyond the execution."""
        if handle.builder is not self:
            raise GraphError(f"output: {handle.node_id!r} is of builder {handle.builder.name!r}", where=self.name)
        if handle.node_id not in self._outputs:
            self._outputs.append(handle.node_id)

    def build(self) -> Program:
        """Returns the program; raises GraphError where it is empty."""
        return Program(self.name, tuple(self._nodes.values()), tuple(self._params.values()), tuple(self._outputs))

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
        **typed: Any,
    ) -> Handle:
        if node_id is None:
            node_id = self._numbered(method)
        where = f"program {self.name}, node {node_id}"
        if node_id in self._params:
            raise GraphError("a parameter has that name", where=where)
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
            options_json=dump_options(node_id, options or {}),
            deadline_s=deadline_s,
            on_worker_lost=on_worker_lost or ("retry" if isinstance(on, Pool) else "fail"),
            **typed,
        )
        return Handle(self, node_id)

    def _numbered(self, name: str) -> str:
        number = self._counts.get(name, 0)
        self._counts[name] = number + 1
        return f"{name}_{number}"


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"
