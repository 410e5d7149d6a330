"""Waypath: a single-controller runtime for reinforcement-learning post-training in JAX.

`connect` gives a client of a running controller; everything else hangs from it. Importing this package loads neither jax
nor the workers.
"""

from waypath.controller.client.client import Client, Run, RunResult, StepRecord, connect
from waypath.proto.config import RunConfig
from waypath.proto.config import load as load_config
from waypath.proto.errors import WaypathError

__all__ = ["Client", "Run", "RunConfig", "RunResult", "StepRecord", "WaypathError", "connect", "load_config"]
