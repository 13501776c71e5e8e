"""Any HuggingFace model with one line: its forward computes its loss through this library.

Model and head remain the same objects with the same parameters, hooks and names. Only their classes change, to
subclasses of theirs (``Patched``, ``LazyHead``).
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
from .agreement import Agreement
from .head import (
    SHOWN,
    NotUnderstood,
    base_model,
    embeddings,
    find_head,
    hides,
    hung_by,
    loosen,
    name_of,
    unwrapped,
)
from .lazy_head import LazyHead, lazy_class
from .lazy_logits import LazyLogits
from .output import ASKED, mark_constant
from .source import AGREEMENT, HEADS, running, watch_optimizers
from .traced_logits import TracedLogits

REPORT = "chunked_head"  # the attribute of a patched model
LABELS = ("labels", "shift_labels")
CACHES = ("past_key_values", "cache")  # the latter since transformers 5.24
Model = TypeVar("Model", bound=nn.Module)


def patch_model(
    model: Model,
    loss: Losses | Function | None = None,
    *,
    metrics: Sequence[Metric] = (),
    when: str = "labels",
    logits: str | None = "lazy",
    strict: bool = False,
    **head_options: Any,
) -> Model:
    """Makes the forward of a HuggingFace model compute its loss through this library, without the logits.

    For any model with ``get_output_embeddings()``: while labels are given, its head returns lazy logits that remember
    what the model does to them, and the model's own call of ``F.cross_entropy`` becomes ``linear_cross_entropy``.
    Whatever else is done with them computes them, as before, and says where, once.

        model = patch_model(AutoModelForCausalLM.from_pretrained(name))
        Trainer(model, ...).train()
        print(model.chunked_head)                     # which head, which scale and cap, how many losses went through

    Args:
        model: a transformers model, or PEFT's around one; before or after PEFT, DDP's and FSDP2's wrapping of it.
        loss: what to compute instead of the cross-entropy inside of the forward: a sum of ``chunked_head.losses`` that
            need only labels, reduced as the model reduces its own, or a function as in ``linear_loss``.
        metrics: of ``chunked_head.metrics`` that need only labels: summed on the device over forwards until
            ``model.chunked_head.take_metrics()``, or until ``log_metrics`` logs them. ``loss`` and ``metrics`` raise in
            a training step whose forward is given no labels.
        when: ``"labels"``: while ``forward`` is given labels. ``"training"``: also while ``model.training`` with
            gradients enabled, for losses outside of it (``compute_loss_func``), as they are; not under FSDP.
            ``"always"``: in every forward that is given no ``past_key_values``, for log-probabilities without gradient
            too (a reference model, scoring).
        logits: ``"lazy"``: ``output.logits`` are computed when read, which has to be before the optimizer's step (an
            error after it) and have no gradient of the loss. None: the output has none where labels were given in
            training; in evaluation they are lazy, for ``compute_metrics``.
        strict: raises where lazy logits would be computed, instead of a warning.
        head_options: ``memory_budget``, ``chunk_tokens``, ``accumulate_dtype``, ``accumulate_into``, ``upstream``,
            ``skip_ignored``, ``deterministic``, ``precision``, ``backend`` of ``linear_cross_entropy``.

    Returns:
        ``model`` itself. ``model.chunked_head`` (on the model inside of PEFT's) reports. To patch again changes the
        options; ``unpatch_model`` takes everything back. A model whose head is not understood stays as it is, with a
        warning that says why (an error where it was given a loss or metrics).

    Where every label is -100 the loss is 0 with zero gradients rather than nan.

    Raises:
        TypeError, ValueError: for options that are none or wrong; ``loss`` or ``metrics`` that need more than labels; a
            wrapper that torch.compile or DataParallel made. RuntimeError: while training, where ``loss`` or ``metrics``
            would have no effect.
    """
    inner = the_model(model, "patch_model")
    agreement = Agreement(loss, metrics, when, logits, strict, head_options, type(inner).__name__)
    unpatch_model(model)
    try:
        loosen(inner)
        if hides(inner):
            raise NotUnderstood(
                f"its forward is hung on the instance by {hung_by(inner)} and runs instead of its class's; patch_model "
                "comes before that"
            )
        settle(agreement, inner, find_head(inner))
    except NotUnderstood as reason:
        agreement.refuse(str(reason))
        setattr(inner, REPORT, agreement)
        return model
    inner.__class__ = patched_class(type(inner))  # type: ignore[arg-type]
    setattr(inner, REPORT, agreement)
    return model


def unpatch_model(model: Model) -> Model:
    """Takes ``patch_model`` back; returns ``model``. Nothing happens to a model that is not patched.

    Raises:
        TypeError: ``model`` is no model, or a wrapper around one.
    """
    inner = the_model(model, "unpatch_model")
    agreement = inner.__dict__.pop(REPORT, None)
    if isinstance(agreement, Agreement):
        make_plain(agreement)
    if isinstance(inner, Patched) and type(inner) is patched_class(inner.class_before):
        loosen(inner)
        inner.__class__ = inner.class_before
    return model


# wrappers of a model: the function that makes each, and the attribute that is the model
WRAPPERS = {
    "OptimizedModule": ("torch.compile", "_orig_mod"),
    "DataParallel": ("torch.nn.DataParallel", "module"),
    "DistributedDataParallel": ("torch.nn.parallel.DistributedDataParallel", "module"),
    "DeepSpeedEngine": ("deepspeed.initialize", "module"),
}


def the_model(model: Any, function: str) -> nn.Module:
    """The model without PEFT's wrapper; TypeError for other wrappers. ``function``: its caller's name, for errors."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model of {function} must be a torch.nn.Module, got {type(model).__name__}")
    for kind in type(model).__mro__:
        if kind.__name__ in WRAPPERS:
            maker, attribute = WRAPPERS[kind.__name__]
            raise TypeError(
                f"model of {function} must be the model itself, got the {kind.__name__} that {maker} made of one; "
                f"{function} the model first and give {maker} the result, or pass model.{attribute}"
            )
    return base_model(model)


