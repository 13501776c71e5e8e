"""Everything about a call that no tensor's content decides, found out and checked once for all calls of a signature."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..arithmetic.demand import Needs, check_kept, needs_of
from ..core import checks
from ..core.stats import Demand
from ..kernels.common.cache import Cache
from ..losses.base import Field, Losses, Summand
from ..losses.user.checks import check_over_ranks
from ..metrics import Metric
from ..plan.planner import Request
from ..plan.plans import Plan
from ..stores import Backend, resolve
from .fields import TEMPERATURE, Frame, check_fields, wanted_fields
from .gather import whole_teacher
from .head_options import HeadOptions, LogitsOptions
from .task import Signature, Task
from .teachers import check_dense_teacher

MOST_PROGRAMS, MOST_PLANS = 512, 256


@dataclass(frozen=True, eq=False)
class Program:
    """How calls of one signature run."""

    dtype: torch.dtype  # of the matmuls
    backend: Backend
    needs: Needs
    demand: Demand  # the statistics: what losses and metrics need, and what the function returns
    wanted: tuple[str, ...]  # fields that are read
    withheld: frozenset[str]  # those of the batch that are not
    known: Mapping[str, Field]
    autocast: bool  # whether it gives the dtype of the matmuls
    request: Request
    late: bool  # upstream gradients are of each token, and come late
    coupled: bool  # a loss needs all tokens' statistics for its values, and gradients wait for them
    by_segments: bool  # those of a segment's, or a pair's, are all that is waited for
    kept_everywhere: bool  # whether every token that counts has columns of its own, and no token the vocabulary
    columns: int  # K of teacher_ids, 0 without
    teacher_vocab: int | None  # of a dense teacher
    numbers: str  # ``Task.numbers`` of the calls that it is for
    pads: bool  # whether rows that do not count may follow the tokens' own: ``may_pad``
    plans: Cache[Hashable, Plan] = field(default_factory=lambda: Cache(MOST_PLANS))  # whatever the numbers of calls

    @property
    def statistics_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)


PROGRAMS: Cache[Signature, Program] = Cache(MOST_PROGRAMS)


def program_of(task: Task) -> Program:
    """The program of a call; raises what is wrong with the call before any work."""
    checks.refuse_transforms()
    signature = task.signature()
    program = build(task) if signature is None else PROGRAMS.made(signature, lambda: build(task))
    if signature is not None and program.numbers != (numbers := task.numbers):
        program = PROGRAMS[signature] = renumbered(program, task, numbers)
    if task.head.tokens is not None:
        for part in (*(summand for _, summand in task.losses.terms), *task.metrics):
            what = "loss" if isinstance(part, Summand) else "metric"
            check_over_ranks(part, what, frozenset(program.wanted), program.known)
    return program


def renumbered(program: Program, task: Task, numbers: str) -> Program:
    """The program of a call of the same signature with other numbers; nothing else is checked or made anew."""
    task.head.check_numbers()
    losses, _, _ = named_weights(task)
    needs, demand = needs_for(task, losses, program.wanted, program.columns, program.teacher_vocab)
    return replace(program, needs=needs, demand=demand, numbers=numbers)


def build(task: Task) -> Program:
    """Checks everything that can be known before a tensor is looked into."""
    head, metrics = task.head, task.metrics
    dtype = head.check()
    task.check()
    if task.per_token:
        head.refuse_average()
    backend = resolve(head.backend, head.device)
    backend.check(head.device, dtype, "logits" if isinstance(head, LogitsOptions) else "hidden")
    for _, summand in task.losses.terms:
        for name, tensor in summand.tensors.items():
            checks.check_class_weights(tensor, head.vocab, head.device, f"{name} of {summand.label}")
    losses, batch, own = named_weights(task)
    wanted, known = wanted_fields(losses, metrics, batch, own, task.num_segments)
    parts: list[Summand | Metric] = [*(summand for _, summand in losses.terms), *metrics]
    reads = [part for part in parts if part.reads_target]
    if head.target is None and reads:
        raise ValueError(f"target is None, and {reads[0].label} reads it; pass token ids")
    if task.num_segments is not None:
        checks.check_int("num_segments", task.num_segments)
        if task.num_segments < 1:
            raise ValueError(f"num_segments must be at least 1, got {task.num_segments}")
    for name in {s.token_weights for _, s in losses.terms if isinstance(s.token_weights, str)}:
        if known[name].kind != "token" or known[name].trailing or name == "mask":
            remedy = "the mask applies by itself" if name == "mask" else f"not one of kind {known[name].kind!r}"
            raise ValueError(f"token_weights={name!r} must name a token field; {remedy}")
    check_fields(batch, wanted, known, frame_of(task, dtype))
    # as the student's operands
    autocast = torch.is_autocast_enabled(head.device.type) and dtype != torch.float64
    teacher_vocab = check_dense_teacher(batch, wanted, dtype, autocast)
    if teacher_vocab is not None:
        teacher_vocab = whole_teacher(head, batch, teacher_vocab)
    columns = batch["teacher_ids"].shape[-1] if "teacher_ids" in wanted else 0
    needs, demand = needs_for(task, losses, wanted, columns, teacher_vocab)
    if task.kept_everywhere and "kept_ids" not in wanted:
        raise ValueError("kept_everywhere=True goes with the sets that tokens keep, kept_ids, which are missing")
    if "kept_ids" in wanted:
        check_sets(head, demand, "candidate_bias" in wanted)
    return Program(
        dtype, backend, needs, demand, tuple(wanted), frozenset(batch) - set(wanted), known, autocast,
        head.request, bool(task.per_token), coupled(losses) and not task.per_token,
        isinstance(head, HeadOptions) and not head.skip_ignored and not task.per_token and alone(losses),
        task.kept_everywhere or demand.columns_alone, columns, teacher_vocab, task.numbers,
        isinstance(head, HeadOptions) and not head.skip_ignored and head.shard is None and head.tokens is None
        and head.target is not None and may_pad(parts, wanted, known, head.request),
    )  # fmt: skip


def needs_for(
    task: Task, losses: Losses, wanted: Sequence[str], columns: int, teacher_vocab: int | None
) -> tuple[Needs, Demand]:
    """What losses and metrics need at the call's numbers, as ``bare`` leaves it; and the statistics of the call."""
    head = task.head
    needs = needs_of(losses, task.metrics, head.plain_temperature, head.vocab, columns, teacher_vocab)
    demand = task.wants(needs.demand)
    if isinstance(head, LogitsOptions) or (head.shard is not None and head.shard.parallel.sequence_sharded):
        demand = demand._replace(columns_alone=False)
    if "kept_ids" in wanted:
        # exponentials would be relative to a target's logit, which is not there for rows that keep columns
        demand = demand._replace(rank_one=False)
    return bare(needs), demand


