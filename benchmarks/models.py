"""A transformers model's training step plain, patched, and by Liger's patch: `python -m benchmarks.models`.

By default a Llama-3.2-1B-shaped model of random weights (on a CPU a tiny one): forward and backward of a batch of one
sequence, with gradient checkpointing, the three taking turns on the same model. Peak memory is that of a step with the
parameters and their gradients. `--longest 80` also looks for the longest sequence that each can train within 80 GiB.
"""

import contextlib
import functools
import importlib.util
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from benchmarks import command, measure
from benchmarks.command import Row, Watch, mebibytes, number
from benchmarks.rounds import records
from chunked_head import patch_model, unpatch_model

# https://huggingface.co/meta-llama/Llama-3.2-1B, config.json
LLAMA_1B = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
    "max_position_embeddings": 1 << 20, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip
TINY = LLAMA_1B | {"vocab_size": 32000, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}  # fmt: skip
PLAIN, OURS, LIGER = "plain", "ours", "liger"
GIB = 2**30
# of the length that two peaks foretell, in turn until one fits: an allocator does not fill its limit
TRIED = (0.98, 0.94, 0.9, 0.85)
# a foretold length that is so many times as long as any seen is not believed: what peaks first is another part then
BELIEVED = 4


@dataclass
class ModelStep:
    """Forward and backward of one sequence, by one of the three ways to a loss."""

    model: Any
    inputs: dict[str, Tensor]
    way: str

    def __call__(self) -> Tensor:
        with patched(self.model, self.way):
            loss = self.model(**self.inputs, use_cache=False).loss
            loss.backward()
        return loss.detach()

    def clear(self) -> None:
        """Lets go of the gradients."""
        self.model.zero_grad(set_to_none=True)


@contextlib.contextmanager
def patched(model: Any, way: str) -> Any:
    """Patch the model for a way within a ``with`` block; patches come and go in microseconds."""
    if way == OURS:
        patch_model(model, logits=None)
    if way == LIGER:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        # only its head, which is what is compared; on this instance
        apply_liger_kernel_to_llama(
            rope=False, swiglu=False, rms_norm=False, cross_entropy=False, fused_linear_cross_entropy=True, model=model
        )
    try:
        yield
    finally:
        unpatch_model(model)
        model.__dict__.pop("forward", None)  # Liger's


def build(sizes: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """Random weights, gradient checkpointing on."""
    import transformers

    torch.manual_seed(0)
    with torch.device(device):
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    model.to(dtype).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def inputs_of(model: Any, length: int) -> dict[str, Tensor]:
    """Random ids, each its own label."""
    ids = torch.randint(0, model.config.vocab_size, (1, length), device=model.device)
    return {"input_ids": ids, "labels": ids}


def ways(device: torch.device) -> tuple[str, ...]:
    if device.type != "cuda":
        return PLAIN, OURS
    return (PLAIN, OURS, LIGER) if importlib.util.find_spec("liger_kernel") else (PLAIN, OURS)


def run(model: Any, length: int, names: Sequence[str], rounds: int, watch: Watch) -> list[Row]:
    """A row for each way: time, peak memory, loss."""
    device, inputs = model.device, inputs_of(model, length)
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, ModelStep] = {}
    first = ModelStep(model, inputs, PLAIN)
    for name in names:
        watch.stage(f"{length} tokens: warm-up of {name}")
        step = ModelStep(model, inputs, name)
        rows[name] = {"provider": name, "tokens": length, "status": "ok"}
        loss, failure = measure.attempt(step, step)
        rows[name] |= failure.record() if failure else {"loss": float(loss)}
        step.clear()
        if failure is None:
            steps[name] = step
    watch.stage(f"{length} tokens: {rounds} rounds")
    for name, found in records(steps, first, device, rounds, watch.tick, watch.stage).items():
        rows[name] |= found
        if device.type == "cuda" and "ms" in found:
            rows[name] |= gpu_peak(steps[name])
    return list(rows.values())


def gpu_peak(step: ModelStep) -> dict[str, int]:
    """Peak bytes of a step with everything, parameters and gradients included."""
    measure.release(step)
    before = torch.cuda.memory_allocated()
    return {"peak_bytes": before + measure.gpu_peak(step, step)["peak_bytes"]}


