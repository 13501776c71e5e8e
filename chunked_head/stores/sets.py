"""The store of rows whose softmax is over a set of columns: gathered rows of the weight in the place of matmuls.

A row's set is some entries, one for each of its columns (``core.stats.Kept``); a vector of n numbers has one for each.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from ..core.stats import Coefficients, Demand, RowStats
from ..kernels.common.tiles import BEHIND
from ..plan.sizes import LOOP, SWEEP, Buffer, Phase, Sizes, slices
from .gradients import Gradients
from .operands import Head, Kept, Rows, Sets
from .store import Store
from .torch_store import scratch_buffers, slope, softmax_term, transform_, wide_dtype

GATHERED = 1 << 22  # elements of gathered rows at a time
NOWHERE = {"start": torch.inf, "rest": 0.0, "start2": torch.inf, "rest2": 0.0}  # a softmax whose probabilities are 0


class SetStore(Store):
    """Logits of the columns that rows keep [n] fp32 (fp64), of all rows of a call, made with the store. Statistics and
    gradients of rows without a set are left as they are. The functions in torch operations, which a backend may
    replace, are ``make_logits``, ``softmax_stats``, ``softmax_grad`` and ``add_rows``."""

    name = "kept"
    description = "none: every token keeps a set of ids"
    multiplies = False

    @classmethod
    def buffers(cls, sizes: Sizes, rows: int, last: Phase, stored: bool) -> Iterator[Buffer]:
        yield from scratch_buffers(sizes, rows, sizes.vocab, SWEEP, last)

    @classmethod
    def tile_buffers(cls, sizes: Sizes, rows: int, columns: int) -> Iterator[Buffer]:
        yield from scratch_buffers(sizes, rows, columns, LOOP, LOOP)

    def __init__(
        self,
        head: Head,
        kept: Kept,
        rows: Rows,
        demand: Demand,
        exist: bool = False,
        gradient: Tensor | None = None,
    ):
        """``rows``: of the call, as given; hidden states, or logits that ``exist``, whose ``gradient`` is stored."""
        self.head, self.kept, self.rows, self.demand, self.exist = head, kept, rows, demand, exist
        self.gradient = gradient
        self.wide = wide_dtype(head.weight)
        # each in memory of its own: kernels are compiled for where it begins
        count, device = len(kept.columns), head.weight.device
        self.logits = torch.empty(count, dtype=self.wide, device=device)
        self.dlogits = torch.empty(count, dtype=self.wide, device=device)
        self.pick_logits() if exist else self.make_logits()
        if self.kept.bias is not None:
            self.logits += self.kept.bias if self.scale is None else self.kept.bias * self.scale

    @functools.cached_property
    def scale(self) -> Tensor | None:
        """[n] what an entry's logit is multiplied by."""
        return None if self.rows.scale is None else self.rows.scale[self.kept.rows]

    @functools.cached_property
    def at_target(self) -> Tensor:
        """[n] True for the entry of each row's target."""
        return self.kept.columns == self.rows.target[self.kept.rows]

    def among(self, at: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Mask [n] of the entries of rows ``at``; each one's row among these and its column, 0 for other entries."""
        rows, columns = self.kept.rows, self.kept.columns
        here = (rows >= at.start) & (rows < at.stop) & (columns >= 0)
        return here, torch.where(here, rows - at.start, 0), torch.where(here, columns, 0).long()

    def place(self, at: slice) -> Tensor:
        """[n] the row of each entry within ``at``, one behind for entries of other rows and of none."""
        here, rows, _ = self.among(at)
        return torch.where(here, rows, at.stop - at.start)

    def blocks(self) -> list[slice]:
        """Entries whose gathered rows are some mebibytes."""
        return slices(len(self.kept.columns), max(1, GATHERED // max(1, self.head.weight.shape[1])))

    def pick_logits(self) -> None:
        """Reads the entries' logits out of logits that exist."""
        here, rows, columns = self.among(self.rows.tokens)
        self.logits.copy_(torch.where(here, self.rows.hidden[rows, columns].to(self.wide), -torch.inf))
        self.transform_logits_()

    def transform_logits_(self) -> None:
        transform_(self.logits.unsqueeze(1), None, self.head, self.scale)
        self.logits.masked_fill_(self.kept.columns < 0, -torch.inf)

    def make_logits(self) -> None:
        """The entries' logits."""
        weight, columns = self.head.weight, self.kept.columns.clamp(min=0)
        for at in self.blocks():
            h = self.rows.hidden[self.kept.rows[at]].to(weight.dtype).to(self.wide)
            self.logits[at] = (h * weight[columns[at]].to(self.wide)).sum(1)
        if self.head.bias is not None:
            self.logits += self.head.bias[columns].to(self.wide)
        self.transform_logits_()

    def statistics(self, rows: Rows, out: RowStats) -> None:
        """Statistics over the sets' columns; where every row that counts keeps a set, those of other rows are 0."""
        if not self.demand.columns_only:
            self.softmax_stats(rows.tokens, out)
            return
        out.zero_()
        if out.column_logits is not None:
            x = self.logits.masked_fill(self.kept.columns < 0, 0.0).view(-1, self.demand.columns)
            out.column_logits.copy_(x[rows.tokens])

    def softmax_stats(self, at: slice, out: RowStats) -> None:
        """Statistics of the softmaxes of rows ``at``."""
        place, count, x = self.place(at), at.stop - at.start, self.logits
        none = torch.iinfo(torch.int64).max

        def summed(values: Tensor) -> Tensor:
            return values.new_zeros(count + 1).index_add_(0, place, values)[:count]

        def largest(values: Tensor) -> Tensor:
            return x.new_full((count + 1,), -torch.inf).scatter_reduce_(0, place, values, "amax")

        found = {"target_logit": summed(torch.where(self.at_target, x, 0.0))}
        for suffix, view in zip(("", "2"), self.demand.views, strict=False):
            scaled = x * view.ratio
            top = largest(scaled)
            z = scaled - torch.where(top == -torch.inf, 0.0, top)[place]
            e = z.exp()
            total, top = summed(e), top[:count]
            log_sum = total.log()
            logprob = (found["target_logit"] * view.ratio - top) - log_sum
            entropy = log_sum - summed(torch.where(e > 0, e * z, 0.0)) / total
            each = {"lse": top + log_sum, "start": top, "rest": -log_sum, "logprob": logprob, "entropy": entropy}
            found |= {name + suffix: value for name, value in each.items()}
        if out.top is not None:
            top = largest(x)
            first = torch.where(x == top[place], self.kept.columns.long(), none)
            ids = torch.full_like(top, none, dtype=torch.int64).scatter_reduce_(0, place, first, "amin")[:count]
            found |= {"top": top[:count], "argmax": torch.where(ids == none, 0, ids)}
        for name, into in out.named().items():
            if name in found:
                other = into.new_zeros(()) if self.kept.everywhere else into
                into.copy_(torch.where(self.kept.has[at], found[name].to(into.dtype), other))

    def softmax_grad(self, at: slice, stats: RowStats, coefficients: Coefficients) -> None:
        """Gradients of the entries' logits of rows ``at``, into ``dlogits``."""
        place, c = self.place(at), coefficients
        row = place.clamp(max=max(0, at.stop - at.start - 1))
        grad = torch.zeros_like(self.logits)
        views = ((stats.start, stats.rest, c.alpha, c.eta), (stats.start2, stats.rest2, c.alpha2, c.eta2))
        for view, (start, rest, alpha, eta) in zip(self.demand.views, views, strict=False):
            if alpha is not None and start is not None and rest is not None:
                log_p = (self.logits * view.ratio - start[row]) + rest[row]
                grad += softmax_term(log_p, alpha[row], None if eta is None else eta[row])
        if c.beta is not None:
            grad -= torch.where(self.at_target, c.beta[row], 0.0)
        grad = grad * slope(self.logits, self.head, self.scale)
        self.dlogits.copy_(torch.where(place < at.stop - at.start, grad, self.dlogits))

    def add_gradients(self, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients) -> None:
        """Gradients of hidden states, or of logits that exist, 0 in other rows where every row that counts keeps a
        set; the weight's wait for ``finish``."""
        at = rows.tokens
        if not self.demand.columns_only:
            self.softmax_grad(at, stats, coefficients)
        elif coefficients.columns is not None:
            own = slice(at.start * self.demand.columns, at.stop * self.demand.columns)
            scale = None if self.scale is None else self.scale[own]
            grad = coefficients.columns.flatten() * slope(self.logits[own], self.head, scale)
            self.dlogits[own] = grad.masked_fill(self.kept.columns[own] < 0, 0.0)
        if grads.hidden is None:
            return
        if self.gradient is not None:
            if self.kept.everywhere:
                self.gradient.zero_()
            here, places, columns = self.among(at)
            values = torch.where(here, self.dlogits, 0.0).to(self.gradient.dtype)
            self.gradient.index_put_((places, columns), values, accumulate=True)
        else:
            out, every = grads.hidden_rows(at), self.kept.rows
            if self.kept.everywhere:
                out.zero_()
            places = torch.where((every >= at.start) & (every < at.stop), every - at.start, -1)
            self.add_rows(out, self.head.weight, places, self.kept.columns, together=True)
        grads.hidden_done(at)

    def finish(self, grads: Gradients) -> None:
        """The weight's and the bias's gradients, of all rows."""
        kept = self.kept
        if grads.weight is not None:
            if kept.everywhere and grads.fresh:
                grads.weight.zero_()
            self.add_rows(grads.weight, self.rows.hidden, kept.columns, kept.rows)
        if grads.bias is not None:
            if kept.everywhere:
                grads.bias.zero_()
            ones = torch.ones(len(self.rows.hidden), 1, dtype=self.wide, device=self.dlogits.device)
            self.add_rows(grads.bias.unsqueeze(1), ones, kept.columns, kept.rows)

    def add_rows(self, out: Tensor, table: Tensor, places: Tensor, rows: Tensor, together: bool = False) -> None:
        """``out[places[e]] += dlogits[e] * table[rows[e]]`` for all entries, of which -1 is none; ``together``: equal
        places are."""
        # equal places together: each block of entries adds one row for each of its places
        places, order = places.long().sort(stable=True)
        for at in self.blocks():
            mine, entries = places[at].clamp(min=0), order[at]
            row, place = rows[entries], torch.cat([torch.ones_like(mine[:1]), (mine[1:] != mine[:-1]).long()])
            terms = table[row.clamp(min=0)].to(self.head.weight.dtype).to(self.wide) * self.dlogits[entries, None]
            terms = torch.where(((places[at] >= 0) & (row >= 0)).unsqueeze(1), terms, 0.0)
            place = place.cumsum(0) - 1
            made = torch.zeros_like(terms).index_add_(0, place, terms)
            out.index_add_(0, torch.zeros_like(mine).scatter_(0, place, mine), made.to(out.dtype))


class WithSets(Store):
    """A store of chunks some of whose rows keep sets of columns."""

    def __init__(self, store: Store, sets: SetStore):
        self.store, self.sets = store, sets
        self.known_targets = store.known_targets

    def fill(self, rows: Rows, out: RowStats) -> None:
        self.store.fill(rows, out)

    def statistics(self, rows: Rows, out: RowStats) -> None:
        self.store.statistics(rows, out)
        self.sets.statistics(rows, out)

    def add_gradients(self, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients) -> None:
        # rows that keep a set have probabilities and coefficients of 0 here
        has, named = self.sets.kept.has[rows.tokens], stats.named()
        nowhere = {name: named[name].masked_fill(has, none) for name, none in NOWHERE.items() if name in named}
        factors = {name: value.masked_fill(has, 0.0) for name, value in coefficients.named().items()}
        of_store = RowStats.of(named | nowhere), Coefficients.of(factors)
        self.store.add_gradients(rows, *of_store, grads.of_this_rank())  # sums over ranks begin where rows are complete
        self.sets.add_gradients(rows, stats, coefficients, grads)

    def finish(self, grads: Gradients) -> None:
        self.store.finish(grads)
        self.sets.finish(grads)


def kept_sets(out: Kept, sets: Sets, target: Tensor, numbers: tuple[Tensor, Tensor]) -> None:
    """``Backend.kept_sets`` in torch operations."""
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
