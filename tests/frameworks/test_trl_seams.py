"""Behind TRL's seams: its two functions against ours, and that nothing else than what is known gets patched. TRL 1.14,
which `make test-frameworks` has too, has the first of them alone, with two outputs and no fused head of models."""

import contextlib
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiers import crossed
from torch import Tensor

pytest.importorskip("trl", reason="the seams are TRL's, which is not installed")

from trl import SFTTrainer
from trl.trainer import utils

try:
    from trl.kernels import chunked_divergence
except ImportError:  # before TRL 1.15
    chunked_divergence = utils
    utils.ChunkedDivergenceFunction = None

from chunked_head.integrations.trl import (
    OUTPUT_NAMES,
    SFT_STEP,
    DivergenceSeam,
    LogProbSeam,
    patch_trl,
    patched_trl,
    replacement_functions,
    unpatch_trl,
)

TOKENS, HIDDEN, VOCAB = 29, 16, 61
THEIRS = utils._ChunkedLogProbFunction, chunked_divergence.ChunkedDivergenceFunction
COMPUTE_LOSS = SFTTrainer.compute_loss
FUSED = hasattr(utils, "add_fused_lm_head")
needs_fused = pytest.mark.skipif(not FUSED, reason="TRL 1.14 has no fused head")


def log_probs(**options: Any) -> LogProbSeam:
    """Ours, as ``patch_trl`` makes it for the version that is here."""
    return replacement_functions(options)[0][1](("trl.trainer.utils", "_ChunkedLogProbFunction"), THEIRS[0])


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    yield
    with contextlib.suppress(RuntimeError):
        unpatch_trl()
    assert installed() == THEIRS


def installed() -> tuple[Any, Any]:
    return utils._ChunkedLogProbFunction, chunked_divergence.ChunkedDivergenceFunction


def operands(dtype: torch.dtype = torch.float32, weight_dtype: torch.dtype | None = None) -> list[Tensor]:
    made = torch.Generator().manual_seed(4)
    hidden, weight, bias = (
        torch.randn(size, generator=made) for size in ((TOKENS, HIDDEN), (VOCAB, HIDDEN), (VOCAB,))
    )  # fmt: skip
    weight_dtype = weight_dtype or dtype
    return [hidden.to(dtype).requires_grad_(), *(t.to(weight_dtype).requires_grad_() for t in (weight, bias))]


TARGETS = torch.arange(TOKENS) % VOCAB


def outcome(seam: Any, leaves: list[Tensor], *more: Any) -> tuple[tuple, tuple]:
    """What a seam returns, and the gradients of a function of all that takes one."""
    found = seam.apply(*leaves, *more)
    some = [value for value in found if value is not None and value.requires_grad]
    total = sum((value * torch.linspace(-1, 1, TOKENS, device=value.device)).sum() for value in some)
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    return found, torch.autograd.grad(total, wanted)


def assert_same(ours: tuple, theirs: tuple, rtol: float = 2e-5, atol: float = 5e-6) -> None:
    for mine, true in zip(ours[0] + ours[1], theirs[0] + theirs[1], strict=True):
        assert (mine is None) == (true is None)
        if mine is None:
            continue
        assert mine.dtype == true.dtype and mine.requires_grad == true.requires_grad
        torch.testing.assert_close(mine, true, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    "head", [(1.0, 32), (0.7, 32, 3.0, 1.4), (1.9, 64, None, -0.6)], ids=["plain", "capped", "negative"]
)
@pytest.mark.parametrize(
    "outputs", [OUTPUT_NAMES, ("log_probs",), ("log_probs", "entropy", "is_top1"), OUTPUT_NAMES[2:4]], ids=len
)
def test_log_probs(head: tuple, outputs: tuple[str, ...]) -> None:
    more = (*head, *(None, 1.0)[len(head) - 2 :], *([outputs] if FUSED else []))
    ours = outcome(log_probs(chunk_tokens=8), operands(), TARGETS, *more)
    assert_same(ours, outcome(THEIRS[0], operands(), TARGETS, *more))
    if FUSED and "is_top1" in outputs:
        best = log_probs().apply(*operands(), ours[0][4].new_zeros(TOKENS, dtype=torch.int64), *more)[4]
        assert not ours[0][4].all() and best.dtype == torch.bool


def test_the_function_of_trl_1_14() -> None:
    """It has no ``outputs``, and returns log-probabilities and entropies."""

    class Older:
        @staticmethod
        def forward(ctx: Any, last_hidden: Any, weight: Any, bias: Any, targets: Any, temperature: Any) -> None: ...

    older = replacement_functions({})[0][1](("trl.trainer.utils", "_ChunkedLogProbFunction"), Older)
    more = TARGETS, 0.7, 32, 3.0, 1.4
    found, grads = outcome(older, operands(), *more)
    theirs, expected = outcome(LogProbSeam({}), operands(), *more, ("log_probs", "entropy"))
    assert_same((found, grads), (theirs[:2], expected))
    assert len(found) == 2


