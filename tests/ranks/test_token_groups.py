"""What TokenParallel does beside the list of losses: averages, denominators, second sweeps, other groups, errors."""

from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
from loss_cases import LOSS_CASES, LossCase, inputs_of
from test_token_parallel import places, spread, step, whole
from test_vocab_parallel import split
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from chunked_head import (
    ChunkedHead,
    TokenParallel,
    VocabParallel,
    linear_cross_entropy,
    linear_logprobs,
    linear_loss,
    losses,
    metrics,
)
from chunked_head.parallel import shift_targets

CASES = {case.name: case for case in LOSS_CASES}
FP32 = torch.float32


def operands(case: str, layout: str, rank: int | None) -> Any:
    inputs = inputs_of(CASES[case], FP32, "cpu")
    return inputs if rank is None else spread(CASES[case], inputs, places(layout, rank))


def parallel_of(rank: int | None, **options: Any) -> dict[str, Any]:
    return {} if rank is None else {"parallel": TokenParallel(**options)}


# ---- each of these runs on two ranks, and once more alone, with rank None


def averaged(rank: int | None) -> dict[str, Tensor]:
    """A head in DDP, which averages gradients over ranks."""
    inputs = operands("cross-entropy", "mixed", rank)
    options = {} if rank is None else {"parallel": TokenParallel(average=True)}
    head = ChunkedHead(*reversed(inputs.weight.shape), **options)
    with torch.no_grad():
        head.weight.copy_(inputs.weight)
    module = head if rank is None else torch.nn.parallel.DistributedDataParallel(head)
    loss = module(inputs.hidden, inputs.target, z_loss=1e-3)
    loss.backward()
    return {"weight": head.weight.grad, "mean of loss": loss.detach()}


def weighed(rank: int | None) -> dict[str, Tensor]:
    """Denominators of class weights and of all there are; a normalizer that is given is everybody's."""
    inputs = operands("reductions", "mixed", rank)
    classes = torch.rand(len(inputs.weight), generator=torch.Generator().manual_seed(5))
    common = {"class_weights": classes, "label_smoothing": 0.1, **parallel_of(rank)}
    found = {}
    for name, more in {"mean": {}, "sum": {"reduction": "sum"}, "given": {"normalizer": 77.0}}.items():
        weight = inputs.weight.clone().requires_grad_()
        loss = linear_cross_entropy(inputs.hidden, weight, inputs.target, **common, **more)
        loss.backward()
        found |= {f"{name} loss": loss.detach(), f"{name} weight": weight.grad}
    return found


def twice(rank: int | None) -> dict[str, Tensor]:
    """Backward again over a retained graph, with other upstream gradients; ranks' plans differ."""
    inputs, found = operands("rloo", "empty", rank), {}
    weight = inputs.weight.clone().requires_grad_()
    out = linear_loss(
        inputs.hidden, weight, inputs.target, CASES["rloo"].losses, batch=inputs.batch,
        num_segments=inputs.num_segments, chunk_tokens=16 if rank == 0 else None, upstream=4.0, **parallel_of(rank),
    )  # fmt: skip
    for upstream in (4.0, 1.0, -3.0):
        weight.grad = None
        (out.loss * upstream).backward(retain_graph=True)
        found[f"weight {upstream}"] = weight.grad
    return found


def checkpointed(rank: int | None) -> dict[str, Tensor]:
    """The forward pass comes again in backward, with its messages."""
    found = {}
    for name, reentrant in (("dpo", False), ("gspo-token", False), ("cross-entropy", True)):
        inputs = operands(name, "mixed", rank)
        weight = inputs.weight.clone().requires_grad_()

        def forward(weight: Tensor, case: LossCase = CASES[name], inputs: Any = inputs) -> Tensor:
            return linear_loss(
                inputs.hidden, weight, inputs.target, case.losses, batch=inputs.batch, metrics=[metrics.entropy()],
                num_segments=inputs.num_segments, chunk_tokens=20 if rank == 0 else None, **parallel_of(rank),
            ).loss  # fmt: skip

        checkpoint(forward, weight, use_reentrant=reentrant).backward()
        found[name] = weight.grad
    return found


def spread_out(stats: Any, batch: Any) -> Tensor:
    """A segment's deviation of log-probabilities from their mean: a sum of what depends on another sum."""
    apart = stats.logprob - batch.per_token(batch.segment_mean(stats.logprob))
    return (batch.segment_mean(apart.square()) + 1e-3).sqrt()


