"""Digests of canonical tensors: the same number under every sharding, computed where the shards lie.

Owns the mixing function and its two forms, on device and in numpy. Must not know meshes, transfers or policies. Called
by the trainer when it exposes a policy, and by the engines on what they staged.

Theory of operation. The digest of a tensor is, in each of two lanes, the sum modulo 2³² over its elements of
mix(bits, i): `bits` is the element's bit pattern (zero-extended to 32), `i` its row-major index in the whole tensor modulo
2³². A sum does not care about order, so digests of disjoint boxes that cover a tensor add up to its digest; the index
in the mix makes a swap of two elements, or a box in the wrong place, show. The mix is the finaliser of MurmurHash3
(Appleby 2011, fmix32), a bijection of 32 bits, so that any change to a single element changes both lanes.

Example: tensor [[a, b], [c, d]] in two column shards: mix(a, 0) + mix(c, 2) on one device, mix(b, 1) + mix(d, 3) on the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from waypath.workers.models.config import ModelConfig
from waypath.workers.models.decoder import Params
from waypath.workers.models.views import leaf_at, leaves, views

__all__ = ["digest_arrays", "digest_box", "digest_weights"]

Digest = np.ndarray[Any, np.dtype[np.uint32]]

# Per lane: what multiplies the bits, what multiplies the index, what is added to it. Odd, without a common pattern.
_LANES = ((0x9E37_79B1, 0x85EB_CA77, 0xC2B2_AE3D), (0x27D4_EB2F, 0x1656_67B1, 0x7FEB_352D))
_CHUNK = 1 << 20


def digest_weights(config: ModelConfig, params: Params) -> dict[str, Digest]:
    """uint32 [2] for every canonical tensor, over the boxes that this process holds, replicas counted once.

    `params`: float32 or 16-bit arrays under any sharding. Parts of several processes add modulo 2³². No collective.
    Runs on the JAX thread and blocks.
    """
    table = leaves(config)
    totals = [np.zeros((leaf.shape[0] if leaf.stacked else 1, 2), np.uint32) for leaf in table]
    by_device: dict[Any, list[tuple[int, Any]]] = {}
    for i, leaf in enumerate(table):
        for shard in leaf_at(params, leaf.path).addressable_shards:
            if shard.replica_id == 0:
                by_device.setdefault(shard.device, []).append((i, shard))
    for held in by_device.values():
        shapes = tuple(table[i].shape[1:] if table[i].stacked else table[i].shape for i, _ in held)
        stacked = tuple(table[i].stacked for i, _ in held)
        lowers = [np.array([part.start or 0 for part in shard.index], np.uint32) for _, shard in held]
        found = _digest_shards([shard.data for _, shard in held], lowers, shapes, stacked)
        for (i, _), lower, part in zip(held, lowers, found, strict=True):
            first = int(lower[0]) if table[i].stacked else 0
            totals[i][first : first + len(part)] += np.asarray(part)
    position = {leaf.path: i for i, leaf in enumerate(table)}
    return {view.name: totals[position[view.path]][view.index or 0] for view in views(config)}


def digest_arrays(
    arrays: Sequence[jax.Array], lowers: Sequence[Sequence[int]], shapes: Sequence[Sequence[int]]
) -> list[Digest]:
    """uint32 [2] of each array: what the box at `lower` of a tensor of `shape` contributes, on the device. Blocks."""
    starts = [np.array(lower, np.uint32) for lower in lowers]
    found = _digest_shards(list(arrays), starts, tuple(map(tuple, shapes)), (False,) * len(arrays))
    return [np.asarray(part)[0] for part in found]


def digest_box(box: np.ndarray[Any, Any], lower: Sequence[int], shape: Sequence[int]) -> Digest:
    """uint32 [2]: the part of the digest of a tensor of `shape` that the box at `lower` contributes. Plain numpy."""
    bits = _bits_numpy(box).reshape(-1)
    total = np.zeros(2, np.uint32)
    for start in range(0, bits.size, _CHUNK):
        part = bits[start : start + _CHUNK]
        at = np.unravel_index(np.arange(start, start + part.size), box.shape) if box.ndim else ()
        index = np.zeros(part.size, np.uint64)
        for axis, positions in enumerate(at):
            stride = math.prod(shape[axis + 1 :])
            index += (positions.astype(np.uint64) + np.uint64(lower[axis])) * np.uint64(stride)
        low = index.astype(np.uint32)
        for lane, constants in enumerate(_LANES):
            mixed = _mix(part, low, *(np.array(constant, np.uint32) for constant in constants))
            total[lane] += np.sum(mixed, dtype=np.uint32)
    return total


def _mix(bits: Any, index: Any, by_bits: Any, by_index: Any, offset: Any) -> Any:
    """fmix32 of a combination of bits and index; uint32 arrays of numpy or jax."""
    h = (bits * by_bits) ^ (index * by_index + offset)
    u32 = np.uint32
    h = (h ^ (h >> u32(16))) * u32(0x85EB_CA6B)
    h = (h ^ (h >> u32(13))) * u32(0xC2B2_AE35)
    return h ^ (h >> u32(16))


def _bits_numpy(array: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint32]]:
    flat = np.ascontiguousarray(array)
    return flat.view(np.dtype(f"uint{8 * flat.dtype.itemsize}")).astype(np.uint32)


@partial(jax.jit, static_argnums=(2, 3))
def _digest_shards(
    boxes: list[jax.Array],
    lowers: list[jax.Array],
    shapes: tuple[tuple[int, ...], ...],
    stacked: tuple[bool, ...],
) -> list[jax.Array]:
    """Per box, uint32 [layers in the box or 1, 2]. `shapes`: of the canonical tensors."""
    found = []
    for box, lower, shape, by_layer in zip(boxes, lowers, shapes, stacked, strict=True):
        bits = jax.lax.bitcast_convert_type(box, jnp.dtype(f"uint{8 * box.dtype.itemsize}")).astype(jnp.uint32)
        local = bits if by_layer else bits[None]
        origin = lower[1:] if by_layer else lower
        inner = local.shape[1:] or (1,)
        starts = jnp.zeros(inner[:-1], jnp.uint32)
        for axis in range(starts.ndim):
            along = jax.lax.broadcasted_iota(jnp.uint32, starts.shape, axis) + origin[axis]
            starts = starts + along * jnp.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        columns = jnp.arange(inner[-1], dtype=jnp.uint32) + (origin[-1] if shape else jnp.uint32(0))
        rows = local.reshape(local.shape[0], math.prod(inner[:-1]), inner[-1])
        index = starts.reshape(1, -1, 1) + columns
        mixed = [_mix(rows, index, *(jnp.uint32(constant) for constant in constants)) for constants in _LANES]
        found.append(jnp.stack(_sums(mixed), axis=-1))
    return found


def _sums(lanes: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """uint32 [L] of each lane, uint32 [L, R, C].

    One reduction with several operands: XLA:CPU vectorises it and mixes in the same pass over memory; it does neither with a
    reduction for each lane.
    """

    def add(sums: Sequence[jax.Array], parts: Sequence[jax.Array]) -> list[jax.Array]:
        return [total + part for total, part in zip(sums, parts, strict=True)]

    found: Sequence[jax.Array] = jax.lax.reduce(list(lanes), [np.uint32(0)] * len(lanes), add, (1, 2))
    return found
