"""A pool of reward children: groups in, rewards out, whatever user code does.

Owns the children, their replacement, and the words in which a fault of a reward function is told. Must not
know jax, gRPC or the run. Called by the reward service; `score` may also be used by hand to try a reward
function.

A group is one call of the function, on one child, and may take `timeout_s` per sample. A child that hangs,
dies or breaks its protocol is killed with everything it started, and the next group gets a fresh one. A group
is never retried: a reward function that fails once is the user's to mend.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from waypath.proto.errors import ProtocolError, RewardError, TaskError
from waypath.workers.rewards.process import ChildDied, ChildHung, ChildProcess

__all__ = ["RewardGroup", "RewardPool", "RewardSpec"]

START_TIMEOUT_S = 120.0
_WHERE_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class RewardSpec:
    """Which function: the task's own reward, or `function` ("module:attribute"), called with `options`."""

    task: str
    task_options: Mapping[str, Any] = field(default_factory=dict)
    function: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    allow_import: Sequence[str] = ()

    @property
    def name(self) -> str:
        """The function's name in messages."""
        return self.function or f"the reward of task {self.task!r}"


@dataclass(frozen=True)
class RewardGroup:
    """The completions of one prompt, stop tokens stripped, and why each ended ("stop" or "length")."""

    group_id: int
    prompt: str
    row: Mapping[str, Any]
    completions: Sequence[str]
    finish_reasons: Sequence[str]


@dataclass
class _Seat:
    """A place in the pool; its child comes and goes. Owned by whoever took it from the queue."""

    index: int
    child: ChildProcess | None = None


