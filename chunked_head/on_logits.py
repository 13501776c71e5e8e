"""The same losses on logits that exist already."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from . import checks, losses
from .asked import Asked, ask, check
from .autograd import OnlyOnce, as_called
from .backends import Backend
from .call import scalar_objective, token_objective
from .head_options import LogitsOptions
from .linear_loss import LossOutput, check_loss, loss_output
from .losses.base import Losses
from .metrics import Metric
from .objective import Objective
from .stats import Head, Rows, RowStats

MOST_VIEWS = 64  # of rows that no one stride reaches; with more of them a copy is cheaper than so many launches


@torch.compiler.disable  # a graph break, as linear_loss
def logits_loss(
    logits: Tensor,  # [..., vocab]
    target: Tensor | None,  # [...] int64
    loss: Losses,
    *,
    batch: Mapping[str, Tensor] | None = None,
    num_segments: int | None = None,
    metrics: Sequence[Metric] = (),
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    shift: int = 0,
    inplace: bool = False,
    backend: str | None = None,
) -> LossOutput:
    """``linear_loss`` on logits that exist already: any sum of losses, with metrics, from one pass over the logits, and
    their gradient from one more in ``backward``. Same values and gradients as there, with

        x = softcap * tanh(logit_scale * logits.float() / softcap) / temperature

    and no other tensor of the logits' size than the gradient. Neither is there with ``inplace``:

        logits = model(tokens).logits
        out = logits_loss(logits, tokens, losses.cross_entropy() + 1e-4 * losses.z_loss(), shift=1, inplace=True)
        out.loss.backward()

    Args:
        logits: [..., vocab], any leading dimensions; float32, bfloat16, float16, on the torch backend float64. Rows may
            lie anywhere, as in ``logits[:, :-1]``; where their elements are not contiguous, or more than 64 strides
            would be needed to reach all rows, a copy is made.
        target, loss, batch, num_segments, metrics, reduction, normalizer, ignore_index, shift: as in ``linear_loss``;
            of dense teachers ``teacher_logits``. What stands in the logits of tokens that do not count changes nothing.
        softcap, logit_scale, temperature: as above.
        inplace: writes the gradient over the logits. ``backward`` then leaves gradients in ``logits``, runs once, and
            makes autograd raise in whatever else saved the logits for its own backward. Logits must be computed from
            something: a leaf, whose ``.grad`` would be the leaf itself, is refused.
        backend: ``"triton"`` or ``"torch"``; None: the device's own.

    The upstream gradient is known when gradients are made, and comes in before they are rounded: 16-bit gradients lose
    nothing to ``normalizer`` or to a loss scale.

    Returns:
        ``LossOutput``: ``.loss`` 0-d, fp32 (fp64 for fp64), and as in ``linear_loss``; ``.plan`` is None.

    Double backward and ``torch.func`` transforms raise.

    Raises:
        TypeError, ValueError: before any work, naming the argument; a missing field names the loss that needs it.
        IndexError: on the CPU, for a target, segment or teacher id out of range; elsewhere loss, metrics and the
            gradient of every token that counts become nan.
    """
    options = LogitsOptions(logits, target, ignore_index, softcap, logit_scale, temperature, shift, backend)
    dtype = options.check()
    measured = check_loss(options, loss, metrics, reduction, normalizer, None)
    check_inplace(logits, inplace)
    if batch is not None and "teacher_hidden" in batch:
        raise ValueError(
            "logits_loss takes a dense teacher as batch['teacher_logits'], got teacher_hidden: pass "
            "F.linear(teacher_hidden, teacher_weight, teacher_bias), or the student's hidden states to linear_loss, "
            "which holds the logits of neither"
        )
    asked = ask(check(options, dtype, loss, measured, batch, num_segments))
    objective = scalar_objective(asked, reduction, normalizer, None)
    (value,), stats = apply(asked, objective, inplace)
    return loss_output(asked, objective, value, stats, measured, None)


class CrossEntropyLoss(nn.Module):
    """``torch.nn.CrossEntropyLoss`` of class ids, in two passes over the logits and no copy of them.

    ``forward(input, target)``: ``input`` [..., C] with ``target`` [...] int64, any leading dimensions or none, and
    PyTorch's [N, C, d1, ...] with [N, d1, ...]; the latter is copied, its classes last, unless they are contiguous.
    Where a shape could be read either way (all dimensions but the first are equal) it is refused.

    Args:
        weight: [C], a buffer; ignore_index, reduction, label_smoothing: as PyTorch's. ``size_average`` and ``reduce``,
            deprecated there, are refused.
        z_loss: coefficient of ``lse ** 2``, with the denominator of the cross-entropy.
        softcap, logit_scale, inplace, backend: as in ``logits_loss``.

    Differences from PyTorch: the loss is fp32 for 16-bit input; no tokens, or none that count, give loss 0 with zero
    gradients rather than nan; whatever stands in a row that does not count (nan too) changes nothing; a target out of
    range raises an IndexError on the CPU and makes the loss nan elsewhere; class probabilities as targets are refused.
    """

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,  # [C]
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        inplace: bool = False,
        backend: str | None = None,
    ):
        super().__init__()
        for argument, value in (("size_average", size_average), ("reduce", reduce)):
            if value is not None:
                raise ValueError(f"{argument} is deprecated in PyTorch and refused here, got {value!r}; use reduction=")
        checks.check_reduction(reduction)
        checks.check_number("label_smoothing", label_smoothing, 0.0, 1.0)
        checks.check_number("z_loss", z_loss, 0.0, math.inf)
        checks.check_tensor("weight", weight, optional=True)
        self.register_buffer("weight", weight)
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, float(label_smoothing)
        self.z_loss, self.softcap, self.logit_scale = float(z_loss), softcap, logit_scale
        self.inplace, self.backend = inplace, backend

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        logits = classes_last(input, target)
        options = LogitsOptions(
            logits, target, self.ignore_index, self.softcap, self.logit_scale, 1.0, 0, self.backend
        )  # fmt: skip
        return cross_entropy(options, self.weight, self.reduction, self.label_smoothing, self.z_loss, self.inplace)

    def extra_repr(self) -> str:
        return (
            f"weight={None if self.weight is None else tuple(self.weight.shape)}, ignore_index={self.ignore_index}, "
            f"reduction={self.reduction!r}, label_smoothing={self.label_smoothing}, z_loss={self.z_loss}, "
            f"softcap={self.softcap}, logit_scale={self.logit_scale}, inplace={self.inplace}, backend={self.backend!r}"
        )


@torch.compiler.disable
def cross_entropy(
    options: LogitsOptions,
    class_weights: Tensor | None,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    inplace: bool,
) -> Tensor:
    dtype = options.check()
    check_inplace(options.logits, inplace)
    checks.check_class_weights(class_weights, options.vocab, options.device, "weight")
    loss = losses.cross_entropy(label_smoothing=label_smoothing, class_weights=class_weights)
    if z_loss:
        loss = loss + z_loss * losses.z_loss()
    asked = ask(check(options, dtype, loss))
    if reduction == "none":
        return apply(asked, token_objective(asked), inplace)[0][0].reshape(options.leading)
    return apply(asked, scalar_objective(asked, reduction, None, None, share_denominator=True), inplace)[0][0]


def classes_last(logits: Tensor, target: Tensor) -> Tensor:
    """[..., C], from PyTorch's [N, C, d1, ...] too."""
    checks.check_tensor("input", logits, optional=False)
    checks.check_tensor("target", target, optional=False)
    checks.check_ids("target", target)
    shape, leading = tuple(logits.shape), tuple(target.shape)
    if len(shape) < 3 or leading != shape[:1] + shape[2:]:
        return logits
    if leading == shape[:-1]:
        raise ValueError(
            f"input {shape} with target {leading} may have its classes last or, as in PyTorch, second; flatten both: "
            "input.flatten(0, -2) or input.movedim(1, -1).flatten(0, -2), with target.flatten()"
        )
    return logits.movedim(1, -1)


