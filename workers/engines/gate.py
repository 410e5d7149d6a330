"""Which policy version a replica serves, who samples from it, and who waits for it.

Owns the rule of deterministic mode: a group samples from exactly the version it asks for, and a version is replaced
only when no group that asks for an older one is left. Must not know engines or jax. Called by the rollout service on
the network loop; nothing here may be touched from another thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable

from waypath.proto.errors import DeadlineError, LocalError


class VersionGate:
    """``serving`` is the committed version (None before the first), ``staged`` the one that may be committed next."""

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self._active: Counter[int] = Counter()
        self._changed = asyncio.Event()
        self.serving: int | None = None
        self.staged: int | None = None

    @contextlib.asynccontextmanager
    async def holding(self, version: int, deadline: float, what: str) -> AsyncIterator[None]:
        """Wait until ``version`` serves, then keep it serving while the block runs.

        ``deadline`` is on the ``time.monotonic()`` clock. DeadlineError says what the replica serves instead;
        LocalError where the version was replaced already and will not come back.
        """
        self._active[version] += 1
        try:
            await self._until(
                lambda: self.serving is not None and self.serving >= version,
                deadline,
                lambda: f"{what} waited for policy version {version}: {self.state()}",
            )
            if self.serving != version:
                raise LocalError(f"{what} asks for policy version {version}, which was replaced: {self.state()}")
            yield
        finally:
            self._active[version] -= 1
            self._wake()

    async def drained(self, version: int, deadline: float) -> None:
        """Wait until no group holds, or waits for, a version older than ``version``; DeadlineError counts them."""

        def older() -> int:
            return sum(count for held, count in self._active.items() if held < version)

        await self._until(
            lambda: not older(),
            deadline,
            lambda: (
                f"committing policy version {version} waited for {older()} groups of older versions: {self.state()}"
            ),
        )
        self._active = +self._active  # forget versions that nobody holds

    def commit(self, version: int) -> None:
        """Record that ``version`` serves now and wake who waits for it."""
        self.serving, self.staged = version, None
        self._wake()

    def state(self) -> str:
        """What the replica serves and has staged, for errors and activity texts."""
        serving = "no version" if self.serving is None else f"version {self.serving}"
        staged = "nothing is staged" if self.staged is None else f"version {self.staged} is staged but not committed"
        return f"replica {self._replica} serves {serving} and {staged}"

    async def _until(self, done: Callable[[], bool], deadline: float, cause: Callable[[], str]) -> None:
        while not done():
            changed = self._changed
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await changed.wait()
            except TimeoutError:
                raise DeadlineError(cause()) from None

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
