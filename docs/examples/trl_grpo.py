"""GRPO by TRL with this library's head: `python docs/examples/trl_grpo.py`, and again with --plain."""

import contextlib
import tempfile
from collections.abc import Sequence
from typing import Any

import tiny
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from chunked_head.integrations.trl import patched_trl


def spaces(completions: list[str], **rest: Any) -> list[float]:
    """The reward: words are a start."""
    return [float(text.count(" ")) + len(text) / 100 for text in completions]


def main(argv: Sequence[str] | None = None) -> list[dict[str, float]]:
    args = tiny.arguments(__doc__ or "", argv, temperature=0.9, entropy_bonus=0.01)
    tokenizer = tiny.tokenizer()
    head = contextlib.nullcontext() if args.plain else patched_trl(memory_budget=args.budget)
    with head, tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            **tiny.settings(args, folder), num_generations=args.batch, max_completion_length=12, num_iterations=2,
            temperature=args.temperature, entropy_coef=args.entropy_bonus, beta=0.05,
        )  # fmt: skip
        # TRL makes the model that it keeps as the reference from where the policy's came from
        tiny.model(len(tokenizer)).save_pretrained(folder)
        trainer = GRPOTrainer(
            folder,
            spaces,
            config,
            train_dataset=Dataset.from_list([{"prompt": f"What is {what}? "} for what, _ in tiny.FACTS]),
            processing_class=tokenizer,
        )
        trainer.train()
    return tiny.printed(trainer.state.log_history, ("loss", "reward", "kl", "entropy", "grad_norm"))


if __name__ == "__main__":
    main()
