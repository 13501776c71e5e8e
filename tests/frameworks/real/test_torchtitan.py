"""torchtitan's Llama without layers on the CPU: losses, gradients and steps against its own chunked loss."""

import contextlib
from typing import Any
from unittest import mock

import pytest
import ranks
import spmd_types
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss

from chunked_head.integrations.torchtitan import ChunkedHeadLoss

BATCH, SEQUENCE, VOCAB = 2, 32, 2048
# of two ranks: degrees and options of torchtitan's ParallelismConfig. FSDP with "spmd_types" is not among them: torch
# 2.15.0's fully_shard refuses the mesh that torchtitan 0.3.0, made for a nightly torch, gives its parameters.
DTENSOR = {"spmd_backend": "partial_dtensor"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tensor_parallel_degree": 2, "enable_sequence_parallel": False},
    "tp-sequence": {"tensor_parallel_degree": 2},
    "tp-typechecked": {"tensor_parallel_degree": 2, "typechecked": True},
    "tp-dtensor": {"tensor_parallel_degree": 2, **DTENSOR},
    "fsdp-dtensor": {"data_parallel_shard_degree": 2, **DTENSOR},
    "fsdp-always-dtensor": {"data_parallel_shard_degree": 2, "fsdp_reshard_after_forward": "always", **DTENSOR},
}


def theirs() -> Any:
    return ChunkedLossWrapper.Config(num_chunks=4, loss_fn=CrossEntropyLoss.Config(global_vocab_size=VOCAB))


def ours(**options: Any) -> Any:
    return ChunkedHeadLoss.Config(global_vocab_size=VOCAB, chunk_tokens=24, **options)


def batch(rank: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(rank)
    ids, labels = (torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=made) for _ in range(2))
    labels[0, : 5 + rank] = -100
    return ids, labels


def model(parallelism: Any = None, dims: Any = None) -> Any:
    """Embeddings, a norm and the output layer, of the same weights for every layout."""
    from torchtitan.config import CompileConfig, TrainingConfig
    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    spec = model_registry("debugmodel")
    config = spec.model
    config.layers = []
    if parallelism is not None:
        set_llama3_sharding_config(config, enable_sp=parallelism.enable_sequence_parallel)
    made = config.build()
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * (0.3 if p.dim() > 1 else 1.0))
    if parallelism is not None:
        training = TrainingConfig(mixed_precision_param="float32", mixed_precision_reduce="float32")
        sharded = contextlib.nullcontext()
        if parallelism.spmd_backend == "spmd_types":
            sharded = mock.patch("torchtitan.models.llama3.parallelize.apply_fsdp_to_decoder")
        with sharded:
            made = spec.parallelize_fn(
                made, parallel_dims=dims, training=training, parallelism=parallelism,
                compile_config=CompileConfig(), ac_config=None, dump_folder="",
            )  # fmt: skip
    made._skip_lm_head = True
    return made


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def steps(made: Any, config: Any, context: Any, valid: torch.Tensor, rank: int = 0, dims: Any = None) -> dict[str, Any]:
    """Three steps: the losses, and the gradients of the first."""
    loss_fn = config.build(compile_config=None)
    loss_fn.set_lm_head(made.lm_head)
    optimizer = torch.optim.SGD(made.parameters(), lr=1.0)
    ids, labels, extra = *batch(rank), {}
    if dims is not None and dims.spmd_backend == "spmd_types":
        from torchtitan.distributed.spmd_types import annotate_input_spmd_types

        ids, labels, extra = annotate_input_spmd_types(dims, ids, labels, extra)
    found: dict[str, Any] = {"losses": []}
    for number in range(3):
        optimizer.zero_grad()
        with context():
            loss, metrics = loss_fn(made(ids), labels, valid, positions=torch.arange(SEQUENCE).expand_as(ids))
            assert metrics == {}
            with spmd_types.no_typecheck():
                loss.backward()
        if number == 0:
            found["grads"] = {name: whole(p.grad) for name, p in made.named_parameters()}
        optimizer.step()
        found["losses"].append(loss.detach().clone())
    with torch.no_grad(), context():
        found["evaluated"] = loss_fn(made(ids), labels, valid)[0].clone()
    return found


def layout(options: dict[str, Any], config: Any, rank: int) -> dict[str, Any]:
    from torchtitan.config import ParallelismConfig
    from torchtitan.distributed.parallel_dims import ParallelDims
    from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend

    options = dict(options)
    typechecked = options.pop("typechecked", False)
    parallelism = ParallelismConfig(**{"spmd_backend": "spmd_types", **options})
    set_spmd_backend(parallelism.spmd_backend)
    dims = ParallelDims.from_config(parallelism, 2)
    dims.build_mesh()
    context = get_spmd_context(parallel_dims=dims, spmd_typechecking=typechecked)
    made = model(parallelism, dims)
    for module in made.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no sum of multiples
    share = rank if parallelism.data_parallel_shard_degree == 2 else 0
    seen = [batch(r)[1] for r in range(2)] if share or parallelism.data_parallel_shard_degree == 2 else [batch()[1]]
    valid = sum((labels != -100).sum() for labels in seen)
    return steps(made, config, context, torch.as_tensor(valid), share, dims)


def work(rank: int, device: str) -> dict[str, Any]:
    found = {}
    from torchtitan.distributed import parallel_dims

    parallel_dims.device_type = "cpu"  # a torch built for GPUs has it look for one
    for name, options in LAYOUTS.items():
        for who, config in (("theirs", theirs()), ("ours", ours())):
            found[f"{name} {who}"] = ranks.outcome(layout, options, config, rank)
    from torchtitan.distributed.utils import set_spmd_backend

    set_spmd_backend("full_dtensor")
    loss = ours().build(compile_config=None)
    loss.set_lm_head(torch.nn.Linear(4, 4))
    found["full_dtensor"] = ranks.said(lambda: loss(torch.zeros(1, 2, 4), torch.zeros(1, 2).long()))
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: Any) -> list[dict[str, Any]]:
    return ranks.run(work, 2, tmp_path_factory.mktemp("two"))


def close(ours: Any, theirs: Any) -> None:
    for value in (ours, theirs):
        assert not isinstance(value, str), value
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-7)


def test_one_rank() -> None:
    valid = (batch()[1] != -100).sum()
    found = [steps(model(), config, contextlib.nullcontext, valid) for config in (ours(), theirs())]
    close(*found)
    assert found[0]["losses"][-1] < found[0]["losses"][0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks(name: str, two: list[dict[str, Any]]) -> None:
    for found in two:
        close(found[f"{name} ours"], found[f"{name} theirs"])


def test_refusals(two: list[dict[str, Any]]) -> None:
    assert "full_dtensor" in two[0]["full_dtensor"]
    loss = ours().build(compile_config=None)
    with pytest.raises(ValueError, match="set_lm_head"):
        loss(torch.zeros(1, 2, 4), torch.zeros(1, 2).long())
    loss.set_lm_head(torch.nn.Linear(4, 4))
    with pytest.raises(TypeError, match="advantages"):
        loss(torch.zeros(1, 2, 4), torch.zeros(1, 2).long(), None, advantages=1)
    with pytest.raises(ValueError, match="memory_budget"):
        ours(memory_budget="7 apples").build(compile_config=None)
