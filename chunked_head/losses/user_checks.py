"""Checks of a user's function on made-up tokens: they show which statistics and fields it reads, and raise if its
values do not fit its scope and unit."""

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
from .base import DENSE, FIELDS, STATISTICS, Field, Measure, Summand
from .batch import Batch, Stats

Function = Callable[..., Tensor]
Result = TypeVar("Result")
Reads = tuple[set[str], set[str], set[str]]  # of statistics, required fields, optional ones

PLAIN = (type(None), bool, int, complex, str, bytes, torch.dtype, torch.device, CodeType)
MOST_CONTENTS, DEEPEST = 64, 6  # number of closure values and defaults that ``contents`` reads, and levels of nesting
MOST_ITEMS = 8  # items of a list or dict that ``contents`` reads; a longer one may grow at every call
RESULTS: Cache[Hashable, Any] = Cache(256)  # results of checks, by ``contents`` of the function and the check's key


def contents(value: Any, depth: int = 0) -> Hashable:
    """A key of a value, or of a function with its closure and defaults. Keys are equal for the same code, types and
    plain values. Of a float the key has sign and finiteness; of a tensor dtype, device and number of dimensions; of
    another object the object itself."""
    kind = type(value)
    if kind in PLAIN:
        return kind, value
    if kind is float:
        return kind, math.isfinite(value), (value > 0) - (value < 0)
    if isinstance(value, Tensor):
        return "tensor", value.dtype, value.device, value.dim()
    items: tuple[Any, ...] | None = None
    if kind is FunctionType:
        cells = [None if cell == CellType() else cell.cell_contents for cell in value.__closure__ or ()]
        globals_read = [value.__globals__.get(name) for name in value.__code__.co_names]
        tensors = [x for x in globals_read if isinstance(x, Tensor)]
        items = value.__code__, *cells, value.__defaults__, value.__kwdefaults__, *tensors
    elif kind is MethodType:
        items = value.__func__, value.__self__
    elif kind is functools.partial:
        items = value.func, value.args, value.keywords
    elif isinstance(value, tuple):
        items = (*value,)
    elif kind is list:
        items = (*value[:MOST_ITEMS],)
    elif kind is dict:
        items = tuple(itertools.chain(*itertools.islice(value.items(), MOST_ITEMS)))
    if items is not None and len(items) <= MOST_CONTENTS and depth < DEEPEST:
        return weakref.ref(kind), *[contents(item, depth + 1) for item in items]
    try:
        reference = weakref.ref(value)
        hash(reference)
        return reference
    except TypeError:  # an object without weak references or hash
        return object()  # a key that equals no other


def device_of(key: Hashable) -> torch.device:
    """The device of the tensors in a key of ``contents``. Without tensors: the GPU if CUDA is initialised, else the
    CPU."""
    entries = [key]
    for entry in entries:  # the loop appends to ``entries``
        entries += entry if isinstance(entry, tuple) else ()
    devices = [entry for entry in entries if isinstance(entry, torch.device)]
    elsewhere = [device for device in devices if device.type not in ("cpu", "meta")]
    return elsewhere[0] if elsewhere else torch.device("cuda" if not devices and torch.cuda.is_initialized() else "cpu")


TOKENS, SEGMENTS, PAIRS, VOCAB, TRAILING = 24, 5, 3, 13, 4  # all different, so that a wrong shape raises
# segments of 7, 1, 4, 8 and 0 tokens; four tokens of no segment; segments 0 and 2 are interleaved
SEGMENT_IDS = (0, 0, 2, 0, -1, 2, 0, 0, 2, 0, 0, 2, 1, -1, 3, 3, 3, 3, 3, -1, 3, 3, 3, -1)
MASKED = (4, 13, 19)
SHAPES = {"token": (TOKENS,), "row": (TOKENS,), "segment": (SEGMENTS,), "pair": (PAIRS,), "constant": ()}
LOSS_FIELD, METRIC_FIELD = "fields={'name': 'token'}", "extra_fields={'name': Field('token')}"
WITHOUT_GRADIENT = (*WITHOUT_SLOPE, "teacher_entropy")
WHOLE = slice(0, TOKENS)
PIECES = (slice(0, 1), slice(1, TOKENS))
OF_RANKS = (slice(0, 9), slice(9, TOKENS))  # tokens of two made-up ranks; segments 0 and 2 have tokens on both


