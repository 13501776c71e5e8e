"""The losses' arithmetic: from statistics to values and coefficients, on vectors of one number per token.

For ``n`` tokens let ``s`` be their statistics ([n] each, ``logprob``, ``lse``, ...), and of summand ``i`` let ``l_i``
be the unreduced loss, ``m_i`` the mask and ``w_i`` the token weights, all [n] (or [segments], [pairs]), and
``f_i = coefficient_i / D_i`` the factor, [], of which ``D_i`` is the denominator. ``omega`` are the class weights.

1. Values: ``v_i = m_i w_i l_i(s)``. Values of tokens are rows of a table [rows, n], losses' rows first, then metrics';
   ``totals`` sums up the complete table once.
2. Derivatives: autograd on these vectors gives ``g_s = d/ds sum_i f_i sum v_i``, [n] for each statistic.
3. Coefficients: with ``ds/dx_j`` by the chain rule the gradient of the logits is, in each row,

       dL/dx_j = sum_s g_s ds/dx_j = p_j (alpha + eta (x_j - lse)) - beta 1[j = target] - kappa omega_j - ...

   ``coefficients_of`` makes alpha, eta, ..., [n] each, from ``g_s``; kernels of gradients read nothing else of a loss.

``evaluate`` runs ``values_of`` in PyTorch; or, if all losses are the library's, a Triton kernel that is written from a
trace of ``values_of`` (``vectors.py``).
"""

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

from ..core.memory import Cache, empty
from ..core.private import anomalies_at, in_own_thread
from ..core.statistics import OF_LOSSES, statistics_at
from ..core.stats import HEAVY_VECTORS, SUFFIX, RowStats, vectors_at
from ..losses.base import Measure, Summand
from ..losses.batch import Batch, Copies, Stats
from ..metrics import Metric
from ..metrics.values import OF_NOTHING, selected
from ..parallel.tokens import RankSums
from ..stores import Backend
from .demand import Structure

if TYPE_CHECKING:
    from .vectors import VectorKernel  # imports Triton

Named = dict[str, Tensor]  # tensors by name
Arithmetic = tuple["VectorKernel", tuple[str, ...]]  # a kernel, and names of its coefficients in order
# by the key of ``arithmetic_of``; None where there is no kernel
KERNELS: Cache[tuple, Arithmetic | None] = Cache(256)


class Inputs(NamedTuple):
    """The inputs of the losses' arithmetic for n tokens, without the statistics."""

    target: Tensor  # [n] int64, -1 where a token does not count
    fields: Named
    num_segments: int | None
    summand_factors: Tensor  # [summands] the coefficient of each over its denominator D
    tensors: list[Named]  # for each summand the tensors among its options, by name
    metric_weights: Named  # by weighting, "token" excepted: [n] from ``weights_in``
    token_fields: frozenset[str] = frozenset()  # names of ``fields`` that have a row for each token
    withheld: frozenset[str] = frozenset()  # names of fields of the call that are not in ``fields``
    rank_sums: RankSums | None = None  # sums over ranks, where ranks hold different tokens

    def map(self, change: Callable[[Tensor, int | None], Tensor]) -> "Inputs":
        """The inputs with ``change(tensor, dim)`` in place of each tensor. ``dim``: the tensor's dimension of
        tokens, or None."""
        along = {name: 0 if name in self.token_fields else None for name in self.fields}
        return self._replace(
            target=change(self.target, 0),
            summand_factors=change(self.summand_factors, None),
            fields={name: change(value, along[name]) for name, value in self.fields.items()},
            tensors=[{name: change(value, None) for name, value in of_summand.items()} for of_summand in self.tensors],
            metric_weights={name: change(value, 0) for name, value in self.metric_weights.items()},
        )

    def narrow(self, rows: slice) -> "Inputs":
        """The inputs of a slice of tokens, sharing memory."""
        first, count = rows.start, rows.stop - rows.start
        return self.map(lambda value, dim: value if dim is None else value.narrow(dim, first, count))


