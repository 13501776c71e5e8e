"""From a call's arguments to what runs: the same way for every public function."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import checks
from .autograd import HeadLoss
from .backends import Backend, Layout, resolve
from .batch import Batch
from .demand import Answer, Question, answer
from .evaluate import Inputs
from .fields import Frame, Prepared, check_fields, prepare_fields, wanted_fields
from .loop import Call
from .losses.base import Field, Losses, Summand
from .losses.base import Teacher as TeacherOptions
from .memory import Sizes
from .metrics import Metric
from .objective import (
    Objective,
    ScalarObjective,
    StatsObjective,
    TokenObjective,
    foreseen_gain,
    metric_counts,
    on_device,
    reduced,
)
from .planner import Request, make_plan
from .prepare import in_backward
from .stats import Demand, RowStats, Teacher


@dataclass(frozen=True, eq=False)
class HeadOptions:
    """What every public function takes of the head and of how to run it."""

    hidden: Tensor
    weight: Tensor
    target: Tensor | None
    bias: Tensor | None
    ignore_index: int
    softcap: float | None
    logit_scale: float
    temperature: float
    shift: int
    memory_budget: int | str | None
    chunk_tokens: int | None
    accumulate_dtype: torch.dtype | None
    backend: str | None

    def check(self) -> torch.dtype:
        """Raises what is wrong with these arguments; the dtype of the matmuls."""
        dtype = checks.check_operands(self.hidden, self.weight, self.target, self.bias)
        checks.check_head(
            self.ignore_index, self.softcap, self.logit_scale, self.temperature, self.shift, self.leading
        )  # fmt: skip
        return dtype

    @property
    def leading(self) -> tuple[int, ...]:
        return tuple(self.hidden.shape[:-1])

    @property
    def vocab(self) -> int:
        return self.weight.shape[0]

    @property
    def device(self) -> torch.device:
        return self.hidden.device


@dataclass(frozen=True, eq=False)
class LogitsOptions:
    """The same for logits that exist already."""

    logits: Tensor
    target: Tensor | None
    ignore_index: int
    softcap: float | None
    logit_scale: float
    temperature: float
    shift: int
    backend: str | None

    def check(self) -> torch.dtype:
        """Raises what is wrong with these arguments; the dtype of the arithmetic."""
        dtype = checks.check_logits(self.logits, self.target)
        checks.check_head(
            self.ignore_index, self.softcap, self.logit_scale, self.temperature, self.shift, self.leading
        )  # fmt: skip
        return torch.promote_types(dtype, torch.float32)

    @property
    def leading(self) -> tuple[int, ...]:
        return tuple(self.logits.shape[:-1])

    @property
    def vocab(self) -> int:
        return self.logits.shape[-1]

    @property
    def device(self) -> torch.device:
        return self.logits.device


@dataclass(frozen=True, eq=False)
class Asked:
    """A call whose arguments have been checked: what it wants and the fields that go with it."""

    head: HeadOptions | LogitsOptions
    dtype: torch.dtype  # of the matmuls
    backend: Backend
    losses: Losses
    metrics: tuple[Metric, ...]
    answer: Answer
    prepared: Prepared
    token_fields: frozenset[str]
    teacher: Teacher | None

    @property
    def statistics_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def one_or_nan(self) -> Tensor:
        one = torch.ones((), dtype=self.statistics_dtype, device=self.head.device)
        return torch.where(self.prepared.bad, torch.nan, one)


def ask(
    head: HeadOptions | LogitsOptions,
    losses: Losses,
    metrics: tuple[Metric, ...] = (),
    batch: Mapping[str, Tensor] | None = None,
    num_segments: int | None = None,
) -> Asked:
    """Checks everything, then lays fields beside rows; the first work on tensors."""
    dtype = head.check()
    backend = resolve(head.backend, head.device)
    for _, summand in losses.terms:
        for name, tensor in summand.tensors.items():
            checks.check_class_weights(tensor, head.vocab, head.device, f"{name} of {summand.label}")
    losses, batch, own = named_weights(losses, dict(batch or {}))
    wanted, known = wanted_fields(losses, metrics, batch, own)
    parts: list[Summand | Metric] = [*(summand for _, summand in losses.terms), *metrics]
    reads = [part for part in parts if part.reads_target]
    if head.target is None and reads:
        raise ValueError(f"target is None, and {reads[0].label} reads it; pass token ids")
    if num_segments is not None:
        checks.check_int("num_segments", num_segments)
        if num_segments < 1:
            raise ValueError(f"num_segments must be at least 1, got {num_segments}")
    device, statistics = head.device, torch.promote_types(dtype, torch.float32)
    frame = Frame(head.leading, device, statistics, head.shift, num_segments)
    for name in {s.token_weights for _, s in losses.terms if isinstance(s.token_weights, str)}:
        if known[name].kind != "token" or known[name].trailing or name == "mask":
            remedy = "the mask applies by itself" if name == "mask" else f"not one of kind {known[name].kind!r}"
            raise ValueError(f"token_weights={name!r} must name a token field; {remedy}")
    check_fields(batch, wanted, known, frame)
    teacher_vocab = check_dense_teacher(batch, wanted, dtype)
    columns = batch["teacher_ids"].shape[-1] if "teacher_ids" in wanted else 0
    answered = answer(Question(losses, metrics, head.temperature, head.vocab, columns, teacher_vocab))
    prepared = prepare_fields(head.target, batch, wanted, known, frame, head.ignore_index, head.vocab)
    own_rows = Field("row")  # of what the preparation has made
    token_fields = frozenset(name for name in prepared.fields if known.get(name, own_rows).kind in ("token", "row"))
    teacher = None
    if answered.teacher is not None and answered.demand.pairing is not None:
        teacher = make_teacher(prepared.fields, answered.teacher, answered.demand.pairing.columns)
    fields = {
        k: v for k, v in prepared.fields.items() if k not in ("teacher_logits", "teacher_hidden", "teacher_weight")
    }
    prepared = prepared._replace(fields=fields)
    return Asked(
        head, dtype, backend, losses, metrics, answered, prepared, token_fields & frozenset(fields), teacher
    )  # fmt: skip


def named_weights(losses: Losses, batch: dict[str, Any]) -> tuple[Losses, dict[str, Any], dict[str, Field]]:
    """Token weights that a loss holds itself, as fields of a name of their own."""
    own: dict[str, Field] = {}
    terms = []
    for coefficient, summand in losses.terms:
        if isinstance(summand.token_weights, Tensor):
            key = f"token_weights of {summand.label}"
            batch[key], own[key] = summand.token_weights, Field("token")
            summand = replace(summand, token_weights=key)
        terms.append((coefficient, summand))
    return Losses(tuple(terms)), batch, own


def check_dense_teacher(batch: Mapping[str, Tensor], wanted: list[str], dtype: torch.dtype) -> int | None:
    """Rows of the teacher's vocabulary, None without one; its two matmul operands must fit each other."""
    if "teacher_logits" in wanted:
        return batch["teacher_logits"].shape[-1]
    if "teacher_hidden" not in wanted:
        return None
    hidden, weight, bias = batch["teacher_hidden"], batch["teacher_weight"], batch.get("teacher_bias")
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"batch['teacher_weight'] must be [vocabulary, {hidden.shape[-1]}], the width of teacher_hidden, got "
            f"{tuple(weight.shape)}"
        )
    for name, tensor in (("teacher_weight", weight), ("teacher_bias", bias)):
        if tensor is not None and tensor.dtype != hidden.dtype:
            raise TypeError(
                f"batch[{name!r}] must have the dtype of teacher_hidden, {hidden.dtype}, got {tensor.dtype}"
            )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"batch['teacher_bias'] must have shape ({weight.shape[0]},), got {tuple(bias.shape)}")
    if (hidden.dtype == torch.float64) != (dtype == torch.float64):
        raise TypeError(f"batch['teacher_hidden'] is {hidden.dtype}, the student's matmuls are in {dtype}")
    return weight.shape[0]


