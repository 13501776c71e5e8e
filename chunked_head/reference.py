"""The idea of this library in plain PyTorch: hidden states to loss, gradients and metrics, without the logits.

A language model ends in ``logits = hidden @ weight.T`` [tokens, vocab] and a loss of them. At 16,384 tokens and 128,256
ids the logits alone take 8.4 GB in float32, and their gradient as much again. Here one chunk of them exists at a time:

1. The head makes the logits of a chunk of tokens and a piece of the vocabulary.
2. Each row of logits is reduced to a few statistics. Statistics of two pieces of the vocabulary merge into statistics
   of both. Pieces may be tiles of a matrix product, slices of the weight, or shards of tensor-parallel ranks.
3. A loss is a function of statistics that returns a number per token. Losses add up.
4. Autograd on these vectors turns any sum of losses into four coefficients per token.
5. Statistics and coefficients turn logits into the gradient of the logits, in the memory of the logits.
6. The loop over chunks adds to the gradients of hidden states, weight and bias, by two more matrix products.

    losses = {"ce": (1.0, reference.cross_entropy), "z": (1e-4, reference.z_loss)}
    result = reference.linear_loss(hidden, weight, target, losses, chunk_tokens=1024, shards=4)
    hidden.grad, weight.grad = result.dhidden, result.dweight

The file imports nothing of the package. The library computes the same results faster, for more losses, as autograd
Functions. The tests compare both in float64. ``python -m chunked_head.reference`` runs a demonstration.
"""

from collections.abc import Callable, Mapping
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor


# ---------------------------------------------------------------- 1. the head
class Head(NamedTuple):
    """``x = softcap tanh(logit_scale (hidden weight^T + bias) / softcap) / temperature``; without softcap no tanh.

    ``softcap``: Gemma 2, arXiv 2408.00118. Fields have the dtype of the logits: float64 for float64 inputs, else 32.
    """

    weight: Tensor  # [vocab, hidden]
    bias: Tensor  # [vocab]
    logit_scale: float
    softcap: float | None

    def logits(self, hidden: Tensor, piece: slice, temperature: Tensor) -> Tensor:
        """Logits ``x`` [chunk, piece] of ``hidden`` [chunk, hidden] for ids in ``piece``; temperature [chunk, 1]."""
        x = self.logit_scale * torch.addmm(self.bias[piece], hidden, self.weight[piece].T)
        return (x if self.softcap is None else self.softcap * torch.tanh(x / self.softcap)) / temperature

    def slope(self, x: Tensor, temperature: Tensor) -> Tensor:
        """Derivatives of logits ``x`` by ``hidden weight^T + bias``, of the shape of ``x`` or [chunk, 1]."""
        slope = self.logit_scale / temperature
        return slope if self.softcap is None else slope * (1 - (x * temperature / self.softcap).square())


# ---------------------------------------------------------------- 2. statistics
class PieceStatistics(NamedTuple):
    """Statistics of each row of logits ``x`` over a piece of the vocabulary, [chunk] each."""

    max: Tensor  # m = max_j x_j
    sum_exp: Tensor  # sum_j e_j, where e_j = exp(x_j - m)
    sum_entr: Tensor  # sum_j -e_j log e_j
    target_logit: Tensor  # x_y where the target y is in the piece, else 0
    weighted_sum: Tensor  # sum_j omega_j x_j with the class weights omega (1 without)
    argmax: Tensor  # int64: the first id of the largest logit


def piece_statistics(x: Tensor, ids: Tensor, target: Tensor, omega: Tensor) -> PieceStatistics:
    """Statistics of logits ``x`` [chunk, piece] of the ids ``ids`` [piece] with class weights ``omega`` [piece]."""
    row_max, column = x.max(-1)
    row_max = row_max.clamp(min=torch.finfo(x.dtype).min)  # a piece of -inf has no probability, rather than nan
    e = torch.exp(x - row_max[:, None])  # exponentials [chunk, piece]
    target_logit = torch.where(ids == target[:, None], x, 0.0).sum(-1)
    return PieceStatistics(row_max, e.sum(-1), torch.special.entr(e).sum(-1), target_logit, x @ omega, ids[column])


