"""The matmul that leaves gradients of logits, against the matmul and the pass over stored logits that it stands for."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from budget import assert_within_budget
from cases import GPU, TRITON, Place
from chunked_head.kernels.gradients import launch as gradients
from loss_cases import FEWER, LOSS_CASES, LossCase, case, inputs_of, run_reference
from tiers import tier

from chunked_head import linear_loss
from chunked_head.plan import planner

PLACES = [*TRITON, *(place for place in GPU if place.values[0].backend == "triton")]


COLUMNS = 120


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Two blocks of tokens and three tiles of columns in every plan that recomputes; the shape of each launch."""
    seen: list[tuple[int, int]] = []
    launch = gradients.grad_logits

    def watched(dlogits: torch.Tensor, *arguments: Any, **options: Any) -> None:
        assert dlogits.stride(0) % 8 == 0, "the tensor copy engine's rows start on 16 bytes"
        seen.append(tuple(dlogits.shape))
        launch(dlogits, *arguments, **options)

    monkeypatch.setattr(
        planner, "block_and_tile", lambda plan, *_: planner.with_tile(plan, plan.sizes.tokens - 20, COLUMNS)
    )
    monkeypatch.setattr(gradients, "grad_logits", watched)
    planner.PLANS.clear()
    yield seen
    planner.PLANS.clear()


CLASSES = {"label_smoothing": 0.9, "class_weights": torch.linspace(0.1, 1.0, FEWER["vocab"])}


def recomputed() -> list:
    """Each third loss in every run; one sum over the vocabulary stands for all, and fp16 for both dtypes."""
    found = [pytest.param(*place.values, case("", ("cross_entropy", CLASSES)), id="class-weights") for place in TRITON]
    for place in PLACES:
        # topk-topk has no tiles: the logits of a teacher's ids alone
        for i, one in enumerate(one for one in LOSS_CASES if one.name != "topk-topk"):
            if not stores_logits(one) or one.name == "everything":
                param = pytest.param(place.values[0], one, marks=place.marks, id=f"{one.name}-{place.id}")
                found += tier(param, i % 3 == 0 or one.name.startswith(("everything", "kept", "topk")))
    return found


def stores_logits(case: LossCase) -> bool:
    """True of sums over the vocabulary, whose slopes tiles do not know."""
    return "teacher_logits" in case.batch or "teacher_hidden" in case.batch or case.name.startswith("vocabulary")


@pytest.mark.parametrize(("place", "case"), recomputed())
def test_recomputed_losses(place: Place, case: LossCase, tiles: list[tuple[int, int]]) -> None:
    """Losses in blocks and tiles, by a second backward, against the oracle on full logits in float64."""
    dtype, sizes = torch.float16, {} if place.device == "cuda" else FEWER
    inputs = inputs_of(case, dtype, place.device, **sizes)
    truth, eager = run_reference(case, inputs.to(torch.float64)), run_reference(case, inputs)
    inputs = inputs_of(case, dtype, place.device, garbage=True, **sizes)
    leaves = [inputs.hidden.requires_grad_(), inputs.weight.requires_grad_()]
    if "bias" in inputs.head:
        leaves.append(inputs.head["bias"].requires_grad_())
    out = linear_loss(
        *leaves[:2], inputs.target, case.losses, batch=inputs.batch, num_segments=inputs.num_segments,
        backend=place.backend, **inputs.head,
    )  # fmt: skip
    upstream = torch.full_like(out.loss, 0.37)
    torch.autograd.grad(out.loss, leaves, upstream, retain_graph=True)
    tiles.clear()
    grads = torch.autograd.grad(out.loss, leaves, upstream)
    assert len(set(tiles)) == (0 if stores_logits(case) else 4)
    for name, ours, plain, exact in zip(("hidden", "weight", "bias"), grads, eager[2], truth[2], strict=False):
        assert_within_budget(ours, 0.37 * plain.double(), 0.37 * exact, dtype, f"gradient of {name}")
