"""What ``patch_model`` would do to a model, found out on a copy of it that has shapes and no numbers."""

import contextlib
import copy
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...api.plan import plan
from ...program import checks
from ...program.memory import MiB
from ...program.plans import Plan, facts, name
from .agreement import Agreement
from .find_head import NotUnderstood, find_heads
from .hung_forward import OLD_FORWARD, hides
from .lazy.by_chunks import COPIES_OF_LOGITS, rows_at_once
from .lazy.lazy_head import sizes_of
from .lazy.tail import Rehearsed
from .patch import LABELS, REPORT, patch_model, the_model, unpatch_model
from .watched import module_of, name_of

MASKS = ("attention_mask", "decoder_attention_mask")
LENGTH = 16  # tokens of the forward that shows where the loss is made: of any other length it is the same


@dataclass(frozen=True)
class Explanation:
    """What ``patch_model`` would do; ``print`` shows it. Fields that do not apply are None or empty.

    model: the model's class.
    patched: whether it would be, its head being understood. ``reason``: why not, the error that ``patch_model`` raises,
        or what is not known of a patched one.
    head, vocab, hidden, heads, tied: the head's name in the model, its rows and columns, how many such heads there
        are, whether it shares its weight with the input embeddings.
    tail: what the model does between head and loss, in words. ``logit_scale``, ``softcap``: its numbers.
    losses: where each loss is made that a forward with labels makes, as file:line of the model's code.
    whole: whether the library reads the head's weight; otherwise chunks go through the head's own forward.
    warnings: what the patched model would warn of, logits that are computed after all among them.
    trainer: what matters to who trains the model, a sentence each.
    tokens, plan: of the call that makes the first loss, for so many tokens on one device.
    full_logits: the tensors [tokens, vocab] that the unpatched model has at a time and the patched one has not: each
        one's name and bytes. What ``F.cross_entropy`` keeps for itself (log-probabilities) is not among them.
    extra_bytes: what the library's call needs at its peak beside the gradients of hidden states and weight and, under
        autocast, the cast weight, which the unpatched model makes too.
    """

    model: str
    patched: bool = False
    reason: str = ""
    head: str = ""
    vocab: int = 0
    hidden: int = 0
    heads: int = 0
    tied: bool = False
    tail: str = ""
    logit_scale: float | None = None
    softcap: float | None = None
    losses: tuple[str, ...] = ()
    whole: bool = True
    warnings: tuple[str, ...] = ()
    trainer: tuple[str, ...] = ()
    tokens: int = 0
    plan: Plan | None = None
    full_logits: tuple[tuple[str, int], ...] = ()
    extra_bytes: int | None = None

    @property
    def full_bytes(self) -> int:
        """Of ``full_logits`` together."""
        return sum(size for _, size in self.full_logits)

    @property
    def saved_bytes(self) -> int | None:
        """``full_bytes`` without ``extra_bytes``; None where there is no plan."""
        return None if self.extra_bytes is None else self.full_bytes - self.extra_bytes

    def facts(self) -> list[tuple[str, str]]:
        """The report, line by line: what a line is about, and what it says."""
        patched = "patches it" + (": its loss goes through the library" if self.losses else "")
        rows = [("model", self.model), ("patch_model", patched if self.patched else "leaves it as it is")]
        if self.reason:
            rows.append(("but" if self.patched else "because", self.reason))
        if self.head:
            others = f", and {self.heads - 1} more of that size" if self.heads > 1 else ""
            tied = ", tied to the input embeddings" if self.tied else ""
            rows.append(("head", f"{self.head} [{self.vocab}, {self.hidden}]{tied}{others}"))
        if self.tail:
            rows.append(("between head and loss", self.tail))
        for place in self.losses:
            rows.append(("loss made at", place))
        if self.losses:
            weight = "read by the library" if self.whole else "left alone: chunks go through the head's own forward"
            rows.append(("head's weight", weight))
        rows += [("warning", text) for text in self.warnings]
        rows += [("trainer", text) for text in self.trainer]
        if self.plan is not None:
            rows += [row for row in facts(self.plan) if row[0] in ("schedule", "chunks", "logits buffer")]
        if self.extra_bytes is not None and self.saved_bytes is not None:
            parts = ", ".join(f"{label} {mebi(size)}" for label, size in self.full_logits)
            rows.append((f"unpatched, {self.tokens} tokens", f"{mebi(self.full_bytes)}: {parts}"))
            rows.append((f"patched, {self.tokens} tokens", f"{mebi(self.extra_bytes)} beside the gradients"))
            rows.append(("saved", mebi(self.saved_bytes)))
        return rows

    def __str__(self) -> str:
        return "\n".join(f"{key:<28}{text}" for key, text in self.facts())


