"""Cross-entropy of a linear head or of logits, and the modules ``ChunkedHead`` and ``CrossEntropyLoss``."""

import inspect
from collections.abc import Hashable
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from .. import losses
from ..call.options import (
    NO_LOSSES,
    Call,
    HeadOptions,
    LogitsOptions,
    OptionsModule,
    call_of,
    check_options,
    logits_call_of,
)
from ..call.run import Outcome
from ..compile.operation import IN_GRAPH, in_graph_values, operation
from ..core import checks
from ..core.checks import flag, nearest
from ..core.memory import Cache
from ..losses.base import Losses
from ..parallel.groups import TokenParallel, VocabParallel
from .fields import with_fields


@operation
def linear_cross_entropy(
    hidden: Tensor,  # [..., hidden]
    weight: Tensor,  # [vocab, hidden]
    target: Tensor,  # [...] int64
    *,
    class_weights: Tensor | None = None,  # [vocab]
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    token_weights: Tensor | None = None,  # [...], target's shape
    mask: Tensor | None = None,  # [...] bool
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    upstream: float | Tensor | None = None,
    **options: Unpack[HeadOptions],
) -> Call[Tensor]:
    """Cross-entropy of a linear head, computed without holding its logits. Value and gradients are those of

        logits = F.linear(hidden, weight, bias).float()
        loss = F.cross_entropy(logits.flatten(0, -2), target.flatten(), class_weights, ignore_index=ignore_index,
                               reduction=reduction, label_smoothing=label_smoothing)

    in memory that does not grow with ``tokens x vocab``. With further options the loss of a token is l, in

        x = softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap)        # each option only if given
        l = cross_entropy(x, target, class_weights, label_smoothing) + z_loss * x.logsumexp(-1) ** 2
        loss = sum(token_weights * l over tokens that count) / D

    A token counts if its target is not ``ignore_index`` and ``mask``, if given, is True. Values of tokens that do not
    count, nan too, change nothing.

    Args:
        hidden: hidden states [..., hidden], any leading dimensions; float32, bfloat16, float16, on the CPU float64.
        weight: [vocab, hidden], of the dtype of ``hidden``. Under ``torch.autocast`` both may have any dtype: matmuls
            run in autocast's dtype, and each gradient has its input's dtype.
        target: token ids [...] int64, of the leading shape of ``hidden``. An id outside ``[0, vocab)`` that is not
            ``ignore_index`` raises on the CPU; elsewhere the whole call's loss and gradients become nan, since raising
            would make the host wait for the device. Nothing is read or written out of bounds.
        bias: [vocab], of the dtype of ``weight``.
        class_weights: [vocab], as in ``F.cross_entropy``; they multiply the cross-entropy, not the z-loss.
        ignore_index: target of tokens that do not count.
        reduction: ``"mean"``, ``"sum"`` or ``"none"`` (fp32 values of target's shape, 0 where a token does not count).
        normalizer: D for ``reduction="mean"``: a number or a 0-d tensor on the device, such as the token count of all
            micro-batches and ranks. None: the number of tokens that count (with class weights, the sum of their
            targets' weights). 0 gives loss 0 and zero gradients.
        token_weights: [...] of target's shape; factors of the tokens' losses, no part of D.
        mask: [...] bool of target's shape: tokens that count, besides ``ignore_index``.
        label_smoothing: in [0, 1], uniform over the vocabulary as in ``F.cross_entropy``.
        z_loss: coefficient of ``lse ** 2`` (PaLM, Chowdhery et al. 2022), at least 0.
        softcap: cap of the logits, as in Gemma 2; positive or None.
        logit_scale: factor of the logits before the cap.
        shift: pairs the hidden state at position t with the target (mask, token weight) at t + shift along the last
            leading dimension, without a copy of the hidden states. Values per token are returned at the target's
            position. Sequences of at most ``shift`` tokens have loss 0 and zero gradients.
        upstream: the gradient of the loss that ``backward`` will start with, if it is known (a loss scale). Gradients
            are multiplied by it before they are rounded. With any other upstream gradient they are correct as well,
            up to that rounding. A number other than 0, or a 0-d tensor.
        parallel: a ``TokenParallel``: ranks hold different tokens of one batch. The loss is this rank's share, with the
            D of all ranks' tokens: an ``all_reduce(SUM)`` of the losses (and of the weight's gradients) gives the whole
            batch's; with ``average=True`` the mean does. Or a ``VocabParallel``: ranks hold different rows of the head;
            with its ``tokens=``, groups of them hold different tokens as well.
        The rest: the keywords of ``chunked_head.Execution``, which say how the call runs: ``memory_budget``,
            ``chunk_tokens``, ``accumulate_into`` and others.

    Returns:
        The loss: fp32 (fp64 for fp64), 0-d, or target's shape for ``reduction="none"``.

    Differences from PyTorch: no tokens, or none that count, give loss 0 with zero gradients rather than nan.
    Gradients of a scalar loss are computed in the forward pass; ``reduction="none"`` recomputes logits in backward
    unless the head is frozen, as does every backward after the first over a retained graph. Double backward and
    ``torch.func`` transforms raise.
    Inside of ``torch.compile`` the call is an operator of the graph (docs/guides/options.md).

    Raises:
        TypeError, ValueError: before any work, naming the argument; IndexError for a target out of range on the CPU.
    """
    call: Call[Tensor] = call_of(
        "linear_cross_entropy", hidden, weight, target, options, losses=plain_loss(label_smoothing, z_loss),
        reduction=reduction, normalizer=normalizer, upstream=upstream, shares_denominator=True, result=first_output,
    )  # fmt: skip
    if token_weights is not None or mask is not None:
        call.batch = with_fields(None, mask, token_weights)
    return call if class_weights is None else with_class_weights(call, label_smoothing, z_loss, class_weights)


