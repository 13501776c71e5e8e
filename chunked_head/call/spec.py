"""The Spec of a call: every decision that no tensor's content affects, checked and made once for calls of one key."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..arithmetic.demand import Structure, structure_of
from ..core import checks
from ..core.private import refuse_transforms
from ..core.stats import Demand, View
from ..kernels.common.cache import Cache
from ..kernels.common.gpus import Gpu
from ..losses.base import FIELDS, KEPT_FIELDS, Field, Losses, Summand
from ..losses.user_checks import check_over_ranks
from ..metrics import Metric
from ..parallel.groups import TokenParallel, VocabParallel
from ..plan.plans import Plan
from ..plan.sizes import Request
from ..stores import Backend, backend_of
from ..stores.quantised import e4m3_missing
from .fields import TEMPERATURE, check_dense_teacher, check_fields, wanted_fields
from .options import STATIC, Call, check_options

TENSORS = frozenset((Tensor, nn.Parameter))  # their metadata say all there is to check; a subclass's may not
# types of options that are equal where they mean the same
PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype, VocabParallel, TokenParallel))
FOR_EACH = frozenset([TEMPERATURE, *[name for name, field in FIELDS.items() if field.kind in ("token", "row")]])
MOST_SPECS, MOST_PLANS, MOST_RECORDINGS = 512, 256, 64


@dataclass(frozen=True, eq=False)
class Spec:
    """The decisions for calls of one key and equal numbers."""

    dtype: torch.dtype  # of the matmuls
    statistics_dtype: torch.dtype
    backend: Backend
    structure: Structure | None  # None with a user's function, which must not outlive the call: ``structure_at``
    demand: Demand  # the statistics that losses, metrics and the result need
    wanted: tuple[str, ...]  # names of fields that losses and metrics read
    known: Mapping[str, Field]  # kind and type of every field, by name
    request: Request
    coupled: bool  # a token's loss needs other tokens' statistics; gradients wait for them
    by_segments: bool  # ... those of the token's segment or pair only
    columns: int  # K of teacher_ids, 0 without
    teacher_vocab: int | None  # of a dense teacher
    numbers: tuple[Any, ...] = ()  # of the head, losses and metrics, that the structure is made at
    withheld: frozenset[str] = frozenset()  # names of the fields in the batch that no loss or metric reads
    autocast: bool = False  # autocast gives the dtype of the matmuls
    # by sizes; Specs of other numbers share them
    plans: Cache[Hashable, Plan] = field(default_factory=lambda: Cache(MOST_PLANS))
    # ``recording.Recorded`` by all else that a sweep depends on; a Spec of other numbers has others
    recordings: Cache[Hashable, Any] = field(init=False, default_factory=lambda: Cache(MOST_RECORDINGS))


SPECS: Cache[Hashable, Spec] = Cache(MOST_SPECS)


def spec_of(call: Call[Any]) -> Spec:
    """The Spec of a call; raises what is wrong with the call before any work."""
    refuse_transforms()
    if call.temperatures is not None or [one for _, one in call.losses.terms if isinstance(one.token_weights, Tensor)]:
        name_tensors(call)
    key, numbers = key_of(call)
    spec = None if key is None else SPECS.get(key)
    if spec is None:
        spec = build(call, numbers)
    elif spec.numbers != numbers:
        # of another call of the same key: nothing else is checked or made anew
        check_options({"softcap": call.softcap, "logit_scale": call.logit_scale, "temperature": call.temperature})
        structure, demand = structure_at(call, spec.wanted, spec.columns, spec.teacher_vocab)
        spec = replace(spec, structure=spec.structure and bare(structure), demand=demand, numbers=numbers)
    else:
        key = None
        rows = sum([part.width for part in parts_of(call)])
        if spec.structure is not None and rows != spec.demand.values:
            raise checks.mismatch("a Spec", f"{spec.demand.values} values of a token", rows)
    if key is not None:
        SPECS[key] = spec
    if call.normalizer is not None or call.upstream is not None:  # which may be others at every call
        checks.refuse({
            'normalizer goes with reduction="mean" only; multiply the result instead':
                call.normalizer is not None and call.reduction != "mean",
            'upstream goes with reduction="mean" or "sum" only; multiply the result instead':
                call.upstream is not None and call.reduction == "none",
        })  # fmt: skip
        checks.check_factor("normalizer", call.normalizer, call.device)
        checks.check_factor("upstream", call.upstream, call.device)
    if call.fp8_weight is not None and call.weight is not None:
        call.fp8_weight.of(call.weight, call.columns)
    if call.token_parallel is not None:
        for part in parts_of(call):
            what = "loss" if isinstance(part, Summand) else "metric"
            check_over_ranks(part, what, frozenset(spec.wanted), spec.known)
    return spec


def name_tensors(call: Call[Any]) -> None:
    """Makes a loss's own token weights, and a temperature per token, fields under names of their own."""
    batch, terms = dict(call.batch or {}), []
    for coefficient, summand in call.losses.terms:
        if isinstance(summand.token_weights, Tensor):
            name = f"token_weights of {summand.label}"
            batch[name], summand = summand.token_weights, replace(summand, token_weights=name)
        terms.append((coefficient, summand))
    if call.temperatures is not None:
        if "temperature" in batch:
            raise ValueError("temperature is an argument of the call and no field of batch; pass temperature=")
        batch[TEMPERATURE] = call.temperatures
    call.losses, call.batch = Losses(tuple(terms)), batch


