"""TRL's two autograd functions by their arguments and results, computed by this library's functions."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...call.options import Execution
from ...functions.divergence import linear_divergence
from ...functions.logprobs import linear_logprobs

OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
Outputs = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class LogProbSeam:
    """In the place of TRL's ``ChunkedLogProbFunction``."""

    options: Execution  # of each call

    def apply(
        self,
        hidden: Tensor,  # [N, H]
        weight: Tensor,  # [V, H]
        bias: Tensor | None,  # [V]
        targets: Tensor,  # [N] int64, all of which count
        temperature: float,
        chunk_size: int,  # of TRL's tiles: the plan makes ours
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = OUTPUTS,
    ) -> Outputs:
        """Log-probabilities, entropy, log of the sum of squared probabilities, mean logits, and whether the target is
        the first of the largest: each [N], None where not among ``outputs``. The first two are differentiable."""
        unknown = sorted(set(outputs) - set(OUTPUTS))
        if unknown:
            raise ValueError(f"outputs must be among {', '.join(map(repr, OUTPUTS))}, got {unknown[0]!r}")

        def run(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Outputs:
            weight, bias = operands(hidden, weight, bias)
            found = linear_logprobs(
                hidden, weight, targets, bias=bias,
                entropy="entropy" in outputs, log_sum_sq_probs="log_sum_sq_probs" in outputs,
                mean_logit="mean_logits" in outputs, argmax="is_top1" in outputs, temperature=temperature,
                softcap=final_logit_softcapping, logit_scale=logit_scale, **self.options,
            )  # fmt: skip
            if isinstance(found, Tensor):
                return found, None, None, None, None
            squares, mean = (getattr(found, name, None) for name in ("log_sum_sq_probs", "mean_logit"))
            return (
                found.logprobs, getattr(found, "entropy", None), None if squares is None else squares.detach(),
                None if mean is None else mean.detach(), found.argmax == targets if "is_top1" in outputs else None,
            )  # fmt: skip

        return where_gathered(run, hidden, weight, bias)


@dataclass(frozen=True)
class DivergenceSeam:
    """In the place of TRL's ``ChunkedDivergenceFunction``."""

    options: Execution  # of each call

    def apply(
        self,
        student_hidden: Tensor,  # [N, H_s]
        student_weight: Tensor,  # [V, H_s]
        student_bias: Tensor | None,
        teacher_hidden: Tensor,  # [N, H_t]
        teacher_weight: Tensor,  # [V, H_t]
        teacher_bias: Tensor | None,
        beta: float,
        temperature: float = 1.0,
        student_logit_scale: float = 1.0,
        student_final_logit_softcapping: float | None = None,
        teacher_logit_scale: float = 1.0,
        teacher_final_logit_softcapping: float | None = None,
    ) -> Outputs:
        """The divergence, differentiable, and the student's entropy, without gradient, each [N]: forward KL for a
        ``beta`` of 0, reverse for 1, else the JSD."""

        def run(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Outputs:
            weight, bias = operands(hidden, weight, bias)
            rows = teacher_hidden.detach()
            if torch.is_autocast_enabled(rows.device.type):
                rows = rows.to(torch.get_autocast_dtype(rows.device.type))
            with gathered(teacher_weight, teacher_bias):
                vocabulary, offsets = (None if t is None else t.detach().to(rows.dtype) for t in teacher)
                found = linear_divergence(
                    hidden, weight, bias=bias, divergence="jsd", beta=beta, entropy=True, teacher_hidden=rows,
                    teacher_weight=vocabulary, teacher_bias=offsets, teacher_logit_scale=teacher_logit_scale,
                    teacher_softcap=teacher_final_logit_softcapping, temperature=temperature,
                    softcap=student_final_logit_softcapping, logit_scale=student_logit_scale, **self.options,
                )  # fmt: skip
                assert isinstance(found, tuple)
            return found.divergence, found.entropy.detach()

        teacher = (teacher_weight, teacher_bias)
        with gathered(student_weight, student_bias):
            return where_gathered(run, student_hidden, student_weight, student_bias)


def operands(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Weight and bias in the dtype of the matmul, as TRL casts them: autocast's, or that of the hidden states."""
    if torch.is_autocast_enabled(hidden.device.type):
        return weight, bias
    return weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)


def gathered(*parameters: Tensor | None) -> Any:
    """With parameters whole that DeepSpeed's ZeRO-3 has left elsewhere."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return contextlib.nullcontext()
    from trl.trainer.utils import maybe_gather_lm_head_ctx

    return maybe_gather_lm_head_ctx(*parameters)


def where_gathered(
    run: Callable[[Tensor, Tensor, Tensor | None], Outputs], hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> Outputs:
    """``run(hidden, weight, bias)``, whose backward finds a weight whole that ZeRO-3 takes apart in between."""
    if not hasattr(weight, "ds_id") or not torch.is_grad_enabled():
        return run(hidden, weight, bias)
    return Regathered.apply(hidden, weight, bias, run)


class Regathered(torch.autograd.Function):
    """A graph within the graph: its backward runs with the parameters gathered."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, run: Callable[..., Outputs]) -> Outputs:
        with torch.enable_grad():
            rows = hidden.detach().requires_grad_(hidden.requires_grad)
            made = run(rows, weight, bias)
        ctx.set_materialize_grads(False)
        ctx.operands, ctx.made = (rows, weight, bias), made
        outputs = tuple(None if value is None else value.detach() for value in made)
        fixed = [out for out, value in zip(outputs, made, strict=True) if value is not None and not value.requires_grad]
        ctx.mark_non_differentiable(*fixed)
        return outputs

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        _, weight, bias = ctx.operands
        wanted = [operand for operand in ctx.operands if operand is not None and operand.requires_grad]
        given = [(made, grad) for made, grad in zip(ctx.made, upstream, strict=True) if grad is not None]
        made, grads_of_made = zip(*given, strict=True)
        with gathered(weight, bias):
            found = iter(torch.autograd.grad(made, wanted, grads_of_made, allow_unused=True))
        grads = [next(found) if needed else None for needed in ctx.needs_input_grad[:3]]
        return *grads, None
