"""Chunks that end where segments end, for segments whose lengths the host knows. Gradients of a chunk are then made
right after its statistics.

Segments that belong together, such as the two of a pair, are a group and lie in one chunk. A group longer than a chunk
has several chunks for itself, whose logits are computed twice. Groups run in an order that fills the matmuls' tiles.
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from .sizes import CHUNK_MULTIPLE, balanced, slices

MOST_TRIED = 32  # number of groups that are tried as the last one of a chunk


class Segments(NamedTuple):
    """The lengths and pairs of a call's segments."""

    lengths: tuple[int, ...]  # tokens of each segment; segments follow each other in the flattened tokens
    pairs: tuple[tuple[int, int], ...] = ()  # ids of segments that belong together


Group = tuple[range, ...]  # rows that belong together, one range for each segment
Spans = tuple[tuple[slice, ...], ...]  # for each span its chunks: their gradients wait for each other's statistics


def groups_of(segments: Segments, length: int, shift: int) -> tuple[Group, ...]:
    """The rows of each group of segments. ``length``: size of the tokens' last dimension; along it, a row predicts the
    token ``shift`` places later."""
    ends = itertools.accumulate(segments.lengths, initial=0)
    # the last ``shift`` rows of a line predict no token, and belong to the segment before them
    starts = [end - min(shift, end % length) for end in ends]
    rows = [range(first, last) for first, last in itertools.pairwise(starts)]
    joined = joined_by(segments.pairs, len(rows))
    groups = (tuple([rows[segment] for segment in group if len(rows[segment])]) for group in joined)
    return tuple([group for group in groups if group])


def joined_by(pairs: Sequence[tuple[int, int]], count: int) -> list[list[int]]:
    """Groups of segments in the order of their first segments. The two segments of a pair are in one group."""
    group_of = [[segment] for segment in range(count)]
    for first, second in pairs:
        # ids out of range are left to ``RangeChecks`` of the tokens: they raise there, or make everything nan
        if 0 <= first < count and 0 <= second < count and group_of[first] is not group_of[second]:
            joined, moved = group_of[first], group_of[second]
            joined += moved
            for segment in moved:
                group_of[segment] = joined
    return [sorted(group) for group in {id(group): group for group in group_of}.values()]


def spans_of(sizes: Sequence[int], most: int, free: bool) -> tuple[Spans, list[int]]:
    """Returns spans of complete groups, and the order in which groups run. ``sizes``: rows of each group. A span is one
    chunk of at most ``most`` rows, or a longer group in several chunks. ``free``: groups may change places, which fills
    the last matmul tile of a chunk better; else they keep their order."""
    waiting, order, spans = [*range(len(sizes))], list[int](), list[tuple[slice, ...]]()
    start, total, chunks = 0, sum(sizes), 0
    while waiting:
        chunks = max(chunks, math.ceil((total - start) / most))
        target_rows = (total - start) / chunks  # equal shares of the waiting rows
        ends = [*itertools.accumulate([sizes[group] for group in waiting])]
        near = bisect_right(ends, target_rows)
        # a chunk has the first waiting groups up to ``last``, where ``substitute`` may take the place of ``last``
        choices = [
            (ends[last] - sizes[waiting[last]] + sizes[waiting[substitute]], last, substitute)
            for last in range(max(near - 1, 0), min(near + 1, len(waiting)))
            for substitute in range(last, min(last + MOST_TRIED, len(waiting)) if free else last + 1)
        ]
        fitting = [choice for choice in choices if choice[0] <= most]
        if ends[-1] <= most:
            rows, last, substitute = ends[-1], len(waiting) - 1, len(waiting) - 1
        elif fitting:
            # cost of a choice: empty rows of the last tile, and a quarter of the difference to equal chunks
            vain = [-rows % CHUNK_MULTIPLE + abs(rows - target_rows) / 4 for rows, _, _ in fitting]
            rows, last, substitute = fitting[vain.index(min(vain))]
        else:  # a group longer than a chunk
            rows, last, substitute = ends[0], 0, 0
        order += [*waiting[:last], waiting.pop(substitute)]
        del waiting[:last]
        chunk_slices = slices(rows, balanced(rows, most))
        spans.append(tuple([slice(start + chunk.start, start + chunk.stop) for chunk in chunk_slices]))
        chunks -= len(chunk_slices)
        start += rows
    return tuple(spans), order
