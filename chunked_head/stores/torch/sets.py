"""Logits of rows that keep sets of columns, in torch operations."""

import torch
from torch import Tensor

from ...core.stats import Coefficients, RowStats
from ...kernels.common.tiles import BEHIND
from ...plan.sizes import slices
from ..operands import Kept, Sets
from ..sets import SetStore
from . import tiles

GATHERED = 1 << 22  # elements of gathered rows at a time


def kept_sets(out: Kept, sets: Sets, target: Tensor, numbers: tuple[Tensor, Tensor]) -> None:
    ids, offsets, bias, length, shift, vocab, everywhere = sets
    for entries in (out.rows, out.columns):
        entries.fill_(-1)
    token, at = (torch.arange(count, device=ids.device) for count in (len(target), len(ids)))
    if offsets is None:
        offsets = torch.cat([token, token[-1:] + 1]) * (len(ids) // len(target))
    wrong = (offsets[0] != 0) | (offsets[1:] < offsets[:-1]).any() | (offsets[-1] > len(ids))
    wrong = wrong | ((at >= offsets[-1]) & (ids != BEHIND)).any()
    offsets = torch.where(wrong, 0, offsets)
    within = token % length
    # tokens that no row predicts go with rows that predict none
    row = token - within + (within - shift) % length
    counts = (within >= shift) & (target[row] >= 0)
    of = (torch.searchsorted(offsets, at, right=True) - 1).clamp(max=len(target) - 1)  # each id's token
    real, known = (at < offsets[of + 1]) & counts[of] & (ids != -1), (ids >= 0) & (ids < vocab)
    has = torch.zeros_like(token).index_add_(0, of, real.long()) > 0
    # the first of equals stays, and the target has another entry
    keys = torch.where(real, of * vocab + ids, torch.iinfo(torch.int64).max).sort(stable=True)
    again, is_target = torch.zeros_like(real), ids == target[row][of]
    again[keys.indices[1:]] = keys.values[1:] == keys.values[:-1]
    first = offsets[:-1] + token
    if bias is not None and out.bias is not None:
        named = torch.where(real & is_target & ~again, first[of], len(out.bias))
        out.bias.copy_(torch.cat([out.bias, bias.new_zeros(1)]).scatter_(0, named, bias)[:-1])
        out.bias[at + of + 1] = bias
    again = again | is_target
    out.starts[row], out.ends[row] = first, torch.where(has, offsets[1:] + token + 1, first)
    out.rows[first], out.columns[first] = row, torch.where(has, target[row], -1).int()
    out.rows[at + of + 1] = row[of]
    out.columns[at + of + 1] = torch.where(real & known & ~again, ids, -1).int()
    wrong = wrong | (real & ~known).any()
    wrong = wrong | (counts & ~has).any() if everywhere else wrong
    for number in numbers:
        number.masked_fill_(wrong, torch.nan)


class TorchSets(SetStore):
    def blocks(self) -> list[slice]:
        """Entries whose gathered rows are some mebibytes."""
        return list(slices(len(self.kept.columns), max(1, GATHERED // max(1, self.head.weight.shape[1]))))

    def make_logits(self) -> None:
        head, columns = self.head, self.kept.columns
        there = columns >= 0
        for at in self.blocks():
            h = self.rows.hidden[self.kept.rows[at]].to(head.weight.dtype).to(self.wide)
            w = head.weight[columns[at].clamp(min=0)].to(self.wide)
            self.logits[at] = (h * w).sum(1)
        if head.bias is not None:
            self.logits += head.bias[columns.clamp(min=0)].to(self.wide)
        tiles.transform_(self.logits.unsqueeze(1), None, head, self.scale)
        self.logits.masked_fill_(~there, -torch.inf)

    def place(self, at: slice) -> Tensor:
        """[n] the row of each entry within ``at``, one behind for entries of other rows and of none."""
        here, rows, _ = self.among(at)
        return torch.where(here, rows, at.stop - at.start)

    def softmax_stats(self, at: slice, out: RowStats) -> None:
        place, count = self.place(at), at.stop - at.start
        has = self.kept.has[at]
        is_target = self.kept.columns == self.rows.target[self.kept.rows]

        def summed(values: Tensor) -> Tensor:
            return values.new_zeros(count + 1).index_add_(0, place, values)[:count]

        def put(name: str, value: Tensor) -> None:
            into = getattr(out, name)
            into.copy_(torch.where(has, value.to(into.dtype), into.new_zeros(()) if self.kept.everywhere else into))

        x = self.logits
        target_logit = summed(torch.where(is_target, x, 0.0))
        put("target_logit", target_logit)
        for suffix, view in zip(("", "2"), self.demand.views, strict=False):
            scaled = x * view.ratio
            top = x.new_full((count + 1,), -torch.inf).scatter_reduce_(0, place, scaled, "amax")
            z = scaled - torch.where(top == -torch.inf, 0.0, top)[place]
            e = z.exp()
            total, top = summed(e), top[:count]
            log_sum = total.log()
            put("lse" + suffix, top + log_sum)
            put("start" + suffix, top)
            put("rest" + suffix, -log_sum)
            put("logprob" + suffix, (target_logit * view.ratio - top) - log_sum)
            if getattr(out, "entropy" + suffix) is not None:
                put("entropy" + suffix, log_sum - summed(torch.where(e > 0, e * z, 0.0)) / total)
        if out.top is not None:
            top = x.new_full((count + 1,), -torch.inf).scatter_reduce_(0, place, x, "amax")
            first = torch.where(x == top[place], self.kept.columns.long(), torch.iinfo(torch.int64).max)
            ids = torch.full_like(top, torch.iinfo(torch.int64).max, dtype=torch.int64)
            ids = ids.scatter_reduce_(0, place, first, "amin")[:count]
            put("top", top[:count])
            put("argmax", torch.where(ids == torch.iinfo(torch.int64).max, 0, ids))

    def softmax_grad(self, at: slice, stats: RowStats, coefficients: Coefficients) -> None:
        place = self.place(at)
        inside, c = place < at.stop - at.start, coefficients
        row = place.clamp(max=max(0, at.stop - at.start - 1))
        grad = torch.zeros_like(self.logits)
        views = ((stats.start, stats.rest, c.alpha, c.eta), (stats.start2, stats.rest2, c.alpha2, c.eta2))
        for view, (start, rest, alpha, eta) in zip(self.demand.views, views, strict=False):
            if alpha is None or start is None or rest is None:
                continue
            log_p = (self.logits * view.ratio - start[row]) + rest[row]
            p = log_p.exp()
            factor = alpha[row] if eta is None else alpha[row] + eta[row] * log_p
            grad += torch.where(p > 0, p * factor, 0.0)
        if c.beta is not None:
            is_target = self.kept.columns == self.rows.target[self.kept.rows]
            grad -= torch.where(is_target, c.beta[row], 0.0)
        grad = grad * tiles.slope(self.logits, self.head, self.scale)
        self.dlogits.copy_(torch.where(inside, grad, self.dlogits))

    def put_dhidden(self, at: slice, out: Tensor) -> None:
        if self.kept.everywhere:
            out.zero_()
        place, count = self.place(at), at.stop - at.start
        made = torch.zeros(count + 1, out.shape[1], dtype=self.wide, device=out.device)
        for part in self.blocks():
            w = self.head.weight[self.kept.columns[part].clamp(min=0)].to(self.wide)
            made.index_add_(0, place[part], w * self.dlogits[part].unsqueeze(1))
        made = made[:count]
        out.copy_(torch.where(self.kept.has[at].unsqueeze(1), made.to(out.dtype), out))

    def put_dweight(self, out: Tensor, hidden: Tensor, dlogits: Tensor, add: bool) -> None:
        if not add:
            out.zero_()
        # equal columns together: each block of entries adds one row for each of its columns
        columns, order = self.kept.columns.long().sort(stable=True)
        for at in self.blocks():
            mine, entries = columns[at].clamp(min=0), order[at]
            place = torch.cat([torch.ones_like(mine[:1]), (mine[1:] != mine[:-1]).long()]).cumsum(0) - 1
            h = hidden[self.kept.rows[entries]].to(self.head.weight.dtype).to(self.wide)
            terms = torch.where(columns[at, None] >= 0, h * dlogits[entries, None], 0.0)
            made = torch.zeros_like(terms).index_add_(0, place, terms)
            out.index_add_(0, torch.zeros_like(mine).scatter_(0, place, mine), made.to(out.dtype))
