"""The two ways to compute: Triton kernels, and torch operations for every device without them.

A backend is a module with three functions, ``Backend`` below; a ``Session`` holds one call's reused buffer.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ..core.stats import Coefficients, Demand, Head, Kept, Rows, RowStats, Sets, Teacher
from ..kernels.common.gpus import Gpu, gpu_of
from ..parallel.merge import GatheredStats
from ..program.plans import Plan
from ..program.sizes import Store
from .gradients import Gradients
from .kept import KeptColumns, KeptRows

BACKENDS = ("triton", "torch")


class Session(Protocol):
    """One call's buffer of logits and what is done in it.

    ``known_targets``: its ``stats`` leave the target's logit whole where ranks share the vocabulary, not each rank's
    part.
    ``pieces``: statistics that its last ``stats`` left of blocks of the vocabulary instead, [blocks, numbers, rows] as
    in ``GatheredStats``, its first row of the target's logit unwritten; or None.
    """

    known_targets: bool
    pieces: Tensor | None

    def clean_rows(self, rows: Rows, source: Tensor, order: Tensor | None, stats: RowStats | None) -> None:
        """``Backend.clean_rows`` of the source into ``rows.hidden``, before ``stats`` of these rows, which may have
        their targets' logits by it."""

    def exchange_target_logits(self, hidden: Tensor, target: Tensor, scale: Tensor | None, out: RowStats) -> None:
        """Where ranks share the vocabulary, every token's target logit in one message if ``stats`` would send each
        chunk's; ``hidden`` [tokens, hidden] as given, ``target`` and ``scale`` [tokens] beside it."""

    def hold_teacher(self, rows: Rows, out: RowStats) -> None:
        """Logits of a chunk of a teacher's rows, for calls of ``stats`` with ``Rows.held``, and their
        ``TEACHER_STATS``; not where ``Plan.teacher_last``."""

    def stats(self, rows: Rows, out: RowStats) -> None:
        """Logits of a chunk of rows into the buffer, and every statistic that ``out`` has room for, a teacher's beside
        the student apart, and a teacher's where ``Plan.teacher_last`` or ``Rows.held``."""

    def pair_stats(self, rows: Rows, out: RowStats) -> None:
        """Those, once ``out`` holds the softmaxes of both."""

    def add_gradients(
        self, at: slice, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients
    ) -> None:
        """Gradients of the chunk that ``stats`` saw last, rows ``at`` of the call, added to ``grads``. Where
        ``Plan.teacher_last``, ``stats`` receives a teacher's statistics, alone and beside the student."""

    def finish(self, at: slice, hidden: Tensor, target: Tensor, grads: Gradients, order: Tensor | None) -> None:
        """What was left over until rows ``at``, all of the call's where there are all, had been seen.

        ``hidden`` [rows, hidden] as given, ``order`` where in it each row stands, ``target`` -1 where its column is
        none of these.
        """

    def tile_grad(self, rows: Rows, tile: slice, stats: RowStats, coefficients: Coefficients) -> Tensor:
        """The gradient of the raw logits in a slice of the vocabulary, whose statistics are known [rows, tile]."""

    def tile_dhidden(self, dlogits: Tensor, rows: Rows, weight: Tensor, out: Tensor, first: bool) -> None:
        """``out = dlogits @ weight`` where ``first``, else added: rows' share of a tile [rows, hidden]."""

    def add_dweight(
        self, dlogits: Tensor, rows: Rows, operand: Tensor, out: Tensor, first: bool, gain: Tensor | None = None
    ) -> None:
        """``out = gain * dlogits.T @ operand`` where ``first``, else added."""


class Layout(NamedTuple):
    """What a backend's choice of store depends on."""

    gpu: Gpu | None  # whose own matmuls run
    dtype: torch.dtype  # of the matmuls
    hidden: int
    plain_weight: bool  # contiguous and aligned to 16 bytes
    plain_rows: bool  # columns of hidden states contiguous
    capped: bool
    bias_grad: bool
    demand: Demand


class Targets(NamedTuple):
    """Which row of hidden states predicts what."""

    target: Tensor  # [tokens] int64, -1 where a row does not count
    counted: Tensor  # [] how many do, in the dtype of the statistics
    one_or_nan: Tensor  # [] of that dtype: nan where an id is out of range
    inverse: Tensor  # [] one_or_nan / counted, or / 1 where none does


class VectorKernel(Protocol):
    """A function of numbers per token, launched for the tokens ``rows`` of inputs that hold those of all tokens: its
    outputs for the chunk into rows of ``chunk`` [outputs, tokens of the chunk], those for all tokens at the tokens'
    places into rows of ``table`` [outputs, tokens]."""

    def __call__(self, inputs: Sequence[Tensor], rows: slice, chunk: Tensor, table: Tensor) -> None: ...


