"""The files in examples/: configurations that load, and a task that works as its text says."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from waypath.proto import config
from waypath.workers.imports import import_attribute
from waypath.workers.rewards.values import check_rewards
from waypath.workers.tasks.base import Sample, load_task

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["tiny", "smollm2_arithmetic"])
def test_example_configurations_load_and_name_real_tasks(name: str) -> None:
    loaded = config.load(ROOT / f"examples/{name}.toml")
    assert config.load(tomllib.loads(loaded.to_toml())) == loaded
    task = load_task(loaded.task.name, loaded.task.options)
    assert 0 < loaded.evaluation.prompts <= len(task.rows("eval"))
    longest = max(len(task.prompt(row)) for split in ("train", "eval") for row in task.rows(split))  # type: ignore[arg-type]
    assert longest <= max(loaded.inference.prompt_buckets)  # both tokenizers write a digit or sign as one token
    answers = [str(row["answer"]) for row in [*task.rows("train"), *task.rows("eval")]]
    assert max(map(len, answers)) < loaded.sampling.max_new_tokens  # and the stop token
    if loaded.model.random is not None:
        text = "".join(task.prompt(row) for row in task.rows("train")) + "".join(answers)
        assert set(text) <= set(loaded.model.random.alphabet)


def test_the_example_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    task = load_task("examples.my_task:BackwardsTask", {"eval_words": 2}, ["examples"])
    row = task.rows("train")[0]
    assert len(task.rows("eval")) == 2 and task.prompt(row) == f"{row['prompt_id']}>"
    samples = [Sample(task.prompt(row), text, row, 0, i) for i, text in enumerate((row["answer"], "xx"))]
    scores = check_rewards(task.reward(samples), 2)
    assert scores[0] == {"reward": 1.0, "length_error": 0.0} and scores[1]["reward"] < 0.5
    brevity = import_attribute("examples.my_task:short_answers", ["examples"], "reward.function")
    assert check_rewards(brevity(samples, limit=3), 2) == [{"reward": 0.0}, {"reward": 1.0}]
