"""Class probabilities as targets, against PyTorch's own cross-entropy on full logits."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from budget import assert_outcome, assert_within_budget
from cases import PLACES, Case, Inputs, Place, run, run_ours
from tiers import crossed
from torch import Tensor

from chunked_head import CrossEntropyLoss, TokenParallel, VocabParallel, linear_cross_entropy, linear_loss, losses

LEADING, VOCAB = (3, 11), 203


def classes(case: Case, generator: torch.Generator) -> Tensor:
    return torch.rand(case.vocab, generator=generator)


def tokens(case: Case, generator: torch.Generator) -> Tensor:
    return torch.rand(case.leading, generator=generator)


OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "shift": {"shift": 2},
    "smoothing": {"label_smoothing": 0.2},
    "all": {
        "reduction": "sum", "label_smoothing": 0.1, "class_weights": classes, "token_weights": tokens, "z_loss": 1e-3,
        "shift": 1, "softcap": 4.0,
    },
    "none-all": {"reduction": "none", "label_smoothing": 0.1, "class_weights": classes, "shift": 1, "z_loss": 1e-3},
}  # fmt: skip


def probabilities(device: str) -> Tensor:
    """Rows that add up to 1, one that adds up to another number, one of a single class, one of zeros."""
    made = torch.Generator().manual_seed(5)
    p = (torch.randn(*LEADING, VOCAB, generator=made) * 3).softmax(-1)
    p[0, 3] *= 0.4
    p[1, 4] = F.one_hot(torch.tensor(7), VOCAB)
    p[2, 5] = 0.0
    return p.to(device)


def inputs(options: dict[str, Any], dtype: torch.dtype = torch.float32, device: str = "cpu") -> Inputs:
    made = Case("", LEADING, 32, VOCAB, options, {"chunk_tokens": 16}).inputs(dtype, device)
    return Inputs(made.hidden, made.weight, probabilities(device), made.options, made.schedule)


def full(
    hidden: Tensor,
    weight: Tensor,
    p: Tensor,
    class_weights: Tensor | None = None,
    token_weights: Tensor | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    shift: int = 0,
    softcap: float | None = None,
) -> Tensor:
    logits = F.linear(hidden, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logits, p = logits[:, : LEADING[1] - shift], p[:, shift:].to(logits.dtype)
    classes = None if class_weights is None else class_weights.to(logits.dtype)
    values = F.cross_entropy(
        logits.flatten(0, 1), p.flatten(0, 1), classes, reduction="none", label_smoothing=label_smoothing
    ).view(p.shape[:2])
    values = values + z_loss * logits.logsumexp(-1) ** 2
    if token_weights is not None:
        values = values * token_weights[:, shift:].to(logits.dtype)
    return F.pad(values, (shift, 0)) if reduction == "none" else values.mean() if reduction == "mean" else values.sum()


@crossed(place=PLACES, dtype=[torch.float32, torch.bfloat16, torch.float16], options=list(OPTIONS))
def test_equals_full_logits(options: str, dtype: torch.dtype, place: Place) -> None:
    given = inputs(OPTIONS[options], dtype, place.device)
    truth, eager = run(full, given.to(torch.float64)), run(full, given)
    if truth.loss.dim() == 0:
        # eager's error of one number is one draw, which may be next to nothing: the largest of several
        eager = eager._replace(loss=truth.loss + largest_error(given))
    assert_outcome(run_ours(given, place), eager, truth, dtype)


def largest_error(given: Inputs) -> Tensor:
    """Of eager's loss, with each of the sequences' hidden states beside other targets."""
    errors = []
    for step in range(8):
        moved = replace(given, hidden=given.hidden.roll(step, 1))
        errors.append(run(full, moved).loss.double() - run(full, moved.to(torch.float64)).loss)
    return torch.stack(errors).abs().amax()


@pytest.mark.parametrize("shape", [(9, VOCAB), (VOCAB,)])
@pytest.mark.parametrize("options", [{}, {"reduction": "sum", "label_smoothing": 0.1}, {"reduction": "none"}], ids=str)
def test_module(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    logits, p, weight = torch.randn(shape), torch.rand(shape), torch.rand(VOCAB)

    def found(module: type[torch.nn.Module], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x = logits.to(dtype, copy=True).requires_grad_()
        loss = module(weight.to(dtype), **options)(x, p.to(dtype))
        return loss, *torch.autograd.grad(loss.sum(), x)

    ours, eager = (found(module, torch.float32) for module in (CrossEntropyLoss, torch.nn.CrossEntropyLoss))
    truth = found(torch.nn.CrossEntropyLoss, torch.float64)
    for what, *each in zip(("loss", "gradient"), ours, eager, truth, strict=True):
        assert_within_budget(*each, torch.float32, what)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_in_a_graph(reduction: str) -> None:
    options = {"reduction": reduction, "shift": 1}
    given = inputs({})
    hidden, weight, p = given.hidden, given.weight, given.target
    compiled = torch.compile(lambda *given: linear_cross_entropy(*given, **options), fullgraph=True, backend="eager")
    eager = linear_cross_entropy(hidden, weight, p, **options)
    torch.testing.assert_close(compiled(hidden, weight, p), eager)


def test_nothing_counts_twice_or_not_at_all() -> None:
    """The denominator is the number of tokens, rows of zeros among them, whatever classes weigh."""
    given, weights = inputs({}), torch.rand(VOCAB)
    hidden, weight, p = given.hidden, given.weight, given.target
    total = linear_cross_entropy(hidden, weight, p, class_weights=weights, reduction="sum")
    mean = linear_cross_entropy(hidden, weight, p, class_weights=weights)
    torch.testing.assert_close(mean, total / (LEADING[0] * LEADING[1]))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_ranks() -> None:
    given = inputs({})
    hidden, weight, p = given.hidden, given.weight, given.target
    together = linear_cross_entropy(hidden, weight, p, parallel=TokenParallel(dist.group.WORLD))
    torch.testing.assert_close(together, linear_cross_entropy(hidden, weight, p))
    with pytest.raises(ValueError, match="VocabParallel splits it"):
        linear_cross_entropy(hidden, weight, p, parallel=VocabParallel(dist.group.WORLD))


def test_wrong_calls() -> None:
    given = inputs({})
    hidden, weight, p = given.hidden, given.weight, given.target
    for error, match, target, options in (
        (ValueError, r"target must have shape \(3, 11, 203\), class probabilities", p[..., :-1].contiguous(), {}),
        (ValueError, r"target must have shape \(3, 11, 203\), class probabilities", p[:, :-1], {}),
        (ValueError, "a negative one, -1", p - 1.0, {}),
        (ValueError, "requires_grad=True", p.clone().requires_grad_(), {}),
        (ValueError, "ignore_index=0 is of token ids", p, {"ignore_index": 0}),
        (ValueError, "on meta", p.to("meta"), {}),
        (TypeError, "a target of linear_cross_entropy and CrossEntropyLoss alone", p[0], {}),
    ):
        with pytest.raises(error, match=match):
            linear_cross_entropy(hidden, weight, target, **options)
    with pytest.raises(ValueError, match="flatten both"):
        CrossEntropyLoss()(torch.randn(2, 5, 7), torch.rand(2, 5, 7))


def test_linear_loss_says_what_to_write() -> None:
    given = inputs({})
    hidden, weight, p = given.hidden.double().requires_grad_(), given.weight.double(), probabilities("cpu").double()[:1]
    p = p / p.sum(-1, keepdim=True)
    with pytest.raises(TypeError) as refused:
        linear_loss(hidden[:1], weight, p, losses.cross_entropy())
    for advice in ("target=None", 'losses.forward_kl("cross_entropy")', 'batch={"teacher_logits": p.log()}'):
        assert advice in str(refused.value)
    loss = losses.forward_kl("cross_entropy")
    out = linear_loss(hidden[:1], weight, target=None, loss=loss, batch={"teacher_logits": p.log()})
    expected = F.cross_entropy((hidden[0] @ weight.t()), p[0])
    torch.testing.assert_close(out.loss, expected)
    for mine, theirs in zip(*(torch.autograd.grad(one, hidden) for one in (out.loss, expected)), strict=True):
        torch.testing.assert_close(mine, theirs)
