"""From trajectories and rewards to micro-batches: order, denominators, what is skipped, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from waypath.proto.codecs import Bundle
from waypath.proto.errors import LocalError, RewardError, UserError
from waypath.workers.trainer.packing import PackShape, collect_groups, pack_step

SHAPE = PackShape(rows=2, tokens=6, scored=3)


def trajectory(group_id: int, prompt: int, completions: list[list[int]], version: int = 4) -> Bundle:
    length = np.array([prompt + len(c) for c in completions], np.int32)
    shape = (len(completions), int(length.max()))
    tokens, mask = np.zeros(shape, np.int32), np.zeros(shape, np.uint8)
    logp, versions = np.zeros(shape, np.float32), np.full(shape, -1, np.int32)
    for i, completion in enumerate(completions):
        tokens[i, :prompt] = 50 + group_id
        scored = slice(prompt, prompt + len(completion))
        tokens[i, scored], mask[i, scored], versions[i, scored] = completion, 1, version
        logp[i, scored] = -0.5 - np.arange(len(completion))
    return Bundle(
        {"group_id": group_id, "finish_reasons": ["stop"] * (len(completions) - 1) + ["length"]},
        {"tokens": tokens, "length": length, "loss_mask": mask, "behaviour_logp": logp, "policy_version": versions},
    )


def score(group_id: int, rewards: list[float]) -> Bundle:
    return Bundle({"group_id": group_id}, {"reward": np.array(rewards, np.float32)})


GROUPS = [trajectory(9, 2, [[1], [2, 3]]), trajectory(8, 3, [[4, 5], [6]]), trajectory(10, 1, [[7, 8, 9], [1, 1]])]
SCORES = [score(8, [1.0, 0.0]), score(10, [0.0, 2.0]), score(9, [1.0, 1.0])]


def pack(groups: list[Bundle] = GROUPS, scores: list[Bundle] = SCORES, **settings: Any) -> Any:
    arguments = {"version": 4, "step": 4, "seed": 0, **settings}
    return pack_step(collect_groups(groups, scores), SHAPE, **arguments)


def test_rows_with_signal_fill_micro_batches_in_group_order() -> None:
    packed = pack()
    (update,) = packed.updates
    assert (update.trained_rows, update.denominator) == (4, 11.0)  # group 9 counts only in the denominator
    batches = update.batches
    assert batches.tokens.shape == (2, 2, 6) and batches.positions.shape == (2, 2, 3)
    assert batches.tokens[0].tolist() == [[58, 58, 58, 4, 5, 0], [58, 58, 58, 6, 0, 0]]
    assert batches.tokens[1].tolist() == [[60, 7, 8, 9, 0, 0], [60, 1, 1, 0, 0, 0]]
    assert batches.length.tolist() == [[5, 4], [4, 3]]
    assert batches.positions[0].tolist() == [[3, 4, 1], [3, 1, 1]]
    assert batches.mask[0].tolist() == [[1, 1, 0], [1, 0, 0]]
    assert batches.old_logp[1].tolist() == [[-0.5, -1.5, -2.5], [-0.5, -1.5, 0]]
    half = 0.5 / (np.sqrt(0.5) + 1e-6)
    np.testing.assert_allclose(batches.advantage[0], [half, -half], rtol=1e-6)
    one = 1.0 / (np.sqrt(2.0) + 1e-6)
    np.testing.assert_allclose(batches.advantage[1], [-one, one], rtol=1e-6)


def test_metrics_that_need_no_device() -> None:
    groups = [*GROUPS[:2], trajectory(10, 1, [[7, 8, 9], [1, 1]], version=3)]
    found = pack(groups, max_staleness=1).metrics
    assert found["reward_mean"] == pytest.approx(5 / 6)
    assert found["reward_std"] == pytest.approx(np.std([1, 0, 1, 1, 0, 2], ddof=1))
    assert found["response_tokens_mean"] == pytest.approx(11 / 6)
    assert found["truncated_fraction"] == 0.5
    assert found["zero_std_group_fraction"] == pytest.approx(1 / 3)
    assert (found["staleness_max"], found["tokens"], found["trained_rows"]) == (1, 11, 4)
    assert found["staleness_mean"] == pytest.approx(5 / 11)


def test_other_numbers_of_the_reward_function_are_averaged_where_they_are() -> None:
    scores = [score(8, [1.0, 0.0]), score(10, [0.0, 2.0]), score(9, [1.0, 1.0])]
    scores[0].meta["metrics"] = {"length": [1.0, 2.0], "step": [None, 5.0], "nobody": [None, None]}
    scores[1].meta["metrics"] = {"length": [6.0, 7.0]}
    packed = pack(GROUPS, scores)
    assert packed.reward_metrics == {"length": 4.0, "step": 5.0}
    assert packed.metrics == pack().metrics


def test_the_last_micro_batch_is_padded_with_empty_rows() -> None:
    (update,) = pack(GROUPS, [score(8, [1.0, 0.0]), score(9, [0.0, 1.0]), score(10, [1.0, 1.0])]).updates
    assert update.batches.count == 2 and update.trained_rows == 4
    packed = pack([trajectory(3, 1, [[1], [2], [3]])], [score(3, [0.0, 0.0, 1.0])])
    batches = packed.updates[0].batches
    assert batches.count == 2 and batches.length.tolist() == [[2, 2], [2, 0]]
    assert not batches.mask[1, 1].any() and batches.advantage[1, 1] == 0


def test_minibatches_are_runs_of_groups_with_their_own_denominators() -> None:
    first, second = pack(minibatches=2).updates
    assert (first.trained_rows, first.denominator) == (2, 6.0)
    assert (second.trained_rows, second.denominator) == (2, 5.0)
    assert first.batches.tokens[0, 0, 0] == 58 and second.batches.tokens[0, 0, 0] == 60


def test_without_any_signal_the_first_rows_are_measured_with_advantage_zero() -> None:
    packed = pack(GROUPS, [score(i, [0.5, 0.5]) for i in (8, 9, 10)], minibatches=3)
    counts = [(u.trained_rows, u.batches.count) for u in packed.updates]
    assert counts == [(0, 1), (0, 0), (0, 0)]
    assert not packed.updates[0].batches.advantage.any() and packed.updates[0].batches.mask.any()
    assert packed.metrics["zero_std_group_fraction"] == 1.0


def test_shuffled_advantages_are_the_same_numbers_on_other_rows() -> None:
    plain = pack(minibatches=1).updates[0]
    mixed = [pack(shuffle=True, step=s).updates[0].batches.advantage for s in range(4, 8)]
    values = sorted(plain.batches.advantage.reshape(-1).tolist())
    for found in mixed:
        assert sorted(v for v in found.reshape(-1).tolist() if v) == values
    assert len({tuple(found.reshape(-1).tolist()) for found in mixed}) > 1


def test_a_nan_reward_names_group_and_sample() -> None:
    with pytest.raises(RewardError, match="group 9, sample 1: reward is nan"):
        pack(GROUPS, [SCORES[0], SCORES[1], score(9, [0.0, float("nan")])])


def test_missing_and_doubled_groups_are_refused() -> None:
    with pytest.raises(LocalError, match=r"groups \[8, 9, 10\] and rewards of groups \[8, 10\]"):
        pack(GROUPS, SCORES[:2])
    with pytest.raises(LocalError, match="each group once"):
        pack([*GROUPS, GROUPS[0]], SCORES)


@pytest.mark.parametrize(("version", "bound"), [(6, 1), (3, None)], ids=["too stale", "from the future"])
def test_tokens_outside_the_staleness_bound_are_refused(version: int, bound: int | None) -> None:
    with pytest.raises(LocalError, match="staleness must lie in"):
        pack(version=version, max_staleness=bound)


def test_a_row_that_does_not_fit_names_the_sample_and_the_settings() -> None:
    long = [trajectory(8, 4, [[1, 2], [1, 2, 3]])]
    with pytest.raises(UserError, match=r"group 8, sample 1: 7 tokens .*trainer.sequence_tokens"):
        pack(long, [score(8, [0.0, 1.0])])
    unprompted = [trajectory(8, 0, [[1, 2], [3]])]
    with pytest.raises(UserError, match="scored positions 0 to 1"):
        pack(unprompted, [score(8, [0.0, 1.0])])
