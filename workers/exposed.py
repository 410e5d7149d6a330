"""Tensors that peers may read from this worker, by name, and who reads them.

Owns the table of exposures: what is exposed, what of it has arrived, its readers, and taking it down. Must not know gRPC, models
or jax. Called by services (expose, unexpose), the data server and the transfer (reading). Safe to use from every thread.

Theory of operation. A reader holds an exposure open from its first slice to its last (`reading`), and the memory only while
it copies bytes out of it (`using`). `unexpose` refuses new readers and waits for the present ones; with `cut_after_s` those that
stay longer are cut off: their next use raises, and no view is read any more when `unexpose` returns. A replica that relays
exposes tensors that are still arriving: a reader waits until its box has landed (`Arrivals`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from waypath.proto.errors import DeadlineError, LocalError, TransferError, WaypathError
from waypath.proto.layout import Box

__all__ = ["Arrivals", "ExposedTensor", "Exposure", "ExposureTable"]

HostArray = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ExposedTensor:
    """A canonical tensor, or the parts of it that lie here.

    `shape` is the whole tensor's, `dtype` its name. Each box is `(lower, view)`: the element `view[i]` is the
    tensor's element `lower + i`. The views must not change while they are exposed.
    """

    shape: tuple[int, ...]
    dtype: str
    boxes: Sequence[tuple[tuple[int, ...], HostArray]]

    def find(self, lower: Sequence[int], upper: Sequence[int]) -> HostArray | None:
        """The view of the half-open box [lower, upper), or None where no one box here contains it."""
        if len(lower) != len(self.shape) or len(upper) != len(self.shape):
            return None
        for start, view in self.boxes:
            inside = all(s <= a <= b <= s + n for s, a, b, n in zip(start, lower, upper, view.shape, strict=True))
            if inside:
                cut: Any = [slice(a - s, b - s) for s, a, b in zip(start, lower, upper, strict=True)]
                return view[(..., *cut)]
        return None


class Arrivals:
    """Which boxes of tensors that are being received have landed; who needs one waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._landed: dict[str, list[Box]] = {}
        self._waiting: dict[str, list[tuple[Box, concurrent.futures.Future[None]]]] = {}
        self._outcome: WaypathError | None = None
        self._over = False

    def land(self, tensor: str, lower: tuple[int, ...], upper: tuple[int, ...]) -> None:
        """The box [lower, upper) is complete."""
        with self._lock:
            self._landed.setdefault(tensor, []).append((lower, upper))
            waiting = self._waiting.pop(tensor, [])
            ready = [future for box, future in waiting if _within(box, (lower, upper))]
            left = [(box, future) for box, future in waiting if not _within(box, (lower, upper))]
            if left:
                self._waiting[tensor] = left
        _resolve(ready, None)

    def end(self, error: WaypathError | None = None) -> None:
        """All has landed; with `error`, what has not landed never will."""
        with self._lock:
            if self._over:
                return
            self._over, self._outcome = True, error
            waiting = [future for items in self._waiting.values() for _, future in items]
            self._waiting.clear()
        _resolve(waiting, error)

    def arrival(self, tensor: str, lower: Sequence[int], upper: Sequence[int]) -> concurrent.futures.Future[None]:
        """Done when the box has landed, as part of one that did; fails with the error where it never will."""
        box = tuple(lower), tuple(upper)
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        with self._lock:
            here = any(_within(box, landed) for landed in self._landed.get(tensor, ()))
            if not here and not self._over:
                self._waiting.setdefault(tensor, []).append((box, future))
                return future
        _resolve([future], None if here else self._outcome)
        return future


@dataclass(eq=False)
class Exposure:
    """What is exposed under one name. `arrivals` is None where all of it is there."""

    name: str
    tensors: Mapping[str, ExposedTensor]
    arrivals: Arrivals | None = None
    readers: dict[str, int] = field(default_factory=dict)
    closing: bool = False
    cut: bool = False
    busy: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """Around every access to the views' memory. TransferError where the reader was cut off."""
        with self._changed:
            if self.cut:
                raise TransferError(f"{self.name} is exposed no more: this reader took too long")
            self.busy += 1
        try:
            yield
        finally:
            with self._changed:
                self.busy -= 1
                self._changed.notify_all()


