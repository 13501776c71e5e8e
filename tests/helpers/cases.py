"""The list of calls that every backend is held to, and their inputs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from budget import assert_outcome
from oracle import reference as oracle
from tiers import tier
from torch import Tensor

from chunked_head import linear_cross_entropy, reference
from chunked_head.core.gpus import run_as
from chunked_head.core.tiles import Tile
from chunked_head.stores import backend_of as backend_of

Options = dict[str, Any]


class Place(NamedTuple):
    """A backend on a device."""

    backend: str
    device: str


# on a GPU nothing is interpreted, so the interpreter's place is there only without one, as a GPU's are only on one
TORCH_CPU = pytest.param(Place("torch", "cpu"), id="torch-cpu")
TRITON = [] if torch.cuda.is_available() else [pytest.param(Place("triton", "cpu"), id="triton-interpreted")]
GPU = [
    pytest.param(Place(backend, "cuda"), id=f"{backend}-cuda", marks=pytest.mark.gpu)
    for backend in ("triton", "torch")
    if torch.cuda.is_available()
]
PLACES = [TORCH_CPU, *TRITON, *GPU]
# the interpreter runs a program for each row, and its tiles have 32
ROWS, CHUNK, FEW = (253, 128, 60) if torch.cuda.is_available() else (69, 32, 36)
HALVES = (torch.bfloat16, torch.float16)
# of matmuls that read by the tensor copy engine, and of those that read through pointers
TILES = list(dict.fromkeys([run_as(name).logits for name in ("sm_90", "sm_100", "sm_80")]))
PRODUCT_TILES = [run_as("sm_90").product, run_as("sm_80").product]


def named(tile: Tile) -> str:
    return f"{tile.block_m}x{tile.block_n}x{tile.block_k}" + ("" if tile.described else "-pointers")


@dataclass(frozen=True)
class Inputs:
    """Tensors and options of a call. ``schedule``: options that only the library has, and the oracle has not."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    options: Options
    schedule: Options = field(default_factory=dict)

    def to(self, dtype: torch.dtype) -> "Inputs":
        """The same call with operands in another dtype, detached from their graph."""

        def cast(name: str, value: Any) -> Any:
            return value.detach().to(dtype) if name == "bias" else value

        options = {name: cast(name, value) for name, value in self.options.items()}
        return Inputs(self.hidden.detach().to(dtype), self.weight.detach().to(dtype), self.target, options)


@dataclass(frozen=True)
class Case:
    """Sizes and options; options that are functions make their tensor from (inputs, generator)."""

    name: str
    leading: tuple[int, ...] = (ROWS,)
    hidden: int = 123
    vocab: int = 507
    options: Options = field(default_factory=dict)
    schedule: Options = field(default_factory=lambda: {"chunk_tokens": CHUNK})
    ignored: float = 0.2
    spread: float = 2.0  # standard deviation of the logits
    exact: bool = False  # operands are small integers: every order of summation gives the same logits

    def inputs(self, dtype: torch.dtype, device: str) -> Inputs:
        made = torch.Generator().manual_seed(7)
        hidden = torch.randn(*self.leading, self.hidden, generator=made)
        weight = torch.randn(self.vocab, self.hidden, generator=made) * self.spread / self.hidden**0.5
        if self.exact:
            hidden, weight = hidden.round(), weight.round()
        target = torch.randint(0, self.vocab, self.leading, generator=made)
        ignore_index = self.options.get("ignore_index", -100)
        target = target.masked_fill(torch.rand(self.leading, generator=made) < self.ignored, ignore_index)
        options = {
            key: value(self, made).to(device, dtype if key == "bias" else torch.float32) if callable(value) else value
            for key, value in self.options.items()
        }
        return Inputs(
            hidden.to(device, dtype), weight.to(device, dtype), target.to(device), options, dict(self.schedule)
        )


def per_token(case: Case, made: torch.Generator) -> Tensor:
    return torch.rand(case.leading, generator=made) * 2.0


def per_class(case: Case, made: torch.Generator) -> Tensor:
    return torch.rand(case.vocab, generator=made) + 0.1


def bias(case: Case, made: torch.Generator) -> Tensor:
    return torch.randn(case.vocab, generator=made)


