"""The journal: what was appended comes back; a torn tail is left out; damage elsewhere names its offset."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waypath.controller import journal as j
from waypath.controller.journal import MAGIC, Journal, encode, read_journal, scan
from waypath.proto.errors import JournalError

ENTRIES = [{"type": "step", "step": k, "note": "é" * k} for k in range(5)]


def image(entries: list[dict[str, Any]]) -> bytes:
    return MAGIC + b"".join(encode(entry) for entry in entries)


def test_append_then_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "run.journal"
    journal = Journal(path)
    for entry in ENTRIES[:3]:
        journal.append(entry)
    assert read_journal(path) == ENTRIES[:3]
    journal.close()
    journal.close()
    again = Journal(path)
    assert list(again.entries) == ENTRIES[:3]
    for entry in ENTRIES[3:]:
        again.append(entry)
    again.close()
    assert read_journal(path) == ENTRIES
    assert path.read_bytes() == image(ENTRIES)
    with pytest.raises(JournalError, match="is closed"):
        again.append({})


def test_every_append_is_synced_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sizes = tmp_path / "j", []
    monkeypatch.setattr(os, "fsync", lambda fd: sizes.append(os.fstat(fd).st_size))
    journal = Journal(path)
    sizes.clear()
    journal.append(ENTRIES[1])
    assert sizes == [path.stat().st_size]
    journal.close()


def test_a_torn_tail_is_cut_off_and_writing_goes_on(tmp_path: Path) -> None:
    whole = image(ENTRIES)
    for end in range(len(image(ENTRIES[:4])), len(whole)):
        path = tmp_path / str(end)
        path.write_bytes(whole[:end])
        assert read_journal(path) == ENTRIES[:4]
        journal = Journal(path)
        journal.append({"type": "resumed"})
        journal.close()
        assert read_journal(path) == [*ENTRIES[:4], {"type": "resumed"}]


@given(st.integers(0, len(image(ENTRIES))))
def test_every_prefix_is_a_journal(end: int) -> None:
    found = scan(image(ENTRIES)[:end])
    assert list(found.entries) == ENTRIES[: len(found.entries)]
    assert found.end + found.torn_bytes == end


@given(st.integers(0, len(image(ENTRIES[:4])) - 1), st.integers(1, 255))
def test_a_changed_byte_before_the_last_record_is_an_error_with_an_offset(position: int, flip: int) -> None:
    data = bytearray(image(ENTRIES))
    data[position] ^= flip
    with pytest.raises(JournalError) as caught:
        scan(bytes(data), "run.journal")
    starts = [len(image(ENTRIES[:k])) for k in range(5)]
    offset = max((start for start in starts if start <= position), default=None)
    expected = "not a journal" if offset is None else f"at offset {offset} of"
    assert expected in str(caught.value) and "run.journal" in str(caught.value)


@given(st.integers(len(image(ENTRIES[:4])), len(image(ENTRIES)) - 1))
def test_zeros_where_the_last_record_was_going_to_be_are_a_torn_tail(start: int) -> None:
    data = image(ENTRIES)
    zeroed = data[:start] + bytes(len(data) - start)
    if start >= len(image(ENTRIES[:4])) + j.HEADER.size or start == len(image(ENTRIES[:4])):
        assert list(scan(zeroed).entries) == ENTRIES[:4]


@given(st.binary(max_size=200))
def test_any_bytes_are_entries_or_an_error(data: bytes) -> None:
    for candidate in (data, MAGIC + data):
        try:
            scan(candidate)
        except JournalError as error:
            assert "journal" in str(error)


def test_another_process_cannot_append_at_the_same_time(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    with pytest.raises(JournalError, match="in use by another process"):
        Journal(tmp_path / "j")
    journal.close()
    Journal(tmp_path / "j").close()


def test_a_failed_append_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j"
    journal = Journal(path)
    journal.append(ENTRIES[0])
    real = os.pwrite

    def full_disk(fd: int, data: bytes, offset: int) -> int:
        if len(data) > 4:
            return real(fd, data[:4], offset)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full_disk)
        with pytest.raises(JournalError, match="No space left"):
            journal.append({"x": "y" * 9})
    assert path.read_bytes() == image(ENTRIES[:1])
    journal.append(ENTRIES[1])
    journal.close()
    assert read_journal(path) == ENTRIES[:2]


def test_what_cannot_be_journaled(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="not JSON"):
        encode({"x": object()})
    with pytest.raises(JournalError, match="at most"):
        encode({"x": "y" * j.MAX_RECORD_BYTES})
    with pytest.raises(JournalError, match="cannot read"):
        read_journal(tmp_path / "absent")
    (tmp_path / "file").write_text("x")
    with pytest.raises(JournalError, match="cannot open"):
        Journal(tmp_path / "file" / "j")
    with pytest.raises(JournalError, match="not a journal"):
        Journal(tmp_path / "file")
