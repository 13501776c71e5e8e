"""The two ways to compute: Triton kernels, and torch operations for every device without them.

A backend is a module with the functions of ``Backend``; its stores are classes.
"""

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ..core.stats import Demand, RowStats
from ..kernels.common.gpus import Gpu, gpu_of
from ..parallel.merge import GatheredStats
from ..plan.plans import Plan
from ..plan.sizes import Store as StoreName
from .logits import LogitsView
from .operands import Head, Kept, Sets, Teacher
from .sets import SetRows, SetStore
from .store import Store

BACKENDS = ("triton", "torch")


class Layout(NamedTuple):
    """Facts of a call that a backend chooses its store by."""

    gpu: Gpu | None  # the architecture whose matmuls of ours run
    dtype: torch.dtype  # of the matmuls
    hidden: int
    plain_weight: bool  # contiguous and aligned to 16 bytes
    plain_rows: bool  # columns of hidden states contiguous
    capped: bool
    bias_grad: bool
    demand: Demand


class Targets(NamedTuple):
    """Targets in the order of the rows of hidden states that predict them."""

    target: Tensor  # [tokens] int64, -1 where a row does not count
    counted: Tensor  # [] how many do, in the dtype of the statistics
    one_or_nan: Tensor  # [] of that dtype: nan where an id is out of range
    inverse: Tensor  # [] one_or_nan / counted, or / 1 where none does


class Backend(Protocol):
    """Functions of a backend, a module."""

    name: str  # of BACKENDS

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
        rows: int | None = None,
    ) -> Targets:
        """Targets [...] in the order of the rows whose hidden states predict them, ``shift`` before them along the
        last dimension; ``mask`` [...] bool says which count, in addition to ``ignore_index``. ``dtype``: of the
        statistics. ``rows``: how many, where they are more than the targets; those behind do not count."""

    def read_fields(self, values: Sequence[Tensor], target: Tensor, shift: int, dtype: torch.dtype) -> Sequence[Tensor]:
        """Fields [...] likewise in the order of rows [tokens], in the dtype of statistics; 0 where a target is -1."""

    def store(self, layout: Layout) -> StoreName:
        """Name of the store of a call's chunks, where the softmax of some token is over the vocabulary."""

    def teacher_store(self, teacher: Teacher, store: StoreName) -> Literal["relative", "logits"] | None:
        """Form in which a dense teacher's logits are stored; None where the caller's are read in place."""

    def bounds_rows(self, store: StoreName) -> bool:
        """True where the store's matmuls can stop at a number of rows that only the device knows."""

    def traits(self, device: torch.device) -> dict[str, Any]:
        """Fields of ``Sizes``: ``half_products``, true where 16-bit operands are multiplied uncast; ``scratch``,
        bytes of elementwise tiles; where there are matmuls of ours ``gpu``, and how many ``multiprocessors`` it has."""

    def clean_rows(self, out: Tensor, source: Tensor, target: Tensor, order: Tensor | None) -> None:
        """Rows as the matmuls take them: contiguous, in the dtype of ``out``, 0 where a row's target is -1; the rows
        ``order`` of the source where one is given.

        The zeros keep whatever stands in a masked row (nan, inf) out of the weight's gradient, where multiplying by a
        gradient of 0 would not.
        """

    def store_of(self, head: Head, plan: Plan, tiled: bool) -> Store:
        """The store of a plan's chunks, or of ``tiled`` blocks where statistics are known."""

    def kept_sets(self, out: Kept, sets: Sets, target: Tensor, numbers: tuple[Tensor, Tensor]) -> None:
        """The sets that tokens keep as entries of the rows that predict them: ``out`` holds 0 for a bias. What is wrong
        with them makes both ``numbers`` nan."""

    def sets_store(self, head: Head, rows: SetRows, demand: Demand) -> SetStore:
        """The store of rows whose softmaxes are over sets of columns."""

    def merge_ranks(self, gathered: GatheredStats, out: RowStats) -> None:
        """Statistics of the vocabulary from those of its pieces, as ``parallel.merge.merge_ranks``."""

    def view_store(self, head: Head, demand: Demand, view: LogitsView) -> Store:
        """The store of a view of logits that exist. Of ``head`` only scale, cap and class weights are read."""

    def sum_rows(self, table: Tensor, parts: int, inverse: Tensor, one_or_nan: Tensor) -> tuple[Tensor, Tensor]:
        """Sums [rows] of a table [rows, tokens], of the first ``parts`` rows times ``inverse`` [], of the rest times
        ``one_or_nan`` []; and a copy of the first sum, 0-d."""

    def scale(self, source: Tensor, factors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """``source`` times one or two factors (0-d, on the device) in a new tensor of ``dtype``."""

    def scale_(self, sources: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
        """All of them times the factors in place."""


def check_name(name: str | None) -> None:
    if name is not None and not (isinstance(name, str) and name in BACKENDS):
        raise ValueError(f"backend must be None or one of {', '.join(map(repr, BACKENDS))}, got {name!r}")


def resolve(name: str | None, device: torch.device) -> Backend:
    """The backend called ``name``, or the device's default; never another one than was asked for."""
    check_name(name)
    if name is None:
        name = "triton" if device.type == "cuda" and has_triton() and has_kernels(device) else "torch"
    if name == "triton" and not has_triton():
        raise ValueError("backend='triton' needs the package triton (pip install triton); use backend='torch'")
    return importlib.import_module(f".{name}.backend", __package__)


def has_kernels(device: torch.device) -> bool:
    """True where our kernels are a GPU's default: NVIDIA's, and those of AMD's that they have been compiled for."""
    return torch.version.hip is None or gpu_of(device) is not None


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
