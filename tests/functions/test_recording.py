"""Sweeps that run from a recording: the same bits as those that run as ever, or no recording."""

import functools
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from cases import GPU, TRITON, Place
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton", reason="recorded are launches of Triton's kernels")

from chunked_head.kernels.common import recording as steps
from chunked_head.kernels.gradients import launch as gradients
from triton.runtime.interpreter import GridExecutor

from chunked_head import linear_cross_entropy, linear_logprobs, linear_loss, losses, metrics, quantise
from chunked_head.call import recording, run, spec
from chunked_head.core.memory import RECORDERS, empty, recorder
from chunked_head.stores import matmul

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")]
PLACES = [*TRITON, *(place for place in GPU if place.values[0].backend == "triton")]
LOSS = losses.grpo() + 0.04 * losses.kl_to_reference() + 1e-4 * losses.z_loss()
METRICS = [metrics.entropy(), metrics.accuracy()]


class Given(NamedTuple):
    """Tensors of a call."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    batch: dict[str, Tensor]


def made(seed: int, device: str, tokens: int = 24, hidden: int = 32, vocab: int = 70) -> Given:
    draw = torch.Generator().manual_seed(seed)
    normal = functools.partial(torch.randn, generator=draw)
    operands = [normal(rows, hidden).bfloat16().to(device).requires_grad_() for rows in (tokens, vocab)]
    target = torch.randint(vocab, (tokens,), generator=draw)
    target[seed::7] = -100
    batch = {name: -normal(tokens).abs() - 3 for name in ("old_logprobs", "ref_logprobs")}
    batch["advantages"] = normal(tokens)
    return Given(*operands, target.to(device), {name: value.to(device) for name, value in batch.items()})


def cross_entropy(given: Given, **options: Any) -> Tensor:
    return linear_cross_entropy(*given[:3], backend="triton", **options)


def policy(given: Given, **options: Any) -> Tensor:
    out = linear_loss(*given[:3], LOSS, batch=given.batch, metrics=METRICS, backend="triton", **options)
    return torch.stack([out.loss, *out.parts.values(), *[value.value for value in out.metrics.values()]])


def logprobs(given: Given, **options: Any) -> Tensor:
    return linear_logprobs(*given[:3], backend="triton", **options)


def without_gradient(call: Callable[..., Tensor], given: Given, **options: Any) -> Tensor:
    with torch.no_grad():
        return call(given, **options)


def frozen(which: int, call: Callable[..., Tensor], given: Given, **options: Any) -> Tensor:
    given[which].requires_grad_(False)
    return call(given, **options)


def weighted(given: Given) -> Tensor:
    return cross_entropy(given, class_weights=given.weight.detach()[:, 0].float().abs())


def smoothed(given: Given) -> Tensor:
    return linear_loss(
        *given[:3], losses.cross_entropy(label_smoothing=0.1) - 0.1 * losses.entropy(), backend="triton"
    ).loss


def at_temperatures(given: Given) -> Tensor:
    return policy(given, temperature=given.batch["advantages"].abs() + 0.5)


def into_a_buffer(given: Given) -> Tensor:
    given.weight.main_grad = torch.ones_like(given.weight, dtype=torch.float32)
    return cross_entropy(given, accumulate_into="main_grad")


def with_bias(given: Given) -> Tensor:
    return cross_entropy(given, bias=given.weight.detach()[:, 1].contiguous())


def strided(given: Given) -> Tensor:
    apart = torch.cat([given.hidden, given.hidden], 1)[:, :32]
    return cross_entropy(given._replace(hidden=apart))


def fp8(call: Callable[..., Any], given: Given, kept: bool = False, **options: Any) -> Any:
    options["fp8_weight"] = quantise(given.weight, backend="triton") if kept else None
    return call(given, precision="fp8", **options)


HALF_SUMS = {"chunk_tokens": 16, "accumulate_dtype": torch.bfloat16}
CALLS: dict[str, Callable[[Given], Tensor]] = {
    "plain": cross_entropy, "policy": policy, "logprobs": logprobs, "smoothed": smoothed, "strided": strided,
    "temperatures": at_temperatures, "bias": with_bias, "buffer": into_a_buffer,
    "chunks": functools.partial(cross_entropy, **HALF_SUMS),
    "chunks of policy": functools.partial(policy, **HALF_SUMS),
    "shift": functools.partial(cross_entropy, shift=1),
    "softcap": functools.partial(policy, softcap=5.0, logit_scale=0.5),
    "evaluated": functools.partial(without_gradient, policy),
    "evaluated logprobs": functools.partial(without_gradient, logprobs),
    "entropies": functools.partial(logprobs, entropy=True, argmax=True),
    "frozen head": functools.partial(frozen, 1, policy), "frozen rows": functools.partial(frozen, 0, cross_entropy),
    "unreduced": functools.partial(cross_entropy, reduction="none"),
    "logprobs of a frozen head": functools.partial(frozen, 1, logprobs, chunk_tokens=16),
    "unreduced, frozen head": functools.partial(frozen, 1, cross_entropy, reduction="none"),
    "fp8": functools.partial(fp8, cross_entropy),
    "fp8 chunks": functools.partial(fp8, cross_entropy, kept=True, **HALF_SUMS),
    "fp8 policy": functools.partial(fp8, policy, kept=True),
    "fp8 evaluated": functools.partial(without_gradient, functools.partial(fp8, logprobs)),
}  # fmt: skip
ODD = {"tokens": 13, "hidden": 24, "vocab": 77}
ONE_TILE = {"tokens": 40, "hidden": 32, "vocab": 64}


def results(call: Callable[[Given], Tensor], given: Given) -> list[Tensor]:
    found = call(given)
    found = torch.stack([*found]) if isinstance(found, tuple) else found
    if found.requires_grad:
        found.flatten()[: None if found.dim() and call in (CALLS["unreduced"],) else 1].sum().backward()
    buffer = getattr(given.weight, "main_grad", None)
    return [one for one in (found.detach(), given.hidden.grad, given.weight.grad, buffer) if one is not None]


def multiply(a: Tensor, b: Tensor, out: Tensor, is_first: bool) -> None:
    """``matmul.multiply`` with fp32 sums, which torch has on GPUs only."""
    product = a.float() @ b.float()
    out.copy_(product) if is_first else out.add_(product)
    if (listening := recorder()) is not None:
        listening.record_call(multiply, a, b, out, is_first, written_tensors=(out,))


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No Specs of earlier tests. Products of 16-bit operands run as on a GPU, in one of BLAS's."""
    spec.SPECS.clear()
    if not torch.cuda.is_available():
        monkeypatch.setattr(matmul, "summed_by_blas", lambda a, b, out: True)
        monkeypatch.setattr(matmul, "multiply", multiply)
    yield
    spec.SPECS.clear()
    assert not RECORDERS


