"""The objective of a call: losses with their factors, denominators and counts. A call makes its objective before any
logit, and the host does not wait for the device."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..arithmetic.evaluate import Inputs, unit_mask
from ..arithmetic.objective import (
    Objective,
    ScalarObjective,
    StatsObjective,
    TokenObjective,
    product_of,
    snapshot,
)
from ..core.records import ColumnSets
from ..core.stats import SUFFIX
from ..losses.base import Summand
from ..metrics import Metric
from ..metrics.values import weights_in
from ..parallel.agreement import agree
from ..parallel.groups import TokenParallel
from ..parallel.tokens import RankSums, add_up
from ..plan.plans import Plan
from .fields import SEGMENT_ID_FIELDS
from .tokens import Tokens


def objective_of(tokens: Tokens, plan: Plan | None) -> Objective:
    """Makes the objective of a call: a sum of losses, reduced or per token; or statistics per token. Where ranks hold
    different tokens, this function sends the call's first messages: one compares the ranks' calls, one adds up their
    counts. ``plan``: None for logits that exist."""
    call, spec, structure, parallel = tokens.call, tokens.spec, tokens.structure, tokens.call.token_parallel
    if parallel is not None:
        common_fields = request_fields(tokens) | {"vocab": str(call.vocab)}
        zero_or_nan = agree(common_fields, parallel.group, call.device, "TokenParallel")
        one_or_nan = tokens.one_or_nan + zero_or_nan
        tokens = replace(tokens, one_or_nan=one_or_nan, inverse=tokens.inverse + zero_or_nan)
    if call.outputs:
        return of_each_token(tokens)
    if parallel is not None:
        tokens = with_global_counts(tokens, parallel)
    loss_terms, one_or_nan, rank_sums = tokens.call.losses.terms, tokens.one_or_nan, tokens.rank_sums
    coefficients = [c if type(c) is float else snapshot(c, one_or_nan) for c, _ in loss_terms]
    if rank_sums is not None and rank_sums.parallel.average:
        coefficients = [c * rank_sums.parallel.ranks for c in coefficients]
    declared_upstream = 1.0 if call.upstream is None else snapshot(call.upstream, one_or_nan)
    if call.shares_denominator:
        inverses = [inverse_of(loss_terms[0][1], tokens)] * len(loss_terms)
    else:
        inverses = [inverse_of(summand, tokens) for _, summand in loss_terms]
    is_normalized = call.normalizer is not None or bool([s for _, s in loss_terms if s.normalizer is not None])
    factors, number_factors = inverses, [c for c in coefficients if type(c) is float]
    if call.upstream is not None or len(number_factors) < len(inverses):
        factors = [product_of(factor, c, declared_upstream) for c, factor in zip(coefficients, inverses, strict=True)]
        number_factors = [1.0] * len(inverses)
    metric_weights, metric_divisors = dict[str, Tensor](), list[Tensor]()
    if call.metrics:
        metrics = [metric for metric, _ in (*structure.metrics, *structure.segment_metrics)]
        metric_weights, metric_divisors = metric_counts(metrics, tokens)
    if len(metric_divisors) < 2 and number_factors == [1.0]:
        summand_factors = factors[0].unsqueeze(0)
    else:
        # each count has memory of its own: a caller may add other ranks' counts to it in place
        # a factor of 1 takes no launch
        products = [factor if c == 1.0 else factor * c for factor, c in zip(factors, number_factors, strict=True)]
        numbers_of_call = torch.stack([*products, *metric_divisors])
        summand_factors, metric_divisors = numbers_of_call[: len(factors)], [*numbers_of_call[len(factors) :].unbind()]
    fields = fields_of(tokens, summand_factors, metric_weights)
    if spec.coupled and (rank_sums is not None or (plan is not None and plan.has_unit_rows)):
        fields["keeps_coefficients"] = True  # those of all tokens at once, made with the values
    return ScalarObjective(
        **fields,
        loss_coefficients=coefficients,
        inverses=inverses,
        is_normalized=is_normalized,
        expected_upstream=declared_upstream,
        exchanges=rank_sums is not None,
        coupled=spec.coupled,
        counts=metric_divisors,
        backend=None if spec.coupled and tokens.groups is None else spec.backend,
    )


def of_each_token(tokens: Tokens) -> Objective:
    """The objective of a call that returns values per token: the weighted sum of losses, or statistics."""
    call, spec = tokens.call, tokens.spec
    if call.outputs == ("values",):
        coefficients = [snapshot(coefficient, tokens.one_or_nan) for coefficient, _ in tokens.call.losses.terms]
        fields = fields_of(tokens, torch.stack([product_of(tokens.one_or_nan, c) for c in coefficients]), {})
        return TokenObjective(**fields, loss_coefficients=coefficients, backend=spec.backend)
    fields, views, pairing = fields_of(tokens), spec.demand.views, spec.demand.pairing
    if fields["structure"].views != views:  # the call returns statistics of a softmax that no loss reads
        fields["structure"] = replace(fields["structure"], views=views)
    if pairing is not None:
        statistic_of = {"divergence": "sum0", "entropy": "entropy" + SUFFIX[pairing.view]}
        fields["output_names"] = tuple([statistic_of[name] for name in call.outputs])
    return StatsObjective(**fields, differentiable=len(call.differentiable))


def fields_of(
    tokens: Tokens, summand_factors: Tensor | None = None, metric_weights: dict[str, Tensor] | None = None
) -> dict[str, Any]:
    """The values of ``Objective``'s fields by name; with ``summand_factors``, of ``LossObjective``'s fields too.
    ``summand_factors`` [summands]: coefficients divided by denominators."""
    demand, structure, one_or_nan = tokens.spec.demand, tokens.structure, tokens.one_or_nan
    column_sets = tokens.column_sets
    teacher_ids = tokens.fields.get("teacher_ids") if demand.lists else None
    class_weights = None
    if structure.weighted_index is not None:
        # a copy: the caller may change it before backward reads it
        weights = tokens.call.losses.terms[structure.weighted_index][1].tensors["class_weights"]
        class_weights = weights.detach().to(one_or_nan.dtype, copy=True).contiguous()
    if demand.columns_only and teacher_ids is not None and len(teacher_ids):
        column_sets = ColumnSets.columns_of(teacher_ids)
    fields: dict[str, Any] = {
        "demand": demand,
        "structure": structure,
        "targets": tokens.targets,
        "columns": teacher_ids,
        "teacher": tokens.teacher,
        "class_weights": class_weights,
        "scale": tokens.scale,
        "column_sets": column_sets,
        "one_or_nan": one_or_nan,
        "dtype": one_or_nan.dtype,
        "output_names": tokens.call.outputs or ("loss",),
    }
    if summand_factors is None:
        return fields
    # copies: the caller may change these tensors before backward reads them
    tensors_by_summand = [
        {name: value.to(summand_factors.dtype, copy=True) for name, value in summand.tensors.items()}
        for _, summand in tokens.call.losses.terms
    ]
    fields["inputs"] = Inputs(
        tokens.targets,
        tokens.fields,
        tokens.call.num_segments,
        summand_factors,
        tensors_by_summand,
        metric_weights or {},
        tokens.token_fields,
        tokens.spec.withheld,
        tokens.rank_sums,
    )
    fields["keeps_coefficients"] = not structure.is_builtin and torch.is_grad_enabled()
    return fields


def inverse_of(summand: Summand, tokens: Tokens) -> Tensor:
    """[] ``1 / D`` in the statistics' dtype. D is the denominator of a loss. D is 1 for a sum, and for a mean if no
    token counts. Returns 0 for a normalizer of 0, and nan if an id of the call is out of range."""
    call, one_or_nan = tokens.call, tokens.one_or_nan
    normalizer = call.normalizer if summand.normalizer is None else summand.normalizer
    if (summand.reduction or call.reduction) != "mean":
        return one_or_nan
    if isinstance(normalizer, str):
        normalizer = tokens.batch[normalizer]
    if isinstance(normalizer, Tensor):
        denominator = normalizer.detach().to(one_or_nan.dtype)
        return torch.where(denominator == 0, denominator, 1.0 / denominator) * one_or_nan
    if normalizer is not None:
        return one_or_nan * (1.0 / normalizer if normalizer else 0.0)
    if summand.unit != "token":
        denominator = count_units(summand.unit, tokens)
    elif summand.denominator_terms_of is None:
        return tokens.inverse
    else:
        denominator = local_total(summand, tokens) if tokens.rank_sums is None else tokens.rank_sums.totals[summand]
    return one_or_nan / torch.where(denominator == 0, 1.0, denominator)


def count_units(unit: str, tokens: Tokens) -> Tensor:
    """[] the number of tokens, segments or pairs (``unit``) that count, in the statistics' dtype."""
    return unit_mask(unit, tokens.batch).sum().to(tokens.one_or_nan.dtype)


