"""Messages of ranks that share a vocabulary, counted for docs/guides/multi-gpu.md, and the memory that they take."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ranks
import torch
from tracking import MiB, Tracker

pytest.importorskip("rich")
pytest.importorskip("psutil")

from benchmarks import traffic
from benchmarks.losses import WORKLOADS
from benchmarks.shapes import Shape
from chunked_head import VocabParallel, linear_logprobs, linear_loss, losses, plan

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "multi-gpu.md"
SHAPE = Shape(16, 40, 256)
TWO, CHUNKS = 2, 2
GRPO = WORKLOADS["grpo+z+metrics"]
SHARDED = "cross-entropy, sequence-sharded"
ASKED: dict[str, tuple[Any, tuple, tuple[str, ...]]] = {
    "cross-entropy": (losses.cross_entropy(), (), ()),
    "GRPO + z-loss, eight metrics": (GRPO.loss, GRPO.metrics, GRPO.fields),
    "KL from a dense teacher": (losses.forward_kl(), (), ("teacher_hidden", "teacher_weight")),
    SHARDED: (losses.cross_entropy(), (), ()),
}


def messages(name: str, chunks: int) -> list[traffic.Message]:
    """Messages of a step, on the GPU's path, which the interpreter runs."""
    loss, measured, fields = ASKED[name]
    torch.manual_seed(0)
    part = SHAPE.vocab // TWO

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, dtype=torch.bfloat16)

    hidden, weight = normal(SHAPE.tokens, SHAPE.hidden).requires_grad_(), normal(part, SHAPE.hidden).requires_grad_()
    target = torch.randint(SHAPE.vocab, (SHAPE.tokens,))
    batch = {"old_logprobs": torch.zeros(SHAPE.tokens), "advantages": torch.ones(SHAPE.tokens)}
    batch |= {"teacher_hidden": normal(SHAPE.tokens, SHAPE.hidden), "teacher_weight": normal(part, SHAPE.hidden)}
    batch = {field: value for field, value in batch.items() if field in fields}
    sharded = name == SHARDED
    if sharded:
        rank = torch.distributed.get_rank()
        hidden, target = hidden.detach().chunk(TWO)[rank].requires_grad_(), target.chunk(TWO)[rank]

    def step() -> None:
        linear_loss(
            hidden, weight, target, loss, batch=batch, metrics=measured,
            parallel=VocabParallel(sequence_sharded=sharded),
            chunk_tokens=SHAPE.tokens // chunks, accumulate_dtype=torch.bfloat16, backend="triton",
        ).loss.backward()  # fmt: skip

    return ranks.as_on_a_gpu(lambda: traffic.count(step))


class Kinds(NamedTuple):
    """Messages of a call and of each chunk: how many, and a chunk's bytes a token by purpose."""

    once: int
    messages: int
    targets: int  # all-reduce, fp32
    statistics: int  # all-gather, of each rank
    pairs: int  # all-reduce, fp32
    hidden: int  # all-reduce in hidden's dtype; where sequence-sharded, all-gather and reduce-scatter


