"""Log-probabilities for a loss of the caller's own: values, gradients, and that they are the same in every call."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import PLACES, Place
from oracle import reference as oracle
from tiers import Turn, crossed, first_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from chunked_head import linear_logprobs, linear_loss, losses, metrics

TOKENS, HIDDEN, VOCAB = 83 if torch.cuda.is_available() else 41, 64, 277


def operands(dtype: torch.dtype, device: str, spread: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(9)
    hidden = torch.randn(TOKENS, HIDDEN, generator=made)
    weight = torch.randn(VOCAB, HIDDEN, generator=made) * spread / HIDDEN**0.5
    target = torch.randint(0, VOCAB, (TOKENS,), generator=made)
    target[torch.rand(TOKENS, generator=made) < 0.2] = -100
    return hidden.to(device, dtype), weight.to(device, dtype), target.to(device)


@pytest.mark.parametrize("place", PLACES)
def test_squares_of_small_probabilities(place: Place) -> None:
    """Log-sum-exp is thousands here, and rounded by more than what is left of it."""
    hidden, weight, target = operands(torch.float32, place.device)
    bias = torch.full((VOCAB,), 5000.0, device=place.device)
    found = linear_logprobs(hidden, weight, target, bias=bias, log_sum_sq_probs=True, backend=place.backend)
    # the bias leaves 13 bits of a logit behind the point: as rounded as they are, their squares are exact
    rounded = (hidden @ weight.t() + bias).double()
    expected = (2 * rounded.log_softmax(-1)).logsumexp(-1)[target != -100]
    torch.testing.assert_close(found.log_sum_sq_probs[target != -100].double(), expected, rtol=0, atol=3e-4)


@crossed(place=PLACES, softcap=[None, 6.0], logit_scale=[1.0, -0.8], temperature=[1.0, "each"])
def test_largest(place: Place, softcap: float | None, logit_scale: float, temperature: Any) -> None:
    """argmax and the K largest, ids and log-probabilities, under a bias, a cap and a negative scale too."""
    hidden, weight, target = operands(torch.float32, place.device)
    bias, each = torch.randn(VOCAB, device=place.device), torch.linspace(0.3, 2.0, TOKENS, device=place.device)
    found = linear_logprobs(
        hidden, weight, target, bias=bias, argmax=True, top_k=7, backend=place.backend, chunk_tokens=32,
        temperature=each if temperature == "each" else temperature, softcap=softcap, logit_scale=logit_scale,
    )  # fmt: skip
    assert found._fields == ("logprobs", "argmax", "top_k_logprobs", "top_k_ids")
    x = oracle.logits(hidden.double(), weight.double(), bias.double(), logit_scale, softcap)
    x = x / each[:, None] if temperature == "each" else x
    counts = target != -100
    values, ids = x.log_softmax(-1).topk(7)
    assert torch.equal(found.argmax[counts], x.argmax(-1)[counts]) and torch.equal(found.top_k_ids[counts], ids[counts])
    torch.testing.assert_close(found.top_k_logprobs[counts].double(), values[counts], rtol=1e-5, atol=2e-5)
    assert not found.argmax[~counts].any() and not found.top_k_ids[~counts].any()
    assert not found.top_k_logprobs.requires_grad and found.top_k_ids.dtype == torch.int64


@crossed(
    place=PLACES, vocab=(1, 2, 3, 7, 17, 65, 131), spread=(2.0, 20.0, 60.0, 300.0, 3000.0),
    asked=[{}, {"entropy": True}, {"top_k": 1}, {"log_sum_sq_probs": True, "chunk_tokens": 1}],
    dtype=Turn((torch.bfloat16, torch.float16, torch.float32)), tokens=Turn((3, 70, 1, 20)),
    temperature=Turn((0.6, 1.7)),
)  # fmt: skip
def test_fed_back(
    place: Place, vocab: int, spread: float, asked: dict[str, Any], dtype: torch.dtype, tokens: int, temperature: float
) -> None:
    """No path, temperature or number of tokens rounds a logit by more than fp32 does: against float64, and given back
    a ratio of 1. Logits beyond 60 nats before the temperature may differ by some ulp of theirs, and on a CPU, whose
    BLAS sums as it likes, all may."""
    made = torch.Generator().manual_seed(7)
    hidden = torch.randn(tokens, HIDDEN, generator=made).to(place.device, dtype)
    weight = (torch.randn(vocab, HIDDEN, generator=made) * spread / HIDDEN**0.5).to(place.device, dtype)
    target = torch.randint(0, vocab, (tokens,), generator=made).to(place.device)
    x = hidden.double() @ weight.double().t() / temperature
    exact = x.log_softmax(-1).gather(-1, target[:, None])[:, 0]
    largest = float(x.abs().max()) * max(1.0, temperature)
    ulps = 4 * torch.finfo(torch.float32).eps * largest * (largest > 60.0 or place.device == "cpu")
    with torch.no_grad():
        old = linear_logprobs(hidden, weight, target, temperature=temperature, backend=place.backend, **asked)
    batch = {"old_logprobs": old[0] if asked else old, "advantages": torch.ones(tokens, device=place.device)}
    plain = (hidden.float() @ weight.float().t() / temperature).log_softmax(-1).gather(-1, target[:, None])[:, 0]
    rounding = 2 * float((plain - exact).abs().max())  # as the error budget allows
    assert (batch["old_logprobs"] - exact).abs().max() <= max(1e-5 + 2 * ulps, rounding)
    bounds = {"clip_low": 1e-5 + ulps, "clip_high": 1e-5 + ulps}
    of_call, own = {"temperature": temperature}, {"temperature": temperature}
    for loss, call, measured in (
        (losses.grpo(), of_call, {}),
        (losses.grpo() + 0.1 * losses.entropy() + 1e-3 * losses.z_loss(), of_call, {}),
        (losses.grpo(**own) + losses.cross_entropy(), {}, own),
    ):
        given = [t.detach().requires_grad_() for t in (hidden, weight)]
        asked_too = [metrics.clip_fraction(**bounds, **measured)]
        out = linear_loss(*given, target, loss, batch=batch, metrics=asked_too, backend=place.backend, **call)
        assert out.metrics["clip_fraction"].value == 0.0


class Products(TorchDispatchMode):
    """Rows and columns of the products that BLAS is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            a, b = [arg for arg in args if isinstance(arg, Tensor)][-2:]  # behind them the dtype of what is made
            self.sizes.append((len(a), b.shape[1]))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads_and_vocab", first_of([(1, 1), (2, 331), (1, 331), (2, 1), (2, 2), (2, 4099)], 2))
