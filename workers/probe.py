"""A service for measuring and testing the runtime itself: no model, no jax.

Must not know anything of a run. Called by programs of the benchmarks and of the process tests; every worker
has it.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np

from waypath.proto.codecs import Bundle
from waypath.proto.errors import RewardError
from waypath.workers.exposed import ExposedTensor
from waypath.workers.service import Call, ServiceContext, method, service

__all__ = ["ProbeService"]

HostArray = np.ndarray[Any, Any]


@service("probe")
class ProbeService:
    """Echoes, sums, fails, blocks, exposes and pulls."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._block = threading.Event()

    @method(lane="async")
    async def echo(self, call: Call) -> Bundle:
        """Report the call's options, and return `{"x": int64 [n]}` with n = options["n"] (default 1)."""
        call.report(worker=self._context.worker, options=call.options)
        return Bundle({"worker": self._context.worker}, {"x": np.arange(int(call.options.get("n", 1)))})

    @method(lane="host")
    def total(self, call: Call) -> Bundle:
        """The sum of all arrays "x" of all inputs, as `{"x": int64 [1]}`; reported as `total`."""
        total = sum(int(bundle.arrays["x"].sum()) for edge in call.inputs for bundle in edge)
        call.report(total=total)
        return Bundle({}, {"x": np.array([total])})

    @method(lane="jax")
    def on_jax_thread(self, call: Call) -> None:
        """Report which thread runs the jax lane."""
        with call.span("train"):
            call.report(thread=threading.current_thread().name)

    @method(lane="async")
    async def fail(self, call: Call) -> None:
        """Raise RewardError, or ValueError with options["plain"]."""
        if call.options.get("plain"):
            raise ValueError("a plain failure")
        raise RewardError("a user's failure", remedy="Mend it")

    @method(lane="async")
    async def wait(self, call: Call) -> None:
        """Never return; cancellation and deadlines end it."""
        call.activity("waiting for ever")
        await asyncio.Event().wait()

    @method(lane="jax")
    def hang(self, call: Call) -> None:
        """Block the JAX thread for good, as a collective does whose peer is gone."""
        call.activity("hanging")
        self._block.wait()

    @method(lane="host")
    def expose(self, call: Call) -> None:
        """Expose tensor "w" float32 [rows, columns], w[i, j] = i * columns + j, under options["name"]."""
        rows, columns = int(call.options["rows"]), int(call.options["columns"])
        whole = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
        tensors = {"w": ExposedTensor((rows, columns), "float32", [((0, 0), whole)])}
        self._context.store.exposures.expose(call.options["name"], tensors)

    @method(lane="host")
    def unexpose(self, call: Call) -> None:
        """Stop exposing options["name"]."""
        self._context.store.exposures.unexpose(call.options["name"], timeout_s=min(30.0, call.remaining_s))

    @method(lane="async")
    async def pull(self, call: Call) -> None:
        """Pull options["copies"] of options["name"] into fresh memory; report bytes, seconds and the sum."""
        parts: list[HostArray] = []

        def write(_tensor: str, lower: tuple[int, ...], upper: tuple[int, ...]) -> HostArray:
            parts.append(np.zeros([b - a for a, b in zip(lower, upper, strict=True)], np.float32))
            return parts[-1]

        stats = await self._context.transfer.pull_slices(call.options["name"], call.options["copies"], write)
        call.report(bytes=stats.bytes, seconds=stats.seconds, total=float(sum(part.sum() for part in parts)))
