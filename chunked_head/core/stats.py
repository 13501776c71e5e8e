"""What a row of logits is reduced to, and what its gradient is made from."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from ..kernels.common.cache import Cache

# of a dense teacher beside the student: sums over columns, made once the softmaxes of the whole vocabulary are known
PAIR_STATS = ("forward_kl", "reverse_kl", "teacher_entropy", "kl_mixture", "jsd", "tvd", "below", "overlap")


class View(NamedTuple):
    """A softmax over the logits: ``softmax(ratio * x[:columns])``, ``columns`` None for all of them."""

    ratio: float = 1.0
    columns: int | None = None


class Pairing(NamedTuple):
    """A dense teacher beside the student: which softmax of the student's, what is wanted, how the teacher is made."""

    view: int  # of Demand.views
    forward_kl: bool
    reverse_kl: bool
    entropy: bool
    tvd: bool
    overlap: bool
    top: bool  # the teacher's most probable id
    beta: float | None  # of the Jensen-Shannon divergence, or None
    columns: int  # that both vocabularies have
    last: bool = False  # no gradient depends on what is wanted: it may be made along with the gradient


class Demand(NamedTuple):
    """The statistics that a call needs, ``lse``, ``logprob`` and ``target_logit`` always among them, and what of them
    its gradient depends on."""

    views: tuple[View, ...] = (View(),)  # the first over all columns at ratio 1
    entropy: tuple[bool, ...] = (False,)  # for each view
    weighted_sum: bool = False
    top: bool = False
    columns: int = 0  # K: logits of so many columns of each row's own
    top_k: int = 0  # largest logits and their columns
    pairing: Pairing | None = None
    rank_one: bool = True  # the gradient is alpha p - beta 1[target] at the first view, and nothing else
    columns_alone: bool = False  # nothing but the logits of each row's own columns, up to a constant of the row
    values: int = 0  # numbers per token that losses and metrics make
    field_bytes: int = 0  # bytes per token of the fields that they read

    @property
    def one_sweep(self) -> bool:
        """Whether one look at each logit makes all statistics, so that a sweep need not keep what it has passed."""
        return len(self.views) == 1 and self.pairing is None and self.top_k == 0

    def of_columns(self, columns: int | None) -> "Demand":
        """The same of a rank's own columns; None: what ranks of other columns have in common."""
        # a second softmax over fewer columns goes with a teacher of fewer, which is refused
        views = tuple(view if view.columns is None else view._replace(columns=columns) for view in self.views)
        pairing = None if self.pairing is None else self.pairing._replace(columns=columns or 0)
        return self._replace(views=views, pairing=pairing)

    @property
    def ratio2(self) -> float:
        """Of the second softmax."""
        return self.views[1].ratio if len(self.views) > 1 else 1.0

    @property
    def vectors(self) -> int:
        """Statistics per token beside the first three."""
        two, pairing = len(self.views) > 1, self.pairing
        count = sum(self.entropy) + self.weighted_sum + 2 * self.top + self.columns + 3 * self.top_k + 4 * two
        return count + (12 if pairing is not None else 0)


def sent(demand: Demand) -> tuple[str, ...]:
    """Names of the statistics that a piece tells of, in order."""
    two = len(demand.views) > 1
    names = ["start", "rest", "target_logit"]
    names += ["start2", "rest2"] if two else []
    names += ["teacher_start", "teacher_rest"] if demand.pairing is not None else []
    names += ["entropy"] if demand.entropy[0] else []
    names += ["entropy2"] if two and demand.entropy[1] else []
    names += ["weighted_sum"] if demand.weighted_sum else []
    names += ["top", "argmax"] if demand.top else []
    names += ["teacher_top", "teacher_argmax"] if demand.pairing is not None and demand.pairing.top else []
    names += ["column_logits"] if demand.columns else []
    names += ["top_k_logits", "top_k_ids"] if demand.top_k else []
    return tuple(names)


