"""Memory of calls in fp8: what the plan lists is what is allocated."""

from typing import Any

import pytest
import torch
from cases import PLACES, Place
from tiers import crossed, tier
from tracking import Tracker, assert_predicted, peak_of, unwatched

from chunked_head import Plan, linear_cross_entropy, plan
from chunked_head.plan.sizes import Phase
from chunked_head.stores.triton import rounded
from chunked_head.stores.triton.backend import TritonBackend

OPTIONS: list[dict[str, Any]] = [
    {}, {"chunk_tokens": 32}, {"weight_grad": False}, {"hidden_grad": False}, {"accumulate_into": True},
    {"deterministic": True}, {"hidden_grad": False, "weight_grad": False},
]  # fmt: skip


def step_of(place: Place, shape: tuple[int, int, int], options: dict[str, Any]) -> Any:
    """A call with backward, and the tensors that are there before it."""
    (tokens, width, vocab), options = shape, dict(options)
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (
        torch.randn(rows, width, generator=generator).to(place.device, torch.bfloat16) for rows in (tokens, vocab)
    )
    hidden.requires_grad_(options.pop("hidden_grad", True))
    weight.requires_grad_(options.pop("weight_grad", True))
    target = torch.randint(0, vocab, (tokens,), generator=generator).to(place.device)
    existing = [hidden, weight, target]
    if options.pop("accumulate_into", False):
        options["accumulate_into"] = torch.zeros_like(weight, dtype=torch.float32)
        existing.append(options["accumulate_into"])

    def step() -> None:
        hidden.grad = weight.grad = None
        loss = linear_cross_entropy(hidden, weight, target, precision="fp8", backend="triton", **options)
        if loss.requires_grad:
            loss.backward()

    return step, existing


def planned(place: Place, shape: tuple[int, int, int], options: dict[str, Any]) -> Plan:
    return plan(*shape, torch.bfloat16, device=place.device, backend="triton", precision="fp8", **options)


def interpreted() -> list[Any]:
    """Two options first: an interpreted call takes seconds."""
    places = [place for place in PLACES if place.values[0] == Place("triton", "cpu")]
    params = [pytest.param(place.values[0], options, marks=place.marks) for options in OPTIONS[:5] for place in places]
    return [row for i, param in enumerate(params) for row in tier(param, i in (1, 4))]


@pytest.mark.parametrize(("place", "options"), interpreted())
def test_every_buffer(place: Place, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each buffer of the plan is there at the peak and nothing else is, as on a GPU that sums 16-bit products."""
    traits = TritonBackend.traits
    monkeypatch.setattr(TritonBackend, "traits", lambda self, device: traits(self, device) | {"half_products": True})
    monkeypatch.setattr(rounded, "multiply_e4m3", unwatched(rounded.multiply_e4m3))  # casts of a CPU's product
    shape = 64, 208, 752
    expected, (step, existing) = planned(place, shape, options), step_of(place, shape, options)
    assert expected.e4m3_gradients
    with Tracker(*existing) as tracker:
        step()
    # a GPU's sort has temporaries, two of five numbers an entry, that a CPU's lacks
    sorting = sum(buffer.bytes for buffer in expected.buffers if buffer.name == "order of sparse gradients")
    assert_predicted(tracker.peak_bytes + sorting * 2 // 5, expected, share=0.01, least=0)
    sizes = [size for size in tracker.peak_sizes if size >= shape[2]]
    for buffer in expected.buffers:  # each by itself, or as tensors of as many bytes together
        if buffer.first <= Phase.LOOP <= buffer.last and buffer.bytes >= 10_000 and buffer.dtype.itemsize < 4:
            assert buffer.bytes in sizes or buffer.dtype == torch.uint8, buffer
            sizes.remove(buffer.bytes) if buffer.bytes in sizes else None


@crossed(place=[place for place in PLACES if place.values[0] == Place("triton", "cuda")], options=OPTIONS)
def test_prediction(place: Place, options: dict[str, Any]) -> None:
    shape = 4096, 1024, 128256
    expected, (step, existing) = planned(place, shape, options), step_of(place, shape, options)
    assert_predicted(peak_of(step, *existing), expected, share=0.01)
