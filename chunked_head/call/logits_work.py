"""Work on logits that exist already: one pass over them for statistics, one more for their gradient."""

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
from .objectives import request_fields
from .sweep import LocalWork, Loop, sweep
from .tokens import Tokens


@dataclass(eq=False, kw_only=True)
class LogitsWork(LocalWork):
    """The work of a sweep over logits that exist already: statistics forward, the logits' gradient in backward."""

    width: int  # number of columns that stand for an id; the others are padding

    def head(self, logits: Tensor) -> Head:
        """A head without weight: the scale and softcap that turn the caller's logits into the softmax's."""
        add_targets = None if self.shard is None else self.shard.add_targets
        return Head(logits.new_empty(0), None, self.class_weights, self.logit_scale, self.softcap, add_targets)

    def forward(self, operands: Sequence[Tensor]) -> tuple[RowStats, None]:
        """Statistics of all rows; gradients are made in backward."""
        (logits,) = operands
        return sweep(self, logits, self.head(logits))[0], None

    def late_gradients(
        self, operands: Sequence[Tensor], stats: RowStats, upstream: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None]:
        """The gradient of the logits, [tokens, vocab]; with ``inplace`` it overwrites them. It is nan everywhere if an
        id of the call is out of range."""
        one_or_nan = self.objective.one_or_nan
        masked_upstream = tuple(None if gradient is None else gradient * one_or_nan for gradient in upstream)
        coefficients = self.objective.coefficients_for(stats, masked_upstream)
        _, grads = sweep(self, operands[0], self.head(operands[0]), (stats, coefficients))
        assert grads is not None
        return (grads.hidden,)

    def new_gradients(self, logits: Tensor, is_recompute: bool) -> Gradients | None:
        """Memory for dlogits in backward; None in the forward pass."""
        if not is_recompute:
            return None
        grad = logits.detach() if self.inplace else logits.new_empty(logits.shape)
        if self.width < grad.shape[-1]:
            grad[:, self.width :] = 0.0
        return Gradients(grad, None, None)

    def begin(self, logits: Tensor, head: Head, stats: RowStats, grads: Gradients | None, is_recompute: bool) -> Loop:
        """Returns the store, a function that returns all ``Rows``, and the spans: the one chunk of all rows."""
        demand, backend = self.objective.demand, self.backend
        if self.shard is not None:
            demand = demand.of_columns(self.width)
        dlogits = None if grads is None or grads.hidden is None else grads.hidden[:, : self.width]
        objective, local_logits = self.objective, logits[:, : self.width]
        rows = Rows(local_logits, self.softmax_targets, self.local_columns, objective.scale, objective.teacher)
        store: Store = GivenLogits(backend, head, demand, rows, dlogits)
        if self.column_sets is not None:
            every_row = rows._replace(target=self.local_targets)
            sets = SetStore(backend, head, self.column_sets, every_row, demand, True, dlogits)
            store = WithSets(store, sets) if self.has_vocabulary_rows else sets
        return store, lambda chunk: rows, [(rows.tokens,)]


def logits_work(tokens: Tokens, objective: Objective) -> tuple[Tensor, LogitsWork]:
    """The logits as [tokens, vocab] and the work on them. The logits are copied where no view has that shape, or their
    columns are not contiguous."""
    call, temperature = tokens.call, tokens.structure.temperature
    logits, shard = call.rows, call.shard
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        logits = logits.contiguous()
    if logits.dim() != 2:
        logits = logits.reshape(-1, logits.shape[-1])
    if shard is not None:
        fields = {"tokens": str(call.leading), "logits.dtype": str(logits.dtype)}
        fields |= text_fields(objective.demand.of_columns(None), "demand.")
        shard = shard.agreed_on(request_fields(tokens) | fields, logits.device)
    return logits, LogitsWork(
        backend=tokens.spec.backend,
        objective=objective,
        logit_scale=float(call.logit_scale) / temperature,
        softcap=None if call.softcap is None else call.softcap / temperature,
        shard=shard,
        inplace=call.inplace,
        width=call.local_width,
    )
