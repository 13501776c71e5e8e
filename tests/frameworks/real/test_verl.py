"""verl's own forwards of a tiny model on the CPU: its fused path of plain PyTorch beside this library's functions."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn

from chunked_head.integrations import verl as functions
from chunked_head.integrations.verl import patch_verl, unpatch_verl

VOCAB, HIDDEN, BATCH, TOKENS = 61, 16, 2, 9


class Tiny(nn.Module):
    """What verl's forwards ask of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lm_head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        self.config = SimpleNamespace(output_attentions=False, output_hidden_states=False, model_type="qwen2")

    def model(self, input_ids: Tensor, **_: Any) -> Any:
        class Outputs(tuple):
            past_key_values = hidden_states = attentions = None

        return Outputs((torch.tanh(self.embedding(input_ids)),))


def step(model: Any, backend: str, temperature: Any = 0.7) -> dict[str, Any]:
    """Values and gradients of verl's forward, which ``use_fused_kernels`` puts in the place of the model's."""
    from verl.models.transformers import dense_common

    forward = getattr(dense_common, f"forward_with_{backend}_backend")
    ids = torch.arange(BATCH * TOKENS).view(BATCH, TOKENS) * 7 % VOCAB
    model.zero_grad()
    out = forward(model, input_ids=ids, return_dict=True, temperature=temperature)
    upstream = torch.linspace(-1, 1, ids.numel()).view(ids.shape)
    (out.log_probs * upstream + 0.1 * out.entropy * upstream.square()).sum().backward()
    return {
        "logprobs": out.log_probs.detach(), "entropy": out.entropy.detach(),
        "grads": [p.grad.clone() for p in model.parameters()],
    }  # fmt: skip


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_forward(backend: str) -> None:
    model = Tiny()
    theirs = step(model, "torch")
    patch_verl(chunk_tokens=5)
    try:
        close(step(model, backend), theirs)
    finally:
        unpatch_verl()
    close(step(model, "torch"), theirs)


def test_the_seams() -> None:
    """Ours stand where verl looks: in the modules that bound a name at import, too, and with verl's arguments first."""
    import inspect

    from verl.models.mcore import model_forward_fused as fused
    from verl.utils.experimental import torch_functional
    from verl.utils.kernel import linear_cross_entropy as kernel

    theirs = kernel.LinearCrossEntropy
    names = list(inspect.signature(theirs.forward).parameters)[1:]
    assert list(inspect.signature(functions.linear_cross_entropy).parameters)[: len(names)] == names
    ours, original = functions.FusedLinearForPPO, torch_functional.FusedLinearForPPO
    for method in ("__init__", "forward"):
        mine, true = (inspect.signature(getattr(each, method)).parameters for each in (ours, original))
        assert list(mine) == list(true)
    patch_verl()
    assert fused.linear_cross_entropy is kernel.linear_cross_entropy
    assert fused.linear_cross_entropy.func is functions.linear_cross_entropy
    assert issubclass(torch_functional.FusedLinearForPPO, ours)
    unpatch_verl()
    assert fused.linear_cross_entropy == theirs.apply and torch_functional.FusedLinearForPPO is original


def test_registered_by_its_name() -> None:
    """As ``external_lib`` has it done."""
    from verl.utils.experimental import torch_functional
    from verl.utils.import_utils import import_external_libs

    import_external_libs("chunked_head.integrations.verl.register")
    assert issubclass(torch_functional.FusedLinearForPPO, functions.FusedLinearForPPO)
    unpatch_verl()


def test_refusals() -> None:
    with pytest.raises(TypeError, match="memory_budgt"):
        patch_verl(memory_budgt=3)  # type: ignore[call-arg]


def test_another_version() -> None:
    """It is patched where its names are the same, as all of this one's are."""
    with mock.patch("verl.__version__", "0.10.0"), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        patch_verl()
        unpatch_verl()


def megatron(rank: int, device: str) -> dict[str, Any]:
    """verl's hook behind Megatron's decoder, of hidden states that Megatron gathers from two ranks' sequences."""
    from megatron.core import parallel_state
    from verl.models.mcore.model_forward_fused import FusedOutputProcessorContext

    parallel_state.initialize_model_parallel(2)
    patch_verl()
    from verl.models.mcore import model_forward_fused

    made = torch.Generator().manual_seed(4)
    hidden, weight = torch.randn(8, 1, HIDDEN, generator=made), torch.randn(VOCAB + 1, HIDDEN, generator=made)
    labels = torch.randint(0, VOCAB, (1, 8), generator=made)
    own, part = (t.chunk(2)[rank].clone().requires_grad_() for t in (hidden, weight))
    with mock.patch("torch.cuda.current_device", lambda: torch.device("cpu")):
        out = model_forward_fused.fused_output_processor(
            hidden_states=own, output_layer=SimpleNamespace(weight=part), output_weight=None, labels=labels,
            context=FusedOutputProcessorContext(temperature=0.8),
            config=SimpleNamespace(sequence_parallel=True, config_logger_dir=""),
        )  # fmt: skip
        upstream = torch.linspace(-1, 1, 8)
        (out.log_probs.view(-1) * upstream + out.entropy.view(-1) * upstream.square()).sum().backward()
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    x = (leaves[0] @ leaves[1].t() / 0.8).log_softmax(-1)[:, 0]
    logprobs, entropy = x.gather(-1, labels.t())[:, 0], -(x.exp() * x).sum(-1)
    (logprobs * upstream + entropy * upstream.square()).sum().backward()
    return {
        "ours": [out.log_probs.detach().view(-1), out.entropy.detach().view(-1), own.grad, part.grad],
        "theirs": [logprobs.detach(), entropy.detach(), *(leaf.grad.chunk(2)[rank] for leaf in leaves)],
        "unsaid": ranks.said(lambda: functions.linear_cross_entropy(
            leaves[0] * 1, part, labels, 1.0, "none", dist.group.WORLD)),
    }  # fmt: skip


def test_behind_megatron(tmp_path: Path) -> None:
    for found in ranks.run(megatron, 2, tmp_path):
        close(found["ours"], found["theirs"])
        assert "reduce_dhidden" in found["unsaid"]
