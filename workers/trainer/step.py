"""The device programs of one optimizer update on a mesh with the axes `data` and `fsdp`.

Owns the sharded train state, the compiled update and its metrics. Must not know bundles, services or files. Called by
`waypath.workers.trainer.service` on the JAX thread.

Theory of operation. Parameters and AdamW state are stored in shards. One update is one compiled program: gather the
parameters once, walk the micro-batches in a loop, each device with its own rows of each and a whole gradient of its own (no
collective inside the loop), then one reduction of the gradients to shards, the clip by global norm and AdamW on the
shards. The state is donated. The number of micro-batches is an argument, so a step with fewer rows runs the same
program. Every addition has an order that the mesh fixes, and metrics come out the same on every process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from waypath.proto.errors import LocalError
from waypath.workers.algorithms.logprobs import token_logp
from waypath.workers.algorithms.losses import k3_kl, masked_sum, ppo_clip, token_mean
from waypath.workers.mesh import param_specs
from waypath.workers.models.config import ModelConfig
from waypath.workers.models.decoder import Params, abstract_params, forward, logits, tree_of
from waypath.workers.trainer.collectives import (
    DATA_AXIS,
    FSDP_AXIS,
    divided_dim,
    gather,
    gather_rows,
    ordered_sum,
    reduce_scatter,
)
from waypath.workers.trainer.packing import MicroBatches, PackShape, empty_batches

ROWS = PartitionSpec(None, (DATA_AXIS, FSDP_AXIS))
METRICS = ("loss", "kl", "entropy", "clip_fraction", "tokens", "logprob_diff_mean", "logprob_diff_max", "grad_norm")


class TrainState(NamedTuple):
    """Parameters (float32 master weights) and optimizer state, both in shards."""

    params: Params
    optimizer: Any


@dataclass(frozen=True)
class AdamW:
    """AdamW and clipping by global norm; the learning rate is an argument of each update. Norm scales do not decay.

    Source: Loshchilov and Hutter 2019, algorithm 2.
    """

    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class Objective:
    """The arguments of one update, none of which needs a program of its own.

    `supervised`: a token's loss is −logp, else the clipped surrogate. `temperature` divides the logits. The loss is the
    sum over tokens / `denominator`.
    """

    denominator: float
    learning_rate: float
    temperature: float = 1.0
    supervised: bool = False

    def array(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """float32 [4]."""
        return np.array([self.denominator, self.learning_rate, self.temperature, float(self.supervised)], np.float32)


class UpdateProgram:
    """One optimizer update for a model, a mesh, a micro-batch shape and clip bounds."""

    def __init__(
        self,
        model: ModelConfig,
        mesh: Mesh,
        shape: PackShape,
        capacity: int,
        optimizer: AdamW,
        *,
        clip: tuple[float, float] = (0.2, 0.2),
        remat: bool = False,
    ) -> None:
        """`capacity`: the most micro-batches an update can have."""
        self.model, self.mesh, self.shape, self.capacity = model, mesh, shape, capacity
        self._clip, self._remat = clip, remat
        self._max_grad_norm = optimizer.max_grad_norm
        self._sizes = (mesh.shape[DATA_AXIS], mesh.shape[FSDP_AXIS])
        self._native = mesh.devices.flat[0].platform != "cpu"
        if mesh.size != self._sizes[0] * self._sizes[1]:
            raise ValueError(f"the trainer's mesh has the axes data and fsdp, found {dict(mesh.shape)}")
        if shape.rows % mesh.size:
            raise ValueError(f"{shape.rows} rows a micro-batch do not divide over {mesh.size} devices")
        self._transform = _adamw(model, optimizer)
        self.param_specs = param_specs(model, mesh)
        self._dims = [divided_dim(spec) for spec in jax.tree.leaves(self.param_specs, is_leaf=_is_spec)]
        abstract = abstract_params(model)
        self._optimizer_specs = optax.tree.map_params(
            self._transform,
            lambda _, spec: spec,
            jax.eval_shape(self._transform.init, abstract),
            self.param_specs,
            transform_non_params=lambda _: PartitionSpec(),
        )
        self.specs = TrainState(self.param_specs, self._optimizer_specs)
        self.shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), self.specs, is_leaf=_is_spec)
        self._body = jax.shard_map(
            self._update,
            mesh=mesh,
            in_specs=(self.specs, (ROWS,) * 6, PartitionSpec(), PartitionSpec()),
            out_specs=(self.specs, PartitionSpec()),
            check_vma=False,
        )
        self._program: Callable[..., Any] = jax.jit(self._body, donate_argnums=0)
        self._init: Callable[[Params], Any] = jax.jit(self._transform.init, out_shardings=self.shardings.optimizer)

    def init(self, params: Params) -> TrainState:
        """A fresh optimizer state beside `params`."""
        return TrainState(params, self._init(params))

    def abstract_state(self) -> TrainState:
        """The state's shapes, dtypes and shardings."""
        params = abstract_params(self.model)
        shapes = TrainState(params, jax.eval_shape(self._transform.init, params))
        found: TrainState = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            self.shardings,
        )
        return found

    def compile(self) -> None:
        """Compiles the update now, rather than at its first run."""
        sharding = NamedSharding(self.mesh, ROWS)
        batches = empty_batches(self.capacity, self.shape)
        abstract = tuple(
            jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding) for array in batches.arrays()
        )
        arguments = (self.abstract_state(), abstract, np.int32(0), Objective(1.0, 0.0).array())
        self._program = jax.jit(self._body, donate_argnums=0).lower(*arguments).compile()

    def run(
        self, state: TrainState, batches: MicroBatches, objective: Objective
    ) -> tuple[TrainState, dict[str, float]]:
        """One update: (new state, metrics). `state` is donated. Blocks until the metrics are there.

        entropy, kl, clip_fraction and logprob_diff_* are over the tokens of
        `batches` at the parameters before the update; grad_norm is before clipping. LocalError where the old state
        outlives the donation.
        """
        device_batches = self._put(batches)
        new_state, values = self._program(state, device_batches, np.int32(batches.count), objective.array())
        metrics = dict(zip(METRICS, np.asarray(values.addressable_data(0)).tolist(), strict=True))
        check_donated(state)
        return new_state, metrics

    def _put(self, batches: MicroBatches) -> tuple[jax.Array, ...]:
        """Pads to `capacity` micro-batches and puts this process's rows on its devices."""
        if batches.count > self.capacity:
            raise ValueError(f"{batches.count} micro-batches in an update, room for {self.capacity}")
        sharding = NamedSharding(self.mesh, ROWS)
        found = []
        for array in batches.arrays():
            padded = np.zeros((self.capacity, *array.shape[1:]), array.dtype)
            padded[: batches.count] = array
            found.append(jax.make_array_from_callback(padded.shape, sharding, padded.__getitem__))
        return tuple(found)

    # Below: inside shard_map, on one device's shards and rows.

    def _update(
        self, state: TrainState, batches: tuple[jax.Array, ...], count: jax.Array, objective: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        shards, tree = jax.tree.flatten(state.params)
        params = jax.tree.unflatten(tree, gather(shards, self._dims, self._sizes[1]))
        evaluate = jax.value_and_grad(self._loss, has_aux=True)

        def body(i: jax.Array, carry: tuple[Params, jax.Array]) -> tuple[Params, jax.Array]:
            total, sums = carry
            batch = [jax.lax.dynamic_index_in_dim(array, i, keepdims=False) for array in batches]
            (_, found), grads = evaluate(params, batch, objective)
            return jax.tree.map(jnp.add, total, grads), _merge(sums, found)

        start = (jax.tree.map(jnp.zeros_like, params), jnp.zeros(len(METRICS) - 1, jnp.float32))
        total, sums = jax.lax.fori_loop(0, count, body, start)
        grads = reduce_scatter(jax.tree.leaves(total), self._dims, self._sizes, self._native)
        by_device = gather_rows(jnp.concatenate([sums, self._square_norm(grads)[None]]))
        norm = jnp.sqrt(ordered_sum(by_device)[-1])
        scale = jnp.minimum(1.0, self._max_grad_norm / jnp.maximum(norm, np.finfo(np.float32).tiny))
        clipped = jax.tree.unflatten(tree, [leaf * scale for leaf in grads])
        updates, optimizer = self._transform.update(clipped, state.optimizer, state.params)
        new_params = jax.tree.map(lambda leaf, change: leaf - objective[1] * change, state.params, updates)
        sums = jnp.concatenate([ordered_sum(by_device)[:-2], jnp.max(by_device[:, -2])[None]])
        tokens = jnp.maximum(sums[4], 1.0)
        scales = jnp.stack([jnp.float32(1.0), *[1.0 / tokens] * 3, jnp.float32(1.0), 1.0 / tokens, jnp.float32(1.0)])
        return TrainState(new_params, optimizer), jnp.concatenate([sums * scales, norm[None]])

    def _loss(self, params: Params, batch: list[jax.Array], objective: jax.Array) -> tuple[jax.Array, jax.Array]:
        tokens, length, positions, mask, old_logp, advantage = batch
        denominator, _, temperature, supervised = objective
        logp, entropy = scored_logp(self.model, params, tokens, length, positions, temperature, remat=self._remat)
        frozen = jax.lax.stop_gradient(logp)
        old_logp = jnp.where(supervised > 0, frozen, old_logp)
        spread = jnp.broadcast_to(advantage[:, None], logp.shape)
        surrogate, clipped = ppo_clip(logp, old_logp, spread, *self._clip)
        token_loss = jnp.where(supervised > 0, -logp, surrogate)
        loss = token_mean(token_loss, mask, denominator)
        difference = jnp.abs(frozen - old_logp) * mask
        sums = [
            jax.lax.stop_gradient(loss),
            masked_sum(k3_kl(old_logp, frozen), mask),
            masked_sum(entropy, mask),
            masked_sum(clipped, mask),
            jnp.sum(mask),
            jnp.sum(difference),
            jnp.max(difference),
        ]
        return loss, jnp.stack(sums)

    def _square_norm(self, grads: list[jax.Array]) -> jax.Array:
        """This device's part of the squared global norm; what is replicated counts on one device."""
        first = (jax.lax.axis_index(DATA_AXIS) == 0).astype(jnp.float32)
        alone = first * (jax.lax.axis_index(FSDP_AXIS) == 0).astype(jnp.float32)
        parts = []
        for leaf, dim in zip(grads, self._dims, strict=True):
            # Two reductions kept apart: one float32 sum over 10⁷ elements would lose digits.
            rows = jax.lax.optimization_barrier(jnp.sum(jnp.square(leaf), axis=-1))
            parts.append(jnp.sum(rows) * (alone if dim is None else first))
        return ordered_sum(jnp.stack(parts))


def scored_logp(
    model: ModelConfig,
    params: Params,
    tokens: jax.Array,
    length: jax.Array,
    positions: jax.Array,
    temperature: jax.Array | float,
    *,
    remat: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability and entropy [R, C] float32 of the tokens at `positions` [R, C].

    tokens int32 [R, T] right-padded, length int32 [R]. Only the hidden states before the scored tokens meet the vocabulary.
    """
    columns = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    segments = (columns < length[:, None]).astype(jnp.int32)
    hidden = forward(model, params, tokens, jnp.broadcast_to(columns, tokens.shape), segments, remat=remat)
    before = jnp.take_along_axis(hidden, (positions - 1)[..., None], axis=1)
    targets = jnp.take_along_axis(tokens, positions, axis=1)
    return token_logp(logits(model, params, before), targets, temperature)


def check_donated(state: TrainState) -> None:
    """LocalError naming the leaves of a donated state that still live: a host view of them cancels donation silently."""
    alive = [
        jax.tree_util.keystr(path) for path, leaf in jax.tree_util.tree_leaves_with_path(state) if not leaf.is_deleted()
    ]
    if alive:
        raise LocalError(
            f"{len(alive)} donated arrays were not freed, first {alive[0]}: a host view of them is still held",
            remedy="whoever exposed or saved the state must drop its numpy views before the next update",
        )


def _merge(sums: jax.Array, found: jax.Array) -> jax.Array:
    """Adds all but the last entry, which is a maximum."""
    return jnp.concatenate([sums[:-1] + found[:-1], jnp.maximum(sums[-1:], found[-1:])])


def _is_spec(value: Any) -> bool:
    return isinstance(value, PartitionSpec)


def _adamw(model: ModelConfig, settings: AdamW) -> optax.GradientTransformation:
    """AdamW's direction, which the learning rate scales: Adam's, plus the decay of all but norm scales."""
    return optax.chain(
        optax.scale_by_adam(settings.b1, settings.b2, settings.eps),
        optax.add_decayed_weights(settings.weight_decay, tree_of(model, lambda leaf: not leaf.norm)),
    )
