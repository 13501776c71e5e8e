"""Measured peaks against the plan's prediction, and nothing as large as a chunk's logits but one buffer."""

from typing import Any

import pytest
import torch
from cases import PLACES, Case, Options, Place, bias, per_class, per_token
from tiers import crossed
from tracking import Tracker, assert_predicted, peak_of

from chunked_head import linear_cross_entropy, plan


def operands(place: Place, dtype: torch.dtype, shape: tuple[int, int, int]) -> tuple[torch.Tensor, ...]:
    tokens, hidden, vocab = shape
    made = torch.Generator().manual_seed(1)
    h = torch.randn(tokens, hidden, generator=made).to(place.device, dtype).requires_grad_()
    w = torch.randn(vocab, hidden, generator=made).to(place.device, dtype).requires_grad_()
    return h, w, torch.randint(0, vocab, (tokens,), generator=made).to(place.device)


def measure(place: Place, tensors: tuple[torch.Tensor, ...], upstream: float = 1.0, **options: Any) -> int:
    """Peak bytes over the inputs of loss and backward."""
    hidden, weight, target = tensors
    if options.get("accumulate_into"):
        options["accumulate_into"] = torch.zeros_like(weight, dtype=torch.float32)
        tensors = (*tensors, options["accumulate_into"])

    def step() -> None:
        loss = linear_cross_entropy(hidden, weight, target, backend=place.backend, **options)
        if loss.requires_grad:
            (loss.sum() * upstream).backward()

    peak = peak_of(step, *tensors)
    hidden.grad = weight.grad = None
    return peak


SCHEDULES: list[dict[str, Any]] = [
    {},
    {"chunk_tokens": 256},
    {"chunk_tokens": 128, "accumulate_dtype": torch.float32},
    {"memory_budget": "48MiB"},
    {"reduction": "none"},
    {"reduction": "none", "memory_budget": "40MiB"},
    {"accumulate_into": True},
    {"accumulate_into": True, "chunk_tokens": 256},
    {"accumulate_into": True, "reduction": "none", "memory_budget": "48MiB"},
]


# large enough that 3 % are more than small change, small enough for two cores
CPU_SHAPE, GPU_SHAPE = (1024, 64, 20000), (4096, 1024, 128256)


def predictions() -> list:
    """On the CPU each pair of values once."""
    return [
        pytest.param(place.values[0], dtype, schedule, upstream, marks=place.marks)
        for place in PLACES
        for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16))
        for j, schedule in enumerate(SCHEDULES)
        for upstream in (1.0, 0.37)
        if place.values[0].device == "cuda" or (place.id != "triton-interpreted" and (i + j + (upstream == 1.0)) % 2)
    ]


@pytest.mark.parametrize(("place", "dtype", "schedule", "upstream"), predictions())
def test_prediction(place: Place, dtype: torch.dtype, schedule: dict[str, Any], upstream: float) -> None:
    shape = CPU_SHAPE
    if place.device == "cuda":
        shape = GPU_SHAPE
        larger = {"memory_budget": "900MiB", "chunk_tokens": 8 * schedule.get("chunk_tokens", 0)}
        schedule = schedule | {name: larger[name] for name in schedule if name in larger}
    if place.device == "cuda" and place.backend == "torch" and dtype != torch.float32:
        shape = (1024, 256, 50000)  # 16-bit operands are cast tile by tile there: right, and slow
    tensors = operands(place, dtype, shape)
    expected = plan(*shape, dtype, device=place.device, backend=place.backend, **schedule)
    measured = measure(place, tensors, upstream, **schedule)
    assert_predicted(measured, expected)
    if "memory_budget" in schedule:
        assert expected.extra_bytes <= expected.budget
        assert measured - expected.gradient_bytes <= expected.budget * 1.05


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_frozen_operands_take_no_memory(place: Place, frozen: str) -> None:
    shape = (64, 32, 5003)
    hidden, weight, target = operands(place, torch.float32, shape)
    hidden.requires_grad_(frozen == "weight")
    weight.requires_grad_(frozen == "hidden")
    expected = plan(
        *shape, torch.float32, hidden_grad=frozen == "weight", weight_grad=frozen == "hidden",
        device=place.device, backend=place.backend, chunk_tokens=16,
    )  # fmt: skip
    assert expected.gradient_bytes == {"hidden": 5003 * 32 * 4, "weight": 64 * 32 * 4, "both": 0}[frozen]
    if place.device == "cpu":
        measured = measure(place, (hidden, weight, target), chunk_tokens=16)
        assert measured <= expected.peak_bytes * 1.05 + 64_000  # and so no 640 KB gradient of a frozen weight


