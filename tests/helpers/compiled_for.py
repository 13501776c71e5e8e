"""Records of launches: the kernel, and for each argument what Triton's compiled code depends on."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch


def is_input(name: str) -> bool:
    """True for a pointer of a kernel of the losses' arithmetic."""
    return name in ("chunk_ptr", "table_ptr") or bool(re.fullmatch(r"in\d+_ptr", name))


def told(name: str, value: Any) -> Any:
    """What Triton's compiled code depends on in an argument: a constant, a dtype, a divisibility."""
    from chunked_head.kernels.common.launcher import PER_CALL, PER_ROW
    from triton.tools.tensor_descriptor import TensorDescriptor

    from chunked_head.arithmetic.vectors import SIZE_NAMES

    if name.isupper() or value is None or isinstance(value, bool):
        return value
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, tuple(value.block_shape)
    if isinstance(value, torch.Tensor):
        return value.dtype, name in PER_ROW or is_input(name) or value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return abs(value) < 2**31 and (name in (*PER_CALL, *SIZE_NAMES) or (value == 1, value % 16 == 0))
    return type(value)


def record_launches(
    patch: pytest.MonkeyPatch, runs: Callable[[str], bool] = lambda name: True
) -> set[tuple[str, str, tuple]]:
    """Returns a set that has, for each launch while ``patch`` lasts, the kernel's name and file, and each argument's
    ``told``. A kernel runs only if ``runs`` is true for its name."""
    from chunked_head.kernels.common.launcher import Launcher

    found: set[tuple[str, str, tuple]] = set()
    launch = Launcher.__getitem__

    def record(self: Launcher, grid: tuple[int, ...]) -> Callable[..., None]:
        def recorded(*arguments: Any, **constants: Any) -> None:
            code, named = self.kernel.fn.__code__, dict(zip(self.kernel.arg_names, arguments, strict=False)) | constants
            kinds = tuple((name, told(name, value)) for name, value in named.items())
            found.add((code.co_name, code.co_filename, kinds))
            if runs(code.co_name):
                launch(self, grid)(*arguments, **constants)

        return recorded

    patch.setattr(Launcher, "__getitem__", record)
    return found
