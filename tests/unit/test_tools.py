"""The small tools: the architecture picture and the stubs are what is committed."""

import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from waypath.tools import architecture, stubs

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", sorted(architecture.PICTURES))
def test_committed_picture_is_the_drawn_one(name: str) -> None:
    drawn = architecture.PICTURES[name]()
    xml.fromstring(drawn)
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == drawn


def test_stubs_differ_when_stale_missing_or_orphaned(tmp_path: Path) -> None:
    fresh, committed = tmp_path / "fresh", tmp_path / "committed"
    for folder, files in (
        (fresh, {"a_pb2.py": "1", "b_pb2.py": "1", "c_pb2.pyi": "1"}),
        (committed, {"a_pb2.py": "1", "b_pb2.py": "2", "old_pb2_grpc.py": "1", "other.py": "1"}),
    ):
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    names = ["a_pb2.py", "b_pb2.py", "c_pb2.pyi"]
    assert stubs.differences(fresh, committed, names) == ["b_pb2.py", "c_pb2.pyi", "old_pb2_grpc.py"]


def test_committed_stubs_are_fresh(capsys: pytest.CaptureFixture[str]) -> None:
    assert stubs.main(["--check"]) == 0, capsys.readouterr().err
