"""Training of a small model, its head in bf16, with fp8 logits, and all in fp8: `python -m benchmarks fp8_training`.

Three seeds each. Of one seed, all three begin with the same weights and see the same windows in the same order. Losses
of text that is held out are those of the head in bf16, whatever the training had. The text is what is installed: the
standard library's and the packages' sources and documentation. Errors of the first run's head are measured too.
"""

import functools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from benchmarks import command, demo_data, demo_model, fp8_errors
from benchmarks.command import Row, Watch, number
from benchmarks.fp8_ways import BF16, WAYS, options_of
from benchmarks.shapes import Operands, Shape
from chunked_head import linear_cross_entropy, plan

SEEDS = (0, 1, 2)
RATE, WARM_UP = 1.5e-3, 50  # of AdamW: the largest learning rate, and steps until then
POINTS = 25  # of a curve
KEYS = ("way", "seed", "status", "held_out", "training", "seconds", "operands", *fp8_errors.KEYS)


class Task(NamedTuple):
    """The model, and how it is trained."""

    hidden: int
    vocab: int
    layers: int
    context: int
    windows: int  # of a step
    steps: int
    characters: int  # of text
    evaluated: int  # windows of a point of the curve; of the last one eight times as many


TASKS = {
    "cuda": Task(512, 16384, 4, 256, windows=64, steps=1000, characters=36_000_000, evaluated=64),
    "cpu": Task(64, 512, 1, 32, windows=4, steps=8, characters=1_000_000, evaluated=4),
}


class Data(NamedTuple):
    """Token ids on the device, and where they are from."""

    training: Tensor
    held_out: Tensor
    description: str


@functools.cache
def data_of(task: Task, device: torch.device) -> Data:
    text = demo_data.load_installed(task.characters)
    tokens = demo_data.tokenize_text(text, task.vocab, task.context)
    training, held_out = (torch.from_numpy(ids).long().to(device) for ids in (tokens.training, tokens.held_out))
    return Data(training, held_out, text.description)


def rate_of(step: int, steps: int) -> float:
    """Learning rate of a step: a linear rise, then half a cosine wave down to a tenth."""
    warm_up = min(WARM_UP, steps // 4)
    if step < warm_up:
        return RATE * (step + 1) / warm_up
    return RATE * (0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / (steps - warm_up)))