def merge(a: PieceStatistics, b: PieceStatistics) -> PieceStatistics:
    """Statistics of the union of two pieces of the vocabulary; ``a`` has the smaller ids. The merge is associative.

    Sums are brought to the larger maximum (online softmax, arXiv 1805.02867). With ``f = exp(m_a - m)`` an exponential
    ``e`` of ``a`` becomes ``f e``, and ``-e log e`` becomes ``-f e log(f e) = f (-e log e) + (-f log f) e``.
    Tensor-parallel ranks send these vectors to each other and merge them: six numbers per token for any vocabulary.
    """
    row_max = torch.maximum(a.max, b.max)
    f, g = torch.exp(a.max - row_max), torch.exp(b.max - row_max)  # factors of the exponentials of a and of b
    entr = torch.special.entr
    return PieceStatistics(
        max=row_max,
        sum_exp=f * a.sum_exp + g * b.sum_exp,
        sum_entr=f * a.sum_entr + entr(f) * a.sum_exp + g * b.sum_entr + entr(g) * b.sum_exp,
        target_logit=a.target_logit + b.target_logit,
        weighted_sum=a.weighted_sum + b.weighted_sum,
        argmax=torch.where(b.max > a.max, b.argmax, a.argmax),
    )


class Statistics(NamedTuple):
    """Statistics of each row of logits over the vocabulary, [chunk] each. Losses and metrics read no logits."""

    logprob: Tensor  # log p_y = x_y - lse, where p = softmax(x)
    lse: Tensor  # log sum_j exp(x_j)
    entropy: Tensor  # -sum_j p_j log p_j, in nats
    weighted_sum: Tensor  # sum_j omega_j x_j
    argmax: Tensor  # int64, no gradient


def statistics_of(merged: PieceStatistics) -> Statistics:
    """Statistics over the vocabulary from the merged statistics of all pieces, by ``p_j = e_j / sum_exp``."""
    log_sum = merged.sum_exp.log()
    logprob = (merged.target_logit - merged.max) - log_sum
    entropy = log_sum + merged.sum_entr / merged.sum_exp
    return Statistics(logprob, merged.max + log_sum, entropy, merged.weighted_sum, merged.argmax)


# ---------------------------------------------------------------- 3. losses and metrics
Batch = Mapping[str, Tensor]  # fields of the chunk's tokens [chunk], "target" among them, and "class_weights" [vocab]
Loss = Callable[[Statistics, Batch], Tensor]  # returns a value per token [chunk], differentiable by the statistics
Mix = Mapping[str, tuple[float, Loss]]  # losses by name, each with its coefficient


def cross_entropy(stats: Statistics, batch: Batch, label_smoothing: float = 0.0) -> Tensor:
    """``-(1 - s) omega_y log p_y - s / vocab sum_j omega_j log p_j`` with class weights omega: ``F.cross_entropy``.

    s is ``label_smoothing`` (arXiv 1512.00567). The sum over j is ``weighted_sum - lse sum_j omega_j``.
    """
    omega = batch["class_weights"]
    values = -omega[batch["target"]] * stats.logprob
    if label_smoothing == 0:
        return values
    return torch.lerp(values, (omega.sum() * stats.lse - stats.weighted_sum) / len(omega), label_smoothing)


def z_loss(stats: Statistics, batch: Batch) -> Tensor:
    """``lse^2``. PaLM (arXiv 2204.02311) adds this loss with a coefficient of 1e-4."""
    return stats.lse.square()


def entropy(stats: Statistics, batch: Batch) -> Tensor:
    """``-sum_j p_j log p_j``: a bonus if its coefficient is negative, a penalty if its coefficient is positive."""
    return stats.entropy


def grpo(stats: Statistics, batch: Batch, clip_low: float = 0.2, clip_high: float = 0.2) -> Tensor:
    """``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` with the ratio ``r = p_y / old p_y``: the clipped surrogate
    of PPO (arXiv 1707.06347) and GRPO (arXiv 2402.03300).

    Fields: ``advantages`` A; ``old_logprobs``. Without ``old_logprobs`` r is 1 and has the gradient of log p_y.
    """
    ratio = (stats.logprob - batch.get("old_logprobs", stats.logprob.detach())).exp()
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * batch["advantages"], clipped_ratio * batch["advantages"])


METRICS: dict[str, Loss] = {  # means over the tokens that count
    "accuracy": lambda stats, batch: (stats.argmax == batch["target"]).to(stats.lse.dtype),
    "entropy": lambda stats, batch: stats.entropy,
    "logprob": lambda stats, batch: stats.logprob,
}


# ---------------------------------------------------------------- 4. coefficients
class Coefficients(NamedTuple):
    """Numbers per token, [chunk] each, that turn a row of logits into its gradient."""

    alpha: Tensor  # of p_j
    eta: Tensor  # of p_j log p_j
    beta: Tensor  # of the target's one-hot vector
    kappa: Tensor  # of the class weights


