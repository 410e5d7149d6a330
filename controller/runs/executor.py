"""The executions of one run: submitted under its name, and waited for with a deadline and a cause.

Owns how long an execution may take as the controller sees it. A worker counts a node's deadline from the moment it is told;
a node that no worker was told of (its slice is gone, its pool is empty) has nobody who counts, so every wait here ends by
itself. Must not know what the programs compute. Called by the run loop and what it consists of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from waypath.controller.graph import Program
from waypath.controller.runtime import Execution, Results, Runtime
from waypath.proto.errors import DeadlineError

T = TypeVar("T")


class Executor:
    """Submits programs for `owner`. `slack_s`: how long a worker that was lost may take to come back.

    `hints` says what else went wrong lately and may be the reason why something never came.
    """

    def __init__(self, runtime: Runtime, owner: str, slack_s: float, hints: Callable[[], list[str]] = list) -> None:
        self._runtime = runtime
        self._owner = owner
        self._slack_s = slack_s
        self._hints = hints

    def submit(self, program: Program, args: Mapping[str, Any] | None = None) -> Execution:
        """Dispatches `program`; returns at once."""
        return self._runtime.submit(program, args or {}, owner=self._owner)

    async def run(self, program: Program, args: Mapping[str, Any] | None = None, *, what: str) -> Results:
        """Submits and waits for the results; as `result`."""
        return await self.result(self.submit(program, args), what)

    async def result(self, execution: Execution, what: str) -> Results:
        """Waits for all of an execution. Raises what ended it, or DeadlineError that says what it waits for."""
        return await self._wait(execution, execution.result(), what)

    async def node(self, execution: Execution, node_id: str, what: str) -> Mapping[str, Mapping[str, Any]]:
        """Waits for one node; as `result`."""
        return await self._wait(execution, execution.node(node_id), what)

    def limit_s(self, program: Program) -> float:
        """The longest deadline of the program's nodes (each counts from the dispatch on), and the slack."""
        return max(node.deadline_s for node in program.nodes) + self._slack_s

    async def _wait(self, execution: Execution, outcome: Awaitable[T], what: str) -> T:
        """An execution that is given up is cancelled: nothing of it may reach a worker that comes later."""
        limit_s = self.limit_s(execution.program)
        try:
            async with asyncio.timeout(limit_s):
                return await outcome
        except asyncio.CancelledError:
            self._runtime.cancel(execution, f"nobody waits for {what} any more")
            raise
        except TimeoutError:
            waits = "; ".join([*self._runtime.waits(execution), *self._hints()]) or "nothing"
            self._runtime.cancel(execution, f"{what} took too long")
            raise DeadlineError(
                f"{what} is not done after {limit_s:g} s: {waits}", remedy="look into the logs of the workers named"
            ) from None
