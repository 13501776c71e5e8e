"""The weight's gradient added to a buffer of the caller's: the same sums, and nothing where the promise is broken."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from budget import assert_within_budget
from cases import FEW, PLACES, Case, Inputs, Place, run_reference
from tiers import crossed
from torch import Tensor, nn
from tracking import NoProducts

from chunked_head import ChunkedHead, linear_cross_entropy, linear_loss, losses
from chunked_head.metrics import Metric
from chunked_head.stores import Backend

SMALL = Case("", (FEW,), 64, 131, schedule={"chunk_tokens": 32})
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def leaves(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and an empty buffer for its gradient."""
    hidden, weight = inputs.hidden.clone().requires_grad_(), inputs.weight.clone().requires_grad_()
    return hidden, weight, torch.zeros_like(inputs.weight, dtype=torch.float32)


@crossed(place=PLACES, dtype=DTYPES, kind=["number", "tensor"])
def test_promise(place: Place, dtype: torch.dtype, kind: str) -> None:
    """The upstream gradient that was foretold, or nan wherever anything of it went."""
    inputs = SMALL.inputs(dtype, place.device)
    inputs.options["bias"] = torch.randn(131, device=place.device).to(dtype)
    given = torch.tensor(0.37, device=place.device)
    truth, eager = (run_reference(inputs, d, given) for d in (torch.float64, dtype))
    for kept in (True, False):
        hidden, weight, buffer = leaves(inputs)
        vector = inputs.options["bias"].clone().requires_grad_()
        loss = linear_cross_entropy(
            hidden, weight, inputs.target, bias=vector, accumulate_into=buffer, backend=place.backend,
            upstream=0.37 if kind == "number" else given.clone(), chunk_tokens=32,
        )  # fmt: skip
        (loss * (0.37 if kept else 0.38)).backward()
        if kept:
            assert_within_budget(hidden.grad, eager.hidden, truth.hidden, dtype, "hidden")
            assert_within_budget(buffer, eager.weight, truth.weight, dtype, "buffer")
            assert_within_budget(vector.grad, eager.bias, truth.bias, dtype, "bias")
        else:
            assert all(t.isnan().all() for t in (hidden.grad, buffer, vector.grad))


@pytest.mark.parametrize("place", PLACES)
def test_zeroed_between_steps(place: Place) -> None:
    """Before a forward pass the buffer may be zeroed; after it the weight may not let go of it."""
    inputs = SMALL.inputs(torch.float32, place.device)
    head = ChunkedHead(64, 131, device=place.device, accumulate_into="grad", backend=place.backend)
    head.weight.grad = torch.zeros_like(head.weight)
    for _ in range(2):
        head.zero_grad(set_to_none=False)
        head(inputs.hidden, inputs.target).backward()
    assert head.weight.grad.isfinite().all() and head.weight.grad.any()
    loss = head(inputs.hidden, inputs.target)
    head.zero_grad(set_to_none=True)
    with pytest.raises(RuntimeError, match=r"weight.grad is no longer the tensor .* before the forward pass"):
        loss.backward()


@pytest.mark.parametrize("place", PLACES)
def test_several_calls_wait(place: Place) -> None:
    """Micro-batches and heads that share a buffer may wait in any number, and others add to it meanwhile."""
    inputs = SMALL.inputs(torch.float32, place.device)
    hidden, weight, buffer = leaves(inputs)
    other = inputs.weight.clone().requires_grad_()
    options: dict[str, Any] = {"accumulate_into": buffer, "backend": place.backend}
    linear_cross_entropy(hidden, weight, inputs.target, **options).backward()
    once = buffer.clone()
    for _ in range(2):
        buffer.zero_()
        waiting = [linear_cross_entropy(hidden, head, inputs.target, **options) for head in (weight, other, weight)]
        buffer.add_(once)
        waiting.append(linear_cross_entropy(hidden, weight, inputs.target, **options))
        for i in (2, 0, 3, 1):
            waiting[i].backward()
        torch.testing.assert_close(buffer, 5.0 * once)


