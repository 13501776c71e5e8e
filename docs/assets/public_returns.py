"""For the API reference: public functions return what they compute, not the record that stands for it in the code."""

from typing import Any

import griffe


class PublicReturns(griffe.Extension):
    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """``Call[Tensor]`` becomes ``Tensor``, as ``chunked_head.compile.operation`` does at run time."""
        if any(str(decorator.value) == "operation" for decorator in func.decorators):
            first = str(func.returns).split(" | Streams[")[0]
            func.returns = first.removeprefix("Call[").removesuffix("]") if first.startswith("Call[") else first
