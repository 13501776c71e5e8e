"""Small transformers models, and what a training step of one gives."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from chunked_head import patch_model
from chunked_head.integrations.huggingface.lazy_logits import LazyLogits as LazyLogits

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}  # fmt: skip


def llama(**options: Any) -> Any:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**(SIZES | {"pad_token_id": 0} | options))
    return transformers.LlamaForCausalLM(config).train()


def gemma2() -> Any:
    """A model with capped logits and tied embeddings."""
    torch.manual_seed(3)
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, final_logit_softcapping=3.0)).train()


def granite() -> Any:
    """A model that scales its logits after the head."""
    torch.manual_seed(3)
    return transformers.GraniteForCausalLM(transformers.GraniteConfig(**SIZES, logits_scaling=3.0)).train()


ENCODER = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
           "num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip


def gpt2() -> Any:
    torch.manual_seed(3)
    sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)).eval()
    model.loss_type = "ForCausalLM"  # it warns where none is named, which breaks graphs
    return model


def bert() -> Any:
    """A model whose forward makes a CrossEntropyLoss, like the next two models."""
    torch.manual_seed(3)
    return transformers.BertForMaskedLM(transformers.BertConfig(**ENCODER)).eval()


def roberta() -> Any:
    torch.manual_seed(3)
    return transformers.RobertaForMaskedLM(transformers.RobertaConfig(**ENCODER, pad_token_id=0)).eval()


def t5() -> Any:
    torch.manual_seed(3)
    sizes = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config).eval()


def tokens(batch: int = 2, length: int = 11) -> dict[str, Tensor]:
    """Token ids with labels, some of which do not count."""
    ids = torch.randint(1, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(4))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def pair(make: Callable[[], Any] = llama, **options: Any) -> tuple[Any, Any]:
    """A model, and the same one patched."""
    plain = make()
    return plain, patch_model(copy.deepcopy(plain), **options)


class Step(NamedTuple):
    loss: Tensor
    grads: dict[str, Tensor]
    output: Any


def step(model: nn.Module, inputs: dict[str, Any] | None = None, scale: float = 1.0, **more: Any) -> Step:
    """The loss, the gradients and the output of a forward and a backward."""
    model.zero_grad()
    output = model(**(tokens() if inputs is None else inputs), **more)
    loss = output[0]
    (loss * scale).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Step(loss.detach().clone(), grads, output)


def assert_same(ours: Step, theirs: Step, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=tolerance, atol=0)
    assert ours.grads.keys() == theirs.grads.keys()
    for name, grad in theirs.grads.items():
        assert (ours.grads[name] - grad).norm() <= 10 * tolerance * grad.norm(), name
