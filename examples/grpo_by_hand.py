"""A GRPO step written by hand: sample on one slice, train on another, publish by a transfer, as one program of seven calls.

    python examples/grpo_by_hand.py                       on a cluster of its own
    python examples/grpo_by_hand.py HOST:PORT TOKENFILE   on one that is up: waypath up examples/compute.toml

The policy is a table: for a digit it has to learn the next one. The real run (`waypath run`) has the same shape: generate, score,
train with its state donated, publish.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import waypath
from waypath.tools.launch import client_of

DIGITS, GROUP, STEPS = 10, 16, 40
OPTIMIZER = optax.adam(0.2)
GROUPS = P("x", None)  # groups lie on the devices of a slice, samples of a group together


def generate(policy: Any, prompts: Any, key: Any) -> tuple[Any, Any]:
    """Tokens and their log-probs [groups, GROUP] of the present policy."""
    logp = jax.nn.log_softmax(policy[prompts])
    tokens = jax.random.categorical(jax.random.wrap_key_data(key), logp[:, None], shape=(len(prompts), GROUP))
    return tokens, jnp.take_along_axis(logp, tokens, 1)


def score(prompts: Any, tokens: Any) -> Any:
    """1 for the next digit, else 0."""
    return (tokens == (prompts[:, None] + 1) % DIGITS).astype(jnp.float32)


def train(policy: Any, state: Any, prompts: Any, tokens: Any, old: Any, rewards: Any) -> tuple[Any, Any, Any]:
    """One clipped step on group-normalised advantages; also the mean reward."""
    spread = rewards.std(1, ddof=1, keepdims=True)
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (spread + 1e-6)

    def loss(policy: Any) -> Any:
        logp = jnp.take_along_axis(jax.nn.log_softmax(policy[prompts]), tokens, 1)
        ratio = jnp.exp(logp - old)
        return -jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages).mean()

    updates, state = OPTIMIZER.update(jax.grad(loss)(policy), state)
    return optax.apply_updates(policy, updates), state, rewards.mean()


def run(client: waypath.Client) -> list[float]:
    """Returns the mean reward of every step."""
    trainer, actors = client.slice(mesh={"x": 2}), client.slice(mesh={"x": 2}, strategy="spread")
    sampler = client.function(generate, actors, (P(), P("x"), P()), (GROUPS, GROUPS))
    scorer = client.function(score, actors, (P("x"), GROUPS), GROUPS)
    stepper = client.function(train, trainer, (P(), P(), P("x"), GROUPS, GROUPS, GROUPS), donate=(0, 1))

    @client.program
    def step(policy: Any, state: Any, acting: Any, prompts: Any, seen: Any, key: Any) -> tuple[Any, ...]:
        tokens, old = sampler(acting, seen, key)
        rewards = scorer(seen, tokens)
        moved = [client.transfer(value, trainer, GROUPS) for value in (tokens, old, rewards)]
        policy, state, reward = stepper(policy, state, prompts, *moved)
        return policy, state, client.transfer(policy, actors), reward

    table, digits = np.zeros((DIGITS, DIGITS), np.float32), np.arange(DIGITS, dtype=np.int32)
    policy, acting = client.put(table, trainer), client.put(table, actors)
    state = client.put(OPTIMIZER.init(table), trainer)
    prompts, seen = client.put(digits, trainer, P("x")), client.put(digits, actors, P("x"))
    rewards = []
    for k in range(STEPS):
        key = client.put(np.array([0, k], np.uint32), actors)
        policy, state, acting, reward = step(policy, state, acting, prompts, seen, key)
        rewards.append(reward)
    return [float(reward.result()) for reward in rewards]


if __name__ == "__main__":
    with client_of(sys.argv[1:], Path(__file__).with_name("compute.toml")) as client:
        print(" ".join(f"{reward:.2f}" for reward in run(client)))
