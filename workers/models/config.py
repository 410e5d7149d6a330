"""What a decoder looks like: sizes and switches, read from and written to a Hugging Face ``config.json``.

Owns the list of supported architectures. Knows nothing of jax, devices or files; called by the decoder, the
checkpoint reader and writer, and by tests that want a tiny model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from waypath.proto.errors import ModelError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM")

# Switches that change the mathematics and that the decoder does not implement: any other value is refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "hidden_act": (None, "silu"),
    "sliding_window": (None,),
    "use_sliding_window": (None, False),
}


ATTENTION_COLUMNS = 16  # see decoder.py


def attention_length(tokens: int) -> int:
    """Columns that attention over ``tokens`` tokens runs over; what a cache that holds them should have."""
    return -(-tokens // ATTENTION_COLUMNS) * ATTENTION_COLUMNS


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a Llama-family decoder; hashable, so it can be a static argument of ``jax.jit``.

    ``head_dim`` need not be ``hidden_size / num_heads`` (Qwen3). ``qk_norm`` turns on RMSNorm of each query and
    key head before RoPE. ``rms_norm_eps`` and ``rope_theta`` have Hugging Face's meaning.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = True
    qk_norm: bool = False
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise ModelError(f"model config: {name} must be at least 1, found {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"model config: num_attention_heads ({self.num_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ModelError(f"model config: head_dim must be even for RoPE, found {self.head_dim}")

    @property
    def architecture(self) -> str:
        """The name written under ``architectures`` in ``config.json``."""
        return "Qwen3ForCausalLM" if self.qk_norm else "LlamaForCausalLM"

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read a parsed ``config.json``.

        Raises ModelError for an architecture or a switch that the decoder does not implement, or a missing key.
        """
        names = raw.get("architectures") or []
        name = names[0] if names else None
        if name not in SUPPORTED_ARCHITECTURES:
            raise ModelError(
                f"config.json: architecture {name!r} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
            )
        for key, allowed in _NEUTRAL.items():
            value = raw.get(key)
            if key == "sliding_window" and raw.get("use_sliding_window") is False:
                continue
            if value not in allowed:
                raise ModelError(f"config.json: {key} = {value!r} is not supported (only {allowed[-1]!r})")
        try:
            hidden, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
            eos = raw.get("eos_token_id")
            return cls(
                vocab_size=int(raw["vocab_size"]),
                hidden_size=hidden,
                intermediate_size=int(raw["intermediate_size"]),
                num_layers=int(raw["num_hidden_layers"]),
                num_heads=heads,
                num_kv_heads=int(raw.get("num_key_value_heads") or heads),
                head_dim=int(raw.get("head_dim") or hidden // heads),
                rope_theta=_rope_theta(raw),
                rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
                tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
                qk_norm=name == "Qwen3ForCausalLM",
                max_position_embeddings=int(raw.get("max_position_embeddings", 2048)),
                initializer_range=float(raw.get("initializer_range", 0.02)),
                bos_token_id=raw.get("bos_token_id"),
                eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),),
                pad_token_id=raw.get("pad_token_id"),
            )
        except KeyError as error:
            raise ModelError(f"config.json: required key {error.args[0]!r} is missing") from error

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` that :meth:`from_hf` and ``transformers`` read back to this configuration."""
        eos: int | list[int] | None = None
        if self.eos_token_ids:
            eos = self.eos_token_ids[0] if len(self.eos_token_ids) == 1 else list(self.eos_token_ids)
        return {
            "architectures": [self.architecture],
            "model_type": "qwen3" if self.qk_norm else "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos,
            "pad_token_id": self.pad_token_id,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": self.initializer_range,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tie_embeddings,
            "torch_dtype": "float32",
            "use_cache": True,
            "vocab_size": self.vocab_size,
        }


def _rope_theta(raw: Mapping[str, Any]) -> float:
    """RoPE base, from ``rope_theta`` or the newer ``rope_parameters``; scaled RoPE is refused."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = raw.get(key) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ModelError(f"config.json: {key} of type {kind!r} is not supported (only 'default')")
        if "rope_theta" in rope:
            return float(rope["rope_theta"])
    return float(raw.get("rope_theta", 10000.0))
