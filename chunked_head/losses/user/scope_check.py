"""What a user's loss reads, and the check that it is of the scope that it claims."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.loss_stats import Stats
from ..base import Field, Summand, Unit
from .synthetic import PAIRS, SEGMENTS, TOKENS, Reads, RecordingBatch, RecordingStats, Synthetic

WITHOUT_GRADIENT = ("argmax", "top_logprob", "teacher_entropy")
PIECES = (slice(0, 1), slice(1, TOKENS))


def checked(where: str, summand: Summand, extra: Mapping[str, Field]) -> Reads:
    """Runs the function on made-up tokens, all at once to see what it reads, and if it claims that a token's value
    depends on that token alone, in two pieces, which must give the same values and gradients."""
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        made, reads = Synthetic(summand.tensors, extra), Reads()
        whole = run(where, summand, made, slice(0, TOKENS), reads)
        if summand.scope == "token":
            pieces = [run(where, summand, made, piece, Reads()) for piece in PIECES]
            for what, found in whole.items():
                if not same(found[made.mask], torch.cat([piece[what] for piece in pieces])[made.mask]):
                    raise ValueError(
                        f'{where} has scope="token", but its {what} on {TOKENS} made-up tokens at once and in pieces '
                        "differ: a token's value depends on other tokens, and would depend on the chunk size, or the "
                        'function draws random numbers or writes into what it reads. Pass scope="segment" if it needs '
                        "other tokens, or compute what is common to the batch before the call and pass it as a field"
                    )
    return reads


def run(where: str, summand: Summand, made: Synthetic, piece: slice, reads: Reads) -> dict[str, Tensor]:
    """The function's values on some of the tokens, and the gradients of their weighted sum."""
    leaves = {name: value[piece].detach().clone() for name, value in made.stats.items()}
    differentiable = {name: leaf.requires_grad_() for name, leaf in leaves.items() if name not in WITHOUT_GRADIENT}
    tokens = piece.stop - piece.start
    stats = Stats(RecordingStats(leaves, reads.statistics.add))
    try:
        batch = RecordingBatch(made.fields_of(piece), made.target[piece], made.vocab, reads)
        with made.device:  # what the function makes itself
            values = summand.values(stats, batch, summand.tensors)
    except Exception as error:
        reason = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise ValueError(
            f"{where} raised {type(error).__name__} on {tokens} made-up tokens, where it was run to see what it reads: "
            f"{reason}. If it cannot run on these, pass check=False with needs= and fields="
        ) from error
    reads.target |= "logprob" in reads.statistics
    check_values(where, summand.unit, values, tokens)
    total = values.sum()
    if summand.unit == "token":  # not all of one weight, which would hide what a mean gives to each
        total = torch.where(made.mask[piece], values * made.upstream[piece], 0.0).sum()
    gradients = torch.autograd.grad(total, list(differentiable.values()), allow_unused=True, materialize_grads=True)
    named = {f"gradients to stats.{name}": grad for name, grad in zip(differentiable, gradients, strict=True)}
    return {"values": values.detach()} | named


def check_values(where: str, unit: Unit, values: Any, tokens: int) -> None:
    number = {"token": tokens, "segment": SEGMENTS, "pair": PAIRS}[unit]
    per = {"token": "[tokens]", "segment": "[num_segments]", "pair": "[pairs]"}[unit]
    if not isinstance(values, Tensor):
        raise ValueError(f"{where} must return a tensor of shape {per}, got {type(values).__name__}")
    if tuple(values.shape) != (number,):
        remedy = " (values are reduced for it: leave out .sum() and .mean())" if values.dim() == 0 else ""
        if values.dim() == 1 and unit == "token" and len(values) == SEGMENTS:
            remedy = '; values per segment are unit="segment"'
        raise ValueError(
            f"{where} must return one value per {unit}, {per} = ({number},) here; got {tuple(values.shape)}{remedy}"
        )
    if not values.dtype.is_floating_point:
        raise ValueError(f"{where} must return floating-point values, got {values.dtype}")
    if not values.requires_grad:
        raise ValueError(
            f"{where} has values without a gradient: it must depend on a statistic that is not detached. What is only "
            "to be logged is a Metric"
        )


def same(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding; what one token adds to a mean over these few is far larger."""
    finite = a[a.isfinite()].abs()
    atol = 1e-4 * float(finite.max()) if len(finite) else 0.0
    return torch.allclose(a, b, rtol=1e-4, atol=atol, equal_nan=True)
