"""Checkpoints: whole or absent, kept apart from the live state, and failures that are heard."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from waypath.proto.errors import CheckpointError
from waypath.workers.trainer.checkpoint import Checkpoints, Counters
from waypath.workers.trainer.step import TrainState


def state(value: float, size: int = 1000) -> TrainState:
    noise = np.random.default_rng(0).normal(size=size).astype(np.float32)  # does not compress
    return TrainState({"w": jnp.asarray(noise + value)}, (jnp.asarray(3), {"w": jnp.asarray(noise * value)}))


def abstract(like: TrainState) -> TrainState:
    found: TrainState = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), like)
    return found


@contextmanager
def opened(directory: Path, keep: int = 2) -> Iterator[Checkpoints]:
    checkpoints = Checkpoints(directory, keep=keep, timeout_s=30)
    try:
        yield checkpoints
    finally:
        checkpoints.close()


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """A full disk, as far as this process is concerned."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path) -> None:
    donate = jax.jit(lambda t: jax.tree.map(lambda a: a + 1, t), donate_argnums=0)
    live = state(1.0)
    expected = jax.tree.map(np.array, live)
    with opened(tmp_path) as checkpoints:
        checkpoints.save(live, Counters(5, 5, 10))
        following = donate(live)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(live)), "the write holds no view of the state"
        restored, counters = checkpoints.restore(checkpoints.wait(), abstract(following))
    assert counters == Counters(step=5, policy_version=5, optimizer_step=10)
    jax.tree.map(np.testing.assert_array_equal, restored, expected)


# TensorStore calls back into the event loop of the write that failed, which Orbax has closed by then.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_is_heard_and_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    large = state(1.0, size=400_000)
    with opened(tmp_path) as checkpoints:
        with largest_file(800_000), pytest.raises(CheckpointError, match=r"step_00000001 could not be written"):
            checkpoints.save(large, Counters(1, 1, 1))
            checkpoints.wait()
        assert not (tmp_path / "step_00000001").exists()
        with pytest.raises(CheckpointError, match="no checkpoint to wait for"):
            checkpoints.wait()
        with largest_file(800_000), pytest.raises(CheckpointError, match=r"step_00000002 could not be written"):
            checkpoints.save(large, Counters(2, 2, 2))
            checkpoints.save(large, Counters(3, 3, 3))  # the one before is heard here
        checkpoints.save(large, Counters(1, 1, 1))
        assert checkpoints.wait() == tmp_path / "step_00000001"


@pytest.mark.parametrize(("keep", "left"), [(1, [3, 4]), (2, [3, 4]), (3, [2, 3, 4])])
def test_half_written_directories_are_cleared_and_old_checkpoints_pruned(
    tmp_path: Path, keep: int, left: list[int]
) -> None:
    (tmp_path / "step_00000001.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "step_00000009").mkdir()  # of a branch that a resumed run has left
    with opened(tmp_path, keep=keep) as checkpoints:
        for step in range(1, 5):
            checkpoints.save(state(1.0), Counters(step, step, step))
            checkpoints.wait()
            before = tmp_path / f"step_{step - 1:08d}"
            assert step == 1 or before.is_dir(), "the journal names the one before until it has heard of this one"
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step_{step:08d}" for step in (*left, 9)]


def test_a_checkpoint_of_another_model_names_the_leaf(tmp_path: Path) -> None:
    with opened(tmp_path) as checkpoints:
        checkpoints.save(state(1.0), Counters(1, 1, 1))
        path = checkpoints.wait()
        other = abstract(state(1.0, size=1001))
        with pytest.raises(
            CheckpointError, match=r"params\['w'\]: expected \[\[1001\], \"float32\"\], found \[\[1000\]"
        ):
            checkpoints.restore(path, other)


def test_a_directory_without_its_marker_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "step_00000001").mkdir()
    with opened(tmp_path) as checkpoints, pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        checkpoints.restore(tmp_path / "step_00000001", abstract(state(1.0)))
