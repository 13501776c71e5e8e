"""Losses against Liger's and TRL's, which compute sequences of a rectangle: values and gradients."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_extremes import logits, pairs
from test_formulas import DPO_VARIANTS
from torch import Tensor

from chunked_head import linear_logprobs, linear_loss, logits_loss, losses, weights
from chunked_head.losses import Losses

F64 = torch.float64
PAIRS, LENGTH, WIDTH, VOCAB = 3, 7, 6, 13


def rectangle() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    rows, length = 5, 6
    mask = torch.rand(rows, length) < 0.8
    mask[0], mask[1, 0] = True, True
    mask[3] = False  # a completion without a token that counts
    logprob = -torch.rand(rows, length, dtype=F64) * 3 - 3.0
    fields = {
        name: logprob + 0.4 * torch.randn(rows, length, dtype=F64)
        for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs")
    }
    fields["advantages"] = torch.tensor([1.0, -1.5, 0.0, 2.0, -0.5], dtype=F64)
    return mask, logprob, fields


def ours(loss: Losses, mask: Tensor, logprob: Tensor, fields: dict[str, Tensor]) -> Tensor:
    rows = torch.arange(len(mask))[:, None].expand(mask.shape)
    batch = fields | {"segments": rows, "advantages": fields["advantages"][rows]}
    target = torch.where(mask, 0, -100)
    return logits_loss(logits(logprob), target, loss, batch=batch, num_segments=len(mask)).loss


def by_rows(mask: Tensor) -> dict[str, Any]:
    return weights.sequence_mean(mask)


def over_rows(mask: Tensor) -> dict[str, Any]:
    return {"normalizer": len(mask)}


GSPO = {"importance_sampling_level": "sequence"}
# Liger's kind, our loss, our denominators, Liger's options
POLICY: list[tuple[str, Callable[..., Losses], Callable[[Tensor], dict[str, Any]], dict[str, Any]]] = [
    ("dapo", lambda **own: losses.grpo(0.2, 0.28, **own), lambda mask: {}, {"epsilon_high": 0.28}),
    ("bnpo", lambda **own: losses.grpo(delta=1.4, **own), lambda mask: {}, {"delta": 1.4}),
    ("grpo", lambda **own: losses.grpo(delta=1.1, **own), by_rows, {"delta": 1.1}),
    ("cispo", lambda **own: losses.cispo(1.3, bounds="raw", **own), lambda mask: {}, {"epsilon_high": 1.3}),
    ("sapo", lambda **own: losses.sapo(2.0, 1.5, **own), by_rows,
     {"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 1.5}),
    ("grpo", losses.gspo, over_rows, GSPO),
    ("dapo", lambda **own: losses.gspo(0.1, 0.1, "token", **own), lambda mask: {},
     GSPO | {"epsilon_low": 0.1, "epsilon_high": 0.1}),
    # a segment's value times its length, over the number of segments
    ("luspo", lambda **own: losses.gspo(weighting="token", **own), over_rows, GSPO),
]  # fmt: skip


@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("row", range(len(POLICY)))
def test_policy(row: int, on_policy: bool) -> None:
    liger = pytest.importorskip("liger_kernel.chunked_loss.grpo_loss").LigerFusedLinearGRPOFunction
    kind, made, denominators, options = POLICY[row]
    mask, logprob, fields = rectangle()
    if on_policy:
        del fields["old_logprobs"]
    leaf, other = logprob.clone().requires_grad_(), logprob.clone().requires_grad_()
    loss = ours(made(**denominators(mask)), mask, leaf, fields)
    theirs, _ = liger.ppo_loss_fn(
        other, mask.to(F64), fields["advantages"], mask.to(F64), old_per_token_logps=fields.get("old_logprobs"),
        beta=0.0, loss_type=kind, num_items_in_batch=mask.sum(), **options,
    )  # fmt: skip
    torch.testing.assert_close(loss, theirs, rtol=1e-12, atol=0)
    assert theirs.item() != 0
    grads = torch.autograd.grad(loss, leaf) + torch.autograd.grad(theirs, other)
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-15)


REF = {"beta": 0.3, "compiled": False}
PREFERENCE = [
    # IPO is not in Liger; its sigmoid ignores label smoothing
    *(("DPO", losses.dpo(0.3, variant, label_smoothing=smoothing),
       REF | {"loss_type": variant, "label_smoothing": smoothing})
      for variant in ("exo_pair", *DPO_VARIANTS) if variant not in ("ipo", "sigmoid_norm", "aot", "aot_unpaired")
      for smoothing in [0.1 if variant in ("robust", "exo_pair") else 0.0]),
    # Liger's NLL is switched off, for it is a summand of its own here
    ("SimPO", losses.simpo(0.3, label_smoothing=0.1), REF | {"compute_nll_loss": False, "label_smoothing": 0.1}),
    ("CPO", losses.cpo(0.3, label_smoothing=0.1), REF | {"compute_nll_loss": False, "label_smoothing": 0.1}),
    ("ORPO", losses.orpo(0.3), REF | {"compute_nll_loss": False}),
    # Liger has no weights of desirable and undesirable segments, and does not bound the baseline
    ("KTO", losses.kto(0.3), REF | {"use_ref_model": True}),
    *(("JSD", losses.jsd(beta, temperature=temperature),
       REF | {"weight_hard_loss": 0.0, "weight_soft_loss": 1.0, "beta": beta, "temperature": temperature})
      for beta in (0.0, 0.3, 1.0) for temperature in (1.0, 2.0)),
]  # fmt: skip


@pytest.mark.parametrize("row", range(len(PREFERENCE)))
def test_preference_and_distillation(row: int) -> None:
    """Liger's layout: chosen sequences [P, L], then rejected ones, with ignored positions."""
    liger = pytest.importorskip("liger_kernel.chunked_loss")
    name, loss, options = PREFERENCE[row]
    hidden = torch.randn(2 * PAIRS, LENGTH, WIDTH, dtype=F64).requires_grad_()
    other = hidden.detach() + 0.5 * torch.randn_like(hidden)
    weight, other_weight = torch.randn(2, VOCAB, WIDTH, dtype=F64)
    target = torch.randint(VOCAB, (2 * PAIRS, LENGTH))
    target[torch.rand(target.shape) < 0.25] = -100
    target[:, 0] = 1  # Liger's means of nothing are no numbers
    labels = torch.tensor([True, False, True, True, False, False])
    batch = {
        "segments": torch.arange(2 * PAIRS)[:, None].expand(target.shape), "segment_labels": labels,
        "pairs": torch.stack([torch.arange(PAIRS), torch.arange(PAIRS) + PAIRS], 1),
        "ref_logprobs": linear_logprobs(other, weight, target).detach(), "kl_baseline": torch.tensor(0.4),
    }  # fmt: skip
    theirs = getattr(liger, f"LigerFusedLinear{name}Loss")(**options)
    if name == "JSD":
        batch, target = {"teacher_hidden": other, "teacher_weight": other_weight}, target.clamp(min=0)
        rows, others = hidden.flatten(0, 1), other.flatten(0, 1)
        expected = theirs(rows, weight, others, other_weight, target.flatten())
    elif name == "KTO":
        expected = theirs(
            hidden, weight, target, preference_labels=labels, ref_input=other, ref_weight=weight, kl=torch.tensor(0.4)
        )[0]
    else:
        reference = {"ref_input": other, "ref_weight": weight} if name == "DPO" else {}
        expected = theirs(weight, hidden, target, **reference)[0]
    out = linear_loss(hidden, weight, target, loss, batch=batch, num_segments=2 * PAIRS)
    (mine,), (true,) = torch.autograd.grad(out.loss, hidden), torch.autograd.grad(expected, hidden)
    assert true.abs().max() > 1e-5
    torch.testing.assert_close(out.loss, expected.double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine, true, rtol=1e-5 if name == "JSD" else 1e-4, atol=1e-6)  # Liger adds up in float32


