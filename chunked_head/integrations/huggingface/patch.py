"""``patch_model``: the forward of any HuggingFace model computes its loss through this library.

Model and head remain the same objects with the same parameters, hooks and names. Their classes change to subclasses
(``Patched``, ``LazyHead``).
"""

import functools
import inspect
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from ...losses.base import Losses
from ...losses.user_checks import Function
from ...metrics import Metric, all_reduce
from .head import (
    SIGNATURE_FORWARD,
    UnknownHead,
    base_model,
    embeddings,
    find_head,
    has_instance_forward,
    instance_forward_in_words,
    loosen_forward,
    name_of,
    unwrapped,
)
from .head_call import LAZY_HEADS, PATCH, patch_in_forward, watch_optimizers
from .layout import HEADS_BY_ID, mark_layouts_constant
from .lazy_head import LazyHead, lazy_class_of
from .lazy_logits import LazyLogits
from .model_patch import ModelPatch
from .traced_logits import TracedLogits

REPORT = "chunked_head"  # attribute of a model: the Report of its patch
LABEL_NAMES = ("labels", "shift_labels")  # parameters of a model's forward
CACHE_NAMES = ("past_key_values", "cache")  # parameters; the latter since transformers 5.24
Model = TypeVar("Model", bound=nn.Module)


def patch_model(
    model: Model,
    loss: Losses | Function | None = None,
    *,
    metrics: Sequence[Metric] = (),
    when: str = "labels",  # forwards with lazy logits: "labels", "training" or "always"
    logits: str | None = "lazy",
    strict: bool = False,
    **head_options: Any,
) -> Model:
    """Makes the forward of a HuggingFace model compute its loss through this library, without the logits.

    The model needs ``get_output_embeddings()``. In a forward with labels the head returns lazy logits, which record
    what the model does to them, and ``F.cross_entropy`` of them becomes ``linear_cross_entropy``. Any other function
    that reads lazy logits computes them, as without the patch, and warns once with the place in the code.

        model = patch_model(AutoModelForCausalLM.from_pretrained(name))
        Trainer(model, ...).train()
        print(model.chunked_head)                     # which head, which scale and cap, how many losses went through

    Args:
        model: a transformers model, or PEFT's wrapper of it. PEFT, DDP and FSDP2 may come before or after the patch.
        loss: what to compute instead of the cross-entropy inside of the forward: a sum of ``chunked_head.losses`` that
            need only labels, with the cross-entropy's reduction, or a function as in ``linear_loss``.
        metrics: functions of ``chunked_head.metrics`` that need only labels. Their values are summed on the device over
            forwards until ``model.chunked_head.take_metrics()``, or until ``log_metrics`` logs them. A training step
            whose forward is given no labels raises if ``loss`` or ``metrics`` were given.
        when: the forwards whose logits are lazy. ``"labels"``: forwards with labels. ``"training"``: also forwards
            of a model in training mode with gradients enabled, for losses that are computed outside of the forward
            (``compute_loss_func``); not under FSDP. ``"always"``: also every forward without
            ``past_key_values``, for log-probabilities without gradient (a reference model, scoring).
        logits: ``"lazy"``: ``output.logits`` are computed when they are read. They can be read until the optimizer's
            step, raise after the step, and have no gradient of the loss. None: the output has no logits where labels
            were given in training; in evaluation its logits are lazy, for ``compute_metrics``.
        strict: True raises RuntimeError, in place of a warning, where lazy logits would be computed.
        head_options: ``memory_budget``, ``chunk_tokens``, ``accumulate_dtype``, ``accumulate_into``, ``upstream``,
            ``skip_ignored``, ``deterministic``, ``precision``, ``backend`` of ``linear_cross_entropy``.

    Returns:
        ``model`` itself. ``model.chunked_head`` is the report; PEFT's inner model holds the report. A second
        call changes the options; ``unpatch_model`` undoes the patch. A model whose head is not understood stays as it
        is, with a warning that says why (an error if ``loss`` or ``metrics`` were given).

    Where every label is -100 the loss is 0 with zero gradients rather than nan.

    Raises:
        TypeError, ValueError: an option is unknown or wrong; ``loss`` or ``metrics`` need more than labels; ``model``
            is a wrapper that torch.compile or DataParallel made. A forward raises RuntimeError in a training step where
            ``loss`` or ``metrics`` would have no effect.
    """
    inner_model = model_without_peft(model, "patch_model")
    patch = ModelPatch(loss, metrics, when, logits, strict, head_options, type(inner_model).__name__)
    unpatch_model(model)
    try:
        loosen_forward(inner_model)
        if has_instance_forward(inner_model):
            raise UnknownHead(
                f"its forward is hung on the instance by {instance_forward_in_words(inner_model)} and runs instead of "
                "its class's; patch_model comes before that"
            )
        adopt_head(patch, inner_model, find_head(inner_model))
        inner_model.__class__ = patched_class(type(inner_model))  # type: ignore[arg-type]
    except UnknownHead as reason:
        patch.refuse(str(reason))
    setattr(inner_model, PATCH, patch)
    setattr(inner_model, REPORT, patch.report)
    return model


