"""Every loss of the table, alone and with metrics, in every layout of ranks and every way of running: the numbers of a
single rank's plain call, or a refusal that says why.

``items`` says which of the product ``make test`` runs.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import logits_cases
import pytest
import ranks
import torch
from budget import assert_within_budget
from loss_cases import LOSS_CASES, SOME_CASES, LossCase, LossInputs, assert_scalar, inputs_of, run_reference
from loss_cases import VOCAB as TABLE_VOCAB
from tiers import tier
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from chunked_head import TokenParallel, VocabParallel, linear_loss, logits_loss, metrics
from chunked_head.losses.base import DENSE_STATISTICS

TOKENS, VOCAB = 37, 131
LENGTHS = [5, 1, 7, 6, 3, 0, 8, 4, 3]  # of the table's segments of so many tokens
UPSTREAM = torch.linspace(0.3, 1.7, TOKENS, dtype=torch.float64)
CASES = {case.name: case for case in LOSS_CASES}


class Layout(NamedTuple):
    """Ranks that share a vocabulary, for each of two groups of tokens where those are shared."""

    rows: str = ""  # how the vocabulary lies on ranks: in even parts, uneven ones, or with padding; whole on each if ""
    tokens: str = ""  # how the tokens lie on two groups
    count: int = 2  # ranks that share the vocabulary
    chunks: tuple[int | None, int | None] = (None, None)  # hundredths of all tokens in a chunk of each group
    sequence: bool = False  # each rank of the vocabulary has hidden states of its own tokens
    said: bool = False  # rows are given to VocabParallel
    logits: bool = False
    inplace: bool = False

    @property
    def columns(self) -> int:
        return self.count if self.rows else 1

    @property
    def ranks(self) -> int:
        return self.columns * (2 if self.tokens else 1)

    def rows_of(self, vocab: int) -> list[int]:
        if self.rows == "even":
            return [len(part) for part in torch.arange(vocab).chunk(self.count)]
        return [20, vocab - 20] if self.rows == "uneven" else [-(-vocab * 58 // 100)] * 2


LAYOUTS = {
    "one": Layout(), "vocabulary": Layout("uneven", said=True), "tokens": Layout(tokens="mixed"),
    "sequence": Layout("uneven", said=True, sequence=True),
    # plain calls alone
    "chunks": Layout("even", chunks=(42, None)), "padded": Layout("padded", chunks=(100, None)),
    "even-sequence": Layout("even", chunks=(42, None), sequence=True),
    "four": Layout("even", count=4, chunks=(25, None)),
    "four-sequence": Layout("even", count=4, chunks=(26, None), sequence=True),
    "mixed": Layout(tokens="mixed", chunks=(42, None)),  # segments that lie on both ranks, unevenly
    "halves": Layout(tokens="halves", chunks=(None, 8)), "empty": Layout(tokens="empty", chunks=(None, 31)),
    "ignored": Layout(tokens="ignored", chunks=(17, 6)),  # a rank that has no tokens, and one whose tokens do not count
    "grid": Layout("even", "mixed", chunks=(42, 17), said=True),
    "grid-empty": Layout("even", "empty", chunks=(42, 17), said=True),
    "logits": Layout(logits=True), "logits-uneven": Layout("uneven", said=True, logits=True),
    "logits-padded": Layout("padded", logits=True, inplace=True), "logits-strided": Layout("even", logits=True),
    "logits-four": Layout("even", count=4, logits=True), "logits-mixed": Layout(tokens="mixed", logits=True),
    "logits-grid": Layout("even", "mixed", said=True, logits=True),
}  # fmt: skip
WAYS = ("plain", "chunks", "kept", "streams", "lengths", "none", "twice", "budget", "compiled")
OPTIONS: dict[str, dict[str, Any]] = {
    "chunks": {"chunk_tokens": 8}, "none": {"reduction": "none"},
    "streams": {"stream_weights": (1.0, 0.5)}, "lengths": {"segment_lengths": LENGTHS, "chunk_tokens": 16},
}  # fmt: skip
# plain calls in other dtypes than float64 and by kernels, within the error budget
NUMBERS = {
    "fp16": (torch.float16, "torch"), "kernels": (torch.float32, "triton"), "fp16 kernels": (torch.float16, "triton"),
    "bf16 kernels": (torch.bfloat16, "triton"),
}  # fmt: skip
ON_CPU = [("chunks", "fp16"), ("mixed", "fp16"), ("logits-uneven", "fp16"), ("chunks", "kernels"),
          ("logits-strided", "kernels")]  # fmt: skip
ON_GPUS = [
    ("chunks", "bf16 kernels"), ("padded", "bf16 kernels"), ("even-sequence", "bf16 kernels"),
    ("four", "bf16 kernels"), ("four-sequence", "bf16 kernels"), ("grid", "bf16 kernels"),
    ("grid-empty", "bf16 kernels"), ("logits-uneven", "bf16 kernels"), ("logits-four", "bf16 kernels"),
    ("chunks", "kernels"), ("vocabulary", "fp16 kernels"), ("logits-padded", "kernels"),
]  # fmt: skip
PART = 9  # cases that a group of processes runs on GPUs: kernels of all would take it minutes to compile


class Call(NamedTuple):
    """One item of the product."""

    loss: str
    layout: str
    way: str
    measured: bool = False

    @property
    def case(self) -> LossCase:
        return CASES[self.loss]

    @property
    def placed(self) -> Layout:
        return LAYOUTS[self.layout]

    @property
    def fields(self) -> tuple[str, ...]:
        return (*self.case.batch, "kept_ids") if self.way == "kept" else self.case.batch

    @property
    def sizes(self) -> tuple[int, int]:
        """Tokens and vocabulary; of the table where its draw of numbers meets a budget."""
        return (97, TABLE_VOCAB) if self.way in NUMBERS else (TOKENS, VOCAB)

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
    case, layout, asked, found = call.case, call.placed, needs(call.loss), []
    summands = [summand for _, summand in case.losses.terms]
    if layout.rows and case.teacher_vocab != TABLE_VOCAB:
        found.append("split both vocabularies alike")
    if layout.sequence and "teacher_logits" in case.batch:
        found.append("give teacher_hidden and teacher_weight")
    if "kept_ids" in call.fields:
        if asked & {*DENSE_STATISTICS, "weighted_sum", "mean_logit", "topk_logprobs", "divergence", "vocabulary_sum"}:
            found.append("which is of the whole vocabulary; make two calls")
        if not case.target:
            found.append("pass token ids")
        if layout.sequence:
            found.append("gather hidden states and sets beforehand")
    if call.way == "none":
        if call.measured:
            found.append("metrics go with one loss of the call")
        if any(summand.scope == "segment" for summand in summands):
            found.append("puts a segment's tokens together")
        if any(summand.reduction or summand.normalizer for summand in summands):
            found.append("names a reduction or normalizer of its own")
    if call.way == "lengths" and (layout.sequence or layout.tokens):
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
        if "old_logprobs" in case.batch:
            found += [
                metrics.clip_fraction(side="signed", level="segment"),
                metrics.ratio(level="segment", reduce="max"),
            ]
    if any(summand.kind in ("dpo", "simpo", "cpo", "orpo", "kto") for _, summand in case.losses.terms):
        found += metrics.preference(case.losses)
    if needs(call.loss) & set(DENSE_STATISTICS):
        found += [metrics.acceptance(), metrics.agreement()]
    return found


def made(call: Call, garbage: bool = False) -> LossInputs:
    """Arguments of one rank; logits in the place of hidden states where the layout has those."""
    dtype, (tokens, vocab) = NUMBERS.get(call.way, (torch.float64,))[0], call.sizes
    # a pinned draw: of some hundred 16-bit gradients one or two find eager's largest error an ulp or two
    drawn = {"tokens": tokens, "vocab": vocab, "seed": 4 if call.way in NUMBERS else 3}
    inputs = inputs_of(call.case, dtype, "cpu", garbage, more=call.fields, **drawn)
    if dtype == torch.float64:
        batch = {name: value.double() if value.is_floating_point() else value for name, value in inputs.batch.items()}
        inputs = replace(inputs, batch=batch)
        if inputs.target is not None:  # of some the likeliest: no accuracy is compared where it is 0
            some = (torch.arange(tokens) % 4 == 0) & (inputs.target >= 0) & (inputs.target < vocab)
            likeliest = (inputs.hidden @ inputs.weight.T).argmax(1)
            inputs = replace(inputs, target=torch.where(some, likeliest, inputs.target))
    if call.placed.logits:
        logits, batch, head = logits_cases.on_logits(call.case, inputs, dtype)
        inputs = replace(inputs, hidden=logits, batch=batch, head=head)
    return inputs


# ---- a rank's part of a batch


def places(call: Call, group: int) -> Tensor:
    """Tokens of the batch that a group has; -1 for one that does not count."""
    kind, every = call.placed.tokens, torch.arange(call.sizes[0])
    if kind == "mixed":
        mine = torch.rand(len(every), generator=torch.Generator().manual_seed(11)) < 0.7
        return every[mine if group == 0 else ~mine]
    if kind == "halves":
        return every.tensor_split([len(every) * 36 // 100])[group]
    return every if group == 0 else torch.full((13 if kind == "ignored" else 0,), -1)


OF_THE_CALL = ("pairs", "segment_labels", "kl_baseline", "teacher_weight", "teacher_bias")


def spread(case: LossCase, inputs: LossInputs, at: Tensor) -> LossInputs:
    """Arguments of a rank that has the tokens ``at``."""
    target, ignored = inputs.target, at < 0
    if target is not None:
        target = torch.where(ignored, -100, target[at])
    elif "mask" not in case.batch:
        at, ignored = at[~ignored], ignored[~ignored]
    batch = {name: value if name in OF_THE_CALL else value[at].contiguous() for name, value in inputs.batch.items()}
    if "mask" in batch:
        batch["mask"] = batch["mask"] & ~ignored
    head = inputs.head_of(lambda each: each[at].contiguous())
    return LossInputs(inputs.hidden[at].contiguous(), inputs.weight, target, batch, head, inputs.num_segments)


def piece(tensor: Tensor, rows: Sequence[int], rank: int, dim: int = 0) -> Tensor:
    """A rank's part of what has a vocabulary along ``dim``, nan in padding."""
    shape = list(tensor.shape)
    shape[dim] = max(0, sum(rows) - tensor.shape[dim])
    return torch.cat([tensor, tensor.new_full(shape, torch.nan)], dim).narrow(dim, sum(rows[:rank]), rows[rank]).clone()


