"""What else a call over ranks takes and returns, what it refuses, and how it fails: on every rank alike."""

from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor

from chunked_head import (
    TokenParallel,
    VocabParallel,
    linear_cross_entropy,
    linear_divergence,
    linear_logprobs,
    linear_loss,
    losses,
    metrics,
)  # fmt: skip

TOKENS, HIDDEN, VOCAB, WIDTH = 30, 24, 61, 20
ROWS = [31, 30]


def operands() -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made)

    target = torch.randint(0, VOCAB, (TOKENS,), generator=made)
    target[::5] = -100
    return {
        "hidden": normal(TOKENS, HIDDEN), "weight": normal(VOCAB, HIDDEN), "target": target, "bias": normal(VOCAB),
        "teacher_hidden": normal(TOKENS, WIDTH), "teacher_weight": normal(VOCAB, WIDTH), "upstream": normal(3, TOKENS),
    }  # fmt: skip


class Setting:
    """Operands of one rank's part, or of all of it."""

    def __init__(self, parallel: bool, sequence: bool = False):
        given, rank = operands(), dist.get_rank()
        rows = slice(rank * ROWS[0], rank * ROWS[0] + ROWS[rank]) if parallel else slice(None)
        tokens = slice(rank * TOKENS // 2, (rank + 1) * TOKENS // 2) if sequence else slice(None)
        self.hidden = given["hidden"][tokens].clone().requires_grad_()
        self.weight, self.bias = (given[name][rows].clone().requires_grad_() for name in ("weight", "bias"))
        self.target, self.upstream = given["target"][tokens], given["upstream"][:, tokens]
        self.teacher = {
            "teacher_hidden": given["teacher_hidden"][tokens],
            "teacher_weight": given["teacher_weight"][rows],
        }
        self.options: dict[str, Any] = {}
        if parallel:
            self.options = {"parallel": VocabParallel(sequence_sharded=sequence), "vocab_size": VOCAB}
        self.parallel, self.sequence = parallel, sequence

    def whole(self, gradient: Tensor | None, over: bool) -> Tensor | None:
        """Of all ranks' parts."""
        if gradient is None or not (self.parallel and over):
            return gradient
        parts: list[Any] = [None, None]
        dist.all_gather_object(parts, gradient)
        return torch.cat(parts)

    def found(self, *values: Tensor) -> dict[str, Any]:
        return {
            "values": [self.whole(v.detach(), self.sequence and v.dim() > 0) for v in values],
            "grads": [
                self.whole(self.hidden.grad, self.sequence), self.whole(self.weight.grad, True),
                self.whole(self.bias.grad, True),
            ],
        }  # fmt: skip


def unreduced(s: Setting) -> dict[str, Any]:
    loss = linear_cross_entropy(
        s.hidden, s.weight, s.target, bias=s.bias, reduction="none", label_smoothing=0.1, chunk_tokens=8, **s.options
    )
    (loss * s.upstream[0]).sum().backward()
    return s.found(loss)


def statistics(s: Setting) -> dict[str, Any]:
    out = linear_logprobs(
        s.hidden, s.weight, s.target, bias=s.bias, entropy=True, lse=True, argmax=True, top_k=5, mean_logit=True,
        log_sum_sq_probs=True, softcap=9.0, temperature=0.8, chunk_tokens=8, **s.options,
    )  # fmt: skip
    (out.logprobs * s.upstream[0] + out.entropy * s.upstream[1] + out.log_sum_sq_probs * s.upstream[2]).sum().backward()
    return s.found(*out)


def divergence(s: Setting) -> dict[str, Any]:
    out = linear_divergence(
        s.hidden, s.weight, s.target, bias=s.bias, divergence="jsd", beta=0.3, temperature=1.4, entropy=True,
        chunk_tokens=8, **s.teacher, **s.options,
    )  # fmt: skip
    (out.divergence * s.upstream[0] + out.entropy * s.upstream[1]).sum().backward()
    return s.found(*out)


def twice(s: Setting) -> dict[str, Any]:
    """A second backward over a retained graph recomputes, and ranks do so together."""
    loss = linear_cross_entropy(s.hidden, s.weight, s.target, bias=s.bias, z_loss=1e-2, **s.options)
    loss.backward(retain_graph=True)
    loss.backward()
    return s.found(loss)


def checkpointed(s: Setting) -> dict[str, Any]:
    loss = torch.utils.checkpoint.checkpoint(
        lambda h: linear_cross_entropy(h, s.weight, s.target, bias=s.bias, chunk_tokens=8, **s.options),
        s.hidden, use_reentrant=False,
    )  # fmt: skip
    loss.backward()
    return s.found(loss)


def into_a_buffer(s: Setting) -> dict[str, Any]:
    s.weight.main_grad = torch.ones_like(s.weight)
    loss = linear_cross_entropy(
        s.hidden, s.weight, s.target, bias=s.bias, accumulate_into="main_grad", chunk_tokens=8, **s.options
    )
    loss.backward()
    s.weight.grad = s.weight.main_grad
    return s.found(loss)


def skipping(s: Setting) -> dict[str, Any]:
    loss = linear_cross_entropy(s.hidden, s.weight, s.target, bias=s.bias, skip_ignored="wait", **s.options)
    loss.backward()
    return s.found(loss)


def shaped(stats: Any, batch: Any, shape: Any) -> Tensor:
    return -shape(stats.logprob)


def custom(s: Setting) -> dict[str, Any]:
    """An option that shows otherwise in every process is none that ranks differ in."""
    loss = losses.custom(shaped, scope="token", options={"shape": torch.tanh})
    out = linear_loss(s.hidden, s.weight, s.target, loss, bias=s.bias, **s.options)
    out.loss.backward()
    return s.found(out.loss)


def frozen(s: Setting) -> dict[str, Any]:
    s.weight.requires_grad_(False)
    loss = linear_cross_entropy(s.hidden, s.weight, s.target, bias=s.bias, **s.options)
    loss.backward()
    return s.found(loss)


def weighted(s: Setting) -> dict[str, Any]:
    weights = torch.linspace(0.0, 2.0, VOCAB)
    loss = linear_cross_entropy(
        s.hidden, s.weight, s.target, bias=s.bias, class_weights=weights, label_smoothing=0.2, **s.options
    )
    loss.backward()
    return s.found(loss)


def nothing_counts(s: Setting) -> dict[str, Any]:
    loss = linear_cross_entropy(s.hidden, s.weight, torch.full_like(s.target, -100), bias=s.bias, **s.options)
    loss.backward()
    return s.found(loss)


def no_tokens(s: Setting) -> dict[str, Any]:
    rows = s.hidden.detach()[:0].requires_grad_()
    loss = linear_cross_entropy(rows, s.weight, s.target[:0], bias=s.bias, **s.options)
    loss.backward()
    return s.found(loss)


def compiled(s: Setting) -> dict[str, Any]:
    """A graph before the call and one after it."""

    @torch.compile(backend="eager")
    def step(hidden: Tensor) -> Tensor:
        return linear_cross_entropy(hidden * 1.0, s.weight, s.target, bias=s.bias, **s.options) * 2.0

    loss = step(s.hidden)
    loss.backward()
    return s.found(loss)


def small_budget(s: Setting) -> dict[str, Any]:
    """Chunks of a few tokens, and gradients by tiles of a few columns."""
    loss = linear_cross_entropy(
        s.hidden, s.weight, s.target, bias=s.bias, reduction="none",
        memory_budget=21000 if s.sequence else 7000, **s.options,
    )  # fmt: skip
    (loss * s.upstream[0]).sum().backward()
    return s.found(loss)


CALLS = (
    unreduced, statistics, divergence, custom, twice, checkpointed, into_a_buffer, frozen, weighted, nothing_counts,
    no_tokens, compiled, small_budget,
)  # fmt: skip


def failures(rank: int) -> dict[str, str]:
    s = Setting(parallel=True)

    def call(**options: Any) -> Tensor:
        return linear_cross_entropy(s.hidden, s.weight, s.target, bias=s.bias, **{**s.options, **options})

    def any_loss(loss: losses.Losses | None = None, **options: Any) -> Any:
        return linear_loss(s.hidden, s.weight, s.target, loss or losses.cross_entropy(), **options, **s.options)

    def halves(tokens: slice = slice(None), **options: Any) -> Tensor:
        half = Setting(parallel=True, sequence=True)
        return linear_cross_entropy(
            half.hidden[tokens], half.weight, half.target[tokens], **{**half.options, **options}
        )

    def known_kinds() -> str:
        return str([ranks.said(lambda s=s: call(label_smoothing=s).item()) for s in (0.1, 0.2, 0.1 + 0.1 * rank)])

    everyone = VocabParallel()
    other = s.target.roll(rank)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1))
    return {
        "chunks": ranks.said(lambda: call(chunk_tokens=5 + rank)),
        "smoothing": ranks.said(lambda: call(label_smoothing=0.1 * rank)),
        "metrics": ranks.said(lambda: any_loss(metrics=[metrics.entropy(), metrics.lse()][: 1 + rank])),
        "a metric's option": ranks.said(lambda: any_loss(metrics=[metrics.lse(reduce=("max", "min")[rank], name="m")])),
        "loss": ranks.said(lambda: any_loss(losses.cross_entropy() + (0.5 + rank) * losses.z_loss())),
        "temperature": ranks.said(lambda: any_loss(temperature=1.0 + rank)),
        "reduction": ranks.said(lambda: call(reduction=("mean", "sum")[rank])),
        "values": ranks.said(lambda: call(reduction=("mean", "none")[rank])),
        "shard": ranks.said(
            lambda: linear_cross_entropy(
                s.hidden,
                operands()["weight"][: 40 - 10 * rank],
                s.target.clamp(max=29),
                parallel=everyone,
                vocab_size=60 - 20 * rank,
            )
        ),
        "hidden's gradient": ranks.said(
            lambda: linear_cross_entropy(s.hidden.detach().requires_grad_(rank == 0), s.weight, s.target, **s.options)
        ),
        "tokens of sequences": ranks.said(lambda: halves(slice(rank, None))),
        "statistics": ranks.said(lambda: linear_logprobs(s.hidden, s.weight, s.target, entropy=rank == 1, **s.options)),
        "tokens": ranks.said(lambda: linear_cross_entropy(s.hidden[rank:], s.weight, s.target[rank:], **s.options)),
        "targets": ranks.said(lambda: linear_cross_entropy(s.hidden, s.weight, other, **s.options).item()),
        "sets": ranks.said(lambda: any_loss(batch={"kept_ids": torch.arange(4).expand(30, 4) + 2 * rank}).loss.item()),
        "hidden states": ranks.said(
            lambda: linear_loss(s.hidden.roll(rank, 0), s.weight, None, losses.entropy(), **s.options).loss.item()
        ),
        "out of range": ranks.said(lambda: linear_cross_entropy(s.hidden, s.weight, s.target + 60, **s.options)),
        "vocab_size": ranks.said(lambda: call(vocab_size=63)),
        "empty": ranks.said(lambda: call(vocab_size=30, parallel=VocabParallel(rows=ROWS))),
        "rows": ranks.said(lambda: call(parallel=VocabParallel(rows=[40, 21]))),
        "rows of ranks": ranks.said(lambda: VocabParallel(rows=[61])),
        "group": ranks.said(lambda: VocabParallel("tp")),
        "mesh": ranks.said(lambda: VocabParallel(mesh)),
        "parallel": ranks.said(lambda: call(parallel="tp")),
        "top_k": ranks.said(lambda: linear_logprobs(s.hidden, s.weight, s.target, top_k=31, **s.options)),
        "tokens=": ranks.said(lambda: VocabParallel(tokens=everyone)),  # type: ignore[arg-type]
        "sharded and unreduced": ranks.said(lambda: VocabParallel(sequence_sharded=True, reduce_dhidden=False)),
        "shift": ranks.said(lambda: call(shift=1, parallel=VocabParallel(sequence_sharded=True))),
        "skip": ranks.said(lambda: call(skip_ignored="wait", parallel=VocabParallel(sequence_sharded=True))),
        "average": ranks.said(lambda: TokenParallel(average=1)),  # type: ignore[arg-type]
        # each of the two kinds has been agreed on, and on a GPU nothing is compared again but what goes with the
        # statistics
        "known kinds": known_kinds(),
        "known kinds on a GPU": ranks.as_on_a_gpu(known_kinds),
        "known chunks": str([ranks.said(lambda c=c: call(chunk_tokens=c).item()) for c in (5, 6, 5 + rank)]),
        "afterwards": ranks.said(lambda: call().item()),
    }


