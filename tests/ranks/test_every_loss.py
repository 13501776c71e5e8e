"""Every loss of the table, alone and with metrics, in every layout and every way of running: the plain call's values
and gradients, or a refusal that says why.

``items`` says which of the product ``make test`` runs.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import ranks
import torch
from loss_cases import LOSS_CASES, LossCase, LossInputs, inputs_of, run_reference
from loss_cases import VOCAB as TABLE_VOCAB
from test_layouts import own_tokens, split, spread
from tiers import tier
from torch import Tensor

from chunked_head import TokenParallel, VocabParallel, linear_loss, metrics
from chunked_head.losses.base import DENSE

TOKENS, VOCAB, ROWS = 37, 131, [20, 111]
LENGTHS = [5, 1, 7, 6, 3, 0, 8, 4, 3]  # of the table's segments of so many tokens
LAYOUTS = ("one", "vocabulary", "sequence", "tokens")
WAYS = ("plain", "chunks", "kept", "streams", "lengths", "none", "twice", "budget", "compiled")
OPTIONS: dict[str, dict[str, Any]] = {
    "chunks": {"chunk_tokens": 8}, "none": {"reduction": "none"},
    "streams": {"stream_weights": (1.0, 0.5)}, "lengths": {"segment_lengths": LENGTHS, "chunk_tokens": 16},
}  # fmt: skip
UPSTREAM = torch.linspace(0.3, 1.7, TOKENS, dtype=torch.float64)
CASES = {case.name: case for case in LOSS_CASES}


class Call(NamedTuple):
    """One item of the product."""

    loss: str
    layout: str
    way: str
    measured: bool

    @property
    def case(self) -> LossCase:
        return CASES[self.loss]

    @property
    def fields(self) -> tuple[str, ...]:
        return (*self.case.batch, "kept_ids") if self.way == "kept" else self.case.batch

    def __str__(self) -> str:
        return f"{self.loss} {self.layout} {self.way} {'metrics' if self.measured else 'alone'}"


class Refused(NamedTuple):
    """The words of a ValueError or NotImplementedError."""

    words: str


@functools.cache
def needs(loss: str) -> frozenset[str]:
    return frozenset(name for _, summand in CASES[loss].losses.terms for name in summand.needs)


def refusals(call: Call) -> list[str]:
    """Words of the refusals that the call may meet; none where it has to work."""
    case, asked, found = call.case, needs(call.loss), []
    summands = [summand for _, summand in case.losses.terms]
    if call.layout in ("vocabulary", "sequence") and case.teacher_vocab != TABLE_VOCAB:
        found.append("a teacher of the same vocabulary")
    if call.layout == "sequence" and "teacher_logits" in case.batch:
        found.append("give teacher_hidden and teacher_weight")
    if "kept_ids" in call.fields:
        if asked & {*DENSE, "weighted_sum", "mean_logit", "topk_logprobs"}:
            found.append("which is of the whole vocabulary; make two calls")
        if not case.target:
            found.append("pass token ids")
        if call.layout == "sequence":
            found.append("gather hidden states and sets beforehand")
    if call.way == "none":
        if call.measured:
            found.append("metrics go with one loss of the call")
        if any(summand.scope == "segment" for summand in summands):
            found.append("puts a segment's tokens together")
        if any(summand.reduction or summand.normalizer for summand in summands):
            found.append("names a reduction or normalizer of its own")
    if call.way == "lengths" and call.layout in ("sequence", "tokens"):
        found.append("segment_lengths")
    return found


def measured(call: Call) -> list[Any]:
    """Every metric that the call's fields suffice for."""
    case = call.case
    if not call.measured:
        return []
    found = [metrics.entropy(), metrics.lse("max"), metrics.top_probability("min")]
    if "kept_ids" not in call.fields:
        found.append(metrics.mean_logit())
    if case.target:
        found += [metrics.accuracy(), metrics.perplexity(), metrics.logprob("min")]
        if "old_logprobs" in case.batch:
            found += [metrics.ratio(), metrics.effective_sample_size(), metrics.kl_old()]
        if "advantages" in case.batch:
            found += [metrics.clip_fraction(side="signed"), metrics.advantage()]
        if "ref_logprobs" in case.batch:
            found.append(metrics.kl_reference())
    if case.segmented:
        found += [metrics.perplexity("segment"), metrics.accuracy(weighting="segment", name="by_segment")]
    if needs(call.loss) & set(DENSE):
        found += [metrics.acceptance(), metrics.agreement()]
    return found


def made(call: Call, garbage: bool = False) -> LossInputs:
    more = tuple(set(call.fields) - set(call.case.batch))
    inputs = inputs_of(call.case, torch.float64, "cpu", garbage, tokens=TOKENS, vocab=VOCAB, more=more)
    batch = {name: value.double() if value.is_floating_point() else value for name, value in inputs.batch.items()}
    return replace(inputs, batch=batch)


def places(rank: int) -> Tensor:
    """The tokens of a rank that has some of the batch."""
    mine = torch.rand(TOKENS, generator=torch.Generator().manual_seed(11)) < 0.7
    return (mine if rank == 0 else ~mine).nonzero().flatten()