@torch.enable_grad()
def coefficients(mix: Mix, stats: Statistics, batch: Batch, factor: Tensor) -> tuple[dict[str, Tensor], Coefficients]:
    """Returns the values [chunk] of each loss l by name, and the coefficients of the gradient of
    ``sum_t factor_t sum_l c_l l_t`` over tokens t. ``mix`` has the numbers c_l.
    Autograd makes the derivatives by the statistics. The chain rule multiplies them by ``dlogprob / dx_j = 1[j = y] -
    p_j``, ``dlse / dx_j = p_j``, ``dentropy / dx_j = -p_j (log p_j + entropy)``, ``dweighted_sum / dx_j = omega_j``.
    """
    inputs = [vector.requires_grad_() for vector in stats[:4]]
    values = {name: loss(stats, batch) for name, (_, loss) in mix.items()}
    total = torch.stack([coefficient * values[name] @ factor for name, (coefficient, _) in mix.items()]).sum()
    d_logprob, d_lse, d_entropy, d_sum = torch.autograd.grad(total, inputs, materialize_grads=True, allow_unused=True)
    alpha = d_lse - d_logprob - d_entropy * stats.entropy.detach()
    return values, Coefficients(alpha, eta=-d_entropy, beta=-d_logprob, kappa=-d_sum)


# ---------------------------------------------------------------- 5. the gradient of the logits
def gradient_(x: Tensor, ids: Tensor, target: Tensor, omega: Tensor, merged: PieceStatistics, c: Coefficients) -> None:
    """Writes the gradient of logits over ``x`` [chunk, piece], by a formula that holds for every loss:

    ``dx_j = p_j (alpha + eta log p_j) - beta 1[j = y] - kappa omega_j``
    """
    p = torch.exp(x - merged.max[:, None]) / merged.sum_exp[:, None]
    torch.mul(p, c.alpha[:, None], out=x)
    x += c.eta[:, None] * torch.special.xlogy(p, p)  # p log p, 0 where p is 0
    x -= c.beta[:, None] * (ids == target[:, None])
    kappa = c.kappa[:, None]
    x -= torch.where(kappa == 0, 0.0, kappa * omega)  # a class weight may be infinite where nothing asks for it


# ---------------------------------------------------------------- 6. the loop over chunks
class Result(NamedTuple):
    """Losses, metrics, and the gradients of ``loss``. A gradient has the dtype of its operand."""

    loss: Tensor  # [] the sum of coefficient times part
    parts: dict[str, Tensor]  # [] each: the reduced losses by name
    values: dict[str, Tensor]  # [tokens] each: the losses per token by name, 0 where a token does not count
    metrics: dict[str, Tensor]  # [] each: means by name
    dhidden: Tensor  # [tokens, hidden]
    dweight: Tensor  # [vocab, hidden]
    dbias: Tensor | None  # [vocab]


