"""The seams of training frameworks by their own signatures (verl 0.9.1, megatron-core 0.19.2), against plain PyTorch;
``tests/frameworks/real`` has them with the frameworks."""

import importlib
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn

from chunked_head.integrations import frameworks, megatron, verl

VOCAB, HIDDEN, SEQUENCE, BATCH = 46, 8, 6, 2


def operands() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [sequence, batch, hidden], weight, labels [batch, sequence]."""
    made = torch.Generator().manual_seed(8)
    hidden, weight = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=made), torch.randn(VOCAB, HIDDEN, generator=made)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=made)


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: Any = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of labels' shape, of hidden states in the order of labels."""
    scale = temperature[..., None] if isinstance(temperature, Tensor) else temperature
    x = (hidden @ weight.t() / scale).log_softmax(-1)
    return x.gather(-1, labels[..., None])[..., 0], -(x.exp() * x).sum(-1)


def gradients(values: tuple[Tensor, ...], leaves: list[Tensor], mask: Tensor | float = 1.0) -> list[Tensor]:
    upstream = torch.linspace(-1, 1, values[0].numel()).view(values[0].shape)
    total = sum((value * upstream * mask * (number + 1)).sum() for number, value in enumerate(values))
    return list(torch.autograd.grad(total, leaves))


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


TEMPERATURES = {"number": 0.6, "tensor": torch.tensor(0.6), "per-token": torch.linspace(0.5, 2, 12).view(2, 6)}


@pytest.mark.parametrize("kind", TEMPERATURES)
def test_verl(kind: str) -> None:
    hidden, weight, labels = operands()
    rows, temperature = hidden.transpose(0, 1), TEMPERATURES[kind]
    mask = torch.arange(12).view(2, 6) % 3 > 0  # of responses
    ours = verl.linear_cross_entropy(rows, weight, labels, temperature, "none", mask=mask)
    theirs = plain(rows, weight, labels, temperature)
    close(ours, tuple(value * mask for value in theirs))
    close(gradients(ours, [hidden, weight]), gradients(theirs, [hidden, weight], mask))
    close(verl.linear_cross_entropy(rows, weight, labels, 0.6, "sum")[0], plain(rows, weight, labels, 0.6)[0].sum())
    close(verl.linear_cross_entropy(rows, weight, labels, 0.6, "mean")[0], plain(rows, weight, labels, 0.6)[0].mean())
    if kind == "number":
        close(verl.FusedLinearForPPO(chunk_size=4)(rows, weight, labels.int(), 0.6), plain(rows, weight, labels, 0.6))


class _GatherFromSequenceParallelRegion(torch.autograd.Function):
    """By Megatron's name: its backward sums over the ranks, which are two of one kind here."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 2


def test_who_sums_the_gradient_of_verls_hidden_states() -> None:
    """The graph that they come from, or this library, and never both."""
    hidden, _, _ = operands()
    gathered = _GatherFromSequenceParallelRegion.apply(hidden)
    with mock.patch.object(dist, "get_world_size", lambda group: 2):
        assert verl.sums_dhidden(gathered, None, None) is False
        assert verl.sums_dhidden(gathered, None, True) is True and verl.sums_dhidden(hidden, None, False) is False
        for other in (hidden, gathered * 1):
            with pytest.raises(ValueError, match=r"does not come from Megatron's gather.*reduce_dhidden=True"):
                verl.sums_dhidden(other, None, None)
        assert verl.sums_dhidden(hidden.detach(), None, None) is True  # nothing to sum
    with mock.patch.object(dist, "get_world_size", lambda group: 1):
        assert verl.sums_dhidden(hidden, None, None) is True


def test_verl_flattens() -> None:
    """Megatron's [tokens, 1, hidden] with [1, tokens], as verl's kernel has it: flat values."""
    hidden, weight, labels = operands()
    rows, flat = hidden.reshape(12, 1, HIDDEN), labels.view(1, 12)
    temperature = torch.linspace(0.5, 2, 12)
    ours = verl.linear_cross_entropy(rows, weight, flat, temperature.view(1, 12), "none")
    close(ours, plain(rows[:, 0], weight, flat[0], temperature))
    with pytest.raises(ValueError, match="transpose"):
        verl.linear_cross_entropy(hidden, weight, labels)
    with pytest.raises(ValueError, match="reduction"):
        verl.linear_cross_entropy(rows, weight, flat, 1.0, "max")
    with pytest.raises(ValueError, match="impl_backend"):
        verl.FusedLinearForPPO(impl_backend="cuda")


class ColumnParallelLinear(nn.Module):
    """Megatron's output layer as far as the hook sees it."""

    def __init__(self, weight: Tensor, group: Any = None, sequence_parallel: bool = False):
        super().__init__()
        self.weight, self.bias, self.skip_bias_add = nn.Parameter(weight.detach().clone()), None, False
        self.tp_group, self.sequence_parallel, self.disable_grad_reduce = group, sequence_parallel, False

    def forward(self, *_: Any) -> Any:
        raise AssertionError("the layer's logits are not wanted")


