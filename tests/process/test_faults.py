"""Real deaths in the middle of a run: the run goes on, or stops with its cause and is resumed to the same parameters."""

from __future__ import annotations

import os
import re
import resource
import signal
from pathlib import Path

import psutil
import pytest

import waypath
from tests.cluster import Command, comparable, eventually, read_metrics, read_result, running, small
from waypath.proto.config import RunConfig

STEPS = 6


def _config(tmp_path: Path) -> RunConfig:
    return small(tmp_path, steps=STEPS, trainer__checkpoint_every=2)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[waypath.RunResult, list[dict[str, object]]]:
    """The result and metrics of the run that nobody disturbs."""
    config = _config(tmp_path_factory.mktemp("undisturbed"))
    with running(config) as cluster:
        result = cluster.result(cluster.run())
        assert result.status == "done"
        return result, comparable(read_metrics(cluster.run_dir, result.run_id), "publish_", "egress_")


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("inference-1", "reward-0"), id="both"),
        pytest.param(("inference-0",), id="inference", marks=pytest.mark.slow),
        pytest.param(("reward-0",), id="reward", marks=pytest.mark.slow),
    ],
)
def test_kill_9_of_inference_and_reward_workers_does_not_change_the_result(
    tmp_path: Path, names: tuple[str, ...], undisturbed: tuple[waypath.RunResult, list[dict[str, object]]]
) -> None:
    with running(_config(tmp_path)) as cluster:
        run = cluster.run()
        cluster.wait_step(run, 1)
        killed = {name: cluster.kill(name) for name in names}
        result = cluster.result(run)
        for name, pid in killed.items():
            cluster.wait_restarted(name, pid)
        metrics = comparable(read_metrics(cluster.run_dir, run.id), "publish_", "egress_")
    assert (result.status, result.cause) == ("done", None)
    assert result.params_digest == undisturbed[0].params_digest
    assert metrics == undisturbed[1]
    assert all(line["trained_rows"] for line in metrics)


@pytest.mark.slow
def test_the_only_inference_worker_is_killed_and_the_run_waits_for_its_successor(
    tmp_path: Path, undisturbed: tuple[waypath.RunResult, list[dict[str, object]]]
) -> None:
    config = small(
        tmp_path,
        steps=STEPS,
        trainer__checkpoint_every=2,
        cluster__inference_processes=1,
        inference__replicas=1,
    )
    with running(config) as cluster:
        run = cluster.run()
        cluster.wait_step(run, 1)
        cluster.kill("inference-0")
        result = cluster.result(run)
    assert result.params_digest == undisturbed[0].params_digest


def test_kill_9_of_a_trainer_stops_the_run_with_its_cause_and_it_resumes_to_the_same_parameters(
    tmp_path: Path, undisturbed: tuple[waypath.RunResult, list[dict[str, object]]]
) -> None:
    config = _config(tmp_path)
    with running(config) as cluster:
        run = cluster.run()
        cluster.wait_step(run, 3)
        cluster.kill("trainer-1")
        failed = cluster.result(run)
    assert failed.status == "failed"
    assert failed.cause is not None and "trainer-1" in failed.cause
    with Command(["run", "--resume", run.id, "--run-dir", str(tmp_path / "runs")], tmp_path) as command:
        assert command.wait() == 0, command.output()
    result = read_result(tmp_path / "runs", run.id)
    assert result["params_digest"] == undisturbed[0].params_digest
    assert comparable(read_metrics(tmp_path / "runs", run.id), "publish_", "egress_") == undisturbed[1]


@pytest.mark.parametrize(
    "evaluation", [pytest.param(2, id="final"), pytest.param(1, id="initial", marks=pytest.mark.slow)]
)
def test_kill_9_of_a_trainer_that_waits_for_an_evaluation_stops_the_run_at_once_and_it_resumes(
    tmp_path: Path, evaluation: int, undisturbed: tuple[waypath.RunResult, list[dict[str, object]]]
) -> None:
    path = tmp_path / "config.toml"
    path.write_text(_config(tmp_path).to_toml())
    slow = "reward.function=tests.rewards:slow"  # the same rewards, with time to kill
    with Command(["run", str(path), "--plain", "--set", slow], tmp_path) as command:
        eventually(lambda: command.output().count("evaluating") == evaluation, f"evaluation {evaluation}")
        os.kill(command.children()["trainer-1"], signal.SIGKILL)
        assert command.wait(60) == 1, command.output()
        output = command.output()
    run_id = next(iter((tmp_path / "runs").glob("*/journal"))).parent.name
    failed = read_result(tmp_path / "runs", run_id)
    assert failed["status"] == "failed", output
    assert "trainer-" in failed["cause"] and "was lost" in failed["cause"]
    assert re.search(r"cause: worker trainer-\d was lost .*\n  trainer-1 \(pid \d+\) was killed by SIGKILL", output), (
        output
    )
    assert f"waypath run --resume {run_id}" in output
    with Command(["run", "--resume", run_id, "--run-dir", str(tmp_path / "runs")], tmp_path) as command:
        assert command.wait() == 0, command.output()
    assert read_result(tmp_path / "runs", run_id)["params_digest"] == undisturbed[0].params_digest