def scalar(value: float) -> Callable[[Case, torch.Generator], Tensor]:
    return lambda case, made: torch.tensor(value)


SINGLE: dict[str, Options] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "bias": {"bias": bias},
    "class-weights": {"class_weights": per_class},
    "token-weights": {"token_weights": per_token},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "softcap": {"softcap": 3.0},
    "logit-scale": {"logit_scale": 0.37},
    "shift": {"shift": 1},
    "normalizer": {"normalizer": 1000.0},
    "normalizer-tensor": {"normalizer": scalar(321.0)},
    "ignore-index": {"ignore_index": 5},
    "ignore-negative": {"ignore_index": -1},
}
PAIRS: dict[str, Options] = {
    "smoothing+class-weights": {"label_smoothing": 0.2, "class_weights": per_class},
    "smoothing+softcap": {"label_smoothing": 0.1, "softcap": 4.0},
    "smoothing+z-loss": {"label_smoothing": 0.1, "z_loss": 1e-2},
    "smoothing+none": {"label_smoothing": 0.1, "reduction": "none"},
    "softcap+scale+bias": {"softcap": 4.0, "logit_scale": 1.5, "bias": bias},
    "z-loss+class-weights": {"z_loss": 1e-2, "class_weights": per_class},
    "z-loss+token-weights+none": {"z_loss": 1e-2, "token_weights": per_token, "reduction": "none"},
    "bias+none": {"bias": bias, "reduction": "none"},
    "class-weights+normalizer": {"class_weights": per_class, "normalizer": 77.0},
    "token-weights+shift": {"token_weights": per_token, "shift": 2},
    "shift+none": {"shift": 1, "reduction": "none"},
}
EVERYTHING: Options = {
    "bias": bias, "class_weights": per_class, "token_weights": per_token, "label_smoothing": 0.1, "z_loss": 1e-2,
    "softcap": 5.0, "logit_scale": 0.8, "shift": 1,
}  # fmt: skip

OPTION_CASES = [
    # hidden 123 cannot be described to the tensor copy engine, 64 can: both stores of the buffer are seen
    *(Case(f"{name}-h{hidden}", (3, 23), hidden, 507, options, {"chunk_tokens": 32})
      for name, options in (SINGLE | PAIRS).items() for hidden in (123, 64)),
    Case("everything", (3, 29), 64, 507, EVERYTHING, {"chunk_tokens": 32}),
    Case("everything-none", (3, 29), 64, 507, EVERYTHING | {"reduction": "none"}, {"chunk_tokens": 32}),
]  # fmt: skip
SIZE_CASES = [
    Case("odd", (ROWS,), 123, 507),
    Case("odd-h64", (ROWS,), 64, 507),
    Case("one-chunk", (ROWS,), 64, 507, schedule={}),
    Case("one-row", (1,), 64, 507, ignored=0.0),
    Case("one-row-odd", (1,), 3, 5, ignored=0.0),
    Case("0-d", (), 16, 33, ignored=0.0),
    Case("ragged", (2, 67), 64, 131, schedule={"chunk_tokens": 128}),
    Case("even-vocabulary", (70,), 64, 512),
    Case("vocabulary-1", (9,), 8, 1, exact=True),
    Case("vocabulary-50257", (5,), 16, 50257),
    Case("vocabulary-128256", (5,), 16, 128256),
    Case("small-budget", (200,), 64, 507, schedule={"memory_budget": 250_000}),
    Case("peaked", (65,), 64, 507, spread=30.0),
    Case("four-dimensions", (2, 3, 5, 2), 16, 65),
]
CASES = [*OPTION_CASES, *SIZE_CASES]
# options of the fast path, which only bf16 takes
FAST_OPTIONS = {"reduction", "class_weights", "token_weights", "z_loss", "logit_scale", "shift", "normalizer"}


def interpreted_too(case: Case, dtype: torch.dtype) -> bool:
    """True for a case and dtype that the interpreter runs too. It is slow, so each option runs once per store, and a
    large vocabulary in fp32 only. ``test_gradients.test_fp16_keeps_small_probabilities`` has many strips in fp16."""
    if case in OPTION_CASES:
        path = torch.bfloat16 if case.options.keys() <= FAST_OPTIONS else torch.float16
        return dtype == (path if case.hidden == 64 else torch.float32)
    return case.vocab < 50000 or dtype == torch.float32


