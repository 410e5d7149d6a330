"""The GGUF conversion, on a tiny model written in llama.cpp's order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from gguf import GGUFWriter

from waypath.proto.errors import ModelError
from waypath.tools import smollm2
from waypath.workers.models import tokenizer
from waypath.workers.models.config import ModelConfig
from waypath.workers.models.decoder import tree_of
from waypath.workers.models.hf import load_config, load_params
from waypath.workers.models.views import views

TOKENS = ["<|end|>", "a", "b", "1", "2", "ab", "Ċ", "Ġ"]
CONFIG = ModelConfig(
    8, 16, 12, 2, 4, 2, 4, rope_theta=5000.0, max_position_embeddings=64,
    bos_token_id=0, eos_token_ids=(0,), pad_token_id=0,
)  # fmt: skip


def permute(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp's conversion of q and k (convert_hf_to_gguf.py, LlamaModel.permute)."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def write_gguf(file: Path, params: dict[str, Any]) -> None:
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_block_count(2)
    writer.add_feed_forward_length(12)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(8)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] + [1] * 7)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{{ messages }}")
    names = {"attn_norm": "attn_norm", "mlp_norm": "ffn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v"}
    names |= {"o": "attn_output", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}
    writer.add_tensor("token_embd.weight", np.asarray(params["embed"]))
    writer.add_tensor("output_norm.weight", np.asarray(params["norm"]))
    for leaf, name in names.items():
        for layer, weight in enumerate(np.asarray(params["layers"][leaf])):
            heads = {"q": 4, "k": 2}.get(leaf)
            stored = weight if heads is None else permute(weight, heads)
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ascontiguousarray(stored))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_conversion_restores_names_order_config_and_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = np.random.default_rng(0)
    params = tree_of(CONFIG, lambda leaf: generator.standard_normal(leaf.shape, np.float32))
    source = tmp_path / "tiny.gguf"
    write_gguf(source, params)
    monkeypatch.setattr(smollm2, "find_gguf", lambda scratch: source)
    out = tmp_path / "models" / "tiny"
    assert smollm2.main(["--out", str(out)]) == 0
    assert load_config(out) == CONFIG
    loaded = load_params(out, CONFIG)
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), b), loaded, params))
    text = tokenizer.load(out)
    assert text.encode("ab12\n<|end|>") == [5, 3, 4, 6, 0]
    assert text.decode([5, 3, 7, 1, 0]) == "ab1 a"
    assert text.eos_ids == (0,)
    assert text.stop_token_mask(["\n"]).nonzero()[0].tolist() == [0, 6]

    source.unlink()  # a second run does not look for it
    assert smollm2.main(["--out", str(out)]) == 0
    assert "is complete" in capsys.readouterr().out
    whole = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").write_bytes(whole[:-1])
    assert smollm2.main(["--out", str(out)]) == 1
    assert "truncated" in capsys.readouterr().err


def test_a_file_with_another_digest_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "GGUF_SHA256", "0" * 64)
    (tmp_path / smollm2.GGUF_NAME).write_bytes(b"GGUF")
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    with pytest.raises(ModelError, match=r"SHA-256 is .* expected 0000"):
        smollm2.find_gguf(tmp_path)


def test_every_tensor_of_the_demo_model_has_a_name() -> None:
    names = {view.name.split(".", 3)[3] for view in views(CONFIG) if view.index is not None}
    assert names == {f"{name}.weight" for name in smollm2._TENSORS.values()}
