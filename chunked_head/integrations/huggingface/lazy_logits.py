"""``LazyLogits``: a tensor of logits that are computed when a function reads their numbers."""

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx
from torch.utils.hooks import RemovableHandle

from ...core.checks import is_dtensor
from .fused import (
    LOG_SOFTMAX,
    STATISTICS,
    RowStatistics,
    StatisticsOperand,
    cross_entropy,
    log_softmax,
    logprobs_outputs,
    nll_loss,
)
from .head import NONREADING_PACKAGES, module_of
from .head_call import change_in_words, version
from .virtual import COPIES as PLAIN_COPIES
from .virtual import OPERATORS, VIEWS, VirtualLogits, gathers

COPIES = PLAIN_COPIES | {LOG_SOFTMAX: log_softmax}


def view_function(
    function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any], position: int | None = None
) -> Callable[[Tensor], Tensor]:
    """Makes a function of computed logits that returns the view ``function(logits, *arguments, **keywords)``.
    ``position``: index of the view if ``function`` returns a sequence of views; else None."""

    def view_of(logits: Tensor) -> Any:
        views = function(logits, *arguments, **keywords)
        return views if position is None else list(views)[position]

    return view_of


class LazyLogits(Tensor):
    """Logits [..., vocab] of a patched model, with shape, dtype and device, but without numbers until they are
    computed.

    Casts, scalings, caps, slices and reshapes return lazy logits. ``cross_entropy`` does not compute lazy logits,
    and ``argmax(-1)`` computes some rows at a time. Any other function computes the logits, as without a patch,
    and warns once; ``materialise()`` computes them without a warning.
    """

    _computed: Tensor | None  # the logits as a plain tensor; None until they are computed
    _virtual: VirtualLogits  # what the logits are computed from
    _hidden_version: int | None  # version of the hidden states at the head's call
    _statistics: RowStatistics | None  # the statistics that were computed last
    _view_base: "LazyLogits | None"  # the logits that these logits are a view of
    _view_of: Callable[[Tensor], Tensor] | None  # makes the view of the computed ``_view_base``
    _relatives: "list[weakref.ref[LazyLogits]]"  # all lazy logits of one memory: a base and its views, these logits too
    _is_shared: bool  # ``_computed`` is in one memory with the other ``_relatives``

    @staticmethod
    def wrap(virtual: VirtualLogits, base: "LazyLogits | None" = None, view_of: Any = None) -> "LazyLogits":
        """Makes lazy logits of ``virtual``. ``base``: the lazy logits of which the new logits are a view, else None.
        ``view_of``: the function that makes the view of the computed base."""
        shape, dtype, device = virtual.shape, virtual.dtype, virtual.device
        logits = Tensor._make_wrapper_subclass(LazyLogits, shape, dtype=dtype, device=device)
        logits._virtual, logits._statistics, logits._computed = virtual, None, None
        logits._hidden_version = version(virtual.hidden)
        logits._view_base, logits._view_of, logits._is_shared = base, view_of, False
        logits._relatives = [] if base is None else base._relatives
        logits._relatives.append(weakref.ref(logits))
        return logits

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        state_in_words = "" if self._computed is None else ", computed"
        shape, dtype, device = tuple(self.shape), self.dtype, self.device
        return f"{type(self).__name__}(shape={shape}, dtype={dtype}, device='{device}'{state_in_words})"

    def materialise(self) -> Tensor:
        """Returns the logits [..., vocab] as the unpatched model would have computed them. They are computed once."""
        if self._computed is None:
            self.check_unchanged()
            head_call = self._virtual.head_call
            try:
                self._computed = head_call.computed_logits(self._virtual)
            except RuntimeError as error:
                if not is_dtensor(getattr(head_call.head, "weight", None)):
                    raise
                raise RuntimeError(
                    f"{head_call.patch.model}'s logits could not be computed: its head is sharded again; read them "
                    "right after the forward, before its backward, or leave the model unpatched"
                ) from error
        return self._computed

    def share(self) -> None:
        """Computes all of ``_relatives`` in one memory, so that a write to one of them reaches the others."""
        for reference in self._relatives:
            lazy_logits = reference()
            if lazy_logits is not None:
                lazy_logits.in_memory()

    def has_relatives(self) -> bool:
        """True if other lazy logits of ``_relatives`` are alive."""
        return sum(reference() is not None for reference in self._relatives) > 1

    def in_memory(self) -> Tensor:
        """Returns the computed logits, as a view of the computed ``_view_base`` if there is a base."""
        if self._view_base is None:
            self.materialise()
        elif not self._is_shared and self._view_of is not None:
            with torch.set_grad_enabled(self._virtual.head_call.has_grad):
                self._computed = self._view_of(self._view_base.in_memory())
        self._is_shared = True
        assert self._computed is not None
        return self._computed

    def has_gradient(self) -> bool:
        """True if the logits require a gradient, whether they are computed or not."""
        if self._computed is not None:
            return self._computed.requires_grad
        virtual = self._virtual
        operands = [virtual.hidden, *(argument for _, argument in virtual.steps if isinstance(argument, Tensor))]
        head_call = virtual.head_call
        return head_call.has_grad and any(tensor.requires_grad for tensor in (*operands, *head_call.head.parameters()))

    def check_unchanged(self) -> None:
        """RuntimeError if the hidden states or the head's parameters have changed since the head's call, so that logits
        computed now would differ."""
        head_call = self._virtual.head_call
        is_hidden_written = version(self._virtual.hidden) != self._hidden_version
        hidden_change = "its hidden states have been written to" if is_hidden_written else None
        change_text = hidden_change or change_in_words(head_call.head, head_call.parameter_versions)
        if change_text is not None:
            raise RuntimeError(
                f"{head_call.patch.model}'s logits are computed when they are read, and since its forward "
                f"{change_text}: they would differ; read them before (before the optimizer's step), keep "
                "logits.materialise(), or leave the model unpatched"
            )

    def statistics_for(self, operand: StatisticsOperand, ids: Tensor | None) -> RowStatistics:
        """Row statistics with the log-probabilities of ``ids`` [..., 1]; of any ids if ``ids`` is None. Returns the
        last statistics if ids and gradient mode are the same; else computes new statistics."""
        has_grad, cached_statistics = torch.is_grad_enabled(), self._statistics
        if cached_statistics is not None and cached_statistics.has_grad != has_grad:
            cached_statistics = None
        if cached_statistics is not None and (
            ids is None or (cached_statistics.ids is ids and cached_statistics.ids_version == version(ids))
        ):
            return cached_statistics
        zero_ids = operand.logits.hidden.new_zeros(operand.logits.shape[:-1], dtype=torch.int64)
        outputs = logprobs_outputs(operand, zero_ids if ids is None else ids[..., 0], lse=True, mean_logit=True)
        logprobs, lse, mean_logit = outputs
        ids_version = None if ids is None else version(ids)
        self._statistics = RowStatistics(logprobs, lse, mean_logit, ids, ids_version, has_grad)
        self._virtual.head_call.patch.count_loss(operand.tail)
        return self._statistics

    def hand_down(self, views: "tuple[LazyLogits, ...]") -> None:
        """Gives each of ``views`` the statistics of its rows. ``views``: the logits at each index of the first
        dimension. TRL calls ``gather`` for all rows, then ``logsumexp`` for one sequence after the other."""
        if self._statistics is not None:
            logprobs, lse, mean_logit, *_, has_grad = self._statistics
            for i, view in enumerate(views):
                view._statistics = RowStatistics(logprobs[i], lse[i], mean_logit[i], None, None, has_grad)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in GRADIENT_QUERIES and isinstance(args[0], LazyLogits):
            return args[0].has_gradient() == (function_name(function) == "requires_grad")
        if function in METADATA_QUERIES:
            return Tensor.__torch_function__(function, (), args, kwargs)  # from shape, dtype and device
        first_logits = args[0] if args else kwargs.get("input")
        if isinstance(first_logits, LazyLogits) and is_framework_hook(first_logits, function, args):
            return RemovableHandle(OrderedDict())
        if (
            isinstance(first_logits, LazyLogits)
            and is_passed_through(first_logits)
            and function_name(function) in ("detach", "clone")
        ):
            same_logits = LazyLogits.wrap(first_logits._virtual, first_logits, lambda logits: logits)
            same_logits._computed = first_logits._computed
            return same_logits
        if isinstance(first_logits, LazyLogits) and first_logits._computed is None:
            result = lazy_result(first_logits, function, args, kwargs)
            if result is not NotImplemented:
                return result
        return result_of_computed(function, function_name(function), args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # functions that C++ calls, past __torch_function__
        return result_of_computed(function, str(function), args, kwargs or {})


def result_of_computed(function: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls a function with computed logits in place of lazy logits; returns the function's result. If the function
    writes to logits or returns a view of logits, the logits and their ``_relatives`` are computed in one memory."""
    lazy_operands = [*lazy_in(args), *lazy_in(kwargs)]
    is_writing = writes_to_tensor(name) or "out" in kwargs
    for logits in lazy_operands if is_writing else []:
        count_computation(logits, name)
        logits.share()
    result = function(*with_computed(args, name), **with_computed(kwargs, name))
    if is_writing:
        return result
    unshared_operands = [logits for logits in lazy_operands if not logits._is_shared and logits.has_relatives()]
    if any(is_view(result, logits._computed) for logits in unshared_operands):
        if result is unshared_operands[0]._computed:  # as of a cast to the logits' dtype
            return unshared_operands[0]
        for logits in unshared_operands:
            logits.share()
        return function(*with_computed(args, name), **with_computed(kwargs, name))
    return result


def lazy_in(value: Any) -> list[LazyLogits]:
    """The lazy logits in a value: the value itself, or elements of tuples, lists and dicts."""
    if isinstance(value, LazyLogits):
        return [value]
    elements = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [logits for element in elements for logits in lazy_in(element)]


def is_view(value: Any, logits: Any) -> bool:
    """True if a value, or an element of a tuple or list, may share memory with ``logits``."""
    if isinstance(value, (tuple, list)):
        return any(is_view(element, logits) for element in value)
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return False
    if type(value) is not Tensor or type(logits) is not Tensor:
        return True
    return value.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr()


def lazy_result(first_logits: LazyLogits, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of a function that has a handler for lazy logits; NotImplemented for other functions and arguments."""
    name = HANDLER_NAMES.get(function)
    if name is None:
        return NotImplemented
    virtual_logits = first_logits._virtual
    operands: tuple[Any, ...] = args[1:] if args else ()
    kwargs = {key: value for key, value in kwargs.items() if key != "input"}
    if any(isinstance(value, LazyLogits) for value in (*operands, *kwargs.values())):
        return NotImplemented
    first_logits.check_unchanged()
    if name in RESULT_HANDLERS:
        return RESULT_HANDLERS[name](virtual_logits, *operands, **kwargs)
    if name in STATISTICS:
        return STATISTICS[name](virtual_logits, first_logits.statistics_for, *operands, **kwargs)
    result = (COPIES.get(name) or VIEWS[name])(virtual_logits, *operands, **kwargs)
    if result is NotImplemented:
        return result
    is_copy = name not in VIEWS or (name == "__getitem__" and gathers(operands[0]))
    if result is virtual_logits and name not in ("clone", "contiguous"):
        return first_logits

    def wrapped(virtual: VirtualLogits, piece_index: int | None = None) -> LazyLogits:
        if is_copy:
            return LazyLogits.wrap(virtual)
        return LazyLogits.wrap(virtual, first_logits, view_function(function, operands, kwargs, piece_index))

    if isinstance(result, VirtualLogits):
        return wrapped(result)
    lazy_pieces = tuple(wrapped(piece, i) for i, piece in enumerate(result))
    if name in ("__iter__", "unbind") and not any((*operands, *kwargs.values())):  # along the first dimension
        first_logits.hand_down(lazy_pieces)
    return iter(lazy_pieces) if name == "__iter__" else lazy_pieces


def writes_to_tensor(name: str) -> bool:
    """True if the function with the name ``name`` writes to its first argument."""
    name = name.split(".")[1] if name.startswith("aten.") else name
    return name in WRITING_METHODS or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")


def is_framework_hook(logits: LazyLogits, function: Any, args: Any) -> bool:
    """True if ``function`` sets a framework's hook on the gradient of lazy logits. The caller drops the hook, since
    logits that are not computed have no gradient. RuntimeError for a user's hook."""
    name = function_name(function)
    if name not in HOOK_METHODS or logits._computed is not None:
        return False
    if len(args) > 1 and module_of(args[1]).startswith(NONREADING_PACKAGES):
        return True
    raise RuntimeError(
        f"{name} on lazy logits is not supported: a loss of them has no gradient of logits. Call it on "
        "logits.materialise() before the loss is computed, or leave the model unpatched"
    )


def argmax(virtual: VirtualLogits, dim: int | None = None, keepdim: bool = False) -> Any:
    if dim is None or dim not in (-1, len(virtual.shape) - 1):
        return NotImplemented
    return virtual.head_call.argmax(virtual, keepdim)


# functions whose results are no logits and no row statistics, by name
RESULT_HANDLERS: dict[str, Any] = {"cross_entropy": cross_entropy, "nll_loss": nll_loss, "argmax": argmax}


def with_computed(value: Any, purpose: str) -> Any:
    """``value`` with computed logits in place of lazy logits, also inside of tuples, lists and dicts. ``purpose``: name
    of the function that reads the logits, for the report."""
    if isinstance(value, LazyLogits):
        count_computation(value, purpose)
        return value.materialise()
    if hasattr(type(value), "compute_for"):  # TracedLogits
        return value.compute_for(purpose)
    if isinstance(value, (tuple, list)):
        return type(value)([with_computed(element, purpose) for element in value])
    if isinstance(value, dict):
        return {key: with_computed(element, purpose) for key, element in value.items()}
    return value


def count_computation(logits: LazyLogits, purpose: str) -> None:
    """Reports to the model's patch that ``purpose`` needs logits which have not been computed yet. RuntimeError if the
    patch has the option ``strict``, and where ``is_passed_through`` raises."""
    is_passed_through(logits)  # raises
    if logits._computed is None:
        logits._virtual.head_call.patch.count_logits(purpose)


def is_passed_through(logits: LazyLogits) -> bool:
    """True in the forward of a torch.autograd.Function of DDP, FSDP or DeepSpeed, which passes a model's outputs and
    their gradients through. False outside of a Function's forward. RuntimeError in the forward of any other Function,
    where lazy logits would get no gradient."""
    if not logits._virtual.head_call.has_grad or not in_function_forward():
        return False
    frame: Any = sys._getframe(1)
    while frame is not None and not isinstance(context := first_argument(frame), FunctionCtx):
        frame = frame.f_back
    if frame is not None and frame.f_globals.get("__name__", "").startswith(PASSING_PACKAGES):
        return True
    class_name = "A torch.autograd.Function" if frame is None else type(context).__name__.removesuffix("Backward")
    raise RuntimeError(
        f"{class_name}.apply was given lazy logits, which would get no gradient from it; give it logits.materialise()"
    )


def in_function_forward() -> bool:
    """True in the forward of a torch.autograd.Function, where autograd switches off reverse and forward mode. A dual
    number without a tangent shows that forward mode is off; ``no_grad`` leaves forward mode on."""
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    zero = torch.zeros((), dtype=torch.float32)
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(forward_ad.make_dual(zero, zero)).tangent is None


def first_argument(frame: Any) -> Any:
    """The value of a frame's first parameter; None for a function without parameters."""
    parameter_names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    return frame.f_locals.get(parameter_names[0]) if parameter_names else None


def function_name(function: Any) -> str:
    """Name of a function, or of the property that the function is the getter of."""
    name = getattr(function, "__name__", str(function))
    return function.__self__.__name__ if name == "__get__" else name


def names_by_function() -> dict[Any, str]:
    """Maps torch's functions that have a handler for lazy logits to the handler's name in ``COPIES``, ``VIEWS``,
    ``STATISTICS`` or ``RESULT_HANDLERS``."""
    handler_names = {name: name for name in (*COPIES, *VIEWS, *STATISTICS, *RESULT_HANDLERS)} | OPERATORS
    names: dict[Any, str] = {}  # of handlers, by function
    for name, handler_name in handler_names.items():
        for owner in (Tensor, torch, F):
            function = getattr(owner, name, None)
            if callable(function):
                names[function] = handler_name
    return names


HANDLER_NAMES = names_by_function()  # by function of torch
PASSING_PACKAGES = ("torch.nn.parallel.", "torch.distributed.fsdp.", "deepspeed.")  # whose Functions get lazy logits
HOOK_METHODS = {"retain_grad", "register_hook", "register_post_accumulate_grad_hook"}
WRITING_METHODS = {
    "__setitem__",
    *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")),
}
PROPERTY_NAMES = ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse",
                  "is_quantized", "is_nested", "is_mps", "is_xpu", "itemsize", "nbytes", "grad_fn", "_base",
                  "names")  # fmt: skip
GRADIENT_QUERIES = {Tensor.requires_grad.__get__, Tensor.is_leaf.__get__}  # type: ignore[attr-defined]
METADATA_QUERIES = {getattr(Tensor, name).__get__ for name in PROPERTY_NAMES if hasattr(Tensor, name)} | {
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.is_floating_point,
    Tensor.is_complex, Tensor.element_size, Tensor.__len__, Tensor.get_device, Tensor.__hash__, Tensor.is_inference,
    Tensor.is_contiguous, torch.is_floating_point, torch.is_complex, torch.numel, torch.get_device, torch.is_inference,
}  # fmt: skip
