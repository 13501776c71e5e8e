"""The gradient of raw logits as a function of values in registers, which every kernel that makes gradients calls:

    g_j = sum of p_j (alpha + eta log p_j) over softmaxes - beta 1[j = target] - kappa omega_j
        + sum of c s_j over the call's sums over the vocabulary, s the slope of such a sum (``common/sums.py``)

times the slope of scale and cap. ``ADD_TERMS`` is generated with the code of the terms that a call has.
"""

import itertools
from typing import NamedTuple

import triton
import triton.language as tl

from ..common.sums import HEADER, Code, Kind, add_sums, calls, logarithms, user_functions
from ..common.transform import log2_e, times


@triton.jit
def softmax_term(log_p, alpha):
    """``p alpha``"""
    return tl.exp2(log_p * log2_e) * alpha


@triton.jit
def entropy_term(log_p, alpha, eta):
    """``p (alpha + eta log p)``: 0 for p = 0, nan for a nan."""
    p = tl.exp2(log_p * log2_e)
    return tl.where(p != 0.0, p * (alpha + eta * log_p), 0.0)


@triton.jit
def fused_softmax_term(x, offs, start, neg_log_sum, ratio, width, alpha):
    """``p alpha`` with one multiply-add. Its relative error, ``1e-7 |start|``, is below 16-bit rounding."""
    z = times(x, ratio)
    shift = tl.broadcast_to((neg_log_sum - start) * log2_e, z.shape)
    return cut(alpha * tl.exp2(tl.fma(z, tl.full(z.shape, log2_e, tl.float32), shift)), offs, width, 0.0)


@triton.jit
def log_probability(x, offs, start, neg_log_sum, ratio, width):
    """``log p`` of a softmax; -inf for columns from ``width`` on."""
    return cut((times(x, ratio) - start) + neg_log_sum, offs, width, float("-inf"))


@triton.jit
def cut(values, offs, width, fill):
    """``values`` for columns below ``width``, ``fill`` for the others."""
    return values if width is None else tl.where(offs < width, values, fill)


@triton.jit
def log_probabilities(
    x,  # logits as the softmax sees them
    offs,  # of the columns
    softmaxes,  # tuples: start and rest, columns of numbers per row, the ratio or None, the width or None
    SOFTMAXES: tl.constexpr,
):
    """A tuple of ``log p`` for each softmax."""
    starts, rests, ratios, widths = softmaxes
    logs = (log_probability(x, offs, starts[0], rests[0], ratios[0], widths[0]),)
    for i in tl.static_range(1, SOFTMAXES):
        logs = logs + (log_probability(x, offs, starts[i], rests[i], ratios[i], widths[i]),)
    return logs


@triton.jit
def column_mask(offs, width):
    """Mask of the columns below ``width``; None if ``width`` is None, for all columns."""
    if width is None:
        return
    else:
        return offs < width


class Gradient(NamedTuple):
    """The properties of a gradient on which a kernel's code depends."""

    softmaxes: int
    factors: tuple[bool, ...]  # which coefficients exist: alpha and eta of each softmax, then beta and kappa
    sums: tuple[Kind, ...]
    has_entries: bool = False  # the gradient is of few columns of each row, the entries
    is_fused: bool = False  # the first softmax's term is ``fused_softmax_term``


# by term: its line in ADD_TERMS, formatted with a softmax's index i and coefficients, whose statistics
# ``core/stats.py``, ``Coefficients`` names
TERMS = {
    "softmax": "grad += softmax_term(logs[{i}], {})",  # alpha
    "entropy": "grad += entropy_term(logs[{i}], {}, {})",  # alpha, eta
    "fused": "grad += fused_softmax_term(x, offs, starts[{i}], rests[{i}], ratios[{i}], widths[{i}], {})",  # alpha
    "target": "grad = tl.where(is_target, grad - {}, grad)",  # beta
    "smoothing": "grad -= {} * omega",  # kappa
}
ADD_TERMS = "add_terms(grad, x, logs, log_q, offs, is_target, omega, inside, softmaxes, vectors, scalars, tie)"


def code_of_gradient(kinds: Gradient) -> Code:
    """The generated functions of a gradient's kernel: ``ADD_TERMS`` adds terms to ``grad``; ``ADD_SUMS`` adds up the
    sums over the vocabulary that are made along with the gradient."""
    lines, places = ["starts, rests, ratios, widths = softmaxes"], itertools.count()
    vectors = (f"vectors[{place}]" for place in places)
    *of_softmaxes, beta, kappa = kinds.factors
    terms = list[tuple[str, int]]()
    for i in range(kinds.softmaxes):
        alpha, eta = of_softmaxes[2 * i : 2 * i + 2]
        name = "entropy" if eta else "fused" if kinds.is_fused else "softmax"
        terms += [(name, i)] * alpha
    for name, i in [*terms, *[("target", 0)] * beta, *[("smoothing", 0)] * kappa]:
        line = TERMS[name]
        lines.append(line.format(*itertools.islice(vectors, line.count("{}")), i=i))
    if kinds.is_fused:  # the first term begins the sum: Triton 3.5 would add it to 0
        lines[1] = lines[1].replace("grad += ", "grad = ")
    lines += logarithms(kinds.sums, True)
    for kind, call in zip(kinds.sums, calls(kinds.sums, True), strict=True):
        if kind.has_term and kind.has_total:
            coefficient, total = itertools.islice(vectors, 2)
            gradient = call.replace("_terms(", "_gradient(").replace(", tie", f", {total}, tie")
            lines.append(f"grad += {coefficient} * {gradient}")
        elif kind.has_term:
            lines += [f"value, slope = {call}", f"grad += {slope_term(kind, next(vectors))}"]
    sources = [*user_functions(kinds.sums), HEADER.format(ADD_TERMS) + "\n    ".join([*lines, "return grad"])]
    makes_sums, read = any(kind.has_value for kind in kinds.sums), next(places)
    if makes_sums:
        sources.append(add_sums(kinds.sums))
    counts = {
        "outputs": len(kinds.sums) * makes_sums, "vectors": read,
        "scalars": sum(kind.function.numbers for kind in kinds.sums),
        "teacher": any(kind.function.is_paired for kind in kinds.sums), "entries": kinds.has_entries,
        **dict.fromkeys(("starts", "rests", "ratios", "widths"), kinds.softmaxes),
    }  # fmt: skip
    constants = {
        "ADD_TERMS": "add_terms", "ADD_SUMS": "add_sums" if makes_sums else "None", "SUMS": counts["outputs"],
        "IS_PAIRED": counts["teacher"], "HAS_ENTRIES": kinds.has_entries, "VECTORS": read,
        "SOFTMAXES": kinds.softmaxes,
    }  # fmt: skip
    return Code(sources, constants, counts, globals())


def slope_term(kind: Kind, coefficient: str) -> str:
    """The expression of a sum's term in a gradient, from its ``slope``."""
    if not kind.function.source:
        return f"{coefficient} * slope"
    inside = "inside" if kind.function.is_paired else f"column_mask(offs, widths[{kind.view}])"
    return f"user_term({coefficient}, slope, p{kind.view}, {inside})"
