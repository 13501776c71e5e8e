"""Errors of the providers' losses and gradients against a reference: `python -m benchmarks.accuracy`."""

import argparse
import contextlib
import functools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from benchmarks import measure, providers
from benchmarks.head import Watch, brief, make_console, number, report_failures, report_skipped
from benchmarks.shapes import Operands, Shape, dtype_name, make_operands, parse_shape, parse_upstream

# What to draw for each kind of data: (operands, targets).
KINDS = {"random": ("random", "random"), "zipf": ("random", "zipf"), "peaked": ("peaked", "random")}
_GPU_SHAPE, _CPU_SHAPE = Shape(8192, 4096, 128256), Shape(512, 256, 8192)
_GPU_PROVIDERS = ("eager", "torch", *providers.PACKAGES, "ours", "ours:accumulate_dtype=float32")
_CPU_PROVIDERS = ("eager", "torch", "ours")
_ROWS = 2048
_QUANTITIES = ("loss", "d_hidden", "d_weight")


@dataclass
class Reference:
    """The loss and its gradients in a wider type than the operands', for an upstream gradient of one."""

    loss: float
    d_hidden: Tensor
    d_weight: Tensor


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Keep TF32 out of the reference's matrix products, whatever the process has set."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def reference_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """float32 for 16-bit operands on a GPU; float64 for wider ones, and on a CPU, where the shapes are small."""
    return torch.float32 if device.type == "cuda" and dtype.itemsize < 4 else torch.float64


@torch.no_grad()
def reference(operands: Operands, dtype: torch.dtype) -> Reference:
    """The mean cross-entropy and its gradients from upcast operands, a block of rows at a time."""
    tokens = operands.target.shape[0]
    weight = operands.weight.detach().to(dtype)
    d_hidden = torch.empty(operands.hidden.shape, dtype=dtype, device=weight.device)
    d_weight = torch.zeros_like(weight)
    loss = 0.0
    with full_float32():
        for start in range(0, tokens, _ROWS):
            rows = slice(start, start + _ROWS)
            hidden, target = operands.hidden.detach()[rows].to(dtype), operands.target[rows, None]
            log_probability = torch.log_softmax(hidden @ weight.T, dim=1)
            loss -= float(log_probability.gather(1, target).double().sum()) / tokens
            gradient = log_probability.exp_()
            gradient.scatter_add_(1, target, torch.full_like(target, -1, dtype=dtype)).div_(tokens)
            torch.mm(gradient, weight, out=d_hidden[rows])
            d_weight.addmm_(gradient.T, hidden)
            del log_probability, gradient  # before the next block's are made
    return Reference(loss, d_hidden, d_weight)


@torch.no_grad()
def relative_error(found: Tensor | None, wanted: Tensor, factor: float) -> float:
    """||found - factor * wanted|| / ||factor * wanted||, in blocks of rows, the sums of squares in float64."""
    if found is None:
        raise RuntimeError("the backward left a gradient unset")
    if found.shape != wanted.shape:
        raise RuntimeError(f"a gradient has shape {tuple(found.shape)} instead of {tuple(wanted.shape)}")
    # A 0-d tensor on the device, so that no block waits for the host.
    difference = torch.zeros((), dtype=torch.float64, device=wanted.device)
    total = torch.zeros_like(difference)
    for ours, theirs in zip(torch.split(found, 8 * _ROWS), torch.split(wanted, 8 * _ROWS), strict=True):
        difference += (ours.to(wanted.dtype) - factor * theirs).double().square().sum()
        total += (factor * theirs).double().square().sum()
    return float((difference / total).sqrt())


def errors(step: measure.Step, exact: Reference) -> dict[str, float]:
    """One step's relative errors of the loss and of both gradients."""
    step.operands.clear()
    loss = float(step())
    operands = step.operands
    found = {
        "loss": abs(loss - exact.loss) / abs(exact.loss),
        "d_hidden": relative_error(operands.hidden.grad, exact.d_hidden, step.upstream),
        "d_weight": relative_error(operands.weight.grad, exact.d_weight, step.upstream),
    }
    operands.clear()
    return found


