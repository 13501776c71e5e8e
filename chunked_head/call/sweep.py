"""The loop over chunks of tokens that every call runs, and the work of calls on hidden states."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from ..arithmetic.objective import Objective, ScalarObjective
from ..core.memory import Cache, empty
from ..core.stats import Coefficients, RowStats
from ..parallel.agreement import begin_backward
from ..parallel.shard import Shard
from ..plan.planner import find_late_plan
from ..plan.plans import Plan
from ..plan.segments import Spans
from ..plan.sizes import DEFAULT_REQUEST, Request, slices
from ..stores import Backend
from ..stores.gradients import GradientBuffer, Gradients
from ..stores.operands import Head, Kept, Rows
from ..stores.quantised import QuantisedWeight
from ..stores.sets import SetStore, WithSets
from ..stores.store import Store
from .recording import RecordedSweep, run_recorded
from .tokens import Packing

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
#   batch fields [n] -- objective.visit --------> values of losses and metrics, summed up
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


def sweep(
    work: "LocalWork",
    operand: Tensor,  # hidden states [tokens, hidden] or logits [tokens, vocab], in the caller's order
    head: Head,
    stats_and_coefficients: tuple[RowStats, Coefficients] | None = None,
) -> tuple[RowStats, Gradients | None]:
    """Runs one pass over chunks of tokens. Returns the statistics of all tokens, and the gradients if the plan makes
    them in this pass.

    ``stats_and_coefficients``: those of all tokens, in a backward that recomputes logits, which makes only gradients.
    """
    objective, tokens = work.objective, len(work.objective.targets)
    is_recompute = stats_and_coefficients is not None
    if stats_and_coefficients is None:
        stats = RowStats.empty(tokens, objective.demand, objective.dtype, operand.device)
    else:
        stats, all_coefficients = stats_and_coefficients
    grads = work.new_gradients(operand, is_recompute)
    if not tokens:
        return stats, grads
    store, rows_of, spans = work.begin(operand, head, stats, grads, is_recompute)
    has_sums, plan = bool(objective.demand.sums), work.plan
    has_row_factors = plan is not None and plan.row_factors and not is_recompute
    # statistics of student and teacher are then made along with the gradients
    is_teacher_last = plan is not None and plan.teacher_last
    is_closed = work.spans is not None and work.has_vocabulary_rows  # each span has all tokens of its segments

    def filled(chunk: slice) -> tuple[Rows, RowStats]:
        rows, out = rows_of(chunk), stats if chunk.stop - chunk.start == tokens else stats.narrow(chunk)
        store.fill(rows, out)
        store.statistics(rows, out)
        if work.shard is not None:
            local_targets = rows.target if work.column_sets is None else work.local_targets[rows.tokens]
            inputs = rows.hidden, local_targets, work.token_checks[rows.tokens]
            work.shard.merge_stats(work.backend.merge_ranks, *inputs, out, objective.demand, store.known_targets)
        if has_sums and not is_teacher_last:
            store.sum_statistics(rows, out)
            if work.shard is not None:
                work.shard.add_sums(out, objective.demand)
        return rows, out

    for span in spans:
        span_rows = slice(span[0].start, span[-1].stop)
        if not is_recompute:
            for chunk in span:
                rows, out = filled(chunk)
            if not has_row_factors:
                coefficients = objective.visit(stats, span_rows, grads is not None, is_closed, not is_teacher_last)
            else:
                coefficients = objective.unit_coefficients(stats, span_rows, not is_teacher_last)
        else:
            rows, out, coefficients = rows_of(span_rows), stats.narrow(span_rows), all_coefficients.narrow(span_rows)
        if grads is None:
            continue
        assert coefficients is not None
        if grads.gradient_buffer is not None:
            grads.gradient_buffer.written = True
        if len(span) == 1:
            store.add_gradients(rows, out, coefficients, grads)
            continue
        for chunk in span:  # logits are made again: later chunks have overwritten them
            rows, out = filled(chunk)
            of_chunk = coefficients.narrow(slice(chunk.start - span_rows.start, chunk.stop - span_rows.start))
            store.add_gradients(rows, out, of_chunk, grads)
    if grads is not None:
        store.finish(grads)
        if grads.over_ranks is not None:
            grads.over_ranks.wait()
    return stats, grads


# What a sweep loops over: a store, a function from tokens to their rows, spans (chunks that wait for each other).
Loop = tuple[Store, Callable[[slice], Rows], Iterable[Sequence[slice]]]


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
        """Statistics of all tokens, and gradients where the forward pass makes them."""
        raise NotImplementedError

    def row_factors(self, stats: RowStats, upstream: tuple[Tensor | None, ...]) -> Tensor:
        """Factors of the rows that the forward pass has made, from statistics and upstream gradients of the outputs."""
        raise NotImplementedError

    def late_gradients(
        self, operands: Sequence[Any], stats: RowStats, upstream: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the operands, which autograd saved, from the upstream gradients of the outputs."""
        raise NotImplementedError

    def new_gradients(self, operand: Tensor, is_recompute: bool) -> Gradients | None:
        """Buffers of the sweep's gradients; None where this pass makes none."""
        raise NotImplementedError

    def begin(self, operand: Tensor, head: Head, stats: RowStats, grads: Gradients | None, is_recompute: bool) -> Loop:
        """What the sweep loops over: the store, a function from a chunk to its rows, and the spans."""
        raise NotImplementedError

    def with_teacher(self, tensors: Sequence[Tensor]) -> Self:
        """The work with these tensors in place of its dense teacher's."""
        objective = self.objective
        if objective.teacher is None:
            return self
        objective = replace(objective, teacher=objective.teacher.with_tensors(tensors))
        return replace(self, objective=objective)

    @property
    def has_row_factors(self) -> bool:
        """True where the forward pass makes rows of hidden's gradient that backward multiplies by ``row_factors``."""
        return self.plan is not None and self.plan.row_factors

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
        return targets if column_sets is None else targets.masked_fill(column_sets.has, -1)

    @functools.cached_property
    def column_sets(self) -> Kept | None:
        """Sets of columns of tokens, as columns of this rank; None: all softmaxes are over the vocabulary."""
        column_sets = self.objective.column_sets
        if column_sets is None or self.shard is None:
            return column_sets
        return replace(column_sets, columns=self.shard.local_columns(column_sets.columns))

    @property
    def has_vocabulary_rows(self) -> bool:
        """True where some softmax may be over the vocabulary: a matmul makes logits."""
        return self.objective.column_sets is None or not self.objective.column_sets.everywhere

    @functools.cached_property
    def local_columns(self) -> Tensor | None:
        """[tokens, K] int64: each token's ``teacher_ids`` as columns of this rank, -1 for an id of another rank; None
        without such ids."""
        columns = self.objective.columns
        return columns if columns is None or self.shard is None else self.shard.local_columns(columns)

    @functools.cached_property
    def token_checks(self) -> Tensor:
        """[tokens] numbers that ranks that share the vocabulary compare: equal where they have the same tokens."""
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
        """[vocab] class weights of this rank's columns, in the dtype of statistics; None without any."""
        weights = self.objective.class_weights
        return weights if weights is None or self.shard is None else weights[self.shard.local_ids].contiguous()


