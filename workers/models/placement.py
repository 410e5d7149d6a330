"""Where a decoder's leaves lie: logical axes to mesh axes, and from there the layouts of trainers and replicas.

Owns the rules (which logical axis of ``views.leaves`` lies on which mesh axis). Knows neither jax nor devices, so that a
plan can be made before a process is started; called by ``workers/mesh.py`` (shardings), the rollout service and ``waypath plan``.

Mesh axes: ``data`` (batch only), ``fsdp`` (batch, and parameters' ``embed``), ``tensor`` (heads, ff, vocab).
jax refuses uneven shards, so an axis that does not divide moves to another dimension of the leaf that it does
divide, else the leaf is replicated over it. Heads are divided whole: 9 heads over ``tensor = 2`` is not an
even split, although 576 rows would be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from waypath.proto.layout import Layout, Shard, TensorLayout, device_boxes
from waypath.workers.models.config import ModelConfig
from waypath.workers.models.views import Leaf, leaves, views

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


def leaf_axes(
    config: ModelConfig, leaf: Leaf, mesh: Mapping[str, int], rules: Mapping[str, str | None] = RULES
) -> tuple[tuple[str, ...], ...]:
    """Per dimension of ``leaf`` the axes of ``mesh`` (all of MESH_AXES, with their sizes) that split it, outermost first."""
    units = {"heads": config.num_heads, "kv_heads": config.num_kv_heads}
    placed: list[list[str]] = [[] for _ in leaf.shape]
    homeless: list[str] = []
    for dimension, (axis, size) in enumerate(zip(leaf.axes, leaf.shape, strict=True)):
        target = rules[axis]
        if target is None or mesh[target] == 1:
            continue
        if units.get(axis, size) % mesh[target]:
            homeless.append(target)
        else:
            placed[dimension].append(target)
    for target in homeless:
        for dimension, (axis, size) in enumerate(zip(leaf.axes, leaf.shape, strict=True)):
            if axis in units or rules[axis] is None:
                continue
            if size % math.prod(mesh[name] for name in (*placed[dimension], target)) == 0:
                placed[dimension].append(target)
                break
    return tuple(map(tuple, placed))


def trainer_layout(config: ModelConfig, mesh: Mapping[str, int], workers: Sequence[str]) -> Layout:
    """The layout of a trainer whose ``workers`` bring one device each, in the mesh's row-major order."""
    sizes = {axis: mesh.get(axis, 1) for axis in MESH_AXES}
    shards = {}
    for leaf in leaves(config):
        boxes = device_boxes(leaf.shape, leaf_axes(config, leaf, sizes), MESH_AXES, tuple(sizes.values()))
        own = [(lower[leaf.stacked :], upper[leaf.stacked :]) for lower, upper in boxes]
        shards[leaf.path] = tuple(Shard(worker, 0, *box) for worker, box in zip(workers, own, strict=True))
    return Layout({v.name: TensorLayout(v.name, v.shape, "float32", shards[v.path]) for v in views(config)})


def replica_layout(config: ModelConfig, worker: str) -> Layout:
    """The layout that a replica wants: every canonical tensor whole, on its one device."""
    return Layout(
        {
            view.name: TensorLayout(
                view.name, view.shape, "float32", (Shard(worker, 0, (0,) * len(view.shape), view.shape),)
            )
            for view in views(config)
        }
    )