def values_of(structure: Structure, leaves: Named, inputs: Inputs) -> tuple[Named, list[Tensor], list[Tensor]]:
    """The arithmetic of n tokens in PyTorch: returns coefficients by name; a list of the table's rows, each [n]; and a
    list of the values of segments and pairs, each [units] or [components, units]."""
    batch = Batch(inputs.fields, inputs.target, inputs.num_segments, structure.vocab, inputs.rank_sums, inputs.withheld)
    leaves = masked(leaves, batch.mask)
    dtype, sloped_names = leaves["lse"].dtype, structure.leaves if structure.summands else ()
    sloped_leaves = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items() if name in sloped_names}
    table_rows, unit_values, total_loss = list[Tensor](), list[Tensor](), inputs.summand_factors.new_zeros(())
    for i, (summand, view) in enumerate(structure.summands):
        with torch.set_grad_enabled(bool(sloped_leaves)):
            loss_leaves = leaves
            if sloped_leaves:
                # a factor of 0 gives 0 by selection: the slope may be infinite
                is_zero = inputs.summand_factors[i] == 0
                loss_leaves = leaves | {
                    name: torch.where(is_zero, leaf.detach(), leaf) for name, leaf in sloped_leaves.items()
                }
            mask, stats = share_mask(summand.unit, batch), stats_at(structure, summand, view, loss_leaves)
            if summand.is_builtin:
                values = summand.function(stats, batch, **summand.options, **inputs.tensors[i])
            else:
                values = values_of_user(summand, stats, batch, mask, inputs.tensors[i])
            if summand.unit == "token":
                name = summand.token_weights
                assert name is None or isinstance(name, str)
                if (token_weights := inputs.fields.get("token_weights" if name is None else name)) is not None:
                    values = values * token_weights.to(dtype)
            values = torch.where(mask, values, 0)
            if sloped_leaves:
                total_loss = total_loss + (values * inputs.summand_factors[i]).sum()
        (table_rows if summand.unit == "token" else unit_values).append(values.detach())
    coefficients: Named = {}
    if sloped_leaves:
        grads = tuple([torch.zeros_like(leaf) for leaf in sloped_leaves.values()])
        if total_loss.requires_grad:
            with anomalies_at(batch.mask) if torch.is_anomaly_enabled() else contextlib.nullcontext():
                grads = torch.autograd.grad(
                    total_loss, tuple(sloped_leaves.values()), allow_unused=True, materialize_grads=True
                )
        # 0 by selection where a token does not count: a loss may have an infinite slope there
        slopes = masked(dict(zip(sloped_leaves, grads, strict=True)), batch.mask)
        coefficients = coefficients_of(structure, slopes, leaves)
    metric_stats, masks = dict[Any, Stats](), dict[str, Tensor]()
    for metric, view in structure.metrics:
        if metric.unit not in masks:
            masks[metric.unit] = share_mask(metric.unit, batch)
        mask = masks[metric.unit]
        stats_key = (
            view,
            metric.reads_target,
            metric.is_builtin,
            metric.needs,
            *structure.sum_vectors[metric, view].items(),
        )
        if stats_key not in metric_stats:
            metric_stats[stats_key] = stats_at(structure, metric, view, leaves)
        stats = metric_stats[stats_key]
        if metric.is_builtin:
            value = metric.function(stats, batch, **metric.options)
        else:
            value = values_of_user(metric, stats, batch, mask)
        value_columns = (
            value if isinstance(value, tuple) else (value, value.square()) if metric.components == 2 else (value,)
        )
        if metric.unit == "token":
            weights = inputs.metric_weights.get(metric.weighting)
            table_rows += [selected(metric, column, mask, weights) for column in value_columns]
        else:
            unit_values.append(torch.stack([selected(metric, column, mask) for column in value_columns]))
    return coefficients, [row.to(dtype) for row in table_rows], unit_values


