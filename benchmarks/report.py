"""Tables and plots of README.md and docs/, made of benchmarks/results/*.json: `python -m benchmarks report`.

A table stands in a Markdown file between `<!-- report: NAME -->` and `<!-- end report -->`, NAME being one of SECTIONS;
plots are SVG files in docs/plots. `--check` writes nothing and fails where a file is not what would be made. To show a
newer measurement, write it over the file that its question reads (FILES). Figures of a commit that their page does not
name are refused; those that are a hundred commits old are warned of.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import fp8_report, providers
from benchmarks.figures import (
    DATA,
    ERRORS,
    FILES,
    HEADS,
    LONG,
    NAMES,
    ONE,
    RESULTS,
    ROOT,
    SHOWN,
    ages,
    measured,
    mib,
    number,
    read,
    rows_of,
    sittings,
    source,
    table,
)  # fmt: skip
from benchmarks.svg import bars, plot
from chunked_head import plan
from chunked_head.core.gpus import CARDS, GPUS

PLOTS = ROOT / "docs" / "plots"
LOST = "a fault of that commit's benchmark, since mended"
NO_NUMBER = "not measured, or it did not run ([why](docs/benchmarks.md#one-head))"
PLOTTED = {
    "heads": "head", "model": "models", "memory": "memory", "curves": "curves", "fp8_training": "fp8-training",
    "fp8_differences": "fp8-training",
}  # by plot  # fmt: skip


def matrix(question: str, column: str, chosen: Sequence[str], cell: Callable[[dict], str], first: str = "shape") -> str:
    """Make a table with a line for each value of ``first`` and a column for each chosen value of ``column``."""
    rows = [row for row in rows_of(question) if row[column] in chosen and (first == "shape" or row[first] in NAMES)]
    columns = [name for name in chosen if any(row[column] == name for row in rows)]
    cells = {(row[first], row[column]): cell(row) for row in rows}
    lines = [[NAMES.get(value, value.replace("x", " x ")), *(cells.get((value, c), "-") for c in columns)]
             for value in dict.fromkeys(row[first] for row in rows)]  # fmt: skip
    head = "tokens x hidden x vocabulary" if first == "shape" else ""
    return table([head, *(NAMES.get(c, c.replace("x", " x ")) for c in columns)], lines, question)


def heads(*questions: str) -> str:
    """Make a table for each head and kind of data; ways that did not run stand last, with the reason."""
    texts = []
    for question in measured(questions):
        results = read(question)
        for shape, data in dict.fromkeys((row["shape"], row["data"]) for row in results["rows"]):
            rows = [row for row in results["rows"] if (row["shape"], row["data"]) == (shape, data)]
            texts.append(f"**{shape.replace('x', ' x ')}, {DATA[data]}**\n\n{of_one_head(rows, results)}")
        texts.append(source(question))
    return "\n\n".join(texts)


def absent_from(results: dict[str, Any]) -> dict[str, str]:
    """Reasons of providers without a row: they were skipped, or the benchmark of that commit lost them."""
    names = providers.LATE if "--late" in results["command"] else providers.NAMES
    lost = set(names) - {row["provider"] for row in results["rows"]} if "--provider" not in results["command"] else ()
    return dict.fromkeys(sorted(lost), LOST) | results["skipped"]


def of_one_head(rows: Sequence[dict[str, Any]], results: dict[str, Any]) -> str:
    late = any(row["provider"].startswith("late") for row in rows)
    forward_rows = {row["provider"]: row for row in rows if row.get("below") == ONE and row["status"] == "ok"}
    lines, absent = [], absent_from(results)
    for row in sorted(rows, key=lambda row: list(NAMES).index(row["provider"]) if row["provider"] in NAMES else -1):
        if row["status"] != "ok":
            absent[row["provider"]] = f"{row['status']}, {row['error']}"
        elif row.get("below") != ONE and row["provider"] in NAMES:
            memory = f"{row['peak_bytes'] / 2**30:.1f} GiB" if "peak_bytes" in row else "-"
            cells = [span(row), number(row.get("ratio")), memory]
            if late:
                cells.append(number(forward_rows.get(row["provider"], {}).get("ratio")))
            lines.append([NAMES[row["provider"]], *cells, *(number(row.get(f"{key}_error"), ".1e") for key in ERRORS)])
    columns = ["", "time", f"of {'four' if late else 'three'} matmuls", "memory", *["without gradients, of one"] * late]
    columns += ["error of dhidden", "of dweight", "of the log-probability"]
    lines += [[NAMES[name], f"did not run: {reason(why)}", *["-"] * (len(columns) - 2)] for name, why in absent.items()]
    return table(columns, lines)


def milliseconds(value: float) -> str:
    """Format milliseconds to a few thousandths, as rounds agree no better."""
    return f"{value:.1f}" if value >= 20 else f"{value:.2f}"


def span(row: dict[str, Any]) -> str:
    """A row's milliseconds, and the middle half of its rounds where the file has that."""
    half = f" ({milliseconds(row['ms_p25'])} to {milliseconds(row['ms_p75'])})" if "ms_p25" in row else ""
    return f"{milliseconds(row['ms'])} ms{half}"


