"""The head in Triton kernels: NVIDIA GPUs, and any machine under Triton's interpreter (``TRITON_INTERPRET=1``).

Three stores of the reused buffer, all with statistics from fp32 accumulators:

- ``fast``: our own matmul leaves bf16 exponentials relative to the target's logit; the gradients are plain products
  with them, a factor per row and the target's terms apart (Hopper; no smoothing, no cap).
- ``exp``: it leaves 16-bit exponentials relative to each strip's maximum, one pass turns them into the gradient
  (Hopper, 16-bit operands).
- ``logits``: cuBLAS leaves fp32 logits, and the gradient of 16-bit operands is written, 16-bit wide, over their bytes.
"""

from typing import Any

import torch
from torch import Tensor

from ..gradients import AddsDlogits, Gradients
from ..kernels import launch
from ..matmul import add_dhidden, add_dweight, project
from ..memory import Store
from ..plans import Plan
from ..stats import Coefficients, Head, RowStats
from . import Layout

TMA_BYTES = 16  # alignment that tensor descriptors ask of a row


def store(layout: Layout) -> Store:
    if layout.device.type != "cuda" and not launch.INTERPRETED:
        raise ValueError(
            "backend='triton' needs a CUDA device, or TRITON_INTERPRET=1 in the environment; the tensors are on "
            f"{layout.device}: use backend='torch'"
        )
    if layout.dtype == torch.float64:
        raise ValueError("backend='triton' computes in fp32 at most, hidden is float64: use backend='torch'")
    aligned = layout.plain_weight and layout.hidden * layout.dtype.itemsize % TMA_BYTES == 0
    if layout.dtype == torch.float32 or not aligned or not runs_exp_logits(layout.device):
        return "logits"
    if layout.smoothed and layout.capped:
        return "logits"  # no logit can be read back out of an exponential that underflowed, and this needs every one
    # a factor per row would take fp16 out of its range; smoothing and caps need a pass over the buffer
    one_factor = layout.dtype == torch.bfloat16 and not (layout.smoothed or layout.capped or layout.bias_grad)
    return "fast" if one_factor and layout.plain_rows else "exp"


def runs_exp_logits(device: torch.device) -> bool:
    """Whether the device runs the matmul with the exponentials: its tile is sized for Hopper's shared memory.

    Where there is no GPU to ask, a plan for one is a plan for Hopper.
    """
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_capability(device)[0] == 9
    return True


def traits(device: torch.device) -> dict[str, Any]:
    return {"half_products": device.type == "cuda", "scratch": 0}


def clean_rows(out: Tensor, source: Tensor, target: Tensor) -> None:
    launch.copy_rows(out, source, target, factor=None)