def unpatch_model(model: Model) -> Model:
    """Undoes ``patch_model``; returns ``model``. Nothing happens to a model that is not patched.

    Raises:
        TypeError: ``model`` is no model, or a wrapper around a model.
    """
    inner_model = model_without_peft(model, "unpatch_model")
    patch = inner_model.__dict__.pop(PATCH, None)
    if isinstance(patch, ModelPatch):
        inner_model.__dict__.pop(REPORT, None)
        make_head_plain(patch)
    if isinstance(inner_model, Patched) and type(inner_model) is patched_class(inner_model.class_before):
        loosen_forward(inner_model)
        inner_model.__class__ = inner_model.class_before
    return model


# by the name of a wrapper's class: the function that makes the wrapper, and the attribute that holds the model
MODEL_WRAPPERS = {
    "OptimizedModule": ("torch.compile", "_orig_mod"),
    "DataParallel": ("torch.nn.DataParallel", "module"),
    "DistributedDataParallel": ("torch.nn.parallel.DistributedDataParallel", "module"),
    "DeepSpeedEngine": ("deepspeed.initialize", "module"),
}


def model_without_peft(model: Any, function_name: str) -> nn.Module:
    """The model without PEFT's wrapper. TypeError for other wrappers, and if ``model`` is no module. ``function_name``:
    name of the public function that the user called."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model of {function_name} must be a torch.nn.Module, got {type(model).__name__}")
    for base in type(model).__mro__:
        if base.__name__ in MODEL_WRAPPERS:
            wrapping_function, attribute = MODEL_WRAPPERS[base.__name__]
            raise TypeError(
                f"model of {function_name} must be the model itself, got the {base.__name__} that {wrapping_function} "
                f"made of one; {function_name} the model first and give {wrapping_function} the result, or pass "
                f"model.{attribute}"
            )
    return base_model(model)


class Patched:
    """The first base class of a patched model's class; the second is the class before the patch. While a patched
    model's forward runs, the head's logits are lazy."""

    class_before: type  # the model's class before the patch
    training: bool  # nn.Module's flag
    argument_positions: dict[str, int]  # by name: positions of the parameters of forward

    def __reduce_ex__(self, protocol: Any) -> Any:
        return empty_patched_model, (self.class_before,), self.__dict__.copy()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, Patched):  # unpatched, and this method is still referenced
            return type(self).__call__(self, *args, **kwargs)
        patch: Any = self.__dict__.get(PATCH)
        may_have_instance_forward = (
            patch is not None and "forward" in self.__dict__ and not torch.compiler.is_compiling()
        )
        if not may_have_instance_forward or not self.training or not has_instance_forward(self):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        # the name is read first: TRL's forward removes itself from the model when it runs
        forward_in_words, num_forwards = instance_forward_in_words(self), max(patch.num_forwards, 0)
        patch.num_forwards = num_forwards
        output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        if patch.num_forwards == num_forwards:
            patch.report_instance_forward(forward_in_words)
        return output

    def has_argument(self, args: tuple[Any, ...], kwargs: dict[str, Any], *argument_names: str) -> bool:
        """True if one of the arguments ``argument_names``, by keyword or by position, is not None."""
        for argument_name in argument_names:
            position = self.argument_positions.get(argument_name, -1)
            if kwargs.get(argument_name) is not None or (0 <= position < len(args) and args[position] is not None):
                return True
        return False


def empty_patched_model(model_class: type) -> Any:
    """A patched model of class ``model_class`` without attributes, for pickle to fill."""
    return object.__new__(patched_class(model_class))


@functools.cache
def patched_class(model_class: type) -> type:
    """The class, of the same name, of patched models whose class before the patch is ``model_class``."""
    class_forward = model_class.forward  # type: ignore[attr-defined]
    signature = inspect.signature(class_forward)
    parameter_names = [name for name in signature.parameters if name != "self"]
    positions = {name: position for position, name in enumerate(parameter_names)}

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, Patched):  # unpatched, and this method is still referenced
            return type(self).forward(self, *args, **kwargs)
        patch: Any = self.__dict__.get(PATCH)
        if patch is not None:
            patch.count_forward()
        has_labels = patch is not None and self.has_argument(args, kwargs, *LABEL_NAMES)
        has_cache = self.has_argument(args, kwargs, *CACHE_NAMES)
        if patch is not None and not has_labels:
            patch.check_unlabelled(self, has_cache)
        is_lazy = patch is not None and patch.has_lazy_logits(self, has_labels, has_cache)
        head = current_head(patch, self) if is_lazy else None
        if head is None or patch_in_forward(head) is patch:
            return model_class.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        patch.is_training = self.training
        with patch.forward_with(head, has_labels):
            output = model_class.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        return without_logits(output) if patch.logits is None and has_labels and self.training else output

    def signature_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    # code that unwraps functions, as accelerate does, ends at a function of ours with the class's signature
    functools.update_wrapper(signature_forward, class_forward).__dict__.pop("__wrapped__")
    functools.update_wrapper(forward, signature_forward).__dict__[SIGNATURE_FORWARD] = signature_forward
    signature_forward.__dict__["__signature__"] = signature
    class_members = {
        "forward": forward, "class_before": model_class, "argument_positions": positions,
        "__module__": model_class.__module__, "__qualname__": model_class.__qualname__, "__doc__": model_class.__doc__,
    }  # fmt: skip
    return type(model_class.__name__, (Patched, model_class), class_members)


def without_logits(output: Any) -> Any:
    """A model's output with None in place of lazy logits; a tuple without the lazy logits."""
    lazy_classes = (LazyLogits, TracedLogits)
    if isinstance(output, dict):  # transformers' ModelOutput is one
        return type(output)(
            **{key: None if isinstance(value, lazy_classes) else value for key, value in output.items()}
        )
    return tuple(value for value in output if not isinstance(value, lazy_classes)) if type(output) is tuple else output


