"""Sums over the vocabulary in kernels: the library's divergences, and the generator of kernels for a call's sums.

``NAME_terms(log_p, log_q, p, q, tie_tolerance, *numbers)`` returns f, a column's term of the sum, and its slope
``df / d log p``. Any constant times p may be added to the slope (``records.SumFunction``). A probability of 0 adds 0 to
a sum; a probability of nan makes the sum nan. Terms read differences of log-probabilities, so that equal rows of logits
give exactly 0. In kernels of gradients both logarithms are at least ``LOG_FLOOR``.

The body of a kernel is written by hand. It takes tuples of pointers and numbers, and calls generated functions:
``ADD_SUMS`` for a list of sums (here), ``ADD_TERMS`` for the terms of a gradient (``gradients/identity.py``). A
generated kernel takes the elements of these tuples as arguments and calls the body. Triton cannot launch the body:
``do_not_specialize`` does not reach elements of tuples, and Triton's cache tells functions in tuples apart by name
only."""

import inspect
import itertools
import linecache
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ...core import tiles
from ...core.memory import Cache
from ...core.records import SumVectors
from . import functions
from .launcher import Launcher, kernel
from .transform import ln_2, log2_e

LOG_FLOOR = tl.constexpr(tiles.LOG_FLOOR)


@triton.jit
def floored(log_p):
    """``max(log_p, LOG_FLOOR)``; a nan stays nan."""
    return tl.where(log_p < LOG_FLOOR, LOG_FLOOR, log_p)


@triton.jit
def below_q(
    p,
    q,  # probability under the other distribution
    tie_tolerance,  # relative difference up to which p and q count as equal; None for 0
):
    """``p (1 - sign(p - q))``: 2 p where p < q, p where p and q are equal, else 0; nan where p or q is nan."""
    max_difference = 0.0 * p
    if tie_tolerance is not None:
        max_difference = tl.maximum(p, q) * tie_tolerance
    return tl.where(p - q > max_difference, 0.0, tl.where(q - p > max_difference, 2.0 * p, p + 0.0 * q))


@triton.jit
def log_mixture(
    log_a,  # log-probability
    log_b,  # log-probability
    share_a,  # weight of a, in (0, 1)
):
    """``log(share_a exp(log_a) + (1 - share_a) exp(log_b))``; -inf if both logarithms are -inf."""
    return log_of_sum(log_a + tl.log2(share_a) * ln_2, log_b + tl.log2(1.0 - share_a) * ln_2)


@triton.jit
def log_of_sum(a, b):
    """``log(exp(a) + exp(b))``; -inf if both a and b are -inf."""
    largest = tl.maximum(a, b)
    offset = tl.where(largest == float("-inf"), 0.0, largest)
    return offset + tl.log2(tl.exp2((a - offset) * log2_e) + tl.exp2((b - offset) * log2_e)) * ln_2


@triton.jit
def forward_kl_terms(log_p, log_q, p, q, tie_tolerance):
    return tl.where(q != 0.0, q * (log_q - log_p), 0.0), -q


@triton.jit
def reverse_kl_terms(log_p, log_q, p, q, tie_tolerance):
    term = tl.where(p != 0.0, p * (log_p - floored(log_q)), 0.0)
    return term, term


@triton.jit
def teacher_entropy_terms(log_p, log_q, p, q, tie_tolerance):
    return -tl.where(q != 0.0, q * log_q, 0.0), q


@triton.jit
def jsd_terms(log_p, log_q, p, q, tie_tolerance, beta):
    log_m = log_mixture(log_q, log_p, beta)
    slope = (1.0 - beta) * tl.where(p != 0.0, p * (log_p - log_m), 0.0)
    # fma: with a product and a sum, LLVM's vectoriser crashes for sm_90
    return tl.fma(beta, tl.where(q != 0.0, q * (log_q - log_m), 0.0), slope), slope


@triton.jit
def tvd_terms(log_p, log_q, p, q, tie_tolerance):
    return 0.5 * tl.abs(p - q), -0.5 * below_q(p, q, tie_tolerance)


@triton.jit
def tvd_gradient(log_p, log_q, p, q, total, tie_tolerance):
    """``p (sign(p - q) - sum_j p_j sign(p_j - q_j)) / 2``, computed with ``sign - 1``. ``total``: the sum of slopes.

    For p above 3/4 the sum decides the sign: otherwise, where student and teacher both put nearly all probability on
    one column, rounding could make the sign of ``p - q`` differ between the sum and the column."""
    sum_below = -2.0 * total
    below_by_sum = tl.where(sum_below < 1.0 - 0.5 * p, 0.0, tl.where(sum_below > 1.0 + 0.5 * p, 2.0 * p, p))
    return 0.5 * (p * sum_below - tl.where(p > 0.75, below_by_sum, below_q(p, q, tie_tolerance)))


