"""Arguments of kernels: tuples of torch tensors and numbers; nothing here needs Triton."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch


class Counted(NamedTuple):
    """Number of a call's rows that count, and a chunk's first row among them: rows behind are not computed."""

    number: torch.Tensor | None = None  # [] int64; None: all
    first_row: int = 0


ALL_ROWS = Counted()


class KeptEntries(NamedTuple):
    """Columns that rows keep, an entry for each; a row's stand together."""

    columns: torch.Tensor  # [n] int32, -1 for none
    begins: torch.Tensor  # [rows] int64
    ends: torch.Tensor  # [rows] int64, equal to begins for a row that keeps none
    target: torch.Tensor  # [rows] int64


class Transform(NamedTuple):
    """From raw logits to those that the softmax sees: ``row_scale * softcap * tanh(logit_scale * raw / softcap)``, each
    None where there is none."""

    logit_scale: float | None = None
    softcap: float | None = None
    row_scale: torch.Tensor | None = None  # [rows] fp32


PLAIN = Transform()


class Stored(NamedTuple):
    """Logits in a buffer: raw, or relative to the offsets of their strips."""

    logits: torch.Tensor  # [rows, columns], columns contiguous
    offset: torch.Tensor | None  # [strips, rows] fp32; then what follows is in the logits already
    bias: torch.Tensor | None = None
    transform: Transform = PLAIN

    def narrow(self, rows: slice) -> "Stored":
        """A slice of the rows, none of which has a scale of its own."""
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
    vectors: tuple[str, ...] = field(compare=False)  # their names
    words: tuple[str, ...] = field(compare=False)  # names of the values that losses, metrics and calls read
    row: Callable[["RowBlock"], tuple[torch.Tensor, ...]] | None = field(compare=False, repr=False)  # of all columns
    # vectors [pieces, rows] and the pieces' probabilities, which a list does not read
    merge: Callable[..., tuple[torch.Tensor, ...]] = field(compare=False, repr=False)
    # (vectors, start, rest and lse of the softmax, its ratio, columns) -> what losses read, by name
    values: Callable[..., dict[str, torch.Tensor]] = field(compare=False, repr=False)
    # (derivative by the first vector, the vector, the softmax's ratio) -> coefficients; None: there is no derivative
    slopes: Callable[..., dict[str, torch.Tensor]] | None = field(default=None, compare=False, repr=False)
    ids: tuple[str, ...] = field(default=(), compare=False)  # vectors that hold ids: int32, of a list int64
    of_softmax: bool = field(default=False, compare=False)  # there is one of each softmax, else one of the logits
    file: str = field(default="", compare=False)  # of its jit functions, where it has not its name
    of_all: str = field(default="", compare=False)  # what needs it, where sets of columns have none
    width: int = 0  # columns of a list

    def __repr__(self) -> str:  # as ranks name it where their calls differ
        return self.name


class RowBlock(NamedTuple):
    """Some rows of logits ``x`` [n, columns] and their exponentials."""

    x: torch.Tensor
    top: torch.Tensor  # [n] the largest
    z: torch.Tensor  # ratio (x - top)
    e: torch.Tensor  # exp(z)
    total: torch.Tensor  # [n] of e
    columns: torch.Tensor | None  # [n, columns] ids; None for those in order
    class_weights: torch.Tensor | None  # [columns]


class Shares(NamedTuple):
    """Probabilities of pieces of the vocabulary [pieces, rows] fp64, relative to the most probable one."""

    share: torch.Tensor
    log_share: torch.Tensor
    log_sum: torch.Tensor  # [rows]


class StatisticOutputs(NamedTuple):
    """Outputs of a statistic, [rows] each."""

    statistic: Statistic
    vectors: tuple[torch.Tensor, ...]


