"""The functions of a ``Backend`` as torch operations, for every device. Functions without a docstring do what the
functions of the same names in ``kernels/*/launch.py`` do, with the same arguments. Logits are fp32 (fp64).

Elementwise operations run on blocks of rows of about a mebibyte, so that temporaries are small.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.records import (
    ColumnSets,
    RowBlock,
    Softmax,
    SoftmaxVectors,
    Stored,
    SumVectors,
    TeacherSoftmax,
    Terms,
    Transform,
)
from ..core.tiles import BEHIND, ELSEWHERE, LOG_FLOOR
from ..plan.sizes import TILE_ELEMENTS, slices

GATHERED_ELEMENTS = 1 << 22  # most elements of gathered rows at a time


def shift_left(values: Tensor, shift: int, fill: int, dim: int = -1) -> Tensor:
    """Returns a tensor whose element t along dimension ``dim`` is ``values[t + shift]``. The last ``shift`` elements
    are ``fill``. Returns ``values`` itself for a shift of 0."""
    if shift == 0:
        return values
    shifted_values, count = torch.full_like(values, fill), max(0, values.shape[dim] - shift)
    shifted_values.narrow(dim, 0, count).copy_(values.narrow(dim, values.shape[dim] - count, count))
    return shifted_values


def read_targets(
    target: Tensor, mask: Tensor | None, shift: int, ignore_index: int, vocab: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    row_targets = shift_left(target, shift, ignore_index).reshape(-1)
    is_counted = row_targets != ignore_index
    if mask is not None:
        is_counted &= shift_left(mask, shift, 0).reshape(-1)
    is_in_range = (row_targets >= 0) & (row_targets < vocab)
    one_or_nan = torch.ones((), dtype=dtype, device=target.device)
    one_or_nan.masked_fill_((is_counted & ~is_in_range).any(), torch.nan)
    is_counted &= is_in_range
    count, paired = is_counted.sum().to(dtype), torch.where(is_counted, row_targets, -1)
    return paired, count, one_or_nan, one_or_nan / count.clamp(min=1.0)


def read_fields(
    values: Sequence[Tensor], target: Tensor, shift: int, dtype: torch.dtype, maxima: Sequence[float]
) -> Sequence[Tensor]:
    is_ignored, fields = target < 0, []
    for value, maximum in zip(values, maxima, strict=True):
        field = shift_left(value, shift, 0).reshape(-1).to(dtype).masked_fill(is_ignored, 0.0)
        fields.append(field if maximum == math.inf else field.masked_fill_(field > maximum, math.nan))
    return fields


def clean_rows(out: Tensor, source: Tensor, target: Tensor, order: Tensor | None = None) -> None:
    """Writes ``source[order]`` to ``out``, and 0 to rows that do not count: a nan there, times a gradient of 0, would
    make the weight's gradient nan."""
    out.copy_(source if order is None else source[order]).masked_fill_((target < 0).unsqueeze(1), 0.0)


def sum_rows(
    table: Tensor, inverse: Tensor, one_or_nan: Tensor, coefficients: Sequence[float]
) -> tuple[Tensor, Tensor]:
    loss_count = len(coefficients)
    sums = torch.stack([row * (inverse if i < loss_count else one_or_nan) for i, row in enumerate(table.sum(1))])
    first_value, *other_values = [loss * c for loss, c in zip(sums[:loss_count], coefficients, strict=True)]
    return sum(other_values, first_value), sums


def scale(
    out: Tensor, source: Tensor, factor: Tensor, one_or_nan: Tensor | None = None, second: Tensor | None = None
) -> None:
    factor = factor if one_or_nan is None else factor * one_or_nan
    # the host reads the factor only on a CPU: it would wait for a GPU
    if out is source and factor.device.type == "cpu" and factor == 1:
        return
    for product, x in [(out, source)] if second is None else [(out, source), (second, second)]:
        for block in slices(x.numel(), TILE_ELEMENTS):
            torch.mul(x.view(-1)[block], factor, out=product.view(-1)[block])


