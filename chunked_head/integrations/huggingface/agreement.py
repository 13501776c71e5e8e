"""Agreement with a patched model, its state and its counts: ``model.chunked_head``."""

import contextlib
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ... import losses
from ...arithmetic.demand import structure_of
from ...core.checks import choice, flag
from ...core.private import in_backward
from ...functions.loss import LossOutput
from ...losses.base import Losses, Summand, as_losses
from ...losses.user_checks import Function
from ...metrics import Metric, MetricValue, combine
from ...metrics.values import as_metrics
from ..frameworks import REPLACED, check_named
from .head import FSDP1, sizes_of
from .source import FORWARDS, MADE, running
from .virtual import Rehearsed, Tail

# options of how to compute; what to compute is the model's
OPTIONS = ("memory_budget", "chunk_tokens", "accumulate_dtype", "accumulate_into", "upstream", "skip_ignored",
           "deterministic", "precision", "backend")  # fmt: skip
SKIPPED_FRAMES = ("chunked_head/integrations", "/torch/", "contextlib.py")
WRAPPING = ("/accelerate/", "/peft/", "/deepspeed/")  # frames between a model and its caller
FOR_TRL = "patch_trl() for TRL's SFT, DPO, KTO, GRPO, RLOO and distillation trainers"


class Agreement:
    """Options of ``patch_model`` for one model, and what came of them; ``print(model.chunked_head)`` shows it.

    ``fused``, ``materialised`` and ``reasons``: number of losses through this library, number of times that logits were
    computed instead, and for what. Graphs of ``torch.compile`` do not count.
    """

    def __init__(
        self,
        loss: Losses | Function | None,
        measured: Sequence[Metric],
        when: str,
        logits: str | None,
        strict: bool,
        options: dict[str, Any],
        model: str,
    ):
        check_options(options)
        loss = None if loss is None else as_losses(loss)
        measured = as_metrics(measured)
        check_loss(loss, measured)
        choice("patch_model", "when", when, ("labels", "training", "always"))
        choice("patch_model", "logits", logits, ("lazy", None))
        flag("strict", strict)
        self.loss, self.measured, self.when, self.logits, self.strict = loss, measured, when, logits, strict
        self.options, self.model = options, model
        self.head: Any = None
        # "lazy logits", or "none: " and the reason; the head's name in the model; it is the input embeddings' weight
        self.mechanism, self.name, self.tied = "none", "", False
        self.tail: Tail | None = None  # of the last loss
        self.fused, self.materialised, self.reasons = 0, 0, list[str]()
        self.graph_loss = self.graph_reason = ""  # graphs write these and do not read them, so as to depend on none
        self.graph_fused = self.graph_computed = False  # in the forward that runs
        self.forwards = 0  # runs of the class's forward; -1 after one in a graph
        self.computed = ""  # what logits were computed for in the forward that runs
        self.settled = False  # the model made a loss in training
        self.lazy = self.traced = False  # the head's call is lazy now; a graph says so
        self.covered = False  # a model inside of this one took the head over
        self.training = True  # mode of the model in the forward that runs
        self.metrics: dict[bool, dict[str, MetricValue]] = {True: {}, False: {}}  # of training and of evaluation
        self.outputs: dict[Any, Any] = {}  # of heads that were asked
        self.warned: dict[str, str] = {}  # messages, by their occasion
        # losses of a model without numbers (explain.py), noted instead of made; None: losses are made
        self.rehearsed: list[Rehearsed] | None = None

    @property
    def head_in_words(self) -> str:
        return f"{self.name} {list(sizes_of(self.head) or ())}" + (", tied" if self.tied else "")

    @property
    def asks(self) -> str:
        """The argument that changes or measures the model's loss, for errors; empty without one."""
        return "loss=" if self.loss is not None else "metrics=" if self.measured else ""

    def refuse(self, reason: str) -> None:
        if self.asks:
            raise ValueError(f"{self.asks} of patch_model has no effect on this {self.model}: {reason}")
        self.mechanism = f"none: {reason}"
        self.warn(f"chunked_head leaves {self.model} as it is: {reason}")

    def __str__(self) -> str:
        if self.head is None:
            return f"{self.model}: {self.mechanism}"
        counts = f"{self.fused} losses fused, logits computed {self.materialised} times"
        reasons = f" ({'; '.join(self.reasons)})" if self.reasons else ""
        tail = str(self.tail) if self.tail else "no loss so far"
        graphs = ", ".join(filter(None, (self.graph_loss, self.graph_reason)))
        compiled = f"; in graphs of torch.compile, whose runs do not count: {graphs}" if graphs else ""
        return f"{self.model}: {self.head_in_words}; {self.mechanism}; {tail}; {counts}{reasons}{compiled}"

    __repr__ = __str__

    def applies(self, model: nn.Module, labelled: bool, cached: bool = False) -> bool:
        """Decides whether a forward's logits are lazy. ``cached``: it was given ``past_key_values``, as in
        generation, which reads the logits of one token."""
        # inside of a graph torch 2.9 says so in torch.compile too; what it reads outside of one tells them apart
        exporting = getattr(torch.compiler, "_is_exporting_flag", None)
        if torch.jit.is_tracing() or (torch.compiler.is_exporting() if exporting is None else exporting):
            return False  # what comes of it may only hold tensors
        if self.head is None or labelled:
            return labelled and self.head is not None
        training = model.training and torch.is_grad_enabled()
        compiling = torch.compiler.is_compiling()
        lost = self.asks or (self.when == "labels" and not compiling and running(self.head) is None)
        if training and lost and (compiling or not self.settled):
            caller = "" if compiling else f" that {place(WRAPPING)} called"
            self.made_outside(f"the forward{caller} was given no labels")
        outside = (self.when == "training" and training) or (self.when == "always" and not cached)
        if outside and (is_fully_sharded(model) or is_fully_sharded(self.head)):
            self.warn(
                f"chunked_head: {self.model} is sharded by FSDP, which takes its weights away when the forward ends: "
                "only losses inside of it are fused; give the forward labels"
            )
            return False
        return outside

    @contextlib.contextmanager
    def being_lazy(self, head: Any, labelled: bool) -> Iterator[None]:
        """Makes the head's call lazy; of models that share a head, for the innermost that was given labels."""
        compiling = torch.compiler.is_compiling()
        # in this function: a compiler does not take a generator's frame by itself
        thread = 0 if compiling else threading.get_ident()
        outer: Any = None
        made = False
        before = 0
        if not compiling:  # a graph must not depend on counts
            outer = FORWARDS.get((thread, id(head)))
            FORWARDS[thread, id(head)] = self
            MADE.discard((thread, id(self)))
            before = self.fused + self.materialised
            self.covered, self.computed = False, ""
        self.lazy, self.traced = True, compiling
        self.graph_fused = self.graph_computed = False
        try:
            yield
        finally:
            self.lazy = self.traced = False
            if not compiling:
                made = (thread, id(self)) in MADE
                MADE.discard((thread, id(self)))
                del FORWARDS[thread, id(head)]
                if outer is not None:
                    FORWARDS[thread, id(head)] = outer
                    outer.covered = True
        if not labelled or made or self.graph_fused:
            return
        if self.asks:
            raise RuntimeError(
                f"{self.asks} of patch_model had no effect: {self.model} was given labels and made no loss of "
                f"{self.name}'s logits that it could stand for{self.computed}; leave {self.asks} out"
            )
        if compiling or self.covered or self.graph_computed or self.fused + self.materialised > before:
            return
        self.warn(f"chunked_head: {self.model} was given labels and computed no cross-entropy of {self.name}")

    def fuses(self, tail: Tail, by_model: bool = False) -> None:
        """Counts a loss; ``by_model``: made by the model inside of its forward."""
        if by_model and self.training:
            self.settled = True
        if torch.compiler.is_compiling():
            self.graph_loss = "losses fused"
            self.graph_fused = self.graph_fused or by_model
            return
        self.fused += 1
        self.tail = tail
        if by_model:
            MADE.add((threading.get_ident(), id(self)))

    def runs(self) -> bool:
        """Counts a run of the class's forward; True."""
        self.forwards = -1 if torch.compiler.is_compiling() else self.forwards + 1
        return True

    def made_outside(self, how: str) -> None:
        """Raises where ``loss`` or ``metrics`` have no part in a training step's loss; warns, once, without them."""
        if self.asks:
            trained = "train on the loss that the forward returns for its labels (label smoothing is an option of "
            remedies = [f"{trained}losses.cross_entropy)"]
            fused = " as it is" if self.when == "training" else ' with when="training"'
            without = f"patch_model without {self.asks}, which fuses a loss outside of the forward{fused}"
        else:
            remedies = ["give the forward labels and train on its loss"]
            without = 'patch_model(model, when="training") for losses outside of it'
        self.is_passed_by(how, [*remedies, without, *([] if is_on_trl() else [FOR_TRL])])

    def is_hidden(self, by: str) -> None:
        """Says that a forward which hangs on the model, named by ``by``, ran instead of its class's."""
        if self.asks or not is_on_trl():
            remedies = ["let it call the forward that it finds on the model", *([] if is_on_trl() else [FOR_TRL])]
            self.is_passed_by(f"by {by}, which runs instead of the model's forward", remedies)

    def is_passed_by(self, how: str, remedies: Sequence[str]) -> None:
        """Raises or warns of a loss of which this library has no part."""
        if not torch.is_grad_enabled() or (not torch.compiler.is_compiling() and in_backward()):
            return  # in backward a checkpoint runs the forward again
        advice = ", or ".join(remedies)
        if self.asks:
            raise RuntimeError(
                f"{self.asks} of patch_model has no part in a loss made outside of {self.model}'s forward ({how}); "
                f"{advice}"
            )
        self.warn(
            f"chunked_head: a loss made outside of {self.model}'s forward ({how}) is not fused; {advice}",
            once="outside",
        )

    def materialises(self, what: str) -> None:
        """Counts logits that are about to be computed for ``what``, and warns."""
        compiling = torch.compiler.is_compiling()
        where = "a place in a graph" if compiling else place()
        if self.strict:
            raise RuntimeError(
                f"{self.model}'s logits would be computed for {what} at {where}, which strict=True forbids; use "
                "logits.materialise() where you want them"
            )
        if compiling:
            self.graph_reason, self.graph_computed = f"logits computed for {what}", True
            return
        self.materialised += 1
        reason = f"{what} at {where}"
        self.computed = f" (the logits were computed for {reason})"
        if reason not in self.reasons:
            self.reasons.append(reason)
        self.warn(f"chunked_head: {self.model}'s logits are computed after all, for {reason}", once=what)

    def warn(self, message: str, once: str | None = None) -> None:
        if (once or message) not in self.warned:
            self.warned[once or message] = message
            warnings.warn(message, stacklevel=2)

    def rehearses(self, call: Rehearsed) -> None:
        """Notes a loss and the place that makes it."""
        assert self.rehearsed is not None
        self.rehearsed.append(call._replace(made_at=place()))

    def takes(self, output: LossOutput) -> None:
        """Adds a call's metrics. In backward a checkpoint runs a forward again whose metrics are counted."""
        if output.metrics and (torch.compiler.is_compiling() or not in_backward()):
            self.metrics[self.training] = combine([self.metrics[self.training], output.metrics])

    def take_metrics(self, training: bool = True) -> Mapping[str, MetricValue]:
        """Metrics by name since the last call, of training or of evaluation: each with ``.sum``, ``.count`` and
        ``.value``, on the device and of this rank (``chunked_head.metrics.all_reduce``)."""
        taken, self.metrics[training] = self.metrics[training], {}
        return taken