def may_pad(
    parts: Sequence[Summand | Metric], wanted: Iterable[str], known: Mapping[str, Field], request: Request
) -> bool:
    """Whether rows that do not count may follow the tokens' own without anyone's notice: kernels alone read what goes
    with tokens, functions of users see none of it, and no limit of the caller's is on sizes."""
    token = Field("token")
    numbers = all(field == "mask" or (known[field] == token and field != TEMPERATURE) for field in wanted)
    alone = all(part.unit == "token" and part.scope == "token" and part.own for part in parts)
    return numbers and alone and request.memory_budget is None and request.chunk_tokens is None


def check_sets(head: HeadOptions | LogitsOptions, demand: Demand, biased: bool) -> None:
    """Raises for calls whose tokens cannot keep sets of columns."""
    check_kept(demand)
    if biased and head.softcap is not None:
        raise ValueError("candidate_bias does not go with softcap, whose slope is that of logits without it")
    if head.target is None:
        raise ValueError("target is None, and kept_ids or candidates are sets that targets belong to; pass token ids")
    if head.shard is not None and isinstance(head, HeadOptions) and head.deterministic:
        raise ValueError(
            "batch['kept_ids'] and candidates do not go with deterministic=True over ranks that share the vocabulary: "
            "a set's sum would depend on which rank has which of its ids; use deterministic=False, or the whole head"
        )
    if head.shard is not None and head.shard.parallel.sequence_sharded:
        raise ValueError(
            "batch['kept_ids'] does not go with sequence_sharded=True, whose ranks hold hidden states of their own "
            "tokens alone; gather hidden states and sets beforehand"
        )