def begun_again(rank: int, device: str) -> dict[str, Any]:
    """After a shutdown ranks are others, of which nothing is known: what was agreed on before says nothing."""
    s = Setting(parallel=True)

    def call(chunk: int) -> Tensor:
        options = {"vocab_size": VOCAB, "parallel": VocabParallel(), "chunk_tokens": chunk}
        return linear_cross_entropy(s.hidden, s.weight, s.target, bias=s.bias, **options)

    call(5), call(6)
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=2)
    return {"mismatch": ranks.said(lambda: call(5 + rank)), "same": ranks.said(lambda: call(5).item())}


def test_agreements_end_with_the_group(tmp_path: Path) -> None:
    for rank in ranks.run(begun_again, 2, tmp_path):
        assert "ranks of VocabParallel make different calls" in rank["mismatch"]
        assert "chunk_tokens is" in rank["mismatch"]
        assert 0.0 < float(rank["same"]) < 100.0


def partial_sums(rank: int) -> dict[str, Any]:
    """``reduce_dhidden=False``: what each rank has adds up to the gradient."""
    s = Setting(parallel=True)
    parallel = VocabParallel(reduce_dhidden=False)
    linear_cross_entropy(s.hidden, s.weight, s.target, bias=s.bias, vocab_size=VOCAB, parallel=parallel).backward()
    share = s.hidden.grad
    assert share is not None
    dist.all_reduce(share)
    alone = Setting(parallel=False)
    linear_cross_entropy(alone.hidden, alone.weight, alone.target, bias=alone.bias).backward()
    return {"sum": share, "alone": alone.hidden.grad}