def adopt_head(patch: ModelPatch, model: nn.Module, head: Any) -> None:
    """Makes ``head`` the head of the patch and makes it lazy."""
    weight = getattr(embeddings(model, "input"), "weight", None)
    is_tied = any(weight is parameter for parameter in head.parameters())
    patch.set_head(head, name_of(head, model), is_tied)
    make_head_lazy(head, patch)


def current_head(patch: ModelPatch, model: Any) -> Any:
    """Returns the head that the model has now; None if ``find_head`` raises. A new head becomes the head of the patch,
    since users resize, replace and adapt heads."""
    try:
        head = find_head(model)
    except UnknownHead as reason:
        make_head_plain(patch)
        patch.refuse(str(reason))
        return None
    if getattr(model, "_is_replica", False):
        return head  # a copy by nn.DataParallel, for this forward
    if head is not patch.head:
        make_head_plain(patch)
        adopt_head(patch, model, head)
    if head.__dict__.get(PATCH) is not patch:
        make_head_lazy(head, patch)
    return head


def make_head_lazy(head: nn.Module, patch: Any) -> None:
    """Gives lazy classes to a head and to the module in its wrapper. Stores the patch in the head."""
    for module in {unwrapped(head), head}:
        if not isinstance(module, LazyHead):
            loosen_forward(module)
            module.__class__ = lazy_class_of(type(module))  # type: ignore[arg-type]
    head.__dict__[PATCH] = patch
    LAZY_HEADS.add(head)
    HEADS_BY_ID[id(head)] = head
    mark_layouts_constant()
    watch_optimizers()


def make_head_plain(patch: ModelPatch) -> None:
    """Gives the head of a patch the class from before the patch. A framework's subclass of a lazy class stays, and
    computes logits like the class from before. A head that another patched model shares stays lazy."""
    head = patch.remove_head()
    if head is None or head.__dict__.get(PATCH) is not patch:
        return
    del head.__dict__[PATCH]
    LAZY_HEADS.discard(head)
    for module in {unwrapped(head), head}:
        if isinstance(module, LazyHead) and type(module) is lazy_class_of(module.class_before):
            loosen_forward(module)
            module.__class__ = module.class_before


def log_metrics(trainer: Any) -> Any:
    """Makes a Trainer log the metrics of ``patch_model(model, metrics=[...])``; returns the trainer.

        model = patch_model(model, metrics=[metrics.entropy(), metrics.accuracy()])
        log_metrics(Trainer(model, ...)).train()      # {"loss": ..., "entropy": ..., "accuracy": ...}

    A logged value is of all tokens since the last log, on all ranks. Metrics of training are logged beside
    ``loss``, metrics of an evaluation beside ``eval_loss``, as ``eval_entropy``. Values are read from the device when
    they are logged.

    Raises:
        ValueError: the trainer's model is not patched, or was patched without metrics.
    """
    patch = getattr(base_model(trainer.model), PATCH, None)
    if not isinstance(patch, ModelPatch) or not patch.metrics:
        raise ValueError(
            "log_metrics needs a trainer whose model measures: patch_model(model, metrics=[metrics.entropy(), ...])"
        )
    if getattr(trainer.log, "logs_metrics", False):
        return trainer
    log_before = trainer.log

    @functools.wraps(log_before)
    def log_with_metrics(logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        # "eval_" with eval_loss; None for logs of training
        loss_keys = (key for key in logs if key.endswith("_loss") and key != "train_loss")
        metric_prefix = next((key.removesuffix("loss") for key in loss_keys), None)
        if metric_prefix is not None or "loss" in logs:
            reduced_metrics = all_reduce(patch.report.take_metrics(training=metric_prefix is None))
            logs |= {f"{metric_prefix or ''}{name}": metric.value.item() for name, metric in reduced_metrics.items()}
        return log_before(logs, *args, **kwargs)

    log_with_metrics.logs_metrics = True  # type: ignore[attr-defined]
    trainer.log = log_with_metrics
    return trainer
