"""Steps of a model between its head and its loss, in the terms of this library."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ....losses.base import Losses
from .virtual import Virtual


@dataclass(frozen=True)
class Tail:
    """``x = softcap * tanh(logit_scale * (hidden @ weight[:vocab].T + bias) / softcap)``, each part where asked.

    ``biases``: vectors over the vocabulary and the factor that each had when it was added: to be divided by it.
    """

    logit_scale: float = 1.0
    softcap: float | None = None
    vocab: int | None = None
    biases: tuple[tuple[Tensor, float], ...] = ()

    def bias(self, given: Tensor | None, weight: Tensor) -> Tensor | None:
        """The bias of the cropped head [vocab], differentiable; ``given``: the module's."""
        count = weight.shape[0] if self.vocab is None else self.vocab
        total = None if given is None else given[:count]
        for vector, scale in self.biases:
            part = vector[:count] if scale == 1 else vector[:count] / scale
            total = part if total is None else total + part
        return total

    @property
    def numbers(self) -> tuple[float, float | None, int | None, int]:
        """Scale, softcap, cropped vocabulary and number of biases, without tensors."""
        return self.logit_scale, self.softcap, self.vocab, len(self.biases)

    def __str__(self) -> str:
        return in_words(*self.numbers)


class Rehearsed(NamedTuple):
    """A loss of hidden states without numbers, noted instead of made. ``weight``: None where the head's own forward
    would run, some rows at a time. ``loss``: None where it is made of log-probabilities. ``logits``: their dtype where
    the loss takes them. ``made_at``: where the model calls it."""

    tail: Tail
    hidden: Tensor
    weight: Tensor | None
    bias: Tensor | None
    autocast: torch.dtype | None
    logits: torch.dtype
    loss: Losses | None = None
    reduction: str = "none"
    made_at: str = ""


def in_words(logit_scale: float, softcap: float | None, vocab: int | None, biases: int) -> str:
    """A tail's numbers in words."""
    parts = [f"scale {logit_scale:g}", f"softcap {softcap:g}" if softcap else "no softcap"]
    parts += [f"{biases} added vector(s)"] if biases else []
    parts += [f"vocabulary cropped to {vocab}"] if vocab is not None else []
    return ", ".join(parts)


def tail_of(logits: Virtual) -> Tail | None:
    """The tail that the steps make; None where they make none."""
    before, after, capped = 1.0, 1.0, False  # factors before and after the tanh
    vocab, biases = None, []
    for name, argument in logits.steps:
        if name in ("mul", "div"):
            if argument == 0:
                return None
            by = argument if name == "mul" else 1.0 / argument
            before, after = (before, after * by) if capped else (before * by, after)
        elif name == "tanh":
            if capped:
                return None
            capped = True
        elif name == "crop":
            vocab = argument
        elif name == "log_softmax" or (name == "add" and capped):
            return None
        elif name == "add":
            if argument.dtype != logits.hidden.dtype and logits.source.autocast is None:
                return None  # a head's bias is of its weight's dtype
            biases.append((argument, before))
    if not capped:
        return Tail(before, None, vocab, tuple(biases))
    if after <= 0:
        return None
    return Tail(before * after, after, vocab, tuple(biases))
