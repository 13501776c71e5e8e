"""Calls on logits that exist already: statistics from one pass over them, their gradient from one more."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..arithmetic.objective import Objective
from ..core.stats import RowStats
from ..plan.plans import text_fields
from ..stores.gradients import Gradients
from ..stores.operands import Head, Rows
from ..stores.sets import SetStore, WithSets
from ..stores.store import GivenLogits, Store
from .objectives import call_fields
from .sweep import LocalCall, Work, sweep
from .tokens import Tokens


@dataclass(eq=False, kw_only=True)
class LogitsCall(LocalCall):
    """A call on logits that exist already."""

    width: int  # how many of the first columns stand for an id

    def head(self, logits: Tensor) -> Head:
        """The steps from raw logits to those that a softmax sees; there is no weight."""
        add_targets = None if self.shard is None else self.shard.add_targets
        return Head(logits.new_empty(0), None, self.class_weights, self.logit_scale, self.softcap, add_targets)

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
            grad[:, self.width :] = 0.0
        return Gradients(grad, None, None)

    def begin(self, given: Tensor, head: Head, stats: RowStats, grads: Gradients | None, known: bool) -> Work:
        demand, backend = self.objective.demand, self.backend
        if self.shard is not None:
            demand = demand.of_columns(self.width)  # of the columns that are here
        gradient = None if grads is None or grads.hidden is None else grads.hidden[:, : self.width]
        rows = Rows(given[:, : self.width], self.target, self.columns, self.objective.scale, self.objective.teacher)
        store: Store = GivenLogits(backend, head, demand, rows, gradient)
        if self.kept is not None:
            every = rows._replace(target=self.every_target)
            sets = SetStore(backend, head, self.kept, every, demand, True, gradient)
            store = WithSets(store, sets) if self.multiplies else sets
        return store, lambda at: rows, [(rows.tokens,)]


def logits_call(tokens: Tokens, objective: Objective) -> tuple[Tensor, LogitsCall]:
    """The logits [tokens, vocab], a copy where no one stride reaches all rows of contiguous columns; and the call."""
    call, temperature = tokens.call, tokens.structure.temperature
    logits, shard = call.rows, call.shard
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        logits = logits.contiguous()
    if logits.dim() != 2:
        logits = logits.reshape(-1, logits.shape[-1])
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