def is_on_trl() -> bool:
    """True while ``patch_trl()`` is in effect."""
    return any(path.startswith("trl.") for path, _ in REPLACED)


def is_fully_sharded(module: Any) -> bool:
    """True where FSDP2 shards a module, or FSDP1 wraps it."""
    names = {base.__name__ for base in type(module).__mro__}
    return bool(names & {"FSDPModule", FSDP1}) or hasattr(module, "_is_fsdp_managed_module")


def place(further: tuple[str, ...] = ()) -> str:
    """File and line of the caller's code, past our frames, torch's and those of ``further`` paths."""
    frame: Any = sys._getframe(1)
    while frame is not None and any(path in frame.f_code.co_filename for path in (*SKIPPED_FRAMES, *further)):
        frame = frame.f_back
    return "an unknown place" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def check_options(options: Mapping[str, Any]) -> None:
    """Raises for an option that is unknown or wrong for every head and batch."""
    check_named(options, OPTIONS, "; scale, softcap, bias and reduction are the model's own")


def check_loss(loss: Losses | None, measured: Sequence[Metric]) -> None:
    """Raises for losses and metrics that need more than labels."""
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
    # two of a name, or at too many temperatures
    structure_of(losses.cross_entropy() if loss is None else loss, measured, 1.0, 2)
