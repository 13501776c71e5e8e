"""A user's function, run on made-up tokens: what it reads, and whether its claims hold."""

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..core.private import anomalies_at, breaks_graph
from ..kernels.common.cache import Cache
from .base import DENSE, FIELDS, STATISTICS, Field, Part, Summand
from .batch import Batch, Stats

Function = Callable[..., Tensor]
Found = TypeVar("Found")
Reads = tuple[set[str], set[str], set[str]]  # names of statistics, of required and of optional fields, and "target"

PLAIN = (type(None), bool, int, complex, str, bytes, torch.dtype, torch.device, CodeType)
MOST_PARTS, DEEPEST = 64, 6  # of a function's contents that are looked into
MOST_ITEMS = 8  # of a list or dict, which may grow at every call
FOUND: Cache[Hashable, Any] = Cache(256)  # by contents of the function, and question


def contents(value: Any, depth: int = 0) -> Hashable:
    """A key of a value, or of a function with closure and defaults: equal for the same code, types and plain values. A
    float enters with its sign, a tensor with dtype, device and dimensions, other objects as themselves."""
    kind = type(value)
    if kind in PLAIN:
        return kind, value
    if kind is float:
        return kind, math.isfinite(value), (value > 0) - (value < 0)
    if isinstance(value, Tensor):
        return "tensor", value.dtype, value.device, value.dim()
    parts: tuple[Any, ...] | None = None
    if kind is FunctionType:
        cells = [None if cell == CellType() else cell.cell_contents for cell in value.__closure__ or ()]
        named = [value.__globals__.get(name) for name in value.__code__.co_names]
        tensors = [one for one in named if isinstance(one, Tensor)]
        parts = value.__code__, *cells, value.__defaults__, value.__kwdefaults__, *tensors
    elif kind is MethodType:
        parts = value.__func__, value.__self__
    elif kind is functools.partial:
        parts = value.func, value.args, value.keywords
    elif isinstance(value, tuple):
        parts = (*value,)
    elif kind is list:
        parts = (*value[:MOST_ITEMS],)
    elif kind is dict:
        parts = tuple(itertools.chain(*itertools.islice(value.items(), MOST_ITEMS)))
    if parts is not None and len(parts) <= MOST_PARTS and depth < DEEPEST:
        return weakref.ref(kind), *[contents(part, depth + 1) for part in parts]
    try:
        reference = weakref.ref(value)
        hash(reference)
        return reference
    except TypeError:  # of what has no weak reference, or no hash
        return object()  # equal to nothing


def device_of(key: Hashable) -> torch.device:
    """Device of the tensors in a key of ``contents``; else the GPU if there is work on one, else the CPU."""
    parts = [key]
    for part in parts:  # which grow
        parts += part if isinstance(part, tuple) else ()
    devices = [part for part in parts if isinstance(part, torch.device)]
    elsewhere = [device for device in devices if device.type not in ("cpu", "meta")]
    return elsewhere[0] if elsewhere else torch.device("cuda" if not devices and torch.cuda.is_initialized() else "cpu")


TOKENS, SEGMENTS, PAIRS, VOCAB, TRAILING = 24, 5, 3, 13, 4  # all different: a mix-up shows
# lengths 7, 1, 4, 8 and an empty segment; two tokens of none; segments 0 and 2 lie interleaved
SEGMENT_IDS = (0, 0, 2, 0, -1, 2, 0, 0, 2, 0, 0, 2, 1, -1, 3, 3, 3, 3, 3, -1, 3, 3, 3, -1)
MASKED = (4, 13, 19)
SHAPES = {"token": (TOKENS,), "row": (TOKENS,), "segment": (SEGMENTS,), "pair": (PAIRS,), "constant": ()}
LOSS_FIELD, METRIC_FIELD = "fields={'name': 'token'}", "extra_fields={'name': Field('token')}"
WITHOUT_GRADIENT = ("argmax", "top_logprob", "teacher_entropy")
WHOLE = slice(0, TOKENS)
PIECES = (slice(0, 1), slice(1, TOKENS))
OF_RANKS = (slice(0, 9), slice(9, TOKENS))  # segments 0 and 2 lie on both; so does the pair of them


