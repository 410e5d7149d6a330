"""A program while it is being traced, and what is kept of it afterwards.

Must not know sessions or jax. Made by programs.py.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from waypath.controller.client.refs import Slice, Symbol
from waypath.controller.graph import Handle, Program, ProgramBuilder
from waypath.controller.nodes import Aval


@dataclass
class Template:
    """A program for arguments of one kind: what each output is (name, slice, aval, tree), which parameters it consumes and for
    whom, what the traced function returned, and the slices that it speaks of.
    """

    program: Program
    outputs: tuple[tuple[str, Slice, Aval, Any], ...]
    donated: tuple[tuple[str, str], ...] = ()
    result: Any = None
    slices: tuple[Slice, ...] = ()


@dataclass
class Trace:
    """A program being built by calls."""

    builder: ProgramBuilder
    slices: dict[str, Slice] = field(default_factory=dict)

    _stack = threading.local()

    def symbol(self, handle: Handle, slice_: Slice, aval: Aval, tree: Any) -> Symbol:
        """What stands for an object of the program."""
        self.slices[slice_.name] = slice_
        return Symbol(self, handle, slice_, aval, tree)

    @classmethod
    def current(cls) -> Trace | None:
        """The innermost trace of this thread."""
        stack = getattr(cls._stack, "traces", [])
        return stack[-1] if stack else None

    def __enter__(self) -> Trace:
        self._stack.traces = [*getattr(self._stack, "traces", []), self]
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.traces = self._stack.traces[:-1]
