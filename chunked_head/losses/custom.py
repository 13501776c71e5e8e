"""A loss of the user's own."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Unpack, overload

from torch import Tensor

from ..graph.breaks import breaks_graph
from ..options import choice
from .base import DENSE, FIELDS, STATISTICS, Field, Losses, Scope, Summand, SummandOptions, Teacher, Unit, make
from .closures import Function, frozen, known_result, remember
from .scope_check import checked
from .synthetic import Reads

TEACHER_FIELDS = ("teacher_logits", "teacher_hidden", "teacher_weight", "teacher_bias")
ALWAYS = ("logprob", "lse")


class CustomOptions(SummandOptions, total=False):
    """Keywords of ``custom``, for its types alone."""

    needs: Iterable[str] | None
    fields: Mapping[str, Field | str] | Iterable[str] | None
    unit: Unit
    compiled: bool
    reads_target: bool | None
    check: bool
    teacher: Teacher
    tensors: Mapping[str, Tensor]
    options: Mapping[str, Any]


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
    compiled: bool = True,
    reads_target: bool | None = None,
    check: bool = True,
    **summand: Any,
) -> Losses | Callable[[Function], Losses]:
    """A loss from ``function(stats, batch) -> values``: unreduced, one value per ``unit``.

    ``stats`` are those of ``chunked_head.loss_stats.Stats``, ``batch`` is a ``chunked_head.batch.Batch``; gradients are
    autograd's, to the statistics alone. Masks, weights, denominators and coefficients are applied to the values.

    ``scope``: ``"token"`` where a token's value depends on nothing but its own statistics and fields, so that it may be
    computed on any slice of the tokens; ``"segment"`` where it needs other tokens (``batch.segment_sum`` and the like):
    then all statistics come first and logits are computed twice. ``compiled=False`` where ``torch.compile`` cannot take
    the function.

    The function runs here once and again, on some made-up tokens: which statistics (``needs``) and fields it reads is
    found out, and with ``scope="token"`` values and gradients of the whole are compared with those of unequal pieces.
    Fields of your own are declared: ``fields={"my_weights": "token"}``, or a ``losses.Field`` where they are not
    floating or have dimensions beside the kind's; fields read by ``batch.get`` or after ``in`` are optional.
    ``check=False`` leaves all this out and takes ``needs``, ``fields`` (known ones by name) and ``reads_target`` as
    they are given.

    Functions of the same code that close over equal numbers and strings are one to the compiler, so that a loss may be
    made anew at every step; such values are read here, once. Tensors that are closed over are not sliced: pass fields.

        @losses.custom(scope="token")
        def unlikelihood(stats, batch):
            return -torch.log1p(-stats.logprob.exp().clamp(max=0.999))

    Made before a function that ``torch.compile`` takes whole, and not in it: there this call breaks the graph.
    ``summand``: ``SummandOptions``, and ``tensors=`` and ``options=``, which the function gets as keyword arguments.
    """
    if function is None:
        return lambda decorated: custom(
            decorated, scope=scope, needs=needs, fields=fields, unit=unit, name=name, compiled=compiled,
            reads_target=reads_target, check=check, **summand,
        )  # fmt: skip
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
    wanted = frozenset(needs or ())
    if unknown := sorted(wanted - {*ALWAYS, *STATISTICS, *DENSE}):
        raise ValueError(f"needs of {where}: there is no statistic {unknown[0]!r}")
    for option, value in summand.get("options", {}).items():
        if type(value).__hash__ is None:
            raise TypeError(f"option {option!r} of {where} must be hashable, got {value!r}")
    function, identity = frozen(function)
    reads = Reads(required=set(declared), statistics=set(wanted), target=reads_target is not False)
    if check:
        question = Summand("custom", function, unit=unit, scope=scope, name=name, **_functional(summand))
        key = None
        if identity is not None and not question.tensors:
            key = (identity, tuple(sorted(question.options.items())), scope, unit, tuple(sorted(extra.items())))
        found = known_result(key)
        if found is None:
            found = checked(where, question, extra)
            remember(key, found)
        if found.target and reads_target is False:
            raise ValueError(f"{where} reads the target, in stats.logprob or batch.target: not reads_target=False")
        reads = Reads(
            required=found.required,
            optional=found.optional | (set(declared) - found.required),
            statistics=found.statistics | wanted,
            target=found.target if reads_target is None else reads_target,
        )
    required, optional = set(reads.required), set(reads.optional)
    if "topk_logprobs" in reads.statistics:
        required.add("teacher_ids")
    if "weighted_sum" in reads.statistics and "class_weights" not in summand.get("tensors", {}):
        raise ValueError(f'{where} reads stats.weighted_sum: pass the weights, tensors={{"class_weights": ...}}')
    if reads.statistics & set(DENSE):
        optional |= set(TEACHER_FIELDS)  # which of them, the call decides
        summand.setdefault("teacher", Teacher())
        if "jsd" in reads.statistics and summand["teacher"].beta is None:
            raise ValueError(
                f"{where} reads stats.jsd: pass teacher=Teacher(beta=...), the teacher's part of the mixture"
            )
    return make(
        "custom",
        function,
        needs=frozenset(reads.statistics) - set(ALWAYS),
        fields=tuple(sorted(required)),
        optional_fields=tuple(sorted(optional - required)),
        extra_fields=extra,
        scope=scope,
        unit=unit,
        name=name,
        compiled=compiled,
        reads_target=reads.target,
        **summand,
    )


def _declared(
    where: str, fields: Mapping[str, Field | str] | Iterable[str] | None
) -> tuple[tuple[str, ...], dict[str, Field]]:
    """Names of all fields given, and what those are that FIELDS does not know."""
    if isinstance(fields, str):
        raise TypeError(f"fields of {where} must be a mapping or several names, got {fields!r}")
    if not isinstance(fields, Mapping):
        fields = {name: FIELDS.get(name, "") for name in fields or ()}
    extra: dict[str, Field] = {}
    for name, known in fields.items():
        kind = known if isinstance(known, Field) else Field(known)  # type: ignore[arg-type]
        if kind.kind not in ("token", "row", "segment", "pair", "constant"):
            raise ValueError(
                f"field {name!r} of {where} must be declared as one of 'token', 'row', 'segment', 'pair', 'constant' "
                f"or a Field, got {kind.kind!r}"
            )
        if name not in FIELDS:
            extra[name] = kind
        elif kind.kind != FIELDS[name].kind or (isinstance(known, Field) and known != FIELDS[name]):
            raise ValueError(f"field {name!r} of {where} is a known one, {FIELDS[name]}, and cannot be another")
    return tuple(fields), extra


def _functional(summand: Mapping[str, Any]) -> dict[str, Any]:
    return {key: summand[key] for key in ("options", "tensors") if key in summand}
