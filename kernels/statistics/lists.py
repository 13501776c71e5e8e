"""Generated functions over the statistics of a softmax, which the hand-written bodies of kernels call.

A stage is a step of a kernel, such as "add_piece". For each statistic it calls the jit function NAME_stage of the
statistic's file; a statistic without one keeps its state. A state is the tuple that a loop carries for a statistic;
``numbers`` are a statistic's numbers or pointers, one for each of its vectors.
"""

import functools
import importlib
import itertools
from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...core.records import Statistic
from ..common.sums import HEADER, Code
from ..common.transform import times


@triton.jit
def limited(sums, first, end, MAY_END: tl.constexpr):
    """``sums`` of half a tile; 0 if its first column is not below ``end``."""
    if MAY_END:
        sums = tl.where(first < end, sums, 0.0)
    return sums


def functions_of(statistics: Iterable[Statistic]) -> dict[str, Any]:
    """The jit functions in the files of ``statistics``, by name."""
    modules = [importlib.import_module(f".{statistic.file or statistic.name}", __package__) for statistic in statistics]
    functions = {name: value for module in modules for name, value in vars(module).items() if name[0] != "_"}
    return functions | {"limited": limited, "times": times}


class Stage(NamedTuple):
    """A generated function that loops over all statistics. The body takes it as the constant that has its name in
    capitals."""

    name: str  # end of the names of the statistics' jit functions
    parameters: str
    is_last: bool = False  # True: it returns the vectors of all statistics; False: it returns their states


ZERO = Stage("zero", "BLOCK, DTYPE")
PIECES = (
    ZERO,
    Stage("add_piece", "states, numbers, share, log_share, is_first"),
    Stage("merge_pieces", "states, total, log_sum", True),
)
STRIPS = (
    ZERO,
    # before the softmax's own sums are added to
    Stage("add_exponentials", "states, numbers, offs, mask, run_max, run_sum, offset, rescale, sums, distance, weight"),
    Stage("add_strips", "states, numbers, offs, mask"),
    Stage("exchange_target", "states, removed, removed_distance, added, added_distance"),
    Stage("merge_strips", "states, total, log_sum", True),
)
LANES = (
    Stage("zero_lanes", "BLOCK, DTYPE"),
    Stage("add_lanes", "states, x, column, in_columns, class_weights_ptr, lane_max, lane_sum, offset, rescale, z, e"),
    Stage("merge_lanes", "states, lane_max, lane_sum, distance, weight, row_max, row_sum, log_sum", True),
)


def numbered(statistics: Iterable[Statistic], name: str) -> list[tuple[Statistic, str]]:
    """Each statistic with the source of a tuple: the elements of the tuple ``name`` that are for its vectors."""
    places = itertools.count()
    return [(statistic, "".join(f"{name}[{next(places)}], " for _ in statistic.vectors)) for statistic in statistics]


def source_of(stage: Stage, statistics: Sequence[Statistic], functions: Container[str]) -> str:
    """The source of a stage's function. ``functions``: names of the jit functions that exist."""
    calls, parameters = list[str](), stage.parameters.split(", ")
    for i, (statistic, numbers) in enumerate(numbered(statistics, "numbers")):
        function = f"{statistic.name}_{stage.name}"
        arguments = [{"states": f"states[{i}]", "numbers": f"({numbers})"}.get(name, name) for name in parameters]
        calls.append(f"{function}({', '.join(arguments)})" if function in functions else f"states[{i}]")
    result = " + ".join(calls) if stage.is_last else "".join(f"{call}, " for call in calls)
    annotated = ", ".join(name + ": tl.constexpr" * name.isupper() for name in parameters)
    return HEADER.format(f"{stage.name}({annotated})") + f"return ({result})"


def code_of(stages: Sequence[Stage], statistics: Sequence[Statistic]) -> Code:
    """The ``Code`` of a kernel over ``statistics``: a function for each stage; the kernel's tuples have an element for
    each vector."""
    functions, vectors = functions_of(statistics), sum(len(statistic.vectors) for statistic in statistics)
    constants: dict[str, Any] = {stage.name.upper(): stage.name if statistics else None for stage in stages}
    sources = [source_of(stage, statistics, functions) for stage in stages] if statistics else []
    counts = dict.fromkeys(("outputs", "strips", "places"), vectors)
    return Code(sources, constants | {"VECTORS": vectors}, counts, functions)


