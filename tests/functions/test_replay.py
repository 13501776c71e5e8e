"""Calls done again from a tape: what they return, and what has none."""

import ctypes
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import graph_calls
import pytest
import torch
from cases import OPTION_CASES, SIZE_CASES, Case, run
from chunked_head.kernels.common import recording
from graph_calls import Data, make_data, named
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.utils.checkpoint import checkpoint

from chunked_head import LossOutput, linear_cross_entropy, linear_logprobs, linear_loss, losses, metrics
from chunked_head.arithmetic import evaluate
from chunked_head.call import run as call
from chunked_head.call import tokens
from chunked_head.metrics import MetricValue
from chunked_head.replay import kinds, replay
from chunked_head.replay.recorder import Recorder
from chunked_head.replay.tape import ALIGNMENT, packed
from chunked_head.replay.template import Template

ROUNDS = 4  # as it is, recorded, replayed twice


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls on the CPU replay as those on a GPU: without looks at ids, and with arithmetic that may be recorded."""
    monkeypatch.setattr(kinds, "DEVICES", {"cpu"})
    monkeypatch.setattr(tokens, "reading_is_free", lambda tensor: False)
    monkeypatch.setattr(evaluate, "refuse", lambda *reason, **never: None)


def assert_replayed(call: Callable[[int], list[Tensor | None]], expected_tapes: int = 1) -> None:
    """``call`` of round after round beside the same without tapes, to the bit."""
    found = [call(i) for i in range(ROUNDS)]
    assert len(replay.REPLAYS) == expected_tapes
    replay.REPLAYS.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "ATTEMPTS", -1)
        expected = [call(i) for i in range(ROUNDS)]
    for ours, theirs in zip(found, expected, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert (mine is None) == (other is None)
            if mine is not None and other is not None:
                torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


def round_of(call: Callable[[Data], Any], device: str, dtype: torch.dtype) -> Callable[[int], list[Tensor | None]]:
    def once(i: int) -> list[Tensor | None]:
        out, grads = graph_calls.outcome(call, make_data(dtype, device, seed=i), 0.37)
        return [*(value.detach() for value in named(out).values()), *grads]

    return once


def mixed(d: Data) -> LossOutput:
    batch = graph_calls.chosen(d, "old_logprobs", "advantages", "mask")
    loss = losses.grpo() + 0.1 * losses.z_loss() - 0.01 * losses.entropy()
    measured = [metrics.clip_fraction(), metrics.entropy(), metrics.accuracy()]
    return linear_loss(d.hidden, d.weight, d.target, loss, batch=batch, metrics=measured, shift=1)


RECORDED = [
    graph_calls.plain, graph_calls.weighted, graph_calls.grpo, graph_calls.logprobs, graph_calls.logprobs_alone,
    graph_calls.tempered, graph_calls.kept, graph_calls.kept_logprobs, mixed,
]  # fmt: skip


@pytest.mark.parametrize("call", [*graph_calls.CALLS, mixed], ids=lambda call: call.__name__)
def test_calls(call: Callable[[Data], Any], on_cpu: None) -> None:
    assert_replayed(
        round_of(call, "cpu", torch.float32), expected_tapes=int(call in [*RECORDED, graph_calls.unreduced])
    )


@pytest.mark.gpu
@pytest.mark.compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("call", [*graph_calls.CALLS, mixed], ids=lambda call: call.__name__)
def test_calls_on_a_gpu(call: Callable[[Data], Any], dtype: torch.dtype) -> None:
    # the arithmetic of class weights has no kernel
    tapes = call in (graph_calls.logprobs, graph_calls.logprobs_alone, graph_calls.tempered)
    tapes = tapes or (call in (graph_calls.plain, graph_calls.grpo, graph_calls.kept, mixed) and dtype != torch.float16)
    # elsewhere rows that keep sets are put after the others, and values per token back
    tapes = tapes or (call is graph_calls.kept_logprobs and dtype == torch.float32)
    assert_replayed(round_of(call, "cuda", dtype), int(tapes))


CASES = [case for case in [*OPTION_CASES, *SIZE_CASES] if case.options.get("reduction") != "none"]


@pytest.mark.gpu
@pytest.mark.compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_on_a_gpu(case: Case, dtype: torch.dtype) -> None:
    inputs = case.inputs(dtype, "cuda")

    def once(i: int) -> list[Tensor | None]:
        target = inputs.target.roll(i) if inputs.target.dim() else inputs.target
        changed = type(inputs)(inputs.hidden * (1 + i), inputs.weight + 0, target, inputs.options)
        return list(run(linear_cross_entropy, changed, **inputs.schedule))

    assert_replayed(once, expected_tapes=int("class_weights" not in case.options))


def operands(i: int, tokens: int = 30) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(i)
    hidden, weight = (torch.randn(size, 12, generator=made).requires_grad_() for size in (tokens, 41))
    return hidden, weight, torch.randint(0, 41, (tokens,), generator=made)


def outcome(loss: Tensor, *leaves: Tensor) -> list[Tensor | None]:
    return [loss.detach(), *torch.autograd.grad(loss * 0.5, leaves)]


# what may differ between calls of one Spec, by a value for each round: the last two differ from the recorded one
CHANGES: dict[str, list[dict[str, Any]]] = {
    "normalizer": [{"normalizer": 3.0}] * 2 + [{"normalizer": 5.0}, {"normalizer": 3.0}],
    "upstream": [{"upstream": 0.5}] * 2 + [{"upstream": 0.25}, {"upstream": 0.5}],
    "reduction": [{"reduction": "mean"}] * 2 + [{"reduction": "sum"}, {"reduction": "mean"}],
    "z_loss": [{"z_loss": 0.1}] * 2 + [{"z_loss": 0.2}, {"z_loss": 0.1}],
    "logit_scale": [{"logit_scale": 1.0}] * 2 + [{"logit_scale": 2.0}, {"logit_scale": 1.0}],
    "ignore_index": [{"ignore_index": 3}] * 2 + [{"ignore_index": 4}, {"ignore_index": 3}],
    "a tensor": [{"normalizer": torch.tensor(3.0 + i)} for i in range(ROUNDS)],
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=list(CHANGES))
def test_what_changes_is_seen(changes: list[dict[str, Any]], on_cpu: None) -> None:
    def once(i: int) -> list[Tensor | None]:
        hidden, weight, target = operands(i)
        return outcome(linear_cross_entropy(hidden, weight, target, **changes[i]), hidden, weight)

    assert_replayed(once)


def test_losses_and_metrics_are_seen(on_cpu: None) -> None:
    asked = [(losses.grpo(), metrics.entropy())] * 2 + [
        (losses.grpo(clip_low=0.01), metrics.entropy()), (losses.grpo(), metrics.accuracy()),
    ]  # fmt: skip

    def once(i: int) -> list[Tensor | None]:
        hidden, weight, target = operands(i)
        loss, metric = asked[i]
        batch = {"old_logprobs": hidden.detach()[:, 0] - 4, "advantages": hidden.detach()[:, 1] * 2}
        out = linear_loss(hidden, weight, target, loss, batch=batch, metrics=[metric])
        assert list(out.metrics) == [metric.label]
        return [*outcome(out.loss, hidden, weight), out.metrics[metric.label].value]

    assert_replayed(once)


def test_what_surrounds_a_call_is_seen(on_cpu: None) -> None:
    """Which operands take a gradient, and autocast; an argument given twice is an error as ever."""

    def once(i: int) -> list[Tensor | None]:
        found = list[Tensor | None]()
        for frozen, cast in ((-1, False), (0, False), (1, False), (-1, True)):
            given = operands(i)
            wanted = [leaf.requires_grad_(at != frozen) for at, leaf in enumerate(given[:2])]
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                loss = linear_cross_entropy(*given)
            found += outcome(loss, *(leaf for leaf in wanted if leaf.requires_grad))
        return found

    assert_replayed(once, expected_tapes=4)
    hidden, weight, target = operands(0)
    with pytest.raises(TypeError, match="multiple values"):
        linear_cross_entropy(hidden, weight, target, hidden=hidden)  # type: ignore[misc]


def test_other_shapes_strides_and_places_are_other_kinds(on_cpu: None) -> None:
    layouts: list[Callable[[Tensor], Tensor]] = [
        lambda x: x, lambda x: x[:-3], lambda x: x.t().contiguous().t(), lambda x: torch.cat([x[:1], x])[1:],
        lambda x: x.repeat_interleave(2, 0)[::2],
    ]  # fmt: skip

    def once(i: int) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for layout in layouts:
            hidden, weight, target = operands(i)
            hidden = layout(hidden.detach()).requires_grad_()
            found += outcome(linear_cross_entropy(hidden, weight, target[: len(hidden)]), hidden, weight)
        return found

    assert_replayed(once, expected_tapes=len({(3, 5)[i > 3] for i in range(5)}) + 2)


def test_one_tensor_given_twice(on_cpu: None) -> None:
    """What was recorded of it is nothing for two tensors."""

    def once(i: int) -> list[Tensor | None]:
        hidden, weight, target = operands(i)
        old = -torch.rand(30, generator=torch.Generator().manual_seed(i))
        other = old if i < 3 else old - 1
        out = linear_loss(
            hidden, weight, target, losses.grpo() + losses.kl_to_reference(),
            batch={"old_logprobs": old, "ref_logprobs": other, "advantages": old + 2}, metrics=[metrics.entropy()],
        )  # fmt: skip
        return [*outcome(out.loss, hidden, weight), *out.parts.values(), out.metrics["entropy"].value]

    assert_replayed(once)


def twice(hidden: Tensor, weight: Tensor, target: Tensor, **options: Any) -> list[Tensor | None]:
    """The second backward makes gradients of what the tape has left."""
    loss = linear_cross_entropy(hidden, weight, target, **options)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    target.zero_()  # the call has its own
    more = linear_cross_entropy(hidden, weight, target, **options)  # in memory of its own
    return [*first, *torch.autograd.grad(loss * 3, (hidden, weight)), more.detach()]


def test_backward_twice_and_late(on_cpu: None) -> None:
    def once(i: int) -> list[Tensor | None]:
        hidden, weight, target = operands(i)
        return twice(hidden, weight, target, bias=weight[:, 0] * 2, chunk_tokens=8)

    assert_replayed(once)


@pytest.mark.gpu
@pytest.mark.compiled
@pytest.mark.parametrize("chunk_tokens", [None, 32])
def test_backward_twice_and_late_on_a_gpu(chunk_tokens: int | None) -> None:
    """What it is made of shares one allocation with what kernels alone had."""

    def once(i: int) -> list[Tensor | None]:
        made = torch.Generator().manual_seed(i)
        hidden, weight = (
            torch.randn(size, 64, generator=made).to("cuda", torch.bfloat16).requires_grad_() for size in (80, 1000)
        )
        target = torch.randint(0, 1000, (80,), generator=made).cuda()
        return twice(hidden, weight, target, chunk_tokens=chunk_tokens)

    assert_replayed(once)


def test_an_operand_changed_before_a_second_backward_raises(on_cpu: None) -> None:
    for i in range(ROUNDS):
        hidden, weight, target = operands(i)
        loss = linear_cross_entropy(hidden, weight, target)
        loss.backward(retain_graph=True)
        with torch.no_grad():
            hidden.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert replay.REPLAYS


@pytest.mark.parametrize("sets", ["candidates", "offsets"])
def test_sets_accumulated_into(sets: str, on_cpu: None) -> None:
    """The rows of the buffer that are watched are those of targets; ids come in another number each time."""

    def once(i: int) -> list[Tensor | None]:
        hidden, weight, target = operands(i)
        buffer, given = torch.full_like(weight, 0.5), torch.randint(0, len(weight), (3,))
        options: dict[str, Any] = {"candidates": given, "candidate_bias": torch.randn(3)}
        if sets == "offsets":
            ends = torch.arange(target.numel() + 1) * (2 + i % 2)
            ids = torch.randint(0, len(weight), (int(ends[-1]),))
            options = {"batch": {"kept_ids": ids, "kept_offsets": ends, "candidate_bias": torch.randn(len(ids))}}
            options["kept_everywhere"] = True
        out = linear_loss(
            hidden, weight, target, losses.cross_entropy(), accumulate_into=buffer, metrics=[metrics.entropy()],
            **options,
        )  # fmt: skip
        out.loss.backward()
        return [out.loss.detach(), hidden.grad, buffer]

    made = torch.random.get_rng_state()

    def again(i: int) -> list[Tensor | None]:
        torch.random.set_rng_state(made)
        torch.manual_seed(i)
        return once(i)

    assert_replayed(again)


def test_accumulated_into(on_cpu: None) -> None:
    def once(i: int) -> list[Tensor | None]:
        hidden, weight, target = operands(i)
        weight.main_grad = torch.full_like(weight, 0.5)  # type: ignore[attr-defined]
        loss = linear_cross_entropy(hidden, weight, target, accumulate_into="main_grad", upstream=0.5)
        (loss * (0.5 if i < 3 else 0.75)).backward()  # not as promised in the last round: nan
        return [loss.detach(), hidden.grad, weight.main_grad]  # type: ignore[attr-defined]

    assert_replayed(once)


def test_what_a_call_returns_is_the_callers(on_cpu: None) -> None:
    """Results of one call are not those of the next, and a loss that is kept keeps no hidden states."""
    for i in range(ROUNDS):
        leaf, weight, target = operands(i)
        seen = weakref.ref(hidden := leaf * 2)
        value = linear_logprobs(hidden, weight, target, entropy=True).entropy.sum()
        value.backward()
        del hidden
        assert seen() is None and not value.isnan()
    outs = []
    for i in range(ROUNDS):
        leaf, weight, target = operands(i)
        hidden = leaf * 2  # none that its own gradient's accumulation would keep
        out = linear_loss(hidden, weight, target, losses.cross_entropy(), metrics=[metrics.entropy()])
        loss, part = out.loss, float(out.parts["cross_entropy"])
        loss.backward()
        with torch.no_grad():
            loss /= 4
        assert float(out.parts["cross_entropy"]) == part
        seen = weakref.ref(hidden)
        del hidden
        assert seen() is None
        outs.append((out, float(loss.detach()), float(out.metrics["entropy"].value)))
    assert replay.REPLAYS
    for out, loss, entropy in outs:
        assert (float(out.loss.detach()), float(out.metrics["entropy"].value)) == (loss, entropy)


def test_without_gradients(on_cpu: None) -> None:
    def once(i: int) -> list[Tensor | None]:
        hidden, weight, target = operands(i)
        with torch.no_grad():
            alone = linear_logprobs(hidden, weight, target)
        wanted = linear_logprobs(hidden, weight, target)
        assert not alone.requires_grad and wanted.requires_grad
        return [alone, *torch.autograd.grad(wanted.sum(), (hidden, weight))]

    assert_replayed(once, expected_tapes=2)


def test_a_tape_that_may_not_launch_is_not_used(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where somebody has set a hook, launches are Triton's again."""

    def once(i: int) -> list[Tensor | None]:
        hidden, weight, target = operands(i)
        return outcome(linear_cross_entropy(hidden, weight, target), hidden, weight)

    for i in range(ROUNDS):
        once(i)
    (known,) = replay.REPLAYS.values()
    monkeypatch.setattr(known.tape, "checks", (lambda: False,))
    monkeypatch.setattr(known.tape, "steps", None)
    once(0)


