"""What a user's script looks like to a type checker. It runs, too."""

from typing import assert_type

import torch
from torch import Tensor, nn

from chunked_head import (
    ChunkedHead,
    CrossEntropyLoss,
    LossOutput,
    Plan,
    linear_cross_entropy,
    linear_divergence,
    linear_logprobs,
    linear_loss,
    logits_loss,
    losses,
    metrics,
    patch_model,
    plan,
    unpatch_model,
)
from chunked_head.losses.batch import Batch, Stats

hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True)
target, logits = torch.randint(0, 16, (4,)), torch.randn(4, 16, requires_grad=True)

loss = linear_cross_entropy(hidden, weight, target, label_smoothing=0.1)
assert_type(loss, Tensor)
torch.autograd.backward(loss)  # Tensor.backward has no types in torch


def push(stats: Stats, batch: Batch) -> Tensor:
    return -stats.logprob * batch["advantages"]


pushed = torch.tensor(0.5) * losses.custom(push, scope="token")
mix = losses.cross_entropy() + 1e-4 * losses.z_loss() - 0.01 * losses.entropy() + pushed
mix = (-mix).times(loss.detach()) / 2.0
assert_type(mix, losses.Losses)
measured = [metrics.accuracy(), metrics.entropy(reduce="max")]
out = linear_loss(hidden, weight, target, mix, batch={"advantages": torch.randn(4)}, metrics=measured)
assert_type(out, LossOutput)
torch.autograd.backward(out.loss)
print(out.parts["z_loss"].item(), float(out.metrics["accuracy"]), out.metrics["accuracy"].sum)
if out.plan is not None:
    print(out.plan.schedule)

# a tensor, or a named tuple of those that were asked for
assert_type(linear_logprobs(hidden, weight, target, temperature=0.5, softcap=30.0), Tensor)
assert_type(linear_logprobs(hidden, weight, target, top_k=3).top_k_ids, Tensor)
logprobs, entropy = linear_logprobs(hidden, weight, target, entropy=True)
assert_type(entropy, Tensor)
alone = linear_divergence(hidden, weight, teacher_logits=logits.detach())
assert isinstance(alone, Tensor)  # without entropy=True
pair = linear_divergence(hidden, weight, teacher_logits=logits.detach(), entropy=True)
assert isinstance(pair, tuple)
assert_type(pair.entropy, Tensor)

head = ChunkedHead.from_linear(nn.Linear(8, 16), z_loss=1e-4)
assert_type(head, ChunkedHead)
assert_type(head.forward(hidden, target), Tensor)
assert_type(head.logits(hidden), Tensor)
assert_type(CrossEntropyLoss().forward(logits, target), Tensor)
assert_type(logits_loss(logits, target, losses.cross_entropy(), metrics=[metrics.lse()]), LossOutput)
assert_type(plan(tokens=16384, hidden=4096, vocab=128256, dtype=torch.bfloat16), Plan)


class Model(nn.Module):
    """Nothing that has a head: it stays as it is, with a warning."""


model = patch_model(Model())
assert_type(model, Model)
assert_type(unpatch_model(model), Model)
