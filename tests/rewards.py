"""Rewards for the small job: they differ between the samples of a model with random weights, so that it has a gradient."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from waypath.workers.tasks.base import Sample


def overlap(samples: Sequence[Sample], **options: object) -> list[float]:
    """The share of positions at which the completion has the digit that sorting puts there."""
    return [_overlap(sample) for sample in samples]


def slow(samples: Sequence[Sample], **options: object) -> list[float]:
    """The same after half a second: for tests that act in the middle of a step."""
    threading.Event().wait(0.5)
    return overlap(samples)


def _overlap(sample: Sample) -> float:
    wanted = "".join(sorted(sample.prompt.rstrip(">")))
    hits = sum(a == b for a, b in zip(sample.completion, wanted, strict=False))
    return hits / len(wanted) - 0.01 * len(sample.completion)
