"""The losses' arithmetic as a Triton kernel, written from a trace of a function of vectors.

Each value of the trace is a vector with a number per token [n], or a number []. Inputs are tensors and floats. Every
input is an argument of the kernel, so that a kernel serves inputs of any values. The kernel loads the inputs that are
used, computes node after node, and writes the outputs. A function has no kernel if it sums over segments, has several
columns per token, or uses an operation that ``core/tracing.py`` lacks.
"""

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor, fx

from ..core.checks import mismatch
from ..core.tiles import INTERPRETED, cdiv
from ..core.tracing import NoKernelError, Writer, traced
from ..kernels.common import functions
from ..kernels.common.launcher import Launcher
from ..kernels.common.sums import defined

Function = Callable[[list[Tensor]], tuple[list[Tensor], list[Tensor]]]  # vectors for ``chunk`` and for ``table``
BLOCK = 1024 if INTERPRETED else 256  # tokens of a program
TRACE_LENGTHS = (5, 7)  # numbers of tokens of the two traces; a function whose traces differ has no kernel
SIZE_NAMES = ["first", "rows", "chunk_stride", "table_stride"]  # arguments that depend on the number of tokens


class VectorKernel:
    """A kernel of a function that returns m vectors for ``chunk`` and k vectors for ``table``. Inputs are of
    all tokens; a call reads the tokens ``rows``. A call writes two fp32 tensors: ``chunk`` [m, tokens of ``rows``],
    and the columns ``rows`` of ``table`` [k, tokens]."""

    def __init__(self, source: str, input_indices: Sequence[int], input_count: int, output_counts: tuple[int, int]):
        """``input_indices``: indices of the inputs that the source reads, among ``input_count`` inputs.
        ``output_counts``: m and k."""
        self.input_indices, self.kind = tuple(input_indices), (input_count, output_counts, torch.float32, torch.float32)
        function = defined("arithmetic_kernel", source, {"tl": tl, "functions": functions}, self)
        pointer_names = ["chunk_ptr", "table_ptr", *(f"in{i}_ptr" for i in self.input_indices)]
        kernel = triton.jit(function, do_not_specialize=SIZE_NAMES, do_not_specialize_on_alignment=pointer_names)
        self.launcher = Launcher(kernel)

    def __call__(self, inputs: Sequence[Tensor | float], rows: slice, chunk: Tensor, table: Tensor) -> None:
        row_count = rows.stop - rows.start
        kind = len(inputs), (chunk.shape[0], table.shape[0]), chunk.dtype, table.dtype
        if kind != self.kind or row_count > chunk.shape[1] or rows.stop > table.shape[1]:
            memory_text = f"{kind} with memory for {chunk.shape[1]} and {table.shape[1]} tokens"
            raise mismatch("an arithmetic kernel", self.kind, f"{memory_text}, of which it takes {rows}")
        self.launcher[(cdiv(row_count, BLOCK),)](
            chunk, table, *[inputs[i] for i in self.input_indices], rows.start, row_count, chunk.stride(0),
            table.stride(0), BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip


def vector_kernel(
    function: Function, inputs: Sequence[Tensor | float], token_dims: Sequence[int | None]
) -> VectorKernel | None:
    """The kernel of ``function``, traced on zeros like ``inputs``; None if ``function`` cannot be traced. ``function``
    returns two lists of vectors [n], for ``chunk`` and for ``table``. ``token_dims``: each input's dimension of
    tokens, or None. A float is a float32 tensor [] in the trace, and an argument of any value in the kernel."""
    try:
        short_writer, long_writer = (
            VectorWriter(*trace(function, inputs, token_dims, n), inputs, token_dims) for n in TRACE_LENGTHS
        )
    except NoKernelError:
        return None
    if (short_writer.source, short_writer.output_counts) != (long_writer.source, long_writer.output_counts):
        return None
    return VectorKernel(short_writer.source, short_writer.input_indices, len(inputs), short_writer.output_counts)


def trace(
    function: Function, inputs: Sequence[Tensor | float], token_dims: Sequence[int | None], tokens: int
) -> tuple[fx.GraphModule, int]:
    """Returns the trace of ``function`` on ``tokens`` tokens, and the number of outputs for ``chunk``, which come
    before the outputs for ``table``."""
    zero_inputs, chunk_output_counts = [], []
    for value, dim in zip(inputs, token_dims, strict=True):
        shape, dtype = ([], torch.float32) if isinstance(value, float) else ([*value.shape], value.dtype)
        if dim is not None:
            shape[dim] = tokens
        zero_inputs.append(torch.zeros(shape, dtype=dtype, device="cpu"))

    def outputs_in_a_row(inputs: list[Tensor]) -> list[Tensor]:
        chunk_outputs, table_outputs = function(inputs)
        chunk_output_counts.append(len(chunk_outputs))
        return [*chunk_outputs, *table_outputs]

    graph = traced(outputs_in_a_row, zero_inputs)
    return graph, chunk_output_counts[-1]


class VectorWriter(Writer):
    """Writes the kernel of a trace as Triton source. ``input_indices``: indices of the inputs that the source reads.
    ``output_counts``: numbers of outputs for ``chunk`` and for ``table``."""

    def __init__(
        self,
        graph: fx.GraphModule,
        chunk_output_count: int,
        inputs: Sequence[Tensor | float],
        token_dims: Sequence[int | None],
    ):
        super().__init__(graph)
        self.token_dims = token_dims
        self.input_indices: list[int] = []
        self.float_indices = {i for i, value in enumerate(inputs) if isinstance(value, float)}
        if not self.outputs:
            raise NoKernelError("nothing to store")
        self.output_counts = chunk_output_count, len(self.outputs) - chunk_output_count
        for i, node in enumerate(self.outputs):
            tensor_name, row_index, offset_code = "chunk", i, ""
            if i >= chunk_output_count:
                tensor_name, row_index, offset_code = "table", i - chunk_output_count, " + first"
            pointer = f"{tensor_name}_ptr + {row_index} * tl.cast({tensor_name}_stride, tl.int64){offset_code}"
            self.lines.append(f"tl.store({pointer} + row, {self.cast(node, torch.float32)}, mask=here)")
        arguments = [f"in{i}" if i in self.float_indices else f"in{i}_ptr" for i in self.input_indices]
        arguments += [*SIZE_NAMES, "BLOCK: tl.constexpr"]
        header = f"def arithmetic_kernel(chunk_ptr, table_ptr, {', '.join(arguments)}):"
        first_lines = ["row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", "here = row < rows"]
        self.source = "\n    ".join([header, *first_lines, *self.lines]) + "\n"

    def read(self, node: fx.Node) -> str:
        if node.meta["val"].dim() != (self.token_dims[self.inputs[node]] is not None):
            raise NoKernelError(str(node))
        return self.load(node)

    def load(self, node: fx.Node, offset_code: str = "") -> str:
        """Writes the load of an input; returns the variable's name. ``offset_code`` follows the pointer: " + 3"."""
        i = self.inputs[node]
        if i not in self.input_indices:
            self.input_indices.append(i)
        if i in self.float_indices:
            return self.assign(f"tl.full((BLOCK,), in{i}, tl.float32)")
        if self.token_dims[i] is None:
            return self.assign(f"tl.load(in{i}_ptr{offset_code})")
        return self.assign(f"tl.load(in{i}_ptr{offset_code} + first + row, mask=here, other=0)")

    def select(self, vector: fx.Node, dim: int, i: int) -> str:
        """Writes the load of element ``i`` of an input [m] that has no dimension of tokens."""
        if dim != 0 or i < 0 or vector.meta["val"].dim() != 1 or self.token_dims[self.inputs[vector]] is not None:
            raise NoKernelError(str(vector))
        return self.load(vector, f" + {i}")
