"""Two runs publish to the same replicas, in any order of events: nobody ever serves parts of two versions or of two runs.

The replicas' stores, gates, exposures and digests are the real ones; bytes are copied here. Both runs count versions from 0, so their
policies have equal names: what a peer relays may be the other run's, and only the digests of the own trainer can tell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from waypath.proto.codecs import Bundle
from waypath.proto.errors import LocalError, TransferError
from waypath.proto.names import policy_name
from waypath.workers.digest import digest_weights
from waypath.workers.engines.gate import VersionGate
from waypath.workers.engines.relays import Relays
from waypath.workers.engines.service import compare_digests
from waypath.workers.engines.weights import WeightStore
from waypath.workers.exposed import Arrivals, ExposedTensor, ExposureTable
from waypath.workers.models.config import ModelConfig
from waypath.workers.models.views import leaf_at, views

MODEL = ModelConfig(
    vocab_size=3, hidden_size=2, intermediate_size=2, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2
)
VIEWS = list(views(MODEL))
REPLICAS, RUNS = (0, 1), (0, 1)


def value(run: int, version: int) -> float:
    """Every element of a policy is this number."""
    return 1000.0 * (run + 1) + version


class Trainer:
    """A run's trainer: one version exposed at a time."""

    def __init__(self, run: int) -> None:
        self.run, self.version = run, -1
        self.exposures = ExposureTable()
        self.next()

    def next(self) -> None:
        self.exposures.unexpose(policy_name(self.version), cut_after_s=0.0)
        self.version += 1
        number = value(self.run, self.version)
        arrays = {view.name: np.full(view.shape, number, np.float32) for view in VIEWS}
        tensors = {n: ExposedTensor(a.shape, "float32", [((0,) * a.ndim, a)]) for n, a in arrays.items()}
        self.exposures.expose(policy_name(self.version), tensors)
        store = WeightStore(MODEL, jax.local_devices()[0])
        store.begin(0)
        for view in VIEWS:
            store.view(view.name, (0,) * len(view.shape), view.shape)[...] = number
        digests = store.seal(lambda params: digest_weights(MODEL, params))
        store.close()
        stacked = np.stack([digests[name] for name in sorted(digests)])
        self.bundle = Bundle({"tensors": sorted(digests), "version": self.version}, {"digests": stacked})


class Replica:
    """What a rollout service holds for the run that it is opened for, without its engine."""

    def __init__(self, run: int) -> None:
        self.run = run
        self.store = WeightStore(MODEL, jax.local_devices()[0])
        self.gate = VersionGate("replica")
        self.exposures = ExposureTable()
        self.relays = Relays(self.exposures)
        self.staging: tuple[int, Bundle, Arrivals, set[str]] | None = None

    def begin(self, version: int, bundle: Bundle) -> None:
        asyncio.run(self.relays.keep_only(self.gate.serving))
        self.gate.staged = None
        self.store.abort()
        self.store.begin(version)
        self.staging = version, bundle, self.relays.open(version, self.store.shadow()), set()

    def pull(self, name: str, source: ExposureTable) -> None:
        """One tensor, if the source has it by now under the name of the version that is staged."""
        assert self.staging is not None
        version, _, arrivals, have = self.staging
        try:
            with source.reading(policy_name(version), "replica") as exposure:
                shape = exposure.tensors[name].shape
                box = (0,) * len(shape), shape
                if exposure.arrivals is not None and not exposure.arrivals.arrival(name, *box).done():
                    return
                view = exposure.tensors[name].find(*box)
                assert view is not None
                self.store.view(name, *box)[...] = view
        except TransferError:
            return
        arrivals.land(name, *box)
        have.add(name)

    def seal(self) -> None:
        """Verifies, or drops what was staged."""
        assert self.staging is not None
        (version, bundle, _, _), self.staging = self.staging, None
        wrong, found = "", dict[str, Any]()
        try:
            found = self.store.seal(lambda params: digest_weights(MODEL, params))
            wrong = compare_digests(found, [bundle], version)
        except TransferError as error:
            wrong = str(error)
        if wrong:
            self.drop(version)
        else:
            self.relays.verified(version, found)
            self.gate.staged = version

    def drop(self, version: int) -> None:
        asyncio.run(self.relays.drop(version, TransferError("given up")))
        self.store.abort()
        self.staging, self.gate.staged = None, None

    def commit(self, version: int) -> None:
        self.store.commit(version)
        self.gate.commit(version)

    def close(self) -> None:
        self.relays.close()
        self.store.close()


