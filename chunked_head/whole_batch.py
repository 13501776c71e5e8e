"""A call's counts made those of the whole batch, of which ranks hold different tokens: one message before the sweep."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .asked import Asked
from .denominators import local_total
from .losses.base import Summand
from .metrics import Metric
from .parallel.agree import agree
from .parallel.tokens import Spread, add_up

IDS = ("segments", "documents")


def of_whole_batch(asked: Asked) -> Asked:
    """The same call with the counts of all ranks' tokens, and nan on every rank where an id is out of range on one."""
    tokens = asked.head.tokens
    if tokens is None:
        return asked
    agree(told(asked), tokens.group, asked.head.device, "TokenParallel")
    batch, prepared = asked.batch, asked.prepared
    ids, fields = [name for name in IDS if name in batch], summed_fields(asked)
    counted = [summand for _, summand in asked.losses.terms if summand.unit == "token" and summand.counted is not None]
    own = [prepared.counted, prepared.one_or_nan]
    own += [batch.segment_count(name) for name in ids]
    own += [batch.segment_sum(batch[name]) for name in fields]
    own += [local_total(summand, asked) for summand in counted]
    whole = add_up(own, tokens.group)
    number, one_or_nan = whole[:2]
    rest = iter(whole[2:])
    spread = Spread(
        tokens, {name: next(rest) for name in ids}, {name: next(rest) for name in fields},
        {summand: next(rest) for summand in counted},
    )  # fmt: skip
    prepared = prepared._replace(counted=number, one_or_nan=torch.where(one_or_nan.isnan(), one_or_nan, 1.0))
    return asked.spread_as(prepared, spread)


def summed_fields(asked: Asked) -> list[str]:
    """Token fields whose segments' sums a loss or a metric may take; they are known before there is any logit."""
    parts: list[Summand | Metric] = [*(summand for _, summand in asked.losses.terms), *asked.metrics]
    read = {name for part in parts if part.scope == "segment" for name in (*part.fields, *part.optional_fields)}
    if "segments" not in asked.batch:
        return []

    def is_value(tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.dim() == 1

    return sorted(name for name in read & asked.token_fields if is_value(asked.batch[name]))


def spelt(options: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Plain values; of others their type, since in another process they may show otherwise."""
    plain = (bool, int, float, str, tuple, type(None))
    return sorted((k, repr(v) if isinstance(v, plain) else type(v).__name__) for k, v in options.items())


def told(asked: Asked) -> str:
    """What ranks must have in common, for their messages to be of the same lengths in the same order."""
    terms = [
        (c if isinstance(c, float | int) else "tensor", s.label, s.unit, s.scope, spelt(s.options))
        for c, s in asked.losses.terms
    ]
    measured = [(metric.label, metric.reduce, spelt(metric.options)) for metric in asked.metrics]
    pairs = asked.batch["pairs"].shape if "pairs" in asked.batch else None
    return repr((terms, measured, asked.prepared.num_segments, pairs, sorted(asked.batch), asked.dtype))
