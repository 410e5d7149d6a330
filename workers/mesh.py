"""A slice's mesh, and jax's shardings of parameters on it.

Knows nothing of training, engines or the wire; which leaf lies where is said in ``workers/models/placement.py``. Called by
the trainer and the engines when a slice is opened.
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
from waypath.workers.models.placement import MESH_AXES, RULES, leaf_axes
from waypath.workers.models.views import Leaf


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
    placed = leaf_axes(config, leaf, mesh.shape, rules)
    return PartitionSpec(*(None if not names else names[0] if len(names) == 1 else names for names in placed))


def param_specs(config: ModelConfig, mesh: Mesh, rules: Mapping[str, str | None] = RULES) -> dict[str, Any]:
    """A parameter-shaped dict of PartitionSpec."""
    return tree_of(config, lambda leaf: leaf_spec(config, leaf, mesh, rules))


def param_shardings(config: ModelConfig, mesh: Mesh, rules: Mapping[str, str | None] = RULES) -> dict[str, Any]:
    """A parameter-shaped dict of NamedSharding."""
    return tree_of(config, lambda leaf: NamedSharding(mesh, leaf_spec(config, leaf, mesh, rules)))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same array on every device."""
    return NamedSharding(mesh, PartitionSpec())
