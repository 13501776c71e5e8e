"""Time, memory and kernel launches of losses from one softmax pass, beside bare matrix products on the same operands.

`python -m benchmarks.losses` times every workload through `loss.backward()` as a ratio to the products that it cannot do
without: three, or four with a dense teacher's logits or with logits that are computed again, or one without gradients.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from benchmarks import measure, providers
from benchmarks.accuracy import relative_error
from benchmarks.head import Watch, brief, make_console, mebibytes, number
from benchmarks.shapes import (
    Operands,
    Shape,
    draw_segments,
    dtype_name,
    make_operands,
    parse_bytes,
    parse_count,
    parse_dtype,
    parse_shape,
    parse_upstream,
)
from chunked_head import linear_cross_entropy, linear_logprobs, linear_loss, losses, metrics, plan
from chunked_head.oracle import distillation, label, policy, preference

SHAPES = (Shape(8192, 4096, 128256), Shape(8192, 2048, 128256), Shape(8192, 1024, 151936))
TEACHER_K = 64
NOISE = 0.1  # of other policies' log-probabilities about our own: a few tokens in a hundred are clipped
CHECK_TOKENS, CHECK_CHUNK = 96, 32
WARM_UP = 2
MOST_LAUNCHES = 6
_POLICY, _PREFERENCE = ("old_logprobs", "advantages"), ("ref_logprobs", "segments", "pairs")
_DENSE = ("teacher_hidden", "teacher_weight")
# The kernels of matrix products: ours with the exponentials, cuBLAS's by its several names; torch's on a CPU.
_PRODUCT = re.compile(r"exp_logits|gemm|nvjet|xmma|cutlass|^aten::(addmm|mm)$")


class Workload(NamedTuple):
    """What is asked of a head, what it reads, and how many bare products it is measured by."""

    loss: Callable[[], losses.base.Losses]
    fields: tuple[str, ...] = ()
    metrics: Callable[[], list[metrics.Metric]] = list
    products: int = 3
    segments: Callable[[int], int] = lambda tokens: 0  # how many, from the number of tokens
    must: tuple[float | None, float | None, float | None] = (None, None, None)  # the largest ratio, for each of SHAPES
    backward: bool = True


def _six_metrics() -> list[metrics.Metric]:
    sides = [metrics.clip_fraction(side="low"), metrics.clip_fraction(side="high")]
    return [metrics.ratio(), metrics.kl_old(), *sides, metrics.advantage(), metrics.effective_sample_size()]


WORKLOADS: dict[str, Workload] = {
    "cross-entropy": Workload(losses.cross_entropy),
    "ce+entropy+accuracy": Workload(
        losses.cross_entropy, metrics=lambda: [metrics.entropy(), metrics.accuracy()], must=(1.09, 1.13, 1.22)
    ),
    "grpo": Workload(
        lambda: losses.grpo() + 1e-4 * losses.z_loss() - 0.01 * losses.entropy(),
        _POLICY, _six_metrics, must=(1.10, 1.15, 1.26),
    ),
    "gspo": Workload(
        losses.gspo, (*_POLICY, "segments"), segments=lambda tokens: max(2, tokens // 512), must=(1.45, None, None)
    ),
    "dpo": Workload(
        losses.dpo, _PREFERENCE, segments=lambda tokens: max(2, min(16, tokens // 4 * 2)), must=(1.45, None, None)
    ),
    "topk": Workload(
        lambda: losses.topk_kl() + losses.cross_entropy(), ("teacher_ids", "teacher_logprobs"), must=(1.12, None, None)
    ),
    "dense-kl": Workload(losses.forward_kl, _DENSE, products=4, must=(1.10, None, None)),
    "reverse-kl": Workload(losses.reverse_kl, _DENSE, products=4),
    "jsd": Workload(losses.jsd, _DENSE, products=4),
    "logprobs": Workload(losses.cross_entropy, products=1, backward=False),
    # Logits are computed again in the backward: the products are logits twice, dH and dW.
    "logprobs+entropy-grad": Workload(lambda: losses.grpo() - 0.01 * losses.entropy(), _POLICY, products=4),
}  # fmt: skip


def draw_batch(workload: Workload, operands: Operands, seed: int = 0) -> dict[str, Tensor]:
    """The fields that a workload reads, for these operands."""
    device, (tokens, vocab) = operands.hidden.device, (len(operands.target), len(operands.weight))
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        own = linear_logprobs(operands.hidden, operands.weight, operands.target)
    normal = functools.partial(torch.randn, dtype=own.dtype, device=device, generator=generator)
    count, k = workload.segments(tokens), min(TEACHER_K, vocab)

    def teacher_ids() -> Tensor:
        others = torch.randint(vocab, (tokens, k - 1), device=device, generator=generator)
        return torch.cat([operands.target[:, None], others], 1)

    @functools.cache
    def teacher() -> Operands:
        shape = Shape(tokens, operands.hidden.shape[1], vocab)
        return make_operands(shape, operands.hidden.dtype, device, seed=seed + 1)

    draw: dict[str, Callable[[], Tensor]] = {
        "old_logprobs": lambda: own + NOISE * normal(tokens),
        "ref_logprobs": lambda: own + NOISE * normal(tokens),
        "advantages": lambda: normal(tokens),
        "segments": lambda: draw_segments(tokens, count, device, generator),
        "pairs": lambda: torch.arange(count, device=device).view(-1, 2),
        "teacher_ids": teacher_ids,
        # One entry more than is handed on: what the others leave of 1.
        "teacher_logprobs": lambda: (2 * normal(tokens, k + 1)).log_softmax(1)[:, :k].contiguous(),
        "teacher_hidden": lambda: teacher().hidden.detach(),
        "teacher_weight": lambda: teacher().weight.detach(),
    }
    return {name: draw[name]() for name in workload.fields}


@dataclass
class Call:
    """A workload with its fields, as a provider's loss: called with hidden states, weight and targets."""

    name: str
    batch: dict[str, Tensor]
    options: dict[str, Any]
    plan: Any = None  # how the last call ran, or would have by `chunked_head.plan`

    def __post_init__(self) -> None:
        self.workload = WORKLOADS[self.name]
        self.loss, self.metrics = self.workload.loss(), self.workload.metrics()
        self.num_segments = int(self.batch["segments"].max()) + 1 if "segments" in self.batch else None

    def __call__(self, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        if self.name == "cross-entropy":
            return linear_cross_entropy(hidden, weight, target, **self.options)
        if self.name == "logprobs":
            return -linear_logprobs(hidden, weight, target, **self.options).mean()
        if self.name == "logprobs+entropy-grad":
            logprobs, entropy = linear_logprobs(hidden, weight, target, entropy=True, **self.options)
            ratio, advantages = (logprobs - self.batch["old_logprobs"]).exp(), self.batch["advantages"]
            surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            return (-surrogate - 0.01 * entropy).mean()
        out = linear_loss(
            hidden, weight, target, self.loss,
            batch=self.batch, num_segments=self.num_segments, metrics=self.metrics, **self.options,
        )  # fmt: skip
        self.plan = out.plan
        return out.loss

    def predict(self, operands: Operands) -> dict[str, Any]:
        """The plan of a call that has run."""
        if self.plan is None:
            hidden, weight, late = operands.hidden, operands.weight, self.name == "logprobs+entropy-grad"
            wanted = {"loss": self.loss, "reduction": "none"} if late else {}
            grads = {"hidden_grad": self.workload.backward, "weight_grad": self.workload.backward}
            sizes, device = (*hidden.shape, len(weight), hidden.dtype), hidden.device
            self.plan = plan(*sizes, device=device, **wanted, **grads, **self.options)
        return providers.describe_plan(self.plan)


def make_step(name: str, operands: Operands, options: dict[str, Any], upstream: float = 1.0) -> measure.Step:
    """A workload's step; the fields are drawn here and count as inputs."""
    workload = WORKLOADS[name]
    call = Call(name, draw_batch(workload, operands), options)
    return measure.Step(call, operands, upstream, workload.backward)


@dataclass(frozen=True)
class Request(measure.MemoryRequest):
    """What a fresh process measures: `provider` is a workload."""

    options: dict[str, Any] = field(default_factory=dict)

    def step(self) -> measure.Step:
        operands = make_operands(self.shape, parse_dtype(self.dtype), torch.device("cpu"))
        return make_step(self.provider, operands, self.options, self.upstream)


def reference(call: Call, operands: Operands) -> tuple[float, Tensor, Tensor]:
    """Loss and gradients from whole logits in float32 (float64 for float64), by the oracle's formulas."""
    wide = torch.promote_types(operands.hidden.dtype, torch.float32)
    hidden, weight = operands.hidden.detach().to(wide), operands.weight.detach().to(wide)
    # The oracle goes token by token, on the CPU; the products stay where the operands are.
    x = (hidden @ weight.T).cpu().requires_grad_()
    fields: dict[str, Any] = {name: tensor.cpu() for name, tensor in call.batch.items() if name not in _DENSE}
    if "teacher_hidden" in call.batch:
        teacher_hidden, teacher_weight = (call.batch[name].to(wide) for name in _DENSE)
        fields["teacher_x"] = (teacher_hidden @ teacher_weight.T).cpu()
    fields["num_segments"] = call.num_segments
    total = x.new_zeros(())
    for coefficient, summand in call.loss.terms:
        formula = next(
            getattr(module, summand.kind)
            for module in (label, policy, preference, distillation)
            if hasattr(module, summand.kind)
        )
        total = total + coefficient * formula(x, operands.target.cpu(), fields).mean()
    (dlogits,) = torch.autograd.grad(total, x)
    dlogits = dlogits.to(hidden.device)
    return total.item(), dlogits @ weight, dlogits.T @ hidden


def check(name: str, shape: Shape, dtype: torch.dtype, device: torch.device, options: dict[str, Any]) -> dict[str, Any]:
    """Compare a workload with the reference at few tokens and the shape's hidden size and vocabulary, in chunks."""
    operands = make_operands(Shape(CHECK_TOKENS, shape.hidden, shape.vocab), dtype, device, seed=2)
    step = make_step(name, operands, {**options, "chunk_tokens": CHECK_CHUNK})
    loss = float(step())
    assert isinstance(step.loss, Call)
    expected, d_hidden, d_weight = reference(step.loss, operands)
    found = {"loss_error": abs(loss - expected) / max(1.0, abs(expected))}
    if step.backward:
        found["d_hidden_error"] = relative_error(operands.hidden.grad, d_hidden, 1.0)
        found["d_weight_error"] = relative_error(operands.weight.grad, d_weight, 1.0)
    half = dtype.itemsize < 4
    limits = {"loss_error": 2e-3 if half else 1e-5, "d_hidden_error": 0.02 if half else 1e-4}
    limits["d_weight_error"] = limits["d_hidden_error"]
    # `not >` would let nan pass
    return {**found, "ok": all(error <= limits[key] for key, error in found.items())}


def between_products(names: Sequence[str], made: Any) -> dict[str, list[str]]:
    """From all launches of a call, those after a chunk's logits, the second chunk's where there are several.

    Products are known by their kernels' names, and which is which by the plan; their number must be the plan's.
    """
    sizes, at = made.sizes, [place for place, name in enumerate(names) if _PRODUCT.search(name)]
    logits = 2 if sizes.teacher_width else 1
    sweep = made.chunks * logits
    tiles = made.blocks * -(-sizes.vocab // made.tile_columns)
    expected = {"loss only": sweep, "forward": sweep + 2 * made.chunks, "recompute": sweep + tiles * (logits + 2)}
    if len(at) != expected[made.schedule]:
        raise ValueError(
            f"{len(at)} launches have a matrix product's name, the plan has {expected[made.schedule]}: "
            + ", ".join(dict.fromkeys(names))
        )

    def gap(first: int, last: int | None) -> list[str]:
        inner = names[at[first] + 1 : None if last is None else at[last]]
        return [name for name in inner if not _PRODUCT.search(name)]

    if made.schedule == "loss only":
        return {"from the last chunk's logits to the end": gap(sweep - logits, None)}
    first = sweep if made.schedule == "recompute" else (logits + 2) * (made.chunks > 1)
    found = {"from a chunk's logits to its first gradient product": gap(first, first + logits)}
    if made.schedule == "recompute":
        found["from the last chunk's logits in the forward to the first in the backward"] = gap(sweep - logits, sweep)
        if made.chunks > 1:
            found["from a chunk's logits to the next chunk's in the forward"] = gap(0, logits)
    return found


def profile(step: measure.Step, made: Any) -> dict[str, list[str]]:
    """The launches of one step that lie between its products."""
    step.operands.clear()
    return between_products(measure.launches(step, step.operands.hidden.device), made)


def run_shape(shape: Shape, args: argparse.Namespace, watch: Watch) -> list[dict[str, Any]]:
    """Measure every workload at one shape; one row for each workload and upstream."""
    device, operands = args.device, make_operands(shape, args.dtype, args.device)
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, measure.Step] = {}
    for name in args.workload:
        workload = WORKLOADS[name]
        for upstream in args.upstream if workload.backward else args.upstream[:1]:
            key = f"{name} upstream {upstream:g}"
            watch.stage(f"{shape}: warm-up of {key}")
            row = {"shape": str(shape), "dtype": dtype_name(args.dtype), "workload": name, "upstream": upstream}
            row |= {"status": "ok", "products": workload.products}
            row["must"] = workload.must[SHAPES.index(shape)] if shape in SHAPES else None
            step, failure = measure.attempt(lambda: make_step(name, operands, args.options, upstream), operands)  # noqa: B023
            if failure is None:
                row["loss"], failure = measure.attempt(functools.partial(_warm_up, step), operands)
            if failure is None:
                row["plan"] = step.loss.predict(operands)
                steps[key] = step
            rows[key] = row | (failure.record() if failure else {})
    _time(operands, device, args.rounds, steps, rows, watch)
    for key, step in steps.items():
        watch.stage(f"{shape}: {key}, memory and what else was asked for")
        _examine(rows[key], shape, step, args)
    return list(rows.values())
