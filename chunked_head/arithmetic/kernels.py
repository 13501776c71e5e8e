"""The losses' arithmetic as Triton kernels: which losses have one, and its launch for a chunk of tokens."""

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.private import in_own_thread
from ..core.stats import RowStats
from ..kernels.common.cache import Cache
from ..stores import Backend
from .demand import Structure
from .evaluate import Evaluation, Inputs, Named, evaluate, values_of

if TYPE_CHECKING:
    from .vectors import VectorKernel  # imports Triton

Arithmetic = tuple["VectorKernel", tuple[str, ...]]  # a kernel, and names of the coefficients that it makes, in order
KERNELS: Cache[tuple, Arithmetic | None] = Cache(256)


def arithmetic_of(
    structure: Structure, leaves: Named, inputs: Inputs
) -> tuple[Arithmetic | None, list[Tensor | float]]:
    """The kernel for inputs like these, None where there is none; and the arguments that it may read."""
    if not structure.builtin:
        return None, []
    tensors = [
        *leaves.values(), inputs.target, inputs.factors, *inputs.fields.values(),  # from here on as ``Inputs.map``
        *[tensor for own in inputs.tensors for tensor in own.values()], *inputs.metric_weights.values(),
    ]  # fmt: skip
    kinds = tuple([(tensor.dtype, tensor.dim(), tensor.is_contiguous()) for tensor in tensors])
    code, numbers = structure.split
    key = code, tuple(leaves), tuple(inputs.fields), tuple(inputs.metric_weights), kinds
    given: list[Tensor | float] = [*tensors, *numbers]
    return KERNELS.made(key, lambda: make_arithmetic(structure, leaves, inputs, given)), given


def make_arithmetic(
    structure: Structure, leaves: Named, inputs: Inputs, given: list[Tensor | float]
) -> Arithmetic | None:
    """A kernel of ``values_of``; None for fp64, sums over segments and several columns of a token."""
    parts = [part for part, _ in (*structure.summands, *structure.metrics)]
    wider = any(part.scope != "token" for part in parts) or any(leaf.dim() > 1 for leaf in leaves.values())
    gaps = any(isinstance(value, Tensor) and not value.is_contiguous() for value in given)
    if wider or gaps or leaves["lse"].dtype != torch.float32:
        return None
    from .vectors import vector_kernel

    names: list[str] = []

    def function(given: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        them = iter(given)
        named = {name: next(them) for name in leaves}
        mapped = inputs.map(lambda value, dim: next(them))
        coefficients, rows, _ = values_of(structure.at(them), named, mapped)
        names[:] = coefficients
        return list(coefficients.values()), rows

    dims: list[int | None] = [0] * len(leaves)  # that tokens are counted along

    def note(value: Tensor, dim: int | None) -> Tensor:
        dims.append(dim)
        return value

    inputs.map(note)
    dims += [None] * (len(given) - len(dims))  # numbers
    # a trace begins without whatever modes and hooks there are around the call
    kernel = in_own_thread(functools.partial(vector_kernel, function, given, dims))
    return None if kernel is None else (kernel, tuple(names))


def evaluate_rows(
    structure: Structure,
    stats: RowStats,
    inputs: Inputs,
    rows: slice,
    backend: Backend | None,
    table: Tensor | None = None,  # of an earlier chunk
) -> Evaluation:
    """``evaluate`` for the tokens ``rows`` of all: by a kernel where ``backend`` is Triton's, whose table is of all
    tokens, else in PyTorch."""
    if backend is not None and backend.name == "triton":
        arithmetic, given = arithmetic_of(structure, stats.named(), inputs)
        if arithmetic is not None:
            (kernel, names), like = arithmetic, stats.lse
            if table is None:
                table = like.new_empty(sum(structure.widths), inputs.target.shape[0])
            chunk = like.new_empty(len(names), rows.stop - rows.start)
            kernel(given, rows, chunk, table)
            return Evaluation(dict(zip(names, chunk.unbind(0), strict=True)), table, [])
    return evaluate(structure, stats.at(rows).named(), inputs.at(rows))
