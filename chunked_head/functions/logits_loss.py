"""Any loss of logits that exist already, with metrics."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..call.logits_call import check_inplace
from ..call.options import Call
from ..compile.operation import in_graph, operation
from ..core import checks
from ..losses.base import Losses, as_losses
from ..losses.user.closures import Function
from ..metrics import Metric
from ..metrics.values import as_metrics
from ..parallel.dtensor import local_logits
from ..parallel.groups import TokenParallel, VocabParallel
from .loss import LossOutput, in_graph_loss, loss_output


@operation
def logits_loss(
    logits: Tensor,  # [..., vocab]
    target: Tensor | None,  # [...] int64
    loss: Losses | Function,
    *,
    batch: Mapping[str, Tensor] | None = None,
    num_segments: int | None = None,
    kept_everywhere: bool = False,
    metrics: Sequence[Metric] = (),
    reduction: str = "mean",
    normalizer: float | Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | Tensor = 1.0,  # or [...]
    shift: int = 0,
    inplace: bool = False,
    vocab_size: int | None = None,
    parallel: VocabParallel | TokenParallel | None = None,
    backend: str | None = None,
) -> Call[LossOutput]:
    """``linear_loss`` on logits that exist already: any sum of losses, with metrics, from one pass over the logits, and
    their gradient from one more in ``backward``. Same values and gradients as there, with

        x = softcap * tanh(logit_scale * logits.float() / softcap) / temperature

    and no other tensor of the logits' size than the gradient. Neither is there with ``inplace``:

        logits = model(tokens).logits
        out = logits_loss(logits, tokens, losses.cross_entropy() + 1e-4 * losses.z_loss(), shift=1, inplace=True)
        out.loss.backward()

    Args:
        logits: [..., vocab], any leading dimensions; float32, bfloat16, float16, on the torch backend float64. Rows may
            lie anywhere, as in ``logits[:, :-1]``; where their elements are not contiguous, or more than 64 strides
            would be needed to reach all rows, a copy is made.
        target, loss, batch, num_segments, metrics, reduction, normalizer, ignore_index, shift: as in ``linear_loss``;
            of dense teachers ``teacher_logits``. What stands in the logits of tokens that do not count changes nothing.
        softcap, logit_scale, temperature: as above.
        inplace: writes the gradient over the logits. ``backward`` then leaves gradients in ``logits``, runs once, and
            makes autograd raise in whatever else saved the logits for its own backward. Logits must be computed from
            something: a leaf, whose ``.grad`` would be the leaf itself, is refused.
        vocab_size: how many of the columns, the first ones, stand for an id; None: all. What stands in the others
            changes nothing, and their gradient is 0.
        parallel: as in ``linear_loss``. ``VocabParallel``: ``logits`` [..., vocab / ranks] are each rank's own columns
            for the same tokens (Megatron's output layer without its gather), ``teacher_logits`` likewise; one message
            of statistics for the call, one more with a dense teacher, none in ``backward``. ``sequence_sharded`` and
            ``reduce_dhidden=False`` are refused, which are of hidden states. DTensors of ``Shard(-1)`` or
            ``Replicate()`` need no ``parallel``. Ranks that were given different tokens get nan where targets differ;
            without targets nobody would notice.
        backend: ``"triton"`` or ``"torch"``; None: the device's own.

    The upstream gradient is known when gradients are made, and comes in before they are rounded: 16-bit gradients lose
    nothing to ``normalizer`` or to a loss scale.

    Returns:
        ``LossOutput``: ``.loss`` 0-d, fp32 (fp64 for fp64), and as in ``linear_loss``; ``.plan`` is None.

    Inside of ``torch.compile`` the call is an operator, as ``linear_loss`` is; with ``inplace`` or ``parallel`` it
    breaks the graph. Double backward and ``torch.func`` transforms raise.

    Raises:
        TypeError, ValueError: before any work, naming the argument; a missing field names the loss that needs it.
        IndexError: on the CPU, for a target, segment or teacher id out of range; elsewhere loss, metrics and the
            gradient of every token that counts become nan.
    """
    logits, target, vocab_size, parallel = local_logits(logits, target, vocab_size, parallel, inplace)
    checks.check_tensor("logits", logits, optional=False)
    check_inplace(logits, inplace)
    if isinstance(batch, Mapping) and "teacher_hidden" in batch:
        raise ValueError(
            "logits_loss takes a dense teacher as batch['teacher_logits'], got teacher_hidden: pass "
            "F.linear(teacher_hidden, teacher_weight, teacher_bias), or the student's hidden states to linear_loss, "
            "which holds the logits of neither"
        )
    return Call(
        function="logits_loss", rows=logits, target=target, losses=as_losses(loss), metrics=as_metrics(metrics),
        batch=batch, num_segments=num_segments, kept_everywhere=kept_everywhere, reduction=reduction,
        normalizer=normalizer, ignore_index=ignore_index, softcap=softcap, logit_scale=logit_scale,
        temperature=temperature, shift=shift, inplace=inplace, backend=backend, vocab_size=vocab_size,
        parallel=parallel, result=loss_output,
    )  # fmt: skip


in_graph(logits_loss)(in_graph_loss)
