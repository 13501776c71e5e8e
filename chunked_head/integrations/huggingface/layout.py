"""``layout_of``: columns, dtype and device of a head's logits, and whether they can be computed some rows at a time.

For a head that is a plain matrix these follow from the weight. Any other head is tried: its forward runs on a few rows,
once for each state that the layout may depend on.
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

TRIAL_SHAPE = (2, 32)  # leading shape of the hidden states of a trial
PIECE_ROWS = (40, 24)  # numbers of rows in the two pieces of a trial
# prefixes of packages whose forwards take each row by itself: they need no comparison, which dropout would fail
ROWWISE_PACKAGES = ("torch.", "peft.", "bitsandbytes.")
MAX_RESTORED_ELEMENTS = 1 << 20  # of a buffer that is restored after a trial
HEADS_BY_ID: "weakref.WeakValueDictionary[int, nn.Module]" = weakref.WeakValueDictionary()  # for graphs


class Layout(NamedTuple):
    """The properties of a head's logits."""

    columns: int
    dtype: torch.dtype
    device: torch.device
    reason: str = ""  # why the logits cannot be lazy; "" if they can

    def checked(self, logits: Tensor) -> Tensor:
        """Returns ``logits``. RuntimeError if their number of columns or their dtype is not that of the layout."""
        if (logits.shape[-1], logits.dtype) != (self.columns, self.dtype):
            raise RuntimeError(
                f"the head gives {logits.shape[-1]} columns of {logits.dtype} where it gave {self.columns} of "
                f"{self.dtype} before; call unpatch_model and patch_model after a change of what its forward does"
            )
        return logits


def layout_of(
    head: Any, hidden: Tensor, autocast_dtype: torch.dtype | None, has_run_hooks: bool, layouts: dict[Any, Any]
) -> Layout:
    """The layout of a head's logits for hidden states [..., hidden]. ``has_run_hooks``: the head's pre-hooks have run.
    ``layouts``: a cache, by the head's state."""
    layout = layout_of_matrix(head, hidden, autocast_dtype)
    if layout is not None:
        return layout
    if torch.compiler.is_compiling():
        return layout_in_graph(head, hidden, autocast_dtype, has_run_hooks)
    compared_objects, plain_values = state_of(head)
    ids = tuple(map(id, compared_objects))
    key = (hidden.dtype, hidden.shape[-1], hidden.device, autocast_dtype, has_run_hooks, plain_values, ids)
    if key not in layouts:
        layout = layout_by_trial(head, hidden, autocast_dtype, has_run_hooks)
        layouts[key] = layout, compared_objects  # which stay alive, so that no other object gets their ids
    cached_layout: Layout = layouts[key][0]
    return cached_layout


def layout_of_matrix(head: Any, hidden: Tensor, autocast_dtype: torch.dtype | None) -> Layout | None:
    """The layout of a head's logits by its weight. None if the head is more than a plain matrix."""
    module = unwrapped(head)
    weight = module._parameters.get("weight", module.__dict__.get("weight"))
    has_other_forward = any(OLD_FORWARD in layer.__dict__ or has_instance_forward(layer) for layer in (head, module))
    if (
        not module.has_linear_forward
        or has_other_forward
        or not (type(weight) in (nn.Parameter, Tensor) or is_dtensor(weight))
    ):
        return None
    shape = getattr(weight, "ds_shape", weight.shape)  # DeepSpeed's
    if len(shape) != 2:  # a shard of FSDP1's
        shape = sizes_of(head) or (0, 0)
    operand_dtypes, result_dtype = product_dtypes(head, hidden.dtype, weight.dtype)
    if autocast_dtype is not None:
        operand_dtypes = [dtype if dtype == torch.float64 else autocast_dtype for dtype in operand_dtypes]
    reason = ""
    if operand_dtypes[0] != operand_dtypes[1]:
        # PyTorch raises when it computes
        reason = f"hidden states of {operand_dtypes[0]} beside a weight of {operand_dtypes[1]}"
    return Layout(shape[0], result_dtype or operand_dtypes[0], hidden.device, reason)


def product_dtypes(
    head: Any, hidden_dtype: torch.dtype, weight_dtype: torch.dtype
) -> tuple[list[torch.dtype], torch.dtype | None]:
    """Returns the dtypes [hidden states, weight] in the product, and the dtype to which FSDP casts the result; None if
    it does not cast the result."""
    policy = None
    if hasattr(type(head), "_get_fsdp_state"):  # FSDP2's
        policy = getattr(head._get_fsdp_state(), "_mp_policy", None)
    elif FSDP1 in [kind.__name__ for kind in type(head).__mro__]:
        policy = head.mixed_precision
    if policy is None or policy.param_dtype is None:
        return [hidden_dtype, weight_dtype], getattr(policy, "output_dtype", None)
    operand_dtypes = [policy.param_dtype if policy.cast_forward_inputs else hidden_dtype, policy.param_dtype]
    return operand_dtypes, getattr(policy, "output_dtype", None)


def state_of(head: Any) -> tuple[list[Any], tuple[Any, ...]]:
    """The state of a head that the layout of its logits may depend on. Returns objects, to be compared by identity, and
    plain values, to be compared by value."""
    compared_objects, plain_values = list[Any](), list[Any]()
    for module in head.modules():
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        compared_objects += [module, type(module), class_forward(module), module.__dict__.get("forward"), *hooks]
        tensors = [tensor for tensor in module._parameters.values() if tensor is not None]
        plain_values += [module.training, *((tensor.dtype, tensor.shape) for tensor in tensors)]
    return compared_objects, tuple(plain_values)


