"""The losses' arithmetic: from statistics to values and coefficients, on vectors of one number per token.

For ``n`` tokens let ``s`` be their statistics ([n] each, ``logprob``, ``lse``, ...), and of summand ``i`` let ``l_i``
be the unreduced loss, ``m_i`` the mask and ``w_i`` the token weights, all [n] (or [segments], [pairs]), and
``f_i = coefficient_i / D_i`` the factor, [].

1. Values: ``v_i = m_i w_i l_i(s)``. Those of tokens are rows of a table [rows, n], with those of the metrics behind
   them; ``totals`` adds up the tables of all chunks in one go.
2. Derivatives: autograd on these vectors gives ``g_s = d/ds sum_i f_i sum v_i``, [n] for each statistic.
3. Coefficients: with ``ds/dx_j`` by the chain rule the gradient of the logits is, in each row,

       dL/dx_j = sum_s g_s ds/dx_j = p_j (alpha + eta (x_j - lse)) - beta 1[j = target] - kappa omega_j - ...

   whose factors, [n] each, ``coefficients_of`` makes of ``g_s``; the kernels know nothing else of a loss.

``evaluate`` does so by ``values_of`` in PyTorch, for any loss, or where losses are the library's by a Triton kernel
that is written from a trace of it (``vectors.py``).
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..core.memory import Cache, empty
from ..core.private import anomalies_at, in_own_thread, plain_saving
from ..core.statistics import OF_LOSSES, statistics_at
from ..core.stats import SUFFIX, RowStats, vectors_at
from ..losses.base import Measure, Summand
from ..losses.batch import Batch, Copies, Stats
from ..metrics import Metric
from ..metrics.values import OF_NOTHING, selected
from ..parallel.tokens import RankSums
from ..stores import Backend
from .demand import Structure

if TYPE_CHECKING:
    from .vectors import VectorKernel  # imports Triton

Named = dict[str, Tensor]
Arithmetic = tuple["VectorKernel", tuple[str, ...]]  # a kernel, and names of its coefficients in order
KERNELS: Cache[tuple, Arithmetic | None] = Cache(256)


class Inputs(NamedTuple):
    """Operands of the arithmetic but for the statistics, of some tokens."""

    target: Tensor  # [n] int64, -1 where a token does not count
    fields: Named
    num_segments: int | None
    factors: Tensor  # [summands] coefficient / D of each
    tensors: list[Named]  # of each summand
    metric_weights: Named  # [n] for each weighting but "token"
    token_fields: frozenset[str] = frozenset()  # of ``fields``, sliced with the tokens
    withheld: frozenset[str] = frozenset()  # fields of the call that are not among ``fields``
    rank_sums: RankSums | None = None  # where segments are summed over ranks

    def map(self, change: Callable[[Tensor, int | None], Tensor]) -> "Inputs":
        """The inputs with ``change(tensor, dim)`` in place of each tensor; ``dim``: along which tokens are, or None."""
        along = {name: 0 if name in self.token_fields else None for name in self.fields}
        return self._replace(
            target=change(self.target, 0),
            factors=change(self.factors, None),
            fields={name: change(value, along[name]) for name, value in self.fields.items()},
            tensors=[{name: change(value, None) for name, value in of_summand.items()} for of_summand in self.tensors],
            metric_weights={name: change(value, 0) for name, value in self.metric_weights.items()},
        )

    def narrow(self, rows: slice) -> "Inputs":
        """The inputs of a slice of tokens, sharing memory."""
        first, count = rows.start, rows.stop - rows.start
        return self.map(lambda value, dim: value if dim is None else value.narrow(dim, first, count))


def values_of(structure: Structure, leaves: Named, inputs: Inputs) -> tuple[Named, list[Tensor], list[Tensor]]:
    """Coefficients, a tensor [n] for each row of the table, and the values of segments and pairs."""
    batch = Batch(inputs.fields, inputs.target, inputs.num_segments, structure.vocab, inputs.rank_sums, inputs.withheld)
    leaves = masked(leaves, batch.mask)
    dtype, sloped_names = leaves["lse"].dtype, structure.leaves if structure.summands else ()
    sloped = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items() if name in sloped_names}
    rows, unit_values, loss = list[Tensor](), list[Tensor](), inputs.factors.new_zeros(())
    for i, (summand, view) in enumerate(structure.summands):
        with torch.set_grad_enabled(bool(sloped)):
            loss_leaves = leaves
            if sloped:
                is_zero = inputs.factors[i] == 0  # a factor of 0 takes an infinite slope out by selection
                loss_leaves = leaves | {
                    name: torch.where(is_zero, leaf.detach(), leaf) for name, leaf in sloped.items()
                }
            stats, mask = stats_at(structure, summand, view, loss_leaves), share_mask(summand.unit, batch)
            values = values_by(summand, stats, batch, mask, inputs.tensors[i])
            if summand.unit == "token":
                name = summand.token_weights
                assert name is None or isinstance(name, str)
                if (weight := inputs.fields.get("token_weights" if name is None else name)) is not None:
                    values = values * weight.to(dtype)
            values = torch.where(mask, values, 0)
            if sloped:
                loss = loss + (values * inputs.factors[i]).sum()
        (rows if summand.unit == "token" else unit_values).append(values.detach())
    coefficients: Named = {}
    if sloped:
        grads = tuple([torch.zeros_like(leaf) for leaf in sloped.values()])
        if loss.requires_grad:
            with anomalies_at(batch.mask):
                grads = torch.autograd.grad(loss, tuple(sloped.values()), allow_unused=True, materialize_grads=True)
        # again by selection: a loss may have had an infinite slope where a token does not count
        slopes = masked(dict(zip(sloped, grads, strict=True)), batch.mask)
        coefficients = coefficients_of(structure, slopes, leaves)
    metric_stats, masks = dict[Any, Stats](), dict[str, Tensor]()
    for metric, view in structure.metrics:
        key = view, metric.reads_target, *structure.sum_vectors[metric, view].items()
        if key not in metric_stats:
            metric_stats[key] = stats_at(structure, metric, view, leaves)
        if metric.unit not in masks:
            masks[metric.unit] = share_mask(metric.unit, batch)
        mask = masks[metric.unit]
        value = values_by(metric, metric_stats[key], batch, mask)
        columns = value if isinstance(value, tuple) else (value, value.square()) if metric.components == 2 else (value,)
        if metric.unit == "token":
            weights = inputs.metric_weights.get(metric.weighting)
            rows += [selected(metric, column, mask, weights) for column in columns]
        else:
            unit_values.append(torch.stack([selected(metric, column, mask) for column in columns]))
    return coefficients, [row.to(dtype) for row in rows], unit_values


def values_by(measure: Measure, stats: Stats, batch: Batch, mask: Tensor, tensors: Named | None = None) -> Tensor:
    """Values of a loss or metric, one for each unit of ``mask``. A user's function reads copies."""
    if measure.builtin:
        return measure.values(stats, batch, tensors)
    values = measure.values(Stats(Copies(stats.values)), batch.copies(), Copies(tensors or {}))
    if values.shape != mask.shape:
        sizes = f"{tuple(mask.shape)} here; got {tuple(values.shape)}"
        raise ValueError(f"{measure.label} must return one value per {measure.unit}, {sizes}")
    return values


