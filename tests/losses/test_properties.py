"""Random calls of every public function against the oracle: ``fuzz.py`` draws them, here are pinned draws of it.

A submission must not pass or fail by luck; ``PYTHONPATH=tests:tests/helpers python -m fuzz`` tries others.
"""

import inspect
import math
from contextlib import nullcontext

import fuzz
import pytest
import torch
from fuzz import Call
from oracle.metrics import METRICS
from oracle.rows import ROWS
from tiers import tier

import chunked_head

NOT_DRAWN = {
    "parallel": "tests/ranks: a call of several processes",
    **dict.fromkeys(("precision", "fp8_weight"), "test_fp8.py: operands in e4m3, beyond the budget of others"),
    "deterministic": "test_deterministic.py: two calls of Hopper's, compared with each other",
    **dict.fromkeys(("kept_offsets", "kept_everywhere", "candidates", "candidate_bias"), "test_kept.py"),
    "segment_lengths": "test_segment_lengths.py",
    **dict.fromkeys(
        ("custom", "divergence", "vocabulary_sum"), "functions of a user's own: loss_cases.py, test_sums.py"
    ),
    **dict.fromkeys(("stream_weights", "acceptance", "agreement"), "test_streams.py"),
}


def blocks(count: int, first: int) -> list:
    return [one for i in range(count) for one in tier(pytest.param(i, id=str(i)), i < first)]


@pytest.mark.parametrize("block", blocks(8, first=3))
def test_torch(block: int) -> None:
    ran = fuzz.sweep(range(100 * block, 100 * block + 100), backends=("torch",))
    assert all(ran.values()), ran


if not torch.cuda.is_available():

    @pytest.mark.parametrize("block", blocks(6, first=3))
    def test_triton_interpreted(block: int) -> None:
        ran = fuzz.sweep(range(50 * block, 50 * block + 50), backends=("triton",))
        assert all(ran.values()), ran


@pytest.mark.gpu
@pytest.mark.parametrize("block", range(10))
def test_gpu(block: int) -> None:
    ran = fuzz.sweep(range(1000 + 100 * block, 1100 + 100 * block), device="cuda")
    assert all(ran.values()), ran


def test_every_function_option_loss_and_metric_is_drawn() -> None:
    source = inspect.getsource(fuzz)
    functions = {name for name in chunked_head.__all__ if name.startswith(("linear_", "gathered_", "logits_"))}
    assert functions | {"ChunkedHead", "CrossEntropyLoss"} == set(fuzz.FUNCTIONS)
    for name in functions | {"CrossEntropyLoss"}:
        for option, parameter in inspect.signature(getattr(chunked_head, name)).parameters.items():
            given = parameter.kind is not parameter.KEYWORD_ONLY or option in NOT_DRAWN
            assert given or f'"{option}"' in source or f"{option}=" in source, f"{name}({option}=) is never drawn"
    assert {kind for kind, _, _ in fuzz.LOSSES} == set(ROWS)
    assert {kind for kind, _ in fuzz.METRICS} == set(METRICS) - set(NOT_DRAWN)


def test_draws_reach_the_edges() -> None:
    calls = [Call(seed) for seed in range(400)]
    assert {0, 1} <= {call.target.numel() for call in calls} and {1, 2} <= {call.vocab for call in calls}
    assert any(call.target.numel() and not call.counts.any() for call in calls)


def test_draws_are_the_same_in_each_process() -> None:
    labels = [fuzz.label(row) for row in (*fuzz.LOSSES, *fuzz.METRICS)]
    assert len({*labels}) == len(labels) and not any("0x" in label for label in labels)


@pytest.mark.parametrize(
    ("truth", "ours", "right"),
    [(65507.7, 65504.0, True), (65507.7, math.inf, True), (65490.0, math.inf, True), (2e6, math.inf, True),
     (2e6, 65504.0, False), (65507.7, -math.inf, False), (65507.7, 60000.0, False), (65507.7, math.nan, False),
     (60000.0, math.inf, False)],
)  # fmt: skip
def test_numbers_near_the_largest_one(truth: float, ours: float, right: bool) -> None:
    """A truth beyond float16's largest number by less than its rounding is that number as well as infinity."""
    each = [torch.tensor([value, 1.0], dtype=torch.float64) for value in (ours, math.nan, truth)]
    with nullcontext() if right else pytest.raises(AssertionError):
        fuzz.compare(*each, torch.float16, 0.05, "a gradient")