@triton.jit
def overlap_terms(log_p, log_q, p, q, tie_tolerance):
    return tl.where(p < q, p, q + 0.0 * p), 0.5 * below_q(p, q, tie_tolerance)


@triton.jit
def overlap_gradient(log_p, log_q, p, q, total, tie_tolerance):
    return -tvd_gradient(log_p, log_q, p, q, -total, tie_tolerance)


@triton.jit
def within(term, in_columns):
    """Returns ``term`` of a user's function; 0 where ``in_columns`` is false. None is true everywhere."""
    if in_columns is None:
        return term
    else:
        return tl.where(in_columns, term, 0.0)


@triton.jit
def user_slope(slope, p, in_columns):
    """Returns ``slope`` of a user's function; 0 where ``in_columns`` is false, and for a slope of nan where p is 0."""
    return within(tl.where((p != 0.0) | (slope == slope), slope, 0.0), in_columns)


@triton.jit
def user_term(coefficient, slope, p, in_columns):
    """``coefficient`` times ``user_slope``; 0 for a coefficient of 0, even if the slope is infinite."""
    return tl.where(coefficient != 0.0, coefficient * user_slope(slope, p, in_columns), 0.0)


# What a generated kernel passes to its body, in three collections: sources of the jit functions that the body takes as
# constants; by an argument's name its value, the name of a function, or the length of a tuple of FLAT; by name the
# objects that the sources name and this file lacks
KernelCode = tuple[list[str], dict[str, Any], dict[str, Any]]
HEADER = "@triton.jit\ndef {}:\n    "
ADD_SUMS = "add_sums(sums, logs, log_q, in_columns, scalars, tie_tolerance)"
# by the name of a tuple that bodies take: names of its elements, which generated kernels take. {} is an index
FLAT: dict[str, tuple[str, ...]] = {
    "output_ptrs": ("output{}_ptr",), "coefficient_ptrs": ("coefficient{}_ptr",), "scalars": ("scalar{}",),
    "sum_ptrs": ("sum{}_ptr",), "strip_ptrs": ("strip{}_ptr",), "vector_indices": ("vector_index{}",),
    "lse_base_ptrs": ("lse_base{}_ptr",), "neg_log_sum_ptrs": ("neg_log_sum{}_ptr",), "ratios": ("ratio{}",),
    "widths": ("columns{}",),
    "entries": ("column_ptr", "added_ptr", "begin_ptr", "end_ptr", "entries_per_row"),
    "teacher": (
        "teacher_ptr", "teacher_offset_ptr", "teacher_bias_ptr", "teacher_lse_base_ptr", "teacher_neg_log_sum_ptr",
        "teacher_columns", "teacher_stride", "teacher_scale", "teacher_softcap", "teacher_row_scale_ptr",
    ),
}  # fmt: skip
KERNELS: Cache[tuple, Launcher] = Cache(256)  # generated kernels by the arguments of ``kernel_of``
SOURCE_NUMBERS = itertools.count()  # makes the names of generated sources differ


def defined(name: str, source: str, scope: dict[str, Any], owner: Any = None) -> Any:
    """Executes ``source`` with the globals ``scope`` and returns its function ``name``. Triton can read the source
    until ``owner`` is freed; None: until the function is freed."""
    file = f"<chunked_head {name} {next(SOURCE_NUMBERS)}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    exec(compile(source, file, "exec"), scope)
    function = scope[name]
    weakref.finalize(function if owner is None else owner, linecache.cache.pop, file, None)
    return function


def add_sums(kinds: Sequence[SumVectors[bool]]) -> str:
    """The source of ``ADD_SUMS``, the function that adds the terms of a block of columns to each sum."""
    lines, sum_sources = list[str](), list[str]()
    for kind, call in zip(kinds, term_calls(kinds, False), strict=True):
        i = len(sum_sources)
        lines.append(f"value{i}, slope{i} = {call}")
        value, slope = f"value{i}", f"slope{i}"
        if kind.function.source:
            value, slope = f"within({value}, in_columns)", f"user_slope({slope}, p{kind.view}, in_columns)"
        for term in [value][: kind.value] + [slope][: kind.total]:
            sum_sources.append(f"sums[{len(sum_sources)}] + {term}")
    lines.append(f"return ({', '.join(sum_sources)},)")
    return HEADER.format(ADD_SUMS) + "\n    ".join([*logarithms(kinds, False), *lines])


