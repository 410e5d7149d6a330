"""A run's record: who follows it, how it stands, how it ends. Its states are few and one-way.

    running → done | failed | cancelled (it was asked to stop) | interrupted (its controller was)

Must not know how steps are computed. The manager makes records, the GRPO loop writes to them, watchers read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from waypath.controller.runs.disk import LineReader
from waypath.proto.config import RunConfig


@dataclass
class RunRecord:
    """One run as the controller knows it. `result` is None while it runs."""

    run_id: str
    directory: Path
    config: RunConfig | None
    steps: int = 0
    phase: str = "waiting for workers"
    result: Mapping[str, Any] | None = None
    stop_requested: bool = False
    stop_checkpoint: bool = True
    stepping: bool = False
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def status(self) -> str:
        """running, or the status in the result."""
        return str(self.result["status"]) if self.result is not None else "running"

    async def notify(self, *, phase: str | None = None, steps: int | None = None) -> None:
        """Records progress and wakes the watchers."""
        async with self.changed:
            if phase is not None:
                self.phase = phase
            if steps is not None:
                self.steps = steps
            self.changed.notify_all()

    async def finish(self, result: Mapping[str, Any]) -> None:
        """Records the end and wakes the watchers. It is recorded also where the wait for them is cancelled."""
        self.result = result
        self.steps = int(result["steps"])
        self.phase = str(result["status"])
        async with self.changed:
            self.changed.notify_all()

    async def watch(self, from_step: int) -> AsyncIterator[tuple[str, Any]]:
        """Yields ("metrics", line), ("phase", text) and at last ("result", value); follows the files from `from_step`.

        A line of the file is read once, beside the loop. Raises LocalError where it cannot be read.
        """
        next_step, told = from_step, ""
        reader = LineReader(self.directory / "metrics.jsonl")
        while True:
            result, steps, phase = (
                self.result,
                self.steps,
                self.phase,
            )  # asked first: what led to them is in the file then
            while lines := await asyncio.to_thread(reader.read):
                for line in lines:
                    if int(line["step"]) >= next_step:
                        next_step = int(line["step"]) + 1
                        yield "metrics", line
            if result is not None:
                yield "result", dict(result)
                return
            if phase != told:
                told = phase
                yield "phase", phase
            async with self.changed:
                while self.result is None and (self.steps, self.phase) == (steps, phase):
                    await self.changed.wait()
