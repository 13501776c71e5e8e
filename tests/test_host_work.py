"""A call at small sizes takes as long as the host needs: how many operators it launches beside kernels."""

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import GPU, TRITON, Place
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

from chunked_head import linear_cross_entropy, linear_logprobs, linear_loss, losses, metrics
from chunked_head.engine.arithmetic import objective
from chunked_head.program.demand import ANSWERS, MOST_ANSWERS, Question, answer

PLACES = [*TRITON, *(place for place in GPU if place.values[0].backend == "triton")]
# these launch nothing
QUIET = {
    "empty", "empty_like", "new_empty", "view", "_unsafe_view", "slice", "select", "t", "unsqueeze", "squeeze", "alias",
    "expand", "detach", "as_strided", "unbind", "promote_types", "_local_scalar_dense", "isnan", "max",
}  # fmt: skip
Call = Callable[[Tensor, Tensor, Tensor, str], Any]


class Launches(TorchDispatchMode):
    """The operators that launch something; ``isnan`` is the CPU's look at ids, ``max`` that at log-probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in QUIET:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor, backend: str) -> None:
    linear_cross_entropy(hidden, weight, target, backend=backend).backward()


def four_chunks(hidden: Tensor, weight: Tensor, target: Tensor, backend: str) -> None:
    linear_cross_entropy(hidden, weight, target, shift=1, chunk_tokens=16, backend=backend).backward()


def log_probabilities(hidden: Tensor, weight: Tensor, target: Tensor, backend: str) -> None:
    with torch.no_grad():
        linear_logprobs(hidden, weight, target, backend=backend)


def three_losses(hidden: Tensor, weight: Tensor, target: Tensor, backend: str) -> None:
    zeros, ones = (make(len(target), device=target.device) for make in (torch.zeros, torch.ones))
    batch = {"old_logprobs": zeros, "advantages": ones, "mask": target > 3}
    loss = losses.grpo() + 1e-4 * losses.z_loss() - 0.01 * losses.entropy()
    measured = [metrics.entropy(), metrics.kl_old()]
    linear_loss(hidden, weight, target, loss, batch=batch, metrics=measured, backend=backend).loss.backward()


# beside kernels and matmuls: the reading of the fields that the call was given, the numbers that all tokens share, a
# sort of the targets, sums over tokens, and autograd's own
MOST: dict[Call, int] = {cross_entropy: 8, four_chunks: 9, log_probabilities: 4, three_losses: 25}


def uncounted(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("call", MOST, ids=lambda call: call.__name__)
def test_launches(place: Place, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    # on a GPU the losses' arithmetic is compiled into a kernel or two
    monkeypatch.setattr(objective, "run", uncounted(objective.run))
    monkeypatch.setattr(GridExecutor, "__call__", uncounted(GridExecutor.__call__))  # the interpreter's own
    monkeypatch.setattr("chunked_head.backends.matmul.multiply", lambda a, b, out, first: None)
    monkeypatch.setattr("chunked_head.backends.matmul.summed_by_blas", lambda a, b, out: True)  # as on a GPU
    hidden = torch.randn(64, 32, dtype=torch.bfloat16, device=place.device, requires_grad=True)
    weight = torch.randn(96, 32, dtype=torch.bfloat16, device=place.device, requires_grad=True)
    target = torch.randint(0, 96, (64,), device=place.device)
    with Launches() as launches:
        call(hidden, weight, target, place.backend)
    made_by_the_test = {"zeros", "ones", "gt", "copy_"}
    names = [name for name in launches.names if name not in made_by_the_test]
    assert len(names) <= MOST[call], names


def test_what_is_known_of_losses_lives_as_long_as_they() -> None:
    before, loss = len(ANSWERS), losses.focal()
    for temperature in (1.0, 2.0):
        question = Question(loss, (), temperature, 50)
        assert answer(question) is answer(question)
        assert answer(question).temperature == temperature
    for vocab in range(60, 60 + 2 * MOST_ANSWERS):
        assert answer(Question(loss, (), 1.0, vocab)).structure.vocab == vocab
    assert len(ANSWERS[loss]) <= MOST_ANSWERS
    del loss, question
    gc.collect()
    assert len(ANSWERS) == before
