"""Steps of which a number changes: `python -m benchmarks numbers`.

For each number of a loss or of a head the median time of a step (a call and its backward, waited for) where the number
is the same at every step, and where it is another at each; and what was compiled and traced after the third of those.
"""

import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from chunked_head.kernels.common.launcher import Launcher
from rich.table import Table
from torch import Tensor

from benchmarks import command, measure, shapes
from benchmarks.command import Row, Watch, number
from benchmarks.shapes import Operands, Shape
from chunked_head import linear_cross_entropy, linear_loss, losses
from chunked_head.arithmetic import vectors
from chunked_head.losses import Losses

SHAPE, TINY = Shape(512, 512, 32000), Shape(24, 16, 320)
CALLS, WARM_UP, SEGMENTS = 60, 3, 8
FIELDS = ("old_logprobs", "ref_logprobs", "advantages", "segments", "pairs")
Call = Callable[[float], Tensor]


def calls_of(operands: Operands) -> dict[str, Call]:
    """Functions of a number from 0.2 to 0.5, by its name: the loss with that value."""
    given = operands.hidden, operands.weight, operands.target
    uniform = torch.full_like(operands.target, -10.0, dtype=torch.float32)
    fields = shapes.draw_fields(FIELDS, operands, uniform, SEGMENTS)

    def plain(**options: Any) -> Tensor:
        return linear_cross_entropy(*given, **options)

    def mixed(loss: Losses, *names: str, **options: Any) -> Tensor:
        batch = {name: fields[name] for name in names}
        segments = SEGMENTS if "segments" in names else None
        return linear_loss(*given, loss, batch=batch, num_segments=segments, **options).loss

    policy, pairs = ("old_logprobs", "advantages"), ("ref_logprobs", "segments", "pairs")
    one = losses.cross_entropy
    return {
        "none": lambda x: plain(),
        "label_smoothing": lambda x: plain(label_smoothing=x),
        "z_loss": lambda x: plain(z_loss=x),
        "normalizer": lambda x: plain(normalizer=1000 * x),
        "logit_scale": lambda x: plain(logit_scale=x),
        "softcap": lambda x: plain(softcap=100 * x),
        "upstream": lambda x: plain(upstream=x) * x,
        "clip_low": lambda x: mixed(losses.grpo(clip_low=x), *policy),
        "clip_high": lambda x: mixed(losses.grpo(clip_high=x), *policy),
        "gamma": lambda x: mixed(losses.focal(gamma=10 * x)),
        "coefficient": lambda x: mixed(one() + x * losses.entropy()),
        "temperature": lambda x: mixed(one(), temperature=2 * x),
        "a summand's temperature": lambda x: mixed(one() + losses.entropy(temperature=2 * x)),
        "beta of dpo": lambda x: mixed(losses.dpo(beta=x), *pairs),
    }


@contextlib.contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """A function that counts kernels compiled, and functions of losses traced, so far."""
    of_kernels = mock.patch.object(Launcher, "keep", autospec=True, side_effect=Launcher.keep)
    of_traces = mock.patch.object(vectors, "trace", side_effect=vectors.trace)
    with of_kernels as kernels, of_traces as traces:
        yield lambda: kernels.call_count + traces.call_count


def step_ms(call: Call, value: float, operands: Operands, device: torch.device) -> float:
    operands.clear()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    call(value).backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) * 1e3


def run_shape(shape: Shape, args: Any, watch: Watch) -> list[Row]:
    """A row for each number; one that fails does not end the run."""
    operands, rows = shapes.make_operands(shape, args.dtype, args.device), list[Row]()
    for name, call in calls_of(operands).items():
        watch.stage(f"{shape}: {name}")
        found, failure = measure.attempt(functools.partial(run, call, operands, args), operands)
        row = {"shape": str(shape), "row": name, "provider": "ours", "status": "ok"}
        rows.append(row | (failure.record() if failure else found))
        watch.tick()
    return rows


def run(call: Call, operands: Operands, args: Any) -> Row:
    """Median times of steps with one number and with ever new ones, and what those compiled."""
    times, steps = functools.partial(step_ms, call, operands=operands, device=args.device), args.calls + WARM_UP
    with counted() as count:
        changing = [times(0.2 + 0.3 * i / steps) for i in range(WARM_UP)]
        before = count()
        changing = [times(0.2 + 0.3 * i / steps) for i in range(WARM_UP, steps)]
        compiled = count() - before
    constant = [times(0.25) for _ in range(steps + WARM_UP)][2 * WARM_UP :]
    medians = {"constant_ms": statistics.median(constant), "changing_ms": statistics.median(changing)}
    return medians | {"longest_ms": max(changing), "compiled": compiled}


def _table(rows: Sequence[Row]) -> Table:
    lines = []
    for row in rows:
        cells = [number(row.get(key)) for key in ("constant_ms", "changing_ms", "longest_ms")]
        lines.append([row["row"], *cells, str(row.get("compiled", row["status"]))])
    columns = ("a number", "ms constant", "ms changing", "longest", "compiled")
    return command.table(rows[0]["shape"], columns, lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status: 1 where a row failed."""
    parser = command.arguments("numbers", __doc__, shape=True)
    parser.add_argument("--calls", type=command.count, default=CALLS, help=f"steps ({CALLS})")
    args = command.read(parser, sys.argv[1:] if argv is None else argv)
    sizes = command.sizes(args, (SHAPE,), TINY)
    jobs = command.over(sizes, args, run_shape, row="all", provider="ours")
    total = len(sizes) * len(calls_of(shapes.make_operands(TINY, args.dtype, args.device)))
    return command.run("numbers", args, jobs, total, _table, ("row", "constant_ms", "changing_ms", "compiled"))


if __name__ == "__main__":
    sys.exit(main())
