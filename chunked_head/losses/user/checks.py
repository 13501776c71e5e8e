"""A function of the user's, run on made-up tokens: what it reads, and whether its values are what it claims."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..base import Field, Part, Summand, Unit
from ..batch import Batch, Stats
from . import closures
from .closures import Contents
from .synthetic import PAIRS, SEGMENTS, TOKENS, Reads, RecordingBatch, RecordingStats, Synthetic

WITHOUT_GRADIENT = ("argmax", "top_logprob", "teacher_entropy")
WHOLE = slice(0, TOKENS)
PIECES = (slice(0, 1), slice(1, TOKENS))
OF_RANKS = (slice(0, 9), slice(9, TOKENS))  # segments 0 and 2 lie on both; so does the pair of them


@contextlib.contextmanager
def by_itself(grad: bool, device: torch.device) -> Iterator[None]:
    """Neither modes around a call nor its random numbers have a part in what is run inside, on ``device``."""
    others, kind = ([], "cuda") if device.type == "cpu" else ([device], device.type)
    with torch.inference_mode(False), torch.set_grad_enabled(grad), torch.random.fork_rng(others, device_type=kind):
        yield


def device_of(*values: Any) -> torch.device:
    """Device that a function runs on: that of the tensors that it closes over, else the CPU."""
    found = [device for device in Contents(*values).devices if device.type not in ("cpu", "meta")]
    return found[0] if found else torch.device("cpu")


def same(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding; what one token adds to a mean over these few is far larger."""
    finite = a[a.isfinite()].abs()
    atol = 1e-4 * float(finite.max()) if len(finite) else 0.0
    return torch.allclose(a, b, rtol=1e-4, atol=atol, equal_nan=True)


# ---- a loss, when it is made


def checked(where: str, summand: Summand, extra: Mapping[str, Field]) -> Reads:
    """Runs the function on made-up tokens, all at once to see what it reads, and if it claims that a token's value
    depends on that token alone, in two pieces, which must give the same values and gradients."""
    device = device_of(summand.function, summand.options, summand.tensors)
    with by_itself(True, device):
        made, reads = Synthetic(summand.tensors, extra, device), Reads()
        whole = run(where, summand, made, WHOLE, reads)
        pieces = [run(where, summand, made, piece, Reads()) for piece in PIECES if summand.scope == "token"]
        for what, found in whole.items():
            if pieces and not same(found[made.mask], torch.cat([piece[what] for piece in pieces])[made.mask]):
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
    try:
        batch = RecordingBatch(made.fields_of(piece), made.target[piece], made.vocab, reads)
        with made.device:  # what the function makes itself
            values = summand.values(Stats(RecordingStats(leaves, reads)), batch, summand.tensors)
    except Exception as error:
        reason = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise ValueError(
            f"{where} raised {type(error).__name__} on {tokens} made-up tokens, where it was run to see what it reads: "
            f"{reason}. If it cannot run on these, pass check=False with needs= and fields="
        ) from error
    check_values(where, summand.unit, values, tokens)
    total = values.sum()
    if summand.unit == "token":  # not all of one weight, which would hide what a mean gives to each
        total = torch.where(made.mask[piece], values * made.upstream[piece], 0.0).sum()
    gradients = torch.autograd.grad(total, list(differentiable.values()), allow_unused=True, materialize_grads=True)
    named = {f"gradients to stats.{name}": grad for name, grad in zip(differentiable, gradients, strict=True)}
    return {"values": values.detach()} | named


def check_values(where: str, unit: Unit, values: Any, tokens: int) -> None:
    number, per = {
        "token": (tokens, "[tokens]"), "segment": (SEGMENTS, "[num_segments]"), "pair": (PAIRS, "[pairs]"),
    }[unit]  # fmt: skip
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


# ---- a loss or a metric of segments, where ranks hold different tokens


class RankBatch(Batch):
    """Tokens of one rank. ``own``: their sums over segments, in turn; ``sums``: those of all tokens, if known."""

    def __init__(self, made: Synthetic, piece: slice, given: frozenset[str], sums: list[Tensor]):
        fields = {name: value for name, value in made.fields_of(piece).items() if name in given}
        super().__init__(fields, made.target[piece], SEGMENTS, made.vocab)
        self.sums, self.own = sums, list[Tensor]()

    def segment_sum(self, values: Tensor, name: str = "segments") -> Tensor:
        own = super().segment_sum(values, name)
        self.own.append(own)
        return self.sums[len(self.own) - 1] if len(self.own) <= len(self.sums) else own


def check_over_ranks(part: Part, what: str, given: frozenset[str], known: Mapping[str, Field]) -> None:
    """Raises where a loss or metric has other values on made-up tokens that two ranks share."""
    if part.options.get("ld_alpha") is not None:
        raise ValueError(
            f"ld_alpha of {what} {part.label} needs each token's place in its segment, which no rank knows where ranks "
            "hold different tokens of it; leave it out, or leave out parallel=TokenParallel(...)"
        )
    if part.builtin or part.scope != "segment":
        return
    tensors = part.tensors if isinstance(part, Summand) else {}
    about = "ranks", part.unit, given, tuple(sorted(known.items())), Contents(part.options, tensors).key
    closures.known(part.function, about, lambda: run_over_ranks(part, what, given, known, tensors))


def run_over_ranks(
    part: Part, what: str, given: frozenset[str], known: Mapping[str, Field], tensors: Mapping[str, Tensor]
) -> None:
    device = device_of(part.function, part.options, tensors)

    def run(piece: slice, sums: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        batch = RankBatch(made, piece, given, sums)
        with made.device:
            values = part.values(Stats({name: value[piece] for name, value in made.stats.items()}), batch, tensors)
        return values, batch.own

    with by_itself(False, device):
        made = Synthetic(tensors, known, device)
        try:
            whole, sums = run(WHOLE, [])
        except Exception:  # it cannot run on made-up tokens, as its maker may have said by check=False
            return
        values, own = zip(*(run(piece, sums) for piece in OF_RANKS), strict=True)
    right = all(len(each) == len(sums) for each in own)
    right = right and all(same(found, first + second) for found, first, second in zip(sums, *own, strict=True))
    if part.unit == "token":
        whole, values = whole[made.mask], (torch.cat(values)[made.mask],)
    if not right or not all(same(whole, each) for each in values):
        raise ValueError(
            f"{what} {part.label} has other values where a segment's tokens lie on two ranks: it puts tokens together "
            "by other means than batch.segment_sum, segment_mean and segment_count, and these alone are summed over "
            "ranks; use these, or leave out parallel=TokenParallel(...)"
        )
