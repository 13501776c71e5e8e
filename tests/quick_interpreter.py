"""Triton's interpreter, a third faster: within a launch its language is patched once, not at each device function.

A launch replaces what ``triton.language`` holds by the interpreter's own, and gives it back at its end. Each call of a
device function looks through all of it again and finds nothing left to replace.
"""

from types import FunctionType, SimpleNamespace
from typing import Any

NOTHING = SimpleNamespace(restore=lambda: None)


def validate(self: Any) -> None:
    """What Triton 3.5 asks of a descriptor, rows 16 bytes apart: it asks for 16 elements."""
    itemsize = self.base.dtype.element_ty.primitive_bitwidth // 8
    assert self.base.data.item() % 16 == 0 and self.strides[-1].data.item() == 1
    assert all(stride.data.item() * itemsize % 16 == 0 for stride in self.strides[:-1])


def install() -> None:
    """In this process, before any kernel runs."""
    try:
        import triton
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:  # where there is no Triton nothing is interpreted
        return
    if triton.__version__.startswith("3.5."):
        interpreter.TensorDescHandle.validate = validate
    original = getattr(interpreter, "_patch_lang", None)  # private: a version without it is as slow as it is
    if original is None:
        return

    def patch(function: FunctionType) -> Any:
        seen = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        if seen and not any(tl.core.is_builtin(language.load) for language in seen):
            return NOTHING
        scope = original(function)
        # Triton 3.5 takes int() of an array of one number, which NumPy 2.4 refuses
        tl.tensor.__index__ = lambda self: int(self.handle.data.item())
        return scope

    interpreter._patch_lang = patch
