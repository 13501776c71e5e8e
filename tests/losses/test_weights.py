"""Normalisers and token weights: against loops over sequences, Liger's reductions and TRL's masks."""

from typing import Any

import pytest
import torch
from torch import Tensor

from chunked_head import linear_loss, losses, weights

F64 = torch.float64


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    """A mask [5, 6], whose row 3 is empty, and values with nan where it is False."""
    mask = torch.rand(5, 6) < 0.7
    mask[0], mask[1, 0], mask[2, 5], mask[3] = True, True, True, False
    values = torch.randn(5, 6, dtype=F64)
    return mask, torch.where(mask, values, float("nan"))


def reduced(values: Tensor, mask: Tensor, known: dict[str, Any]) -> Tensor:
    """What the call does with a loss's values: sum(m w l) / D."""
    token_weights, normalizer = known.get("token_weights", 1.0), known.get("normalizer")
    total = torch.where(mask, values * token_weights, 0.0).sum()
    return total / (mask.sum().clamp(min=1) if normalizer is None else normalizer)


def rows(mask: Tensor, values: Tensor) -> list[Tensor]:
    return [values[i][mask[i]] for i in range(len(mask))]


def test_formulas(data) -> None:
    mask, values = data
    sequences = rows(mask, values)
    everything = torch.cat(sequences).sum()
    means = torch.stack([s.mean() for s in sequences if len(s)])
    total = int(mask.sum())
    assert len(means) == 4 and total < 30

    def same(known: dict[str, Any], expected: Tensor) -> None:
        torch.testing.assert_close(reduced(values, mask, known), expected, rtol=1e-6, atol=0)

    same(weights.token_mean(total), everything / total)
    same(weights.token_mean(torch.tensor(2.0 * total)), everything / (2 * total))
    same(weights.bnpo(), everything / total)
    same(weights.sequence_mean(mask), means.sum() / 5)
    same(weights.sequence_mean(mask, empty="excluded"), means.mean())
    same(weights.sequence_mean(mask, num_sequences=40), means.sum() / 40)
    same(weights.sequence_mean(mask, num_sequences=torch.tensor(40.0), empty="excluded"), means.sum() / 40)
    same(weights.sequence_sum(5), everything / 5)
    same(weights.sequence_sum(torch.tensor(7)), everything / 7)
    same(weights.dr_grpo(5, 100), everything / 500)
    same(weights.dr_grpo(torch.tensor(8), 10), everything / 80)


@pytest.mark.parametrize("empty", ["counted", "excluded"])
def test_segments_are_rows_unrolled(data, empty: str) -> None:
    mask, _ = data
    by_rows = weights.sequence_mean(mask, empty=empty)
    segments = torch.tensor([4, 0, 6, 2, 3])[:, None].expand(5, 6).clone()  # 1 and 5 have no token at all
    segments[~mask] = 10**9
    order = torch.randperm(30)
    packed = weights.sequence_mean(mask.flatten()[order], segments.flatten()[order], 7, empty=empty)
    assert torch.equal(packed["token_weights"], by_rows["token_weights"].flatten()[order])
    assert float(packed["normalizer"]) == (7 if empty == "counted" else 4)
    assert float(by_rows["normalizer"]) == (5 if empty == "counted" else 4)
    assert packed["token_weights"].dtype == torch.float64  # which loses nothing in a call of any dtype


def test_nothing_counts() -> None:
    mask = torch.zeros(2, 3, dtype=torch.bool)
    for empty, normalizer in (("counted", 2.0), ("excluded", 0.0)):
        known = weights.sequence_mean(mask, empty=empty)
        assert not known["token_weights"].any() and float(known["normalizer"]) == normalizer
    assert weights.sequence_mean(mask[:0])["token_weights"].shape == (0, 3)


