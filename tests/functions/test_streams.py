"""Several streams of hidden states through one head: the oracle's sum of losses, and one gradient of the weight."""

from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.nn.functional as F
from budget import assert_within_budget
from cases import PLACES, Place
from oracle import reference
from oracle.reference import Term
from tiers import crossed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from chunked_head import TokenParallel, VocabParallel, linear_loss, losses, metrics

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
@pytest.mark.parametrize("kind", ["float32", "16 bits", "wide sums", "twice"])
def test_values_and_gradients(kind: str, place: Place) -> None:
    """bf16's dot products are wrong in the interpreter. ``twice``: a second backward makes the gradients anew."""
    half = torch.bfloat16 if place.device == "cuda" or place.backend == "torch" else torch.float16
    dtype = half if kind in ("16 bits", "wide sums") else torch.float32
    hidden, weight, bias, target = made(dtype, place.device)
    out = linear_loss(
        hidden, weight, target, loss_of(TERMS), bias=bias, shift=(1, 2, 3), stream_weights=WEIGHTS,
        chunk_tokens=CHUNK if kind == "wide sums" else LINE, backend=place.backend,
        accumulate_dtype=torch.bfloat16 if kind == "16 bits" and dtype == torch.bfloat16 else None,
    )  # fmt: skip
    assert [stream.plan.schedule for stream in out.streams] == ["forward"] * 3
    wide = torch.float32 if kind == "wide sums" or dtype == torch.float16 else dtype
    assert {stream.plan.weight_accumulate for stream in out.streams} == {wide}
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


def alone(hidden: list[Tensor], weight: Tensor, target: Tensor, loss: Any, **options: Any) -> list[Any]:
    given = [{name: value[i] if isinstance(value, list) else value for name, value in options.items()} for i in (0, 1)]
    return [linear_loss(h, weight, target, loss, **own) for h, own in zip(hidden, given, strict=True)]


def compared(hidden: list[Tensor], weight: Tensor, target: Tensor, loss: Any, **options: Any) -> Any:
    """The two streams' call, after holding it to a call for each."""
    out = linear_loss(hidden, weight, target, loss, stream_weights=[1.0, 0.5], **options)
    (out.loss * UPSTREAM).backward()
    found = grads_of(weight, *hidden)
    outs = alone(hidden, weight, target, loss, **options)
    total = outs[0].loss + 0.5 * outs[1].loss
    (total * UPSTREAM).backward()
    torch.testing.assert_close([out.loss.detach(), *found], [total.detach(), *grads_of(weight, *hidden)])
    for stream, other in zip(out.streams, outs, strict=True):
        torch.testing.assert_close(stream.loss, other.loss.detach())
        torch.testing.assert_close(stream.parts, other.parts)
        assert stream.metrics.keys() == other.metrics.keys()
        for name, value in stream.metrics.items():
            torch.testing.assert_close(value.value, other.metrics[name].value)
    return out


OPTIONS: dict[str, dict[str, Any]] = {
    "one chunk": {},
    "chunks": {"chunk_tokens": CHUNK},
    "skipped": {"skip_ignored": True},
    "budget": {"memory_budget": "40KiB"},
    "promised": {"upstream": UPSTREAM, "normalizer": [7.0, 5.0], "temperature": [1.0, 0.7]},
    "capped": {"softcap": 5.0, "vocab_size": VOCAB - 3},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_as_a_call_for_each(name: str) -> None:
    hidden, weight, _, target = made(torch.float64, count=2)
    target = target.clamp(max=VOCAB - 4)
    measured = [metrics.entropy(), metrics.accuracy()]
    compared(hidden, weight, target, loss_of(TERMS), shift=[1, 2], metrics=tuple(measured), **OPTIONS[name])


@pytest.mark.parametrize("chunk", [LINE * 2, CHUNK])
@pytest.mark.parametrize("kind", ["all wait", "one waits"])
def test_losses_that_wait_for_all_tokens(kind: str, chunk: int) -> None:
    """Their gradients are made in backward where a chunk does not hold all tokens, and added to those of the others."""
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
    assert [stream.plan.schedule for stream in out.streams] == [waits, waits if kind == "all wait" else "forward"]
    (out.loss * UPSTREAM).backward()
    found = grads_of(weight, *hidden)
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


@pytest.mark.parametrize("streams", [True, False])
def test_a_bias_over_candidates_in_fp16(streams: bool) -> None:
    """fp16's gain goes into what is added to a buffer, and into the bias's gradient once its sums are there."""
    hidden, weight, bias, target = made(torch.float16, count=1)
    candidates, buffer = torch.arange(0, VOCAB, 7), torch.zeros(VOCAB, HIDDEN)
    options = {"bias": bias, "candidates": candidates, "reduction": "sum"}
    linear_loss(hidden[0], weight, target, losses.cross_entropy(), **options).loss.backward()
    expected = grads_of(bias, hidden[0])
    given = hidden if streams else hidden[0]
    into = {} if streams else {"accumulate_into": buffer}
    linear_loss(given, weight, target, losses.cross_entropy(), **options, **into).loss.backward()
    torch.testing.assert_close(grads_of(bias, hidden[0]), expected)


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
            [first * 1.0, second], weight, target, loss, batch=batch, num_segments=2, chunk_tokens=CHUNK
        ).loss

    run(*hidden, weight).backward()
    expected = grads_of(weight, *hidden)
    checkpoint(run, *hidden, weight, use_reentrant=False).backward()
    torch.testing.assert_close(grads_of(weight, *hidden), expected)


