"""Every statistic a loss may read, in plain PyTorch from whole logits: what the losses' functions are tested on."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from chunked_head.losses import FIELDS, Losses, Summand
from chunked_head.losses.batch import Batch as Batch
from chunked_head.losses.batch import Stats as Stats


def kl(a: Tensor, log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL(a || b) over the last dimension; terms with a = 0 are 0, those with b = 0 < a infinite."""
    terms = a * (torch.where(a > 0, log_a, 0.0) - torch.where(a > 0, log_b, 0.0))
    return torch.where(a > 0, terms, 0.0).sum(-1)


def full_stats(
    x: Tensor,  # [n, V]: the loss's logits, temperature applied
    target: Tensor,  # [n]: -1 where a token does not count
    *,
    class_weights: Tensor | None = None,  # [V]
    ids: Tensor | None = None,  # [n, K]: gives topk_logprobs
    teacher_logits: Tensor | None = None,  # [n, V]: the teacher's final logits; may hold -inf
    beta: float = 0.5,  # of jsd: the weight of the teacher in the mixture
) -> Stats:
    """Stats of ``x``, differentiable in it, in its dtype; 0 with zero gradients where ``target`` is negative."""
    mask = target >= 0
    target = target.clamp(min=0)
    x = torch.where(mask[:, None], x, 0.0)
    lse = torch.logsumexp(x, -1)
    log_p = x - lse[:, None]
    p = log_p.exp()
    values = {
        "logprob": torch.log_softmax(x, -1).gather(-1, target[:, None])[:, 0],
        "lse": lse,
        "entropy": -torch.where(p > 0, p * torch.where(p > 0, log_p, 0.0), 0.0).sum(-1),
        "mean_logit": x.mean(-1),
        "top_logprob": log_p.amax(-1).detach(),
    }
    if class_weights is not None:
        values["weighted_sum"] = (class_weights * x).sum(-1)
    if ids is not None:
        values["topk_logprobs"] = log_p.gather(-1, torch.where(mask[:, None], ids, 0))
    if teacher_logits is not None:
        log_q = torch.log_softmax(torch.where(mask[:, None], teacher_logits, 0.0), -1).detach()
        q = log_q.exp()
        weight = torch.tensor(beta, dtype=x.dtype, device=x.device)
        log_m = torch.logaddexp(log_p + torch.log1p(-weight), log_q + weight.log())
        values["forward_kl"] = kl(q, log_q, log_p)
        values["reverse_kl"] = kl(p, log_p, log_q)
        values["jsd"] = beta * kl(q, log_q, log_m) + (1 - beta) * kl(p, log_p, log_m)
        values["tvd"] = 0.5 * (p - q).abs().sum(-1)
        values["overlap"] = torch.minimum(p, q).sum(-1)
        values["teacher_entropy"] = -torch.where(q > 0, q * torch.where(q > 0, log_q, 0.0), 0.0).sum(-1)
    rows = {
        name: torch.where(mask[:, None] if value.dim() == 2 else mask, value, 0.0) for name, value in values.items()
    }
    return Stats({**rows, "argmax": torch.where(mask, x.argmax(-1), 0)})


def make_batch(fields: Mapping[str, Tensor], target: Tensor, vocab: int, num_segments: int | None = None) -> Batch:
    """What a loss is given: fields along tokens are 0, segments -1, where ``target`` is negative."""
    mask = target >= 0
    clean = {}
    for name, value in fields.items():
        if FIELDS[name].kind in ("token", "row"):
            rows = mask.view(-1, *[1] * (value.dim() - 1))
            value = torch.where(rows, value, -1 if name in ("segments", "documents") else 0)
        clean[name] = value
    return Batch(clean, target, num_segments, vocab)


def compacted(fields: Mapping[str, Tensor], target: Tensor, num_segments: int | None = None) -> dict[str, Any]:
    """What the oracle is given: rows of tokens that count only."""
    mask = target >= 0
    rows = {k: v[mask] if FIELDS[k].kind in ("token", "row") else v for k, v in fields.items()}
    return {**rows, "num_segments": num_segments}


def only(losses: Losses) -> Summand:
    """The loss of a sum of one."""
    ((_, summand),) = losses.terms
    return summand


def check(
    losses: Losses,
    oracle: Callable[..., Tensor],
    x: Tensor,  # [n, V]
    target: Tensor,  # [n]
    fields: Mapping[str, Tensor],
    num_segments: int | None = None,
    options: Mapping[str, Any] | None = None,
    rtol: float = 1e-11,
    **statistics: Any,
) -> None:
    """Values of the loss and gradients of their weighted sum with respect to ``x``, against the oracle's.

    Rows whose target is negative may hold anything; their gradient is 0.
    """
    summand, mask = only(losses), target >= 0
    x = x.detach().clone().requires_grad_()
    stats = full_stats(x, target, **statistics)
    allowed = {"logprob", "lse", *summand.needs}
    batch = make_batch(fields, target, x.shape[-1], num_segments)
    allowed_fields = {k: v for k, v in batch.fields.items() if k in (*summand.fields, *summand.optional_fields)}
    batch = Batch(allowed_fields, target, num_segments, x.shape[-1])
    values = summand.values(Stats({k: v for k, v in stats.values.items() if k in allowed}), batch, summand.tensors)
    ours = values[mask] if summand.unit == "token" else values
    kept = x.detach()[mask].requires_grad_()
    theirs = oracle(kept, target[mask], compacted(fields, target, num_segments), **(options or {}))
    assert ours.shape == theirs.shape and values.dtype == x.dtype
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=1e-12)
    upstream = torch.linspace(0.5, 2.0, len(ours), dtype=x.dtype)
    (grad,) = torch.autograd.grad((ours * upstream).sum(), x)
    (expected,) = torch.autograd.grad((theirs * upstream).sum(), kept)
    torch.testing.assert_close(grad[mask], expected, rtol=rtol, atol=1e-12)
    assert not grad[~mask].any()
