"""User code by import path, if the worker's `--allow-import` prefixes cover it.

Must not know what is imported. Called by tasks, rewards and the worker's start.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from waypath.proto.errors import TaskError

__all__ = ["import_attribute", "import_module"]


def import_module(name: str, allow_import: Sequence[str], what: str) -> Any:
    """Import a module, if an `allow_import` prefix covers it.

    A prefix covers itself and its submodules: "my_tasks" allows "my_tasks" and "my_tasks.sums", not "my_tasks2". `what` is the
    setting and its value, for the TaskError raised for a module that is not allowed, or an import that fails.
    """
    if not any(name == prefix or name.startswith(prefix + ".") for prefix in allow_import):
        allowed = ", ".join(allow_import) or "nothing"
        raise TaskError(
            f"{what}: this worker may not import {name!r} (allowed: {allowed})",
            remedy=f"Start the worker with --allow-import {name.split('.')[0]} if you trust that code",
        )
    try:
        return importlib.import_module(name)
    except Exception as error:  # user code may raise anything while it is imported
        raise TaskError(
            f"{what}: importing {name!r} failed with {type(error).__name__}: {error}",
            remedy="Mend the module; it must be importable from the directory in which the worker runs",
        ) from error


def import_attribute(path: str, allow_import: Sequence[str], what: str) -> Any:
    """Import `module:attribute`; raises TaskError as `import_module`, and for a malformed path or a missing attribute."""
    module_name, colon, attribute = path.partition(":")
    if not (colon and attribute and module_name):
        raise TaskError(f"{what} = {path!r}: expected an import path 'module:attribute'")
    value = import_module(module_name, allow_import, f"{what} = {path!r}")
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise TaskError(f"{what} = {path!r}: {module_name!r} has no attribute {attribute!r}")
        value = getattr(value, part)
    return value
