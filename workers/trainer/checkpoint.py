"""Checkpoints of the train state: written behind the training, complete or absent, restored bit for bit.

Owns the checkpoint directory of a run and the one write that may be under way. Must not know services or what a step
does. Called by `waypath.workers.trainer.service`; `save` and `restore` on the JAX thread of every process of the world, in the
same order, `wait` on any thread.

Theory of operation. Orbax writes each process's shards and renames a temporary directory to `step_00000012` when all
processes are done, so a directory of that name is always whole. `save` returns once the state has been copied into
memory that no one else uses: on CPU a host array would be a view of the device buffer, which the next update donates, so
the copy is made there by a device program. Processes agree through the coordination service, never through device
collectives, for the write ends on a thread that has no place in the gang order.

Room for a checkpoint is made when its save begins, never when it is whole: the controller's journal names its predecessor
until all processes have said that the new one is there, and the next save is asked for only after that. So the one that the
journal names last is always there, also with `keep` = 1, where two lie there from the second save on.
"""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from waypath.proto.errors import CheckpointError
from waypath.workers.trainer.step import TrainState

_PREFIX = "step_"


@dataclass(frozen=True)
class Counters:
    """`step`: completed steps, `policy_version`: of the parameters, `optimizer_step`: optimizer updates done."""

    step: int
    policy_version: int
    optimizer_step: int


class Checkpoints:
    """The checkpoints below one directory, for one world of processes."""

    def __init__(self, directory: str | Path, *, keep: int, timeout_s: float) -> None:
        """Opens `directory`, which all processes must reach. `keep`: how many to keep, the newest ones."""
        self.directory = Path(directory).absolute()
        self._keep = keep
        self._lock = threading.Lock()
        self._pending: Path | None = None
        self._last: Path | None = None
        if jax.process_index() == 0:  # what a crash or a full disk left half-written
            for partial in self.directory.glob(f"{_PREFIX}*.orbax-checkpoint-tmp*"):
                shutil.rmtree(partial, ignore_errors=True)
        self._copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
        together = ocp.options.MultiprocessingOptions(primary_host=0, active_processes=set(range(jax.process_count())))
        self._orbax = ocp.AsyncCheckpointer(
            # Compression costs the steps beside it a second of CPU for each 0.5 GB and saves a twelfth of the bytes.
            ocp.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=together),
            multiprocessing_options=together,
            async_options=ocp.AsyncOptions(timeout_secs=max(1, int(timeout_s))),
        )

    def save(self, state: TrainState, counters: Counters) -> None:
        """Begins to write `state`; returns once it is copied. The write before it has ended then.

        Raises CheckpointError where that one failed, or where this one cannot begin.
        """
        path = self.directory / f"{_PREFIX}{counters.step:08d}"
        with self._lock:
            self._finish()
            if self._last is not None and jax.process_index() == 0:
                self._make_room(self._last)
            try:
                if jax.process_index() == 0:
                    self.directory.mkdir(parents=True, exist_ok=True)
                snapshot = jax.block_until_ready(self._copy(_flat(state)))
                tree = {**snapshot, "counters": np.array(list(asdict(counters).values()), np.int64)}
                self._orbax.save(path, args=ocp.args.PyTreeSave(tree), force=True)
            except Exception as error:  # Orbax and TensorStore raise whatever the storage gave them
                raise _failed(path, error) from error
            self._pending = path

    def wait(self) -> Path:
        """Waits for the write under way and returns the newest complete checkpoint of this run.

        Raises CheckpointError where the write failed, or where nothing was ever saved.
        """
        with self._lock:
            self._finish()
            if self._last is None:
                raise CheckpointError("there is no checkpoint to wait for")
            return self._last

    def restore(self, path: str | Path, abstract: TrainState) -> tuple[TrainState, Counters]:
        """The state saved at `path`, in the shapes and shardings of `abstract`, and its counters.

        Raises CheckpointError where there is no complete checkpoint, or where it is of another model.
        """
        source = Path(path).absolute()
        if not (source / "_CHECKPOINT_METADATA").is_file():
            raise CheckpointError(
                f"{source} is not a complete checkpoint", remedy="resume from one that the run's journal names"
            )
        target = {**_flat(abstract), "counters": np.zeros(3, np.int64)}
        with self._lock:
            try:
                _check_shapes(self._orbax.metadata(source).item_metadata.tree, target, source)
                arguments = ocp.checkpoint_utils.construct_restore_args(target)
                found = self._orbax.restore(source, args=ocp.args.PyTreeRestore(target, restore_args=arguments))
            except CheckpointError:
                raise
            except Exception as error:  # as above
                raise CheckpointError(f"{source} cannot be restored: {type(error).__name__}: {error}") from error
            self._last = source
        values = [int(value) for value in np.asarray(found.pop("counters"))]
        return jax.tree.unflatten(jax.tree.structure(abstract), jax.tree.leaves(found)), Counters(*values)

    def close(self) -> None:
        """Waits for the write under way and frees the writer."""
        with self._lock:
            try:
                self._finish()
            finally:
                self._orbax.close()

    def _finish(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            self._orbax.wait_until_finished()
        except Exception as error:  # as above
            raise _failed(pending, error) from error
        self._last = pending

    def _make_room(self, newest: Path) -> None:
        """Leaves `keep` − 1 checkpoints up to `newest`, and that one always; what lies after it is another branch's."""
        done = sorted(p for p in self.directory.glob(f"{_PREFIX}????????") if p.is_dir() and p.name <= newest.name)
        for old in done[: -max(1, self._keep - 1)]:
            shutil.rmtree(old, ignore_errors=True)


def _flat(state: Any) -> dict[str, Any]:
    """The state as {"leaves": {"000 params/embed": leaf}}: a name that says what it is, in the order of the tree."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {"leaves": {f"{i:03d}{jax.tree_util.keystr(path)}": leaf for i, (path, leaf) in enumerate(leaves)}}


def _check_shapes(saved: Any, target: Any, source: Path) -> None:
    found = {name: (list(leaf.shape), str(leaf.dtype)) for name, leaf in saved["leaves"].items()}
    wanted = {name: (list(leaf.shape), str(leaf.dtype)) for name, leaf in target["leaves"].items()}
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise CheckpointError(
                f"{source}: {name}: expected {json.dumps(wanted.get(name))}, found {json.dumps(found.get(name))}; "
                "the checkpoint is of another model or optimizer"
            )


def _failed(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path} could not be written: {type(error).__name__}: {error}",
        remedy="free space in storage.checkpoint_dir, or point it elsewhere, and resume the run",
    )
