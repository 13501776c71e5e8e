"""Functions that find the head of a model, and the hooks and forwards that other code has set on a module.

An instance's forward is a function that other code has set as ``module.forward``. It replaces the class's forward.
"""

import inspect
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules import module as global_hooks

from ...core.checks import is_dtensor

FSDP1 = "FullyShardedDataParallel"  # name of the wrapper's class
# the attribute that holds a wrapped head, by the name of the wrapper's class; FSDP1 gathers the head's parameters
# while the wrapper's forward runs
WRAPPERS = {FSDP1: "_fsdp_wrapped_module", "OptimizedModule": "_orig_mod"}
# prefixes of packages whose hooks gather and free parameters, or count, and do not read the head's output
NONREADING_PACKAGES = (
    "torch.distributed.fsdp.", "torch.distributed._composable.", "torch.utils.", "deepspeed.", "accelerate.",
)  # fmt: skip
SIGNATURE_FORWARD = "_chunked_head_shown"  # attribute of our forward: a function with the signature of the class's
OLD_FORWARD = "_old_forward"  # attribute in which accelerate's hooks store the forward that they call


class UnknownHead(Exception):
    """Error of a model without a head that this library can patch; the text says why."""


def base_model(model: nn.Module) -> nn.Module:
    """The model inside of PEFT's wrapper; ``model`` itself without a wrapper."""
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if callable(get_base_model) else model


def find_head(model: nn.Module) -> nn.Module:
    """The module that computes a model's logits. UnknownHead if there is no such module. Every patched forward calls
    this function, since users and PEFT replace heads."""
    get_head = getattr(model, "get_output_embeddings", None)
    if not callable(get_head):
        raise UnknownHead(f"{type(model).__name__} has no get_output_embeddings()")
    try:
        head = get_head()
    except (AttributeError, NotImplementedError) as error:
        raise UnknownHead(f"get_output_embeddings() of {type(model).__name__} raises {error!r}") from error
    if head is None:
        head = head_by_size(model)
    if isinstance(head, nn.ModuleList):
        raise UnknownHead(f"its output embeddings are {len(head)} modules, as of several codebooks, and not one head")
    return checked_head(head, model)


def head_by_size(model: nn.Module) -> nn.Module | None:
    """The head of a model whose ``get_output_embeddings()`` returns None: the only child that is an nn.Linear with
    ``vocab_size`` rows (ClvpForCausalLM). A model without such a child has the only output embeddings of its submodules
    as head (BlipForConditionalGeneration). None if there is no head, or more than one."""
    vocab_size = getattr(getattr(model, "config", None), "vocab_size", None)
    matrices = [
        module for module in model.children() if isinstance(module, nn.Linear) and module.out_features == vocab_size
    ]
    if matrices:
        return matrices[0] if len(matrices) == 1 else None
    heads = {embeddings(module, "output") for module in model.modules() if module is not model} - {None}
    return heads.pop() if len(heads) == 1 else None


def checked_head(head: Any, model: nn.Module) -> nn.Module:
    """Returns the module that computes the logits: ``head``, or the active copy inside of ``head`` if ``head`` is
    PEFT's ``modules_to_save`` wrapper. UnknownHead if ``head`` is no module that maps hidden states to logits."""
    saved_modules = getattr(head, "modules_to_save", None)
    if isinstance(saved_modules, nn.ModuleDict):
        adapter_names = [name for name in head.active_adapters if name in saved_modules]
        if len(adapter_names) > 1:
            raise UnknownHead(f"its head has {len(adapter_names)} active copies of PEFT's modules_to_save")
        return head.original_module if head.disable_adapters or not adapter_names else saved_modules[adapter_names[0]]
    if head is None:
        raise UnknownHead("its get_output_embeddings() is None, and no one matrix inside of it is its head")
    if not isinstance(head, nn.Module):
        raise UnknownHead(f"its output embeddings are {type(head).__name__}, not a module")
    if isinstance(head, nn.Embedding) or head is embeddings(model, "input"):
        raise UnknownHead("its output embeddings are its input embeddings' module, which also embeds")
    if sizes_of(head) is None:
        raise UnknownHead(f"its head, {type(head).__name__}, has no in_features and out_features as a matrix has")
    return head


def embeddings(module: nn.Module, kind: str) -> Any:
    """What ``module.get_input_embeddings()`` or ``get_output_embeddings()`` returns, for a ``kind`` of ``"input"`` or
    ``"output"``; None if the module does not have the method."""
    get_embeddings = getattr(module, f"get_{kind}_embeddings", None)
    try:  # contextlib.suppress is more than the compiler of torch 2.9 follows
        return get_embeddings() if callable(get_embeddings) else None
    except (AttributeError, NotImplementedError):
        return None


def name_of(head: nn.Module, model: nn.Module) -> str:
    """The head's name in a model, such as ``lm_head``; the name of the head's class if the model lacks the head."""
    return next((name for name, module in model.named_modules() if module is head), type(head).__name__)


def unwrapped(head: Any) -> Any:
    """The module inside of a wrapper of ``WRAPPERS``; ``head`` itself without a wrapper."""
    wrapper_attributes = [WRAPPERS[base.__name__] for base in type(head).__mro__ if base.__name__ in WRAPPERS]
    return getattr(head, wrapper_attributes[0]) if wrapper_attributes else head


