"""Calls on logits that exist already: statistics from one pass over them, their gradient from one more."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..arithmetic.objective import Objective
from ..core.checks import flag, refuse
from ..core.stats import RowStats
from ..plan.plans import text_fields
from ..stores.gradients import Gradients
from ..stores.operands import Head, Rows
from ..stores.sets import WithSets
from ..stores.store import GivenLogits, LogitsView, Store
from .objectives import call_fields
from .sweep import LocalCall, Work, sweep
from .tokens import Tokens

MOST_VIEWS = 64  # of rows that no one stride reaches; with more of them a copy is cheaper than so many launches


def check_inplace(logits: Tensor, inplace: bool) -> None:
    if not (flag("inplace", inplace) and logits.requires_grad):
        return
    base = logits if logits._base is None else logits._base
    expanded = any(stride == 0 and size > 1 for stride, size in zip(logits.stride(), logits.shape, strict=True))
    refuse({
        "inplace=True overwrites logits, and these are a leaf (or a view of one); pass computed ones, or inplace=False":
            logits.is_leaf or (base.is_leaf and base.requires_grad),
        "inplace=True overwrites logits, and the memory of these belongs to a tensor that autograd does not see behind "
        "them (as DTensor.to_local() gives); pass inplace=False": logits._base is not None and base.grad_fn is None,
        "inplace=True needs logits with memory of their own, these are expanded; use inplace=False":
            expanded and logits.numel(),
    })  # fmt: skip


@dataclass(eq=False, kw_only=True)
class LogitsCall(LocalCall):
    """A call on logits that exist already."""

    width: int  # columns of the logits, the first ones, that stand for an id

    def head(self, logits: Tensor) -> Head:
        """The steps from raw logits to those that a softmax sees; there is no weight."""
        add_targets = None if self.shard is None else self.shard.add_targets
        return Head(logits.new_empty(0), None, self.class_weights, self.logit_scale, self.softcap, add_targets)

    def views(self, logits: Tensor, grad: Tensor | None) -> list[LogitsView]:
        """Logits [..., vocab] as views [rows, width]; ``grad``: [..., vocab] where their gradient goes."""
        teacher, found, start = self.objective.teacher, list[LogitsView](), 0
        flat = None if self.inplace or grad is None else grad.view(-1, grad.shape[-1])[:, : self.width]
        for view in row_views(logits[..., : self.width]):
            at = slice(start, start + len(view))
            columns, scale = (None if of is None else of[at] for of in (self.columns, self.objective.scale))
            of_rows = None if teacher is None else teacher.rows(at)
            if len(view):
                rows = Rows(view, self.target[at], columns, scale, of_rows, first=start)
                found.append((rows, view if flat is None else flat[at]))
            start = at.stop
        return found

    def forward(self, logits: Tensor) -> tuple[RowStats, None]:
        """Statistics of all rows; gradients are made in backward."""
        return sweep(self, logits, self.head(logits))[0], None

    def late_gradients(
        self, operands: Sequence[Tensor], stats: RowStats, upstream: Sequence[Tensor | None]
    ) -> tuple[Tensor | None]:
        """The gradient of the logits, over them where they are to be overwritten."""
        # where an id is out of range all of the gradient is nan
        known = tuple(None if given is None else given * self.objective.one_or_nan for given in upstream)
        coefficients = self.objective.coefficients_for(stats, known)
        _, grads = sweep(self, operands[0], self.head(operands[0]), (stats, coefficients))
        assert grads is not None
        return (grads.hidden,)

    def new_gradients(self, given: Tensor, known: bool) -> Gradients | None:
        if not known:
            return None
        grad = given.detach() if self.inplace else given.new_empty(given.shape)
        if self.width < grad.shape[-1]:
            grad[..., self.width :] = 0.0
        return Gradients(grad, None, None)

    def begin(self, given: Tensor, head: Head, stats: RowStats, grads: Gradients | None, known: bool) -> Work:
        demand, backend = self.objective.demand, self.backend
        if self.shard is not None:
            demand = demand.of_columns(self.width)  # of the columns that are here
        views = self.views(given, None if grads is None else grads.hidden)
        every = Rows(given, self.every_target, self.columns, self.objective.scale)
        store: Store = GivenLogits(functools.partial(backend.view_store, head, demand), views)
        if self.kept is not None:
            sets = backend.sets_store(head, self.kept, every, demand, views)
            store = WithSets(store, sets) if self.multiplies else sets
        # one chunk: ranks' strides may differ, and with them the views; their messages must not
        return store, lambda at: every, [(every.tokens,)]


def logits_call(tokens: Tokens, objective: Objective) -> tuple[Tensor, LogitsCall]:
    """The logits as kernels read them, and the call on them."""
    call, temperature = tokens.call, tokens.structure.temperature
    logits, shard = call.rows, call.shard
    if (logits.stride(-1) != 1 and logits.shape[-1] > 1) or len(row_views(logits)) > MOST_VIEWS:
        logits = logits.contiguous()
    if shard is not None:
        fields = {"tokens": str(call.leading), "logits.dtype": str(logits.dtype)}
        fields |= text_fields(objective.demand.of_columns(None), "demand.")
        shard = shard.agreed_on(call_fields(tokens) | fields, logits.device)
    return logits, LogitsCall(
        backend=tokens.spec.backend,
        objective=objective,
        logit_scale=float(call.logit_scale) / temperature,
        softcap=None if call.softcap is None else call.softcap / temperature,
        shard=shard,
        inplace=call.inplace,
        width=call.columns,
    )


def row_views(logits: Tensor) -> list[Tensor]:
    """[rows, vocab] views that together are [..., vocab], in order: one where one stride reaches all rows."""
    leading = [(size, stride) for size, stride in zip(logits.shape, logits.stride(), strict=True) if size != 1]
    pairs = itertools.pairwise(leading if logits.shape[-1] == 1 else leading[:-1])
    if logits.numel() == 0 or all(outer == size * inner for (_, outer), (size, inner) in pairs):
        return [logits.view(-1, logits.shape[-1])]
    return [view for part in logits for view in row_views(part)]
