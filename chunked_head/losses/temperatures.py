"""Options of the losses of a teacher: temperatures and their square."""

import math
from typing import Any

from .base import bound, flag


def positive(kind: str, argument: str, value: Any) -> float:
    value = bound(kind, argument, value)
    if not 0 < value < math.inf:
        remedy = "; for T = 0 train on the teacher's argmax as the target" if "temperature" in argument else ""
        raise ValueError(f"{argument} of losses.{kind} must be a positive number, got {value:g}{remedy}")
    return value


def squared(kind: str, temperature: Any, t_squared: bool) -> float:
    """What ``t_squared`` multiplies the values by."""
    if not flag(kind, "t_squared", t_squared):
        return 1.0
    if temperature is None:
        raise ValueError(f"t_squared of losses.{kind} needs the loss's own temperature; pass temperature=")
    return positive(kind, "temperature", temperature) ** 2
