"""What happens to gradients: upstreams, repeated and missing backwards, frozen operands, autocast, checkpoints."""

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from budget import assert_outcome, assert_within_budget
from cases import FEW, PLACES, Case, Inputs, Place, run, run_ours, run_reference
from oracle import reference
from tiers import crossed
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from triton.runtime import interpreter

import chunked_head.stores.store
from benchmarks import turns_worker
from chunked_head import linear_cross_entropy, linear_logprobs, linear_loss, logits_loss, losses
from chunked_head.stores.triton import store as triton_store

SMALL = Case("", (FEW,), 64, 131, schedule={"chunk_tokens": 32})
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TRUNCATED = interpreter._convert_float


def leaves(inputs: Inputs) -> tuple[Tensor, Tensor]:
    return inputs.hidden.clone().requires_grad_(), inputs.weight.clone().requires_grad_()


@crossed(place=PLACES, dtype=DTYPES, factor=[0.37, 1.0, -2.5, 0.0], foretold=[None, 0.37, "tensor"])
def test_upstream(place: Place, dtype: torch.dtype, factor: float, foretold: float | str | None) -> None:
    """Whatever factor comes, foretold or not, is applied once."""
    inputs = SMALL.inputs(dtype, place.device)
    declared = torch.tensor(0.37, device=place.device) if foretold == "tensor" else foretold
    upstream = torch.tensor(abs(factor), device=place.device)
    upstream = upstream if factor >= 0 else torch._neg_view(upstream)  # as of ``z.conj().imag``
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
@pytest.mark.parametrize("into", [False, True])
def test_activation_checkpointing(place: Place, reentrant: bool, into: bool) -> None:
    """Around the head: right, and the products of the gradients are done, and added to a buffer, once."""
    inputs = SMALL.inputs(torch.float32, place.device)
    hidden, weight = leaves(inputs)
    buffer = torch.zeros_like(weight) if into else None
    options: dict[str, Any] = {"accumulate_into": buffer, "backend": place.backend}

    def region(hidden: Tensor) -> Tensor:
        return linear_cross_entropy(hidden.sin().asin(), weight, inputs.target, **options) * 1.0

    counted = mock.Mock(side_effect=chunked_head.stores.store.add_dweight)
    with mock.patch.object(chunked_head.stores.store, "add_dweight", counted):
        checkpoint(region, hidden.clamp(-1, 1), use_reentrant=reentrant).backward()
    assert counted.call_count == 1
    expected = run(
        lambda h, w, y: linear_cross_entropy(h.clamp(-1, 1).sin().asin(), w, y),
        inputs, torch.ones((), device=place.device),
    )  # fmt: skip
    torch.testing.assert_close(buffer if into else weight.grad, expected.weight, rtol=1e-4, atol=1e-6)
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
def test_double_backward_raises(place: Place) -> None:
    inputs = SMALL.inputs(torch.float32, place.device)
    hidden, weight = leaves(inputs)
    loss = linear_cross_entropy(hidden, weight, inputs.target, backend=place.backend)
    x = (inputs.hidden @ inputs.weight.T).requires_grad_()
    on_logits = logits_loss(x, inputs.target, losses.cross_entropy(), backend=place.backend).loss
    for value, leaf in ((loss, hidden), (on_logits, x)):
        (first,) = torch.autograd.grad(value, leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="second derivatives"):
            first.sum().backward()


def test_changed_input_is_noticed() -> None:
    """A recomputing backward over a weight that was changed meanwhile raises rather than being wrong."""
    inputs = SMALL.inputs(torch.float32, "cpu")
    hidden, weight = leaves(inputs)
    loss = linear_cross_entropy(hidden, weight, inputs.target, reduction="none")
    with torch.no_grad():
        weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


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


Logits = Callable[[Tensor, Tensor], Tensor]  # logits [n, V] in float64 and targets to a total


class Extreme(NamedTuple):
    """Gradients of sizes that fp16 does not hold on the way to those that it does."""

    ours: Callable[..., Tensor]  # of hidden states, weight, targets and backend
    exact: Logits
    size: float = 1.0  # of the operands


def nll(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x, target, reduction="none")


