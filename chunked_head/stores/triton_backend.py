"""The backend of Triton kernels: NVIDIA and AMD GPUs, and any machine under Triton's interpreter
(``TRITON_INTERPRET=1``).

Three stores of the reused buffer, all with statistics from fp32 accumulators:

- ``fast``: our matmul writes bf16 exponentials relative to the target's logit. The gradients are plain products with
  them, but for a factor per row and the target's terms: for losses of the target's log-probability and lse, no cap.
- ``relative``: it writes fp16 logits relative to each strip's maximum, one pass turns them into any gradient (16-bit
  operands).
- ``logits``: BLAS writes fp32 logits, and the gradient of 16-bit operands is written, 16-bit wide, over their bytes.

Where statistics are known before any gradient (the plan recomputes) the first two store no logits at all: the matmul
writes their gradient. With a dense teacher, whose terms need both rows of logits, the third is taken there.
"""

import math
from collections.abc import Sequence
from itertools import starmap
from typing import Any

import torch
from torch import Tensor

from ..core.stats import Coefficients, Demand, RowStats
from ..kernels.common.gpus import RELATIVE_STRIP, Gpu, gpu_of, multiprocessors_of
from ..kernels.common.recording import recording
from ..kernels.common.records import KeptEntries
from ..kernels.common.tiles import INTERPRETED
from ..kernels.gradients import launch as gradients
from ..kernels.products import launch as products
from ..kernels.statistics import launch as statistics
from ..plan.plans import Plan
from .backend import Backend, Targets
from .matmul import sums_halves
from .operands import Head, Kept, Rows, Sets, TeacherHead
from .sets import SetStore
from .store import MatmulStore, Store
from .triton_relative import FastStore, RelativeStore
from .triton_store import (
    TMA_BYTES,
    GivenLogits,
    GradStore,
    LogitsStore,
    merge_ranks,
    outputs_of,
    ratio_of,
    terms_of,
    transform,
)


class TritonSets(SetStore):
    """Logits of rows that keep sets of columns, in kernels."""

    bounds_rows = True
    buffers, tile_buffers = Store.buffers, Store.tile_buffers

    def make_logits(self) -> None:
        head, kept, made = self.head, self.kept, transform(self.head, self.rows.scale)
        of_rows = self.rows.hidden, head.weight, kept.columns, head.bias, made, kept.rows
        statistics.dot_columns(self.logits, *of_rows, -math.inf)

    def entries(self, at: slice) -> KeptEntries:
        return KeptEntries(self.kept.columns, self.kept.starts[at], self.kept.ends[at], self.rows.target[at])

    def softmax_stats(self, at: slice, out: RowStats) -> None:
        for suffix, view in zip(("", "2"), self.demand.views, strict=False):
            outputs, ratio = outputs_of(out.named(), suffix), ratio_of(view.ratio)
            statistics.set_stats(outputs, self.logits, self.entries(at), ratio, self.kept.everywhere)

    def softmax_grad(self, at: slice, stats: RowStats, coefficients: Coefficients) -> None:
        scale = None if self.rows.scale is None else self.rows.scale[at]
        entries = self.entries(at)
        terms = terms_of(self.demand, entries.target, stats, coefficients, 0, 0, 0)
        gradients.column_grad(
            self.dlogits,
            self.logits,
            entries.columns,
            None,
            None,
            terms.without_unused(),
            None,
            0,
            transform(self.head, scale),
            entries,
        )

    def add_rows(self, out: Tensor, table: Tensor, places: Tensor, rows: Tensor, together: bool = False) -> None:
        table = table if table.stride(1) == 1 else table.contiguous()
        products.add_rows(out, table, places.int() if together else places, self.dlogits, rows, together=together)


def read_in_blocks(weight: Tensor, dtype: torch.dtype) -> bool:
    """True for a head that our matmuls read: 16-bit as ``dtype``, contiguous, its rows on 16 bytes."""
    aligned = weight.data_ptr() % TMA_BYTES == weight.shape[1] * dtype.itemsize % TMA_BYTES == 0
    return dtype.itemsize == 2 and aligned and weight.is_contiguous()


