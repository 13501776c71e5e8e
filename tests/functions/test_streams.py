"""Several streams of hidden states through one head: the oracle's sum of losses, and one gradient of the weight."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ranks
import torch
import torch.nn.functional as F
from budget import assert_within_budget
from cases import PLACES, Place
from oracle import reference
from oracle.reference import Term
from tiers import crossed, tier
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from chunked_head import TokenParallel, linear_loss, losses, metrics
from chunked_head.stores import store

VOCAB, HIDDEN, LINE, CHUNK = 61, 24, 20, 16
WEIGHTS, UPSTREAM = (1.0, 0.3, 0.1), 0.37
TERMS = [Term(1.0, "cross_entropy"), Term(1e-2, "z_loss")]


def made(dtype: torch.dtype, device: str = "cpu", count: int = 3) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Hidden states of each stream, weight, bias, target; the first line begins with tokens that do not count."""
    g = torch.Generator().manual_seed(7)
    hidden = [torch.randn(2, LINE, HIDDEN, generator=g).to(device, dtype).requires_grad_() for _ in range(count)]
    weight = torch.randn(VOCAB, HIDDEN, generator=g).mul(0.3).to(device, dtype).requires_grad_()
    bias = torch.randn(VOCAB, generator=g).mul(0.1).to(device, dtype).requires_grad_()
    target = torch.randint(VOCAB, (2, LINE), generator=g)
    target[0, :5] = -100
    return hidden, weight, bias, target.to(device)


def loss_of(terms: list[Term]) -> losses.Losses:
    return sum(term.coefficient * getattr(losses, term.kind)(**term.options) for term in terms)


def grads_of(*leaves: Tensor) -> list[Tensor]:
    found = [leaf.grad for leaf in leaves]
    assert all(grad is not None for grad in found)
    for leaf in leaves:
        leaf.grad = None
    return found


def oracle(dtype: torch.dtype, wide: torch.dtype, terms: list[Term], **options: Any) -> list[Tensor]:
    hidden, weight, bias, target = made(dtype)
    hidden = [states.detach().to(wide).requires_grad_() for states in hidden]
    weight, bias = (one.detach().to(wide).requires_grad_() for one in (weight, bias))
    total = torch.zeros((), dtype=wide)
    for i, (states, factor) in enumerate(zip(hidden, WEIGHTS, strict=True)):
        loss, _ = reference.linear_loss(states, weight, target, terms, bias=bias, shift=i + 1, **options)
        total = total + factor * loss
    (total * UPSTREAM).backward()
    return [total.detach(), *grads_of(weight, bias, *hidden)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["float32", "16 bits", "more chunks", "twice"])
def test_values_and_gradients(kind: str, place: Place) -> None:
    """bf16's dot products are wrong in the interpreter. ``twice``: a second backward makes the gradients anew."""
    half = torch.bfloat16 if place.device == "cuda" or place.backend == "torch" else torch.float16
    dtype = half if kind in ("16 bits", "more chunks") else torch.float32
    hidden, weight, bias, target = made(dtype, place.device)
    out = linear_loss(
        hidden, weight, target, loss_of(TERMS), bias=bias, shift=(1, 2, 3), stream_weights=WEIGHTS,
        chunk_tokens=CHUNK if kind == "more chunks" else LINE, backend=place.backend,
    )  # fmt: skip
    assert [stream.plan.schedule for stream in out.streams] == ["forward"] * 3
    assert {stream.plan.weight_accumulate for stream in out.streams} == {torch.float32}
    if kind == "twice":
        (out.loss * UPSTREAM).backward(retain_graph=True)
        once = grads_of(weight, bias, *hidden)
    (out.loss * UPSTREAM).backward()
    ours = [out.loss.detach(), *grads_of(weight, bias, *hidden)]
    truth, eager = (oracle(dtype, precision, TERMS) for precision in (torch.float64, dtype))
    for i, name in enumerate(["loss", "weight", "bias", *(f"hidden {i}" for i in range(3))]):
        precision = torch.promote_types(dtype, torch.float32) if name == "loss" else dtype
        assert_within_budget(ours[i], eager[i], truth[i], precision, name)
        if kind == "twice" and i:
            assert_within_budget(once[i - 1], eager[i], truth[i], dtype, f"{name}, of the first backward")


