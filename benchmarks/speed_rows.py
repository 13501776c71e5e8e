"""Our calls that `benchmarks.speed` times, with the options that change a step's time, and the floors under them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import measure, providers
from benchmarks.shapes import Operands, Shape
from chunked_head import linear_cross_entropy, linear_logprobs

SHAPES = (
    Shape(8192, 4096, 128256),
    Shape(16384, 4096, 128256),
    Shape(8192, 2048, 128256),
    Shape(8192, 2304, 256000),
    Shape(8192, 2880, 201088),
    Shape(8192, 1024, 151936),
)
PEERS = ("compile", *providers.PACKAGES)

ONE, TWO, THREE, SUMMED = "1 product", "2 products", "3 products", "3 products, add_"
FLOORS = (ONE, TWO, THREE, SUMMED)
IGNORED = -100


class Row(NamedTuple):
    """A call of ours, what its time is divided by, and the largest ratio that is accepted for each of SHAPES."""

    below: str  # a floor, or another row
    options: dict[str, Any]
    must: tuple[float, ...] = ()
    backward: bool = True
    half: bool = False  # half of the tokens, chosen by chance, are ignored
    into: bool = False  # the weight's gradient is added to a buffer
    logprobs: bool = False
    frozen: bool = False  # the weight takes no gradient


ROWS: dict[str, Row] = {
    "default": Row(THREE, {}, must=(1.02, 1.02, 1.05, 1.06, 1.05, 1.06)),
    "into": Row(SUMMED, {}, must=(1.06, 1.06, 1.07, 1.08, 1.07, 1.08), into=True),
    "half": Row("default", {}, half=True),
    "half-skipped": Row("default", {"skip_ignored": True}, must=(0.55,) * len(SHAPES), half=True),
    "256MiB": Row(THREE, {"memory_budget": "256MiB"}, must=(1.40,)),
    "loss": Row(ONE, {}, must=(1.03,), backward=False),
    "logprobs": Row(ONE, {}, backward=False, logprobs=True),
    "logprobs-frozen": Row(TWO, {}, must=(1.04, 1.04, 1.08, 1.08, 1.08, 1.08), logprobs=True, frozen=True),
    "unreduced-frozen": Row(TWO, {"reduction": "none"}, frozen=True),
}


def chosen(names: Sequence[str] | None) -> list[str]:
    """Return the named rows, or all, and the rows that their times are divided by."""
    needed = {name for one in names or ROWS for name in (one, ROWS[one].below)}
    return [name for name in ROWS if name in needed]


def must_of(name: str, shape: Shape) -> float | None:
    """Return the largest accepted ratio of a row at a shape, None where it has no bound."""
    return dict(zip(SHAPES, ROWS[name].must, strict=False)).get(shape)


def predict(name: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> dict[str, Any] | None:
    """The plan of such a call, from `chunked_head.plan`."""
    row = ROWS[name]
    options = {**dict(ROWS[name].options), "hidden_grad": row.backward, "weight_grad": row.backward and not row.frozen}
    ours = providers.Provider(name, "ours", linear_cross_entropy, options | {"accumulate_into": row.into})
    return providers.predict(ours, shape, dtype, device)


def half_ignored(target: Tensor) -> Tensor:
    """The targets with half of them, chosen by chance, set to the value that is ignored."""
    generator = torch.Generator(device=target.device).manual_seed(1)
    places = torch.randperm(len(target), device=target.device, generator=generator)[: len(target) // 2]
    return target.index_fill(0, places, IGNORED)


class Bench:
    """The operands of one shape, and the steps and floors that share them."""

    def __init__(self, operands: Operands) -> None:
        self.operands = operands
        self.half = Operands(operands.hidden, operands.weight, half_ignored(operands.target))

    @functools.cached_property
    def main_grad(self) -> Tensor:
        """The buffer [vocab, hidden] that gradients of the weight are added to, as Megatron makes it."""
        weight = self.operands.weight
        return torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32), requires_grad=False)

    def step(self, name: str, upstream: float = 1.0) -> measure.Step:
        """A row's step."""
        row, options = ROWS[name], dict(ROWS[name].options)
        if row.into:
            options |= {"accumulate_into": self.main_grad, "upstream": upstream}
        call: providers.Loss = functools.partial(linear_logprobs if row.logprobs else linear_cross_entropy, **options)
        operands = self.half if row.half else self.operands
        if row.frozen:
            operands = Operands(operands.hidden, operands.weight.detach(), operands.target)
            return measure.Step(lambda *given: call(*given).mean(), operands, upstream, row.backward)
        return measure.Step(call, operands, upstream, row.backward)

    def floors(self, names: Sequence[str], device: torch.device) -> dict[str, Callable[[], Any]]:
        """The named floors, which share their buffers."""
        measure.release(self.operands)  # the floor sizes its buffers by the free memory
        if SUMMED in names:
            self.main_grad.zero_()  # made before the other buffers are sized
        floor = measure.Floor(self.operands, device)

        def summed() -> None:
            floor()
            self.main_grad.add_(floor.d_weight)

        made: dict[str, Callable[[], Any]] = {
            ONE: functools.partial(floor, 1),
            TWO: functools.partial(floor, 2),
            THREE: functools.partial(floor, 3),
            SUMMED: summed,
        }
        return {name: made[name] for name in FLOORS if name in names}
