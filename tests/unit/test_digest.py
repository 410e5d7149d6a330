"""Digests of canonical tensors: one number, whatever the sharding and whoever computes it."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waypath.workers.digest import digest_box, digest_weights
from waypath.workers.mesh import build_mesh, param_shardings
from waypath.workers.models.config import ModelConfig
from waypath.workers.models.decoder import tree_of
from waypath.workers.models.views import views

MODEL = ModelConfig(
    vocab_size=12,
    hidden_size=8,
    intermediate_size=16,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    qk_norm=True,
)


def fmix32(h: int) -> int:
    h ^= h >> 16
    h = h * 0x85EBCA6B % 2**32
    h ^= h >> 13
    h = h * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


def test_two_elements_by_hand() -> None:
    tensor = np.array([1.0, -2.0], np.float32)
    bits = [0x3F800000, 0xC0000000]
    first = sum(fmix32((b * 0x9E3779B1 ^ (i * 0x85EBCA77 + 0xC2B2AE3D)) % 2**32) for i, b in enumerate(bits))
    second = sum(fmix32((b * 0x27D4EB2F ^ (i * 0x165667B1 + 0x7FEB352D)) % 2**32) for i, b in enumerate(bits))
    assert digest_box(tensor, (0,), (2,)).tolist() == [first % 2**32, second % 2**32]


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    cuts=st.lists(st.floats(0, 1), min_size=3, max_size=3),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from([np.float32, ml_dtypes.bfloat16]),
)
def test_disjoint_boxes_add(shape: list[int], cuts: list[float], seed: int, dtype: type) -> None:
    tensor = np.random.default_rng(seed).normal(size=shape).astype(dtype)
    total = np.zeros(2, np.uint32)
    bounds = [(0, int(cut * size), size) for cut, size in zip(cuts, shape, strict=False)]
    for corner in np.ndindex(*[2] * len(shape)):
        lower = [b[c] for b, c in zip(bounds, corner, strict=True)]
        upper = [b[c + 1] for b, c in zip(bounds, corner, strict=True)]
        box = tensor[tuple(slice(a, b) for a, b in zip(lower, upper, strict=True))]
        total += digest_box(box, lower, shape)
    np.testing.assert_array_equal(total, digest_box(tensor, [0] * len(shape), shape))


def test_a_swap_and_a_single_bit_show() -> None:
    tensor = np.arange(6, dtype=np.float32).reshape(2, 3)
    swapped, changed = tensor.copy(), tensor.copy()
    swapped[0, 0], swapped[1, 2] = tensor[1, 2], tensor[0, 0]
    changed.view(np.uint32)[1, 1] ^= 1
    digests = [digest_box(t, (0, 0), (2, 3)) for t in (tensor, swapped, changed)]
    assert np.all(digests[0] != digests[1]) and np.all(digests[0] != digests[2])


@pytest.mark.parametrize(
    ("mesh", "dtype"),
    [
        ({"fsdp": 1}, np.float32),
        ({"fsdp": 4}, np.float32),
        ({"data": 2, "fsdp": 2}, ml_dtypes.bfloat16),
        ({"tensor": 2}, np.float32),
    ],
    ids=str,
)
def test_device_digests_equal_numpy_under_every_sharding(mesh: dict[str, int], dtype: type) -> None:
    rng = np.random.default_rng(0)
    params = tree_of(MODEL, lambda leaf: rng.normal(size=leaf.shape).astype(dtype))
    devices = jax.devices()[: int(np.prod(list(mesh.values())))]
    sharded = jax.device_put(params, param_shardings(MODEL, build_mesh(mesh, devices)))
    found = digest_weights(MODEL, sharded)
    assert list(found) == [view.name for view in views(MODEL)]
    for view in views(MODEL):
        leaf: object = params
        for key in view.path:
            leaf = leaf[key]  # type: ignore[index]
        whole = np.asarray(leaf) if view.index is None else np.asarray(leaf)[view.index]
        np.testing.assert_array_equal(found[view.name], digest_box(whole, [0] * whole.ndim, whole.shape), view.name)
