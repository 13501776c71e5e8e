"""Sequences of calls: each call gives the bits that it gives with all caches empty; ``sequences.py`` draws them."""

import pytest
import sequences
import torch
from tiers import tier

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MARKS = [pytest.mark.gpu] if torch.cuda.is_available() else []
# 0 and 1 have each two metrics and each two losses in both orders, 10 and 11 some of them; others calls that are alike
SEEDS = [each for seed in range(22) for each in tier(pytest.param(seed, marks=MARKS, id=str(seed)), seed in (2, 3, 10))]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("seed", SEEDS)
def test_each_call_is_as_with_empty_caches(seed: int) -> None:
    assert not sequences.failures(iter([seed]), DEVICE)


def test_a_wrong_call_shows() -> None:
    """One that gives the number of its calls since caches were empty."""
    sequenced, before = sequences.Sequenced(), list[int]()

    def counting() -> list[torch.Tensor]:
        before.append(0)
        return [torch.tensor(float(len(before)))]

    def constant() -> list[torch.Tensor]:
        return [torch.tensor([1.0, torch.nan])]

    sequenced.empty = before.clear  # type: ignore[assignment]
    assert sequenced.check([constant], [0, 0]) == ""
    assert sequenced.check([constant, counting], [0, 1, 0]) == ""
    said = sequenced.check([constant, counting], [0, 1, 0, 1])
    assert said == "call 1 at place 3 of [0, 1, 0, 1], behind call 1 alone"
    assert "2 of" in sequenced.check([counting, constant], [0, 1, 0])
