"""What a row of logits is reduced to, and what its gradient is made from."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class RowStats(NamedTuple):
    """Statistics of rows of logits ``x`` (after scale and cap), fp32 (fp64 for fp64 hidden states).

    ``lse`` [tokens]: ``logsumexp(x)``. ``target_logit`` [tokens]: ``x`` at the target, anything where the row does not
    count. ``weighted_sum`` [tokens]: ``sum(omega * x)``, omega the class weights or 1; None unless asked for.
    """

    lse: Tensor
    target_logit: Tensor
    weighted_sum: Tensor | None

    @classmethod
    def empty(cls, tokens: int, weighted_sum: bool, dtype: torch.dtype, device: torch.device) -> "RowStats":
        count = 3 if weighted_sum else 2
        rows = [torch.empty(tokens, dtype=dtype, device=device) for _ in range(count)]
        return cls(rows[0], rows[1], rows[2] if weighted_sum else None)

    def at(self, rows: slice) -> "RowStats":
        """The statistics of a slice of rows, sharing memory."""
        return RowStats(self.lse[rows], self.target_logit[rows], _rows(self.weighted_sum, rows))


class Coefficients(NamedTuple):
    """``dlogits[j] = p[j] * alpha - beta * [j == target] - kappa * omega[j]``, each [tokens].

    The gradient identity of the label losses; 0 where a row does not count, ``kappa`` None where nothing asks for it.
    """

    alpha: Tensor
    beta: Tensor
    kappa: Tensor | None

    def at(self, rows: slice) -> "Coefficients":
        """The coefficients of a slice of rows, sharing memory."""
        return Coefficients(self.alpha[rows], self.beta[rows], _rows(self.kappa, rows))


def _rows(vector: Tensor | None, rows: slice) -> Tensor | None:
    return None if vector is None else vector[rows]


@dataclass(frozen=True, eq=False)
class Head:
    """The operand of every matmul and what makes logits of the products: ``x = cap(scale * (h @ weight.T + bias))``."""

    weight: Tensor  # [vocab, hidden]
    bias: Tensor | None  # [vocab]
    class_weights: Tensor | None  # [vocab] fp32 or fp64
    logit_scale: float = 1.0
    softcap: float | None = None

    def columns(self, tile: slice) -> "Head":
        """The head of a slice of the vocabulary, sharing memory."""
        return Head(
            self.weight[tile], _rows(self.bias, tile), _rows(self.class_weights, tile), self.logit_scale, self.softcap
        )
