"""The contract of losses and metrics, line by line, through the public calls, and the pitfalls that peers have met.

Single promises; mixtures of everything are drawn by ``fuzz.py``.
"""

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from chunked_head import linear_logprobs, linear_loss, logits_loss, losses, metrics
from chunked_head.losses import Field, Losses

HIDDEN, VOCAB, SEGMENTS = 6, 13, 3
LEADING = (5, 4)
IGNORED = -100


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def operands(*leading: int, hidden: int = HIDDEN, vocab: int = VOCAB) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and target; float64, both first ones with gradient."""
    leading = leading or LEADING
    target = torch.randint(0, vocab, leading, generator=torch.Generator().manual_seed(2))
    return normal(*leading, hidden, seed=0).requires_grad_(), normal(vocab, hidden, seed=1).requires_grad_(), target


def own_logprobs(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    x = hidden.detach() @ weight.detach().t()
    return x.log_softmax(-1).gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)


def segment_fields(target: Tensor) -> dict[str, Tensor]:
    return {
        "segments": target % SEGMENTS, "pairs": torch.tensor([[0, 1], [2, 0]]), "advantages": normal(*target.shape),
        "segment_labels": torch.tensor([True, False, True]), "ref_logprobs": normal(*target.shape, seed=5) - 2.0,
    }  # fmt: skip


# ---- masks, garbage, nothing at all


def fields_for(names: tuple[str, ...], target: Tensor) -> dict[str, Tensor]:
    lead = target.shape
    fields = segment_fields(target) | {
        "old_logprobs": normal(*lead, seed=4) - 2.0, "teacher_logits": normal(*lead, VOCAB, seed=6),
        "teacher_ids": torch.arange(4).expand(*lead, 4), "teacher_logprobs": normal(*lead, 4).log_softmax(-1) - 0.3,
    }  # fmt: skip
    return {name: fields[name] for name in names}


@pytest.mark.parametrize("ignore_index", [0, 5])
def test_without_a_target_ignore_index_excludes_nothing(ignore_index: int) -> None:
    hidden, weight, _ = operands()
    ours = linear_loss(hidden, weight, None, losses.z_loss(), ignore_index=ignore_index).loss
    expected = (hidden @ weight.t()).logsumexp(-1).square().mean()
    torch.testing.assert_close(ours, expected)


def test_a_target_that_nobody_may_leave_out() -> None:
    hidden, weight, _ = operands()
    with pytest.raises(ValueError, match="target is None"):
        linear_loss(hidden, weight, None, losses.z_loss(), metrics=[metrics.accuracy()])
    with pytest.raises((ValueError, TypeError), match="target"):
        linear_logprobs(hidden, weight, None)  # type: ignore[arg-type]


# ---- values: weights, denominators, reductions


def test_a_loss_has_token_weights_of_its_own() -> None:
    hidden, weight, target = operands()
    own = torch.rand(LEADING, dtype=torch.float64)
    everyones = torch.rand(LEADING, dtype=torch.float64)
    loss = losses.cross_entropy(token_weights=own) + losses.cross_entropy(name="other")
    out = linear_loss(hidden, weight, target, loss, batch={"token_weights": everyones}, shift=1)
    values = -(hidden @ weight.t()).log_softmax(-1)[:, :-1].gather(-1, target[:, 1:, None])[..., 0]
    torch.testing.assert_close(out.parts["cross_entropy"], (own[:, 1:] * values).mean().detach())
    torch.testing.assert_close(out.parts["other"], (everyones[:, 1:] * values).mean().detach())


@pytest.mark.parametrize(
    "loss", [losses.cross_entropy(normalizer=10.0), losses.cross_entropy(normalizer=torch.tensor(10.0))]
)
def test_a_losss_normalizer_is_an_error_where_it_would_not_be_used(loss: Losses) -> None:
    hidden, weight, target = operands()
    with pytest.raises(ValueError, match=r"normalizer .*mean"):
        linear_loss(hidden, weight, target, loss, reduction="sum")


def test_equal_names_raise() -> None:
    hidden, weight, target = operands()
    with pytest.raises(ValueError, match="called 'cross_entropy'"):
        linear_loss(hidden, weight, target, losses.cross_entropy() + losses.cross_entropy(temperature=2.0))
    with pytest.raises(ValueError, match="called 'lse'"):
        linear_loss(hidden, weight, target, losses.z_loss(), metrics=[metrics.lse(), metrics.lse(temperature=2.0)])
    both = losses.cross_entropy() + losses.cross_entropy(temperature=2.0, name="warm")
    assert set(linear_loss(hidden, weight, target, both).parts) == {"cross_entropy", "warm"}


# ---- fields


def by_documents(stats: Any, batch: Any) -> Tensor:
    return batch.segment_mean(stats.logprob, "documents")


def by_pairs(stats: Any, batch: Any) -> Tensor:
    return stats.logprob.sum().expand(len(batch["pairs"]) if "pairs" in batch else 3)


some_ids = torch.arange(20).view(LEADING) % SEGMENTS
IDS, ADVANTAGES, THREE = torch.zeros(*LEADING, 3, dtype=torch.int64), torch.ones(LEADING), -torch.ones(*LEADING, 3)
LABELS = torch.ones(SEGMENTS, dtype=torch.bool)
Wrong = tuple[type[Exception], str, Losses, dict[str, Any]]
WRONG: dict[str, Wrong] = {
    "missing": (ValueError, r"loss grpo needs batch\['advantages'\]", losses.grpo(), {}),
    "unknown": (ValueError, "'old_logprob'", losses.z_loss(), {"old_logprob": ADVANTAGES}),
    "column": (ValueError, "nothing is broadcast: expand", losses.reinforce(), {"advantages": torch.ones(5, 1)}),
    "integers": (TypeError, "floating-point, got int64", losses.reinforce(), {"advantages": some_ids}),
    "gradient": (ValueError, "detach", losses.reinforce(), {"advantages": ADVANTAGES.clone().requires_grad_()}),
    "device": (ValueError, "is on meta", losses.reinforce(), {"advantages": ADVANTAGES.to("meta")}),
    "mask-float": (TypeError, r"batch\['mask'\] must be bool", losses.z_loss(), {"mask": ADVANTAGES}),
    "segment-range": (IndexError, "got 3", losses.gspo(), {"segments": some_ids + 1, "advantages": ADVANTAGES}),
    "segment-minus-2": (IndexError, "got -2", losses.gspo(), {"segments": some_ids - 2, "advantages": ADVANTAGES}),
    "pair-minus-1": (IndexError, "got -1", losses.cpo(), {"segments": some_ids, "pairs": torch.tensor([[0, -1]])}),
    "pair-range": (IndexError, "got 3", losses.cpo(), {"segments": some_ids, "pairs": torch.tensor([[0, 3]])}),
    "pair-shape": (ValueError, "pairs, 2", losses.cpo(), {"segments": some_ids, "pairs": torch.tensor([[0, 1, 2]])}),
    "labels-number": (
        ValueError, "segment_labels", losses.kto(reference_free=True),
        {"segments": some_ids, "segment_labels": LABELS[:2]},
    ),
    "teacher-id-range": (
        IndexError, f"got {VOCAB}", losses.topk_kl(), {"teacher_ids": IDS + VOCAB, "teacher_logprobs": THREE}
    ),
    "teacher-none": (TypeError, "teacher_logits", losses.forward_kl(), {"teacher_logits": None}),
    "teacher-0d": (ValueError, "teacher_logits", losses.forward_kl(), {"teacher_logits": torch.tensor(1.0)}),
    "teacher-empty": (ValueError, "teacher_logits", losses.forward_kl(), {"teacher_logits": torch.zeros(*LEADING, 0)}),
    "teacher-logprobs-broadcast": (
        ValueError, "teacher_logprobs", losses.topk_kl(), {"teacher_ids": IDS, "teacher_logprobs": THREE[..., :1]}
    ),
    "teacher-mask-broadcast": (
        ValueError, "teacher_mask", losses.topk_kl(),
        {"teacher_ids": IDS, "teacher_logprobs": THREE, "teacher_mask": THREE[..., :1] < 0},
    ),
    "unit-segments": (
        ValueError, "segments", losses.custom(by_documents, scope="segment", unit="segment"), {"documents": some_ids}
    ),
    "unit-pairs": (ValueError, "pairs", losses.custom(by_pairs, scope="segment", unit="pair"), {"segments": some_ids}),
    "mask-as-weights": (
        ValueError, "the mask applies by itself", losses.cross_entropy(token_weights="mask"), {"mask": some_ids > 1}
    ),
    **{
        f"normalizer-{name}": (
            ValueError, f"normalizer.*{name}", losses.cross_entropy(normalizer=name), {name: field}
        )
        for name, field in (("mask", some_ids > 1), ("segments", some_ids), ("advantages", ADVANTAGES),
                            ("segment_labels", LABELS))
    },
    "labels-column": (
        ValueError, "segment_labels", losses.kto(reference_free=True),
        {"segments": some_ids, "segment_labels": LABELS[:, None]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_fields(name: str) -> None:
    error, message, loss, batch = WRONG[name]
    hidden, weight, target = operands()
    with pytest.raises(error, match=message):
        linear_loss(hidden, weight, target, loss, batch=batch, num_segments=SEGMENTS)


@pytest.mark.parametrize("number", [True, 3.0, "3", torch.tensor(3), -3, None], ids=repr)
def test_wrong_numbers_of_segments(number: Any) -> None:
    hidden, weight, target = operands()
    batch = {"segments": torch.full(LEADING, -1), "advantages": ADVANTAGES}
    with pytest.raises((TypeError, ValueError), match="num_segments"):
        linear_loss(hidden, weight, target, losses.gspo(), batch=batch, num_segments=number)


# ---- what the caller does afterwards

CHANGED: dict[str, tuple[Losses, tuple[str, ...]]] = {
    "gspo": (losses.gspo(), ("segments", "advantages", "old_logprobs", "mask", "token_weights")),
    "dpo": (losses.dpo(), ("segments", "pairs", "ref_logprobs")),
    "kto": (losses.kto(), ("segments", "segment_labels", "ref_logprobs")),
    "topk": (losses.gspo() + losses.topk_kl(), ("segments", "advantages", "teacher_ids", "teacher_logprobs")),
    "user": (
        losses.custom(
            lambda stats, batch: batch.segment_mean(stats.logprob) * batch["kinds"].to(stats.logprob.dtype),
            scope="segment", unit="segment", fields={"kinds": Field("segment", "int")},
        ),
        ("segments", "kinds"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_fields_changed_before_backward(name: str) -> None:
    """What a recomputing backward reads is a copy, or autograd notices."""
    loss, names = CHANGED[name]
    hidden, weight, target = operands()
    fields = fields_for((), target) | segment_fields(target) | {
        "old_logprobs": normal(*LEADING, seed=4) - 2.0, "mask": target > 2, "token_weights": torch.rand(LEADING),
        "teacher_ids": torch.arange(4).expand(*LEADING, 4).clone(), "kinds": torch.tensor([1, 2, 3]),
        "teacher_logprobs": normal(*LEADING, 4).log_softmax(-1) - 0.3,
    }  # fmt: skip
    grads = []
    for change in (False, True):
        batch = {key: fields[key].clone() for key in names}
        ours = target.clone()
        out = linear_loss(hidden, weight, ours, loss, batch=batch, num_segments=SEGMENTS, chunk_tokens=7)
        assert out.plan is not None and out.plan.schedule == "recompute"
        if change:
            ours.fill_(0)
            for value in batch.values():
                value.logical_not_() if value.dtype == torch.bool else value.zero_()
        grads.append(torch.autograd.grad(out.loss, (hidden, weight)))
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])


def test_numbers_on_the_device_changed_before_backward() -> None:
    hidden, weight, target = operands()
    grads = []
    for change in (False, True):
        held = [torch.tensor(v, dtype=torch.float64) for v in (2.0, 5.0, 3.0)]
        class_weights = torch.linspace(0.1, 1.0, VOCAB, dtype=torch.float64)
        loss = held[0] * losses.cross_entropy(class_weights=class_weights, label_smoothing=0.1, normalizer=held[1])
        batch = {"segments": some_ids, "advantages": normal(*LEADING)}
        out = linear_loss(
            hidden, weight, target, loss + losses.gspo(), batch=batch, num_segments=SEGMENTS, upstream=held[2],
            chunk_tokens=7,
        )  # fmt: skip
        if change:
            for tensor in (*held, class_weights):
                tensor.fill_(7.0)
        grads.append(torch.autograd.grad(out.loss, (hidden, weight)))
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])


@pytest.mark.parametrize("field", ["teacher_logits", "teacher_hidden", "teacher_weight", "teacher_bias"])
def test_a_changed_dense_teacher_is_noticed(field: str) -> None:
    hidden, weight, target = operands()
    batch = {"segments": some_ids, "advantages": normal(*LEADING)}
    if field == "teacher_logits":
        batch["teacher_logits"] = normal(*LEADING, VOCAB)
    else:
        batch |= {"teacher_hidden": normal(*LEADING, 3), "teacher_weight": normal(VOCAB, 3)}
        batch["teacher_bias"] = normal(VOCAB)
    loss = losses.gspo() + losses.forward_kl()
    out = linear_loss(hidden, weight, target, loss, batch=batch, num_segments=SEGMENTS, chunk_tokens=7)
    batch[field].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.loss.backward()


def test_a_teacher_is_let_go_after_backward() -> None:
    hidden, weight, target = operands()
    teacher = normal(*LEADING, VOCAB)
    there = weakref.ref(teacher)
    out = linear_loss(hidden, weight, target, losses.forward_kl(), batch={"teacher_logits": teacher})
    del teacher
    out.loss.backward()
    gc.collect()
    assert out.loss.requires_grad and there() is None


# ---- pitfalls of single losses


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd", "tvd"])
@pytest.mark.parametrize("excluder", ["teacher", "both"])
def test_ids_that_a_teacher_excludes(kind: str, excluder: str) -> None:
    """Exact zeros are no nan; KL(p || q) is finite, and pushes an id down that the teacher excludes."""
    x, teacher = normal(20, VOCAB), normal(20, VOCAB, seed=1)
    teacher[:, 2] = -math.inf
    if excluder == "both":
        x[:, 2] = -math.inf
    loss = logits_loss(x.requires_grad_(), None, getattr(losses, kind)(), batch={"teacher_logits": teacher}).loss
    (grad,) = torch.autograd.grad(loss, x)
    assert loss.isfinite() and grad.isfinite().all()
    assert (grad[:, 2] > 0).all() if excluder == "teacher" else not grad[:, 2].any()


# ---- users' losses, plans, compilers


def test_a_users_infinite_slope_where_nothing_counts() -> None:
    """Statistics are 0 there, and a logarithm of them has no finite slope."""
    loss = losses.custom(lambda stats, batch: torch.log(-stats.logprob), scope="token")
    hidden, weight, target = operands()
    target = torch.where(target > 6, target, IGNORED)
    (grad,) = torch.autograd.grad(linear_loss(hidden, weight, target, loss).loss, hidden)
    assert grad.isfinite().all() and not grad[target == IGNORED].any() and grad[target != IGNORED].any()
