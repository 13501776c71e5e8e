"""Cross-entropy of a head whose rows are sharded over ranks, from all of a rank's logits: as peers compute it, and by
our ``logits_loss``."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed

from benchmarks import measure
from chunked_head import VocabParallel, logits_loss, losses


def megatron_style(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The mean cross-entropy in Megatron's way: 16-bit logits, a softmax in float32, three sums over ranks.

    ``hidden`` [tokens, hidden] and ``target`` [tokens] are the same on every rank, ``weight`` [vocab / ranks, hidden]
    is each rank's own part, as large everywhere.
    """
    logits = _Linear.apply(hidden, weight)
    loss: Tensor = _CrossEntropy.apply(logits, target).mean()
    return loss


def ours_on_logits(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The mean cross-entropy of those logits by ``logits_loss``, whose gradient takes their place."""
    logits = _Linear.apply(hidden, weight)
    return logits_loss(logits, target, losses.cross_entropy(), inplace=True, parallel=VocabParallel()).loss


class _Linear(torch.autograd.Function):
    """Logits of this rank's rows; the gradient of hidden states is summed over ranks during the weight's product."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (d_logits,), (hidden, weight) = grads, ctx.saved_tensors
        d_hidden = d_logits @ weight
        summed = distributed.all_reduce(d_hidden, async_op=True)
        d_weight = d_logits.T @ hidden
        assert summed is not None
        summed.wait()
        return d_hidden, d_weight


class _CrossEntropy(torch.autograd.Function):
    """Each token's cross-entropy [tokens], from logits [tokens, vocab / ranks] of which each rank has its own."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        logits = logits.float()
        largest = logits.amax(-1)
        distributed.all_reduce(largest, op=distributed.ReduceOp.MAX)
        logits.sub_(largest[:, None])
        columns = logits.shape[1]
        here = target - distributed.get_rank() * columns
        elsewhere = (here < 0) | (here >= columns)
        here = here.masked_fill(elsewhere, 0)
        chosen = logits.gather(1, here[:, None])[:, 0].masked_fill(elsewhere, 0.0)
        softmax = logits.exp_()
        total = softmax.sum(-1)
        distributed.all_reduce(chosen)
        distributed.all_reduce(total)
        softmax.div_(total[:, None])
        ctx.save_for_backward(softmax, here, elsewhere)
        return total.log() - chosen

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (upstream,), (softmax, here, elsewhere) = grads, ctx.saved_tensors
        rows = torch.arange(len(here), device=here.device)
        softmax[rows, here] -= (~elsewhere).to(softmax.dtype)
        # autograd rounds it to the logits' type
        return softmax.mul_(upstream[:, None]), None


class LossParallel(measure.Step):
    """A step with torch's ``loss_parallel``, whose operators must be in force in the backward too."""

    def __call__(self) -> Tensor:
        from torch.distributed.tensor.parallel import loss_parallel

        with loss_parallel():
            return super().__call__()


def of_tensors_of_ranks(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The mean cross-entropy of logits in float32 that are a DTensor over the vocabulary; operands as Megatron's."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def shard(tensor: Tensor, placement: Any) -> Any:
        return DTensor.from_local(tensor, _mesh(tensor.device.type), [placement], run_check=False)

    logits = shard(hidden, Replicate()) @ shard(weight, Shard(0)).t()
    loss: Any = F.cross_entropy(logits.float(), shard(target, Replicate()))
    local: Tensor = loss.to_local()
    return local


@functools.cache
def _mesh(device: str) -> Any:
    return distributed.init_device_mesh(device, (distributed.get_world_size(),))
