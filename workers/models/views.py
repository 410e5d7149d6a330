"""The one table of a decoder's leaves: path in the parameter dict, shape, logical axes, canonical tensor names.

Layers are stacked on a leading axis, weights keep Hugging Face's ``[out, in]`` orientation, so that a canonical
tensor is a leaf or ``leaf[layer]`` and nothing is ever transposed. Knows neither jax nor files. Called by the decoder
(shapes), ``workers/mesh.py`` (sharding), the checkpoint reader and writer, digests and publication (names).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from waypath.workers.models.config import ModelConfig

Path = tuple[str, ...]


@dataclass(frozen=True)
class Leaf:
    """One array of the parameter dict.

    ``axes`` names a logical axis per dimension (``layers``, ``vocab``, ``embed``, ``heads``, ``kv_heads``, ``ff``,
    ``head_dim``). ``name`` is the canonical Hugging Face name, with ``{}`` for the layer where ``stacked``.
    """

    path: Path
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    name: str
    stacked: bool
    norm: bool = False


@dataclass(frozen=True)
class View:
    """A canonical tensor: the leaf at ``path``, or its ``index``-th layer; ``shape`` is the tensor's own."""

    name: str
    path: Path
    index: int | None
    shape: tuple[int, ...]


def leaves(config: ModelConfig) -> list[Leaf]:
    """All leaves of the parameter dict, in a fixed order."""
    layers, embed, ff = config.num_layers, config.hidden_size, config.intermediate_size
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    prefix = "model.layers.{}."

    def weight(leaf: str, name: str, out_axis: str, out_size: int, in_axis: str, in_size: int) -> Leaf:
        shape, axes = (layers, out_size, in_size), ("layers", out_axis, in_axis)
        return Leaf(("layers", leaf), shape, axes, f"{prefix}{name}.weight", stacked=True)

    def norm(leaf: str, name: str, axis: str, size: int) -> Leaf:
        full = f"{prefix}{name}.weight"
        return Leaf(("layers", leaf), (layers, size), ("layers", axis), full, stacked=True, norm=True)

    table = [
        Leaf(("embed",), (config.vocab_size, embed), ("vocab", "embed"), "model.embed_tokens.weight", False),
        norm("attn_norm", "input_layernorm", "norm", embed),
        weight("q", "self_attn.q_proj", "heads", heads, "embed", embed),
        weight("k", "self_attn.k_proj", "kv_heads", kv, "embed", embed),
        weight("v", "self_attn.v_proj", "kv_heads", kv, "embed", embed),
        weight("o", "self_attn.o_proj", "embed", embed, "heads", heads),
        norm("mlp_norm", "post_attention_layernorm", "norm", embed),
        weight("gate", "mlp.gate_proj", "ff", ff, "embed", embed),
        weight("up", "mlp.up_proj", "ff", ff, "embed", embed),
        weight("down", "mlp.down_proj", "embed", embed, "ff", ff),
        Leaf(("norm",), (embed,), ("norm",), "model.norm.weight", False, norm=True),
    ]
    if config.qk_norm:
        table.append(norm("q_norm", "self_attn.q_norm", "head_dim", config.head_dim))
        table.append(norm("k_norm", "self_attn.k_norm", "head_dim", config.head_dim))
    if not config.tie_embeddings:
        table.append(Leaf(("lm_head",), (config.vocab_size, embed), ("vocab", "embed"), "lm_head.weight", False))
    return table


def leaf_at(tree: Any, path: Path) -> Any:
    """What a nested dict of the parameters' form holds at ``path``."""
    for key in path:
        tree = tree[key]
    return tree


def views(config: ModelConfig) -> list[View]:
    """Every canonical tensor of the model with the leaf (and layer) that stores it, in name order.

    A tied head has no tensor of its own: ``lm_head.weight`` appears only where ``tie_embeddings`` is false.
    """
    found = []
    for leaf in leaves(config):
        if leaf.stacked:
            found += [View(leaf.name.format(i), leaf.path, i, leaf.shape[1:]) for i in range(config.num_layers)]
        else:
            found.append(View(leaf.name, leaf.path, None, leaf.shape))
    return sorted(found, key=lambda view: view.name)
