"""Differentiable statistics per token of a linear head or of logits, for a loss that the caller writes."""

import itertools
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack, overload

import torch
from torch import Tensor

from ..call.options import Call, HeadOptions, LogitsOptions, call_of, logits_call_of
from ..compile.operation import IN_GRAPH, execute, operation
from ..compile.recipes import TASKS
from ..core.checks import flag
from ..core.stats import all_at_targets
from .fields import with_candidates

# arguments that ask for further results; the results have the same names and order
RESULT_FLAGS = ("entropy", "lse", "mean_logit", "log_sum_sq_probs", "argmax")


class PerTokenOptions(HeadOptions, total=False):
    """Keyword arguments of ``linear_logprobs``, without the arguments that ask for results."""

    temperature: float | Tensor
    mask: Tensor | None
    kept_ids: Tensor | None
    kept_offsets: Tensor | None
    kept_everywhere: bool
    candidates: Tensor | None
    candidate_bias: Tensor | None


if TYPE_CHECKING:

    class LogProbs(tuple[Tensor, ...]):
        """The named tuple of results. It has an attribute only for results that the call returns."""

        logprobs: Tensor
        entropy: Tensor
        lse: Tensor
        mean_logit: Tensor
        log_sum_sq_probs: Tensor
        argmax: Tensor
        top_k_logprobs: Tensor
        top_k_ids: Tensor


