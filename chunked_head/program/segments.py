"""Segments whose lengths the host knows: chunks end where segments end, and a chunk's gradients follow its statistics.

A group of segments that belong together, as those of a pair do, is on one chunk or, where it is longer than a chunk,
on several of its own, whose logits alone are computed twice.
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .memory import CHUNK_MULTIPLE
from .plans import LEAST_SLACK, balanced, slices


class Segments(NamedTuple):
    """As the caller names them."""

    lengths: tuple[int, ...]  # tokens of each, in the order of the flattened tokens
    pairs: tuple[tuple[int, ...], ...] = ()  # segments that belong together


class Groups(NamedTuple):
    """Rows that belong together."""

    sizes: tuple[int, ...]  # rows of each, one after the other
    order: tuple[range, ...] | None  # the call's rows in this order, where groups do not stand together


Spans = tuple[tuple[slice, ...], ...]  # of rows: the chunks of each


def groups_of(segments: Segments, length: int, shift: int, most: int | None = None) -> Groups:
    """``length`` of the last dimension of the tokens, along which rows predict tokens ``shift`` behind them.
    ``most``: rows of a chunk for which they may take another order; None: groups stay in theirs."""
    ends = itertools.accumulate(segments.lengths, initial=0)
    # rows at the end of a line predict none, and go with those before them
    starts = [end - min(shift, end % length) for end in ends]
    rows = [range(first, last) for first, last in itertools.pairwise(starts)]
    joined = joined_by(segments.pairs, len(rows))
    sizes = tuple([sum(len(rows[segment]) for segment in group) for group in joined])
    if most is not None:
        arranged = arrangement(sizes, most)
        joined, sizes = [joined[group] for group in arranged], tuple([sizes[group] for group in arranged])
    order = [segment for group in joined for segment in group if len(rows[segment])]
    if all(one < next for one, next in itertools.pairwise(order)):
        return Groups(sizes, None)
    return Groups(sizes, tuple([rows[segment] for segment in order]))


def order_of(ranges: Sequence[range], device: torch.device) -> Tensor:
    """[rows] int64: their numbers one after the other, made where they are needed of few that the host sends."""
    ends = itertools.accumulate(map(len, ranges))
    # by how much a row's number differs from its place
    moves = [part.stop - end for part, end in zip(ranges, ends, strict=True)]
    sent = torch.tensor([moves, list(map(len, ranges))]).to(device, non_blocking=True)
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


def arrangement(sizes: Sequence[int], most: int) -> Sequence[int]:
    """Numbers of groups in their order, or in one in which chunks of at most ``most`` rows leave fewer rows of tiles
    empty."""
    as_they_stand = range(len(sizes))
    if sum(sizes) <= most:
        return as_they_stand
    orders = as_they_stand, filling(sizes, most)
    return min(orders, key=lambda order: cost_of(spans_of([sizes[group] for group in order], most, LEAST_SLACK)))


def filling(sizes: Sequence[int], most: int) -> list[int]:
    """Numbers of groups, one chunk's after the other: from those that come next a set whose rows fill whole tiles.
    What sets of them add up to are bits of a number, bit ``n`` for ``n`` rows."""
    order = [group for group, size in enumerate(sizes) if size > most]
    waiting = [group for group, size in enumerate(sizes) if size <= most]
    rest = sum(sizes[group] for group in waiting)
    while rest > most:
        reach, seen = [1], 0
        for group in waiting:
            reach.append((reach[-1] | reach[-1] << sizes[group]) & (2 << most) - 1)
            seen += sizes[group]
            if seen > 2 * most:
                break
        rows = best_sum(reach[-1], rest / math.ceil(rest / most * LEAST_SLACK), most)
        rest -= rows
        taken = set[int]()
        for group, before in zip(reversed(waiting[: len(reach) - 1]), reversed(reach[:-1]), strict=True):
            if not before >> rows & 1:
                taken.add(group)
                rows -= sizes[group]
        order += sorted(taken)
        waiting = [group for group in waiting if group not in taken]
    return order + waiting


def best_sum(sums: int, wanted: float, most: int) -> int:
    """Of these sums the one near to ``wanted`` that leaves the fewest rows of a tile empty, else the largest."""
    least = max(0, int(2 * wanted - most)) // CHUNK_MULTIPLE + 1
    whole = [tiles * CHUNK_MULTIPLE for tiles in range(least, most // CHUNK_MULTIPLE + 1)]
    whole.sort(key=lambda rows: abs(rows - wanted))
    near = (rows - empty for empty in range(CHUNK_MULTIPLE) for rows in whole)
    return next((rows for rows in near if sums >> rows & 1), sums.bit_length() - 1)


def spans_of(sizes: Sequence[int], most: int, slack: float = 1.0) -> Spans:
    """Chunks of at most ``most`` rows that hold whole groups, several for a group that is longer; as many, where that
    can be, as there were of ``most / slack`` rows, and with few rows of tiles that are empty."""
    return min((cut(sizes, most, slack, spare) for spare in (1.0, 0.0)), key=cost_of)


def cost_of(spans: Spans) -> tuple[int, int]:
    """Chunks, and rows of tiles that are empty."""
    chunks = [chunk for span in spans for chunk in span]
    return len(chunks), sum((chunk.start - chunk.stop) % CHUNK_MULTIPLE for chunk in chunks)


def cut(sizes: Sequence[int], most: int, slack: float, spare: float) -> Spans:
    """``spare``: of the rows that chunks may have more than equal ones the share that one may have fewer, so that its
    tiles are full: those behind it make up for it."""
    spans: list[tuple[slice, ...]] = []
    ends = list(itertools.accumulate(sizes))
    start, total = 0, sum(sizes)
    left = math.ceil(total * slack / most)  # chunks
    while start < total:
        left = max(left, math.ceil((total - start) / most))
        wanted = (total - start) / left
        first = bisect_right(ends, start)
        fitting = ends[first : bisect_right(ends, start + most)]
        end = fitting[-1] if fitting else ends[first]
        if fitting and end < total:
            end = min(fitting, key=lambda end: chunk_cost(end - start, wanted, spare * (most - wanted)))
        parts = slices(end - start, most if fitting else balanced(end - start, most))
        spans.append(tuple([slice(start + part.start, start + part.stop) for part in parts]))
        left -= len(spans[-1])
        start = end
    return tuple(spans)


def chunk_cost(rows: int, wanted: float, spare: float) -> tuple[float, ...]:
    """Of chunks with other ends the best comes first: by as many rows as it is farther than ``spare`` from those
    wanted, then by rows that a tile computes in vain."""
    away = abs(rows - wanted)
    return max(away - spare, 0), -rows % CHUNK_MULTIPLE, away