def make_teacher(fields: Mapping[str, Tensor], options: TeacherOptions, columns: int) -> Teacher:
    """The teacher over the vocabulary that it shares with the student, its temperature in scale and cap."""
    assert options.temperature is not None
    weight, bias = fields.get("teacher_weight"), fields.get("teacher_bias")
    return Teacher(
        fields.get("teacher_logits"),
        fields.get("teacher_hidden"),
        None if weight is None else weight[:columns].detach(),
        None if bias is None else bias[:columns].detach(),
        options.logit_scale / options.temperature,
        None if options.softcap is None else options.softcap / options.temperature,
    )


def scalar_objective(
    asked: Asked,
    reduction: str,
    normalizer: float | Tensor | None,
    upstream: float | Tensor | None,
    share_denominator: bool = False,
) -> ScalarObjective:
    losses, prepared, dtype, vocab = asked.losses, asked.prepared, asked.statistics_dtype, asked.head.vocab
    coefficients, inverse = reduced(losses, prepared, vocab, reduction, normalizer, asked.one_or_nan, dtype)
    if share_denominator:
        inverse = [inverse[0] for _ in inverse]
    declared: Tensor | float = 1.0 if upstream is None else upstream
    if isinstance(declared, Tensor):
        # a copy: the caller may change his loss scale before backward comes
        declared = declared.detach().to(dtype, copy=True)
    factors = [c * i * declared for c, i in zip(coefficients, inverse, strict=True)]
    inputs = make_inputs(asked, factors)
    segmented, coupled = coupling(losses, asked.dtype)
    gain = None
    if asked.dtype == torch.float16 and not coupled:
        batch = Batch(prepared.fields, prepared.target, prepared.num_segments, vocab)
        gain = foreseen_gain(losses, factors, inputs.weights, batch, asked.head.logit_scale / asked.answer.temperature)
        inputs = inputs._replace(factors=[factor / gain for factor in factors])
    weights, counts = metric_counts(ordered_metrics(asked), prepared, vocab, dtype)
    return ScalarObjective(
        **common(asked), inputs=inputs._replace(metric_weights=weights), coefficients=coefficients, inverse=inverse,
        declared=declared, gain=gain, coupled=coupled, counts=counts, segment_metrics=asked.answer.segment_metrics,
        fused=asked.head.device.type == "cuda" and not segmented,
    )  # fmt: skip


