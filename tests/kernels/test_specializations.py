"""What Triton compiles for: the same of every launch, however many tokens a call has."""

from typing import Any

import pytest
import torch
from chunked_head.kernels.common.kernel import PER_CALL, PER_ROW
from chunked_head.kernels.gradients import launch as gradients
from chunked_head.kernels.products import launch as products
from chunked_head.kernels.statistics import launch as statistics
from compiled_for import record_launches

from chunked_head import linear_cross_entropy, linear_loss, losses, metrics, plan

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="launches are stubbed in the interpreter")

HIDDEN, VOCAB, CHUNK = 64, 203, 96
COUNTS = (1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 95, 96, 97, 100, 128, 129, 160, 191, 192, 193, 250, 1000)
# in the order of what keeps the logits: exponentials, relative logits, fp32 logits
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set:
    """Kernels launched and what each was compiled for; only those run whose numbers torch takes for indices."""
    return record_launches(monkeypatch, lambda name: name in ("read_targets_kernel", "sort_targets_kernel"))


def specializations(
    launched: set, tokens: int, dtype: torch.dtype, reduction: str = "mean", **options: Any
) -> frozenset:
    hidden = torch.zeros(tokens, HIDDEN, dtype=dtype, requires_grad=True)
    weight = torch.zeros(VOCAB, HIDDEN, dtype=dtype, requires_grad=True)
    operands = hidden, weight, torch.zeros(tokens, dtype=torch.int64)
    launched.clear()
    if reduction == "none":
        linear_cross_entropy(*operands, reduction="none", backend="triton", **options).sum().backward()
    else:
        measured = [metrics.accuracy(), metrics.entropy(), metrics.lse()]
        linear_loss(*operands, losses.cross_entropy(), metrics=measured, backend="triton", **options).loss.backward()
    return frozenset((name, kinds) for name, _, kinds in launched)


def kind(found: frozenset, several: bool) -> tuple[Any, ...]:
    """Which of the few kinds of call it is: of one chunk or several, with tiles of dhidden that are cut and without, of
    few rows or more, with the weight's gradient by our product or by BLAS's."""
    cut = {dict(named)["part_ptr"] is not None for name, named in found if name == "dhidden_kernel"}
    tiles = {dict(named)["BLOCK_M"] for name, named in found if name == "exp_logits_kernel"}
    return several, *sorted(cut), *tiles, any(name == "dweight_kernel" for name, _ in found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("skip", [False, True])
def test_any_number_of_tokens(launched: set, dtype: torch.dtype, skip: bool) -> None:
    if skip and dtype == torch.float32:
        pytest.skip("fp32 skips no tokens without waiting")
    kinds: dict[tuple, dict[frozenset, int]] = {}
    for tokens in COUNTS:
        several = plan(tokens, HIDDEN, VOCAB, dtype, backend="triton", chunk_tokens=CHUNK).chunks > 1
        found = specializations(launched, tokens, dtype, chunk_tokens=CHUNK, skip_ignored=skip)
        assert len(found) > 4
        kinds.setdefault(kind(found, several), {}).setdefault(found, tokens)
    assert 2 <= len(kinds) <= 5
    for name, same in kinds.items():
        one, *others = same
        assert not others, f"{name}: {list(same.values())}: {differences(one, others[0])}"


def differences(one: frozenset, other: frozenset) -> list:
    return [(name, set(named) - set(told)) for name, named in one - other for also, told in other - one if name == also]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_recomputed_gradients(launched: set, dtype: torch.dtype) -> None:
    """Rows of upstream gradients: a second pass, over blocks and tiles."""
    kinds: dict[tuple, set[frozenset]] = {}
    for tokens in COUNTS:
        found = specializations(launched, tokens, dtype, reduction="none")
        kinds.setdefault(kind(found, several=False), set()).add(found)
    assert len(kinds) <= 2 and all(len(same) == 1 for same in kinds.values())


def test_every_kernel_is_one_of_any_number_of_tokens() -> None:
    """Sizes that follow the number of tokens have names that kernels keep out of what is compiled, and no constants."""
    kernels = {
        name: value.kernel for module in (gradients, products, statistics) for name, value in vars(module).items()
        if name.endswith("_kernel")
    }  # fmt: skip
    named = {name for kernel in kernels.values() for name in kernel.arg_names}
    assert len(kernels) == 33 and set(PER_CALL + PER_ROW) <= named
    for name, kernel in kernels.items():
        assert kernel.kwargs["do_not_specialize"] == PER_CALL, name
