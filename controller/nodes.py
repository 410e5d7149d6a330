"""What programs are made of: places, arrays as they are known without their values, nodes and parameters.

Must not know: whole programs. Called by graph.py and whoever builds nodes by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    def from_json(cls, value: Mapping[str, Any], known: dict[str, Aval] | None = None) -> Node:
        """Reads the JSON form; raises GraphError naming the node and the key that is wrong.

        `known` holds the avals of the nodes before, by their text: those of a long program are few.
        """
        name = str(value.get("node_id", "?"))
        known = {} if known is None else known
        try:
            place: Place = Slice(str(value["slice"])) if "slice" in value else Pool(str(value["pool"]))
            return cls(
                node_id=str(value["node_id"]),
                kind=str(value["kind"]),
                service=str(value["service"]),
                method=str(value["method"]),
                place=place,
                inputs=tuple(str(i) for i in value.get("inputs", ())),
                options_json=dump_options(name, value.get("options", {})),
                deadline_s=float(value.get("deadline_s", 0.0)),
                on_worker_lost=str(value.get("on_worker_lost", "fail")),
                donates=tuple(int(i) for i in value.get("donates", ())),
                takes=_avals(value.get("takes", ()), known),
                gives=_avals(value.get("gives", ()), known),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise GraphError(f"malformed node: {type(error).__name__}: {error}", where=f"node {name}") from None


@dataclass(frozen=True, slots=True)
class Param:
    """An input of a program: an object on the slice `place`, which every execution names. `aval` may be unknown: ()."""

    name: str
    place: Slice
    aval: Aval = ()


def _avals_json(avals: tuple[Aval, ...]) -> list[list[list[Any]]]:
    return [[leaf.to_json() for leaf in aval] for aval in avals]


def _avals(value: Iterable[Iterable[Sequence[Any]]], known: dict[str, Aval]) -> tuple[Aval, ...]:
    found: list[Aval] = []
    for item in value:
        text = repr(item)
        aval = known.get(text)
        if aval is None:
            aval = known[text] = tuple(Leaf.from_json(leaf) for leaf in item)
        found.append(aval)
    return tuple(found)


def dump_options(node_id: str, options: object) -> str:
    """Returns `options` as compact, key-sorted JSON; raises GraphError where they are not a JSON object."""
    if not isinstance(options, Mapping):
        raise GraphError(f"options: expected an object, found {type(options).__name__}", where=f"node {node_id}")
    try:
        return json.dumps(dict(options), sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise GraphError(f"options are not JSON: {error}", where=f"node {node_id}") from None
