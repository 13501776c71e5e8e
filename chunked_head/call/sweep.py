"""The loop over chunks of tokens that every call runs; and calls on hidden states and a head."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..arithmetic.objective import Objective, ScalarObjective
from ..core.stats import Coefficients, RowStats
from ..kernels.common.cache import Cache
from ..kernels.common.memory import empty
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
from .recording import Recorded, recorded
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
#                       shard.merge ------------> lse, logprob, ... [n] s each         of the vocabulary: one message
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
# coefficients, and backward's sweep runs ``store.add_gradients`` only, from ``known`` statistics and coefficients.
# Logits that exist are one chunk, and dlogits are their gradient.


def sweep(
    call: "LocalCall",
    given: Tensor,  # hidden states [tokens, hidden] or logits [..., vocab], as given
    head: Head,
    known: tuple[RowStats, Coefficients] | None = None,
) -> tuple[RowStats, Gradients | None]:
    """One pass over chunks of tokens: statistics, and gradients where the call makes them in this pass.

    ``known``: statistics and coefficients of all tokens, from which only gradients are made.
    """
    objective, tokens = call.objective, len(call.objective.target)
    stats = RowStats.empty(tokens, objective.demand, objective.dtype, given.device) if known is None else known[0]
    grads = call.new_gradients(given, known is not None)
    if not tokens:
        return stats, grads
    store, rows_of, spans = call.begin(given, head, stats, grads, known is not None)
    sums = bool(objective.demand.sums)
    # a teacher's statistics come with the gradients
    last = call.plan is not None and call.plan.teacher_last
    closed = call.spans is not None and call.multiplies  # no other tokens belong to a span's segments

    def filled(at: slice) -> tuple[Rows, RowStats]:
        rows, out = rows_of(at), stats.at(at)
        store.fill(rows, out)
        store.statistics(rows, out)
        if call.shard is not None:
            target = rows.target if call.kept is None else call.every_target[rows.tokens]
            of_rows = rows.hidden, target, rows.columns, call.token_checks[rows.tokens]
            call.shard.merge(call.backend.merge_ranks, *of_rows, out, objective.demand, store.known_targets)
        if sums and not last:
            store.sum_statistics(rows, out)
            if call.shard is not None:
                call.shard.add_sums(out, objective.demand)
        return rows, out

    for span in spans:
        every = slice(span[0].start, span[-1].stop)
        if known is None:
            for at in span:
                rows, out = filled(at)
            coefficients = objective.visit(stats, every, grads is not None, closed, not last)
        else:
            rows, out, coefficients = rows_of(every), stats.at(every), known[1].at(every)
        if grads is None:
            continue
        assert coefficients is not None
        if grads.gradient_buffer is not None:
            grads.gradient_buffer.written = True
        if len(span) == 1:
            store.add_gradients(rows, out, coefficients, grads)
            continue
        for at in span:  # made again: later chunks have overwritten them
            rows, out = filled(at)
            of_chunk = coefficients.at(slice(at.start - every.start, at.stop - every.start))
            store.add_gradients(rows, out, of_chunk, grads)
    if grads is not None:
        store.finish(grads)
        if grads.over_ranks is not None:
            grads.over_ranks.wait()
    return stats, grads


# The work of one sweep: the store, its rows, and spans (chunks that wait for each other's statistics).
Work = tuple[Store, Callable[[slice], Rows], Iterable[Sequence[slice]]]


@dataclass(eq=False, kw_only=True)
class LocalCall:
    """A call on hidden states or on logits: everything of it that takes no gradient."""

    backend: Backend
    objective: Objective
    logit_scale: float
    softcap: float | None
    shard: Shard | None  # this rank's part of the vocabulary, where ranks share it
    plan: Plan | None = None  # None for logits that exist already
    gradient_buffer: GradientBuffer | None = None  # where the weight's gradient goes, instead of back
    spans: Spans | None = None  # rows that wait for each other only; None: as the plan says
    inplace: bool = False  # the gradient overwrites the logits

    # statistics of all tokens, and gradients where the forward pass makes them
    forward: ClassVar[Callable[..., tuple[RowStats, Gradients | None]]]
    # the operands' gradients, from what autograd saved of them, statistics and upstream gradients
    late_gradients: ClassVar[Callable[..., tuple[Tensor | None, ...]]]
    # (operand, statistics known) -> buffers of the sweep's gradients, or None
    new_gradients: ClassVar[Callable[..., Gradients | None]]
    # (operand, head, statistics, gradients, statistics known) -> the sweep's work
    begin: ClassVar[Callable[..., Work]]

    def with_teacher(self, tensors: Sequence[Tensor]) -> Self:
        """The call with these tensors in place of its dense teacher's."""
        objective = self.objective
        if objective.teacher is None:
            return self
        objective = replace(objective, teacher=objective.teacher.with_tensors(tensors))
        return replace(self, objective=objective)

    @functools.cached_property
    def every_target(self) -> Tensor:
        """[tokens] int64: this rank's columns, -1 where a token does not count, ``ELSEWHERE`` for other ranks'."""
        target = self.objective.target
        return target if self.shard is None else self.shard.local_targets(target)

    @functools.cached_property
    def target(self) -> Tensor:
        """[tokens] int64: ``every_target`` with -1 where the softmax is over a set of columns."""
        kept, target = self.objective.kept, self.every_target
        return target if kept is None else target.masked_fill(kept.has, -1)

    @functools.cached_property
    def kept(self) -> Kept | None:
        """Sets of columns, those of this rank."""
        kept = self.objective.kept
        if kept is None or self.shard is None:
            return kept
        return replace(kept, columns=self.shard.local_columns(kept.columns))

    @property
    def multiplies(self) -> bool:
        """True where there may be rows whose logits a matmul makes."""
        return self.objective.kept is None or not self.objective.kept.everywhere

    @functools.cached_property
    def columns(self) -> Tensor | None:
        """[tokens, K] int64: the columns of each row, those of this rank, -1 for none here."""
        columns = self.objective.columns
        return columns if columns is None or self.shard is None else self.shard.local_columns(columns)

    @functools.cached_property
    def token_checks(self) -> Tensor:
        """[tokens] what has to be equal on ranks that share the vocabulary."""
        assert self.shard is not None
        numbers, scale, kept = self.objective.target, self.objective.scale, self.objective.kept
        if kept is not None:
            entries = kept.columns if kept.bias is None else kept.columns + kept.bias.float().view(torch.int32)
            numbers = torch.index_add(numbers, 0, kept.rows.clamp(min=0), entries.long())
        if scale is not None:
            numbers = numbers + scale.float().view(torch.int32)
        return self.shard.token_checks(numbers, self.objective.dtype)

    @property
    def class_weights(self) -> Tensor | None:
        """[vocab] of this rank's columns, in the dtype of statistics."""
        weights = self.objective.class_weights
        return weights if weights is None or self.shard is None else weights[self.shard.here].contiguous()