def test_an_id_out_of_range_makes_everything_nan() -> None:
    """Of any stream; on the CPU it raises, and so it is done to the statistics here."""
    hidden, weight, _, target = made(torch.float32, count=2)
    with pytest.raises(IndexError, match="target must be in"):
        linear_loss(hidden, weight, [target, target.masked_fill(target > 5, VOCAB)], losses.cross_entropy())


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


TEACHES = {
    "forward": [Term(1.0, "forward_kl")],
    "reverse": [Term(1.0, "reverse_kl"), Term(0.3, "cross_entropy")],
    "jsd": [Term(0.7, "jsd", {"beta": 0.3, "temperature": 1.7}), Term(0.2, "cross_entropy")],
    "lk": [Term(1.0, "lk", {"form": "hybrid", "eta": 1.0})],
    "tvd": [Term(1.0, "tvd", {"teacher_softcap": 6.0, "teacher_logit_scale": 0.8})],
}
MET = {"one": (0, 0, 0), "ahead": (0, 1, 2), "back": (3, 0, 20)}  # where each stream's rows begin among the teacher's
WIDTH = 18


def taught(
    dtype: torch.dtype, device: str, met: tuple[int, ...], width: int = WIDTH
) -> tuple[list[Tensor], Tensor, Tensor, Tensor, dict[str, Any]]:
    """The same with a teacher's rows as slices of one tensor, nan where they count for no stream; masks differ."""
    hidden, weight, bias, target = made(dtype, device)
    g = torch.Generator().manual_seed(13)
    rows = torch.randn(2 * LINE + max(met), width, generator=g)
    mask = torch.rand(3, 2, LINE, generator=g) < 0.8
    counts = torch.zeros(len(rows), dtype=torch.bool)
    for i, begin in enumerate(met):
        there = F.pad(mask[i] & (target.cpu() != -100), (0, i + 1))[:, i + 1 :]
        counts[begin : begin + 2 * LINE] |= there.flatten()
    rows = torch.where(counts[:, None], rows, torch.nan).to(device, dtype)
    batch = {
        "teacher_hidden": [rows[begin : begin + 2 * LINE].view(2, LINE, width) for begin in met],
        "teacher_weight": torch.randn(VOCAB - 4, width, generator=g).mul(0.4).to(device, dtype),
        "teacher_bias": torch.randn(VOCAB - 4, generator=g).mul(0.2).to(device, dtype),
        "mask": list(mask.to(device)),
    }
    return hidden, weight, bias, target, batch


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("teaches", "met", "kind"),
    [
        ("forward", "one", "32 bits"), ("reverse", "ahead", "32 bits"), ("jsd", "back", "32 bits"),
        ("lk", "ahead", "32 bits"), ("tvd", "one", "32 bits"), ("forward", "ahead", "one chunk"),
        ("reverse", "back", "small chunks"), ("forward", "ahead", "16 bits"), ("jsd", "back", "16 bits"),
        ("forward", "one", "16 bits, odd teacher"), ("jsd", "ahead", "16 bits, one chunk"),
        ("lk", "back", "twice"), ("reverse", "ahead", "frozen head"), ("jsd", "ahead", "one frozen"),
    ],
)  # fmt: skip
def test_a_dense_teacher(teaches: str, met: str, kind: str, place: Place) -> None:
    """Slices of one tensor of rows, or each stream its own place in it."""
    half = torch.bfloat16 if place.device == "cuda" else torch.float16
    dtype, terms, begins = half if "16 bits" in kind else torch.float32, TEACHES[teaches], MET[met]
    width = WIDTH if "odd" in kind or dtype == torch.float32 else 16
    hidden, weight, bias, target, batch = taught(dtype, place.device, begins, width)
    given = list(hidden)
    if kind == "one frozen":
        given[1] = hidden[1].detach()
    head = (weight.detach(), bias.detach()) if kind == "frozen head" else (weight, bias)
    chunk = 7 if kind == "small chunks" else None if "one chunk" in kind else CHUNK
    out = linear_loss(
        given, head[0], target, loss_of(terms), bias=head[1], shift=(1, 2, 3), stream_weights=WEIGHTS, batch=batch,
        chunk_tokens=chunk, backend=place.backend, metrics=[metrics.agreement()],
    )  # fmt: skip
    if kind == "twice":
        (out.loss * UPSTREAM).backward(retain_graph=True)
        once = grads_of(weight, bias, *hidden)
    (out.loss * UPSTREAM).backward()
    leaves = [leaf for leaf in (*head, *given) if leaf.requires_grad]
    ours = [out.loss.detach(), *grads_of(*leaves)]
    truth, eager = (of_full_logits(teaches, begins, width, dtype, place, wide, leaves, given, head)
                    for wide in (torch.float64, dtype))  # fmt: skip
    for i, own in enumerate(ours):
        precision = torch.promote_types(dtype, torch.float32) if i == 0 else dtype
        assert_within_budget(own, eager[i], truth[i], precision, f"{i}")
        if kind == "twice" and i:
            assert_within_budget(once[i - 1], eager[i], truth[i], dtype, f"{i}, of the first backward")