class Outputs(NamedTuple):
    """Outputs for statistics of a softmax over each row, [rows] fp32; None for those not wanted."""

    lse: torch.Tensor | None = None
    start: torch.Tensor | None = None  # always there, as rest
    rest: torch.Tensor | None = None
    logprob: torch.Tensor | None = None
    target_logit: torch.Tensor | None = None
    statistics: tuple[StatisticOutputs, ...] = ()

    @property
    def kinds(self) -> tuple[Statistic, ...]:
        return tuple([statistic for statistic, _ in self.statistics])

    @property
    def vectors(self) -> list[torch.Tensor]:
        """Those of all statistics."""
        return [vector for _, vectors in self.statistics for vector in vectors]


class Places(NamedTuple):
    """Places of a softmax's statistics among the numbers of a piece of the vocabulary."""

    start: int
    rest: int
    target: int
    vectors: tuple[int, ...]


class Softmax(NamedTuple):
    """A softmax of a gradient: ``log p = (ratio x - start) + rest`` over its first columns, and its term
    ``p (alpha + eta log p)``; [rows] fp32."""

    start: torch.Tensor
    rest: torch.Tensor
    alpha: torch.Tensor | None = None  # None for no term
    eta: torch.Tensor | None = None
    ratio: float | None = None  # None for 1
    columns: int | None = None  # None for all


class Terms(NamedTuple):
    """Vectors that a gradient is made of, but for a teacher's and class weights."""

    target: torch.Tensor  # [rows] int64, of the vocabulary
    target_logit: torch.Tensor  # [rows] fp32, as all that follow
    beta: torch.Tensor | None
    kappa: torch.Tensor | None
    softmaxes: tuple[Softmax, ...]  # the first over all columns at ratio 1


@dataclass(frozen=True)
class SumFunction:
    """The function ``f`` of a sum over the vocabulary ``sum_j f(log p_j, log q_j)``, elementwise: p the student's
    softmax, q a dense teacher's. Equal to another of the same ``name``.

    With the slope ``s_j = df / d log p_j``, up to a multiple of p_j, and ``total = sum_j s_j`` a coefficient c of the
    sum adds ``c (s_j - p_j total)`` to the gradient of a logit. ``total`` is a number that is known beforehand,
    ``"value"`` where it is the sum itself, ``"slopes"`` where it is another sum, ``"gradient"`` where it is that and
    ``gradient`` reads it, and None of a sum that takes no gradient.
    """

    name: str  # of its jit functions: NAME_terms and, with ``gradient``, NAME_gradient
    # (log_p, log_q, *numbers) -> f, s: of PyTorch, and the same of Triton
    terms: Callable[..., tuple[torch.Tensor, torch.Tensor]] = field(compare=False, repr=False)
    total: float | Literal["value", "slopes", "gradient"] | None = field(default="slopes", compare=False)
    gradient: Callable[..., torch.Tensor] | None = field(default=None, compare=False, repr=False)  # s - p total
    numbers: int = field(default=0, compare=False)  # that it takes
    is_paired: bool = field(default=True, compare=False)  # reads log q
    source: str = field(default="", compare=False, repr=False)  # of a user's jit function

    @property
    def has_total(self) -> bool:
        """True where the sum of the slopes is a vector of its own."""
        return self.total in ("slopes", "gradient")

    @property
    def is_early(self) -> bool:
        """True where no gradient waits for one of its sums."""
        return self.total is None or isinstance(self.total, float)


class SumOutputs(NamedTuple):
    """A sum over the vocabulary to be made, [rows] fp32 each."""

    function: SumFunction
    numbers: tuple[float, ...]
    value: torch.Tensor
    total: torch.Tensor | None  # of the slopes; None where not wanted


class SumTerm(NamedTuple):
    """A sum's term of a gradient."""

    function: SumFunction
    numbers: tuple[float, ...]
    view: int  # of the softmax p among those of the gradient
    coefficient: torch.Tensor | None  # [rows] fp32; None for no term
    total: torch.Tensor | None  # [rows] fp32 of the slopes, where the term reads it
    partial: torch.Tensor | None = None  # [row_programs, rows] fp32: the sum itself, each program's part; None if known


class TeacherSoftmax(NamedTuple):
    """A dense teacher's logits and their softmax."""

    stored: Stored
    start: torch.Tensor  # [rows] fp32: log q = (y - start) + rest
    rest: torch.Tensor
    columns: int  # of those of the student that the teacher has
