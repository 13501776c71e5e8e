"""The check that a user's function of segments can be computed where their tokens lie on several ranks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.batch import Batch
from ...core.loss_stats import Stats
from ..base import Field, Summand
from .scope_check import _same
from .synthetic import SEGMENTS, TOKENS, Synthetic

CHECKED: set[tuple] = set()
MOST_CHECKED = 64
MOST_SUMS = 16  # that depend on each other
OWN = __name__.partition(".")[0] + "."


class Piece(Batch):
    """Some of the tokens; sums over segments are ``wholes`` as far as these are known."""

    def __init__(self, fields: Mapping[str, Tensor], target: Tensor, vocab: int, wholes: list[Tensor]):
        super().__init__(fields, target, SEGMENTS, vocab)
        self.wholes, self.own = wholes, list[Tensor]()

    def segment_sum(self, values: Tensor, name: str = "segments") -> Tensor:
        own = super().segment_sum(values, name)
        self.own.append(own)
        known = len(self.wholes) >= len(self.own)
        return self.wholes[len(self.own) - 1] if known else own


def check_over_ranks(part: Any, what: str, given: frozenset[str], known: Mapping[str, Field]) -> None:
    """Raises where ``part``, a Summand or a Metric, has other values on made-up tokens that two ranks share."""
    if part.scope != "segment" or getattr(part.function, "__module__", "").startswith(OWN):
        return
    key = part.key, given
    if key in CHECKED:
        return
    with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(devices=[]):
        found = Synthetic(Summand("custom", part.function, tensors=getattr(part, "tensors", {})), known)
        try:
            whole = over_pieces(part, found, given, [slice(0, TOKENS)])
        except Exception:  # it cannot run on made-up tokens, as its maker may have said by check=False
            return
        # segments 0 and 2 lie on both; so does the pair of them
        parts = over_pieces(part, found, given, [slice(0, 9), slice(9, TOKENS)])
    (values,), token = whole, part.unit == "token"
    for piece in [torch.cat(parts)] if token else parts:
        counted = found.mask if token else slice(None)
        if not _same(values[counted], piece[counted], values[counted]):
            raise ValueError(
                f"{what} {part.label} has other values where a segment's tokens lie on two ranks: it puts tokens "
                "together by other means than batch.segment_sum, segment_mean and segment_count, and these alone are "
                "summed over ranks; use these, or leave out parallel=TokenParallel(...)"
            )
    if len(CHECKED) >= MOST_CHECKED:
        CHECKED.clear()
    CHECKED.add(key)


def over_pieces(part: Any, made: Synthetic, given: frozenset[str], pieces: list[slice]) -> list[Tensor]:
    """Values of each piece, all sums those of all pieces: found again and again until none changes."""
    wholes: list[Tensor] = []
    for _ in range(MOST_SUMS):
        values, own = [], []
        for at in pieces:
            fields = {
                name: value[at] if name in made.per_token else value
                for name, value in made.fields.items()
                if name in given
            }
            batch = Piece(fields, made.target[at], made.vocab, wholes)
            stats = Stats({name: value[at] for name, value in made.stats.items()})
            tensors = (getattr(part, "tensors", {}),) if isinstance(part, Summand) else ()
            values.append(part.values(stats, batch, *tensors))
            own.append(batch.own)
        found = [torch.stack(sums).sum(0) for sums in zip(*own, strict=True)]
        if len(found) == len(wholes) and all(map(torch.equal, found, wholes)):
            break
        wholes = found
    return values