def coupling(losses: Losses, dtype: torch.dtype) -> tuple[bool, bool]:
    """Whether a loss needs all tokens' statistics for its values; and whether gradients wait for them, which those of
    fp16 do as well where only the statistics tell how large they are."""
    segmented = any(summand.scope == "segment" for _, summand in losses.terms)
    unforeseen = dtype == torch.float16 and not all(summand.bounded for _, summand in losses.terms)
    return segmented, segmented or unforeseen


def token_objective(asked: Asked) -> TokenObjective:
    coefficients = [on_device(c, asked.statistics_dtype, asked.head.device) for c, _ in asked.losses.terms]
    return TokenObjective(
        **common(asked), inputs=make_inputs(asked, coefficients), coefficients=coefficients,
        fused=asked.head.device.type == "cuda",
    )  # fmt: skip


def stats_objective(asked: Asked, demand: Demand, names: tuple[str, ...], differentiable: int) -> StatsObjective:
    shared = common(asked)
    shared["demand"] = demand
    return StatsObjective(**shared, names=names, differentiable=differentiable)


def common(asked: Asked) -> dict[str, Any]:
    columns = asked.prepared.fields.get("teacher_ids") if asked.answer.demand.columns else None
    class_weights = asked.answer.class_weights
    if class_weights is not None:
        # a copy: backward may read it, and would not notice that the caller had changed it
        class_weights = class_weights.detach().to(asked.statistics_dtype, copy=True).contiguous()
    return {
        "demand": asked.answer.demand, "structure": asked.answer.structure, "target": asked.prepared.target,
        "columns": columns, "teacher": asked.teacher, "class_weights": class_weights,
        "one_or_nan": asked.one_or_nan, "dtype": asked.statistics_dtype, "fp16": asked.dtype == torch.float16,
    }  # fmt: skip


