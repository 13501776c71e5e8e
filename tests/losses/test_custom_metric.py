"""Metrics of the user's own, held to what a user's loss is; and what users' functions write nobody else sees."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from chunked_head import linear_loss, logits_loss, losses, metrics
from chunked_head.losses.base import Field
from chunked_head.metrics import Metric

TOKENS = 20
HEAD = {"hidden": torch.randn(TOKENS, 8), "weight": torch.randn(11, 8), "target": torch.arange(TOKENS) % 11}
SCOPE = "depends on other tokens, and would depend on the chunk size"


@pytest.mark.parametrize(
    ("function", "known", "words"),
    [
        (lambda s, b: s.logprob[:1], {}, r"one value per token, \[tokens\] = \(24,\) here; got \(1,\)"),
        (lambda s, b: s.logprob.mean(), {}, r"\(24,\) here; got \(\).*leave out .sum\(\) and .mean\(\)"),
        (lambda s, b: s.logprob[:, None], {}, r"got \(24, 1\)"),
        (lambda s, b: 1.0, {}, "must return a tensor of numbers, got float"),
        (lambda s, b: (s.lse - s.lse.mean()).square(), {}, SCOPE),
        (lambda s, b: s.lse.cumsum(0), {}, SCOPE),
        (lambda s, b: s.lse * torch.rand(()), {}, "draws random numbers"),
        (lambda s, b: s.lse * b["advantages"].sub_(1.0), {}, "writes into what it reads"),
        (lambda s, b: s.argmax == s.argmax[0], {}, SCOPE),
        (lambda s, b: b.segment_mean(s.lse), {}, r'got \(5,\); values per segment are unit="segment"'),
        (lambda s, b: s.lse, {"unit": "segment", "scope": "segment"}, r"\[num_segments\] = \(5,\) here; got \(24,\)"),
        (lambda s, b: s.lse * b["mine"], {}, r"\['mine'\], a field that is not the.*fields={'mine': 'token'}"),
        (lambda s, b: s.lse / 0 + [], {}, "raised TypeError on 24 made-up tokens.*check=False"),
    ],
)  # fmt: skip
def test_refusals(function: Callable, known: dict[str, Any], words: str) -> None:
    for reduce in ("mean", "max"):
        with pytest.raises(ValueError, match=rf"(?s)^metrics\.Metric\('mine'\) .*{words}"):
            Metric("mine", function, reduce=reduce, **known)


RIGHT: dict[str, tuple[Callable, dict[str, Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "bool": (lambda s, b: s.argmax == b.target, {"needs": frozenset({"argmax"})},
             lambda p, t: (p.argmax(1) == t).float()),
    "segment": (lambda s, b: s.lse - s.lse.mean(), {"scope": "segment"}, lambda p, t: torch.zeros(TOKENS)),
    "own field": (lambda s, b: b["mine"] + 0.0 * s.lse, {"extra_fields": {"mine": Field("token")}},
                  lambda p, t: torch.arange(float(TOKENS))),
    "unchecked": (lambda s, b: s.lse * 0.0 + 2.0 if len(s.lse) != 24 else None, {"check": False},
                  lambda p, t: torch.tensor(2.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("chunk_tokens", [None, 7])
def test_what_is_taken(name: str, chunk_tokens: int | None) -> None:
    function, known, expected = RIGHT[name]
    batch = {"mine": torch.arange(float(TOKENS))} if "extra_fields" in known else None
    measured = [Metric("mine", function, **known)]
    out = linear_loss(**HEAD, loss=losses.z_loss(), metrics=measured, batch=batch, chunk_tokens=chunk_tokens)
    right = expected((HEAD["hidden"] @ HEAD["weight"].t()).softmax(1), HEAD["target"]).mean()
    torch.testing.assert_close(out.metrics["mine"].value, right, rtol=1e-5, atol=1e-5)


RUNS: list[int] = []


def test_functions_alike_are_checked_once() -> None:
    def of(scale: float) -> Callable:
        return lambda s, b: (RUNS.append(1), s.lse * scale)[1]

    Metric("mine", of(2.0))
    assert len(RUNS) == 3  # whole, and two pieces
    Metric("mine", of(3.0), name="other", reduce="max")
    assert len(RUNS) == 3
    with pytest.raises(ValueError, match=SCOPE):
        Metric("mine", lambda s, b: s.lse + s.lse.sum())


@pytest.mark.parametrize("kind", ["loss", "metric"])
@pytest.mark.parametrize("shape", [(), (1,), (TOKENS, 1)])
def test_values_of_another_shape_are_refused_in_a_call(kind: str, shape: tuple[int, ...]) -> None:
    """Of a function that was not checked, or does something else by then: none is broadcast over tokens."""

    def function(stats: Any, batch: Any) -> Tensor:
        return stats.lse.mean() + torch.zeros(shape)

    loss, measured = losses.z_loss(), list[Metric]()
    if kind == "loss":
        loss = losses.custom(function, scope="token", check=False, name="mine")
    else:
        measured = [Metric("mine", function, check=False)]
    with pytest.raises(ValueError, match=rf"mine must return one value per token, \({TOKENS},\) here; got"):
        linear_loss(**HEAD, loss=loss, metrics=measured)


# ---- what a function writes


def writes(stats: Any, batch: Any) -> Tensor:
    """Everything that it can reach."""
    values = stats.logprob * 2.0 + stats.lse + stats.entropy + stats.top_logprob + batch["advantages"]
    with torch.no_grad():
        for name in ("logprob", "lse", "entropy", "top_logprob", "argmax"):
            getattr(stats, name).data.fill_(7)
        for name in ("advantages", "segments"):
            batch[name].fill_(1)
        batch.mask.fill_(False)
        batch.target.fill_(3)
        batch.segment_count().fill_(5.0)
    return values


NEEDS = frozenset({"entropy", "top_logprob", "argmax"})
OTHERS = [metrics.accuracy(), metrics.entropy(), metrics.top_probability(), metrics.logprob(), metrics.advantage(),
          metrics.lse(weighting="segment")]  # fmt: skip


@pytest.mark.parametrize("kind", ["loss", "metric", "metric of segments", "both"])
@pytest.mark.parametrize("function", ["hidden", "logits"])
@pytest.mark.parametrize("chunk_tokens", [None, 7])
def test_what_a_function_writes_nobody_else_sees(kind: str, function: str, chunk_tokens: int | None) -> None:
    """Neither other losses and metrics, nor the next chunk, nor the caller's batch."""
    if function == "logits" and chunk_tokens:
        return
    batch = {"advantages": torch.randn(TOKENS), "segments": torch.arange(TOKENS) // 6, "mask": torch.arange(TOKENS) > 2}
    given = {name: value.clone() for name, value in batch.items()}
    builtin = losses.cross_entropy() + losses.reinforce()
    more = {"batch": batch, "num_segments": 4}

    def call(loss: Any, measured: list[Metric]) -> tuple[Any, Tensor]:
        hidden = HEAD["hidden"].clone().requires_grad_()
        if function == "logits":
            out = logits_loss(hidden @ HEAD["weight"].t(), HEAD["target"], loss, metrics=measured, **more)
        else:
            head = HEAD | {"hidden": hidden}
            out = linear_loss(**head, loss=loss, metrics=measured, chunk_tokens=chunk_tokens, **more)
        return out, torch.autograd.grad(out.loss, hidden)[0]

    own, measured = losses.Losses(()), list[Metric]()
    if kind != "metric":
        own = 0.0 * losses.custom(writes, scope="token", check=False, needs=NEEDS, fields=("advantages",))
    if kind in ("metric", "both"):
        measured = [Metric("mine", writes, needs=NEEDS, check=False)]
    elif kind == "metric of segments":
        measured = [Metric("mine", writes, needs=NEEDS, check=False, scope="segment")]
    (right, gradient), (found, other) = call(builtin, OTHERS), call(own + builtin, [*measured, *OTHERS])
    for name in right.parts:
        torch.testing.assert_close(found.parts[name], right.parts[name])
    for name, value in right.metrics.items():
        torch.testing.assert_close(found.metrics[name].value, value.value)
    torch.testing.assert_close(other, gradient)
    for name, value in given.items():
        assert torch.equal(batch[name], value), name


def test_a_statistic_that_a_metric_writes_is_its_own() -> None:
    """And is the one that it reads again."""

    def probability(stats: Any, batch: Any) -> Tensor:
        stats.logprob.exp_()
        return stats.logprob

    measured = [Metric("mine", probability), metrics.logprob(), Metric("again", probability)]
    out = linear_loss(**HEAD, loss=losses.cross_entropy(), metrics=measured)
    right = (HEAD["hidden"] @ HEAD["weight"].t()).log_softmax(1).gather(1, HEAD["target"][:, None])
    torch.testing.assert_close(out.metrics["logprob"].value, right.mean())
    for name in ("mine", "again"):
        torch.testing.assert_close(out.metrics[name].value, right.exp().mean())


@pytest.mark.parametrize("check", [False, True])
def test_a_loss_writes_into_no_tensor_of_the_caller(check: bool) -> None:
    weights = torch.ones(11)

    def weighed(stats: Any, batch: Any, by: Tensor) -> Tensor:
        found = -stats.logprob * by[batch.target]
        by.mul_(2.0)
        return found

    options: dict[str, Any] = {"scope": "token", "tensors": {"by": weights}}
    if check:
        with pytest.raises(ValueError, match="writes into what it reads"):
            losses.custom(weighed, **options)
    else:
        loss = losses.custom(weighed, **options, check=False)
        found = linear_loss(**HEAD, loss=loss, chunk_tokens=7).loss
        torch.testing.assert_close(found, linear_loss(**HEAD, loss=losses.cross_entropy()).loss)
    assert torch.equal(weights, torch.ones(11))
