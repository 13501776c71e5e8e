"""Supervised fine-tuning by TRL with this library's head: `python docs/examples/trl_sft.py`, and again with --plain."""

import contextlib
import tempfile
from collections.abc import Sequence

import tiny
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from chunked_head.integrations.trl import patched_trl


def main(argv: Sequence[str] | None = None) -> list[dict[str, float]]:
    args = tiny.arguments(__doc__ or "", argv)
    tokenizer = tiny.tokenizer()
    chats = [
        {"prompt": [{"role": "user", "content": what}], "completion": [{"role": "assistant", "content": text}]}
        for what, text in tiny.FACTS
    ]
    head = contextlib.nullcontext() if args.plain else patched_trl(memory_budget=args.budget)
    with head, tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            tiny.model(len(tokenizer)),
            SFTConfig(**tiny.settings(args, folder), max_length=96),
            train_dataset=Dataset.from_list(chats),
            processing_class=tokenizer,
        )
        trainer.train()
    return tiny.printed(trainer.state.log_history, ("loss", "mean_token_accuracy", "entropy", "grad_norm"))


if __name__ == "__main__":
    main()
