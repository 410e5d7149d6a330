"""Reads a Hugging Face model directory straight into sharded jax arrays.

Each process reads only the bytes of the shards that its devices hold (the files are memory-mapped). Knows
nothing of training or engines; called when a slice is opened. Writing is ``hf_save.py``; headers are
``proto/hf_checkpoint.py``; what is checked before anything is read is ``open.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from waypath.proto.hf_checkpoint import TensorInfo, inspect
from waypath.workers.models.config import ModelConfig
from waypath.workers.models.decoder import Params, tree_of
from waypath.workers.models.hf_save import save_hf
from waypath.workers.models.open import check_tensors, load_config
from waypath.workers.models.views import Leaf, leaf_at

__all__ = ["load_config", "load_params", "save_hf"]

_DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": np.dtype(jnp.bfloat16)}


def load_params(
    directory: str | Path, config: ModelConfig, shardings: Params | None = None, dtype: Any = np.float32
) -> Params:
    """The decoder's parameter dict from ``directory``; bf16 and f16 are converted to ``dtype``.

    ``shardings`` is a parameter-shaped dict of Sharding (``mesh.param_shardings``); default: the first device. Each
    process of a multi-process world calls this with the same arguments and reads its own shards. Raises ModelError.
    """
    info = inspect(directory)
    check_tensors(info, config)
    single = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def load(leaf: Leaf) -> jax.Array:
        sharding = single if shardings is None else leaf_at(shardings, leaf.path)
        return _load_leaf(leaf, info.tensors, sharding, dtype)

    return tree_of(config, load)


def _load_leaf(leaf: Leaf, tensors: dict[str, TensorInfo], sharding: Sharding, dtype: Any) -> jax.Array:
    boxes: dict[tuple[tuple[int, int], ...], np.ndarray[Any, Any]] = {}
    shards = []
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        whole = index or (slice(None),) * len(leaf.shape)
        bounds = tuple(part.indices(size)[:2] for part, size in zip(whole, leaf.shape, strict=True))
        if bounds not in boxes:  # replicas on this process share one read
            boxes[bounds] = _read_box(leaf, tensors, bounds, dtype)
        shards.append(jax.device_put(boxes[bounds], device))
    array = jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards, dtype=dtype)
    # On CPU a shard may alias numpy's memory (and two replicas the same memory), which would cancel its donation.
    return jnp.copy(array)


def _read_box(
    leaf: Leaf, tensors: dict[str, TensorInfo], bounds: tuple[tuple[int, int], ...], dtype: Any
) -> np.ndarray[Any, Any]:
    """Elements ``bounds`` of the leaf, as a fresh array."""
    box = np.empty(tuple(upper - lower for lower, upper in bounds), dtype)
    index = tuple(slice(lower, upper) for lower, upper in bounds)
    if not leaf.stacked:
        box[...] = _mapped(tensors[leaf.name])[index]
        return box
    for row, layer in enumerate(range(*bounds[0])):
        box[row] = _mapped(tensors[leaf.name.format(layer)])[index[1:]]
    return box


def _mapped(tensor: TensorInfo) -> np.ndarray[Any, Any]:
    """The tensor as a read-only view of its file."""
    return np.memmap(tensor.file, _DTYPES[tensor.dtype], mode="r", offset=tensor.start, shape=tensor.shape)
