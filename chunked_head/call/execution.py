"""Options of a call, by keyword: what those mean that every function takes, and the checks of each by itself."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from ..core import checks
from ..core.groups import TokenParallel, VocabParallel
from ..core.options import flag
from ..plan.planner import Request
from ..stores import check_name
from ..stores.gradient_buffer import check_kind

# what can be said of an option before there is a call
CHECKS: dict[str, Callable[[Any], Any]] = {
    "ignore_index": checks.check_ignore_index,
    "softcap": checks.check_softcap,
    "logit_scale": lambda value: checks.check_number("logit_scale", value, -math.inf, math.inf),
    "temperature": checks.check_temperature,
    "shift": lambda value: checks.check_int("shift", value, 0),
    "memory_budget": lambda value: Request(memory_budget=value),
    "chunk_tokens": lambda value: Request(chunk_tokens=value),
    "accumulate_dtype": lambda value: Request(accumulate_dtype=value),
    "backend": check_name,
    "accumulate_into": check_kind,
    "skip_ignored": lambda value: check_skip_ignored(value),
    "deterministic": functools.partial(flag, "deterministic"),
    "vocab_size": lambda value: checks.check_int("vocab_size", 1 if value is None else value, 1),
    "parallel": lambda value: check_parallel(value),
    "inplace": functools.partial(flag, "inplace"),
    "reduction": checks.check_reduction,
    "normalizer": functools.partial(checks.check_factor, "normalizer"),
    "upstream": functools.partial(checks.check_factor, "upstream"),
    "label_smoothing": lambda value: checks.check_number("label_smoothing", value, 0.0, 1.0),
    "z_loss": lambda value: checks.check_number("z_loss", value, 0.0, math.inf),
    "class_weights": lambda value: checks.check_tensor("class_weights", value, optional=True),
    "token_weights": lambda value: checks.check_tensor("token_weights", value, optional=True),
}


def check_options(options: Mapping[str, Any]) -> None:
    """Raises what is wrong with options of a head by themselves, whatever tensors they will come with."""
    for name, value in options.items():
        CHECKS[name](value)


class OptionsModule(nn.Module):
    """A module whose options are its attributes, as those of what it stands for: one that is changed counts."""

    names: tuple[str, ...]

    def keep(self, options: Mapping[str, Any]) -> None:
        self.names = tuple(options)
        for name, value in options.items():
            setattr(self, name, value)

    def options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.names}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options().items())


def check_skip_ignored(skip_ignored: bool | str) -> None:
    if not (isinstance(skip_ignored, bool) or (isinstance(skip_ignored, str) and skip_ignored == "wait")):
        raise ValueError(f'skip_ignored must be True, False or "wait", got {skip_ignored!r}')


def check_parallel(parallel: VocabParallel | TokenParallel | None) -> None:
    if parallel is not None and not isinstance(parallel, VocabParallel | TokenParallel):
        raise TypeError(f"parallel must be a VocabParallel, a TokenParallel or None, got {type(parallel).__name__}")


class Execution(TypedDict, total=False):
    """How a call on hidden states runs, and what of the head it holds: keywords of every such function.

    Attributes:
        memory_budget: bytes, or a string such as "512MiB", that everything beside the gradients (and under autocast the
            cast weight) may take. None: 640 MiB, or what a chunk of 2048 tokens takes where its logits alone, in the
            operands' dtype and with those of a teacher that gives hidden states, are more; and where that would mean
            more than 8 chunks of a 16-bit weight's gradient, an fp32 accumulator of it on top. On each of several ranks
            that share the vocabulary 640 MiB over the square root of their number, or of 16, where that leaves chunks
            of 2048 tokens. See ``chunked_head.plan``.
        chunk_tokens: at most so many tokens in a chunk (equal chunks), instead of what the budget gives.
        accumulate_dtype: of the weight's gradient over chunks: None (float32 where the budget holds it, else the
            weight's own over few chunks), ``torch.float32`` or the weight's dtype. Under ``torch.compile`` 16-bit
            gradients wait for the upstream gradient in float32 where it is named here, and else in their own dtype,
            which an upstream gradient that is no power of two rounds again.
        accumulate_into: a contiguous [vocab, hidden] tensor that the weight's gradient is added to, or the name of the
            weight's attribute that is one (``"grad"``, ``"main_grad"``), looked up at each call. float32, or float64
            for a float64 weight. The gradient is then held nowhere else, and backward gives ``weight`` none. It is
            added in the forward pass, and you promise one backward whose upstream gradient is ``upstream``, or 1: with
            any other, ``hidden``'s gradient and the buffer become nan. The buffer must not be cleared between the two:
            that would lose the gradient unnoticed. Where gradients are made in backward (``reduction="none"``, a second
            backward, an activation checkpoint's) they are added there, whatever the upstream gradient is. Without
            gradients, or with a frozen weight, nothing is written. One that does not begin on 16 bytes takes all
            tokens' product, also under ``skip_ignored``.
        skip_ignored: True leaves tokens that do not count out of the matmuls, and the host waits for nothing (16-bit
            operands on GPUs that docs/gpus.md lists, and anything on a CPU; ValueError elsewhere). Where every token
            counts it costs next to nothing on Hopper, but up to 5 % where BLAS's product for the weight's gradient is
            better than ours (see ``plan``); on other GPUs our products for the gradients are slower than BLAS's, which
            makes all rows. ``"wait"`` does it for any operands and waits for their number, which a CUDA graph cannot.
            Hidden states and their gradient are copied. Losses see the tokens that count first, in their order.
        deterministic: bit-identical from run to run, and neither a token's log-probability nor its row of ``hidden``'s
            gradient depends on the other tokens or their number: one tile for every size, no product in parts. Values
            per token (of ``linear_logprobs``, and losses with ``reduction="none"``) do not depend either on how many
            ranks share the vocabulary: they are sums of eight blocks of it, which ranks hold whole (docs/inference.md).
            For bfloat16 on GPUs of docs/gpus.md, ValueError elsewhere (BLAS chooses by the number of rows), for top_k,
            and for losses that sum over segments on a GPU.
        vocab_size: the number of ids, where the last rows of ``weight`` are padding. None: all its rows.
        backend: ``"triton"`` or ``"torch"``; None: the device's own.
        parallel: what ranks of a process group share; each function says what that means for its result.
    """

    memory_budget: int | str | None
    chunk_tokens: int | None
    accumulate_dtype: torch.dtype | None
    accumulate_into: Tensor | str | None
    skip_ignored: bool | str
    deterministic: bool
    vocab_size: int | None
    backend: str | None
    parallel: VocabParallel | TokenParallel | None


class Head(Execution, total=False):
    """What makes logits of a head's products too, as ``linear_cross_entropy`` says: keywords of all its functions."""

    bias: Tensor | None
    ignore_index: int
    softcap: float | None
    logit_scale: float
    shift: int


class PerTokenOptions(Head, total=False):
    """Keywords of ``linear_logprobs`` beside what it returns."""

    temperature: float | Tensor  # [...], indexed like the target
    mask: Tensor | None
    kept_ids: Tensor | None
    kept_offsets: Tensor | None
    kept_everywhere: bool
    candidates: Tensor | None
    candidate_bias: Tensor | None