class Patched:
    """A base class that is put before a model's own class; its ``forward`` makes the head lazy."""

    class_before: type
    training: bool
    argument_at: dict[str, int]  # places of forward's arguments, where they are given without a name

    def __reduce_ex__(self, protocol: Any) -> Any:
        return unpickled, (self.class_before,), self.__dict__.copy()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, Patched):  # unpatched, and this method is still referenced
            return type(self).__call__(self, *args, **kwargs)
        agreement: Any = self.__dict__.get(REPORT)
        hung = agreement is not None and "forward" in self.__dict__ and not torch.compiler.is_compiling()
        if not hung or not self.training or not hides(self):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        # the name is read first: TRL takes its forward off as it runs
        name, count = hung_by(self), max(agreement.forwards, 0)
        agreement.forwards = count
        output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        if agreement.forwards == count:
            agreement.report_hidden_forward(name)
        return output

    def was_given(self, args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> bool:
        """True where forward has an argument of one of these names that is not None."""
        for name in names:
            position = self.argument_at.get(name, -1)
            if kwargs.get(name) is not None or (0 <= position < len(args) and args[position] is not None):
                return True
        return False


def unpickled(base: type) -> Any:
    """An empty patched model of class ``base``, for pickle."""
    return object.__new__(patched_class(base))


@functools.cache
def patched_class(base: type) -> type:
    """The class of patched models whose own class is ``base``; it has the same name."""
    class_forward = base.forward  # type: ignore[attr-defined]
    signature = inspect.signature(class_forward)
    names = [name for name in signature.parameters if name != "self"]
    places = {name: position for position, name in enumerate(names)}

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, Patched):  # unpatched, and this method is still referenced
            return type(self).forward(self, *args, **kwargs)
        agreement: Any = self.__dict__.get(REPORT)
        if agreement is not None:
            agreement.count_forward()
        has_labels = agreement is not None and self.was_given(args, kwargs, *LABELS)
        has_cache = self.was_given(args, kwargs, *CACHES)
        lazy = agreement is not None and agreement.makes_lazy(self, has_labels, has_cache)
        head = find_again(agreement, self) if lazy else None
        if head is None or running(head) is agreement:
            return base.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        agreement.training = self.training
        with agreement.lazy_head(head, has_labels):
            output = base.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        return without_logits(output) if agreement.logits is None and has_labels and self.training else output

    def shown(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    # code that takes wrappers off, as accelerate does, ends at a function of ours with the class's signature
    functools.update_wrapper(shown, class_forward).__dict__.pop("__wrapped__")
    functools.update_wrapper(forward, shown).__dict__[SHOWN] = shown
    shown.__dict__["__signature__"] = signature
    members = {
        "forward": forward, "class_before": base, "argument_at": places, "__module__": base.__module__,
        "__qualname__": base.__qualname__, "__doc__": base.__doc__,
    }  # fmt: skip
    return type(base.__name__, (Patched, base), members)


def without_logits(output: Any) -> Any:
    """A model's output without lazy logits."""
    lazy = (LazyLogits, TracedLogits)
    if isinstance(output, dict):  # transformers' ModelOutput is one
        return type(output)(**{key: None if isinstance(value, lazy) else value for key, value in output.items()})
    return tuple(value for value in output if not isinstance(value, lazy)) if type(output) is tuple else output


def settle(agreement: Agreement, model: nn.Module, head: Any) -> None:
    """Makes a model's head lazy."""
    agreement.head, agreement.mechanism, agreement.name = head, "lazy logits", name_of(head, model)
    weight = getattr(embeddings(model, "input"), "weight", None)
    agreement.tied = any(weight is parameter for parameter in head.parameters())
    make_lazy(head, agreement)


def find_again(agreement: Agreement, model: Any) -> Any:
    """Looks up the model's head, which users resize, replace and adapt, makes it lazy and returns it. None if it is
    not understood."""
    try:
        head = find_head(model)
    except NotUnderstood as reason:
        make_plain(agreement)
        agreement.refuse(str(reason))
        return None
    if getattr(model, "_is_replica", False):
        return head  # a copy by nn.DataParallel, for this forward
    if head is not agreement.head:
        make_plain(agreement)
        settle(agreement, model, head)
    if head.__dict__.get(AGREEMENT) is not agreement:
        make_lazy(head, agreement)
    return head


def make_lazy(head: nn.Module, agreement: Any) -> None:
    """Gives a head, and the module inside of its wrapper, a lazy class."""
    for module in {unwrapped(head), head}:
        if not isinstance(module, LazyHead):
            loosen(module)
            module.__class__ = lazy_class(type(module))  # type: ignore[arg-type]
    head.__dict__[AGREEMENT] = agreement
    HEADS.add(head)
    ASKED[id(head)] = head
    mark_constant()
    watch_optimizers()


def make_plain(agreement: Agreement) -> None:
    """Gives a head its own class back. If another framework has subclassed our class, it stays and does nothing. A
    head that another patched model shares stays lazy."""
    head, agreement.head = agreement.head, None
    if head is None or head.__dict__.get(AGREEMENT) is not agreement:
        return
    del head.__dict__[AGREEMENT]
    HEADS.discard(head)
    for module in {unwrapped(head), head}:
        if isinstance(module, LazyHead) and type(module) is lazy_class(module.class_before):
            loosen(module)
            module.__class__ = module.class_before


def log_metrics(trainer: Any) -> Any:
    """Adds what ``patch_model(model, metrics=[...])`` measures to what a Trainer logs; returns the trainer.

        model = patch_model(model, metrics=[metrics.entropy(), metrics.accuracy()])
        log_metrics(Trainer(model, ...)).train()      # {"loss": ..., "entropy": ..., "accuracy": ...}

    Each logged value is that of all tokens since the last log, over all ranks: those of training with ``loss``, those
    of an evaluation with ``eval_loss`` as ``eval_entropy``. Values are read from the device when they are logged.

    Raises:
        ValueError: the trainer's model is not patched, or measures nothing.
    """
    agreement = getattr(base_model(trainer.model), "chunked_head", None)
    if not isinstance(agreement, Agreement) or not agreement.measured:
        raise ValueError(
            "log_metrics needs a trainer whose model measures: patch_model(model, metrics=[metrics.entropy(), ...])"
        )
    if getattr(trainer.log, "logs_metrics", False):
        return trainer
    log = trainer.log

    @functools.wraps(log)
    def with_metrics(logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        # "eval_" with eval_loss; None for logs of training
        losses = (key for key in logs if key.endswith("_loss") and key != "train_loss")
        prefix = next((key.removesuffix("loss") for key in losses), None)
        if prefix is not None or "loss" in logs:
            totals = all_reduce(agreement.take_metrics(training=prefix is None))
            logs |= {f"{prefix or ''}{name}": value.value.item() for name, value in totals.items()}
        return log(logs, *args, **kwargs)

    with_metrics.logs_metrics = True  # type: ignore[attr-defined]
    trainer.log = with_metrics
    return trainer
