"""Per-token divergences from a dense teacher, differentiable, for a loss of the caller's own."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Unpack

from torch import Tensor

from .. import losses
from ..call.options import Call, HeadOptions, call_of
from ..compile.operation import IN_GRAPH, operation
from ..core.checks import choice, flag, number
from ..core.stats import all_at_targets
from ..losses.base import Losses

KINDS: dict[str, Callable[..., Losses]] = {
    "forward_kl": losses.forward_kl, "reverse_kl": losses.reverse_kl, "jsd": losses.jsd, "tvd": losses.tvd
}  # fmt: skip


class Divergence(NamedTuple):
    divergence: Tensor
    entropy: Tensor


@operation
def linear_divergence(
    hidden: Tensor,  # [..., hidden]
    weight: Tensor,  # [vocab, hidden]
    target: Tensor | None = None,  # [...] int64
    *,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    teacher_logits: Tensor | None = None,  # [..., teacher's vocab]
    teacher_hidden: Tensor | None = None,  # [..., teacher's hidden]
    teacher_weight: Tensor | None = None,  # [teacher's vocab, teacher's hidden]
    teacher_bias: Tensor | None = None,  # [teacher's vocab]
    teacher_logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    teacher_temperature: float | None = None,
    entropy: bool = False,
    temperature: float | Tensor = 1.0,  # or [...]
    mask: Tensor | None = None,  # [...] bool
    **options: Unpack[HeadOptions],
) -> Call[Tensor | Divergence]:
    """The divergence of each token's distribution p from a teacher's q, and the entropy of p. Values and gradients are,
    for ``divergence="forward_kl"``, those of

        x = softcap * tanh(logit_scale * F.linear(hidden, weight, bias).float() / softcap) / temperature
        y = the same, from the teacher's head and options
        q = y.softmax(-1)
        divergence = (q * (y.log_softmax(-1) - x.log_softmax(-1))).sum(-1)
        entropy = -(x.softmax(-1) * x.log_softmax(-1)).sum(-1)

    without the logits of either, for a loss of one's own. A loss that is their mean or sum is ``linear_loss`` with
    ``losses.forward_kl`` and the others: three matmuls and the teacher's one. This function makes the student's and the
    teacher's logits twice, since each token's upstream gradient comes late; once where hidden states alone take a
    gradient and no entropy is returned.

    Args:
        target: token ids, of which only ``ignore_index`` is read: such a token does not count. None: all tokens count,
            except by ``mask``.
        divergence: ``"forward_kl"`` KL(q || p), ``"reverse_kl"`` KL(p || q), ``"jsd"`` or ``"tvd"``, as
            ``chunked_head.losses`` defines them.
        beta: weight of q in the JSD's mixture; 0 is the forward, 1 the reverse divergence.
        teacher_logits, or teacher_hidden with teacher_weight and perhaps teacher_bias: indexed like the hidden states;
            they take no gradient. If the vocabularies differ in size, by padding, p and q are over the first ids, which
            both have (``losses.forward_kl``).
        teacher_logit_scale, teacher_softcap: scale and softcap of the teacher's logits.
        temperature: divides the logits; a number, or a tensor [...] with one per token.
        teacher_temperature: temperature of the teacher, a number; None: ``temperature``.
        entropy: whether to return the student's entropy too, in nats.
        mask: [...] bool, false where a token does not count, in addition to ``ignore_index``. Tokens that do not count
            have value 0 and no gradient.
        The rest: as in ``linear_logprobs``.

    Returns:
        ``divergence`` [...], or with ``entropy=True`` a named tuple ``(divergence, entropy)``, in fp32 (fp64 for fp64
        operands). Both are differentiable.

    Raises:
        TypeError, ValueError, IndexError: as ``linear_loss``.
    """
    loss = divergence_of(divergence, beta, teacher_temperature, teacher_logit_scale, teacher_softcap)
    fields = {
        "teacher_logits": teacher_logits, "teacher_hidden": teacher_hidden, "teacher_weight": teacher_weight,
        "teacher_bias": teacher_bias, "mask": mask,
    }  # fmt: skip
    return call_of(
        "linear_divergence", hidden, weight, target, options, temperature=temperature, losses=loss,
        batch={name: value for name, value in fields.items() if value is not None},
        outputs=("divergence", "entropy") if flag("entropy", entropy) else ("divergence",),
        result=lambda outcome: result_of(outcome.outputs),
    )  # fmt: skip


def divergence_of(
    divergence: str, beta: float, temperature: float | None, logit_scale: float, softcap: float | None
) -> Losses:
    """The loss whose values per token are the divergence. Raises for wrong options."""
    choice("linear_divergence", "divergence", divergence, tuple(KINDS))
    options: dict[str, Any] = {"beta": beta} if divergence == "jsd" else {}
    if divergence != "jsd" and number("linear_divergence", "beta", beta) != 0.5:
        raise ValueError(f'beta goes with divergence="jsd" only, got {beta!r} with {divergence!r}; leave it at 0.5')
    return KINDS[divergence](
        teacher_temperature=temperature, teacher_logit_scale=logit_scale, teacher_softcap=softcap, **options
    )


def result_of(values: Sequence[Tensor]) -> Any:
    """The divergence; or, of two values, a ``Divergence`` with the entropy."""
    return values[0] if len(values) == 1 else Divergence(*values)


def in_graph_divergence(outputs: list[Tensor], arguments: dict[str, Any]) -> Any:
    values = outputs[: 1 + arguments.get("entropy", False)]
    return result_of(all_at_targets(values, tuple(arguments["hidden"].shape[:-1]), arguments.get("shift", 0)))


IN_GRAPH["linear_divergence"] = in_graph_divergence
