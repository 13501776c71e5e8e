"""`skip_tolerance` on a head that has really been trained: what it leaves out, how far the gradients are from float32
beside eager's, and what a step takes, measured by the three bare matmuls of a head.

    python -m benchmarks.trained_text --vocab 65536 --output tokens.npz      # once; no network needed
    python -m benchmarks.trained_head --tokens tokens.npz --steps 2000
    python -m benchmarks.trained_head --tokens tokens.npz --measured-tokens --curve 2e-3 4e-3 --seeds 7 8    # training

Hidden states, weight and targets are those of held-out text. Steps are timed as CUDA graphs, because at this hidden
size a call's Python would otherwise be what is measured. Under TRITON_INTERPRET=1 a CPU runs it too, at sizes that say
nothing: tiles are then 32 x 32 and times are Python's.
"""

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import providers
from benchmarks.demo_model import Decoder, ModelConfig
from benchmarks.measure import quantile, time_rounds
from benchmarks.trained_model import Training, held_out_loss, held_out_states, train
from benchmarks.trained_text import Tokens
from chunked_head import frequency_order, linear_loss, losses, similarity_order

ROUNDS = 5
TOLERANCES = (1e-9, 2e-3, 3e-3, 4e-3, 6e-3, 8e-3)


def head_of(tolerance: float | None, seen: list[tuple[int, Tensor, Tensor]]) -> Callable[..., Tensor]:
    def head(hidden: Tensor, weight: Tensor, target: Tensor, step: int) -> Tensor:
        out = linear_loss(
            hidden, weight, target, losses.cross_entropy(), skip_tolerance=tolerance, backend="triton"
        )  # fmt: skip
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
    training: Training, tokens: Tokens, tolerance: float | None, held_out: int, device: torch.device
) -> tuple[Decoder, dict[str, Any]]:
    seen: list[tuple[int, Tensor, Tensor]] = []
    found = train(training, tokens.training, head_of(tolerance, seen), device)
    record = {
        "tolerance": tolerance, "seed": training.seed, "seconds": round(found.seconds, 1),
        "losses": [round(x, 4) for x in found.losses],
        "held_out": held_out_loss(found.model, tokens.held_out, held_out, training.model.context),
        "tiles": [(step, round(float(kept), 4), round(float(moved), 5)) for step, kept, moved in seen],
    }  # fmt: skip
    print(
        f"trained with {tolerance}, seed {training.seed}: {len(found.losses)} steps in {record['seconds']} s, "
        f"held-out loss {record['held_out']:.4f}",
        flush=True,
    )
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


def graphed(step: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    if device.type == "cpu":
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class NothingHeld:
    """Graphs keep their gradients, and others are let go of by autograd."""

    def clear(self) -> None:
        pass


def timed(steps: dict[str, Callable[[], Any]], device: torch.device) -> dict[str, float]:
    """Milliseconds, medians over rounds of turns."""
    rounds = ROUNDS if device.type == "cuda" else 1
    times, failures = time_rounds(steps, NothingHeld(), device, rounds)
    if failures:
        name, failure = next(iter(failures.items()))
        raise RuntimeError(f"{name} failed: {failure.record()}")
    return {name: quantile(found, 0.5) for name, found in times.items()}


def measure(
    name: str, hidden: Tensor, weight: Tensor, target: Tensor, tolerances: Sequence[float | None]
) -> list[dict[str, Any]]:
    """Errors, tiles and times of each tolerance, for a head in one order of its vocabulary."""
    truth, plain = exact(hidden, weight, target), eager(hidden, weight, target)
    shared = {"order": name, "tokens": len(target), "eager": [error(p, t) for p, t in zip(plain, truth, strict=True)]}
    del plain

    def step(tolerance: float | None) -> Any:
        # leaves of its own: autograd keeps with one the stream of the first graph that it was in
        h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        out = linear_loss(h, w, target, losses.cross_entropy(), skip_tolerance=tolerance, backend="triton")
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
        steps[str(tolerance)] = graphed(functools.partial(step, tolerance), hidden.device)
    times = timed(steps, hidden.device)
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


def by_order(
    model: Decoder, tokens: Tokens, rank: Tensor, count: int, context: int, tolerances: Sequence[float | None]
) -> list[dict[str, Any]]:
    """Every tolerance on `count` held-out tokens, with the vocabulary in each order."""
    weight = model.lm_head.weight.detach().to(torch.bfloat16)
    orders = {
        "similarity": similarity_order(weight),
        "frequency": torch.arange(tokens.vocab, device=weight.device),
        "natural": rank.to(weight.device),  # the row of each id as the BPE numbered them
    }
    hidden, target = held_out_states(model, tokens.held_out, count, context)
    rows = []
    for name, order in orders.items():
        row = torch.empty_like(order)
        row[order] = torch.arange(len(order), device=order.device)
        rows += measure(name, hidden, weight[order].contiguous(), row[target], tolerances)
    return rows


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.trained_head",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--tokens", type=Path, required=True, help="what benchmarks.trained_text wrote")
    made.add_argument("--steps", type=int, default=2000)
    made.add_argument("--hidden", type=int, default=1024)
    made.add_argument("--layers", type=int, default=8)
    made.add_argument("--context", type=int, default=512, help="tokens of a window (512)")
    made.add_argument("--batch", type=int, default=16, help="windows of a step (16)")
    made.add_argument("--held-out", type=int, default=65536, help="tokens of the held-out loss (65536)")
    made.add_argument(
        "--measured-tokens", type=int, nargs="*", default=[8192], help="of a measured call; none: no such"
    )
    made.add_argument("--tolerances", type=float, nargs="+", default=TOLERANCES, help="that are measured")
    made.add_argument("--curve", type=float, nargs="*", default=[], metavar="TOLERANCE", help="trained with besides")
    made.add_argument(
        "--seeds", type=int, nargs="+", default=[7], help="each trains once without skipping and each curve"
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    made.add_argument("--device", default=default, help="cuda or cpu; the GPU where there is one")
    made.add_argument("--output", type=Path, help="results file (JSON)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Train, measure, train again with tolerances; return the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    arguments = parser().parse_args(argv)
    device = providers.read_device(parser(), arguments.device)
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        parser().error("tiles are skipped on Hopper alone; a CPU needs TRITON_INTERPRET=1 in the environment")
    torch.backends.cuda.matmul.allow_tf32 = False
    path = providers.results_path(arguments.output, "trained_head", device)
    tokens, rank = by_frequency(Tokens.load(arguments.tokens))
    config = ModelConfig(tokens.vocab, arguments.hidden, arguments.layers, arguments.context)
    curves = list[dict[str, Any]]()
    rows = list[dict[str, Any]]()

    def write() -> None:  # as it goes: what a machine that is taken away has measured is not lost
        providers.write_results(path, "trained_head", argv, device, text=tokens.description, curves=curves, rows=rows)

    for seed in arguments.seeds:
        training = Training(config, arguments.steps, arguments.batch, seed=seed)
        for tolerance in (None, *arguments.curve):
            model, record = trained(training, tokens, tolerance, arguments.held_out, device)
            curves.append(record)
            write()
            for count in arguments.measured_tokens if len(curves) == 1 else ():
                rows += by_order(model, tokens, rank, count, arguments.context, (None, *arguments.tolerances))
                write()
            del model
    print(json.dumps({"benchmark": "trained_head", "device": device.type, "curves": len(curves), "rows": len(rows)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
