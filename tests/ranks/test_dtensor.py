"""Operands that are DTensors, and modules under tensor-parallel, sharding and data-parallel wrappers."""

from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from chunked_head import ChunkedHead, linear_cross_entropy, linear_logprobs

TOKENS, HIDDEN, VOCAB = (4, 6), 16, 51


def place() -> str:
    return "cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu"


def operands() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias, targets."""
    made = torch.Generator().manual_seed(5)
    hidden, weight = torch.randn(*TOKENS, HIDDEN, generator=made), torch.randn(VOCAB, HIDDEN, generator=made)
    target = torch.randint(0, VOCAB, TOKENS, generator=made)
    target[0, :2] = -100
    hidden, weight, bias, target = (t.to(place()) for t in (hidden, weight, torch.randn(VOCAB, generator=made), target))
    return hidden, weight, bias, target


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same(loss: Tensor, leaves: Any, true: Tensor, true_leaves: Any) -> None:
    torch.testing.assert_close(loss.detach(), true.detach(), rtol=5e-6, atol=1e-6)
    torch.testing.assert_close([whole(t) for t in leaves], list(true_leaves), rtol=1e-5, atol=1e-6)


def beside_plain(loss: Tensor, *leaves: Any) -> None:
    """A loss after its backward and its leaves, against PyTorch."""
    hidden, weight, bias, target = operands()
    plain = [t.requires_grad_() for t in (hidden, weight, bias)]
    true = nn.functional.cross_entropy(nn.functional.linear(*plain).flatten(0, 1), target.flatten())
    same(loss, [leaf.grad for leaf in leaves], true, torch.autograd.grad(true, plain))


def placed(hidden_placement: Any, weight_placement: Any) -> None:
    mesh = init_device_mesh(place(), (2,))
    hidden, weight, bias, target = operands()
    h = distribute_tensor(hidden, mesh, [hidden_placement]) if hidden_placement is not None else hidden
    w, b = (distribute_tensor(t, mesh, [weight_placement]) for t in (weight, bias))
    leaves = [t.detach().requires_grad_() for t in (h, w, b)]
    loss = linear_cross_entropy(leaves[0], leaves[1], target, bias=leaves[2])
    loss.backward()
    beside_plain(loss, *leaves)


def column_parallel() -> None:
    """torch's own tensor-parallel plan for the linear layer that the head takes its parameters from."""
    hidden, weight, bias, target = operands()
    linear = nn.Linear(HIDDEN, VOCAB, device=place())
    linear.load_state_dict({"weight": weight, "bias": bias})
    parallelize_module(linear, init_device_mesh(place(), (2,)), ColwiseParallel())
    loss = ChunkedHead.from_linear(linear, chunk_tokens=7)(hidden.requires_grad_(), target)
    loss.backward()
    beside_plain(loss, hidden, linear.weight, linear.bias)


def log_probabilities() -> None:
    """Values of each rank's own tokens, and gradients that wait for their upstream."""
    mesh = init_device_mesh(place(), (2,))
    *given, target = operands()
    leaves = [
        distribute_tensor(t, mesh, [Shard(dim)]).requires_grad_() for t, dim in zip(given, (1, 0, 0), strict=True)
    ]
    found = linear_logprobs(leaves[0], leaves[1], target, bias=leaves[2], entropy=True)
    assert found.logprobs.shape == target.chunk(2, 1)[dist.get_rank()].shape
    loss = -found.logprobs.sum() / (target != -100).sum()
    loss.backward()
    dist.all_reduce(total := loss.detach().clone())
    beside_plain(total, *leaves)


def on_its_way(sharded_weight: bool) -> None:
    """Hidden states that an asynchronous collective still brings, of whose wrapper a kernel cannot read memory."""
    mesh = init_device_mesh(place(), (2,))
    hidden, weight, bias, target = operands()
    h = distribute_tensor(hidden, mesh, [Shard(0)]).requires_grad_()
    w, b = weight.requires_grad_(), bias.requires_grad_()
    if sharded_weight:
        w, b = (distribute_tensor(t.detach(), mesh, [Shard(0)]).requires_grad_() for t in (weight, bias))
    brought = h.redistribute(mesh, [Replicate()], async_op=True)
    rows = brought if sharded_weight else brought.to_local()
    assert sharded_weight or type(rows).__name__ == "AsyncCollectiveTensor"
    loss = linear_cross_entropy(rows, w, target, bias=b, backend="triton")
    loss.backward()
    beside_plain(loss, h, w, b)


class Model(nn.Module):
    """A body and a head whose loss is the forward's result, as in a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.head = ChunkedHead(HIDDEN, VOCAB, bias=True, chunk_tokens=5)

    def forward(self, hidden: Tensor, target: Tensor, normalizer: Tensor) -> Tensor:
        return self.head(self.body(hidden), target, normalizer=normalizer)


def made() -> Any:
    torch.manual_seed(1)
    return Model().to(place())


def alone() -> tuple[Tensor, list[Tensor]]:
    """Losses and weights of two steps of SGD by torch on one rank."""
    model, losses = made(), []
    hidden, _, _, target = operands()
    for _ in range(2):
        logits = nn.functional.linear(model.body(hidden), model.head.weight, model.head.bias)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter -= 0.1 * grad
        losses.append(loss.detach())
    return torch.stack(losses), [p.detach() for p in model.parameters()]


def trained(model: Any, part: int, group: Any = None, micro_batches: int = 1, **sgd: Any) -> None:
    """The same steps with a part of the batch, whose denominator is the batch's. Gradients are averaged over the ranks:
    each rank's share is doubled."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **sgd)
    hidden, _, _, target = operands()
    count, losses = (target != -100).sum(), []
    for _ in range(2):
        optimizer.zero_grad()
        share = hidden.new_zeros(())
        for i in range(micro_batches):
            size = 2 // micro_batches
            at = slice(2 * part + i * size, 2 * part + (i + 1) * size)
            if micro_batches > 1:
                model.set_requires_gradient_sync(i == micro_batches - 1)
            loss = 2 * model(hidden[at], target[at], count)
            loss.backward()
            share += loss.detach()
        optimizer.step()
        dist.all_reduce(share, group=group)
        losses.append(share / 2)
    same(torch.stack(losses), [p.detach() for p in model.parameters()], *alone())


