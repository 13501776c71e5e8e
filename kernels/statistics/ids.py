"""Targets, fields and sets of ids of tokens, moved to the rows that predict the tokens.

    paired[i] = target[i + shift] if token i + shift counts, else -1;  out[i] = field[i + shift] if it counts, else 0

The shift runs along the last dimension of the caller's tensors, a line of ``line_length`` tokens. Sets of ids become
entries. An entry is a pair of a row and a column.
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
    inverse_ptr,  # [] fp32: one_or_nan / max(counted, 1)
    # inputs
    target_ptr,  # [tokens] int64
    mask_ptr,  # [tokens] bytes, 0 for a token that does not count; or None
    # sizes
    tokens,  # number of tokens
    line_length,  # tokens of a line
    vocab,  # ids from ``vocab`` on are out of range
    # scalars
    shift,  # tokens between a row and the token that it predicts
    ignore_index,  # id of targets that do not count
    BLOCK: tl.constexpr,
):
    """Shifts, checks and counts targets. One program reads all targets, so that no counter has to be set to 0 first."""
    counted_lanes = tl.zeros((BLOCK,), dtype=tl.int32)
    wrong_lanes = tl.zeros((BLOCK,), dtype=tl.int32)
    for block_start in range(0, tokens, BLOCK):
        row = block_start + tl.arange(0, BLOCK)
        has_target = (row < tokens) & (row % line_length + shift < line_length)
        target = tl.load(target_ptr + row + shift, mask=has_target, other=-1)
        is_counted = has_target & (target != ignore_index)
        if mask_ptr is not None:
            is_counted &= tl.load(mask_ptr + row + shift, mask=has_target, other=0) != 0
        in_vocab = (target >= 0) & (target < vocab)
        tl.store(paired_ptr + row, tl.where(is_counted & in_vocab, target, -1), mask=row < tokens)
        counted_lanes += (is_counted & in_vocab).to(tl.int32)
        wrong_lanes += (is_counted & (in_vocab == 0)).to(tl.int32)
    counted_number = tl.sum(counted_lanes, 0).to(tl.float32)
    one_or_nan = tl.where(tl.sum(wrong_lanes, 0) > 0, float("nan"), 1.0)
    tl.store(counted_ptr, counted_number)
    tl.store(one_or_nan_ptr, one_or_nan)
    tl.store(inverse_ptr, tl.div_rn(one_or_nan, tl.maximum(counted_number, 1.0)))


@kernel
def read_fields_kernel(
    # outputs
    out_ptr,  # [fields, tokens] fp32, 0 where a row does not count
    # inputs
    first_ptr,  # [tokens] floating point
    second_ptr,  # [tokens] floating point, or None, like the next two
    third_ptr,
    fourth_ptr,
    target_ptr,  # [tokens] int64: the target that a row predicts, -1 where the row does not count
    # sizes
    tokens,  # number of tokens
    # scalars
    shift,  # tokens between a row and the token that it predicts
    max_first,  # numbers of the first field above it become nan
    max_second,
    max_third,
    max_fourth,
    BLOCK: tl.constexpr,
):
    """Moves up to four fields to the rows that predict their tokens. Writes 0 where a row does not count."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_counted = tl.load(target_ptr + row, mask=row < tokens, other=-1) >= 0
    field_pointers = first_ptr, second_ptr, third_ptr, fourth_ptr
    maxima = max_first, max_second, max_third, max_fourth
    for i in tl.static_range(4):
        if field_pointers[i] is not None:
            field = tl.load(field_pointers[i] + row + shift, mask=is_counted, other=0.0)
            field = tl.where(field > maxima[i], float("nan"), field).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + i * tokens + row, field, mask=row < tokens)


@triton.jit
def predicting_row(token, target_ptr, line_length, shift):
    """Returns the row that predicts a token, True if that row counts, and the row's target. For a token that no row
    predicts, it returns a row that predicts no token, and False."""
    index_in_line = token % line_length
    row = token - index_in_line + (index_in_line - shift % line_length + line_length) % line_length
    target = tl.load(target_ptr + row)
    return row, (index_in_line >= shift) & (target >= 0), target