class Synthetic:
    """Made-up statistics and fields, as a call makes them: 0 and -1 where a token does not count.

    ``tensors``: copies of those of the loss, whose vocabulary these have."""

    def __init__(
        self, tensors: Mapping[str, Tensor], extra: Mapping[str, Field], sums: Iterable[str], device: torch.device
    ):
        first = next(iter(tensors.values()), None)
        self.tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self.vocab = len(first) if first is not None and first.dim() else VOCAB
        known = {"generator": torch.Generator("cpu").manual_seed(7), "dtype": torch.float32}
        rand, randn = functools.partial(torch.rand, **known), functools.partial(torch.randn, **known)
        with torch.device("cpu"):
            mask = torch.ones(TOKENS, dtype=torch.bool).index_fill(0, torch.tensor(MASKED), False)
            target, argmax = (rand(2, TOKENS) * self.vocab).long()
            logprob = -0.1 - 3 * rand(TOKENS)
            stats = {name: 0.1 + 2 * rand(TOKENS) for name in (*STATISTICS, *DENSE, *sums)} | {
                "logprob": logprob,
                "lse": 4 * randn(TOKENS),
                "mean_logit": randn(TOKENS),
                "argmax": argmax,
                "top_logprob": logprob * 0.5,
                "topk_logprobs": rand(TOKENS, TRAILING).softmax(-1).log() - 0.2,
            }
            fields, self.per_token = {}, set[str]()
            for name, kind in (FIELDS | dict(extra)).items():
                if kind.kind == "kept":
                    continue
                drawn = randn((*SHAPES[kind.kind], *[TRAILING] * kind.trailing))
                if name in ("old_logprobs", "ref_logprobs", "rollout_logprobs"):  # near, as ratios are
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


def found_once(part: Part, about: Hashable, extra: Mapping[str, Field], find: Callable[[Synthetic], Found]) -> Found:
    """Result of ``find`` on made-up tokens, found once for equal ``contents``.

    Runs without the modes around a call, and leaves random states as they are."""
    tensors = part.tensors if isinstance(part, Summand) else {}
    key = contents((part.function, part.options, tensors))

    def run() -> Found:
        device = device_of(key)
        others, kind = ([], "cuda") if device.type == "cpu" else ([device], device.type)
        forked = torch.random.fork_rng(others, device_type=kind)
        with torch.inference_mode(False), torch.enable_grad(), forked, device:
            return find(Synthetic(tensors, extra, part.sums, device))

    found: Found = FOUND.made((key, about, tuple(part.sums), tuple(sorted(extra.items()))), run)
    return found


def same(a: Tensor, b: Tensor) -> bool:
    """True for values equal up to rounding, which is far less than one token adds to a mean over these few."""
    finite = a[a.isfinite()].abs()
    atol = 1e-4 * float(finite.max()) if len(finite) else 0.0
    return torch.allclose(a, b, rtol=1e-4, atol=atol, equal_nan=True)


# ---- a loss or a metric, when it is made


def check_pieces(where: str, part: Part, made: Synthetic) -> tuple[set[str], set[str]]:
    """The statistics and fields that a function reads; raises where its values are not one per unit or, with scope
    "token", values or gradients in two pieces are others."""
    at_once, statistics, read = run(where, part, made, WHOLE)
    pieces = [run(where, part, made, piece)[0] for piece in PIECES if part.scope == "token"]
    for what, found in at_once.items():
        if pieces and not same(found[made.mask], torch.cat([piece[what] for piece in pieces])[made.mask]):
            raise ValueError(
                f'{where} has scope="token", but its {what} on {TOKENS} made-up tokens at once and in pieces '
                "differ: a token's value depends on other tokens, and would depend on the chunk size, or the "
                'function draws random numbers or writes into what it reads. Pass scope="segment" if it needs '
                "other tokens, or compute what is common to the batch before the call and pass it as a field"
            )
    return statistics, read


@breaks_graph
def check_metric(metric: Part) -> None:
    """Raises where a user's metric is none of its scope and unit."""
    where, question = f"metrics.Metric({metric.label!r})", ("metric", metric.scope, metric.unit)
    found_once(metric, question, metric.extra_fields, lambda made: check_pieces(where, metric, made))


def checked(where: str, summand: Summand, extra: Mapping[str, Field]) -> Reads:
    """Runs the function on made-up tokens to see what it reads, and with scope "token" in two pieces, which must give
    the same values and gradients. A field without which it runs too is optional."""

    def find(made: Synthetic) -> Reads:
        statistics, read = check_pieces(where, summand, made)
        required = set[str]()
        for name in (*read, "target"):
            try:
                run(where, summand, made, WHOLE, without=name)
            except ValueError:
                required.add(name)
        return statistics, required, read - required

    return found_once(summand, (summand.scope, summand.unit), extra, find)


