"""The transfer benchmark moves real bytes between real processes, and checks each of them."""

from __future__ import annotations

import pytest

from waypath.tools.bench import transfer


@pytest.mark.slow
@pytest.mark.parametrize("case", transfer.CASES)
def test_every_path_brings_the_planners_bytes_and_the_right_values(case: str) -> None:
    rows = transfer.moved(case, 1, 2)  # raises where bytes, digests or values are wrong
    assert [row["metric"].partition(" (")[0] for row in rows] == [
        "host, shared memory: copy",
        "host, shared memory: verified publication",
        "host, TCP: copy",
    ]
    assert all(row["ratio"] > 0 for row in rows)