@pytest.mark.parametrize("chunk", [LINE * 2, CHUNK])
@pytest.mark.parametrize("kind", ["all wait", "one waits"])
def test_losses_that_wait_for_all_tokens(kind: str, chunk: int) -> None:
    """Gradients of all streams are made in backward where those of one are, since a chunk does not hold all tokens."""
    hidden, weight, _, target = made(torch.float64, count=2)
    g = torch.Generator().manual_seed(3)
    batch = {
        "advantages": torch.randn(2, LINE, generator=g).double(),
        "segments": torch.arange(2)[:, None].expand(2, LINE),
    }
    loss = [losses.gspo(), losses.gspo() if kind == "all wait" else losses.cross_entropy()]
    out = linear_loss(
        hidden, weight, target, loss, batch=batch, num_segments=2, shift=(1, 2), stream_weights=(1.0, 0.5),
        chunk_tokens=chunk,
    )  # fmt: skip
    waits = "recompute" if chunk == CHUNK else "forward"
    assert [stream.plan.schedule for stream in out.streams] == [waits, waits]
    alone = torch.autograd.grad(out.loss * UPSTREAM, hidden, retain_graph=True)
    (out.loss * UPSTREAM).backward()
    found = grads_of(weight, *hidden)
    torch.testing.assert_close(list(alone), found[1:])
    total = sum(
        factor * linear_loss(h, weight, target, one, batch=batch, num_segments=2, shift=shift).loss
        for h, one, shift, factor in zip(hidden, loss, (1, 2), (1.0, 0.5), strict=True)
    )
    (total * UPSTREAM).backward()
    torch.testing.assert_close([out.loss.detach(), *found], [total.detach(), *grads_of(weight, *hidden)])


def test_a_buffer_of_the_callers() -> None:
    hidden, weight, _, target = made(torch.float32, count=2)
    linear_loss(hidden, weight, target, losses.cross_entropy(), shift=(1, 2)).loss.backward()
    expected = grads_of(weight, *hidden)
    buffer = torch.ones(VOCAB, HIDDEN)
    linear_loss(hidden, weight, target, losses.cross_entropy(), shift=(1, 2), accumulate_into=buffer).loss.backward()
    assert weight.grad is None
    torch.testing.assert_close([buffer - 1, *(states.grad for states in hidden)], expected)


def test_what_takes_no_gradient() -> None:
    hidden, weight, _, target = made(torch.float32, count=2)
    frozen = [hidden[0].detach(), hidden[1]]
    linear_loss(frozen, weight.detach(), target, losses.cross_entropy()).loss.backward()
    (expected,) = torch.autograd.grad(linear_loss(hidden[1], weight, target, losses.cross_entropy()).loss, hidden[1])
    torch.testing.assert_close(hidden[1].grad, expected)
    with torch.no_grad():
        assert not linear_loss(hidden, weight, target, losses.cross_entropy()).loss.requires_grad


@pytest.mark.parametrize("empty", [(0,), (1,), (0, 1)])
def test_a_stream_without_tokens(empty: tuple[int, ...]) -> None:
    hidden, weight, _, target = made(torch.float32, count=2)
    given = [h[:, :0] if i in empty else h for i, h in enumerate(hidden)]
    targets = [target[:, :0] if i in empty else target for i in range(2)]
    linear_loss(given, weight, targets, losses.cross_entropy()).loss.backward()
    total = sum(linear_loss(h, weight, t, losses.cross_entropy()).loss for h, t in zip(given, targets, strict=True))
    torch.testing.assert_close(weight.grad, torch.autograd.grad(total, weight)[0])