@dataclass(eq=False, kw_only=True)
class HeadCall(LocalCall):
    """A call on hidden states."""

    plan: Plan
    request: Request = DEFAULT_REQUEST
    packing: Packing | None = None  # the order in which rows run
    recordings: Cache[Any, Recorded] | None = None  # of its Spec, where its sweep can be recorded
    fp8_weight: QuantisedWeight | None = None  # the caller's copy of the weight

    @property
    def counted(self) -> Tensor | None:
        """[] how many rows count, those first, where products stop at them."""
        return None if self.packing is None else self.packing.count

    @property
    def order(self) -> Tensor | None:
        """[tokens] int64: each row's place in hidden states as given; None: in order."""
        return None if self.packing is None else self.packing.order

    def head(self, weight: Tensor, bias: Tensor | None, hidden: Tensor) -> Head:
        """The head in the dtype of the matmuls: under autocast the weight is cast here, once."""
        sizes = self.plan.sizes
        bias = None if bias is None else bias[: sizes.vocab].to(sizes.dtype).contiguous()
        weight = weight.to(sizes.dtype)
        if sizes.padding:
            weight = weight[: sizes.vocab]
        if len(weight) == 1:
            weight = weight.view(-1).view(weight.shape)  # its stride is an argument of kernels
        add_targets, fp8 = None if self.shard is None else self.shard.add_targets, None
        if sizes.fp8:
            target = self.target if self.shard is None else self.shard.own_tokens(self.target)
            rows = hidden, target, self.order
            fp8 = self.backend.rounded_head(weight, bias, self.fp8_weight, *rows, sizes.deterministic)
        return Head(weight, bias, self.class_weights, self.logit_scale, self.softcap, add_targets, fp8)

    def forward(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[RowStats, Gradients | None]:
        """Statistics of all tokens, and gradients where the forward pass makes them."""
        head = self.head(weight, bias, hidden)
        if self.recordings is not None:
            return recorded(sweep, self, hidden, head)
        stats, grads = sweep(self, hidden, head)
        if self.packing is not None and grads is not None and grads.hidden is not None:
            grads.hidden = self.packing.unpack(grads.hidden)
        return stats, grads

    def recomputing(self) -> "HeadCall":
        """The call with gradients in backward, as a second backward over a retained graph needs them too."""
        if self.plan.schedule == "recompute":
            return self
        plan = find_late_plan(self.plan.sizes, self.request)
        if isinstance(plan, str):
            raise ValueError(f"a second backward over a retained graph computes the logits again: {plan}")
        return replace(self, plan=plan)

    def late_gradients(
        self, operands: Sequence[Any], stats: RowStats, upstream: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of hidden states, weight and bias once the upstream gradients are known."""
        if self.shard is not None:
            begin_backward(self.shard.group)
            if not isinstance(self.objective, ScalarObjective):
                upstream = self.shard.upstream_of_all_ranks(upstream)
        coefficients = self.objective.coefficients_for(stats, upstream)
        return self.recomputing().recompute(operands, stats, coefficients)

    def recompute(
        self, operands: Sequence[Any], stats: RowStats, coefficients: Coefficients
    ) -> tuple[Tensor | None, ...]:
        """Gradients of hidden states, weight and bias from all tokens' coefficients, by computing logits again."""
        hidden, weight, bias = operands[:3]
        packing, one_or_nan = self.packing, self.objective.one_or_nan
        _, grads = sweep(self, hidden, self.head(weight, bias, hidden), (stats, coefficients))
        assert grads is not None
        of_hidden, *others = grads.finish(self.backend, [one_or_nan], one_or_nan, self.plan.sizes)
        return of_hidden if packing is None or of_hidden is None else packing.unpack(of_hidden), *others

    def new_gradients(self, given: Tensor, known: bool) -> Gradients | None:
        plan = self.plan
        if not known and plan.schedule != "forward":
            return None
        of_hidden = plan.sizes.hidden_dtype if known else plan.hidden_accumulate
        grads = Gradients.empty(plan.sizes, of_hidden, plan.weight_accumulate, given.device, self.gradient_buffer)
        grads.over_ranks = None if self.shard is None else self.shard.hidden_gradient()
        if self.counted is not None and grads.hidden is not None:
            grads.hidden.zero_()  # where a token does not count nothing is computed
        return grads

    def begin(self, given: Tensor, head: Head, stats: RowStats, grads: Gradients | None, known: bool) -> Work:
        plan, backend, teacher, sets = self.plan, self.backend, self.objective.teacher, None
        if self.objective.kept is not None:
            assert self.kept is not None
            packed = given if self.packing is None else self.packing.pack(given)
            of_sets = Rows(packed, self.every_target, self.columns, self.objective.scale)
            sets = SetStore(backend, head, self.kept, of_sets, self.objective.demand)
            if not self.multiplies:
                return sets, lambda at: of_sets, [(of_sets.tokens,)]
        teacher = None if teacher is None else teacher.cast()  # once, as the weight
        every = Rows(given, self.target, self.columns, self.objective.scale, teacher, self.counted, order=self.order)
        most, tokens = plan.block_tokens if known else plan.chunk_tokens, plan.sizes.tokens
        gathered = None if self.shard is None else self.shard.gathered(given, most)
        buffer = empty(most, given.shape[1], dtype=plan.sizes.dtype, device=given.device)
        if teacher is not None and teacher.hidden is not None and teacher.weight is not None:
            of_teacher = teacher.hidden
            teacher_buffer = teacher.weight.new_empty(most, of_teacher.shape[1])

        def rows_of(at: slice) -> Rows:
            """Tokens ``at`` of the call, for a store to clean; a teacher's are clean."""
            count = at.stop - at.start
            rows = every if count == tokens else every.at(at)
            source, order, of_rows = rows.hidden, rows.order, rows.teacher
            if gathered is not None:
                source, order = gathered.chunk(at)  # by rank; clean rows stand in the call's order
            if of_rows is not None and of_rows.hidden is not None:
                clean = teacher_buffer[:count]
                backend.clean_rows(clean, of_rows.hidden if rows.order is None else of_teacher, rows.target, rows.order)
                of_rows = replace(of_rows, hidden=clean)
            out = buffer if count == most else buffer[:count]
            return rows._replace(hidden=out, source=source, order=order, teacher=of_rows)

        store = backend.store_of(head, plan, every, known)
        spans = [(at,) for at in slices(tokens, most)] if known or self.spans is None else self.spans
        return store if sets is None else WithSets(store, sets), rows_of, spans
