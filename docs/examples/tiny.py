"""A model, a tokenizer and texts small enough for a CPU, made on the spot: what the examples train on."""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END, PAD = "<|end|>", "<|pad|>"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}" + END + "{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
FACTS = [
    ("the sea", "salt water, deep and never still"),
    ("a stone", "old, hard, and warm in the evening sun"),
    ("the wind", "air that wants to be somewhere else"),
    ("a candle", "a small light that eats itself"),
    ("winter", "short days, long nights and bare trees"),
    ("a river", "rain on its way back to the sea"),
    ("bread", "flour, water, salt and patience"),
    ("a map", "a promise that somewhere is really there"),
]


def arguments(about: str, argv: Sequence[str] | None, **more: Any) -> argparse.Namespace:
    """What every example takes; ``more``: options of its own with their defaults, numbers."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--plain", action="store_true", help="TRL's own functions, to compare with")
    parser.add_argument("--cpu", action="store_true", help="beside a GPU too")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--budget", default="64MiB", help="memory beside the gradients")
    for name, default in more.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    return parser.parse_args(argv)


def tokenizer() -> PreTrainedTokenizerFast:
    """Of bytes: 256 of them, and two tokens for the end and for padding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=PAD, chat_template=TEMPLATE)


def model(vocab: int, seed: int = 0, hidden: int = 32) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=256, pad_token_id=257,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def settings(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """What the trainers' configurations have in common."""
    gpu = torch.cuda.is_available() and not args.cpu
    return {
        "output_dir": folder, "max_steps": args.steps, "per_device_train_batch_size": args.batch, "logging_steps": 1,
        "learning_rate": 1e-2, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "seed": 7,
        "use_cpu": not gpu, "bf16": gpu, "gradient_checkpointing": False,
    }  # fmt: skip


def printed(history: list[dict[str, Any]], names: Sequence[str]) -> list[dict[str, float]]:
    """The steps' values of these names where they have them, on the screen too."""
    steps = [{name: entry[name] for name in names if name in entry} for entry in history if names[0] in entry]
    for i, step in enumerate(steps, 1):
        print(f"step {i}: " + ", ".join(f"{name} {value:.4f}" for name, value in step.items()))
    return steps
