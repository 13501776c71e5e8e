"""Megatron's own GPTModel, of one layer on the CPU: losses, gradients and steps by its hook against its own head."""

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor

from chunked_head.integrations.megatron import OutputProcessor, attach_head

VOCAB, SEQUENCE, BATCH = 64, 16, 2


def batch() -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCAB, (BATCH, SEQUENCE + 1), generator=made)
    mask = torch.ones(BATCH, SEQUENCE)
    mask[0, :5] = 0
    return {"ids": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": mask}


def gpt(tensor_ranks: int = 1, sequence: bool = False, tied: bool = False, **options: Any) -> Any:
    """A model with the same weights for every number of ranks."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_ranks)
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=2, use_cpu_initialization=True, attention_dropout=0.0,
        hidden_dropout=0.0, gradient_accumulation_fusion=False, tensor_model_parallel_size=tensor_ranks,
        sequence_parallel=sequence, init_method_std=0.3, **options,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec()
    mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if config.mtp_num_layers else None
    return GPTModel(
        config, spec, vocab_size=VOCAB, max_sequence_length=SEQUENCE, share_embeddings_and_output_weights=tied,
        position_embedding_type="learned_absolute", mtp_block_spec=mtp,
    )  # fmt: skip


@contextlib.contextmanager
def without_a_gpu() -> Any:
    """Megatron allocates on the current GPU, draws dropout from GPUs' random states, of which it asks nothing here, and
    has norms of sequence-parallel models from Transformer Engine alone."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        return torch.nn.LayerNorm(hidden_size, eps)

    tracker = type(random.get_cuda_rng_tracker())
    with (
        mock.patch("torch.cuda.current_device", lambda: torch.device("cpu")),
        mock.patch.object(tracker, "fork", lambda *_: contextlib.nullcontext()),
        mock.patch.object(WrappedTorchNorm, "__new__", norm),
    ):
        yield


def forward(model: Any, **options: Any) -> Any:
    given = batch()
    positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
    mask = torch.ones(SEQUENCE, SEQUENCE).triu(1).bool()[None, None]
    return model(given["ids"], positions, mask, labels=given["labels"], loss_mask=given["loss_mask"], **options)


def step(model: Any, **options: Any) -> dict[str, Any]:
    """A loss per token, as Megatron's loss function weighs it, and all gradients."""
    model.zero_grad()
    values = forward(model, **options)
    mask = batch()["loss_mask"]
    ((values * mask).sum() / mask.sum() * 0.37).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"values": (values * mask).detach(), "grads": grads}


def main_grad(model: Any) -> dict[str, Any]:
    """With buffers as Megatron's DDP makes them."""
    weight = model.output_layer.weight
    weight.main_grad = torch.ones_like(weight)
    weight.grad_added_to_main_grad = False
    processor = OutputProcessor(accumulate_into="main_grad")
    found = step(model, output_processor=processor)
    assert weight.grad_added_to_main_grad
    found["grads"]["output_layer.weight"] = weight.main_grad - 1
    return found


def logprobs(model: Any) -> dict[str, Any]:
    """Log-probabilities and entropies of different temperatures, by the hook and from the model's logits."""
    given = batch()
    temperature = torch.linspace(0.5, 2.0, BATCH * SEQUENCE).view(BATCH, SEQUENCE)
    found = {}
    processor = OutputProcessor(logprobs=True, entropy=True, temperature=temperature)
    model.zero_grad()
    ours = forward(model, output_processor=processor)
    upstream = torch.linspace(-1, 1, BATCH * SEQUENCE).view(BATCH, SEQUENCE) * given["loss_mask"]
    (ours[0] * upstream + ours[1] * upstream.square()).sum().backward()
    found["ours"] = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    found["ours"]["logprobs"], found["ours"]["entropy"] = (value.detach() for value in ours)
    if dist.get_world_size() == 1:
        model.zero_grad()
        positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
        mask = torch.ones(SEQUENCE, SEQUENCE).triu(1).bool()[None, None]
        x = (model(given["ids"], positions, mask).float() / temperature[..., None]).log_softmax(-1)
        values, entropy = x.gather(-1, given["labels"][..., None])[..., 0], -(x.exp() * x).sum(-1)
        (values * upstream + entropy * upstream.square()).sum().backward()
        found["theirs"] = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found["theirs"]["logprobs"] = (values * given["loss_mask"]).detach()
        found["theirs"]["entropy"] = (entropy * given["loss_mask"]).detach()
    return found


