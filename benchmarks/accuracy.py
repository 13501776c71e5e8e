"""Errors of the providers' losses and gradients against a reference: `python -m benchmarks.accuracy`."""

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from benchmarks import command, measure, providers
from benchmarks.command import Row, Watch, number
from benchmarks.shapes import Operands, Shape, dtype_name, make_operands

# What to draw for each kind of data: (operands, targets).
KINDS = {"random": ("random", "random"), "zipf": ("random", "zipf"), "peaked": ("peaked", "random")}
_GPU_SHAPE, _CPU_SHAPE = Shape(8192, 4096, 128256), Shape(512, 256, 8192)
_GPU_PROVIDERS = ("eager", "torch", *providers.PACKAGES, "ours", "ours:accumulate_dtype=float32")
_CPU_PROVIDERS = ("eager", "torch", "ours")
_ROWS = 2048
_QUANTITIES = ("loss", "logprob", "d_hidden", "d_weight")


@dataclass
class Reference:
    """The loss and its gradients in a wider type than the operands', for an upstream gradient of one."""

    loss: float
    logprobs: Tensor
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
def reference(operands: Operands, dtype: torch.dtype, bonus: float = 0.0) -> Reference:
    """The mean of cross-entropy less ``bonus`` of the entropy, and its gradients, from upcast operands.

    A block of rows at a time.
    """
    tokens = operands.target.shape[0]
    weight = operands.weight.detach().to(dtype)
    d_hidden = torch.empty(operands.hidden.shape, dtype=dtype, device=weight.device)
    d_weight = torch.zeros_like(weight)
    loss, logprobs = 0.0, weight.new_empty(tokens)
    with full_float32():
        for start in range(0, tokens, _ROWS):
            rows = slice(start, start + _ROWS)
            hidden, target = operands.hidden.detach()[rows].to(dtype), operands.target[rows, None]
            log_probability = torch.log_softmax(hidden @ weight.T, dim=1)
            logprobs[rows] = log_probability.gather(1, target)[:, 0]
            loss -= float(logprobs[rows].double().sum()) / tokens
            gradient = log_probability.exp()
            if bonus:
                entropy = -(gradient * log_probability).sum(1, keepdim=True)
                loss -= bonus * float(entropy.double().sum()) / tokens
                gradient *= log_probability.add_(entropy).mul_(bonus).add_(1.0)
            gradient.scatter_add_(1, target, torch.full_like(target, -1, dtype=dtype)).div_(tokens)
            torch.mm(gradient, weight, out=d_hidden[rows])
            d_weight.addmm_(gradient.T, hidden)
            del log_probability, gradient  # before the next block's are made
    return Reference(loss, logprobs, d_hidden, d_weight)


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


def errors(step: measure.Step, exact: Reference, read: providers.Late | None = None) -> dict[str, float]:
    """One step's relative errors of the loss and of both gradients; of log-probabilities the error in nats.

    The latter is the root of the mean square over tokens, or the error of their mean where only that is known.
    """
    step.operands.clear()
    operands, loss = step.operands, float(step())
    nats = abs(loss - exact.loss)
    if read is not None:
        with torch.no_grad():
            found_logprobs = read(operands.hidden, operands.weight, operands.target)[0]
        nats = float((found_logprobs.double() - exact.logprobs.double()).square().mean().sqrt())
    found = {
        "loss": abs(loss - exact.loss) / abs(exact.loss), "logprob": nats,
        "d_hidden": relative_error(operands.hidden.grad, exact.d_hidden, step.upstream),
        "d_weight": relative_error(operands.weight.grad, exact.d_weight, step.upstream),
    }  # fmt: skip
    operands.clear()
    return found


def run_kind(kind: str, shape: Shape, args: Any, watch: Watch) -> list[Row]:
    """Rows of errors for one shape and one kind of data."""
    data, targets = KINDS[kind]
    watch.stage(f"{shape} {kind}: reference")
    operands = make_operands(shape, args.dtype, args.device, data=data, targets=targets)
    wide = reference_dtype(args.dtype, args.device)
    ready, _ = providers.resolve(args.provider, args.device)
    bonuses = {provider.label: providers.BONUS if provider.read else 0.0 for provider in ready}
    exact = {bonus: reference(operands, wide, bonus) for bonus in set(bonuses.values())}
    measure.release(operands)
    rows: list[Row] = []
    for upstream in args.upstream:
        eager: dict[str, float] = {}
        # Eager first, whatever the order asked for: all are compared with it.
        for provider in sorted(ready, key=lambda one: not one.name.endswith("eager")):
            watch.stage(f"{shape} {kind}: {provider.label} upstream {upstream:g}")
            row: Row = {"shape": str(shape), "dtype": dtype_name(args.dtype), "reference": dtype_name(wide)}
            row |= {"data": kind, "upstream": upstream, "provider": provider.label, "status": "ok"}
            step = measure.Step(provider.call, operands, upstream)
            measured = functools.partial(errors, step, exact[bonuses[provider.label]], provider.read)
            found, failure = measure.attempt(measured, operands)
            if failure:
                rows.append(row | failure.record())
            else:
                eager = found if provider.name.endswith("eager") else eager
                ratios = {f"{key}_to_eager": found[key] / eager[key] for key in found if eager.get(key)}
                rows.append(row | {f"{key}_error": value for key, value in found.items()} | ratios)
            watch.tick()
    return rows


def _table(rows: Sequence[Row]) -> Table:
    """The errors, each with its ratio to eager's."""
    lines = []
    for row in rows:
        cells = [row["data"], row["provider"], number(row.get("upstream"), "g")]
        if row["status"] != "ok":
            lines.append([*cells, row["status"]])
            continue
        for name in _QUANTITIES:
            cells += [number(row[f"{name}_error"], ".2e"), number(row.get(f"{name}_to_eager"), ".3f")]
        lines.append(cells)
    columns = ["data", "provider", "upstream"]
    columns += [cell for name in ("loss", "log-prob", "dH", "dW") for cell in (name, "x eager")]
    title = (
        f"{rows[0]['shape']} {rows[0]['dtype']}: relative errors against {rows[0].get('reference', 'the reference')}"
    )
    return command.table(title, columns, lines, left=["provider"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = command.arguments("accuracy", __doc__, shape=True, upstream=[1.0, 0.37], peers=True)
    parser.add_argument("--data", action="append", choices=tuple(KINDS), help="repeatable; all by default")
    args = command.read(parser, sys.argv[1:] if argv is None else argv)
    if 0.0 in args.upstream:
        parser.error("argument --upstream: an error relative to a gradient of zero is undefined")
    args.provider = args.provider or (_GPU_PROVIDERS if args.gpu else _CPU_PROVIDERS)
    ready, skipped = providers.resolve(args.provider, args.device)
    if not ready:
        return command.nothing_runs(skipped)
    jobs = [({"shape": str(shape), "dtype": dtype_name(args.dtype), "data": kind, "provider": "reference"},
             functools.partial(run_kind, kind, shape, args))
            for shape in command.sizes(args, (_GPU_SHAPE,), _CPU_SHAPE)
            for kind in dict.fromkeys(args.data or KINDS)]  # fmt: skip
    keys = ("shape", "data", "upstream", "provider", "status", *(f"{name}_error" for name in _QUANTITIES))
    total = len(jobs) * len(ready) * len(args.upstream)
    return command.run("accuracy", args, jobs, total, _table, keys, skipped=skipped)


if __name__ == "__main__":
    sys.exit(main())
