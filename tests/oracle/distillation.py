"""Distillation losses from whole logits, token by token over explicit distributions."""

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .functions import alpha_divergence, hellinger
from .rows import DENSE, TOPK, add_row

DIVERGENCES = ("forward", "reverse", "jsd", "tvd")
TOPK_OPTIONS: list[dict[str, Any]] = [
    *({"divergence": divergence, "normalize": normalize, **more}
      for divergence, normalize, more in itertools.product(
          DIVERGENCES, ("tail", "vocab", "topk"), ({}, {"teacher_renormalize": True, "teacher_temperature": 2.0}))
      # a renormalised teacher leaves no tail: the reverse divergence from it is infinite
      if not (divergence == "reverse" and normalize == "tail" and more)),
    {"normalize": "topk", "teacher_renormalize": False},
    {"divergence": "jsd", "normalize": "topk", "teacher_renormalize": False, "beta": 0.8},
    {"teacher_temperature": 2.0},
    {"divergence": "reverse", "teacher_temperature": 0.5, "temperature": 2.0, "t_squared": True},
    {"divergence": "jsd", "beta": 0.1}, {"divergence": "jsd", "beta": 0.0}, {"divergence": "jsd", "beta": 1.0},
    {"divergence": "jsd", "beta": 0.25, "normalize": "vocab", "temperature": 3.0, "t_squared": True},
]  # fmt: skip