def far_rows(rank: int) -> dict[str, Any]:
    """One rank's hidden states lie in wider rows than the other's: the same messages, and the same numbers."""
    given = {name: value.bfloat16() for name, value in operands().items() if name in ("hidden", "weight")}
    own = slice(rank * ROWS[0], rank * ROWS[0] + ROWS[rank])
    found = {}
    for name, apart in (("as one", False), ("apart", rank == 1)):
        hidden = given["hidden"].clone()
        if apart:
            hidden = torch.cat([hidden, torch.full_like(hidden, torch.nan)], 1)[:, :HIDDEN]
        hidden, weight = hidden.requires_grad_(), given["weight"][own].clone().requires_grad_()
        target = operands()["target"]
        loss = linear_cross_entropy(
            hidden, weight, target, vocab_size=VOCAB, parallel=VocabParallel(), backend="triton", chunk_tokens=8
        )
        loss.backward()
        found[name] = [loss.detach(), hidden.grad, weight.grad]
    return found


def same_bits(rank: int) -> dict[str, Any]:
    """Deterministic values of two ranks, which hold four blocks of 8 ids each but for the last, and of one."""
    given = {name: value.bfloat16() for name, value in operands().items() if name in ("hidden", "weight", "bias")}
    asked = {"entropy": True, "argmax": True, "chunk_tokens": 8, "deterministic": True, "backend": "triton"}
    own, parallel = (slice(0, 32), slice(32, VOCAB))[rank], VocabParallel(rows=[32, VOCAB - 32])
    found = {}
    for name, rows, options in (("alone", slice(VOCAB), {}), ("ranks", own, {"parallel": parallel})):
        weight, bias = (given[each][rows].clone() for each in ("weight", "bias"))
        out = linear_logprobs(given["hidden"], weight, operands()["target"], bias=bias, **asked, **options)
        found[name] = list(out)
    return found


