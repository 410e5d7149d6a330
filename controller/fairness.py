"""Weighted fair sharing: whose execution is admitted next where several owners want the same workers.

Start-time fair queuing (Goyal, Vin, Cheng 1996): an owner's next execution has a start tag, the later of the system's virtual
time and the finish tag of the one before; the finish tag is the start plus cost over weight. The smallest start tag goes first.
An owner that was idle starts at the present virtual time: it saves up nothing.

Within one owner order is that of submission. Executions of one kind (`group`: of one program) stand in a line, so that whoever
looks for the next to go sees the head of each line, not the whole queue.

Must not know: workers, programs. Kept by admission.py.
"""

from __future__ import annotations

from waypath.proto.errors import ConfigError

MAX_WEIGHT = 1e6


class FairQueue:
    """Executions that wait, by owner."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[str, dict[str, int]]] = {}
        self._entries: dict[str, tuple[str, str, int]] = {}
        self._counts: dict[str, int] = {}
        self._weights: dict[str, float] = {}
        self._finish: dict[str, float] = {}
        self._virtual = 0.0
        self._number = 0

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
        return self._counts.get(owner, 0)

    def add(self, owner: str, execution_id: str, cost: int, group: str = "") -> None:
        """One more waits. `cost` is what it will take, in any unit."""
        self._number += 1
        self._lines.setdefault(owner, {}).setdefault(group, {})[execution_id] = self._number
        self._entries[execution_id] = (owner, group, cost)
        self._counts[owner] = self._counts.get(owner, 0) + 1

    def remove(self, execution_id: str) -> None:
        """It waits no longer; unknown ones are fine."""
        entry = self._entries.pop(execution_id, None)
        if entry is None:
            return
        owner, group, _ = entry
        lines = self._lines[owner]
        del lines[group][execution_id]
        if not lines[group]:
            del lines[group]
        self._counts[owner] -= 1
        if not lines:
            del self._lines[owner], self._counts[owner]

    def owners(self) -> list[str]:
        """The owners with something waiting, who is to go first first; the earlier one on a tie."""
        if len(self._lines) < 2:
            return list(self._lines)
        return sorted(self._lines, key=self._start)

    def heads(self, owner: str) -> list[str]:
        """The first execution of each of the owner's lines, in order of submission."""
        lines = self._lines[owner]
        if len(lines) == 1:
            return [next(iter(line)) for line in lines.values()]
        return [
            head
            for _, head in sorted((number, head) for head, number in (next(iter(n.items())) for n in lines.values()))
        ]

    def admit(self, execution_id: str) -> None:
        """It goes: moves its owner's tags and the virtual time."""
        owner, _, cost = self._entries[execution_id]
        start = self._start(owner)
        self.remove(execution_id)
        self._virtual = max(self._virtual, start)
        self._finish[owner] = start + cost / self._weights.get(owner, 1.0)

    def _start(self, owner: str) -> float:
        return max(self._virtual, self._finish.get(owner, 0.0))