@pytest.mark.exhaustive  # to import TRL takes seconds
@pytest.mark.parametrize("variant", ["sigmoid", "hinge", "ipo", "simpo"])
def test_alphapo(variant: str) -> None:
    trainer = pytest.importorskip("trl.experimental.cpo").CPOTrainer
    u, v = -torch.rand(2, 5, dtype=F64)
    given = {"alpha": 0.3, "loss_type": variant, "beta": 0.4, "label_smoothing": 0.0, "simpo_gamma": 0.5}
    theirs, *_ = trainer.cpo_loss(SimpleNamespace(**given, accelerator=SimpleNamespace(device="cpu")), u, v)
    loss = losses.simpo(0.4, 0.5, alpha=0.3) if variant == "simpo" else losses.cpo(0.4, variant, alpha=0.3)
    torch.testing.assert_close(pairs(loss, u, v)[0], theirs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("rollout", [False, True])
def test_vespo(rollout: bool) -> None:
    trainer = pytest.importorskip("trl").GRPOTrainer
    mask, logprob, fields = torch.ones(4, 6, dtype=torch.bool), *rectangle()[1:]
    logprob, old = logprob[:4].requires_grad_(), fields["old_logprobs"][:4]
    given = {"old_logprobs": old, "advantages": fields["advantages"][:4], "rollout_logprobs": old - 0.1}
    ratio = torch.full((4, 6), math.exp(0.1), dtype=F64) if rollout else None
    phi = trainer.get_gamma_weights(given["advantages"][:, None], logprob.detach() - old, mask.to(F64), ratio)
    loss = ours(losses.vespo(rollout="truncate" if rollout else None, reduction="sum"), mask, logprob, given)
    slopes = (-phi * given["advantages"][:, None]).expand(4, 6)
    torch.testing.assert_close(loss, (slopes * logprob).sum())
    torch.testing.assert_close(torch.autograd.grad(loss, logprob)[0], slopes)
