"""A function of numbers per token as one Triton kernel, written from a trace of it: the losses' arithmetic.

Each value of the trace is a number per token [n] or one number []. Inputs are tensors and floats: an argument each, so
that the kernel serves every value. It reads those that are used, computes node after node, and writes the outputs. A
function with anything else (sums over segments, several columns per token, an operation that ``ARITHMETIC`` does not
have) has no kernel.
"""

import itertools
import linecache
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, fx

from ..core.checks import mismatch
from ..core.private import answering
from ..kernels.common import functions
from ..kernels.common.launcher import Launcher
from ..kernels.common.tiles import INTERPRETED, cdiv

Function = Callable[[list[Tensor]], tuple[list[Tensor], list[Tensor]]]
BLOCK = 1024 if INTERPRETED else 256
LENGTHS = (5, 7)  # numbers of tokens that are traced; no kernel where traces differ
NAMES = {
    torch.float32: "tl.float32", torch.int64: "tl.int64", torch.int32: "tl.int32", torch.bool: "tl.int1",
}  # fmt: skip
# aten's operations by how they take operands: in the result's dtype, in their common one, as truth values
ARITHMETIC = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "rsub": "{1} - {0}", "mul": "{0} * {1}", "neg": "-{0}",
    "div": "tl.div_rn({0}, {1})", "reciprocal": "tl.div_rn(1.0, {0})", "abs": "tl.abs({0})",
    "exp": "functions.exp({0})", "expm1": "functions.expm1({0})", "log": "functions.log({0})",
    "log1p": "functions.log1p({0})", "sigmoid": "functions.sigmoid({0})", "pow": "functions.power({0}, {1})",
    "sigmoid_backward": "{0} * ((1.0 - {1}) * {1})",
}  # fmt: skip
COMPARED = {
    "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}",
    "ge": "{0} >= {1}", "isnan": "{0} != {0}", "logical_not": "{0} == 0", "bitwise_not": "{0} == 0",
}  # fmt: skip
LOGICAL = {"logical_and": "{0} & {1}", "bitwise_and": "{0} & {1}", "bitwise_or": "{0} | {1}"}
# the same numbers in another shape or dtype
SAME = {"detach", "alias", "clone", "expand", "view", "_to_copy", "lift_fresh_copy"}
FILLED = {"zeros_like": 0, "new_zeros": 0, "zeros": 0, "ones_like": 1, "new_ones": 1, "ones": 1}
FILLED_BY = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}  # which argument is the number
POWERS = {1: "{0}", 2: "{0} * {0}"}
SIZES = ["first", "rows", "chunk_stride", "table_stride"]  # arguments that follow the number of tokens
COUNT = itertools.count()


class NoKernelError(Exception):
    """Raised for a trace that is no function of one token's numbers."""


class VectorKernel:
    """A kernel for the tokens ``rows`` of inputs that hold all tokens: it writes ``chunk`` [outputs, tokens of the
    chunk] and ``table`` [outputs, tokens], both fp32, of as many ``outputs`` each as it was made for."""

    def __init__(self, source: str, used: Sequence[int], inputs: int, outputs: tuple[int, int]):
        """``used``: which of so many ``inputs`` the source reads."""
        self.used, self.kind = tuple(used), (inputs, outputs, torch.float32, torch.float32)
        name = f"<chunked_head arithmetic {next(COUNT)}>"
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name  # where Triton reads it
        weakref.finalize(self, linecache.cache.pop, name, None)
        scope: dict[str, Any] = {"tl": tl, "functions": functions}
        exec(compile(source, name, "exec"), scope)
        pointers = ["chunk_ptr", "table_ptr", *(f"in{i}_ptr" for i in self.used)]
        kernel = triton.jit(
            scope["arithmetic_kernel"], do_not_specialize=SIZES, do_not_specialize_on_alignment=pointers
        )
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
    """The kernel of a function of inputs like these, with outputs of a chunk and of all tokens, each [n]; or None.
    ``token_dims``: the dimension of each input that counts tokens, or None. The function gets floats as float32
    tensors []; the kernel takes any float."""
    try:
        one, other = (Writer(*trace(function, inputs, token_dims, n), inputs, token_dims) for n in LENGTHS)
    except NoKernelError:
        return None
    if (one.source, one.outputs) != (other.source, other.outputs):
        return None
    return VectorKernel(one.source, one.used, len(inputs), one.outputs)