class Publications(RuleBasedStateMachine):
    """Events of two runs and two replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.trainers = [Trainer(run) for run in RUNS]
        self.replicas = [Replica(0), Replica(1)]

    @rule(run=st.sampled_from(RUNS))
    def trained(self, run: int) -> None:
        self.trainers[run].next()

    @rule(r=st.sampled_from(REPLICAS))
    def stage(self, r: int) -> None:
        """Also where another version is staged or under way: it is dropped first."""
        replica = self.replicas[r]
        trainer = self.trainers[replica.run]
        if replica.gate.serving is None or trainer.version > replica.gate.serving:
            replica.begin(trainer.version, trainer.bundle)

    @rule(r=st.sampled_from(REPLICAS), source=st.integers(0, 2), data=st.data())
    def arrives(self, r: int, source: int, data: Any) -> None:
        """Tensors from the own trainer (0, 1), or whatever the other replica exposes under that name (2)."""
        replica = self.replicas[r]
        if replica.staging is None:
            return
        left = sorted({view.name for view in VIEWS} - replica.staging[3])
        table = self.replicas[1 - r].exposures if source == 2 else self.trainers[replica.run].exposures
        for name in left if source else left[: data.draw(st.integers(0, len(left)))]:
            replica.pull(name, table)

    @rule(r=st.sampled_from(REPLICAS), relayed=st.integers(0, len(VIEWS)), commits=st.booleans())
    def publish(self, r: int, relayed: int, commits: bool) -> None:
        """All at once: `relayed` tensors are asked of the other replica, the rest (and what it lacks) of the trainer."""
        self.stage(r)
        replica = self.replicas[r]
        if replica.staging is None:
            return
        for view in VIEWS[:relayed]:
            if view.name not in replica.staging[3]:
                replica.pull(view.name, self.replicas[1 - r].exposures)
        for name in sorted({view.name for view in VIEWS} - replica.staging[3]):
            replica.pull(name, self.trainers[replica.run].exposures)
        replica.seal()
        if commits:
            self.commit(r)

    @rule(r=st.sampled_from(REPLICAS))
    def verify(self, r: int) -> None:
        if self.replicas[r].staging is not None:
            self.replicas[r].seal()

    @rule(r=st.sampled_from(REPLICAS), version=st.integers(0, 3))
    def commit_of_a_stale_version_is_refused(self, r: int, version: int) -> None:
        replica = self.replicas[r]
        if version not in (replica.gate.staged, replica.gate.serving):
            with pytest.raises(LocalError, match="cannot commit policy version"):
                replica.commit(version)

    @rule(r=st.sampled_from(REPLICAS))
    def commit(self, r: int) -> None:
        if (staged := self.replicas[r].gate.staged) is not None:
            self.replicas[r].commit(staged)

    @rule(r=st.sampled_from(REPLICAS))
    def abort(self, r: int) -> None:
        replica = self.replicas[r]
        version = replica.staging[0] if replica.staging is not None else replica.gate.staged
        if version is not None:
            replica.drop(version)

    @rule(r=st.sampled_from(REPLICAS), run=st.sampled_from(RUNS))
    def opened_for_a_run(self, r: int, run: int) -> None:
        """A run opens its engine here, or the process was lost and its successor is opened."""
        self.replicas[r].close()
        self.replicas[r] = Replica(run)

    @invariant()
    def whoever_serves_serves_one_policy_of_its_run(self) -> None:
        for replica in self.replicas:
            assert replica.store.version == replica.gate.serving
            if replica.gate.serving is None:
                assert replica.store.params is None
                continue
            expected = value(replica.run, replica.gate.serving)
            assert numbers(replica.store.params) == {expected}

    def teardown(self) -> None:
        for replica in self.replicas:
            replica.close()


def numbers(params: Mapping[str, Any] | None) -> set[float]:
    """All distinct elements of a policy."""
    assert params is not None
    return {float(x) for view in VIEWS for x in np.unique(np.asarray(leaf_at(dict(params), view.path)))}


Publications.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_publications = Publications.TestCase
