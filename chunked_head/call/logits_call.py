"""What runs where logits exist already: statistics from one pass over them, their gradient from one more."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..arithmetic.objective import Objective
from ..core.options import flag
from ..core.stats import Demand, Head, Rows, RowStats
from ..parallel.agree import described
from ..parallel.shard import Shard
from ..stores import Backend, KeptColumns, KeptRows
from .objectives import call_fields
from .options import LogitsOptions
from .own_columns import OwnColumns, of_others
from .tokens import Tokens

MOST_VIEWS = 64  # of rows that no one stride reaches; with more of them a copy is cheaper than so many launches


def check_inplace(logits: Tensor, inplace: bool) -> None:
    if not (flag("inplace", inplace) and logits.requires_grad):
        return
    base = logits if logits._base is None else logits._base
    if logits.is_leaf or (base.is_leaf and base.requires_grad):
        raise ValueError(
            "inplace=True overwrites logits with their gradient, and these are a leaf (or a view of one), which keeps "
            "its value; pass logits that were computed, or inplace=False"
        )
    if logits._base is not None and base.grad_fn is None:
        raise ValueError(
            "inplace=True overwrites logits with their gradient, and the memory of these belongs to a tensor that "
            "autograd does not see behind them (DTensor.to_local() gives such): whoever saved that would not notice; "
            "pass inplace=False"
        )
    if any(stride == 0 and size > 1 for stride, size in zip(logits.stride(), logits.shape, strict=True)):
        raise ValueError("inplace=True needs logits with memory of their own, these are expanded; use inplace=False")


@dataclass(frozen=True, eq=False)
class LogitsCall(OwnColumns):
    """Everything of a call that takes no gradient."""

    backend: Backend
    objective: Objective
    logit_scale: float
    softcap: float | None
    inplace: bool
    width: int  # columns of the logits, the first ones, that stand for an id
    shard: Shard | None  # this rank's part of the vocabulary, where ranks share it

    @functools.cached_property
    def demand(self) -> Demand:
        """What is wanted of the columns that are here."""
        return self.objective.demand if self.shard is None else self.objective.demand.of_columns(self.width)

    def head(self, logits: Tensor) -> Head:
        """There is none; what makes logits of its products."""
        return Head(logits.new_empty(0), None, self.class_weights, self.logit_scale, self.softcap)

    def rows(self, logits: Tensor) -> list[tuple[slice, Rows]]:
        teacher, found, start = self.objective.teacher, [], 0
        for view in row_views(logits[..., : self.width]):
            at = slice(start, start + len(view))
            columns, scale = (None if of is None else of[at] for of in (self.columns, self.objective.scale))
            beside = None if teacher is None else teacher.rows(at)
            found.append((at, Rows(view, self.target[at], columns, scale, beside)))
            start = at.stop
        return found

    def stats(self, logits: Tensor) -> RowStats:
        """Statistics over all of the vocabulary, wherever it is."""
        objective, backend, shard = self.objective, self.backend, self.shard
        stats = RowStats.empty(len(objective.target), objective.demand, objective.dtype, logits.device)
        parts = [(at, rows) for at, rows in self.rows(logits) if len(rows.target)]
        head, paired = self.head(logits), objective.demand.pairing is not None
        for at, rows in parts if self.multiplies else ():
            backend.logits_stats(rows, head, self.demand, stats.at(at), alone=True, pairs=paired and shard is None)
        kept = self.kept_columns(logits)
        if kept is not None:
            kept.stats(slice(0, len(objective.target)), stats)
        if shard is None or not parts:
            return stats
        # one message for all: ranks' strides may differ, and with them the views
        everything = Rows(logits, self.every_target, self.columns)
        shard.merge(backend.merge_ranks, everything, self.token_checks, stats, objective.demand, known_targets=False)
        if paired:
            for at, rows in parts:
                backend.logits_stats(rows, head, self.demand, stats.at(at), alone=False, pairs=True)
            shard.add_pairs(stats)
        return stats

    def late_gradients(
        self, operands: Sequence[Tensor], stats: RowStats, upstream: Sequence[Tensor | None]
    ) -> tuple[Tensor]:
        """The gradient of the logits, over them where they are to be overwritten."""
        logits = operands[0]
        # where an id is out of range the whole gradient is nan
        known = tuple(None if given is None else given * self.objective.one_or_nan for given in upstream)
        coefficients = self.objective.late(stats, known)
        grad = logits.detach() if self.inplace else logits.new_empty(logits.shape)
        flat = None if self.inplace else grad.view(-1, grad.shape[-1])[:, : self.width]
        if self.width < grad.shape[-1]:
            grad[..., self.width :] = 0.0
        head, kept = self.head(logits), self.kept_columns(logits)
        if kept is not None:
            kept.differentiate(slice(0, len(self.target)), stats, coefficients)
        for at, rows in self.rows(logits):
            if not len(rows.target):
                continue
            out, of_rows = rows.hidden if flat is None else flat[at], (stats.at(at), coefficients.at(at))
            if kept is not None:
                of_rows = of_others(kept.kept.has[at], *of_rows)
            if self.multiplies:
                self.backend.logits_grad(out, rows, head, self.demand, *of_rows)
            else:
                out.zero_()
            if kept is not None:
                kept.add_to(at, out)
        return (grad,)

    def kept_columns(self, logits: Tensor) -> KeptColumns | None:
        """The rows whose softmaxes are over sets of columns."""
        if self.kept is None:
            return None
        views = tuple((at, rows.hidden) for at, rows in self.rows(logits))
        rows = KeptRows(self.kept, self.every_target, self.objective.scale, logits, views)
        return self.backend.kept_columns(self.head(logits), rows, self.demand)


def call_of(tokens: Tokens, objective: Objective, inplace: bool) -> tuple[Tensor, LogitsCall]:
    """The logits as kernels read them, and what is to be done with them."""
    assert isinstance(tokens.head, LogitsOptions)
    logits, shard = tokens.head.logits, tokens.head.shard
    if (logits.stride(-1) != 1 and logits.shape[-1] > 1) or count_views(logits) > MOST_VIEWS:
        logits = logits.contiguous()
    if shard is not None:
        fields = {"tokens": str(tokens.head.leading), "logits.dtype": str(logits.dtype)}
        fields |= described(objective.demand.of_columns(None), "demand.")
        shard = shard.agreed_on(call_fields(tokens) | fields, logits.device)
    head, temperature = tokens.head, tokens.needs.temperature
    softcap = None if head.softcap is None else head.softcap / temperature
    options = float(head.logit_scale) / temperature, softcap, inplace, head.columns, shard
    return logits, LogitsCall(tokens.backend, objective, *options)


def row_views(logits: Tensor) -> list[Tensor]:
    """[rows, vocab] views that together are [..., vocab], in order."""
    if mergeable(logits):
        return [logits.view(-1, logits.shape[-1])]
    return [view for part in logits for view in row_views(part)]


def count_views(logits: Tensor) -> int:
    return 1 if mergeable(logits) or not len(logits) else len(logits) * count_views(logits[0])


def mergeable(logits: Tensor) -> bool:
    """Whether one stride reaches all rows."""
    leading = [(size, stride) for size, stride in zip(logits.shape, logits.stride(), strict=True) if size != 1]
    leading = leading if logits.shape[-1] == 1 else leading[:-1]
    return logits.numel() == 0 or all(
        outer == size * inner for (_, outer), (size, inner) in itertools.pairwise(leading)
    )
