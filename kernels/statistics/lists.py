"""Generated functions over the statistics of a softmax, which the hand-written bodies of kernels call.

A stage is a step of such a body, for example "add_piece". Its generated function calls, for each statistic, the jit
function NAME_stage of the statistic's file, or leaves the statistic's state as it is if there is no such function. A
state is the tuple of values that a loop carries for a statistic. ``values`` and ``strip_ptrs`` are tuples with a value
or a pointer for each vector of the statistics; a statistic's function gets its own elements.
"""

import functools
import importlib
import itertools
from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...core.records import Statistic
from ..common.sums import HEADER, KernelCode
from ..common.transform import times


@triton.jit
def limited(sums, half_start, end, MAY_END: tl.constexpr):
    """The sums [rows] of half a tile, set to 0 if the half's first column is not below ``end``. MAY_END: it may not be;
    else the sums are returned as they are."""
    if MAY_END:
        sums = tl.where(half_start < end, sums, 0.0)
    return sums


def functions_of(statistics: Iterable[Statistic]) -> dict[str, Any]:
    """All objects in the files of ``statistics`` by name: their jit functions, and what these call."""
    modules = [importlib.import_module(f".{statistic.file or statistic.name}", __package__) for statistic in statistics]
    functions = {name: value for module in modules for name, value in vars(module).items() if name[0] != "_"}
    return functions | {"limited": limited, "times": times}


class Stage(NamedTuple):
    """A generated function over all statistics. A body of a kernel takes it as the constexpr argument whose name is the
    stage's in capitals."""

    name: str  # of the function; a statistic's function is called NAME_ and this
    parameters: str  # the function's, as in source
    is_last: bool = False  # True: the function returns the vectors of all statistics; False: it returns their states


ZERO_STAGE = Stage("zero", "BLOCK, DTYPE")
PIECE_STAGES = (
    ZERO_STAGE,
    Stage("add_piece", "states, values, share, log_share, is_first"),
    Stage("merge_pieces", "states, total, log_sum", True),
)
STRIP_STAGES = (
    ZERO_STAGE,
    # before the softmax's own sums are added to
    Stage(
        "add_exponentials", "states, strip_ptrs, offs, mask, run_max, run_sum, offset, rescale, sums, distance, weight"
    ),
    Stage("add_strips", "states, strip_ptrs, offs, mask"),
    Stage("exchange_target", "states, removed, removed_distance, added, added_distance"),
    Stage("merge_strips", "states, total, log_sum", True),
)
LANE_STAGES = (
    Stage("zero_lanes", "BLOCK, DTYPE"),
    Stage("add_lanes", "states, x, column, in_columns, class_weights_ptr, lane_max, lane_sum, offset, rescale, z, e"),
    Stage("merge_lanes", "states, lane_max, lane_sum, distance, weight, row_max, row_sum, log_sum", True),
)


def numbered(statistics: Iterable[Statistic], name: str) -> list[tuple[Statistic, str]]:
    """Pairs each statistic with the source of its elements of the tuple ``name``, such as ``"name[0], name[1], "``."""
    indices = itertools.count()
    return [(statistic, "".join(f"{name}[{next(indices)}], " for _ in statistic.vectors)) for statistic in statistics]


def source_of(stage: Stage, statistics: Sequence[Statistic], functions: Container[str]) -> str:
    """The source of a stage's function. ``functions``: names of the statistics' jit functions that exist."""
    expressions, parameters = list[str](), stage.parameters.split(", ")
    # the tuple with an element for each vector, if the stage takes one
    (tuple_name,) = {"values", "strip_ptrs"}.intersection(parameters) or {""}
    for i, (statistic, elements) in enumerate(numbered(statistics, tuple_name)):
        function = f"{statistic.name}_{stage.name}"
        arguments = [{"states": f"states[{i}]", tuple_name: f"({elements})"}.get(name, name) for name in parameters]
        expressions.append(f"{function}({', '.join(arguments)})" if function in functions else f"states[{i}]")
    result = " + ".join(expressions) if stage.is_last else "".join(f"{expression}, " for expression in expressions)
    annotated = ", ".join(name + ": tl.constexpr" * name.isupper() for name in parameters)
    return HEADER.format(f"{stage.name}({annotated})") + f"return ({result})"


def code_of(stages: Sequence[Stage], statistics: Sequence[Statistic]) -> KernelCode:
    """The code of a kernel over ``statistics``: a function for each stage. The kernel's tuples have an element for each
    vector of a statistic."""
    functions, num_vectors = functions_of(statistics), sum(len(statistic.vectors) for statistic in statistics)
    constants: dict[str, Any] = {stage.name.upper(): stage.name if statistics else None for stage in stages}
    sources = [source_of(stage, statistics, functions) for stage in stages] if statistics else []
    tuple_lengths = dict.fromkeys(("output_ptrs", "strip_ptrs", "vector_indices"), num_vectors)
    return KernelCode(sources, constants | {"NUM_VECTORS": num_vectors}, tuple_lengths, functions)


