"""The same statistics of logits that exist already, for heads whose own forward computes them."""

from typing import Any

from torch import Tensor

from .asked import LogitsOptions, ask, check
from .call import stats_objective
from .graph.breaks import breaks_graph
from .logits_call import apply
from .logprobs import laid_out, wanted
from .losses.base import Losses


@breaks_graph
def logits_logprobs(
    logits: Tensor,  # [..., vocab]
    target: Tensor,  # [...] int64
    *,
    entropy: bool = False,
    log_sum_sq_probs: bool = False,
    mean_logit: bool = False,
    argmax: bool = False,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    backend: str | None = None,
) -> Any:
    """What ``linear_logprobs`` returns, from one pass over the logits and one more over them in ``backward``; no other
    tensor of their size is made than the gradient.

    Args, Returns, Raises: as ``linear_logprobs``; logits and backend as ``logits_loss``.
    """
    options = LogitsOptions(logits, target, -100, softcap, logit_scale, temperature, 0, backend)
    asked = ask(check(options, options.check(), Losses(())))
    demand, names, differentiable = wanted(entropy, False, mean_logit, log_sum_sq_probs, argmax, None)
    outputs, _ = apply(asked, stats_objective(asked, demand, names, differentiable), inplace=False)
    return laid_out(outputs, names, target, 0)