def relative(stats: Any, batch: Any) -> Tensor:
    """Each token beside its segment's mean, through which tokens of other ranks have a gradient."""
    return (stats.logprob - batch.per_token(batch.segment_mean(stats.logprob))).abs() * batch["advantages"]


def own_losses(rank: int | None) -> dict[str, Tensor]:
    inputs, found = operands("gspo-token", "mixed", rank), {}
    batch = {name: value for name, value in inputs.batch.items() if name != "old_logprobs"}
    for function, unit in ((spread_out, "segment"), (relative, "token")):
        loss = losses.custom(function, scope="segment", unit=unit)
        weight = inputs.weight.clone().requires_grad_()
        out = linear_loss(
            inputs.hidden, weight, inputs.target, loss, batch=batch, num_segments=inputs.num_segments,
            **parallel_of(rank),
        )  # fmt: skip
        out.loss.backward()
        found |= {f"{function.__name__} loss": out.loss.detach(), f"{function.__name__} weight": weight.grad}
    return found


def unreduced(rank: int | None) -> dict[str, Tensor]:
    inputs = operands("cross-entropy", "mixed", rank)
    weight = inputs.weight.clone().requires_grad_()
    values = linear_cross_entropy(inputs.hidden, weight, inputs.target, reduction="none", **parallel_of(rank))
    values.square().sum().backward()
    return {"weight": weight.grad}


def skipping(rank: int | None) -> dict[str, Tensor]:
    """Ranks leave different numbers of tokens out of their matmuls, one of them all that it has."""
    found = {}
    for name in ("grpo", "gspo"):
        inputs = operands(name, "ignored", rank)
        weight = inputs.weight.clone().requires_grad_()
        out = linear_loss(
            inputs.hidden, weight, inputs.target, CASES[name].losses, batch=inputs.batch, skip_ignored=True,
            num_segments=inputs.num_segments, **parallel_of(rank),
        )  # fmt: skip
        out.loss.backward()
        found |= {f"{name} loss": out.loss.detach(), f"{name} weight": weight.grad}
    return found


def without_gradient(rank: int | None) -> dict[str, Tensor]:
    """On one rank nothing is to be differentiated; messages are the same."""
    inputs = operands("dpo", "halves", rank)
    weight = inputs.weight.clone().requires_grad_(rank != 1)
    out = linear_loss(
        inputs.hidden, weight, inputs.target, CASES["dpo"].losses, batch=inputs.batch, metrics=[metrics.entropy()],
        num_segments=inputs.num_segments, **parallel_of(rank),
    )  # fmt: skip
    return {"loss": out.loss.detach(), "half of a sum": out.metrics["entropy"].sum / (1 if rank is None else 2)}


SHARES: dict[str, Callable[[int | None], dict[str, Tensor]]] = {
    function.__name__: function
    for function in (averaged, weighed, twice, checkpointed, own_losses, unreduced, skipping, without_gradient)
}  # fmt: skip


# ---- errors


def cumulative(stats: Any, batch: Any) -> Tensor:
    return stats.logprob.cumsum(0)


def few(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = torch.randn(tokens, 16, dtype=torch.bfloat16), torch.randn(40, 16, dtype=torch.bfloat16)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, 40, (tokens,))


