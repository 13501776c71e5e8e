"""A call at small sizes takes as long as the host needs: how many operators it launches beside kernels."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from cases import GPU, TRITON, Place
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from tracking import unwatched
from triton.runtime.interpreter import GridExecutor

from chunked_head import linear_cross_entropy, linear_logprobs, linear_loss, logits_loss, losses, metrics, quantise
from chunked_head.arithmetic import objective
from chunked_head.call import planning, run, spec
from chunked_head.call import streams as call_streams
from chunked_head.functions import quantise as functions_quantise
from chunked_head.integrations import trl

PLACES = [*TRITON, *(place for place in GPU if place.values[0].backend == "triton")]
# these launch nothing
QUIET = {
    "empty", "empty_like", "new_empty", "view", "_unsafe_view", "slice", "select", "t", "unsqueeze", "squeeze", "alias",
    "expand", "detach", "as_strided", "unbind", "promote_types", "_local_scalar_dense", "isnan", "aminmax",
}  # fmt: skip
Call = Callable[[Tensor, Tensor, Tensor, str], Any]


class Launches(TorchDispatchMode):
    """Operators that launch something; ``isnan`` is the CPU's look at ids, ``aminmax`` that at log-probabilities."""

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


def kept_sets(hidden: Tensor, weight: Tensor, target: Tensor, backend: str) -> None:
    batch = {"old_logprobs": target.float() - 97, "advantages": target.float(), "kept_ids": target, "mask": target > 3}
    batch["kept_offsets"] = torch.arange(len(target) + 1, device=target.device)
    loss = linear_loss(hidden, weight, target, losses.grpo(), batch=batch, kept_everywhere=True, backend=backend).loss
    loss.backward()


# beside kernels and matmuls: the reading of the fields that the call was given, the numbers that all tokens share, a
# sort of the targets, sums over tokens, and autograd's own; of sets, whose entries are rows of the kernels for targets,
# the numbers that lead from one to the other too
MOST: dict[Call, int] = {cross_entropy: 1, four_chunks: 5, log_probabilities: 1, three_losses: 9, kept_sets: 18}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("call", MOST, ids=lambda call: call.__name__)
def test_launches(place: Place, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    # one kernel, but here plain PyTorch (conftest.py)
    monkeypatch.setattr(objective, "evaluate", unwatched(objective.evaluate))
    monkeypatch.setattr(GridExecutor, "__call__", unwatched(GridExecutor.__call__))  # the interpreter's own
    monkeypatch.setattr("chunked_head.stores.matmul.multiply", lambda a, b, out, is_first: None)
    monkeypatch.setattr("chunked_head.stores.matmul.summed_by_blas", lambda a, b, out: True)  # as on a GPU
    hidden = torch.randn(64, 32, dtype=torch.bfloat16, device=place.device, requires_grad=True)
    weight = torch.randn(96, 32, dtype=torch.bfloat16, device=place.device, requires_grad=True)
    target = torch.randint(0, 96, (64,), device=place.device)
    with Launches() as launches:
        call(hidden, weight, target, place.backend)
    made_by_the_test = {"zeros", "ones", "gt", "copy_"}
    names = [name for name in launches.names if name not in made_by_the_test]
    assert len(names) <= MOST[call], (len(names), names)


def streams(hidden: Tensor, weight: Tensor, target: Tensor, backend: str) -> None:
    rows, targets = hidden.chunk(2), target.chunk(2)
    linear_loss(rows, weight, targets, losses.cross_entropy(), backend=backend).loss.backward()


def on_logits(hidden: Tensor, weight: Tensor, target: Tensor, backend: str) -> None:
    logits_loss(weight, target.repeat(2)[: len(weight)] % 32, losses.cross_entropy(), backend=backend).loss.backward()


def in_e4m3(hidden: Tensor, weight: Tensor, target: Tensor, backend: str) -> None:
    head = quantise(weight, backend=backend)
    options = {"precision": "fp8", "fp8_weight": head, "backend": backend}
    linear_cross_entropy(hidden, weight, target, **options).backward()


def foreseen_by_trl(hidden: Tensor, weight: Tensor, target: Tensor, backend: str) -> None:
    loss, fields = losses.cross_entropy(), {"mask": target > 3}
    trl.loss_and_statistics(hidden, weight, target, loss, fields, (), temperature=1.0, backend=backend)[0].backward()


EVERYWHERE: list[Call] = [*MOST, streams, on_logits, in_e4m3, foreseen_by_trl]


def operands(device: str) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(rows, 32, generator=made).bfloat16().to(device) for rows in (64, 96))
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, 96, (64,), generator=made).to(device)


