"""Records of torch tensors and numbers that launches of kernels take. Needs no Triton."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch


class CountedRows(NamedTuple):
    """How many rows of a call count, and where a chunk begins in the call. Rows that count come first; kernels compute
    nothing for the others."""

    num_counted: torch.Tensor | None = None  # [] int64, of the call; None: all rows count
    first_row: int = 0  # the chunk's first row in the call


ALL_ROWS = CountedRows()


class KeptEntries(NamedTuple):
    """The set of columns that each row's softmax is over. A set is a range of entries, one entry for each column; n is
    the number of all rows' entries."""

    columns: torch.Tensor  # [n] int32, -1 for an entry without a column
    begins: torch.Tensor  # [rows] int64: a row's first entry
    ends: torch.Tensor  # [rows] int64: the entry after a row's last; equal to begins for a row without a set
    target: torch.Tensor  # [rows] int64: the target's column, -1 where a row does not count


class Transform(NamedTuple):
    """The function from raw logits to those that the softmax sees:
    ``row_scale * softcap * tanh(logit_scale * raw / softcap)``. A number of None is left out of the formula."""

    logit_scale: float | None = None
    softcap: float | None = None
    row_scale: torch.Tensor | None = None  # [rows] fp32


PLAIN = Transform()


class Stored(NamedTuple):
    """Logits in a buffer. They are raw, or relative: fp16 numbers, in base 2, less an offset for each row and strip of
    columns, with bias and transform applied before."""

    logits: torch.Tensor  # [rows, columns], columns contiguous
    offset: torch.Tensor | None  # [strips, rows] fp32 of relative logits; None: logits are raw
    bias: torch.Tensor | None = None  # [columns] that raw logits still lack; None: they lack none
    transform: Transform = PLAIN  # that raw logits still lack

    def narrow(self, rows: slice) -> "Stored":
        """The stored logits of a slice of rows; for logits without a scale per row."""
        offset = None if self.offset is None else self.offset[:, rows]
        return self._replace(logits=self.logits[rows], offset=offset)


@dataclass(frozen=True, repr=False)
class Statistic:
    """A statistic of a row of logits ``x`` beside its softmax, held in vectors [rows]. Statistics of one name are
    equal.

    The record has its functions in PyTorch; ``kernels/statistics`` has its jit functions, NAME_add_piece and so on. A
    statistic with a ``width`` is a list: its first vector [rows, width] holds logits of ``width`` columns of each row,
    its second one their ids, unless the caller has these. A list has no ``row`` and no jit functions:
    stores pick it from their logits.
    """

    name: str
    vectors: tuple[str, ...] = field(compare=False)  # names of the vectors
    words: tuple[str, ...] = field(compare=False)  # names of the values that losses, metrics and calls read
    # complete rows of logits -> the vectors; None for a list
    row: Callable[["RowBlock"], tuple[torch.Tensor, ...]] | None = field(compare=False, repr=False)
    # vectors [pieces, rows] of pieces of the vocabulary and, but for a list, their ``Shares`` -> the whole row's
    # vectors
    merge: Callable[..., tuple[torch.Tensor, ...]] = field(compare=False, repr=False)
    # (vectors, lse_base, neg_log_sum and lse of the softmax, its ratio, columns) -> values that losses read, by name
    values: Callable[..., dict[str, torch.Tensor]] = field(compare=False, repr=False)
    # (the loss's derivative by the first vector, that vector, the softmax's ratio) -> ``Coefficients`` by name; None: a
    # loss has no derivative by the statistic
    slopes: Callable[..., dict[str, torch.Tensor]] | None = field(default=None, compare=False, repr=False)
    ids: tuple[str, ...] = field(default=(), compare=False)  # names of vectors of ids: int32, in a list int64
    # each softmax has its own; False: all have one, of the logits
    of_softmax: bool = field(default=False, compare=False)
    file: str = field(default="", compare=False)  # name of the file of its jit functions; "": the statistic's name
    # where softmaxes are over sets of columns, the error's name for what needs the statistic; "": sets have it too
    feature_over_vocabulary: str = field(default="", compare=False)
    width: int = 0  # of a list: number of columns of each row; 0: the statistic is no list

    def __repr__(self) -> str:  # as ranks name it where their calls differ
        return self.name


class RowBlock(NamedTuple):
    """Complete rows of logits and their exponentials, for a softmax of ``ratio * x``."""

    x: torch.Tensor  # [n, columns] logits
    top: torch.Tensor  # [n] the largest logit of each row
    z: torch.Tensor  # [n, columns] ratio * (x - top)
    e: torch.Tensor  # [n, columns] exp(z)
    total: torch.Tensor  # [n] the sum of e
    columns: torch.Tensor | None  # [n, columns] ids of the columns; None: 0, 1, 2, ...
    class_weights: torch.Tensor | None  # [columns]


class Shares(NamedTuple):
    """Probabilities of pieces of the vocabulary, relative to the most probable piece of a row, and their logarithms."""

    share: torch.Tensor  # [pieces, rows] fp64
    log_share: torch.Tensor  # [pieces, rows] fp64
    log_sum: torch.Tensor  # [rows] fp64: logarithm of the sum of shares


class StatisticOutputs(NamedTuple):
    """A statistic, and the tensors that a kernel writes its vectors to: [rows], or [strips, rows] in ``Strips``."""

    statistic: Statistic
    tensors: tuple[torch.Tensor, ...]  # one for each of ``statistic.vectors``


