"""Supervised batches from a task's demonstrations, for the warm start before RL.

Owns how a (prompt, completion) pair becomes a row. Must not know devices. Called by `waypath.workers.trainer.service`;
every process makes the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from waypath.proto.errors import TaskError
from waypath.workers.models.tokenizer import TextTokenizer
from waypath.workers.tasks.base import Task, demonstrating
from waypath.workers.trainer.packing import MicroBatches, PackShape, empty_batches, fill_row

_STREAM = 0x5741_524D  # keeps these Philox keys apart from those of other streams of the run's seed


def supervised_batches(
    task: Task, text: TextTokenizer, stop: Sequence[str], shape: PackShape, *, seed: int, steps: int, batch_size: int
) -> Iterator[tuple[MicroBatches, float]]:
    """Yields, `steps` times, `batch_size` demonstrations as micro-batches and how many tokens they score.

    A row is prompt and completion and what ends it: EOS, or the first stop character of a tokenizer without one. All but
    the prompt is scored. Raises TaskError where the task has no demonstrations, not as many as asked for, or one with a
    character that the tokenizer lacks; UserError where one does not fit `shape`.
    """
    task = demonstrating(task, steps)
    end = [text.eos_ids[0]] if text.eos_ids else text.encode(stop[0]) if stop else []
    rng = np.random.Generator(np.random.Philox(key=[seed % 2**64, _STREAM]))
    for _ in range(steps):
        pairs = task.demonstrations(rng, batch_size)
        if len(pairs) != batch_size:
            raise TaskError(
                f"{type(task).__name__}.demonstrations returned {len(pairs)} pairs, warm_start.batch_size = {batch_size} "
                "were asked for"
            )
        batches = empty_batches(-(-batch_size // shape.rows), shape)
        scored = 0
        for slot, (prompt, completion) in enumerate(pairs):
            if lacking := text.unknown(prompt + completion):
                raise TaskError(
                    f"demonstration {prompt!r} {completion!r}: the tokenizer lacks {lacking!r}",
                    remedy="Add it to model.random.alphabet",
                )
            before = text.encode(prompt)
            tokens = [*before, *text.encode(completion), *end]
            fill_row(
                batches,
                slot,
                tokens,
                np.arange(len(before), len(tokens)),
                where=f"demonstration {prompt!r} {completion!r}",
            )
            scored += len(tokens) - len(before)
        yield batches, float(scored)
