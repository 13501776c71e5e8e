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
    made = torch.Generator().manual_seed(5)
    hidden, weight = torch.randn(*TOKENS, HIDDEN, generator=made), torch.randn(VOCAB, HIDDEN, generator=made)
    target = torch.randint(0, VOCAB, TOKENS, generator=made)
    target[0, :2] = -100
    hidden, weight, bias, target = (t.to(place()) for t in (hidden, weight, torch.randn(VOCAB, generator=made), target))
    return hidden, weight, bias, target


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plain() -> dict[str, Any]:
    hidden, weight, bias, target = operands()
    leaves = [t.requires_grad_() for t in (hidden, weight, bias)]
    loss = nn.functional.cross_entropy(nn.functional.linear(*leaves).flatten(0, 1), target.flatten())
    return {"loss": loss.detach(), "grads": list(torch.autograd.grad(loss, leaves))}


def placed(hidden_placement: Any, weight_placement: Any) -> dict[str, Any]:
    mesh = init_device_mesh(place(), (2,), mesh_dim_names=("tp",))
    hidden, weight, bias, target = operands()
    h = distribute_tensor(hidden, mesh, [hidden_placement]) if hidden_placement is not None else hidden
    w, b = (distribute_tensor(t, mesh, [weight_placement]) for t in (weight, bias))
    leaves = [t.detach().requires_grad_() for t in (h, w, b)]
    loss = linear_cross_entropy(leaves[0], leaves[1], target, bias=leaves[2])
    loss.backward()
    return {"loss": loss.detach(), "grads": [whole(leaf.grad) for leaf in leaves]}


def column_parallel() -> dict[str, Any]:
    """torch's own tensor-parallel plan for the linear layer that the head takes its parameters from."""
    mesh = init_device_mesh(place(), (2,))
    hidden, weight, bias, target = operands()
    linear = nn.Linear(HIDDEN, VOCAB, device=place())
    linear.load_state_dict({"weight": weight, "bias": bias})
    parallelize_module(linear, mesh, ColwiseParallel())
    head = ChunkedHead.from_linear(linear, chunk_tokens=7)
    hidden.requires_grad_()
    loss = head(hidden, target)
    loss.backward()
    grads = [hidden.grad, whole(linear.weight.grad), whole(linear.bias.grad)]
    return {"loss": loss.detach(), "grads": grads}


def log_probabilities() -> dict[str, Any]:
    """Each rank's own tokens' values and their late gradients."""
    mesh = init_device_mesh(place(), (2,))
    hidden, weight, bias, target = operands()
    h = distribute_tensor(hidden, mesh, [Shard(1)]).requires_grad_()
    w = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
    b = distribute_tensor(bias, mesh, [Shard(0)]).requires_grad_()
    found = linear_logprobs(h, w, target, bias=b, entropy=True)
    mine = target.chunk(2, 1)[dist.get_rank()]
    assert found.logprobs.shape == mine.shape
    count = (target != -100).sum()
    # what each rank makes of its own tokens; their gradients add up
    loss = -found.logprobs.sum() / count
    loss.backward()
    dist.all_reduce(total := loss.detach().clone())
    return {"loss": total, "grads": [whole(leaf.grad) for leaf in (h, w, b)]}


def on_its_way(sharded_weight: bool) -> dict[str, Any]:
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
    return {"loss": loss.detach(), "grads": [whole(leaf.grad) for leaf in (h, w, b)]}


def padded_pieces() -> dict[str, Any]:
    """Fewer ids than rows, of which ``torch.chunk`` leaves the last of four ranks fewer: 12, as of 48 ids."""
    mesh = init_device_mesh(place(), (4,))
    hidden, weight, _, target = operands()
    target = torch.where(target >= 0, target % (VOCAB - 3), target)
    w = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
    exact = weight.clone().requires_grad_()
    loss = linear_cross_entropy(hidden, w, target, vocab_size=VOCAB - 3)
    loss.backward()
    plain = nn.functional.cross_entropy((hidden @ exact[: VOCAB - 3].t()).flatten(0, 1), target.flatten())
    plain.backward()
    ours, theirs = [loss.detach(), whole(w.grad)], [plain.detach(), exact.grad]
    return {"ours": ours, "theirs": theirs}


