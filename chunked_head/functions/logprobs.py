"""Per-token statistics of a linear head or of logits, differentiable, for a loss of the caller's own."""

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

FLAGS = ("entropy", "lse", "mean_logit", "log_sum_sq_probs", "argmax")  # results that are returned on demand, in order


class PerTokenOptions(HeadOptions, total=False):
    """Keywords of ``linear_logprobs`` but those that name its results."""

    temperature: float | Tensor
    mask: Tensor | None
    kept_ids: Tensor | None
    kept_offsets: Tensor | None
    kept_everywhere: bool
    candidates: Tensor | None
    candidate_bias: Tensor | None


if TYPE_CHECKING:

    class LogProbs(tuple[Tensor, ...]):
        """Named tuple of the results that a call returns."""

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
    """Log-probabilities of targets, and what else is asked for. Same values and gradients as

        x = softcap * tanh(logit_scale * F.linear(hidden, weight, bias).float() / softcap) / temperature
        logprobs = x.log_softmax(-1).gather(-1, target[..., None])[..., 0]
        entropy = -(x.softmax(-1) * x.log_softmax(-1)).sum(-1)
        lse, argmax, top_k = x.logsumexp(-1), x.argmax(-1), x.log_softmax(-1).topk(k)
        mean_logit, log_sum_sq_probs = x.mean(-1), (2 * x.log_softmax(-1)).logsumexp(-1)

    without the logits, for a loss of one's own:

        logprobs, entropy = linear_logprobs(hidden, weight, target, entropy=True)
        (-(advantages * logprobs) - 0.01 * entropy).mean().backward()

    All results but argmax and top-K are differentiable. Under ``torch.no_grad()``, or where neither hidden states nor
    head need a gradient, a call is one matmul and keeps no logits beyond a chunk. With gradients, logits are computed
    again in ``backward``, where the upstream gradient of each token is known: four matmuls. A loss from
    ``chunked_head.losses`` in ``linear_loss`` needs three. Where hidden states alone take a gradient (a frozen head, as
    under LoRA), each row of it is made in the forward pass and multiplied in ``backward``: two matmuls, and three with
    another result that is differentiable (entropy, lse, mean_logit, log_sum_sq_probs). ``plan()`` says which.

    A token's log-probability is the same in every call and under every loss: given back as ``old_logprobs``, it makes
    a ratio of 1, within 1e-5. With ``deterministic=True`` all calls of this function on as many ranks give the same
    bits: docs/inference.md says so for an inference engine and a trainer that both call it.

    Args:
        entropy, lse, argmax: whether to return these too, [...] fp32 in nats, int64 for argmax.
        mean_logit: mean of the logits over the vocabulary, [...] fp32 (TRL's ``logits/chosen`` averages it).
        log_sum_sq_probs: ``log(sum_v p_v ** 2)`` in nats, [...] fp32: WPO's weight, less a sign Rényi's entropy of
            order 2. It takes a second softmax, at half the temperature.
        top_k: K largest log-probabilities and their ids: ``top_k_logprobs`` [..., K] fp32, ``top_k_ids`` [..., K].
            Not with ``deterministic=True``.
        temperature: divides the logits; a number, or a tensor [...] with one per token, indexed like the target.
        mask: [...] bool, tokens that count, besides ``ignore_index``. The others have 0 everywhere (ids too), without
            gradient.
        kept_ids, kept_offsets: sets of ids that the softmaxes of tokens are over, as samplers keep them (top-p, top-k,
            min-p): token t's are ``kept_ids[kept_offsets[t] : kept_offsets[t + 1]]``, or without offsets
            ``kept_ids[t]``, -1 for none. They are indexed like the target, which is added where it is missing; a token
            without ids has the whole vocabulary. Of tokens with a set no logits are made but those of its ids. Not with
            mean_logit and top_k.
        kept_everywhere: a promise that every token that counts has a set: then nothing is done over the vocabulary. A
            broken promise raises on the CPU, and gives nan elsewhere.
        candidates, candidate_bias: as in ``linear_loss``.
        The rest: as in ``linear_cross_entropy``, ``accumulate_into`` added to in backward; values stand at their
            target's place under ``shift``.

    Returns:
        ``logprobs`` [...] alone, or a named tuple ``(logprobs, entropy, lse, mean_logit, log_sum_sq_probs, argmax,
        top_k_logprobs, top_k_ids)`` of those that were asked for, in this order; fp32 (fp64 for fp64).

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
    """The result of a public function whose plan counts on no gradient but that of the first values per token."""
    return execute(lambda *a, **o: replace(TASKS[name](*a, **o), unplanned=FLAGS), args, options)


class LogprobsOfTrainer:
    """``linear_logprobs`` for a trainer that logs entropies and may differentiate them too.

    The plan counts on gradients of log-probabilities alone, which take two products where the head is frozen. A
    gradient of another result computes the logits again, and from then on the plan counts on it.
    """

    unplanned: tuple[str, ...] = FLAGS

    def __call__(self, *args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or not self.unplanned:
            return linear_logprobs(*args, **options)
        results = with_first_planned("linear_logprobs", *args, **options)
        for value in results[1:] if isinstance(results, tuple) else ():
            if value.requires_grad:
                value.register_hook(self.note_gradient)
        return results

    def note_gradient(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            self.unplanned = ()


def outputs_and_batch(
    flags: Sequence[bool], top_k: int | None, mask: Tensor | None, kept_ids: Tensor | None, kept_offsets: Tensor | None
) -> dict[str, Any]:
    """Arguments of a call: its outputs, the batch, and the function that makes the result."""
    names, fields = output_names(flags, top_k), {"mask": mask, "kept_ids": kept_ids, "kept_offsets": kept_offsets}
    batch = {name: value for name, value in fields.items() if value is not None}
    return {"outputs": names, "batch": batch, "result": lambda outcome: result_of(outcome.outputs, names)}


def output_names(flags: Sequence[bool], top_k: int | None = None) -> tuple[str, ...]:
    """Names of the results, in order; those that take a gradient come first. ``flags``: by ``FLAGS``."""
    for name, value in zip(FLAGS, flags, strict=True):
        flag(name, value)
    return (
        "logprobs",
        *itertools.compress(FLAGS, flags),
        *(("top_k_logprobs", "top_k_ids") if isinstance(top_k, int) and top_k else ()),
    )


# by names of the results; all are made at import, since torch.compile cannot trace the making of a type
CHOICES = itertools.product((False, True), repeat=len(FLAGS) + 1)
RESULT_TYPES = {
    names: namedtuple("LogProbs", names) for names in [output_names(flags, top_k) for *flags, top_k in CHOICES]
}


def result_of(values: Sequence[Tensor], names: tuple[str, ...]) -> Any:
    """One value alone, or several as a named tuple."""
    return values[0] if len(names) == 1 else RESULT_TYPES[names](*values)


def in_graph_logprobs(outputs: list[Tensor], arguments: dict[str, Any]) -> Any:
    names = output_names([arguments.get(name, False) for name in FLAGS], arguments.get("top_k"))
    values = all_at_targets(outputs[: len(names)], tuple(arguments["target"].shape), arguments.get("shift", 0))
    return result_of(values, names)


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
    """The results of ``linear_logprobs``, from logits that exist already: for a loss of one's own, or per-token values
    of any other. One pass over the logits and one more in ``backward``; no other tensor of their size is made than the
    gradient.

    Args, Returns, Raises: as ``linear_logprobs``, without ``top_k``, which is ``logits.topk``; logits, vocab_size,
    parallel and backend as ``logits_loss``.
    """
    return logits_call_of(
        "logits_logprobs", logits, target, options, temperature=temperature, kept_everywhere=kept_everywhere,
        **outputs_and_batch((entropy, lse, mean_logit, log_sum_sq_probs, argmax), None, mask, kept_ids, kept_offsets),
    )  # fmt: skip


IN_GRAPH["logits_logprobs"] = in_graph_logprobs
