"""The supervisor with stand-in commands: what a death means, the restart budget, and that nothing is left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster import eventually
from waypath.proto.errors import WorkerLostError
from waypath.tools.supervisor import (
    Child,
    Policy,
    ProcessSpec,
    RestartBudget,
    Supervisor,
    Unit,
    how_it_ended,
    log_tail,
    marked,
)

SLEEPER = "import sys, time; print('up', *sys.argv[1:], flush=True); time.sleep(600)"


@pytest.fixture
def events() -> list[str]:
    return []


@pytest.fixture
def supervisor(tmp_path: Path, events: list[str]) -> Iterator[Supervisor]:
    budget = RestartBudget(limit=2, window_s=60.0, first_s=0.01, longest_s=0.05)
    supervisor = Supervisor(f"test-{tmp_path.name}-{os.getpid()}", budget=budget, on_event=events.append, stopped_s=1.0)
    yield supervisor
    supervisor.kill()
    assert marked(supervisor.marker) == []


def spec(name: str, log: Path, code: str = SLEEPER) -> ProcessSpec:
    return ProcessSpec(name, "role", "world", (sys.executable, "-I", "-S", "-c", code, name), log / f"{name}.log")


def unit(name: str, policy: Policy, log: Path, *, members: int = 1, code: str = SLEEPER) -> Unit:
    names = [name] if members == 1 else [f"{name}-{index}" for index in range(members)]

    def launch(spawn: Callable[[ProcessSpec], Child]) -> None:
        for member in names:
            spawn(spec(member, log, code))

    return Unit(name, policy, launch)


def pids(supervisor: Supervisor) -> dict[str, int]:
    return {child.spec.name: child.pid for child in supervisor.children()}


def test_budget_limits_restarts_in_a_window() -> None:
    budget = RestartBudget(limit=3, window_s=10.0, first_s=1.0, longest_s=3.0)
    assert [budget.delay_s("a", now) for now in (0.0, 1.0, 2.0, 3.0)] == [1.0, 2.0, 3.0, None]
    assert budget.delay_s("b", 3.0) == 1.0  # units don't share a budget
    assert budget.delay_s("a", 10.5) == 3.0  # the first restart has left the window
    assert budget.delay_s("a", 30.0) == 1.0


def test_budget_of_zero_never_restarts() -> None:
    assert RestartBudget(limit=0).delay_s("a", 0.0) is None


@pytest.mark.parametrize(
    ("code", "text"),
    [(3, "exited with code 3"), (-9, "was killed by SIGKILL"), (-250, "was killed by signal 250")],
)
def test_how_it_ended(code: int, text: str) -> None:
    assert how_it_ended(code) == text


def test_log_tail_keeps_the_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("\n".join(f"line {n}" for n in range(5000)) + "\n\n")
    assert log_tail(log, 2) == "\n    | line 4998\n    | line 4999"
    assert log_tail(tmp_path / "none.log") == ""


def test_dead_worker_is_restarted_and_told_of(supervisor: Supervisor, tmp_path: Path, events: list[str]) -> None:
    supervisor.add(unit("a", Policy.RESTART, tmp_path))
    supervisor.add(unit("b", Policy.RESTART, tmp_path))
    before = pids(supervisor)
    os.kill(before["a"], signal.SIGKILL)
    eventually(lambda: pids(supervisor).get("a") not in (None, before["a"]), "a restarts")
    assert pids(supervisor)["b"] == before["b"]
    assert [death.returncode for death in supervisor.deaths] == [-signal.SIGKILL]
    assert "a (pid" in events[0] and "SIGKILL" in events[0] and "restarts" in events[0]
    assert supervisor.failure is None


def test_world_dies_and_restarts_as_one(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.add(unit("w", Policy.RESTART, tmp_path, members=3))
    before = pids(supervisor)
    os.kill(before["w-1"], signal.SIGKILL)
    eventually(
        lambda: len(pids(supervisor)) == 3 and not set(pids(supervisor).values()) & set(before.values()), "all new"
    )
    assert len(supervisor.deaths) == 1


def test_of_members_that_died_together_the_killed_one_is_named(supervisor: Supervisor, tmp_path: Path) -> None:
    leaves = "raise SystemExit(70)"
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"

    def launch(spawn: Callable[[ProcessSpec], Child]) -> None:
        for child in [spawn(spec("first", tmp_path, leaves)), spawn(spec("second", tmp_path, killed))]:
            child.process.wait()

    supervisor.add(Unit("w", Policy.END, launch))
    eventually(lambda: supervisor.deaths, "the death is noticed")
    assert [death.name for death in supervisor.deaths] == ["second"]


def test_ended_unit_stays_down_and_is_on_record(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.add(unit("w", Policy.END, tmp_path, members=2))
    supervisor.add(unit("other", Policy.RESTART, tmp_path))
    os.kill(pids(supervisor)["w-0"], signal.SIGKILL)
    eventually(lambda: list(pids(supervisor)) == ["other"], "the world is down, the other is up")
    assert supervisor.deaths[0].name == "w-0"
    assert supervisor.failure is None


def test_fatal_death_ends_everything_with_the_log(supervisor: Supervisor, tmp_path: Path, events: list[str]) -> None:
    supervisor.add(unit("other", Policy.RESTART, tmp_path))
    supervisor.add(unit("c", Policy.FATAL, tmp_path, code="import sys; print('disk full'); sys.exit(7)"))
    eventually(lambda: supervisor.failure is not None and not supervisor.children(), "everything ended")
    assert supervisor.failure is not None
    assert "c (pid" in supervisor.failure and "code 7" in supervisor.failure
    assert supervisor.failure.endswith("| disk full")
    with pytest.raises(WorkerLostError, match="cannot start late"):
        supervisor.add(unit("late", Policy.RESTART, tmp_path))


def test_what_the_end_of_a_cluster_kills_is_no_death_of_its_own(
    supervisor: Supervisor, tmp_path: Path, events: list[str]
) -> None:
    supervisor.add(unit("c", Policy.FATAL, tmp_path))
    supervisor.add(unit("w", Policy.END, tmp_path))
    supervisor.add(unit("other", Policy.RESTART, tmp_path))
    os.kill(pids(supervisor)["c"], signal.SIGKILL)
    eventually(lambda: not supervisor._thread.is_alive(), "the cluster ended")
    assert [death.name for death in supervisor.deaths] == ["c"]
    assert len(events) == 1 and events[0].startswith("cluster failed: c (pid")


def test_crash_loop_ends_the_cluster(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.add(unit("a", Policy.RESTART, tmp_path, code="raise SystemExit(3)"))
    eventually(lambda: supervisor.failure is not None, "the budget is used up")
    assert supervisor.failure is not None and "a was restarted 2 times within 60 s" in supervisor.failure
    assert len(supervisor.deaths) == 3


def test_refused_process_is_not_tried_again(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.add(unit("a", Policy.RESTART, tmp_path, code="raise SystemExit(2)"))
    eventually(lambda: supervisor.failure is not None, "a refusal ends it")
    assert len(supervisor.deaths) == 1


def test_launch_that_raises_leaves_none_of_its_unit(supervisor: Supervisor, tmp_path: Path) -> None:
    def launch(spawn: Callable[[ProcessSpec], Child]) -> None:
        spawn(spec("a", tmp_path))
        raise WorkerLostError("the sidecar did not come up")

    with pytest.raises(WorkerLostError, match="sidecar"):
        supervisor.add(Unit("w", Policy.RESTART, launch))
    assert marked(supervisor.marker) == []


def test_stop_is_kind_then_firm(supervisor: Supervisor, tmp_path: Path) -> None:
    polite = "import signal, sys, time; signal.signal(15, lambda *a: (print('bye', flush=True), sys.exit(0))); "
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); "
    tail = "print('ready', flush=True); time.sleep(600)"
    supervisor.add(unit("polite", Policy.RESTART, tmp_path, code=polite + tail))
    supervisor.add(unit("stubborn", Policy.RESTART, tmp_path, code=stubborn + tail))
    for name in ("polite", "stubborn"):
        eventually(lambda name=name: "ready" in (tmp_path / f"{name}.log").read_text(), f"{name} is ready")
    started = time.monotonic()
    supervisor.stop(grace_s=0.5)
    assert time.monotonic() - started < 10.0
    assert "bye" in (tmp_path / "polite.log").read_text()
    assert supervisor.deaths == [] and supervisor.children() == []


def test_sweep_finds_a_grandchild_in_a_session_of_its_own(supervisor: Supervisor, tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-I', '-S', '-c', "
        "'import time; time.sleep(600)'], start_new_session=True); print(child.pid, flush=True); time.sleep(600)"
    )
    supervisor.add(unit("a", Policy.RESTART, tmp_path, code=code))
    log = tmp_path / "a.log"
    eventually(lambda: log.exists() and log.read_text().endswith("\n"), "the grandchild is up")
    grandchild = int(log.read_text())
    assert psutil.pid_exists(grandchild)
    supervisor.kill()
    eventually(lambda: not psutil.pid_exists(grandchild), "the grandchild is gone")


def test_logs_move_with_open_files(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.add(unit("a", Policy.RESTART, tmp_path))
    target = tmp_path / "moved.log"
    supervisor.relocate(lambda log: log.rename(target))
    eventually(lambda: "up a" in target.read_text(), "the child writes to the moved file")
    assert supervisor.children()[0].spec.log == target


@pytest.mark.parametrize("sort", [signal.SIGKILL, signal.SIGTERM])
def test_children_die_with_their_launcher(tmp_path: Path, sort: signal.Signals) -> None:
    """kill -9 of the launcher leaves no child (Linux)."""
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from waypath.tools.supervisor import *\n"
        "s = Supervisor(sys.argv[1])\n"
        f"spec = ProcessSpec('a', 'r', 'w', (sys.executable, '-I', '-S', '-c', {SLEEPER!r}), Path(sys.argv[2]))\n"
        "s.add(Unit('a', Policy.RESTART, lambda spawn: (spawn(spec), None)[1]))\n"
        "print(s.children()[0].pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    marker = f"orphan-{tmp_path.name}-{os.getpid()}"
    argv = [sys.executable, "-c", program, marker, str(tmp_path / "a.log")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        child = int(launcher.stdout.readline())
        assert psutil.pid_exists(child)
        launcher.send_signal(sort)
    eventually(lambda: marked(marker) == [], "the child died with its launcher")


def test_a_process_that_stands_stopped_is_killed_and_started_anew(
    supervisor: Supervisor, tmp_path: Path, events: list[str]
) -> None:
    supervisor.add(unit("one", Policy.RESTART, tmp_path))
    old = pids(supervisor)["one"]
    os.kill(old, signal.SIGSTOP)
    eventually(lambda: pids(supervisor).get("one", old) != old, "a new process")
    assert events[0] == f"one (pid {old}) has stood stopped for 1 s: killed"
    assert supervisor.deaths[0].returncode == -signal.SIGKILL
