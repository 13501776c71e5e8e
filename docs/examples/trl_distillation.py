"""Distillation (GKD) by TRL with this library's heads: `python docs/examples/trl_distillation.py`, and with --plain."""

import contextlib
import tempfile
from collections.abc import Sequence

import tiny
from datasets import Dataset
from trl import DistillationConfig, DistillationTrainer

from chunked_head.integrations.trl import patched_trl


def main(argv: Sequence[str] | None = None) -> list[dict[str, float]]:
    # beta: 0 is the forward divergence, 1 the reverse one
    args = tiny.arguments(__doc__ or "", argv, beta=0.5, temperature=0.9)
    tokenizer = tiny.tokenizer()
    head = contextlib.nullcontext() if args.plain else patched_trl(memory_budget=args.budget)
    with head, tempfile.TemporaryDirectory() as folder:
        trainer = DistillationTrainer(
            tiny.model(len(tokenizer)),
            tiny.model(len(tokenizer), seed=1, hidden=48),
            DistillationConfig(
                **tiny.settings(args, folder), max_completion_length=12, beta=args.beta, temperature=args.temperature
            ),
            train_dataset=Dataset.from_list([{"prompt": f"What is {what}? "} for what, _ in tiny.FACTS]),
            processing_class=tokenizer,
        )
        trainer.train()
    return tiny.printed(trainer.state.log_history, ("loss", "entropy", "grad_norm"))


if __name__ == "__main__":
    main()