def of_full_logits(
    teaches: str, begins: tuple[int, ...], width: int, dtype: torch.dtype, place: Place, wide: torch.dtype,
    leaves: list[Tensor], given: list[Tensor], head: tuple[Tensor, Tensor],
) -> list[Tensor]:  # fmt: skip
    *_, target, batch = taught(dtype, place.device, begins, width)
    copies = {id(one): one.detach().to(wide).requires_grad_(one.requires_grad) for one in (*given, *head)}
    total = torch.zeros((), dtype=wide, device=place.device)
    for i, (states, factor) in enumerate(zip(given, WEIGHTS, strict=True)):
        own = {name: value[i] if isinstance(value, list) else value for name, value in batch.items()}
        own = {name: value.to(wide) if value.is_floating_point() else value for name, value in own.items()}
        loss, _ = reference.linear_loss(
            copies[id(states)], copies[id(head[0])], target, TEACHES[teaches], bias=copies[id(head[1])], shift=i + 1,
            batch=own,
        )  # fmt: skip
        total = total + factor * loss
    (total * UPSTREAM).backward()
    return [total.detach(), *grads_of(*(copies[id(leaf)] for leaf in leaves))]


def one_by_one(
    hidden: list[Tensor], weight: Tensor, bias: Tensor, target: Tensor, loss: Any, batch: dict[str, Any], **options: Any
) -> list[Any]:
    """A call for each stream."""
    made = []
    for i, states in enumerate(hidden):
        own = {name: value[i] if isinstance(value, list) else value for name, value in batch.items()}
        made.append(linear_loss(states, weight, target, loss, bias=bias, shift=i + 1, batch=own, **options))
    return made


