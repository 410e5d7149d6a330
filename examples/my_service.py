"""A service and a function of your own, called in programs by name: what they need lives with the workers, nothing is shipped.

    waypath up examples/compute.toml \\
        --set 'compute.services=["examples.my_service"]' --set 'compute.allow_import=["examples"]'

See docs/programs.md.
"""

from __future__ import annotations

from typing import Any

from waypath.workers.functions.registered import function
from waypath.workers.service import Call, ServiceContext, method, service


@function("scale")
def scale(x: Any, *, by: float = 2.0) -> Any:
    """A pure JAX function; keyword-only parameters are its typed options."""
    return x * by


@service("average")
class Average:
    """The weighted mean of all that it was given. One a worker, made at the first call; every worker of the slice runs each call."""

    def __init__(self, context: ServiceContext) -> None:
        self._total: Any = 0.0
        self._weight = 0.0

    @method(lane="jax")
    def add(self, call: Call, *, weight: float = 1.0) -> Any:
        """Takes one array in; gives the mean so far."""
        (x,) = call.inputs[0].leaves
        self._total = self._total + x * weight
        self._weight += weight
        call.report(weight=self._weight)
        return self._total / self._weight

    @method(lane="host")
    def reset(self, call: Call) -> None:
        """Forgets everything."""
        self._total, self._weight = 0.0, 0.0
