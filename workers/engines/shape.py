"""The numbers that decide the shapes of an engine's device programs, from the run's configuration.

Knows neither jax nor devices: the launcher asks for an engine's memory before a process is started. Called by the engine,
its programs and ``workers/memory.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from waypath.proto.config import RunConfig
from waypath.workers.models.config import attention_length

# Prompts are prefilled this many tokens at a time (at least one prompt): enough rows to keep a matrix unit busy, few
# enough that a group which arrives alone does not pay for many dead rows.
PREFILL_TOKENS = 128


@dataclass(frozen=True)
class EngineShape:
    """Every number that decides a program's shape.

    ``slots``: samples that decode together in a bucket. ``prompt_buckets``: prompt lengths are padded to the smallest
    that holds them, ascending. ``max_new_tokens``: the longest completion. ``decode_steps``: tokens a decode
    step may draw per sample. ``group_size``: samples that most groups have (others are served too, less efficiently).
    """

    slots: int
    prompt_buckets: tuple[int, ...]
    max_new_tokens: int
    decode_steps: int
    group_size: int = 8

    def prompts(self, bucket: int) -> int:
        """Prompts that are prefilled together."""
        return max(1, min(self.slots // self.block, PREFILL_TOKENS // bucket))

    @property
    def block(self) -> int:
        """Samples whose first tokens are drawn together."""
        return min(self.group_size, self.slots)

    @property
    def entries(self) -> int:
        """Samples that one admission can hold: ``slots``, rounded up to whole blocks."""
        return -(-self.slots // self.block) * self.block

    def cache_length(self, bucket: int) -> int:
        """Cache entries of a row: bucket + max_new_tokens, rounded up to what attention runs over."""
        return attention_length(bucket + self.max_new_tokens)


def engine_shape(config: RunConfig) -> EngineShape:
    """The engine's fixed shapes."""
    return EngineShape(
        slots=config.inference.slots,
        prompt_buckets=tuple(sorted(set(config.inference.prompt_buckets))),
        max_new_tokens=config.sampling.max_new_tokens,
        decode_steps=config.inference.decode_steps,
        group_size=config.algorithm.group_size,
    )
