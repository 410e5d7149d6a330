"""Logical axes to mesh axes: builds a slice's mesh and the shardings of parameters on it.

Owns the rules object (which logical axis of ``views.leaves`` lies on which mesh axis). Knows nothing of
training, engines or the wire; called by the trainer and the engines when a slice is opened.

Mesh axes: ``data`` (batch only), ``fsdp`` (batch, and parameters' ``embed``), ``tensor`` (heads, ff, vocab).
jax refuses uneven shards, so an axis that does not divide moves to another dimension of the leaf that it does
divide, else the leaf is replicated over it. Heads are divided whole: 9 heads over ``tensor = 2`` is not an
even split, although 576 rows would be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from waypath.proto.errors import ConfigError
from waypath.workers.models.config import ModelConfig
from waypath.workers.models.decoder import tree_of
from waypath.workers.models.views import Leaf

MESH_AXES = ("data", "fsdp", "tensor")

RULES: Mapping[str, str | None] = {
    "layers": None,
    "norm": None,
    "head_dim": None,
    "embed": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "ff": "tensor",
}


def build_mesh(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with axes ``data, fsdp, tensor`` over ``devices`` (default: all), in their given order.

    Axes left out of ``sizes`` have size 1. Raises ConfigError for an unknown axis or a product that is not
    the number of devices.
    """
    found = list(jax.devices() if devices is None else devices)
    unknown = sorted(set(sizes) - set(MESH_AXES))
    if unknown:
        raise ConfigError(f"mesh: unknown axes {unknown}; expected some of {list(MESH_AXES)}")
    shape = tuple(int(sizes.get(axis, 1)) for axis in MESH_AXES)
    if min(shape) < 1 or math.prod(shape) != len(found):
        raise ConfigError(f"mesh: {dict(zip(MESH_AXES, shape, strict=True))} does not use {len(found)} device(s)")
    array = np.empty(len(found), dtype=object)
    array[:] = found
    return Mesh(array.reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def leaf_spec(config: ModelConfig, leaf: Leaf, mesh: Mesh, rules: Mapping[str, str | None] = RULES) -> PartitionSpec:
    """Where ``leaf`` lies on ``mesh``."""
    units = {"heads": config.num_heads, "kv_heads": config.num_kv_heads}
    placed: list[list[str]] = [[] for _ in leaf.shape]
    homeless: list[str] = []
    for dimension, (axis, size) in enumerate(zip(leaf.axes, leaf.shape, strict=True)):
        target = rules[axis]
        if target is None or mesh.shape[target] == 1:
            continue
        if units.get(axis, size) % mesh.shape[target]:
            homeless.append(target)
        else:
            placed[dimension].append(target)
    for target in homeless:
        for dimension, (axis, size) in enumerate(zip(leaf.axes, leaf.shape, strict=True)):
            if axis in units or rules[axis] is None:
                continue
            if size % math.prod(mesh.shape[name] for name in (*placed[dimension], target)) == 0:
                placed[dimension].append(target)
                break
    return PartitionSpec(*(None if not names else names[0] if len(names) == 1 else tuple(names) for names in placed))


def param_specs(config: ModelConfig, mesh: Mesh, rules: Mapping[str, str | None] = RULES) -> dict[str, Any]:
    """A parameter-shaped dict of PartitionSpec."""
    return tree_of(config, lambda leaf: leaf_spec(config, leaf, mesh, rules))


def param_shardings(config: ModelConfig, mesh: Mesh, rules: Mapping[str, str | None] = RULES) -> dict[str, Any]:
    """A parameter-shaped dict of NamedSharding."""
    return tree_of(config, lambda leaf: NamedSharding(mesh, leaf_spec(config, leaf, mesh, rules)))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same array on every device."""
    return NamedSharding(mesh, PartitionSpec())
