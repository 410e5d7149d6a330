"""A run on one shared cluster of real processes: what it writes, what it costs the controller, and that it repeats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import waypath
from tests.cluster import Cluster, comparable, read_metrics, running, small
from tests.relay import Relay
from waypath.controller.runs.metrics import TRAINER_KEYS
from waypath.proto.config import RunConfig

CONTROLLER_RSS_LIMIT_BYTES = 300_000_000
CONTROLLER_STEP_LIMIT_BYTES = 1_000_000


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return small(tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="module")
def cluster(config: RunConfig) -> Iterator[Cluster]:
    with running(config) as up:
        yield up


@pytest.fixture(scope="module")
def first(cluster: Cluster) -> waypath.RunResult:
    return cluster.result(cluster.run())


def test_a_run_ends_with_everything_written(cluster: Cluster, first: waypath.RunResult) -> None:
    assert (first.status, first.steps, first.policy_version, first.cause) == ("done", 3, 3, None)
    directory = cluster.run_dir / first.run_id
    lines = read_metrics(cluster.run_dir, first.run_id)
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines:
        assert set(TRAINER_KEYS) <= line.keys()
        assert line["publish_bytes"] == line["publish_bytes_lower_bound"] > 0
        assert 2 * line["egress_bytes"] == line["publish_bytes"]  # two replicas; the trainer sends one copy
        assert line["logprob_diff_max"] < 1e-4
        assert (line["staleness_max"], line["policy_version"]) == (0, line["step"] + 1)
        assert line["trained_rows"] > 0 and line["grad_norm"] > 0
        assert line["rollout_s"] > 0 and line["train_s"] > 0 and line["step_s"] > 0
    samples = [json.loads(text) for text in (directory / "samples.jsonl").read_text().splitlines()]
    assert {sample["step"] for sample in samples} == {0, 1, 2}
    assert {"prompt", "completion", "reward", "group_id", "sample_index"} <= samples[0].keys()
    events = json.loads((directory / "trace.json").read_text())["traceEvents"]
    assert {"rollout", "reward", "train", "publish"} <= {event["name"] for event in events}
    assert json.loads((directory / "result.json").read_text())["params_digest"] == first.params_digest
    assert first.export_dir is not None and (Path(first.export_dir) / "model.safetensors").exists()
    assert list((directory / "tensorboard").iterdir())


def test_the_processes_are_the_ones_promised_and_the_controller_is_light(
    cluster: Cluster, first: waypath.RunResult
) -> None:
    names = [worker["name"] for worker in cluster.client.status()["workers"]]
    assert names == ["inference-0", "inference-1", "reward-0", "trainer-0", "trainer-1"]
    controller = psutil.Process(cluster.pids()["controller"])
    loaded = {Path(part.path).name for part in controller.memory_maps()}
    assert not [name for name in loaded if "jax" in name or "xla" in name or "torch" in name]
    assert controller.memory_info().rss < CONTROLLER_RSS_LIMIT_BYTES


def test_the_same_seed_gives_the_same_run_and_another_seed_does_not(
    cluster: Cluster, config: RunConfig, first: waypath.RunResult
) -> None:
    again = cluster.result(cluster.run())
    assert again.params_digest == first.params_digest
    assert (again.eval_before, again.eval_after) == (first.eval_before, first.eval_after)
    assert comparable(read_metrics(cluster.run_dir, again.run_id)) == comparable(
        read_metrics(cluster.run_dir, first.run_id)
    )
    other = cluster.result(cluster.run(_seeded(config, 1)))
    assert other.params_digest != first.params_digest


def _seeded(config: RunConfig, seed: int) -> RunConfig:
    return waypath.load_config(config.to_json(), {"seed": seed})


def test_steps_that_overlap_stay_within_the_bound_and_repeat(cluster: Cluster, config: RunConfig) -> None:
    overlapping = waypath.load_config(
        config.to_json(), {"algorithm.max_staleness": 1, "steps": 5, "trainer.checkpoint_every": 3}
    )
    runs = [cluster.result(cluster.run(overlapping)) for _ in range(2)]
    metrics = [read_metrics(cluster.run_dir, run.run_id) for run in runs]
    assert [line["staleness_max"] for line in metrics[0]] == [0, 1, 1, 0, 1]
    assert comparable(metrics[0]) == comparable(metrics[1])
    assert runs[0].params_digest == runs[1].params_digest


def test_a_client_reattaches_by_id_and_reads_back(cluster: Cluster, first: waypath.RunResult) -> None:
    with waypath.connect(cluster.address, cluster.token) as client:
        run = client.run(first.run_id)
        assert [step.policy_version for step in run.steps()] == [1, 2, 3]
        assert run.result() == first
        assert {sample["step"] for sample in run.samples(step=1)} == {1}
        assert first.run_id in [item["run_id"] for item in client.runs()]
        with pytest.raises(waypath.WaypathError, match="no run 'nothing'"):
            client.run("nothing").result()


def test_one_inference_worker_gives_the_same_parameters_and_little_passes_the_controller(
    tmp_path: Path, cluster: Cluster, first: waypath.RunResult
) -> None:
    relays: list[Relay] = []

    def before_controller(address: str) -> str:
        relays.append(Relay(address))
        return relays[-1].address

    config = small(tmp_path, cluster__inference_processes=1, inference__replicas=1)
    with running(config, via=before_controller) as alone:
        before = relays[0].bytes
        run = alone.run()
        result = alone.result(run)
        passed = relays[0].bytes - before
        relays[0].close()
    assert result.params_digest == first.params_digest
    assert comparable(read_metrics(alone.run_dir, result.run_id), "publish_", "egress_") == comparable(
        read_metrics(cluster.run_dir, first.run_id), "publish_", "egress_"
    )
    assert passed / result.steps < CONTROLLER_STEP_LIMIT_BYTES
