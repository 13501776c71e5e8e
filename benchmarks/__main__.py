"""`python -m benchmarks report`, and every other benchmark by its name: `python -m benchmarks speed --rounds 5`."""

import importlib
import sys
from collections.abc import Sequence

NAMES = (
    "demo", "fp8", "fp8_training", "framework_steps", "frameworks", "head", "host", "long", "losses", "memory",
    "model_curves", "models", "parallel", "report", "sitting", "speed", "turns",
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] not in NAMES:
        print(f"usage: python -m benchmarks NAME [options]; NAME is one of {', '.join(NAMES)}")
        return 0 if list(argv) in ([], ["-h"], ["--help"]) else 2
    return importlib.import_module(f"benchmarks.{argv[0]}").main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
