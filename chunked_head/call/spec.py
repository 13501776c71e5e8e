"""The Spec of a call: every decision that does not depend on tensors' contents, made once for all calls of one key."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..arithmetic.demand import Structure, structure_of
from ..core import checks
from ..core.gpus import Gpu
from ..core.memory import Cache
from ..core.private import private
from ..core.statistics import lists_of, needed
from ..core.stats import Demand
from ..core.tiles import HEAVY
from ..losses.base import FIELDS, KEPT_FIELDS, Field, Losses, Summand
from ..losses.user_checks import check_over_ranks
from ..metrics import Metric
from ..parallel.groups import TokenParallel, VocabParallel
from ..plan.plans import Plan
from ..plan.sizes import Request
from ..stores import Backend, backend_of
from ..stores.quantised import e4m3_missing
from .fields import TEMPERATURE, check_dense_teacher, check_fields, fields_to_read
from .options import STATIC_VALUES, Call, check_options

TENSOR_TYPES = frozenset(
    (Tensor, nn.Parameter)
)  # types whose metadata are all that checks read; other subclasses hide more
# types of options whose values compare equal exactly where they decide the same
PLAIN_TYPES = frozenset((type(None), bool, int, float, str, torch.dtype, VocabParallel, TokenParallel))
# names of the fields with a row for each token
PER_TOKEN = frozenset([TEMPERATURE, *[name for name, field in FIELDS.items() if field.kind in ("token", "row")]])
TRANSFORMS_ERROR = (
    "torch.func transforms (grad, vmap, jvp, ...) do not go with chunked_head, whose kernels they cannot see through; "
    "use loss.backward() or torch.autograd.grad, or full logits inside of the transform"
)
MOST_SPECS, MOST_PLANS, MOST_RECORDINGS = 512, 256, 64  # entries of the caches of each kind


@dataclass(frozen=True, eq=False, kw_only=True)
class Spec:
    """The decisions for calls that have one key and equal ``numbers``."""

    dtype: torch.dtype  # dtype of the matmuls
    statistics_dtype: torch.dtype
    backend: Backend
    structure: Structure | None  # None with a user's function, which must not outlive the call; ``Tokens`` has it then
    demand: Demand  # the statistics that losses, metrics and the result need
    field_names: tuple[str, ...]  # fields that losses and metrics read
    field_kinds: Mapping[str, Field]  # kind and type of every field, by name
    request: Request
    coupled: bool  # a token's loss reads other tokens' statistics
    can_end_with_segments: bool  # chunks may end with segments: losses read no statistics beyond a segment or pair
    num_row_factors: int  # ``Sizes.num_row_factors`` of calls whose hidden states alone take a gradient
    columns: int  # K of ``teacher_ids`` [tokens, K]; 0 without them
    teacher_vocab: int | None  # number of ids of a dense teacher; None without a dense teacher
    numbers: tuple[Any, ...] = ()  # floats of the head, losses and metrics; ``structure`` is made for them
    withheld: frozenset[str] = frozenset()  # names of the fields in the batch that no loss or metric reads
    autocast: bool = False  # autocast gives the dtype of the matmuls
    # by ``planning.PlanKey``; Specs that differ in numbers share them
    plans: Cache[Hashable, Plan] = field(default_factory=lambda: Cache(MOST_PLANS))
    # ``recording.PlanAndRecording`` by the key of ``run_recorded``; Specs that differ in numbers do not share them
    recordings: Cache[Hashable, Any] = field(init=False, default_factory=lambda: Cache(MOST_RECORDINGS))


SPECS: Cache[Hashable, Spec] = Cache(MOST_SPECS)


def spec_of(call: Call[Any]) -> Spec:
    """The Spec of a call, from the cache or built. Raises, before any work, for everything wrong with the call that can
    be seen without the contents of tensors."""
    refuse_transforms()
    if call.temperatures is not None or [s for _, s in call.losses.terms if isinstance(s.token_weights, Tensor)]:
        name_tensors(call)
    key, numbers = key_of(call)
    spec = None if key is None else SPECS.get(key)
    if spec is None:
        spec, is_new = build(call, numbers), True
    elif spec.numbers != numbers:
        # the key is equal: only numbers need a check, and only structure and demand depend on them
        check_options({"softcap": call.softcap, "logit_scale": call.logit_scale, "temperature": call.temperature})
        structure, demand = structure_at(call, spec.field_names, spec.columns, spec.teacher_vocab)
        spec = replace(spec, structure=spec.structure and bare(structure), demand=demand, numbers=numbers)
        is_new = True
    else:
        is_new, width = False, sum([measure.width for measure in measures_of(call)])
        if spec.structure is not None and width != spec.demand.values:
            raise checks.mismatch("a Spec", f"{spec.demand.values} values of a token", width)
    if is_new and key is not None:
        SPECS[key] = spec
    check_every_call(call, spec)
    return spec


def refuse_transforms() -> None:
    """Raises RuntimeError inside of a transform of torch.func. If this torch cannot tell, the transform itself
    refuses ``CallFunction``."""
    flag_getters = private("_C._are_functorch_transforms_active")
    if flag_getters is not None and flag_getters[0]():
        raise RuntimeError(TRANSFORMS_ERROR)


def check_every_call(call: Call[Any], spec: Spec) -> None:
    """Raises for a wrong argument that the Spec's key leaves out: its value may differ from call to call."""
    if call.normalizer is not None or call.upstream is not None:
        checks.refuse({
            'normalizer goes with reduction="mean" only; multiply the result instead':
                call.normalizer is not None and call.reduction != "mean",
            'upstream goes with reduction="mean" or "sum" only; multiply the result instead':
                call.upstream is not None and call.reduction == "none",
        })  # fmt: skip
        checks.check_factor("normalizer", call.normalizer, call.device)
        checks.check_factor("upstream", call.upstream, call.device)
    if call.fp8_weight is not None and call.weight is not None:
        call.fp8_weight.checked(call.weight, call.local_width)
    if call.token_parallel is not None:
        for measure in measures_of(call):
            role = "loss" if isinstance(measure, Summand) else "metric"
            check_over_ranks(measure, role, frozenset(spec.field_names), spec.field_kinds)


