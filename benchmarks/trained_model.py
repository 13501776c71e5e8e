"""A small causal language model with an untied head, trained for some minutes: what `trained_head` measures on."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from benchmarks.demo_model import INIT_STD, Decoder, ModelConfig

WARM_UP = 100  # steps
FINAL_SHARE = 0.1  # of the peak learning rate, at the end of the cosine
Ids = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Training:
    model: ModelConfig
    steps: int
    batch: int  # windows of the model's context
    learning_rate: float = 1e-3
    seed: int = 7

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.model.context


@dataclass
class Trained:
    model: Decoder
    losses: list[float]
    seconds: float


Head = Callable[[Tensor, Tensor, Tensor, int], Tensor]  # hidden, weight, target, step -> loss


def untied(config: ModelConfig, device: torch.device) -> Decoder:
    model = Decoder(config)
    model.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)
    nn.init.normal_(model.lm_head.weight, std=INIT_STD)
    return model.to(device)


def train(training: Training, tokens: Ids, head: Head, device: torch.device, seconds: float = math.inf) -> Trained:
    """AdamW, bf16 autocast over fp32 weights, cosine learning rate over the steps; stops after `seconds`."""
    torch.manual_seed(training.seed)
    model = untied(training.model, device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=training.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda"
    )
    stream = torch.from_numpy(tokens.astype(np.int32)).to(device)
    generator = np.random.default_rng(training.seed)
    losses: list[Tensor] = []
    start = time.perf_counter()
    for step in range(training.steps):
        share = min(1.0, (step + 1) / WARM_UP)
        share *= FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * step / training.steps))
        for group in optimizer.param_groups:
            group["lr"] = training.learning_rate * share
        starts = generator.integers(0, len(tokens) - training.model.context - 1, size=training.batch)
        windows = windows_at(stream, starts, training.model.context)
        with torch.autocast(device.type, torch.bfloat16):
            hidden = model(windows[:, :-1])
            loss = head(hidden.flatten(0, 1), model.lm_head.weight, windows[:, 1:].flatten(), step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if step % 50 == 49:
            losses[-1].item()  # the host must not run far ahead, or the time is not the device's
            if time.perf_counter() - start > seconds:
                break
    return Trained(model, torch.stack(losses).tolist(), time.perf_counter() - start)


def windows_at(stream: Tensor, starts: npt.NDArray[np.int64], context: int) -> Tensor:
    """Windows of context + 1 tokens [windows, context + 1] int64."""
    at = torch.from_numpy(starts).to(stream.device)[:, None] + torch.arange(context + 1, device=stream.device)
    return stream[at].long()


@torch.no_grad()
def held_out_states(model: Decoder, tokens: Ids, count: int, context: int) -> tuple[Tensor, Tensor]:
    """Hidden states [count, hidden] in bf16 and targets [count] of evenly spaced held-out windows."""
    device = model.lm_head.weight.device
    stream = torch.from_numpy(tokens.astype(np.int32)).to(device)
    number = -(-count // context)
    starts = np.linspace(0, len(tokens) - context - 2, number).astype(np.int64)
    windows = windows_at(stream, starts, context)
    with torch.autocast(device.type, torch.bfloat16):
        hidden = torch.cat([model(piece[:, :-1]) for piece in windows.split(8)])
    return hidden.flatten(0, 1)[:count].to(torch.bfloat16), windows[:, 1:].flatten()[:count].contiguous()


@torch.no_grad()
def held_out_loss(model: Decoder, tokens: Ids, count: int, context: int) -> float:
    """Mean loss in nats of `count` evenly spaced held-out tokens, by fp32 logits of bf16 operands."""
    hidden, target = held_out_states(model, tokens, count, context)
    weight = model.lm_head.weight.to(torch.bfloat16).float()
    total = 0.0
    for rows, ids in zip(hidden.split(4096), target.split(4096), strict=True):
        total += float(nn.functional.cross_entropy(rows.float() @ weight.T, ids, reduction="sum"))
    return total / len(target)
