"""Under accumulate_into: no gradient of the weight in memory or plan; buffers that cannot be raise before any work."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import PLACES, Place
from tiers import crossed
from torch import Tensor, nn
from tracking import MiB, NoProducts, Tracker, assert_predicted, no_host_synchronisation, peak_of

from chunked_head import Plan, linear_cross_entropy, plan

LLAMA: dict[str, Any] = {"hidden": 4096, "vocab": 128256, "dtype": torch.bfloat16, "device": "cuda"}
HALF = torch.bfloat16


def operands(place: Place, dtype: torch.dtype, shape: tuple[int, int, int]) -> list[Tensor]:
    tokens, hidden, vocab = shape
    made = torch.Generator().manual_seed(1)
    h, w = (torch.randn(rows, hidden, generator=made).to(place.device, dtype) for rows in (tokens, vocab))
    target = torch.randint(0, vocab, (tokens,), generator=made).to(place.device)
    return [h.requires_grad_(), w.requires_grad_(), target, torch.zeros(vocab, hidden, device=place.device)]


def step(place: Place, tensors: list[Tensor], **options: Any) -> None:
    hidden, weight, target, buffer = tensors
    loss = linear_cross_entropy(hidden, weight, target, accumulate_into=buffer, backend=place.backend, **options)
    loss.sum().backward()
    hidden.grad = None


@crossed(
    place=[p for p in PLACES if p.id != "triton-interpreted"],
    dtype=[torch.float32, torch.bfloat16, torch.float16],
    schedule=[{}, {"chunk_tokens": 256}, {"reduction": "none", "memory_budget": "48MiB"}],
)
def test_prediction(place: Place, dtype: torch.dtype, schedule: dict[str, Any]) -> None:
    shape = (1024, 64, 20000)
    if place == Place("triton", "cuda"):
        shape = (4096, 1024, 128256)
        schedule = {
            k: "900MiB" if k == "memory_budget" else 8 * v if k == "chunk_tokens" else v for k, v in schedule.items()
        }
    expected: Plan = plan(*shape, dtype, device=place.device, backend=place.backend, accumulate_into=True, **schedule)
    assert expected.gradient_bytes == shape[0] * shape[1] * dtype.itemsize
    tensors = operands(place, dtype, shape)
    assert_predicted(peak_of(lambda: step(place, tensors, **schedule), *tensors), expected)


@pytest.mark.parametrize("place", [p for p in PLACES if p.id != "triton-interpreted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_nothing_of_the_weights_size(place: Place, dtype: torch.dtype) -> None:
    """Neither a temporary gradient nor anything else as large, in the forward pass or in backward."""
    tensors = operands(place, dtype, (64, 512, 20000))
    # a budget of casts and tiles, not of a weight
    for schedule in ({"chunk_tokens": 32}, {"reduction": "none", "memory_budget": "38MiB"}):
        with Tracker(*tensors, large=tensors[1].numel()) as tracker:
            step(place, tensors, **schedule)
        assert tracker.most_large == 0, schedule


def test_plan_of_a_large_head() -> None:
    made = plan(65536, **LLAMA, accumulate_into=True)
    assert made.schedule == "forward" and made.extra_bytes <= 640 * MiB
    assert (made.weight_accumulate, made.hidden_accumulate) == (torch.float32, torch.bfloat16)
    assert made.gradient_bytes == 65536 * 4096 * 2 and made.weight_error is None
    assert "added to a float32 buffer in the forward pass" in str(made)
    assert plan(65536, **LLAMA, accumulate_into=torch.float32) == made
    late = plan(65536, **LLAMA, accumulate_into=True, reduction="none")
    assert late.schedule == "recompute" and late.extra_bytes <= 640 * MiB
    assert "buffer in the backward pass" in str(late)
    with_bias = plan(65536, **LLAMA, accumulate_into=True, bias=True)
    assert with_bias.gradient_bytes == made.gradient_bytes + 128256 * 2
    with pytest.raises(ValueError, match=r"accumulate_into must be False, True or torch.float32 .* got torch.bfloat16"):
        plan(10, **LLAMA, accumulate_into=HALF)
    with pytest.raises(ValueError, match=r"accumulate_dtype must be None or float32, the dtype of accumulate_into"):
        plan(10, **LLAMA, accumulate_into=True, accumulate_dtype=HALF)
    assert plan(10, **LLAMA, accumulate_into=True, weight_grad=False) == plan(10, **LLAMA, weight_grad=False)


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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_no_host_synchronisation(dtype: torch.dtype) -> None:
    place = Place("triton", "cuda")
    tensors = operands(place, dtype, (700, 256, 5000))
    step(place, tensors, chunk_tokens=256)  # kernels are compiled
    with no_host_synchronisation():
        step(place, tensors, chunk_tokens=256)
    assert tensors[3].isfinite().all()


@pytest.mark.gpu
def test_out_of_range_on_gpu() -> None:
    """A bad target shows in the buffer, too."""
    place = Place("triton", "cuda")
    tensors = operands(place, torch.bfloat16, (300, 64, 5000))
    tensors[2][17] = 5000
    step(place, tensors)
    assert tensors[3].isnan().all()