def test_frozen_and_without_tokens() -> None:
    hidden, weight, _ = operands()
    leaves = [hidden, weight.detach(), None]
    assert_same(outcome(log_probs(), leaves, TARGETS, 1.0, 32), outcome(THEIRS[0], leaves, TARGETS, 1.0, 32))
    found = log_probs().apply(hidden[:0], weight, None, TARGETS[:0], 1.0, 32)
    found[0].sum().backward()
    assert [len(value) for value in found] == [0] * (5 if FUSED else 2) and not weight.grad.any()
    with torch.no_grad():
        assert not log_probs().apply(hidden, weight, None, TARGETS, 1.0, 32)[0].requires_grad


@crossed(autocast=[True, False], weight_dtype=[torch.float32, torch.bfloat16], dtype=[torch.float32, torch.bfloat16])
def test_dtypes(dtype: torch.dtype, weight_dtype: torch.dtype, autocast: bool) -> None:
    """TRL computes in autocast's dtype or the hidden states'; each gradient comes in its operand's."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours = outcome(log_probs(), operands(dtype, weight_dtype), TARGETS, 1.0, 32)
        theirs = outcome(THEIRS[0], operands(dtype, weight_dtype), TARGETS, 1.0, 32)
    half = autocast or dtype == torch.bfloat16
    # they round logits of 16-bit operands: 2^-8 of logits up to 20
    assert_same((ours[0][:4], ours[1]), (theirs[0][:4], theirs[1]), *((0.1, 0.3) if half else (1e-4, 1e-4)))
    assert [g.dtype for g in ours[1]] == [dtype, weight_dtype, weight_dtype]


@pytest.mark.skipif(THEIRS[1] is None, reason="TRL 1.14 has no such function")
@pytest.mark.parametrize("beta", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("head", [(), (0.8, 1.3, 3.0, 0.7, 4.0)], ids=["plain", "capped"])
def test_divergence(beta: float, head: tuple) -> None:
    made = torch.Generator().manual_seed(8)
    teacher = [torch.randn(size, generator=made) for size in ((TOKENS, 9), (VOCAB, 9), (VOCAB,))]
    ours = outcome(DivergenceSeam({"chunk_tokens": 8}), operands(), *teacher, beta, *head)
    theirs = outcome(THEIRS[1], operands(), *teacher, beta, *head)
    assert_same(ours, theirs)
    with torch.autocast("cpu", torch.bfloat16):
        ours = outcome(DivergenceSeam({}), operands(), *teacher, beta, *head)
        theirs = outcome(THEIRS[1], operands(), *teacher, beta, *head)
    assert_same(ours, theirs, 0.03, 0.03)


@crossed(autocast=[False, True], every=[True, False], kind=["nll", "dft"])
def test_foreseen_log_probs(kind: str, every: bool, autocast: bool) -> None:
    """The gradient that was foreseen, up to a factor, is that of three matmuls; any other one is made, with a
    warning."""
    counts = torch.arange(2 * TOKENS) % 2 == 0 if not every else torch.ones(TOKENS, dtype=torch.bool)
    labels = torch.zeros(len(counts), dtype=torch.int64).masked_fill(~counts, -100)
    trainer = SimpleNamespace(args=SimpleNamespace(loss_type=kind))
    leaves, upstream = operands(), torch.linspace(-1, 1, TOKENS)

    def grads(seam: Any, weigh: Any) -> tuple[Any, ...]:
        before = SFT_STEP.set((trainer, {"labels": F.pad(labels, (1, 0))[None]}))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = seam.apply(*leaves, TARGETS, 0.7, 32, None, 1.3, ("log_probs", "entropy", "is_top1"))
        SFT_STEP.reset(before)
        return found, torch.autograd.grad(weigh(found), leaves)

    def mean(found: Any) -> Tensor:
        return 0.3 * (found[0] * (found[0].exp().detach() if kind == "dft" else 1.0)).mean()

    both = LogProbSeam({}, foresees_loss=True), LogProbSeam({})
    ours, theirs = (grads(seam, mean) for seam in both)
    assert_same(ours, theirs, *((0.02, 0.02) if autocast else ()))
    others: list[Any] = [lambda found: (found[0] * upstream).sum(), lambda found: mean(found) + found[1].mean()]
    for other in others:
        with pytest.warns(UserWarning, match="another gradient than patch_trl"):
            ours = grads(both[0], other)
        assert_same(ours, grads(both[1], other), *((0.02, 0.02) if autocast else ()))


@pytest.mark.parametrize("way", ["as foreseen", "another", "zero3"])
def test_a_retained_graph(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second backward gives the first one's gradients, and a second derivative raises."""
    leaves = operands()
    if way == "zero3":
        monkeypatch.setattr(utils, "maybe_gather_lm_head_ctx", lambda *parameters: contextlib.nullcontext())
        leaves[1].ds_id = 1
    foreseen = {"labels": torch.zeros(1, TOKENS + 1, dtype=torch.int64)}
    before = SFT_STEP.set((SimpleNamespace(args=SimpleNamespace(loss_type="nll")), foreseen))
    found = LogProbSeam({}, foresees_loss=way != "zero3").apply(*leaves, TARGETS, 0.7, 32, None, 1.3, ("log_probs",))[0]
    SFT_STEP.reset(before)
    loss = found.mean() if way == "as foreseen" else (found * torch.linspace(-1, 1, TOKENS)).sum()
    with warnings.catch_warnings(action="ignore"):
        once = torch.autograd.grad(loss, leaves, retain_graph=True)
        again = torch.autograd.grad(loss, leaves, retain_graph=True)
        (slope,) = torch.autograd.grad(loss, leaves[0], create_graph=True)
        with pytest.raises(RuntimeError, match="computes no second derivatives"):
            slope.square().sum().backward(retain_graph=True)
        loss.backward()
    for one, other, leaf in zip(once, again, leaves, strict=True):
        torch.testing.assert_close(other, one)
        torch.testing.assert_close(leaf.grad, one)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    """Their kernels and ours; theirs round the logits of 16-bit operands."""
    made = torch.Generator().manual_seed(8)
    teacher = [torch.randn(size, generator=made).to("cuda", dtype) for size in ((TOKENS, 16), (VOCAB, 16), (VOCAB,))]
    targets, tolerance = TARGETS.cuda(), (0.05, 0.1) if dtype == torch.bfloat16 else (1e-4, 1e-4)

    def both(ours: Any, theirs: Any, *more: Any) -> None:
        found = [
            outcome(seam, [t.detach().cuda().requires_grad_() for t in operands(dtype)], *more)
            for seam in (ours, theirs)
        ]
        assert_same(*((values[:4], grads) for values, grads in found), *tolerance)

    both(log_probs(), THEIRS[0], targets, 0.9, 32, 6.0, 1.2, OUTPUT_NAMES)
    for beta in (0.0, 0.3, 1.0):
        both(DivergenceSeam({}), THEIRS[1], *teacher, beta, 0.9)