def numbers_sent(demand: Demand) -> int:
    """How many numbers a piece tells of each row."""
    widths = {"column_logits": demand.columns, "top_k_logits": demand.top_k, "top_k_ids": demand.top_k}
    return sum(widths.get(name, 1) for name in sent(demand))


class Vectors:
    """Numbers of each token by name; None where they are not there."""

    def named(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if value is not None}

    def at(self, rows: slice) -> Self:
        """Those of a slice of rows, sharing memory."""
        return type(self)(**{name: value[rows] for name, value in self.named().items()})


@dataclass(frozen=True, eq=False)
class RowStats(Vectors):
    """Statistics of rows of logits ``x`` (after scale, cap and the call's temperature), fp32 (fp64 for fp64), [tokens].

    ``log p = (x - start) + rest`` without the rounding of lse, which is as large as the logits are.
    ``logprob``: of the target, 0 where a row does not count. ``target_logit``: anything where it does not.
    ``weighted_sum``: ``sum(omega * x)``, omega the class weights or 1. ``top``, ``argmax``: the largest logit and the
    first column that has it. ``column_logits`` [tokens, K]. ``*2``: at the second view. With a teacher ``q`` and
    ``m = beta q + (1 - beta) p``: ``kl_mixture`` is KL(p || m), ``below`` is ``sum p (1 - sign(p - q))``, ``overlap``
    ``sum min(p, q)``.
    """

    lse: Tensor
    start: Tensor
    rest: Tensor
    logprob: Tensor
    target_logit: Tensor
    entropy: Tensor | None = None
    weighted_sum: Tensor | None = None
    top: Tensor | None = None
    argmax: Tensor | None = None
    column_logits: Tensor | None = None
    top_k_logits: Tensor | None = None
    top_k_ids: Tensor | None = None
    lse2: Tensor | None = None
    start2: Tensor | None = None
    rest2: Tensor | None = None
    logprob2: Tensor | None = None
    entropy2: Tensor | None = None
    teacher_start: Tensor | None = None
    teacher_rest: Tensor | None = None
    teacher_top: Tensor | None = None
    teacher_argmax: Tensor | None = None
    forward_kl: Tensor | None = None
    reverse_kl: Tensor | None = None
    teacher_entropy: Tensor | None = None
    kl_mixture: Tensor | None = None
    jsd: Tensor | None = None
    tvd: Tensor | None = None
    below: Tensor | None = None
    overlap: Tensor | None = None

    @classmethod
    def empty(cls, tokens: int, demand: Demand, dtype: torch.dtype, device: torch.device) -> "RowStats":
        # memory of their own: a graph's operator returns them, whose outputs must not share any
        vectors = {name: torch.empty(tokens, dtype=dtype, device=device) for name in vector_names(demand)}
        if demand.top:
            vectors["argmax"] = torch.empty(tokens, dtype=torch.int32, device=device)
        if demand.pairing is not None and demand.pairing.top:
            vectors["teacher_argmax"] = torch.empty(tokens, dtype=torch.int32, device=device)
        if demand.columns:
            vectors["column_logits"] = torch.empty(tokens, demand.columns, dtype=dtype, device=device)
        if demand.top_k:
            vectors["top_k_logits"] = torch.empty(tokens, demand.top_k, dtype=dtype, device=device)
            vectors["top_k_ids"] = torch.empty(tokens, demand.top_k, dtype=torch.int64, device=device)
        return cls(**vectors)

    def at(self, rows: slice) -> Self:
        return self if rows.start == 0 and rows.stop == self.lse.shape[0] else super().at(rows)

    def zero_(self) -> None:
        for value in self.named().values():
            value.zero_()


NAMES: Cache[Demand, tuple[str, ...]] = Cache(256)


def vector_names(demand: Demand) -> tuple[str, ...]:
    """Of the statistics that are one floating-point number per token."""
    return NAMES.made(demand, lambda: names_of(demand))


