"""Objects that stay on devices, and where their parts lie.

A device object is the flattened arrays of one object. Each is a global jax.Array of the slice's mesh, of which this process sees
its own shards. Must not know programs or the wire. Called by the sequences, puts and transfers; the data server reads the
boxes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from waypath.proto import worker_pb2 as pb
from waypath.proto.codecs import dtype_of
from waypath.proto.errors import GraphError, ProtocolError
from waypath.proto.layout import Box, device_boxes
from waypath.workers.exposed import ExposedTensor

__all__ = ["DeviceObject", "Meshes", "build", "exposed", "local_boxes", "placed", "sharding_of", "zeros"]


@dataclass(frozen=True, eq=False)
class DeviceObject:
    """The arrays of an object. `nbytes`: what this process holds of them."""

    leaves: tuple[Any, ...]
    nbytes: int

    @classmethod
    def of(cls, leaves: Sequence[Any]) -> DeviceObject:
        """Counts the bytes of arrays."""
        return cls(tuple(leaves), sum(_local_bytes(leaf) for leaf in leaves))


def _local_bytes(leaf: Any) -> int:
    sharding = leaf.sharding
    shape = sharding.shard_shape(leaf.shape)
    count: int = math.prod(shape) * leaf.dtype.itemsize * len(sharding.addressable_devices)
    return count


class Meshes:
    """jax meshes of the slices that programs name, made once each."""

    def __init__(self) -> None:
        self._made: dict[bytes, Mesh] = {}

    def mesh(self, message: pb.MeshSlice) -> Mesh:
        """The mesh of a slice. GraphError where this world lacks one of its devices."""
        key = message.SerializeToString(deterministic=True)
        mesh = self._made.get(key)
        if mesh is None:
            devices: dict[tuple[int, int], Any] = {}
            counts: Counter[int] = Counter()
            for device in sorted(jax.devices(), key=lambda d: d.id):
                devices[device.process_index, counts[device.process_index]] = device
                counts[device.process_index] += 1
            array = np.empty(len(message.devices), dtype=object)
            for position, wanted in enumerate(message.devices):
                found = devices.get((wanted.process_index, wanted.local_id))
                if found is None:
                    raise GraphError(
                        f"slice {message.name}: no device {wanted.local_id} in process {wanted.process_index} of this world, "
                        f"which has {len(devices)} devices"
                    )
                array[position] = found
            axis_types = (AxisType.Auto,) * len(message.axes)
            mesh = Mesh(array.reshape(tuple(message.sizes)), tuple(message.axes), axis_types=axis_types)
            self._made[key] = mesh
        return mesh


def sharding_of(leaf: pb.Leaf, mesh: Mesh) -> NamedSharding:
    """The sharding that a leaf of an aval asks for."""
    parts = [tuple(axes.names) for axes in leaf.spec]
    return NamedSharding(mesh, PartitionSpec(*(None if not p else p[0] if len(p) == 1 else p for p in parts)))


def local_boxes(leaf: pb.Leaf, mesh: pb.MeshSlice, worker: str) -> list[tuple[int, Box]]:
    """(local device, box) of the parts of a leaf that lie on a worker."""
    boxes = device_boxes(leaf.shape, [axes.names for axes in leaf.spec], mesh.axes, mesh.sizes)
    return [(d.local_id, box) for d, box in zip(mesh.devices, boxes, strict=True) if d.worker == worker]


def build(leaf: pb.Leaf, mesh: Mesh, parts: Mapping[int, Any]) -> Any:
    """A global array from this process's parts: local device → numpy array. ProtocolError where one is not as it should be.

    On the JAX thread.
    """
    sharding = sharding_of(leaf, mesh)
    shape = tuple(leaf.shape)
    expected = sharding.shard_shape(shape)
    local: dict[Any, int] = {d: i for i, d in enumerate(sorted(jax.local_devices(), key=lambda d: d.id))}
    shards = []
    for device in sorted(sharding.addressable_devices, key=local.__getitem__):
        part = parts.get(local[device])
        if part is None or part.shape != expected or part.dtype.name != leaf.dtype:
            found = "nothing" if part is None else f"{part.dtype.name}{list(part.shape)}"
            raise ProtocolError(f"device {local[device]}: expected {leaf.dtype}{list(expected)}, found {found}")
        # A copy of jax's own: device_put may alias an aligned numpy buffer, and then cannot be donated.
        shards.append(jax.device_put(part, device, may_alias=False))
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def placed(leaf: pb.Leaf, mesh: Mesh, array: Any) -> Any:
    """A whole array as its leaf wants it on the mesh; one that lies so already is taken as it is. On the JAX thread.

    GraphError where it lies otherwise on several processes: to bring it there would be a collective that nobody has ordered.
    """
    sharding = sharding_of(leaf, mesh)
    if isinstance(array, jax.Array) and array.sharding.is_equivalent_to(sharding, array.ndim):
        return array
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        raise GraphError(
            f"an array lies on several processes as {array.sharding}, the program says {sharding.spec}",
            remedy="Give the call's out_specs as the method leaves it",
        )
    whole = np.asarray(array)  # the same in every process of the mesh
    return jax.make_array_from_callback(whole.shape, sharding, lambda box: jax.numpy.array(whole[box]))


def zeros(leaf: pb.Leaf, mesh: Mesh) -> Any:
    """A global array of zeros, in the place of one that cannot be had. On the JAX thread."""
    sharding = sharding_of(leaf, mesh)
    part = np.zeros(sharding.shard_shape(tuple(leaf.shape)), dtype_of(leaf.dtype))
    shards = [jax.device_put(part, device, may_alias=False) for device in sharding.addressable_devices]
    return jax.make_array_from_single_device_arrays(tuple(leaf.shape), sharding, shards)


def exposed(held: DeviceObject) -> dict[str, ExposedTensor]:
    """The parts that lie here, as copies in host memory. On the JAX thread.

    Copies: a numpy view of a live array would silently cancel its donation.
    """
    tensors: dict[str, ExposedTensor] = {}
    for index, leaf in enumerate(held.leaves):
        boxes: dict[tuple[int, ...], Any] = {}
        for shard in leaf.addressable_shards:
            lower = tuple(0 if part.start is None else int(part.start) for part in shard.index)
            if lower not in boxes:
                boxes[lower] = np.asarray(jax.device_put(shard.data, may_alias=False))
        tensors[str(index)] = ExposedTensor(tuple(leaf.shape), leaf.dtype.name, tuple(boxes.items()))
    return tensors
