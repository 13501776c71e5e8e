"""Normalisers of policy losses as arguments of a loss: ``losses.grpo(**weights.sequence_mean(mask))``.

A loss is ``sum(m w l) / D``. Each function gives ``normalizer`` D and, where it differs from 1, ``token_weights`` w of
the target's shape. What counts is global: with micro-batches and ranks, pass totals over all of them (one all-reduce of
the data's own counts); then shares add up, whatever the split. Nothing here waits for the device.
"""

import math
from typing import Any

import torch
from torch import Tensor


def token_mean(total: float | Tensor) -> dict[str, Any]:
    """``m / total``, ``total`` the tokens that count in the whole step: DAPO (TRL, Liger: dapo, cispo, vespo), verl's
    token-mean, OpenRLHF, NeMo-RL, Fast-LLM's GRPO.

    TRL divides by ``num_items_in_batch`` over the number of processes, because it averages gradients over them. With
    verl's fixed ``loss_scale_factor`` as ``total`` it is seq-mean-token-sum-norm.
    """
    return {"normalizer": _count("token_mean", "total", total)}


def bnpo() -> dict[str, Any]:
    """``m / sum(m)`` over the tokens of this very call, at least 1: TRL's and Liger's bnpo, and a loss's default.

    It depends on how a step is cut into micro-batches: prefer ``token_mean``.
    """
    return {}


def sequence_mean(
    mask: Tensor,
    segments: Tensor | None = None,
    num_segments: int | None = None,
    *,
    empty: str = "counted",
    num_sequences: float | Tensor | None = None,
) -> dict[str, Any]:
    """``m / (N_s D)``, ``N_s`` the tokens of the sequence that count: GRPO and SAPO in TRL and Liger, verl's
    seq-mean-token-mean, NeMo-RL's sequence-level reduction.

    ``mask`` bool: the tokens that count, of target's shape and indexed like it: those with a target, in
    ``batch["mask"]`` and, with ``shift = k``, not the first k of a row, which nothing predicts. ``segments`` int of the
    same shape with ids below ``num_segments``, -1 for none (weight 0); without them every row of the last dimension is
    a sequence. ``D`` is ``num_sequences`` if given: the sequences of the whole step. Else those of this call: with
    ``empty="counted"`` all, also without a token that counts (TRL, Liger; verl with its global batch size);
    "excluded" leaves those out (verl without it), counted on the device.
    """
    if empty not in ("counted", "excluded"):
        raise ValueError(f"empty of weights.sequence_mean must be 'counted' or 'excluded', got {empty!r}")
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or not mask.dim():
        got = f"{mask.dim()}-d {mask.dtype}" if isinstance(mask, Tensor) else repr(mask)
        raise TypeError(
            f"mask of weights.sequence_mean must be a bool tensor [..., tokens], got {got}; use mask.bool()"
        )
    # whatever the call's dtype is, it loses nothing to these
    wide = torch.float32 if mask.device.type == "mps" else torch.float64
    if segments is None:
        if num_segments is not None:
            raise ValueError("num_segments of weights.sequence_mean goes with segments; without, rows are sequences")
        counts = mask.sum(-1, dtype=wide)
        per_token = counts.unsqueeze(-1)
    else:
        if not isinstance(segments, Tensor) or segments.dtype not in (torch.int64, torch.int32):
            shown = str(segments.dtype) if isinstance(segments, Tensor) else repr(segments)
            raise TypeError(f"segments of weights.sequence_mean must be an int64 or int32 tensor of ids, got {shown}")
        if type(num_segments) is not int or num_segments < 1 or segments.shape != mask.shape:
            raise ValueError(
                f"segments of weights.sequence_mean need num_segments, an int of at least 1, and the shape of mask "
                f"{tuple(mask.shape)}, got num_segments={num_segments!r}, shape {tuple(segments.shape)}"
            )
        mask = mask & (segments >= 0)
        # what belongs nowhere is counted in one segment more
        ids = torch.where(mask, segments, num_segments).flatten().long()
        counts = torch.zeros(num_segments + 1, dtype=wide, device=mask.device)
        counts = counts.index_add(0, ids, mask.flatten().to(wide))[:-1]
        per_token = torch.cat((counts, counts.new_ones(1)))[ids].view(mask.shape)
    token_weights = torch.where(mask, 1.0 / per_token.clamp(min=1.0), 0.0)
    if num_sequences is not None:
        normalizer = _count("sequence_mean", "num_sequences", num_sequences)
    else:
        normalizer = float(counts.numel()) if empty == "counted" else (counts > 0).sum(dtype=wide)
    return {"token_weights": token_weights, "normalizer": normalizer}


def sequence_sum(num_sequences: float | Tensor) -> dict[str, Any]:
    """``m / num_sequences``: verl's seq-mean-token-sum and PipelineRL's default; every token weighs the same."""
    return {"normalizer": _count("sequence_sum", "num_sequences", num_sequences)}


def dr_grpo(num_sequences: float | Tensor, max_completion_length: int) -> dict[str, Any]:
    """``m / (num_sequences * max_completion_length)``, empty sequences counted: Dr. GRPO (arXiv 2503.20783) in TRL and
    Liger."""
    _count("dr_grpo", "max_completion_length", max_completion_length)
    return {"normalizer": _count("dr_grpo", "num_sequences", num_sequences) * max_completion_length}


def _count(where: str, argument: str, value: Any) -> float | Tensor:
    if isinstance(value, Tensor):
        if value.dim() != 0:
            raise ValueError(f"{argument} of weights.{where} must be a number or 0-d tensor, got {tuple(value.shape)}")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{argument} of weights.{where} must be a number >= 0 or a 0-d tensor, got {value!r}")
    return value
