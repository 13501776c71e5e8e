"""The loop over token chunks, and its counterpart over blocks and tiles where gradients come after all statistics."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .backends import Backend
from .gradients import Gradients, add_tile
from .objective import Objective
from .plans import Plan
from .reduction import Reduction, split_gain
from .stats import Head, RowStats


@dataclass(frozen=True, eq=False)
class Call:
    """Everything of a call that takes no gradient."""

    plan: Plan
    backend: Backend
    objective: Objective
    reduction: Reduction
    logit_scale: float
    softcap: float | None

    @property
    def target(self) -> Tensor:
        return self.objective.target

    def head(self, weight: Tensor, bias: Tensor | None) -> Head:
        """The head in the dtype of the matmuls: under autocast the weight is cast here, once."""
        dtype = self.plan.sizes.dtype
        bias = None if bias is None else bias.to(dtype).contiguous()
        return Head(weight.to(dtype), bias, self.objective.class_weights, self.logit_scale, self.softcap)


class Operand:
    """Rows of hidden states as the matmuls take them, in one reused buffer."""

    def __init__(self, call: Call, hidden: Tensor, rows: int):
        self.call, self.hidden = call, hidden
        self.buffer = torch.empty(rows, hidden.shape[1], dtype=call.plan.sizes.dtype, device=hidden.device)

    def rows(self, rows: slice) -> Tensor:
        source = self.hidden[rows]
        out = self.buffer[: len(source)]
        self.call.backend.clean_rows(out, source, self.call.target[rows])
        return out


def sweep(call: Call, hidden: Tensor, head: Head) -> tuple[Tensor, RowStats, Gradients | None]:
    """One pass over token chunks: values, statistics, and in the ``forward`` schedule what becomes the gradients."""
    plan, objective, target = call.plan, call.objective, call.target
    dtype = torch.promote_types(plan.sizes.dtype, torch.float32)
    stats = RowStats.empty(plan.sizes.tokens, objective.needs_weighted_sum, dtype, hidden.device)
    values = torch.empty(plan.sizes.tokens, dtype=dtype, device=hidden.device)
    grads = None
    if plan.schedule == "forward":
        grads = Gradients.empty(plan, plan.hidden_accumulate, plan.weight_accumulate, hidden.device)
        scale = call.reduction.known_scale
    if plan.sizes.tokens == 0:
        return values, stats, grads
    operand = Operand(call, hidden, plan.chunk_tokens)
    session = call.backend.session(head, plan, tiled=False)
    for rows in plan.token_chunks():
        chunk, chunk_stats = operand.rows(rows), stats.at(rows)
        session.stats(chunk, target[rows], chunk_stats)
        values[rows] = objective.values(chunk_stats, rows)
        if grads is None:
            continue
        coefficients = objective.coefficients(chunk_stats, scale[rows], rows)
        session.add_gradients(rows, chunk, target[rows], chunk_stats, coefficients, grads)
    if grads is not None:
        session.finish(hidden, target, grads)
    return values, stats, grads


def recompute(call: Call, hidden: Tensor, head: Head, stats: RowStats, upstream: Tensor):
    """Gradients of hidden, weight and bias with the upstream gradient known, 0-d or per token.

    Blocks of tokens outside, tiles of the vocabulary inside: a tile of the weight's gradient is one product per block.
    """
    plan, target = call.plan, call.target
    scale = call.reduction.scaled(call.reduction.gain * call.reduction.inverse * upstream)
    gain = None
    if plan.sizes.dtype == torch.float16:
        scale, gain = split_gain(scale, call.reduction.unit)
    grads = Gradients.empty(plan, plan.sizes.hidden_dtype, plan.weight_accumulate, hidden.device)
    if plan.sizes.tokens:
        operand = Operand(call, hidden, plan.block_tokens)
        session = call.backend.session(head, plan, tiled=True)
        for block in plan.token_blocks():
            rows = operand.rows(block)
            coefficients = call.objective.coefficients(stats.at(block), scale[block], block)
            d_rows = None
            if grads.hidden is not None:
                d_rows = grads.hidden[block]
                if plan.hidden_accumulate != d_rows.dtype:
                    d_rows = torch.empty_like(d_rows, dtype=plan.hidden_accumulate)
            for tile in plan.column_tiles():
                dlogits = session.tile_grad(rows, tile, target[block], stats.at(block), coefficients)
                add_tile(dlogits, rows, head.weight[tile], d_rows, grads, tile, block.start == 0, gain, plan)
            if d_rows is not None and grads.hidden is not None:
                if gain is not None:
                    d_rows.mul_(gain)
                if d_rows.dtype != grads.hidden.dtype:
                    grads.hidden[block] = d_rows
    return grads.finish(call.backend, call.reduction.one_or_nan, plan)
