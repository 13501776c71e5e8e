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
from ...functions.plan import place_of, plan
from ...plan.plans import Plan, as_text, facts
from ...plan.sizes import MiB
from .agreement import Agreement
from .fused import COPIES_OF_LOGITS, rows_at_once
from .head import OLD_FORWARD, find_head, hides, sizes_of, watcher
from .output import ask
from .patch import LABELS, REPORT, patch_model, the_model, unpatch_model
from .virtual import Rehearsed, Tail

MASKS = ("attention_mask", "decoder_attention_mask")
OUTSIDE = 'needs when="training", without loss= and metrics=; TRL\'s trainers need patch_trl()'
LENGTH = 16  # tokens of the forward that shows where the loss is made: of any other length it is the same


@dataclass(frozen=True)
class Explanation:
    """Report of what ``patch_model`` would do; ``print`` shows it. Fields that do not apply are None or empty."""

    model: str  # its class
    patched: bool = False  # its head is understood
    reason: str = ""  # why it is not patched, or what is not known of a patched one
    head: str = ""  # its name in the model, rows and columns, whether tied to the input embeddings
    tail: Tail | None = None  # scale, softcap and the rest between head and loss
    losses: tuple[str, ...] = ()  # where a forward with labels makes each, as file:line of the model's code
    reads_weight: bool = True  # False: chunks go through the head's own forward
    warnings: tuple[str, ...] = ()  # of the patched model, such as of logits that are computed after all
    tokens: int = 0  # of the call that makes the first loss, on one device
    plan: Plan | None = None  # of that call
    full_bytes: int = 0  # of the unpatched model's logits, their copy in the loss's dtype and their gradient
    extra_bytes: int | None = None  # of the call at its peak, without gradients and a weight that autocast casts

    def facts(self) -> list[tuple[str, str]]:
        """The report, line by line: what a line is about, and what it says."""
        memory = ""
        if self.extra_bytes is not None:
            full, extra = (f"{size / MiB:,.1f} MiB" for size in (self.full_bytes, self.extra_bytes))
            memory = f"{extra} instead of {full} of logits and their gradient"
        does = "patches it" + (": its loss goes through the library" if self.losses else "")
        tail = f"{self.tail or ''}" + ("" if self.reads_weight else "; chunks go through the head's own forward")
        shown = facts(self.plan) if self.plan else []
        rows = [
            ("model", self.model),
            ("patch_model", does if self.patched else "leaves it as it is"),
            ("but" if self.patched else "because", self.reason),
            ("head", self.head),
            ("loss outside of the forward", OUTSIDE if self.head else ""),
            ("between head and loss", tail),
            *(("loss made at", place) for place in self.losses),
            *(("warning", text) for text in self.warnings),
            *(row for row in shown if row[0] in ("schedule", "chunks", "logits buffer")),
            (f"{self.tokens} tokens take", memory),
        ]
        return [row for row in rows if row[1]]

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
    """Reports what ``patch_model(model, **options)`` would do and why. The model does not change; no memory is taken.

        print(explain_model(model, tokens=16384))
        with torch.device("meta"):
            print(explain_model(LlamaForCausalLM(config), device="sm_90"))

    A copy of the model on the meta device is patched, and its forward runs once with labels there, without hooks.

    Args:
        model: as in ``patch_model``, before FSDP shards it.
        tokens: number of tokens of a training step, for the plan.
        inputs: the arguments of its forward, labels included, of any small size. None: ``input_ids`` and ``labels``.
        autocast: the dtype that the model trains in under ``torch.autocast``.
        device: the device that the model will train on, for the plan; as in ``plan``.
        options: options of ``patch_model``.

    Raises:
        TypeError, ValueError: ``model`` is no model, a wrapper of torch.compile or DataParallel, or cannot be copied;
            ``tokens``, ``autocast`` or ``device`` is wrong; a budget is too small. Errors that ``patch_model`` raises
            for its options are text in the result.
    """
    inner = the_model(model, "explain_model")
    checks.check_int("tokens", tokens, 1)
    if autocast is not None:
        checks.check_dtype("autocast", autocast)
    place_of(device)  # raises what is wrong with it
    hollow_copy, explanation = hollow(inner), Explanation(type(inner).__name__, tokens=tokens)
    try:
        with warnings.catch_warnings(action="ignore"):
            try:
                patch_model(hollow_copy, **options)
            except (TypeError, ValueError) as error:
                return replace(explanation, reason=f"it raises {in_a_line(error)}")
            agreement: Agreement = getattr(hollow_copy, REPORT)
            if agreement.head is None:
                return replace(explanation, reason=agreement.mechanism.removeprefix("none: "))
            explanation = replace(explanation, patched=True, head=agreement.head_in_words)
            vocab, _ = sizes_of(agreement.head) or (0, 0)
            hook = watcher(find_head(inner)) or needs_rows_together(find_head(inner), agreement.head)
            failure = "" if hook else rehearse(hollow_copy, agreement, inputs, autocast)
        messages = [text.removeprefix("chunked_head: ") for text in agreement.warned.values()]
        messages += [f"{explanation.model}'s logits are computed after all, for {hook}"] if hook else []
        explanation = replace(explanation, warnings=tuple(messages))
        if agreement.rehearsed:
            return with_memory(explanation, agreement, agreement.rehearsed, vocab, device)
        reason = f"a forward with labels, on tensors without numbers, raises {failure}" if failure else ""
        return replace(explanation, reason=reason or "its loss does not go through its head")
    finally:
        unpatch_model(hollow_copy)


