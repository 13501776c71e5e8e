"""Vectors with a number per token: statistics of logits, coefficients of gradients, and values moved by ``shift``."""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from .memory import RECORDERS, Cache, recorder
from .records import SoftmaxVectors, Statistic, VocabularySum

SUFFIX = ("", "2")  # for each view the end of the names of its statistics and coefficients
HEAVY_VECTORS = ("heavy_ids", "heavy_logits")  # names of statistics that stores read, and no loss


# A softmax of a call: ``softmax(ratio * x[:columns])`` of each row of logits x. ``ratio``: inverse temperature of the
# softmax, divided by the inverse temperature of x; ``columns``: number of columns, None for all
View = tuple[float, int | None]


class Pairing(NamedTuple):
    """A dense teacher's softmax, and the student's softmax with which divergences compare it."""

    view: int  # index of the student's softmax in ``Demand.views``
    columns: int  # number of columns that both vocabularies have
    statistics: tuple[Statistic, ...] = ()  # statistics of the teacher's logits
    is_fused: bool = False  # the gradient depends on no sum over both softmaxes, so that one kernel makes both


class Demand(NamedTuple):
    """The statistics that a call's results and gradient need, besides ``lse``, ``logprob`` and ``target_logit``."""

    views: tuple[View, ...] = ((1.0, None),)  # the softmaxes; the first has all columns and ratio 1
    statistics: tuple[tuple[Statistic, ...], ...] = ((),)  # for each view the statistics beside its softmax
    lists: tuple[Statistic, ...] = ()  # statistics that are logits of some columns of each row
    heavy: int = 0  # most ids of a row whose exact logits replace logits of e4m3 operands; 0: nothing is replaced
    pairing: Pairing | None = None  # None: there is no dense teacher
    sums: tuple[VocabularySum, ...] = ()  # sums over the vocabulary; the vector ``sum<i>`` holds element i
    rank_one: bool = True  # the gradient of a row is alpha p - beta 1[target], at the first view
    columns_only: bool = False  # losses read only logits of columns that the caller names, up to a constant per row
    values: int = 0  # number of values per token that losses and metrics compute
    field_bytes: int = 0  # bytes per token of the fields that losses and metrics read

    @property
    def one_sweep(self) -> bool:
        """True if one pass over the logits makes all statistics. A forward sweep need not store logits then."""
        return len(self.views) == 1 and self.pairing is None and not self.sums and not self.searches_logits

    @property
    def searches_logits(self) -> bool:
        """True if the logits decide the columns of a list, as for the k largest."""
        return any(statistic.ids for statistic in self.lists)

    @property
    def columns(self) -> int:
        """K, the number of columns that the caller names for each row; 0 without such a list."""
        return sum(statistic.width for statistic in self.lists if not statistic.ids)

    def of_columns(self, columns: int | None) -> "Demand":
        """The demand of a rank with ``columns`` columns of the vocabulary. ``columns=None``: without numbers of
        columns, which makes the demand equal on all ranks."""
        # a view with fewer columns than the vocabulary gets the rank's number; ranks refuse a smaller teacher
        views = tuple((ratio, None if width is None else columns) for ratio, width in self.views)
        pairing = None if self.pairing is None else self.pairing._replace(columns=columns or 0)
        return self._replace(views=views, pairing=pairing)

    @property
    def numbers_per_token(self) -> int:
        """Memory of all statistics per token, in units of 4 bytes."""
        forms = layout_of(self).forms.values()
        return sum((width or 1) * (2 if id_dtype == torch.int64 else 1) for width, id_dtype in forms)


