"""Ranks that share a call by rows of the head or by tokens, and shifted targets."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from ..core.checks import check_int, choice, flag

ROWS = "rows of VocabParallel"  # name of what ranks compare
MOST_IDS = 1 << 24  # ids travel with statistics as floats, which are exact up to here
LAYOUTS = ("contiguous", "zigzag")  # of sequences over ranks


class OfGroup:
    """Base of the layouts: processes of a group that share a call."""

    group: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A module's copy works with the same processes."""
        return self

    @property
    def ranks(self) -> int:
        return distributed.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return distributed.get_rank(self.group)


@dataclass(frozen=True)
class TokenParallel(OfGroup):
    """Ranks of ``group`` hold different tokens of one batch: data-parallel, sequence- or context-parallel.

    A rank's loss and parts are its shares of the whole batch's: an ``all_reduce(SUM)`` gives the whole, to be logged.
    Gradients are those of the whole batch's loss: a token's row of ``hidden``'s is complete, ``weight``'s is what this
    rank's tokens add, for the framework to ``all_reduce(SUM)`` as it does for all other parameters.

    - Denominators count the tokens (segments, pairs, class weights of targets) of all ranks. A ``normalizer`` that is
      given is the whole batch's already.
    - A segment's tokens may lie on several ranks, under the same id; it counts once. Ids, ``num_segments``, ``pairs``
      and other fields per segment, per pair or constant are those of the whole batch, the same on every rank.
      ``batch.segment_sum``, ``segment_mean`` and ``segment_count`` in a loss of one's own are of all ranks' tokens.
      Ranks take turns to add a segment's or a pair's value to their share, whichever rank has its tokens.
    - ``out.metrics`` are those of the whole batch, the same on every rank.
    - The upstream gradient of the loss must be the same on all ranks, as a loss scale is.

    docs/guides/multi-gpu.md lists the messages. An id out of range on one rank makes loss, metrics and gradients nan on
    all. On the CPU it raises on that rank, like any other input that one rank refuses, and the others wait.

    Args:
        group: a process group, a one-dimensional DeviceMesh, or None for all processes. Every rank makes the same
            calls in the same order, with as many tokens as it has, none included.
        average: multiplies the loss, and so the gradients, by the number of ranks, for frameworks that average
            gradients over the group (DDP's and FSDP's default) rather than add them; the mean of the losses
            is then the batch's. Parts and metrics are not multiplied.
    """

    group: Any = None
    average: bool = False

    def __post_init__(self) -> None:
        flag("average of TokenParallel", self.average)
        object.__setattr__(self, "group", process_group(self.group, "TokenParallel"))


@dataclass(frozen=True)
class VocabParallel(OfGroup):
    """Ranks of ``group`` each hold some of the head's rows, in the order of ranks: ``weight`` (``bias``, a teacher's
    head) is this rank's part, and so are the columns of ``logits_loss``'s logits.

    Every rank gives the same targets, fields and options, and gets the same loss, metrics and per-token values, and
    the whole gradient of ``hidden``; that of ``weight`` is its part's.

    Args:
        group: a process group, a one-dimensional DeviceMesh, or None for all processes.
        rows: how many rows each rank holds, ``[ranks]``. None: as many everywhere, or what ``torch.chunk`` (DTensor's
            ``Shard(0)``) makes of ``vocab_size``.
        sequence_sharded: hidden states are each rank's own part of the tokens, as many on every rank, in order of
            ranks; so are targets, fields and what comes back per token. Rows are gathered chunk by chunk and their
            gradients reduce-scattered.
        reduce_dhidden: False: ``hidden``'s gradient is on each rank what its own rows add to it, for a graph that sums
            these itself (Megatron's ``copy_to_tensor_model_parallel_region``).
        tokens: how the batch is spread over ranks that hold the same part of the vocabulary, or None.
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
        if len(rows) != self.ranks or not all(type(n) is int and n > 0 for n in rows):
            raise ValueError(
                f"rows of VocabParallel must be {self.ranks} positive ints, one for each rank, got {self.rows!r}"
            )
        object.__setattr__(self, "rows", rows)

    def split(self, rows: int, vocab_size: int | None) -> tuple[int, tuple[int, ...]]:
        """Number of ids of the vocabulary, and of each rank [ranks], without padding. ``rows``: rows of the head, or
        columns of logits, on this rank. ValueError, before any message, for what this rank alone can see to be wrong.
        """
        if self.rows is not None:
            sizes = self.rows
        elif vocab_size is not None and rows == part_sizes(vocab_size, self.ranks)[self.rank]:
            sizes = part_sizes(vocab_size, self.ranks)
        else:
            sizes = (rows,) * self.ranks
        if sizes[self.rank] != rows:
            raise ValueError(f"rank {self.rank} holds {rows} ids, rows of VocabParallel says {sizes[self.rank]}")
        vocab = sum(sizes) if vocab_size is None else vocab_size
        if vocab > sum(sizes):
            raise ValueError(
                f"vocab_size is {vocab}, and the {self.ranks} ranks hold {sum(sizes)} ids between them"
                + (f", as many on each as on rank {self.rank}; of other parts rows= tells" if self.rows is None else "")
            )
        if vocab >= MOST_IDS:
            raise ValueError(f"vocabularies of ranks are of at most {MOST_IDS - 1} ids, got {vocab}")
        firsts = [sum(sizes[:rank]) for rank in range(self.ranks)]
        true = tuple(max(0, min(n, vocab - first)) for n, first in zip(sizes, firsts, strict=True))
        if 0 in true:
            raise ValueError(
                f"rank {true.index(0)} of VocabParallel holds no row of a vocabulary of {vocab} "
                f"(rows {list(sizes)}); split it over fewer ranks"
            )
        return vocab, true


def part_sizes(vocab: int, ranks: int) -> tuple[int, ...]:
    """Rows of ``torch.chunk``'s pieces: equal, the last ones smaller or empty."""
    step = math.ceil(vocab / ranks)
    return tuple(max(0, min(step, vocab - rank * step)) for rank in range(ranks))


