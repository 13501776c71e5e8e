"""Normalisers and token weights as arguments of a loss: ``losses.grpo(**weights.sequence_mean(mask))``.

A loss is ``sum(m w l) / D`` over tokens: l is a token's value, and m is 1 if the token counts, else 0. The functions
return the options ``normalizer`` D and, unless all w are 1, ``token_weights`` w in the target's shape. Each docstring
begins with ``m w / D``. Counts are to be sums over all micro-batches and ranks of a step (one all-reduce): then the
micro-batches' losses add up to the loss of the step. The host never waits for the device. ``wpo`` returns weights of
pairs.
"""

from typing import Any

import torch
from torch import Tensor

from ..core.checks import check_factor, check_logprobs, check_shape, check_tensor, choice, number
from ..core.private import is_traced


def token_mean(total: float | Tensor) -> dict[str, Any]:
    """``m / total``, where ``total`` is the number of tokens that count in the whole step: DAPO."""
    return {"normalizer": _checked_count("token_mean", "total", total)}


def bnpo() -> dict[str, Any]:
    """``m / max(sum(m), 1)`` with a sum over the tokens of a call: BNPO, and the default of a loss. The loss of a step
    depends on how the step is divided into micro-batches."""
    return {}


def sequence_mean(
    mask: Tensor,
    segments: Tensor | None = None,
    num_segments: int | None = None,
    *,
    empty: str = "counted",  # or "excluded": sequences without a token that counts do not enter D
    num_sequences: float | Tensor | None = None,
) -> dict[str, Any]:
    """``m / (N_s D)``, where ``N_s`` is the number of tokens that count in the token's sequence: GRPO.

    ``mask`` bool, in target's shape: true where a token counts. A token counts if it has a target, if ``batch["mask"]``
    is true and if, with ``shift=k``, it is not among the first k of a row, which no hidden state predicts. ``segments``
    int, in the shape of ``mask``: ids of sequences below ``num_segments``, or -1 for tokens of no sequence, whose
    weight is 0. Without ``segments`` each row of the last dimension is a sequence. ``D`` is ``num_sequences``, the
    number of sequences of the whole step; None: the number of sequences of this call. ``empty="excluded"`` does not
    count sequences without a token that counts. TypeError or ValueError for wrong arguments.
    """
    function_name = "weights.sequence_mean"
    choice(function_name, "empty", empty, ("counted", "excluded"))
    check_tensor(f"mask of {function_name}", mask, optional=False)
    if mask.dtype != torch.bool or not mask.dim():
        mask_in_words = f"{mask.dim()}-d {mask.dtype}"
        raise TypeError(f"mask of {function_name} must be bool [..., tokens], got {mask_in_words}; use mask.bool()")
    sum_dtype = _sum_dtype(mask)  # exact for counts, in calls of any dtype
    if segments is None:
        if num_segments is not None:
            raise ValueError(
                f"num_segments of {function_name} goes with segments; without, rows are sequences: leave it out"
            )
        token_counts = mask.sum(-1, dtype=sum_dtype)
        counts_at_tokens = token_counts.unsqueeze(-1)
    else:
        check_tensor(f"segments of {function_name}", segments, optional=False)
        if segments.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"segments of {function_name} must be ids of int64 or int32, got {segments.dtype}")
        check_shape(
            f"segments of {function_name}", segments, segments.shape == mask.shape, f"{tuple(mask.shape)}, that of mask"
        )
        if type(num_segments) is not int or num_segments < 1:
            raise ValueError(
                f"segments of {function_name} need num_segments, an int of at least 1, got {num_segments!r}"
            )
        mask = mask & (segments >= 0)
        (token_counts,) = _segment_sums(mask, segments, num_segments, mask)
        counts_at_tokens = token_counts[torch.where(mask, segments, 0).long()]
    token_weights = torch.where(mask, 1.0 / counts_at_tokens.clamp(min=1.0), 0.0)
    if num_sequences is not None:
        normalizer = _checked_count("sequence_mean", "num_sequences", num_sequences)
    else:
        normalizer = float(token_counts.numel()) if empty == "counted" else (token_counts > 0).sum(dtype=sum_dtype)
    return {"token_weights": token_weights, "normalizer": normalizer}


