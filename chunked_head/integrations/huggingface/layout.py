"""``layout_of`` returns the layout of a head's logits: number of columns, dtype, device, and why logits cannot be lazy.

The layout of a head that is a plain matrix follows from the weight. For any other head a trial shows the layout: the
head's forward runs on a few rows, once for each state of the head that the layout may depend on.
"""

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...core.checks import in_a_line, is_dtensor
from .head import FSDP1, OLD_FORWARD, has_instance_forward, module_of, sizes_of, unwrapped

TRIAL_SHAPE = (2, 32)  # leading dimensions of the hidden states of a trial
PIECE_ROWS = (40, 24)  # numbers of rows in the two pieces of a trial
# prefixes of packages whose forwards compute each row by itself: dropout would fail a comparison of their results
ROWWISE_PACKAGES = ("torch.", "peft.", "bitsandbytes.")
MAX_RESTORED_ELEMENTS = 1 << 20  # of a buffer of the head whose values are restored after a trial
HEADS_BY_ID: "weakref.WeakValueDictionary[int, nn.Module]" = weakref.WeakValueDictionary()  # lazy ones


class LogitsLayout(NamedTuple):
    """Properties of a head's logits that are known before the logits are computed."""

    num_columns: int  # size of the vocabulary
    dtype: torch.dtype
    device: torch.device
    reason: str = ""  # why the logits cannot be lazy; "" if they can

    def checked(self, logits: Tensor) -> Tensor:
        """Returns ``logits``. RuntimeError if their number of columns or their dtype differs from the layout's."""
        if (logits.shape[-1], logits.dtype) != (self.num_columns, self.dtype):
            raise RuntimeError(
                f"the head gives {logits.shape[-1]} columns of {logits.dtype} where it gave {self.num_columns} of "
                f"{self.dtype} before; call unpatch_model and patch_model after a change of what its forward does"
            )
        return logits


def layout_of(
    head: Any, hidden: Tensor, autocast_dtype: torch.dtype | None, has_run_hooks: bool, layouts: dict[Any, Any]
) -> LogitsLayout:
    """The layout of a head's logits for hidden states [..., hidden]. ``has_run_hooks``: the head's pre-hooks have run.
    ``layouts``: the patch's cache of layouts, by the state of the head."""
    layout = layout_of_matrix(head, hidden, autocast_dtype)
    if layout is not None:
        return layout
    if torch.compiler.is_compiling():
        return layout_in_graph(head, hidden, autocast_dtype, has_run_hooks)
    compared_objects, plain_values = state_of(head)
    object_ids = tuple(map(id, compared_objects))
    key = (hidden.dtype, hidden.shape[-1], hidden.device, autocast_dtype, has_run_hooks, plain_values, object_ids)
    if key not in layouts:
        layout = layout_by_trial(head, hidden, autocast_dtype, has_run_hooks)
        layouts[key] = layout, compared_objects  # the objects stay alive, so that no other object gets their ids
    cached_layout: LogitsLayout = layouts[key][0]
    return cached_layout


def layout_of_matrix(head: Any, hidden: Tensor, autocast_dtype: torch.dtype | None) -> LogitsLayout | None:
    """The layout that follows from a head's weight; None if the head is more than a plain matrix."""
    module = unwrapped(head)
    weight = module._parameters.get("weight", module.__dict__.get("weight"))
    has_other_forward = any(OLD_FORWARD in layer.__dict__ or has_instance_forward(layer) for layer in (head, module))
    if (
        not module.has_linear_forward
        or has_other_forward
        or not (type(weight) in (nn.Parameter, Tensor) or is_dtensor(weight))
    ):
        return None
    weight_shape = getattr(weight, "ds_shape", weight.shape)  # DeepSpeed's attribute has the shape before sharding
    if len(weight_shape) != 2:  # a shard of FSDP1
        weight_shape = sizes_of(head) or (0, 0)
    operand_dtypes, result_dtype = product_dtypes(head, hidden.dtype, weight.dtype)
    if autocast_dtype is not None:
        operand_dtypes = [dtype if dtype == torch.float64 else autocast_dtype for dtype in operand_dtypes]
    reason = ""
    if operand_dtypes[0] != operand_dtypes[1]:
        # PyTorch raises when it computes
        reason = f"hidden states of {operand_dtypes[0]} beside a weight of {operand_dtypes[1]}"
    return LogitsLayout(weight_shape[0], result_dtype or operand_dtypes[0], hidden.device, reason)


def product_dtypes(
    head: Any, hidden_dtype: torch.dtype, weight_dtype: torch.dtype
) -> tuple[list[torch.dtype], torch.dtype | None]:
    """Returns a list with the dtypes of hidden states and of the weight in the head's product. Returns also the dtype
    to which FSDP casts the product, None without a cast."""
    precision_policy = None
    if hasattr(type(head), "_get_fsdp_state"):  # of FSDP2
        precision_policy = getattr(head._get_fsdp_state(), "_mp_policy", None)
    elif FSDP1 in [base.__name__ for base in type(head).__mro__]:
        precision_policy = head.mixed_precision
    result_dtype = getattr(precision_policy, "output_dtype", None)
    if precision_policy is None or precision_policy.param_dtype is None:
        return [hidden_dtype, weight_dtype], result_dtype
    weight_dtype = precision_policy.param_dtype
    return [weight_dtype if precision_policy.cast_forward_inputs else hidden_dtype, weight_dtype], result_dtype