def stats_at(structure: Structure, measure: Summand | Metric, view: int, leaves: Named) -> Stats:
    """The statistics that a loss or metric sees, at one softmax."""
    suffix, ratio = SUFFIX[view], structure.views[view].ratio
    lse = leaves["lse" + suffix]
    values = {"logprob": leaves["logprob" + suffix], "lse": lse}
    if not measure.reads_target:
        del values["logprob"]  # there may be no target
    for statistic in OF_LOSSES:
        names = vectors_at(statistic, view)
        if names[0] in leaves:
            softmax = leaves["start" + suffix], leaves["rest" + suffix], lse
            values |= statistic.values([leaves[name] for name in names], softmax, ratio, structure.vocab)
    values.update({name: leaves[vector] for name, vector in structure.sum_vectors[measure, view].items()})
    if "teacher_argmax" in leaves:
        values["teacher_argmax"] = leaves["teacher_argmax"].to(torch.int64)
    return Stats(values)


def masked(vectors: Named, mask: Tensor) -> Named:
    """Vectors [n] or [n, c], 0 where a token does not count: by selection, since a nan may stand there."""
    return {n: torch.where(mask if value.dim() == 1 else mask[:, None], value, 0) for n, value in vectors.items()}


def unit_mask(unit: str, batch: Batch) -> Tensor:
    """Mask of the units that count: tokens that do, segments with such a token, pairs of two such segments."""
    if unit == "token":
        return batch.mask
    counted = batch.segment_count() > 0
    if unit == "segment":
        return counted
    pairs = batch["pairs"]
    is_pair = (pairs >= 0).all(1)
    return is_pair & counted[pairs.clamp(min=0)].all(1)


