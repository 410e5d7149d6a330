"""Bad input to real processes: a clear message, a failing exit code, nothing left running."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import waypath
from tests.cluster import ROOT, Cluster, Command, running, small
from waypath.proto.config import RunConfig

ALLOWED = {"reward__timeout_s": 1.0, "trainer__checkpoint_every": 0}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    config = small(tmp_path_factory.mktemp("bad"), **ALLOWED)
    with running(config) as up:
        yield up


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("raises", ["raises", "ZeroDivisionError"]),
        pytest.param("nan", ["nan", "sample"], marks=pytest.mark.slow),
        pytest.param("too_few", ["too_few", "3", "4"], marks=pytest.mark.slow),
        pytest.param("hangs", ["hangs", "timeout_s"], marks=pytest.mark.slow),
        ("kills", ["kills", "SIGKILL"]),
        pytest.param("not_a_number", ["not_a_number"], marks=pytest.mark.slow),
    ],
)
def test_a_bad_reward_function_ends_the_run_with_its_name_and_what_it_did(
    cluster: Cluster, function: str, words: list[str]
) -> None:
    assert isinstance(cluster.local.config, RunConfig)
    config: RunConfig = waypath.load_config(
        cluster.local.config.to_json(), {"reward.function": f"tests.bad_rewards:{function}", "evaluation.prompts": 0}
    )
    result = cluster.result(cluster.run(config))
    assert result.status == "failed"
    assert result.cause is not None
    for word in words:
        assert word in result.cause


def test_the_cluster_still_works_after_the_bad_ones(cluster: Cluster) -> None:
    result = cluster.result(cluster.run())
    assert result.status == "done"


def test_a_second_worker_with_a_taken_name_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    done = _worker(cluster.address, cluster.local.token_file, "reward-0")
    assert done.returncode != 0
    assert "reward-0" in done.stderr and "alive" in done.stderr


def test_a_worker_with_a_wrong_token_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("wrong")
    done = _worker(cluster.address, token, "reward-9")
    assert done.returncode != 0
    assert "token" in done.stderr
    with pytest.raises(waypath.WaypathError, match="token"):
        waypath.connect(cluster.address, "wrong")


def _worker(address: str, token: Path, name: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "waypath.workers.main", "--controller", address, "--token-file", str(token)]
    return subprocess.run(
        [*command, "--name", name, "--role", "reward"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def _refused(arguments: list[str], tmp_path: Path) -> str:
    with Command(arguments, tmp_path) as command:
        code = command.wait(60)
        assert code == 2, command.output()
        assert not command.children()
        return command.output()


def _file(tmp_path: Path, **overrides: object) -> str:
    path = tmp_path / "config.toml"
    path.write_text(small(tmp_path, **overrides).to_toml())
    return str(path)


def test_a_typo_is_named_before_anything_starts(tmp_path: Path) -> None:
    output = _refused(["run", _file(tmp_path), "--set", "optimizer.learning_rte=1"], tmp_path)
    assert "optimizer.learning_rte" in output and "learning_rate" in output


def test_a_missing_or_truncated_model_is_named_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    raw = small(tmp_path).to_json()
    raw["model"] = {"path": str(tmp_path / "model")}
    path.write_text(waypath.load_config(raw).to_toml())
    assert "does not exist" in _refused(["run", str(path)], tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    (model / "model.safetensors").write_bytes((1 << 20).to_bytes(8, "little") + b"{")
    assert "model.safetensors" in _refused(["run", str(path)], tmp_path)


def test_a_model_over_the_memory_limit_is_refused_before_loading(tmp_path: Path) -> None:
    output = _refused(["run", _file(tmp_path), "--set", "inference.memory_limit_bytes=100000"], tmp_path)
    assert "inference.memory_limit_bytes" in output


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        output = _refused(["up", _file(tmp_path), "--listen", address], tmp_path)
    assert address in output and "in use" in output
