"""Losses in every layout of ranks: the vocabulary, the tokens or both shared, of hidden states and of logits. Values,
metrics and gradients are those of one rank."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import ranks
import tiers
import torch
from budget import assert_within_budget
from logits_cases import assert_gradient, by_oracle, on_logits
from loss_cases import (
    LOSS_CASES,
    SOME_CASES,
    TOKENS,
    VOCAB,
    LossCase,
    LossInputs,
    assert_scalar,
    inputs_of,
    run_reference,
    run_step,
)
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from chunked_head import TokenParallel, VocabParallel, logits_loss, metrics

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# A pinned draw: of some hundred gradients one or two find eager's largest error an ulp or two. Over twenty draws ours
# is 0.9 to 1.1 of eager's in the median.
SEED = 4


class Layout(NamedTuple):
    """Ranks that share a vocabulary, for each of two groups of tokens where those are shared."""

    rows: tuple[int, ...] = ()  # of the vocabulary, by rank; none where each has all
    tokens: str = ""  # how the tokens lie on two groups
    chunks: tuple[int | None, int | None] = (None, None)  # chunk_tokens of each group of tokens
    sequence: bool = False  # each rank of the vocabulary has hidden states of its own tokens
    said: bool = False  # rows are told to VocabParallel
    logits: bool = False
    options: dict[str, Any] = {}  # noqa: RUF012

    @property
    def columns(self) -> int:
        return max(1, len(self.rows))

    @property
    def ranks(self) -> int:
        return self.columns * (2 if self.tokens else 1)


SIZED: dict[str, Any] = {"options": {"vocab_size": VOCAB}}
HALVES, FOURTHS = (166, 165), (83, 83, 83, 82)
LAYOUTS = {
    "chunks": Layout(HALVES, chunks=(40, None), **SIZED),
    "uneven": Layout((20, 311), said=True),
    "padded": Layout((192, 192), chunks=(97, None), **SIZED),
    "sequence": Layout(HALVES, chunks=(40, None), sequence=True, **SIZED),
    "four": Layout(FOURTHS, chunks=(24, None), **SIZED),
    "four-sequence": Layout(FOURTHS, chunks=(25, None), sequence=True, **SIZED),
    "mixed": Layout(tokens="mixed", chunks=(40, None)),  # segments that lie on both ranks, unevenly
    "halves": Layout(tokens="halves", chunks=(None, 7)),
    "empty": Layout(tokens="empty", chunks=(None, 30)),  # one has no tokens
    "ignored": Layout(tokens="ignored", chunks=(16, 5)),  # one has none that count
    "grid": Layout(HALVES, "mixed", chunks=(40, 16), said=True),
    "grid-empty": Layout(HALVES, "empty", chunks=(40, 16), said=True),
    "logits-uneven": Layout((20, 311), said=True, logits=True),
    "logits-padded": Layout((192, 192), logits=True, options={"vocab_size": VOCAB, "inplace": True}),
    "logits-strided": Layout(HALVES, logits=True, **SIZED),
    "logits-four": Layout(FOURTHS, logits=True, **SIZED),
    "logits-mixed": Layout(tokens="mixed", logits=True),
    "logits-grid": Layout(HALVES, "mixed", said=True, logits=True),
}


class Run(NamedTuple):
    """Where, in what, and by which backend."""

    layout: str
    backend: str = "torch"
    dtype: torch.dtype = FP32

    def __str__(self) -> str:
        return f"{self.layout} {self.backend} {str(self.dtype)[6:]}"


ON_CPU = [
    *map(Run, LAYOUTS), *(Run(name, "torch", FP16) for name in ("chunks", "mixed", "logits-uneven")),
    Run("chunks", "triton"), Run("logits-strided", "triton"),  # interpreted
]  # fmt: skip
ON_GPUS = [
    Run("chunks", "triton", BF16), *(Run(name, "triton", BF16) for name in (
        "padded", "sequence", "four", "four-sequence", "grid", "grid-empty", "logits-uneven", "logits-four")),
    Run("chunks", "triton"), Run("uneven", "triton", FP16), Run("logits-padded", "triton"),
]  # fmt: skip
EVERYWHERE = ("cross-entropy", "gspo", "everything")
PART = 9  # cases that a group of processes runs: kernels of all would take it minutes to compile


def cases(run: Run) -> list[LossCase]:
    """Cases of the first run in 16 bits and, on the CPU, of each layout with one dtype; some of each kind elsewhere."""
    every = run == ON_GPUS[0] or (run.backend == "torch" and run.dtype == FP32)
    found = [case for case in LOSS_CASES if every or case.name in SOME_CASES]
    # ranks with hidden states of their own tokens take no sets
    return [case for case in found if not LAYOUTS[run.layout].sequence or "kept_ids" not in case.batch]


def first(case: LossCase, run: Run) -> bool:
    """``make test`` has each case in some of the runs, and some cases in all of them."""
    if case.name in EVERYWHERE:
        return run.backend == "torch" or case.name != "everything"
    return run.backend == "torch" and (LOSS_CASES.index(case) + ON_CPU.index(run)) % 13 == 0


# ---- a rank's part of a batch


def places(layout: str, group: int) -> Tensor:
    """Tokens of the batch that a group has; -1 for one that does not count."""
    if layout == "mixed":
        mine = torch.rand(TOKENS, generator=torch.Generator().manual_seed(11)) < 0.7
        return (mine if group == 0 else ~mine).nonzero().flatten()
    if layout == "halves":
        return torch.arange(TOKENS)[:35] if group == 0 else torch.arange(TOKENS)[35:]
    return torch.arange(TOKENS) if group == 0 else torch.full((13 if layout == "ignored" else 0,), -1)


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


def piece(tensor: Tensor, rows: Any, rank: int, dim: int = 0) -> Tensor:
    """A rank's part of what has a vocabulary along ``dim``, nan in padding."""
    shape = list(tensor.shape)
    shape[dim] = max(0, sum(rows) - tensor.shape[dim])
    return torch.cat([tensor, tensor.new_full(shape, torch.nan)], dim).narrow(dim, sum(rows[:rank]), rows[rank]).clone()


