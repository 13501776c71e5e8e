"""A function of numbers per token as one Triton kernel, written from a trace of it: the losses' arithmetic.

Each value of the trace has a number per token [n], or is one number []. Inputs are tensors and floats. Each is an
argument of the kernel, so that one kernel serves all their values. The kernel loads the inputs that are used, computes
node after node, and writes the outputs. A function with anything else (sums over segments, several columns per token,
an operation that ``core/tracing.py`` lacks) has no kernel.
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

Function = Callable[[list[Tensor]], tuple[list[Tensor], list[Tensor]]]
BLOCK = 1024 if INTERPRETED else 256
LENGTHS = (5, 7)  # numbers of tokens of the two traces; a function whose traces differ has no kernel
SIZES = ["first", "rows", "chunk_stride", "table_stride"]  # arguments whose values depend on the number of tokens


class VectorKernel:
    """A kernel that reads the tokens ``rows`` of inputs of all tokens, and writes two fp32 tensors: ``chunk`` [m,
    tokens of ``rows``], and the columns ``rows`` of ``table`` [k, tokens]. The traced function returns m and k
    vectors."""

    def __init__(self, source: str, used: Sequence[int], input_count: int, output_counts: tuple[int, int]):
        """``used``: indices of the inputs that the source reads. ``input_count``: number of all inputs."""
        self.used, self.kind = tuple(used), (input_count, output_counts, torch.float32, torch.float32)
        function = defined("arithmetic_kernel", source, {"tl": tl, "functions": functions}, self)
        pointers = ["chunk_ptr", "table_ptr", *(f"in{i}_ptr" for i in self.used)]
        kernel = triton.jit(function, do_not_specialize=SIZES, do_not_specialize_on_alignment=pointers)
        self.launcher = Launcher(kernel)

    def __call__(self, inputs: Sequence[Tensor | float], rows: slice, chunk: Tensor, table: Tensor) -> None:
        count = rows.stop - rows.start
        kind = len(inputs), (chunk.shape[0], table.shape[0]), chunk.dtype, table.dtype
        if kind != self.kind or count > chunk.shape[1] or rows.stop > table.shape[1]:
            memory = f"{kind} with memory for {chunk.shape[1]} and {table.shape[1]} tokens"
            raise mismatch("an arithmetic kernel", self.kind, f"{memory}, of which it takes {rows}")
        self.launcher[(cdiv(count, BLOCK),)](
            chunk, table, *[inputs[i] for i in self.used], rows.start, count, chunk.stride(0), table.stride(0),
            BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip


def vector_kernel(
    function: Function, inputs: Sequence[Tensor | float], token_dims: Sequence[int | None]
) -> VectorKernel | None:
    """The kernel of ``function``, traced on inputs of these kinds; None if it cannot be traced. ``function`` returns
    two lists of outputs [n], for ``chunk`` and for ``table``. ``token_dims``: for each input its dimension of
    tokens, or None. The function gets a float as a float32 tensor []; the kernel takes any float in its place."""
    try:
        short_writer, long_writer = (
            VectorWriter(*trace(function, inputs, token_dims, n), inputs, token_dims) for n in LENGTHS
        )
    except NoKernelError:
        return None
    if (short_writer.source, short_writer.counts) != (long_writer.source, long_writer.counts):
        return None
    return VectorKernel(short_writer.source, short_writer.used, len(inputs), short_writer.counts)


def trace(
    function: Function, inputs: Sequence[Tensor | float], token_dims: Sequence[int | None], tokens: int
) -> tuple[fx.GraphModule, int]:
    """Returns the trace for ``tokens`` tokens, whose outputs are those of ``chunk``, then those of ``table``; and
    the number of outputs of ``chunk``."""
    samples, chunk_output_counts = [], []
    for value, dim in zip(inputs, token_dims, strict=True):
        shape, dtype = ([], torch.float32) if isinstance(value, float) else ([*value.shape], value.dtype)
        if dim is not None:
            shape[dim] = tokens
        samples.append(torch.zeros(shape, dtype=dtype, device="cpu"))

    def outputs_in_a_row(inputs: list[Tensor]) -> list[Tensor]:
        chunk_outputs, table_outputs = function(inputs)
        chunk_output_counts.append(len(chunk_outputs))
        return [*chunk_outputs, *table_outputs]

    graph = traced(outputs_in_a_row, samples)
    return graph, chunk_output_counts[-1]


class VectorWriter(Writer):
    """Writes the kernel of a trace: its ``source``, ``used`` (indices of the inputs that it reads) and ``counts``
    (numbers of outputs of ``chunk`` and of ``table``)."""

    def __init__(
        self,
        graph: fx.GraphModule,
        chunk_outputs: int,
        inputs: Sequence[Tensor | float],
        token_dims: Sequence[int | None],
    ):
        super().__init__(graph)
        self.token_dims = token_dims
        self.used: list[int] = []
        self.numbers = {i for i, value in enumerate(inputs) if isinstance(value, float)}
        if not self.outputs:
            raise NoKernelError("nothing to store")
        self.counts = chunk_outputs, len(self.outputs) - chunk_outputs
        for i, node in enumerate(self.outputs):
            table, place, offset = ("chunk", i, "") if i < chunk_outputs else ("table", i - chunk_outputs, " + first")
            pointer = f"{table}_ptr + {place} * tl.cast({table}_stride, tl.int64){offset}"
            self.lines.append(f"tl.store({pointer} + row, {self.cast(node, torch.float32)}, mask=here)")
        arguments = [f"in{i}" if i in self.numbers else f"in{i}_ptr" for i in self.used]
        arguments += ["first", "rows", "chunk_stride", "table_stride", "BLOCK: tl.constexpr"]
        header = f"def arithmetic_kernel(chunk_ptr, table_ptr, {', '.join(arguments)}):"
        first_lines = ["row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", "here = row < rows"]
        self.source = "\n    ".join([header, *first_lines, *self.lines]) + "\n"

    def read(self, node: fx.Node) -> str:
        if node.meta["val"].dim() != (self.token_dims[self.inputs[node]] is not None):
            raise NoKernelError(str(node))
        return self.load(node)

    def load(self, node: fx.Node, offset: str = "") -> str:
        i = self.inputs[node]
        if i not in self.used:
            self.used.append(i)
        if i in self.numbers:
            return self.assign(f"tl.full((BLOCK,), in{i}, tl.float32)")
        if self.token_dims[i] is None:
            return self.assign(f"tl.load(in{i}_ptr{offset})")
        return self.assign(f"tl.load(in{i}_ptr{offset} + first + row, mask=here, other=0)")

    def select(self, vector: fx.Node, dim: int, i: int) -> str:
        """Loads element ``i`` of an input [n] that has no dimension of tokens."""
        if dim != 0 or i < 0 or vector.meta["val"].dim() != 1 or self.token_dims[self.inputs[vector]] is not None:
            raise NoKernelError(str(vector))
        return self.load(vector, f" + {i}")
