"""Writes a Hugging Face model directory: config.json, model.safetensors, tokenizer files.

Streams one tensor at a time, for offsets follow from the config alone. Knows neither jax nor where tensors come from;
called by the trainer's export and by ``tools/smollm2.py``.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from waypath.proto.errors import ModelError
from waypath.proto.hf_checkpoint import SINGLE_FILE
from waypath.workers.models.config import ModelConfig
from waypath.workers.models.views import views

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def save_hf(
    directory: str | Path,
    config: ModelConfig,
    tensors: Iterable[tuple[str, np.ndarray[Any, Any]]],
    tokenizer_dir: str | Path | None = None,
) -> Path:
    """Write ``tensors`` (canonical name, float32 array; any order) as a Hugging Face directory and return its path.

    Tokenizer files and ``generation_config.json`` are copied byte for byte from ``tokenizer_dir`` where given. The
    directory appears under its name only when it is whole: it is written as ``.NAME.partial`` beside it, flushed to
    disk, and renamed. Raises ModelError where it exists and is not empty, or where the tensors are not exactly the
    model's.
    """
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"{target} already exists and is not empty", remedy="Choose another directory")
    partial = target.parent / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write_tensors(partial / SINGLE_FILE, config, tensors)
        write_json(partial / "config.json", config.to_hf())
        for name in TOKENIZER_FILES if tokenizer_dir is not None else ():
            source = Path(str(tokenizer_dir)) / name
            if source.is_file():
                shutil.copyfile(source, partial / name)
        for path in (*partial.iterdir(), partial):
            _sync(path)
        if target.exists():
            target.rmdir()
        partial.rename(target)
        _sync(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def write_json(file: Path, value: dict[str, Any]) -> None:
    """Write ``value`` as indented UTF-8 JSON."""
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_tensors(file: Path, config: ModelConfig, tensors: Iterable[tuple[str, np.ndarray[Any, Any]]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    shapes: dict[str, tuple[int, ...]] = {}
    offset = 0
    for view in views(config):
        size = 4 * math.prod(view.shape)
        header[view.name] = {
            "dtype": "F32",
            "shape": list(view.shape),
            "data_offsets": [offset, offset + size],
        }
        shapes[view.name] = view.shape
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensor data starts aligned
    base = 8 + len(text)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, array in tensors:
            shape = shapes.pop(name, None)
            if shape is None:
                raise ModelError(f"tensor {name!r} is not one of this model's, or was given twice")
            if array.shape != shape or array.dtype != np.float32:
                raise ModelError(
                    f"tensor {name!r}: expected float32 {list(shape)}, found {array.dtype} {list(array.shape)}"
                )
            stream.seek(base + header[name]["data_offsets"][0])
            stream.write(np.ascontiguousarray(array).data)
        if shapes:
            raise ModelError(f"tensors were not given: {', '.join(sorted(shapes)[:8])}")


def _sync(path: Path) -> None:
    """Flushes a file or a folder to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
