"""Runs of a user's function on made-up tokens. A run finds the statistics and fields that the function reads. A run
raises if the function's values do not fit its scope and unit."""

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..core.memory import Cache
from ..core.private import anomalies_at, breaks_graph
from ..core.statistics import WITHOUT_SLOPE
from .base import DENSE_STATISTICS, FIELDS, STATISTICS, Field, Measure, Summand
from .batch import Batch, Stats

Function = Callable[..., Tensor]
CheckResult = TypeVar("CheckResult")
ReadNames = tuple[set[str], set[str], set[str]]  # names of statistics, of required fields, of optional fields

CONSTANT_TYPES = (type(None), bool, int, complex, str, bytes, torch.dtype, torch.device, CodeType)
MAX_CONTENTS = 64  # closure values and defaults of a function that ``content_key`` reads
MAX_DEPTH = 6  # levels of nesting that ``content_key`` reads
MAX_ITEMS = 8  # items of a list or dict that ``content_key`` reads; a longer one may grow at every call
CHECK_RESULTS: Cache[Hashable, Any] = Cache(256)  # by ``content_key`` of the function and ``check_key``


def content_key(value: Any, depth: int = 0) -> Hashable:
    """A key of a value, or of a function with its closure and defaults. Equal code, types and plain values have equal
    keys. The key of a float is its sign and whether it is finite. The key of a tensor is its dtype, device and number
    of dimensions. The key of any other object is a weak reference to the object."""
    value_type = type(value)
    if value_type in CONSTANT_TYPES:
        return value_type, value
    if value_type is float:
        return value_type, math.isfinite(value), (value > 0) - (value < 0)
    if isinstance(value, Tensor):
        return "tensor", value.dtype, value.device, value.dim()
    contents: tuple[Any, ...] | None = None  # values whose keys make up the key; None: the key is a weak reference
    if value_type is FunctionType:
        cell_contents = [None if cell == CellType() else cell.cell_contents for cell in value.__closure__ or ()]
        globals_read = [value.__globals__.get(name) for name in value.__code__.co_names]
        global_tensors = [item for item in globals_read if isinstance(item, Tensor)]
        contents = value.__code__, *cell_contents, value.__defaults__, value.__kwdefaults__, *global_tensors
    elif value_type is MethodType:
        contents = value.__func__, value.__self__
    elif value_type is functools.partial:
        contents = value.func, value.args, value.keywords
    elif isinstance(value, tuple):
        contents = (*value,)
    elif value_type is list:
        contents = (*value[:MAX_ITEMS],)
    elif value_type is dict:
        contents = tuple(itertools.chain(*itertools.islice(value.items(), MAX_ITEMS)))
    if contents is not None and len(contents) <= MAX_CONTENTS and depth < MAX_DEPTH:
        return weakref.ref(value_type), *[content_key(item, depth + 1) for item in contents]
    try:
        weak_reference = weakref.ref(value)
        hash(weak_reference)
        return weak_reference
    except TypeError:  # an object without weak references or hash
        return object()  # a key that equals no other


def device_of(key: Hashable) -> torch.device:
    """The device to run a function on. ``key``: the ``content_key`` of the function. The device is the key's first
    accelerator. If the key has no device, it is the GPU if CUDA is initialised. Otherwise it is the CPU."""
    key_entries = [key]
    for key_entry in key_entries:  # the loop appends to ``key_entries``
        key_entries += key_entry if isinstance(key_entry, tuple) else ()
    key_devices = [key_entry for key_entry in key_entries if isinstance(key_entry, torch.device)]
    accelerators = [device for device in key_devices if device.type not in ("cpu", "meta")]
    return (
        accelerators[0]
        if accelerators
        else torch.device("cuda" if not key_devices and torch.cuda.is_initialized() else "cpu")
    )


