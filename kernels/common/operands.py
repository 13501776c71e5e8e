"""Arguments that launches in several folders share: tensors of strips, and matrices as descriptors or pointers.

Triton checks each new descriptor, which takes time: a descriptor of one address, shape and block is made once.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ...core.memory import Cache, empty
from ...core.records import Statistic, Stored, TeacherSoftmax
from ...core.tiles import Matrix, Quantised, Tile, cdiv
from .launcher import is_known

STRIP_ROWS = 16  # strides from strip to strip are multiples of this, so that Triton loads vectors


def strip_rows(rows: int) -> int:
    """The stride of tensors [strips, rows] from strip to strip: ``rows`` rounded up to a multiple of STRIP_ROWS."""
    return cdiv(rows, STRIP_ROWS) * STRIP_ROWS


def strip_stride(stored: Stored, teacher: TeacherSoftmax | None) -> int:
    """The stride from strip to strip of relative logits' offsets [strips, rows]; 0 if no logits are relative. The
    offsets of student and teacher must have the same stride."""
    stored_logits = (stored,) if teacher is None else (stored, teacher[0])
    strides = {logits.offset.stride(0) for logits in stored_logits if logits.offset is not None} or {0}
    assert len(strides) == 1, "buffers of relative logits are for equally many rows"
    return strides.pop()


def teacher_operands(teacher: TeacherSoftmax | None) -> tuple[Any, ...]:
    """A generated kernel's arguments for a dense teacher, in the order of ``sums.FLAT``; () without a teacher."""
    if teacher is None:
        return ()
    stored, softmax = teacher
    return *stored[:3], *softmax[:2], softmax.columns, stored.logits.stride(0), *stored.transform


class Strips(NamedTuple):
    """Tensors [strips, rows] that the logits matmul writes, fp32 but for ids, with strides of ``strip_rows``.
    A strip is a range of columns of the logits; each row has an offset and sums for each strip."""

    offset: torch.Tensor  # subtracted from logits before the exponential or the store
    sums: tuple[torch.Tensor, ...]  # for each softmax the sum of exponentials
    # for each softmax its statistics, each with the tensors of its vectors
    statistics: tuple[tuple[tuple[Statistic, tuple[torch.Tensor, ...]], ...], ...]

    @classmethod
    def empty(
        cls, rows: int, strips: int, device: torch.device, statistics: Sequence[Sequence[Statistic]] = ((),)
    ) -> "Strips":
        """Strips of uninitialised memory. ``statistics``: for each softmax the list of its statistics. Vectors that
        hold ids are int32."""
        tensor_count = 1 + sum(1 + sum(len(statistic.vectors) for statistic in group) for group in statistics)
        tensors = iter(empty(tensor_count, strips, strip_rows(rows), dtype=torch.float32, device=device).unbind())

        def vectors_of(statistic: Statistic) -> tuple[Statistic, tuple[torch.Tensor, ...]]:
            vectors = [(name, next(tensors)) for name in statistic.vectors]
            return statistic, tuple([v.view(torch.int32) if name in statistic.ids else v for name, v in vectors])

        offset, sums = next(tensors), tuple([next(tensors) for _ in statistics])
        return cls(offset, sums, tuple([tuple(map(vectors_of, group)) for group in statistics]))

    @property
    def kinds(self) -> tuple[tuple[Statistic, ...], ...]:
        """For each softmax its statistics, without tensors."""
        return tuple([tuple([statistic for statistic, _ in group]) for group in self.statistics])

    @property
    def statistic_vectors(self) -> list[torch.Tensor]:
        """The tensors of all statistics of all softmaxes, in order."""
        return [vector for group in self.statistics for _, vectors in group for vector in vectors]

    def all_sums(self) -> torch.Tensor:
        """The memory of all tensors but ``offset`` as one vector [n] fp32, for another use once the rows' statistics
        are merged."""
        tensor_count, first = len(self.sums) + len(self.statistic_vectors), self.sums[0]
        return first.as_strided((tensor_count * first.shape[0] * first.stride(0),), (1,))

    def of_rows(self, rows: int) -> "Strips":
        """Views of the first ``rows`` rows of all tensors."""
        if rows == self.offset.shape[1]:
            return self

        def narrow(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            return tuple([tensor[:, :rows] for tensor in tensors])

        statistics = [
            tuple([(statistic, narrow(vectors)) for statistic, vectors in group]) for group in self.statistics
        ]
        return Strips(self.offset[:, :rows], narrow(self.sums), tuple(statistics))


def as_quantised(matrix: Matrix) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Returns the fields of a ``Quantised`` matrix: values, scale and ``common``; for another matrix the matrix itself,
    None and None."""
    return matrix if isinstance(matrix, Quantised) else (matrix, None, None)


DESCRIPTORS: Cache[tuple, TensorDescriptor] = Cache(4096)


class Address:
    """The address and dtype of a tensor. A cached descriptor, which outlives the tensor, holds these instead."""

    def __init__(self, tensor: torch.Tensor):
        self.address, self.dtype = tensor.data_ptr(), tensor.dtype

    def data_ptr(self) -> int:
        return self.address


def described(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Returns ``TensorDescriptor.from_tensor(tensor, [rows, columns])``, cached by address, shape and block."""
    key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, rows, columns
    descriptor = DESCRIPTORS.get(key)
    if descriptor is None:
        descriptor = TensorDescriptor.from_tensor(tensor, [rows, columns])
        descriptor.fields = {}
        if is_known():
            descriptor.base = Address(tensor)
            DESCRIPTORS[key] = descriptor
    return descriptor


def row_stride(tensor: torch.Tensor | None, tile: Tile) -> int:
    """A kernel's argument for the stride of a matrix from row to row; 0 if descriptors or None make it unread."""
    return 0 if tensor is None or tile.described else tensor.stride(0)


def even(columns: int, tile: Tile) -> bool:
    """True if a loop over a matrix's columns needs no mask: ``columns`` is a multiple of the tile's ``block_k``, or
    the tile has descriptors, which load zeros past the last column."""
    return tile.described or columns % tile.block_k == 0


def matrix(
    tensor: torch.Tensor | None, rows: int, columns: int, tile: Tile
) -> tuple[TensorDescriptor | None, torch.Tensor | None]:
    """Returns a kernel's two arguments for a matrix: a descriptor with blocks [rows, columns], and None; or, for tiles
    that load through pointers, None and the tensor."""
    if tensor is None or not tile.described:
        assert tensor is None or tensor.stride(1) == 1, "columns are contiguous"
        return None, tensor
    return described(tensor, rows, columns), None
