"""Drawing tokens on device: the random key of a token, and Gumbel-max sampling with its log-probability.

Owns the rule that makes a run repeatable: a token's key depends on (run seed, group id, sample index, position) and on
nothing else. Must not know slots, caches or requests. Called inside the engine's device programs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def seed_key(seed: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Raw key data, uint32 [2]: that of ``jax.random.key(seed)``, whose seeds end at 32 bits; here 64 bits count."""
    words = seed & 0xFFFF_FFFF_FFFF_FFFF
    return np.array([words >> 32, words & 0xFFFF_FFFF], np.uint32)


def sample_keys(seed_keys: jax.Array, group_ids: jax.Array, sample_indices: jax.Array) -> jax.Array:
    """fold_in(fold_in(seed key, group id), sample index) for every row.

    Takes raw keys uint32 [B, 2] and uint32 [B] twice; returns raw keys uint32 [B, 2].
    """

    def one(key: jax.Array, group_id: jax.Array, index: jax.Array) -> jax.Array:
        folded = jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(key), group_id), index)
        return jax.random.key_data(folded)

    return jax.vmap(one)(seed_keys, group_ids, sample_indices)


def sample(
    logits: jax.Array, keys: jax.Array, positions: jax.Array, temperature: jax.Array, greedy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token per row and the log-probability of having drawn it.

    ``logits`` float32 [B, V]; ``keys`` uint32 [B, 2] from ``sample_keys``; ``positions`` int32 [B], the absolute
    position of the token to draw, folded in last; ``temperature`` float32 [B]; ``greedy`` bool [B]. Returns tokens
    int32 [B] and logp float32 [B].

    Gumbel-max (Gumbel 1954; Maddison et al., "A* Sampling", 2014): argmax(l + g) with g standard Gumbel is a draw
    from softmax(l). l is ``logits / temperature`` in float32, or ``logits`` where greedy, and logp is
    l[token] − logsumexp(l) of that same l.
    """
    tempered = logits / jnp.where(greedy, jnp.float32(1), temperature)[:, None]

    def noisy() -> jax.Array:
        def gumbel(key: jax.Array, position: jax.Array) -> jax.Array:
            folded = jax.random.fold_in(jax.random.wrap_key_data(key), position)
            return jax.random.gumbel(folded, logits.shape[1:], jnp.float32)

        drawn = jnp.argmax(tempered + jax.vmap(gumbel)(keys, positions), axis=-1)
        return jnp.where(greedy, jnp.argmax(tempered, axis=-1), drawn)

    def plain() -> jax.Array:
        return jnp.argmax(tempered, axis=-1)

    tokens = jax.lax.cond(jnp.all(greedy), plain, noisy).astype(jnp.int32)
    chosen = jnp.take_along_axis(tempered, tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen - jax.nn.logsumexp(tempered, axis=-1)