def plain_loss(label_smoothing: float, z_loss: float) -> Losses:
    """The cross-entropy without class weights, plus ``z_loss`` times the z-loss. TypeError or ValueError for wrong
    numbers."""
    coefficients = label_smoothing, z_loss
    loss = LOSSES.get(coefficients) if type(label_smoothing) is type(z_loss) is float else None
    if loss is None:
        check_options({"label_smoothing": label_smoothing, "z_loss": z_loss})
        coefficients = float(label_smoothing), float(z_loss)
        smoothing, z = coefficients
        loss = LOSSES.get_or_make(coefficients, lambda: losses.cross_entropy(label_smoothing=smoothing) + z_term(z))
    return loss


def z_term(z_loss: float) -> Losses:
    return z_loss * losses.z_loss() if z_loss else NO_LOSSES


def with_class_weights(
    call: Call[Tensor], label_smoothing: float, z_loss: float, class_weights: Tensor | None
) -> Call[Tensor]:
    """The call, on hidden states or logits, with the loss for these class weights."""
    if class_weights is not None:
        loss = losses.cross_entropy(label_smoothing=label_smoothing, class_weights=class_weights)
        call.losses = loss + z_term(z_loss)
    return call


# losses by label_smoothing and z_loss: calls with equal numbers share the loss object, which caches its keys
LOSSES: Cache[Hashable, Losses] = Cache(64)


def first_output(outcome: Outcome) -> Tensor:
    """The only output of a call that ran: the loss, or its values per token."""
    return outcome.outputs[0]


def in_graph_cross_entropy(outputs: list[Tensor], arguments: dict[str, Any]) -> Tensor:
    return in_graph_values(outputs, arguments) if arguments.get("reduction") == "none" else outputs[0]


IN_GRAPH["linear_cross_entropy"] = in_graph_cross_entropy


