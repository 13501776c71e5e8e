"""The losses' arithmetic: from statistics to values and coefficients, on vectors of one number per token.

Names, for ``n`` tokens: ``s`` is a statistic [n], such as ``logprob`` or ``lse``. Summand ``i`` has the unreduced loss
``l_i``, the mask ``m_i`` and the token weights ``w_i``, each [n], [segments] or [pairs]. ``D_i`` is its denominator and
``f_i = coefficient_i / D_i`` its factor, [] each. ``omega`` are the class weights.

1. Values: ``v_i = m_i w_i l_i(s)``. Values of tokens are rows of a table [rows, n], losses' rows first, then metrics'.
   ``totals`` sums up the complete table once.
2. Derivatives: autograd on these vectors gives ``g_s = d/ds sum_i f_i sum v_i``, [n] for each statistic.
3. Coefficients: the chain rule multiplies ``g_s`` by ``ds/dx_j``. The gradient of a row of logits is

       dL/dx_j = sum_s g_s ds/dx_j = p_j (alpha + eta (x_j - lse)) - beta 1[j = target] - kappa omega_j - ...

   ``coefficients_of`` makes alpha, eta, ..., [n] each, from ``g_s``; kernels of gradients read nothing else of a loss.

``evaluate`` runs ``values_of`` in PyTorch. If all losses and metrics are the library's, ``evaluate`` runs a Triton
kernel instead, which ``vectors.py`` writes from a trace of ``values_of``.
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

TensorsByName = dict[str, Tensor]
Arithmetic = tuple["VectorKernel", tuple[str, ...]]  # a kernel, and names of its coefficients in order
# by the key that ``arithmetic_of`` makes; None where there is no kernel
KERNELS: Cache[tuple, Arithmetic | None] = Cache(256)


class Inputs(NamedTuple):
    """The inputs of the losses' arithmetic for n tokens, without the statistics."""

    target: Tensor  # [n] int64, -1 where a token does not count
    fields: TensorsByName  # of the batch
    num_segments: int | None
    summand_factors: Tensor  # [summands]: each summand's coefficient divided by its denominator D
    summand_tensors: list[TensorsByName]  # for each summand the tensors among its options
    metric_weights: TensorsByName  # by weighting, "token" excepted: [n] from ``weights_in``
    token_fields: frozenset[str] = frozenset()  # names of ``fields`` that have a row for each token
    withheld: frozenset[str] = frozenset()  # names of fields of the call that are not in ``fields``
    rank_sums: RankSums | None = None  # sums over ranks, where ranks hold different tokens

    def map(self, function: Callable[[Tensor, int | None], Tensor]) -> "Inputs":
        """The inputs with ``function(tensor, dim)`` in place of each tensor. ``dim``: the tensor's dimension of
        tokens, or None."""
        field_dims = {name: 0 if name in self.token_fields else None for name in self.fields}
        return self._replace(
            target=function(self.target, 0),
            summand_factors=function(self.summand_factors, None),
            fields={name: function(value, field_dims[name]) for name, value in self.fields.items()},
            summand_tensors=[
                {name: function(value, None) for name, value in tensors.items()} for tensors in self.summand_tensors
            ],
            metric_weights={name: function(value, 0) for name, value in self.metric_weights.items()},
        )

    def narrow(self, rows: slice) -> "Inputs":
        """The inputs of the tokens ``rows``, sharing memory."""
        first_row, row_count = rows.start, rows.stop - rows.start
        return self.map(lambda value, dim: value if dim is None else value.narrow(dim, first_row, row_count))


