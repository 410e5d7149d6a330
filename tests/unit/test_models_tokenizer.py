"""Character and byte-level tokenizers: round trips, ends of sequences, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from waypath.proto.errors import ConfigError, ModelError
from waypath.workers.models.tokenizer import EOS_ID, TextTokenizer, char_text_tokenizer, char_tokenizer, load


def test_characters_round_trip_one_id_each() -> None:
    tokenizer = char_text_tokenizer("0123456789+-=\n ")
    ids = tokenizer.encode("12 + 3=\n")
    assert ids == [4, 5, 17, 13, 17, 6, 15, 16]
    assert tokenizer.decode(ids) == "12 + 3=\n"
    assert tokenizer.decode([4, EOS_ID, 0]) == "1"
    assert tokenizer.encode("1x") == [4, 2]
    assert tokenizer.vocab_size == 18
    with pytest.raises(ValueError, match="repeats"):
        char_tokenizer("aba")


def test_stop_mask_marks_eos_and_tokens_that_contain_the_character() -> None:
    tokenizer = char_text_tokenizer("ab\n")
    assert tokenizer.stop_token_mask(["\n"], size=8).nonzero()[0].tolist() == [EOS_ID, 5]
    assert tokenizer.stop_token_mask([]).nonzero()[0].tolist() == [EOS_ID]


def test_stop_mask_sees_inside_merged_tokens() -> None:
    vocab = {token: i for i, token in enumerate(["a", "Ċ", "ĊĊ", "aĊ", "b", "<|end|>"])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ"), ("a", "Ċ")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|end|>"])
    tokenizer = TextTokenizer(inner, ())
    assert tokenizer.stop_token_mask(["\n"]).tolist() == [False, True, True, True, False, False]


@pytest.mark.parametrize("stop", ["", "ab", "é"])
def test_a_stop_string_that_is_not_one_token_is_refused(stop: str) -> None:
    vocab = {token: i for i, token in enumerate(["a", "b", "Ã", "©"])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    with pytest.raises(ConfigError, match=r"sampling\.stop"):
        TextTokenizer(inner, ()).stop_token_mask([stop])


def test_load_finds_eos_in_the_first_file_that_says_it(tmp_path: Path) -> None:
    char_tokenizer("ab").save(str(tmp_path / "tokenizer.json"))
    assert load(tmp_path).eos_ids == ()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<eos>"}}))
    assert load(tmp_path).eos_ids == (EOS_ID,)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 3}))
    assert load(tmp_path).eos_ids == (3,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 4]}))
    tokenizer = load(tmp_path)
    assert tokenizer.eos_ids == (1, 4)
    assert tokenizer.encode("ba") == [4, 3]


def test_a_missing_or_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="is not a tokenizer"):
        load(tmp_path)
    char_tokenizer("ab").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ModelError, match=r"config\.json is not JSON"):
        load(tmp_path)
