"""Targets drawn from real text: the demo's text, in the tokens of a BPE trained on it on the spot."""

import functools

import numpy as np
import torch
from torch import Tensor

from benchmarks import demo_data

BPE_VOCAB = 32_768  # what 4 million characters can fill; training it takes seconds


@functools.lru_cache(maxsize=4)
def _stream(bpe_vocab: int) -> Tensor:
    text = demo_data.load_text(None)
    return torch.from_numpy(demo_data.tokenize_text(text, bpe_vocab, context=1).training.astype(np.int64))


def text_targets(tokens: int, vocab: int, device: torch.device) -> Tensor:
    """The first tokens of the text, from the start again where it is too short, ids below `vocab` [tokens].

    A byte-level BPE has more than 256 ids: a smaller vocabulary gets their remainders.
    """
    stream = _stream(min(vocab, BPE_VOCAB))
    return stream[torch.arange(tokens) % len(stream)].remainder(vocab).to(device)