@pytest.mark.parametrize("waits", [0, 1, 2])
def test_under_an_activation_checkpoint(waits: int) -> None:
    """``waits``: streams whose gradients are made in backward, of tensors that a checkpoint gives once."""
    hidden, weight, _, target = made(torch.float32, count=2)
    loss = [losses.gspo() if i < waits else losses.cross_entropy() for i in range(2)]
    batch = {"advantages": torch.ones(2, LINE), "segments": torch.arange(2)[:, None].expand(2, LINE)}

    def run(first: Tensor, second: Tensor, weight: Tensor) -> Tensor:
        return linear_loss(
            [first.sin(), second], weight, target, loss, batch=batch, num_segments=2, chunk_tokens=CHUNK
        ).loss

    products = mock.Mock(side_effect=store.add_dweight)
    with mock.patch.object(store, "add_dweight", products):
        run(*hidden, weight).backward()
        once, expected = products.call_count, grads_of(weight, *hidden)
        checkpoint(run, *hidden, weight, use_reentrant=False).backward()
    torch.testing.assert_close(grads_of(weight, *hidden), expected)
    assert products.call_count == 2 * once  # the gradients' products are not done twice


def draft(count: int = 2) -> tuple[list[Tensor], Tensor, Tensor, dict[str, Any]]:
    hidden, weight, _, target = made(torch.float64, count=count)
    g = torch.Generator().manual_seed(11)
    verifier = [torch.randn(2, LINE, HIDDEN, generator=g).double() for _ in range(count)]
    batch = {"teacher_hidden": verifier, "teacher_weight": torch.randn(VOCAB, HIDDEN, generator=g).double().mul(0.3)}
    return hidden, weight, target, batch