def test_numbers_of_rows(threads_and_vocab: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    """BLAS sums few rows for each thread, or one column, otherwise, and cuBLAS any number: it is asked for neither.
    What is left on a GPU is within what log-probabilities promise up to 60 nats. Which bits a CPU's BLAS gives at two
    sizes is not known: there each call is held to the budget."""
    made = torch.Generator().manual_seed(2)
    (threads, vocab), before = threads_and_vocab, torch.get_num_threads()
    torch.set_num_threads(threads)
    vocab, least = (vocab * 97, 64) if device == "cuda" else (vocab, 8 * threads)
    try:
        hidden = torch.randn(97, 128, generator=made).to(device, dtype)
        spread = 10.0 if device == "cuda" else 100.0
        weight = (torch.randn(vocab, 128, generator=made) * spread / 128**0.5).to(device, dtype)
        target, bias = torch.randint(0, vocab, (97,), generator=made), torch.randn(vocab, generator=made)
        target, bias = target.to(device), bias.to(device, dtype)
        eager, exact = (
            F.linear(hidden.to(wide), weight.to(wide), bias.to(wide)) for wide in (torch.float32, torch.float64)
        )
        # a log-probability is the difference of two numbers as large as a logit, whose ulps are the budget's
        size = float(exact.abs().max())
        outcomes = []
        with torch.no_grad():
            for chunk in (None, 1, 5, 9, 12, 17, 64):
                with Products() as products:
                    outcomes.append(linear_logprobs(
                        hidden, weight, target, bias=bias, lse=True, backend="torch", chunk_tokens=chunk
                    ))  # fmt: skip
                assert products.sizes and all(rows >= least and columns > 1 for rows, columns in products.sizes)
        for name in ("logprobs", "lse"):
            plain, true = (statistic(name, x, target) for x in (eager, exact))
            allowed = 2 * float((plain - true).abs().max()) + 4 * torch.finfo(torch.float32).eps * size
            whole, *others = (getattr(each, name) for each in outcomes)
            assert all((each - true).abs().max() <= allowed for each in (whole, *others))
            if device == "cuda":
                assert all((each - whole).abs().max() <= 1e-5 for each in others)
    finally:
        torch.set_num_threads(before)


def statistic(name: str, logits: Tensor, target: Tensor) -> Tensor:
    return logits.logsumexp(-1) if name == "lse" else logits.log_softmax(-1).gather(-1, target[:, None])[:, 0]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_temperature_per_token(place: Place, dtype: torch.dtype) -> None:
    """It moves with the target, is not looked at where a token does not count, and a loss at the same one sees the same
    log-probabilities; where all have one, it is as a number would be."""
    hidden, weight, target = operands(dtype, place.device)
    shape = 1, TOKENS
    hidden, target = hidden.view(*shape, -1).requires_grad_(), target.view(shape)
    each = torch.where(target == -100, torch.nan, 0.3 + 1.7 * torch.rand(shape).to(place.device))
    old = linear_logprobs(hidden, weight, target, temperature=each, shift=1, backend=place.backend)
    rows = hidden[:, :-1], weight, target[:, 1:]
    # a row less may be summed in another order
    torch.testing.assert_close(
        old[:, 1:], linear_logprobs(*rows, temperature=each[:, 1:], backend=place.backend), rtol=0, atol=1e-5
    )
    for at in (int(i) for i in (target[0] != -100).nonzero()[1:4]):
        one = linear_logprobs(hidden, weight, target, temperature=float(each[0, at]), shift=1, backend=place.backend)
        torch.testing.assert_close(old[0, at], one[0, at], rtol=1e-6, atol=1e-6)
    batch = {"old_logprobs": old.detach(), "advantages": torch.randn(shape).to(place.device)}
    for skip in (False, "wait"):
        out = linear_loss(
            hidden, weight, target, losses.grpo(), batch=batch, metrics=[metrics.ratio(reduce="max")], temperature=each,
            shift=1, backend=place.backend, skip_ignored=skip,
        )  # fmt: skip
        assert abs(float(out.metrics["ratio_max"].value) - 1.0) <= 1e-5
        assert out.loss.isfinite()
    grads = []
    for temperature in (0.5, torch.where(target == -100, torch.nan, 0.5)):
        head = weight.detach().requires_grad_()
        given = {"temperature": temperature, "backend": place.backend, "chunk_tokens": 16}
        out = linear_loss(hidden, head, target, losses.grpo(), batch=batch, **given)
        grads.append(torch.autograd.grad(out.loss, (hidden, head)))
    for number, each in zip(*grads, strict=True):
        assert number.any()
        torch.testing.assert_close(each, number, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)
