"""Peaks of calls over ranks against their plans' predictions: what ranks send each other takes memory too."""

from typing import Any

import pytest
import ranks
import torch
from tracking import MiB, Tracker

from chunked_head import Plan, VocabParallel, linear_logprobs, linear_loss, losses, plan
from chunked_head.call import run as call
from chunked_head.plan.planner import make_plan
from chunked_head.plan.sizes import Request, Sizes

K, WIDTH = 64, 1024
# gloo sums a copy of what it scatters, NCCL needs none
COPIED = {"gradients by rank": 4096 * 1024 * 4}


def peak(function: Any, tokens: int, hidden: int, rows: int, *args: Any, **options: Any) -> dict[str, Any]:
    h = torch.randn(tokens, hidden, requires_grad=True)
    w = torch.randn(rows, hidden, requires_grad=True)
    target = torch.zeros(tokens, dtype=torch.int64)
    plans: list[Plan] = []
    plan_of = call.planned

    def planned(*args: Any, **options: Any) -> Any:
        found = plan_of(*args, **options)
        plans.append(found.plan)
        return found

    call.planned = planned
    with Tracker(h, w, target, *options.get("batch", {}).values()) as tracker:
        found = function(h, w, target, *args, **options)
        (found[0] if isinstance(found, tuple) else found.loss).sum().backward()
    call.planned = plan_of
    return {"measured": tracker.peak_bytes, "predicted": plans[0].peak_bytes, "plan": plans[0]}


def work(rank: int, device: str) -> dict[str, Any]:
    replicated, sequence = VocabParallel(), VocabParallel(sequence_sharded=True)
    padded, rows = VocabParallel(rows=[64, 8192]), [64, 8192]
    teacher = {"teacher_hidden": torch.randn(4096, WIDTH), "teacher_weight": torch.randn(96, WIDTH)}
    ce, kl = losses.cross_entropy(), losses.forward_kl()
    calls: dict[str, tuple[tuple, dict[str, Any]]] = {
        "largest logits": ((linear_logprobs, 8192, 16, 96), {"parallel": replicated, "top_k": K}),
        "gradients by rank": ((linear_loss, 4096, 1024, 96, ce), {"parallel": sequence, "chunk_tokens": 4096}),
        "a teacher's rows": ((linear_loss, 4096, 16, 96, kl), {"parallel": sequence, "batch": teacher}),
        "padding": ((linear_loss, 64, 1024, rows[rank], ce), {"parallel": padded, "vocab_size": 128}),
    }
    return {name: ranks.outcome(peak, *args, **options) for name, (args, options) in calls.items()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run(work, 2, tmp_path_factory.mktemp("memory"))


@pytest.mark.parametrize("name", ["largest logits", "gradients by rank", "a teacher's rows", "padding"])
def test_prediction(found: list[dict[str, Any]], name: str) -> None:
    for rank in found:
        assert not isinstance(rank[name], str), rank[name]
        measured, predicted = rank[name]["measured"] - COPIED.get(name, 0), rank[name]["predicted"]
        told = f"measured {measured / MiB:.1f} MiB, predicted {predicted / MiB:.1f} MiB\n{rank[name]['plan']}"
        assert abs(measured - predicted) <= max(0.05 * predicted, 8 * MiB), told


def test_plan_before_the_call(found: list[dict[str, Any]]) -> None:
    options = {"backend": "torch", "device": "cpu", "chunk_tokens": 4096}
    foreseen = plan(8192, 1024, 192, torch.float32, **options, ranks=2, sequence_sharded=True)
    assert found[0]["gradients by rank"]["plan"] == foreseen


def test_sums_in_16_bits_are_over_8_chunks() -> None:
    """Of three ranks' rows a chunk has as many: a few more where a few less made nine chunks."""
    half = torch.bfloat16
    sizes = Sizes(8190, 64, 500, half, hidden_dtype=half, weight_dtype=half, spread=3, ranks=3, largest_part=500)
    plan = make_plan(sizes, Request(chunk_tokens=1024, accumulate_dtype=half))
    assert (plan.chunk_tokens, plan.chunks) == (1026, 8)
    assert make_plan(sizes, Request(chunk_tokens=1024, accumulate_dtype=torch.float32)).chunk_tokens == 1023
