"""The trainer service on one process: a run's calls in order, bits across save and restore, and what goes wrong."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest

from waypath.proto import config as configs
from waypath.proto.codecs import Bundle
from waypath.proto.errors import CheckpointError, DeadlineError, LocalError, ModelError, TransferError
from waypath.proto.layout import Layout
from waypath.workers.digest import digest_box
from waypath.workers.models import hf, tokenizer
from waypath.workers.models.open import open_model
from waypath.workers.models.views import views
from waypath.workers.service import Call, ServiceContext
from waypath.workers.store import ObjectStore
from waypath.workers.trainer import service as trainer_service
from waypath.workers.trainer.export import ParamsDigest
from waypath.workers.trainer.service import TrainerService, learning_rate, merge_metrics
from waypath.workers.trainer.step import UpdateProgram
from waypath.workers.transfer import Transfer

RAW = {
    "seed": 3,
    "model": {
        "random": {
            "alphabet": "0123456789>\n",
            "hidden_size": 8,
            "intermediate_size": 12,
            "num_layers": 2,
            "num_heads": 2,
            "num_kv_heads": 1,
            "head_dim": 4,
        }
    },
    "task": {"name": "sort", "prompts_per_step": 2},
    "algorithm": {"group_size": 4, "minibatches": 2},
    "optimizer": {"learning_rate": 1e-2, "warmup_updates": 4},
    "sampling": {"max_new_tokens": 8, "stop": ["\n"]},
    "warm_start": {"steps": 12, "batch_size": 16, "learning_rate": 1e-2},
    "cluster": {"trainer_processes": 4},
    "trainer": {"mesh": {"fsdp": 4}, "micro_batch_rows": 8, "sequence_tokens": 16},
    "inference": {"slots": 8, "prompt_buckets": [8], "replicas": 2},
}


@functools.cache
def shared_program() -> UpdateProgram:
    """Compiled once for all tests: the real one, for the one configuration."""
    config = configs.load(RAW)
    mesh = trainer_service.build_mesh({"fsdp": 4})
    return BUILD(config, open_model(config)[0], mesh)


BUILD = trainer_service.build_program


class Trainer:
    """A service, with a network loop in a thread of its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop, directory: Path) -> None:
        self.directory = directory
        self.store = ObjectStore()
        self.context = ServiceContext(
            worker="trainer-0",
            role="trainer",
            process_index=0,
            process_count=1,
            allow_import=(),
            loop=loop,
            submit_jax=cast(Any, None),
            store=self.store,
            transfer=cast(Transfer, None),
        )
        self.service = TrainerService(self.context)
        self.calls = 0

    def call(self, method: str, inputs: list[list[Bundle]] | None = None, **options: Any) -> tuple[dict[str, Any], Any]:
        self.calls += 1
        deadline = time.monotonic() + options.pop("deadline_s", 60)
        call = Call(f"x{self.calls}", method, options, inputs or [], self.context, deadline)
        value = getattr(self.service, method)(call)
        if value is not None:
            self.store.put(f"x{self.calls}/{method}", value)
        return call.result, value

    def open(self, restore: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
        raw = {**RAW, "storage": {"checkpoint_dir": str(self.directory / "checkpoints")}, **changes}
        return self.call("open", config=configs.load(raw).to_json(), restore=restore)[0]

    def train(self, step: int, seed: int | None = None) -> dict[str, Any]:
        rollouts = [rollout(group, step, seed if seed is not None else step) for group in (2 * step, 2 * step + 1)]
        return self.call("train", [[b] for b, _ in rollouts] + [[s] for _, s in rollouts], step=step)[0]

    def digest(self) -> str:
        return str(self.call("export", out_dir="")[0]["params_digest"])


def rollout(group_id: int, version: int, seed: int) -> tuple[Bundle, Bundle]:
    rng = np.random.default_rng([group_id, seed])
    prompt, lengths = int(rng.integers(2, 8)), rng.integers(1, 8, 4)
    length = (prompt + lengths).astype(np.int32)
    shape = (4, int(length.max()))
    columns = np.arange(shape[1])
    mask = ((columns >= prompt) & (columns < length[:, None])).astype(np.uint8)
    tokens = np.where(columns < length[:, None], rng.integers(3, 15, shape), 0).astype(np.int32)
    trajectory = Bundle(
        {"group_id": group_id, "finish_reasons": ["stop"] * 4},
        {
            "tokens": tokens,
            "length": length,
            "loss_mask": mask,
            "behaviour_logp": np.where(mask, rng.normal(-2.7, 0.1, shape), 0).astype(np.float32),
            "policy_version": np.where(mask, version, -1).astype(np.int32),
        },
    )
    return trajectory, Bundle({"group_id": group_id}, {"reward": rng.integers(0, 2, 4).astype(np.float32)})


@contextmanager
def network() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Trainer]]:
    monkeypatch.setattr(trainer_service, "build_program", lambda config, model, mesh: shared_program())
    with network() as loop:
        made: list[Trainer] = []

        def make() -> Trainer:
            made.append(Trainer(loop, tmp_path))
            return made[-1]

        yield make
        for one in made:
            if one.service._run is not None:
                one.service._run.checkpoints.close()


