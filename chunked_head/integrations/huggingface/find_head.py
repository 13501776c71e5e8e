"""The head of a model: the module that is found, made lazy, and made plain again."""

from typing import Any

from torch import nn

from .hooks import loosen
from .lazy.lazy_head import LazyHead, inner, lazy_class, sizes_of
from .lazy.source import HEADS, PATCH, watch_optimizers


class NotUnderstood(Exception):
    """Reason for which a model stays as it is."""


def base_model(model: nn.Module) -> nn.Module:
    """The model inside of PEFT's."""
    get = getattr(model, "get_base_model", None)
    return get() if callable(get) else model


def find_head(model: nn.Module) -> nn.Module:
    """The module that computes logits, found anew at every forward: users and PEFT put new ones in its place."""
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
    """The head of a model that names none: its one matrix onto the vocabulary (ClvpForCausalLM), else that of the one
    model inside of it that names one (BlipForConditionalGeneration)."""
    vocab = getattr(getattr(model, "config", None), "vocab_size", None)
    found = [module for module in model.children() if isinstance(module, nn.Linear) and module.out_features == vocab]
    if found:
        return found[0] if len(found) == 1 else None
    inside = {embeddings(module, "output") for module in model.modules() if module is not model} - {None}
    return inside.pop() if len(inside) == 1 else None


def active(head: Any, model: nn.Module) -> nn.Module:
    """The module that runs: the active copy inside of PEFT's ``modules_to_save`` wrapper, else the head itself."""
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


def embeddings(module: nn.Module, which: str) -> Any:
    """A module's ``"input"`` or ``"output"`` embeddings, None where it names none."""
    get = getattr(module, f"get_{which}_embeddings", None)
    try:  # contextlib.suppress is more than the compiler of torch 2.9 follows
        return get() if callable(get) else None
    except (AttributeError, NotImplementedError):
        return None


def name_of(head: nn.Module, model: nn.Module) -> str:
    return next((name for name, module in model.named_modules() if module is head), type(head).__name__)


def make_lazy(head: nn.Module, patch: Any) -> None:
    for module in {inner(head), head}:
        if not isinstance(module, LazyHead):
            loosen(module)
            module.__class__ = lazy_class(type(module))  # type: ignore[arg-type]
    head.__dict__[PATCH] = patch
    HEADS.add(head)
    watch_optimizers()


def make_plain(head: nn.Module, patch: Any) -> None:
    """Gives a head its class back. Where another framework has built on ours, ours stays and does nothing. A head that
    another patched model shares stays lazy."""
    if head.__dict__.get(PATCH) is not patch:
        return
    del head.__dict__[PATCH]
    HEADS.discard(head)
    for module in {inner(head), head}:
        if isinstance(module, LazyHead) and type(module) is lazy_class(module.class_before):
            loosen(module)
            module.__class__ = module.class_before