def frame_of(task: Task, dtype: torch.dtype) -> Frame:
    """What fields are held against."""
    statistics = torch.promote_types(dtype, torch.float32)
    return Frame(task.head.leading, task.head.device, statistics, task.head.shift, task.num_segments)


def named_weights(task: Task) -> tuple[Losses, dict[str, Any], dict[str, Field]]:
    """The losses, the batch and its fields: token weights that a loss holds itself, and a temperature per token, are
    fields of names of their own."""
    losses, batch = task.losses, task.batch
    if batch is not None and not isinstance(batch, Mapping):
        raise TypeError(
            "batch must be a mapping of names to tensors, such as {'advantages': advantages}, or None, got "
            f"{type(batch).__name__}"
        )
    fields = dict(batch or {})
    own: dict[str, Field] = {}
    terms = []
    for coefficient, summand in losses.terms:
        if isinstance(summand.token_weights, Tensor):
            key = f"token_weights of {summand.label}"
            fields[key], own[key] = summand.token_weights, Field("token")
            summand = replace(summand, token_weights=key)
        terms.append((coefficient, summand))
    losses = Losses(tuple(terms)) if own else losses
    if TEMPERATURE in fields or (task.head.temperatures is not None and "temperature" in fields):
        raise ValueError("temperature is an argument of the call and no field of batch; pass temperature=")
    if task.head.temperatures is not None:
        fields[TEMPERATURE], own[TEMPERATURE] = task.head.temperatures, Field("token")
    return losses, fields, own


def bare(needs: Needs) -> Needs:
    """What may outlive the call: neither its tensors nor functions of users."""
    nothing = torch.empty(0, dtype=torch.float32)
    summands = []
    for summand, view in needs.structure.summands:
        weights = summand.token_weights if isinstance(summand.token_weights, str) else None
        tensors = dict.fromkeys(summand.tensors, nothing)
        summands.append((replace(summand, tensors=tensors, normalizer=None, token_weights=weights), view))
    structure = replace(
        needs.structure, summands=without_functions(summands), metrics=without_functions(needs.structure.metrics)
    )
    return needs._replace(structure=structure, segment_metrics=without_functions(needs.segment_metrics))


def without_functions(parts: Sequence[tuple[Any, int]]) -> tuple[tuple[Any, int], ...]:
    return tuple([(one if one.own else replace(one, function=None, options={}), view) for one, view in parts])


def completed(needs: Needs, losses: Losses, metrics: Sequence[Metric], targets: bool) -> Needs:
    """What ``bare`` has left, with the functions of users that these losses and metrics have; all of them may read the
    target where the call has ``targets``."""
    structure, apart = needs.structure, needs.segment_metrics
    if structure.own and all(metric.own for metric, _ in apart):
        return needs

    def each(parts: Sequence[tuple[Any, int]], given: Sequence[Summand | Metric]) -> tuple[tuple[Any, int], ...]:
        found = []
        for (one, view), of in zip(parts, given, strict=True):
            if not one.own:
                reads = targets or one.reads_target
                one = replace(one, function=of.function, options=of.options, reads_target=reads)
            found.append((one, view))
        return tuple(found)

    summands = each(structure.summands, [summand for _, summand in losses.terms])
    local = each(structure.metrics, [metric for metric in metrics if metric.scope == "token"])
    apart = each(apart, [metric for metric in metrics if metric.scope != "token"])
    return needs._replace(structure=replace(structure, summands=summands, metrics=local), segment_metrics=apart)


def alone(losses: Losses) -> bool:
    """Whether gradients wait for the statistics of their own segments (pairs) alone."""
    return coupled(losses) and all(summand.alone for _, summand in losses.terms)


def coupled(losses: Losses) -> bool:
    """Whether a loss needs all tokens' statistics for its values, and so for its gradients."""
    return any(summand.scope == "segment" for _, summand in losses.terms)