def of_rank(call: Call, rank: int) -> tuple[LossInputs, Tensor, dict[str, Any]]:
    """What a rank gives to its call, the upstream gradients of its tokens, and its options."""
    inputs = made(call, garbage=True)
    if call.layout == "one":
        return inputs, UPSTREAM, {}
    if call.layout == "tokens":
        return spread(call.case, inputs, places(rank)), UPSTREAM[places(rank)], {"parallel": TokenParallel()}
    inputs, upstream = split(inputs, ROWS, rank, call.case.teacher_vocab), UPSTREAM
    if call.layout == "sequence":
        inputs = own_tokens(inputs, 2, rank)
        upstream = torch.cat([upstream, torch.ones(1)]).chunk(2)[rank]
    return inputs, upstream, {"parallel": VocabParallel(rows=ROWS, sequence_sharded=call.layout == "sequence")}


def second_stream(hidden: Tensor) -> Tensor:
    return hidden.detach().flip(1) * 0.5


def step(call: Call, inputs: LossInputs, upstream: Tensor, **options: Any) -> dict[str, Any]:
    """A call and its backward."""
    hidden, weight = (t.detach().clone().requires_grad_() for t in (inputs.hidden, inputs.weight))
    head = {k: v.detach().clone().requires_grad_() if k == "bias" else v for k, v in inputs.head.items()}
    states = [hidden, second_stream(hidden).requires_grad_()] if call.way == "streams" else [hidden]
    options |= {"batch": inputs.batch, "num_segments": inputs.num_segments, "metrics": measured(call)}
    options |= head | OPTIONS.get(call.way, {})
    if call.way == "budget":
        options["memory_budget"] = 120_000 if call.layout == "sequence" or call.loss == "everything" else 50_000
    if call.way == "lengths":
        options["batch"] = {name: value for name, value in inputs.batch.items() if name != "segments"}
        options["num_segments"] = None

    def loss_of(*states: Tensor) -> Any:
        given = states[0] if len(states) == 1 else list(states)
        return linear_loss(given, weight, inputs.target, call.case.losses, **options)

    if call.way == "compiled":
        torch._dynamo.reset()
        loss_of = torch.compile(loss_of, backend="eager", fullgraph=True)
    out = loss_of(*states)
    if call.way == "none":
        out.loss.backward(upstream)
    else:
        # the second backward computes logits again
        parts = (0.5, 0.2) if call.way == "twice" else (0.7,)
        for i, part in enumerate(parts, 1):
            out.loss.backward(torch.tensor(part, dtype=torch.float64), retain_graph=i < len(parts))
    each = out.streams or (out,)
    return {
        "loss": out.loss.detach(), "parts": [value for one in each for value in one.parts.values()],
        "metrics": [value.value for one in each for value in one.metrics.values()],
        "states": [one.grad for one in states],
        "columns": [leaf.grad for leaf in (weight, head.get("bias")) if leaf is not None],
    }  # fmt: skip


def attempt(call: Call, rank: int = 0) -> dict[str, Any] | Refused:
    inputs, upstream, options = of_rank(call, rank)
    try:
        return step(call, inputs, upstream, **options)
    except (ValueError, NotImplementedError) as error:
        return Refused(str(error))


@functools.cache
def plain(loss: str, way: str, measured: bool) -> dict[str, Any]:
    """What has to come of a call, by one rank's plain ones of one chunk."""
    call = Call(loss, "one", way, measured)
    inputs, simple = made(call), call._replace(way="kept" if way == "kept" else "plain")
    if way == "streams":
        found = [step(simple, one, UPSTREAM) for one in (inputs, replace(inputs, hidden=second_stream(inputs.hidden)))]
        factors = OPTIONS["streams"]["stream_weights"]

        def total(name: str, at: int | None = None) -> Tensor:
            return sum(
                factor * (one[name] if at is None else one[name][at])
                for factor, one in zip(factors, found, strict=True)
            )

        return {
            "loss": total("loss"), "parts": found[0]["parts"] + found[1]["parts"],
            "metrics": found[0]["metrics"] + found[1]["metrics"],
            "states": [factor * one["states"][0] for factor, one in zip(factors, found, strict=True)],
            "columns": [total("columns", at) for at in range(len(found[0]["columns"]))],
        }  # fmt: skip
    if way == "none":
        # the sum with the upstream gradients as weights
        own = inputs.batch.get("token_weights", inputs.batch.get("nll_mask", torch.ones(TOKENS)))
        inputs = replace(inputs, batch=inputs.batch | {"token_weights": own * UPSTREAM / 0.7})
        simple = simple._replace(loss="cross-entropy" if loss == "nll-mask" else loss)
        found = step(simple, inputs, UPSTREAM, reduction="sum")
        return found | {"loss": found["loss"] * 0.7, "parts": []}
    return step(simple, inputs, UPSTREAM)