def split(inputs: LossInputs, rows: Sequence[int], rank: int, logits: bool) -> LossInputs:
    """Arguments of a rank that has its rows of the vocabulary."""
    dims = {"teacher_weight": 0, "teacher_bias": 0, "teacher_logits": 1}

    def part(name: str, value: Tensor) -> Tensor:
        vocab = value.shape[dims[name]]
        same = vocab == (inputs.hidden.shape[1] if logits else len(inputs.weight))
        own = rows if same else [vocab // 9] * len(rows)  # refused, on every rank
        return piece(value, own, rank, dims[name])

    batch = {name: part(name, value) if name in dims else value for name, value in inputs.batch.items()}
    head = {name: piece(value, rows, rank) if name == "bias" else value for name, value in inputs.head.items()}
    if logits:
        return replace(inputs, hidden=piece(inputs.hidden, rows, rank, dim=1), batch=batch, head=head)
    return replace(inputs, weight=piece(inputs.weight, rows, rank), batch=batch, head=head)


def own_tokens(inputs: LossInputs, count: int, rank: int) -> LossInputs:
    """A rank's tokens, as many everywhere: the last ones of the last rank do not count."""
    each = -(-len(inputs.hidden) // count)

    def own(values: Tensor, fill: float) -> Tensor:
        missing = each * count - len(values)
        return torch.cat([values, values.new_full((missing, *values.shape[1:]), fill)])[rank * each :][:each]

    batch = {
        name: value if name in OF_THE_CALL else own(value, 0 if value.dtype == torch.bool else -1)
        for name, value in inputs.batch.items()
    }
    # a token that is not there does not count
    target = inputs.hidden.new_zeros(len(inputs.hidden), dtype=torch.int64) if inputs.target is None else inputs.target
    head = inputs.head_of(lambda each: own(each, -1))
    return LossInputs(own(inputs.hidden, torch.nan), inputs.weight, own(target, -100), batch, head, inputs.num_segments)


@functools.cache
def mesh_of(device: str, columns: int) -> Any:
    return init_device_mesh(device, (2, columns), mesh_dim_names=("tokens", "vocab"))


def of_rank(call: Call, rank: int, device: str) -> tuple[LossInputs, Tensor, dict[str, Any]]:
    """What a rank gives to its call, the upstream gradients of its tokens, and its options."""
    layout, inputs, upstream, options = call.placed, made(call, garbage=True), UPSTREAM, dict[str, Any]()
    group, part = divmod(rank, layout.columns)
    if layout.tokens:
        at = places(call, group)
        inputs, upstream = spread(call.case, inputs, at), upstream[at] if call.way == "none" else upstream
    if layout.rows:
        inputs = split(inputs, layout.rows_of(call.sizes[1]), part, layout.logits)
    if layout.sequence:
        inputs = own_tokens(inputs, layout.columns, part)
        upstream = torch.cat([upstream, torch.ones(1)]).chunk(2)[part % 2]
    inputs = inputs.on(device)
    if call.layout == "logits-strided" and rank == 1:  # the same messages, whatever rows lie in
        wide = torch.cat([inputs.hidden, torch.full_like(inputs.hidden, torch.nan)], 1)
        inputs = replace(inputs, hidden=wide[:, : inputs.hidden.shape[1]])
    groups: dict[str, Any] = {"tokens": None, "vocab": None}
    if layout.tokens and layout.rows:
        mesh = mesh_of(device.partition(":")[0], layout.columns)
        groups = {name: mesh[name] for name in groups}
    parallel: Any = TokenParallel(groups["tokens"]) if layout.tokens else None
    if layout.rows:
        rows = layout.rows_of(call.sizes[1]) if layout.said else None
        parallel = VocabParallel(groups["vocab"], rows=rows, sequence_sharded=layout.sequence, tokens=parallel)
        options |= {} if layout.said else {"vocab_size": call.sizes[1]}
    hundredths = layout.chunks[group]
    if hundredths is not None:
        options["chunk_tokens"] = hundredths * call.sizes[0] // 100
    return inputs, upstream, options | ({} if parallel is None else {"parallel": parallel})


# ---- a step


def second_stream(hidden: Tensor) -> Tensor:
    return hidden.detach().flip(1) * 0.5


def step(call: Call, inputs: LossInputs, upstream: Tensor, **options: Any) -> dict[str, Any]:
    """A call and its backward."""
    layout, case = call.placed, call.case
    hidden, weight = (t.detach().clone().requires_grad_() for t in (inputs.hidden, inputs.weight))
    if not inputs.hidden.is_contiguous():
        hidden = inputs.hidden.detach().requires_grad_()
    head = {k: v.detach().clone().requires_grad_() if k == "bias" else v for k, v in inputs.head.items()}
    states = [hidden, second_stream(hidden).requires_grad_()] if call.way == "streams" else [hidden]
    options |= {"batch": inputs.batch, "num_segments": inputs.num_segments, "metrics": measured(call)}
    options |= head | OPTIONS.get(call.way, {}) | {"backend": NUMBERS.get(call.way, ("", "torch"))[1]}
    if call.way == "budget":
        options["memory_budget"] = 120_000 if call.layout == "sequence" or call.loss == "everything" else 50_000
    if call.way == "lengths":
        options["batch"] = {name: value for name, value in inputs.batch.items() if name != "segments"}
        options["num_segments"] = None

    # what traces a user's function breaks a graph, what it gives does not
    known = case.losses if any("function" in term.options for term in case.terms) else None

    def loss_of(*states: Tensor) -> Any:
        loss = case.losses if known is None else known
        if layout.logits:
            # an operation whose backward needs nothing of its output, which inplace=True overwrites
            x = states[0] * 1.0 if layout.inplace else states[0]
            return logits_loss(x, inputs.target, loss, inplace=layout.inplace, **options)
        given = states[0] if len(states) == 1 else list(states)
        return linear_loss(given, weight, inputs.target, loss, **options)

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
            out.loss.backward(torch.full_like(out.loss, part), retain_graph=i < len(parts))
    each = out.streams or (out,)
    leaves = () if layout.logits else (weight, head.get("bias"))
    return {
        "loss": out.loss.detach().cpu(), "parts": [value.cpu() for one in each for value in one.parts.values()],
        "metrics": [value.value.cpu() for one in each for value in one.metrics.values()],
        "states": [one.grad.cpu() for one in states],
        "columns": [leaf.grad.cpu() for leaf in leaves if leaf is not None],
    }  # fmt: skip


def attempt(call: Call, rank: int = 0, device: str = "cpu") -> dict[str, Any] | Refused:
    inputs, upstream, options = of_rank(call, rank, device)
    try:
        return step(call, inputs, upstream, **options)
    except (ValueError, NotImplementedError) as error:
        return Refused(str(error))


# ---- what ranks have found, beside one rank's


@functools.cache
def plain(loss: str, way: str, measured: bool, logits: bool = False) -> dict[str, Any]:
    """What has to come of a call, by one rank's plain ones of one chunk."""
    call = Call(loss, "logits" if logits else "one", way, measured)
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


def whole(found: Sequence[Tensor], at: Sequence[Tensor], tokens: int) -> Tensor:
    """Rows of all groups at their places in the batch; what does not count has none."""
    rows = torch.zeros(tokens, *found[0].shape[1:], dtype=found[0].dtype)
    for mine, places in zip(found, at, strict=True):
        assert not mine[places[: len(mine)] < 0].any()
        kept = places >= 0
        rows[places[kept]] = mine[kept[: len(mine)]]
    return rows


def joined(call: Call, group: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Numbers of ranks that share a vocabulary: each has the same, and gradients of its own rows."""
    layout, one = call.placed, group[0]

    def tokens(parts: Sequence[Tensor]) -> Tensor:
        if layout.logits and parts[0].dim() == 2:
            return torch.cat(list(parts), 1)
        if layout.sequence and parts[0].dim():
            return torch.cat(list(parts))[: call.sizes[0]]
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]

    for other in group[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other["metrics"], one["metrics"], strict=True))
    return one | {
        "loss": tokens([each["loss"] for each in group]),
        "states": [tokens(parts) for parts in zip(*(each["states"] for each in group), strict=True)],
        "columns": [torch.cat(parts) for parts in zip(*(each["columns"] for each in group), strict=True)],
    }


def gathered(call: Call, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What ranks have found, as one rank would."""
    layout = call.placed
    groups = [joined(call, found[i : i + layout.columns]) for i in range(0, len(found), layout.columns)]
    one = groups[0]
    if layout.tokens:
        at = [places(call, group) for group in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(groups[1]["metrics"], one["metrics"], strict=True))

        def each(name: str) -> list[Any]:
            return list(zip(*(group[name] for group in groups), strict=True))

        shares = [group["loss"] for group in groups]
        one = one | {
            "loss": whole(shares, at, TOKENS) if shares[0].dim() else sum(shares),
            "parts": list(map(sum, each("parts"))),
            "states": [whole(parts, at, call.sizes[0]) for parts in each("states")],
            "columns": list(map(sum, each("columns"))),
        }  # fmt: skip
    return one | ({"loss": (one["loss"] * UPSTREAM).sum()} if call.way == "none" else {})


def without_padding(call: Call, found: dict[str, Any]) -> dict[str, Any]:
    vocab = call.sizes[1]
    if call.placed.logits:
        assert not any(grad[:, vocab:].any() for grad in found["states"])
        return found | {"states": [grad[:, :vocab] for grad in found["states"]]}
    assert not any(grad[vocab:].any() for grad in found["columns"])
    return found | {"columns": [grad[:vocab] for grad in found["columns"]]}


def hold(call: Call, outcomes: Sequence[Any]) -> None:
    for outcome in outcomes:
        assert not isinstance(outcome, str), outcome  # a traceback
    allowed = refusals(call)
    for outcome in outcomes:
        assert isinstance(outcome, Refused) == bool(allowed), outcome
        assert not allowed or any(words in outcome.words for words in allowed), outcome
    if allowed:
        return
    found = without_padding(call, gathered(call, outcomes))
    if call.way in NUMBERS:
        return within_budget(call, found)
    for name, value in plain(call.loss, call.way, call.measured, call.placed.logits).items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )


def within_budget(call: Call, found: dict[str, Any]) -> None:
    """Against full logits in float64 and eager ones in the call's own dtype."""
    case, dtype, inputs, logits = call.case, NUMBERS[call.way][0], made(call), call.placed.logits
    exact = inputs.to(torch.float64)
    if logits:
        given = inputs.hidden, inputs.batch, inputs.head, inputs
        truth = logits_cases.by_oracle(case, given[0].double(), *given[1:])
        (grad,), eager = found["states"], logits_cases.by_oracle(case, *given)
        logits_cases.assert_gradient(grad, 0.7 * eager[2].double(), 0.7 * truth[2], dtype)
    else:
        truth, eager = run_reference(case, exact), run_reference(case, inputs)
        names = ("hidden", "weight", "bias")
        for name, ours, rough, true in zip(
            names, (*found["states"], *found["columns"]), eager[2], truth[2], strict=False
        ):
            assert_within_budget(ours, 0.7 * rough, 0.7 * true, dtype, f"gradient of {name}")
    batch = {name: value.double() if value.is_floating_point() else value for name, value in exact.batch.items()}
    alone = step(
        call._replace(layout="logits" if logits else "one", way="plain"), replace(exact, batch=batch), UPSTREAM
    )
    expected = [value.float() for value in alone["metrics"]]
    torch.testing.assert_close(found["metrics"], expected, rtol=1e-5, atol=1e-6)
    if dtype.itemsize == 2 and not logits and call.placed.tokens:  # kernels round logits by strips of a rank's
        for ours, rough, true in zip(found["parts"], eager[1].values(), truth[1].values(), strict=True):
            assert_within_budget(ours, rough, true, torch.float32, "a loss")
    elif logits or call.placed.tokens:  # a loss may be a small difference of large parts
        close = {"rtol": 2e-6, "atol": 2e-6} if logits else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(found["parts"], [value.float() for value in truth[1].values()], **close)
    else:
        assert_scalar(case, dtype, found["loss"], eager[0], truth[0], "loss")


# ---- the product


def items() -> list[Any]:
    """The product. ``make test`` runs of it, for the loss in row i of the table and the way in column j: plainly the
    first four layouts, with metrics where i + layout is odd; every third other way, where i + j is divisible by 3, in
    one of these layouts; compiled, which takes half a second, one loss in eight; the last row, which is of everything,
    in several tiles. Of the other layouts and of other dtypes three losses, and each loss in some."""
    found = []
    full = list(LAYOUTS)[:4]
    for i, case in enumerate(LOSS_CASES):
        for j, way in enumerate(WAYS):
            # ranks' calls break a graph: compiled, they are plain ones
            layouts = full[:1] if way == "compiled" else full
            calls = [Call(case.name, layout, way, measured) for measured in (False, True) for layout in layouts]
            working = [call for call in calls if not refusals(call)] or calls
            if way == "plain":
                drawn = [Call(case.name, layout, way, (i + k) % 2 == 1) for k, layout in enumerate(full)]
            elif i % 8 == 0 if way == "compiled" else (i + j) % 3 == 0:
                drawn = [working[(i + j) // 3 % len(working)]]
            else:
                drawn = []
            if (case, way) == (LOSS_CASES[-1], "budget"):
                drawn = [Call(case.name, "one", way, False)]
            found += [one for call in calls for one in tier(pytest.param(call, id=str(call)), call in drawn)]
        for j, (layout, way) in enumerate([*((name, "plain") for name in list(LAYOUTS)[4:]), *ON_CPU]):
            call = Call(case.name, layout, way, layout != "logits")
            everywhere = case.name in ("cross-entropy", "gspo", "everything")
            if way == "plain" or case.name in SOME_CASES:
                first = (everywhere or (i + j) % 13 == 0) and (way != "kernels" or case.name != "everything")
                found += tier(pytest.param(call, id=str(call)), first)
    return found


def work(rank: int, device: str, calls: Sequence[Call]) -> dict[str, Any]:
    return {str(call): ranks.outcome(attempt, call, rank, device) for call in calls}


@pytest.fixture(scope="module")
def of_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Any]:
    """What so many ranks make of the items that are to run."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    asked = [item.callspec.params["call"] for item in items if item.originalname == "test_every_loss"]

    @functools.cache
    def of(count: int) -> list[dict[str, Any]]:
        calls = [call for call in asked if call.placed.ranks == count]
        return ranks.run_once(functools.partial(work, calls=calls), count, tmp_path_factory, f"losses-{count}")

    return of


@pytest.mark.parametrize("call", items())
def test_every_loss(call: Call, of_ranks: Callable[[int], Any]) -> None:
    if call.placed.ranks == 1:
        hold(call, [ranks.outcome(attempt, call)])
    else:
        hold(call, [rank[str(call)] for rank in of_ranks(call.placed.ranks)])


def on_gpus() -> list[Any]:
    """Of the first layout all losses, of others some of each kind."""
    found = []
    for layout, way in ON_GPUS:
        cases = [case for case in LOSS_CASES if (layout, way) == ON_GPUS[0] or case.name in SOME_CASES]
        calls = [Call(case.name, layout, way, True) for case in cases]
        parts = [tuple(calls[i : i + PART]) for i in range(0, len(calls), PART)]
        found += [pytest.param(part, call, id=str(call)) for part in parts for call in part]
    return found


@pytest.mark.multigpu
@pytest.mark.parametrize(("part", "call"), on_gpus())
def test_gpus(part: tuple[Call, ...], call: Call, tmp_path_factory: pytest.TempPathFactory) -> None:
    ranks.need_gpus("cuda", call.placed.columns)
    name = f"losses-{part[0]}".replace(" ", "-")  # once for all calls of a part
    found = ranks.run_once(functools.partial(work, calls=part), call.placed.ranks, tmp_path_factory, name, "cuda")
    hold(call, [rank[str(call)] for rank in found])


def test_every_kind_of_loss_in_one_graph() -> None:
    first = {term.kind: term for case in reversed(LOSS_CASES) for term in case.terms}
    fields = {name for case in LOSS_CASES for name in case.batch} - {"kept_ids", "teacher_logits", "documents"}
    users = [term for term in first.values() if "function" in term.options]
    one = LossCase("", tuple([term for term in first.values() if term not in users]), tuple(sorted(fields)))
    known = LossCase("", tuple(users)).losses  # what traces a function breaks a graph, what it gives does not
    inputs = inputs_of(one, torch.float64, "cpu", tokens=TOKENS, vocab=VOCAB)
    hidden, weight = inputs.hidden.requires_grad_(), inputs.weight

    def loss_of(hidden: Tensor) -> Tensor:
        loss = one.losses + known
        return linear_loss(hidden, weight, inputs.target, loss, batch=inputs.batch, num_segments=9).loss

    torch._dynamo.reset()
    compiled, eager = torch.compile(loss_of, backend="eager", fullgraph=True)(hidden), loss_of(hidden)
    torch.testing.assert_close(compiled, eager, rtol=0, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(loss, hidden) for loss in (compiled, eager)), rtol=0, atol=0)


@pytest.mark.parametrize("case", LOSS_CASES, ids=lambda case: case.name)
def test_the_plain_call_is_the_oracle(case: LossCase) -> None:
    loss, parts, grads = run_reference(case, made(Call(case.name, "one", "plain")))
    found = plain(case.name, "plain", False)
    torch.testing.assert_close(found["loss"], loss, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found["parts"], list(parts.values()), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(
        [*found["states"], *found["columns"]], [0.7 * grad for grad in grads], rtol=1e-9, atol=1e-11
    )
