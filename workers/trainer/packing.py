"""From trajectories and rewards to the arrays of an optimizer step, in numpy.

Owns the order of rows, what is skipped, the denominators and the fixed micro-batch shape. Must not know devices,
processes or models: every trainer process packs the same step from the same bundles and takes its own rows of each
micro-batch afterwards. Called by `waypath.workers.trainer.service`.

Theory of operation. Groups are taken in the order of their ids and never split. A step's groups are divided into
`minibatches` runs of neighbouring groups, one optimizer update each. Rows whose advantage is 0 have no gradient: they
are left out of the compute, but their tokens count in the denominator. The rows that are left fill micro-batches of one
fixed shape [R, T] in order; the last is padded with empty rows. Only completion tokens are scored, so a row carries
the positions [C] of its completion tokens and the vocabulary projection runs on C tokens a row, not on T.

Example, R = 2: groups 8 (rewards 1, 0) and 9 (rewards 1, 1), one minibatch, 3 tokens a completion. Advantages are
(0.707, −0.707) and (0, 0); the two rows of group 8 fill one micro-batch; the denominator is 12.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from waypath.proto.codecs import Bundle
from waypath.proto.errors import LocalError, UserError
from waypath.workers.algorithms.advantages import (
    check_rewards,
    group_advantages,
    is_constant,
    shuffle_advantages,
)

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int32 = NDArray[np.int32]


@dataclass(frozen=True)
class PackShape:
    """Micro-batch rows R (over all devices), tokens T a row and scored tokens C a row."""

    rows: int
    tokens: int
    scored: int


@dataclass(frozen=True)
class MicroBatches:
    """M micro-batches. Padding rows have length 0, padding positions mask 0.

    tokens int32 [M, R, T]; length int32 [M, R]; positions int32 [M, R, C], where position t says that token t is scored
    (from the hidden state at t − 1); mask float32 [M, R, C]; old_logp float32 [M, R, C]; advantage float32 [M, R].
    """

    tokens: Int32
    length: Int32
    positions: Int32
    mask: Float32
    old_logp: Float32
    advantage: Float32

    @property
    def count(self) -> int:
        """M."""
        return int(self.tokens.shape[0])

    def arrays(self) -> tuple[Int32 | Float32, ...]:
        """The six arrays in the order above."""
        return self.tokens, self.length, self.positions, self.mask, self.old_logp, self.advantage


@dataclass(frozen=True)
class Group:
    """One group: its trajectories (see the trajectory bundle) and rewards float64 [n].

    `reward_metrics`: what else the reward function returned, by name: n numbers, None for a sample without it.
    """

    group_id: int
    tokens: Int32
    length: Int32
    loss_mask: NDArray[np.uint8]
    behaviour_logp: Float32
    policy_version: Int32
    finish_reasons: list[str]
    rewards: Float64
    reward_metrics: Mapping[str, Sequence[float | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """One optimizer update: its micro-batches, its loss denominator (tokens) and how many rows carry signal.

    Where no row carries signal, `batches` holds the first rows with advantage 0 all the same when `probe` was asked
    for: their gradient is exactly 0, and the log-prob check and the entropy have something to measure.
    """

    batches: MicroBatches
    denominator: float
    trained_rows: int


@dataclass(frozen=True)
class PackedStep:
    """A step ready for the device, and the metrics that need none; those of the reward function by their own names."""

    updates: list[Update]
    metrics: dict[str, float]
    reward_metrics: dict[str, float]


def collect_groups(trajectories: Sequence[Bundle], scores: Sequence[Bundle]) -> list[Group]:
    """Joins trajectories and rewards by group id, in the order of the ids.

    Raises RewardError for a reward that is not a finite number, LocalError for a group that is missing or doubled.
    """
    rewards: dict[int, Bundle] = {int(bundle.meta["group_id"]): bundle for bundle in scores}
    ids = [int(bundle.meta["group_id"]) for bundle in trajectories]
    if len(set(ids)) != len(ids) or len(rewards) != len(scores) or set(ids) != set(rewards):
        raise LocalError(
            f"trajectories of groups {sorted(ids)} and rewards of groups "
            f"{sorted(int(b.meta['group_id']) for b in scores)}: expected each group once on both sides"
        )
    groups = []
    for group_id, bundle in sorted(zip(ids, trajectories, strict=True), key=lambda item: item[0]):
        arrays = bundle.arrays
        groups.append(
            Group(
                group_id=group_id,
                tokens=arrays["tokens"],
                length=arrays["length"],
                loss_mask=arrays["loss_mask"],
                behaviour_logp=arrays["behaviour_logp"],
                policy_version=arrays["policy_version"],
                finish_reasons=list(bundle.meta["finish_reasons"]),
                rewards=check_rewards(rewards[group_id].arrays["reward"], group_id, len(arrays["length"])),
                reward_metrics=rewards[group_id].meta.get("metrics", {}),
            )
        )
    return groups


def pack_step(
    groups: Sequence[Group],
    shape: PackShape,
    *,
    version: int,
    step: int,
    seed: int,
    minibatches: int = 1,
    advantage_eps: float = 1e-6,
    shuffle: bool = False,
    max_staleness: int | None = None,
) -> PackedStep:
    """Advantages, minibatches, micro-batches and host metrics of one step.

    `version` is the policy version that the step trains. Raises LocalError where a token is staler than
    `max_staleness`, UserError where a trajectory does not fit `shape`.
    """
    advantages = [group_advantages(group.rewards, eps=advantage_eps) for group in groups]
    if shuffle:
        advantages = shuffle_advantages(advantages, seed, step)
    updates = []
    for index, chosen in enumerate(np.array_split(np.arange(len(groups)), minibatches)):
        updates.append(
            _pack_update([groups[i] for i in chosen], [advantages[i] for i in chosen], shape, probe=index == 0)
        )
    metrics = host_metrics(groups, version, max_staleness)
    metrics["trained_rows"] = sum(update.trained_rows for update in updates)
    return PackedStep(updates, metrics, reward_metrics(groups))


def _pack_update(groups: Sequence[Group], advantages: Sequence[Float64], shape: PackShape, probe: bool) -> Update:
    rows = [(group, i) for group in groups for i in range(len(group.length))]
    values = np.concatenate(advantages) if advantages else np.zeros(0)
    signal = np.flatnonzero(values)
    chosen = signal if signal.size or not probe else np.arange(min(shape.rows, len(rows)))
    batches = empty_batches(-(-len(chosen) // shape.rows), shape)
    for slot, row in enumerate(chosen):
        group, i = rows[row]
        scored = np.flatnonzero(group.loss_mask[i])
        fill_row(
            batches,
            slot,
            group.tokens[i, : group.length[i]],
            scored,
            where=f"group {group.group_id}, sample {i}",
            old_logp=group.behaviour_logp[i, scored],
            advantage=float(values[row]),
        )
    denominator = float(sum(int(np.count_nonzero(group.loss_mask)) for group in groups))
    return Update(batches, max(denominator, 1.0), int(signal.size))


def empty_batches(count: int, shape: PackShape) -> MicroBatches:
    """`count` micro-batches of padding rows."""
    rows, tokens, scored = shape.rows, shape.tokens, shape.scored
    return MicroBatches(
        tokens=np.zeros((count, rows, tokens), np.int32),
        length=np.zeros((count, rows), np.int32),
        positions=np.ones((count, rows, scored), np.int32),
        mask=np.zeros((count, rows, scored), np.float32),
        old_logp=np.zeros((count, rows, scored), np.float32),
        advantage=np.zeros((count, rows), np.float32),
    )


def fill_row(
    batches: MicroBatches,
    slot: int,
    tokens: Any,
    scored: Any,
    *,
    where: str,
    old_logp: Any = 0.0,
    advantage: float = 1.0,
) -> None:
    """Writes one row at `slot` (counted over all micro-batches): its tokens, and which of them are scored.

    Raises UserError naming `where` if the row does not fit or scores its first token, which nothing predicts.
    """
    _, width, most = batches.tokens.shape[1], batches.tokens.shape[2], batches.positions.shape[2]
    if len(tokens) > width or len(scored) > most:
        raise UserError(
            f"{where}: {len(tokens)} tokens of which {len(scored)} are scored; a row holds {width} "
            f"(trainer.sequence_tokens) and {most} (sampling.max_new_tokens)"
        )
    if len(scored) and (scored[0] < 1 or scored[-1] >= len(tokens)):
        raise UserError(f"{where}: scored positions {scored[0]} to {scored[-1]} of a row of {len(tokens)} tokens")
    at = divmod(slot, batches.tokens.shape[1])
    batches.tokens[at][: len(tokens)] = tokens
    batches.length[at] = len(tokens)
    batches.positions[at][: len(scored)] = scored
    batches.mask[at][: len(scored)] = 1.0
    batches.old_logp[at][: len(scored)] = old_logp
    batches.advantage[at] = advantage


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Means of the reward function's other metrics, each over the samples of the step that have it."""
    found: dict[str, list[float]] = {}
    for group in groups:
        for name, values in group.reward_metrics.items():
            found.setdefault(name, []).extend(value for value in values if value is not None)
    return {name: float(np.mean(values)) for name, values in sorted(found.items()) if values}