class ExposureTable:
    """Exposures by name."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._exposed: dict[str, Exposure] = {}
        self._waiting: dict[str, list[concurrent.futures.Future[None]]] = {}

    def expose(self, name: str, tensors: Mapping[str, ExposedTensor], arrivals: Arrivals | None = None) -> None:
        """Let peers pull slices of `tensors` under `name`, until `unexpose`. LocalError if the name is
        exposed.
        """
        for tensor, exposed in tensors.items():
            for lower, view in exposed.boxes:
                fits = len(lower) == view.ndim == len(exposed.shape) and all(
                    a >= 0 and a + n <= size for a, n, size in zip(lower, view.shape, exposed.shape, strict=True)
                )
                if not fits or view.dtype.name != exposed.dtype:
                    raise LocalError(
                        f"exposing {name}: tensor {tensor} is {exposed.dtype}{list(exposed.shape)}, "
                        f"a box at {list(lower)} is {view.dtype.name}{list(view.shape)}"
                    )
        with self._changed:
            if name in self._exposed:
                raise LocalError(f"{name} is already exposed")
            self._exposed[name] = Exposure(name, dict(tensors), arrivals, _changed=self._changed)
            waiting = self._waiting.pop(name, [])
        _resolve(waiting, None)

    def unexpose(self, name: str, timeout_s: float = 30.0, *, cut_after_s: float | None = None) -> None:
        """Refuse new readers of `name`, wait for the present ones, then forget it; an unknown name is fine.

        Blocks, so an async method calls it with `asyncio.to_thread`. Readers that stay after `cut_after_s` are cut off; without
        it, DeadlineError names those that stay after `timeout_s`; the name is refused to new readers then too.
        """
        began = time.monotonic()
        deadline = began + timeout_s
        with self._changed:
            exposure = self._exposed.get(name)
            if exposure is None:
                return
            exposure.closing = True
            while exposure.readers and not exposure.cut:
                left = (deadline if cut_after_s is None else began + cut_after_s) - time.monotonic()
                if left <= 0 and cut_after_s is None:
                    readers = ", ".join(f"{who} ({n})" for who, n in sorted(exposure.readers.items()))
                    raise DeadlineError(f"unexposing {name}: still read after {timeout_s:g} s by {readers}")
                if left <= 0:
                    exposure.cut = True
                else:
                    self._changed.wait(left)
            while exposure.busy:  # a copy out of memory that is under way: it ends by itself
                self._changed.wait()
            self._exposed.pop(name, None)

    def names(self) -> list[str]:
        """Names of all exposures, also those that are being taken down, sorted."""
        with self._changed:
            return sorted(self._exposed)

    def readers(self, name: str) -> list[str]:
        """Who is in the middle of reading slices of `name`, sorted."""
        with self._changed:
            exposure = self._exposed.get(name)
            return [] if exposure is None else sorted(exposure.readers)

    async def appears(self, name: str) -> None:
        """Returns as soon as `name` is exposed. Cancel it to give up."""
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        with self._changed:
            if name in self._exposed:
                return
            self._waiting.setdefault(name, []).append(future)
        try:
            await asyncio.wrap_future(future)
        finally:
            with self._changed:
                left = [one for one in self._waiting.pop(name, []) if one is not future]
                if left:
                    self._waiting[name] = left

    @contextlib.contextmanager
    def reading(self, name: str, reader: str) -> Iterator[Exposure]:
        """Hold an exposure open while slices are read from it. TransferError if it is not exposed (any
        more).
        """
        with self._changed:
            exposure = self._exposed.get(name)
            if exposure is None or exposure.closing:
                exposed = ", ".join(sorted(n for n, e in self._exposed.items() if not e.closing)) or "nothing"
                raise TransferError(f"{name} is not exposed here; exposed: {exposed}")
            exposure.readers[reader] = exposure.readers.get(reader, 0) + 1
        try:
            yield exposure
        finally:
            with self._changed:
                exposure.readers[reader] -= 1
                if not exposure.readers[reader]:
                    del exposure.readers[reader]
                self._changed.notify_all()


def _within(box: Box, other: Box) -> bool:
    return all(c <= a and b <= d for a, b, c, d in zip(*box, *other, strict=True))


def _resolve(futures: Sequence[concurrent.futures.Future[None]], error: WaypathError | None) -> None:
    for future in futures:
        if future.set_running_or_notify_cancel():
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
