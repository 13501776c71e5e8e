"""Recordings of sweeps: which sweeps can be recorded, and the key that finds a recording.

The first sweep of a key runs normally, the second is recorded (``kernels/common/recording.py``), later ones replay it.
A key holds everything that a sweep depends on except addresses and contents of tensors. If a tensor lies in memory
that the recorded steps cannot take, the sweep runs normally.
"""

from typing import Any

import torch
from torch import Tensor

from ..arithmetic.objective import LossObjective, Objective, ScalarObjective
from ..core.checks import mismatch
from ..core.stats import RowStats
from ..plan.plans import Plan
from ..stores.gradients import Gradients
from ..stores.operands import Head

ALIGNED = 16  # bytes; keys hold addresses modulo this number
NOT_YET = object()  # in place of the ``Recording`` of a sweep that has run once and was not recorded yet
FEW_TOKENS = 8192  # with more, torch sorts the targets, which no recording has, and host time is hidden anyway
# the plan, which stays alive since the recording's key holds its id; and ``kernels.common.recording.Recording``,
# ``NOT_YET``, or None if the sweep cannot be recorded
PlanAndRecording = tuple[Plan, Any]


def is_recordable(plan: Plan, objective: Objective) -> bool:
    """True if a sweep consists of launches, products and new memory only. No loss may be a user's function, and the
    call may have no other ranks, no teacher, no sets of columns and no packed rows."""
    sizes = plan.sizes
    return (
        sizes.own_matmul
        and sizes.tokens <= FEW_TOKENS
        and sizes.dtype == torch.bfloat16
        and not (sizes.deterministic or sizes.padding or sizes.bias_grad or sizes.has_device_count)
        and not (sizes.waits_for_all or sizes.ends_with_segments or sizes.ranks > 1)
        and objective.teacher is None
        and objective.column_sets is None
        and objective.columns is None
        and objective.structure.is_builtin
        and not objective.exchanges
        and not getattr(objective, "keeps_coefficients", False)
    )


def inputs_of(work: Any, hidden: Tensor, head: Head) -> list[Tensor | None]:
    """Tensors that the sweep may read or add to, in an order that is the same for all calls of a Spec."""
    objective = work.objective
    tensors = [hidden, head.weight, head.bias, head.class_weights, objective.targets, objective.scale]
    tensors += [] if head.fp8 is None else head.fp8.tensors
    if isinstance(objective, LossObjective):
        inputs = objective.inputs
        tensors += [inputs.summand_factors, *inputs.fields.values(), *inputs.metric_weights.values()]
        tensors += [tensor for tensors_by_name in inputs.summand_tensors for tensor in tensors_by_name.values()]
    elif work.plan.has_unit_rows:
        tensors.append(objective.unit_slopes)
    return tensors if work.gradient_buffer is None else [*tensors, work.gradient_buffer.buffer]


def run_recorded(work: Any, hidden: Tensor, head: Head) -> tuple[RowStats, Gradients | None]:
    """Returns the results of ``work.sweep(hidden, head)``: replays the recording of the sweep's key, or runs,
    and perhaps records, the sweep. ``work``: a ``HeadWork``."""
    plan, objective, recordings = work.plan, work.objective, work.recordings
    assert recordings is not None
    if getattr(objective, "table", None) is not None:  # it holds an earlier sweep's values, to which this one adds
        return work.sweep(hidden, head)
    inputs = inputs_of(work, hidden, head)
    # ``buffer.fresh``: the first product of the first stream is stored in the buffer, all others are added
    buffer, scale_and_cap = work.gradient_buffer, (work.logit_scale, work.softcap)
    input_kinds = [x if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() % ALIGNED) for x in inputs]
    key = id(plan), scale_and_cap, None if buffer is None else buffer.fresh, hidden.device, tuple(input_kinds)
    plan_and_recording = recordings.get(key)
    if plan_and_recording is None:
        recordings[key] = plan, NOT_YET
        return work.sweep(hidden, head)
    recording, present_inputs = plan_and_recording[1], [tensor for tensor in inputs if tensor is not None]
    if recording is not NOT_YET:
        if buffer is not None:
            buffer.written = plan.schedule == "forward"
        results = None if recording is None else recording.replay(present_inputs)
        return work.sweep(hidden, head) if results is None else results_of(work, results)
    recordings[key] = plan, None
    assert work.backend.recording is not None
    with work.backend.recording(present_inputs) as recorder:
        stats, grads = work.sweep(hidden, head)
    vectors, is_scalar = stats.by_name.values(), isinstance(objective, ScalarObjective)
    tables = [objective.table] if is_scalar else []
    gradients = [] if grads is None else [grad for grad in (grads.hidden, grads.weight) if grad is not None]
    if not is_scalar or objective.table is not None:
        # statistics of a scalar loss are read by backward only; a call with values per token returns them
        recordings[key] = plan, recorder.end([*vectors, *tables, *gradients], len(vectors) if is_scalar else 0)
    return stats, grads


def results_of(work: Any, results: list[Tensor]) -> tuple[RowStats, Gradients | None]:
    """The tensors that a recording returns, as the statistics and gradients that ``sweep`` returns."""
    result_tensors = iter(results)
    stats = RowStats.from_dict({name: next(result_tensors) for name in work.plan.sizes.layout.forms})
    if isinstance(work.objective, ScalarObjective):
        table, table_rows = next(result_tensors), sum(work.objective.structure.widths)
        if table.shape[0] != table_rows:
            raise mismatch("a recording", f"{table.shape[0]} values of a token", table_rows)
        work.objective.table = table
    if work.plan.schedule != "forward":
        return stats, None
    sizes = work.plan.sizes
    dhidden = next(result_tensors) if sizes.hidden_grad else None
    dweight = next(result_tensors) if sizes.weight_grad else None
    return stats, Gradients(dhidden, dweight, None, work.gradient_buffer)
