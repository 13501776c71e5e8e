"""`skip_tolerance` on a head that has really been trained: what it leaves out, how far the gradients are from float32
beside eager's, and what a step takes, measured by the three bare matmuls of a head.

    python -m benchmarks.trained_text --vocab 65536 --out tokens.npz      # once; no network needed
    python -m benchmarks.trained_head --tokens tokens.npz --steps 2000
    python -m benchmarks.trained_head --tokens tokens.npz --steps 2000 --curve 4e-3    # trained with it besides

Hidden states, weight and targets are those of held-out text. Steps are timed as CUDA graphs, because at this hidden
size a call's Python would otherwise be what is measured.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.trained_model import Training, held_out_loss, held_out_states, train
from benchmarks.trained_text import Tokens
from chunked_head import frequency_order, linear_loss, losses, similarity_order

ROUNDS = 12
TOLERANCES = (None, 1e-9, 2e-3, 3e-3, 4e-3, 6e-3, 8e-3)
CONTEXT = 512


def head_of(tolerance: float | None, seen: list[tuple[int, Tensor, Tensor]]) -> Callable[..., Tensor]:
    def head(hidden: Tensor, weight: Tensor, target: Tensor, step: int) -> Tensor:
        out = linear_loss(hidden, weight, target, losses.cross_entropy(), skip_tolerance=tolerance)
        if tolerance is not None and step % 20 == 0:
            seen.append((step, out.metrics["kept_tiles"].value.detach(), out.metrics["dropped_mass"].value.detach()))
        return out.loss

    return head


def by_frequency(tokens: Tokens) -> tuple[Tokens, Tensor]:
    """The tokens numbered by descending frequency, and each old id's new one [vocab]."""
    order = frequency_order(torch.from_numpy(np.bincount(tokens.training, minlength=tokens.vocab)))
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    new = rank.numpy().astype(np.uint16)
    return Tokens(new[tokens.training], new[tokens.held_out], tokens.vocab, tokens.description), rank


def trained(
    training: Training, tokens: Tokens, tolerance: float | None, device: torch.device
) -> tuple[Any, dict[str, Any]]:
    seen: list[tuple[int, Tensor, Tensor]] = []
    found = train(training, tokens.training, head_of(tolerance, seen), device)
    record = {
        "tolerance": tolerance, "seconds": round(found.seconds, 1), "losses": [round(x, 4) for x in found.losses],
        "held_out": held_out_loss(found.model, tokens.held_out, 65536, CONTEXT),
        "tiles": [(step, round(float(kept), 4), round(float(moved), 5)) for step, kept, moved in seen],
    }  # fmt: skip
    print(f"trained with {tolerance}: {len(found.losses)} steps, held-out loss {record['held_out']:.4f}", flush=True)
    return found.model, record


