"""Sums of losses of a linear head or of logits, with metrics."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack, cast

import torch
from torch import Tensor

from ..arithmetic.objective import ScalarObjective
from ..call.options import Call, HeadOptions, LogitsOptions, call_of, logits_call_of
from ..call.run import Outcome
from ..call.streams import Streams
from ..compile.operation import IN_GRAPH, in_graph_values, operation
from ..compile.recipes import TASKS
from ..core.checks import name as name_of
from ..losses.base import Losses, as_losses
from ..losses.user_checks import Function
from ..metrics import Metric, MetricValue
from ..metrics.values import as_metrics, short
from ..plan.plans import Plan
from .fields import with_candidates, with_fields, with_segments


@dataclass(frozen=True, eq=False)
class LossOutput:
    """Results of ``linear_loss`` and ``logits_loss``.

    ``loss``: 0-d, or of target's shape with ``reduction="none"``; differentiable. ``parts``: by name, each summand's
    reduced value, 0-d and detached, without its coefficient. ``metrics``: by name, each with ``.value`` and with
    ``.sum`` and ``.count``, or ``.extremum``; on the device. ``parts`` and ``metrics`` are empty with
    ``reduction="none"``. With ``TokenParallel`` loss and parts are this rank's shares, metrics the whole batch's.
    ``plan``: how the call ran; None for ``logits_loss``, which has nothing to plan, and inside of ``torch.compile``,
    where a graph may run at other lengths. ``streams``: for a call on several streams one ``LossOutput`` each, whose
    loss is detached and not multiplied by the stream's weight. Such a call has ``parts``, ``metrics`` and ``plan`` in
    ``streams`` only.
    """

    loss: Tensor
    parts: dict[str, Tensor]
    metrics: dict[str, MetricValue]
    plan: Plan | None
    streams: "tuple[LossOutput, ...]" = ()

    def __repr__(self) -> str:
        """Every result in a line; numbers are read from the device."""
        loss = short(self.loss) if self.loss.dim() == 0 else f"tensor{list(self.loss.shape)}"
        lines = [f"loss={loss}, {name_of(self.loss.dtype)} on {self.loss.device}"]
        lines += [f"parts[{name!r}]={short(value)}" for name, value in self.parts.items()]
        lines += [f"metrics[{name!r}]={value!r}" for name, value in self.metrics.items()]
        lines += [f"plan={self.plan!r}"] * (self.plan is not None)
        lines += [f"streams[{i}].loss={short(stream.loss)}" for i, stream in enumerate(self.streams)]
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
    candidate_bias: Tensor | None = None,  # of their shape
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
        hidden, weight, bias, ignore_index, softcap, logit_scale, shift, upstream, how the call runs: as in
            ``linear_cross_entropy``.
        target: token ids [...] int64; None where no loss or metric reads it.
        loss: ``chunked_head.losses``, added and multiplied by numbers or 0-d tensors. A function ``(stats, batch) ->
            values`` of your own, alone or as a summand, is taken as ``losses.custom(function, scope="token")``, checked
            once; ``losses.custom`` is for all else.
        batch: tensors that go with the tokens, by name: what the losses and metrics ask for, ``mask`` [...] bool and
            ``token_weights`` [...]. Fields of the predicted token (mask, weights, log-probabilities, advantages,
            segments) are indexed like the target and move with it under ``shift``; ``teacher_*`` like the hidden
            states. ``kept_ids`` with ``kept_offsets``, or alone [..., K], are sets of ids that tokens' softmaxes are
            over, for all losses and metrics, as in ``linear_logprobs``. Nothing is broadcast, and no field takes a
            gradient. ``losses.FIELDS`` lists all.
        mask, token_weights: the fields of these names, as arguments; each stands in one place.
        kept_everywhere: a promise that every token that counts keeps a set of ids (``batch["kept_ids"]``): then nothing
            is done over the vocabulary. A broken promise raises on the CPU, and gives nan elsewhere.
        candidates: ids [K] that all tokens share, or [..., K] for each target (-1 for none, and at least one id where a
            token counts): the softmax is over these ids and the target only. Every token and candidate costs a gathered
            row of the weight, also where all tokens share them: it is for small K.
        candidate_bias: of the candidates' shape, added to their logits before any temperature, as ``-log q`` of sampled
            softmax (Jean et al. 2015); 0 for a target that is no candidate. It takes no gradient, and excludes softcap.
        num_segments: how many segments ``batch["segments"]`` numbers, an int; ids in [0, num_segments), -1 for none.
        segment_lengths: instead of both, the lengths of segments that lie one after the other in the flattened tokens:
            a list or an int tensor on the CPU that adds up to their number, prompts and padding included. Numbers that
            grow from 0 to it are taken as attention's cu_seqlens. Of [0, tokens], which is both, ``num_segments`` has
            to say which: 1 for cu_seqlens. ``batch["pairs"]`` is on the CPU then. Not with ``TokenParallel`` or
            ``sequence_sharded``.
        metrics: ``chunked_head.metrics``, of names that differ.
        reduction: of summands without one of their own: ``"mean"`` or ``"sum"``. ``"none"``, for losses of tokens and
            without metrics: ``loss`` [...] is each token's ``sum(c * w * l)``, 0 where one does not count. Its upstream
            gradients are known in ``backward`` only, where logits are computed again unless the head is frozen.
        normalizer: D of summands that are means and have none of their own: a number or a 0-d tensor on the device.
            None: for each summand the number of tokens (segments, pairs) that count, or 1 where none does. 0 gives 0.
        temperature: divides the logits for every loss and metric that names no temperature of its own. A call may mix
            two temperatures. A tensor [...] has one per token, indexed like the target; losses and metrics with a
            temperature of their own are refused beside it. It is read only where a token counts, and takes no gradient.
            One that is not positive and finite raises a ValueError on the CPU, and makes everything nan elsewhere.
        stream_weights: factors of several streams' losses, numbers or 0-d tensors; None for 1 each.
        parallel: what ranks of a process group share. ``TokenParallel``: they hold different tokens of one batch. Loss
            and parts are this rank's shares, of which an ``all_reduce(SUM)`` gives the whole batch's; D, sums over
            segments and metrics are of all ranks' tokens. ``num_segments``, ids of segments and the fields per segment
            and per pair are the whole batch's. ``VocabParallel``: they hold different rows of the head.

    A list ``hidden`` has several streams of hidden states for one head, as in multi-token prediction (DeepSeek-V3,
    2412.19437) or the training steps of a drafter (EAGLE-3, 2503.01840). Value and gradients are those of

        outs = [linear_loss(h, weight, target, loss, shift=k, ...) for h, k in zip(hidden, shift)]
        loss = sum(w * out.loss for w, out in zip(stream_weights, outs))

    with one accumulation of the weight's gradient, in float32 at least, and each stream's own denominator.
    ``target``, ``loss``, ``shift``, ``temperature``, ``normalizer``, ``mask``, ``token_weights``, ``candidates`` and
    each tensor of ``batch`` are one for all streams or a list of one each; everything else is the same for all.
    ``out.streams[i]`` has each stream's loss, parts, metrics and plan.
    ``memory_budget`` holds one accumulator and one chunk of one stream.

    Losses whose tokens depend on each other (``scope="segment"``: GSPO, DPO, ...) need all statistics before any
    gradient: where one chunk cannot hold all tokens, logits are computed again in ``backward``, four matmuls for three,
    and ``accumulate_into`` is added to there. With ``segment_lengths`` chunks end where segments and pairs end, and
    three matmuls are enough, but for losses of ``losses.custom`` and with ``skip_ignored``; with a frozen head two are,
    where the losses are functions of log-probabilities alone. ``out.plan`` says so.

    Inside of ``torch.compile`` the call is an operator; docs/guides/options.md says what breaks the graph, and that a
    tensor multiplies a loss by ``Losses.times`` there.

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
    call = call_of(
        "linear_loss", hidden, weight, target, options, temperature=temperature,
        losses=loss if isinstance(loss, Losses) else as_losses(loss), metrics=as_metrics(metrics),
        batch=with_fields(batch, mask, token_weights), num_segments=num_segments, kept_everywhere=kept_everywhere,
        reduction=reduction, normalizer=normalizer, upstream=upstream, result=loss_output,
    )  # fmt: skip
    if candidates is not None or candidate_bias is not None:
        call = with_candidates(call, candidates, candidate_bias)
    return call if segment_lengths is None else with_segments(call, segment_lengths)


def in_graph_loss(outputs: list[Tensor], arguments: dict[str, Any]) -> LossOutput:
    if arguments.get("reduction") == "none":
        return LossOutput(in_graph_values(outputs, arguments), {}, {}, None)
    value, packed = outputs[0], outputs[1]
    labels = [summand.label for _, summand in arguments["loss"].terms]
    values_by_label = {label: packed[offset] for offset, label in enumerate(labels)}
    metrics, offset = {}, len(labels)
    for metric in arguments.get("metrics", ()):
        count = metric.components
        number_or_vector = packed[offset] if count == 1 else packed[offset : offset + count]
        offset += count
        if metric.reduce == "mean":
            metrics[metric.label] = MetricValue("mean", number_or_vector, packed[offset], finish=metric.finish)
            offset += 1
        else:
            metrics[metric.label] = MetricValue(metric.reduce, extremum=number_or_vector)
    return LossOutput(value, values_by_label, metrics, None)


IN_GRAPH["linear_loss"] = in_graph_loss


def loss_output(outcome: Outcome) -> LossOutput:
    """The results of a call that ran."""
    value, plan, objective = outcome.outputs[0], outcome.plan, outcome.objective
    if not isinstance(objective, ScalarObjective):
        return LossOutput(value, {}, {}, plan)
    with torch.no_grad():
        values_by_label = dict(
            zip([s.label for _, s in outcome.tokens.call.losses.terms], outcome.loss_values, strict=True)
        )
        values = objective.metric_values(outcome.stats, outcome.metric_totals)
    return LossOutput(
        value, values_by_label, {metric.label: values[metric.label] for metric in outcome.tokens.call.metrics}, plan
    )


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
    """``linear_loss`` on logits that exist already: any sum of losses, with metrics, from one pass over the logits, and
    their gradient from one more in ``backward``. Values and gradients are those of ``linear_loss``, with

        x = softcap * tanh(logit_scale * logits.float() / softcap) / temperature

    No tensor of the logits' size is made but the gradient, and with ``inplace`` not even that:

        logits = model(tokens).logits
        out = logits_loss(logits, tokens, losses.cross_entropy() + 1e-4 * losses.z_loss(), shift=1, inplace=True)
        out.loss.backward()

    Args:
        logits: [..., vocab], any leading dimensions; float32, bfloat16, float16, on the torch backend float64. They are
            copied if columns are not contiguous, or if rows are not evenly spaced, as those of ``logits[:, :-1]``: pass
            all logits, with ``shift=1``.
        target, loss, batch, mask, token_weights, num_segments, metrics, reduction, normalizer, ignore_index, shift: as
            in ``linear_loss``. A dense teacher must have ``teacher_logits``. Logits of tokens that do not count change
            nothing.
        softcap, logit_scale, temperature: as above.
        inplace: True writes the gradient over the logits. ``backward`` then leaves gradients in ``logits`` and runs
            once; autograd raises in any other operation's backward that has saved the logits. Logits that are a leaf
            are refused, since the leaf would become its own ``.grad``.
        vocab_size: number of the first columns that stand for an id; None: all. Values in the other columns change
            nothing, and their gradient is 0.
        parallel: as in ``linear_loss``. With ``VocabParallel``, ``logits`` [..., vocab / ranks] are each rank's columns
            for the same tokens (Megatron's output layer without its gather), and ``teacher_logits`` likewise.
            ``sequence_sharded`` and ``reduce_dhidden=False``, which concern hidden states, are refused. If the ranks'
            targets differ, results are nan; without targets, different tokens on the ranks go unnoticed.
        backend: ``"triton"`` or ``"torch"``. None: Triton on GPUs that have our kernels, else torch.

    Gradients are made in backward and multiplied by the upstream gradient before they are rounded, so that 16-bit
    gradients lose no accuracy to ``normalizer`` or to a loss scale.

    Returns:
        ``LossOutput``, as in ``linear_loss``: ``.loss`` is 0-d, fp32 (fp64 for fp64 logits); ``.plan`` is None.

    Raises:
        TypeError, ValueError, IndexError: as ``linear_loss``, of tokens that count.
    """
    if isinstance(batch, Mapping) and "teacher_hidden" in batch:
        raise ValueError(
            "logits_loss takes a dense teacher as batch['teacher_logits'], got teacher_hidden: pass "
            "F.linear(teacher_hidden, teacher_weight, teacher_bias), or the student's hidden states to linear_loss, "
            "which holds the logits of neither"
        )
    return logits_call_of(
        "logits_loss", logits, target, options, inplace, losses=as_losses(loss), metrics=as_metrics(metrics),
        batch=with_fields(batch, mask, token_weights), num_segments=num_segments, kept_everywhere=kept_everywhere,
        reduction=reduction, normalizer=normalizer, temperature=temperature, result=loss_output,
    )  # fmt: skip


IN_GRAPH["logits_loss"] = in_graph_loss


# ---- several streams of hidden states: each stream's arguments and results

# arguments that take a list with one value per stream; for any other argument a list is one value for all streams
PER_STREAM = ("mask", "token_weights", "temperature", "normalizer", "candidates", "candidate_bias", "shift")


def streams_of(
    make: Callable[..., Call[Any]],
    hidden: Sequence[Tensor],
    weight: Tensor,
    target: Any,
    loss: Any,
    stream_weights: Sequence[float | Tensor] | None,
    arguments: Mapping[str, Any],
) -> Streams[Any]:
    """The request on several streams: ``make``, which is ``linear_loss``, makes the call of each. ``arguments``: all
    further arguments of ``linear_loss``, by name."""
    count = len(hidden)
    if not count:
        raise ValueError("hidden must be a tensor or a list of one tensor or more, got an empty list")
    if arguments["reduction"] == "none":
        raise ValueError(
            'reduction="none" has no loss that streams would add up to; call linear_loss once for each stream'
        )
    weights = for_streams("stream_weights", 1.0 if stream_weights is None else stream_weights, count)
    losses = [as_losses(stream_loss) for stream_loss in for_streams("loss", loss, count)]
    calls = []
    for i, (stream_hidden, stream_target) in enumerate(zip(hidden, for_streams("target", target, count), strict=True)):
        if isinstance(stream_hidden, list | tuple):
            raise TypeError(f"hidden must be a torch.Tensor, got {type(stream_hidden).__name__}")
        stream_arguments = {
            name: for_streams(name, arguments[name], count)[i] for name in PER_STREAM if name in arguments
        }
        if isinstance(arguments["batch"], Mapping):
            stream_arguments["batch"] = {
                name: for_streams(f"batch[{name!r}]", value, count)[i] for name, value in arguments["batch"].items()
            }
        calls.append(
            make(stream_hidden, weight, stream_target, losses[i].times(weights[i]), **{**arguments, **stream_arguments})
        )

    def result(total: Tensor, outcomes: list[Outcome]) -> Any:
        outputs = [call.result(outcome) for call, outcome in zip(calls, outcomes, strict=True)]
        return LossOutput(total, {}, {}, None, tuple(outputs))

    return Streams(tuple(calls), tuple(losses), result)


def for_streams(name: str, value: Any, count: int) -> Sequence[Any]:
    """An argument's values, one for each stream; ValueError for a list of another length."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} must be one for all {count} streams or a list of {count}, got {len(value)}")
    return value
