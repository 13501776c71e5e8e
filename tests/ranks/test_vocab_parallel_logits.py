"""Logits whose vocabulary ranks share, whose tokens they share, or whose last columns are padding."""

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import ranks
import tiers
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import PLACES, Place
from logits_cases import assert_gradient, by_oracle, made_logits, made_target, on_logits
from loss_cases import LOSS_CASES, SOME_CASES, VOCAB, LossCase, LossInputs, in_turn, inputs_of
from test_token_parallel import places, spread, whole
from test_vocab_parallel import SEED, Run, in_parts, of_gpus, piece
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from chunked_head import CrossEntropyLoss, TokenParallel, VocabParallel, logits_loss, losses, metrics
from chunked_head.core.private import all_gather

# who holds how many columns, padding among them, and what else is said
LAYOUTS: dict[str, tuple[int, list[int], dict[str, Any]]] = {
    "uneven": (2, [20, 311], {}),
    "padded": (2, [192, 192], {"vocab_size": VOCAB, "inplace": True}),
    "strided": (2, [166, 165], {"vocab_size": VOCAB}),
    "four": (4, [83, 83, 83, 82], {"vocab_size": VOCAB}),
}
ON_CPU: list[Run] = [
    *((layout, "torch", torch.float32) for layout in LAYOUTS),
    ("uneven", "torch", torch.float16), ("strided", "triton", torch.float32),
]  # fmt: skip
ON_GPUS: list[Run] = [
    ("uneven", "triton", torch.bfloat16), ("padded", "triton", torch.float32), ("four", "triton", torch.bfloat16),
]  # fmt: skip


def cases(run: Run) -> list[LossCase]:
    everything = run[0] in ("uneven", "four") and run[2] != torch.float16
    return [case for case in LOSS_CASES if everything or case.name in SOME_CASES]


def first(case: LossCase, run: Run) -> bool:
    if run[1] == "triton":  # interpreted
        return case.name in SOME_CASES[::3]
    return in_turn(case, run[0], ("uneven", "four"))


def measured(case: LossCase) -> list[Any]:
    return [metrics.entropy(), *([metrics.accuracy(), metrics.perplexity()] if case.target else [])]


def step(
    case: LossCase, logits: Tensor, inputs: LossInputs, batch: dict[str, Any], head: dict[str, Any], **options: Any
) -> dict[str, Any]:
    leaf = logits.detach().requires_grad_()
    # an operation whose backward needs nothing of its output, which inplace=True overwrites
    x = leaf * 1.0 if options.get("inplace") else leaf
    out = logits_loss(
        x, inputs.target, case.losses, batch=batch, num_segments=inputs.num_segments, metrics=measured(case), **head,
        **options,
    )  # fmt: skip
    (out.loss * 0.7).backward()
    assert leaf.grad is not None
    return {
        "loss": out.loss.detach().cpu(), "parts": {name: value.cpu() for name, value in out.parts.items()},
        "metrics": {name: value.value.cpu() for name, value in out.metrics.items()}, "grad": leaf.grad.cpu(),
    }  # fmt: skip


def rank_step(case: LossCase, run: Run, rank: int, device: str) -> dict[str, Any]:
    layout, backend, dtype = run
    _, rows, options = LAYOUTS[layout]
    inputs = inputs_of(case, dtype, device, garbage=True, seed=SEED)
    logits, batch, head = on_logits(case, inputs, dtype)
    own = piece(logits, rows, rank, dim=1)
    if layout == "strided" and rank == 1:  # the same messages, whatever rows lie in
        own = torch.cat([own, torch.full_like(own, torch.nan)], 1)[:, : own.shape[1]]
    if "teacher_logits" in batch:
        teacher = batch["teacher_logits"]
        if teacher.shape[1] == VOCAB:
            batch["teacher_logits"] = piece(teacher, rows, rank, dim=1)
    parallel = VocabParallel(rows=rows if layout == "uneven" else None)
    return step(case, own, inputs, batch, head, parallel=parallel, backend=backend, **options)


