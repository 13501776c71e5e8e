"""Segments whose lengths the host knows: the numbers of the same call by ids, in chunks that end where segments end."""

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from cases import PLACES, Place
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import crossed
from torch import Tensor

from chunked_head import linear_loss, losses, metrics
from chunked_head.plan.segments import spans_of
from chunked_head.stores.store import LogitsStore

VOCAB, HIDDEN, CHUNK = 61, 24, 16
# a line, whole lines, and lines that hold several segments; one is empty, some are longer than a chunk
LAYOUTS = {
    "packed": ((64,), [7, 0, 14, 5, 23, 15]),
    "padded": ((6, 12), [12] * 6),
    "lines": ((2, 30), [10, 9, 11, 3, 17, 10]),
    "long": ((2, 40), [70, 1, 3, 6]),
}
LOSSES: dict[str, losses.Losses] = {
    "gspo": losses.gspo(), "gspo-token": losses.gspo(weighting="token") + 0.1 * losses.entropy(), "gmpo": losses.gmpo(),
    "rloo": losses.rloo() + 0.05 * losses.kl_to_reference(), "kto": losses.kto(), "dpo": losses.dpo(),
    "rollout": losses.grpo(rollout="truncate", rollout_level="segment"), "orpo": losses.orpo() + losses.cross_entropy(),
}  # fmt: skip
PAIRED = ("dpo", "orpo")
CUSTOM = losses.custom(lambda stats, batch: batch.segment_sum(stats.logprob), scope="segment", unit="segment")


def made(layout: str, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    leading, lengths = LAYOUTS[layout]
    g = torch.Generator().manual_seed(len(lengths))
    hidden = torch.randn(*leading, HIDDEN, generator=g).to(device, dtype)
    weight = torch.randn(VOCAB, HIDDEN, generator=g).mul(0.05).to(device, dtype)
    target = torch.randint(VOCAB, leading, generator=g).masked_fill(torch.rand(leading, generator=g) < 0.2, -100)
    # near the model's own: sums of log-ratios are exponents
    batch = {name: 0.2 * torch.randn(leading, generator=g) - 4.1 for name in ("old_logprobs", "ref_logprobs")}
    batch["rollout_logprobs"] = batch["old_logprobs"] + 0.05 * torch.randn(leading, generator=g)
    batch |= {"advantages": torch.randn(leading, generator=g)}
    batch["segment_labels"] = torch.rand(len(lengths), generator=g) < 0.5
    half = len(lengths) // 2  # as TRL and Liger lay them: the chosen ones first
    batch["pairs"] = torch.tensor([[i, half + i] for i in range(half)])
    return hidden, weight, target.to(device), {name: value.to(device) for name, value in batch.items()}


def fields_of(name: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU what the host reads."""
    return {
        key: value.cpu() if key == "pairs" else value
        for key, value in batch.items()
        if key != "pairs" or name in PAIRED
    }


def step(
    name: str, layout: str, dtype: torch.dtype, place: Place, shift: int, known: bool = True, **options: Any
) -> tuple[Any, Tensor, Tensor]:
    hidden, weight, target, batch = made(layout, dtype, place.device)
    leading, lengths = LAYOUTS[layout]
    segments = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).view(leading).to(place.device)
    given = {"segment_lengths": lengths} if known else {"num_segments": len(lengths)}
    batch = fields_of(name, batch) if known else batch | {"segments": segments}
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    out = linear_loss(
        hidden, weight, target, LOSSES.get(name, CUSTOM), batch=batch, shift=shift, backend=place.backend,
        metrics=[metrics.ratio(level="segment"), metrics.entropy()], **{"chunk_tokens": CHUNK, **given, **options},
    )  # fmt: skip
    (out.loss * 0.37).backward()
    assert hidden.grad is not None and weight.grad is not None
    return out, hidden.grad, weight.grad


@crossed(place=PLACES, shift=[0, 2], layout=LAYOUTS, name=LOSSES)
def test_three_matmuls(name: str, layout: str, shift: int, place: Place) -> None:
    dtype = torch.float64 if place.backend == "torch" else torch.float32
    out, *grads = step(name, layout, dtype, place, shift)
    assert out.plan.schedule == "forward"
    expected, *others = step(name, layout, dtype, place, shift, known=False, chunk_tokens=100)
    torch.testing.assert_close(out.loss, expected.loss)
    torch.testing.assert_close(grads, others, rtol=1e-4 if dtype == torch.float32 else 1e-9, atol=1e-7)


def swept(layout: str) -> list[int]:
    """Rows of each chunk whose logits are made."""
    with mock.patch.object(LogitsStore, "fill", autospec=True, side_effect=LogitsStore.fill) as fill:
        step("gspo", layout, torch.float32, Place("torch", "cpu"), 0)
    return [len(rows.target) for (_, rows, _), _ in fill.call_args_list]


def test_only_segments_longer_than_a_chunk_are_swept_twice() -> None:
    assert swept("padded") == [12] * 6
    assert swept("packed") == [15, 14, 12, 16, 7, 16, 7]  # 23 tokens, twice
    assert sum(swept("long")) == 2 * 70 + 10


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=30), st.integers(1, 3000), st.booleans())
def test_order_and_chunks(lengths: list[int], most: int, free: bool) -> None:
    """All groups once, in their own order unless they are free; chunks of complete ones, or of one."""
    spans, order = spans_of(lengths, most, free)
    assert sorted(order) == [*range(len(lengths))] and (free or order == sorted(order))
    chunks = [chunk for span in spans for chunk in span]
    assert [chunk.start for chunk in chunks] == [0, *(chunk.stop for chunk in chunks[:-1])]
    assert chunks[-1].stop == sum(lengths) and all(0 < chunk.stop - chunk.start <= most for chunk in chunks)
    ends = {0, *itertools.accumulate(lengths[group] for group in order)}
    assert all(span[0].start in ends and span[-1].stop in ends for span in spans)
    assert all(len(span) == 1 or span[-1].stop - span[0].start in lengths for span in spans)


def test_chunks_fill_tiles() -> None:
    """Of 8192 tokens, chunks of 2432: one tile's rows are computed in vain, where segments in their order waste two."""
    made, wasted = torch.Generator().manual_seed(0), [0, 0]
    for _ in range(50):
        lengths = torch.rand(16, generator=made).add(0.5).mul(511).int().tolist()
        for free in (False, True):
            spans, _ = spans_of([*lengths, 8192 - sum(lengths)], 2432, free)
            wasted[free] += sum(-(chunk.stop - chunk.start) % 128 for span in spans for chunk in span)
    assert wasted[True] < 0.65 * wasted[False]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_lengths_and_pairs(data: st.DataObject) -> None:
    """In chunks of any size the numbers of one chunk; empty segments and pairs of one, of none (-1), of many."""
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=12))
    ids = st.integers(0, len(lengths) - 1)
    pairs = torch.tensor(data.draw(st.lists(st.tuples(ids, ids), min_size=1, max_size=8)))
    made, tokens = torch.Generator().manual_seed(1), sum(lengths)
    hidden = torch.randn(tokens, HIDDEN, generator=made).double().requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=made).double().requires_grad_()
    target = torch.randint(VOCAB, (tokens,), generator=made)
    batch = {"ref_logprobs": -3.0 - torch.rand(tokens, generator=made).double(), "pairs": pairs}
    found = []
    for chunk in (data.draw(st.integers(1, 40)), 200):
        out = linear_loss(
            hidden, weight, target, losses.dpo(), batch=batch, segment_lengths=lengths, chunk_tokens=chunk,
            num_segments=len(lengths),  # of [0, n], which would be cu_seqlens too
        )  # fmt: skip
        assert out.plan is not None and out.plan.chunk_tokens <= chunk
        found.append((out.loss, *torch.autograd.grad(out.loss, (hidden, weight))))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(("name", "options"), [("custom", {}), ("kto", {"skip_ignored": "wait"})])
