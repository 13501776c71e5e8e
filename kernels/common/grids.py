"""How many programs a launch has, and how much one of them takes at a time."""

import functools

import torch

from .tiles import INTERPRETED, Tile, cdiv, power_of_2

HOPPER_MULTIPROCESSORS = 132  # what a plan for a GPU assumes where there is none to ask


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # the interpreter runs programs one after the other; 4 of them still test the persistent loop
    if not torch.cuda.is_available():
        return HOPPER_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def programs_of(tile: Tile, rows: int, columns: int, device: torch.device) -> int:
    """Programs of a persistent matmul: as many as are resident at a time, and no more than it has tiles."""
    tiles = cdiv(rows, tile.block_m) * cdiv(columns, tile.block_n)
    return min(tile.per_multiprocessor * multiprocessors(device), tiles)


def row_block(columns: int) -> tuple[int, int]:
    """Elements a step and warps of the kernels that walk a row."""
    block = min(power_of_2(columns), 1024 if INTERPRETED else 8192)
    return max(block, 128), 4 if block < 2048 else 16
