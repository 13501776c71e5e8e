"""``LazyLogits``: logits as a tensor that is computed when a function reads its numbers."""

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx
from torch.utils.hooks import RemovableHandle

from ...core.checks import is_dtensor
from .fused import LOG_SOFTMAX, STATISTICS, Read, Rows, cross_entropy, log_softmax, nll_loss, outputs_of
from .head import BLIND, module_of
from .source import changed, version
from .virtual import COPIES as PLAIN_COPIES
from .virtual import OPERATORS, VIEWS, Virtual, picks

COPIES = PLAIN_COPIES | {LOG_SOFTMAX: log_softmax}


class View(NamedTuple):
    """A view of logits, as the function and arguments that make it from them."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = {}
    position: int | None = None  # index among the function's results; None if it returns one


class KnownRows(NamedTuple):
    """Statistics of rows that were computed, and the ids and state that they were computed for."""

    ids: Tensor | None  # [..., 1]; None where the statistics serve for any
    version: int | None  # of the ids
    grad: bool  # gradients were enabled
    rows: Rows


class LazyLogits(Tensor):
    """Logits [..., vocab] of a patched model, with shape, dtype and device but no numbers until they are asked for.

    Casts, scalings, caps, slices and reshapes return lazy logits. ``cross_entropy`` of lazy logits never holds them,
    and ``argmax(-1)`` holds some rows at a time. Any other function computes them, as the unpatched model does, and
    warns once; ``materialise()`` computes them without a warning.
    """

    _real: Tensor | None
    _virtual: Virtual
    _hidden_version: int | None  # version of the hidden states at the head's call
    _rows: KnownRows | None
    _origin: "LazyLogits | None"  # the logits that these are a view of
    _view: View | None  # how these are made from ``_origin``
    _family: "list[weakref.ref[LazyLogits]]"  # all lazy logits that would share memory with these, and these
    _is_shared: bool  # the numbers are in the memory of ``_origin``

    @staticmethod
    def wrap(virtual: Virtual, base: "LazyLogits | None" = None, view: View | None = None) -> "LazyLogits":
        shape, dtype, device = virtual.shape, virtual.dtype, virtual.device
        logits = Tensor._make_wrapper_subclass(LazyLogits, shape, dtype=dtype, device=device)
        logits._virtual, logits._rows, logits._real = virtual, None, None
        logits._hidden_version = version(virtual.hidden)
        logits._origin, logits._view, logits._is_shared = base, view, False
        logits._family = [] if base is None else base._family
        logits._family.append(weakref.ref(logits))
        return logits

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        state = "" if self._real is None else ", computed"
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}'{state})"

    def materialise(self) -> Tensor:
        """The logits, as the unpatched model would have computed them; computed once."""
        if self._real is None:
            self.check_unchanged()
            source = self._virtual.source
            try:
                self._real = source.real(self._virtual)
            except RuntimeError as error:
                if not is_dtensor(getattr(source.head, "weight", None)):
                    raise
                raise RuntimeError(
                    f"{source.agreement.model}'s logits could not be computed: its head is sharded again; read them "
                    "right after the forward, before its backward, or leave the model unpatched"
                ) from error
        return self._real

    def share(self) -> None:
        """Computes all logits of the family in one memory, so that a write to one of them reaches the others."""
        for reference in self._family:
            relative = reference()
            if relative is not None:
                relative.in_memory()

    def has_relatives(self) -> bool:
        """True where other lazy logits of the family are alive."""
        return sum(member() is not None for member in self._family) > 1

    def in_memory(self) -> Tensor:
        """These logits, computed as a view of those of ``_origin``."""
        if self._origin is None:
            self.materialise()
        elif not self._is_shared:
            with torch.set_grad_enabled(self._virtual.source.grad):
                self._real = through(self._origin.in_memory(), self._view)
        self._is_shared = True
        assert self._real is not None
        return self._real

    def has_gradient(self) -> bool:
        """``requires_grad`` of the logits."""
        if self._real is not None:
            return self._real.requires_grad
        virtual = self._virtual
        operands = [virtual.hidden, *(argument for _, argument in virtual.steps if isinstance(argument, Tensor))]
        source = virtual.source
        return source.grad and any(tensor.requires_grad for tensor in (*operands, *source.head.parameters()))

    def check_unchanged(self) -> None:
        """RuntimeError where hidden states or the head have changed since its call, and the logits would differ."""
        source = self._virtual.source
        written = version(self._virtual.hidden) != self._hidden_version
        change = "its hidden states have been written to" if written else changed(source.head, source.parameters)
        if change is not None:
            raise RuntimeError(
                f"{source.agreement.model}'s logits are computed when they are read, and since its forward {change}: "
                "they would differ; read them before (before the optimizer's step), keep logits.materialise(), or "
                "leave the model unpatched"
            )

    def rows_for(self, read: Read, index: Tensor | None) -> Rows:
        """Statistics of the rows for ids [..., 1], or for any ids where ``index`` is None: those computed last where
        they are for the same ids, else new ones."""
        grad, cached = torch.is_grad_enabled(), self._rows
        if (
            cached is not None
            and cached.grad == grad
            and (index is None or (cached.ids is index and cached.version == version(index)))
        ):
            return cached.rows
        ids = read.logits.hidden.new_zeros(read.logits.shape[:-1], dtype=torch.int64)
        rows = Rows(*outputs_of(read, ids if index is None else index[..., 0], lse=True, mean_logit=True))
        self._rows = KnownRows(index, None if index is None else version(index), grad, rows)
        self._virtual.source.agreement.count_loss(read.tail)
        return rows

    def hand_down(self, members: "tuple[LazyLogits, ...]") -> None:
        """Gives each view along the first dimension the statistics of its rows: TRL gathers from all rows, then takes
        the log-sum-exp of one sequence after the other."""
        if self._rows is not None:
            for i, member in enumerate(members):
                member._rows = KnownRows(None, None, self._rows.grad, Rows(*(value[i] for value in self._rows.rows)))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in GRADIENTS and isinstance(args[0], LazyLogits):
            return args[0].has_gradient() == (function_name(function) == "requires_grad")
        if function in QUERIES:
            return Tensor.__torch_function__(function, (), args, kwargs)  # from shape, dtype and device
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, LazyLogits) and watches(first, function, args):
            return RemovableHandle(OrderedDict())
        if isinstance(first, LazyLogits) and refuse_functions(first) and function_name(function) in ("detach", "clone"):
            same_logits = LazyLogits.wrap(first._virtual, first, View(lambda logits: logits))
            same_logits._real = first._real
            return same_logits
        if isinstance(first, LazyLogits) and first._real is None:
            result = lazily(first, function, args, kwargs)
            if result is not NotImplemented:
                return result
        return computing(function, function_name(function), args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # functions that C++ calls, past __torch_function__
        return computing(function, str(function), args, kwargs or {})


def through(logits: Tensor, view: Any) -> Tensor:
    """Applies ``view`` to computed logits."""
    result: Any = view.function(logits, *view.arguments, **view.keywords)
    tensor: Tensor = result if view.position is None else list(result)[view.position]
    return tensor


def computing(function: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of a function of computed logits. Where the function writes to them, or returns a view, which may be
    written to later, all of their family are computed in one memory."""
    lazy = [*lazy_in(args), *lazy_in(kwargs)]
    writing = writes(name) or "out" in kwargs
    for logits in lazy if writing else []:
        will_compute(logits, name)
        logits.share()
    result = function(*computed(args, name), **computed(kwargs, name))
    if writing:
        return result
    unshared = [logits for logits in lazy if not logits._is_shared and logits.has_relatives()]
    if any(is_view(result, logits._real) for logits in unshared):
        if result is unshared[0]._real:  # as of a cast to its own dtype
            return unshared[0]
        for logits in unshared:
            logits.share()
        return function(*computed(args, name), **computed(kwargs, name))
    return result


