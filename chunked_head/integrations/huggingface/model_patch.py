"""``ModelPatch``: options and state of a patched model. ``Report``: counts and warnings of a patched model's losses and
logits, which users read as ``model.chunked_head``."""

import contextlib
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
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
from ..frameworks import REPLACEMENTS, check_named
from .head import FSDP1, sizes_of
from .head_call import RunningForward, patch_in_forward, running_forward
from .virtual import RehearsedLoss, Tail

# the options of ``linear_cross_entropy`` that ``patch_model`` takes; the model decides the others
OPTIONS = ("memory_budget", "chunk_tokens", "accumulate_dtype", "accumulate_into", "upstream", "skip_ignored",
           "deterministic", "precision", "backend")  # fmt: skip
LIBRARY_PATHS = ("chunked_head/integrations", "/torch/", "contextlib.py")  # in paths of files that are no caller's
WRAPPER_PATHS = ("/accelerate/", "/peft/", "/deepspeed/")  # in paths of files between a model and its caller
TRL_REMEDY = "patch_trl() for TRL's SFT, DPO, KTO, GRPO, RLOO and distillation trainers"


class Report:
    """Report of a patched model's losses and logits: ``print(model.chunked_head)`` shows it.

    ``fused``: number of losses that this library has computed. ``materialised``: number of times that logits were
    computed instead. ``reasons``: texts, each with a purpose for which logits were computed and the place in the code.
    Losses and logits in graphs of ``torch.compile`` are not counted.
    """

    def __init__(self, model: str):
        self.model = model  # name of the model's class
        self.mechanism = "none"  # "lazy logits", or "none: " and the reason why the model is not patched
        self.head_name, self.head_in_words = "", ""  # the head's name in the model; name and sizes
        self.tail: Tail | None = None  # of the last loss
        self.fused, self.materialised, self.reasons = 0, 0, list[str]()
        self.warnings_by_occasion: dict[str, str] = {}  # messages that were given
        self.graph_loss_in_words, self.graph_logits_in_words = "", ""  # what graphs of torch.compile compute
        self.metric_sums: dict[bool, dict[str, MetricValue]] = {True: {}, False: {}}  # True: of training

    def __str__(self) -> str:
        if not self.head_in_words:
            return f"{self.model}: {self.mechanism}"
        counts_in_words = f"{self.fused} losses fused, logits computed {self.materialised} times"
        reasons_in_words = f" ({'; '.join(self.reasons)})" if self.reasons else ""
        tail_in_words = str(self.tail) if self.tail else "no loss so far"
        graphs_in_words = ", ".join(filter(None, (self.graph_loss_in_words, self.graph_logits_in_words)))
        graphs_in_words = (
            graphs_in_words and f"; in graphs of torch.compile, whose runs do not count: {graphs_in_words}"
        )
        counts_in_words += reasons_in_words + graphs_in_words
        return f"{self.model}: {self.head_in_words}; {self.mechanism}; {tail_in_words}; {counts_in_words}"

    __repr__ = __str__

    def warn(self, message: str, occasion: str | None = None) -> None:
        """Gives the warning ``message``, once for each ``occasion``; once for each message if ``occasion`` is None."""
        if (occasion or message) not in self.warnings_by_occasion:
            self.warnings_by_occasion[occasion or message] = message
            warnings.warn(message, stacklevel=2)

    def add_metrics(self, metrics: Mapping[str, MetricValue], is_training: bool) -> None:
        self.metric_sums[is_training] = combine([self.metric_sums[is_training], metrics])

    def take_metrics(self, training: bool = True) -> Mapping[str, MetricValue]:
        """Returns metrics of training, or of evaluation, by name, and starts new sums. A metric has ``.sum``,
        ``.count`` and ``.value`` on the device, of this rank (``chunked_head.metrics.all_reduce`` adds ranks)."""
        metrics, self.metric_sums[training] = self.metric_sums[training], {}
        return metrics