# sizes of the made-up tokens' tensors: all different, so that a wrong shape raises
NUM_TOKENS, NUM_SEGMENTS, NUM_PAIRS, VOCAB_SIZE, TRAILING_SIZE = 24, 5, 3, 13, 4
# segments of 7, 1, 4, 8 and 0 tokens; four tokens of no segment; segments 0 and 2 are interleaved
SEGMENT_IDS = (0, 0, 2, 0, -1, 2, 0, 0, 2, 0, 0, 2, 1, -1, 3, 3, 3, 3, 3, -1, 3, 3, 3, -1)
MASKED_TOKENS = (4, 13, 19)  # positions of tokens that do not count
SHAPES_BY_KIND = {
    "token": (NUM_TOKENS,),
    "row": (NUM_TOKENS,),
    "segment": (NUM_SEGMENTS,),
    "pair": (NUM_PAIRS,),
    "constant": (),
}
STATISTICS_WITHOUT_GRADIENT = (*WITHOUT_SLOPE, "teacher_entropy")
ALL_TOKENS = slice(0, NUM_TOKENS)
TOKEN_PIECES = (slice(0, 1), slice(1, NUM_TOKENS))
RANK_PIECES = (slice(0, 9), slice(9, NUM_TOKENS))  # tokens of two made-up ranks; segments 0 and 2 have tokens on both


