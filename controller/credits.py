"""Back-pressure: how much work each live worker has been given and not finished.

Must not know: nodes, places, messages. Kept by the scheduler, read by placement and status.
"""

from __future__ import annotations


class Credits:
    """Counts unfinished nodes per worker and execution. `max_in_flight` executions may be admitted to a worker."""

    def __init__(self, max_in_flight: int) -> None:
        self.max_in_flight = max_in_flight
        self._nodes: dict[str, dict[str, int]] = {}

    def open(self, worker: str) -> None:
        """A worker joined, with nothing to do."""
        self._nodes[worker] = {}

    def close(self, worker: str) -> None:
        """A worker is gone."""
        self._nodes.pop(worker, None)

    def take(self, worker: str, execution_id: str) -> None:
        """One more node of the execution was sent to the worker."""
        counts = self._nodes[worker]
        counts[execution_id] = counts.get(execution_id, 0) + 1

    def give_back(self, worker: str, execution_id: str) -> bool:
        """The worker has finished one node (or need not). Returns whether that was its last of the execution."""
        counts = self._nodes.get(worker)
        if counts is None or execution_id not in counts:
            return False
        counts[execution_id] -= 1
        if counts[execution_id] > 0:
            return False
        del counts[execution_id]
        return True

    def settle(self, worker: str, execution_id: str) -> None:
        """The execution is over."""
        self._nodes[worker].pop(execution_id, None)

    def is_busy(self, worker: str, execution_id: str) -> bool:
        """Has the worker unfinished nodes of the execution?"""
        return execution_id in self._nodes.get(worker, {})

    def is_full(self, worker: str) -> bool:
        """Has the worker as many executions as may be admitted to it?"""
        return len(self._nodes[worker]) >= self.max_in_flight

    def executions(self, worker: str) -> int:
        """Number of executions of which the worker has unfinished nodes."""
        return len(self._nodes[worker])

    def nodes(self, worker: str) -> int:
        """Number of nodes that the worker was sent and has not finished."""
        return sum(self._nodes[worker].values())
