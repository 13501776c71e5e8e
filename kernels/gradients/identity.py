"""The formula of the gradient of raw logits x, on values in registers. All kernels of gradients call its functions:

    g_j = sum of p_j (alpha + eta log p_j) over softmaxes - beta 1[j = target] - kappa omega_j
        + sum of c s_j over the call's sums over the vocabulary, s the slope of a sum (``common/sums.py``)

The kernels multiply g by the derivative of scale and cap. ``ADD_TERMS`` is generated from the terms that a call has.
"""

import itertools

import triton
import triton.language as tl

from ...core.records import SumVectors
from ..common.sums import HEADER, KernelCode, add_sums, logarithms, term_calls, user_functions
from ..common.transform import log2_e, times


@triton.jit
def softmax_term(log_p, alpha):
    """The softmax's term without an entropy, ``p alpha``."""
    return tl.exp2(log_p * log2_e) * alpha


@triton.jit
def entropy_term(log_p, alpha, eta):
    """The softmax's term with an entropy, ``p (alpha + eta log p)``; 0 for p = 0, nan for a nan."""
    p = tl.exp2(log_p * log2_e)
    return tl.where(p != 0.0, p * (alpha + eta * log_p), 0.0)


@triton.jit
def fused_softmax_term(x, offs, lse_base, neg_log_sum, ratio, width, alpha):
    """``p alpha`` from logits ``x``, with one multiply-add in the exponent; 0 in columns from ``width`` on. The
    relative error, ``1e-7 |lse_base|``, is below the error of rounding to 16 bits."""
    z = times(x, ratio)
    log2_shift = tl.broadcast_to((neg_log_sum - lse_base) * log2_e, z.shape)
    return cut(alpha * tl.exp2(tl.fma(z, tl.full(z.shape, log2_e, tl.float32), log2_shift)), offs, width, 0.0)


@triton.jit
def log_probability(x, offs, lse_base, neg_log_sum, ratio, width):
    """``log p`` of the softmax of ``ratio * x``; -inf in columns from ``width`` on. With a ratio of None the
    ratio is 1; with a width of None no column is cut off."""
    return cut((times(x, ratio) - lse_base) + neg_log_sum, offs, width, float("-inf"))


@triton.jit
def cut(values, offs, width, fill):
    """Returns ``values`` with ``fill`` in columns from ``width`` on; with a ``width`` of None, ``values``."""
    return values if width is None else tl.where(offs < width, values, fill)


@triton.jit
def log_probabilities(
    x,  # [rows, columns] logits of the softmax
    offs,  # indices of the columns
    softmaxes,  # a tuple of four: for all softmaxes the lse_bases and neg_log_sums [rows, 1], the ratios and the widths
    NUM_SOFTMAXES: tl.constexpr,
):
    """Returns a tuple with ``log p`` [rows, columns] of each softmax."""
    lse_bases, neg_log_sums, ratios, widths = softmaxes
    logs = (log_probability(x, offs, lse_bases[0], neg_log_sums[0], ratios[0], widths[0]),)
    for i in tl.static_range(1, NUM_SOFTMAXES):
        logs = logs + (log_probability(x, offs, lse_bases[i], neg_log_sums[i], ratios[i], widths[i]),)
    return logs


@triton.jit
def column_mask(offs, width):
    """The mask of columns below ``width``; None if ``width`` is None, for all columns."""
    if width is None:
        return
    else:
        return offs < width


# by name of a term: its source line in ADD_TERMS. {i} is the index of a softmax, {} a coefficient that the comment
# names (``core/stats.py``, ``Coefficients``)
TERMS = {
    "softmax": "grad += softmax_term(logs[{i}], {})",  # alpha
    "entropy": "grad += entropy_term(logs[{i}], {}, {})",  # alpha, eta
    # alpha
    "fused": "grad += fused_softmax_term(x, offs, lse_bases[{i}], neg_log_sums[{i}], ratios[{i}], widths[{i}], {})",
    "target": "grad = tl.where(is_target, grad - {}, grad)",  # beta
    "smoothing": "grad -= {} * omega",  # kappa
}
ADD_TERMS = (
    "add_terms(grad, x, logs, log_q, offs, is_target, omega, in_columns, softmaxes, coefficients, scalars, "
    "tie_tolerance)"
)


