"""Calls that run with rows behind their tokens' own, so that calls of many lengths are recorded once."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import graph_calls
import pytest
import torch
from budget import assert_outcome
from cases import FAST_OPTIONS, GPU, HALVES, SINGLE, TRITON, Case, Place, bias, per_token, resolve, run, run_reference
from graph_calls import Data, make_data, named
from test_replay import assert_replayed, mixed
from test_replay import on_cpu as on_cpu
from test_replay_launches import by_address as by_address
from torch import Tensor

from chunked_head import linear_cross_entropy, linear_logprobs, linear_loss, losses, metrics, plan
from chunked_head.call import spec
from chunked_head.plan import planner
from chunked_head.plan.planner import padded_rows
from chunked_head.replay import kinds, replay

CASES = [
    *(Case(f"{name}-{tokens}", (3, tokens), 64, 507, options, {})
      for name, options in SINGLE.items() for tokens in (29, 47)),
    Case("bias-cap-shift", (2, 70), 64, 507, {"bias": bias, "softcap": 5.0, "shift": 2, "label_smoothing": 0.1}, {}),
    Case("weights-none", (37,), 64, 507, {"token_weights": per_token, "reduction": "none", "z_loss": 1e-2}, {}),
    Case("all-ignored", (130,), 64, 507, {}, {}, ignored=1.0),
    Case("one-more", (129,), 64, 507, {}, {}),
    Case("no-more", (128,), 64, 507, {}, {}),
    Case("few", (17,), 64, 40, {}, {}),
]  # fmt: skip
PLACES = [*TRITON, *(place for place in GPU if place.values[0].backend == "triton")]


@pytest.fixture
def by_triton(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels are the CPU's default too."""
    monkeypatch.setattr(spec, "resolve", lambda name, device: resolve("triton", device))


@pytest.fixture
def rows_of_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int | None]]:
    """With how many rows each call ran, where it was padded."""
    found: list[int | None] = []
    call = replay.run

    def watched(task: Any, program: Any, rows: int | None = None) -> Any:
        found.append(rows)
        return call(task, program, rows)

    monkeypatch.setattr(replay, "run", watched)
    yield found


def test_sizes() -> None:
    sizes = {1: 1, 16: 16, 17: 64, 64: 64, 65: 128, 128: 128, 129: 256, 8192: 8192, 8193: 8320}
    assert {tokens: padded_rows(tokens) for tokens in sizes} == sizes
    assert len({padded_rows(tokens) for tokens in range(1, 8193)}) == 16 + 1 + 64


def combinations() -> list:
    """Cases x dtypes x places; interpreted, each option once, on its path."""
    found = []
    for place in PLACES:
        for case in CASES:
            path = torch.bfloat16 if case.options.keys() <= FAST_OPTIONS else torch.float16
            everything = place.values[0].device == "cuda"
            for dtype in HALVES if everything else [path] if "-47" not in case.name else []:
                name = f"{case.name}-{str(dtype)[6:]}-{place.id}"
                found.append(pytest.param(case, dtype, place.values[0], marks=place.marks, id=name))
    return found


@pytest.mark.parametrize(("case", "dtype", "place"), combinations())
def test_cases(
    case: Case, dtype: torch.dtype, place: Place, rows_of_calls: list[int | None], request: pytest.FixtureRequest
) -> None:
    if place.device == "cpu":
        request.getfixturevalue("on_cpu")
    inputs = case.inputs(dtype, place.device)
    truth, eager = run_reference(inputs, torch.float64), run_reference(inputs, dtype)
    assert_outcome(run(linear_cross_entropy, inputs, backend=place.backend), eager, truth, dtype)
    assert rows_of_calls == [padded_rows(inputs.target.numel())]


LENGTHS = [36, 33, 50, 64]  # of two sequences each: all run with 128 rows


def rounds(call: Callable[[Data], Any], device: str, again: bool) -> Callable[[int], list[Tensor | None]]:
    def once(i: int) -> list[Tensor | None]:
        data = make_data(torch.bfloat16, device, LENGTHS[i], seed=i)
        out, grads = graph_calls.outcome(call, data, 0.37)
        found = [*(value.detach() for value in named(out).values()), *grads]
        if again:  # a backward that finds no gradients waiting
            loss = linear_cross_entropy(data.hidden, data.weight, data.target)
            torch.autograd.grad(loss, data.hidden, retain_graph=True)
            found += torch.autograd.grad(loss * 3, [data.hidden, data.weight])
        assert all(grad is None or len(grad) in (*data.hidden.shape, len(data.weight)) for grad in grads)
        return found

    return once


