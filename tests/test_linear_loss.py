"""Every loss through the chunk loop, on every backend and road, against the oracle on full logits in float64."""

from typing import Any

import pytest
import torch
from budget import assert_within_budget
from cases import PLACES, Place
from loss_cases import LOSS_CASES, LossCase, assert_scalar, inputs_of, run_reference

from chunked_head import LossOutput, linear_loss

# interpreted, each step is slow: a road per loss, in turn, and all of them on a GPU
SCHEDULES: list[dict[str, Any]] = [{"chunk_tokens": 32}, {}, {"chunk_tokens": 64}]


def run_ours(case: LossCase, inputs: Any, place: Place, **more: Any) -> tuple[LossOutput, list[torch.Tensor]]:
    hidden, weight = (t.detach().clone().requires_grad_() for t in (inputs.hidden, inputs.weight))
    head, leaves = dict(inputs.head), [hidden, weight]
    if "bias" in head:
        head["bias"] = head["bias"].detach().clone().requires_grad_()
        leaves.append(head["bias"])
    out = linear_loss(
        hidden, weight, inputs.target, case.losses, batch=inputs.batch, num_segments=inputs.num_segments,
        backend=place.backend, **head, **more,
    )  # fmt: skip
    return out, list(torch.autograd.grad(out.loss, leaves, torch.full_like(out.loss, 0.37)))


def combinations() -> list:
    found = []
    for place in PLACES:
        for i, case in enumerate(LOSS_CASES):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                if place.id == "triton-interpreted" and dtype != (torch.float16, torch.float32)[i % 2]:
                    continue
                if place.id == "torch-cpu" and dtype == torch.float16 and i % 2:
                    continue
                found.append(
                    pytest.param(
                        case, dtype, place.values[0], SCHEDULES[i % 3], marks=place.marks,
                        id=f"{case.name}-{str(dtype)[6:]}-{place.id}",
                    )
                )  # fmt: skip
    return found


@pytest.mark.parametrize(("case", "dtype", "place", "schedule"), combinations())
def test_loss(case: LossCase, dtype: torch.dtype, place: Place, schedule: dict[str, Any]) -> None:
    inputs = inputs_of(case, dtype, place.device)
    truth = run_reference(case, inputs.to(torch.float64))
    eager = run_reference(case, inputs)
    garbage = inputs_of(case, dtype, place.device, garbage=True)
    out, grads = run_ours(case, garbage, place, **schedule)
    wide = torch.promote_types(dtype, torch.float32)
    assert out.loss.dtype == wide and out.loss.shape == ()
    assert out.parts.keys() == truth[1].keys()
    for name, value in out.parts.items():
        assert_scalar(case, dtype, value, eager[1][name], truth[1][name], name)
    assert_scalar(case, dtype, out.loss, eager[0], truth[0], "loss")
    for name, ours, plain, exact in zip(("hidden", "weight", "bias"), grads, eager[2], truth[2], strict=False):
        assert ours.dtype == dtype
        assert_within_budget(ours, 0.37 * plain.double(), 0.37 * exact, dtype, f"gradient of {name}")