def work(rank: int, device: str) -> dict[str, Any]:
    count = dist.get_world_size()
    found: dict[str, Any] = {}
    with without_a_gpu():
        for sequence in (False, True)[:count]:
            name = "sequence" if sequence else "plain"
            model = gpt(count, sequence)
            found[f"{name} theirs"] = ranks.outcome(step, model)
            found[f"{name} ours"] = ranks.outcome(step, model, output_processor=OutputProcessor(chunk_tokens=8))
            found[f"{name} main_grad"] = ranks.outcome(main_grad, model)
            found[f"{name} logprobs"] = ranks.outcome(logprobs, gpt(count, sequence))
            found[f"{name} attached"] = ranks.outcome(step, attach_head(gpt(count, sequence)))
        tied = {"tied": True} if count == 1 else {"tied": True, "tensor_ranks": 2}
        found["tied theirs"] = ranks.outcome(step, gpt(**tied))
        found["tied ours"] = ranks.outcome(step, gpt(**tied), output_processor=OutputProcessor())
        if count == 1:
            found["mtp theirs"] = ranks.outcome(step, gpt(mtp_num_layers=1))
            found["mtp ours"] = ranks.outcome(step, gpt(mtp_num_layers=1), output_processor=OutputProcessor())
            found["mup theirs"] = ranks.outcome(step, gpt(use_mup=True, mup_output_mult=0.3))
            found["mup ours"] = ranks.outcome(
                step, gpt(use_mup=True, mup_output_mult=0.3), output_processor=OutputProcessor()
            )
            found["refused"] = refusals()
    return found


def refusals() -> list[str]:
    model = gpt()
    layer = type(model.output_layer)
    model.output_layer.__class__ = type(
        "Capped", (layer,), {"forward": lambda self, *a, **k: layer.forward(self, *a, **k)}
    )
    found = [ranks.said(lambda: forward(model, output_processor=OutputProcessor()))]
    model.output_layer.__class__ = layer
    found.append(ranks.said(lambda: forward(model, output_processor=OutputProcessor(), output_processor_context=3)))
    found.append(ranks.said(lambda: attach_head(SimpleNamespace(forward=lambda tokens: tokens))))
    return found


@pytest.fixture(scope="module")
def one(tmp_path_factory: Any) -> dict[str, Any]:
    return ranks.run(work, 1, tmp_path_factory.mktemp("one"))[0]


@pytest.fixture(scope="module")
def two(tmp_path_factory: Any) -> list[dict[str, Any]]:
    return ranks.run(work, 2, tmp_path_factory.mktemp("two"))


def close(ours: Any, theirs: Any) -> None:
    for value in (ours, theirs):
        assert not isinstance(value, str), value
    torch.testing.assert_close(ours, theirs, rtol=3e-5, atol=3e-6)


@pytest.mark.parametrize("kind", ["plain", "tied", "mtp", "mup"])
def test_one_rank(kind: str, one: dict[str, Any]) -> None:
    assert kind == "tied" or "output_layer.weight" in one[f"{kind} ours"]["grads"]
    close(one[f"{kind} ours"], one[f"{kind} theirs"])


@pytest.mark.parametrize("kind", ["plain", "sequence", "tied"])
def test_two_ranks(kind: str, two: list[dict[str, Any]]) -> None:
    for found in two:
        close(found[f"{kind} ours"], found[f"{kind} theirs"])
        if kind != "tied":
            close(found[f"{kind} attached"], found[f"{kind} theirs"])


def test_main_grad(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    close(one["plain main_grad"], one["plain theirs"])
    for found in two:
        close(found["plain main_grad"], found["plain theirs"])
        close(found["sequence main_grad"], found["sequence theirs"])


def test_logprobs(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    close(one["plain logprobs"]["ours"], one["plain logprobs"]["theirs"])
    for found in two:
        for name in ("plain logprobs", "sequence logprobs"):
            assert found[name]["ours"]["logprobs"].shape == (BATCH, SEQUENCE)
        close(found["sequence logprobs"]["ours"]["logprobs"], found["plain logprobs"]["ours"]["logprobs"])
        close(
            found["sequence logprobs"]["ours"]["output_layer.weight"],
            found["plain logprobs"]["ours"]["output_layer.weight"],
        )


def test_refusals(one: dict[str, Any]) -> None:
    words = ("forward of its own", "output_processor_context", "takes no output_processor")
    for said, word in zip(one["refused"], words, strict=True):
        assert word in said
