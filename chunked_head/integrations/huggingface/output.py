"""``output_of``: columns, dtype and device of a head's logits, and whether its rows can be computed some at a time.

For a plain matrix they follow from the weight. Any other head is tried: its forward runs on a few rows, once for each
state that may change the answer.
"""

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...core.checks import in_a_line, is_dtensor
from .head import FSDP1, OLD_FORWARD, hides, module_of, sizes_of, unwrapped

ROWS, PIECES = (2, 32), (40, 24)  # leading shape of the hidden states of a trial; rows in each of its two pieces
# packages whose forwards take each row by itself: they need no comparison, which dropout would fail
BY_ROWS = ("torch.", "peft.", "bitsandbytes.")
SMALL = 1 << 20  # most elements of a buffer that is restored after a trial
ASKED: "weakref.WeakValueDictionary[int, nn.Module]" = weakref.WeakValueDictionary()  # heads in graphs, by id


class Output(NamedTuple):
    """The properties of a head's logits."""

    columns: int
    dtype: torch.dtype
    device: torch.device
    reason: str = ""  # why the logits cannot be lazy; "" if they can

    def checked(self, logits: Tensor) -> Tensor:
        """The same logits; RuntimeError where the head gave other columns, or another dtype, when it was asked."""
        if (logits.shape[-1], logits.dtype) != (self.columns, self.dtype):
            raise RuntimeError(
                f"the head gives {logits.shape[-1]} columns of {logits.dtype} where it gave {self.columns} of "
                f"{self.dtype} before; call unpatch_model and patch_model after a change of what its forward does"
            )
        return logits


def output_of(
    head: Any, hidden: Tensor, autocast: torch.dtype | None, has_run_hooks: bool, answers: dict[Any, Any]
) -> Output:
    """The output of a head for hidden states. ``has_run_hooks``: its pre-hooks have run. ``answers``: of heads, by
    state."""
    output = of_matrix(head, hidden, autocast)
    if output is not None:
        return output
    if torch.compiler.is_compiling():
        return in_graph(head, hidden, autocast, has_run_hooks)
    objects, facts = state_of(head)
    key = (hidden.dtype, hidden.shape[-1], hidden.device, autocast, has_run_hooks, facts, tuple(map(id, objects)))
    if key not in answers:
        answers[key] = (
            ask(head, hidden, autocast, has_run_hooks),
            objects,
        )  # alive, so that no other object gets their ids
    answer: Output = answers[key][0]
    return answer


def of_matrix(head: Any, hidden: Tensor, autocast: torch.dtype | None) -> Output | None:
    """The output of a head that is a plain matrix; None for any other head."""
    module = unwrapped(head)
    weight = module._parameters.get("weight", module.__dict__.get("weight"))
    has_own_forward = any(OLD_FORWARD in candidate.__dict__ or hides(candidate) for candidate in (head, module))
    if not module.plain or has_own_forward or not (type(weight) in (nn.Parameter, Tensor) or is_dtensor(weight)):
        return None
    shape = getattr(weight, "ds_shape", weight.shape)  # DeepSpeed's
    if len(shape) != 2:  # a shard of FSDP1's
        shape = sizes_of(head) or (0, 0)
    operands, result = dtypes(head, hidden.dtype, weight.dtype)
    if autocast is not None:
        operands = [dtype if dtype == torch.float64 else autocast for dtype in operands]
    reason = ""
    if operands[0] != operands[1]:
        reason = f"hidden states of {operands[0]} beside a weight of {operands[1]}"  # PyTorch's error comes then
    return Output(shape[0], result or operands[0], hidden.device, reason)


def dtypes(head: Any, hidden: torch.dtype, weight: torch.dtype) -> tuple[list[torch.dtype], torch.dtype | None]:
    """Dtypes of hidden states and weight in the product, and of its result where FSDP casts that too."""
    policy = None
    if hasattr(type(head), "_get_fsdp_state"):  # FSDP2's
        policy = getattr(head._get_fsdp_state(), "_mp_policy", None)
    elif FSDP1 in [kind.__name__ for kind in type(head).__mro__]:
        policy = head.mixed_precision
    if policy is None or policy.param_dtype is None:
        return [hidden, weight], getattr(policy, "output_dtype", None)
    operands = [policy.param_dtype if policy.cast_forward_inputs else hidden, policy.param_dtype]
    return operands, getattr(policy, "output_dtype", None)


