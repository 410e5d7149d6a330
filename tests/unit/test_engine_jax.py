"""The jax engine: right log-probabilities, the same bits whatever else runs, ends, versions, cancelling."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from waypath.proto.errors import LocalError, UserError
from waypath.workers.engines import programs
from waypath.workers.engines.jax_engine import JaxEngine
from waypath.workers.engines.protocol import EngineProtocol, GroupRequest, GroupResult, SamplingParams
from waypath.workers.engines.shape import EngineShape
from waypath.workers.memory import engine_bytes
from waypath.workers.models import decoder
from waypath.workers.models.config import ModelConfig
from waypath.workers.models.views import views

MODEL = ModelConfig(
    vocab_size=23,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    qk_norm=True,
    initializer_range=0.4,
)
SHAPE = EngineShape(slots=4, prompt_buckets=(6, 12), max_new_tokens=7, decode_steps=3, group_size=2)
FREE = SamplingParams(temperature=0.8, max_new_tokens=7)


@functools.cache
def params_of(seed: int) -> decoder.Params:
    return decoder.init_params(MODEL, jax.random.key(seed))


def write_weights(engine: EngineProtocol, params: decoder.Params) -> None:
    for view in views(MODEL):
        leaf: Any = functools.reduce(lambda node, key: node[key], view.path, params)
        values = np.asarray(leaf if view.index is None else leaf[view.index])
        engine.stage_view(view.name, (0,) * len(view.shape), view.shape)[...] = values


def publish(engine: EngineProtocol, version: int, params: decoder.Params) -> None:
    engine.begin(version)
    write_weights(engine, params)
    engine.seal()
    engine.commit(version)


@functools.cache
def _shared() -> JaxEngine:
    engine = JaxEngine(MODEL, SHAPE, lambda config, params: {})
    publish(engine, 0, params_of(0))
    return engine


@pytest.fixture
def engine() -> Iterator[JaxEngine]:
    """One compiled engine for all tests, idle at both ends, serving `params_of(0)`."""
    shared = _shared()
    assert not shared.has_work
    yield shared
    shared.reset()
    shared.abort()
    assert shared.version is not None


def group(
    engine: EngineProtocol, group_id: int, length: int, n: int = 2, sampling: SamplingParams = FREE
) -> GroupRequest:
    prompt = tuple(int(t) for t in np.random.default_rng(group_id).integers(0, MODEL.vocab_size, length))
    assert engine.version is not None
    return GroupRequest(group_id, prompt, n, seed=5, sampling=sampling, version=engine.version)


def finish(engine: EngineProtocol) -> dict[int, GroupResult]:
    """Runs the engine until it is idle; results by handle."""
    results: dict[int, GroupResult] = {}
    while (plan := engine.plan()) is not None:
        results.update({result.handle: result for result in engine.step(plan)})
    assert not engine.has_work
    return results


def run(engine: EngineProtocol, requests: Sequence[GroupRequest]) -> dict[int, GroupResult]:
    """Results by group id, all submitted at once."""
    for request in requests:
        engine.submit(request)
    return {result.group_id: result for result in finish(engine).values()}


def same_bits(one: GroupResult, two: GroupResult, samples: int | None = None) -> bool:
    pairs = zip((*one.tokens[:samples], *one.logp[:samples]), (*two.tokens[:samples], *two.logp[:samples]), strict=True)
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)


@jax.jit
def _full_logits(params: decoder.Params, ids: jax.Array, length: jax.Array) -> jax.Array:
    columns = jnp.arange(ids.shape[0], dtype=jnp.int32)
    hidden = decoder.forward(MODEL, params, ids[None], columns[None], (columns < length).astype(jnp.int32)[None])
    return decoder.logits(MODEL, params, hidden)[0]


def reference_logits(params: decoder.Params, ids: Sequence[int]) -> np.ndarray:
    """float32 [len(ids), V] of one forward pass without a cache."""
    padded = np.zeros(SHAPE.cache_length(12), np.int32)
    padded[: len(ids)] = ids
    return np.asarray(_full_logits(params, padded, np.int32(len(ids))))[: len(ids)]


def reference_logp(params: decoder.Params, prompt: Sequence[int], tokens: np.ndarray, temperature: float) -> np.ndarray:
    logits = reference_logits(params, [*prompt, *tokens.tolist()]).astype(np.float64) / temperature
    logp = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return logp[np.arange(len(prompt) - 1, len(logits) - 1), tokens]


@pytest.mark.parametrize("length", [1, 5, 6, 7, 12])
def test_logp_is_that_of_a_full_forward_pass(engine: JaxEngine, length: int) -> None:
    request = group(engine, length, length, n=3)
    result = run(engine, [request])[length]
    for tokens, logp in zip(result.tokens, result.logp, strict=True):
        expected = reference_logp(params_of(0), request.prompt_ids, tokens, FREE.temperature)
        np.testing.assert_allclose(logp, expected, atol=1e-5)
        assert logp.dtype == np.float32 and tokens.dtype == np.int32


def test_greedy_follows_the_argmax_and_scores_at_temperature_one(engine: JaxEngine) -> None:
    request = group(engine, 40, 4, n=2, sampling=SamplingParams(0.3, 6, greedy=True))
    result = run(engine, [request])[40]
    assert result.tokens[0].tolist() == result.tokens[1].tolist()
    ids = [*request.prompt_ids]
    for token in result.tokens[0].tolist():
        assert token == int(np.argmax(reference_logits(params_of(0), ids)[-1]))
        ids.append(token)
    expected = reference_logp(params_of(0), request.prompt_ids, result.tokens[0], 1.0)
    np.testing.assert_allclose(result.logp[0], expected, atol=1e-5)


def test_samples_are_the_same_bits_in_every_company(engine: JaxEngine) -> None:
    requests = [
        group(engine, 1, 5, n=2),
        group(engine, 2, 6, n=3, sampling=SamplingParams(1.3, 7, frozenset({3, 8}))),
        group(engine, 3, 2, n=1, sampling=SamplingParams(1.0, 3, greedy=True)),
        group(engine, 4, 9, n=4),
        group(engine, 5, 12, n=2, sampling=SamplingParams(0.5, 1)),
        group(engine, 6, 1, n=4),
    ]
    alone = {request.group_id: run(engine, [request])[request.group_id] for request in requests}
    orders = ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 5, 0, 4, 1, 3])
    for order in orders:
        together = run(engine, [requests[i] for i in order])
        assert all(same_bits(alone[g], together[g]) for g in alone), order


def test_samples_are_the_same_bits_when_they_join_a_running_batch(engine: JaxEngine) -> None:
    late, first = group(engine, 11, 4), group(engine, 12, 3)
    expected = run(engine, [late])[11]
    engine.submit(first)
    for _ in range(2):  # admit, then decode three tokens
        plan = engine.plan()
        assert plan is not None
        engine.step(plan)
    engine.submit(late)
    assert any(same_bits(expected, result) for result in finish(engine).values() if result.group_id == 11)


def test_a_group_larger_than_the_engine_comes_in_waves_with_the_same_bits(engine: JaxEngine) -> None:
    small, large = group(engine, 21, 5, n=3), group(engine, 21, 5, n=11)
    expected = run(engine, [small])[21]
    result = run(engine, [large])[21]
    assert len(result.tokens) == 11
    assert same_bits(expected, dataclasses.replace(result, tokens=result.tokens[:3], logp=result.logp[:3]))


def test_samples_of_a_group_and_groups_of_a_prompt_differ(engine: JaxEngine) -> None:
    request = group(engine, 31, 5, n=4)
    other = dataclasses.replace(request, group_id=32)
    results = run(engine, [request, other])
    drawn = {tuple(tokens.tolist()) for result in results.values() for tokens in result.tokens}
    assert len(drawn) == 8


def test_a_stop_token_ends_its_sample_and_belongs_to_it(engine: JaxEngine) -> None:
    free = run(engine, [group(engine, 50, 5, n=4)])[50]
    stop = frozenset(range(0, MODEL.vocab_size, 3))
    stopped = run(engine, [group(engine, 50, 5, n=4, sampling=dataclasses.replace(FREE, stop_ids=stop))])[50]
    reasons = set()
    for i, tokens in enumerate(stopped.tokens):
        full = free.tokens[i].tolist()
        cut = next((k + 1 for k, token in enumerate(full) if token in stop), len(full))
        assert tokens.tolist() == full[:cut]
        assert stopped.logp[i].tobytes() == free.logp[i][:cut].tobytes()
        assert stopped.finish_reasons[i] == ("stop" if full[cut - 1] in stop else "length")
        assert len(stopped.versions[i]) == cut and set(stopped.versions[i]) == {engine.version}
        reasons.add(stopped.finish_reasons[i])
    assert "stop" in reasons
    assert {len(tokens) for tokens in free.tokens} == {7} and set(free.finish_reasons) == {"length"}


def test_cancelling_frees_the_slots_and_leaves_the_others_alone(engine: JaxEngine) -> None:
    stays, goes, waits = group(engine, 61, 5), group(engine, 62, 4), group(engine, 63, 6)
    expected = {g: run(engine, [request])[g] for g, request in ((61, stays), (63, waits))}
    handles = [engine.submit(request) for request in (stays, goes, waits)]
    for _ in range(2):
        plan = engine.plan()
        assert plan is not None
        engine.step(plan)
    assert engine.stats().running_groups == 2 and engine.stats().waiting_groups == 1
    assert engine.cancel(handles[1]) and not engine.cancel(handles[1])
    results = finish(engine)
    assert sorted(results) == [handles[0], handles[2]]
    assert same_bits(results[handles[0]], expected[61]) and same_bits(results[handles[2]], expected[63])
    waiting = engine.submit(waits)
    assert engine.cancel(waiting) and not engine.has_work and engine.plan() is None


def test_a_plan_changes_nothing_and_is_plain_data(engine: JaxEngine) -> None:
    engine.submit(group(engine, 71, 5))
    plan = engine.plan()
    assert plan is not None and plan == engine.plan()
    assert json.loads(json.dumps(dataclasses.asdict(plan)))["kind"] == "admit"


def test_new_weights_serve_exactly_from_their_commit_on(engine: JaxEngine) -> None:
    def sampled() -> GroupResult:
        return run(engine, [group(engine, 81, 5, n=3)])[81]

    assert engine.version is not None
    start, old = engine.version, sampled()
    engine.begin(start + 1)
    write_weights(engine, params_of(1))
    assert same_bits(sampled(), old), "staging is invisible"
    engine.seal()
    assert same_bits(sampled(), old), "sealing is invisible"
    engine.commit(start + 1)
    new = sampled()
    assert not same_bits(new, old) and set(new.versions[0]) == {start + 1}
    prompt = group(engine, 81, 5).prompt_ids
    for tokens, logp in zip(new.tokens, new.logp, strict=True):
        np.testing.assert_allclose(logp, reference_logp(params_of(1), prompt, tokens, FREE.temperature), atol=1e-5)
    publish(engine, start + 2, params_of(0))
    assert same_bits(sampled(), old), "the old weights again, in the other buffers' turn"
    publish(engine, start + 3, params_of(1))
    assert same_bits(sampled(), new)
    publish(engine, start + 4, params_of(0))


def test_weights_change_only_between_groups(engine: JaxEngine) -> None:
    assert engine.version is not None
    start = engine.version
    with pytest.raises(LocalError, match=f"asks for policy version {start + 1}, this engine serves version {start}"):
        engine.submit(dataclasses.replace(group(engine, 91, 3), version=start + 1))
    engine.begin(start + 1)
    write_weights(engine, params_of(0))
    engine.seal()
    engine.submit(group(engine, 91, 3))
    with pytest.raises(LocalError, match=r"groups \[91\] are unfinished"):
        engine.commit(start + 1)
    finish(engine)
    engine.commit(start + 1)
    assert engine.version == start + 1


@pytest.mark.parametrize(
    ("length", "n", "sampling", "message"),
    [
        (13, 2, FREE, "the prompt has 13 tokens, expected 1 to 12"),
        (0, 2, FREE, "the prompt has 0 tokens"),
        (3, 0, FREE, "0 samples of up to 7 tokens"),
        (3, 2, SamplingParams(1.0, 8), "2 samples of up to 8 tokens"),
        (3, 2, SamplingParams(0.0, 4), "temperature 0.0 is not positive"),
        (3, 2, SamplingParams(1.0, 4, frozenset({23})), "outside the vocabulary of 23"),
    ],
)
def test_groups_that_do_not_fit_are_refused(
    engine: JaxEngine, length: int, n: int, sampling: SamplingParams, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        engine.submit(group(engine, 95, length, n, sampling))


def test_shapes_that_the_model_cannot_serve_are_refused() -> None:
    short = dataclasses.replace(MODEL, max_position_embeddings=18)
    with pytest.raises(UserError, match="= 19 is more than the model's 18 positions"):
        JaxEngine(short, SHAPE, lambda config, params: {})


def test_memory_is_known_before_anything_is_built() -> None:
    memory = engine_bytes(MODEL, SHAPE)
    weights = sum(int(np.prod(view.shape)) for view in views(MODEL)) * 4
    rows = (16 + 32) * 4  # 6 + 7 and 12 + 7, each rounded up to a multiple of 16
    assert memory == {"weights": 2 * weights, "cache": rows * 2 * MODEL.num_layers * 2 * 4 * 4 + 2 * 4 * 23}
    device = jax.local_devices()[0]
    lanes = [programs.new_state(MODEL, SHAPE, bucket, device) for bucket in SHAPE.prompt_buckets]
    assert memory["cache"] == sum(leaf.nbytes for leaf in jax.tree.leaves(lanes))
