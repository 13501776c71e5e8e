"""The shapes of real language-model heads, and the operands that the benchmarks draw for them."""

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Hidden size and vocabulary rows of published models' lm_head.
HEADS: dict[str, tuple[int, int]] = {
    "llama3-8b": (4096, 128256),
    "llama3-1b": (2048, 128256),
    "gemma2-2b": (2304, 256000),
    "gpt-oss": (2880, 201088),
    "qwen3-0.6b": (1024, 151936),
    "qwen3-8b": (4096, 151936),
}
DEFAULT_TOKENS = 8192
# Small enough for a step to take about a second on a laptop, with a real vocabulary.
CPU_SHAPE = (1024, 512, 128256)

DATA = ("trained", "flat")
TARGETS = ("random", "zipf", "equal")

# Of other policies' log-probabilities about ours: a few tokens in a hundred lie outside the usual clips of 0.2.
POLICY_NOISE = 0.1
TEACHER_K = 64
# Of a trained head's hidden states towards their targets' rows, in nats of the logit, at most.
LEAN = 20.0

_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float64": torch.float64,
    "fp64": torch.float64,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


@dataclass(frozen=True)
class Shape:
    """Tokens x hidden size x vocabulary of one head."""

    tokens: int
    hidden: int
    vocab: int

    def __str__(self) -> str:
        return f"{self.tokens}x{self.hidden}x{self.vocab}"


def parse_shape(text: str) -> Shape:
    """Read `8192x4096x128256`, `llama3-8b` (8192 tokens), `llama3-8b@4096` or `cpu`."""
    if text == "cpu":
        return Shape(*CPU_SHAPE)
    name, _, tokens = text.partition("@")
    if name in HEADS:
        if tokens and not (tokens.isdigit() and int(tokens)):
            raise ValueError(f"the tokens after @ in shape {text!r} are no positive whole number")
        return Shape(int(tokens or DEFAULT_TOKENS), *HEADS[name])
    sizes = text.lower().split("x")
    if len(sizes) != 3 or not all(size.isdigit() and int(size) for size in sizes):
        raise ValueError(f"shape {text!r} is neither TOKENSxHIDDENxVOCAB nor one of cpu, {', '.join(HEADS)}")
    return Shape(int(sizes[0]), int(sizes[1]), int(sizes[2]))


def parse_head(text: str) -> tuple[str, int, int]:
    """Read a model's name or `HIDDENxVOCAB`; return a name, the hidden size and the vocabulary."""
    if text in HEADS:
        return (text, *HEADS[text])
    sizes = text.lower().split("x")
    if len(sizes) != 2 or not all(size.isdigit() and int(size) for size in sizes):
        raise ValueError(f"model {text!r} is neither HIDDENxVOCAB nor one of {', '.join(HEADS)}")
    return text, int(sizes[0]), int(sizes[1])


def parse_bytes(text: str) -> int:
    """Read `24GiB`, `64 MiB`, `1.5GB` or a plain count of bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is no size in bytes such as 24GiB, 64MiB or 1048576")
    count = int(float(match[1]) * _UNITS[match[2].lower()])
    if count < 1:
        raise ValueError(f"the size {text!r} is below one byte")
    return count


def parse_count(text: str) -> int:
    """Read a whole number above zero."""
    if not (text.isdigit() and int(text)):
        raise ValueError(f"{text!r} is no positive whole number")
    return int(text)


def parse_upstream(text: str) -> float:
    """Read the gradient that reaches the loss from above: a finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"upstream {text!r} is no finite number")
    return value


def parse_dtype(text: str) -> torch.dtype:
    """Read a floating-point type's name, in its long or its short form."""
    if text.lower() not in _DTYPES:
        raise ValueError(f"{text!r} is none of the types {', '.join(_DTYPES)}")
    return _DTYPES[text.lower()]


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a type without the `torch.` in front."""
    return str(dtype).removeprefix("torch.")


@dataclass
class Operands:
    """The inputs of one head: hidden states and weight want gradients, the targets are class indices."""

    hidden: Tensor
    weight: Tensor
    target: Tensor

    def clear(self) -> None:
        """Drop the gradients, so that the next step allocates them anew."""
        self.hidden.grad = None
        self.weight.grad = None


def make_operands(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    data: str = "flat",
    targets: str = "random",
    seed: int = 0,
) -> Operands:
    """Draw operands of a shape, the same ones for the same seed on the same device.

    `flat` gives logits of standard deviation 2, as at the start of training. `trained` stands for a language model's:
    see ``_trained``, whose targets are its own.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    normal = functools.partial(torch.randn, dtype=dtype, device=device, generator=generator)
    weight = normal(shape.vocab, shape.hidden).mul_(2.0 / math.sqrt(shape.hidden))
    hidden = normal(shape.tokens, shape.hidden)
    if data == "trained":
        hidden, weight, target = _trained(hidden.float(), weight.float(), generator)
    else:
        target = _draw_targets(shape, targets, device, generator)
    return Operands(hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), target)


