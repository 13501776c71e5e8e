"""Host time of a call and its backward, and how small calls compare with their matmuls: `python -m benchmarks.host`.

The host's time is measured apart from the device's: the device is idle when a call begins, and nothing is waited for
before the clock is read. Hosts differ by a factor of two: first stands what autograd takes for a function that does
nothing. Beside it stands the time of the same steps in a row, by the device's clock, and its ratio to
the bare matmuls. The last row gives 1,000 numbers of tokens that are new to the process, one after the other, as packed
batches do. On a CPU, where the host computes too, host time is all of the time.
"""

import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from benchmarks import command, shapes
from benchmarks.command import Row, Watch, number
from benchmarks.rounds import time_with_products
from benchmarks.shapes import Operands, Shape
from chunked_head import linear_cross_entropy, linear_logprobs, linear_loss, losses, metrics

SMALL = Shape(512, 2048, 128256)
SHAPES = (SMALL, Shape(8192, 768, 50304), Shape(8192, 1024, 151936))
TINY = (Shape(24, 16, 320),)
CALLS, NEW_LENGTHS = 60, 1000


def plain(operands: Operands, **options: Any) -> Tensor:
    return linear_cross_entropy(operands.hidden, operands.weight, operands.target, **options)


def measured(operands: Operands, batch: dict[str, Tensor], **options: Any) -> Tensor:
    """GRPO, with entropy and accuracy as metrics."""
    given = operands.hidden, operands.weight, operands.target, losses.grpo()
    return linear_loss(*given, batch=batch, metrics=[metrics.entropy(), metrics.accuracy()], **options).loss


def logprobs(operands: Operands, tokens: int) -> Tensor:
    with torch.no_grad():
        return linear_logprobs(operands.hidden[:tokens], operands.weight, operands.target[:tokens])