def hook(processor: Any, hidden: Tensor, layer: Any, labels: Tensor | None, **given: Any) -> Any:
    """A call as ``GPTModel._postprocess`` makes it."""
    arguments = dict.fromkeys(
        ("output_weight", "loss_mask", "input_ids", "position_ids", "attention_mask", "decoder_input", "context",
         "inference_context", "packed_seq_params", "runtime_gather_output", "compute_language_model_loss",
         "scale_logits")
    )  # fmt: skip
    arguments |= {"hidden_states": hidden, "output_layer": layer, "labels": labels}
    arguments["config"] = SimpleNamespace(use_mup=False, defer_embedding_wgrad_compute=False)
    with (
        mock.patch.object(megatron, "PRODUCT_MODULES", (__name__,)),
        mock.patch.dict("sys.modules", {"megatron.core": SimpleNamespace(__version__="0.19.2")}),
    ):
        return processor(**{**arguments, **given})


MASK = (torch.arange(12).view(2, 6) % 4 > 0).float()


def test_megatron() -> None:
    hidden, weight, labels = operands()
    layer, seen = ColumnParallelLinear(weight), []
    layer.register_forward_pre_hook(lambda *_: seen.append("gathered"))
    garbage = labels.masked_fill(MASK == 0, VOCAB + 5)
    ours = hook(megatron.OutputProcessor(), hidden, layer, garbage, loss_mask=MASK)
    assert seen == ["gathered"] and "forward" not in vars(layer) and ours.shape == labels.shape
    theirs = -plain(hidden.transpose(0, 1), weight, labels)[0]
    close(ours, theirs * MASK)
    close(gradients((ours,), [hidden, layer.weight]), gradients((theirs,), [hidden, weight], MASK))
    one = hook(megatron.OutputProcessor(reduction="sum"), hidden, layer, garbage, loss_mask=MASK * 0.3)
    close(one, (theirs * MASK).sum() * 0.3)
    again = -plain(hidden.transpose(0, 1), weight, labels)[0] * MASK * 0.3
    close(torch.autograd.grad(one, layer.weight), torch.autograd.grad(again.sum(), weight))


def test_megatron_refusals() -> None:
    hidden, weight, labels = operands()
    layer, processor = ColumnParallelLinear(weight), megatron.OutputProcessor()
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("labels", {"labels": None}), ("inference_context", {"inference_context": 1}),
        ("output_processor_context", {"context": {"temperature": 1.0}}),
        ("defer_embedding", {"config": SimpleNamespace(defer_embedding_wgrad_compute=True)}),
    ]  # fmt: skip
    for words, given in wrong:
        with pytest.raises((TypeError, ValueError), match=words):
            hook(processor, hidden, layer, **{"labels": labels, **given})
    layer.forward = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="forward of its own"):
        hook(processor, hidden, layer, labels)
    close(
        hook(megatron.OutputProcessor(softcap=3.0), hidden, layer, labels).sum(),
        nn.functional.cross_entropy((3 * torch.tanh(hidden @ weight.t() / 3)).flatten(0, 1), labels.t().flatten(),
                                    reduction="sum"),
    )  # fmt: skip
    for words, given in (("parallel", {"parallel": None}), ("reduction", {"reduction": "mean"}),
                         ("logprobs=True", {"entropy": True}), ("logprobs=True", {"temperature": 0.7}),
                         ("per token", {"logprobs": True, "reduction": "sum"}),
                         ("memory_budget", {"memory_budget": "x"})):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=words):
            megatron.OutputProcessor(**given)


