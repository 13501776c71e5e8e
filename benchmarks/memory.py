"""Peak memory of a GPU against the number of tokens, and the plan's prediction: `python -m benchmarks.memory`.

All figures are peaks over the inputs (hidden states, weight and targets), the gradients included.
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from rich.table import Table

from benchmarks import command, measure, providers
from benchmarks.command import Row, Watch, mebibytes, number
from benchmarks.shapes import Shape, dtype_name, make_operands, parse_head

_MODELS = ("llama3-8b", "qwen3-8b", "gpt-oss", "gemma2-2b")
_TOKENS = tuple(1024 * 2**power for power in range(7))
# Not torch.compile: it compiles for a minute or more in all, and peaks where eager does or a little lower.
_PROVIDERS = ("eager", "torch", *providers.PACKAGES, "ours")


def run_model(model: tuple[str, int, int], args: Any, watch: Watch) -> list[Row]:
    """Rows for one model: every provider at every number of tokens, until it runs out of memory."""
    name, hidden, vocab = model
    rows, exhausted, device = list[Row](), set[str](), args.device
    for tokens in args.tokens:
        shape = Shape(tokens, hidden, vocab)
        for provider in providers.build_again(args.provider, device):
            watch.tick()
            if provider.label in exhausted:
                continue
            watch.stage(f"{name} {shape}: {provider.label}")
            row = {"model": name, "shape": str(shape), "tokens": tokens, "hidden": hidden, "vocab": vocab}
            row |= {"dtype": dtype_name(args.dtype), "provider": provider.label, "status": "ok"}
            row["plan"] = providers.predict(provider, shape, args.dtype, device)
            peak, failure = peak_of(provider, shape, args.dtype, device)
            row |= failure.record() if failure else peak
            if row["status"] == measure.OUT_OF_MEMORY:
                exhausted.add(provider.label)
            row |= compare(row)
            rows.append(row)
    return rows


def peak_of(
    provider: providers.Provider, shape: Shape, dtype: torch.dtype, device: torch.device
) -> tuple[Any, measure.Failure | None]:
    """Peak bytes of one step after a warm-up, or why there are none."""

    def run() -> dict[str, int]:
        step = measure.Step(provider.call, make_operands(shape, dtype, device))
        for _ in range(command.WARM_UP):
            step.operands.clear()
            step()
        return measure.gpu_peak(step, step.operands)

    return measure.attempt(run)


def compare(row: dict[str, Any]) -> dict[str, float]:
    """The measured peak minus the predicted one, where there are both."""
    predicted = (row["plan"] or {}).get("peak_bytes")
    if not predicted or "peak_bytes" not in row:
        return {}
    difference = row["peak_bytes"] - predicted
    return {"difference_bytes": difference, "difference_percent": 100.0 * difference / predicted}


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Measured and predicted peaks."""
    lines = []
    for row in rows:
        peak = mebibytes(row["peak_bytes"]) if row["status"] == "ok" else row["status"]
        lines.append([
            row["model"], f"{row.get('vocab')}x{row.get('hidden')}", str(row.get("tokens")), row["provider"],
            peak, mebibytes((row.get("plan") or {}).get("peak_bytes")),
            mebibytes(row.get("difference_bytes")), number(row.get("difference_percent"), "+.2f"),
        ])  # fmt: skip
    title = "peak MiB over the inputs, gradients included"
    columns = ("model", "vocab x hidden", "tokens", "provider", "peak MiB", "plan's peak", "difference MiB", "%")
    return command.table(title, columns, lines, left=["vocab x hidden", "provider"])


def largest_difference(rows: Sequence[dict[str, Any]]) -> dict[str, float] | None:
    """The plan's largest relative and largest absolute difference from a measurement."""
    compared = [row for row in rows if "difference_bytes" in row]
    worst = {
        key: max((row[f"difference_{key}"] for row in compared), key=abs, default=0.0) for key in ("percent", "bytes")
    }
    return worst if compared else None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = command.arguments("memory", __doc__, peers=True)
    add = parser.add_argument
    words = "repeatable: llama3-8b, another name, or HIDDENxVOCAB"
    add("--model", action="append", type=command.argument(parse_head), help=words)
    add("--tokens", nargs="+", type=command.count, help="the numbers of tokens to try")
    args = command.read(parser, sys.argv[1:] if argv is None else argv)
    if not args.gpu:
        parser.error("argument --device: memory is measured on a GPU")
    args.tokens, args.provider = sorted(set(args.tokens or _TOKENS)), args.provider or _PROVIDERS
    args.model = list(dict.fromkeys(args.model or map(parse_head, _MODELS)))
    ready, skipped = providers.resolve(args.provider, args.device)
    if not ready:
        return command.nothing_runs(skipped)
    args.provider = [provider.label for provider in ready]
    jobs = [
        ({"model": model[0], "provider": "ours"}, functools.partial(run_model, model, args)) for model in args.model
    ]
    return command.run(
        "memory", args, jobs, len(args.model) * len(args.tokens) * len(ready), table,
        ("model", "tokens", "provider", "status", "peak_bytes", "difference_bytes"),
        skipped=skipped, more=lambda rows: {"largest_difference": largest_difference(rows)},
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
