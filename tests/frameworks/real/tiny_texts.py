"""A tokenizer of bytes and a two-layer model, made on the spot and saved where a framework loads them from."""

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256}  # fmt: skip


def tokenizer() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|end|>", pad_token="<|pad|>", chat_template=TEMPLATE
    )


def llama(vocab: int = 258, **options: Any) -> Any:
    torch.manual_seed(5)
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SIZES | {"vocab_size": vocab} | options)))
    with torch.no_grad():
        made.get_output_embeddings().weight.normal_(std=0.5)  # so that its probabilities differ
    made.generation_config.eos_token_id, made.generation_config.pad_token_id = 256, 257
    return made


def saved(folder: Path, **options: Any) -> str:
    """A folder with the model and its tokenizer."""
    llama(bos_token_id=256, eos_token_id=256, pad_token_id=257, **options).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)
