"""The list of losses on logits that exist already: their inputs and the oracle's numbers."""

from typing import Any

import torch
import torch.nn.functional as F
from budget import assert_within_budget
from loss_cases import TOKENS, LossCase, LossInputs, run_reference
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def made_logits(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 5) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2.0).to(device, dtype)


def made_target(vocab: int, *leading: int, ignore_index: int = -100, device: str = "cpu") -> Tensor:
    made = torch.Generator().manual_seed(6)
    target = torch.randint(0, vocab, leading, generator=made)
    return target.masked_fill(torch.rand(leading, generator=made) < 0.2, ignore_index).to(device)


def on_logits(case: LossCase, inputs: LossInputs, dtype: torch.dtype) -> tuple[Tensor, dict[str, Any], dict[str, Any]]:
    """Logits, fields and options of a case of the linear head; a teacher gives its logits."""
    head, batch = dict(inputs.head), dict(inputs.batch)
    bias = head.pop("bias", None)
    # the head's products before scale and cap, rounded as a model's are
    operands = [one if one is None else one.to(wide(one.dtype)) for one in (inputs.hidden, inputs.weight, bias)]
    logits = F.linear(*operands).to(dtype)
    if "teacher_hidden" in batch:
        names = ("teacher_hidden", "teacher_weight", "teacher_bias")
        given = [batch.pop(name, None) for name in names]
        made = F.linear(*[one if one is None else one.to(wide(one.dtype)) for one in given])
        # some CPU's product of 16 bits spreads a nan over other rows
        batch["teacher_logits"] = made.to(given[0].dtype)
    if dtype == torch.float64:  # the oracle caps a teacher in its own dtype
        batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    if case.name == "orpo":  # whose oracle has the odds of segments of which no token counts, 1 / 0
        empty = torch.tensor([5, 7], device=logits.device)
        batch["pairs"] = batch["pairs"][~torch.isin(batch["pairs"], empty).any(1)]
    return logits, batch, head


def assert_gradient(ours: Tensor, eager: Tensor, truth: Tensor, dtype: torch.dtype) -> None:
    """Checks a gradient against the budget plus the fp32 rounding of a row's terms, which are of order 1 / tokens."""
    assert ours.shape == truth.shape and ours.dtype == dtype and torch.isfinite(truth).all() and truth.any()
    error = ours.double().cpu() - truth
    slack = 4 * torch.finfo(torch.float32).eps / TOKENS
    error = error.sign() * (error.abs() - slack).clamp(min=0)
    assert_within_budget(truth + error, eager, truth, dtype, "gradient")


def by_oracle(case: LossCase, logits: Tensor, batch: dict[str, Any], head: dict[str, Any], inputs: LossInputs) -> Any:
    """The results of the linear head's oracle, with logits as hidden states and the identity as weight."""
    identity = torch.eye(logits.shape[-1], dtype=logits.dtype, device=logits.device)
    given = LossInputs(logits, identity, inputs.target, batch, head, inputs.num_segments)
    loss, parts, grads = run_reference(case, given)
    return loss, parts, grads[0]