def recordings() -> list[Any]:
    return [recorded for one in spec.SPECS.values() for _, recorded in one.recordings.values()]


def as_ever(call: Callable[[Given], Tensor], given: Given) -> list[Tensor]:
    """Results of a call whose sweep is not recorded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "is_recordable", lambda *call: False)
        return results(call, given)


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("name", "sizes"),
    [*((name, {}) for name in CALLS), *itertools.product(("plain", "policy", "chunks"), (ODD, ONE_TILE))], ids=str,
)  # fmt: skip
def test_the_same_bits(name: str, sizes: dict[str, int], place: Place) -> None:
    call, held = CALLS[name], []
    for seed in range(4):
        given = made(seed, place.device, **sizes)
        held.append([given, torch.empty(seed * 100 + 1, device=place.device)])  # other addresses
        expected = as_ever(call, made(seed, place.device, **sizes))
        assert_equal(results(call, given), expected)
    assert [one is not None for one in recordings()] == [True]


def last_recorded(call: Callable[[Given], Tensor], device: str, **sizes: int) -> None:
    """Three calls, after which a sweep of their kind runs from a recording."""
    for seed in range(3):
        results(call, made(seed, device, **sizes))
    assert [one is not None for one in recordings()] == [True]


def runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What recordings have returned, from here on."""
    found: list[Any] = []
    original = steps.Recording.replay

    def watched(self: Any, inputs: Any) -> Any:
        found.append(original(self, inputs))
        return found[-1]

    monkeypatch.setattr(steps.Recording, "replay", watched)
    return found