def test_a_run_from_open_to_export(trainer: Callable[[], Trainer], tmp_path: Path) -> None:
    one = trainer()
    opened = one.open()
    model = open_model(configs.load(RAW))[0]
    layout = Layout.from_json(opened["layout"])
    assert {n: t.shape for n, t in layout.tensors.items()} == {v.name: v.shape for v in views(model)}
    assert {s.worker for t in layout.tensors.values() for s in t.shards} == {"trainer-0"}
    assert opened["model_bytes"] == 4 * sum(int(np.prod(v.shape)) for v in views(model))
    assert opened["fingerprint"]["mesh"]["fsdp"] == 4 and not opened["restored"]

    warmed, _ = one.call("warm_start")
    assert warmed["steps"] == 12 and warmed["loss"] < warmed["first_loss"]
    metrics = [one.train(step) for step in range(2)]
    assert [m["optimizer_step"] for m in metrics] == [2, 4]
    assert metrics[0]["staleness_max"] == 0 and metrics[0]["tokens"] > 0
    assert metrics[0]["logprob_diff_mean"] > 0 and metrics[0]["grad_norm"] > 0

    result, _ = one.call("export", out_dir=str(tmp_path / "out"))
    assert result["params_digest"] == one.digest() and result["export_dir"] == str(tmp_path / "out")
    loaded = hf.load_params(tmp_path / "out", hf.load_config(tmp_path / "out"))
    digest = ParamsDigest()
    for view in views(model):
        leaf = np.asarray(functools.reduce(lambda node, key: node[key], view.path, loaded))
        digest.add(view.name, leaf if view.index is None else leaf[view.index])
    assert digest.hexdigest() == result["params_digest"]
    assert tokenizer.load(tmp_path / "out").encode("12>") == open_model(configs.load(RAW))[1].encode("12>")


def test_save_and_restore_go_on_bit_for_bit(trainer: Callable[[], Trainer]) -> None:
    one = trainer()
    one.open()
    for step in range(4):
        one.train(step)
        if step < 3:
            one.call("save", step=step + 1)
    path = Path(one.call("save_wait")[0]["checkpoint"])
    assert path.name == "step_00000003"
    assert sorted(p.name for p in path.parent.iterdir()) == ["step_00000002", "step_00000003"], "keep_checkpoints = 2"
    other = trainer()
    opened = other.open({"path": str(path), "step": 3})
    assert (opened["policy_version"], opened["optimizer_step"], opened["restored"]) == (3, 6, True)
    other.train(3)
    assert other.digest() == one.digest()
    for a, b in zip(*(jax.tree.leaves(t.service._run.state) for t in (one, other)), strict=True):  # type: ignore[union-attr]
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_the_exposed_boxes_have_the_digests_and_hold_the_next_step_up(trainer: Callable[[], Trainer]) -> None:
    one = trainer()
    one.open()
    _, bundle = one.call("expose", version=0)
    held = f"x{one.calls}/expose"
    with one.store.exposures.reading("policy/0", "test") as exposure:
        for name, value in zip(bundle.meta["tensors"], bundle.arrays["digests"], strict=True):
            exposed = exposure.tensors[name]
            total = sum(
                (digest_box(np.asarray(v), lower, exposed.shape) for lower, v in exposed.boxes), np.zeros(2, np.uint32)
            )
            np.testing.assert_array_equal(total, value, name)
            del exposed
        del exposure
    _, again = one.call("exposed", version=0)
    assert again is bundle
    one.store.release(f"x{one.calls}/exposed")
    message = f"policy version 0 is still needed: {held} is held .*; pulling now: inference-1"
    with one.store.exposures.reading("policy/0", "inference-1"), pytest.raises(DeadlineError, match=message):
        one.call("train", [[b] for b in rollout(0, 0, 0)], step=0, deadline_s=0.05)

    before = one.digest()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(one.train, 0)
        assert not running.done()
        one.store.release(held)
        assert running.result(60)["optimizer_step"] == 2
    assert one.digest() != before
    with pytest.raises(TransferError, match="policy version 0 is not exposed"):
        one.call("exposed", version=0)
    with pytest.raises(LocalError, match="cannot expose policy version 0: this trainer holds 1"):
        one.call("expose", version=0)


