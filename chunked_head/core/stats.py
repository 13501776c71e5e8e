"""Vectors of numbers per token: statistics of logits, coefficients of gradients, and values moved by ``shift``."""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from .memory import RECORDERS, Cache, recorder
from .records import Statistic, SumFunction

SUFFIX = ("", "2")  # by view: the end of the names of a softmax's statistics and coefficients
HEAVY_VECTORS = ("heavy_ids", "heavy_logits")  # statistics that stores read, and no loss


class View(NamedTuple):
    """A softmax over the logits: ``softmax(ratio * x[:columns])``, ``columns`` None for all of them."""

    ratio: float = 1.0
    columns: int | None = None


class Pairing(NamedTuple):
    """A dense teacher paired with the student's softmax."""

    view: int  # index of the student's softmax in ``Demand.views``
    columns: int  # number of columns that both vocabularies have
    statistics: tuple[Statistic, ...] = ()  # statistics of the teacher's logits
    last: bool = False  # no gradient depends on sums over both softmaxes: these are made along with the gradient


class VocabularySum(NamedTuple):
    """A sum over the vocabulary at one softmax. Number i of ``Demand.sums`` has the vector ``sum<i>``."""

    function: SumFunction
    numbers: tuple[float, ...]
    view: int
    is_differentiated: bool = False

    @property
    def has_total(self) -> bool:
        """True where the gradient needs the sum of the slopes, the vector ``sum<i>_total``."""
        return self.is_differentiated and self.function.has_total


class Demand(NamedTuple):
    """The statistics that a call needs, for its results and its gradient, besides ``lse``, ``logprob`` and
    ``target_logit``."""

    views: tuple[View, ...] = (View(),)  # the softmaxes; the first has all columns and ratio 1
    statistics: tuple[tuple[Statistic, ...], ...] = ((),)  # for each view
    lists: tuple[Statistic, ...] = ()  # logits of some columns of each row
    heavy: int = 0  # most ids of a row whose exact logits replace those of e4m3 operands; 0 where none do
    pairing: Pairing | None = None
    sums: tuple[VocabularySum, ...] = ()  # sums over the vocabulary, made once the softmaxes are known
    rank_one: bool = True  # the gradient of a row is alpha p - beta 1[target], at the first view
    columns_only: bool = False  # only logits of each row's own columns are needed, up to a constant per row
    values: int = 0  # numbers per token that losses and metrics make
    field_bytes: int = 0  # bytes per token of the fields that they read

    @property
    def one_sweep(self) -> bool:
        """True where one pass makes all statistics, so that a sweep need not store logits."""
        return len(self.views) == 1 and self.pairing is None and not self.sums and not self.searches_logits

    @property
    def searches_logits(self) -> bool:
        """True where the columns of a list are found in the logits."""
        return any(statistic.ids for statistic in self.lists)

    @property
    def columns(self) -> int:
        """K: columns that each row's caller names for a list."""
        return sum(statistic.width for statistic in self.lists if not statistic.ids)

    def of_columns(self, columns: int | None) -> "Demand":
        """The demand of a rank with ``columns`` columns; None: the part that is equal on ranks with different numbers
        of columns."""
        # a view with fewer columns than the vocabulary takes the rank's number; ranks refuse a smaller teacher
        views = tuple(view if view.columns is None else view._replace(columns=columns) for view in self.views)
        pairing = None if self.pairing is None else self.pairing._replace(columns=columns or 0)
        return self._replace(views=views, pairing=pairing)

    @property
    def numbers_per_token(self) -> int:
        """Number of 4-byte numbers per token that all statistics take."""
        forms = layout_of(self).forms.values()
        return sum((form.numbers or 1) * (2 if form.ids == torch.int64 else 1) for form in forms)


class Form(NamedTuple):
    """The shape and dtype of a statistic."""

    numbers: int | None = None  # K for a shape [rows, K]; None for [rows]
    ids: torch.dtype | None = None  # the dtype of ids; None: floating-point numbers
    sent: bool = True  # ranks that share the vocabulary send it to each other


