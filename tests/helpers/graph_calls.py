"""Calls of the public functions for ``torch.compile``, and the comparison of compiled with uncompiled results."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chunked_head import (
    CrossEntropyLoss,
    LossOutput,
    linear_cross_entropy,
    linear_divergence,
    linear_logprobs,
    linear_loss,
    logits_logprobs,
    logits_loss,
    losses,
    metrics,
)

VOCAB, HIDDEN, SEGMENTS = 301, 24, 4


class Data(NamedTuple):
    """Two sequences and what goes with them."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    target: Tensor
    class_weights: Tensor
    token_weights: Tensor
    fields: dict[str, Tensor]
    scalar: Tensor


def make_data(
    dtype: torch.dtype = torch.float32, device: str = "cpu", tokens: int = 21, seed: int = 5, vocab: int = VOCAB,
    width: int = HIDDEN,
) -> Data:  # fmt: skip
    made = torch.Generator().manual_seed(seed)
    shape = (2, tokens)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=made).to(device)

    target = torch.randint(0, vocab, shape, generator=made)
    target[0, :3] = -100
    fields = {
        "old_logprobs": normal(*shape) * 0.2 - 5.0, "advantages": normal(*shape), "mask": normal(*shape) > -1,
        "segments": torch.randint(-1, SEGMENTS, shape, generator=made).to(device),
        "teacher_ids": torch.randint(0, vocab, (*shape, 3), generator=made).to(device),
        "teacher_logprobs": normal(*shape, 3) * 0.1 - 3.0,
        "teacher_hidden": normal(*shape, 8), "teacher_weight": normal(vocab, 8),
        "temperature": 0.5 + torch.rand(shape, generator=made).to(device),
        "kept_ids": torch.randint(-40, vocab, (*shape, 4), generator=made).clamp(min=-1).to(device),
    }  # fmt: skip
    fields["kept_ids"][..., ::3, :] = -1
    operands = (normal(*shape, width), normal(vocab, width), normal(vocab))
    hidden, weight, bias = (t.to(dtype).requires_grad_() for t in operands)
    return Data(
        hidden, weight, bias, target.to(device), normal(vocab).abs(), normal(*shape).abs(), fields, normal().abs() + 1
    )


def chosen(data: Data, *names: str) -> dict[str, Tensor]:
    return {name: data.fields[name] for name in names}


def plain(d: Data) -> Tensor:
    return linear_cross_entropy(d.hidden, d.weight, d.target, bias=d.bias, label_smoothing=0.1, z_loss=1e-3, shift=1)


def weighted(d: Data) -> Tensor:
    return linear_cross_entropy(
        d.hidden * 2, d.weight, d.target, class_weights=d.class_weights, token_weights=d.token_weights,
        label_smoothing=0.2, normalizer=d.scalar, upstream=d.scalar,
    )  # fmt: skip


def unreduced(d: Data) -> Tensor:
    return linear_cross_entropy(d.hidden, d.weight, d.target, reduction="none", shift=1, softcap=9.0)


def grpo(d: Data) -> LossOutput:
    """A call whose losses and metrics are made inside of the compiled function."""
    return linear_loss(
        d.hidden, d.weight, d.target,
        losses.grpo(clip_low=0.2, clip_high=0.28) + losses.z_loss().times(d.scalar) - 0.01 * losses.entropy(),
        batch=chosen(d, "old_logprobs", "advantages", "mask"), normalizer=17.0,
        metrics=[metrics.clip_fraction(), metrics.effective_sample_size(), metrics.logprob(reduce="min")],
    )  # fmt: skip


OUTSIDE = 0.5 * losses.gspo() + losses.cross_entropy(token_scaling=True, name="imitation") * torch.tensor(0.25)
MEASURED = (metrics.kl_old(weighting="segment"), metrics.accuracy(), metrics.perplexity(weighting="segment"))


def gspo(d: Data) -> LossOutput:
    """A call whose losses and metrics were made before, and whose gradients need the statistics of all tokens."""
    return linear_loss(
        d.hidden, d.weight, d.target, OUTSIDE, batch=chosen(d, "old_logprobs", "advantages", "segments"),
        num_segments=SEGMENTS, metrics=MEASURED, chunk_tokens=16, bias=d.bias,
    )  # fmt: skip


def distilled(d: Data) -> LossOutput:
    loss = losses.topk_kl(token_weights=d.token_weights) + 0.5 * losses.jsd(temperature=2.0)
    names = ("teacher_ids", "teacher_logprobs", "teacher_hidden", "teacher_weight")
    return linear_loss(d.hidden, d.weight, None, loss, batch=chosen(d, *names))


def logprobs(d: Data) -> Any:
    return linear_logprobs(
        d.hidden, d.weight, d.target, entropy=True, lse=True, argmax=True, top_k=3, mean_logit=True,
        log_sum_sq_probs=True, mask=d.fields["mask"], shift=1,
    )  # fmt: skip


