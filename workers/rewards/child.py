"""The reward child: a process that loads one reward function and calls it; faults of user code stay here.

Owns the child's end of the frames. Must not know the run, gRPC or jax. Started by `process.py` as `python -m
waypath.workers.rewards.child READ_FD WRITE_FD`; stdin is empty, stdout and stderr are the user's and go to
the worker's log.

The main thread calls user code. A second thread reads the frames, so that the child can say where it is while
user code runs, and ends with its parent even then: at end of file it kills its process group.

Requests and replies::

    {"load": {task, options, function, reward_options, allow_import}}
        -> {"loaded": name} | {"refused": {message, remedy}}
    {"score": {prompt, row, group_id, completions, finish_reasons}}
        -> {"rewards": [{...}]} | {"fault": {problem | raised, found, sample_index, stack?}}
    {"where": true}
        -> {"where": {sample_index, stack}}
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

from waypath.proto.errors import ProtocolError, TaskError, UserError
from waypath.workers.imports import import_attribute
from waypath.workers.rewards.frames import FrameParser, pack
from waypath.workers.rewards.values import BadValueError, check_rewards
from waypath.workers.tasks.base import Sample, load_task

__all__ = ["main"]

Rewarder = Callable[..., Any]


class _Child:
    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._write_lock = threading.Lock()
        self._requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._main_thread = threading.get_ident()
        self._function: Rewarder | None = None
        self._options: dict[str, Any] = {}

    def run(self) -> None:
        threading.Thread(target=self._read, name="frames", daemon=True).start()
        while True:
            request = self._requests.get()
            if "load" in request:
                self._send(self._load(**request["load"]))
            elif "score" in request:
                self._send(self._score(**request["score"]))
            else:
                raise ProtocolError(f"reward child: unknown request {sorted(request)}")

    def _read(self) -> None:
        parser = FrameParser()
        while data := os.read(self._read_fd, 1 << 16):
            for request in parser.feed(data):
                if "where" in request:
                    frame = sys._current_frames().get(self._main_thread)
                    self._send({"where": _where(_outward(frame))})
                else:
                    self._requests.put(request)
        if os.getpgrp() == os.getpid():  # ours alone: take along what user code started
            os.killpg(0, signal.SIGKILL)
        os._exit(0)

    def _send(self, message: dict[str, Any]) -> None:
        data = pack(message)
        with self._write_lock:
            while data:
                data = data[os.write(self._write_fd, data) :]

    def _load(
        self,
        task: str,
        options: dict[str, Any],
        function: str | None,
        reward_options: dict[str, Any],
        allow_import: Sequence[str],
    ) -> dict[str, Any]:
        try:
            if function is None:
                self._function = load_task(task, options, allow_import).reward
            else:
                self._function = import_attribute(function, allow_import, "reward.function")
            if not callable(self._function):
                raise TaskError(f"reward.function = {function!r} is a {type(self._function).__name__}, not callable")
        except UserError as error:
            return {"refused": {"message": error.message, "remedy": error.remedy}}
        except Exception as error:  # user code may raise anything while it is imported or built
            problem = f"loading the reward of task {task!r} raised {type(error).__name__}: {error}"
            return {"refused": {"message": f"{problem}\n{traceback.format_exc()[-8000:]}", "remedy": ""}}
        self._options = reward_options
        return {"loaded": function or f"{task} reward"}

    def _score(
        self,
        prompt: str,
        row: dict[str, Any],
        group_id: int,
        completions: list[str],
        finish_reasons: list[str],
    ) -> dict[str, Any]:
        if self._function is None:
            raise ProtocolError("reward child: score before load")
        samples = [
            Sample(prompt, text, row, group_id, index, reason)
            for index, (text, reason) in enumerate(zip(completions, finish_reasons, strict=True))
        ]
        try:
            values = self._function(samples, **self._options)
            return {"rewards": check_rewards(values, len(samples))}
        except BadValueError as bad:
            return {"fault": {"problem": bad.problem, "found": bad.found, "sample_index": bad.sample_index}}
        except BaseException as error:  # SystemExit and KeyboardInterrupt of user code are its faults too
            last = error.__traceback__.tb_next if error.__traceback__ else None
            frames = [frame for frame, _ in traceback.walk_tb(last)]
            return {
                "fault": {
                    "raised": type(error).__name__,
                    "found": str(error)[:500],
                    "sample_index": _where(reversed(frames))["sample_index"],
                    "stack": "".join(traceback.format_exception(type(error), error, last))[-8000:],
                }
            }


def _outward(frame: FrameType | None) -> list[FrameType]:
    """The frames of user code, innermost first: those inside `_score`."""
    frames: list[FrameType] = []
    while frame is not None and frame.f_code is not _Child._score.__code__:
        frames.append(frame)
        frame = frame.f_back
    return frames if frame is not None else []


def _where(frames: Iterable[FrameType]) -> dict[str, Any]:
    """The stack as text, and the sample at work: the innermost local variable that is a Sample."""
    frames = list(frames)
    sample_index = None
    for frame in frames:
        found = [value for value in dict(frame.f_locals).values() if isinstance(value, Sample)]
        if found:
            sample_index = found[-1].sample_index
            break
    entries = [traceback.FrameSummary(f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in frames]
    stack = "".join(traceback.StackSummary.from_list(entries[::-1]).format())
    return {"sample_index": sample_index, "stack": stack[-8000:]}


def main(argv: Sequence[str]) -> None:
    """Serve frames on the two given file descriptors until the parent closes its end."""
    read_fd, write_fd = int(argv[0]), int(argv[1])
    for fd in (read_fd, write_fd):
        os.set_inheritable(fd, False)  # not for what user code starts
    faulthandler.enable()
    with contextlib.suppress(BrokenPipeError):  # the parent is gone
        _Child(read_fd, write_fd).run()


if __name__ == "__main__":
    main(sys.argv[1:])