FOREIGN = torch.ones(4)
REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "a number is asked for": lambda x: x * float(x.sum()),
    "chance": lambda x: x + torch.rand(4),
    "a tensor from elsewhere": lambda x: x + FOREIGN,
    "a size that depends on values": lambda x: x[x > 0],
    "what somebody refuses": lambda x: recording.refuse("so"),
}


@pytest.mark.parametrize("function", REFUSED.values(), ids=list(REFUSED))
def test_not_recorded(function: Callable[[Tensor], Any]) -> None:
    x = torch.ones(4)
    with Recorder([x]) as recorder:
        function(x)
    assert recorder.failure is not None


def test_inputs_that_overlap_are_not_recorded() -> None:
    x = torch.ones(6)
    assert Recorder([x[:4], x[2:]]).failure is not None
    assert Recorder([x[:3], x[3:]]).failure is None


def test_memory_is_let_go_and_written_in_place() -> None:
    """Of what is made on the way only what is asked for stays; addresses that are used again are told apart."""

    def function(x: Tensor) -> Tensor:
        for _ in range(3):
            y = torch.empty(1000)
            y.copy_(x).add_(1)
            x = torch.stack([y, y * 2])[1].clone()
            del y
        return x

    with Recorder([given := torch.arange(1000.0)]) as recorder:
        result = function(given)
    place = recorder.place(result)
    recorded = recorder.tape({place.slot})
    other = torch.randn(1000)
    held = recorded([other])
    assert torch.equal(place.tensor(held), function(other))
    assert [i for i, value in enumerate(held) if value is not None] == [place.slot]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(1, 5000)), max_size=20))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_blocks_in_use_share_no_memory(drawn: list[tuple[int, int, int]]) -> None:
    ordered = sorted(drawn)
    blocks = {slot: (first, first + steps, size) for slot, (first, steps, size) in enumerate(ordered)}
    starts, whole = packed(blocks)
    assert all(start % ALIGNMENT == 0 for start in starts.values()) and starts.keys() == blocks.keys()
    for (a, (first_a, last_a, size_a)), (b, (first_b, last_b, size_b)) in itertools.combinations(blocks.items(), 2):
        apart = last_a < first_b or last_b < first_a
        assert apart or starts[a] + size_a <= starts[b] or starts[b] + size_b <= starts[a]
    assert whole == max((starts[slot] + size for slot, (_, _, size) in blocks.items()), default=0)


