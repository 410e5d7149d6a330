"""The launcher with a real cluster: supervision by real signals, and that nothing is left in any way of ending."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster import Command, assert_nothing_left, eventually, read_metrics, shared_memory, small
from waypath.tools import cli
from waypath.tools.launch import find_cluster, read_cluster_file
from waypath.tools.supervisor import marked

PROCESSES = {
    "waypath.controller.main",
    "waypath.tools.coordinator",
    "trainer-0",
    "trainer-1",
    "inference-0",
    "inference-1",
    "reward-0",
}


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.toml"
    path.write_text(small(tmp_path).to_toml())
    return str(path)


@pytest.fixture
def up(job: str, tmp_path: Path) -> Iterator[Command]:
    """`waypath up` on a free port, with all workers registered."""
    with Command(["up", job, "--listen", "127.0.0.1:0"], tmp_path) as command:
        command.wait_output("start a run:")
        yield command


def new_pids(up: Command, names: set[str], before: dict[str, int]) -> bool:
    now = up.children()
    return all(name in now and now[name] != before[name] for name in names)


def registered_pids(run_dir: Path) -> dict[str, int]:
    with find_cluster(run_dir) as client:
        return {worker["name"]: worker["pid"] for worker in client.status()["workers"]}


def test_up_supervises_until_ctrl_c(up: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "runs"
    before = up.children()
    assert set(before) == PROCESSES
    (cluster_id,) = up.cluster_ids()
    found = read_cluster_file(run_dir / "cluster.json")
    assert found is not None and found["pid"] == up.process.pid
    assert Path(found["token_file"]).stat().st_mode & 0o777 == 0o600

    assert cli.main(["status", "--run-dir", str(run_dir)]) == cli.DONE
    shown = capsys.readouterr().out
    assert all(name in shown for name in PROCESSES if "." not in name)

    # An inference worker and the reward worker come back alone; a trainer takes its world and its sidecar with it.
    for victim, unit in (
        ("inference-0", {"inference-0"}),
        ("reward-0", {"reward-0"}),
        ("trainer-1", {"trainer-0", "trainer-1", "waypath.tools.coordinator"}),
    ):
        os.kill(before[victim], signal.SIGKILL)
        eventually(lambda unit=unit: new_pids(up, unit, before), f"{unit} restart\n{up.output()}")
    others = PROCESSES - {"inference-0", "reward-0", "trainer-0", "trainer-1", "waypath.tools.coordinator"}
    assert {name: up.children()[name] for name in others} == {name: before[name] for name in others}
    workers = {name: pid for name, pid in up.children().items() if "." not in name}
    eventually(lambda: registered_pids(run_dir) == workers, "all registered again")
    assert up.output().count("was killed by SIGKILL") == 3

    up.signal(signal.SIGINT)
    assert up.wait() == cli.INTERRUPTED
    assert "nothing is left running" in up.output()
    assert_nothing_left(cluster_id, found["address"], run_dir, shared_memory())


def test_death_of_the_controller_ends_the_cluster_with_its_cause(up: Command, tmp_path: Path) -> None:
    pid = up.children()["waypath.controller.main"]
    (cluster_id,) = up.cluster_ids()
    os.kill(pid, signal.SIGKILL)
    assert up.wait(60.0) == cli.FAILED
    assert f"the cluster ended: controller (pid {pid}) was killed by SIGKILL" in up.output()
    assert_nothing_left(cluster_id, "", tmp_path / "runs", shared_memory())


@pytest.mark.slow
def test_death_of_a_trainer_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(small(tmp_path, steps=100_000, evaluation__prompts=0).to_toml())
    with Command(["run", str(job)], tmp_path) as run:
        run.wait_output("step   1/")
        (cluster_id,) = run.cluster_ids()
        victim = run.children()["trainer-1"]
        os.kill(victim, signal.SIGKILL)
        assert run.wait(60.0) == cli.FAILED
        assert f"trainer-1 (pid {victim}) was killed by SIGKILL" in run.output()
        assert "go on with: waypath run --resume" in run.output()
    assert_nothing_left(cluster_id, "", tmp_path / "runs", shared_memory())
    assert not list((tmp_path / "runs").glob("cluster-*"))  # the logs are in the run's folder


def test_ctrl_c_stops_a_run_with_a_checkpoint_and_it_resumes(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(small(tmp_path, steps=100_000, evaluation__prompts=0).to_toml())
    with Command(["run", str(job)], tmp_path) as run:
        run.wait_output("step   1/")
        (cluster_id,) = run.cluster_ids()
        run.signal(signal.SIGINT)
        assert run.wait() == cli.INTERRUPTED
        assert "cancelled" in run.output() and "go on with: waypath run --resume" in run.output()
    assert_nothing_left(cluster_id, "", tmp_path / "runs", shared_memory())
    (directory,) = (path.parent for path in (tmp_path / "runs").glob("*/result.json"))
    done = len(read_metrics(tmp_path / "runs", directory.name))
    with Command(["run", str(job), "--resume", directory.name], tmp_path) as run:
        run.wait_output(f"step {done + 1:>3}/")
        run.signal(signal.SIGINT)
        assert run.wait() == cli.INTERRUPTED
    steps = [line["step"] for line in read_metrics(tmp_path / "runs", directory.name)]
    assert steps == list(range(len(steps))) and len(steps) > done


@pytest.mark.slow
def test_kill_of_the_launcher_leaves_no_process(up: Command) -> None:
    (cluster_id,) = up.cluster_ids()
    children = [psutil.Process(pid) for pid in up.children().values()]
    up.signal(signal.SIGKILL)
    up.wait(10.0)
    gone, alive = psutil.wait_procs(children, timeout=30.0)
    assert len(gone) == len(PROCESSES) and not alive
    eventually(lambda: not marked(cluster_id), "reward children end with their parent", 30.0)


@pytest.mark.slow
def test_second_ctrl_c_kills(up: Command, tmp_path: Path) -> None:
    (cluster_id,) = up.cluster_ids()
    os.kill(up.children()["waypath.controller.main"], signal.SIGSTOP)  # it would answer no cancel
    up.signal(signal.SIGINT)
    up.signal(signal.SIGTERM)  # counts the same; two equal signals could merge
    assert up.wait(30.0) == cli.INTERRUPTED
    assert_nothing_left(cluster_id, "", tmp_path / "runs", shared_memory())