def beside(folder: Path) -> str:
    """Make a table of the heads' medians here, another sitting's in ``folder``, and their differences in percent."""
    lines, machines = [], dict[str, str]()
    for question in measured(HEADS):
        if not (folder / FILES[question]).is_file():
            continue
        theirs = json.loads((folder / FILES[question]).read_text())
        machines[f"{theirs['device']}, {theirs['date'][:10]}, commit {theirs['commit'][:7]}"] = question
        keys = ("shape", "data", "provider")
        other_rows = {tuple(row[key] for key in keys): row for row in theirs["rows"] if "ms" in row}
        for row in read(question)["rows"]:
            key = tuple(row[key] for key in keys)
            if "ms" in row and key in other_rows:
                head = f"{key[0].replace('x', ' x ')}, {DATA[key[1]].split()[0]}"
                cells = [f"{head}: {NAMES.get(key[2], key[2])}"]
                for name, form in (("ms", milliseconds), ("ratio", "{:.3f}".format)):
                    if name in row:
                        difference = f"{100 * (other_rows[key][name] / row[name] - 1):+.1f} %"
                        cells += [form(row[name]), form(other_rows[key][name]), difference]
                lines.append([*cells, *["-"] * (7 - len(cells))])
    if not lines:
        return "`python -m benchmarks report --beside FOLDER` prints it; no second sitting is recorded."
    columns = ["head", "ms above", "the other sitting's", "apart", "of three matmuls above", "the other's", "apart"]
    made = table(columns, lines)
    return f"{made}\n\nThe other sitting: {'; '.join(machines)}."


def join_numbers(texts: Sequence[str]) -> str:
    """A number of each kind of data, or a dash where there is none."""
    return ", ".join(texts) if set(texts) != {"-"} else "-"


def reason(why: str) -> str:
    return why.split("\n")[0][:160]


def two_heads() -> str:
    """Make README's table, with a line for each way; a head has time, memory and the larger error of both gradients.

    A cell has a number for each kind of data.
    """
    questions = measured(HEADS)
    runs = [read(question) for question in questions]
    cells: dict[str, list[str]] = {name: [] for name in NAMES}
    absent = {name: why for results in runs for name, why in absent_from(results).items()}
    columns, rows_of_runs = list[str](), [row for results in runs for row in results["rows"]]
    for shape in dict.fromkeys(row["shape"] for row in rows_of_runs):
        rows = {(row["provider"], row["data"]): row for row in rows_of_runs if row["shape"] == shape}
        kinds = list(dict.fromkeys(data for _, data in rows))
        columns += [f"{shape.replace('x', ' x ')}: ms", "GiB", "error, %"]
        for name in NAMES:
            of_name = [rows.get((name, data), {}) for data in kinds]
            absent.update((name, row["error"]) for row in of_name if row.get("status", "ok") != "ok")
            peaks = [row["peak_bytes"] / 2**30 for row in of_name if "peak_bytes" in row]
            worst = [max(row.get("d_hidden_error", 0.0), row.get("d_weight_error", 0.0)) for row in of_name]
            cells[name] += [
                join_numbers([milliseconds(row["ms"]) if "ms" in row else "-" for row in of_name]),
                f"{max(peaks):.1f}" if peaks else "-",
                join_numbers([f"{100 * value:.2f}" if value else "-" for value in worst]),
            ]
    lines = [[NAMES[name], *texts] for name, texts in cells.items() if set(texts) != {"-"}]
    for name in (name for name in absent if set(cells.get(name, ())) <= {"-"}):
        lines.append([NAMES[name], f"did not run: {reason(absent[name])}", *["-"] * (len(columns) - 1)])
    kinds = list(dict.fromkeys(DATA[row["data"]] for row in rows_of_runs))
    words = f"On {kinds[0]}" if len(kinds) == 1 else f"Pairs of numbers: on {' and on '.join(kinds)}. -: {NO_NUMBER}"
    return f"{table(['', *columns], lines)}\n\n{words}. {source(*questions, command=False)}"


