"""Classes of the installed transformers that have a head over a vocabulary, and each with and without
``patch_model``: the same loss, gradients and logits, or not."""

import copy
import importlib
import inspect
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from chunked_head import patch_model, unpatch_model

from . import exceptions, models
from .models import parameters_of

KINDS = ("causal", "conditional", "masked")
NAMED = {
    "causal": ("ForCausalLM", "LMHeadModel", "ModelWithLMHead"),
    "conditional": ("ForConditionalGeneration",),
    "masked": ("ForMaskedLM",),
}
MAPPED = {
    "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",),
    "conditional": (
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_VISION_2_SEQ_MAPPING_NAMES",
        "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    ),
    "masked": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES",),
}  # fmt: skip


class Entry(NamedTuple):
    """A class by name, the module it is in, and the kind of its head's use."""

    name: str
    module: str
    kind: str

    def load(self) -> Any:
        """The class itself; imports its module."""
        return getattr(importlib.import_module(self.module), self.name)


def mapped() -> dict[str, str]:
    """Every class of the automatic mappings, with its kind: the first of ``KINDS`` that names it."""
    found: dict[str, str] = {}
    for kind in KINDS:
        for name in MAPPED[kind]:
            for value in getattr(modeling_auto, name, {}).values():
                for one in (value,) if isinstance(value, str) else value:
                    found.setdefault(one, kind)
    return found


def kind_of(name: str, by_mapping: dict[str, str]) -> str | None:
    """By the class's name, which is surer than a mapping that lists it among others, else by the mapping."""
    for kind in KINDS:
        if name.endswith(NAMED[kind]):
            return kind
    return by_mapping.get(name)


def find(kind: str = "all") -> list[Entry]:
    """Every class of one kind or of all, by reading the modules' text: nothing is imported, exported or not."""
    by_mapping, found = mapped(), []
    root = Path(inspect.getfile(transformers)).parent
    for path in sorted((root / "models").glob("*/modeling_*.py")):
        if path.parent.name == "auto" or path.stem.startswith(("modeling_tf_", "modeling_flax_")):
            continue
        module = f"transformers.models.{path.parent.name}.{path.stem}"
        for name in re.findall(r"^class (\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE):
            its_kind = kind_of(name, by_mapping)
            if its_kind is not None and kind in ("all", its_kind):
                found.append(Entry(name, module, its_kind))
    return found


LOSS_TOLERANCE, GRADIENT_TOLERANCE, LOGITS_TOLERANCE = 2e-5, 2e-4, 2e-5
# Gradients whose exact value is 0, as of a bias that a softmax takes away, are noise: nothing is compared below this
# part of the largest gradient of the model.
NOISE = 1e-3
COUNT = {"num_items_in_batch": torch.tensor(7)}  # of a batch that this one would be a part of
VERDICTS = ("fused", "materialised", "refused", "WRONG", "not built", "no labels")


@dataclass
class Outcome:
    """What came of a class, and how near its patched self was. Errors are relative, the largest of all runs."""

    name: str
    kind: str
    verdict: str
    reason: str = ""
    head: str = ""
    tail: str = ""
    fused: int = 0
    materialised: int = 0
    loss_error: float = 0.0
    gradient_error: float = 0.0
    seconds: float = field(default=0.0, compare=False)


class Run(NamedTuple):
    """A loss in training mode with the gradients of every parameter that has one, by name."""

    loss: Tensor
    gradients: dict[str, Tensor]


class Measured(NamedTuple):
    """A model's runs: with labels, with the count of a larger batch's tokens too, and logits in evaluation."""

    runs: dict[str, Run]
    logits: list[Tensor]


class NoLoss(Exception):
    """The class takes no labels, or makes no loss of them."""


def loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, dict) else output[0]
    if not isinstance(loss, Tensor):
        raise NoLoss("its forward returns no loss for labels")
    return loss


def run(model: nn.Module, given: dict[str, Any]) -> Run:
    model.train()
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    loss = loss_of(model(**given))
    loss.sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Run(loss.detach().clone(), found)


def evaluated(model: nn.Module, given: dict[str, Any]) -> list[Tensor]:
    """Everything like logits that the model returns without labels."""
    model.eval()
    torch.manual_seed(7)
    with torch.no_grad():
        output = model(**{name: value for name, value in given.items() if name != "labels"})
    values = output.values() if isinstance(output, dict) else output
    return [v.clone() for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.dim() > 1]