def scale(source: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    out = source if source.dtype == dtype else torch.empty_like(source, dtype=dtype)
    if source.numel():
        launch.scale(out, source, factor)
    return out


def session(head: Head, plan: Plan, tiled: bool) -> "ExpSession | FastSession | LogitsSession":
    # tiles have their statistics already, and nothing to gain from exponentials
    if tiled or plan.sizes.store == "logits":
        return LogitsSession(head, plan, tiled)
    return FastSession(head, plan) if plan.sizes.store == "fast" else ExpSession(head, plan)


def transform(head: Head) -> tuple[float | None, float | None]:
    """Scale and cap as the kernels take them: None for what there is none of, and then no code."""
    return (None if head.logit_scale == 1.0 else float(head.logit_scale)), head.softcap


class ExpSession(AddsDlogits):
    def __init__(self, head: Head, plan: Plan):
        self.head, self.sizes = head, plan.sizes
        rows, vocab = plan.chunk_tokens, plan.sizes.vocab
        device = head.weight.device
        padded = -(-vocab // 8) * 8  # a row starts on 16 bytes
        self.buffer = torch.empty(rows, padded, dtype=plan.sizes.dtype, device=device)
        kept = 3 if plan.sizes.weighted_sum else 2
        self.strips = torch.empty(kept, launch.strips_of(vocab) * rows, dtype=torch.float32, device=device)

    def stats(self, hidden: Tensor, target: Tensor, out: RowStats) -> None:
        self.exponentials(hidden, target, out, row_offset=None, level=None)

    def exponentials(
        self, hidden: Tensor, target: Tensor, out: RowStats, row_offset: Tensor | None, level: Tensor | None
    ) -> None:
        rows, head = hidden.shape[0], self.head
        self.exp = self.buffer[:rows, : self.sizes.vocab]
        strips = self.strips[:, : launch.strips_of(self.sizes.vocab) * rows].unflatten(1, (-1, rows))
        self.strip_offset, strip_sum, *weighted = strips.unbind(0)
        strip_weighted = weighted[0] if out.weighted_sum is not None else None
        launch.target_logits(out.target_logit, hidden, head.weight, target, head.bias, *transform(head))
        launch.exp_logits(
            self.exp, self.strip_offset, strip_sum, strip_weighted,
            hidden, head.weight, head.bias, head.class_weights, row_offset, target, *transform(head),
        )  # fmt: skip
        launch.merge_strips(
            out.lse, out.weighted_sum, level,
            self.strip_offset, strip_sum, strip_weighted, out.target_logit, target,
        )  # fmt: skip

    def grad_(self, target: Tensor, stats: RowStats, coefficients: Coefficients) -> Tensor:
        head = self.head
        launch.exp_grad_(
            self.exp, self.strip_offset, stats.lse, stats.target_logit, target,
            *coefficients, head.class_weights, *transform(head),
        )  # fmt: skip
        return self.exp

    def tile_grad(self, hidden, tile, target, stats, coefficients) -> Tensor:
        raise AssertionError("gradients with known statistics are made from plain logits")


class FastSession(ExpSession):
    """With exponentials E relative to one level per row, and the target's column left out of them,

        dlogits = softmax_factor * E + target_factor * onehot(target)
        softmax_factor = alpha exp(level - lse),  target_factor = alpha p(target) - beta

    so dhidden is ``E @ weight`` times a factor plus a row of the weight, dweight is ``E.T @ (factor * hidden)`` plus
    rows of hidden states at their targets. The last are added at the end, when all tokens can be sorted by target.
    """

    def __init__(self, head: Head, plan: Plan):
        super().__init__(head, plan)
        sizes, device = plan.sizes, head.weight.device
        if plan.schedule != "forward":
            return
        if sizes.weight_grad:
            self.scaled = torch.empty(plan.chunk_tokens, sizes.hidden, dtype=sizes.dtype, device=device)
            self.target_factor = torch.empty(sizes.tokens, dtype=torch.float32, device=device)
        if sizes.hidden_grad and plan.hidden_accumulate != torch.float32:
            self.product = torch.empty(plan.chunk_tokens, sizes.hidden, dtype=torch.float32, device=device)

    def stats(self, hidden: Tensor, target: Tensor, out: RowStats) -> None:
        self.level = torch.empty_like(out.lse)
        self.exponentials(hidden, target, out, row_offset=out.target_logit, level=self.level)

    def add_gradients(
        self,
        rows: slice,
        hidden: Tensor,
        target: Tensor,
        stats: RowStats,
        coefficients: Coefficients,
        grads: Gradients,
    ) -> None:
        weight = self.head.weight
        launch.level_rows(self.exp, self.strip_offset, self.level, stats.target_logit)
        alpha = coefficients.alpha * self.head.logit_scale
        softmax_factor = alpha * (self.level - stats.lse).exp()
        target_factor = alpha * (stats.target_logit - stats.lse).exp() - coefficients.beta * self.head.logit_scale
        if grads.hidden is not None:
            out = grads.hidden[rows]
            product = out if out.dtype == torch.float32 else self.product[: len(out)]
            add_dhidden(self.exp, weight, product, first=True)
            launch.finish_dhidden(out, product, weight, target, softmax_factor, target_factor)
        if grads.weight is not None:
            scaled = self.scaled[: len(hidden)]
            launch.copy_rows(scaled, hidden, target, softmax_factor)
            add_dweight(self.exp, scaled, grads.weight, first=rows.start == 0)
            self.target_factor[rows] = target_factor

    def finish(self, hidden: Tensor, target: Tensor, grads: Gradients) -> None:
        if grads.weight is not None:
            launch.add_target_rows(grads.weight, hidden, target, self.target_factor)


class LogitsSession(AddsDlogits):
    def __init__(self, head: Head, plan: Plan, tiled: bool):
        self.head, self.dtype = head, plan.sizes.dtype
        self.buffer = torch.empty(plan.buffer_elements(tiled), dtype=torch.float32, device=head.weight.device)
        self.logits = self.buffer

    def compute_logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        rows, columns = hidden.shape[0], weight.shape[0]
        logits = self.buffer[: rows * columns].view(rows, columns)
        project(hidden, weight, logits)
        return logits

    def stats(self, hidden: Tensor, target: Tensor, out: RowStats) -> None:
        head = self.head
        self.logits = self.compute_logits(hidden, head.weight)
        launch.row_stats(*out, self.logits, target, head.bias, head.class_weights, *transform(head))

    def grad_(self, target: Tensor, stats: RowStats, coefficients: Coefficients) -> Tensor:
        return self.differentiate_(self.logits, self.head, 0, target, stats, coefficients)

    def tile_grad(
        self, hidden: Tensor, tile: slice, target: Tensor, stats: RowStats, coefficients: Coefficients
    ) -> Tensor:
        head = self.head.columns(tile)
        logits = self.compute_logits(hidden, head.weight)
        return self.differentiate_(logits, head, tile.start, target, stats, coefficients)

    def differentiate_(
        self, logits: Tensor, head: Head, first: int, target: Tensor, stats: RowStats, coefficients: Coefficients
    ) -> Tensor:
        dlogits = logits.view(self.dtype)[:, : logits.shape[1]]  # a 16-bit row lies in the first half of its fp32 row
        launch.row_grad(
            dlogits, logits, stats.lse, stats.target_logit, target,
            *coefficients, head.bias, head.class_weights, first, *transform(head),
        )  # fmt: skip
        return dlogits
