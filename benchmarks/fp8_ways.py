"""Names of the calls that fp8's benchmarks measure, and what a user passes for them."""

from typing import Any

import torch

BF16, LOGITS, FP8 = WAYS = "bf16", "fp8 logits", "fp8"
KEPT = ", weight kept"
PLAIN, HIDDEN = "plain", "fp8, quantise(hidden=...)"
CROSS_ENTROPY, FROZEN, LOGPROBS = "cross-entropy", "cross-entropy, frozen head", "log-probabilities"


def options_of(way: str, device: torch.device) -> dict[str, Any]:
    """Options of one of WAYS. ``deterministic=True``, which runs on a GPU alone, is how fp8 logits come with gradients
    of 16-bit operands; without a GPU all gradients are of such."""
    options: dict[str, Any] = {} if way == BF16 else {"precision": "fp8"}
    return options | ({"deterministic": True} if way == LOGITS and device.type == "cuda" else {})
