"""The sort task: `40713>` is to be completed to `01347`.

Owns its rows, its reward and the sloppy teacher of the warm start. Must not know jax or the run. Called
through `load_task("sort")`. With a characters-only tokenizer ("0123456789>" and a newline that ends a
completion) a model of a few hundred thousand parameters learns it on a laptop: the teacher teaches the form
and some of the sorting, the reward the rest.

Held-out rule: digits whose sorted form has a CRC-32 of 0 mod 8, so that no answer occurs on both sides.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from waypath.workers.tasks.base import Row, Sample, Split, first_line

__all__ = ["SortTask", "bubble_pass"]

_KEY = 0x536F7274  # "Sort": fixed, so that the rows do not depend on a run's seed


class SortTask:
    """Sorting 4 to 6 digits; the rows are the same for every run."""

    def __init__(self, train_rows: int = 4096, eval_rows: int = 256, min_digits: int = 4, max_digits: int = 6) -> None:
        if train_rows < 1 or eval_rows < 0:
            raise ValueError(f"train_rows {train_rows}, eval_rows {eval_rows}: expected at least 1 and 0")
        if not 2 <= min_digits <= max_digits <= 18:
            raise ValueError(f"digits {min_digits}..{max_digits}: expected 2 <= min_digits <= max_digits <= 18")
        capacity = sum(10**n for n in range(min_digits, max_digits + 1)) // 16
        if max(train_rows, eval_rows) > capacity:
            raise ValueError(
                f"{max(train_rows, eval_rows)} rows of {min_digits}..{max_digits} digits: at most {capacity}"
            )
        self._digits = (min_digits, max_digits)
        wanted: dict[Split, int] = {"train": train_rows, "eval": eval_rows}
        self._rows: dict[Split, list[Row]] = {"train": [], "eval": []}
        seen: set[str] = set()
        for digits in self._draws():
            split: Split = "eval" if _held_out(digits) else "train"
            if digits in seen or len(self._rows[split]) == wanted[split]:
                if all(len(self._rows[s]) == wanted[s] for s in wanted):
                    break
                continue
            seen.add(digits)
            self._rows[split].append({"prompt_id": digits, "digits": digits, "answer": _sorted(digits)})

    def rows(self, split: Split) -> Sequence[Row]:
        """Rows {prompt_id, digits, answer} of "train" or "eval"; prompt_id is the digits."""
        return self._rows[split]

    def prompt(self, row: Row) -> str:
        """The digits and ">"."""
        return f"{row['digits']}>"

    def reward(self, samples: Sequence[Sample], **options: Any) -> list[float]:
        """1.0 if the first line of the completion is the sorted digits, else 0.0. Takes no options."""
        if options:
            raise TypeError(f"sort's reward takes no options; found {sorted(options)}")
        return [float(first_line(sample.completion) == sample.row["answer"]) for sample in samples]

    def demonstrations(self, rng: np.random.Generator, n: int) -> list[tuple[str, str]]:
        """n (prompt, completion) pairs from a sloppy teacher, never with held-out digits.

        A quarter of the completions are right; in the rest the teacher made one bubble pass and stopped, so
        what it wrote has the right digits and its largest one last, and is seldom sorted.
        """
        low, high = self._digits
        pairs: list[tuple[str, str]] = []
        while len(pairs) < n:
            digits = "".join(map(str, rng.integers(0, 10, size=int(rng.integers(low, high + 1)))))
            careful = rng.random() < 0.25
            if not _held_out(digits):
                pairs.append((f"{digits}>", _sorted(digits) if careful else bubble_pass(digits)))
        return pairs

    def _draws(self) -> Iterator[str]:
        low, high = self._digits
        philox = np.random.Philox(key=_KEY)
        while True:
            raw = philox.random_raw((1024, 1 + high))
            lengths = low + raw[:, 0] % np.uint64(high - low + 1)
            for length, row in zip(lengths, raw[:, 1:] % np.uint64(10), strict=True):
                yield "".join(map(str, row[: int(length)]))


def bubble_pass(digits: str) -> str:
    """`digits` after one pass of bubble sort from the left: "40713" becomes "04137"."""
    items = list(digits)
    for i in range(len(items) - 1):
        if items[i] > items[i + 1]:
            items[i], items[i + 1] = items[i + 1], items[i]
    return "".join(items)


def _sorted(digits: str) -> str:
    return "".join(sorted(digits))


def _held_out(digits: str) -> bool:
    return zlib.crc32(_sorted(digits).encode()) % 8 == 0