def longest(model: Any, name: str, limit: int, fractions: Sequence[float], watch: Watch) -> Row:
    """Find the longest sequence within ``limit`` bytes.

    Two peaks foretell it; their lengths double until it is near. Then ``fractions`` of it are tried in turn, under a
    cap of the allocator.
    """
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    foretold, peaks = math.inf, dict[int, int]()
    length = 8192
    while length < foretold / BELIEVED * 2:
        watch.stage(f"longest of {name}: {length}")
        peaks[length] = gpu_peak(ModelStep(model, inputs_of(model, length), name))["peak_bytes"]
        if length > 8192:
            per_token = (peaks[length] - peaks[length // 2]) / (length // 2)
            foretold = length + (limit - peaks[length]) / per_token
        length *= 2
    row: Row = {"provider": name, "status": "ok", "bytes_a_token": per_token, "foretold": int(foretold)}
    row["peaks"] = peaks
    for fraction in fractions:
        length = int(foretold * fraction) // 256 * 256
        watch.stage(f"longest of {name}: {length}")
        step = ModelStep(model, inputs_of(model, length), name)
        _, failure = measure.attempt(step, step)
        step.clear()
        measure.release()
        if failure is None:
            row["fits"] = length
            break
        row["does_not_fit"] = length
        if failure.status != measure.OUT_OF_MEMORY:
            return row | failure.record()
    torch.cuda.set_per_process_memory_fraction(1.0)
    return row


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = command.arguments("models", __doc__, rounds=5)
    add = parser.add_argument
    add("--tokens", type=command.count, help="length of the sequence (8192; 512 on a CPU)")
    add("--longest", type=command.count, metavar="GIB", help="find the longest sequence within")
    words = "of the foretold length, in turn until one fits (0.98 0.94 0.9 0.85)"
    add("--tried", type=float, nargs="+", default=TRIED, metavar="FRACTION", help=words)
    add("--ways", nargs="+", choices=(PLAIN, OURS, LIGER), metavar="WAY", help="some of plain ours liger")
    args = command.read(parser, sys.argv[1:] if argv is None else argv)
    if args.longest and not args.gpu:
        parser.error("--longest caps the allocator of a GPU, and there is none")
    model = build(LLAMA_1B if args.gpu else TINY, args.device, args.dtype)
    length, names = args.tokens or (8192 if args.gpu else 512), args.ways or ways(args.device)
    path = command.results_path(args.output, "models", args.device)
    with Watch(args.rounds) as watch:
        rows, furthest = run(model, length, names, args.rounds, watch), list[Row]()
        command.make_console().print(_table(rows))
        command.write_results(path, "models", args.argv, args.device, rows=rows)
        for name in names if args.longest else ():
            look = functools.partial(longest, model, name, args.longest * GIB, args.tried, watch)
            found, failure = measure.attempt(look)
            furthest.append({"provider": name, **failure.record()} if failure else found)
            command.write_results(path, "models", args.argv, args.device, rows=rows, longest=furthest)
    keys = ("provider", "tokens", "status", "ms", "peak_bytes", "loss")
    command.summary("models", args.device, rows, keys, longest=furthest)
    return command.report_failures(command.make_console(), rows + furthest)


def _table(rows: Sequence[Row]) -> Table:
    plain, lines = rows[0].get("ms"), []
    for row in rows:
        ratio = row["ms"] / plain if plain and "ms" in row else None
        cells = [
            number(row.get("ms")), f"{number(row.get('ms_p25'))}-{number(row.get('ms_p75'))}", number(ratio),
            mebibytes(row.get("peak_bytes")), number(row.get("loss"), ".5f"),
        ]  # fmt: skip
        lines.append([row["provider"], *(cells if row["status"] == "ok" else (row["status"],))])
    columns = ("head", "ms", "middle half", "x plain", "peak MiB", "loss")
    return command.table(f"a step of {rows[0]['tokens']} tokens", columns, lines)


if __name__ == "__main__":
    sys.exit(main())
