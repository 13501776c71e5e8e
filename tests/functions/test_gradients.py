"""What happens to gradients: upstreams, repeated and missing backwards, frozen operands, autocast, checkpoints."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from budget import assert_outcome, assert_within_budget
from cases import FEW, PLACES, Case, Inputs, Place, run, run_ours, run_reference, upstream_like
from oracle import reference
from tiers import crossed
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import chunked_head.stores.store
from chunked_head import (
    linear_cross_entropy,
    linear_divergence,
    linear_logprobs,
    linear_loss,
    logits_loss,
    losses,
    metrics,
)

SMALL = Case("", (FEW,), 64, 131, schedule={"chunk_tokens": 32})
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def leaves(inputs: Inputs) -> tuple[Tensor, Tensor]:
    return inputs.hidden.clone().requires_grad_(), inputs.weight.clone().requires_grad_()


@crossed(place=PLACES, dtype=DTYPES, factor=[0.37, 1.0, -2.5, 0.0], foretold=[None, 0.37, "tensor"])
def test_upstream(place: Place, dtype: torch.dtype, factor: float, foretold: float | str | None) -> None:
    """Whatever factor comes, foretold or not, is applied once."""
    inputs = SMALL.inputs(dtype, place.device)
    declared = torch.tensor(0.37, device=place.device) if foretold == "tensor" else foretold
    upstream = torch.tensor(factor, device=place.device)
    truth, eager = (run_reference(inputs, d, upstream) for d in (torch.float64, dtype))
    assert_outcome(run_ours(inputs, place, upstream, upstream=declared), eager, truth, dtype)


@crossed(place=PLACES, dtype=DTYPES, accumulate=[None, torch.float32])
def test_every_backward_over_a_retained_graph(place: Place, dtype: torch.dtype, accumulate: torch.dtype | None) -> None:
    inputs = SMALL.inputs(dtype, place.device)
    hidden, weight = leaves(inputs)
    loss = linear_cross_entropy(
        hidden, weight, inputs.target, backend=place.backend, chunk_tokens=32, accumulate_dtype=accumulate
    )
    for factor in (0.37, 1.0, 3.0):
        upstream = torch.tensor(factor, device=place.device)
        ours = torch.autograd.grad(loss, (hidden, weight), upstream, retain_graph=factor != 3.0)
        truth, eager = (run_reference(inputs, d, upstream) for d in (torch.float64, dtype))
        for name, mine in zip(("hidden", "weight"), ours, strict=True):
            assert_within_budget(mine, getattr(eager, name), getattr(truth, name), dtype, f"{name} x {factor}")
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@crossed(place=PLACES, reduction=["mean", "none"], asked=["hidden", "weight", "neither"])
def test_frozen_operands(place: Place, reduction: str, asked: str) -> None:
    """What is frozen gets no gradient, what is not the same as ever; tests/plan/test_memory.py looks at buffers."""
    inputs = SMALL.inputs(torch.float16, place.device)
    full = run(linear_cross_entropy, inputs, backend=place.backend, reduction=reduction, chunk_tokens=32)
    hidden, weight = inputs.hidden.clone(), inputs.weight.clone()
    hidden.requires_grad_(asked == "hidden")
    weight.requires_grad_(asked == "weight")
    loss = linear_cross_entropy(
        hidden, weight, inputs.target, backend=place.backend, reduction=reduction, chunk_tokens=32
    )
    if asked != "neither":
        loss.backward(upstream_like(loss))
    assert torch.equal(loss, full.loss)
    assert loss.requires_grad == (asked != "neither")
    if asked == "hidden":
        assert weight.grad is None
        torch.testing.assert_close(hidden.grad, full.hidden, rtol=4e-3, atol=1e-6)
    if asked == "weight":
        assert hidden.grad is None
        torch.testing.assert_close(weight.grad, full.weight, rtol=4e-3, atol=1e-6)


@crossed(place=PLACES, dtype=DTYPES, given=["call's", "loss's"])
def test_infinite_losses_by_a_normalizer_of_zero(place: Place, dtype: torch.dtype, given: str) -> None:
    """0 and zero gradients, whatever the loss and its slope would be, and no part in those of a loss beside it."""
    inputs = Case("", (12,), 16, 37).inputs(dtype, place.device)
    far = torch.full((12,), 300.0, device=place.device)
    batch = {"ref_logprobs": -far, "old_logprobs": -far, "advantages": -torch.ones_like(far)}
    none = torch.zeros((), device=place.device)
    own = {} if given == "call's" else {"normalizer": 0.0}
    # bias_correction multiplies by the ratio to the old policy, which overflows
    corrected = losses.kl_to_reference(log_ratio_clamp=None, bias_correction=True, **own)
    infinite = corrected + losses.grpo(ratio_clamp=None, **own)
    bias = torch.zeros(37, device=place.device, dtype=dtype)
    bias[inputs.target[inputs.target >= 0][0]] = -torch.inf
    loss = infinite if given == "call's" else infinite + losses.cross_entropy()
    normalizer = none if given == "call's" else None
    found = []
    for made in (loss, losses.cross_entropy()):
        hidden, weight = leaves(inputs)
        fields = batch if made is loss else {}
        out = linear_loss(
            hidden, weight, inputs.target, made, batch=fields, bias=bias if given == "call's" else None,
            normalizer=normalizer, backend=place.backend, chunk_tokens=8,
        )  # fmt: skip
        found.append([out.loss, *torch.autograd.grad(out.loss, (hidden, weight))])
    if given == "call's":
        assert not any(value.any() for value in (*found[0], *found[1]))
    for ours, alone in zip(*found, strict=True):
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(ours, alone, rtol=4 * eps, atol=eps * float(alone.abs().max()))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("vocab", [131, pytest.param(128256, marks=pytest.mark.gpu)])
def test_fp16_under_a_loss_scale(place: Place, vocab: int) -> None:
    """1 / D = 2^-20 and a loss scale of 65536: neither may push gradients out of fp16's range on the way."""
    if vocab > 1000 and place.device == "cpu":
        vocab = 1009  # selected by -m gpu only together with the GPU's places, where it runs in full
    inputs = Case("", (200,), 64, vocab, {"normalizer": 2.0**20}).inputs(torch.float16, place.device)
    scale = torch.tensor(65536.0, device=place.device)
    truth, eager = (run_reference(inputs, dtype, scale) for dtype in (torch.float64, torch.float16))
    assert_outcome(run_ours(inputs, place, scale), eager, truth, torch.float16)
    assert_outcome(run_ours(inputs, place, scale, upstream=65536.0), eager, truth, torch.float16)
    each = Inputs(inputs.hidden, inputs.weight, inputs.target, {"reduction": "none"}, {})
    upstream = torch.rand(200, device=place.device) * 65536.0 / 2.0**20
    truth, eager = (run_reference(each, dtype, upstream) for dtype in (torch.float64, torch.float16))
    assert_outcome(run_ours(each, place, upstream), eager, truth, torch.float16)