def code_of_gradient(
    has_coefficients: tuple[bool, ...],  # for each softmax whether it has alpha, whether eta; then beta and kappa
    sums: tuple[SumVectors[bool], ...],  # over the vocabulary, with a term or made along with the gradient
    has_entries: bool,  # the gradient is of few columns of each row, the entries
    is_fused: bool,  # the first softmax's term is ``fused_softmax_term``
) -> KernelCode:
    """The code of a kernel of gradients. The function ``ADD_TERMS`` adds all terms to a gradient. ``ADD_SUMS`` adds a
    block of columns to the sums over the vocabulary that are made along with the gradient."""
    lines, coefficient_indices = ["lse_bases, neg_log_sums, ratios, widths = softmaxes"], itertools.count()
    coefficients = (f"coefficients[{index}]" for index in coefficient_indices)
    *has_softmax_coefficients, has_beta, has_kappa = has_coefficients
    num_softmaxes = len(has_softmax_coefficients) // 2
    terms = list[tuple[str, int]]()  # names of terms with the index of their softmax
    for i in range(num_softmaxes):
        has_alpha, has_eta = has_softmax_coefficients[2 * i : 2 * i + 2]
        term_name = "entropy" if has_eta else "fused" if is_fused else "softmax"
        terms += [(term_name, i)] * has_alpha
    for term_name, i in [*terms, *[("target", 0)] * has_beta, *[("smoothing", 0)] * has_kappa]:
        line = TERMS[term_name]
        lines.append(line.format(*itertools.islice(coefficients, line.count("{}")), i=i))
    if is_fused:  # the first term begins the sum: Triton 3.5 would add it to 0
        lines[1] = lines[1].replace("grad += ", "grad = ")
    lines += logarithms(sums, True)
    for sum_kind, call in zip(sums, term_calls(sums, True), strict=True):
        if sum_kind.coefficient and sum_kind.total:
            coefficient, total = itertools.islice(coefficients, 2)
            gradient = call.replace("_terms(", "_gradient(").replace(", tie_tolerance", f", {total}, tie_tolerance")
            lines.append(f"grad += {coefficient} * {gradient}")
        elif sum_kind.coefficient:
            lines += [f"value, slope = {call}", f"grad += {slope_term(sum_kind, next(coefficients))}"]
    sources = [*user_functions(sums), HEADER.format(ADD_TERMS) + "\n    ".join([*lines, "return grad"])]
    makes_sums, num_coefficients = any(sum_kind.value for sum_kind in sums), next(coefficient_indices)
    if makes_sums:
        sources.append(add_sums(sums))
    num_sums, is_paired = len(sums) * makes_sums, any(sum_kind.function.is_paired for sum_kind in sums)
    values = {
        "output_ptrs": num_sums, "coefficient_ptrs": num_coefficients, "teacher": is_paired, "entries": has_entries,
        "scalars": sum(sum_kind.function.numbers for sum_kind in sums),
        **dict.fromkeys(("lse_base_ptrs", "neg_log_sum_ptrs", "ratios", "widths"), num_softmaxes),
        "ADD_TERMS": "add_terms", "ADD_SUMS": "add_sums" if makes_sums else "None", "HAS_ENTRIES": has_entries,
        "NUM_SUMS": num_sums, "IS_PAIRED": is_paired, "NUM_COEFFICIENTS": num_coefficients,
        "NUM_SOFTMAXES": num_softmaxes,
    }  # fmt: skip
    return sources, values, globals()


def slope_term(sum_kind: SumVectors[bool], coefficient: str) -> str:
    """The source of a sum's term in a gradient: ``coefficient`` times the variable ``slope``."""
    if not sum_kind.function.source:
        return f"{coefficient} * slope"
    in_columns = "in_columns" if sum_kind.function.is_paired else f"column_mask(offs, widths[{sum_kind.view}])"
    return f"user_term({coefficient}, slope, p{sum_kind.view}, {in_columns})"