def model_source() -> str:
    """The figures of a whole model's step in a sentence, and where they come from."""
    rows = {row["provider"]: row for row in read("models")["rows"] if row.get("status") == "ok"}
    steps = [rows[name] for name in ("ours", "plain")]
    ours, plain = (f"{step['ms']:.0f} ms and {step['peak_bytes'] / 2**30:.1f} GiB" for step in steps)
    return f"A step takes {ours}; plain PyTorch takes {plain}. {source('models', command=False)}"


def default() -> str:
    below = {"default": "3 products", "into": "3 products, add_", "loss": "1 product", "256MiB": "3 products"}

    def cell(row: dict[str, Any]) -> str:
        ratio = row["ratios"][below[row["row"]]] if row["row"] in below else row["ratio"]
        return f"{ratio:.2f}, {mib(row['peak_bytes'])} MiB"

    return matrix("speed", "row", [*below, "half-skipped"], cell)


def all_losses() -> str:
    shapes = list(dict.fromkeys(row["shape"] for row in rows_of("losses")))
    return matrix("losses", "shape", shapes, of_products, "workload")


def of_products(row: dict[str, Any]) -> str:
    return f"{row['ratio']:.2f} of {row['products']}"


def step_cells(way: dict[str, Any]) -> tuple[str, str]:
    """Return time and peak of a way's step, or what happened to it."""
    return (f"{way['ms']:.1f} ms", f"{way['peak_bytes'] / 2**30:.1f} GiB") if "ms" in way else (way["status"], "-")


def trainers() -> str:
    """Time and memory of each trainer's step, by its own head and ours; trainers that did not run stand last."""
    rows = read("trainers")["rows"]
    pairs = {
        row["trainer"]: [step_cells(row["ways"][way]) for way in ("plain", "ours")] for row in rows if "ways" in row
    }
    lines = [[trainer, plain[0], ours[0], plain[1], ours[1]] for trainer, (plain, ours) in pairs.items()]
    lines += [[row["trainer"], f"did not run: {reason(row['error'])}", *"---"] for row in rows if "ways" not in row]
    return table(["", "step, its own head", "here", "peak, its own head", "here"], lines, "trainers")


def framework_steps() -> str:
    """Make a line for each of a framework's own ways beside ours, with the number of lines that a user changes."""
    sources = "framework-steps", "framework-axolotl"  # of a framework the last one counts
    rows = {(row["framework"], row["case"]): row for name in sources for row in read(name)["rows"] if "ways" in row}
    lines = []
    for row in rows.values():
        *theirs, (_, ours) = row["ways"].items()
        for name, way in theirs:
            title = f"{row['framework']} {row['version']}, {row['case']}: {name}"
            lines.append([title, *step_cells(way), *step_cells(ours), row["lines"]])
    head = ["", "step, its head", "peak, its head", "step, here", "peak, here", "lines to change"]
    return table(head, lines, *sources)


def memory() -> str:
    worst = read("memory")["largest_difference"]["bytes"] / 2**20
    rows = [row | {"tokens": f"{row['tokens'] // 1024}K tokens"} for row in rows_of("memory", model="llama3-8b")]
    tokens, ways = (list(dict.fromkeys(row[key] for row in rows)) for key in ("tokens", "provider"))
    cells = {(row["provider"], row["tokens"]): mib(row["peak_bytes"]) for row in rows}
    text = table(
        ["MiB over the inputs", *tokens],
        [[NAMES[w], *(cells.get((w, t), "-") for t in tokens)] for w in ways],
        "memory",
    )
    return f"{text}\n\nThe plan's memory differs from the measured one by at most {abs(worst):.1f} MiB in this run."


def models() -> str:
    rows = sorted(rows_of("models"), key=lambda row: -row["peak_bytes"])
    lines = [[NAMES[row["provider"]], span(row), mib(row["peak_bytes"])] for row in rows]
    return table(["", "time", "peak MiB"], lines, "models")


def longest() -> str:
    """The longest sequence of each way within a limit, of runs of their own."""
    questions = measured(("longest-others", "longest-ours"))
    rows = [row for question in questions for row in read(question)["longest"] if "fits" in row]
    lines = [[NAMES[row["provider"]], f"{row['fits']:,} tokens"] for row in rows]
    return table(["", "longest sequence within 80 GiB"], lines, *reversed(questions))


