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


def groups_of(segments: Segments, line_length: int, shift: int) -> tuple[Group, ...]:
    """The rows of each group of segments. ``line_length``: size of the tokens' last dimension; along
    it, a row predicts the token ``shift`` places later."""
    ends = itertools.accumulate(segments.lengths, initial=0)
    # the last ``shift`` rows of a line predict no token, and belong to the segment before them
    starts = [end - min(shift, end % line_length) for end in ends]
    rows_by_segment = [range(first, last) for first, last in itertools.pairwise(starts)]
    segments_by_group = joined_by(segments.pairs, len(rows_by_segment))
    groups = (
        tuple([rows_by_segment[segment] for segment in group if len(rows_by_segment[segment])])
        for group in segments_by_group
    )
    return tuple([group for group in groups if group])


def joined_by(pairs: Sequence[tuple[int, int]], segment_count: int) -> list[list[int]]:
    """Ids of the segments of each group; groups are in the order of their first segments. The two segments of a pair
    are in one group. ``segment_count``: number of segments."""
    group_of = [[segment] for segment in range(segment_count)]
    for first, second in pairs:
        # ids out of range are left to ``RangeChecks`` of the tokens: they raise there, or make everything nan
        if 0 <= first < segment_count and 0 <= second < segment_count and group_of[first] is not group_of[second]:
            joined_group, second_group = group_of[first], group_of[second]
            joined_group += second_group
            for segment in second_group:
                group_of[segment] = joined_group
    return [sorted(group) for group in {id(group): group for group in group_of}.values()]


def spans_of(sizes: Sequence[int], most_rows: int, is_free: bool) -> tuple[Spans, list[int]]:
    """Returns spans of complete groups, and the order in which groups run. ``sizes``: rows of each group. A span is one
    chunk of at most ``most_rows`` rows, or a longer group in several chunks. ``is_free``: groups may change
    places, which fills the last matmul tile of a chunk better; else they keep their order."""
    waiting, order, spans = [*range(len(sizes))], list[int](), list[tuple[slice, ...]]()
    start, total_rows, chunk_count = 0, sum(sizes), 0
    while waiting:
        chunk_count = max(chunk_count, math.ceil((total_rows - start) / most_rows))
        target_rows = (total_rows - start) / chunk_count  # equal shares of the waiting rows
        end_rows = [*itertools.accumulate([sizes[group] for group in waiting])]
        near_index = bisect_right(end_rows, target_rows)
        # a chunk has the first waiting groups up to ``last_index``, of which ``substitute_index`` may take the place
        choices = [
            (
                end_rows[last_index] - sizes[waiting[last_index]] + sizes[waiting[substitute_index]],
                last_index,
                substitute_index,
            )
            for last_index in range(max(near_index - 1, 0), min(near_index + 1, len(waiting)))
            for substitute_index in range(
                last_index, min(last_index + MOST_TRIED, len(waiting)) if is_free else last_index + 1
            )
        ]
        fitting_choices = [choice for choice in choices if choice[0] <= most_rows]
        if end_rows[-1] <= most_rows:
            span_rows, last_index, substitute_index = end_rows[-1], len(waiting) - 1, len(waiting) - 1
        elif fitting_choices:
            # cost of a choice: empty rows of the last tile, and a quarter of the difference to equal chunks
            costs = [
                -span_rows % CHUNK_MULTIPLE + abs(span_rows - target_rows) / 4 for span_rows, _, _ in fitting_choices
            ]
            span_rows, last_index, substitute_index = fitting_choices[costs.index(min(costs))]
        else:  # a group longer than a chunk
            span_rows, last_index, substitute_index = end_rows[0], 0, 0
        order += [*waiting[:last_index], waiting.pop(substitute_index)]
        del waiting[:last_index]
        chunk_slices = slices(span_rows, balanced(span_rows, most_rows))
        spans.append(tuple([slice(start + chunk.start, start + chunk.stop) for chunk in chunk_slices]))
        chunk_count -= len(chunk_slices)
        start += span_rows
    return tuple(spans), order
