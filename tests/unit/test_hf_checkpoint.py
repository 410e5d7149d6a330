"""Headers of model directories: what is reported, and every way in which a directory can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from waypath.proto.errors import ModelError
from waypath.proto.hf_checkpoint import INDEX_FILE, inspect


def make_model(path: Path) -> Path:
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    save_file(
        {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(4, np.float16)},
        str(path / "model.safetensors"),
    )
    return path


def write_raw(path: Path, header: Any, data_bytes: int) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(data_bytes))


def test_inspect_reports_tensors_without_reading_them(tmp_path: Path) -> None:
    info = inspect(make_model(tmp_path))
    assert info.config["architectures"] == ["LlamaForCausalLM"]
    assert (info.param_count, info.param_bytes) == (10, 32)
    tensor = info.tensors["a"]
    assert (tensor.dtype, tensor.shape) == ("F32", (2, 3))
    assert tensor.file.read_bytes()[tensor.start : tensor.end] == np.arange(6, dtype=np.float32).tobytes()


def test_inspect_joins_indexed_files(tmp_path: Path) -> None:
    make_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "one.safetensors")
    save_file({"c": np.ones(3, np.float32)}, str(tmp_path / "two.safetensors"))
    weight_map = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    index = tmp_path / INDEX_FILE
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert set(inspect(tmp_path).tensors) == {"a", "b", "c"}
    index.write_text(json.dumps({"weight_map": weight_map | {"d": "two.safetensors"}}))
    with pytest.raises(ModelError, match="in no file: d"):
        inspect(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    with pytest.raises(ModelError, match=r"holds tensor 'b', which .* places elsewhere"):
        inspect(tmp_path)
    index.write_text(json.dumps({"weight_map": weight_map | {"c": "three.safetensors"}}))
    with pytest.raises(ModelError, match=r"three\.safetensors is missing"):
        inspect(tmp_path)
    index.write_text(json.dumps({"metadata": {}}))
    with pytest.raises(ModelError, match="'weight_map' is missing"):
        inspect(tmp_path)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "..", "x.bin", "a\\b.safetensors", 3])
def test_an_index_cannot_leave_the_directory(tmp_path: Path, name: Any) -> None:
    make_model(tmp_path)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelError, match="not the plain name"):
        inspect(tmp_path)


def test_a_truncated_or_grown_file_is_refused_with_both_sizes(tmp_path: Path) -> None:
    file = make_model(tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    with pytest.raises(ModelError, match=f"truncated: expected {len(whole)} bytes .* found {len(whole) - 5}"):
        inspect(tmp_path)
    file.write_bytes(whole + b"x")
    with pytest.raises(ModelError, match="too long"):
        inspect(tmp_path)
    for length in (0, 5, 20):
        file.write_bytes(whole[:length])
        with pytest.raises(ModelError, match="not a safetensors file, or truncated"):
            inspect(tmp_path)


@pytest.mark.parametrize(
    ("header", "data_bytes", "message"),
    [
        (b"{nope", 0, "is not JSON"),
        ([], 0, "is not an object"),
        ({"a": 3}, 0, "malformed"),
        ({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, 4, "malformed"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, 4, r"needs 8 bytes, its offsets are 0\.\.4"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}, 4, "its offsets are"),
        ({"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, 4, "its offsets are"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, 8, "hole or overlap"),
        (
            {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in "ab"},
            4,
            "hole or overlap",
        ),
    ],
)
def test_a_malformed_header_is_refused(tmp_path: Path, header: Any, data_bytes: int, message: str) -> None:
    make_model(tmp_path)
    write_raw(tmp_path, header, data_bytes)
    with pytest.raises(ModelError, match=message):
        inspect(tmp_path)


def test_missing_pieces_and_pickles_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        inspect(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        inspect(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        inspect(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"holds only pytorch_model\.bin: pickled"):
        inspect(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="expected a JSON object, found list"):
        inspect(tmp_path)