def refused(rank: int) -> dict[str, str]:
    inputs = operands("gspo", "mixed", rank)
    plain = inputs.hidden, inputs.weight, inputs.target
    tokens, everything = TokenParallel(), {"batch": inputs.batch, "num_segments": inputs.num_segments}
    calls: dict[str, Callable[[], Any]] = {
        "logprobs": lambda: linear_logprobs(*plain, parallel=tokens),
        "averaged none": lambda: linear_cross_entropy(
            *plain, reduction="none", parallel=TokenParallel(average=True)
        ),
        "irreducible": lambda: linear_loss(
            *plain, losses.custom(cumulative, scope="segment"), parallel=tokens, **everything
        ),
        "other losses": lambda: linear_loss(
            *plain, losses.gspo(clip_low=0.11 + 0.1 * rank), parallel=tokens, **everything
        ),
        # of 64 and 6 tokens: ten chunks, and one
        "plans that differ": lambda: float(
            linear_cross_entropy(*few(64 if rank else 6), parallel=tokens, chunk_tokens=7).isfinite()
        ),
        "coefficients": lambda: linear_loss(
            *plain, losses.cross_entropy() + (0.5 + rank) * losses.z_loss(), parallel=tokens
        ),
        "metrics": lambda: linear_loss(
            *plain, losses.cross_entropy(), metrics=[metrics.entropy(), metrics.lse()][rank:], parallel=tokens
        ),
        "temperature": lambda: linear_loss(
            *plain, losses.cross_entropy(), temperature=0.5 + rank, parallel=tokens
        ),
        "reduction": lambda: linear_cross_entropy(*plain, reduction=("mean", "sum")[rank], parallel=tokens),
        "values and a sum": lambda: linear_cross_entropy(*plain, reduction=("none", "sum")[rank], parallel=tokens),
        "the vocabulary": lambda: linear_cross_entropy(
            plain[0], plain[1][: 331 - rank], plain[2].clamp(max=300), parallel=tokens
        ),
        # kinds that both ranks have agreed on, whose messages are of different lengths
        "known kinds": lambda: [
            linear_loss(*plain, losses.gspo(), parallel=tokens, batch=inputs.batch, num_segments=n)
            for n in (inputs.num_segments, inputs.num_segments + 1, inputs.num_segments + rank)
        ],
        "merged": lambda: metrics.combine(
            linear_loss(*plain, losses.cross_entropy(), metrics=[metrics.entropy()], **options).metrics
            for options in ({}, {"parallel": tokens})
        ),
    }  # fmt: skip
    found = {}
    for name, call in calls.items():
        try:
            found[name] = str(call())
        except ValueError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


SEQUENCES = torch.arange(3 * 32).view(3, 32)


def shifted(rank: int, count: int, device: str) -> dict[str, Tensor]:
    found, length = {}, 32 // (2 * count)
    for shift in (1, 3):
        pieces = SEQUENCES.split(length, 1)
        zigzag = torch.cat([pieces[rank], pieces[2 * count - 1 - rank]], 1)
        uneven = SEQUENCES.t().split([32 - 5 * (count - 1)] + [5] * (count - 1))[rank]
        zigzag, uneven = zigzag.to(device), uneven.to(device)
        found[f"zigzag {shift}"] = shift_targets(zigzag, shift=shift, layout="zigzag")
        found[f"contiguous {shift}"] = shift_targets(uneven, shift=shift, ignore_index=-1, dim=0)
    return found


def work(rank: int, device: str) -> dict[str, Any]:
    found = {name: ranks.outcome(share, rank) for name, share in SHARES.items()}
    return found | {"refused": ranks.outcome(refused, rank), "shifted": ranks.outcome(shifted, rank, 2, device)}


GRID = ("cross-entropy", "gspo", "dpo-ipo", "gspo-token", "kto", "jsd-hidden", "topk-tail", "everything")
ROWS = [166, 165]


