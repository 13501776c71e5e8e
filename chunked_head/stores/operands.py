"""The operands of stores: rows of hidden states, the head, a teacher, sets of columns."""

import functools
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
    """The weight of a head, and the bias, scale and cap that make logits of its products with hidden states:
    ``x = cap(scale * (h @ weight.T + bias))``.

    The call's temperature T is in scale and cap: ``cap tanh(s r / cap) / T = (cap / T) tanh((s / T) r / (cap / T))``.
    Temperatures per token are in ``Rows.scale``.
    """

    weight: Tensor  # [vocab, hidden]
    bias: Tensor | None  # [vocab]
    class_weights: Tensor | None  # [vocab] fp32 or fp64
    logit_scale: float = 1.0
    softcap: float | None = None
    # adds logits of targets [rows] over the ranks that share the vocabulary, in place; None on one rank
    add_targets: Callable[[Tensor], None] | None = None
    fp8: RoundedHead | None = None  # makes the logits, but those of targets and heavy ids; None: the weight makes them
    scaled: ClassVar[bool] = True  # ``Rows.scale`` multiplies the logits too

    def columns(self, tile: slice) -> "Head":
        """The head of a slice of the vocabulary, sharing memory."""
        return replace(
            self,
            weight=self.weight[tile],
            fp8=None if self.fp8 is None else self.fp8.columns(tile),
            bias=None if self.bias is None else self.bias[tile],
            class_weights=None if self.class_weights is None else self.class_weights[tile],
        )


@dataclass(frozen=True, eq=False)
class TeacherHead:
    """A dense teacher: its logits, or its hidden states and head. The teacher's temperature is in scale and cap;
    with ``scaled``, each token's temperature is in ``Rows.scale``."""

    logits: Tensor | None  # [tokens, vocabulary], before scale and cap
    hidden: Tensor | None  # [tokens, width]
    weight: Tensor | None  # [vocabulary, width]
    bias: Tensor | None  # [vocabulary]
    logit_scale: float = 1.0
    softcap: float | None = None
    scaled: bool = False  # ``Rows.scale`` multiplies its logits, as it does the student's
    dtype: torch.dtype | None = None  # dtype of the matmul under autocast; None: that of the operands

    @property
    def casts(self) -> bool:
        """True where autocast casts the teacher's head."""
        return self.weight is not None and self.dtype not in (None, self.weight.dtype)

    def cast_head(self) -> "TeacherHead":
        """The teacher with its head in the dtype of the matmul; itself without autocast."""
        if self.dtype is None or self.weight is None:
            return self
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return replace(self, weight=self.weight.to(self.dtype), bias=bias)

    def columns(self, columns: slice) -> "TeacherHead":
        """The teacher with the rows ``columns`` of its head, which make a slice of its logits."""
        assert self.weight is not None
        return replace(self, weight=self.weight[columns], bias=None if self.bias is None else self.bias[columns])

    def rows(self, rows: slice | Tensor) -> "TeacherHead":
        """The teacher of a slice of rows, or of the rows with the indices ``rows``."""
        tensors: dict[str, Any] = {"logits": self.logits, "hidden": self.hidden}
        return replace(self, **{name: value[rows] for name, value in tensors.items() if value is not None})

    @property
    def tensors(self) -> list[Tensor]:
        """The teacher's tensors that are not None: logits, hidden states, weight, bias."""
        return [t for t in (self.logits, self.hidden, self.weight, self.bias) if t is not None]

    def with_tensors(self, tensors: Sequence[Tensor]) -> "TeacherHead":
        """The teacher with these tensors in the place of those that the property ``tensors`` returns, in the same
        order."""
        names = [name for name in ("logits", "hidden", "weight", "bias") if getattr(self, name) is not None]
        fields: dict[str, Any] = dict(zip(names, tensors, strict=False))
        return replace(self, **fields)


@dataclass(frozen=True, eq=False)
class Kept:
    """Sets of columns (``kept_ids``). The softmax of a row with a set is over the columns of the set, and no matmul
    makes its logits.

    There are n entries; those of a row follow each other. An entry is a column of the set, or no column (-1).
    """

    starts: Tensor  # [tokens] int64: index of a row's first entry
    ends: Tensor  # [tokens] int64: index after a row's last entry; equal to ``starts`` for a row without a set
    rows: Tensor  # [n] int64: the entry's row; -1 for no row
    columns: Tensor  # [n] int32: the entry's column; -1 for a repeated column, or one of another rank
    everywhere: bool  # every row that counts has a set
    bias: Tensor | None = None  # [n] added to the entries' logits, before a temperature per token

    @classmethod
    def columns_of(cls, columns: Tensor) -> "Kept":
        """The K ``columns`` [tokens, K] of each row as sets of K entries, for logits alone: softmaxes are over the
        vocabulary."""
        tokens, count = columns.shape
        starts = torch.arange(0, tokens * count, count, device=columns.device)
        rows = torch.arange(tokens, device=columns.device).repeat_interleave(count, output_size=tokens * count)
        return cls(starts, starts + count, rows, columns.reshape(-1).int(), True)

    @functools.cached_property
    def has(self) -> Tensor:
        """Mask [tokens] of rows that have a set."""
        return self.ends > self.starts


class CallRows(NamedTuple):
    """All rows of a call on hidden states."""

    hidden: Tensor  # [tokens, hidden] of the caller, in the caller's order
    targets: Tensor  # [rows] int64 in the order in which rows run, -1 where a row does not count
    order: Tensor | None  # [rows] int64: each row's index in ``hidden``; None: row i is i


