"""What `skip_tolerance` takes and where it is refused, what the plan says of it, and orders of the vocabulary."""

from typing import Any

import pytest
import torch
from cases import Place
from test_skip_tolerance import CE, PLACES, Operands, operands

from chunked_head import (
    TokenParallel,
    VocabParallel,
    frequency_order,
    linear_cross_entropy,
    linear_loss,
    metrics,
    plan,
    similarity_order,
)


def test_plan() -> None:
    sizes = {"tokens": 8192, "hidden": 1024, "vocab": 65536, "dtype": torch.bfloat16, "device": "cuda"}
    usual, skipping = (plan(**sizes, backend="triton", skip_tolerance=t) for t in (None, 4e-3))  # type: ignore[arg-type]
    assert "tiles skipped" in str(skipping) and "tiles skipped" not in str(usual)
    assert "dweight ours" in str(skipping)
    terms = {term.name: term.loop for term in skipping.terms}
    assert terms["tiles to skip"] > 0
    assert {term.name: term.loop for term in usual.terms}["tiles to skip"] == 0


WRONG = [
    (0.0, "between 0 and 1, such as 4e-3"),
    (1.0, "between 0 and 1"),
    (True, "got True"),
    ("a little", "got 'a little'"),
    (float("nan"), "got nan"),
]


@pytest.mark.parametrize(("tolerance", "message"), WRONG)
def test_wrong_tolerance(tolerance: Any, message: str) -> None:
    hidden, weight, target = torch.randn(4, 8), torch.randn(6, 8), torch.zeros(4, dtype=torch.int64)
    for call in (linear_cross_entropy, lambda *a, **k: linear_loss(*a, CE, **k)):
        with pytest.raises(ValueError, match=message):
            call(hidden, weight, target, skip_tolerance=tolerance)
    with pytest.raises(ValueError, match=message):
        plan(4, 8, 6, torch.bfloat16, skip_tolerance=tolerance)


def test_not_with_deterministic() -> None:
    hidden, weight, target = torch.randn(4, 8), torch.randn(6, 8), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="does not go with deterministic=True"):
        linear_cross_entropy(hidden, weight, target, skip_tolerance=0.1, deterministic=True)
    with pytest.raises(ValueError, match="does not go with deterministic=True"):
        plan(4, 8, 6, torch.bfloat16, skip_tolerance=0.1, deterministic=True)


@pytest.mark.parametrize("kind", [TokenParallel, VocabParallel])
def test_not_with_parallel(kind: type) -> None:
    hidden, weight, target = torch.randn(4, 8), torch.randn(6, 8), torch.zeros(4, dtype=torch.int64)
    parallel = object.__new__(kind)  # a whole one needs ranks
    for call in (linear_cross_entropy, lambda *a, **k: linear_loss(*a, CE, **k)):
        with pytest.raises(ValueError, match="does not go with parallel="):
            call(hidden, weight, target, skip_tolerance=0.1, parallel=parallel)


@pytest.mark.compiled
@pytest.mark.parametrize("place", PLACES)
def test_in_a_graph(place: Place) -> None:
    """The operator gives the same gradients, and says what was skipped."""
    given = operands(place)

    def call(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
        options: dict[str, Any] = {"skip_tolerance": 0.1, "backend": place.backend}
        out = linear_loss(hidden, weight, target, CE, metrics=[metrics.accuracy()], **options)
        told = [out.metrics[name].value for name in ("accuracy", "dropped_mass", "kept_tiles")]
        return out.loss, *told

    found = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        hidden, weight = (t.detach().clone().requires_grad_() for t in (given.hidden, given.weight))
        values = function(hidden, weight, given.target)
        values[0].backward()
        found.append((*values, hidden.grad, weight.grad))
    for outside, inside in zip(*found, strict=True):
        torch.testing.assert_close(inside, outside)
    assert 0.0 < found[0][3] < 1.0


@pytest.mark.parametrize("place", PLACES)
def test_other_roads(place: Place) -> None:
    """An error that says why, and no option that is quietly ignored."""
    given = operands(place)
    half = Operands(given.hidden.half().detach().requires_grad_(), given.weight.half().detach(), given.target)
    common: dict[str, Any] = {"skip_tolerance": 0.1, "backend": place.backend}
    with pytest.raises(ValueError, match=r"16-bit relative logits: .* takes bfloat16 operands \(here float16\)"):
        linear_cross_entropy(*half, **common)
    with pytest.raises(ValueError, match="losses of log-probabilities without softcap"):
        linear_cross_entropy(*given, softcap=30.0, **common)
    with pytest.raises(ValueError, match="this call keeps 16-bit relative logits"):
        linear_cross_entropy(*given, label_smoothing=0.1, **common)
    with pytest.raises(ValueError, match=r"again in backward \(the upstream gradient comes late\)"):
        linear_cross_entropy(*given, reduction="none", **common)
    with pytest.raises(ValueError, match="this call keeps whole logits"):
        linear_cross_entropy(*(t.detach().cpu() for t in given[:1]), *(t.cpu() for t in given[1:]), skip_tolerance=0.1,
                             backend="torch")  # fmt: skip
    buffer = torch.zeros(given.weight.numel() + 1, device=place.device)[1:].view(given.weight.shape)
    with pytest.raises(ValueError, match="starts 4 bytes behind such a place; pass a buffer that begins on 16 bytes"):
        linear_cross_entropy(*given, accumulate_into=buffer, **common)
    with pytest.raises(ValueError, match="a metric is called 'kept_tiles'"):
        linear_loss(*given, CE, metrics=[metrics.entropy(name="kept_tiles")], **common)


def test_similarity_order() -> None:
    """Rows of a kind come to lie in the same strips, and each row once, whatever the number of rows."""
    kinds = torch.randperm(5 * 128, generator=torch.Generator().manual_seed(2)) % 5
    means = torch.randn(5, 16, generator=torch.Generator().manual_seed(3)) * 10.0
    order = similarity_order(means[kinds] + 0.01 * torch.arange(640)[:, None].sin())
    assert order.sort().values.tolist() == list(range(640))
    assert all(len(strip.unique()) == 1 for strip in kinds[order].split(128))
    assert similarity_order(torch.randn(301, 8)).sort().values.tolist() == list(range(301))
    assert similarity_order(torch.ones(300, 8)).sort().values.tolist() == list(range(300))
    for weight in (torch.randn(4), torch.zeros(4, 4, dtype=torch.int64), torch.full((4, 4), torch.nan)):
        with pytest.raises(ValueError, match="weight must be"):
            similarity_order(weight)


def test_frequency_order() -> None:
    assert frequency_order(torch.tensor([3, 9, 3, 0, 10])).tolist() == [4, 1, 0, 2, 3]
    for counts, message in (
        (torch.zeros(2, 2), "shape \\(2, 2\\)"), (torch.tensor([1.0, -1.0]), "not negative"),
        (torch.tensor([1.0, torch.nan]), "finite"), (torch.zeros(0), "each token id"),
        (torch.tensor([True]), "torch.bool"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            frequency_order(counts)