class ChunkedHead(nn.Module):
    """A language model's head: ``forward`` returns the loss, ``logits`` the logits.

    Parameters and ``state_dict`` are those of ``nn.Linear(hidden_size, vocab_size, bias)``. Options are those of
    ``linear_cross_entropy``.

        head = ChunkedHead(4096, 128256)
        loss = head(hidden, target)            # F.cross_entropy(head.logits(hidden).flatten(0, -2), target.flatten())
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        super().__init__()
        for argument, size in (("hidden_size", hidden_size), ("vocab_size", vocab_size)):
            checks.check_int(argument, size, 1)
        flag("bias", bias)
        linear = nn.Linear(hidden_size, vocab_size, bias=bias, device=device, dtype=dtype)
        self.adopt(linear, options)

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> "ChunkedHead":
        """A head with the same parameter objects as ``linear``, so that tied weights stay tied."""
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"from_linear takes an nn.Linear, got {type(linear).__name__}")
        head = cls.__new__(cls)
        nn.Module.__init__(head)
        head.adopt(linear, options)
        return head

    def adopt(self, linear: nn.Linear, options: dict[str, Any]) -> None:
        """Sets the parameters to those of ``linear``, and the options, after a check of them."""
        parameters = inspect.signature(linear_cross_entropy).parameters.values()
        names = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - {"bias"}
        unknown = options.keys() - names
        if unknown:
            first = sorted(unknown)[0]
            raise TypeError(f"unknown option {first!r}; options are {', '.join(sorted(names))}{nearest(first, names)}")
        check_options(options)
        self.weight, self.bias = linear.weight, linear.bias
        self.options = options

    @property
    def hidden_size(self) -> int:
        return self.weight.shape[1]

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]

    def forward(self, hidden: Tensor, target: Tensor, **options: Any) -> Tensor:
        """The loss of ``hidden`` [..., hidden] against ``target`` [...]; ``options`` override the module's."""
        return linear_cross_entropy(hidden, self.weight, target, bias=self.bias, **{**self.options, **options})

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab] for inference, in the dtype of ``hidden``, with ``logit_scale`` and ``softcap``."""
        x = nn.functional.linear(hidden, self.weight, self.bias)
        scale, softcap = self.options.get("logit_scale", 1.0), self.options.get("softcap")
        if scale != 1.0:
            x = x * scale
        return x if softcap is None else softcap * torch.tanh(x / softcap)

    def extra_repr(self) -> str:
        shape = f"hidden_size={self.hidden_size}, vocab_size={self.vocab_size}, bias={self.bias is not None}"
        return ", ".join([shape, *(f"{key}={value!r}" for key, value in self.options.items())])


class CrossEntropyLoss(OptionsModule):
    """``torch.nn.CrossEntropyLoss`` for targets that are class ids: two passes over the logits, and no copy of them.

    ``forward(input, target)``: either ``input`` [..., C] with ``target`` [...] int64, any leading dimensions or none;
    or PyTorch's [N, C, d1, ...] with [N, d1, ...], which is copied with classes last unless a view has that layout.
    ValueError for shapes that could be either (all dimensions but the first are equal). With ``VocabParallel`` classes
    must be last.

    Args:
        weight: [C] class weights, kept as a buffer; [vocab_size] if columns are padding or other ranks have some.
        ignore_index, reduction, label_smoothing: as in PyTorch. ``size_average`` and ``reduce``, which PyTorch has
            deprecated, are refused.
        z_loss: coefficient of ``lse ** 2``, with the denominator of the cross-entropy.
        softcap, logit_scale, inplace, vocab_size, backend: as in ``logits_loss``.
        parallel: as in ``logits_loss``. With ``reduction="none"`` ``TokenParallel`` has no effect, and ``average=True``
            is refused. A copy of the module shares the process group, which cannot be pickled: save the arguments.

    Differences from PyTorch: the loss is fp32 for 16-bit input; without a token that counts it is 0 with zero
    gradients, not nan; values in rows that do not count, nan too, change nothing; a target out of range raises an
    IndexError on the CPU and makes the loss nan elsewhere.
    """

    weight: Tensor | None
    parallel: VocabParallel | TokenParallel | None

    def __init__(
        self,
        weight: Tensor | None = None,  # [C]
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        inplace: bool = False,
        vocab_size: int | None = None,
        parallel: VocabParallel | TokenParallel | None = None,
        backend: str | None = None,
    ):
        super().__init__()
        for argument, value in (("size_average", size_average), ("reduce", reduce)):
            if value is not None:
                raise ValueError(f"{argument} is deprecated in PyTorch and refused here, got {value!r}; use reduction=")
        options: dict[str, Any] = {
            "ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing, "z_loss": z_loss,
            "softcap": softcap, "logit_scale": logit_scale, "inplace": inplace, "vocab_size": vocab_size,
            "parallel": parallel, "backend": backend,
        }  # fmt: skip
        check_options(options)
        checks.check_tensor("weight", weight, optional=True)
        self.register_buffer("weight", weight)
        self.keep(options)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        input = classes_last(input, target, isinstance(self.parallel, VocabParallel))
        return logits_cross_entropy(input, target, class_weights=self.weight, **self.options())

    def extra_repr(self) -> str:
        return f"weight={None if self.weight is None else tuple(self.weight.shape)}, {super().extra_repr()}"


@operation
def logits_cross_entropy(
    logits: Tensor,  # [..., C]
    target: Tensor,  # [...] int64
    *,
    class_weights: Tensor | None,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    inplace: bool,
    **options: Unpack[LogitsOptions],
) -> Call[Tensor]:
    """The cross-entropy of logits [..., C], as ``CrossEntropyLoss.forward`` calls it."""
    call = logits_call_of(
        "CrossEntropyLoss", logits, target, options, inplace, reduction=reduction, result=first_output,
        losses=plain_loss(label_smoothing, z_loss), shares_denominator=True,
    )  # fmt: skip
    return with_class_weights(call, label_smoothing, z_loss, class_weights)


IN_GRAPH["logits_cross_entropy"] = in_graph_cross_entropy


def classes_last(logits: Tensor, target: Tensor, split: bool) -> Tensor:
    """Logits [..., C]: those of PyTorch's shape [N, C, d1, ...] as a view, any others unchanged. ValueError for shapes
    that could be either, and for PyTorch's shape where ranks ``split`` the classes."""
    for argument, tensor in (("input", logits), ("target", target)):
        checks.check_tensor(argument, tensor, optional=False)
    checks.check_ids("target", target)
    shape, leading = tuple(logits.shape), tuple(target.shape)
    if len(shape) < 3 or leading != shape[:1] + shape[2:]:
        return logits
    if split or leading == shape[:-1]:
        raise ValueError(
            f"input {shape} with target {leading} may have its classes last or, as in PyTorch, second; flatten both: "
            "input.flatten(0, -2) or input.movedim(1, -1).flatten(0, -2), with target.flatten()"
        )
    return logits.movedim(1, -1)
