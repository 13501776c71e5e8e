"""A call under ``torch.compile``'s autograd."""

from types import SimpleNamespace

import pytest
import torch
from graph_calls import grpo, make_data, outcome

from chunked_head.arithmetic import evaluate


@pytest.mark.parametrize("known", [True, False])
def test_compiled_autograd_around_a_call(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses' own gradient is kept from it; by a torch that does not say whether it is on, it is as right."""
    compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd", reason="torch has no compiled autograd")
    taken = []
    for name in ("by_transform", "by_autograd"):
        function = getattr(evaluate, name)
        monkeypatch.setattr(evaluate, name, lambda *given, f=function, n=name: (taken.append(n), f(*given))[1])
    d = make_data()
    _, plain = outcome(grpo, d, 0.37)
    if not known:
        monkeypatch.setattr(evaluate, "sys", SimpleNamespace(modules={}))
    before = len(taken)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        _, grads = outcome(grpo, d, 0.37)
    assert set(taken[:before]) == {"by_autograd"}
    assert set(taken[before:]) == {"by_transform" if known else "by_autograd"}
    torch.testing.assert_close(grads, plain)