def test_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward with labels gets the processor, one without or with its own does not."""

    class Model(nn.Module):
        def forward(
            self, a: int, b: int, c: int, d: int = 0, labels: Any = None, *, output_processor: Any = None
        ) -> Any:
            return output_processor

    inner = Model()
    wrapped = nn.Module()
    wrapped.module = inner
    monkeypatch.setattr(megatron, "MEGATRON", frameworks.Framework("torch", ("2.15.0",), {}))
    assert megatron.attach_head([wrapped]) == [wrapped]
    assert isinstance(inner(1, 2, 3, labels=4), megatron.OutputProcessor)
    assert isinstance(inner(1, 2, 3, 0, 4), megatron.OutputProcessor)
    assert inner(1, 2, 3) is None and inner(1, 2, 3, labels=4, output_processor=5) == 5
    with pytest.raises(ValueError, match="output_processor"):
        megatron.attach_head(nn.Linear(2, 2))


def of_ranks(rank: int, device: str) -> dict[str, Any]:
    """Both seams with a vocabulary over two ranks, hidden states whole or sharded."""
    found: dict[str, Any] = {}
    hidden, weight, labels = operands()
    part = weight.detach().chunk(2)[rank].requires_grad_()
    rows = hidden.transpose(0, 1)
    ours = verl.linear_cross_entropy(rows, part, labels, 0.7, "none", dist.group.WORLD, reduce_dhidden=True)
    theirs = plain(rows, weight, labels, 0.7)
    whole = gradients(theirs, [hidden, weight])
    mine = [*ours, *gradients(ours, [hidden, part])]
    found["verl"] = (mine, [*theirs, whole[0], whole[1].chunk(2)[rank]])
    gathered = _GatherFromSequenceParallelRegion.apply(rows)
    ours = verl.linear_cross_entropy(gathered, part, labels, 0.7, "none", dist.group.WORLD)
    share = gradients(ours, [gathered])[0]  # this rank's, which the gather's backward sums
    dist.all_reduce(share)
    found["verl, gathered"] = ([*ours, share], [*theirs, whole[0].transpose(0, 1)])
    found["unsaid"] = ranks.said(lambda: verl.linear_cross_entropy(rows, part, labels, 0.7, "none", dist.group.WORLD))
    for sequence in (False, True):
        own = hidden.detach().chunk(2)[rank].requires_grad_() if sequence else hidden
        layer = ColumnParallelLinear(part, dist.group.WORLD, sequence)
        losses = hook(megatron.OutputProcessor(), own, layer, labels, loss_mask=MASK)
        true = -plain(rows, weight, labels)[0] * MASK
        dhidden, dweight = gradients((true,), [hidden, weight])
        expected = dhidden.chunk(2)[rank] if sequence else dhidden
        found[f"megatron {sequence}"] = (
            [losses, *gradients((losses,), [own, layer.weight])], [true, expected, dweight.chunk(2)[rank]],
        )  # fmt: skip
        processor = megatron.OutputProcessor(logprobs=True, entropy=True, temperature=TEMPERATURES["per-token"])
        both = hook(processor, own, layer, labels)
        true_both = plain(rows, weight, labels, TEMPERATURES["per-token"])
        dhidden, dweight = gradients(true_both, [hidden, weight])
        expected = dhidden.chunk(2)[rank] if sequence else dhidden
        found[f"logprobs {sequence}"] = (
            [*both, *gradients(both, [own, layer.weight])], [*true_both, expected, dweight.chunk(2)[rank]],
        )  # fmt: skip
    return {name: value if isinstance(value, str) else [[t.detach() for t in side] for side in value]
            for name, value in found.items()}  # fmt: skip


def test_over_ranks(tmp_path: Path) -> None:
    for found in ranks.run(of_ranks, 2, tmp_path):
        assert "reduce_dhidden" in found.pop("unsaid")
        for ours, theirs in found.values():
            close(ours, theirs)


def test_versions() -> None:
    """A checkout's own number counts; what is not there says what to install."""
    theirs = frameworks.Framework("theirs-package", ("1.9", "1.10"), {}, "theirs")
    with mock.patch.dict("sys.modules", theirs=SimpleNamespace(__version__="1.10.0rc1")):
        assert theirs.version() == "1.10.0rc1" and theirs.has_tested_parameters()
    with pytest.raises(ImportError, match=r"theirs-package is not installed: pip install 'theirs-package==1\.10'"):
        theirs.has_tested_parameters()


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        ("a, b, c", True), ("a, b", False), ("b, a, c", False), ("a, *", True), ("b, *", False), ("*", True),
        ("a, *, c", True), ("a, *, d", False), ("x | a, b, c", True), ("", False),
    ],
)  # fmt: skip
def test_parameters(wanted: str, fits: bool) -> None:
    def function(a: int, b: int, *, c: int) -> None: ...

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: int, b: int, c: int) -> None: ...

    class Module(nn.Module):
        def forward(self, a: int, b: int, *c: int) -> None: ...

    for theirs in (function, Function, Function.apply, Module):
        assert (frameworks.parameters_difference(theirs, wanted) == "") == fits
    assert "is 3" in frameworks.parameters_difference(3, "a")


@pytest.mark.parametrize(
    "name, package",
    [("torchtitan", "torchtitan"), ("nemo_automodel", "nemo-automodel"), ("llamafactory", "llamafactory")],
)
def test_what_is_not_installed_says_so(name: str, package: str) -> None:
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(ImportError, match=f"{package} is not installed"):
        importlib.import_module(f"chunked_head.integrations.{name}").run_exp({})