def work_of_four(rank: int, device: str) -> dict[str, Any]:
    mesh = init_device_mesh(device.partition(":")[0], (2, 2), mesh_dim_names=("tokens", "vocab"))
    parallel = VocabParallel(mesh["vocab"], rows=ROWS, tokens=TokenParallel(mesh["tokens"]))
    tokens, columns = divmod(rank, 2)
    # on GPUs nothing goes through all four ranks, which may have but two of them
    found: dict[str, Any] = {"shifted": ranks.outcome(shifted, rank, 4, device)} if device == "cpu" else {}
    for layout in ("mixed", "empty"):
        for name in GRID:
            inputs = spread(CASES[name], inputs_of(CASES[name], FP32, "cpu"), places(layout, tokens))
            inputs = split(inputs, ROWS, columns).on(device)
            chunk = 16 if tokens else 40
            found[f"{layout} {name}"] = ranks.outcome(
                step, CASES[name], inputs, group=mesh["tokens"].get_group(), parallel=parallel, chunk_tokens=chunk
            )
    for name in ("vocab", "tokens"):
        distributed.barrier(mesh[name].get_group())
    return found


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run(work, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run(work_of_four, 4, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("name", SHARES)
def test_shares_add_up(of_two: list[dict[str, Any]], name: str) -> None:
    outcomes, alone = [rank[name] for rank in of_two], SHARES[name](None)
    for outcome in outcomes:
        assert not isinstance(outcome, str), outcome
    for what, value in alone.items():
        total = outcomes[0][what] + outcomes[1][what]
        if name == "averaged":  # DDP leaves the same gradient on both ranks; losses are twice their shares
            total = total / 2
        torch.testing.assert_close(total, value, rtol=1e-5, atol=5e-6, msg=lambda text, what=what: f"{what}: {text}")


def test_errors(of_two: list[dict[str, Any]]) -> None:
    expected = {
        "logprobs": "TokenParallel has no effect", "averaged none": 'reduction="none" has no loss',
        "irreducible": "loss cumulative has other values where a segment's tokens lie on two ranks",
        "plans that differ": "1.0",
        "other losses": "losses.gspo: low is 0.89 on rank 0 and 0.79 on rank 1",
        "coefficients": "losses.z_loss: coefficient is 0.5 on rank 0 and 1.5 on rank 1",
        "metrics": "metrics.entropy: reduce is 'mean' on rank 0 and missing on rank 1",
        "temperature": "temperature is 0.5 on rank 0 and 1.5 on rank 1",
        "reduction": "reduction is mean on rank 0 and sum on rank 1",
        "values and a sum": "reduction is none on rank 0 and sum on rank 1",
        "the vocabulary": "vocab is 331 on rank 0 and 330 on rank 1",
        "known kinds": "num_segments is 9 on rank 0 and 10 on rank 1", "merged": "cannot be merged",
    }  # fmt: skip
    for rank in of_two:
        assert not isinstance(rank["refused"], str), rank["refused"]
        for name, text in expected.items():
            assert text in rank["refused"][name], name
            assert len(rank["refused"][name]) < 500 or name == "irreducible"


@pytest.mark.parametrize("count", [2, 4])
def test_shift_targets(of_two: list[dict[str, Any]], of_four: list[dict[str, Any]], count: int) -> None:
    found, length = [rank["shifted"] for rank in (of_two if count == 2 else of_four)], 32 // (2 * count)
    for shift in (1, 3):
        expected = torch.full_like(SEQUENCES, -100)
        expected[:, :-shift] = SEQUENCES[:, shift:]
        pieces = expected.split(length, 1)
        for rank, mine in enumerate(found):
            wanted = torch.cat([pieces[rank], pieces[2 * count - 1 - rank]], 1)
            assert torch.equal(mine[f"zigzag {shift}"], wanted)
        joined = torch.cat([mine[f"contiguous {shift}"] for mine in found]).t()
        assert torch.equal(joined, expected.masked_fill(expected == -100, -1))


@pytest.fixture(scope="module")
def of_four_gpus(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run(work_of_four, 4, tmp_path_factory.mktemp("gpus"), "cuda")


@pytest.mark.multigpu
@pytest.mark.parametrize("layout", ["mixed", "empty"])
@pytest.mark.parametrize("name", GRID)
def test_grid_of_gpus(of_four_gpus: list[dict[str, Any]], name: str, layout: str) -> None:
    hold_to_one_rank(of_four_gpus, name, layout)


@pytest.mark.parametrize("layout", ["mixed", "empty"])
@pytest.mark.parametrize("name", GRID)
def test_grid(of_four: list[dict[str, Any]], name: str, layout: str) -> None:
    hold_to_one_rank(of_four, name, layout)


def hold_to_one_rank(of_four: list[dict[str, Any]], name: str, layout: str) -> None:
    """Two ranks hold parts of the vocabulary for each of two that hold parts of the batch."""
    outcomes = [rank[f"{layout} {name}"] for rank in of_four]
    for outcome in outcomes:
        assert not isinstance(outcome, str), outcome
    alone = step(CASES[name], inputs_of(CASES[name], FP32, "cpu"))
    close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(outcomes[0]["loss"] + outcomes[2]["loss"], alone["loss"], **close)
    assert torch.equal(outcomes[0]["loss"], outcomes[1]["loss"])
    hidden = whole([outcomes[i]["grads"][0] for i in (0, 2)], [places(layout, rank) for rank in range(2)])
    torch.testing.assert_close(hidden, alone["grads"][0], **close)
    weight = torch.cat([outcomes[i]["grads"][1] + outcomes[i + 2]["grads"][1] for i in range(2)])
    torch.testing.assert_close(weight, alone["grads"][1], **close)
    for outcome in outcomes:
        for what, value in alone["metrics"].items():
            torch.testing.assert_close(outcome["metrics"][what], value, **close)
