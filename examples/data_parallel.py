"""Data parallel over two JAX worlds: each computes the gradient of its half of the batch, one of them averages and steps.

    python examples/data_parallel.py                       on a cluster of its own
    python examples/data_parallel.py HOST:PORT TOKENFILE   on one that is up: waypath up examples/compute.toml

Inside a world XLA reduces over its devices; between the worlds a transfer brings the gradient to the first and the weights to the
second. Linear regression, so that the answer is known.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import waypath
from waypath.tools.launch import client_of

FEATURES, ROWS, STEPS, RATE = 8, 64, 60, 0.2


def loss(w: Any, x: Any, y: Any) -> Any:
    """Mean squared error."""
    return jnp.mean((x @ w - y) ** 2)


def run(client: waypath.Client) -> float:
    """Returns the largest difference of the weights found from those that made the data."""
    rng = np.random.default_rng(0)
    truth = rng.standard_normal(FEATURES).astype(np.float32)
    x = rng.standard_normal((2, ROWS, FEATURES)).astype(np.float32)
    y = x @ truth

    worlds = [client.slice(mesh={"data": 2}), client.slice(mesh={"data": 2}, strategy="spread")]
    halves = [(client.put(x[k], s, P("data")), client.put(y[k], s, P("data"))) for k, s in enumerate(worlds)]
    gradients = [
        client.function(jax.grad(loss), s, in_specs=(P(), P("data"), P("data")), out_specs=P(), name="gradient")
        for s in worlds
    ]
    update = client.function(lambda w, a, b: w - RATE * (a + b) / 2, worlds[0], donate=(0,), name="update")

    @client.program
    def step(w0: Any, w1: Any, x0: Any, y0: Any, x1: Any, y1: Any) -> tuple[Any, Any]:
        mine = gradients[0](w0, x0, y0)
        theirs = client.transfer(gradients[1](w1, x1, y1), worlds[0])
        new = update(w0, mine, theirs)
        return new, client.transfer(new, worlds[1])

    w = [client.put(np.zeros(FEATURES, np.float32), s) for s in worlds]
    for _ in range(STEPS):  # nothing waits here: the steps are sent ahead
        w = list(step(w[0], w[1], *halves[0], *halves[1]))
    return float(np.abs(w[1].result() - truth).max())


if __name__ == "__main__":
    with client_of(sys.argv[1:], Path(__file__).with_name("compute.toml")) as client:
        print(f"largest error of a weight: {run(client):.1e}")
