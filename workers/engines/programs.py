"""The two device programs of the jax engine: admit (prefill and first tokens) and decode (up to K more tokens).

Owns what runs on device, at shapes fixed by EngineShape and the bucket alone. Must not know groups, handles or
weights' versions. Called by ``jax_engine.JaxEngine``, which keeps every row's small state on the host and hands it in.

Both programs donate the lane's cache and stop table and return them. A row's numbers depend on no other row: dead rows
are computed and ignored. Admission draws first tokens in blocks of ``group_size`` rows and copies cache rows one by
one, so that its cost follows the number of samples that are admitted while its shapes do not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.stages import Compiled

from waypath.workers.engines.sampling import sample, sample_keys
from waypath.workers.engines.shape import EngineShape
from waypath.workers.models import decoder
from waypath.workers.models.config import ModelConfig


class LaneState(NamedTuple):
    """What a bucket keeps on device: caches [L, slots, S, Hkv, Dh] and the stop table, bool [slots, V]."""

    cache_k: Any
    cache_v: Any
    stop: Any


class AdmitInput(NamedTuple):
    """P padded prompts and, for each of the first ``count`` of E entries, a sample that starts from one of them."""

    prompts: Any  # int32 [P, bucket]
    lengths: Any  # int32 [P], at least 1
    stop: Any  # bool [P, V]
    count: Any  # int32 []
    source: Any  # int32 [E], the prompt of entry i
    slot: Any  # int32 [E], where entry i goes
    seed_keys: Any  # uint32 [E, 2]
    group_ids: Any  # uint32 [E]
    sample_indices: Any  # uint32 [E]
    temperature: Any  # float32 [E]
    greedy: Any  # bool [E]


class AdmitOutput(NamedTuple):
    """For each entry: its first token, that token's log-probability, and the sample's raw key."""

    tokens: Any  # int32 [E]
    logp: Any  # float32 [E]
    keys: Any  # uint32 [E, 2]


class DecodeInput(NamedTuple):
    """Rows at a token boundary: ``tokens`` stand at ``positions`` and are not in the cache yet."""

    tokens: Any  # int32 [slots]
    positions: Any  # int32 [slots]
    limits: Any  # int32 [slots], the last position that may hold a token
    live: Any  # bool [slots]
    keys: Any  # uint32 [slots, 2]
    temperature: Any  # float32 [slots]
    greedy: Any  # bool [slots]


class DecodeOutput(NamedTuple):
    """Draw k of every row; it counts where ``emitted``."""

    tokens: Any  # int32 [K, slots]
    logp: Any  # float32 [K, slots]
    emitted: Any  # bool [K, slots]


def admit(
    config: ModelConfig, block: int, params: Any, state: LaneState, batch: AdmitInput
) -> tuple[LaneState, AdmitOutput]:
    """Prefills P prompts, copies their cache rows to the samples' slots and draws each sample's first token."""
    hidden, prompt_k, prompt_v = decoder.prefill(config, params, batch.prompts, batch.lengths)
    logits = decoder.logits(config, params, hidden)
    keys = sample_keys(batch.seed_keys, batch.group_ids, batch.sample_indices)

    def copied(i: Any, state: LaneState) -> LaneState:
        source, slot = batch.source[i], batch.slot[i]

        def cached(cache: Any, prompts: Any) -> Any:
            row = lax.dynamic_slice_in_dim(prompts, source, 1, axis=1)
            return lax.dynamic_update_slice(cache, row, (0, slot, 0, 0, 0))

        stop_row = lax.dynamic_slice_in_dim(batch.stop, source, 1)
        return LaneState(
            cached(state.cache_k, prompt_k),
            cached(state.cache_v, prompt_v),
            lax.dynamic_update_slice(state.stop, stop_row, (slot, 0)),
        )

    def drawn(b: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        start = b * block

        def part(values: Any) -> Any:
            return lax.dynamic_slice_in_dim(values, start, block)

        source = part(batch.source)
        new, scored = sample(
            logits[source], part(keys), batch.lengths[source], part(batch.temperature), part(batch.greedy)
        )
        tokens, logp = carry
        return lax.dynamic_update_slice(tokens, new, (start,)), lax.dynamic_update_slice(logp, scored, (start,))

    entries = batch.source.shape[0]
    state = lax.fori_loop(0, batch.count, copied, state)
    empty = (jnp.zeros(entries, jnp.int32), jnp.zeros(entries, jnp.float32))
    tokens, logp = lax.fori_loop(0, (batch.count + block - 1) // block, drawn, empty)
    return state, AdmitOutput(tokens, logp, keys)


def decode(
    config: ModelConfig, steps: int, params: Any, state: LaneState, rows: DecodeInput
) -> tuple[LaneState, DecodeOutput]:
    """Draws up to ``steps`` tokens for every live row; stops early once no row is live."""
    slots = rows.tokens.shape[0]
    each = jnp.arange(slots)

    def going(carry: tuple[Any, ...]) -> Any:
        k, live = carry[0], carry[1]
        return (k < steps) & jnp.any(live)

    def one(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        k, live, tokens, positions, cache_k, cache_v, out = carry
        hidden, cache_k, cache_v = decoder.decode(config, params, tokens, positions, cache_k, cache_v)
        logits = decoder.logits(config, params, hidden)
        drawn, logp = sample(logits, rows.keys, positions + 1, rows.temperature, rows.greedy | ~live)
        out = DecodeOutput(out.tokens.at[k].set(drawn), out.logp.at[k].set(logp), out.emitted.at[k].set(live))
        tokens = jnp.where(live, drawn, tokens)
        positions = jnp.where(live, positions + 1, positions)
        live = live & ~state.stop[each, tokens] & (positions < rows.limits)
        return k + 1, live, tokens, positions, cache_k, cache_v, out

    out = DecodeOutput(
        jnp.zeros((steps, slots), jnp.int32),
        jnp.zeros((steps, slots), jnp.float32),
        jnp.zeros((steps, slots), jnp.bool_),
    )
    start = (jnp.int32(0), rows.live, rows.tokens, rows.positions, state.cache_k, state.cache_v, out)
    _, _, _, _, cache_k, cache_v, out = lax.while_loop(going, one, start)
    return LaneState(cache_k, cache_v, state.stop), out


def new_state(config: ModelConfig, shape: EngineShape, bucket: int, device: jax.Device) -> LaneState:
    """An empty lane: zeros, no stop tokens."""
    with jax.default_device(device):
        return LaneState(*(jnp.zeros(leaf.shape, leaf.dtype) for leaf in _state_shape(config, shape, bucket)))


def compile_lane(config: ModelConfig, shape: EngineShape, bucket: int, device: jax.Device) -> tuple[Compiled, Compiled]:
    """The admit and decode programs of a bucket, compiled ahead of time from shapes alone; no weights needed."""
    placed = jax.sharding.SingleDeviceSharding(device)

    def spec(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed)

    def array(dtype: Any, *dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=placed)

    params = jax.tree.map(spec, decoder.abstract_params(config))
    state = jax.tree.map(spec, _state_shape(config, shape, bucket))
    slots, entries, prompts = shape.slots, shape.entries, shape.prompts(bucket)
    batch = AdmitInput(
        prompts=array(jnp.int32, prompts, bucket),
        lengths=array(jnp.int32, prompts),
        stop=array(jnp.bool_, prompts, config.vocab_size),
        count=array(jnp.int32),
        source=array(jnp.int32, entries),
        slot=array(jnp.int32, entries),
        seed_keys=array(jnp.uint32, entries, 2),
        group_ids=array(jnp.uint32, entries),
        sample_indices=array(jnp.uint32, entries),
        temperature=array(jnp.float32, entries),
        greedy=array(jnp.bool_, entries),
    )
    rows = DecodeInput(
        tokens=array(jnp.int32, slots),
        positions=array(jnp.int32, slots),
        limits=array(jnp.int32, slots),
        live=array(jnp.bool_, slots),
        keys=array(jnp.uint32, slots, 2),
        temperature=array(jnp.float32, slots),
        greedy=array(jnp.bool_, slots),
    )
    admitting = jax.jit(admit, static_argnums=(0, 1), donate_argnums=3)
    decoding = jax.jit(decode, static_argnums=(0, 1), donate_argnums=3)
    return (
        admitting.lower(config, shape.block, params, state, batch).compile(),
        decoding.lower(config, shape.decode_steps, params, state, rows).compile(),
    )


def _state_shape(config: ModelConfig, shape: EngineShape, bucket: int) -> LaneState:
    cache = jax.ShapeDtypeStruct(
        (config.num_layers, shape.slots, shape.cache_length(bucket), config.num_kv_heads, config.head_dim),
        jnp.float32,
    )
    return LaneState(cache, cache, jax.ShapeDtypeStruct((shape.slots, config.vocab_size), jnp.bool_))
