"""Sums over the vocabulary in kernels: the library's divergences, and kernels generated for the sums of a call.

``NAME_terms(log_p, log_q, p, q, tie, *numbers)`` returns a column's term of a sum and its slope ``df / d log p``, up to
a multiple of p (``records.SumFunction``). A probability of 0 adds 0 to a sum, whatever its logarithm; a nan makes it
nan. Terms read differences of log-probabilities, so that equal rows give exactly 0. For a gradient both logarithms are
at least ``LOG_FLOOR``.

The body of a kernel is written by hand. It takes tuples of pointers and numbers, and calls generated functions:
``ADD_SUMS`` for a list of sums (here), ``ADD_TERMS`` for the terms of a gradient (``gradients/identity.py``). A
generated kernel with flat arguments calls the body. A launch cannot take the tuples: ``do_not_specialize`` would not
reach their elements, and Triton's cache would tell functions in them apart by name only.
"""

import inspect
import itertools
import linecache
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...core import tiles
from ...core.memory import Cache
from ...core.records import SumFunction, SumOutputs
from . import functions
from .launcher import Launcher, kernel
from .transform import ln_2, log2_e

LOG_FLOOR = tl.constexpr(tiles.LOG_FLOOR)


@triton.jit
def floored(log_p):
    """``max(log_p, LOG_FLOOR)``; a nan stays nan."""
    return tl.where(log_p < LOG_FLOOR, LOG_FLOOR, log_p)


@triton.jit
def part_below(
    p,
    q,
    tie,  # relative difference up to which probabilities count as equal; None for 0
):
    """``p (1 - sign(p - q))``, nan where either is."""
    near = 0.0 * p
    if tie is not None:
        near = tl.maximum(p, q) * tie
    return tl.where(p - q > near, 0.0, tl.where(q - p > near, 2.0 * p, p + 0.0 * q))


@triton.jit
def log_mixture(
    log_a,  # log-probabilities
    log_b,
    share_a,  # in (0, 1)
):
    """``log(share_a exp(log_a) + (1 - share_a) exp(log_b))``; -inf if both logarithms are."""
    return log_of_sum(log_a + tl.log2(share_a) * ln_2, log_b + tl.log2(1.0 - share_a) * ln_2)


@triton.jit
def log_of_sum(a, b):
    """``log(exp(a) + exp(b))``; -inf if a and b are."""
    largest = tl.maximum(a, b)
    offset = tl.where(largest == float("-inf"), 0.0, largest)
    return offset + tl.log2(tl.exp2((a - offset) * log2_e) + tl.exp2((b - offset) * log2_e)) * ln_2


@triton.jit
def forward_kl_terms(log_p, log_q, p, q, tie):
    return tl.where(q != 0.0, q * (log_q - log_p), 0.0), -q


@triton.jit
def reverse_kl_terms(log_p, log_q, p, q, tie):
    term = tl.where(p != 0.0, p * (log_p - floored(log_q)), 0.0)
    return term, term


@triton.jit
def teacher_entropy_terms(log_p, log_q, p, q, tie):
    return -tl.where(q != 0.0, q * log_q, 0.0), q


@triton.jit
def jsd_terms(log_p, log_q, p, q, tie, beta):
    log_m = log_mixture(log_q, log_p, beta)
    slope = (1.0 - beta) * tl.where(p != 0.0, p * (log_p - log_m), 0.0)
    # fma: with a product and a sum, LLVM's vectoriser crashes for sm_90
    return tl.fma(beta, tl.where(q != 0.0, q * (log_q - log_m), 0.0), slope), slope


@triton.jit
def tvd_terms(log_p, log_q, p, q, tie):
    return 0.5 * tl.abs(p - q), -0.5 * part_below(p, q, tie)


@triton.jit
def tvd_gradient(log_p, log_q, p, q, total, tie):
    """``p (sign(p - q) - sum p sign) / 2``, computed with 1 subtracted from both signs.

    For a column with p above 2/3 the sign follows from the sum. Where student and teacher both put nearly all
    probability on one column, the sign of ``p - q`` could else differ between the sum and the column by rounding."""
    below = -2.0 * total
    by_sum = tl.where(below < 1.0 - 0.5 * p, 0.0, tl.where(below > 1.0 + 0.5 * p, 2.0 * p, p))
    return 0.5 * (p * below - tl.where(p > 0.75, by_sum, part_below(p, q, tie)))


