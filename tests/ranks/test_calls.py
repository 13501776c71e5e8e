"""Other calls over ranks than losses in their layouts, beside the same calls of one rank; refusals, alike on all."""

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from logits_cases import made_logits, made_target
from tiers import ALL
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from chunked_head import (
    ChunkedHead,
    CrossEntropyLoss,
    TokenParallel,
    VocabParallel,
    linear_cross_entropy,
    linear_divergence,
    linear_logprobs,
    linear_loss,
    logits_loss,
    losses,
    metrics,
)
from chunked_head.parallel import shift_targets

TOKENS, HIDDEN, VOCAB, WIDTH = 30, 24, 61, 20
ROWS, COLUMNS = [31, 30], [17, 16]
SEGMENTS, EACH = 4, TOKENS // 4


def operands() -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made)

    target = torch.randint(0, VOCAB, (TOKENS,), generator=made)
    target[::5] = -100
    return {
        "hidden": normal(TOKENS, HIDDEN), "weight": normal(VOCAB, HIDDEN), "target": target, "bias": normal(VOCAB),
        "teacher_hidden": normal(TOKENS, WIDTH), "teacher_weight": normal(VOCAB, WIDTH), "upstream": normal(3, TOKENS),
        "old_logprobs": normal(TOKENS).abs() - 6, "advantages": normal(TOKENS), "ref_logprobs": normal(TOKENS) - 5,
        "segments": torch.where(torch.arange(TOKENS) < SEGMENTS * EACH, torch.arange(TOKENS) // EACH, -1),
    }  # fmt: skip


class Setting:
    """Operands of one rank's part, or, without a layout, of all."""

    def __init__(self, layout: str = ""):
        given, rank = operands(), dist.get_rank()
        shared = layout in ("vocabulary", "sequence")
        rows = slice(rank * ROWS[0], rank * ROWS[0] + ROWS[rank]) if shared else slice(None)
        halves, uneven = (slice(15), slice(15, None)), (slice(11), slice(11, None))
        tokens = {"sequence": halves, "tokens": uneven}.get(layout, (slice(None),) * 2)[rank]
        self.hidden, self.target = given["hidden"][tokens].clone().requires_grad_(), given["target"][tokens]
        self.weight, self.bias = (given[name][rows].clone().requires_grad_() for name in ("weight", "bias"))
        self.head = self.hidden, self.weight, self.target
        self.upstream = given["upstream"][:, tokens]
        self.batch = {name: given[name][tokens] for name in ("old_logprobs", "advantages", "ref_logprobs", "segments")}
        self.teacher = {
            "teacher_hidden": given["teacher_hidden"][tokens],
            "teacher_weight": given["teacher_weight"][rows],
        }
        self.layout, self.rank, self.options = layout, rank, dict[str, Any]()
        if shared:
            self.options = {"parallel": VocabParallel(sequence_sharded=layout == "sequence"), "vocab_size": VOCAB}
        elif layout:
            self.options = {"parallel": TokenParallel()}

    def loss(self, loss: Any, *fields: str, **more: Any) -> Tensor:
        batch = {name: self.batch[name] for name in fields}
        count = {"num_segments": SEGMENTS} if "segments" in fields else {}
        return linear_loss(*self.head, loss, batch=batch, **count, **more, **self.options).loss

    def whole(self, value: Tensor | None, along: str = "") -> Tensor | None:
        """All ranks' values: of tokens, of rows of the weight, or a number."""
        if value is None or not self.layout:
            return value
        parts: list[Any] = [None, None]
        dist.all_gather_object(parts, value)
        if along == "tokens":
            return torch.cat(parts) if self.layout != "vocabulary" else value
        if self.layout == "tokens":
            return parts[0] + parts[1]
        return torch.cat(parts) if along else value


def rlhf(s: Setting, loss: Any, **more: Any) -> Tensor:
    """Segments that lie on both ranks, in a checkpoint: the forward pass comes again, with its messages."""
    fields = ("old_logprobs", "advantages", "segments")
    return checkpoint(
        lambda _: s.loss(loss, *fields, metrics=[metrics.entropy()], **more), s.weight, use_reentrant=False
    )


def into_a_buffer(s: Setting) -> Tensor:
    s.weight.main_grad = torch.ones_like(s.weight)
    return linear_cross_entropy(*s.head, bias=s.bias, accumulate_into="main_grad", chunk_tokens=8, **s.options)


def shaped(stats: Any, batch: Any, shape: Any) -> Tensor:
    return -shape(stats.logprob)


def spread_out(stats: Any, batch: Any) -> Tensor:
    """A segment's deviation of log-probabilities from their mean: a sum of what depends on another sum."""
    apart = stats.logprob - batch.per_token(batch.segment_mean(stats.logprob))
    return (batch.segment_mean(apart.square()) + 1e-3).sqrt()


def relative(stats: Any, batch: Any) -> Tensor:
    """Each token beside its segment's mean, through which tokens of other ranks have a gradient."""
    return (stats.logprob - batch.per_token(batch.segment_mean(stats.logprob))).abs() * batch["advantages"]


def frozen(s: Setting) -> Tensor:
    s.weight.requires_grad_(False)
    return linear_cross_entropy(*s.head, bias=s.bias, **s.options)


def frozen_logprobs(s: Setting, **more: Any) -> Any:
    """Each rank's share of a row is made, and added up, before the token's upstream gradient is known."""
    s.weight.requires_grad_(False), s.bias.requires_grad_(False)
    return linear_logprobs(*s.head, bias=s.bias, chunk_tokens=8, **more, **s.options)


def frozen_segments(s: Setting, loss: losses.Losses, **more: Any) -> Tensor:
    s.weight.requires_grad_(False), s.bias.requires_grad_(False)
    return rlhf(s, loss, chunk_tokens=8, **more)


def compiled(s: Setting) -> Tensor:
    """A graph before the call and one after it."""

    @torch.compile(backend="eager")
    def step(hidden: Tensor) -> Tensor:
        return linear_cross_entropy(hidden * 1.0, s.weight, s.target, bias=s.bias, **s.options) * 2.0

    return step(s.hidden)


def without_gradient(s: Setting) -> Tensor:
    """On one rank nothing is to be differentiated; messages are the same."""
    if s.layout and s.rank == 1:
        s.weight.requires_grad_(False), s.hidden.requires_grad_(False)
    loss = losses.dpo()
    batch = {name: s.batch[name] for name in ("ref_logprobs", "segments")} | {"pairs": torch.tensor([[0, 1], [3, 2]])}
    out = linear_loss(*s.head, loss, batch=batch, num_segments=SEGMENTS, metrics=[metrics.entropy()], **s.options)
    return out.loss.detach()


EVERYTHING = {"entropy": True, "lse": True, "argmax": True, "top_k": 5, "mean_logit": True, "log_sum_sq_probs": True}
SHARED, BOTH = ("vocabulary", "sequence"), ("vocabulary", "tokens")
CLASSES = torch.linspace(0.0, 2.0, VOCAB)
CALLS: dict[str, tuple[tuple[str, ...], Callable[[Setting], Any]]] = {
    "statistics": (SHARED, lambda s: linear_logprobs(
        *s.head, bias=s.bias, softcap=9.0, temperature=0.8, chunk_tokens=8, **EVERYTHING, **s.options)),
    "divergence": (SHARED, lambda s: linear_divergence(
        *s.head, bias=s.bias, divergence="jsd", beta=0.3, temperature=1.4, entropy=True, chunk_tokens=8, **s.teacher,
        **s.options)),
    "checkpointed": (SHARED, lambda s: checkpoint(
        lambda h: linear_cross_entropy(h, s.weight, s.target, bias=s.bias, chunk_tokens=8, **s.options),
        s.hidden, use_reentrant=False)),
    "into a buffer": (SHARED, into_a_buffer),
    "an option that shows otherwise in every process": (
        SHARED, lambda s: s.loss(losses.custom(shaped, scope="token", options={"shape": torch.tanh}))),
    "frozen": (SHARED, frozen),
    "log-probabilities of a frozen head": (SHARED, frozen_logprobs),
    "log-probabilities and entropies of a frozen head": (SHARED, lambda s: frozen_logprobs(s, entropy=True)),
    "gspo of a frozen head": ((*SHARED, "tokens"), lambda s: frozen_segments(s, losses.gspo())),
    "gspo of a frozen head, skipping": (("tokens",), lambda s: frozen_segments(
        s, losses.gspo(), skip_ignored="wait")),
    "class weights": ((*SHARED, "tokens"), lambda s: linear_cross_entropy(
        *s.head, class_weights=CLASSES, label_smoothing=0.2, **s.options)),
    "sum of class weights": (("tokens",), lambda s: linear_cross_entropy(
        *s.head, class_weights=CLASSES, label_smoothing=0.1, reduction="sum", **s.options)),
    "a normalizer": (("tokens",), lambda s: linear_cross_entropy(*s.head, normalizer=77.0, **s.options)),
    "nothing counts": ((*SHARED, "tokens"), lambda s: linear_cross_entropy(
        s.hidden, s.weight, torch.full_like(s.target, -100), **s.options)),
    "no tokens": (SHARED, lambda s: linear_cross_entropy(s.hidden[:0], s.weight, s.target[:0], **s.options)),
    "compiled": (SHARED, compiled),
    "skipping": (BOTH, lambda s: linear_cross_entropy(*s.head, skip_ignored="wait", **s.options)),
    "skipping in segments": (("tokens",), lambda s: rlhf(s, losses.gspo(), skip_ignored=True)),
    "gspo": (("tokens",), lambda s: rlhf(s, losses.gspo(level="token", weighting="token"),
                                         chunk_tokens=20 if s.rank == 0 else None)),
    "a sum of another sum": (("tokens",), lambda s: s.loss(
        losses.custom(spread_out, scope="segment", unit="segment"), "segments")),
    "beside a segment's mean": (("tokens",), lambda s: s.loss(
        losses.custom(relative, scope="segment", unit="token"), "segments", "advantages")),
    "without gradient on one rank": (("tokens",), without_gradient),
}  # fmt: skip
# to compile takes longer than all the others together
NAMES = [(name, layout) for name, (layouts, _) in CALLS.items() for layout in layouts if ALL or name != "compiled"]


def found(call: Callable[[Setting], Any], layout: str) -> dict[str, Any]:
    s = Setting(layout)
    made = call(s)
    values = [made] if isinstance(made, Tensor) else list(made)
    sums = [v if v.dim() == 0 else (v * s.upstream[i % 3]).sum() for i, v in enumerate(values) if v.requires_grad]
    if sums:
        sum(sums).backward()
    weight = getattr(s.weight, "main_grad", s.weight.grad)
    return {
        "values": [s.whole(v.detach(), "tokens" if v.dim() else "") for v in values],
        "grads": [s.whole(s.hidden.grad, "tokens"), s.whole(weight, "rows"), s.whole(s.bias.grad, "rows")],
    }  # fmt: skip


def beside_alone(name: str, layout: str) -> None:
    ours, alone = found(CALLS[name][1], layout), found(CALLS[name][1], "")
    torch.testing.assert_close(ours["values"], alone["values"], rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(ours["grads"], alone["grads"], rtol=1e-4, atol=2e-6)


# ---- calls that are compared in ways of their own


def close(ours: Any, expected: Any) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def averaged(rank: int) -> None:
    """A head in DDP, which averages gradients over ranks."""
    made = []
    for s, options in ((Setting(), {}), (Setting("tokens"), {"parallel": TokenParallel(average=True)})):
        head = ChunkedHead(HIDDEN, VOCAB, **options)
        with torch.no_grad():
            head.weight.copy_(s.weight)
        module = torch.nn.parallel.DistributedDataParallel(head) if options else head
        loss = module(s.hidden, s.target, z_loss=1e-3)
        loss.backward()
        made.append((s.whole(loss.detach()) / (2 if options else 1), head.weight.grad))
    close(made[1], made[0])


def partial_sums(rank: int) -> None:
    """With reduce_dhidden=False each rank's gradients of hidden states add up."""
    parallel = VocabParallel(reduce_dhidden=False)
    for is_frozen in (False, True):
        s, alone = Setting("vocabulary"), Setting()
        for each, options in ((s, {"vocab_size": VOCAB, "parallel": parallel}), (alone, {})):
            each.weight.requires_grad_(not is_frozen)
            reduction = "none" if is_frozen else "mean"  # rows made before their factors are known
            values = linear_cross_entropy(*each.head, reduction=reduction, **options)
            values.backward(each.upstream[0] if is_frozen else None)
        dist.all_reduce(s.hidden.grad)
        close(s.hidden.grad, alone.hidden.grad)


def far_rows(rank: int) -> None:
    """One rank's hidden states lie in wider rows than the other's: the same messages, and the same numbers."""
    made = []
    for apart in (False, rank == 1):
        s = Setting("vocabulary")
        hidden = s.hidden.detach().bfloat16()
        if apart:
            hidden = torch.cat([hidden, torch.full_like(hidden, torch.nan)], 1)[:, :HIDDEN]
        hidden, weight = hidden.requires_grad_(), s.weight.detach().bfloat16().requires_grad_()
        loss = linear_cross_entropy(hidden, weight, s.target, backend="triton", chunk_tokens=8, **s.options)
        made.append([loss.detach(), *torch.autograd.grad(loss, (hidden, weight))])
    torch.testing.assert_close(made[0], made[1], rtol=0, atol=0)


def same_bits(rank: int) -> None:
    """Deterministic values of two ranks, twice, as those of one."""
    given = {name: value.bfloat16() for name, value in operands().items() if name in ("hidden", "weight", "bias")}
    own, made = (slice(0, 32), slice(32, VOCAB))[rank], []
    of_ranks = own, {"parallel": VocabParallel(rows=[32, VOCAB - 32])}
    for rows, options in ((slice(VOCAB), {}), of_ranks, of_ranks):
        weight, bias = (given[each][rows].clone() for each in ("weight", "bias"))
        asked = {"entropy": True, "argmax": True, "chunk_tokens": 8, "deterministic": True, "backend": "triton"}
        made.append(linear_logprobs(given["hidden"], weight, operands()["target"], bias=bias, **asked, **options))
    torch.testing.assert_close(list(made[1]), list(made[2]), rtol=0, atol=0)
    torch.testing.assert_close(list(made[0]), list(made[1]), rtol=0, atol=1e-5)


class Late:
    """A collective that reads what it sends when it is waited for, as one on another stream may."""

    now = staticmethod(dist.reduce_scatter_tensor)

    def __init__(self, *given: Any, group: Any, async_op: bool):
        self.given, self.group = given, group

    def wait(self) -> None:
        self.now(*self.given, group=self.group)


def late_messages(rank: int) -> None:
    """Gradients on their way to other ranks are not where the next chunk's products go."""
    for chunk in (2, 8):
        s, alone = Setting("sequence"), Setting()
        with mock.patch("torch.distributed.reduce_scatter_tensor", Late):
            linear_cross_entropy(*s.head, chunk_tokens=chunk, **s.options).backward()
        linear_cross_entropy(*alone.head).backward()
        close(s.whole(s.hidden.grad, "tokens"), alone.hidden.grad)


SEQUENCES = torch.arange(3 * 32).view(3, 32)


def shifted(rank: int) -> None:
    """Targets of tokens that lie in two ways on ranks."""
    for shift in (1, 3):
        expected = torch.full_like(SEQUENCES, -100)
        expected[:, :-shift] = SEQUENCES[:, shift:]
        pairs = (SEQUENCES, expected)
        zigzag, wanted = (torch.cat([x.split(8, 1)[rank], x.split(8, 1)[3 - rank]], 1) for x in pairs)
        close(shift_targets(zigzag, shift=shift, layout="zigzag"), wanted)
        uneven, wanted = (x.t().split([27, 5])[rank] for x in pairs)
        close(shift_targets(uneven, shift=shift, ignore_index=-1, dim=0), wanted.masked_fill(wanted == -100, -1))


def own(logits: Tensor, rank: int) -> Tensor:
    """A rank's columns of logits."""
    return logits.split(COLUMNS, -1)[rank].clone().requires_grad_()


def joined(gradient: Tensor | None) -> Tensor:
    parts: list[Any] = [None, None]
    dist.all_gather_object(parts, gradient)
    return torch.cat(parts, 1)


def modules(rank: int) -> None:
    """``CrossEntropyLoss`` beside PyTorch's, with class weights of the vocabulary and a second backward."""
    logits, target = made_logits(5, 33, 7), made_target(33, 5, 7)
    for options in ({}, {"reduction": "none"}, {"label_smoothing": 0.2, "weight": torch.linspace(0.1, 2.0, 33)}):
        theirs = logits.clone().requires_grad_()
        mine = logits.split(COLUMNS, 1)[rank].clone().requires_grad_()
        made = []
        for module, x in (
            (torch.nn.CrossEntropyLoss(**options), theirs),
            (CrossEntropyLoss(**options, parallel=VocabParallel(rows=COLUMNS)), mine.movedim(1, -1)),
        ):
            loss = module(x, target)
            loss.sum().backward(retain_graph=True)
            (loss.sum() * 3.0).backward()
            made.append(loss.detach())
        close([made[1], joined(mine.grad)], [made[0], theirs.grad])
    # values per token are nobody else's affair; a copy of the module works with the same processes
    logits, target = made_logits(7, 33)[rank:], made_target(33, 7)[rank:]
    ours = copy.deepcopy(copy.copy(CrossEntropyLoss(reduction="none", parallel=copy.copy(TokenParallel()))))
    close(ours(logits, target), F.cross_entropy(logits, target, reduction="none"))


def messages(rank: int) -> None:
    """On logits an agreement and one for the call, one more with a teacher, and none in backward."""
    logits, target = made_logits(9, 33), made_target(33, 9)
    teacher = {"teacher_logits": own(made_logits(9, 33, seed=8), rank).detach()}
    from benchmarks import traffic

    for loss, batch, expected in ((losses.cross_entropy(), {}, 2), (losses.forward_kl(), teacher, 3)):
        given, made = own(logits, rank), []

        def call(given: Tensor = given, made: list[Tensor] = made, loss: Any = loss, batch: Any = batch) -> None:
            made.append(logits_loss(given, target, loss, batch=batch, parallel=VocabParallel(rows=COLUMNS)).loss)

        def counted(call: Any = call, made: list[Tensor] = made) -> list[int]:
            return [len(traffic.count(call)), len(traffic.count(made[-1].backward))]

        assert ranks.as_on_a_gpu(counted) == [expected, 0]


def begun_again(rank: int) -> None:
    """After a shutdown ranks are others, of which nothing is known: what was agreed on before says nothing."""

    def call(chunk: int) -> Tensor:
        s = Setting("vocabulary")
        return linear_cross_entropy(*s.head, bias=s.bias, chunk_tokens=chunk, **s.options)

    call(5), call(6)
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=2)
    assert "chunk_tokens is 5 on rank 0 and 6 on rank 1" in ranks.said(lambda: call(5 + rank))
    assert 0.0 < float(call(5)) < 100.0


OWN = (
    averaged, partial_sums, far_rows, same_bits, late_messages, shifted, modules, messages,
    begun_again,  # the last: it begins another group
)  # fmt: skip


# ---- refusals


def cumulative(stats: Any, batch: Any) -> Tensor:
    return stats.logprob.cumsum(0)


DIFFERENT = "ranks of VocabParallel make different calls: "
SAID = {
    # calls that differ between ranks: before any message where the host may look, nan where it is not to wait
    "chunks": DIFFERENT + "chunk_tokens is 5 on rank 0 and 6 on rank 1",
    "smoothing": DIFFERENT + "losses.cross_entropy: label_smoothing is None on rank 0 and 0.1 on rank 1",
    "metrics": "metrics.lse: reduce is missing on rank 0 and 'mean' on rank 1",
    "loss": "losses.z_loss: coefficient is 0.5 on rank 0 and 1.5 on rank 1",
    "reduction": "reduction is 'mean' on rank 0 and 'sum' on rank 1",
    "shard": "rows of VocabParallel is [40, 20] on rank 0 and [30, 10] on rank 1",
    "other shards": "ranks hold [40, 10] rows: pass VocabParallel(rows=[40, 10])",
    "an odd vocabulary": "ranks hold [31, 30] rows: pass vocab_size=61",
    "hidden's gradient": "sizes.hidden_grad is True on rank 0 and False on rank 1",
    "statistics": "sizes.demand.statistics is ((),) on rank 0 and ((entropy,),) on rank 1",
    "tokens": "tokens is (30,) on rank 0 and (29,) on rank 1",
    "tokens of sequences": "tokens is 15 on rank 0 and 14 on rank 1",
    "targets": "nan", "targets in kernels": "nan", "sets": "nan", "hidden states": "nan", "targets of logits": "nan",
    "known kinds": "losses.cross_entropy: label_smoothing is 0.1 on rank 0 and 0.2 on rank 1",
    "known kinds on a GPU": f"'nan', 'ValueError: {DIFFERENT}losses.cross_entropy: label_smoothing is 0.1 on rank 0",
    "known kinds of logits": f"'nan', 'ValueError: {DIFFERENT}losses.cross_entropy: label_smoothing is 0.1 on rank 0",
    "dtype": "logits.dtype is torch.bfloat16 on rank 0 and torch.float16 on rank 1",
    "plans of tokens": "True", "options of tokens": "losses.gspo: min_ratio is 0.89 on rank 0 and 0.79 on rank 1",
    "temperature of tokens": "temperature is 0.5 on rank 0 and 1.5 on rank 1",
    "vocabulary of tokens": "vocab is 61 on rank 0 and 60 on rank 1",
    "known kinds of tokens": "num_segments is 9 on rank 0 and 10 on rank 1",
    # what no ranks may ask for
    "out of range": "IndexError: target must be in [0, 61)",
    "vocab_size": "ValueError: vocab_size is 63, and the 2 ranks hold",
    "empty": "ValueError: rank 1 of VocabParallel holds no row",
    "rows": "rows of VocabParallel says", "rows of ranks": "must be 2 positive ints",
    "group": "TypeError: VocabParallel takes a process group, a DeviceMesh or None, got str",
    "mesh": "takes a DeviceMesh of one dimension, got 2",
    "parallel": "TypeError: parallel must be a VocabParallel, a TokenParallel or None, got str",
    "top_k": "ValueError: top_k must be in [1, 30] (the vocabulary, on every rank)",
    "tokens=": "TypeError: tokens of VocabParallel must be a TokenParallel",
    "sharded and unreduced": "leave reduce_dhidden=True", "shift": "chunked_head.parallel.shift_targets",
    "skip": "skip_ignored does not go with sequence_sharded=True",
    "average": "TypeError: average of TokenParallel must be True or False",
    "log-probabilities of tokens": "TokenParallel has no effect",
    "average of none": 'multiplies the loss, of which reduction="none" has none',
    "irreducible": "loss cumulative has other values where a segment's tokens lie on two ranks",
    "merged": "cannot be merged",
    "sequence of logits": "ValueError: sequence_sharded=True is of hidden states",
    "sum of logits": "ValueError: reduce_dhidden=False is of hidden states",
    "average of a module": "ValueError: average=True of TokenParallel multiplies the loss",
    "logits": "TypeError: logits is a DTensor", "target of logits": "TypeError: target is a DTensor",
    "in place of local ones": "memory of these belongs to a tensor that autograd does not see",
    "second": "ValueError: input (2, ",
    "field": "TypeError: batch['mask'] is a DTensor", "class weights": "TypeError: weight is a DTensor",
    "saved": "TypeError: cannot pickle 'torch._C._distributed_c10d.ProcessGroup' object",
    "afterwards": "13.358",
}  # fmt: skip


def refused(rank: int) -> dict[str, str]:
    s, halves, shares = Setting("vocabulary"), Setting("sequence"), Setting("tokens")
    mesh, everyone, tokens = init_device_mesh("cpu", (2,)), VocabParallel(), TokenParallel()
    # of a size that no call before had: what one rank has agreed on before, it does not compare again
    logits, ids = made_logits(8, 33), made_target(33, 8)
    placed = distribute_tensor(logits, mesh, [Shard(1)])
    second = made_logits(2, 33, 5).split(COLUMNS, 1)[rank]  # classes second
    ce, replicated = losses.cross_entropy, [Replicate()]

    def call(**options: Any) -> Any:
        return linear_cross_entropy(*s.head, bias=s.bias, **{**s.options, **options})

    def any_loss(loss: Any = None, **options: Any) -> Any:
        return linear_loss(*s.head, loss or ce(), **options, **s.options)

    def of_tokens(loss: Any = None, **options: Any) -> Any:
        return linear_loss(*shares.head, loss or ce(), **{"parallel": tokens, **options})

    def segmented(loss: Any, count: int = SEGMENTS) -> Any:
        batch = {name: shares.batch[name] for name in ("old_logprobs", "advantages", "segments")}
        return of_tokens(loss, batch=batch, num_segments=count)

    def on_logits(given: Any = None, target: Any = ids, loss: Any = None, **options: Any) -> Any:
        given = own(logits, rank) if given is None else given
        return logits_loss(given, target, loss or ce(), **{"parallel": VocabParallel(rows=COLUMNS), **options}).loss

    def kinds(function: Any) -> str:
        return str([ranks.said(lambda v=v: function(v).item()) for v in (0.1, 0.2, 0.1 + 0.1 * rank, 0.1)])

    few = torch.randn(64 if rank else 6, 16).bfloat16(), torch.randn(40, 16).bfloat16().requires_grad_()
    calls: dict[str, Callable[[], Any]] = {
        "chunks": lambda: call(chunk_tokens=5 + rank), "smoothing": lambda: call(label_smoothing=0.1 * rank),
        "metrics": lambda: any_loss(metrics=[metrics.entropy(), metrics.lse()][: 1 + rank]),
        "loss": lambda: any_loss(ce() + (0.5 + rank) * losses.z_loss()),
        "reduction": lambda: call(reduction=("mean", "sum")[rank]),
        "shard": lambda: linear_cross_entropy(
            s.hidden, operands()["weight"][: 40 - 10 * rank], s.target.clamp(max=29), parallel=everyone,
            vocab_size=60 - 20 * rank),
        "other shards": lambda: linear_cross_entropy(
            s.hidden, operands()["weight"][: 40 - 30 * rank], s.target.clamp(max=9), parallel=everyone),
        "an odd vocabulary": lambda: linear_cross_entropy(
            s.hidden, operands()["weight"][: 31 - rank], s.target.clamp(max=9), parallel=everyone),
        "hidden's gradient": lambda: linear_cross_entropy(
            s.hidden.detach().requires_grad_(rank == 0), s.weight, s.target, **s.options),
        "statistics": lambda: linear_logprobs(*s.head, entropy=rank == 1, **s.options),
        "tokens": lambda: linear_cross_entropy(s.hidden[rank:], s.weight, s.target[rank:], **s.options),
        "tokens of sequences": lambda: linear_cross_entropy(
            halves.hidden[rank:], halves.weight, halves.target[rank:], **halves.options),
        "targets": lambda: linear_cross_entropy(s.hidden, s.weight, s.target.roll(rank), **s.options).item(),
        "targets in kernels": lambda: linear_cross_entropy(
            s.hidden, s.weight, s.target.roll(rank), backend="triton", **s.options).item(),
        "sets": lambda: any_loss(batch={"kept_ids": torch.arange(4).expand(30, 4) + 2 * rank}).loss.item(),
        "hidden states": lambda: linear_loss(
            s.hidden.roll(rank, 0), s.weight, None, losses.entropy(), **s.options).loss.item(),
        "targets of logits": lambda: on_logits(target=ids.roll(rank)).item(),
        "known kinds": lambda: kinds(lambda v: call(label_smoothing=v)),
        "known kinds on a GPU": lambda: ranks.as_on_a_gpu(lambda: kinds(lambda v: call(label_smoothing=v))),
        "known kinds of logits": lambda: ranks.as_on_a_gpu(
            lambda: kinds(lambda v: on_logits(loss=ce(label_smoothing=v)))),
        "dtype": lambda: on_logits(own(logits.to(torch.float16 if rank else torch.bfloat16), rank)),
        "plans of tokens": lambda: bool(linear_cross_entropy(
            *few, torch.zeros(len(few[0]), dtype=torch.int64), parallel=tokens, chunk_tokens=7).isfinite()),
        "options of tokens": lambda: segmented(losses.gspo(clip_low=0.11 + 0.1 * rank)),
        "temperature of tokens": lambda: of_tokens(temperature=0.5 + rank),
        "vocabulary of tokens": lambda: linear_cross_entropy(
            shares.hidden, shares.weight[: VOCAB - rank], shares.target.clamp(max=50), parallel=tokens),
        "known kinds of tokens": lambda: [segmented(losses.gspo(), n) for n in (9, 10, 9 + rank)],
        "out of range": lambda: linear_cross_entropy(s.hidden, s.weight, s.target + 60, **s.options),
        "vocab_size": lambda: call(vocab_size=63),
        "empty": lambda: call(vocab_size=30, parallel=VocabParallel(rows=ROWS)),
        "rows": lambda: call(parallel=VocabParallel(rows=[40, 21])), "rows of ranks": lambda: VocabParallel(rows=[61]),
        "group": lambda: VocabParallel("tp"), "mesh": lambda: VocabParallel(init_device_mesh("cpu", (2, 1))),
        "parallel": lambda: call(parallel="tp"), "top_k": lambda: linear_logprobs(*s.head, top_k=31, **s.options),
        "tokens=": lambda: VocabParallel(tokens=everyone),  # type: ignore[arg-type]
        "sharded and unreduced": lambda: VocabParallel(sequence_sharded=True, reduce_dhidden=False),
        "shift": lambda: call(shift=1, parallel=VocabParallel(sequence_sharded=True)),
        "skip": lambda: call(skip_ignored="wait", parallel=VocabParallel(sequence_sharded=True)),
        "average": lambda: TokenParallel(average=1),  # type: ignore[arg-type]
        "log-probabilities of tokens": lambda: linear_logprobs(*shares.head, parallel=tokens),
        "average of none": lambda: linear_cross_entropy(
            *shares.head, reduction="none", parallel=TokenParallel(average=True)),
        "irreducible": lambda: segmented(losses.custom(cumulative, scope="segment", unit="token")),
        "merged": lambda: metrics.combine(
            of_tokens(metrics=[metrics.entropy()], **more).metrics for more in ({"parallel": None}, {})),
        "sequence of logits": lambda: on_logits(parallel=VocabParallel(rows=COLUMNS, sequence_sharded=True)),
        "sum of logits": lambda: on_logits(parallel=VocabParallel(rows=COLUMNS, reduce_dhidden=False)),
        "average of a module": lambda: CrossEntropyLoss(
            reduction="none", parallel=TokenParallel(average=True))(logits, ids),
        "logits": lambda: on_logits(placed),
        "target of logits": lambda: on_logits(logits, distribute_tensor(ids, mesh, replicated), parallel=None),
        "in place of local ones": lambda: on_logits(
            (placed.clone().requires_grad_() * 1.0).to_local()[:, :], inplace=True),
        "second": lambda: CrossEntropyLoss(parallel=VocabParallel(rows=COLUMNS))(second, made_target(33, 2, 5)),
        "field": lambda: on_logits(batch={"mask": distribute_tensor(ids >= 0, mesh, replicated)}),
        "class weights": lambda: CrossEntropyLoss(distribute_tensor(torch.ones(33), mesh, [Shard(0)])),
        "saved": lambda: pickle.dumps(CrossEntropyLoss(parallel=everyone)),
        "afterwards": lambda: call().item(),
    }  # fmt: skip
    assert calls.keys() == SAID.keys()
    return {name: ranks.said(function) for name, function in calls.items()}


def work(rank: int, device: str) -> dict[str, Any]:
    made = {f"{name} {layout}": ranks.outcome(beside_alone, name, layout) for name, layout in NAMES}
    made["refused"] = ranks.outcome(refused, rank)
    return made | {call.__name__: ranks.outcome(call, rank) for call in OWN}


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run_once(work, 2, tmp_path_factory, "calls")


@pytest.mark.parametrize("name", [*map(" ".join, NAMES), *(call.__name__ for call in OWN)])
def test_as_alone(of_two: list[dict[str, Any]], name: str) -> None:
    for rank in of_two:
        assert rank[name] is None, rank[name]


@pytest.mark.parametrize("name", SAID)
def test_refusals(of_two: list[dict[str, Any]], name: str) -> None:
    for rank in of_two:
        assert isinstance(rank["refused"], dict), rank["refused"]
        assert SAID[name] in rank["refused"][name]
        assert (
            len(rank["refused"][name]) < 500 or name == "irreducible"
        )  # one sentence, however much there is to a call


def test_without_processes() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        VocabParallel()
