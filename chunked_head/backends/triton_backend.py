"""The head in Triton kernels: NVIDIA GPUs, and any machine under Triton's interpreter (``TRITON_INTERPRET=1``).

Three stores of the reused buffer, all with statistics from fp32 accumulators:

- ``fast``: our own matmul leaves bf16 exponentials relative to the target's logit; the gradients are plain products
  with them, a factor per row and the target's terms apart (Hopper; gradients of rank one beside the softmax, no cap).
- ``relative``: it leaves fp16 logits relative to each strip's maximum, one pass turns them into any gradient (Hopper,
  16-bit operands).
- ``logits``: cuBLAS leaves fp32 logits, and the gradient of 16-bit operands is written, 16-bit wide, over their bytes.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from ..gradients import AddsDlogits, Gradients
from ..kernels import launch, launch_rows
from ..kernels.launch_rows import Beside, Second, Stored
from ..matmul import add_dhidden, add_dweight, project
from ..memory import Store
from ..plans import Plan, slices
from ..stats import LOG_FLOOR, Coefficients, Demand, Head, Rows, RowStats, Teacher
from . import Layout

MOST_ROWS = 1 << 15  # of a launch: a grid's second dimension ends at 65535
TMA_BYTES = 16  # alignment that tensor descriptors ask of a row


def check_runs(device: torch.device, dtype: torch.dtype, what: str) -> None:
    if device.type != "cuda" and not launch.INTERPRETED:
        raise ValueError(
            "backend='triton' needs a CUDA device, or TRITON_INTERPRET=1 in the environment; the tensors are on "
            f"{device}: use backend='torch'"
        )
    if dtype == torch.float64:
        raise ValueError(f"backend='triton' computes in fp32 at most, {what} is float64: use backend='torch'")


def store(layout: Layout) -> Store:
    check_runs(layout.device, layout.dtype, "hidden")
    aligned = layout.plain_weight and layout.hidden * layout.dtype.itemsize % TMA_BYTES == 0
    if layout.dtype == torch.float32 or not aligned or layout.demand.top_k or not runs_exp_logits(layout.device):
        return "logits"
    # a factor per row would take fp16 out of its range; caps and trained biases need a pass over the buffer
    one_factor = layout.dtype == torch.bfloat16 and layout.demand.rank_one and layout.demand.one_sweep
    return "fast" if one_factor and not (layout.capped or layout.bias_grad) and layout.plain_rows else "relative"


def teacher_store(teacher: Teacher, store: Store) -> Literal["relative", "logits"] | None:
    if teacher.logits is not None:
        return None
    assert teacher.weight is not None
    weight = teacher.weight
    aligned = weight.is_contiguous() and weight.data_ptr() % TMA_BYTES == 0 and weight.stride(0) * 2 % TMA_BYTES == 0
    return "relative" if store == "relative" and weight.dtype.itemsize == 2 and aligned else "logits"


def runs_exp_logits(device: torch.device) -> bool:
    """Whether the device runs the matmul with the exponentials: its tile is sized for Hopper's shared memory.

    Where there is no GPU to ask, a plan for one is a plan for Hopper.
    """
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_capability(device)[0] == 9
    return True


def traits(device: torch.device) -> dict[str, Any]:
    return {"half_products": device.type == "cuda", "scratch": 0}


def clean_rows(out: Tensor, source: Tensor, target: Tensor) -> None:
    launch.copy_rows(out, source, target, factor=None)


def scale(source: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    out = source if source.dtype == dtype else torch.empty_like(source, dtype=dtype)
    if source.numel():
        launch.scale(out, source, factor)
    return out


def session(head: Head, plan: Plan, tiled: bool) -> "FastSession | LogitsSession | RelativeSession":
    # tiles have their statistics already, and nothing to gain from 16-bit logits
    if tiled or plan.sizes.store == "logits":
        return LogitsSession(head, plan, tiled)
    return FastSession(head, plan) if plan.sizes.store == "fast" else RelativeSession(head, plan)


def transform(head: Head | Teacher) -> tuple[float | None, float | None]:
    """Scale and cap as the kernels take them: None for what there is none of, and then no code."""
    return (None if head.logit_scale == 1.0 else float(head.logit_scale)), head.softcap


Normalizer = tuple[Tensor, Tensor]  # start and rest: log p = (x - start) + rest


def normalize_rows(normalize: Normalizer, stored: Stored, columns: int) -> None:
    launch_rows.row_stats(None, *normalize, None, None, None, None, None, None, stored, columns, None, None, None)


class KernelSession(AddsDlogits):
    """What sessions with a pass over stored logits share: second views, teachers, columns, gradients."""

    stored: Stored
    teacher_stored: Stored

    def __init__(self, head: Head, plan: Plan):
        self.head, self.sizes, self.demand = head, plan.sizes, plan.sizes.demand
        self.vocab = self.sizes.vocab

    def further_stats(self, rows: Rows, out: RowStats) -> None:
        """Statistics of a teacher beside the student, whose own are there."""
        demand = self.demand
        pairing = demand.pairing
        if pairing is None:
            return
        assert rows.teacher is not None and out.teacher_start is not None and out.teacher_rest is not None
        self.teacher_stored = self.store_teacher(rows, out.teacher_start, out.teacher_rest)
        start, rest = (out.start2, out.rest2) if pairing.view else (out.start, out.rest)
        assert start is not None and rest is not None
        launch_rows.pair_stats(
            out.forward_kl, out.reverse_kl, out.teacher_entropy, out.kl_mixture, out.jsd, out.tvd, out.sign,
            self.stored, start, rest, ratio_of(demand.views[pairing.view].ratio),
            self.teacher_stored, out.teacher_start, out.teacher_rest,
            pairing.columns, pairing.beta, LOG_FLOOR,
        )  # fmt: skip

    def store_teacher(self, rows: Rows, start: Tensor, rest: Tensor) -> Stored:
        """The teacher's logits of a chunk, and what makes log-probabilities of them."""
        raise NotImplementedError

    def given_teacher(self, teacher: Teacher, columns: slice, normalize: Normalizer | None) -> Stored:
        """Logits that the caller holds."""
        assert teacher.logits is not None
        stored = Stored(teacher.logits[:, columns], None, None, *transform(teacher))
        if normalize is not None:
            normalize_rows(normalize, stored, stored.logits.shape[1])
        return stored

    def second(self, stats: RowStats, coefficients: Coefficients, first: int, columns: int) -> Second | None:
        if stats.start2 is None or stats.rest2 is None:
            return None
        view = self.demand.views[1]
        here = min(max((view.columns or self.vocab) - first, 0), columns)
        return Second(stats.start2, stats.rest2, coefficients.alpha2, coefficients.eta2, ratio_of(view.ratio), here)

    def differentiate_(
        self,
        dlogits: Tensor,
        stored: Stored,
        head: Head,
        first: int,
        rows: Rows,
        stats: RowStats,
        coefficients: Coefficients,
        teacher: Stored | None,
    ) -> Tensor:
        c, pairing, columns = coefficients, self.demand.pairing, dlogits.shape[1]
        second = self.second(stats, c, first, columns)
        beside = None
        if teacher is not None and pairing is not None:
            assert stats.teacher_start is not None and stats.teacher_rest is not None
            beside = Beside(
                teacher, stats.teacher_start, stats.teacher_rest,
                min(max(pairing.columns - first, 0), columns), pairing.view == 1,
                c.gamma, c.rho, c.tau, c.theta, pairing.beta, LOG_FLOOR,
            )  # fmt: skip
        common = (stats.target_logit, stats.start, stats.rest, c.alpha, c.beta, c.eta, c.kappa, second)
        launch_rows.row_grad(
            dlogits, stored, head.class_weights, rows.target, *common, beside, first, *transform(head)
        )  # fmt: skip
        if c.columns is not None:
            assert stats.column_logits is not None and rows.columns is not None
            launch_rows.column_grad(
                dlogits, stats.column_logits, rows.columns, c.columns, head.class_weights, rows.target, *common,
                first, *transform(head), add=beside is not None,
            )  # fmt: skip
        return dlogits


