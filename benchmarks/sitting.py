"""The documentation's figures anew, at one commit: `python -m benchmarks sitting`, on several GPUs with `--gpus 4`.

Each part is a benchmark in a process of its own and writes the file that `python -m benchmarks report` reads. A part
that fails, or takes twice its minutes, does not stop the parts after it; what it had measured until then stays. All of
them can be split over several runs on one machine (`--only`).
"""

import argparse
import json
import os
import queue
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import command


class Part(NamedTuple):
    """A benchmark of a sitting: its file of results, minutes on an H100 or H200, its words, and how many GPUs."""

    file: str
    minutes: float
    words: str
    gpus: int = 1


_LARGE, _SMALL = "--shape 8192x4096x128256", "--shape 8192x1024x151936"
_FEW = "--provider eager --provider liger --provider quack --provider cce --provider ours"
_LONGEST = "models --rounds 1 --longest 80 --ways"  # on an H200: 80 GiB are more than an H100 has
PARTS = {
    "head": Part("head-cuda.json", 5.0, f"head {_LARGE} --data trained --errors"),
    "head-flat": Part("head-flat-cuda.json", 5.0, f"head {_LARGE} --data flat --errors"),
    "small": Part("head-small-cuda.json", 5.0, f"head {_SMALL} --data trained --errors"),
    "small-flat": Part("head-small-flat-cuda.json", 5.0, f"head {_SMALL} --data flat --errors"),
    "losses": Part("losses-cuda.json", 7.5, f"losses {_LARGE} {_SMALL} --rounds 3 --no-memory"),
    "speed": Part("speed-cuda.json", 6.7, "speed --rows default into half-skipped 256MiB loss --rounds 3"),
    "fp8": Part("fp8-cuda.json", 6.0, "fp8 --no-training"),
    "fp8-training": Part("fp8-cuda-training.json", 4.0, "fp8_training"),
    "late": Part("head-cuda-late.json", 3.5, f"head --late {_LARGE} --errors --data trained"),
    "longest-others": Part("models-longest-others-cuda.json", 4.0, f"{_LONGEST} plain liger"),
    "longest-ours": Part("models-longest-ours-cuda.json", 4.0, f"{_LONGEST} ours"),
    "trainers": Part("frameworks-cuda.json", 2.5, "frameworks"),
    "curves": Part("model_curves-cuda.json", 2.0, "model_curves"),
    "memory": Part("memory-cuda.json", 1.5, f"memory --model llama3-8b {_FEW}"),
    "host": Part("host-cuda.json", 1.5, "host --rounds 1 --lengths 200"),
    "models": Part("models-cuda.json", 1.0, "models"),
    "long-1": Part("long-1-cuda.json", 1.0, "long --rounds 2"),
    "long-2": Part("long-2-cuda.json", 1.5, "long --gpus 2 --shape 131072x4096x128256 --rounds 2", 2),
    "parallel-2": Part("parallel-2-cuda.json", 3.0, "parallel --gpus 2 --rounds 3", 2),
    "parallel-4": Part("parallel-4-cuda.json", 3.0, "parallel --gpus 4 --rounds 3", 4),
}


def run(name: str, folder: Path, devices: Sequence[str]) -> str:
    """Run a part on some GPUs, its progress on the error stream; return its seconds and a line for each error."""
    part, begin = PARTS[name], time.monotonic()
    output, seconds = folder / part.file, 120 * part.minutes
    output.unlink(missing_ok=True)  # an older figure must not pass for a new one
    words = [sys.executable, "-m", "benchmarks", *shlex.split(part.words), "--output", str(output)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(devices)}
    print(f"{name}: about {part.minutes} minutes", flush=True)
    try:
        process = subprocess.run(words, stdout=subprocess.DEVNULL, timeout=seconds, check=False, env=environment)
        errors = [f"exit status {process.returncode}"] if process.returncode else []
    except subprocess.TimeoutExpired:
        errors = [f"cut after {seconds:.0f} seconds"]
    results = json.loads(output.read_text()) if output.is_file() else {}
    if not results:
        errors.append("no results")
    for row in results.get("rows", ()):
        if row.get("status", "ok") != "ok":
            label = row.get("provider") or row.get("trainer")
            errors.append(f"{label} at {row.get('shape', 'all')}: {row.get('error', row['status'])}")
    errors += [f"without {provider}: {reason}" for provider, reason in results.get("skipped", {}).items()]
    text = f"{name}: {time.monotonic() - begin:.0f} seconds" + "".join(f"\n    {line}" for line in errors)
    print(text, flush=True)
    return text


def run_all(names: Sequence[str], folder: Path, devices: Sequence[str]) -> list[str]:
    """Run parts of one GPU side by side, one on each device, and after them parts of several GPUs."""
    idle = queue.SimpleQueue[str]()
    for device in devices:
        idle.put(device)

    def run_on_one(name: str) -> str:
        device = idle.get()
        try:
            return run(name, folder, [device])
        finally:  # an error of one part must not keep the others waiting
            idle.put(device)

    with ThreadPoolExecutor(len(devices)) as pool:
        texts = list(pool.map(run_on_one, [name for name in names if PARTS[name].gpus == 1]))
    several = [name for name in names if PARTS[name].gpus > 1]
    return texts + [run(name, folder, devices[: PARTS[name].gpus]) for name in several]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; return 1 where something went wrong or was left out."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks sitting", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="NAME", help=f"some of {', '.join(PARTS)}")
    parser.add_argument(
        "--gpus", type=command.count, default=1, help="parts that run side by side, one on each GPU (1)"
    )
    parser.add_argument("--list", action="store_true", help="say what would run, and for about how long")
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"), help="benchmarks/results")
    args = parser.parse_args(argv)
    names = args.only or [name for name, part in PARTS.items() if part.gpus <= args.gpus]
    if max(PARTS[name].gpus for name in names) > args.gpus:
        parser.error("argument --only: a part needs more GPUs than --gpus names")
    for name in names if args.list else ():
        part = PARTS[name]
        print(f"{name}: {part.minutes} minutes, {part.file}: {part.words}")
    minutes = sum(PARTS[name].minutes / (args.gpus if PARTS[name].gpus == 1 else 1) for name in names)
    print(f"{len(names)} parts, about {minutes:.1f} minutes", flush=True)
    if args.list:
        return 0
    if not torch.cuda.is_available():
        parser.error("no GPU is available here")
    if args.gpus > torch.cuda.device_count():
        parser.error(f"argument --gpus: {torch.cuda.device_count()} GPUs are there")
    os.environ["CHUNKED_HEAD_COMMIT"] = command.commit()  # before files change
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(args.gpus)))
    texts = run_all(names, args.output_dir.resolve(), visible.split(",")[: args.gpus])
    print("\n".join(["", "all parts:", *texts]))
    return int(any("\n" in text for text in texts))


if __name__ == "__main__":
    sys.exit(main())