class Names(NamedTuple):
    """Names of a softmax's vectors, in the fields of ``records.Outputs``; also of vectors that the call does not
    make."""

    lse: str
    start: str
    rest: str
    logprob: str
    target_logit: str
    statistics: tuple[tuple[Statistic, tuple[str, ...]], ...]


class Layout(NamedTuple):
    """The vectors of a demand's statistics."""

    forms: dict[str, Form]  # by name, in the order of ranks' messages
    places: dict[str, int]  # of those that ranks send, among the numbers of a message
    softmaxes: tuple[Names, ...]  # of each view, then of a teacher


OF_DEMAND: Cache[Demand, Layout] = Cache(256)


@functools.cache
def vectors_at(statistic: Statistic, view: int) -> tuple[str, ...]:
    """Names of a statistic's vectors: with the view's suffix, unless the statistic is of the logits."""
    return tuple([name + SUFFIX[view] for name in statistic.vectors]) if statistic.of_softmax else statistic.vectors


def layout_of(demand: Demand) -> Layout:
    return OF_DEMAND.get_or_make(demand, lambda: layout_anew(demand))


def layout_anew(demand: Demand) -> Layout:
    forms, places, place = forms_anew(demand), dict[str, int](), 0
    for name, form in forms.items():
        if form.sent:
            places[name] = place
            place += form.numbers or 1
    return Layout(forms, places, softmaxes_anew(demand))


def softmaxes_anew(demand: Demand) -> tuple[Names, ...]:
    softmaxes, pairing = list[Names](), demand.pairing
    for view, statistics in enumerate(demand.statistics):
        names = [name + SUFFIX[view] for name in Names._fields[:-1]]
        softmaxes.append(Names._make([*names, tuple([(s, vectors_at(s, view)) for s in statistics])]))
    if pairing is not None:
        of_teacher = tuple([(s, tuple([f"teacher_{name}" for name in s.vectors])) for s in pairing.statistics])
        softmaxes.append(Names("", "teacher_start", "teacher_rest", "", "", of_teacher))
    return tuple(softmaxes)


def forms_anew(demand: Demand) -> dict[str, Form]:
    number, local, pairing, forms = Form(), Form(sent=False), demand.pairing, dict[str, Form]()

    def add_forms(names: Iterable[str], form: Form = number) -> None:
        forms.update(dict.fromkeys(names, form))

    def add_vectors(statistic: Statistic, names: Sequence[str]) -> None:
        id_dtype = torch.int64 if statistic.width else torch.int32
        for name, vector in zip(names, statistic.vectors, strict=True):
            add_forms([name], Form(statistic.width or None, id_dtype if vector in statistic.ids else None))

    add_forms(["target_logit"])
    for view, statistics in enumerate(demand.statistics):
        add_forms([name + SUFFIX[view] for name in ("start", "rest")])
        add_forms([name + SUFFIX[view] for name in ("lse", "logprob")], local)
        for statistic in statistics:
            add_vectors(statistic, vectors_at(statistic, view))
    for statistic in demand.lists:
        add_vectors(statistic, statistic.vectors)
    if demand.heavy:
        for name, ids in zip(HEAVY_VECTORS, (torch.int32, None), strict=True):
            add_forms([name], Form(demand.heavy, ids, sent=False))
    if pairing is not None:
        add_forms(["teacher_start", "teacher_rest"])
        for statistic in pairing.statistics:
            add_vectors(statistic, [f"teacher_{name}" for name in statistic.vectors])
    add_forms(names_of_sums(demand), local)
    return forms


def names_of_sums(demand: Demand) -> list[str]:
    """Names of the vectors that add up over pieces of the vocabulary once softmaxes are known."""
    return [name for i, s in enumerate(demand.sums) for name in (f"sum{i}", f"sum{i}_total")[: 1 + s.has_total]]


