"""``Agreement``, which is ``model.chunked_head`` of a patched model: its options, state and counts."""

import contextlib
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ... import losses
from ...arithmetic.demand import structure_of
from ...call.run import in_backward
from ...core.checks import choice, flag
from ...functions.loss import LossOutput
from ...losses.base import Losses, Summand, as_losses
from ...losses.user_checks import Function
from ...metrics import Metric, MetricValue, combine
from ...metrics.values import as_metrics
from ..frameworks import REPLACED, check_named
from .head import FSDP1, sizes_of
from .source import Forward, enter, forward_of, leave, running
from .virtual import Rehearsed, Tail

# the options of ``linear_cross_entropy`` that ``patch_model`` takes; the model decides the others
OPTIONS = ("memory_budget", "chunk_tokens", "accumulate_dtype", "accumulate_into", "upstream", "skip_ignored",
           "deterministic", "precision", "backend")  # fmt: skip
SKIPPED_FRAMES = ("chunked_head/integrations", "/torch/", "contextlib.py")
WRAPPING = ("/accelerate/", "/peft/", "/deepspeed/")  # frames between a model and its caller
FOR_TRL = "patch_trl() for TRL's SFT, DPO, KTO, GRPO, RLOO and distillation trainers"


@dataclass(eq=False)
class GraphState:
    """State of a forward that graphs of ``torch.compile`` write. A graph reads only what it has written itself, so that
    it is not compiled again for other values."""

    has_lazy_head: bool = False  # while a forward runs, in a graph or not
    is_tracing: bool = False  # a forward runs in a graph; code between its graphs runs outside of them
    has_loss: bool = False  # the forward that runs made its loss
    has_logits: bool = False  # the forward that runs computed its logits
    loss_in_words: str = ""  # the loss that a graph has made, as text for the report
    logits_in_words: str = ""


