"""What is inside a Hugging Face model directory, read from its headers alone.

Owns the safetensors header (8-byte little-endian length, JSON, data) and the index of several files; checks both before
anyone maps a byte of them, for they come from outside. Knows neither jax nor architectures; called by the launcher
(does the model exist, is it whole, will it fit?) and by the checkpoint reader in ``workers/models/hf.py``.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from waypath.proto.errors import ModelError

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: ``shape``, safetensors ``dtype`` name, and its bytes ``start`` to ``end`` in ``file``."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class CheckpointInfo:
    """A model directory whose headers are sound. ``config`` is the parsed ``config.json``."""

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @property
    def param_count(self) -> int:
        """Elements of all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    @property
    def param_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(tensor.end - tensor.start for tensor in self.tensors.values())


def inspect(directory: str | Path) -> CheckpointInfo:
    """Read ``config.json`` and every safetensors header under ``directory``.

    Raises ModelError for a missing directory or file, a truncated or malformed file, an index that names a file
    outside the directory or disagrees with the files, and for checkpoints in pickle form (``.bin``).
    """
    path = Path(directory)
    if not path.is_dir():
        raise ModelError(f"model directory {path} does not exist", remedy="Set model.path to a Hugging Face directory")
    config = _read_json(path / "config.json")
    if (path / INDEX_FILE).is_file():
        tensors = _read_indexed(path)
    elif (path / SINGLE_FILE).is_file():
        tensors = read_header(path / SINGLE_FILE)
    elif pickled := sorted(file.name for file in path.glob("*.bin")):
        raise ModelError(
            f"{path} holds only {', '.join(pickled)}: pickled checkpoints can run code and are not read",
            remedy="Convert it to safetensors",
        )
    else:
        raise ModelError(f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}")
    return CheckpointInfo(path, config, tensors)


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, its size checked against them.

    Raises ModelError where the file is shorter or longer than its header says, or the header is malformed.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise ModelError(f"{file}: not a safetensors file, or truncated: {size} bytes, header says {length}")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise ModelError(f"{file}: the safetensors header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(f"{file}: the safetensors header is not an object")
    header.pop("__metadata__", None)
    base = 8 + length
    tensors = {name: _tensor(file, name, raw, base) for name, raw in header.items()}
    position = base
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.end)):
        if tensor.start != position:
            raise ModelError(
                f"{file}: tensor {tensor.name!r} starts at byte {tensor.start}, expected {position} (hole or overlap)"
            )
        position = tensor.end
    if size != position:
        state = "truncated" if size < position else "too long"
        raise ModelError(
            f"{file} is {state}: expected {position} bytes from its header, found {size}",
            remedy="Copy or download it again",
        )
    return tensors


def _tensor(file: Path, name: str, raw: Any, base: int) -> TensorInfo:
    """One header entry, checked."""
    try:
        dtype, shape, (start, end) = str(raw["dtype"]), tuple(raw["shape"]), raw["data_offsets"]
        sound = all(type(value) is int and value >= 0 for value in (*shape, start, end))
        expected = math.prod(shape) * DTYPE_BYTES[dtype]
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{file}: header entry of tensor {name!r} is malformed: {raw!r}") from error
    if not sound or end - start != expected:
        raise ModelError(
            f"{file}: tensor {name!r} of shape {list(shape)} {dtype} needs {expected} bytes, "
            f"its offsets are {start}..{end}"
        )
    return TensorInfo(name, file, dtype, shape, base + start, base + end)


def _read_indexed(path: Path) -> dict[str, TensorInfo]:
    """The tensors of all files that the index names; index and files must list the same ones."""
    weight_map = _read_json(path / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path / INDEX_FILE}: 'weight_map' is missing or empty")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            raise ModelError(
                f"{path / INDEX_FILE}: tensor {name!r} is in {file!r}, which is not the plain name of a "
                f".safetensors file"
            )
    found: dict[str, TensorInfo] = {}
    for file in sorted(set(weight_map.values())):
        if not (path / file).is_file():
            raise ModelError(f"{path / file} is missing, but {INDEX_FILE} names it")
        for name, tensor in read_header(path / file).items():
            if weight_map.get(name) != file:
                raise ModelError(f"{path / file} holds tensor {name!r}, which {INDEX_FILE} places elsewhere")
            found[name] = tensor
    if missing := sorted(set(weight_map) - set(found)):
        raise ModelError(f"{path}: tensors named by {INDEX_FILE} are in no file: {', '.join(missing[:8])}")
    return found


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ModelError(f"{file} is missing")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return cast(dict[str, Any], value)
