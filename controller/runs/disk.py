"""Reading and writing the files of a run: in one piece, or line by line, with errors that name the file.

Called by whoever owns a file; must not know what is in it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from waypath.proto.errors import LocalError

BATCH_LINES = 1000


@contextlib.contextmanager
def writing(path: Path, remedy: str = "free space, then resume the run") -> Iterator[None]:
    """Turns an OSError into a LocalError that names `path`: a full disk alone says only "No space left on device"."""
    try:
        yield
    except OSError as error:
        raise LocalError(f"{path} could not be written: {error.strerror or error}", remedy=remedy) from error


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is there with all of `text` or, after a crash too, as it was before. Raises LocalError."""
    part = path.with_name(path.name + ".part")
    with writing(path):
        try:
            with part.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def dump_line(value: Mapping[str, Any]) -> str:
    """Returns one JSON line without the newline, keys in the order given."""
    return json.dumps(dict(value), ensure_ascii=False)


class LineReader:
    """Reads a JSON-lines file that grows: each call of `read` goes on where the last one ended.

    A line without its newline is still being written, or was torn by a crash: it is left for later.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self, limit: int = BATCH_LINES) -> list[dict[str, Any]]:
        """Returns at most `limit` objects that were not read before; none where there is no file (yet).

        Raises LocalError where it cannot be read or a line is not JSON.
        """
        found: list[dict[str, Any]] = []
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = 0  # the file was replaced by a shorter one
                file.seek(self._offset)
                while len(found) < limit and (line := file.readline()).endswith(b"\n"):
                    found.append(self._parse(line))
                    self._offset += len(line)
        except FileNotFoundError:
            return found
        except OSError as error:
            raise LocalError(f"{self._path} could not be read: {error.strerror or error}") from error
        return found

    def _parse(self, line: bytes) -> dict[str, Any]:
        try:
            value = json.loads(line)
        except ValueError as error:
            raise LocalError(f"{self._path}: the line at byte {self._offset} is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise LocalError(f"{self._path}: the line at byte {self._offset} is not an object: {line[:80]!r}")
        return value


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSON-lines file; a torn last line (the writer was killed) is left out."""
    reader = LineReader(path)
    while lines := reader.read():
        yield from lines


def last_line(path: Path, reach_bytes: int = 1 << 20) -> dict[str, Any] | None:
    """Returns the last whole object of a JSON-lines file, looking at its last `reach_bytes` only."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - reach_bytes))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return None
    for line in reversed(lines):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    return None
