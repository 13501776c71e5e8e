"""Vectors of numbers per token: statistics of logits, coefficients of gradients, and values moved by ``shift``."""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from .memory import RECORDERS, Cache, recorder
from .records import Statistic, SumFunction

SUFFIX = ("", "2")  # for each view the end of the names of its softmax's statistics and coefficients
HEAVY_VECTORS = ("heavy_ids", "heavy_logits")  # statistics that stores read, and no loss


class View(NamedTuple):
    """A softmax of a call: ``softmax(ratio * x[:columns])`` of each row of logits x."""

    ratio: float = 1.0  # inverse temperature relative to the logits'
    columns: int | None = None  # None: all columns


class Pairing(NamedTuple):
    """A dense teacher, and the student's softmax: divergences sum over both."""

    view: int  # index of the student's softmax in ``Demand.views``
    columns: int  # number of columns that both vocabularies have
    statistics: tuple[Statistic, ...] = ()  # statistics of the teacher's logits
    last: bool = False  # sums over both softmaxes are made along with the gradient, which depends on none of them


class VocabularySum(NamedTuple):
    """A sum over the vocabulary at one softmax. Element i of ``Demand.sums`` is made in the vector ``sum<i>``."""

    function: SumFunction
    numbers: tuple[float, ...]  # the function's
    view: int  # index of the softmax in ``Demand.views``
    is_differentiated: bool = False  # a gradient of the call has a term of the sum

    @property
    def has_total(self) -> bool:
        """True where the gradient needs the sum of the slopes, the vector ``sum<i>_total``."""
        return self.is_differentiated and self.function.has_total


class Demand(NamedTuple):
    """The statistics that a call needs, for its results and its gradient, besides ``lse``, ``logprob`` and
    ``target_logit``."""

    views: tuple[View, ...] = (View(),)  # the softmaxes; the first has all columns and ratio 1
    statistics: tuple[tuple[Statistic, ...], ...] = ((),)  # for each view those beside its softmax
    lists: tuple[Statistic, ...] = ()  # statistics that are logits of some columns of each row
    heavy: int = 0  # most ids of a row whose exact logits replace those of e4m3 operands; 0: no exact logit does
    pairing: Pairing | None = None  # None: there is no dense teacher
    sums: tuple[VocabularySum, ...] = ()  # sums over the vocabulary, made once the softmaxes are known
    rank_one: bool = True  # the gradient of a row is alpha p - beta 1[target], at the first view
    columns_only: bool = False  # losses read logits of each row's own columns only, less any number per row
    values: int = 0  # number of values per token that losses and metrics make
    field_bytes: int = 0  # bytes per token of the fields that losses and metrics read

    @property
    def one_sweep(self) -> bool:
        """True where one pass over the logits makes all statistics, so that a forward sweep need not store logits."""
        return len(self.views) == 1 and self.pairing is None and not self.sums and not self.searches_logits

    @property
    def searches_logits(self) -> bool:
        """True where a list is of columns that have to be found in the logits, such as the k largest."""
        return any(statistic.ids for statistic in self.lists)

    @property
    def columns(self) -> int:
        """K, the number of columns of each row that the caller names for a list; 0 without such a list."""
        return sum(statistic.width for statistic in self.lists if not statistic.ids)

    def of_columns(self, columns: int | None) -> "Demand":
        """The demand of a rank with ``columns`` columns of the vocabulary. None: the demand without numbers of columns,
        which is equal on all ranks."""
        # a view with fewer columns than the vocabulary gets the rank's number; ranks refuse a smaller teacher
        views = tuple(view if view.columns is None else view._replace(columns=columns) for view in self.views)
        pairing = None if self.pairing is None else self.pairing._replace(columns=columns or 0)
        return self._replace(views=views, pairing=pairing)

    @property
    def numbers_per_token(self) -> int:
        """Memory of all statistics per token, in units of 4 bytes."""
        forms = layout_of(self).forms.values()
        return sum((form.numbers or 1) * (2 if form.ids == torch.int64 else 1) for form in forms)


class Form(NamedTuple):
    """The shape and dtype of a statistic's vector, and whether it is sent."""

    numbers: int | None = None  # K for the shape [rows, K]; None for [rows]
    ids: torch.dtype | None = None  # dtype of a vector of ids; None: the vector has floating-point numbers
    sent: bool = True  # ranks that share the vocabulary send the vector to each other


