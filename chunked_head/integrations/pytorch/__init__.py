"""PyTorch's own ``F.linear_cross_entropy(..., options=...)`` computed by this library's head.

    handle = chunked_head.override_torch(memory_budget="1GiB")
    ...
    handle.undo()  # or: with chunked_head.override_torch(): ...

PyTorch computes its chunked ``"mean"`` and ``"sum"`` by one operator, which has a kernel for each device. This module
registers other kernels for ``CPU`` and ``CUDA``. Calls for which ``is_served`` is False still run PyTorch's kernel.
PyTorch's code runs before and after the operator: checks, autograd, graphs of ``torch.compile``.
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
from ..frameworks import check_named, object_at

OPTION_NAMES = ("memory_budget", "chunk_tokens", "accumulate_dtype", "skip_ignored", "deterministic", "backend")
OPERATOR_NAME = "_linear_cross_entropy_batch_chunked"
SCHEMA = (  # of the tested version, 2.15
    f"torch_nn::{OPERATOR_NAME}(Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, "
    "Tensor? weight, str reduction, SymInt ignore_index, float label_smoothing, SymInt batch_chunk_size, "
    "str acc_policy, ScalarType acc_dtype, bool allow_retain_graph, bool compute_input_grad, "
    "bool compute_linear_weight_grad, bool compute_linear_bias_grad) -> (Tensor, Tensor, Tensor, Tensor)"
)
SERVED_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


# the operator's arguments by name: input [N, H], linear_weight [C, H], target [N], linear_bias and weight [C] or None
OpCall = namedtuple("OpCall", [name.split()[-1] for name in SCHEMA[: SCHEMA.index(")")].split(", ")])  # type: ignore[misc]


def operands_with_flags(call: Any) -> list[tuple[Tensor | None, bool]]:
    """Pairs for input, weight and bias: the operand, and True if the call computes the operand's gradient."""
    return [
        (call.input, call.compute_input_grad), (call.linear_weight, call.compute_linear_weight_grad),
        (call.linear_bias, call.compute_linear_bias_grad),
    ]  # fmt: skip


def is_served(call: Any) -> bool:
    """True for a call that this library computes, False for a call that PyTorch's kernel computes."""
    tensors = [operand for operand, _ in operands_with_flags(call) if operand is not None]
    dtype, has_ids = call.input.dtype, call.target.dtype == torch.int64 and call.target.dim() == 1
    accumulation_dtypes = (torch.float32, dtype) if dtype.itemsize == 2 else (dtype,)
    # a graph may have been traced without a gradient that autograd needs in this call
    lacks_gradient = torch.is_grad_enabled() and any(
        operand is not None and operand.requires_grad > needs_grad for operand, needs_grad in operands_with_flags(call)
    )
    return (
        has_ids
        and len(call.input) > 0
        and call.reduction in ("mean", "sum")
        and not call.label_smoothing
        and dtype in SERVED_DTYPES
        and all(tensor.dtype == dtype for tensor in tensors)
        and call.acc_policy in ("accurate", "compact")
        and call.acc_dtype in accumulation_dtypes
        and not torch.is_autocast_enabled(call.input.device.type)
        and all(type(tensor) is Tensor or isinstance(tensor, torch.nn.Parameter) for tensor in (*tensors, call.target))
        and not lacks_gradient
    )