@crossed(
    place=PLACES,
    autocast=[torch.bfloat16, torch.float16],
    hidden_dtype=[torch.float32, torch.bfloat16],
    reduction=["mean", "none"],
)
def test_autocast(place: Place, autocast: torch.dtype, hidden_dtype: torch.dtype, reduction: str) -> None:
    """Computes in autocast's dtype, gradients come in the inputs', and no more is rounded than eager rounds."""
    if place == Place("triton", "cpu") and autocast == torch.bfloat16 != hidden_dtype:
        hidden_dtype = torch.bfloat16  # the interpreter truncates where a GPU rounds fp32 to bf16
    base = Case("", (FEW,), 64, 131, {"bias": lambda c, g: torch.randn(c.vocab, generator=g), "reduction": reduction})
    inputs = base.inputs(torch.float32, place.device)
    object.__setattr__(inputs, "hidden", inputs.hidden.to(hidden_dtype))

    def under_autocast(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args, **options):
            with torch.autocast(place.device, dtype=autocast):
                return function(*args, **options)

        return call

    eager = run(under_autocast(reference.linear_cross_entropy), inputs)
    ours = run(under_autocast(linear_cross_entropy), inputs, backend=place.backend, chunk_tokens=32)
    truth = run(reference.linear_cross_entropy, inputs.to(autocast).to(torch.float64))
    assert (ours.loss.dtype, ours.hidden.dtype, ours.weight.dtype) == (torch.float32, hidden_dtype, torch.float32)
    for name in ("loss", "hidden", "weight", "bias"):
        mine, theirs, true = (getattr(outcome, name) for outcome in (ours, eager, truth))
        assert_within_budget(mine, theirs, true, autocast if name != "loss" else torch.float32, name)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(place: Place, reentrant: bool) -> None:
    """Around the head: right, and the products of the gradients are done once."""
    inputs = SMALL.inputs(torch.float32, place.device)
    hidden, weight = leaves(inputs)

    def region(hidden: Tensor) -> Tensor:
        return linear_cross_entropy(hidden.sin().asin(), weight, inputs.target, backend=place.backend) * 1.0

    counted = mock.Mock(side_effect=chunked_head.stores.store.add_dweight)
    with mock.patch.object(chunked_head.stores.store, "add_dweight", counted):
        checkpoint(region, hidden.clamp(-1, 1), use_reentrant=reentrant).backward()
    assert counted.call_count == 1
    expected = run(
        lambda h, w, y: linear_cross_entropy(h.clamp(-1, 1).sin().asin(), w, y),
        inputs, torch.ones((), device=place.device),
    )  # fmt: skip
    torch.testing.assert_close(weight.grad, expected.weight, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(hidden.grad, expected.hidden, rtol=1e-4, atol=1e-6)


@crossed(place=PLACES, dtype=DTYPES, skip=[False, True])
def test_a_weight_of_one_row_of_any_stride(place: Place, dtype: torch.dtype, skip: bool) -> None:
    """What a tensor of one row has for a stride means nothing: torch calls it contiguous."""
    inputs = Case("", (9,), 64, 1).inputs(dtype, place.device)
    bias = torch.ones(1, dtype=dtype, device=place.device)
    weight = torch.empty_strided((1, 64), (67, 1), dtype=dtype, device=place.device).copy_(inputs.weight)
    assert weight.is_contiguous() and weight.stride(0) == 67
    skip = ("wait" if dtype == torch.float32 or place == Place("torch", "cuda") else True) if skip else False
    for options in ({}, {"reduction": "none"}, {"label_smoothing": 0.1, "z_loss": 0.1, "bias": bias}):
        found = []
        for one_row in (inputs.weight, weight):
            given = [t.detach().requires_grad_() for t in (inputs.hidden, one_row)]
            loss = linear_cross_entropy(*given, inputs.target, skip_ignored=skip, backend=place.backend, **options)
            found.append([loss.detach(), *torch.autograd.grad(loss.sum(), given)])
        assert all(torch.equal(*both) for both in zip(*found, strict=True))


@pytest.mark.parametrize("place", PLACES)
def test_double_backward_and_transforms_raise(place: Place) -> None:
    inputs = SMALL.inputs(torch.float32, place.device)
    hidden, weight = leaves(inputs)
    loss = linear_cross_entropy(hidden, weight, inputs.target, backend=place.backend)
    (first,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        first.sum().backward()
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda h: linear_cross_entropy(h, weight, inputs.target, backend=place.backend))(inputs.hidden)


def test_changed_input_is_noticed() -> None:
    """A recomputing backward over a weight that was changed meanwhile raises rather than being wrong."""
    inputs = SMALL.inputs(torch.float32, "cpu")
    hidden, weight = leaves(inputs)
    loss = linear_cross_entropy(hidden, weight, inputs.target, reduction="none")
    with torch.no_grad():
        weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


@crossed(place=PLACES, size=[1e6, 1e-9], reduction=["mean", "none"])
def test_fp16_with_class_weights_of_any_size(place: Place, size: float, reduction: str) -> None:
    """A mean does not feel the size of the class weights, and 16-bit gradients of logits must not either."""
    omega = torch.full((131,), size, device=place.device)
    inputs = Case("", (FEW,), 64, 131, {"class_weights": lambda c, g: torch.full((c.vocab,), size)}).inputs(
        torch.float16, place.device
    )
    inputs.options["reduction"] = reduction
    upstream = torch.full((FEW,), 0.01 / size, device=place.device) if reduction == "none" else None
    truth, eager = (run_reference(inputs, d, upstream) for d in (torch.float64, torch.float16))
    ours = run_ours(inputs, place, upstream)
    assert omega.isfinite().all()
    assert_within_budget(ours.hidden, eager.hidden, truth.hidden, torch.float16, "hidden")
    assert_within_budget(ours.weight, eager.weight, truth.weight, torch.float16, "weight")


@pytest.mark.parametrize("place", PLACES)
def test_fp16_keeps_small_probabilities(place: Place) -> None:
    """Rows of the weight that are nobody's target, where every gradient is a small probability's."""
    inputs = Case("", (12,), 16, 20011, ignored=0.0, spread=0.1).inputs(torch.float16, place.device)
    upstream = torch.tensor(65536.0, device=place.device)
    truth, eager = (run_reference(inputs, d, upstream) for d in (torch.float64, torch.float16))
    ours = run_ours(inputs, place, upstream)
    others = torch.ones(20011, dtype=torch.bool, device=place.device)
    others[inputs.target] = False
    assert_within_budget(ours.weight[others], eager.weight[others], truth.weight[others], torch.float16, "weight")


@pytest.mark.parametrize("place", PLACES)
def test_class_weights_of_no_target(place: Place) -> None:
    """An infinite weight of a class that nobody has is no business of the masked tokens."""
    inputs = SMALL.inputs(torch.float32, place.device)
    inputs.target[inputs.target == 0] = 1
    omega = torch.ones(131, device=place.device)
    omega[0] = torch.inf
    inputs.options["class_weights"] = omega
    truth, eager = (run_reference(inputs, d) for d in (torch.float64, torch.float32))
    assert_outcome(run_ours(inputs, place), eager, truth, torch.float32)


@pytest.mark.parametrize("place", PLACES)
def test_small_upstream_of_fp16(place: Place) -> None:
    """Late and small: what fp16 gradients of logits are multiplied by at the end is itself no fp16 number."""
    inputs = SMALL.inputs(torch.float16, place.device)
    hidden, weight = leaves(inputs)
    upstream = torch.full((FEW,), 2e-9, device=place.device)
    loss = linear_cross_entropy(
        hidden, weight, inputs.target, reduction="none", logit_scale=512.0, backend=place.backend
    )
    loss.backward(upstream)
    truth = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    expected = F.cross_entropy(truth[0] @ truth[1].t() * 512.0, inputs.target, reduction="none")
    expected.backward(upstream.double())
    for mine, exact in zip((hidden.grad, weight.grad), (t.grad for t in truth), strict=True):
        assert mine.count_nonzero()
        # half of fp16's smallest number for each
        assert (mine.double() - exact).abs().max() <= 2**-25 + 2**-10 * exact.abs().max()


@crossed(place=PLACES, cold=[2.0**-14, 2.0**14], how=["temperature", "temperatures", "logit_scale"])
def test_fp16_at_any_temperature(place: Place, cold: float, how: str) -> None:
    """Log-probabilities' gradients are scaled once the upstream one has come, by what the temperature makes of it; the
    logits are those of temperature 1, beside a token's that does not count and has a colder one."""
    inputs = SMALL.inputs(torch.float16, place.device)
    few, size = len(inputs.target), min(1.0, cold**0.5)
    hidden, weight = ((t * size).requires_grad_() for t in (inputs.hidden, inputs.weight))
    target = inputs.target.where(inputs.target >= 0, 0)
    upstream = torch.linspace(-1.0, 1.0, few, device=place.device) * max(1.0, cold)
    options: dict[str, Any] = {how: 1 / cold if how == "logit_scale" else cold}
    if how == "temperatures":
        target = target.index_fill(0, target.new_tensor([3]), -100)
        temperatures = torch.full((few,), cold, device=place.device)
        temperatures[3] = 1e-30
        options = {"temperature": temperatures}
    linear_logprobs(hidden, weight, target, backend=place.backend, **options).backward(upstream)
    truth = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    x = truth[0] @ truth[1].t() / cold
    (-F.cross_entropy(x, target, reduction="none")).backward(upstream.double())
    for mine, exact in zip((hidden.grad, weight.grad), (t.grad for t in truth), strict=True):
        assert (mine.double() - exact).norm() <= 2e-3 * exact.norm()


@pytest.mark.parametrize("place", PLACES)
def test_fp16_with_a_second_colder_softmax(place: Place) -> None:
    """The gradients' size is found with each loss's own temperature."""
    inputs = SMALL.inputs(torch.float16, place.device)
    hidden, weight = ((t * 0.02).requires_grad_() for t in (inputs.hidden, inputs.weight))
    loss = losses.cross_entropy() + losses.cross_entropy(temperature=1e-4, name="cold")
    linear_loss(hidden, weight, inputs.target, loss, backend=place.backend).loss.backward()
    truth = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    x = truth[0] @ truth[1].t()
    (F.cross_entropy(x, inputs.target) + F.cross_entropy(x / 1e-4, inputs.target)).backward()
    for mine, exact in zip((hidden.grad, weight.grad), (t.grad for t in truth), strict=True):
        assert (mine.double() - exact).norm() <= 2e-3 * exact.norm()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("scale", [2.0**-10, 1.0, 2.0**16])
def test_fp16_chunks_of_other_sizes(place: Place, scale: float) -> None:
    """Each chunk's gradients of logits are brought into fp16's range: those of small ones are not lost beside large."""
    inputs = SMALL.inputs(torch.float16, place.device)
    hidden, weight = leaves(inputs)
    small = torch.arange(FEW, device=place.device) < 16
    weights = torch.where(small, 2e-4, 2e3) / scale
    target = inputs.target.where(inputs.target >= 0, 0)
    loss = linear_cross_entropy(
        hidden, weight, target, token_weights=weights, reduction="sum", chunk_tokens=16, backend=place.backend
    )
    (loss * scale).backward()
    truth = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    losses_of = F.cross_entropy(truth[0] @ truth[1].t(), target, reduction="none")
    (losses_of * torch.where(small, 2e-4, 2e3)).sum().backward()
    for rows in (small, ~small):
        mine, exact = hidden.grad[rows].double(), truth[0].grad[rows]
        assert (mine - exact).norm() <= 2e-3 * exact.norm()
    assert (weight.grad.double() - truth[1].grad).norm() <= 2e-3 * truth[1].grad.norm()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_fp16_gradients_below_every_normal_number(place: Place, reduction: str) -> None:
    """What has no inverse in fp32 cannot be divided by; what comes out is 0, as by eager."""
    inputs = SMALL.inputs(torch.float16, place.device)
    hidden, weight = leaves(inputs)
    options = {"token_weights": torch.full((FEW,), 1e-40, device=place.device)} if reduction == "sum" else {}
    loss = linear_cross_entropy(
        hidden, weight, inputs.target, reduction=reduction, backend=place.backend, **options
    )  # fmt: skip
    loss.backward(torch.full_like(loss, 1.0 if reduction == "sum" else 1e-40))
    assert not hidden.grad.any() and not weight.grad.any()


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "strided": lambda t: torch.stack([t, t.flip(0)], -1)[..., 0],
    "offset": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
    "expanded": lambda t: t.flatten()[:1].expand(t.numel()).view(t.shape),
}


