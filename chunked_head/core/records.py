"""Records of torch tensors and numbers that launches of kernels take. Needs no Triton."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Generic, Literal, NamedTuple, TypeVar

import torch

Vector = TypeVar("Vector")


# The number of a call's rows that count, [] int64, None for all; and the index in the call of a chunk's first row. Rows
# that count come first. Kernels compute nothing for later rows
CountedRows = tuple[torch.Tensor | None, int]
ALL_ROWS: CountedRows = None, 0


@dataclass(frozen=True, eq=False)
class ColumnSets:
    """The set of columns of each row (``kept_ids``). The softmax of a row with a set is over the columns of the set.

    The sets of all rows of a call have n entries. An entry is a column, or no column (-1). A row's set is a range of
    entries.
    """

    begins: torch.Tensor  # [rows] int64: index of a row's first entry
    ends: torch.Tensor  # [rows] int64: index after a row's last entry; equal to ``begins`` for a row without a set
    rows: torch.Tensor  # [n] int64: index in the call of the entry's row; -1 for no row
    columns: torch.Tensor  # [n] int32: the entry's column; -1 for a repeated column, or a column of another rank
    everywhere: bool  # True: every row that counts has a set
    bias: torch.Tensor | None = None  # [n] added to the entries' logits, before a temperature per token

    @classmethod
    def columns_of(cls, columns: torch.Tensor) -> "ColumnSets":
        """Returns sets of K columns each, from ``columns`` [rows, K]: row i has the set ``columns[i]``, and the call
        reads no other logits."""
        row_count, set_size = columns.shape
        begins = torch.arange(0, row_count * set_size, set_size, device=columns.device)
        rows = torch.arange(row_count, device=columns.device).repeat_interleave(set_size, output_size=columns.numel())
        return cls(begins, begins + set_size, rows, columns.reshape(-1).int(), True)

    @functools.cached_property
    def has_set(self) -> torch.Tensor:
        """[rows] bool: True for a row that has a set."""
        return self.ends > self.begins

    def narrow(self, rows: slice) -> "ColumnSets":
        """Returns the sets of a slice of rows, among the same entries."""
        return replace(self, begins=self.begins[rows], ends=self.ends[rows])


class Transform(NamedTuple):
    """The function from raw logits to the softmax's logits:
    ``row_scale * softcap * tanh(logit_scale * raw / softcap)``. A field of None is left out of the formula."""

    logit_scale: float | None = None
    softcap: float | None = None
    row_scale: torch.Tensor | None = None  # [rows] fp32


PLAIN = Transform()


class Stored(NamedTuple):
    """Logits in a buffer, raw or relative. Raw logits still lack bias and transform. For logits x after both, relative
    logits are ``(x - offset) / log(2)`` in fp16, with an offset for each row of a strip of columns."""

    logits: torch.Tensor  # [rows, columns], columns contiguous
    offset: torch.Tensor | None  # [strips, rows] fp32 of relative logits; None: logits are raw
    bias: torch.Tensor | None = None  # [columns], to be added to raw logits; None: no bias
    transform: Transform = PLAIN  # to be applied to raw logits after the bias

    def narrow(self, rows: slice) -> "Stored":
        """The logits of a slice of rows, sharing memory. The transform must have no ``row_scale``."""
        offset = None if self.offset is None else self.offset[:, rows]
        return self._replace(logits=self.logits[rows], offset=offset)


@dataclass(frozen=True, repr=False)
class Statistic:
    """A statistic, vectors [rows], of rows of logits ``x`` beside their softmax: the functions in PyTorch. Jit
    functions NAME_add_piece and so on are in ``kernels/statistics``. Statistics of equal name and width are equal.

    A statistic with a ``width`` is a list of logits. Its first vector [rows, width] holds the logits of ``width``
    columns of each row. Its second vector holds the columns' ids, unless the caller names the columns. Stores pick a
    list from their logits, so that it has no ``row`` and no jit functions."""

    name: str
    vectors: tuple[str, ...] = field(compare=False)  # names of the vectors
    words: tuple[str, ...] = field(compare=False)  # names of the values that losses, metrics and calls read
    # complete rows of logits -> the vectors; None for a list
    row: Callable[["RowBlock"], tuple[torch.Tensor, ...]] | None = field(compare=False, repr=False)
    # vectors [pieces, rows] of pieces of the vocabulary and, but for a list, p and log p of the pieces, [pieces, rows]
    # fp64 -> vectors of the vocabulary
    merge: Callable[..., tuple[torch.Tensor, ...]] = field(compare=False, repr=False)
    # (vectors, ``LogSums`` of the softmax, its ratio, its number of columns) -> values that losses read, by name
    values: Callable[..., dict[str, torch.Tensor]] = field(compare=False, repr=False)
    # (the loss's derivative by the first vector, the first vector, the softmax's ratio) -> ``Coefficients`` by name;
    # None: a loss has no derivative by the statistic
    slopes: Callable[..., dict[str, torch.Tensor]] | None = field(default=None, compare=False, repr=False)
    ids: tuple[str, ...] = field(default=(), compare=False)  # names of vectors of ids: int32, in a list int64
    of_softmax: bool = field(default=False, compare=False)  # each softmax has its own; False: all softmaxes share it
    file: str = field(default="", compare=False)  # name of the file of its jit functions; "": the statistic's name
    # for the error where softmaxes are over sets of columns: what needs the statistic; "": sets have the statistic
    feature_over_vocabulary: str = field(default="", compare=False)
    width: int = 0  # of a list: number of columns of each row; 0: the statistic is no list

    def __repr__(self) -> str:  # in errors of ranks whose calls differ
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


class SoftmaxVectors(NamedTuple, Generic[Vector]):
    """The vectors of a softmax and of the statistics beside it: tensors [rows] fp32 to write, the vectors' names, or
    the vectors' indices in a rank's message. None for a vector that is not needed."""

    lse: Vector | None  # lse_base - neg_log_sum
    lse_base: Vector  # the largest logit, or a number near it, which log-probabilities subtract first
    neg_log_sum: Vector
    logprob: Vector | None = None
    target_logit: Vector | None = None
    statistics: tuple[tuple[Statistic, tuple[Vector, ...]], ...] = ()  # each statistic with its vectors

    @property
    def kinds(self) -> tuple[Statistic, ...]:
        """The statistics beside the softmax."""
        return tuple([statistic for statistic, _ in self.statistics])

    @property
    def statistic_vectors(self) -> list[Vector]:
        """The vectors of all statistics beside the softmax, in order."""
        return [vector for _, vectors in self.statistics for vector in vectors]


class Softmax(NamedTuple):
    """A softmax p of logits x, ``log p = (ratio x - lse_base) + neg_log_sum``, and the coefficients of its term ``p
    (alpha + eta log p)`` in a gradient. Vectors are [rows] fp32."""

    lse_base: torch.Tensor  # near the largest logit; is subtracted first
    neg_log_sum: torch.Tensor
    alpha: torch.Tensor | None = None  # None for no term
    eta: torch.Tensor | None = None  # None for a term without log p
    ratio: float | None = None  # None for 1
    columns: int | None = None  # number of columns that the softmax is over, the first; None for all


# a dense teacher's logits and their softmax q, whose ``columns`` are those of the student's that the teacher has
TeacherSoftmax = tuple[Stored, Softmax]


class Terms(NamedTuple):
    """The vectors [rows] from which a gradient of logits is made, without those of a teacher and of sums over the
    vocabulary."""

    target: torch.Tensor  # [rows] int64: the target's column in this rank's vocabulary, -1 where a row does not count
    target_logit: torch.Tensor  # [rows] fp32
    beta: torch.Tensor | None  # [rows] fp32: coefficient of the target's term; None for no term
    kappa: torch.Tensor | None  # [rows] fp32: coefficient of the class weights' term
    softmaxes: tuple[Softmax, ...]  # the first has all columns and ratio 1


@dataclass(frozen=True)
class SumFunction:
    """The elementwise function f of a sum over the vocabulary, ``sum_j f(log p_j, log q_j)``: p is the student's
    softmax, q a dense teacher's. Functions of equal ``name`` are equal.

    The slope is ``s_j = df / d log p_j``, to which any multiple of p_j may be added, and ``T = sum_j s_j``. A
    coefficient c of the sum adds ``c (s_j - p_j T)`` to the gradient of logit j. The field ``total`` is T if T is the
    same number for all rows; ``"value"`` if T is the sum of f; ``"slopes"`` if a vector holds T; ``"gradient"`` if a
    vector holds T and the function ``gradient`` computes ``s_j - p_j T`` from T; None if the sum takes no gradient.
    """

    name: str  # prefix of its jit functions: NAME_terms and, with ``gradient``, NAME_gradient
    # in PyTorch: (log_p, log_q, *numbers) -> f, s
    terms: Callable[..., tuple[torch.Tensor, torch.Tensor]] = field(compare=False, repr=False)
    total: float | Literal["value", "slopes", "gradient"] | None = field(default="slopes", compare=False)
    # (log_p, log_q, T) -> s - p T
    gradient: Callable[..., torch.Tensor] | None = field(default=None, compare=False, repr=False)
    numbers: int = field(default=0, compare=False)  # how many numbers the function takes besides the logarithms
    is_paired: bool = field(default=True, compare=False)  # the function reads log q
    source: str = field(default="", compare=False, repr=False)  # of a user's jit function; "": the function is ours

    @property
    def has_total(self) -> bool:
        """True if a vector holds the sum of the slopes."""
        return self.total in ("slopes", "gradient")

    @property
    def is_early(self) -> bool:
        """True if the gradient's term reads no sum over the vocabulary, so that one sweep makes sum and gradient."""
        return self.total is None or isinstance(self.total, float)


class VocabularySum(NamedTuple):
    """A sum over the vocabulary that a loss or metric reads."""

    function: SumFunction
    numbers: tuple[float, ...] = ()  # arguments of the function
    view: int = 0  # index of the sum's softmax in ``Demand.views``; set in ``Demand.sums`` only
    is_differentiated: bool = False  # a gradient of the call has a term of the sum

    @property
    def has_total(self) -> bool:
        """True if the gradient needs the sum of the slopes, in the vector ``sum<i>_total``."""
        return self.is_differentiated and self.function.has_total


class SumVectors(NamedTuple, Generic[Vector]):
    """A sum over the vocabulary, and the vectors [rows] fp32 of a kernel that makes the sum or its term of a gradient:
    tensors, or None for a vector that the kernel lacks. In the key of a kernel's code: True for a vector that the
    kernel has, else False. In a kernel of gradients several programs share a row, and ``value`` is [programs, rows]."""

    function: SumFunction
    numbers: tuple[float, ...]  # arguments of the function; () in a key
    view: int  # index of the softmax p among the kernel's
    value: Vector  # output: the sum of f
    total: Vector  # sum of the slopes: with a coefficient an input, else an output
    coefficient: Vector  # of the sum's term in the gradient
