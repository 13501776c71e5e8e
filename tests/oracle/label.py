"""Label losses on full logits."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .functions import likely, power
from .rows import CLASS_WEIGHTS, add_row

Fields = Mapping[str, Any]

CLASSES = {"class_weights": CLASS_WEIGHTS}


@add_row(
    "",
    {}, {"label_smoothing": 0.2}, {"token_scaling": True}, CLASSES, CLASSES | {"label_smoothing": 0.3},
    CLASSES | {"token_scaling": True},
    *(
        {"label_smoothing": smoothing, "token_scaling": scaling, **classes}
        for smoothing in (0.1, 1.0) for classes in ({}, CLASSES) for scaling in (False, True)
    ),
    {"entropy_scaling": 0.5},
    drawn=5,
)  # fmt: skip
def cross_entropy(
    x: Tensor,  # [n, V]
    target: Tensor,
    fields: Fields,
    *,
    label_smoothing: float = 0.0,
    class_weights: Tensor | None = None,
    token_scaling: bool = False,
    entropy_scaling: float | None = None,
) -> Tensor:
    values = F.cross_entropy(x, target, class_weights, reduction="none", label_smoothing=label_smoothing)
    if token_scaling:
        values = values * torch.softmax(x, -1).gather(-1, target[:, None])[:, 0].detach()
    if entropy_scaling is not None:
        values = values * entropy(x, target, fields).detach() ** entropy_scaling
    return values


@add_row("", *({"gamma": gamma} for gamma in (1.5, 0.0, 0.5, 1.0, 2.0)), drawn=1)
def focal(x: Tensor, target: Tensor, fields: Fields, *, gamma: float = 2.0) -> Tensor:
    one_hot = F.one_hot(target, x.shape[-1]).to(x.dtype)
    p = (torch.softmax(x, -1) * one_hot).sum(-1)
    return -((1 - p) ** gamma) * p.log()


@add_row("", {}, {"epsilon": -1.0}, {"epsilon": 2.5})
def poly1(x: Tensor, target: Tensor, fields: Fields, *, epsilon: float = 1.0) -> Tensor:
    p = torch.softmax(x, -1)[torch.arange(len(target)), target]
    return F.cross_entropy(x, target, reduction="none") + epsilon * (1 - p)


@add_row(sure_is_infinite=True)
def unlikelihood(x: Tensor, target: Tensor, fields: Fields) -> Tensor:
    return -torch.log(1 - torch.softmax(x, -1)[torch.arange(len(target)), target].clamp(max=1 - 1e-6))


@add_row()
def z_loss(x: Tensor, target: Tensor, fields: Fields) -> Tensor:
    return x.exp().sum(-1).log() ** 2


@add_row("", {"function": power, "options": {"power": 2.0}}, {"function": likely})
def vocabulary_sum(
    x: Tensor, target: Tensor, fields: Fields, *, function: Callable[..., Tensor], options: Any = None
) -> Tensor:
    given = [{name: torch.tensor(value, dtype=x.dtype) for name, value in options.items()}] if options else []
    return function(x.log_softmax(-1).clamp(min=-1e4), *given).sum(-1)


@add_row()
def entropy(x: Tensor, target: Tensor, fields: Fields) -> Tensor:
    logs = x.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1)