def split(inputs: LossInputs, rows: Any, rank: int, teacher_vocab: int = VOCAB) -> LossInputs:
    """Arguments of a rank that has its rows of the vocabulary."""
    own = rows if teacher_vocab == VOCAB else [len(part) for part in torch.arange(teacher_vocab).chunk(len(rows))]
    dims = {"teacher_weight": 0, "teacher_bias": 0, "teacher_logits": 1}
    batch = {
        name: piece(value, own, rank, dims[name]) if name in dims else value for name, value in inputs.batch.items()
    }
    head = {name: piece(value, rows, rank) if name == "bias" else value for name, value in inputs.head.items()}
    return LossInputs(inputs.hidden, piece(inputs.weight, rows, rank), inputs.target, batch, head, inputs.num_segments)


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


# ---- a step


def measured(case: LossCase) -> list[Any]:
    found = [metrics.entropy(), metrics.lse(reduce="max"), metrics.lse(reduce="min")]
    found += [metrics.accuracy(), metrics.perplexity()] if case.target else []
    if case.segmented:
        found += [metrics.perplexity("segment"), metrics.accuracy(weighting="segment", name="by_segment")]
    if case.segmented and "old_logprobs" in case.batch:
        found += [metrics.effective_sample_size(), metrics.clip_fraction(side="signed", level="segment")]
        found += [metrics.ratio(level="segment", reduce="max")]
    return found


def step(case: LossCase, inputs: LossInputs, group: Any = None, logits: bool = False, **options: Any) -> dict[str, Any]:
    """Numbers of a call and its gradients; ``group`` is the one over which metrics are reduced."""
    if not logits:
        out, found = run_step(case, inputs, measured(case), **options)
    else:
        leaf = inputs.hidden.detach().requires_grad_()
        # an operation whose backward needs nothing of its output, which inplace=True overwrites
        x = leaf * 1.0 if options.get("inplace") else leaf
        out = logits_loss(
            x, inputs.target, case.losses, batch=inputs.batch, num_segments=inputs.num_segments,
            metrics=measured(case), **inputs.head, **options,
        )  # fmt: skip
        (out.loss * 0.7).backward()
        assert leaf.grad is not None
        found = {
            "loss": out.loss.detach().cpu(), "parts": {name: value.cpu() for name, value in out.parts.items()},
            "metrics": {name: value.value.cpu() for name, value in out.metrics.items()}, "grads": [leaf.grad.cpu()],
        }  # fmt: skip
    if group is not None:
        reduced = metrics.all_reduce(out.metrics, group)
        assert all(torch.equal(value.value.cpu(), found["metrics"][name]) for name, value in reduced.items())
    return found


def with_logits(case: LossCase, inputs: LossInputs, dtype: torch.dtype) -> LossInputs:
    """Inputs whose hidden states are logits."""
    logits, batch, head = on_logits(case, inputs, dtype)
    return LossInputs(logits, inputs.weight, inputs.target, batch, head, inputs.num_segments)


@functools.cache
def mesh_of(device: str, columns: int) -> Any:
    return init_device_mesh(device, (2, columns), mesh_dim_names=("tokens", "vocab"))


