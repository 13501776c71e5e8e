"""The documentation's figures of one GPU anew, at one commit: `python -m benchmarks sitting`.

Each part is a benchmark in a process of its own and writes the file that `python -m benchmarks report` reads. A part
that fails, or takes twice its minutes, does not stop the parts after it; what it had measured until then stays. All of
them can be split over several runs on one machine (`--only`).
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import command

_LARGE, _SMALL = "--shape 8192x4096x128256", "--shape 8192x1024x151936"
_FEW = "--provider eager --provider liger --provider quack --provider cce --provider ours"
# by name: the file, about how many minutes an H100 or H200 takes, and the words
PARTS = {
    "head": ("head-cuda.json", 5.7, f"head {_LARGE} --data trained --errors"),
    "head-flat": ("head-flat-cuda.json", 5.7, f"head {_LARGE} --data flat --errors"),
    "small": ("head-small-cuda.json", 5.7, f"head {_SMALL} --data trained --errors"),
    "small-flat": ("head-small-flat-cuda.json", 5.7, f"head {_SMALL} --data flat --errors"),
    "late": ("head-cuda-late.json", 2.4, f"head --late {_LARGE} --errors --data trained"),
    "memory": ("memory-cuda.json", 0.8, f"memory --model llama3-8b {_FEW}"),
    "host": ("host-cuda.json", 1.5, "host --rounds 1 --lengths 200"),
    "speed": ("speed-cuda.json", 6.7, "speed --rows default into half-skipped 256MiB loss --rounds 3"),
    "losses": ("losses-cuda.json", 7.5, f"losses {_LARGE} {_SMALL} --rounds 3 --no-memory"),
    "models": ("models-cuda.json", 1.0, "models --rounds 3"),
    "curves": ("model_curves-cuda.json", 2.0, "model_curves"),
    "fp8": ("fp8-cuda.json", 4.0, "fp8 --no-training"),
    "fp8-training": ("fp8-cuda-training.json", 4.0, "fp8_training"),
}


def run(name: str, folder: Path) -> list[str]:
    """Run a part, its progress on the error stream; return what went wrong."""
    file, minutes, words = PARTS[name]
    output = folder / file
    output.unlink(missing_ok=True)  # an older figure must not pass for a new one
    words_of = [sys.executable, "-m", "benchmarks", *words.split(), "--output", str(output)]
    try:
        done = subprocess.run(words_of, stdout=subprocess.DEVNULL, timeout=120 * minutes, check=False)
        wrong = [f"exit status {done.returncode}"] if done.returncode else []
    except subprocess.TimeoutExpired:
        wrong = [f"cut after {120 * minutes:.0f} seconds"]
    if not output.is_file():
        return [*wrong, "no results"]
    found = json.loads(output.read_text())
    for row in found.get("rows", ()):
        if row["status"] != "ok":
            wrong.append(f"{row['provider']} at {row.get('shape', 'all')}: {row.get('error', row['status'])}")
    return wrong + [f"without {who}: {reason}" for who, reason in found.get("skipped", {}).items()]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; return 1 where something went wrong or was left out."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks sitting", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="NAME", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--list", action="store_true", help="say what would run, and for about how long")
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"), help="benchmarks/results")
    args = parser.parse_args(argv)
    names, said = args.only or list(PARTS), list[str]()
    for name in names if args.list else ():
        print(f"{name}: {PARTS[name][1]} minutes, {PARTS[name][0]}: {PARTS[name][2]}")
    print(f"{len(names)} parts, about {sum(PARTS[name][1] for name in names):.1f} minutes", flush=True)
    if args.list:
        return 0
    if not torch.cuda.is_available():
        parser.error("no GPU is available here")
    os.environ["CHUNKED_HEAD_COMMIT"] = command.commit()  # before files change
    for number, name in enumerate(names, 1):
        print(f"{number} of {len(names)}, {name}: about {PARTS[name][1]} minutes", flush=True)
        begin = time.monotonic()
        wrong = run(name, args.output_dir.resolve())
        said.append(f"{name}: {time.monotonic() - begin:.0f} seconds" + "".join(f"\n    {line}" for line in wrong))
        print(said[-1], flush=True)
    print("\n".join(["", "all parts:", *said]))
    return int(any("\n" in text for text in said))


if __name__ == "__main__":
    sys.exit(main())
