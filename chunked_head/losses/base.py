"""Losses: functions of per-token statistics, the fields that they read, and the reduction of their values.

A ``Summand`` is one loss; ``Losses`` is a sum of them with coefficients, and the only thing that users hold:
``losses.cross_entropy() + 1e-4 * losses.z_loss()``. A loss has no kernel: the kernels make the statistics that it
``needs`` and take the coefficients that autograd finds. ``Measure`` is what losses and metrics have in common.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, Literal, NamedTuple, ParamSpec, Self, TypedDict, TypeVar

import torch
from torch import Tensor

from ..core import checks as shared
from ..core.divergences import DIVERGENCES, Sum
from ..core.memory import Cache
from ..core.statistics import WORDS

Kind = Literal["token", "row", "segment", "pair", "constant", "kept"]
Unit = Literal["token", "segment", "pair"]
Scope = Literal["token", "segment"]


class Field(NamedTuple):
    """Kind and type of a field of ``batch``.

    ``token``: indexed like the target and moved with it by ``shift``; ``row``: indexed like the hidden states;
    ``segment``: ``[num_segments, ...]``; ``pair``: ``[pairs, ...]``; ``constant``: used as it is; ``kept``: sets of ids
    that tokens' softmaxes are over, which losses do not read.
    """

    kind: Kind
    type: Literal["float", "int", "bool"] = "float"
    trailing: int = 0  # number of dimensions after those of the kind: 1 for ``teacher_ids`` [tokens, K]


FIELDS: dict[str, Field] = {
    "mask": Field("token", "bool"),
    "nll_mask": Field("token", "bool"),
    "token_weights": Field("token"),
    "old_logprobs": Field("token"),
    "ref_logprobs": Field("token"),
    "rollout_logprobs": Field("token"),
    "advantages": Field("token"),
    "segments": Field("token", "int"),
    "documents": Field("token", "int"),
    "teacher_logits": Field("row", trailing=1),
    "teacher_hidden": Field("row", trailing=1),
    "teacher_ids": Field("row", "int", trailing=1),
    "teacher_logprobs": Field("row", trailing=1),
    "teacher_mask": Field("row", "bool", trailing=1),
    "segment_labels": Field("segment", "bool"),
    "pairs": Field("pair", "int", trailing=1),
    "pair_weights": Field("pair"),
    "kl_baseline": Field("constant"),
    "teacher_weight": Field("constant", trailing=2),
    "teacher_bias": Field("constant", trailing=1),
    "kept_ids": Field("kept", "int"),
    "kept_offsets": Field("kept", "int"),
    "candidate_bias": Field("kept"),
}

KEPT_FIELDS = ("kept_ids", "kept_offsets", "candidate_bias")
TEACHER_FIELDS = ("teacher_logits", "teacher_hidden", "teacher_weight", "teacher_bias")  # of a dense teacher
# statistics that a loss may need besides `logprob` and `lse`, which every call has
STATISTICS = WORDS
DENSE = (*DIVERGENCES, "teacher_argmax")


class Teacher(NamedTuple):
    """The dense teacher of a loss: how its logits become its distribution ``q``."""

    temperature: float | None = None  # None: the loss's temperature
    logit_scale: float = 1.0
    softcap: float | None = None
    beta: float | None = None  # weight of ``q`` in the Jensen-Shannon divergence; None for other losses


class SummandOptions(TypedDict, total=False):
    """Options of every loss. Where one is None, the call's argument holds.

    ``temperature`` divides the logits that the loss reads. ``token_weights`` multiply each token's value and do not
    enter the denominator: a tensor of target's shape, or the name of a token field of ``batch``. ``normalizer`` is the
    denominator for ``reduction="mean"``: a number, a 0-d tensor, or the name of a constant field. ``name`` is the key
    in ``out.parts``.
    """

    temperature: float | None
    token_weights: Tensor | str | None
    normalizer: float | Tensor | str | None
    reduction: str | None
    name: str | None


SUMMAND = tuple(SummandOptions.__annotations__)


PACKAGE = __name__.rpartition(".")[0] + "."
LIBRARY = __name__.partition(".")[0] + "."


def is_library(function: Any) -> bool:
    """True for a function that this library defines at module level, and that hence is never freed."""
    plain = type(function) is FunctionType and "<" not in function.__qualname__
    return plain and str(function.__globals__.get("__name__")).startswith(LIBRARY)


@dataclass(frozen=True, eq=False, repr=False)
class Measure:
    """A loss or a metric of a call: ``function(stats, batch, **options, **tensors)`` gives values, one per unit."""

    kind: str  # name of the function that made it, such as "grpo"
    function: Callable[..., Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)  # compiled code depends on all of them but floats
    needs: frozenset[str] = frozenset()
    fields: Collection[str] = ()  # a tuple
    optional_fields: tuple[str, ...] = ()
    extra_fields: Mapping[str, Field] = field(default_factory=dict)  # fields that FIELDS does not list
    scope: Scope = "token"
    unit: Unit = "token"
    reads_target: bool = True
    temperature: float | None = None
    name: str | None = None
    # sums over the vocabulary, by the name of the statistic
    sums: Mapping[str, Sum] = field(default_factory=dict, kw_only=True)

    label: str = field(init=False, repr=False)  # the user's name, else the kind
    width: int = field(init=False, repr=False)  # numbers per token, 0 for values of other units

    def __post_init__(self) -> None:
        # a name of another type is refused where the call knows its place among the losses and metrics
        object.__setattr__(self, "label", self.name if isinstance(self.name, str) and self.name else self.kind)
        object.__setattr__(self, "width", int(self.unit == "token"))

    @property
    def text(self) -> str:
        """The call of the factory that made the measure, such as "grpo(clip_high=0.28)"; its label where none did."""
        factory, args, options = vars(self).get("origin", (None, (), {}))
        if factory is None:
            return self.label
        usual = {name: parameter.default for name, parameter in inspect.signature(factory).parameters.items()}
        unusual = [n for n, v in options.items() if isinstance(v, Tensor) or n not in usual or v != usual[n]]
        arguments = [*map(text_of, args), *[f"{name}={text_of(options[name])}" for name in unusual]]
        return f"{factory.__name__}({', '.join(arguments)})"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.text})"

    @functools.cached_property
    def key_and_numbers(self) -> tuple[Hashable, tuple[float, ...]]:
        """Returns a key of the function and its options without floats, and the floats. Code is compiled for the key
        and takes the floats as arguments. For a user's function: None and ()."""
        numbers: list[float] = []
        options = split_numbers(tuple(self.options.values()), numbers) if is_library(self.function) else None
        return (None, ()) if options is None else ((self.function, tuple(self.options), options), tuple(numbers))

    @functools.cached_property
    def builtin(self) -> bool:
        """True for a function of the library, which reads its arguments only. A user's function may read anything else,
        so no cache that outlives a call depends on its results."""
        return self.key_and_numbers[0] is not None

    def with_numbers(self, numbers: Iterator[Any]) -> Self:
        """The measure with the floats of its options replaced, in order, by the next of ``numbers``: floats or tensors
        []."""
        return replace(self, options={name: join_numbers(v, numbers) for name, v in self.options.items()})

    @functools.cached_property
    def settings(self) -> tuple:
        """The floats in options, temperature, teacher and sums, which ``signature`` leaves out."""
        _, numbers = self.key_and_numbers
        teacher, sums = getattr(self, "teacher", None), [vocab_sum.numbers for vocab_sum in self.sums.values()]
        return numbers, self.temperature, teacher, *sums

    @property
    def reads(self) -> tuple:
        """A key of what the measure reads in a call: name, fields, statistics, scope, and the type of the
        temperature."""
        fields = self.fields, self.optional_fields, tuple(self.extra_fields.items())
        sums = tuple([(name, vocab_sum.function) for name, vocab_sum in self.sums.items()])
        return self.name or self.kind, fields, self.needs, sums, self.scope, self.reads_target, type(self.temperature)

    def values(self, stats: Any, batch: Any, tensors: Mapping[str, Tensor] | None = None) -> Tensor:
        return self.function(stats, batch, **self.options, **(tensors or {}))