def names_of(demand: Demand) -> tuple[str, ...]:
    two, pairing = len(demand.views) > 1, demand.pairing
    wanted = {
        "entropy": demand.entropy[0], "weighted_sum": demand.weighted_sum, "top": demand.top,
        "lse2": two, "start2": two, "rest2": two, "logprob2": two, "entropy2": two and demand.entropy[1],
    }  # fmt: skip
    if pairing is not None:
        wanted |= {
            "teacher_start": True, "teacher_rest": True, "teacher_top": pairing.top, "forward_kl": pairing.forward_kl,
            "reverse_kl": pairing.reverse_kl, "teacher_entropy": pairing.entropy,
            "kl_mixture": pairing.beta is not None, "jsd": pairing.beta is not None, "tvd": pairing.tvd,
            "below": pairing.tvd or pairing.overlap, "overlap": pairing.overlap,
        }  # fmt: skip
    always = ("lse", "start", "rest", "logprob", "target_logit")
    return *always, *(name for name, here in wanted.items() if here)


@dataclass(frozen=True, eq=False)
class Coefficients(Vectors):
    """Factors of the terms of the identity in ``kernels/gradients``, each [tokens]; None where nothing asks for a term.

    0 where a row does not count. ``columns`` [tokens, K] is what each of a row's own columns gets beside.
    """

    alpha: Tensor | None = None
    beta: Tensor | None = None
    eta: Tensor | None = None
    kappa: Tensor | None = None
    alpha2: Tensor | None = None
    eta2: Tensor | None = None
    gamma: Tensor | None = None
    rho: Tensor | None = None
    tau: Tensor | None = None
    theta: Tensor | None = None
    columns: Tensor | None = None

    def times(self, factor: Tensor) -> "Coefficients":
        """Times a 0-d factor."""
        return Coefficients(**{name: value * factor for name, value in self.named().items()})


@dataclass(frozen=True, eq=False)
class Head:
    """The operand of every matmul and what makes logits of the products: ``x = cap(scale * (h @ weight.T + bias))``.

    The call's temperature is in scale and cap: ``cap tanh(s r / cap) / T = (cap / T) tanh((s / T) r / (cap / T))``. One
    per token is ``Rows.scale``.
    """

    weight: Tensor  # [vocab, hidden]
    bias: Tensor | None  # [vocab]
    class_weights: Tensor | None  # [vocab] fp32 or fp64
    logit_scale: float = 1.0
    softcap: float | None = None
    add_targets: Callable[[Tensor], None] | None = None  # over ranks that hold other columns: target logits, in place
    scaled: ClassVar[bool] = True  # by the rows' scale

    def columns(self, tile: slice) -> "Head":
        """The head of a slice of the vocabulary, sharing memory."""
        return replace(
            self,
            weight=self.weight[tile],
            bias=None if self.bias is None else self.bias[tile],
            class_weights=None if self.class_weights is None else self.class_weights[tile],
        )


@dataclass(frozen=True, eq=False)
class Teacher:
    """A dense teacher: its logits, or its hidden states and head; its temperature is in scale and cap, or its rows'."""

    logits: Tensor | None  # [tokens, vocabulary], raw
    hidden: Tensor | None  # [tokens, width]
    weight: Tensor | None  # [vocabulary, width]
    bias: Tensor | None  # [vocabulary]
    logit_scale: float = 1.0
    softcap: float | None = None
    scaled: bool = False  # by the rows' scale, as the student's
    dtype: torch.dtype | None = None  # of the matmul, where autocast gives one; else that of hidden states and head

    @property
    def casts(self) -> bool:
        return self.weight is not None and self.dtype not in (None, self.weight.dtype)

    def cast(self) -> "Teacher":
        """With its head in the dtype of the matmul."""
        if self.dtype is None or self.weight is None:
            return self
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return replace(self, weight=self.weight.to(self.dtype), bias=bias)

    def rows(self, rows: slice) -> "Teacher":
        given: dict[str, Any] = {"logits": self.logits, "hidden": self.hidden}
        return replace(self, **{name: value[rows] for name, value in given.items() if value is not None})

    @property
    def tensors(self) -> list[Tensor]:
        return [t for t in (self.logits, self.hidden, self.weight, self.bias) if t is not None]

    def without_tensors(self) -> "Teacher":
        """The same with empty tensors in place of its own."""
        return self.with_tensors([t.new_empty(0) for t in self.tensors])

    def with_tensors(self, tensors: Sequence[Tensor]) -> "Teacher":
        names = [name for name in ("logits", "hidden", "weight", "bias") if getattr(self, name) is not None]
        given: dict[str, Any] = dict(zip(names, tensors, strict=False))
        return replace(self, **given)


