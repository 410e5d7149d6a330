"""Per-token losses of policy optimisation and supervised tuning, and how they are summed.

Owns the clipped surrogate, the k3 KL estimator and the aggregation. Must not know where log-probabilities come
from, nor how rows are split into micro-batches: denominators are handed in, because they are those of the whole
optimizer batch. Called inside the trainer's jitted programs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def ppo_clip(
    logp: jax.Array, old_logp: jax.Array, advantage: jax.Array, clip_low: float, clip_high: float
) -> tuple[jax.Array, jax.Array]:
    """Clipped surrogate loss per token.

    `logp`, `old_logp`, `advantage`: float32, one shape. r = exp(logp − old_logp);
    loss = max(−A r, −A clip(r, 1 − clip_low, 1 + clip_high)). Returns (loss, clipped): `clipped` is 1.0 where
    the bound is active, that is where the token has no policy gradient.
    Source: Schulman et al. 2017 (PPO), equation 7; separate bounds: Yu et al. 2025 (DAPO), equation 10.
    """
    if not logp.shape == old_logp.shape == advantage.shape:
        raise ValueError(f"shapes differ: logp {logp.shape}, old {old_logp.shape}, advantage {advantage.shape}")
    ratio = jnp.exp(logp - old_logp)
    bounded = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    loss = jnp.maximum(-advantage * ratio, -advantage * bounded)
    clipped = ((advantage > 0) & (ratio > 1.0 + clip_high)) | ((advantage < 0) & (ratio < 1.0 - clip_low))
    return loss, clipped.astype(jnp.float32)


def k3_kl(logp: jax.Array, ref_logp: jax.Array) -> jax.Array:
    """Estimator of KL(policy ‖ reference) per token, never negative: exp(d) − d − 1 with d = ref_logp − logp.

    Source: Schulman 2020, "Approximating KL divergence", estimator k3; Shao et al. 2024, equation 4.
    """
    difference = ref_logp - logp
    return jnp.exp(difference) - difference - 1.0


def masked_sum(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Σ values · mask as a float32 scalar; a masked-out NaN or infinity does not leak."""
    return jnp.sum(jnp.where(mask > 0, values, 0.0), dtype=jnp.float32)


def token_mean(values: jax.Array, mask: jax.Array, denominator: jax.Array | float) -> jax.Array:
    """Σ values · mask / denominator, where `denominator` is the loss-token count of the whole optimizer batch.

    Summing this over micro-batches and devices gives the mean over all tokens; a mean of means would not.
    """
    return masked_sum(values, mask) / denominator
