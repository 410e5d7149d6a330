"""What a task is: prompts, a reward for completions, and the order in which a run visits the prompts.

Owns the Sample that reward functions receive, the Task protocol, looking a task up by its name in the config,
and the prompt stream. Must not know jax, gRPC or how rewards are run. Called by the rollout service (rows and
prompts), the trainer (warm start) and the reward children (reward).

A task names its rows by `prompt_id`, which may recur in a data set; a run names its groups by `group_id`, the
position in the run's prompt stream, which never recurs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from waypath.proto.errors import TaskError
from waypath.workers.imports import import_attribute

__all__ = [
    "DemonstratingTask",
    "PromptStream",
    "Reward",
    "Row",
    "Sample",
    "Split",
    "Task",
    "demonstrating",
    "first_line",
    "load_task",
]

Row = dict[str, Any]
Split = Literal["train", "eval"]
Reward = float | Mapping[str, float]

BUILT_IN = ("arithmetic", "sort")


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion to score, stop token stripped; `finish_reason` is "stop" or "length".

    `sample_index` counts the samples of the group from 0. `row` is the task's row, as the task returned it.
    """

    prompt: str
    completion: str
    row: Row = field(default_factory=dict)
    group_id: int = 0
    sample_index: int = 0
    finish_reason: str = "stop"


@runtime_checkable
class Task(Protocol):
    """A data set of prompts plus a reward.

    `rows` is the same sequence at every call and in every process; each row is a JSON-able dict with a
    `prompt_id`. `reward` gives one value per sample, in order: a finite number, or a dict of finite numbers
    with the key "reward" (what is trained on) and any others (metrics).
    """

    def rows(self, split: Split) -> Sequence[Row]: ...

    def prompt(self, row: Row) -> str: ...

    def reward(self, samples: Sequence[Sample], **options: Any) -> Sequence[Reward]: ...


@runtime_checkable
class DemonstratingTask(Task, Protocol):
    """A task that can also write examples for the supervised warm start.

    `demonstrations(rng, n)` returns n (prompt, completion) pairs from the train split's side, a function of
    the generator's state alone. A completion has no stop token; the trainer appends the tokenizer's EOS.
    """

    def demonstrations(self, rng: np.random.Generator, n: int) -> list[tuple[str, str]]: ...


def demonstrating(task: Task, steps: int) -> DemonstratingTask:
    """The task, which a warm start of `steps` steps needs demonstrations of; TaskError where it has none."""
    if not isinstance(task, DemonstratingTask):
        raise TaskError(
            f"warm_start.steps = {steps}: {type(task).__name__} has no demonstrations(rng, n)",
            remedy="give the task that method, or set warm_start.steps = 0",
        )
    return task


def first_line(completion: str) -> str:
    """The completion up to its first newline."""
    return completion.split("\n", 1)[0]


def load_task(name: str, options: Mapping[str, Any] | None = None, allow_import: Sequence[str] = ()) -> Task:
    """The task that a config names, built with its options.

    `name` is "arithmetic", "sort", "jsonl:FILE", or an import path "module:attribute" covered by
    `allow_import`. An imported class or factory is called with the options; an imported instance takes none.
    TaskError says what is wrong with the name, the options or the data.
    """
    options = dict(options or {})
    if name == "arithmetic":
        from waypath.workers.tasks.arithmetic import ArithmeticTask

        return _build(name, ArithmeticTask, options)
    if name == "sort":
        from waypath.workers.tasks.sort import SortTask

        return _build(name, SortTask, options)
    if name.startswith("jsonl:"):
        from waypath.workers.tasks.jsonl import JsonlTask

        return _build(name, JsonlTask, {"path": name.removeprefix("jsonl:"), **options})
    if ":" not in name:
        known = ", ".join(BUILT_IN)
        raise TaskError(f"task.name = {name!r}: expected {known}, jsonl:FILE, or an import path 'module:attribute'")
    found = import_attribute(name, allow_import, "task.name")
    if isinstance(found, type) or not isinstance(found, Task):
        if not callable(found):
            raise TaskError(f"task.name = {name!r}: {type(found).__name__} is neither a task nor callable")
        return _build(name, found, options)
    if options:
        raise TaskError(
            f"task.name = {name!r} is a task instance and takes no task.options; found: {', '.join(options)}"
        )
    return found


def _build(name: str, factory: Any, options: dict[str, Any]) -> Task:
    try:
        task = factory(**options)
    except (TypeError, ValueError) as error:
        raise TaskError(f"task {name!r} refuses its task.options {options}: {error}") from error
    if not isinstance(task, Task):
        missing = [a for a in ("rows", "prompt", "reward") if not hasattr(task, a)]
        raise TaskError(
            f"task {name!r}: {type(task).__name__} has no {', '.join(missing)}",
            remedy="A task has rows(split), prompt(row) and reward(samples)",
        )
    return task


class PromptStream:
    """The order in which a run visits the rows of its train split: one permutation per epoch.

    Group g is row `row_index(g)`. Epoch e (groups e·n to e·n + n − 1) visits each of the n rows once, in the
    order that sorts n raw 64-bit draws of Philox keyed by (seed, e): a function of the seed alone, on every
    machine.
    """

    def __init__(self, n_rows: int, seed: int) -> None:
        if n_rows < 1:
            raise TaskError("the task has no train rows; a run needs at least one prompt")
        self._n_rows = n_rows
        self._seed = seed & 0xFFFF_FFFF_FFFF_FFFF
        self._epochs: dict[int, np.ndarray[Any, np.dtype[np.int64]]] = {}

    def row_index(self, group_id: int) -> int:
        """Index into the train rows of group `group_id` (≥ 0)."""
        if group_id < 0:
            raise ValueError(f"group_id {group_id}: expected 0 or more")
        epoch, position = divmod(group_id, self._n_rows)
        order = self._epochs.get(epoch)
        if order is None:
            philox = np.random.Philox(key=np.array([self._seed, epoch], np.uint64))
            order = np.argsort(philox.random_raw(self._n_rows), kind="stable").astype(np.int64)
            for old in sorted(self._epochs)[:-1]:  # steps may straddle two epochs
                del self._epochs[old]
            self._epochs[epoch] = order
        return int(order[position])
