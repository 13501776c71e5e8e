"""Writes a PyTorch function of numbers as Triton source, from a trace of the function.

A trace is a graph of elementwise operations; tables give the Triton expression of each operation. A subclass of
``Writer`` writes how inputs are loaded.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from .private import nan_filter

TRITON_DTYPES = {
    torch.float32: "tl.float32", torch.int64: "tl.int64", torch.int32: "tl.int32", torch.bool: "tl.int1",
}  # fmt: skip
# Triton expressions by aten operation, {0} and {1} its operands. By table, operands are cast to the result's dtype, to
# their common dtype, or to bool
ARITHMETIC = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "rsub": "{1} - {0}", "mul": "{0} * {1}", "neg": "-{0}",
    "div": "tl.div_rn({0}, {1})", "reciprocal": "tl.div_rn(1.0, {0})", "abs": "tl.abs({0})",
    "exp": "functions.exp({0})", "expm1": "functions.expm1({0})", "log": "functions.log({0})",
    "log1p": "functions.log1p({0})", "sigmoid": "functions.sigmoid({0})", "pow": "functions.power({0}, {1})",
    "sigmoid_backward": "{0} * ((1.0 - {1}) * {1})", "logaddexp": "functions.logaddexp({0}, {1})",
    "sqrt": "tl.sqrt_rn({0})", "minimum": "tl.where(({0} < {1}) | ({0} != {0}), {0}, {1})",
    "maximum": "tl.where(({0} > {1}) | ({0} != {0}), {0}, {1})",
}  # fmt: skip
COMPARISONS = {
    "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}",
    "ge": "{0} >= {1}", "isnan": "{0} != {0}", "logical_not": "{0} == 0", "bitwise_not": "{0} == 0",
}  # fmt: skip
LOGICAL = {"logical_and": "{0} & {1}", "bitwise_and": "{0} & {1}", "bitwise_or": "{0} | {1}"}
# operations that return their input's numbers in another shape or dtype
SAME_NUMBERS = {"detach", "alias", "clone", "expand", "view", "_to_copy", "lift_fresh_copy"}
FILL_VALUES = {"zeros_like": 0, "new_zeros": 0, "zeros": 0, "ones_like": 1, "new_ones": 1, "ones": 1}
FILL_ARGUMENTS = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}  # index of the filling argument
POWERS = {1: "{0}", 2: "{0} * {0}"}  # by exponent: an expression without a power


class NoKernelError(Exception):
    """Raised for a trace with an operation that has no elementwise Triton expression."""


def traced(function: Callable[[list[Tensor]], list[Tensor]], samples: list[Tensor]) -> fx.GraphModule:
    """The trace of ``function`` for tensors like ``samples``. NoKernelError if this version of torch cannot trace."""
    try:
        from torch.fx.experimental.proxy_tensor import make_fx
    except ImportError as error:
        raise NoKernelError("this torch traces in another way") from error
    nan_filter_class = nan_filter()
    if nan_filter_class is None:
        raise NoKernelError("this torch has other modes")

    def without_anomalies(operands: list[Tensor]) -> list[Tensor]:
        with nan_filter_class(None):  # another thread may switch on anomaly mode meanwhile
            return function(operands)

    return make_fx(without_anomalies, tracing_mode="fake")(samples)


def name_of(node: fx.Node) -> str:
    """The name of a node's operation without the prefix ``aten.``; for an input node the name of the input."""
    return str(getattr(node.target, "overloadpacket", node.target)).removeprefix("aten.")


def has_one_reader(node: fx.Node) -> bool:
    """True if a node makes a new tensor that only one other node reads. The reader may overwrite the tensor."""
    return node.op == "call_function" and len(node.users) == 1 and name_of(node) not in {*SAME_NUMBERS, "select"}


