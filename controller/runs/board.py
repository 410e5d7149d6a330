"""TensorBoard event files, written at once: an error reaches the caller.

tensorboardX's own SummaryWriter writes on a thread behind a short queue. When that thread meets a full disk it ends unseen, and the
next scalars wait for room in the queue for ever, which would hold the controller's loop. Its records are used without it.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped,unused-ignore]
from tensorboardX.proto.summary_pb2 import Summary  # type: ignore[import-untyped,unused-ignore]
from tensorboardX.record_writer import RecordWriter  # type: ignore[import-untyped,unused-ignore]

from waypath.controller.runs.disk import writing


class Board:
    """One event file in `directory`. With events of an earlier part there, those of `start_step` and later are hidden."""

    def __init__(self, directory: Path, start_step: int = 0) -> None:
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
            resumed = any(directory.iterdir())
            name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(2)}"
            self._path = directory / name
            self._records = RecordWriter(str(self._path))
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if resumed:
            start = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=start_step, session_log=start))
        self._flush()

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Adds the values of one step; they are on disk when this returns. Raises LocalError."""
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._write(Event(wall_time=time.time(), step=step, summary=summary))
        self._flush()

    def _write(self, event: Event) -> None:
        with writing(self._path):
            self._records.write(event.SerializeToString())

    def _flush(self) -> None:
        with writing(self._path):
            self._records.flush()

    def close(self) -> None:
        """Closes the file."""
        with writing(self._path):
            self._records.close()
