"""Work on logits that exist already: one pass over them for statistics, one more for their gradient."""

from collections.abc import Sequence

from torch import Tensor

from ..arithmetic.objective import Objective
from ..core.stats import Coefficients, RowStats, layout_of
from ..plan.plans import text_fields
from ..stores.gradients import Gradients
from ..stores.operands import Head, Rows
from ..stores.sets import SetStore, WithSets
from ..stores.store import GivenLogits, Store
from .objectives import request_fields
from .sweep import LocalWork, run_chunks
from .tokens import Tokens


class LogitsWork(LocalWork):
    """The work of a sweep over logits that exist already: statistics forward, the logits' gradient in backward."""

    @property
    def width(self) -> int:
        """Number of this rank's columns that stand for an id; the others are padding."""
        return self.objective.structure.vocab if self.shard is None else self.shard.num_columns

    def head(self, logits: Tensor) -> Head:
        """A head without weight. Its scale and softcap turn the caller's logits into the logits of the softmax."""
        add_targets = None if self.shard is None else self.shard.add_targets
        return Head(logits.new_empty(0), None, self.class_weights, self.logit_scale, self.softcap, add_targets)

    def forward(self, operands: Sequence[Tensor]) -> tuple[RowStats, None]:
        """Returns the statistics of all rows, and None: gradients are made in backward."""
        (logits,) = operands
        objective = self.objective
        stats = RowStats.empty(len(logits), layout_of(objective.demand), objective.dtype, logits.device)
        self.sweep(logits, stats, None, None)
        return stats, None

    def late_gradients(
        self, operands: Sequence[Tensor], stats: RowStats, upstream: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None]:
        """Returns a tuple of one tensor, the gradient [tokens, vocab] of the logits; ``inplace``: in the logits'
        memory. The gradient is nan everywhere if an id of the call is out of range."""
        (logits,), one_or_nan = operands, self.objective.one_or_nan
        masked_upstream = tuple(None if gradient is None else gradient * one_or_nan for gradient in upstream)
        coefficients = self.objective.coefficients_for(stats, masked_upstream)
        grad = logits.detach() if self.inplace else logits.new_empty(logits.shape)
        if self.width < grad.shape[-1]:
            grad[:, self.width :] = 0.0
        self.sweep(logits, stats, coefficients, grad)
        return (grad,)

    def sweep(self, logits: Tensor, stats: RowStats, coefficients: Coefficients | None, grad: Tensor | None) -> None:
        """Runs one pass over all rows of logits [tokens, vocab], as one chunk. Without ``coefficients`` it writes to
        ``stats``. With coefficients of all tokens it writes the logits' gradient to ``grad`` [tokens, vocab]."""
        if not len(logits):
            return
        objective, backend, head, demand = self.objective, self.backend, self.head(logits), self.objective.demand
        if self.shard is not None:
            demand = demand.of_columns(self.width)
        local_logits, tokens = logits[:, : self.width], slice(0, len(logits))
        dlogits = None if grad is None else grad[:, : self.width]
        no_hidden = logits.new_empty(len(logits), 0)
        rows = Rows(no_hidden, self.softmax_targets, tokens, self.local_columns, objective.scale, objective.teacher)
        store: Store = GivenLogits(backend, head, demand, rows, local_logits, dlogits)
        if self.column_sets is not None:
            operand, targets = local_logits, self.local_targets
            set_store = SetStore(backend, head, self.column_sets, operand, targets, rows.scale, demand, True, dlogits)
            store = WithSets(store, set_store) if self.has_vocabulary_rows else set_store
        grads = None if grad is None else Gradients(grad, None, None)
        run_chunks(self, store, lambda chunk: rows, [(tokens,)], stats, coefficients, grads)


def logits_work(tokens: Tokens, objective: Objective) -> tuple[Tensor, LogitsWork]:
    """Returns the logits as [tokens, vocab], and the work on them. The logits are copied where no view has that
    shape, or where their columns are not contiguous."""
    call, temperature = tokens.call, tokens.structure.temperature
    logits, shard = call.rows, call.shard
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        logits = logits.contiguous()
    if logits.dim() != 2:
        logits = logits.reshape(-1, logits.shape[-1])
    if shard is not None:
        fields = {"tokens": str(call.token_shape), "logits.dtype": str(logits.dtype)}
        fields |= text_fields(objective.demand.of_columns(None), "demand.")
        shard = shard.agreed_on(request_fields(tokens) | fields, logits.device)
    return logits, LogitsWork(
        backend=tokens.spec.backend,
        objective=objective,
        logit_scale=float(call.logit_scale) / temperature,
        softcap=None if call.softcap is None else call.softcap / temperature,
        shard=shard,
        inplace=call.inplace,
    )