def values_of_user(measure: Measure, stats: Stats, batch: Batch, mask: Tensor, tensors: Named | None = None) -> Tensor:
    """Values of a user's loss or metric, one for each element of ``mask`` (a token, segment or pair). The user's
    function gets copies of its arguments; ValueError for values of another shape."""
    values = measure.values(Stats(Copies(stats.values)), batch.copies(), Copies(tensors or {}))
    if values.shape != mask.shape:
        shapes_text = f"{tuple(mask.shape)} here; got {tuple(values.shape)}"
        raise ValueError(f"{measure.label} must return one value per {measure.unit}, {shapes_text}")
    return values


def stats_at(structure: Structure, measure: Summand | Metric, view: int, leaves: Named) -> Stats:
    """The ``Stats`` of a loss or metric at its softmax ``view``: the statistics that a function of the library
    ``needs``; for a user's function all statistics of the call."""
    suffix, ratio = SUFFIX[view], structure.views[view].ratio
    lse = leaves["lse" + suffix]
    values = {"logprob": leaves["logprob" + suffix], "lse": lse}
    if not measure.reads_target:
        del values["logprob"]  # a call without targets has none
    for statistic in OF_LOSSES:
        names = vectors_at(statistic, view)
        is_needed = not measure.is_builtin or not measure.needs.isdisjoint(statistic.words)
        if is_needed and names[0] in leaves:
            softmax = leaves["lse_base" + suffix], leaves["neg_log_sum" + suffix], lse
            values |= statistic.values([leaves[name] for name in names], softmax, ratio, structure.vocab)
    values.update({name: leaves[vector] for name, vector in structure.sum_vectors[measure, view].items()})
    if "teacher_argmax" in leaves:
        values["teacher_argmax"] = leaves["teacher_argmax"].to(torch.int64)
    return Stats(values)


def masked(vectors: Named, mask: Tensor) -> Named:
    """Vectors [n] or [n, c] with 0 where ``mask`` [n] is false; by selection, since they may be nan there."""
    return {name: torch.where(mask if value.dim() == 1 else mask[:, None], value, 0) for name, value in vectors.items()}


def unit_mask(unit: str, batch: Batch) -> Tensor:
    """Mask of the tokens that count, of the segments with such a token, or of the pairs of two such segments."""
    if unit == "token":
        return batch.mask
    counted = batch.segment_count() > 0
    if unit == "segment":
        return counted
    pairs = batch["pairs"]
    is_pair = (pairs >= 0).all(1)
    return is_pair & counted[pairs.clamp(min=0)].all(1)


def share_mask(unit: str, batch: Batch) -> Tensor:
    """``unit_mask``, but each segment or pair is True on only one of the ranks that hold different tokens: that rank
    adds its value to the loss."""
    if unit == "token":
        return batch.mask
    counted = unit_mask(unit, batch)
    if batch.rank_sums is None:
        return counted
    return counted & batch.rank_sums.own_share(len(counted), counted.device)


def arithmetic_of(
    structure: Structure, leaves: Named, inputs: Inputs
) -> tuple[Arithmetic | None, list[Tensor | float]]:
    """Returns the kernel for inputs of these kinds, or None where there is no kernel; and the list of the kernel's
    arguments."""
    if not structure.is_builtin:
        return None, []
    argument_tensors = [
        *leaves.values(),
        inputs.target, inputs.summand_factors, *inputs.fields.values(),  # from here on as ``Inputs.map``
        *[tensor for of_summand in inputs.tensors for tensor in of_summand.values()], *inputs.metric_weights.values(),
    ]  # fmt: skip
    tensor_kinds = tuple([(tensor.dtype, tensor.dim(), tensor.is_contiguous()) for tensor in argument_tensors])
    structure_code, numbers = structure.split
    key = (
        structure_code,
        tuple(leaves),
        tuple(inputs.fields),
        inputs.token_fields,
        tuple(inputs.metric_weights),
        tensor_kinds,
    )
    arguments: list[Tensor | float] = [*argument_tensors, *numbers]
    return KERNELS.get_or_make(key, lambda: make_arithmetic(structure, leaves, inputs, arguments)), arguments


