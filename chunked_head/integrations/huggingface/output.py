"""Output of a head: columns, dtype and device of its logits, and whether rows by themselves are the same.

A matrix says so by its weight. Any other head is asked, once for each state that its answer may depend on.
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

ROWS, PIECES = (2, 32), (40, 24)  # of hidden states that a head is asked with, whole and in pieces
# packages whose forwards take each row by itself; with dropout two calls of one differ
BY_ROWS = ("torch.", "peft.", "bitsandbytes.")
SMALL = 1 << 20  # numbers of a buffer that a forward may write to
ASKED: "weakref.WeakValueDictionary[int, nn.Module]" = weakref.WeakValueDictionary()  # heads in graphs, by id


class Output(NamedTuple):
    """Logits' columns, dtype and device. ``reason``: why they have to be computed as they are; empty where lazy ones
    do."""

    columns: int
    dtype: torch.dtype
    device: torch.device
    reason: str = ""

    def check(self, logits: Tensor) -> Tensor:
        """``logits``, which the head gave later. Raises where they are not what it gave when it was asked."""
        if (logits.shape[-1], logits.dtype) != (self.columns, self.dtype):
            raise RuntimeError(
                f"the head gives {logits.shape[-1]} columns of {logits.dtype} where it gave {self.columns} of "
                f"{self.dtype} before; call unpatch_model and patch_model after a change of what its forward does"
            )
        return logits


def output_of(head: Any, hidden: Tensor, autocast: torch.dtype | None, hooked: bool, known: dict[Any, Any]) -> Output:
    """What a head gives for hidden states. ``hooked``: its pre-hooks have run. ``known``: what heads were asked."""
    output = of_matrix(head, hidden, autocast)
    if output is not None:
        return output
    if torch.compiler.is_compiling():
        return in_graph(head, hidden, autocast, hooked)
    objects, facts = state_of(head)
    key = (hidden.dtype, hidden.shape[-1], hidden.device, autocast, hooked, facts, tuple(map(id, objects)))
    if key not in known:
        known[key] = ask(head, hidden, autocast, hooked), objects  # which keeps their ids theirs
    answer: Output = known[key][0]
    return answer


def of_matrix(head: Any, hidden: Tensor, autocast: torch.dtype | None) -> Output | None:
    """Output of a product with a weight; None where more than the weight decides."""
    module = unwrapped(head)
    weight = module._parameters.get("weight", module.__dict__.get("weight"))
    hung = any(OLD_FORWARD in one.__dict__ or hides(one) for one in (head, module))
    if not module.plain or hung or not (type(weight) in (nn.Parameter, Tensor) or is_dtensor(weight)):
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
    """Objects and facts that a head's answer may depend on."""
    objects, facts = list[Any](), list[Any]()
    for module in head.modules():
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        objects += [module, type(module), own_forward(module), module.__dict__.get("forward"), *hooks]
        tensors = [tensor for tensor in module._parameters.values() if tensor is not None]
        facts += [module.training, *((tensor.dtype, tensor.shape) for tensor in tensors)]
    return objects, tuple(facts)


def ask(head: Any, hidden: Tensor, autocast: torch.dtype | None, hooked: bool) -> Output:
    """A head's answer for a few rows, of which it may not notice that they come in pieces."""
    call, size = head.forward if hooked else head.real, hidden.shape[-1]
    name = f"a forward of its own, {forward_of(head)}"
    by_rows = all(package_of(module).startswith(BY_ROWS) for module in head.modules())
    nothing = Output(0, hidden.dtype, hidden.device)
    kind = "cpu" if hidden.is_meta else hidden.device.type
    with undisturbed(head, hidden), torch.autocast(kind, autocast, autocast is not None, cache_enabled=False):
        numbers = torch.arange(ROWS[0] * ROWS[1] * size, device=hidden.device, dtype=torch.float32)
        rows = numbers.mul_(0.37).sin_().to(hidden.dtype).view(*ROWS, size)
        try:
            whole = call(rows)
            if type(whole) is not Tensor or whole.dim() != 3 or whole.shape[:2] != ROWS:
                return nothing._replace(reason=f"{name}, which gives no logits for each row")
            output = Output(whole.shape[-1], whole.dtype, whole.device)
            if hidden.is_meta or by_rows:
                return output
            pieces = torch.cat([call(part) for part in rows.flatten(0, 1).split(PIECES)])
        except Exception as error:  # a user's code
            return nothing._replace(reason=f"{name}, which raises {in_a_line(error)} for rows by themselves")
        precision = max(torch.finfo(dtype).eps for dtype in (whole.dtype, hidden.dtype, autocast or whole.dtype))
        off = (whole.flatten(0, 1) - pieces).abs().max() / whole.abs().max()
        if off <= 16 * precision:
            return output
    return output._replace(reason=f"{name}, which gives other logits for rows by themselves")


def package_of(module: nn.Module) -> str:
    """The Python module of the forward that runs: one that hangs on a module, or its class's."""
    if hides(module):
        return module_of(module.__dict__.get(OLD_FORWARD, module.__dict__["forward"]))
    return module_of(own_forward(module))


def own_forward(module: nn.Module) -> Any:
    """A module's class's forward, before it was lazy."""
    return getattr(type(module), "class_before", type(module)).forward


def forward_of(head: Any) -> str:
    kind = type(unwrapped(head))
    return str(getattr(kind, "class_before", kind).__name__)


@contextlib.contextmanager
def undisturbed(head: Any, hidden: Tensor) -> Iterator[None]:
    """A state in which a forward leaves random numbers, gradients and a head's small buffers as they were."""
    devices = [hidden.device] if hidden.device.type == "cuda" else []
    small = [one for one in head.buffers() if one.numel() <= SMALL and not one.is_meta]
    before = [(one, one.clone()) for one in small]
    with torch.random.fork_rng(devices), torch.no_grad():
        yield
        for one, value in before:
            one.data.copy_(value)  # no write that a graph would notice


def in_graph(head: Any, hidden: Tensor, autocast: torch.dtype | None, hooked: bool) -> Output:
    """A head's answer as a constant of a graph of torch.compile."""
    columns, dtype, device, reason = constant(
        id(head), hidden.dtype, hidden.shape[-1], str(hidden.device), autocast, hooked
    )
    return Output(columns, dtype, torch.device(device), reason)


def constant(
    head: int, dtype: torch.dtype, size: int, device: str, autocast: torch.dtype | None, hooked: bool
) -> tuple[int, torch.dtype, str, str]:
    """A head's answer in terms that a compiler keeps; the head by its id."""
    columns, dtype, place, reason = ask(ASKED[head], torch.empty(1, size, dtype=dtype, device=device), autocast, hooked)
    return columns, dtype, str(place), reason


@functools.cache
def mark_constant() -> None:
    """Has compilers call ``constant`` as they trace. Called late, since it imports the compiler."""
    torch.compiler.assume_constant_result(constant)
