"""Layouts of a call over ranks, ``TokenParallel`` and ``VocabParallel``; ``shift_targets`` for sequences over ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from ..core.checks import check_int, choice, flag

ROWS = "rows of VocabParallel"  # name of the field in which ranks compare their numbers of rows
MAX_IDS = 1 << 24  # ranks send ids as float32, which is exact up to this number
LAYOUTS = ("contiguous", "zigzag")  # layouts of sequences over ranks


class GroupLayout:
    """Base class of ``TokenParallel`` and ``VocabParallel``: a process group whose ranks share a call."""

    group: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Returns the layout itself, so that a module's copy uses the same process group."""
        return self

    @property
    def ranks(self) -> int:
        return distributed.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return distributed.get_rank(self.group)


@dataclass(frozen=True)
class TokenParallel(GroupLayout):
    """Ranks of ``group`` hold different tokens of one batch: data-parallel, sequence- or context-parallel.

    The loss and the parts on a rank are shares of the batch's loss and parts: ``all_reduce(SUM)`` gives the numbers to
    log. Gradients are gradients of the batch's loss. The gradient of ``hidden`` is complete. The gradient of ``weight``
    is this rank's share: the framework adds up shares with ``all_reduce(SUM)``, as for all other parameters.

    - Denominators count the tokens (segments, pairs, class weights of targets) of all ranks. A ``normalizer`` that you
      pass must be the denominator of the whole batch.
    - The tokens of a segment may lie on several ranks, under the same id; the segment counts once. ``num_segments``,
      ``pairs``, fields per segment, fields per pair and constant fields must be equal on all ranks: they describe the
      whole batch. In a loss that you write, ``batch.segment_sum``, ``segment_mean`` and ``segment_count`` are over all
      ranks' tokens. Segment (or pair) i is in the share of rank ``i % ranks``, whichever ranks have its tokens.
    - ``out.metrics`` are metrics of the whole batch, equal on all ranks.
    - The upstream gradient of the loss must be the same on all ranks, as a loss scale is.

    docs/guides/multi-gpu.md lists the messages. An id out of range on one rank makes loss, metrics and gradients nan on
    all ranks. On the CPU it raises on that rank, as does any other wrong input, while the other ranks wait.

    Args:
        group: a process group, a one-dimensional DeviceMesh, or None for all processes. Every rank makes the same calls
            in the same order, each with any number of tokens, 0 included.
        average: True: the loss, and so the gradients, are multiplied by the number of ranks, for frameworks that
            average gradients over the group (DDP's and FSDP's default) and do not sum them. The mean of the ranks'
            losses is the batch's loss. Parts and metrics are not multiplied.
    """

    group: Any = None
    average: bool = False

    def __post_init__(self) -> None:
        flag("average of TokenParallel", self.average)
        object.__setattr__(self, "group", process_group(self.group, "TokenParallel"))


