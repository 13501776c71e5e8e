"""Every case on every backend in every dtype, against the oracle in float64."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from budget import assert_outcome
from cases import CASES, PLACES, SIZE_CASES, Case, Place, combinations, hold, run_ours, run_reference
from tiers import crossed
from torch import nn

from chunked_head import ChunkedHead, linear_cross_entropy, plan

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(("case", "dtype", "place"), combinations())
def test_case(case: Case, dtype: torch.dtype, place: Place) -> None:
    hold(case, dtype, place)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float64_on_cpu(case: Case) -> None:
    inputs = case.inputs(torch.float64, "cpu")
    for mine, true in zip(run_ours(inputs, Place("torch", "cpu")), run_reference(inputs, torch.float64), strict=True):
        if true is not None:
            torch.testing.assert_close(mine, true, rtol=1e-11, atol=1e-13)


@crossed(place=PLACES, dtype=DTYPES, nats=[11.0, 40.0, 59.0, 61.0, 89.0, 300.0, 3000.0], every_row=[False, True])
def test_confidently_wrong_rows(place: Place, dtype: torch.dtype, nats: float, every_row: bool) -> None:
    """Rows whose target lies far below the largest logit, alone among others and all at once."""
    made = torch.Generator().manual_seed(3)
    hidden = torch.zeros(20, 64)
    wrong = torch.ones(20, dtype=torch.bool) if every_row else torch.arange(20) == 7
    hidden[:, 0] = torch.where(wrong, nats, 1.0)
    hidden[:, 1:] = torch.randn(20, 63, generator=made) * 0.1
    weight = torch.randn(200, 64, generator=made) * 0.1
    weight[:, 0] = 0.0
    weight[3, 0] = 1.0  # the one logit of `nats`
    inputs = Case("", (20,), 64, 200, ignored=0.0).inputs(dtype, place.device)
    target = torch.randint(4, 200, (20,), generator=made).to(place.device)
    object.__setattr__(inputs, "hidden", hidden.to(place.device, dtype))
    object.__setattr__(inputs, "weight", weight.to(place.device, dtype))
    object.__setattr__(inputs, "target", target)
    truth, eager = run_reference(inputs, torch.float64), run_reference(inputs, dtype)
    assert_outcome(run_ours(inputs, place), eager, truth, dtype)


@pytest.mark.parametrize("place", PLACES)
def test_masked_logits(place: Place) -> None:
    """A bias of -inf takes tokens out of the vocabulary: probability 0, no nan, strips of -inf alone included."""
    inputs = Case("", (40,), 64, 507, {"bias": lambda c, g: torch.zeros(c.vocab)}).inputs(torch.float16, place.device)
    inputs.options["bias"][100:400] = -torch.inf
    inputs.target.copy_(torch.where(inputs.target < 400, inputs.target.clamp(max=99), inputs.target))
    truth, eager = run_reference(inputs, torch.float64), run_reference(inputs, torch.float16)
    ours = run_ours(inputs, place)
    assert_outcome(ours, eager, truth, torch.float16)
    assert not ours.weight[100:400].any()


@crossed(place=PLACES, case=[case for case in SIZE_CASES if case.vocab < 50000])
def test_loss_only_is_the_loss(place: Place, case: Case) -> None:
    inputs = case.inputs(torch.float16, place.device)
    with torch.no_grad():
        alone = linear_cross_entropy(
            inputs.hidden, inputs.weight, inputs.target, backend=place.backend, **inputs.schedule
        )
    # what a call asks beside the loss does not change the loss: no bit of it on a GPU; a CPU sums otherwise by where
    # numbers lie in memory
    ulps = 0.0 if place.device == "cuda" else 4 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(alone, run_ours(inputs, place).loss, rtol=ulps, atol=0)
    assert alone.grad_fn is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(4096, 1024, 128256), (300, 2304, 256000), (1000, 64, 50257)])
def test_real_sizes(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """Real vocabularies on a GPU, in chunks, with an accumulator of either dtype."""
    tokens, hidden, vocab = shape
    inputs = Case("", (tokens,), hidden, vocab).inputs(dtype, "cuda")
    one = torch.ones((), device="cuda")
    truth = run_reference(inputs, torch.float32, one)
    eager = run_reference(inputs, dtype, one)
    for accumulate in {torch.float32, dtype} - {torch.float16}:
        chunk = -(-tokens // 4)
        ours = run_ours(inputs, Place("triton", "cuda"), one, chunk_tokens=chunk, accumulate_dtype=accumulate)
        assert_outcome(ours, eager, truth, dtype)


@pytest.mark.gpu
def test_paths_on_a_gpu() -> None:
    """Which path a Hopper GPU takes; others, other alignments and fp32 take the general one."""
    if torch.cuda.get_device_capability()[0] == 9:
        assert plan(256, 64, 507, torch.bfloat16, device="cuda").sizes.store.name == "fast"
        assert plan(256, 64, 507, torch.float16, device="cuda").sizes.store.name == "relative"
        assert plan(256, 64, 507, torch.bfloat16, device="cuda", softcap=30.0).sizes.store.name == "relative"
    assert plan(256, 63, 507, torch.bfloat16, device="cuda").sizes.store.name == "logits"
    assert plan(256, 64, 507, torch.float32, device="cuda").sizes.store.name == "logits"


# ---- ChunkedHead beside nn.Linear


@pytest.mark.parametrize("bias", [False, True])
def test_the_module_is_a_linear_layer(bias: bool) -> None:
    torch.manual_seed(1)
    linear = nn.Linear(8, 11, bias=bias)
    torch.manual_seed(1)
    head, hidden = ChunkedHead(8, 11, bias=bias), torch.randn(3, 5, 8)
    torch.testing.assert_close(dict(head.state_dict()), dict(linear.state_dict()), rtol=0, atol=0)
    shared = ChunkedHead.from_linear(linear)
    assert shared.weight is linear.weight and shared.bias is linear.bias
    copy, target = pickle.loads(pickle.dumps(head)), torch.randint(0, 11, (3, 5))
    assert torch.equal(copy(hidden, target), head(hidden, target))


def test_options_reach_loss_and_logits() -> None:
    head = ChunkedHead(8, 11, softcap=3.0, logit_scale=2.0, label_smoothing=0.1)
    hidden, target = torch.randn(5, 8), torch.randint(0, 11, (5,))
    x = 3.0 * torch.tanh(2.0 * hidden @ head.weight.T / 3.0)
    torch.testing.assert_close(head.logits(hidden), x)
    torch.testing.assert_close(head(hidden, target), F.cross_entropy(x, target, label_smoothing=0.1))
    torch.testing.assert_close(head(hidden, target, label_smoothing=0.0), F.cross_entropy(x, target))
    assert "softcap=3.0" in repr(head)
