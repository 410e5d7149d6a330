"""Bundles: the one form that values take on the data road and in worker stores.

A bundle is named numpy arrays plus a JSON-able dictionary. It is encoded as a `BundleHeader` message followed by the
arrays' bytes in order, so that large payloads are never copied into a protobuf message. Nothing is pickled; dtypes come
from an allow-list.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes  # numpy knows bfloat16 and the float8 types from here on
import numpy as np

from waypath.proto import data_pb2 as pb
from waypath.proto.errors import ProtocolError

DTYPES = frozenset(
    {
        "bool",
        "uint8",
        "int8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float16",
        "float32",
        "float64",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "complex64",
        "complex128",
    }
)
EXTENSION_DTYPES = {name: np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")}
MAX_BUNDLE_BYTES = 1 << 30
MAX_HEADER_BYTES = 7 << 20  # a header is one message: below proto.channel.MAX_MESSAGE_BYTES, with room for its envelope
MAX_RESULT_BYTES = 256 << 10
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Bundle:
    """Named arrays (any shape, dtypes of `DTYPES`) and JSON-able `meta`."""

    meta: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Payload bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())


def dtype_of(name: str) -> np.dtype[Any]:
    """The dtype of that name; raises ProtocolError where it may not travel."""
    if name not in DTYPES:
        raise ProtocolError(f"dtype {name!r} may not travel; allowed: {sorted(DTYPES)}")
    return EXTENSION_DTYPES.get(name) or np.dtype(name)


def dump_json(value: Any) -> str:
    """Returns compact, key-sorted JSON; raises ValueError on values that JSON does not have (NaN is allowed)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def load_json(text: str) -> dict[str, Any]:
    """Returns the object in `text`; an empty text is an empty object. Raises ProtocolError on anything else."""
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ProtocolError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ProtocolError(f"expected a JSON object, found {type(value).__name__}")
    return value


def header(bundle: Bundle) -> pb.BundleHeader:
    """Returns the header of `bundle`; raises ProtocolError on a dtype that may not travel, and on meta or arrays too large to."""
    message = pb.BundleHeader(meta_json=dump_json(bundle.meta))
    for name, array in bundle.arrays.items():
        if array.dtype.name not in DTYPES:
            raise ProtocolError(f"array {name!r}: dtype {array.dtype.name} may not travel; allowed: {sorted(DTYPES)}")
        message.arrays.add(name=name, dtype=array.dtype.name, shape=array.shape, bytes=array.nbytes)
    if message.ByteSize() > MAX_HEADER_BYTES:
        raise ProtocolError(
            f"{message.ByteSize():,} bytes of meta {sorted(bundle.meta)}; at most {MAX_HEADER_BYTES:,} may travel",
            remedy="return fewer or shorter texts a group",
        )
    if bundle.nbytes > MAX_BUNDLE_BYTES:
        raise ProtocolError(f"{bundle.nbytes:,} bytes of arrays; at most {MAX_BUNDLE_BYTES:,} may travel")
    return message


def payload(bundle: Bundle, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Yields the arrays' bytes, C order, little endian, in chunks of at most `chunk_bytes`."""
    for array in bundle.arrays.values():
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for start in range(0, len(flat), chunk_bytes):
            yield flat[start : start + chunk_bytes].tobytes()


def decode(message: pb.BundleHeader, chunks: Iterable[bytes]) -> Bundle:
    """Rebuilds a bundle from its header and payload; raises ProtocolError where they do not fit each other."""
    data = b"".join(chunks)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    start = 0
    for spec in message.arrays:
        if spec.dtype not in DTYPES:
            raise ProtocolError(f"array {spec.name!r}: dtype {spec.dtype!r} may not travel")
        if any(size < 0 for size in spec.shape):
            raise ProtocolError(f"array {spec.name!r}: negative size in shape {list(spec.shape)}")
        dtype = dtype_of(spec.dtype)
        count = int(np.prod(spec.shape, dtype=object))
        if count * dtype.itemsize != spec.bytes or start + spec.bytes > len(data):
            raise ProtocolError(
                f"array {spec.name!r}: shape {list(spec.shape)} of {spec.dtype} needs {count * dtype.itemsize} bytes, "
                f"header says {spec.bytes}, payload has {len(data) - start} left"
            )
        arrays[spec.name] = np.frombuffer(data, dtype, count=count, offset=start).reshape(tuple(spec.shape))
        start += spec.bytes
    if start != len(data):
        raise ProtocolError(f"{len(data) - start} payload bytes after the last array")
    return Bundle(load_json(message.meta_json), arrays)


def dump_result(result: Mapping[str, Any], where: str) -> str:
    """Returns a node's control-road result as JSON; raises ProtocolError over `MAX_RESULT_BYTES`."""
    text = dump_json(dict(result))
    if len(text) > MAX_RESULT_BYTES:
        raise ProtocolError(
            f"result of {len(text)} bytes, at most {MAX_RESULT_BYTES} pass the control road",
            where=where,
            remedy="return it as a Bundle instead",
        )
    return text