def scale_rows(out: Tensor, source: Tensor, factors: Tensor) -> None:
    for rows in row_blocks(source):
        factor = factors[rows, None]
        out[rows] = torch.where(factor == 0, 0.0, source[rows] * factor)


def row_stats(
    out: SoftmaxVectors[Tensor],
    stored: Stored,
    columns: int,
    target: Tensor | None = None,
    class_weights: Tensor | None = None,
    ratio: float | None = None,
    ids: Tensor | None = None,  # [rows, columns] ids of the columns; None: 0, 1, 2, ...
) -> None:
    ratio = 1.0 if ratio is None else ratio
    for rows in row_blocks(stored.logits):
        x = logits_of(stored, rows, columns)
        largest, column_ids = x.amax(1), None if ids is None else ids[rows]
        offset = torch.where(largest == -torch.inf, 0.0, largest)
        shifted_logits = (x - offset[:, None]).mul_(ratio)
        exponentials = shifted_logits.exp()
        exponential_sums = exponentials.sum(1)
        log_sum = exponential_sums.log()
        softmax_values = {"lse": offset * ratio + log_sum, "lse_base": offset * ratio, "neg_log_sum": -log_sum}
        if target is not None:
            target_column = target[rows]
            is_local = target_column < columns  # False for columns on other ranks
            target_logit = x.gather(1, torch.where(is_local, target_column, 0).clamp(min=0).unsqueeze(1)).squeeze(1)
            target_logit = torch.where(is_local, target_logit, 0.0)
            # target_logit - lse would have the rounding error of lse, which grows with the logits
            logprob = torch.where(target_column >= 0, (target_logit - offset) * ratio - log_sum, 0.0)
            softmax_values |= {"target_logit": target_logit, "logprob": logprob}
        write(out, rows, softmax_values)
        block = RowBlock(x, largest, shifted_logits, exponentials, exponential_sums, column_ids, class_weights)
        for statistic, vectors in out.statistics:
            assert statistic.row is not None
            for out_vector, value in zip(vectors, statistic.row(block), strict=True):
                out_vector[rows] = value


def write(out: SoftmaxVectors[Tensor], rows: slice, softmax_values: dict[str, Tensor]) -> None:
    """Writes statistics of some rows, a dict by name, to the tensors of ``out`` that are not None."""
    for name, value in softmax_values.items():
        out_vector = getattr(out, name)
        if out_vector is not None:
            out_vector[rows] = value


def sums(
    outputs: Sequence[SumVectors[Tensor | None]],
    student: Stored,
    softmax: tuple[Tensor, Tensor],
    ratio: float | None,
    teacher: TeacherSoftmax | None,
    columns: int,
    tie_tolerance: float | None,
) -> None:
    for rows in row_blocks(student.logits):
        x = logits_of(student, rows, columns)
        log_p = logprobs(x if ratio is None else x * ratio, *(vector[rows] for vector in softmax))
        log_q = log_p if teacher is None else teacher_logprobs(teacher, rows)
        for function, numbers, _, *out_vectors, _ in outputs:
            for out_vector, terms in zip(out_vectors, function.terms(log_p, log_q, *numbers), strict=True):
                if out_vector is not None:
                    out_vector[rows] = terms.sum(1)


