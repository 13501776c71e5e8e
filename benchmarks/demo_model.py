"""A small decoder language model in plain PyTorch: RMSNorm, rotary positions, causal attention, SwiGLU."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD_DIM = 64
ROPE_BASE = 10_000.0
INIT_STD = 0.02


@dataclass(frozen=True)
class ModelConfig:
    vocab: int
    hidden: int
    layers: int
    context: int


class Attention(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = head_count(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))


class SwiGLU(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        inner = 8 * hidden // 3  # as many weights as a plain MLP of inner size 4 * hidden
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden)
        self.attention = Attention(hidden)
        self.mlp_norm = nn.RMSNorm(hidden)
        self.mlp = SwiGLU(hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Token ids [B, T] -> final hidden states [B, T, H]; `lm_head` is the nn.Linear a head is built from.

    Embedding and head are tied, as in most models this small: two separate matrices of 128,256 rows would be
    nearly all of the parameters.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.blocks = nn.ModuleList(Block(config.hidden) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden)
        # Made on the meta device: it takes the embedding's parameter, so a matrix of its own would be waste.
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False, device="meta")
        self.lm_head.weight = self.embedding.weight
        cos, sin = rotary_tables(config.context, config.hidden // head_count(config.hidden))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]])
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
    """Why `hidden` cannot be split into attention heads with rotary positions, or None."""
    heads = head_count(hidden)
    if hidden < 2 or hidden % (2 * heads):
        return f"--hidden {hidden} does not split into attention heads of even size; take a multiple of {HEAD_DIM}"
    return None


def rotary_tables(context: int, head_dim: int) -> tuple[Tensor, Tensor]:
    frequencies = ROPE_BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(context, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x [B, heads, T, D], in x's own dtype: attention wants q, k and v alike."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Embedding | nn.Linear):
        nn.init.normal_(module.weight, std=INIT_STD)
