"""Train a small transformers model on real text, plain and patched, and lay the loss curves side by side:
`python -m benchmarks.model_curves`.

The text is the demo's (Python's own standard library, or --text FILE). All runs start from the same weights and see
the same windows in the same order, but for a control: the plain model again, its weights changed by one part in ten
million. Training magnifies whatever differs, and the control says by how much. Exit status 1 where the patched run's
losses differ from the plain one's by more than ten times the control's, and by more than rounding.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from benchmarks import command
from benchmarks.demo_data import load_text, tokenize_text
from chunked_head import metrics, patch_model

BPE_VOCAB, CONTEXT, BATCH = 4096, 128, 8
MODEL: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2,
                         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
                         "max_position_embeddings": CONTEXT, "logits_scaling": 4.0}  # fmt: skip
LEARNING_RATE, WARM_UP = 1e-3, 20
CHANGE = 1e-7  # of the control's weights, half an ulp
ALLOWED, ROUNDING = 10.0, 2e-5  # times the control's difference, and in addition to it
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
    for batch in track(data, run, console=command.make_console(stderr=True)):
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run both; return the exit status."""
    parser = command.arguments("model_curves", __doc__, dtype=False)
    parser.add_argument("--steps", type=command.count, default=200, help="of training (200)")
    parser.add_argument("--text", type=Path, help="a text file, instead of Python's standard library")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    args = command.read(parser, sys.argv[1:] if argv is None else argv)
    text = load_text(args.text)
    tokens = tokenize_text(text, BPE_VOCAB, CONTEXT)
    data = windows(tokens.training, args.steps)
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    runs = {run: train(data, tokens.bpe_size, run, args.device, dtype) for run in (PLAIN, PATCHED, CONTROL)}
    largest = {run: max(differences(runs[PLAIN], runs[run])) for run in (PATCHED, CONTROL)}
    summary = {"last": {run: found["loss"][-1] for run, found in runs.items()}, "largest difference": largest}
    path = command.results_path(args.output, "model_curves", args.device)
    command.write_results(path, "model_curves", args.argv, args.device, text=text.description, **summary, runs=runs)
    command.summary("model_curves", args.device, (), (), steps=args.steps, **summary)
    wrong = largest[PATCHED] > ALLOWED * largest[CONTROL] + ROUNDING
    if wrong:
        print(f"patched differs by {largest[PATCHED]:.2g}, the control by {largest[CONTROL]:.2g}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
