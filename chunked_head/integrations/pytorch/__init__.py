"""PyTorch's own ``F.linear_cross_entropy(..., options=...)`` computed by this library's head.

    handle = chunked_head.override_torch(memory_budget="1GiB")
    ...
    handle.undo()  # or: with chunked_head.override_torch(): ...

PyTorch computes its chunked ``"mean"`` and ``"sum"`` by one operator, which has a kernel for each device. Ours stands
in front of it for ``CPU`` and ``CUDA``; any call that ``is_served`` leaves
out goes on to PyTorch's. What comes before and after the operator stays PyTorch's: its checks, autograd, graphs of
``torch.compile``.
"""

import warnings
from collections import namedtuple
from typing import Any, Unpack

import torch
from torch import Tensor

from ...call.options import Execution
from ...compile.operators import outside_of_graphs
from ...core.private import private
from ...functions.cross_entropy import linear_cross_entropy
from ..frameworks import check_named, looked_up

OPTIONS = ("memory_budget", "chunk_tokens", "accumulate_dtype", "skip_ignored", "deterministic", "backend")
NAME = "_linear_cross_entropy_batch_chunked"
SCHEMA = (  # of the tested version, 2.15
    f"torch_nn::{NAME}(Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, Tensor? weight, "
    "str reduction, SymInt ignore_index, float label_smoothing, SymInt batch_chunk_size, str acc_policy, "
    "ScalarType acc_dtype, bool allow_retain_graph, bool compute_input_grad, bool compute_linear_weight_grad, "
    "bool compute_linear_bias_grad) -> (Tensor, Tensor, Tensor, Tensor)"
)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


# the operator's arguments by name: input [N, H], linear_weight [C, H], target [N], linear_bias and weight [C] or None
OpCall = namedtuple("OpCall", [name.split()[-1] for name in SCHEMA[: SCHEMA.index(")")].split(", ")])  # type: ignore[misc]


def operands_with_flags(call: Any) -> list[tuple[Tensor | None, bool]]:
    """Input, weight and bias, each with a flag: whether the call computes its gradient."""
    return [
        (call.input, call.compute_input_grad), (call.linear_weight, call.compute_linear_weight_grad),
        (call.linear_bias, call.compute_linear_bias_grad),
    ]  # fmt: skip


def is_served(call: Any) -> bool:
    """True for a call that is computed here; PyTorch computes any other itself."""
    tensors = [operand for operand, _ in operands_with_flags(call) if operand is not None]
    dtype, has_ids = call.input.dtype, call.target.dtype == torch.int64 and call.target.dim() == 1
    sums = (torch.float32, dtype) if dtype.itemsize == 2 else (dtype,)
    # a graph may have been traced without a gradient that autograd asks for now
    lacks_gradient = torch.is_grad_enabled() and any(
        operand is not None and operand.requires_grad > needs_grad for operand, needs_grad in operands_with_flags(call)
    )
    return (
        has_ids
        and len(call.input) > 0
        and call.reduction in ("mean", "sum")
        and not call.label_smoothing
        and dtype in DTYPES
        and all(tensor.dtype == dtype for tensor in tensors)
        and call.acc_policy in ("accurate", "compact")
        and call.acc_dtype in sums
        and not torch.is_autocast_enabled(call.input.device.type)
        and all(type(tensor) is Tensor or isinstance(tensor, torch.nn.Parameter) for tensor in (*tensors, call.target))
        and not lacks_gradient
    )


