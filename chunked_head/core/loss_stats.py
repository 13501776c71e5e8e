"""The statistics as a loss or metric reads them: attributes, each [n], at the loss's temperature."""

from collections.abc import Mapping

from torch import Tensor


class Stats:
    """Statistics of tokens' logits ``x`` at one temperature, fp32 (fp64 for fp64), natural logarithms.

    ``logprob``: log-probability of the target. ``lse``: ``logsumexp(x)``. ``entropy``: of the softmax. ``mean_logit``:
    mean of ``x`` over the vocabulary. ``argmax``: first id of the largest logit, int64. ``top_logprob``: its
    log-probability, without gradient. ``topk_logprobs`` [n, K]: log-probabilities of ``teacher_ids``.
    ``weighted_sum``: ``sum(class_weights * x)``. With a dense teacher ``q``: ``forward_kl`` KL(q || p), ``reverse_kl``
    KL(p || q), ``jsd``, ``tvd``, ``overlap`` sum min(p, q), and ``teacher_entropy`` and ``teacher_argmax`` without
    gradient. All but these two, argmax and top_logprob are differentiable. What a loss did not say it ``needs`` is not
    there.
    """

    def __init__(self, values: Mapping[str, Tensor]):
        self.values = values

    def __getattr__(self, name: str) -> Tensor:
        values = self.__dict__.get("values", {})
        if name not in values:
            raise AttributeError(
                f"statistic {name!r} was not asked for; there are {', '.join(values)}. What a loss or metric reads in "
                f"some calls alone it declares: losses.custom(needs=[{name!r}])"
            )
        return values[name]
