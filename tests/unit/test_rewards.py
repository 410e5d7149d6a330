"""What counts as a reward, and the frames to the children."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waypath.proto.errors import ProtocolError
from waypath.workers.rewards.frames import MAX_FRAME_BYTES, FrameParser, pack
from waypath.workers.rewards.values import BadValueError, check_rewards


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 0.5, True], [1.0, 0.5, 1.0]),
        (np.array([1, 2], np.float16), [1.0, 2.0]),
        ((np.float32(2), np.array(3), np.bool_(False)), [2.0, 3.0, 0.0]),
        ((i for i in (1, 2)), [1.0, 2.0]),
    ],
)
def test_numbers(values: Any, expected: list[float]) -> None:
    assert check_rewards(values, len(expected)) == [{"reward": value} for value in expected]


def test_dicts_carry_metrics() -> None:
    assert check_rewards([{"reward": 1, "length": 3}, 2], 2) == [
        {"reward": 1.0, "length": 3.0},
        {"reward": 2.0},
    ]


class Silent:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("values", "problem", "found", "index"),
    [
        (None, "a sequence of 2 rewards", "None", None),
        ("ab", "a sequence", "'ab' (str)", None),
        ({"reward": 1}, "a sequence", "(dict)", None),
        ([1], "expected 2 rewards, one per sample", "1 values: [1]", None),
        ([1, 2, 3], "expected 2 rewards", "3 values", None),
        ([1, math.nan], "a finite float32", "nan", 1),
        ([-math.inf, 1], "a finite float32", "-inf", 0),
        ([1e39, 1], "a finite float32", "1e+39", 0),
        ([10**400, 1], "a finite float32", "inf", 0),
        ([1, "1"], "expected a number", "'1' (str)", 1),
        ([1, None], "expected a number", "None (NoneType)", 1),
        ([1, 1j], "expected a number", "1j (complex)", 1),
        ([1, np.ones(2)], "expected a number", "(ndarray)", 1),
        ([Silent(), 1], "expected a number", "whose repr raises RuntimeError", 0),
        ([1, {"score": 1}], 'the key "reward"', "{'score': 1}", 1),
        ([1, {"reward": 1, 2: 3}], "keys", "2 (int)", 1),
        ([1, {"reward": 1, "x": math.nan}], "a finite float32 for 'x'", "nan", 1),
    ],
)
def test_what_is_not_a_reward(values: Any, problem: str, found: str, index: int | None) -> None:
    with pytest.raises(BadValueError) as caught:
        check_rewards(values, 2)
    assert problem in caught.value.problem and found in caught.value.found
    assert caught.value.sample_index == index


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.dictionaries(st.text(), JSON, max_size=3), max_size=4), st.integers(1, 40))
def test_frames_survive_any_chunking(messages: list[dict[str, Any]], size: int) -> None:
    data = b"".join(map(pack, messages))
    parser = FrameParser()
    found = [m for i in range(0, len(data), size) for m in parser.feed(data[i : i + size])]
    assert found == messages


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ((MAX_FRAME_BYTES + 1).to_bytes(4, "little"), "at most"),
        (b"\x01\0\0\0{", "not JSON"),
        (b"\x02\0\0\0[]", "expected an object"),
        (b"\x02\0\0\0\xff\xff", "not JSON"),
    ],
)
def test_frames_that_are_refused(data: bytes, problem: str) -> None:
    with pytest.raises(ProtocolError, match=problem):
        FrameParser().feed(data)


def test_frames_carry_no_nan() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        pack({"reward": math.nan})
