"""Segments whose lengths the host knows: chunks end where segments end, and a chunk's gradients follow its statistics.

A group of segments that belong together, as those of a pair do, is on one chunk or, where it is longer than a chunk,
on several of its own, whose logits alone are computed twice. Pairs that do not stand together are brought together by a
copy of the rows.
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from .sizes import balanced, slices


class Segments(NamedTuple):
    """Segments of a call as its caller names them."""

    lengths: tuple[int, ...]  # tokens of each, in the order of the flattened tokens
    pairs: tuple[tuple[int, int], ...] = ()  # segments that belong together


Group = tuple[range, ...]  # of a call's rows that belong together: those of each of its segments
Spans = tuple[tuple[slice, ...], ...]  # of rows: the chunks of each


def groups_of(segments: Segments, length: int, shift: int) -> tuple[Group, ...]:
    """Rows of each group of segments. ``length``: of the last dimension of the tokens, along which rows predict
    tokens ``shift`` behind them."""
    ends = itertools.accumulate(segments.lengths, initial=0)
    # rows at the end of a line predict none, and go with those before them
    starts = [end - min(shift, end % length) for end in ends]
    rows = [range(first, last) for first, last in itertools.pairwise(starts)]
    joined = joined_by(segments.pairs, len(rows))
    groups = (tuple([rows[segment] for segment in group if len(rows[segment])]) for group in joined)
    return tuple([group for group in groups if group])


def joined_by(pairs: Sequence[tuple[int, int]], count: int) -> list[list[int]]:
    """Segments in groups, each pair in one of them; in the order of groups' first segments."""
    group_of = [[segment] for segment in range(count)]
    for one, other in pairs:
        # ids out of range raise, or make everything nan, where fields are read
        if 0 <= one < count and 0 <= other < count and group_of[one] is not group_of[other]:
            joined, moved = group_of[one], group_of[other]
            joined += moved
            for segment in moved:
                group_of[segment] = joined
    return [sorted(group) for group in {id(group): group for group in group_of}.values()]


def spans_of(sizes: Sequence[int], most: int) -> Spans:
    """Chunks of at most ``most`` rows of complete groups, several for a group that is longer; each near to an equal
    part of the rows that are left."""
    spans: list[tuple[slice, ...]] = []
    ends = list(itertools.accumulate(sizes))
    start, total, left = 0, sum(sizes), 0  # chunks
    while start < total:
        left = max(left, math.ceil((total - start) / most))
        first, last = bisect_right(ends, start), bisect_right(ends, start + most)
        if first == last:  # a group longer than a chunk
            end, rows = ends[first], balanced(ends[first] - start, most)
        elif ends[last - 1] == total:
            end, rows = total, most
        else:
            wanted = start + (total - start) / left
            behind = bisect_right(ends, wanted, first, last)
            end = min(ends[max(behind - 1, first) : min(behind + 1, last)], key=lambda end: abs(end - wanted))
            rows = most
        parts = slices(end - start, rows)
        spans.append(tuple([slice(start + part.start, start + part.stop) for part in parts]))
        left -= len(spans[-1])
        start = end
    return tuple(spans)