def state_of(head: Any) -> tuple[list[Any], tuple[Any, ...]]:
    """The state of a head that its output may depend on: objects, to be compared by identity, and plain values."""
    objects, facts = list[Any](), list[Any]()
    for module in head.modules():
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        objects += [module, type(module), own_forward(module), module.__dict__.get("forward"), *hooks]
        tensors = [tensor for tensor in module._parameters.values() if tensor is not None]
        facts += [module.training, *((tensor.dtype, tensor.shape) for tensor in tensors)]
    return objects, tuple(facts)


def ask(head: Any, hidden: Tensor, autocast: torch.dtype | None, has_run_hooks: bool) -> Output:
    """The output of a head by a trial on a few rows. Its reason is "" if two pieces of them give the same logits as all
    at once."""
    call, size = head.forward if has_run_hooks else head.real, hidden.shape[-1]
    name = f"a forward of its own, {forward_of(head)}"
    by_rows = all(package_of(module).startswith(BY_ROWS) for module in head.modules())
    nothing = Output(0, hidden.dtype, hidden.device)
    kind = "cpu" if hidden.is_meta else hidden.device.type
    with undisturbed(head, hidden), torch.autocast(kind, autocast, autocast is not None, cache_enabled=False):
        numbers = torch.arange(ROWS[0] * ROWS[1] * size, device=hidden.device, dtype=torch.float32)
        rows = numbers.mul_(0.37).sin_().to(hidden.dtype).view(*ROWS, size)
        try:
            logits = call(rows)
            if type(logits) is not Tensor or logits.dim() != 3 or logits.shape[:2] != ROWS:
                return nothing._replace(reason=f"{name}, which gives no logits for each row")
            output = Output(logits.shape[-1], logits.dtype, logits.device)
            if hidden.is_meta or by_rows:
                return output
            logits_of_pieces = torch.cat([call(piece) for piece in rows.flatten(0, 1).split(PIECES)])
        except Exception as error:  # a user's code
            return nothing._replace(reason=f"{name}, which raises {in_a_line(error)} for rows by themselves")
        precision = max(torch.finfo(dtype).eps for dtype in (logits.dtype, hidden.dtype, autocast or logits.dtype))
        difference = (logits.flatten(0, 1) - logits_of_pieces).abs().max() / logits.abs().max()
        if difference <= 16 * precision:
            return output
    return output._replace(reason=f"{name}, which gives other logits for rows by themselves")


def package_of(module: nn.Module) -> str:
    """Name of the Python module that has a module's forward: the one that hangs on it, else its class's."""
    if hides(module):
        return module_of(module.__dict__.get(OLD_FORWARD, module.__dict__["forward"]))
    return module_of(own_forward(module))


def own_forward(module: nn.Module) -> Any:
    """The forward of a module's class, or of the class that it had before it was lazy."""
    return getattr(type(module), "class_before", type(module)).forward


def forward_of(head: Any) -> str:
    kind = type(unwrapped(head))
    return str(getattr(kind, "class_before", kind).__name__)


@contextlib.contextmanager
def undisturbed(head: Any, hidden: Tensor) -> Iterator[None]:
    """A context in which a forward does not change random states, gradients and the head's small buffers."""
    devices = [hidden.device] if hidden.device.type == "cuda" else []
    small = [buffer for buffer in head.buffers() if buffer.numel() <= SMALL and not buffer.is_meta]
    copies = [(buffer, buffer.clone()) for buffer in small]
    with torch.random.fork_rng(devices), torch.no_grad():
        yield
        for buffer, value in copies:
            buffer.data.copy_(value)  # a write that changes no version


def in_graph(head: Any, hidden: Tensor, autocast: torch.dtype | None, has_run_hooks: bool) -> Output:
    """The output of a head while a graph is traced, as a constant of the graph."""
    columns, dtype, device, reason = constant(
        id(head), hidden.dtype, hidden.shape[-1], str(hidden.device), autocast, has_run_hooks
    )
    return Output(columns, dtype, torch.device(device), reason)


def constant(
    head: int, dtype: torch.dtype, size: int, device: str, autocast: torch.dtype | None, has_run_hooks: bool
) -> tuple[int, torch.dtype, str, str]:
    """The output of a head in types that a compiler keeps as constants of a graph. ``head``: the id of the head in
    ``ASKED``."""
    output = ask(ASKED[head], torch.empty(1, size, dtype=dtype, device=device), autocast, has_run_hooks)
    return output.columns, output.dtype, str(output.device), output.reason


@functools.cache
def mark_constant() -> None:
    """Makes compilers call ``constant`` as they trace. Runs when a model is patched, since it imports the compiler."""
    torch.compiler.assume_constant_result(constant)
