"""The fast road with tiles of the gradients' products left out where the softmax hardly has anything."""

import torch
from torch import Tensor

from ..gradients import Gradients
from ..kernels import launch, launch_skip
from ..matmul import add_dhidden, add_dweight
from ..plans import Plan
from ..skipping import ERROR_PER_MISSED, LEAST_WORTH, Skipped
from ..stats import Head, Rows, RowStats
from .triton_relative import FastSession, counted_of


class SkipSession(FastSession):
    """With E split into kept tiles K and the masses M of all others, [rows, strips], and each strip's mean row of the
    weight, W' = S @ weight with shares S that add up to 1,

        dhidden = softmax_factor * (K @ weight + M @ W') + target_factor * weight[target]
        dweight = K.T @ (softmax_factor * hidden) + S.T @ (M.T @ (softmax_factor * hidden)) + target's rows

    No mass is lost: a row of the gradient of the logits that is meant adds up to what it should.
    """

    def __init__(self, head: Head, plan: Plan):
        super().__init__(head, plan)
        assert plan.sizes.skip is not None
        self.chunk_tokens = plan.chunk_tokens
        self.missed = plan.sizes.skip / ERROR_PER_MISSED
        self.worth = launch_skip.strip_spread(head.weight, self.strip_count).clamp_(min=LEAST_WORTH)
        # of the call so far: probability moved, tokens, tiles kept, tiles
        self.totals = torch.zeros(4, dtype=torch.float32, device=head.weight.device)

    def put_gradients(
        self, at: slice, rows: Rows, stats: RowStats, exponentials: Tensor, factors: launch.Factors, grads: Gradients
    ) -> None:
        weight, counted, hidden = self.head.weight, counted_of(rows), self.sizes.hidden
        assert factors.softmax is not None and factors.at_target is not None
        tiles = launch_skip.choose_tiles(
            self.stored_strips, self.level, stats.target_logit, stats.start, stats.rest, factors.softmax,
            factors.at_target, exponentials.dtype, self.worth, self.missed, counted,
        )  # fmt: skip
        launch_skip.add_totals(self.totals, tiles, rows.target, counted)
        share, mean = launch_skip.strip_means(exponentials, weight, factors.softmax, tiles, counted)
        if grads.hidden is not None:
            count = len(rows.target)
            parts = self.part_sums.numel() // (self.chunk_tokens * hidden)
            partial = self.part_sums[: parts * count * hidden].view(parts, count, hidden)
            add_dhidden(tiles.moved.t(), mean, partial[-1], first=True)
            where = grads.hidden_rows(at, rows.order)
            launch_skip.skip_dhidden(where, partial, exponentials, weight, tiles, factors, rows.order, counted)
            grads.hidden_done(at, rows.order)
        if grads.weight is not None:
            scaled = rows.hidden  # in place: nobody reads the chunk's hidden states after this
            launch.copy_rows(scaled, scaled, rows.target, factors.softmax)
            moved = torch.empty(mean.shape[0], hidden, dtype=torch.float32, device=weight.device)
            add_dweight(tiles.moved.t(), scaled, moved, first=True)
            launch_skip.skip_dweight(
                grads.weight, exponentials, scaled, share, moved, tiles, grads.stores(at.start == 0)
            )  # fmt: skip

    def skipped(self) -> Skipped:
        moved, tokens, kept, tiles = self.totals.unbind()
        return Skipped(moved, tokens, kept, tiles)