def key_of(call: Call[Any]) -> tuple[Hashable | None, tuple[Any, ...]]:
    """The Spec's key without its numbers (None: no other call can use it), and the numbers of head, losses, metrics."""
    batch: Any = {} if call.batch is None else call.batch
    segments, terms, device = call.num_segments, call.losses.terms, call.device.type
    static, numbers = STATIC(call), (call.softcap, call.logit_scale, call.plain_temperature)
    kinds = tuple(map(type, (*static, *numbers)))
    for_each, shared = (call.rows, call.target), (call.weight, call.bias)
    operands = [one for one in (*for_each, *shared) if one is not None]
    if (
        not (PLAIN.issuperset(kinds) and type(call.shift) is int)
        or not (segments is None or (type(segments) is int and segments > 0))
        or device == "meta"
        or not TENSORS.issuperset(map(type, (*operands, *batch.values())))
    ):
        return None, ()
    leading, given = call.leading, call.plain_temperature
    dims, summands = len(leading), [summand for _, summand in terms]
    parts = [*summands, *call.metrics]
    extra = {name: kind for one in summands for name, kind in one.extra_fields.items()}
    extra |= {one.token_weights: Field("token") for one in summands if isinstance(one.token_weights, str)}
    tensors = [tensor for summand in summands for tensor in summand.tensors.values()]
    sums = [each for part in parts for each in part.sums.values()]  # equal ones are made once
    # a tensor that has a number for each token: equal for calls of other lengths
    of_tokens = *for_each, *[batch[name] for name in batch if name in FOR_EACH]
    # which losses and metrics share a softmax: each one's first of equal temperature, 0 for the call's
    found = [given, *[given if part.temperature is None else part.temperature for part in parts]]
    key = (
        call.function,
        call.outputs,
        static,
        kinds,
        dims,
        call.accumulate_into is None,
        type(call.fp8_weight),
        segments is None,
        tuple(batch),
        tuple([one if one is None else metadata(one, leading) for one in of_tokens]),
        tuple([one if one is None else metadata(one) for one in (*shared, *tensors)]),
        tuple([of_field(name, value, extra, call) for name, value in batch.items() if name not in FOR_EACH]),
        tuple([(one.signature, factor.device if isinstance(factor, Tensor) else None) for factor, one in terms]),
        tuple([next(i for i, other in enumerate(tensors) if other is tensor) for tensor in tensors]),
        tuple([metric.signature for metric in call.metrics]),
        tuple(map(found.index, found)),
        tuple(map(sums.index, sums)),
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
        torch.is_grad_enabled(),
    )
    return key, (numbers, *[part.settings for part in parts])


def metadata(tensor: Tensor, ahead: tuple[int, ...] = ()) -> tuple[Hashable, ...]:
    """Everything that checks read of a tensor; without its first dimensions if they are ``ahead``, as they should."""
    shape, dims = tensor.shape, len(ahead)
    rest = shape[dims:] if shape[:dims] == ahead else (shape,)
    return rest, tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad


def of_field(name: str, value: Tensor, extra: Mapping[str, Field], call: Call[Any]) -> Hashable:
    """``metadata`` of a field without its number of tokens, segments, pairs or kept ids, so that calls of other lengths
    share a key. Where a check compares that number with another field's, the comparison's result is in the key."""
    batch: Any = call.batch
    leading, segments, shape = call.leading, call.num_segments, tuple(value.shape)
    if name in KEPT_FIELDS:
        ahead = shape[0] - math.prod(leading) if name == "kept_offsets" and shape else 0
        fits = name != "candidate_bias" or ("kept_ids" in batch and batch["kept_ids"].shape == shape)
        return len(shape), ahead, shape[:-1] == leading, fits, *metadata(value)[1:]
    kind = (extra.get(name) or FIELDS.get(name, Field("constant"))).kind
    if kind == "pair":
        return metadata(value, tuple(batch.get("pairs", value).shape[:1]))
    if kind == "segment" and segments is not None:
        return metadata(value, (segments,))
    return metadata(value, leading) if kind in ("token", "row") else (shape == (segments,), *metadata(value))