@dataclass(eq=False, kw_only=True)
class HeadWork(LocalWork):
    """The work of a call on hidden states."""

    plan: Plan
    request: Request = DEFAULT_REQUEST
    packing: Packing | None = None  # the order in which rows run; None: the caller's
    recordings: Cache[Any, RecordedSweep] | None = None  # ``Spec.recordings``; None where the sweep cannot be recorded
    fp8_weight: QuantisedWeight | None = None  # the caller's copy of the weight in e4m3

    def head(self, weight: Tensor, bias: Tensor | None) -> Head:
        """The head in the dtype of the matmuls. Under autocast it is a copy, made once for the pass."""
        sizes = self.plan.sizes
        bias = None if bias is None else bias[: sizes.vocab].to(sizes.dtype).contiguous()
        weight = weight.to(sizes.dtype)
        if sizes.padding:
            weight = weight[: sizes.vocab]
        if len(weight) == 1:
            weight = weight.view(-1).view(weight.shape)  # with the usual strides, which kernels take
        add_targets, fp8 = None if self.shard is None else self.shard.add_targets, None
        if sizes.fp8:
            fp8 = self.backend.rounded_head(weight, self.fp8_weight)
            if self.plan.e4m3_gradients and sizes.hidden_grad:
                make, copy = self.backend.transposed, self.fp8_weight
                fp8 = fp8._replace(transposed=make(fp8.weight.values) if copy is None else copy.transposed(make))
        return Head(weight, bias, self.class_weights, self.logit_scale, self.softcap, add_targets, fp8)

    def forward(self, operands: Sequence[Any]) -> tuple[RowStats, Gradients | None]:
        hidden, weight, bias = operands
        head = self.head(weight, bias)
        if self.recordings is not None:
            return run_recorded(sweep, self, hidden, head)
        stats, grads = sweep(self, hidden, head)
        if self.packing is not None and grads is not None and grads.hidden is not None:
            grads.hidden = self.packing.unpack(grads.hidden)
        return stats, grads

    def row_factors(self, stats: RowStats, upstream: tuple[Tensor | None, ...]) -> Tensor:
        """What this rank's rows of hidden's gradient are multiplied by [tokens], in the caller's order."""
        factors = self.objective.row_factors(stats, upstream)
        if self.packing is not None:
            factors = self.packing.unpack(factors)
        factors = factors * self.objective.one_or_nan
        return factors if self.shard is None else self.shard.own_tokens(factors).contiguous()

    def recomputing(self) -> "HeadWork":
        """The work with a plan that makes gradients in backward, as a second backward over a retained graph does."""
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
        """Computes the logits again. Returns the gradients of hidden states, weight and bias from all tokens'
        coefficients."""
        hidden, weight, bias = operands[:3]
        packing, one_or_nan = self.packing, self.objective.one_or_nan
        _, grads = sweep(self, hidden, self.head(weight, bias), (stats, coefficients))
        assert grads is not None
        dhidden, *head_gradients = grads.finish(self.backend, [one_or_nan], one_or_nan, self.plan.sizes)
        return dhidden if packing is None or dhidden is None else packing.unpack(dhidden), *head_gradients

    def new_gradients(self, hidden: Tensor, is_recompute: bool) -> Gradients | None:
        plan = self.plan
        if not is_recompute and plan.schedule != "forward":
            return None
        hidden_dtype = plan.sizes.hidden_dtype if is_recompute else plan.hidden_accumulate
        grads = Gradients.empty(plan.sizes, hidden_dtype, plan.weight_accumulate, hidden.device, self.gradient_buffer)
        grads.over_ranks = None if self.shard is None else self.shard.hidden_gradient()
        if grads.hidden is not None and self.packing is not None and self.packing.count is not None:
            grads.hidden.zero_()  # products do not write rows of tokens that do not count
        return grads

    def begin(self, hidden: Tensor, head: Head, stats: RowStats, grads: Gradients | None, is_recompute: bool) -> Loop:
        plan, backend, teacher, sets = self.plan, self.backend, self.objective.teacher, None
        if self.objective.column_sets is not None:
            assert self.column_sets is not None
            packed_hidden = hidden if self.packing is None else self.packing.pack(hidden)
            set_rows = Rows(packed_hidden, self.local_targets, self.local_columns, self.objective.scale)
            sets = SetStore(backend, head, self.column_sets, set_rows, self.objective.demand)
            if not self.has_vocabulary_rows:
                return sets, lambda chunk: set_rows, [(set_rows.tokens,)]
        teacher = None if teacher is None else teacher.cast_head()  # one cast for the pass, as the weight's
        targets, columns, scale = self.softmax_targets, self.local_columns, self.objective.scale
        order, count = (None, None) if self.packing is None else (self.packing.order, self.packing.count)
        every_row = Rows(hidden, targets, columns, scale, teacher, count, order=order)
        most, tokens = plan.block_tokens if is_recompute else plan.chunk_tokens, plan.sizes.tokens
        gathered = None if self.shard is None else self.shard.gathered(hidden, most)
        clean_hidden = empty(most, hidden.shape[1], dtype=plan.sizes.dtype, device=hidden.device)
        if teacher is not None and teacher.hidden is not None and teacher.weight is not None:
            teacher_hidden = teacher.hidden
            clean_teacher_hidden = teacher.weight.new_empty(most, teacher_hidden.shape[1])

        def rows_of(chunk: slice) -> Rows:
            """The rows of a chunk. The store copies ``Rows.source`` to ``Rows.hidden``, with 0 where a token does not
            count; a teacher's rows have 0 there already."""
            count = chunk.stop - chunk.start
            rows = every_row if count == tokens else every_row.narrow(chunk)
            source, order, teacher_rows = rows.hidden, rows.order, rows.teacher
            if gathered is not None:
                source, order = gathered.chunk(chunk)  # rows rank after rank; the store copies them in the call's order
            if teacher_rows is not None and teacher_rows.hidden is not None:
                clean, raw = clean_teacher_hidden[:count], teacher_rows.hidden if rows.order is None else teacher_hidden
                backend.clean_rows(clean, raw, rows.target, rows.order)
                teacher_rows = replace(teacher_rows, hidden=clean)
            clean = clean_hidden if count == most else clean_hidden[:count]
            return rows._replace(hidden=clean, source=source, order=order, teacher=teacher_rows)

        store = backend.store_of(head, plan, every_row, is_recompute)
        spans = [(chunk,) for chunk in slices(tokens, most)] if is_recompute or self.spans is None else self.spans
        return store if sets is None else WithSets(store, sets), rows_of, spans
