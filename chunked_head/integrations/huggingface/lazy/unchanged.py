"""Whether lazy logits would still be those of the time when the head was called."""

from typing import Any

import torch
from torch import Tensor, nn

SAMPLES = 1024  # of a parameter's numbers: fused optimizers write to them and PyTorch counts nothing
# a head's parameters by name, each with its version and some of its numbers
Remembered = tuple[tuple[str, Tensor, int | None, Tensor | None], ...]


def version(tensor: Tensor) -> int | None:
    """Counts what was written to a tensor; None where PyTorch does not."""
    return None if tensor.is_inference() else tensor._version


def remembered(head: nn.Module) -> Remembered:
    if hasattr(head, "_is_fsdp_managed_module"):
        return ()  # FSDP1 puts other tensors in their place as it gathers and frees
    return tuple((name, found, version(found), sample(found)) for name, found in head.named_parameters())


def sample(parameter: Tensor) -> Tensor | None:
    """Some numbers of a parameter, a copy; None where it holds none now."""
    if not stays(parameter) or not parameter.is_floating_point() or parameter.numel() == 0:
        return None
    found = parameter.detach()[:: max(1, len(parameter) // SAMPLES)] if parameter.dim() else parameter.detach()
    while found.dim() > 1:
        found = found[:, 0]
    return found.clone()


def differs(before: Tensor | None, now: Tensor | None) -> bool:
    """Waits for the device."""
    if before is None or now is None or before.shape != now.shape or before.device != now.device:
        return False
    if before.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return before.dtype != now.dtype or not torch.equal(before.double().nan_to_num(), now.double().nan_to_num())


def changed(head: nn.Module, before: Remembered, *, numbers: bool) -> str | None:
    """Which of a head's parameters is not what it was, in words; by its ``numbers`` too, or by PyTorch's counts alone,
    which waits for nothing."""
    now = dict(head.named_parameters())
    for name, parameter, counted, some in before:
        found = now.get(name)
        if found is parameter and (version(parameter) != counted or (numbers and differs(some, sample(found)))):
            return f"the head's {name} has been written to"
        if found is not parameter and found is not None and stays(found) and stays(parameter):
            return f"the head's {name} is another tensor"
    return None


def stays(parameter: Any) -> bool:
    """Whether it is no framework's, that has other tensors in its place at other times."""
    return type(parameter) in (Tensor, nn.Parameter) and not parameter.is_meta
