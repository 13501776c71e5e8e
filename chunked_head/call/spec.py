"""The Spec of a call: all of it that no tensor's content decides, checked and made once for calls of an equal key."""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from ..arithmetic.demand import Needs, check_kept, needs_of
from ..core import checks
from ..core.checks import flag
from ..core.private import refuse_transforms
from ..core.stats import Demand
from ..kernels.common.cache import Cache
from ..losses.base import FIELDS, KEPT_FIELDS, Field, Losses, Summand
from ..losses.user.checks import check_over_ranks
from ..metrics import Metric
from ..parallel.groups import TokenParallel, VocabParallel, block_of
from ..plan.plans import Plan
from ..plan.segments import Segments
from ..plan.sizes import Request, Sizes
from ..stores import Backend, Layout, resolve
from ..stores.operands import Teacher
from .fields import TEMPERATURE, check_dense_teacher, check_fields, wanted_fields
from .options import HeadOptions, LogitsOptions

Result = TypeVar("Result")
Key = tuple[Hashable, ...]
TENSORS = frozenset((Tensor, nn.Parameter))  # whose metadata say all there is to check; a subclass's may not
# types of options that are equal where they mean the same
OPTIONS = frozenset((type(None), bool, int, float, str, torch.dtype, VocabParallel, TokenParallel))
MOST_SPECS, MOST_PLANS = 512, 256


@dataclass(frozen=True, eq=False)
class Task(Generic[Result]):
    """A call as it was made: nothing checked, nothing computed. It runs at once, or as an operator of a graph.

    ``check`` raises what is wrong with options that this function alone has; ``options`` are those, as far as they are
    plain values. ``wants``: the statistics, from those that losses and metrics need. ``result``: from what ran to what
    the function returns, of outputs at their targets' places; for values per token it holds no tensor. ``per_token``:
    names of what the objective returns for each token, whose upstream gradients come late; none for a scalar loss.
    """

    function: str
    head: HeadOptions | LogitsOptions
    losses: Losses
    objective: Callable[[Any], Any]
    result: Callable[[Any], Result]
    metrics: tuple[Metric, ...] = ()
    batch: Mapping[str, Tensor] | None = None
    num_segments: int | None = None
    check: Callable[[], None] = lambda: None
    options: tuple[Hashable, ...] = ()
    wants: Callable[[Demand], Demand] = lambda needed: needed
    per_token: tuple[str, ...] = ()
    inplace: bool = False
    asked: Mapping[str, Any] = field(default_factory=dict)  # the objective's options, by name
    kept_everywhere: bool = False  # whether every token that counts keeps a set of columns
    segments: Segments | None = None  # where the host knows them

    def key(self) -> tuple[Key, str] | None:
        """Equal for calls of one Spec but for their numbers, and those numbers as text; None where it cannot be told.

        The numbers are those of the head, of losses and of metrics.
        """
        head, batch, count, terms = self.head, self.batch, self.num_segments, self.losses.terms
        batch = {} if batch is None else batch
        if not isinstance(batch, Mapping) or not (count is None or (type(count) is int and count > 0)):
            return None
        static = *head.static(head), self.kept_everywhere, self.inplace, *self.options
        numbers = head.numbers
        kinds = tuple(map(type, (*static, *numbers)))
        operands = [one for one in (*head.per_token_operands, *head.shared_operands) if one is not None]
        device = head.device.type
        if (
            not OPTIONS.issuperset(kinds)
            or type(head.shift) is not int
            or device == "meta"
            or not TENSORS.issuperset(map(type, (*operands, *batch.values())))
        ):
            return None
        leading, call = head.leading, head.plain_temperature
        parts = [*[summand for _, summand in terms], *self.metrics]
        own = {name: kind for _, summand in terms for name, kind in summand.extra_fields.items()}
        tensors = [tensor for _, summand in terms for tensor in summand.tensors.values()]
        weights = [summand.token_weights for _, summand in terms]
        # for each loss and metric the first one at an equal temperature, 0 for the call's: which share a softmax
        found = [call, *[call if part.temperature is None else part.temperature for part in parts]]
        key = (
            self.function, self.per_token, static, kinds, len(leading),
            isinstance(head, HeadOptions) and head.accumulate_into is None,
            tuple([tensor if tensor is None else of_tokens(tensor, leading) for tensor in head.per_token_operands]),
            tuple([tensor if tensor is None else metadata(tensor) for tensor in head.shared_operands]),
            tuple([(name, of_field(name, value, own, leading, count)) for name, value in batch.items()]),
            tuple([(summand.signature, isinstance(factor, Tensor)) for factor, summand in terms]),
            tuple([of_tokens(one, leading) if isinstance(one, Tensor) else None for one in weights]),
            tuple(map(metadata, tensors)),
            tuple([next(i for i, other in enumerate(tensors) if other is tensor) for tensor in tensors]),
            tuple([metric.signature for metric in self.metrics]),
            tuple(map(found.index, found)), count is None,
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
            torch.is_grad_enabled(),
        )  # fmt: skip
        return key, repr((numbers, [part.settings for part in parts]))


