"""A pipeline over two slices: four micro-batches pass two stages that lie in different JAX worlds.

    python examples/pipeline.py                       on a cluster of its own
    python examples/pipeline.py HOST:PORT TOKENFILE   on one that is up: waypath up examples/compute.toml

One program, sent once: both stages get all their work ahead, and a stage starts on a micro-batch when it is there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import waypath
from waypath.tools.launch import client_of

WIDTH, ROWS, MICRO_BATCHES = 64, 8, 4


def run(client: waypath.Client) -> float:
    """Returns the largest difference from numpy."""
    front = client.slice(mesh={"x": 2})
    back = client.slice(mesh={"x": 2}, strategy="spread")
    rng = np.random.default_rng(0)
    w1, w2 = (rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5 for _ in range(2))
    batches = [rng.standard_normal((ROWS, WIDTH)).astype(np.float32) for _ in range(MICRO_BATCHES)]

    rows = P("x", None)  # the rows of a micro-batch lie on the devices of its slice
    first = client.function(lambda w, x: jnp.tanh(x @ w), front, in_specs=(P(), rows), out_specs=rows)
    second = client.function(lambda w, x: jnp.tanh(x @ w), back, in_specs=(P(), rows), out_specs=rows)

    @client.program
    def pipeline(w1: Any, w2: Any, *xs: Any) -> list[Any]:
        return [second(w2, client.transfer(first(w1, x), back, rows)) for x in xs]

    weights = client.put(w1, front), client.put(w2, back)
    inputs = [client.put(x, front, rows) for x in batches]
    print(pipeline.explain(*weights, *inputs))
    found = [out.result() for out in pipeline(*weights, *inputs)]
    return max(float(np.abs(y - np.tanh(np.tanh(x @ w1) @ w2)).max()) for x, y in zip(batches, found, strict=True))


if __name__ == "__main__":
    with client_of(sys.argv[1:], Path(__file__).with_name("compute.toml")) as client:
        print(f"largest difference from numpy: {run(client):.1e}")
