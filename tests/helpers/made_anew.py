"""Calls each with a loss and a metric made for it, which close over a tensor of 1 MiB: what of them stays.

python tests/helpers/made_anew.py --device cuda --calls 10000
"""

import argparse
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chunked_head import linear_loss, losses, metrics

NUMBERS = 2**18  # fp32: 1 MiB


class Settings:
    """An object that a loss closes over, with a tensor."""

    def __init__(self, by: Tensor):
        self.by = by


class Found(NamedTuple):
    """MiB that the process and the device hold more after the calls, and ms that a call takes; how often a function
    was run on made-up tokens."""

    process: float
    device: float
    anew: float
    kept: float
    checks: int


def held(device: str) -> tuple[float, float]:
    """MiB of the process, and of tensors on the device."""
    gc.collect()
    on_device = 0
    if device == "cuda":
        torch.cuda.synchronize()
        on_device = torch.cuda.memory_allocated()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20, on_device / 2**20


def grown(device: str, calls: int, tokens: int = 32) -> Found:
    hidden = torch.randn(tokens, 16, device=device, requires_grad=True)
    weight = torch.randn(200, 16, device=device, requires_grad=True)
    target = torch.randint(0, 200, (tokens,), device=device)
    checked = list[int]()  # a log that grows, which they close over as well

    def make() -> tuple[list[Any], list[metrics.Metric]]:
        by = torch.ones(NUMBERS, device=device)
        settings = Settings(torch.ones(NUMBERS, device=device))

        def plain(stats: Any, batch: Any) -> Tensor:
            checked.append(1) if len(stats.lse) == 24 else None
            return -stats.logprob * by[0]

        def in_object(stats: Any, batch: Any) -> Tensor:
            checked.append(1) if len(stats.lse) == 24 else None
            return stats.lse * settings.by[0]

        measured = [metrics.Metric("by", lambda stats, batch: stats.lse * by[1])]
        return [plain, losses.custom(in_object, scope="token")], measured

    def call(parts: tuple[list[Any], list[metrics.Metric]]) -> None:
        plain, custom = parts[0]
        out = linear_loss(hidden, weight, target, plain + 0.1 * custom, metrics=parts[1])
        out.loss.backward()
        hidden.grad = weight.grad = None

    def timed(step: Callable[[], None], count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / count * 1e3

    timed(lambda: call(make()), 20)
    first, before = len(checked), held(device)
    anew = timed(lambda: call(make()), calls)
    after = held(device)
    checks, parts = len(checked) - first, make()
    return Found(after[0] - before[0], after[1] - before[1], anew, timed(lambda: call(parts), min(calls, 200)), checks)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--calls", type=int, default=10000)
    given = parser.parse_args()
    found = grown(given.device, given.calls)
    print(found)
    assert max(found[:2]) <= 8 and not found.checks, "something of the losses or metrics is kept"