def metadata(tensor: Tensor) -> Hashable:
    """All of a tensor that checks look at."""
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad


def of_tokens(tensor: Tensor, leading: tuple[int, ...]) -> Hashable:
    """``metadata`` without the dimensions that a shape begins with, equal for calls of other lengths: ``leading``,
    which it has in common with the target's, or the number of segments."""
    shape = tuple(tensor.shape)
    count = len(leading)
    if shape[:count] != leading:
        return metadata(tensor)
    return count, shape[count:], tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad


def of_field(
    name: str, value: Tensor, own: Mapping[str, Field], leading: tuple[int, ...], segments: int | None
) -> Hashable:
    """``metadata`` of a field without the number of tokens, segments, pairs or kept ids."""
    if name in KEPT_FIELDS:
        ahead = value.shape[0] - math.prod(leading) if name == "kept_offsets" and value.dim() else 0
        beside = tuple(value.shape[:-1]) == leading
        return value.dim(), ahead, beside, value.dtype, value.device, value.layout, value.requires_grad
    field = own.get(name) or FIELDS.get(name)
    if field is None or (field.kind not in ("token", "row", "pair") and segments is None):
        return metadata(value)
    if field.kind in ("token", "row"):
        return of_tokens(value, leading)
    return field.kind, of_tokens(value, tuple(value.shape[:1]) if field.kind == "pair" else (segments or 0,))


@dataclass(frozen=True, eq=False)
class Spec:
    """The decisions for calls of one key and equal numbers."""

    dtype: torch.dtype  # of the matmuls
    statistics_dtype: torch.dtype
    backend: Backend
    needs: Needs
    library: bool  # whether all losses and metrics are the library's: then ``needs`` is complete
    demand: Demand  # the statistics: what losses and metrics need, and what the function returns
    names_fields: bool  # tensors of losses and of the head are fields too, by names of their own: ``named_weights``
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
    numbers: str  # those of the calls that it is for
    pads: bool  # whether rows that do not count may follow the tokens' own: ``may_pad``
    plans: Cache[Hashable, Plan] = field(default_factory=lambda: Cache(MOST_PLANS))  # whatever the numbers of calls


SPECS: Cache[Key, Spec] = Cache(MOST_SPECS)


def spec_of(task: Task) -> Spec:
    """The Spec of a call; raises what is wrong with the call before any work."""
    refuse_transforms()
    found = task.key()
    if found is None:
        spec = build(task, "")
    else:
        key, numbers = found
        known = SPECS.get(key)
        if known is None:
            spec = SPECS[key] = build(task, numbers)
        elif known.numbers != numbers:
            spec = SPECS[key] = renumbered(known, task, numbers)
        else:
            spec = known
    if task.head.tokens is not None:
        for part in (*[summand for _, summand in task.losses.terms], *task.metrics):
            what = "loss" if isinstance(part, Summand) else "metric"
            check_over_ranks(part, what, frozenset(spec.wanted), spec.known)
    return spec


