"""Our calls with the options that change a step's time, beside bare matrix products: `python -m benchmarks.speed`.

The floors are one product of logits (nothing but the loss is asked for), three products (loss and gradients), and three
and the addition of dW to an fp32 buffer (what a framework does without `accumulate_into`). All take turns in one run.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich.table import Table

from benchmarks import measure, providers, shapes, speed_rows
from benchmarks.head import WARM_UP, Watch, brief, make_console, mebibytes, number, report_failures, report_skipped
from benchmarks.shapes import Shape
from benchmarks.speed_rows import FLOORS, ROWS, SUMMED, THREE, Bench

HOST_CALLS = 10


Asked = dict[str, tuple[dict[str, Any], Callable[[], measure.Step]]]


def run_shape(
    shape: Shape, args: argparse.Namespace, ready: Sequence[providers.Provider], watch: Watch
) -> list[dict[str, Any]]:
    """Measure every row at one shape: a record for each floor, and for each row or peer and upstream."""
    bench = Bench(shapes.make_operands(shape, args.dtype, args.device, targets=args.targets))
    measure.release(bench.operands)
    asked, steps, rows = _asked(bench, shape, args, ready), dict[str, measure.Step](), dict[str, dict[str, Any]]()
    for key, (record, make) in asked.items():
        watch.stage(f"{shape}: warm-up of {key}")
        rows[key] = {**_describe(shape, args), **record, "status": "ok"}
        made, failure = measure.attempt(functools.partial(_ready, make), bench.operands)
        rows[key] |= failure.record() if failure else {"loss": made[1]}
        if failure is None:
            steps[key] = made[0]
    watch.stage(f"{shape}: {args.rounds} rounds")
    found = _time(bench, [record["below"] for record, _ in asked.values()], steps, args, watch)
    floors = [key for key in found if key in FLOORS]
    rows = {key: {**_describe(shape, args), "row": key, "provider": f"floor, {key}"} for key in floors} | rows
    for key, timed in found.items():
        rows[key] |= timed
    _divide(rows)
    for key, step in steps.items():
        if rows[key]["status"] == "ok":
            watch.stage(f"{shape}: what else is asked of {key}")
            rows[key] |= _examine(rows[key], shape, step, args)
    return list(rows.values())


def _asked(bench: Bench, shape: Shape, args: argparse.Namespace, ready: Sequence[providers.Provider]) -> Asked:
    """What is known of each row before it runs, and what makes its step."""
    asked: Asked = {}
    for name in speed_rows.chosen(args.rows, shape, args.small):
        row, plan = ROWS[name], speed_rows.predict(name, shape, args.dtype, args.device)
        for upstream in args.upstream if row.backward else args.upstream[:1]:
            record = {"row": name, "provider": f"ours, {name}", "upstream": upstream, "below": row.below}
            record |= {"must": speed_rows.must_of(name, shape), "plan": plan}
            asked[_key(name, upstream)] = record, functools.partial(bench.step, name, upstream)
    for peer in ready:
        for upstream in args.upstream:
            record = {"row": peer.label, "provider": peer.label, "upstream": upstream, "below": THREE, "must": None}
            step = functools.partial(measure.Step, peer.call, bench.operands, upstream)
            asked[_key(peer.label, upstream)] = record, step
    return asked


def _key(name: str, upstream: float) -> str:
    return f"{name} upstream {upstream:g}"


def _describe(shape: Shape, args: argparse.Namespace) -> dict[str, Any]:
    sizes = {"shape": str(shape), "tokens": shape.tokens, "hidden": shape.hidden, "vocab": shape.vocab}
    return {**sizes, "dtype": shapes.dtype_name(args.dtype), "targets": args.targets}


def _ready(make: Callable[[], measure.Step]) -> tuple[measure.Step, float]:
    """A step that has run, and its loss (the mean where it gives log-probabilities)."""
    step = make()
    for _ in range(WARM_UP):
        step.operands.clear()
        loss = float(step().mean())
    gradient = step.operands.hidden.grad
    # nan is what a call makes of a promise that was not kept, such as another upstream gradient
    if step.backward and not (gradient is not None and bool(gradient.isfinite().all())):
        raise ArithmeticError("the gradient of the hidden states is not finite, or not there")
    step.operands.clear()
    return step, loss


def _time(
    bench: Bench, below: Sequence[str], steps: Mapping[str, measure.Step], args: argparse.Namespace, watch: Watch
) -> dict[str, dict[str, Any]]:
    """The times of floors and steps in turns, or their failures; the floors' buffers go when this returns."""
    needed = [name for name in FLOORS if name in below or (name == THREE and SUMMED in below)]
    floors, failure = measure.attempt(lambda: bench.floors(needed, args.device), bench.operands)
    found = {name: failure.record() for name in needed} if failure else {}
    timed: dict[str, Callable[[], Any]] = {**(floors or {}), **steps}
    times, failures = measure.time_rounds(timed, bench.operands, args.device, args.rounds, watch.tick)
    for key in timed:  # the floors first
        if key in failures:
            found[key] = failures[key].record()
            continue
        values = times[key]
        middle, low, high = (measure.quantile(values, fraction) for fraction in (0.5, 0.2, 0.8))
        found[key] = {"status": "ok", "ms": middle, "ms_p20": low, "ms_p80": high}
        found[key]["ms_rounds"] = [round(value, 4) for value in values]
    return found