class Layout:
    """All vectors of a demand's statistics."""

    def __init__(self, demand: Demand):
        # by a vector's name, in the order of ranks' messages: K for the shape [rows, K], None for [rows]; and the dtype
        # of ids, None for floating-point numbers
        self.forms = dict[str, tuple[int | None, torch.dtype | None]]()
        self.message_indices = dict[str, int]()  # by the name of a vector that ranks send: its first index in a message
        self.message_numbers = 0  # how many numbers per token a message has
        self.softmaxes = softmaxes_of(demand)  # names of the vectors of each view, then of a teacher's softmax
        self.add(["target_logit"])
        for view, statistics in enumerate(demand.statistics):
            self.add([name + SUFFIX[view] for name in ("lse_base", "neg_log_sum")])
            self.add([name + SUFFIX[view] for name in ("lse", "logprob")], is_sent=False)
            for statistic in statistics:
                self.add_statistic(statistic, vectors_at(statistic, view))
        for statistic in demand.lists:
            self.add_statistic(statistic, statistic.vectors)
        if demand.heavy:
            for name, id_dtype in zip(HEAVY_VECTORS, (torch.int32, None), strict=True):
                self.add([name], demand.heavy, id_dtype, is_sent=False)
        if demand.pairing is not None:
            self.add(["teacher_lse_base", "teacher_neg_log_sum"])
            for statistic in demand.pairing.statistics:
                self.add_statistic(statistic, [f"teacher_{name}" for name in statistic.vectors])
        self.add(names_of_sums(demand), is_sent=False)

    def add(
        self,
        names: Iterable[str],
        width: int | None = None,
        id_dtype: torch.dtype | None = None,
        is_sent: bool = True,  # ranks that share the vocabulary send the vectors to each other
    ) -> None:
        """Adds vectors: [tokens], or [tokens, width] with ``width``; of ids, if ``id_dtype`` is not None."""
        for name in names:
            self.forms[name] = width, id_dtype
            if is_sent:
                self.message_indices[name] = self.message_numbers
                self.message_numbers += width or 1

    def add_statistic(self, statistic: Statistic, names: Sequence[str]) -> None:
        """Adds the vectors of a statistic."""
        id_dtype = torch.int64 if statistic.width else torch.int32
        for name, vector in zip(names, statistic.vectors, strict=True):
            self.add([name], statistic.width or None, id_dtype if vector in statistic.ids else None)


LAYOUTS: Cache[Demand, Layout] = Cache(256)


@functools.cache
def vectors_at(statistic: Statistic, view: int) -> tuple[str, ...]:
    """The names of a statistic's vectors at a view, with the view's suffix if each softmax has its own vectors."""
    return tuple([name + SUFFIX[view] for name in statistic.vectors]) if statistic.of_softmax else statistic.vectors


def layout_of(demand: Demand) -> Layout:
    """The layout of a demand, cached."""
    return LAYOUTS.get_or_make(demand, lambda: Layout(demand))


def softmaxes_of(demand: Demand) -> tuple[SoftmaxVectors[str], ...]:
    softmaxes, pairing = list[SoftmaxVectors[str]](), demand.pairing
    for view, statistics in enumerate(demand.statistics):
        names = [name + SUFFIX[view] for name in SoftmaxVectors._fields[:-1]]
        statistic_names = tuple([(statistic, vectors_at(statistic, view)) for statistic in statistics])
        softmaxes.append(SoftmaxVectors._make([*names, statistic_names]))
    if pairing is not None:
        teacher_names = tuple(
            [(statistic, tuple([f"teacher_{name}" for name in statistic.vectors])) for statistic in pairing.statistics]
        )
        softmaxes.append(SoftmaxVectors(None, "teacher_lse_base", "teacher_neg_log_sum", statistics=teacher_names))
    return tuple(softmaxes)


def names_of_sums(demand: Demand) -> list[str]:
    """The names of the vectors of ``Demand.sums``: ``sum<i>`` for each sum, and ``sum<i>_total`` if the sum of its
    slopes is needed. Ranks that share the vocabulary add up their vectors."""
    sums = enumerate(demand.sums)
    return [name for i, s in sums for name in (f"sum{i}", f"sum{i}_total")[: 1 + s.has_total]]


