"""The two weight sets: written once, complete, aliased by the device, and never rewritten while something looks at them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from waypath.proto.errors import LocalError, TransferError
from waypath.workers.engines.weights import WeightStore
from waypath.workers.models.config import ModelConfig
from waypath.workers.models.views import leaf_at, views

MODEL = ModelConfig(
    vocab_size=5, hidden_size=4, intermediate_size=6, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=2
)


def _store() -> WeightStore:
    return WeightStore(MODEL, jax.local_devices()[0])


def _publish(store: WeightStore, version: int, value: float) -> None:
    store.begin(version)
    for view in views(MODEL):
        store.view(view.name, (0,) * len(view.shape), view.shape)[...] = value
    store.seal(lambda params: None)
    store.commit(version)


def _leaves(store: WeightStore) -> list[jax.Array]:
    leaves: list[jax.Array] = jax.tree.leaves(store.params)
    assert leaves
    return leaves


def test_every_leaf_is_aligned_and_a_device_aliases_it() -> None:
    store = _store()
    store.begin(0)
    before = {name: view.ctypes.data for name, view in store.shadow().items()}
    leaf_starts = [leaf.ctypes.data for leaf in store._shadow.leaves.values()]
    assert all(start % 64 == 0 for start in leaf_starts)
    for view in views(MODEL):
        store.view(view.name, (0,) * len(view.shape), view.shape)[...] = 1.0
    store.seal(lambda params: None)
    store.commit(0)
    assert store.params is not None
    for view in views(MODEL):
        leaf = leaf_at(store.params, view.path)
        here = leaf.unsafe_buffer_pointer() + (0 if view.index is None else view.index * leaf[0].nbytes)
        assert here == before[view.name]


def test_memory_that_a_peer_may_still_write_to_is_replaced_before_another_version() -> None:
    store = _store()
    store.begin(0)
    late = next(iter(store.shadow().values()))
    store._shadow.buffer.writer_begins()
    store.abort()
    store.begin(1)
    names = list(store.shadow())
    assert not np.shares_memory(late, store.shadow()[names[0]])
    assert not store._shadow.buffer.tainted


def test_a_layer_lands_in_its_place_of_the_stacked_leaf() -> None:
    store = _store()
    store.begin(0)
    for view in views(MODEL):
        whole = store.view(view.name, (0,) * len(view.shape), view.shape)
        whole[...] = 0 if view.index is None else view.index + 1
    store.seal(lambda params: None)
    store.commit(0)
    assert store.params is not None
    assert np.asarray(store.params["layers"]["q"])[:, 0, 0].tolist() == [1, 2]


def test_tensors_may_come_in_boxes() -> None:
    store = _store()
    store.begin(0)
    for view in views(MODEL):
        half = (view.shape[0] // 2, *view.shape[1:])
        rest = (view.shape[0] // 2, *(0 for _ in view.shape[1:]))
        store.view(view.name, (0,) * len(view.shape), half)[...] = 1
        store.view(view.name, rest, view.shape)[...] = 2
    store.seal(lambda params: None)
    store.commit(0)
    assert all(set(np.unique(leaf)) <= {1, 2} for leaf in _leaves(store))


def test_publications_take_turns_and_the_old_arrays_are_gone() -> None:
    store = _store()
    _publish(store, 0, 1.0)
    first = _leaves(store)
    where = [leaf.unsafe_buffer_pointer() for leaf in first]
    _publish(store, 1, 2.0)
    assert all(leaf.is_deleted() for leaf in first)
    assert all(float(leaf.max()) == 2.0 for leaf in _leaves(store))
    _publish(store, 2, 3.0)
    assert [leaf.unsafe_buffer_pointer() for leaf in _leaves(store)] == where, "on CPU the device aliases the buffers"


def test_staging_does_not_touch_what_serves() -> None:
    store = _store()
    _publish(store, 0, 1.0)
    store.begin(1)
    for view in views(MODEL):
        store.view(view.name, (0,) * len(view.shape), view.shape)[...] = 9
    assert all(float(leaf.max()) == 1.0 for leaf in _leaves(store))
    store.seal(lambda params: None)
    assert all(float(leaf.max()) == 1.0 for leaf in _leaves(store))
    store.abort()
    assert store.version == 0 and all(float(leaf.max()) == 1.0 for leaf in _leaves(store))
    _publish(store, 1, 5.0)
    assert all(float(jnp.min(leaf)) == 5.0 for leaf in _leaves(store))


def test_seal_digests_the_staged_parameters() -> None:
    store = _store()
    store.begin(0)
    for view in views(MODEL):
        store.view(view.name, (0,) * len(view.shape), view.shape)[...] = 3
    total: Any = store.seal(lambda params: sum(float(leaf.sum()) for leaf in jax.tree.leaves(params)))
    assert total == 3 * sum(int(np.prod(view.shape)) for view in views(MODEL))


def test_incomplete_weights_are_refused_by_name() -> None:
    store = _store()
    store.begin(0)
    for view in views(MODEL):
        if view.name != "model.norm.weight":
            store.view(view.name, (0,) * len(view.shape), view.shape)
    store.view("model.norm.weight", (0,), (3,))
    with pytest.raises(TransferError, match=r"model\.norm\.weight: 3 of 4 elements"):
        store.seal(lambda params: None)


@pytest.mark.parametrize(
    ("tensor", "lower", "upper", "message"),
    [
        ("model.layers.9.nope", (0,), (1,), "no tensor of that name"),
        ("model.norm.weight", (0,), (5,), "outside its shape"),
        ("model.norm.weight", (3,), (2,), "outside its shape"),
        ("model.norm.weight", (0, 0), (1, 1), "outside its shape"),
        ("model.norm.weight", (1,), (3,), "overlaps"),
    ],
)
def test_boxes_that_must_not_be_written(tensor: str, lower: Any, upper: Any, message: str) -> None:
    store = _store()
    store.begin(0)
    store.view("model.norm.weight", (0,), (2,))
    with pytest.raises(TransferError, match=message):
        store.view(tensor, lower, upper)


def test_calls_out_of_order_are_refused() -> None:
    store = _store()
    with pytest.raises(LocalError, match="no publication is open"):
        store.view("model.norm.weight", (0,), (4,))
    with pytest.raises(LocalError, match="no publication is open"):
        store.seal(lambda params: None)
    with pytest.raises(LocalError, match="nothing is staged"):
        store.commit(0)
    store.begin(1)
    with pytest.raises(LocalError, match="version 1 is being staged"):
        store.begin(2)
    with pytest.raises(LocalError, match="version 1 is staged but not sealed"):
        store.commit(1)
    store.abort()
    _publish(store, 1, 1.0)
    with pytest.raises(LocalError, match="version 1 serves already"):
        store.begin(1)