class Vectors:
    """Vectors of numbers per token, as attributes and by name; None for a vector that is not made."""

    by_name: dict[str, Tensor]  # those that there are; shared, not to be changed

    @classmethod
    def from_dict(cls, vectors: dict[str, Tensor]) -> Self:
        self = cls()
        vars(self).update(vectors, by_name=vectors)
        return self

    def narrow(self, rows: slice) -> Self:
        """The vectors of a slice of rows, sharing memory."""
        return self.from_dict({name: value[rows] for name, value in self.by_name.items()})


class RowStats(Vectors):
    """Statistics of rows of logits ``x`` (after scale, cap and the call's temperature), fp32 (fp64 for fp64), [tokens].

    ``log p = (x - start) + rest`` without the rounding of lse, which is as large as the logits are.
    ``logprob``: of the target, 0 where a row does not count. ``target_logit``: anything where it does not.
    ``heavy_ids`` [tokens, HEAVY] int32: columns in ascending order, -1 behind the last.
    By name alone: vectors of ``Demand.statistics`` and, [tokens, K], of ``Demand.lists``; those of a further view's
    softmax, with its ``SUFFIX``; those of a teacher, after ``teacher_``; and ``sum0``, ``sum0_total`` and so on, of
    ``Demand.sums``, and the sums of their slopes.
    """

    lse: Tensor
    start: Tensor
    rest: Tensor
    logprob: Tensor
    target_logit: Tensor
    heavy_ids: Tensor | None = None
    heavy_logits: Tensor | None = None

    @classmethod
    def empty(cls, tokens: int, layout: Layout, dtype: torch.dtype, device: torch.device) -> "RowStats":
        """Uninitialised statistics of a layout, known to this thread's ``Recorder``. ``dtype``: that of numbers."""
        vectors = dict[str, Tensor]()
        # each vector has memory of its own, since outputs of a graph's operator must not share any
        for name, (numbers, ids, _) in layout.forms.items():
            shape = (tokens,) if numbers is None else (tokens, numbers)
            vectors[name] = torch.empty(shape, dtype=ids or dtype, device=device)
        if RECORDERS and (listening := recorder()) is not None:
            for vector in vectors.values():
                listening.add_memory(vector)
        return cls.from_dict(vectors)

    def narrow(self, rows: slice) -> Self:
        return self if rows.start == 0 and rows.stop == self.lse.shape[0] else super().narrow(rows)

    def zero_(self) -> None:
        for value in self.by_name.values():
            value.zero_()


class Coefficients(Vectors):
    """Factors of the terms of the identity in ``kernels/gradients``, each [tokens]; None where nothing asks for a term.

    0 where a row does not count. By name alone: ``alpha`` and ``eta`` of a further view, with its ``SUFFIX``; ``sum0``
    and so on, of ``Demand.sums``.
    """

    alpha: Tensor | None = None  # of p: from logprob, lse, entropy and sums over the vocabulary
    beta: Tensor | None = None  # of 1[target], negative: from logprob
    eta: Tensor | None = None  # of p log p: from entropy
    kappa: Tensor | None = None  # of class weights, negative: from the weighted sum
    columns: Tensor | None = None  # [tokens, K] at each of a row's own columns: from their logits

    def __mul__(self, factor: Tensor) -> "Coefficients":
        """The coefficients times ``factor`` []."""
        return Coefficients.from_dict({name: value * factor for name, value in self.by_name.items()})


def at_targets(values: Tensor, leading: Sequence[int], shift: int) -> Tensor:
    """Values [rows, ...] of predicting rows, moved to the positions of their targets [*leading, ...]; 0 elsewhere.
    Differentiable."""
    if len(leading) == 1 and not shift:
        return values
    values = values.reshape((*leading, *values.shape[1:]))
    if not shift:
        return values
    dim, missing = len(leading) - 1, min(shift, leading[-1])
    further = (0, 0) * (values.dim() - len(leading))
    return torch.nn.functional.pad(values.narrow(dim, 0, leading[-1] - missing), (*further, missing, 0))


def all_at_targets(values: Sequence[Tensor], leading: Sequence[int], shift: int) -> tuple[Tensor, ...]:
    return tuple([at_targets(value, leading, shift) for value in values])
