"""Segments whose lengths the host knows: chunks end where segments end, and a chunk's gradients follow its statistics.

A group of segments that belong together, as those of a pair do, is on one chunk or, where it is longer than a chunk,
on several of its own, whose logits alone are computed twice. A tile of a matmul has 128 rows and takes as long where
some of them are empty. So chunks end where tiles do, if groups add up so in their own order or in another.
"""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .memory import CHUNK_MULTIPLE
from .plans import balanced, slices

FEW = 64  # groups among which sets are looked for


class Segments(NamedTuple):
    """As the caller names them."""

    lengths: tuple[int, ...]  # tokens of each, in the order of the flattened tokens
    pairs: tuple[tuple[int, ...], ...] = ()  # segments that belong together


Group = tuple[range, ...]  # of a call's rows that belong together: those of each of its segments
Spans = tuple[tuple[slice, ...], ...]  # of rows: the chunks of each


def groups_of(segments: Segments, length: int, shift: int) -> tuple[Group, ...]:
    """``length`` of the last dimension of the tokens, along which rows predict tokens ``shift`` behind them."""
    ends = itertools.accumulate(segments.lengths, initial=0)
    # rows at the end of a line predict none, and go with those before them
    starts = [end - min(shift, end % length) for end in ends]
    rows = [range(first, last) for first, last in itertools.pairwise(starts)]
    joined = joined_by(segments.pairs, len(rows))
    groups = (tuple([rows[segment] for segment in group if len(rows[segment])]) for group in joined)
    return tuple([group for group in groups if group])


def order_of(ranges: Sequence[range], device: torch.device) -> Tensor:
    """[rows] int64: their numbers one after the other, made where they are needed of few that the host sends."""
    ends = itertools.accumulate(map(len, ranges))
    # by how much a row's number differs from its place
    moves = [part.stop - end for part, end in zip(ranges, ends, strict=True)]
    sent = torch.tensor([moves, list(map(len, ranges))], dtype=torch.int64).to(device, non_blocking=True)
    total = sum(map(len, ranges))
    return torch.repeat_interleave(sent[0], sent[1], output_size=total) + torch.arange(total, device=device)


