"""The report's tables and plots of `precision="fp8"`: times, memory, errors, training."""

from collections.abc import Callable
from typing import Any

from benchmarks.figures import measured, mib, read, rows_of, source, table
from benchmarks.fp8_ways import BF16, CROSS_ENTROPY, FP8, FROZEN, HIDDEN, KEPT, LOGITS, LOGPROBS, PLAIN
from benchmarks.svg import plot

HEAD = "tokens x hidden x vocabulary"
FLAT = "flat"
TITLES = {
    "fp8_training": "Held-out loss, mean of three seeds",
    "fp8_differences": "Held-out loss less the mean of bf16, whose seeds are grey",
}
Cell = Callable[[Callable[[str, str], dict[str, Any]]], str]


def by_shape(columns: dict[str, Cell], *data: str, sources: tuple[str, ...] = ()) -> str:
    """Make a table with a line for each shape and kind of data.

    ``columns`` makes a cell's text, by title, with a function from call and way to a row; "-" where no such row is.
    """
    rows: dict[tuple[str, str], dict[tuple[str, str], Any]] = {}
    for row in rows_of("fp8"):
        if "call" in row and row.get("data", FLAT) in data:
            rows.setdefault((row["shape"], row.get("data", FLAT)), {})[row["call"], row["way"]] = row
    lines = []
    for (shape, kind), calls in rows.items():
        texts = [text_of(cell, calls) for cell in columns.values()]
        lines.append([shape.replace("x", " x "), *[kind] * (len(data) > 1), *texts])
    return table([HEAD, *["data"] * (len(data) > 1), *columns], lines, *sources)


def text_of(cell: Cell, calls: dict[tuple[str, str], Any]) -> str:
    try:
        return cell(lambda call, way: calls[call, way])
    except KeyError:
        return "-"


def ratio(call: str, way: str) -> Cell:
    """A cell with a row's ratio to bare products."""
    return lambda row: f"{row(call, way)['ratio']:.2f}"


def times() -> str:
    """Ratios of cross-entropy to bare products. For logits and dhidden in fp8, a frozen head's saving is subtracted."""

    def with_dhidden(row: Any) -> str:
        saved = row(FROZEN, LOGITS + KEPT)["ms"] - row(FROZEN, FP8 + KEPT)["ms"]
        step = row(CROSS_ENTROPY, LOGITS + KEPT)
        return f"{(step['ms'] - saved) / step['floor_ms']:.2f}"

    columns = {way: ratio(CROSS_ENTROPY, way) for way in (BF16, LOGITS, LOGITS + KEPT)}
    columns |= {"... and fp8 dhidden": with_dhidden}
    columns |= {way: ratio(CROSS_ENTROPY, way) for way in (FP8, FP8 + KEPT)}
    return by_shape(columns, FLAT, "trained", sources=("fp8",))


def logprobs() -> str:
    """Ratios of log-probabilities without gradients to one product."""
    return by_shape({way: ratio(LOGPROBS, way) for way in (BF16, FP8, FP8 + KEPT)}, FLAT, "trained")


def frozen() -> str:
    """Ratios of a frozen head's cross-entropy to two products."""
    return by_shape({way: ratio(FROZEN, way) for way in (BF16, LOGITS + KEPT, FP8 + KEPT)}, FLAT)


def memory() -> str:
    """Peaks of cross-entropy beside its gradients, with the plan's in brackets, and fp8's peak less bf16's."""

    def beside_gradients(way: str) -> Any:
        def cell(row: Any) -> str:
            call = row(CROSS_ENTROPY, way)
            sizes = (mib(size - call["gradient_bytes"]) for size in (call["peak_bytes"], call["plan"]["peak_bytes"]))
            return "{} ({})".format(*sizes)

        return cell

    def difference(row: Any) -> str:
        return mib(row(CROSS_ENTROPY, FP8)["peak_bytes"] - row(CROSS_ENTROPY, BF16)["peak_bytes"])

    columns = {way: beside_gradients(way) for way in (BF16, LOGITS, FP8)} | {"fp8's over bf16's": difference}
    return by_shape(columns, FLAT)