class Synthetic:
    """Made-up statistics and fields of TOKENS tokens. As in a call they are 0 (ids -1) where a token does not count.

    ``tensors``: copies of the loss's tensors. The first one's length is the size of the made-up vocabulary."""

    def __init__(
        self, tensors: Mapping[str, Tensor], extra: Mapping[str, Field], sums: Iterable[str], device: torch.device
    ):
        first = next(iter(tensors.values()), None)
        self.tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self.vocab = len(first) if first is not None and first.dim() else VOCAB
        draw_options = {"generator": torch.Generator("cpu").manual_seed(7), "dtype": torch.float32}
        rand, randn = functools.partial(torch.rand, **draw_options), functools.partial(torch.randn, **draw_options)
        with torch.device("cpu"):
            mask = torch.ones(TOKENS, dtype=torch.bool).index_fill(0, torch.tensor(MASKED), False)
            target, argmax = (rand(2, TOKENS) * self.vocab).long()
            logprob = -0.1 - 3 * rand(TOKENS)
            stats = {name: 0.1 + 2 * rand(TOKENS) for name in (*STATISTICS, *DENSE, *sums)} | {
                "logprob": logprob,
                "lse": 4 * randn(TOKENS),
                "mean_logit": randn(TOKENS),
                "argmax": argmax,
                **{name: logprob * 0.5 for name in STATISTICS if name.endswith("_logprob")},
                "topk_logprobs": rand(TOKENS, TRAILING).softmax(-1).log() - 0.2,
            }
            fields, self.per_token = {}, set[str]()
            for name, kind in (FIELDS | dict(extra)).items():
                if kind.kind == "kept":
                    continue
                drawn = randn((*SHAPES[kind.kind], *[TRAILING] * kind.trailing))
                if name in ("old_logprobs", "ref_logprobs", "rollout_logprobs"):  # ratios are near 1
                    drawn = logprob + 0.3 * drawn
                if kind.kind in ("token", "row"):
                    self.per_token.add(name)
                    drawn[~mask] = 0
                fields[name] = {"float": drawn, "bool": drawn > 0, "int": (drawn > 0).long()}[kind.type]
            fields["segments"] = fields["documents"] = torch.tensor(SEGMENT_IDS)
            fields["pairs"] = torch.tensor([[0, 1], [2, 3], [3, 0]])
            for value in stats.values():
                value[~mask] = 0
        self.stats = {name: value.to(device) for name, value in stats.items()}
        self.fields = {name: value.to(device) for name, value in fields.items()}
        self.mask, self.target = mask.to(device), torch.where(mask, target, -1).to(device)
        self.upstream = (rand(TOKENS, device="cpu") + 0.5).to(device)

    def fields_of(self, piece: slice) -> dict[str, Tensor]:
        return {name: value[piece] if name in self.per_token else value for name, value in self.fields.items()}


def result_once(
    measure: Measure, about: Hashable, extra: Mapping[str, Field], find: Callable[[Synthetic], Result]
) -> Result:
    """The result of ``find`` on made-up tokens, cached by ``about`` and ``contents`` of the function and its options.

    Modes around the call (inference mode, no_grad, a default device) do not reach ``find``, and the global random
    states stay as they are."""
    tensors = measure.tensors if isinstance(measure, Summand) else {}
    key = contents((measure.function, measure.options, tensors))

    def find_apart() -> Result:
        device = device_of(key)
        devices, kind = ([], "cuda") if device.type == "cpu" else ([device], device.type)
        forked = torch.random.fork_rng(devices, device_type=kind)
        with torch.inference_mode(False), torch.enable_grad(), forked, device:
            return find(Synthetic(tensors, extra, measure.sums, device))

    result: Result = RESULTS.get_or_make((key, about, tuple(measure.sums), tuple(sorted(extra.items()))), find_apart)
    return result


def same(a: Tensor, b: Tensor) -> bool:
    """True for tensors that are equal up to rounding. One of TOKENS tokens changes a mean by far more."""
    finite = a[a.isfinite()].abs()
    atol = 1e-4 * float(finite.max()) if len(finite) else 0.0
    return torch.allclose(a, b, rtol=1e-4, atol=atol, equal_nan=True)