class SoftmaxOutputs(NamedTuple):
    """Tensors [rows] fp32 that a softmax's statistics are written to; None for a statistic that is not needed."""

    lse: torch.Tensor | None = None
    lse_base: torch.Tensor | None = None  # never None in a call, nor is ``neg_log_sum``: lse = lse_base - neg_log_sum
    neg_log_sum: torch.Tensor | None = None
    logprob: torch.Tensor | None = None
    target_logit: torch.Tensor | None = None
    statistics: tuple[StatisticOutputs, ...] = ()

    @property
    def kinds(self) -> tuple[Statistic, ...]:
        """The statistics beside the softmax."""
        return tuple([outputs.statistic for outputs in self.statistics])

    @property
    def statistic_tensors(self) -> list[torch.Tensor]:
        """The tensors of all statistics beside the softmax, in order."""
        return [tensor for outputs in self.statistics for tensor in outputs.tensors]


class MessageIndices(NamedTuple):
    """Indices of a softmax's statistics among the numbers per token that a rank sends for its piece of the
    vocabulary."""

    lse_base: int
    neg_log_sum: int
    target_logit: int
    vectors: tuple[int, ...]  # one index for each vector of ``SoftmaxOutputs.statistics``, in that order


class Softmax(NamedTuple):
    """A softmax p over the first ``columns`` columns of logits x, ``log p = (ratio x - lse_base) + neg_log_sum``, and
    the coefficients of its term ``p (alpha + eta log p)`` in a gradient. Vectors are [rows] fp32."""

    lse_base: torch.Tensor
    neg_log_sum: torch.Tensor
    alpha: torch.Tensor | None = None  # None for no term
    eta: torch.Tensor | None = None
    ratio: float | None = None  # None for 1
    columns: int | None = None  # None for all


class Terms(NamedTuple):
    """Vectors [rows] that a gradient of logits is made from, without those of a teacher and of sums."""

    target: torch.Tensor  # [rows] int64: the target's column in this rank's vocabulary, -1 where a row does not count
    target_logit: torch.Tensor  # [rows] fp32
    beta: torch.Tensor | None  # [rows] fp32: coefficient of the target's term; None for no term
    kappa: torch.Tensor | None  # [rows] fp32: coefficient of the class weights' term
    softmaxes: tuple[Softmax, ...]  # the first has all columns and ratio 1


@dataclass(frozen=True)
class SumFunction:
    """The elementwise function f of a sum over the vocabulary, ``sum_j f(log p_j, log q_j)``: p is the student's
    softmax, q a dense teacher's. Functions of equal ``name`` are equal.

    Let ``s_j = df / d log p_j``, up to a multiple of p_j, and ``T = sum_j s_j``. A coefficient c of the sum adds ``c
    (s_j - p_j T)`` to the gradient of logit j. ``total`` says what T is: a number: T itself; ``"value"``: the sum of f;
    ``"slopes"``: a vector of its own, the sum of s; ``"gradient"``: such a vector, and the function ``gradient``
    computes ``s_j - p_j T`` from it; None: the sum takes no gradient.
    """

    name: str  # prefix of its jit functions: NAME_terms and, with ``gradient``, NAME_gradient
    # in PyTorch: (log_p, log_q, *numbers) -> f, s; without log_q if not ``is_paired``
    terms: Callable[..., tuple[torch.Tensor, torch.Tensor]] = field(compare=False, repr=False)
    total: float | Literal["value", "slopes", "gradient"] | None = field(default="slopes", compare=False)
    # (log_p, log_q, T) -> s - p T
    gradient: Callable[..., torch.Tensor] | None = field(default=None, compare=False, repr=False)
    numbers: int = field(default=0, compare=False)  # how many numbers, besides the logarithms, the function takes
    is_paired: bool = field(default=True, compare=False)  # the function reads log q
    source: str = field(default="", compare=False, repr=False)  # source of the jit function of a user's; else ""

    @property
    def has_total(self) -> bool:
        """True where the sum of the slopes is a vector of its own."""
        return self.total in ("slopes", "gradient")

    @property
    def is_early(self) -> bool:
        """True where the gradient's term needs neither the sum of f nor that of s, so that one sweep makes both."""
        return self.total is None or isinstance(self.total, float)


class SumOutputs(NamedTuple):
    """A sum over the vocabulary that a kernel makes, and the tensors [rows] fp32 that it writes."""

    function: SumFunction
    numbers: tuple[float, ...]  # the function's
    value: torch.Tensor  # the sum of f
    total: torch.Tensor | None  # the sum of the slopes s; None if no gradient needs it


class SumTerm(NamedTuple):
    """The term of a sum over the vocabulary in a gradient of logits."""

    function: SumFunction
    numbers: tuple[float, ...]  # the function's
    view: int  # index of the softmax p in ``Terms.softmaxes``
    coefficient: torch.Tensor | None  # [rows] fp32; None: the gradient has no term of the sum
    total: torch.Tensor | None  # [rows] fp32 sum of the slopes; None: the term does not read it
    # output [row_programs, rows] fp32: each program's part of the sum of f; None: the kernel does not make the sum
    partial: torch.Tensor | None = None


class TeacherSoftmax(NamedTuple):
    """A dense teacher's logits y and their softmax q."""

    stored: Stored
    lse_base: torch.Tensor  # [rows] fp32: log q = (y - lse_base) + neg_log_sum, for logits y
    neg_log_sum: torch.Tensor  # [rows] fp32
    columns: int  # number of the student's columns that the teacher has
