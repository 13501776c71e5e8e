"""Patched models on a GPU: bf16 and fp32, against the plain model in fp32; nothing waits for the device."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
from tiny_models import step, tokens

from chunked_head import metrics, patch_model

pytestmark = pytest.mark.gpu
MODELS = [tiny_models.llama, tiny_models.gemma2, tiny_models.granite]


def inputs() -> dict[str, Any]:
    return {name: value.cuda() for name, value in tokens(4, 33).items()}


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_step(make: Callable[[], Any], dtype: torch.dtype) -> None:
    plain = make().cuda()
    exact = step(plain, inputs())
    theirs = step(copy.deepcopy(plain).to(dtype), inputs())
    patched = patch_model(copy.deepcopy(plain).to(dtype), strict=True, metrics=[metrics.entropy()])
    ours = step(patched, inputs())
    assert patched.chunked_head.fused == 1
    assert ours.grads.keys() == exact.grads.keys()
    for name, grad in exact.grads.items():
        allowed = 2 * (theirs.grads[name] - grad).norm() + 1e-5 * grad.norm()
        assert (ours.grads[name] - grad).norm() <= allowed, name
    assert (ours.loss - exact.loss).abs() <= 2 * (theirs.loss - exact.loss).abs() + 1e-3


def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's layers wait as they do without the patch; its head and its loss do not."""
    patched = patch_model(tiny_models.llama().cuda(), strict=True, metrics=[metrics.accuracy()])
    given = inputs()
    output = patched.model(given["input_ids"])
    hidden = output.last_hidden_state = output.last_hidden_state.detach().requires_grad_()
    monkeypatch.setattr(patched.model, "forward", lambda **_: output)

    def run() -> None:
        patched(**given).loss.backward()

    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert hidden.grad.abs().sum() > 0 and patched.chunked_head.fused == 2
