"""A call's counts made those of the whole batch, of which ranks hold different tokens: one message before the sweep."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..losses.base import Summand
from ..metrics import Metric
from ..parallel.agree import agree
from ..parallel.tokens import Spread, add_up
from .tokens import Tokens

IDS = ("segments", "documents")


def agreed_batch(tokens: Tokens) -> None:
    """Raises on every rank where ranks that hold different tokens are about to make different calls of them."""
    parallel = tokens.head.tokens
    assert parallel is not None
    fields = call_fields(tokens) | {"vocab": str(tokens.head.vocab)}
    agree(fields, parallel.group, tokens.head.device, "TokenParallel")


def with_global_counts(tokens: Tokens) -> Tokens:
    """The same call with the counts of all ranks' tokens, and nan on every rank where an id is out of range on one."""
    parallel = tokens.head.tokens
    assert parallel is not None
    agreed_batch(tokens)
    batch = tokens.batch
    ids, fields = [name for name in IDS if name in batch], summed_fields(tokens)
    counted = [summand for _, summand in tokens.losses.terms if summand.unit == "token" and summand.counted is not None]
    own = [tokens.counted, tokens.one_or_nan]
    own += [batch.segment_count(name) for name in ids]
    own += [batch.segment_sum(batch[name]) for name in fields]
    own += [local_total(summand, tokens) for summand in counted]
    whole = add_up(own, parallel.group)
    number, one_or_nan = whole[:2]
    rest = iter(whole[2:])
    spread = Spread(
        parallel, {name: next(rest) for name in ids}, {name: next(rest) for name in fields},
        {summand: next(rest) for summand in counted},
    )  # fmt: skip
    one_or_nan = torch.where(one_or_nan.isnan(), one_or_nan, 1.0)
    return replace(tokens, counted=number, one_or_nan=one_or_nan, spread=spread)


def local_total(summand: Summand, tokens: Tokens) -> Tensor:
    """The sum of what each of this rank's tokens adds to the default denominator, [] in the statistics' dtype."""
    assert summand.counted is not None
    batch, dtype = tokens.batch, tokens.one_or_nan.dtype
    return torch.where(batch.mask, summand.counted(batch, **summand.tensors).to(dtype), 0.0).sum()


def summed_fields(tokens: Tokens) -> list[str]:
    """Token fields whose segments' sums a loss or a metric may take; they are known before there is any logit."""
    parts: list[Summand | Metric] = [*(summand for _, summand in tokens.losses.terms), *tokens.metrics]
    read = {name for part in parts if part.scope == "segment" for name in (*part.fields, *part.optional_fields)}
    if "segments" not in tokens.batch:
        return []

    def is_value(tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.dim() == 1

    return sorted(name for name in read & tokens.token_fields if is_value(tokens.batch[name]))


def shown(value: Any) -> str:
    """A plain value; of another its type, since in another process it may show otherwise."""
    return repr(value) if isinstance(value, bool | int | float | str | tuple | type(None)) else type(value).__name__


def kind_of(value: float | Tensor | str | None) -> str:
    """Not which number it is, since another at every step would be a new kind of call each time."""
    if isinstance(value, str):
        return value
    return type(value).__name__ if value is None or isinstance(value, Tensor) else "number"


def call_fields(tokens: Tokens) -> dict[str, str]:
    """What ranks that share a call must have in common of it."""
    head, batch = tokens.head, tokens.batch
    task = tokens.task
    found = {"function": task.function} | {name: kind_of(value) for name, value in task.asked.items()}
    for coefficient, summand in tokens.losses.terms:
        factor = coefficient if isinstance(coefficient, int | float) else "tensor"
        own = {name: getattr(summand, name) for name in ("reduction", "unit", "scope")}
        own |= {"coefficient": factor, **summand.options}
        found |= {f"losses.{summand.label}: {name}": shown(value) for name, value in own.items()}
    for metric in tokens.metrics:
        own = {"reduce": metric.reduce, **metric.options}
        found |= {f"metrics.{metric.label}: {name}": shown(value) for name, value in own.items()}
    for name in ("temperature", "logit_scale", "softcap", "ignore_index", "shift"):
        found[name] = shown(getattr(head, name))
    found["pairs"] = str(list(batch["pairs"].shape)) if "pairs" in batch else "None"
    found["num_segments"], found["batch"] = str(task.num_segments), str(sorted(batch))
    return found | {"dtype": str(tokens.spec.dtype)}