class Nothing(torch.autograd.Function):
    """Autograd function of two operands that computes nothing: it returns a number and gradients made before."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, found: Sequence[Tensor]) -> Tensor:
        number, *ctx.grads = found
        return number.view_as(number)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.grads, None


def nothing(operands: Operands) -> Callable[[], Any]:
    hidden, weight = operands.hidden, operands.weight
    found = hidden.new_zeros(()), torch.empty_like(hidden), torch.empty_like(weight)
    return lambda: Nothing.apply(hidden, weight, found).backward()


def host_time(step: Callable[[], Any], operands: Operands, device: torch.device, calls: int = CALLS) -> float:
    """Milliseconds between a call and the return of its backward, the median of many."""
    found = []
    for _ in range(calls):
        operands.clear()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        step()
        found.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(found)


def stepped(call: Callable[..., Tensor], operands: Operands, **options: Any) -> Callable[[], Any]:
    return lambda: call(operands, **options).backward()


def steps_of(shape: Shape, operands: Operands) -> dict[str, tuple[int, Callable[[], Any]]]:
    """Steps by name, each with the number of bare products that it is compared with."""
    quarter = max(1, -(-shape.tokens // 4))
    uniform = torch.full_like(operands.target, -11.0, dtype=torch.float32)
    batch = shapes.draw_fields(("old_logprobs", "advantages"), operands, uniform, 1)
    return {
        "plain": (3, stepped(plain, operands)),
        "entropy, accuracy, GRPO": (3, stepped(measured, operands, batch=batch)),
        "four chunks": (3, stepped(plain, operands, chunk_tokens=quarter)),
        "four chunks, entropy, accuracy, GRPO": (3, stepped(measured, operands, batch=batch, chunk_tokens=quarter)),
    }


def named(shape: Shape, row: str) -> dict[str, Any]:
    return {"shape": str(shape), "row": row, "provider": "ours", "status": "ok"}


def run_shape(shape: Shape, args: Any, watch: Watch) -> list[Row]:
    operands = shapes.make_operands(shape, args.dtype, args.device)
    steps = steps_of(shape, operands)
    for _, step in steps.values():
        for _ in range(3):
            step()
    watch.stage(f"{shape}: host time")
    rows = [
        named(shape, "autograd alone") | {"host_ms": host_time(nothing(operands), operands, args.device, args.calls)}
    ]
    rows += [
        named(shape, name) | {"host_ms": host_time(step, operands, args.device, args.calls)}
        for name, (_, step) in steps.items()
    ]
    watch.stage(f"{shape}: {args.rounds} rounds with the products")
    compared = time_with_products(
        {name: products for name, (products, _) in steps.items()}, {name: step for name, (_, step) in steps.items()},
        operands, args.device, args.rounds, watch.tick,
    )  # fmt: skip
    return [row | compared.get(row["row"], {}) for row in rows]


def run_logprobs(shape: Shape, args: Any, watch: Watch) -> list[Row]:
    """Measure log-probabilities of a few tokens beside one product of as many tokens."""
    rows = []
    for tokens in (1, 64, 256) if shape.tokens >= 256 else (1, 5):
        watch.stage(f"{shape}: log-probabilities of {tokens} tokens")
        operands = shapes.make_operands(Shape(tokens, shape.hidden, shape.vocab), args.dtype, args.device)
        step = functools.partial(logprobs, operands, tokens)
        for _ in range(3):
            step()
        row = named(shape, f"log-probabilities of {tokens}")
        row["host_ms"] = host_time(step, operands, args.device, args.calls)
        row |= time_with_products({"step": 1}, {"step": step}, operands, args.device, args.rounds, watch.tick)["step"]
        rows.append(row)
    return rows


def run_lengths(shape: Shape, args: Any, watch: Watch) -> list[Row]:
    """Host time of calls with new numbers of tokens, and how much longer they take than a known number."""
    watch.stage(f"{shape}: {args.lengths} new numbers of tokens")
    operands = shapes.make_operands(shape, args.dtype, args.device)
    most = shape.tokens
    lengths = torch.randperm(most, generator=torch.Generator().manual_seed(2))[: args.lengths].add(1).tolist()

    def step(tokens: int) -> None:
        linear_cross_entropy(operands.hidden[:tokens], operands.weight, operands.target[:tokens]).backward()

    for _ in range(3):
        step(lengths[0])
    known = host_time(functools.partial(step, lengths[0]), operands, args.device, args.calls)
    new = [host_time(functools.partial(step, tokens), operands, args.device, 1) for tokens in lengths[1:]]
    after = new[len(new) // 10 :]
    row = named(shape, f"{len(new)} new numbers of tokens")
    row |= {
        "host_ms": statistics.median(after), "known_ms": known, "above_ms": statistics.median(after) - known,
        "longest_ms": max(after),
    }  # fmt: skip
    return [row]


def _table(rows: Sequence[Row]) -> Table:
    lines = []
    for row in rows:
        more = f"{row['above_ms']:+.3f} over a known one, longest {row['longest_ms']:.2f}" if "above_ms" in row else ""
        cells = [number(row[key]) if key in row else "" for key in ("host_ms", "ms", "ratio")]
        lines.append([row["row"], *cells, more if row["status"] == "ok" else row["status"]])
    return command.table(
        rows[0]["shape"], ("call and backward", "host ms", "ms in a row", "to the products", ""), lines
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status: 1 where a shape failed."""
    parser = command.arguments("host", __doc__, shape=True, rounds=5)
    add = parser.add_argument
    add("--calls", type=command.count, default=CALLS, help=f"timed calls a row ({CALLS})")
    add("--lengths", type=command.count, default=NEW_LENGTHS, help=f"new numbers of tokens ({NEW_LENGTHS})")
    args = command.read(parser, sys.argv[1:] if argv is None else argv)
    sizes = command.sizes(args, SHAPES, *TINY)
    jobs = command.over(sizes, args, run_shape, row="all", provider="ours")
    for more in (run_logprobs, run_lengths):
        jobs += command.over(sizes[:1], args, more, row="all", provider="ours")
    return command.run(
        "host", args, jobs, len(jobs) * args.rounds, _table, ("shape", "row", "status", "host_ms", "ratio")
    )


if __name__ == "__main__":
    sys.exit(main())
