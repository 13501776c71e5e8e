"""Segments whose lengths the host knows: chunks end where segments end, and a chunk's gradients follow its statistics.

Segments that belong together, such as a pair's, are a group on one chunk. A group longer than a chunk has several of
its own, and only their logits are computed twice. Groups run in an order that fills the matmuls' tiles.
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from .sizes import CHUNK_MULTIPLE, balanced, slices

MOST_TRIED = 32  # groups, for the place of a chunk's last one


class Segments(NamedTuple):
    """Segments of a call as its caller names them."""

    lengths: tuple[int, ...]  # tokens of each, in the order of the flattened tokens
    pairs: tuple[tuple[int, int], ...] = ()  # segments that belong together


Group = tuple[range, ...]  # rows that belong together, by segment
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


def spans_of(sizes: Sequence[int], most: int, free: bool) -> tuple[Spans, list[int]]:
    """Chunks of at most ``most`` rows of complete groups (several for a longer one), and the order of groups: their own
    or, where they are ``free``, one that fills the last tiles of chunks better."""
    left, order, spans = [*range(len(sizes))], list[int](), list[tuple[slice, ...]]()
    start, total, chunks = 0, sum(sizes), 0
    while left:
        chunks = max(chunks, math.ceil((total - start) / most))
        wanted = (total - start) / chunks  # near to equal parts of the rows that are left
        ends = [*itertools.accumulate([sizes[group] for group in left])]
        near = bisect_right(ends, wanted)
        # a chunk: the first groups up to ``last``, in whose place another may come
        choices = [
            (ends[last] - sizes[left[last]] + sizes[left[other]], last, other)
            for last in range(max(near - 1, 0), min(near + 1, len(left)))
            for other in range(last, min(last + MOST_TRIED, len(left)) if free else last + 1)
        ]
        fitting = [choice for choice in choices if choice[0] <= most]
        if ends[-1] <= most:
            rows, last, other = ends[-1], len(left) - 1, len(left) - 1
        elif fitting:
            # rows that its last tile computes in vain weigh more than those by which chunks differ
            vain = [-rows % CHUNK_MULTIPLE + abs(rows - wanted) / 4 for rows, _, _ in fitting]
            rows, last, other = fitting[vain.index(min(vain))]
        else:  # a group longer than a chunk
            rows, last, other = ends[0], 0, 0
        order += [*left[:last], left.pop(other)]
        del left[:last]
        parts = slices(rows, balanced(rows, most))
        spans.append(tuple([slice(start + part.start, start + part.stop) for part in parts]))
        chunks -= len(parts)
        start += rows
    return tuple(spans), order
