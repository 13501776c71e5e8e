"""Sums and products of 32-bit integers in kernels that could leave 32 bits, found in Triton's intermediate code:
``CHUNKED_HEAD_ARCH=sm_90 python tests/helpers/narrow.py``.

Each integer has a range: of sizes by their names, of what is made of them by arithmetic. Prints a line of JSON for each
operation whose result may lie outside of 32 bits: the kernel and the source line.
"""

import json
import linecache
import os
import re
from pathlib import Path
from typing import Any

from compile_for import launches, pretend, target_of

Range = tuple[int, int]
LARGEST = 2**31 - 1  # a size above it is an argument of 64 bits
ANY: Range = (-(2**31), LARGEST)
# least and largest of arguments by name; of others all that 32 bits hold
SIZES: dict[str, int] = {
    # tokens of a call: each has 40 bytes of targets and statistics, and its hidden states
    **dict.fromkeys(("rows", "tokens", "first_row", "first", "line_length", "shift"), 2**30),
    # ids and columns: each has a row of the head
    **dict.fromkeys(("vocab", "columns", "columns0", "columns1", "made_columns", "first_column"), 2**30),
    **dict.fromkeys(("hidden", "width"), 2**24),
    "entries": 2**31 - 2**13,  # of sets: so many would take 40 bytes each, 80 GiB, beside hidden states
    "ids_per_token": 2**24,  # ids that a token keeps
    **dict.fromkeys(("strips", "strip_count"), 2**23),  # of 128 columns at least
    "zero_count": 2**20,  # counters, one for some tiles
    "programs": 2**20,  # of scale_kernel: eight for each multiprocessor
    "loss_rows": 2**10,  # losses of a call
}
LEAST = {"line_length": 1}  # of others 0
PROGRAMS = 2**20  # as many as multiprocessors, times a few; or one for a block, which begins at a row of those above
LINE = re.compile(r"^\s*(?:%([\w.#]+)(?::\d+)? = )?\"?([\w.]+)\"?(.*?)(?: loc\((#loc\d*)\))?$")
PASSED = ("tt.splat", "tt.expand_dims", "tt.broadcast", "arith.extsi", "arith.trunci", "arith.index_cast", "tt.reshape",
          "arith.extui", "ttg.convert_layout", "tt.trans")  # fmt: skip


def narrow(text: str) -> list[tuple[str, int]]:
    """Files and lines of the operations."""
    places, wrong, ranges = dict[str, str](), list[tuple[str, int]](), dict[str, Range]()
    for name, place in re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.M):
        places[name] = place
    for line in text.splitlines():
        if "tt.func" in line:
            for name in re.findall(r"%([\w.]+): i32", line):
                ranges[name] = LEAST.get(name, 0), SIZES.get(name, LARGEST)
            continue
        found = LINE.match(line)
        if found is None:
            continue
        name, operation, rest, place = found.groups()
        if operation == "scf.for":
            loop = re.match(r" %([\w.]+) = %([\w.]+) to %([\w.]+) step", rest)
            if loop is not None:
                first, last = (ranges.get(each, ANY) for each in loop.groups()[1:])
                ranges[loop[1]] = first[0], last[1]
            for carried in re.findall(r"%([\w.]+) = %[\w.]+[,)]", rest.split("iter_args")[-1]):
                ranges[carried] = ANY
        if name is None:
            continue
        made = range_of(operation, rest, ranges)
        sums = operation in ("arith.addi", "arith.subi", "arith.muli", "arith.shli") and re.search(r"[x ]i32>?$", rest)
        if sums and (made[0] < ANY[0] or made[1] > ANY[1]):
            wrong.append(source(place, places))
            made = max(made[0], ANY[0]), min(made[1], ANY[1])
        ranges[name] = made
    return wrong


def range_of(operation: str, rest: str, ranges: dict[str, Range]) -> Range:
    given = [ranges.get(each, ANY) for each in re.findall(r"%([\w.#]+)", rest.split(" : ")[0])]
    if operation == "arith.constant":
        number = re.match(r" (?:dense<)?(-?\d+)>? : ", rest)
        return (int(number[1]),) * 2 if number else ANY
    if operation == "tt.get_program_id":
        return 0, PROGRAMS
    if operation == "tt.get_num_programs":
        return 1, PROGRAMS
    if operation == "tt.make_range":
        end, start = map(int, re.findall(r"= (\d+) : i32", rest))
        return start, end - 1
    if operation in PASSED and given:
        return given[0]
    if operation == "arith.select" and len(given) == 3:
        return min(given[1][0], given[2][0]), max(given[1][1], given[2][1])
    if len(given) != 2 or not operation.startswith("arith."):
        return ANY
    (a, b), (c, d) = given
    corners = {"arith.addi": (a + c, b + d), "arith.subi": (a - d, b - c)}.get(operation)
    if operation == "arith.muli":
        corners = a * c, a * d, b * c, b * d
    elif operation == "arith.divsi" and c > 0:
        corners = a // d, a // c, b // c, b // d
    elif operation in ("arith.remsi", "arith.remui") and c > 0:
        corners = (0 if a >= 0 else 1 - d), d - 1
    elif operation in ("arith.minsi", "arith.maxsi"):
        least = min if operation == "arith.minsi" else max
        corners = least(a, c), least(b, d)
    return ANY if corners is None else (min(corners), max(corners))


def source(place: str | None, places: dict[str, str]) -> tuple[str, int]:
    """The file and line of a place, where it was written, not where it was called from."""
    text = "" if place is None else places.get(place, "")
    direct = re.match(r'"([^"]+)":(\d+)', text)
    if direct:
        return direct[1], int(direct[2])
    inner = re.search(r"#loc\d*", text)
    return source(inner[0], places) if inner else ("", 0)


class Stopped(Exception):
    """Intermediate code, ahead of all that takes longer."""


def code(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> str:
    from chunked_head.kernels.common.launcher import FUSED
    from triton.backends.nvidia.compiler import CUDABackend

    def stop(module: Any, *given: Any, **more: Any) -> None:
        raise Stopped(str(module))

    CUDABackend.make_ttgir = staticmethod(stop)
    try:
        kernel.warmup(*arguments, grid=(1,), **constants, **FUSED)
    except Stopped as stopped:
        return str(stopped)
    raise AssertionError("kernels come from a cache: set TRITON_ALWAYS_COMPILE=1")


def main() -> None:
    found = launches().values()
    pretend(target_of(os.environ["CHUNKED_HEAD_ARCH"]))
    kernels = dict[str, int]()
    for kernel, arguments, constants in found:
        name = kernel.fn.__name__
        kernels[name] = kernels.get(name, 0) + 1
        for file, line in sorted(set(narrow(code(kernel, arguments, constants)))):
            text = linecache.getline(file, line).strip()
            text = f"{name}: {text}" if "triton" in Path(file).parts else text
            print(json.dumps({"kernel": name, "line": line, "text": text}), flush=True)
    print(json.dumps({"kernels": kernels}))


if __name__ == "__main__":
    main()
