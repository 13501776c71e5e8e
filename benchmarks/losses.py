"""Time, memory and kernel launches of losses from one softmax pass, beside bare matrix products on the same operands.

`python -m benchmarks.losses` times each workload through `loss.backward()` as a ratio to the products that it cannot do
without: three; four with a dense teacher's logits, or with logits that are computed again; one without gradients.
"""

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from benchmarks import formulas, measure, providers, shapes
from benchmarks.accuracy import relative_error
from benchmarks.head import Watch, brief, make_console, mebibytes, number, report_failures
from benchmarks.shapes import Operands, Shape
from chunked_head import Plan, linear_cross_entropy, linear_logprobs, linear_loss, losses, metrics, plan
from chunked_head.metrics import Metric

SHAPES = (Shape(8192, 4096, 128256), Shape(8192, 2048, 128256), Shape(8192, 1024, 151936))
CHECK_TOKENS, CHECK_CHUNK = 48, 16


class Workload(NamedTuple):
    """What is asked of a head, what it reads, and how many bare products it is measured by."""

    loss: losses.base.Losses
    fields: tuple[str, ...] = ()
    metrics: tuple[Metric, ...] = ()
    products: int = 3  # 1: no gradients
    must: tuple[float, ...] = ()  # the largest ratio that is accepted, for the first of SHAPES
    temperature: float | tuple[float, float] = 1.0  # or one per token, drawn between these
    kept: float = 0.0  # the share of tokens that keep a set of ids
    everywhere: bool = False  # whether the call promises that all do
    lengths: bool = False  # whether the host knows those of segments
    streams: int = 0  # of which each has its part of the tokens; 0: none

    @property
    def unlisted(self) -> bool:
        """Whether no launches are listed: nothing is multiplied between them, or chunks are other than the plan's."""
        return (
            self.lengths
            or self.streams > 0
            or self.kept == 1.0
            or any(summand.of_columns for _, summand in self.loss.terms)
        )


_CE, _POLICY, _DENSE = losses.cross_entropy(), ("old_logprobs", "advantages"), ("teacher_hidden", "teacher_weight")
_CLIPPED = metrics.clip_fraction(side="low"), metrics.clip_fraction(side="high")
_SIX = (metrics.ratio(), metrics.kl_old(), *_CLIPPED, metrics.advantage(), metrics.effective_sample_size())
_GRPO = losses.grpo() + 1e-4 * losses.z_loss()
WORKLOADS: dict[str, Workload] = {
    "cross-entropy": Workload(_CE),
    "streams": Workload(_CE, streams=4),
    "ce+entropy+accuracy": Workload(_CE, (), (metrics.entropy(), metrics.accuracy()), must=(1.09, 1.13, 1.22)),
    "grpo": Workload(_GRPO - 0.01 * losses.entropy(), _POLICY, _SIX, must=(1.10, 1.15, 1.26)),
    "grpo+z+metrics": Workload(_GRPO, _POLICY, (metrics.entropy(), metrics.accuracy(), *_SIX)),
    "grpo-temperature": Workload(losses.grpo(), _POLICY, temperature=0.8),
    "grpo-temperatures": Workload(losses.grpo(), _POLICY, temperature=(0.6, 1.0)),
    "grpo-kept": Workload(losses.grpo(), _POLICY, must=(0.05, 0.08, 0.10), kept=1.0),
    "grpo-kept-everywhere": Workload(losses.grpo(), _POLICY, must=(0.05, 0.08, 0.10), kept=1.0, everywhere=True),
    "grpo-kept-mixed": Workload(losses.grpo(), _POLICY, must=(0.18,), kept=0.9),
    "gspo": Workload(losses.gspo(), (*_POLICY, "segments"), must=(1.45,)),
    "dpo": Workload(losses.dpo(), ("ref_logprobs", "segments", "pairs"), must=(1.45,)),
    "gspo-lengths": Workload(losses.gspo(), (*_POLICY, "segments"), must=(1.06, 1.12, 1.18), lengths=True),
    "dpo-lengths": Workload(losses.dpo(), ("ref_logprobs", "segments", "pairs"), must=(1.06, 1.12, 1.18), lengths=True),
    "topk": Workload(losses.topk_kl() + _CE, ("teacher_ids", "teacher_logprobs"), must=(1.12,)),
    "topk-alone": Workload(losses.topk_kl(normalize="topk"), ("teacher_ids", "teacher_logprobs"), must=(0.10,)),
    "dense-kl": Workload(losses.forward_kl(), _DENSE, products=4, must=(1.06, 1.13, 1.20)),
    "reverse-kl": Workload(losses.reverse_kl(), _DENSE, products=4),
    "jsd": Workload(losses.jsd(), _DENSE, products=4),
    "logprobs": Workload(_CE, products=1),
    # The backward comes late and computes the logits again: they are two of the four products.
    "logprobs+entropy-grad": Workload(losses.grpo() - 0.01 * losses.entropy(), _POLICY, products=4),
}