def test_memory_of_kernels_alone_is_one_allocation() -> None:
    """What is launched reads and writes the same numbers there; what is asked for has memory of its own."""

    then, now = 5, 7

    def double(to: int, stream: int, source: int) -> None:
        assert stream in (then, now)
        into, read = (ctypes.cast(at, ctypes.POINTER(ctypes.c_float)) for at in (to, source))
        for i in range(4):
            into[i] = 2 * read[i]

    def function(x: Tensor) -> Tensor:
        for _ in range(3):
            y = torch.empty(4)
            given = y.data_ptr(), then, x.data_ptr()
            double(*given)
            if recording.RECORDING.recorder is not None:
                what = recording.Launched(double, given, 1, lambda: now)
                recording.RECORDING.recorder.launched(what, [0, 2], [], lambda: True)
            made.append(x)
            x = y
        return x

    made: list[Tensor] = []
    with Recorder([first := torch.arange(4.0)]) as recorder:
        place = recorder.place(function(first))
    tape = recorder.tape({place.slot})
    assert {place.slot for place in tape.shared.values()} == {4} and len(tape.steps) == 5
    given = torch.randn(4)
    assert torch.equal(place.tensor(tape([given])), given * 8)
    # what is asked for later stays, and nothing beside it
    tape = recorder.tape({place.slot}, {1})
    held = tape([given])
    assert torch.equal(tape.memory(tape.part(held, [1]), [1])[1], given * 2) and tape.shared[1].slot == 4
    assert torch.equal(place.tensor(held), given * 8) and held[tape.shared[2].slot] is None and held[4].nbytes == 16