def parts_of(call: Call[Any]) -> list[Summand | Metric]:
    return [*[summand for _, summand in call.losses.terms], *call.metrics]


def build(call: Call[Any], numbers: tuple[Any, ...]) -> Spec:
    """Checks everything that does not depend on the contents of tensors."""
    dtype, batch = call.check(), call.batch or {}
    check_losses(call)
    backend = backend_of(call.backend, call.device)
    backend.check(call.device, dtype, "logits" if call.weight is None else "hidden")
    wanted, known = wanted_fields(call)
    reads = [part for part in parts_of(call) if part.reads_target]
    if call.target is None and reads:
        raise ValueError(f"target is None, and {reads[0].label} reads it; pass token ids")
    if call.num_segments is not None:
        checks.check_int("num_segments", call.num_segments, 1)
    check_fields(call, wanted, known)
    autocast = torch.is_autocast_enabled(call.device.type) and dtype != torch.float64
    teacher_vocab = check_dense_teacher(call, wanted, dtype, autocast)  # as the student's operands
    columns = batch["teacher_ids"].shape[-1] if "teacher_ids" in wanted else 0
    if call.outputs and call.outputs != ("values",):
        most, top_k = call.vocab if call.shard is None else min(call.shard.rows), call.top_k
        checks.refuse({
            "target is None, and log-probabilities are those of targets; pass token ids":
                call.target is None and not call.losses.terms,
            f"top_k must be in [1, {most}] (the vocabulary, on every rank) or None, got {top_k}":
                top_k is not None and not 1 <= top_k <= most,
        })  # fmt: skip
    spec = decided(call, dtype, backend, wanted, known, columns, teacher_vocab)
    check_fp8(call, spec)
    check_sets(call, spec.demand, wanted)
    return replace(spec, withheld=frozenset(batch) - set(wanted), autocast=autocast, numbers=numbers)


def decided(
    call: Call[Any],
    dtype: torch.dtype,
    backend: Backend,
    wanted: Sequence[str],
    known: Mapping[str, Field],
    columns: int,
    teacher_vocab: int | None,
) -> Spec:
    """Every decision that does not look at tensors: of a call that has been checked, or of ``plan()``."""
    structure, demand = structure_at(call, wanted, columns, teacher_vocab)
    summands = [summand for _, summand in call.losses.terms]
    waits = not call.outputs and "segment" in [summand.scope for summand in summands]
    separable = call.weight is not None and not call.skip_ignored and all(one.separable for one in summands)
    return Spec(
        dtype,
        torch.promote_types(dtype, torch.float32),
        backend,
        bare(structure) if all(part.builtin for part in parts_of(call)) else None,
        demand,
        tuple(wanted),
        known,
        Request(call.memory_budget, call.chunk_tokens, call.accumulate_dtype),
        waits,
        waits and separable,
        columns,
        teacher_vocab,
    )


def structure_at(
    call: Call[Any], wanted: Sequence[str], columns: int, teacher_vocab: int | None
) -> tuple[Structure, Demand]:
    """Losses and metrics at the call's numbers, and the statistics of the call."""
    given = call.losses, call.metrics, call.plain_temperature, call.vocab, columns, teacher_vocab
    structure, demand = structure_of(*given)
    if call.outputs and call.outputs != ("values",):
        squares, entropy, mean = (name in call.outputs for name in ("log_sum_sq_probs", "entropy", "mean_logit"))
        view = 0 if demand.pairing is None else demand.pairing.view
        # the square of a probability is one at half the temperature
        views = (*demand.views, View(2.0)) if squares else demand.views
        demand = demand._replace(
            views=views,
            entropy=tuple([entropy and i == view for i in range(len(views))]),
            weighted_sum=mean,
            top="argmax" in call.outputs,
            top_k=call.top_k or 0,
            rank_one=not demand.sums and not (entropy or mean or squares),
        )
    if call.weight is None or call.sequence_sharded:
        demand = demand._replace(columns_only=False)
    if "kept_ids" in wanted:
        # exponentials are relative to a target's logit, which rows with sets do not have
        demand = demand._replace(rank_one=False)
    return structure, demand