class MadeUpTokens:
    """Made-up statistics and fields of NUM_TOKENS tokens. As in a call, statistics and token fields are 0 (segment ids
    -1) where a token does not count.

    ``tensors``: copies of the loss's tensors. The length of the first tensor is the size of the made-up vocabulary."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        extra_fields: Mapping[str, Field],
        sums: Iterable[str],  # names of sums over the vocabulary
        device: torch.device,
    ):
        first_tensor = next(iter(tensors.values()), None)
        self.tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self.vocab = len(first_tensor) if first_tensor is not None and first_tensor.dim() else VOCAB_SIZE
        draw_options = {"generator": torch.Generator("cpu").manual_seed(7), "dtype": torch.float32}
        rand, randn = functools.partial(torch.rand, **draw_options), functools.partial(torch.randn, **draw_options)
        with torch.device("cpu"):
            mask = torch.ones(NUM_TOKENS, dtype=torch.bool).index_fill(0, torch.tensor(MASKED_TOKENS), False)
            target, argmax = (rand(2, NUM_TOKENS) * self.vocab).long()
            logprob = -0.1 - 3 * rand(NUM_TOKENS)
            stats = {name: 0.1 + 2 * rand(NUM_TOKENS) for name in (*STATISTICS, *DENSE_STATISTICS, *sums)} | {
                "logprob": logprob,
                "lse": 4 * randn(NUM_TOKENS),
                "mean_logit": randn(NUM_TOKENS),
                "argmax": argmax,
                **{name: logprob * 0.5 for name in STATISTICS if name.endswith("_logprob")},
                "topk_logprobs": rand(NUM_TOKENS, TRAILING_SIZE).softmax(-1).log() - 0.2,
            }
            fields, self.token_field_names = {}, set[str]()
            for name, field_type in (FIELDS | dict(extra_fields)).items():
                if field_type.kind == "kept":
                    continue
                field_values = randn((*SHAPES_BY_KIND[field_type.kind], *[TRAILING_SIZE] * field_type.trailing))
                if name in ("old_logprobs", "ref_logprobs", "rollout_logprobs"):  # ratios are near 1
                    field_values = logprob + 0.3 * field_values
                if field_type.kind in ("token", "row"):
                    self.token_field_names.add(name)
                    field_values[~mask] = 0
                fields[name] = {"float": field_values, "bool": field_values > 0, "int": (field_values > 0).long()}[
                    field_type.type
                ]
            fields["segments"] = fields["documents"] = torch.tensor(SEGMENT_IDS)
            fields["pairs"] = torch.tensor([[0, 1], [2, 3], [3, 0]])
            for value in stats.values():
                value[~mask] = 0
        self.stats = {name: value.to(device) for name, value in stats.items()}
        self.fields = {name: value.to(device) for name, value in fields.items()}
        self.mask, self.target = mask.to(device), torch.where(mask, target, -1).to(device)
        self.value_weights = (rand(NUM_TOKENS, device="cpu") + 0.5).to(device)

    def fields_of(self, piece: slice) -> dict[str, Tensor]:
        """Fields by name: token fields of the slice ``piece`` of the tokens, and all other fields as they are."""
        return {name: value[piece] if name in self.token_field_names else value for name, value in self.fields.items()}


def shared_result(
    measure: Measure,
    check_key: Hashable,
    extra_fields: Mapping[str, Field],  # by name, fields that FIELDS does not list
    check: Callable[[MadeUpTokens], CheckResult],
) -> CheckResult:
    """The result of ``check`` on made-up tokens. It is cached by ``check_key``, a key of all that ``check`` depends on
    but the measure, and by the ``content_key`` of the measure's function, options and tensors.

    Modes around the call (inference mode, no_grad, a default device) have no effect in ``check``, and the global random
    states do not change."""
    tensors = measure.tensors if isinstance(measure, Summand) else {}
    values_key = content_key((measure.function, measure.options, tensors))

    def check_undisturbed() -> CheckResult:
        device = device_of(values_key)
        forked_devices, device_type = ([], "cuda") if device.type == "cpu" else ([device], device.type)
        forked_random_states = torch.random.fork_rng(forked_devices, device_type=device_type)
        with torch.inference_mode(False), torch.enable_grad(), forked_random_states, device:
            return check(MadeUpTokens(tensors, extra_fields, measure.sums, device))

    key = values_key, check_key, tuple(measure.sums), tuple(sorted(extra_fields.items()))
    result: CheckResult = CHECK_RESULTS.get_or_make(key, check_undisturbed)
    return result


def are_close(a: Tensor, b: Tensor) -> bool:
    """True for tensors that are equal up to rounding. A mean over NUM_TOKENS tokens that leaves one token out differs
    by far more."""
    finite_magnitudes = a[a.isfinite()].abs()
    atol = 1e-4 * float(finite_magnitudes.max()) if len(finite_magnitudes) else 0.0
    return torch.allclose(a, b, rtol=1e-4, atol=atol, equal_nan=True)


# ---- checks when a loss or a metric is made


def check_pieces(owner: str, measure: Measure, sample: MadeUpTokens) -> tuple[set[str], set[str]]:
    """Returns two sets of names: of the statistics and of the fields that the measure's function reads. ValueError if
    the function does not return one value per unit. With scope "token", ValueError if two pieces of the tokens have
    other values or gradients than all tokens at once."""
    results_at_once, statistic_names, field_names = values_on_sample(owner, measure, sample, ALL_TOKENS)
    results = [values_on_sample(owner, measure, sample, piece)[0] for piece in TOKEN_PIECES if measure.scope == "token"]
    for quantity, values in results_at_once.items():
        if results and not are_close(values[sample.mask], torch.cat([run[quantity] for run in results])[sample.mask]):
            raise ValueError(
                f'{owner} has scope="token", but its {quantity} on {NUM_TOKENS} made-up tokens at once and in pieces '
                "differ: a token's value depends on other tokens, and would depend on the chunk size, or the "
                'function draws random numbers or writes into what it reads. Pass scope="segment" if it needs '
                "other tokens, or compute what is common to the batch before the call and pass it as a field"
            )
    return statistic_names, field_names


@breaks_graph
def check_metric(metric: Measure) -> None:
    """Raises ValueError if a user's metric fails ``check_pieces``."""
    owner, check_key = f"metrics.Metric({metric.label!r})", ("metric", metric.scope, metric.unit)
    shared_result(metric, check_key, metric.extra_fields, lambda sample: check_pieces(owner, metric, sample))