def measure(model: nn.Module, given: dict[str, Any], counted: bool) -> Measured:
    """All runs from the weights as they are, ``counted``: also with ``num_items_in_batch``."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    runs = {"labels": run(model, given)}
    restore(model, state)
    if counted:
        runs["num_items_in_batch"] = run(model, given | COUNT)
        restore(model, state)
    logits = evaluated(model, given)
    restore(model, state)
    return Measured(runs, logits)


def restore(model: nn.Module, state: dict[str, Tensor]) -> None:
    """The model as before a run: buffers too, and what RecurrentGemma keeps beside them."""
    model.load_state_dict(state)
    for module in model.modules():
        if "recurrent_states" in module.__dict__:
            module.__dict__["recurrent_states"] = None


def takes_count(model: nn.Module, given: dict[str, Any]) -> bool:
    """Whether the model passes ``num_items_in_batch`` on to where it is known, as Trainer has it do."""
    takes = parameters_of(type(model).forward)
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values()):
        return False
    try:
        run(copy.deepcopy(model), given | COUNT)
    except TypeError as reason:
        if "num_items_in_batch" not in str(reason):
            raise
        return False
    return True


def error(found: Tensor, true: Tensor, least: float = 0.0) -> float:
    """The largest difference over the largest value, at least ``least``; infinite for other shapes and for nan."""
    if found.shape != true.shape or not torch.isfinite(found).all():
        return float("inf")
    if true.numel() == 0:
        return 0.0
    return float((found - true).abs().max() / true.abs().max().clamp(min=max(least, 1e-30)))


def compare(found: Measured, true: Measured) -> tuple[float, float, str]:
    """The errors of loss and gradients, and what is wrong: nothing, or the first thing."""
    losses, gradients, wrong = 0.0, 0.0, ""
    for name, run_true in true.runs.items():
        run_found = found.runs[name]
        loss = error(run_found.loss, run_true.loss)
        losses = max(losses, loss)
        if loss >= LOSS_TOLERANCE:
            wrong = wrong or f"loss with {name} off by {loss:.1e}"
        if run_found.gradients.keys() != run_true.gradients.keys():
            others = sorted(run_found.gradients.keys() ^ run_true.gradients.keys())
            wrong = wrong or f"gradients with {name} of other parameters: {others[0]}"
            continue
        least = NOISE * max((float(g.abs().max()) for g in run_true.gradients.values() if g.numel()), default=0.0)
        for parameter, gradient in run_true.gradients.items():
            one = error(run_found.gradients[parameter], gradient, least)
            gradients = max(gradients, one)
            if one >= GRADIENT_TOLERANCE:
                wrong = wrong or f"gradient with {name} of {parameter} off by {one:.1e}"
    if len(found.logits) != len(true.logits):
        wrong = wrong or "other outputs in evaluation"
    elif any(error(one, other) >= LOGITS_TOLERANCE for one, other in zip(found.logits, true.logits, strict=True)):
        wrong = wrong or "other logits in evaluation"
    return losses, gradients, wrong


def check(entry: Entry) -> Outcome:
    """What ``patch_model`` does with a class. Raises nothing."""
    warnings.simplefilter("ignore")
    try:
        model_class = entry.load()
        if entry.name in exceptions.NO_TOKENS:
            raise NoLoss(exceptions.NO_TOKENS[entry.name])
        if "labels" not in parameters_of(model_class.forward):
            raise NoLoss("its forward takes no labels")
        model = models.build(model_class)
        given = models.inputs(model)
        counted = takes_count(model, given)
        true = measure(copy.deepcopy(model), given, counted)
        for one in true.runs.values():
            if not torch.isfinite(one.loss).all():
                raise ValueError(f"the unpatched model's loss is {one.loss.tolist()}")
            if not any(float(gradient.abs().max()) > 0 for gradient in one.gradients.values() if gradient.numel()):
                raise ValueError("the unpatched model's gradients are 0")
    except NoLoss as reason:
        return Outcome(entry.name, entry.kind, "no labels", str(reason))
    except Exception as reason:
        return Outcome(entry.name, entry.kind, "not built", brief(reason))
    return compared(entry, model, given, true)


def compared(entry: Entry, model: nn.Module, given: dict[str, Any], true: Measured) -> Outcome:
    """A built model's outcome."""
    outcome = Outcome(entry.name, entry.kind, "WRONG")
    patched = copy.deepcopy(model)
    try:
        patch_model(patched)
        report: Any = patched.chunked_head
        found = measure(patched, given, len(true.runs) > 1)
        outcome.loss_error, outcome.gradient_error, outcome.reason = compare(found, true)
        outcome.fused, outcome.materialised = report.fused, report.materialised
        outcome.head, outcome.tail = str(report.head_name), "" if report.tail is None else str(report.tail)
        unpatch_model(patched)
        _, _, afterwards = compare(measure(patched, given, len(true.runs) > 1), true)
        if afterwards or type(patched) is not type(model):
            outcome.reason = outcome.reason or f"not undone: {afterwards or type(patched).__name__}"
    except Exception as reason:
        outcome.reason = f"raises {brief(reason)}"
    if not outcome.reason:
        outcome.verdict, outcome.reason = verdict(report)
    return outcome


def verdict(report: Any) -> tuple[str, str]:
    """Of a model that is right, by what its report counts."""
    if report.materialised:
        return "materialised", "; ".join(report.reasons)
    if report.fused:
        return "fused", ""
    reason = report.mechanism.removeprefix("none: ")
    return "refused", "its loss does not go through its head" if reason == report.mechanism else reason


def brief(reason: BaseException) -> str:
    """An exception in a few words: its last line, which says most in errors of several."""
    words = " ".join(str(reason).strip().splitlines()[-1:])
    return f"{type(reason).__name__}: {words}"[:160]
