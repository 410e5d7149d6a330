"""Sharding rules: where leaves lie, uneven sizes, and that a sharded model computes the same."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from waypath.proto.errors import ConfigError
from waypath.workers.mesh import build_mesh, param_shardings, param_specs, replicated
from waypath.workers.models.config import ModelConfig
from waypath.workers.models.decoder import abstract_params, forward, logits, tree_of

EVEN = ModelConfig(32, 24, 40, 2, 4, 2, 8)
SMOL_HEADS = ModelConfig(33, 24, 40, 2, 9, 3, 4)  # 9 heads, 3 key-value heads, odd vocabulary


def test_each_rule_has_its_axis() -> None:
    specs = param_specs(EVEN, build_mesh({"fsdp": 2, "tensor": 2}))
    assert specs["embed"] == P("tensor", "fsdp")
    assert specs["layers"]["q"] == P(None, "tensor", "fsdp")
    assert specs["layers"]["o"] == P(None, "fsdp", "tensor")
    assert specs["layers"]["down"] == P(None, "fsdp", "tensor")
    assert specs["norm"] == P(None)


def test_axes_that_do_not_divide_move_or_replicate() -> None:
    specs = param_specs(SMOL_HEADS, build_mesh({"fsdp": 2, "tensor": 2}))
    assert specs["embed"] == P(None, ("fsdp", "tensor"))
    assert specs["layers"]["q"] == P(None, None, ("fsdp", "tensor"))
    assert specs["layers"]["o"] == P(None, ("fsdp", "tensor"), None)
    assert specs["layers"]["gate"] == P(None, "tensor", "fsdp")
    odd = ModelConfig(33, 27, 41, 1, 3, 3, 2)
    assert all(
        not any(spec)
        for spec in jax.tree.leaves(param_specs(odd, build_mesh({"fsdp": 4})), is_leaf=lambda x: isinstance(x, P))
    )


@pytest.mark.parametrize(
    ("config", "sizes"),
    [(EVEN, {"fsdp": 2, "tensor": 2}), (SMOL_HEADS, {"fsdp": 2, "tensor": 2}), (SMOL_HEADS, {"data": 2, "fsdp": 2})],
    ids=["even", "uneven", "data"],
)
def test_a_sharded_model_computes_the_same(config: ModelConfig, sizes: dict[str, int]) -> None:
    mesh = build_mesh(sizes)
    generator = np.random.default_rng(0)
    params = tree_of(config, lambda leaf: generator.standard_normal(leaf.shape).astype(np.float32) / 4)
    tokens = generator.integers(0, config.vocab_size, (4, 6), dtype=np.int32)
    positions, segments = np.tile(np.arange(6, dtype=np.int32), (4, 1)), np.ones_like(tokens)

    def run(params: dict[str, Any], *batch: jax.Array) -> jax.Array:
        return logits(config, params, forward(config, params, *batch))

    expected = jax.jit(run)(params, tokens, positions, segments)
    batch = jax.device_put((tokens, positions, segments), NamedSharding(mesh, P(("data", "fsdp"))))
    found = jax.jit(run)(jax.device_put(params, param_shardings(config, mesh)), *batch)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_shardings_follow_the_parameter_tree() -> None:
    mesh = build_mesh({"fsdp": 2}, jax.devices()[:2])
    shardings = param_shardings(EVEN, mesh)
    assert jax.tree.structure(shardings) == jax.tree.structure(abstract_params(EVEN))
    assert shardings["layers"]["up"] == NamedSharding(mesh, P(None, None, "fsdp"))
    assert replicated(mesh).is_fully_replicated


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"model": 4}, r"unknown axes \['model'\]"),
        ({"fsdp": 3}, r"does not use 4 device"),
        ({"fsdp": 0}, r"does not use 4 device"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_mesh(sizes)
