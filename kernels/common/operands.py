"""Arguments that launches of several folders take: tuples of torch tensors, and matrices as kernels take them.

Of descriptors Triton checks each anew: those of one address and form are one.
"""

from typing import NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from .cache import Cache
from .launcher import is_known
from .memory import empty
from .records import Stored
from .tiles import Matrix, Quantised, Tile, cdiv

STRIP_ROWS = 16  # as Triton asks of a stride that vectors are read at


def strip_rows(rows: int) -> int:
    """Stride from strip to strip for so many rows."""
    return cdiv(rows, STRIP_ROWS) * STRIP_ROWS


def strip_stride(*stored: Stored) -> int:
    """Stride from strip to strip of the offsets, one for all ``stored`` of the same rows; 0 for raw logits."""
    strides = {side.offset.stride(0) for side in stored if side.offset is not None} or {0}
    assert len(strides) == 1, "buffers of relative logits are for equally many rows"
    return strides.pop()


class Strips(NamedTuple):
    """Statistics that the logits matmul leaves of each strip of columns, [strips, rows]; None if not asked for.

    A strip's rows begin on a multiple of STRIP_ROWS, whatever their number.
    """

    offset: torch.Tensor
    sum: torch.Tensor
    shifted_sum: torch.Tensor | None
    weighted_sum: torch.Tensor | None
    top: torch.Tensor | None
    argmax: torch.Tensor | None  # int32
    sum2: torch.Tensor | None  # of a second softmax
    shifted_sum2: torch.Tensor | None

    @classmethod
    def empty(cls, rows: int, strips: int, device: torch.device, **wanted: bool) -> "Strips":
        """Memory of offset and sum, and of the others that are ``wanted``, by name; ``argmax`` goes with ``top``."""
        names = "offset", "sum", *(name for name, here in wanted.items() if here)
        names += ("argmax",) * ("top" in names)
        made = empty(len(names), strips, strip_rows(rows), dtype=torch.float32, device=device)
        found = dict(zip(names, made.unbind(), strict=True))
        if "argmax" in found:
            found["argmax"] = found["argmax"].view(torch.int32)
        return cls(**{name: found.get(name) for name in cls._fields})

    def of_view(self, view: int) -> "Strips":
        """The strips with the sums of a softmax in the place of the first's."""
        return self if view == 0 else self._replace(sum=self.sum2, shifted_sum=self.shifted_sum2, weighted_sum=None)

    def sums(self) -> torch.Tensor:
        """Memory [n] of all but the offsets, free once rows have their statistics."""
        behind = sum(each is not None for each in self) - 1
        return self.sum.as_strided((behind * self.sum.shape[0] * self.sum.stride(0),), (1,))

    def of_rows(self, rows: int) -> "Strips":
        """The strips of a chunk of ``rows`` rows, sharing memory."""
        if rows == self.offset.shape[1]:
            return self
        return Strips(*(None if t is None else t[:, :rows] for t in self))


def with_scale(matrix: Matrix) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A matrix as it lies in memory, and its scale; None for 1."""
    return matrix if isinstance(matrix, Quantised) else (matrix, None)


KEPT: Cache[tuple, TensorDescriptor] = Cache(4096)


class Address:
    """Address and dtype of a tensor, for a descriptor that outlives it."""

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
    """Stride from row to row where a kernel reads through pointers, else 0."""
    return 0 if tensor is None or tile.described else tensor.stride(0)


def even(columns: int, tile: Tile) -> bool:
    """True where steps over the columns need no mask: the tensor copy engine fills with zeros."""
    return tile.described or columns % tile.block_k == 0


def matrix(
    tensor: torch.Tensor | None, rows: int, columns: int, tile: Tile
) -> tuple[TensorDescriptor | None, torch.Tensor | None]:
    """A descriptor of blocks of so many rows and columns, or the tensor itself: one of the two is None."""
    if tensor is None or not tile.described:
        assert tensor is None or tensor.stride(1) == 1, "columns are contiguous"
        return None, tensor
    return described(tensor, rows, columns), None
