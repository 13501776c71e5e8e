"""Statistics of a row of logits beside its softmax: entropy, weighted sum, largest logit, the two largest logits. Two
lists of logits are statistics too: logits of columns that the caller names, and the k largest.

A ``records.Statistic`` holds a statistic's functions in PyTorch; ``kernels/statistics`` has its jit functions. Kernels,
stores, messages between ranks, plans and the losses' arithmetic loop over statistics without naming any.
"""

import functools
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .records import RowBlock, Statistic
from .tiles import ELSEWHERE

LogSums = tuple[Tensor, Tensor, Tensor]  # lse_base, neg_log_sum and lse of a softmax, [rows] each


def entropy_of_rows(block: RowBlock) -> tuple[Tensor, ...]:
    """The entropy ``-sum p log p`` of each row; a probability of 0 adds 0."""
    sum_of_products = torch.where(block.e == 0, 0.0, block.e * block.z).sum(1)
    return (block.total.log() - sum_of_products / block.total,)


def entropy_of_pieces(vectors: Sequence[Tensor], p: Tensor, log_p: Tensor) -> tuple[Tensor, ...]:
    """The entropy of each row, ``sum_r p_r (entropy_r - log p_r)`` over pieces r of probability p_r."""
    return (torch.where(p > 0, p * (vectors[0] - log_p), 0.0).sum(0),)


def entropy_values(vectors: Sequence[Tensor], log_sums: LogSums, ratio: float, columns: int) -> dict[str, Tensor]:
    return {"entropy": vectors[0]}


def entropy_slopes(grad: Tensor, entropy: Tensor, ratio: float) -> dict[str, Tensor]:
    """Coefficients for the entropy's derivative, ``d entropy / d x_j = -ratio p_j (log p_j + entropy)``."""
    scaled_grad = ratio * grad
    return {"alpha": -scaled_grad * entropy, "eta": -scaled_grad}


def weighted_sum_of_rows(block: RowBlock) -> tuple[Tensor, ...]:
    """The weighted sum ``sum_j omega_j x_j`` of each row. ``omega``: the class weights; 1 without class weights."""
    weights = block.class_weights
    # masked_fill, so that a logit of -inf with weight 0 gives 0 and not nan
    weighted_logits = block.x if weights is None else (block.x * weights).masked_fill_(weights == 0, 0.0)
    return (weighted_logits.sum(1),)


def sum_of_pieces(vectors: Sequence[Tensor], *_: Tensor) -> tuple[Tensor, ...]:
    return (vectors[0].sum(0),)


def weighted_sum_values(vectors: Sequence[Tensor], log_sums: LogSums, ratio: float, columns: int) -> dict[str, Tensor]:
    return {"weighted_sum": vectors[0] * ratio, "mean_logit": vectors[0] * (ratio / columns)}


def weighted_sum_slopes(grad: Tensor, weighted_sum: Tensor, ratio: float) -> dict[str, Tensor]:
    """The coefficient for the weighted sum's derivative, ``d weighted_sum / d x_j = omega_j`` at any ratio."""
    return {"kappa": -grad}


def top_of_rows(block: RowBlock) -> tuple[Tensor, ...]:
    """Returns the largest logit of each row and the first column with this logit."""
    if block.columns is None:
        return block.top, block.x.argmax(1)
    return block.top, torch.where(block.x == block.top[:, None], block.columns, ELSEWHERE).amin(1)


def top_of_pieces(vectors: Sequence[Tensor], p: Tensor, log_p: Tensor) -> tuple[Tensor, ...]:
    logits, ids = vectors
    largest = logits.amax(0)
    first_ids = torch.where(logits == largest, ids, torch.inf).amin(0)  # of equal logits the first column
    return largest, torch.where(first_ids.isinf(), ids[0], first_ids)


def top_values(vectors: Sequence[Tensor], log_sums: LogSums, ratio: float, columns: int) -> dict[str, Tensor]:
    (largest, ids), (lse_base, neg_log_sum, _) = vectors, log_sums
    return {"argmax": ids.to(torch.int64), "top_logprob": ((largest * ratio - lse_base) + neg_log_sum).detach()}


ENTROPY = Statistic(
    "entropy",
    ("entropy",),
    ("entropy",),
    entropy_of_rows,
    entropy_of_pieces,
    entropy_values,
    entropy_slopes,
    of_softmax=True,
)
WEIGHTED_SUM = Statistic(
    "weighted_sum",
    ("weighted_sum",),
    ("weighted_sum", "mean_logit"),
    weighted_sum_of_rows,
    sum_of_pieces,
    weighted_sum_values,
    weighted_sum_slopes,
    feature_over_vocabulary="the mean logit, or label smoothing",
)