def of_rank(case: LossCase, run: Run, rank: int, device: str) -> dict[str, Any]:
    layout = LAYOUTS[run.layout]
    group, part = divmod(rank, layout.columns)
    inputs = inputs_of(case, run.dtype, "cpu", garbage=True, seed=SEED)
    if layout.logits:
        inputs = with_logits(case, inputs, run.dtype)
    if layout.tokens:
        inputs = spread(case, inputs, places(layout.tokens, group))
    if layout.rows:
        hidden = piece(inputs.hidden, layout.rows, part, dim=1) if layout.logits else inputs.hidden
        inputs = replace(split(inputs, layout.rows, part, case.teacher_vocab), hidden=hidden)
    if layout.sequence:
        inputs = own_tokens(inputs, layout.columns, part)
    inputs = inputs.on(device)
    if run.layout == "logits-strided" and rank == 1:  # the same messages, whatever rows lie in
        wide = torch.cat([inputs.hidden, torch.full_like(inputs.hidden, torch.nan)], 1)
        inputs = replace(inputs, hidden=wide[:, : inputs.hidden.shape[1]])
    groups, parallel = {"tokens": None, "vocab": None}, None
    if layout.tokens and layout.rows:
        mesh = mesh_of(device.partition(":")[0], layout.columns)
        groups = {name: mesh[name] for name in groups}
    if layout.tokens:
        parallel = TokenParallel(groups["tokens"])
    if layout.rows:
        rows = list(layout.rows) if layout.said else None
        parallel = VocabParallel(groups["vocab"], rows=rows, sequence_sharded=layout.sequence, tokens=parallel)
    chunks = {} if layout.logits else {"chunk_tokens": layout.chunks[group]}
    reduced = None
    if layout.tokens:
        reduced = groups["tokens"].get_group() if groups["tokens"] else torch.distributed.group.WORLD
    return step(
        case, inputs, reduced, layout.logits, parallel=parallel, backend=run.backend, **chunks, **layout.options
    )  # fmt: skip


def work(rank: int, device: str, runs: list[Run], part: slice = slice(None)) -> dict[str, Any]:
    return {
        f"{run} {case.name}": ranks.outcome(of_rank, case, run, rank, device)
        for run in runs
        for case in cases(run)[part]
        if tiers.ALL or device != "cpu" or first(case, run)
    }


# ---- what ranks have found, beside one rank's


def whole(found: list[Tensor], at: list[Tensor]) -> Tensor:
    """Rows of all ranks at their places in the batch; what does not count has none."""
    rows = torch.zeros(TOKENS, *found[0].shape[1:], dtype=found[0].dtype)
    for mine, places in zip(found, at, strict=True):
        assert not mine[places[: len(mine)] < 0].any()
        kept = places >= 0
        rows[places[kept]] = mine[kept[: len(mine)]]
    return rows


def joined(layout: Layout, group: list[dict[str, Any]]) -> dict[str, Any]:
    """Numbers of ranks that share a vocabulary: each has the same, and gradients of its own rows."""
    one, *others = group
    for other in others:
        assert torch.equal(other["loss"], one["loss"])
        assert all(torch.equal(other["metrics"][name], value) for name, value in one["metrics"].items())
        assert layout.sequence or layout.logits or torch.equal(other["grads"][0], one["grads"][0])
    parts = list(zip(*(each["grads"] for each in group), strict=True))
    if layout.logits:
        return one | {"grads": [torch.cat(parts[0], 1)]}
    hidden = torch.cat(parts[0])[:TOKENS] if layout.sequence else parts[0][0]
    return one | {"grads": [hidden, *map(torch.cat, parts[1:])]}


