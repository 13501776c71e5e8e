"""What was agreed on for a model, and what came of it: ``model.chunked_head``."""

import contextlib
import inspect
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import losses
from ..head import linear_cross_entropy
from ..head_options import check_options
from ..linear_loss import LossOutput
from ..losses.base import Losses, Summand
from ..losses.closures import Function
from ..losses.custom import as_losses
from ..metrics import Metric, MetricValue, combine
from ..options import choice
from .find_head import NotUnderstood, find_heads, make_lazy, make_plain, name_of
from .lazy_head import FSDP1, PATCH, enter, leave, sizes_of
from .tail import Tail

# options that say how to compute; what to compute is the model's
OPTIONS = ("memory_budget", "chunk_tokens", "accumulate_dtype", "accumulate_into", "upstream", "skip_ignored",
           "deterministic", "backend")  # fmt: skip
OWN_FRAMES = ("chunked_head/integrations", "/torch/", "contextlib.py")


class Agreement:
    """``print(model.chunked_head)`` tells what is below.

    ``mechanism``: ``"lazy logits"``, or ``"none: "`` and why. ``name``: of the head in the model. ``tied``: whether it
    shares its weight with the input embeddings. ``tail``: scale, softcap and what else the model's last loss had.
    ``fused``: how many losses went through this library, ``materialised``: how often logits were computed instead, and
    ``reasons``: by what; all three outside of ``torch.compile``, whose graphs do not count.
    """

    def __init__(
        self,
        loss: Losses | Function | None,
        measured: tuple[Metric, ...],
        when: str,
        logits: str | None,
        strict: bool,
        options: dict[str, Any],
        model: str,
    ):
        unknown = options.keys() - set(OPTIONS)
        if unknown:
            known = ", ".join((*inspect.signature(linear_cross_entropy).parameters.keys() & set(OPTIONS),))
            raise TypeError(
                f"patch_model got an unknown option {sorted(unknown)[0]!r}; options of the head are {known}; scale, "
                "softcap and bias are the model's own"
            )
        check_options(options)
        loss = None if loss is None else as_losses(loss)
        check_loss(loss, measured)
        choice("patch_model", "when", when, ("labels", "training"))
        if logits is not None:
            choice("patch_model", "logits", logits, ("lazy",))
        self.loss, self.measured, self.when, self.logits, self.strict = loss, measured, when, logits, strict
        self.options, self.model = options, model
        self.heads: list[Any] = []
        self.mechanism, self.name, self.tied = "none", "", False
        self.tail: Tail | None = None
        self.fused, self.materialised, self.reasons = 0, 0, list[str]()
        self.lazy = False  # whether the head's call is lazy now, for graphs
        self.traced = False  # whether a graph says so
        self.covered = False  # whether a model inside of this one took over
        self.training = True  # whether the model is, in the forward that runs
        self.metrics: dict[bool, dict[str, MetricValue]] = {True: {}, False: {}}  # of training, and else
        self.warned: set[str] = set()

    @property
    def head(self) -> Any:
        """The head, the first of several; None without one."""
        return self.heads[0] if self.heads else None

    def settle(self, model: nn.Module, heads: list[Any]) -> None:
        """On a model's heads."""
        self.heads, self.mechanism, self.name = heads, "lazy logits", name_of(heads[0], model)
        get = getattr(model, "get_input_embeddings", None)
        with contextlib.suppress(AttributeError, NotImplementedError):
            weight = getattr(get(), "weight", None) if callable(get) else None
            self.tied = any(weight is parameter for parameter in heads[0].parameters())
        for head in heads:
            make_lazy(head, self)

    def release(self) -> None:
        """The heads are what they were."""
        for head in self.heads:
            make_plain(head, self)
        self.heads = []

    def refuse(self, reason: str) -> None:
        self.mechanism = f"none: {reason}"
        self.warn(f"chunked_head leaves {self.model} as it is: {reason}")

    def __str__(self) -> str:
        if self.head is None:
            return f"{self.model}: {self.mechanism}"
        others = f" and {len(self.heads) - 1} more" if self.heads[1:] else ""
        head = f"{self.name} {list(sizes_of(self.head) or ())}{others}" + (", tied" if self.tied else "")
        counts = f"{self.fused} losses fused, logits computed {self.materialised} times"
        reasons = f" ({'; '.join(self.reasons)})" if self.reasons else ""
        tail = "no loss so far" if self.tail is None else str(self.tail)
        return f"{self.model}: {head}; {self.mechanism}; {tail}; {counts}{reasons}"

    __repr__ = __str__

    def applies(self, model: nn.Module, labelled: bool) -> bool:
        """Whether a forward's logits are lazy."""
        if torch.jit.is_tracing() or torch.compiler.is_exporting():
            return False  # what comes of it may hold tensors alone
        if self.head is None or labelled:
            return labelled and self.head is not None
        outside = self.when == "training" and model.training and torch.is_grad_enabled()
        if outside and (is_fully_sharded(model) or is_fully_sharded(self.head)):
            self.warn(
                f"chunked_head: {self.model} is sharded by FSDP, which takes its weights away when the forward ends: "
                "only losses inside of it are fused; give the forward labels"
            )
            return False
        return outside

    def find_again(self, model: nn.Module) -> list[Any]:
        """The heads, which may be others by now: resized, set, adapted. None where there is none any more."""
        try:
            heads = find_heads(model)
        except NotUnderstood as reason:
            self.release()
            self.refuse(str(reason))
            return []
        if getattr(model, "_is_replica", False):
            return heads  # nn.DataParallel's, for this forward
        if list(map(id, heads)) != list(map(id, self.heads)):
            self.release()
            self.settle(model, heads)
        for head in heads:
            if head.__dict__.get(PATCH) is not self:
                make_lazy(head, self)
        return heads

    @contextlib.contextmanager
    def being_lazy(self, heads: list[Any], labelled: bool) -> Iterator[None]:
        """The innermost of the models that share a head and were given labels has it."""
        compiling = torch.compiler.is_compiling()
        outer, before = [], None  # counts are nothing that a graph may depend on
        if not compiling:
            outer, before = [enter(head, self) for head in heads], self.fused + self.materialised
            self.covered = False
        self.lazy, self.traced = True, compiling
        try:
            yield
        finally:
            self.lazy = self.traced = False
            for head, before_it in zip(heads, outer, strict=False):
                leave(head, before_it)
        if compiling:
            return
        for other in outer:
            if other is not None:
                other.covered = True
        if labelled and not self.covered and self.fused + self.materialised == before:
            self.warn(f"chunked_head: {self.model} was given labels and computed no cross-entropy of {self.name}")

    def fuses(self, tail: Tail) -> None:
        """Counts a loss."""
        if not torch.compiler.is_compiling():
            self.fused += 1
            self.tail = tail

    def materialises(self, what: str) -> None:
        """Counts logits about to be computed for ``what``, and says so."""
        where = place()
        if self.strict:
            raise RuntimeError(
                f"{self.model}'s logits would be computed for {what} at {where}, which strict=True forbids; use "
                "logits.materialise() where you want them"
            )
        self.materialised += 1
        reason = f"{what} at {where}"
        if reason not in self.reasons:
            self.reasons.append(reason)
        self.warn(f"chunked_head: {self.model}'s logits are computed after all, for {reason}", once=what)

    def warn(self, message: str, once: str | None = None) -> None:
        if (once or message) not in self.warned:
            self.warned.add(once or message)
            warnings.warn(message, stacklevel=2)

    def loss_of(self, class_weights: Tensor | None, label_smoothing: float, reduction: str) -> Losses:
        """The sum to compute, for what the model asks of its cross-entropy."""
        if reduction == "none":
            raise ValueError("loss= and metrics= of patch_model go with a mean or a sum; this model reduces by itself")
        if self.loss is None:
            return losses.cross_entropy(label_smoothing=label_smoothing, class_weights=class_weights)
        if class_weights is not None or label_smoothing:
            raise ValueError(
                f"{self.model}'s own cross-entropy has class weights or label smoothing, which loss= would drop; give "
                "them to losses.cross_entropy in loss="
            )
        return self.loss

    def check_by_chunks(self) -> None:
        """Of a head whose chunks go through its own forward."""
        terms = () if self.loss is None else self.loss.terms
        if any(summand.normalizer is not None or summand.reduction is not None for _, summand in terms):
            raise ValueError(
                f"loss= with a normalizer or reduction of its own does not go with {self.name}, a "
                f"{type(self.head).__name__}"
            )

    def takes(self, output: LossOutput) -> None:
        """Keeps a call's metrics."""
        if output.metrics:
            self.metrics[self.training] = combine([self.metrics[self.training], output.metrics])

    def take_metrics(self, training: bool = True) -> Mapping[str, MetricValue]:
        """What was measured since the last time while the model was training, or was not, by name: each with ``.sum``,
        ``.count`` and ``.value``, on the device and of this rank (``chunked_head.metrics.all_reduce``)."""
        taken, self.metrics[training] = self.metrics[training], {}
        return taken


def check_loss(loss: Losses | None, measured: tuple[Metric, ...]) -> None:
    """Raises what cannot be computed from labels alone."""
    summands = [] if loss is None else [summand for _, summand in loss.terms]
    for summand in summands:
        if summand.token_weights is not None or summand.teacher is not None:
            raise ValueError(f"{summand.label} has token weights or a teacher, and a model's forward has labels alone")
    needing: list[Summand | Metric] = [*summands, *measured]
    for one in needing:
        if one.fields or one.scope != "token":
            needs = ", ".join(one.fields) or "segments"
            raise ValueError(
                f"{one.label} needs {needs}, and a model's forward has labels alone; call linear_loss on the model's "
                "hidden states"
            )


def is_fully_sharded(module: Any) -> bool:
    """By FSDP2, or as part of what FSDP1 wraps."""
    names = {base.__name__ for base in type(module).__mro__}
    return bool(names & {"FSDPModule", FSDP1}) or hasattr(module, "_is_fsdp_managed_module")


def place() -> str:
    """Where in the caller's code."""
    frame: Any = sys._getframe(1)
    while frame is not None and any(own in frame.f_code.co_filename for own in OWN_FRAMES):
        frame = frame.f_back
    return "an unknown place" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
