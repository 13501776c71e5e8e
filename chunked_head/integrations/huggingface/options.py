"""Options of ``patch_model``, checked before anything is changed."""

from collections.abc import Mapping, Sequence
from typing import Any

from ... import losses
from ...arithmetic.demand import needs_of
from ...core.options import choice, flag
from ...losses.base import Losses, Summand
from ...metrics import Metric
from ..frameworks import check_named

# options of how to compute; what to compute is the model's
OPTIONS = ("memory_budget", "chunk_tokens", "accumulate_dtype", "accumulate_into", "upstream", "skip_ignored",
           "deterministic", "backend")  # fmt: skip


def check_options(options: Mapping[str, Any]) -> None:
    """Raises for an option that is unknown or wrong for every head and batch."""
    check_named(options, OPTIONS, "; scale, softcap, bias and reduction are the model's own")


def check_choices(when: Any, logits: Any, strict: Any) -> None:
    choice("patch_model", "when", when, ("labels", "training", "always"))
    if logits is not None:
        choice("patch_model", "logits", logits, ("lazy",))
    flag("strict", strict)


def check_loss(loss: Losses | None, measured: Sequence[Metric]) -> None:
    """Raises for losses and metrics that need more than labels."""
    summands = [] if loss is None else [summand for _, summand in loss.terms]
    for summand in summands:
        if summand.token_weights is not None or summand.teacher is not None:
            raise ValueError(f"{summand.label} has token weights or a teacher, and a model's forward has labels alone")
    needing: list[Summand | Metric] = [*summands, *measured]
    for one in needing:
        if one.fields or one.scope != "token":
            needs = ", ".join(one.fields) or "segments"
            raise ValueError(
                f"{one.label} needs {needs}, and a model's forward has labels alone; call linear_loss on the model's "
                "hidden states"
            )
    # two of a name, or at too many temperatures
    needs_of(losses.cross_entropy() if loss is None else loss, measured, 1.0, 2)