def as_one(layout: Layout, outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    groups = [joined(layout, outcomes[i : i + layout.columns]) for i in range(0, len(outcomes), layout.columns)]
    if not layout.tokens:
        return groups[0]
    for name, value in groups[0]["metrics"].items():
        assert torch.equal(groups[1]["metrics"][name], value), name
    rows = whole([each["grads"][0] for each in groups], [places(layout.tokens, group) for group in range(2)])
    return {
        "loss": sum(each["loss"] for each in groups), "metrics": groups[0]["metrics"],
        "parts": {name: sum(each["parts"][name] for each in groups) for name in groups[0]["parts"]},
        "grads": [rows, *(sum(parts) for parts in zip(*(each["grads"][1:] for each in groups), strict=True))],
    }  # fmt: skip


@functools.cache
def one_rank(name: str, dtype: torch.dtype, logits: bool, device: str) -> Any:
    """The oracle's numbers in float64 and in the dtype, our own, and our metrics in float64."""
    (case,) = (case for case in LOSS_CASES if case.name == name)
    # a GPU makes other logits of the same hidden states
    inputs = inputs_of(case, dtype, device if logits else "cpu", seed=SEED)
    if not logits:
        exact = inputs.to(torch.float64)
        return run_reference(case, exact), run_reference(case, inputs), step(case, inputs), step(case, exact)["metrics"]
    given = with_logits(case, inputs, dtype).on("cpu")
    batch = {name: value.double() if value.is_floating_point() else value for name, value in given.batch.items()}
    alone = step(case, replace(given, hidden=given.hidden.double(), batch=batch), logits=True, backend="torch")
    truth = by_oracle(case, given.hidden.double(), given.batch, given.head, given)
    eager = by_oracle(case, given.hidden, given.batch, given.head, given)
    own = step(case, given, logits=True, backend="torch")
    return (*truth[:2], truth[2:]), (*eager[:2], eager[2:]), own, alone["metrics"]


def hold(found: list[dict[str, Any]], run: Run, case: LossCase, device: str = "cpu") -> None:
    """Ranks' numbers against full logits in float64 and eager ones in the call's own dtype."""
    layout, dtype, refusal = LAYOUTS[run.layout], run.dtype, None
    outcomes = [rank[f"{run} {case.name}"] for rank in found]
    if layout.rows and case.teacher_vocab != VOCAB:
        refusal = "a teacher of the same vocabulary"
    if layout.sequence and "teacher_logits" in case.batch:
        refusal = "give teacher_hidden and teacher_weight"
    for outcome in outcomes:
        assert isinstance(outcome, str) == (refusal is not None), outcome
        assert refusal is None or refusal in outcome, outcome
    if refusal is not None:
        return
    ours = as_one(layout, outcomes)
    (loss, parts, truth), (eager_loss, _, eager), own, expected = one_rank(case.name, dtype, layout.logits, device)
    for grad, plain, exact, name in zip(ours["grads"], eager, truth, ("hidden", "weight", "bias"), strict=False):
        if layout.logits:
            assert not grad[:, VOCAB:].any()
            assert_gradient(grad[:, :VOCAB], 0.7 * plain.double(), 0.7 * exact, dtype)
            continue
        assert not grad[len(exact) :].any() and torch.isfinite(grad).all()  # padding
        assert_within_budget(grad[: len(exact)], plain * 0.7, exact * 0.7, dtype, f"gradient of {name}")
    if layout.logits:
        torch.testing.assert_close(ours["loss"].double(), loss.double(), rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(ours["parts"], {k: v.float() for k, v in parts.items()}, rtol=2e-6, atol=2e-6)
    elif layout.tokens:  # a loss may be a small difference of large parts, and one rank's be rounded alike
        close = {"rtol": 1e-5, "atol": 1e-6} if layout.rows else {"rtol": 2e-6, "atol": 1e-7}
        torch.testing.assert_close(ours["loss"], own["loss"], **close)
        torch.testing.assert_close(ours["parts"], {k: v.float() for k, v in parts.items()}, rtol=1e-5, atol=1e-6)
    else:
        assert_scalar(case, dtype, ours["loss"], eager_loss, loss, "loss")
    for name, value in expected.items():
        torch.testing.assert_close(ours["metrics"][name], value.float(), rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    """Outcomes of all runs on the CPU, by the number of ranks."""

    @functools.cache
    def of(count: int) -> list[dict[str, Any]]:
        runs = [run for run in ON_CPU if LAYOUTS[run.layout].ranks == count]
        return ranks.run(functools.partial(work, runs=runs), count, tmp_path_factory.mktemp("ranks"))

    return of


def held(runs: list[Run]) -> list[Any]:
    """Cases with their runs and parts of them."""
    return [(run, i // PART, case, first(case, run)) for run in runs for i, case in enumerate(cases(run))]


def on_cpu() -> list[Any]:
    found = []
    for run, _, case, now in held(ON_CPU):
        found += tiers.tier(pytest.param(run, case, id=f"{run} {case.name}"), now)
    return found


@pytest.mark.parametrize(("run", "case"), on_cpu())
def test_as_one_rank(run: Run, case: LossCase, found: Callable[[int], list[dict[str, Any]]]) -> None:
    hold(found(LAYOUTS[run.layout].ranks), run, case)


@functools.cache
def on_gpus(run: Run, part: int) -> Any:
    """Outcomes of a part of a run's cases. No fixture: pytest makes one anew for each case beside its parameter."""
    made = functools.partial(work, runs=[run], part=slice(part * PART, (part + 1) * PART))
    return ranks.outcome(ranks.run_in_a_folder, made, LAYOUTS[run.layout].ranks, "cuda")


@pytest.mark.multigpu
@pytest.mark.parametrize(
    ("run", "part", "case"),
    [pytest.param(*each[:3], id=f"{each[0]} part{each[1]} {each[2].name}") for each in held(ON_GPUS)],
)
def test_gpus(run: Run, part: int, case: LossCase) -> None:
    ranks.need_gpus("cuda", LAYOUTS[run.layout].columns)
    found = on_gpus(run, part)
    assert not isinstance(found, str), found
    hold(found, run, case, "cuda")