def runner_up_of_rows(block: RowBlock) -> tuple[Tensor, ...]:
    """Returns the two largest logits of each row, which are equal where two columns have the largest."""
    largest_two = block.x.topk(min(2, block.x.shape[1])).values
    return block.top, largest_two[:, 1] if largest_two.shape[1] > 1 else torch.full_like(block.top, -torch.inf)


def runner_up_of_pieces(vectors: Sequence[Tensor], p: Tensor, log_p: Tensor) -> tuple[Tensor, ...]:
    return torch.cat(list(vectors)).topk(2, 0).values.unbind()


def runner_up_values(vectors: Sequence[Tensor], log_sums: LogSums, ratio: float, columns: int) -> dict[str, Tensor]:
    (_, runner_up), (lse_base, neg_log_sum, _) = vectors, log_sums
    return {"runner_up_logprob": ((runner_up * ratio - lse_base) + neg_log_sum).detach()}


TOP = Statistic(
    "top", ("top", "argmax"), ("argmax", "top_logprob"), top_of_rows, top_of_pieces, top_values, ids=("argmax",),
)  # fmt: skip
RUNNER_UP = Statistic(
    "runner_up", ("largest", "runner_up"), ("runner_up_logprob",), runner_up_of_rows, runner_up_of_pieces,
    runner_up_values, file="top",
)  # fmt: skip


def column_values(vectors: Sequence[Tensor], log_sums: LogSums, ratio: float, columns: int) -> dict[str, Tensor]:
    x, (lse_base, neg_log_sum, lse) = (vectors[0] * ratio).t(), log_sums
    # the value without the rounding of lse, with its gradient
    return {"topk_logprobs": ((x - lse_base) + neg_log_sum + (lse.detach() - lse)).t()}


def column_slopes(grad: Tensor, logits: Tensor, ratio: float) -> dict[str, Tensor]:
    return {"columns": grad.contiguous()}  # kernels read it contiguous


def top_k_of_pieces(vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    logits, ids = (vector.transpose(0, 1).flatten(1) for vector in vectors)
    largest, indices = logits.topk(vectors[0].shape[2])
    return largest, ids.gather(1, indices)


def top_k_values(vectors: Sequence[Tensor], log_sums: LogSums, ratio: float, columns: int) -> dict[str, Tensor]:
    (logits, ids), (lse_base, neg_log_sum, _) = vectors, log_sums
    return {"top_k_logprobs": (logits - lse_base[:, None]) + neg_log_sum[:, None], "top_k_ids": ids}


COLUMNS = Statistic(
    "columns", ("column_logits",), ("topk_logprobs",), None, sum_of_pieces, column_values, column_slopes,
    feature_over_vocabulary="logits of a teacher's ids",
)  # fmt: skip
TOP_K = Statistic(
    "top_k", ("top_k_logits", "top_k_ids"), ("top_k_logprobs", "top_k_ids"), None, top_k_of_pieces, top_k_values,
    ids=("top_k_ids",), feature_over_vocabulary="top_k",
)  # fmt: skip
STATISTICS = ENTROPY, WEIGHTED_SUM, TOP, RUNNER_UP  # in the order in which ranks send them
LISTS = COLUMNS, TOP_K
OF_LOSSES = *STATISTICS, COLUMNS  # statistics that losses and metrics may read
WORDS = tuple([word for s in OF_LOSSES for word in s.words])  # names of the values that losses and metrics may read
# names of values without a derivative
WITHOUT_SLOPE = frozenset(word for s in (*STATISTICS, *LISTS) for word in s.words if s.slopes is None)


@functools.cache
def statistics_at(view: int) -> tuple[Statistic, ...]:
    """The statistics that losses may read at a view. Statistics that all softmaxes share are read at view 0 only."""
    return tuple([statistic for statistic in OF_LOSSES if statistic.of_softmax or view == 0])


def lists_of(words: Container[str], columns: int, top_k: int) -> tuple[Statistic, ...]:
    """The lists with a value in ``words``, the names of the values that are read. ``columns``, ``top_k``: the widths of
    COLUMNS and TOP_K; 0 for no such list."""
    lists = [replace(s, width=width) for s, width in zip(LISTS, (columns, top_k), strict=True)]
    return tuple([s for s in lists if s.width and any(word in words for word in s.words)])


def needed(words: Iterable[tuple[str, int]], views: int) -> tuple[tuple[Statistic, ...], ...]:
    """For each view the statistics that are needed, without lists. ``words``: pairs of a value's name and the view at
    which the value is read. ``views``: number of softmaxes."""
    words_at_views = set(words)
    all_words = {word for word, _ in words_at_views}

    def is_needed(statistic: Statistic, view: int) -> bool:
        if not statistic.of_softmax:
            return not all_words.isdisjoint(statistic.words)
        return any((word, view) in words_at_views for word in statistic.words)

    def needed_at(view: int) -> tuple[Statistic, ...]:
        return tuple([s for s in statistics_at(view) if s not in LISTS and is_needed(s, view)])

    return tuple(map(needed_at, range(views)))