@triton.jit
def overlap_terms(log_p, log_q, p, q, tie):
    return tl.where(p < q, p, q + 0.0 * p), 0.5 * part_below(p, q, tie)


@triton.jit
def overlap_gradient(log_p, log_q, p, q, total, tie):
    return -tvd_gradient(log_p, log_q, p, q, -total, tie)


@triton.jit
def within(term, inside):
    """The term of a user's function, 0 outside of the columns."""
    if inside is None:
        return term
    else:
        return tl.where(inside, term, 0.0)


@triton.jit
def user_slope(slope, p, inside):
    """The slope of a user's function; 0 outside of the columns, and where p is 0 and the slope nan."""
    return within(tl.where((p != 0.0) | (slope == slope), slope, 0.0), inside)


@triton.jit
def user_term(coefficient, slope, p, inside):
    """``coefficient`` times the slope of a user's function; 0 for a coefficient of 0, even if the slope is infinite."""
    return tl.where(coefficient != 0.0, coefficient * user_slope(slope, p, inside), 0.0)


class Kind(NamedTuple):
    """The properties of a sum over the vocabulary on which a kernel's code depends."""

    function: SumFunction
    view: int = 0  # index of the softmax p
    has_value: bool = False  # the kernel makes the sum
    has_total: bool = False  # the kernel makes the sum of the slopes; with ``has_term``, it reads that sum
    has_term: bool = False  # the kernel makes the sum's term of a gradient


class Code(NamedTuple):
    """The generated code and the constants that a generated kernel passes to its body."""

    functions: list[str]  # sources of jit functions
    constants: dict[str, Any]  # values of the body's constexpr arguments, by name
    counts: dict[str, int]  # number of elements of the body's tuples, by argument's name
    scope: dict[str, Any]  # objects that the sources name and this file lacks


HEADER = "@triton.jit\ndef {}:\n    "
ADD_SUMS = "add_sums(sums, logs, log_q, inside, scalars, tie)"
# by argument of a body: the flat arguments of a generated kernel that its tuple is made of
FLAT: dict[str, tuple[str, ...]] = {
    "outputs": ("output{}_ptr",), "vectors": ("vector{}_ptr",), "scalars": ("scalar{}",),
    "sums": ("sum{}_ptr",), "strips": ("strip{}_ptr",), "places": ("place{}",),
    "starts": ("start{}_ptr",), "rests": ("rest{}_ptr",), "ratios": ("ratio{}",), "widths": ("columns{}",),
    "entries": ("column_ptr", "sparse_ptr", "begin_ptr", "end_ptr", "count"),
    "teacher": (
        "teacher_ptr", "teacher_offset_ptr", "teacher_bias_ptr", "teacher_start_ptr", "teacher_rest_ptr",
        "teacher_columns", "teacher_stride", "teacher_scale", "teacher_softcap", "teacher_row_scale_ptr",
    ),
}  # fmt: skip
KERNELS: Cache[tuple, Launcher] = Cache(256)
COUNT = itertools.count()


def defined(name: str, source: str, scope: dict[str, Any], owner: Any = None) -> Any:
    """Executes ``source`` and returns its function ``name``. Triton can read the source as long as ``owner`` lives;
    None: as long as the function lives."""
    file = f"<chunked_head {name} {next(COUNT)}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    exec(compile(source, file, "exec"), scope)
    function = scope[name]
    weakref.finalize(function if owner is None else owner, linecache.cache.pop, file, None)
    return function


def add_sums(kinds: Sequence[Kind]) -> str:
    """The source of ``ADD_SUMS``, which adds the terms of a block of columns to each sum."""
    lines, sums = [], []
    for kind, terms in zip(kinds, calls(kinds, False), strict=True):
        i = len(sums)
        lines.append(f"value{i}, slope{i} = {terms}")
        value, slope = f"value{i}", f"slope{i}"
        if kind.function.source:
            value, slope = f"within({value}, inside)", f"user_slope({slope}, p{kind.view}, inside)"
        for term in [value][: kind.has_value] + [slope][: kind.has_total]:
            sums.append(f"sums[{len(sums)}] + {term}")
    return HEADER.format(ADD_SUMS) + "\n    ".join([*logarithms(kinds, False), *lines, f"return ({', '.join(sums)},)"])


