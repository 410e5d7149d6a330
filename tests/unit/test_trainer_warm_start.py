"""Demonstrations as rows, and what is wrong with them said by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from waypath.proto.errors import TaskError
from waypath.workers.models.tokenizer import EOS_ID, char_text_tokenizer
from waypath.workers.tasks.arithmetic import ArithmeticTask
from waypath.workers.tasks.base import Task
from waypath.workers.tasks.sort import SortTask
from waypath.workers.trainer.packing import MicroBatches, PackShape
from waypath.workers.trainer.warm_start import supervised_batches


class Shown(SortTask):
    def __init__(self, *pairs: tuple[str, str]) -> None:
        super().__init__(train_rows=1, eval_rows=0)
        self._pairs = list(pairs)

    def demonstrations(self, rng: np.random.Generator, n: int) -> list[tuple[str, str]]:
        return self._pairs


def batches(task: Task, **options: Any) -> list[tuple[MicroBatches, float]]:
    settings = {"seed": 0, "steps": 1, "batch_size": 2} | options
    return list(supervised_batches(task, char_text_tokenizer("012>"), [], PackShape(2, 6, 3), **settings))


def test_completion_and_end_are_scored() -> None:
    ((made, scored),) = batches(Shown(("2>", "1"), ("10>", "01")))
    assert made.count == 1 and scored == 5.0
    assert made.tokens[0].tolist() == [[5, 6, 4, EOS_ID, 0, 0], [4, 3, 6, 3, 4, EOS_ID]]
    assert made.mask[0].tolist() == [[1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize("pairs", [[("2>", "1")], [("2>", "1")] * 3])
def test_another_number_than_asked_for_is_refused(pairs: list[tuple[str, str]]) -> None:
    with pytest.raises(TaskError, match=f"returned {len(pairs)} pairs, warm_start.batch_size = 2 were asked for"):
        batches(Shown(*pairs))


def test_a_character_that_the_tokenizer_lacks_is_named() -> None:
    with pytest.raises(TaskError, match=r"demonstration '2>' '1!': the tokenizer lacks '!'"):
        batches(Shown(("2>", "1!"), ("1>", "1")))


def test_a_task_without_demonstrations_is_refused() -> None:
    with pytest.raises(TaskError, match="ArithmeticTask has no demonstrations"):
        batches(ArithmeticTask())
