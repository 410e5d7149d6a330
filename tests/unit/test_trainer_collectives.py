"""Gathering and reducing over a mesh, by both routes and for leaves of every kind."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from waypath.workers.mesh import build_mesh
from waypath.workers.trainer import collectives
from waypath.workers.trainer.collectives import divided_dim, gather, gather_rows, reduce_scatter

SPECS = [PartitionSpec(None, "fsdp"), PartitionSpec(), PartitionSpec("fsdp"), PartitionSpec(None, "fsdp", None)]
SHAPES = [(3, 4), (5,), (8,), (2, 4, 3)]
DIMS = [divided_dim(spec) for spec in SPECS]


@pytest.mark.parametrize("bucket_bytes", [0, 1 << 20], ids=["one by one", "together"])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(("data", "fsdp"), [(1, 4), (2, 2)])
def test_gather_and_reduce_are_inverse_up_to_the_sum(
    data: int, fsdp: int, native: bool, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "BUCKET_BYTES", bucket_bytes)
    mesh = build_mesh({"data": data, "fsdp": fsdp}, jax.devices()[:4])
    rng = np.random.default_rng(0)
    leaves = [rng.integers(0, 100, shape).astype(np.float32) for shape in SHAPES]

    def body(*shards: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        whole = gather(shards, DIMS, fsdp)
        device = jax.lax.axis_index("data") * fsdp + jax.lax.axis_index("fsdp")
        weighted = [leaf * (device + 1).astype(jnp.float32) for leaf in whole]
        rows = gather_rows(jnp.stack([device.astype(jnp.float32), whole[0][1, 2]]))
        return reduce_scatter(weighted, DIMS, (data, fsdp), native), rows

    mapped = jax.shard_map(body, mesh=mesh, in_specs=tuple(SPECS), out_specs=(SPECS, PartitionSpec()), check_vma=False)
    sums, rows = jax.jit(mapped)(*leaves)
    for found, leaf in zip(sums, leaves, strict=True):
        np.testing.assert_array_equal(np.asarray(found), leaf * 10)  # 1 + 2 + 3 + 4, exact in float32
    np.testing.assert_array_equal(np.asarray(rows), [[i, leaves[0][1, 2]] for i in range(4)])


def test_only_fsdp_may_divide_a_parameter() -> None:
    assert DIMS == [1, None, 0, 1]
    with pytest.raises(ValueError, match="divides parameters over 'fsdp' alone"):
        divided_dim(PartitionSpec("tensor"))
