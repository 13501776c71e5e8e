"""Losses on existing logits: against PyTorch and the oracle in float64, on every backend; copies, shapes and errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from budget import assert_within_budget
from cases import PLACES, Place, upstream_like
from logits_cases import made_logits, made_target, on_logits
from loss_cases import LOSS_CASES, LossCase, inputs_of
from tiers import Turn, crossed
from torch import Tensor
from tracking import Tracker

from chunked_head import CrossEntropyLoss, logits_loss, losses
from chunked_head.stores.store import GivenLogits
from chunked_head.stores.torch_functions import TILE_ELEMENTS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TRITON_PLACES = [place for place in PLACES if place.values[0].backend == "triton"]


def loss_and_grad(function: Callable[[Tensor], Tensor], logits: Tensor) -> tuple[Tensor, Tensor]:
    x = logits.detach().requires_grad_()
    loss = function(x)
    (grad,) = torch.autograd.grad(loss, x, upstream_like(loss))
    return loss.detach(), grad


# ---- against PyTorch


SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "one": ((7,), ()),
    "two": ((5, 7), (5,)),
    "second": ((5, 7, 3), (5, 3)),
    "second-image": ((2, 7, 3, 4), (2, 3, 4)),
    "second-one-class": ((5, 1, 3), (5, 3)),
    "last": ((5, 3, 7), (5, 3)),
    "last-deep": ((2, 3, 4, 7), (2, 3, 4)),
    "last-batch-is-class": ((7, 3, 7), (7, 3)),
}


@crossed(place=PLACES, reduction=["mean", "none"], name=SHAPES)
def test_layouts(place: Place, reduction: str, name: str) -> None:
    shape, leading = SHAPES[name]
    second = name.startswith("second")
    classes = shape[1] if second else shape[-1]
    logits = made_logits(*shape, device=place.device)
    target = torch.randint(0, classes, leading).to(place.device)

    def theirs(x: Tensor) -> Tensor:
        return F.cross_entropy(x if second or x.dim() < 3 else x.movedim(-1, 1), target, reduction=reduction)

    truth = loss_and_grad(theirs, logits.double())
    ours = loss_and_grad(lambda x: CrossEntropyLoss(reduction=reduction, backend=place.backend)(x, target), logits)
    assert ours[0].shape == truth[0].shape
    for mine, true in zip(ours, truth, strict=True):
        torch.testing.assert_close(mine, true.float(), rtol=1e-5, atol=1e-6)


def test_layout_that_reads_both_ways() -> None:
    with pytest.raises(ValueError, match=r"input \(2, 7, 7\) with target \(2, 7\) may have its classes last or"):
        CrossEntropyLoss()(torch.randn(2, 7, 7), torch.zeros(2, 7, dtype=torch.int64))


def test_the_module_is_a_drop_in() -> None:
    weight = torch.rand(9)
    ours, theirs = CrossEntropyLoss(weight, label_smoothing=0.1), torch.nn.CrossEntropyLoss(weight, label_smoothing=0.1)
    assert ours.state_dict().keys() == theirs.state_dict().keys() == {"weight"}
    assert not list(ours.parameters()) and not CrossEntropyLoss().state_dict()
    assert ours.double().weight.dtype == torch.float64
    assert (ours.ignore_index, ours.reduction, ours.label_smoothing) == (-100, "mean", 0.1)
    assert "weight=(9,)" in repr(ours) and "label_smoothing=0.1" in repr(ours)


# ---- every loss


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_upstream_comes_before_rounding(place: Place, dtype: torch.dtype) -> None:
    """A loss scale and a normalizer that cancel: on the way nothing leaves the range of 16 bits."""
    logits, target = made_logits(23, 507, dtype=dtype, device=place.device), made_target(507, 23, device=place.device)

    def ours(x: Tensor) -> Tensor:
        return logits_loss(x, target, losses.cross_entropy(), normalizer=2.0**20, backend=place.backend).loss * 2.0**20

    def theirs(x: Tensor) -> Tensor:
        return F.cross_entropy(x.double(), target, reduction="sum")

    (_, grad), (_, truth) = loss_and_grad(ours, logits), loss_and_grad(theirs, logits.double())
    assert_within_budget(grad, truth.to(dtype), truth, dtype, "gradient")


# ---- rows that do not lie one after another


def padded(x: Tensor) -> Tensor:
    wide_rows = torch.full((*x.shape[:-1], x.shape[-1] + 5), torch.nan, dtype=x.dtype, device=x.device)
    wide_rows[..., : x.shape[-1]] = x
    return wide_rows[..., : x.shape[-1]]


def prefix(x: Tensor) -> Tensor:
    return torch.cat([x, torch.full_like(x[:, :1], torch.nan)], 1)[:, :-1]


def transposed(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def by_columns(x: Tensor) -> Tensor:
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


LAYOUTS = {"padded": padded, "prefix": prefix, "transposed": transposed, "by-columns": by_columns}


@crossed(place=PLACES, dtype=[torch.float32, torch.bfloat16], inplace=[False, True], name=LAYOUTS)
def test_strides(place: Place, dtype: torch.dtype, inplace: bool, name: str) -> None:
    logits, target = (
        made_logits(3, 5, 131, dtype=dtype, device=place.device),
        made_target(131, 3, 5, device=place.device),
    )
    teacher = made_logits(3, 5, 131, dtype=dtype, device=place.device, seed=9)
    made = losses.cross_entropy() + losses.forward_kl() - 0.1 * losses.entropy(temperature=2.0)

    def ours(x: Tensor, inplace: bool = False) -> Tensor:
        batch = {"teacher_logits": teacher}
        return logits_loss(x, target, made, batch=batch, inplace=inplace, backend=place.backend).loss

    loss, grad = loss_and_grad(ours, logits)
    assert grad.any()
    leaf = LAYOUTS[name](logits).requires_grad_()
    assert not leaf.is_contiguous()
    x = LAYOUTS[name](leaf * 1.0) if inplace else leaf
    same = ours(x, inplace)
    assert torch.equal(same, loss)
    (found,) = torch.autograd.grad(same, leaf, upstream_like(same))
    torch.testing.assert_close(found, grad, rtol=1e-5, atol=1e-7)  # a GPU sums other strides in another order
    if inplace and name == "padded":  # of the others a copy is overwritten
        assert torch.equal(x, found)


@pytest.mark.gpu
def test_many_rows_on_a_gpu() -> None:
    logits, target = (
        made_logits(70000, 257, dtype=torch.bfloat16, device="cuda"),
        made_target(257, 70000, device="cuda"),
    )
    truth = loss_and_grad(lambda x: F.cross_entropy(x, target), logits.double())
    eager = loss_and_grad(lambda x: F.cross_entropy(x.float(), target), logits)
    ours = loss_and_grad(lambda x: CrossEntropyLoss()(x, target), logits)
    assert_within_budget(ours[0], eager[0], truth[0], torch.float32, "loss")
    assert_within_budget(ours[1], eager[1], truth[1], torch.bfloat16, "gradient")


# ---- memory

LARGE = 256 * 40000
TILES = 14 * 4 * TILE_ELEMENTS  # bytes; the logits are 20 or 41 MB
MEMORY_CASES = [
    case for case in LOSS_CASES
    if case.name in ("cross-entropy", "sum", "two-temperatures", "jsd", "mixed", "topk-and-dense", "gspo")
]  # fmt: skip


def memory_inputs(case: LossCase, device: str, dtype: torch.dtype, **sizes: int) -> tuple[Tensor, dict[str, Any]]:
    """Logits and the other arguments of ``logits_loss``."""
    inputs = inputs_of(case, dtype, device, **sizes)
    logits, batch, head = on_logits(case, inputs, dtype)
    more = {"target": inputs.target, "loss": case.losses, "batch": batch, "num_segments": inputs.num_segments}
    return logits.requires_grad_(), head | more


@crossed(
    place=[place for place in PLACES if place.id != "triton-interpreted"], case=MEMORY_CASES, inplace=[False, True],
    dtype=Turn((torch.float32, torch.bfloat16)),
)  # fmt: skip
def test_nothing_as_large_as_the_logits_but_the_gradient(
    place: Place, case: LossCase, inplace: bool, dtype: torch.dtype
) -> None:
    logits, given = memory_inputs(case, place.device, dtype, tokens=256, vocab=40000)
    x = logits * 1.0 if inplace else logits.view_as(logits)
    with Tracker(x, logits, *given["batch"].values(), large=LARGE) as forward:
        out = logits_loss(x, inplace=inplace, backend=place.backend, **given)
    assert forward.most_large == 0
    assert forward.peak_bytes < TILES
    with Tracker(x, logits, *given["batch"].values(), large=LARGE) as backward:
        (grad,) = torch.autograd.grad(out.loss, x)
    assert backward.most_large == (0 if inplace else 1)
    assert (grad.data_ptr() == x.data_ptr()) == inplace
    assert backward.peak_bytes < TILES + LARGE * dtype.itemsize * backward.most_large


@crossed(place=TRITON_PLACES, inplace=[False, True], case=MEMORY_CASES)
def test_only_kernels_touch_the_logits(place: Place, inplace: bool, case: LossCase) -> None:
    logits, given = memory_inputs(case, place.device, torch.float32, tokens=24, vocab=1030)
    x = logits * 1.0
    with Tracker(x, logits, *given["batch"].values(), large=x.numel()) as tracker:
        torch.autograd.grad(logits_loss(x, inplace=inplace, backend=place.backend, **given).loss, x)
    assert tracker.most_large == (0 if inplace else 1)
    # the interpreter's own: set_ and copy_; a few columns of each row: gather
    assert tracker.large_operations <= {"new_empty", "view", "alias", "detach", "slice", "set_", "copy_", "gather"}


# ---- in place, and once or twice


@crossed(place=PLACES, dtype=DTYPES, reduction=["mean", "none"])
def test_inplace(place: Place, dtype: torch.dtype, reduction: str) -> None:
    logits, target = made_logits(21, 131, dtype=dtype, device=place.device), made_target(131, 21, device=place.device)
    options: dict[str, Any] = {"reduction": reduction, "z_loss": 0.01, "backend": place.backend}
    loss, grad = loss_and_grad(lambda x: CrossEntropyLoss(**options)(x, target), logits)
    leaf = logits.clone().requires_grad_()
    x = leaf * 1.0
    x.retain_grad()
    mine = CrossEntropyLoss(**options, inplace=True)(x, target)
    assert torch.equal(mine, loss) and torch.equal(x, logits)  # until backward, nothing is overwritten
    mine.backward(upstream_like(mine), retain_graph=True)
    assert torch.equal(leaf.grad, grad) and torch.equal(x, grad) and torch.equal(x.grad, grad)
    assert x.data_ptr() not in (leaf.grad.data_ptr(), x.grad.data_ptr())
    with pytest.raises(RuntimeError, match="a second backward through a loss with inplace=True"):
        mine.backward(upstream_like(mine))


@pytest.mark.parametrize("place", PLACES)
def test_inplace_is_seen_by_whoever_saved_the_logits(place: Place) -> None:
    target = made_target(131, 21, device=place.device)
    saved = made_logits(21, 131, device=place.device).requires_grad_().tanh()  # keeps its result
    loss = logits_loss(saved, target, losses.cross_entropy(), inplace=True, backend=place.backend).loss
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    x = made_logits(21, 131, device=place.device).requires_grad_() * 1.0
    first, second = (
        logits_loss(x, target, losses.cross_entropy(), inplace=True, backend=place.backend).loss for _ in range(2)
    )
    first.backward(retain_graph=True)
    third = logits_loss(x, target, losses.cross_entropy(), backend=place.backend).loss
    x.mul_(2.0)
    for loss in (second, third):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("place", PLACES)
def test_a_backward_that_raises_has_overwritten_logits_too(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, target = torch.randn(6, 40, device=place.device), torch.arange(6, device=place.device)
    made, x = GivenLogits.add_gradients, logits.requires_grad_() * 1.0
    saved = x.exp().sum() + x.square().sum()
    loss = logits_loss(x, target, losses.cross_entropy(), inplace=True, backend=place.backend).loss

    def raising(*given: Any) -> None:
        made(*given)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(GivenLogits, "add_gradients", raising)
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


def test_inplace_refuses_what_must_keep_its_value() -> None:
    target = made_target(9, 4)
    leaf = made_logits(5, 9).requires_grad_()
    a_view = made_logits(5, 9)[:4].requires_grad_()
    for x in (leaf[:4], leaf[:4].view(4, 9), made_logits(4, 9).requires_grad_(), a_view):
        with pytest.raises(ValueError, match="a leaf"):
            logits_loss(x, target, losses.cross_entropy(), inplace=True)
        assert logits_loss(x, target, losses.cross_entropy()).loss > 0
    expanded = (leaf[:1] * 1.0).expand(4, 9)
    with pytest.raises(ValueError, match="expanded"):
        logits_loss(expanded, target, losses.cross_entropy(), inplace=True)
    nothing = (torch.zeros(2, 0, 1, requires_grad=True) * 1.0).as_strided((2, 0, 1), (0, 1, 0))
    logits_loss(nothing, target.new_zeros(2, 0), losses.cross_entropy(), inplace=True).loss.backward()
    with torch.no_grad():  # nothing is written without a backward
        assert logits_loss(leaf[:4] * 1.0, target, losses.cross_entropy(), inplace=True).loss > 0


# ---- wrong calls


@pytest.mark.parametrize("place", TRITON_PLACES)
def test_float64_has_no_kernels(place: Place) -> None:
    x = made_logits(4, 9, dtype=torch.float64, device=place.device)
    with pytest.raises(ValueError, match="logits is float64: use backend='torch'"):
        CrossEntropyLoss(backend=place.backend)(x, made_target(9, 4, device=place.device))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_target_out_of_range_on_a_gpu(backend: str, reduction: str) -> None:
    target = made_target(9, 20, device="cuda")
    target[3] = 9
    logits, module = made_logits(20, 9, device="cuda"), CrossEntropyLoss(reduction=reduction, backend=backend)
    loss, grad = loss_and_grad(lambda x: module(x, target), logits)
    counts = (target != -100) & (target != 9)
    assert torch.isnan(loss if reduction == "mean" else loss[counts]).all()
    assert torch.isnan(grad[counts]).all()


@crossed(place=PLACES, dense=["forward_kl", "reverse_kl", "jsd", "tvd"], temperature=[1.0, 2.0])
def test_known_columns_beside_a_dense_teacher(place: Place, dense: str, temperature: float) -> None:
    """A student that is both teachers has nothing to learn: what the two give a column is rounded as one."""
    made = torch.Generator().manual_seed(4)
    logits = (2 * torch.randn(9, 67, generator=made)).to(place.device, torch.bfloat16).requires_grad_()
    known = logits.detach().float().log_softmax(-1).sort(-1)
    batch = {"teacher_logits": logits.detach().clone(), "teacher_ids": known.indices, "teacher_logprobs": known.values}
    loss = getattr(losses, dense)(temperature=temperature) + losses.topk_kl(normalize="vocab", temperature=1.0)
    out = logits_loss(logits, None, loss, batch=batch, reduction="sum", backend=place.backend)
    out.loss.backward()
    assert logits.grad.abs().max() < 1e-6