def metric_counts(metrics: Sequence[Metric], tokens: Tokens) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Returns the weights [tokens] of tokens by the name of a weighting, and a list with one divisor [] per metric.
    The weighting "token" has no weights."""
    weights: dict[str, Tensor] = {}
    group_counts: dict[str, Tensor] = {}  # by weighting: number of segments or documents with a token
    divisors, unit_counts = [], {"token": tokens.counted}
    for metric in metrics:
        if metric.unit != "token" or metric.weighting == "token":
            if metric.unit not in unit_counts:
                unit_counts[metric.unit] = count_units(metric.unit, tokens)
            divisors.append(unit_counts[metric.unit])
            continue
        if metric.weighting not in weights:
            batch, dtype = tokens.batch, tokens.one_or_nan.dtype
            segment_counts = batch.segment_count(metric.ids).to(dtype)
            weights[metric.weighting] = weights_in(segment_counts, batch[metric.ids], batch.mask)
            group_counts[metric.weighting] = (segment_counts > 0).sum().to(dtype)
        divisors.append(group_counts[metric.weighting])
    return weights, divisors


def with_global_counts(tokens: Tokens, parallel: TokenParallel) -> Tokens:
    """Returns the tokens with counts summed over ranks; sends one message. An id out of range on one rank makes
    results nan on all ranks."""
    batch = tokens.batch
    id_fields = [name for name in SEGMENT_ID_FIELDS if name in batch]
    summands = [summand for _, summand in tokens.call.losses.terms if summand.unit == "token"]
    weighted_summands = [summand for summand in summands if summand.denominator_terms_of is not None]
    local_sums = [tokens.counted, tokens.one_or_nan]
    local_sums += [batch.segment_count(name) for name in id_fields]
    local_sums += [local_total(summand, tokens) for summand in weighted_summands]
    counted, one_or_nan, *totals_of_ranks = add_up(local_sums, parallel.group)
    total_iterator = iter(totals_of_ranks)
    totals = (
        {name: next(total_iterator) for name in id_fields},
        {summand: next(total_iterator) for summand in weighted_summands},
    )
    one_or_nan = torch.where(one_or_nan.isnan(), one_or_nan, 1.0)
    inverse = one_or_nan / counted.clamp(min=1.0)
    return replace(
        tokens, counted=counted, one_or_nan=one_or_nan, inverse=inverse, rank_sums=RankSums(parallel, *totals)
    )


def local_total(summand: Summand, tokens: Tokens) -> Tensor:
    """[] this rank's part of the default denominator of ``summand``, in the statistics' dtype: the sum of
    ``denominator_terms_of`` over the rank's tokens."""
    assert summand.denominator_terms_of is not None
    batch, dtype = tokens.batch, tokens.one_or_nan.dtype
    return torch.where(batch.mask, summand.denominator_terms_of(batch, **summand.tensors).to(dtype), 0.0).sum()


