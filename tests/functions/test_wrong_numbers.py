"""Fields whose numbers are not what they should be: a teacher of another tokenizer."""

from typing import Any

import pytest
import torch
from tracking import NoProducts

from chunked_head import linear_loss, losses

HIDDEN = torch.randn(4, 6, 8)


@pytest.mark.parametrize("more", [-1024, 1024])
@pytest.mark.parametrize("of_logits", [False, True])
def test_a_teacher_of_another_tokenizer(more: int, of_logits: bool) -> None:
    """A head's padding may differ; what is said to be the vocabulary is believed."""
    ids = 1040

    def loss(rows: int, **options: Any) -> torch.Tensor:
        batch = {"teacher_logits": torch.randn(4, 6, rows)}
        if not of_logits:
            batch = {"teacher_hidden": torch.randn(4, 6, 2), "teacher_weight": torch.randn(rows, 2)}
        return linear_loss(HIDDEN, torch.randn(ids, 8), None, losses.forward_kl(), batch=batch, **options).loss

    shared = min(ids, ids + more)
    message = rf"student's vocabulary of 1040 ids, .* got one of {ids + more}; .* pass vocab_size={shared}"
    with NoProducts(), pytest.raises(ValueError, match=message):
        loss(ids + more)
    assert loss(ids + more - (1 if more > 0 else -1)).isfinite()
    assert loss(ids + more, vocab_size=shared).isfinite()