def test_equal_inputs_give_equal_bits(trainer: Callable[[], Trainer]) -> None:
    digests = []
    for _ in range(2):
        one = trainer()
        one.open()
        one.train(0, seed=9)
        digests.append(one.digest())
    assert digests[0] == digests[1]


def test_what_is_no_checkpoint_is_refused(trainer: Callable[[], Trainer], tmp_path: Path) -> None:
    one = trainer()
    (tmp_path / "step_00000001").mkdir()
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        one.open({"path": str(tmp_path / "step_00000001"), "step": 1})
    one.open()
    one.call("save", step=0)
    path = one.call("save_wait")[0]["checkpoint"]
    with pytest.raises(CheckpointError, match="is of step 0, expected 7"):
        trainer().open({"path": path, "step": 7})


def test_calls_out_of_order_say_so(trainer: Callable[[], Trainer]) -> None:
    one = trainer()
    with pytest.raises(LocalError, match=r"trainer\.train before trainer\.open on trainer-0"):
        one.train(0)
    one.open()
    with pytest.raises(LocalError, match="step 3 trains policy version 3, this trainer holds 0"):
        one.train(3)
    with pytest.raises(LocalError, match="cannot save step 5: this trainer stands after step 0"):
        one.call("save", step=5)
    with pytest.raises(CheckpointError, match="no checkpoint to wait for"):
        one.call("save_wait")


def test_a_model_over_the_memory_limit_is_refused_before_it_is_loaded(trainer: Callable[[], Trainer]) -> None:
    limited = {**RAW["trainer"], "memory_limit_bytes": 1000}  # type: ignore[dict-item]
    with pytest.raises(ModelError, match=r"in each trainer process .*memory_limit_bytes = 1,000"):
        trainer().open(trainer=limited)


def test_a_loss_that_is_not_finite_ends_the_run(trainer: Callable[[], Trainer]) -> None:
    one = trainer()
    one.open()
    inputs = [rollout(group, 0, 0) for group in (0, 1)]
    for bundle, _ in inputs:
        bundle.arrays["behaviour_logp"][:] = -np.inf
    with pytest.raises(LocalError, match="not finite any more"):
        one.call("train", [[b] for b, _ in inputs] + [[s] for _, s in inputs], step=0)
    with pytest.raises(LocalError, match="state was lost"):
        one.call("save", step=0)


def test_warm_up_and_merging() -> None:
    config = configs.load(RAW)
    assert [learning_rate(config, i) for i in (0, 1, 3, 9)] == pytest.approx([2.5e-3, 5e-3, 1e-2, 1e-2])
    one = dict.fromkeys(
        ("loss", "kl", "entropy", "clip_fraction", "grad_norm", "logprob_diff_mean", "logprob_diff_max"), 1.0
    )
    merged = merge_metrics([{**one, "tokens": 3.0}, {**dict.fromkeys(one, 5.0), "tokens": 1.0}])
    assert (merged["loss"], merged["entropy"], merged["logprob_diff_max"]) == (3.0, 2.0, 1.0)
    assert "tokens" not in merged, "the step's own count is over all rows"


def test_the_params_digest_by_hand() -> None:
    digest = ParamsDigest()
    digest.add("a", np.array([[1.0, 2.0]], np.float32))
    digest.add("b", np.array([3.0], np.float32))
    raw = b"a\nfloat32\n1,2\n\x00\x00\x80\x3f\x00\x00\x00\x40" + b"b\nfloat32\n1\n\x00\x00\x40\x40"
    assert digest.hexdigest() == hashlib.sha256(raw).hexdigest()
    with pytest.raises(ValueError, match="expected name order"):
        digest.add("a", np.zeros(1, np.float32))
