"""The check that a user's loss is of the scope that it claims, and what it reads."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..base import FIELDS, Field, Summand, Unit
from .synthetic import PAIRS, PIECES, SEGMENTS, TOKENS, Reads, Run, Synthetic


def checked(where: str, summand: Summand, extra: Mapping[str, Field]) -> Reads:
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        return _check(where, summand, extra)


def _check(where: str, summand: Summand, extra: Mapping[str, Field]) -> Reads:
    synthetic = Synthetic(summand, extra)
    everything = slice(0, TOKENS)
    reads = Reads()

    def run(piece: slice, reads: Reads = reads) -> Run:
        try:
            outcome = synthetic.run(summand, reads, piece)
        except Exception as error:
            reason = error.args[0] if isinstance(error, KeyError) and error.args else error
            raise ValueError(
                f"{where} raised {type(error).__name__} on {piece.stop - piece.start} made-up tokens, where it was run "
                f"to see what it reads: {reason}. If it cannot run on these, pass check=False with needs= and fields="
            ) from error
        _check_values(where, summand.unit, outcome.values, piece.stop - piece.start)
        if outcome.written:
            raise ValueError(f"{where} writes into {outcome.written[0]!r}, which others read: compute out of place")
        return outcome

    whole = run(everything)
    again = run(everything)
    if not torch.allclose(whole.values, again.values, equal_nan=True):
        raise ValueError(f"{where} gives other values when it is run again: it must not draw random numbers")
    if not whole.values.requires_grad:
        raise ValueError(
            f"{where} has values without a gradient: it must depend on a statistic that is not detached. What is only "
            "to be logged is a Metric"
        )
    if summand.scope == "token":
        _check_pieces(where, synthetic, whole, run)
    _find_optional(synthetic, summand, reads)
    return reads


def _check_values(where: str, unit: Unit, values: Any, tokens: int) -> None:
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


def _check_pieces(where: str, synthetic: Synthetic, whole: Run, run: Callable[[slice], Run]) -> None:
    upstream = torch.where(synthetic.mask, synthetic.upstream, 0.0)
    gradients = whole.gradients(upstream)
    start = 0
    for length in PIECES:
        piece = slice(start, start + length)
        start += length
        part = run(piece)
        counted = synthetic.mask[piece]
        same = _same(whole.values[piece][counted], part.values[counted], whole.values[synthetic.mask])
        what = "values"
        if same:
            for name, gradient in part.gradients(upstream[piece]).items():
                if not _same(gradients[name][piece][counted], gradient[counted], gradients[name][synthetic.mask]):
                    same, what = False, f"gradients to stats.{name}"
        if not same:
            raise ValueError(
                f'{where} has scope="token", but its {what} on {TOKENS} made-up tokens at once and in pieces differ: a '
                'token\'s value depends on other tokens, and would depend on the chunk size. Pass scope="segment", '
                "or compute what is common to the batch before the call and pass it as a field"
            )


def _same(a: Tensor, b: Tensor, scale: Tensor) -> bool:
    """Equal up to rounding; what one token adds to a mean over these few is far larger."""
    finite = scale.detach()[scale.isfinite()].abs()
    atol = 1e-4 * float(finite.max()) if len(finite) else 0.0
    return torch.allclose(a.to(b.dtype), b, rtol=1e-4, atol=atol, equal_nan=True)


def _find_optional(synthetic: Synthetic, summand: Summand, reads: Reads) -> None:
    """Runs without each field that was asked for only: whoever cannot do without it requires it.

    What is read instead of it counts as optional too: the other branch does without.
    """
    for name in sorted(reads.optional):
        if name not in synthetic.fields:
            if name not in FIELDS:
                raise ValueError(
                    f"losses.custom({summand.label!r}) asks for the field {name!r}, which nobody knows; declare it: "
                    f"fields={{{name!r}: 'token'}}"
                )
            continue
        without = Reads()
        try:
            synthetic.run(summand, without, slice(0, TOKENS), frozenset({name}))
        except Exception:
            reads.optional.discard(name)
            reads.required.add(name)
            continue
        reads.optional |= (without.required | without.optional) - reads.required
        reads.statistics |= without.statistics
        reads.target |= without.target
