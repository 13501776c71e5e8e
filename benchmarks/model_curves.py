"""Train a small transformers model on real text, plain and patched, and lay the loss curves side by side:
`python -m benchmarks.model_curves`.

The text is the demo's (Python's own standard library, or --text FILE). Both runs start from the same weights and see
the same windows in the same order. Exit status 1 where a loss of the patched run is further from the plain one's than
--tolerance (fp32; bf16 training is chaotic, there the curves are only shown).
"""

from __future__ import annotations

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
MODEL: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
                         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
                         "max_position_embeddings": CONTEXT, "logits_scaling": 4.0}  # fmt: skip
LEARNING_RATE = 2e-3
TOLERANCE = 1e-3


def windows(stream: Any, steps: int) -> Tensor:
    """[steps, batch, context] token ids, from anywhere in the text."""
    ids = torch.from_numpy(stream).long()
    at = torch.randint(0, len(ids) - CONTEXT, (steps, BATCH), generator=torch.Generator().manual_seed(1))
    return torch.stack([ids[start : start + CONTEXT] for start in at.flatten().tolist()]).view(steps, BATCH, CONTEXT)


def train(data: Tensor, vocab: int, patched: bool, device: torch.device, dtype: torch.dtype) -> dict[str, list[float]]:
    """Losses, and of the patched run the entropy and accuracy that come with them."""
    import transformers

    torch.manual_seed(0)
    model: Any = transformers.GraniteForCausalLM(transformers.GraniteConfig(vocab_size=vocab, **MODEL))
    model.to(device).train()
    if patched:
        patch_model(model, metrics=[metrics.entropy(), metrics.accuracy()], strict=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    found: dict[str, list[float]] = {"loss": []}
    for batch in track(data, "patched" if patched else "plain", console=make_console(stderr=True)):
        ids = batch.to(device)
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found["loss"].append(loss.item())
        if patched:
            for name, value in model.chunked_head.take_metrics().items():
                found.setdefault(name, []).append(value.value.item())
    if patched:
        assert model.chunked_head.fused == len(data)
    return found


def draw(plain: dict[str, list[float]], ours: dict[str, list[float]], path: Path) -> None:
    figure, (upper, lower) = plt.subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=(2, 1))
    upper.plot(plain["loss"], label="plain", color="#8a93a6", linewidth=3)
    upper.plot(ours["loss"], label="patched", color="#d1495b", linewidth=1)
    upper.plot(ours["entropy"], label="entropy (patched, same pass)", color="#30638e", linewidth=1)
    upper.set_ylabel("nats a token")
    upper.legend()
    lower.semilogy([max(abs(a - b), 1e-8) for a, b in zip(plain["loss"], ours["loss"], strict=True)], color="#30638e")
    lower.set_ylabel("difference of losses")
    lower.set_xlabel("step")
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
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16; the curves are only shown")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="cuda or cpu; the GPU where there is one")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help=f"of a loss ({TOLERANCE:g})")
    parser.add_argument("--output", type=Path, help="results file (JSON); the plot lies beside it")
    args = parser.parse_args(argv)
    device = providers.read_device(parser, args.device)
    path: Path = providers.results_path(args.output, "model_curves", device)
    text = load_text(args.text)
    tokens = tokenize_text(text, BPE_VOCAB, CONTEXT)
    data = windows(tokens.training, args.steps)
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    plain, ours = (train(data, tokens.bpe_size, patched, device, dtype) for patched in (False, True))
    differences = [abs(a - b) for a, b in zip(plain["loss"], ours["loss"], strict=True)]
    last = {"plain": plain["loss"][-1], "patched": ours["loss"][-1], "largest difference": max(differences)}
    providers.write_results(
        path, "model_curves", argv, device, text=text.description, last=last, plain=plain, ours=ours
    )
    draw(plain, ours, path.with_suffix(".png"))
    print(json.dumps({"benchmark": "model_curves", "device": device.type, "steps": args.steps, **last}))
    wrong = dtype == torch.float32 and max(differences) > args.tolerance
    if wrong:
        make_console().print(f"the runs differ by {max(differences):.2g}, more than {args.tolerance:g}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
