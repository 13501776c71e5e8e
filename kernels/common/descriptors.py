"""Matrices as kernels take them. Of descriptors Triton checks each anew: tensors alike have descriptors alike but for
their base."""

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from .cache import Cache
from .tiles import Tile

KEPT: Cache[tuple, dict] = Cache(4096)


def described(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """``TensorDescriptor.from_tensor(tensor, [rows, columns])`` of a matrix."""
    key = tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() & 15, rows, columns
    known = KEPT.get(key)
    if known is None:
        descriptor = TensorDescriptor.from_tensor(tensor, [rows, columns])
        KEPT[key] = {name: value for name, value in vars(descriptor).items() if name != "base"}
        return descriptor
    descriptor = object.__new__(TensorDescriptor)
    vars(descriptor).update(known, base=tensor)
    return descriptor


def row_stride(tensor: torch.Tensor | None, tile: Tile) -> int:
    """From row to row, where a kernel goes there through pointers."""
    return 0 if tensor is None or tile.described else tensor.stride(0)


def even(columns: int, tile: Tile) -> bool:
    """Whether steps over the columns end with them; the tensor copy engine fills what lies behind with zeros."""
    return tile.described or columns % tile.block_k == 0


def matrix(
    tensor: torch.Tensor | None, rows: int, columns: int, tile: Tile
) -> tuple[TensorDescriptor | None, torch.Tensor | None]:
    """A descriptor of blocks of so many rows and columns, or the tensor itself: one of the two is None."""
    if tensor is None or not tile.described:
        assert tensor is None or tensor.stride(1) == 1, "columns are contiguous"
        return None, tensor
    return described(tensor, rows, columns), None