def deterministic() -> None:
    mesh = init_device_mesh(place(), (4,))
    hidden, weight, _, target = operands()
    w = distribute_tensor(weight, mesh, [Shard(0)])
    linear_cross_entropy(hidden.requires_grad_(), w, target, deterministic=True)


class Model(nn.Module):
    """A body and a head whose loss is the forward's result, as in a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.head = ChunkedHead(HIDDEN, VOCAB, chunk_tokens=5)

    def forward(self, hidden: Tensor, target: Tensor, normalizer: Tensor) -> Tensor:
        return self.head(self.body(hidden), target, normalizer=normalizer)


def sharded(wrapper: str) -> dict[str, Any]:
    """Two steps of SGD, each rank its own rows of the batch, the denominator that of all of them."""
    torch.manual_seed(1)
    model: Any = Model().to(place())
    mesh = init_device_mesh(place(), (2,))
    if wrapper.startswith("fsdp2"):
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32) if wrapper == "fsdp2-policy" else None
        options = {} if policy is None else {"mp_policy": policy}
        if wrapper == "fsdp2-own":
            fully_shard(model.head, mesh=mesh)
        fully_shard(model, mesh=mesh, **options)
    elif wrapper == "ddp":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hidden, _, _, target = operands()
    rank, count = dist.get_rank(), (target != -100).sum()
    found = []
    # of each rank's two rows of the batch, both at once or one after the other
    rows = {
        "one": [slice(0, 4)],
        "fsdp2-accumulated": [slice(2 * rank, 2 * rank + 1), slice(2 * rank + 1, 2 * rank + 2)],
    }
    for _ in range(2):
        optimizer.zero_grad()
        share = hidden.new_zeros(())
        micro_batches = rows.get(wrapper, [slice(2 * rank, 2 * rank + 2)])
        for at in micro_batches:
            if wrapper == "fsdp2-accumulated":
                model.set_requires_gradient_sync(at is micro_batches[-1])
            # gradients are averaged over the ranks: each rank's share is doubled
            loss = (1 if wrapper == "one" else 2) * model(hidden[at], target[at], count)
            loss.backward()
            share += loss.detach()
        optimizer.step()
        if wrapper != "one":
            dist.all_reduce(share)
            share /= 2
        found.append(share)
    weights = [whole(p.detach()) for p in model.parameters()]
    return {"loss": torch.stack(found), "grads": weights}


class Biased(nn.Module):
    """The same with a linear layer of torch's, whose weight is the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.lm_head = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, VOCAB)

    def forward(self, hidden: Tensor, target: Tensor, normalizer: Tensor) -> Tensor:
        head = self.lm_head
        rows = self.body(hidden)
        return linear_cross_entropy(rows, head.weight, target, bias=head.bias, normalizer=normalizer, chunk_tokens=5)