def exact(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """dhidden and dweight of the mean loss in float32."""
    dlogits = (hidden.float() @ weight.float().t()).softmax(-1)
    dlogits[torch.arange(len(target), device=target.device), target] -= 1.0
    dlogits /= len(target)
    return dlogits @ weight.float(), dlogits.t() @ hidden.float()


def eager(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The same as plain PyTorch makes them from bf16 logits."""
    h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    nn.functional.cross_entropy((h @ w.t()).float(), target).backward()
    assert h.grad is not None and w.grad is not None
    return h.grad, w.grad


def error(found: Tensor | None, truth: Tensor) -> float:
    assert found is not None
    return float((found.float() - truth).norm() / truth.norm())


def graphed(step: Callable[[], Any]) -> Callable[[], Any]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def timed(steps: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Milliseconds, medians; a turn is three runs of which the last is timed, turns in alternating order."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(ROUNDS):
        for name in list(steps)[:: 1 if turn % 2 else -1]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for last in (False, False, True):
                if last:
                    start.record()
                steps[name]()
            end.record()
            torch.cuda.synchronize()
            found[name].append(start.elapsed_time(end))
    return {name: statistics.median(times[2:]) for name, times in found.items()}


def measure(name: str, hidden: Tensor, weight: Tensor, target: Tensor, tolerances: tuple) -> list[dict[str, Any]]:
    """Errors, tiles and times of each tolerance, for a head in one order of its vocabulary."""
    truth, plain = exact(hidden, weight, target), eager(hidden, weight, target)
    shared = {"order": name, "tokens": len(target), "eager": [error(p, t) for p, t in zip(plain, truth, strict=True)]}
    del plain
    h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()

    def step(tolerance: float | None) -> Any:
        out = linear_loss(h, w, target, losses.cross_entropy(), skip_tolerance=tolerance)
        # no accumulation into .grad: its node would belong to the stream of the first call
        return out, torch.autograd.grad(out.loss, (h, w))

    rows, steps = [], {"three matmuls": three_matmuls(hidden, weight)}
    for tolerance in tolerances:
        out, (dhidden, dweight) = step(tolerance)
        rows.append(
            shared
            | {"tolerance": tolerance, "chunks": out.plan.chunks, "dhidden": error(dhidden, truth[0])}
            | {"dweight": error(dweight, truth[1]), "rows_without_gradient": int((dweight.abs().amax(1) == 0).sum())}
            | {key: float(value.value) for key, value in out.metrics.items()}
        )
        steps[str(tolerance)] = graphed(functools.partial(step, tolerance))
    times = timed(steps)
    for row in rows:
        row["ms"] = times[str(row["tolerance"])]
        row["ratio"] = row["ms"] / times["three matmuls"]
        print(
            f"{name:>10} {len(target)} tolerance {row['tolerance']!s:>6}: {row['ratio']:.3f} of "
            f"{times['three matmuls']:.2f} ms in {row['chunks']} chunks, kept {row.get('kept_tiles', 1.0):.3f}, moved "
            f"{row.get('dropped_mass', 0.0):.4f}, dhidden {row['dhidden']:.2e}, dweight {row['dweight']:.2e} (eager "
            f"{row['eager'][0]:.2e}, {row['eager'][1]:.2e}), {row['rows_without_gradient']} rows without gradient",
            flush=True,
        )
    return rows


def three_matmuls(hidden: Tensor, weight: Tensor) -> Callable[[], None]:
    logits = torch.empty(len(hidden), len(weight), dtype=hidden.dtype, device=hidden.device)
    dhidden, dweight = torch.empty_like(hidden), torch.empty_like(weight)

    def step() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight, out=dhidden)
        torch.mm(logits.t(), hidden, out=dweight)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--measured-tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--curve", type=float, nargs="*", default=[], metavar="TOLERANCE")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/trained-head.json"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("trained_head needs a GPU: tiles are skipped on Hopper alone")
    torch.backends.cuda.matmul.allow_tf32 = False
    from benchmarks.demo_model import ModelConfig

    device = torch.device("cuda")
    tokens, rank = by_frequency(Tokens.load(arguments.tokens))
    config = ModelConfig(tokens.vocab, arguments.hidden, arguments.layers, CONTEXT)
    training = Training(config, arguments.steps, batch=16)
    model, record = trained(training, tokens, None, device)
    result: dict[str, Any] = {"text": tokens.description, "torch": torch.__version__, "curves": [record], "rows": []}
    weight = model.lm_head.weight.detach().to(torch.bfloat16)
    orders = {
        "similarity": similarity_order(weight),
        "frequency": torch.arange(tokens.vocab, device=device),
        "natural": rank.to(device),  # the row of each id as the BPE numbered them
    }
    for count in arguments.measured_tokens:
        hidden, target = held_out_states(model, tokens.held_out, count, CONTEXT)
        for name, order in orders.items():
            row = torch.empty_like(order)
            row[order] = torch.arange(len(order), device=device)
            result["rows"] += measure(name, hidden, weight[order].contiguous(), row[target], TOLERANCES)
            arguments.out.write_text(json.dumps(result, indent=1))
    del model
    for tolerance in arguments.curve:
        result["curves"].append(trained(training, tokens, tolerance, device)[1])
        arguments.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
