"""What workers can be asked to do by name: their services' methods and functions, with the options of each.

A worker says it when it registers. A program that names what its workers lack, or gives an option of another kind, is refused
before anything is sent. Must not know: values of other kinds than JSON's, workers' code. Called by admission.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from waypath.controller.nodes import Node
from waypath.proto.errors import GraphError
from waypath.proto.names import REGISTERED


@dataclass(frozen=True)
class Option:
    """A typed option. `kind`: bool, int, float, str; "": another, which the worker alone checks."""

    kind: str
    required: bool = False


Options = Mapping[str, Option]
Catalogue = Mapping[str, Mapping[str, Options | None]]
"""Service → method → options; None where the method takes any. Service "" holds the functions."""

_TYPES: Mapping[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (float, int), "str": (str,)}


def check_named(node: Node, catalogue: Catalogue, worker: str, where: str) -> None:
    """Raises GraphError where a worker lacks what a method or registered function names, or takes other options.

    A worker that said nothing of itself is not judged.
    """
    is_function = node.kind == "function" and node.method.startswith(REGISTERED)
    if not catalogue or not (is_function or node.kind == "method"):
        return
    service, name = ("", node.method.removeprefix(REGISTERED)) if is_function else (node.service, node.method)
    if service not in catalogue:
        raise GraphError(f"{worker} has no service {service!r}; it has: {_listed(catalogue)}", where=where)
    methods = catalogue[service]
    if name not in methods:
        what = "function" if is_function else f"method {service}."
        raise GraphError(f"{worker} has no {what} {name!r}; it has: {_listed(methods)}", where=where)
    options = methods[name]
    if options is not None:
        _check_options(node.options.get("options", {}) if is_function else node.options, options, where)


def _check_options(given: Mapping[str, Any], options: Options, where: str) -> None:
    for name, value in given.items():
        if name not in options:
            raise GraphError(f"no option {name!r}; it takes: {_listed(options)}", where=where)
        kind = options[name].kind
        right = not kind or (
            isinstance(value, _TYPES.get(kind, object)) and (kind == "bool" or not isinstance(value, bool))
        )
        if not right:
            raise GraphError(f"option {name}: expected {kind}, found {value!r}", where=where)
    for name, option in options.items():
        if option.required and name not in given:
            raise GraphError(f"option {name!r} is missing; it takes: {_listed(options)}", where=where)


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(sorted(filter(None, names))) or "none"
