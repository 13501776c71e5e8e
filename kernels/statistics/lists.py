"""Generated functions over the statistics of a softmax, which the hand-written bodies of kernels call.

A stage is a step of a body, for example "add_piece". The function that is generated for a stage calls the jit function
NAME_stage for each statistic NAME; a statistic without such a function keeps its state. A state is the tuple of values
that a loop carries for a statistic. ``values`` and ``strip_ptrs`` are tuples with an element for each vector of the
statistics, a value or a pointer. The jit function of a statistic gets the elements of its vectors.
"""

import functools
import importlib
import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import triton
import triton.language as tl

from ...core.records import Statistic
from ..common.sums import HEADER, KernelCode
from ..common.transform import times


@triton.jit
def limited(sums, half_start, end, MAY_END: tl.constexpr):
    """Returns the sums [rows] of half a tile; 0 if the half's first column, ``half_start``, is not below ``end``.
    MAY_END: False if ``half_start`` is always below ``end``."""
    if MAY_END:
        sums = tl.where(half_start < end, sums, 0.0)
    return sums


def functions_of(statistics: Iterable[Statistic]) -> dict[str, Any]:
    """Returns, by name, all objects in the files of ``statistics``: jit functions and objects that these read."""
    modules = [importlib.import_module(f".{statistic.file or statistic.name}", __package__) for statistic in statistics]
    functions = {name: value for module in modules for name, value in vars(module).items() if name[0] != "_"}
    return functions | {"limited": limited, "times": times}


# Stages of a body, with the parameters of their functions. A body takes a stage's function as the constexpr argument
# with the stage's name in capitals. The last stage of a body, "merge_...", returns the vectors of all statistics; other
# stages return the states.
PIECE_STAGES = {
    "zero": "BLOCK, DTYPE",
    "add_piece": "states, values, share, log_share, is_first",
    "merge_pieces": "states, total, log_sum",
}
STRIP_STAGES = {
    "zero": "BLOCK, DTYPE",
    # ``run_max`` and ``run_sum`` are the softmax's before the block of strips is added to them
    "add_exponentials": ("states, strip_ptrs, offs, mask, run_max, run_sum, offset, rescale, sums, distance, weight"),
    "add_strips": "states, strip_ptrs, offs, mask",
    "exchange_target": "states, removed_exp, removed_z, added_exp, added_z",
    "merge_strips": "states, total, log_sum",
}
LANE_STAGES = {
    "zero_lanes": "BLOCK, DTYPE",
    # ``lane_max`` and ``lane_sum`` [BLOCK]: of each lane the largest x before the block, the sum of exp(x - lane_max)
    "add_lanes": "states, x, column, in_columns, class_weights_ptr, lane_max, lane_sum, offset, rescale, z, e",
    "merge_lanes": "states, lane_max, lane_sum, distance, weight, row_max, row_sum, log_sum",
}


def numbered(statistics: Iterable[Statistic], name: str) -> list[tuple[Statistic, str]]:
    """Pairs each statistic with the source of its vectors' elements in the tuple ``name``: ``"name[0], name[1], "``."""
    indices = itertools.count()
    return [(statistic, "".join(f"{name}[{next(indices)}], " for _ in statistic.vectors)) for statistic in statistics]


def source_of(stage: str, parameters: list[str], statistics: Sequence[Statistic], functions: Container[str]) -> str:
    """Returns the source of a stage's function. ``functions``: names of the jit functions of ``statistics``."""
    calls = list[str]()
    # the tuple with an element for each vector, if the stage takes one
    (tuple_name,) = {"values", "strip_ptrs"}.intersection(parameters) or {""}
    for i, (statistic, elements) in enumerate(numbered(statistics, tuple_name)):
        function = f"{statistic.name}_{stage}"
        arguments = [{"states": f"states[{i}]", tuple_name: f"({elements})"}.get(name, name) for name in parameters]
        calls.append(f"{function}({', '.join(arguments)})" if function in functions else f"states[{i}]")
    result = " + ".join(calls) if stage.startswith("merge_") else "".join(f"{call}, " for call in calls)
    signature = ", ".join(name + ": tl.constexpr" * name.isupper() for name in parameters)
    return HEADER.format(f"{stage}({signature})") + f"return ({result})"


