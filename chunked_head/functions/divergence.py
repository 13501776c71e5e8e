"""Divergences per token from a dense teacher, differentiable, for a loss that the caller writes."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Unpack

from torch import Tensor

from .. import losses
from ..call.options import Call, HeadOptions, call_of
from ..compile.operation import IN_GRAPH, operation
from ..core.checks import choice, flag, number
from ..core.stats import all_at_targets
from ..losses.base import Losses

# functions of ``chunked_head.losses`` by the value of ``divergence``
LOSS_FUNCTIONS: dict[str, Callable[..., Losses]] = {
    "forward_kl": losses.forward_kl, "reverse_kl": losses.reverse_kl, "jsd": losses.jsd, "tvd": losses.tvd
}  # fmt: skip


class Divergence(NamedTuple):
    """Results of ``linear_divergence`` with ``entropy=True``."""

    divergence: Tensor  # [...] in nats
    entropy: Tensor  # [...] of the student, in nats


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
        y = the logits x of the teacher, from the teacher's hidden states, head and options
        q = y.softmax(-1)
        divergence = (q * (y.log_softmax(-1) - x.log_softmax(-1))).sum(-1)
        entropy = -(x.softmax(-1) * x.log_softmax(-1)).sum(-1)

    without x and y in memory, for a loss that you write. For a loss that is the mean or the sum of divergences,
    ``linear_loss`` with ``losses.forward_kl``, ``reverse_kl``, ``jsd`` or ``tvd`` is faster: it takes three matmuls,
    and a fourth for the teacher. This function makes the logits of student and teacher twice, since upstream gradients
    of tokens are known in ``backward`` only; or once, if only hidden states take a gradient and no entropy is returned.

    Args:
        target: token ids. A token whose target is ``ignore_index`` does not count; other ids are not read. None:
            ``mask`` alone says which tokens count.
        divergence: ``"forward_kl"`` KL(q || p), ``"reverse_kl"`` KL(p || q), ``"jsd"`` or ``"tvd"``, as
            ``chunked_head.losses`` defines them.
        beta: weight of q in the JSD's mixture; 0 is the forward, 1 the reverse divergence.
        teacher_logits: the teacher's logits, indexed like the hidden states. They take no gradient. If the vocabularies
            differ in size, by padding, p and q are over the first ids, which both have (``losses.forward_kl``).
        teacher_hidden, teacher_weight, teacher_bias: in the place of ``teacher_logits`` the teacher's hidden states
            and its head, with a bias or without. They take no gradient.
        teacher_logit_scale, teacher_softcap: scale and softcap of the teacher's logits.
        temperature: divides the logits: a number, or a tensor [...] with a temperature for each token.
        teacher_temperature: temperature of the teacher, a number; None: ``temperature``.
        entropy: return the student's entropy too, in nats.
        mask: [...] bool, false where a token does not count, in addition to ``ignore_index``. Tokens that do not count
            have value 0 and no gradient.
        options: as in ``linear_logprobs``.

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
        result=lambda outputs, *_: result_of(outputs),
    )  # fmt: skip


def divergence_of(
    divergence: str, beta: float, temperature: float | None, logit_scale: float, softcap: float | None
) -> Losses:
    """The loss whose value for a token is the divergence. TypeError or ValueError for wrong options."""
    choice("linear_divergence", "divergence", divergence, tuple(LOSS_FUNCTIONS))
    options: dict[str, Any] = {"beta": beta} if divergence == "jsd" else {}
    if divergence != "jsd" and number("linear_divergence", "beta", beta) != 0.5:
        raise ValueError(f'beta goes with divergence="jsd" only, got {beta!r} with {divergence!r}; leave it at 0.5')
    return LOSS_FUNCTIONS[divergence](
        teacher_temperature=temperature, teacher_logit_scale=logit_scale, teacher_softcap=softcap, **options
    )


def result_of(outputs: Sequence[Tensor]) -> Any:
    """The result of ``linear_divergence``: the divergence itself if it is the only output, else a ``Divergence``."""
    return outputs[0] if len(outputs) == 1 else Divergence(*outputs)


def in_graph_divergence(outputs: list[Tensor], arguments: dict[str, Any]) -> Any:
    """The result of ``linear_divergence`` inside of ``torch.compile``, from the outputs of its operator."""
    requested_outputs, shape = outputs[: 1 + arguments.get("entropy", False)], tuple(arguments["hidden"].shape[:-1])
    return result_of(all_at_targets(requested_outputs, shape, arguments.get("shift", 0)))


IN_GRAPH["linear_divergence"] = in_graph_divergence