class Vectors:
    """Vectors with a number per token, as attributes and in ``by_name``. The attribute of a vector that is not computed
    is None."""

    by_name: dict[str, Tensor]  # shared between objects, so that nothing may change the dict

    @classmethod
    def from_dict(cls, vectors: dict[str, Tensor]) -> Self:
        self = cls()
        vars(self).update(vectors, by_name=vectors)
        return self

    def narrow(self, rows: slice) -> Self:
        """The vectors of a slice of rows, sharing memory."""
        return self.from_dict({name: value[rows] for name, value in self.by_name.items()})


class RowStats(Vectors):
    """Statistics [tokens] of rows of logits ``x``, with scale, cap and the call's temperature; fp32, or fp64 for fp64
    operands.

    ``log p = (x - lse_base) + neg_log_sum`` avoids the rounding error of lse, which grows with the logits.
    ``logprob``: the target's log-probability, 0 where a row does not count. ``target_logit``: any number where a row
    does not count. ``heavy_ids`` [tokens, HEAVY] int32: heavy columns in ascending order, then -1.

    ``by_name`` has vectors without an attribute: for ``Demand.statistics``; for ``Demand.lists`` [tokens, K]; for a
    second view, named with its ``SUFFIX``; for a teacher, named ``teacher_...``; for ``Demand.sums``, named ``sum0``,
    ``sum0_total`` and so on."""

    lse: Tensor
    lse_base: Tensor
    neg_log_sum: Tensor
    logprob: Tensor
    target_logit: Tensor
    heavy_ids: Tensor | None = None
    heavy_logits: Tensor | None = None

    @classmethod
    def empty(cls, tokens: int, layout: Layout, dtype: torch.dtype, device: torch.device) -> "RowStats":
        """Uninitialised statistics, which this thread's ``Recorder`` records. ``dtype``: of all vectors but those of
        ids."""
        vectors = dict[str, Tensor]()
        # each vector has separate memory, since outputs of a graph's operator must not share any
        for name, (width, id_dtype) in layout.forms.items():
            shape = (tokens,) if width is None else (tokens, width)
            vectors[name] = torch.empty(shape, dtype=id_dtype or dtype, device=device)
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
    that the gradient lacks, 0 where a row does not count.

    ``by_name`` has vectors without an attribute: ``alpha`` and ``eta`` of a second view, with its ``SUFFIX``; and
    ``sum0`` and so on, of ``Demand.sums``. Comments name the statistics from whose derivatives a coefficient is made.
    """

    alpha: Tensor | None = None  # factor of p: from logprob, lse, entropy and sums over the vocabulary
    beta: Tensor | None = None  # factor of -1[target]: from logprob
    eta: Tensor | None = None  # factor of p log p: from the entropy
    kappa: Tensor | None = None  # factor of the class weights, negated: from the weighted sum
    columns: Tensor | None = None  # [tokens, K] gradient of the logits of columns that the caller names

    def __mul__(self, factor: Tensor) -> "Coefficients":
        """The coefficients times ``factor`` []."""
        return Coefficients.from_dict({name: value * factor for name, value in self.by_name.items()})


def at_targets(values: Tensor, leading_shape: Sequence[int], shift: int) -> Tensor:
    """Moves each row's value by ``shift`` positions, to the position of the target that the row predicts.

    ``values`` [rows, ...]: a value for each position of ``leading_shape``, in order. Returns [*leading_shape, ...], 0
    at positions that no row predicts. Autograd differentiates the result."""
    if len(leading_shape) == 1 and not shift:
        return values
    values = values.reshape((*leading_shape, *values.shape[1:]))
    if not shift:
        return values
    dim, padding = len(leading_shape) - 1, min(shift, leading_shape[-1])
    no_padding = (0, 0) * (values.dim() - len(leading_shape))
    return torch.nn.functional.pad(values.narrow(dim, 0, leading_shape[-1] - padding), (*no_padding, padding, 0))


def all_at_targets(values: Sequence[Tensor], leading_shape: Sequence[int], shift: int) -> tuple[Tensor, ...]:
    """Returns ``at_targets`` of each tensor."""
    return tuple([at_targets(value, leading_shape, shift) for value in values])