def code_of(stages: Mapping[str, str], statistics: Sequence[Statistic]) -> KernelCode:
    """Returns the code of a kernel over ``statistics``: a function for each stage. The kernel's tuples have an element
    for each vector of a statistic."""
    functions, num_vectors = functions_of(statistics), sum(len(statistic.vectors) for statistic in statistics)
    values: dict[str, Any] = {stage.upper(): stage if statistics else None for stage in stages}
    values |= dict.fromkeys(("output_ptrs", "strip_ptrs", "vector_indices", "NUM_VECTORS"), num_vectors)
    sources = list[str]()
    if statistics:
        sources = [source_of(stage, names.split(", "), statistics, functions) for stage, names in stages.items()]
    return sources, values, functions


code_of_pieces = functools.partial(code_of, PIECE_STAGES)
code_of_strips = functools.partial(code_of, STRIP_STAGES)
code_of_lanes = functools.partial(code_of, LANE_STAGES)
# signatures of the functions of ``code_of_tile``
STORE_LOGITS = "store_logits(strip_ptrs, offs, in_rows, x, offs_col, in_vocab, class_weights_ptr)"
STORE_STRIP = "store_strip(strip_ptrs, offs, in_rows, x, top, offs_col)"
ADD_HALF = (
    "add_half(totals, z, e, ratios, half_start, ends, IS_FIRST_HALF: tl.constexpr, MAY_END: tl.constexpr, "
    "INFINITE: tl.constexpr)"
)
STORE_SUMS = "store_sums(totals, sum_ptrs, strip_ptrs, offs, in_rows, shift_error, ratios)"


def code_of_tile(softmaxes: Sequence[Sequence[Statistic]]) -> KernelCode:
    """Returns the code of the logits matmul's epilogue. ``softmaxes``: for each softmax the statistics beside it.

    ``STORE_LOGITS`` stores statistics that are made from logits. ``STORE_STRIP`` stores statistics that also read the
    largest logit of a strip. ``ADD_HALF`` adds sums over half a strip to ``totals``: for each softmax the sum of
    exponentials, then the sums of its statistics. ``STORE_SUMS`` stores the totals.
    """
    all_statistics = [statistic for statistics in softmaxes for statistic in statistics]
    functions, numbered_statistics = functions_of(all_statistics), iter(numbered(all_statistics, "strip_ptrs"))
    # lines of source of the four functions
    logit_lines, strip_lines, half_lines, sum_lines = list[str](), list[str](), list[str](), list[str]()
    total_indices = itertools.count()  # into ``totals``
    for i, statistics in enumerate(softmaxes):
        # the body itself stores the sum of the first softmax, which has ratio 1 and all columns
        sum_index, ratio = next(total_indices), f"ratios[{i}]"
        limit_arguments = f"half_start, ends[{i}], {'True' if i else 'MAY_END'}"
        half_lines += [f"z{i} = times(z, {ratio})", f"e{i} = tl.exp2(z{i})"] if i else ["z0, e0 = z, e"]
        half_lines.append(f"total{sum_index} = limited(tl.sum(e{i}, 1), {limit_arguments})")
        for statistic, pointers in itertools.islice(numbered_statistics, len(statistics)):
            name = statistic.name
            for lines, signature in ((logit_lines, STORE_LOGITS), (strip_lines, STORE_STRIP)):
                if f"{name}_{signature}".partition("(")[0] in functions:
                    lines.append(f"{name}_" + signature.replace("strip_ptrs", f"({pointers})"))
            if f"{name}_half" in functions:
                moment_index = next(total_indices)
                moment = f"{name}_half(z{i}, e{i}, {i == 0}, INFINITE)"
                half_lines.append(f"total{moment_index} = limited({moment}, {limit_arguments})")
                sums = f"totals[{moment_index}], totals[{sum_index}], times(shift_error, {ratio})"
                sum_lines.append(f"{name}_store_sums(({pointers}), offs, in_rows, {sums})")
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
    values: dict[str, Any] = {name.upper(): name for name in names}
    values |= dict.fromkeys(("sum_ptrs", "ratios", "widths", "NUM_SOFTMAXES"), len(softmaxes))
    values["strip_ptrs"] = sum(len(statistic.vectors) for statistic in all_statistics)
    return sources, values, functions
