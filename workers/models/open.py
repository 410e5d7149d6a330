"""A run's model before its weights are read: configuration, tokenizer, and whether the checkpoint fits the decoder.

Owns the match between a checkpoint's tensors and the decoder's leaves. Knows neither jax nor devices, so that the launcher
asks here before it starts a process; called by the trainer and rollout services too.
"""

from __future__ import annotations

from pathlib import Path

from waypath.proto.config import RunConfig
from waypath.proto.errors import ConfigError, ModelError
from waypath.proto.hf_checkpoint import CheckpointInfo, inspect
from waypath.workers.models import tokenizer
from waypath.workers.models.config import ModelConfig
from waypath.workers.models.tokenizer import TextTokenizer
from waypath.workers.models.views import views

DTYPES = ("F32", "F16", "BF16")


def open_model(config: RunConfig) -> tuple[ModelConfig, TextTokenizer]:
    """The model's configuration and its tokenizer; no weights are read.

    Raises ModelError where the directory is not usable, ConfigError where a completion could be longer than the model's
    positions reach.
    """
    model, text = _read(config)
    longest = max(config.inference.prompt_buckets) + config.sampling.max_new_tokens
    if longest > model.max_position_embeddings:
        raise ConfigError(
            f"the largest of inference.prompt_buckets + sampling.max_new_tokens = {longest} is more than the "
            f"model's {model.max_position_embeddings} positions"
        )
    return model, text


def _read(config: RunConfig) -> tuple[ModelConfig, TextTokenizer]:
    if config.model.path is not None:
        info = inspect(config.model.path)
        model = ModelConfig.from_hf(info.config)
        check_tensors(info, model)
        return model, tokenizer.load(config.model.path)
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


def load_config(directory: str | Path) -> ModelConfig:
    """The configuration of the model in ``directory``. Raises ModelError (see ``inspect``, ``ModelConfig.from_hf``)."""
    return ModelConfig.from_hf(inspect(directory).config)


def check_tensors(info: CheckpointInfo, config: ModelConfig) -> None:
    """Raise ModelError unless the checkpoint's tensors are exactly the decoder's, in name, shape and a float dtype.

    A stored copy of a tied head and RoPE buffers of old checkpoints are passed over.
    """
    expected = {view.name: view.shape for view in views(config)}
    passed = {name for name in info.tensors if name.endswith(".rotary_emb.inv_freq")}
    if config.tie_embeddings:
        passed.add("lm_head.weight")
    missing = sorted(set(expected) - set(info.tensors))
    extra = sorted(set(info.tensors) - set(expected) - passed)
    problems = []
    if missing:
        problems.append(f"missing tensors: {_some(missing)}")
    if extra:
        problems.append(f"unexpected tensors: {_some(extra)}")
    for name in sorted(set(expected) & set(info.tensors)):
        tensor = info.tensors[name]
        if tensor.shape != expected[name]:
            problems.append(f"{name}: expected shape {list(expected[name])}, found {list(tensor.shape)}")
        elif tensor.dtype not in DTYPES:
            problems.append(f"{name}: expected dtype F32, F16 or BF16, found {tensor.dtype}")
    if problems:
        hint = "Is tie_word_embeddings right in config.json?" if missing == ["lm_head.weight"] else ""
        raise ModelError(f"{info.directory}: {'; '.join(problems[:8])}", remedy=hint)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