def gathered(call: Call, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What ranks have found, as one rank would."""
    first = found[0]

    def tokens(parts: Sequence[Tensor]) -> Tensor:
        if call.layout == "sequence":
            return torch.cat(list(parts))[:TOKENS]
        if call.layout != "tokens":
            assert all(torch.equal(part, parts[0]) for part in parts)
            return parts[0]
        whole = torch.zeros(TOKENS, *parts[0].shape[1:], dtype=parts[0].dtype)
        for rank, part in enumerate(parts):
            whole[places(rank)] = part
        return whole

    made = dict(first)
    made["states"] = [tokens(parts) for parts in zip(*(one["states"] for one in found), strict=True)]
    columns = list(zip(*(one["columns"] for one in found), strict=True))
    shares = call.layout == "tokens"
    made["columns"] = [sum(parts) if shares else torch.cat(parts) for parts in columns]
    if call.way == "none":
        made["loss"] = (tokens([one["loss"] for one in found]) * UPSTREAM).sum()
    elif shares:
        made["loss"] = sum(one["loss"] for one in found)
        made["parts"] = [sum(parts) for parts in zip(*(one["parts"] for one in found), strict=True)]
    for one in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(one["metrics"], first["metrics"], strict=True))
    return made


def hold(call: Call, outcomes: Sequence[Any]) -> None:
    for outcome in outcomes:
        assert not isinstance(outcome, str), outcome  # a traceback
    allowed = refusals(call)
    for outcome in outcomes:
        assert isinstance(outcome, Refused) == bool(allowed), outcome
        assert not allowed or any(words in outcome.words for words in allowed), outcome
    if allowed:
        return
    found, expected = gathered(call, outcomes), plain(call.loss, call.way, call.measured)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )


def items() -> list[Any]:
    """The product. ``make test`` runs of it, for the loss in row i of the table and the way in column j: plainly every
    layout, with metrics where i + layout is odd; every third other way, where i + j is divisible by 3, in one layout;
    compiled, which takes half a second, one loss in eight; the last row, which is of everything, in several tiles."""
    found = []
    for i, case in enumerate(LOSS_CASES):
        for j, way in enumerate(WAYS):
            # ranks' calls break a graph: compiled, they are plain ones
            layouts = LAYOUTS[:1] if way == "compiled" else LAYOUTS
            calls = [Call(case.name, layout, way, measured) for measured in (False, True) for layout in layouts]
            working = [call for call in calls if not refusals(call)] or calls
            if way == "plain":
                drawn = [Call(case.name, layout, way, (i + k) % 2 == 1) for k, layout in enumerate(LAYOUTS)]
            elif i % 8 == 0 if way == "compiled" else (i + j) % 3 == 0:
                drawn = [working[(i + j) // 3 % len(working)]]
            else:
                drawn = []
            if (case, way) == (LOSS_CASES[-1], "budget"):
                drawn = [Call(case.name, "one", way, False)]
            found += [one for call in calls for one in tier(pytest.param(call, id=str(call)), call in drawn)]
    return found


def work(rank: int, device: str, calls: Sequence[Call]) -> dict[str, Any]:
    return {str(call): ranks.outcome(attempt, call, rank) for call in calls}


@pytest.fixture(scope="module")
def of_two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks make of the items that are to run."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    asked = [item.callspec.params["call"] for item in items if item.originalname == "test_every_loss"]
    calls = [call for call in asked if call.layout != "one"]
    return ranks.run(functools.partial(work, calls=calls), 2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("call", items())
def test_every_loss(call: Call, request: pytest.FixtureRequest) -> None:
    if call.layout == "one":
        hold(call, [ranks.outcome(attempt, call)])
    else:
        hold(call, [rank[str(call)] for rank in request.getfixturevalue("of_two")])


def test_every_kind_of_loss_in_one_graph() -> None:
    first = {term.kind: term for case in reversed(LOSS_CASES) for term in case.terms}
    fields = {name for case in LOSS_CASES for name in case.batch} - {"kept_ids", "teacher_logits", "documents"}
    one = LossCase("", tuple(first.values()), tuple(sorted(fields)))
    inputs = inputs_of(one, torch.float64, "cpu", tokens=TOKENS, vocab=VOCAB)
    hidden, weight = inputs.hidden.requires_grad_(), inputs.weight

    def loss_of(hidden: Tensor) -> Tensor:
        return linear_loss(hidden, weight, inputs.target, one.losses, batch=inputs.batch, num_segments=9).loss

    torch._dynamo.reset()
    compiled, eager = torch.compile(loss_of, backend="eager", fullgraph=True)(hidden), loss_of(hidden)
    torch.testing.assert_close(compiled, eager, rtol=0, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(loss, hidden) for loss in (compiled, eager)), rtol=0, atol=0)


@pytest.mark.parametrize("case", LOSS_CASES, ids=lambda case: case.name)
def test_the_plain_call_is_the_oracle(case: LossCase) -> None:
    loss, parts, grads = run_reference(case, made(Call(case.name, "one", "plain", False)))
    found = plain(case.name, "plain", False)
    torch.testing.assert_close(found["loss"], loss, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found["parts"], list(parts.values()), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(
        [*found["states"], *found["columns"]], [0.7 * grad for grad in grads], rtol=1e-9, atol=1e-11
    )
