"""``Losses``, a sum of losses with coefficients; ``Summand``, one loss; ``Measure``, the base of losses and metrics.

Functions that users call return ``Losses``: ``losses.cross_entropy() + 1e-4 * losses.z_loss()``. No loss has a kernel
of its own. Kernels compute the statistics that a loss ``needs``. Autograd derives the loss by these statistics.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, Literal, NamedTuple, ParamSpec, Self, TypedDict, TypeVar

import torch
from torch import Tensor

from ..core import checks
from ..core.divergences import DIVERGENCES
from ..core.memory import Cache
from ..core.records import VocabularySum
from ..core.statistics import WORDS

Kind = Literal["token", "row", "segment", "pair", "constant", "kept"]
Unit = Literal["token", "segment", "pair"]
Scope = Literal["token", "segment"]


class Field(NamedTuple):
    """Kind and type of a field of ``batch``, a call's tensors by name.

    Kinds: ``token``: entry i belongs to target i, also under ``shift``. ``row``: entry i belongs to hidden state i.
    ``segment``: ``[num_segments, ...]``. ``pair``: ``[pairs, ...]``. ``constant``: of any shape, for all tokens.
    ``kept``: sets of ids to which tokens' softmaxes are restricted; losses do not read these fields.
    """

    kind: Kind
    type: Literal["float", "int", "bool"] = "float"  # of the field's elements
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

KEPT_FIELDS = ("kept_ids", "kept_offsets", "candidate_bias")  # fields of kind "kept"
TEACHER_FIELDS = ("teacher_logits", "teacher_hidden", "teacher_weight", "teacher_bias")  # of a dense teacher
STATISTICS = WORDS  # names of statistics that a loss may need besides ``logprob`` and ``lse``, which every call has
DENSE_STATISTICS = (*DIVERGENCES, "teacher_argmax")  # names of statistics of a dense teacher


class Teacher(NamedTuple):
    """Options that turn the logits of a dense teacher into the teacher's distribution ``q``."""

    temperature: float | None = None  # None: the loss's temperature
    logit_scale: float = 1.0  # factor of the teacher's logits
    softcap: float | None = None  # bound of the teacher's logits by tanh
    beta: float | None = None  # weight of ``q`` in the Jensen-Shannon divergence; None for other losses


class SummandOptions(TypedDict, total=False):
    """Options of every loss. If an option is None, the call's argument of the same name decides.

    ``temperature`` divides the logits before the loss's softmax. ``token_weights`` multiply the tokens' values, and do
    not change the denominator: a tensor of target's shape, or the name of a token field of ``batch``. ``normalizer`` is
    the denominator for ``reduction="mean"``: a number, a 0-d tensor, or the name of a constant field. ``name`` is the
    key of the loss in ``out.parts``; None: the name of the function that made the loss.
    """

    temperature: float | None
    token_weights: Tensor | str | None
    normalizer: float | Tensor | str | None
    reduction: str | None
    name: str | None


SUMMAND_OPTION_NAMES = tuple(SummandOptions.__annotations__)
PACKAGE = __name__.rpartition(".")[0] + "."  # "chunked_head.losses."
LIBRARY = __name__.partition(".")[0] + "."  # "chunked_head."


def is_library(function: Any) -> bool:
    """True for a function that this library defines at module level. Such a function is never freed."""
    is_named = type(function) is FunctionType and "<" not in function.__qualname__
    return is_named and str(function.__globals__.get("__name__")).startswith(LIBRARY)


