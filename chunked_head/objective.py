"""From statistics of rows to the loss of each token and the coefficients of its gradient.

The loss of a token, with class weights ``omega`` (1 where there are none), smoothing ``eps`` and ``z``:

    l = (1 - eps) omega_y (lse - x_y) + eps / V * sum_j omega_j (lse - x_j) + z lse^2

Cross-entropy with smoothing and class weights as ``torch.nn.functional.cross_entropy``; z-loss as PaLM (Chowdhery et
al. 2022, section 5), which takes token weights but no class weights. Its gradient in x_j is the identity of
``stats.Coefficients`` with ``alpha = (1 - eps) omega_y + eps / V * sum omega + 2 z lse``, ``beta = (1 - eps) omega_y``,
``kappa = eps / V``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .prepare import Tensors, shift_left
from .stats import Coefficients, RowStats


@dataclass(frozen=True, eq=False)
class Objective:
    """What is asked of each token: the loss's constants, and per token what does not depend on logits."""

    vocab: int
    label_smoothing: float
    z_loss: float
    target: Tensor  # [tokens] int64, -1 where the token does not count
    token_weights: Tensor | None  # [tokens]
    class_weights: Tensor | None  # [vocab]
    dtype: torch.dtype  # of statistics and values

    @property
    def needs_weighted_sum(self) -> bool:
        return self.label_smoothing > 0.0

    def values(self, stats: RowStats, rows: slice) -> Tensor:
        """The loss of each token, its token weight included, 0 where it does not count [rows]."""
        lse, target_logit, weighted_sum = stats
        label, everywhere = self.shares(rows)
        value = label * (lse - target_logit)
        if weighted_sum is not None:
            value = value + everywhere * lse - self.label_smoothing / self.vocab * weighted_sum
        if self.z_loss:
            value = value + self.z_loss * lse.square()
        if self.token_weights is not None:
            value = value * self.token_weights[rows]
        return torch.where(self.target[rows] >= 0, value, 0.0)

    def coefficients(self, stats: RowStats, scale: Tensor, rows: slice) -> Coefficients:
        """Coefficients of the gradient of ``sum(scale * l)``; ``scale`` is 0 where a token does not count [rows]."""
        label, everywhere = self.shares(rows)
        alpha = label + everywhere
        if self.z_loss:
            alpha = alpha + 2.0 * self.z_loss * stats.lse
        kappa = self.label_smoothing / self.vocab * scale if self.needs_weighted_sum else None
        return Coefficients(alpha * scale, label * scale, kappa)

    def shares(self, rows: slice) -> tuple[Tensor | float, Tensor | float]:
        """Weight of the target's term and of the uniform term's ``lse``."""
        smoothing = self.label_smoothing
        if self.class_weights is None:
            return 1.0 - smoothing, smoothing
        target = self.target[rows]
        of_target = torch.where(target >= 0, self.class_weights[target.clamp(min=0)], 0.0)
        return (1.0 - smoothing) * of_target, smoothing and smoothing / self.vocab * self.class_weights.sum()


def make_objective(
    tensors: Tensors, target: Tensor, shift: int, label_smoothing: float, z_loss: float, dtype: torch.dtype
) -> Objective:
    """The objective of paired targets; weights in the dtype of the statistics, which takes no gradient to them."""
    statistics = torch.promote_types(dtype, torch.float32)
    token_weights, class_weights = tensors.token_weights, tensors.class_weights
    if token_weights is not None:
        token_weights = shift_left(token_weights, shift, 0).reshape(-1).to(statistics)
    if class_weights is not None:
        # a copy: backward may read it, and would not notice that the caller had changed it
        class_weights = class_weights.detach().to(statistics, copy=True).contiguous()
    vocab = tensors.weight.shape[0]
    return Objective(vocab, float(label_smoothing), float(z_loss), target, token_weights, class_weights, statistics)