def reads_of(owner: str, summand: Summand, extra_fields: Mapping[str, Field]) -> ReadNames:
    """Names of the statistics, required fields and optional fields that a loss's function reads on made-up tokens. A
    field is optional if the function also runs without it. ValueError where ``check_pieces`` raises."""

    def names_read(sample: MadeUpTokens) -> ReadNames:
        statistic_names, field_names = check_pieces(owner, summand, sample)
        required_names = set[str]()
        for name in (*field_names, "target"):
            try:
                values_on_sample(owner, summand, sample, ALL_TOKENS, left_out_field=name)
            except ValueError:
                required_names.add(name)
        return statistic_names, required_names, field_names - required_names

    return shared_result(summand, (summand.scope, summand.unit), extra_fields, names_read)


def values_on_sample(
    owner: str, measure: Measure, sample: MadeUpTokens, piece: slice, left_out_field: str = ""
) -> tuple[dict[str, Tensor], set[str], set[str]]:
    """Runs a function on the tokens in the slice ``piece`` of a sample.

    Returns a dict of tensors, and the names of the statistics and of the fields that the function has read. The tensors
    are the values and, for a loss, the gradients of a weighted sum of the values. ``left_out_field``: name of a field
    that the function does not get, or "target". ValueError if the function raises or returns wrong values.
    """
    is_loss = isinstance(measure, Summand)
    statistics = {name: value[piece].detach().clone() for name, value in sample.stats.items()}
    differentiable_leaves = {
        name: leaf for name, leaf in statistics.items() if is_loss and name not in STATISTICS_WITHOUT_GRADIENT
    }
    for leaf in differentiable_leaves.values():
        leaf.requires_grad_()
    stats, num_tokens, unit = Stats(statistics), piece.stop - piece.start, measure.unit
    fields = {name: value for name, value in sample.fields_of(piece).items() if name != left_out_field}
    batch = Batch(fields, sample.target[piece], NUM_SEGMENTS, sample.vocab)
    if left_out_field == "target":
        del batch.target
    try:
        values = measure.values(stats, batch, sample.tensors)
        # ``get`` and ``in`` read a field that does not exist without an error
        if unknown_fields := batch.names_read - sample.fields.keys() - {"target"}:
            raise KeyError(f"there is no field {min(unknown_fields)!r}")
    except Exception as error:
        if unknown_fields := batch.names_read - sample.fields.keys() - {"target"}:
            declaration = f"fields={{{min(unknown_fields)!r}: 'token'}}"
            loss_call = f"losses.custom(function, scope={measure.scope!r}, {declaration})"
            raise ValueError(
                f"{owner} reads batch[{min(unknown_fields)!r}], a field that is not the library's; declare it, and its "
                "kind: " + (loss_call if is_loss else f"metrics.Metric(name, function, {declaration})")
            ) from error
        reason = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise ValueError(
            f"{owner} raised {type(error).__name__} on {num_tokens} made-up tokens, where it was run to see what it "
            f"reads: {reason}. If it cannot run on these, pass check=False with needs= and fields="
        ) from error
    expected_numbers = "floating-point values" if differentiable_leaves else "numbers"
    if (
        not isinstance(values, Tensor)
        or values.is_complex()
        or (differentiable_leaves and not values.is_floating_point())
    ):
        result_in_words = getattr(values, "dtype", type(values).__name__)
        raise ValueError(f"{owner} must return a tensor of {expected_numbers}, got {result_in_words}")
    num_values, unit_in_words = {
        "token": (num_tokens, "tokens"),
        "segment": (NUM_SEGMENTS, "num_segments"),
        "pair": (NUM_PAIRS, "pairs"),
    }[unit]
    if tuple(values.shape) != (num_values,):
        remedy = " (values are reduced for it: leave out .sum() and .mean())" if values.dim() == 0 else ""
        if unit == "token" and values.shape == (NUM_SEGMENTS,):
            remedy = '; values per segment are unit="segment"'
        result_in_words = f"[{unit_in_words}] = ({num_values},) here; got {tuple(values.shape)}{remedy}"
        raise ValueError(f"{owner} must return one value per {unit}, {result_in_words}")
    if not differentiable_leaves:
        return {"values": values.float()}, stats.names_read, batch.names_read
    if not values.requires_grad:
        raise ValueError(
            f"{owner} has values without a gradient: it must depend on a statistic that is not detached. What is only "
            "to be logged is a Metric"
        )
    value_sum = values.sum()
    if unit == "token":  # with equal weights, a mean over tokens would not show
        value_sum = torch.where(sample.mask[piece], values * sample.value_weights[piece], 0.0).sum()
    with anomalies_at(None):  # made-up numbers may give nan where the caller's do not
        gradient_list = torch.autograd.grad(
            value_sum, list(differentiable_leaves.values()), allow_unused=True, materialize_grads=True
        )
    gradients_by_name = {
        f"gradients to stats.{name}": grad for name, grad in zip(differentiable_leaves, gradient_list, strict=True)
    }
    return {"values": values.detach()} | gradients_by_name, stats.names_read, batch.names_read