def name_tensors(call: Call[Any]) -> None:
    """Moves the losses' tensors of token weights, and a tensor of temperatures, into the call's batch, under names that
    no field of a user has."""
    batch, loss_terms = dict(call.batch or {}), []
    for coefficient, summand in call.losses.terms:
        if isinstance(summand.token_weights, Tensor):
            name = f"token_weights of {summand.label}"
            batch[name], summand = summand.token_weights, replace(summand, token_weights=name)
        loss_terms.append((coefficient, summand))
    if call.temperatures is not None:
        if "temperature" in batch:
            raise ValueError("temperature is an argument of the call and no field of batch; pass temperature=")
        batch[TEMPERATURE] = call.temperatures
    call.losses, call.batch = Losses(tuple(loss_terms)), batch


def key_of(call: Call[Any]) -> tuple[Hashable | None, tuple[Any, ...]]:
    """The Spec's key, and the numbers of head, losses and metrics, which the key leaves out. The key is None where no
    other call can use the Spec: for options or tensors of unusual types, and on the meta device."""
    batch: Any = {} if call.batch is None else call.batch
    num_segments, loss_terms, device = call.num_segments, call.losses.terms, call.device.type
    token_shape, static_values = call.token_shape, STATIC_VALUES(call)
    head_numbers = call.softcap, call.logit_scale, call.plain_temperature
    option_types = tuple(map(type, (*static_values, *head_numbers)))
    operands = [x for x in (call.rows, call.target, call.weight, call.bias) if x is not None]
    if (
        not (PLAIN_TYPES.issuperset(option_types) and type(call.shift) is int)
        or not (num_segments is None or (type(num_segments) is int and num_segments > 0))
        or device == "meta"
        or not TENSOR_TYPES.issuperset(map(type, (*operands, *batch.values())))
    ):
        return None, ()
    summands, metrics = [summand for _, summand in loss_terms], call.metrics
    measures = [*summands, *metrics]
    option_key = (
        call.function,
        call.outputs,
        static_values,
        option_types,
        call.accumulate_into is None,
        type(call.fp8_weight),
    )
    autocast_and_grad_mode = (
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
        torch.is_grad_enabled(),
    )
    # a tensor with a row for each token enters without the number of tokens: calls of other lengths share the key
    field_kinds = {name: kind for s in summands for name, kind in s.extra_fields.items()}
    field_kinds |= {s.token_weights: Field("token") for s in summands if isinstance(s.token_weights, str)}
    loss_tensors = [tensor for s in summands for tensor in s.tensors.values()]
    token_tensors = call.rows, call.target, *[batch[name] for name in batch if name in PER_TOKEN]
    shared_tensors = call.weight, call.bias, *loss_tensors
    tensor_key = (
        len(token_shape),
        num_segments is None,
        tuple(batch),
        metadata_of(token_tensors, token_shape),
        metadata_of(shared_tensors),
        tuple([of_field(name, value, field_kinds, call) for name, value in batch.items() if name not in PER_TOKEN]),
    )
    # losses and metrics enter without numbers; besides, which of their tensors, temperatures and sums are equal
    temperatures = [call.plain_temperature]
    temperatures += [call.plain_temperature if m.temperature is None else m.temperature for m in measures]
    vocabulary_sums = [vocab_sum for measure in measures for vocab_sum in measure.sums.values()]
    function_key = (
        tuple([(s.signature, factor.device if isinstance(factor, Tensor) else None) for factor, s in loss_terms]),
        tuple([metric.signature for metric in metrics]),
        tuple([next(i for i, x in enumerate(loss_tensors) if x is tensor) for tensor in loss_tensors]),
        tuple(map(temperatures.index, temperatures)),
        tuple(map(vocabulary_sums.index, vocabulary_sums)),
    )
    key = option_key, call.unplanned_outputs, autocast_and_grad_mode, tensor_key, function_key
    return key, (head_numbers, *[measure.number_key for measure in measures])