@dataclass
class Call:
    """A workload with its fields, as a provider's loss: called with hidden states, weight and targets."""

    name: str
    batch: dict[str, Tensor]
    options: dict[str, Any]
    plan: Plan | None = None  # how the last call ran, where it says so

    def __post_init__(self) -> None:
        self.loss, self.metrics = WORKLOADS[self.name].loss, WORKLOADS[self.name].metrics
        self.num_segments = int(self.batch["segments"].max()) + 1 if "segments" in self.batch else None
        self.segment_lengths: list[int] | None = None
        self.reference_batch = self.batch
        if WORKLOADS[self.name].lengths:
            self.segment_lengths, self.num_segments = self.batch["segments"].bincount().tolist(), None
            self.batch = {name: value for name, value in self.batch.items() if name != "segments"}
            if "pairs" in self.batch:  # the chosen ones before all that were rejected, and on the host
                self.batch["pairs"] = torch.arange(len(self.segment_lengths)).view(2, -1).t().contiguous()
                self.reference_batch = {**self.reference_batch, "pairs": self.batch["pairs"]}
        given = WORKLOADS[self.name].temperature
        self.temperature: float | Tensor = (
            given if isinstance(given, float) else torch.empty_like(self.batch["advantages"]).uniform_(*given)
        )

    def __call__(self, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        if self.name == "cross-entropy":
            return linear_cross_entropy(hidden, weight, target, **self.options)
        if WORKLOADS[self.name].streams:
            parts = [tensor.unflatten(0, (WORKLOADS[self.name].streams, -1)).unbind() for tensor in (hidden, target)]
            shares = [1 / len(parts[0])] * len(parts[0])
            out = linear_loss(parts[0], weight, parts[1], self.loss, stream_weights=shares, **self.options)
            self.plan = out.streams[0].plan
            return out.loss
        if self.name == "logprobs":
            return -linear_logprobs(hidden, weight, target, **self.options).mean()
        if self.name == "logprobs+entropy-grad":
            logprobs, entropy = linear_logprobs(hidden, weight, target, entropy=True, **self.options)
            ratio, advantages = (logprobs - self.batch["old_logprobs"]).exp(), self.batch["advantages"]
            surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            return (-surrogate - 0.01 * entropy).mean()
        out = linear_loss(
            hidden, weight, target, self.loss,
            batch=self.batch, num_segments=self.num_segments, segment_lengths=self.segment_lengths,
            metrics=self.metrics, temperature=self.temperature, kept_everywhere=WORKLOADS[self.name].everywhere,
            **self.options,
        )  # fmt: skip
        self.plan = out.plan
        return out.loss


def plan_of(step: measure.Step) -> Plan:
    """How the last step ran; where the function does not say, what `chunked_head.plan` says of such a call."""
    call, hidden, weight = step.loss, step.operands.hidden, step.operands.weight
    assert isinstance(call, Call)
    if call.plan is not None:
        return call.plan
    wanted: dict[str, Any] = {"hidden_grad": step.backward, "weight_grad": step.backward, **call.options}
    if call.name == "logprobs+entropy-grad":
        wanted |= {"loss": call.loss, "reduction": "none"}
    return plan(len(hidden), hidden.shape[1], len(weight), hidden.dtype, device=hidden.device, **wanted)


def make_step(name: str, operands: Operands, options: dict[str, Any], upstream: float = 1.0) -> measure.Step:
    """A workload's step; its fields are drawn here and count as inputs."""
    workload = WORKLOADS[name]
    kept: dict[str, Any] = shapes.draw_kept(operands, workload.kept) if workload.kept else {}
    own = linear_logprobs(operands.hidden.detach(), operands.weight.detach(), operands.target, **kept)
    segments = min(16, len(own) // 4 * 2) if "pairs" in workload.fields else len(own) // 512
    batch = shapes.draw_fields(workload.fields, operands, own, max(2, segments)) | kept
    return measure.Step(Call(name, batch, options), operands, upstream, workload.products > 1)


@dataclass(frozen=True)
class Request(measure.MemoryRequest):
    """What a fresh process measures: `provider` is a workload."""

    options: dict[str, Any] = field(default_factory=dict)

    def step(self) -> measure.Step:
        operands = shapes.make_operands(self.shape, shapes.parse_dtype(self.dtype), torch.device("cpu"))
        return make_step(self.provider, operands, self.options, self.upstream)


def reference(call: Call, operands: Operands) -> tuple[float, Tensor, Tensor]:
    """Loss and gradients from whole logits in float32 (float64 for float64), by plain formulas."""
    wide = torch.promote_types(operands.hidden.dtype, torch.float32)
    hidden, weight = operands.hidden.detach().to(wide), operands.weight.detach().to(wide)
    logits = x = (hidden @ weight.T).requires_grad_()
    fields = dict(call.reference_batch)
    if "teacher_hidden" in call.batch:
        teacher_hidden, teacher_weight = (call.batch[name].to(wide) for name in _DENSE)
        fields["teacher_x"] = teacher_hidden @ teacher_weight.T
    if "kept_ids" in fields:
        x = formulas.kept(x, operands.target, fields["kept_ids"], fields["kept_offsets"])
    total, temperature = x.new_zeros(()), torch.as_tensor(call.temperature, dtype=wide, device=x.device).view(-1, 1)
    for coefficient, summand in call.loss.terms:
        kind = "topk_alone" if summand.options.get("normalize") == "topk" else summand.kind
        total = total + coefficient * formulas.values(kind, x / temperature, operands.target, fields).mean()
    (dlogits,) = torch.autograd.grad(total, logits)
    return total.item(), dlogits @ weight, dlogits.T @ hidden


def check(name: str, shape: Shape, dtype: torch.dtype, device: torch.device, options: dict[str, Any]) -> dict[str, Any]:
    """Compare a workload with the reference at few tokens and the shape's hidden size and vocabulary, in chunks."""
    operands = shapes.make_operands(Shape(CHECK_TOKENS, shape.hidden, shape.vocab), dtype, device, seed=2)
    step = make_step(name, operands, {**options, "chunk_tokens": CHECK_CHUNK})
    loss = float(step())
    assert isinstance(step.loss, Call)
    expected, d_hidden, d_weight = reference(step.loss, operands)
    limits = (2e-3, 0.02) if dtype.itemsize < 4 else (1e-5, 1e-4)
    errors = {"loss_error": abs(loss - expected) / max(1.0, abs(expected))}
    if step.backward:
        errors["d_hidden_error"] = relative_error(operands.hidden.grad, d_hidden, 1.0)
        errors["d_weight_error"] = relative_error(operands.weight.grad, d_weight, 1.0)
    within = [error <= limits[key != "loss_error"] for key, error in errors.items()]  # nan is within nothing
    return {**errors, "ok": all(within)}


def run_shape(shape: Shape, args: argparse.Namespace, watch: Watch) -> list[dict[str, Any]]:
    """Measure every workload at one shape; one row for each workload and upstream."""
    operands = shapes.make_operands(shape, args.dtype, args.device)
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, measure.Step] = {}
    for name in args.workload:
        watch.stage(f"{shape}: warm-up of {name}")
        workload, ready = WORKLOADS[name], functools.partial(_ready, name, operands, args.options)
        made, failure = measure.attempt(ready, operands)
        for upstream in args.upstream if workload.products > 1 else args.upstream[:1]:
            key = f"{name} upstream {upstream:g}"
            rows[key] = row = {"shape": str(shape), "dtype": shapes.dtype_name(args.dtype), "workload": name}
            row |= {"provider": f"ours, {name}", "upstream": upstream, "status": "ok", "products": workload.products}
            row |= {"must": dict(zip(SHAPES, workload.must, strict=False)).get(shape)}
            row |= failure.record() if failure else made[1]
            if failure is None:
                steps[key] = replace(made[0], upstream=upstream)
    watch.stage(f"{shape}: {args.rounds} rounds")
    products = {key: rows[key]["products"] for key in steps}
    for key, timed in measure.time_beside(products, steps, operands, args.device, args.rounds, watch.tick).items():
        rows[key] |= timed
        if rows[key]["status"] == "ok":
            watch.stage(f"{shape}: what else is asked of {key}")
            rows[key] |= _examine(rows[key], shape, steps[key], args)
    return list(rows.values())


def _ready(name: str, operands: Operands, options: dict[str, Any]) -> tuple[measure.Step, dict[str, Any]]:
    step = make_step(name, operands, options)
    for _ in range(2):
        operands.clear()
        loss = float(step())
    operands.clear()
    return step, {"loss": loss, "plan": providers.describe_plan(plan_of(step))}


def _examine(row: dict[str, Any], shape: Shape, step: measure.Step, args: argparse.Namespace) -> dict[str, Any]:
    """Peak memory and, where they are asked for, launches and the check."""
    found, name, options, device = dict[str, Any](), row["workload"], args.options, args.device
    if not args.no_memory:
        peak, failure = measure.peak(step, Request(name, shape, row["dtype"], row["upstream"], options=options))
        found |= {"memory_error": failure.record()} if failure else peak or {}
    once = row["upstream"] == args.upstream[0]
    if args.profile and once and not WORKLOADS[name].unlisted:
        launched, failure = measure.attempt(lambda: measure.launched_between(step, plan_of(step), device))
        found |= {"launches_error": failure.record()} if failure else {"launches": launched}
    if args.check and once:
        checked, failure = measure.attempt(lambda: check(name, shape, args.dtype, device, options))
        found["check"] = {**failure.record(), "ok": False} if failure else checked
    return found


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=f"{rows[0]['shape']}, ratios to bare products (* over what it must be)")
    columns = "upstream,ms,ratio,of products,must,p20-p80,peak MiB,plan's,chunks,loss,check"
    for column in ("workload", *columns.split(",")):
        table.add_column(column, no_wrap=True, justify="left" if column == "workload" else "right")
    for row in rows:
        if row["status"] != "ok":
            table.add_row(row["workload"], number(row.get("upstream"), "g"), row["status"])
            continue
        over = row["must"] is not None and row.get("ratio", 0.0) > row["must"]
        table.add_row(
            row["workload"], number(row["upstream"], "g"), number(row["ms"]),
            number(row.get("ratio")) + " *" * over, str(row["products"]), number(row["must"], ".2f"),
            f"{number(row['ms_p20'])}-{number(row['ms_p80'])}",
            row.get("memory_error", {}).get("status") or mebibytes(row.get("peak_bytes")),
            mebibytes(row["plan"]["peak_bytes"]), f"{row['plan']['chunks']} {row['plan']['schedule']}",
            number(row["loss"], ".5f"), {True: "ok", False: "WRONG"}.get(row.get("check", {}).get("ok"), "-"),
        )  # fmt: skip
    return table


