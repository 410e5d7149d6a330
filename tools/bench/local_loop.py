"""The baseline of `waypath bench dispatch`: the same loops in multi-controller JAX, one of these processes per device.

Every process runs the loop itself, as a program without a controller would. It reads a line (`chained`, `fused`, `local`) from
standard input, runs that once, and prints the seconds; between lines it sleeps. Started by dispatch.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from waypath.workers import world
from waypath.workers.jax_compat import World

NODES = 128


def all_reduce_add(x: Any) -> Any:
    """One step: an all-reduce of a scalar, and an add. x: float32 [devices], split over all of them."""
    import jax.numpy as jnp

    return x + jnp.sum(x) * 1e-6


def fused(steps: int) -> Callable[[Any], Any]:
    """`steps` of them as one computation."""
    import jax

    return lambda x: jax.lax.fori_loop(0, steps, lambda _, y: all_reduce_add(y), x)


def add(x: Any) -> Any:
    """One step without communication."""
    return x + 1.0


def main() -> int:
    """Serves the loops until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator", default="")
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--fused-steps", type=int, default=NODES)
    options = parser.parse_args()
    place = World(options.coordinator, options.index, options.count) if options.count > 1 else None
    world.start(1, world=place)
    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("x",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("x"))
    loops: dict[str, tuple[Any, int]] = {
        "chained": (all_reduce_add, NODES),
        "fused": (fused(options.fused_steps), 1),
        "local": (add, NODES),
    }
    compiled = {name: (jax.jit(fun, in_shardings=split, out_shardings=split), n) for name, (fun, n) in loops.items()}
    start = jax.make_array_from_callback((len(jax.devices()),), split, lambda index: np.ones(1, np.float32))
    for line in sys.stdin:
        step, count = compiled[line.strip()]
        began = time.perf_counter()
        x = start
        for _ in range(count):
            x = step(x)
        x.block_until_ready()
        print("seconds", time.perf_counter() - began, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
