"""Losses with default options on whole logits, in plain PyTorch, to check the library's against."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def values(kind: str, x: Tensor, target: Tensor, fields: Mapping[str, Any]) -> Tensor:
    """Of each token, segment or pair; ``x`` [tokens, vocab]. Every token counts, and every segment has one."""
    logs = x.log_softmax(-1)
    own = logs.gather(1, target[:, None])[:, 0]
    if kind == "cross_entropy":
        return -own
    if kind == "entropy":
        return -(logs.exp() * logs).sum(-1)
    if kind == "z_loss":
        return x.logsumexp(-1).square()
    if kind == "grpo":
        return clipped(own - fields["old_logprobs"], fields["advantages"])
    if kind == "gspo":
        lengths = of_segments(torch.ones_like(own), fields["segments"])
        log_ratios = of_segments(own - fields["old_logprobs"], fields["segments"]) / lengths
        return clipped(log_ratios, of_segments(fields["advantages"], fields["segments"]) / lengths)
    if kind == "dpo":
        chosen, rejected = of_segments(own - fields["ref_logprobs"], fields["segments"])[fields["pairs"]].unbind(1)
        return -F.logsigmoid(0.1 * (chosen - rejected))
    if kind == "topk_kl":
        return topk_kl(logs, fields["teacher_ids"], fields["teacher_logprobs"])
    if kind == "topk_alone":
        return topk_alone(logs, fields["teacher_ids"], fields["teacher_logprobs"])
    teacher = fields["teacher_x"].log_softmax(-1)
    if kind == "forward_kl":
        return kl(teacher, logs)
    if kind == "reverse_kl":
        return kl(logs, teacher)
    assert kind == "jsd", kind
    mixture = torch.logaddexp(logs, teacher) - math.log(2)
    return (kl(logs, mixture) + kl(teacher, mixture)) / 2


def clipped(log_ratios: Tensor, advantages: Tensor) -> Tensor:
    ratios = log_ratios.exp()
    return -torch.minimum(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages)


def of_segments(of_tokens: Tensor, segments: Tensor) -> Tensor:
    """The sum over each segment."""
    return of_tokens.new_zeros(int(segments.max()) + 1).index_add(0, segments, of_tokens)


def topk_kl(logs: Tensor, ids: Tensor, logprobs: Tensor) -> Tensor:
    """Over the ids that the teacher names, the likeliest where it names one twice, and all others as one outcome."""
    teacher = torch.zeros_like(logs).scatter_reduce(1, ids, logprobs.exp().to(logs.dtype), "amax")
    rest, others = (1 - teacher.sum(1)).clamp(min=0), (logs.exp() * (teacher == 0)).sum(1)
    return F.kl_div(logs, teacher, reduction="none").sum(1) + F.kl_div(others.log(), rest, reduction="none")


def topk_alone(logs: Tensor, ids: Tensor, logprobs: Tensor) -> Tensor:
    """The same where there are no others: both are normalised over the ids that the teacher names."""
    teacher = torch.zeros_like(logs).scatter_reduce(1, ids, logprobs.exp().to(logs.dtype), "amax")
    named = logs.masked_fill(teacher == 0, -math.inf).log_softmax(1).masked_fill(teacher == 0, 0.0)
    return F.kl_div(named, teacher / teacher.sum(1, keepdim=True), reduction="none").sum(1)


def kept(x: Tensor, target: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
    """Logits of columns outside of a token's set (its target belongs to it) are -inf; no set is all of them."""
    inside = F.one_hot(target, x.shape[1]).bool()
    for token, some in enumerate(ids.tensor_split(offsets[1:-1].cpu())):
        inside[token, some if len(some) else slice(None)] = True
    return x.masked_fill(~inside, -math.inf)


def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Of distributions a and b, from a to b."""
    return F.kl_div(log_b, log_a, reduction="none", log_target=True).sum(-1)
