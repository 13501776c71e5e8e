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

from chunked_head import metrics


@contextlib.contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def both(call: Callable[[], Any]) -> None:
    """``call`` with either default, to the bit."""
    expected = call()
    with default(torch.float64):
        torch.testing.assert_close(call(), expected, rtol=0, atol=0, equal_nan=True)


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
