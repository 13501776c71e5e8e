"""Whether lazy logits would still be those of the time when the head was called."""

from typing import Any

from torch import Tensor, nn

Remembered = tuple[tuple[str, Tensor, int | None], ...]  # a head's parameters by name, each with its version


def version(tensor: Tensor) -> int | None:
    """Counts what was written to a tensor; None where PyTorch does not."""
    return None if tensor.is_inference() else tensor._version


def remembered(head: nn.Module) -> Remembered:
    if hasattr(head, "_is_fsdp_managed_module"):
        return ()  # FSDP1 puts other tensors in their place as it gathers and frees
    return tuple((name, parameter, version(parameter)) for name, parameter in head.named_parameters())


def changed(head: nn.Module, before: Remembered) -> str | None:
    """Which of a head's parameters is not what it was, in words."""
    now = dict(head.named_parameters())
    for name, parameter, counted in before:
        found = now.get(name)
        if found is parameter and version(parameter) != counted:
            return f"the head's {name} has been written to"
        if found is not parameter and found is not None and stays(found) and stays(parameter):
            return f"the head's {name} is another tensor"
    return None


def stays(parameter: Any) -> bool:
    """Whether it is no framework's, that has other tensors in its place at other times."""
    return type(parameter) in (Tensor, nn.Parameter) and not parameter.is_meta