@overload
def linear_logprobs(hidden: Tensor, weight: Tensor, target: Tensor, **options: Unpack[PerTokenOptions]) -> Tensor: ...
@overload
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    entropy: bool = False,
    lse: bool = False,
    argmax: bool = False,
    top_k: int | None = None,
    mean_logit: bool = False,
    log_sum_sq_probs: bool = False,
    **options: Unpack[PerTokenOptions],
) -> "LogProbs": ...
@operation
def linear_logprobs(
    hidden: Tensor,  # [..., hidden]
    weight: Tensor,  # [vocab, hidden]
    target: Tensor,  # [...] int64
    *,
    entropy: bool = False,
    lse: bool = False,
    argmax: bool = False,
    top_k: int | None = None,
    mean_logit: bool = False,
    log_sum_sq_probs: bool = False,
    temperature: float | Tensor = 1.0,  # or [...]
    mask: Tensor | None = None,  # [...] bool
    kept_ids: Tensor | None = None,  # [n] int64, or [..., K]
    kept_offsets: Tensor | None = None,  # [tokens + 1] int64
    kept_everywhere: bool = False,
    candidates: Tensor | None = None,  # [K] int64, or [..., K]
    candidate_bias: Tensor | None = None,  # of their shape
    **options: Unpack[HeadOptions],
) -> Call[Tensor | tuple[Tensor, ...]]:
    """Log-probabilities of targets, and further values per token on request. Values and gradients are those of

        x = softcap * tanh(logit_scale * F.linear(hidden, weight, bias).float() / softcap) / temperature
        logprobs = x.log_softmax(-1).gather(-1, target[..., None])[..., 0]
        entropy = -(x.softmax(-1) * x.log_softmax(-1)).sum(-1)
        lse, argmax, top_k = x.logsumexp(-1), x.argmax(-1), x.log_softmax(-1).topk(k)
        mean_logit, log_sum_sq_probs = x.mean(-1), (2 * x.log_softmax(-1)).logsumexp(-1)

    without holding the logits, for a loss that you write:

        logprobs, entropy = linear_logprobs(hidden, weight, target, entropy=True)
        (-(advantages * logprobs) - 0.01 * entropy).mean().backward()

    All results but argmax and top-K are differentiable. Under ``torch.no_grad()``, or where neither hidden states nor
    head need a gradient, a call is one matmul and keeps no logits beyond a chunk. With gradients, logits are computed
    again in ``backward``, where the upstream gradient of each token is known: four matmuls. A loss from
    ``chunked_head.losses`` in ``linear_loss`` needs three. If only hidden states take a gradient (a frozen head, as
    under LoRA), each row of their gradient is made in the forward pass and multiplied in ``backward``: two matmuls, or
    three if a second differentiable result is returned (entropy, lse, mean_logit, log_sum_sq_probs). ``plan()`` says
    which way a call takes.

    A token's log-probability is the same in every call and loss: passed as ``old_logprobs`` of a loss, it makes a ratio
    of 1, within 1e-5. With ``deterministic=True`` all calls of this function on the same number of ranks return
    the same bits, so that an inference engine and a trainer can both call it (docs/inference.md).

    Args:
        entropy, lse, argmax: return these too: entropy and lse [...] fp32 in nats, argmax [...] int64.
        mean_logit: return the mean of the logits over the vocabulary too, [...] fp32 (averaged in TRL's
            ``logits/chosen``).
        log_sum_sq_probs: return ``log(sum_v p_v ** 2)`` in nats too, [...] fp32, for the weights of WPO. The negative
            of this result is Rényi's entropy of order 2. The call makes a second softmax, at half the temperature.
        top_k: a number K: return the K largest log-probabilities ``top_k_logprobs`` [..., K] fp32 and their ids
            ``top_k_ids`` [..., K] int64. Not with ``deterministic=True``.
        temperature: divides the logits; a number, or a tensor [...] with one temperature per token, indexed as target.
        mask: [...] bool, false where a token does not count, in addition to ``ignore_index``. All values of a token
            that does not count are 0 (ids too), without gradient.
        kept_ids, kept_offsets: a set of ids for each token. The token's softmax is over these ids, such as those that a
            sampler has kept (top-p, top-k, min-p). The set of token t is
            ``kept_ids[kept_offsets[t] : kept_offsets[t + 1]]``, or without offsets ``kept_ids[t]``, where -1 is no id.
            Tokens are indexed like the target. The token's target is added to its set; an empty set means the whole
            vocabulary. For a token with a set, only the logits of its ids are made. Not with mean_logit and top_k.
        kept_everywhere: True promises that every token that counts has a set. Then no logits of the whole vocabulary
            are made. A broken promise raises on the CPU, and makes results nan on other devices.
        candidates, candidate_bias: as in ``linear_loss``.
        options: as in ``linear_cross_entropy``, but gradients are added to ``accumulate_into`` in backward. With
            ``shift``, values are returned at the target's position.

    Returns:
        ``logprobs`` [...] if nothing else is asked for. Else a named tuple of the results that were asked for, in the
        order ``(logprobs, entropy, lse, mean_logit, log_sum_sq_probs, argmax, top_k_logprobs, top_k_ids)``. Values are
        fp32 (fp64 for fp64 operands).

    Raises:
        TypeError, ValueError, IndexError: as ``linear_cross_entropy``.
    """
    call = call_of(
        "linear_logprobs", hidden, weight, target, options, temperature=temperature, top_k=top_k,
        kept_everywhere=kept_everywhere,
        **outputs_and_batch((entropy, lse, mean_logit, log_sum_sq_probs, argmax), top_k, mask, kept_ids, kept_offsets),
    )  # fmt: skip
    if candidates is not None or candidate_bias is not None:
        return with_candidates(call, candidates, candidate_bias)
    return call


def with_first_planned(name: str, *args: Any, **options: Any) -> Any:
    """The result of the public function ``name``, by a plan that expects a gradient of the first result only."""

    def make_call(*call_args: Any, **call_options: Any) -> Call[Any]:
        return replace(TASKS[name](*call_args, **call_options), unplanned_outputs=RESULT_FLAGS)

    return execute(make_call, args, options)


