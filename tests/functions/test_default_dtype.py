"""``torch.set_default_dtype`` changes nothing that a call does: every number of it has a dtype that tensors decide."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import graph_calls
import pytest
import torch
from graph_calls import Data, make_data
from loss_cases import FEWER, LOSS_CASES, SOME_CASES, LossCase, inputs_of, run_step
from tiers import tier
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from chunked_head import linear_loss, losses, metrics, weights


@contextlib.contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Unasked(TorchDispatchMode):
    """Operations that make float64 numbers of others, unless that is what they are for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, kwargs = func(*args, **(kwargs or {})), kwargs or {}
        given = [each.dtype for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        asked = torch.float64 in (*given, kwargs.get("dtype"), *args)
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor) and each.dtype == torch.float64]
        if made and not asked:
            self.found.add(str(func))
        return result


def both(call: Callable[[], Any]) -> None:
    """``call`` with either default, to the bit."""
    expected = tree_leaves(call())
    with default(torch.float64), Unasked() as unasked:
        found = tree_leaves(call())
    assert not unasked.found
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        if isinstance(theirs, Tensor):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        else:
            assert ours == theirs


MEASURED = [metrics.entropy(), metrics.accuracy(), metrics.logprob(reduce="min"), metrics.perplexity()]


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        one for case in LOSS_CASES for backend in ("torch", "triton")
        for one in tier(
            pytest.param(case, backend, id=f"{case.name}-{backend}"), backend == "torch" or case.name in SOME_CASES
        )
    ],
)  # fmt: skip
def test_losses(case: LossCase, backend: str) -> None:
    inputs = inputs_of(case, torch.float32, "cpu", **FEWER)
    measured = MEASURED if case.target else MEASURED[:1]

    def call() -> Any:
        return run_step(case, inputs, measured, backend=backend)[1]

    both(call)


@pytest.mark.parametrize("call", graph_calls.CALLS, ids=lambda call: call.__name__)
def test_functions(call: Callable[[Data], Any]) -> None:
    data = make_data()

    def once() -> Any:
        out, grads = graph_calls.outcome(call, data, 0.37)
        return list(graph_calls.named(out).values()), grads

    both(once)


def test_users_functions() -> None:
    """What a function is found to read, on made-up tokens."""
    data, given = make_data(), list[torch.dtype]()

    def function(stats: Any, batch: Any) -> Tensor:
        given.append(stats.logprob.dtype)
        return -stats.logprob * batch["advantages"].float()

    def call() -> Any:
        loss = losses.custom(lambda stats, batch: function(stats, batch), scope="token")
        batch = {"advantages": data.fields["advantages"]}
        return linear_loss(data.hidden, data.weight, data.target, loss, batch=batch).loss.detach()

    both(call)
    assert set(given) == {torch.float32}


def test_weights_of_tokens() -> None:
    made = torch.Generator().manual_seed(0)
    values, segments = -torch.rand(3, 40, generator=made), torch.arange(40) // 10
    mask = values[0] < -0.2

    def call() -> Any:
        drawn = torch.Generator().manual_seed(1)
        return (
            weights.clip_cov(values[0], values[1], mask, low=-1.0, high=1.0, fraction=0.3, generator=drawn),
            weights.kl_cov(values[0], values[1], mask, fraction=0.2),
            weights.entropy_quantile(-values[2], mask, 0.5),
            weights.sequence_mean(mask, segments, 4),
            weights.wpo(values[0], values[1], mask, segments, 4, torch.tensor([[0, 1], [2, 3]])),
        )

    both(call)
