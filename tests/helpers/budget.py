"""The error budget: a result may differ from float64 by twice plain PyTorch's error in the same dtype, plus 4 ulp."""

import torch
from torch import Tensor

FACTOR = 2.0
ULPS = 4.0


def assert_within_budget(ours: Tensor, eager: Tensor, truth: Tensor, dtype: torch.dtype, what: str) -> None:
    """Checks the norm and the largest element of the error against the budget. An error shows the worst element."""
    assert ours.shape == truth.shape, f"{what}: shape {tuple(ours.shape)}, should be {tuple(truth.shape)}"
    ours, eager, truth = (t.detach().double().cpu() for t in (ours, eager, truth))
    error, allowed = (ours - truth).abs(), (eager - truth).abs()
    ulp = torch.finfo(dtype).eps
    assert torch.isfinite(truth).all() and torch.isfinite(eager).all(), f"{what}: the oracle is not finite"
    assert torch.isfinite(ours).all(), f"{what}: {int((~torch.isfinite(ours)).sum())} elements are not finite"
    if not truth.numel():
        return
    for kind, measure in (("norm", lambda t: t.norm()), ("largest", lambda t: t.max())):
        budget = FACTOR * measure(allowed) + ULPS * ulp * measure(truth.abs())
        if measure(error) > budget:
            worst = int(error.argmax())
            raise AssertionError(
                f"{what}: {kind} error {measure(error):.3e} is over the budget {budget:.3e} (eager's is "
                f"{measure(allowed):.3e}); worst element {worst}: {ours.flatten()[worst]:.6e}, should be "
                f"{truth.flatten()[worst]:.6e}, eager {eager.flatten()[worst]:.6e}"
            )


def assert_outcome(ours, eager, truth, dtype: torch.dtype) -> None:
    """Checks the loss against the budget of fp32 (of float64 for float64), and gradients against that of ``dtype``."""
    loss_dtype = torch.promote_types(dtype, torch.float32)
    assert ours.loss.dtype == loss_dtype
    assert_within_budget(ours.loss, eager.loss, truth.loss, loss_dtype, "loss")
    for name in ("hidden", "weight", "bias"):
        if getattr(truth, name) is not None:
            mine = getattr(ours, name)
            assert mine.dtype == dtype
            assert_within_budget(mine, getattr(eager, name), getattr(truth, name), dtype, f"gradient of {name}")