@crossed(
    place=PLACES, dtype=[torch.float32, torch.float16, torch.bfloat16],
    options=[{"reduction": "none"}, {"bias": bias}, {"class_weights": per_class, "token_weights": per_token}],
)  # fmt: skip
def test_one_buffer_of_logits(place: Place, dtype: torch.dtype, options: Options) -> None:
    """Of what no loss of the table has, one tensor of a chunk's size at a time; no torch softmax touches it."""
    tokens, chunk, vocab, width = 512, 256, 6007, 24
    if place == Place("triton", "cpu"):
        tokens, chunk, vocab = 40, 32, 1001  # the interpreter walks every tile; all that is asked is what torch touches
    case = Case("", (tokens,), width, vocab, options, {"chunk_tokens": chunk})
    inputs = case.inputs(dtype, place.device)
    hidden, weight = inputs.hidden.requires_grad_(), inputs.weight.requires_grad_()
    given = inputs.options | {"chunk_tokens": chunk}
    if "bias" in given:
        given["bias"].requires_grad_()
    if dtype == torch.bfloat16 and place.device == "cpu" and tokens // chunk > 8:
        given["accumulate_dtype"] = torch.float32
    large = chunk * vocab
    assert large > vocab * width, "the weight's gradient is no larger than a chunk's logits"
    with Tracker(hidden, weight, inputs.target, large=large) as tracker:
        linear_cross_entropy(hidden, weight, inputs.target, backend=place.backend, **given).sum().backward()
    if place != Place("triton", "cpu"):  # the interpreter copies a kernel's arguments for itself
        assert tracker.most_large == 1, "one reused buffer, and it is there"
    if place.backend == "triton":
        reducing = {"_softmax", "_log_softmax", "logsumexp", "exp", "gather", "sub", "mul", "where", "clone"}
        touched = {name.removesuffix("_") for name in tracker.large_operations}
        assert not touched & reducing, touched


@pytest.mark.parametrize("place", [p for p in PLACES if p.id != "triton-interpreted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_nothing_of_the_weights_size_beside_a_buffer(place: Place, dtype: torch.dtype) -> None:
    """Neither a temporary gradient nor anything else as large, in the forward pass or in backward."""
    hidden, weight, target = operands(place, dtype, (64, 512, 20000))
    buffer = torch.zeros_like(weight, dtype=torch.float32)
    # a budget of casts and tiles, not of a weight
    for schedule in ({"chunk_tokens": 32}, {"reduction": "none", "memory_budget": "38MiB"}):
        with Tracker(hidden, weight, target, buffer, large=weight.numel()) as tracker:
            options = schedule | {"accumulate_into": buffer, "backend": place.backend}
            linear_cross_entropy(hidden, weight, target, **options).sum().backward()
        assert tracker.most_large == 0, schedule


@pytest.mark.parametrize("place", PLACES)
def test_loss_only_makes_no_gradient_buffer(place: Place) -> None:
    hidden, weight, target = (t.detach() for t in operands(place, torch.float32, (40, 512, 700)))
    with Tracker(hidden, weight, target, large=weight.numel()) as tracker:
        linear_cross_entropy(hidden, weight, target, backend=place.backend, chunk_tokens=8)
    assert tracker.most_large == 0


@pytest.mark.gpu
def test_offsets_beyond_int32() -> None:
    """A buffer of more than 2^31 logits: the last rows come out as they do in small chunks."""
    hidden, weight, target = operands(Place("triton", "cuda"), torch.bfloat16, (9000, 64, 256000))
    outcomes = []
    for chunk in (9000, 1500):
        hidden.grad = weight.grad = None
        linear_cross_entropy(hidden, weight, target, chunk_tokens=chunk, accumulate_dtype=torch.float32).backward()
        outcomes.append((hidden.grad, weight.grad))
    for whole, pieces in zip(*outcomes, strict=True):
        error = (whole.double() - pieces.double()).norm(dim=1) / pieces.double().norm(dim=1).clamp(min=1e-30)
        assert error.max() < 1e-2, f"row {int(error.argmax())}"


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "sum", "none", "mean into a buffer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bad", [128256, -1, 1 << 40, -(1 << 40)])
def test_out_of_range_on_gpu(reduction: str, dtype: torch.dtype, bad: int) -> None:
    """One bad target makes the whole call nan, loss and gradients, and touches no memory that is not the call's."""
    hidden, weight, target = operands(Place("triton", "cuda"), dtype, (300, 64, 128256))
    target[17] = bad
    if bad == -1:
        target[:17] = target[18:] = -100  # nobody else counts
    reduction, *into = reduction.split(" into ")
    buffer = torch.zeros_like(weight, dtype=torch.float32) if into else None
    loss = linear_cross_entropy(hidden, weight, target, reduction=reduction, accumulate_into=buffer)
    loss.sum().backward()
    torch.cuda.synchronize()
    assert loss.isnan().all()
    assert (weight.grad if buffer is None else buffer).isnan().all()
    assert hidden.grad.isnan().all()