@dataclass(frozen=True, eq=False)
class Kept:
    """Sets of columns that rows keep: the softmax of such a row is over its set, and no matmul makes its logits.

    A row's entries stand together; there are more of them than columns are kept.
    """

    starts: Tensor  # [tokens] int64: where a row's entries begin
    ends: Tensor  # [tokens] int64: and end, where they begin if its softmax is over the vocabulary
    rows: Tensor  # [n] int64, -1 for none
    columns: Tensor  # [n] int32, -1 where an entry is none: named twice, or another rank's
    everywhere: bool  # every row that counts has a set
    bias: Tensor | None = None  # [n] added to the entries' logits, before a temperature per token

    @classmethod
    def columns_of(cls, columns: Tensor) -> "Kept":
        """Of each row's own columns [tokens, K], as they stand: no softmax is over them."""
        tokens, each = columns.shape
        starts = torch.arange(0, tokens * each, each, device=columns.device)
        rows = torch.arange(tokens, device=columns.device).repeat_interleave(each, output_size=tokens * each)
        return cls(starts, starts + each, rows, columns.reshape(-1).int(), True)

    @functools.cached_property
    def has(self) -> Tensor:
        """[tokens] which rows have a set."""
        return self.ends > self.starts


class Sets(NamedTuple):
    """Sets of ids as tokens keep them."""

    ids: Tensor  # [n] int, -1 for none, contiguous; those behind the last offset are ``BEHIND``
    offsets: Tensor | None  # [tokens + 1] int64: where a token's ids begin; None where each has as many
    bias: Tensor | None  # [n] of their logits
    length: int  # of the dimension along which rows predict tokens
    shift: int  # how far before them
    vocab: int
    everywhere: bool  # whether a row that counts and keeps no set is wrong


class Rows(NamedTuple):
    """The rows of a chunk as a store takes them."""

    hidden: Tensor  # [rows, hidden], clean once the store has filled them; of logits that exist [rows, vocab]
    target: Tensor  # [rows] int64, -1 where a row does not count
    columns: Tensor | None = None  # [rows, K] int64, -1 for none
    scale: Tensor | None = None  # [rows] of the statistics' dtype: what their logits are multiplied by; None for 1
    teacher: Teacher | None = None
    counted: Tensor | None = None  # [] int64: how many of the call's rows count, those first; None: any of them may
    first: int = 0  # of these rows within the call
    source: Tensor | None = None  # [rows, hidden] as given
    order: Tensor | None = None  # [rows] int64: where in ``source`` each row is; None: in its order

    @property
    def tokens(self) -> slice:
        """These rows within the call."""
        return slice(self.first, self.first + self.target.shape[0])

    def at(self, rows: slice) -> "Rows":
        """A slice of the rows, sharing memory."""
        columns, scale = (None if of is None else of[rows] for of in (self.columns, self.scale))
        teacher = None if self.teacher is None else self.teacher.rows(rows)
        first = self.first + rows.start
        return Rows(self.hidden[rows], self.target[rows], columns, scale, teacher, self.counted, first)