def state_of(head: Any) -> tuple[list[Any], tuple[Any, ...]]:
    """Returns what the layout of a head's logits may depend on: objects that are compared by identity, and plain values
    that are compared by value."""
    compared_objects, plain_values = list[Any](), list[Any]()
    for module in head.modules():
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        compared_objects += [module, type(module), class_forward(module), module.__dict__.get("forward"), *hooks]
        tensors = [tensor for tensor in module._parameters.values() if tensor is not None]
        plain_values += [module.training, *((tensor.dtype, tensor.shape) for tensor in tensors)]
    return compared_objects, tuple(plain_values)


def layout_by_trial(head: Any, hidden: Tensor, autocast_dtype: torch.dtype | None, has_run_hooks: bool) -> LogitsLayout:
    """Runs a head on a few rows; returns the layout of the logits. The ``reason`` is "" if two pieces of the rows have
    the same logits as all rows at once, if all modules are of ``ROWWISE_PACKAGES``, or on the meta device."""
    run_head, hidden_size = head.forward if has_run_hooks else head.module_call, hidden.shape[-1]
    forward_in_words = f"a forward of its own, {class_name_of(head)}"
    is_rowwise = all(package_of(module).startswith(ROWWISE_PACKAGES) for module in head.modules())
    empty_layout = LogitsLayout(0, hidden.dtype, hidden.device)
    device_type = "cpu" if hidden.is_meta else hidden.device.type
    with (
        undisturbed_state(head, hidden),
        torch.autocast(device_type, autocast_dtype, autocast_dtype is not None, cache_enabled=False),
    ):
        angles = torch.arange(TRIAL_SHAPE[0] * TRIAL_SHAPE[1] * hidden_size, device=hidden.device, dtype=torch.float32)
        trial_rows = angles.mul_(0.37).sin_().to(hidden.dtype).view(*TRIAL_SHAPE, hidden_size)
        try:
            logits = run_head(trial_rows)
            if type(logits) is not Tensor or logits.dim() != 3 or logits.shape[:2] != TRIAL_SHAPE:
                return empty_layout._replace(reason=f"{forward_in_words}, which gives no logits for each row")
            layout = LogitsLayout(logits.shape[-1], logits.dtype, logits.device)
            if hidden.is_meta or is_rowwise:
                return layout
            logits_of_pieces = torch.cat([run_head(piece) for piece in trial_rows.flatten(0, 1).split(PIECE_ROWS)])
        except Exception as error:  # a user's code
            return empty_layout._replace(
                reason=f"{forward_in_words}, which raises {in_a_line(error)} for rows by themselves"
            )
        dtypes = (logits.dtype, hidden.dtype, autocast_dtype or logits.dtype)
        relative_difference = (logits.flatten(0, 1) - logits_of_pieces).abs().max() / logits.abs().max()
        if relative_difference <= 16 * max(torch.finfo(dtype).eps for dtype in dtypes):
            return layout
    return layout._replace(reason=f"{forward_in_words}, which gives other logits for rows by themselves")


def package_of(module: nn.Module) -> str:
    """Name of the Python module that defines the forward of ``module``: the instance's forward, else the class's."""
    if has_instance_forward(module):
        return module_of(module.__dict__.get(OLD_FORWARD, module.__dict__["forward"]))
    return module_of(class_forward(module))


def class_forward(module: nn.Module) -> Any:
    """The forward of a module's class; for a lazy head, the forward of its class before the patch."""
    return getattr(type(module), "class_before", type(module)).forward


def class_name_of(head: Any) -> str:
    """Name of the class that a head had before the patch. For a wrapped head (PEFT, FSDP): of the module inside."""
    head_class = type(unwrapped(head))
    return str(getattr(head_class, "class_before", head_class).__name__)


@contextlib.contextmanager
def undisturbed_state(head: Any, hidden: Tensor) -> Iterator[None]:
    """A context in which the head runs on made-up rows, without gradients. Random states (also of ``hidden``'s device)
    and the head's small buffers are restored when the context ends."""
    devices = [hidden.device] if hidden.device.type == "cuda" else []
    small_buffers = [
        buffer for buffer in head.buffers() if buffer.numel() <= MAX_RESTORED_ELEMENTS and not buffer.is_meta
    ]
    buffer_copies = [(buffer, buffer.clone()) for buffer in small_buffers]
    with torch.random.fork_rng(devices), torch.no_grad():
        yield
        for buffer, old_values in buffer_copies:
            buffer.data.copy_(old_values)  # a write that changes no version


def layout_in_graph(head: Any, hidden: Tensor, autocast_dtype: torch.dtype | None, has_run_hooks: bool) -> LogitsLayout:
    """The layout of a head's logits, for the graph that is being traced, where the layout is a constant."""
    num_columns, dtype, device, reason = layout_as_constants(
        id(head), hidden.dtype, hidden.shape[-1], str(hidden.device), autocast_dtype, has_run_hooks
    )
    return LogitsLayout(num_columns, dtype, torch.device(device), reason)


def layout_as_constants(
    head_id: int,
    dtype: torch.dtype,
    hidden_size: int,
    device: str,
    autocast_dtype: torch.dtype | None,
    has_run_hooks: bool,
) -> tuple[int, torch.dtype, str, str]:
    """The fields of a ``LogitsLayout``, in types that compilers keep as constants of a graph. ``head_id``: the head's
    key in ``HEADS_BY_ID``."""
    layout = layout_by_trial(
        HEADS_BY_ID[head_id], torch.empty(1, hidden_size, dtype=dtype, device=device), autocast_dtype, has_run_hooks
    )
    return layout.num_columns, layout.dtype, str(layout.device), layout.reason


@functools.cache
def mark_layouts_constant() -> None:
    """Makes compilers call ``layout_as_constants`` while they trace. Called when a model is patched, not before, since
    the function imports the compiler."""
    torch.compiler.assume_constant_result(layout_as_constants)