@dataclass(frozen=True, eq=False, repr=False)
class Measure:
    """A loss or a metric of a call: ``function(stats, batch, **options, **tensors)`` returns values, one per unit."""

    kind: str  # name of the function that made it, such as "grpo"
    function: Callable[..., Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of ``function``
    needs: frozenset[str] = frozenset()  # names of statistics
    fields: Collection[str] = ()  # names of required fields; a tuple
    optional_fields: tuple[str, ...] = ()  # names of optional fields
    extra_fields: Mapping[str, Field] = field(default_factory=dict)  # fields that FIELDS does not list
    scope: Scope = "token"  # "token": a value depends on its own token alone; "segment": on other tokens too
    unit: Unit = "token"  # what has one value: a token, a segment or a pair
    reads_target: bool = True
    temperature: float | None = None  # None: the call's temperature
    name: str | None = None  # name that the user chose
    sums: Mapping[str, VocabularySum] = field(default_factory=dict, kw_only=True)  # by the name of the statistic

    label: str = field(init=False, repr=False)  # the user's name, else the kind
    width: int = field(init=False, repr=False)  # number of values per token; 0 for values of other units

    def __post_init__(self) -> None:
        # the call refuses a name of another type, since it knows which loss or metric has the name
        object.__setattr__(self, "label", self.name if isinstance(self.name, str) and self.name else self.kind)
        object.__setattr__(self, "width", int(self.unit == "token"))

    @property
    def text(self) -> str:
        """Source text of a function call that makes this measure, such as "grpo(clip_high=0.28)". Returns the label if
        no function of ``chunked_head.losses`` or ``metrics`` made the measure."""
        factory, args, options = vars(self).get("origin", (None, (), {}))
        if factory is None:
            return self.label
        defaults = {name: parameter.default for name, parameter in inspect.signature(factory).parameters.items()}
        passed_names = [
            name
            for name, value in options.items()
            if isinstance(value, Tensor) or name not in defaults or value != defaults[name]
        ]
        arguments = [*map(value_in_words, args), *[f"{name}={value_in_words(options[name])}" for name in passed_names]]
        return f"{factory.__name__}({', '.join(arguments)})"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.text})"

    @functools.cached_property
    def key_and_numbers(self) -> tuple[Hashable, tuple[float, ...]]:
        """Returns a key of ``function`` and ``options``, and the tuple of all floats in ``options``. The key has no
        floats: compiled code is found by the key and takes the floats as arguments. Returns None and () for a user's
        function, and for options that are not plain values."""
        numbers: list[float] = []
        values_key = split_numbers(tuple(self.options.values()), numbers) if is_library(self.function) else None
        return (None, ()) if values_key is None else ((self.function, tuple(self.options), values_key), tuple(numbers))

    @functools.cached_property
    def is_builtin(self) -> bool:
        """True for a function of the library: it reads its arguments only. A user's function may read anything, so no
        cache that outlives a call depends on the results of a user's function."""
        return self.key_and_numbers[0] is not None

    def with_numbers(self, numbers: Iterator[Any]) -> Self:
        """A copy. In its options, items of ``numbers`` (floats or 0-d tensors) replace all floats, in order."""
        return replace(self, options={name: join_numbers(value, numbers) for name, value in self.options.items()})

    @functools.cached_property
    def number_key(self) -> tuple:
        """A key of numbers that ``Summand.signature`` does not contain: floats of the options, temperature, options of
        the teacher, and numbers of the sums."""
        _, numbers = self.key_and_numbers
        teacher, sum_numbers = getattr(self, "teacher", None), [vocab_sum.numbers for vocab_sum in self.sums.values()]
        return numbers, self.temperature, teacher, *sum_numbers

    @property
    def inputs_key(self) -> tuple:
        """A key of the measure's name, of the fields, statistics and sums that the function reads, of the scope, of
        ``reads_target``, and of the temperature's type."""
        fields = self.fields, self.optional_fields, tuple(self.extra_fields.items())
        functions_by_name = tuple([(name, vocab_sum.function) for name, vocab_sum in self.sums.items()])
        return (
            self.name or self.kind,
            fields,
            self.needs,
            functions_by_name,
            self.scope,
            self.reads_target,
            type(self.temperature),
        )

    def values(self, stats: Any, batch: Any, tensors: Mapping[str, Tensor] | None = None) -> Tensor:
        return self.function(stats, batch, **self.options, **(tensors or {}))


