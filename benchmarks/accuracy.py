"""Errors of the providers' losses and gradients against a reference, for `python -m benchmarks head --errors`."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import measure, providers
from benchmarks.command import Row, Watch
from benchmarks.shapes import Operands, Shape, dtype_name

_ROWS = 2048


@dataclass
class Reference:
    """The loss and its gradients in a wider type than the operands', for an upstream gradient of one."""

    loss: float
    logprobs: Tensor
    d_hidden: Tensor
    d_weight: Tensor


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Keep TF32 out of the reference's matrix products, whatever the process has set."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def reference_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return float32 for 16-bit operands on a GPU, else float64: shapes on a CPU are small."""
    return torch.float32 if device.type == "cuda" and dtype.itemsize < 4 else torch.float64


@torch.no_grad()
def reference(operands: Operands, dtype: torch.dtype, bonus: float = 0.0) -> Reference:
    """Compute the mean of cross-entropy less ``bonus`` times the entropy, and its gradients, in ``dtype``.

    Works on a block of rows at a time.
    """
    tokens = operands.target.shape[0]
    weight = operands.weight.detach().to(dtype)
    d_hidden = torch.empty(operands.hidden.shape, dtype=dtype, device=weight.device)
    d_weight = torch.zeros_like(weight)
    loss, logprobs = 0.0, weight.new_empty(tokens)
    with full_float32():
        for start in range(0, tokens, _ROWS):
            rows = slice(start, start + _ROWS)
            hidden, target = operands.hidden.detach()[rows].to(dtype), operands.target[rows, None]
            log_probability = torch.log_softmax(hidden @ weight.T, dim=1)
            logprobs[rows] = log_probability.gather(1, target)[:, 0]
            loss -= float(logprobs[rows].double().sum()) / tokens
            gradient = log_probability.exp()
            if bonus:
                entropy = -(gradient * log_probability).sum(1, keepdim=True)
                loss -= bonus * float(entropy.double().sum()) / tokens
                gradient *= log_probability.add_(entropy).mul_(bonus).add_(1.0)
            gradient.scatter_add_(1, target, torch.full_like(target, -1, dtype=dtype)).div_(tokens)
            torch.mm(gradient, weight, out=d_hidden[rows])
            d_weight.addmm_(gradient.T, hidden)
            del log_probability, gradient  # before the next block's are made
    return Reference(loss, logprobs, d_hidden, d_weight)


@torch.no_grad()
def relative_error(found: Tensor | None, wanted: Tensor, factor: float) -> float:
    """Return ||found - factor * wanted|| / ||factor * wanted||, whose sums of squares are in float64."""
    if found is None:
        raise RuntimeError("the backward left a gradient unset")
    if found.shape != wanted.shape:
        raise RuntimeError(f"a gradient has shape {tuple(found.shape)} instead of {tuple(wanted.shape)}")
    # A 0-d tensor on the device, so that no block waits for the host.
    difference = torch.zeros((), dtype=torch.float64, device=wanted.device)
    total = torch.zeros_like(difference)
    for ours, theirs in zip(torch.split(found, 8 * _ROWS), torch.split(wanted, 8 * _ROWS), strict=True):
        difference += (ours.to(wanted.dtype) - factor * theirs).double().square().sum()
        total += (factor * theirs).double().square().sum()
    return float((difference / total).sqrt())


def errors(step: measure.Step, exact: Reference, read: providers.Late | None = None) -> dict[str, float]:
    """Return a step's relative errors of the loss and of both gradients, and the log-probabilities' error in nats.

    With ``read`` the latter is the root of the mean square over tokens, else the error of the mean.
    """
    step.operands.clear()
    operands, loss = step.operands, float(step())
    nats = abs(loss - exact.loss)
    if read is not None:
        with torch.no_grad():
            found_logprobs = read(operands.hidden, operands.weight, operands.target)[0]
        nats = float((found_logprobs.double() - exact.logprobs.double()).square().mean().sqrt())
    found = {
        "loss": abs(loss - exact.loss) / abs(exact.loss), "logprob": nats,
        "d_hidden": relative_error(operands.hidden.grad, exact.d_hidden, step.upstream),
        "d_weight": relative_error(operands.weight.grad, exact.d_weight, step.upstream),
    }  # fmt: skip
    operands.clear()
    return found


def errors_of(
    ready: Sequence[providers.Provider], shape: Shape, operands: Operands, args: Any, watch: Watch
) -> dict[tuple[str, float], Row]:
    """Return each provider's errors at each upstream gradient, or the record of its failure."""
    watch.stage(f"{shape} {args.data}: reference")
    wide = reference_dtype(args.dtype, args.device)
    bonuses = {provider.label: providers.BONUS if provider.read else 0.0 for provider in ready}
    exact = {bonus: reference(operands, wide, bonus) for bonus in set(bonuses.values())}
    measure.release(operands)
    rows: dict[tuple[str, float], Row] = {}
    for provider, upstream in ((provider, value) for value in args.upstream for provider in ready):
        watch.stage(f"{shape} {args.data}: errors of {provider.label} upstream {upstream:g}")
        step = measure.Step(provider.call, operands, upstream)
        measured = functools.partial(errors, step, exact[bonuses[provider.label]], provider.read)
        found, failure = measure.attempt(measured, operands)
        of = {"reference": dtype_name(wide)}
        named = {f"{key}_error": value for key, value in (found or {}).items()}
        rows[provider.label, upstream] = {"errors": failure.record()} if failure else of | named
    return rows