def _details(row: dict[str, Any]) -> list[str]:
    """Lines of what does not fit a table: launches by name, and what is wrong."""
    lines = list[str]()
    for place, names in row.get("launches", {}).items():
        listed = ", ".join(name[:60] for name in names) if len(names) <= 40 else "listed in the results"
        lines.append(f"{len(names)} launches {place}: {listed}")
    if "launches_error" in row:
        lines.append(f"launches were not counted: {row['launches_error']['error']}")
    if row.get("check", {}).get("ok") is False:
        lines.append(f"WRONG: {json.dumps(brief(row['check']))}")
    return [f"{row['workload']}: {line}" for line in lines]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.losses", description=__doc__.splitlines()[0])
    known, add = providers.argument, parser.add_argument
    add("--shape", action="append", type=known(shapes.parse_shape), help="repeatable: 8192x4096x128256, llama3-8b, cpu")
    add("--workload", action="append", choices=WORKLOADS, help="repeatable (all)")
    add("--rounds", type=known(shapes.parse_count), default=20, help="timed rounds (20)")
    add("--upstream", nargs="+", type=known(shapes.parse_upstream), default=[1.0], help="gradients from above")
    add("--memory-budget", type=known(shapes.parse_bytes), help="such as 1GiB")
    add("--chunk-tokens", type=known(shapes.parse_count))
    add("--accumulate-dtype", type=known(shapes.parse_dtype))
    add("--profile", action="store_true", help="list the launches between a chunk's matrix products")
    add("--check", action="store_true", help="compare loss and gradients with whole logits at a few tokens")
    add("--no-memory", action="store_true", help="measure the time alone")
    providers.common_arguments(parser, peers=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status: 1 where a workload failed or is wrong."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    args = parser.parse_args(argv)
    args.device = providers.read_device(parser, args.device)
    gpu = args.device.type == "cuda"
    args.dtype = args.dtype or (torch.bfloat16 if gpu else torch.float32)
    args.workload, args.upstream = list(dict.fromkeys(args.workload or WORKLOADS)), list(dict.fromkeys(args.upstream))
    named = ("memory_budget", "chunk_tokens", "accumulate_dtype")
    args.options = {name: getattr(args, name) for name in named if getattr(args, name) is not None}
    sizes = list(dict.fromkeys(args.shape or (SHAPES if gpu else (Shape(*shapes.CPU_SHAPE),))))
    path = providers.results_path(args.output, "losses", args.device)
    console, rows = make_console(), list[dict[str, Any]]()
    with Watch(len(sizes) * args.rounds) as watch:
        for shape in sizes:
            found, failure = measure.attempt(functools.partial(run_shape, shape, args, watch))
            measure.release()
            if failure:
                found = [{"shape": str(shape), "workload": "all", "provider": "ours", **failure.record()}]
            rows += found
            console.print(_table(found))
            lines = "\n".join(line for row in found for line in _details(row))
            console.print(lines, markup=False, highlight=False, soft_wrap=True)
            # After each shape, so that a run that is cut short leaves what it has.
            providers.write_results(path, "losses", argv, args.device, rows=rows)
    status = report_failures(console, rows)
    keys = ("shape", "workload", "upstream", "status", "ms", "ratio", "products", "must", "peak_bytes")
    short = [brief({key: row[key] for key in keys if key in row}) for row in rows]
    print(json.dumps({"benchmark": "losses", "device": args.device.type, "rows": short}))
    return status or int(any(row.get("check", {}).get("ok") is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
