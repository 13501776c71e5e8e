"""Per-token statistics of logits that exist already."""

from typing import Any

from torch import Tensor

from ..call.options import Call
from ..compile.operation import in_graph, operation
from ..parallel import TokenParallel, VocabParallel
from ..parallel.dtensor import local_logits
from .logprobs import in_graph_logprobs, laid_out, output_names


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
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    shift: int = 0,
    vocab_size: int | None = None,
    parallel: VocabParallel | TokenParallel | None = None,
    backend: str | None = None,
) -> Call[Any]:
    """The results of ``linear_logprobs``, from logits that exist already: for a loss of one's own, or per-token values
    of any other. One pass over the logits and one more in ``backward``; no other tensor of their size is made than the
    gradient.

    Args, Returns, Raises: as ``linear_logprobs``, without ``top_k``, which is ``logits.topk``; logits, vocab_size,
    parallel and backend as ``logits_loss``.
    """
    logits, target, vocab_size, parallel = local_logits(logits, target, vocab_size, parallel, inplace=False)
    names = output_names((entropy, lse, mean_logit, log_sum_sq_probs, argmax))
    fields = {"mask": mask, "kept_ids": kept_ids, "kept_offsets": kept_offsets}
    return Call(
        function="logits_logprobs", rows=logits, target=target, ignore_index=ignore_index, softcap=softcap,
        logit_scale=logit_scale, temperature=temperature, shift=shift, backend=backend, vocab_size=vocab_size,
        parallel=parallel, batch={name: value for name, value in fields.items() if value is not None},
        kept_everywhere=kept_everywhere, outputs=names, result=lambda ran: laid_out(ran.outputs, names),
    )  # fmt: skip


in_graph(logits_logprobs)(in_graph_logprobs)
