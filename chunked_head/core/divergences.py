"""The library's sums over the vocabulary: divergences of the student's softmax p and a dense teacher's q.

A function NAME_terms takes ``log p`` and ``log q``. It returns f, whose sum is the divergence, and the slope of f by
``log p``, up to a multiple of p. ``kernels/common/sums.py`` has the same functions in Triton. A probability of 0 adds 0
to a sum, even if a logarithm is infinite; a probability of nan makes the sum nan.
"""

import math

import torch
from torch import Tensor

from .memory import Cache
from .records import SumFunction
from .tiles import LOG_FLOOR

SOFT_TARGETS = 'losses.forward_kl("cross_entropy")'  # the loss to suggest for targets that are class probabilities


def forward_kl_terms(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Terms of KL(q || p), ``f = q (log q - log p)``."""
    q = log_q.exp()
    return weighted(q, log_q - log_p), -q


def reverse_kl_terms(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Terms of KL(p || q), ``f = p (log p - log q)``, with log q of at least LOG_FLOOR."""
    values = weighted(log_p.exp(), log_p - log_q.clamp(min=LOG_FLOOR))
    return values, values


def teacher_entropy_terms(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Terms of the teacher's entropy, ``f = -q log q``."""
    q = log_q.exp()
    return -weighted(q, log_q), q


def jsd_terms(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Terms of the Jensen-Shannon divergence, ``f = beta q (log q - log m) + (1 - beta) p (log p - log m)`` with
    ``m = beta q + (1 - beta) p``."""
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
    slope = (1.0 - beta) * weighted(log_p.exp(), log_p - log_m)
    return beta * weighted(log_q.exp(), log_q - log_m) + slope, slope


def tvd_terms(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Terms of the total variation, ``f = |p - q| / 2``."""
    p, q = log_p.exp(), log_q.exp()
    return (p - q).abs() / 2, -below_q(p, q) / 2


def tvd_gradient(log_p: Tensor, log_q: Tensor, total: Tensor) -> Tensor:
    """The gradient of the total variation, ``p (sign(p - q) - sum_j p_j sign_j) / 2``. ``total``: the sum of slopes.

    Where p and q hardly overlap, the sign and the sum are both nearly 1, and the gradient is their small difference.
    Rounded probabilities do not add up to exactly 1, so 1 is subtracted from each sign before the sum. For p above 3/4
    the sum decides the sign, as in the kernels."""
    p, q, sum_below = log_p.exp(), log_q.exp(), -2 * total
    below_q_by_sum = torch.where(sum_below < 1 - p / 2, 0.0, torch.where(sum_below > 1 + p / 2, 2 * p, p))
    return (p * sum_below - torch.where(p > 0.75, below_q_by_sum, below_q(p, q))) / 2


def overlap_terms(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Terms of the overlap, ``f = min(p, q)``."""
    p, q = log_p.exp(), log_q.exp()
    return torch.minimum(p, q), below_q(p, q) / 2


def overlap_gradient(log_p: Tensor, log_q: Tensor, total: Tensor) -> Tensor:
    """The gradient of the overlap. The overlap is 1 minus the total variation."""
    return -tvd_gradient(log_p, log_q, -total)


def weighted(p: Tensor, values: Tensor) -> Tensor:
    """``p * values``; 0 where p is 0, even if the value is infinite or nan."""
    return torch.where(p == 0, 0.0, p * values)


def below_q(p: Tensor, q: Tensor) -> Tensor:
    """``p (1 - sign(p - q))``: 2 p where p is below q, p where they are equal, else 0; nan where one of them is nan."""
    return p * (1 - (p - q).sign()) + 0.0 * q  # the sign of nan is 0


DIVERGENCES = {  # by name
    function.name: function
    for function in (
        SumFunction("forward_kl", forward_kl_terms, -1.0),
        SumFunction("reverse_kl", reverse_kl_terms, "value"),
        SumFunction("jsd", jsd_terms, "slopes", numbers=1),
        SumFunction("tvd", tvd_terms, "gradient", tvd_gradient),
        SumFunction("overlap", overlap_terms, "gradient", overlap_gradient),
        SumFunction("teacher_entropy", teacher_entropy_terms, None),
    )
}
# by name: users' functions. The recipe of a compiled graph holds its functions, so that they outlive this cache
TRACED: Cache[str, SumFunction] = Cache(256)
