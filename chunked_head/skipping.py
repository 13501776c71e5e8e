"""Tiles of the softmax that hardly matter: what a tolerance means, and what a call says of what it skipped."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .metric_values import MetricValue
from .plans import Plan
from .sizes import Sizes

# Both from trained heads (benchmarks/NOTES.md has how, and what is still to be measured). What skipped tiles miss is
# estimated by their rows' masses times coefficients, squared, times how far a strip's rows of the weight lie around
# their mean, as a share of what all do; the root of the sum, over that of the targets' squares, is bounded.
# dhidden errs by up to 0.55 of the bound with the vocabulary as its BPE left it, 0.45 ordered by frequency, less by
# similarity, and on a head that has learned little and is shuffled 1.1
ERROR_PER_MISSED = 0.6
# dweight profits less from rows that are alike, and errs by up to 0.4 of what rows that are not would give dhidden
LEAST_WORTH = 0.16
DROPPED_MASS, KEPT_TILES = "dropped_mass", "kept_tiles"


@dataclass(frozen=True, eq=False)
class Skipped:
    """Of one call, each 0-d fp32 on the device."""

    moved: Tensor  # probability that went to mean rows, summed over tokens
    tokens: Tensor  # that count
    kept: Tensor  # tiles
    tiles: Tensor

    @classmethod
    def nothing(cls, device: torch.device) -> "Skipped":
        """Of a call that made no gradient."""
        zero, one = torch.zeros((), device=device), torch.ones((), device=device)
        return cls(zero, zero, one, one)

    @property
    def numbers(self) -> list[Tensor]:
        return [self.moved, self.tokens, self.kept, self.tiles]

    def metrics(self) -> dict[str, MetricValue]:
        """The mean probability per token that mean rows stood in for, and the share of tiles that were computed."""
        return {
            DROPPED_MASS: MetricValue("mean", self.moved, self.tokens),
            KEPT_TILES: MetricValue("mean", self.kept, self.tiles),
        }


def check_tolerance(tolerance: Any, deterministic: bool, parallel: bool) -> None:
    if tolerance is None:
        return
    if deterministic:
        raise ValueError(
            f"skip_tolerance={tolerance!r} does not go with deterministic=True: which tiles are skipped depends on all "
            "tokens that share them; use one of the two"
        )
    if parallel:
        raise ValueError(
            f"skip_tolerance={tolerance!r} does not go with parallel=: each rank would allow itself the whole error; "
            "use one of the two"
        )
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0.0 < tolerance < 1.0:
        raise ValueError(
            f"skip_tolerance must be a relative error of the gradients between 0 and 1, such as 4e-3, or None to skip "
            f"nothing, got {tolerance!r}"
        )


def check_names(labels: Iterable[str]) -> None:
    for label in labels:
        if label in (DROPPED_MASS, KEPT_TILES):
            raise ValueError(f"a metric is called {label!r}, as skip_tolerance's own is; give it another name=")


def check_road(tolerance: float | None, plan: Plan, again: bool, buffer: Tensor | None = None) -> None:
    """Raises where a call that asked for it could not skip anything. Computed ``again`` in backward it need not.
    ``buffer``: that the weight's gradient is added to."""
    if tolerance is None or again or plan.schedule == "loss only":
        return
    sizes = plan.sizes
    if sizes.store != "fast":
        raise ValueError(
            f"skip_tolerance={tolerance!r} needs 16-bit exponentials to skip tiles of, and this call keeps "
            f"{reason_of(sizes)}; use skip_tolerance=None"
        )
    if plan.schedule != "forward":
        raise ValueError(
            f"skip_tolerance={tolerance!r} needs gradients made along with the loss, and this call computes logits "
            f"again in backward ({plan.note}); use skip_tolerance=None"
        )
    if buffer is not None and buffer.data_ptr() % 16:
        raise ValueError(
            f"skip_tolerance={tolerance!r} writes where accumulate_into starts 16 bytes at a time, and it starts "
            f"{buffer.data_ptr() % 16} bytes behind such a place; pass a buffer that begins on 16 bytes, or "
            "skip_tolerance=None"
        )


def reason_of(sizes: Sizes) -> str:
    kept = {"relative": "16-bit relative logits", "logits": "whole logits"}[sizes.store]
    return (
        f"{kept}: the road of exponentials takes bfloat16 operands (here {str(sizes.dtype).removeprefix('torch.')}) "
        "on Hopper GPUs, and losses of log-probabilities without softcap or trained bias (docs/roads.md)"
    )