def two_dimensions() -> dict[str, Any]:
    """Data-parallel by FSDP2 across, tensor-parallel along: four ranks."""
    mesh = init_device_mesh(place(), (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    model = Biased().to(place())
    parallelize_module(model.lm_head, mesh["tp"], ColwiseParallel())
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    hidden, _, _, target = operands()
    part, count, found = mesh.get_local_rank("dp"), (target != -100).sum(), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = 2 * model(hidden[2 * part :][:2], target[2 * part :][:2], count)
        loss.backward()
        optimizer.step()
        dist.all_reduce(share := loss.detach().clone(), group=mesh["dp"].get_group())
        found.append(share / 2)
    return {"loss": torch.stack(found), "grads": [whole(p.detach()) for p in model.parameters()]}


def refused(hidden_placement: Any, weight_placement: Any) -> str:
    try:
        mesh = init_device_mesh(place(), (2,))
        hidden, weight, _, target = operands()
        h = DTensor.from_local(hidden, mesh, [hidden_placement], run_check=False)
        linear_cross_entropy(h, distribute_tensor(weight, mesh, [weight_placement]), target)
    except (ValueError, TypeError) as error:
        return str(error)
    return "nothing"


def work(rank: int, device: str) -> dict[str, Any]:
    found = {
        "plain": ranks.outcome(plain),
        "vocabulary": ranks.outcome(placed, Replicate(), Shard(0)),
        "vocabulary, plain hidden": ranks.outcome(placed, None, Shard(0)),
        "both": ranks.outcome(placed, Shard(0), Shard(0)),
        "both, along the sequence": ranks.outcome(placed, Shard(1), Shard(0)),
        "whole": ranks.outcome(placed, Replicate(), Replicate()),
        "column-parallel": ranks.outcome(column_parallel),
        "log-probabilities": ranks.outcome(log_probabilities),
        "on its way": ranks.outcome(on_its_way, False),
        "on its way, vocabulary": ranks.outcome(on_its_way, True),
        "partial hidden": refused(Partial(), Shard(0)),
        "columns of hidden": refused(Shard(2), Shard(0)),
        "columns of weight": refused(Replicate(), Shard(1)),
        "tokens beside a whole weight": refused(Shard(0), Replicate()),
    }
    for wrapper in ("one", *WRAPPERS):
        found[wrapper] = ranks.outcome(sharded, wrapper)
    return found


def work_of_four(rank: int, device: str) -> dict[str, Any]:
    torch.manual_seed(1)
    found = {"mesh": ranks.outcome(two_dimensions), "padded": ranks.outcome(padded_pieces)}
    return found | {"deterministic": ranks.outcome(deterministic)}


PLACEMENTS = (
    "vocabulary", "vocabulary, plain hidden", "both", "both, along the sequence", "whole", "column-parallel",
    "log-probabilities", "on its way", "on its way, vocabulary",
)  # fmt: skip
WRAPPERS = ("ddp", "fsdp2", "fsdp2-own", "fsdp2-policy", "fsdp2-accumulated")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run(work, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run(work, 2, tmp_path_factory.mktemp("gpus"), "cuda")


def same(mine: Any, other: Any) -> None:
    for outcome in (mine, other):
        assert not isinstance(outcome, str), outcome
    torch.testing.assert_close(mine["loss"], other["loss"], rtol=5e-6, atol=1e-6)
    torch.testing.assert_close(mine["grads"], other["grads"], rtol=1e-5, atol=1e-6)


def hold(found: list[dict[str, Any]], name: str) -> None:
    for rank in found:
        same(rank[name], rank["one" if name in WRAPPERS else "plain"])


@pytest.mark.parametrize("name", [*PLACEMENTS, *WRAPPERS])
def test_two_ranks(found: list[dict[str, Any]], name: str) -> None:
    hold(found, name)


@pytest.mark.multigpu
@pytest.mark.parametrize("name", [*PLACEMENTS, *WRAPPERS])
def test_two_gpus(on_gpus: list[dict[str, Any]], name: str) -> None:
    hold(on_gpus, name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("partial hidden", "a Partial needs its sum first"),
        ("columns of hidden", "hidden has the placements"),
        ("columns of weight", "weight has the placements"),
        ("tokens beside a whole weight", "weight is whole on every rank"),
    ],
)
def test_refused_placements(found: list[dict[str, Any]], name: str, says: str) -> None:
    for rank in found:
        assert says in rank[name]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)])
def test_two_dimensions(tmp_path: Path, device: str) -> None:
    one = alone()
    for rank in ranks.run(work_of_four, 4, tmp_path, device):
        same(rank["mesh"], one)
        assert "deterministic=True goes with VocabParallel of at most 2 ranks" in rank["deterministic"]
        assert not isinstance(rank["padded"], str), rank["padded"]
        torch.testing.assert_close(rank["padded"]["ours"], rank["padded"]["theirs"])


def alone() -> dict[str, Any]:
    """The same steps by torch on one rank."""
    torch.manual_seed(1)
    model = Biased()
    parameters = list(model.parameters())
    hidden, _, _, target = operands()
    found = []
    for _ in range(2):
        loss = nn.functional.cross_entropy(model.lm_head(model.body(hidden)).flatten(0, 1), target.flatten())
        grads = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter -= 0.1 * grad
        found.append(loss.detach())
    return {"loss": torch.stack(found), "grads": [p.detach() for p in parameters]}