class ModelPatch:
    """The patch of one model: the options of ``patch_model``, the lazy head, the state of the forward that runs, and
    the report."""

    def __init__(
        self,
        loss: Losses | Function | None,
        metrics: Sequence[Metric],
        when: str,  # forwards with lazy logits: "labels", "training" or "always"
        logits: str | None,  # the logits of the output: "lazy", or None
        strict: bool,  # raise where logits would be computed
        head_options: dict[str, Any],  # keyword arguments of linear_cross_entropy
        model: str,  # name of the model's class
    ):
        check_options(head_options)
        loss = None if loss is None else as_losses(loss)
        metrics = as_metrics(metrics)
        check_loss(loss, metrics)
        choice("patch_model", "when", when, ("labels", "training", "always"))
        choice("patch_model", "logits", logits, ("lazy", None))
        flag("strict", strict)
        self.loss, self.metrics = loss, metrics
        self.when, self.logits, self.strict = when, logits, strict
        self.head_options, self.model = head_options, model  # the latter is the name of the model's class
        self.head: Any = None  # the lazy module; None where the model is not patched
        self.layouts: dict[Any, Any] = {}  # LogitsLayouts by state of the head: the cache of layout_of
        self.report = Report(model)
        # state of the forward that runs, and of all forwards so far
        self.is_training = True  # the model's mode in the forward
        self.num_forwards = 0  # number of runs of the class's forward; -1 after a run in a graph
        self.has_trained = False  # a forward in training mode has made a loss
        # state of the forward that runs, for graphs of torch.compile: a graph reads only what it has written itself,
        # so that it is not compiled again for other values
        self.is_running = False  # a forward of the patched model runs, in a graph or not
        self.is_tracing = False  # a forward runs in a graph, or between two of its graphs
        self.graph_has_loss = False  # a graph made the loss of the forward
        self.graph_has_logits = False  # a graph computed logits of the forward
        # losses of a rehearsal on the meta device (explain.py), which are not computed; None: losses are computed
        self.rehearsed: list[RehearsedLoss] | None = None

    def set_head(self, head: Any, name: str, is_tied: bool) -> None:
        """Sets the lazy head. ``name``: the head's name in the model. ``is_tied``: head and input embeddings share a
        weight."""
        report = self.report
        self.head, report.head_name, report.mechanism = head, name, "lazy logits"
        report.head_in_words = f"{name} {list(sizes_of(head) or ())}" + (", tied" if is_tied else "")

    def remove_head(self) -> Any:
        """Sets ``head`` to None; returns the lazy head that was set, None without a head."""
        head, self.head = self.head, None
        self.report.head_in_words = ""
        return head

    @property
    def loss_argument(self) -> str:
        """``"loss="`` or ``"metrics="``, the argument that ``patch_model`` got, for texts of errors; "" for neither.
        Neither argument has an effect on a loss that is made outside of the model's forward."""
        return "loss=" if self.loss is not None else "metrics=" if self.metrics else ""

    def refuse(self, reason: str) -> None:
        """Reports that the model stays unpatched for ``reason``, and warns. ValueError if the patch has a loss or
        metrics, which would have no effect."""
        if self.loss_argument:
            raise ValueError(f"{self.loss_argument} of patch_model has no effect on this {self.model}: {reason}")
        self.report.mechanism = f"none: {reason}"
        self.report.warn(f"chunked_head leaves {self.model} as it is: {reason}")

    def has_lazy_logits(self, model: nn.Module, has_labels: bool, has_cache: bool = False) -> bool:
        """True if the logits of a forward are lazy. ``has_labels``: the forward has labels. ``has_cache``: the forward
        has ``past_key_values``, as in generation, where only the logits of one token are read."""
        if self.head is None or is_exporting():
            return False
        return has_labels or (self.wants_unlabelled(model, has_cache) and not self.is_sharded(model))

    def wants_unlabelled(self, model: nn.Module, has_cache: bool) -> bool:
        """True if the option ``when`` asks for lazy logits of a forward without labels."""
        return (self.when == "training" and is_training(model)) or (self.when == "always" and not has_cache)

    def is_sharded(self, model: nn.Module) -> bool:
        """True if FSDP shards the model or the head."""
        return is_fully_sharded(model) or is_fully_sharded(self.head)

    def check_unlabelled(self, model: nn.Module, has_cache: bool) -> None:
        """Warns if a training step's forward has no labels and this library will not compute the loss of its logits.
        RuntimeError instead if the patch has a loss or metrics. Warns under FSDP too, where no loss outside of the
        forward is fused."""
        if self.head is None or is_exporting():
            return
        is_compiling = torch.compiler.is_compiling()
        is_loss_ignored = self.when == "labels" and not is_compiling and patch_in_forward(self.head) is None
        if is_training(model) and (self.loss_argument or is_loss_ignored) and (is_compiling or not self.has_trained):
            caller = "" if is_compiling else f" that {caller_location(WRAPPER_PATHS)} called"
            self.report_training_loss(f"the forward{caller} was given no labels")
        if self.wants_unlabelled(model, has_cache) and self.is_sharded(model):
            self.report.warn(
                f"chunked_head: {self.model} is sharded by FSDP, which takes its weights away when the forward ends: "
                "only losses inside of it are fused; give the forward labels"
            )

    @contextlib.contextmanager
    def forward_with(self, head: Any, has_labels: bool) -> Iterator[None]:
        """A context for the model's forward, in which a call of the head returns lazy logits. RuntimeError at the
        end if there are labels and the patch's loss or metrics had no effect. If nested forwards share a head, the
        logits belong to the innermost forward."""
        is_compiling = torch.compiler.is_compiling()
        forward, count_before = RunningForward(self), 0
        if not is_compiling:  # a graph must not depend on counts
            count_before = self.report.fused + self.report.materialised
            forward.enter(head)
        self.is_running, self.is_tracing = True, is_compiling
        self.graph_has_loss = self.graph_has_logits = False
        try:
            yield
        finally:
            self.is_running = self.is_tracing = False
            if not is_compiling:
                forward.leave(head)
        if not has_labels or forward.has_loss or self.graph_has_loss:
            return
        if self.loss_argument:
            raise RuntimeError(
                f"{self.loss_argument} of patch_model had no effect: {self.model} was given labels and made no loss of "
                f"{self.report.head_name}'s logits that it could stand for{forward.logits_in_words}; leave "
                f"{self.loss_argument} out"
            )
        if is_compiling or forward.is_covered or self.graph_has_logits:
            return
        if self.report.fused + self.report.materialised == count_before:
            name = self.report.head_name
            self.report.warn(f"chunked_head: {self.model} was given labels and computed no cross-entropy of {name}")

    def count_loss(self, tail: Tail, is_in_forward: bool = False) -> None:
        """Counts a loss that this library computes. ``is_in_forward``: the model's forward makes the loss."""
        if is_in_forward and self.is_training:
            self.has_trained = True
        if torch.compiler.is_compiling():
            self.report.graph_loss_in_words = "losses fused"
            self.graph_has_loss = self.graph_has_loss or is_in_forward
            return
        self.report.fused += 1
        self.report.tail = tail
        if is_in_forward and (forward := running_forward(self)) is not None:
            forward.has_loss = True

    def count_forward(self) -> None:
        """Counts a run of the forward of the model's class."""
        self.num_forwards = -1 if torch.compiler.is_compiling() else self.num_forwards + 1

    def report_training_loss(self, description: str) -> None:
        """Reports a training step's loss that is made outside of the forward, with remedies: RuntimeError if the patch
        has a loss or metrics, which have no effect then, else a warning. ``description``: how the loss is made."""
        argument = self.loss_argument
        if argument:
            remedy_by_labels = (
                "train on the loss that the forward returns for its labels (label smoothing is an option of "
                "losses.cross_entropy)"
            )
            condition = " as it is" if self.when == "training" else ' with when="training"'
            remedy_by_patch = f"patch_model without {argument}, which fuses a loss outside of the forward{condition}"
        else:
            remedy_by_labels = "give the forward labels and train on its loss"
            remedy_by_patch = 'patch_model(model, when="training") for losses outside of it'
        remedies = [remedy_by_labels, remedy_by_patch, *([] if is_on_trl() else [TRL_REMEDY])]
        self.report_outside_loss(description, remedies)

    def report_instance_forward(self, name: str) -> None:
        """Reports that an instance's forward ran instead of the class's: RuntimeError if the patch has a loss or
        metrics, else a warning. ``name``: the name of the instance's forward, and its place in the code."""
        if self.loss_argument or not is_on_trl():
            remedies = ["let it call the forward that it finds on the model", *([] if is_on_trl() else [TRL_REMEDY])]
            self.report_outside_loss(f"by {name}, which runs instead of the model's forward", remedies)

    def report_outside_loss(self, description: str, remedies: Sequence[str]) -> None:
        """Reports a loss that this library does not compute: RuntimeError if the patch has a loss or metrics, else one
        warning. ``description``: how the loss is made. ``remedies``: texts of what the user can do."""
        if not torch.is_grad_enabled() or (not torch.compiler.is_compiling() and in_backward()):
            return  # in backward a checkpoint runs the forward again
        advice = ", or ".join(remedies)
        if self.loss_argument:
            raise RuntimeError(
                f"{self.loss_argument} of patch_model has no part in a loss made outside of {self.model}'s forward "
                f"({description}); {advice}"
            )
        self.report.warn(
            f"chunked_head: a loss made outside of {self.model}'s forward ({description}) is not fused; {advice}",
            occasion="outside",
        )

    def count_logits(self, purpose: str) -> None:
        """Counts logits that will be computed for ``purpose``, and warns. RuntimeError with ``strict``."""
        is_compiling = torch.compiler.is_compiling()
        location = "a place in a graph" if is_compiling else caller_location()
        if self.strict:
            raise RuntimeError(
                f"{self.model}'s logits would be computed for {purpose} at {location}, which strict=True forbids; use "
                "logits.materialise() where you want them"
            )
        if is_compiling:
            self.report.graph_logits_in_words, self.graph_has_logits = f"logits computed for {purpose}", True
            return
        self.report.materialised += 1
        reason = f"{purpose} at {location}"
        if (forward := running_forward(self)) is not None:
            forward.logits_in_words = f" (the logits were computed for {reason})"
        if reason not in self.report.reasons:
            self.report.reasons.append(reason)
        warning = f"chunked_head: {self.model}'s logits are computed after all, for {reason}"
        self.report.warn(warning, occasion=purpose)

    def note_rehearsed(self, loss: RehearsedLoss) -> None:
        """Adds a loss to ``rehearsed``, with the place in the model's code that makes it."""
        assert self.rehearsed is not None
        self.rehearsed.append(loss._replace(location=caller_location()))

    def add_metrics(self, output: LossOutput) -> None:
        """Adds the metrics of ``output`` to the report, except in backward, where a checkpoint repeats the forward."""
        if output.metrics and (torch.compiler.is_compiling() or not in_backward()):
            self.report.add_metrics(output.metrics, self.is_training)