class Agreement:
    """The options of ``patch_model`` for one model, with counts of its losses: ``print(model.chunked_head)`` shows it.

    ``fused``: number of losses that this library has computed. ``materialised``: number of times that logits were
    computed instead. ``reasons``: for each purpose, how often. Graphs of ``torch.compile`` are not counted.
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
        # agreed on
        self.loss, self.measured = loss, measured
        self.when, self.logits, self.strict = when, logits, strict
        self.options, self.model = options, model
        # the head: "lazy logits", or "none: " and the reason; its name in the model; it is the input embeddings' weight
        self.head: Any = None
        self.mechanism, self.name, self.tied = "none", "", False
        self.outputs: dict[Any, Any] = {}  # of heads by their state, as output_of finds them
        # the report
        self.tail: Tail | None = None  # of the last loss
        self.fused, self.materialised, self.reasons = 0, 0, list[str]()
        self.warned: dict[str, str] = {}  # messages, by their occasion
        self.metrics: dict[bool, dict[str, MetricValue]] = {True: {}, False: {}}  # of training and of evaluation
        # the forward that runs, and those before it
        self.training = True  # mode of the model
        self.forwards = 0  # runs of the class's forward; -1 after one in a graph
        self.has_trained = False  # the model made a loss in training
        self.graph = GraphState()
        # losses of a model without numbers (explain.py), noted instead of made; None: losses are made
        self.rehearsed: list[Rehearsed] | None = None

    @property
    def head_in_words(self) -> str:
        return f"{self.name} {list(sizes_of(self.head) or ())}" + (", tied" if self.tied else "")

    @property
    def loss_argument(self) -> str:
        """``"loss="`` or ``"metrics="``, whichever ``patch_model`` was given, else ``""``: for errors. Neither has an
        effect on a loss that is made outside of the model's forward."""
        return "loss=" if self.loss is not None else "metrics=" if self.measured else ""

    def refuse(self, reason: str) -> None:
        """Notes that the model stays unpatched for ``reason``, and warns. ValueError if ``loss`` or ``metrics`` were
        given, which would have no effect."""
        if self.loss_argument:
            raise ValueError(f"{self.loss_argument} of patch_model has no effect on this {self.model}: {reason}")
        self.mechanism = f"none: {reason}"
        self.warn(f"chunked_head leaves {self.model} as it is: {reason}")

    def __str__(self) -> str:
        if self.head is None:
            return f"{self.model}: {self.mechanism}"
        counts = f"{self.fused} losses fused, logits computed {self.materialised} times"
        reasons = f" ({'; '.join(self.reasons)})" if self.reasons else ""
        tail = str(self.tail) if self.tail else "no loss so far"
        graphs = ", ".join(filter(None, (self.graph.loss_in_words, self.graph.logits_in_words)))
        compiled = f"; in graphs of torch.compile, whose runs do not count: {graphs}" if graphs else ""
        return f"{self.model}: {self.head_in_words}; {self.mechanism}; {tail}; {counts}{reasons}{compiled}"

    __repr__ = __str__

    def makes_lazy(self, model: nn.Module, has_labels: bool, has_cache: bool = False) -> bool:
        """True where the logits of a forward are lazy. ``has_labels``: the forward has labels. ``has_cache``: it has
        ``past_key_values``, as in generation, which reads the logits of one token."""
        # torch 2.9's is_exporting is true in torch.compile too; the variable that it reads is true in export alone
        exporting = getattr(torch.compiler, "_is_exporting_flag", None)
        if torch.jit.is_tracing() or (torch.compiler.is_exporting() if exporting is None else exporting):
            return False  # an exported program holds tensors alone
        if self.head is None or has_labels:
            return has_labels and self.head is not None
        training = model.training and torch.is_grad_enabled()
        compiling = torch.compiler.is_compiling()
        unlabelled = self.when == "labels" and not compiling and running(self.head) is None
        if training and (self.loss_argument or unlabelled) and (compiling or not self.has_trained):
            caller = "" if compiling else f" that {place(WRAPPING)} called"
            self.check_outside_loss(f"the forward{caller} was given no labels")
        lazy = (self.when == "training" and training) or (self.when == "always" and not has_cache)
        if lazy and (is_fully_sharded(model) or is_fully_sharded(self.head)):
            self.warn(
                f"chunked_head: {self.model} is sharded by FSDP, which takes its weights away when the forward ends: "
                "only losses inside of it are fused; give the forward labels"
            )
            return False
        return lazy

    @contextlib.contextmanager
    def lazy_head(self, head: Any, has_labels: bool) -> Iterator[None]:
        """A context in which a call of the head returns lazy logits. If nested forwards share a head, they belong to
        the innermost forward with labels."""
        compiling = torch.compiler.is_compiling()
        forward, count = Forward(self), 0
        if not compiling:  # a graph must not depend on counts
            count = self.fused + self.materialised
            enter(forward, head)
        self.graph.has_lazy_head, self.graph.is_tracing = True, compiling
        self.graph.has_loss = self.graph.has_logits = False
        try:
            yield
        finally:
            self.graph.has_lazy_head = self.graph.is_tracing = False
            if not compiling:
                leave(forward, head)
        if not has_labels or forward.has_loss or self.graph.has_loss:
            return
        if self.loss_argument:
            raise RuntimeError(
                f"{self.loss_argument} of patch_model had no effect: {self.model} was given labels and made no loss of "
                f"{self.name}'s logits that it could stand for{forward.logits_in_words}; leave {self.loss_argument} out"
            )
        if compiling or forward.is_covered or self.graph.has_logits or self.fused + self.materialised > count:
            return
        self.warn(f"chunked_head: {self.model} was given labels and computed no cross-entropy of {self.name}")

    def count_loss(self, tail: Tail, by_model: bool = False) -> None:
        """Counts a loss; ``by_model``: made by the model inside of its forward."""
        if by_model and self.training:
            self.has_trained = True
        if torch.compiler.is_compiling():
            self.graph.loss_in_words = "losses fused"
            self.graph.has_loss = self.graph.has_loss or by_model
            return
        self.fused += 1
        self.tail = tail
        if by_model and (forward := forward_of(self)) is not None:
            forward.has_loss = True

    def count_forward(self) -> None:
        """Counts a run of the class's forward."""
        self.forwards = -1 if torch.compiler.is_compiling() else self.forwards + 1

    def check_outside_loss(self, description: str) -> None:
        """Reports a training step's loss that was made outside of the forward, so that ``loss`` and ``metrics`` have no
        effect on it: raises if they were given, else warns once."""
        argument = self.loss_argument
        if argument:
            trained = "train on the loss that the forward returns for its labels (label smoothing is an option of "
            remedies = [f"{trained}losses.cross_entropy)"]
            fused = " as it is" if self.when == "training" else ' with when="training"'
            without = f"patch_model without {argument}, which fuses a loss outside of the forward{fused}"
        else:
            remedies = ["give the forward labels and train on its loss"]
            without = 'patch_model(model, when="training") for losses outside of it'
        self.report_outside_loss(description, [*remedies, without, *([] if is_on_trl() else [FOR_TRL])])

    def report_hidden_forward(self, name: str) -> None:
        """Raises or warns: a forward that hangs on the model, ``name``, ran instead of its class's."""
        if self.loss_argument or not is_on_trl():
            remedies = ["let it call the forward that it finds on the model", *([] if is_on_trl() else [FOR_TRL])]
            self.report_outside_loss(f"by {name}, which runs instead of the model's forward", remedies)

    def report_outside_loss(self, description: str, remedies: Sequence[str]) -> None:
        """Reports a loss that this library does not compute: raises with ``loss`` or ``metrics``, else warns once."""
        if not torch.is_grad_enabled() or (not torch.compiler.is_compiling() and in_backward()):
            return  # in backward a checkpoint runs the forward again
        advice = ", or ".join(remedies)
        if self.loss_argument:
            raise RuntimeError(
                f"{self.loss_argument} of patch_model has no part in a loss made outside of {self.model}'s forward "
                f"({description}); {advice}"
            )
        self.warn(
            f"chunked_head: a loss made outside of {self.model}'s forward ({description}) is not fused; {advice}",
            once="outside",
        )

    def count_logits(self, purpose: str) -> None:
        """Counts logits that are about to be computed for ``purpose``, and warns; RuntimeError with ``strict``."""
        compiling = torch.compiler.is_compiling()
        location = "a place in a graph" if compiling else place()
        if self.strict:
            raise RuntimeError(
                f"{self.model}'s logits would be computed for {purpose} at {location}, which strict=True forbids; use "
                "logits.materialise() where you want them"
            )
        if compiling:
            self.graph.logits_in_words, self.graph.has_logits = f"logits computed for {purpose}", True
            return
        self.materialised += 1
        reason = f"{purpose} at {location}"
        if (forward := forward_of(self)) is not None:
            forward.logits_in_words = f" (the logits were computed for {reason})"
        if reason not in self.reasons:
            self.reasons.append(reason)
        self.warn(f"chunked_head: {self.model}'s logits are computed after all, for {reason}", once=purpose)

    def warn(self, message: str, once: str | None = None) -> None:
        if (once or message) not in self.warned:
            self.warned[once or message] = message
            warnings.warn(message, stacklevel=2)

    def note_rehearsed(self, call: Rehearsed) -> None:
        """Notes a loss and the place in the model's code that makes it."""
        assert self.rehearsed is not None
        self.rehearsed.append(call._replace(made_at=place()))

    def add_metrics(self, output: LossOutput) -> None:
        """Adds a call's metrics, but for those of a forward that a checkpoint runs again in backward."""
        if output.metrics and (torch.compiler.is_compiling() or not in_backward()):
            self.metrics[self.training] = combine([self.metrics[self.training], output.metrics])

    def take_metrics(self, training: bool = True) -> Mapping[str, MetricValue]:
        """Metrics by name since the last call, of training or of evaluation: each with ``.sum``, ``.count`` and
        ``.value``, on the device and of this rank (``chunked_head.metrics.all_reduce``)."""
        metrics, self.metrics[training] = self.metrics[training], {}
        return metrics


def is_on_trl() -> bool:
    """True while ``patch_trl()`` is in effect."""
    return any(path.startswith("trl.") for path, _ in REPLACED)


def is_fully_sharded(module: Any) -> bool:
    """True where FSDP2 shards a module, or FSDP1 wraps it."""
    names = {base.__name__ for base in type(module).__mro__}
    return bool(names & {"FSDPModule", FSDP1}) or hasattr(module, "_is_fsdp_managed_module")


def place(skipped: tuple[str, ...] = ()) -> str:
    """File and line of the caller's code: the first frame outside of ours, torch's and the ``skipped`` paths."""
    frame: Any = sys._getframe(1)
    while frame is not None and any(path in frame.f_code.co_filename for path in (*SKIPPED_FRAMES, *skipped)):
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
    readers: list[Summand | Metric] = [*summands, *measured]
    for reader in readers:
        if reader.fields or reader.scope != "token":
            needs = ", ".join(reader.fields) or "segments"
            raise ValueError(
                f"{reader.label} needs {needs}, and a model's forward has labels alone; call linear_loss on the "
                "model's hidden states"
            )
    # raises for two of a name, and for too many temperatures
    structure_of(losses.cross_entropy() if loss is None else loss, measured, 1.0, 2)
