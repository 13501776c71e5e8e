"""Targets and fields [tokens] paired with the rows that predict them, and sets of ids as entries of those rows.

    paired[i] = target[i + shift] where that counts, else -1;  field[i] likewise, else 0

The shift runs along the last dimension of the caller's tensors.
"""

import triton
import triton.language as tl

from ..common.blocks import BEHIND
from ..common.launcher import kernel


@kernel
def read_targets_kernel(
    # outputs
    paired_ptr,  # [tokens] int64, -1 where a row does not count
    counted_ptr,  # [] fp32: number of rows that count
    one_or_nan_ptr,  # [] fp32: 1, or nan if an id is out of range
    inverse_ptr,  # [] fp32: one_or_nan divided by counted, or by 1 if no row counts
    # inputs
    target_ptr,  # [tokens] int64
    mask_ptr,  # [tokens] bytes, or None for 1
    # sizes
    tokens,
    length,  # of the dimension that the shift runs along
    vocab,
    # scalars
    shift,
    ignore_index,
    BLOCK: tl.constexpr,
):
    """Shifts and checks targets. One program walks over all of them, so that counters need no initial 0."""
    counted = tl.zeros((BLOCK,), dtype=tl.int32)
    wrong = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, tokens, BLOCK):
        row = start + tl.arange(0, BLOCK)
        has_target = (row < tokens) & (row % length + shift < length)
        target = tl.load(target_ptr + row + shift, mask=has_target, other=-1)
        counts = has_target & (target != ignore_index)
        if mask_ptr is not None:
            counts &= tl.load(mask_ptr + row + shift, mask=has_target, other=0) != 0
        in_vocab = (target >= 0) & (target < vocab)
        tl.store(paired_ptr + row, tl.where(counts & in_vocab, target, -1), mask=row < tokens)
        counted += (counts & in_vocab).to(tl.int32)
        wrong += (counts & (in_vocab == 0)).to(tl.int32)
    number = tl.sum(counted, 0).to(tl.float32)
    one_or_nan = tl.where(tl.sum(wrong, 0) > 0, float("nan"), 1.0)
    tl.store(counted_ptr, number)
    tl.store(one_or_nan_ptr, one_or_nan)
    tl.store(inverse_ptr, tl.div_rn(one_or_nan, tl.maximum(number, 1.0)))