def batches(data: Data, task: Task, seed: int) -> Iterator[Tensor]:
    """Draw ids [windows, context + 1] from anywhere in the text, a batch for each step."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(task.context + 1, device=data.training.device)
    for _ in range(task.steps):
        first = torch.randint(len(data.training) - task.context, (task.windows, 1), generator=generator)
        yield data.training[first.to(offsets.device) + offsets]


@torch.no_grad()
def held_out_loss(model: demo_model.Decoder, data: Data, task: Task, windows: int) -> float:
    """Mean loss over evenly spaced windows of held-out text, by a head in bf16."""
    offsets = torch.arange(task.context + 1, device=data.held_out.device)
    first = torch.linspace(0, len(data.held_out) - task.context - 1, windows).long().to(offsets.device)
    losses = []
    for block in first.split(task.windows):
        ids = data.held_out[block[:, None] + offsets]
        with torch.autocast(ids.device.type, torch.bfloat16):
            losses.append(linear_cross_entropy(model(ids[:, :-1]), model.lm_head.weight, ids[:, 1:], reduction="sum"))
    return float(torch.stack(losses).sum()) / (windows * task.context)


def train(task: Task, way: str, seed: int, data: Data, watch: Watch) -> tuple[demo_model.Decoder, Row]:
    """Train a model; return it and the record of its run."""
    device = data.training.device
    options = options_of(way, device)
    torch.manual_seed(seed)
    model = demo_model.Decoder(demo_model.ModelConfig(task.vocab, task.hidden, task.layers, task.context)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), fused=True)
    curve, losses, stride = list[tuple[int, float]](), list[Tensor](), max(1, task.steps // POINTS)
    begin = time.perf_counter()
    for step, ids in enumerate(batches(data, task, seed)):
        for group in optimizer.param_groups:
            group["lr"] = rate_of(step, task.steps)
        with torch.autocast(device.type, torch.bfloat16):
            loss = linear_cross_entropy(model(ids[:, :-1]), model.lm_head.weight, ids[:, 1:], **options)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if (step + 1) % stride == 0:
            curve.append((step + 1, held_out_loss(model, data, task, task.evaluated)))
            watch.tick()
    held_out, seconds = held_out_loss(model, data, task, 8 * task.evaluated), time.perf_counter() - begin
    last = torch.stack(losses[-max(1, task.steps // 10) :])
    return model, {
        "status": "ok", "held_out": held_out, "training": float(last.mean()), "seconds": seconds, "curve": curve,
        "first_losses": torch.stack(losses[:20]).tolist(),
    }  # fmt: skip


def operands_of(task: Task, way: str, device: torch.device) -> str:
    """Dtype of the gradients' operands by the call's plan."""
    sizes: dict[str, Any] = {"hidden_dtype": torch.float32, "weight_dtype": torch.float32, "device": device}
    tokens = task.windows * task.context
    call = plan(tokens, task.hidden, task.vocab, torch.bfloat16, **sizes, **options_of(way, device))
    return f"logits {'e4m3' if call.sizes.fp8_copy else 'bf16'}, gradients {'e4m3' if call.e4m3_gradients else 'bf16'}"


def run_seed(task: Task, seed: int, args: Any, watch: Watch) -> list[Row]:
    watch.stage("text" if not data_of.cache_info().currsize else f"seed {seed}")
    data, rows = data_of(task, args.device), list[Row]()
    for way in WAYS:
        watch.stage(f"{way}, seed {seed}")
        model, record = train(task, way, seed, data, watch)
        operands = {"operands": operands_of(task, way, args.device)}
        rows.append(describe(task, args) | {"provider": f"ours, {way}", "way": way, "seed": seed} | operands | record)
        if (way, seed) == (WAYS[0], SEEDS[0]):
            watch.stage("errors of the first run's head")
            operands_of_head = head_of(model, data, task, fp8_errors.TOKENS if args.gpu else 64)
            rows += fp8_errors.rows_of(fp8_errors.TRAINED, operands_of_head, args)
    return rows


def describe(task: Task, args: Any) -> Row:
    return command.describe(Shape(task.windows * task.context, task.hidden, task.vocab), args)


@torch.no_grad()
def head_of(model: demo_model.Decoder, data: Data, task: Task, tokens: int) -> Operands:
    """The model's head in bf16, with hidden states of text that it has not seen."""
    ids = data.held_out[: -(-tokens // task.context) * task.context + 1].unfold(0, task.context + 1, task.context)
    with torch.autocast(ids.device.type, torch.bfloat16):
        hidden = model(ids[:, :-1]).flatten(0, 1)[:tokens]
    weight, target = model.lm_head.weight.detach().bfloat16(), ids[:, 1:].flatten()[:tokens]
    return Operands(hidden.bfloat16().requires_grad_(), weight.requires_grad_(), target)


def compared(rows: Sequence[Row]) -> dict[str, Row]:
    """Compare each way's held-out losses of all seeds with bf16's; nothing where a run is missing.

    A way is inside where its mean lies between bf16's least and largest loss.
    """
    losses = {way: [row["held_out"] for row in rows if row["way"] == way and "held_out" in row] for way in WAYS}
    base = losses[BF16]
    if any(len(values) < len(SEEDS) for values in losses.values()):
        return {}
    return {
        way: {
            "held_out": values, "mean": fmean(values), "less_mean": fmean(values) - fmean(base),
            "less_same_seed": [value - bf16 for value, bf16 in zip(values, base, strict=True)],
            "spread": max(values) - min(values), "is_inside": min(base) <= fmean(values) <= max(base),
        }
        for way, values in losses.items()
    }  # fmt: skip


def table(rows: Sequence[Row]) -> Table:
    errors = [row for row in rows if "head" in row]
    if errors:
        command.make_console().print(fp8_errors.table(errors))
    lines = [
        [row["way"], str(row["seed"]), row["status"], number(row.get("held_out")), number(row.get("training")),
         number(row.get("seconds"), ".1f"), row.get("operands", "")]
        for row in rows if "head" not in row
    ]  # fmt: skip
    return command.table("training", ("way", "seed", "status", "held out", "training", "seconds", "operands"), lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status: 1 where a run failed."""
    parser = command.arguments("fp8_training", __doc__, dtype=False)
    parser.add_argument("--steps", type=command.count, help=f"of each run ({TASKS['cuda'].steps} on a GPU)")
    args = command.read(parser, sys.argv[1:] if argv is None else argv)
    args.dtype = torch.bfloat16
    task = TASKS[args.device.type]
    task = task._replace(steps=args.steps or task.steps)
    jobs = [
        (describe(task, args) | {"provider": "ours", "way": "all", "seed": seed},
         functools.partial(run_seed, task, seed, args))
        for seed in SEEDS
    ]  # fmt: skip

    def summary(rows: Sequence[Row]) -> Row:
        text = data_of(task, args.device)
        tokens = {"training_tokens": len(text.training), "held_out_tokens": len(text.held_out)}
        return {"task": task._asdict(), "text": text.description, **tokens, "compared": compared(rows)}

    return command.run("fp8_training", args, jobs, len(jobs) * len(WAYS) * POINTS, table, KEYS, more=summary)


if __name__ == "__main__":
    sys.exit(main())
