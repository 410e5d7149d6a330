"""Weighted fair sharing: whose execution is admitted next where several owners want the same workers.

Start-time fair queuing (Goyal, Vin, Cheng 1996): an owner's next execution has a start tag, the later of the system's virtual
time and the finish tag of the one before; the finish tag is the start plus cost over weight. The smallest start tag goes first.
An owner that was idle starts at the present virtual time: it saves up nothing. Within one owner order is that of submission.

Must not know: workers, programs. Kept by the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator

from waypath.proto.errors import ConfigError

MAX_WEIGHT = 1e6


class FairQueue:
    """Executions that wait, by owner."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[str, int]] = {}
        self._weights: dict[str, float] = {}
        self._finish: dict[str, float] = {}
        self._virtual = 0.0

    def weigh(self, owner: str, weight: float) -> None:
        """Sets an owner's weight; raises ConfigError where it is no positive number."""
        if not 0.0 < weight <= MAX_WEIGHT:
            raise ConfigError(f"weight: expected more than 0 and at most {MAX_WEIGHT:g}, found {weight!r}", where=owner)
        self._weights[owner] = weight

    def forget(self, owner: str) -> None:
        """The owner is gone, with nothing waiting."""
        self._weights.pop(owner, None)
        self._finish.pop(owner, None)

    def count(self, owner: str) -> int:
        """How many executions of an owner wait."""
        return len(self._waiting.get(owner, ()))

    def add(self, owner: str, execution_id: str, cost: int) -> None:
        """One more waits. `cost` is what it will take, in any unit."""
        self._waiting.setdefault(owner, {})[execution_id] = cost

    def remove(self, owner: str, execution_id: str) -> None:
        """It waits no longer, without having been admitted; unknown ones are fine."""
        waiting = self._waiting.get(owner)
        if waiting is not None and waiting.pop(execution_id, None) is not None and not waiting:
            del self._waiting[owner]

    def owners(self) -> list[str]:
        """The owners with something waiting, who is to go first first; the earlier one on a tie."""
        if len(self._waiting) < 2:
            return list(self._waiting)
        return sorted(self._waiting, key=self._start)

    def waiting(self, owner: str) -> Iterator[str]:
        """The owner's executions in order."""
        return iter(self._waiting.get(owner, ()))

    def admit(self, owner: str, execution_id: str) -> None:
        """It goes: moves the owner's tags and the virtual time."""
        start = self._start(owner)
        cost = self._waiting[owner][execution_id]
        self.remove(owner, execution_id)
        self._virtual = max(self._virtual, start)
        self._finish[owner] = start + cost / self._weights.get(owner, 1.0)

    def _start(self, owner: str) -> float:
        return max(self._virtual, self._finish.get(owner, 0.0))
