"""Functions that find the head of a model, and the hooks and forwards that other code has set on a module."""

import inspect
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules import module as of_all_modules

from ...core.checks import is_dtensor

FSDP1 = "FullyShardedDataParallel"
# modules around a head, and the attribute that is the head: FSDP1 gathers its parameters while its forward runs
WRAPPERS = {FSDP1: "_fsdp_wrapped_module", "OptimizedModule": "_orig_mod"}
# packages whose hooks gather and free parameters, or count, and do not read the output
BLIND = ("torch.distributed.fsdp.", "torch.distributed._composable.", "torch.utils.", "deepspeed.", "accelerate.")
SHOWN = "_chunked_head_shown"  # attribute of our forward: the function that code finds which takes its wrapper off
OLD_FORWARD = "_old_forward"  # attribute in which accelerate's hooks keep the forward that they call


class NotUnderstood(Exception):
    """Raised with the reason why a model cannot be patched."""


def base_model(model: nn.Module) -> nn.Module:
    """The model inside of PEFT's."""
    get = getattr(model, "get_base_model", None)
    return get() if callable(get) else model


def find_head(model: nn.Module) -> nn.Module:
    """The module that computes a model's logits. It is looked up in every forward, since users and PEFT replace it."""
    get = getattr(model, "get_output_embeddings", None)
    if not callable(get):
        raise NotUnderstood(f"{type(model).__name__} has no get_output_embeddings()")
    try:
        head = get()
    except (AttributeError, NotImplementedError) as error:
        raise NotUnderstood(f"get_output_embeddings() of {type(model).__name__} raises {error!r}") from error
    if head is None:
        head = unnamed(model)
    if isinstance(head, nn.ModuleList):
        raise NotUnderstood(f"its output embeddings are {len(head)} modules, as of several codebooks, and not one head")
    return active(head, model)


def unnamed(model: nn.Module) -> nn.Module | None:
    """The head of a model without ``get_output_embeddings()``: its only matrix with a row per id (ClvpForCausalLM), or
    the head of the only model inside of it that has one (BlipForConditionalGeneration). None if there is neither."""
    vocab = getattr(getattr(model, "config", None), "vocab_size", None)
    matrices = [module for module in model.children() if isinstance(module, nn.Linear) and module.out_features == vocab]
    if matrices:
        return matrices[0] if len(matrices) == 1 else None
    heads = {embeddings(module, "output") for module in model.modules() if module is not model} - {None}
    return heads.pop() if len(heads) == 1 else None


def active(head: Any, model: nn.Module) -> nn.Module:
    """The module that computes: the active copy inside of PEFT's ``modules_to_save`` wrapper, else the head itself."""
    saved = getattr(head, "modules_to_save", None)
    if isinstance(saved, nn.ModuleDict):
        names = [name for name in head.active_adapters if name in saved]
        if len(names) > 1:
            raise NotUnderstood(f"its head has {len(names)} active copies of PEFT's modules_to_save")
        return head.original_module if head.disable_adapters or not names else saved[names[0]]
    if head is None:
        raise NotUnderstood("its get_output_embeddings() is None, and no one matrix inside of it is its head")
    if not isinstance(head, nn.Module):
        raise NotUnderstood(f"its output embeddings are {type(head).__name__}, not a module")
    if isinstance(head, nn.Embedding) or head is embeddings(model, "input"):
        raise NotUnderstood("its output embeddings are its input embeddings' module, which also embeds")
    if sizes_of(head) is None:
        raise NotUnderstood(f"its head, {type(head).__name__}, has no in_features and out_features as a matrix has")
    return head


def embeddings(module: nn.Module, kind: str) -> Any:
    """The ``"input"`` or ``"output"`` embeddings of a module, by its ``get_...`` method; None without one."""
    get = getattr(module, f"get_{kind}_embeddings", None)
    try:  # contextlib.suppress is more than the compiler of torch 2.9 follows
        return get() if callable(get) else None
    except (AttributeError, NotImplementedError):
        return None


def name_of(head: nn.Module, model: nn.Module) -> str:
    return next((name for name, module in model.named_modules() if module is head), type(head).__name__)


def unwrapped(head: Any) -> Any:
    """The module inside of a wrapper, else the module itself."""
    names = [WRAPPERS[kind.__name__] for kind in type(head).__mro__ if kind.__name__ in WRAPPERS]
    return getattr(head, names[0]) if names else head


