"""What stores compute from: rows of hidden states, a head, a teacher."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..core.records import Transform
from ..core.tiles import LEAST_HEAVY_LOG2, MARGIN_LOG2
from .matmul import project
from .quantised import RoundedHead, empty_quantised, quantise_
from .torch_functions import dot_columns, row_blocks


@dataclass(eq=False)
class Head:
    """A head: the weight, bias, scale s and cap c of logits ``c tanh(s (hidden @ weight.T + bias) / c)``.

    ``logit_scale`` and ``softcap`` are s and c, each divided by the call's temperature. The logits are thereby divided
    by the temperature. Temperatures per token are in ``Rows.scale``.
    """

    weight: Tensor  # [vocab, hidden]
    bias: Tensor | None  # [vocab]
    class_weights: Tensor | None  # [vocab] fp32 or fp64
    logit_scale: float = 1.0
    softcap: float | None = None
    # adds logits of targets [rows] over the ranks that share the vocabulary, in place; None on one rank
    add_targets: Callable[[Tensor], None] | None = None
    fp8: RoundedHead | None = None  # e4m3 operand of all logits but those of targets and heavy ids; None: ``weight``
    scaled: ClassVar[bool] = True  # True: ``Rows.scale`` multiplies the logits

    def columns(self, tile: slice) -> "Head":
        """Returns the head of a slice of the vocabulary, in the same memory."""
        return replace(
            self,
            weight=self.weight[tile],
            fp8=None if self.fp8 is None else self.fp8.columns(tile),
            bias=None if self.bias is None else self.bias[tile],
            class_weights=None if self.class_weights is None else self.class_weights[tile],
        )


@dataclass(frozen=True, eq=False)
class TeacherHead:
    """A dense teacher: its logits, or its hidden states and head. ``logit_scale`` and ``softcap`` are divided by the
    teacher's temperature."""

    logits: Tensor | None  # [tokens, vocabulary], before scale and cap
    hidden: Tensor | None  # [tokens, teacher's hidden size]
    weight: Tensor | None  # [vocabulary, teacher's hidden size]
    bias: Tensor | None  # [vocabulary]
    logit_scale: float = 1.0
    softcap: float | None = None
    scaled: bool = False  # True: ``Rows.scale`` multiplies the teacher's logits too
    dtype: torch.dtype | None = None  # dtype of the matmul under autocast; None: the operands' dtype

    @property
    def casts(self) -> bool:
        """True if autocast casts the teacher's head."""
        return self.weight is not None and self.dtype not in (None, self.weight.dtype)

    def cast_head(self) -> "TeacherHead":
        """Returns the teacher with its head in the dtype of the matmul; without autocast, ``self``."""
        if self.dtype is None or self.weight is None:
            return self
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return replace(self, weight=self.weight.to(self.dtype), bias=bias)

    def columns(self, columns: slice) -> "TeacherHead":
        """Returns the teacher with a slice of its head: the rows of the weight that make the logits' ``columns``."""
        assert self.weight is not None
        return replace(self, weight=self.weight[columns], bias=None if self.bias is None else self.bias[columns])

    def rows(self, rows: slice | Tensor) -> "TeacherHead":
        """Returns the teacher of some rows of the call. ``rows``: a slice, or a tensor of indices."""
        logits, hidden = (None if tensor is None else tensor[rows] for tensor in (self.logits, self.hidden))
        return replace(self, logits=logits, hidden=hidden)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among logits, hidden states, weight and bias that are not None, in this order."""
        return [t for t in (self.logits, self.hidden, self.weight, self.bias) if t is not None]

    def with_tensors(self, tensors: Sequence[Tensor]) -> "TeacherHead":
        """Returns the teacher with other tensors, in the order of the property ``tensors``."""
        names = [name for name in ("logits", "hidden", "weight", "bias") if getattr(self, name) is not None]
        fields: dict[str, Any] = dict(zip(names, tensors, strict=False))
        return replace(self, **fields)


# What stores read of all rows of a call on hidden states, not only of a chunk's rows: the caller's hidden states
# [tokens, hidden], in the caller's order; targets [rows] int64 in the order in which rows run, -1 where a row does not
# count; each row's index in the hidden states, [rows] int64, None where row i has index i
CallRows = tuple[Tensor, Tensor, Tensor | None]


class Rows(NamedTuple):
    """The rows of a chunk, from which a store makes logits."""

    # [rows, hidden] the matmuls' operand: ``Store.fill`` copies ``source`` to it, with 0 where a row does not count; if
    # the caller gives logits, [rows, 0]
    hidden: Tensor
    target: Tensor  # [rows] int64, -1 where a row does not count
    tokens: slice  # the chunk as a slice of the call's rows
    columns: Tensor | None = None  # [rows, K] int64: the row's ``teacher_ids``, -1 for no id
    scale: Tensor | None = None  # [rows] in the statistics' dtype: factor of a row's logits; None: 1
    teacher: TeacherHead | None = None
    num_counted: Tensor | None = None  # [] int64: number of the call's rows that count, which come first; None: any may
    source: Tensor | None = None  # [..., hidden]: hidden states of the caller, or of all ranks
    order: Tensor | None = None  # [rows] int64: each row's index in ``source``; None: row i has index i

    def narrow(self, rows: slice) -> "Rows":
        """Returns a slice of the rows, in the same memory, without ``source`` and ``order``; for all rows, ``self``."""
        if rows.start == 0 and rows.stop == self.target.shape[0]:
            return self
        columns, scale = (None if values is None else values[rows] for values in (self.columns, self.scale))
        teacher = None if self.teacher is None else self.teacher.rows(rows)
        tokens = slice(self.tokens.start + rows.start, self.tokens.start + rows.stop)
        return Rows(self.hidden[rows], self.target[rows], tokens, columns, scale, teacher, self.num_counted)


def fp8_logits(out: Tensor, rows: Rows, first_column: int, head: Head, fp8: RoundedHead) -> None:
    """Writes raw logits from column ``first_column`` of the vocabulary on to ``out`` [rows, columns]: products of e4m3
    operands in fp32, plus the bias. Logits of targets are products of 16-bit operands instead."""
    hidden = empty_quantised(len(rows.hidden), rows.hidden.shape[1], rows.hidden.device, has_row_scales=True)
    quantise_(hidden, rows.hidden, fp8.direction, hidden.common)
    project(hidden.values.float(), fp8.weight.values, out)
    assert hidden.common is not None and fp8.weight.common is not None
    out.mul_(hidden.scale[:, None] * fp8.weight.scale).addr_(hidden.common, fp8.weight.common)
    bias = head.weight.new_zeros(len(head.weight)) if head.bias is None else head.bias
    out += bias
    target_columns = rows.target - first_column
    (rows_in_tile,) = torch.where((rows.target >= 0) & (target_columns >= 0) & (target_columns < out.shape[1]))
    target_columns = target_columns[rows_in_tile]
    target_products = rows.hidden[rows_in_tile].float() * head.weight[target_columns].float()
    out[rows_in_tile, target_columns] = target_products.sum(1) + bias[target_columns]


def mend_heavy(
    ids: Tensor,  # [rows, HEAVY] int32
    exact_logits: Tensor,  # [rows, HEAVY]
    logits: Tensor,  # [rows, vocab] from e4m3 operands, with exact logits of targets
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    transform: Transform,
) -> None:
    """Finds the heavy ids of each row, which ``kernels/statistics/heavy.py`` defines. Writes them to ``ids``, then -1;
    and their exact logits to ``exact_logits``, then 0, and to ``logits``."""
    ids.fill_(-1)
    exact_logits.zero_()
    for block in row_blocks(logits):
        block_logits, lse = logits[block], logits[block].logsumexp(1)
        # in base 2, by how much a candidate is above the least threshold
        excess = (block_logits - lse[:, None]).div_(math.log(2.0)).add_(MARGIN_LOG2 - LEAST_HEAVY_LOG2)
        targets, column_range = target[block][:, None], torch.arange(block_logits.shape[1], device=lse.device)
        excess.masked_fill_((targets < 0) | (targets == column_range), -torch.inf)
        # [rows] 0, 1 or 2: by how much the row's threshold is above the least one
        raises = torch.stack([(excess > step).sum(1) > ids.shape[1] for step in (0.0, 1.0)]).sum(0)
        row_ids, columns = torch.where(excess > raises[:, None])
        dots = block_logits.new_empty(len(row_ids))
        dot_columns(dots, hidden, weight, columns, bias, transform, row_ids + block.start)
        is_heavy = dots - lse[row_ids] > (raises[row_ids] + LEAST_HEAVY_LOG2) * math.log(2.0)
        row_ids, columns, dots = row_ids[is_heavy], columns[is_heavy], dots[is_heavy]
        heavy_counts = row_ids.bincount(minlength=len(block_logits))
        list_index = torch.arange(len(row_ids), device=lse.device) - (heavy_counts.cumsum(0) - heavy_counts)[row_ids]
        has_place = list_index < ids.shape[1]
        row_ids, columns, dots, list_index = (x[has_place] for x in (row_ids, columns, dots, list_index))
        ids[block][row_ids, list_index] = columns.int()
        exact_logits[block][row_ids, list_index] = dots
        block_logits[row_ids, columns] = dots


def put_columns(logits: Tensor, columns: Tensor, values: Tensor) -> None:
    """Writes ``values`` [rows, count] to the columns ``columns`` [rows, count] of ``logits``, and leaves out columns
    that ``logits`` does not have."""
    row_ids, list_index = torch.where((columns >= 0) & (columns < logits.shape[1]))
    logits[row_ids, columns[row_ids, list_index]] = values[row_ids, list_index]