@pytest.mark.parametrize("kind", ["no gradient", "checkpoint", "a buffer of the caller's", "temperature"])
def test_a_dense_teacher_as_a_call_for_each(kind: str) -> None:
    hidden, weight, bias, target, batch = taught(torch.float32, "cpu", MET["ahead"])
    loss = losses.lk() + 0.5 * losses.cross_entropy()
    measured = [metrics.acceptance(), metrics.agreement(), metrics.entropy()]
    options: dict[str, Any] = {"chunk_tokens": CHUNK, "temperature": 0.6} if kind == "temperature" else {}
    others = one_by_one(hidden, weight, bias, target, loss, batch, metrics=measured, **options)
    expected = sum(factor * other.loss for factor, other in zip(WEIGHTS, others, strict=True))
    expected.backward()
    of_weight, *of_hidden = grads_of(weight, *hidden)
    buffer = torch.zeros(VOCAB, HIDDEN)
    into = {"accumulate_into": buffer} if kind == "a buffer of the caller's" else {}
    seen: list[Any] = []

    def run(*given: Tensor) -> Tensor:
        out = linear_loss(
            list(given), weight, target, loss, bias=bias, shift=(1, 2, 3), stream_weights=WEIGHTS, batch=batch,
            metrics=[*measured, metrics.accepted_length()], **options, **into,
        )  # fmt: skip
        seen.append(out)
        return out.loss

    if kind == "no gradient":
        with torch.no_grad():
            found = run(*hidden)
    else:
        found = checkpoint(run, *hidden, use_reentrant=False) if kind == "checkpoint" else run(*hidden)
    torch.testing.assert_close(found.detach(), expected.detach())
    for stream, other in zip(seen[0].streams, others, strict=True):
        torch.testing.assert_close(stream.loss, other.loss.detach())
        assert stream.metrics.keys() == other.metrics.keys()
        for name, value in stream.metrics.items():
            torch.testing.assert_close(value.value, other.metrics[name].value)
    if kind != "no gradient":
        found.backward()
        torch.testing.assert_close([buffer if into else weight.grad, *grads_of(*hidden)], [of_weight, *of_hidden])


ALONE: dict[str, dict[str, Any]] = {
    "skipped": {"skip_ignored": True}, "logits": {}, "temperatures": {},
    "waits for all": {"dtype": torch.float16}, "temperature each": {"temperature": [1.0, 0.8, 1.0]},
    "loss each": {},
}  # fmt: skip


@pytest.mark.parametrize("kind", ALONE)
def test_a_dense_teacher_under_options(kind: str) -> None:
    options = dict(ALONE[kind])
    dtype = options.pop("dtype", torch.float32)
    hidden, weight, bias, target, batch = taught(dtype, "cpu", MET["ahead"], 16)
    loss: Any = losses.reverse_kl() if kind == "waits for all" else losses.forward_kl()
    verifier = [rows.nan_to_num() for rows in batch["teacher_hidden"]]  # copies
    if kind == "logits":
        batch["teacher_logits"] = [F.linear(rows, batch["teacher_weight"], batch["teacher_bias"]) for rows in verifier]
        batch = {name: batch[name] for name in ("teacher_logits", "mask")}
    elif kind == "temperatures":
        options["temperature"] = torch.linspace(0.5, 1.5, 2 * LINE).view(2, LINE)
    elif kind == "loss each":
        loss = [losses.jsd(), losses.forward_kl(), losses.reverse_kl()]
    out = linear_loss(
        hidden, weight, target, loss, bias=bias, shift=(1, 2, 3), stream_weights=WEIGHTS, batch=batch, **options
    )
    out.loss.backward()
    found = grads_of(weight, *hidden)
    each = [
        {name: value[i] if isinstance(value, list) else value for name, value in {**options, "loss": loss}.items()}
        for i in range(3)
    ]
    total = torch.zeros(())
    for i, own in enumerate(each):
        fields = {name: value[i] if isinstance(value, list) else value for name, value in batch.items()}
        total = (
            total
            + WEIGHTS[i]
            * linear_loss(hidden[i], weight, target, own.pop("loss"), bias=bias, shift=i + 1, batch=fields, **own).loss
        )
    total.backward()
    torch.testing.assert_close([out.loss.detach(), *found], [total.detach(), *grads_of(weight, *hidden)])


