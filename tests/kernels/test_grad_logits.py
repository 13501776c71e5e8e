"""The matmul that leaves gradients of logits, against the matmul and the pass over stored logits that it stands for."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from budget import assert_within_budget
from cases import GPU, TILES, TRITON, Place
from chunked_head.kernels.common import operands
from chunked_head.kernels.gradients import launch as gradients
from loss_cases import FEWER, LOSS_CASES, LossCase, inputs_of, run_reference
from tiers import Turn, crossed, tier

from chunked_head import linear_loss
from chunked_head.plan import planner

PLACES = [*TRITON, *(place for place in GPU if place.values[0].backend == "triton")]
COEFFICIENTS = ("alpha", "eta", "alpha2", "eta2", "beta", "kappa")


@dataclass(frozen=True)
class Case:
    name: str
    coefficients: tuple[str, ...] = ("alpha", "beta")
    rows: int = 77
    hidden: int = 72
    columns: int = 203
    first: int = 0  # of the tile in a vocabulary of some more columns
    columns2: int = 150
    ratio2: float | None = None
    bias: bool = False
    class_weights: bool = False
    logit_scale: float | None = None
    softcap: float | None = None


CASES = [
    Case("cross-entropy"),
    Case("later-tile", first=64),
    Case("rows-of-whole-tiles", rows=64, columns=128, first=128),
    Case("one-row", rows=1),
    Case("few-columns", columns=5, columns2=3, hidden=8),
    Case("alpha-alone", ("alpha",)),
    Case("beta-alone", ("beta",)),
    Case("kappa-alone", ("kappa",), first=8),
    Case("nothing", ()),
    Case("entropy", ("alpha", "eta", "beta")),
    Case("smoothing", ("alpha", "beta", "kappa"), class_weights=True),
    Case("smoothing-bias", ("alpha", "beta", "kappa"), bias=True, first=32),
    Case("bias", bias=True, first=16),
    Case("scale", logit_scale=0.37),
    Case("cap", softcap=3.0, first=24),
    Case("scale-cap-bias", softcap=3.0, logit_scale=1.5, bias=True),
    Case("second-alone", ("alpha2", "beta"), ratio2=0.5),
    Case("two-softmaxes", ("alpha", "alpha2", "beta"), ratio2=2.0, first=64),
    Case("second-of-fewer", ("alpha", "alpha2", "eta2"), columns2=64),
    Case("second-of-none-here", ("alpha", "alpha2"), columns2=0, first=96),
    Case(
        "everything", COEFFICIENTS, ratio2=0.7, bias=True, class_weights=True, logit_scale=0.8, softcap=5.0, first=40
    ),
]  # fmt: skip


def softmax_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """start and rest of log p = (x - start) + rest"""
    return x.max(1).values, -(x - x.max(1).values[:, None]).exp().sum(1).log()


@crossed(place=PLACES, case=CASES, dtype=Turn([torch.float16, torch.bfloat16]))
def test_is_what_row_grad_makes(place: Place, case: Case, dtype: torch.dtype) -> None:
    made = torch.Generator().manual_seed(3)
    vocab = case.first + case.columns + 9
    columns = slice(case.first, case.first + case.columns)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made).to(place.device)

    hidden = normal(case.rows, case.hidden).to(dtype)
    weight = (3 * normal(vocab, case.hidden) / case.hidden**0.5).to(dtype)
    bias = normal(vocab).to(dtype) if case.bias else None
    class_weights = normal(vocab).abs() if case.class_weights else None
    target = torch.randint(0, vocab, (case.rows,), generator=made).to(place.device)
    target[::3] = columns.start + target[::3] % case.columns  # no tile without targets
    target[4::5] = -1
    hidden[4::10] = torch.nan  # of rows that do not count

    raw = hidden.float() @ weight.float().t()
    x = raw if bias is None else raw + bias.float()
    x = x * (case.logit_scale or 1.0)
    x = x if case.softcap is None else case.softcap * torch.tanh(x / case.softcap)
    # not the matmul's own value: that it is taken, and not the column's, shows
    target_logit = x.gather(1, target.clamp(min=0)[:, None])[:, 0] + 0.25 * normal(case.rows)
    c = {name: normal(case.rows) for name in COEFFICIENTS if name in case.coefficients}
    c = {name: value.masked_fill(target < 0, torch.nan) for name, value in c.items()}
    first = gradients.Softmax(*softmax_of(x), c.get("alpha"), c.get("eta"))
    second = gradients.Softmax(
        *softmax_of(x * (case.ratio2 or 1.0)), c.get("alpha2"), c.get("eta2"), case.ratio2, case.columns2
    )  # fmt: skip
    common = gradients.Terms(target, target_logit, c.get("beta"), c.get("kappa"), first, second)
    sliced = None if class_weights is None else class_weights[columns]
    transform = operands.Transform(case.logit_scale, case.softcap)
    after = (case.first, transform)

    expected = torch.empty(case.rows, case.columns, device=place.device)
    stored = operands.Stored(raw[:, columns].contiguous(), None, None if bias is None else bias[columns], transform)
    gradients.row_grad(expected, stored, sliced, common, None, *after)
    assert (expected[target < 0] == 0).all()
    if case.coefficients:
        assert expected.abs().max() > 0.1
    # rounded once to 16 bits; what is added up before is as large as the coefficients
    size = expected.abs() + 1e-3 * expected.abs().amax(1, keepdim=True)
    allowed = torch.finfo(dtype).eps * size + 2e-5
    for tile in TILES:
        # a number that no gradient is, in every place and in those between the rows, which stay as they are
        buffer = torch.full((case.rows, -(-case.columns // 8) * 8 + 8), 77.0, device=place.device, dtype=dtype)
        dlogits = buffer[:, : case.columns]
        given = None if bias is None else bias[columns]
        gradients.grad_logits(dlogits, hidden, weight[columns], given, sliced, common, *after, tile)
        # the tensor copy engine stores whole 16 bytes: what fills a row up to them is nobody's
        assert (buffer[:, -(-case.columns // 8) * 8 :] == 77.0).all()
        assert (dlogits[target < 0] == 0).all()
        error = (dlogits.float() - expected).abs() / allowed
        worst = divmod(int(error.argmax()), case.columns)
        assert (error <= 1).all(), f"{error.max()} of what is allowed, at {worst}, {tile}"


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
        planner, "block_and_tile", lambda plan, *_: planner.of_tile(plan, plan.sizes.tokens - 20, COLUMNS)
    )
    monkeypatch.setattr(gradients, "grad_logits", watched)
    planner.PLANS.clear()
    yield seen
    planner.PLANS.clear()


def recomputed() -> list:
    """Each third loss in every run; one dense teacher stands for all, and fp16 for both dtypes."""
    found = []
    for place in PLACES:
        # topk-topk has no tiles: the logits of a teacher's ids alone
        for i, case in enumerate(case for case in LOSS_CASES if case.name != "topk-topk"):
            if not dense(case) or case.name == "everything":
                param = pytest.param(place.values[0], case, marks=place.marks, id=f"{case.name}-{place.id}")
                found += tier(param, i % 3 == 0 or case.name.startswith(("everything", "kept", "topk")))
    return found


def dense(case: LossCase) -> bool:
    return "teacher_logits" in case.batch or "teacher_hidden" in case.batch


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
    assert len(set(tiles)) == (0 if dense(case) else 4)
    for name, ours, plain, exact in zip(("hidden", "weight", "bias"), grads, eager[2], truth[2], strict=False):
        assert_within_budget(ours, 0.37 * plain.double(), 0.37 * exact, dtype, f"gradient of {name}")
