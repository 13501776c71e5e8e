"""The head in Triton kernels: NVIDIA GPUs, and any machine under Triton's interpreter (``TRITON_INTERPRET=1``).

Two stores of the reused buffer, both with statistics from fp32 accumulators. ``exp``: our own matmul leaves 16-bit
exponentials and statistics (Hopper, 16-bit operands). ``logits``: cuBLAS leaves fp32 logits, and the gradient of
16-bit operands is written, 16-bit wide, over their bytes.
"""

from typing import Any

import torch
from torch import Tensor

from ..kernels import launch
from ..matmul import project
from ..plans import Plan, Store
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
    # fp32 has no 16-bit exponentials; out of one that underflowed no logit can be read back
    if layout.dtype == torch.float32 or layout.logits_needed or not layout.plain_weight:
        return "logits"
    aligned = layout.hidden * layout.dtype.itemsize % TMA_BYTES == 0
    return "exp" if aligned and runs_exp_logits(layout.device, layout.dtype) else "logits"


def runs_exp_logits(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device runs the matmul with the exponentials: its tile is sized for Hopper's shared memory.

    Where there is no GPU to ask, a plan for one is a plan for Hopper.
    """
    if device.type == "cuda":
        return not torch.cuda.is_available() or torch.cuda.get_device_capability(device)[0] == 9
    return dtype == torch.float16  # the interpreter's product of bf16 operands is wrong


def traits(device: torch.device) -> dict[str, Any]:
    return {"half_products": device.type == "cuda", "scratch": 0}


def scale(source: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    out = source if source.dtype == dtype else torch.empty_like(source, dtype=dtype)
    if source.numel():
        launch.scale(out, source, factor)
    return out


def session(head: Head, plan: Plan, tiled: bool) -> "ExpSession | LogitsSession":
    # tiles have their statistics already, and nothing to gain from exponentials
    return ExpSession(head, plan) if plan.sizes.store == "exp" and not tiled else LogitsSession(head, plan, tiled)


def transform(head: Head) -> tuple[float | None, float | None]:
    """Scale and cap as the kernels take them: None for what there is none of, and then no code."""
    return (None if head.logit_scale == 1.0 else float(head.logit_scale)), head.softcap


class ExpSession:
    def __init__(self, head: Head, plan: Plan):
        self.head, self.sizes = head, plan.sizes
        rows, vocab = plan.chunk_tokens, plan.sizes.vocab
        device = head.weight.device
        padded = -(-vocab // 8) * 8  # a row starts on 16 bytes
        self.buffer = torch.empty(rows, padded, dtype=plan.sizes.dtype, device=device)
        strips = launch.strips_of(vocab)
        kept = 3 if plan.sizes.weighted_sum else 2
        self.strips = torch.empty(kept, strips * rows, dtype=torch.float32, device=device)

    def stats(self, hidden: Tensor, target: Tensor, out: RowStats) -> None:
        rows = hidden.shape[0]
        self.exp = self.buffer[:rows, : self.sizes.vocab]
        strips = self.strips[:, : launch.strips_of(self.sizes.vocab) * rows].unflatten(1, (-1, rows))
        self.strip_max, strip_sum, *weighted = strips.unbind(0)
        strip_weighted = weighted[0] if out.weighted_sum is not None else None
        head = self.head
        launch.target_logits(out.target_logit, hidden, head.weight, target, head.bias, *transform(head))
        launch.exp_logits(
            self.exp, self.strip_max, strip_sum, strip_weighted,
            hidden, head.weight, head.bias, head.class_weights, *transform(head),
        )  # fmt: skip
        launch.merge_strips(out.lse, out.weighted_sum, self.strip_max, strip_sum, strip_weighted)

    def grad_(self, target: Tensor, stats: RowStats, coefficients: Coefficients) -> Tensor:
        head = self.head
        launch.exp_grad_(
            self.exp, self.strip_max, stats.lse, stats.target_logit, target,
            *coefficients, head.class_weights, *transform(head),
        )  # fmt: skip
        return self.exp

    def tile_grad(self, hidden, tile, target, stats, coefficients) -> Tensor:
        raise AssertionError("gradients with known statistics are made from plain logits")


class LogitsSession:
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