def combinations() -> list:
    """Parameters (case, dtype, place). The dtypes take turns; ``--all`` runs every dtype."""
    found = []
    for place in PLACES:
        for i, case in enumerate(CASES):
            for j, dtype in enumerate((torch.float32, *HALVES)):
                interpreted = place.id == "triton-interpreted"
                if interpreted and not interpreted_too(case, dtype):
                    continue
                name = f"{case.name}-{str(dtype)[6:]}-{place.id}"
                param = pytest.param(case, dtype, place.values[0], marks=place.marks, id=name)
                always = dtype == torch.bfloat16 and place.id == "triton-cuda"
                found += tier(param, always or i % 3 == j or (interpreted and case not in SIZE_CASES))
    return found


class Outcome(NamedTuple):
    """Loss and gradients of a call under an upstream gradient."""

    loss: Tensor
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None


def upstream_like(loss: Tensor) -> Tensor:
    """A fixed random upstream gradient, the same for every dtype."""
    made = torch.Generator().manual_seed(11)
    return (torch.rand(loss.shape, generator=made) + 0.25).to(loss.device, loss.dtype)


def run(function: Callable[..., Tensor], inputs: Inputs, given_grad: Tensor | None = None, **extra: Any) -> Outcome:
    """Calls ``function`` and differentiates its result. ``given_grad``: upstream gradient; None: ``upstream_like``."""
    hidden, weight = (t.detach().clone().requires_grad_() for t in (inputs.hidden, inputs.weight))
    options = dict(inputs.options)
    given = [hidden, weight]
    if "bias" in options:
        options["bias"] = options["bias"].detach().clone().requires_grad_()
        given.append(options["bias"])
    loss = function(hidden, weight, inputs.target, **options, **extra)
    grads = torch.autograd.grad(loss, given, upstream_like(loss) if given_grad is None else given_grad.to(loss.dtype))
    return Outcome(loss.detach(), grads[0], grads[1], grads[2] if len(grads) > 2 else None)


def run_ours(inputs: Inputs, place: Place, given_grad: Tensor | None = None, **extra: Any) -> Outcome:
    return run(linear_cross_entropy, inputs, given_grad, backend=place.backend, **(inputs.schedule | extra))


def run_reference(inputs: Inputs, dtype: torch.dtype, given_grad: Tensor | None = None) -> Outcome:
    """The oracle in ``dtype``: in float64 ``chunked_head.reference`` in chunks and shards if it has the options, else
    full logits. The error of full logits in another dtype is the budget."""
    inputs = inputs.to(dtype)
    options = dict(inputs.options)
    if dtype != torch.float64 or "shift" in options or options.get("reduction") == "none":
        return run(oracle.linear_cross_entropy, inputs, given_grad)
    if "token_weights" in options:
        options["token_weights"] = options["token_weights"].flatten()
    smoothed = partial(reference.cross_entropy, label_smoothing=options.pop("label_smoothing", 0.0))
    mix = {"ce": (1.0, smoothed), "z": (options.pop("z_loss", 0.0), reference.z_loss)}
    hidden, target = inputs.hidden.reshape(-1, inputs.hidden.shape[-1]), inputs.target.flatten()
    out = reference.linear_loss(hidden, inputs.weight, target, mix, chunk_tokens=50, shards=3, **options)
    upstream = (upstream_like(out.loss) if given_grad is None else given_grad).to(out.loss.dtype)
    grads = [None if g is None else g * upstream for g in (out.dhidden, out.dweight, out.dbias)]
    return Outcome(out.loss, grads[0].view_as(inputs.hidden), *grads[1:])


def hold(case: Case, dtype: torch.dtype, place: Place) -> None:
    """Checks a call against the budget, which full logits in the same dtype define."""
    inputs = case.inputs(dtype, place.device)
    truth, eager = run_reference(inputs, torch.float64), run_reference(inputs, dtype)
    assert_outcome(run_ours(inputs, place), eager, truth, dtype)
