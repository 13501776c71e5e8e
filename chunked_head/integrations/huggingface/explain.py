"""``explain_model``: a report of what ``patch_model`` would do to a model, from a forward of its copy on the meta
device."""

import contextlib
import copy
import inspect
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...core import checks
from ...core.checks import in_a_line
from ...functions.plan import device_and_gpu, plan
from ...plan.plans import Plan, as_text, facts
from ...plan.sizes import MiB
from .fused import COPIES_OF_LOGITS, chunk_rows_of
from .head import OLD_FORWARD, find_head, has_instance_forward, reading_hook, sizes_of
from .layout import layout_by_trial
from .model_patch import ModelPatch
from .patch import LABEL_NAMES, model_without_peft, patch_model, unpatch_model
from .source import PATCH
from .virtual import RehearsedLoss, Tail

MASK_NAMES = ("attention_mask", "decoder_attention_mask")  # arguments of a model's forward
OUTSIDE_NEEDS = 'needs when="training", without loss= and metrics=; TRL\'s trainers need patch_trl()'
REHEARSAL_TOKENS = 16  # length of the forward that shows where the loss is made; the place does not depend on it


@dataclass(frozen=True)
class Explanation:
    """Report of what ``patch_model`` would do; ``print`` shows it. Fields that do not apply are None or empty."""

    model: str  # name of its class
    patched: bool = False  # ``patch_model`` would patch the model: its head is understood
    reason: str = ""  # why the model would not be patched; of a patched model, why its loss is not known
    head: str = ""  # its name in the model, rows and columns, whether tied to the input embeddings
    tail: Tail | None = None  # the operations between head and loss
    losses: tuple[str, ...] = ()  # the place of each loss in a forward with labels, as file:line of the model's code
    reads_weight: bool = True  # False: chunks go through the head's own forward
    warnings: tuple[str, ...] = ()  # messages of the patched model, such as of logits that are computed after all
    tokens: int = 0  # number of tokens of the first loss, on one device
    plan: Plan | None = None  # of the first loss's call
    full_bytes: int = 0  # of the unpatched model's logits, their copy in the loss's dtype and their gradient
    extra_bytes: int | None = (
        None  # of the first loss's call at its peak, but for gradients and a weight cast by autocast
    )

    def facts(self) -> list[tuple[str, str]]:
        """The lines of the report, each as its subject and its text."""
        memory = ""
        if self.extra_bytes is not None:
            extra_in_words, full_in_words = f"{self.extra_bytes / MiB:,.1f} MiB", f"{self.full_bytes / MiB:,.1f} MiB"
            memory = f"{extra_in_words} instead of {full_in_words} of logits and their gradient"
        effect = "patches it" + (": its loss goes through the library" if self.losses else "")
        tail = f"{self.tail or ''}" + ("" if self.reads_weight else "; chunks go through the head's own forward")
        plan_facts = facts(self.plan) if self.plan else []
        lines = [
            ("model", self.model),
            ("patch_model", effect if self.patched else "leaves it as it is"),
            ("but" if self.patched else "because", self.reason),
            ("head", self.head),
            ("loss outside of the forward", OUTSIDE_NEEDS if self.head else ""),
            ("between head and loss", tail),
            *(("loss made at", location) for location in self.losses),
            *(("warning", text) for text in self.warnings),
            *(fact for fact in plan_facts if fact[0] in ("schedule", "chunks", "logits buffer")),
            (f"{self.tokens} tokens take", memory),
        ]
        return [fact for fact in lines if fact[1]]

    def __str__(self) -> str:
        return as_text([("What patch_model would do", self.facts())])