def renumbered(spec: Spec, task: Task, numbers: str) -> Spec:
    """The Spec of a call of the same key with other numbers; nothing else is checked or made anew."""
    task.head.check_numbers()
    losses, _, _ = named_weights(task)
    needs, demand = needs_for(task, losses, spec.wanted, spec.columns, spec.teacher_vocab)
    return replace(spec, needs=needs, demand=demand, numbers=numbers)


def build(task: Task, numbers: str) -> Spec:
    """Checks everything that can be known before a tensor is looked into."""
    head, metrics = task.head, task.metrics
    dtype = head.check()
    flag("kept_everywhere", task.kept_everywhere)
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
    check_fields(batch, wanted, known, head.leading, head.device, task.num_segments)
    # as the student's operands
    autocast = torch.is_autocast_enabled(head.device.type) and dtype != torch.float64
    teacher_vocab = check_dense_teacher(batch, wanted, dtype, autocast)
    if teacher_vocab is not None:
        teacher_vocab = check_shared_teacher(head, batch, teacher_vocab)
    columns = batch["teacher_ids"].shape[-1] if "teacher_ids" in wanted else 0
    needs, demand = needs_for(task, losses, wanted, columns, teacher_vocab)
    if task.kept_everywhere and "kept_ids" not in wanted:
        raise ValueError("kept_everywhere=True goes with the sets that tokens keep, kept_ids, which are missing")
    if "kept_ids" in wanted:
        check_sets(head, demand, "candidate_bias" in wanted)
    plain = isinstance(head, HeadOptions) and not head.skip_ignored
    return Spec(
        dtype, torch.promote_types(dtype, torch.float32), backend, needs, all(part.builtin for part in parts), demand,
        bool(own), tuple(wanted), frozenset(batch) - set(wanted), known, autocast, head.request, bool(task.per_token),
        coupled(losses) and not task.per_token, plain and not task.per_token and alone(losses),
        task.kept_everywhere or demand.columns_alone, columns, teacher_vocab, numbers,
        plain and head.shard is None and head.tokens is None and head.target is not None
        and may_pad(parts, wanted, known, head.request),
    )  # fmt: skip


def needs_for(
    task: Task, losses: Losses, wanted: Sequence[str], columns: int, teacher_vocab: int | None
) -> tuple[Needs, Demand]:
    """Needs of losses and metrics at the call's numbers, as ``bare`` leaves them, and the statistics of the call."""
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
    """True where rows that do not count may follow the tokens unnoticed: only kernels read what goes with tokens,
    functions of users see none of it, and the caller limits no size."""
    token = Field("token")
    numbers = all(field == "mask" or (known[field] == token and field != TEMPERATURE) for field in wanted)
    alone = all(part.unit == "token" and part.scope == "token" and part.builtin for part in parts)
    return numbers and alone and request.memory_budget is None and request.chunk_tokens is None


def check_shared_teacher(head: HeadOptions | LogitsOptions, batch: Mapping[str, Tensor], rows: int) -> int:
    """Ids of the teacher's vocabulary, of which ``rows`` are on this rank; ValueError where it is split otherwise."""
    if head.shard is None:
        return rows
    if head.shard.parallel.sequence_sharded and "teacher_logits" in batch:
        raise ValueError(
            "batch['teacher_logits'] of this rank's tokens and ids lack those of other ranks' tokens, which "
            "sequence_sharded=True needs; give teacher_hidden and teacher_weight"
        )
    if rows != head.local_vocab:
        raise ValueError(
            f"the teacher has {rows} rows of its vocabulary on this rank and the student {head.local_vocab}: "
            "VocabParallel takes a teacher of the same vocabulary, split as the student is; of two the ids "
            "on a rank would be others"
        )
    return head.vocab


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
    """The needs without the call's tensors and functions of users, which must not outlive it."""
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
    return tuple([(one if one.builtin else replace(one, function=None, options={}), view) for one, view in parts])