class Names(NamedTuple):
    """Names of a softmax's vectors, in the order of the fields of ``records.SoftmaxOutputs``. The call may not make all
    of these vectors; "" for a vector that no call makes."""

    lse: str
    lse_base: str
    neg_log_sum: str
    logprob: str
    target_logit: str
    statistics: tuple[tuple[Statistic, tuple[str, ...]], ...]  # each statistic with the names of its vectors


class Layout(NamedTuple):
    """All vectors of a demand's statistics."""

    forms: dict[str, Form]  # by a vector's name, in the order of ranks' messages
    places: dict[str, int]  # by the name of a vector that ranks send: index of its first number in a message
    softmaxes: tuple[Names, ...]  # one for each view, then one for a teacher


LAYOUTS: Cache[Demand, Layout] = Cache(256)


@functools.cache
def vectors_at(statistic: Statistic, view: int) -> tuple[str, ...]:
    """Names of a statistic's vectors at a view: with the view's suffix if each softmax has its own vectors."""
    return tuple([name + SUFFIX[view] for name in statistic.vectors]) if statistic.of_softmax else statistic.vectors


def layout_of(demand: Demand) -> Layout:
    """The layout of a demand, cached."""
    return LAYOUTS.get_or_make(demand, lambda: layout_anew(demand))


def layout_anew(demand: Demand) -> Layout:
    forms, places, index = forms_anew(demand), dict[str, int](), 0
    for name, form in forms.items():
        if form.sent:
            places[name] = index
            index += form.numbers or 1
    return Layout(forms, places, softmaxes_anew(demand))


def softmaxes_anew(demand: Demand) -> tuple[Names, ...]:
    softmaxes, pairing = list[Names](), demand.pairing
    for view, statistics in enumerate(demand.statistics):
        names = [name + SUFFIX[view] for name in Names._fields[:-1]]
        softmaxes.append(
            Names._make([*names, tuple([(statistic, vectors_at(statistic, view)) for statistic in statistics])])
        )
    if pairing is not None:
        of_teacher = tuple(
            [(statistic, tuple([f"teacher_{name}" for name in statistic.vectors])) for statistic in pairing.statistics]
        )
        softmaxes.append(Names("", "teacher_lse_base", "teacher_neg_log_sum", "", "", of_teacher))
    return tuple(softmaxes)


def forms_anew(demand: Demand) -> dict[str, Form]:
    one_number, not_sent, pairing, forms = Form(), Form(sent=False), demand.pairing, dict[str, Form]()

    def add_forms(names: Iterable[str], form: Form = one_number) -> None:
        forms.update(dict.fromkeys(names, form))

    def add_vectors(statistic: Statistic, names: Sequence[str]) -> None:
        id_dtype = torch.int64 if statistic.width else torch.int32
        for name, vector in zip(names, statistic.vectors, strict=True):
            add_forms([name], Form(statistic.width or None, id_dtype if vector in statistic.ids else None))

    add_forms(["target_logit"])
    for view, statistics in enumerate(demand.statistics):
        add_forms([name + SUFFIX[view] for name in ("lse_base", "neg_log_sum")])
        add_forms([name + SUFFIX[view] for name in ("lse", "logprob")], not_sent)
        for statistic in statistics:
            add_vectors(statistic, vectors_at(statistic, view))
    for statistic in demand.lists:
        add_vectors(statistic, statistic.vectors)
    if demand.heavy:
        for name, ids in zip(HEAVY_VECTORS, (torch.int32, None), strict=True):
            add_forms([name], Form(demand.heavy, ids, sent=False))
    if pairing is not None:
        add_forms(["teacher_lse_base", "teacher_neg_log_sum"])
        for statistic in pairing.statistics:
            add_vectors(statistic, [f"teacher_{name}" for name in statistic.vectors])
    add_forms(names_of_sums(demand), not_sent)
    return forms


def names_of_sums(demand: Demand) -> list[str]:
    """Names of the vectors of ``Demand.sums``, of values and of totals. A rank makes the part over its own columns; the
    whole is the sum over ranks."""
    return [
        name
        for i, statistic in enumerate(demand.sums)
        for name in (f"sum{i}", f"sum{i}_total")[: 1 + statistic.has_total]
    ]


