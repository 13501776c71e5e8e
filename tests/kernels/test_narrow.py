"""Sizes near 2^31: 32-bit sums and products in kernels, and gradients of as many numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from chunked_head import linear_cross_entropy

ROOT = Path(__file__).parents[2]
# the only sums and products of 32 bits that ranges do not prove small, and what does
TILES = "tiles of a product: rows times columns are numbers in memory, and a tile has 2^10 of them or more"
INSIDE = "a tile's or strip's rows and columns: below those of the product plus one tile"
PARTS = "parts of tiles that multiprocessors would wait for: at most a few for each multiprocessor"
PLACES = "differences of two columns, both at least 0 and below 2^30"
COUNTS = "counts of tokens or entries, at most all of them"
PIECES = "entries behind a piece: below their number plus a block"
HEAVY = "heavy ids of a row: at most 64; and its strips or columns that are opened, at most all"
HASHES = "fingerprints of rows: sums and products modulo 2^32"
SMALL: dict[str, tuple[str, ...]] = {
    TILES: (
        "num_tiles = tiles_m * tiles_n",
        "group_rows = min(tiles_m - group * GROUP_M, GROUP_M)",
        "return group * GROUP_M + tile_in_group % group_rows, tile_in_group // group_rows",
        "for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), "
        "flatten=hidden_desc is not None):",
    ),
    INSIDE: (
        "row_start, column_start = tile_m * BLOCK_M, tile_n * BLOCK_N",
        "row_start = tile_m * BLOCK_M",
        "offs_row = row_start + tl.arange(0, grad.shape[0])",
        "offs_col = column_start + tl.arange(0, grad.shape[1])",
        "offs_row = row_start + tl.arange(0, BLOCK_M)",
        "offs_col = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)",
        "strip = tile_n * TILE_STRIPS + i",
        "offs_col = strip * STRIP + tl.arange(0, STRIP)",
        "column = strip * STRIP + tl.arange(0, STRIP)",
        "half_start = strip * STRIP + half * HALF",
        "half_start = column_start + half * (BLOCK_N // 2)",
        "offs_row, offs_col = row_start + tl.arange(0, BLOCK_M), column_start + tl.arange(0, BLOCK_N)",
        "offs_col = column_start + tl.arange(0, BLOCK_N)",
        "weight_tile = load_rows(weight_matrix, tile_n * BLOCK_N, k, BLOCK_N, BLOCK_K, EVEN_HIDDEN)",
        "add_or_store(dweight_matrix, row_start, column_start + BLOCK_N // 2, right_half, ADD, IS_ATOMIC)",
        "half_start = column_start + half * HALF",
        "row_start, column_start = tile_m * BLOCK_M + row, tile_n * BLOCK_N",
    ),
    PARTS: (
        "num_cut = tl.maximum(num_tiles - num_uncut, 1)",
        "part_columns = tl.cdiv(tl.cdiv(vocab, BLOCK_K), num_parts) * BLOCK_K",
        "dhidden_kernel: return (x + (div - 1)) // div",
        "num_uncut + (num_tiles - num_uncut) * num_parts,",
        "num_uncut + tl.program_id(0), num_uncut + (num_tiles - num_uncut) * num_parts, tl.num_programs(0)",
        "cut_unit = tl.maximum(unit - num_uncut, 0)",
        "tile = tl.where(is_cut, num_uncut + cut_unit % num_cut, unit)",
        "begin = tl.where(is_cut, cut_unit // num_cut * part_columns, 0)",
        "end = tl.where(is_cut, min(begin + part_columns, vocab), vocab)",
        "unit_pointers = part_ptr + (unit - num_uncut) * (BLOCK_M * BLOCK_N)",
        "cut_tile = (unit - num_uncut) % num_cut",
        "tile_m, tile_n = tile_place(num_uncut + cut_tile, tiles_m, tiles_n, GROUP_M)",
        "part_pointers = part_ptr + (part_index * num_cut + cut_tile) * (BLOCK_M * BLOCK_N)",
    ),
    PLACES: (
        "target = tl.load(target_ptr + offs_row, mask=in_rows, other=-1).to(tl.int32) - tile_n * BLOCK_N",
        "offs = column - first_column",
        "upper_bound = column[:, None] + (compared_entry[None, :] < entry[:, None]).to(tl.int32)",
    ),
    COUNTS: (
        "counted_lanes += (is_counted & in_vocab).to(tl.int32)",
        "wrong_lanes += (is_counted & (in_vocab == 0)).to(tl.int32)",
        "num_before += (compared_column[None, :] < upper_bound).to(tl.int32)",
        "num_equal += (compared_column[None, :] == column[:, None]).to(tl.int32)",
        "add_rows_kernel: return a + b",
        "read_targets_kernel: return a + b",
        "sort_columns_kernel: return a + b",
    ),
    PIECES: (
        "ahead_positions = end_of_place + tl.arange(0, BLOCK_SCAN)",
        "end_of_place, has_more = end_of_place + num_matches, num_matches // BLOCK_SCAN",
        "ahead_positions += BLOCK_ENTRIES",
        "compared_index = block_start + tl.arange(0, BLOCK_COMPARED)",
        "for block_start in range(0, tl.max(tl.where(is_id_entry, index_int32, -1), 0) + 1, BLOCK_COMPARED):",
    ),
    HEAVY: (
        "is_slot = slots == count + (1 - heavy_count) * HEAVY  # no slot if the column is not heavy",
        "count += heavy_count",
        "low_count += tl.sum((log_p > least).to(tl.int32), 0)",
        "high_count += tl.sum((log_p > least + 1.0).to(tl.int32), 0)",
        "slots = first_slot + tl.arange(0, 4)",
        "mend_heavy_kernel: return a + b",
    ),
    HASHES: (
        "factor = column.to(tl.uint32) * 2654435769",
        "factor = (factor ^ (factor >> 15)) * 2246822519",
        "prints = tl.sum(bits * factor, 1).to(tl.int32, bitcast=True)",
        "quantise_kernel: return a + b",
    ),
}
LINES = [line for lines in SMALL.values() for line in lines]


@pytest.mark.exhaustive
def test_sums_of_sizes_fit() -> None:
    """Of every kernel that calls launch: what is not proved small stands above, with a reason, and is there."""
    environment = os.environ | {
        "CHUNKED_HEAD_ARCH": "sm_90", "TRITON_INTERPRET": "0", "TRITON_ALWAYS_COMPILE": "1", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    command = [sys.executable, str(ROOT / "tests/helpers/narrow.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    *found, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(last["kernels"]) > 20
    assert not (wrong := [row for row in found if row["text"] not in LINES]), wrong
    assert not (gone := set(LINES) - {row["text"] for row in found}), gone


@pytest.mark.gpu
@pytest.mark.parametrize("numbers", [2**31 - 4095, 2**31 - 2048, 2**31 - 1, 2**31])
@pytest.mark.parametrize("inplace", [True, False])
def test_the_last_factor_of_many_numbers(numbers: int, inplace: bool) -> None:
    from chunked_head.kernels.gradients.launch import scale

    source = torch.ones(numbers, dtype=torch.bfloat16, device="cuda")
    out = source if inplace else torch.full_like(source, torch.nan)
    scale(out, source, torch.tensor(0.5, device="cuda"))
    assert bool((out == 0.5).all())
    if inplace:
        few = torch.ones(4096, dtype=torch.bfloat16, device="cuda")
        scale(few, few, torch.tensor(0.5, device="cuda"), second=out)
        assert bool((out == 0.25).all() & (few == 0.5).all())


@pytest.mark.gpu
def test_a_gradient_of_many_numbers() -> None:
    """``hidden[:, :-1]`` of a context of 2^20 tokens at hidden 2048: hidden's gradient gets the upstream's factor."""
    hidden = torch.randn(2**20 - 1, 2048, dtype=torch.bfloat16, device="cuda").requires_grad_()
    weight = torch.randn(256, 2048, dtype=torch.bfloat16, device="cuda")
    target = torch.zeros(len(hidden), dtype=torch.int64, device="cuda")
    sums = []
    for factor in (1.0, 0.25):
        hidden.grad = None
        (linear_cross_entropy(hidden, weight, target, reduction="sum") * factor).backward()
        assert hidden.grad is not None
        sums.append(hidden.grad[-1].float().norm())
    torch.testing.assert_close(sums[1], 0.25 * sums[0], rtol=1e-2, atol=0)
