"""PEFT's LoRA on the head itself under TRL's trainers, which refuse it: they multiply by the head's own weight alone.

Their constructors let pass what is understood here, their models' fused forward says whose head is computed, and the
seam computes it by the adapter's own forward, some rows at a time, and again in backward: the base weight is neither
merged nor copied, dropout, scaling and active adapters are PEFT's own. Where adapters are disabled (the reference) the
head is its weight again.
"""

import functools
import sys
import types
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from ..logprobs_on_logits import logits_logprobs
from ..planner import Request
from .by_chunks import in_chunks, row_bytes, rows_at_once
from .hung_forward import hides
from .lazy_head import LazyHead
from .source import is_shard

# the model whose fused forward runs, of those with an adapter on the head
FORWARDS: ContextVar[Any] = ContextVar("chunked_head_trl_forward", default=None)


def is_adapted(head: Any) -> bool:
    """Whether PEFT has put an adapter on a head."""
    peft = sys.modules.get("peft.tuners.tuners_utils")
    return peft is not None and isinstance(head, peft.BaseTunerLayer)


def kind_of(module: Any) -> type:
    """Its class, or the one before ``patch_model``."""
    return module.base if isinstance(module, LazyHead) else type(module)


def refused(layer: Any) -> str | None:
    """Why an adapter on the head is not served; None for LoRA and DoRA on a plain matrix."""
    from peft.tuners.lora.layer import Linear
    from peft.tuners.lora.variants import DoraLinearVariant

    if kind_of(layer) is not Linear:
        return f"is a {kind_of(layer).__module__}.{kind_of(layer).__qualname__}"
    for name, variant in layer.lora_variant.items():
        kind = variant if isinstance(variant, type) else type(variant)
        if kind is not DoraLinearVariant:
            return f"is LoRA's variant {kind.__name__} ({name!r})"
    base = layer.base_layer
    weight = getattr(base, "weight", None)
    if kind_of(base) is not nn.Linear or not (type(weight) in (nn.Parameter, Tensor) or is_shard(weight)):
        return f"is on a {kind_of(base).__qualname__} whose weight is a {type(weight).__name__}"
    if hides(layer) or hides(base):
        return "has a forward that was put there on the instance (cast_lm_head_to_fp32, a device_map)"
    return None


def check_served(layer: Any) -> None:
    reason = refused(layer)
    if reason is not None:
        raise ValueError(
            f"the adapter on `lm_head` {reason}, and patch_trl serves PEFT's lora.Linear, plain or DoRA, on an "
            "nn.Linear; remove 'lm_head' from target_modules, or train the head whole by modules_to_save=['lm_head']"
        )


class PassesServed:
    """In the place of ``BaseTunerLayer`` in a trainer's module, where the one use of it is to refuse an adapter on the
    head: no instance of it is one that is served, and of others an error says why."""

    def __init__(self, original: type):
        self.original = original

    def __instancecheck__(self, head: Any) -> bool:
        if isinstance(head, self.original):
            check_served(head)
        return False


class FusesAdapted:
    """In the place of ``add_fused_lm_head`` in a trainer's module: a model with an adapter on the head says that it is
    its forward that runs."""

    def __init__(self, original: Any):
        self.original = original

    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        adapted = is_adapted(model.get_output_embeddings())
        if adapted:
            if kwargs.get("cast_lm_head_to_fp32"):
                raise ValueError(
                    "cast_lm_head_to_fp32=True puts another forward in the place of the head's, whose adapter would be "
                    "ignored; remove 'lm_head' from target_modules, or set cast_lm_head_to_fp32=False and load the "
                    "model again"
                )
            check_served(model.get_output_embeddings())
        self.original(model, *args, **kwargs)
        if adapted:
            model.forward = types.MethodType(saying_so(model.forward.__func__), model)


def saying_so(fused: Any) -> Any:
    """A fused forward during which ``FORWARDS`` names its model."""

    @functools.wraps(fused)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("fused_lm_head"):
            return fused(self, *args, **kwargs)
        check_patched()
        before = FORWARDS.set(self)
        try:
            return fused(self, *args, **kwargs)
        finally:
            FORWARDS.reset(before)

    return forward


def check_patched() -> None:
    from trl.trainer import utils

    from .trl_functions import LogProbSeam

    if not isinstance(utils._ChunkedLogProbFunction, LogProbSeam):
        raise RuntimeError(
            "this model has an adapter on its head, which TRL's own functions ignore, and patch_trl was taken back; "
            "call patch_trl again before its trainer runs"
        )


def adapted_head(weight: Tensor) -> Any:
    """The head that computes in the place of ``weight``; None where that is all there is to it.

    Raises:
        ValueError, RuntimeError: the head has an adapter that is active and not served.
    """
    model = FORWARDS.get()
    head: Any = None if model is None else model.get_output_embeddings()
    if not is_adapted(head):
        return None
    check_served(head)
    if head.disable_adapters:
        if head.merged:
            head.unmerge()  # as its forward does
        return None
    taken = hasattr(head, "_is_fsdp_managed_module")  # FSDP1's
    for name, parameter in head.named_parameters():
        if taken or hasattr(parameter, "ds_id") or is_shard(parameter):
            raise RuntimeError(
                f"an adapter on the head does not go with parameters that FSDP or DeepSpeed's ZeRO-3 takes apart, and "
                f"the head's {name} is such a one; use DDP or ZeRO-2, or remove 'lm_head' from target_modules"
            )
    if weight is not head.weight:
        raise RuntimeError(
            "TRL computes with another weight than that of its model's head, which has an adapter; what made it so "
            "(a hook, a wrapper of the model) is not understood: remove 'lm_head' from target_modules"
        )
    return head


def state_of(head: Any) -> tuple[Any, ...]:
    """What decides which adapters its forward computes."""
    return bool(head.disable_adapters), tuple(head.active_adapters), tuple(head.merged_adapters), head.training


def adapted_logprobs(head: Any, request: Request, hidden: Tensor, targets: Tensor, **options: Any) -> list[Any]:
    """``logits_logprobs`` of ``head(hidden)`` [tokens, vocab] for each chunk; ``options``: its own."""
    rows = chunk_of(request, head.weight.shape[0])

    def part(hidden: Tensor, targets: Tensor, before: list[Any]) -> Any:
        if not before:
            before.append(state_of(head))
        elif before[0] != state_of(head):
            raise RuntimeError(
                f"the head's adapters (disabled, active, merged, training) were {before[0]} in the forward pass and "
                f"are {state_of(head)} in backward, which computes them again; change them after backward"
            )
        return logits_logprobs(head(hidden), targets, **options)

    return in_chunks(part, rows, hidden, targets)


def chunk_of(request: Request, columns: int) -> int:
    """Rows of a chunk within the request."""
    if request.accumulate_dtype is not None:
        raise ValueError(
            f"patch_trl(accumulate_dtype={request.accumulate_dtype}) does not go with an adapter on the head, whose "
            "gradients autograd adds up in their own dtype; leave it None"
        )
    most = request.budget // row_bytes(columns) if request.explicit else rows_at_once(columns)
    rows = most if request.chunk_tokens is None else request.chunk_tokens
    if rows < 1 or (request.explicit and rows > most):
        raise ValueError(
            f"memory_budget must hold {max(rows, 1)} rows of the logits of a head with an adapter, "
            f"{row_bytes(columns) * max(rows, 1)} bytes, got {request.memory_budget!r}; raise it or lower chunk_tokens"
        )
    return rows