def logarithms(kinds: Sequence[Kind], is_floored: bool) -> list[str]:
    """The lines that compute the probabilities and logarithms that ``kinds`` read."""
    views = sorted({kind.view for kind in kinds})
    names = [f"p{view}" for view in views] + ["q"] * any(kind.function.is_paired for kind in kinds)
    lines = [f"log_p{view} = logs[{view}]" for view in views]
    lines += [f"{name} = tl.exp2(log_{name} * log2_e)" for name in names]
    reads_floored = is_floored or any(kind.function.source for kind in kinds)
    return lines + [f"low_{name} = floored(log_{name})" for name in names if reads_floored]


def calls(kinds: Sequence[Kind], is_floored: bool) -> Iterable[str]:
    """For each kind the expression that returns a column's term and slope."""
    first = 0
    for function, view, *_ in kinds:
        p = f"p{view}"
        q = "q" if function.is_paired else p
        log = "low" if is_floored or function.source else "log"
        numbers = "".join(f", scalars[{first + i}]" for i in range(function.numbers))
        first += function.numbers
        yield f"{function.name}_terms({log}_{p}, {log}_{q}, {p}, {q}, tie{numbers})"


def user_functions(kinds: Sequence[Kind]) -> list[str]:
    """Sources of users' functions, each once."""
    return list({kind.function.name: kind.function.source for kind in kinds if kind.function.source}.values())


def code_of_sums(kinds: Sequence[Kind]) -> Code:
    count = sum(kind.has_value + kind.has_total for kind in kinds)
    counts = {"outputs": count, "scalars": sum(kind.function.numbers for kind in kinds)}
    counts["teacher"] = any(kind.function.is_paired for kind in kinds)
    constants = {"ADD_SUMS": "add_sums", "SUMS": count, "IS_PAIRED": counts["teacher"]}
    return Code([*user_functions(kinds), add_sums(kinds)], constants, counts, {})


def kernel_of(body: Any, name: str, kinds: Hashable, code: Callable[[Any], Code] = code_of_sums) -> Launcher:
    """The generated kernel around ``body`` for these kinds. Elements of the body's tuples are its arguments,
    ``output0_ptr`` and so on. ``code``: the function from kinds to ``Code``."""
    return KERNELS.get_or_make((name, body.fn, code, kinds), lambda: generate(body, name, code(kinds)))


def generate(body: Any, name: str, code: Code) -> Launcher:
    parameters, arguments = list[str](), list[str]()
    for parameter in inspect.signature(body.fn).parameters.values():
        if parameter.name in FLAT:
            count = code.counts[parameter.name]
            flat = [template.format(i) for i in range(count) for template in FLAT[parameter.name]]
            parameters += flat
            arguments.append(f"({', '.join(flat)},)" if flat else "None")
        elif parameter.name in code.constants:
            arguments.append(str(code.constants[parameter.name]))
        else:
            is_constant = parameter.annotation is not inspect.Parameter.empty
            parameters.append(parameter.name + ": tl.constexpr" * is_constant)
            arguments.append(parameter.name)
    entry = f"def {name}({', '.join(parameters)}):\n    body({', '.join(arguments)})"
    scope = globals() | code.scope | {"body": body, "functions": functions}
    return kernel(defined(name, "\n\n\n".join([*code.functions, entry]) + "\n", scope))


def flat_outputs(sums: Sequence[SumOutputs]) -> tuple[tuple[Kind, ...], list[Any], list[float]]:
    """Returns the kinds of ``sums``, their output tensors and their numbers, in the order of a generated kernel's
    arguments."""
    kinds = [Kind(output.function, has_value=True, has_total=output.total is not None) for output in sums]
    tensors = [tensor for output in sums for tensor in (output.value, output.total) if tensor is not None]
    return tuple(kinds), tensors, [number for output in sums for number in output.numbers]
