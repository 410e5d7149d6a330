"""Ray's actors doing the loops of `waypath bench dispatch`: a baseline where ray is installed (extra `bench`).

One actor stands for each worker. A call adds to a float32 array of one element, as the local addition does. A process of its own,
because ray forks. Started by dispatch.py:

    python -m waypath.tools.bench.ray_actors SIZE
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from typing import Any

import numpy as np

OBJECT_STORE_BYTES = 80 << 20
NODES = 128


def installed() -> bool:
    """Can ray be imported?"""
    return importlib.util.find_spec("ray") is not None


class _Adder:
    def add(self, x: Any) -> Any:
        return x + np.float32(1)


def main() -> None:
    """Serves until standard input ends: `alone` is one call of all actors that is waited for, `link` one link of a chain of `NODES`
    calls, each on what the one before returned, with one wait at the end. Prints seconds.
    """
    size = int(sys.argv[1])
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray  # pyright: ignore[reportMissingImports]

    ray.init(
        num_cpus=size,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        logging_level="ERROR",
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    made = [ray.remote(_Adder).remote() for _ in range(size)]
    start = np.ones(1, np.float32)
    for line in sys.stdin:
        count = NODES if line.strip() == "link" else 1
        began = time.perf_counter()
        held: list[Any] = [start] * size
        for _ in range(count):
            held = [actor.add.remote(x) for actor, x in zip(made, held, strict=True)]
        ray.get(held)
        print("seconds", (time.perf_counter() - began) / count, flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
