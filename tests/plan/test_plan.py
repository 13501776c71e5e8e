"""Plans: within their budget, balanced, of the promised accuracy, and decided without a tensor."""

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tracking import MiB

from chunked_head import linear_cross_entropy, linear_logprobs, losses, plan
from chunked_head.call import planning, spec
from chunked_head.core.tiles import INTERPRETED
from chunked_head.plan.planner import default_budget
from chunked_head.plan.sizes import DEFAULT_BUDGET, parse_bytes, slices

LLAMA: dict[str, Any] = {"hidden": 4096, "vocab": 128256, "dtype": torch.bfloat16, "device": "cuda"}


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.integers(0, 200_000),
    hidden=st.integers(1, 8192),
    vocab=st.integers(1, 300_000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    budget=st.none() | st.integers(1 * MiB, 20_000 * MiB),
    reduction=st.sampled_from(["mean", "none"]),
    hidden_grad=st.booleans(),
    weight_grad=st.booleans(),
)
def test_budget_holds(tokens, hidden, vocab, dtype, budget, reduction, hidden_grad, weight_grad) -> None:
    try:
        made = plan(
            tokens, hidden, vocab, dtype, memory_budget=budget, reduction=reduction, device="cpu", backend="torch",
            hidden_grad=hidden_grad, weight_grad=weight_grad,
        )  # fmt: skip
    except ValueError as error:
        assert budget is not None or tokens * 48 + 20 * hidden * vocab > DEFAULT_BUDGET, str(error)
        assert "too small" in str(error)
        return
    grown = 4 * hidden * vocab if budget is None else 0
    assert made.extra_bytes <= (budget or default_budget(made.sizes, 1)) + grown
    assert made.extra_bytes <= made.budget
    covered = [t for rows in slices(tokens, made.chunk_tokens) for t in (rows.start, rows.stop)]
    assert covered == sorted(covered)
    assert (covered[0], covered[-1]) == (0, tokens) if tokens else not covered
    if made.chunks > 1 and made.chunk_tokens >= 128:
        assert made.chunk_tokens % 16 == 0
        # balanced: no chunk could go, and none is larger than it must be by a multiple of 128
        assert (made.chunks - 1) * made.chunk_tokens < tokens
        assert made.chunk_tokens - 128 < -(-tokens // made.chunks)
    if weight_grad and made.weight_accumulate == dtype and dtype in (torch.bfloat16, torch.float16):
        assert (made.blocks if made.schedule == "recompute" else made.chunks) <= 8 or not tokens
    assert hash(made) == hash(dataclasses.replace(made))
    assert str(made)


@pytest.mark.parametrize(("hidden", "vocab", "beside"), [(2304, 384000, 1551), (2880, 402176, 1630)])
def test_default_for_many_rows_is_a_chunk_of_2048_tokens(hidden: int, vocab: int, beside: int) -> None:
    """Where the logits alone of so many tokens are more than 1280 MiB, in the dtype of the operands."""
    made = plan(8192, hidden, vocab, torch.bfloat16, device="cuda", backend="triton")
    assert (made.schedule, made.chunks, made.chunk_tokens) == ("forward", 4, 2048)
    assert made.extra_bytes <= made.budget <= 1.03 * made.extra_bytes
    assert INTERPRETED or round(made.extra_bytes / MiB) == beside
    assert 2 * 2048 * vocab < made.budget < 2.2 * 2048 * vocab
    assert plan(8192, hidden, vocab, torch.bfloat16, device="cuda", memory_budget="640MiB").budget == 640 * MiB
    assert plan(8192, hidden, 327680, torch.bfloat16, device="cuda").budget == 1280 * MiB
    wide = plan(8192, hidden, vocab, torch.float32, device="cpu")
    assert wide.chunks == 4 and 4 * 2048 * vocab < wide.budget < 4.2 * 2048 * vocab
    shared = plan(8192, hidden, 2 * vocab, torch.bfloat16, device="cuda", backend="triton", ranks=2)
    assert shared.sizes.vocab == vocab and shared.chunks == 4 and shared.budget < 2.2 * 2048 * vocab


def test_default_falls_with_the_ranks() -> None:
    """The more ranks share the vocabulary, the less each may take, in fewer chunks."""
    made = [plan(8192, **LLAMA, ranks=ranks) for ranks in (1, 2, 4, 8)]
    assert made[0] == plan(8192, **LLAMA)
    assert [one.chunks for one in made] == [2, 2, 1, 1]
    budgets = [one.budget for one in made]
    assert budgets == sorted(budgets, reverse=True) and len(set(budgets)) == len(budgets)
    assert all(one.extra_bytes < 0.55 * made[0].extra_bytes for one in made[1:])
    for ranks, one in zip((1, 2, 4, 8), made, strict=True):
        assert one.sizes.vocab == LLAMA["vocab"] // ranks
        assert one.extra_bytes <= one.budget == int(1280 * MiB / ranks**0.5)
    assert plan(8192, **LLAMA, ranks=64).budget == plan(8192, **LLAMA, ranks=16).budget == 320 * MiB
    assert plan(8192, **LLAMA, ranks=2, memory_budget="640MiB").chunks == 2
    assert plan(8192, **LLAMA, ranks=4, sequence_sharded=True).gradient_bytes == 2 * 4096 * (8192 + 128256) // 4


@pytest.mark.parametrize(
    "options",
    [
        {"ranks": 0}, {"ranks": 4, "vocab": 5}, {"ranks": 3, "sequence_sharded": True},
        {"ranks": 2, "sequence_sharded": True, "skip_ignored": True}, {"ranks": 4, "deterministic": True},
        {"ranks": 2, "loss": losses.forward_kl(), "teacher_vocab": 100, "teacher_hidden": 64},
    ],
    ids=str,
)  # fmt: skip
def test_what_a_call_of_ranks_refuses(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="rank"):
        plan(8192, **{**LLAMA, **options})


def test_small_budget_recomputes() -> None:
    made = plan(8192, **LLAMA, memory_budget="220MiB")
    assert made.schedule == "recompute"
    assert made.weight_error is not None and made.weight_error < 4e-3
    exact = plan(8192, **LLAMA, memory_budget="300MiB", accumulate_dtype=torch.float32)
    assert (exact.schedule, exact.blocks) == ("recompute", 1)
    assert exact.extra_bytes <= 300 * MiB


@pytest.mark.parametrize(("tokens", "chunks", "accumulate"), [(16384, 2, torch.bfloat16), (65536, 6, torch.float32)])
def test_few_sums_in_16_bits_come_before_an_accumulator(tokens: int, chunks: int, accumulate: torch.dtype) -> None:
    made = plan(tokens, hidden=768, vocab=50304, dtype=torch.bfloat16, device="sm_90")
    assert (made.chunks, made.weight_accumulate) == (chunks, accumulate)
    assert made.weight_error is not None and made.weight_error < 2.2e-3


def test_autocast_names_the_cast_weight() -> None:
    made = plan(8192, **LLAMA, hidden_dtype=torch.float32, weight_dtype=torch.float32)
    (cast,) = (buffer for buffer in made.buffers if buffer.kind == "cast")
    assert (cast.shape, cast.dtype, cast.bytes) == ((128256, 4096), torch.bfloat16, 2 * 4096 * 128256)
    assert made.weight_accumulate == torch.float32
    assert made.extra_bytes <= 1280 * MiB


def test_a_buffer_of_the_callers() -> None:
    made = plan(65536, **LLAMA, accumulate_into=True)
    assert made.schedule == "forward" and made.extra_bytes <= 1280 * MiB
    assert (made.weight_accumulate, made.hidden_accumulate) == (torch.float32, torch.bfloat16)
    assert made.gradient_bytes == 65536 * 4096 * 2 and made.weight_error is None
    assert "added to a float32 buffer in the forward pass" in str(made)
    assert plan(65536, **LLAMA, accumulate_into=torch.float32) == made
    late = plan(65536, **LLAMA, accumulate_into=True, reduction="none")
    assert late.schedule == "recompute" and late.extra_bytes <= 1280 * MiB
    assert "buffer in the backward pass" in str(late)
    with_bias = plan(65536, **LLAMA, accumulate_into=True, bias=True)
    assert with_bias.gradient_bytes == made.gradient_bytes + 128256 * 2
    with pytest.raises(ValueError, match=r"accumulate_into must be False, True or torch.float32 .* got torch.bfloat16"):
        plan(10, **LLAMA, accumulate_into=torch.bfloat16)
    with pytest.raises(ValueError, match=r"accumulate_dtype must be None or float32, the dtype of accumulate_into"):
        plan(10, **LLAMA, accumulate_into=True, accumulate_dtype=torch.bfloat16)
    assert plan(10, **LLAMA, accumulate_into=True, weight_grad=False) == plan(10, **LLAMA, weight_grad=False)


@pytest.mark.parametrize("chunk", [None, 10])
@pytest.mark.parametrize("top_k", [None, 4])
def test_log_probabilities_are_planned_as_their_call_is(
    top_k: int | None, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight = (torch.randn(rows, 16, requires_grad=True) for rows in (40, 50))
    made, real = [], planning.find_plan
    monkeypatch.setattr(planning, "find_plan", lambda *given: made.append(real(*given)) or made[-1])
    options: dict[str, Any] = {"top_k": top_k, "chunk_tokens": chunk}
    for names in ((), ("entropy",), ("lse", "argmax"), ("log_sum_sq_probs", "mean_logit")):
        spec.SPECS.clear()  # another test's may have a plan
        linear_logprobs(hidden, weight, torch.randint(0, 50, (40,)), **options, **dict.fromkeys(names, True))
        assert made.pop() == plan(40, 16, 50, torch.float32, device="cpu", returns=("logprobs", *names), **options)


def test_prints_as_a_table() -> None:
    text = str(plan(8192, **LLAMA, chunk_tokens=2048))
    for part in ("8192 x 4096 x 128256, bfloat16", "4 of 2048 tokens", "expected error", "beside the gradients"):
        assert part in text
    assert all(len(line) <= 100 for line in text.splitlines()) and "teacher" not in text
    assert "the default: 1.25 GiB\n" in text and "divided" not in text
    long = plan(65536, **LLAMA)
    assert long.schedule == "forward" and "and 2,004 MiB for a float32 sum of the weight's gradient" in str(long)
    wide = str(plan(8192, **{**LLAMA, "vocab": 402176}))
    assert "the default: a chunk of 2048 tokens, which takes more than 1.25 GiB" in wide
    assert "full logits would take        2,004 MiB in bfloat16, and 4,008 for each copy in float32" in text
    assert "divided by 2 for 4 ranks" in str(plan(8192, **LLAMA, ranks=4))
    assert "memory_budget" in str(plan(8192, **LLAMA, memory_budget="1GiB"))
    taught = str(plan(8192, **LLAMA, loss=losses.forward_kl(), teacher_hidden=32, teacher_vocab=400))
    assert "logits of 400 ids, made of hidden states [32]" in taught
    assert "logits of 128256 ids, given by the caller" in str(plan(8192, **LLAMA, loss=losses.forward_kl()))


@pytest.mark.parametrize(
    ("text", "size"),
    [("64MiB", 64 << 20), ("1.5GiB", 3 << 29), ("2 GB", 2 * 10**9), ("100", 100), ("3kb", 3000), (7, 7), ("1g", 10**9)],
)
def test_parse_bytes(text: str | int, size: int) -> None:
    assert parse_bytes(text, "memory_budget") == size


GSPO = {"loss": losses.gspo()}


@pytest.mark.parametrize("options", [{}, GSPO, {"reduction": "none"}], ids=["plain", "gspo", "none"])
@pytest.mark.parametrize("tokens", [0, 1])
def test_a_budget_below_a_row_is_refused(tokens: int, options: dict[str, Any]) -> None:
    """Of no tokens too: which ranks have some may change with every batch."""
    with pytest.raises(ValueError, match="too small: one row of logits"):
        plan(tokens, 64, 4096, torch.float32, device="cpu", memory_budget=100, **options)


def test_a_second_backward_keeps_the_budget() -> None:
    """It computes logits again in blocks of 128 tokens, which take more than chunks of a few: an error, no more memory
    than the caller allows."""
    hidden, weight = torch.randn(64, 256, requires_grad=True), torch.randn(300, 256, requires_grad=True)
    target = torch.randint(0, 300, (64,))
    few = plan(64, 256, 300, torch.float32, device="cpu", chunk_tokens=4).extra_bytes
    loss = linear_cross_entropy(hidden, weight, target, memory_budget=few, backend="torch")
    loss.backward(retain_graph=True)
    with pytest.raises(
        ValueError, match=rf"second backward .* memory_budget of {few} bytes .* a chunk of 64 rows .* needs \d+ bytes"
    ):
        loss.backward()
    loss = linear_cross_entropy(hidden, weight, target, memory_budget=40 * few, backend="torch")
    loss.backward(retain_graph=True)
    loss.backward()


def budget_rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.partition("Budgets that would do")[2].splitlines()[2:]]


@pytest.mark.parametrize("options", [{}, {"loss": losses.dpo()}, {"reduction": "none"}, {"ranks": 4}], ids=str)
def test_budgets_that_would_do(options: dict[str, Any]) -> None:
    """Each printed row is the plan of the call at that budget."""
    rows = budget_rows(str(plan(16384, **LLAMA, **options)))
    assert len(rows) > 3 and rows[-1][2] == "1"
    for budget, schedule, chunks, accumulate, beside in rows:
        made = plan(16384, **LLAMA, **options, memory_budget=budget)
        sums = str(made.weight_accumulate).removeprefix("torch.")
        bytes_beside = f"{made.extra_bytes / MiB:,.1f}"
        assert [made.schedule, str(made.chunks), sums, bytes_beside] == [schedule, chunks, accumulate, beside]
    assert len({(schedule, chunks) for _, schedule, chunks, *_ in rows}) == len(rows)


def test_a_large_default_is_noted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "NOTES", set())
    monkeypatch.setattr(planning, "NOTEWORTHY", 1 << 14)
    hidden, weight = torch.randn(64, 16, requires_grad=True), torch.randn(300, 16, requires_grad=True)
    target = torch.randint(0, 300, (64,))

    def call(tokens: int, **options: Any) -> None:
        spec.SPECS.clear()
        linear_cross_entropy(hidden[:tokens], weight, target[:tokens], **options)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(60, memory_budget="1MiB")  # asked for
    with pytest.warns(
        UserWarning, match=r"0\.0 GiB beside the gradients: the default: 1\.25 GiB\. .*another: 16MiB \("
    ):
        call(64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(63)
