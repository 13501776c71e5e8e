"""``explain_model`` reports what ``patch_model`` would do to a model. A copy of the model runs on the meta device."""

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
from .fused import NUM_CHUNK_TENSORS, chunk_rows_of
from .head import OLD_FORWARD, find_head, has_instance_forward, reading_hook, sizes_of
from .head_call import PATCH
from .layout import layout_by_trial
from .model_patch import ModelPatch
from .patch import LABEL_NAMES, model_without_peft, patch_model, unpatch_model
from .virtual import RehearsedLoss, Tail

MASK_NAMES = ("attention_mask", "decoder_attention_mask")  # parameters of a model's forward
OUTSIDE_LOSS_CONDITIONS = 'needs when="training", without loss= and metrics=; TRL\'s trainers need patch_trl()'
REHEARSAL_TOKENS = 16  # number of tokens of the forward that shows where the loss is made; any number shows it


@dataclass(frozen=True)
class Explanation:
    """Report of what ``patch_model`` would do, shown by ``print``. Fields that do not apply are None, empty or 0."""

    model: str  # name of the model's class
    patched: bool = False  # ``patch_model`` would patch the model
    reason: str = ""  # why the model would not be patched, or why the loss of a patched model is not known
    head: str = ""  # the head's name and sizes, and whether it is tied to the input embeddings
    tail: Tail | None = None  # the operations between head and loss
    losses: tuple[str, ...] = ()  # file:line of the model's code for each loss of a forward with labels
    reads_weight: bool = True  # False: the head's own forward computes the logits of each chunk
    warnings: tuple[str, ...] = ()  # of the patched model, such as that logits are computed after all
    tokens: int = 0  # number of tokens of a training step, on one device
    plan: Plan | None = None  # of the first loss
    full_bytes: int = 0  # the unpatched model's logits, their copy in the loss's dtype, their gradient
    extra_bytes: int | None = None  # peak of the first loss, without gradients and the weight that autocast casts

    def facts(self) -> list[tuple[str, str]]:
        """Lines of the report: pairs of a subject and a text."""
        memory_in_words = ""
        if self.extra_bytes is not None:
            extra_in_words, full_in_words = f"{self.extra_bytes / MiB:,.1f} MiB", f"{self.full_bytes / MiB:,.1f} MiB"
            memory_in_words = f"{extra_in_words} instead of {full_in_words} of logits and their gradient"
        effect = "patches it" + (": its loss goes through the library" if self.losses else "")
        tail_in_words = str(self.tail or "")
        tail_in_words += "" if self.reads_weight else "; chunks go through the head's own forward"
        plan_facts = facts(self.plan) if self.plan else []
        lines = [
            ("model", self.model),
            ("patch_model", effect if self.patched else "leaves it as it is"),
            ("but" if self.patched else "because", self.reason),
            ("head", self.head),
            ("loss outside of the forward", OUTSIDE_LOSS_CONDITIONS if self.head else ""),
            ("between head and loss", tail_in_words),
            *(("loss made at", location) for location in self.losses),
            *(("warning", text) for text in self.warnings),
            *(fact for fact in plan_facts if fact[0] in ("schedule", "chunks", "logits buffer")),
            (f"{self.tokens} tokens take", memory_in_words),
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

    The function patches a copy of the model on the meta device, where tensors take no memory. It runs the copy's
    forward with labels and without hooks.

    Args:
        model: as in ``patch_model``, not sharded by FSDP.
        tokens: number of tokens of a training step, for the plan.
        inputs: arguments of the model's forward by name, labels among them, of any small size. None stands for
            ``input_ids`` and ``labels``.
        autocast: dtype of ``torch.autocast`` in training; None without autocast.
        device: the device of the training, for the plan: a device, or the name of a GPU or an architecture.
        options: options of ``patch_model``.

    Raises:
        TypeError, ValueError: ``model`` is no model, a wrapper of torch.compile or DataParallel, or cannot be copied;
            ``tokens``, ``autocast`` or ``device`` is wrong; a budget is too small. Errors of ``patch_model`` about its
            options are not raised: the result's ``reason`` has their text.
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
            head = find_head(inner_model)
            logits_purpose = reading_hook(head) or unsplit_reason(head, patch.head)
            forward_error = "" if logits_purpose else rehearse(hollow_copy, patch, inputs, autocast)
        warning_texts = [text.removeprefix("chunked_head: ") for text in patch.report.warnings_by_occasion.values()]
        if logits_purpose:
            warning_texts.append(f"{explanation.model}'s logits are computed after all, for {logits_purpose}")
        explanation = replace(explanation, warnings=tuple(warning_texts))
        if patch.rehearsed:
            return with_losses(explanation, patch, patch.rehearsed, vocab, device)
        reason = "its loss does not go through its head"
        if forward_error:
            reason = f"a forward with labels, on tensors without numbers, raises {forward_error}"
        return replace(explanation, reason=reason)
    finally:
        unpatch_model(hollow_copy)


def unsplit_reason(head: Any, copied_head: Any) -> str:
    """The reason why a head's own forward cannot compute logits in chunks of rows. "" if the forward can, if the weight
    alone makes the logits, or if the head is on the meta device and cannot run. ``copied_head``: the patched copy of
    ``head``."""
    float_tensors = [tensor for tensor in (*head.parameters(), *head.buffers()) if tensor.is_floating_point()]
    if copied_head.reads_weight or not float_tensors or any(tensor.is_meta for tensor in float_tensors):
        return ""
    hidden_size = (sizes_of(head) or (0, 0))[1]
    return layout_by_trial(head, float_tensors[0].new_empty(1, hidden_size), None, has_run_hooks=True).reason


def with_losses(
    explanation: Explanation,
    patch: ModelPatch,
    rehearsed_losses: Sequence[RehearsedLoss],
    vocab: int,
    device: torch.device | str | None,
) -> Explanation:
    """Returns the explanation with more fields: the places of all losses; tail, plan and memory of the first loss; the
    memory of the unpatched model's logits. ``vocab``: number of rows of the head's weight."""
    first_loss, tokens = rehearsed_losses[0], explanation.tokens
    tail, hidden = first_loss.tail, first_loss.hidden
    num_columns = vocab if tail.vocab is None else tail.vocab
    matmul_dtype = first_loss.autocast_dtype or hidden.dtype
    num_copies = 1 if first_loss.logits_dtype == matmul_dtype else 2  # the gradient, and a copy in another dtype
    bytes_per_token = vocab * matmul_dtype.itemsize + num_copies * num_columns * first_loss.logits_dtype.itemsize
    full_bytes, locations = tokens * bytes_per_token, tuple(loss.location for loss in rehearsed_losses)
    explanation = replace(
        explanation, tail=tail, losses=locations, reads_weight=first_loss.weight is not None, full_bytes=full_bytes
    )
    if first_loss.weight is None:
        chunk_rows = min(tokens, chunk_rows_of(vocab))
        return replace(explanation, extra_bytes=chunk_rows * vocab * torch.float32.itemsize * NUM_CHUNK_TENSORS)
    options = {key: value for key, value in patch.head_options.items() if key != "upstream"}
    options["skip_ignored"] = options.get("skip_ignored") is True
    options["accumulate_into"] = options.get("accumulate_into") is not None
    bias_grad = first_loss.bias is not None and first_loss.bias.requires_grad
    call_plan = plan(
        tokens, hidden.shape[-1], num_columns, matmul_dtype, loss=first_loss.loss, metrics=patch.metrics,
        softcap=tail.softcap, hidden_grad=hidden.requires_grad, weight_grad=first_loss.weight.requires_grad,
        hidden_dtype=hidden.dtype, weight_dtype=first_loss.weight.dtype, bias=bias_grad,
        reduction=first_loss.reduction, device=device, **options,
    )  # fmt: skip
    return replace(explanation, plan=call_plan, extra_bytes=call_plan.extra_bytes)


def rehearse(
    model: Any, patch: ModelPatch, inputs: Mapping[str, Any] | None, autocast_dtype: torch.dtype | None
) -> str:
    """Runs the forward of ``model``, a patched copy on the meta device, with labels. Sets ``patch.rehearsed`` to the
    losses of the last run. Returns "" if that run succeeds, else the text of the first run's error.

    Masks among ``inputs`` are left out. A forward that raises runs again with masks of ones, then without the model's
    layers.
    """
    forward_parameters = inspect.signature(type(model).forward).parameters
    token_ids = torch.zeros(1, REHEARSAL_TOKENS, dtype=torch.int64, device="meta")
    defaults = {
        key: value
        for key, value in (("input_ids", token_ids), ("labels", token_ids), ("use_cache", False))
        if key in forward_parameters
    }
    arguments: dict[str, Any] = {**defaults} if inputs is None else {**inputs}
    arguments = {key: value.to("meta") if isinstance(value, Tensor) else value for key, value in arguments.items()}
    arguments = {key: value for key, value in arguments.items() if key not in MASK_NAMES}
    # without a mask, transformers reads numbers to make a causal one, or warns that one is missing
    label_shapes = (value.shape for key, value in arguments.items() if key in LABEL_NAMES)
    batch_size, num_ids = next(label_shapes, (1, REHEARSAL_TOKENS))[:2]
    mask_shapes = (batch_size, 1, num_ids, num_ids), (batch_size, num_ids, num_ids), (batch_size, num_ids)
    mask_names = [key for key in MASK_NAMES if key in forward_parameters]
    masks_of_shapes = [{key: torch.ones(shape, device="meta") for key in mask_names} for shape in mask_shapes]
    error_texts = []
    for has_layers, masks in itertools.product((True, False), ({}, *masks_of_shapes)):
        for module in [] if has_layers else list(model.modules()):
            for key, child in list(module.named_children()):  # modules that route tokens to experts read numbers
                if isinstance(child, nn.ModuleList) and all(any(layer.children()) for layer in child):
                    setattr(module, key, nn.ModuleList())
        patch.rehearsed = []
        try:
            with meta_context(autocast_dtype):
                model.train()(**(masks | arguments))
            return ""
        except Exception as error:
            error_texts.append(in_a_line(error))
            if patch.rehearsed:
                break
    return error_texts[0]


@contextlib.contextmanager
def meta_context(autocast_dtype: torch.dtype | None) -> Iterator[None]:
    """A context for a forward on the meta device, under autocast to ``autocast_dtype`` (None: without autocast). A
    model's ``torch.autocast("meta")``, which PyTorch does not know, has no effect inside of the context."""
    torch_autocast: Any = torch.autocast

    def autocast_except_meta(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext() if device_type == "meta" else torch_autocast(device_type, *args, **kwargs)

    torch.autocast = autocast_except_meta  # type: ignore[assignment, misc]
    try:
        with (
            torch.enable_grad(),
            torch.device("meta"),
            torch_autocast("cpu", dtype=autocast_dtype, enabled=autocast_dtype is not None),
        ):
            yield
    finally:
        torch.autocast = torch_autocast  # type: ignore[misc]


def hollow_copy_of(model: nn.Module) -> nn.Module:
    """A copy of a model on the meta device, without hooks. ValueError if the model cannot be copied."""
    copies_by_id: dict[int, Any] = {}
    try:
        for module in model.modules():
            for key, value in (*vars(module).items(), *module._parameters.items(), *module._buffers.items()):
                if isinstance(value, Tensor):  # of its class: that of a head's weight decides how the loss is made
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