@triton.jit
def make_nan(one_or_nan_ptr, inverse_ptr, is_wrong):
    """Stores nan to two pointers if ``is_wrong``."""
    # by a mask: a branch would wait for the loads that its condition depends on
    lane = tl.arange(0, 1)
    tl.store(one_or_nan_ptr + lane, float("nan"), mask=lane < is_wrong.to(tl.int32))
    tl.store(inverse_ptr + lane, float("nan"), mask=lane < is_wrong.to(tl.int32))


@kernel
def kept_rows_kernel(
    # outputs
    begin_ptr,  # [tokens] int64: index of a row's first entry
    end_ptr,  # [tokens] int64: index after a row's last entry; equal to begin for a row that keeps no ids
    one_or_nan_ptr,  # [] fp32: becomes nan if an offset or a set is wrong
    inverse_ptr,  # [] fp32: becomes nan in the same cases
    # inputs
    ids_ptr,  # [entries] int, -1 for no id
    offset_ptr,  # [tokens + 1] int64: index of a token's first id; None: each token has ``ids_per_token`` ids
    target_ptr,  # [tokens] int64: the target that a row predicts, -1 where the row does not count
    # sizes
    entries,  # number of ids of all tokens
    ids_per_token,  # number of ids of each token, without ``offset_ptr``
    tokens,  # number of tokens
    line_length,  # tokens of a line
    # scalars
    shift,  # tokens between a row and the token that it predicts
    KEPT_EVERYWHERE: tl.constexpr,  # True: a row that counts and keeps no ids is wrong
    BLOCK: tl.constexpr,
):
    """Writes begin and end of the entries of the row that predicts one token. A row's first entry is its target."""
    token = tl.program_id(0).to(tl.int64)
    row, is_counted, _ = predicting_row(token, target_ptr, line_length, shift)
    begin, end = token * ids_per_token, (token + 1) * ids_per_token
    is_wrong = token < 0
    if offset_ptr is not None:
        begin, end = tl.load(offset_ptr + token), tl.load(offset_ptr + token + 1)
        is_wrong = (begin < 0) | (end < begin) | (end > entries) | ((token == 0) & (begin != 0))
        next_id = tl.load(ids_ptr + end, mask=(token == tokens - 1) & (is_wrong == 0) & (end < entries), other=BEHIND)
        is_wrong = is_wrong | (next_id != BEHIND)
        begin, end = tl.where(is_wrong, 0, begin), tl.where(is_wrong, 0, end)
    id_lanes = tl.zeros((BLOCK,), dtype=tl.int32)
    for block_start in range(begin, end, BLOCK):
        offs = block_start + tl.arange(0, BLOCK)
        id_lanes |= (tl.load(ids_ptr + offs, mask=offs < end, other=-1) != -1).to(tl.int32)
    keeps_ids = is_counted & (tl.max(id_lanes, 0) > 0)
    if KEPT_EVERYWHERE:
        is_wrong = is_wrong | (is_counted & (keeps_ids == 0))
    set_begin = begin + token  # each earlier token has one more entry than ids, its target's
    tl.store(begin_ptr + row, set_begin)
    tl.store(end_ptr + row, tl.where(keeps_ids, end + token + 1, set_begin))
    make_nan(one_or_nan_ptr, inverse_ptr, is_wrong)


