"""A function of the user's, run on made-up tokens: what it reads, whether its values are what it claims; and what was
found out once, known again without a reference to what the function closes over.
"""

import contextlib
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..kernels.common.cache import Cache
from .base import DENSE, FIELDS, STATISTICS, Field, Part, Summand, Unit
from .batch import Batch, Stats

Function = Callable[..., Tensor]
Result = TypeVar("Result")

PLAIN = (type(None), bool, int, complex, str, bytes, torch.dtype, torch.device, CodeType)
MOST_PARTS, DEEPEST = 64, 6  # of a function's contents that are looked into
MOST_ITEMS = 8  # of a list or dict, which may be a log that grows at every call
FOUND: Cache[Hashable, Any] = Cache(256)  # by contents of the function, and question


def found_once(function: Function, question: Hashable, find: Callable[[], Result]) -> Result:
    """Result of ``find`` for a function: found once for all of the same code over equal values."""
    found: Result = FOUND.made((contents(function), question), find)
    return found


class Same:
    """Key that equals only keys of the object itself, while it lives."""

    def __init__(self, value: Any):
        self.reference, self.address = weakref.ref(value), id(value)

    def __hash__(self) -> int:
        return self.address

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and (value := self.reference()) is not None and other.reference() is value


def contents(value: Any, depth: int = 0) -> Hashable:
    """A key of a value, of a function with its closure and defaults: equal where code and types are the same and plain
    values are equal. A float enters with its sign, a tensor with dtype, device and dimensions, an opaque object as
    itself."""
    kind = type(value)
    if kind in PLAIN:
        return kind, value
    if kind is float:
        return kind, math.isfinite(value), (value > 0) - (value < 0)
    if isinstance(value, Tensor):
        return "tensor", value.dtype, value.device, value.dim()
    parts = parts_of(value)
    if parts is None or len(parts) > MOST_PARTS or depth == DEEPEST:
        try:
            return Same(value)
        except TypeError:  # of what cannot be referred to weakly
            return object()  # equal to nothing
    return Same(kind), *[contents(part, depth + 1) for part in parts]


def parts_of(value: Any) -> tuple[Any, ...] | None:
    """All that a value consists of, None where its type is opaque."""
    kind = type(value)
    if kind is FunctionType:
        cells = [None if cell == CellType() else cell.cell_contents for cell in value.__closure__ or ()]
        named = [value.__globals__.get(name) for name in value.__code__.co_names]
        tensors = [one for one in named if isinstance(one, Tensor)]
        return value.__code__, *cells, value.__defaults__, value.__kwdefaults__, *tensors
    if kind is MethodType:
        return value.__func__, value.__self__
    if kind is functools.partial:
        return value.func, value.args, value.keywords
    if isinstance(value, tuple):
        return (*value,)
    if kind is list:
        return (*value[:MOST_ITEMS],)
    if kind is dict:
        return tuple(itertools.chain(*itertools.islice(value.items(), MOST_ITEMS)))
    return None


TOKENS, SEGMENTS, PAIRS, VOCAB, TRAILING = 24, 5, 3, 13, 4  # all different: a mix-up shows
# lengths 7, 1, 5, 9 and an empty segment; two tokens of none; segments 0 and 2 lie interleaved
SEGMENT_IDS = (0, 0, 2, 0, 2, 2, 0, 0, 2, 0, 0, 2, 1, -1, 3, 3, 3, 3, 3, 3, 3, 3, 3, -1)
MASKED = (4, 13, 19)
rand, randn = (functools.partial(draw, dtype=torch.float32) for draw in (torch.rand, torch.randn))


@dataclass
class Reads:
    """Names that a function was seen to read."""

    required: set[str] = field(default_factory=set)
    optional: set[str] = field(default_factory=set)
    statistics: set[str] = field(default_factory=set)
    target: bool = False


class RecordingStats(dict):
    def __init__(self, values: Mapping[str, Tensor], reads: Reads):
        super().__init__(values)
        self.reads = reads

    def __getitem__(self, name: str) -> Tensor:
        self.reads.statistics.add(name)
        self.reads.target |= name == "logprob"
        return super().__getitem__(name)


