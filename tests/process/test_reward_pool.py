"""The reward pool with real children: good functions, and every way in which a bad one fails."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from waypath.proto.codecs import Bundle
from waypath.proto.errors import RewardError, TaskError
from waypath.workers.rewards.pool import RewardGroup, RewardPool, RewardSpec

USER_CODE = """
import os, signal, subprocess, sys, time
import numpy as np

def good(samples, scale=1.0):
    return [{"reward": scale * len(s.completion), "group": s.group_id} for s in samples]

def clashes(samples):
    return [{**score, "step": -1.0} for score in good(samples)]

def whoami(samples):
    return [os.getpid()] * len(samples)

def fails_on(sample):
    if sample.completion == "bad":
        raise KeyError("no such answer")
    return 1.0

def raises(samples):
    return [fails_on(s) for s in samples]

def exits(samples):
    sys.exit(4)

def nan(samples):
    return [float("nan") if s.completion == "bad" else 1 for s in samples]

def few(samples):
    return [1.0]

def text(samples):
    return [s.completion for s in samples]

def hangs(samples):
    for sample in samples:
        if sample.completion == "bad":
            while True:
                time.sleep(0.01)
    return [1.0] * len(samples)

def hangs_with_a_child(samples):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("started", child.pid)
    child.wait()

def dies(samples):
    if samples[0].completion == "ok":
        return [1.0] * len(samples)
    print("about to go", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGKILL)

def leaves(samples):
    os._exit(7)

def talks(samples):
    print("hello from user code")
    os.write(1, b"raw bytes \\xff\\n")
    print(sys.stdin.read() + "nothing to read", file=sys.stderr)
    return [2.0] * len(samples)

