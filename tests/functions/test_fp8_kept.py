"""A weight's copy in e4m3 that callers keep: it belongs to one matrix, and no write to that goes unnoticed."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from cases import PLACES, Place
from tiers import Turn, crossed
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from chunked_head import VocabParallel, linear_cross_entropy, linear_logprobs, quantise
from chunked_head.stores import backend_of
from chunked_head.stores.quantised import quantise_

VOCAB, WIDTH = 203, 64


def operands(place: Place, dtype: torch.dtype = torch.bfloat16, vocab: int = VOCAB) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(5)
    hidden, weight = (torch.randn(n, WIDTH, generator=made) for n in (24, vocab))
    target = torch.randint(0, vocab, (24,), generator=made)
    return hidden.to(dtype).to(place.device), (0.2 * weight).to(dtype).to(place.device), target.to(place.device)


def of_call(place: Place, **options: Any) -> Callable[..., Tensor]:
    return functools.partial(linear_cross_entropy, precision="fp8", backend=place.backend, **options)


# ---- one matrix


@pytest.mark.parametrize("place", PLACES)
def test_a_copy_of_another_matrix(place: Place) -> None:
    """In the same memory: its transpose, every second row, other rows, another vocabulary."""
    hidden, big, target = operands(place, vocab=4 * WIDTH)
    square, half = big[:WIDTH], big[: 2 * WIDTH]
    target %= WIDTH
    call = of_call(place)
    for kept_of, weight in ((square.t(), square), (big[::2], half), (big[WIDTH:], big[: 3 * WIDTH]), (half, square)):
        kept = quantise(kept_of, backend=place.backend)
        with pytest.raises(ValueError, match="fp8_weight was made of another weight"):
            call(hidden, weight, target, fp8_weight=kept)
    weight = torch.nn.Parameter(square.clone())
    kept = quantise(weight, backend=place.backend)
    call(hidden, weight, target, fp8_weight=kept)
    with torch.no_grad():
        weight.set_(half[WIDTH:])
    with pytest.raises(ValueError, match="fp8_weight was made of another weight"):
        call(hidden, weight, target, fp8_weight=kept)
    weight.data = square.clone()
    with pytest.raises(ValueError, match="fp8_weight was made of another weight"):
        call(hidden, weight, target, fp8_weight=kept)


@crossed(place=PLACES, rubbish=[1e4, torch.nan, torch.inf])
def test_rows_that_stand_for_no_id(place: Place, rubbish: float) -> None:
    """Decide no scale: the same bits as a copy that the call makes."""
    hidden, weight, target = operands(place, vocab=320)
    target %= 300
    weight[300:] = rubbish
    call = of_call(place, vocab_size=300)
    kept = quantise(weight, vocab_size=300, backend=place.backend)
    assert len(kept.matrix.values) == 300
    found = call(hidden, weight, target, fp8_weight=kept)
    assert found.isfinite() and torch.equal(found, call(hidden, weight, target))
    weight.data[310:] += 1.0  # nothing that counts
    assert torch.equal(call(hidden, weight, target, fp8_weight=kept), found)
    for other, options in ((quantise(weight, backend=place.backend), {"vocab_size": 300}), (kept, {})):
        with pytest.raises(ValueError, match=r"was made of \d+ rows.*quantise\(weight, vocab_size="):
            of_call(place, **options)(hidden, weight, target, fp8_weight=other)
    for wrong in (0, 321):
        with pytest.raises(ValueError, match="vocab_size"):
            quantise(weight, vocab_size=wrong)


def of_rank(rank: int, place: str) -> dict[str, Tensor]:
    """The loss of one of two ranks with 64 rows, 61 of them for ids: by copies that the call makes, and kept ones."""
    hidden, whole, target = operands(Place("torch", "cpu"), vocab=64)
    whole[61:], target = torch.nan, target % 61
    own, found = whole[32 * rank : 32 * (rank + 1)].clone(), {}
    given = {"vocab_size": 61, "parallel": VocabParallel()}
    plain = quantise(own, **given, backend="torch")  # type: ignore[arg-type]
    for name, copy in (("made", None), ("kept", plain)):
        found[name] = of_call(Place("torch", "cpu"), **given)(hidden, own, target, fp8_weight=copy)
    mesh = init_device_mesh("cpu", (2,))
    sharded = DTensor.from_local(own, mesh, [Shard(0)])
    kept = quantise(sharded, vocab_size=61, backend="torch")
    assert len(kept.matrix.values) == (32, 29)[rank]
    found["sharded"] = of_call(Place("torch", "cpu"), vocab_size=61)(hidden, sharded, target, fp8_weight=kept)
    own.data.mul_(1.0 + rank)  # rank 1's is written
    found["written"] = of_call(Place("torch", "cpu"), **given)(hidden, own, target, fp8_weight=plain)
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="processes on a CPU")
def test_ranks_that_share_the_vocabulary(tmp_path: Path) -> None:
    """Know which of their rows stand for ids; a write on one of them is seen on all."""
    for found in ranks.run(of_rank, 2, tmp_path):
        assert found["made"].isfinite()
        assert torch.equal(found["kept"], found["made"]) and torch.equal(found["sharded"], found["made"])
        assert found["written"].isnan()


# ---- writes that no version shows


def by_data(weight: Tensor) -> None:
    weight.data.mul_(1.01)


def one_number(weight: Tensor) -> None:
    weight.data[17, 3] += 0.25


def by_storage(weight: Tensor) -> None:
    weight.untyped_storage().copy_((weight * 2.0).untyped_storage())


def by_dlpack(weight: Tensor) -> None:
    torch.from_dlpack(weight.detach()).neg_()


def of_two_rows(weight: Tensor) -> None:
    weight.data[[4, 150]] = weight.data[[150, 4]]


def of_two_columns(weight: Tensor) -> None:
    weight.data[:, [0, 5]] = weight.data[:, [5, 0]]


WRITES = [by_data, one_number, by_storage, by_dlpack, of_two_rows, of_two_columns]
OPTIONS: list[dict[str, Any]] = [{}, {"chunk_tokens": 8}, {"softcap": 20.0, "label_smoothing": 0.1},
                                 {"reduction": "none", "chunk_tokens": 12}, {"temperature": 0.5}]  # fmt: skip


def are_alike(some: list[Tensor], others: list[Tensor]) -> bool:
    """Equal to the bit; on a GPU within a rounding of the largest number, since a kernel that makes a copy and one that
    reads its weight alone sum a row's products with the mean in another order."""
    if not some[0].is_cuda:
        return all(torch.equal(*pair) for pair in zip(some, others, strict=True))
    roundings = [torch.finfo(b.dtype).eps * float(b.abs().max()) for b in others]
    return all(float((a - b).abs().max()) <= eps for a, b, eps in zip(some, others, roundings, strict=True))