def share_mask(unit: str, batch: Batch) -> Tensor:
    """Mask of the units that count and, of segments and pairs, that this rank adds to its loss: one rank adds each."""
    if unit == "token":
        return batch.mask
    counted = unit_mask(unit, batch)
    if batch.rank_sums is None:
        return counted
    return counted & batch.rank_sums.own_share(len(counted), counted.device)


def arithmetic_of(
    structure: Structure, leaves: Named, inputs: Inputs
) -> tuple[Arithmetic | None, list[Tensor | float]]:
    """The kernel for inputs like these, or None; and the arguments that it may read."""
    if not structure.builtin:
        return None, []
    tensors = [
        *leaves.values(), inputs.target, inputs.factors, *inputs.fields.values(),  # from here on as ``Inputs.map``
        *[tensor for of_summand in inputs.tensors for tensor in of_summand.values()], *inputs.metric_weights.values(),
    ]  # fmt: skip
    kinds = tuple([(tensor.dtype, tensor.dim(), tensor.is_contiguous()) for tensor in tensors])
    code, numbers = structure.split
    key = code, tuple(leaves), tuple(inputs.fields), inputs.token_fields, tuple(inputs.metric_weights), kinds
    arguments: list[Tensor | float] = [*tensors, *numbers]
    return KERNELS.get_or_make(key, lambda: make_arithmetic(structure, leaves, inputs, arguments)), arguments