class RecordingBatch(Batch):
    """``get`` and ``in`` ask whether a field is there: it is optional then, read or not."""

    def __init__(self, made: Mapping[str, Tensor], target: Tensor, vocab: int, reads: Reads):
        self.made, self.reads = made, reads
        super().__init__(self, target, SEGMENTS, vocab)

    @property
    def target(self) -> Tensor:
        self.reads.target = True
        return self._target

    @target.setter
    def target(self, target: Tensor) -> None:
        self._target = target

    def __getitem__(self, name: str) -> Tensor:
        self._refuse_unknown(name)
        self.reads.required |= {name} - self.reads.optional
        return self.made[name]

    def __contains__(self, name: object) -> bool:
        self._refuse_unknown(name)
        self.reads.optional |= {str(name)} - self.reads.required
        return True

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401

    def _refuse_unknown(self, name: object) -> None:
        if name not in self.made:
            raise KeyError(f"there is no field {name!r}; declare one of your own: fields={{{name!r}: 'token'}}")

    def __iter__(self) -> Iterator[str]:
        raise TypeError("a loss names the fields that it reads: batch cannot be iterated over in losses.custom")

    def __len__(self) -> int:
        return len(self.made)


class Synthetic:
    """Made-up statistics and fields, as a call makes them: 0 and -1 where a token does not count.

    ``tensors``: those of the loss, whose vocabulary these have."""

    def __init__(self, tensors: Mapping[str, Tensor], extra: Mapping[str, Field], device: torch.device | None = None):
        first = next(iter(tensors.values()), None)
        self.vocab = len(first) if first is not None and first.dim() else VOCAB
        self.device = device or torch.device("cpu")
        # whatever torch.set_default_device says, and without a part in anyone else's random numbers
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(7)
            self._make(extra)

    def _make(self, extra: Mapping[str, Field]) -> None:
        mask = torch.ones(TOKENS, dtype=torch.bool).index_fill(0, torch.tensor(MASKED), False)
        target = torch.where(mask, torch.randint(self.vocab, (TOKENS,)), -1)
        logprob = -0.1 - 3 * rand(TOKENS)
        stats = {name: 0.1 + 2 * rand(TOKENS) for name in (*STATISTICS, *DENSE)} | {
            "logprob": logprob,
            "lse": 4 * randn(TOKENS),
            "mean_logit": randn(TOKENS),
            "argmax": torch.randint(self.vocab, (TOKENS,)),
            "top_logprob": logprob * 0.5,
            "topk_logprobs": rand(TOKENS, TRAILING).softmax(-1).log() - 0.2,
        }
        kinds = {name: kind for name, kind in (FIELDS | dict(extra)).items() if kind.kind != "kept"}
        fields = {name: self._field(kind) for name, kind in kinds.items()}
        for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs"):  # near, as ratios are
            fields[name] = logprob + 0.3 * fields[name]
        fields["segments"] = fields["documents"] = torch.tensor(SEGMENT_IDS)
        fields["pairs"] = torch.tensor([[0, 1], [2, 3], [3, 0]])
        self.per_token = {name for name, kind in kinds.items() if kind.kind in ("token", "row")}

        def clean(name: str, value: Tensor) -> Tensor:
            none = -1 if name in ("segments", "documents") else 0
            wide = mask.view(-1, *[1] * (value.dim() - 1))
            return torch.where(wide, value, torch.full_like(value, none)).to(self.device)

        self.stats = {name: clean(name, value) for name, value in stats.items()}
        self.fields = {
            name: clean(name, value) if name in self.per_token else value.to(self.device)
            for name, value in fields.items()
        }
        self.mask, self.target = mask.to(self.device), target.to(self.device)
        self.upstream = (rand(TOKENS) + 0.5).to(self.device)

    def _field(self, kind: Field) -> Tensor:
        first = {"token": (TOKENS,), "row": (TOKENS,), "segment": (SEGMENTS,), "pair": (PAIRS,), "constant": ()}
        shape = (*first[kind.kind], *(TRAILING,) * kind.trailing)
        if kind.type == "float":
            return randn(shape)
        return torch.randint(2, shape).to(torch.bool if kind.type == "bool" else torch.int64)

    def fields_of(self, piece: slice) -> dict[str, Tensor]:
        return {name: value[piece] if name in self.per_token else value for name, value in self.fields.items()}