def sizes_of(head: Any) -> tuple[int, int] | None:
    """Numbers of rows and columns of a head's matrix, also in a wrapper of PEFT or FSDP. None if there is no matrix."""
    for module in (unwrapped(head), getattr(head, "original_module", None)):
        num_rows, num_columns = getattr(module, "out_features", None), getattr(module, "in_features", None)
        if isinstance(num_rows, int) and isinstance(num_columns, int):
            weight: Any = module._parameters.get("weight") if isinstance(module, nn.Linear) else None
            # users and PEFT replace a weight without the attributes; a quantised weight or a shard has another shape
            is_matrix = (type(weight) is nn.Parameter or is_dtensor(weight)) and weight.dim() == 2
            return (weight.shape[0], weight.shape[1]) if is_matrix else (num_rows, num_columns)
    return None


def reading_hook(head: Any) -> str | None:
    """Names the first hook for which logits cannot be lazy, as a text with the hook's kind; None without such a hook.
    These hooks read the head's output, the output's gradient, or the input of a module inside of the head."""
    has_hooks_or_modules = head._modules or head._forward_hooks or head._backward_hooks or head._backward_pre_hooks
    if not has_hooks_or_modules and not global_hooks._global_forward_hooks:
        return None  # the usual head, without a loop
    for module in head.modules():
        forward_hooks = (module._forward_hooks, global_hooks._global_forward_hooks)
        hook_tables_by_kind = {
            "forward": forward_hooks,
            "backward": (module._backward_hooks, module._backward_pre_hooks),
        }
        if module is not head:
            hook_tables_by_kind["forward pre-"] = (module._forward_pre_hooks, global_hooks._global_forward_pre_hooks)
        for kind, hook_tables in hook_tables_by_kind.items():
            for hook in (hook for hooks in hook_tables for hook in hooks.values()):
                if not module_of(hook).startswith(NONREADING_PACKAGES):
                    return f"a {kind} hook, {name_of_hook(hook)}"
    return None


def input_hook(head: Any) -> tuple[str | None, bool]:
    """Returns the name of the first user's hook on the head's input (None without a user's hook), and True if a
    framework has set hooks on the head. ``(None, False)`` if no hook is on the input."""
    if not head._forward_pre_hooks and not global_hooks._global_forward_pre_hooks:
        return None, False
    module_hooks = [*head._forward_pre_hooks.values(), *head._forward_hooks.values()]
    has_framework_hook = any(module_of(hook).startswith(NONREADING_PACKAGES) for hook in module_hooks)
    hooks = [*module_hooks, *global_hooks._global_forward_pre_hooks.values()]
    user_hooks = [hook for hook in hooks if not module_of(hook).startswith(NONREADING_PACKAGES)]
    return name_of_hook(user_hooks[0]) if user_hooks else None, has_framework_hook


def name_of_hook(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__name__))


def module_of(hook: Any) -> str:
    """Name of the Python module that defines a function, such as a hook; "" if it is unknown."""
    while hasattr(hook, "func"):  # functools.partial
        hook = hook.func
    return getattr(hook, "__module__", None) or ""


class ClassForward:
    """A callable to set as ``module.forward``. A call runs the forward of the module's class at that time."""

    def __init__(self, module: nn.Module):
        self.module = module

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(type(self.module).forward.__get__(self.module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.module).forward(self.module, *args, **kwargs)


def loosen_forward(module: Any) -> None:
    """Replaces an instance's forward by a ``ClassForward`` if the forward is the bound method of the class. Called
    before the module's class changes."""
    for name in ("forward", OLD_FORWARD):
        if is_of_class(module.__dict__.get(name), module):
            module.__dict__[name] = ClassForward(module)


def has_instance_forward(module: Any) -> bool:
    """True if the innermost forward set on a module is neither the class's bound method nor a ``ClassForward``."""
    instance_forward = module.__dict__.get("forward")
    innermost_forward = module.__dict__.get(OLD_FORWARD, instance_forward)
    return (
        instance_forward is not None
        and not isinstance(innermost_forward, ClassForward)
        and not is_of_class(innermost_forward, module)
    )


def is_of_class(instance_forward: Any, module: Any) -> bool:
    """True if ``instance_forward`` is the bound method of the module's class."""
    unbound_forward, class_forward = getattr(instance_forward, "__func__", None), type(module).forward
    return (
        unbound_forward in (class_forward, getattr(class_forward, SIGNATURE_FORWARD, class_forward))
        and instance_forward.__self__ is module
    )


def instance_forward_in_words(module: Any) -> str:
    """A text with name, file and line of an instance's forward."""
    function = module.__dict__.get("forward")
    while (inner_function := getattr(function, "__func__", getattr(function, "func", None))) is not None:
        function = inner_function
    code_object = getattr(function, "__code__", None)
    if code_object is None:
        return f"{type(function).__module__}.{type(function).__qualname__}"
    return f"{code_object.co_name} at {Path(code_object.co_filename).name}:{code_object.co_firstlineno}"