def _divide(rows: Mapping[str, dict[str, Any]]) -> None:
    """Add to each row the ratio to what it is divided by, and those to all floors."""
    for row in rows.values():
        if row["status"] != "ok" or "below" not in row:
            continue
        row["ratios"] = {key: row["ms"] / rows[key]["ms"] for key in FLOORS if "ms" in rows.get(key, {})}
        below = rows.get(row["below"]) or rows.get(_key(row["below"], row["upstream"]), {})
        if "ms" in below:
            row["ratio"] = row["ms"] / below["ms"]


def _examine(row: dict[str, Any], shape: Shape, step: measure.Step, args: argparse.Namespace) -> dict[str, Any]:
    """Peak memory and, where they are asked for, the host's time and the launches."""
    found, name, ours = dict[str, Any](), row["row"], row["row"] in ROWS
    if not args.no_memory:
        asked = speed_rows.Request(
            row["provider"], shape, row["dtype"], row["upstream"], targets=args.targets, row=name if ours else ""
        )
        peak, failure = measure.peak(step, asked)
        if peak is None:
            assert failure is not None
            found["memory_error"] = failure.record()
        else:
            gradients = speed_rows.gradient_bytes(name, shape, args.dtype)
            found |= {**peak, "beside_gradients_bytes": peak["peak_bytes"] - gradients}
    if args.small:
        host, failure = measure.attempt(functools.partial(host_ms, step, args.device), step.operands)
        found |= {"host_error": failure.record()} if failure else {"host_ms": host}
    if args.profile:
        step.operands.clear()
        launched, failure = measure.attempt(functools.partial(measure.launches, step, args.device), step.operands)
        found |= {"launches_error": failure.record()} if failure else {"launches": len(launched)}
        step.operands.clear()
    return found


def host_ms(step: measure.Step, device: torch.device) -> float:
    """Milliseconds that a step keeps the host, a mean over calls that wait for no GPU; on a CPU the whole step."""
    # The memory measurement gave all blocks back; that the allocator has to ask the driver again is no call's time.
    for _ in range(WARM_UP):
        step.operands.clear()
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(HOST_CALLS):
        step.operands.clear()
        step()
    milliseconds = (time.perf_counter() - begin) * 1e3 / HOST_CALLS
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    step.operands.clear()
    return milliseconds


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    first = rows[0]
    table = Table(title=f"{first['shape']} {first['dtype']}, targets {first['targets']} (* over what it must be)")
    columns = ["upstream", "ms", "ratio", "to", "must", "to three", "p20-p80", "peak MiB", "beside grads", "plan's"]
    further = [name for name in ("host_ms", "launches") if any({name, _error(name)} & row.keys() for row in rows)]
    for column in ("row", *columns, *(name.replace("_", " ") for name in further), "loss"):
        table.add_column(column, no_wrap=True, justify="left" if column in ("row", "to") else "right")
    for row in rows:
        if row["status"] != "ok":
            table.add_row(row["row"], number(row.get("upstream"), "g"), row["status"])
            continue
        over = row.get("must") is not None and row.get("ratio", 0.0) > row["must"]
        table.add_row(
            row["row"], number(row.get("upstream"), "g"), number(row["ms"]),
            number(row.get("ratio")) + " *" * over, row.get("below", "-"), number(row.get("must"), ".2f"),
            number(row.get("ratios", {}).get(THREE)), f"{number(row['ms_p20'])}-{number(row['ms_p80'])}",
            row.get("memory_error", {}).get("status") or mebibytes(row.get("peak_bytes")),
            mebibytes(row.get("beside_gradients_bytes")), mebibytes((row.get("plan") or {}).get("peak_bytes")),
            *(_further(row, name) for name in further),
            number(row.get("loss"), ".5f"),
        )  # fmt: skip
    return table


