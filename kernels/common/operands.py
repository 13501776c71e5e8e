"""Arguments that launches of several folders make: memory of strips, and matrices as descriptors or pointers.

Triton checks each new descriptor, so that equal descriptors (address, shape, block) are made once.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ...core.memory import Cache, empty
from ...core.records import Statistic, StatisticOutputs, Stored, TeacherSoftmax
from ...core.tiles import Matrix, Quantised, Tile, cdiv
from .launcher import is_known

STRIP_ROWS = 16  # strides are multiples of it, so that Triton reads vectors


def strip_rows(rows: int) -> int:
    """The stride from strip to strip of vectors [strips, rows]: ``rows`` rounded up to a multiple of STRIP_ROWS."""
    return cdiv(rows, STRIP_ROWS) * STRIP_ROWS


def strip_stride(stored: Stored, teacher: TeacherSoftmax | None) -> int:
    """Stride from strip to strip of the offsets, one for both of the same rows; 0 for raw logits."""
    sides = (stored,) if teacher is None else (stored, teacher.stored)
    strides = {side.offset.stride(0) for side in sides if side.offset is not None} or {0}
    assert len(strides) == 1, "buffers of relative logits are for equally many rows"
    return strides.pop()


def teacher_operands(teacher: TeacherSoftmax | None) -> tuple[Any, ...]:
    """A dense teacher's arguments of a kernel, as ``sums.FLAT`` names them."""
    if teacher is None:
        return ()
    return *teacher.stored[:3], *teacher[1:], teacher.stored.logits.stride(0), *teacher.stored.transform


class Strips(NamedTuple):
    """The numbers that the logits matmul writes for each strip of columns and each row, [strips, rows] fp32.

    A strip's rows start at a multiple of STRIP_ROWS elements.
    """

    offset: torch.Tensor
    sums: tuple[torch.Tensor, ...]  # for each softmax the sum of exponentials
    statistics: tuple[tuple[StatisticOutputs, ...], ...]  # for each softmax, its statistics' vectors; ids are int32

    @classmethod
    def empty(
        cls, rows: int, strips: int, device: torch.device, statistics: Sequence[Sequence[Statistic]] = ((),)
    ) -> "Strips":
        """Uninitialised memory. ``statistics``: for each softmax the list of its statistics."""
        count = 1 + sum(1 + sum(len(statistic.vectors) for statistic in of_softmax) for of_softmax in statistics)
        tensors = iter(empty(count, strips, strip_rows(rows), dtype=torch.float32, device=device).unbind())

        def vectors_of(statistic: Statistic) -> StatisticOutputs:
            vectors = [(name, next(tensors)) for name in statistic.vectors]
            as_ids = [vector.view(torch.int32) if name in statistic.ids else vector for name, vector in vectors]
            return StatisticOutputs(statistic, tuple(as_ids))

        offset, sums = next(tensors), tuple([next(tensors) for _ in statistics])
        return cls(offset, sums, tuple([tuple(map(vectors_of, of_softmax)) for of_softmax in statistics]))

    @property
    def kinds(self) -> tuple[tuple[Statistic, ...], ...]:
        """The statistics of each softmax."""
        return tuple([tuple([each.statistic for each in of_softmax]) for of_softmax in self.statistics])

    @property
    def vectors(self) -> list[torch.Tensor]:
        """Those of all statistics."""
        return [vector for of_softmax in self.statistics for each in of_softmax for vector in each.vectors]

    def all_sums(self) -> torch.Tensor:
        """The memory [n] of all vectors but the offsets, which is free once the rows' statistics are merged."""
        vector_count, first = len(self.sums) + len(self.vectors), self.sums[0]
        return first.as_strided((vector_count * first.shape[0] * first.stride(0),), (1,))

    def of_rows(self, rows: int) -> "Strips":
        """The strips of a chunk of ``rows`` rows, sharing memory."""
        if rows == self.offset.shape[1]:
            return self
        statistics = [
            tuple(
                [
                    StatisticOutputs(statistic, tuple([t[:, :rows] for t in vectors]))
                    for statistic, vectors in of_softmax
                ]
            )
            for of_softmax in self.statistics
        ]
        return Strips(self.offset[:, :rows], tuple([t[:, :rows] for t in self.sums]), tuple(statistics))


def as_quantised(matrix: Matrix) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """A matrix as it lies in memory, its scale (None for 1), and what was taken out of it (None for nothing)."""
    return matrix if isinstance(matrix, Quantised) else (matrix, None, None)


KEPT: Cache[tuple, TensorDescriptor] = Cache(4096)


class Address:
    """The address and dtype of a tensor, in place of the tensor in a descriptor that outlives it."""

    def __init__(self, tensor: torch.Tensor):
        self.address, self.dtype = tensor.data_ptr(), tensor.dtype

    def data_ptr(self) -> int:
        return self.address


def described(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """``TensorDescriptor.from_tensor(tensor, [rows, columns])`` of a matrix."""
    key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, rows, columns
    descriptor = KEPT.get(key)
    if descriptor is None:
        descriptor = TensorDescriptor.from_tensor(tensor, [rows, columns])
        descriptor.fields = {}
        if is_known():
            descriptor.base = Address(tensor)
            KEPT[key] = descriptor
    return descriptor


def row_stride(tensor: torch.Tensor | None, tile: Tile) -> int:
    """The stride from row to row for a kernel that loads through pointers; 0 for one with descriptors, or for None."""
    return 0 if tensor is None or tile.described else tensor.stride(0)


def even(columns: int, tile: Tile) -> bool:
    """True where a loop over the columns needs no mask: they are a multiple of the tile's step, or the tensor copy
    engine fills with zeros."""
    return tile.described or columns % tile.block_k == 0


def matrix(
    tensor: torch.Tensor | None, rows: int, columns: int, tile: Tile
) -> tuple[TensorDescriptor | None, torch.Tensor | None]:
    """Returns a descriptor with blocks of ``rows`` by ``columns`` and None; or, for tiles that load through pointers,
    None and the tensor."""
    if tensor is None or not tile.described:
        assert tensor is None or tensor.stride(1) == 1, "columns are contiguous"
        return None, tensor
    return described(tensor, rows, columns), None
