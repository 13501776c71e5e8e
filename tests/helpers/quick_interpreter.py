"""Triton's interpreter, several times as fast: what it finds out about types and about its language it finds out once.

Of an interpreted kernel's time NumPy takes little. The rest goes into types made anew at each operation, into their
comparison, into a check of overflows that nobody reads, and into patching Triton's language at each call of a device
function. Types are remembered, and NumPy is given the same operands; only products are made in float64.
"""

import copy
import dataclasses
import functools
import operator
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
        from triton.runtime import interpreter
    except ImportError:  # where there is no Triton nothing is interpreted
        return
    if triton.__version__.startswith("3.5."):
        interpreter.TensorDescHandle.validate = validate
    for part in (patch_once, remember_types, remember_conversions, exact_products):
        try:
            part(interpreter)
        except AttributeError:  # private names: a version without them is as slow as it is
            continue


def exact_products(interpreter: Any) -> None:
    """``tl.dot`` in float64: in float32 a row's last bits depend on where NumPy's BLAS finds it in memory. The
    interpreter also takes bfloat16 for the integers of its bits; here it is the upper half of a float32."""
    import numpy as np

    def wide(operand: Any) -> Any:
        data = operand.data
        if operand.dtype.scalar.name == "bf16":
            data = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return data.astype(np.float64)

    def create_dot(self: Any, a: Any, b: Any, sums: Any, *more: Any) -> Any:
        if 8 in (a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth):
            return original(self, a, b, sums, *more)
        with np.errstate(all="ignore"):
            product = np.matmul(wide(a), wide(b)).astype(sums.data.dtype)
        return interpreter.TensorHandle(product + sums.data, sums.dtype.scalar)

    original = interpreter.InterpreterBuilder.create_dot
    interpreter.InterpreterBuilder.create_dot = create_dot


def patch_once(interpreter: Any) -> None:
    """A launch replaces what ``triton.language`` holds by the interpreter's own, and gives it back at its end. Each
    call of a device function looks through all of it again and finds nothing left to replace."""
    import triton.language as tl

    original, patch_attr, semantic = interpreter._patch_lang, interpreter._patch_attr, interpreter.interpreter_semantic
    seen: set[int] = set()  # whose globals have been looked through in this launch

    def patch(function: FunctionType) -> Any:
        names = function.__globals__
        if id(names) in seen:
            return NOTHING
        languages = [value for value in names.values() if value is tl or value is tl.core]
        if languages and not any(tl.core.is_builtin(language.load) for language in languages):
            seen.add(id(names))
            return NOTHING
        scope = original(function)
        # Triton 3.5 takes int() of an array of one number, which NumPy 2.4 refuses
        tl.tensor.__index__ = lambda self: int(self.handle.data.item())
        if scope is not None:  # Triton 3.5 gives nothing back
            restore = scope.restore
            scope.restore = lambda: (seen.clear(), restore())
        return scope

    def quick_patch_attr(place: Any, name: str, member: Any, *more: Any) -> None:
        inner = getattr(member, "__wrapped__", member)  # which does not ask again whether there is a semantic

        def quick(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        patch_attr(place, name, member, *more)
        setattr(place, name, quick)

    interpreter._patch_lang, interpreter._patch_attr = patch, quick_patch_attr


def remember_types(interpreter: Any) -> None:
    import triton.language as tl

    unwrap, make_block, make_tensor, equal = (
        tl.core._unwrap_if_constexpr, tl.block_type.__init__, tl.tensor.__init__, tl.dtype.__eq__,
    )  # fmt: skip
    plain = {int, float, bool, str, type(None), tl.tensor}
    blocks: dict[Any, dict[str, Any]] = {}

    def quick_unwrap(value: Any) -> Any:
        kind = type(value)
        return value.value if kind is tl.constexpr else value if kind in plain else unwrap(value)

    def quick_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([quick_unwrap(size) for size in shape])
        known = blocks.get((element_ty.name, sizes))
        if known is None:
            make_block(self, element_ty, shape)
            self.sizes = sizes
            blocks[element_ty.name, sizes] = vars(self)
        else:
            self.__dict__ = known

    def quick_tensor(self: Any, handle: Any, type: Any) -> None:
        try:
            self.shape, self.numel, self.dtype = type.of_tensors
        except AttributeError:
            make_tensor(self, handle, type)
            type.of_tensors = self.shape, self.numel, self.dtype
        self.handle, self.type = handle, type

    tl.core._unwrap_if_constexpr = quick_unwrap
    tl.block_type.__init__ = quick_block
    tl.block_type.to_ir = lambda self, builder: self  # as the interpreter's builder would make it anew
    tl.tensor.__init__ = quick_tensor
    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def remember_conversions(interpreter: Any) -> None:
    import numpy as np
    import triton.language as tl

    builder, semantic = interpreter.interpreter_builder, interpreter.interpreter_semantic
    kind = type(semantic)
    np_dtype, fits, computation = (
        interpreter._get_np_dtype,
        interpreter._validate_np_data_size,
        kind.computation_type_impl,
    )
    broadcast, check, cast = kind.broadcast_impl_value, kind.binary_op_type_checking_impl, kind.cast

    tl.dtype.sizes = None  # a number's
    sizes = operator.attrgetter("sizes")

    def remembered(function: Any, key: Any) -> Any:
        found: dict[Any, Any] = {}

        def quick(*args: Any) -> Any:
            known = key(*args)
            if (value := found.get(known)) is None:
                value = found[known] = function(*args)
            return value

        return quick

    def quick_broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if sizes(lhs.type) == sizes(rhs.type) else broadcast(self, lhs, rhs)

    common = functools.cache(np.broadcast_shapes)
    block = remembered(lambda dtype, shape: tl.block_type(dtype, list(shape)), lambda dtype, shape: (dtype.name, shape))

    def typed(lhs: Any, rhs: Any) -> Any:
        """Operands of one operation of NumPy, which broadcasts: their types say that they have been."""
        left, right = sizes(lhs.type), sizes(rhs.type)
        if left == right:
            return lhs, rhs
        if left is not None and right is not None and len(left) != len(right):
            return broadcast(semantic, lhs, rhs)
        both = common(left or (), right or ())
        lhs = lhs if left == both else tl.tensor(lhs.handle, block(lhs.dtype, both))
        return lhs, rhs if right == both else tl.tensor(rhs.handle, block(rhs.dtype, both))

    apart = copy.copy(semantic)
    apart.broadcast_impl_value = typed

    def quick_check(self: Any, lhs: Any, rhs: Any, *more: Any, **options: Any) -> Any:
        same = type(lhs) is type(rhs) is tl.tensor and lhs.dtype is rhs.dtype
        if same and not more and not options and not lhs.dtype.is_ptr():
            return typed(lhs, rhs)
        return check(apart, lhs, rhs, *more, **options)

    def quick_cast(self: Any, value: Any, dtype: Any, *more: Any, **options: Any) -> Any:
        return value if value.dtype is dtype else cast(self, value, dtype, *more, **options)

    interpreter._get_np_dtype = remembered(np_dtype, lambda dtype: dtype.name)
    interpreter._validate_np_data_size = remembered(fits, lambda array, dtype: (array.itemsize, dtype.name))
    kind.computation_type_impl = remembered(
        computation, lambda self, a, one, b, other, div: (a.name, one, b.name, other, div)
    )
    kind.broadcast_impl_value, kind.binary_op_type_checking_impl, kind.cast = quick_broadcast, quick_check, quick_cast
    # an addition of integers checks itself by a dozen other operations; what comes of it is an assertion for debugging
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