def merge_softmax(
    out: SoftmaxVectors[Tensor],
    gathered: Tensor,
    zero_or_nan: Tensor,
    target: Tensor,
    ratio: float,
    indices: SoftmaxVectors[int],
    has_target_logits: bool,
) -> None:
    # in fp64, since the pieces' logarithms are rounded already
    softmax_indices = indices.lse_base, indices.neg_log_sum, indices.target_logit
    pieces = [gathered[:, i].double() for i in (*softmax_indices, *indices.statistic_vectors)]
    lse_bases, neg_log_sums, target_logits, *vector_pieces = pieces
    top_piece = (lse_bases - neg_log_sums).max(0, keepdim=True).indices  # [1, rows] the most probable piece
    top_base, top_neg_log_sum = lse_bases.gather(0, top_piece), neg_log_sums.gather(0, top_piece)
    # logarithm of each piece's probability relative to the most probable piece's
    log_share = (lse_bases - top_base) - (neg_log_sums - top_neg_log_sum)
    share = log_share.exp()
    log_sum = share.sum(0).log()
    # log p = (x - lse_base) + neg_log_sum
    lse_base, neg_log_sum = top_base[0], top_neg_log_sum[0] - log_sum
    softmax_values = {
        "lse_base": lse_base + zero_or_nan, "neg_log_sum": neg_log_sum, "lse": lse_base - neg_log_sum + zero_or_nan,
    }  # fmt: skip
    if out.logprob is not None:
        target_logit = (target_logits[0] if has_target_logits else target_logits.sum(0)).to(out.logprob.dtype)
        logprob = torch.where(target >= 0, (target_logit.double() * ratio - lse_base) + neg_log_sum, 0.0)
        softmax_values |= {"target_logit": target_logit, "logprob": logprob + zero_or_nan}
    write(out, slice(None), softmax_values)
    p, log_p, pieces_by_vector = share / share.sum(0), log_share - log_sum, iter(vector_pieces)
    for statistic, out_vectors in out.statistics:
        merged_vectors = statistic.merge([next(pieces_by_vector) for _ in out_vectors], p, log_p)
        for out_vector, value in zip(out_vectors, merged_vectors, strict=True):
            out_vector.copy_(value + zero_or_nan if out_vector.is_floating_point() else value)


