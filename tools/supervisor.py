"""Keeps a cluster's processes: starts them, notices deaths, restarts or ends what belongs together, leaves
nothing.

Owns: child processes, their log files, the restart budget. Must not know: configuration, gRPC, what a role
does. Called by: `launch.py`, which says what to start and what a death means; tests, with small stand-in
commands.

A *unit* is the set of processes that live and die together (a JAX world and its coordination sidecar; or one
process). When a member dies the rest of its unit is killed with SIGKILL, at once: a member of a JAX world
that waits inside a collective with a dead peer never returns, and `jax.distributed` traps SIGTERM. What
follows is the unit's policy (a process that stands stopped for `stopped_s` is killed, and has died then): RESTART (after a back-off, at most so often a minute, else the cluster fails),
END (the unit stays down and the death is on record) or FATAL (the cluster ends). Units are started in order
and stopped in the reverse order.

Every child leads a session of its own, so a terminal's Ctrl-C reaches the launcher only, and a kill reaches
the child's own children too. On Linux `guard.py` asks the kernel to kill the child when the thread that
started it ends; therefore restarts run on the supervisor's thread, which outlives them. A marker in the
environment finds what is left.
"""

import contextlib
import enum
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from waypath.proto.errors import WorkerLostError

MARKER = "WAYPATH_CLUSTER"
GUARD = Path(__file__).resolve().parent / "guard.py"
POLL_S = 0.05
STOPPED_POLL_S = 0.5
LOG_TAIL_LINES = 12
PEER_GONE = 70  # exit code of a world's member that left because of another one
REFUSED = 2  # exit code of a process that will never start with these arguments: it isn't tried again


class Policy(enum.Enum):
    """What the death of a unit's member means for the cluster."""

    RESTART = "restart"
    END = "end"
    FATAL = "fatal"


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start: `argv` as for exec, `env` over the launcher's, `log` for stdout and stderr."""

    name: str
    role: str
    world: str
    argv: tuple[str, ...]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Unit:
    """Processes that live and die together. `launch(spawn)` starts them, at first and at each restart."""

    name: str
    policy: Policy
    launch: Callable[[Callable[[ProcessSpec], "Child"]], None]


@dataclass(frozen=True)
class Death:
    """A process that ended unasked. `returncode` is negative for a signal, as in subprocess."""

    name: str
    unit: str
    pid: int
    returncode: int
    log: Path

    def describe(self) -> str:
        """One line: who, how, where the log is."""
        return f"{self.name} (pid {self.pid}) {how_it_ended(self.returncode)}; its log: {self.log}"


def how_it_ended(returncode: int) -> str:
    """A return code in words."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


class RestartBudget:
    """How often a unit may restart: `limit` times within `window_s`, with a doubling back-off. It has no clock.

    >>> budget = RestartBudget(limit=2, window_s=60.0, first_s=0.5, longest_s=10.0)
    >>> [budget.delay_s("a", now) for now in (0.0, 1.0, 2.0, 70.0)]
    [0.5, 1.0, None, 0.5]
    """

    def __init__(
        self, *, limit: int = 5, window_s: float = 60.0, first_s: float = 0.25, longest_s: float = 8.0
    ) -> None:
        self.limit, self.window_s, self.first_s, self.longest_s = limit, window_s, first_s, longest_s
        self._restarts: dict[str, deque[float]] = {}

    def delay_s(self, unit: str, now: float) -> float | None:
        """Seconds to wait before this restart of `unit`, or None when it has used up its budget."""
        past = self._restarts.setdefault(unit, deque())
        while past and past[0] <= now - self.window_s:
            past.popleft()
        if len(past) >= self.limit:
            return None
        past.append(now)
        return float(min(self.first_s * 2 ** (len(past) - 1), self.longest_s))


class Child:
    """A started process."""

    def __init__(self, spec: ProcessSpec, unit: str, marker: str) -> None:
        self.spec, self.unit = spec, unit
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), *spec.argv]
        with spec.log.open("ab") as log:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **spec.env, MARKER: marker},
                start_new_session=True,
            )
        self.pid = self.process.pid

    def signal(self, number: int) -> None:
        """Send a signal to the child's process group (the child and its own children)."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """SIGKILL the group and reap the child."""
        self.signal(signal.SIGKILL)
        self.process.wait()


