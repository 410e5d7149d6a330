"""The decoder against an independent numpy implementation, and its entry points against each other."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from waypath.proto.errors import ModelError
from waypath.workers.models.config import ModelConfig, attention_length
from waypath.workers.models.decoder import (
    Decoder,
    abstract_params,
    decode,
    forward,
    init_params,
    logits,
    prefill,
    tree_of,
)
from waypath.workers.models.views import leaves, views

LLAMA = ModelConfig(23, 24, 40, 2, 6, 3, 4, tie_embeddings=True, eos_token_ids=(1,))
QWEN = ModelConfig(23, 24, 40, 2, 4, 2, 8, tie_embeddings=False, qk_norm=True, rope_theta=1e6, rms_norm_eps=1e-6)
BOTH = pytest.mark.parametrize("config", [LLAMA, QWEN], ids=["llama", "qwen3"])


def make_params(config: ModelConfig) -> dict[str, Any]:
    """Parameters large enough that a wrong rotation, mask or norm shows, with norm scales that are not one."""
    generator = np.random.default_rng(3)
    return tree_of(
        config,
        lambda leaf: (0.25 * generator.standard_normal(leaf.shape) + leaf.norm).astype(np.float32),
    )


def reference(config: ModelConfig, params: dict[str, Any], tokens: list[int]) -> np.ndarray[Any, Any]:
    """Logits [T, V] of one sequence in float64: one position and one head at a time, RoPE as complex numbers."""
    tensors = {}
    for view in views(config):
        leaf: Any = params
        for key in view.path:
            leaf = leaf[key]
        tensors[view.name] = np.asarray(leaf if view.index is None else leaf[view.index], np.float64)

    def norm(x: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
        return x / np.sqrt((x**2).mean() + config.rms_norm_eps) * tensors[name + ".weight"]

    def rotate(head: np.ndarray[Any, Any], position: int) -> np.ndarray[Any, Any]:
        half = config.head_dim // 2
        turn = np.exp(1j * position * config.rope_theta ** (-np.arange(half) / half))
        turned = (head[:half] + 1j * head[half:]) * turn
        return np.concatenate([turned.real, turned.imag])

    rows = [tensors["model.embed_tokens.weight"][token] for token in tokens]
    for i in range(config.num_layers):
        name = f"model.layers.{i}."
        heads: dict[str, list[list[np.ndarray[Any, Any]]]] = {"q": [], "k": [], "v": []}
        for position, row in enumerate(rows):
            x = norm(row, name + "input_layernorm")
            for kind, found in heads.items():
                split = list(np.split(tensors[f"{name}self_attn.{kind}_proj.weight"] @ x, _count(config, kind)))
                if kind != "v" and config.qk_norm:
                    split = [norm(head, f"{name}self_attn.{kind}_norm") for head in split]
                found.append(split if kind == "v" else [rotate(head, position) for head in split])
        for position in range(len(rows)):
            attended = []
            for h in range(config.num_heads):
                g = h * config.num_kv_heads // config.num_heads
                score = np.array([heads["q"][position][h] @ heads["k"][s][g] for s in range(position + 1)])
                weight = np.exp(score / np.sqrt(config.head_dim))
                weight /= weight.sum()
                attended.append(sum(w * heads["v"][s][g] for s, w in enumerate(weight)))
            x = rows[position] + tensors[name + "self_attn.o_proj.weight"] @ np.concatenate(attended)
            y = norm(x, name + "post_attention_layernorm")
            gate = tensors[name + "mlp.gate_proj.weight"] @ y
            up = tensors[name + "mlp.up_proj.weight"] @ y
            rows[position] = x + tensors[name + "mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    return np.stack([head @ norm(row, "model.norm") for row in rows])


def _count(config: ModelConfig, kind: str) -> int:
    return config.num_heads if kind == "q" else config.num_kv_heads


@partial(jax.jit, static_argnames=("config", "remat", "unroll"))
def full_logits(config: ModelConfig, params: dict[str, Any], tokens: jax.Array, **options: Any) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return logits(config, params, forward(config, params, tokens, positions, jnp.ones_like(tokens), **options))


def random_tokens(config: ModelConfig, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(5).integers(0, config.vocab_size, shape, dtype=np.int32)


@BOTH
def test_forward_equals_the_numpy_reference(config: ModelConfig) -> None:
    params = make_params(config)
    tokens = random_tokens(config, 2, 7)
    found = full_logits(config, params, tokens)
    assert found.dtype == jnp.float32
    for row in range(2):
        expected = reference(config, params, tokens[row].tolist())
        assert np.abs(expected).max() > 1
        np.testing.assert_allclose(found[row], expected, rtol=2e-4, atol=2e-4)


@BOTH
def test_prefill_and_decode_equal_forward(config: ModelConfig) -> None:
    params = jax.tree.map(jnp.asarray, make_params(config))
    tokens = random_tokens(config, 3, 10)
    expected = np.asarray(full_logits(config, params, tokens))
    lengths = np.array([5, 1, 3], np.int32)
    rows = np.arange(3)

    @jax.jit
    def start(params: dict[str, Any]) -> tuple[jax.Array, jax.Array, jax.Array]:
        prompts = jnp.where(jnp.arange(5) < lengths[:, None], tokens[:, :5], 0)
        hidden, cache_k, cache_v = prefill(config, params, prompts, jnp.asarray(lengths))
        assert cache_k.shape == (config.num_layers, 3, 5, config.num_kv_heads, config.head_dim)
        room = ((0, 0), (0, 0), (0, 5), (0, 0), (0, 0))
        return logits(config, params, hidden), jnp.pad(cache_k, room), jnp.pad(cache_v, room)

    @partial(jax.jit, donate_argnums=(3, 4))
    def step(params: dict[str, Any], tokens: Any, at: Any, *cache: jax.Array) -> tuple[jax.Array, ...]:
        hidden, *cache_after = decode(config, params, tokens, at, *cache)
        return logits(config, params, hidden), *cache_after

    found, cache_k, cache_v = start(params)
    np.testing.assert_allclose(found, expected[rows, lengths - 1], rtol=1e-5, atol=1e-5)
    for offset in range(5):
        at = lengths + offset
        old = cache_k
        found, cache_k, cache_v = step(params, tokens[rows, at], at, cache_k, cache_v)
        assert old.is_deleted()
        np.testing.assert_allclose(found, expected[rows, at], rtol=1e-5, atol=1e-5)


def test_decode_is_forward_to_float32_rounding_at_the_demo_s_shapes() -> None:
    """How many elements have equal bits depends on the CPU (AVX2: more than 90 %, AVX-512: 12 %); how close they are does not."""
    config = ModelConfig(32, 576, 64, 2, 9, 3, 64)
    params, length, rows = init_params(config, jax.random.key(0)), 21, 32
    tokens = jnp.asarray(random_tokens(config, rows, length))
    columns = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    whole = jax.jit(partial(forward, config))(params, tokens, columns, jnp.ones_like(tokens))
    lengths = jnp.full(rows, length - 1)
    _, *caches = jax.jit(partial(prefill, config))(params, tokens[:, :-1], lengths)
    room = [(0, 0), (0, 0), (0, attention_length(length) - length + 1), (0, 0), (0, 0)]
    k, v = (jnp.pad(cache, room) for cache in caches)
    hidden, _, _ = jax.jit(partial(decode, config))(params, tokens[:, -1], lengths, k, v)
    np.testing.assert_allclose(hidden, whole[:, -1], rtol=0, atol=8 * np.finfo(np.float32).eps * np.abs(whole).max())


def test_decode_outside_the_cache_writes_nothing() -> None:
    params = make_params(LLAMA)
    shape = (LLAMA.num_layers, 2, 4, LLAMA.num_kv_heads, LLAMA.head_dim)
    cache = np.random.default_rng(0).standard_normal(shape, np.float32)
    step = jax.jit(partial(decode, LLAMA))
    _, cache_k, cache_v = step(params, np.array([3, 4]), np.array([4, 1], np.int32), cache, cache)
    for after in (cache_k, cache_v):
        changed = (np.asarray(after) != cache).any(axis=(0, 3, 4))
        assert changed.tolist() == [[False] * 4, [False, True, False, False]]


def test_segments_do_not_see_each_other_and_padding_is_finite() -> None:
    params = make_params(LLAMA)
    packed = np.array([[3, 4, 5, 6, 7, 8, 9, 0, 0]], np.int32)
    positions = np.array([[0, 1, 2, 3, 0, 1, 2, 0, 0]], np.int32)
    segments = np.array([[1, 1, 1, 1, 2, 2, 2, 0, 0]], np.int32)
    found = np.asarray(_packed_logits(params, packed, positions, segments))[0]
    np.testing.assert_allclose(found[:4], reference(LLAMA, params, [3, 4, 5, 6]), rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(found[4:7], reference(LLAMA, params, [7, 8, 9]), rtol=2e-4, atol=2e-4)
    assert np.isfinite(found).all()


@jax.jit
def _packed_logits(params: dict[str, Any], *batch: jax.Array) -> jax.Array:
    return logits(LLAMA, params, forward(LLAMA, params, *batch))


def test_remat_and_unroll_change_neither_output_nor_gradient() -> None:
    params = make_params(LLAMA)
    tokens = np.array([[3, 4, 5, 6]], np.int32)

    def loss(params: dict[str, Any], remat: bool) -> jax.Array:
        return jnp.square(full_logits(LLAMA, params, tokens, remat=remat)).mean()

    graded = jax.jit(jax.grad(loss), static_argnums=1)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        graded(params, True),
        graded(params, False),
    )
    unrolled = full_logits(LLAMA, params, tokens, unroll=2)
    np.testing.assert_allclose(unrolled, full_logits(LLAMA, params, tokens), rtol=1e-5, atol=1e-5)


def test_bfloat16_parameters_give_float32_logits_near_the_float32_ones() -> None:
    params = jax.tree.map(lambda leaf: 0.3 * leaf, make_params(LLAMA))
    tokens = np.array([[3, 4, 5, 6]], np.int32)
    with jax.numpy_dtype_promotion("standard"):  # jax's own attention promotes bfloat16
        low = full_logits(LLAMA, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), tokens)
    assert low.dtype == jnp.float32
    high = np.asarray(full_logits(LLAMA, params, tokens))
    np.testing.assert_allclose(low, high, atol=0.05 * np.abs(high).max())


def test_init_is_normal_with_unit_norms_and_depends_on_the_key() -> None:
    config = ModelConfig(64, 32, 48, 2, 4, 2, 8, initializer_range=0.05)
    make = jax.jit(partial(init_params, config))
    params, other = make(jax.random.key(0)), make(jax.random.key(1))
    assert jax.tree.map(lambda leaf: leaf.shape, params) == jax.tree.map(lambda s: s.shape, abstract_params(config))
    assert np.all(np.asarray(params["layers"]["attn_norm"]) == 1)
    up = np.asarray(params["layers"]["up"])
    assert abs(up.std() - 0.05) < 0.005
    assert not np.array_equal(up, np.asarray(params["layers"]["gate"]))
    assert not np.array_equal(up, np.asarray(other["layers"]["up"]))


@BOTH
def test_the_module_holds_the_parameter_dict(config: ModelConfig) -> None:
    params = make_params(config)
    module = Decoder(config, params=params)
    state = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    assert jax.tree.all(jax.tree.map(np.array_equal, state, params))
    tokens = np.array([[3, 4, 5]], np.int32)
    found = nnx.jit(lambda module, *batch: module(*batch))(module, tokens, np.arange(3)[None], tokens // tokens)
    np.testing.assert_allclose(found, full_logits(config, params, tokens), rtol=1e-5, atol=1e-5)


@BOTH
def test_views_cover_every_leaf_once(config: ModelConfig) -> None:
    shapes = jax.tree.map(lambda leaf: leaf.shape, abstract_params(config), is_leaf=lambda x: hasattr(x, "shape"))
    found = views(config)
    assert [view.name for view in found] == sorted({view.name for view in found})
    for leaf in leaves(config):
        node: Any = shapes
        for key in leaf.path:
            node = node[key]
        assert node == leaf.shape
        indices = [view.index for view in found if view.path == leaf.path]
        assert sorted(indices, key=str) == ([None] if not leaf.stacked else list(range(config.num_layers)))
    assert ("lm_head.weight" in {view.name for view in found}) is not config.tie_embeddings


@BOTH
def test_config_survives_hugging_face_json(config: ModelConfig) -> None:
    assert ModelConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported; supported: LlamaForCausalLM"),
        ({"architectures": None}, "architecture None is not supported"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "rope_scaling of type 'llama3'"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"num_key_value_heads": 4}, r"num_attention_heads \(6\) must be a multiple"),
        ({"num_hidden_layers": 0}, "num_layers must be at least 1"),
        ({"head_dim": 5}, "head_dim must be even"),
    ],
)
def test_a_config_that_the_decoder_cannot_run_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf(LLAMA.to_hf() | change)


def test_a_missing_config_key_is_named() -> None:
    raw = LLAMA.to_hf()
    del raw["intermediate_size"]
    with pytest.raises(ModelError, match="'intermediate_size' is missing"):
        ModelConfig.from_hf(raw)


def test_newer_rope_parameters_are_read() -> None:
    raw = LLAMA.to_hf() | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    del raw["rope_theta"]
    assert ModelConfig.from_hf(raw).rope_theta == 5e5
