"""Matrices as kernels take them. Of descriptors Triton checks each anew: those of one address and form are one."""

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from .cache import Cache
from .launcher import is_known
from .tiles import Tile

KEPT: Cache[tuple, TensorDescriptor] = Cache(4096)


class Address:
    """Stands for a tensor in a descriptor that outlives it."""

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
    """From row to row, where a kernel goes there through pointers."""
    return 0 if tensor is None or tile.described else tensor.stride(0)


def even(columns: int, tile: Tile) -> bool:
    """True where steps over the columns need no mask: the tensor copy engine fills what lies behind with zeros."""
    return tile.described or columns % tile.block_k == 0


def matrix(
    tensor: torch.Tensor | None, rows: int, columns: int, tile: Tile
) -> tuple[TensorDescriptor | None, torch.Tensor | None]:
    """A descriptor of blocks of so many rows and columns, or the tensor itself: one of the two is None."""
    if tensor is None or not tile.described:
        assert tensor is None or tensor.stride(1) == 1, "columns are contiguous"
        return None, tensor
    return described(tensor, rows, columns), None
