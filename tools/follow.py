"""Follows one run to its end: reads its updates, feeds the view, and turns Ctrl-C into a clean stop.

Owns the loop, the threads that wait for the network, and the meaning of the first and second Ctrl-C. Must not
know how anything is drawn nor how processes are kept. Called by the CLI's `run` and `watch`.
"""

import queue
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from waypath.controller.client.client import Client, Run, RunResult, StepRecord
from waypath.proto import config as configs
from waypath.proto.config import RunConfig
from waypath.proto.errors import NotFoundError, WaypathError
from waypath.tools.progress import View
from waypath.tools.report import PhaseClock

LOST_DEADLINE_S = 30.0  # for the controller's own verdict after a trainer's death
VERDICT_FIRST_S = 1.0  # for the supervisor to see a death that the controller has judged already
BROKEN_DEADLINE_S = 2.0  # for the supervisor to notice why a connection broke
STATUS_EVERY_S = 1.0
FALLBACK_STOP_S = 2000.0  # what `stop_limit_s` says of the default deadlines, about


class Interrupts:
    """Counts Ctrl-C (and SIGTERM, SIGHUP) while it is entered; the second one raises KeyboardInterrupt."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        for number in self.SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self) -> bool:
        """True after the first Ctrl-C."""
        return self.count > 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count == 2:
            raise KeyboardInterrupt
        # a third one changes nothing: everything is being killed


class Feed:
    """Reads a run's updates (and, if asked, the cluster's status) on threads of its own, into one queue."""

    def __init__(self, client: Client, run: Run, from_step: int, with_status: bool) -> None:
        self.queue: queue.SimpleQueue[StepRecord | RunResult | str | dict[str, Any] | WaypathError] = (
            queue.SimpleQueue()
        )
        self._closed = threading.Event()
        self._client, self._run, self._from_step = client, run, from_step
        threading.Thread(target=self._read, name="updates", daemon=True).start()
        if with_status:
            threading.Thread(target=self._ask, name="status", daemon=True).start()

    def close(self) -> None:
        """Stop asking; the threads end with their connection."""
        self._closed.set()

    def _read(self) -> None:
        try:
            for update in self._run.updates(self._from_step):
                self.queue.put(update)
        except WaypathError as error:
            if not self._closed.is_set():
                self.queue.put(error)
        except ValueError as error:  # grpc's word for a channel that was closed meanwhile
            if not self._closed.is_set():
                self.queue.put(WaypathError(f"the connection to the controller closed: {error}"))

    def _ask(self) -> None:
        while not self._closed.wait(STATUS_EVERY_S):
            try:
                self.queue.put(self._client.status())
            except WaypathError:
                continue  # it may answer again; what is wrong for good, the updates' thread reports
            except ValueError:  # grpc's word for a channel that was closed meanwhile
                return


def follow(
    client: Client,
    run: Run,
    view: View,
    interrupts: Interrupts,
    *,
    from_step: int = 0,
    stop_on_interrupt: bool = True,
    failure: Callable[[], str | None] = lambda: None,
    deaths: Callable[[], list[str]] = list,
    phases: PhaseClock | None = None,
) -> RunResult | None:
    """Follow `run` to its end; returns its result, or None if an interrupt detached from it.

    `stop_on_interrupt`: the first Ctrl-C cancels the run with a checkpoint and waits, else it detaches.
    `failure` says why the cluster under the run is gone, `deaths` which trainers died; either ends the run. `phases` is
    told what the run does when.
    """
    clock = phases or PhaseClock()
    clock.enter("waiting for workers", time.time_ns())
    feed = Feed(client, run, from_step, view.wants_status)
    started = time.monotonic()
    end: tuple[float, str] | None = None  # when to give up, and with which cause
    asked = lost = False
    broken: WaypathError | None = None
    steps = 0
    try:
        while True:
            if cause := failure():
                return _failed(run, steps, started, f"the cluster ended: {cause}")
            if not lost and (dead := deaths()):
                lost, end = True, (time.monotonic() + LOST_DEADLINE_S, dead[0])
                view.event(dead[0])
            if interrupts() and not asked:
                if not stop_on_interrupt:
                    return None
                asked = True
                _cancel(run, view)
                within_s, ending = _stop_terms(client, run, view)
                end = end or (time.monotonic() + within_s, f"no stop within {within_s:.0f} s")
                view.event(f"stopping after the step in progress, {ending} (Ctrl-C again kills)")
            if end is not None and time.monotonic() > end[0]:
                if broken is not None and not lost:
                    raise broken
                return _failed(run, steps, started, end[1])
            try:
                item = feed.queue.get(timeout=0.1)
            except queue.Empty:
                view.tick()
                continue
            if isinstance(item, RunResult):
                return _explained(item, deaths)
            if isinstance(item, WaypathError):
                broken = item
                end = (time.monotonic() + BROKEN_DEADLINE_S, end[1] if end else str(item))
            elif isinstance(item, StepRecord):
                steps = int(item.metrics["step"]) + 1
                view.step(item.metrics)
            elif isinstance(item, str):
                clock.enter(item, time.time_ns())
                view.phase(item)
            else:
                view.status(item)
    finally:
        feed.close()


def stop_limit_s(config: RunConfig) -> float:
    """Seconds that a run may take to stop after its step in progress, each part within its own deadline."""
    limits = config.deadlines
    step_s = limits.generate_s + limits.score_s + limits.train_s + config.cluster.rejoin_timeout_s
    checkpoint_s = 2 * limits.checkpoint_s  # the one under way, and the last
    return step_s * (1 + config.algorithm.max_staleness) + 2 * limits.publish_s + checkpoint_s


def recorded_config(client: Client, run_id: str) -> RunConfig:
    """The configuration in a run's folder. Raises WaypathError where it cannot be read."""
    directory = next((run["directory"] for run in client.runs() if run["run_id"] == run_id), None)
    if not directory:
        raise NotFoundError(f"the controller knows no folder of run {run_id}")
    return configs.load(Path(directory) / "config.toml")


def _stop_terms(client: Client, run: Run, view: View) -> tuple[float, str]:
    """How long to wait for the run's stop, and how it will end."""
    try:
        config = recorded_config(client, run.id)
    except WaypathError as error:
        view.event(f"could not read the run's configuration, so the default deadlines hold: {error}")
        return FALLBACK_STOP_S, "with a checkpoint"
    ending = "its last checkpoint stays the newest" if config.algorithm.max_staleness else "with a checkpoint"
    return stop_limit_s(config), ending


def _cancel(run: Run, view: View) -> None:
    try:
        run.cancel(checkpoint=True)
    except WaypathError as error:  # it may have ended in this moment; the updates will tell
        view.event(f"could not ask the run to stop: {error}")


def _failed(run: Run, steps: int, started: float, cause: str) -> RunResult:
    seconds = time.monotonic() - started
    return RunResult(run.id, "failed", steps, steps, None, None, None, None, seconds, cause)


def _explained(result: RunResult, deaths: Callable[[], list[str]]) -> RunResult:
    """Adds which process died to a failed run's cause: the controller only knows that a worker is gone."""
    if result.status != "failed":
        return result
    deadline = time.monotonic() + VERDICT_FIRST_S
    while not (dead := deaths()):
        if time.monotonic() > deadline:
            return result
        time.sleep(0.05)
    return replace(result, cause=f"{result.cause or 'a trainer is gone'}\n  {dead[0]}")
