"""Whole calls of the Triton backend replayed on the CPU: interpreted kernels are launched by address, as a GPU's are.

Memory is filled with nan when a tape lets go of it, and results are compared bit by bit with the call without a tape.
"""

import contextlib
import ctypes
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from chunked_head.kernels.common import launcher, recording
from test_replay import assert_replayed
from test_replay import on_cpu as on_cpu
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from chunked_head import linear_cross_entropy, linear_loss, losses, metrics
from chunked_head.replay import tape

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted")
STREAM, FIRST = 12345, 5  # of the current stream; of the kernel's first argument in a launch


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """What is done inside is no part of a tape."""
    recorder, recording.RECORDING.recorder = recording.RECORDING.recorder, None
    try:
        yield
    finally:
        recording.RECORDING.recorder = recorder


class Like:
    """A tensor's form: the same of another address."""

    def __init__(self, tensor: Tensor):
        self.form, self.dtype = (tuple(tensor.shape), tensor.stride()), tensor.dtype
        last = sum((size - 1) * stride for size, stride in zip(*self.form, strict=True))
        self.bytes = (last + 1) * tensor.element_size() if tensor.numel() else 0

    def at(self, address: int) -> Tensor:
        if not self.bytes:
            return torch.empty(0, dtype=self.dtype)
        memory = torch.frombuffer((ctypes.c_byte * self.bytes).from_address(address), dtype=torch.uint8)
        return torch.empty(0, dtype=self.dtype).set_(memory.untyped_storage(), 0, *self.form)


def launched(self: launcher.Launcher, grid: tuple[int, ...]) -> Callable[..., None]:
    """``Launcher.__getitem__``, by addresses."""

    def launch(*arguments: Any, **constants: Any) -> None:
        parameters = inspect.signature(self.kernel.fn).parameters.values()
        names = [parameter.name for parameter in parameters if "constexpr" not in str(parameter.annotation)]
        given = dict(zip(names, arguments, strict=True))
        kinds = [name.rpartition("_")[2] if value is not None else "" for name, value in given.items()]
        tensors = [getattr(value, "base", value) for value in arguments]
        likes = [Like(one) if isinstance(one, Tensor) else None for one in tensors]

        def run(x: int, y: int, z: int, stream: int, device: int, *words: Any) -> None:
            assert stream == STREAM
            real = list(words)
            with unrecorded():
                for i, (like, word) in enumerate(zip(likes, words, strict=True)):
                    if isinstance(word, TensorDescriptor):
                        assert like is not None
                        real[i] = object.__new__(TensorDescriptor)
                        vars(real[i]).update(vars(word), base=like.at(word.base.data_ptr()))
                    elif like is not None:
                        assert type(word) is int
                        real[i] = like.at(word)
                self.kernel[x, y, z](*real, **constants)

        words = [value.data_ptr() if kind == "ptr" else value for kind, value in zip(kinds, arguments, strict=True)]
        full = (*(*grid, 1, 1)[:3], STREAM, 0, *words)
        run(*full)
        if recording.RECORDING.recorder is not None:
            at = [[i + FIRST for i, name in enumerate(names) if name.endswith(end)] for end in ("_ptr", "_desc")]
            sizes = [(i + FIRST, which) for i, which in recording.sizes_among(names)]
            what = recording.Launched(run, full, 3, lambda: STREAM, sizes)
            recording.RECORDING.recorder.launched(what, *at, lambda: True)

    return launch


@pytest.fixture
def by_address(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher.Launcher, "__getitem__", launched)
    call = tape.Tape.__call__

    def poisoning(self: tape.Tape, inputs: Any, sizes: tuple[int, ...] = ()) -> list[Any]:
        steps = self.steps

        def watched(step: tape.Step, done: tuple[int, ...]) -> tape.Step:
            def run(held: list[Any], addresses: list[int], stream: int) -> None:
                step(held, addresses, stream)
                for slot in done:
                    if slot >= len(inputs):
                        memory = held[slot].untyped_storage()
                        ctypes.memset(memory.data_ptr(), 0xFF, memory.nbytes())

            return run

        self.steps = [(watched(step, done), done) for step, done in steps]
        try:
            return call(self, inputs, sizes)
        finally:
            self.steps = steps

    monkeypatch.setattr(tape.Tape, "__call__", poisoning)


def data(i: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, torch.Generator]:
    made = torch.Generator().manual_seed(i)
    hidden, weight = (torch.randn(size, 64, generator=made).to(dtype).requires_grad_() for size in (72, 152))
    target = torch.randint(0, 152, (72,), generator=made)
    target[::7] = -100
    return hidden, weight, target, made


def plain(hidden: Tensor, weight: Tensor, target: Tensor, made: torch.Generator, **options: Any) -> Tensor:
    return linear_cross_entropy(hidden, weight, target, backend="triton", **options)


def capped(hidden: Tensor, weight: Tensor, target: Tensor, made: torch.Generator, **options: Any) -> Tensor:
    more = {"z_loss": 0.1, "label_smoothing": 0.1, "softcap": 5.0, "upstream": 2.0, "normalizer": torch.tensor(3.0)}
    return plain(hidden, weight, target, made, bias=weight[:, 0] * 2, **more, **options)


def grpo(hidden: Tensor, weight: Tensor, target: Tensor, made: torch.Generator, **options: Any) -> Tensor:
    old, advantages = torch.rand(len(target), generator=made) - 5, torch.randn(len(target), generator=made)
    return linear_loss(
        hidden, weight, target, losses.grpo() - 0.01 * losses.entropy(), backend="triton", **options,
        batch={"old_logprobs": old, "advantages": advantages}, metrics=[metrics.entropy(), metrics.accuracy()],
    ).loss  # fmt: skip


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("call", "dtype", "chunk_tokens"),
    [
        pytest.param(call, dtype, chunk_tokens, marks=[] if first else pytest.mark.exhaustive)
        for call, dtype, chunk_tokens, first in (
            (plain, torch.bfloat16, None, True), (plain, torch.bfloat16, 32, False), (plain, torch.float32, 32, False),
            (capped, torch.bfloat16, 32, False), (grpo, torch.bfloat16, 32, True), (grpo, torch.float32, None, False),
        )
    ],
)  # fmt: skip
def test_two_calls_at_once(
    call: Callable[..., Tensor], dtype: torch.dtype, chunk_tokens: int | None, by_address: None
) -> None:
    """Backwards out of order, again and with other upstream gradients, beside another call of the same kind."""

    def once(i: int) -> list[Tensor | None]:
        (*leaves, target, made), (*others, target2, made2) = data(i, dtype), data(i + 100, dtype)
        first = call(*leaves, target, made, chunk_tokens=chunk_tokens)
        found = [*torch.autograd.grad(first * 0.37, leaves, retain_graph=True)]
        second = call(*others, target2, made2, chunk_tokens=chunk_tokens)
        found += torch.autograd.grad(first * 3, leaves, retain_graph=True)
        target.zero_()  # the call has its own
        found += torch.autograd.grad(second, others[:1], retain_graph=True)
        found += [*torch.autograd.grad(first, leaves), *torch.autograd.grad(second, others)]
        return [*found, first.detach(), second.detach()]

    assert_replayed(once)
