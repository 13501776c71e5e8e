"""Sweeps that run from a recording: which sweeps can, and the key that finds a recording.

The first sweep of a key runs normally, the second is recorded (``kernels/common/recording.py``), later ones replay it.
A key holds everything that a sweep depends on except addresses and contents of tensors. Where memory lies otherwise
than a step recorded it, the sweep runs normally.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..arithmetic.objective import LossObjective, Objective, ScalarObjective
from ..core.checks import mismatch
from ..core.stats import RowStats
from ..plan.plans import Plan
from ..stores.gradients import Gradients
from ..stores.operands import Head

# of a ``HeadCall``, rows of hidden states and a head
Sweep = Callable[[Any, Tensor, Head], tuple[RowStats, Gradients | None]]
ALIGNED = 16  # bytes
NOT_YET = object()  # in the place of a recording
FEW_TOKENS = 8192  # above it torch sorts the targets, and the device takes longer than the host


@dataclass(eq=False)
class Recorded:
    """A sweep that has been met."""

    plan: Plan  # alive as long as its number is in the key
    # ``kernels.common.recording.Recording``; NOT_YET after the first sweep, None where there can be none
    steps: Any = NOT_YET
    stats: tuple[str, ...] = ()  # names of the first results; values and gradients follow


def is_recordable(plan: Plan, objective: Objective) -> bool:
    """True where a sweep consists of launches, products and new memory: losses are the library's own, and there are no
    other ranks, teacher, sets of columns or packed rows."""
    sizes = plan.sizes
    return (
        sizes.own_matmul
        and sizes.tokens <= FEW_TOKENS
        and sizes.dtype == torch.bfloat16
        and not (sizes.deterministic or sizes.padding or sizes.bias_grad or sizes.skips or sizes.coupled)
        and not (sizes.by_segments or sizes.ranks > 1 or sizes.fp8)
        and objective.teacher is None
        and objective.kept is None
        and objective.columns is None
        and objective.structure.builtin
        and not objective.exchanges
        and getattr(objective, "forward_coefficients", None) is None
    )


def inputs_of(call: Any, given: Tensor, head: Head) -> list[Tensor | None]:
    """Tensors that the sweep may read or add to, in an order that the Spec decides."""
    objective = call.objective
    found = [given, head.weight, head.bias, head.class_weights, objective.target, objective.scale]
    if isinstance(objective, LossObjective):
        inputs = objective.inputs
        found += [inputs.factors, *inputs.fields.values(), *inputs.metric_weights.values()]
        found += [tensor for named in inputs.tensors for tensor in named.values()]
    return found if call.gradient_buffer is None else [*found, call.gradient_buffer.buffer]


def recorded(sweep: Sweep, call: Any, given: Tensor, head: Head) -> tuple[RowStats, Gradients | None]:
    """``sweep(call, given, head)``, by its recording where there is one."""
    plan, objective, recordings = call.plan, call.objective, call.recordings
    assert recordings is not None
    if getattr(objective, "table", None) is not None:  # of an earlier sweep, which this one would write to
        return sweep(call, given, head)
    inputs = inputs_of(call, given, head)
    # the first product of the first stream is stored in the gradient's buffer, all others are added
    buffer, numbers = call.gradient_buffer, (call.logit_scale, call.softcap)
    # everything that steps depend on except addresses and contents
    kinds = [one if one is None else (one.dtype, one.shape, one.stride(), one.data_ptr() % ALIGNED) for one in inputs]
    key = id(plan), numbers, None if buffer is None else buffer.fresh, given.device, tuple(kinds)
    found = recordings.get(key)
    if found is None:
        recordings[key] = Recorded(plan)
        return sweep(call, given, head)
    there = [tensor for tensor in inputs if tensor is not None]
    if found.steps is not NOT_YET:
        if buffer is not None:
            buffer.written = plan.schedule == "forward"
        results = None if found.steps is None else found.steps.run(there)
        return sweep(call, given, head) if results is None else results_of(call, found, results)
    found.steps = None
    assert call.backend.recording is not None
    with call.backend.recording(there) as recorder:
        stats, grads = sweep(call, given, head)
    named, scalar = stats.named(), isinstance(objective, ScalarObjective)
    tables = [objective.table] if scalar else []
    made = [] if grads is None else [each for each in (grads.hidden, grads.weight) if each is not None]
    if not scalar or objective.table is not None:
        # backward alone reads the statistics of a scalar loss; those of values per token are returned
        steps = recorder.finish([*named.values(), *tables, *made], len(named) if scalar else 0)
        recordings[key] = Recorded(plan, steps, tuple(named))
    return stats, grads


def results_of(call: Any, found: Recorded, results: list[Tensor]) -> tuple[RowStats, Gradients | None]:
    """Results of a recording as those of a sweep."""
    left = iter(results)
    stats = RowStats.of({name: next(left) for name in found.stats})
    if isinstance(call.objective, ScalarObjective):
        table, rows = next(left), sum(call.objective.structure.widths)
        if table.shape[0] != rows:
            raise mismatch("a recording", f"{table.shape[0]} values of a token", rows)
        call.objective.table = table
    if call.plan.schedule != "forward":
        return stats, None
    sizes = call.plan.sizes
    hidden, weight = (next(left) if there else None for there in (sizes.hidden_grad, sizes.weight_grad))
    return stats, Gradients(hidden, weight, None, call.gradient_buffer)
