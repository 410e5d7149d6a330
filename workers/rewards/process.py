"""The parent's side of one reward child: start it, ask it with a deadline, notice its death, end it.

Owns the process, its pipes and its log lines. Must not know what is asked. Called by the reward pool, one
thread at a time.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from waypath.proto.errors import ProtocolError
from waypath.workers.rewards.frames import FrameParser, pack

__all__ = ["ChildDied", "ChildHung", "ChildProcess"]

_LOG = logging.getLogger("waypath.reward")
_LOOK_S = 0.25  # how often a waiting parent looks whether the child still lives
_KEEP_LINES = 20


class ChildDied(Exception):
    """The child ended: `how` says by which signal or with which status, `log` is its last output."""

    def __init__(self, how: str, log: str) -> None:
        super().__init__(how)
        self.how = how
        self.log = log


class ChildHung(Exception):
    """The child did not answer before the deadline."""


class ChildProcess:
    """One running child. The constructor starts it; `kill` ends it and whatever it started."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lines: collections.deque[str] = collections.deque(maxlen=_KEEP_LINES)
        self._parser = FrameParser()
        self._answers: collections.deque[dict[str, Any]] = collections.deque()
        child_read, self._write_fd = os.pipe()
        self._read_fd, child_write = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "waypath.workers.rewards.child", str(child_read), str(child_write)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(child_read, child_write),
                start_new_session=True,
                env=_environment(),
            )
        except OSError:
            os.close(self._write_fd)
            os.close(self._read_fd)
            raise
        finally:
            os.close(child_read)
            os.close(child_write)
        os.set_blocking(self._write_fd, False)
        self._open = True
        self._log_thread = threading.Thread(target=self._drain, name=f"log of {name}", daemon=True)
        self._log_thread.start()

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it can still be asked."""
        return self._open and self._process.poll() is None

    def ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a message and wait for one answer.

        Raises ChildDied, ChildHung, or ProtocolError for a broken frame.
        """
        deadline = time.monotonic() + timeout_s
        data = memoryview(pack(message))
        while data:
            self._wait(self._write_fd, select.POLLOUT, deadline)
            try:
                data = data[os.write(self._write_fd, data) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise self._died() from None
        while not self._answers:
            self._wait(self._read_fd, select.POLLIN, deadline)
            received = os.read(self._read_fd, 1 << 16)
            if not received:
                raise self._died()
            self._answers.extend(self._parser.feed(received))
        return self._answers.popleft()

    def signal_end(self) -> None:
        """Kill the child and its process group; any thread may. Whoever waits for it gets ChildDied."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it ended in between
                os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """End the child and its process group, and close what belongs to it. Repeating it does nothing."""
        if not self._open:
            return
        self._open = False
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the whole group is gone already
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._write_fd)
        os.close(self._read_fd)
        self._log_thread.join(1.0)

    def _wait(self, fd: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(fd, event)
        while True:
            remaining = deadline - time.monotonic()
            if poll.poll(1000 * max(0.0, min(remaining, _LOOK_S))):
                return
            if self._process.poll() is not None:  # dead, though another process may hold its end of the pipe
                raise self._died()
            if remaining <= 0:
                raise ChildHung

    def _died(self) -> ChildDied:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.poll()
        self.kill()
        if code is None:
            how = "closed its pipe to the pool"
        elif code < 0:
            how = f"was killed by {_signal_name(-code)}"
        else:
            how = f"ended with exit status {code}"
        return ChildDied(how, "\n".join(self._lines))

    def _drain(self) -> None:
        stream = self._process.stdout
        if stream is None:
            raise ProtocolError("reward child without an output pipe")
        with stream:
            while line := stream.readline(4096):
                text = line.decode(errors="replace").rstrip()
                self._lines.append(text)
                _LOG.info("%s: %s", self._name, text)


def _environment() -> dict[str, str]:
    """The parent's environment, with its import path, so that the child finds the same user modules."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    environment["PYTHONUNBUFFERED"] = "1"
    environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
