"""Text to token ids and back: a Hugging Face ``tokenizer.json``, or one token per character for tests.

Owns which ids end a sequence (EOS, stop characters). Knows neither jax nor models' weights; called by the rollout
service, the trainer's warm start and tests.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models

from waypath.proto.errors import ConfigError, ModelError

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
EOS_ID, UNKNOWN_ID = 1, 2


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer with its end-of-sequence ids. ``directory`` holds the files it came from, if any.

    ``unknown_id``: what a character outside the alphabet of a character tokenizer becomes; text with one is refused.
    """

    inner: Tokenizer
    eos_ids: tuple[int, ...]
    directory: Path | None = None
    unknown_id: int | None = None

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included (a model's vocabulary may be padded beyond it)."""
        return int(self.inner.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, no special token added; a special token spelled out in the text becomes its id."""
        return list(self.inner.encode(text, add_special_tokens=False).ids)

    def unknown(self, text: str) -> str:
        """The characters of ``text`` that the alphabet lacks, each once; "" for a tokenizer that has no alphabet."""
        if self.unknown_id is None or self.unknown_id not in self.encode(text):
            return ""
        return "".join(dict.fromkeys(c for c in text if self.unknown_id in self.encode(c)))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids`` without special tokens; incomplete UTF-8 becomes U+FFFD."""
        return str(self.inner.decode([int(i) for i in ids], skip_special_tokens=True))

    def stop_token_mask(self, stop: Sequence[str], size: int | None = None) -> np.ndarray[Any, Any]:
        """bool [size]: ids after which a sample ends: EOS, and tokens whose text contains a stop character.

        ``size`` is the model's vocabulary (default: the tokenizer's). Raises ConfigError for a stop string that is not
        one character and one token: whether a longer one has been sampled cannot be read off a single token.
        """
        mask = np.zeros(self.vocab_size if size is None else size, bool)
        count = min(len(mask), self.vocab_size)
        if stop:
            texts = self.inner.decode_batch([[i] for i in range(count)], skip_special_tokens=True)
            mask[:count] = [any(character in text for character in stop) for text in texts]
        for text in stop:
            ids = self.encode(text)
            if len(text) != 1 or len(ids) != 1 or not mask[ids[0]]:
                raise ConfigError(f"sampling.stop: {text!r} is not one character that is one token")
        mask[[i for i in self.eos_ids if i < len(mask)]] = True
        return mask


def load(directory: str | Path) -> TextTokenizer:
    """The tokenizer of a model directory.

    EOS ids come from ``generation_config.json``, else ``config.json``, else the ``eos_token`` of
    ``tokenizer_config.json``. Raises ModelError where ``tokenizer.json`` is missing or unreadable.
    """
    path = Path(directory)
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{file} is missing")
    try:
        inner = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{file} is not a tokenizer: {error}") from error
    inner.no_padding()
    inner.no_truncation()
    return TextTokenizer(inner, _eos_ids(path, inner), path)


def _eos_ids(path: Path, inner: Tokenizer) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        eos = _json(path / name).get("eos_token_id")
        if eos is not None:
            return tuple(int(i) for i in eos) if isinstance(eos, list) else (int(eos),)
    token = _json(path / "tokenizer_config.json").get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    found = None if token is None else inner.token_to_id(token)
    return () if found is None else (int(found),)


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def char_tokenizer(alphabet: str) -> Tokenizer:
    """A tokenizer with ids ``<pad>`` 0, ``<eos>`` 1, ``<unk>`` 2, then one per character of ``alphabet`` in order.

    Its ``save(path)`` writes a ``tokenizer.json``. Raises ValueError where a character is repeated.
    """
    if len(set(alphabet)) != len(alphabet):
        raise ValueError(f"alphabet repeats a character: {alphabet!r}")
    vocab = {text: i for i, text in enumerate([PAD, EOS, UNKNOWN, *alphabet])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=UNKNOWN))
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([PAD, EOS, UNKNOWN])
    return inner


def char_text_tokenizer(alphabet: str) -> TextTokenizer:
    """:func:`char_tokenizer` with its EOS id, ready to use."""
    inner = char_tokenizer(alphabet)
    return TextTokenizer(inner, (EOS_ID,), unknown_id=UNKNOWN_ID)
