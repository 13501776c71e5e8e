"""Lazy logits as a tensor: what takes a tensor takes it, and what needs numbers gets them computed."""

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
    """A function of logits that gives a view of them, or one of several."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    named: Mapping[str, Any] = {}
    at: int | None = None


class LazyLogits(Tensor):
    """Logits [..., vocab] of a patched model, with shape, dtype and device but no numbers until they are asked for.

    Casts, scalings, caps, slices and reshapes stay lazy, ``cross_entropy`` of them never holds them, ``argmax(-1)``
    holds some rows at a time. Everything else computes them, as the model would have, and says so once;
    ``materialise()`` does it without a word.
    """

    _real: Tensor | None
    _virtual: Virtual
    _written: int | None  # what had been written to the hidden states by then
    _rows: tuple[tuple[Tensor | None, int | None, bool], Rows] | None  # statistics, and of which ids
    _origin: "LazyLogits | None"  # what these are a view of
    _way: View | None  # from the base's numbers to these
    _family: "list[weakref.ref[LazyLogits]]"  # lazy logits that would share memory with these, and these
    _is_shared: bool  # the numbers are in the base's memory

    @staticmethod
    def of(virtual: Virtual, base: "LazyLogits | None" = None, way: View | None = None) -> "LazyLogits":
        shape, dtype, device = virtual.shape, virtual.dtype, virtual.device
        made = Tensor._make_wrapper_subclass(LazyLogits, shape, dtype=dtype, device=device)
        made._virtual, made._rows, made._real = virtual, None, None
        made._written = version(virtual.hidden)
        made._origin, made._way, made._is_shared = base, way, False
        made._family = [] if base is None else base._family
        made._family.append(weakref.ref(made))
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        known = "" if self._real is None else ", computed"
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}'{known})"

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
                    f"{source.patch.model}'s logits could not be computed: its head is sharded again; read them right "
                    "after the forward, before its backward, or leave the model unpatched"
                ) from error
        return self._real

    def share(self) -> None:
        """Computes all logits of a family in one memory, for what may be written to one of them."""
        for reference in self._family:
            relative = reference()
            if relative is not None:
                relative.in_memory()

    def in_memory(self) -> Tensor:
        """These logits, as a view of their base's."""
        if self._origin is None:
            self.materialise()
        elif not self._is_shared:
            with torch.set_grad_enabled(self._virtual.source.grad):
                self._real = through(self._origin.in_memory(), self._way)
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
        """Raises where the logits would not be those of the time when the head was called."""
        source = self._virtual.source
        written = version(self._virtual.hidden) != self._written
        what = "its hidden states have been written to" if written else changed(source.head, source.parameters)
        if what is not None:
            raise RuntimeError(
                f"{source.patch.model}'s logits are computed when they are read, and since its forward {what}: they "
                "would differ; read them before (before the optimizer's step), keep logits.materialise(), or leave "
                "the model unpatched"
            )

    def rows_for(self, read: Read, index: Tensor | None) -> Rows:
        """Statistics of the rows for ids [..., 1]: those computed last where they are for the same, or any will do."""
        grad = torch.is_grad_enabled()
        if self._rows is not None:
            (known, written, with_grad), rows = self._rows
            if with_grad == grad and (index is None or (known is index and written == version(index))):
                return rows
        ids = read.logits.hidden.new_zeros(read.logits.shape[:-1], dtype=torch.int64)
        rows = Rows(*outputs_of(read, ids if index is None else index[..., 0], lse=True, mean_logit=True))
        self._rows = ((index, None if index is None else version(index), grad), rows)
        self._virtual.source.patch.count_loss(read.tail)
        return rows

    def hand_down(self, parts: "tuple[LazyLogits, ...]") -> None:
        """Gives each part the statistics of its rows: TRL gathers from all, then takes the log-sum-exp
        of one sequence after the other."""
        if self._rows is not None:
            (_, _, grad), rows = self._rows
            for at, part in enumerate(parts):
                part._rows = ((None, None, grad), Rows(*(value[at] for value in rows)))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in GRADIENTS and isinstance(args[0], LazyLogits):
            return args[0].has_gradient() == (named(function) == "requires_grad")
        if function in QUERIES:
            return Tensor.__torch_function__(function, (), args, kwargs)  # from shape, dtype and device
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, LazyLogits) and watches(first, function, args):
            return RemovableHandle(OrderedDict())
        if isinstance(first, LazyLogits) and refuse_functions(first) and named(function) in ("detach", "clone"):
            passed = LazyLogits.of(first._virtual, first, View(lambda logits: logits))
            passed._real = first._real
            return passed
        if isinstance(first, LazyLogits) and first._real is None:
            found = lazily(first, function, args, kwargs)
            if found is not NotImplemented:
                return found
        return computing(function, named(function), args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # what comes by C++ past __torch_function__
        return computing(function, str(function), args, kwargs or {})


def through(logits: Tensor, way: Any) -> Tensor:
    """A view of logits."""
    made: Any = way.function(logits, *way.arguments, **way.named)
    view: Tensor = made if way.at is None else list(made)[way.at]
    return view


def computing(function: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """A function of computed logits. Where it writes to them, or gives what may be written to later, all of their
    family are in one memory."""
    lazy = [*lazy_in(args), *lazy_in(kwargs)]
    writing = writes(name) or "out" in kwargs
    for logits in lazy if writing else []:
        will_compute(logits, name)
        logits.share()
    made = function(*computed(args, name), **computed(kwargs, name))
    if writing:
        return made
    apart = [one for one in lazy if not one._is_shared and sum(member() is not None for member in one._family) > 1]
    if any(is_view(made, one._real) for one in apart):
        if made is apart[0]._real:  # as of a cast to its own dtype
            return apart[0]
        for logits in apart:
            logits.share()
        return function(*computed(args, name), **computed(kwargs, name))
    return made


def lazy_in(value: Any) -> list[LazyLogits]:
    if isinstance(value, LazyLogits):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [found for part in parts for found in lazy_in(part)]


def is_view(value: Any, logits: Any) -> bool:
    """False for what shares no memory with logits."""
    if isinstance(value, (tuple, list)):
        return any(is_view(part, logits) for part in value)
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return False
    if type(value) is not Tensor or type(logits) is not Tensor:
        return True
    return value.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr()


def lazily(first: LazyLogits, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A function's result without the logits computed, or NotImplemented."""
    name = NAMES.get(function)
    if name is None:
        return NotImplemented
    virtual = first._virtual
    rest: tuple[Any, ...] = args[1:] if args else ()
    kwargs = {key: value for key, value in kwargs.items() if key != "input"}
    if any(isinstance(value, LazyLogits) for value in (*rest, *kwargs.values())):
        return NotImplemented
    first.check_unchanged()
    if name in RESULTS:
        return RESULTS[name](virtual, *rest, **kwargs)
    if name in STATISTICS:
        return STATISTICS[name](virtual, first.rows_for, *rest, **kwargs)
    found = (COPIES.get(name) or VIEWS[name])(virtual, *rest, **kwargs)
    if found is NotImplemented:
        return found
    copied = name not in VIEWS or (name == "__getitem__" and picks(rest[0]))
    base, way = (None, None) if copied else (first, View(function, rest, kwargs))
    if isinstance(found, Virtual):
        return first if found is virtual and name not in ("clone", "contiguous") else LazyLogits.of(found, base, way)
    parts = tuple(LazyLogits.of(part, base, way and way._replace(at=at)) for at, part in enumerate(found))
    if name in ("__iter__", "unbind") and not any((*rest, *kwargs.values())):  # along the first dimension
        first.hand_down(parts)
    return iter(parts) if name == "__iter__" else parts


def writes(name: str) -> bool:
    """True for the name of a function that writes to its tensor."""
    name = name.split(".")[1] if name.startswith("aten.") else name
    return name in WRITING or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")


def watches(logits: LazyLogits, function: Any, args: Any) -> bool:
    """True for a framework's hook on the gradient of lazy logits, which are none of its module's outputs until they
    are computed. Raises where a user waits for their gradient."""
    name = named(function)
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


# what is no logits any more, by the function's name
RESULTS: dict[str, Any] = {"cross_entropy": cross_entropy, "nll_loss": nll_loss, "argmax": argmax}


def computed(value: Any, what: str) -> Any:
    """A value with real logits for lazy ones, in containers too."""
    if isinstance(value, LazyLogits):
        will_compute(value, what)
        return value.materialise()
    if hasattr(type(value), "computed"):  # TracedLogits
        return value.computed(what)
    if isinstance(value, (tuple, list)):
        return type(value)([computed(part, what) for part in value])
    if isinstance(value, dict):
        return {key: computed(part, what) for key, part in value.items()}
    return value


def will_compute(logits: LazyLogits, what: str) -> None:
    """Counts logits that are about to be computed for ``what``; raises where they must not be."""
    refuse_functions(logits)
    if logits._real is None:
        logits._virtual.source.patch.count_logits(what)


def refuse_functions(logits: LazyLogits) -> bool:
    """A torch.autograd.Function sees that lazy logits themselves need no gradient, and would give them none. Returns
    whether they are in one that passes all of a model's outputs through, whose backward does nothing to gradients."""
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


def named(function: Any) -> str:
    name = getattr(function, "__name__", str(function))
    return function.__self__.__name__ if name == "__get__" else name  # a property's


def by_function() -> dict[Any, str]:
    """Every function of torch that means one of the operations, and which."""
    names = {name: name for name in (*COPIES, *VIEWS, *STATISTICS, *RESULTS)} | OPERATORS
    found: dict[Any, str] = {}
    for name, meaning in names.items():
        for owner in (Tensor, torch, F):
            function = getattr(owner, name, None)
            if callable(function):
                found[function] = meaning
    return found


NAMES = by_function()
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