def values_of(
    structure: Structure, vectors: TensorsByName, inputs: Inputs
) -> tuple[TensorsByName, list[Tensor], list[Tensor]]:
    """The arithmetic of n tokens in PyTorch, from the statistics ``vectors``. Returns coefficients by name; a list of
    the table's rows, each [n]; and a list of the values of segments and pairs, each [units] or [components, units]."""
    batch = Batch(inputs.fields, inputs.target, inputs.num_segments, structure.vocab, inputs.rank_sums, inputs.withheld)
    vectors = masked(vectors, batch.mask)
    dtype, leaf_names = vectors["lse"].dtype, structure.leaf_names if structure.summands else ()
    leaf_vectors = {name: vector.detach().requires_grad_() for name, vector in vectors.items() if name in leaf_names}
    table_rows, unit_values, total_loss = list[Tensor](), list[Tensor](), inputs.summand_factors.new_zeros(())
    for i, (summand, view) in enumerate(structure.summands):
        with torch.set_grad_enabled(bool(leaf_vectors)):
            loss_vectors = vectors
            if leaf_vectors:
                # a factor of 0 gives 0 by selection: the slope may be infinite
                is_zero = inputs.summand_factors[i] == 0
                loss_vectors = vectors | {
                    name: torch.where(is_zero, vector.detach(), vector) for name, vector in leaf_vectors.items()
                }
            mask = share_mask(summand.unit, batch)
            statistics = statistics_of(structure, summand, view, loss_vectors)
            values = unreduced_values(summand, statistics, batch, mask, inputs.summand_tensors[i])
            if summand.unit == "token":
                weights_field = "token_weights" if summand.token_weights is None else summand.token_weights
                assert isinstance(weights_field, str)
                if (token_weights := inputs.fields.get(weights_field)) is not None:
                    values = values * token_weights.to(dtype)
            values = torch.where(mask, values, 0)
            if leaf_vectors:
                total_loss = total_loss + (values * inputs.summand_factors[i]).sum()
        (table_rows if summand.unit == "token" else unit_values).append(values.detach())
    coefficients: TensorsByName = {}
    if leaf_vectors:
        grads = tuple([torch.zeros_like(vector) for vector in leaf_vectors.values()])
        if total_loss.requires_grad:
            with anomalies_at(batch.mask) if torch.is_anomaly_enabled() else contextlib.nullcontext():
                grads = torch.autograd.grad(
                    total_loss, tuple(leaf_vectors.values()), allow_unused=True, materialize_grads=True
                )
        # 0 by selection where a token does not count: a loss may have an infinite slope there
        slopes = masked(dict(zip(leaf_vectors, grads, strict=True)), batch.mask)
        coefficients = coefficients_of(structure, slopes, vectors)
    metric_statistics, masks = dict[Any, TensorsByName](), dict[str, Tensor]()
    for metric, view in structure.metrics:
        if metric.unit not in masks:
            masks[metric.unit] = share_mask(metric.unit, batch)
        mask, sum_vectors = masks[metric.unit], structure.sum_vectors[metric, view]
        key = view, metric.reads_target, metric.is_builtin, metric.needs, *sum_vectors.items()
        if key not in metric_statistics:
            metric_statistics[key] = statistics_of(structure, metric, view, vectors)
        values = unreduced_values(metric, metric_statistics[key], batch, mask, {})
        value_columns = (
            values if isinstance(values, tuple) else (values, values.square()) if metric.components == 2 else (values,)
        )
        if metric.unit == "token":
            weights = inputs.metric_weights.get(metric.weighting)
            table_rows += [selected(metric, column, mask, weights) for column in value_columns]
        else:
            unit_values.append(torch.stack([selected(metric, column, mask) for column in value_columns]))
    return coefficients, [row.to(dtype) for row in table_rows], unit_values


def unreduced_values(
    measure: Measure, statistics: TensorsByName, batch: Batch, mask: Tensor, tensors: TensorsByName
) -> Any:
    """Values of a loss or metric: a tensor, or for some metrics of the library a tuple of tensors. A user's function
    gets copies of its arguments. ValueError unless it returns a value for each element of ``mask``: each token, segment
    or pair."""
    if measure.is_builtin:
        return measure.function(Stats(statistics), batch, **measure.options, **tensors)
    values = measure.values(Stats(Copies(statistics)), batch.copies(), Copies(tensors))
    if values.shape != mask.shape:
        shapes_text = f"{tuple(mask.shape)} here; got {tuple(values.shape)}"
        raise ValueError(f"{measure.label} must return one value per {measure.unit}, {shapes_text}")
    return values


def statistics_of(structure: Structure, measure: Summand | Metric, view: int, vectors: TensorsByName) -> TensorsByName:
    """The statistics that a loss or metric may read at its softmax ``view``. A function of the library gets
    ``logprob``, ``lse`` and the statistics in ``needs``; a user's function gets all statistics of the call."""
    suffix, (ratio, _) = SUFFIX[view], structure.views[view]
    lse = vectors["lse" + suffix]
    values = {"logprob": vectors["logprob" + suffix], "lse": lse}
    if not measure.reads_target:
        del values["logprob"]  # a call without targets has none
    for statistic in OF_LOSSES:
        if measure.is_builtin and measure.needs.isdisjoint(statistic.words):
            continue
        vector_names = vectors_at(statistic, view)
        if vector_names[0] in vectors:
            softmax_vectors = vectors["lse_base" + suffix], vectors["neg_log_sum" + suffix], lse
            values |= statistic.values([vectors[n] for n in vector_names], softmax_vectors, ratio, structure.vocab)
    values.update({name: vectors[sum_name] for name, sum_name in structure.sum_vectors[measure, view].items()})
    if "teacher_argmax" in vectors:
        values["teacher_argmax"] = vectors["teacher_argmax"].to(torch.int64)
    return values


