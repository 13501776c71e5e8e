"""What ranks that share a vocabulary send each other in a step, counted; docs/guides/multi-gpu.md shows it.

`PYTHONPATH=tests/helpers python tests/ranks/test_traffic.py` makes that section anew.
"""

import math
import os
import tempfile
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton; conftest.py does so for the tests

import pytest
import ranks
import torch

pytest.importorskip("rich")
pytest.importorskip("psutil")

from benchmarks import traffic
from benchmarks.losses import WORKLOADS
from benchmarks.shapes import Shape
from chunked_head import VocabParallel, linear_loss, losses, plan

DOCS = Path(__file__).parents[2] / "docs" / "guides" / "multi-gpu.md"
BEGIN, END = "<!-- made by tests/ranks/test_traffic.py -->", "<!-- end -->"
SHAPE, PAPER = Shape(16, 40, 256), Shape(8192, 4096, 128256)
TWO, CHUNKS = 2, 2
GRPO = WORKLOADS["grpo+z+metrics"]
DENSE = ("teacher_hidden", "teacher_weight")
ASKED: dict[str, tuple[Any, tuple, tuple[str, ...]]] = {
    "cross-entropy": (losses.cross_entropy(), (), ()),
    "GRPO + z-loss, eight metrics": (GRPO.loss, GRPO.metrics, GRPO.fields),
    "KL from a dense teacher": (losses.forward_kl(), (), DENSE),
}
SHARDED = "cross-entropy, sequence-sharded"
ASKED[SHARDED] = ASKED["cross-entropy"]


class Kinds(NamedTuple):
    """Messages of a call and of each chunk: how many, and a chunk's bytes a token by purpose."""

    once: int
    messages: int
    targets: int  # all-reduce, fp32
    statistics: int  # all-gather, of each rank
    pairs: int  # all-reduce, fp32
    hidden: int  # all-reduce in hidden's dtype; where sequence-sharded, all-gather and reduce-scatter


def work(rank: int, device: str) -> dict[str, Any]:
    """Messages of a step with ``chunks`` chunks, by what is asked; on the GPU's path, which the interpreter runs."""
    found = {}
    for name in ASKED:
        for chunks in (1, CHUNKS):
            found[name, chunks] = ranks.outcome(messages, name, chunks)
    return found


def messages(name: str, chunks: int) -> list[traffic.Message]:
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
        out = linear_loss(
            hidden, weight, target, loss, batch=batch, metrics=measured,
            parallel=VocabParallel(sequence_sharded=sharded),
            chunk_tokens=SHAPE.tokens // chunks, accumulate_dtype=torch.bfloat16, backend="triton",
        )  # fmt: skip
        out.loss.backward()

    def counted() -> list[traffic.Message]:
        step()  # a new kind of call is agreed on once
        return traffic.count(step)

    return ranks.as_on_a_gpu(counted)