def is_exporting() -> bool:
    """True while ``torch.export`` or ``torch.jit.trace`` runs a model. An exported program cannot hold lazy logits."""
    # torch 2.9's is_exporting is true in torch.compile too; the variable that it reads is true in export alone
    is_export_flag_set = getattr(torch.compiler, "_is_exporting_flag", None)
    return torch.jit.is_tracing() or (
        torch.compiler.is_exporting() if is_export_flag_set is None else is_export_flag_set
    )


def is_training(model: nn.Module) -> bool:
    """True if a forward of the model is for a training step: the model is in training mode, with gradients enabled."""
    return model.training and torch.is_grad_enabled()


def is_on_trl() -> bool:
    """True while ``patch_trl()`` is in effect."""
    return any(path.startswith("trl.") for path, _ in REPLACEMENTS)


def is_fully_sharded(module: Any) -> bool:
    """True if FSDP2 shards a module, or FSDP1 wraps it."""
    base_names = {base.__name__ for base in type(module).__mro__}
    return bool(base_names & {"FSDPModule", FSDP1}) or hasattr(module, "_is_fsdp_managed_module")


def caller_location(skipped_paths: tuple[str, ...] = ()) -> str:
    """File and line of the caller's code: the innermost frame outside of this library, torch and ``skipped_paths``."""
    frame: Any = sys._getframe(1)
    while frame is not None and any(path in frame.f_code.co_filename for path in (*LIBRARY_PATHS, *skipped_paths)):
        frame = frame.f_back
    return "an unknown place" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def check_options(options: Mapping[str, Any]) -> None:
    """TypeError for an unknown option. TypeError or ValueError for a value that is wrong for every head and batch."""
    check_named(options, OPTIONS, "; scale, softcap, bias and reduction are the model's own")


def check_loss(loss: Losses | None, metrics: Sequence[Metric]) -> None:
    """ValueError for losses and metrics that need more than labels."""
    summands = [] if loss is None else [summand for _, summand in loss.terms]
    for summand in summands:
        if summand.token_weights is not None or summand.teacher is not None:
            raise ValueError(f"{summand.label} has token weights or a teacher, and a model's forward has labels alone")
    readers: list[Summand | Metric] = [*summands, *metrics]
    for reader in readers:
        if reader.fields or reader.scope != "token":
            field_names = ", ".join(reader.fields) or "segments"
            raise ValueError(
                f"{reader.label} needs {field_names}, and a model's forward has labels alone; call linear_loss on the "
                "model's hidden states"
            )
    # raises for two losses or metrics of one name, and for too many temperatures
    structure_of(losses.cross_entropy() if loss is None else loss, metrics, 1.0, 2)