def sizes_of(head: Any) -> tuple[int, int] | None:
    """Rows and columns of a head's matrix, or of the one inside of PEFT's or FSDP's wrapper around it."""
    for module in (unwrapped(head), getattr(head, "original_module", None)):
        rows, columns = getattr(module, "out_features", None), getattr(module, "in_features", None)
        if isinstance(rows, int) and isinstance(columns, int):
            weight: Any = module._parameters.get("weight") if isinstance(module, nn.Linear) else None
            # users and PEFT put other weights in its place; those of quantising libraries and shards have other shapes
            is_matrix = (type(weight) is nn.Parameter or is_dtensor(weight)) and weight.dim() == 2
            return (weight.shape[0], weight.shape[1]) if is_matrix else (rows, columns)
    return None


def watcher(head: Any) -> str | None:
    """The name of a hook because of which logits cannot be lazy, since it reads the head's output, its gradient, or an
    input of a module inside of the head. None if there is no such hook."""
    has_hooks_or_modules = head._modules or head._forward_hooks or head._backward_hooks or head._backward_pre_hooks
    if not has_hooks_or_modules and not of_all_modules._global_forward_hooks:
        return None  # the usual head, without a loop
    for module in head.modules():
        forward = (module._forward_hooks, of_all_modules._global_forward_hooks)
        kinds = {"forward": forward, "backward": (module._backward_hooks, module._backward_pre_hooks)}
        if module is not head:
            kinds["forward pre-"] = (module._forward_pre_hooks, of_all_modules._global_forward_pre_hooks)
        for kind, hook_tables in kinds.items():
            for hook in (hook for hooks in hook_tables for hook in hooks.values()):
                if not module_of(hook).startswith(BLIND):
                    return f"a {kind} hook, {name_of_hook(hook)}"
    return None


def pre_hook(head: Any) -> tuple[str | None, bool]:
    """Returns the name of a user's hook on the head's input, or None; and True if the head has hooks of frameworks
    too."""
    if not head._forward_pre_hooks and not of_all_modules._global_forward_pre_hooks:
        return None, False
    own_hooks = [*head._forward_pre_hooks.values(), *head._forward_hooks.values()]
    blind = [module_of(hook).startswith(BLIND) for hook in own_hooks]
    hooks = [*own_hooks, *of_all_modules._global_forward_pre_hooks.values()]
    names = [name_of_hook(hook) for hook in hooks if not module_of(hook).startswith(BLIND)]
    return names[0] if names else None, any(blind)


def name_of_hook(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__name__))


def module_of(hook: Any) -> str:
    while hasattr(hook, "func"):  # functools.partial
        hook = hook.func
    return getattr(hook, "__module__", None) or ""


class LateForward:
    """A forward to set on a module: it calls the forward of the class that the module has at the time of the call."""

    def __init__(self, module: nn.Module):
        self.module = module

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(type(self.module).forward.__get__(self.module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.module).forward(self.module, *args, **kwargs)


def loosen(module: Any) -> None:
    """Replaces a forward that is set on a module and is its class's by a ``LateForward``, since the class will
    change."""
    for name in ("forward", OLD_FORWARD):
        if is_of_class(module.__dict__.get(name), module):
            module.__dict__[name] = LateForward(module)


def hides(module: Any) -> bool:
    """True where a forward that is set on a module runs instead of its class's."""
    hung = module.__dict__.get("forward")
    innermost = module.__dict__.get(OLD_FORWARD, hung)
    return hung is not None and not isinstance(innermost, LateForward) and not is_of_class(innermost, module)


def is_of_class(hung: Any, module: Any) -> bool:
    """True where a forward that is set on a module is the bound method of its class."""
    function, class_forward = getattr(hung, "__func__", None), type(module).forward
    return function in (class_forward, getattr(class_forward, SHOWN, class_forward)) and hung.__self__ is module


def hung_by(module: Any) -> str:
    """A text that names the function that is set on a module as its forward, and its place in the code."""
    hung = module.__dict__.get("forward")
    while (inner := getattr(hung, "__func__", getattr(hung, "func", None))) is not None:
        hung = inner
    code = getattr(hung, "__code__", None)
    if code is None:
        return f"{type(hung).__module__}.{type(hung).__qualname__}"
    return f"{code.co_name} at {Path(code.co_filename).name}:{code.co_firstlineno}"
