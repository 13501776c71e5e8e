"""Arguments of public functions that become fields of the batch: ``mask``, ``token_weights``, ``candidates``,
``segment_lengths``."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..call.options import Call
from ..core import checks
from ..core.checks import flag


def with_fields(batch: Any, mask: Tensor | None, token_weights: Tensor | None) -> Any:
    """The batch with the arguments ``mask`` and ``token_weights`` as fields, unless they are None. ValueError if the
    batch has a field of the same name already."""
    if not (batch is None or isinstance(batch, Mapping)):
        return batch  # the call's checks raise for a batch of another type
    fields, arguments = dict(batch or {}), {"mask": mask, "token_weights": token_weights}
    for name, value in arguments.items():
        if value is not None and fields.get(name) is not None:
            raise ValueError(f"{name} stands in batch and in an argument of its own; pass one of them")
    return fields | {name: value for name, value in arguments.items() if value is not None}


def with_candidates(call: Call[Any], candidates: Tensor | None, candidate_bias: Tensor | None) -> Call[Any]:
    """The call with two fields: ``kept_ids``, the candidates of each token, and ``candidate_bias``. TypeError or
    ValueError for wrong candidates."""
    flag("kept_everywhere", call.kept_everywhere)
    batch: Any = call.batch
    if candidates is None:
        if candidate_bias is not None:
            raise ValueError("candidate_bias goes with candidates, which are missing; pass both, or neither")
        return call
    checks.check_tensor("candidates", candidates, optional=False)
    checks.check_tensor("candidate_bias", candidate_bias, optional=True)
    if candidates.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"candidates must be ids, int64 or int32, got {candidates.dtype}; cast them")
    if any((batch or {}).get(name) is not None for name in ("kept_ids", "kept_offsets")):
        raise ValueError("candidates are sets that all tokens keep, and kept_ids are others; pass one of them")
    shape = tuple(candidates.shape)
    if not shape or shape[-1] == 0 or (len(shape) > 1 and shape[:-1] != tuple(call.token_shape)):
        raise ValueError(
            f"candidates must be [K], or the target's shape {call.token_shape} and one more dimension, K at least 1, "
            f"got {shape}"
        )
    if candidate_bias is not None and tuple(candidate_bias.shape) != shape:
        raise ValueError(
            f"candidate_bias must have the shape of candidates, {shape}, got {tuple(candidate_bias.shape)}"
        )
    fields = {"kept_ids": candidates, "candidate_bias": candidate_bias}
    set_shape = *call.token_shape, shape[-1]  # candidates [K] are expanded to [..., K]
    expanded_fields = {name: value.expand(set_shape) for name, value in fields.items() if value is not None}
    return replace(call, batch={**(batch or {}), **expanded_fields}, kept_everywhere=True)


def with_segments(call: Call[Any], segment_lengths: Sequence[int] | Tensor) -> Call[Any]:
    """The call with segments of the lengths ``segment_lengths``. Sets the batch's field ``segments`` to each token's
    segment, ``Call.num_segments`` to their number, and ``Call.segments`` to the lengths and pairs as Python numbers.
    TypeError or ValueError for wrong lengths, and for a call that cannot take lengths (``TokenParallel``)."""
    batch: Any = call.batch
    lengths, num_tokens = lengths_as_ints(segment_lengths), math.prod(call.token_shape)
    if "segments" in (batch or {}):
        raise ValueError("segment_lengths say which tokens are a segment: leave out batch['segments']")
    if call.token_parallel is not None or call.sequence_sharded:
        raise ValueError(
            "segment_lengths are of all tokens of the batch, and with TokenParallel or sequence_sharded=True each rank "
            "holds others: pass batch['segments'] and num_segments"
        )
    if call.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "segment_lengths are other numbers at every step, and a CUDA graph would keep these: pass "
            "batch['segments'] and num_segments"
        )
    lengths = lengths_of_segments(lengths, num_tokens, call.num_segments)
    if not lengths or min(lengths) < 0 or sum(lengths) != num_tokens:
        raise ValueError(
            f"segment_lengths must be of one segment or more and add up to the tokens, {num_tokens}, padding and "
            f"prompts among them, or grow from 0 to {num_tokens} as cu_seqlens do, got {len(lengths)} that add up to "
            f"{sum(lengths)}, the least {min(lengths, default=0)}; give tokens that belong to none a segment of their "
            "own"
        )
    if call.num_segments not in (None, len(lengths)):
        raise ValueError(f"num_segments is {call.num_segments}, segment_lengths are of {len(lengths)}; leave it out")
    fields, pairs_on_host = dict(batch or {}), tuple[tuple[int, int], ...]()
    pairs = fields.get("pairs")
    if isinstance(pairs, Tensor) and pairs.shape[1:] == (2,):  # the call's checks raise for any others
        if pairs.device.type != "cpu":
            raise ValueError(
                f"batch['pairs'] must be on the CPU beside segment_lengths, got {pairs.device}: the host decides by "
                "segments that belong together where chunks end; pass .cpu()"
            )
        pairs_on_host = tuple([(chosen, rejected) for chosen, rejected in pairs.tolist()])
        fields["pairs"] = pairs.to(call.device, non_blocking=True)
    device_lengths = torch.tensor(lengths, device="cpu").to(call.device, non_blocking=True)
    segment_ids = torch.arange(len(lengths), device=call.device)
    token_segments = torch.repeat_interleave(segment_ids, device_lengths, output_size=num_tokens)
    fields["segments"] = token_segments.view(call.token_shape)
    return replace(call, batch=fields, num_segments=len(lengths), segments=(lengths, pairs_on_host))


def lengths_of_segments(lengths: tuple[int, ...], num_tokens: int, num_segments: int | None) -> tuple[int, ...]:
    """Lengths of segments: ``lengths`` unchanged; or the differences of ``lengths``, if these are attention's
    cu_seqlens, which grow from 0 to ``num_tokens``. ValueError for numbers that could be either lengths or cu_seqlens,
    unless ``num_segments`` decides."""
    differences = tuple([end - begin for begin, end in itertools.pairwise(lengths)])
    if not differences or lengths[0] != 0 or lengths[-1] != num_tokens or min(differences) < 0:
        return lengths
    if sum(lengths) == num_tokens and num_segments not in (len(lengths), len(differences)):
        raise ValueError(
            f"segment_lengths {list(lengths)} are lengths of {len(lengths)} segments, the last of all tokens, and "
            f"cu_seqlens of {len(differences)}; pass num_segments={len(lengths)} or {len(differences)}"
        )
    return lengths if sum(lengths) == num_tokens and num_segments == len(lengths) else differences


def lengths_as_ints(lengths: Any) -> tuple[int, ...]:
    """Segment lengths as a tuple of ints; TypeError or ValueError unless ``lengths`` is a list of ints or an int tensor
    on the CPU."""
    length_values = lengths
    if isinstance(lengths, Tensor):
        if lengths.device.type != "cpu" or lengths.dim() != 1 or lengths.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                "segment_lengths must be a list of ints or a one-dimensional int tensor on the CPU, since the host "
                f"decides by them where chunks end, got {lengths.dim()}-d {lengths.dtype} on {lengths.device}"
            )
        length_values = lengths.tolist()
    if not isinstance(length_values, Sequence) or not all(type(length) is int for length in length_values):
        raise TypeError(f"segment_lengths must be a list of ints or an int tensor on the CPU, got {lengths!r}")
    return tuple(length_values)
