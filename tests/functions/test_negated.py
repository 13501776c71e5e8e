"""Tensors that torch has negated lazily, as ``z.conj().imag`` is: kernels read memory, where the sign is not."""

import functools
from collections.abc import Callable
from typing import Any

import graph_calls
import pytest
import torch
from cases import PLACES, Place
from graph_calls import CALLS, Data, chosen, make_data, named
from tiers import tier
from torch import Tensor

from chunked_head import linear_cross_entropy, losses


def negated(value: Tensor) -> Tensor:
    """The same numbers, as the lazy negation of others; differentiable."""
    return value if value.dtype == torch.bool else torch._neg_view(-value)


def streams(d: Data) -> Any:
    batch = chosen(d, "old_logprobs", "advantages", "mask")
    hidden = [d.hidden, d.hidden.roll(1, 1)]
    return graph_calls.linear_loss(
        hidden, d.weight, d.target, losses.grpo() + losses.z_loss(), batch=batch, shift=(1, 2)
    )


FUNCTIONS = (
    "linear_cross_entropy", "linear_divergence", "linear_logprobs", "linear_loss", "logits_logprobs", "logits_loss",
)  # fmt: skip
GROUPS = {
    "rows": ("hidden", "target", "token_weights", "fields", "scalar"),
    "head": ("weight", "bias", "class_weights"),
}


def lazily(data: Data, names: tuple[str, ...]) -> Data:
    given = {name: getattr(data, name) for name in names}
    changed = {name: negated(value) for name, value in given.items() if isinstance(value, Tensor)}
    if "fields" in names:
        changed["fields"] = {name: negated(value) for name, value in data.fields.items()}
    return data._replace(**changed)


def outcome(call: Callable[[Data], Any], data: Data, leaves: Data, upstream: Callable[[Tensor], Tensor]) -> list:
    values = named(call(data))
    ends = [value for value in values.values() if value.requires_grad]
    given = [upstream(torch.linspace(0.3, 0.9, end.numel()).to(end).view(end.shape)) for end in ends]
    inputs = [leaves.hidden, leaves.weight, leaves.bias]
    return [*values.values(), *torch.autograd.grad(ends, inputs, given, allow_unused=True)]


@pytest.mark.parametrize(
    ("call", "group", "place"),
    [
        one for i, call in enumerate([*CALLS, streams]) for j, group in enumerate((*GROUPS, "upstream"))
        for place in PLACES
        for one in tier(
            pytest.param(call, group, *place.values, id=f"{call.__name__}-{group}-{place.id}", marks=place.marks),
            (i + j) % 3 == 0 and (j < 2 or place.id == "torch-cpu"),
        )
    ],
)  # fmt: skip
def test_lazy_negation(call: Callable[[Data], Any], group: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FUNCTIONS:
        monkeypatch.setattr(graph_calls, name, functools.partial(getattr(graph_calls, name), backend=place.backend))
    # 16-bit operands are read by kernels, and of fp32 gradients nothing but the upstream gradient is taken out
    data = make_data(torch.float32 if group == "upstream" else torch.float16, place.device)
    expected = outcome(call, data, data, lambda value: value)
    if group == "upstream":
        found = outcome(call, data, data, negated)
    else:
        found = outcome(call, lazily(data, GROUPS[group]), data, lambda value: value)
    # PyTorch's sums of rows at the same id, which kept sets take, come in any order on a GPU
    summed = place == Place("torch", "cuda") and "kept" in call.__name__
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5 if summed else 0, atol=1e-6 if summed else 0)


def test_a_lazy_negation_is_no_buffer() -> None:
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    with pytest.raises(ValueError, match=r"accumulate_into is lazily negated, .* make it by torch\.zeros"):
        linear_cross_entropy(hidden, weight, torch.zeros(4).long(), accumulate_into=negated(torch.zeros(11, 8)))