# ---- checks of losses and metrics of segments, where ranks hold different tokens


class RankLocalSums:
    """Stand-in for ``RankSums`` on one of two made-up ranks. ``segment_sum`` appends the rank's sums over segments to
    ``local_sums``, and returns the next item of ``global_sums``, the sums over both ranks' tokens. After the last item,
    ``segment_sum`` returns the rank's sums."""

    def __init__(self, global_sums: list[Tensor]):
        self.counts, self.global_sums, self.local_sums = dict[str, Tensor](), iter(global_sums), list[Tensor]()

    def segment_sum(self, rank_sums: Tensor) -> Tensor:
        self.local_sums.append(rank_sums)
        return next(self.global_sums, rank_sums)


def check_over_ranks(
    measure: Measure, kind: str, field_names: frozenset[str], field_kinds: Mapping[str, Field]
) -> None:
    """ValueError if the values of a user's loss or metric change when two ranks share the made-up tokens. ``kind``:
    "loss" or "metric", for the error."""
    if measure.is_builtin or measure.scope != "segment":
        return
    check_key = "ranks", measure.unit, field_names
    if not shared_result(
        measure, check_key, field_kinds, lambda sample: has_rank_independent_values(measure, sample, field_names)
    ):
        raise ValueError(
            f"{kind} {measure.label} has other values where a segment's tokens lie on two ranks: it puts tokens "
            "together by other means than batch.segment_sum, segment_mean and segment_count, and these alone are "
            "summed over ranks; use these, or leave out parallel=TokenParallel(...)"
        )


def has_rank_independent_values(measure: Measure, sample: MadeUpTokens, field_names: frozenset[str]) -> bool:
    """True if the function of ``measure`` has the same values on two ranks as on one rank with all tokens. The two
    ranks add up their sums over segments."""

    def values_of(piece: slice, global_sums: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        fields, rank_sums = sample.fields_of(piece), RankLocalSums(global_sums)
        fields = {name: fields[name] for name in fields.keys() & field_names}
        batch = Batch(fields, sample.target[piece], NUM_SEGMENTS, sample.vocab, rank_sums)
        stats = Stats({name: value[piece] for name, value in sample.stats.items()})
        return measure.values(stats, batch, sample.tensors).detach(), rank_sums.local_sums

    try:
        values_at_once, segment_sums = values_of(ALL_TOKENS, [])
    except Exception:  # with ``check=False`` a function need not run on made-up tokens
        return True
    values_by_rank, local_sums = zip(*(values_of(piece, segment_sums) for piece in RANK_PIECES), strict=True)
    if not all(len(sums_of_rank) == len(segment_sums) for sums_of_rank in local_sums):
        return False
    if measure.unit == "token":
        values_at_once, values_by_rank = values_at_once[sample.mask], (torch.cat(values_by_rank)[sample.mask],)
    has_equal_sums = all(
        are_close(sum_of_all, first_sums + second_sums)
        for sum_of_all, first_sums, second_sums in zip(segment_sums, *local_sums, strict=True)
    )
    return has_equal_sums and all(are_close(values_at_once, values_of_rank) for values_of_rank in values_by_rank)