@pytest.mark.parametrize("place", PLACES)
def test_backward_passes(place: Place) -> None:
    """The gradient of hidden states alone, of the weight, and once more over a retained graph with any upstream."""
    inputs = SMALL.inputs(torch.float32, place.device)
    hidden, weight, buffer = leaves(inputs)
    loss = linear_cross_entropy(hidden, weight, inputs.target, accumulate_into=buffer, backend=place.backend)
    once = buffer.clone()
    (first,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    assert torch.equal(buffer, once)
    (second,) = torch.autograd.grad(2.0 * loss, hidden, retain_graph=True)
    torch.testing.assert_close(second, 2.0 * first)
    torch.testing.assert_close(buffer, 3.0 * once, rtol=1e-4, atol=1e-6)
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(loss, weight)


@pytest.mark.parametrize("place", PLACES)
def test_nothing_to_write(place: Place) -> None:
    """Evaluation, a frozen weight, masked tokens and none at all leave every bit of the buffer; names may be empty."""
    inputs = SMALL.inputs(torch.float32, place.device)
    hidden, weight, buffer = leaves(inputs)
    buffer.normal_()
    before = buffer.clone()
    options: dict[str, Any] = {"accumulate_into": buffer, "backend": place.backend}
    with torch.no_grad():
        linear_cross_entropy(hidden, weight, inputs.target, **options)
        linear_cross_entropy(hidden, weight, inputs.target, **(options | {"accumulate_into": "main_grad"}))
    for into in (buffer, "main_grad"):
        frozen = options | {"accumulate_into": into}
        linear_cross_entropy(hidden, weight.detach(), inputs.target, **frozen).backward()
    masked = torch.full_like(inputs.target, -100)
    nan = torch.full_like(inputs.hidden, torch.nan)
    linear_cross_entropy(nan, weight, masked, **options).backward()
    linear_cross_entropy(inputs.hidden[:0], weight, inputs.target[:0], **options).backward()
    assert torch.equal(buffer, before)
    assert weight.grad is None


@crossed(place=PLACES, dtype=[torch.bfloat16, torch.float16], reduction=["mean", "none"], vocab=[131, 1])
def test_a_buffer_that_starts_anywhere(place: Place, dtype: torch.dtype, reduction: str, vocab: int) -> None:
    """As the views of one flat buffer of gradients do, also where our own products would write in it."""
    inputs = Case("", (FEW,), 64, vocab, ignored=0.6).inputs(dtype, place.device)
    one = torch.ones((FEW,) if reduction == "none" else (), device=place.device)
    skip = "wait" if place == Place("torch", "cuda") else True
    found = []
    for first in (0, 1):
        hidden, weight, _ = leaves(inputs)
        buffer = torch.ones(vocab * 64 + first, device=place.device)[first:].view(vocab, 64)
        for _ in range(2):
            loss = linear_cross_entropy(
                hidden, weight, inputs.target, reduction=reduction, chunk_tokens=32, accumulate_into=buffer,
                skip_ignored=skip, backend=place.backend,
            )  # fmt: skip
            loss.backward(one)
        found.append((hidden.grad, buffer))
    assert found[0][1].data_ptr() % 16 == 0 and found[1][1].data_ptr() % 16 == 4
    for aligned, other in zip(*found, strict=True):
        torch.testing.assert_close(other, aligned, rtol=1e-4, atol=1e-5 * float(aligned.abs().max()))


# ---- a call that raises in the middle


class Broken(Exception):
    pass


def raising(calls: int, **known: Any) -> losses.Losses:
    """A loss that raises after so many calls."""
    runs = iter(range(calls))

    def function(stats: Any, batch: Any) -> Tensor:
        if next(runs, None) is None:
            raise Broken
        return -stats.logprob

    return losses.custom(function, check=False, **{"scope": "token", **known})


def failing_metric(stats: Any, batch: Any) -> Tensor:
    raise Broken


OF_ALL = Metric("mine", failing_metric, scope="segment", check=False)
FAILS: dict[str, Callable[..., Any]] = {
    "second chunk": lambda hidden, *given, **more: linear_loss(hidden, *given, raising(1), chunk_tokens=32, **more),
    "after all chunks": lambda hidden, *given, **more: linear_loss(
        hidden, *given, losses.cross_entropy(), metrics=[OF_ALL], chunk_tokens=32, **more
    ),
    "second stream": lambda hidden, *given, **more: linear_loss(
        [hidden, hidden], *given, raising(2), chunk_tokens=32, stream_weights=(1.0, 0.5), **more
    ),
}  # fmt: skip


@crossed(place=PLACES, fails=FAILS, kind=["tensor", "grad", "view"])
def test_a_part_that_lies_in_the_buffer_is_told(place: Place, fails: str, kind: str) -> None:
    """At the next call, until it is zeroed, seen by autograd or not, or the caller says that all is well."""
    inputs = SMALL.inputs(torch.float32, place.device)
    hidden, weight, buffer = leaves(inputs)
    flat = torch.zeros(2, *buffer.shape, device=place.device)
    weight.grad = buffer

    def options() -> dict[str, Any]:
        into = {"tensor": buffer, "grad": "grad", "view": flat[1]}[kind]
        return {"accumulate_into": into, "backend": place.backend}

    def call(**more: Any) -> Tensor:
        return linear_cross_entropy(hidden, weight, inputs.target, **options(), **more)

    own = flat[1] if kind == "view" else buffer
    call().backward()
    once = own.clone()
    words = r"a call that added to .*accumulate_into.* raised before .* zero it .*chunked_head_partial"
    for zero in (own.zero_, own.data.zero_, torch.Tensor.zero_):
        with pytest.raises(Broken):
            FAILS[fails](hidden, weight, inputs.target, **options())
        assert own.any() and not torch.equal(own, once)
        for _ in range(2):
            with NoProducts(), pytest.raises(RuntimeError, match=words):
                call()
        with torch.no_grad():
            call()
        linear_cross_entropy(hidden, weight, inputs.target, accumulate_into=flat[0], backend=place.backend)
        if zero is torch.Tensor.zero_:
            own.copy_(once)
            del (flat if kind == "view" else buffer).chunked_head_partial
            call().backward()
            torch.testing.assert_close(own, 2.0 * once)
        else:
            zero()
            call().backward()
            torch.testing.assert_close(own, once)


@pytest.mark.parametrize("place", PLACES)
def test_a_call_that_raises_before_it_adds(place: Place) -> None:
    """Leaves every bit, and the next call runs."""
    inputs = SMALL.inputs(torch.float32, place.device)
    hidden, weight, buffer = leaves(inputs)
    buffer.normal_()
    before, options = buffer.clone(), {"accumulate_into": buffer, "backend": place.backend}
    for loss in (raising(0), raising(0) + losses.cross_entropy(), raising(0, scope="segment")):
        with pytest.raises(Broken):
            linear_loss(hidden, weight, inputs.target, loss, chunk_tokens=32, **options)
    assert torch.equal(buffer, before)
    linear_cross_entropy(hidden, weight, inputs.target, **options).backward()


@crossed(place=PLACES, late=[True, False])
def test_a_backward_that_raises(place: Place, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """``late``: in the middle of gradients that are made there."""
    inputs = SMALL.inputs(torch.float32, place.device)
    hidden, weight, buffer = leaves(inputs)
    options: dict[str, Any] = {"accumulate_into": buffer, "backend": place.backend, "memory_budget": 40_000}
    loss = linear_cross_entropy(hidden, weight, inputs.target, reduction="none" if late else "mean", **options)
    assert not (late and buffer.any())

    def no_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Backend, "scale_", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            loss.sum().backward()
    assert buffer.any()
    with pytest.raises(RuntimeError, match="raised before"):
        linear_cross_entropy(hidden, weight, inputs.target, **options)
    buffer.zero_()
    linear_cross_entropy(hidden, weight, inputs.target, **options).backward()


# ---- buffers that cannot be raise before any work

HALF = torch.bfloat16


def zeros(**options: Any) -> Tensor:
    return torch.zeros(11, 8, **options)


def hooked(weight: Tensor) -> Tensor:
    weight.register_hook(lambda grad: grad)
    return zeros()


def overwriting(weight: Any) -> str:
    weight.main_grad, weight.overwrite_main_grad = zeros(), True
    return "main_grad"


WRONG: dict[str, tuple[type[Exception], str, Callable[[Tensor], Any]]] = {
    "type": (TypeError, "must be a tensor, the name of an attribute of weight or None, got bool", lambda w: True),
    "missing": (ValueError, r"names weight.main_grad, .* not there; make it .*zeros_like", lambda w: "main_grad"),
    "no-grad": (ValueError, r"names weight.grad, which is not there.*set_to_none=False", lambda w: "grad"),
    "no-tensor": (TypeError, r"weight.backward \(accumulate_into\) must be a torch.Tensor", lambda w: "backward"),
    "half": (TypeError, "float32 for a weight of float32, got bfloat16; sums in 16 bits", lambda w: zeros(dtype=HALF)),
    "double": (TypeError, "float32 for a weight of float32, got float64", lambda w: zeros().double()),
    "shape": (ValueError, r"must have shape \(11, 8\), that of weight, got \(8, 11\)", lambda w: zeros().view(8, 11)),
    "device": (ValueError, "accumulate_into is on meta, weight on cpu; move one", lambda w: zeros(device="meta")),
    "strided": (ValueError, "accumulate_into must be contiguous, got strides", lambda w: torch.zeros(8, 11).t()),
    "negated": (ValueError, r"is lazily negated, .* make it by torch\.zeros", lambda w: torch._neg_view(zeros())),
    "sparse": (TypeError, "accumulate_into must be a dense tensor", lambda w: zeros().to_sparse()),
    "requires-grad": (ValueError, "must not require a gradient", lambda w: zeros(requires_grad=True)),
    "alias": (ValueError, "accumulate_into shares memory with weight", lambda w: w.detach()),
    "hooks": (ValueError, "weight has hooks", hooked),
    "overwrite": (ValueError, "overwrite_main_grad is set", overwriting),
}  # fmt: skip


@pytest.mark.parametrize(("error", "message", "make"), WRONG.values(), ids=WRONG.keys())
def test_wrong_buffer(error: type[Exception], message: str, make: Callable[[Tensor], Any]) -> None:
    weight, hidden, target = nn.Parameter(torch.randn(11, 8)), torch.randn(5, 8), torch.arange(5)
    into = make(weight)
    with NoProducts(), pytest.raises(error, match=message):
        linear_cross_entropy(hidden, weight, target, accumulate_into=into)


def test_wrong_weight_or_option() -> None:
    weight, hidden, target, buffer = torch.randn(11, 8), torch.randn(5, 8), torch.arange(5), torch.zeros(11, 8)
    with pytest.raises(ValueError, match="computed from other tensors, which would get none"):
        linear_cross_entropy(hidden, 2.0 * weight.requires_grad_(), target, accumulate_into=buffer)
    with pytest.raises(ValueError, match="shares memory with hidden"):
        linear_cross_entropy(buffer[3:7], weight, target[:4], accumulate_into=buffer)
    with pytest.raises(ValueError, match="accumulate_dtype must be None or float32, the dtype of accumulate_into"):
        linear_cross_entropy(
            hidden.bfloat16(), nn.Parameter(weight.detach().bfloat16()), target, accumulate_into=buffer,
            accumulate_dtype=HALF,
        )  # fmt: skip
    assert not buffer.any()
    # beside each other in one allocation, as in a framework's flat buffers, they may lie
    flat = torch.zeros(2, 11, 8)
    linear_cross_entropy(hidden, nn.Parameter(flat[0]), target, accumulate_into=flat[1]).backward()
    assert flat[1].any() and not flat[0].any()
