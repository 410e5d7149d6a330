"""A task of your own: say a word backwards.

Run it with `task.name = "examples.my_task:BackwardsTask"` and workers started with `--allow-import examples`
(the launcher passes `reward.allow_import = ["examples"]` on). A task has rows, a prompt for each row and a
reward for completions; `demonstrations` is optional and feeds the warm start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from waypath.workers.tasks.base import Row, Sample, Split

WORDS = [
    "tree",
    "house",
    "river",
    "stone",
    "cloud",
    "bird",
    "lamp",
    "road",
    "window",
    "garden",
    "paper",
    "music",
]


class BackwardsTask:
    """`tree>` is to be completed to `eert`. Options of [task.options] arrive here."""

    def __init__(self, eval_words: int = 3) -> None:
        rows: list[Row] = [{"prompt_id": word, "answer": word[::-1]} for word in WORDS]
        self._rows: dict[Split, list[Row]] = {"train": rows[eval_words:], "eval": rows[:eval_words]}

    def rows(self, split: Split) -> Sequence[Row]:
        return self._rows[split]

    def prompt(self, row: Row) -> str:
        return f"{row['prompt_id']}>"

    def reward(self, samples: Sequence[Sample], **options: Any) -> list[dict[str, float]]:
        return [closeness(sample.completion, sample.row["answer"]) for sample in samples]


def closeness(completion: str, answer: str) -> dict[str, float]:
    """1 for the answer, less for one that agrees in some positions; "length_error" is only logged."""
    right = sum(found == wanted for found, wanted in zip(completion, answer, strict=False))
    return {
        "reward": right / max(len(completion), len(answer)),
        "length_error": float(abs(len(completion) - len(answer))),
    }


def short_answers(samples: Sequence[Sample], limit: int = 4) -> list[float]:
    """A reward on its own, for `reward.function = "examples.my_task:short_answers"`: brevity, whatever the
    task."""
    return [float(len(sample.completion) <= limit) for sample in samples]
