"""Weighted fair sharing: shares follow weights, order inside an owner stays, and being idle saves up nothing."""

from __future__ import annotations

import pytest

from waypath.controller.fairness import FairQueue
from waypath.proto.errors import ConfigError


def served(queue: FairQueue, count: int, refill: int = 0) -> list[str]:
    """Admits `count` executions, each the first of the owner whose turn it is; `refill`: every owner gets one more each time."""
    order: list[str] = []
    for number in range(count):
        owner = queue.owners()[0]
        queue.admit(queue.heads(owner)[0])
        order.append(owner)
        if refill:
            queue.add(owner, f"{owner} again {number}", refill)
    return order


@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (1, 2, 4, 8)])
def test_shares_are_within_two_percent_of_the_weights(weights: tuple[int, ...]) -> None:
    queue = FairQueue()
    for k, weight in enumerate(weights):
        queue.weigh(f"o{k}", weight)
        queue.add(f"o{k}", f"o{k} first", 1)
    order = served(queue, 3000, refill=1)
    for k, weight in enumerate(weights):
        assert order.count(f"o{k}") / 3000 == pytest.approx(weight / sum(weights), rel=0.02)


def test_cost_counts() -> None:
    queue = FairQueue()
    for k in range(300):
        queue.add("small", f"s{k}", 1)
        queue.add("large", f"l{k}", 10)
    order = served(queue, 110)
    assert order.count("large") in (10, 11)


def test_who_was_idle_has_saved_up_nothing() -> None:
    queue = FairQueue()
    for k in range(200):
        queue.add("busy", f"b{k}", 1)
    served(queue, 100)
    for k in range(100):
        queue.add("late", f"l{k}", 1)
    assert 9 <= served(queue, 20).count("late") <= 11


def test_inside_an_owner_order_is_that_of_submission_line_by_line() -> None:
    queue = FairQueue()
    for k in range(4):
        queue.add("me", f"e{k}", 1, group="ab"[k % 2])
    assert queue.heads("me") == ["e0", "e1"] and queue.count("me") == 4
    queue.remove("e0")
    assert queue.heads("me") == ["e1", "e2"]
    queue.remove("e0")
    for name in ("e1", "e2", "e3"):
        queue.admit(name)
    assert queue.owners() == [] and queue.count("me") == 0


def test_a_weight_is_a_positive_number() -> None:
    for weight in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="me: weight: expected more than 0"):
            FairQueue().weigh("me", weight)