@pytest.mark.parametrize("skip", [False, True])
def test_accepted_length(skip: bool) -> None:
    hidden, weight, target, batch = draft()
    targets = [target, target.clone()]
    targets[1][1, 4:9] = -100
    out = linear_loss(
        hidden, weight, targets, losses.lk(), batch=batch, metrics=[metrics.acceptance(), metrics.accepted_length()],
        skip_ignored=skip,
    )  # fmt: skip
    accepted, counts = [], []
    for states, verifier, labels in zip(hidden, batch["teacher_hidden"], targets, strict=True):
        p, q = (states @ weight.t()).softmax(-1), (verifier @ batch["teacher_weight"].t()).softmax(-1)
        accepted.append(torch.minimum(p, q).sum(-1) * (labels != -100))
        counts.append((labels != -100).sum())
    expected = (accepted[0] + accepted[0] * accepted[1]).sum() / counts[0]
    torch.testing.assert_close(out.metrics["accepted_length"].value, expected.detach())
    for stream, values, count in zip(out.streams, accepted, counts, strict=True):
        assert set(stream.metrics) == {"acceptance"}
        torch.testing.assert_close(stream.metrics["acceptance"].value, (values.sum() / count).detach())


def of_two_ranks(rank: int, device: str) -> dict[str, Any]:
    hidden, weight, target, batch = draft()
    hidden = [states.to(device).detach().requires_grad_() for states in hidden]
    batch = {"teacher_hidden": batch["teacher_hidden"], "teacher_weight": batch["teacher_weight"].chunk(2)[rank]}
    own = weight.detach().chunk(2)[rank].clone().requires_grad_()
    out = linear_loss(
        hidden, own, target, losses.lk() + losses.cross_entropy(), batch=batch, shift=(1, 2), chunk_tokens=CHUNK,
        metrics=[metrics.accepted_length()], parallel=VocabParallel(), vocab_size=VOCAB,
    )  # fmt: skip
    out.loss.backward()
    found = {"vocabulary": (out.loss.detach(), out.metrics["accepted_length"].value, own.grad, *grads_of(*hidden))}
    lines = [states[rank : rank + 1].detach() for states in hidden]
    whole = weight.detach().requires_grad_()
    own_batch = {"teacher_hidden": [states[rank : rank + 1] for states in batch["teacher_hidden"]]}
    own_batch["teacher_weight"] = draft()[3]["teacher_weight"]
    out = linear_loss(
        lines, whole, target[rank : rank + 1], losses.lk() + losses.cross_entropy(), batch=own_batch, shift=(1, 2),
        metrics=[metrics.accepted_length()], parallel=TokenParallel(average=True),
    )  # fmt: skip
    out.loss.backward()
    each = sum(stream.loss for stream in out.streams)
    found["tokens"] = out.loss.detach(), out.metrics["accepted_length"].value, whole.grad, each
    return found


def test_two_ranks(tmp_path: Path) -> None:
    first, second = ranks.run(of_two_ranks, 2, tmp_path)
    hidden, weight, target, batch = draft()
    out = linear_loss(
        hidden, weight, target, losses.lk() + losses.cross_entropy(), batch=batch, shift=(1, 2),
        metrics=[metrics.accepted_length()],
    )  # fmt: skip
    out.loss.backward()
    loss, length, *others = first["vocabulary"]
    expected = [out.loss.detach(), out.metrics["accepted_length"].value, *grads_of(weight, *hidden)]
    torch.testing.assert_close([loss, length, torch.cat([others[0], second["vocabulary"][2]]), *others[1:]], expected)
    (one, length, d_one, streams), (two, _, d_two, _) = first["tokens"], second["tokens"]
    torch.testing.assert_close([(one + two) / 2, length, (d_one + d_two) / 2], expected[:3])
    torch.testing.assert_close(streams, one)