@outside_of_graphs
def loss_and_gradients(call: Any, options: Execution) -> list[Tensor]:
    """The loss and the gradients of input, weight and bias, in input's dtype, as PyTorch's operator returns them. A
    gradient that the call does not compute has no elements. A mean over no target, or over weights of sum 0, is nan."""
    leaf_operands = [
        None if operand is None else operand.detach().requires_grad_(needs_grad)
        for operand, needs_grad in operands_with_flags(call)
    ]
    hidden, weight, bias = leaf_operands
    assert hidden is not None and weight is not None
    with torch.enable_grad():
        loss = linear_cross_entropy(
            hidden, weight, call.target, bias=bias, class_weights=call.weight, ignore_index=call.ignore_index,
            reduction=call.reduction, **options,
        )  # fmt: skip
    one_or_nan = torch.ones_like(loss)
    if call.reduction == "mean":
        is_counted = call.target != call.ignore_index
        if call.weight is None:
            has_counted = is_counted.any()
        else:
            ids = call.target.clamp(0, weight.shape[0] - 1)
            has_counted = torch.where(is_counted, call.weight.detach()[ids], 0.0).sum() != 0
        one_or_nan = torch.where(has_counted, one_or_nan, torch.nan)
    differentiable_leaves = [leaf for leaf in leaf_operands if leaf is not None and leaf.requires_grad]
    grad_iterator = iter(torch.autograd.grad(loss, differentiable_leaves, one_or_nan) if differentiable_leaves else ())
    empty_grads = [call.input.new_empty(size) for size in ((0, 0), (0, 0), (0,))]
    grads = [
        next(grad_iterator).to(call.input.dtype) if leaf is not None and leaf.requires_grad else placeholder
        for leaf, placeholder in zip(leaf_operands, empty_grads, strict=True)
    ]
    return [(loss.detach() * one_or_nan).to(call.input.dtype), *grads]


class Override:
    """A registration of our kernels, until ``undo`` or the end of a ``with`` block. With ``operator=None`` no kernel is
    registered."""

    current_override: "Override | None" = None  # the registration in effect

    def __init__(self, operator: Any, options: Execution):
        self.library: Any = None
        if operator is None:
            return
        if Override.current_override is not None:
            Override.current_override.undo()
        self.library = torch.library.Library("torch_nn", "IMPL")
        for device in ("CPU", "CUDA"):
            pytorch_kernel = torch.library.get_kernel(operator, device)

            def served_kernel(dispatch_keys: Any, *arguments: Any, pytorch_kernel: Any = pytorch_kernel) -> Any:
                call = OpCall(*arguments)
                return (
                    tuple(loss_and_gradients(call, options))
                    if is_served(call)
                    else pytorch_kernel.call_boxed(dispatch_keys, *arguments)
                )

            # torch.compile traces code between graphs, unless this option of the decorator says otherwise
            (disable_compile,) = private("_disable_dynamo") or (torch.compiler.disable,)
            self.library.impl(OPERATOR_NAME, disable_compile(served_kernel), device, with_keyset=True)
        Override.current_override = self

    def undo(self) -> None:
        """Removes our kernels, so that PyTorch's kernels run again. A second call has no effect."""
        self.library = None  # the end of the library object ends the registration
        Override.current_override = None if Override.current_override is self else Override.current_override

    def __enter__(self) -> "Override":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def override_torch(**options: Unpack[Execution]) -> Override:
    """Makes this library compute ``torch.nn.functional.linear_cross_entropy(options=...)``, in this process.

    Values are PyTorch's, but for rounding: statistics are of fp32 logits. ``docs/frameworks/pytorch.md`` says which
    calls PyTorch computes. The chunk sizes in PyTorch's options have no effect.

    Args:
        options: ``memory_budget``, ``chunk_tokens``, ``accumulate_dtype``, ``skip_ignored``, ``deterministic``,
            ``backend`` of every call, as in ``linear_cross_entropy``. A later call of ``override_torch`` replaces all
            options of an earlier call.

    Returns:
        A handle with ``undo()``, which is also a context manager. If this PyTorch has no such operator, or one with
        other arguments than in 2.15, a warning says so, and nothing changes.

    Raises:
        TypeError, ValueError: an option is wrong for every call.
    """
    check_named(options, OPTION_NAMES)
    operator: Any = None
    if object_at(("torch.nn.modules.linear_cross_entropy", OPERATOR_NAME)) and object_at(
        ("torch.library", "get_kernel")
    ):
        operator = getattr(torch.ops.torch_nn, OPERATOR_NAME).default
    schema = str(getattr(operator, "_schema", "no such operator"))
    if schema != SCHEMA:
        warnings.warn(
            f"torch {torch.__version__} has {schema} where chunked_head knows {SCHEMA}, of torch 2.15: nothing is "
            "changed, and PyTorch computes its loss itself",
            stacklevel=2,
        )
        operator = None
    return Override(operator, options)