def of_dense(each: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss of whole logits, by one of a token's log-probabilities: the student's and the teacher's."""

    @functools.wraps(each)
    def whole(
        x: Tensor,  # [n, V]: tokens that count only, temperature applied
        target: Tensor | None,
        fields: Mapping[str, Any],  # teacher_x [n, V_t]: capped, the teacher's temperature applied
        *,
        temperature: float | None = None,
        t_squared: bool = False,
        **options: Any,
    ) -> Tensor:
        own = {name: value for name, value in options.items() if not name.startswith("teacher_")}  # are in teacher_x
        values = [each(*pair, **own) for pair in both(x, fields["teacher_x"])]
        return stacked(values, x) * factor(temperature, t_squared)

    return whole


@add_row(
    DENSE,
    {}, {"form": "cross_entropy", "teacher_temperature": 2.0}, {"form": "cross_entropy"}, {"temperature": 2.0},
    {"temperature": 2.0, "t_squared": True}, {"teacher_temperature": 3.0},
    {"temperature": 1.5, "teacher_temperature": 0.7}, {"teacher_logit_scale": 0.25, "teacher_softcap": 1.5},
)  # fmt: skip
@of_dense
def forward_kl(log_p: Tensor, log_q: Tensor, form: str = "kl") -> Tensor:
    has = log_q.exp() > 0
    return kl(log_q, log_p) if form == "kl" else -(log_q.exp()[has] * log_p[has]).sum()


@add_row(DENSE, {"teacher_softcap": 4.0}, {}, {"temperature": 2.0, "t_squared": True, "teacher_softcap": 2.0}, drawn=1)
@of_dense
def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return kl(log_p, log_q)


@add_row(
    DENSE,
    {"beta": 0.3}, {}, {"beta": 0.1, "temperature": 2.0, "t_squared": True}, {"beta": 0.9, "teacher_temperature": 2.0},
    {"beta": 0.0, "temperature": 2.0}, {"beta": 1.0, "teacher_logit_scale": 0.5}, drawn=1,
)  # fmt: skip
@of_dense
def jsd(log_p: Tensor, log_q: Tensor, beta: float = 0.5) -> Tensor:
    if beta in (0, 1):
        return kl(log_p, log_q) if beta else kl(log_q, log_p)
    return jensen_shannon(log_p.exp(), log_q.exp(), beta)


@add_row(DENSE, {}, {"temperature": 3.0, "t_squared": True}, drawn=1)
@of_dense
def tvd(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() - log_q.exp()).abs().sum() / 2


@add_row(DENSE, {"function": alpha_divergence, "options": {"alpha": 0.3}}, {"function": hellinger})
@of_dense
def divergence(log_p: Tensor, log_q: Tensor, function: Callable[..., Tensor], options: Any = None) -> Tensor:
    given = [{name: torch.tensor(value, dtype=log_p.dtype) for name, value in options.items()}] if options else []
    return function(log_p.clamp(min=-1e4), log_q.clamp(min=-1e4), *given).sum()


@add_row(
    DENSE, {}, {"form": "hybrid", "eta": 1.0}, {"temperature": 2.0, "t_squared": True}, {"least": 0.3},
)  # fmt: skip
@of_dense
def lk(log_p: Tensor, log_q: Tensor, form: str = "log", eta: float = 3.0, least: float = 1e-5) -> Tensor:
    accepted = torch.minimum(log_p.exp(), log_q.exp()).sum()
    weight = (-eta * accepted.detach()).exp()
    hybrid = weight * kl(log_q, log_p) + (1 - weight) * (1 - accepted)
    return hybrid if form == "hybrid" else -accepted.clamp(min=least).log()


@add_row(
    TOPK,
    {}, {"normalize": "vocab", "divergence": "jsd", "beta": 0.2}, {"normalize": "topk"}, {"divergence": "reverse"},
    *TOPK_OPTIONS, optional="teacher_mask", drawn=4, sure_is_infinite=True,
)  # fmt: skip
def topk_kl(
    x: Tensor,
    target: Tensor | None,
    fields: Mapping[str, Any],  # teacher_ids, teacher_logprobs [n, K], perhaps teacher_mask
    *,
    divergence: str = "forward",
    normalize: str = "tail",
    beta: float = 0.5,
    teacher_renormalize: bool | None = None,
    teacher_temperature: float | None = None,
    temperature: float | None = None,
    t_squared: bool = False,
) -> Tensor:
    """[n]"""
    mask = fields.get("teacher_mask")
    values = []
    for row, logits in enumerate(x):
        known = probabilities(
            fields["teacher_ids"][row], fields["teacher_logprobs"][row], None if mask is None else mask[row]
        )
        if not known:
            values.append(logits.sum() * 0.0)
            continue
        ids = sorted(known)
        t = torch.tensor([known[i] for i in ids], dtype=x.dtype)
        t_rest = max(0.0, 1.0 - float(t.sum()))
        power = 1.0 if teacher_temperature is None else 1.0 / teacher_temperature
        if normalize == "topk" if teacher_renormalize is None else teacher_renormalize:
            t, t_rest = t**power / (t**power).sum(), 0.0
        elif power != 1:
            total = float((t**power).sum()) + t_rest**power
            t, t_rest = t**power / total, t_rest**power / total
        everywhere = torch.softmax(logits, -1)
        p = everywhere[ids]
        others = torch.ones(len(logits), dtype=torch.bool)
        others[ids] = False
        if normalize == "topk":
            p = p / p.sum()
        elif normalize == "tail":
            p = torch.cat([p, everywhere[others].sum()[None]])
            t = torch.cat([t, torch.tensor([t_rest], dtype=x.dtype)])
        elif divergence != "reverse":  # the reverse divergence over the vocabulary is infinite
            p = everywhere
            t = torch.zeros_like(everywhere).index_put((torch.tensor(ids),), t)
        if divergence == "jsd" and beta not in (0, 1):
            values.append(jensen_shannon(p, t, beta))
        elif divergence == "tvd":
            values.append((p - t).abs().sum() / 2)
        elif divergence == "reverse" or (divergence == "jsd" and beta == 1):
            values.append(relative_entropy(p, t))
        else:
            values.append(relative_entropy(t, p))
    return stacked(values, x) * factor(temperature, t_squared)


def probabilities(ids: Tensor, logprobs: Tensor, mask: Tensor | None) -> dict[int, float]:
    """The teacher's probability of each id that it names: the largest of what it says."""
    known: dict[int, float] = {}
    for k, (i, logprob) in enumerate(zip(ids.tolist(), logprobs.double().tolist(), strict=True)):
        if (mask is None or mask[k]) and logprob > -1e6:
            known[i] = max(known.get(i, 0.0), torch.tensor(logprob, dtype=torch.float64).exp().item())
    return known


def both(x: Tensor, teacher_x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Log-probabilities of student and teacher over the ids that they share, token by token."""
    shared = min(x.shape[1], teacher_x.shape[1])
    student = x[:, :shared].log_softmax(-1)
    teacher = teacher_x[:, :shared].detach().to(x.dtype).log_softmax(-1)
    return list(zip(student, teacher, strict=True))


def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    has = log_a.exp() > 0
    return (log_a.exp()[has] * (log_a[has] - log_b[has])).sum()


def relative_entropy(a: Tensor, b: Tensor) -> Tensor:
    has = a > 0
    return (a[has] * (a[has] / b[has]).log()).sum()


def jensen_shannon(p: Tensor, q: Tensor, beta: float) -> Tensor:
    m = beta * q + (1 - beta) * p
    return beta * relative_entropy(q, m) + (1 - beta) * relative_entropy(p, m)


def factor(temperature: float | None, t_squared: bool) -> float:
    return (temperature or 1.0) ** 2 if t_squared else 1.0


def stacked(values: list[Tensor], x: Tensor) -> Tensor:
    return torch.stack(values) if values else x.sum() * x.new_zeros(0)
