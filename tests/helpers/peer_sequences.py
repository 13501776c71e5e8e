"""Sequences of a rectangle, as other libraries' losses take them: chosen ones, then rejected ones, here segments."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from chunked_head import LossOutput, linear_loss
from chunked_head.losses import Losses
from chunked_head.metrics import Metric

ROWS, LENGTH, HIDDEN, VOCAB = 6, 7, 8, 13
PAIRS = ROWS // 2
LONGEST = 9  # what Dr. GRPO divides by
BASELINE = 0.4  # of KTO


@dataclass(frozen=True)
class Sequences:
    """Operands and fields of a call."""

    hidden: Tensor  # [ROWS, LENGTH, HIDDEN]
    weight: Tensor
    other_hidden: Tensor  # a reference's or a teacher's
    other_weight: Tensor
    ids: Tensor
    mask: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor  # [ROWS]
    labels: Tensor

    @property
    def target(self) -> Tensor:
        return torch.where(self.mask, self.ids, -100)

    @property
    def logits(self) -> Tensor:
        return self.hidden @ self.weight.t()

    @property
    def logprobs(self) -> Tensor:
        """Log-probabilities of the tokens, 0 where a token does not count."""
        return torch.where(self.mask, self.logits.log_softmax(-1).gather(-1, self.ids[..., None])[..., 0], 0.0)

    @property
    def rollout_ratio(self) -> Tensor:
        """Ratio of the old policy's probability to the rollout engine's, 1 where a token does not count."""
        return torch.where(self.mask, self.old_logprobs - self.rollout_logprobs, 0.0).exp()

    def sums(self, values: Tensor) -> Tensor:
        return (values * self.mask).sum(-1)

    def means(self, values: Tensor) -> Tensor:
        return self.sums(values) / self.mask.sum(-1)

    def step(self, loss: Losses) -> Tensor:
        return self.run(loss).loss

    def run(self, loss: Losses, metrics: Sequence[Metric] = ()) -> LossOutput:
        segments = torch.arange(ROWS)[:, None].expand(ROWS, LENGTH)
        batch = {
            "old_logprobs": self.old_logprobs, "ref_logprobs": self.ref_logprobs, "segments": segments,
            "rollout_logprobs": self.rollout_logprobs, "advantages": self.advantages[segments],
            "segment_labels": self.labels, "kl_baseline": torch.tensor(BASELINE, dtype=self.hidden.dtype),
            "pairs": torch.stack([torch.arange(PAIRS), torch.arange(PAIRS) + PAIRS], 1),
            "teacher_hidden": self.other_hidden, "teacher_weight": self.other_weight,
            "nll_mask": self.mask & (segments < PAIRS),
        }  # fmt: skip
        return linear_loss(self.hidden, self.weight, self.target, loss, batch=batch, num_segments=ROWS, metrics=metrics)


def sequences(dtype: torch.dtype, is_paired: bool) -> Sequences:
    """Random sequences. With ``is_paired`` each has a token that counts, since Liger's mean over none is nan."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype)

    hidden, weight, other_weight = normal(ROWS, LENGTH, HIDDEN), normal(VOCAB, HIDDEN) / 2, normal(VOCAB, HIDDEN) / 2
    mask = torch.rand(ROWS, LENGTH) < 0.8
    mask[:, 0], mask[3] = True, is_paired
    ids, other_hidden = torch.randint(VOCAB, (ROWS, LENGTH)), hidden + normal(ROWS, LENGTH, HIDDEN) / 2

    def of(states: Tensor) -> Tensor:
        return (states @ weight.t()).log_softmax(-1).gather(-1, ids[..., None])[..., 0]

    old, ref, rollout = (
        of(hidden) + 0.4 * normal(ROWS, LENGTH),
        of(other_hidden),
        of(hidden) + 0.4 * normal(ROWS, LENGTH),
    )
    advantages = torch.tensor([1.0, -1.5, 0.0, 2.0, -0.5, 1.2], dtype=dtype)
    labels = torch.tensor([True, False, True, True, False, False])
    return Sequences(
        hidden.requires_grad_(), weight.requires_grad_(), other_hidden, other_weight, ids, mask, old, ref, rollout,
        advantages, labels,
    )  # fmt: skip
