"""Layers for ``kernels``, without state: ``kernelize`` puts their forward into modules of the same arguments."""

from typing import Any

import torch
from torch import Tensor, nn

from .functions.cross_entropy import linear_cross_entropy


class LinearCrossEntropy(nn.Module):
    """Cross-entropy of ``hidden @ weight.T + bias`` against class ids, without the logits."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self,
        hidden: Tensor,  # [..., hidden]
        weight: Tensor,  # [vocab, hidden]
        target: Tensor,  # [...] int64
        bias: Tensor | None = None,  # [vocab]
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        return linear_cross_entropy(
            hidden, weight, target, bias=bias, ignore_index=ignore_index, reduction=reduction,
            label_smoothing=label_smoothing,
        )  # fmt: skip


class ForCausalLMLoss(nn.Module):
    """Loss of a causal language model: transformers' function of this name, on hidden states instead of logits.

    Position t predicts label t + 1, or the label at t of ``shift_labels``. The loss is the mean over the labels that
    are not ``ignore_index``, or their sum divided by ``num_items_in_batch``. Arguments and their order are those of
    Liger's layer in transformers' map of kernels; ``hidden_size`` and other keywords are not read.
    """

    can_torch_compile = True
    has_backward = True

    def forward(
        self,
        hidden_states: Tensor,  # [batch, sequence, hidden]
        lm_head_weight: Tensor,  # [vocab, hidden]
        labels: Tensor | None,  # [batch, sequence]
        hidden_size: int | None = None,
        num_items_in_batch: int | Tensor | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        final_logit_softcapping: float | None = None,
        lm_head_bias: Tensor | None = None,
        logit_scale: float = 1.0,
        **kwargs: Any,
    ) -> Tensor:
        target = labels if shift_labels is None else shift_labels.reshape(hidden_states.shape[:-1])
        normalizer = num_items_in_batch
        if isinstance(normalizer, torch.Tensor):
            normalizer = normalizer.to(hidden_states.device)
        return linear_cross_entropy(
            hidden_states, lm_head_weight, target.to(hidden_states.device), bias=lm_head_bias,
            shift=1 if shift_labels is None else 0, ignore_index=ignore_index, softcap=final_logit_softcapping,
            logit_scale=logit_scale, normalizer=normalizer,
        )  # fmt: skip