def row_grad(
    dlogits: Tensor,
    stored: Stored,
    class_weights: Tensor | None,
    terms: Terms,
    teacher: TeacherSoftmax | None,
    sums: Sequence[SumVectors[Tensor | None]],
    tie_tolerance: float | None,
    first_column: int,
    transform: Transform,
    counted: Any = None,
    own_columns: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    columns, blocks = dlogits.shape[1], row_blocks(dlogits)
    for rows in blocks:
        x, row_terms, row_transform = logits_of(stored, rows, columns), terms, transform
        if len(blocks) > 1:
            row_terms, row_transform = of_rows(terms, rows), of_rows(transform, rows)
        gradient, log_p_by_view = torch.zeros_like(x), []
        is_counted = (row_terms.target >= 0).unsqueeze(1)
        for softmax in row_terms.softmaxes:
            log_p = logprobs(x if softmax.ratio is None else x * softmax.ratio, softmax.lse_base, softmax.neg_log_sum)
            if softmax.columns is not None:
                log_p[:, softmax.columns :] = -torch.inf
            log_p_by_view.append(log_p)
            if softmax.alpha is not None:
                gradient += softmax_term(log_p, softmax)
        if row_terms.kappa is not None:
            gradient -= row_terms.kappa[:, None] * (1.0 if class_weights is None else class_weights)
        log_q = None if teacher is None else teacher_logprobs(teacher, rows)
        for term in sums:
            log_p = log_p_by_view[term.view]
            log_q_or_p = log_q if term.function.is_paired and log_q is not None else log_p
            sum_columns = log_q_or_p.shape[1]
            gradient[:, :sum_columns] += sum_term(log_p[:, :sum_columns], log_q_or_p, term, rows)
        gradient.mul_(slope(x, row_transform))
        # the gradient at the target and at a row's own columns, from exact logits: a tile's logits are rounded
        entry_terms = [] if row_terms.beta is None else [(row_terms.target, -row_terms.beta, row_terms.target_logit)]
        if own_columns is not None:
            entry_terms.append(of_rows(own_columns, rows))
        for entry_term in entry_terms:
            ids, entry_coefficients, exact_logits = (vector.view(len(x), -1) for vector in entry_term)
            ids = ids - first_column
            is_local = (ids >= 0) & (ids < columns) & is_counted
            entry_gradients = torch.where(is_local, entry_coefficients * slope(exact_logits, row_transform), 0.0)
            gradient.scatter_add_(1, ids.clamp(0, columns - 1), entry_gradients)
        # by selection, since logits of a row that does not count may be nan
        dlogits[rows] = gradient.masked_fill_(~is_counted, 0.0)


def set_blocks(sets: ColumnSets, target: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Yields blocks of rows: the slice of rows; the indices [rows, K] of their entries, filled up with the number of
    all entries; the columns [rows, K] of these entries; and the index [rows] of the target's entry among a row's K
    entries, which is 0, or ``ELSEWHERE`` if another rank has the target's column."""
    entry_counts = sets.ends - sets.begins
    most_entries = max(1, int(entry_counts.max()))  # K
    entry_range, entry_columns = torch.arange(most_entries, device=entry_counts.device), appended(sets.columns, -1)
    for rows in slices(len(entry_counts), max(1, TILE_ELEMENTS // most_entries)):
        is_entry = entry_range < entry_counts[rows, None]
        entries = torch.where(is_entry, sets.begins[rows, None] + entry_range, len(sets.columns))
        columns = entry_columns[entries].long()
        yield rows, entries, columns, torch.where(columns[:, 0] == target[rows], 0, ELSEWHERE)


def set_stats(
    out: SoftmaxVectors[Tensor], logit: Tensor, sets: ColumnSets, target: Tensor, ratio: float | None
) -> None:
    for rows, entries, columns, target_entry in set_blocks(sets, target):
        x, has_set = appended(logit, -torch.inf)[entries], sets.ends[rows] > sets.begins[rows]
        block = of_rows(out, torch.arange(rows.start, rows.stop, device=logit.device))  # copies, by indices
        row_stats(block, Stored(x, None), x.shape[1], target_entry, None, ratio, columns)
        out_vectors, values = ((*outputs[:-1], *outputs.statistic_vectors) for outputs in (out, block))
        for out_vector, value in zip(out_vectors, values, strict=True):
            if out_vector is not None and value is not None:
                other_value = torch.zeros_like(value) if sets.everywhere else out_vector[rows]
                out_vector[rows] = torch.where(has_set, value, other_value)


def set_grad(dlogits: Tensor, logit: Tensor, sets: ColumnSets, terms: Terms, transform: Transform) -> None:
    for rows, entries, _, target_entry in set_blocks(sets, terms.target):
        x, row_terms = appended(logit, -torch.inf)[entries], of_rows(terms, rows)._replace(target=target_entry)
        gradient, is_entry = torch.empty_like(x), entries < len(logit)
        row_grad(gradient, Stored(x, None), None, row_terms, None, (), None, 0, of_rows(transform, rows))
        dlogits[entries[is_entry]] = gradient[is_entry]


def appended(values: Tensor, last: float) -> Tensor:
    """Returns a vector [n + 1]: the values [n], then ``last``."""
    return torch.nn.functional.pad(values, (0, 1), value=last)


def dot_columns(
    logit: Tensor,
    hidden: Tensor,
    weight: Tensor,
    columns: Tensor,
    bias: Tensor | None,
    transform: Transform,
    rows: Tensor,
    fill_value: float = 0.0,
) -> None:
    for block in slices(len(columns), max(1, GATHERED_ELEMENTS // max(1, weight.shape[1]))):
        ids = columns[block].clamp(min=0)
        hidden_rows, weight_rows = hidden[rows[block]].to(weight.dtype), weight[ids]
        x = (hidden_rows.to(logit.dtype) * weight_rows.to(logit.dtype)).sum(1, keepdim=True)
        x = transformed(x, None if bias is None else bias[ids, None], of_rows(transform, rows[block]))
        logit[block] = x.squeeze(1).masked_fill(columns[block] < 0, fill_value)


# ``is_grouped``: equal places lie together already, of which only kernels make use
def add_rows(
    out: Tensor, table: Tensor, places: Tensor, factors: Tensor, table_rows: Tensor, is_grouped: bool = False
) -> None:
    is_entry = (places >= 0) & (table_rows >= 0)
    places, order = places[is_entry].sort(stable=True)
    table_rows, factors = table_rows[is_entry][order], factors[is_entry][order]
    for block in slices(len(places), max(1, GATHERED_ELEMENTS // max(1, table.shape[1]))):
        # the terms of a block of entries are summed by place first
        unique_places, place_index = places[block].unique_consecutive(return_inverse=True)
        terms = table[table_rows[block]].to(factors.dtype) * factors[block, None]
        terms = terms.new_zeros(len(unique_places), terms.shape[1]).index_add_(0, place_index, terms)
        out.index_add_(0, unique_places, terms.to(out.dtype))


def kept_sets(
    begins: Tensor,
    ends: Tensor,
    rows: Tensor,
    columns: Tensor,
    entry_bias: Tensor | None,
    one_or_nan: Tensor,
    inverse: Tensor,
    target: Tensor,
    ids: Tensor,
    offsets: Tensor | None,  # [tokens + 1] where each token's set begins and ends in ids
    bias: Tensor | None,
    line_length: int,
    shift: int,
    vocab: int,
    everywhere: bool,
) -> None:
    rows.fill_(-1)
    columns.fill_(-1)
    token_index, id_index = (torch.arange(count, device=ids.device) for count in (len(target), len(ids)))
    if offsets is None:
        offsets = torch.cat([token_index, token_index[-1:] + 1]) * (len(ids) // len(target))
    is_wrong = (offsets[0] != 0) | (offsets[1:] < offsets[:-1]).any() | (offsets[-1] > len(ids))
    is_wrong = is_wrong | ((id_index >= offsets[-1]) & (ids != BEHIND)).any()
    offsets = torch.where(is_wrong, 0, offsets)
    index_in_line = token_index % line_length
    # tokens that no row predicts are paired with the rows that predict no token
    paired_row = token_index - index_in_line + (index_in_line - shift) % line_length
    is_counted = (index_in_line >= shift) & (target[paired_row] >= 0)
    token_of_id = (torch.searchsorted(offsets, id_index, right=True) - 1).clamp(max=len(target) - 1)  # each id's token
    is_kept = (id_index < offsets[token_of_id + 1]) & is_counted[token_of_id] & (ids != -1)
    in_vocabulary = (ids >= 0) & (ids < vocab)
    has_set = torch.zeros_like(token_index).index_add_(0, token_of_id, is_kept.long()) > 0
    # the first of equal ids is kept; the target is removed, since it has an entry of its own
    keys = torch.where(is_kept, token_of_id * vocab + ids, torch.iinfo(torch.int64).max).sort(stable=True)
    is_repeated, is_target = torch.zeros_like(is_kept), ids == target[paired_row][token_of_id]
    is_repeated[keys.indices[1:]] = keys.values[1:] == keys.values[:-1]
    first_entry, entry_of_id = offsets[:-1] + token_index, id_index + token_of_id + 1
    if bias is not None and entry_bias is not None:
        bias_places = torch.where(is_kept & is_target & ~is_repeated, first_entry[token_of_id], len(entry_bias))
        entry_bias.copy_(appended(entry_bias, 0.0).scatter_(0, bias_places, bias)[:-1])
        entry_bias[entry_of_id] = bias
    is_repeated = is_repeated | is_target
    begins[paired_row], ends[paired_row] = first_entry, torch.where(has_set, offsets[1:] + token_index + 1, first_entry)
    rows[first_entry], columns[first_entry] = paired_row, torch.where(has_set, target[paired_row], -1).int()
    rows[entry_of_id] = paired_row[token_of_id]
    columns[entry_of_id] = torch.where(is_kept & in_vocabulary & ~is_repeated, ids, -1).int()
    is_wrong = is_wrong | (is_kept & ~in_vocabulary).any()
    is_wrong = is_wrong | (is_counted & ~has_set).any() if everywhere else is_wrong
    for number in (one_or_nan, inverse):
        number.masked_fill_(is_wrong, torch.nan)


def logits_of(stored: Stored, rows: slice, columns: int | None) -> Tensor:
    """Returns [rows, columns] stored logits after bias, scale and cap, in fp32 (fp64). ``columns=None``: all columns.
    The result is a view of the buffer where nothing has to be computed."""
    x, bias = stored.logits[rows, :columns], stored.bias
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    transform = stored.transform if stored.transform.row_scale is None else of_rows(stored.transform, rows)
    return transformed(x, None if bias is None else bias[:columns], transform)


def transform_(stored: Stored) -> Stored:
    """Applies bias, scale and cap to stored raw logits in place. Returns a record that has the logits only."""
    for rows in row_blocks(stored.logits):
        stored.logits[rows] = logits_of(stored, rows, stored.logits.shape[1])
    return Stored(stored.logits, None)


def transformed(x: Tensor, bias: Tensor | None, transform: Transform) -> Tensor:
    """Applies bias, scale, cap and each row's scale to raw logits ``x`` [rows, columns], and returns the logits."""
    factor = 1.0 if transform.logit_scale is None else transform.logit_scale
    if bias is not None:
        x = x + bias
    if transform.softcap is not None:
        x = (x * (factor / transform.softcap)).tanh_().mul_(transform.softcap)
    elif transform.logit_scale is not None:
        x = x * factor
    return x if transform.row_scale is None else x * transform.row_scale[:, None]


def slope(x: Tensor, transform: Transform) -> Tensor | float:
    """Returns the derivative of transformed logits ``x`` [rows, columns] with respect to raw logits: a tensor [rows,
    columns]; without a cap, a tensor [rows, 1] or a float."""
    row_scale = 1.0 if transform.row_scale is None else transform.row_scale[:, None]
    factor = row_scale if transform.logit_scale is None else row_scale * transform.logit_scale
    if transform.softcap is None:
        return factor
    return (x / (transform.softcap * row_scale)).square_().neg_().add_(1.0).mul_(factor)


def row_blocks(logits: Tensor) -> list[slice]:
    """Returns slices of rows, each of about ``TILE_ELEMENTS`` logits."""
    num_rows, block = len(logits), max(1, TILE_ELEMENTS // max(1, logits.shape[1]))
    return [slice(start, min(start + block, num_rows)) for start in range(0, num_rows, block)]


def of_rows(record: Any, rows: slice | Tensor) -> Any:
    """Returns a copy of ``record``, a nested tuple of vectors [n], in which each vector is indexed by ``rows``."""
    values = [x[rows] if isinstance(x, Tensor) else of_rows(x, rows) if isinstance(x, tuple) else x for x in record]
    return type(record)(*values) if hasattr(record, "_fields") else tuple(values)


def softmax_term(log_p: Tensor, softmax: Softmax) -> Tensor:
    """Returns ``p (alpha + eta log p)`` [rows, columns], 0 where p is 0."""
    assert softmax.alpha is not None
    p, alpha, eta = log_p.exp(), softmax.alpha[:, None], softmax.eta
    return p.mul_(alpha) if eta is None else torch.where(p == 0, 0.0, p * (alpha + eta[:, None] * log_p))


def sum_term(log_p: Tensor, log_q: Tensor, term: SumVectors[Tensor | None], rows: slice) -> Tensor:
    """Returns the term [rows, columns] of a sum over the vocabulary in the gradient of some rows of logits.
    ``LOG_FLOOR`` bounds both logarithms below."""
    assert term.coefficient is not None
    logs_of_both, coefficient = (log_p.clamp(min=LOG_FLOOR), log_q.clamp(min=LOG_FLOOR)), term.coefficient[rows, None]
    if term.total is not None and term.function.gradient is not None:
        return coefficient * term.function.gradient(*logs_of_both, term.total[rows, None])
    gradient = coefficient * term.function.terms(*logs_of_both, *term.numbers)[1]
    return torch.where(coefficient == 0, 0.0, gradient) if term.function.source else gradient


def teacher_logprobs(teacher: TeacherSoftmax, rows: slice) -> Tensor:
    """Returns the log-probabilities [rows, columns] of the teacher's softmax for a slice of rows."""
    stored, softmax = teacher
    return logprobs(logits_of(stored, rows, softmax.columns), softmax.lse_base[rows], softmax.neg_log_sum[rows])


def logprobs(x: Tensor, lse_base: Tensor, neg_log_sum: Tensor) -> Tensor:
    """Returns the log-probabilities of logits ``x`` [rows, columns]."""
    return (x - lse_base[:, None]).add_(neg_log_sum[:, None])