def work(rank: int, device: str) -> dict[str, Any]:
    found: dict[str, Any] = {"failures": failures(rank), "partial": ranks.outcome(partial_sums, rank)}
    found["same bits"] = ranks.outcome(same_bits, rank)
    found["far rows"] = ranks.outcome(far_rows, rank)
    for call in (*CALLS, skipping):
        found[f"{call.__name__} alone"] = ranks.outcome(lambda call=call: call(Setting(False)))
        found[f"{call.__name__} replicated"] = ranks.outcome(lambda call=call: call(Setting(True)))
        found[f"{call.__name__} sequence"] = ranks.outcome(lambda call=call: call(Setting(True, sequence=True)))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run(work, 2, tmp_path_factory.mktemp("options"))


@pytest.mark.parametrize("layout", ["replicated", "sequence"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_as_alone(found: list[dict[str, Any]], call: Any, layout: str) -> None:
    for rank in found:
        alone, ours = rank[f"{call.__name__} alone"], rank[f"{call.__name__} {layout}"]
        assert not isinstance(alone, str), alone
        assert not isinstance(ours, str), ours
        torch.testing.assert_close(ours["values"], alone["values"], rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(ours["grads"], alone["grads"], rtol=1e-4, atol=2e-6)


def test_skipping(found: list[dict[str, Any]]) -> None:
    for rank in found:
        torch.testing.assert_close(rank["skipping replicated"], rank["skipping alone"], rtol=1e-4, atol=2e-6)


def test_far_rows(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert not isinstance(rank["far rows"], str), rank["far rows"]
        for one, other in zip(rank["far rows"]["as one"], rank["far rows"]["apart"], strict=True):
            assert torch.equal(one, other) and torch.isfinite(one).all()


def test_same_bits(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert not isinstance(rank["same bits"], str), rank["same bits"]
        for alone, ours in zip(rank["same bits"]["alone"], rank["same bits"]["ranks"], strict=True):
            assert torch.equal(alone, ours)


def test_shares_of_the_gradient(found: list[dict[str, Any]]) -> None:
    for rank in found:
        torch.testing.assert_close(rank["partial"]["sum"], rank["partial"]["alone"], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("chunks", "chunk_tokens is 5 on rank 0 and 6 on rank 1"),
        ("smoothing", "losses.cross_entropy: label_smoothing is None on rank 0 and 0.1 on rank 1"),
        ("metrics", "metrics.lse: reduce is missing on rank 0 and 'mean' on rank 1"),
        ("a metric's option", "metrics.m: reduce is 'max' on rank 0 and 'min' on rank 1"),
        ("loss", "losses.z_loss: coefficient is 0.5 on rank 0 and 1.5 on rank 1"),
        ("temperature", "temperature is 1.0 on rank 0 and 2.0 on rank 1"),
        ("reduction", "reduction is mean on rank 0 and sum on rank 1"),
        ("values", "reduction is mean on rank 0 and none on rank 1"),
        ("shard", "rows of VocabParallel is [40, 20] on rank 0 and [30, 10] on rank 1"),
        ("hidden's gradient", "sizes.hidden_grad is True on rank 0 and False on rank 1"),
        ("statistics", "sizes.demand.entropy is (False,) on rank 0 and (True,) on rank 1"),
        ("tokens", "tokens is (30,) on rank 0 and (29,) on rank 1"),
        ("tokens of sequences", "tokens is 15 on rank 0 and 14 on rank 1"),
        ("targets", "nan"),
        ("sets", "nan"),
        ("hidden states", "nan"),
        ("known kinds", "losses.cross_entropy: label_smoothing is 0.1 on rank 0 and 0.2 on rank 1"),
        ("known kinds on a GPU", "'nan']"),
        ("known chunks", "chunk_tokens is 5 on rank 0 and 6 on rank 1"),
        ("out of range", "IndexError: target must be in [0, 61)"),
        ("vocab_size", "ValueError: vocab_size is 63, and the 2 ranks hold"),
        ("empty", "ValueError: rank 1 of VocabParallel holds no row"),
        ("rows", "rows of VocabParallel says"),
        ("rows of ranks", "must be 2 positive ints"),
        ("group", "TypeError: VocabParallel takes a process group, a DeviceMesh or None, got str"),
        ("mesh", "takes a DeviceMesh of one dimension, got 2"),
        ("parallel", "TypeError: parallel must be a VocabParallel, a TokenParallel or None, got str"),
        ("top_k", "ValueError: top_k must be in [1, 30] (the vocabulary, on every rank)"),
        ("tokens=", "TypeError: tokens of VocabParallel must be a TokenParallel"),
        ("sharded and unreduced", "leave reduce_dhidden=True"),
        ("shift", "chunked_head.parallel.shift_targets"),
        ("skip", "skip_ignored does not go with sequence_sharded=True"),
        ("average", "TypeError: average of TokenParallel must be True or False"),
    ],
)
def test_failures(found: list[dict[str, Any]], what: str, says: str) -> None:
    for rank in found:
        assert says in rank["failures"][what]
        if " on rank 0 and " in says:  # one sentence, however much there is to a call
            assert "ranks of VocabParallel make different calls: " in rank["failures"][what]
            assert len(rank["failures"][what]) < 500
        assert 0.0 < float(rank["failures"]["afterwards"]) < 100.0


def test_without_processes() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        VocabParallel()
