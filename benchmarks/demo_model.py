"""A small decoder language model of PyTorch's own layers."""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

HEAD_DIM = 64
INIT_STD = 0.02


@dataclass(frozen=True)
class ModelConfig:
    vocab: int
    hidden: int
    layers: int
    context: int


class Decoder(nn.Module):
    """Token ids [B, T] -> final hidden states [B, T, H]; `lm_head` is the nn.Linear a head is built from.

    Embedding and head are tied, as in most models this small: two separate matrices of 128,256 rows would be
    nearly all of the parameters.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, heads = config.hidden, head_count(config.hidden)
        self.embedding = nn.Embedding(config.vocab, hidden)
        self.positions = nn.Embedding(config.context, hidden)
        options: dict[str, Any] = {"dropout": 0.0, "activation": F.gelu, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, **options) for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(hidden)
        # Made on the meta device: it takes the embedding's parameter, so a matrix of its own would be waste.
        self.lm_head = nn.Linear(hidden, config.vocab, bias=False, device="meta")
        self.lm_head.weight = self.embedding.weight
        for module in self.modules():
            if isinstance(module, nn.Embedding | nn.Linear):
                nn.init.normal_(module.weight, std=INIT_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embedding(tokens) + self.positions.weight[:length]
        causal = nn.Transformer.generate_square_subsequent_mask(length, device=x.device, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=causal, is_causal=True)
        return self.norm(x)


class PlainHead(nn.Module):
    """The usual code: all the logits, [B * T, V], in fp32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(hidden).float().flatten(0, -2), target.flatten())


def head_count(hidden: int) -> int:
    return max(1, hidden // HEAD_DIM)


def hidden_size_error(hidden: int) -> str | None:
    """Why `hidden` cannot be split into attention heads, or None."""
    if hidden % head_count(hidden):
        return f"--hidden {hidden} does not split into attention heads; take a multiple of {HEAD_DIM}"
    return None