def explain_model(
    model: nn.Module,
    tokens: int = 8192,
    *,
    inputs: Mapping[str, Any] | None = None,
    autocast: torch.dtype | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> Explanation:
    """Reports what ``patch_model(model, **options)`` would do and why, without a change of the model.

        print(explain_model(model, tokens=16384))
        with torch.device("meta"):
            print(explain_model(LlamaForCausalLM(config), device="sm_90"))

    A copy of the model on the meta device, which takes no memory, is patched. The copy's forward runs once with labels,
    without hooks.

    Args:
        model: as in ``patch_model``, before FSDP shards it.
        tokens: number of tokens of a training step, for the plan.
        inputs: the arguments of the model's forward, labels among them, of any small size. None: ``input_ids`` and
            ``labels``.
        autocast: the dtype that the model trains in under ``torch.autocast``.
        device: the device that the model will train on, for the plan; as in ``plan``.
        options: options of ``patch_model``.

    Raises:
        TypeError, ValueError: ``model`` is no model, a wrapper of torch.compile or DataParallel, or cannot be copied;
            ``tokens``, ``autocast`` or ``device`` is wrong; a budget is too small. Errors that ``patch_model`` raises
            for its options are text in the result.
    """
    inner_model = model_without_peft(model, "explain_model")
    checks.check_int("tokens", tokens, 1)
    if autocast is not None:
        checks.check_dtype("autocast", autocast)
    device_and_gpu(device)  # raises for a wrong device
    hollow_copy, explanation = hollow_copy_of(inner_model), Explanation(type(inner_model).__name__, tokens=tokens)
    try:
        with warnings.catch_warnings(action="ignore"):
            try:
                patch_model(hollow_copy, **options)
            except (TypeError, ValueError) as error:
                return replace(explanation, reason=f"it raises {in_a_line(error)}")
            patch: ModelPatch = getattr(hollow_copy, PATCH)
            if patch.head is None:
                return replace(explanation, reason=patch.report.mechanism.removeprefix("none: "))
            explanation = replace(explanation, patched=True, head=patch.report.head_in_words)
            vocab, _ = sizes_of(patch.head) or (0, 0)
            hook = reading_hook(find_head(inner_model)) or needs_rows_together(find_head(inner_model), patch.head)
            failure = "" if hook else rehearse(hollow_copy, patch, inputs, autocast)
        messages = [text.removeprefix("chunked_head: ") for text in patch.report.warnings_by_occasion.values()]
        messages += [f"{explanation.model}'s logits are computed after all, for {hook}"] if hook else []
        explanation = replace(explanation, warnings=tuple(messages))
        if patch.rehearsed:
            return with_memory(explanation, patch, patch.rehearsed, vocab, device)
        reason = f"a forward with labels, on tensors without numbers, raises {failure}" if failure else ""
        return replace(explanation, reason=reason or "its loss does not go through its head")
    finally:
        unpatch_model(hollow_copy)


def needs_rows_together(head: Any, copied_head: Any) -> str:
    """The reason why a head's own forward needs all rows at once. "" if it does not, if the head's weight alone makes
    the logits, or if the head is on the meta device and cannot be tried. ``copied_head``: the patched copy of
    ``head``."""
    tensors = [tensor for tensor in (*head.parameters(), *head.buffers()) if tensor.is_floating_point()]
    if copied_head.reads_weight or not tensors or any(tensor.is_meta for tensor in tensors):
        return ""
    hidden_size = (sizes_of(head) or (0, 0))[1]
    return layout_by_trial(head, tensors[0].new_empty(1, hidden_size), None, has_run_hooks=True).reason


def with_memory(
    explanation: Explanation,
    patch: ModelPatch,
    rehearsed_losses: Sequence[RehearsedLoss],
    vocab: int,
    device: torch.device | str | None,
) -> Explanation:
    """The explanation, completed by what the first loss's call says: tail, plan, memory, and that of the unpatched
    model's logits. ``vocab``: rows of the head's weight."""
    first_loss, tokens = rehearsed_losses[0], explanation.tokens
    tail, hidden = first_loss.tail, first_loss.hidden
    num_columns, dtype = vocab if tail.vocab is None else tail.vocab, first_loss.autocast_dtype or hidden.dtype
    num_copies = 1 if first_loss.logits_dtype == dtype else 2  # the gradient, and a copy in another dtype
    token_bytes = vocab * dtype.itemsize + num_copies * num_columns * first_loss.logits_dtype.itemsize
    full_bytes, locations = tokens * token_bytes, tuple(loss.location for loss in rehearsed_losses)
    explanation = replace(
        explanation, tail=tail, losses=locations, reads_weight=first_loss.weight is not None, full_bytes=full_bytes
    )
    if first_loss.weight is None:
        num_rows = min(tokens, chunk_rows_of(vocab))
        return replace(explanation, extra_bytes=num_rows * vocab * torch.float32.itemsize * COPIES_OF_LOGITS)
    options = {key: value for key, value in patch.head_options.items() if key != "upstream"}
    options["skip_ignored"] = options.get("skip_ignored") is True
    options["accumulate_into"] = options.get("accumulate_into") is not None
    call_plan = plan(
        tokens, hidden.shape[-1], num_columns, dtype, loss=first_loss.loss, metrics=patch.metrics, softcap=tail.softcap,
        hidden_grad=hidden.requires_grad, weight_grad=first_loss.weight.requires_grad, hidden_dtype=hidden.dtype,
        weight_dtype=first_loss.weight.dtype, bias=first_loss.bias is not None and first_loss.bias.requires_grad,
        reduction=first_loss.reduction, device=device, **options,
    )  # fmt: skip
    return replace(explanation, plan=call_plan, extra_bytes=call_plan.extra_bytes)


def rehearse(
    model: Any, patch: ModelPatch, inputs: Mapping[str, Any] | None, autocast_dtype: torch.dtype | None
) -> str:
    """Runs a forward with labels, which notes its losses in ``patch.rehearsed``. Returns the forward's error in words;
    "" if it raises none.

    Masks among ``inputs`` are left out. A forward that raises runs again with masks, then without its layers.
    """
    parameters = inspect.signature(type(model).forward).parameters
    token_ids = torch.zeros(1, REHEARSAL_TOKENS, dtype=torch.int64, device="meta")
    defaults = {
        key: value
        for key, value in (("input_ids", token_ids), ("labels", token_ids), ("use_cache", False))
        if key in parameters
    }
    arguments: dict[str, Any] = {**defaults} if inputs is None else {**inputs}
    arguments = {key: value.to("meta") if isinstance(value, Tensor) else value for key, value in arguments.items()}
    arguments = {key: value for key, value in arguments.items() if key not in MASK_NAMES}
    # without a mask, transformers reads numbers to make a causal one, or warns that one is missing
    batch, length = next(
        (value.shape for key, value in arguments.items() if key in LABEL_NAMES), (1, REHEARSAL_TOKENS)
    )[:2]
    shapes = (batch, 1, length, length), (batch, length, length), (batch, length)
    masks = [{key: torch.ones(shape, device="meta") for key in MASK_NAMES if key in parameters} for shape in shapes]
    failures = []
    for with_layers, mask in itertools.product((True, False), ({}, *masks)):
        for module in [] if with_layers else list(model.modules()):
            for key, child in list(module.named_children()):  # modules that route tokens to experts read numbers
                if isinstance(child, nn.ModuleList) and all(any(layer.children()) for layer in child):
                    setattr(module, key, nn.ModuleList())
        patch.rehearsed = []
        try:
            with without_numbers(autocast_dtype):
                model.train()(**(mask | arguments))
            return ""
        except Exception as error:
            failures.append(in_a_line(error))
            if patch.rehearsed:
                break
    return failures[0]


@contextlib.contextmanager
def without_numbers(autocast_dtype: torch.dtype | None) -> Iterator[None]:
    """A context for a forward on the meta device, with autocast to ``autocast_dtype``. Models call torch.autocast for
    their tensors' device, and it does not know the meta device: there such a call has no effect."""
    autocast_before: Any = torch.autocast

    def autocast_or_nothing(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext() if device_type == "meta" else autocast_before(device_type, *args, **kwargs)

    torch.autocast = autocast_or_nothing  # type: ignore[assignment, misc]
    try:
        with (
            torch.enable_grad(),
            torch.device("meta"),
            autocast_before("cpu", dtype=autocast_dtype, enabled=autocast_dtype is not None),
        ):
            yield
    finally:
        torch.autocast = autocast_before  # type: ignore[misc]


def hollow_copy_of(model: nn.Module) -> nn.Module:
    """A copy of a model on the meta device, without hooks. ValueError if the model cannot be copied."""
    copies_by_id: dict[int, Any] = {}
    try:
        for module in model.modules():
            for key, value in (*vars(module).items(), *module._parameters.items(), *module._buffers.items()):
                if isinstance(value, Tensor):  # a head's class decides how its loss is made
                    empty_copy = torch.empty(value.shape, dtype=value.dtype, device="meta")
                    copies_by_id[id(value)] = empty_copy.as_subclass(type(value)).requires_grad_(value.requires_grad)
                elif isinstance(value, dict) and "_hooks" in key:
                    copies_by_id[id(value)] = type(value)()
        hollow_model = copy.deepcopy(model, copies_by_id)
    except Exception as error:
        raise ValueError(
            f"explain_model needs a copy of the model, and {type(model).__name__} gives none ({in_a_line(error)}); "
            "explain it before it is wrapped or sharded"
        ) from error
    for module in hollow_model.modules():
        if not has_instance_forward(module):
            for key in ("forward", OLD_FORWARD):
                vars(module).pop(key, None)
    return hollow_model