class RelativeSession(KernelSession):
    def __init__(self, head: Head, plan: Plan):
        super().__init__(head, plan)
        sizes, demand = self.sizes, self.demand
        rows, device = plan.chunk_tokens, head.weight.device
        # a sweep that makes no gradient and is not passed over again keeps nothing
        keep = plan.schedule == "forward" or not demand.one_sweep
        self.buffer = padded(rows, sizes.vocab, device) if keep else None
        two = len(demand.views) > 1
        self.strips = launch.Strips.empty(
            rows,
            sizes.vocab,
            device,
            demand.entropy[0],
            demand.weighted_sum,
            demand.top,
            two,
            two and demand.entropy[1],
        )
        if sizes.teacher_store == "relative":
            self.teacher_buffer = padded(rows, sizes.teacher_columns, device)
            self.teacher_strips = launch.Strips.empty(rows, sizes.teacher_columns, device)
        elif sizes.teacher_store == "logits":
            self.teacher_buffer = torch.empty(rows, sizes.teacher_columns, dtype=torch.float32, device=device)

    def stats(self, rows: Rows, out: RowStats) -> None:
        self.first_stats(rows, out, self.buffer, None, None)
        self.further_stats(rows, out)

    def first_stats(
        self, rows: Rows, out: RowStats, buffer: Tensor | None, row_offset: Tensor | None, level: Tensor | None
    ) -> None:
        head, count, vocab = self.head, rows.hidden.shape[0], self.sizes.vocab
        scale_cap = transform(head)
        strips = self.strips.of_rows(count, vocab)
        target_ids = rows.target.unsqueeze(1)
        launch_rows.dot_columns(
            out.target_logit.unsqueeze(1), rows.hidden, head.weight, target_ids, head.bias, *scale_cap
        )  # fmt: skip
        if out.column_logits is not None:
            assert rows.columns is not None
            launch_rows.dot_columns(out.column_logits, rows.hidden, head.weight, rows.columns, head.bias, *scale_cap)
        stored = None if buffer is None else buffer[:count, :vocab]
        ratio2, columns2 = None, vocab
        if len(self.demand.views) > 1:
            view = self.demand.views[1]
            ratio2, columns2 = ratio_of(view.ratio), view.columns or vocab
        launch.exp_logits(
            stored, strips, rows.hidden, head.weight, head.bias, head.class_weights, row_offset, rows.target,
            *scale_cap, ratio2, columns2,
        )  # fmt: skip
        launch.merge_strips(
            out.lse, out.start, out.rest, out.logprob, out.entropy, out.weighted_sum, out.top, out.argmax, level,
            strips, out.target_logit, rows.target, vocab,
        )  # fmt: skip
        if out.start2 is not None and out.rest2 is not None:
            second = strips._replace(sum=strips.sum2, shifted_sum=strips.shifted_sum2, weighted_sum=None)
            launch.merge_strips(
                out.lse2, out.start2, out.rest2, out.logprob2, out.entropy2, None, None, None, None,
                second, out.target_logit, rows.target, columns2, ratio2, second=True,
            )  # fmt: skip
        if stored is not None:
            self.stored = Stored(stored, strips.offset)

    def store_teacher(self, rows: Rows, start: Tensor, rest: Tensor) -> Stored:
        teacher, count, columns = rows.teacher, len(rows.target), self.sizes.teacher_columns
        assert teacher is not None
        if teacher.logits is not None:
            return self.given_teacher(teacher, slice(columns), (start, rest))
        assert teacher.hidden is not None and teacher.weight is not None
        buffer = self.teacher_buffer[:count, :columns]
        if self.sizes.teacher_store == "logits":
            project(teacher.hidden, teacher.weight, buffer)
            stored = Stored(buffer, None, teacher.bias, *transform(teacher))
            normalize_rows((start, rest), stored, columns)
            return stored
        strips = self.teacher_strips.of_rows(count, columns)
        launch.exp_logits(
            buffer, strips, teacher.hidden, teacher.weight, teacher.bias, None, None, None, *transform(teacher)
        )
        launch.merge_strips(None, start, rest, None, None, None, None, None, None, strips, None, None, columns)
        return Stored(buffer, strips.offset)

    def grad_(self, rows: Rows, stats: RowStats, coefficients: Coefficients) -> Tensor:
        dlogits = self.stored.logits.view(self.sizes.dtype)
        teacher = None if self.demand.pairing is None else self.teacher_stored
        return self.differentiate_(dlogits, self.stored, self.head, 0, rows, stats, coefficients, teacher)