def explain_model(
    model: nn.Module,
    tokens: int = 8192,
    *,
    inputs: Mapping[str, Any] | None = None,
    autocast: torch.dtype | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> Explanation:
    """What ``patch_model(model, **options)`` would do and why; the model stays as it is, and no memory is taken.

        print(explain_model(model, tokens=16384))
        with torch.device("meta"):
            print(explain_model(LlamaForCausalLM(config), device="sm_90"))

    A copy of the model on the meta device is patched, and its forward runs once with labels there: everything here is
    what ``patch_model`` itself decides. Hooks are not run.

    Args:
        model: as in ``patch_model``, before FSDP shards it. Where its weights lie does not matter.
        tokens: for which the memory is planned.
        inputs: what its forward takes, labels included, of any small size. None: ``input_ids`` and ``labels``.
        autocast: the dtype that the model trains in under ``torch.autocast``.
        device: where it will train, for the plan; as in ``plan``.
        options: of ``patch_model``.

    Raises:
        TypeError, ValueError: ``model`` is none, or a copy cannot be made of it; ``tokens``, ``autocast`` or ``device``
            is wrong. What ``patch_model`` raises is text in the result.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model of explain_model must be a torch.nn.Module, got {type(model).__name__}")
    checks.check_int("tokens", tokens, 1)
    if autocast is not None:
        checks.check_dtype("autocast", autocast)
    plan(tokens, 8, 8, torch.float32, device=device)  # raises what is wrong with the device
    found = Explanation(type(model).__name__, tokens=tokens)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            inner = the_model(model, "patch_model")
            found = replace(found, model=type(inner).__name__)
            rehearsal = hollow(inner)
            patch_model(rehearsal, **options)
        except (TypeError, ValueError) as error:
            if isinstance(error, NotCopied):
                raise
            return replace(found, reason=f"it raises {in_a_line(error)}")
        agreed: Any = getattr(rehearsal, REPORT)
        try:
            if agreed.head is None:
                return replace(found, reason=agreed.mechanism.removeprefix("none: "))
            found = with_head(found, agreed, labels_of(rehearsal))
            calls, failure = rehearse(rehearsal, agreed, inputs, autocast)
        finally:
            unpatch_model(rehearsal)
    texts = dict.fromkeys(str(one.message).removeprefix("chunked_head: ") for one in said if ours(one))
    found = replace(found, patched=True, warnings=tuple(texts), losses=tuple(call.made_at for call in calls))
    if calls:
        return with_memory(found, agreed, calls[0], device)
    if failure is not None:
        return replace(found, reason=f"a forward with labels, on tensors without numbers, raises {failure}")
    return replace(found, reason="its loss does not go through its head")


class NotCopied(ValueError):
    """Why there is no copy of a model."""


def with_head(found: Explanation, agreed: Agreement, labels: str) -> Explanation:
    rows, columns = sizes_of(agreed.head) or (0, 0)
    outside = 'goes through the library with when="training" alone'
    if agreed.asks:
        outside = f"is refused, since {agreed.asks} has no part in it"
    elif agreed.when == "training":
        outside = "goes through the library too, but not under FSDP"
    seams = (
        f"transformers.Trainer: the forward is given its {labels} and makes the loss"
        if labels
        else "its forward takes no labels and makes no loss",
        f"a loss made outside of the forward (label_smoothing_factor, compute_loss_func, a loop of your own) {outside}",
        "TRL's trainers compute their losses past a patched model; patch_trl() serves them",
    )
    return replace(
        found, head=agreed.name, vocab=rows, hidden=columns, heads=len(agreed.heads), tied=agreed.tied,
        trainer=seams,
    )  # fmt: skip


def with_memory(
    found: Explanation, agreed: Agreement, call: Rehearsed, device: torch.device | str | None
) -> Explanation:
    """What the first loss's call takes, and what it spares."""
    tail, hidden, tokens = call.tail, call.hidden, found.tokens
    columns = found.vocab if tail.vocab is None else tail.vocab
    dtype = call.autocast or hidden.dtype
    full = [(f"logits in {name(dtype)}", tokens * found.vocab * dtype.itemsize)]
    if call.logits != dtype:
        full.append((f"their copy in {name(call.logits)}", tokens * columns * call.logits.itemsize))
    full.append((f"their gradient in {name(call.logits)}", tokens * columns * call.logits.itemsize))
    found = replace(
        found, tail=str(tail), logit_scale=tail.logit_scale, softcap=tail.softcap, whole=call.weight is not None,
        full_logits=tuple(full),
    )  # fmt: skip
    if call.weight is None:
        rows = min(tokens, rows_at_once(found.vocab))
        return replace(found, extra_bytes=rows * found.vocab * torch.float32.itemsize * COPIES_OF_LOGITS)
    options = {key: value for key, value in agreed.options.items() if key != "upstream"}
    options["skip_ignored"] = options.get("skip_ignored") is True
    options["accumulate_into"] = options.get("accumulate_into") is not None
    try:
        planned = plan(
            tokens, hidden.shape[-1], columns, dtype, loss=call.loss, metrics=agreed.measured, softcap=tail.softcap,
            hidden_grad=hidden.requires_grad, weight_grad=call.weight.requires_grad, hidden_dtype=hidden.dtype,
            weight_dtype=call.weight.dtype, bias=call.bias is not None and call.bias.requires_grad,
            reduction=call.reduction, device=device, **options,
        )  # fmt: skip
    except ValueError as error:
        return replace(found, reason=f"a call of {tokens} tokens: {in_a_line(error)}")
    return replace(found, plan=planned, extra_bytes=planned.extra_bytes)


def rehearse(
    model: nn.Module, agreed: Agreement, inputs: Mapping[str, Any] | None, autocast: torch.dtype | None
) -> tuple[list[Rehearsed], str | None]:
    """The losses of a forward with labels, of which no mask is part; and what it raised instead, in words."""
    takes = inspect.signature(type(model).forward).parameters
    if inputs is None:
        inputs = {key: torch.zeros(1, LENGTH, dtype=torch.int64) for key in ("input_ids", *LABELS[:1]) if key in takes}
        inputs |= {"use_cache": False} if "use_cache" in takes else {}
    given = {key: value.to("meta") if isinstance(value, Tensor) else value for key, value in inputs.items()}
    given = {key: value for key, value in given.items() if key not in MASKS}
    # transformers looks at numbers to make a causal mask, or warns of a missing one, unless it is given one
    batch, length = next((value.shape for key, value in given.items() if key in LABELS), (1, LENGTH))[:2]
    shapes = (batch, 1, length, length), (batch, length, length), (batch, length)
    masks = [{key: torch.ones(shape, device="meta") for key in MASKS if key in takes} for shape in shapes]
    failure, calls = None, list[Rehearsed]()
    for layers, more in itertools.product((True, False), ({}, *masks)):
        if not layers:
            without_layers(model)  # what routes tokens to experts looks at numbers too
        agreed.rehearsed = calls = []
        try:
            with torch.enable_grad(), torch.device("meta"), autocast_to(autocast), no_autocast_of_meta():
                model.train()(**(more | given))
            return calls, None
        except Exception as error:
            said = in_a_line(error)
            failure = failure or said
            if calls:
                break
    return calls, failure


def autocast_to(dtype: torch.dtype | None) -> Any:
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


@contextlib.contextmanager
def no_autocast_of_meta() -> Iterator[None]:
    """Models switch autocast off for their tensors' device, which it does not know: for that one it does nothing."""
    plain: Any = torch.autocast

    def autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext() if device_type == "meta" else plain(device_type, *args, **kwargs)

    torch.autocast = autocast  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        torch.autocast = plain  # type: ignore[misc]


def hollow(model: nn.Module) -> nn.Module:
    """A copy on the meta device, without hooks but for the names of those on its head."""
    try:
        heads = find_heads(model)
    except NotUnderstood:
        heads = []
    of_heads = {id(tensor) for head in heads for tensor in head.parameters()}
    known: dict[int, Any] = {}
    for module in model.modules():
        for value in tensors_of(module):
            known[id(value)] = without_numbers(value, id(value) in of_heads)
        for key, value in vars(module).items():
            if isinstance(value, dict) and "_hooks" in key:
                known[id(value)] = type(value)()
    try:
        made = copy.deepcopy(model, known)
    except Exception as error:
        raise NotCopied(
            f"explain_model needs a copy of the model, and {type(model).__name__} gives none ({in_a_line(error)}); "
            "explain it before it is wrapped or sharded"
        ) from error
    for module in made.modules():
        if "forward" in vars(module) and not hides(module):
            for key in ("forward", OLD_FORWARD):
                vars(module).pop(key, None)
    for head in heads:
        for key in ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks"):
            stand_ins = {number: stand_in(hook) for number, hook in getattr(head, key).items()}
            getattr(known[id(head)], key).update(stand_ins)
    return made


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
        if isinstance(value, Tensor):
            yield value


def without_numbers(value: Tensor, in_head: bool) -> Tensor:
    """A tensor's shape and dtype; in a head its class too, which decides how its loss is made."""
    made = torch.empty(value.shape, dtype=value.dtype, device="meta")
    if in_head and type(value) not in (Tensor, nn.Parameter):
        return made.as_subclass(type(value)).requires_grad_(value.requires_grad)
    return nn.Parameter(made, value.requires_grad) if isinstance(value, nn.Parameter) else made


def stand_in(hook: Any) -> Callable[..., None]:
    """A hook that does nothing and goes by another's name."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    nothing.__module__, nothing.__qualname__ = module_of(hook), name_of(hook)
    return nothing


def without_layers(model: nn.Module) -> None:
    """Takes the layers out: what stands before the head says nothing of it."""
    for module in list(model.modules()):
        for key, child in list(module.named_children()):
            if isinstance(child, nn.ModuleList) and all(any(layer.children()) for layer in child):
                setattr(module, key, nn.ModuleList())


def labels_of(model: nn.Module) -> str:
    takes = inspect.signature(type(model).forward).parameters
    return next((key for key in LABELS if key in takes), "")


def ours(said: warnings.WarningMessage) -> bool:
    return str(said.message).startswith("chunked_head")


def in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def mebi(size: int) -> str:
    return f"{size / MiB:,.1f} MiB"
