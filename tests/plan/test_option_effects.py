"""Options of execution beside the passes of a call: a mode that sees every operator of a pass sees what each option
changes in it, or the call is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from chunked_head import linear_cross_entropy, linear_logprobs, linear_loss, losses, quantise

TOKENS, HIDDEN, VOCAB, CHUNK = 96, 16, 500, 16
LENGTHS = [30, 34, 32]


class Watch(TorchDispatchMode):
    """Operators while a pass runs."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = set[tuple[str, tuple[int, ...], torch.dtype]]()  # operator, shape and dtype of each of its tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, Tensor):
                self.kinds.add((name, tuple(tensor.shape), tensor.dtype))
        return result

    @property
    def most_numbers(self) -> int:
        return max(torch.Size(shape).numel() for _, shape, _ in self.kinds)

    def made(self, *shape: int) -> set[torch.dtype]:
        return {dtype for name, found, dtype in self.kinds if name == "empty" and found == shape}

    def rows_of_products(self) -> set[int]:
        return {size for name, shape, _ in self.kinds if name in ("mm", "addmm") for size in shape}


class Data:
    def __init__(self, dtype: torch.dtype):
        made = torch.Generator().manual_seed(3)
        self.hidden = torch.randn(TOKENS, HIDDEN, generator=made).to(dtype).requires_grad_()
        self.weight = torch.randn(VOCAB, HIDDEN, generator=made).mul(0.1).to(dtype).requires_grad_()
        self.target = torch.randint(VOCAB - 9, (TOKENS,), generator=made)
        advantages = torch.rand(TOKENS, generator=made) + 0.5
        self.batch = {"old_logprobs": torch.full((TOKENS,), -6.0), "advantages": advantages}

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden, self.weight, self.target


def in_forward(d: Data, **options: Any) -> Tensor:
    return linear_cross_entropy(*d.operands, **options)


def late(d: Data, **options: Any) -> Tensor:
    return linear_logprobs(*d.operands, **options).sum()


def unreduced(d: Data, **options: Any) -> Tensor:
    return linear_cross_entropy(*d.operands, reduction="none", **options).sum()


