"""Tasks: their rows, splits, prompts and rewards; finding one by name; the prompt stream."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waypath.proto.errors import TaskError
from waypath.workers.tasks.base import DemonstratingTask, PromptStream, Sample, Task, load_task
from waypath.workers.tasks.jsonl import exact, numeric, regex
from waypath.workers.tasks.sort import bubble_pass


def scores(task: Task, row: dict[str, Any], *completions: str) -> list[Any]:
    samples = [Sample(task.prompt(row), text, row, 0, i) for i, text in enumerate(completions)]
    return list(task.reward(samples))


def test_arithmetic_prompts_and_rewards() -> None:
    task = load_task("arithmetic")
    row = next(r for r in task.rows("train") if r["prompt_id"] == "7+8")
    assert task.prompt(row) == "2+5=7\n9+3=12\n7+8="
    assert scores(task, row, "15", "15\n1+", "16", "", " 15", "15 ", "150") == [1, 1, 0, 0, 0, 0, 0]


def test_arithmetic_holds_out_a_quarter_without_a_commutative_leak() -> None:
    task = load_task("arithmetic", {"operators": ["+", "-"]})
    train, held_out = task.rows("train"), task.rows("eval")
    sums = [r for r in held_out if r["op"] == "+"]
    assert len(sums) == 21 and len([r for r in train if r["op"] == "+"]) == 60

    def pairs(rows: Any) -> set[frozenset[int]]:
        return {frozenset((r["a"], r["b"])) for r in rows}

    assert not pairs(train) & pairs(held_out)
    assert not pairs(held_out) & {frozenset(p) for p in [(2, 5), (9, 3), (7, 2), (9, 6)]}  # shown solved
    assert len({r["prompt_id"] for r in [*train, *held_out]}) == len(train) + len(held_out) == 81 + 45


def test_arithmetic_differences_and_chat_form() -> None:
    task = load_task("arithmetic", {"operators": ["-"], "high": 20})
    row = next(r for r in task.rows("train") if r["a"] == 19 and r["b"] == 1)
    assert task.prompt(row) == "7-2=5\n9-6=3\n19-1=" and scores(task, row, "18") == [1]
    assert min(int(r["answer"]) for r in task.rows("train")) >= 0
    chat = load_task("arithmetic", {"form": "chat", "system": "Count."})
    row = chat.rows("train")[0]
    text = chat.prompt(row)
    assert text.startswith("<|im_start|>system\nCount.<|im_end|>\n<|im_start|>user\n")
    assert text.endswith(f"{row['a']}+{row['b']}?<|im_end|>\n<|im_start|>assistant\n")
    answer = row["answer"]
    assert scores(chat, row, f"1+1 is {answer}.", f"{answer} or 99", "none", f"no\n{answer}") == [1, 0, 0, 0]


@pytest.mark.parametrize(
    "options",
    [{"operators": ["*"]}, {"operators": []}, {"low": 5, "high": 1}, {"form": "prose"}, {"nope": 1}],
)
def test_arithmetic_refuses_options(options: dict[str, Any]) -> None:
    with pytest.raises(TaskError, match=r"task 'arithmetic' refuses its task\.options"):
        load_task("arithmetic", options)


def test_sort_rows_are_fixed_distinct_and_held_out_by_answer() -> None:
    task = load_task("sort")
    train, held_out = task.rows("train"), task.rows("eval")
    assert (len(train), len(held_out)) == (4096, 256)
    assert len({r["digits"] for r in [*train, *held_out]}) == 4096 + 256
    assert not {r["answer"] for r in train} & {r["answer"] for r in held_out}
    lengths = Counter(len(r["digits"]) for r in train)
    assert set(lengths) == {4, 5, 6} and min(lengths.values()) > 1100
    assert [r["digits"] for r in train[:3]] == [r["digits"] for r in load_task("sort").rows("train")[:3]]
    row = {"prompt_id": "40713", "digits": "40713", "answer": "01347"}
    assert task.prompt(row) == "40713>"
    assert scores(task, row, "01347", "04137", "01347\n", "013477", "") == [1, 0, 1, 0, 0]


def test_the_sloppy_teacher_is_right_in_a_quarter_and_never_shows_held_out_digits() -> None:
    task = load_task("sort")
    assert isinstance(task, DemonstratingTask)
    pairs = task.demonstrations(np.random.default_rng(0), 2000)
    assert pairs == task.demonstrations(np.random.default_rng(0), 2000)
    held_out = {r["answer"] for r in task.rows("eval")}
    right = 0
    for prompt, completion in pairs:
        assert re.fullmatch(r"\d{4,6}>", prompt)
        digits = prompt[:-1]
        assert completion in ("".join(sorted(digits)), bubble_pass(digits))
        assert "".join(sorted(digits)) not in held_out
        right += completion == "".join(sorted(digits))
    careful = sum(bubble_pass(p[:-1]) == "".join(sorted(p[:-1])) for p, _ in pairs) / len(pairs)
    assert abs(right / len(pairs) - (0.25 + 0.75 * careful)) < 0.04  # some are sorted after one pass


def test_bubble_pass() -> None:
    assert bubble_pass("40713") == "04137"
    assert bubble_pass("3") == "3"


@pytest.mark.parametrize("options", [{"train_rows": 0}, {"min_digits": 7}, {"min_digits": 2, "max_digits": 2}])
def test_sort_refuses_options(options: dict[str, Any]) -> None:
    with pytest.raises(TaskError, match="task 'sort' refuses"):
        load_task("sort", options)


def write_lines(path: Path, *rows: Any) -> str:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return f"jsonl:{path}"


def test_jsonl_rows_split_and_template(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i % 30}", "answer": i, "level": i} for i in range(40)]
    name = write_lines(tmp_path / "a.jsonl", *rows, "")
    task = load_task(name, {"template": "Q: {prompt}\nA:", "eval_every": 10})
    train, held_out = task.rows("train"), task.rows("eval")
    assert len(train) + len(held_out) == 40 and len({r["prompt"] for r in held_out}) == 3
    assert not {r["prompt"] for r in train} & {r["prompt"] for r in held_out}
    assert task.prompt(train[0]) == f"Q: {train[0]['prompt']}\nA:"
    assert all(r["prompt_id"] == str(r["level"] + 1) for r in train)
    other = load_task(name, {"eval_file": str(tmp_path / "a.jsonl")})
    assert len(other.rows("train")) == len(other.rows("eval")) == 40


def test_jsonl_verifiers() -> None:
    assert exact("  42 \nmore", "42") and exact("42", 42) and not exact("421", "42")
    assert regex("it is 42.", r"\b4\d\b") and not regex("142", r"^4")
    assert numeric("so 1,234.5 it is: $1,234.50.", "1234.5") and numeric("-2e3", -2000)
    assert not numeric("none", 1) and not numeric("3 4", 3) and numeric("0.33", 1 / 3, tolerance=0.01)


def test_jsonl_options_reach_the_verifier(tmp_path: Path) -> None:
    name = write_lines(tmp_path / "a.jsonl", {"prompt": "pi", "answer": 3.14159})
    task = load_task(name, {"verifier": "numeric"})
    (row,) = task.rows("train")
    sample = Sample("pi", "3.14", row)
    assert list(task.reward([sample])) == [0.0] and list(task.reward([sample], tolerance=0.01)) == [1.0]


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        (["{"], {}, r"a\.jsonl:1: not JSON"),
        ([{"prompt": "a", "answer": 1}, {"prompt": 3, "answer": 1}], {}, r"a\.jsonl:2: expected an object"),
        ([{"prompt": "a"}], {}, "expected an object"),
        ([{"prompt": "a", "answer": [1]}], {}, "'answer' is list"),
        ([{"prompt": "a", "answer": "("}], {"verifier": "regex"}, "does not suit the verifier 'regex'"),
        ([{"prompt": "a", "answer": "x"}], {"verifier": "numeric"}, "does not suit the verifier 'numeric'"),
        ([""], {}, "no rows"),
        ([{"prompt": "a", "answer": 1}], {"verifier": "maths"}, "verifier 'maths': expected one of"),
        ([{"prompt": "a", "answer": 1}], {"template": "x"}, "must contain {prompt}"),
        ([{"prompt": "a", "answer": 1}], {"eval_every": 1}, "eval_every 1"),
    ],
)
def test_jsonl_says_what_is_wrong(tmp_path: Path, lines: Any, options: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        load_task(write_lines(tmp_path / "a.jsonl", *lines), options)


def test_jsonl_without_a_file() -> None:
    with pytest.raises(TaskError, match="no such file; relative paths start at"):
        load_task("jsonl:not-here.jsonl")


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"user_tasks_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(
        "class Mine:\n"
        "    def __init__(self, n=2): self.n = n\n"
        "    def rows(self, split): return [{'prompt_id': str(i)} for i in range(self.n)]\n"
        "    def prompt(self, row): return row['prompt_id']\n"
        "    def reward(self, samples): return [1.0 for _ in samples]\n"
        "INSTANCE = Mine(7)\n"
        "NUMBER = 3\n"
        "class Half:\n    def rows(self, split): return []\n"
    )
    (tmp_path / f"{name}_broken.py").write_text("raise ValueError('no good')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_import_path(user_module: str) -> None:
    assert len(load_task(f"{user_module}:Mine", {"n": 5}, [user_module]).rows("train")) == 5
    assert len(load_task(f"{user_module}:INSTANCE", {}, [user_module]).rows("train")) == 7


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        (":Mine", {}, "expected an import path"),
        ("{m}:", {}, "expected an import path"),
        ("{m}:Missing", {}, "has no attribute 'Missing'"),
        ("{m}:NUMBER", {}, "int is neither a task nor callable"),
        ("{m}:Half", {}, "Half has no prompt, reward"),
        ("{m}:INSTANCE", {"n": 1}, "takes no task.options; found: n"),
        ("{m}:Mine", {"m": 1}, "refuses its task.options"),
        ("{m}_broken:x", {}, "failed with ValueError: no good"),
        ("{m}2.sub:Mine", {}, r"may not import '\w+\.sub' \(allowed: user_tasks"),
    ],
)
def test_import_path_says_what_is_wrong(user_module: str, path: str, options: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        load_task(path.format(m=user_module), options, [user_module, f"{user_module}_broken"])


def test_nothing_is_imported_without_permission() -> None:
    with pytest.raises(TaskError, match=r"may not import 'os' \(allowed: nothing\)\. Start the worker with"):
        load_task("os:system")
    with pytest.raises(TaskError, match="expected arithmetic, sort, jsonl:FILE"):
        load_task("arithmetics")


@given(n=st.integers(1, 50), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 3))
def test_prompt_stream_visits_each_row_once_an_epoch(n: int, seed: int, epoch: int) -> None:
    stream = PromptStream(n, seed)
    visited = [stream.row_index(epoch * n + i) for i in range(n)]
    assert sorted(visited) == list(range(n))
    assert [PromptStream(n, seed).row_index(g) for g in range(epoch * n, epoch * n + n)] == visited


def test_prompt_stream_is_random_access_and_differs_by_seed_and_epoch() -> None:
    stream = PromptStream(100, 7)
    forward = [stream.row_index(g) for g in range(300)]
    assert [stream.row_index(g) for g in reversed(range(300))] == forward[::-1]
    assert forward[:100] != forward[100:200] and forward[:100] != [
        PromptStream(100, 8).row_index(g) for g in range(100)
    ]
    assert forward[:5] == [34, 37, 8, 76, 29]  # the order is part of what a resumed run relies on
    with pytest.raises(ValueError, match="group_id -1"):
        stream.row_index(-1)
    with pytest.raises(TaskError, match="no train rows"):
        PromptStream(0, 0)