def joined_by(pairs: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Segments in groups, each pair in one of them; in the order of groups' first segments."""
    first = list(range(count))  # of the group of each, or one that knows it

    def of(segment: int) -> int:
        while first[segment] != segment:
            first[segment] = first[first[segment]]
            segment = first[segment]
        return segment

    for pair in pairs:
        one, *others = [of(segment) for segment in pair if 0 <= segment < count] or [0]
        for other in others:
            one, other = min(one, other), max(one, other)
            first[other] = one
    groups: dict[int, list[int]] = {}
    for segment in range(count):
        groups.setdefault(of(segment), []).append(segment)
    return list(groups.values())


def arranged(
    groups: Sequence[Group], most: int, slack: float = 1.0, may_move: bool = False
) -> tuple[Sequence[Group], Spans]:
    """Groups and the chunks that hold them, by ``spans_of``: in their order, or where they ``may_move`` in another if
    that makes fewer chunks, or chunks with fewer empty rows in their last tiles."""
    sizes = [sum(map(len, group)) for group in groups]
    orders: list[Sequence[int]] = [range(len(sizes))]
    if may_move:
        orders.append(filling(sizes, most, slack))
    found = [(order, spans_of([sizes[i] for i in order], most, slack)) for order in orders]
    order, spans = min(found, key=lambda each: waste(each[1]))
    return [groups[i] for i in order], spans


def waste(spans: Spans) -> tuple[int, int]:
    """How many chunks there are, and how many rows of their last tiles are empty."""
    chunks = [chunk for span in spans for chunk in span]
    return len(chunks), sum(empty_rows(chunk.stop - chunk.start) for chunk in chunks)


def empty_rows(rows: int) -> int:
    """Rows of a chunk's last tile that it does not fill."""
    return -rows % CHUNK_MULTIPLE


def filling(sizes: Sequence[int], most: int, slack: float) -> list[int]:
    """Numbers of groups, none empty, one chunk's after the other: of those that come next a set whose rows fill whole
    tiles. Many small ones are taken as they come, and a set of ``FEW`` makes up the rest."""
    order = [group for group, size in enumerate(sizes) if size > most]
    waiting = deque(group for group, size in enumerate(sizes) if size <= most)
    rest = sum(sizes[group] for group in waiting)
    while rest > most:
        wanted = rest / math.ceil(rest * slack / most)
        taken, rows = [], 0
        while rows + FEW / 4 * sizes[waiting[0]] <= wanted:
            taken.append(waiting.popleft())
            rows += sizes[taken[-1]]
        near = [waiting.popleft() for _ in range(min(FEW, len(waiting)))]
        # bit n: whether groups before one, each in or out, make n rows with those that are taken; up to ``most``
        sums = [1 << rows]
        for group in near:
            sums.append((sums[-1] | sums[-1] << sizes[group]) & ((2 << most) - 1))
        missing = total = best_sum(sums[-1], wanted, most)
        for group, before in zip(reversed(near), reversed(sums[:-1]), strict=True):
            if before >> missing & 1:  # without it
                waiting.appendleft(group)
            else:
                taken.append(group)
                missing -= sizes[group]
        order += sorted(taken)
        rest -= total
    return order + list(waiting)


def best_sum(sums: int, wanted: float, most: int) -> int:
    """Of the sums whose bits are set one that leaves as few rows of a tile empty as any that is as near to ``wanted``
    as ``most``, or else the largest."""
    first = max(0, int(2 * wanted - most)) // CHUNK_MULTIPLE + 1
    whole = [tiles * CHUNK_MULTIPLE for tiles in range(first, most // CHUNK_MULTIPLE + 1)]
    whole.sort(key=lambda rows: abs(rows - wanted))
    near = (rows - vain for vain in range(CHUNK_MULTIPLE) for rows in whole)
    return next((rows for rows in near if sums >> rows & 1), sums.bit_length() - 1)


def spans_of(sizes: Sequence[int], most: int, slack: float = 1.0) -> Spans:
    """Chunks of at most ``most`` rows that hold whole groups, several for a group that is longer; as many, where that
    can be, as there were of ``most / slack`` rows, and with few empty rows in their last tiles."""
    return min((cut(sizes, most, slack, spare) for spare in (1.0, 0.0)), key=waste)


def cut(sizes: Sequence[int], most: int, slack: float, spare: float) -> Spans:
    """Chunk by chunk, each near to an equal part of the rows that are left. ``spare``: it may differ from that by this
    share of what chunks may have more than equal ones, if its tiles are fuller then: those behind it make up for it."""
    spans: list[tuple[slice, ...]] = []
    ends = list(itertools.accumulate(sizes))
    start, total = 0, sum(sizes)
    left = math.ceil(total * slack / most)  # chunks
    while start < total:
        left = max(left, math.ceil((total - start) / most))
        first, last = bisect_right(ends, start), bisect_right(ends, start + most)
        if first == last:  # a group longer than a chunk
            end, rows = ends[first], balanced(ends[first] - start, most)
        elif ends[last - 1] == total:
            end, rows = total, most
        else:
            wanted = start + (total - start) / left
            free = spare * (start + most - wanted)
            near = ends[bisect_left(ends, wanted - free, first, last) : bisect_right(ends, wanted + free, first, last)]
            if near:
                end = min(near, key=lambda end: (empty_rows(end - start), abs(end - wanted)))
            else:
                behind = bisect_right(ends, wanted, first, last)
                end = min(ends[max(behind - 1, first) : min(behind + 1, last)], key=lambda end: abs(end - wanted))
            rows = most
        parts = slices(end - start, rows)
        spans.append(tuple([slice(start + part.start, start + part.stop) for part in parts]))
        left -= len(spans[-1])
        start = end
    return tuple(spans)
