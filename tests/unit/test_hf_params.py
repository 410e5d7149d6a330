"""Model directories to sharded parameters and back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from waypath.proto.errors import ModelError
from waypath.proto.hf_checkpoint import INDEX_FILE
from waypath.workers.mesh import build_mesh, param_shardings
from waypath.workers.models import hf
from waypath.workers.models.config import ModelConfig
from waypath.workers.models.decoder import tree_of
from waypath.workers.models.hf import load_config, load_params, save_hf
from waypath.workers.models.tokenizer import char_tokenizer
from waypath.workers.models.views import views

CONFIG = ModelConfig(32, 16, 24, 2, 4, 2, 4, eos_token_ids=(1,))
UNTIED = ModelConfig(30, 16, 24, 2, 3, 3, 4, tie_embeddings=False, qk_norm=True)
Array = np.ndarray[Any, Any]


def make_tensors(config: ModelConfig) -> dict[str, Array]:
    generator = np.random.default_rng(0)
    return {view.name: generator.standard_normal(view.shape).astype(np.float32) for view in views(config)}


def canonical(config: ModelConfig, params: dict[str, Any]) -> Iterator[tuple[str, Array]]:
    for view in views(config):
        leaf = params
        for key in view.path:
            leaf = leaf[key]
        array = np.asarray(leaf)
        yield view.name, array if view.index is None else array[view.index]


def rewrite(path: Path, tensors: dict[str, Any]) -> None:
    save_file(tensors, str(path / "model.safetensors"))


@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
def test_save_and_load_keep_every_bit(tmp_path: Path, config: ModelConfig) -> None:
    tensors = make_tensors(config)
    source = tmp_path / "tokenizer"
    source.mkdir()
    char_tokenizer("ab").save(str(source / "tokenizer.json"))
    target = save_hf(tmp_path / "model", config, reversed(tensors.items()), source)
    assert sorted(file.name for file in target.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (target / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert load_config(target) == config
    stored = load_file(str(target / "model.safetensors"))  # the library reads what we write
    assert stored.keys() == tensors.keys()
    loaded = dict(canonical(config, load_params(target, config)))
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(stored[name], tensor)
        np.testing.assert_array_equal(loaded[name], tensor)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [(CONFIG, {"fsdp": 2}), (CONFIG, {"fsdp": 2, "tensor": 2}), (UNTIED, {"tensor": 2}), (CONFIG, {"data": 4})],
    ids=str,
)
def test_a_sharded_load_equals_the_files_and_can_be_donated(
    tmp_path: Path, config: ModelConfig, sizes: dict[str, int]
) -> None:
    tensors = make_tensors(config)
    target = save_hf(tmp_path / "model", config, tensors.items())
    mesh = build_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values())))])
    shardings = param_shardings(config, mesh)
    params = load_params(target, config, shardings)
    assert jax.tree.map(lambda leaf: leaf.sharding, params) == shardings
    for name, array in canonical(config, params):
        np.testing.assert_array_equal(array, tensors[name])
    for leaf in jax.tree.leaves(params):
        addresses = [shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards]
        assert len(set(addresses)) == len(addresses)  # no memory shared with a replica


def test_a_load_reads_only_its_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = save_hf(tmp_path / "model", CONFIG, make_tensors(CONFIG).items())
    read_bytes = 0
    whole = hf._read_box

    def counted(*args: Any) -> Array:
        nonlocal read_bytes
        box = whole(*args)
        read_bytes += box.nbytes
        return box

    monkeypatch.setattr(hf, "_read_box", counted)
    load_params(target, CONFIG, param_shardings(CONFIG, build_mesh({"data": 2, "fsdp": 2})))
    assert read_bytes == sum(4 * int(np.prod(view.shape)) for view in views(CONFIG))


def test_bfloat16_and_several_files_are_read(tmp_path: Path) -> None:
    tensors = make_tensors(CONFIG)
    target = save_hf(tmp_path / "model", CONFIG, tensors.items())
    (target / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for part, chunk in enumerate((names[:5], names[5:])):
        file = f"model-{part}.safetensors"
        save_file({name: tensors[name].astype(jnp.bfloat16) for name in chunk}, str(target / file))
        weight_map |= dict.fromkeys(chunk, file)
    (target / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    for name, array in canonical(CONFIG, load_params(target, CONFIG)):
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, tensors[name].astype(jnp.bfloat16).astype(np.float32))


def test_a_stored_copy_of_a_tied_head_is_passed_over(tmp_path: Path) -> None:
    tensors = make_tensors(CONFIG)
    target = save_hf(tmp_path / "model", CONFIG, tensors.items())
    rewrite(target, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert "lm_head" not in load_params(target, CONFIG)


def test_tensors_that_do_not_match_the_model_are_named(tmp_path: Path) -> None:
    tensors: dict[str, Any] = make_tensors(CONFIG)
    target = save_hf(tmp_path / "model", CONFIG, tensors.items())
    norm = "model.norm.weight"
    rewrite(target, {name: value for name, value in tensors.items() if name != norm} | {"visual.x": np.ones(1)})
    with pytest.raises(ModelError, match=r"missing tensors: model\.norm\.weight; unexpected tensors: visual\.x"):
        load_params(target, CONFIG)
    rewrite(target, tensors | {norm: np.ones(5, np.float32)})
    with pytest.raises(ModelError, match=r"model\.norm\.weight: expected shape \[16\], found \[5\]"):
        load_params(target, CONFIG)
    rewrite(target, tensors | {norm: np.ones(16, np.int32)})
    with pytest.raises(ModelError, match=r"expected dtype F32, F16 or BF16, found I32"):
        load_params(target, CONFIG)
    rewrite(target, tensors)
    with pytest.raises(ModelError, match=r"missing tensors: lm_head\.weight.*tie_word_embeddings"):
        load_params(target, ModelConfig(32, 16, 24, 2, 4, 2, 4, tie_embeddings=False))


def test_an_export_that_fails_leaves_nothing(tmp_path: Path) -> None:
    tensors = make_tensors(CONFIG)
    first = next(iter(tensors))
    cases: list[tuple[dict[str, Any], str]] = [
        ({first: tensors[first]}, "tensors were not given"),
        ({"other": tensors[first]}, "'other' is not one of this model's"),
        ({first: tensors[first].T[:3]}, "expected float32"),
        ({first: tensors[first].astype(np.float16)}, "found float16"),
    ]
    for given, message in cases:
        with pytest.raises(ModelError, match=message):
            save_hf(tmp_path / "model", CONFIG, given.items())
        assert list(tmp_path.iterdir()) == []


def test_an_export_never_replaces_files(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    save_hf(tmp_path / "empty", CONFIG, make_tensors(CONFIG).items())
    with pytest.raises(ModelError, match="already exists and is not empty"):
        save_hf(tmp_path / "empty", CONFIG, make_tensors(CONFIG).items())


def test_tree_of_calls_once_a_leaf() -> None:
    tree = tree_of(CONFIG, lambda leaf: leaf.name)
    assert tree["layers"]["gate"] == "model.layers.{}.mlp.gate_proj.weight"