@crossed(place=PLACES, dtype=[torch.float32, torch.bfloat16, torch.float16], layout=LAYOUTS)
def test_operands_of_any_layout(place: Place, dtype: torch.dtype, layout: str) -> None:
    """Every vector beside the matmuls: a column of something, one that starts anywhere, one number for all."""
    inputs, made = Case("", (12,), 16, 37).inputs(dtype, place.device), torch.Generator().manual_seed(4)

    def numbers(*size: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.rand(size, generator=made).to(place.device, kind)

    tokens, vocab = len(inputs.target), len(inputs.weight)
    bias, omega = numbers(vocab, kind=dtype), numbers(vocab)
    target, mask = inputs.target.clamp(min=0), torch.ones(tokens, dtype=torch.bool, device=place.device)
    fields = {"old_logprobs": -numbers(tokens), "advantages": numbers(tokens), "token_weights": numbers(tokens)}
    fields |= {"segments": torch.arange(tokens, device=place.device) % 3, "kl_baseline": numbers(3)}
    fields |= {"segment_labels": torch.ones(3, dtype=torch.bool, device=place.device), "ref_logprobs": -numbers(tokens)}
    ids = torch.arange(tokens * 3, device=place.device).view(tokens, 3) % vocab
    fields |= {"teacher_ids": ids, "teacher_logprobs": -3.0 - numbers(tokens, 3)}
    dense = {"teacher_weight": numbers(vocab, 48, kind=dtype) - 0.5, "teacher_bias": numbers(vocab, kind=dtype)}
    dense["teacher_hidden"] = numbers(tokens, 48, kind=dtype)
    upstream = numbers(tokens)

    def call(laid: Callable[[Tensor], Tensor]) -> list[Tensor]:
        hidden, weight = leaves(inputs)
        bias_leaf = laid(bias).detach().requires_grad_()
        common = {"bias": bias_leaf, "backend": place.backend}
        batch = {name: laid(value) for name, value in fields.items()}
        mixed = losses.grpo() + losses.cross_entropy(class_weights=laid(omega), label_smoothing=0.1) + losses.topk_kl()
        out = linear_loss(
            hidden, weight, laid(target), mixed + losses.kto(beta=0.1), batch=batch | {"mask": laid(mask)},
            num_segments=3, metrics=[metrics.ratio()], chunk_tokens=8, **common,
        )  # fmt: skip
        far = linear_divergence(
            hidden, weight, laid(target), mask=laid(mask), **common, teacher_hidden=dense["teacher_hidden"],
            teacher_weight=dense["teacher_weight"], teacher_bias=laid(dense["teacher_bias"]),
        )  # fmt: skip
        each = linear_cross_entropy(
            hidden, weight, laid(target), reduction="none", class_weights=laid(omega), **common
        )  # fmt: skip
        given = F.linear(hidden, weight).detach().requires_grad_()
        on_logits = logits_loss(
            given, laid(target), losses.cross_entropy(class_weights=laid(omega)), batch={"mask": laid(mask)},
            backend=place.backend,
        )  # fmt: skip
        found = [out.loss, out.metrics["ratio"].value, far, each, on_logits.loss]
        total = out.loss + (far * laid(upstream)).sum() + (each * laid(upstream)).sum() + on_logits.loss
        grads = torch.autograd.grad(total, (hidden, weight, bias_leaf, given))
        return [*(value.detach() for value in found), *grads]

    lay = LAYOUTS[layout]
    for mine, plain in zip(call(lay), call(lambda t: lay(t).clone(memory_format=torch.contiguous_format)), strict=True):
        assert torch.equal(mine, plain)
