"""Segments whose lengths the host knows: chunks end where segments end, and a chunk's gradients follow its statistics.

A group of segments that belong together, as those of a pair do, is on one chunk or, where it is longer than a chunk,
on several of its own, whose logits alone are computed twice.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .plans import balanced, slices


class Segments(NamedTuple):
    """As the caller names them."""

    lengths: tuple[int, ...]  # tokens of each, in the order of the flattened tokens
    pairs: tuple[tuple[int, ...], ...] = ()  # segments that belong together


class Groups(NamedTuple):
    """Rows that belong together."""

    sizes: tuple[int, ...]  # rows of each, one after the other
    order: tuple[range, ...] | None  # the call's rows in this order, where groups do not stand together


Spans = tuple[tuple[slice, ...], ...]  # of rows: the chunks of each


def groups_of(segments: Segments, length: int, shift: int) -> Groups:
    """``length`` of the last dimension of the tokens, along which rows predict tokens ``shift`` behind them."""
    ends = itertools.accumulate(segments.lengths, initial=0)
    # rows at the end of a line predict none, and go with those before them
    starts = [end - min(shift, end % length) for end in ends]
    rows = [range(first, last) for first, last in itertools.pairwise(starts)]
    joined = joined_by(segments.pairs, len(rows))
    sizes = tuple([sum(len(rows[segment]) for segment in group) for group in joined])
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


def spans_of(sizes: Sequence[int], most: int, slack: float = 1.0) -> Spans:
    """Chunks of at most ``most`` rows that hold whole groups, several for a group that is longer; as many, where that
    can be, as there were of ``most / slack`` rows."""
    spans: list[tuple[slice, ...]] = []
    total = max(1, sum(sizes))
    aim = total / math.ceil(total * slack / most)
    start = end = 0
    for size in sizes:
        # as near to the end of an equal part as a group ends
        full = end - start + size > most or end + size / 2 > (round(start / aim) + 1) * aim
        if end > start and full:
            spans.append((slice(start, end),))
            start = end
        end += size
        if end - start > most:
            parts = slices(size, balanced(size, most))
            spans.append(tuple([slice(start + part.start, start + part.stop) for part in parts]))
            start = end
    if end > start:
        spans.append((slice(start, end),))
    return tuple(spans)