def masked(vectors: TensorsByName, mask: Tensor) -> TensorsByName:
    """Vectors [n] or [n, c] with 0 where ``mask`` [n] is false. The 0 is selected, since vectors may be nan there."""
    return {name: torch.where(mask if value.dim() == 1 else mask[:, None], value, 0) for name, value in vectors.items()}


def unit_mask(unit: str, batch: Batch) -> Tensor:
    """A bool mask of units: of tokens that count; of segments with a token that counts; or of pairs of which both
    segments have a token that counts."""
    if unit == "token":
        return batch.mask
    is_counted = batch.segment_count() > 0
    if unit == "segment":
        return is_counted
    pairs = batch["pairs"]
    is_pair = (pairs >= 0).all(1)
    return is_pair & is_counted[pairs.clamp(min=0)].all(1)


def share_mask(unit: str, batch: Batch) -> Tensor:
    """A mask of the tokens, segments or pairs (``unit``) that count and whose values this rank adds to the loss. Where
    ranks hold different tokens, a segment or pair is True on a single rank."""
    if unit == "token":
        return batch.mask
    is_counted = unit_mask(unit, batch)
    if batch.rank_sums is None:
        return is_counted
    return is_counted & batch.rank_sums.own_share(len(is_counted), is_counted.device)


def arithmetic_of(
    structure: Structure, vectors: TensorsByName, inputs: Inputs
) -> tuple[Arithmetic | None, list[Tensor | float]]:
    """Returns the kernel for the dtypes and dimensions of ``vectors`` and ``inputs``, or None where there is no kernel;
    and the list of the kernel's arguments."""
    if not structure.is_builtin:
        return None, []
    argument_tensors = [
        *vectors.values(),
        inputs.target, inputs.summand_factors, *inputs.fields.values(),  # from here on in the order of ``Inputs.map``
        *[tensor for tensors in inputs.summand_tensors for tensor in tensors.values()], *inputs.metric_weights.values(),
    ]  # fmt: skip
    tensor_kinds = tuple([(tensor.dtype, tensor.dim(), tensor.is_contiguous()) for tensor in argument_tensors])
    structure_code, numbers = structure.split
    names = tuple(vectors), tuple(inputs.fields), inputs.token_fields, tuple(inputs.metric_weights)
    arguments: list[Tensor | float] = [*argument_tensors, *numbers]
    key = structure_code, names, tensor_kinds
    return KERNELS.get_or_make(key, lambda: make_arithmetic(structure, vectors, inputs, arguments)), arguments


