"""The loop over chunks of tokens that every call runs, and the work of calls on hidden states."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from ..arithmetic.objective import Objective, ScalarObjective
from ..core.memory import Cache, empty
from ..core.records import ColumnSets
from ..core.stats import Coefficients, RowStats
from ..parallel.agreement import begin_backward
from ..parallel.shard import Shard
from ..plan.planner import find_late_plan
from ..plan.plans import Plan
from ..plan.segments import Spans
from ..plan.sizes import DEFAULT_REQUEST, Request
from ..stores import Backend
from ..stores.gradients import GradientBuffer, Gradients
from ..stores.operands import Head, Rows
from ..stores.quantised import QuantisedWeight
from ..stores.sets import SetStore, WithSets
from ..stores.store import LogitsStore, MatmulStore, Store
from .recording import PlanAndRecording, run_recorded
from .tokens import Packing


@dataclass(eq=False, kw_only=True)
class LocalWork:
    """The work of a call on one rank: all that a sweep reads besides its operands (hidden states and head, or
    logits)."""

    backend: Backend
    objective: Objective
    logit_scale: float
    softcap: float | None
    shard: Shard | None  # this rank's part of the vocabulary, where ranks share it
    plan: Plan | None = None  # None for logits that exist already
    gradient_buffer: GradientBuffer | None = None  # the caller's buffer, to which the weight's gradient is added
    spans: Spans | None = None  # chunks that wait for each other's statistics only; None: each chunk is a span
    inplace: bool = False  # the gradient overwrites the logits

    def forward(self, operands: Sequence[Any]) -> tuple[RowStats, Gradients | None]:
        """Returns the statistics of all tokens, and the gradients where the forward pass makes them, else None."""
        raise NotImplementedError

    def row_factors(self, stats: RowStats, upstream: tuple[Tensor | None, ...]) -> Tensor:
        """[tokens] a factor for each row of hidden's gradient, which the forward pass has made for an upstream gradient
        of 1. ``upstream``: upstream gradients of the outputs."""
        raise NotImplementedError

    def late_gradients(
        self, operands: Sequence[Any], stats: RowStats, upstream: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of ``operands``, which autograd has saved, from the upstream gradients of the outputs."""
        raise NotImplementedError

    def with_teacher(self, tensors: Sequence[Tensor]) -> Self:
        """The work with ``tensors`` in place of a dense teacher's tensors; the same object without a dense teacher."""
        objective = self.objective
        if objective.teacher is None:
            return self
        objective = replace(objective, teacher=objective.teacher.with_tensors(tensors))
        return replace(self, objective=objective)

    @functools.cached_property
    def local_targets(self) -> Tensor:
        """[tokens] int64: each target's column on this rank; ``ELSEWHERE`` if the column is on another rank, -1 where a
        token does not count."""
        targets = self.objective.targets
        return targets if self.shard is None else self.shard.local_targets(targets)

    @functools.cached_property
    def softmax_targets(self) -> Tensor:
        """[tokens] int64: ``local_targets``, but -1 for tokens whose softmax is over a set of columns."""
        column_sets, targets = self.objective.column_sets, self.local_targets
        return targets if column_sets is None else targets.masked_fill(column_sets.has_set, -1)

    @functools.cached_property
    def column_sets(self) -> ColumnSets | None:
        """The sets of columns that softmaxes are over, as columns of this rank; None: no softmax is over a set."""
        column_sets = self.objective.column_sets
        if column_sets is None or self.shard is None:
            return column_sets
        return replace(column_sets, columns=self.shard.local_columns(column_sets.columns))

    @property
    def has_vocabulary_rows(self) -> bool:
        """True if a softmax may be over the vocabulary, whose logits a matmul makes."""
        return self.objective.column_sets is None or not self.objective.column_sets.everywhere

    @functools.cached_property
    def local_columns(self) -> Tensor | None:
        """[tokens, K] int64: each token's ``teacher_ids`` as columns of this rank, -1 for an id of another rank; None
        if the call has no ``teacher_ids``."""
        columns = self.objective.columns
        return columns if columns is None or self.shard is None else self.shard.local_columns(columns)

    @functools.cached_property
    def token_checks(self) -> Tensor:
        """[tokens] check numbers, equal on all ranks that share the vocabulary if the ranks have equal tokens."""
        assert self.shard is not None
        numbers, scale, column_sets = self.objective.targets, self.objective.scale, self.objective.column_sets
        if column_sets is not None:
            entries = column_sets.columns
            if column_sets.bias is not None:
                entries = entries + column_sets.bias.float().view(torch.int32)
            numbers = torch.index_add(numbers, 0, column_sets.rows.clamp(min=0), entries.long())
        if scale is not None:
            numbers = numbers + scale.float().view(torch.int32)
        return self.shard.token_checks(numbers, self.objective.dtype)

    @property
    def class_weights(self) -> Tensor | None:
        """[vocab] class weights of this rank's columns, in the dtype of statistics; None without class weights."""
        weights = self.objective.class_weights
        return weights if weights is None or self.shard is None else weights[self.shard.local_ids].contiguous()