def kinds(one: list[traffic.Message], several: list[traffic.Message]) -> Kinds:
    """By purpose, from a call of one chunk and the same of CHUNKS, all of which must be alike."""
    each = (len(several) - len(one)) // (CHUNKS - 1)
    once = len(one) - each
    chunk = one[once:]
    pieces = [traffic.Message(kind, size // CHUNKS) for kind, size in chunk]
    assert several == one[:once] + pieces * CHUNKS, f"chunks differ: {one}, {several}"
    by = {"targets": 0, "statistics": 0, "pairs": 0, "hidden": 0}
    # sums before the first chunk are of targets' logits of all tokens
    by["targets"] = sum(message.bytes // SHAPE.tokens for message in one[:once] if message.kind == "all-reduce")
    for message in chunk:
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


def section(counted: dict[str, Kinds]) -> str:
    """The counts, and the model's costs, in Markdown."""
    lines = [
        *wrapped(
            "The table counts what ranks that share a vocabulary send in bf16 on a Hopper GPU: messages of a call",
            "and of each chunk, and a chunk's bytes per token. H is the hidden size. Where the weight's gradient",
            "accumulates in fp32, `hidden`'s gradient travels in fp32 too and takes 4 H.",
        ),
        "",
        "| | messages a call | and a chunk | all-reduce of targets' logits | all-gather of statistics, of each rank "
        "| all-reduce of pairs' sums | `hidden` and its gradient |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, told in counted.items():
        ways = 2 if name == SHARDED else 1
        hidden = " + ".join([f"{told.hidden // SHAPE.hidden // ways} H"] * ways)
        lines.append(
            f"| {name} | {told.once} | {told.messages} | {told.targets} | {told.statistics} | {told.pairs} | {hidden} |"
        )
    machine = traffic.Machine()
    lines += [
        "",
        *wrapped(
            "The one message of a call is the sum of the targets' logits. A sequence-sharded call gathers the",
            "targets instead, gathers hidden states in each chunk and scatters their gradient, which together is",
            "as much as the all-reduce. The first call with new options gathers 8 bytes more; on the CPU every",
            "call does.",
        ),
        "",
        *wrapped(
            f"The next table is a calculation, not a measurement, for {PAPER.tokens} x {PAPER.hidden} x",
            f"{PAPER.vocab} in bf16. A message of M bytes over n ranks takes `l + M f / B`. f is 2 (n - 1) / n for",
            "an all-reduce and (n - 1) / n for an all-gather of M bytes in all. The latency l is",
            f"{machine.first_us:g} us + {machine.hop_us:g} us log2(hosts). B is {machine.nvlink / 1e9:g} GB/s for",
            f"each GPU within hosts of {machine.host} (NVLink at 80 %), and {machine.network / 1e9:g} GB/s between",
            f"hosts ({machine.host} InfiniBand ports of 400 Gb/s). Products run at {machine.flops / 1e12:g}",
            "TFLOP/s. Ranks wait for a chunk's statistics. The sum of `hidden`'s gradient runs beside the chunk's",
            "product for the weight and the next chunk's logits; the column `not hidden` is what is left of it.",
            "Chunks are the plan's at the default budget. All times are milliseconds.",
        ),
        "",
        "| | ranks | chunks | products | statistics | `hidden`'s gradient | not hidden | all | of one GPU's |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, told in counted.items():
        for count in () if name == SHARDED else (8, 64, 1024):
            lines.append(paper_row(name, told, count))
    return "\n".join([*lines, "", *READING, ""])


def wrapped(*words: str) -> list[str]:
    return textwrap.wrap(" ".join(words), 120, break_on_hyphens=False)


READING = wrapped(
    "By this calculation eight ranks of one host divide the time by eight. Over several hosts the sum of",
    "`hidden`'s gradient, which ranks do not make smaller, takes longer than what runs beside it, and the",
    "gathered statistics grow with the number of ranks. So split a vocabulary within a host, and tokens",
    "over hosts.",
)


def paper_row(name: str, told: Kinds, count: int) -> str:
    loss, measured, _ = ASKED[name]
    teacher = PAPER.hidden if "teacher" in name else None
    padded = math.ceil(PAPER.vocab / count) * count
    made = plan(
        PAPER.tokens, PAPER.hidden, padded, torch.bfloat16, loss=loss, metrics=measured, teacher_hidden=teacher,
        ranks=count, device="cuda", backend="triton",
    )  # fmt: skip
    products = 4 if teacher else 3
    cost = traffic.cost(PAPER, count, made.chunks, told.targets // 4, told.statistics // 4, told.pairs // 4, products)
    alone = PAPER.flops * products / 3 / traffic.Machine().flops * 1e3
    values = [cost.products, cost.statistics, cost.hidden, cost.exposed, cost.total]
    shown = " | ".join(f"{value:.2f}" for value in values)
    return f"| {name} | {count} | {made.chunks} | {shown} | 1/{alone / cost.total:.0f} |"


def counted(folder: Path) -> dict[str, Kinds]:
    first, second = ranks.run(work, TWO, folder)
    for key, told in first.items():
        assert not isinstance(told, str), told
        assert told == second[key], "ranks count different messages"
    return {name: kinds(first[name, 1], first[name, CHUNKS]) for name in ASKED}


def test_counts_stand_in_the_documentation(tmp_path: Path) -> None:
    text = DOCS.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    written = text.split(BEGIN)[1].split(END)[0].strip()
    assert written == section(counted(tmp_path)).strip(), "PYTHONPATH=tests/helpers python tests/ranks/test_traffic.py"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        made = section(counted(Path(folder)))
    before, after = DOCS.read_text().split(BEGIN)[0], DOCS.read_text().split(END)[1]
    DOCS.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}")