@kernel
def read_fields_kernel(
    # outputs
    out_ptr,  # [4 or fewer, tokens] fp32, 0 where a row does not count
    # inputs
    first_ptr,  # [tokens] floating point
    second_ptr,  # or None, like those that follow
    third_ptr,
    fourth_ptr,
    target_ptr,  # [tokens] int64, of rows, -1: does not count
    # sizes
    tokens,
    # scalars
    shift,
    first_most,  # numbers above it become nan
    second_most,
    third_most,
    fourth_most,
    BLOCK: tl.constexpr,
):
    """Shifts fields to the rows that predict them, 0 where a row does not count."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    counts = tl.load(target_ptr + row, mask=row < tokens, other=-1) >= 0
    field_pointers = first_ptr, second_ptr, third_ptr, fourth_ptr
    most = first_most, second_most, third_most, fourth_most
    for i in tl.static_range(4):
        if field_pointers[i] is not None:
            value = tl.load(field_pointers[i] + row + shift, mask=counts, other=0.0)
            value = tl.where(value > most[i], float("nan"), value).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + i * tokens + row, value, mask=row < tokens)


@triton.jit
def predicting_row(token, target_ptr, length, shift):
    """Returns the row that predicts a token; True if there is one and it counts; and its target. A token that no row
    predicts is paired with a row that predicts no token."""
    within = token % length
    row = token - within + (within - shift % length + length) % length
    target = tl.load(target_ptr + row)
    return row, (within >= shift) & (target >= 0), target


@triton.jit
def make_nan(one_or_nan_ptr, inverse_ptr, wrong):
    # a branch would be on what is loaded
    lane = tl.arange(0, 1)
    tl.store(one_or_nan_ptr + lane, float("nan"), mask=lane < wrong.to(tl.int32))
    tl.store(inverse_ptr + lane, float("nan"), mask=lane < wrong.to(tl.int32))


@kernel
def kept_rows_kernel(
    # outputs
    begin_ptr,  # [tokens] int64: where a row's entries begin
    end_ptr,  # [tokens] int64: and end, equal to begin for a row that keeps none
    one_or_nan_ptr,  # [] fp32: nan where something is wrong
    inverse_ptr,  # [] fp32: likewise
    # inputs
    ids_ptr,  # [entries] int, -1 for none
    offset_ptr,  # [tokens + 1] int64: where tokens' ids begin; None: each has as many
    target_ptr,  # [tokens] int64, of rows, -1: does not count
    # sizes
    entries,
    ids_per_token,
    tokens,
    length,
    # scalars
    shift,
    EVERYWHERE: tl.constexpr,  # whether a row that counts and keeps none is wrong
    BLOCK: tl.constexpr,
):
    """Writes the begin and end of each row's entries, of which the target's is the first."""
    token = tl.program_id(0).to(tl.int64)
    row, counts, _ = predicting_row(token, target_ptr, length, shift)
    begin, end = token * ids_per_token, (token + 1) * ids_per_token
    wrong = token < 0
    if offset_ptr is not None:
        begin, end = tl.load(offset_ptr + token), tl.load(offset_ptr + token + 1)
        wrong = (begin < 0) | (end < begin) | (end > entries) | ((token == 0) & (begin != 0))
        next_id = tl.load(ids_ptr + end, mask=(token == tokens - 1) & (wrong == 0) & (end < entries), other=BEHIND)
        wrong = wrong | (next_id != BEHIND)
        begin, end = tl.where(wrong, 0, begin), tl.where(wrong, 0, end)
    lanes = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(begin, end, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        lanes |= (tl.load(ids_ptr + offs, mask=offs < end, other=-1) != -1).to(tl.int32)
    has = counts & (tl.max(lanes, 0) > 0)
    if EVERYWHERE:
        wrong = wrong | (counts & (has == 0))
    start = begin + token  # a row's target comes before the others
    tl.store(begin_ptr + row, start)
    tl.store(end_ptr + row, tl.where(has, end + token + 1, start))
    make_nan(one_or_nan_ptr, inverse_ptr, wrong)


@kernel
def kept_entries_kernel(
    # outputs
    row_ptr,  # [entries + tokens] int64, -1 behind the last set
    column_ptr,  # [entries + tokens] int32, -1 for no id, a repeated one, or the target
    entry_bias_ptr,  # [entries + tokens] fp32 or None, 0 at first
    one_or_nan_ptr,  # [] fp32: nan where something is wrong
    inverse_ptr,  # [] fp32: likewise
    # inputs
    begin_ptr,  # [tokens] int64: where a row's entries begin, its target's first
    end_ptr,  # [tokens] int64: and end, equal to begin for a row that keeps none
    ids_ptr,  # [entries] int, -1 for none
    offset_ptr,  # [tokens + 1] int64: where tokens' ids begin; None: each has as many
    bias_ptr,  # [entries] fp32 or None
    target_ptr,  # [tokens] int64, of rows, -1: does not count
    # sizes
    entries,
    ids_per_token,
    tokens,
    length,
    vocab,
    steps,  # to find a token by halving
    # scalars
    shift,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Writes each entry's row and column. A program has BLOCK entries, which may be of several rows."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_entries = entry < tl.cast(entries, tl.int64) + tokens
    if offset_ptr is None:
        token = tl.where(in_entries, entry // (ids_per_token + 1), 0)
        begin, end = token * ids_per_token, (token + 1) * ids_per_token
    else:
        token, high = tl.zeros((BLOCK,), dtype=tl.int64), tl.zeros((BLOCK,), dtype=tl.int64) + tokens
        for _ in range(steps):
            middle = (token + high) // 2
            below = tl.load(offset_ptr + middle) + middle <= entry
            token, high = tl.where(below, middle, token), tl.where(below, high, middle)
        token = tl.minimum(token, tokens - 1)
        begin, end = tl.load(offset_ptr + token), tl.load(offset_ptr + token + 1)
    id_place = entry - token - 1
    of_target, of_id = (
        in_entries & (id_place == begin - 1),
        in_entries & (begin >= 0) & (id_place >= begin) & (id_place < end) & (id_place < entries),
    )
    row, counts, target = predicting_row(token, target_ptr, length, shift)
    id = tl.load(ids_ptr + id_place, mask=of_id, other=-1).to(tl.int64)
    real = counts & (id != -1)
    in_vocab = (id >= 0) & (id < vocab)
    wrong = tl.max((real & (in_vocab == 0)).to(tl.int32), 0) > 0
    # the first of equal ids is kept; the target is removed, since it has an entry of its own
    is_repeated = tl.zeros((BLOCK,), dtype=tl.int32)
    least = tl.maximum(tl.min(tl.where(of_id, begin, entries), 0), 0)
    small_id, small_at, small_begin = id.to(tl.int32), (id_place - least).to(tl.int32), (begin - least).to(tl.int32)
    for first in range(0, tl.max(tl.where(of_id, small_at, -1), 0) + 1, AT_ONCE):
        compared_place = first + tl.arange(0, AT_ONCE)
        compared = tl.load(ids_ptr + least + compared_place, mask=least + compared_place < entries, other=-1).to(
            tl.int32
        )
        earlier = (compared_place[None, :] >= small_begin[:, None]) & (compared_place[None, :] < small_at[:, None])
        is_repeated |= tl.max((earlier & (compared[None, :] == small_id[:, None])).to(tl.int32), 1)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + id_place, mask=of_id, other=0.0)
        tl.store(entry_bias_ptr + entry, bias, mask=of_id)
        tl.store(entry_bias_ptr + begin + token, bias, mask=of_id & real & (is_repeated == 0) & (id == target))
    has = tl.load(end_ptr + row) > tl.load(begin_ptr + row)
    column = tl.where(real & in_vocab & (is_repeated == 0) & (id != target), id, -1)
    column = tl.where(of_target & has, target, column)
    tl.store(row_ptr + entry, tl.where(of_target | of_id, row, -1), mask=in_entries)
    tl.store(column_ptr + entry, column, mask=in_entries)
    make_nan(one_or_nan_ptr, inverse_ptr, wrong)
