"""The two ways to compute: torch operations, for the CPU and any device that has no Triton, and Triton kernels
(``triton_backend.py``)."""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.checks import BACKENDS, choice
from ..core.stats import Demand, shift_left
from ..kernels.common.gpus import Gpu, gpu_of
from ..parallel.merge import merge_ranks
from ..plan.plans import Plan
from ..plan.sizes import slices
from . import torch_store
from .operands import Head, Rows, TeacherHead
from .quantised import Quantised, RoundedHead, empty_quantised, frequent_blocks, mean_of, quantise_
from .sets import SetStore, kept_sets
from .store import Store
from .torch_store import GivenLogits, TorchStore


class Targets(NamedTuple):
    """Targets in the order of the rows of hidden states that predict them."""

    target: Tensor  # [tokens] int64, -1 where a row does not count
    counted: Tensor  # [] how many do, in the dtype of the statistics
    one_or_nan: Tensor  # [] of that dtype: nan where an id is out of range
    inverse: Tensor  # [] one_or_nan / counted, or / 1 where none does


class Backend:
    """Torch operations on every device; ``TritonBackend`` has kernels in their place."""

    name = "torch"
    recording: Callable[..., Any] | None = None  # listens to a sweep, ``kernels/common/recording.py``
    bounds_rows = False  # some of its stores' matmuls can stop at a number of rows that only the device knows
    reads_teacher = False  # a dense teacher's logits that exist, in place
    sets_store: type[SetStore] = SetStore  # of rows whose softmaxes are over sets of columns
    # of logits that exist [rows, vocab], columns contiguous, and where their gradient goes, which may be the logits;
    # of the head only scale, cap and class weights are read
    given_store: Callable[[Head, Demand, Rows, Tensor | None], Store] = GivenLogits
    clean_rows = staticmethod(TorchStore.clean_rows)
    # the sets that tokens keep as entries of the rows that predict them, a bias given as 0; what is wrong makes both
    # numbers nan
    kept_sets = staticmethod(kept_sets)
    merge_ranks = staticmethod(merge_ranks)

    def check(self, device: torch.device, dtype: torch.dtype, what: str) -> None:
        """ValueError where it cannot compute there, or not with ``what``, which has this dtype."""

    def read_targets(
        self,
        target: Tensor,
        mask: Tensor | None,
        shift: int,
        ignore_index: int,
        vocab: int,
        dtype: torch.dtype,
    ) -> Targets:
        """Targets [...] in the order of the rows whose hidden states predict them, ``shift`` before them along the
        last dimension; ``mask`` [...] bool says which count, in addition to ``ignore_index``. ``dtype``: of the
        statistics."""
        paired = shift_left(target, shift, ignore_index).reshape(-1)
        counts = paired != ignore_index
        if mask is not None:
            counts &= shift_left(mask, shift, 0).reshape(-1)
        inside = (paired >= 0) & (paired < vocab)
        one_or_nan = torch.ones((), dtype=dtype, device=target.device)
        one_or_nan.masked_fill_((counts & ~inside).any(), torch.nan)
        counts &= inside
        counted = counts.sum().to(dtype)
        paired = torch.where(counts, paired, -1)
        return Targets(paired, counted, one_or_nan, one_or_nan / counted.clamp(min=1.0))

    def read_fields(self, values: Sequence[Tensor], target: Tensor, shift: int, dtype: torch.dtype) -> Sequence[Tensor]:
        """Fields [...] likewise in the order of rows [tokens], in the dtype of statistics; 0 where a target is -1."""
        ignored = target < 0
        shifted = [shift_left(value, shift, 0).reshape(-1) for value in values]
        return [value.to(dtype).masked_fill(ignored, 0.0) for value in shifted]

    def store(
        self,
        dtype: torch.dtype,
        weight: Tensor,
        demand: Demand,
        gpu: Gpu | None,
        plain: bool,
        teacher: TeacherHead | None,
    ) -> type[Store]:
        """The store of a call's chunks, where the softmax of some token is over the vocabulary. ``dtype``: of the
        matmuls. ``plain``: without softcap and a bias's gradient, hidden states contiguous along their columns."""
        return TorchStore

    def traits(self, device: torch.device) -> dict[str, Any]:
        """Fields of ``Sizes``: ``half_products``, true where 16-bit operands are multiplied uncast;
        where there are matmuls of ours ``gpu``, and how many ``multiprocessors`` it has."""
        return {"half_products": False}

    def store_of(self, head: Head, plan: Plan, every: Rows, known: bool) -> Store:
        """The store of a plan's chunks, or where statistics are ``known`` of its blocks. ``every``: the call's rows as
        given."""
        return TorchStore(head, plan, every, known)

    quantise_ = staticmethod(quantise_)

    def quantised(self, weight: Tensor, mean: Tensor | None = None, dots: Tensor | None = None) -> Quantised:
        """A weight in e4m3, by one scale; in ``dots`` its products with ``mean``."""
        out = empty_quantised(len(weight), weight.shape[1], weight.device, each_row=False)
        self.quantise_(out, weight, mean, dots)
        return out

    def rounded_head(
        self, weight: Tensor, bias: Tensor | None, kept: Quantised | None, hidden: Tensor, target: Tensor, fixed: bool
    ) -> RoundedHead:
        """A head for these hidden states and targets; ``fixed``: for any. ``kept``: its weight in e4m3, where the
        caller has it."""
        mean, dots = mean_of(hidden, target), torch.empty(len(weight), dtype=torch.float32, device=weight.device)
        blocks = frequent_blocks(target, len(weight))
        if fixed:  # a token's logits do not depend on other tokens
            mean, blocks = torch.zeros_like(mean), blocks[:0]
        if kept is None:
            kept = self.quantised(weight, mean, dots)
        else:
            self.quantise_(None, weight, mean, dots)
            kept = kept._replace(values=kept.values[: len(weight)])
        return RoundedHead(kept, mean, dots if bias is None else dots.add_(bias), blocks)

    def sum_rows(
        self, table: Tensor, inverse: Tensor, one_or_nan: Tensor, coefficients: Sequence[float]
    ) -> tuple[Tensor, Tensor]:
        """Sums [rows] of a table [rows, tokens], of the losses' rows times ``inverse`` [], of the rest times
        ``one_or_nan`` []; and before them the sum of the losses' times their coefficients, []."""
        parts = len(coefficients)
        sums = torch.stack([row * (inverse if i < parts else one_or_nan) for i, row in enumerate(table.sum(1))])
        first, *others = [total * c for total, c in zip(sums[:parts], coefficients, strict=True)]
        return sum(others, first), sums

    def scale(self, source: Tensor, factors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """``source`` times one or two factors (0-d, on the device) in a new tensor of ``dtype``."""
        factor, out = functools.reduce(torch.mul, factors), torch.empty_like(source, dtype=dtype)
        for part in slices(source.numel(), torch_store.TILE_ELEMENTS):
            out.view(-1)[part] = source.view(-1)[part] * factor
        return out

    def scale_(self, sources: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
        """Multiplies tensors by the factors in place."""
        factor = functools.reduce(torch.mul, factors)
        if factors[0].device.type == "cpu" and factor == 1:  # elsewhere to look would be to wait for the device
            return
        for source in sources:
            source.mul_(factor)


TORCH = Backend()


def backend_of(name: str | None, device: torch.device) -> Backend:
    """The backend called ``name``, or the device's default; never another one than was asked for."""
    choice(None, "backend", name, BACKENDS)
    if name is None:
        # our kernels are the default of NVIDIA's GPUs, and of those of AMD's that they have been compiled for
        ours = device.type == "cuda" and has_triton() and (torch.version.hip is None or gpu_of(device) is not None)
        name = "triton" if ours else "torch"
    if name == "torch":
        return TORCH
    if not has_triton():
        raise ValueError("backend='triton' needs the package triton (pip install triton); use backend='torch'")
    return importlib.import_module(".triton_backend", __package__).TRITON  # it imports this file, and Triton


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