def padded(rows: int, columns: int, device: torch.device) -> Tensor:
    """Relative logits: a row starts on 16 bytes."""
    return torch.empty(rows, -(-columns // 8) * 8, dtype=torch.float16, device=device)


def ratio_of(ratio: float) -> float | None:
    return None if ratio == 1.0 else float(ratio)


class FastSession(RelativeSession):
    """With exponentials E relative to one level per row, and the target's column left out of them,

        dlogits = softmax_factor * E + target_factor * onehot(target)
        softmax_factor = alpha exp(level - lse),  target_factor = alpha p(target) - beta

    so dhidden is ``E @ weight`` times a factor plus a row of the weight, dweight is ``E.T @ (factor * hidden)`` plus
    rows of hidden states at their targets. The last are added at the end, when all tokens can be sorted by target.
    """

    def __init__(self, head: Head, plan: Plan):
        super().__init__(head, plan)
        sizes, device = plan.sizes, head.weight.device
        if plan.schedule != "forward":
            return
        self.softmax_factor = torch.empty(plan.chunk_tokens, dtype=torch.float32, device=device)
        self.target_factor = torch.empty(sizes.tokens, dtype=torch.float32, device=device)
        if sizes.weight_grad:
            self.scaled = torch.empty(plan.chunk_tokens, sizes.hidden, dtype=sizes.dtype, device=device)
        if sizes.hidden_grad and plan.hidden_accumulate != torch.float32:
            self.product = torch.empty(plan.chunk_tokens, sizes.hidden, dtype=torch.float32, device=device)

    def stats(self, rows: Rows, out: RowStats) -> None:
        if self.buffer is None:
            return super().stats(rows, out)
        self.level = torch.empty_like(out.lse)
        exponentials = self.buffer.view(self.sizes.dtype)
        self.first_stats(rows, out, exponentials, row_offset=out.target_logit, level=self.level)

    def add_gradients(
        self, at: slice, rows: Rows, stats: RowStats, coefficients: Coefficients, grads: Gradients
    ) -> None:
        weight, exp, count = self.head.weight, self.stored.logits, len(rows.target)
        assert coefficients.alpha is not None and coefficients.beta is not None and self.stored.offset is not None
        softmax_factor, target_factor = self.softmax_factor[:count], self.target_factor[at]
        launch.level_rows(
            exp, softmax_factor, target_factor, self.stored.offset, self.level, stats.target_logit,
            stats.start, stats.rest, stats.logprob, coefficients.alpha, coefficients.beta, transform(self.head)[0],
        )  # fmt: skip
        if grads.hidden is not None:
            out = grads.hidden[at]
            product = out if out.dtype == torch.float32 else self.product[: len(out)]
            add_dhidden(exp, weight, product, first=True)
            launch.finish_dhidden(out, product, weight, rows.target, softmax_factor, target_factor)
        if grads.weight is not None:
            scaled = self.scaled[:count]
            launch.copy_rows(scaled, rows.hidden, rows.target, softmax_factor)
            add_dweight(exp, scaled, grads.weight, first=at.start == 0)

    def finish(self, hidden: Tensor, target: Tensor, grads: Gradients) -> None:
        if grads.weight is not None:
            launch.add_target_rows(grads.weight, hidden, target, self.target_factor)


class LogitsSession(KernelSession):
    def __init__(self, head: Head, plan: Plan, tiled: bool):
        super().__init__(head, plan)
        device = head.weight.device
        self.buffer = torch.empty(plan.buffer_elements(tiled), dtype=torch.float32, device=device)
        if self.sizes.teacher_store is not None:
            self.teacher_buffer = torch.empty(plan.teacher_elements(tiled), dtype=torch.float32, device=device)

    def compute_logits(self, hidden: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
        rows, columns = hidden.shape[0], weight.shape[0]
        logits = buffer[: rows * columns].view(rows, columns)
        project(hidden, weight, logits)
        return logits

    def stats(self, rows: Rows, out: RowStats) -> None:
        head = self.head
        logits = self.compute_logits(rows.hidden, head.weight, self.buffer)
        self.stored = Stored(logits, None, head.bias, *transform(head))
        launch_rows.row_stats(
            out.lse, out.start, out.rest, out.logprob, out.target_logit, out.entropy, out.weighted_sum, out.top,
            out.argmax,
            self.stored, logits.shape[1], rows.target, head.class_weights, None,
        )  # fmt: skip
        if len(self.demand.views) > 1:
            view = self.demand.views[1]
            assert out.lse2 is not None and out.start2 is not None and out.rest2 is not None
            launch_rows.row_stats(
                out.lse2, out.start2, out.rest2, out.logprob2, None, out.entropy2, None, None, None,
                self.stored, view.columns or self.vocab, rows.target, None, ratio_of(view.ratio),
            )  # fmt: skip
        if out.column_logits is not None:
            assert rows.columns is not None
            launch_rows.pick_columns(out.column_logits, self.stored, rows.columns)
        if out.top_k_ids is not None:
            assert out.top_k_logits is not None
            raw = logits if head.bias is None else logits.add_(head.bias)
            k = out.top_k_ids.shape[1]
            torch.topk(raw, k, largest=head.logit_scale > 0, out=(torch.empty_like(out.top_k_logits), out.top_k_ids))
            # a bias is in the logits by now
            launch_rows.pick_columns(out.top_k_logits, self.stored._replace(bias=None), out.top_k_ids)
        self.further_stats(rows, out)

    def store_teacher(self, rows: Rows, start: Tensor, rest: Tensor) -> Stored:
        assert rows.teacher is not None and self.demand.pairing is not None
        return self.teacher_logits(rows.teacher, slice(0, self.demand.pairing.columns), (start, rest))

    def teacher_logits(self, teacher: Teacher, columns: slice, normalize: Normalizer | None) -> Stored:
        if teacher.logits is not None:
            return self.given_teacher(teacher, columns, normalize)
        assert teacher.hidden is not None and teacher.weight is not None
        logits = self.compute_logits(teacher.hidden, teacher.weight[columns], self.teacher_buffer)
        bias = None if teacher.bias is None else teacher.bias[columns]
        stored = Stored(logits, None, bias, *transform(teacher))
        if normalize is not None:
            normalize_rows(normalize, stored, logits.shape[1])
        return stored

    def grad_(self, rows: Rows, stats: RowStats, coefficients: Coefficients) -> Tensor:
        teacher = None if self.demand.pairing is None else self.teacher_stored
        return self.narrowed(self.stored, self.head, 0, rows, stats, coefficients, teacher)

    def tile_grad(self, rows: Rows, tile: slice, stats: RowStats, coefficients: Coefficients) -> Tensor:
        head = self.head.columns(tile)
        stored = Stored(
            self.compute_logits(rows.hidden, head.weight, self.buffer), None, head.bias, *transform(head)
        )  # fmt: skip
        teacher = None
        if self.demand.pairing is not None and tile.start < self.demand.pairing.columns:
            assert rows.teacher is not None
            columns = slice(tile.start, min(tile.stop, self.demand.pairing.columns))
            teacher = self.teacher_logits(rows.teacher, columns, None)
        return self.narrowed(stored, head, tile.start, rows, stats, coefficients, teacher)

    def narrowed(
        self,
        stored: Stored,
        head: Head,
        first: int,
        rows: Rows,
        stats: RowStats,
        coefficients: Coefficients,
        teacher: Stored | None,
    ) -> Tensor:
        # a 16-bit row lies in the first half of its fp32 row
        dlogits = stored.logits.view(self.sizes.dtype)[:, : stored.logits.shape[1]]
        return self.differentiate_(dlogits, stored, head, first, rows, stats, coefficients, teacher)


class GivenLogits(LogitsSession):
    """Logits that exist already, in the place of hidden states and of what a matmul makes of them."""

    def __init__(self, head: Head, demand: Demand, logits: Tensor, out: Tensor | None):
        check_runs(logits.device, logits.dtype, "logits")
        self.head, self.demand, self.vocab = head, demand, logits.shape[1]
        self.buffer, self.out = logits, out

    def compute_logits(self, hidden: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
        return hidden

    def narrowed(
        self,
        stored: Stored,
        head: Head,
        first: int,
        rows: Rows,
        stats: RowStats,
        coefficients: Coefficients,
        teacher: Stored | None,
    ) -> Tensor:
        assert self.out is not None
        return self.differentiate_(self.out, stored, head, first, rows, stats, coefficients, teacher)


def logits_stats(rows: Rows, head: Head, demand: Demand, out: RowStats) -> None:
    for part in slices(len(rows.hidden), MOST_ROWS):
        GivenLogits(head, demand, rows.hidden, None).stats(rows.at(part), out.at(part))


def logits_grad(
    out: Tensor, rows: Rows, head: Head, demand: Demand, stats: RowStats, coefficients: Coefficients
) -> None:
    everything = slice(0, rows.hidden.shape[1])
    for part in slices(len(rows.hidden), MOST_ROWS):
        session = GivenLogits(head, demand, rows.hidden, out[part])
        session.tile_grad(rows.at(part), everything, stats.at(part), coefficients.at(part))
