"""Pacing: the bound holds for every token, nothing deadlocks, and a resumed run samples from the same versions."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waypath.controller.pacing import Pacing
from waypath.proto.errors import ConfigError

STALENESS = st.integers(0, 5)
EVERY = st.integers(0, 7)


def test_the_table_in_the_docstring() -> None:
    pacing = Pacing(2, 5)
    assert [pacing.sampling_version(k) for k in range(11)] == [0, 0, 0, 1, 2, 5, 5, 5, 6, 7, 10]


def test_zero_is_synchronous() -> None:
    pacing = Pacing(0)
    assert [pacing.sampling_version(k) for k in range(4)] == [0, 1, 2, 3]
    assert pacing.may_dispatch(3, 3) and not pacing.may_dispatch(4, 3)


@given(STALENESS, EVERY, st.integers(0, 2**32))
def test_every_step_runs_within_the_bound_and_the_budget(staleness: int, every: int, seed: int) -> None:
    rng = random.Random(seed)
    pacing = Pacing(staleness, every)
    version = next_step = 0
    while version < 30:
        if pacing.may_dispatch(next_step, version) and rng.random() < 0.5:
            assert 0 <= next_step - pacing.sampling_version(next_step) <= staleness
            assert pacing.sampling_version(next_step) <= version
            next_step += 1
            assert next_step - version <= staleness + 1
        elif next_step > version:
            version += 1
        else:
            assert pacing.may_dispatch(next_step, version), f"deadlock before step {next_step} at version {version}"


@given(STALENESS, st.integers(1, 7), st.integers(1, 4))
def test_after_a_checkpoint_only_its_version_and_later_ones_are_needed(staleness: int, every: int, n: int) -> None:
    pacing = Pacing(staleness, every)
    resumed_at = n * every
    assert pacing.checkpoint_due(resumed_at)
    assert all(pacing.sampling_version(k) >= resumed_at for k in range(resumed_at, resumed_at + 20))


def test_checkpoints() -> None:
    assert [v for v in range(12) if Pacing(0, 5).checkpoint_due(v)] == [5, 10]
    assert not any(Pacing(0).checkpoint_due(v) for v in range(12))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((-1,), "step 0 would need version 1, which only step 0 makes"),
        ((0, -2), "checkpoint_every = -2"),
    ],
)
def test_settings_that_deadlock_are_refused(args: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Pacing(*args)
