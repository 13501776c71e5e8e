"""Heads that take no gradient: rows of hidden's gradient are made in the forward pass, and backward multiplies each by
what its token waits for. Two products, where recomputed logits take three."""

from collections.abc import Callable
from typing import Any

import loss_cases
import pytest
import torch
import torch.nn.functional as F
from budget import assert_within_budget
from cases import PLACES, Place
from loss_cases import SEGMENT_CASES, LossCase
from oracle import reference as oracle
from tiers import crossed
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from chunked_head import (
    linear_cross_entropy,
    linear_divergence,
    linear_logprobs,
    linear_loss,
    losses,
    plan,
)
from chunked_head.functions.logprobs import LogprobsOfTrainer

TOKENS, HIDDEN, VOCAB, SEGMENTS = 75, 40, 277, 5
Function = Callable[..., Any]


def operands_of(dtype: torch.dtype, device: str = "cpu", tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states with a gradient, a weight without, targets."""
    g = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(tokens, HIDDEN, generator=g), torch.randn(VOCAB, HIDDEN, generator=g) * 0.3
    target = torch.randint(VOCAB, (tokens,), generator=g).masked_fill(torch.rand(tokens, generator=g) < 0.2, -100)
    return hidden.to(device, dtype).requires_grad_(), weight.to(device, dtype), target.to(device)


def upstream_of(target: Tensor, seed: int) -> Tensor:
    """Random numbers [tokens], some 0, nan where a token does not count."""
    upstream = torch.randn(len(target), generator=torch.Generator().manual_seed(seed)).to(target.device)
    upstream[::5] = 0.0
    return torch.where(target >= 0, upstream, torch.nan)


def picked(x: Tensor, target: Tensor) -> Tensor:
    return x.log_softmax(-1).gather(-1, target.clamp(min=0)[:, None])[:, 0]


def focal(x: Tensor, target: Tensor) -> Tensor:
    logprob = picked(x, target)
    return -((1 - logprob.exp()) ** 2) * logprob


EACH = torch.linspace(0.6, 1.7, TOKENS)
BIAS = torch.linspace(-1, 1, VOCAB)


# values per token of a frozen head, and the same from logits [tokens, vocab] before any temperature
CALLS: dict[str, tuple[Function, Callable[[Tensor, Tensor], Tensor]]] = {
    "logprobs": (linear_logprobs, picked),
    "temperatures": (
        lambda h, *a, **o: linear_logprobs(h, *a, temperature=EACH.to(h.device), argmax=True, **o).logprobs,
        lambda x, y: picked(x / EACH.to(x)[:, None], y)),
    "cap and bias": (
        lambda h, *a, **o: linear_logprobs(h, *a, softcap=4.0, logit_scale=-0.7, bias=BIAS.to(h), **o),
        lambda x, y: picked(oracle.logits(x, torch.eye(VOCAB).to(x), BIAS.to(x), -0.7, 4.0), y)),
    "unreduced": (
        lambda *a, **o: linear_cross_entropy(*a, reduction="none", label_smoothing=0.1, **o),
        lambda x, y: F.cross_entropy(x, y, reduction="none", label_smoothing=0.1)),
    "focal": (
        lambda *a, **o: linear_loss(*a, losses.focal(gamma=2.0), reduction="none", **o).loss, focal),
    "shares": (
        lambda *a, **o: linear_loss(*a, losses.cross_entropy() + 0.1 * losses.entropy(), reduction="none", **o).loss,
        lambda x, y: 0.1 * -(x.softmax(-1) * x.log_softmax(-1)).sum(-1) - picked(x, y)),
}  # fmt: skip


def grads_of(
    call: Function, operands: tuple[Tensor, Tensor, Tensor], upstreams: list[Tensor], **options: Any
) -> list[Tensor]:
    """Gradients of hidden states by one backward after the other over one graph."""
    hidden, weight, target = operands
    values = call(hidden, weight, target, **options)
    return [
        torch.autograd.grad(values, hidden, upstream.to(values.dtype), retain_graph=upstream is not upstreams[-1])[0]
        for upstream in upstreams
    ]


def exact(formula: Function, operands: tuple[Tensor, Tensor, Tensor], upstream: Tensor, dtype: torch.dtype) -> Tensor:
    hidden, weight, target = (x.detach().to(dtype) if x.is_floating_point() else x for x in operands)
    hidden.requires_grad_()
    counts = target >= 0
    values = torch.where(counts, formula(hidden @ weight.t(), target), 0.0)
    return torch.autograd.grad(values, hidden, upstream.masked_fill(~counts, 0.0).to(dtype))[0]


@crossed(
    place=PLACES, name=CALLS, dtype=[torch.float32, torch.bfloat16, torch.float16],
    chunk_tokens=[32, None], skip_ignored=[False, "wait"],
)  # fmt: skip
def test_upstream_of_each_token(
    place: Place, name: str, dtype: torch.dtype, chunk_tokens: int | None, skip_ignored: bool | str
) -> None:
    """Random upstream gradients, twice over one graph: the second recomputes, since the first has given the rows
    away."""
    call, formula = CALLS[name]
    operands = operands_of(dtype, place.device)
    upstreams = [upstream_of(operands[2], seed) for seed in (1, 2)]
    options = {"chunk_tokens": chunk_tokens, "skip_ignored": skip_ignored, "backend": place.backend}
    for upstream, ours in zip(upstreams, grads_of(call, operands, upstreams, **options), strict=True):
        truth, eager = (exact(formula, operands, upstream, d) for d in (torch.float64, dtype))
        assert ours.dtype == dtype
        assert_within_budget(ours, eager, truth, dtype, name)
        assert not ours[(operands[2] < 0) | (upstream == 0)].any()


@pytest.mark.parametrize("name", CALLS)
def test_float64(name: str) -> None:
    call, formula = CALLS[name]
    operands = operands_of(torch.float64)
    upstream = upstream_of(operands[2], 1)
    (ours,) = grads_of(call, operands, [upstream], chunk_tokens=32)
    torch.testing.assert_close(ours, exact(formula, operands, upstream, torch.float64), rtol=1e-12, atol=1e-14)


@crossed(place=PLACES, case=SEGMENT_CASES, dtype=[torch.float32, torch.bfloat16])
def test_segments_without_lengths(place: Place, case: LossCase, dtype: torch.dtype) -> None:
    """Losses of sequences, whose factors of log-probabilities are known once all chunks are done."""
    sizes = loss_cases.FEWER if place == Place("triton", "cpu") else {}
    inputs = loss_cases.inputs_of(case, dtype, place.device, **sizes)
    truth, eager = (loss_cases.run_reference(case, inputs.to(d))[2][0] for d in (torch.float64, dtype))
    hidden, head = inputs.hidden.clone().requires_grad_(), {**inputs.head}
    out = linear_loss(
        hidden, inputs.weight, inputs.target, case.losses, batch=inputs.batch, num_segments=inputs.num_segments,
        backend=place.backend, chunk_tokens=16, **head,
    )  # fmt: skip
    assert out.plan is not None
    kinds = {summand.kind for _, summand in case.losses.terms}
    views = {summand.temperature for _, summand in case.losses.terms}
    is_of_logprobs = kinds.isdisjoint({"entropy", "z_loss", "topk_kl"}) and len(views) == 1
    assert out.plan.has_unit_rows == is_of_logprobs and (out.plan.schedule == "recompute") != is_of_logprobs
    for factor in (0.37, -2.0):
        (ours,) = torch.autograd.grad(out.loss, hidden, torch.full_like(out.loss, factor), retain_graph=True)
        assert_within_budget(ours, factor * eager.double(), factor * truth, dtype, case.name)


@pytest.mark.parametrize("entropy", [False, True])
def test_divergence(entropy: bool) -> None:
    """A divergence alone waits for one number a token; with a differentiable entropy for two."""
    hidden, weight, target = operands_of(torch.float64)
    teacher = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(8)).double()
    options = {"teacher_hidden": hidden.detach(), "teacher_weight": teacher, "chunk_tokens": 32}
    upstream = upstream_of(target, 1).double().nan_to_num()
    for kind, formula in {
        "forward_kl": lambda p, q: (q.exp() * (q - p)).sum(-1), "reverse_kl": lambda p, q: (p.exp() * (p - q)).sum(-1),
    }.items():  # fmt: skip
        result = linear_divergence(hidden, weight, target, divergence=kind, entropy=entropy, **options)
        (ours,) = torch.autograd.grad(result.divergence if entropy else result, hidden, upstream)
        p, q = (x.log_softmax(-1) for x in (hidden @ weight.t(), hidden.detach() @ teacher.t()))
        values = torch.where(target >= 0, formula(p, q), 0.0)
        torch.testing.assert_close(ours, torch.autograd.grad(values, hidden, upstream)[0], rtol=1e-10, atol=1e-12)


def products(call: Function, weight_grad: bool = False) -> float:
    """Products [tokens, hidden] by [hidden, vocab] that a call and its backward take."""
    hidden, weight, target = operands_of(torch.float32, tokens=128)
    with FlopCounterMode(display=False) as counter:
        values = call(hidden, weight.requires_grad_(weight_grad), target, chunk_tokens=64, backend="torch")
        (values if isinstance(values, Tensor) else sum(values[:2])).sum().backward()
    return counter.get_total_flops() / (2 * 128 * HIDDEN * VOCAB)


def of_segments(loss: losses.Losses, *names: str, **more: Any) -> Function:
    def call(hidden: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Tensor:
        g = torch.Generator().manual_seed(1)
        batch = {name: -5 - torch.rand(len(target), generator=g) for name in names} | more
        batch["segments"] = torch.arange(len(target)) * SEGMENTS // len(target)
        return linear_loss(hidden, weight, target, loss, batch=batch, num_segments=SEGMENTS, **options).loss

    return call


GSPO = of_segments(losses.gspo(), "old_logprobs", "advantages")
DPO = of_segments(losses.dpo(), "ref_logprobs", pairs=torch.tensor([[0, 1], [2, 3]]))
PRODUCTS: dict[str, tuple[Function, int]] = {
    **{name: (call, 2) for name, (call, _) in CALLS.items() if name in ("logprobs", "unreduced", "focal")},
    "argmax": (lambda *a, **o: linear_logprobs(*a, argmax=True, **o).logprobs, 2), "gspo": (GSPO, 2), "dpo": (DPO, 2),
    "entropy": (lambda *a, **o: linear_logprobs(*a, entropy=True, **o), 3),
    "lse": (lambda *a, **o: linear_logprobs(*a, lse=True, **o), 3),
    "two softmaxes": (of_segments(losses.gspo(temperature=2.0) + losses.rloo(), "old_logprobs", "advantages"), 3),
    "gspo and z-loss": (of_segments(losses.gspo() + losses.z_loss(), "old_logprobs", "advantages"), 3),
    "gspo and entropy": (of_segments(losses.gspo() + losses.entropy(), "old_logprobs", "advantages"), 3),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str) -> None:
    """Two where one number a token is missing, three where several are, four where the weight takes a gradient."""
    call, expected = PRODUCTS[name]
    assert (products(call), products(call, weight_grad=True)) == (expected, 4)


def test_entropies_that_a_trainer_may_differentiate() -> None:
    """Two products until a backward asks for the entropies' gradient: that one computes logits again."""
    call = LogprobsOfTrainer()

    def both(*a: Any, **o: Any) -> Any:
        return call(*a, entropy=True, **o)

    total: dict[str, float] = {}
    for name in ("logged", "differentiated", "differentiated again", "logged again"):

        def loss(*a: Any, name: str = name, **o: Any) -> Tensor:
            logprobs, entropies = both(*a, **o)
            assert entropies.requires_grad
            return logprobs + (0.1 * entropies if name.startswith("differentiated") else 0.1 * entropies.detach())

        total[name] = products(loss)
        operands = operands_of(torch.float64)
        values = loss(*operands, chunk_tokens=32)
        upstream = upstream_of(operands[2], 1).double().nan_to_num()
        (ours,) = torch.autograd.grad(values, operands[0], upstream)
        x = (operands[0] @ operands[1].t()).log_softmax(-1)
        entropies = -(x.exp() * x).sum(-1) * name.startswith("differentiated")
        expected = torch.where(operands[2] >= 0, picked(x, operands[2]) + 0.1 * entropies, 0.0)
        torch.testing.assert_close(
            ours, torch.autograd.grad(expected, operands[0], upstream)[0], rtol=1e-10, atol=1e-12
        )
    assert [*total.values()] == [2, 4, 3, 3]


def test_plan_says_which() -> None:
    sizes: dict[str, Any] = {
        "tokens": 8192,
        "hidden": 4096,
        "vocab": 128256,
        "dtype": torch.bfloat16,
        "device": "sm_90",
    }
    frozen = plan(**sizes, returns=["logprobs"], weight_grad=False)
    assert (frozen.schedule, frozen.has_unit_rows) == ("forward", True) and "multiplies each row" in str(frozen)
    late = plan(**sizes, returns=["logprobs", "entropy"], weight_grad=False)
    assert late.schedule == "recompute" and "as many products" in late.note
    assert frozen.gradient_bytes == late.gradient_bytes == 8192 * 4096 * 2
    assert frozen.peak_bytes <= late.peak_bytes
    for more in ({"returns": ["logprobs"]}, {"loss": losses.gspo()}, {"returns": ["logprobs"], "hidden_grad": False}):
        assert plan(**sizes, **more).schedule == "recompute" and "as many" not in plan(**sizes, **more).note
    one_chunk = plan(**{**sizes, "tokens": 512}, loss=losses.gspo(), weight_grad=False)
    assert one_chunk.schedule == "forward" and not one_chunk.has_unit_rows
    assert plan(**sizes, loss=losses.gspo(), weight_grad=False).has_unit_rows
    with pytest.warns(DeprecationWarning, match="has_unit_rows"):
        assert frozen.row_factors
    assert not plan(**sizes, loss=losses.gspo(), weight_grad=False, segment_lengths=True).has_unit_rows


def test_frozen_and_unfrozen_between_calls() -> None:
    """Each call has the gradients of what is frozen when it is made, and its graph keeps them."""
    hidden, weight, target = operands_of(torch.float64)
    bias, upstream = torch.zeros(VOCAB, dtype=torch.float64), upstream_of(target, 1).double()
    for is_weight, is_bias in ((False, False), (True, False), (False, True), (False, False), (True, True)):
        leaves = [hidden, *[weight] * is_weight, *[bias] * is_bias]
        weight.requires_grad_(is_weight), bias.requires_grad_(is_bias)
        values = linear_logprobs(hidden, weight, target, bias=bias, chunk_tokens=32)
        expected = picked(hidden @ weight.t() + bias, target)[target >= 0]
        weight.requires_grad_(), bias.requires_grad_()  # until backward, too late
        grads = torch.autograd.grad(expected, leaves, upstream[target >= 0])
        for mine, exactly in zip(torch.autograd.grad(values, leaves, upstream), grads, strict=True):
            torch.testing.assert_close(mine, exactly, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("call", [linear_logprobs, GSPO])
def test_changed_operand_is_noticed(call: Function, place: int) -> None:
    operands = operands_of(torch.float32)
    values = call(*operands, chunk_tokens=32)
    with torch.no_grad():
        operands[place].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        values.sum().backward()


def test_second_derivatives_are_refused() -> None:
    hidden, weight, target = operands_of(torch.float32)
    values = linear_logprobs(hidden, weight, target, chunk_tokens=32)
    (grad,) = torch.autograd.grad(values.sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        grad.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_and_anomaly_mode(reentrant: bool) -> None:
    operands = operands_of(torch.float64)
    upstream = upstream_of(operands[2], 1)
    truth = exact(picked, operands, upstream, torch.float64)

    def checked(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return checkpoint(
            lambda h: linear_logprobs(h, weight, target, chunk_tokens=32), hidden, use_reentrant=reentrant
        )

    with torch.autograd.set_detect_anomaly(True):
        checked(*operands).backward(upstream.nan_to_num().double())
    torch.testing.assert_close(operands[0].grad, truth, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("place", PLACES)
def test_id_out_of_range(place: Place) -> None:
    """Where the host cannot read it, everything is nan."""
    if place.device == "cpu":
        pytest.skip("the CPU raises")
    hidden, weight, target = operands_of(torch.float32, place.device)
    target[3] = VOCAB
    values = linear_logprobs(hidden, weight, target, chunk_tokens=32)
    values.sum().backward()
    assert hidden.grad is not None and hidden.grad.isnan().all()


@crossed(name=["logprobs", "unreduced", "gspo", "temperatures"], dtype=[torch.bfloat16, torch.float32, torch.float16])
def test_in_a_graph(name: str, dtype: torch.dtype) -> None:
    call = GSPO if name == "gspo" else CALLS[name][0]
    operands = operands_of(dtype)
    torch.compiler.reset()
    upstream = torch.tensor(0.37) if name == "gspo" else upstream_of(operands[2], 1)
    compiled = torch.compile(lambda *a: call(*a, chunk_tokens=32), fullgraph=name != "gspo", backend="aot_eager")
    (eager,), (ours,) = grads_of(call, operands, [upstream], chunk_tokens=32), grads_of(compiled, operands, [upstream])
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(ours, eager, rtol=2 * eps, atol=eps * float(eager.abs().max()))
