"""``TokenParallel`` and ``VocabParallel``, layouts of a call over ranks; and ``shift_targets``, for sequences over
ranks."""

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
    """Base class of the layouts: a process group whose ranks share a call."""

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

    A rank's loss and parts are its shares of those of the whole batch: their ``all_reduce(SUM)`` is the number to log.
    Gradients are those of the whole batch's loss. The gradient of ``hidden`` is complete; that of ``weight`` is this
    rank's share, which the framework adds up with ``all_reduce(SUM)``, as it does for all other parameters.

    - Denominators count the tokens (segments, pairs, class weights of targets) of all ranks. A ``normalizer`` that you
      pass must be that of the whole batch.
    - The tokens of a segment may lie on several ranks, under the same id; the segment counts once. Ids,
      ``num_segments``, ``pairs``, fields per segment and per pair and constant fields are those of the whole batch,
      equal on all ranks. ``batch.segment_sum``, ``segment_mean`` and ``segment_count`` in a loss that you write are
      over all ranks' tokens. Segment (or pair) i is in the share of rank ``i % ranks``, whichever ranks have its
      tokens.
    - ``out.metrics`` are those of the whole batch, equal on all ranks.
    - The upstream gradient of the loss must be the same on all ranks, as a loss scale is.

    docs/guides/multi-gpu.md lists the messages. An id out of range on one rank makes loss, metrics and gradients nan on
    all ranks. On the CPU it raises on that rank, as does any other wrong input, while the other ranks wait.

    Args:
        group: a process group, a one-dimensional DeviceMesh, or None for all processes. Every rank makes the same calls
            in the same order, each with any number of tokens, 0 included.
        average: multiply the loss, and so the gradients, by the number of ranks, for frameworks that average gradients
            over the group (DDP's and FSDP's default) rather than sum them. Then the mean of the losses over ranks is
            the batch's loss. Parts and metrics are not multiplied.
    """

    group: Any = None
    average: bool = False

    def __post_init__(self) -> None:
        flag("average of TokenParallel", self.average)
        object.__setattr__(self, "group", process_group(self.group, "TokenParallel"))


@dataclass(frozen=True)
class VocabParallel(GroupLayout):
    """Ranks of ``group`` each hold some rows of the head, in the order of ranks. ``weight``, ``bias`` and a teacher's
    head are this rank's rows; for ``logits_loss``, ``logits`` are this rank's columns.

    Every rank passes the same targets, fields and options. It gets the same loss, metrics and values per token, the
    complete gradient of ``hidden``, and the gradient of this rank's rows of ``weight``.

    Args:
        group: a process group, a one-dimensional DeviceMesh, or None for all processes.
        rows: number of rows of each rank, ``[ranks]``. None: the same number on all ranks; or with ``vocab_size`` the
            sizes of ``torch.chunk`` (DTensor's ``Shard(0)``).
        sequence_sharded: True: a rank passes hidden states, targets and fields of its part of the tokens, the same
            number on every rank, in the order of ranks, and gets values of those tokens. Hidden states are gathered
            chunk by chunk, and their gradients reduce-scattered.
        reduce_dhidden: False: the gradient of ``hidden`` is this rank's share, which the graph that made ``hidden``
            sums over ranks (Megatron's ``copy_to_tensor_model_parallel_region``).
        tokens: a ``TokenParallel`` of the ranks that hold the same rows of the head and different tokens; or None.
    """

    group: Any = None
    rows: Sequence[int] | None = None
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
        if len(rows) != self.ranks or not all(type(size) is int and size > 0 for size in rows):
            raise ValueError(
                f"rows of VocabParallel must be {self.ranks} positive ints, one for each rank, got {self.rows!r}"
            )
        object.__setattr__(self, "rows", rows)

    def split(self, rows: int, vocab_size: int | None) -> tuple[int, tuple[int, ...]]:
        """Returns the number of ids of the vocabulary, and the number of ids on each rank [ranks], both without
        padding. ``rows``: number of rows of the head, or of columns of logits, on this rank. ValueError, before any
        message, for numbers that this rank alone knows to be wrong."""
        if self.rows is not None:
            rows_by_rank = self.rows
        elif vocab_size is not None and rows == part_sizes(vocab_size, self.ranks)[self.rank]:
            rows_by_rank = part_sizes(vocab_size, self.ranks)
        else:
            rows_by_rank = (rows,) * self.ranks
        if rows_by_rank[self.rank] != rows:
            raise ValueError(f"rank {self.rank} holds {rows} ids, rows of VocabParallel says {rows_by_rank[self.rank]}")
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
            max(0, min(num_rows, vocab - first_id)) for num_rows, first_id in zip(rows_by_rank, first_ids, strict=True)
        )
        if 0 in ids_by_rank:
            raise ValueError(
                f"rank {ids_by_rank.index(0)} of VocabParallel holds no row of a vocabulary of {vocab} "
                f"(rows {list(rows_by_rank)}); split it over fewer ranks"
            )
        return vocab, ids_by_rank


def part_sizes(vocab: int, ranks: int) -> tuple[int, ...]:
    """Number of rows in each of ``torch.chunk``'s pieces: equal, but the last ones are smaller or empty."""
    rows_per_rank = math.ceil(vocab / ranks)
    return tuple(max(0, min(rows_per_rank, vocab - rank * rows_per_rank)) for rank in range(ranks))


def process_group(group: Any, layout: str) -> Any:
    """The process group for ``group``: a process group, a one-dimensional mesh, or None for all processes."""
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
    """``target[..., t + shift]`` at t, for sequences of which each rank of ``group`` holds slices.

    It replaces the argument ``shift`` of ``linear_cross_entropy`` if no rank has a complete sequence. One message sends
    the first ``shift`` ids of every slice. The last ``shift`` tokens of a sequence predict nothing and get
    ``ignore_index``.

    Args:
        target: token ids [...] int64 or int32; along ``dim`` this rank's part of each sequence.
        group: a process group, a one-dimensional DeviceMesh, or None for all processes; every rank of it calls.
        shift: distance to the predicted token, at least 1 and at most the length of a slice.
        ignore_index: the target of tokens that predict nothing.
        dim: the dimension that sequences run along.
        layout: ``"contiguous"``: rank r of R holds slice r of R, which may differ in length. ``"zigzag"``, the balanced
            layout of PyTorch's and Megatron's context parallelism: rank r holds slices r and 2R - 1 - r of 2R equal
            slices, one after the other.

    Returns:
        A tensor of the shape and dtype of ``target``.

    Raises:
        TypeError, ValueError, RuntimeError: an argument, which the message names, is wrong; raised before any message.
    """
    if not isinstance(target, Tensor) or target.dtype not in (torch.int64, torch.int32):
        target_in_words = getattr(target, "dtype", type(target).__name__)
        raise TypeError(f"target of shift_targets must be an int64 or int32 tensor, got {target_in_words}")
    for name, value, least_value in (("shift", shift, 1), ("ignore_index", ignore_index, None), ("dim", dim, None)):
        check_int(f"{name} of shift_targets", value, least_value)
    if not -target.dim() <= dim < target.dim():
        raise ValueError(f"dim of shift_targets must be a dimension of target {tuple(target.shape)}, got {dim}")
    choice("shift_targets", "layout", layout, LAYOUTS)
    group = process_group(group, "shift_targets")
    num_ranks, rank = distributed.get_world_size(group), distributed.get_rank(group)
    slices_per_rank = 2 if layout == "zigzag" else 1
    length = target.shape[dim]
    if length % slices_per_rank or length // slices_per_rank < shift:
        raise ValueError(
            f"target of shift_targets has {length} ids along dimension {dim}; layout={layout!r} with shift={shift} "
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
    slice_positions = (rank, 2 * num_ranks - 1 - rank)[:slices_per_rank]  # places of this rank's slices in the sequence
    shifted_slices = []
    for ids, position in zip(slices, slice_positions, strict=True):
        next_position = position + 1
        if next_position == slices_per_rank * num_ranks:
            next_ids = torch.full_like(first_ids[0], ignore_index)
        else:
            next_ids = (
                first_ids_by_rank[next_position, 0]
                if next_position < num_ranks
                else first_ids_by_rank[2 * num_ranks - 1 - next_position, 1]
            )
        shifted_slices += [ids.narrow(dim, shift, ids.shape[dim] - shift), next_ids]
    return torch.cat(shifted_slices, dim)