@crossed(place=PLACES, write=WRITES, options=Turn(OPTIONS), dtype=[torch.bfloat16, torch.float16])
def test_a_write_that_no_version_shows(
    place: Place, write: Callable[[Tensor], None], options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Makes the call nan: its loss and all gradients. A copy made anew is right."""
    hidden, weight, target = operands(place, dtype)
    weight.requires_grad_()
    kept = quantise(weight, backend=place.backend)
    function = linear_cross_entropy
    if "temperature" in options:
        function, options = linear_logprobs, {"entropy": True} | options

    def call(**more: Any) -> list[Tensor]:
        h, w = hidden.detach().requires_grad_(), weight
        out = function(h, w, target, precision="fp8", backend=place.backend, **options, **more)
        first = out if isinstance(out, Tensor) else out.logprobs + out.entropy
        return [first.detach(), *torch.autograd.grad(first.sum(), (h, w))]

    right = call(fp8_weight=kept)
    assert are_alike(right, call())
    version = weight._version
    write(weight)
    assert weight._version == version
    loss, *grads = call(fp8_weight=kept)
    assert loss.isnan().all() and all(grad.isnan().any() for grad in grads)
    assert grads[0].isnan().all(1).sum() == len(hidden)
    anew = call(fp8_weight=quantise(weight, backend=place.backend))
    assert anew[0].isfinite().all() and are_alike(anew, call())


@pytest.mark.parametrize("place", PLACES)
def test_a_parameter_in_a_buffer(place: Place) -> None:
    """Megatron's and DeepSpeed's layout: ``param.data`` is a view of memory that others write to."""
    hidden, weight, target = operands(place)
    buffer, param = torch.zeros(2, VOCAB * WIDTH, dtype=weight.dtype, device=place.device), torch.nn.Parameter(weight)
    buffer[1].copy_(weight.view(-1))
    param.data = buffer[1].view(VOCAB, WIDTH)
    kept, call = quantise(param, backend=place.backend), of_call(place)
    assert call(hidden, param, target, fp8_weight=kept).isfinite()
    buffer[0].fill_(3.0)
    assert call(hidden, param, target, fp8_weight=kept).isfinite()
    buffer[1].mul_(0.5)
    assert call(hidden, param, target, fp8_weight=kept).isnan()


@pytest.mark.parametrize("place", PLACES)
def test_between_forward_and_backward(place: Place) -> None:
    """Where backward makes the logits again, with the same copy."""
    hidden, weight, target = operands(place)
    hidden.requires_grad_()
    weight.requires_grad_()  # of a frozen one the forward pass makes the gradient
    loss = of_call(place, reduction="none")(hidden, weight, target, fp8_weight=quantise(weight, backend=place.backend))
    by_data(weight)
    loss.sum().backward()
    assert hidden.grad is not None and hidden.grad.isnan().all()


@crossed(place=PLACES, dtype=[torch.bfloat16, torch.float16], stored=[torch.float32, torch.bfloat16])
def test_no_false_alarm(place: Place, dtype: torch.dtype, stored: torch.dtype) -> None:
    """Of a weight that autocast casts, of inference tensors, and of ``weight.data`` after many steps."""
    hidden, weight, target = operands(place, stored)
    for _ in range(3):
        weight.add_(0.0)
    kept = quantise(weight, backend=place.backend)
    for given in (weight, weight.data, weight.detach(), torch.nn.Parameter(weight)):
        with torch.autocast(place.device, dtype=dtype):
            found = of_call(place)(hidden, given, target, fp8_weight=kept)
            assert found.isfinite()
    by_data(weight)
    with torch.autocast(place.device, dtype=dtype):
        assert of_call(place)(hidden, weight, target, fp8_weight=kept).isnan()
    with torch.inference_mode():
        own = weight.clone()
        kept, call = quantise(own, backend=place.backend), of_call(place)
        with torch.autocast(place.device, dtype=dtype):
            assert call(hidden, own, target, fp8_weight=kept).isfinite()
            own.mul_(1.5)
            assert call(hidden, own, target, fp8_weight=kept).isnan()


@crossed(place=PLACES, dtype=[torch.bfloat16, torch.float16], width=[48, 1024])
def test_fingerprints_are_the_same_everywhere(place: Place, dtype: torch.dtype, width: int) -> None:
    """By torch operations and by our kernel; another for whatever differs, and for two numbers exchanged."""
    matrix = torch.randn(70, width, device=place.device).to(dtype)

    def prints(matrix: Tensor, function: Callable[..., None]) -> Tensor:
        out = torch.zeros(len(matrix), dtype=torch.int32, device=matrix.device)
        function(None, matrix, prints=out)
        return out

    ours = backend_of(place.backend, matrix.device).quantise_
    found = prints(matrix, ours)
    assert torch.equal(found, prints(matrix, quantise_)) and len(found.unique()) == 70
    for i in range(0, width, 7):
        other = matrix.clone()
        other[i % 70, i] = -other[i % 70, i]
        other[(i + 1) % 70] = other[(i + 1) % 70].roll(1)
        differs = (prints(other, ours) != found).nonzero()[:, 0].tolist()
        assert sorted({i % 70, (i + 1) % 70}) == differs


@pytest.mark.gpu
def test_replayed_writes() -> None:
    """A CUDA graph that steps the weight after calls on its copy: its replay finds it written."""
    place = Place("triton", "cuda")
    hidden, weight, target = operands(place)
    kept, call = quantise(weight), of_call(place)
    call(hidden, weight, target, fp8_weight=kept)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call(hidden, weight, target, fp8_weight=kept)
    graph.replay()
    assert found.isfinite()
    weight.data.mul_(1.01)
    graph.replay()
    assert found.isnan()


@pytest.mark.gpu
def test_the_fingerprint_costs_next_to_nothing() -> None:
    """Below half a percent of a call of 8192 tokens x 1024 x 151936, 12 ms on an H100: it is made where the call reads
    the weight anyway."""
    weight = torch.randn(151936, 1024, device="cuda").bfloat16()
    mean, dots = torch.randn(1024, device="cuda"), torch.empty(151936, device="cuda")
    prints, ours = torch.zeros(151936, dtype=torch.int32, device="cuda"), backend_of("triton", weight.device).quantise_
    ours(None, weight, prints=prints)
    best = {}
    for name, expected in (("plain", None), ("compared", prints)) * 5:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        for _ in range(5):
            ours(None, weight, mean, dots, expected=expected)
        events[0].record()
        for _ in range(50):
            ours(None, weight, mean, dots, expected=expected)
        events[1].record()
        torch.cuda.synchronize()
        best[name] = min(best.get(name, 1e9), events[0].elapsed_time(events[1]) / 50)
    assert best["compared"] - best["plain"] <= 0.060, best
