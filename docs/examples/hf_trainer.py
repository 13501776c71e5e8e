"""transformers' Trainer with a patched model: `python docs/examples/hf_trainer.py`, and again with --plain.

Entropy and accuracy come from the same pass as the loss, and z-loss could: see patch_model's loss=.
"""

import tempfile
from collections.abc import Sequence

import tiny
import torch
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

from chunked_head import metrics, patch_model
from chunked_head.integrations.huggingface import log_metrics


def texts(tokenizer: tiny.PreTrainedTokenizerFast) -> list[dict[str, list[int]]]:
    """Prompts, which do not count, and their completions, which do."""
    rows = []
    for what, text in tiny.FACTS:
        prompt, completion = tokenizer(what + ": ").input_ids, tokenizer(text + tiny.END).input_ids
        rows.append({"input_ids": prompt + completion, "labels": [-100] * len(prompt) + completion})
    return rows


def main(argv: Sequence[str] | None = None) -> list[dict[str, float]]:
    args = tiny.arguments(__doc__ or "", argv)
    tokenizer = tiny.tokenizer()
    model = tiny.model(len(tokenizer))
    if not args.plain:
        patch_model(model, metrics=[metrics.entropy(), metrics.accuracy()], memory_budget=args.budget)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(**tiny.settings(args, folder), eval_strategy="steps", eval_steps=1),
            train_dataset=texts(tokenizer),
            eval_dataset=texts(tokenizer)[:3],
            data_collator=DataCollatorForSeq2Seq(tokenizer),
        )
        if not args.plain:
            log_metrics(trainer)
        trainer.train()
    if not args.plain:
        print(model.chunked_head)
    tiny.printed(trainer.state.log_history, ("eval_loss", "eval_entropy", "eval_accuracy"))
    return tiny.printed(trainer.state.log_history, ("loss", "entropy", "accuracy", "grad_norm"))


if __name__ == "__main__":
    torch.set_num_threads(1)  # the model is too small for more
    main()