class Supervisor:
    """Keeps units alive until `stop`. `on_event` gets one line about each death, restart and failure."""

    def __init__(
        self,
        marker: str,
        *,
        budget: RestartBudget | None = None,
        on_event: Callable[[str], None] = lambda line: None,
        stopped_s: float = 45.0,
    ) -> None:
        self._stopped_s = stopped_s
        self._stopped_since: dict[int, float] = {}  # pid → when it was first seen stopped
        self.marker = marker
        self.deaths: list[Death] = []
        self.failure: str | None = None  # why the whole cluster ended, once it has
        self._budget = budget or RestartBudget()
        self._on_event = on_event
        self._units: dict[str, Unit] = {}
        self._children: dict[str, list[Child]] = {}
        self._due: dict[str, float] = {}  # unit → time of its restart
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)

    def add(self, unit: Unit) -> None:
        """Start a unit; watching begins with the first. If `launch` raises, none of it is left running."""
        with self._lock:
            if self._stopping.is_set() or self.failure is not None:
                raise WorkerLostError(f"cannot start {unit.name}: {self.failure or 'the cluster is stopping'}")
            self._units[unit.name] = unit
            self._launch(unit)
            if self._thread.ident is None:
                self._thread.start()

    @property
    def stopping(self) -> bool:
        """True once `stop` or `kill` was called: a launch that waits for something should give up."""
        return self._stopping.is_set()

    def pause(self, seconds: float) -> None:
        """Wait a moment, or less when the cluster stops."""
        self._stopping.wait(seconds)

    def children(self) -> list[Child]:
        """The processes that are up, in start order."""
        with self._lock:
            return [c for children in self._children.values() for c in children if c.process.poll() is None]

    def relocate(self, move: Callable[[Path], Path]) -> None:
        """Move log files: `move` renames one and returns its new path (open files follow a rename)."""
        with self._lock:
            for children in self._children.values():
                for child in children:
                    child.spec = _with_log(child.spec, move(child.spec.log))

    def fail(self, cause: str) -> None:
        """End the cluster with a cause: everything is killed. The first cause stays."""
        with self._lock:
            if self.failure is None and not self._stopping.is_set():
                self.failure = cause
                self._on_event(f"cluster failed: {cause}")
            self._due.clear()
            self._kill_all()

    def stop(self, grace_s: float = 5.0) -> None:
        """Stop everything: SIGTERM (first unit last), SIGKILL after `grace_s`, then sweep. Idempotent."""
        self._stopping.set()
        with self._lock:
            self._due.clear()
            units = list(self._children.values())
        # Workers first and all at once; the first unit (the controller) last, so that it hears them leave.
        for batch in ([c for unit in units[1:] for c in unit], [c for unit in units[:1] for c in unit]):
            alive = [c for c in batch if c.process.poll() is None]
            for child in alive:
                child.signal(signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            for child in alive:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """SIGKILL everything and sweep what carries the marker."""
        self._stopping.set()
        with self._lock:
            self._kill_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        sweep(self.marker)

    def _kill_all(self) -> None:
        children = [c for unit in self._children.values() for c in unit]
        for child in children:
            child.signal(signal.SIGKILL)
        for child in children:
            child.kill()

    def _launch(self, unit: Unit) -> None:
        started: list[Child] = []

        def spawn(spec: ProcessSpec) -> Child:
            child = Child(spec, unit.name, self.marker)
            started.append(child)
            return child

        try:
            unit.launch(spawn)
        except BaseException:
            for child in started:
                child.kill()
            raise
        self._children[unit.name] = started

    def _watch(self) -> None:
        look_s = 0.0
        while not self._stopping.wait(POLL_S):
            with self._lock:
                if time.monotonic() >= look_s:
                    look_s = time.monotonic() + STOPPED_POLL_S
                    self._kill_stopped()
                if self._stopping.is_set() or self.failure is not None:
                    return
                for unit in list(self._units.values()):
                    self._check(unit)
                    if self.failure is not None:
                        return  # what is dead now was killed by `fail`: it isn't a death of its own

    def _kill_stopped(self) -> None:
        """A stopped process answers nobody, and leaves for nobody."""
        now = time.monotonic()
        stopped = {child.pid: child for child in self.children() if _is_stopped(child.pid)}
        self._stopped_since = {pid: self._stopped_since.get(pid, now) for pid in stopped}
        for pid, since in self._stopped_since.items():
            if now - since >= self._stopped_s:
                self._on_event(
                    f"{stopped[pid].spec.name} (pid {pid}) has stood stopped for {self._stopped_s:g} s: killed"
                )
                stopped[pid].signal(signal.SIGKILL)

    def _check(self, unit: Unit) -> None:
        due = self._due.get(unit.name)
        if due is not None:
            if time.monotonic() >= due:
                del self._due[unit.name]
                self._restart(unit)
            return
        children = self._children.get(unit.name, [])
        dead = min((c for c in children if c.process.poll() is not None), key=_culprit, default=None)
        if dead is None:
            return
        death = Death(dead.spec.name, unit.name, dead.pid, dead.process.returncode, dead.spec.log)
        self.deaths.append(death)
        for child in children:
            child.kill()
        self._children[unit.name] = []
        self._decide(unit, death)

    def _decide(self, unit: Unit, death: Death) -> None:
        if unit.policy is Policy.END:
            self._on_event(f"{death.describe()}; {unit.name} stays down")
            return
        cause = death.describe() + log_tail(death.log)
        if unit.policy is Policy.FATAL or death.returncode == REFUSED:
            self.fail(cause)
            return
        delay = self._budget.delay_s(unit.name, time.monotonic())
        if delay is None:
            limit, window = self._budget.limit, self._budget.window_s
            self.fail(f"{unit.name} was restarted {limit} times within {window:.0f} s and died again: {cause}")
            return
        self._on_event(f"{death.describe()}; {unit.name} restarts in {delay:g} s")
        self._due[unit.name] = time.monotonic() + delay

    def _restart(self, unit: Unit) -> None:
        try:
            self._launch(unit)
        except Exception as error:  # whatever a launch raises, the cluster must end with it, not this thread
            self.fail(f"{unit.name} could not be restarted: {error}")


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def _culprit(child: Child) -> tuple[bool, bool]:
    """Sorts members that died together: killed ones first, those last that left because a peer had gone."""
    return child.process.returncode >= 0, child.process.returncode == PEER_GONE


def log_tail(log: Path, lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a log, indented, with a leading newline; empty when there are none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 8192))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    tail = [line for line in text.splitlines() if line.strip()][-lines:]
    return "".join(f"\n    | {line}" for line in tail)


def marked(marker: str) -> list[psutil.Process]:
    """This user's processes whose environment carries the cluster's marker, zombies aside."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.pid != os.getpid() and process.environ().get(MARKER) == marker
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def sweep(marker: str, deadline_s: float = 5.0) -> list[int]:
    """Kill what a cluster left behind (a child's child that changed its group); returns the pids."""
    left = marked(marker)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=deadline_s)
    return [process.pid for process in left]


def _with_log(spec: ProcessSpec, log: Path) -> ProcessSpec:
    return ProcessSpec(spec.name, spec.role, spec.world, spec.argv, log, spec.env)
