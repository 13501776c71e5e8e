"""A call on several streams of hidden states: which arguments go with which, and what comes back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..call.options import Call
from ..call.run import Outcome
from ..call.streams import Streams, value_over_streams
from ..core.checks import INFINITY, NUMBERS
from ..losses.base import as_losses
from ..metrics import Metric
from ..metrics.values import as_metrics

# one for all streams, or a list of one each; a list of anything else is the same for all
EACH = ("temperature", "normalizer", "candidates", "candidate_bias", "shift")


def streams_of(
    make: Callable[..., Call[Any]],
    hidden: Sequence[Tensor],
    weight: Tensor,
    target: Any,
    loss: Any,
    stream_weights: Sequence[float | Tensor] | None,
    given: Mapping[str, Any],
) -> Streams[Any]:
    """``make``, ``linear_loss``, called for each stream; ``given``: the call's other arguments."""
    count = len(hidden)
    if not count:
        raise ValueError("hidden must be a tensor or a list of one tensor or more, got an empty list")
    if given["reduction"] == "none":
        raise ValueError(
            'reduction="none" has no loss that streams would add up to; call linear_loss once for each stream'
        )
    weights = weights_of(stream_weights, count)
    measured = as_metrics(given["metrics"])
    over = tuple(metric for metric in measured if metric.over_streams)
    # each stream makes the values of a metric over streams as it makes those of its own
    metrics = [replace(metric, over_streams=False) for metric in measured]
    losses = [as_losses(one) for one in each("loss", loss, count)]
    calls = []
    for i, (states, targets) in enumerate(zip(hidden, each("target", target, count), strict=True)):
        if isinstance(states, list | tuple):
            raise TypeError(f"hidden must be a torch.Tensor, got {type(states).__name__}")
        own = {name: each(name, given[name], count)[i] for name in EACH if name in given}
        if isinstance(given["batch"], Mapping):
            own["batch"] = {name: each(f"batch[{name!r}]", value, count)[i] for name, value in given["batch"].items()}
        calls.append(make(states, weight, targets, losses[i].times(weights[i]), **{**given, **own, "metrics": metrics}))
    check_alike(over, calls)

    def result(total: Tensor, outcomes: list[Outcome]) -> Any:
        outputs = [call.result(ran) for call, ran in zip(calls, outcomes, strict=True)]
        found = {metric.label: value_over_streams(metric, outcomes) for metric in over}
        names = {metric.label for metric in over}
        own = [
            replace(out, metrics={name: value for name, value in out.metrics.items() if name not in names})
            for out in outputs
        ]
        return replace(own[0], loss=total, parts={}, metrics=found, plan=None, streams=tuple(own))

    return Streams(tuple(calls), tuple(losses), result)


def each(name: str, value: Any, count: int) -> Sequence[Any]:
    """The argument of each stream."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} must be one for all {count} streams or a list of {count}, got {len(value)}")
    return value


def weights_of(stream_weights: Any, count: int) -> Sequence[float | Tensor]:
    if stream_weights is None:
        return [1.0] * count
    if not isinstance(stream_weights, list | tuple) or len(stream_weights) != count:
        raise ValueError(f"stream_weights must be a list of {count} numbers or 0-d tensors, got {stream_weights!r}")
    for weight in stream_weights:
        number = isinstance(weight, NUMBERS) and not isinstance(weight, bool) and -INFINITY < weight < INFINITY
        scalar = isinstance(weight, Tensor) and weight.dim() == 0 and not (weight.requires_grad or weight.is_complex())
        if not (number or scalar):
            raise ValueError(
                f"stream_weights must be finite numbers or 0-d tensors that need no gradient, got {weight!r}"
            )
    return stream_weights


def check_alike(over: Sequence[Metric], calls: Sequence[Call[Any]]) -> None:
    """Metrics over streams follow a token through all of them."""
    shapes = [torch.Size(call.leading) for call in calls]
    if over and len(set(shapes)) > 1:
        raise ValueError(
            f"metrics.{over[0].kind} follows a token through all streams, whose hidden states have other tokens: "
            f"{', '.join(str(tuple(shape)) for shape in shapes)}; give them the same, masked where there is none"
        )