@kernel
def kept_entries_kernel(
    # outputs
    row_ptr,  # [entries + tokens] int64: an entry's row, -1 after the last set
    column_ptr,  # [entries + tokens] int32; -1 for no id, for a repeated id, and for an id that is the target
    entry_bias_ptr,  # [entries + tokens] fp32, which the caller has set to 0; or None
    one_or_nan_ptr,  # [] fp32: becomes nan if an id is out of range
    inverse_ptr,  # [] fp32: becomes nan in the same cases
    # inputs
    begin_ptr,  # [tokens] int64: index of a row's first entry, its target's
    end_ptr,  # [tokens] int64: index after a row's last entry; equal to begin for a row that keeps no ids
    ids_ptr,  # [entries] int, -1 for no id
    offset_ptr,  # [tokens + 1] int64: index of a token's first id; None: each token has ``ids_per_token`` ids
    bias_ptr,  # [entries] fp32: added to an id's logit; or None
    target_ptr,  # [tokens] int64: the target that a row predicts, -1 where the row does not count
    # sizes
    entries,  # number of ids of all tokens
    ids_per_token,  # number of ids of each token, without ``offset_ptr``
    tokens,  # number of tokens
    line_length,  # tokens of a line
    vocab,  # ids from ``vocab`` on are out of range
    steps,  # number of halvings of a binary search over tokens
    # scalars
    shift,  # tokens between a row and the token that it predicts
    BLOCK: tl.constexpr,
    BLOCK_COMPARED: tl.constexpr,  # ids that are compared at a time
):
    """Writes the row and the column of BLOCK entries. The entries may belong to several rows."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_entries = entry < tl.cast(entries, tl.int64) + tokens
    if offset_ptr is None:
        token = tl.where(in_entries, entry // (ids_per_token + 1), 0)
        begin, end = token * ids_per_token, (token + 1) * ids_per_token
    else:
        token, end_token = tl.zeros((BLOCK,), dtype=tl.int64), tl.zeros((BLOCK,), dtype=tl.int64) + tokens
        for _ in range(steps):
            middle_token = (token + end_token) // 2
            is_at_or_after = tl.load(offset_ptr + middle_token) + middle_token <= entry
            token = tl.where(is_at_or_after, middle_token, token)
            end_token = tl.where(is_at_or_after, end_token, middle_token)
        token = tl.minimum(token, tokens - 1)
        begin, end = tl.load(offset_ptr + token), tl.load(offset_ptr + token + 1)
    id_index = entry - token - 1
    is_target_entry = in_entries & (id_index == begin - 1)
    is_id_entry = in_entries & (begin >= 0) & (id_index >= begin) & (id_index < end) & (id_index < entries)
    row, is_counted, target = predicting_row(token, target_ptr, line_length, shift)
    id = tl.load(ids_ptr + id_index, mask=is_id_entry, other=-1).to(tl.int64)
    is_kept_id = is_counted & (id != -1)
    in_vocab = (id >= 0) & (id < vocab)
    is_wrong = tl.max((is_kept_id & (in_vocab == 0)).to(tl.int32), 0) > 0
    # the first of equal ids is kept; the target is removed, since it has an entry of its own
    is_repeated = tl.zeros((BLOCK,), dtype=tl.int32)
    min_index = tl.maximum(tl.min(tl.where(is_id_entry, begin, entries), 0), 0)
    id_int32 = id.to(tl.int32)
    index_int32, begin_int32 = (id_index - min_index).to(tl.int32), (begin - min_index).to(tl.int32)
    for block_start in range(0, tl.max(tl.where(is_id_entry, index_int32, -1), 0) + 1, BLOCK_COMPARED):
        compared_index = block_start + tl.arange(0, BLOCK_COMPARED)
        is_compared = min_index + compared_index < entries
        compared_id = tl.load(ids_ptr + min_index + compared_index, mask=is_compared, other=-1).to(tl.int32)
        is_earlier = (compared_index[None, :] >= begin_int32[:, None]) & (
            compared_index[None, :] < index_int32[:, None]
        )
        is_repeated |= tl.max((is_earlier & (compared_id[None, :] == id_int32[:, None])).to(tl.int32), 1)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + id_index, mask=is_id_entry, other=0.0)
        tl.store(entry_bias_ptr + entry, bias, mask=is_id_entry)
        is_target_id = is_id_entry & is_kept_id & (is_repeated == 0) & (id == target)
        tl.store(entry_bias_ptr + begin + token, bias, mask=is_target_id)
    keeps_ids = tl.load(end_ptr + row) > tl.load(begin_ptr + row)
    column = tl.where(is_kept_id & in_vocab & (is_repeated == 0) & (id != target), id, -1)
    column = tl.where(is_target_entry & keeps_ids, target, column)
    tl.store(row_ptr + entry, tl.where(is_target_entry | is_id_entry, row, -1), mask=in_entries)
    tl.store(column_ptr + entry, column, mask=in_entries)
    make_nan(one_or_nan_ptr, inverse_ptr, is_wrong)