def completed(spec: Spec, task: Task) -> Needs:
    """The Spec's needs with the functions of users that the call's losses and metrics have; all of them may read the
    target where the call has one."""
    needs, targets = spec.needs, task.head.target is not None
    if spec.library:
        return needs

    def each(parts: Sequence[tuple[Any, int]], given: Sequence[Summand | Metric]) -> tuple[tuple[Any, int], ...]:
        found = []
        for (one, view), of in zip(parts, given, strict=True):
            if not one.builtin:
                reads = targets or one.reads_target
                one = replace(one, function=of.function, options=of.options, reads_target=reads)
            found.append((one, view))
        return tuple(found)

    summands = each(needs.structure.summands, [summand for _, summand in task.losses.terms])
    local = each(needs.structure.metrics, [metric for metric in task.metrics if metric.scope == "token"])
    apart = each(needs.segment_metrics, [metric for metric in task.metrics if metric.scope != "token"])
    return needs._replace(structure=replace(needs.structure, summands=summands, metrics=local), segment_metrics=apart)


def alone(losses: Losses) -> bool:
    """True where gradients wait for the statistics of a segment (a pair) and no further."""
    return coupled(losses) and all(summand.alone for _, summand in losses.terms)


def coupled(losses: Losses) -> bool:
    """True where a loss needs all tokens' statistics for its values, and so for its gradients."""
    return any(summand.scope == "segment" for _, summand in losses.terms)


def sizes_of(
    backend: Backend,
    traits: dict[str, Any],
    demand: Demand,
    tokens: int,
    hidden: int,
    columns: int,
    dtype: torch.dtype,
    *,
    vocab: int,
    kept_everywhere: bool,
    deterministic: bool,
    capped: bool,
    bias_grad: bool,
    teacher: Teacher | None,
    plain_weight: bool = True,
    plain_rows: bool = True,
    **given: Any,
) -> Sizes:
    """The sizes that a plan is made from, of a call or of ``plan()``. ``traits``: the backend's of the device, and
    those of ranks. ``columns``: rows of the weight that are here and stand for an id, of ``vocab``. ``given``: further
    fields of ``Sizes``."""
    layout = Layout(traits.get("gpu"), dtype, hidden, plain_weight, plain_rows, capped, bias_grad, demand)
    store = "kept" if kept_everywhere else backend.store(layout)
    width = 0 if teacher is None or teacher.hidden is None else teacher.hidden.shape[1]
    return Sizes(
        tokens, hidden, columns, dtype, demand=demand, bias_grad=bias_grad,
        teacher_width=width,
        teacher_cast=teacher is not None and teacher.casts,
        teacher_store=None if teacher is None else backend.teacher_store(teacher, store),
        store=store, deterministic=deterministic, block=block_of(vocab) if deterministic else None, **given, **traits,
    )  # fmt: skip


def own_matmuls(head: HeadOptions, spec: Spec) -> bool:
    """True where a matmul of the backend makes the logits, not BLAS."""
    gpu = spec.backend.traits(head.device).get("gpu")
    capped, plain = head.softcap is not None, is_plain(head.weight)
    layout = Layout(gpu, spec.dtype, head.weight.shape[1], plain, True, capped, False, spec.demand)
    return spec.backend.bounds_rows(spec.backend.store(layout))


def is_plain(weight: Tensor) -> bool:
    """True for a weight that kernels may read in blocks: contiguous, aligned to 16 bytes."""
    return weight.is_contiguous() and weight.data_ptr() % 16 == 0