@dataclass(frozen=True)
class VocabParallel(GroupLayout):
    """Each rank of ``group`` holds some rows of the head, in the order of ranks. ``weight``, ``bias`` and a teacher's
    head are this rank's rows. For ``logits_loss``, ``logits`` are this rank's columns.

    Every rank passes the same targets, fields and options. Every rank gets the same loss, metrics and values per token,
    the complete gradient of ``hidden``, and the gradient of its own rows of ``weight``.

    Args:
        group: a process group, a one-dimensional DeviceMesh, or None for all processes.
        rows: number of rows on each rank, ``[ranks]``. None: the same number on all ranks; or, if the rows fit, the
            sizes of ``torch.chunk`` (DTensor's ``Shard(0)``) for ``vocab_size`` rows.
        sequence_sharded: True: each rank has a part of the tokens, in the order of ranks, and of the same size. A rank
            passes hidden states, targets and fields of its tokens, and gets values of its tokens. Hidden states are
            gathered chunk by chunk, and their gradients reduce-scattered.
        reduce_dhidden: False: the gradient of ``hidden`` is this rank's share. The graph that made ``hidden`` must sum
            the shares over ranks (Megatron's ``copy_to_tensor_model_parallel_region``).
        tokens: a ``TokenParallel`` of the ranks that hold the same rows of the head and different tokens; or None.
    """

    group: Any = None
    rows: Sequence[int] | None = None  # number of rows on each rank
    sequence_sharded: bool = False
    reduce_dhidden: bool = True
    tokens: TokenParallel | None = None

    def __post_init__(self) -> None:
        flag("sequence_sharded of VocabParallel", self.sequence_sharded)
        flag("reduce_dhidden of VocabParallel", self.reduce_dhidden)
        if self.sequence_sharded and not self.reduce_dhidden:
            raise ValueError("sequence_sharded=True reduces the gradient of hidden; leave reduce_dhidden=True")
        if self.tokens is not None and not isinstance(self.tokens, TokenParallel):
            raise TypeError(f"tokens of VocabParallel must be a TokenParallel or None, got {self.tokens!r}")
        object.__setattr__(self, "group", process_group(self.group, "VocabParallel"))
        if self.rows is None:
            return
        rows = tuple(self.rows) if isinstance(self.rows, Sequence) else ()
        if len(rows) != self.ranks or not all(type(row_count) is int and row_count > 0 for row_count in rows):
            raise ValueError(
                f"rows of VocabParallel must be {self.ranks} positive ints, one for each rank, got {self.rows!r}"
            )
        object.__setattr__(self, "rows", rows)

    def split(self, num_rows: int, vocab_size: int | None) -> tuple[int, tuple[int, ...]]:
        """Returns the number of ids of the vocabulary, and the number of ids on each rank [ranks], both without
        padding. ``num_rows``: number of the head's rows, or of the logits' columns, on this rank. Raises
        ValueError for numbers that this rank knows to be wrong, before any message is sent."""
        if self.rows is not None:
            rows_by_rank = self.rows
        elif vocab_size is not None and num_rows == part_sizes(vocab_size, self.ranks)[self.rank]:
            rows_by_rank = part_sizes(vocab_size, self.ranks)
        else:
            rows_by_rank = (num_rows,) * self.ranks
        if rows_by_rank[self.rank] != num_rows:
            raise ValueError(
                f"rank {self.rank} holds {num_rows} ids, rows of VocabParallel says {rows_by_rank[self.rank]}"
            )
        vocab = sum(rows_by_rank) if vocab_size is None else vocab_size
        if vocab > sum(rows_by_rank):
            raise ValueError(
                f"vocab_size is {vocab}, and the {self.ranks} ranks hold {sum(rows_by_rank)} ids between them"
                + (f", as many on each as on rank {self.rank}; of other parts rows= tells" if self.rows is None else "")
            )
        if vocab >= MAX_IDS:
            raise ValueError(f"vocabularies of ranks are of at most {MAX_IDS - 1} ids, got {vocab}")
        first_ids = [sum(rows_by_rank[:rank]) for rank in range(self.ranks)]
        ids_by_rank = tuple(
            max(0, min(row_count, vocab - first_id))
            for row_count, first_id in zip(rows_by_rank, first_ids, strict=True)
        )
        if 0 in ids_by_rank:
            raise ValueError(
                f"rank {ids_by_rank.index(0)} of VocabParallel holds no row of a vocabulary of {vocab} "
                f"(rows {list(rows_by_rank)}); split it over fewer ranks"
            )
        return vocab, ids_by_rank


def part_sizes(vocab: int, ranks: int) -> tuple[int, ...]:
    """Sizes [ranks] of the pieces into which ``torch.chunk`` divides ``vocab`` rows; 0 for ranks without a piece."""
    rows_per_rank = math.ceil(vocab / ranks)
    return tuple(max(0, min(rows_per_rank, vocab - rank * rows_per_rank)) for rank in range(ranks))


def process_group(group: Any, layout: str) -> Any:
    """The process group that ``group`` stands for: a process group, a one-dimensional mesh, or None (all processes).
    ``layout``: the caller's name, for errors."""
    if not (distributed.is_available() and distributed.is_initialized()):
        raise RuntimeError(f"{layout} needs torch.distributed.init_process_group() to have been called")
    if group is None:
        return distributed.group.WORLD
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise ValueError(
                f"{layout} takes a DeviceMesh of one dimension, got {group.ndim}; name one, such as mesh['tp']"
            )
        return group.get_group()
    if not isinstance(group, distributed.ProcessGroup):
        raise TypeError(f"{layout} takes a process group, a DeviceMesh or None, got {type(group).__name__}")
    if distributed.get_rank(group) < 0:
        raise ValueError(f"this process is none of the group that {layout} was given")
    return group