@dataclass(eq=False, kw_only=True)
class HeadWork(LocalWork):
    """The work of a call on hidden states."""

    plan: Plan
    request: Request = DEFAULT_REQUEST
    packing: Packing | None = None  # the order in which rows run; None: the caller's
    recordings: Cache[Any, PlanAndRecording] | None = (
        None  # ``Spec.recordings``; None where the sweep cannot be recorded
    )
    fp8_weight: QuantisedWeight | None = None  # the caller's copy of the weight in e4m3

    def head(self, weight: Tensor, bias: Tensor | None) -> Head:
        """The head in the dtype of the matmuls. Under autocast the weight is cast to a copy, once for a pass."""
        sizes = self.plan.sizes
        bias = None if bias is None else bias[: sizes.vocab].to(sizes.dtype).contiguous()
        weight = weight.to(sizes.dtype)
        if sizes.padding:
            weight = weight[: sizes.vocab]
        if len(weight) == 1:
            weight = weight.view(-1).view(weight.shape)  # with the usual strides, which kernels take
        add_targets, fp8 = None if self.shard is None else self.shard.add_targets, None
        if sizes.fp8_copy:
            fp8 = self.backend.rounded_head(weight, self.fp8_weight)
            if self.plan.e4m3_gradients and sizes.hidden_grad:
                transpose, fp8_weight = self.backend.transposed, self.fp8_weight
                fp8 = fp8._replace(
                    transposed=transpose(fp8.weight.values) if fp8_weight is None else fp8_weight.transpose(transpose)
                )
        return Head(weight, bias, self.class_weights, self.logit_scale, self.softcap, add_targets, fp8)

    def forward(self, operands: Sequence[Any]) -> tuple[RowStats, Gradients | None]:
        hidden, weight, bias = operands
        head = self.head(weight, bias)
        if self.recordings is not None:
            return run_recorded(self, hidden, head)
        stats, grads = self.sweep(hidden, head)
        if self.packing is not None and grads is not None and grads.hidden is not None:
            grads.hidden = self.packing.unpack(grads.hidden)
        return stats, grads

    def sweep(
        self,
        hidden: Tensor,  # [tokens, hidden] in the caller's order
        head: Head,
        stats_and_coefficients: tuple[RowStats, Coefficients] | None = None,
    ) -> tuple[RowStats, Gradients | None]:
        """Runs one pass over chunks of tokens. Returns the statistics of all tokens, and the gradients if this pass
        makes them, else None.

        ``stats_and_coefficients``: statistics and coefficients of all tokens. Backward passes them when it computes the
        logits again; the pass then makes only gradients.
        """
        objective, plan, backend, tokens = self.objective, self.plan, self.backend, len(self.objective.targets)
        is_recompute = stats_and_coefficients is not None
        most_rows = plan.block_tokens if is_recompute else plan.chunk_tokens  # rows of a chunk
        order, device_count = (None, None) if self.packing is None else (self.packing.order, self.packing.count)
        scale, coefficients, set_store = objective.scale, None, None
        if stats_and_coefficients is None:
            stats = RowStats.empty(tokens, plan.sizes.layout, objective.dtype, hidden.device)
        else:
            stats, coefficients = stats_and_coefficients
        hidden_dtype = plan.sizes.hidden_dtype if is_recompute else plan.hidden_accumulate
        has_grads = is_recompute or plan.schedule == "forward"
        if not tokens:
            return stats, self.new_gradients(hidden_dtype, hidden.device) if has_grads else None
        if self.column_sets is not None:
            targets, packed_hidden = self.local_targets, hidden if self.packing is None else self.packing.pack(hidden)
            set_store = SetStore(backend, head, self.column_sets, packed_hidden, targets, scale, objective.demand)
            if not self.has_vocabulary_rows:
                grads = self.new_gradients(hidden_dtype, hidden.device) if has_grads else None
                all_rows = Rows(packed_hidden, targets, slice(0, tokens), self.local_columns, scale)
                run_chunks(self, set_store, lambda chunk: all_rows, [(all_rows.tokens,)], stats, coefficients, grads)
                return stats, grads
        targets, columns = self.softmax_targets, self.local_columns
        grads = self.new_gradients(hidden_dtype, hidden.device) if has_grads else None
        clean_hidden = empty(most_rows, hidden.shape[1], dtype=plan.sizes.dtype, device=hidden.device)
        teacher = None if objective.teacher is None else objective.teacher.cast_head()  # once for the pass
        gathered_rows = None if self.shard is None else self.shard.gathered(hidden, most_rows)
        if teacher is not None and teacher.hidden is not None and teacher.weight is not None:
            clean_teacher_hidden = teacher.weight.new_empty(most_rows, teacher.hidden.shape[1])

        def rows_of(chunk: slice) -> Rows:
            """The rows of a chunk. A teacher's hidden states are copied here; the store copies the student's later,
            from ``Rows.source`` to ``Rows.hidden``."""
            row_count = chunk.stop - chunk.start
            is_part = row_count < tokens
            source, chunk_order, chunk_teacher = hidden, order, teacher
            if is_part and order is None:
                source = hidden[chunk]
            elif is_part and order is not None:
                chunk_order = order[chunk]
            chunk_targets = targets[chunk] if is_part else targets
            if chunk_teacher is not None and chunk_teacher.hidden is not None:
                clean_teacher, raw_teacher = clean_teacher_hidden[:row_count], chunk_teacher.hidden
                raw_teacher = raw_teacher if order is not None else raw_teacher[chunk]
                backend.clean_rows(clean_teacher, raw_teacher, chunk_targets, chunk_order)
                chunk_teacher = replace(chunk_teacher, hidden=clean_teacher)
            elif chunk_teacher is not None and is_part:
                chunk_teacher = chunk_teacher.rows(chunk)
            if gathered_rows is not None:
                source, chunk_order = gathered_rows.chunk(chunk)  # rows rank after rank; copied in the call's order
            return Rows(
                clean_hidden if row_count == most_rows else clean_hidden[:row_count],
                chunk_targets,
                chunk,
                columns[chunk] if is_part and columns is not None else columns,
                scale[chunk] if is_part and scale is not None else scale,
                chunk_teacher,
                device_count,
                source,
                chunk_order,
            )

        store_class: type[MatmulStore] = plan.sizes.store
        if is_recompute:  # of tiles whose statistics are known
            store_class = backend.grad_store if plan.sizes.grads_in_matmul else LogitsStore
        store: Store = store_class(backend, head, plan, (hidden, targets, order), is_recompute)
        spans: Any = self.spans
        if is_recompute or spans is None:
            spans = [(slice(start, min(start + most_rows, tokens)),) for start in range(0, tokens, most_rows)]
        store = store if set_store is None else WithSets(store, set_store)
        run_chunks(self, store, rows_of, spans, stats, coefficients, grads)
        return stats, grads

    def new_gradients(self, hidden_dtype: torch.dtype, device: torch.device) -> Gradients:
        """New buffers of the sweep's gradients. ``hidden_dtype``: the dtype in which the gradient of hidden states
        adds up."""
        plan, sizes, buffer = self.plan, self.plan.sizes, self.gradient_buffer
        new_tensor = empty if sizes.tokens else torch.zeros  # without tokens no product fills them
        hidden = weight = bias = None
        weight_rows = sizes.vocab + sizes.padding
        if sizes.hidden_grad:
            hidden = new_tensor(sizes.tokens // sizes.hidden_ranks, sizes.hidden, dtype=hidden_dtype, device=device)
            if self.packing is not None and self.packing.count is not None:
                hidden.zero_()  # products do not write rows of tokens that do not count
        if buffer is not None:
            weight = buffer.buffer
        elif sizes.weight_grad:
            weight = new_tensor(weight_rows, sizes.hidden, dtype=plan.weight_accumulate, device=device)
        if sizes.bias_grad:
            bias = new_tensor(weight_rows, dtype=sizes.wide, device=device)
        over_ranks = None if self.shard is None else self.shard.hidden_gradient()
        return Gradients(hidden, weight, bias, buffer, sizes.padding, over_ranks)

    def row_factors(self, stats: RowStats, upstream: tuple[Tensor | None, ...]) -> Tensor:
        """Returns a factor for each row of hidden's gradient on this rank [tokens], rows in the caller's order."""
        factors = self.objective.token_factors(stats, upstream)
        if self.packing is not None:
            factors = self.packing.unpack(factors)
        factors = factors * self.objective.one_or_nan
        return factors if self.shard is None else self.shard.own_tokens(factors).contiguous()

    def recomputing(self) -> "HeadWork":
        """The work with a plan that makes gradients in backward; a second backward over a retained graph needs it."""
        if self.plan.schedule == "recompute":
            return self
        plan = find_late_plan(self.plan.sizes, self.request)
        if isinstance(plan, str):
            raise ValueError(f"a second backward over a retained graph computes the logits again: {plan}")
        return replace(self, plan=plan)

    def late_gradients(
        self, operands: Sequence[Any], stats: RowStats, upstream: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        if self.shard is not None:
            begin_backward(self.shard.group)
            if not isinstance(self.objective, ScalarObjective):
                upstream = self.shard.upstream_of_all_ranks(upstream)
        coefficients = self.objective.coefficients_for(stats, upstream)
        return self.recomputing().recompute(operands, stats, coefficients)

    def recompute(
        self, operands: Sequence[Any], stats: RowStats, coefficients: Coefficients
    ) -> tuple[Tensor | None, ...]:
        """Computes the logits again. Returns the gradients of hidden states, weight and bias. ``operands``: hidden
        states, weight and bias. ``stats`` and ``coefficients``: vectors of all tokens."""
        hidden, weight, bias = operands[:3]
        packing, one_or_nan = self.packing, self.objective.one_or_nan
        _, grads = self.sweep(hidden, self.head(weight, bias), (stats, coefficients))
        assert grads is not None
        dhidden, *head_gradients = grads.finish(self.backend, self.plan.sizes, one_or_nan)
        return dhidden if packing is None or dhidden is None else packing.unpack(dhidden), *head_gradients


# One chunk of n tokens, of H hidden states and V columns on this rank; e: the dtype of the matmuls (bf16, fp16, fp32,
# fp64), s: the dtype of statistics (fp32, fp64 for e = fp64).
#
#   hidden [n, H] ----- store.fill -----------> rows [n, H] e         copied; 0 where a token does not count
#                                                 |
#   weight [V, H] e ---------------- @ ---------- |
#                                                 v
#                                               logits [n, V]         16 or 32 bits, as the store keeps them, in a
#                                                 |                   buffer that is used for every chunk
#                       store.statistics -------> lse, logprob, ... [n] s each         of this rank's columns
#                                                 |
#                       shard.merge_stats ------> lse, logprob, ... [n] s each         of the vocabulary: one message
#                                                 |                                    of all ranks' statistics
#   batch fields [n] -- objective.run_losses ---> values of losses and metrics, summed up
#                       (arithmetic)              |
#                                                 v
#                                               coefficients alpha, beta, ... [n] s each
#                                                 |
#                       store.add_gradients       v
#                          one pass             dlogits [n, V] e      over the logits, in the same buffer
#                          matmul               dlogits @ weight       -> dhidden [n, H], stored
#                          matmul               dlogits.T @ rows       -> dweight [V, H], added
#
# Where gradients wait for the upstream gradient or for all tokens' statistics, the forward pass ends above the
# coefficients, and backward's sweep runs ``store.add_gradients`` only, from statistics and coefficients that exist.
# Logits that exist are one chunk, and dlogits are their gradient.


def run_chunks(
    work: LocalWork,
    store: Store,
    rows_of: Callable[[slice], Rows],
    spans: Iterable[Sequence[slice]],
    stats: RowStats,  # of all tokens: memory that is written to; with ``coefficients`` their statistics
    coefficients: Coefficients | None,
    grads: Gradients | None,
) -> None:
    """The loop over chunks of tokens: writes to ``stats``, runs the losses, adds to ``grads``.

    ``rows_of`` returns the rows of a slice of tokens. The gradients of a span's chunks wait for all statistics of the
    span. ``coefficients``: coefficients of all tokens, in a backward that computes logits again; None in a forward
    pass."""
    objective, plan, tokens = work.objective, work.plan, len(work.objective.targets)
    has_sums, has_unit_rows = bool(objective.demand.sums), plan is not None and plan.has_unit_rows
    # statistics of student and teacher are then made along with the gradients
    is_teacher_last = plan is not None and plan.teacher_last
    is_closed = work.spans is not None and work.has_vocabulary_rows  # each span has all tokens of its segments

    def filled(chunk: slice) -> tuple[Rows, RowStats]:
        """The rows and statistics of a chunk whose logits are made here."""
        rows, out = rows_of(chunk), stats if chunk.stop - chunk.start == tokens else stats.narrow(chunk)
        store.fill(rows, out)
        store.statistics(rows, out)
        if work.shard is not None:
            local_targets = rows.target if work.column_sets is None else work.local_targets[chunk]
            inputs = rows.hidden, local_targets, work.token_checks[chunk]
            work.shard.merge_stats(work.backend.merge_ranks, *inputs, out, objective.demand, store.has_target_logits)
        if has_sums and not is_teacher_last:
            store.sum_statistics(rows, out)
            if work.shard is not None:
                work.shard.add_sums(out, objective.demand)
        return rows, out

    for span in spans:
        span_rows = slice(span[0].start, span[-1].stop)
        if coefficients is None:
            for chunk in span:
                rows, out = filled(chunk)
            if has_unit_rows:
                span_coefficients: Any = objective.unit_coefficients(stats, span_rows, not is_teacher_last)
            else:
                span_coefficients = objective.run_losses(
                    stats, span_rows, grads is not None, is_closed, not is_teacher_last
                )
        else:
            rows, out, span_coefficients = rows_of(span_rows), stats.narrow(span_rows), coefficients.narrow(span_rows)
        if grads is None:
            continue
        if grads.gradient_buffer is not None:
            grads.gradient_buffer.written = True
        if len(span) == 1:
            store.add_gradients(rows, out, span_coefficients, grads)
            continue
        for chunk in span:  # logits are made again: later chunks have overwritten them
            rows, out = filled(chunk)
            chunk_coefficients = span_coefficients.narrow(
                slice(chunk.start - span_rows.start, chunk.stop - span_rows.start)
            )
            store.add_gradients(rows, out, chunk_coefficients, grads)
    if grads is not None:
        store.finish(grads)
        if grads.over_ranks is not None:
            grads.over_ranks.wait()
