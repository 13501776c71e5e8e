"""The check that a user's function of segments can be computed where their tokens lie on several ranks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.batch import Batch
from ...core.loss_stats import Stats
from ..base import Field
from .scope_check import same
from .synthetic import SEGMENTS, TOKENS, Synthetic

OWN = __name__.partition(".")[0] + "."
PIECES = (slice(0, 9), slice(9, TOKENS))  # segments 0 and 2 lie on both; so does the pair of them


class Piece(Batch):
    """Some of the tokens: ``own`` are their sums over segments, in turn, ``sums`` those of all tokens, if known."""

    def __init__(self, made: Synthetic, piece: slice, given: frozenset[str], sums: list[Tensor]):
        fields = {name: value for name, value in made.fields_of(piece).items() if name in given}
        super().__init__(fields, made.target[piece], SEGMENTS, made.vocab)
        self.sums, self.own = sums, list[Tensor]()

    def segment_sum(self, values: Tensor, name: str = "segments") -> Tensor:
        own = super().segment_sum(values, name)
        self.own.append(own)
        return self.sums[len(self.own) - 1] if len(self.own) <= len(self.sums) else own


def check_over_ranks(part: Any, what: str, given: frozenset[str], known: Mapping[str, Field]) -> None:
    """Raises where ``part``, a Summand or a Metric, has other values on made-up tokens that two ranks share."""
    if part.options.get("ld_alpha") is not None:
        raise ValueError(
            f"ld_alpha of {what} {part.label} needs each token's place in its segment, which no rank knows where ranks "
            "hold different tokens of it; leave it out, or leave out parallel=TokenParallel(...)"
        )
    if part.scope != "segment" or getattr(part.function, "__module__", "").startswith(OWN):
        return
    tensors = getattr(part, "tensors", None)
    more = () if tensors is None else (tensors,)

    def run(piece: slice, sums: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        batch = Piece(made, piece, given, sums)
        with made.device:
            values = part.values(Stats({name: value[piece] for name, value in made.stats.items()}), batch, *more)
        return values, batch.own

    with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(devices=[]):
        made = Synthetic(tensors or {}, known)
        try:
            whole, sums = run(slice(0, TOKENS), [])
        except Exception:  # it cannot run on made-up tokens, as its maker may have said by check=False
            return
        pieces = [run(piece, sums) for piece in PIECES]
    right = all(len(own) == len(sums) for _, own in pieces)
    right = right and all(map(same, sums, (sum(own) for own in zip(*(own for _, own in pieces), strict=True))))
    values = [torch.cat([values for values, _ in pieces])] if part.unit == "token" else [values for values, _ in pieces]
    counted = made.mask if part.unit == "token" else slice(None)
    if not right or not all(same(whole[counted], value[counted]) for value in values):
        raise ValueError(
            f"{what} {part.label} has other values where a segment's tokens lie on two ranks: it puts tokens together "
            "by other means than batch.segment_sum, segment_mean and segment_count, and these alone are summed over "
            "ranks; use these, or leave out parallel=TokenParallel(...)"
        )