def test_no_wait_for_the_device() -> None:
    """Nothing reads a value of a tensor, which a meta tensor does not have."""
    with torch.device("meta"):
        mask, number, values = torch.ones(5, 6, dtype=torch.bool), torch.tensor(3.0), torch.rand(5, 6)
        segments, pairs = torch.zeros(5, 6, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64)
    for empty in ("counted", "excluded"):
        weights.sequence_mean(mask, empty=empty)
        weights.sequence_mean(mask, segments, 1, empty=empty)
    weights.token_mean(number), weights.dr_grpo(number, 10), weights.sequence_sum(number)
    weights.wpo(values, values, mask, segments, 1, pairs)


@pytest.mark.parametrize(
    ("wrong", "error", "named"),
    [
        (lambda: weights.token_mean(-1), ValueError, "total of weights.token_mean"),
        (lambda: weights.token_mean(torch.ones(1)), ValueError, "total of weights.token_mean"),
        (lambda: weights.sequence_sum("4"), TypeError, "num_sequences of weights.sequence_sum"),
        (lambda: weights.dr_grpo(4, -1), ValueError, "max_completion_length of weights.dr_grpo"),
        (lambda: weights.sequence_mean(torch.ones(2, 3)), TypeError, "mask of weights.sequence_mean"),
        (lambda: weights.sequence_mean(torch.ones(2).bool(), empty="kept"), ValueError, "empty of weights"),
        (
            lambda: weights.sequence_mean(torch.ones(2).bool(), torch.zeros(2).long()),
            ValueError,
            "num_segments, an int of at least 1, got None",
        ),
        (
            lambda: weights.sequence_mean(torch.ones(2).bool(), torch.zeros(3).long(), 1),
            ValueError,
            r"shape \(2,\), that of mask, got \(3,\)",
        ),
        (lambda: weights.sequence_mean(torch.ones(2).bool(), num_segments=1), ValueError, "goes with segments"),
        (
            lambda: weights.wpo(torch.ones(2), *[torch.ones(3)] * 3, 1, torch.zeros(1, 2)),
            ValueError,
            "logprobs of weights.wpo",
        ),
        (
            lambda: weights.wpo(*[torch.ones(2, 3)] * 2, *[torch.ones(2, 3).bool()] * 2, 1, torch.zeros(1, 2)),
            ValueError,
            "logprobs of weights.wpo must hold log-probabilities, .* look like probabilities",
        ),
    ],
)
def test_wrong_arguments(wrong, error: type, named: str) -> None:
    with pytest.raises(error, match=named):
        wrong()


def test_wpo_by_pairs() -> None:
    """As TRL weighs them: rows are segments, the chosen ones first."""
    rows, length = 6, 7
    x = torch.randn(rows, length, 11, dtype=F64)
    target, mask = torch.randint(11, (rows, length)), torch.rand(rows, length) < 0.7
    mask[:, 0] = True
    hidden = torch.eye(11, dtype=F64)  # a head that makes hidden states the logits
    logprobs = x.log_softmax(-1).gather(-1, target[..., None])[..., 0]
    squares = x.log_softmax(-1).mul(2).logsumexp(-1)
    pairs = torch.arange(rows).view(2, -1).t()
    aligned = [(logprobs - squares)[i][mask[i]] for i in range(rows)]
    each = [own.mean().exp() if len(own) else torch.ones((), dtype=F64) for own in aligned]
    expected = torch.stack([each[i] * each[rows // 2 + i] for i in range(rows // 2)])
    segments = torch.arange(rows)[:, None].expand(rows, length)
    found = weights.wpo(logprobs, squares, mask, segments, rows, pairs)
    torch.testing.assert_close(found, expected)

    batch = {"segments": segments, "pairs": pairs, "ref_logprobs": torch.zeros(rows, length, dtype=F64), "mask": mask}

    def summed(**more: Tensor) -> Tensor:
        loss = losses.dpo(reduction="sum")
        return linear_loss(x, hidden, target, loss, batch=batch | more, num_segments=rows).loss

    each_alone = torch.stack([summed(pairs=pair[None]) for pair in pairs])
    torch.testing.assert_close(summed(pair_weights=found), (each_alone * found).sum())
    assert not torch.equal(summed(), summed(pair_weights=found))
