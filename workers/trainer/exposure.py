"""Policies that peers may pull from this process, and when the trainer may overwrite them.

Owns the host views of the exposed shards and the rule that donation waits for them. Must not know optimizers or the
wire. Called by `waypath.workers.trainer.service`: `expose` and `close` on the JAX thread, `cached` on any.

Theory of operation. On CPU an exposed tensor is a numpy view of the device buffer, and while such a view lives a donated
buffer is silently kept. So before the trainer donates its state, `close` (1) waits until nobody needs the exposure: the object
that an expose node returned is held by the worker's store until the last stage node has finished, so the exposure is
pinned as long as that object is there; (2) takes the exposure down, waiting for readers in the middle of a pull; (3) forgets
the views. From (2) on a joining replica gets TransferError and waits for the next publication.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from waypath.proto.codecs import Bundle
from waypath.proto.errors import DeadlineError, TransferError, WaypathError
from waypath.proto.layout import Layout, Shard, TensorLayout
from waypath.proto.names import object_id, policy_name
from waypath.workers.digest import digest_weights
from waypath.workers.exposed import ExposedTensor
from waypath.workers.models.config import ModelConfig
from waypath.workers.models.decoder import Params
from waypath.workers.models.views import View, leaf_at, views
from waypath.workers.service import ServiceContext

_POLL_S = 0.005
_ABSENT_S = 5.0  # an object whose execution was cancelled is never put: do not wait for it longer than this


@dataclass
class _Exposed:
    bundle: Bundle
    pins: set[str] = field(default_factory=set)


class Exposures:
    """The policy versions that this process exposes; one at a time."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._exposed: dict[int, _Exposed] = {}

    def expose(self, version: int, model: ModelConfig, params: Params, execution: tuple[str, str]) -> Bundle:
        """Exposes the boxes held here of every canonical tensor, and returns names and digests.

        The bundle: meta {"tensors": names, "version"}, arrays {"digests": uint32 [n, 2]}, of the boxes held here (replicas
        counted once in the world). `execution`: (execution id, node id), whose object pins the exposure.
        """
        digests = digest_weights(model, params)
        tensors = {
            view.name: ExposedTensor(view.shape, str(leaf.dtype), _boxes(leaf, view))
            for view in views(model)
            for leaf in [leaf_at(params, view.path)]
        }
        bundle = Bundle(
            meta={"tensors": list(digests), "version": version},
            arrays={"digests": np.stack(list(digests.values()))},
        )
        self._context.store.exposures.expose(policy_name(version), tensors)
        with self._lock:
            self._exposed[version] = _Exposed(bundle, {object_id(*execution)})
        return bundle

    def cached(self, version: int, execution: tuple[str, str]) -> Bundle:
        """What `expose` returned, if the version is still exposed; pins it. TransferError otherwise."""
        with self._lock:
            found = self._exposed.get(version)
            if found is None:
                held = ", ".join(map(str, self._exposed)) or "none"
                raise TransferError(f"policy version {version} is not exposed (any more); exposed: {held}")
            found.pins.add(object_id(*execution))
            return found.bundle

    def holds(self, version: int) -> bool:
        """Whether the version is exposed."""
        with self._lock:
            return version in self._exposed

    def close(self, deadline: float) -> None:
        """Takes every version down once nobody needs it.

        Waits until `deadline`, in seconds of `time.monotonic()`; DeadlineError then names the objects that pin the version and
        the workers that pull it.
        """
        while (found := self._next()) is not None:
            version, pins = found
            for pin in sorted(pins):
                self._wait_released(pin, version, deadline)
            with self._lock:
                now = self._exposed.get(version)
                if now is not None and now.pins != pins:
                    continue  # a replica joined while we waited
                self._exposed.pop(version, None)
            self._context.store.exposures.unexpose(policy_name(version), max(0.0, deadline - time.monotonic()))

    def _next(self) -> tuple[int, set[str]] | None:
        with self._lock:
            return next(((version, set(found.pins)) for version, found in self._exposed.items()), None)

    def _wait_released(self, pin: str, version: int, deadline: float) -> None:
        """Returns when the object `pin` has left the store."""
        store = self._context.store
        waiting = asyncio.run_coroutine_threadsafe(store.wait(pin), self._context.loop)
        try:
            waiting.result(min(_ABSENT_S, max(0.0, deadline - time.monotonic())))
        except concurrent.futures.TimeoutError:
            waiting.cancel()
            return
        except WaypathError:
            return
        pause = threading.Event()
        while pin in store.names():
            if time.monotonic() > deadline:
                pulling = ", ".join(store.exposures.readers(policy_name(version))) or "nobody"
                raise DeadlineError(
                    f"policy version {version} is still needed: {pin} is held for a replica that has not finished "
                    f"staging; pulling now: {pulling}",
                    remedy="see which stage node is unfinished; the trainer cannot overwrite what is being pulled",
                )
            pause.wait(_POLL_S)


def local_layout(model: ModelConfig, params: Params, worker: str) -> Layout:
    """Where the boxes of this process's devices lie, replicas included; `device` counts the local devices."""
    order = {device: i for i, device in enumerate(jax.local_devices())}
    tensors = {}
    for view in views(model):
        leaf = leaf_at(params, view.path)
        shards = []
        for shard in leaf.addressable_shards:
            lower, upper = _box(shard.index, view)
            shards.append(Shard(worker, order[shard.device], lower, upper))
        tensors[view.name] = TensorLayout(view.name, view.shape, str(leaf.dtype), tuple(shards))
    return Layout(tensors)


def _box(index: tuple[slice, ...], view: View) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The bounds of a shard of a leaf in the view's own axes; layers are never divided."""
    own = index if view.index is None else index[1:]
    bounds = [part.indices(size)[:2] for part, size in zip(own, view.shape, strict=True)]
    return tuple(a for a, _ in bounds), tuple(b for _, b in bounds)


def _boxes(leaf: Any, view: View) -> list[tuple[tuple[int, ...], np.ndarray[Any, Any]]]:
    """One host view per distinct box held here: on CPU without a copy."""
    found: dict[tuple[int, ...], np.ndarray[Any, Any]] = {}
    for shard in leaf.addressable_shards:
        lower = _box(shard.index, view)[0]
        if lower not in found:
            host = np.asarray(shard.data)
            found[lower] = host if view.index is None else host[view.index]
    return list(found.items())
