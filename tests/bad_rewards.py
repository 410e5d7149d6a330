"""Reward functions that a careless user might write; each does one thing wrong."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from typing import Any


def raises(samples: Sequence[Any], **options: Any) -> list[float]:
    """Raises."""
    return [1 / 0 for _ in samples]


def nan(samples: Sequence[Any], **options: Any) -> list[float]:
    """Returns NaN."""
    return [float("nan") for _ in samples]


def too_few(samples: Sequence[Any], **options: Any) -> list[float]:
    """Returns one value too few."""
    return [1.0 for _ in samples][1:]


def not_a_number(samples: Sequence[Any], **options: Any) -> list[Any]:
    """Returns a text."""
    return ["high" for _ in samples]


def hangs(samples: Sequence[Any], **options: Any) -> list[float]:
    """Never returns."""
    threading.Event().wait()
    return [0.0 for _ in samples]


def kills(samples: Sequence[Any], **options: Any) -> list[float]:
    """Kills its own process."""
    os.kill(os.getpid(), signal.SIGKILL)
    return [0.0 for _ in samples]