def test_four_matmuls_where_three_would_be_wrong(name: str, options: dict[str, Any]) -> None:
    """What else a chunk's gradients wait for; the numbers are the same."""
    (out, *grads), (expected, *others) = (
        step(name, "lines", torch.float32, Place("torch", "cpu"), 0, known, **options) for known in (True, False)
    )
    assert out.plan.schedule == "recompute"
    torch.testing.assert_close([out.loss, *grads], [expected.loss, *others])


@pytest.mark.parametrize(
    ("lengths", "fields", "options", "says"),
    [
        ([30, 29], {}, {}, "add up to the tokens, 60"),
        ([61, -1], {}, {}, "add up to the tokens, 60"),
        ([], {}, {}, "of one segment or more"),
        ([30.0, 30.0], {}, {}, "must be a list of ints"),
        (torch.ones(60), {}, {}, "one-dimensional int tensor on the CPU"),
        ([60], {}, {"num_segments": 2}, "num_segments is 2, segment_lengths are of 1; leave it out"),
        ([0, 20, 60], {}, {"num_segments": 3}, "num_segments is 3, segment_lengths are of 2"),
        ([0, 60], {}, {}, r"\[0, 60\] are lengths of 2 segments, .* cu_seqlens of 1; pass num_segments=2 or 1"),
        ([0, 0, 60], {}, {"num_segments": 1}, "pass num_segments=3 or 2"),
        ([0, 30, 20, 60], {}, {}, "or grow from 0 to 60 as cu_seqlens do, got 4 that add up to 110"),
        ([10, 30, 60], {}, {}, "as cu_seqlens do"),
        ([60], {"segments": torch.zeros(2, 30, dtype=torch.int64)}, {}, r"leave out batch\['segments'\]"),
        ([60], {"pairs": torch.zeros(1, 2, dtype=torch.int64, device="meta")}, {}, "on the CPU"),
        ([30, 30], {"pairs": torch.tensor([[0, 2]])}, {}, r"must be in \[0, 2\)"),
    ],
)
def test_errors(lengths: Any, fields: dict[str, Tensor], options: dict[str, Any], says: str) -> None:
    hidden, weight, target, batch = made("lines", torch.float32, "cpu")
    own = {name: value for name, value in batch.items() if name.endswith("logprobs") or name == "advantages"}
    loss = losses.dpo() if "pairs" in fields else losses.gspo()
    with pytest.raises((ValueError, TypeError, IndexError), match=says):
        linear_loss(hidden, weight, target, loss, batch=own | fields, segment_lengths=lengths, **options)


