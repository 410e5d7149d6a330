"""Functions that workers know by name: pure JAX functions of a module that the worker imports at its start.

    @function("scale")
    def scale(x, *, by: float = 2.0):
        return x * by

A program names it instead of shipping code (`client.registered`). Arguments are arrays, or tuples of arrays where an object has
several; keyword-only parameters are options, fixed when it is compiled. Must not import jax. See options.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from waypath.proto.errors import NotFoundError

__all__ = ["find_function", "function", "names"]

_F = TypeVar("_F", bound=Callable[..., Any])
_functions: dict[str, Callable[..., Any]] = {}


def function(name: str) -> Callable[[_F], _F]:
    """Register a function. Another one under a taken name is a ValueError."""

    def register(fun: _F) -> _F:
        known = _functions.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (fun.__module__, fun.__qualname__):
            raise ValueError(f"function {name!r} is already {known.__module__}.{known.__qualname__}")
        _functions[name] = fun
        return fun

    return register


def find_function(name: str) -> Callable[..., Any]:
    """The function of that name. NotFoundError says what is known."""
    try:
        return _functions[name]
    except KeyError:
        raise NotFoundError(f"no function {name!r} on this worker; it knows: {', '.join(names()) or 'none'}") from None


def names() -> list[str]:
    """All names, sorted."""
    return sorted(_functions)
