"""Train the same small language model twice, with the usual full-logits head and with ours, and compare.

    python -m benchmarks.demo

The text is Python's own standard library (or --text FILE), tokenised by a BPE trained on the spot; the head has
the 128,256 rows of Llama 3's. Both runs start from the same seed and see the same windows in the same order, one
after the other, each in a process of its own. Exit status: 0 if their losses agree, 1 if they do not or a run
fails, 2 on bad input.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from benchmarks import command, measure
from benchmarks.demo_data import (
    BYTE_ALPHABET_SIZE,
    DataError,
    TokenizedText,
    load_text,
    tokenize_text,
)
from benchmarks.demo_model import ModelConfig, hidden_size_error
from benchmarks.demo_report import Comparison, print_table, save_json, save_plot
from benchmarks.demo_train import OURS, PLAIN, RunResult, TrainingConfig, precision, run_in_child

LLAMA_3_VOCAB = 128_256
# Steps and batch by device, so that the default run takes a minute or two on 2 CPU cores and seconds on a GPU.
DEFAULT_STEPS = {"cpu": 8, "cuda": 200}
DEFAULT_BATCH = {"cpu": 8, "cuda": 16}
MOST_SECONDS = 86_400.0  # of a run


class RunError(RuntimeError):
    """A training run ended without a result."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    device = check_options(parser, options)
    config = TrainingConfig(
        model=ModelConfig(options.vocab, options.hidden, options.layers, options.context),
        steps=options.steps or DEFAULT_STEPS[device.type],
        batch=options.batch or DEFAULT_BATCH[device.type],
        seed=options.seed,
        device=str(device),
        memory_budget=options.memory_budget,
    )
    check_memory_budget(parser, config)
    console = Console()
    started = time.perf_counter()
    try:
        text = load_text(options.text)
        console.print(f"Text: {text.description}.", highlight=False)
        tokens = tokenize_text(text, options.bpe_vocab, options.context)
    except DataError as error:
        parser.error(str(error))
    print_setup(console, config, tokens)
    try:
        plain, ours = train_both(console, config, tokens)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    comparison = Comparison(plain, ours, config, text.description, tokens.bpe_size, describe_device(device))
    print_table(console, comparison)
    if comparison.agree:
        console.print(comparison.verdict, highlight=False)
    else:
        print(f"error: {comparison.verdict}", file=sys.stderr)
    files = (save_json(comparison, options.output), save_plot(comparison, options.output))
    console.print(f"Total time: {time.perf_counter() - started:.0f} s.", highlight=False)
    for path in files:
        print(f"wrote {path}")
    return 0 if comparison.agree else 1


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo",
        description="Train a small language model with the plain head and with ChunkedHead, and compare.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    by_device = "{}, by default {} on the CPU and {} on a GPU".format
    parser.add_argument("--text", type=Path, help="a UTF-8 text file, instead of Python's standard library")
    parser.add_argument("--steps", type=command.count, help=by_device("training steps", *DEFAULT_STEPS.values()))
    parser.add_argument("--batch", type=command.count, help=by_device("windows per step", *DEFAULT_BATCH.values()))
    parser.add_argument("--context", type=command.count, default=256, help="tokens per window")
    parser.add_argument("--hidden", type=command.count, default=256, help="hidden size")
    parser.add_argument("--layers", type=command.count, default=4, help="decoder layers")
    parser.add_argument("--vocab", type=command.count, default=LLAMA_3_VOCAB, help="rows of the head")
    parser.add_argument("--bpe-vocab", type=command.count, default=8192, help="tokens of the BPE trained on the text")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the data order")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N, or auto (cuda if there is one)")
    parser.add_argument("--memory-budget", help='for ChunkedHead, as "256MiB"; its own default if absent')
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder for the JSON and the SVG")
    return parser


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> torch.device:
    """Refuse, before any work, whatever argparse's types could not; returns the device to run on."""
    if options.text is not None and not options.text.is_file():
        parser.error(f"--text {options.text}: no such file")
    if options.bpe_vocab <= BYTE_ALPHABET_SIZE:
        parser.error(f"--bpe-vocab {options.bpe_vocab}: a byte-level BPE has more than {BYTE_ALPHABET_SIZE} tokens")
    if options.bpe_vocab > options.vocab:
        parser.error(f"--bpe-vocab {options.bpe_vocab} is more than the head's --vocab {options.vocab} rows")
    if options.seed < 0:
        parser.error(f"--seed {options.seed} is negative")
    if (problem := hidden_size_error(options.hidden)) is not None:
        parser.error(problem)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output {options.output}: cannot make this folder: {error.strerror}")
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    return command.device_of(parser, automatic if options.device == "auto" else options.device)