def check_inplace(logits: Tensor, inplace: bool) -> None:
    if not (inplace and logits.requires_grad):
        return
    base = logits if logits._base is None else logits._base
    if logits.is_leaf or (base.is_leaf and base.requires_grad):
        raise ValueError(
            "inplace=True overwrites logits with their gradient, and these are a leaf (or a view of one), which keeps "
            "its value; pass logits that were computed, or inplace=False"
        )
    if any(stride == 0 and size > 1 for stride, size in zip(logits.stride(), logits.shape, strict=True)):
        raise ValueError("inplace=True needs logits with memory of their own, these are expanded; use inplace=False")


@dataclass(frozen=True, eq=False)
class Call:
    """Everything of a call that takes no gradient."""

    backend: Backend
    objective: Objective
    logit_scale: float
    softcap: float | None
    inplace: bool

    def head(self, logits: Tensor) -> Head:
        """There is none; what makes logits of its products."""
        nothing = logits.new_empty(0)
        return Head(nothing, None, self.objective.class_weights, self.logit_scale, self.softcap)

    def rows(self, logits: Tensor) -> list[tuple[slice, Rows]]:
        objective, found, start = self.objective, [], 0
        for view in row_views(logits):
            at = slice(start, start + len(view))
            columns = None if objective.columns is None else objective.columns[at]
            teacher = None if objective.teacher is None else objective.teacher.rows(at)
            found.append((at, Rows(view, objective.target[at], columns, teacher)))
            start = at.stop
        return found


