"""Log-probabilities and entropy of tokens, in float32.

Owns the convention "temperature divides the logits before log-softmax". Must not know about models or losses.
Called inside the trainer's jitted programs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def token_logp(
    logits: jax.Array, targets: jax.Array, temperature: jax.Array | float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each target and entropy of each distribution.

    `logits` [..., V] any float dtype, `targets` [...] int32. Returns (logp [...], entropy [...]), float32, in nats:
    z = logits / temperature; logp = z[target] − logsumexp(z); H = logsumexp(z) − Σ softmax(z) z.
    The entropy carries no gradient.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"logits {logits.shape} and targets {targets.shape} disagree before the vocabulary axis")
    z = logits.astype(jnp.float32) / jnp.asarray(temperature, jnp.float32)
    log_total = jax.nn.logsumexp(z, axis=-1)
    chosen = jnp.take_along_axis(z, targets[..., None], axis=-1)[..., 0]
    frozen = jax.lax.stop_gradient(z)
    total = jax.lax.stop_gradient(log_total)
    entropy = total - jnp.sum(jnp.exp(frozen - total[..., None]) * frozen, axis=-1)
    return chosen - log_total, entropy