@pytest.mark.parametrize("place", PLACES)
def test_another_kind_of_tensor_is_another_sweep(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alignment, strides, and numbers that a kernel is given."""
    last_recorded(policy, place.device)
    found = runs(monkeypatch)
    given = made(7, place.device)
    apart = torch.empty(24 * 32 + 1, dtype=torch.bfloat16, device=place.device)[1:].view(24, 32)
    apart.copy_(given.hidden.detach())
    for other in (apart.requires_grad_(), given.hidden.detach().t().contiguous().t().requires_grad_()):
        assert_equal(
            results(policy, given._replace(hidden=other)), as_ever(policy, given._replace(hidden=fresh_leaf(other)))
        )
        assert not found
    results(policy, made(6, place.device))
    assert len(found) == 1
    for options in ({"logit_scale": 0.7}, {"temperature": 1.3}, {"softcap": 3.0}, {"chunk_tokens": 8}):
        call = functools.partial(policy, **options)
        assert_equal(results(call, made(8, place.device)), as_ever(call, made(8, place.device)))
        assert len(found) == 1


def fresh_leaf(tensor: Tensor) -> Tensor:
    """The same memory without a gradient."""
    return tensor.detach().requires_grad_()


@pytest.mark.parametrize("place", PLACES)
def test_a_number_that_changes_is_never_recorded(place: Place) -> None:
    for step in range(4):
        linear_loss(*made(step, place.device)[:3], losses.focal(gamma=1.0 + step), backend="triton")
    assert recordings() == [recording.NOT_YET]


@pytest.mark.parametrize("place", PLACES)
def test_two_backwards(place: Place) -> None:
    """The first hands over the recording's gradients, the second computes the logits again."""
    last_recorded(cross_entropy, place.device)
    given, other = made(5, place.device), made(5, place.device)
    loss = cross_entropy(given)
    loss.backward(retain_graph=True)
    first = [given.hidden.grad.clone(), given.weight.grad.clone()]
    assert_equal(first, as_ever(cross_entropy, other)[1:])
    loss.backward()
    for one, once in zip((given.hidden.grad, given.weight.grad), first, strict=True):
        torch.testing.assert_close(one, 2 * once, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("place", PLACES)
def test_threads_share_recordings(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some record while others run."""
    lock, original = threading.Lock(), GridExecutor.__call__

    def one_at_a_time(*args: Any, **kwargs: Any) -> None:
        with lock:
            original(*args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", one_at_a_time)  # as the interpreter has to be run
    expected = [as_ever(policy, made(seed, place.device)) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda at: results(policy, made(at % 4, place.device)), range(24)))
    for at, one in enumerate(found):
        assert_equal(one, expected[at % 4])


@pytest.mark.parametrize("place", PLACES)
def test_results_have_memory_of_their_own(place: Place) -> None:
    """What an earlier call has returned stays as it is, and nothing holds the tensors of a call."""
    last_recorded(policy, place.device)
    given = made(5, place.device)
    found = results(policy, given)
    before = [one.clone() for one in found]
    results(policy, made(6, place.device))
    assert_equal(found, before)
    watched = weakref.ref(given.hidden)
    del given, found
    gc.collect()
    assert watched() is None


@pytest.mark.parametrize("place", PLACES)
def test_a_hook_of_triton_sees_every_launch(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    last_recorded(cross_entropy, place.device)
    found = runs(monkeypatch)
    monkeypatch.setattr(steps.Recording, "usable", lambda self: False)
    assert_equal(results(cross_entropy, made(5, place.device)), as_ever(cross_entropy, made(5, place.device)))
    assert found == [None]


def swept(device: str) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], list[Tensor]]]:
    """A sweep in small: two launches and memory."""
    inputs = [torch.arange(64.0, device=device), torch.tensor(3.0, device=device)]

    def sweep(given: Sequence[Tensor]) -> list[Tensor]:
        source, factor = given
        first = empty(2, 32, dtype=torch.float32, device=source.device)
        gradients.scale(first[1], source[16:48], factor)
        out = empty(32, dtype=torch.float32, device=source.device)
        gradients.scale(out, first[1], factor)
        return [out]

    return inputs, sweep


@pytest.mark.parametrize("place", PLACES)
def test_a_list_of_steps(place: Place) -> None:
    inputs, sweep = swept(place.device)
    for _ in range(2):
        sweep(inputs)  # compiles
    with steps.recording(inputs) as listening:
        found = sweep(inputs)
    made = listening.end(found)
    assert made is not None
    others = [torch.randn(70, device=place.device)[4:68], torch.tensor(-2.0, device=place.device)]
    (out,) = made.replay(others)
    torch.testing.assert_close(out, others[0][16:48] * 4)


SPOILT: dict[str, Callable[[list[Tensor], list[Tensor]], Any]] = {
    "an operator writes to an input": lambda inputs, found: inputs[0].add_(1),
    "an operator writes to a result": lambda inputs, found: found[0].zero_(),
    "an operator makes a result": lambda inputs, found: found.append(found[0] + 1),
    "a result is a part": lambda inputs, found: found.append(found[0][1:]),
    "a launch reads what an operator has made": lambda inputs, found: gradients.scale(
        found[0], found[0] * 1.0, inputs[1]
    ),
    "a launch reads what is no input": lambda inputs, found: gradients.scale(
        found[0], found[0], torch.ones((), device=found[0].device)
    ),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("what", SPOILT)
def test_no_recording_where(what: str, place: Place) -> None:
    inputs, sweep = swept(place.device)
    sweep(inputs)
    with steps.recording(inputs) as listening:
        found = sweep(inputs)
        SPOILT[what](inputs, found)
    assert listening.end(found) is None


@pytest.mark.parametrize("place", PLACES)
def test_no_recording_where_inputs_overlap(place: Place) -> None:
    inputs, sweep = swept(place.device)
    with steps.recording([*inputs, inputs[0][10:20]]) as listening:
        found = sweep(inputs)
    assert listening.end(found) is None


@pytest.mark.parametrize("place", PLACES)
def test_the_plan_is_part_of_the_key(place: Place) -> None:
    """A checkpoint computes the forward pass again inside of backward, where gradients wait: another plan of equal
    tensors."""

    def checkpointed(given: Given) -> Tensor:
        def region(hidden: Tensor) -> Tensor:
            return cross_entropy(given._replace(hidden=hidden.sin())) * hidden.float().mean().exp()

        return checkpoint(region, given.hidden, use_reentrant=False)

    for seed in range(4):
        assert_equal(results(checkpointed, made(seed, place.device)), as_ever(checkpointed, made(seed, place.device)))
    assert [one is not None for one in recordings()] == [True, True]


@pytest.mark.parametrize("place", PLACES)
def test_the_first_of_streams_stores_where_others_add(place: Place) -> None:
    """Streams of equal sizes differ in nothing but that."""

    def streams(given: Given) -> Tensor:
        hidden, target = given.hidden.chunk(2), given.target.chunk(2)
        return linear_loss(hidden, given.weight, target, losses.cross_entropy(), backend="triton").loss

    for seed in range(4):
        assert_equal(results(streams, made(seed, place.device)), as_ever(streams, made(seed, place.device)))
    assert [one is not None for one in recordings()] == [True, True]