def needs_rows_together(head: Any, copied_head: Any) -> str:
    """The reason why a head's own forward needs all rows at once. "" if there is none; also if its weight alone makes
    the logits, or if it is on the meta device and cannot be tried."""
    tensors = [tensor for tensor in (*head.parameters(), *head.buffers()) if tensor.is_floating_point()]
    if copied_head.reads_weight or not tensors or any(tensor.is_meta for tensor in tensors):
        return ""
    columns = (sizes_of(head) or (0, 0))[1]
    return ask(head, tensors[0].new_empty(1, columns), None, has_run_hooks=True).reason


def with_memory(
    explanation: Explanation,
    agreement: Agreement,
    calls: Sequence[Rehearsed],
    vocab: int,
    device: torch.device | str | None,
) -> Explanation:
    """The explanation with the memory of the first loss's call, and of the unpatched model's logits."""
    call, tokens = calls[0], explanation.tokens
    tail, hidden = call.tail, call.hidden
    columns, dtype = vocab if tail.vocab is None else tail.vocab, call.autocast or hidden.dtype
    copies = (1 if call.logits == dtype else 2) * columns * call.logits.itemsize  # with the gradient
    full, locations = tokens * (vocab * dtype.itemsize + copies), tuple(loss_call.made_at for loss_call in calls)
    explanation = replace(
        explanation, tail=tail, losses=locations, reads_weight=call.weight is not None, full_bytes=full
    )
    if call.weight is None:
        rows = min(tokens, rows_at_once(vocab))
        return replace(explanation, extra_bytes=rows * vocab * torch.float32.itemsize * COPIES_OF_LOGITS)
    options = {key: value for key, value in agreement.options.items() if key != "upstream"}
    options["skip_ignored"] = options.get("skip_ignored") is True
    options["accumulate_into"] = options.get("accumulate_into") is not None
    call_plan = plan(
        tokens, hidden.shape[-1], columns, dtype, loss=call.loss, metrics=agreement.measured, softcap=tail.softcap,
        hidden_grad=hidden.requires_grad, weight_grad=call.weight.requires_grad, hidden_dtype=hidden.dtype,
        weight_dtype=call.weight.dtype, bias=call.bias is not None and call.bias.requires_grad,
        reduction=call.reduction, device=device, **options,
    )  # fmt: skip
    return replace(explanation, plan=call_plan, extra_bytes=call_plan.extra_bytes)