WITHOUT_GRADIENT = ("argmax", "top_logprob", "teacher_entropy")
WHOLE = slice(0, TOKENS)
PIECES = (slice(0, 1), slice(1, TOKENS))
OF_RANKS = (slice(0, 9), slice(9, TOKENS))  # segments 0 and 2 lie on both; so does the pair of them


@contextlib.contextmanager
def by_itself(grad: bool, device: torch.device) -> Iterator[None]:
    """Context on ``device`` without the modes around a call, which leaves its random numbers as they are."""
    others, kind = ([], "cuda") if device.type == "cpu" else ([device], device.type)
    with torch.inference_mode(False), torch.set_grad_enabled(grad), torch.random.fork_rng(others, device_type=kind):
        yield


def device_of(key: Any) -> torch.device:
    """Device of the tensors in a key of ``contents``; without any the GPU if there is work on one, else the CPU."""
    parts, devices = [key], list[torch.device]()
    while parts:
        part = parts.pop()
        parts += part if isinstance(part, tuple) else ()
        devices += [part] if isinstance(part, torch.device) else []
    elsewhere = [device for device in devices if device.type not in ("cpu", "meta")]
    return elsewhere[0] if elsewhere else torch.device("cuda" if not devices and torch.cuda.is_initialized() else "cpu")


def same(a: Tensor, b: Tensor) -> bool:
    """True for values equal up to rounding; what one token adds to a mean over these few is far larger."""
    finite = a[a.isfinite()].abs()
    atol = 1e-4 * float(finite.max()) if len(finite) else 0.0
    return torch.allclose(a, b, rtol=1e-4, atol=atol, equal_nan=True)


# ---- a loss, when it is made


def checked(where: str, summand: Summand, extra: Mapping[str, Field]) -> Reads:
    """Runs the function on made-up tokens, all at once to see what it reads, and if it claims that a token's value
    depends on no other token, in two pieces, which must give the same values and gradients."""
    device = device_of(contents((summand.function, summand.options, summand.tensors)))
    with by_itself(True, device):
        made, reads = Synthetic(summand.tensors, extra, device), Reads()
        at_once = run(where, summand, made, WHOLE, reads)
        pieces = [run(where, summand, made, piece, Reads()) for piece in PIECES if summand.scope == "token"]
        for what, found in at_once.items():
            if pieces and not same(found[made.mask], torch.cat([piece[what] for piece in pieces])[made.mask]):
                raise ValueError(
                    f'{where} has scope="token", but its {what} on {TOKENS} made-up tokens at once and in pieces '
                    "differ: a token's value depends on other tokens, and would depend on the chunk size, or the "
                    'function draws random numbers or writes into what it reads. Pass scope="segment" if it needs '
                    "other tokens, or compute what is common to the batch before the call and pass it as a field"
                )
    return reads


def run(where: str, summand: Summand, made: Synthetic, piece: slice, reads: Reads) -> dict[str, Tensor]:
    """The function's values on some of the tokens, and the gradients of their weighted sum."""
    leaves = {name: value[piece].detach().clone() for name, value in made.stats.items()}
    differentiable = {name: leaf.requires_grad_() for name, leaf in leaves.items() if name not in WITHOUT_GRADIENT}
    tokens = piece.stop - piece.start
    try:
        batch = RecordingBatch(made.fields_of(piece), made.target[piece], made.vocab, reads)
        with made.device:  # what the function makes itself
            values = summand.values(Stats(RecordingStats(leaves, reads)), batch, summand.tensors)
    except Exception as error:
        reason = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise ValueError(
            f"{where} raised {type(error).__name__} on {tokens} made-up tokens, where it was run to see what it reads: "
            f"{reason}. If it cannot run on these, pass check=False with needs= and fields="
        ) from error
    check_values(where, summand.unit, values, tokens)
    total = values.sum()
    if summand.unit == "token":  # not all of one weight, which would hide what a mean gives to each
        total = torch.where(made.mask[piece], values * made.upstream[piece], 0.0).sum()
    gradients = torch.autograd.grad(total, list(differentiable.values()), allow_unused=True, materialize_grads=True)
    named = {f"gradients to stats.{name}": grad for name, grad in zip(differentiable, gradients, strict=True)}
    return {"values": values.detach()} | named