def trace(
    function: Function, inputs: Sequence[Tensor | float], token_dims: Sequence[int | None], tokens: int
) -> tuple[fx.GraphModule, int]:
    """The trace, with all outputs in a row, and the number of these that are of a chunk."""
    try:
        from torch.fx.experimental.proxy_tensor import make_fx
    except ImportError as error:
        raise NoKernelError("this torch traces in another way") from error
    answer = answering()
    if answer is None:
        raise NoKernelError("this torch has other modes")

    samples, counts = [], []
    for value, dim in zip(inputs, token_dims, strict=True):
        shape, dtype = ([], torch.float32) if isinstance(value, float) else ([*value.shape], value.dtype)
        if dim is not None:
            shape[dim] = tokens
        samples.append(torch.zeros(shape, dtype=dtype, device="cpu"))

    def in_a_row(given: list[Tensor]) -> list[Tensor]:
        with answer(None):  # also where another thread switches anomaly mode on meanwhile
            of_chunk, of_all = function(given)
        counts.append(len(of_chunk))
        return [*of_chunk, *of_all]

    traced = make_fx(in_a_row, tracing_mode="fake")(samples)
    return traced, counts[-1]


def name_of(node: fx.Node) -> str:
    """The name of the operation that a node calls, without aten's prefix; that of an input."""
    return str(getattr(node.target, "overloadpacket", node.target)).removeprefix("aten.")


