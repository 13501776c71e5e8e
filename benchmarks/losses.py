"""Time and memory of losses from one softmax pass, and of bare matrix products on the same operands.

`python -m benchmarks.losses` times each workload through `loss.backward()` as a ratio to the products that it cannot do
without: three; four with a dense teacher's logits, or with logits that are computed again; one without gradients.
"""

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from benchmarks import command, measure, providers, shapes
from benchmarks.command import Row, Watch, number
from benchmarks.shapes import Operands, Shape
from chunked_head import Plan, linear_cross_entropy, linear_logprobs, linear_loss, losses, metrics, plan
from chunked_head.metrics import Metric

SHAPES = (Shape(8192, 4096, 128256), Shape(8192, 2048, 128256), Shape(8192, 1024, 151936))
# Where the matmuls are short, what is beside them counts: workloads by shape, with the largest ratio that is accepted.
SHORT = {
    Shape(8192, 1024, 151936): {
        "logprobs+entropy": 1.05, "logprobs": 1.03, "logprobs+entropy-grad": 1.07, "ce+z+metrics": 1.11,
        "grpo+z-entropy": 1.15, "cross-entropy": 1.06,
    },
    Shape(8192, 2048, 128256): {"cross-entropy": 1.05},
    Shape(8192, 4096, 128256): {
        "logprobs+entropy": 1.03, "ce+z+metrics": 1.03, "grpo+z-entropy": 1.05, "cross-entropy": 1.02,
    },
    Shape(8192, 2880, 201088): {"logprobs": 1.02},
}  # fmt: skip
_KEYS = ("shape", "workload", "upstream", "status", "ms", "ratio", "products", "must", "peak_bytes")


class Workload(NamedTuple):
    """A loss with metrics, the batch fields that it reads, and the number of bare products under its time."""

    loss: losses.base.Losses
    fields: tuple[str, ...] = ()
    metrics: tuple[Metric, ...] = ()
    products: int = 3  # 1: no gradients
    must: tuple[float, ...] = ()  # the largest ratio that is accepted, for the first of SHAPES
    temperature: float | tuple[float, float] = 1.0  # or one per token, drawn between these
    kept: float = 0.0  # the share of tokens that keep a set of ids
    everywhere: bool = False  # the call promises that all do
    lengths: bool = False  # the host knows those of segments
    streams: int = 0  # of which each has its part of the tokens; 0: none