def at_a_temperature(cold: float, how: str) -> Extreme:
    """Scaled once the upstream gradient has come, by what the temperature makes of it."""

    def upstream(x: Tensor) -> Tensor:
        return torch.linspace(-1.0, 1.0, len(x), device=x.device) * max(1.0, cold)

    def ours(h: Tensor, w: Tensor, y: Tensor, backend: str) -> Tensor:
        options: dict[str, Any] = {how: 1 / cold if how == "logit_scale" else cold}
        if how == "temperatures":  # beside a token's that does not count and has a colder one
            y, each = y.index_fill(0, y.new_tensor([3]), -100), torch.full((len(y),), cold, device=y.device)
            options = {"temperature": each.index_fill(0, y.new_tensor([3]), 1e-30)}
        return (linear_logprobs(h, w, y, backend=backend, **options) * upstream(h)).sum()

    def exact(x: Tensor, y: Tensor) -> Tensor:
        counts = torch.arange(len(x), device=x.device) != (3 if how == "temperatures" else -1)
        return -(nll(x / cold, y) * upstream(x) * counts).sum()

    return Extreme(ours, exact, min(1.0, cold**0.5))


def chunks_of_other_sizes(scale: float) -> Extreme:
    """What is small in one chunk is not lost beside what is large in another."""

    def weights(x: Tensor) -> Tensor:
        return torch.where(torch.arange(len(x), device=x.device) < 16, 2e-4, 2e3)

    def ours(h: Tensor, w: Tensor, y: Tensor, backend: str) -> Tensor:
        options = {"token_weights": weights(h) / scale, "reduction": "sum", "chunk_tokens": 16, "backend": backend}
        return linear_cross_entropy(h, w, y, **options) * scale

    return Extreme(ours, lambda x, y: (nll(x, y) * weights(x)).sum())


def class_weights(size: float, reduction: str) -> Extreme:
    """A mean does not feel their size."""

    def ours(h: Tensor, w: Tensor, y: Tensor, backend: str) -> Tensor:
        omega = torch.full((len(w),), size, device=w.device)
        loss = linear_cross_entropy(h, w, y, class_weights=omega, reduction=reduction, backend=backend)
        return loss if reduction == "mean" else (loss * (0.01 / size)).sum()

    return Extreme(ours, lambda x, y: nll(x, y).mean() if reduction == "mean" else 0.01 * nll(x, y).sum())


def far_from_another(loss: losses.Losses, field: str, by: float, value: Logits) -> Extreme:
    """Large coefficients: of unlikely targets, beside another policy's log-probabilities."""

    def exact(x: Tensor, y: Tensor) -> Tensor:
        own = -nll(2.0 * x, x.argmin(1))
        return value(own, own.detach() + by).mean()

    def ours(h: Tensor, w: Tensor, y: Tensor, backend: str) -> Tensor:
        x = h.detach().double() @ w.detach().double().t()
        batch = {field: (-nll(2.0 * x, x.argmin(1)) + by).float()}
        batch |= {"advantages": -torch.ones_like(batch[field])} if field == "old_logprobs" else {}
        return linear_loss(h, w, x.argmin(1), loss, batch=batch, logit_scale=2.0, backend=backend).loss

    return Extreme(ours, exact)


def tiny(h: Tensor, w: Tensor, y: Tensor, backend: str, **options: Any) -> Tensor:
    loss = linear_cross_entropy(h, w, y, reduction="none", backend=backend, **options)
    return (loss * 1e-40).sum()