def rehearse(model: Any, agreement: Agreement, inputs: Mapping[str, Any] | None, autocast: torch.dtype | None) -> str:
    """Runs a forward with labels, which notes its losses in ``agreement.rehearsed``; returns its error in words, or "".

    Masks among ``inputs`` are left out. A forward that raises runs again with masks, then without its layers.
    """
    parameters = inspect.signature(type(model).forward).parameters
    ids = torch.zeros(1, LENGTH, dtype=torch.int64, device="meta")
    defaults = {
        key: value for key, value in (("input_ids", ids), ("labels", ids), ("use_cache", False)) if key in parameters
    }
    arguments: dict[str, Any] = {**defaults} if inputs is None else {**inputs}
    arguments = {key: value.to("meta") if isinstance(value, Tensor) else value for key, value in arguments.items()}
    arguments = {key: value for key, value in arguments.items() if key not in MASKS}
    # without a mask, transformers reads numbers to make a causal one, or warns that one is missing
    batch, length = next((value.shape for key, value in arguments.items() if key in LABELS), (1, LENGTH))[:2]
    shapes = (batch, 1, length, length), (batch, length, length), (batch, length)
    masks = [{key: torch.ones(shape, device="meta") for key in MASKS if key in parameters} for shape in shapes]
    failures = []
    for with_layers, mask in itertools.product((True, False), ({}, *masks)):
        for module in [] if with_layers else list(model.modules()):
            for key, child in list(module.named_children()):  # modules that route tokens to experts read numbers
                if isinstance(child, nn.ModuleList) and all(any(layer.children()) for layer in child):
                    setattr(module, key, nn.ModuleList())
        agreement.rehearsed = []
        try:
            with without_numbers(autocast):
                model.train()(**(mask | arguments))
            return ""
        except Exception as error:
            failures.append(in_a_line(error))
            if agreement.rehearsed:
                break
    return failures[0]


@contextlib.contextmanager
def without_numbers(autocast: torch.dtype | None) -> Iterator[None]:
    """A context for a forward on the meta device. Models switch autocast off for their tensors' device, and autocast
    does not know this one: it is nothing there."""
    real_autocast: Any = torch.autocast

    def autocast_or_nothing(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext() if device_type == "meta" else real_autocast(device_type, *args, **kwargs)

    torch.autocast = autocast_or_nothing  # type: ignore[assignment, misc]
    try:
        with (
            torch.enable_grad(),
            torch.device("meta"),
            real_autocast("cpu", dtype=autocast, enabled=autocast is not None),
        ):
            yield
    finally:
        torch.autocast = real_autocast  # type: ignore[misc]


def hollow(model: nn.Module) -> nn.Module:
    """A copy on the meta device, without hooks."""
    copies: dict[int, Any] = {}
    try:
        for module in model.modules():
            for key, value in (*vars(module).items(), *module._parameters.items(), *module._buffers.items()):
                if isinstance(value, Tensor):  # a head's class decides how its loss is made
                    empty = torch.empty(value.shape, dtype=value.dtype, device="meta")
                    copies[id(value)] = empty.as_subclass(type(value)).requires_grad_(value.requires_grad)
                elif isinstance(value, dict) and "_hooks" in key:
                    copies[id(value)] = type(value)()
        hollow_model = copy.deepcopy(model, copies)
    except Exception as error:
        raise ValueError(
            f"explain_model needs a copy of the model, and {type(model).__name__} gives none ({in_a_line(error)}); "
            "explain it before it is wrapped or sharded"
        ) from error
    for module in hollow_model.modules():
        if not hides(module):
            for key in ("forward", OLD_FORWARD):
                vars(module).pop(key, None)
    return hollow_model
