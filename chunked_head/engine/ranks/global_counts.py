"""A call's counts made those of the whole batch, of which ranks hold different tokens: one message before the sweep."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...losses.base import Summand
from ...metrics import Metric
from ...parallel.agree import agree
from ...parallel.tokens import Spread, add_up
from ..arithmetic.denominators import local_total
from ..arithmetic.objective import Objective
from ..prepared import PreparedCall

IDS = ("segments", "documents")


def agreed_batch(prepared: PreparedCall, how: Mapping[str, str]) -> None:
    """Raises on every rank where ranks that hold different tokens are about to make different calls of them."""
    tokens = prepared.head.tokens
    if tokens is not None:
        words = {**call_words(prepared, how), "the size of the vocabulary": str(prepared.head.vocab)}
        agree(words, tokens.group, prepared.head.device, "TokenParallel")


def with_global_counts(prepared: PreparedCall, how: Mapping[str, str]) -> PreparedCall:
    """The same call with the counts of all ranks' tokens, and nan on every rank where an id is out of range on one."""
    tokens = prepared.head.tokens
    if tokens is None:
        return prepared
    agreed_batch(prepared, how)
    batch, token_rows = prepared.batch, prepared.token_rows
    ids, fields = [name for name in IDS if name in batch], summed_fields(prepared)
    counted = [
        summand for _, summand in prepared.losses.terms if summand.unit == "token" and summand.counted is not None
    ]
    own = [token_rows.counted, token_rows.one_or_nan]
    own += [batch.segment_count(name) for name in ids]
    own += [batch.segment_sum(batch[name]) for name in fields]
    own += [local_total(summand, prepared) for summand in counted]
    whole = add_up(own, tokens.group)
    number, one_or_nan = whole[:2]
    rest = iter(whole[2:])
    spread = Spread(
        tokens, {name: next(rest) for name in ids}, {name: next(rest) for name in fields},
        {summand: next(rest) for summand in counted},
    )  # fmt: skip
    token_rows = token_rows._replace(counted=number, one_or_nan=torch.where(one_or_nan.isnan(), one_or_nan, 1.0))
    return replace(prepared, token_rows=token_rows, spread=spread)


def summed_fields(prepared: PreparedCall) -> list[str]:
    """Token fields whose segments' sums a loss or a metric may take; they are known before there is any logit."""
    parts: list[Summand | Metric] = [*(summand for _, summand in prepared.losses.terms), *prepared.metrics]
    read = {name for part in parts if part.scope == "segment" for name in (*part.fields, *part.optional_fields)}
    if "segments" not in prepared.batch:
        return []

    def is_value(tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.dim() == 1

    return sorted(name for name in read & prepared.token_fields if is_value(prepared.batch[name]))


def shown(value: Any) -> str:
    """A plain value; of another its type, since in another process it may show otherwise."""
    return repr(value) if isinstance(value, bool | int | float | str | tuple | type(None)) else type(value).__name__


def kind_of(number: float | Tensor | None) -> str:
    """What was given; not which number, since another at every step would be a new kind of call each time."""
    return type(number).__name__ if number is None or isinstance(number, Tensor) else "number"


def call_words(prepared: PreparedCall, how: Mapping[str, str]) -> dict[str, str]:
    """What ranks must have in common of a call, by argument; ``how``: by which reduction."""
    terms, head = prepared.losses.terms, prepared.head
    found = {"loss": " + ".join(f"{c if isinstance(c, float | int) else 'tensor'} * {s.label}" for c, s in terms)}
    for _, s in terms:
        own = {"reduction": s.reduction, "unit": s.unit, "scope": s.scope, **s.options}
        found |= {f"{name} of losses.{s.label}": shown(value) for name, value in own.items()}
    found["metrics"] = str([metric.label for metric in prepared.metrics])
    for metric in prepared.metrics:
        own = {"reduce": metric.reduce, **metric.options}
        found |= {f"{name} of metrics.{metric.label}": shown(value) for name, value in own.items()}
    for name in ("temperature", "logit_scale", "softcap"):
        found[name] = shown(getattr(head, name))
    pairs = list(prepared.batch["pairs"].shape) if "pairs" in prepared.batch else None
    found |= {"num_segments": str(prepared.token_rows.num_segments), "the shape of batch['pairs']": str(pairs)}
    return {**found, "the fields of batch": str(sorted(prepared.batch)), "dtype": str(prepared.dtype), **how}


def described_options(prepared: PreparedCall, objective: Objective) -> dict[str, str]:
    """Of a call's options those that change what ranks that share its tokens exchange or compute."""
    head = prepared.head
    shape = {"the shape of the tokens": str(list(head.leading)), "shift": str(head.shift)}
    return {**shape, "ignore_index": str(head.ignore_index), **call_words(prepared, objective.how)}