def logarithms(kinds: Sequence[SumVectors[bool]], is_floored: bool) -> list[str]:
    """The source lines that compute the sums' probabilities and logarithms. Logarithms are at least LOG_FLOOR for
    users' functions, and with ``is_floored`` for all sums."""
    views = sorted({kind.view for kind in kinds})
    variables = [f"p{view}" for view in views] + ["q"] * any(kind.function.is_paired for kind in kinds)
    lines = [f"log_p{view} = logs[{view}]" for view in views]
    lines += [f"{name} = tl.exp2(log_{name} * log2_e)" for name in variables]
    reads_floored = is_floored or any(kind.function.source for kind in kinds)
    return lines + [f"low_{name} = floored(log_{name})" for name in variables if reads_floored]


def term_calls(kinds: Sequence[SumVectors[bool]], is_floored: bool) -> Iterable[str]:
    """Yields for each sum the source of the call that returns a column's term and slope. ``is_floored``: the call gets
    logarithms of at least LOG_FLOOR."""
    first_scalar = 0
    for function, _, view, *_ in kinds:
        p = f"p{view}"
        q = "q" if function.is_paired else p
        log_prefix = "low" if is_floored or function.source else "log"
        number_arguments = "".join(f", scalars[{first_scalar + i}]" for i in range(function.numbers))
        first_scalar += function.numbers
        yield f"{function.name}_terms({log_prefix}_{p}, {log_prefix}_{q}, {p}, {q}, tie_tolerance{number_arguments})"


def user_functions(kinds: Sequence[SumVectors[bool]]) -> list[str]:
    """The sources of users' functions that sums read, without repetition."""
    return list({kind.function.name: kind.function.source for kind in kinds if kind.function.source}.values())


def code_of_sums(kinds: Sequence[SumVectors[bool]]) -> KernelCode:
    """The code of a kernel that makes sums over the vocabulary."""
    num_sums = sum(kind.value + kind.total for kind in kinds)
    is_paired = any(kind.function.is_paired for kind in kinds)
    values = {
        "output_ptrs": num_sums, "scalars": sum(kind.function.numbers for kind in kinds), "teacher": is_paired,
        "ADD_SUMS": "add_sums", "NUM_SUMS": num_sums, "IS_PAIRED": is_paired,
    }  # fmt: skip
    return [*user_functions(kinds), add_sums(kinds)], values, {}


def kernel_of(body: Any, name: str, code_of_kinds: Callable[..., KernelCode], *kinds: Hashable) -> Launcher:
    """Returns the generated kernel ``name`` that calls the jit function ``body``; generates it at first use. The kernel
    takes the body's arguments, with the elements of FLAT's tuples in place of the tuples. The kernel's
    code is ``code_of_kinds(*kinds)``."""
    key = name, body.fn, code_of_kinds, *kinds
    return KERNELS.get_or_make(key, lambda: generate(body, name, code_of_kinds(*kinds)))


def generate(body: Any, name: str, code: KernelCode) -> Launcher:
    """Generates the kernel ``name``, which calls ``body``."""
    sources, values, scope = code
    parameters, arguments = list[str](), list[str]()
    for parameter in inspect.signature(body.fn).parameters.values():
        if parameter.name in FLAT:
            count = values[parameter.name]
            flat_arguments = [template.format(i) for i in range(count) for template in FLAT[parameter.name]]
            parameters += flat_arguments
            arguments.append(f"({', '.join(flat_arguments)},)" if flat_arguments else "None")
        elif parameter.name in values:
            arguments.append(str(values[parameter.name]))
        else:
            is_constant = parameter.annotation is not inspect.Parameter.empty
            parameters.append(parameter.name + ": tl.constexpr" * is_constant)
            arguments.append(parameter.name)
    kernel_source = f"def {name}({', '.join(parameters)}):\n    body({', '.join(arguments)})"
    scope = globals() | scope | {"body": body, "functions": functions}
    return kernel(defined(name, "\n\n\n".join([*sources, kernel_source]) + "\n", scope))


def kinds_of(sums: Sequence[SumVectors[torch.Tensor | None]]) -> tuple[SumVectors[bool], ...]:
    """The properties of ``sums`` on which the code of a kernel depends."""
    return tuple(
        [SumVectors(f, (), view, *[vector is not None for vector in vectors]) for f, _, view, *vectors in sums]
    )
