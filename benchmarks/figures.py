"""Results of benchmarks/results as the report reads them: files by question, names of rows, tables, sources, ages."""

import json
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import providers

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# the newest result of each question; a test checks that there are no other files
FILES = {
    "head": "head-cuda.json", "head-flat": "head-flat-cuda.json",
    "small": "head-small-cuda.json", "small-flat": "head-small-flat-cuda.json", "late": "head-cuda-late.json",
    "speed": "speed-cuda.json", "losses": "losses-cuda.json",
    "trainers": "frameworks-cuda.json",
    "memory": "memory-cuda.json", "models": "models-cuda.json", "longest-ours": "models-longest-ours-cuda.json",
    "longest-others": "models-longest-others-cuda.json", "curves": "model_curves-cuda.json", "host": "host-cuda.json",
    "parallel-2": "parallel-2-cuda.json", "parallel-4": "parallel-4-cuda.json",
    "fp8": "fp8-cuda.json", "fp8-training": "fp8-cuda-training.json",
    "framework-steps": "framework_steps-cuda.json", "framework-axolotl": "framework_steps-axolotl-cuda.json",
}  # fmt: skip
LONG = {f"long-{ranks}": f"long-{ranks}-cuda.json" for ranks in (1, 2, 4)}
FILES |= {question: file for question, file in LONG.items() if (RESULTS / file).exists()}
HEADS = ("head", "head-flat", "small", "small-flat")  # of README's table
SHOWN: set[str] = set()  # questions whose results were read since a page was begun
OLD = 100  # commits; figures that are older are to be measured again
DATA = {"trained": "trained-like data", "flat": "flat data", "random": "flat data; errors of peaked data"}
ONE, ERRORS = "floor, 1 product", ("d_hidden", "d_weight", "logprob")
NAMES = {
    "floor": "three matmuls alone", "floor, 4 products": "four matmuls alone",
    "ours": "**chunked_head**", "eager": "plain PyTorch", "compile": "torch.compile",
    "torch": "`F.linear_cross_entropy`", "liger": "Liger-Kernel", "liger-16": "Liger-Kernel, `chunk_mem_const=16`",
    "liger-hopper": "Liger-Kernel, its Hopper kernels", "quack": "quack, scaled exponentials",
    "quack-base": "quack, plain, `tuned=False`", "cce": "Cut Cross-Entropy",
    "trl": "TRL's `ChunkedLogProbFunction`", "unsloth": "Unsloth's fused head",
    "late-ours": "**chunked_head**", "late-eager": "plain PyTorch", "late-compile": "torch.compile",
    "late-trl": "TRL's `ChunkedLogProbFunction`", "late-liger": "Liger-Kernel's fused scaled cross-entropy",
    "default": "**chunked_head**", "plain": "plain PyTorch",
    "half-skipped": "half of the tokens skipped",
    "256MiB": 'memory_budget="256MiB"', "into": "with `accumulate_into`", "loss": "loss alone, of one matmul",
    "ce+entropy+accuracy": "cross-entropy; entropy and accuracy as metrics",
    "grpo": "GRPO and an entropy bonus; six metrics", "cross-entropy": "cross-entropy",
    "grpo+z+metrics": "GRPO and z-loss; entropy, accuracy and six metrics",
    "gspo": "GSPO", "dpo": "DPO", "jsd": "JSD, likewise",
    "topk": "top-K distillation (K = 64) and cross-entropy", "reverse-kl": "reverse KL, likewise",
    "dense-kl": "forward KL from a teacher's hidden states", "logprobs": "`linear_logprobs` without gradients",
    "logprobs+entropy": "`linear_logprobs` with entropy, without gradients",
    "ce+z+metrics": "cross-entropy and z-loss; entropy and accuracy as metrics",
    "grpo+z-entropy": "GRPO, z-loss and an entropy bonus; four metrics",
    "logprobs+entropy-grad": "`linear_logprobs` with entropy and their gradients",
    "gspo-lengths": "GSPO with `segment_lengths`", "dpo-lengths": "DPO with `segment_lengths`",
    "grpo-kept": "GRPO over `kept_ids`", "grpo-kept-everywhere": "GRPO over `kept_ids`, `kept_everywhere=True`",
    "grpo-kept-mixed": "GRPO over `kept_ids`, one token of ten without a set",
    "grpo-temperature": "GRPO at temperature 0.8", "grpo-temperatures": "GRPO with a temperature per token",
    "streams": "cross-entropy of four streams of a quarter of the tokens each",
    "topk-alone": 'top-K distillation alone, `normalize="topk"`',
}  # fmt: skip


