"""Programs under everything that goes wrong: 2,000 stories of simulate.py, and the same actions as Hypothesis picks them.

One story alone, aloud: `python -m tests.unit.simulate SEED`.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.unit.simulate import Simulation

STORIES = 2000
CHOICES = st.randoms(use_true_random=False)


@pytest.mark.parametrize("seed", range(STORIES))
def test_every_invariant_holds_and_everything_ends(seed: int) -> None:
    Simulation(seed).run()


def test_a_seed_tells_the_same_story_again() -> None:
    assert _told(7) == _told(7)


def _told(seed: int) -> list[str]:
    told: list[str] = []

    class Heard(Simulation):
        def say(self, text: str) -> None:
            told.append(text)

    Heard(seed).run()
    return told


class Programs(RuleBasedStateMachine):
    """Clients, workers and messages take turns as Hypothesis likes, with choices that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.simulation = Simulation(0)

    @initialize(rng=CHOICES, capacity=st.sampled_from([0, 160, 400]))
    def start(self, rng: random.Random, capacity: int) -> None:
        self.simulation.rng = rng
        self.simulation.capacity = capacity
        self.simulation.start()

    @rule(rng=CHOICES, what=st.sampled_from(["submit", "submit", "delete", "cancel", "repeat", "request", "release"]))
    def ask(self, rng: random.Random, what: str) -> None:
        self.simulation.rng = rng
        getattr(self.simulation, what)()

    @rule(rng=CHOICES, steps=st.integers(1, 12))
    def go_on(self, rng: random.Random, steps: int) -> None:
        self.simulation.rng = rng
        for _ in range(steps):
            rng.choice([self.simulation.deliver, self.simulation.work, self.simulation.report])()

    @rule(rng=CHOICES, what=st.sampled_from(["crash", "notice", "rejoin", "open_client", "close_client"]))
    def come_or_go(self, rng: random.Random, what: str) -> None:
        self.simulation.rng = rng
        getattr(self.simulation, what)()

    @invariant()
    def holds(self) -> None:
        self.simulation.check()

    def teardown(self) -> None:
        self.simulation.rng = random.Random(0)
        self.simulation.finish()


TestPrograms = Programs.TestCase
TestPrograms.settings = settings(
    max_examples=30,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