def apply(asked: Asked, objective: Objective, inplace: bool) -> tuple[tuple[Tensor, ...], RowStats]:
    assert isinstance(asked.head, LogitsOptions)
    logits = asked.head.logits
    if (logits.stride(-1) != 1 and logits.shape[-1] > 1) or count_views(logits) > MOST_VIEWS:
        logits = logits.contiguous()
    call = Call(asked.backend, objective, asked.logit_scale, asked.softcap, inplace)
    found: list[RowStats] = []
    return LogitsLoss.apply(logits, call, found), found[0]


def row_views(logits: Tensor) -> list[Tensor]:
    """[rows, vocab] views that together are [..., vocab], in order."""
    if mergeable(logits):
        return [logits.view(-1, logits.shape[-1])]
    return [view for part in logits for view in row_views(part)]


def count_views(logits: Tensor) -> int:
    return 1 if mergeable(logits) or not len(logits) else len(logits) * count_views(logits[0])


def mergeable(logits: Tensor) -> bool:
    """Whether one stride reaches all rows."""
    leading = [(size, stride) for size, stride in zip(logits.shape, logits.stride(), strict=True) if size != 1]
    leading = leading if logits.shape[-1] == 1 else leading[:-1]
    return logits.numel() == 0 or all(
        outer == size * inner for (_, outer), (size, inner) in itertools.pairwise(leading)
    )


class LogitsLoss(torch.autograd.Function):
    """Of logits [..., vocab] and a call: what its objective returns. ``found`` receives the statistics."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, call: Call, found: list[RowStats]) -> tuple[Tensor, ...]:
        objective = call.objective
        stats = RowStats.empty(len(objective.target), objective.demand, objective.dtype, logits.device)
        with as_called(logits.device):
            for at, rows in call.rows(logits):
                if len(rows.target):
                    call.backend.logits_stats(rows, call.head(logits), objective.demand, stats.at(at))
            outputs = objective.outputs(stats)
        found.append(stats)
        named = stats.named()
        ctx.save_for_backward(logits, *named.values(), *objective.teacher_tensors)
        ctx.call = replace(call, objective=objective.without_teacher())
        ctx.names, ctx.overwritten = tuple(named), False
        ctx.mark_non_differentiable(*outputs[objective.differentiable :])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(given is None for given in upstream):
            return None, None, None
        if ctx.overwritten:
            raise RuntimeError(
                "a second backward through a loss with inplace=True: the first has written the gradient over the "
                "logits; use inplace=False to retain the graph"
            )
        logits, *vectors = ctx.saved_tensors
        stats = RowStats(**dict(zip(ctx.names, vectors, strict=False)))
        objective = ctx.call.objective.with_teacher(vectors[len(ctx.names) :])
        call: Call = replace(ctx.call, objective=objective)
        with torch.no_grad(), as_called(logits.device):
            # where an id is out of range the whole gradient is nan
            known = tuple(None if given is None else given * objective.one_or_nan for given in upstream)
            coefficients, _ = objective.late(stats, known)
            ctx.overwritten = call.inplace
            grad = logits.detach() if call.inplace else logits.new_empty(logits.shape)
            flat = None if call.inplace else grad.view(-1, grad.shape[-1])
            for at, rows in call.rows(logits):
                if len(rows.target):
                    out = rows.hidden if flat is None else flat[at]
                    call.backend.logits_grad(
                        out, rows, call.head(logits), objective.demand, stats.at(at), coefficients.at(at)
                    )  # fmt: skip
            if call.inplace:
                # kernels write unseen: whoever saved the logits too must not take these for them
                torch.autograd.graph.increment_version(logits)
        if torch.is_grad_enabled():  # create_graph: a constant here would silently drop a gradient penalty
            grad = OnlyOnce.apply(grad, logits)
        return grad, None, None
