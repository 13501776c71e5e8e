"""Sets of ids that tokens keep, beside the list of losses: ways to give them, what is not done."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from budget import assert_within_budget
from cases import PLACES, Place
from chunked_head.kernels.statistics import launch
from loss_cases import kept_ids_of
from oracle.reference import of_kept
from test_deterministic import OURS
from tiers import crossed, first_of
from torch import Tensor

from chunked_head import linear_logprobs, linear_loss, logits_logprobs, losses, metrics
from chunked_head.stores.store import MatmulStore

TOKENS, HIDDEN, VOCAB = 41, 32, 211
POLICY = losses.grpo() - 0.1 * losses.entropy()
SUPERVISED = losses.cross_entropy() - 0.1 * losses.entropy()


def operands(dtype: torch.dtype, device: str, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(4)
    hidden, weight = torch.randn(tokens, HIDDEN, generator=made), torch.randn(VOCAB, HIDDEN, generator=made)
    target = torch.randint(0, VOCAB, (tokens,), generator=made)
    target[torch.rand(tokens, generator=made) < 0.2] = -100
    weight = weight * 2.0 / HIDDEN**0.5
    return hidden.to(device, dtype).requires_grad_(), weight.to(device, dtype).requires_grad_(), target.to(device)


def sets(device: str, empty: float = 0.3, most: int = 9, tokens: int = TOKENS) -> Tensor:
    return kept_ids_of(torch.Generator().manual_seed(5), tokens, VOCAB, most, empty).to(device)


def fields(device: str) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(6)
    both = {"old_logprobs": -3 * torch.rand(TOKENS, generator=made), "advantages": torch.randn(TOKENS, generator=made)}
    return {name: value.to(device) for name, value in both.items()}


def rows_of(ids: Tensor) -> dict[str, Tensor]:
    """The same as ids [n] with offsets."""
    offsets = F.pad((ids >= 0).sum(-1).flatten().cumsum(0), (1, 0))
    return {"kept_ids": ids[ids >= 0], "kept_offsets": offsets}


@crossed(place=PLACES, dtype=[torch.float32, torch.float16], most=[1, 9, 140])
def test_logprobs(place: Place, dtype: torch.dtype, most: int) -> None:
    """Values and gradients of what comes late, for sets of one id, of some, and of more than a block of the kernels."""
    hidden, weight, target = operands(dtype, place.device)
    ids = sets(place.device, most=most)
    upstream = torch.randn(3, TOKENS, generator=torch.Generator().manual_seed(1)).to(place.device)

    def plain(h: Tensor, w: Tensor) -> list[Tensor]:
        x = of_kept((h @ w.t()).to(torch.promote_types(h.dtype, torch.float32)), ids, target.clamp(min=0))
        logs, counts = x.log_softmax(-1), target != -100
        own = logs.gather(1, target.clamp(min=0)[:, None])[:, 0]
        values = own, -(logs.exp() * logs).sum(-1), x.logsumexp(-1)
        return [torch.where(counts, value, 0.0) for value in values]

    def run(call: Any, kind: torch.dtype) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        leaves = [t.detach().to(kind).requires_grad_() for t in (hidden, weight)]
        values = call(*leaves)
        total = sum((u.to(v.dtype) * v).sum() for u, v in zip(upstream, values, strict=True))
        return [v.detach() for v in values], torch.autograd.grad(total, leaves)

    def ours(h: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        found = linear_logprobs(
            h, w, target, entropy=True, lse=True, argmax=True, backend=place.backend, **rows_of(ids), chunk_tokens=16
        )
        x = of_kept((h @ w.t()).float(), ids, target.clamp(min=0))
        assert torch.equal(found.argmax, torch.where(target != -100, x.argmax(-1), 0))
        return found[:3]

    (mine, grads), (eager, rough), (exact, truth) = run(ours, dtype), run(plain, dtype), run(plain, torch.float64)
    for a, b, c in zip(mine, eager, exact, strict=True):
        assert_within_budget(a, b, c, torch.float32, "values")
    for a, b, c in zip(grads, rough, truth, strict=True):
        assert_within_budget(a, b, c, dtype, "gradients")


@pytest.mark.parametrize("place", PLACES)
def test_ways_to_give_them(place: Place) -> None:
    """Offsets, or ids beside tokens; moved with the target by ``shift``; a loss sees the same log-probabilities."""
    hidden, weight, target = operands(torch.float32, place.device)
    ids, shape = sets(place.device), (1, TOKENS)
    given = hidden.view(*shape, -1), weight, target.view(shape)
    common: dict[str, Any] = {"shift": 1, "backend": place.backend}
    padded = linear_logprobs(*given, kept_ids=ids.view(*shape, -1), **common)
    assert torch.equal(padded, linear_logprobs(*given, **rows_of(ids), **common))
    shifted = linear_logprobs(hidden[:-1], weight, target[1:], kept_ids=ids[1:], backend=place.backend)
    torch.testing.assert_close(padded[0, 1:], shifted, rtol=1e-6, atol=1e-6)
    assert torch.equal(padded, linear_logprobs(*given, kept_ids=ids.int().view(*shape, -1), **common))
    batch = {"old_logprobs": padded.detach(), "advantages": fields(place.device)["advantages"].view(shape)}
    for skip in (False, "wait"):
        out = linear_loss(
            *given, losses.grpo(), batch=batch | rows_of(ids), metrics=[metrics.ratio(reduce="max")], skip_ignored=skip,
            **common,
        )  # fmt: skip
        assert abs(float(out.metrics["ratio_max"].value) - 1.0) <= 1e-5
    x = F.linear(hidden, weight).view(*shape, -1)
    of_logits = logits_logprobs(x, given[2], kept_ids=ids.view(*shape, -1), **common)
    torch.testing.assert_close(of_logits, padded, rtol=1e-4, atol=1e-5)


SKIPPED = [
    pytest.param(0.3, 60.0, TOKENS, id="some"), pytest.param(0.1, 1.0, 160, id="whole tiles"),
    pytest.param(0.0, 1.0, TOKENS, id="all"),
]  # fmt: skip


@pytest.mark.parametrize("place", OURS)
@pytest.mark.parametrize(("empty", "spread", "tokens"), first_of(SKIPPED, 2))
def test_rows_that_matmuls_skip(place: Place, empty: float, spread: float, tokens: int) -> None:
    """Where matmuls stop at a number on the device, rows with a set are none of theirs; and where they do not, nothing
    of such rows gets into other gradients, whatever their logits are."""
    hidden, weight, target = operands(torch.bfloat16, place.device, tokens)
    loss, batch = SUPERVISED, {"kept_ids": sets(place.device, empty, tokens=tokens)}
    bias = torch.zeros(VOCAB, device=place.device)
    for options in ({}, {"skip_ignored": True}, {"skip_ignored": "wait"}):
        found = []
        for kind, how in ((torch.bfloat16, {"backend": "triton", **options}), (torch.float64, {"backend": "torch"})):
            leaves = [t.detach().to(kind).requires_grad_() for t in (hidden * spread, weight, bias)]
            how |= {"bias": leaves[2], "chunk_tokens": 16 if tokens == TOKENS else None}
            out = linear_loss(*leaves[:2], target, loss, batch=batch, **how)
            found.append((out.loss.detach(), *torch.autograd.grad(out.loss, leaves)))
        for ours, exact in zip(*found, strict=True):
            assert (ours.double() - exact).norm() <= 1e-2 * exact.norm()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("late", [False, True])
def test_nothing_is_done_over_the_vocabulary(place: Place, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every token keeps a set; and what no set names of a caller's buffer stays as it is."""
    hidden, weight, target = operands(torch.float32, place.device)
    ids = sets(place.device, empty=0.0)
    promise = {"kept_everywhere": True, "backend": place.backend}
    buffer = torch.full((VOCAB, HIDDEN), 0.1, device=place.device)
    batch = fields(place.device) | {"kept_ids": ids}

    def step(**options: Any) -> tuple[Tensor, ...]:
        if late:
            value = (linear_logprobs(hidden, weight, target, kept_ids=ids, **options) * batch["advantages"]).sum()
        else:
            value = linear_loss(hidden, weight, target, POLICY, batch=batch, **options).loss
        leaves = (hidden,) if "accumulate_into" in options else (hidden, weight)
        return torch.autograd.grad(value, leaves)

    usual = step(**promise)

    def refuse(*given: Any, **more: Any) -> None:
        raise AssertionError("logits of the whole vocabulary")

    monkeypatch.setattr(MatmulStore, "__init__", refuse)
    again = step(**promise)
    for a, b in zip(again, usual, strict=True):
        # torch's sums on a GPU are in any order
        exact = {} if (place.device, place.backend) == ("cuda", "torch") else {"rtol": 0.0, "atol": 0.0}
        torch.testing.assert_close(a, b, **exact)
    named = torch.zeros(VOCAB, dtype=torch.bool, device=place.device)
    counts = target >= 0
    named[ids[counts][ids[counts] >= 0]] = True
    named[target[counts]] = True
    assert not usual[1][~named].any() and usual[1][named].any()
    step(**promise, accumulate_into=buffer)
    assert (buffer[~named] == 0.1).all()
    torch.testing.assert_close(buffer - 0.1, usual[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("beside", [False, True])
def test_a_teachers_ids_alone(place: Place, beside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A divergence over K ids needs the logits of these; a metric beside it those of the vocabulary."""
    hidden, weight, _ = operands(torch.float32, place.device)
    top = torch.randn(TOKENS, VOCAB, generator=torch.Generator().manual_seed(3)).to(place.device).topk(5)
    batch = {"teacher_ids": top.indices, "teacher_logprobs": top.values}
    loss = losses.topk_kl("reverse", normalize="topk")
    asked = [metrics.entropy()] if beside else []
    made = []
    plain = MatmulStore.__init__

    def noted(store: MatmulStore, *given: Any) -> None:
        made.append(store)
        plain(store, *given)

    monkeypatch.setattr(MatmulStore, "__init__", noted)
    out = linear_loss(hidden, weight, None, loss, batch=batch, metrics=asked, backend=place.backend)
    assert bool(made) == beside and (out.plan.sizes.store.name == "kept") != beside
    grads = torch.autograd.grad(out.loss, (hidden, weight))
    p = (hidden @ weight.t()).gather(1, top.indices).log_softmax(-1)
    truth = (p.exp() * (p - top.values.log_softmax(-1))).sum(-1).mean()
    torch.testing.assert_close(out.loss, truth, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(grads, torch.autograd.grad(truth, (hidden, weight)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


IDS = torch.zeros(4, 6, 3, dtype=torch.int64)
FLAT, OFFSETS = torch.arange(24), torch.arange(25)


@pytest.mark.parametrize(
    ("batch", "more", "error", "message"),
    [
        ({"kept_offsets": OFFSETS}, {}, ValueError, "goes with batch\\['kept_ids'\\], which is missing"),
        ({"kept_ids": IDS[0]}, {}, ValueError, r"must have shape \(4, 6\), the target's, and one more dimension"),
        ({"kept_ids": FLAT, "kept_offsets": OFFSETS[:-1]}, {}, ValueError, r"must have shape \(25,\), one more than"),
        ({"kept_ids": FLAT, "kept_offsets": OFFSETS.int()}, {}, TypeError, "kept_offsets.* must be int64"),
        ({"kept_ids": FLAT, "kept_offsets": OFFSETS * 2}, {}, ValueError, "must rise from 0 to 24"),
        ({"kept_ids": IDS.float()}, {}, TypeError, "kept_ids.* must be int64 or int32"),
        ({"kept_ids": IDS + 100}, {}, IndexError, r"kept_ids'\] must be in \[0, 10\)"),
        ({"kept_ids": IDS - 1}, {"kept_everywhere": True}, ValueError, "and 24 tokens that count keep none"),
        ({"kept_ids": IDS}, {"loss": losses.cross_entropy(label_smoothing=0.1)}, ValueError, "go with the mean"),
        ({"kept_ids": IDS}, {"metrics": [metrics.mean_logit()]}, ValueError, "does not go with the mean logit"),
        ({"kept_ids": IDS}, {"target": None, "loss": losses.entropy()}, ValueError, "sets that targets belong to"),
        ({"kept_ids": IDS}, {"kept_everywhere": 1}, TypeError, "kept_everywhere"),
    ],
)  # fmt: skip
def test_errors(batch: dict[str, Tensor], more: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"target": torch.zeros(4, 6, dtype=torch.int64), "loss": losses.cross_entropy()} | more
    with pytest.raises(error, match=message):
        linear_loss(
            torch.randn(4, 6, 8), torch.randn(10, 8), given.pop("target"), given.pop("loss"), batch=batch, **given
        )


@crossed(place=PLACES, shared=[True, False], temperature=[1.0, 0.7, "each"])
def test_candidates(place: Place, shared: bool, temperature: Any) -> None:
    """Of each token or of all, some named twice and some the target, with a bias of each: a dense mask in float64."""
    made = torch.Generator().manual_seed(8)
    hidden, weight, target = operands(torch.float32, place.device)
    shape = (12,) if shared else (TOKENS, 12)
    ids, bias = torch.randint(0, VOCAB, shape, generator=made), torch.randn(shape, generator=made)
    ids[..., 3] = ids[..., 5]
    if shared:
        target[:20] = ids[4]
    else:
        ids[:20, 7], ids[::4, 2] = target[:20].cpu().clamp(min=0), -1
    ids, bias = ids.to(place.device), bias.to(place.device)
    each = 0.5 + torch.rand(TOKENS, generator=made).to(place.device)
    how = each if temperature == "each" else temperature

    def plain(h: Tensor, w: Tensor) -> Tensor:
        x, own = h @ w.t(), target.clamp(min=0)
        added = torch.full_like(x, -torch.inf).scatter_(1, own[:, None], 0.0)
        for k in reversed(range(12)):  # the first of equals is the one that counts
            at, value = ids.expand(TOKENS, 12)[:, k, None], bias.expand(TOKENS, 12)[:, k, None].to(x.dtype)
            row = torch.arange(TOKENS, device=x.device)[at[:, 0] >= 0]
            added[row, at[row, 0]] = value[row, 0]
        x = (x + added) / (how[:, None].to(x.dtype) if isinstance(how, Tensor) else how)
        return F.cross_entropy(x, target)

    def ours(h: Tensor, w: Tensor) -> Tensor:
        common: dict[str, Any] = {"candidates": ids, "candidate_bias": bias, "temperature": how}
        out = linear_loss(h, w, target, losses.cross_entropy(), backend=place.backend, **common)
        with torch.no_grad():
            own = linear_logprobs(h, w, target, backend=place.backend, **common)
        torch.testing.assert_close(-own.sum() / (target >= 0).sum(), out.loss.detach(), rtol=1e-5, atol=1e-6)
        return out.loss

    found = []
    for call, kind in ((ours, torch.float32), (plain, torch.float32), (plain, torch.float64)):
        leaves = [t.detach().to(kind).requires_grad_() for t in (hidden, weight)]
        value = call(*leaves)
        found.append((value.detach(), *torch.autograd.grad(value, leaves)))
    for mine, eager, exact in zip(*found, strict=True):
        assert_within_budget(mine, eager, exact, torch.float32, "candidates")


def test_candidates_that_are_wrong() -> None:
    hidden, weight, target = operands(torch.float32, "cpu")
    ids, bias = torch.arange(6), torch.zeros(6)

    def call(loss: Any = None, **options: Any) -> None:
        linear_loss(hidden, weight, target, loss or losses.cross_entropy(), **options)

    for message, options in {
        "goes with candidates": {"candidate_bias": bias},
        r"must be \[K\], or": {"candidates": ids.view(2, 3)},
        "shape of candidates": {"candidates": ids, "candidate_bias": bias[:3]},
        "pass one of them": {"candidates": ids, "batch": {"kept_ids": sets("cpu")}},
        "softcap": {"candidates": ids, "candidate_bias": bias, "softcap": 5.0},
        "takes no gradient": {"candidates": ids, "candidate_bias": bias.clone().requires_grad_()},
        "label smoothing": {"candidates": ids, "loss": losses.cross_entropy(label_smoothing=0.1)},
        "K at least 1": {"candidates": ids[:0]},
        "candidates, and .* keep none": {"candidates": torch.full((TOKENS, 2), -1)},
        r"batch\['candidate_bias'\] goes with": {"batch": {"candidate_bias": bias}},
    }.items():
        with pytest.raises(ValueError, match=message):
            call(**options)
    with pytest.raises(IndexError, match="kept_ids"):
        call(candidates=ids + VOCAB)


@pytest.mark.parametrize("place", OURS)
def test_offsets_that_are_wrong_write_nowhere_else(place: Place) -> None:
    entries, tokens, device = 30, 6, place.device
    around = torch.zeros(200 + entries + tokens, device=device)
    starts, ends = torch.empty(2, tokens, dtype=torch.int64, device=device).unbind()
    rows, columns = torch.full((2, entries + tokens), -1, device=device).unbind()
    numbers = torch.ones(2, device=device).unbind()
    sevens, bias = torch.full((entries,), 7, device=device), torch.full((entries,), 5.0, device=device)
    offsets = torch.tensor([-40, *[entries] * tokens], device=device)
    out, given = (starts, ends, rows, columns, around[200:], *numbers), (sevens, offsets, bias, tokens, 0, 50, False)
    launch.kept_sets(*out, sevens[:tokens], *given)
    assert not around[:200].any() and all(number.isnan() for number in numbers)
