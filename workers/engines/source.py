"""From a run's configuration to what a rollout worker samples with: model, tokenizer, prompts and shapes.

Owns the reading of the `model`, `task`, `sampling` and `inference` sections on the engine's side, and the text of a
completion. Must not know engines' insides, versions or the network. Called by the rollout service.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from waypath.proto.config import RunConfig
from waypath.proto.errors import TaskError
from waypath.workers.engines.programs import EngineShape
from waypath.workers.engines.protocol import FinishReason, SamplingParams
from waypath.workers.models import hf, tokenizer
from waypath.workers.models.config import ModelConfig
from waypath.workers.models.tokenizer import TextTokenizer
from waypath.workers.tasks.base import PromptStream, Row, Task, load_task


def open_model(config: RunConfig) -> tuple[ModelConfig, TextTokenizer]:
    """The model's configuration and its tokenizer; no weights are read. ModelError where the directory is not usable."""
    if config.model.path is not None:
        return hf.load_config(config.model.path), tokenizer.load(config.model.path)
    random = config.model.random
    if random is None:
        raise ValueError("model has neither a path nor [model.random]")
    text = tokenizer.char_text_tokenizer(random.alphabet)
    model = ModelConfig(
        vocab_size=text.vocab_size,
        hidden_size=random.hidden_size,
        intermediate_size=random.intermediate_size,
        num_layers=random.num_layers,
        num_heads=random.num_heads,
        num_kv_heads=random.num_kv_heads,
        head_dim=random.head_dim,
        rope_theta=random.rope_theta,
        qk_norm=random.qk_norm,
        tie_embeddings=random.tie_embeddings,
        eos_token_ids=text.eos_ids,
    )
    return model, text


def engine_shape(config: RunConfig) -> EngineShape:
    """The engine's fixed shapes."""
    return EngineShape(
        slots=config.inference.slots,
        prompt_buckets=tuple(sorted(set(config.inference.prompt_buckets))),
        max_new_tokens=config.sampling.max_new_tokens,
        decode_steps=config.inference.decode_steps,
        group_size=config.algorithm.group_size,
    )


@dataclass(frozen=True)
class Prompt:
    """A group's prompt: the task's row, its text and its token ids."""

    row: Row
    text: str
    ids: tuple[int, ...]


class PromptSource:
    """Prompts of a run by group id, and how their completions are sampled and read."""

    def __init__(self, config: RunConfig, model: ModelConfig, text: TextTokenizer, allow_import: Sequence[str]) -> None:
        self._task: Task = load_task(config.task.name, config.task.options, allow_import)
        self._rows = {"train": self._task.rows("train"), "eval": self._task.rows("eval")}
        self._stream = PromptStream(len(self._rows["train"]), config.seed)
        self._text = text
        self._longest = max(config.inference.prompt_buckets)
        self._sampling = config.sampling
        mask = text.stop_token_mask(config.sampling.stop, model.vocab_size)
        self._stop_ids = frozenset(int(token) for token in np.flatnonzero(mask))

    def rows(self, split: Literal["train", "eval"]) -> int:
        """How many rows a split has."""
        return len(self._rows[split])

    def sampling(self, greedy: bool) -> SamplingParams:
        """The run's sampling settings."""
        return SamplingParams(self._sampling.temperature, self._sampling.max_new_tokens, self._stop_ids, greedy)

    def prompt(self, group_id: int, split: Literal["train", "eval"]) -> Prompt:
        """The prompt of a group: of the train split in the stream's order, of the eval split in the rows' own.

        TaskError names the row of a prompt that is empty or longer than the largest prompt bucket.
        """
        rows = self._rows[split]
        if split == "eval" and group_id >= len(rows):
            raise TaskError(f"eval prompt {group_id}: the task has {len(rows)} eval rows")
        row = dict(rows[self._stream.row_index(group_id) if split == "train" else group_id])
        text = self._task.prompt(row)
        ids = tuple(self._text.encode(text))
        if not 0 < len(ids) <= self._longest:
            raise TaskError(
                f"{split} row {row.get('prompt_id')!r} (group {group_id}): its prompt has {len(ids)} tokens, expected "
                f"1 to {self._longest}, the largest of inference.prompt_buckets",
                remedy="Shorten the prompt or raise inference.prompt_buckets and trainer.sequence_tokens",
            )
        return Prompt(row, text, ids)

    def completion(self, ids: Sequence[int], reason: FinishReason) -> str:
        """The text of a completion without what stopped it: EOS, or the stop character and what follows in its token."""
        text = self._text.decode(ids)
        if reason != "stop" or ids[-1] in self._text.eos_ids:
            return text
        before = self._text.decode(ids[:-1])
        if not text.startswith(before):
            return before
        ends = [at for stop in self._sampling.stop if (at := text.find(stop, len(before))) >= 0]
        return text[: min(ends)] if ends else text


def trajectory_arrays(
    prompt_ids: Sequence[int],
    tokens: Sequence[np.ndarray[Any, Any]],
    logp: Sequence[np.ndarray[Any, Any]],
    versions: Sequence[np.ndarray[Any, Any]],
) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a trajectory bundle: n samples of one prompt, right-padded to the longest, T columns.

    tokens int32 [n, T] (0 beyond the end), length int32 [n], loss_mask uint8 [n, T] (1 on the completion, its stop
    token included), behaviour_logp float32 [n, T] (0 off the mask; position t scores token t), policy_version int32
    [n, T] (−1 off the mask).
    """
    start = len(prompt_ids)
    length = np.array([start + len(part) for part in tokens], np.int32)
    shape = (len(tokens), int(length.max()))
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "tokens": np.zeros(shape, np.int32),
        "length": length,
        "loss_mask": np.zeros(shape, np.uint8),
        "behaviour_logp": np.zeros(shape, np.float32),
        "policy_version": np.full(shape, -1, np.int32),
    }
    arrays["tokens"][:, :start] = prompt_ids
    for i, end in enumerate(length):
        arrays["tokens"][i, start:end] = tokens[i]
        arrays["loss_mask"][i, start:end] = 1
        arrays["behaviour_logp"][i, start:end] = logp[i]
        arrays["policy_version"][i, start:end] = versions[i]
    return arrays
