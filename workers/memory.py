"""What a run needs of each process's memory, from its configuration alone.

Owns the one formula for each role. Knows neither jax nor devices. Called by the launcher before a process is started, and
by the trainer and rollout services before they load a model. Activations and what the libraries take are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from waypath.proto.errors import ModelError
from waypath.workers.engines.shape import EngineShape
from waypath.workers.models.config import ModelConfig
from waypath.workers.models.views import leaves

__all__ = ["check_memory", "engine_bytes", "parameter_bytes", "trainer_bytes"]

_REMEDY = {
    "trainer": "use a smaller model, a wider fsdp axis, or a higher limit",
    "inference": "use a smaller model, fewer inference.slots, or a higher limit",
}


def parameter_bytes(model: ModelConfig) -> int:
    """Bytes of the parameters in float32."""
    return 4 * sum(math.prod(leaf.shape) for leaf in leaves(model))


def trainer_bytes(model: ModelConfig, fsdp: int) -> dict[str, int]:
    """Bytes that an update needs on one device, by what for.

    Parameters and AdamW's two moments are divided over the axis `fsdp`; a step gathers the parameters, and holds the
    gradients of one micro-batch beside their sum, both whole.
    """
    whole = parameter_bytes(model)
    return {
        "parameters": whole // fsdp,
        "optimizer": 2 * whole // fsdp,
        "gathered_parameters": whole,
        "gradients": 2 * whole,
    }


def engine_bytes(model: ModelConfig, shape: EngineShape) -> dict[str, int]:
    """Bytes that an engine holds: the serving and the staged weights, and caches and stop table of each lane."""
    row = 2 * 4 * model.num_layers * model.num_kv_heads * model.head_dim  # keys and values of one position
    columns = sum(shape.cache_length(bucket) for bucket in shape.prompt_buckets)
    stop = len(shape.prompt_buckets) * model.vocab_size
    return {"weights": 2 * parameter_bytes(model), "cache": shape.slots * (columns * row + stop)}


def check_memory(role: Literal["trainer", "inference"], parts: Mapping[str, int], limit: int) -> None:
    """Raises ModelError where `parts` together are more than `limit`, the role's memory_limit_bytes (0: no limit)."""
    need = sum(parts.values())
    if limit and need > limit:
        listed = ", ".join(f"{name} {size:,}" for name, size in parts.items())
        raise ModelError(
            f"the model needs {need:,} bytes in each {role} process ({listed}); {role}.memory_limit_bytes = {limit:,}",
            remedy=_REMEDY[role],
        )
