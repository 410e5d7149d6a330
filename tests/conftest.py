"""Shared test set-up: four CPU devices in one process, a compilation cache, hypothesis without wall-clock limits."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Many tests compile the same small programs; each is compiled once.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).resolve().parent.parent / ".cache" / "jax-tests"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

from hypothesis import HealthCheck, settings

settings.register_profile(
    "waypath",
    deadline=None,
    max_examples=50,
    print_blob=True,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("waypath")