def metadata_of(tensors: Sequence[Tensor | None], leading_shape: tuple[int, ...] = ()) -> tuple[Any, ...]:
    """Returns a tuple for each tensor: shape, dtype and all else that checks read; None for an argument None. A shape
    that begins with ``leading_shape`` loses these dimensions. Any other shape is complete, and a check will raise for
    it."""
    leading_dims, metadata_by_tensor = len(leading_shape), list[Any]()
    for x in tensors:
        if x is None:
            metadata_by_tensor.append(None)
            continue
        shape = x.shape
        trailing = shape[leading_dims:] if shape[:leading_dims] == leading_shape else (shape,)
        metadata_by_tensor.append((trailing, x.dtype, x.device, x.layout, x.requires_grad))
    return tuple(metadata_by_tensor)


def metadata(tensor: Tensor, leading_shape: tuple[int, ...] = ()) -> tuple[Any, ...]:
    """``metadata_of`` a single tensor."""
    (tensor_metadata,) = metadata_of((tensor,), leading_shape)
    return tuple(tensor_metadata)


def of_field(name: str, value: Tensor, kinds: Mapping[str, Field], call: Call[Any]) -> Hashable:
    """``metadata`` of the field ``name`` without the field's length in tokens, segments, pairs or kept ids: calls of
    other lengths share a key. If a check compares this length with another field's length, the key has the result of
    the comparison. ``kinds``: for each name that losses declare, its ``Field``."""
    batch: Any = call.batch
    token_shape, num_segments, shape = call.token_shape, call.num_segments, tuple(value.shape)
    if name in KEPT_FIELDS:
        surplus_rows = shape[0] - math.prod(token_shape) if name == "kept_offsets" and shape else 0
        has_ids_shape = name != "candidate_bias" or ("kept_ids" in batch and batch["kept_ids"].shape == shape)
        return len(shape), surplus_rows, shape[:-1] == token_shape, has_ids_shape, *metadata(value)[1:]
    kind = (kinds.get(name) or FIELDS.get(name, Field("constant"))).kind
    if kind == "pair":
        return metadata(value, tuple(batch.get("pairs", value).shape[:1]))
    if kind == "segment" and num_segments is not None:
        return metadata(value, (num_segments,))
    return metadata(value, token_shape) if kind in ("token", "row") else (shape == (num_segments,), *metadata(value))


def measures_of(call: Call[Any]) -> list[Summand | Metric]:
    """The losses of a call, then its metrics."""
    return [*[summand for _, summand in call.losses.terms], *call.metrics]