def run(
    where: str, part: Part, made: Synthetic, piece: slice, without: str = ""
) -> tuple[dict[str, Tensor], set[str], set[str]]:
    """Values on some tokens, and of a loss gradients of their weighted sum; the statistics and fields that were read.
    ``without``: a missing field, or the target."""
    is_loss = isinstance(part, Summand)
    leaves = {name: value[piece].detach().clone() for name, value in made.stats.items()}
    sloped = {name: leaf for name, leaf in leaves.items() if is_loss and name not in WITHOUT_GRADIENT}
    for leaf in sloped.values():
        leaf.requires_grad_()
    stats, tokens, unit = Stats(leaves), piece.stop - piece.start, part.unit
    fields = {name: value for name, value in made.fields_of(piece).items() if name != without}
    batch = Batch(fields, made.target[piece], SEGMENTS, made.vocab)
    if without == "target":
        del batch.target
    try:
        values = part.values(stats, batch, made.tensors)
        if unknown := batch.read - made.fields.keys() - {"target"}:  # by ``get`` or ``in``
            raise KeyError(f"there is no field {min(unknown)!r}")
    except Exception as error:
        if unknown := batch.read - made.fields.keys() - {"target"}:
            own = f"fields={{{min(unknown)!r}: 'token'}}"
            as_loss = f"losses.custom(function, scope={part.scope!r}, {own})"
            raise ValueError(
                f"{where} reads batch[{min(unknown)!r}], a field that is not the library's; declare it, and its kind: "
                + (as_loss if is_loss else f"metrics.Metric(name, function, {own})")
            ) from error
        reason = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise ValueError(
            f"{where} raised {type(error).__name__} on {tokens} made-up tokens, where it was run to see what it reads: "
            f"{reason}. If it cannot run on these, pass check=False with needs= and fields="
        ) from error
    numbers = "floating-point values" if sloped else "numbers"
    if not isinstance(values, Tensor) or values.is_complex() or (sloped and not values.is_floating_point()):
        got = getattr(values, "dtype", type(values).__name__)
        raise ValueError(f"{where} must return a tensor of {numbers}, got {got}")
    number, per = {"token": (tokens, "tokens"), "segment": (SEGMENTS, "num_segments"), "pair": (PAIRS, "pairs")}[unit]
    if tuple(values.shape) != (number,):
        remedy = " (values are reduced for it: leave out .sum() and .mean())" if values.dim() == 0 else ""
        if unit == "token" and values.shape == (SEGMENTS,):
            remedy = '; values per segment are unit="segment"'
        got = f"[{per}] = ({number},) here; got {tuple(values.shape)}{remedy}"
        raise ValueError(f"{where} must return one value per {unit}, {got}")
    if not sloped:
        return {"values": values.float()}, stats.read, batch.read
    if not values.requires_grad:
        raise ValueError(
            f"{where} has values without a gradient: it must depend on a statistic that is not detached. What is only "
            "to be logged is a Metric"
        )
    total = values.sum()
    if unit == "token":  # different weights: equal ones would hide a mean's share
        total = torch.where(made.mask[piece], values * made.upstream[piece], 0.0).sum()
    with anomalies_at(None):  # made-up numbers may have a nan that the caller's have not
        gradients = torch.autograd.grad(total, list(sloped.values()), allow_unused=True, materialize_grads=True)
    found = {f"gradients to stats.{name}": grad for name, grad in zip(sloped, gradients, strict=True)}
    return {"values": values.detach()} | found, stats.read, batch.read


# ---- a loss or a metric of segments, where ranks hold different tokens


class OwnSums:
    """``RankSums`` of one rank. ``own``: its sums over segments, in turn.
    ``sums``: those of all tokens, returned in their place once known."""

    def __init__(self, sums: list[Tensor]):
        self.counts, self.sums, self.own = dict[str, Tensor](), iter(sums), list[Tensor]()

    def segment_sum(self, local: Tensor) -> Tensor:
        self.own.append(local)
        return next(self.sums, local)


def check_over_ranks(part: Part, what: str, given: frozenset[str], known: Mapping[str, Field]) -> None:
    """Raises where a user's loss or metric has other values on made-up tokens that two ranks share."""
    if part.builtin or part.scope != "segment":
        return
    if not found_once(part, ("ranks", part.unit, given), known, lambda made: adds_up(part, made, given)):
        raise ValueError(
            f"{what} {part.label} has other values where a segment's tokens lie on two ranks: it puts tokens together "
            "by other means than batch.segment_sum, segment_mean and segment_count, and these alone are summed over "
            "ranks; use these, or leave out parallel=TokenParallel(...)"
        )


def adds_up(part: Part, made: Synthetic, given: frozenset[str]) -> bool:
    """True where two ranks' values, from sums over segments added up over both, are those of all tokens."""

    def values_of(piece: slice, sums: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        fields, of_rank = made.fields_of(piece), OwnSums(sums)
        fields = {name: fields[name] for name in fields.keys() & given}
        batch = Batch(fields, made.target[piece], SEGMENTS, made.vocab, of_rank)
        stats = Stats({name: value[piece] for name, value in made.stats.items()})
        values = part.values(stats, batch, made.tensors)
        return values.detach(), of_rank.own

    try:
        at_once, sums = values_of(WHOLE, [])
    except Exception:  # it cannot run on made-up tokens (check=False)
        return True
    values, own = zip(*(values_of(piece, sums) for piece in OF_RANKS), strict=True)
    if not all(len(each) == len(sums) for each in own):
        return False
    if part.unit == "token":
        at_once, values = at_once[made.mask], (torch.cat(values)[made.mask],)
    right = all(same(found, first + second) for found, first, second in zip(sums, *own, strict=True))
    return right and all(same(at_once, each) for each in values)
