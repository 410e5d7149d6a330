"""Advantages from rewards, in numpy on the host.

Owns the group baseline and the shuffled control. Must not know about devices or trajectories.
Called by `waypath.workers.trainer.packing`; every trainer process computes the same bits from the same rewards.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from waypath.proto.errors import RewardError

Float64 = NDArray[np.float64]

EQUAL_REWARDS_TOLERANCE = 1e-6
_SHUFFLE_STREAM = 0x5348_5546  # keeps the shuffle's Philox keys apart from those of the prompt stream


def check_rewards(rewards: ArrayLike, group_id: int, count: int) -> Float64:
    """Rewards of one group as float64 [count].

    Raises RewardError naming group and sample where a reward is NaN or infinite, or where the number is wrong.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.shape != (count,):
        raise RewardError(f"group {group_id}: expected {count} rewards, found an array of shape {list(values.shape)}")
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        sample = int(bad[0])
        raise RewardError(
            f"group {group_id}, sample {sample}: reward is {values[sample]}, expected a finite number; "
            "make the task's reward function return a number for every sample"
        )
    return values


def is_constant(rewards: Float64, tolerance: float = EQUAL_REWARDS_TOLERANCE) -> bool:
    """Whether all rewards of a group are equal up to `tolerance` relative to the largest magnitude (at least 1).

    Equal float rewards can give a deviation of 1e-8 instead of 0, which the division would blow up.
    """
    scale = max(1.0, float(np.max(np.abs(rewards))))
    return float(np.max(rewards) - np.min(rewards)) <= tolerance * scale


def group_advantages(
    rewards: Float64, *, normalize: bool = True, eps: float = 1e-6, tolerance: float = EQUAL_REWARDS_TOLERANCE
) -> Float64:
    """Group-relative advantages, float64 [n] -> float64 [n].

    A_i = (R_i − mean(R)) / (std(R, ddof=1) + eps); without `normalize`, A_i = R_i − mean(R).
    A group of one sample, or of equal rewards (see `is_constant`), carries no signal: exactly 0.
    Source: Shao et al. 2024 (DeepSeekMath), section 4.1.2; ddof and eps as in verl and Tunix.
    """
    if rewards.size < 2 or is_constant(rewards, tolerance):
        return np.zeros_like(rewards)
    centred = rewards - rewards.mean()
    scale = float(rewards.std(ddof=1)) + eps if normalize else 1.0
    advantages: Float64 = centred / scale
    return advantages


def shuffle_advantages(advantages: Sequence[Float64], seed: int, step: int) -> list[Float64]:
    """The control experiment: permutes advantages among all samples of a step, whatever their group.

    `advantages`: one float64 [n_g] per group. The permutation is a function of (seed, step) alone. What a run
    still learns with this on, it does not learn from its rewards.
    """
    flat = np.concatenate([np.asarray(a, dtype=np.float64) for a in advantages])
    rng = np.random.Generator(np.random.Philox(key=[seed % 2**64, (_SHUFFLE_STREAM << 32) + step]))
    flat = flat[rng.permutation(flat.size)]
    return list(np.split(flat, np.cumsum([len(a) for a in advantages])[:-1]))
