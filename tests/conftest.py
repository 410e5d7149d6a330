"""Shared test set-up: four CPU devices in one process, strict dtype promotion, hypothesis without wall-clock limits."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

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
