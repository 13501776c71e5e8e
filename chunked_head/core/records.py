"""Records of torch tensors and numbers that launches of kernels take. Needs no Triton."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch


class Counted(NamedTuple):
    """The number of a call's rows that count, which come first, and a chunk's first row in the call. Later rows are not
    computed."""

    number: torch.Tensor | None = None  # [] int64; None: all rows count
    first_row: int = 0


ALL_ROWS = Counted()


class KeptEntries(NamedTuple):
    """The sets of columns that rows' softmaxes are over: n entries, those of a row together, one for each column."""

    columns: torch.Tensor  # [n] int32, -1 for an entry without a column
    begins: torch.Tensor  # [rows] int64: a row's first entry
    ends: torch.Tensor  # [rows] int64: the entry after a row's last; equal to begins for a row without a set
    target: torch.Tensor  # [rows] int64


class Transform(NamedTuple):
    """From raw logits to those that the softmax sees: ``row_scale * softcap * tanh(logit_scale * raw / softcap)``, each
    None where there is none."""

    logit_scale: float | None = None
    softcap: float | None = None
    row_scale: torch.Tensor | None = None  # [rows] fp32


PLAIN = Transform()


class Stored(NamedTuple):
    """Logits in a buffer: raw logits; or fp16 logits relative to an offset for each row and strip of columns."""

    logits: torch.Tensor  # [rows, columns], columns contiguous
    offset: torch.Tensor | None  # [strips, rows] fp32; None: raw. Relative logits have bias and transform
    bias: torch.Tensor | None = None
    transform: Transform = PLAIN

    def narrow(self, rows: slice) -> "Stored":
        """The stored logits of a slice of rows; for logits without a scale per row."""
        offset = None if self.offset is None else self.offset[:, rows]
        return self._replace(logits=self.logits[rows], offset=offset)


@dataclass(frozen=True, repr=False)
class Statistic:
    """A statistic of a row of logits ``x`` beside its softmax, in vectors [rows]. Equal to another of its name.

    Its functions in PyTorch are here, its jit functions in ``kernels/statistics``: NAME_add_piece and so on. One with a
    ``width`` is a list: logits of so many columns of each row in a first vector [rows, width], the columns' ids in a
    second one, or the caller's. Stores pick them from logits that are made, by no function of the statistic's.
    """

    name: str
    vectors: tuple[str, ...] = field(compare=False)  # names of the vectors
    words: tuple[str, ...] = field(compare=False)  # names of the values that losses, metrics and calls read
    row: Callable[["RowBlock"], tuple[torch.Tensor, ...]] | None = field(compare=False, repr=False)  # of all columns
    # vectors [pieces, rows] and the pieces' probabilities, which a list does not read
    merge: Callable[..., tuple[torch.Tensor, ...]] = field(compare=False, repr=False)
    # (vectors, start, rest and lse of the softmax, its ratio, columns) -> what losses read, by name
    values: Callable[..., dict[str, torch.Tensor]] = field(compare=False, repr=False)
    # (derivative by the first vector, the vector, the softmax's ratio) -> coefficients; None: there is no derivative
    slopes: Callable[..., dict[str, torch.Tensor]] | None = field(default=None, compare=False, repr=False)
    ids: tuple[str, ...] = field(default=(), compare=False)  # vectors that hold ids: int32, of a list int64
    of_softmax: bool = field(default=False, compare=False)  # True: one for each softmax; False: one of the logits
    file: str = field(default="", compare=False)  # file of its jit functions; "": the statistic's name
    of_all: str = field(default="", compare=False)  # the reader of a statistic that sets of columns lack, for an error
    width: int = 0  # columns of a list

    def __repr__(self) -> str:  # as ranks name it where their calls differ
        return self.name


class RowBlock(NamedTuple):
    """Some rows of logits ``x`` [n, columns] and their exponentials."""

    x: torch.Tensor
    top: torch.Tensor  # [n] the largest logit
    z: torch.Tensor  # ratio (x - top)
    e: torch.Tensor  # exp(z)
    total: torch.Tensor  # [n] the sum of e
    columns: torch.Tensor | None  # [n, columns] ids of the columns; None: 0, 1, 2, ...
    class_weights: torch.Tensor | None  # [columns]


class Shares(NamedTuple):
    """Probabilities of pieces of the vocabulary [pieces, rows] fp64, relative to the most probable one."""

    share: torch.Tensor
    log_share: torch.Tensor
    log_sum: torch.Tensor  # [rows]


class StatisticOutputs(NamedTuple):
    """A statistic, and the tensors [rows] that a kernel writes its vectors to."""

    statistic: Statistic
    vectors: tuple[torch.Tensor, ...]