def shown(value: Any) -> str:
    """The ``repr`` of a number, string, tuple or None. For any other object, the name of its type, since the object's
    ``repr`` may differ between processes."""
    return repr(value) if isinstance(value, bool | int | float | str | tuple | type(None)) else type(value).__name__


def request_fields(tokens: Tokens) -> dict[str, str]:
    """The fields of a call that must be equal on all ranks that share it, as text by name."""
    call, batch = tokens.call, tokens.batch
    text_by_name = {"function": call.function}
    for name in ("reduction", "normalizer", "upstream"):
        value = getattr(call, name)  # numbers are left out: the kind of call does not depend on them
        text_by_name[name] = "number" if isinstance(value, int | float) else shown(value)
    for coefficient, summand in tokens.call.losses.terms:
        number_or_word = float(coefficient) if isinstance(coefficient, int | float) else "tensor"
        traits = {name: getattr(summand, name) for name in ("reduction", "unit", "scope", "temperature")}
        traits |= {"coefficient": number_or_word, **summand.options}
        text_by_name |= {f"losses.{summand.label}: {name}": shown(value) for name, value in traits.items()}
    for metric in tokens.call.metrics:
        traits = {"reduce": metric.reduce, "temperature": metric.temperature, **metric.options}
        text_by_name |= {f"metrics.{metric.label}: {name}": shown(value) for name, value in traits.items()}
    for name in ("temperature", "logit_scale", "softcap"):
        value = getattr(call, name)
        text_by_name[name] = shown(float(value) if isinstance(value, int) else value)
    text_by_name |= {name: str(getattr(call, name)) for name in ("ignore_index", "shift")}
    text_by_name["pairs"] = str(list(batch["pairs"].shape)) if "pairs" in batch else "None"
    text_by_name["num_segments"], text_by_name["batch"] = str(call.num_segments), str(sorted(batch))
    return text_by_name | {"dtype": str(tokens.spec.dtype)}
