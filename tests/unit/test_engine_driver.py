"""The gate lets a group sample from exactly its version; the driver carries groups to the engine's thread and back."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest

from waypath.proto.errors import DeadlineError, LocalError, UserError
from waypath.workers.engines.driver import EngineDriver
from waypath.workers.engines.gate import VersionGate
from waypath.workers.engines.protocol import GroupRequest, GroupResult, Plan, SamplingParams

T = TypeVar("T")


def _later(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def test_a_group_waits_for_its_version_and_holds_it() -> None:
    async def scenario() -> list[str]:
        gate, events = VersionGate("r0"), []
        sampling, done = asyncio.Event(), asyncio.Event()

        async def sample() -> None:
            async with gate.holding(0, _later(), "group 1"):
                events.append("sampling")
                sampling.set()
                await done.wait()
                events.append("sampled")

        async def commit() -> None:
            await gate.drained(1, _later())
            events.append("drained")

        group = asyncio.create_task(sample())
        await asyncio.sleep(0)
        assert events == []
        gate.commit(0)
        await sampling.wait()
        swap = asyncio.create_task(commit())
        await asyncio.sleep(0)
        done.set()
        await asyncio.gather(group, swap)
        return events

    assert asyncio.run(scenario()) == ["sampling", "sampled", "drained"]


def test_a_group_that_waits_for_the_next_version_does_not_hold_back_its_commit() -> None:
    async def scenario() -> bool:
        gate = VersionGate("r0")
        gate.commit(0)

        async def sample() -> bool:
            async with gate.holding(1, _later(), "group 9"):
                return gate.serving == 1

        group = asyncio.create_task(sample())
        await asyncio.sleep(0)
        await gate.drained(1, _later())
        gate.commit(1)
        return await group

    assert asyncio.run(scenario())


def test_a_wait_that_ends_says_why() -> None:
    async def scenario() -> None:
        gate = VersionGate("r0")
        gate.commit(3)
        gate.staged = 4
        async with gate.holding(4, _later(0.01), "group 12"):
            raise AssertionError("version 4 never serves")

    expected = (
        "group 12 waited for policy version 4: replica r0 serves version 3 and version 4 is staged but not committed"
    )
    with pytest.raises(DeadlineError, match=expected):
        asyncio.run(scenario())


def test_a_commit_that_waits_too_long_counts_the_groups() -> None:
    async def scenario() -> None:
        gate = VersionGate("r0")
        gate.commit(0)
        async with gate.holding(0, _later(), "group 1"), gate.holding(0, _later(), "group 2"):
            await gate.drained(1, _later(0.01))

    with pytest.raises(DeadlineError, match="committing policy version 1 waited for 2 groups"):
        asyncio.run(scenario())


def test_a_replaced_version_does_not_come_back() -> None:
    async def scenario() -> None:
        gate = VersionGate("r0")
        gate.commit(5)
        async with gate.holding(4, _later(), "group 2"):
            raise AssertionError("version 4 is gone")

    with pytest.raises(LocalError, match="asks for policy version 4, which was replaced"):
        asyncio.run(scenario())


class FakeEngine:
    """Finishes a group per step; refuses group 13; breaks in the step of group 99; never finishes group 7."""

    def __init__(self) -> None:
        self.groups: dict[int, GroupRequest] = {}
        self.batches: list[list[int]] = []
        self.cancelled: list[int] = []
        self.resets = 0
        self._handle = 0

    @property
    def has_work(self) -> bool:
        return any(request.group_id != 7 for request in self.groups.values())

    def submit(self, request: GroupRequest) -> int:
        if request.group_id == 13:
            raise UserError("group 13 does not fit")
        self._handle += 1
        self.groups[self._handle] = request
        return self._handle

    def plan(self) -> Plan | None:
        self.batches.append(sorted(request.group_id for request in self.groups.values()))
        return Plan("decode", 8) if self.has_work else None

    def step(self, plan: Plan) -> list[GroupResult]:
        handle = next(h for h, request in self.groups.items() if request.group_id != 7)
        request = self.groups.pop(handle)
        if request.group_id == 99:
            raise ValueError("boom")
        empty: tuple[np.ndarray[Any, Any], ...] = (np.zeros(0),)
        return [GroupResult(handle, request.group_id, empty, empty, empty, ("stop",), 0.0)]

    def cancel(self, handle: int) -> bool:
        self.cancelled.append(self.groups.pop(handle).group_id)
        return True

    def reset(self) -> None:
        self.groups.clear()
        self.resets += 1


def _request(group_id: int) -> GroupRequest:
    return GroupRequest(group_id, (1,), 1, 0, SamplingParams(), 0)


def _drive(scenario: Callable[[EngineDriver, FakeEngine], Any]) -> FakeEngine:
    engine = FakeEngine()

    async def main() -> None:
        with concurrent.futures.ThreadPoolExecutor(1) as thread:

            def submit(fn: Callable[[], T], /) -> concurrent.futures.Future[T]:
                return thread.submit(fn)

            await scenario(EngineDriver(engine, asyncio.get_running_loop(), submit), engine)  # type: ignore[arg-type]

    asyncio.run(main())
    return engine


def test_groups_submitted_together_enter_the_engine_together() -> None:
    async def scenario(driver: EngineDriver, engine: FakeEngine) -> None:
        results = await asyncio.gather(*(driver.sample(_request(g)) for g in (1, 2, 3)))
        assert [result.group_id for result in results] == [1, 2, 3]

    assert _drive(scenario).batches[0] == [1, 2, 3]


def test_a_refused_group_fails_alone() -> None:
    async def scenario(driver: EngineDriver, engine: FakeEngine) -> None:
        results = await asyncio.gather(*(driver.sample(_request(g)) for g in (1, 13, 2)), return_exceptions=True)
        assert isinstance(results[1], UserError)
        assert [r.group_id for r in (results[0], results[2]) if isinstance(r, GroupResult)] == [1, 2]

    _drive(scenario)


def test_a_failed_step_fails_its_groups_and_the_engine_goes_on() -> None:
    async def scenario(driver: EngineDriver, engine: FakeEngine) -> None:
        results = await asyncio.gather(*(driver.sample(_request(g)) for g in (99, 2)), return_exceptions=True)
        assert all(isinstance(r, LocalError) and "ValueError: boom" in str(r) for r in results)
        assert (await driver.sample(_request(3))).group_id == 3

    assert _drive(scenario).resets == 1


def test_cancelling_a_call_cancels_its_group() -> None:
    async def scenario(driver: EngineDriver, engine: FakeEngine) -> None:
        task = asyncio.create_task(driver.sample(_request(7)))
        await driver.sample(_request(1))  # 7 is in the engine now
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await driver.on_engine(lambda: list(engine.cancelled)) == [7]

    _drive(scenario)