def read(question: str) -> dict[str, Any]:
    """Read the results of a question; raises ValueError where they are of a tree that is no commit."""
    results: dict[str, Any] = json.loads((RESULTS / FILES[question]).read_text())
    SHOWN.add(question)
    if not re.fullmatch("[0-9a-f]{7,40}", results["commit"]):
        raise ValueError(f"{FILES[question]} is of {results['commit']}, not of a commit: measure it again at one")
    return results


def rows_of(question: str, upstream: float = 1.0, **equal: Any) -> list[dict[str, Any]]:
    """Return a question's rows that have figures, at one upstream gradient, whose fields equal ``equal``."""
    rows = [r for r in read(question)["rows"] if r["status"] == "ok" and r.get("upstream") in (None, upstream)]
    return [row for row in rows if all(row[key] == value for key, value in equal.items())]


def number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def mib(size: float | None) -> str:
    return "-" if size is None else f"{size / 2**20:,.0f}"


def measured(questions: Iterable[str]) -> list[str]:
    """Return the questions whose file of results is there."""
    return [question for question in questions if (RESULTS / FILES[question]).is_file()]


def table(head: Iterable[str], rows: Iterable[Iterable[Any]], *questions: str) -> str:
    """Make a table in Markdown; below it stands the source of the questions' results."""
    lines, head = [" | ".join(map(str, line)) for line in rows], list(head)
    texts = (" | ".join(head), " | ".join(["---", *["---:"] * (len(head) - 1)]), *lines)
    return "\n".join([f"| {line} |" for line in texts] + ([f"\n{source(*questions)}"] if questions else []))


def source(*questions: str, command: bool = True) -> str:
    """Return machine, versions, date, commit and commands of results; equal ones stand once."""
    commands: dict[tuple[str, str], list[str]] = {}  # by machine and day with commit
    packages_by_sitting: dict[tuple[str, str], list[str]] = {}
    packages = providers.PACKAGES | providers.LATE_PACKAGES
    for question in questions:
        results = read(question)
        ran = {row.get("provider") for row in results.get("rows", ())}
        names = ["torch", "triton", *(package.name for name, package in packages.items() if name in ran)]
        names += [name for name in results["versions"] if name.startswith("F.") and "torch" in ran]
        sitting = results["device"] or "CPU", f"{results['date'][:10]}, commit {results['commit'][:7]}"
        versions = [f"{name} {results['versions'][name]}" for name in names if name in results["versions"]]
        packages_by_sitting.setdefault(sitting, []).extend(versions)
        command_line = re.sub(r"--output \S+", f"--output {FILES[question]}", results["command"])
        commands.setdefault(sitting, []).append(command_line)
    texts = []
    for sitting, versions in packages_by_sitting.items():
        lines = "".join(f"\n    {line}" for line in dict.fromkeys(commands[sitting]))
        text = ", ".join([sitting[0], *dict.fromkeys(versions), sitting[1]])
        texts.append(text + (f":\n{lines}" if command else "."))
    return "\n\n".join(texts)


def sittings() -> dict[tuple[str, str], list[str]]:
    """Files of results by their day and commit, the newest first."""
    files: dict[tuple[str, str], list[str]] = {}
    for question in measured(FILES):
        record = json.loads((RESULTS / FILES[question]).read_text())
        files.setdefault((record["date"][:10], record["commit"][:7]), []).append(FILES[question])
    return dict(sorted(files.items(), key=lambda item: item[0][0], reverse=True))


def ages() -> list[str]:
    """A sentence for each commit and day of results: how many commits ago, and which files.

    Results that are OLD commits behind HEAD, or of a commit that this repository lacks, begin with "old".
    """
    sentences = []
    for (day, commit), files in sittings().items():
        words = ["git", "-C", str(ROOT), "rev-list", "--count", f"{commit}..HEAD"]
        counted = subprocess.run(words, capture_output=True, text=True, check=False)
        count = counted.stdout.strip() if counted.returncode == 0 else "an unknown number of"
        is_old = not count.isdigit() or int(count) >= OLD
        sentences.append(f"{'old: ' * is_old}{commit} of {day}, {count} commits ago: {', '.join(files)}")
    return sentences