@pytest.mark.parametrize("parts", [1, 2])
def test_memory_has_the_form_that_operations_take(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A view of another dtype takes as long as a launch; where operations differ it is as it was made."""

    def function(x: Tensor) -> Tensor:
        values = torch.empty(8, 6, dtype=torch.int32).view(torch.float32)
        for some in values.split(8 // parts):
            torch.mm(x[: len(some)], x.t()[:, :6], out=some)
        return values * 2

    with Recorder([given := torch.randn(8, 8)]) as recorder:
        place = recorder.place(function(given))
    tape = recorder.tape({place.slot})
    other, made_in, make = torch.randn(8, 8), list[torch.dtype](), torch.empty_strided
    monkeypatch.setattr(torch, "empty_strided", lambda *a, **k: made_in.append(k["dtype"]) or make(*a, **k))
    found = place.tensor(tape([other]))
    monkeypatch.undo()
    torch.testing.assert_close(found, function(other), rtol=0, atol=0)
    assert made_in == [torch.float32 if parts == 1 else torch.int32]


class Described:
    """What stands for a tensor descriptor."""

    def __init__(self, base: Tensor):
        self.base, self.block_shape = base, [4]


def test_what_was_recorded_of_tensors_is_let_go() -> None:
    given = list[Any]()
    x = torch.ones(4)
    with Recorder([x]) as recorder:
        words = Described(x[1:]), "then", x[2:].data_ptr()
        launched = recording.Launched(lambda *words: given.extend(words), words, 1, lambda: 7)
        recorder.launched(launched, [2], [0], lambda: True)
    template = Template({"a": [x, None]}, recorder.place)
    del launched, words
    tape, seen = recorder.tape({0}), weakref.ref(x)
    del x
    assert seen() is None
    held = tape([y := torch.arange(4.0)])
    descriptor, stream, address = given
    assert type(descriptor) is Described and descriptor.block_shape == [4] and stream == 7
    assert descriptor.base.data_ptr() + 4 == address == y.data_ptr() + 8 and template.build(held)["a"][0] is y
    assert not hasattr(template, "place")


@pytest.mark.parametrize("first", [0, 2, 3])
def test_checkpoints(first: int, on_cpu: None) -> None:
    """A checkpoint compares what the forward pass saves with what the one in backward does, whichever is replayed."""

    def region(*given: Tensor) -> Tensor:
        return linear_cross_entropy(*given).square().exp()

    def once(i: int) -> list[Tensor | None]:
        hidden, weight, target = operands(i)
        given = hidden.detach().view(2, 15, 12).requires_grad_(), weight, target.view(2, 15)
        outcome(linear_cross_entropy(*given), *given[:2])
        return outcome(checkpoint(region, *given, use_reentrant=False), *given[:2]) if i >= first else []

    assert_replayed(once)


def test_calls_within_a_backward_are_a_kind_of_their_own(on_cpu: None) -> None:
    """Their plan leaves gradients to a backward, which may never come."""
    for i in range(ROUNDS):
        given = operands(i)
        outcome(linear_cross_entropy(*given), *given[:2])
        checkpoint(linear_cross_entropy, *given, use_reentrant=True).backward()
    assert sorted(known.plan.schedule for known in replay.REPLAYS.values()) == ["forward", "loss only", "recompute"]


def test_a_tensor_is_no_other_argument(on_cpu: None) -> None:
    options = [{"normalizer": torch.tensor(5.0)}] * 3 + [{"upstream": torch.tensor(5.0)}]

    def once(i: int) -> list[Tensor | None]:
        hidden, weight, target = operands(0)
        return outcome(linear_cross_entropy(hidden, weight, target, **options[i]), hidden, weight)

    assert_replayed(once)


def test_values_of_tokens_that_are_moved_are_not_replayed(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "check_own_matmuls", lambda *given: None)

    def once(i: int) -> list[Tensor | None]:
        hidden, weight, target = operands(i)
        target[::3] = -100
        return outcome(linear_logprobs(hidden, weight, target, skip_ignored=True).sum(), hidden, weight)

    assert_replayed(once, expected_tapes=0)


def test_results_share_nothing(on_cpu: None) -> None:
    for i in range(ROUNDS):
        hidden, weight, target = operands(i)
        out = linear_loss(hidden, weight, target, losses.cross_entropy())
        assert not out.metrics
        out.metrics["mine"] = MetricValue()
    assert replay.REPLAYS


def test_hooks_are_not_recorded(on_cpu: None) -> None:
    """Neither what they do, nor that they are there."""
    seen = list[Tensor]()

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor * 1

    for i in range(ROUNDS):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outcome(linear_cross_entropy(*(given := operands(i))), *given[:2])
    assert seen and not replay.REPLAYS


def test_what_has_no_kernel_finds_no_mode_around_it(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even after a first call that failed."""
    monkeypatch.setattr(evaluate, "refuse", recording.refuse)
    whole, modes = evaluate.values_of, list[int]()

    def watched(*given: Any) -> Any:
        modes.append(_len_torch_dispatch_stack())
        if len(modes) == 1:
            raise MemoryError
        return whole(*given)

    monkeypatch.setattr(evaluate, "values_of", watched)
    hidden, weight, target = operands(0)
    with pytest.raises(MemoryError):
        linear_cross_entropy(hidden, weight, target)
    for kind in replay.SEEN:
        replay.SEEN[kind] = 1  # as if another thread had not come so far
    for _ in range(ROUNDS):
        linear_cross_entropy(hidden, weight, target)
    assert modes == [0] * (1 + ROUNDS) and not replay.REPLAYS
    assert all(times > replay.ATTEMPTS for times in replay.SEEN.values())