def check_values(where: str, unit: Unit, values: Any, tokens: int) -> None:
    number, per = {
        "token": (tokens, "[tokens]"), "segment": (SEGMENTS, "[num_segments]"), "pair": (PAIRS, "[pairs]"),
    }[unit]  # fmt: skip
    if not isinstance(values, Tensor):
        raise ValueError(f"{where} must return a tensor of shape {per}, got {type(values).__name__}")
    if tuple(values.shape) != (number,):
        remedy = " (values are reduced for it: leave out .sum() and .mean())" if values.dim() == 0 else ""
        if values.dim() == 1 and unit == "token" and len(values) == SEGMENTS:
            remedy = '; values per segment are unit="segment"'
        raise ValueError(
            f"{where} must return one value per {unit}, {per} = ({number},) here; got {tuple(values.shape)}{remedy}"
        )
    if not values.dtype.is_floating_point:
        raise ValueError(f"{where} must return floating-point values, got {values.dtype}")
    if not values.requires_grad:
        raise ValueError(
            f"{where} has values without a gradient: it must depend on a statistic that is not detached. What is only "
            "to be logged is a Metric"
        )


# ---- a loss or a metric of segments, where ranks hold different tokens


class RankBatch(Batch):
    """Tokens of one rank. ``own``: their sums over segments, in turn; ``sums``: those of all tokens, if known."""

    def __init__(self, made: Synthetic, piece: slice, given: frozenset[str], sums: list[Tensor]):
        fields = {name: value for name, value in made.fields_of(piece).items() if name in given}
        super().__init__(fields, made.target[piece], SEGMENTS, made.vocab)
        self.sums, self.own = sums, list[Tensor]()

    def segment_sum(self, values: Tensor, name: str = "segments") -> Tensor:
        own = super().segment_sum(values, name)
        self.own.append(own)
        return self.sums[len(self.own) - 1] if len(self.own) <= len(self.sums) else own


def check_over_ranks(part: Part, what: str, given: frozenset[str], known: Mapping[str, Field]) -> None:
    """Raises where a user's loss or metric has other values on made-up tokens that two ranks share."""
    if part.builtin or part.scope != "segment":
        return
    tensors = part.tensors if isinstance(part, Summand) else {}
    inside = contents((part.options, tensors))
    about = "ranks", part.unit, given, tuple(sorted(known.items())), inside
    device = device_of((contents(part.function), inside))
    if not found_once(part.function, about, lambda: adds_up(part, Synthetic(tensors, known, device), given, tensors)):
        raise ValueError(
            f"{what} {part.label} has other values where a segment's tokens lie on two ranks: it puts tokens together "
            "by other means than batch.segment_sum, segment_mean and segment_count, and these alone are summed over "
            "ranks; use these, or leave out parallel=TokenParallel(...)"
        )


def adds_up(part: Part, made: Synthetic, given: frozenset[str], tensors: Mapping[str, Tensor]) -> bool:
    """True where the values of two ranks are those of all tokens, with the ranks' own sums over segments added up."""

    def run(piece: slice, sums: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        batch = RankBatch(made, piece, given, sums)
        stats = Stats({name: value[piece] for name, value in made.stats.items()})
        with by_itself(False, made.device), made.device:
            return part.values(stats, batch, tensors), batch.own

    try:
        at_once, sums = run(WHOLE, [])
    except Exception:  # it cannot run on made-up tokens, as its maker may have said by check=False
        return True
    values, own = zip(*(run(piece, sums) for piece in OF_RANKS), strict=True)
    if not all(len(each) == len(sums) for each in own):
        return False
    if part.unit == "token":
        at_once, values = at_once[made.mask], (torch.cat(values)[made.mask],)
    right = all(same(found, first + second) for found, first, second in zip(sums, *own, strict=True))
    return right and all(same(at_once, each) for each in values)
