"""The reward service: scores trajectory groups that lie on other workers.

Owns the reward pool of this worker. Must not know jax, models or how groups were sampled. Called by the
worker runtime; the program sends one `score` node per group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from waypath.proto.codecs import Bundle
from waypath.workers.rewards.pool import RewardGroup, RewardPool, RewardSpec
from waypath.workers.service import Call, ServiceContext, method, service

__all__ = ["RewardService"]

SHOWN_CHARACTERS = 4000


@service("reward")
class RewardService:
    """Rewards of the run's task or of `reward.function`, in a pool of `reward.processes` children."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._pool: RewardPool | None = None

    @method(lane="host")
    def open(self, call: Call) -> None:
        """Start the pool for the run config in `options["config"]`; a pool that was open is closed first.

        Reads task.name, task.options and the reward section. User code has to match this worker's
        --allow-import, whatever the config says. TaskError or RewardError for a function that cannot be
        loaded.
        """
        config: dict[str, Any] = call.options["config"]
        task, reward = config["task"], config.get("reward", {})
        self.close()
        spec = RewardSpec(
            task=task["name"],
            task_options=task.get("options", {}),
            function=reward.get("function"),
            options=reward.get("options", {}),
            allow_import=self._context.allow_import,
        )
        call.activity(f"loading {spec.name}")
        pool = RewardPool(spec, processes=reward.get("processes", 1), timeout_s=reward.get("timeout_s", 5.0))
        pool.start()
        self._pool = pool
        call.report(function=spec.name, processes=len(pool.pids))

    @method(lane="async")
    async def score(self, call: Call) -> Bundle:
        """Score the one trajectory bundle of the one input edge.

        Returns arrays {"reward": float32 [n]} and meta {"group_id", "metrics": {name: [n numbers or None]}}.
        Reports reward_sum, and its first sample for display if the group's `options["offset"]` in the step is
        below `options["samples"]`. RewardError for a fault of the function.
        """
        if self._pool is None:
            raise RuntimeError("reward.score before reward.open")
        (bundle,) = call.inputs[0]
        meta = bundle.meta
        group = RewardGroup(
            group_id=meta["group_id"],
            prompt=meta["prompt"],
            row=meta["row"],
            completions=meta["completions"],
            finish_reasons=meta["finish_reasons"],
        )
        call.activity(f"scoring group {group.group_id}")
        with call.span("reward"):
            scores = await asyncio.wrap_future(self._pool.submit(group))
        reward = np.array([score["reward"] for score in scores], np.float32)
        names = sorted({name for score in scores for name in score if name != "reward"})
        metrics = {name: [score.get(name) for score in scores] for name in names}
        call.report(reward_sum=float(reward.sum(dtype=np.float64)))
        if call.options.get("offset", 0) < call.options.get("samples", 0):
            call.report(samples=[_shown(group, 0, scores[0])])
        return Bundle(meta={"group_id": group.group_id, "metrics": metrics}, arrays={"reward": reward})

    def close(self) -> None:
        """End the pool's children."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _shown(group: RewardGroup, index: int, score: Mapping[str, float]) -> dict[str, Any]:
    """One sample as it is written to samples.jsonl; long texts are cut."""
    return {
        "group_id": group.group_id,
        "sample_index": index,
        "prompt_id": group.row.get("prompt_id"),
        "prompt": group.prompt[-SHOWN_CHARACTERS:],
        "completion": group.completions[index][:SHOWN_CHARACTERS],
        "finish_reason": group.finish_reasons[index],
        "reward": score["reward"],
        "metrics": {name: value for name, value in score.items() if name != "reward"},
    }