@pytest.mark.parametrize("seam", [LogProbSeam({}), DivergenceSeam({})], ids=lambda s: type(s).__name__)
def test_weight_that_is_taken_apart_between(seam: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSpeed's ZeRO-3 does: the head is whole where it is gathered, and empty elsewhere."""

    @contextlib.contextmanager
    def gather(*parameters: Any) -> Iterator[None]:
        for parameter in parameters:
            if parameter is not None:
                parameter.data = parameter.whole
        yield
        for parameter in parameters:
            if parameter is not None:
                parameter.data = torch.empty(0)

    monkeypatch.setattr(utils, "maybe_gather_lm_head_ctx", gather)
    more = (TARGETS, 1.0, 32) if isinstance(seam, LogProbSeam) else (*[t.detach() for t in operands()], 0.5)
    expected = outcome(seam, operands(), *more)
    hidden, *head = operands()
    parameters = [torch.nn.Parameter(t.detach()) for t in head]
    upstream = torch.linspace(-1, 1, TOKENS)
    for parameter in parameters:
        parameter.ds_id, parameter.whole = 1, parameter.data
    with gather(*parameters):
        found = seam.apply(hidden, *parameters, *more)
    assert all(not p.numel() for p in parameters)
    total = sum((value * upstream).sum() for value in found if value.requires_grad)
    grads = torch.autograd.grad(total, [hidden, *parameters])
    assert all(not p.numel() for p in parameters)
    assert_same((found, grads), expected, 0.0, 0.0)


def test_patching_and_back() -> None:
    patch_trl(memory_budget="64MiB")
    first = installed()
    assert isinstance(first[0], LogProbSeam) and isinstance(first[1], DivergenceSeam) == FUSED
    assert first[0].options["memory_budget"] == "64MiB"
    patch_trl()
    assert installed()[0].options == {}
    unpatch_trl()
    assert installed() == THEIRS
    unpatch_trl()
    with patched_trl(chunk_tokens=7, losses=("SFT",)):
        assert installed()[0].options["chunk_tokens"] == 7 and SFTTrainer.compute_loss is not COMPUTE_LOSS
    assert installed() == THEIRS and SFTTrainer.compute_loss is COMPUTE_LOSS
    for wrong in ("SFT", ("DPO",)):
        with pytest.raises(ValueError, match=r'losses must be \(\) or \("SFT",\)'):
            patch_trl(losses=wrong)
    assert installed() == THEIRS
    with pytest.raises(KeyError), patched_trl():
        assert isinstance(installed()[0], LogProbSeam)
        raise KeyError
    assert installed() == THEIRS


def test_replaced_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_trl()
    with monkeypatch.context() as other:
        other.setattr(utils, "_ChunkedLogProbFunction", int)
        with pytest.raises(RuntimeError, match=r"trl\.trainer\.utils\._ChunkedLogProbFunction is <class 'int'>"):
            unpatch_trl()


def test_unknown_output() -> None:
    with pytest.raises(ValueError, match=r"outputs must be among 'log_probs'.*got 'varentropy'"):
        LogProbSeam({}).apply(*operands(), TARGETS, 1.0, 32, None, 1.0, ("log_probs", "varentropy"))
