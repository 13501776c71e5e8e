"""Options of losses and metrics as they should be, or an error that names the owner, the option and what came."""

from typing import Any

INFINITY = float("inf")
NUMBERS = (int, float)  # not ``int | float``, which torch.compile of torch 2.9 cannot take


def number(
    where: str, argument: str, value: Any, least: float = -INFINITY, most: float = INFINITY, open_: bool = False
) -> float:
    """A number in ``[least, most]``, or ``(least, most]`` where ``open_``, as a float."""
    right = isinstance(value, NUMBERS) and not isinstance(value, bool) and least <= value <= most
    if not right or (open_ and value == least):
        interval = f"{'(' if open_ else '['}{least:g}, {most:g}]"
        raise ValueError(f"{argument} of {where} must be a number in {interval}, got {value!r}")
    return float(value)


def choice(where: str, argument: str, value: Any, allowed: tuple[str, ...]) -> str:
    """One of several."""
    if value not in allowed:
        raise ValueError(f"{argument} of {where} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return value


def check_temperature(where: str, temperature: Any) -> None:
    if temperature is not None and not (type(temperature) in (int, float) and 0 < temperature < INFINITY):
        remedy = "; for T = 0 train on the argmax as the target instead" if temperature == 0 else ""
        raise ValueError(f"temperature of {where} must be a positive number, got {temperature!r}{remedy}")