def host_metrics(groups: Sequence[Group], version: int, max_staleness: int | None = None) -> dict[str, float]:
    """Reward, length and staleness metrics of a step, over all its samples or completion tokens."""
    rewards = np.concatenate([group.rewards for group in groups])
    lengths = np.concatenate([np.count_nonzero(group.loss_mask, axis=1) for group in groups])
    reasons = [reason for group in groups for reason in group.finish_reasons]
    sampled_by = np.concatenate([group.policy_version[group.loss_mask > 0] for group in groups]).astype(np.int64)
    staleness = version - sampled_by if sampled_by.size else np.zeros(1, np.int64)
    if staleness.min() < 0 or (max_staleness is not None and staleness.max() > max_staleness):
        raise LocalError(
            f"training policy version {version} on tokens of versions {sampled_by.min()} to {sampled_by.max()}: "
            f"staleness must lie in 0 to {max_staleness}"
        )
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std(ddof=1)) if rewards.size > 1 else 0.0,
        "response_tokens_mean": float(lengths.mean()),
        "truncated_fraction": sum(reason == "length" for reason in reasons) / len(reasons),
        "zero_std_group_fraction": sum(is_constant(group.rewards) for group in groups) / len(groups),
        "staleness_max": int(staleness.max()),
        "staleness_mean": float(staleness.mean()),
        "tokens": int(lengths.sum()),
    }