def build(call: Call[Any], numbers: tuple[Any, ...]) -> Spec:
    """Makes a new Spec. Raises for every error that shows without a plan and without the contents of tensors.
    ``numbers``: floats of the head, losses and metrics, which the key leaves out."""
    dtype, batch = call.check_arguments(), call.batch or {}
    check_losses(call)
    backend = backend_of(call.backend, call.device)
    backend.check(call.device, dtype, "logits" if call.weight is None else "hidden")
    field_names, field_kinds = fields_to_read(call)
    target_readers = [measure for measure in measures_of(call) if measure.reads_target]
    if call.target is None and target_readers:
        raise ValueError(f"target is None, and {target_readers[0].label} reads it; pass token ids")
    if call.num_segments is not None:
        checks.check_int("num_segments", call.num_segments, 1)
    check_fields(call, field_names, field_kinds)
    is_autocast = torch.is_autocast_enabled(call.device.type) and dtype != torch.float64
    teacher_vocab = check_dense_teacher(call, field_names, dtype, is_autocast)  # has the dtype of the student's matmuls
    columns = batch["teacher_ids"].shape[-1] if "teacher_ids" in field_names else 0
    if call.outputs and call.outputs != ("values",):
        most_top_k, top_k = call.vocab if call.shard is None else min(call.shard.ids_by_rank), call.top_k
        checks.refuse({
            "target is None, and log-probabilities are those of targets; pass token ids":
                call.target is None and not call.losses.terms,
            f"top_k must be in [1, {most_top_k}] (the vocabulary, on every rank) or None, got {top_k}":
                top_k is not None and not 1 <= top_k <= most_top_k,
        })  # fmt: skip
    spec = decided(call, dtype, backend, field_names, field_kinds, columns, teacher_vocab)
    check_fp8(call, spec)
    check_sets(call, spec.demand, field_names)
    return replace(spec, withheld=frozenset(batch) - set(field_names), autocast=is_autocast, numbers=numbers)


def decided(
    call: Call[Any],
    dtype: torch.dtype,
    backend: Backend,
    field_names: Sequence[str],
    field_kinds: Mapping[str, Field],
    columns: int,
    teacher_vocab: int | None,
) -> Spec:
    """Makes the Spec of a call whose arguments have been checked, or have been made from sizes by ``plan()``.
    ``columns``: K of ``teacher_ids`` [tokens, K], or 0. ``teacher_vocab``: number of a dense teacher's ids, or None."""
    structure, demand = structure_at(call, field_names, columns, teacher_vocab)
    summands = [summand for _, summand in call.losses.terms]
    is_coupled = not call.outputs and "segment" in [summand.scope for summand in summands]
    num_row_factors = len(call.planned_outputs[:2])
    if is_coupled:
        num_row_factors = 1 if structure.of_logprobs else 2
    is_separable = call.weight is not None and not call.skip_ignored and all(s.is_separable for s in summands)
    return Spec(
        dtype=dtype,
        statistics_dtype=torch.promote_types(dtype, torch.float32),
        backend=backend,
        structure=bare(structure) if all(measure.is_builtin for measure in measures_of(call)) else None,
        demand=demand,
        field_names=tuple(field_names),
        field_kinds=field_kinds,
        request=Request(call.memory_budget, call.chunk_tokens, call.accumulate_dtype),
        coupled=is_coupled,
        can_end_with_segments=is_coupled and is_separable,
        num_row_factors=num_row_factors,
        columns=columns,
        teacher_vocab=teacher_vocab,
    )


def structure_at(
    call: Call[Any], field_names: Sequence[str], columns: int, teacher_vocab: int | None
) -> tuple[Structure, Demand]:
    """Returns the ``Structure`` of losses and metrics with this call's numbers, and the ``Demand``: the statistics that
    losses, metrics and outputs need. ``columns``: K of ``teacher_ids`` [tokens, K], or 0. ``teacher_vocab``: number of
    a dense teacher's ids, or None."""
    losses_and_metrics = call.losses, call.metrics
    structure, demand = structure_of(*losses_and_metrics, call.plain_temperature, call.vocab, columns, teacher_vocab)
    if call.outputs and call.outputs != ("values",):
        has_squares = "log_sum_sq_probs" in call.outputs
        view = 0 if demand.pairing is None else demand.pairing.view
        # squared probabilities are a softmax at half the temperature, up to a factor
        views = (*demand.views, (2.0, None)) if has_squares else demand.views
        statistics = needed([(name, view) for name in call.outputs], len(views))
        sloped_statistics = needed([(name, view) for name in call.planned_outputs], len(views))
        has_slopes = any(s.slopes is not None for of_view in sloped_statistics for s in of_view)
        is_rank_one = not (demand.sums or has_slopes or has_squares)
        lists = lists_of(call.outputs, 0, call.top_k or 0)
        demand = demand._replace(views=views, statistics=statistics, lists=lists, rank_one=is_rank_one)
    if call.weight is None or call.sequence_sharded:
        demand = demand._replace(columns_only=False)
    if "kept_ids" in field_names:
        # rank one stores exponentials relative to the target's logit, which no matmul makes for rows with sets
        demand = demand._replace(rank_one=False)
    if call.precision is not None and not (call.kept_everywhere or demand.columns_only):
        demand = demand._replace(heavy=HEAVY)
    return structure, demand