def data_parallel() -> None:
    trained(DistributedDataParallel(made()), dist.get_rank())


def sharded(own: bool = False, policy: bool = False, micro_batches: int = 1) -> None:
    model, mesh = made(), init_device_mesh(place(), (2,))
    if own:
        fully_shard(model.head, mesh=mesh)
    options = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)} if policy else {}
    fully_shard(model, mesh=mesh, **options)
    trained(model, dist.get_rank(), micro_batches=micro_batches)


class Linear(Model):
    """The same with a linear layer of torch's, whose weight is the head's."""

    def __init__(self) -> None:
        super().__init__()
        head = nn.Linear(HIDDEN, VOCAB)
        head.weight, head.bias = self.head.weight, self.head.bias
        self.head = head

    def forward(self, hidden: Tensor, target: Tensor, normalizer: Tensor) -> Tensor:
        rows, head = self.body(hidden), self.head
        return linear_cross_entropy(rows, head.weight, target, bias=head.bias, normalizer=normalizer, chunk_tokens=5)


def two_dimensions() -> None:
    """Data-parallel by FSDP2 across, tensor-parallel along: four ranks."""
    mesh = init_device_mesh(place(), (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    model = Linear().to(place())
    parallelize_module(model.head, mesh["tp"], ColwiseParallel())
    fully_shard(model, mesh=mesh["dp"])
    trained(model, mesh.get_local_rank("dp"), mesh["dp"].get_group(), foreach=False)


def padded_pieces() -> None:
    """Fewer ids than rows, of which ``torch.chunk`` leaves the last of four ranks fewer: 12, as of 48 ids."""
    hidden, weight, _, target = operands()
    target = torch.where(target >= 0, target % (VOCAB - 3), target)
    w = distribute_tensor(weight, init_device_mesh(place(), (4,)), [Shard(0)]).requires_grad_()
    loss = linear_cross_entropy(hidden, w, target, vocab_size=VOCAB - 3)
    loss.backward()
    exact = weight.clone().requires_grad_()
    true = nn.functional.cross_entropy((hidden @ exact[: VOCAB - 3].t()).flatten(0, 1), target.flatten())
    same(loss, [w.grad], true, torch.autograd.grad(true, exact))


def deterministic() -> None:
    hidden, weight, _, target = operands()
    w = distribute_tensor(weight, init_device_mesh(place(), (4,)), [Shard(0)])
    with pytest.raises(ValueError, match="deterministic=True goes with VocabParallel of at most 2 ranks"):
        linear_cross_entropy(hidden.requires_grad_(), w, target, deterministic=True)


REFUSED = [
    (Partial(), Shard(0), "a Partial needs its sum first"), (Shard(2), Shard(0), "hidden has the placements"),
    (Replicate(), Shard(1), "weight has the placements"), (Shard(0), Replicate(), "weight is whole on every rank"),
]  # fmt: skip


def refused() -> None:
    mesh = init_device_mesh(place(), (2,))
    hidden, weight, _, target = operands()
    for hidden_placement, weight_placement, says in REFUSED:
        h = DTensor.from_local(hidden, mesh, [hidden_placement], run_check=False)
        with pytest.raises((ValueError, TypeError), match=says):
            linear_cross_entropy(h, distribute_tensor(weight, mesh, [weight_placement]), target)


OF_TWO: dict[str, Any] = {
    "vocabulary": lambda: placed(Replicate(), Shard(0)), "vocabulary, plain hidden": lambda: placed(None, Shard(0)),
    "both": lambda: placed(Shard(0), Shard(0)), "both, along the sequence": lambda: placed(Shard(1), Shard(0)),
    "replicated": lambda: placed(Replicate(), Replicate()), "column-parallel": column_parallel,
    "log-probabilities": log_probabilities, "on its way": lambda: on_its_way(False),
    "on its way, vocabulary": lambda: on_its_way(True), "ddp": data_parallel, "fsdp2": sharded,
    "fsdp2, head": lambda: sharded(own=True), "fsdp2, policy": lambda: sharded(policy=True),
    "fsdp2, accumulated": lambda: sharded(micro_batches=2), "refused": refused,
}  # fmt: skip
OF_FOUR = {"mesh": two_dimensions, "padded": padded_pieces, "deterministic": deterministic}


def work(rank: int, device: str) -> dict[str, Any]:
    calls = OF_TWO if dist.get_world_size() == 2 else OF_FOUR
    return {name: ranks.outcome(call) for name, call in calls.items()}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)])
@pytest.mark.parametrize("count", [2, 4])
def test_ranks(count: int, device: str, tmp_path: Path) -> None:
    ranks.need_gpus(device, count)
    for found in ranks.run(work, count, tmp_path, device):
        assert not (wrong := {name: outcome for name, outcome in found.items() if outcome is not None}), wrong
