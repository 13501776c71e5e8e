"""The folder for HuggingFace's `kernels`: loaded without this package, and beside it; its layers against PyTorch's."""

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import chunked_head

kernels = pytest.importorskip("kernels", reason="the folder is for the package kernels, which is not installed")

ROOT = Path(__file__).resolve().parents[2]
ALONE = """
import sys
sys.modules["chunked_head"] = None  # an import of the installed package raises
import torch, torch.nn.functional as F
from pathlib import Path
from kernels import get_local_kernel
head = get_local_kernel(Path(sys.argv[1]))
hidden, weight = torch.randn(2, 9, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
target = torch.randint(0, 50, (2, 9))
def ours(hidden, weight):
    return head.linear_cross_entropy(hidden, weight, target, shift=1)
theirs = F.cross_entropy((hidden @ weight.T)[:, :-1].flatten(0, 1), target[:, 1:].flatten())
grads = torch.autograd.grad(theirs, (hidden, weight))
for call in (ours, torch.compile(ours, fullgraph=True, backend="aot_eager")):
    loss = call(hidden, weight)
    torch.testing.assert_close(loss, theirs)
    torch.testing.assert_close(torch.autograd.grad(loss, (hidden, weight)), grads)
out = head.linear_loss(hidden, weight, target, head.losses.cross_entropy() + 0.1 * head.losses.z_loss())
assert set(out.parts) == {"cross_entropy", "z_loss"}
try:
    head.losses.cross_entropy(label_smothing=0.1)
except TypeError as error:
    assert "label_smoothing" in str(error)
print(sorted(name for name in sys.modules if name.startswith("chunked_head.")), head.__name__)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec: Any = importlib.util.spec_from_file_location("hub_build", ROOT / "hub" / "build.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    path = tmp_path_factory.mktemp("hub")
    variant = made.build(path)
    assert variant == path / "build" / "torch-universal" and made.build(path) == variant
    return path


def operands() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states [2, 9, 16], weight, bias, labels of which some do not count."""
    made = torch.Generator().manual_seed(3)
    hidden, weight, bias = (torch.randn(size, generator=made) for size in ((2, 9, 16), (50, 16), (50,)))
    labels = torch.randint(0, 50, (2, 9), generator=made)
    labels[0, :4] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), labels


def close(ours: Tensor, theirs: Tensor, *leaves: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    grads = (torch.autograd.grad(loss, leaves) for loss in (ours, theirs))
    for mine, true in zip(*grads, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-6)


def test_metadata(folder: Path) -> None:
    found = json.loads((folder / "build" / "torch-universal" / "metadata.json").read_text())
    assert found["id"].isidentifier() and found["id"] != "chunked_head"
    assert (found["name"], found["license"], found["python-depends"]) == ("chunked-head", "Apache-2.0", [])
    assert (folder / "README.md").is_file() and (folder / "LICENSE").is_file()
    assert not list(folder.rglob("integrations")) and not list(folder.rglob("__pycache__"))


def test_without_this_package(folder: Path, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(folder)], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("[] _chunked_head_")


def test_beside_this_package(folder: Path) -> None:
    """Operators of torch.compile have the name of the build; names of the public functions are the same."""
    head = kernels.get_local_kernel(folder)
    parts = {
        "explain_model",
        "log_metrics",
        "override_torch",
        "patch_model",
        "patch_trl",
        "unpatch_model",
    }  # of frameworks
    assert set(head.__all__) == set(chunked_head.__all__) - parts
    for name in head.__all__:
        theirs, ours = (getattr(module, name) for module in (chunked_head, head))
        assert theirs is not ours or not callable(theirs)
        if inspect.isfunction(theirs):
            assert str(inspect.signature(ours)) == str(inspect.signature(theirs)).replace(
                "chunked_head.", f"{head.__name__}."
            )
    assert hasattr(torch.ops, head.__name__)
    hidden, weight, bias, labels = operands()
    both = [m.linear_cross_entropy(hidden, weight, labels, bias=bias, shift=1) for m in (head, chunked_head)]
    close(*both, hidden, weight, bias)


class Loss(nn.Module):
    """A user's, by the arguments of the layer."""

    def forward(
        self, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ignore_index: int = -100,
        reduction: str = "mean", label_smoothing: float = 0.0,
    ) -> Tensor:  # fmt: skip
        return F.cross_entropy(
            F.linear(hidden, weight, bias).flatten(0, -2), target.flatten(), ignore_index=ignore_index,
            reduction=reduction, label_smoothing=label_smoothing,
        )  # fmt: skip


def test_a_layer_in_a_users_model(folder: Path) -> None:
    """As ``kernelize`` puts it there, which looks at its members and its arguments, for training and compiling."""
    hidden, weight, bias, labels = operands()
    plain = Loss()
    model = kernels.use_kernel_forward_from_hub("Loss")(type("Loss", (Loss,), {"forward": Loss.forward}))()
    layer = kernels.LocalLayerRepository(folder, layer_name="LinearCrossEntropy")
    with kernels.use_kernel_mapping({"Loss": {"cpu": layer}}):
        kernels.kernelize(
            model, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE, device="cpu", use_fallback=False
        )
    assert type(model.forward.__func__).__name__ == "function" and "torch-universal" in inspect.getfile(model.forward)
    for given in ((), (bias,), (bias, -100, "sum", 0.1)):
        leaves = [leaf for leaf in (hidden, weight, *given[:1]) if isinstance(leaf, Tensor)]
        close(model(hidden, weight, labels, *given), plain(hidden, weight, labels, *given), *leaves)


def test_the_loss_of_a_causal_language_model(folder: Path) -> None:
    """Values and gradients of transformers' function of this name, on logits."""
    loss_utils = pytest.importorskip("transformers.loss.loss_utils")
    layer = kernels.LocalLayerRepository(folder, layer_name="ForCausalLMLoss").load()
    hidden, weight, bias, labels = operands()
    head = {"final_logit_softcapping": 2.0, "lm_head_bias": bias, "logit_scale": 1.5}
    shifted = labels.roll(-1, 1)
    for given in (
        {"labels": labels}, {"labels": labels, "num_items_in_batch": 30},
        {"labels": labels.clamp(min=7), "ignore_index": 7},
        {"labels": labels, "num_items_in_batch": torch.tensor(30)}, {"labels": None, "shift_labels": shifted},
    ):  # fmt: skip
        logits = 2.0 * torch.tanh(1.5 * F.linear(hidden, weight, bias) / 2.0)
        theirs = loss_utils.ForCausalLMLoss(logits=logits, vocab_size=50, **given)
        close(layer()(hidden, weight, hidden_size=16, position_ids=None, **given, **head), theirs, hidden, weight, bias)


def test_transformers_slot_cannot_be_reached() -> None:
    """Its map of kernels has ForCausalLMLoss, and no module of a model has that name (docs/frameworks/kernels.md).
    Where this fails, transformers has come to use it: then one flag may switch the layer on."""
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, vocab_size=300)
    )
    assert not isinstance(model.loss_function, nn.Module)
    config = transformers.KernelConfig({"ForCausalLMLoss": "/folder:ForCausalLMLoss"}, use_local_kernel=True)
    with pytest.raises(ValueError, match="ForCausalLMLoss is not registered in the model"):
        config.sanitize_kernel_mapping(model)
