"""A Llama-family decoder (Llama, SmolLM2, Mistral, Qwen3) in JAX, as functions of a parameter dict.

Owns the mathematics: RMSNorm in float32, half-split RoPE, grouped-query attention, SwiGLU, the key-value cache.
Must not know meshes, files, tokenizers, losses or sampling; called by the trainer (``forward``, ``logits``) and the
``jax`` engine (``prefill``, ``decode``, ``logits``).

Parameters are a nested dict of arrays, the pure-dict state of :class:`Decoder` (``views.leaves`` is the table);
layers are stacked and walked by ``lax.scan``: on CPU a decode step with scan was as fast as an unrolled one and
compiled ten times faster. The arrays' dtype is the compute dtype; norms, attention weights and logits are float32.

Attention runs over a multiple of ``config.ATTENTION_COLUMNS`` columns (masked): there XLA:CPU's kernels give a row the same bits
whether it is the one query of ``decode`` or one among many on AVX2 (measured for SmolLM2's heads), so that an engine's log-probs
and a trainer's differ by less than 4e-6 over 30 layers; at 21 columns they differed by up to 9e-5. On AVX-512 the kernels
differ at every width, and the log-probs by up to 5e-5.

The cache has shape [L, B, S, Hkv, Dh] and holds keys after RoPE. ``decode`` writes one position a row in place when
the caches are donated, or are the carry of a ``lax.while_loop``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from waypath.workers.models.config import ModelConfig, attention_length
from waypath.workers.models.views import Leaf, leaves

Params = dict[str, Any]


def tree_of(config: ModelConfig, make: Any) -> Params:
    """A parameter-shaped nested dict with ``make(leaf)`` in each place."""
    params: Params = {}
    for leaf in leaves(config):
        node = params
        for key in leaf.path[:-1]:
            node = node.setdefault(key, {})
        node[leaf.path[-1]] = make(leaf)
    return params


def abstract_params(config: ModelConfig, dtype: Any = jnp.float32) -> Params:
    """The parameter dict with a ``jax.ShapeDtypeStruct`` in each place."""
    return tree_of(config, lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype))


def init_params(config: ModelConfig, key: Array, dtype: Any = jnp.float32) -> Params:
    """Fresh parameters: normal with ``initializer_range`` for weights, ones for norms.

    A leaf's values depend on ``key`` and on its position in ``views.leaves`` alone.
    """
    order = {leaf.path: i for i, leaf in enumerate(leaves(config))}

    def make(leaf: Leaf) -> Array:
        if leaf.norm:
            return jnp.ones(leaf.shape, dtype)
        values = jax.random.normal(jax.random.fold_in(key, order[leaf.path]), leaf.shape, jnp.float32)
        return (values * config.initializer_range).astype(dtype)

    return tree_of(config, make)


class Decoder(nnx.Module):
    """The decoder as an NNX module, for code that wants ``nnx.split``, ``nnx.state`` or a graph definition.

    ``nnx.to_pure_dict(nnx.state(module))`` is the parameter dict of the functions below. Pass ``params`` (arrays or
    ``ShapeDtypeStruct``) or a ``key`` to initialise.
    """

    def __init__(self, config: ModelConfig, *, params: Params | None = None, key: Array | None = None) -> None:
        if params is None:
            params = abstract_params(config) if key is None else init_params(config, key)
        self.config = config
        self.embed = nnx.Param(params["embed"])
        self.layers = nnx.Dict({name: nnx.Param(value) for name, value in params["layers"].items()})
        self.norm = nnx.Param(params["norm"])
        if not config.tie_embeddings:
            self.lm_head = nnx.Param(params["lm_head"])

    def __call__(self, tokens: Array, positions: Array, segment_ids: Array) -> Array:
        """Logits [B, T, V] float32."""
        params = nnx.to_pure_dict(nnx.state(self, nnx.Param))
        return logits(self.config, params, forward(self.config, params, tokens, positions, segment_ids))


def _linear(x: Array, weight: Array) -> Array:
    """x [..., in] times weight [out, in], in the weight's dtype."""
    return jnp.einsum("...i,oi->...o", x.astype(weight.dtype), weight)


