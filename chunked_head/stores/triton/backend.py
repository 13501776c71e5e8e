"""The head in Triton kernels: NVIDIA and AMD GPUs, and any machine under Triton's interpreter (``TRITON_INTERPRET=1``).

Three stores of the reused buffer, all with statistics from fp32 accumulators:

- ``fast``: our matmul leaves bf16 exponentials relative to the target's logit; the gradients are plain products
  with them, a factor per row and the target's terms apart (gradients of rank one besides the softmax, no cap).
- ``relative``: it leaves fp16 logits relative to each strip's maximum, one pass turns them into any gradient (16-bit
  operands).
- ``logits``: BLAS leaves fp32 logits, and the gradient of 16-bit operands is written, 16-bit wide, over their bytes.

Where statistics are known before any gradient (the plan recomputes) the first two store no logits at all: the matmul
leaves the gradient. A dense teacher's terms need a row of each at a time, and so the third.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ...kernels.common.gpus import gpu_of, multiprocessors_of
from ...kernels.common.tiles import INTERPRETED
from ...kernels.gradients import launch as gradients
from ...kernels.statistics import launch as statistics
from ...kernels.statistics.launch import clean_rows as clean_rows
from ...kernels.statistics.launch import read_fields as read_fields
from ...kernels.statistics.launch import sum_rows as sum_rows
from ...plan.plans import Plan
from ...plan.sizes import Store as StoreName
from ..matmul import sums_halves
from ..operands import Head, Kept, Sets, Teacher
from ..protocol import Layout, Targets
from ..store import Store
from .relative import FastStore, RelativeStore
from .sets import TritonSets
from .store import TMA_BYTES, GivenView, GradStore, LogitsStore
from .store import merge_ranks as merge_ranks

name = "triton"
sets_store, view_store = TritonSets, GivenView


def check(device: torch.device, dtype: torch.dtype, what: str) -> None:
    if device.type != "cuda" and not INTERPRETED:
        raise ValueError(
            "backend='triton' needs a GPU, or TRITON_INTERPRET=1 in the environment; the tensors are on "
            f"{device}: use backend='torch'"
        )
    if dtype == torch.float64:
        raise ValueError(f"backend='triton' computes in fp32 at most, {what} is float64: use backend='torch'")


def store(layout: Layout) -> StoreName:
    aligned = layout.plain_weight and layout.hidden * layout.dtype.itemsize % TMA_BYTES == 0
    if layout.dtype == torch.float32 or not aligned or layout.demand.top_k or layout.gpu is None:
        return "logits"
    # a factor per row would take fp16 out of its range; caps and trained biases need a pass over the buffer
    one_factor = layout.dtype == torch.bfloat16 and layout.demand.rank_one and layout.demand.one_sweep
    return "fast" if one_factor and not (layout.capped or layout.bias_grad) and layout.plain_rows else "relative"


def teacher_store(teacher: Teacher, store: StoreName) -> Literal["relative", "logits"] | None:
    if teacher.logits is not None:
        return None
    assert teacher.weight is not None
    weight = teacher.weight
    aligned = weight.is_contiguous() and weight.data_ptr() % TMA_BYTES == 0 and weight.stride(0) * 2 % TMA_BYTES == 0
    return "relative" if store == "relative" and (teacher.dtype or weight.dtype).itemsize == 2 and aligned else "logits"


def traits(device: torch.device) -> dict[str, Any]:
    return {
        "half_products": sums_halves(device), "scratch": 0,
        "gpu": gpu_of(device), "multiprocessors": multiprocessors_of(device),
    }  # fmt: skip


def read_targets(
    target: Tensor,
    mask: Tensor | None,
    shift: int,
    ignore_index: int,
    vocab: int,
    dtype: torch.dtype,
    rows: int | None = None,
) -> Targets:
    return Targets(*statistics.read_targets(target, mask, shift, ignore_index, vocab, dtype, rows))


def bounds_rows(store: StoreName) -> bool:
    return store != "logits"


def scale(source: Tensor, factors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    out = torch.empty_like(source, dtype=dtype)
    if source.numel():
        gradients.scale(out, source, *factors)
    return out


def scale_(sources: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
    there = [source for source in sources if source.numel()]
    factor, one_or_nan = (*factors, None)[:2]
    for first, *more in (there[i : i + 2] for i in range(0, len(there), 2)):
        gradients.scale(first, first, factor, one_or_nan, *more)


def store_of(head: Head, plan: Plan, tiled: bool) -> Store:
    if tiled and plan.sizes.grads_in_matmul:
        return GradStore(head, plan)
    if tiled or plan.sizes.store == "logits":
        return LogitsStore(head, plan, tiled)
    return FastStore(head, plan) if plan.sizes.store == "fast" else RelativeStore(head, plan)


def kept_sets(out: Kept, sets: Sets, target: Tensor, numbers: tuple[Tensor, Tensor]) -> None:
    statistics.kept_sets(out.starts, out.ends, out.rows, out.columns, out.bias, *numbers, target, *sets)
