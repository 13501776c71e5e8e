"""A loss of the user's own."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MethodType
from typing import Any, Unpack, cast, overload
from weakref import WeakKeyDictionary

from torch import Tensor

from ...core.breaks import breaks_graph
from ...core.options import choice
from ..base import (
    DENSE,
    FIELDS,
    STATISTICS,
    TAKERS,
    TEACHER_FIELDS,
    Field,
    Losses,
    Scope,
    Summand,
    SummandOptions,
    Teacher,
    Unit,
    make,
)
from .checks import checked
from .closures import Function, frozen, known

ALWAYS = ("logprob", "lse")


class CustomOptions(SummandOptions, total=False):
    """Keywords of ``custom``, for its types alone."""

    needs: Iterable[str] | None
    fields: Mapping[str, Field | str] | Iterable[str] | None
    unit: Unit
    reads_target: bool | None
    check: bool
    teacher: Teacher | None
    tensors: Mapping[str, Tensor] | None
    options: Mapping[str, Any] | None


@overload
def custom(function: Function, *, scope: Scope, **options: Unpack[CustomOptions]) -> Losses: ...
@overload
def custom(
    function: None = None, *, scope: Scope, **options: Unpack[CustomOptions]
) -> Callable[[Function], Losses]: ...
@breaks_graph
def custom(
    function: Function | None = None,
    *,
    scope: Scope,
    needs: Iterable[str] | None = None,
    fields: Mapping[str, Field | str] | Iterable[str] | None = None,
    unit: Unit = "token",
    name: str | None = None,
    reads_target: bool | None = None,
    check: bool = True,
    options: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    teacher: Teacher | None = None,
    **summand: Any,
) -> Losses | Callable[[Function], Losses]:
    """A loss from ``function(stats, batch) -> values``: unreduced, one value per ``unit``.

    ``stats`` are those of ``chunked_head.core.loss_stats.Stats``, ``batch`` is a ``chunked_head.core.batch.Batch``;
    gradients are autograd's, to the statistics alone. Masks, weights, denominators and coefficients are applied to the
    values.

    ``scope``: ``"token"`` where a token's value depends on nothing but its own statistics and fields, so that it may be
    computed on any slice of the tokens; ``"segment"`` where it needs other tokens (``batch.segment_sum`` and the like):
    then all statistics come first and logits are computed twice.

    The function runs here once, on some made-up tokens with every field: which statistics (``needs``) and fields it
    reads is found out. With ``scope="token"`` it runs on two unequal pieces of them too, and values and gradients are
    compared. Fields of your own are declared: ``fields={"my_weights": "token"}``, or a ``losses.Field`` where they are
    not floating or have dimensions beside the kind's. Fields read by ``batch.get`` or after ``in`` are optional; what
    the function reads only where one of them is missing is declared by ``needs`` and ``fields``.
    ``check=False`` leaves all this out and takes ``needs``, ``fields`` (known ones by name) and ``reads_target`` as
    they are given.

    Functions of the same code that close over equal numbers and strings are one to the compiler, so that a loss may be
    made anew at every step; such values are read here, once. Tensors that are closed over are not sliced: pass fields.

        @losses.custom(scope="token")
        def unlikelihood(stats, batch):
            return -torch.log1p(-stats.logprob.exp().clamp(max=0.999))

    Made before a function that ``torch.compile`` takes whole, and not in it: there this call breaks the graph.
    ``options`` and ``tensors`` are what the function gets as keyword arguments, ``teacher`` how it sees a dense
    teacher; ``summand``: ``SummandOptions``.
    """
    if function is None:
        given: dict[str, Any] = summand | {
            "needs": needs, "fields": fields, "unit": unit, "name": name, "check": check,
            "reads_target": reads_target, "options": options, "tensors": tensors, "teacher": teacher,
        }  # fmt: skip
        return lambda decorated: custom(decorated, scope=scope, **given)
    if not callable(function):
        raise TypeError(f"losses.custom takes a function (stats, batch) -> values, got {function!r}")
    own = getattr(function, "__name__", "custom")
    name = name or ("custom" if own == "<lambda>" else own)
    where = f"losses.custom({name!r})"
    choice(where, "scope", scope, ("token", "segment"))
    choice(where, "unit", unit, ("token", "segment", "pair"))
    if unit != "token" and scope == "token":
        raise ValueError(f'{where} has values per {unit}, which need all tokens: scope="segment"')
    declared, extra = _declared(where, fields)
    statistics, required, optional = set(needs or ()), set[str](), set[str]()
    if unknown := sorted(statistics - {*ALWAYS, *STATISTICS, *DENSE}):
        raise ValueError(f"needs of {where}: there is no statistic {unknown[0]!r}")
    options, tensors = dict(options or {}), dict(tensors or {})
    for option, value in options.items():
        if type(value).__hash__ is None:
            raise TypeError(f"option {option!r} of {where} must be hashable, got {value!r}")
    function, identity = frozen(function)
    if check:
        question = Summand("custom", function, options, unit=unit, scope=scope, name=name, tensors=tensors)
        key = None
        if identity is not None and not tensors:
            key = (identity, tuple(sorted(options.items())), scope, unit, tuple(sorted(extra.items())))
        reads = known(key, lambda: checked(where, question, extra))
        if reads.target and reads_target is False:
            raise ValueError(f"{where} reads the target, in stats.logprob or batch.target: not reads_target=False")
        statistics |= reads.statistics
        required, optional = set(reads.required), reads.optional | set(declared)
        if reads_target is None:  # a branch that a field would choose may read what this one did not
            reads_target = bool(reads.target or reads.optional)
    else:
        required = set(declared)
    if "topk_logprobs" in statistics:
        required.add("teacher_ids")
    if "weighted_sum" in statistics and "class_weights" not in tensors:
        raise ValueError(f'{where} reads stats.weighted_sum: pass the weights, tensors={{"class_weights": ...}}')
    if statistics & set(DENSE):
        optional |= set(TEACHER_FIELDS)  # which of them, the call decides
        teacher = teacher or Teacher()
        if "jsd" in statistics and teacher.beta is None:
            raise ValueError(
                f"{where} reads stats.jsd: pass teacher=Teacher(beta=...), the teacher's part of the mixture"
            )
    return make(
        "custom",
        function,
        {"name": name, **summand},
        options,
        tensors=tensors,
        teacher=teacher,
        needs=statistics - set(ALWAYS),
        fields=tuple(sorted(required)),
        optional_fields=tuple(sorted(optional - required)),
        extra_fields=extra,
        scope=scope,
        alone=scope == "token",
        unit=unit,
        lasting=identity is not None,
        reads_target=reads_target is not False,
    )


# what is known of functions that were taken as they are and close over more than plain values: as long as they live,
# and without a reference to them; of methods by their object
TAKEN: "WeakKeyDictionary[Any, dict[Any, Summand]]" = WeakKeyDictionary()


@breaks_graph
def taken(given: Function) -> Losses:
    """The loss of a plain function, checked once."""
    function, identity = frozen(given)
    if identity is not None:
        return known(("taken", identity), lambda: custom(function, scope="token"))
    owner, part = (given.__self__, given.__func__) if isinstance(given, MethodType) else (given, None)
    try:
        of_owner = TAKEN.setdefault(owner, {})
    except TypeError:  # it cannot be referred to weakly, or has no hash
        of_owner = {}
    if part not in of_owner:
        ((_, summand),) = custom(given, scope="token").terms
        of_owner[part] = replace(summand, function=cast(Any, None))  # a reference to it would keep the owner alive
    return Losses(((1.0, replace(of_owner[part], function=given)),))


TAKERS.append(taken)


def _declared(
    where: str, fields: Mapping[str, Field | str] | Iterable[str] | None
) -> tuple[tuple[str, ...], dict[str, Field]]:
    """Names of all fields given, and what those are that FIELDS does not know."""
    if isinstance(fields, str):
        raise TypeError(f"fields of {where} must be a mapping or several names, got {fields!r}")
    if not isinstance(fields, Mapping):
        fields = {name: FIELDS.get(name, "") for name in fields or ()}
    extra: dict[str, Field] = {}
    for name, declared in fields.items():
        kind = declared if isinstance(declared, Field) else Field(declared)  # type: ignore[arg-type]
        if kind.kind not in ("token", "row", "segment", "pair", "constant"):
            raise ValueError(
                f"field {name!r} of {where} must be declared as one of 'token', 'row', 'segment', 'pair', 'constant' "
                f"or a Field, got {kind.kind!r}"
            )
        if name not in FIELDS:
            extra[name] = kind
        elif kind.kind != FIELDS[name].kind or (isinstance(declared, Field) and declared != FIELDS[name]):
            raise ValueError(f"field {name!r} of {where} is a known one, {FIELDS[name]}, and cannot be another")
    return tuple(fields), extra
