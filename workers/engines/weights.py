"""Two sets of host weights that take turns: one serves, the other is written, sealed, and swapped in.

Owns the memory of an engine's parameters, which box of the shadow set was written, and the swap. Must not know
slots, requests or where the bytes come from. Called by the engine on the thread that owns it; ``view`` alone may be
called by other threads, between ``begin`` and ``seal``.

Theory of operation. Leaves are stacked exactly as the decoder wants them, in buffers aligned to 64 bytes, and a
canonical tensor is a view into one. On CPU ``jax.device_put`` of such a buffer aliases it, so publishing copies
nothing and the swap is a change of pointer; the price is that a buffer must never be written while an array over it
lives. Therefore the arrays over a set are *deleted* (not merely dropped) before the set is written again: whoever
still held one gets an error, never changed numbers. On other devices ``device_put`` copies and the same rules hold.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from waypath.proto.errors import LocalError, TransferError
from waypath.workers.models.config import ModelConfig
from waypath.workers.models.views import View, leaves, views
from waypath.workers.segments import ALIGNMENT_BYTES, Heap, Memory

Array = np.ndarray[Any, Any]
Box = tuple[tuple[int, ...], tuple[int, ...]]
Params = dict[str, Any]


class Coverage:
    """Which elements of each canonical tensor were handed out for writing: each exactly once."""

    def __init__(self, tensors: Iterable[View]) -> None:
        self._shapes = {view.name: view.shape for view in tensors}
        self._boxes: dict[str, list[Box]] = {name: [] for name in self._shapes}
        self._lock = threading.Lock()

    def add(self, tensor: str, lower: tuple[int, ...], upper: tuple[int, ...]) -> None:
        """Records a box; TransferError if the tensor is unknown, or the box lies outside or overlaps another."""
        shape = self._shapes.get(tensor)
        if shape is None:
            raise TransferError(f"staging {tensor!r}: the model has no tensor of that name")
        inside = len(lower) == len(upper) == len(shape) and all(
            0 <= a <= b <= n for a, b, n in zip(lower, upper, shape, strict=True)
        )
        if not inside:
            raise TransferError(f"staging {tensor!r}: box {lower} to {upper} is outside its shape {shape}")
        with self._lock:
            for other in self._boxes[tensor]:
                if _overlap((lower, upper), other):
                    raise TransferError(
                        f"staging {tensor!r}: box {lower} to {upper} overlaps {other[0]} to {other[1]}; "
                        "every element is written exactly once"
                    )
            self._boxes[tensor].append((lower, upper))

    def check_complete(self) -> None:
        """TransferError naming the tensors that have elements which were never handed out."""
        missing = []
        for name, boxes in self._boxes.items():
            written = sum(math.prod(b - a for a, b in zip(*box, strict=True)) for box in boxes)
            if written != math.prod(self._shapes[name]):
                missing.append(f"{name}: {written} of {math.prod(self._shapes[name])} elements")
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise TransferError(f"staged weights are incomplete: {'; '.join(missing[:3])}{more}")


def _overlap(one: Box, two: Box) -> bool:
    return all(max(a, c) < min(b, d) for a, b, c, d in zip(one[0], one[1], two[0], two[1], strict=True))


class _Set:
    """One set of buffers, and the device arrays over them while there are any."""

    def __init__(self, config: ModelConfig, dtype: np.dtype[Any], memory: Memory) -> None:
        self._config, self._dtype, self._memory = config, dtype, memory
        self.arrays: list[jax.Array] = []
        self._allocate()

    def _allocate(self) -> None:
        """All leaves in one buffer, each at a multiple of 64 bytes, so that a CPU device can alias it."""
        starts, size = {}, 0
        for leaf in leaves(self._config):
            starts[leaf.path] = size
            size += -(-math.prod(leaf.shape) * self._dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.buffer = self._memory.allocate(size)
        self.leaves = {
            leaf.path: self.buffer.array[start : start + math.prod(leaf.shape) * self._dtype.itemsize]
            .view(self._dtype)
            .reshape(leaf.shape)
            for leaf, start in zip(leaves(self._config), starts.values(), strict=True)
        }

    def free(self) -> None:
        """The buffer is needed no more."""
        self._memory.free(self.buffer)

    def renew_if_tainted(self) -> None:
        """Takes other memory where a peer may still write to this."""
        if self.buffer.tainted:
            self._memory.free(self.buffer)
            self._allocate()

    def put(self, device: jax.Device) -> Params:
        """The parameter dict over these buffers; on CPU it aliases them."""
        params: Params = {}
        for path, buffer in self.leaves.items():
            at = params
            for key in path[:-1]:
                at = at.setdefault(key, {})
            at[path[-1]] = jax.device_put(buffer, device, may_alias=True)
        self.arrays = jax.tree.leaves(jax.block_until_ready(params))
        return params

    def release(self) -> None:
        """Deletes the device arrays over these buffers, whoever holds them, so that the buffers may be written."""
        for array in self.arrays:
            array.delete()
        alive = sum(not array.is_deleted() for array in self.arrays)
        if alive:
            raise LocalError(f"{alive} arrays over the old weights are still in use; their memory cannot be rewritten")
        self.arrays = []


class WeightStore:
    """The serving parameters and the shadow set. See EngineProtocol for the order of calls and the errors."""

    def __init__(
        self, config: ModelConfig, device: jax.Device, dtype: str = "float32", memory: Memory | None = None
    ) -> None:
        memory = memory or Heap()
        self._device = device
        self._views = {view.name: view for view in views(config)}
        self._sets = (_Set(config, np.dtype(dtype), memory), _Set(config, np.dtype(dtype), memory))
        self._live = 0  # index of the set that serves, once there is a version
        self._staged: Params | None = None
        self._coverage: Coverage | None = None
        self.version: int | None = None
        self.staging_version: int | None = None
        self.params: Params | None = None

    @property
    def nbytes(self) -> int:
        """Host bytes of both sets."""
        return 2 * sum(buffer.nbytes for buffer in self._sets[0].leaves.values())

    def begin(self, version: int) -> None:
        """Opens the shadow set for ``version``."""
        if self.staging_version is not None:
            raise LocalError(
                f"cannot stage policy version {version}: version {self.staging_version} is being staged",
                remedy="commit or abort it first",
            )
        if self.version is not None and version <= self.version:
            raise LocalError(f"cannot stage policy version {version}: version {self.version} serves already")
        self._shadow.release()
        self._shadow.renew_if_tainted()
        self._coverage = Coverage(self._views.values())
        self.staging_version = version

    def view(self, tensor: str, lower: tuple[int, ...], upper: tuple[int, ...]) -> Array:
        """The writable box of a canonical tensor in the shadow set."""
        coverage = self._coverage
        if coverage is None:
            raise LocalError(f"staging {tensor!r}: no publication is open for writing")
        coverage.add(tensor, lower, upper)
        view = self._views[tensor]
        leaf = self._shadow.leaves[view.path]
        whole = leaf if view.index is None else leaf[view.index]
        return whole[tuple(slice(a, b) for a, b in zip(lower, upper, strict=True))]

    def shadow(self) -> dict[str, Array]:
        """The canonical tensors in the shadow set, for reading what has been written so far."""
        leaves_of = self._shadow.leaves
        return {
            name: leaves_of[view.path] if view.index is None else leaves_of[view.path][view.index]
            for name, view in self._views.items()
        }

    def seal(self, digest: Callable[[Params], Any]) -> Any:
        """Ends the writing, puts the parameters on the device and returns ``digest`` of them."""
        if self._coverage is None:
            raise LocalError("cannot seal: no publication is open for writing")
        self._coverage.check_complete()
        self._coverage = None
        self._staged = self._shadow.put(self._device)
        return digest(self._staged)

    def close(self) -> None:
        """Gives the memory back."""
        self.abort()
        for one in self._sets:
            one.release()
            one.free()

    def commit(self, version: int) -> None:
        """Swaps the sealed set in and deletes the arrays over the old one."""
        if self._staged is None or self.staging_version != version:
            state = "nothing is staged" if self.staging_version is None else f"version {self.staging_version} is staged"
            sealed = "" if self._staged is not None or self.staging_version is None else " but not sealed"
            raise LocalError(f"cannot commit policy version {version}: {state}{sealed}")
        old = self._sets[self._live]
        self._live = 1 - self._live
        self.params, self._staged = self._staged, None
        self.version, self.staging_version = version, None
        old.release()

    def abort(self) -> None:
        """Drops what was begun or sealed."""
        self._coverage = self._staged = self.staging_version = None
        self._shadow.release()

    @property
    def _shadow(self) -> _Set:
        return self._sets[1 - self._live]
