"""The controller's core decides and computes; it has no clock, no sockets, no files, no jax, and no workers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from waypath.controller import scheduler

CORE = [
    "admission",
    "allocation",
    "balance",
    "bindings",
    "catalogue",
    "checks",
    "commands",
    "credits",
    "dispatch",
    "execution",
    "explain",
    "fairness",
    "graph",
    "intake",
    "lifetimes",
    "memory",
    "nodes",
    "objects",
    "pacing",
    "placement",
    "recovery",
    "relay",
    "reshard",
    "resources",
    "scheduler",
    "sequences",
    "specs",
    "status",
    "transfer_plan",
]
BANNED = {"asyncio", "grpc", "jax", "os", "pathlib", "random", "socket", "threading", "time"}


@pytest.mark.parametrize("name", CORE)
def test_core_modules_import_nothing_that_acts(name: str) -> None:
    path = Path(scheduler.__file__).with_name(f"{name}.py")
    found: set[str] = set()
    for item in ast.walk(ast.parse(path.read_text())):
        if isinstance(item, ast.Import):
            found |= {alias.name for alias in item.names}
        elif isinstance(item, ast.ImportFrom):
            found.add(item.module or "")
    assert not {module.split(".")[0] for module in found} & BANNED
    ours = {module for module in found if module.startswith("waypath.")}
    core = {f"waypath.controller.{other}" for other in CORE}
    assert ours <= {*core, "waypath.controller", "waypath.proto.errors", "waypath.proto.layout", "waypath.proto.names"}