def kinds(one: list[traffic.Message], several: list[traffic.Message]) -> Kinds:
    """By purpose, from a call of one chunk and the same of CHUNKS, all of which must be alike."""
    each = (len(several) - len(one)) // (CHUNKS - 1)
    once = len(one) - each
    pieces = [traffic.Message(kind, size // CHUNKS) for kind, size in one[once:]]
    assert several == one[:once] + pieces * CHUNKS, f"chunks differ: {one}, {several}"
    by = {"targets": 0, "statistics": 0, "pairs": 0, "hidden": 0}
    for message in one[once:]:
        size, rest = divmod(message.bytes, SHAPE.tokens)
        assert rest == 0
        if size == 2 * SHAPE.hidden:
            by["hidden"] += size
        elif message.kind == "all-gather":
            by["statistics"] += size // TWO
        else:
            assert message.kind == "all-reduce"
            by["pairs" if by["statistics"] else "targets"] += size
    return Kinds(once, each, **by)


def row(name: str, told: Kinds) -> str:
    ways = 2 if name == SHARDED else 1
    hidden = " + ".join([f"{told.hidden // SHAPE.hidden // ways} H"] * ways)
    return f"| {name} | {told.once} | {told.messages} | {told.targets} | {told.statistics} | {told.pairs} | {hidden} |"


K, WIDTH, ROWS = 64, 1024, [64, 8192]
MEMORY: dict[str, tuple[int, int, Any, Any, dict[str, Any]]] = {  # tokens, hidden, rows, loss, options
    "gradients by rank": (4096, 1024, [96] * 2, losses.cross_entropy(), {"sequence_sharded": True, "chunk": 4096}),
    "a teacher's rows": (4096, 16, [96] * 2, losses.forward_kl(), {"sequence_sharded": True}),
    "padding": (64, 1024, ROWS, losses.cross_entropy(), {"rows": ROWS}),
}
# gloo sums a copy of what it scatters, NCCL needs none
COPIED = {"gradients by rank": 4096 * 1024 * 4}


def peak(name: str, rank: int) -> dict[str, Any]:
    tokens, hidden, rows, loss, told = MEMORY[name]
    h, w = torch.randn(tokens, hidden, requires_grad=True), torch.randn(rows[rank], hidden, requires_grad=True)
    options = dict(told)
    given: dict[str, Any] = {"chunk_tokens": options.pop("chunk", None)}
    given["vocab_size"] = 128 if "rows" in options else None
    batch = {"teacher_hidden": torch.randn(4096, WIDTH), "teacher_weight": torch.randn(96, WIDTH)}
    batch = batch if "teacher" in name else {}
    target, parallel = torch.zeros(tokens, dtype=torch.int64), VocabParallel(**options)
    with Tracker(h, w, target, *batch.values()) as tracker:
        out = linear_loss(h, w, target, loss, batch=batch, parallel=parallel, **given)
        out.loss.backward()
    return {"measured": tracker.peak_bytes, "plan": out.plan}


def largest_logits() -> dict[str, Any]:
    """A call whose budget the gathered logits of ``top_k`` take most of."""
    h, w = torch.randn(8192, 16, requires_grad=True), torch.randn(96, 16, requires_grad=True)
    target = torch.zeros(8192, dtype=torch.int64)
    with Tracker(h, w, target) as tracker:
        linear_logprobs(
            h, w, target, parallel=VocabParallel(), top_k=K, memory_budget="40MiB"
        ).logprobs.sum().backward()
    return {"measured": tracker.peak_bytes}


def work(rank: int, device: str) -> dict[str, Any]:
    found = {name: [ranks.outcome(messages, name, chunks) for chunks in (1, CHUNKS)] for name in ASKED}
    found |= {f"memory of {name}": ranks.outcome(peak, name, rank) for name in MEMORY}
    return found | {"largest logits": ranks.outcome(largest_logits)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run_once(work, TWO, tmp_path_factory, "traffic")


def test_messages_stand_in_the_documentation(found: list[dict[str, Any]]) -> None:
    first, second = found
    told = {}
    for name in ASKED:
        assert not isinstance(first[name][0], str), first[name][0]
        assert first[name] == second[name], "ranks count different messages"
        told[name] = kinds(*first[name])
    table = "\n".join(row(name, each) for name, each in told.items())
    assert f"|\n{table}\n\n" in GUIDE.read_text(), table


@pytest.mark.parametrize("name", MEMORY)
def test_memory_is_the_plans(found: list[dict[str, Any]], name: str) -> None:
    for rank in found:
        made = rank[f"memory of {name}"]
        assert not isinstance(made, str), made
        measured, predicted = made["measured"] - COPIED.get(name, 0), made["plan"].peak_bytes
        told = f"measured {measured / MiB:.1f} MiB, predicted {predicted / MiB:.1f} MiB\n{made['plan']}"
        assert abs(measured - predicted) <= max(0.05 * predicted, 8 * MiB), told
    options = {"backend": "torch", "device": "cpu", "chunk_tokens": 4096}
    foreseen = plan(8192, 1024, 192, torch.float32, **options, ranks=2, sequence_sharded=True)
    assert found[0]["memory of gradients by rank"]["plan"] == foreseen


def test_largest_logits_are_in_the_budget(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert not isinstance(rank["largest logits"], str), rank["largest logits"]
        assert rank["largest logits"]["measured"] <= 40 * MiB + (8192 + 96) * 16 * 4


def test_sums_in_16_bits_are_over_8_chunks() -> None:
    """Of three ranks' rows a chunk has as many: a few more where a few less made nine chunks."""
    sizes = {"tokens": 8190, "hidden": 64, "vocab": 1500, "dtype": torch.bfloat16, "chunk_tokens": 1024}
    shared = {"ranks": 3, "sequence_sharded": True, "device": "cpu"}
    made = plan(**sizes, **shared, accumulate_dtype=torch.bfloat16)
    assert (made.chunk_tokens, made.chunks) == (1026, 8)
    assert plan(**sizes, **shared, accumulate_dtype=torch.float32).chunk_tokens == 1023
