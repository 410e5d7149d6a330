"""What a reward function may return, checked where it returns it.

Owns the one rule: a value per sample, each a finite number or a dict of finite numbers that has "reward".
Must not know processes or the run. Called by the reward child.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

__all__ = ["BadValueError", "check_rewards"]

_MAX_FLOAT32 = float(np.finfo(np.float32).max)


class BadValueError(Exception):
    """A return value that is not a reward. `sample_index` is None where the whole value is at fault."""

    def __init__(self, problem: str, found: str, sample_index: int | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.found = found
        self.sample_index = sample_index


def check_rewards(values: Any, n: int) -> list[dict[str, float]]:
    """One dict of finite floats per sample: "reward" is what is trained on, other keys are metrics.

    `values` is what a reward function returned for n samples: a sequence or array of numbers (bool counts as
    0 or 1) or of mappings from text to numbers. BadValueError names the first sample whose value is neither.
    """
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise BadValueError(f"expected a sequence of {n} rewards", _describe(values))
    values = list(values)
    if len(values) != n:
        raise BadValueError(f"expected {n} rewards, one per sample", f"{len(values)} values: {_shorten(values)}")
    return [_check(value, i) for i, value in enumerate(values)]


def _check(value: Any, index: int) -> dict[str, float]:
    if not isinstance(value, Mapping):
        return {"reward": _number(value, index, "")}
    if "reward" not in value:
        raise BadValueError('a dict of rewards needs the key "reward"', _describe(value), index)
    for key in value:
        if not isinstance(key, str):
            raise BadValueError("the keys of a dict of rewards are text", _describe(key), index)
    return {key: _number(item, index, f" for {key!r}") for key, item in value.items()}


def _number(value: Any, index: int, which: str) -> float:
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if not isinstance(value, numbers.Real | np.bool_):
        raise BadValueError(f"expected a number{which}", _describe(value), index)
    try:
        number = float(value)
    except OverflowError:  # an int of hundreds of digits
        number = math.inf
    if not abs(number) <= _MAX_FLOAT32:  # false for a NaN
        raise BadValueError(f"expected a finite float32{which}", repr(number), index)
    return number


def _describe(value: Any) -> str:
    return f"{_shorten(value)} ({type(value).__name__})"


def _shorten(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # a user's __repr__ may raise anything
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= 200 else text[:197] + "..."
