"""One optimizer update: against a plain reference, and the same on every mesh and split into micro-batches."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from waypath.proto.errors import LocalError
from waypath.workers.mesh import build_mesh
from waypath.workers.models.config import ModelConfig
from waypath.workers.models.decoder import forward, init_params, logits
from waypath.workers.trainer.packing import MicroBatches, PackShape, empty_batches, fill_row
from waypath.workers.trainer.step import AdamW, Objective, TrainState, UpdateProgram, check_donated

MODEL = ModelConfig(
    vocab_size=16, hidden_size=8, intermediate_size=12, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4
)
ADAMW = AdamW(weight_decay=0.1, max_grad_norm=0.05)
POLICY = Objective(denominator=40.0, learning_rate=1e-2, temperature=0.7)
ROWS, TOKENS, SCORED, COUNT = 8, 7, 3, 2


@functools.cache
def program(data: int, fsdp: int, rows: int = ROWS) -> UpdateProgram:
    mesh = build_mesh({"data": data, "fsdp": fsdp}, jax.devices()[: data * fsdp])
    return UpdateProgram(MODEL, mesh, PackShape(rows, TOKENS, SCORED), COUNT * ROWS // rows, ADAMW)


def start(prog: UpdateProgram) -> TrainState:
    return prog.init(jax.device_put(initial(), prog.shardings.params))


@functools.cache
def initial() -> Any:
    return whole(jax.jit(lambda: init_params(MODEL, jax.random.key(1)))())


def batches(rows: int = ROWS, used: int = 13) -> MicroBatches:
    """13 rows of different lengths: the last micro-batch is padded."""
    rng = np.random.default_rng(5)
    found = empty_batches(-(-used // rows), PackShape(rows, TOKENS, SCORED))
    for slot in range(used):
        length, scored = int(rng.integers(4, TOKENS + 1)), int(rng.integers(1, SCORED + 1))
        fill_row(
            found,
            slot,
            rng.integers(0, MODEL.vocab_size, length),
            np.arange(length - scored, length),
            where="row",
            old_logp=rng.normal(-2.7, 0.2, scored),
            advantage=float(rng.normal()),
        )
    return found


def whole(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


@functools.cache
def reference(objective: Objective) -> tuple[Any, dict[str, float]]:
    """The same update without gathering scored positions, micro-batches or shards, and AdamW by the book."""
    params, metrics = _reference(objective.array())
    return whole(params), {key: float(value) for key, value in metrics.items()}


@jax.jit
def _reference(objective: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
    denominator, learning_rate, temperature, supervised = objective
    rows = [jnp.asarray(a.reshape(-1, *a.shape[2:])) for a in batches().arrays()]
    tokens, length, positions, mask, old, advantage = rows
    params = init_params(MODEL, jax.random.key(1))
    columns = jnp.broadcast_to(jnp.arange(TOKENS), tokens.shape)

    def loss(params: Any) -> tuple[jax.Array, Any]:
        hidden = forward(MODEL, params, tokens, columns, (columns < length[:, None]).astype(jnp.int32))
        log_p = jax.nn.log_softmax(logits(MODEL, params, hidden) / temperature)
        every = jnp.take_along_axis(log_p[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
        logp = jnp.take_along_axis(every, positions - 1, axis=1)
        ratio = jnp.exp(logp - old)
        gain = jnp.minimum(ratio * advantage[:, None], jnp.clip(ratio, 0.8, 1.2) * advantage[:, None])
        value = jnp.where(supervised > 0, logp, gain)
        return -jnp.sum(value * mask) / denominator, jnp.abs(logp - old) * mask

    (value, difference), grads = jax.value_and_grad(loss, has_aux=True)(params)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    clipped = jax.tree.map(lambda g: g * jnp.minimum(1.0, ADAMW.max_grad_norm / norm), grads)

    def stepped(path: Any, p: jax.Array, g: jax.Array) -> jax.Array:
        decay = 0.0 if "norm" in jax.tree_util.keystr(path) else ADAMW.weight_decay
        return p - learning_rate * (g / (jnp.abs(g) + ADAMW.eps) + decay * p)  # first step of Adam

    metrics = {
        "loss": value,
        "grad_norm": norm,
        "logprob_diff_mean": difference.sum() / mask.sum(),
        "logprob_diff_max": difference.max(),
        "tokens": mask.sum(),
    }
    return jax.tree_util.tree_map_with_path(stepped, params, clipped), metrics


def close(found: Any, expected: Any, atol: float) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=atol), found, expected)


@pytest.mark.parametrize("supervised", [False, True], ids=["policy", "supervised"])
def test_an_update_equals_the_plain_reference(supervised: bool) -> None:
    objective = Objective(40.0, 1e-2, 1.0 if supervised else 0.7, supervised)
    prog = program(1, 1)
    state, metrics = prog.run(start(prog), batches(), objective)
    params, expected = reference(objective)
    keys = ["loss", "grad_norm", "tokens"] if supervised else list(expected)
    np.testing.assert_allclose([metrics[k] for k in keys], [expected[k] for k in keys], rtol=2e-5)
    assert expected["grad_norm"] > ADAMW.max_grad_norm, "clipping is part of the comparison"
    # Adam's first step is a sign: where a gradient is around eps, rounding moves it
    close(whole(state.params), params, atol=2e-4)


@pytest.mark.parametrize(("data", "fsdp", "rows"), [(1, 4, ROWS), (2, 2, 4)])
def test_every_mesh_and_every_split_into_micro_batches_gives_the_same_updates(data: int, fsdp: int, rows: int) -> None:
    one, many = program(1, 1), program(data, fsdp, rows)
    expected, found = start(one), start(many)
    for _ in range(2):
        expected, wanted = one.run(expected, batches(), POLICY)
        found, metrics = many.run(found, batches(rows), POLICY)
        np.testing.assert_allclose(list(metrics.values()), list(wanted.values()), rtol=1e-5, atol=1e-6)
    close(whole(found.optimizer), whole(expected.optimizer), atol=1e-6)
    close(whole(found.params), whole(expected.params), atol=1e-6)


def test_two_runs_have_equal_bits_and_the_state_is_donated() -> None:
    prog = program(1, 4)
    old = start(prog)
    first, metrics = prog.run(old, batches(), POLICY)
    second, again = prog.run(start(prog), batches(), POLICY)
    assert metrics == again and all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    jax.tree.map(np.testing.assert_array_equal, whole(first), whole(second))


def test_a_held_host_view_is_an_error_that_names_the_leaf() -> None:
    prog = program(1, 4)
    state = start(prog)
    view = np.asarray(state.params["layers"]["q"].addressable_shards[0].data)
    with pytest.raises(LocalError, match=r"1 donated arrays were not freed, first \.params\['layers'\]\['q'\]"):
        prog.run(state, batches(), POLICY)
    assert view.shape == (2, 8, 2)


def test_rows_without_advantage_measure_but_do_not_pull() -> None:
    prog = program(1, 1)
    probe = batches(used=ROWS)
    probe.advantage[:] = 0.0
    state, metrics = prog.run(start(prog), probe, POLICY)
    assert metrics["loss"] == metrics["grad_norm"] == metrics["clip_fraction"] == 0.0
    assert 0 < metrics["entropy"] <= np.log(MODEL.vocab_size) and metrics["logprob_diff_max"] > 0
    assert metrics["kl"] > 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(whole(state.optimizer[0].mu)))


def test_an_update_may_have_no_micro_batch_at_all() -> None:
    prog = program(1, 1)
    state, metrics = prog.run(start(prog), empty_batches(0, prog.shape), POLICY)
    assert metrics["grad_norm"] == metrics["tokens"] == 0.0
    assert int(state.optimizer[0].count) == 1


def test_more_micro_batches_than_the_program_has_room_for_are_refused() -> None:
    prog = program(1, 1)
    with pytest.raises(ValueError, match="3 micro-batches in an update, room for 2"):
        prog.run(start(prog), batches(used=17), POLICY)


def test_rows_have_to_divide_over_the_devices() -> None:
    mesh = build_mesh({"fsdp": 4}, jax.devices()[:4])
    with pytest.raises(ValueError, match="6 rows a micro-batch do not divide over 4 devices"):
        UpdateProgram(MODEL, mesh, PackShape(6, TOKENS, SCORED), 1, ADAMW)


def test_check_donated_passes_over_what_is_gone() -> None:
    array = jnp.zeros(3)
    array.delete()
    check_donated(TrainState({"w": array}, ()))