def work(rank: int, device: str, runs: list[Run], part: slice = slice(None)) -> dict[str, Any]:
    return {
        f"{' '.join(map(str, run))} {case.name}": ranks.outcome(rank_step, case, run, rank, device)
        for run in runs
        for case in cases(run)[part]
        if tiers.ALL or first(case, run)
    }


def runs_of(count: int, runs: list[Run] = ON_CPU) -> list[Run]:
    return [run for run in runs if LAYOUTS[run[0]][0] == count]


def hold(found: list[dict[str, Any]], run: Run, case: LossCase, device: str) -> None:
    """Against the oracle on whole logits; one rank's metrics; the same numbers on every rank, to the bit."""
    dtype = run[2]
    outcomes = [rank[f"{' '.join(map(str, run))} {case.name}"] for rank in found]
    if case.teacher_vocab != VOCAB:
        assert all("a teacher of the same vocabulary" in outcome for outcome in outcomes)
        return
    for outcome in outcomes:
        assert not isinstance(outcome, str), outcome
    # the very logits that ranks saw: a GPU makes others of the same hidden states
    inputs = inputs_of(case, dtype, device, seed=SEED)
    logits, batch, head = on_logits(case, inputs, dtype)
    cpu = LossInputs(logits, inputs.weight, inputs.target, batch, head, inputs.num_segments).on("cpu")
    logits, batch, head = cpu.hidden, cpu.batch, cpu.head
    loss, parts, truth = by_oracle(case, logits.double(), batch, head, cpu)
    _, _, eager = by_oracle(case, logits, batch, head, cpu)
    grad = torch.cat([outcome["grad"] for outcome in outcomes], 1)
    assert not grad[:, VOCAB:].any()
    assert_gradient(grad[:, :VOCAB], 0.7 * eager.double(), 0.7 * truth, dtype)
    first = outcomes[0]
    torch.testing.assert_close(first["loss"].double(), loss.double(), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(first["parts"], {k: v.float() for k, v in parts.items()}, rtol=2e-6, atol=2e-6)
    alone = step(case, logits.double(), cpu, wide(batch), head, backend="torch")
    for name, value in alone["metrics"].items():
        torch.testing.assert_close(first["metrics"][name], value.float(), rtol=1e-5, atol=1e-6)
    for other in outcomes[1:]:
        assert torch.equal(other["loss"], first["loss"])
        assert all(torch.equal(other["metrics"][name], value) for name, value in first["metrics"].items())


def wide(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


def work_of_two(rank: int, device: str) -> dict[str, Any]:
    found = work(rank, device, runs_of(2))
    for call in CALLS:
        found[call.__name__] = ranks.outcome(call, rank)
    found["failures"] = failures(rank)
    for case in TOKEN_CASES:
        found[f"tokens {case.name}"] = ranks.outcome(of_tokens, case, rank)
    return found


def work_of_four(rank: int, device: str) -> dict[str, Any]:
    found = work(rank, device, runs_of(4))
    for case in TOKEN_CASES:
        found[f"grid {case.name}"] = ranks.outcome(of_grid, case, rank)
    return found


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run(work_of_two, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run(work_of_four, 4, tmp_path_factory.mktemp("four"))


def held(runs: list[Run]) -> list[Any]:
    found = []
    for run in runs:
        for case in cases(run):
            found += tiers.tier(pytest.param(run, case, id=" ".join(map(str, (*run, case.name)))), first(case, run))
    return found


@pytest.mark.parametrize(("run", "case"), held(runs_of(2)))
def test_two_ranks(of_two: list[dict[str, Any]], run: Run, case: LossCase) -> None:
    hold(of_two, run, case, "cpu")


@pytest.mark.parametrize(("run", "case"), held(runs_of(4)))
def test_four_ranks(of_four: list[dict[str, Any]], run: Run, case: LossCase) -> None:
    hold(of_four, run, case, "cpu")


@pytest.mark.multigpu
@pytest.mark.parametrize(("run", "part", "case"), in_parts(ON_GPUS, cases))
def test_gpus(run: Run, part: int, case: LossCase) -> None:
    found = of_gpus(work, LAYOUTS[run[0]][0], run, part)
    assert not isinstance(found, str), found
    hold(found, run, case, "cuda")


# ---- tokens over ranks, alone and beside a vocabulary

TOKEN_CASES = [case for case in LOSS_CASES if case.name in ("sum", "grpo-sum", "gspo-token", "dpo", "forward-kl")]


def of_tokens(case: LossCase, rank: int) -> dict[str, Any]:
    inputs = spread(case, inputs_of(case, torch.float32, "cpu", garbage=True), places("mixed", rank))
    logits, batch, head = on_logits(case, inputs, torch.float32)
    return step(case, logits, inputs, batch, head, parallel=TokenParallel())


def of_grid(case: LossCase, rank: int) -> dict[str, Any]:
    """Two groups of tokens by two parts of the vocabulary."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tokens", "vocab"))
    inputs = spread(case, inputs_of(case, torch.float32, "cpu", garbage=True), places("mixed", rank // 2))
    logits, batch, head = on_logits(case, inputs, torch.float32)
    rows = [166, 165]
    if "teacher_logits" in batch:
        batch["teacher_logits"] = piece(batch["teacher_logits"], rows, rank % 2, dim=1)
    parallel = VocabParallel(mesh["vocab"], rows, tokens=TokenParallel(mesh["tokens"]))
    return step(case, piece(logits, rows, rank % 2, dim=1), inputs, batch, head, parallel=parallel)


def hold_shares(outcomes: list[dict[str, Any]], case: LossCase) -> None:
    """Shares of two groups of tokens add up to one rank's loss; metrics are the whole batch's."""
    for outcome in outcomes:
        assert not isinstance(outcome, str), outcome
    inputs = inputs_of(case, torch.float32, "cpu")
    logits, batch, head = on_logits(case, inputs, torch.float32)
    alone = step(case, logits, inputs, batch, head)
    torch.testing.assert_close(sum(o["loss"] for o in outcomes), alone["loss"], rtol=5e-6, atol=1e-6)
    grad = whole([o["grad"] for o in outcomes], [places("mixed", rank) for rank in range(2)])
    torch.testing.assert_close(grad, alone["grad"], rtol=1e-4, atol=1e-7)
    for outcome in outcomes:
        torch.testing.assert_close(outcome["metrics"], alone["metrics"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", TOKEN_CASES, ids=lambda case: case.name)
def test_tokens(of_two: list[dict[str, Any]], case: LossCase) -> None:
    hold_shares([rank[f"tokens {case.name}"] for rank in of_two], case)


@pytest.mark.parametrize("case", TOKEN_CASES, ids=lambda case: case.name)
def test_grid(of_four: list[dict[str, Any]], case: LossCase) -> None:
    found = [rank[f"grid {case.name}"] for rank in of_four]
    for outcome in found:
        assert not isinstance(outcome, str), outcome
    for left, right in (found[:2], found[2:]):
        assert torch.equal(left["loss"], right["loss"])
    hold_shares(
        [left | {"grad": torch.cat([left["grad"], right["grad"]], 1)} for left, right in (found[:2], found[2:])], case
    )


# ---- other calls: each makes pairs of what ranks found and what one of them would

COLUMNS = [17, 16]


def own(logits: Tensor, rank: int) -> Tensor:
    return piece(logits, COLUMNS, rank, dim=logits.dim() - 1).requires_grad_()


def joined(gradient: Tensor | None) -> Tensor:
    parts: list[Any] = [None, None]
    dist.all_gather_object(parts, gradient)
    return torch.cat(parts, -1)


Pairs = list[tuple[Tensor, Tensor]]


def modules(rank: int) -> Pairs:
    """``CrossEntropyLoss`` beside PyTorch's, whose class weights are of the whole vocabulary."""
    logits, target, found = made_logits(5, 33, 7), made_target(33, 5, 7), []
    for options in ({}, {"reduction": "none"}, {"label_smoothing": 0.2, "weight": torch.linspace(0.1, 2.0, 33)}):
        theirs = logits.clone().requires_grad_()
        expected = torch.nn.CrossEntropyLoss(**options)(theirs, target)
        expected.sum().backward()
        mine = piece(logits, COLUMNS, rank, dim=1).requires_grad_()
        ours = CrossEntropyLoss(**options, parallel=VocabParallel(rows=COLUMNS))(mine, target)
        ours.sum().backward()
        parts: list[Any] = [None, None]
        dist.all_gather_object(parts, mine.grad)
        assert theirs.grad is not None
        found += [(ours.detach(), expected.detach()), (torch.cat(parts, 1), theirs.grad)]
    return found


def of_tokens_unreduced(rank: int) -> Pairs:
    """Values per token are nobody else's affair; a copy of the module works with the same processes."""
    logits, target = made_logits(7, 33)[rank:], made_target(33, 7)[rank:]
    ours = copy.deepcopy(copy.copy(CrossEntropyLoss(reduction="none", parallel=copy.copy(TokenParallel()))))
    return [(ours(logits, target), F.cross_entropy(logits, target, reduction="none"))]


def dtensors(rank: int) -> Pairs:
    mesh, found = init_device_mesh("cpu", (2,)), []
    logits, target = made_logits(6, 33), made_target(33, 6)
    expected = logits.clone().requires_grad_()
    F.cross_entropy(expected, target).backward()
    assert expected.grad is not None
    weighted = CrossEntropyLoss(torch.ones(33))
    weighted.weight = distribute_tensor(torch.ones(33), mesh, [Replicate()])
    for placement, placed_target in ((Shard(-1), False), (Shard(1), True), (Replicate(), False)):
        given = distribute_tensor(logits, mesh, [placement]).requires_grad_()
        ids = distribute_tensor(target, mesh, [Replicate()]) if placed_target else target
        for function in (
            lambda x, y: logits_loss(x, y, losses.cross_entropy()).loss,
            CrossEntropyLoss(),
            weighted,
        ):
            given.grad = None
            loss = function(given, ids)
            loss.backward()
            assert isinstance(given.grad, DTensor) and given.grad.placements == given.placements
            found += [(loss.detach(), F.cross_entropy(logits, target)), (given.grad.full_tensor(), expected.grad)]
    return found


def nothing(rank: int) -> Pairs:
    """No tokens, and none that count."""
    none, zero = made_target(33, 0), torch.zeros(())
    empty, ignored = own(made_logits(0, 33), rank), own(made_logits(4, 33), rank)
    parallel = VocabParallel(rows=COLUMNS)
    found = []
    for logits, target in ((empty, none), (ignored, torch.full((4,), -100))):
        out = logits_loss(logits, target, losses.cross_entropy(), metrics=[metrics.entropy()], parallel=parallel)
        out.loss.backward()
        assert logits.grad is not None
        found += [(out.loss.detach(), zero), (logits.grad, torch.zeros_like(logits))]
    return found


def messages(rank: int) -> Pairs:
    """One for the call, one more with a teacher, and none in backward."""
    logits, target = made_logits(9, 33), made_target(33, 9)
    teacher = {"teacher_logits": piece(made_logits(9, 33, seed=8), COLUMNS, rank, dim=1)}
    found = []
    for loss, batch, expected in ((losses.cross_entropy(), {}, 1), (losses.forward_kl(), teacher, 2)):
        for agreed in (False, True):
            given = own(logits, rank)
            with (
                mock.patch("chunked_head.parallel.shard.all_gather", wraps=all_gather) as gathers,
                mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sums,
            ):
                out = logits_loss(given, target, loss, batch=batch, parallel=VocabParallel(rows=COLUMNS))
                before = gathers.call_count + sums.call_count
                out.loss.backward()
                after = gathers.call_count + sums.call_count
            if agreed:
                found += [(torch.tensor(before), torch.tensor(expected)), (torch.tensor(after), torch.tensor(before))]
    return found


def again(rank: int) -> Pairs:
    """A second backward over a retained graph, with another upstream gradient."""
    logits, target = made_logits(9, 33), made_target(33, 9)
    alone, given = logits.clone().requires_grad_(), own(logits, rank)
    expected = logits_loss(alone, target, losses.cross_entropy()).loss
    ours = logits_loss(given, target, losses.cross_entropy(), parallel=VocabParallel(rows=COLUMNS)).loss
    for loss in (expected, ours):
        loss.backward(retain_graph=True)
        (loss * 3.0).backward()
    assert alone.grad is not None
    return [(joined(given.grad), alone.grad)]


CALLS: tuple[Callable[[int], Pairs], ...] = (modules, of_tokens_unreduced, dtensors, nothing, messages, again)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_calls(of_two: list[dict[str, Any]], call: Callable[[int], Pairs]) -> None:
    for rank in of_two:
        assert not isinstance(rank[call.__name__], str), rank[call.__name__]
        for ours, expected in rank[call.__name__]:
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def failures(rank: int) -> dict[str, str]:
    # of a size that no call before had: what one rank has agreed on before, it does not compare again
    logits, target = made_logits(8, 33), made_target(33, 8)
    mesh = init_device_mesh("cpu", (2,))
    placed = distribute_tensor(logits, mesh, [Shard(1)])
    uneven = DTensor.from_local(
        piece(logits, [20, 13], rank, dim=1), mesh, [Shard(1)], shape=logits.shape, stride=logits.stride()
    )
    # of two ranks one has as many classes as there are tokens in a row
    last, ids = piece(made_logits(2, 16, 33), COLUMNS, rank, dim=2), made_target(33, 2, 16)
    weighted = CrossEntropyLoss(torch.ones(33))
    weighted.weight = distribute_tensor(torch.ones(33), mesh, [Shard(0)])

    def call(given: Any = None, target: Any = target, loss: Any = None, **options: Any) -> Tensor:
        given = own(logits, rank) if given is None else given
        options = {"parallel": VocabParallel(rows=COLUMNS)} | options
        return logits_loss(given, target, losses.cross_entropy() if loss is None else loss, **options).loss

    def known_kinds() -> str:
        smoothed = [losses.cross_entropy(label_smoothing=s) for s in (0.2, 0.4, 0.2 + 0.2 * rank)]
        return str([ranks.said(lambda loss=loss: call(loss=loss).item()) for loss in smoothed])

    return {
        "smoothing": ranks.said(lambda: call(loss=losses.cross_entropy(label_smoothing=0.1 * rank))),
        "dtype": ranks.said(lambda: call(own(logits.to(torch.float16 if rank else torch.bfloat16), rank))),
        "targets": ranks.said(lambda: call(target=target.roll(rank)).item()),
        "known kinds": known_kinds(),
        "known kinds on a GPU": ranks.as_on_a_gpu(known_kinds),
        "sequence": ranks.said(lambda: call(parallel=VocabParallel(rows=COLUMNS, sequence_sharded=True))),
        "reduce": ranks.said(lambda: call(parallel=VocabParallel(rows=COLUMNS, reduce_dhidden=False))),
        "rows": ranks.said(lambda: call(parallel=VocabParallel(rows=[16, 17]))),
        "out of range": ranks.said(lambda: call(target=target + 33)),
        "parallel": ranks.said(lambda: call(parallel="tp")),
        "none": ranks.said(
            lambda: CrossEntropyLoss(reduction="none", parallel=TokenParallel(average=True))(logits, target)
        ),
        "placements": ranks.said(lambda: call(distribute_tensor(logits, mesh, [Shard(0)]), parallel=None)),
        "target's placements": ranks.said(
            lambda: call(placed, distribute_tensor(target, mesh, [Shard(0)]), parallel=None)
        ),
        "both": ranks.said(lambda: call(placed)),
        "in place": ranks.said(lambda: call(placed, parallel=None, inplace=True)),
        "few": ranks.said(lambda: call(distribute_tensor(logits[:, :1], mesh, [Shard(1)]), parallel=None)),
        "in place of local ones": ranks.said(
            lambda: call((placed.clone().requires_grad_() * 1.0).to_local()[:, :], inplace=True)
        ),
        "in place of a local leaf": ranks.said(
            lambda: call(placed.clone().detach().requires_grad_().to_local(), inplace=True)
        ),
        "not chunks": ranks.said(lambda: call(uneven, parallel=None)),
        "twofold": ranks.said(lambda: CrossEntropyLoss(parallel=VocabParallel(rows=COLUMNS))(last, ids)),
        "twofold by size": ranks.said(lambda: CrossEntropyLoss(vocab_size=33, parallel=VocabParallel())(last, ids)),
        "field": ranks.said(lambda: call(batch={"mask": distribute_tensor(target >= 0, mesh, [Replicate()])})),
        "class weights": ranks.said(lambda: weighted(placed, target)),
        "saved": ranks.said(lambda: pickle.dumps(CrossEntropyLoss(parallel=VocabParallel()))),
        "afterwards": ranks.said(lambda: call().item()),
    }


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("smoothing", "losses.cross_entropy: label_smoothing is None on rank 0 and 0.1 on rank 1"),
        ("dtype", "logits.dtype is torch.bfloat16 on rank 0 and torch.float16 on rank 1"),
        ("targets", "nan"),
        ("known kinds", "losses.cross_entropy: label_smoothing is 0.2 on rank 0 and 0.4 on rank 1"),
        ("known kinds on a GPU", "'nan']"),
        ("sequence", "ValueError: sequence_sharded=True is of hidden states"),
        ("reduce", "ValueError: reduce_dhidden=False is of hidden states"),
        ("rows", "rows of VocabParallel says"),
        ("out of range", "IndexError: target must be in [0, 33)"),
        ("parallel", "TypeError: parallel must be a VocabParallel, a TokenParallel or None, got str"),
        ("none", "ValueError: average=True of TokenParallel multiplies the loss"),
        ("placements", "ValueError: logits has the placements"),
        ("target's placements", "every rank needs all of it"),
        ("both", "leave parallel=None"),
        ("in place", "inplace=True writes where autograd sees it"),
        ("few", "ValueError: logits has 1 ids, of which 2 ranks do not all hold one"),
        ("in place of local ones", "memory of these belongs to a tensor that autograd does not see"),
        ("in place of a local leaf", "memory of these belongs to a tensor that autograd does not see"),
        ("not chunks", "pass logits.to_local() with VocabParallel(rows=[...])"),
        ("twofold", "ValueError: input (2, 16, "),
        ("twofold by size", "ValueError: input (2, 16, "),
        ("field", "TypeError: batch['mask'] is a DTensor"),
        ("class weights", "weight has the placements"),
        ("saved", "TypeError: VocabParallel holds a process group, which cannot be saved"),
    ],
)
def test_failures(of_two: list[dict[str, Any]], what: str, says: str) -> None:
    for rank in of_two:
        assert says in rank["failures"][what]
        assert 0.0 < float(rank["failures"]["afterwards"]) < 100.0


# ---- padding on one device


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("inplace", [False, True])
def test_padded_columns(place: Place, inplace: bool) -> None:
    """What stands in them changes nothing, in rows that are nobody's but theirs and in those of a batch."""
    logits, target = made_logits(3, 9, 40, device=place.device), made_target(33, 3, 9, device=place.device)
    loss = losses.cross_entropy(label_smoothing=0.1) + 0.1 * losses.entropy()
    exact = logits[..., :33].clone().requires_grad_()
    expected = logits_loss(exact[:, :-1], target[:, :-1], loss, backend=place.backend)
    (expected.loss * 3.0).backward()
    padded = logits.clone()
    padded[..., 33:] = torch.nan
    given = padded.requires_grad_()
    x = given * 1.0
    ours = logits_loss(x[:, :-1], target[:, :-1], loss, vocab_size=33, inplace=inplace, backend=place.backend)
    (ours.loss * 3.0).backward()
    assert given.grad is not None and exact.grad is not None
    torch.testing.assert_close(ours.loss, expected.loss, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(given.grad[..., :33], exact.grad, rtol=1e-6, atol=1e-8)
    assert not given.grad[:, :-1, 33:].any()


def test_vocab_size_is_checked() -> None:
    logits, target = made_logits(6, 33), made_target(33, 6)
    with pytest.raises(ValueError, match="vocab_size is 34, and logits have 33 columns"):
        logits_loss(logits, target, losses.cross_entropy(), vocab_size=34)
    with pytest.raises(ValueError, match="vocab_size must be at least 1"):
        logits_loss(logits, target, losses.cross_entropy(), vocab_size=0)
    with pytest.raises(IndexError, match=r"\[0, 30\)"):
        CrossEntropyLoss(vocab_size=30)(logits, torch.full((6,), 31))