def _rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """RMSNorm over the last axis, computed and returned in float32 (Zhang and Sennrich 2019, eq. 4)."""
    x = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(variance + eps) * scale.astype(jnp.float32)


def _rope_table(config: ModelConfig, positions: Array) -> tuple[Array, Array]:
    """cos and sin [..., 1, head_dim / 2] float32 of the angles of ``positions`` [...] (Su et al. 2021, eq. 15)."""
    exponent = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    inverse = 1.0 / jnp.float32(config.rope_theta) ** exponent
    angle = positions.astype(jnp.float32)[..., None, None] * inverse
    return jnp.cos(angle), jnp.sin(angle)


def _rope(x: Array, table: tuple[Array, Array]) -> Array:
    """Rotate x [..., heads, head_dim]: dimension i pairs with i + head_dim / 2, as in Hugging Face's checkpoints."""
    cos, sin = table
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _qkv(
    config: ModelConfig, layer: Mapping[str, Array], x: Array, table: tuple[Array, Array]
) -> tuple[Array, Array, Array]:
    """Queries [..., H, Dh], keys and values [..., Hkv, Dh] of the layer's input x [..., D]."""
    normed = _rms_norm(x, layer["attn_norm"], config.rms_norm_eps)
    heads = (*x.shape[:-1], config.num_heads, config.head_dim)
    kv_heads = (*x.shape[:-1], config.num_kv_heads, config.head_dim)
    q = _linear(normed, layer["q"]).reshape(heads)
    k = _linear(normed, layer["k"]).reshape(kv_heads)
    v = _linear(normed, layer["v"]).reshape(kv_heads)
    if config.qk_norm:
        q = _rms_norm(q, layer["q_norm"], config.rms_norm_eps).astype(v.dtype)
        k = _rms_norm(k, layer["k_norm"], config.rms_norm_eps).astype(v.dtype)
    return _rope(q, table), _rope(k, table), v


def _finish_layer(config: ModelConfig, layer: Mapping[str, Array], x: Array, attended: Array) -> Array:
    """Output projection, residual and SwiGLU block; attended [..., H, Dh], x and result [..., D]."""
    x = x + _linear(attended.reshape(*x.shape[:-1], -1), layer["o"])
    normed = _rms_norm(x, layer["mlp_norm"], config.rms_norm_eps)
    gated = jax.nn.silu(_linear(normed, layer["gate"])) * _linear(normed, layer["up"])
    return x + _linear(gated, layer["down"])


def _causal_layer(
    config: ModelConfig, layer: Mapping[str, Array], x: Array, table: tuple[Array, Array], mask: Array
) -> tuple[Array, Array, Array]:
    q, k, v = _qkv(config, layer, x, table)
    length = x.shape[1]
    padding = ((0, 0), (0, mask.shape[-1] - length), (0, 0), (0, 0))
    wide_q, wide_k, wide_v = (jnp.pad(each, padding) for each in (q, k, v))
    attended = jax.nn.dot_product_attention(wide_q, wide_k, wide_v, mask=mask)[:, :length]
    return _finish_layer(config, layer, x, attended), k, v


def _causal_mask(segment_ids: Array) -> Array:
    """mask [B, 1, S, S], S = attention_length(T): the same segment, not later. Padding (0) sees padding: no row is empty."""
    length = attention_length(segment_ids.shape[-1])
    segment_ids = jnp.pad(segment_ids, ((0, 0), (0, length - segment_ids.shape[-1])))
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return (same & jnp.tril(jnp.ones((length, length), bool)))[:, None]


def _final_norm(config: ModelConfig, params: Params, x: Array) -> Array:
    return _rms_norm(x, params["norm"], config.rms_norm_eps)