def layout_by_trial(head: Any, hidden: Tensor, autocast_dtype: torch.dtype | None, has_run_hooks: bool) -> Layout:
    """The layout of a head's logits by a trial on a few rows. Its ``reason`` is "" if two pieces of the rows give the
    same logits as all rows at once."""
    head_call, hidden_size = head.forward if has_run_hooks else head.module_call, hidden.shape[-1]
    forward_in_words = f"a forward of its own, {class_name_of(head)}"
    is_rowwise = all(package_of(module).startswith(ROWWISE_PACKAGES) for module in head.modules())
    empty_layout = Layout(0, hidden.dtype, hidden.device)
    device_type = "cpu" if hidden.is_meta else hidden.device.type
    with (
        undisturbed_state(head, hidden),
        torch.autocast(device_type, autocast_dtype, autocast_dtype is not None, cache_enabled=False),
    ):
        angles = torch.arange(TRIAL_SHAPE[0] * TRIAL_SHAPE[1] * hidden_size, device=hidden.device, dtype=torch.float32)
        trial_rows = angles.mul_(0.37).sin_().to(hidden.dtype).view(*TRIAL_SHAPE, hidden_size)
        try:
            logits = head_call(trial_rows)
            if type(logits) is not Tensor or logits.dim() != 3 or logits.shape[:2] != TRIAL_SHAPE:
                return empty_layout._replace(reason=f"{forward_in_words}, which gives no logits for each row")
            layout = Layout(logits.shape[-1], logits.dtype, logits.device)
            if hidden.is_meta or is_rowwise:
                return layout
            logits_of_pieces = torch.cat([head_call(piece) for piece in trial_rows.flatten(0, 1).split(PIECE_ROWS)])
        except Exception as error:  # a user's code
            return empty_layout._replace(
                reason=f"{forward_in_words}, which raises {in_a_line(error)} for rows by themselves"
            )
        tolerance = max(
            torch.finfo(dtype).eps for dtype in (logits.dtype, hidden.dtype, autocast_dtype or logits.dtype)
        )
        difference = (logits.flatten(0, 1) - logits_of_pieces).abs().max() / logits.abs().max()
        if difference <= 16 * tolerance:
            return layout
    return layout._replace(reason=f"{forward_in_words}, which gives other logits for rows by themselves")


def package_of(module: nn.Module) -> str:
    """Name of the Python module that defines the forward of ``module``: of the forward set on the instance, else of its
    class's."""
    if has_instance_forward(module):
        return module_of(module.__dict__.get(OLD_FORWARD, module.__dict__["forward"]))
    return module_of(class_forward(module))


def class_forward(module: nn.Module) -> Any:
    """The forward of a module's class; of a lazy head, that of its class before the patch."""
    return getattr(type(module), "class_before", type(module)).forward


def class_name_of(head: Any) -> str:
    """Name of a head's class before the patch; of a wrapped head, that of the module inside."""
    head_class = type(unwrapped(head))
    return str(getattr(head_class, "class_before", head_class).__name__)


@contextlib.contextmanager
def undisturbed_state(head: Any, hidden: Tensor) -> Iterator[None]:
    """A context for a trial's forward: random states and the head's small buffers are restored after it, and it records
    no gradients."""
    devices = [hidden.device] if hidden.device.type == "cuda" else []
    small_buffers = [
        buffer for buffer in head.buffers() if buffer.numel() <= MAX_RESTORED_ELEMENTS and not buffer.is_meta
    ]
    copies = [(buffer, buffer.clone()) for buffer in small_buffers]
    with torch.random.fork_rng(devices), torch.no_grad():
        yield
        for buffer, old_values in copies:
            buffer.data.copy_(old_values)  # a write that changes no version


def layout_in_graph(head: Any, hidden: Tensor, autocast_dtype: torch.dtype | None, has_run_hooks: bool) -> Layout:
    """The layout of a head's logits while a graph is traced, as a constant of the graph."""
    columns, dtype, device, reason = layout_as_constants(
        id(head), hidden.dtype, hidden.shape[-1], str(hidden.device), autocast_dtype, has_run_hooks
    )
    return Layout(columns, dtype, torch.device(device), reason)


def layout_as_constants(
    head_id: int,
    dtype: torch.dtype,
    hidden_size: int,
    device: str,
    autocast_dtype: torch.dtype | None,
    has_run_hooks: bool,
) -> tuple[int, torch.dtype, str, str]:
    """The fields of a ``Layout``, in types that a compiler keeps as constants of a graph. ``head_id``: the head's key
    in ``HEADS_BY_ID``."""
    layout = layout_by_trial(
        HEADS_BY_ID[head_id], torch.empty(1, hidden_size, dtype=dtype, device=device), autocast_dtype, has_run_hooks
    )
    return layout.columns, layout.dtype, str(layout.device), layout.reason


@functools.cache
def mark_layouts_constant() -> None:
    """Makes compilers call ``layout_as_constants`` as they trace. It imports the compiler, and so runs when a model is
    patched."""
    torch.compiler.assume_constant_result(layout_as_constants)