# ---- checks when a loss or a metric is made


def check_pieces(where: str, measure: Measure, sample: Synthetic) -> tuple[set[str], set[str]]:
    """Returns the names of the statistics and of the fields that a function reads. ValueError if it does not return one
    value per unit; or if, with scope "token", values or gradients of two pieces differ from those of all tokens at
    once."""
    at_once, statistics, read = values_on_sample(where, measure, sample, WHOLE)
    pieces = [values_on_sample(where, measure, sample, piece)[0] for piece in PIECES if measure.scope == "token"]
    for quantity, values in at_once.items():
        if pieces and not same(values[sample.mask], torch.cat([piece[quantity] for piece in pieces])[sample.mask]):
            raise ValueError(
                f'{where} has scope="token", but its {quantity} on {TOKENS} made-up tokens at once and in pieces '
                "differ: a token's value depends on other tokens, and would depend on the chunk size, or the "
                'function draws random numbers or writes into what it reads. Pass scope="segment" if it needs '
                "other tokens, or compute what is common to the batch before the call and pass it as a field"
            )
    return statistics, read


@breaks_graph
def check_metric(metric: Measure) -> None:
    """Raises ValueError if a user's metric fails ``check_pieces``."""
    where, question = f"metrics.Metric({metric.label!r})", ("metric", metric.scope, metric.unit)
    result_once(metric, question, metric.extra_fields, lambda sample: check_pieces(where, metric, sample))


def checked(where: str, summand: Summand, extra: Mapping[str, Field]) -> Reads:
    """Names of the statistics, required fields and optional fields that a loss's function reads on made-up tokens.
    A field is optional if the function also runs without it. Errors are those of ``check_pieces``."""

    def find(sample: Synthetic) -> Reads:
        statistics, read = check_pieces(where, summand, sample)
        required = set[str]()
        for name in (*read, "target"):
            try:
                values_on_sample(where, summand, sample, WHOLE, without=name)
            except ValueError:
                required.add(name)
        return statistics, required, read - required

    return result_once(summand, (summand.scope, summand.unit), extra, find)


def values_on_sample(
    where: str, measure: Measure, sample: Synthetic, piece: slice, without: str = ""
) -> tuple[dict[str, Tensor], set[str], set[str]]:
    """Runs a function on the tokens ``piece`` of a sample. Returns its values, and for a loss the gradients of their
    weighted sum, by name; then the names of the statistics and of the fields that it has read.
    ``without``: the name of a field to leave out, or "target"."""
    is_loss = isinstance(measure, Summand)
    leaves = {name: value[piece].detach().clone() for name, value in sample.stats.items()}
    sloped = {name: leaf for name, leaf in leaves.items() if is_loss and name not in WITHOUT_GRADIENT}
    for leaf in sloped.values():
        leaf.requires_grad_()
    stats, tokens, unit = Stats(leaves), piece.stop - piece.start, measure.unit
    fields = {name: value for name, value in sample.fields_of(piece).items() if name != without}
    batch = Batch(fields, sample.target[piece], SEGMENTS, sample.vocab)
    if without == "target":
        del batch.target
    try:
        values = measure.values(stats, batch, sample.tensors)
        if unknown := batch.read - sample.fields.keys() - {"target"}:  # reads by ``get`` or ``in``, which raise nothing
            raise KeyError(f"there is no field {min(unknown)!r}")
    except Exception as error:
        if unknown := batch.read - sample.fields.keys() - {"target"}:
            declaration = f"fields={{{min(unknown)!r}: 'token'}}"
            as_loss = f"losses.custom(function, scope={measure.scope!r}, {declaration})"
            raise ValueError(
                f"{where} reads batch[{min(unknown)!r}], a field that is not the library's; declare it, and its kind: "
                + (as_loss if is_loss else f"metrics.Metric(name, function, {declaration})")
            ) from error
        reason = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise ValueError(
            f"{where} raised {type(error).__name__} on {tokens} made-up tokens, where it was run to see what it reads: "
            f"{reason}. If it cannot run on these, pass check=False with needs= and fields="
        ) from error
    numbers = "floating-point values" if sloped else "numbers"
    if not isinstance(values, Tensor) or values.is_complex() or (sloped and not values.is_floating_point()):
        description = getattr(values, "dtype", type(values).__name__)
        raise ValueError(f"{where} must return a tensor of {numbers}, got {description}")
    number, per = {"token": (tokens, "tokens"), "segment": (SEGMENTS, "num_segments"), "pair": (PAIRS, "pairs")}[unit]
    if tuple(values.shape) != (number,):
        remedy = " (values are reduced for it: leave out .sum() and .mean())" if values.dim() == 0 else ""
        if unit == "token" and values.shape == (SEGMENTS,):
            remedy = '; values per segment are unit="segment"'
        description = f"[{per}] = ({number},) here; got {tuple(values.shape)}{remedy}"
        raise ValueError(f"{where} must return one value per {unit}, {description}")
    if not sloped:
        return {"values": values.float()}, stats.read, batch.read
    if not values.requires_grad:
        raise ValueError(
            f"{where} has values without a gradient: it must depend on a statistic that is not detached. What is only "
            "to be logged is a Metric"
        )
    total = values.sum()
    if unit == "token":  # with equal weights, a mean over tokens would not show
        total = torch.where(sample.mask[piece], values * sample.upstream[piece], 0.0).sum()
    with anomalies_at(None):  # made-up numbers may give nan where the caller's do not
        gradients = torch.autograd.grad(total, list(sloped.values()), allow_unused=True, materialize_grads=True)
    gradients_by_name = {f"gradients to stats.{name}": grad for name, grad in zip(sloped, gradients, strict=True)}
    return {"values": values.detach()} | gradients_by_name, stats.read, batch.read


