"""Lengths of segments that the caller knows, in the place of each token's segment."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..engine.head_options import HeadOptions
from ..program.segments import Segments


def with_segments(
    head: HeadOptions, batch: Any, num_segments: int | None, segment_lengths: Sequence[int] | Tensor | None
) -> tuple[Any, int | None, Segments | None]:
    """``batch`` with ``segments``, their number, and what the host knows of them."""
    if segment_lengths is None or (batch is not None and not isinstance(batch, Mapping)):
        return batch, num_segments, None  # the call raises what is wrong with the batch
    lengths, tokens = numbers(segment_lengths), math.prod(head.leading)
    if num_segments is not None or "segments" in (batch or {}):
        raise ValueError("segment_lengths say which tokens are a segment: leave out num_segments and batch['segments']")
    if head.tokens is not None or (head.shard is not None and head.shard.parallel.sequence_sharded):
        raise ValueError(
            "segment_lengths are of all tokens of the batch, and with TokenParallel or sequence_sharded=True each rank "
            "holds others: pass batch['segments'] and num_segments"
        )
    if head.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "segment_lengths are other numbers at every step, and a CUDA graph would keep these: pass "
            "batch['segments'] and num_segments"
        )
    if not lengths or min(lengths) < 0 or sum(lengths) != tokens:
        raise ValueError(
            f"segment_lengths must be of one segment or more and add up to the tokens, {tokens}, padding and prompts "
            f"among them, got {len(lengths)} that add up to {sum(lengths)}, the least {min(lengths, default=0)}"
        )
    fields, pairs = dict(batch or {}), pairs_of(batch or {})
    if pairs is not None:
        fields["pairs"] = pairs.to(head.device, non_blocking=True)
    counts = torch.tensor(lengths).to(head.device, non_blocking=True)
    ids = torch.arange(len(lengths), device=head.device)
    fields["segments"] = torch.repeat_interleave(ids, counts, output_size=tokens).view(head.leading)
    together = () if pairs is None else tuple(map(tuple, pairs.tolist()))
    return fields, len(lengths), Segments(lengths, together)


def numbers(lengths: Any) -> tuple[int, ...]:
    """The lengths, checked."""
    given = lengths
    if isinstance(lengths, Tensor):
        if lengths.device.type != "cpu" or lengths.dim() != 1 or lengths.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                "segment_lengths must be a list of ints or a one-dimensional int tensor on the CPU, since the host "
                f"decides by them where chunks end, got {lengths.dim()}-d {lengths.dtype} on {lengths.device}"
            )
        given = lengths.tolist()
    if not isinstance(given, Sequence) or not all(type(one) is int for one in given):
        raise TypeError(f"segment_lengths must be a list of ints or an int tensor on the CPU, got {lengths!r}")
    return tuple(given)


def pairs_of(batch: Mapping[str, Any]) -> Tensor | None:
    """``batch["pairs"]`` on the CPU, if it is there; what else is wrong with it, the call says."""
    pairs = batch.get("pairs")
    if not isinstance(pairs, Tensor) or pairs.dim() != 2:
        return None
    if pairs.device.type != "cpu":
        raise ValueError(
            f"batch['pairs'] must be on the CPU beside segment_lengths, got {pairs.device}: the host decides by the "
            "segments that belong together where chunks end"
        )
    return pairs
