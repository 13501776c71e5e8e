"""Tensor descriptors, less what Triton checks of each anew: tensors alike have descriptors alike but for their base."""

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

MOST_KEPT = 4096
KEPT: dict[tuple, dict] = {}


def described(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """``TensorDescriptor.from_tensor(tensor, [rows, columns])`` of a matrix."""
    key = tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() & 15, rows, columns
    known = KEPT.get(key)
    if known is None:
        descriptor = TensorDescriptor.from_tensor(tensor, [rows, columns])
        if len(KEPT) >= MOST_KEPT:
            KEPT.clear()
        KEPT[key] = {name: value for name, value in vars(descriptor).items() if name != "base"}
        return descriptor
    descriptor = object.__new__(TensorDescriptor)
    vars(descriptor).update(known, base=tensor)
    return descriptor
