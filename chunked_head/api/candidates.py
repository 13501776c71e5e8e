"""Candidates in the place of the vocabulary: sets of ids that every token keeps."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.options import flag
from ..engine.head_options import HeadOptions
from ..program import checks


def with_candidates(
    head: HeadOptions, batch: Any, kept_everywhere: bool, candidates: Tensor | None, candidate_bias: Tensor | None
) -> tuple[Any, bool]:
    """``batch`` with the candidates as each token's ``kept_ids``, and whether every token keeps a set."""
    everywhere = flag("kept_everywhere", kept_everywhere)
    if candidates is None:
        if candidate_bias is not None:
            raise ValueError("candidate_bias goes with candidates, which are missing")
        return batch, everywhere
    checks.check_tensor("candidates", candidates, optional=False)
    checks.check_tensor("candidate_bias", candidate_bias, optional=True)
    if candidates.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"candidates must be ids, int64 or int32, got {candidates.dtype}; cast them")
    if batch is not None and not isinstance(batch, Mapping):
        return batch, everywhere  # the call raises what is wrong with it
    if any((batch or {}).get(name) is not None for name in ("kept_ids", "kept_offsets")):
        raise ValueError("candidates are sets that all tokens keep, and kept_ids are others; pass one of them")
    given = candidates.shape
    if not given or given[-1] == 0 or (len(given) > 1 and given[:-1] != head.leading):
        raise ValueError(
            f"candidates must be [K], or the target's shape {head.leading} and one more dimension, K at least 1, got "
            f"{tuple(given)}"
        )
    if candidate_bias is not None and candidate_bias.shape != given:
        raise ValueError(
            f"candidate_bias must have the shape of candidates, {tuple(given)}, got {tuple(candidate_bias.shape)}"
        )
    fields = {"kept_ids": candidates, "candidate_bias": candidate_bias}
    shape = *head.leading, given[-1]  # [K] of all tokens becomes each token's
    expanded = {name: value.expand(shape) for name, value in fields.items() if value is not None}
    return {**(batch or {}), **expanded}, True