@dataclass(frozen=True, eq=False, repr=False)
class Summand(Measure):
    """One loss of a sum of losses. Its function returns unreduced values."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # [vocab] each: inputs of compiled code
    separable: bool = True  # for scope "segment": each value depends on the tokens of one segment or pair only
    teacher: Teacher | None = None
    # (batch, **tensors) -> [n] numbers that sum up to the default denominator; None: each token counts 1
    counted: Callable[..., Tensor] | None = None
    of_columns: bool = False  # reads logits of the token's ``teacher_ids`` only, and no lse: a common constant is free
    token_weights: Tensor | str | None = None
    normalizer: float | Tensor | str | None = None
    reduction: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        missing = [name for name in sorted(self.needs) if name in DIVERGENCES and name not in self.sums]
        if missing:
            numbers = () if self.teacher is None or self.teacher.beta is None else (self.teacher.beta,)
            missing_sums = {name: Sum(DIVERGENCES[name], numbers[: DIVERGENCES[name].numbers]) for name in missing}
            object.__setattr__(self, "sums", {**missing_sums, **self.sums})

    @property
    def key(self) -> tuple:
        """A key: equal for summands that compile to the same code."""
        teacher = None if self.teacher is None else split_numbers(self.teacher, [])
        return self.key_and_numbers[0], self.unit, self.scope, self.reads_target, tuple(self.tensors), teacher

    @functools.cached_property
    def signature(self) -> Hashable:
        """A key: equal for summands that differ in numbers at most."""
        weights = type(self.token_weights) if isinstance(self.token_weights, Tensor) else self.token_weights
        normalizer: Hashable = self.normalizer
        if isinstance(normalizer, Tensor):
            normalizer = (normalizer.shape, normalizer.dtype, normalizer.device)
        elif normalizer is not None and not isinstance(normalizer, str):
            normalizer = "a number"
        how = self.kind, self.separable, self.counted, self.of_columns
        return self.key, self.reads, self.reduction, weights, normalizer, how


@dataclass(frozen=True, eq=False, repr=False)
class Losses:
    """A sum of losses with coefficients: numbers, or 0-d tensors on the device that may change from step to step."""

    terms: tuple[tuple[float | Tensor, Summand], ...]

    def __add__(self, addend: "Losses | Callable[..., Tensor]") -> "Losses":
        return Losses(self.terms + as_losses(addend, "a summand").terms)

    def times(self, factor: float | Tensor) -> "Losses":
        """``self * factor``. Inside of ``torch.compile``, where ``*`` with a tensor raises, it takes a tensor too."""
        if isinstance(factor, Tensor):
            shared.check_factor("the coefficient of a loss", factor)
        else:
            shared.number(None, "the coefficient of a loss", factor)
        return Losses(tuple((coefficient * factor, summand) for coefficient, summand in self.terms))

    __mul__ = __rmul__ = times

    def __radd__(self, addend: "int | Callable[..., Tensor]") -> "Losses":
        """``sum([...])`` begins with 0."""
        return self if isinstance(addend, shared.NUMBERS) and addend == 0 else as_losses(addend, "a summand") + self

    def __neg__(self) -> "Losses":
        return self * -1.0

    def __sub__(self, subtrahend: "Losses | Callable[..., Tensor]") -> "Losses":
        return self + -as_losses(subtrahend, "a summand")

    def __rsub__(self, minuend: "Callable[..., Tensor]") -> "Losses":
        return as_losses(minuend, "a summand") + -self

    def __truediv__(self, divisor: float) -> "Losses":
        return self * (1.0 / divisor)

    def __repr__(self) -> str:
        terms = []
        for coefficient, summand in self.terms:
            sign = "- " if not isinstance(coefficient, Tensor) and coefficient < 0 else "+ "
            size = text_of(coefficient if isinstance(coefficient, Tensor) else abs(coefficient))
            terms.append(sign + ("" if size == "1" else f"{size} * ") + summand.text)
        return f"Losses({' '.join(terms).removeprefix('+ ')})"


def text_of(value: Any) -> str:
    """A value of an option in a few characters: a tensor by its shape, a function by its name."""
    if isinstance(value, Tensor):
        return f"tensor{list(value.shape)}"
    return f"{value:.6g}" if type(value) is float else getattr(value, "__name__", repr(value))


# the function that makes a loss of a plain function: ``user.py``, which imports this file, appends ``custom``
TAKERS: list[Callable[[Callable[..., Tensor]], Losses]] = []


def as_losses(loss: Any, argument: str = "loss") -> Losses:
    """``loss`` itself if it is a ``Losses``; a plain function as ``custom(function, scope="token")``. TypeError for
    anything else."""
    if isinstance(loss, Losses):
        return loss
    if getattr(loss, "__module__", "").startswith(PACKAGE):
        name = getattr(loss, "__name__", "")
        example = f"losses.{name}()" if name != "custom" else "losses.custom(function, scope=...)"
        raise TypeError(f"{argument} is what makes a loss, {name}, and no loss yet; call it: {example}")
    if not callable(loss) or isinstance(loss, type):
        raise TypeError(
            f"{argument} must be made of chunked_head.losses, got {type(loss).__name__}; a function (stats, batch) -> "
            "values is taken as well"
        )
    return TAKERS[0](loss)


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
FACTORY_RESULTS: Cache[tuple, Any] = Cache(256)


def once(factory: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Wraps a function that makes losses or metrics. Calls with equal numbers, flags and strings return the same
    object, checked once. With any other argument, such as a tensor, each call makes a new object."""

    def noted(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
        result: Result = factory(*args, **options)
        measure = result.terms[0][1] if isinstance(result, Losses) else result
        vars(measure)["origin"] = factory, args, options  # no field: a copy with other options is of no factory
        return result

    @functools.wraps(factory)
    def cached_factory(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
        if torch.compiler.is_compiling():
            return factory(*args, **options)
        if not shared.PLAIN.issuperset(map(type, (*args, *options.values()))):
            return noted(*args, **options)
        result: Result = FACTORY_RESULTS.get_or_make((factory, repr((args, options))), lambda: noted(*args, **options))
        return result

    return cached_factory


def make(
    kind: str,
    function: Callable[..., Tensor],
    summand_options: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    needs: Iterable[str] = (),
    **traits: Any,
) -> Losses:
    """``Losses`` of one summand. ``summand_options``: the user's ``SummandOptions``. ``traits``: further fields of
    ``Summand``. TypeError or ValueError, naming the loss, for wrong options."""
    shared.refuse_unknown("losses", kind, summand_options, SUMMAND)
    summand = Summand(kind, function, options or {}, frozenset(needs), **traits, **summand_options)
    where = f"losses.{kind}"
    if summand.temperature is not None:
        shared.number(where, "temperature", summand.temperature, 0.0, open_=True)
    if summand.reduction not in (None, "mean", "sum"):
        raise ValueError(f'reduction of {where} must be "mean" or "sum" (None: the call\'s), got {summand.reduction!r}')
    if summand.reduction == "sum" and summand.normalizer is not None:
        raise ValueError(f'normalizer of {where} goes with reduction="mean" only; multiply the loss instead')
    if not isinstance(summand.normalizer, str):  # the name of a field
        shared.check_factor(f"normalizer of {where}", summand.normalizer)
    if summand.name is not None and not isinstance(summand.name, str):
        raise TypeError(f"name of {where} must be a string, got {summand.name!r}")
    weights = summand.token_weights
    if weights is not None and not isinstance(weights, str):
        shared.check_weights(f"token_weights of {where}", weights)
    if weights is not None and summand.unit != "token":
        raise ValueError(f"token_weights of {where} do not apply: its values are per {summand.unit}; leave them out")
    return Losses(((1.0, summand),))


def split_numbers(values: tuple[Any, ...], numbers: list[float]) -> tuple[Hashable, ...] | None:
    """A key of ``values``: plain values or tuples of them; None if there are others. Each float is appended to
    ``numbers``, and the key has its type instead. Strings, flags, None and ints, which choose the code, are in the key
    with their types."""
    key: list[Any] = [type(values)]
    for value in values:
        kind = type(value)
        if kind is float:
            numbers.append(value)
            key.append(kind)
        elif kind in shared.PLAIN:
            key += kind, value
        elif isinstance(value, tuple) and (nested_key := split_numbers(value, numbers)) is not None:
            key.append(nested_key)
        else:
            return None
    return tuple(key)


def join_numbers(value: Any, numbers: Iterator[Any]) -> Any:
    """``value`` with the next of ``numbers`` for each float that ``split_numbers`` replaced."""
    if type(value) is float:
        return next(numbers)
    if not isinstance(value, tuple):
        return value
    items = [join_numbers(item, numbers) for item in value]
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
