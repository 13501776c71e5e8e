"""Normalisers and token weights as arguments of a loss: ``losses.grpo(**weights.sequence_mean(mask))``.

A loss is ``sum(m w l) / D``, m 1 where a token counts. Each function returns the options ``normalizer`` D and, unless
it is 1, ``token_weights`` w of the target's shape. Totals are arguments: pass those over all micro-batches and ranks of
a step (one all-reduce of counts), so that the losses of all micro-batches and ranks add up to the step's. The host
never waits for the device.
"""

from typing import Any

import torch
from torch import Tensor

from ..core.checks import check_factor, check_logprobs, check_shape, check_tensor, choice, number
from ..core.private import is_traced


def token_mean(total: float | Tensor) -> dict[str, Any]:
    """``m / total``, where ``total`` is the number of tokens that count in the whole step: DAPO."""
    return {"normalizer": _count("token_mean", "total", total)}


def bnpo() -> dict[str, Any]:
    """``m / sum(m)`` over the tokens of this call, a sum of at least 1: BNPO, and the default of a loss. The result
    depends on how a step is divided into micro-batches."""
    return {}


def sequence_mean(
    mask: Tensor,
    segments: Tensor | None = None,
    num_segments: int | None = None,
    *,
    empty: str = "counted",
    num_sequences: float | Tensor | None = None,
) -> dict[str, Any]:
    """``m / (N_s D)``, where ``N_s`` is the number of tokens that count in the token's sequence: GRPO.

    ``mask`` bool, of target's shape: true where a token counts, that is, where it has a target, ``batch["mask"]`` is
    true and, with ``shift=k``, it is none of the first k of a row, which no hidden state predicts. ``segments`` int, of
    the same shape: the token's sequence, an id below ``num_segments``, or -1 for none (weight 0). Without ``segments``
    each row of the last dimension is a sequence. ``D`` is ``num_sequences``, the number of sequences of the whole step;
    None: of this call. Of these, ``empty="excluded"`` leaves out sequences without a token that counts.
    """
    where = "weights.sequence_mean"
    choice(where, "empty", empty, ("counted", "excluded"))
    check_tensor(f"mask of {where}", mask, optional=False)
    if mask.dtype != torch.bool or not mask.dim():
        description = f"{mask.dim()}-d {mask.dtype}"
        raise TypeError(f"mask of {where} must be bool [..., tokens], got {description}; use mask.bool()")
    wide = _wide(mask)  # exact for counts, in calls of any dtype
    if segments is None:
        if num_segments is not None:
            raise ValueError(f"num_segments of {where} goes with segments; without, rows are sequences: leave it out")
        counts = mask.sum(-1, dtype=wide)
        per_token = counts.unsqueeze(-1)
    else:
        check_tensor(f"segments of {where}", segments, optional=False)
        if segments.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"segments of {where} must be ids of int64 or int32, got {segments.dtype}")
        check_shape(
            f"segments of {where}", segments, segments.shape == mask.shape, f"{tuple(mask.shape)}, that of mask"
        )
        if type(num_segments) is not int or num_segments < 1:
            raise ValueError(f"segments of {where} need num_segments, an int of at least 1, got {num_segments!r}")
        mask = mask & (segments >= 0)
        (counts,) = _segment_sums(mask, segments, num_segments, mask)
        per_token = counts[torch.where(mask, segments, 0).long()]
    token_weights = torch.where(mask, 1.0 / per_token.clamp(min=1.0), 0.0)
    if num_sequences is not None:
        normalizer = _count("sequence_mean", "num_sequences", num_sequences)
    else:
        normalizer = float(counts.numel()) if empty == "counted" else (counts > 0).sum(dtype=wide)
    return {"token_weights": token_weights, "normalizer": normalizer}


def sequence_sum(num_sequences: float | Tensor) -> dict[str, Any]:
    """``m / num_sequences``: all tokens have equal weights, and a long sequence counts more."""
    return {"normalizer": _count("sequence_sum", "num_sequences", num_sequences)}


def dr_grpo(num_sequences: float | Tensor, max_completion_length: int) -> dict[str, Any]:
    """``m / (num_sequences * max_completion_length)``, where empty sequences count too: Dr. GRPO (arXiv 2503.20783)."""
    _count("dr_grpo", "max_completion_length", max_completion_length)
    return {"normalizer": _count("dr_grpo", "num_sequences", num_sequences) * max_completion_length}


def wpo(
    logprobs: Tensor, log_sum_sq_probs: Tensor, mask: Tensor, segments: Tensor, num_segments: int, pairs: Tensor
) -> Tensor:
    """``batch["pair_weights"]`` [P] of WPO (arXiv 2406.11827): the product of both segments' weights, each ``exp`` of
    the segment's mean of ``logprob - log sum_j p_j^2``; 0 for pairs with an id below 0.

    ``logprobs`` and ``log_sum_sq_probs`` are those of ``linear_logprobs(..., log_sum_sq_probs=True)`` under
    ``torch.no_grad()``. They have target's shape, as have ``mask`` bool, true where a token counts, and ``segments``
    int, ids below ``num_segments`` or -1 for none. ``pairs`` [P, 2].
    """
    for name, value in (("logprobs", logprobs), ("log_sum_sq_probs", log_sum_sq_probs)):
        if value.shape != mask.shape or not value.is_floating_point():
            raise ValueError(
                f"{name} of weights.wpo must be a floating-point tensor of mask's shape {tuple(mask.shape)}, got "
                f"{tuple(value.shape)}, {value.dtype}"
            )
    counts_in_segment = mask & (segments >= 0)
    if counts_in_segment.device.type == "cpu" and not is_traced():
        check_logprobs("logprobs of weights.wpo", logprobs[counts_in_segment])
    aligned = torch.where(counts_in_segment, logprobs - log_sum_sq_probs, 0.0)
    sums, counts = _segment_sums(counts_in_segment, segments, num_segments, aligned, counts_in_segment)
    of_segments = (sums / counts.clamp(min=1.0)).exp().to(logprobs.dtype)
    return torch.where((pairs >= 0).all(1), of_segments[pairs.clamp(min=0)].prod(1), 0.0)


def _segment_sums(is_counted: Tensor, segments: Tensor, num_segments: int, *values: Tensor) -> list[Tensor]:
    """Sums [num_segments] of each of ``values`` over the tokens ``is_counted``. They add up in float64, so that the
    order in which a GPU adds does not change float32 results."""
    # tokens of no segment go into an extra last one, which is dropped
    ids = torch.where(is_counted, segments, num_segments).flatten().long()
    zeros = torch.zeros(num_segments + 1, dtype=_wide(is_counted), device=is_counted.device)
    return [zeros.index_add(0, ids, x.flatten().to(zeros.dtype))[:-1] for x in values]


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def _count(where: str, argument: str, value: Any) -> float | Tensor:
    if isinstance(value, Tensor):
        check_factor(f"{argument} of weights.{where}", value)
    else:
        number(f"weights.{where}", argument, value, 0.0)
    return value
