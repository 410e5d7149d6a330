"""Formulas of policy optimisation against values computed by hand in float64."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from waypath.proto.errors import RewardError
from waypath.workers.algorithms.advantages import (
    check_rewards,
    group_advantages,
    is_constant,
    shuffle_advantages,
)
from waypath.workers.algorithms.logprobs import token_logp
from waypath.workers.algorithms.losses import k3_kl, ppo_clip, token_mean


def test_group_advantages_by_hand() -> None:
    # mean 0.25, deviations (0.75, -0.25 x3), variance (0.5625 + 3 * 0.0625) / 3 = 0.25, sigma 0.5
    found = group_advantages(np.array([1.0, 0.0, 0.0, 0.0]))
    np.testing.assert_allclose(found, np.array([0.75, -0.25, -0.25, -0.25]) / (0.5 + 1e-6), rtol=1e-12)


def test_advantages_without_normalisation_are_centred_rewards() -> None:
    np.testing.assert_allclose(group_advantages(np.array([3.0, 1.0, 2.0]), normalize=False), [1.0, -1.0, 0.0])


@pytest.mark.parametrize(
    "rewards",
    [[0.3, 0.3, 0.3], [0.1 + 0.2, 0.3, 0.3], [1e6, 1e6 + 0.01], [5.0]],
    ids=["equal", "rounded", "large", "one"],
)
def test_equal_rewards_carry_exactly_no_signal(rewards: list[float]) -> None:
    assert is_constant(np.array(rewards))
    assert group_advantages(np.array(rewards)).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([0.0, math.nan, 1.0], "group 7, sample 1: reward is nan"),
        ([0.0, 1.0, -math.inf], "group 7, sample 2: reward is -inf"),
        ([0.0, 1.0], r"group 7: expected 3 rewards, found an array of shape \[2\]"),
    ],
)
def test_unusable_rewards_name_the_sample(rewards: list[float], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        check_rewards(rewards, group_id=7, count=3)


def test_shuffling_permutes_across_groups_and_depends_on_seed_and_step_alone() -> None:
    groups = [np.array([1.0, 2.0]), np.array([3.0]), np.array([4.0, 5.0, 6.0])]
    one = shuffle_advantages(groups, seed=3, step=5)
    again = shuffle_advantages(groups, seed=3, step=5)
    assert [len(g) for g in one] == [2, 1, 3]
    assert sorted(np.concatenate(one).tolist()) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert [g.tolist() for g in one] == [g.tolist() for g in again]
    others = [shuffle_advantages(groups, seed=3, step=s) for s in range(6, 10)]
    assert any(np.concatenate(other).tolist() != np.concatenate(one).tolist() for other in others)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_logp_and_entropy_divide_by_the_temperature_first(temperature: float) -> None:
    logits = np.random.default_rng(0).normal(size=(2, 3, 11)) * 3
    targets = np.array([[0, 10, 4], [3, 3, 7]], np.int32)
    z = logits / temperature
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    logp, entropy = token_logp(jnp.asarray(logits, jnp.float32), jnp.asarray(targets), temperature)
    np.testing.assert_allclose(logp, np.take_along_axis(log_p, targets[..., None], -1)[..., 0], rtol=1e-5)
    np.testing.assert_allclose(entropy, -(np.exp(log_p) * log_p).sum(-1), rtol=1e-5, atol=1e-5)
    assert logp.dtype == entropy.dtype == jnp.float32


def test_entropy_has_no_gradient_and_logp_has_softmax_gradient() -> None:
    logits = jnp.array([[0.5, -1.0, 2.0]], jnp.float32)
    targets = jnp.array([2], jnp.int32)
    assert not np.any(jax.grad(lambda z: token_logp(z, targets)[1].sum())(logits))
    found = jax.grad(lambda z: token_logp(z, targets, 2.0)[0].sum())(logits)
    p = np.exp([0.25, -0.5, 1.0]) / np.exp([0.25, -0.5, 1.0]).sum()
    np.testing.assert_allclose(found[0], (np.array([0.0, 0.0, 1.0]) - p) / 2.0, rtol=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, 0.0),
        (1.5, 2.0, -2.6, 0.0, 1.0),  # 1 + clip_high = 1.3
        (1.5, -2.0, 3.0, 3.0, 0.0),  # the unbounded term is the larger loss
        (0.5, 2.0, -1.0, -1.0, 0.0),
        (0.5, -2.0, 1.6, 0.0, 1.0),  # 1 - clip_low = 0.8
        (0.5, 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_ppo_clip(ratio: float, advantage: float, loss: float, gradient: float, clipped: float) -> None:
    def total(logp: jax.Array) -> tuple[jax.Array, jax.Array]:
        old, weight = jnp.zeros(1, jnp.float32), jnp.array([advantage], jnp.float32)
        found, bound = ppo_clip(logp, old, weight, 0.2, 0.3)
        return found.sum(), bound.sum()

    (value, bound), slope = jax.value_and_grad(total, has_aux=True)(jnp.log(jnp.array([ratio], jnp.float32)))
    np.testing.assert_allclose([value, bound, slope[0]], [loss, clipped, gradient], rtol=1e-5, atol=1e-7)


def test_k3_is_zero_at_equality_and_never_negative() -> None:
    difference = np.linspace(-2, 2, 9)
    found = k3_kl(jnp.zeros(9, jnp.float32), jnp.asarray(difference, jnp.float32))
    np.testing.assert_allclose(found, np.exp(difference) - difference - 1, rtol=1e-4, atol=1e-7)
    assert float(found[4]) == 0.0 and np.all(np.asarray(found) >= 0)


def test_token_mean_is_over_the_whole_batch_and_masks_nan() -> None:
    values = jnp.array([[1.0, 2.0, np.nan], [4.0, np.inf, np.nan]], jnp.float32)
    mask = jnp.array([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]], jnp.float32)
    parts = [token_mean(values[i], mask[i], 3.0) for i in range(2)]
    np.testing.assert_allclose(sum(parts), 7.0 / 3.0, rtol=1e-6)
    np.testing.assert_allclose(token_mean(values, mask, 3.0), 7.0 / 3.0, rtol=1e-6)


def test_shapes_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match="shapes differ"):
        ppo_clip(jnp.zeros(2), jnp.zeros(2), jnp.zeros(3), 0.2, 0.2)
    with pytest.raises(ValueError, match="vocabulary axis"):
        token_logp(jnp.zeros((2, 5)), jnp.zeros(3, jnp.int32))