@pytest.mark.parametrize(
    ("cumulated", "lengths", "options"),
    [
        (torch.tensor([0, 10, 19, 60], dtype=torch.int32), [10, 9, 41], {}), ([0, 20, 20, 60, 60], [20, 0, 40, 0], {}),
        ([0, 60], [60], {"num_segments": 1}), ([60], [60], {"num_segments": 1}),
        ([0, 60], [0, 60], {"num_segments": 2}),
    ],
)  # fmt: skip
def test_cumulated_lengths(cumulated: Any, lengths: list[int], options: dict[str, int]) -> None:
    """As attention kernels take them."""
    hidden, weight, target, batch = made("lines", torch.float32, "cpu")
    fields = {name: batch[name] for name in ("old_logprobs", "advantages")}
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    outs = [
        linear_loss(*leaves, target, losses.gspo(), batch=fields, segment_lengths=cumulated, **options),
        linear_loss(
            *leaves, target, losses.gspo(), batch=fields, segment_lengths=[*lengths], num_segments=len(lengths)
        ),
    ]
    ours, right = [(out.loss, *torch.autograd.grad(out.loss, leaves)) for out in outs]
    torch.testing.assert_close(ours, right, rtol=0, atol=0)


HALF_SUMS = {"chunk_tokens": 64, "accumulate_dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("lengths", "options", "expected"),
    [
        ([300], {}, ("forward", 1)), ([150, 150], {}, ("forward", 1)), ([10, 280, 10], {}, ("forward", 1)),
        # segments that end just behind a chunk take three chunks for one: too many to be added up in 16 bits
        ([1, 65] * 3 + [1, 50], HALF_SUMS, ("recompute", 4)), ([60] * 3 + [69], HALF_SUMS, ("forward", 5)),
    ],
)  # fmt: skip
def test_chunks_of_a_call(lengths: list[int], options: dict[str, Any], expected: tuple[str, int]) -> None:
    tokens = sum(lengths)
    hidden, weight = (torch.randn(n, HIDDEN).bfloat16().requires_grad_() for n in (tokens, VOCAB))
    out = linear_loss(
        hidden, weight, torch.randint(VOCAB, (tokens,)), losses.gspo(), batch={"advantages": torch.randn(tokens)},
        segment_lengths=lengths, backend="torch", **options,
    )  # fmt: skip
    assert out.plan is not None and (out.plan.schedule, out.plan.chunks) == expected
    with pytest.warns(DeprecationWarning, match="segment_chunks"):
        assert out.plan.ending == out.plan.segment_chunks


def test_a_budget_without_room_for_another_order() -> None:
    """Less than the gradient of hidden states in another order: they run in their own, in four matmuls."""
    hidden, weight = torch.randn(4096, 256, requires_grad=True), torch.randn(200, 256, requires_grad=True)
    out = linear_loss(
        hidden, weight, torch.randint(200, (4096,)), losses.gspo(), batch={"advantages": torch.randn(4096)},
        segment_lengths=[512] * 8, backend="torch", memory_budget="3MiB",
    )  # fmt: skip
    assert out.plan is not None and out.plan.schedule == "recompute"


def test_places_in_a_segment_are_those_of_the_caller() -> None:
    """Also where rows are moved: tokens that do not count, or that keep sets, behind the others."""
    hidden, weight, target, batch = made("packed", torch.float32, "cpu")
    lengths = LAYOUTS["packed"][1]
    batch["segments"] = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    batch["kept_ids"] = torch.randint(VOCAB, (64, 3)).masked_fill(torch.arange(64)[:, None] % 3 > 0, -1)
    found = []
    for skip in (False, True, "wait"):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        out = linear_loss(
            *leaves, target, losses.dpo(ld_alpha=0.3), batch=batch, num_segments=len(lengths), chunk_tokens=CHUNK,
            skip_ignored=skip, backend="torch",
        )  # fmt: skip
        found.append((out.loss.detach(), *torch.autograd.grad(out.loss, leaves)))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])