def errors() -> str:
    """A line for each head and way."""
    names = {PLAIN: "plain PyTorch, bf16", BF16: "ours, bf16", HIDDEN: "fp8, `quantise(hidden=...)`"}
    keys = {
        "logprob": "logprob, rms in nats", "loss": "its mean", "d_hidden": "dhidden", "d_weight": "dweight",
        "others": "rows of no target", "batch": "in another batch",
    }  # fmt: skip
    lines = []
    questions = measured(("fp8-training", "fp8"))
    for row in [row for question in questions for row in rows_of(question) if "head" in row]:
        shape = row["shape"].partition("x")[2].replace("x", " x ")
        head = f"**{row['head']}**, {shape}" if row["way"] == PLAIN else ""
        values = {key: row[f"{key}_error"] for key in keys}
        values["loss"] *= row["nats"]
        cells = [format(value, ".0e" if key == "loss" else ".1e") if value else "0" for key, value in values.items()]
        lines.append([head, names.get(row["way"], row["way"]), *cells])
    return table(["head", "", *keys.values()], lines, *questions)


def training() -> str:
    """Make a line for each way: held-out losses of its seeds, their mean, the mean less bf16's. Then come the plots."""
    if not measured(["fp8-training"]):
        return "`python -m benchmarks fp8_training` measures it; no run at this version is recorded."
    run, lines = read("fp8-training"), []
    for way, result in run["compared"].items():
        losses = ", ".join(f"{value:.4f}" for value in result["held_out"])
        cells = [losses, f"{result['spread']:.4f}", f"{result['mean']:.4f}"]
        same_seed = ", ".join(f"{value:+.4f}" for value in result["less_same_seed"])
        differences = f"{result['less_mean']:+.4f}", same_seed, "yes" if result["is_inside"] else "**no**"
        lines.append([way, *cells, *(("-",) * 3 if way == BF16 else differences)])
    columns = "held-out loss of three seeds", "largest less least", "mean", "less bf16's", "seed by seed", "inside"
    task = run["task"]
    words = (
        f"{task['steps']:,} steps of {task['windows'] * task['context']:,} tokens, {task['layers']} layers of "
        f"{task['hidden']}, {task['vocab']:,} ids; {run['training_tokens'] / 1e6:.1f} million tokens of "
        f"{run['text'].partition(':')[0]}. Inside: the mean lies between the least and the largest of bf16's losses."
    )
    pictures = "\n\n".join(f"![{title}](plots/{name}.svg)" for name, title in TITLES.items())
    return f"{table(['', *columns], lines)}\n\n{words}\n\n{source('fp8-training')}\n\n{pictures}"


def curves() -> dict[str, list[list[tuple[int, float]]]]:
    """Return (step, held-out loss) pairs of each way's seeds."""
    by_way: dict[str, list[list[tuple[int, float]]]] = {}
    for row in rows_of("fp8-training"):
        if "curve" in row:
            by_way.setdefault(row["way"], []).append([(step, loss) for step, loss in row["curve"]])
    return by_way


def plots() -> dict[str, str]:
    """Draw each way's mean held-out loss, and its difference from bf16's mean; the range of bf16's seeds is shaded."""
    if not measured(["fp8-training"]):
        return {}
    seeds = curves()
    steps = [step for step, _ in seeds[BF16][0]]
    losses = {
        way: list(zip(*([loss for _, loss in curve] for curve in of_way), strict=True)) for way, of_way in seeds.items()
    }
    means = {way: [sum(of_step) / len(of_step) for of_step in of_way] for way, of_way in losses.items()}
    lines = {f"{way}: {values[-1]:.3f}": list(zip(steps, values, strict=True)) for way, values in means.items()}
    less = {
        f"{way} less bf16": [(step, 1e3 * (a - b)) for step, a, b in zip(steps, means[way], means[BF16], strict=True)]
        for way in means if way != BF16
    }  # fmt: skip
    band = [
        (step, 1e3 * (min(of_step) - mean), 1e3 * (max(of_step) - mean))
        for step, of_step, mean in zip(steps, losses[BF16], means[BF16], strict=True)
    ]
    kinds: list[dict[str, Any]] = [{"up": "nats", "lines": lines}]
    kinds.append({"up": "thousandths of a nat", "lines": less, "band": band})
    return {name: plot(title, "step", **kind) for (name, title), kind in zip(TITLES.items(), kinds, strict=True)}


SECTIONS = {
    "fp8-times": times, "fp8-logprobs": logprobs, "fp8-frozen": frozen, "fp8-memory": memory, "fp8-errors": errors,
    "fp8-training": training,
}  # fmt: skip
