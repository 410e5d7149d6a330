"""Typed options: the keyword-only parameters of a registered method or function, checked against what a program gives.

    def scale(x, *, by: float = 2.0): ...        # a program may say by=3.0, and nothing else

A method without such parameters takes any options and reads them from `Call.options`. Must not know programs or jax. The worker
tells the controller of them when it registers (`describe`), and checks again before each call (`Options.bind`).
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from waypath.proto import worker_pb2 as pb
from waypath.proto.errors import ConfigError

__all__ = ["Options", "options_of"]

KINDS: Mapping[Any, str] = {bool: "bool", int: "int", float: "float", str: "str"}
"""Types that the controller checks as well; every other is checked by the worker alone."""


@dataclass(frozen=True)
class _Option:
    kind: str
    required: bool
    adapter: TypeAdapter[Any]


@dataclass(frozen=True)
class Options:
    """The options of one callable, by name."""

    known: Mapping[str, _Option]

    def bind(self, given: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The keyword arguments. Raises ConfigError naming the option, what was expected and what was found."""
        missing = [name for name, option in self.known.items() if option.required and name not in given]
        unknown = [name for name in given if name not in self.known]
        if missing or unknown:
            what = f"option {missing[0]!r} is missing" if missing else f"no option {unknown[0]!r}"
            raise ConfigError(f"{what}; it takes: {', '.join(self.known) or 'none'}", where=where)
        found = {}
        for name, value in given.items():
            try:
                found[name] = self.known[name].adapter.validate_python(value)
            except ValidationError as error:
                wanted = error.errors()[0]["msg"]
                raise ConfigError(f"option {name} = {value!r}: {wanted}", where=where) from None
        return found

    def describe(self) -> list[pb.Option]:
        """What the controller is told of them."""
        return [pb.Option(name=name, kind=o.kind, required=o.required) for name, o in self.known.items()]


@functools.cache
def options_of(function: Callable[..., Any]) -> Options | None:
    """The options of a method or function; None where it takes any."""
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    if not named:
        return None
    hints = typing.get_type_hints(function)
    return Options(
        {
            p.name: _Option(
                KINDS.get(hints.get(p.name), ""), p.default is p.empty, TypeAdapter(hints.get(p.name, typing.Any))
            )
            for p in named
        }
    )