def curves() -> str:
    worst = read("curves")["largest difference"]
    head = "largest difference of the loss", "patched and plain", "plain and plain, its weights changed by 1e-7"
    return table(head, [["200 steps", f"{worst['patched']:.1e}", f"{worst['control']:.1e}"]], "curves")


def parallel() -> str:
    """A line for each way, its time as a share of one GPU's, memory and messages on two and four GPUs."""
    cells: dict[str, list[str]] = {}
    for name in ("parallel-2", "parallel-4"):
        for row in rows_of(name):
            if "messages" in row:
                of_one, size = f"{row.get('ratio', 1):.2f}", mib(row["beside_gradients_bytes"])
                cells.setdefault(row["provider"], []).append(f"{of_one}, {size} MiB, {row['messages']}")
    lines = [[way.replace("ours", "chunked_head"), *texts] for way, texts in cells.items()]
    return table(
        ["of one GPU's time, beside the gradients, messages", "2 GPUs", "4 GPUs"], lines, "parallel-2", "parallel-4"
    )


def long() -> str:
    """A line for each row of long sequences that was measured, with the number of GPUs."""
    questions, lines = [question for question in LONG if question in FILES], list[list[str]]()
    for question in questions:
        for row in rows_of(question):
            if row["row"] == "one" and question != questions[0]:
                continue
            row_errors = [row[name] for name in ("loss_error", "d_hidden_error", "d_weight_error") if name in row]
            way, of_one = row["provider"].removeprefix("ours, "), f"{row.get('ratio', 1):.3f}"
            size = f"{mib(row['peak_bytes'])} ({mib(row['beside_gradients_bytes'])})"
            errors = ", ".join(f"{error:.0e}" for error in row_errors) or f"last rows {row['last_rows_error']:.1e}"
            seconds = f"{row['ms'] / 1000:.2f}"
            lines.append([f"{row['tokens']:,}, {row['ranks']}", way, seconds, of_one, size, errors])
    if not lines:
        return "`python -m benchmarks long --gpus 2` measures it; no run at this version is recorded."
    head = "tokens, GPUs", "", "seconds", "of one GPU's", "peak MiB (beside gradients)", "off: loss, dhidden, dweight"
    return table(head, lines, *questions)


def commits() -> str:
    """A line for each commit and day of results."""
    names = {
        sitting: ", ".join(f"`{file.removesuffix('.json')}`" for file in files) for sitting, files in sittings().items()
    }
    return "\n".join(f"- {day}, commit {commit}: {text}" for (day, commit), text in names.items())


def host() -> str:
    rows = [row for row in rows_of("host") if "host_ms" in row]
    shapes, calls = (list(dict.fromkeys(row[key] for row in rows)) for key in ("shape", "row"))
    cells = {(row["row"], row["shape"]): f"{row['host_ms']:.2f}" for row in rows}
    lines = [[call, *(cells.get((call, shape), "-") for shape in shapes)] for call in calls]
    return table(["ms of the host", *(shape.replace("x", " x ") for shape in shapes)], lines, "host")


def plans() -> str:
    """Plans for one GPU; the only table that is computed rather than measured."""
    heads = {
        "Llama 3 8B": (4096, 128256),
        "Qwen3 0.6B": (1024, 151936),
        "gpt-oss 20B": (2880, 201088),
        "Gemma 2 2B": (2304, 256000),
    }
    sizes, lines = [2**power * 1024 for power in (3, 4, 5, 6, 7)], []
    for name, (hidden, vocab) in heads.items():
        plans_by_size = [plan(tokens, hidden, vocab, torch.bfloat16, device="sm_90") for tokens in sizes]
        lines.append(
            [
                f"{name} ({hidden} x {vocab})",
                *(f"{mib(size_plan.peak_bytes)} ({mib(size_plan.extra_bytes)})" for size_plan in plans_by_size),
            ]
        )
    return table(["MiB", *(f"{tokens // 1024}K tokens" for tokens in sizes)], lines)


def gpus() -> str:
    """The architectures that the library has kernels for."""
    measured = {"sm_90": "on an H200 and an H100", "sm_80": "compiled; run on an H200"}
    lines = []
    for name, gpu in GPUS.items():
        operands = "tensor copies" if gpu.logits.described else "pointers"
        how = f"{operands}, {gpu.logits.block_m} x {gpu.logits.block_n}; {'our own' if gpu.own_dhidden else 'BLAS'}"
        lines.append(
            [name, ", ".join(CARDS[name]), how, f"{gpu.shared_bytes:,} bytes", measured.get(name, "compiled only")]
        )
    logits = "logits: operands by, tile; gradient of hidden by"
    return table(["architecture", "for example", logits, "shared memory", "measured"], lines)