code_of_pieces = functools.partial(code_of, PIECE_STAGES)
code_of_strips = functools.partial(code_of, STRIP_STAGES)
code_of_lanes = functools.partial(code_of, LANE_STAGES)
STORE_LOGITS = "store_logits(strip_ptrs, offs, in_rows, x, offs_col, in_vocab, class_weights_ptr)"
STORE_STRIP = "store_strip(strip_ptrs, offs, in_rows, x, top, offs_col)"
ADD_HALF = (
    "add_half(totals, z, e, ratios, half_start, ends, IS_FIRST_HALF: tl.constexpr, MAY_END: tl.constexpr, "
    "INFINITE: tl.constexpr)"
)
STORE_SUMS = "store_sums(totals, sum_ptrs, strip_ptrs, offs, in_rows, shift_error, ratios)"


def code_of_tile(softmaxes: Sequence[Sequence[Statistic]]) -> KernelCode:
    """The code of the logits matmul's epilogue. ``softmaxes``: for each softmax the statistics beside it.

    ``STORE_LOGITS`` stores the statistics that are made from logits, ``STORE_STRIP`` those that read a strip's largest
    logit too. ``ADD_HALF`` adds the sums over half a strip to ``totals``, the sum of exponentials of each softmax and
    the sums of its statistics; ``STORE_SUMS`` stores the totals.
    """
    all_statistics = [statistic for statistics in softmaxes for statistic in statistics]
    functions, statistic_pointers = functions_of(all_statistics), iter(numbered(all_statistics, "strip_ptrs"))
    logit_lines, strip_lines, half_lines, sum_lines = list[str](), list[str](), list[str](), list[str]()
    total_indices = itertools.count()  # into ``totals``
    for i, statistics in enumerate(softmaxes):
        # the body itself stores the sum of the first softmax, which has ratio 1 and all columns
        sum_index, ratio = next(total_indices), f"ratios[{i}]"
        limits = f"half_start, ends[{i}], {'True' if i else 'MAY_END'}"
        half_lines += [f"z{i} = times(z, {ratio})", f"e{i} = tl.exp2(z{i})"] if i else ["z0, e0 = z, e"]
        half_lines.append(f"total{sum_index} = limited(tl.sum(e{i}, 1), {limits})")
        for statistic, elements in itertools.islice(statistic_pointers, len(statistics)):
            name = statistic.name
            for lines, expression in ((logit_lines, STORE_LOGITS), (strip_lines, STORE_STRIP)):
                if f"{name}_{expression}".partition("(")[0] in functions:
                    lines.append(f"{name}_" + expression.replace("strip_ptrs", f"({elements})"))
            if f"{name}_half" in functions:
                moment_index = next(total_indices)
                moment = f"{name}_half(z{i}, e{i}, {i == 0}, INFINITE)"
                half_lines.append(f"total{moment_index} = limited({moment}, {limits})")
                sums = f"totals[{moment_index}], totals[{sum_index}], times(shift_error, {ratio})"
                sum_lines.append(f"{name}_store_sums(({elements}), offs, in_rows, {sums})")
        if i:
            total = f"totals[{sum_index}] * tl.exp2(-times(shift_error, {ratio}))"
            sum_lines.append(f"tl.store(sum_ptrs[{i}] + offs, {total}, mask=in_rows)")
    num_totals = next(total_indices)
    first_totals = "".join(f"total{i}, " for i in range(num_totals))
    added_totals = "".join(f"totals[{i}] + total{i}, " for i in range(num_totals))
    half_lines.append(f"if IS_FIRST_HALF:\n        return ({first_totals})\n    else:\n        return ({added_totals})")
    lines_by_signature = {
        STORE_LOGITS: logit_lines, STORE_STRIP: strip_lines, ADD_HALF: half_lines, STORE_SUMS: sum_lines
    }  # fmt: skip
    sources = [
        HEADER.format(signature) + "\n    ".join(lines or ["pass"]) for signature, lines in lines_by_signature.items()
    ]
    names = [signature.partition("(")[0] for signature in lines_by_signature]
    constants: dict[str, Any] = {name.upper(): name for name in names}
    tuple_lengths = dict.fromkeys(("sum_ptrs", "ratios", "widths"), len(softmaxes))
    tuple_lengths["strip_ptrs"] = sum(len(statistic.vectors) for statistic in all_statistics)
    return KernelCode(sources, constants | {"NUM_SOFTMAXES": len(softmaxes)}, tuple_lengths, functions)
