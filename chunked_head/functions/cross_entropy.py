"""Cross-entropy of a linear head or of logits, and the modules ``ChunkedHead`` and ``CrossEntropyLoss``."""

import inspect
from collections.abc import Hashable, Sequence
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

    in memory that does not grow with ``tokens x vocab``. With further options, l is the loss of a token, and

        x = softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap)        # each option only if given
        l = cross_entropy(x, target, class_weights, label_smoothing) + z_loss * x.logsumexp(-1) ** 2
        loss = sum(token_weights * l over tokens that count) / D

    A token counts if its target is not ``ignore_index`` and ``mask``, if given, is True. Inputs of a token that
    does not count change nothing, even if they are nan.

    Args:
        hidden: hidden states [..., hidden], any leading dimensions; float32, bfloat16, float16, on the CPU float64.
        weight: [vocab, hidden], of the dtype of ``hidden``. Under ``torch.autocast`` both may have any dtype: matmuls
            run in autocast's dtype, and each gradient has its input's dtype.
        target: token ids [...] int64, of the leading shape of ``hidden``. An id outside ``[0, vocab)`` that is not
            ``ignore_index`` raises on the CPU. On other devices the whole call's loss and gradients become nan, since
            an error would make the host wait for the device. Nothing is read or written out of bounds.
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
        upstream: the upstream gradient that the call expects ``backward`` to start with, such as a loss scale: a number
            other than 0, or a 0-d tensor. Gradients are multiplied by ``upstream`` before they are rounded. If backward
            starts with another number, gradients are correct up to this rounding.
        parallel: a ``TokenParallel``: ranks hold different tokens of one batch. The loss is this rank's share, with the
            D of all ranks' tokens. Summed over ranks, losses are the loss of the whole batch, and gradients of the
            weight are the gradient of this loss; with ``average=True``, averaged over ranks. Or a ``VocabParallel``:
            ranks hold different rows of the head; with ``tokens=``, groups of ranks hold different tokens too.
        options: the keyword arguments above that are not in the signature, and options of ``chunked_head.Execution``,
            which say how the call runs: ``memory_budget``, ``chunk_tokens``, ``accumulate_into`` and others.

    Returns:
        The loss: fp32 (fp64 for fp64), 0-d, or target's shape for ``reduction="none"``.

    Differences from PyTorch: if no token counts, the loss is 0 with zero gradients, rather than nan.
    Gradients of a scalar loss are computed in the forward pass. With ``reduction="none"``, backward
    recomputes logits unless the head is frozen. A second backward over a retained graph recomputes logits too. Double
    backward and ``torch.func`` transforms raise.
    Inside of ``torch.compile`` the call is an operator of the graph (docs/guides/options.md).

    Raises:
        TypeError, ValueError: an argument, which the message names, is wrong; raised before any work. IndexError: a
            target is out of range, on the CPU.
    """
    call: Call[Tensor] = call_of(
        "linear_cross_entropy", hidden, weight, target, options, losses=unweighted_loss(label_smoothing, z_loss),
        reduction=reduction, normalizer=normalizer, upstream=upstream, shares_denominator=True, result=first_output,
    )  # fmt: skip
    if token_weights is not None or mask is not None:
        call.batch = with_fields(None, mask, token_weights)
    return call if class_weights is None else with_class_weights(call, label_smoothing, z_loss, class_weights)


def unweighted_loss(label_smoothing: float, z_loss: float) -> Losses:
    """The cross-entropy without class weights, plus ``z_loss`` times the z-loss. Calls with equal numbers get the same
    object. TypeError or ValueError for wrong numbers."""
    numbers = label_smoothing, z_loss
    loss = LOSS_CACHE.get(numbers) if type(label_smoothing) is type(z_loss) is float else None
    if loss is None:
        check_options({"label_smoothing": label_smoothing, "z_loss": z_loss})
        numbers = float(label_smoothing), float(z_loss)
        loss = LOSS_CACHE.get_or_make(numbers, lambda: cross_entropy_with_z_loss(*numbers))
    return loss


def cross_entropy_with_z_loss(label_smoothing: float, z_loss: float) -> Losses:
    """The cross-entropy plus ``z_loss`` times the z-loss."""
    return losses.cross_entropy(label_smoothing=label_smoothing) + z_loss_term(z_loss)


def z_loss_term(z_loss: float) -> Losses:
    """``z_loss`` times the z-loss; a sum without losses if ``z_loss`` is 0."""
    return z_loss * losses.z_loss() if z_loss else NO_LOSSES


def with_class_weights(
    call: Call[Tensor], label_smoothing: float, z_loss: float, class_weights: Tensor | None
) -> Call[Tensor]:
    """The call with a cross-entropy that has ``class_weights``, or the call unchanged if ``class_weights`` is None."""
    if class_weights is not None:
        loss = losses.cross_entropy(label_smoothing=label_smoothing, class_weights=class_weights)
        call.losses = loss + z_loss_term(z_loss)
    return call


# losses by (label_smoothing, z_loss). Calls share a loss, since a loss caches its keys
LOSS_CACHE: Cache[Hashable, Losses] = Cache(64)


def first_output(outputs: Sequence[Tensor], *_: Any) -> Tensor:
    """The only output of a call that has run: the loss, 0-d, or the losses of tokens."""
    return outputs[0]


def in_graph_cross_entropy(outputs: list[Tensor], arguments: dict[str, Any]) -> Tensor:
    """The result of a cross-entropy inside of ``torch.compile``, from the outputs of its operator in the graph."""
    return in_graph_values(outputs, arguments) if arguments.get("reduction") == "none" else outputs[0]


IN_GRAPH["linear_cross_entropy"] = in_graph_cross_entropy


class ChunkedHead(nn.Module):
    """A language model's head: ``forward`` returns the loss, ``logits`` returns the logits.

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
        self.set_parameters(linear, options)

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> "ChunkedHead":
        """A head that has the parameters of ``linear`` themselves, not copies, so that tied weights stay tied."""
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"from_linear takes an nn.Linear, got {type(linear).__name__}")
        head = cls.__new__(cls)
        nn.Module.__init__(head)
        head.set_parameters(linear, options)
        return head

    def set_parameters(self, linear: nn.Linear, options: dict[str, Any]) -> None:
        """Takes over the parameters of ``linear``; checks and stores the options. TypeError or ValueError for wrong
        options."""
        parameters = inspect.signature(linear_cross_entropy).parameters.values()
        option_names = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - {"bias"}
        unknown_names = options.keys() - option_names
        if unknown_names:
            unknown_name, option_listing = sorted(unknown_names)[0], ", ".join(sorted(option_names))
            suggestion = nearest(unknown_name, option_names)
            raise TypeError(f"unknown option {unknown_name!r}; options are {option_listing}{suggestion}")
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
        """The loss of ``hidden`` [..., hidden] against ``target`` [...]; ``options`` override options of the module."""
        return linear_cross_entropy(hidden, self.weight, target, bias=self.bias, **{**self.options, **options})

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab] for inference, in the dtype of ``hidden``, with ``logit_scale`` and ``softcap``."""
        logits = nn.functional.linear(hidden, self.weight, self.bias)
        logit_scale, softcap = self.options.get("logit_scale", 1.0), self.options.get("softcap")
        if logit_scale != 1.0:
            logits = logits * logit_scale
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def extra_repr(self) -> str:
        shape_text = f"hidden_size={self.hidden_size}, vocab_size={self.vocab_size}, bias={self.bias is not None}"
        return ", ".join([shape_text, *(f"{key}={value!r}" for key, value in self.options.items())])


class CrossEntropyLoss(OptionsModule):
    """``torch.nn.CrossEntropyLoss`` for targets that are class ids: two passes over the logits, and no copy of them.

    ``forward(input, target)`` takes ``input`` [..., C] with ``target`` [...] int64, with any leading dimensions or
    none. It also takes PyTorch's shapes [N, C, d1, ...] and [N, d1, ...]; an input of such a shape is copied so that
    classes are last, unless a view of the input has this layout. Shapes that could be of either kind (all dimensions
    but the first are equal) raise ValueError. With ``VocabParallel`` classes must be last.

    Args:
        weight: [C] class weights, stored as a buffer; [vocab_size] if some columns are padding or on other ranks.
        ignore_index, reduction, label_smoothing: as in PyTorch. ``size_average`` and ``reduce``, which PyTorch has
            deprecated, raise.
        z_loss: coefficient of ``lse ** 2``, with the denominator of the cross-entropy.
        softcap, logit_scale, inplace, vocab_size, backend: as in ``logits_loss``.
        parallel: as in ``logits_loss``. With ``reduction="none"``, ``TokenParallel`` has no effect, and its
            ``average=True`` raises. A copy of the module shares the process group, which cannot be pickled: save the
            arguments of the module instead.

    Differences from PyTorch: the loss is fp32 for 16-bit input. If no token counts, it is 0 with zero gradients, not
    nan. Values in rows that do not count, nan too, change nothing. A target out of range raises IndexError on the CPU,
    and makes the loss nan on other devices.
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
    """The call of a cross-entropy of logits [..., C]. The arguments are those of ``CrossEntropyLoss``."""
    call = logits_call_of(
        "CrossEntropyLoss", logits, target, options, inplace, reduction=reduction, result=first_output,
        losses=unweighted_loss(label_smoothing, z_loss), shares_denominator=True,
    )  # fmt: skip
    return with_class_weights(call, label_smoothing, z_loss, class_weights)


IN_GRAPH["logits_cross_entropy"] = in_graph_cross_entropy


def classes_last(logits: Tensor, target: Tensor, is_split: bool) -> Tensor:
    """Logits [..., C]: logits of PyTorch's shape [N, C, d1, ...] as a view, logits of any other shape unchanged.
    ValueError for shapes that could be of either kind. ValueError for PyTorch's shape if ``is_split``: ranks hold
    different classes."""
    for argument, tensor in (("input", logits), ("target", target)):
        checks.check_tensor(argument, tensor, optional=False)
    checks.check_ids("target", target)
    logits_shape, target_shape = tuple(logits.shape), tuple(target.shape)
    if len(logits_shape) < 3 or target_shape != logits_shape[:1] + logits_shape[2:]:
        return logits
    if is_split or target_shape == logits_shape[:-1]:
        raise ValueError(
            f"input {logits_shape} with target {target_shape} may have its classes last or, as in PyTorch, second; "
            "flatten both: input.flatten(0, -2) or input.movedim(1, -1).flatten(0, -2), with target.flatten()"
        )
    return logits.movedim(1, -1)