def shift_targets(
    target: Tensor,  # [...] int64, this rank's slice
    group: Any = None,
    shift: int = 1,
    ignore_index: int = -100,
    dim: int = -1,
    layout: str = "contiguous",
) -> Tensor:
    """Shifts sequences of targets by ``shift`` to the left. Each rank of ``group`` holds slices of each sequence.

    The function stands in for the argument ``shift`` of ``linear_cross_entropy`` where no rank has a complete sequence.
    One message sends the first ``shift`` ids of every slice. The last ``shift`` tokens of a sequence predict nothing
    and get ``ignore_index``.

    Args:
        target: token ids [...] int64 or int32; along ``dim`` this rank's part of each sequence.
        group: a process group, a one-dimensional DeviceMesh, or None for all processes; every rank of it calls.
        shift: distance to the predicted token, at least 1 and at most the length of a slice.
        ignore_index: the target of tokens that predict nothing.
        dim: the dimension of ``target`` that sequences run along.
        layout: ``"contiguous"``: rank r of R holds slice r of R slices, which may differ in length. ``"zigzag"``: rank
            r holds slices r and 2R - 1 - r of 2R equal slices, one after the other. This is the balanced layout of
            PyTorch's and Megatron's context parallelism.

    Returns:
        A tensor of the shape and dtype of ``target``.

    Raises:
        TypeError, ValueError, RuntimeError: an argument is wrong; raised before any message is sent.
    """
    if not isinstance(target, Tensor) or target.dtype not in (torch.int64, torch.int32):
        target_text = getattr(target, "dtype", type(target).__name__)
        raise TypeError(f"target of shift_targets must be an int64 or int32 tensor, got {target_text}")
    for name, value, least_value in (("shift", shift, 1), ("ignore_index", ignore_index, None), ("dim", dim, None)):
        check_int(f"{name} of shift_targets", value, least_value)
    if not -target.dim() <= dim < target.dim():
        raise ValueError(f"dim of shift_targets must be a dimension of target {tuple(target.shape)}, got {dim}")
    choice("shift_targets", "layout", layout, LAYOUTS)
    group = process_group(group, "shift_targets")
    num_ranks, rank = distributed.get_world_size(group), distributed.get_rank(group)
    slices_per_rank = 2 if layout == "zigzag" else 1
    num_ids = target.shape[dim]
    if num_ids % slices_per_rank or num_ids // slices_per_rank < shift:
        raise ValueError(
            f"target of shift_targets has {num_ids} ids along dimension {dim}; layout={layout!r} with shift={shift} "
            + (
                f"takes {slices_per_rank} equal slices of at least {shift}"
                if slices_per_rank > 1
                else f"takes at least {shift}"
            )
        )
    slices = target.chunk(slices_per_rank, dim)
    first_ids = torch.stack([ids.narrow(dim, 0, shift) for ids in slices])
    first_ids_by_rank = first_ids.new_empty(num_ranks, *first_ids.shape)
    distributed.all_gather_into_tensor(first_ids_by_rank.view(-1), first_ids.view(-1), group=group)
    slice_indices = (rank, 2 * num_ranks - 1 - rank)[:slices_per_rank]  # of this rank in the sequence
    shifted_slices = []
    for ids, slice_index in zip(slices, slice_indices, strict=True):
        next_index = slice_index + 1
        if next_index == slices_per_rank * num_ranks:
            next_ids = torch.full_like(first_ids[0], ignore_index)
        else:
            next_ids = (
                first_ids_by_rank[next_index, 0]
                if next_index < num_ranks
                else first_ids_by_rank[2 * num_ranks - 1 - next_index, 1]
            )
        shifted_slices += [ids.narrow(dim, shift, ids.shape[dim] - shift), next_ids]
    return torch.cat(shifted_slices, dim)
