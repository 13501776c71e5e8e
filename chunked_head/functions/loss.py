"""Sums of losses of a linear head or of logits, with metrics."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack, cast

import torch
from torch import Tensor

from ..arithmetic.objective import ScalarObjective
from ..call.options import Call, HeadOptions, LogitsOptions, call_of, logits_call_of
from ..call.streams import Streams
from ..call.sweep import LocalWork
from ..compile.operation import IN_GRAPH, in_graph_values, operation
from ..compile.recipes import TASKS
from ..core.checks import name as name_of
from ..losses.base import Losses, as_losses
from ..losses.user_checks import Function
from ..metrics import Metric, MetricValue
from ..metrics.values import as_metrics, short_text
from ..plan.plans import Plan
from .fields import with_candidates, with_fields, with_segments


@dataclass(frozen=True, eq=False)
class LossOutput:
    """Results of ``linear_loss`` and ``logits_loss``.

    ``loss``: 0-d, or of target's shape with ``reduction="none"``; differentiable. ``parts``: each summand's reduced
    value by name, 0-d and detached, without its coefficient. ``metrics``: by name a ``MetricValue`` on the device.
    ``parts`` and ``metrics`` are empty with ``reduction="none"``. With ``TokenParallel`` loss and parts are this rank's
    shares, and metrics are of the whole batch. ``plan``: the plan of the call; None for ``logits_loss``, and inside of
    ``torch.compile``, where a graph may run at other lengths. ``streams``: for a call on several streams, a
    ``LossOutput`` of each stream, which alone has ``parts``, ``metrics`` and ``plan``. A stream's loss is detached and
    not multiplied by the stream's weight.
    """

    loss: Tensor
    parts: dict[str, Tensor]
    metrics: dict[str, MetricValue]
    plan: Plan | None
    streams: "tuple[LossOutput, ...]" = ()

    def __repr__(self) -> str:
        """Text with a line for each result. Reads numbers from the device."""
        loss = short_text(self.loss) if self.loss.dim() == 0 else f"tensor{list(self.loss.shape)}"
        lines = [f"loss={loss}, {name_of(self.loss.dtype)} on {self.loss.device}"]
        lines += [f"parts[{name!r}]={short_text(value)}" for name, value in self.parts.items()]
        lines += [f"metrics[{name!r}]={value!r}" for name, value in self.metrics.items()]
        lines += [f"plan={self.plan!r}"] * (self.plan is not None)
        lines += [f"streams[{i}].loss={short_text(stream.loss)}" for i, stream in enumerate(self.streams)]
        return "LossOutput(\n    " + "\n    ".join(lines) + "\n)"


@operation
def linear_loss(
    hidden: Tensor | Sequence[Tensor],  # [..., hidden], of one stream or of several
    weight: Tensor,  # [vocab, hidden]
    target: Tensor | Sequence[Tensor] | None,  # [...] int64
    loss: Losses | Function | Sequence[Losses | Function],
    *,
    stream_weights: Sequence[float | Tensor] | None = None,
    batch: Mapping[str, Any] | None = None,  # of tensors
    mask: Tensor | None = None,  # [...] bool
    token_weights: Tensor | None = None,  # [...]
    num_segments: int | None = None,
    segment_lengths: Sequence[int] | Tensor | None = None,
    kept_everywhere: bool = False,
    candidates: Tensor | None = None,  # [K] int64, or [..., K]
    candidate_bias: Tensor | None = None,  # of the shape of ``candidates``
    metrics: Sequence[Metric] = (),
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,  # or [...]
    upstream: float | Tensor | None = None,
    **options: Unpack[HeadOptions],
) -> Call[LossOutput] | Streams[LossOutput]:
    """Any sum of losses of a linear head, with metrics, from one softmax pass. Values and gradients are those of

        x = softcap * tanh(logit_scale * F.linear(hidden, weight, bias).float() / softcap) / temperature
        logprob = x.log_softmax(-1).gather(-1, target[..., None])[..., 0]     # and lse, entropy, ... of x
        part = [(m * w * l(stats, batch)).sum() / D for l in losses]          # l returns unreduced values
        loss = sum(c * p for c, p in zip(coefficients, part))

    without holding the logits. A token counts (m = 1) if its target is not ``ignore_index`` and ``mask``, if given, is
    True. Values of other tokens, in any tensor, change nothing. w are ``token_weights``, D is ``normalizer``.

        out = linear_loss(hidden, weight, target, losses.grpo() + 1e-4 * losses.z_loss() - 0.01 * losses.entropy(),
                          batch={"old_logprobs": old, "advantages": advantages}, metrics=[metrics.clip_fraction()])
        out.loss.backward()

    Args:
        hidden, weight, bias, ignore_index, softcap, logit_scale, shift, upstream: as in ``linear_cross_entropy``.
        target: token ids [...] int64; None if no loss or metric reads it.
        loss: losses of ``chunked_head.losses``, added and multiplied by numbers or 0-d tensors. A function ``(stats,
            batch) -> values``, as the loss or as a summand, means ``losses.custom(function, scope="token")``, and
            is checked once. Call ``losses.custom`` yourself to set further options.
        batch: tensors that go with the tokens, by name: the fields that the losses and metrics read, ``mask`` [...]
            bool and ``token_weights`` [...]. Fields of the predicted token (mask, weights, log-probabilities,
            advantages, segments) are indexed like the target, also under ``shift``; fields ``teacher_*`` like the
            hidden states. ``kept_ids`` (and ``kept_offsets``, unless ``kept_ids`` are [..., K]) are sets of ids for
            the softmaxes of all losses and metrics, as in ``linear_logprobs``. Nothing is broadcast, and no field takes
            a gradient. ``losses.FIELDS`` lists all fields.
        mask, token_weights: the fields of these names. Each may be an argument or in ``batch``, not both.
        kept_everywhere: True promises that every token that counts has a set of ids (``batch["kept_ids"]``). Then no
            logits of the whole vocabulary are made. A broken promise raises on the CPU, and makes results nan on other
            devices.
        candidates: ids [K] for all tokens, or [..., K] for each target, where -1 is no id; a token that counts needs at
            least one id. The softmax is over these ids and the target only. Each token gathers K rows of the weight,
            also if all tokens share the ids, so that K should be small.
        candidate_bias: in the shape of ``candidates``, added to their logits before division by a temperature, such as
            ``-log q`` of sampled softmax (Jean et al. 2015). It is 0 for a target that is no candidate. It takes no
            gradient, and cannot be combined with softcap.
        num_segments: number of segments, an int. Ids in ``batch["segments"]`` are in [0, num_segments), or -1 for
            tokens of no segment.
        segment_lengths: lengths of segments that lie one after the other in the flattened tokens, instead of
            ``batch["segments"]``: a list of ints or an int tensor on the CPU. They add up to the number of tokens,
            prompts and padding included. Numbers that grow from 0 to the number of tokens are taken as attention's
            cu_seqlens. ``num_segments`` must agree if it is passed. It is required for [0, tokens], which could be
            lengths of two segments or cu_seqlens of one. ``batch["pairs"]`` has to be on the CPU then. Not with
            ``TokenParallel`` or ``sequence_sharded``.
        metrics: functions of ``chunked_head.metrics``, whose names have to differ.
        reduction: ``"mean"`` or ``"sum"``, for summands without a reduction of their own. ``"none"``, for losses per
            token and without metrics: ``loss`` [...] is ``sum(c * w * l)`` of each token, 0 where a token does not
            count. Its upstream gradients are known in ``backward`` only, where logits are computed again unless the
            head is frozen.
        normalizer: D of summands that are means and have no normalizer of their own: a number or a 0-d tensor on the
            device. None: for each summand the number of tokens (segments, pairs) that count, at least 1. 0 gives loss
            0.
        temperature: divides the logits for every loss and metric that has no temperature of its own. A call may have
            two different temperatures. A tensor [...] has a temperature for each token, indexed like the target, and
            takes no gradient; losses and metrics with a temperature of their own raise beside it. If a token counts and
            its temperature is not positive and finite, ValueError is raised on the CPU, and results are nan on other
            devices.
        stream_weights: factors of the losses of several streams, numbers or 0-d tensors; None: 1 for each.
        parallel: what ranks of a process group share. ``TokenParallel``: ranks hold different tokens of one batch. Loss
            and parts are this rank's shares: ``all_reduce(SUM)`` of a share gives the loss or part of the whole batch.
            D, sums over segments and metrics are of all ranks' tokens. ``num_segments``, ids of segments and fields per
            segment and pair are those of the whole batch. ``VocabParallel``: ranks hold different rows of the head.
        options: keyword arguments of ``chunked_head.Execution``, which say how the call runs, as in
            ``linear_cross_entropy``.

    A list ``hidden`` has several streams of hidden states for one head, as in multi-token prediction (DeepSeek-V3,
    2412.19437) or the training steps of a drafter (EAGLE-3, 2503.01840). Value and gradients are those of

        outs = [linear_loss(h, weight, target, loss, shift=k, ...) for h, k in zip(hidden, shift)]
        loss = sum(w * out.loss for w, out in zip(stream_weights, outs))

    with one accumulation of the weight's gradient, in float32 at least, and each stream's own denominator.
    ``target``, ``loss``, ``shift``, ``temperature``, ``normalizer``, ``mask``, ``token_weights``, ``candidates``,
    ``candidate_bias`` and each tensor of ``batch`` may be a list with a value for each stream; all other arguments hold
    for all streams. ``out.streams[i]`` has the loss, parts, metrics and plan of stream i. ``memory_budget`` holds the
    weight's gradient and one chunk of one stream.

    Losses whose tokens depend on each other (``scope="segment"``: GSPO, DPO, ...) need all statistics before any
    gradient. If one chunk cannot hold all tokens, ``backward`` computes logits again, which makes four matmuls instead
    of three, and adds to ``accumulate_into`` there. With ``segment_lengths`` chunks end where segments and pairs end,
    and three matmuls are enough, but not for losses of ``losses.custom``, nor with ``skip_ignored``. With a frozen head
    two matmuls are enough, if the losses read log-probabilities only. ``out.plan`` says which way the call took.

    Inside of ``torch.compile`` the call is an operator of the graph. A tensor multiplies a loss by ``Losses.times``
    there; docs/guides/options.md says what breaks the graph.

    Raises:
        TypeError, ValueError: before any work, naming the argument; a missing field names the loss that needs it.
        IndexError: on the CPU, for a target, segment or teacher id out of range; elsewhere loss, metrics and gradients
            become nan.
    """
    if isinstance(hidden, list | tuple):
        arguments = {
            "batch": batch, "mask": mask, "token_weights": token_weights, "num_segments": num_segments,
            "segment_lengths": segment_lengths,
            "kept_everywhere": kept_everywhere, "candidates": candidates, "candidate_bias": candidate_bias,
            "metrics": metrics, "reduction": reduction, "normalizer": normalizer, "temperature": temperature,
            "upstream": upstream, **options,
        }  # fmt: skip
        return streams_of(TASKS["linear_loss"], hidden, weight, target, loss, stream_weights, arguments)
    if stream_weights is not None:
        raise ValueError("stream_weights go with several streams: pass hidden as a list, or leave them out")
    hidden, target, loss = cast("tuple[Tensor, Tensor | None, Losses | Function]", (hidden, target, loss))
    if mask is not None or token_weights is not None:
        batch = with_fields(batch, mask, token_weights)
    call = call_of(
        "linear_loss", hidden, weight, target, options, temperature=temperature,
        losses=loss if isinstance(loss, Losses) else as_losses(loss), metrics=as_metrics(metrics), batch=batch,
        num_segments=num_segments, kept_everywhere=kept_everywhere, reduction=reduction, normalizer=normalizer,
        upstream=upstream, result=loss_output,
    )  # fmt: skip
    if candidates is not None or candidate_bias is not None:
        call = with_candidates(call, candidates, candidate_bias)
    return call if segment_lengths is None else with_segments(call, segment_lengths)


def in_graph_loss(outputs: list[Tensor], arguments: dict[str, Any]) -> LossOutput:
    """The result of ``linear_loss`` or ``logits_loss`` inside of ``torch.compile``, from the outputs of its operator in
    the graph."""
    if arguments.get("reduction") == "none":
        return LossOutput(in_graph_values(outputs, arguments), {}, {}, None)
    loss_value, packed_values = outputs[0], outputs[1]
    loss_labels = [summand.label for _, summand in arguments["loss"].terms]
    reduced_losses = {label: packed_values[i] for i, label in enumerate(loss_labels)}
    metrics, offset = {}, len(loss_labels)
    for metric in arguments.get("metrics", ()):
        num_components = metric.components
        metric_total = packed_values[offset] if num_components == 1 else packed_values[offset : offset + num_components]
        offset += num_components
        if metric.reduce == "mean":
            metrics[metric.label] = MetricValue("mean", metric_total, packed_values[offset], finish=metric.finish)
            offset += 1
        else:
            metrics[metric.label] = MetricValue(metric.reduce, extremum=metric_total)
    return LossOutput(loss_value, reduced_losses, metrics, None)


IN_GRAPH["linear_loss"] = in_graph_loss


def loss_output(outputs: Sequence[Tensor], call: Call[LossOutput], work: LocalWork) -> LossOutput:
    """The result of ``linear_loss`` or ``logits_loss`` from the outputs of its call, and the work that has run."""
    (loss_value,), objective = outputs, work.objective
    if not isinstance(objective, ScalarObjective):
        return LossOutput(loss_value, {}, {}, work.plan)
    loss_labels = [summand.label for _, summand in call.losses.terms]
    with torch.no_grad():
        metric_values = objective.metric_values()
    metrics_in_order = {metric.label: metric_values[metric.label] for metric in call.metrics}
    # tensors of their own: backward keeps the objective, and a caller may add the loss to a part in place
    reduced_losses = dict(zip(loss_labels, [value.detach() for value in objective.loss_values], strict=True))
    return LossOutput(loss_value, reduced_losses, metrics_in_order, work.plan)


@operation
def logits_loss(
    logits: Tensor,  # [..., vocab]
    target: Tensor | None,  # [...] int64
    loss: Losses | Function,
    *,
    batch: Mapping[str, Tensor] | None = None,
    mask: Tensor | None = None,  # [...] bool
    token_weights: Tensor | None = None,  # [...]
    num_segments: int | None = None,
    kept_everywhere: bool = False,
    metrics: Sequence[Metric] = (),
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,  # or [...]
    inplace: bool = False,
    **options: Unpack[LogitsOptions],
) -> Call[LossOutput]:
    """``linear_loss`` on logits that exist already: any sum of losses, with metrics. The call reads the logits once,
    and once more in ``backward``. Values and gradients are those of ``linear_loss``, with

        x = softcap * tanh(logit_scale * logits.float() / softcap) / temperature

    The only tensor of the logits' size is their gradient, which with ``inplace`` takes the place of the logits:

        logits = model(tokens).logits
        out = logits_loss(logits, tokens, losses.cross_entropy() + 1e-4 * losses.z_loss(), shift=1, inplace=True)
        out.loss.backward()

    Args:
        logits: [..., vocab], any leading dimensions; float32, bfloat16, float16, on the torch backend float64. They are
            copied if columns are not contiguous, or if rows are not evenly spaced, such as the rows of
            ``logits[:, :-1]``: pass all logits, with ``shift=1``.
        target, loss, batch, mask, token_weights, num_segments, metrics, reduction, normalizer, ignore_index, shift: as
            in ``linear_loss``. A dense teacher must be passed as ``teacher_logits``. Logits of tokens that do not count
            change nothing.
        softcap, logit_scale, temperature: as in the formula above.
        inplace: True writes the gradient over the logits: after ``backward``, which can run once, ``logits`` holds
            gradients. The backward of any other operation that has saved the logits raises. Logits that are a leaf
            raise, since the leaf would become its own ``.grad``.
        vocab_size: number of the first columns that stand for an id; None: all. Values in the other columns change
            nothing, and their gradient is 0.
        parallel: as in ``linear_loss``. With ``VocabParallel``, ``logits`` [..., vocab / ranks] are each rank's columns
            for the same tokens (Megatron's output layer without its gather), and ``teacher_logits`` are split likewise.
            ``sequence_sharded`` and ``reduce_dhidden=False``, which concern hidden states, raise. If the ranks' targets
            differ, results are nan. Without targets, ranks with different tokens are not noticed.
        backend: ``"triton"`` or ``"torch"``. None: Triton on GPUs that have our kernels, else torch.

    Gradients are made in backward and multiplied by the upstream gradient before they are rounded, so that 16-bit
    gradients lose no accuracy to ``normalizer`` or to a loss scale.

    Returns:
        ``LossOutput``, as in ``linear_loss``: ``.loss`` is 0-d, fp32 (fp64 for fp64 logits); ``.plan`` is None.

    Raises:
        TypeError, ValueError, IndexError: as in ``linear_loss``.
    """
    if isinstance(batch, Mapping) and "teacher_hidden" in batch:
        raise ValueError(
            "logits_loss takes a dense teacher as batch['teacher_logits'], got teacher_hidden: pass "
            "F.linear(teacher_hidden, teacher_weight, teacher_bias), or the student's hidden states to linear_loss, "
            "which holds the logits of neither"
        )
    if mask is not None or token_weights is not None:
        batch = with_fields(batch, mask, token_weights)
    return logits_call_of(
        "logits_loss", logits, target, options, inplace, losses=as_losses(loss), metrics=as_metrics(metrics),
        batch=batch, num_segments=num_segments, kept_everywhere=kept_everywhere, reduction=reduction,
        normalizer=normalizer, temperature=temperature, result=loss_output,
    )  # fmt: skip


IN_GRAPH["logits_loss"] = in_graph_loss


# ---- several streams of hidden states: each stream's arguments and results

# arguments that may be a list with a value for each stream; a list for any other argument is a value for all streams
STREAM_ARGUMENTS = ("mask", "token_weights", "temperature", "normalizer", "candidates", "candidate_bias", "shift")


def streams_of(
    make_call: Callable[..., Call[Any]],
    hidden: Sequence[Tensor],
    weight: Tensor,
    target: Any,
    loss: Any,
    stream_weights: Sequence[float | Tensor] | None,
    arguments: dict[str, Any],
) -> Streams[Any]:
    """The ``Streams`` of a ``linear_loss`` on several streams. ``make_call``: a function that makes the ``Call`` of a
    stream from the arguments of ``linear_loss``. ``arguments``: the arguments of ``linear_loss`` that are not named in
    this signature. TypeError or ValueError for wrong lists."""
    num_streams = len(hidden)
    if not num_streams:
        raise ValueError("hidden must be a tensor or a list of one tensor or more, got an empty list")
    if arguments["reduction"] == "none":
        raise ValueError(
            'reduction="none" has no loss that streams would add up to; call linear_loss once for each stream'
        )
    stream_factors = for_streams("stream_weights", 1.0 if stream_weights is None else stream_weights, num_streams)
    stream_losses = [as_losses(stream_loss) for stream_loss in for_streams("loss", loss, num_streams)]
    calls: list[Call[Any]] = []  # the call of each stream
    stream_targets = for_streams("target", target, num_streams)
    for i, stream_hidden in enumerate(hidden):
        if isinstance(stream_hidden, list | tuple):
            raise TypeError(f"hidden must be a torch.Tensor, got {type(stream_hidden).__name__}")
        stream_arguments = {
            name: for_streams(name, arguments[name], num_streams)[i] for name in STREAM_ARGUMENTS if name in arguments
        }
        if isinstance(arguments["batch"], Mapping):
            stream_arguments["batch"] = {
                name: for_streams(f"batch[{name!r}]", value, num_streams)[i]
                for name, value in arguments["batch"].items()
            }
        stream_loss = stream_losses[i].times(stream_factors[i])
        calls.append(make_call(stream_hidden, weight, stream_targets[i], stream_loss, **arguments | stream_arguments))

    def streams_output(loss_sum: Tensor, stream_outputs: list[LossOutput]) -> LossOutput:
        return LossOutput(loss_sum, {}, {}, None, tuple(stream_outputs))

    return Streams(calls, stream_losses, streams_output)


def for_streams(name: str, value: Any, num_streams: int) -> Sequence[Any]:
    """Values of the argument ``name`` for each stream: the elements of ``value`` if it is a list, else ``value`` for
    all streams. ValueError unless the list has ``num_streams`` elements."""
    if not isinstance(value, list | tuple):
        return [value] * num_streams
    if len(value) != num_streams:
        raise ValueError(
            f"{name} must be one for all {num_streams} streams or a list of {num_streams}, got {len(value)}"
        )
    return value