def coupled(d: Data, **options: Any) -> Tensor:
    segments = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))
    batch = d.batch | {"segments": segments}
    options = {"chunk_tokens": TOKENS // 2} | options  # one chunk of all tokens would make them in the forward pass
    return linear_loss(*d.operands, losses.rloo(), batch=batch, num_segments=3, **options).loss


def by_lengths(d: Data, **options: Any) -> Tensor:
    return linear_loss(*d.operands, losses.rloo(), batch=d.batch, segment_lengths=LENGTHS, **options).loss


def checkpointed(d: Data, **options: Any) -> Tensor:
    """Runs again in backward."""
    return checkpoint(
        lambda hidden: linear_cross_entropy(hidden, d.weight, d.target, **options), d.hidden, use_reentrant=True
    )


Step = Callable[..., Tensor]
# in which passes the gradients of a call are made
FORWARD, BACKWARD = (in_forward, by_lengths), (late, unreduced, coupled, checkpointed)
STEPS = (*FORWARD, *BACKWARD)


def twice(d: Data, **options: Any) -> Tensor:
    """A loss whose gradients were taken once."""
    loss = in_forward(d, **options)
    torch.autograd.grad(loss, (d.hidden, d.weight), retain_graph=True)
    return loss


def watched(step: Step, d: Data, **options: Any) -> Watch:
    """The pass that makes gradients."""
    forward, backward = Watch(), Watch()
    if step is twice:
        loss = step(d, **options)
    else:
        with forward:
            loss = step(d, **options)
    with backward:
        loss.backward()
    return forward if step in FORWARD else backward


@pytest.mark.parametrize("step", [*STEPS, twice])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunk_tokens(step: Step, dtype: torch.dtype) -> None:
    """No more logits than those of so many tokens; of segments than those of the longest."""
    assert watched(step, Data(dtype)).most_numbers >= TOKENS // 2 * VOCAB
    most = max(LENGTHS) if step is by_lengths else CHUNK
    assert watched(step, Data(dtype), chunk_tokens=CHUNK).most_numbers <= most * VOCAB


@pytest.mark.parametrize("step", [*STEPS, twice])
def test_memory_budget(step: Step) -> None:
    budget = 90_000
    assert watched(step, Data(torch.float32)).most_numbers * 4 > budget
    assert watched(step, Data(torch.float32), memory_budget=budget, chunk_tokens=None).most_numbers * 4 <= budget


@pytest.mark.parametrize("step", [*STEPS, twice])
def test_accumulate_dtype(step: Step) -> None:
    """Of sums over chunks: 16 bits for few, which are refused for many."""
    few = {"chunk_tokens": TOKENS // 4}
    for dtype in torch.float32, torch.bfloat16:
        made = watched(step, Data(torch.bfloat16), accumulate_dtype=dtype, **few).made(VOCAB, HIDDEN)
        assert dtype in made, (step, dtype, made)
    many: Any = {"accumulate_dtype": torch.bfloat16, "chunk_tokens": TOKENS // 12}
    if step is checkpointed:  # too late to refuse: sums are more exact than was asked
        watch = watched(step, Data(torch.bfloat16), **many)
        assert watch.made(VOCAB, HIDDEN) == {torch.float32} and watch.most_numbers <= VOCAB * HIDDEN
        return
    with pytest.raises(ValueError, match="accurate over at most 8 chunks"):
        step(Data(torch.bfloat16), **many)


@pytest.mark.parametrize("step", [step for step in (*STEPS, twice) if step is not coupled])
def test_skip_ignored(step: Step) -> None:
    def sizes(**options: Any) -> set[int]:
        data = Data(torch.float32)
        data.target[5:25] = -100
        return watched(step, data, **options).rows_of_products()

    assert TOKENS in sizes() and TOKENS - 20 not in sizes()
    assert TOKENS not in sizes(skip_ignored="wait") and TOKENS - 20 in sizes(skip_ignored="wait")


@pytest.mark.parametrize("step", [*STEPS, twice])
def test_precision(step: Step) -> None:
    """Logits are made of e4m3 operands, where they are made again too."""
    e4m3 = torch.float8_e4m3fn
    data = Data(torch.bfloat16)
    for kept in None, quantise(data.weight):
        watch = watched(step, data, precision="fp8", fp8_weight=kept)
        assert any(dtype == e4m3 and shape[0] >= TOKENS // 2 for _, shape, dtype in watch.kinds)
        makes = any(dtype == e4m3 and name == "empty" and shape[0] == VOCAB for name, shape, dtype in watch.kinds)
        assert makes == (kept is None)


@pytest.mark.parametrize("step", [*STEPS, twice])
def test_backend(step: Step) -> None:
    """Exponentials of logits are torch's, or our kernels'."""

    def exponentials(backend: str) -> bool:
        seen = watched(step, Data(torch.float32), backend=backend).kinds
        return any(name in ("exp", "exp_") and shape[-1:] == (VOCAB,) for name, shape, _ in seen)

    assert exponentials("torch")
    assert torch.cuda.is_available() or not exponentials("triton")


@pytest.mark.parametrize("step", STEPS)
def test_deterministic(step: Step) -> None:
    """Refused where it needs kernels of ours; ``test_deterministic.py`` has what it does there."""
    with pytest.raises(ValueError, match="deterministic=True"):
        step(Data(torch.bfloat16), deterministic=True, backend="torch")


@pytest.mark.parametrize("step", STEPS)
def test_accumulate_into(step: Step) -> None:
    data, buffer = Data(torch.float32), torch.ones(VOCAB, HIDDEN)
    step(data).backward()
    expected, data.weight.grad = data.weight.grad, None
    step(data, accumulate_into=buffer).backward()
    assert data.weight.grad is None and expected is not None
    torch.testing.assert_close(buffer - 1.0, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("step", STEPS)
def test_vocab_size(step: Step) -> None:
    data = Data(torch.float32)
    step(data, vocab_size=VOCAB - 9).backward()
    assert data.weight.grad is not None
    assert data.weight.grad[-9:].eq(0).all() and data.weight.grad[:-9].ne(0).any(1).all()


@pytest.mark.parametrize("step", [step for step in STEPS if step is not checkpointed])
def test_retain_graph(step: Step) -> None:
    data = Data(torch.float32)
    leaves, loss = (data.hidden, data.weight), step(data)
    once = torch.autograd.grad(loss, leaves, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), once, rtol=1e-4, atol=1e-6)
    with pytest.raises(RuntimeError, match=r"backward through the graph a second time"):
        loss.backward()
