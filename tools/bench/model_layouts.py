"""Layouts of large models on large slices, for the planner's benchmark and tests: names and shapes, no weights.

Called by `bench transfer` and tests/unit/test_reshard.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from waypath.proto.layout import Layout, Shard, TensorLayout, device_boxes

Spec = tuple[tuple[str, ...], ...]
Weights = list[tuple[str, tuple[int, ...], int | None]]
"""Name, shape, and the dimension that tensor parallelism splits."""


class Slice:
    """Devices of one mesh, `per_worker` to a process; a process is a machine."""

    def __init__(self, prefix: str, mesh: Mapping[str, int], per_worker: int) -> None:
        self._prefix, self._mesh, self._per_worker = prefix, mesh, per_worker
        self._known: dict[tuple[tuple[int, ...], Spec, int, int], tuple[Shard, ...]] = {}

    def shards(
        self, shape: tuple[int, ...], spec: Spec, first: int = 0, mesh: Mapping[str, int] | None = None
    ) -> tuple[Shard, ...]:
        """The boxes of a tensor on the devices from `first` on that form `mesh` (the whole one by default)."""
        axes = self._mesh if mesh is None else mesh
        key = shape, spec, first, len(axes)
        if key not in self._known:
            boxes = device_boxes(shape, spec, tuple(axes), tuple(axes.values()))
            self._known[key] = tuple(
                Shard(f"{self._prefix}{(first + i) // self._per_worker}", (first + i) % self._per_worker, *box)
                for i, box in enumerate(boxes)
            )
        return self._known[key]


def split(rank: int, dimension: int | None, axis: str) -> Spec:
    """A spec that splits one dimension over one axis."""
    return tuple((axis,) if i == dimension else () for i in range(rank))


def llama_70b() -> tuple[Layout, Layout]:
    """Llama 3 70B in bfloat16 (141 GB): FSDP over 64 devices to 8 replicas of tensor parallelism 8."""
    hidden, ff, kv, vocab = 8192, 28672, 1024, 128_256
    weights: Weights = [
        ("model.embed_tokens.weight", (vocab, hidden), 0),
        ("lm_head.weight", (vocab, hidden), 0),
        ("model.norm.weight", (hidden,), None),
    ]
    for layer in range(80):
        prefix = f"model.layers.{layer}."
        weights += _attention(prefix, hidden, hidden, kv)
        weights += _mlp(f"{prefix}mlp.", hidden, ff)
    trainer = Slice("trainer-", {"fsdp": 64}, 8)
    replicas = Slice("inference-", {"replica": 8, "tensor": 8}, 8)
    return (
        _layout(weights, lambda shape, _: trainer.shards(shape, split(len(shape), 0, "fsdp"))),
        _layout(weights, lambda shape, tp: replicas.shards(shape, split(len(shape), tp, "tensor"))),
    )


def moe_1t() -> tuple[Layout, Layout]:
    """A mixture of experts of 10¹² parameters in bfloat16: 61 layers, the last 60 with 384 experts.

    Source: 256 devices, experts over 32 groups, each expert's rows over 8; the rest FSDP over all 256. Destination: 128 devices,
    experts over 16 groups, tensor parallelism 8; the rest replicated over the groups.
    """
    hidden, expert_ff, ff, kv, vocab, experts = 7168, 2048, 18_432, 1024, 163_840, 384
    dense: Weights = [
        ("model.embed_tokens.weight", (vocab, hidden), 0),
        ("lm_head.weight", (vocab, hidden), 0),
        ("model.norm.weight", (hidden,), None),
    ]
    for layer in range(61):
        dense += _attention(f"model.layers.{layer}.", hidden, hidden, kv)
        if layer:
            dense.append((f"model.layers.{layer}.mlp.gate.weight", (experts, hidden), None))
    dense += _mlp("model.layers.0.mlp.", hidden, ff)
    trainer = Slice("trainer-", {"expert": 32, "fsdp": 8}, 8)
    replicas = Slice("inference-", {"expert": 16, "tensor": 8}, 8)

    def by_rows(shape: tuple[int, ...], _: int | None) -> tuple[Shard, ...]:
        spec = (("expert", "fsdp") if shape[0] % 256 == 0 else ("fsdp",), *((),) * (len(shape) - 1))
        return trainer.shards(shape, spec)

    source = dict(_layout(dense, by_rows).tensors)
    destination = dict(
        _layout(dense, lambda shape, tp: replicas.shards(shape, split(len(shape), tp, "tensor"))).tensors
    )
    for layer in range(1, 61):
        for expert in range(experts):
            for name, shape, tp in _mlp(f"model.layers.{layer}.mlp.experts.{expert}.", hidden, expert_ff):
                held = trainer.shards(shape, split(2, 0, "fsdp"), expert // 12 * 8, {"fsdp": 8})
                wanted = replicas.shards(shape, split(2, tp, "tensor"), expert // 24 * 8, {"tensor": 8})
                source[name] = TensorLayout(name, shape, "bfloat16", held)
                destination[name] = TensorLayout(name, shape, "bfloat16", wanted)
    return Layout(source), Layout(destination)


def _attention(prefix: str, hidden: int, heads: int, kv: int) -> Weights:
    return [
        (f"{prefix}input_layernorm.weight", (hidden,), None),
        (f"{prefix}post_attention_layernorm.weight", (hidden,), None),
        (f"{prefix}self_attn.q_proj.weight", (heads, hidden), 0),
        (f"{prefix}self_attn.k_proj.weight", (kv, hidden), 0),
        (f"{prefix}self_attn.v_proj.weight", (kv, hidden), 0),
        (f"{prefix}self_attn.o_proj.weight", (hidden, heads), 1),
    ]


def _mlp(prefix: str, hidden: int, ff: int) -> Weights:
    return [
        (f"{prefix}gate_proj.weight", (ff, hidden), 0),
        (f"{prefix}up_proj.weight", (ff, hidden), 0),
        (f"{prefix}down_proj.weight", (hidden, ff), 1),
    ]


def _layout(weights: Weights, shards: Callable[[tuple[int, ...], int | None], tuple[Shard, ...]]) -> Layout:
    return Layout({name: TensorLayout(name, shape, "bfloat16", shards(shape, tp)) for name, shape, tp in weights})