def check_losses(call: Call[Any]) -> None:
    """Raises where losses and metrics do not go with each other or with the call's options."""
    device, is_unreduced = call.device, call.reduction == "none"
    no_loss_text = "metrics go with one loss of the call, which reduction='none' does not have; leave them out"
    checks.refuse({no_loss_text: is_unreduced and call.metrics})
    for coefficient, summand in call.losses.terms:
        label, normalizer, reduction = summand.label, summand.normalizer, summand.reduction
        checks.refuse({
            f'reduction="none" is for losses of tokens, and {label} puts a segment\'s tokens together; use "mean"':
                is_unreduced and summand.scope != "token",
            f'{label} names a reduction or normalizer of its own beside reduction="none"; leave it out':
                is_unreduced and (reduction is not None or normalizer is not None),
            # a coefficient on any other device than meta is copied to the operands' device
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
    """Raises for calls with ``precision="fp8"`` whose logits cannot be products of e4m3 operands. ``gpu``: the GPU to
    check in place of the call's device."""
    if call.precision is None:
        checks.refuse({'fp8_weight goes with precision="fp8"; pass both': call.fp8_weight is not None})
        return
    assert call.weight is not None
    backend_traits, hidden_size, fp8 = spec.backend.traits(call.device), call.weight.shape[1], 'precision="fp8"'
    missing_text = e4m3_missing(backend_traits if gpu is None else backend_traits | {"gpu": gpu}, call.device)
    checks.refuse({
        f"{fp8} takes bfloat16 or float16 operands, got {spec.dtype}; cast them, or leave precision=None":
            spec.dtype.itemsize != 2,
        f"{fp8} does not go with top_k, whose logits BLAS makes; take argmax=True, or leave precision=None": call.top_k,
        f"{fp8} does not go with a dense teacher: the divergence would be one of rounded logits; leave precision=None":
            spec.demand.pairing is not None,
        f"{fp8} does not go with a sum over the vocabulary, which would be one of rounded logits; leave precision=None":
            spec.demand.sums,
        missing_text: missing_text,
        f"{fp8} needs rows of 16 bytes: hidden of a multiple of 16, got {hidden_size}; leave precision=None":
            "gpu" in backend_traits and hidden_size % 16,
    })  # fmt: skip


def check_sets(call: Call[Any], demand: Demand, field_names: Sequence[str]) -> None:
    """Raises for calls with ``kept_ids`` or candidates whose losses or options do not go with sets of columns."""
    if "kept_ids" not in field_names:
        missing_text = "kept_everywhere=True goes with the sets that tokens keep, kept_ids, which are missing"
        checks.refuse({missing_text: call.kept_everywhere})
        return
    feature_texts = [s.feature_over_vocabulary for s in (*demand.statistics[0], *demand.lists)]
    of_all_text = "batch['kept_ids'] does not go with {}, which is of the whole vocabulary; make two calls"
    checks.refuse({
        **{of_all_text.format(text): text for text in feature_texts},
        of_all_text.format("a dense teacher"): demand.pairing is not None,
        of_all_text.format("a sum over the vocabulary"): demand.sums,
        "candidate_bias does not go with softcap, whose slope is that of logits without it; leave one out":
            "candidate_bias" in field_names and call.softcap is not None,
        "target is None, and kept_ids or candidates are sets that targets belong to; pass token ids":
            call.target is None,
        "batch['kept_ids'] and candidates do not go with deterministic=True over ranks that share the vocabulary; "
        "leave it False":
            call.shard is not None and call.deterministic,
        "batch['kept_ids'] does not go with sequence_sharded=True; gather hidden states and sets beforehand":
            call.sequence_sharded,
    })  # fmt: skip


def bare(structure: Structure) -> Structure:
    """The structure with an empty tensor in place of each tensor of the call, since a Spec outlives the call."""
    empty_tensor = torch.empty(0, dtype=torch.float32, device="cpu")
    summands = []
    for summand, view in structure.summands:
        tensors = dict.fromkeys(summand.tensors, empty_tensor)
        summands.append((replace(summand, tensors=tensors, normalizer=None), view))
    return replace(structure, summands=tuple(summands))