class RewardPool:
    """`processes` children with the same function. A context manager; `close` ends the children."""

    def __init__(self, spec: RewardSpec, processes: int = 1, timeout_s: float = 5.0) -> None:
        self._spec = spec
        self._timeout_s = timeout_s
        self._seats = [_Seat(index) for index in range(processes)]
        self._free: queue.SimpleQueue[_Seat] = queue.SimpleQueue()
        for seat in self._seats:
            self._free.put(seat)
        self._lock = threading.Lock()  # between a child's start and `close`
        self._closed = False
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="reward")

    def start(self) -> None:
        """Start every child and load the function in it.

        TaskError or RewardError for a function that cannot be loaded; the pool is then closed.
        """
        starting = [self._threads.submit(self._start, self._free.get()) for _ in self._seats]
        errors = [error for future in starting if (error := future.exception()) is not None]
        if errors:
            self.close()
            raise errors[0]

    def submit(self, group: RewardGroup) -> Future[list[dict[str, float]]]:
        """Queue a group; the future's result is that of `score`."""
        return self._threads.submit(self.score, group)

    def score(self, group: RewardGroup) -> list[dict[str, float]]:
        """One dict per completion: "reward" and the function's other metrics, all finite.

        RewardError names the function, the group, the sample where it is known, what was found and what to
        do.
        """
        seat = self._free.get()
        try:
            return self._score(self._ready(seat), group)
        finally:
            self._free.put(seat)

    @property
    def pids(self) -> list[int]:
        """Process ids of the live children."""
        return [seat.child.pid for seat in self._seats if seat.child is not None and seat.child.alive]

    def close(self) -> None:
        """End the children. A group that is being scored fails; the pool cannot be used again."""
        with self._lock:
            self._closed = True
            for seat in self._seats:
                if seat.child is not None:
                    seat.child.signal_end()
        self._threads.shutdown(wait=True)  # what is queued finds the pool closed
        for seat in self._seats:
            if seat.child is not None:
                seat.child.kill()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, seat: _Seat) -> None:
        try:
            self._ready(seat)
        finally:
            self._free.put(seat)

    def _ready(self, seat: _Seat) -> ChildProcess:
        """The seat's child, started and loaded if there is none that lives."""
        if seat.child is not None:
            if seat.child.alive:
                return seat.child
            seat.child.kill()
        with self._lock:
            if self._closed:
                raise RewardError(f"{self._spec.name}: the reward pool is closed")
            seat.child = child = ChildProcess(f"reward child {seat.index}")
        try:
            self._load(child)
        except BaseException:
            child.kill()
            raise
        return child

    def _load(self, child: ChildProcess) -> None:
        load = {
            "task": self._spec.task,
            "options": dict(self._spec.task_options),
            "function": self._spec.function,
            "reward_options": dict(self._spec.options),
            "allow_import": list(self._spec.allow_import),
        }
        try:
            answer = child.ask({"load": load}, START_TIMEOUT_S)
        except ChildHung:
            raise RewardError(
                f"{self._spec.name} was not loaded within {START_TIMEOUT_S:.0f} s",
                remedy="Look for work at the top level of its module",
            ) from None
        except ChildDied as died:
            raise RewardError(
                f"{self._spec.name}: the process that loads it {died.how}; it printed:\n{died.log}"
            ) from None
        if "refused" in answer:
            raise TaskError(answer["refused"]["message"], remedy=answer["refused"]["remedy"])

    def _score(self, child: ChildProcess, group: RewardGroup) -> list[dict[str, float]]:
        n = len(group.completions)
        limit_s = self._timeout_s * max(1, n)
        message = {
            "prompt": group.prompt,
            "row": dict(group.row),
            "group_id": group.group_id,
            "completions": list(group.completions),
            "finish_reasons": list(group.finish_reasons),
        }
        try:
            answer = child.ask({"score": message}, limit_s)
        except ChildHung:
            raise self._hung(child, group, limit_s) from None
        except ChildDied as died:
            printed = f"; it last printed:\n{died.log}" if died.log else ""
            raise self._error(
                group,
                None,
                f"its process {died.how}{printed}",
                "Run the function on this group by itself; look for os._exit, native code, too little memory",
            ) from None
        except ProtocolError as error:
            child.kill()
            raise self._error(group, None, f"its process broke the protocol ({error})", "") from None
        if "rewards" in answer:
            rewards: list[dict[str, float]] = answer["rewards"]
            return rewards
        fault = answer["fault"]
        index = fault["sample_index"]
        if "raised" in fault:
            raise self._error(
                group,
                index,
                f"it raised {fault['raised']}: {fault['found']}\n{fault['stack'].rstrip()}",
                "Handle this completion in the function, for example with a reward of 0",
            )
        raise self._error(
            group,
            index,
            f"{fault['problem']}; found {fault['found']}",
            'Return one finite number, or a dict of them with the key "reward", for every sample',
        )

    def _hung(self, child: ChildProcess, group: RewardGroup, limit_s: float) -> RewardError:
        index, stack = None, ""
        try:
            where = child.ask({"where": True}, _WHERE_TIMEOUT_S).get("where", {})
            index, stack = where.get("sample_index"), where.get("stack", "")
        except (ChildHung, ChildDied, ProtocolError):
            stack = ""  # it holds the interpreter, or has just ended: the deadline is what there is to tell
        child.kill()
        n = len(group.completions)
        within = f"{n} samples within {limit_s:g} s (reward.timeout_s = {self._timeout_s:g} each)"
        at = f"; it was at:\n{stack.rstrip()}" if stack else ""
        return self._error(
            group,
            index,
            f"no answer for {within}{at}",
            "Bound the function's own waits, or raise reward.timeout_s",
        )

    def _error(self, group: RewardGroup, index: int | None, problem: str, remedy: str) -> RewardError:
        n = len(group.completions)
        if index is None:
            which = f"group {group.group_id} (samples 0 to {n - 1})"
        else:
            which = f"group {group.group_id}, sample {index} (completion {_quote(group.completions[index])})"
        return RewardError(f"reward function {self._spec.name}, {which}: {problem}", remedy=remedy)


def _quote(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
