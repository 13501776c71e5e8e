"""Calls on hidden states and a head."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..arithmetic.objective import Objective, ScalarObjective
from ..core.stats import Coefficients, RowStats
from ..kernels.common.recording import refuse
from ..parallel.shard import Shard
from ..plan.planner import NoPlan, find_plan
from ..plan.plans import Plan
from ..plan.segments import Spans
from ..plan.sizes import DEFAULT_REQUEST, Request, slices
from ..stores import Backend
from ..stores.gradients import GradientBuffer, Gradients
from ..stores.operands import Head, Rows
from ..stores.sets import WithSets
from .sweep import LocalCall, Work, sweep
from .tokens import Packing


@dataclass(frozen=True, eq=False)
class HeadCall(LocalCall):
    """A call on hidden states: everything of it that takes no gradient."""

    plan: Plan
    backend: Backend
    objective: Objective
    logit_scale: float
    softcap: float | None
    request: Request = DEFAULT_REQUEST
    gradient_buffer: GradientBuffer | None = None  # where the weight's gradient goes, instead of back
    packing: Packing | None = None  # the order in which rows run
    spans: Spans | None = None  # of rows whose gradients wait for each other only; None: as the plan says
    shard: Shard | None = None  # this rank's part of the vocabulary, where ranks share it
    padded: bool = False  # rows that do not count follow the call's: targets have them, hidden states have not
    inplace = False

    @property
    def counted(self) -> Tensor | None:
        """[] how many rows count, those first, where products stop at them."""
        return None if self.packing is None else self.packing.count

    def head(self, weight: Tensor, bias: Tensor | None) -> Head:
        """The head in the dtype of the matmuls: under autocast the weight is cast here, once."""
        sizes = self.plan.sizes
        bias = None if bias is None else bias[: sizes.vocab].to(sizes.dtype).contiguous()
        weight = weight.to(sizes.dtype)
        if sizes.padding:
            weight = weight[: sizes.vocab]
        if len(weight) == 1:
            weight = weight.view(-1).view(weight.shape)  # its stride is an argument of kernels, and may be any
        add_targets = None if self.shard is None else self.shard.add_targets
        return Head(weight, bias, self.class_weights, self.logit_scale, self.softcap, add_targets)

    @property
    def teacher_last(self) -> bool:  # type: ignore[override]
        return self.plan.teacher_last

    def forward(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[RowStats, Gradients | None]:
        """Statistics of all tokens, and gradients where the forward pass makes them."""
        head, packing = self.head(weight, bias), self.packing
        if packing is None:
            return sweep(self, hidden, head)
        stats, grads = sweep(self, packing.pack(hidden), head)
        if grads is not None and grads.hidden is not None:
            grads.hidden = packing.unpack(grads.hidden)
        return stats, grads

    def recomputing(self) -> "HeadCall":
        """The call with a plan that makes gradients in backward: for the second one over a retained graph too."""
        if self.plan.schedule == "recompute":
            return self
        plan = find_plan(
            replace(self.plan.sizes, late_upstream=True), Request(memory_budget=self.request.memory_budget)
        )
        if isinstance(plan, NoPlan):
            raise ValueError(f"a second backward over a retained graph computes the logits again: {plan}")
        return replace(self, plan=plan)

    def late_gradients(
        self, operands: Sequence[Any], stats: RowStats, upstream: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of hidden states, weight and bias once the upstream gradients are known."""
        if self.padded:
            more = self.plan.sizes.tokens - len(operands[0])
            upstream = tuple([each if each is None or not each.dim() else F.pad(each, (0, more)) for each in upstream])
        if self.shard is not None and not isinstance(self.objective, ScalarObjective):
            upstream = self.shard.whole_upstream(upstream)
        coefficients = self.objective.coefficients_for(stats, upstream)
        return self.recomputing().recompute(operands, stats, coefficients)

    def recompute(
        self, operands: Sequence[Any], stats: RowStats, coefficients: Coefficients
    ) -> tuple[Tensor | None, ...]:
        """Gradients of hidden states, weight and bias from coefficients of all tokens; logits are computed again."""
        hidden, weight, bias = operands[:3]
        head, packing, one_or_nan = self.head(weight, bias), self.packing, self.objective.one_or_nan
        rows = hidden if packing is None else packing.pack(hidden)
        _, grads = sweep(self, rows, head, (stats, coefficients))
        assert grads is not None
        of_hidden, *others = grads.finish(self.backend, [one_or_nan], one_or_nan, self.plan)
        return of_hidden if packing is None or of_hidden is None else packing.unpack(of_hidden), *others

    def new_gradients(self, given: Tensor, known: bool) -> Gradients | None:
        plan = self.plan
        if not known and plan.schedule != "forward":
            return None
        of_hidden = plan.sizes.hidden_dtype if known else plan.hidden_accumulate
        grads = Gradients.empty(plan, of_hidden, given.device, self.gradient_buffer)
        grads.over_ranks = None if self.shard is None else self.shard.hidden_gradient()
        if self.counted is not None and grads.hidden is not None:
            grads.hidden.zero_()  # where a token does not count nothing is computed
        return grads

    def begin(self, given: Tensor, head: Head, stats: RowStats, grads: Gradients | None, known: bool) -> Work:
        plan, backend, teacher, sets = self.plan, self.backend, self.objective.teacher, None
        if self.objective.kept is not None:
            assert self.kept is not None
            of_sets = self.rows_of_sets(given)
            sets = backend.sets_store(head, self.kept, of_sets, self.objective.demand)
            if not self.multiplies:
                return sets, lambda at: of_sets, [(of_sets.tokens,)]
        teacher = None if teacher is None else teacher.cast()  # once, as the weight
        every = self.every_row(given, teacher, self.counted)
        most, tokens = plan.block_tokens if known else plan.chunk_tokens, plan.sizes.tokens
        gathered = None if self.shard is None else self.shard.gathered(given, most)
        buffer = torch.empty(most, given.shape[1], dtype=plan.sizes.dtype, device=given.device)
        if teacher is not None and teacher.hidden is not None and teacher.weight is not None:
            teacher_buffer = teacher.weight.new_empty(most, teacher.hidden.shape[1])

        def rows_of(at: slice) -> Rows:
            """Tokens ``at`` of the call, for a store to clean; a teacher's are clean."""
            count = at.stop - at.start
            rows = every if count == tokens else every.at(at)
            source, order, of_rows = rows.hidden, None, rows.teacher
            if gathered is not None:
                source, order = gathered.chunk(at)  # by rank; clean rows stand in the call's order
            elif at.start >= len(given):  # where another call's tokens of this chunk lie, this one cannot say
                refuse("a chunk without a token")
                source = given[-1:]
            if of_rows is not None and of_rows.hidden is not None:
                clean = teacher_buffer[:count]
                backend.clean_rows(clean, of_rows.hidden, rows.target, None)
                of_rows = replace(of_rows, hidden=clean)
            out = buffer if count == most else buffer[:count]
            return rows._replace(hidden=out, source=source, order=order, teacher=of_rows)

        store = backend.store_of(head, plan, every, None if known else stats)
        spans = [(at,) for at in slices(tokens, most)] if known or self.spans is None else self.spans
        return store if sets is None else WithSets(store, sets), rows_of, spans
