"""Runs an engine on the JAX thread for callers on the network loop.

Owns the hand-over: requests go to the JAX thread in batches, the engine's loop re-submits itself there while it has
work (so that other JAX work gets its turn between steps), results come back to the futures that wait. Must not know
jax, prompts or versions. Called by the rollout service.
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Callable
from typing import TypeVar

from waypath.proto.errors import LocalError
from waypath.workers.engines.protocol import EngineProtocol, GroupRequest, GroupResult
from waypath.workers.service import JaxSubmit

T = TypeVar("T")

# Requests that arrive within this time are submitted together, so that the first group of a step does not start a
# prefill of its own.
GATHER_S = 0.002

Pending = tuple[GroupRequest, "asyncio.Future[GroupResult]"]


class EngineDriver:
    """One per engine. ``sample`` and ``on_engine`` are for the network loop; all else runs on the JAX thread."""

    def __init__(self, engine: EngineProtocol, loop: asyncio.AbstractEventLoop, submit_jax: JaxSubmit) -> None:
        self._engine = engine
        self._loop = loop
        self._submit_jax = submit_jax
        self._gathered: list[Pending] = []
        self._futures: dict[int, asyncio.Future[GroupResult]] = {}  # by handle; JAX thread only
        self._running = False  # the engine's loop is queued on the JAX thread; JAX thread only

    async def sample(self, request: GroupRequest) -> GroupResult:
        """Sample a group. Raises what the engine raises; cancelling this cancels the group in the engine."""
        future: asyncio.Future[GroupResult] = self._loop.create_future()
        if not self._gathered:
            self._loop.call_later(GATHER_S, self._hand_over)
        self._gathered.append((request, future))
        try:
            return await future
        except asyncio.CancelledError:
            with contextlib.suppress(RuntimeError):  # the JAX thread has stopped: the worker is leaving
                self._submit_jax(lambda: self._drop(future))
            raise

    async def on_engine(self, fn: Callable[[], T]) -> T:
        """Run ``fn`` on the JAX thread, between two engine steps, and wait for it."""
        return await asyncio.wrap_future(self._submit_jax(fn))

    def _hand_over(self) -> None:
        batch = [(request, future) for request, future in self._gathered if not future.done()]
        self._gathered.clear()
        if batch:
            self._submit_jax(lambda: self._take(batch))

    def _take(self, batch: list[Pending]) -> None:
        for request, future in batch:
            try:
                self._futures[self._engine.submit(request)] = future
            except Exception as error:  # this request's own fault or version; the others go on
                self._resolve(future, error)
        self._go_on()

    def _drop(self, future: asyncio.Future[GroupResult]) -> None:
        for handle in [handle for handle, held in self._futures.items() if held is future]:
            del self._futures[handle]
            self._engine.cancel(handle)

    def _go_on(self) -> None:
        """Queue the next step behind whatever waits for the JAX thread already."""
        if self._engine.has_work and not self._running:
            self._running = True
            self._submit_jax(self._step)

    def _step(self) -> None:
        self._running = False
        try:
            plan = self._engine.plan()
            results = self._engine.step(plan) if plan is not None else []
        except Exception as error:  # the step's groups cannot go on, and a donated cache may be gone
            self._engine.reset()
            failed, self._futures = self._futures, {}
            text = traceback.format_exc()
            for future in failed.values():
                message = f"an engine step failed: {type(error).__name__}: {error}"
                self._resolve(future, LocalError(message, remote_traceback=text))
            return
        for result in results:
            self._resolve(self._futures.pop(result.handle), result)
        self._go_on()

    def _resolve(self, future: asyncio.Future[GroupResult], outcome: GroupResult | Exception) -> None:
        def resolve() -> None:
            if future.done():
                return
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        self._loop.call_soon_threadsafe(resolve)
