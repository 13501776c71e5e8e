"""TRL's trainers on this library's head: ``patch_trl()`` before a trainer computes its first loss, and nothing else.

TRL 1.16 computes the losses of all of its trainers from per-token statistics that two autograd functions make of
hidden states and the head's weight: ``ChunkedLogProbFunction`` (SFT, DPO, KTO, GRPO, RLOO and what derives from them)
and ``ChunkedDivergenceFunction`` (distillation). Ours take their place:

    from chunked_head.integrations.trl import patch_trl
    patch_trl(memory_budget="1GiB")
    SFTTrainer(...).train()

Values are TRL's, but for logits that ours does not round to 16 bits: statistics come from fp32 sums. What TRL decides
before the seam stays its own: which scale and cap a model's config names (``check_fused_head`` tells whether it found
all of them), that a sharded head is gathered.
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, Unpack

import torch
from torch import Tensor

from ...call.options import Execution
from ..frameworks import Framework, Place, check_named
from .functions import DivergenceSeam, LogProbSeam

KNOWN = "1.16"
OPTIONS = ("memory_budget", "chunk_tokens", "accumulate_dtype", "deterministic", "backend")
SEAMS: dict[Place, Any] = {  # of an autograd function, and what takes its place
    ("trl.trainer.utils", "_ChunkedLogProbFunction"): LogProbSeam,
    ("trl.trainer.distillation_trainer", "ChunkedDivergenceFunction"): DivergenceSeam,
}
TRL = Framework(
    "trl", KNOWN, "1.17", places={p: [*inspect.signature(seam.apply).parameters][1:] for p, seam in SEAMS.items()}
)


def seams(options: Execution) -> list[Any]:
    check_named(options, OPTIONS)
    return [seam(options) for seam in SEAMS.values()]


def patch_trl(**options: Unpack[Execution]) -> None:
    """Puts this library's head behind TRL's losses, for models and trainers made before the call too.

    Args:
        options: ``memory_budget``, ``chunk_tokens``, ``accumulate_dtype``, ``deterministic``, ``backend`` of every
            call, as in ``linear_logprobs``. A second ``patch_trl`` puts its options in their place.

    A weight that has another dtype than the hidden states (fp32 masters beside 16-bit activations without autocast, or
    ``cast_lm_head_to_fp32``) is cast in one piece, which the budget does not count.

    Raises:
        TypeError, ValueError: for an option that is wrong by itself.
        ImportError: TRL is not installed.
        RuntimeError: TRL is not a version whose functions are known, or they take other arguments than in that version;
            it says what differs. Nothing is changed then.
    """
    TRL.replace(*seams(options))


def unpatch_trl() -> None:
    """Gives TRL its functions back; without ``patch_trl`` before it, nothing happens.

    Raises:
        RuntimeError: somebody has replaced ours since.
    """
    TRL.give_back()


@contextlib.contextmanager
def patched_trl(**options: Unpack[Execution]) -> Iterator[None]:
    """``patch_trl(**options)`` for the length of a ``with`` block; what stood there before stands there after it."""
    with TRL.replaced(*seams(options)):
        yield


@torch.no_grad()
def check_fused_head(model: Any, input_ids: Tensor | None = None, temperature: float = 1.0) -> float:
    """Largest difference in nats of log-probabilities by TRL's fused head and by ``model``; raises for a large one.

    TRL reads a model's logit scale and cap from attributes of its config that it knows by name, and takes the output
    embedding for all of the head: of models that call them otherwise, or whose head is more than one product, it
    trains another distribution without a word. Once, after a trainer was made:

        check_fused_head(trainer.model, temperature=getattr(trainer, "temperature", 1.0))

    Args:
        model: what the trainer holds; its forward runs twice, in evaluation mode.
        input_ids: [batch, tokens] int64 to compare on; None: a few tokens from all over the vocabulary.
        temperature: that the trainer gave the fused head.

    Raises:
        RuntimeError: they differ by more than rounding; train with a trainer that computes logits, or report the model
            to TRL. Or no trainer of TRL's has taken the model, which then has no fused head.
    """
    device = next(model.parameters()).device
    if input_ids is None:
        vocab = model.config.get_text_config().vocab_size
        input_ids = torch.linspace(1, vocab - 1, 12, dtype=torch.float64, device=device).long().view(2, 6)
    training = model.training
    model.eval()
    try:
        fused = getattr(model(input_ids=input_ids, labels=input_ids, fused_lm_head=True), "log_probs", None)
        if fused is None:
            raise RuntimeError(
                f"the forward of {type(model).__name__} has no fused head: TRL's trainers put it there when they are "
                "made; make the trainer first, then check_fused_head(trainer.model)"
            )
        logits = model(input_ids=input_ids).logits
    finally:
        model.train(training)
    own = (logits[:, :-1].float() / temperature).log_softmax(-1)
    own = own.gather(-1, input_ids[:, 1:, None].to(own.device)).squeeze(-1)
    difference = (fused.to(own.device) - own).abs()
    # logits of 16 bits are rounded by 2^-8 of their size, and a log-probability with them
    allowed = (1e-3 if logits.dtype == torch.float32 else 3e-2) * (1.0 + own.abs())
    largest = float(difference.max())
    if not bool((difference <= allowed).all()):
        raise RuntimeError(
            f"TRL's fused head does not compute what {type(model).__name__} does: log-probabilities differ by up to "
            f"{largest:.3g} nats at temperature {temperature:g}; its config or its head has a scale, a cap or a layer "
            "that TRL does not know. Train it by logits (chunked_head.linear_logprobs has logit_scale, softcap, bias)"
        )
    return largest