def logprobs_alone(d: Data) -> Tensor:
    return linear_logprobs(d.hidden, d.weight, d.target, temperature=0.7) * d.fields["advantages"]


def tempered(d: Data) -> Any:
    return linear_logprobs(
        d.hidden, d.weight, d.target, log_sum_sq_probs=True, shift=1, softcap=9.0, temperature=d.fields["temperature"]
    )


def kept(d: Data) -> LossOutput:
    return linear_loss(
        d.hidden, d.weight, d.target, losses.grpo(), batch=chosen(d, "old_logprobs", "advantages", "kept_ids"), shift=1
    )


def kept_logprobs(d: Data) -> Any:
    return linear_logprobs(d.hidden, d.weight, d.target, entropy=True, kept_ids=d.fields["kept_ids"])


def divergence(d: Data) -> Any:
    teacher = chosen(d, "teacher_hidden", "teacher_weight")
    return linear_divergence(
        d.hidden, d.weight, divergence="jsd", beta=0.3, entropy=True, mask=d.fields["mask"], shift=1, **teacher
    )


def logits_of(d: Data) -> Tensor:
    return torch.nn.functional.linear(d.hidden, d.weight, d.bias)


def on_logits(d: Data) -> LossOutput:
    loss = losses.grpo() + losses.z_loss().times(d.scalar)
    batch = chosen(d, "old_logprobs", "advantages", "mask")
    measured = [metrics.clip_fraction(), metrics.logprob(reduce="min")]
    return logits_loss(logits_of(d), d.target, loss, batch=batch, metrics=measured, normalizer=17.0, shift=1)


def segments_on_logits(d: Data) -> LossOutput:
    batch = chosen(d, "old_logprobs", "advantages", "segments")
    logits = logits_of(d)[:, :-1]
    batch = {name: field[:, :-1] for name, field in batch.items()}
    return logits_loss(
        logits, d.target[:, :-1], OUTSIDE, batch=batch, num_segments=SEGMENTS, metrics=MEASURED, vocab_size=VOCAB - 3
    )


def logprobs_of_logits(d: Data) -> Any:
    return logits_logprobs(
        logits_of(d), d.target, entropy=True, lse=True, argmax=True, mean_logit=True, log_sum_sq_probs=True,
        mask=d.fields["mask"], shift=1,
    )  # fmt: skip


def module(d: Data) -> Tensor:
    criterion = CrossEntropyLoss(d.class_weights, label_smoothing=0.1, z_loss=1e-3)
    return criterion(logits_of(d).flatten(0, -2), d.target.flatten())


def unreduced_module(d: Data) -> Tensor:
    return CrossEntropyLoss(reduction="none", softcap=9.0)(logits_of(d).movedim(-1, 1), d.target)


CALLS: list[Callable[[Data], Any]] = [
    plain, weighted, unreduced, grpo, gspo, tempered, kept, kept_logprobs, distilled, logprobs, logprobs_alone,
    divergence, on_logits, segments_on_logits, logprobs_of_logits, module, unreduced_module,
]  # fmt: skip


def named(out: Any) -> dict[str, Tensor]:
    """All tensors of a call's result, by name."""
    if isinstance(out, Tensor):
        return {"value": out}
    if isinstance(out, LossOutput):
        found = {"loss": out.loss, **{f"part {name}": part for name, part in out.parts.items()}}
        for name, metric in out.metrics.items():
            given = {"sum": metric.sum, "count": metric.count, "extremum": metric.extremum, "value": metric.value}
            found |= {f"metric {name} {key}": value for key, value in given.items() if value is not None}
        return found
    return out._asdict()


def outcome(call: Callable[[Data], Any], data: Data, upstream: float | Tensor) -> tuple[Any, list[Tensor | None]]:
    out = call(data)
    leaves = [t for t in (data.hidden, data.weight, data.bias) if t.requires_grad]
    total = sum(value.sum() for value in named(out).values() if value.requires_grad)
    return out, list(torch.autograd.grad(total * upstream, leaves, allow_unused=True))


def assert_alike(
    call: Callable[[Data], Any], data: Data, upstream: float = 0.37, exact: bool = True, **how: Any
) -> None:
    """Compares the compiled call's results and gradients with those of the call, by default bit for bit."""
    torch._dynamo.reset()
    expected, grads = outcome(call, data, upstream)
    found, ours = outcome(torch.compile(call, fullgraph=True, **how), data, upstream)
    assert type(found) is type(expected)
    assert list(named(found)) == list(named(expected))
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {}
    for name, value in named(expected).items():
        torch.testing.assert_close(
            named(found)[name], value, msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )
        assert named(found)[name].requires_grad == value.requires_grad, name
    for mine, grad in zip(ours, grads, strict=True):
        assert (mine is None) == (grad is None)
        if grad is not None:
            assert mine.dtype == grad.dtype
            # each of them is rounded by itself, the compiled one once more where the upstream gradient comes
            limit = {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 2**-7}[grad.dtype]
            assert (mine.double() - grad.double()).norm() <= (0.0 if exact else limit) * grad.double().norm()
