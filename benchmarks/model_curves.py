"""Train a small transformers model on real text, plain and patched, and lay the loss curves side by side:
`python -m benchmarks.model_curves`.

The text is the demo's (Python's own standard library, or --text FILE). All runs start from the same weights and see
the same windows in the same order, but for a control: the plain model again, its weights changed by one part in ten
million. Training magnifies whatever differs, and the control says by how much. Exit status 1 where the patched run's
losses differ from the plain one's by more than ten times the control's, and by more than rounding.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from rich.progress import track
from torch import Tensor

matplotlib.use("Agg")  # draws into a file; no display is needed

import matplotlib.pyplot as plt

from benchmarks import providers
from benchmarks.demo_data import load_text, tokenize_text
from benchmarks.head import make_console
from benchmarks.shapes import parse_count
from chunked_head import metrics, patch_model

BPE_VOCAB, CONTEXT, BATCH = 4096, 128, 8
MODEL: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2,
                         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
                         "max_position_embeddings": CONTEXT, "logits_scaling": 4.0}  # fmt: skip
LEARNING_RATE, WARM_UP = 1e-3, 20
CHANGE = 1e-7  # of the control's weights, half an ulp
ALLOWED, ROUNDING = 10.0, 2e-5  # times the control's difference, and beside it
PLAIN, PATCHED, CONTROL = "plain", "patched", "control"


def windows(stream: Any, steps: int) -> Tensor:
    """[steps, batch, context] token ids, from anywhere in the text."""
    ids = torch.from_numpy(stream).long()
    at = torch.randint(0, len(ids) - CONTEXT, (steps, BATCH), generator=torch.Generator().manual_seed(1))
    return torch.stack([ids[start : start + CONTEXT] for start in at.flatten().tolist()]).view(steps, BATCH, CONTEXT)


def train(data: Tensor, vocab: int, run: str, device: torch.device, dtype: torch.dtype) -> dict[str, list[float]]:
    """Losses, and of the patched run the entropy and accuracy that come with them."""
    patched = run == PATCHED
    import transformers

    torch.manual_seed(0)
    model: Any = transformers.GraniteForCausalLM(transformers.GraniteConfig(vocab_size=vocab, **MODEL))
    model.to(device).train()
    if run == CONTROL:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 1 + CHANGE * torch.randn_like(parameter)
    if patched:
        patch_model(model, metrics=[metrics.entropy(), metrics.accuracy()], strict=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    found: dict[str, list[float]] = {"loss": []}
    for batch in track(data, run, console=make_console(stderr=True)):
        ids = batch.to(device)
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        found["loss"].append(loss.item())
        if patched:
            for name, value in model.chunked_head.take_metrics().items():
                found.setdefault(name, []).append(value.value.item())
    if patched:
        assert model.chunked_head.fused == len(data)
    return found


def differences(one: dict[str, list[float]], other: dict[str, list[float]]) -> list[float]:
    return [abs(a - b) for a, b in zip(one["loss"], other["loss"], strict=True)]


def draw(runs: dict[str, dict[str, list[float]]], path: Path) -> None:
    plain, ours = runs[PLAIN], runs[PATCHED]
    figure, (upper, lower) = plt.subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=(2, 1))
    upper.plot(plain["loss"], label="plain", color="#8a93a6", linewidth=3)
    upper.plot(ours["loss"], label="patched", color="#d1495b", linewidth=1)
    upper.plot(ours["entropy"], label="entropy (patched, same pass)", color="#30638e", linewidth=1)
    upper.set_ylabel("nats a token")
    upper.legend()
    for name, label, color in ((CONTROL, "plain, weights changed by 1e-7", "#8a93a6"), (PATCHED, "patched", "#d1495b")):
        values = [max(value, 1e-7) for value in differences(plain, runs[name])]
        lower.semilogy(values, label=label, color=color)
    lower.set_ylabel("difference from plain")
    lower.set_xlabel("step")
    lower.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Run both; return the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model_curves", description=__doc__)
    check = providers.argument
    parser.add_argument("--steps", type=check(parse_count), default=200, help="of training (200)")
    parser.add_argument("--text", type=Path, help="a text file, instead of Python's standard library")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="cuda or cpu; the GPU where there is one")
    parser.add_argument("--output", type=Path, help="results file (JSON); the plot lies beside it")
    args = parser.parse_args(argv)
    device = providers.read_device(parser, args.device)
    path: Path = providers.results_path(args.output, "model_curves", device)
    text = load_text(args.text)
    tokens = tokenize_text(text, BPE_VOCAB, CONTEXT)
    data = windows(tokens.training, args.steps)
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    runs = {run: train(data, tokens.bpe_size, run, device, dtype) for run in (PLAIN, PATCHED, CONTROL)}
    largest = {run: max(differences(runs[PLAIN], runs[run])) for run in (PATCHED, CONTROL)}
    summary = {"last": {run: found["loss"][-1] for run, found in runs.items()}, "largest difference": largest}
    providers.write_results(path, "model_curves", argv, device, text=text.description, **summary, runs=runs)
    draw(runs, path.with_suffix(".png"))
    print(json.dumps({"benchmark": "model_curves", "device": device.type, "steps": args.steps, **summary}))
    wrong = largest[PATCHED] > ALLOWED * largest[CONTROL] + ROUNDING
    if wrong:
        make_console().print(f"patched differs by {largest[PATCHED]:.2g}, the control by {largest[CONTROL]:.2g}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