_CE, _POLICY, _DENSE = losses.cross_entropy(), ("old_logprobs", "advantages"), ("teacher_hidden", "teacher_weight")
_CLIPPED = metrics.clip_fraction(side="low"), metrics.clip_fraction(side="high")
_SIX = (metrics.ratio(), metrics.kl_old(), *_CLIPPED, metrics.advantage(), metrics.effective_sample_size())
_GRPO = losses.grpo() + 1e-4 * losses.z_loss()
WORKLOADS: dict[str, Workload] = {
    "cross-entropy": Workload(_CE),
    "streams": Workload(_CE, streams=4),
    "ce+entropy+accuracy": Workload(_CE, (), (metrics.entropy(), metrics.accuracy()), must=(1.09, 1.13, 1.22)),
    "ce+z+metrics": Workload(_CE + 1e-4 * losses.z_loss(), (), (metrics.entropy(), metrics.accuracy())),
    "grpo+z-entropy": Workload(_GRPO - 0.01 * losses.entropy(), _POLICY, _SIX[:4]),
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
    "logprobs+entropy": Workload(_CE, products=1),
    # The backward is a pass of its own and computes the logits again: they are two of the four products.
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
        if WORKLOADS[self.name].lengths:
            self.segment_lengths, self.num_segments = self.batch["segments"].bincount().tolist(), None
            self.batch = {name: value for name, value in self.batch.items() if name != "segments"}
            if "pairs" in self.batch:  # the chosen ones before all that were rejected, and on the host
                self.batch["pairs"] = torch.arange(len(self.segment_lengths)).view(2, -1).t().contiguous()
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
            return linear_logprobs(hidden, weight, target, **self.options)
        if self.name.startswith("logprobs+entropy"):
            logprobs, entropy = linear_logprobs(hidden, weight, target, entropy=True, **self.options)
            if self.name == "logprobs+entropy":
                return logprobs
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
    """Return the plan of the last step, or `chunked_head.plan`'s where the call returns none."""
    call, hidden, weight = step.loss, step.operands.hidden, step.operands.weight
    assert isinstance(call, Call)
    if call.plan is not None:
        return call.plan
    wanted: dict[str, Any] = {"hidden_grad": step.backward, "weight_grad": step.backward, **call.options}
    if call.name.startswith("logprobs"):
        wanted["returns"] = ("logprobs", "entropy") if "entropy" in call.name else ("logprobs",)
    return plan(len(hidden), hidden.shape[1], len(weight), hidden.dtype, device=hidden.device, **wanted)


def make_step(name: str, operands: Operands, options: dict[str, Any], upstream: float = 1.0) -> measure.Step:
    """A workload's step; its fields are drawn here and count as inputs."""
    workload = WORKLOADS[name]
    kept: dict[str, Any] = shapes.draw_kept(operands, workload.kept) if workload.kept else {}
    logprobs = linear_logprobs(operands.hidden.detach(), operands.weight.detach(), operands.target, **kept)
    segments = min(16, len(logprobs) // 4 * 2) if "pairs" in workload.fields else len(logprobs) // 512
    batch = shapes.draw_fields(workload.fields, operands, logprobs, max(2, segments)) | kept
    return measure.Step(Call(name, batch, options), operands, upstream, workload.products > 1)


def run_shape(shape: Shape, args: Any, watch: Watch) -> list[Row]:
    """Measure every workload at one shape; one row for each workload and upstream."""
    operands = shapes.make_operands(shape, args.dtype, args.device)
    asked: dict[str, Any] = {}
    musts = SHORT.get(shape, {}) if args.short else {}
    names = [name for name in args.workload if not args.short or name in musts]
    for name in names:
        workload = WORKLOADS[name]
        for upstream in args.upstream if workload.products > 1 else args.upstream[:1]:
            record = {"workload": name, "provider": f"ours, {name}", "upstream": upstream}
            record |= {"products": workload.products, "below": measure.products_name(workload.products)}
            record |= {"must": musts.get(name, dict(zip(SHAPES, workload.must, strict=False)).get(shape))}
            asked[command.key_of(name, upstream)] = (
                record,
                functools.partial(make_step, name, operands, args.options, upstream),
            )
    products = {WORKLOADS[name].products for name in names}
    floors = {name: {"provider": f"floor, {name}"} for name in map(measure.products_name, sorted(products))}

    make_floors = functools.partial(measure.floor_steps, operands, args.device, products)
    rows = command.measured(
        shape, args, operands, asked, floors, make_floors, watch,
        lambda step: {"plan": providers.describe_plan(plan_of(step))},
    )  # fmt: skip
    return [row for row in rows if "workload" in row]


def _table(rows: Sequence[Row]) -> Table:
    lines = []
    for row in rows:
        cells = [row["status"]]
        if row["status"] == "ok":
            plan = row["plan"]
            cells = [*command.timed_cells(row), str(row["products"]), number(row["must"], ".2f")]
            cells += [f"{plan['chunks']} {plan['schedule']}", number(row["loss"], ".5f")]
        lines.append([row["workload"], number(row.get("upstream"), "g"), *cells])
    columns = ("workload", "upstream", *command.TIMED, "of products", "must", "chunks", "loss")
    return command.table(f"{rows[0]['shape']}, ratios to bare products (* over what it must be)", columns, lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status: 1 where a workload failed."""
    parser = command.arguments("losses", __doc__, shape=True, rounds=10, upstream=[1.0])
    add = parser.add_argument
    add("--workload", action="append", choices=WORKLOADS, help="repeatable (all)")
    add("--memory-budget", type=command.size_in_bytes, help="such as 1GiB")
    add("--chunk-tokens", type=command.count)
    add("--accumulate-dtype", type=command.argument(shapes.parse_dtype))
    add("--short", action="store_true", help=f"those of {', '.join(map(str, SHORT))} that short matmuls make hard")
    add("--no-memory", action="store_true", help="measure no memory")
    args = command.read(parser, sys.argv[1:] if argv is None else argv)
    args.workload = list(dict.fromkeys(args.workload or WORKLOADS))
    named = ("memory_budget", "chunk_tokens", "accumulate_dtype")
    args.options = {name: getattr(args, name) for name in named if getattr(args, name) is not None}
    if args.short and args.shape:
        parser.error("--short has its own shapes; leave out --shape")
    sizes = list(SHORT) if args.short else command.sizes(args, SHAPES)
    jobs = command.over(sizes, args, run_shape, workload="all", provider="ours")
    return command.run("losses", args, jobs, len(sizes) * args.rounds, _table, _KEYS)


if __name__ == "__main__":
    sys.exit(main())