def check_losses(call: Call[Any]) -> None:
    """Raises what is wrong with losses and metrics, given the call's other options."""
    device, unreduced = call.device, call.reduction == "none"
    alone = "metrics go with one loss of the call, which reduction='none' does not have; leave them out"
    checks.refuse({alone: unreduced and call.metrics})
    for coefficient, summand in call.losses.terms:
        label, normalizer, reduction = summand.label, summand.normalizer, summand.reduction
        checks.refuse({
            f'reduction="none" is for losses of tokens, and {label} puts a segment\'s tokens together; use "mean"':
                unreduced and summand.scope != "token",
            f'{label} names a reduction or normalizer of its own beside reduction="none"; leave it out':
                unreduced and (reduction is not None or normalizer is not None),
            # of any other device it is copied from there
            f"the coefficient of {label}, or the stream's weight, is on the meta device, without value; pass a number":
                isinstance(coefficient, Tensor) and coefficient.device.type == "meta",
            f'normalizer of {label} goes with reduction="mean" only; multiply the result instead':
                normalizer is not None and (reduction or call.reduction) != "mean",
        })  # fmt: skip
        if isinstance(normalizer, Tensor):
            checks.check_factor(f"normalizer of {label}", normalizer, device)
        for name, tensor in summand.tensors.items():
            checks.check_weights(f"{name} of {label}", tensor, (call.vocab,), device)


def check_fp8(call: Call[Any], spec: Spec, gpu: Gpu | None = None) -> None:
    """Raises for calls whose logits cannot be of e4m3 operands. ``gpu``: in place of the device's."""
    if call.precision is None:
        checks.refuse({'fp8_weight goes with precision="fp8"; pass both': call.fp8_weight is not None})
        return
    assert call.weight is not None
    traits, hidden, fp8 = spec.backend.traits(call.device), call.weight.shape[1], 'precision="fp8"'
    missing = e4m3_missing(traits if gpu is None else traits | {"gpu": gpu}, call.device)
    checks.refuse({
        f"{fp8} takes bfloat16 or float16 operands, got {spec.dtype}; cast them, or leave precision=None":
            spec.dtype.itemsize != 2,
        f"{fp8} does not go with top_k, whose logits BLAS makes; take argmax=True, or leave precision=None": call.top_k,
        f"{fp8} does not go with a dense teacher: the divergence would be one of rounded logits; leave precision=None":
            spec.demand.pairing is not None,
        f"{fp8} does not go with a sum over the vocabulary, which would be one of rounded logits; leave precision=None":
            spec.demand.sums,
        missing: missing,
        f"{fp8} needs rows of 16 bytes: hidden of a multiple of 16, got {hidden}; leave precision=None":
            "gpu" in traits and hidden % 16,
    })  # fmt: skip


def check_sets(call: Call[Any], demand: Demand, wanted: Sequence[str]) -> None:
    """Raises for calls whose tokens cannot keep sets of columns."""
    if "kept_ids" not in wanted:
        missing = "kept_everywhere=True goes with the sets that tokens keep, kept_ids, which are missing"
        checks.refuse({missing: call.kept_everywhere})
        return
    of_all = "batch['kept_ids'] does not go with {}, which is of the whole vocabulary; make two calls"
    checks.refuse({
        of_all.format("the mean logit, or label smoothing"): demand.weighted_sum,
        of_all.format("logits of a teacher's ids"): demand.columns,
        of_all.format("top_k"): demand.top_k,
        of_all.format("a dense teacher"): demand.pairing is not None,
        of_all.format("a sum over the vocabulary"): demand.sums,
        "candidate_bias does not go with softcap, whose slope is that of logits without it; leave one out":
            "candidate_bias" in wanted and call.softcap is not None,
        "target is None, and kept_ids or candidates are sets that targets belong to; pass token ids":
            call.target is None,
        "batch['kept_ids'] and candidates do not go with deterministic=True over ranks that share the vocabulary; "
        "leave it False":
            call.shard is not None and call.deterministic,
        "batch['kept_ids'] does not go with sequence_sharded=True; gather hidden states and sets beforehand":
            call.sequence_sharded,
    })  # fmt: skip


def bare(structure: Structure) -> Structure:
    """The structure without the call's tensors, which must not outlive it."""
    nothing = torch.empty(0, dtype=torch.float32, device="cpu")
    summands = []
    for summand, view in structure.summands:
        tensors = dict.fromkeys(summand.tensors, nothing)
        summands.append((replace(summand, tensors=tensors, normalizer=None), view))
    return replace(structure, summands=tuple(summands))