@torch.no_grad()
def linear_loss(
    hidden: Tensor,  # [tokens, hidden]
    weight: Tensor,  # [vocab, hidden]
    target: Tensor,  # [tokens] int64
    mix: Mix,
    *,
    batch: Batch | None = None,  # fields of the losses [tokens]; "mask" says which tokens count
    bias: Tensor | None = None,  # [vocab]
    class_weights: Tensor | None = None,  # [vocab]
    token_weights: Tensor | None = None,  # [tokens]: factors of values, not of the denominator
    metrics: Mapping[str, Loss] = METRICS,
    ignore_index: int = -100,
    reduction: str = "mean",  # or "sum"
    normalizer: float | None = None,  # the denominator of a mean
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | Tensor = 1.0,  # a number, or [tokens]
    chunk_tokens: int = 1024,
    shards: int = 1,  # pieces of the vocabulary
) -> Result:
    """Reduces each loss l to ``sum_i w_i l_i / D`` over the tokens i that count; adds up the reduced losses times their
    coefficients; makes the gradients of this sum, and the means of metrics. w: ``token_weights``. D: ``normalizer``; if
    None, the sum of the class weights at the targets of these tokens, or 1 if this sum is 0. The loss is 0 if D is 0.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    vocab, chunk_tokens, shards = len(weight), min(chunk_tokens, len(hidden)), min(shards, len(weight))
    w, ids = weight.to(dtype), torch.arange(vocab, device=weight.device)
    head = Head(w, w.new_zeros(vocab) if bias is None else bias.to(dtype), logit_scale, softcap)
    omega = w.new_ones(vocab) if class_weights is None else class_weights.to(dtype)
    unit_weights = w.new_ones(len(hidden))
    fields = {**(batch or {}), "target": target, "temperature": temperature * unit_weights}
    fields["token_weights"] = unit_weights if token_weights is None else token_weights.to(dtype)
    # masks select rows: nothing is read of a token that does not count
    counted_rows = ((target != ignore_index) & fields.pop("mask", unit_weights.bool())).nonzero()[:, 0]
    denominator = float(omega[target[counted_rows]].sum()) or 1.0 if normalizer is None else float(normalizer)
    scale = 1.0 if reduction == "sum" else 1.0 / denominator if denominator else 0.0

    logits = w.new_empty(chunk_tokens, vocab)  # the one large buffer
    pieces = [slice(i * vocab // shards, (i + 1) * vocab // shards) for i in range(shards)]
    dhidden, dweight, dbias = hidden.new_zeros(hidden.shape, dtype=dtype), torch.zeros_like(w), torch.zeros_like(omega)
    values = {name: torch.zeros_like(unit_weights) for name in mix}  # of each loss [tokens]
    metric_sums = {name: unit_weights.new_zeros(()) for name in metrics}
    for rows in counted_rows.split(chunk_tokens) if len(counted_rows) else ():
        h, x = hidden[rows].to(dtype), logits[: len(rows)]  # [chunk, hidden], [chunk, vocab]
        chunk_fields = {name: field[rows] for name, field in fields.items()} | {"class_weights": omega}
        y, t = chunk_fields["target"], chunk_fields["temperature"][:, None]
        statistics_of_pieces = []
        for piece in pieces:  # steps 1 and 2
            x[:, piece] = head.logits(h, piece, t)
            statistics_of_pieces.append(piece_statistics(x[:, piece], ids[piece], y, omega[piece]))
        merged = reduce(merge, statistics_of_pieces)  # over ranks: after an all-gather
        stats = statistics_of(merged)
        chunk_values, c = coefficients(mix, stats, chunk_fields, chunk_fields["token_weights"] * scale)  # steps 3 and 4
        for name, value in chunk_values.items():
            values[name][rows] = value.detach()
        for name, metric in metrics.items():
            metric_sums[name] += metric(stats, chunk_fields).sum()
        for piece in pieces:  # steps 5 and 6
            dx, slope = x[:, piece], head.slope(x[:, piece], t)  # a view of the buffer, [chunk, piece]
            gradient_(dx, ids[piece], y, omega[piece], merged, c)
            dx *= slope
            dhidden.index_add_(0, rows, dx @ w[piece])  # over ranks: an all-reduce
            dweight[piece].addmm_(dx.T, h)
            dbias[piece] += dx.sum(0)

    losses_by_name = {name: (values[name] * fields["token_weights"])[counted_rows].sum() * scale for name in mix}
    loss = torch.stack([coefficient * losses_by_name[name] for name, (coefficient, _) in mix.items()]).sum()
    means = {name: total / max(1, len(counted_rows)) for name, total in metric_sums.items()}
    bias_grad = None if bias is None else dbias.to(bias.dtype)
    return Result(loss, losses_by_name, values, means, dhidden.to(hidden.dtype), dweight.to(weight.dtype), bias_grad)


def demonstration(tokens: int = 2048, width: int = 64, vocab: int = 16384, chunk_tokens: int = 256) -> None:
    """Cross-entropy and an entropy bonus in chunks and shards, compared with full logits and autograd in float64."""
    hidden, weight = (torch.randn(n, width, dtype=torch.float64, requires_grad=True) for n in (tokens, vocab))
    target = torch.randint(vocab, (tokens,))
    mix = {"ce": (1.0, cross_entropy), "bonus": (-0.01, entropy)}
    result = linear_loss(hidden, weight, target, mix, chunk_tokens=chunk_tokens, shards=3)
    logprobs = (hidden @ weight.T).log_softmax(-1)
    full_loss = -logprobs.gather(1, target[:, None]).mean() + 0.01 * (logprobs.exp() * logprobs).sum(-1).mean()
    dhidden, dweight = torch.autograd.grad(full_loss, (hidden, weight))
    for name, exact_value in ("loss", full_loss), ("dhidden", dhidden), ("dweight", dweight):
        print(f"{name}: largest difference {(getattr(result, name) - exact_value).abs().max():.1e}")
    print(", ".join(f"{name} {value:.4f}" for name, value in result.metrics.items()))
    print(f"full logits {tokens * vocab * 8 / 2**20:.0f} MiB, one chunk {chunk_tokens * vocab * 8 / 2**20:.0f} MiB")


if __name__ == "__main__":
    demonstration()