def _error(name: str) -> str:
    return name.split("_")[0] + "_error"


def _further(row: dict[str, Any], name: str) -> str:
    if _error(name) in row:
        return str(row[_error(name)]["status"])
    return number(row.get(name), ".2f" if name == "host_ms" else ",d")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__.splitlines()[0])
    known, add = providers.argument, parser.add_argument
    add("--shape", action="append", type=known(shapes.parse_shape), help="repeatable: 8192x4096x128256, llama3-8b, cpu")
    add("--rows", nargs="+", choices=ROWS, metavar="ROW", help=f"some of {', '.join(ROWS)} (those that fit the shape)")
    add("--rounds", type=known(shapes.parse_count), default=20, help="timed rounds (20)")
    add("--upstream", nargs="+", type=known(shapes.parse_upstream), default=[1.0], help="gradients from above")
    add("--targets", choices=shapes.TARGETS, default="random")
    add("--peers", action="store_true", help=f"also {', '.join(speed_rows.PEERS)}")
    counts = ", ".join(map(str, speed_rows.SMALL_TOKENS))
    add("--small", action="store_true", help=f"{counts} tokens of each shape's head, and the host's time of a call")
    add("--profile", action="store_true", help="count launches; a profiler that has run may slow the shapes after it")
    add("--no-memory", action="store_true", help="measure the time alone")
    providers.common_arguments(parser, peers=False)
    return parser


def _shapes(args: argparse.Namespace) -> list[Shape]:
    defaults = speed_rows.SHAPES[: 1 if args.small else None] if args.device.type == "cuda" else ()
    sizes: Sequence[Shape] = args.shape or defaults or (Shape(*shapes.CPU_SHAPE),)
    if args.small:
        sizes = [Shape(count, size.hidden, size.vocab) for size in sizes for count in speed_rows.SMALL_TOKENS]
    return list(dict.fromkeys(sizes))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status: 1 where a row of ours failed."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    args = parser.parse_args(argv)
    args.device = providers.read_device(parser, args.device)
    args.dtype = args.dtype or (torch.bfloat16 if args.device.type == "cuda" else torch.float32)
    args.upstream = list(dict.fromkeys(args.upstream))
    if 0.0 in args.upstream:
        parser.error("argument --upstream: 0 can be promised to no accumulate_into, name another number")
    peers, sizes = speed_rows.PEERS if args.peers else (), _shapes(args)
    path = providers.results_path(args.output, "speed-small" if args.small else "speed", args.device)
    console, rows = make_console(), list[dict[str, Any]]()
    _, skipped = providers.resolve(peers, args.device)
    report_skipped(console, skipped)
    with Watch(len(sizes) * args.rounds) as watch:
        for shape in sizes:
            # Anew for each shape, and before our calls are warm: compiled code is for one shape, see providers.
            ready, _ = providers.resolve(peers, args.device)
            found, failure = measure.attempt(functools.partial(run_shape, shape, args, ready, watch))
            measure.release()
            if failure:
                found = [{**_describe(shape, args), "row": "all", "provider": "ours", **failure.record()}]
            rows += found
            console.print(_table(found))
            # After each shape, so that a run that is cut short leaves what it has.
            providers.write_results(path, "speed", argv, args.device, skipped=skipped, rows=rows)
    status = report_failures(console, rows)
    keys = ("shape", "row", "upstream", "status", "ms", "ratio", "below", "must", "peak_bytes", "host_ms", "launches")
    short = [brief({key: row[key] for key in keys if key in row}) for row in rows]
    print(json.dumps({"benchmark": "speed", "device": args.device.type, "rows": short, "skipped": skipped}))
    return status


if __name__ == "__main__":
    sys.exit(main())
