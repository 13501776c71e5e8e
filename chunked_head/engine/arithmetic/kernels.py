"""The losses' arithmetic as a kernel of the backend's: which losses have one, and its launch for a chunk of tokens."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...backends import Backend, VectorKernel
from ...core.private import in_own_thread
from ...core.stats import RowStats
from ...losses.base import Summand
from ...metrics import Metric
from ...program.demand import Structure
from .compiled import run
from .evaluate import Evaluation, Inputs, values_of

PACKAGE = __name__.partition(".")[0] + "."
PLAIN = (type(None), bool, int, float, str)
MOST_KERNELS = 256


class Arithmetic(NamedTuple):
    """A kernel, and what its outputs are."""

    kernel: VectorKernel
    names: tuple[str, ...]  # of the coefficients, in order
    widths: list[int]  # rows of the table of each summand and metric
    rows: int


KERNELS: dict[tuple, Arithmetic | None] = {}


def arithmetic_of(
    backend: Backend, structure: Structure, leaves: dict[str, Tensor], inputs: Inputs
) -> tuple[Arithmetic | None, list[Tensor]]:
    """The kernel for inputs like these, None where there is none; and all that it may read."""
    tensors = [*leaves.values(), *tensors_of(inputs)]
    kinds = tuple([(tensor.dtype, tensor.dim(), tensor.is_contiguous()) for tensor in tensors])
    weights = tuple([weight is not None for weight in inputs.weights])
    key = backend, structure.key, tuple(leaves), tuple(inputs.fields), weights, tuple(inputs.metric_weights), kinds
    if key not in KERNELS:
        if len(KERNELS) >= MOST_KERNELS:
            KERNELS.clear()
        KERNELS[key] = make_arithmetic(backend, structure, leaves, inputs, tensors)
    return KERNELS[key], tensors


def tensors_of(inputs: Inputs) -> list[Tensor]:
    return [
        inputs.target, inputs.factors, *inputs.fields.values(),
        *[weight for weight in inputs.weights if weight is not None],
        *[tensor for own in inputs.tensors for tensor in own.values()], *inputs.metric_weights.values(),
    ]  # fmt: skip


def refilled(inputs: Inputs, tensors: Iterator[Tensor]) -> Inputs:
    """The same with other tensors, in the order of ``tensors_of``."""
    target, factors = next(tensors), next(tensors)
    fields = {name: next(tensors) for name in inputs.fields}
    weights = [None if weight is None else next(tensors) for weight in inputs.weights]
    own = [{name: next(tensors) for name in held} for held in inputs.tensors]
    of_metrics = {name: next(tensors) for name in inputs.metric_weights}
    return inputs._replace(
        target=target, factors=factors, fields=fields, weights=weights, tensors=own, metric_weights=of_metrics
    )


def token_dims(leaves: dict[str, Tensor], inputs: Inputs) -> list[int | None]:
    """Which dimension of each tensor tokens are counted along."""
    dims: list[int | None] = [0] * len(leaves)
    dims += [0, 1 if inputs.factors.dim() == 2 else None]
    dims += [0 if name in inputs.token_fields else None for name in inputs.fields]
    dims += [0 for weight in inputs.weights if weight is not None]
    dims += [None for own in inputs.tensors for _ in own]
    return dims + [0] * len(inputs.metric_weights)


def is_own(part: Summand | Metric) -> bool:
    """Whether a loss or metric is the library's, and a function of nothing but its arguments. A user's function may
    read what changes from call to call, which ``torch.compile`` notices and a kernel would not."""
    return is_plain(tuple(part.options.values())) and part.function.__module__.startswith(PACKAGE)


def is_plain(value: Any) -> bool:
    return all(map(is_plain, value)) if isinstance(value, tuple) else type(value) in PLAIN


def make_arithmetic(
    backend: Backend, structure: Structure, leaves: dict[str, Tensor], inputs: Inputs, tensors: list[Tensor]
) -> Arithmetic | None:
    parts: list[Any] = [part for part, _ in (*structure.summands, *structure.metrics)]
    float32 = leaves["lse"].dtype == torch.float32
    contiguous = all(tensor.is_contiguous() for tensor in tensors)
    if not (float32 and contiguous and all(map(is_own, parts))):
        return None
    # what is found of the coefficients' names and the table's rows comes from the same trace
    found: dict[str, Any] = {}

    def function(given: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        them = iter(given)
        named = {name: next(them) for name in leaves}
        values = values_of(structure, named, refilled(inputs, them))
        if values.apart:
            raise ValueError("values of other units than tokens")
        found.update(names=tuple(values.coefficients), widths=values.widths, rows=len(values.rows))
        return list(values.coefficients.values()), values.rows

    # a trace begins without whatever modes and hooks there are around the call
    make = functools.partial(backend.vector_kernel, function, tensors, token_dims(leaves, inputs))
    kernel = in_own_thread(make)
    return None if kernel is None else Arithmetic(kernel, **found)


def evaluate_rows(
    structure: Structure,
    stats: RowStats,
    inputs: Inputs,
    rows: slice,
    fuse: Backend | None,
    table: Tensor | None = None,  # of an earlier chunk
) -> Evaluation:
    """``evaluate`` for the tokens ``rows`` of all: by a kernel of the backend ``fuse``, whose table is of all tokens,
    else compiled on a GPU; plainly without a backend."""
    if fuse is not None:
        leaves = stats.named()
        arithmetic, tensors = arithmetic_of(fuse, structure, leaves, inputs)
        if arithmetic is not None:
            like = tensors[0]
            if table is None:
                table = like.new_empty(arithmetic.rows, inputs.target.shape[0])
            chunk = like.new_empty(len(arithmetic.names), rows.stop - rows.start)
            arithmetic.kernel(tensors, rows, chunk, table)
            coefficients = dict(zip(arithmetic.names, chunk.unbind(0), strict=True))
            return Evaluation(coefficients, table, arithmetic.widths, [])
    fused = fuse is not None and inputs.target.device.type == "cuda"
    return run(structure, stats.at(rows).named(), inputs.at(rows), fused)
