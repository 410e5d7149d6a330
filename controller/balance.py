"""Dividing equal pieces among senders so that the fullest is as empty as possible.

Owns one function. Must not know what a piece is. Pure. Called by the reshard planner.
"""

from __future__ import annotations

from collections.abc import Sequence


def pour(loads: Sequence[int], pieces: int, size: int) -> list[int]:
    """Returns how many of `pieces` pieces of `size` each taker gets, as if each went to the least loaded one in turn.

    `loads` are what the takers carry already, in the unit of `size`. The result differs from a perfectly level filling by
    less than one piece a taker; among equals the earlier taker comes first.

    >>> pour([0, 4, 0], 4, 2)
    [2, 0, 2]
    """
    if len(loads) == 1 or size <= 0 or pieces <= 0:
        return [max(pieces, 0), *[0] * (len(loads) - 1)]
    low, high = min(loads), max(loads) + size * pieces

    def under(level: int) -> list[int]:  # pieces that end at or below the level
        return [max(0, (level - load) // size) for load in loads]

    while low < high:  # the least level under which all pieces fit
        level = (low + high) // 2
        low, high = (low, level) if sum(under(level)) >= pieces else (level + 1, high)
    counts = under(low)
    over = sum(counts) - pieces
    for taker in reversed(range(len(loads))):  # those that end just at the level are one too many for some
        if over and counts[taker] and loads[taker] + counts[taker] * size == low:
            counts[taker] -= 1
            over -= 1
    return counts