def test_compiled() -> None:
    """The call breaks the graph, and is right."""
    hidden, weight, _, target = made(torch.float32, count=2)

    def run(first: Tensor, second: Tensor) -> Tensor:
        return linear_loss([first, second], weight, target, losses.cross_entropy(), shift=(1, 2)).loss * 2

    torch.testing.assert_close(torch.compile(run, backend="eager")(*hidden), run(*hidden))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hidden": []}, "hidden must be a tensor or a list of one tensor or more"),
        ({"stream_weights": [1.0]}, "stream_weights must be a list of 2"),
        ({"stream_weights": [1.0, float("inf")]}, "finite numbers or 0-d tensors"),
        ({"stream_weights": [1.0, torch.ones((), device="meta")]}, "on the meta device, where it has no value"),
        ({"shift": (1, 2, 3)}, "shift must be one for all 2 streams or a list of 2, got 3"),
        ({"batch": {"mask": [torch.ones(2, LINE).bool()]}}, r"batch\['mask'\] must be one for all 2 streams"),
        ({"reduction": "none"}, "call linear_loss once for each stream"),
        ({"memory_budget": "1KiB", "dtype": torch.bfloat16}, "memory_budget"),
        (
            {"accumulate_dtype": torch.bfloat16, "chunk_tokens": 8, "dtype": torch.bfloat16},
            "accurate over at most 8 chunks",
        ),
        ({"metrics": [metrics.acceptance()]}, "no loss of the call has one"),
        ({"hidden": "one", "metrics": [metrics.accepted_length()]}, "goes over several streams"),
        ({"hidden": "one", "stream_weights": [1.0]}, "stream_weights go with several streams"),
        ({"hidden": "uneven", "metrics": [metrics.accepted_length()]}, "have other tokens"),
    ],
)
def test_errors(options: dict[str, Any], says: str) -> None:
    options = dict(options)
    hidden, weight, _, target = made(options.pop("dtype", torch.float32), count=2)
    kinds = {"one": hidden[0], "uneven": [hidden[0], hidden[1][:, 1:]], "": hidden}
    which = options.pop("hidden", "")
    states = kinds[which] if isinstance(which, str) else which
    target = [target, target[:, 1:]] if which == "uneven" else target
    with pytest.raises(ValueError, match=says):
        linear_loss(states, weight, target, losses.cross_entropy(), **options)


class Tiny(nn.Module):
    """A recurrent model of bytes with a head, and two further depths of prediction."""

    def __init__(self, depths: int):
        super().__init__()
        self.embedding, self.trunk = nn.Embedding(VOCAB, HIDDEN), nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.depths = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(depths))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> list[Tensor]:
        hidden = [self.trunk(self.embedding(ids))[0]]
        for depth in self.depths:
            hidden.append(hidden[-1] + torch.tanh(depth(hidden[-1])))
        return hidden


def trained(chunked: bool) -> tuple[list[float], list[Tensor]]:
    """Two depths of prediction, and then a drafter for the trained model, whose head it shares in part."""
    torch.manual_seed(5)
    model, ids = Tiny(1).double(), torch.randint(VOCAB, (4, LINE)).cumsum(1) % VOCAB
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(4):
        hidden = model(ids)
        if chunked:
            loss = linear_loss(
                hidden, model.head.weight, ids, losses.cross_entropy(), shift=(1, 2), stream_weights=(1.0, 0.3),
                chunk_tokens=CHUNK,
            ).loss  # fmt: skip
        else:
            each = [
                F.cross_entropy(model.head(states[:, : -i - 1]).flatten(0, 1), ids[:, i + 1 :].flatten())
                for i, states in enumerate(hidden)
            ]
            loss = each[0] + 0.3 * each[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    verifier, drafter = model(ids)[0].detach(), Tiny(1).double()
    optimizer = torch.optim.SGD(drafter.parameters(), lr=0.5)
    ahead = [verifier, F.pad(verifier[:, 1:], (0, 0, 0, 1))]  # what the verifier says where each step's token stands
    mask = torch.ones(2, *ids.shape, dtype=torch.bool)
    mask[1, :, -1] = False
    for _ in range(4):
        hidden = drafter(ids)
        if chunked:
            batch = {"teacher_hidden": ahead, "teacher_weight": model.head.weight.detach(), "mask": list(mask)}
            loss = linear_loss(
                hidden, drafter.head.weight, None, losses.lk(form="hybrid"), batch=batch, stream_weights=(1.0, 0.8)
            ).loss
        else:
            each = []
            for states, other, counts in zip(hidden, ahead, mask, strict=True):
                log_p, log_q = drafter.head(states).log_softmax(-1), model.head(other).log_softmax(-1).detach()
                accepted = torch.minimum(log_p.exp(), log_q.exp()).sum(-1)
                share = (-3.0 * accepted.detach()).exp()
                kl = (log_q.exp() * (log_q - log_p)).sum(-1)
                each.append((share * kl + (1 - share) * (1 - accepted))[counts].mean())
            loss = each[0] + 0.8 * each[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen, [p.detach() for p in (*model.parameters(), *drafter.parameters())]


def test_two_depths_and_a_drafter_are_trained() -> None:
    seen, parameters = trained(chunked=True)
    expected, others = trained(chunked=False)
    torch.testing.assert_close([seen, parameters], [expected, others])
    assert seen[3] < seen[0] and seen[7] < seen[4]
