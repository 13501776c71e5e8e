"""The loops of docs/examples that need no transformers: the same losses with this library's head and without."""

import importlib
from typing import Any

import pytest


@pytest.mark.parametrize("name, package", [("plain_loop", "torch"), ("lightning_module", "lightning")])
def test_losses_are_the_plain_ones(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(package, reason=f"the example is {package}'s")
    example = importlib.import_module(name)
    calls, real = [], example.linear_cross_entropy

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(example, "linear_cross_entropy", counted)
    ours = example.main()
    assert len(calls) == len(ours) == 6  # every micro-batch's
    theirs = example.main(plain=True)
    assert len(calls) == 6 and ours == pytest.approx(theirs, rel=1e-4) and ours[-1] < ours[0] - 0.1