def sequence_sum(num_sequences: float | Tensor) -> dict[str, Any]:
    """``m / num_sequences``: all tokens have equal weights, so that a long sequence weighs more than a short one."""
    return {"normalizer": _checked_count("sequence_sum", "num_sequences", num_sequences)}


def dr_grpo(num_sequences: float | Tensor, max_completion_length: int) -> dict[str, Any]:
    """``m / (num_sequences * max_completion_length)``: Dr. GRPO (arXiv 2503.20783). ``num_sequences`` includes
    sequences without a token that counts."""
    _checked_count("dr_grpo", "max_completion_length", max_completion_length)
    return {"normalizer": _checked_count("dr_grpo", "num_sequences", num_sequences) * max_completion_length}


def wpo(
    logprobs: Tensor, log_sum_sq_probs: Tensor, mask: Tensor, segments: Tensor, num_segments: int, pairs: Tensor
) -> Tensor:
    """``batch["pair_weights"]`` [P] of WPO (arXiv 2406.11827). The weight of a segment is ``exp`` of the mean of
    ``logprob - log sum_j p_j^2`` over the segment's tokens that count. The weight of a pair is the product of its two
    segments' weights, or 0 if one of the pair's segment ids is below 0.

    The first four arguments have the target's shape. ``logprobs`` and ``log_sum_sq_probs`` are results of
    ``linear_logprobs(..., log_sum_sq_probs=True)`` under ``torch.no_grad()``. ``mask`` is bool, true where a token
    counts. ``segments`` int: ids below ``num_segments``, or -1 for tokens of no segment. ``pairs`` [P, 2]. ValueError
    for wrong arguments.
    """
    for name, value in (("logprobs", logprobs), ("log_sum_sq_probs", log_sum_sq_probs)):
        if value.shape != mask.shape or not value.is_floating_point():
            raise ValueError(
                f"{name} of weights.wpo must be a floating-point tensor of mask's shape {tuple(mask.shape)}, got "
                f"{tuple(value.shape)}, {value.dtype}"
            )
    is_counted = mask & (segments >= 0)
    if is_counted.device.type == "cpu" and not is_traced():
        check_logprobs("logprobs of weights.wpo", logprobs[is_counted])
    log_weights = torch.where(is_counted, logprobs - log_sum_sq_probs, 0.0)
    log_sums, token_counts = _segment_sums(is_counted, segments, num_segments, log_weights, is_counted)
    segment_weights = (log_sums / token_counts.clamp(min=1.0)).exp().to(logprobs.dtype)
    return torch.where((pairs >= 0).all(1), segment_weights[pairs.clamp(min=0)].prod(1), 0.0)


def _segment_sums(is_counted: Tensor, segments: Tensor, num_segments: int, *values: Tensor) -> list[Tensor]:
    """Sums [num_segments] over the tokens where ``is_counted`` is true, for each tensor of ``values``. Sums are float64
    (``_sum_dtype``), so that the order in which a GPU adds does not change float32 results."""
    # tokens of no segment go into an extra segment at the end, which is dropped
    segment_ids = torch.where(is_counted, segments, num_segments).flatten().long()
    zeros = torch.zeros(num_segments + 1, dtype=_sum_dtype(is_counted), device=is_counted.device)
    return [zeros.index_add(0, segment_ids, addends.flatten().to(zeros.dtype))[:-1] for addends in values]


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    """Dtype of sums on a tensor's device: float64, or float32 on mps, which has no float64."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def _checked_count(function_name: str, argument: str, value: Any) -> float | Tensor:
    """Returns ``value``, an argument of a function of this module. TypeError or ValueError unless ``value`` is a number
    of at least 0 or a 0-d tensor."""
    if isinstance(value, Tensor):
        check_factor(f"{argument} of weights.{function_name}", value)
    else:
        number(f"weights.{function_name}", argument, value, 0.0)
    return value