def slow(samples):
    time.sleep(600)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "user_rewards.py").write_text(USER_CODE)
    (tmp_path / "user_rewards_broken.py").write_text("import not_a_module\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "user_rewards"


def spec(function: str, **options: Any) -> RewardSpec:
    return RewardSpec("sort", {}, f"user_rewards:{function}", options, ["user_rewards", "user_rewards_broken"])


def group(*completions: str, group_id: int = 3) -> RewardGroup:
    row = {"prompt_id": "40713", "digits": "40713", "answer": "01347"}
    return RewardGroup(group_id, "40713>", row, completions, ["stop"] * len(completions))


def gone(pid: int) -> bool:
    """Whether the process ends within 10 s (its end is waited for, not polled)."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], 10.0)[0])
    finally:
        os.close(fd)


def test_task_rewards_on_two_children() -> None:
    with RewardPool(RewardSpec("sort", {"train_rows": 8, "eval_rows": 2}), processes=2) as pool:
        futures = [pool.submit(group("01347", "0", "01347\n")) for _ in range(6)]
        assert [f.result() for f in futures] == [[{"reward": r} for r in (1.0, 0.0, 1.0)]] * 6
        pids = pool.pids
        assert len(set(pids)) == 2
    assert all(map(gone, pids)) and pool.pids == []
    with pytest.raises(RewardError, match="closed"):
        pool.score(group("0"))


def test_imported_function_with_options_and_metrics(module: str) -> None:
    with RewardPool(spec("good", scale=0.5)) as pool:
        assert pool.score(group("abcd", "")) == [{"reward": 2.0, "group": 3.0}, {"reward": 0.0, "group": 3.0}]
        assert pool.score(group("x" * 3_000_000, group_id=4)) == [{"reward": 1.5e6, "group": 4.0}]


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        ("raises", ["sample 1 (completion 'bad')", "raised KeyError: 'no such answer'", "in fails_on"]),
        ("exits", ["(samples 0 to 2)", "raised SystemExit: 4", "in exits"]),
        ("nan", ["sample 1 (completion 'bad')", "expected a finite float32; found nan", "Return one finite"]),
        ("few", ["(samples 0 to 2)", "expected 3 rewards, one per sample; found 1 values"]),
        ("text", ["sample 0 (completion 'ok')", "expected a number; found 'ok' (str)"]),
    ],
)
def test_bad_values_are_told_and_the_child_goes_on(module: str, function: str, parts: list[str]) -> None:
    with RewardPool(spec(function)) as pool:
        pids = pool.pids
        for _ in range(2):
            with pytest.raises(RewardError) as caught:
                pool.score(group("ok", "bad", "ok"))
            text = str(caught.value)
            assert f"reward function user_rewards:{function}, group 3" in text
            assert all(part in text for part in parts), text
            assert "child.py" not in text  # our own frames are no help to the user
        assert pool.pids == pids


def test_a_hanging_function_is_named_killed_and_replaced(module: str) -> None:
    with RewardPool(spec("hangs"), timeout_s=0.2) as pool:
        before = pool.pids
        started = time.monotonic()
        with pytest.raises(RewardError) as caught:
            pool.score(group("ok", "bad"))
        assert 0.4 <= time.monotonic() - started < 20
        text = str(caught.value)
        assert "group 3, sample 1 (completion 'bad')" in text and "in hangs" in text
        assert "no answer for 2 samples within 0.4 s (reward.timeout_s = 0.2 each)" in text
        assert "raise reward.timeout_s" in text
        assert gone(before[0]) and pool.pids == []
        assert pool.score(group("ok", "ok")) == [{"reward": 1.0}] * 2
        assert pool.pids != before


def test_a_hanging_function_takes_along_what_it_started(module: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "waypath.reward")
    with RewardPool(spec("hangs_with_a_child"), timeout_s=3.0) as pool, pytest.raises(RewardError):
        pool.score(group("x"))
    (line,) = [r.getMessage() for r in caplog.records if "started" in r.getMessage()]
    assert gone(int(line.split()[-1]))


def test_a_function_that_kills_its_process(module: str) -> None:
    with RewardPool(spec("dies")) as pool:
        with pytest.raises(RewardError) as caught:
            pool.score(group("x", "y"))
        text = str(caught.value)
        assert "group 3 (samples 0 to 1): its process was killed by SIGKILL" in text
        assert "about to go" in text and "os._exit" in text
        assert pool.score(group("ok")) == [{"reward": 1.0}]
    with RewardPool(spec("leaves")) as pool, pytest.raises(RewardError, match="ended with exit status 7"):
        pool.score(group("x"))


def test_a_child_that_dies_between_groups_is_replaced_silently(module: str) -> None:
    with RewardPool(spec("whoami")) as pool:
        (pid,) = pool.pids
        os.kill(pid, signal.SIGKILL)
        assert gone(pid)
        assert pool.score(group("x")) != [{"reward": float(pid)}]


def test_what_user_code_prints_is_logged(module: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "waypath.reward")
    with RewardPool(spec("talks")) as pool:
        assert pool.score(group("x")) == [{"reward": 2.0}]
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "reward child 0: hello from user code",
        "reward child 0: raw bytes \ufffd",
        "reward child 0: nothing to read",
    ]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("user_rewards:missing", "reward.function = 'user_rewards:missing': .* has no attribute 'missing'"),
        ("user_rewards_broken:x", "failed with ModuleNotFoundError: No module named 'not_a_module'"),
        ("os:system", r"may not import 'os' \(allowed: user_rewards, user_rewards_broken\)"),
        ("user_rewards:__name__", "is a str, not callable"),
    ],
)
def test_functions_that_cannot_be_loaded(module: str, function: str, message: str) -> None:
    pool = RewardPool(RewardSpec("sort", {}, function, {}, [module, f"{module}_broken"]), processes=2)
    with pytest.raises(TaskError, match=message):
        pool.start()
    assert pool.pids == []


def test_close_ends_a_group_that_is_being_scored(module: str) -> None:
    pool = RewardPool(spec("slow"), timeout_s=600.0)
    pool.start()
    (pid,) = pool.pids
    future = pool.submit(group("x"))
    pool.close()
    assert gone(pid) and isinstance(future.exception(), RewardError)


def test_children_end_with_a_killed_parent(module: str, tmp_path: Path) -> None:
    program = (
        "from waypath.workers.rewards.pool import *\n"
        "pool = RewardPool(RewardSpec('sort', {}, 'user_rewards:slow', {}, ['user_rewards']), 2, 600.0)\n"
        "pool.start()\n"
        "pool.submit(RewardGroup(0, '', {}, ['x'], ['stop']))\n"
        "print(*pool.pids, flush=True)\n"
        "pool.score(RewardGroup(1, '', {}, ['x'], ['stop']))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    assert all(map(gone, pids))


def trajectory() -> Bundle:
    return Bundle(
        meta={
            "group_id": 9,
            "prompt_id": "40713",
            "prompt": "40713>",
            "row": {"prompt_id": "40713", "answer": "01347"},
            "completions": ["01347", "4"],
            "finish_reasons": ["stop", "length"],
            "step": 1,
        }
    )


@pytest.fixture
def service(module: str) -> Iterator[Any]:
    from waypath.workers.rewards.service import RewardService

    context = SimpleNamespace(worker="reward-0", allow_import=("user_rewards",))
    made = RewardService(cast(Any, context))
    yield made
    made.close()


def call(context: Any = None, *bundles: Bundle, **options: Any) -> Any:
    from waypath.workers.service import Call

    return Call("e1", "score_0", options, [list(bundles)], context, time.monotonic() + 60)


def test_service_scores_a_trajectory_bundle(service: Any) -> None:
    import asyncio

    opened = call(config={"task": {"name": "sort"}, "reward": {"timeout_s": 5.0, "processes": 1}})
    service.open(opened)
    assert opened.result == {"function": "the reward of task 'sort'", "processes": 1}
    scored = call(None, trajectory())
    bundle = asyncio.run(service.score(scored))
    assert bundle.meta == {"group_id": 9, "metrics": {}}
    np.testing.assert_array_equal(bundle.arrays["reward"], np.array([1, 0], np.float32), strict=True)
    assert [span.name for span in scored.spans] == ["reward"] and scored.result == {"reward_sum": 1.0}

    service.open(call(config={"task": {"name": "sort"}, "reward": {"function": "user_rewards:clashes"}}))
    shown = call(None, trajectory(), offset=1, samples=2)
    bundle = asyncio.run(service.score(shown))
    (sample,) = shown.result["samples"]
    assert sample == {
        "group_id": 9,
        "sample_index": 0,
        "prompt_id": "40713",
        "prompt": "40713>",
        "completion": "01347",
        "finish_reason": "stop",
        "reward": 5.0,
        "metrics": {"group": 9.0, "step": -1.0},
    }
    assert bundle.meta["metrics"] == {"group": [9.0, 9.0], "step": [-1.0, -1.0]} and bundle.arrays[
        "reward"
    ].tolist() == [5.0, 1.0]


def test_service_never_loads_jax(module: str) -> None:
    program = (
        "import sys, waypath.workers.rewards.service, waypath.workers.rewards.child\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('jax', 'jaxlib', 'flax')])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_no_thread_is_left(module: str) -> None:
    with RewardPool(spec("good"), processes=2) as pool:
        pool.score(group("x"))
    left = [t.name for t in threading.enumerate() if t.name.startswith(("reward", "log of"))]
    assert left == []
