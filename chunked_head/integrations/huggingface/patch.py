"""Any HuggingFace model with one line: its forward computes its loss through this library.

A model and its head stay what and where they are, parameters, hooks and names: only their classes change, to ones made
of those (``Patched``, ``LazyHead``).
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
from .source import HEADS, PATCH, running, watch_optimizers
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
    agreed = Agreement(loss, metrics, when, logits, strict, head_options, type(inner).__name__)
    unpatch_model(model)
    try:
        loosen(inner)
        if hides(inner):
            raise NotUnderstood(
                f"its forward is hung on the instance by {hung_by(inner)} and runs instead of its class's; patch_model "
                "comes before that"
            )
        settle(agreed, inner, find_head(inner))
    except NotUnderstood as reason:
        agreed.refuse(str(reason))
        setattr(inner, REPORT, agreed)
        return model
    inner.__class__ = patched_class(type(inner))  # type: ignore[arg-type]
    setattr(inner, REPORT, agreed)
    return model


def unpatch_model(model: Model) -> Model:
    """Takes ``patch_model`` back; returns ``model``. Nothing happens to a model that is not patched.

    Raises:
        TypeError: ``model`` is no model, or a wrapper around one.
    """
    inner = the_model(model, "unpatch_model")
    agreed = inner.__dict__.pop(REPORT, None)
    if isinstance(agreed, Agreement):
        make_plain(agreed)
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
    """The model of an argument, without PEFT's wrapper."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model of {function} must be a torch.nn.Module, got {type(model).__name__}")
    for kind in type(model).__mro__:
        if kind.__name__ in WRAPPERS:
            by, where = WRAPPERS[kind.__name__]
            raise TypeError(
                f"model of {function} must be the model itself, got the {kind.__name__} that {by} made of one; "
                f"{function} the model first and give {by} the result, or pass model.{where}"
            )
    return base_model(model)


class Patched:
    """Put before a model's class."""

    class_before: type
    training: bool
    argument_at: dict[str, int]  # places of forward's arguments, where they are given without a name

    def __reduce_ex__(self, protocol: Any) -> Any:
        return made_again, (self.class_before,), self.__dict__.copy()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, Patched):  # unpatched, and this method is still referenced
            return type(self).__call__(self, *args, **kwargs)
        agreed: Any = self.__dict__.get(REPORT)
        hung = agreed is not None and "forward" in self.__dict__ and not torch.compiler.is_compiling()
        if not hung or not self.training or not hides(self):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        # the name is read first: TRL takes its forward off as it runs
        name, count = hung_by(self), max(agreed.forwards, 0)
        agreed.forwards = count
        output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        if agreed.forwards == count:
            agreed.report_hidden_forward(name)
        return output

    def was_given(self, args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> bool:
        """True where forward's arguments have one of these names, other than None."""
        for name in names:
            at = self.argument_at.get(name, -1)
            if kwargs.get(name) is not None or (0 <= at < len(args) and args[at] is not None):
                return True
        return False


def made_again(base: type) -> Any:
    return object.__new__(patched_class(base))


@functools.cache
def patched_class(base: type) -> type:
    """The class of patched models of class ``base``, which goes by its name."""
    before = base.forward  # type: ignore[attr-defined]
    signature = inspect.signature(before)
    names = [name for name in signature.parameters if name != "self"]
    places = {name: at for at, name in enumerate(names)}

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, Patched):  # unpatched, and this method is still referenced
            return type(self).forward(self, *args, **kwargs)
        agreed: Any = self.__dict__.get(REPORT)
        if agreed is not None:
            agreed.count_forward()
        labelled = agreed is not None and self.was_given(args, kwargs, *LABELS)
        cached = self.was_given(args, kwargs, *CACHES)
        head = find_again(agreed, self) if agreed is not None and agreed.makes_lazy(self, labelled, cached) else None
        if head is None or running(head) is agreed:
            return base.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        agreed.training = self.training
        with agreed.lazy_head(head, labelled):
            output = base.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        return without_logits(output) if agreed.logits is None and labelled and self.training else output

    def shown(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    # who takes wrappers off, as accelerate does, ends at a function of ours; its signature is the class's
    functools.update_wrapper(shown, before).__dict__.pop("__wrapped__")
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
    return tuple(part for part in output if not isinstance(part, lazy)) if type(output) is tuple else output


def settle(agreed: Agreement, model: nn.Module, head: Any) -> None:
    """Makes a model's head lazy."""
    agreed.head, agreed.mechanism, agreed.name = head, "lazy logits", name_of(head, model)
    weight = getattr(embeddings(model, "input"), "weight", None)
    agreed.tied = any(weight is parameter for parameter in head.parameters())
    make_lazy(head, agreed)


def find_again(agreed: Agreement, model: Any) -> Any:
    """The head, which may be another module by now: resized, set, adapted. None where there is none any more."""
    try:
        head = find_head(model)
    except NotUnderstood as reason:
        make_plain(agreed)
        agreed.refuse(str(reason))
        return None
    if getattr(model, "_is_replica", False):
        return head  # nn.DataParallel's, for this forward
    if head is not agreed.head:
        make_plain(agreed)
        settle(agreed, model, head)
    if head.__dict__.get(PATCH) is not agreed:
        make_lazy(head, agreed)
    return head


def make_lazy(head: nn.Module, patch: Any) -> None:
    for module in {unwrapped(head), head}:
        if not isinstance(module, LazyHead):
            loosen(module)
            module.__class__ = lazy_class(type(module))  # type: ignore[arg-type]
    head.__dict__[PATCH] = patch
    HEADS.add(head)
    ASKED[id(head)] = head
    mark_constant()
    watch_optimizers()


def make_plain(agreed: Agreement) -> None:
    """Gives a head its class back. Where another framework has built on ours, ours stays and does nothing. A head that
    another patched model shares stays lazy."""
    head, agreed.head = agreed.head, None
    if head is None or head.__dict__.get(PATCH) is not agreed:
        return
    del head.__dict__[PATCH]
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
    agreed = getattr(base_model(trainer.model), "chunked_head", None)
    if not isinstance(agreed, Agreement) or not agreed.measured:
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
            found = all_reduce(agreed.take_metrics(training=prefix is None))
            logs |= {f"{prefix or ''}{name}": value.value.item() for name, value in found.items()}
        return log(logs, *args, **kwargs)

    with_metrics.logs_metrics = True  # type: ignore[attr-defined]
    trainer.log = with_metrics
    return trainer
