"""What is refused before a process is started: by the same code that the workers run, without jax."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from waypath.proto import config as configs
from waypath.proto.errors import ConfigError, ModelError, TaskError, UserError
from waypath.tools import preflight
from waypath.workers.memory import parameter_bytes
from waypath.workers.models.open import open_model
from waypath.workers.models.tokenizer import char_tokenizer

ALPHABET = "0123456789>"


def tiny(tmp_path: Path, **overrides: Any) -> configs.RunConfig:
    base = {
        "model": {"random": {"alphabet": ALPHABET}},
        "task": {"name": "sort", "prompts_per_step": 2, "options": {"train_rows": 64, "eval_rows": 8}},
        "algorithm": {"group_size": 2},
        "inference": {"slots": 4, "prompt_buckets": [8]},
        "storage": {"run_dir": str(tmp_path / "runs"), "checkpoint_dir": str(tmp_path / "runs")},
    }
    if "task.name" in overrides:
        base["task"] = {"name": "sort", "prompts_per_step": 2}
    return configs.load(base, overrides)


def jsonl(tmp_path: Path, *prompts: str) -> str:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": prompt, "answer": "1", "prompt_id": f"p{i}"} for i, prompt in enumerate(prompts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"jsonl:{path}"


def model_directory(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """A [model] section whose directory has a config, a tokenizer, and the header of one tensor."""
    directory = tmp_path / "model"
    directory.mkdir()
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 14,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "max_position_embeddings": 64,
    }
    (directory / "config.json").write_text(json.dumps({**raw, **changes}))
    char_tokenizer(ALPHABET).save(str(directory / "tokenizer.json"))
    shapes = {
        "model.embed_tokens": [14, 8],
        "model.norm": [8],
        "model.layers.0.input_layernorm": [8],
        "model.layers.0.post_attention_layernorm": [8],
        "model.layers.0.self_attn.q_proj": [8, 8],
        "model.layers.0.self_attn.k_proj": [4, 8],
        "model.layers.0.self_attn.v_proj": [4, 8],
        "model.layers.0.self_attn.o_proj": [8, 8],
        "model.layers.0.mlp.gate_proj": [8, 8],
        "model.layers.0.mlp.up_proj": [8, 8],
        "model.layers.0.mlp.down_proj": [8, 8],
    }
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[f"{name}.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))
    return {"path": str(directory)}


def with_model(tmp_path: Path, section: dict[str, Any], **overrides: Any) -> configs.RunConfig:
    return configs.load({**tiny(tmp_path).to_json(), "model": section}, overrides)


def test_the_tiny_job_is_accepted(tmp_path: Path) -> None:
    preflight.check(tiny(tmp_path))
    preflight.check(tiny(tmp_path, **{"warm_start.steps": 1}))


def test_a_sound_model_directory_is_accepted(tmp_path: Path) -> None:
    preflight.check(with_model(tmp_path, model_directory(tmp_path)))


@pytest.mark.parametrize("role", ["trainer", "inference"])
def test_a_model_beyond_the_memory_limit_is_refused(role: str, tmp_path: Path) -> None:
    config = tiny(tmp_path, **{f"{role}.memory_limit_bytes": 1_000_000})
    with pytest.raises(ModelError, match=rf"in each {role} process .*; {role}.memory_limit_bytes = 1,000,000"):
        preflight.check(config)


def test_the_trainer_needs_what_its_fsdp_axis_does_not_divide(tmp_path: Path) -> None:
    whole = parameter_bytes(open_model(tiny(tmp_path))[0])
    limits = {"trainer.memory_limit_bytes": 5 * whole}  # 3 copies divided over fsdp, 3 that are not
    preflight.check(tiny(tmp_path, **{"trainer.mesh": {"fsdp": 2}, **limits}))
    with pytest.raises(ModelError, match=f"needs {6 * whole:,} bytes in each trainer process"):
        preflight.check(tiny(tmp_path, **{"trainer.mesh": {"data": 2}, **limits}))


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="absent"):
        preflight.check(with_model(tmp_path, {"path": str(tmp_path / "absent")}))


@pytest.mark.parametrize(
    ("changes", "overrides", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, {}, "architecture 'GPT2LMHeadModel' is not supported"),
        ({"num_attention_heads": 3}, {}, r"q_proj.weight: expected shape \[6, 8\], found \[8, 8\]"),
        ({"num_hidden_layers": 2}, {}, "missing tensors: model.layers.1"),
        ({"max_position_embeddings": 23}, {}, "= 24 is more than the model's 23 positions"),
        ({}, {"sampling.stop": ["x"]}, "'x' is not one character that is one token"),
    ],
)
def test_a_model_that_does_not_suit_the_run_is_refused(
    changes: dict[str, Any], overrides: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        preflight.check(with_model(tmp_path, model_directory(tmp_path, **changes), **overrides))


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    section = model_directory(tmp_path)
    (Path(section["path"]) / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        preflight.check(with_model(tmp_path, section))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model.random.head_dim": 3}, "head_dim must be even for RoPE, found 3"),
        (
            {"model.random.num_heads": 3, "model.random.num_kv_heads": 2},
            r"num_attention_heads \(3\) must be a multiple",
        ),
        ({"sampling.stop": ["\n"]}, r"'\\n' is not one character that is one token"),
        (
            {"inference.prompt_buckets": [6]},
            r"task 'sort', train row '\d{6}': its prompt has 7 tokens, expected 1 to 6",
        ),
        ({"model.random.alphabet": "0123456789"}, "its prompt '.*>' has '>', which the tokenizer lacks"),
        (
            {"task.name": "arithmetic", "model.random.alphabet": "0123456789+=\n", "inference.prompt_buckets": [32]}
            | {"warm_start.steps": 1},
            r"warm_start.steps = 1: ArithmeticTask has no demonstrations",
        ),
    ],
)
def test_what_no_worker_could_do_is_refused(overrides: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        preflight.check(tiny(tmp_path, **overrides))


def test_an_alphabet_that_repeats_a_character_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.random: alphabet 'aba' repeats 'a'"):
        tiny(tmp_path, **{"model.random.alphabet": "aba"})


def test_a_prompt_of_a_data_file_is_named(tmp_path: Path) -> None:
    preflight.check(tiny(tmp_path, **{"task.name": jsonl(tmp_path, "12>", "3>")}))
    with pytest.raises(TaskError, match="row 'p1': its prompt has 9 tokens, expected 1 to 8"):
        preflight.check(tiny(tmp_path, **{"task.name": jsonl(tmp_path, "12>", "123456789")}))
    with pytest.raises(TaskError, match="row 'p0': its prompt '1x2y' has 'xy', which the tokenizer lacks"):
        preflight.check(tiny(tmp_path, **{"task.name": jsonl(tmp_path, "1x2y")}))


@pytest.mark.parametrize("key", ["reward.function", "task.name"])
def test_imports_that_are_not_allowed_are_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{key} = 'sums.hard:reward'.*allow_import"):
        preflight.check(tiny(tmp_path, **{key: "sums.hard:reward", "reward.allow_import": ["sum"]}))
    preflight.check(tiny(tmp_path, **{key: "sums.hard:reward", "reward.allow_import": ["sums"]}))


def test_a_data_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="absent"):
        preflight.check(tiny(tmp_path, **{"task.name": f"jsonl:{tmp_path}/absent.jsonl"}))


@pytest.mark.parametrize("key", ["run_dir", "checkpoint_dir"])
def test_a_folder_that_cannot_be_written_is_refused(key: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"storage\.{key}"):
        preflight.check(tiny(tmp_path, **{f"storage.{key}": str(tmp_path / "file" / "runs")}))


def test_the_checks_run_without_jax(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(tiny(tmp_path, **{"warm_start.steps": 1}).to_toml())
    program = (
        "import sys\n"
        "from waypath.proto import config\n"
        "from waypath.tools import preflight\n"
        "preflight.check(config.load(sys.argv[1]))\n"
        "sys.exit(sorted(m for m in sys.modules if m.split('.')[0] in ('jax', 'jaxlib')) or 0)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(job)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