def ordered_metrics(asked: Asked) -> tuple[Metric, ...]:
    """Metrics in the order in which an objective holds their sums."""
    local = tuple(metric for metric, _ in asked.answer.structure.metrics)
    return local + tuple(metric for metric, _ in asked.answer.segment_metrics)


def make_inputs(asked: Asked, factors: list[Tensor]) -> Inputs:
    fields, dtype = asked.prepared.fields, asked.statistics_dtype
    weights: list[Tensor | None] = []
    for _, summand in asked.losses.terms:
        name = summand.token_weights
        assert name is None or isinstance(name, str)
        weight = fields.get("token_weights") if name is None else fields[name]
        weights.append(None if weight is None or summand.unit != "token" else weight.to(dtype))
    # copies: backward may read them, and would not notice that the caller had changed his
    tensors = [{k: v.to(dtype, copy=True) for k, v in summand.tensors.items()} for _, summand in asked.losses.terms]
    return Inputs(
        asked.prepared.target, fields, asked.prepared.num_segments, factors, weights, tensors, {}, asked.token_fields
    )  # fmt: skip


def execute(
    asked: Asked, objective: Objective, request: Request, late: bool
) -> tuple[tuple[Tensor, ...], RowStats, Call]:
    """Plans and runs."""
    head = asked.head
    assert isinstance(head, HeadOptions)
    rows = head.hidden.reshape(-1, head.hidden.shape[-1])
    scale = float(head.logit_scale) / asked.answer.temperature
    softcap = None if head.softcap is None else head.softcap / asked.answer.temperature
    again = in_backward()
    coupled = isinstance(objective, ScalarObjective) and objective.coupled
    sizes = sizes_of(asked, objective, rows, softcap, late or again, coupled)
    # computed again in backward, a call recomputes whatever its request was made for
    plan = make_plan(sizes, Request(memory_budget=request.memory_budget) if again else request)
    call = Call(plan, asked.backend, objective, scale, softcap, request)
    found: list[RowStats] = []
    outputs = HeadLoss.apply(rows, head.weight, head.bias, call, found)
    return outputs, found[0], call


def sizes_of(
    asked: Asked, objective: Objective, rows: Tensor, softcap: float | None, late: bool, coupled: bool
) -> Sizes:
    """What the plan is made from."""
    assert isinstance(asked.head, HeadOptions)
    hidden, weight, bias = asked.head.hidden, asked.head.weight, asked.head.bias
    grad = torch.is_grad_enabled()
    # a view shares memory with what it views, a copy does not
    copied = rows.numel() > 0 and rows.data_ptr() != hidden.data_ptr()
    bias_grad = grad and bias is not None and bias.requires_grad
    layout = Layout(
        hidden.device, asked.dtype, weight.shape[1],
        plain_weight=weight.is_contiguous() and weight.data_ptr() % 16 == 0,
        plain_rows=rows.stride(1) == 1 or rows.shape[1] == 1,
        capped=softcap is not None, bias_grad=bias_grad, demand=objective.demand,
    )  # fmt: skip
    store = asked.backend.store(layout)
    teacher, pairing = asked.teacher, objective.demand.pairing
    return Sizes(
        rows.shape[0], rows.shape[1], weight.shape[0], asked.dtype,
        hidden_dtype=hidden.dtype, weight_dtype=weight.dtype,
        hidden_grad=grad and hidden.requires_grad,
        weight_grad=grad and weight.requires_grad,
        bias_grad=bias_grad, bias_dtype=None if bias is None else bias.dtype,
        late_upstream=late, coupled=coupled, demand=objective.demand,
        teacher_columns=0 if pairing is None else pairing.columns,
        teacher_width=0 if teacher is None or teacher.hidden is None else teacher.hidden.shape[1],
        teacher_store=None if teacher is None else asked.backend.teacher_store(teacher, store),
        store=store, copied=copied, **asked.backend.traits(hidden.device),
    )  # fmt: skip