class LogprobsOfTrainer:
    """``linear_logprobs`` for a trainer that logs entropies and may differentiate them too.

    The plan expects gradients of log-probabilities only, which take two matmuls if the head is frozen. If another
    result gets a gradient, backward computes the logits again, and the plans of later calls expect gradients of all
    results.
    """

    unplanned: tuple[str, ...] = RESULT_FLAGS  # names of results whose gradients the plan does not expect

    def __call__(self, *args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or not self.unplanned:
            return linear_logprobs(*args, **options)
        results = with_first_planned("linear_logprobs", *args, **options)
        for result in results[1:] if isinstance(results, tuple) else ():
            if result.requires_grad:
                result.register_hook(self.note_gradient)
        return results

    def note_gradient(self, gradient: Tensor | None) -> None:
        """A hook of results: makes the plans of later calls expect gradients of all results."""
        if gradient is not None:
            self.unplanned = ()


def outputs_and_batch(
    result_flags: Sequence[bool],
    top_k: int | None,
    mask: Tensor | None,
    kept_ids: Tensor | None,
    kept_offsets: Tensor | None,
) -> dict[str, Any]:
    """Fields of ``Call`` by name: ``outputs``, ``batch``, and ``result``, the function that makes the result.
    ``result_flags``: for each of ``RESULT_FLAGS``, True if the call returns the result."""
    names = output_names(result_flags, top_k)
    fields = {"mask": mask, "kept_ids": kept_ids, "kept_offsets": kept_offsets}
    batch = {name: value for name, value in fields.items() if value is not None}
    return {"outputs": names, "batch": batch, "result": lambda outputs, *_: result_of(outputs, names)}


def output_names(result_flags: Sequence[bool], top_k: int | None = None) -> tuple[str, ...]:
    """Names of the results, in order. ``result_flags``: for each of ``RESULT_FLAGS``, True if the call returns the
    result. TypeError for a flag that is no bool."""
    for name, is_returned in zip(RESULT_FLAGS, result_flags, strict=True):
        flag(name, is_returned)
    return (
        "logprobs",
        *itertools.compress(RESULT_FLAGS, result_flags),
        *(("top_k_logprobs", "top_k_ids") if isinstance(top_k, int) and top_k else ()),
    )


# types of named tuples by the names of their fields, all made at import: torch.compile cannot trace how a type is made
FLAG_COMBINATIONS = itertools.product((False, True), repeat=len(RESULT_FLAGS) + 1)
RESULT_TYPES = {
    names: namedtuple("LogProbs", names)
    for names in [output_names(result_flags, top_k) for *result_flags, top_k in FLAG_COMBINATIONS]
}


def result_of(outputs: Sequence[Tensor], names: tuple[str, ...]) -> Any:
    """The outputs as a named tuple; the output itself if there is only one."""
    return outputs[0] if len(names) == 1 else RESULT_TYPES[names](*outputs)


def in_graph_logprobs(outputs: list[Tensor], arguments: dict[str, Any]) -> Any:
    """The result of ``linear_logprobs`` or ``logits_logprobs`` inside of ``torch.compile``, from the outputs of its
    operator in the graph."""
    names = output_names([arguments.get(name, False) for name in RESULT_FLAGS], arguments.get("top_k"))
    shape, shift = tuple(arguments["target"].shape), arguments.get("shift", 0)
    return result_of(all_at_targets(outputs[: len(names)], shape, shift), names)


IN_GRAPH["linear_logprobs"] = in_graph_logprobs


@operation
def logits_logprobs(
    logits: Tensor,  # [..., vocab]
    target: Tensor,  # [...] int64
    *,
    entropy: bool = False,
    lse: bool = False,
    argmax: bool = False,
    mean_logit: bool = False,
    log_sum_sq_probs: bool = False,
    temperature: float | Tensor = 1.0,  # or [...]
    mask: Tensor | None = None,  # [...] bool
    kept_ids: Tensor | None = None,  # [n] int64, or [..., K]
    kept_offsets: Tensor | None = None,  # [tokens + 1] int64
    kept_everywhere: bool = False,
    **options: Unpack[LogitsOptions],
) -> Call[Any]:
    """The results of ``linear_logprobs`` from logits that exist already. The call reads the logits once, and once more
    in ``backward``. The only tensor of the logits' size that it makes is their gradient.

    Arguments, results and errors are as in ``linear_logprobs``; logits, vocab_size, parallel and backend as in
    ``logits_loss``. There is no ``top_k``: use ``logits.topk``.
    """
    return logits_call_of(
        "logits_logprobs", logits, target, options, temperature=temperature, kept_everywhere=kept_everywhere,
        **outputs_and_batch((entropy, lse, mean_logit, log_sum_sq_probs, argmax), None, mask, kept_ids, kept_offsets),
    )  # fmt: skip


IN_GRAPH["logits_logprobs"] = in_graph_logprobs