COLD = losses.cross_entropy() + losses.cross_entropy(temperature=1e-4, name="cold")
EXTREMES: dict[str, Extreme] = {
    # what gradients of logits are multiplied by at the end is itself no fp16 number
    "small upstream": Extreme(
        lambda h, w, y, b: (linear_cross_entropy(h, w, y, reduction="none", logit_scale=512.0, backend=b) * 2e-9).sum(),
        lambda x, y: (nll(512.0 * x, y) * 2e-9).sum(),
    ),
    "a second colder softmax": Extreme(
        lambda h, w, y, b: linear_loss(h, w, y, COLD, backend=b).loss,
        lambda x, y: nll(x, y).mean() + nll(x / 1e-4, y).mean(), 0.02,
    ),
    # what has no inverse in fp32 cannot be divided by; what comes out is 0, as by eager
    "below every normal number": Extreme(tiny, lambda x, y: nll(x, y).sum() * 1e-40),
    "weights below every normal number": Extreme(
        lambda h, w, y, b: linear_cross_entropy(
            h, w, y, reduction="sum", token_weights=torch.full((len(h),), 1e-40, device=h.device), backend=b),
        lambda x, y: nll(x, y).sum() * 1e-40,
    ),
    "a ratio": far_from_another(losses.grpo(), "old_logprobs", -10.0, lambda new, old: (new - old).exp()),
    "a KL": far_from_another(
        losses.kl_to_reference(), "ref_logprobs", 12.0, lambda new, ref: (ref - new).exp() - (ref - new) - 1),
    **{f"{how} {cold}": at_a_temperature(cold, how) for how in ("temperature", "temperatures", "logit_scale")
       for cold in (2.0**-14, 2.0**14)},
    **{f"chunks {scale}": chunks_of_other_sizes(scale) for scale in (2.0**-10, 1.0, 2.0**16)},
    **{f"class weights {size} {one}": class_weights(size, one) for size in (1e6, 1e-9) for one in ("mean", "none")},
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", EXTREMES)
def test_fp16_of_extreme_sizes(place: Place, name: str) -> None:
    """Each of the small and the large rows by itself, to half of fp16's smallest number."""
    extreme, inputs = EXTREMES[name], SMALL.inputs(torch.float16, place.device)
    target = inputs.target.where(inputs.target >= 0, 0)
    hidden, weight = ((t * extreme.size).requires_grad_() for t in (inputs.hidden, inputs.weight))
    extreme.ours(hidden, weight, target, place.backend).backward()
    truth = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    extreme.exact(truth[0] @ truth[1].t(), target).backward()
    pairs = [(hidden.grad[:16], truth[0].grad[:16]), (hidden.grad[16:], truth[0].grad[16:])]
    for mine, exact in [*pairs, (weight.grad, truth[1].grad)]:
        least = 2**-25 * exact.numel() ** 0.5
        assert bool(mine.any()) == bool(exact.norm() > least) and exact.abs().max() < 60000
        assert (mine.double() - exact).norm() <= 2e-3 * exact.norm() + least * (exact.norm() < 1e3 * least)


def to_nearest(values: Any, source: Any, target: Any, mode: Any) -> Any:
    """fp32 to bf16 as a GPU rounds: the interpreter truncates."""
    if (source.name, target.name) != ("fp32", "bf16"):
        return TRUNCATED(values, source, target, mode)
    rounded = torch.from_numpy(values.view("float32").copy()).bfloat16()
    return rounded.view(torch.int16).numpy().view("uint16").reshape(values.shape)


@pytest.mark.parametrize("place", [place for place in PLACES if place.values[0].backend == "triton"])
def test_frequent_ids_of_a_common_direction(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where hidden states share a direction that makes ids as frequent as words are, the sums that make a frequent id's
    row of dweight nearly cancel: they have to before they are rounded."""
    monkeypatch.setattr(interpreter, "_convert_float", to_nearest)
    made = torch.Generator().manual_seed(1)
    common = F.normalize(torch.randn(64, generator=made), dim=0) * 8.0
    hidden = torch.randn(256, 64, generator=made) + 1.5 * common
    logits = -torch.arange(1.0, 1025.0).log()
    weight = torch.randn(1024, 64, generator=made) / 8.0 + logits[:, None] * common / 96.0
    target = torch.multinomial((hidden @ weight.T).softmax(1), 1, generator=made)[:, 0].to(place.device)

    def gradient(dtype: torch.dtype, ours: bool) -> Tensor:
        h, w = (one.to(place.device, torch.bfloat16).to(dtype) for one in (hidden, weight))
        w.requires_grad_()
        loss = linear_cross_entropy(h, w, target, backend="triton") if ours else F.cross_entropy((h @ w.T), target)
        loss.backward()
        return w.grad.double()

    truth = gradient(torch.float64, False)
    ours, eager = ((gradient(torch.bfloat16, which) - truth).norm() for which in (True, False))
    assert ours <= 1.25 * eager, (ours / truth.norm(), eager / truth.norm())


@pytest.mark.parametrize("place", [place for place in PLACES if place.values[0].backend == "triton"])
@pytest.mark.parametrize("kind", ["flat", "frequent"])
@pytest.mark.parametrize("stored", ["exponentials", "logits"])
def test_chunks_round_dweight_once(place: Place, kind: str, stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several chunks, rows of rare targets err as one rounding does, and those of frequent ones hardly more: their
    terms nearly cancel, and 16-bit sums over chunks would round what is left each time. A stored gradient of a target's
    logit is rounded too."""
    monkeypatch.setattr(interpreter, "_convert_float", to_nearest)
    monkeypatch.setattr(triton_store, "FREQUENT_TOKENS", 8)
    made = torch.Generator().manual_seed(1)
    common = F.normalize(torch.randn(64, generator=made), dim=0) * 8.0
    hidden, weight = torch.randn(256, 64, generator=made), torch.randn(1024, 64, generator=made) / 8.0
    target = torch.randint(1024, (256,), generator=made)
    if kind == "frequent":
        hidden += 1.5 * common
        weight += -torch.arange(1.0, 1025.0).log()[:, None] * common / 48.0
        target = torch.multinomial((hidden @ weight.T).softmax(1), 1, generator=made)[:, 0]

    def gradient(dtype: torch.dtype, **options: Any) -> Tensor:
        h, w = (one.to(place.device, torch.bfloat16).to(dtype) for one in (hidden, weight))
        loss = losses.cross_entropy() if stored == "exponentials" else losses.cross_entropy() + 1e-3 * losses.entropy()
        linear_loss(h, w.requires_grad_(), target.to(place.device), loss, **options).loss.backward()
        return w.grad.double()

    truth = gradient(torch.float64, backend="torch")
    rounding = (truth.bfloat16().double() - truth).norm()
    for rows in (64, 128):
        error = (gradient(torch.bfloat16, backend="triton", chunk_tokens=rows) - truth).norm()
        most = {"exponentials": {"flat": 1.1, "frequent": 1.5}, "logits": {"flat": 1.9, "frequent": 1.9}}[stored][kind]
        assert error <= most * rounding, (rows, error / rounding)


HEADS = [(4096, 128256), (2048, 128256), (1024, 151936), (768, 50304)]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["flat", "zipf", "peaked"])
@pytest.mark.parametrize(("hidden", "vocab"), HEADS)
def test_dweight_at_default_settings(hidden: int, vocab: int, kind: str) -> None:
    """8192 tokens: one rounding is 1.65e-3."""
    for options, most in ("", 2.1e-3), (":accumulate_dtype=float32", 1.75e-3):
        found = turns_worker.errors(turns_worker.Step(f"8192x{hidden}x{vocab}:ce{options}"), kind)
        assert found["dweight"] <= most, (options, found)
        torch.cuda.empty_cache()


FEW_TOKENS = [(n, h, v, 16) for n in (8, 16, 24) for h in (768, 1024) for v in (32000, 50264, 128256)]
FEW_IDS = [(n, h, v, 256) for n in (128, 384, 1024) for h in (512, 768) for v in (1536, 2048)]


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "hidden", "vocab", "rows"), [*FEW_TOKENS, *FEW_IDS])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_number_errs_more_than_twice_eagers(tokens: int, hidden: int, vocab: int, rows: int, reduction: str) -> None:
    """The largest error of a gradient, as quack-kernels bounds its own."""
    made = torch.Generator("cuda").manual_seed(tokens)
    h = torch.randn(tokens, hidden, device="cuda", generator=made)
    w = torch.randn(vocab, hidden, device="cuda", generator=made) / hidden**0.5
    target = torch.randint(vocab, (tokens,), device="cuda", generator=made)

    def gradients(dtype: torch.dtype, loss: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        operands = [one.bfloat16().to(dtype).requires_grad_() for one in (h, w)]
        return tuple(grad.float() for grad in torch.autograd.grad(loss(*operands), operands))

    def eager(a: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy((a @ b.t()).float(), target, reduction=reduction)

    def ours(a: Tensor, b: Tensor) -> Tensor:
        return linear_cross_entropy(a, b, target, reduction=reduction, chunk_tokens=rows)

    truth = gradients(torch.float32, eager)
    for mine, plain, exact in zip(
        gradients(torch.bfloat16, ours), gradients(torch.bfloat16, eager), truth, strict=True
    ):
        assert (mine - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-4