class Vectors:
    """Vectors of numbers per token, each an attribute, and an element of ``by_name``. An attribute of a vector that is
    not made is None."""

    by_name: dict[str, Tensor]  # vectors that are made; records share the dict, which nothing may change

    @classmethod
    def from_dict(cls, vectors: dict[str, Tensor]) -> Self:
        self = cls()
        vars(self).update(vectors, by_name=vectors)
        return self

    def narrow(self, rows: slice) -> Self:
        """The vectors of a slice of rows, sharing memory."""
        return self.from_dict({name: value[rows] for name, value in self.by_name.items()})


class RowStats(Vectors):
    """Statistics [tokens] of rows of logits ``x``, which have scale, cap and the call's temperature; fp32, or fp64 of
    fp64 operands.

    ``log p = (x - lse_base) + neg_log_sum``, without the rounding error of lse, which grows with the logits.
    ``logprob``: the target's log-probability, 0 where a row does not count. ``target_logit``: any number where a row
    does not count. ``heavy_ids`` [tokens, HEAVY] int32: heavy columns in ascending order, then -1.

    Elements of ``by_name`` without an attribute: vectors of ``Demand.statistics``, and of ``Demand.lists`` [tokens, K];
    all vectors of a second view's softmax, whose names end with its ``SUFFIX``; those of a teacher, which begin with
    ``teacher_``; and ``sum0``, ``sum0_total`` and so on, the values and the sums of slopes of ``Demand.sums``.
    """

    lse: Tensor
    lse_base: Tensor
    neg_log_sum: Tensor
    logprob: Tensor
    target_logit: Tensor
    heavy_ids: Tensor | None = None
    heavy_logits: Tensor | None = None

    @classmethod
    def empty(cls, tokens: int, layout: Layout, dtype: torch.dtype, device: torch.device) -> "RowStats":
        """Uninitialised statistics of a layout, known to this thread's ``Recorder``. ``dtype``: of all vectors
        but those of ids."""
        vectors = dict[str, Tensor]()
        # each vector has memory of its own, since outputs of a graph's operator must not share any
        for name, (numbers, ids, _) in layout.forms.items():
            shape = (tokens,) if numbers is None else (tokens, numbers)
            vectors[name] = torch.empty(shape, dtype=ids or dtype, device=device)
        if RECORDERS and (active_recorder := recorder()) is not None:
            for vector in vectors.values():
                active_recorder.add_memory(vector)
        return cls.from_dict(vectors)

    def narrow(self, rows: slice) -> Self:
        return self if rows.start == 0 and rows.stop == self.lse.shape[0] else super().narrow(rows)

    def zero_(self) -> None:
        for value in self.by_name.values():
            value.zero_()


class Coefficients(Vectors):
    """Coefficients [tokens] of the terms of a logit's gradient (``kernels/gradients/identity.py``); None for a term
    that the loss's gradient lacks, 0 where a row does not count.

    Elements of ``by_name`` without an attribute: ``alpha`` and ``eta`` of a second view, with its ``SUFFIX``; and
    ``sum0`` and so on, of ``Demand.sums``. Comments name the statistics whose derivatives a coefficient is made from.
    """

    alpha: Tensor | None = None  # factor of p: from logprob, lse, entropy and sums over the vocabulary
    beta: Tensor | None = None  # factor of -1[target]: from logprob
    eta: Tensor | None = None  # factor of p log p: from the entropy
    kappa: Tensor | None = None  # factor of the class weights, negated: from the weighted sum
    columns: Tensor | None = None  # [tokens, K] gradient of the logits of a row's own columns: from their logits

    def __mul__(self, factor: Tensor) -> "Coefficients":
        """The coefficients times ``factor`` []."""
        return Coefficients.from_dict({name: value * factor for name, value in self.by_name.items()})


def at_targets(values: Tensor, leading: Sequence[int], shift: int) -> Tensor:
    """Moves values [rows, ...] of rows that predict to the positions of the targets that they predict. Returns a tensor
    [*leading, ...], 0 at positions that no row predicts. Autograd differentiates it."""
    if len(leading) == 1 and not shift:
        return values
    values = values.reshape((*leading, *values.shape[1:]))
    if not shift:
        return values
    dim, padding = len(leading) - 1, min(shift, leading[-1])
    padding_ahead = (0, 0) * (values.dim() - len(leading))
    return torch.nn.functional.pad(values.narrow(dim, 0, leading[-1] - padding), (*padding_ahead, padding, 0))


def all_at_targets(values: Sequence[Tensor], leading: Sequence[int], shift: int) -> tuple[Tensor, ...]:
    """``at_targets`` of each tensor."""
    return tuple([at_targets(value, leading, shift) for value in values])