code_of_pieces = functools.partial(code_of, PIECES)
code_of_strips = functools.partial(code_of, STRIPS)
code_of_lanes = functools.partial(code_of, LANES)
STORE_LOGITS = "store_logits(strips, offs, in_rows, x, offs_col, in_vocab, class_weights_ptr)"
STORE_STRIP = "store_strip(strips, offs, in_rows, x, top, offs_col)"
ADD_HALF = (
    "add_half(totals, z, e, ratios, first, ends, IS_FIRST: tl.constexpr, MAY_END: tl.constexpr, INFINITE: tl.constexpr)"
)
STORE_SUMS = "store_sums(totals, sums, strips, offs, in_rows, rounded, ratios)"


def code_of_tile(softmaxes: Sequence[Sequence[Statistic]]) -> Code:
    """The ``Code`` of the logits matmul's epilogue, for the statistics beside each softmax.

    ``STORE_LOGITS`` stores the statistics that read logits, ``STORE_STRIP`` those that read their maximum.
    ``ADD_HALF`` adds the sums of half a strip, of exponentials and of statistics made from them; ``STORE_SUMS`` stores
    these sums.
    """
    listed = [statistic for statistics in softmaxes for statistic in statistics]
    functions, pointers = functions_of(listed), iter(numbered(listed, "strips"))
    logits, strip, halves, stores = list[str](), list[str](), list[str](), list[str]()
    count = itertools.count()
    for i, statistics in enumerate(softmaxes):
        # the body stores the sum of the first softmax, which has ratio 1 and all columns
        place, ratio, end = next(count), f"ratios[{i}]", f"first, ends[{i}], {'True' if i else 'MAY_END'}"
        halves += [f"z{i} = times(z, {ratio})", f"e{i} = tl.exp2(z{i})"] if i else ["z0, e0 = z, e"]
        halves.append(f"total{place} = limited(tl.sum(e{i}, 1), {end})")
        for statistic, numbers in itertools.islice(pointers, len(statistics)):
            name = statistic.name
            for lines, call in ((logits, STORE_LOGITS), (strip, STORE_STRIP)):
                if f"{name}_{call}".partition("(")[0] in functions:
                    lines.append(f"{name}_" + call.replace("strips", f"({numbers})"))
            if f"{name}_half" in functions:
                moment = next(count)
                halves.append(f"total{moment} = limited({name}_half(z{i}, e{i}, {i == 0}, INFINITE), {end})")
                sums = f"totals[{moment}], totals[{place}], times(rounded, {ratio})"
                stores.append(f"{name}_store_sums(({numbers}), offs, in_rows, {sums})")
        if i:
            total = f"totals[{place}] * tl.exp2(-times(rounded, {ratio}))"
            stores.append(f"tl.store(sums[{i}] + offs, {total}, mask=in_rows)")
    places = range(next(count))
    firsts, pairs = ("".join(form.format(i=i) for i in places) for form in ("total{i}, ", "totals[{i}] + total{i}, "))
    halves.append(f"if IS_FIRST:\n        return ({firsts})\n    else:\n        return ({pairs})")
    bodies = {STORE_LOGITS: logits, STORE_STRIP: strip, ADD_HALF: halves, STORE_SUMS: stores}
    sources = [HEADER.format(header) + "\n    ".join(lines or ["pass"]) for header, lines in bodies.items()]
    names = [header.partition("(")[0] for header in bodies]
    constants: dict[str, Any] = {name.upper(): name for name in names}
    counts = dict.fromkeys(("sums", "ratios", "widths"), len(softmaxes))
    counts["strips"] = sum(len(statistic.vectors) for statistic in listed)
    return Code(sources, constants | {"SOFTMAXES": len(softmaxes)}, counts, functions)
