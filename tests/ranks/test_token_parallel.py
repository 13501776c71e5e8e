"""A batch over ranks: shares of losses add up to one rank's, gradients are its gradients, metrics its metrics."""

from typing import Any

import pytest
import ranks
import tiers
import torch
from budget import assert_within_budget
from loss_cases import LOSS_CASES, TOKENS, LossCase, LossInputs, in_turn, inputs_of, run_reference, run_step
from torch import Tensor

from chunked_head import TokenParallel, metrics

WHOLE = ("pairs", "segment_labels", "kl_baseline", "teacher_weight", "teacher_bias")
CHUNKS: dict[str, list[int | None]] = {
    "mixed": [40, None],
    "halves": [None, 7],
    "empty": [None, 30],
    "ignored": [16, 5],
}
FP32, FP16 = torch.float32, torch.float16
RUNS = [("mixed", FP16), *((layout, FP32) for layout in CHUNKS)]


def places(layout: str, rank: int) -> Tensor:
    """Which tokens of the batch a rank holds; -1 for one that it holds and that does not count."""
    if layout == "mixed":  # segments that lie on both ranks, unevenly
        mine = torch.rand(TOKENS, generator=torch.Generator().manual_seed(11)) < 0.7
        return (mine if rank == 0 else ~mine).nonzero().flatten()
    if layout == "halves":
        return torch.arange(TOKENS)[:35] if rank == 0 else torch.arange(TOKENS)[35:]
    if rank == 0:
        return torch.arange(TOKENS)
    return torch.full((13 if layout == "ignored" else 0,), -1)


def spread(case: LossCase, inputs: LossInputs, at: Tensor) -> LossInputs:
    """What a rank that holds the tokens ``at`` gives to its call."""
    target, ignored = inputs.target, at < 0
    if target is not None:
        target = torch.where(ignored, -100, target[at])
    elif "mask" not in case.batch:
        at, ignored = at[~ignored], ignored[~ignored]
    batch = {name: value if name in WHOLE else value[at].contiguous() for name, value in inputs.batch.items()}
    if "mask" in batch:
        batch["mask"] = batch["mask"] & ~ignored
    head = inputs.head_of(lambda each: each[at].contiguous())
    return LossInputs(inputs.hidden[at].contiguous(), inputs.weight, target, batch, head, inputs.num_segments)


def measured(case: LossCase) -> list[Any]:
    found = [metrics.entropy(), metrics.lse(reduce="max"), metrics.lse(reduce="min")]
    found += [metrics.accuracy(), metrics.perplexity()] if case.target else []
    if case.segmented:
        found += [metrics.perplexity("segment"), metrics.accuracy(weighting="segment", name="by_segment")]
    if case.segmented and "old_logprobs" in case.batch:
        found += [metrics.effective_sample_size(), metrics.clip_fraction(side="signed", level="segment")]
        found += [metrics.ratio(level="segment", reduce="max")]
    return found


def step(
    case: LossCase, inputs: LossInputs, upstream: float = 0.7, group: Any = None, **options: Any
) -> dict[str, Any]:
    """``group``: over which metrics are reduced."""
    out, found = run_step(case, inputs, measured(case), upstream, **options)
    reduced = metrics.all_reduce(out.metrics, group)
    return found | {"reduced": {name: value.value.cpu() for name, value in reduced.items()}}


def work(rank: int, device: str) -> dict[str, Any]:
    found = {}
    for layout, dtype in RUNS:
        at = places(layout, rank)
        for case in LOSS_CASES:
            if tiers.ALL or in_turn(case, (layout, dtype), RUNS):
                inputs = spread(case, inputs_of(case, dtype, device, garbage=True), at)
                found[f"{layout} {dtype} {case.name}"] = ranks.outcome(
                    step, case, inputs, parallel=TokenParallel(), chunk_tokens=CHUNKS[layout][rank]
                )
    return found


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run(work, 2, tmp_path_factory.mktemp("two"))


ALONE: dict[tuple[str, torch.dtype], Any] = {}


def alone(case: LossCase, dtype: torch.dtype) -> Any:
    """One rank's: the oracle's in float64 and in the dtype, and ours."""
    key = case.name, dtype
    if key not in ALONE:
        inputs = inputs_of(case, dtype, "cpu")
        ALONE[key] = (
            run_reference(case, inputs.to(torch.float64)), run_reference(case, inputs), step(case, inputs)
        )  # fmt: skip
    return ALONE[key]


def whole(found: list[Tensor], at: list[Tensor]) -> Tensor:
    """Rows of all ranks at their places in the batch; what does not count has none."""
    rows = torch.zeros(TOKENS, *found[0].shape[1:], dtype=found[0].dtype)
    for mine, places in zip(found, at, strict=True):
        assert not mine[places[: len(mine)] < 0].any()
        kept = places >= 0
        rows[places[kept]] = mine[kept[: len(mine)]]
    return rows


def held() -> list[Any]:
    found = []
    for run in RUNS:
        for case in LOSS_CASES:
            param = pytest.param(*run, case, id=" ".join(map(str, (*run, case.name))))
            found += tiers.tier(param, in_turn(case, run, RUNS))
    return found


@pytest.mark.parametrize(("layout", "dtype", "case"), held())
def test_two_ranks(of_two: list[dict[str, Any]], layout: str, case: LossCase, dtype: torch.dtype) -> None:
    outcomes = [rank[f"{layout} {dtype} {case.name}"] for rank in of_two]
    for outcome in outcomes:
        assert not isinstance(outcome, str), outcome
    (_, parts, truth), (_, _, eager), own = alone(case, dtype)
    # a loss may be a small difference of large parts, and one rank's be rounded alike
    torch.testing.assert_close(sum(o["loss"] for o in outcomes), own["loss"], rtol=2e-6, atol=1e-7)
    for name, part in parts.items():
        share = sum(o["parts"][name] for o in outcomes)
        torch.testing.assert_close(share, part.float(), rtol=1e-5, atol=1e-6)
    grads = [whole([o["grads"][0] for o in outcomes], [places(layout, rank) for rank in range(2)])]
    grads += [sum(o["grads"][i] for o in outcomes) for i in range(1, len(truth))]
    for name, ours, plain, exact in zip(("hidden", "weight", "bias"), grads, eager, truth, strict=False):
        assert_within_budget(ours, plain * 0.7, exact * 0.7, dtype, f"gradient of {name}")
    for name, value in own["metrics"].items():
        for outcome in outcomes:
            torch.testing.assert_close(outcome["metrics"][name], value, rtol=1e-5, atol=1e-6, msg=name)
            assert torch.equal(outcome["metrics"][name], outcomes[0]["metrics"][name])
            assert torch.equal(outcome["reduced"][name], outcome["metrics"][name])