class Rows(NamedTuple):
    """The rows of a chunk as a store takes them."""

    # [rows, hidden] the matmuls' operand: ``source`` with 0 where a row does not count, copied by ``Store.fill``; for
    # logits that exist [rows, 0]
    hidden: Tensor
    target: Tensor  # [rows] int64, -1 where a row does not count
    tokens: slice  # the slice of the call that these rows are
    columns: Tensor | None = None  # [rows, K] int64, -1 for none
    scale: Tensor | None = None  # [rows] in the statistics' dtype: factor of a row's logits; None: 1
    teacher: TeacherHead | None = None
    counted: Tensor | None = None  # [] int64: the call's first rows, so many, count; None: any row may count
    source: Tensor | None = None  # [..., hidden]: hidden states of the caller, or of all ranks
    order: Tensor | None = None  # [rows] int64: each row's index in ``source``; None: row i is i

    def narrow(self, rows: slice) -> "Rows":
        """A slice of the rows, sharing memory, without ``source`` and ``order``; ``self`` for a slice of all rows."""
        if rows.start == 0 and rows.stop == self.target.shape[0]:
            return self
        columns, scale = (None if values is None else values[rows] for values in (self.columns, self.scale))
        teacher = None if self.teacher is None else self.teacher.rows(rows)
        tokens = slice(self.tokens.start + rows.start, self.tokens.start + rows.stop)
        return Rows(self.hidden[rows], self.target[rows], tokens, columns, scale, teacher, self.counted)


def fp8_logits(out: Tensor, rows: Rows, first_column: int, head: Head, fp8: RoundedHead) -> None:
    """Writes raw logits of e4m3 operands, multiplied in fp32, to ``out`` [rows, columns], from column
    ``first_column`` on. Logits of targets are products of the 16-bit operands."""
    quantised_hidden = empty_quantised(len(rows.hidden), rows.hidden.shape[1], rows.hidden.device, each_row=True)
    quantise_(quantised_hidden, rows.hidden, fp8.direction, quantised_hidden.common)
    project(quantised_hidden.values.float(), fp8.weight.values, out)
    assert quantised_hidden.common is not None and fp8.weight.common is not None
    out.mul_(quantised_hidden.scale[:, None] * fp8.weight.scale).addr_(quantised_hidden.common, fp8.weight.common)
    bias = head.weight.new_zeros(len(head.weight)) if head.bias is None else head.bias
    out += bias
    target_columns = rows.target - first_column
    (rows_in_tile,) = torch.where((rows.target >= 0) & (target_columns >= 0) & (target_columns < out.shape[1]))
    target_columns = target_columns[rows_in_tile]
    out[rows_in_tile, target_columns] = (rows.hidden[rows_in_tile].float() * head.weight[target_columns].float()).sum(
        1
    ) + bias[target_columns]


def mend_heavy(
    ids: Tensor,
    exact_logits: Tensor,
    logits: Tensor,  # [rows, vocab], the targets' exact
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    transform: Transform,
) -> None:
    """Puts exact logits in the places of heavy ids' in ``logits``; writes lists [rows, HEAVY] of these ``ids`` and of
    their exact logits, as ``kernels.statistics.heavy`` says."""
    ids.fill_(-1)
    exact_logits.zero_()
    for block in row_blocks(logits):
        block_logits, lse = logits[block], logits[block].logsumexp(1)
        # in base 2, by how much a candidate is above the least threshold
        excess = (block_logits - lse[:, None]).div_(math.log(2.0)).add_(MARGIN_LOG2 - LEAST_HEAVY_LOG2)
        targets, column_range = target[block][:, None], torch.arange(block_logits.shape[1], device=lse.device)
        excess.masked_fill_((targets < 0) | (targets == column_range), -torch.inf)
        steps = torch.stack([(excess > step).sum(1) > ids.shape[1] for step in (0.0, 1.0)]).sum(0)
        row_ids, column_ids = torch.where(excess > steps[:, None])
        exact_dots = block_logits.new_empty(len(row_ids))
        dot_columns(exact_dots, hidden, weight, column_ids, bias, transform, row_ids + block.start)
        is_heavy = exact_dots - lse[row_ids] > (steps[row_ids] + LEAST_HEAVY_LOG2) * math.log(2.0)
        row_ids, column_ids, exact_dots = row_ids[is_heavy], column_ids[is_heavy], exact_dots[is_heavy]
        heavy_counts = row_ids.bincount(minlength=len(block_logits))
        list_places = torch.arange(len(row_ids), device=lse.device) - (heavy_counts.cumsum(0) - heavy_counts)[row_ids]
        has_place = list_places < ids.shape[1]
        row_ids, column_ids, exact_dots = row_ids[has_place], column_ids[has_place], exact_dots[has_place]
        ids[block][row_ids, list_places[has_place]] = column_ids.int()
        exact_logits[block][row_ids, list_places[has_place]] = exact_dots
        block_logits[row_ids, column_ids] = exact_dots


def put_columns(logits: Tensor, columns: Tensor, values: Tensor) -> None:
    """Writes ``values`` [rows, count] to the places ``columns`` [rows, count] of each row of ``logits``; columns
    outside of ``logits`` are left out."""
    row_ids, list_places = torch.where((columns >= 0) & (columns < logits.shape[1]))
    logits[row_ids, columns[row_ids, list_places]] = values[row_ids, list_places]
