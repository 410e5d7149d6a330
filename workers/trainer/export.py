"""The final policy as canonical tensors: its SHA-256, and a Hugging Face directory.

Owns the byte form that `params_digest` is defined over. Must not know training or services. Called by
`waypath.workers.trainer.service` on the JAX thread of every process: gathering a sharded tensor takes all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from waypath.proto.errors import LocalError
from waypath.workers.mesh import replicated
from waypath.workers.models.config import ModelConfig
from waypath.workers.models.decoder import Params
from waypath.workers.models.hf import save_hf
from waypath.workers.models.tokenizer import TextTokenizer
from waypath.workers.models.views import leaf_at, views

HostArray = np.ndarray[Any, Any]


class ParamsDigest:
    """SHA-256 over canonical tensors given in name order.

    Of each: "NAME\\nDTYPE\\nD0,D1\\n" in UTF-8, then its elements, row-major and little-endian. The same whatever the sharding.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._last = ""

    def add(self, name: str, tensor: HostArray) -> None:
        """Adds the next tensor; ValueError out of name order."""
        if name <= self._last:
            raise ValueError(f"tensor {name!r} after {self._last!r}: expected name order")
        self._last = name
        shape = ",".join(map(str, tensor.shape))
        little = np.ascontiguousarray(tensor, dtype=tensor.dtype.newbyteorder("<"))
        self._hash.update(f"{name}\n{tensor.dtype.name}\n{shape}\n".encode())
        self._hash.update(little.data)

    def hexdigest(self) -> str:
        """64 hexadecimal digits."""
        return self._hash.hexdigest()


def canonical_tensors(model: ModelConfig, mesh: Mesh, params: Params) -> Iterator[tuple[str, HostArray]]:
    """(name, whole tensor) in name order, gathered one at a time. Every process of the world must exhaust it."""
    whole = replicated(mesh)
    layer = jax.jit(partial(jax.lax.dynamic_index_in_dim, axis=0, keepdims=False), out_shardings=whole)
    leaf = jax.jit(lambda array: array, out_shardings=whole)
    for view in views(model):
        array = leaf_at(params, view.path)
        gathered = leaf(array) if view.index is None else layer(array, np.int32(view.index))
        yield view.name, np.asarray(gathered.addressable_data(0))


def export(
    model: ModelConfig, mesh: Mesh, params: Params, text: TextTokenizer, out_dir: str | None, write: bool
) -> str:
    """Returns `params_digest`; with `out_dir`, the process that has `write` also writes the model there.

    The directory gets config.json, model.safetensors (float32) and the tokenizer's files. It appears whole or not at
    all. Raises ModelError where it is not empty, LocalError where it cannot be written; in either case all tensors
    have been gathered, so that no other process is left waiting.
    """
    digest = ParamsDigest()

    def tensors() -> Iterator[tuple[str, HostArray]]:
        for name, tensor in canonical_tensors(model, mesh, params):
            digest.add(name, tensor)
            yield name, tensor

    stream = tensors()
    try:
        if out_dir and write:
            _write(Path(out_dir), model, stream, text)
    except OSError as error:
        raise LocalError(
            f"the model could not be written to {out_dir}: {error}", remedy="free space or choose another directory"
        ) from error
    finally:
        for _ in stream:
            continue
    return digest.hexdigest()


def _write(target: Path, model: ModelConfig, stream: Iterator[tuple[str, HostArray]], text: TextTokenizer) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if text.directory is not None:
        save_hf(target, model, stream, text.directory)
        return
    with TemporaryDirectory() as made:
        file = Path(made) / "tokenizer.json"
        try:
            text.inner.save(str(file))
        except Exception as error:  # the library raises bare Exception
            raise LocalError(f"the tokenizer could not be written: {error}") from error
        save_hf(target, model, stream, made)