def forward(
    config: ModelConfig,
    params: Params,
    tokens: Array,
    positions: Array,
    segment_ids: Array,
    *,
    remat: bool = False,
    unroll: int = 1,
) -> Array:
    """Hidden states [B, T, D] float32 after the final norm.

    tokens, positions, segment_ids: int32 [B, T]. ``positions`` restart in each segment (they feed RoPE alone);
    a token sees earlier columns of its own segment. Segment 0 is padding; its outputs mean nothing, and are finite.
    ``remat`` recomputes each layer in the backward pass; ``unroll`` is ``lax.scan``'s.
    """
    table, mask = _rope_table(config, positions), _causal_mask(segment_ids)

    def body(x: Array, layer: Mapping[str, Array]) -> tuple[Array, None]:
        return _causal_layer(config, layer, x, table, mask)[0], None

    step = jax.checkpoint(body, prevent_cse=False) if remat else body  # scan already prevents the CSE
    x, _ = jax.lax.scan(step, params["embed"][tokens], params["layers"], unroll=unroll)
    return _final_norm(config, params, x)


def logits(config: ModelConfig, params: Params, hidden: Array) -> Array:
    """Logits [..., V] float32 of hidden states [..., D]; the embedding is the head where tied."""
    head = params["embed"] if config.tie_embeddings else params["lm_head"]
    return jnp.einsum("...d,vd->...v", hidden.astype(head.dtype), head, preferred_element_type=jnp.float32)


def prefill(
    config: ModelConfig, params: Params, tokens: Array, lengths: Array, *, unroll: int = 1
) -> tuple[Array, Array, Array]:
    """Run right-padded prompts: (hidden [B, D] float32 at each last position, cache_k, cache_v [L, B, T, Hkv, Dh]).

    tokens int32 [B, T]; lengths int32 [B] in 1..T. Cache columns past a row's length hold the padding's keys:
    ``decode`` overwrites each before it can be seen.
    """
    columns = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    positions = jnp.broadcast_to(columns, tokens.shape)
    table = _rope_table(config, positions)
    mask = _causal_mask((columns < lengths[:, None]).astype(jnp.int32))

    def body(x: Array, layer: Mapping[str, Array]) -> tuple[Array, tuple[Array, Array]]:
        x, k, v = _causal_layer(config, layer, x, table, mask)
        return x, (k, v)

    x, (cache_k, cache_v) = jax.lax.scan(body, params["embed"][tokens], params["layers"], unroll=unroll)
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return _final_norm(config, params, last), cache_k, cache_v


def decode(
    config: ModelConfig,
    params: Params,
    tokens: Array,
    positions: Array,
    cache_k: Array,
    cache_v: Array,
    *,
    unroll: int = 1,
) -> tuple[Array, Array, Array]:
    """One step: (hidden [B, D] float32, cache_k, cache_v).

    tokens, positions int32 [B]: row b's token takes column ``positions[b]`` of its cache [L, B, S, Hkv, Dh] and sees
    columns 0..positions[b]. A position outside 0..S-1 writes nothing (a dead row may carry one).
    """
    table = _rope_table(config, positions)
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    columns = jnp.arange(cache_k.shape[2], dtype=jnp.int32)
    mask = (columns <= positions[:, None])[:, None, None, :]

    def body(carry: tuple[Array, Array, Array], xs: tuple[Mapping[str, Array], Array]) -> tuple[Any, None]:
        (x, cache_k, cache_v), (layer, index) = carry, xs
        q, k, v = _qkv(config, layer, x, table)
        cache_k = cache_k.at[index, rows, positions].set(k, mode="drop")
        cache_v = cache_v.at[index, rows, positions].set(v, mode="drop")
        attended = jax.nn.dot_product_attention(q[:, None], cache_k[index], cache_v[index], mask=mask)[:, 0]
        return (_finish_layer(config, layer, x, attended), cache_k, cache_v), None

    indices = jnp.arange(config.num_layers, dtype=jnp.int32)
    carry = (params["embed"][tokens], cache_k, cache_v)
    (x, cache_k, cache_v), _ = jax.lax.scan(body, carry, (params["layers"], indices), unroll=unroll)
    return _final_norm(config, params, x), cache_k, cache_v
