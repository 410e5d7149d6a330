"""Tokens are drawn from the tempered softmax, by keys that follow from seed, group, sample and position alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from waypath.workers.engines.sampling import sample, sample_keys, seed_key

draw = jax.jit(sample)


def _draw(logits: np.ndarray, temperature: float, greedy: bool, n: int) -> tuple[np.ndarray, np.ndarray]:
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (n, len(logits)))
    keys = jnp.broadcast_to(jnp.asarray(seed_key(3)), (n, 2))
    tokens, logp = draw(
        rows, keys, jnp.arange(n, dtype=jnp.int32), jnp.full(n, temperature, jnp.float32), jnp.full(n, greedy)
    )
    return np.asarray(tokens), np.asarray(logp)


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1])
def test_seed_key_is_jax_random_key(seed: int) -> None:
    assert np.array_equal(seed_key(seed), jax.random.key_data(jax.random.key(seed)))


def test_seeds_differ_beyond_32_bits() -> None:
    assert not np.array_equal(seed_key(5), seed_key(2**32 + 5))


def test_a_token_is_the_gumbel_max_under_the_documented_fold_in_chain() -> None:
    logits = np.linspace(-1, 1, 11).astype(np.float32)
    seed, group, index, position, temperature = 12, 345, 6, 78, 0.5
    keys = sample_keys(
        jnp.asarray(seed_key(seed))[None], jnp.array([group], jnp.uint32), jnp.array([index], jnp.uint32)
    )
    tokens, logp = draw(
        jnp.asarray(logits)[None],
        keys,
        jnp.array([position], jnp.int32),
        jnp.array([temperature], jnp.float32),
        jnp.array([False]),
    )
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), group), index)
    noise = jax.random.gumbel(jax.random.fold_in(key, position), (11,), jnp.float32)
    tempered = logits / np.float32(temperature)
    assert int(tokens[0]) == int(np.argmax(tempered + np.asarray(noise)))
    expected = tempered[int(tokens[0])] - np.log(np.exp(tempered.astype(np.float64)).sum())
    np.testing.assert_allclose(float(logp[0]), expected, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_frequencies_follow_the_tempered_softmax(temperature: float) -> None:
    logits, n = np.array([0.3, -1.2, 1.1, 0.0, -0.4, 2.0]), 20_000
    tokens, logp = _draw(logits, temperature, greedy=False, n=n)
    p = np.exp(logits / temperature)
    p /= p.sum()
    counts = np.bincount(tokens, minlength=len(p))
    chi_square = float((((counts - n * p) ** 2) / (n * p)).sum())
    assert chi_square < 20.5  # the 0.999 quantile with 5 degrees of freedom; the draws are fixed by the seed
    np.testing.assert_allclose(logp, np.log(p)[tokens], atol=1e-5)


def test_greedy_takes_the_argmax_and_scores_it_at_temperature_one() -> None:
    logits = np.array([0.3, -1.2, 1.1, 0.0])
    tokens, logp = _draw(logits, 0.25, greedy=True, n=5)
    assert tokens.tolist() == [2] * 5
    np.testing.assert_allclose(logp, 1.1 - np.log(np.exp(logits).sum()), atol=1e-6)


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits = jnp.asarray(np.tile(np.linspace(0, 1, 9, dtype=np.float32), (2, 1)))
    keys = jnp.zeros((2, 2), jnp.uint32)
    args = (jnp.array([4, 4], jnp.int32), jnp.ones(2, jnp.float32))
    mixed, _ = draw(logits, keys, *args, jnp.array([True, False]))
    sampled, _ = draw(logits, keys, *args, jnp.array([False, False]))
    assert int(mixed[0]) == 8 and int(mixed[1]) == int(sampled[1])