class Writer:
    """Writes the lines of source that compute the values of a trace; equal expressions are computed once."""

    shape = "(BLOCK,)"  # source of the shape that values have in the kernel
    overrides: ClassVar[dict[str, str]] = {}  # by operation: an expression in place of the one in ARITHMETIC

    def __init__(self, trace: fx.GraphModule):
        self.lines: list[str] = []  # of the source
        self.names: dict[str, str] = {}  # by expression: name of the variable that holds it
        self.values: dict[fx.Node, str] = {}  # by node: name of the variable that holds its value
        self.inputs = {node: i for i, node in enumerate(trace.graph.find_nodes(op="placeholder"))}
        (output_node,) = trace.graph.find_nodes(op="output")
        outputs: Any = output_node.args[0]
        self.outputs: list[fx.Node] = list(outputs)

    def read(self, node: fx.Node) -> str:
        """Returns the name of an input's variable. A subclass implements it and writes the line that loads the
        input."""
        raise NotImplementedError

    def select(self, vector: fx.Node, dim: int, i: int) -> str:
        """Returns the name of a variable with element ``i`` of an input along ``dim``. NoKernelError here; a subclass
        may have inputs of several dimensions."""
        raise NoKernelError(str(vector))

    def assign(self, expression: str) -> str:
        """Returns the name of the variable that holds ``expression``. Writes a line for a new expression."""
        if expression not in self.names:
            self.names[expression] = f"v{len(self.names)}"
            self.lines.append(f"{self.names[expression]} = {expression}")
        return self.names[expression]

    def value(self, node: fx.Node) -> str:
        """Returns the name of a variable with the value of a node. NoKernelError if its operation is in no table."""
        if node.op != "call_function":
            raise NoKernelError(node.op)
        operation, dtype = name_of(node), node.meta["val"].dtype
        if operation.endswith("_") and has_one_reader(node.args[0]):  # type: ignore[arg-type]
            operation = operation.removesuffix("_")  # older torch has such operations in the gradient of a minimum
        if node.meta["val"].dim() > 1 or dtype not in TRITON_DTYPES:
            raise NoKernelError(str(node))
        operand_nodes = [arg for arg in node.args if isinstance(arg, fx.Node)]
        if operation == "select" and node.args[0] in self.inputs:
            return self.select(*node.args)  # type: ignore[arg-type]
        if operation in SAME_NUMBERS:
            return self.cast(operand_nodes[0], dtype)
        if operation in FILL_VALUES:
            return self.constant(FILL_VALUES[operation], dtype)
        if operation in FILL_ARGUMENTS:
            return self.constant(node.args[FILL_ARGUMENTS[operation]], dtype)
        if operation in ("where", "masked_fill"):
            condition, *values = node.args if operation == "where" else (node.args[1], node.args[2], node.args[0])
            branches = [self.cast(value, dtype) for value in values]
            return self.assign(f"tl.where({self.cast(condition, torch.bool)}, {branches[0]}, {branches[1]})")
        if operation == "clamp":
            bounds = dict(zip(("min", "max"), node.args[1:], strict=False)) | dict(node.kwargs)
            x = self.cast(node.args[0], dtype)
            # a nan compares false with both bounds and stays, as in PyTorch
            for side, comparison in (("min", "<"), ("max", ">")):
                if bounds.get(side) is not None:
                    bound = self.cast(bounds[side], dtype)
                    x = self.assign(f"tl.where({x} {comparison} {bound}, {bound}, {x})")
            return x
        if operation == "pow" and node.args[1] in POWERS:
            return self.computed(POWERS[node.args[1]], node.args[:1], dtype)  # type: ignore[index]
        if node.kwargs or len(node.args) > 2:  # a factor or a rounding mode, which the tables lack
            raise NoKernelError(str(node))
        if operation in ("sign", "sgn") and dtype == torch.float32:
            x = self.cast(node.args[0], dtype)
            return self.assign(f"tl.where({x} > 0, 1.0, tl.where({x} < 0, -1.0, {x}))")
        if operation in ARITHMETIC:
            return self.computed((ARITHMETIC | self.overrides)[operation], node.args, dtype)
        if operation in COMPARISONS:
            has_floats = any(isinstance(arg, float) for arg in node.args)
            has_floats = has_floats or any(node_read.meta["val"].dtype == torch.float32 for node_read in operand_nodes)
            return self.computed(COMPARISONS[operation], node.args, torch.float32 if has_floats else torch.int64)
        if operation in LOGICAL:
            return self.computed(LOGICAL[operation], node.args, torch.bool)
        raise NoKernelError(str(operation))

    def computed(self, template: str, args: Sequence[Any], dtype: torch.dtype) -> str:
        """Returns the name of a variable with the expression ``template`` of the operands ``args``, cast to
        ``dtype``."""
        return self.assign(template.format(*[self.cast(arg, dtype) for arg in args]))

    def constant(self, number: Any, dtype: torch.dtype) -> str:
        """Returns the name of a variable of ``dtype`` with the value of a number or node."""
        if isinstance(number, fx.Node):
            return self.cast(number, dtype)
        number = float(number) if dtype.is_floating_point else int(number)
        literal = repr(number) if math.isfinite(number) else f'float("{number}")'
        return self.assign(f"tl.full({self.shape}, {literal}, {TRITON_DTYPES[dtype]})")

    def cast(self, value: Any, dtype: torch.dtype) -> str:
        """Returns the name of a variable with an operand, cast to ``dtype``. ``value``: a node or a number."""
        if not isinstance(value, fx.Node):
            return self.constant(value, dtype)
        source_dtype = value.meta["val"].dtype
        if source_dtype not in TRITON_DTYPES or value.meta["val"].dim() > 1:
            raise NoKernelError(str(value))
        if value in self.inputs:
            name = self.read(value)
        else:
            if value not in self.values:  # a value that is read only for its shape has no expression
                self.values[value] = self.value(value)
            name = self.values[value]
        if source_dtype == dtype:
            return name
        return self.assign(f"{name} != 0" if dtype == torch.bool else f"{name}.to({TRITON_DTYPES[dtype]})")
