"""Bad input: a clear error that names the argument, before any work."""

from typing import Any
from unittest import mock

import pytest
import torch
from cases import PLACES, Place

import chunked_head.autograd
from chunked_head import ChunkedHead, linear_cross_entropy, plan


def call(**changes: Any) -> torch.Tensor:
    arguments: dict[str, Any] = {
        "hidden": torch.randn(4, 6, 8, requires_grad=True),
        "weight": torch.randn(11, 8, requires_grad=True),
        "target": torch.randint(0, 11, (4, 6)),
    }
    return linear_cross_entropy(**(arguments | changes))


HALF = torch.float16
WRONG: list[tuple[str, type[Exception], str, dict[str, Any]]] = [
    ("hidden-list", TypeError, "hidden must be a torch.Tensor, got list", {"hidden": [1.0]}),
    ("hidden-0d", ValueError, r"hidden must have shape \[..., hidden\], got \(\)", {"hidden": torch.tensor(1.0)}),
    ("hidden-int", TypeError, "hidden must be one of float32.*int64", {"hidden": torch.ones(4, 6, 8, dtype=torch.int64)}),
    ("weight-3d", ValueError, r"weight must have shape \[vocab, hidden\]", {"weight": torch.randn(1, 11, 8)}),
    ("weight-columns", ValueError, r"weight must be .* the 8 columns of hidden .* got \(11, 9\)", {"weight": torch.randn(11, 9)}),
    ("weight-empty", ValueError, "gather it first", {"weight": torch.randn(0, 8)}),
    ("weight-dtype", TypeError, "weight must have the dtype of hidden, float32, got float16", {"weight": torch.randn(11, 8, dtype=HALF)}),
    ("target-shape", ValueError, r"target must have shape \(4, 6\), the leading shape", {"target": torch.randint(0, 11, (24,))}),
    ("target-float", TypeError, "class probabilities are not supported", {"target": torch.rand(4, 6)}),
    ("target-int32", TypeError, "use target.long", {"target": torch.zeros(4, 6, dtype=torch.int32)}),
    ("bias-shape", ValueError, r"bias must have shape \(11,\)", {"bias": torch.randn(8)}),
    ("bias-dtype", TypeError, "bias must have the dtype of hidden", {"bias": torch.randn(11, dtype=HALF)}),
    ("class-weights-shape", ValueError, r"class_weights must have shape \(11,\)", {"class_weights": torch.rand(4)}),
    ("class-weights-grad", ValueError, "takes no gradient", {"class_weights": torch.rand(11, requires_grad=True)}),
    ("token-weights-shape", ValueError, r"token_weights must have shape \(4, 6\)", {"token_weights": torch.rand(4, 1)}),
    ("token-weights-grad", ValueError, "token_weights .* takes no gradient", {"token_weights": torch.rand(4, 6, requires_grad=True)}),
    ("token-weights-int", ValueError, "token_weights must be floating-point", {"token_weights": torch.ones(4, 6, dtype=torch.int64)}),
    ("ignore-index", TypeError, "ignore_index must be an int, got 1.5", {"ignore_index": 1.5}),
    ("reduction", ValueError, "reduction must be one of 'mean', 'sum', 'none', got 'avg'", {"reduction": "avg"}),
    ("normalizer-sum", ValueError, 'normalizer goes with reduction="mean"', {"normalizer": 3.0, "reduction": "sum"}),
    ("normalizer-none", ValueError, 'normalizer goes with reduction="mean"', {"normalizer": 3.0, "reduction": "none"}),
    ("normalizer-negative", ValueError, "normalizer must be finite and in", {"normalizer": -3.0}),
    ("normalizer-1d", ValueError, "normalizer must be a number or a 0-d tensor", {"normalizer": torch.ones(1)}),
    ("normalizer-text", TypeError, "normalizer must be a number", {"normalizer": "mean"}),
    ("smoothing-negative", ValueError, "label_smoothing must be finite and in", {"label_smoothing": -0.1}),
    ("smoothing-large", ValueError, r"label_smoothing must be finite and in \[0, 1\], got 1.5", {"label_smoothing": 1.5}),
    ("z-loss-negative", ValueError, "z_loss must be finite and in", {"z_loss": -1e-4}),
    ("z-loss-nan", ValueError, "z_loss must be finite", {"z_loss": float("nan")}),
    ("softcap-negative", ValueError, "softcap must be finite and in", {"softcap": -30.0}),
    ("softcap-zero", ValueError, "softcap must be positive or None", {"softcap": 0.0}),
    ("scale-inf", ValueError, "logit_scale must be finite", {"logit_scale": float("inf")}),
    ("scale-text", TypeError, "logit_scale must be a number", {"logit_scale": "2"}),
    ("shift-negative", ValueError, "shift must be at least 0", {"shift": -1}),
    ("shift-bool", TypeError, "shift must be an int", {"shift": True}),
    ("shift-0d", ValueError, "needs a target with a dimension", {"shift": 1, "hidden": torch.randn(8), "target": torch.tensor(1)}),
    ("budget-row", ValueError, "too small: one row of logits and what goes with it needs", {"memory_budget": 10}),
    ("budget-text", ValueError, "memory_budget must be bytes or a size such as", {"memory_budget": "lots"}),
    ("budget-negative", ValueError, "memory_budget must be positive", {"memory_budget": -5}),
    ("budget-float", TypeError, "memory_budget must be an int", {"memory_budget": 0.5}),
    ("chunk-zero", ValueError, "chunk_tokens must be a positive int, got 0", {"chunk_tokens": 0}),
    ("chunk-against-budget", ValueError, "lower chunk_tokens", {"chunk_tokens": 24, "memory_budget": 1000}),
    ("accumulate", ValueError, "accumulate_dtype must be None or float32", {"accumulate_dtype": HALF}),
    ("upstream-none", ValueError, 'upstream goes with reduction="mean" or "sum"', {"upstream": 2.0, "reduction": "none"}),
    ("upstream-zero", ValueError, "upstream must not be 0", {"upstream": 0}),
    ("backend", ValueError, "backend must be None or one of 'triton', 'torch', got 'cuda'", {"backend": "cuda"}),
    ("target-range", IndexError, r"target must be in \[0, 11\) .* got 11 for row 0", {"target": torch.full((4, 6), 11)}),
    ("target-negative", IndexError, "got -1 for row 0", {"target": torch.full((4, 6), -1)}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "changes"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_wrong_argument(error: type[Exception], message: str, changes: dict[str, Any]) -> None:
    untouched = mock.patch.object(chunked_head.autograd, "sweep", side_effect=AssertionError("work was begun"))
    with untouched, pytest.raises(error, match=message):
        call(**changes)


def test_right_arguments() -> None:
    assert call().dim() == 0


@pytest.mark.parametrize("place", PLACES)
def test_device_mismatch(place: Place) -> None:
    meta = torch.randn(11, 8, device="meta")
    with pytest.raises(ValueError, match="weight is on meta, hidden on cpu; move one of them"):
        call(weight=meta)


def test_triton_takes_no_float64() -> None:
    with pytest.raises(ValueError, match=r"(float64|CUDA device).*use backend='torch'"):
        call(hidden=torch.randn(4, 6, 8).double(), weight=torch.randn(11, 8).double(), backend="triton")


def test_accumulating_in_16_bits_has_limits() -> None:
    hidden, weight = torch.randn(100, 8).bfloat16().requires_grad_(), torch.randn(11, 8).bfloat16().requires_grad_()
    target = torch.randint(0, 11, (100,))
    with pytest.raises(ValueError, match="accurate over at most 8 chunks"):
        linear_cross_entropy(hidden, weight, target, chunk_tokens=10, accumulate_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="float16 cannot hold sums of unscaled gradients"):
        linear_cross_entropy(
            hidden.detach().half().requires_grad_(),
            weight.detach().half().requires_grad_(),
            target,
            accumulate_dtype=HALF,
        )


def test_plan_arguments() -> None:
    for changes, message in (
        ({"tokens": -1}, "tokens must be an int of at least 0"),
        ({"vocab": 0}, "vocab must be an int of at least 1"),
        ({"dtype": torch.int8}, "dtype must be one of"),
        ({"reduction": "all"}, "reduction must be one of"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            plan(**({"tokens": 10, "hidden": 8, "vocab": 11, "dtype": torch.float32, "device": "cpu"} | changes))


def test_module_arguments() -> None:
    with pytest.raises(TypeError, match="unknown option 'smoothing'; options are "):
        ChunkedHead(8, 11, smoothing=0.1)
    with pytest.raises(TypeError, match=r"from_linear takes an nn.Linear, got Embedding"):
        ChunkedHead.from_linear(torch.nn.Embedding(11, 8))  # type: ignore[arg-type]
