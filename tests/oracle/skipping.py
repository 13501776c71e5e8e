"""Skipped tiles in plain PyTorch: the gradient of the logits that the products of ``skip_tolerance`` stand for."""

import torch
from torch import Tensor

from chunked_head.skipping import ERROR_PER_MISSED, LEAST_WORTH


def skipped_dlogits(
    logits: Tensor,  # [tokens, vocab]
    weight: Tensor,  # [vocab, hidden]
    target: Tensor,  # [tokens] int64, -1 where a token does not count
    alpha: Tensor,  # [tokens]
    beta: Tensor,  # [tokens]
    tolerance: float,
    tile: tuple[int, int],  # rows and columns
    step: int,  # one row in so many says how a strip's mass lies in it
) -> tuple[Tensor, Tensor, Tensor]:
    """Of one chunk: ``dlogits = alpha p - beta onehot`` with each skipped tile's rows spread over its columns in one
    and the same shares [tokens, vocab]; which tiles are kept [row blocks, strips]; the mass that moved [tokens]."""
    counts = target >= 0
    probability = torch.where(counts[:, None], logits.softmax(-1), 0.0)
    dlogits = torch.zeros_like(probability)
    row = counts.nonzero()[:, 0]
    at_target = alpha * probability.gather(1, target.clamp(min=0)[:, None])[:, 0] - beta
    apart = probability.clone()
    apart[row, target[row]] = 0.0  # the target's column is no part of any tile
    limit = (tolerance / ERROR_PER_MISSED) ** 2 * torch.where(counts, at_target, 0.0).square().sum()
    blocks, strips = apart[:, :1].split(tile[0]), weight.split(tile[1])
    limit = limit / (len(blocks) * len(strips))
    kept = torch.zeros(len(blocks), len(strips), dtype=torch.bool, device=logits.device)
    worth = strip_worth(weight, tile[1])
    for strip in range(len(strips)):
        columns = slice(strip * tile[1], strip * tile[1] + len(strips[strip]))
        own = apart[:, columns]
        for block in range(len(blocks)):
            rows = slice(block * tile[0], block * tile[0] + len(blocks[block]))
            kept[block, strip] = worth[strip] * (alpha[rows] * own[rows].sum(1)).square().sum() > limit
        skipped = ~kept[:, strip].repeat_interleave(tile[0])[: len(own)]
        seen = own[::step][skipped[::step]] * alpha[::step][skipped[::step], None].abs()
        total = seen.sum()
        share = seen.sum(0) / total if total > 0 else torch.full_like(own[0], 1.0 / own.shape[1])
        dlogits[:, columns] = alpha[:, None] * torch.where(skipped[:, None], own.sum(1, keepdim=True) * share, own)
    dlogits[row, target[row]] += at_target[row]
    moved = (~kept).to(apart.dtype).repeat_interleave(tile[0], 0)[: len(apart)]
    masses = torch.stack([part.sum(1) for part in apart.split(tile[1], 1)], 1)
    return torch.where(counts[:, None], dlogits, 0.0), kept, (moved * masses).sum(1)


def strip_worth(weight: Tensor, columns: int) -> Tensor:
    """How far each strip's rows lie around their mean, squared, as a share of what all of them do around theirs."""
    whole = (weight - weight.mean(0)).square().sum(1).mean()
    within = torch.stack([(part - part.mean(0)).square().sum(1).mean() for part in weight.split(columns)])
    return (within / whole).clamp(min=LEAST_WORTH)
