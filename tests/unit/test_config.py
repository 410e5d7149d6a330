"""The run configuration: what it accepts, and that every refusal names key, value and remedy."""

from __future__ import annotations

import datetime
import tomllib
from pathlib import Path
from typing import Any

import pytest

from waypath.proto import config
from waypath.proto.errors import ConfigError

BASE: dict[str, Any] = {"model": {"random": {"alphabet": "0123456789>\n"}}, "task": {"name": "sort"}}


def test_resolved_configuration_survives_its_toml_form() -> None:
    resolved = config.load(
        BASE,
        {
            "sampling.stop": ["\n", '"', "\x01"],
            "task.options": {"a b": [1, 2.5, True], "t": {"x": "y"}, "l": ((1, 2), [{"k": ()}])},
        },
    )
    assert config.parse(tomllib.loads(resolved.to_toml())) == resolved
    assert config.parse(resolved.to_json()) == resolved


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"optimizer.learning_rte": 1e-5}, ["optimizer.learning_rte", "1e-05", "learning_rate"]),
        ({"stepz": 3}, ["stepz", "steps"]),
        ({"steps": "many"}, ["steps", "many", "integer"]),
        ({"steps": 0}, ["steps", "0", "greater than 0"]),
        ({"steps": 2.5}, ["steps", "2.5"]),
        ({"algorithm.preset": "ppp"}, ["algorithm.preset", "ppp", "grpo"]),
        ({"algorithm.group_size": 1}, ["algorithm.group_size", "1", "2"]),
        ({"trainer.mesh": {"fsdp": 3}}, ["trainer.mesh", "3 devices", "trainer_processes"]),
        ({"trainer.mesh": {"foo": 2}}, ["trainer.mesh", "foo"]),
        ({"trainer.micro_batch_rows": 7}, ["micro_batch_rows = 7", "divisible"]),
        ({"inference.slots": 30}, ["inference.slots = 30", "group_size = 8"]),
        ({"trainer.sequence_tokens": 8}, ["sequence_tokens = 8", "48"]),
        ({"inference.replicas": 3}, ["replicas = 3", "inference_processes"]),
        ({"algorithm.minibatches": 9}, ["minibatches = 9", "prompts_per_step = 8"]),
        ({"sampling.stop": ["ab"]}, ["sampling.stop.0", "ab"]),
        ({"sampling.temperature": 0.0}, ["sampling.temperature"]),
        ({"stop_at_reward": float("nan")}, ["stop_at_reward", "nan"]),
        ({"model.path": "somewhere"}, ["model.path", "exactly one"]),
        ({"seed.x": 1}, ["seed"]),
        (
            {"reward.timeout_s": 60.0, "algorithm.group_size": 16},
            ["timeout_s = 60", "group_size = 16", "score_s = 300"],
        ),
        ({"storage.checkpoint_dir": "gs://bucket/runs"}, ["storage.checkpoint_dir", "gs://bucket/runs", "URI"]),
        ({"storage.run_dir": "file:///tmp"}, ["storage.run_dir", "URI"]),
        ({"cluster.compilation_cache": "gs://bucket/cache"}, ["cluster.compilation_cache", "URI"]),
        ({"task.options": {"x": None}}, ["task.options", "x = None", "config.toml"]),
        ({"reward.options": {"a": [{"b": {1, 2}}]}}, ["reward.options", "a.0.b", "set"]),
        ({"reward.options": {"day": datetime.date(2024, 1, 2)}}, ["reward.options", "day", "date"]),
        ({"algorithm.max_staleness": 2}, ["algorithm.max_staleness = 2", "0 (on-policy) and 1"]),
        ({"warm_start.steps": 1, "warm_start.batch_size": 9}, ["batch_size = 9", "micro_batch_rows = 8"]),
    ],
)
def test_refusals_name_key_value_and_what_is_allowed(overrides: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        config.load(BASE, overrides)
    for word in words:
        assert word in str(refused.value)


def test_missing_key_unreadable_and_malformed_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing key task"):
        config.load({"model": BASE["model"]})
    with pytest.raises(ConfigError, match="cannot read"):
        config.load(tmp_path / "nothing.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("steps = = 3")
    with pytest.raises(ConfigError, match="is not TOML"):
        config.load(bad)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("steps=30", ("steps", 30)),
        ("optimizer.learning_rate=1e-5", ("optimizer.learning_rate", 1e-5)),
        ("inference.engine=jax", ("inference.engine", "jax")),
        ('model.path="a=b"', ("model.path", "a=b")),
        ("algorithm.shuffle_advantages=true", ("algorithm.shuffle_advantages", True)),
        ("trainer.mesh={fsdp=1}", ("trainer.mesh", {"fsdp": 1})),
    ],
)
def test_overrides_are_toml_values_or_bare_words(text: str, expected: tuple[str, Any]) -> None:
    assert config.parse_override(text) == expected


def test_override_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        config.parse_override("steps")