def run_kind(
    kind: str, shape: Shape, dtype: torch.dtype, device: torch.device, args: argparse.Namespace, watch: Watch
) -> list[dict[str, Any]]:
    """Rows of errors for one shape and one kind of data."""
    data, targets = KINDS[kind]
    watch.stage(f"{shape} {kind}: reference")
    operands = make_operands(shape, dtype, device, data=data, targets=targets)
    wide = reference_dtype(dtype, device)
    exact = reference(operands, wide)
    measure.release(operands)
    ready, _ = providers.resolve(args.provider, device)
    rows: list[dict[str, Any]] = []
    for upstream in dict.fromkeys(args.upstream):
        eager: dict[str, float] = {}
        # Eager first, whatever the order asked for: the others are compared with it.
        for provider in sorted(ready, key=lambda one: one.name != "eager"):
            watch.stage(f"{shape} {kind}: {provider.label} upstream {upstream:g}")
            row: dict[str, Any] = {"shape": str(shape), "dtype": dtype_name(dtype), "reference": dtype_name(wide)}
            row |= {"data": kind, "upstream": upstream, "provider": provider.label, "status": "ok"}
            row["plan"] = providers.predict(provider, shape, dtype, device)
            step = measure.Step(provider.call, operands, upstream)
            found, failure = measure.attempt(functools.partial(errors, step, exact), operands)
            if failure:
                rows.append(row | failure.record())
            else:
                eager = found if provider.name == "eager" else eager
                ratios = {f"{key}_to_eager": found[key] / eager[key] for key in found if eager.get(key)}
                rows.append(row | {f"{key}_error": value for key, value in found.items()} | ratios)
            watch.tick()
    return rows


def table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """The errors, each with its ratio to eager's."""
    made = Table(title=title)
    made.add_column("data")
    made.add_column("provider", no_wrap=True)
    for name in ("upstream", "loss", "x eager", "dH", "x eager", "dW", "x eager"):
        made.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [row["data"], row["provider"], number(row.get("upstream"), "g")]
        if row["status"] != "ok":
            made.add_row(*cells, row["status"])
            continue
        for name in _QUANTITIES:
            cells += [number(row[f"{name}_error"], ".2e"), number(row.get(f"{name}_to_eager"), ".3f")]
        made.add_row(*cells)
    return made


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    check = providers.argument
    parser.add_argument(
        "--shape", action="append", type=check(parse_shape), help="repeatable: 8192x4096x128256, llama3-8b@4096, cpu"
    )
    parser.add_argument("--data", action="append", choices=tuple(KINDS), help="repeatable; all by default")
    parser.add_argument(
        "--upstream", nargs="+", type=check(parse_upstream), default=[1.0, 0.37], help="gradients from above (1 0.37)"
    )
    providers.common_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    args = parser.parse_args(argv)
    if 0.0 in args.upstream:
        parser.error("argument --upstream: an error relative to a gradient of zero is undefined")
    device = providers.read_device(parser, args.device)
    gpu = device.type == "cuda"
    dtype = args.dtype or (torch.bfloat16 if gpu else torch.float32)
    args.provider = args.provider or (_GPU_PROVIDERS if gpu else _CPU_PROVIDERS)
    shapes = list(dict.fromkeys(args.shape or [_GPU_SHAPE if gpu else _CPU_SHAPE]))
    kinds = list(dict.fromkeys(args.data or KINDS))
    path = providers.results_path(args.output, "accuracy", device)
    console, rows = make_console(), list[dict[str, Any]]()
    ready, skipped = providers.resolve(args.provider, device)
    report_skipped(console, skipped)
    if not ready:
        console.print("no provider can run here")
        return 1
    with Watch(len(shapes) * len(kinds) * len(ready) * len(set(args.upstream))) as watch:
        for shape in shapes:
            first = len(rows)
            for kind in kinds:
                run = functools.partial(run_kind, kind, shape, dtype, device, args, watch)
                found, failure = measure.attempt(run)
                measure.release()
                if failure:
                    found = [{"shape": str(shape), "data": kind, "provider": "reference", **failure.record()}]
                rows += found
                providers.write_results(path, "accuracy", argv, device, skipped=skipped, rows=rows)
            wide = dtype_name(reference_dtype(dtype, device))
            title = f"{shape} {dtype_name(dtype)}: relative errors against {wide}"
            console.print(table(rows[first:], title))
    status = report_failures(console, rows)
    keys = ("shape", "data", "upstream", "provider", "status", *(f"{name}_error" for name in _QUANTITIES))
    short = [brief({key: row[key] for key in keys if key in row}) for row in rows]
    print(json.dumps({"benchmark": "accuracy", "device": device.type, "rows": short, "skipped": skipped}))
    return status


if __name__ == "__main__":
    sys.exit(main())
