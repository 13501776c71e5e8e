"""Cross-entropy and row statistics of lazy logits, computed inside of the head's call, so that the head's hooks run.

Row statistics have one number per row. They are ``gather``, ``logsumexp`` and ``mean`` of lazy logits, and ``gather``
and ``sum`` of their ``log_softmax``, which is lazy too. Losses of users call these methods.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ... import losses
from ...core.checks import is_dtensor
from ...functions.logprobs import linear_logprobs
from ...functions.loss import linear_loss, logits_loss
from ...losses.base import Losses
from ...metrics import Metric
from .head_call import HeadCall, change_in_words, patch_in_forward, version
from .virtual import RehearsedLoss, Tail, VirtualLogits, replay, tail_of

CHUNK_BYTES = 256 << 20  # of a chunk's logits and their copies, where a head's own forward computes the logits
NUM_CHUNK_TENSORS = 4  # fp32 tensors that a chunk takes: its logits, their cast, log-probabilities, gradient
LOG_SOFTMAX = "log_softmax"  # name of a step of ``VirtualLogits``
IGNORE_NO_ID = -(1 << 62)  # ignore_index with which every id counts: an id out of range is an error, as in gather


def chunk_rows_of(vocab: int) -> int:
    """The number of rows in a chunk of logits [rows, vocab] that a head's own forward computes."""
    return max(1, CHUNK_BYTES // (vocab * torch.float32.itemsize * NUM_CHUNK_TENSORS))


@dataclass(frozen=True, eq=False)
class LazyLoss:
    """A cross-entropy of lazy logits, or the loss that ``patch_model(loss=)`` puts in place of a cross-entropy."""

    head_call: HeadCall
    tail: Tail
    steps: tuple[tuple[str, Any], ...]  # of ``VirtualLogits``: the operations that ``tail`` sums up
    targets: Tensor  # int64, an id for each row of logits
    ignore_index: int
    reduction: str
    class_weights: Tensor | None  # [vocab], of the cross-entropy
    loss: Losses
    metrics: Sequence[Metric]

    def loss_from_weight(self, module: Any, hidden: Tensor, head_forward: Callable[[Tensor], Tensor]) -> Tensor:
        """Computes the loss of ``hidden`` from the weight of ``module``. If the weight is a DTensor, ``loss_by_chunks``
        computes it, by ``head_forward``. ``LazyHead.run_inside`` calls this method inside of the head's call."""
        if is_dtensor(module._parameters.get("weight")):  # inside of the head's hooks too
            return self.loss_by_chunks(hidden, head_forward)
        options = library_options(self.head_call, self.tail, module)
        if self.head_call.patch.rehearsed is not None:
            return self.rehearse_loss(hidden, options["weight"], options["bias"])
        options |= {"target": self.targets.to(hidden.device), "ignore_index": self.ignore_index}
        output = linear_loss(hidden, loss=self.loss, metrics=self.metrics, reduction=self.reduction, **options)
        self.head_call.patch.add_metrics(output)
        return output.loss

    def rehearse_loss(self, hidden: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Adds the loss to the patch's list ``rehearsed``; returns a loss without numbers, for ``explain_model``.
        ``weight``: None if the loss would call the head's own forward for each chunk."""
        head_call = self.head_call
        cast_dtypes = [argument for name, argument in self.steps if name == "cast"]
        logits_dtype = (
            torch.float32 if head_call.autocast_dtype is not None else (head_call.layout.dtype, *cast_dtypes)[-1]
        )
        loss = RehearsedLoss(
            self.tail, hidden, weight, bias, head_call.autocast_dtype, logits_dtype, self.loss, self.reduction
        )
        head_call.patch.note_rehearsed(loss)
        shape = self.targets.shape if self.reduction == "none" else ()
        return hidden.new_empty(shape, dtype=fp32_or_wider(hidden.dtype), requires_grad=True)

    def loss_by_chunks(self, hidden: Tensor, head_forward: Callable[[Tensor], Tensor]) -> Tensor:
        """Computes the loss in chunks of rows, for a head with adapters, a quantised weight or shards. Backward repeats
        ``head_forward`` for each chunk. ValueError if the loss has a normalizer or reduction of its own."""
        patch = self.head_call.patch
        if any(summand.normalizer is not None or summand.reduction is not None for _, summand in self.loss.terms):
            head_in_words = f"{patch.report.head_name}, a {type(patch.head).__name__}"
            raise ValueError(f"loss= with a normalizer or reduction of its own does not go with {head_in_words}")
        if patch.rehearsed is not None:
            return self.rehearse_loss(hidden, None, None)
        hidden_rows, targets = hidden.reshape(-1, hidden.shape[-1]), self.targets.reshape(-1)
        chunk_rows = chunk_rows_of(self.head_call.layout.num_columns)
        chunks = zip(hidden_rows.split(chunk_rows), targets.split(chunk_rows), strict=True)
        chunk_losses = [checkpoint(self.chunk_loss, head_forward, *chunk, [], use_reentrant=False) for chunk in chunks]
        if self.reduction == "none":
            return torch.cat(chunk_losses).reshape(self.targets.shape)
        loss_sum = torch.stack(chunk_losses).sum()
        return loss_sum if self.reduction == "sum" else loss_sum / mean_denominator(self)

    def chunk_loss(
        self, head_forward: Callable[[Tensor], Tensor], hidden_rows: Tensor, targets: Tensor, first_versions: list[Any]
    ) -> Tensor:
        """The sum of the losses of a chunk's rows; each row's loss [rows] if ``reduction`` is ``"none"``.

        ``first_versions``: an empty list, which the forward pass fills with the operands' versions. Backward calls this
        method again with the list. RuntimeError if an operand has been written to since the forward pass."""
        is_repeated, patch = bool(first_versions), self.head_call.patch
        if not torch.compiler.is_compiling():  # a graph's tensors are values, which nothing writes to
            operand_versions = [
                version(tensor) for tensor in (hidden_rows, targets, self.class_weights) if tensor is not None
            ]
            if is_repeated and (
                first_versions != operand_versions
                or change_in_words(self.head_call.head, self.head_call.parameter_versions)
            ):
                raise RuntimeError(
                    f"{patch.model}'s loss is computed again in backward, and hidden states, targets, class "
                    "weights or the head's parameters have been modified by an inplace operation "
                    "since; call backward before"
                )
            first_versions[:] = operand_versions
        logits = replay(self.head_call.layout.checked(head_forward(hidden_rows)), self.steps)
        reduction = "none" if self.reduction == "none" else "sum"
        options: Any = {"metrics": self.metrics, "ignore_index": self.ignore_index, "reduction": reduction}
        output = logits_loss(logits, targets, self.loss, **options)
        if not is_repeated:
            patch.add_metrics(output)
        return output.loss


def cross_entropy(
    logits: VirtualLogits,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """``F.cross_entropy`` of lazy logits [vocab] or [rows, vocab] for targets that are ids. NotImplemented for other
    shapes, targets and arguments, for a head that is no longer lazy, and if no ``Tail`` describes the logits' steps."""
    tail, head_call = tail_of(logits), logits.head_call
    row_shape = tuple(logits.shape[:-1])
    if size_average is not None or reduce is not None or not isinstance(target, Tensor):
        return NotImplemented
    # PyTorch's classes are the second dimension: the last of one or two
    if len(row_shape) > 1 or tuple(target.shape) != row_shape or target.is_floating_point():
        return NotImplemented
    if tail is None or not head_call.has_lazy_head:
        return NotImplemented
    is_autocast = torch.is_autocast_enabled(head_call.device_type)  # then PyTorch's cross-entropy is in fp32
    targets = target.to(logits.hidden.device, torch.int64)
    smoothing, patch, metrics = float(label_smoothing), head_call.patch, ()
    loss, is_in_forward = losses.cross_entropy(smoothing, weight), patch_in_forward(head_call.head) is patch
    if is_in_forward and patch.loss_argument:  # loss= and metrics= have no part in a loss outside of the forward
        if reduction == "none":
            raise ValueError("loss= and metrics= of patch_model go with a mean or a sum; this model reduces by itself")
        if patch.loss is not None and (weight is not None or smoothing):
            raise ValueError(
                f"{patch.model}'s own cross-entropy has class weights or label smoothing, which loss= would drop; "
                "give them to losses.cross_entropy in loss="
            )
        loss, metrics = patch.loss or loss, patch.metrics
    lazy_loss = LazyLoss(head_call, tail, logits.steps, targets, ignore_index, reduction, weight, loss, metrics)
    if head_call.head.reads_weight:
        with head_call.loss_state():
            loss_value = head_call.head.run_inside(lazy_loss.loss_from_weight, logits.hidden, head_call.has_run_hooks)
    else:
        with head_call.loss_state():
            loss_value = lazy_loss.loss_by_chunks(logits.hidden, head_call.compute)
    patch.count_loss(tail, is_in_forward)
    return loss_value.to(fp32_or_wider(logits.dtype) if is_autocast else logits.dtype)


def library_options(head_call: HeadCall, tail: Tail, module: Any) -> dict[str, Any]:
    """Keyword arguments for this library's functions: weight and bias of ``module`` after the tail's crop, softcap and
    scale of the tail, the options of ``patch_model``. RuntimeError if the weight is sharded."""
    weight = module.weight  # read once: each access computes a parametrised weight
    if is_dtensor(weight):
        raise RuntimeError("the head's weight is sharded where its logits are read; use logits.materialise()")
    if weight.shape[0] != head_call.layout.num_columns:
        raise RuntimeError(
            f"the head's weight has {weight.shape[0]} rows where {head_call.layout.num_columns} were expected; if a "
            "sharding framework holds a part of it, its hooks have to run around the head's call"
        )
    cropped_weight = weight if tail.vocab is None else weight[: tail.vocab]
    options = {"weight": cropped_weight, "bias": tail.bias(module.bias, weight), "softcap": tail.softcap}
    return options | {"logit_scale": tail.logit_scale, **head_call.patch.head_options}


def fp32_or_wider(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, fp32 for any other dtype."""
    return torch.promote_types(dtype, torch.float32)


def mean_denominator(lazy_loss: LazyLoss) -> Tensor:
    """The denominator of a mean over tokens, a scalar on the device: the number of targets other than ``ignore_index``,
    or the sum of the class weights of these targets. A denominator of 0 becomes 1."""
    is_counted = lazy_loss.targets != lazy_loss.ignore_index
    if lazy_loss.class_weights is None:
        return is_counted.sum().clamp(min=1)
    weight_sum = lazy_loss.class_weights[lazy_loss.targets.where(is_counted, 0)].where(is_counted, 0).sum()
    return weight_sum.where(weight_sum != 0, 1)


class RowStatistics(NamedTuple):
    """Statistics of logits, tensors [...] with one number per row, and the state in which they were computed."""

    logprobs: Tensor  # of ``ids``
    lse: Tensor
    mean_logit: Tensor  # over the vocabulary
    ids: Tensor | None  # int64 [..., 1]; None if ``logprobs`` are not to be read
    ids_version: int | None  # number of writes to ``ids`` at that time
    has_grad: bool  # gradients were enabled


class StatisticsOperand(NamedTuple):
    """An operand of row statistics: lazy logits, or their log-probabilities times a factor."""

    logits: VirtualLogits
    tail: Tail
    factor: float | None  # of the log-probabilities; None if the operand is the logits


# returns statistics of an operand's rows for ids [..., 1], or for any ids if that argument is None
StatisticsFunction = Callable[[StatisticsOperand, Tensor | None], RowStatistics]


def log_softmax(logits: VirtualLogits, dim: Any = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Any:
    if not isinstance(dim, int) or dim not in (-1, len(logits.shape) - 1) or statistics_operand(logits) is None:
        return NotImplemented
    if dtype is not None and not dtype.is_floating_point:
        return NotImplemented
    if dtype is None and torch.is_autocast_enabled(logits.head_call.device_type):
        dtype = torch.empty(1, dtype=logits.dtype, device=logits.hidden.device).log_softmax(-1).dtype  # fp32 on a GPU
    return logits.with_step(LOG_SOFTMAX, dtype).with_fields(dtype=dtype or logits.dtype)


def nll_loss(logprobs: VirtualLogits, *args: Any, **kwargs: Any) -> Any:
    """Computes ``F.nll_loss`` (as ProphetNet calls it) of lazy log-probabilities: the cross-entropy of their logits."""
    if not logprobs.steps or logprobs.steps[-1][0] != LOG_SOFTMAX:
        return NotImplemented
    logits = logprobs.with_fields(steps=logprobs.steps[:-1])
    return cross_entropy(logits.with_step("cast", logprobs.dtype), *args, **kwargs)


def statistics_operand(v: VirtualLogits) -> StatisticsOperand | None:
    """``v`` as an operand of row statistics. None if the steps of ``v`` make something else than logits or a multiple
    of log-probabilities, or if the head is no plain matrix."""
    step_names = [name for name, _ in v.steps]
    softmax_index = step_names.index(LOG_SOFTMAX) if LOG_SOFTMAX in step_names else None
    factor = None  # of the log-probabilities; None for logits
    if softmax_index is not None:
        factor = 1.0
        for name, argument in v.steps[softmax_index + 1 :]:
            if name not in ("mul", "div", "cast"):
                return None
            if name != "cast":
                factor = factor * argument if name == "mul" else factor / argument
    logits = v if softmax_index is None else v.with_fields(steps=v.steps[:softmax_index])
    tail = tail_of(logits)
    if tail is None or not v.head_call.has_lazy_head or not v.head_call.head.reads_weight:
        return None
    return StatisticsOperand(logits, tail, factor)


def logprobs_outputs(operand: StatisticsOperand, ids: Tensor, **result_flags: bool) -> tuple[Tensor, ...]:
    """Results of ``linear_logprobs``, computed in place of the head's forward: the log-probabilities of ids, then the
    row statistics that ``result_flags`` ask for (``lse=True``), each [...]."""
    head_call = operand.logits.head_call

    def logprobs_inside(module: Any, hidden: Tensor, head_forward: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        options = library_options(head_call, operand.tail, module)
        if head_call.patch.rehearsed is not None:
            weight, bias = options["weight"], options["bias"]
            loss = RehearsedLoss(operand.tail, hidden, weight, bias, head_call.autocast_dtype, operand.logits.dtype)
            head_call.patch.note_rehearsed(loss)
            return tuple(
                hidden.new_empty(ids.shape, dtype=torch.float32, requires_grad=True) for _ in (ids, *result_flags)
            )
        options |= {"target": ids.to(hidden.device), "ignore_index": IGNORE_NO_ID, **result_flags}
        return tuple(linear_logprobs(hidden, **options))

    with head_call.loss_state():
        outputs: tuple[Tensor, ...] = head_call.head.run_inside(
            logprobs_inside, operand.logits.hidden, head_call.has_run_hooks
        )
    return outputs


def mean_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Each row's mean logit over the vocabulary, [...] in fp32 or fp64, for a head without a softcap. The product with
    the mean row of the weight costs less than a pass over the logits."""
    dtype = fp32_or_wider(hidden.dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        mean = hidden.to(dtype) @ weight.mean(0, dtype=dtype)
        return mean if bias is None else mean + bias.mean(dtype=dtype)


def gather(v: VirtualLogits, statistics_for: StatisticsFunction, dim: Any, index: Any) -> Any:
    """``gather(-1, ids)`` of lazy logits or log-probabilities, for ids [..., 1]; NotImplemented for other arguments."""
    operand = statistics_operand(v)
    has_ids_per_row = isinstance(index, Tensor) and isinstance(dim, int) and dim in (-1, len(v.shape) - 1)
    if operand is None or not has_ids_per_row or tuple(index.shape) != (*v.shape[:-1], 1):
        return NotImplemented
    statistics = statistics_for(operand, index)
    selected_values = (
        statistics.logprobs + statistics.lse if operand.factor is None else statistics.logprobs * operand.factor
    )
    return selected_values[..., None].to(v.dtype)


def reduction_method(
    row_statistic: Callable[[StatisticsOperand, StatisticsFunction], Tensor],
    is_of_logprobs: bool = False,
    allows_no_dim: bool = False,
) -> Any:
    """Makes a method of lazy logits that returns ``row_statistic`` of each row. ``is_of_logprobs``: the method reduces
    lazy log-probabilities, not logits. ``allows_no_dim``: without ``dim`` the method returns the mean over all rows."""

    def reduced_logits(
        v: VirtualLogits,
        statistics_for: StatisticsFunction,
        dim: Any = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> Any:
        operand, is_per_row = statistics_operand(v), dim in (-1, len(v.shape) - 1)
        if operand is None or is_of_logprobs != (operand.factor is not None):
            return NotImplemented
        if not is_per_row and not (allows_no_dim and dim is None and not keepdim):
            return NotImplemented
        row_values = row_statistic(operand, statistics_for)
        result = row_values if is_per_row else row_values.mean()
        return (result[..., None] if keepdim else result).to(dtype or v.dtype)

    return reduced_logits


def sum_of_logprobs(operand: StatisticsOperand, statistics_for: StatisticsFunction) -> Tensor:
    """For each row the sum of all ids' log-probabilities, times the operand's factor, [...]."""
    statistics = statistics_for(operand, None)
    assert operand.factor is not None
    return (statistics.mean_logit - statistics.lse) * (operand.factor * operand.logits.vocab)


def mean(operand: StatisticsOperand, statistics_for: StatisticsFunction) -> Tensor:
    """Each row's mean logit over the vocabulary [...]."""
    if operand.tail.softcap:
        return statistics_for(operand, None).mean_logit
    head_call = operand.logits.head_call

    def mean_inside(module: Any, hidden: Tensor, head_forward: Callable[[Tensor], Tensor]) -> Tensor:
        options = library_options(head_call, operand.tail, module)
        return mean_logits(hidden, options["weight"], options["bias"]) * operand.tail.logit_scale

    with head_call.loss_state():
        means: Tensor = head_call.head.run_inside(mean_inside, operand.logits.hidden, head_call.has_run_hooks)
    return means


# methods of lazy logits that return statistics, by the name of the tensor's method
STATISTICS: dict[str, Callable[..., Any]] = {
    "gather": gather, "logsumexp": reduction_method(lambda operand, statistics_for: statistics_for(operand, None).lse),
    "sum": reduction_method(sum_of_logprobs, is_of_logprobs=True), "mean": reduction_method(mean, allows_no_dim=True),
}  # fmt: skip