# ---- checks of losses and metrics of segments, where ranks hold different tokens


class RankLocalSums:
    """Stand-in for ``RankSums`` on one of two made-up ranks. ``local_sums``: this rank's sums over segments, in the
    order in which the function asks for them. ``sums``: in the same order, sums over both ranks' tokens, which it
    returns; None: it returns this rank's."""

    def __init__(self, sums: list[Tensor]):
        self.counts, self.sums, self.local_sums = dict[str, Tensor](), iter(sums), list[Tensor]()

    def segment_sum(self, local: Tensor) -> Tensor:
        self.local_sums.append(local)
        return next(self.sums, local)


def check_over_ranks(
    measure: Measure, kind: str, field_names: frozenset[str], field_kinds: Mapping[str, Field]
) -> None:
    """Raises ValueError if the values of a user's loss or metric change when two ranks share the made-up tokens."""
    if measure.builtin or measure.scope != "segment":
        return
    question = "ranks", measure.unit, field_names
    if not result_once(measure, question, field_kinds, lambda sample: adds_up(measure, sample, field_names)):
        raise ValueError(
            f"{kind} {measure.label} has other values where a segment's tokens lie on two ranks: it puts tokens "
            "together by other means than batch.segment_sum, segment_mean and segment_count, and these alone are "
            "summed over ranks; use these, or leave out parallel=TokenParallel(...)"
        )


def adds_up(measure: Measure, sample: Synthetic, field_names: frozenset[str]) -> bool:
    """True where the values on two ranks, with sums over segments added over both, are those of all tokens at once."""

    def values_of(piece: slice, sums: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        fields, of_rank = sample.fields_of(piece), RankLocalSums(sums)
        fields = {name: fields[name] for name in fields.keys() & field_names}
        batch = Batch(fields, sample.target[piece], SEGMENTS, sample.vocab, of_rank)
        stats = Stats({name: value[piece] for name, value in sample.stats.items()})
        values = measure.values(stats, batch, sample.tensors)
        return values.detach(), of_rank.local_sums

    try:
        at_once, sums = values_of(WHOLE, [])
    except Exception:  # with ``check=False`` a function need not run on made-up tokens
        return True
    values, local_sums = zip(*(values_of(piece, sums) for piece in OF_RANKS), strict=True)
    if not all(len(values_of_rank) == len(sums) for values_of_rank in local_sums):
        return False
    if measure.unit == "token":
        at_once, values = at_once[sample.mask], (torch.cat(values)[sample.mask],)
    right = all(same(total, first + second) for total, first, second in zip(sums, *local_sums, strict=True))
    return right and all(same(at_once, values_of_rank) for values_of_rank in values)
