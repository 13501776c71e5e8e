"""Chunks that end where segments end, for segments whose lengths the host knows. A loss of segments then allows the
gradients of a chunk right after the statistics of the chunk.

Segments that a loss reads together, such as the two segments of a pair, are a group and lie in one chunk. A group that
is longer than a chunk is divided into chunks, whose logits are computed twice. Groups run in an order that fills the
matmuls' tiles.
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence

from .sizes import CHUNK_MULTIPLE, balanced, slices

MOST_SUBSTITUTES = 32  # number of groups that are tried as the last group of a chunk


Lengths = tuple[int, ...]  # tokens of each segment; segments follow each other in the flattened tokens
Pairs = tuple[tuple[int, int], ...]  # ids of two segments that a loss reads together
Group = tuple[range, ...]  # the rows of a group, a range for each segment
Spans = tuple[tuple[slice, ...], ...]  # the chunks of each span; gradients wait for the statistics of all its chunks


def groups_of(lengths: Lengths, pairs: Pairs, line_length: int, shift: int) -> tuple[Group, ...]:
    """Groups of segments, as the rows of each segment; without segments and groups that have no rows. ``line_length``:
    size of the tokens' last dimension. A row predicts the token ``shift`` places later along this dimension."""
    segment_ends = itertools.accumulate(lengths, initial=0)
    # the last ``shift`` rows of a line predict no token; they count among the rows of the segment before
    boundaries = [end - min(shift, end % line_length) for end in segment_ends]
    rows_by_segment = [range(first, last) for first, last in itertools.pairwise(boundaries)]
    groups = (
        tuple([rows_by_segment[segment] for segment in group if len(rows_by_segment[segment])])
        for group in joined_segments(pairs, len(rows_by_segment))
    )
    return tuple([group for group in groups if group])


def joined_segments(pairs: Pairs, segment_count: int) -> list[list[int]]:
    """For each group the ids of its segments, in ascending order. The two segments of a pair are in one group. Groups
    are in the order of their first segments."""
    group_by_segment = [[segment] for segment in range(segment_count)]
    for first, second in pairs:
        # ids out of range are left to ``RangeChecks`` of the tokens: they raise there, or make everything nan
        if 0 <= first < segment_count and 0 <= second < segment_count:
            joined_group, second_group = group_by_segment[first], group_by_segment[second]
            if joined_group is not second_group:
                joined_group += second_group
                for segment in second_group:
                    group_by_segment[segment] = joined_group
    return [sorted(group) for group in {id(group): group for group in group_by_segment}.values()]


def spans_of(group_sizes: Sequence[int], most_rows: int, is_reorderable: bool) -> tuple[Spans, list[int]]:
    """Returns spans, and the indices of all groups in the order in which they run. A span is a chunk of complete
    groups, at most ``most_rows`` rows; or the chunks of a single larger group. ``group_sizes``: rows of each group.
    ``is_reorderable``: groups may change places, which fills the last matmul tile of a chunk better."""
    waiting_groups, group_order, spans = [*range(len(group_sizes))], list[int](), list[tuple[slice, ...]]()
    start_row, total_rows, chunk_count = 0, sum(group_sizes), 0
    while waiting_groups:
        chunk_count = max(chunk_count, math.ceil((total_rows - start_row) / most_rows))
        target_rows = (total_rows - start_row) / chunk_count  # equal shares of the waiting rows
        end_rows = [*itertools.accumulate([group_sizes[group] for group in waiting_groups])]
        near_index = bisect_right(end_rows, target_rows)
        # a choice is a chunk of the waiting groups before ``last_index``, and of the group at ``substitute_index``
        choices = list[tuple[int, int, int]]()  # (rows, last_index, substitute_index)
        for last_index in range(max(near_index - 1, 0), min(near_index + 1, len(waiting_groups))):
            rows_before = end_rows[last_index] - group_sizes[waiting_groups[last_index]]
            substitute_stop = last_index + (MOST_SUBSTITUTES if is_reorderable else 1)
            for substitute_index in range(last_index, min(substitute_stop, len(waiting_groups))):
                span_rows = rows_before + group_sizes[waiting_groups[substitute_index]]
                if span_rows <= most_rows:
                    choices.append((span_rows, last_index, substitute_index))
        if end_rows[-1] <= most_rows:
            span_rows, last_index, substitute_index = end_rows[-1], len(waiting_groups) - 1, len(waiting_groups) - 1
        elif choices:
            # cost of a choice: empty rows of the last tile, and a quarter of the difference to equal chunks
            costs = [-rows % CHUNK_MULTIPLE + abs(rows - target_rows) / 4 for rows, _, _ in choices]
            span_rows, last_index, substitute_index = choices[costs.index(min(costs))]
        else:  # a group longer than a chunk
            span_rows, last_index, substitute_index = end_rows[0], 0, 0
        group_order += [*waiting_groups[:last_index], waiting_groups.pop(substitute_index)]
        del waiting_groups[:last_index]
        chunk_slices = slices(span_rows, balanced(span_rows, most_rows))
        spans.append(tuple([slice(start_row + chunk.start, start_row + chunk.stop) for chunk in chunk_slices]))
        chunk_count -= len(chunk_slices)
        start_row += span_rows
    return tuple(spans), group_order
