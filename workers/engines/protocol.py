"""What a rollout engine is: the one protocol behind which every engine samples, and the values that cross it.

Owns GroupRequest, GroupResult, Plan and EngineProtocol. Must not know jax, a tokenizer, a task or the network. Called
by the rollout service; implemented by ``jax_engine.JaxEngine``.

Theory of operation. An engine is owned by one thread. Its owner submits groups, then repeats ``plan()`` and
``step(plan)`` while ``has_work``. A plan is plain data and a function of the host state alone, so that one process
can plan and tell its peers. Between two steps every sample stands at a token boundary; there, and only there, weights
are committed:

    begin(1) → stage_view(…) × n (filled by another thread) → seal() → [steps go on] → commit(1)

``abort()`` drops what was begun; the version that serves is untouched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

FinishReason = Literal["stop", "length"]
Staging = Literal["device", "host", "none"]
Digests = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class SamplingParams:
    """How the samples of a group are drawn.

    ``temperature`` divides the float32 logits before log-softmax. ``greedy`` takes the argmax instead and reports
    log-probabilities at temperature 1. A token in ``stop_ids`` ends its sample and is part of it.
    """

    temperature: float = 1.0
    max_new_tokens: int = 16
    stop_ids: frozenset[int] = frozenset()
    greedy: bool = False


@dataclass(frozen=True)
class GroupRequest:
    """n samples of one prompt. ``group_id``, the sample's index and ``seed`` alone decide the random keys.

    ``version`` is the policy version that must be serving when the group is submitted.
    """

    group_id: int
    prompt_ids: tuple[int, ...]
    n: int
    seed: int
    sampling: SamplingParams
    version: int


@dataclass(frozen=True)
class GroupResult:
    """A finished group, sample by sample.

    ``tokens[i]`` int32 [t_i] are the completion with its stop token; ``logp[i]`` float32 [t_i] scores those tokens
    under the (tempered) distribution they were drawn from; ``versions[i]`` int32 [t_i] is the policy version of each.
    ``seconds`` counts from submission to the last token.
    """

    handle: int
    group_id: int
    tokens: tuple[np.ndarray[Any, Any], ...]
    logp: tuple[np.ndarray[Any, Any], ...]
    versions: tuple[np.ndarray[Any, Any], ...]
    finish_reasons: tuple[FinishReason, ...]
    seconds: float


@dataclass(frozen=True)
class Admission:
    """Samples ``first_sample`` … of the group ``handle`` enter ``slots``, in order."""

    handle: int
    first_sample: int
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """One engine step: prefill and admit groups, or decode up to the configured number of tokens, in one bucket."""

    kind: Literal["admit", "decode"]
    bucket: int
    admissions: tuple[Admission, ...] = ()


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was built (tokens, steps, seconds) and what it holds now (groups, samples)."""

    waiting_groups: int = 0
    running_groups: int = 0
    running_samples: int = 0
    sampled_tokens: int = 0
    steps: Mapping[str, int] = field(default_factory=dict)
    step_seconds: float = 0.0


class EngineProtocol(Protocol):
    """One rollout engine. Every method but ``stage_view`` runs on the thread that owns the engine."""

    staging: Staging

    @property
    def version(self) -> int | None:
        """The policy version that serves; None before the first commit."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether any submitted group is unfinished."""
        ...

    def submit(self, request: GroupRequest) -> int:
        """Queue a group; returns the handle by which results and ``cancel`` name it.

        Raises UserError for a prompt or a number of tokens that the configured shapes cannot hold, LocalError where
        the version that serves is not ``request.version``.
        """
        ...

    def cancel(self, handle: int) -> bool:
        """Drop a group, running or not; False if the handle is unknown (finished groups are)."""
        ...

    def plan(self) -> Plan | None:
        """The next step, from host state alone; None without work. Changes nothing."""
        ...

    def step(self, plan: Plan) -> list[GroupResult]:
        """Carry out ``plan``; returns the groups that it finished."""
        ...

    def reset(self) -> None:
        """Drop every group and all cached state (after a failed step); weights stay."""
        ...

    def close(self) -> None:
        """Drop everything and give the weights' memory back; nothing may be called afterwards."""
        ...

    def begin(self, version: int) -> None:
        """Open the shadow weights for ``version``. LocalError if they are in use or the version is not newer."""
        ...

    def stage_view(self, tensor: str, lower: tuple[int, ...], upper: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """The writable box [lower, upper) of a canonical tensor in the shadow weights; may be called by any thread.

        TransferError for an unknown tensor, a box outside its shape, or a box that was handed out already.
        """
        ...

    def shadow(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """Every canonical tensor in the shadow weights; after ``commit`` these same arrays serve, until the next ``begin`` but one.

        What was written may be read while other boxes are being written.
        """
        ...

    def seal(self) -> Digests:
        """End the writing; returns the digests {tensor: uint32 [2]} of what was staged.

        TransferError if some element was never written.
        """
        ...

    def commit(self, version: int) -> None:
        """Make the sealed version serve. LocalError if it is not the sealed one or a group is unfinished."""
        ...

    def abort(self) -> None:
        """Drop the shadow weights, sealed or not; without any, nothing happens."""
        ...

    def stats(self) -> EngineStats:
        """Counters for the status display."""
        ...
