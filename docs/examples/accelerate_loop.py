"""A training loop of one's own on accelerate: `python docs/examples/accelerate_loop.py`, and again with --plain.

The loss is divided by the tokens of all micro-batches, as it should be where they are accumulated.
"""

from collections.abc import Sequence

import tiny
import torch
from accelerate import Accelerator
from hf_trainer import texts
from torch.utils.data import DataLoader
from transformers import DataCollatorForSeq2Seq

from chunked_head import metrics, patch_model

MICRO_BATCHES = 2


def main(argv: Sequence[str] | None = None) -> list[dict[str, float]]:
    args = tiny.arguments(__doc__ or "", argv)
    accelerator = Accelerator(cpu=args.cpu or not torch.cuda.is_available())
    tokenizer = tiny.tokenizer()
    model = tiny.model(len(tokenizer))
    if not args.plain:
        patch_model(model, metrics=[metrics.entropy()], memory_budget=args.budget, logits=None)
    loader = DataLoader(texts(tokenizer), args.batch // MICRO_BATCHES, collate_fn=DataCollatorForSeq2Seq(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parallel, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    history = []
    for _ in range(args.steps):
        total = 0.0
        batches = [batch for _, batch in zip(range(MICRO_BATCHES), loader, strict=False)]
        count = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
        for batch in batches:
            loss = parallel(**batch, num_items_in_batch=count).loss
            accelerator.backward(loss)
            total += loss.item()
        step = {"loss": total, "grad_norm": float(accelerator.clip_grad_norm_(parallel.parameters(), 1.0))}
        if not args.plain:
            step["entropy"] = model.chunked_head.take_metrics()["entropy"].value.item()
        optimizer.step()
        optimizer.zero_grad()
        history.append(step)
    if not args.plain:
        print(model.chunked_head)
    return tiny.printed(history, ("loss", "entropy", "grad_norm"))


if __name__ == "__main__":
    torch.set_num_threads(1)  # the model is too small for more
    main()
