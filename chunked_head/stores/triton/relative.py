"""Stores of what our logits matmul leaves: fp16 relative logits, or bf16 exponentials."""

import torch
from torch import Tensor

from ...core.stats import Coefficients, RowStats, numbers_sent, sent
from ...kernels.common.gpus import split_strips
from ...kernels.common.operands import ALL_ROWS, Counted, Stored, Strips, strip_rows
from ...kernels.common.tiles import ELSEWHERE, cdiv
from ...kernels.gradients import launch as gradients
from ...kernels.products import launch as products
from ...kernels.statistics import launch as statistics
from ...kernels.statistics.launch import Outputs
from ...parallel.merge import merge_blocks, unpack
from ...plan.buffers import padded_columns, part_sums
from ...plan.plans import Plan
from ...plan.sizes import slices
from ..gradients import Gradients
from ..matmul import add_dhidden, project
from ..operands import Head, Rows
from .store import NO_PARTS, HalfStore, Parts, counted_of, merge_ranks, outputs_of, ratio_of, transform


class RelativeStore(HalfStore):
    """fp16 logits relative to the maximum of each strip of columns; one pass turns them into any gradient."""

    parts: Parts = NO_PARTS

    def __init__(self, head: Head, plan: Plan):
        super().__init__(head, plan)
        sizes, demand = self.sizes, self.demand
        rows, device = plan.chunk_tokens, head.weight.device
        # a sweep that makes no gradient and is not passed over again keeps nothing
        keep = plan.schedule == "forward" or sizes.keeps_sweep
        self.block = plan.vocab_block
        self.buffer = padded(rows, sizes.vocab, device) if keep else None
        if sizes.hidden_grad and plan.schedule == "forward":
            self.part_sums = torch.empty(part_sums(sizes, rows) // 4, dtype=torch.float32, device=device)
        two = len(demand.views) > 1
        gpu = self.gpu
        self.tile = gpu.exp_tile_of(rows, sizes.hidden, self.block or sizes.vocab)
        strip_count = gpu.strips_of(sizes.vocab, sizes.hidden, keep and sizes.store == "relative", self.block)
        strip_count += split_strips(demand.views[-1].columns)
        self.strips = Strips.empty(
            rows, strip_count, device, demand.entropy[0], demand.weighted_sum, demand.top, two,
            two and demand.entropy[1],
        )  # fmt: skip
        self.has_target_logits = False  # the target's logits of all tokens are there
        self.teacher_last = plan.teacher_last
        self.teacher_rows = sizes.teacher_rows(rows) if self.teacher_last else rows
        if sizes.teacher_store == "relative":
            self.teacher_buffer = padded(self.teacher_rows, sizes.teacher_columns, device)
            self.teacher_tile = gpu.exp_tile_of(self.teacher_rows, sizes.teacher_width, sizes.teacher_columns)
            strip_count = gpu.strips_of(sizes.teacher_columns, sizes.teacher_width, relative=True)
            # a kernel that reads both takes one distance from strip to strip
            assert demand.pairing is not None
            self.teacher_strips = Strips.empty(rows, strip_count, device, top=demand.pairing.top)
        elif sizes.teacher_store == "logits":
            buffer = torch.empty(self.teacher_rows, sizes.teacher_columns, dtype=torch.float32, device=device)
            self.teacher_buffer = buffer
        if self.teacher_last:
            assert demand.pairing is not None
            wanted = demand.pairing.forward_kl, demand.pairing.entropy
            programs, stride = gradients.row_programs(sizes.vocab), strip_rows(rows)
            made = iter(torch.empty(sum(wanted), programs, stride, dtype=torch.float32, device=device).unbind())
            self.parts = next(made) if wanted[0] else None, next(made) if wanted[1] else None

    def clean_rows(self, rows: Rows, out: RowStats | None) -> None:
        if out is None or self.has_target_logits:
            super().clean_rows(rows, out)
            return
        head = self.head
        assert rows.source is not None
        statistics.clean_rows(
            rows.hidden, rows.source, rows.target, rows.order, out.target_logit, head.weight, head.bias,
            transform(head, rows.scale),
        )  # fmt: skip
        self.add_targets(out)

    def add_targets(self, stats: RowStats) -> None:
        """Adds other ranks' part of the targets' logits, where ``known_targets``."""
        if self.known_targets and self.head.add_targets is not None:
            self.head.add_targets(stats.target_logit)

    def fill(self, rows: Rows, out: RowStats) -> None:
        self.fill_buffer(rows, out, self.buffer, None)

    def fill_buffer(self, rows: Rows, out: RowStats, buffer: Tensor | None, row_offset: Tensor | None) -> None:
        """Logits relative to their strips' maxima, or exponentials relative to a ``row_offset`` [rows], of which only
        strips' sums are left where there is no ``buffer``."""
        head, count, vocab = self.head, rows.hidden.shape[0], self.sizes.vocab
        self.clean_rows(rows, out)
        made = transform(head, rows.scale)
        self.stored_strips = strips = self.strips.of_rows(count)
        if out.column_logits is not None:
            assert rows.columns is not None
            statistics.dot_columns(out.column_logits, rows.hidden, head.weight, rows.columns, head.bias, made)
        stored = None if buffer is None else buffer[:count, :vocab]
        ratio2, columns2 = self.second
        statistics.exp_logits(
            stored, strips, rows.hidden, head.weight, head.bias, head.class_weights, row_offset, rows.target,
            made, self.tile, ratio2, columns2, counted_of(rows), self.block,
        )  # fmt: skip
        if stored is not None:
            self.stored = Stored(stored, strips.offset)

    @property
    def second(self) -> tuple[float | None, int | None]:
        """Ratio and columns of the second softmax."""
        if len(self.demand.views) < 2:
            return None, None
        view = self.demand.views[1]
        return ratio_of(view.ratio), view.columns

    def statistics(self, rows: Rows, out: RowStats) -> None:
        self.merge_strips(rows, out, None)
        if self.demand.pairing is not None and not self.teacher_last:
            self.teacher_stats(rows, out)
            if not self.over_ranks:
                self.pair_statistics(rows, out)

    def merge_strips(self, rows: Rows, out: RowStats, level: Tensor | None) -> None:
        """Statistics of rows from those of their strips; ``level`` [rows] receives what exponentials are relative to
        where they are stored."""
        strips, vocab = self.stored_strips, self.sizes.vocab
        into, numbers = out.named(), None
        if self.block is not None:
            numbers = numbers_sent(self.demand) + 1
            self.pieces = out.lse.new_zeros(cdiv(vocab, self.block), numbers, rows.hidden.shape[0])
            into = unpack(self.pieces, out, sent(self.demand))
        statistics.merge_strips(
            outputs_of(into), level, strips, out.target_logit, rows.target, vocab, block=self.block, numbers=numbers
        )
        if "start2" in into:
            ratio2, columns2 = self.second
            second = strips._replace(sum=strips.sum2, shifted_sum=strips.shifted_sum2, weighted_sum=None)
            statistics.merge_strips(
                outputs_of(into, "2"), None, second, out.target_logit, rows.target, columns2 or vocab, ratio2, True,
                self.block, numbers,
            )  # fmt: skip
        if self.pieces is not None and not self.over_ranks:
            merge_blocks(merge_ranks, self.pieces, rows.target, out, self.demand)

    def put_dhidden(
        self, dlogits: Tensor, rows: Rows, out: Tensor, factors: products.Factors = products.NO_FACTORS
    ) -> None:
        if not self.sizes.own_dhidden:
            self.put_by_blas(dlogits, rows, out, factors)
            return
        split = self.sizes.dhidden_split(rows.target.shape[0], self.part_sums.numel() // self.gpu.product.elements)
        products.dhidden(
            out, self.part_sums, dlogits, self.head.weight, self.gpu.product, factors, counted_of(rows), split=split,
        )  # fmt: skip

    def put_by_blas(self, dlogits: Tensor, rows: Rows, out: Tensor, factors: products.Factors) -> None:
        if factors.target is None:
            super().put_dhidden(dlogits, rows, out)
            return
        product = self.part_sums[: out.numel()].view(out.shape)
        add_dhidden(dlogits, self.head.weight, product, first=True)
        products.finish_dhidden(out, product, self.head.weight, factors)

    def store_teacher(self, rows: Rows, normalize: Outputs) -> Stored:
        teacher, count, columns = rows.teacher, rows.target.shape[0], self.sizes.teacher_columns
        assert teacher is not None
        if teacher.logits is not None:
            return self.given_teacher(rows, slice(columns), normalize)
        assert teacher.hidden is not None and teacher.weight is not None
        buffer = self.teacher_buffer[:count, :columns]
        if self.sizes.teacher_store == "logits":
            project(teacher.hidden, teacher.weight, buffer)
            stored = Stored(buffer, None, teacher.bias, transform(teacher, rows.scale))
            statistics.row_stats(normalize, stored, columns)
            return stored
        strips = self.teacher_strips.of_rows(count)
        statistics.exp_logits(
            buffer, strips, teacher.hidden, teacher.weight, teacher.bias, None, None, None,
            transform(teacher, rows.scale), self.teacher_tile, counted=counted_of(rows),
        )  # fmt: skip
        statistics.merge_strips(normalize, None, strips, None, None, columns)
        return Stored(buffer, strips.offset)

    def grad_(self, rows: Rows, stats: RowStats, coefficients: Coefficients) -> Tensor:
        dlogits = self.stored.logits.view(self.sizes.dtype)
        if self.teacher_last:
            return self.grad_with_teacher_(dlogits, rows, stats, coefficients)
        teacher = None if self.demand.pairing is None else self.teacher_stored
        counted = self.differentiated(rows)
        return self.differentiate_(dlogits, self.stored, self.head, 0, rows, stats, coefficients, teacher, counted)

    def differentiated(self, rows: Rows) -> Counted:
        # a bias's gradient sums over all rows
        return ALL_ROWS if self.sizes.bias_grad else counted_of(rows)

    def grad_with_teacher_(self, dlogits: Tensor, rows: Rows, stats: RowStats, coefficients: Coefficients) -> Tensor:
        """The gradient with a teacher whose logits are made here, some rows at a time, and its statistics: the pass
        over both makes the divergence too."""
        count = len(dlogits)
        for at in slices(count, self.teacher_rows):
            some, out = rows.at(at), stats.at(at)
            self.teacher_stats(some, out)
            forward_kl, entropy = (None if part is None else part[:, at] for part in self.parts)
            self.differentiate_(
                dlogits[at], self.stored.at(at), self.head, 0, some, out, coefficients.at(at), self.teacher_stored,
                self.differentiated(some), (forward_kl, entropy),
            )  # fmt: skip
        parts = [None if part is None else part[:, :count] for part in self.parts]
        gradients.add_parts((stats.forward_kl, stats.teacher_entropy), parts)
        return dlogits


def padded(rows: int, columns: int, device: torch.device) -> Tensor:
    """Relative logits: a row starts on 16 bytes."""
    return torch.empty(rows, padded_columns(columns), dtype=torch.float16, device=device)


class FastStore(RelativeStore):
    """bf16 exponentials E relative to one level per row, with the target's column left out of them:

        dlogits = softmax_factor * E + target_factor * onehot(target)
        softmax_factor = alpha exp(level - lse),  target_factor = alpha p(target) - beta

    so dhidden is ``E @ weight`` times a factor plus a row of the weight, dweight is ``E.T @ (factor * hidden)`` plus
    rows of hidden states at their targets. The last are added at the end, when all tokens can be sorted by target.
    """

    gathered = False  # rows came from other ranks, and their targets' terms have been added chunk by chunk

    def __init__(self, head: Head, plan: Plan):
        super().__init__(head, plan)
        sizes, device = plan.sizes, head.weight.device
        # exponentials of the gradient are relative to them on every rank
        self.known_targets = self.buffer is not None
        if self.buffer is None:
            return
        self.level, self.softmax_factor = torch.empty(2, plan.chunk_tokens, dtype=torch.float32, device=device).unbind()
        self.target_factor = torch.empty(sizes.tokens, dtype=torch.float32, device=device)

    def begin(self, hidden: Tensor, target: Tensor, scale: Tensor | None, out: RowStats) -> None:
        self.hidden, self.target = hidden, target
        # nothing that ranks may differ in: whether there is such a message they all have to say alike
        at_once = self.sizes.spread == 1 and not self.sizes.skips and self.sizes.hidden_dtype == self.sizes.dtype
        if self.over_ranks and self.known_targets and at_once:
            head = self.head
            statistics.dot_columns(
                out.target_logit.unsqueeze(1), hidden, head.weight, target.unsqueeze(1), head.bias,
                transform(head, scale),
            )  # fmt: skip
            self.add_targets(out)
            self.has_target_logits = True

    def fill(self, rows: Rows, out: RowStats) -> None:
        if self.buffer is None:
            super().fill(rows, out)
        else:
            self.fill_buffer(rows, out, self.buffer.view(self.sizes.dtype), row_offset=out.target_logit)

    def statistics(self, rows: Rows, out: RowStats) -> None:
        self.merge_strips(rows, out, None if self.buffer is None else self.level)

    def add_gradients(self, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients) -> None:
        at = rows.tokens
        exp, count = self.stored.logits, rows.target.shape[0]
        softmax_factor, target_factor = self.softmax_factor[:count], self.target_factor[at]
        # after this only the weight's gradient reads the chunk's hidden states
        gradients.level_rows(
            exp, softmax_factor, target_factor, None if grads.weight is None else rows.hidden,
            self.stored_strips, self.gpu.strip_width(self.sizes.hidden, relative=False), self.level, stats.logprob,
            self.terms(rows, stats, coefficients, 0, self.vocab), transform(self.head, rows.scale), counted_of(rows),
        )  # fmt: skip
        if grads.hidden is not None:
            factors = products.Factors(rows.target, softmax_factor, target_factor)
            self.put_dhidden(exp, rows, grads.hidden_rows(at), factors)
            grads.hidden_done(at)
        if grads.weight is not None:
            self.add_dweight(exp, rows, rows.hidden, grads.weight, grads.stores(rows.first == 0))
            if rows.order is not None and rows.source is not None:
                # hidden states of all ranks' tokens are here for this chunk only
                self.add_target_rows(rows.source, rows.target, at, grads.weight, rows.order)
                self.gathered = True

    def finish(self, grads: Gradients) -> None:
        if grads.weight is not None and not self.gathered:
            self.add_target_rows(self.hidden, self.target, slice(0, self.sizes.tokens), grads.weight, None)

    def add_target_rows(
        self, hidden: Tensor, target: Tensor, at: slice, d_weight: Tensor, order: Tensor | None
    ) -> None:
        """The targets' terms of the weight's gradient, once the products with the chunk's exponentials are done."""
        if self.over_ranks:
            target = target.masked_fill(target == ELSEWHERE, -1)
        products.add_target_rows(d_weight, hidden, target, self.target_factor[at], order, self.buffer)
