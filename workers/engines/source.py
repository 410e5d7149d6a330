"""From a run's configuration to what a rollout worker samples: prompts, and how their completions are drawn and read.

Owns the reading of the `task` and `sampling` sections on the engine's side, the call of a task's `prompt`, and the text of
a completion. Must not know jax, engines' insides, versions or the network. Called by the rollout service, on one thread at
a time, and by the launcher, which makes the prompts of a built-in task before it starts a process.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from waypath.proto import codecs
from waypath.proto.config import RunConfig
from waypath.proto.errors import TaskError
from waypath.workers.engines.protocol import FinishReason, SamplingParams
from waypath.workers.models.config import ModelConfig
from waypath.workers.models.tokenizer import TextTokenizer
from waypath.workers.tasks.base import PromptStream, Row, Task, load_task


@dataclass(frozen=True)
class Prompt:
    """A group's prompt: the task's row, its text and its token ids."""

    row: Row
    text: str
    ids: tuple[int, ...]


class PromptSource:
    """Prompts of a run by group id, and how their completions are sampled and read."""

    def __init__(self, config: RunConfig, model: ModelConfig, text: TextTokenizer, allow_import: Sequence[str]) -> None:
        self._name = config.task.name
        self._task: Task = load_task(self._name, config.task.options, allow_import)
        self._rows = {"train": self._split("train"), "eval": self._split("eval")}
        self._stream = PromptStream(len(self._rows["train"]), config.seed)
        self._text = text
        self._longest = max(config.inference.prompt_buckets)
        self._sampling = config.sampling
        mask = text.stop_token_mask(config.sampling.stop, model.vocab_size)
        self._stop_ids = frozenset(int(token) for token in np.flatnonzero(mask))

    @property
    def task(self) -> Task:
        """The run's task."""
        return self._task

    def rows(self, split: Literal["train", "eval"]) -> int:
        """How many rows a split has."""
        return len(self._rows[split])

    def sampling(self, greedy: bool) -> SamplingParams:
        """The run's sampling settings."""
        return SamplingParams(self._sampling.temperature, self._sampling.max_new_tokens, self._stop_ids, greedy)

    def prompt(self, group_id: int, split: Literal["train", "eval"]) -> Prompt:
        """The prompt of a group: of the train split in the stream's order, of the eval split in the rows' own.

        Calls user code, which may block. TaskError names the row; see `row_prompt`.
        """
        rows = self._rows[split]
        if split == "eval" and group_id >= len(rows):
            raise TaskError(f"eval prompt {group_id}: the task has {len(rows)} eval rows")
        return self.row_prompt(self._stream.row_index(group_id) if split == "train" else group_id, split)

    def row_prompt(self, index: int, split: Literal["train", "eval"]) -> Prompt:
        """The prompt of a row.

        TaskError names task and row where the task's `prompt` raises or returns no text, where the row is not JSON, and
        where the prompt is empty, longer than the largest prompt bucket, or has a character that the tokenizer lacks.
        """
        row = dict(self._rows[split][index])
        where = f"task {self._name!r}, {split} row {row.get('prompt_id')!r}"
        try:
            codecs.dump_json(row)
        except (TypeError, ValueError) as error:
            raise TaskError(f"{where}: a row is a JSON object: {error}") from error
        try:
            text = self._task.prompt(row)
        except Exception as error:  # user code may raise anything
            raise TaskError(
                f"{where}: prompt(row) raised {type(error).__name__}: {error}", remote_traceback=traceback.format_exc()
            ) from error
        if not isinstance(text, str):
            raise TaskError(f"{where}: prompt(row) returned {type(text).__name__}, expected text")
        ids = tuple(self._text.encode(text))
        if not 0 < len(ids) <= self._longest:
            raise TaskError(
                f"{where}: its prompt has {len(ids)} tokens, expected 1 to {self._longest}, the largest of "
                "inference.prompt_buckets",
                remedy="Shorten the prompt or raise inference.prompt_buckets and trainer.sequence_tokens",
            )
        if lacking := self._text.unknown(text):
            raise TaskError(
                f"{where}: its prompt {text!r} has {lacking!r}, which the tokenizer lacks",
                remedy="Add it to model.random.alphabet",
            )
        return Prompt(row, text, ids)

    def _split(self, split: Literal["train", "eval"]) -> Sequence[Row]:
        try:
            return self._task.rows(split)
        except Exception as error:  # user code may raise anything
            raise TaskError(
                f"task {self._name!r}: rows({split!r}) raised {type(error).__name__}: {error}",
                remote_traceback=traceback.format_exc(),
            ) from error

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