def values(d: Data) -> Tensor:
    """With a mask, entropies and gradients of both, of a layout of its own."""
    found = linear_logprobs(d.hidden, d.weight, d.target, entropy=True, mask=d.fields["mask"], shift=1)
    assert found[0].shape == d.target.shape
    return found[0] + 0.1 * found[1]


def weighted_loss(d: Data) -> Any:
    loss = losses.cispo(token_weights="token_weights") + losses.kl_to_reference("k2") * d.scalar
    batch = {**graph_calls.chosen(d, "old_logprobs", "advantages", "mask"), "token_weights": d.token_weights}
    batch["ref_logprobs"] = d.fields["old_logprobs"] * 1.1
    return linear_loss(d.hidden, d.weight, d.target, loss, batch=batch, metrics=[metrics.entropy(), metrics.kl_old()])


class Added(NamedTuple):
    loss: Tensor
    buffer: Tensor


def added(d: Data) -> Added:
    buffer = torch.ones_like(d.weight, dtype=torch.float32).detach()
    return Added(linear_cross_entropy(d.hidden, d.weight, d.target, accumulate_into=buffer, upstream=0.37), buffer)


def under_autocast(d: Data) -> Tensor:
    with torch.autocast(d.hidden.device.type, torch.bfloat16):
        return linear_cross_entropy(d.hidden.float(), d.weight.float(), d.target, softcap=9.0, normalizer=d.scalar)


CALLS = [
    graph_calls.plain, weighted_loss, added,
    *(pytest.param(call, marks=pytest.mark.exhaustive)
      for call in (graph_calls.unreduced, mixed, values, under_autocast)),
]  # fmt: skip


@pytest.mark.compiled
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted")
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_lengths(
    call: Callable[[Data], Any], by_triton: None, by_address: None, rows_of_calls: list[int | None]
) -> None:
    """One recording for all of them, each beside a call without one."""
    assert_replayed(rounds(call, "cpu", again=call is graph_calls.plain), 1 + (call is graph_calls.plain))
    assert set(rows_of_calls) == {128}


@pytest.mark.gpu
@pytest.mark.compiled
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_lengths_on_a_gpu(call: Callable[[Data], Any], rows_of_calls: list[int | None]) -> None:
    tapes = {graph_calls.plain: 2, graph_calls.unreduced: 0}.get(call, 1)  # values per token are plain PyTorch's
    assert_replayed(rounds(call, "cuda", again=call is graph_calls.plain), tapes)
    assert set(rows_of_calls) == {128}


def test_values_may_be_changed_in_place(by_triton: None, by_address: None) -> None:
    """They are the caller's, whether a recording or the call has made them."""
    for i, tokens in enumerate(LENGTHS):
        d = make_data(torch.bfloat16, "cpu", tokens, seed=i)
        found = linear_logprobs(d.hidden, d.weight, d.target, entropy=True)
        expected = torch.autograd.grad((found[0] * 2 + found[1] * 3).sum(), d.hidden, retain_graph=True)
        found[0].mul_(2)
        found[1].mul_(3)
        ours = torch.autograd.grad((found[0] + found[1]).sum(), d.hidden)
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    assert replay.REPLAYS