@pytest.mark.slow
def test_ctrl_c_stops_with_a_checkpoint_and_resume_ends_with_the_same_parameters(
    tmp_path: Path, undisturbed: tuple[waypath.RunResult, list[dict[str, object]]]
) -> None:
    path = tmp_path / "config.toml"
    path.write_text(_config(tmp_path).to_toml())
    slow = "reward.function=tests.rewards:slow"  # the same rewards, with time to press Ctrl-C
    with Command(["run", str(path), "--plain", "--set", slow], tmp_path) as command:
        command.wait_output("step   1/")
        command.signal(signal.SIGINT)
        assert command.wait() == 130, command.output()
        assert "waypath run --resume" in command.output()
    run_id = next(iter((tmp_path / "runs").glob("*/journal"))).parent.name
    stopped = read_result(tmp_path / "runs", run_id)
    assert stopped["status"] == "cancelled"
    assert stopped["steps"] < STEPS
    with Command(["run", "--resume", run_id, "--run-dir", str(tmp_path / "runs")], tmp_path) as command:
        assert command.wait() == 0, command.output()
    assert read_result(tmp_path / "runs", run_id)["params_digest"] == undisturbed[0].params_digest


def test_a_full_disk_at_checkpoint_time_stops_the_run_with_its_cause(tmp_path: Path) -> None:
    with running(_config(tmp_path)) as cluster:
        for name in ("trainer-0", "trainer-1"):
            psutil.Process(cluster.pids()[name]).rlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        result = cluster.result(cluster.run())
    assert result.status == "failed"
    assert result.cause is not None and "checkpoint" in result.cause.lower()
    assert "File too large" in result.cause or "EFBIG" in result.cause


def test_a_full_disk_under_the_controller_ends_the_run_with_its_cause_and_it_resumes(
    tmp_path: Path, undisturbed: tuple[waypath.RunResult, list[dict[str, object]]]
) -> None:
    with running(_config(tmp_path)) as cluster:
        run = cluster.run()
        cluster.wait_step(run, 1)
        controller = psutil.Process(cluster.pids()["controller"])
        soft, hard = controller.rlimit(resource.RLIMIT_FSIZE)
        controller.rlimit(resource.RLIMIT_FSIZE, (100, hard))
        failed = cluster.result(run)
        (listed,) = cluster.client.runs()
        controller.rlimit(resource.RLIMIT_FSIZE, (soft, hard))
        result = cluster.result(cluster.run(resume=run.id))
        metrics = comparable(read_metrics(cluster.run_dir, run.id), "publish_", "egress_")
    assert failed.status == listed["status"] == "failed"
    assert failed.cause is not None and "File too large" in failed.cause
    assert "result.json could not be written" in failed.cause
    assert (result.status, result.params_digest) == ("done", undisturbed[0].params_digest)
    assert metrics == undisturbed[1]


def test_a_live_run_cannot_be_resumed_elsewhere_and_a_stopped_controller_leaves_it_interrupted(tmp_path: Path) -> None:
    config = small(tmp_path, steps=100_000, evaluation__prompts=0)
    with running(config) as cluster:
        run = cluster.run()
        cluster.wait_step(run, 1)
        with Command(["run", "--resume", run.id, "--run-dir", str(tmp_path / "runs")], tmp_path) as command:
            assert command.wait() == 2, command.output()
            assert f"run {run.id} is running under another controller" in command.output()
            assert "reward-0" not in command.output()  # no process was started for it
        done = len(read_metrics(cluster.run_dir, run.id))
        cluster.wait_step(run, done + 1)
        assert not (cluster.run_dir / run.id / "result.json").exists()
        cluster.kill("controller", signal.SIGTERM)
        path = cluster.run_dir / run.id / "result.json"
        eventually(path.exists, "result.json")
        result = read_result(cluster.run_dir, run.id)
        steps = [line["step"] for line in read_metrics(cluster.run_dir, run.id)]
    assert steps == list(range(result["steps"])) and len(steps) > done
    assert result["status"] == "interrupted"
    assert f"stopped (SIGTERM) after {result['steps']} steps; go on with: waypath run --resume" in result["cause"]
