"""Preference optimisation by TRL with this library's head: `python docs/examples/trl_dpo.py`, and with --plain."""

import contextlib
import tempfile
from collections.abc import Sequence

import tiny
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from chunked_head.integrations.trl import patched_trl

LOGGED = ("loss", "rewards/margins", "logits/chosen", "logps/chosen", "mean_token_accuracy", "entropy", "grad_norm")


def main(argv: Sequence[str] | None = None) -> list[dict[str, float]]:
    # WPO weighs pairs by the policy's own probabilities, which takes one statistic more
    args = tiny.arguments(__doc__ or "", argv, wpo=1)
    tokenizer = tiny.tokenizer()
    pairs = [
        {"prompt": f"What is {what}? ", "chosen": text, "rejected": tiny.FACTS[i - 3][1]}
        for i, (what, text) in enumerate(tiny.FACTS)
    ]
    head = contextlib.nullcontext() if args.plain else patched_trl(memory_budget=args.budget)
    with head, tempfile.TemporaryDirectory() as folder:
        trainer = DPOTrainer(
            tiny.model(len(tokenizer)),
            tiny.model(len(tokenizer), seed=1),
            args=DPOConfig(**tiny.settings(args, folder), max_length=96, use_weighting=bool(args.wpo)),
            train_dataset=Dataset.from_list(pairs),
            processing_class=tokenizer,
        )
        trainer.train()
    return tiny.printed(trainer.state.log_history, LOGGED)


if __name__ == "__main__":
    main()