class TritonBackend(Backend):
    """Kernels in the place of torch operations."""

    name = "triton"
    recording = staticmethod(recording)
    bounds_rows = True
    reads_teacher = True
    sets_store = TritonSets
    given_store = GivenLogits
    clean_rows = staticmethod(statistics.clean_rows)
    merge_ranks = staticmethod(merge_ranks)
    read_fields = staticmethod(statistics.read_fields)
    quantise_ = staticmethod(statistics.quantise)

    def sum_rows(
        self, table: Tensor, inverse: Tensor, one_or_nan: Tensor, coefficients: Sequence[float]
    ) -> tuple[Tensor, Tensor]:
        if len(coefficients) > statistics.MOST_PARTS:
            return super().sum_rows(table, inverse, one_or_nan, coefficients)
        return statistics.sum_rows(table, inverse, one_or_nan, coefficients)

    @staticmethod
    def kept_sets(out: Kept, sets: Sets, target: Tensor, numbers: tuple[Tensor, Tensor]) -> None:
        statistics.kept_sets(out.starts, out.ends, out.rows, out.columns, out.bias, *numbers, target, *sets)

    def check(self, device: torch.device, dtype: torch.dtype, what: str) -> None:
        if device.type != "cuda" and not INTERPRETED:
            raise ValueError(
                "backend='triton' needs a GPU, or TRITON_INTERPRET=1 in the environment; the tensors are on "
                f"{device}: use backend='torch'"
            )
        if dtype == torch.float64:
            raise ValueError(f"backend='triton' computes in fp32 at most, {what} is float64: use backend='torch'")

    def read_targets(
        self, target: Tensor, mask: Tensor | None, shift: int, ignore_index: int, vocab: int, dtype: torch.dtype
    ) -> Targets:
        return Targets(*statistics.read_targets(target, mask, shift, ignore_index, vocab, dtype))

    def store(
        self,
        dtype: torch.dtype,
        weight: Tensor,
        demand: Demand,
        gpu: Gpu | None,
        plain: bool,
        teacher: TeacherHead | None,
    ) -> type[Store]:
        heads = [(weight, dtype)]
        if teacher is not None and teacher.weight is not None:
            heads.append((teacher.weight, teacher.dtype or teacher.weight.dtype))
        if not all(starmap(read_in_blocks, heads)) or demand.top_k or gpu is None:
            return LogitsStore
        if (demand.views[-1].columns or 0) % RELATIVE_STRIP:
            return LogitsStore  # a second softmax would end within a strip
        # a factor per row would take fp16 out of its range; caps and trained biases need a pass over the buffer
        one_factor = dtype == torch.bfloat16 and demand.rank_one and demand.one_sweep
        return FastStore if one_factor and plain else RelativeStore

    def traits(self, device: torch.device) -> dict[str, Any]:
        return {
            "half_products": sums_halves(device),
            "gpu": gpu_of(device),
            "multiprocessors": multiprocessors_of(device),
        }

    def store_of(self, head: Head, plan: Plan, every: Rows, known: bool) -> Store:
        store: type[MatmulStore] = plan.sizes.store
        if known:
            store = GradStore if plan.sizes.grads_in_matmul else LogitsStore
        return store(head, plan, every, known)

    def scale(self, source: Tensor, factors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        out = torch.empty_like(source, dtype=dtype)
        if source.numel():
            gradients.scale(out, source, *factors)
        return out

    def scale_(self, sources: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
        there = [source for source in sources if source.numel()]
        factor, one_or_nan = (*factors, None)[:2]
        for i in range(0, len(there), 2):
            gradients.scale(there[i], there[i], factor, one_or_nan, *there[i + 1 : i + 2])


TRITON = TritonBackend()