@dataclass(frozen=True, eq=False, repr=False)
class Summand(Measure):
    """One loss of a sum of losses. ``function`` returns unreduced values."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # tensors [vocab], by argument of ``function``
    is_separable: bool = True  # for scope "segment": each value depends on the tokens of one segment or pair only
    teacher: Teacher | None = None  # None without a dense teacher
    # a function (batch, **tensors) -> [n] whose sum is the default denominator; None: each token counts 1
    denominator_terms_of: Callable[..., Tensor] | None = None
    reads_only_teacher_ids: bool = False  # the function reads logits of ``teacher_ids`` up to a constant, and no lse
    token_weights: Tensor | str | None = None
    normalizer: float | Tensor | str | None = None  # denominator, or name of a field; None: the call's
    reduction: str | None = None  # "mean" or "sum"; None: the call's

    def __post_init__(self) -> None:
        super().__post_init__()
        missing_names = [name for name in sorted(self.needs) if name in DIVERGENCES and name not in self.sums]
        if missing_names:
            numbers = () if self.teacher is None or self.teacher.beta is None else (self.teacher.beta,)
            missing_sums = {
                name: VocabularySum(DIVERGENCES[name], numbers[: DIVERGENCES[name].numbers]) for name in missing_names
            }
            object.__setattr__(self, "sums", {**missing_sums, **self.sums})

    @property
    def key(self) -> tuple:
        """A key of the code that is compiled. Summands of equal keys share the code."""
        teacher_key = None if self.teacher is None else split_numbers(self.teacher, [])
        return self.key_and_numbers[0], self.unit, self.scope, self.reads_target, tuple(self.tensors), teacher_key

    @functools.cached_property
    def signature(self) -> Hashable:
        """A key. Summands of equal signatures differ at most in the values of numbers and tensors."""
        weights_key = type(self.token_weights) if isinstance(self.token_weights, Tensor) else self.token_weights
        normalizer_key: Hashable = self.normalizer
        if isinstance(normalizer_key, Tensor):
            normalizer_key = (normalizer_key.shape, normalizer_key.dtype, normalizer_key.device)
        elif normalizer_key is not None and not isinstance(normalizer_key, str):
            normalizer_key = "a number"
        further_key = self.kind, self.is_separable, self.denominator_terms_of, self.reads_only_teacher_ids
        return self.key, self.inputs_key, self.reduction, weights_key, normalizer_key, further_key


@dataclass(frozen=True, eq=False, repr=False)
class Losses:
    """A sum of losses times coefficients. A coefficient is a number, or a 0-d tensor that may change at every step."""

    terms: tuple[tuple[float | Tensor, Summand], ...]  # pairs of a coefficient and a loss

    def __add__(self, addend: "Losses | Callable[..., Tensor]") -> "Losses":
        return Losses(self.terms + as_losses(addend, "a summand").terms)

    def times(self, factor: float | Tensor) -> "Losses":
        """``self * factor``, also for a tensor inside of ``torch.compile``, where ``*`` with a tensor raises."""
        if isinstance(factor, Tensor):
            checks.check_factor("the coefficient of a loss", factor)
        else:
            checks.number(None, "the coefficient of a loss", factor)
        return Losses(tuple((coefficient * factor, summand) for coefficient, summand in self.terms))

    __mul__ = __rmul__ = times

    def __radd__(self, addend: "int | Callable[..., Tensor]") -> "Losses":
        """``addend + self``. 0 is an addend too, since ``sum([...])`` begins with it."""
        return self if isinstance(addend, checks.NUMBERS) and addend == 0 else as_losses(addend, "a summand") + self

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
            sign_text = "- " if not isinstance(coefficient, Tensor) and coefficient < 0 else "+ "
            factor_in_words = value_in_words(coefficient if isinstance(coefficient, Tensor) else abs(coefficient))
            terms.append(sign_text + ("" if factor_in_words == "1" else f"{factor_in_words} * ") + summand.text)
        return f"Losses({' '.join(terms).removeprefix('+ ')})"


def value_in_words(value: Any) -> str:
    """A short text for the value of an option: the shape of a tensor, the name of a function, else its repr."""
    if isinstance(value, Tensor):
        return f"tensor{list(value.shape)}"
    return f"{value:.6g}" if type(value) is float else getattr(value, "__name__", repr(value))


# has one function, which makes a loss of a user's function; ``user.py`` imports this file and appends the function
FUNCTION_LOSS_MAKERS: list[Callable[[Callable[..., Tensor]], Losses]] = []


def as_losses(loss: Any, argument: str = "loss") -> Losses:
    """Returns ``loss`` if it is a ``Losses``, and ``custom(loss, scope="token")`` if it is a user's function. TypeError
    for anything else. ``argument``: name of the argument, for errors."""
    if isinstance(loss, Losses):
        return loss
    if getattr(loss, "__module__", "").startswith(PACKAGE):
        name = getattr(loss, "__name__", "")
        example_call = f"losses.{name}()" if name != "custom" else "losses.custom(function, scope=...)"
        raise TypeError(f"{argument} is what makes a loss, {name}, and no loss yet; call it: {example_call}")
    if not callable(loss) or isinstance(loss, type):
        raise TypeError(
            f"{argument} must be made of chunked_head.losses, got {type(loss).__name__}; a function (stats, batch) -> "
            "values is taken as well"
        )
    return FUNCTION_LOSS_MAKERS[0](loss)


FactoryArguments = ParamSpec("FactoryArguments")
FactoryResult = TypeVar("FactoryResult")
FACTORY_RESULTS: Cache[tuple, Any] = Cache(256)  # losses and metrics, by factory and arguments


def sharing_results(factory: Callable[FactoryArguments, FactoryResult]) -> Callable[FactoryArguments, FactoryResult]:
    """Wraps a function that makes losses or metrics. Calls with equal numbers, flags and strings share one result. With
    any other argument, such as a tensor, each call makes a new object."""

    def make_with_origin(*args: FactoryArguments.args, **options: FactoryArguments.kwargs) -> FactoryResult:
        losses_or_metric: FactoryResult = factory(*args, **options)
        measure = losses_or_metric.terms[0][1] if isinstance(losses_or_metric, Losses) else losses_or_metric
        vars(measure)["origin"] = factory, args, options  # no field, so that a copy with other options has no origin
        return losses_or_metric

    @functools.wraps(factory)
    def cached_factory(*args: FactoryArguments.args, **options: FactoryArguments.kwargs) -> FactoryResult:
        if torch.compiler.is_compiling():
            return factory(*args, **options)
        if not checks.PLAIN.issuperset(map(type, (*args, *options.values()))):
            return make_with_origin(*args, **options)
        result: FactoryResult = FACTORY_RESULTS.get_or_make(
            (factory, repr((args, options))), lambda: make_with_origin(*args, **options)
        )
        return result

    return cached_factory


def make(
    kind: str,  # name of the loss
    function: Callable[..., Tensor],
    summand_options: Mapping[str, Any],  # the user's ``SummandOptions``
    options: Mapping[str, Any] | None = None,  # keyword arguments of ``function``
    needs: Iterable[str] = (),  # names of statistics
    **summand_fields: Any,  # further fields of ``Summand``
) -> Losses:
    """``Losses`` of one summand. TypeError or ValueError, with the name of the loss, for wrong options."""
    checks.refuse_unknown("losses", kind, summand_options, SUMMAND_OPTION_NAMES)
    summand = Summand(kind, function, options or {}, frozenset(needs), **summand_fields, **summand_options)
    loss_name = f"losses.{kind}"
    if summand.temperature is not None:
        checks.number(loss_name, "temperature", summand.temperature, 0.0, is_open=True)
    if summand.reduction not in (None, "mean", "sum"):
        raise ValueError(
            f'reduction of {loss_name} must be "mean" or "sum" (None: the call\'s), got {summand.reduction!r}'
        )
    if summand.reduction == "sum" and summand.normalizer is not None:
        raise ValueError(f'normalizer of {loss_name} goes with reduction="mean" only; multiply the loss instead')
    if not isinstance(summand.normalizer, str):  # the name of a field
        checks.check_factor(f"normalizer of {loss_name}", summand.normalizer)
    if summand.name is not None and not isinstance(summand.name, str):
        raise TypeError(f"name of {loss_name} must be a string, got {summand.name!r}")
    token_weights = summand.token_weights
    if token_weights is not None and not isinstance(token_weights, str):
        checks.check_weights(f"token_weights of {loss_name}", token_weights)
    if token_weights is not None and summand.unit != "token":
        raise ValueError(
            f"token_weights of {loss_name} do not apply: its values are per {summand.unit}; leave them out"
        )
    return Losses(((1.0, summand),))


def split_numbers(values: tuple[Any, ...], numbers: list[float]) -> tuple[Hashable, ...] | None:
    """A key of ``values``; None unless all are plain values (floats, ints, flags, strings, None) or tuples of plain
    values. Floats are appended to ``numbers``, and the key has the type ``float`` in place of each. Other plain values
    decide the compiled code: the key has their values and types."""
    key: list[Any] = [type(values)]
    for value in values:
        value_type = type(value)
        if value_type is float:
            numbers.append(value)
            key.append(value_type)
        elif value_type in checks.PLAIN:
            key += value_type, value
        elif isinstance(value, tuple) and (nested_key := split_numbers(value, numbers)) is not None:
            key.append(nested_key)
        else:
            return None
    return tuple(key)


def join_numbers(value: Any, numbers: Iterator[Any]) -> Any:
    """A copy of ``value``. Items of ``numbers`` replace all floats, in order, also in nested tuples."""
    if type(value) is float:
        return next(numbers)
    if not isinstance(value, tuple):
        return value
    joined_items = [join_numbers(item, numbers) for item in value]
    return type(value)(*joined_items) if hasattr(value, "_fields") else tuple(joined_items)