def lazy_in(value: Any) -> list[LazyLogits]:
    if isinstance(value, LazyLogits):
        return [value]
    elements = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [logits for element in elements for logits in lazy_in(element)]


def is_view(value: Any, logits: Any) -> bool:
    """True where a value, or one in it, may share memory with the logits."""
    if isinstance(value, (tuple, list)):
        return any(is_view(element, logits) for element in value)
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return False
    if type(value) is not Tensor or type(logits) is not Tensor:
        return True
    return value.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr()


def lazily(first: LazyLogits, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of a function of lazy logits that does not compute them; NotImplemented if there is none."""
    name = NAMES.get(function)
    if name is None:
        return NotImplemented
    virtual = first._virtual
    operands: tuple[Any, ...] = args[1:] if args else ()
    kwargs = {key: value for key, value in kwargs.items() if key != "input"}
    if any(isinstance(value, LazyLogits) for value in (*operands, *kwargs.values())):
        return NotImplemented
    first.check_unchanged()
    if name in RESULTS:
        return RESULTS[name](virtual, *operands, **kwargs)
    if name in STATISTICS:
        return STATISTICS[name](virtual, first.rows_for, *operands, **kwargs)
    result = (COPIES.get(name) or VIEWS[name])(virtual, *operands, **kwargs)
    if result is NotImplemented:
        return result
    copied = name not in VIEWS or (name == "__getitem__" and picks(operands[0]))
    base, view = (None, None) if copied else (first, View(function, operands, kwargs))
    if isinstance(result, Virtual):
        is_same = result is virtual and name not in ("clone", "contiguous")
        return first if is_same else LazyLogits.wrap(result, base, view)
    views = [view and view._replace(position=i) for i in range(len(result))]
    pieces = tuple(LazyLogits.wrap(virtual, base, view) for virtual, view in zip(result, views, strict=True))
    if name in ("__iter__", "unbind") and not any((*operands, *kwargs.values())):  # along the first dimension
        first.hand_down(pieces)
    return iter(pieces) if name == "__iter__" else pieces


def writes(name: str) -> bool:
    """True for the name of a function that writes to its tensor."""
    name = name.split(".")[1] if name.startswith("aten.") else name
    return name in WRITING or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")


def watches(logits: LazyLogits, function: Any, args: Any) -> bool:
    """True where a framework hangs a hook on the gradient of lazy logits: they have none until they are computed, and
    the hook is dropped. RuntimeError for a user's hook."""
    name = function_name(function)
    if name not in WATCHING or logits._real is not None:
        return False
    if len(args) > 1 and module_of(args[1]).startswith(BLIND):
        return True
    raise RuntimeError(
        f"{name} on lazy logits is not supported: a loss of them has no gradient of logits. Call it on "
        "logits.materialise() before the loss is computed, or leave the model unpatched"
    )


def argmax(virtual: Virtual, dim: int | None = None, keepdim: bool = False) -> Any:
    if dim is None or dim not in (-1, len(virtual.shape) - 1):
        return NotImplemented
    return virtual.source.argmax(virtual, keepdim)


# functions whose results are no logits, by name
RESULTS: dict[str, Any] = {"cross_entropy": cross_entropy, "nll_loss": nll_loss, "argmax": argmax}


def computed(value: Any, purpose: str) -> Any:
    """``value`` with lazy logits, also those in containers, replaced by computed ones."""
    if isinstance(value, LazyLogits):
        will_compute(value, purpose)
        return value.materialise()
    if hasattr(type(value), "computed"):  # TracedLogits
        return value.computed(purpose)
    if isinstance(value, (tuple, list)):
        return type(value)([computed(element, purpose) for element in value])
    if isinstance(value, dict):
        return {key: computed(element, purpose) for key, element in value.items()}
    return value


def will_compute(logits: LazyLogits, purpose: str) -> None:
    """Counts logits that are about to be computed for ``purpose``; RuntimeError where they must not be."""
    refuse_functions(logits)
    if logits._real is None:
        logits._virtual.source.agreement.count_logits(purpose)


def refuse_functions(logits: LazyLogits) -> bool:
    """RuntimeError in the forward of a torch.autograd.Function: to it lazy logits need no gradient, and would get none.

    Returns True in the forward of one that passes a model's outputs through and leaves gradients as they are (DDP's,
    FSDP's, DeepSpeed's), False outside of any.
    """
    if not logits._virtual.source.grad or not in_function_forward():
        return False
    frame: Any = sys._getframe(1)
    while frame is not None and not isinstance(context := first_argument(frame), FunctionCtx):
        frame = frame.f_back
    if frame is not None and frame.f_globals.get("__name__", "").startswith(PASSING):
        return True
    name = "A torch.autograd.Function" if frame is None else type(context).__name__.removesuffix("Backward")
    raise RuntimeError(
        f"{name}.apply was given lazy logits, which would get no gradient from it; give it logits.materialise()"
    )


def in_function_forward() -> bool:
    """True in the forward of a torch.autograd.Function. Autograd switches both of its modes off there;
    ``no_grad`` leaves the forward mode on, which a dual number shows, and in inference mode nothing has gradients."""
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    zero = torch.zeros((), dtype=torch.float32)
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(forward_ad.make_dual(zero, zero)).tangent is None


def first_argument(frame: Any) -> Any:
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    return frame.f_locals.get(names[0]) if names else None


def function_name(function: Any) -> str:
    name = getattr(function, "__name__", str(function))
    return function.__self__.__name__ if name == "__get__" else name  # a property's


def names_by_function() -> dict[Any, str]:
    """Maps each function of torch that stays lazy to the name of its handler in ``COPIES``, ``VIEWS``, ``STATISTICS``
    or ``RESULTS``."""
    meanings = {name: name for name in (*COPIES, *VIEWS, *STATISTICS, *RESULTS)} | OPERATORS
    names: dict[Any, str] = {}
    for name, meaning in meanings.items():
        for owner in (Tensor, torch, F):
            function = getattr(owner, name, None)
            if callable(function):
                names[function] = meaning
    return names


NAMES = names_by_function()
PASSING = ("torch.nn.parallel.", "torch.distributed.fsdp.", "deepspeed.")
WATCHING = {"retain_grad", "register_hook", "register_post_accumulate_grad_hook"}
WRITING = {"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"))}
PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized",
              "is_nested", "is_mps", "is_xpu", "itemsize", "nbytes", "grad_fn", "_base", "names")  # fmt: skip
GRADIENTS = {Tensor.requires_grad.__get__, Tensor.is_leaf.__get__}  # type: ignore[attr-defined]
QUERIES = {getattr(Tensor, name).__get__ for name in PROPERTIES if hasattr(Tensor, name)} | {
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.is_floating_point,
    Tensor.is_complex, Tensor.element_size, Tensor.__len__, Tensor.get_device, Tensor.__hash__, Tensor.is_inference,
    Tensor.is_contiguous, torch.is_floating_point, torch.is_complex, torch.numel, torch.get_device, torch.is_inference,
}  # fmt: skip
