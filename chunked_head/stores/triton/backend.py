"""The backend of Triton kernels, for NVIDIA and AMD GPUs, and for any machine under Triton's interpreter
(``TRITON_INTERPRET=1``).

It has three stores, each with one buffer that all chunks use. Statistics come from fp32 accumulators:

- ``FastStore``: our matmul writes bf16 exponentials relative to the target's logit. Products with the exponentials make
  gradients, up to a factor per row and the target's terms. It is for losses of logprob and lse, without a cap.
- ``RelativeStore``: our matmul writes fp16 logits relative to each strip's maximum. One pass turns the logits into any
  gradient. It is for 16-bit operands.
- ``LogitsStore``: BLAS writes fp32 logits. With 16-bit operands, a 16-bit gradient is written over their bytes.

When the schedule "recompute" makes gradients, statistics are known. ``GradStore`` then replaces the first two stores:
its matmul writes dlogits and no logits. With a dense teacher, whose terms need rows of both models' logits,
``LogitsStore`` replaces them.
"""

from itertools import starmap
from typing import Any

import torch
from torch import Tensor

from ...core.gpus import RELATIVE_STRIP, Gpu, gpu_of, multiprocessors_of
from ...core.stats import Demand
from ...core.tiles import INTERPRETED, Quantised
from ...kernels.common.recording import recording
from ...kernels.e4m3 import launch as e4m3
from ...kernels.gradients import launch as gradients
from ...kernels.products import launch as products
from ...kernels.statistics import launch as statistics
from ...plan.sizes import padded_e4m3
from ..backend import Backend
from ..matmul import sums_halves
from ..operands import TeacherHead
from ..store import LogitsStore, Store
from .fast import FastStore
from .relative import RelativeStore
from .store import TMA_BYTES, GradStore


def is_readable(weight: Tensor, dtype: torch.dtype) -> bool:
    """True if our matmuls can read a weight, after a cast to ``dtype``: it is contiguous, has 16 bits, and its rows
    start on 16 bytes."""
    is_row_aligned = weight.data_ptr() % TMA_BYTES == weight.shape[1] * dtype.itemsize % TMA_BYTES == 0
    return dtype.itemsize == 2 and is_row_aligned and weight.is_contiguous()


class TritonBackend(Backend):
    """The backend whose functions launch Triton kernels."""

    name = "triton"
    recording = staticmethod(recording)
    stops_at_device_count = True
    grad_store = GradStore
    read_targets = staticmethod(statistics.read_targets)
    read_fields = staticmethod(statistics.read_fields)
    clean_rows = staticmethod(statistics.clean_rows)
    row_stats = staticmethod(statistics.row_stats)
    sums = staticmethod(statistics.sums)
    row_grad = staticmethod(gradients.row_grad)
    kept_sets = staticmethod(statistics.kept_sets)
    dot_columns = staticmethod(statistics.dot_columns)
    set_stats = staticmethod(statistics.set_stats)
    set_grad = staticmethod(gradients.set_grad)
    add_rows = staticmethod(products.add_rows)
    sum_rows = staticmethod(statistics.sum_rows)
    scale_into = staticmethod(gradients.scale)
    scale_rows = staticmethod(gradients.scale_rows)
    merge_softmax = staticmethod(statistics.merge_softmax)
    quantise_ = staticmethod(e4m3.quantise)

    def transposed(self, matrix: Tensor) -> Quantised:
        out = matrix.new_empty(matrix.shape[1], padded_e4m3(len(matrix)))
        e4m3.both_orders(None, out, matrix)
        return Quantised(out, torch.ones((), dtype=torch.float32, device=matrix.device))

    def check(self, device: torch.device, dtype: torch.dtype, label: str) -> None:
        if device.type != "cuda" and not INTERPRETED:
            raise ValueError(
                "backend='triton' needs a GPU, or TRITON_INTERPRET=1 in the environment; the tensors are on "
                f"{device}: use backend='torch'"
            )
        if dtype == torch.float64:
            raise ValueError(f"backend='triton' computes in fp32 at most, {label} is float64: use backend='torch'")

    def store(
        self,
        dtype: torch.dtype,
        weight: Tensor,
        demand: Demand,
        gpu: Gpu | None,
        is_plain: bool,
        teacher: TeacherHead | None,
    ) -> type[Store]:
        """Returns the class of the store for a call that has softmaxes over the vocabulary. ``dtype``: dtype of the
        matmuls. ``is_plain``: the call has no softcap and no gradient of a bias, and each hidden state is
        contiguous."""
        weights_and_dtypes = [(weight, dtype)]
        if teacher is not None and teacher.weight is not None:
            weights_and_dtypes.append((teacher.weight, teacher.dtype or teacher.weight.dtype))
        if not all(starmap(is_readable, weights_and_dtypes)) or demand.searches_logits or gpu is None:
            return LogitsStore
        _, last_columns = demand.views[-1]
        if (last_columns or 0) % RELATIVE_STRIP:
            return LogitsStore  # the second softmax would end in the middle of a strip
        # a factor per row could overflow fp16; a cap or a gradient of the bias needs a pass over the buffer
        is_factored = dtype == torch.bfloat16 and demand.rank_one and demand.one_sweep
        return FastStore if is_factored and is_plain else RelativeStore

    def traits(self, device: torch.device) -> dict[str, Any]:
        return {
            "half_products": sums_halves(device),
            "gpu": gpu_of(device),
            "multiprocessors": multiprocessors_of(device),
        }


TRITON = TritonBackend()