@crossed(place=PLACES, given=["teacher_hidden", "teacher_logits"], loss=[losses.lk(), losses.forward_kl()])
def test_metrics_of_drafters(loss: losses.Losses, given: str, place: Place) -> None:
    """Also where the teacher has fewer ids, and where its statistics come with the gradients."""
    half = place.device == "cuda"
    hidden, weight, target, batch = draft()
    dtype = torch.bfloat16 if half else torch.float32
    hidden, weight, target = hidden[0].detach().to(place.device, dtype), weight.detach().to(place.device, dtype), target
    verifier, head = (
        batch["teacher_hidden"][0].to(place.device, dtype),
        batch["teacher_weight"][:-3].to(place.device, dtype),
    )
    head[: VOCAB // 2] += weight[: VOCAB // 2]  # some agree
    verifier = verifier * 0.3 + hidden
    batch = {"teacher_hidden": verifier, "teacher_weight": head}
    q = (verifier.double() @ head.double().t()).softmax(-1)
    if given == "teacher_logits":
        batch = {"teacher_logits": (verifier.float() @ head.float().t()).to(torch.float32)}
    measured = [metrics.agreement(), metrics.accuracy()] + [metrics.acceptance()] * (loss.terms[0][1].kind == "lk")
    out = linear_loss(
        hidden.requires_grad_(), weight, target.to(place.device), loss, batch=batch, metrics=measured,
        backend=place.backend, chunk_tokens=CHUNK,
    )  # fmt: skip
    x = hidden.detach().double() @ weight.double().t()
    counts = (target != -100).to(place.device)
    same = (x.argmax(-1) == q.argmax(-1))[counts].double().mean()
    assert 0 < same < 1
    torch.testing.assert_close(out.metrics["agreement"].value.double(), same, atol=0.05 if half else 1e-6, rtol=0.0)
    if "acceptance" in out.metrics:
        p = x[..., : len(head)].softmax(-1)
        accepted = torch.minimum(p, q).sum(-1)[counts].mean()
        torch.testing.assert_close(
            out.metrics["acceptance"].value.double(), accepted, atol=2e-2 if half else 1e-5, rtol=0.0
        )


TEACHES: dict[str, tuple[Any, dict[str, Any]]] = {
    "forward": (losses.forward_kl(), {}),
    "reverse": (losses.reverse_kl() + 0.3 * losses.cross_entropy(), {"chunk_tokens": 7}),
    "jsd": (losses.jsd(beta=0.3, temperature=1.7) + 0.2 * losses.cross_entropy(), {"chunk_tokens": CHUNK}),
    "lk": (losses.lk() + 0.5 * losses.cross_entropy(), {"chunk_tokens": CHUNK, "temperature": 0.6}),
    "tvd": (losses.tvd(teacher_softcap=6.0, teacher_logit_scale=0.8), {"temperature": [1.0, 0.8, 1.0]}),
    "each its own": ([losses.jsd(), losses.forward_kl(), losses.reverse_kl()], {"chunk_tokens": CHUNK}),
    "skipped": (losses.forward_kl(), {"skip_ignored": "wait"}),
    "tempered": (losses.forward_kl(), {"temperature": torch.linspace(0.5, 1.5, 2 * LINE).view(2, LINE)}),
    "logits": (losses.forward_kl(), {}),
    "budget": (losses.forward_kl() + losses.cross_entropy(), {"memory_budget": "40KiB"}),
    "promised": (losses.cross_entropy() + losses.tvd(), {"upstream": UPSTREAM, "normalizer": [7.0, 5.0, 3.0]}),
    "capped": (losses.cross_entropy() + losses.tvd(), {"softcap": 5.0, "vocab_size": VOCAB - 3}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "place"),
    [
        one
        for place in PLACES
        for i, name in enumerate(TEACHES)
        for one in tier(
            pytest.param(name, place.values[0], marks=place.marks, id=f"{name}-{place.id}"),
            place.id != "triton-interpreted" or i % 3 == 0,
        )
    ],
)
def test_a_dense_teacher(name: str, place: Place) -> None:
    """Each stream's rows are slices of one tensor, nan where they count for no stream, of fewer ids than the student's:
    as a call for each stream."""
    loss, options = TEACHES[name]
    hidden, weight, bias, target = made(torch.float32, place.device)
    target = target.clamp(max=VOCAB - 4)
    g = torch.Generator().manual_seed(13)
    rows, mask = torch.randn(2 * LINE + 2, 18, generator=g), torch.rand(3, 2, LINE, generator=g) < 0.8
    seen = torch.zeros(len(rows), dtype=torch.bool)
    for i in range(3):
        there = F.pad(mask[i] & (target.cpu() != -100), (0, i + 1))[:, i + 1 :]
        seen[i : i + 2 * LINE] |= there.flatten()
    rows = torch.where(seen[:, None], rows, torch.nan).to(place.device)
    head = torch.randn(VOCAB - 4, 18, generator=g).mul(0.4).to(place.device)
    states = [rows[i : i + 2 * LINE].view(2, LINE, 18) for i in range(3)]
    batch: dict[str, Any] = {"teacher_hidden": states, "teacher_weight": head, "mask": list(mask.to(place.device))}
    if name == "logits":
        batch = {"teacher_logits": [each.nan_to_num() @ head.t() for each in states], "mask": batch["mask"]}
    leaves = [weight, bias, *hidden]
    options = {k: v.to(place.device) if isinstance(v, Tensor) else v for k, v in options.items()}
    if place.device == "cuda" and "memory_budget" in options:
        options["memory_budget"] = "4MiB"  # a GPU's tiles are larger
    options |= {"loss": loss, "batch": batch, "bias": bias, "metrics": [metrics.agreement(), metrics.entropy()]}

    def call(states: Any, i: int | None = None, **more: Any) -> Any:
        """The call of a stream, or that of all."""
        own = options
        if i is not None:
            own = {k: v[i] if isinstance(v, list) and k != "metrics" else v for k, v in options.items()}
            own["batch"] = {k: v[i] if isinstance(v, list) else v for k, v in batch.items()}
        shift = (1, 2, 3) if i is None else i + 1
        return linear_loss(states, weight, target, shift=shift, backend=place.backend, **own, **more)

    each = [call(states, i) for i, states in enumerate(hidden)]
    total = sum(factor * one.loss for factor, one in zip(WEIGHTS, each, strict=True))
    expected = torch.autograd.grad(total, leaves, torch.full_like(total, UPSTREAM))
    out = call(hidden, stream_weights=WEIGHTS)
    torch.testing.assert_close(out.loss.detach(), total.detach())
    for stream, other in zip(out.streams, each, strict=True):
        torch.testing.assert_close([stream.loss, *stream.parts.values()], [other.loss.detach(), *other.parts.values()])
        for label, metric in stream.metrics.items():
            torch.testing.assert_close(metric.value, other.metrics[label].value)
    for retain in (True, False)[name != "lk" :]:
        (out.loss * UPSTREAM).backward(retain_graph=retain)
        torch.testing.assert_close(grads_of(*leaves), list(expected), rtol=2e-5, atol=1e-6)


def acceptances(out: Any) -> Tensor:
    """Of each stream, over all ranks."""
    return torch.stack([stream.metrics["acceptance"].value for stream in out.streams])


def of_two_ranks(rank: int, device: str) -> tuple[Tensor, ...]:
    hidden, weight, target, batch = draft()
    batch["teacher_hidden"] = [states[rank : rank + 1] for states in batch["teacher_hidden"]]
    out = linear_loss(
        [states[rank : rank + 1] for states in hidden], weight, target[rank : rank + 1],
        losses.lk() + losses.cross_entropy(), batch=batch, shift=(1, 2), metrics=[metrics.acceptance()],
        parallel=TokenParallel(average=True),
    )  # fmt: skip
    out.loss.backward()
    return out.loss.detach(), acceptances(out), weight.grad, sum(stream.loss for stream in out.streams)


def test_two_ranks(tmp_path: Path) -> None:
    """With averages of gradients; ``tests/ranks`` has others."""
    hidden, weight, target, batch = draft()
    out = linear_loss(
        hidden, weight, target, losses.lk() + losses.cross_entropy(), batch=batch, shift=(1, 2),
        metrics=[metrics.acceptance()],
    )  # fmt: skip
    out.loss.backward()
    (one, accepted, d_one, streams), (two, _, d_two, _) = ranks.run(of_two_ranks, 2, tmp_path)
    expected = out.loss.detach(), acceptances(out), weight.grad
    torch.testing.assert_close(((one + two) / 2, accepted, (d_one + d_two) / 2), expected)
    torch.testing.assert_close(streams, one)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hidden": []}, "hidden must be a tensor or a list of one tensor or more"),
        ({"stream_weights": [1.0]}, "stream_weights must be one for all 2 streams or a list of 2, got 1"),
        ({"stream_weights": [1.0, float("inf")]}, "the coefficient of a loss must be a number"),
        ({"stream_weights": [1.0, torch.ones((), device="meta")]}, "on the meta device, without value"),
        ({"shift": (1, 2, 3)}, "shift must be one for all 2 streams or a list of 2, got 3"),
        ({"batch": {"mask": [torch.ones(2, LINE).bool()]}}, r"batch\['mask'\] must be one for all 2 streams"),
        ({"reduction": "none"}, "call linear_loss once for each stream"),
        ({"memory_budget": "1KiB", "dtype": torch.bfloat16}, "memory_budget"),
        (
            {"accumulate_dtype": torch.bfloat16, "chunk_tokens": 8, "dtype": torch.bfloat16},
            "accumulate_dtype must be None or float32, the dtype of accumulate_into",
        ),
        ({"metrics": [metrics.acceptance()]}, "no loss of the call has one"),
        ({"hidden": "one", "stream_weights": [1.0]}, "stream_weights go with several streams"),
    ],
)
def test_errors(options: dict[str, Any], says: str) -> None:
    options = dict(options)
    hidden, weight, _, target = made(options.pop("dtype", torch.float32), count=2)
    states = options.pop("hidden", hidden)
    states = hidden[0] if states == "one" else states
    with pytest.raises(ValueError, match=says):
        linear_loss(states, weight, target, losses.cross_entropy(), **options)