class Outputs(NamedTuple):
    """Tensors [rows] fp32 that a softmax's statistics are written to; None for one that is not wanted."""

    lse: torch.Tensor | None = None
    start: torch.Tensor | None = None  # never None in a call, nor is ``rest``
    rest: torch.Tensor | None = None
    logprob: torch.Tensor | None = None
    target_logit: torch.Tensor | None = None
    statistics: tuple[StatisticOutputs, ...] = ()

    @property
    def kinds(self) -> tuple[Statistic, ...]:
        return tuple([statistic for statistic, _ in self.statistics])

    @property
    def vectors(self) -> list[torch.Tensor]:
        """The vectors of all statistics."""
        return [vector for _, vectors in self.statistics for vector in vectors]


class Places(NamedTuple):
    """Indices of a softmax's statistics among the numbers that a rank sends for its piece of the vocabulary."""

    start: int
    rest: int
    target: int
    vectors: tuple[int, ...]


class Softmax(NamedTuple):
    """A softmax in a gradient: ``log p = (ratio x - start) + rest`` over the first ``columns``, and its term
    ``p (alpha + eta log p)``. Vectors are [rows] fp32."""

    start: torch.Tensor
    rest: torch.Tensor
    alpha: torch.Tensor | None = None  # None for no term
    eta: torch.Tensor | None = None
    ratio: float | None = None  # None for 1
    columns: int | None = None  # None for all


class Terms(NamedTuple):
    """Vectors [rows] that a gradient of logits is made from; a teacher's and class weights are apart."""

    target: torch.Tensor  # [rows] int64: target as a column of the vocabulary
    target_logit: torch.Tensor  # [rows] fp32, as all that follow
    beta: torch.Tensor | None
    kappa: torch.Tensor | None
    softmaxes: tuple[Softmax, ...]  # the first has all columns and ratio 1


@dataclass(frozen=True)
class SumFunction:
    """The elementwise function f of a sum over the vocabulary, ``sum_j f(log p_j, log q_j)``: p is the student's
    softmax, q a dense teacher's. Functions of equal ``name`` are equal.

    Let ``s_j = df / d log p_j``, up to a multiple of p_j, and ``T = sum_j s_j``. A coefficient c of the sum adds
    ``c (s_j - p_j T)`` to the gradient of logit j. ``total`` says how T is found: a number is T itself; ``"value"``: T
    is the sum of f; ``"slopes"``: T is summed in a vector of its own; ``"gradient"``: likewise, and the function
    ``gradient`` reads it; None: the sum takes no gradient.
    """

    name: str  # prefix of its jit functions: NAME_terms and, with ``gradient``, NAME_gradient
    # (log_p, log_q, *numbers) -> f, s in PyTorch
    terms: Callable[..., tuple[torch.Tensor, torch.Tensor]] = field(compare=False, repr=False)
    total: float | Literal["value", "slopes", "gradient"] | None = field(default="slopes", compare=False)
    gradient: Callable[..., torch.Tensor] | None = field(default=None, compare=False, repr=False)  # s - p total
    numbers: int = field(default=0, compare=False)  # how many numbers it takes
    is_paired: bool = field(default=True, compare=False)  # reads log q
    source: str = field(default="", compare=False, repr=False)  # source of the jit function of a user's; else ""

    @property
    def has_total(self) -> bool:
        """True where the sum of the slopes is a vector of its own."""
        return self.total in ("slopes", "gradient")

    @property
    def is_early(self) -> bool:
        """True where the term of a gradient needs neither the sum of f nor that of the slopes."""
        return self.total is None or isinstance(self.total, float)


class SumOutputs(NamedTuple):
    """A sum over the vocabulary that a kernel makes, and the tensors [rows] fp32 that it writes."""

    function: SumFunction
    numbers: tuple[float, ...]
    value: torch.Tensor
    total: torch.Tensor | None  # the sum of the slopes; None if it is not wanted


class SumTerm(NamedTuple):
    """The term of a sum over the vocabulary in a gradient of logits."""

    function: SumFunction
    numbers: tuple[float, ...]
    view: int  # index of the softmax p in ``Terms.softmaxes``
    coefficient: torch.Tensor | None  # [rows] fp32; None: the sum has no term
    total: torch.Tensor | None  # [rows] fp32 sum of the slopes, if the term reads it
    partial: torch.Tensor | None = None  # [row_programs, rows] fp32: each program's part of the sum, if it is made here


class TeacherSoftmax(NamedTuple):
    """A dense teacher's logits and their softmax."""

    stored: Stored
    start: torch.Tensor  # [rows] fp32: log q = (y - start) + rest
    rest: torch.Tensor
    columns: int  # number of the student's columns that the teacher has