def test_a_chunk_without_a_token_is_not_recorded(
    by_triton: None, by_address: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call knows nothing of where the tokens of a longer one lie in it."""
    monkeypatch.setattr(planner, "balanced", lambda tokens, most: 16)
    for plans in (planner.PLANS.clear, spec.SPECS.clear):
        plans()

    def once(i: int) -> list[Tensor | None]:
        d = make_data(torch.bfloat16, "cpu", (20, 20, 60, 64)[i], seed=i)
        hidden = d.hidden[0].detach().requires_grad_()
        out = linear_loss(hidden, d.weight.detach(), d.target[0], losses.cross_entropy())
        assert out.plan.chunk_tokens == 16 and out.plan.sizes.tokens == 64
        return [out.loss.detach(), *torch.autograd.grad(out.loss, hidden)]

    assert_replayed(once)  # that of 60 tokens is
    for plans in (planner.PLANS.clear, spec.SPECS.clear):
        plans()


def test_tensors_that_share_memory_are_of_a_kind_with_others_alike() -> None:
    """Of the weight and a part of it a recording knows one address; it is for parts that are as long."""
    weight = torch.zeros(64, 64, dtype=torch.bfloat16)
    target = torch.zeros(64, dtype=torch.int64)

    def kind(hidden: Tensor) -> Any:
        given = {"hidden": hidden, "weight": weight, "target": target[: len(hidden)]}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kinds, "DEVICES", {"cpu"})
            return kinds.Arguments(linear_cross_entropy, given, {}).kind

    kinds_of = [kind(hidden) for hidden in (weight, weight[:48], weight[:40], torch.zeros_like(weight))]
    assert None not in kinds_of and kinds_of[1] == kinds_of[2]
    assert len(set(kinds_of)) == 3


@pytest.mark.parametrize(
    "options",
    [{"memory_budget": "8MiB"}, {"chunk_tokens": 32}, {"skip_ignored": True}, {"backend": "torch"}],
    ids=lambda options: next(iter(options)),
)
def test_calls_at_their_own_size(options: dict[str, Any], on_cpu: None, rows_of_calls: list[int | None]) -> None:
    """Where the caller has limited sizes, rows are moved, or logits are BLAS's; they are recorded for each length."""
    given = make_data(torch.bfloat16, "cpu", 33)
    linear_cross_entropy(given.hidden, given.weight, given.target, **{"backend": "triton", **options})
    assert rows_of_calls == [None]


def test_what_others_read_is_not_padded(on_cpu: None, rows_of_calls: list[int | None]) -> None:
    d = make_data(torch.bfloat16, "cpu", 33)

    def of_a_user(stats: Any, batch: Any) -> Tensor:
        return stats.logprob * 2

    run = {"hidden": d.hidden, "weight": d.weight, "target": d.target, "backend": "triton"}
    linear_loss(**run, loss=losses.custom(of_a_user, scope="token", name="mine"))
    linear_loss(**run, loss=losses.grpo(), batch=graph_calls.chosen(d, "old_logprobs", "advantages"),
                temperature=d.fields["temperature"])  # fmt: skip
    linear_loss(**run, loss=losses.gspo(), num_segments=graph_calls.SEGMENTS,
                batch=graph_calls.chosen(d, "old_logprobs", "advantages", "segments"))  # fmt: skip
    linear_cross_entropy(d.hidden.transpose(0, 1), d.weight, d.target.T, backend="triton")
    assert rows_of_calls == [None] * 4


@pytest.mark.compiled
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted")
def test_a_shift_beyond_the_sequence_predicts_nothing_after_a_recording(by_triton: None, by_address: None) -> None:
    for tokens in LENGTHS:
        d = make_data(torch.bfloat16, "cpu", tokens)
        linear_cross_entropy(d.hidden, d.weight, d.target, shift=2)
    d = make_data(torch.bfloat16, "cpu", 2, seed=1)
    hidden, target = d.hidden.repeat(20, 1, 1), d.target.repeat(20, 1)
    tapes = len(replay.REPLAYS)
    loss = linear_cross_entropy(hidden, d.weight, target, shift=2)
    assert loss == 0 and not any(grad.any() for grad in torch.autograd.grad(loss, (hidden, d.weight)))
    assert len(replay.REPLAYS) == tapes == 1  # the call was that of longer sequences, done again


def test_plan_is_of_the_padded_call() -> None:
    made = plan(tokens=1000, hidden=64, vocab=507, dtype=torch.bfloat16, device="sm_90")
    assert made.sizes.tokens == 1024
    for options in ({"memory_budget": "1GiB"}, {"skip_ignored": True}, {"loss": losses.gspo()}, {"device": "cpu"}):
        sizes = {"tokens": 1000, "hidden": 64, "vocab": 507, "dtype": torch.bfloat16, "device": "sm_90"} | options
        assert plan(**sizes).sizes.tokens == 1000
