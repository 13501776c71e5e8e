"""The losses' arithmetic as a kernel of the backend's: which losses have one, and its launch for a chunk of tokens."""

import functools

import torch
from torch import Tensor

from ..core.private import in_own_thread
from ..core.stats import RowStats
from ..kernels.common.cache import Cache
from ..stores import Backend, VectorKernel
from .demand import Structure
from .evaluate import Evaluation, Inputs, evaluate, values_of

Arithmetic = tuple[VectorKernel, tuple[str, ...]]  # a kernel, and the coefficients that it makes, in order
KERNELS: Cache[tuple, Arithmetic | None] = Cache(256)


def arithmetic_of(
    backend: Backend, structure: Structure, leaves: dict[str, Tensor], inputs: Inputs
) -> tuple[Arithmetic | None, list[Tensor | float]]:
    """The kernel for inputs like these, None where there is none; and all that it may read, numbers at last."""
    if not structure.own:
        return None, []
    tensors = [*leaves.values(), *tensors_of(inputs)]
    kinds = tuple([(tensor.dtype, tensor.dim(), tensor.is_contiguous()) for tensor in tensors])
    key = backend, structure.split[0], tuple(leaves), tuple(inputs.fields), tuple(inputs.metric_weights), kinds
    arithmetic = KERNELS.made(key, lambda: make_arithmetic(backend, structure, leaves, inputs, tensors))
    return arithmetic, [*tensors, *structure.split[1]]


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """In the order of ``Inputs.map``."""
    return [
        inputs.target, inputs.factors, *inputs.fields.values(),
        *[tensor for own in inputs.tensors for tensor in own.values()], *inputs.metric_weights.values(),
    ]  # fmt: skip


def make_arithmetic(
    backend: Backend, structure: Structure, leaves: dict[str, Tensor], inputs: Inputs, tensors: list[Tensor]
) -> Arithmetic | None:
    float32 = leaves["lse"].dtype == torch.float32
    contiguous = all(tensor.is_contiguous() for tensor in tensors)
    # sums over segments, and several columns of a token
    parts = [part for part, _ in (*structure.summands, *structure.metrics)]
    wider = any(part.scope != "token" for part in parts) or any(leaf.dim() > 1 for leaf in leaves.values())
    if wider or not (float32 and contiguous):
        return None
    names: list[str] = []
    dims: list[int | None] = [0] * len(leaves)  # that tokens are counted along

    def function(given: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        them = iter(given)
        named = {name: next(them) for name in leaves}
        mapped = inputs.map(lambda value, dim: next(them))
        coefficients, rows, _ = values_of(structure.at(them), named, mapped)
        names[:] = coefficients
        return list(coefficients.values()), rows

    def note(value: Tensor, dim: int | None) -> Tensor:
        dims.append(dim)
        return value

    inputs.map(note)
    dims += [None] * len(structure.split[1])
    # a trace begins without whatever modes and hooks there are around the call
    kernel = in_own_thread(functools.partial(backend.vector_kernel, function, [*tensors, *structure.split[1]], dims))
    return None if kernel is None else (kernel, tuple(names))


def evaluate_rows(
    structure: Structure,
    stats: RowStats,
    inputs: Inputs,
    rows: slice,
    fuse: Backend | None,
    table: Tensor | None = None,  # of an earlier chunk
) -> Evaluation:
    """``evaluate`` for the tokens ``rows`` of all: by a kernel of the backend ``fuse``, whose table is of all tokens,
    else as it is."""
    if fuse is not None:
        leaves = stats.named()
        arithmetic, given = arithmetic_of(fuse, structure, leaves, inputs)
        if arithmetic is not None:
            (kernel, names), like = arithmetic, stats.lse
            if table is None:
                table = like.new_empty(sum(structure.widths), inputs.target.shape[0])
            chunk = like.new_empty(len(names), rows.stop - rows.start)
            kernel(given, rows, chunk, table)
            return Evaluation(dict(zip(names, chunk.unbind(0), strict=True)), table, [])
    return evaluate(structure, stats.at(rows).named(), inputs.at(rows))