@outside_of_graphs
def loss_and_gradients(call: Any, options: Execution) -> list[Tensor]:
    """The loss and the gradients of input, weight and bias, as PyTorch's operator returns them: in input's dtype; a
    gradient that the call does not compute has no elements. A mean over no target, or over weights of sum 0, is nan."""
    leaves = [
        None if operand is None else operand.detach().requires_grad_(needs_grad)
        for operand, needs_grad in operands_with_flags(call)
    ]
    hidden, weight, bias = leaves
    assert hidden is not None and weight is not None
    with torch.enable_grad():
        loss = linear_cross_entropy(
            hidden, weight, call.target, bias=bias, class_weights=call.weight, ignore_index=call.ignore_index,
            reduction=call.reduction, **options,
        )  # fmt: skip
    one_or_nan = torch.ones_like(loss)
    if call.reduction == "mean":
        counts = call.target != call.ignore_index
        if call.weight is None:
            counted = counts.any()
        else:
            ids = call.target.clamp(0, weight.shape[0] - 1)
            counted = torch.where(counts, call.weight.detach()[ids], 0.0).sum() != 0
        one_or_nan = torch.where(counted, one_or_nan, torch.nan)
    inputs = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    remaining = iter(torch.autograd.grad(loss, inputs, one_or_nan) if inputs else ())
    empty = [call.input.new_empty(size) for size in ((0, 0), (0, 0), (0,))]
    grads = [
        next(remaining).to(call.input.dtype) if leaf is not None and leaf.requires_grad else placeholder
        for leaf, placeholder in zip(leaves, empty, strict=True)
    ]
    return [(loss.detach() * one_or_nan).to(call.input.dtype), *grads]


class Override:
    """A registration of our kernels until ``undo`` or the end of a ``with`` block; empty where the operator is None."""

    current: "Override | None" = None

    def __init__(self, operator: Any, options: Execution):
        self.library: Any = None
        if operator is None:
            return
        if Override.current is not None:
            Override.current.undo()
        self.library = torch.library.Library("torch_nn", "IMPL")
        for device in ("CPU", "CUDA"):
            theirs = torch.library.get_kernel(operator, device)

            def kernel(keys: Any, *arguments: Any, theirs: Any = theirs) -> Any:
                call = OpCall(*arguments)
                return (
                    tuple(loss_and_gradients(call, options)) if is_served(call) else theirs.call_boxed(keys, *arguments)
                )

            # torch.compile traces what runs between its graphs, unless an option of its own says otherwise
            (untraced,) = private("_disable_dynamo") or (torch.compiler.disable,)
            self.library.impl(NAME, untraced(kernel), device, with_keyset=True)
        Override.current = self

    def undo(self) -> None:
        """Gives the operator back to PyTorch; a second time nothing happens."""
        self.library = None  # the registration lives as long as this
        Override.current = None if Override.current is self else Override.current

    def __enter__(self) -> "Override":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def override_torch(**options: Unpack[Execution]) -> Override:
    """Serves ``torch.nn.functional.linear_cross_entropy(options=...)`` by this library, in this process.

    Values are PyTorch's, but for rounding: statistics are of fp32 logits. ``docs/frameworks/pytorch.md`` says which
    calls are left to PyTorch. What PyTorch's options say about memory is not read.

    Args:
        options: ``memory_budget``, ``chunk_tokens``, ``accumulate_dtype``, ``skip_ignored``, ``deterministic``,
            ``backend`` of every call, as in ``linear_cross_entropy``. A second ``override_torch`` puts its options in
            their place.

    Returns:
        A handle with ``undo()``, which is a context manager too. Where this PyTorch has no such operator, or one with
        other arguments than in 2.15, a warning says so, and nothing is changed.

    Raises:
        TypeError, ValueError: for an option that is wrong by itself.
    """
    check_named(options, OPTIONS)
    operator: Any = None
    if looked_up(("torch.nn.modules.linear_cross_entropy", NAME)) and looked_up(("torch.library", "get_kernel")):
        operator = getattr(torch.ops.torch_nn, NAME).default
    schema = str(getattr(operator, "_schema", "no such operator"))
    if schema != SCHEMA:
        warnings.warn(
            f"torch {torch.__version__} has {schema} where chunked_head knows {SCHEMA}, of torch 2.15: nothing is "
            "changed, and PyTorch computes its loss itself",
            stacklevel=2,
        )
        operator = None
    return Override(operator, options)