def _trained(hidden: Tensor, weight: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Flat operands made into those of a trained head, and targets.

    Ids have frequencies that fall as one over the rank, in any order; a direction that all hidden states share gives
    their logarithms. Each hidden state leans to its target's row by up to 20 nats. With 128,256 ids the mean loss is
    then 2.2 nats, as is the mean entropy, and the target is the likeliest id for two tokens of three.
    """
    (tokens, size), vocab, device = hidden.shape, len(weight), hidden.device
    log_p = -torch.arange(1, vocab + 1, device=device).float().log()
    log_p = log_p[torch.randperm(vocab, device=device, generator=generator)].log_softmax(0)
    target = torch.multinomial(log_p.exp(), tokens, replacement=True, generator=generator)
    shared = F.normalize(torch.randn(size, device=device, generator=generator), dim=0)
    weight.add_((log_p - log_p.mean())[:, None] * (shared / math.sqrt(size)))
    rows = weight[target]
    nats = LEAN * torch.rand(tokens, 1, device=device, generator=generator).sqrt()
    return hidden + math.sqrt(size) * shared + nats * rows / rows.square().sum(1, keepdim=True), weight, target


def _draw_targets(shape: Shape, targets: str, device: torch.device, generator: torch.Generator) -> Tensor:
    if targets == "equal":
        return torch.full((shape.tokens,), shape.vocab // 2, device=device)
    if targets == "zipf":
        # Word frequencies fall about as one over the rank.
        frequency = 1.0 / torch.arange(1, shape.vocab + 1, dtype=torch.float32, device=device)
        return torch.multinomial(frequency, shape.tokens, replacement=True, generator=generator)
    return torch.randint(shape.vocab, (shape.tokens,), device=device, generator=generator)


def draw_fields(
    names: Sequence[str], operands: Operands, logprobs: Tensor, segments: int, seed: int = 0
) -> dict[str, Tensor]:
    """The named fields of a batch, for operands whose targets have these log-probabilities."""
    tokens, device = len(operands.target), operands.hidden.device
    shape = Shape(tokens, operands.hidden.shape[1], len(operands.weight))
    k = min(TEACHER_K, shape.vocab)
    generator = torch.Generator(device=device).manual_seed(seed)
    teachers: list[Operands] = []

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=logprobs.dtype, device=device, generator=generator)

    def teacher() -> Operands:
        if not teachers:
            teachers.append(make_operands(shape, operands.hidden.dtype, device, seed=seed + 1))
        return teachers[0]

    def teacher_ids() -> Tensor:
        further = torch.randint(shape.vocab, (tokens, k - 1), device=device, generator=generator)
        return torch.cat([operands.target[:, None], further], 1)

    draw: dict[str, Callable[[], Tensor]] = {
        "old_logprobs": lambda: logprobs + POLICY_NOISE * normal(tokens),
        "ref_logprobs": lambda: logprobs + POLICY_NOISE * normal(tokens),
        "advantages": lambda: normal(tokens),
        "segments": lambda: draw_segments(tokens, segments, device, generator),
        "pairs": lambda: torch.arange(segments, device=device).view(-1, 2),
        "teacher_ids": teacher_ids,
        # One entry more than is handed on: what the K leave of 1.
        "teacher_logprobs": lambda: (2.0 * normal(tokens, k + 1)).log_softmax(1)[:, :k].contiguous(),
        "teacher_hidden": lambda: teacher().hidden.detach(),
        "teacher_weight": lambda: teacher().weight.detach(),
    }
    return {name: draw[name]() for name in names}


def draw_kept(operands: Operands, share: float, seed: int = 0) -> dict[str, Tensor]:
    """Draw sets of some 8, at most 128, ids for a share of the tokens; frequencies fall as one over the id."""
    tokens, vocab, device = len(operands.target), len(operands.weight), operands.hidden.device
    generator = torch.Generator(device=device).manual_seed(seed)
    each = 1.0 - torch.rand(tokens, device=device, generator=generator)
    sizes = (-each.log() * 7.5).long().clamp(max=127) + 1
    sizes[torch.rand(tokens, device=device, generator=generator) >= share] = 0
    drawn = torch.rand(int(sizes.sum()), dtype=torch.float64, device=device, generator=generator)
    offsets = F.pad(sizes.cumsum(0), (1, 0))
    return {"kept_ids": (vocab**drawn).long().clamp(max=vocab) - 1, "kept_offsets": offsets}


def draw_segments(tokens: int, count: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """Segment ids [tokens] in order, of lengths that differ by up to half their mean and are nowhere 0."""
    mean = tokens / count
    jitter = torch.rand(count - 1, device=device, generator=generator) - 0.5
    starts = ((torch.arange(1, count, device=device) + 0.5 * jitter) * mean).ceil().long()
    return torch.bucketize(torch.arange(tokens, device=device), starts, right=True)