def make_arithmetic(
    structure: Structure, vectors: TensorsByName, inputs: Inputs, arguments: list[Tensor | float]
) -> Arithmetic | None:
    """A kernel of ``values_of`` for tensors with the dtypes and dimensions of ``arguments``; None for fp64, for sums
    over segments, and for losses with several columns per token."""
    has_sums = any(measure.scope != "token" for measure, _ in structure.measures)
    has_columns = any(vector.dim() > 1 for vector in vectors.values())
    has_gaps = any(isinstance(value, Tensor) and not value.is_contiguous() for value in arguments)
    if has_sums or has_columns or has_gaps or vectors["lse"].dtype != torch.float32:
        return None
    from .vectors import vector_kernel

    coefficient_names: list[str] = []

    def function(operands: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        operand_iterator = iter(operands)
        traced_vectors = {name: next(operand_iterator) for name in vectors}
        traced_inputs = inputs.map(lambda value, dim: next(operand_iterator))
        coefficients, rows, _ = values_of(structure.with_numbers(operand_iterator), traced_vectors, traced_inputs)
        coefficient_names[:] = coefficients
        return list(coefficients.values()), rows

    token_dims: list[int | None] = [0] * len(vectors)  # for each argument the dimension of tokens, or None

    def append_dim(value: Tensor, dim: int | None) -> Tensor:
        token_dims.append(dim)
        return value

    inputs.map(append_dim)
    token_dims += [None] * (len(arguments) - len(token_dims))  # numbers
    # in a thread of its own, modes and hooks around the call do not reach the trace
    kernel = in_own_thread(functools.partial(vector_kernel, function, arguments, token_dims))
    return None if kernel is None else (kernel, tuple(coefficient_names))


def evaluate(
    structure: Structure, stats: RowStats, inputs: Inputs, rows: slice, backend: Backend | None, table: Tensor
) -> tuple[TensorsByName, list[Tensor]]:
    """Returns coefficients of the tokens ``rows`` by name, and a list of the values of segments and pairs, [units]
    or [components, units] each. Writes values of tokens to the columns ``rows`` of ``table`` [values, tokens]. Runs a
    Triton kernel if there is one, else PyTorch. No hook of an activation checkpoint runs: the autograd graph of
    the vectors ends in this function."""
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


def vectors_of(stats: RowStats) -> TensorsByName:
    """The statistics that losses and metrics may read: all but the lists of heavy ids."""
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
    """A context in which autograd passes saved tensors to no hooks that were set around the context."""
    # autograd calls the innermost hooks only
    return saved_tensors_hooks(Tensor.detach, Tensor.detach) if under_hooks() else contextlib.nullcontext()


def totals(structure: Structure, table: Tensor, unit_values: list[list[Tensor]], one_or_nan: Tensor) -> list[Tensor]:
    """For each summand and each metric, the sum or extremum of its values over all tokens: [], or [c] for c components.

    ``table``: values of tokens [values, tokens], losses' rows first, then metrics'. ``unit_values``: values of segments
    and pairs, by chunk. If an id was out of range, metrics' sums are nan here; summands' sums become nan later, in
    the division by denominators.
    """
    sums = table.sum(1)
    if structure.metrics:
        sums = sums * one_or_nan
    # a chunk has values of those segments alone that have tokens in the chunk
    joined_unit_values = (torch.cat(chunk_values, -1) for chunk_values in zip(*unit_values, strict=True))
    first_row, reduced_values = 0, []
    reductions = ["mean"] * len(structure.summands) + [metric.reduce for metric, _ in structure.metrics]
    for reduce, width in zip(reductions, structure.widths, strict=True):
        values = next(joined_unit_values) if width == 0 else table[first_row : first_row + width]
        if reduce != "mean":
            values = torch.nn.functional.pad(values, (0, 1), value=OF_NOTHING[reduce])  # so that amax has an element
            total = values.amax(-1) if reduce == "max" else values.amin(-1)
        else:
            total = values.sum(-1) * one_or_nan if width == 0 else sums[first_row : first_row + width]
        reduced_values.append(total.squeeze())
        first_row += width
    return reduced_values


def coefficients_of(structure: Structure, grads: TensorsByName, vectors: TensorsByName) -> TensorsByName:
    """The coefficients of a gradient's terms by name, from the statistics ``vectors`` and the loss's derivatives
    ``grads`` by statistics. The chain rule multiplies ``grads`` by the derivatives of a statistic by the logits

        d logprob = 1[target] - p,   d lse = p,   d sum f = s - p total,   d x_k = 1[k]

    or by ``Statistic.slopes``, and by the ratio of the view. ``f`` is the function of a sum over the
    vocabulary, ``s`` its slope and ``total`` the sum of s (``core/records.py``, ``SumFunction``).
    """
    coefficients: TensorsByName = {}

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
                for coefficient_name, value in statistic.slopes(grads[name], vectors[name], ratio).items():
                    add_coefficient(coefficient_name + suffix, value)
    for i, vocabulary_sum in enumerate(structure.sums):
        if (name := f"sum{i}") not in grads:
            continue
        ratio, _ = structure.views[vocabulary_sum.view]
        slope = ratio * grads[name]
        function = vocabulary_sum.function
        if function.total != "gradient":
            total_vectors: dict[object, Any] = {"value": vectors[name], "slopes": vectors.get(f"{name}_total")}
            slope_total: Any = total_vectors.get(function.total, function.total)
            alpha_share = slope * slope_total
            if function.source:  # a user's slopes may be infinite where the loss's derivative is 0
                alpha_share = torch.where(slope == 0, 0.0, alpha_share)
            add_coefficient("alpha" + SUFFIX[vocabulary_sum.view], -alpha_share)
        add_coefficient(name, slope)
    return coefficients
