"""Beside Liger's other kernels; the head stays this library's."""

import copy
from typing import Any

import pytest
import tiny_models
from tiny_models import assert_same, step, tokens

from chunked_head import patch_model

pytest.importorskip("liger_kernel")
llama = pytest.importorskip("transformers.models.llama.modeling_llama")
OTHERS = ("rope", "rms_norm", "swiglu")


def with_kernels(model: Any, names: tuple[str, ...]) -> Any:
    """On this instance, but for the rotary embedding, which is of the module and given back by the test."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    chosen = {name: name in names for name in OTHERS}
    apply_liger_kernel_to_llama(fused_linear_cross_entropy=False, cross_entropy=False, model=model, **chosen)
    return model


def check(device: str, names: tuple[str, ...], first: str) -> None:
    plain = tiny_models.llama().to(device)
    inputs = {name: value.to(device) for name, value in tokens().items()}
    theirs, model = step(plain, inputs), copy.deepcopy(plain)
    if first == "patch":
        patch_model(model)
    model = with_kernels(model, names)
    if first == "liger":
        patch_model(model)
    assert "liger" in llama.apply_rotary_pos_emb.__name__
    assert_same(step(model, inputs), theirs, tolerance=1e-4)
    assert model.chunked_head.fused == 1 and model.chunked_head.materialised == 0


@pytest.fixture(autouse=True)
def given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "apply_rotary_pos_emb", llama.apply_rotary_pos_emb)


@pytest.mark.parametrize("first", ["liger", "patch"])
def test_beside_its_kernels(first: str) -> None:
    """The one that Triton's interpreter runs."""
    check("cpu", ("rope",), first)


@pytest.mark.gpu
@pytest.mark.parametrize("first", ["liger", "patch"])
def test_beside_all_of_its_kernels(first: str) -> None:
    check("cuda", OTHERS, first)