def process_group(group: Any, layout: str) -> Any:
    """The process group of a group, a one-dimensional mesh or None."""
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
    """``target[..., t + shift]`` at t, across the slices of sequences that the ranks of ``group`` hold.

    Replaces ``shift=`` of ``linear_cross_entropy``, which is then 0, where no rank has the whole sequence. The first
    ``shift`` ids of every slice travel, in one message; the sequence's end predicts nothing and gets ``ignore_index``.

    Args:
        target: token ids [...] int64 or int32; along ``dim`` this rank's part of each sequence.
        group: a process group, a one-dimensional DeviceMesh, or None for all processes; every rank of it calls.
        shift: how far ahead the predicted token stands, at least 1; every slice is at least so long.
        ignore_index: the target of tokens that predict nothing.
        dim: the dimension that sequences run along.
        layout: ``"contiguous"``: rank r holds slice r of as many as there are ranks, of any lengths. ``"zigzag"``, the
            balanced one of PyTorch's and Megatron's context parallelism: rank r of R holds slices r and 2R - 1 - r of
            2R equal ones, one after the other.

    Returns:
        A tensor of the shape and dtype of ``target``.

    Raises:
        TypeError, ValueError, RuntimeError: before any message, naming the argument.
    """
    if not isinstance(target, Tensor) or target.dtype not in (torch.int64, torch.int32):
        description = getattr(target, "dtype", type(target).__name__)
        raise TypeError(f"target of shift_targets must be an int64 or int32 tensor, got {description}")
    for name, value, least in (("shift", shift, 1), ("ignore_index", ignore_index, None), ("dim", dim, None)):
        check_int(f"{name} of shift_targets", value, least)
    if not -target.dim() <= dim < target.dim():
        raise ValueError(f"dim of shift_targets must be a dimension of target {tuple(target.shape)}, got {dim}")
    choice("shift_targets", "layout", layout, LAYOUTS)
    group = process_group(group, "shift_targets")
    ranks, rank = distributed.get_world_size(group), distributed.get_rank(group)
    count = 2 if layout == "zigzag" else 1
    length = target.shape[dim]
    if length % count or length // count < shift:
        raise ValueError(
            f"target of shift_targets has {length} ids along dimension {dim}; layout={layout!r} with shift={shift} "
            + (f"takes {count} equal slices of at least {shift}" if count > 1 else f"takes at least {shift}")
        )
    slices = target.chunk(count, dim)
    first = torch.stack([piece.narrow(dim, 0, shift) for piece in slices])
    gathered = first.new_empty(ranks, *first.shape)
    distributed.all_gather_into_tensor(gathered.view(-1), first.view(-1), group=group)
    places = (rank, 2 * ranks - 1 - rank)[:count]  # places of this rank's slices in the sequence
    shifted = []
    for piece, place in zip(slices, places, strict=True):
        following_place = place + 1
        if following_place == count * ranks:
            following = torch.full_like(first[0], ignore_index)
        else:
            following = (
                gathered[following_place, 0]
                if following_place < ranks
                else gathered[2 * ranks - 1 - following_place, 1]
            )
        shifted += [piece.narrow(dim, shift, piece.shape[dim] - shift), following]
    return torch.cat(shifted, dim)
