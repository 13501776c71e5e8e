"""Fields whose numbers are not what they should be: probabilities, scores, a teacher of another tokenizer."""

from typing import Any

import pytest
import torch
from cases import PLACES, Place
from tracking import NoProducts

from chunked_head import gathered_topk_kl, linear_loss, losses

HIDDEN, WEIGHT, TARGET = torch.randn(4, 6, 8), torch.randn(11, 8), torch.randint(0, 11, (4, 6))
HEAD = {"hidden": HIDDEN, "weight": WEIGHT, "target": TARGET}
POLICY = losses.grpo() + losses.kl_to_reference() + losses.reinforce(rollout="truncate")


OF_POLICY = ("old_logprobs", "ref_logprobs", "rollout_logprobs")


@pytest.mark.parametrize("field", OF_POLICY)
@pytest.mark.parametrize(
    ("first", "message"),
    [
        ([0.01, 2.5], "at most 0, got 2.5; negate them if losses"),
        ([-0.01, 0.6], "at most 0, got 0.6; negate them if losses"),
        ([0.01, 0.6], r"numbers in \[0, 0.6\], which look like probabilities; pass their .log\(\)"),
        ([0.01, 1.0], r"numbers in \[0, 1\], which look like probabilities"),
    ],
)
def test_no_log_probabilities(field: str, first: list[float], message: str) -> None:
    """An error on the CPU, where to look costs nothing; not of what is masked, nor of what rounding may have made."""
    batch = {name: -torch.rand(4, 6) for name in OF_POLICY}
    if first[0] > 0 and first[1] <= 1:
        batch[field] = torch.rand(4, 6) / 2
    batch |= {"advantages": torch.randn(4, 6), "mask": torch.ones(4, 6, dtype=torch.bool)}
    batch[field][0, :3] = torch.tensor([0.0, *first])
    call = {**HEAD, "loss": POLICY, "batch": batch}
    with pytest.raises(ValueError, match=rf"batch\['{field}'\] must hold log-probabilities, .*{message}"):
        linear_loss(**call)
    batch["mask"][batch[field] > 0.2] = False
    assert linear_loss(**call).loss.isfinite()


@pytest.mark.parametrize("rounded", [0.0, 1e-6, 0.06, 0.25])
def test_log_probabilities_above_0_by_rounding(rounded: float) -> None:
    """Of tokens that are certain, nothing else: 16-bit logits below 128 less their logsumexp."""
    batch = {name: torch.full((4, 6), rounded) for name in OF_POLICY} | {"advantages": torch.randn(4, 6)}
    assert linear_loss(**HEAD, loss=POLICY, batch=batch).loss.isfinite()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_where_to_look_would_be_to_wait(place: Place, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's numbers are not read: one above what rounding makes becomes nan, and the loss with it."""
    monkeypatch.setattr("chunked_head.call.tokens.reading_is_free", lambda tensor: False)
    target = TARGET.clone()
    target[1, 2] = -100

    def loss(field: str, number: float, at: tuple[int, int] = (2, 3)) -> torch.Tensor:
        batch = {name: torch.full((4, 6), 0.25) for name in OF_POLICY} | {"advantages": torch.full((4, 6), 3.0)}
        batch[field][at] = number
        batch = {name: value.to(place.device, dtype) for name, value in batch.items()}
        head = [each.to(place.device) for each in (HIDDEN, WEIGHT, target)]
        return linear_loss(*head, POLICY, batch=batch, shift=1, backend=place.backend).loss

    for field in OF_POLICY:
        assert loss(field, 0.75).isnan() and loss(field, 0.5).isfinite()
        assert loss(field, 9.0, (1, 2)).isfinite() and loss(field, 9.0, (2, 0)).isfinite()  # those that do not count
    assert loss("advantages", 9.0).isfinite()


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("normalize", ["tail", "vocab", "topk"])
def test_no_log_probabilities_of_a_teacher(normalize: str, gathered: bool) -> None:
    """Probabilities, numbers above 0 and those of no softmax, of entries that count; where a loss normalises them, any
    but probabilities will do."""
    ids = torch.arange(4).expand(4, 6, 4)

    def loss(teacher: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if gathered:
            known = {"teacher_logprobs": teacher, "teacher_mask": mask, "lse": torch.full((4, 6), 2.0)}
            return gathered_topk_kl(torch.zeros(4, 6, 4), **known, normalize=normalize)  # type: ignore[arg-type]
        batch = {"teacher_ids": ids, "teacher_logprobs": teacher} | ({} if mask is None else {"teacher_mask": mask})
        return linear_loss(HIDDEN, WEIGHT, None, losses.topk_kl(normalize=normalize), batch=batch).loss

    rounded = torch.randn(4, 6, 4).log_softmax(-1).bfloat16().float()
    right = [rounded, rounded + 1e-3, torch.full((4, 6, 4), -1e9).index_fill(-1, torch.tensor(0), 1e-6)]
    unnormalized = [torch.full((4, 6, 4), 5.0), -torch.rand(4, 6, 4) / 2]
    with pytest.raises(ValueError, match=r"teacher_logprobs.* which look like probabilities; pass their .log\(\)"):
        loss(torch.rand(4, 6, 4))
    messages = "got 5; negate", r"add up to at most 1 .*teacher_renormalize"
    for teacher, message in zip(unnormalized, messages, strict=True):
        if normalize == "topk":
            right.append(teacher)
            continue
        with pytest.raises(ValueError, match=rf"teacher_logprobs.* must hold log-probabilities, .*{message}"):
            loss(teacher)
    assert all(loss(teacher).isfinite() for teacher in right)
    first = torch.tensor([True, False, False, False]).expand(4, 6, 4)
    assert loss(torch.where(first, rounded, 5.0), first).isfinite()


def test_no_look_at_what_has_no_values() -> None:
    """In a graph, and under a transform of torch.func."""
    given = torch.randn(5, 3), torch.randn(5, 9).log_softmax(-1)[:, :3], torch.full((5,), 3.0)

    def loss(student: torch.Tensor, teacher: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        return gathered_topk_kl(student, teacher, lse=lse)

    torch.testing.assert_close(torch.compile(loss, fullgraph=True, backend="eager")(*given), loss(*given))
    of_each = torch.vmap(loss)(*[tensor.unsqueeze(1) for tensor in given])
    torch.testing.assert_close(of_each.mean(), loss(*given))


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