@pytest.mark.parametrize("call", EVERYWHERE, ids=lambda call: call.__name__)
def test_kernels_are_launched_on_the_gpu_of_the_tensors(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may be another than the current one, as where a model lies on several."""
    inside, original = [0], GridExecutor.__call__

    @contextlib.contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        inside[0] += 1
        yield
        inside[0] -= 1

    def watched(*args: Any, **kwargs: Any) -> None:
        assert inside[0], "a kernel goes to the current GPU"
        original(*args, **kwargs)

    for module in (run, call_streams, functions_quantise, trl):
        monkeypatch.setattr(module, "on_device", entered)
    monkeypatch.setattr(GridExecutor, "__call__", watched)
    call(*operands("cpu"), "triton")


@pytest.mark.multigpu
@pytest.mark.parametrize("call", EVERYWHERE, ids=lambda call: call.__name__)
def test_another_gpu_than_the_current_one(call: Call) -> None:
    found = []
    for device in ("cuda:0", "cuda:1"):
        for _ in range(3):  # the third from a recording
            hidden, weight, target = operands(device)
            call(hidden, weight, target, "triton")
        found.append([grad.cpu() for grad in (hidden.grad, weight.grad) if grad is not None])
    assert torch.cuda.current_device() == 0 and all(map(torch.equal, *found))


def loss_of(tokens: int, vocab: int = 40, loss: Any = None, **options: Any) -> Tensor:
    hidden, weight = torch.randn(tokens, 8, requires_grad=True), torch.randn(vocab, 8, requires_grad=True)
    target = torch.randint(0, vocab, (tokens,))
    if loss is None:
        return linear_cross_entropy(hidden, weight, target, **options)
    return linear_loss(hidden, weight, target, loss, **options).loss


def test_calls_alike_have_one_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of tokens, of segments, of the losses' coefficients; what is checked is checked once."""
    spec.SPECS.clear()
    checked = mock.Mock(side_effect=spec.build)
    monkeypatch.setattr(spec, "build", checked)
    for tokens in (5, 40, 41, 64, 8):  # 40 is the vocabulary, 8 the width
        loss_of(tokens)
        loss_of(tokens, loss=losses.focal() + tokens * losses.z_loss())
        segments = {"segments": torch.zeros(tokens, dtype=torch.int64), "old_logprobs": -torch.rand(tokens)}
        batch = {**segments, "advantages": torch.randn(tokens)}
        loss_of(tokens, loss=losses.gspo(), batch=batch, num_segments=tokens + 1)
    assert checked.call_count == len(spec.SPECS) == 3


def test_calls_that_differ_in_numbers_share_a_spec_and_its_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    spec.SPECS.clear()
    checked, planned = mock.Mock(side_effect=spec.build), mock.Mock(side_effect=planning.find_plan)
    monkeypatch.setattr(spec, "build", checked)
    monkeypatch.setattr(planning, "find_plan", planned)
    hidden, weight, target = torch.randn(9, 8), torch.randn(40, 8), torch.randint(40, (9,))
    for x in (0.1, 0.2, 0.3, 0.1):
        loss = losses.cross_entropy(label_smoothing=x) + x * losses.entropy(temperature=1 + x)
        out = linear_loss(hidden, weight, target, loss, temperature=2 + x, softcap=30 + x, logit_scale=x)
        logits = (30 + x) * torch.tanh(x * (hidden @ weight.T) / (30 + x))
        smoothed = torch.nn.functional.cross_entropy(logits / (2 + x), target, label_smoothing=x)
        log_p = (logits / (1 + x)).log_softmax(-1)
        torch.testing.assert_close(out.loss, smoothed - x * (log_p.exp() * log_p).sum(-1).mean())
    assert checked.call_count == planned.call_count == len(spec.SPECS) == 1
    # which softmaxes losses share is no number
    linear_loss(hidden, weight, target, losses.cross_entropy(label_smoothing=0.1) + losses.entropy(temperature=2.0),
                temperature=2.0, softcap=9.0)  # fmt: skip
    assert len(spec.SPECS) == 2
    for option, wrong in {"temperature": 0.0, "softcap": -1.0, "logit_scale": float("nan")}.items():
        right = {"temperature": 2.1, "softcap": 30.1, "logit_scale": 0.1}
        with pytest.raises(ValueError, match=option):
            linear_loss(hidden, weight, target, loss, **{**right, option: wrong})


@pytest.mark.parametrize(
    "other",
    [
        {"vocab": 41}, {"softcap": 3.0}, {"shift": 1}, {"reduction": "none"}, {"ignore_index": 3},
        {"token_weights": torch.ones(9)}, {"class_weights": torch.ones(40)}, {"memory_budget": "1MiB"},
        {"label_smoothing": 0.1}, {"loss": losses.focal()}, {"loss": losses.focal(), "metrics": [metrics.entropy()]},
        {"deterministic": False, "chunk_tokens": 4}, {"backend": "torch"}, {"vocab_size": 39}, {"z_loss": 0.1},
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_differs_has_another_spec(other: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    spec.SPECS.clear()
    loss_of(9)
    loss_of(9, **other)
    assert len(spec.SPECS) == 2
    with torch.no_grad():
        loss_of(9)
    with torch.autocast("cpu"):
        loss_of(9)
    assert len(spec.SPECS) == 4
