"""Pacing: which step may be dispatched now, and which policy version it samples from.

Steps are numbered from 0. Step k trains policy version k into version k + 1, so version v is published once steps 0 … v−1
are done. With a *fixed lag* of `max_staleness` = s, step k samples from version max(0, k − s): not from the newest there
is, but always from that one, so that two runs with one seed do the same whatever their timing. No token is older than the
bound because generation is held back, never because a trajectory is thrown away.

Checkpoints are barriers. A run resumed from the checkpoint of version c has only version c to sample from, so the steps
after c sample from versions ≥ c in the run that was not interrupted too: both go on bit for bit alike.

    s = 2, a checkpoint every 5 versions
    step                 0  1  2  3  4 | 5  6  7  8  9 | 10
    samples from version 0  0  0  1  2 | 5  5  5  6  7 | 10

One budget covers what is queued and what is in flight: at most s + 1 steps are dispatched and not yet published.

Must not know: executions, time. Called by the run loop.
"""

from __future__ import annotations

from waypath.proto.errors import ConfigError


class Pacing:
    """The rule for one run. `checkpoint_every` is in versions, 0: never.

    Raises ConfigError on settings under which no step could ever be dispatched, or that mean nothing.
    """

    def __init__(self, max_staleness: int, checkpoint_every: int = 0) -> None:
        if max_staleness < 0:
            raise ConfigError(
                f"max_staleness = {max_staleness}: step 0 would need version {-max_staleness}, which only step "
                f"{-max_staleness - 1} makes: nothing could ever start",
                remedy="Use 0 for synchronous on-policy steps, or more to let steps overlap.",
            )
        if checkpoint_every < 0:
            raise ConfigError(f"checkpoint_every = {checkpoint_every}: expected 0 (never) or more")
        self.max_staleness = max_staleness
        self.checkpoint_every = checkpoint_every

    def sampling_version(self, step: int) -> int:
        """The policy version that step `step` samples from: between step − max_staleness and step."""
        barrier = step // self.checkpoint_every * self.checkpoint_every if self.checkpoint_every else 0
        return max(barrier, step - self.max_staleness)

    def may_dispatch(self, step: int, version: int) -> bool:
        """May `step` go out when `version` is the newest published one?

        Steps before `version` are done; steps are dispatched in order, so `version` … `step` − 1 are in flight.
        """
        return self.sampling_version(step) <= version and step - version <= self.max_staleness

    def checkpoint_due(self, version: int) -> bool:
        """Is the state after `version` completed steps to be saved?"""
        return self.checkpoint_every > 0 and version > 0 and version % self.checkpoint_every == 0