def check_memory_budget(parser: argparse.ArgumentParser, config: TrainingConfig) -> None:
    """Let the library's own planner judge a budget before the plain run has taken its time."""
    if config.memory_budget is None:
        return
    from chunked_head import plan

    model = config.model
    matmul_dtype = torch.bfloat16 if torch.device(config.device).type == "cuda" else torch.float32
    try:
        plan(
            config.batch * model.context, model.hidden, model.vocab, matmul_dtype, hidden_dtype=torch.float32,
            weight_dtype=torch.float32, memory_budget=config.memory_budget, device=config.device,
        )  # fmt: skip
    except ValueError as error:
        parser.error(f"--memory-budget {config.memory_budget}: {error}")


def print_setup(console: Console, config: TrainingConfig, tokens: TokenizedText) -> None:
    model = config.model
    as_llama = " as Llama 3's" if model.vocab == LLAMA_3_VOCAB else ""
    lines = (
        f"Tokens: BPE of {tokens.bpe_size:,} tokens; the head has {model.vocab:,} rows{as_llama}. "
        f"{len(tokens.training):,} tokens to train on, {len(tokens.held_out):,} held out.",
        f"Model: {model.layers} layers, hidden size {model.hidden}, head tied to the input embedding; "
        f"{config.steps} steps of {config.batch} x {model.context} = {config.batch * model.context:,} tokens.",
        f"Device: {describe_device(torch.device(config.device))}.",
    )
    for line in lines:
        console.print(line, highlight=False)


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {precision(device)}"
    return f"CPU, {torch.get_num_threads()} threads, {precision(device)}"


def train_both(console: Console, config: TrainingConfig, tokens: TokenizedText) -> tuple[RunResult, RunResult]:
    """One run after the other, so that neither disturbs the other's timing."""
    progress = Progress(
        TextColumn("{task.description:<22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        refresh_per_second=4,  # a busier bar would take time from the training it watches
    )
    with progress:
        names = {PLAIN: "Linear + cross_entropy", OURS: "ChunkedHead"}
        tasks = {n: progress.add_task(names[n], total=config.steps, start=False, note="waiting") for n in names}
        plain = train_in_child(PLAIN, config, tokens, progress, tasks[PLAIN])
        ours = train_in_child(OURS, config, tokens, progress, tasks[OURS])
    return plain, ours


def train_in_child(
    head_name: str, config: TrainingConfig, tokens: TokenizedText, progress: Progress, task: TaskID
) -> RunResult:
    progress.start_task(task)
    progress.update(task, note="starting")
    arguments = (head_name, config, tokens.training, tokens.held_out)
    for message in measure.messages(run_in_child, *arguments, seconds=MOST_SECONDS):
        if isinstance(message, measure.Failure):
            memory = "; the memory is not enough: try a smaller --batch" * (message.status == measure.OUT_OF_MEMORY)
            raise RunError(f"the {head_name} run ended without a result: {message.error}{memory}")
        kind, content = message
        if kind == "error":
            raise RunError(f"the {head_name} run failed: {content}")
        if kind == "done":
            progress.update(task, note=f"validation loss {content.validation_loss:.3f}")
            return content
        step, loss = content
        validating = ", validating" if step + 1 == config.steps else ""
        progress.update(task, completed=step + 1, note=f"loss {loss:.3f}{validating}")
    raise RunError(f"the {head_name} run ended without a result")


if __name__ == "__main__":
    sys.exit(main())