def make_arithmetic(
    structure: Structure, leaves: Named, inputs: Inputs, arguments: list[Tensor | float]
) -> Arithmetic | None:
    """A kernel of ``values_of``; None for fp64, sums over segments and several columns of a token."""
    measures = [measure for measure, _ in (*structure.summands, *structure.metrics)]
    wider = any(measure.scope != "token" for measure in measures) or any(leaf.dim() > 1 for leaf in leaves.values())
    gaps = any(isinstance(value, Tensor) and not value.is_contiguous() for value in arguments)
    if wider or gaps or leaves["lse"].dtype != torch.float32:
        return None
    from .vectors import vector_kernel

    names: list[str] = []

    def function(operands: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        operand = iter(operands)
        vectors = {name: next(operand) for name in leaves}
        mapped = inputs.map(lambda value, dim: next(operand))
        coefficients, rows, _ = values_of(structure.with_numbers(operand), vectors, mapped)
        names[:] = coefficients
        return list(coefficients.values()), rows

    dims: list[int | None] = [0] * len(leaves)  # that tokens are counted along

    def note(value: Tensor, dim: int | None) -> Tensor:
        dims.append(dim)
        return value

    inputs.map(note)
    dims += [None] * (len(arguments) - len(dims))  # numbers
    # a trace begins without whatever modes and hooks there are around the call
    kernel = in_own_thread(functools.partial(vector_kernel, function, arguments, dims))
    return None if kernel is None else (kernel, tuple(names))


def evaluate(
    structure: Structure, stats: RowStats, inputs: Inputs, rows: slice, backend: Backend | None, table: Tensor
) -> tuple[Named, list[Tensor]]:
    """Coefficients of the tokens ``rows``, and values [units] or [c, units] of segments and pairs; values of tokens go
    into ``table`` [rows of the table, tokens]. By a Triton kernel if there is one, else in PyTorch, without the hooks
    of an activation checkpoint: the vectors' graph is freed in here."""
    if backend is not None and backend.name == "triton":
        arithmetic, arguments = arithmetic_of(structure, stats.by_name, inputs)
        if arithmetic is not None:
            kernel, names = arithmetic
            chunk = empty(len(names), rows.stop - rows.start, dtype=table.dtype, device=table.device)
            kernel(arguments, rows, chunk, table)
            return dict(zip(names, chunk.unbind(0), strict=True)), []
    if rows.stop - rows.start < len(inputs.target):
        stats, inputs = stats.narrow(rows), inputs.narrow(rows)
    with plain_saving():
        coefficients, values, unit_values = values_of(structure, stats.by_name, inputs)
    if values:
        table[:, rows] = torch.stack(values)
    return coefficients, unit_values


def totals(structure: Structure, table: Tensor, unit_values: list[list[Tensor]], one_or_nan: Tensor) -> list[Tensor]:
    """Sums over all tokens of each summand's values and each metric's, or extrema; 0-d, [c] of several components.

    ``unit_values``: values of segments and pairs, by chunk. Where an id was out of range, sums of metrics are nan here,
    and those of summands by their denominators.
    """
    sums = table.sum(1)
    if structure.metrics:
        sums = sums * one_or_nan
    # a chunk's own segments are those that count in it
    of_units = (torch.cat(of_chunks, -1) for of_chunks in zip(*unit_values, strict=True))
    row, reduced = 0, []
    reductions = ["mean"] * len(structure.summands) + [metric.reduce for metric, _ in structure.metrics]
    for reduce, width in zip(reductions, structure.widths, strict=True):
        values = next(of_units) if width == 0 else table[row : row + width]
        if reduce != "mean":
            values = torch.nn.functional.pad(values, (0, 1), value=OF_NOTHING[reduce])  # there may be none
            total = values.amax(-1) if reduce == "max" else values.amin(-1)
        else:
            total = values.sum(-1) * one_or_nan if width == 0 else sums[row : row + width]
        reduced.append(total.squeeze())
        row += width
    return reduced


def coefficients_of(structure: Structure, grads: Named, leaves: Named) -> Named:
    """Derivatives with respect to statistics -> factors of the gradient identity's terms, by the chain rule:

        d logprob = 1[target] - p,   d lse = p,   d sum f = s - p total,   d x_k = 1[k]

    and those of ``core/statistics.py``, each times the inverse ratio of the softmax's temperature to that of the
    logits. ``f`` is the function of a sum over the vocabulary, ``s`` its slope and ``total`` the sum of s
    (``core/divergences.py``).
    """
    total: Named = {}

    def add_coefficient(name: str, value: Tensor) -> None:
        total[name] = total[name] + value if name in total else value

    for i, (r, _) in enumerate(structure.views):
        suffix = SUFFIX[i]
        if "lse" + suffix in grads:
            add_coefficient("alpha" + suffix, r * grads["lse" + suffix])
        if "logprob" + suffix in grads:
            g = r * grads["logprob" + suffix]
            add_coefficient("alpha" + suffix, -g)
            add_coefficient("beta", -g)
        for statistic in statistics_at(i):
            name = vectors_at(statistic, i)[0]
            if statistic.slopes is not None and name in grads:
                for factor, value in statistic.slopes(grads[name], leaves[name], r).items():
                    add_coefficient(factor + suffix, value)
    for i, vocabulary_sum in enumerate(structure.sums):
        if (name := f"sum{i}") not in grads:
            continue
        g = structure.views[vocabulary_sum.view].ratio * grads[name]
        sums: dict[object, Any] = {"value": leaves[name], "slopes": leaves.get(f"{name}_total")}
        if vocabulary_sum.function.total != "gradient":
            slopes: Any = sums.get(vocabulary_sum.function.total, vocabulary_sum.function.total)
            # a user's slopes may be infinite where the loss takes none of them
            share = torch.where(g == 0, 0.0, g * slopes) if vocabulary_sum.function.source else g * slopes
            add_coefficient("alpha" + SUFFIX[vocabulary_sum.view], -share)
        add_coefficient(name, g)
    return total