class Writer:
    """The source of a trace's kernel, the inputs that it reads, and how many rows it writes of a chunk and of all."""

    def __init__(
        self, traced: fx.GraphModule, local: int, inputs: Sequence[Tensor | float], token_dims: Sequence[int | None]
    ):
        self.token_dims = token_dims
        self.lines: list[str] = []
        self.names: dict[str, str] = {}  # by expression, so that each is computed once
        self.values: dict[fx.Node, str] = {}
        self.used: list[int] = []
        self.numbers = {i for i, value in enumerate(inputs) if isinstance(value, float)}
        self.inputs = {node: i for i, node in enumerate(traced.graph.find_nodes(op="placeholder"))}
        (end,) = traced.graph.find_nodes(op="output")
        outputs: Any = end.args[0]
        if not outputs:
            raise NoKernelError("nothing to store")
        self.outputs = local, len(outputs) - local
        for i, node in enumerate(outputs):
            table, place, ahead = ("chunk", i, "") if i < local else ("table", i - local, " + first")
            at = f"{table}_ptr + {place} * tl.cast({table}_stride, tl.int64){ahead}"
            self.lines.append(f"tl.store({at} + row, {self.cast(node, torch.float32)}, mask=here)")
        arguments = [f"in{i}" if i in self.numbers else f"in{i}_ptr" for i in self.used]
        arguments += ["first", "rows", "chunk_stride", "table_stride", "BLOCK: tl.constexpr"]
        header = f"def arithmetic_kernel(chunk_ptr, table_ptr, {', '.join(arguments)}):"
        beginning = ["row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", "here = row < rows"]
        self.source = "\n    ".join([header, *beginning, *self.lines]) + "\n"

    def named(self, expression: str) -> str:
        if expression not in self.names:
            self.names[expression] = f"v{len(self.names)}"
            self.lines.append(f"{self.names[expression]} = {expression}")
        return self.names[expression]

    def read(self, node: fx.Node, at: str = "") -> str:
        i = self.inputs[node]
        if i not in self.used:
            self.used.append(i)
        if i in self.numbers:
            return self.named(f"tl.full((BLOCK,), in{i}, tl.float32)")
        if self.token_dims[i] is None:
            return self.named(f"tl.load(in{i}_ptr{at})")
        return self.named(f"tl.load(in{i}_ptr{at} + first + row, mask=here, other=0)")

    def value(self, node: fx.Node) -> str:
        if node.op != "call_function":
            raise NoKernelError(node.op)
        operation, dtype = name_of(node), node.meta["val"].dtype
        if node.meta["val"].dim() > 1 or dtype not in NAMES:
            raise NoKernelError(str(node))
        tensors = [arg for arg in node.args if isinstance(arg, fx.Node)]
        if operation == "select" and node.args[0] in self.inputs:
            return self.row(*node.args)  # type: ignore[arg-type]
        if operation in SAME:
            return self.cast(tensors[0], dtype)
        if operation in FILLED:
            return self.constant(FILLED[operation], dtype)
        if operation in FILLED_BY:
            return self.constant(node.args[FILLED_BY[operation]], dtype)
        if operation in ("where", "masked_fill"):
            condition, *parts = node.args if operation == "where" else (node.args[1], node.args[2], node.args[0])
            chosen = [self.cast(part, dtype) for part in parts]
            return self.named(f"tl.where({self.cast(condition, torch.bool)}, {chosen[0]}, {chosen[1]})")
        if operation == "clamp":
            bounds = dict(zip(("min", "max"), node.args[1:], strict=False)) | dict(node.kwargs)
            x = self.cast(node.args[0], dtype)
            for side, beyond in ("min", "<"), ("max", ">"):  # a nan is neither and stays, as in PyTorch
                if bounds.get(side) is not None:
                    bound = self.cast(bounds[side], dtype)
                    x = self.named(f"tl.where({x} {beyond} {bound}, {bound}, {x})")
            return x
        if operation == "pow" and node.args[1] in POWERS:
            return self.computed(POWERS[node.args[1]], node.args[:1], dtype)  # type: ignore[index]
        if node.kwargs or len(node.args) > 2:  # a factor or a rounding mode, which the tables lack
            raise NoKernelError(str(node))
        if operation in ("sign", "sgn") and dtype == torch.float32:
            x = self.cast(node.args[0], dtype)
            return self.named(f"tl.where({x} > 0, 1.0, tl.where({x} < 0, -1.0, {x}))")
        if operation in ARITHMETIC:
            return self.computed(ARITHMETIC[operation], node.args, dtype)
        if operation in COMPARED:
            floats = any(isinstance(arg, float) for arg in node.args)
            floats = floats or any(tensor.meta["val"].dtype == torch.float32 for tensor in tensors)
            return self.computed(COMPARED[operation], node.args, torch.float32 if floats else torch.int64)
        if operation in LOGICAL:
            return self.computed(LOGICAL[operation], node.args, torch.bool)
        raise NoKernelError(str(operation))

    def row(self, vector: fx.Node, dim: int, i: int) -> str:
        """A number of an input that has no tokens."""
        if dim != 0 or i < 0 or vector.meta["val"].dim() != 1 or self.token_dims[self.inputs[vector]] is not None:
            raise NoKernelError(str(vector))
        return self.read(vector, f" + {i}")

    def computed(self, template: str, args: Sequence[Any], dtype: torch.dtype) -> str:
        return self.named(template.format(*[self.cast(arg, dtype) for arg in args]))

    def constant(self, number: Any, dtype: torch.dtype) -> str:
        if isinstance(number, fx.Node):
            return self.cast(number, dtype)
        number = float(number) if dtype.is_floating_point else int(number)
        text = repr(number) if math.isfinite(number) else f'float("{number}")'
        return self.named(f"tl.full((BLOCK,), {text}, {NAMES[dtype]})")

    def cast(self, value: Any, dtype: torch.dtype) -> str:
        """An operand in a dtype."""
        if not isinstance(value, fx.Node):
            return self.constant(value, dtype)
        own = value.meta["val"].dtype
        if own not in NAMES or value.meta["val"].dim() > 1:
            raise NoKernelError(str(value))
        if value in self.inputs:
            name, dim = self.read(value), self.token_dims[self.inputs[value]]
            if value.meta["val"].dim() != (dim is not None):
                raise NoKernelError(str(value))
        else:
            if value not in self.values:  # values read for their shape only may be any
                self.values[value] = self.value(value)
            name = self.values[value]
        if own == dtype:
            return name
        return self.named(f"{name} != 0" if dtype == torch.bool else f"{name}.to({NAMES[dtype]})")
