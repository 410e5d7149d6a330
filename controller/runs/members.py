"""The inference and reward workers of a run: opened at its start, opened again when a successor joins.

Owns the tasks that bring a worker in, one a worker, and what went wrong in them. A worker that cannot be brought in is no
loss while others of its role do the work; where nobody is left, the run ends with the cause. Must not know what a step
computes or what a publication moves. Called by the run loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from waypath.controller.runs import programs
from waypath.controller.runs.executor import Executor
from waypath.controller.runs.publication import Publisher
from waypath.controller.runtime import Runtime
from waypath.proto.config import RunConfig
from waypath.proto.errors import LocalError, UserError, WaypathError, WorkerLostError

ROLES = ("inference", "reward")


class Members:
    """Brings workers in. `fail` ends the run with an error."""

    def __init__(
        self,
        runtime: Runtime,
        executor: Executor,
        publisher: Publisher,
        config: RunConfig,
        fail: Callable[[WaypathError], None],
    ) -> None:
        self._runtime = runtime
        self._executor = executor
        self._publisher = publisher
        self._config = config
        self._fail = fail
        self._joining: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._troubles: dict[str, str] = {}

    async def open(self) -> None:
        """Opens all workers that are up. One that dies meanwhile is opened again when its successor joins."""
        opening = [self._open_replica(replica) for replica in self._runtime.workers("inference")]
        opening += [self._open_reward(worker) for worker in self._runtime.workers("reward")]
        await asyncio.gather(*map(self._unless_lost, opening))

    async def _unless_lost(self, opening: Coroutine[Any, Any, None]) -> None:
        try:
            await opening
        except WorkerLostError as error:
            self._runtime.log(f"opening: {error}")

    async def _open_replica(self, replica: str) -> None:
        await self._publisher.open(replica)
        self._publisher.admit(replica)

    async def _open_reward(self, worker: str) -> None:
        incarnation = self._runtime.incarnation(worker)
        await self._executor.run(programs.open_member(self._config, "reward", worker), what=f"opening {worker}")
        self._runtime.pool_ready("reward", worker, incarnation)

    def troubles(self) -> list[str]:
        """Why workers could not be brought in, the last of each worker: a hint to why something never came."""
        return [f"{worker} could not join: {text}" for worker, text in sorted(self._troubles.items())]

    def joined(self, worker: str, role: str) -> None:
        """A worker registered in the middle of the run."""
        if role in ROLES:
            task = asyncio.create_task(self._join(worker, role), name=f"join {worker}")
            self._joining[worker] = (role, task)

    def lost(self, worker: str, role: str, cause: str) -> None:
        """A worker is gone: whatever was bringing it in must not act on its successor."""
        _, task = self._joining.pop(worker, ("", None))
        if task is not None:
            task.cancel()
        if role == "inference":
            self._publisher.lost(worker)
            overlapping = self._config.algorithm.max_staleness and self._publisher.committed >= 0
            if overlapping and not self._runtime.ready_members(role):
                self._fail(
                    WorkerLostError(
                        f"worker {worker} was lost ({cause}), the last one that served the policy version which the "
                        "steps in flight sample from; with algorithm.max_staleness > 0 no other can"
                    )
                )

    async def close(self) -> None:
        """Ends the tasks that are under way."""
        tasks = [task for _, task in self._joining.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _join(self, worker: str, role: str) -> None:
        incarnation = self._runtime.incarnation(worker)
        try:
            await self._bring_in(worker, role)
        except WaypathError as error:
            self._failed(worker, role, incarnation, error)
        except Exception as error:
            self._failed(worker, role, incarnation, LocalError(f"{type(error).__name__}: {error}"))
        else:
            self._troubles.pop(worker, None)
            self._joining.pop(worker, None)

    async def _bring_in(self, worker: str, role: str) -> None:
        if role == "reward":
            await self._open_reward(worker)
            return
        await self._publisher.open(worker)
        if self._config.algorithm.max_staleness:
            self._publisher.admit(worker)  # the trainer never stands still: the next publication brings it in
        else:
            await self._publisher.join(worker)

    def _failed(self, worker: str, role: str, incarnation: str, error: WaypathError) -> None:
        """Ends the run where nobody of the role is left to do its work, or to come in."""
        self._runtime.log(f"{worker} could not join: {error}\n{error.remote_traceback}")
        self._troubles[worker] = str(error)
        self._joining.pop(worker, None)
        if self._runtime.ready_members(role) or (role == "inference" and self._publisher.replicas):
            return
        coming = any(other == role for other, _ in self._joining.values())
        leaving = isinstance(error, WorkerLostError) or not self._runtime.stays(worker, incarnation)
        if isinstance(error, UserError) or not (coming or leaving):
            self._fail(error)
