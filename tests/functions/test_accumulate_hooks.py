"""Frameworks beside accumulate_into: hooks of the weight fire once, and what they reduce is right."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from tiers import first_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from chunked_head import ChunkedHead

RANKS, MICRO_BATCHES, STEPS = 2, 2, 2


class Model(nn.Module):
    def __init__(self, **options: Any):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(16, 16), ChunkedHead(16, 37, backend="torch", **options)

    def forward(self, data: Tensor, target: Tensor) -> Tensor:
        return self.head(self.layer(data), target)


def batch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(8, 16, generator=made), torch.randint(0, 37, (8,), generator=made)


def expected() -> list[Tensor]:
    """Gradients of the last step by autograd alone: the mean over ranks of sums over micro-batches."""
    model = Model()
    for rank in range(RANKS):
        for micro in range(MICRO_BATCHES):
            (model(*batch(rank, STEPS * 10 + micro)) / RANKS).backward()
    return [p.grad for p in model.parameters()]


def assert_expected(model: nn.Module, gather: Callable[[Tensor], Tensor] = lambda grad: grad) -> None:
    for ours, right in zip(model.parameters(), expected(), strict=True):
        torch.testing.assert_close(gather(ours.grad), right)


def data_parallel(rank: int, as_views: bool) -> None:
    model = Model(accumulate_into="grad")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=as_views)
    fired = []
    model.head.weight.register_post_accumulate_grad_hook(lambda _: fired.append(1))
    for step in range(1, STEPS + 1):
        parallel.zero_grad(set_to_none=False)
        fired.clear()
        with parallel.no_sync():
            for micro in range(MICRO_BATCHES - 1):
                parallel(*batch(rank, step * 10 + micro)).backward()
        parallel(*batch(rank, step * 10 + MICRO_BATCHES - 1)).backward()
        assert len(fired) == MICRO_BATCHES, "once for each backward"
    assert_expected(model)


def make_grad(head: ChunkedHead, _: Any) -> None:
    """The gathered weight comes without a gradient."""
    if head.weight.grad is None:
        head.weight.grad = torch.zeros_like(head.weight)


def fully_sharded(rank: int, whole: bool) -> None:
    model = Model(accumulate_into="grad")
    mesh = init_device_mesh("cpu", (RANKS,))
    if not whole:
        fully_shard(model.head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.head.register_forward_pre_hook(make_grad)
    for step in range(1, STEPS + 1):
        model.zero_grad()
        for micro in range(MICRO_BATCHES):
            model.set_requires_gradient_sync(micro == MICRO_BATCHES - 1)
            model(*batch(rank, step * 10 + micro)).backward()
    assert_expected(model, lambda grad: grad.full_tensor())


def work(rank: int, meeting: str, job: Callable[[int, bool], None], option: bool) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    try:
        job(rank, option)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("option", first_of([False, True]))
@pytest.mark.parametrize("job", [data_parallel, fully_sharded])
def test_two_ranks(job: Callable[[int, bool], None], option: bool, tmp_path: Path) -> None:
    ranks.spawn(work, (str(tmp_path / "meeting"), job, option), RANKS)


class MainGrad:
    """What a framework of Megatron's kind does with one parameter: a buffer of its own, fed by a hook."""

    def __init__(self, weight: Any, asks_for_grad: bool, adds_always: bool):
        self.weight, self.asks_for_grad, self.ready = weight, asks_for_grad, 0
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        weight.grad_added_to_main_grad = False
        weight.zero_out_wgrad = adds_always
        # kept: the node goes when nobody holds it
        self.node = weight.expand_as(weight).grad_fn.next_functions[0][0]
        self.node.register_hook(self.hook)

    def hook(self, *_: Any) -> None:
        weight = self.weight
        if self.asks_for_grad:  # it overlaps its reduction with backward
            assert weight.grad is not None
        if weight.grad is not None and (not weight.grad_added_to_main_grad or weight.zero_out_wgrad):
            weight.main_grad.add_(weight.grad.data)
        weight.grad = None
        self.ready += 1


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("asks_for_grad", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_main_grad(asks_for_grad: bool, tied: bool) -> None:
    """Its hook finds a gradient and reads none of it; a tied embedding's still arrives."""
    embedding = nn.Embedding(37, 16).bfloat16()
    linear = nn.Linear(16, 37, bias=False).bfloat16()
    if tied:
        linear.weight = embedding.weight
    tokens = torch.randint(0, 37, (3, 9))
    sums = []
    for into in (None, "main_grad"):
        framework = MainGrad(linear.weight, asks_for_grad, adds_always=tied)
        head = ChunkedHead.from_linear(linear, accumulate_into=into)
        for _ in range(2):
            head(embedding(tokens), tokens, shift=1).backward()
        assert framework.ready == 2
        assert linear.weight.grad is None
        assert linear.weight.grad_added_to_main_grad == (into is not None)
        sums.append(linear.weight.main_grad)
        del framework.node, framework
    torch.testing.assert_close(sums[1], sums[0], rtol=2e-2, atol=1e-3)