SECTIONS: dict[str, Callable[[], str]] = {
    "model-source": model_source, "head-source": lambda: source("head", command=False),
    "readme": two_heads, "heads": lambda: heads(*HEADS), "late": lambda: heads("late"),
    "beside": lambda: beside(RESULTS / "beside"),
    "default": default, "losses": all_losses, "memory": memory, "models": models, "longest": longest,
    "commits": commits, "trainers": trainers, "framework-steps": framework_steps,
    "gpus": gpus,
    "curves": curves, "parallel": parallel, "host": host, "long": long, "plans": plans,
    **fp8_report.SECTIONS,
}  # fmt: skip


def plots() -> dict[str, str]:
    rows = [row for row in rows_of("head") if row["provider"] in NAMES and row["provider"] != "floor"]
    floor = next(row for row in rows_of("head") if row["provider"] == "floor")["ms"]
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        label, peak = NAMES[row["provider"]].replace("`", ""), row["peak_bytes"] / 2**30
        over = max(1.0, 100 * (row["ms"] / floor - 1))
        points[f"{label}: {row['ms']:.1f} ms, {peak:.1f} GiB"] = [(over, peak)]
    title = f"One head, 8192 x 4096 x 128256, {read('head')['device'].removeprefix('NVIDIA ')}"
    across = f"% over three matmuls ({floor:.1f} ms), 1 or less on the left"
    pictures = {"heads": plot(title, across, "GiB over the inputs", points, log=True)}
    ways = {row["provider"]: row for row in rows_of("models")}
    steps = {}
    for way in ("ours", "liger", "plain"):
        peak = ways[way]["peak_bytes"] / 2**30
        steps[NAMES[way]] = peak, f"{peak:.1f} GiB, {ways[way]['ms']:.0f} ms"
    device = read("models")["device"].removeprefix("NVIDIA ")
    pictures["model"] = bars(f"A 1B model, forward and backward of 8192 tokens, {device}", steps)
    curve: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(rows_of("memory", model="llama3-8b"), key=lambda row: row["provider"] != "ours"):
        curve.setdefault(NAMES[row["provider"]], []).append((row["tokens"], row["peak_bytes"] / 2**30))
    pictures["memory"] = plot("Memory of Llama 3 8B's head in bf16", "tokens", "GiB over the inputs", curve, log=True)
    runs = {name: run["loss"] for name, run in read("curves")["runs"].items()}
    differences = {
        words: [(step, 1e6 * abs(a - b)) for step, (a, b) in enumerate(zip(runs[key], runs["plain"], strict=True), 1)]
        for key, words in {"patched": "patched", "control": "plain, its weights changed by 1e-7"}.items()
    }
    title = "A small model on real text beside the plain one"
    pictures |= {"curves": plot(title, "step", "difference of the loss, in millionths", differences)}
    return pictures | fp8_report.plots()


def make() -> dict[Path, str]:
    """Return the text of every file that the command writes. Raises ValueError where a page does not name a commit."""
    pattern = re.compile(r"(<!-- report: ([\w-]+) -->)\n.*?<!-- end report -->", re.DOTALL)
    texts = {PLOTS / f"{name}.svg": text for name, text in plots().items()}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        SHOWN.clear()
        filled = pattern.sub(
            lambda section: f"{section[1]}\n{SECTIONS[section[2]]()}\n<!-- end report -->", page.read_text()
        )
        SHOWN.update(PLOTTED[name] for name in re.findall(r"plots/(\w+)\.svg", filled))
        for question in sorted(SHOWN):
            commit = read(question)["commit"][:7]
            if commit not in filled:
                raise ValueError(f"{page.name} shows {FILES[question]} and does not name its commit, {commit}")
        texts |= {page: filled} if pattern.search(filled) else {}
    return texts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file would change")
    parser.add_argument(
        "--beside", type=Path, help="print the heads' medians beside those of files in a folder, no more"
    )
    args = parser.parse_args(argv)
    if args.beside is not None:
        print(beside(args.beside))
        return 0
    changed = {path: text for path, text in make().items() if not path.is_file() or path.read_text() != text}
    for path, text in changed.items():
        print("differs:" if args.check else "wrote", path.relative_to(ROOT))
        if not args.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    sentences = ages()
    print("\n".join(["results by commit:", *sentences]))
    if any(sentence.startswith("old") for sentence in sentences):
        print("`python -m benchmarks sitting` measures old results again")
    return int(args.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
