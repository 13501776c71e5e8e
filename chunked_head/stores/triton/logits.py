"""Sessions over fp32 logits that cuBLAS leaves, and over logits that the caller holds."""

import torch
from torch import Tensor

from ...core.stats import Coefficients, Demand, Head, Rows, RowStats, Teacher
from ...kernels.common.operands import Stored
from ...kernels.statistics import launch as statistics
from ...kernels.statistics.launch import Outputs
from ...plan.plans import Plan
from ..matmul import again_rows, project_biased
from .session import KernelSession, outputs_of, ratio_of, transform


def with_transform(raw: Stored, head: Head | Teacher, rows: Rows) -> Stored:
    """Raw logits that are to be read with a head's scale and cap."""
    return raw._replace(transform=transform(head, rows.scale))


class LogitsSession(KernelSession):
    def __init__(self, head: Head, plan: Plan, tiled: bool):
        super().__init__(head, plan)
        device = head.weight.device
        self.swept_rows = plan.chunk_tokens
        self.buffer = torch.empty(plan.buffer_elements(tiled), dtype=torch.float32, device=device)
        if self.sizes.teacher_store is not None:
            self.teacher_buffer = torch.empty(plan.teacher_elements(tiled), dtype=torch.float32, device=device)

    def compute_logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor) -> Stored:
        """Raw logits, with the bias or the bias beside them; scale and cap are the caller's to say."""
        rows, columns = hidden.shape[0], weight.shape[0]
        logits = buffer[: rows * columns].view(rows, columns)
        at_once = again_rows(self.sizes, self.swept_rows, hidden, columns)
        return Stored(logits, None, project_biased(hidden, weight, bias, logits, at_once))

    def stats(self, rows: Rows, out: RowStats) -> None:
        head = self.head
        raw = self.compute_logits(rows.hidden, head.weight, head.bias, self.buffer)
        self.stored = with_transform(raw, head, rows)
        logits = self.stored.logits
        named = out.named()
        statistics.row_stats(outputs_of(named), self.stored, logits.shape[1], rows.target, head.class_weights)
        if len(self.demand.views) > 1:
            view = self.demand.views[1]
            columns, ratio = view.columns or self.vocab, ratio_of(view.ratio)
            statistics.row_stats(outputs_of(named, "2"), self.stored, columns, rows.target, ratio=ratio)
        if out.column_logits is not None:
            assert rows.columns is not None
            statistics.pick_columns(out.column_logits, self.stored, rows.columns)
        if out.top_k_ids is not None:
            assert out.top_k_logits is not None
            raw = logits if self.stored.bias is None else logits.add_(self.stored.bias)
            k = out.top_k_ids.shape[1]
            torch.topk(raw, k, largest=head.logit_scale > 0, out=(torch.empty_like(out.top_k_logits), out.top_k_ids))
            # a bias is in the logits by now
            statistics.pick_columns(out.top_k_logits, self.stored._replace(bias=None), out.top_k_ids)
        self.teacher_stats(rows, out)

    def store_teacher(self, rows: Rows, normalize: Outputs) -> Stored:
        assert self.demand.pairing is not None
        return self.teacher_logits(rows, slice(0, self.demand.pairing.columns), normalize)

    def teacher_logits(self, rows: Rows, columns: slice, normalize: Outputs | None) -> Stored:
        teacher = rows.teacher
        assert teacher is not None
        if teacher.logits is not None:
            return self.given_teacher(rows, columns, normalize)
        assert teacher.hidden is not None and teacher.weight is not None
        bias = None if teacher.bias is None else teacher.bias[columns]
        found = self.compute_logits(teacher.hidden, teacher.weight[columns], bias, self.teacher_buffer)
        stored = with_transform(found, teacher, rows)
        if normalize is not None:
            statistics.row_stats(normalize, stored, stored.logits.shape[1])
        return stored

    def grad_(self, rows: Rows, stats: RowStats, coefficients: Coefficients) -> Tensor:
        teacher = None if self.demand.pairing is None else self.teacher_stored
        dlogits = self.gradient_of(self.stored.logits)
        return self.differentiate_(dlogits, self.stored, self.head, 0, rows, stats, coefficients, teacher)

    def tile_grad(self, rows: Rows, tile: slice, stats: RowStats, coefficients: Coefficients) -> Tensor:
        head = self.head.columns(tile)
        raw = self.compute_logits(rows.hidden, head.weight, head.bias, self.buffer)
        stored = with_transform(raw, head, rows)
        teacher = None
        if self.demand.pairing is not None and tile.start < self.demand.pairing.columns:
            columns = slice(tile.start, min(tile.stop, self.demand.pairing.columns))
            teacher = self.teacher_logits(rows, columns, None)
        dlogits = self.gradient_of(stored.logits)
        return self.differentiate_(dlogits, stored, head, tile.start, rows, stats, coefficients, teacher)

    def gradient_of(self, logits: Tensor) -> Tensor:
        """Where the gradient of these logits goes: a 16-bit row lies in the first half of its fp32 row."""
        return logits.view(self.sizes.dtype)[:, : logits.shape[1]]


class GivenLogits(LogitsSession):
    """Logits that exist already, in the place of hidden states and of what a matmul makes of them."""

    def __init__(self, head: Head, demand: Demand, logits: Tensor, out: Tensor | None):
        self.head, self.demand, self.vocab = head, demand, logits.shape[1]
        self.buffer, self.out = logits, out

    def compute_logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor) -> Stored:
        return Stored(hidden, None, bias)

    def read_both(self, rows: Rows) -> None:
        """The student's logits and a dense teacher's, whose statistics are known."""
        assert self.demand.pairing is not None
        self.stored = with_transform(Stored(rows.hidden, None, None), self.head, rows)
        self.teacher_stored = self.given_teacher(rows, slice(0, self.demand.pairing.columns), None)

    def gradient_of(self, logits: Tensor) -> Tensor:
        assert self.out is not None
        return self.out
