"""One step's metrics line, from what the workers reported.

Pure: trainer results, spans and publication results in, an ordered dictionary out. The keys below never change; docs/runs.md
says what each means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from waypath.controller.runs.trace import PhaseSpan, union_s

TRAINER_KEYS = (
    "reward_mean",
    "reward_std",
    "loss",
    "kl",
    "grad_norm",
    "entropy",
    "clip_fraction",
    "response_tokens_mean",
    "truncated_fraction",
    "zero_std_group_fraction",
    "staleness_max",
    "staleness_mean",
    "logprob_diff_mean",
    "logprob_diff_max",
)


@dataclass(frozen=True)
class Publication:
    """What a publication cost and how it ended: payload bytes counted by the receivers, the planner's bound, who took part.

    `outcome`: COMMITTED or PARTIAL (replicas were left out); `attempts` − 1 times it was ABORTED before that.
    """

    version: int
    bytes: int
    lower_bound_bytes: int
    egress_bytes: int
    stall_s: float
    outcome: str
    attempts: int
    replicas: tuple[str, ...]


def line(
    step: int,
    trained: Mapping[str, Any],
    spans: Sequence[PhaseSpan],
    publication: Publication,
    step_s: float,
) -> dict[str, Any]:
    """Returns the metrics of `step` (0-based); `policy_version` is the version that the step published, `step` + 1."""
    phases = {name: [s for s in spans if s.name == name] for name in ("rollout", "reward", "train", "publish")}
    seconds = {f"{name}_s": union_s(found) for name, found in phases.items()}
    tokens = int(trained.get("tokens", 0))
    values: dict[str, Any] = {"step": step, "policy_version": publication.version}
    values.update((key, trained[key]) for key in TRAINER_KEYS)
    values["rollout_tokens_per_s"] = tokens / seconds["rollout_s"] if seconds["rollout_s"] else 0.0
    values["step_s"] = step_s
    values.update(seconds)
    values["publish_stall_s"] = publication.stall_s
    values["publish_bytes"] = publication.bytes
    values["publish_bytes_lower_bound"] = publication.lower_bound_bytes
    values["egress_bytes"] = publication.egress_bytes
    values["publish_outcome"] = publication.outcome
    values["publish_attempts"] = publication.attempts
    values["optimizer_step"] = trained.get("optimizer_step")
    values["trained_rows"] = trained.get("trained_rows")
    values["overhead_s"] = max(0.0, step_s - union_s(s for found in phases.values() for s in found))
    values.update((f"reward/{name}", value) for name, value in trained.get("reward_metrics", {}).items())
    return values
