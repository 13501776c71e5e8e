"""Rows of `benchmarks.parallel`, of ranks that share a head: our calls, peers', one GPU's, and bare products."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from benchmarks import losses, measure, parallel_peers, providers, shapes
from benchmarks.accuracy import relative_error
from benchmarks.shapes import Operands, Shape
from chunked_head import VocabParallel
from chunked_head.parallel.groups import part_sizes
from chunked_head.plan.sizes import DEFAULT_BUDGET

SHAPE = Shape(8192, 4096, 128256)
CE, GRPO = "cross-entropy", "grpo+z+metrics"
# of one GPU's time, by the number of ranks, for SHAPE
MUST = {2: 0.53, 4: 0.28}
MUST_BESIDE_CE = 1.03


class Row(NamedTuple):
    """A row's label, and the row ``below`` that its time is divided by."""

    label: str
    below: str | None = None
    workload: str | None = CE  # None: bare products and messages
    one_rank: bool = False  # rank 0 with all of the head, while the other ranks wait
    must: dict[int, float] | None = None
    options: Callable[[int], dict[str, Any]] | None = None  # by the number of ranks


ROWS: dict[str, Row] = {
    "one-gpu": Row("ours, one GPU", one_rank=True),
    "one-gpu-grpo": Row(f"ours, one GPU, {GRPO}", workload=GRPO, one_rank=True),
    "cross-entropy": Row("ours", "one-gpu", must=MUST),
    "whole-budget": Row("ours, one GPU's budget", "one-gpu", options=lambda n: {"memory_budget": DEFAULT_BUDGET}),
    "small-budget": Row(
        "ours, 1/ranks of the budget", "one-gpu", options=lambda n: {"memory_budget": DEFAULT_BUDGET // n}
    ),
    "grpo": Row(
        f"ours, {GRPO}", "one-gpu-grpo", GRPO, must={n: ratio * MUST_BESIDE_CE for n, ratio in MUST.items()}
    ),
    "sequence-sharded": Row("ours, sequence-sharded", "one-gpu"),
    "logits": Row("ours on a part's logits", "one-gpu"),
    "megatron": Row("megatron", "one-gpu"),
    "loss-parallel": Row("loss_parallel", "one-gpu"),
    "matmuls": Row("3 products, one GPU", workload=None, one_rank=True),
    "matmuls-part": Row("3 products of a part", "matmuls", None),
    "all-reduce": Row("all-reduce of dhidden", workload=None),
}  # fmt: skip


def chosen(names: Sequence[str] | None) -> list[str]:
    """Return the named rows, or all, and the rows that their times are divided by."""
    wanted = ROWS if names is None else names
    needed = {*wanted, *(ROWS[name].below for name in wanted)}
    return [name for name in ROWS if name in needed]


class Bench:
    """One rank's operands: rank 0 has the head and its part, the other ranks their parts."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, names: Sequence[str]) -> None:
        self.shape, self.device = shape, device
        self.rank, self.ranks = distributed.get_rank(), distributed.get_world_size()
        self.rows = part_sizes(shape.vocab, self.ranks)
        self.full: Operands | None = shapes.make_operands(shape, dtype, device)
        self.batch = self._batch(self.full) if {"one-gpu-grpo", "grpo"} & set(names) else {}
        part = self.full.weight.detach().split(self.rows)[self.rank].clone().requires_grad_()
        self.part = Operands(self.full.hidden, part, self.full.target)
        if self.rank > 0:
            self.full = None
        self.expected: dict[str, tuple[Tensor, Tensor]] = {}  # gradients of one GPU's, by workload
        self.bare: dict[str, measure.Floor] = {}

    def _batch(self, full: Operands) -> dict[str, Tensor]:
        """Draw a policy's batch on rank 0 and send it to all ranks."""
        call = losses.make_step(GRPO, full, {}).loss
        assert isinstance(call, losses.Call)
        for field in call.batch.values():
            distributed.broadcast(field, 0)
        return call.batch

    def clear(self) -> None:
        """Drop all gradients."""
        for operands in (self.full, self.part):
            if operands is not None:
                operands.clear()

    def step(self, name: str) -> measure.Step:
        """A row's step on this rank; for a row of one rank, on rank 0."""
        row = ROWS[name]
        assert row.workload is not None
        of_logits = {"logits": parallel_peers.ours_on_logits, "megatron": parallel_peers.megatron_style}
        if name in of_logits:
            return measure.Step(of_logits[name], self.part)
        if name == "loss-parallel":
            return parallel_peers.LossParallel(parallel_peers.of_tensors_of_ranks, self.part)
        batch = self.batch if row.workload == GRPO else {}
        if row.one_rank:
            assert self.full is not None
            return measure.Step(losses.Call(row.workload, batch, {}), self.full)
        sharded = name == "sequence-sharded"
        options = {"parallel": VocabParallel(sequence_sharded=sharded), "vocab_size": self.shape.vocab}
        options |= row.options(self.ranks) if row.options else {}
        return measure.Step(losses.Call(row.workload, batch, options), self.local_tokens if sharded else self.part)

    @property
    def local_tokens(self) -> Operands:
        """This rank's part of the tokens, with its part of the head."""
        if self.shape.tokens % self.ranks:
            raise ValueError(f"{self.shape.tokens} tokens do not make {self.ranks} equal parts")
        hidden = self.part.hidden.detach().chunk(self.ranks)[self.rank].clone().requires_grad_()
        return Operands(hidden, self.part.weight, self.part.target.chunk(self.ranks)[self.rank].clone())

    def floor(self, name: str) -> Callable[[], Any]:
        """Bare products, or the bare message."""
        if name == "all-reduce":
            summed = torch.zeros_like(self.part.hidden, requires_grad=False)
            return lambda: distributed.all_reduce(summed)
        operands = self.full if ROWS[name].one_rank else self.part
        assert operands is not None
        return measure.Floor(operands, self.device)

    def errors(self, name: str, step: measure.Step) -> dict[str, float]:
        """Return gradients' errors relative to one GPU's, on rank 0; a row of one rank keeps its gradients for that."""
        row = ROWS[name]
        assert row.workload is not None
        hidden, weight = step.operands.hidden.grad, step.operands.weight.grad
        if row.one_rank:
            assert hidden is not None and weight is not None
            # the first part: further ones are on other ranks
            self.expected[row.workload] = hidden.clone(), weight[: self.rows[0]].clone()
            return {}
        if self.rank > 0:
            return {}
        d_hidden, d_weight = self.expected[row.workload]
        d_hidden = d_hidden[: len(step.operands.hidden)]
        return {
            "d_hidden_error": relative_error(hidden, d_hidden, 1.0),
            "d_weight_error": relative_error(weight, d_weight, 1.0),
        }

    def gradient_bytes(self, step: measure.Step) -> int:
        return sum(tensor.nbytes for tensor in (step.operands.hidden, step.operands.weight))

    def plan(self, step: measure.Step, dtype: torch.dtype) -> dict[str, Any] | None:
        """Return the plan of a call of ours, or `chunked_head.plan`'s for a rank's part of the head; None for peers."""
        call = step.loss
        if not isinstance(call, losses.Call):
            return None
        if call.plan is not None:
            return providers.describe_plan(call.plan)
        options = {key: value for key, value in call.options.items() if key == "memory_budget"}
        if "parallel" in call.options:
            options |= {"ranks": self.ranks, "sequence_sharded": call.options["parallel"].sequence_sharded}
        ours = providers.Provider("ours", "ours", call, options)
        return providers.predict(ours, self.shape, dtype, self.device)