def make_arithmetic(
    structure: Structure, leaves: Named, inputs: Inputs, arguments: list[Tensor | float]
) -> Arithmetic | None:
    """A kernel of ``values_of``, traced on inputs of these kinds; None for fp64, for sums over segments, and for
    losses with several columns per token."""
    measures = [measure for measure, _ in (*structure.summands, *structure.metrics)]
    is_wider = any(measure.scope != "token" for measure in measures) or any(leaf.dim() > 1 for leaf in leaves.values())
    has_gaps = any(isinstance(value, Tensor) and not value.is_contiguous() for value in arguments)
    if is_wider or has_gaps or leaves["lse"].dtype != torch.float32:
        return None
    from .vectors import vector_kernel

    coefficient_names: list[str] = []

    def function(operands: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        operand = iter(operands)
        vectors = {name: next(operand) for name in leaves}
        mapped = inputs.map(lambda value, dim: next(operand))
        coefficients, rows, _ = values_of(structure.with_numbers(operand), vectors, mapped)
        coefficient_names[:] = coefficients
        return list(coefficients.values()), rows

    token_dims: list[int | None] = [0] * len(leaves)  # for each argument the dimension of tokens, or None

    def note(value: Tensor, dim: int | None) -> Tensor:
        token_dims.append(dim)
        return value

    inputs.map(note)
    token_dims += [None] * (len(arguments) - len(token_dims))  # numbers
    # in a thread of its own, modes and hooks around the call do not reach the trace
    kernel = in_own_thread(functools.partial(vector_kernel, function, arguments, token_dims))
    return None if kernel is None else (kernel, tuple(coefficient_names))


def evaluate(
    structure: Structure, stats: RowStats, inputs: Inputs, rows: slice, backend: Backend | None, table: Tensor
) -> tuple[Named, list[Tensor]]:
    """Returns coefficients of the tokens ``rows`` by name, and a list of the values of segments and pairs, [units]
    or [components, units] each; writes values of tokens to ``table`` [values, tokens]. A Triton kernel runs if there
    is one, else PyTorch. Hooks of an activation checkpoint do not run: the graph of the vectors ends in this
    function."""
    if backend is not None and backend.name == "triton":
        arithmetic, arguments = arithmetic_of(structure, vectors_of(stats), inputs)
        if arithmetic is not None:
            kernel, names = arithmetic
            chunk_coefficients = empty(len(names), rows.stop - rows.start, dtype=table.dtype, device=table.device)
            kernel(arguments, rows, chunk_coefficients, table)
            return dict(zip(names, chunk_coefficients.unbind(0), strict=True)), []
    if rows.stop - rows.start < len(inputs.target):
        stats, inputs = stats.narrow(rows), inputs.narrow(rows)
    with plain_saving():
        coefficients, token_values, unit_values = values_of(structure, vectors_of(stats), inputs)
    if token_values:
        table[:, rows] = torch.stack(token_values)
    return coefficients, unit_values


def vectors_of(stats: RowStats) -> Named:
    """The statistics that losses and metrics may read, by name: all but the lists of heavy ids."""
    if stats.heavy_ids is None:
        return stats.by_name
    return {name: value for name, value in stats.by_name.items() if name not in HEAVY_VECTORS}


def under_hooks() -> bool:
    """True where autograd passes saved tensors to hooks, as inside of an activation checkpoint or of offloading."""
    try:
        with disable_saved_tensors_hooks("to switch them off raises where there are some"):
            return False
    except RuntimeError:
        return True


def plain_saving() -> contextlib.AbstractContextManager[Any]:
    """A context in which autograd passes saved tensors to no hooks, for functions that are differentiated inside it."""
    # autograd calls the innermost hooks only
    return saved_tensors_hooks(Tensor.detach, Tensor.detach) if under_hooks() else contextlib.nullcontext()


def totals(structure: Structure, table: Tensor, unit_values: list[list[Tensor]], one_or_nan: Tensor) -> list[Tensor]:
    """For each summand and each metric, the sum or extremum of its values over all tokens: [], or [c] for c components.

    ``table``: values of tokens [values, tokens], losses' rows first, then metrics'. ``unit_values``: values of segments
    and pairs, by chunk. If an id was out of range, sums of metrics are nan; sums of summands become nan later, by their
    denominators.
    """
    sums = table.sum(1)
    if structure.metrics:
        sums = sums * one_or_nan
    # each chunk has values of the segments with tokens in it only
    values_by_unit_measure = (torch.cat(of_chunks, -1) for of_chunks in zip(*unit_values, strict=True))
    first_row, reduced_values = 0, []
    reductions = ["mean"] * len(structure.summands) + [metric.reduce for metric, _ in structure.metrics]
    for reduce, width in zip(reductions, structure.widths, strict=True):
        values = next(values_by_unit_measure) if width == 0 else table[first_row : first_row + width]
        if reduce != "mean":
            values = torch.nn.functional.pad(values, (0, 1), value=OF_NOTHING[reduce])  # so that amax has an element
            total = values.amax(-1) if reduce == "max" else values.amin(-1)
        else:
            total = values.sum(-1) * one_or_nan if width == 0 else sums[first_row : first_row + width]
        reduced_values.append(total.squeeze())
        first_row += width
    return reduced_values


def coefficients_of(structure: Structure, grads: Named, leaves: Named) -> Named:
    """The coefficients of a gradient's terms, from the derivatives ``grads`` of the loss by statistics. The chain rule
    needs the statistics' derivatives by a row of logits:

        d logprob = 1[target] - p,   d lse = p,   d sum f = s - p total,   d x_k = 1[k]

    and those of ``core/statistics.py``, each times the ratio of the view. ``f`` is the function of a sum over the
    vocabulary, ``s`` its slope and ``total`` the sum of s (``core/records.py``, ``SumFunction``).
    """
    coefficients: Named = {}

    def add_coefficient(name: str, value: Tensor) -> None:
        coefficients[name] = coefficients[name] + value if name in coefficients else value

    for i, (ratio, _) in enumerate(structure.views):
        suffix = SUFFIX[i]
        if "lse" + suffix in grads:
            add_coefficient("alpha" + suffix, ratio * grads["lse" + suffix])
        if "logprob" + suffix in grads:
            slope = ratio * grads["logprob" + suffix]
            add_coefficient("alpha" + suffix, -slope)
            add_coefficient("beta", -slope)
        for statistic in statistics_at(i):
            name = vectors_at(statistic, i)[0]
            if statistic.slopes is not None and name in grads:
                for factor, value in statistic.slopes(grads[name], leaves[name], ratio).items():
                    add_coefficient(factor + suffix, value)
    for i, vocabulary_sum in enumerate(structure.sums):
        if (name := f"sum{i}") not in grads:
            continue
        slope = structure.views[vocabulary_sum.view].ratio * grads[name]
        sums: dict[object, Any] = {"value": leaves[name], "slopes": leaves.get(f"{name}_total")}
        if vocabulary_sum.function.total != "gradient":
            slope_total: Any = sums.get(vocabulary_sum.function.total, vocabulary_sum.function.total)
            # where g is 0, a user's slopes may be infinite
            alpha_share = (
                torch.where(slope == 0, 0.0, slope * slope_total)
                if vocabulary_sum.function.source
                else slope * slope_total
            )
            add_coefficient("alpha" + SUFFIX[vocabulary_sum.view], -alpha_share)
        add_coefficient(name, slope)
    return coefficients