class Backend(Protocol):
    """What the loop asks of a backend."""

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
        """Targets [...] beside the rows whose hidden states predict them, ``shift`` before them along the last
        dimension; ``mask`` [...] bool says which count, beside ``ignore_index``. ``dtype``: of the statistics.
        ``rows``: how many, where they are more than the targets; those behind do not count."""

    def read_fields(self, values: Sequence[Tensor], target: Tensor, shift: int, dtype: torch.dtype) -> Sequence[Tensor]:
        """Fields [...] likewise beside rows [tokens], in the statistics' dtype; 0 where the row's ``target`` is -1."""

    def store(self, layout: Layout) -> Store:
        """What this backend keeps of the logits between statistics and gradient, where some token has them all."""

    def teacher_store(self, teacher: Teacher, store: Store) -> Literal["relative", "logits"] | None:
        """What it keeps of a dense teacher's logits beside a student's; None where the caller's are read in place."""

    def bounds_rows(self, store: Store) -> bool:
        """Whether its matmuls can stop at a number of rows that only the device knows."""

    def traits(self, device: torch.device) -> dict[str, Any]:
        """What ``Sizes`` should know: ``half_products``, whether 16-bit operands are multiplied uncast; ``scratch``,
        bytes of elementwise tiles; where there are matmuls of ours ``gpu``, and how many ``multiprocessors`` it has."""

    def clean_rows(self, out: Tensor, source: Tensor, target: Tensor, order: Tensor | None) -> None:
        """Rows as the matmuls take them: contiguous, in the dtype of ``out``, 0 where a row's target is -1; the rows
        ``order`` of the source where one is given.

        The zeros keep whatever stands in a masked row (nan, inf) out of the weight's gradient, where multiplying by a
        gradient of 0 would not.
        """

    def session(self, head: Head, plan: Plan, tiled: bool) -> Session:
        """The buffer of a call's sweep over whole rows, or of its gradients' tiles where the plan recomputes."""

    def kept_sets(self, out: Kept, sets: Sets, target: Tensor, numbers: tuple[Tensor, Tensor]) -> None:
        """The sets that tokens keep as entries of the rows that predict them: ``out`` holds 0 for a bias. What is wrong
        with them makes both ``numbers`` nan."""

    def kept_columns(self, head: Head, rows: KeptRows, demand: Demand) -> KeptColumns:
        """What a call does with the rows whose softmax is over columns that they keep."""

    def merge_ranks(self, gathered: GatheredStats, out: RowStats) -> None:
        """Statistics of the whole vocabulary from its pieces', as ``parallel.merge.merge_ranks``."""

    def logits_stats(self, rows: Rows, head: Head, demand: Demand, out: RowStats, pairs: bool) -> None:
        """Statistics of logits that exist already: ``rows.hidden`` are they, [rows, vocab] with contiguous columns, of
        any floating-point dtype. Of ``head`` only scale, cap and class weights are read. ``pairs``: those of a teacher
        beside the student too."""

    def logits_pair_stats(self, rows: Rows, head: Head, demand: Demand, out: RowStats) -> None:
        """These, once ``out`` holds the softmaxes of both over all of the vocabulary."""

    def logits_grad(
        self, out: Tensor, rows: Rows, head: Head, demand: Demand, stats: RowStats, coefficients: Coefficients
    ) -> None:
        """Their gradient, 0 where a row does not count; ``out`` may be the logits themselves."""

    def vector_kernel(
        self,
        function: Callable[[list[Tensor]], tuple[list[Tensor], list[Tensor]]],
        inputs: Sequence[Tensor],
        token_dims: Sequence[int | None],
    ) -> VectorKernel | None:
        """One kernel of a function of inputs like these to outputs for a chunk and outputs for all tokens, each [n];
        None where it has none. ``token_dims``: the dimension of each input that tokens are counted along, or None."""

    def sum_rows(self, table: Tensor, parts: int, inverse: Tensor, one_or_nan: Tensor) -> tuple[Tensor, Tensor]:
        """Sums [rows] of a table [rows, tokens], of the first ``parts`` rows times ``inverse`` [], of the others times
        ``one_or_nan`` []; and the first of them once more, 0-d, in memory of its own."""

    def scale(self, source: Tensor, factors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """``source`` times one or two factors (0-d, on the device) in a new tensor of ``dtype``."""

    def scale_(self, sources: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
        """All of them times the factors in place."""


def check_name(name: str | None) -> None:
    if name is not None and not (isinstance(name, str) and name in BACKENDS):
        raise ValueError(f"backend must be None or one of {', '.join(map(repr, BACKENDS))}, got {name!r}")


def resolve(name: str | None, device: torch.device) -> Backend:
    """The backend called ``name``, or the device's own; never another one than was asked for."""
    check_name(name)
    if name is None:
        name = "triton" if device.type == "cuda" and has_triton() and has_kernels(device) else "torch"
    if name == "triton" and not has_triton():
        raise ValueError("backend='triton' needs the package triton (pip install triton); use backend='torch'")
    return importlib.import_module(f".{name}.backend", __package__)


def has_kernels(device: torch.device) -> bool:
    """Whether our kernels are a GPU's default: NVIDIA's, and those of AMD's that they have been compiled for."""
    return torch.version.hip is None or gpu_of(device) is not None


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
