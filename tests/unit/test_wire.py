"""Cutting boxes into chunks and writing chunks into boxes; the frame codec against protobuf's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waypath.proto import data_pb2 as pb
from waypath.proto.errors import ProtocolError
from waypath.proto.wire import chunks, decode, encode, fill

shapes = st.lists(st.integers(0, 7), min_size=0, max_size=4).map(tuple)


def strided(shape: tuple[int, ...], how: str) -> np.ndarray[Any, Any]:
    """An array of `shape` inside a larger one."""
    if how == "whole":
        return np.zeros(shape, np.int32)
    outer = np.zeros([2 * n + 1 for n in shape], np.int32)
    cut: Any = [slice(1, 1 + n) if how == "inner" else slice(0, 2 * n, 2) for n in shape]
    return outer[(..., *cut)]


@given(shapes, st.integers(1, 200), st.sampled_from(["whole", "inner", "stepped"]), st.sampled_from(["whole", "inner"]))
def test_any_box_arrives_whole(shape: tuple[int, ...], chunk_bytes: int, source_kind: str, target_kind: str) -> None:
    source, target = strided(shape, source_kind), strided(shape, target_kind)
    source[...] = np.arange(source.size, dtype=np.int32).reshape(shape) + 1
    at = 0
    for offset, data in chunks(source, chunk_bytes):
        assert offset == at and len(data) % 4 == 0 and len(data) <= max(chunk_bytes, 4)
        fill(target, offset, data)
        at += len(data)
    assert at == source.nbytes
    np.testing.assert_array_equal(target, source)


def test_chunks_of_a_contiguous_box_are_views_and_read_only() -> None:
    source = np.arange(1000, dtype=np.float32)
    (_, data), *_ = chunks(source, 100)
    assert np.shares_memory(data, source) and not data.flags.writeable and source.flags.writeable


def test_a_chunk_that_does_not_fit_is_refused() -> None:
    box = np.zeros((3, 3), np.float32)
    for offset, size in ((36, 4), (0, 40), (2, 4), (0, 6), (-4, 4)):
        with pytest.raises(ProtocolError, match=r"do not fit a box of float32\[3, 3\]"):
            fill(box, offset, np.zeros(size, np.uint8))


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**40), st.binary(max_size=300))
def test_the_frame_is_a_slice_chunk(index: int, offset: int, payload: bytes) -> None:
    frame = encode(index, offset, np.frombuffer(payload, np.uint8))
    message = pb.SliceChunk.FromString(frame)
    assert (message.slice, message.offset, message.data) == (index, offset, payload)
    for text in (frame, message.SerializeToString()):
        found = decode(text)
        assert (found[0], found[1], found[2].tobytes()) == (index, offset, payload)


@given(st.binary(max_size=200))
def test_no_input_breaks_the_decoder_except_by_protocol_error(text: bytes) -> None:
    try:
        decode(text)
    except ProtocolError:
        return
    pb.SliceChunk.FromString(text)  # what ours takes, protobuf takes


def test_a_flipped_bit_is_found() -> None:
    frame = bytearray(encode(1, 2, np.arange(100, dtype=np.uint8)))
    frame[-7] ^= 1
    with pytest.raises(ProtocolError, match="CRC32C"):
        decode(bytes(frame))
